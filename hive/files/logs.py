"""The lines of Hive's own services: from the journal of an installed Hive, from the file that `hive up` keeps.

Both are one stream of `ServiceLine`, oldest first; their reader need not know which it was.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from hive.errors import DependencyDown, NotPermitted
from hive.files import log_file
from hive.host import program, systemd
from hive.host.tail import TailMark, added_since, last_lines
from hive.log_lines import LEVELS, LogEntry, parse

COMPONENTS: dict[str, tuple[str, ...]] = {
    "proxy": ("hive-proxy.service",),
    "daemon": ("hive-daemon.service",),
    "sandbox": ("hive-sandbox.service",),
    "redis": ("hive-redis.service",),
    "backend": (
        "hive-inference.service",
        "hive-inference-ollama-relay.service",
        "hive-inference-vllm.service",
        "hive-inference-llama.service",
        "hive-inference-demo.service",
        "hive-model@.service",
    ),
    "jobs": ("hive-jobs.service",),
    "first-boot": ("hive-first-boot.service",),
}
"""Component to ask for → its units. Agents are not among them: their output is `hive agent logs`."""
OTHERS = ("hive-thaw.service",)
"""Shown with all of them only."""
IN_FILE = ("proxy", "daemon", "sandbox", "redis", "backend", "up")
"""Components with lines kept by `hive up`; the last is itself."""
ALL = 1 << 30
POLL_S = 0.2
JOURNALS = ("/var/log/journal", "/run/log/journal")
PIECE_BYTES = 64 * 1024
_HINT = "sudo hive logs, or let the administrator put you into the group systemd-journal (or adm)"


class ServiceLine(NamedTuple):
    """One line: its time (Unix), its component, its text."""

    at: float
    component: str
    entry: LogEntry


# --- an installed Hive -------------------------------------------------------------------------------------------


def journal_lines(components: Sequence[str], *, lines: int, follow: bool) -> Iterator[ServiceLine]:
    """The last `lines`, with `follow` all that come, from the units of these components; of all where none is named.

    Raises NotPermitted where this user may not read them, DependencyDown where no journal is kept, NotFound (there is
    no journalctl).
    """
    refuse_unreadable(JOURNALS)
    return _read_journal(command(components, lines=lines, follow=follow))


def command(components: Sequence[str], *, lines: int, follow: bool) -> list[str]:
    """
    >>> " ".join(command(["redis"], lines=5, follow=False)[3:])
    '--output=json --all --lines=5 --unit=hive-redis.service'
    """
    units = [unit for name in components or COMPONENTS for unit in COMPONENTS[name]]
    units += [] if components else OTHERS
    words = ["journalctl", "--quiet", "--no-pager", "--output=json", "--all", f"--lines={lines}"]
    # `--follow` alone shows this boot only (journalctl(1) 252).
    return [
        *words,
        *(f"--unit={unit.replace('@.', '@*.')}" for unit in units),
        *(["--follow", "--merge"] if follow else []),
    ]


def refuse_unreadable(directories: Sequence[str]) -> None:
    """journalctl shows people their own lines without a word about the system's; so the files are looked at first.

    Raises NotPermitted, DependencyDown.
    """
    found = [path for directory in directories for path in Path(directory).glob("*/system.journal")]
    if not found:
        raise DependencyDown(
            f"journald keeps no journal here: none in {' or '.join(directories)}",
            hint="Storage= in journald.conf says whether it should",
        )
    if not any(os.access(path, os.R_OK) for path in found):
        raise NotPermitted("this user may not read the lines of the system's services", hint=_HINT)


def _read_journal(words: Sequence[str]) -> Iterator[ServiceLine]:
    """The output of journalctl, entry by entry; the program is ended with its reader."""
    child, read_fd = program.begin(words)
    with open(read_fd, "rb") as output:
        try:
            other = b""
            for raw in output:
                if (said := said_of(raw)) is not None:
                    yield said
                elif not raw.startswith(b"{"):
                    other = raw
            if child.wait() != 0:
                raise systemd.error_of(words, other.decode(errors="replace"))
        finally:
            child.kill()
            child.wait()


def said_of(raw: bytes) -> ServiceLine | None:
    """One object of `journalctl --output=json`; None where it is none. A text that is no UTF-8 comes as numbers.

    >>> said_of(b'{"__REALTIME_TIMESTAMP": "2500000", "MESSAGE": [104, 105], "_SYSTEMD_UNIT": "hive-redis.service"}')
    ServiceLine(at=2.5, component='redis', entry=LogEntry(at=None, level='', event='', fields={}, text='hi'))
    """
    try:
        found: dict[str, Any] = json.loads(raw)
        at = int(found["__REALTIME_TIMESTAMP"]) / 1e6
    except (ValueError, KeyError, TypeError):
        return None
    # Of what systemd says about a unit `UNIT` names it; `_SYSTEMD_UNIT` is systemd's own then.
    component = _component_of(str(found.get("UNIT") or found.get("_SYSTEMD_UNIT") or ""))
    entry = parse(_text(found.get("MESSAGE")))
    if not entry.level and str(found.get("PRIORITY", "")).isdigit():
        entry = entry._replace(level=LEVELS.get(int(found["PRIORITY"]), ""))
    return ServiceLine(at, component, entry)


def _text(message: object) -> str:
    if isinstance(message, list):
        # One field may come several times; then it is a list of texts.
        numbers = [number for number in message if isinstance(number, int) and 0 <= number <= 255]
        return bytes(numbers).decode(errors="replace") if numbers else " ".join(map(str, message))
    return "" if message is None else str(message)


def _component_of(unit: str) -> str:
    """
    >>> _component_of("hive-inference-vllm.service"), _component_of("hive-thaw.service")
    ('backend', 'thaw')
    >>> _component_of("hive-model@qwen3-8b-f9b30c0d.service")
    'backend'
    """
    known = re.sub(r"@.+\.service$", "@.service", unit)
    named = next((name for name, units in COMPONENTS.items() if known in units), None)
    return named or unit.removeprefix("hive-").removesuffix(".service")


# --- hive up -----------------------------------------------------------------------------------------------------


def file_lines(path: Path, components: Sequence[str], *, lines: int, follow: bool) -> Iterator[ServiceLine]:
    """The same from the file of `hive up`. Raises DependencyDown where there is none, NotPermitted."""
    try:
        if not path.exists():
            raise DependencyDown(
                f"there is no {path}", hint="hive up keeps one; an older one's lines are in its terminal"
            )
        kept, mark = last_lines(path, ALL)
        before, _ = last_lines(log_file.previous(path), ALL)
    except OSError as error:
        raise NotPermitted(f"{path} cannot be read: {error.strerror}", hint="ask as the user who runs it") from None
    return _read_file(path, before + kept, mark, frozenset(components), lines, follow=follow)


def _read_file(
    path: Path, text: bytes, mark: TailMark, wanted: frozenset[str], lines: int, *, follow: bool
) -> Iterator[ServiceLine]:
    found = [said for raw in text.splitlines() if (said := _line(raw, wanted)) is not None]
    yield from islice(found, max(0, len(found) - lines), None)
    pending = b""
    while follow:
        added, mark = added_since(path, mark)
        *whole, pending = (pending + added).split(b"\n")
        yield from (said for raw in whole if (said := _line(raw, wanted)) is not None)
        if not added:
            time.sleep(POLL_S)


def _line(raw: bytes, wanted: frozenset[str]) -> ServiceLine | None:
    line = log_file.parsed(raw)
    if line is None or (wanted and line.name not in wanted):
        return None
    return ServiceLine(line.at, line.name, parse(line.text))
