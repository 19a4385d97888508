"""The form of results for people: aligned columns, human units, nothing a terminal would obey. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hive.terminal_text import escaped

UNKNOWN = "-"
AT_REST = frozenset({"created", "stopped", "error"})
"""Equal to `hive.domain.AT_REST`: that import would cost every command 20 ms."""
OLD_S = 60.0
"""A figure measured so long ago is shown with its age."""
STATES = ("created", "starting", "running", "pausing", "paused", "resuming", "stopping", "stopped", "error")
"""`hive.domain.AgentStatus`, for the same reason."""
PROSE_MIN = 16
"""Columns in which a sentence still says something."""
_COLOUR = re.compile(r"(\x1b\[[0-9;]{0,32}m)")


def table(
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    colour: Callable[[str, str], str] = lambda header, cell: "",  # noqa: ARG005
) -> str:
    """Columns two spaces apart, without a trailing one; just the headers where there are no rows.

    `colour`: the SGR codes (ECMA-48) of a cell under a header, empty for none.

    >>> print(table(["NAME", "STATUS"], [["alice", "running"]]))
    NAME   STATUS
    alice  running
    """
    lines = [list(headers), *([one_line(cell) for cell in row] for row in rows)]
    widths = _widths(lines)
    written = ["  ".join(map(str.ljust, headers, widths)).rstrip()]
    for line in lines[1:]:
        last = max((at for at, cell in enumerate(line) if cell), default=-1)
        cells = zip(headers, line, widths, strict=True)
        painted = [_painted(cell, "" if at == last else " " * (width - len(cell)), colour(header, cell))
                   for at, (header, cell, width) in enumerate(cells) if at <= last]  # fmt: skip
        written.append("  ".join(painted))
    return "\n".join(written)


def _widths(lines: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(*lines, strict=True)]


def _painted(cell: str, padding: str, codes: str) -> str:
    return f"\x1b[{codes}m{cell}\x1b[0m{padding}" if codes else cell + padding


def narrowed(
    headers: Sequence[str], rows: Sequence[Sequence[str]], *, columns: int, drop: Sequence[str], prose: str = ""
) -> tuple[list[str], list[list[str]]]:
    """Headers and rows of a table that is at most `columns` wide, where that can be.

    `drop`: headers of the columns to leave out, one after the other. `prose`: the column whose cells are cut, once they
    would get less than `PROSE_MIN` columns others are left out for it.

    >>> narrowed(["NAME", "RAM", "WHY"], [["alice", "90 MiB", "a request in flight"]], columns=24, drop=["RAM"],
    ...          prose="WHY")
    (['NAME', 'WHY'], [['alice', 'a request in fli…']])
    >>> narrowed(["NAME", "RAM"], [["alice", "90 MiB"]], columns=13, drop=["RAM"])
    (['NAME', 'RAM'], [['alice', '90 MiB']])
    """
    lines = [list(headers), *([one_line(cell) for cell in row] for row in rows)]
    widths = dict(zip(headers, _widths(lines), strict=True))
    kept = list(headers)

    def taken() -> int:
        least = {**widths, prose: min(widths.get(prose, 0), PROSE_MIN)}
        return sum(least[name] + 2 for name in kept) - 2

    for name in drop:
        if taken() <= columns:
            break
        kept.remove(name)
    room = columns - sum(widths[name] + 2 for name in kept if name != prose)
    cut = [
        [_cut(cell, room) if name == prose else cell for name, cell in zip(headers, line, strict=True) if name in kept]
        for line in lines
    ]
    return cut[0], cut[1:]


def _cut(text: str, room: int) -> str:
    return text if len(text) <= room else text[: max(0, room - 1)] + "…"


def fields(pairs: Sequence[tuple[str, str]]) -> str:
    """`name: value` lines, right-aligned like `systemctl status`; pairs without a value are left out.

    >>> print(fields([("Status", "running"), ("Port", ""), ("RAM", "9 MB")]))
    Status: running
       RAM: 9 MB
    """
    kept = [(name, one_line(value)) for name, value in pairs if value]
    width = max((len(name) for name, _ in kept), default=0)
    return "\n".join(f"{name:>{width}}: {value}" for name, value in kept)


def size(count: float | None) -> str:
    """Bytes for people, in powers of 1024 as `ps` and `free -h` count.

    >>> size(None), size(512), size(94371840), size(1610612736)
    ('-', '512 B', '90 MiB', '1.5 GiB')
    """
    if count is None:
        return UNKNOWN
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = 0
    while count >= 1000 and power < len(units) - 1:
        count /= 1024
        power += 1
    return f"{count:.1f} {units[power]}" if power and count < 10 else f"{count:.0f} {units[power]}"


def number(count: float | None) -> str:
    """A count; what is unknown is not 0.

    >>> number(None), number(1234567)
    ('-', '1,234,567')
    """
    return UNKNOWN if count is None else f"{count:,}"


def ram(agent: Mapping[str, Any], now: float) -> str:
    """The RAM an agent holds; with its age where it is a PSS that was not measured just now.

    >>> held = {"held_bytes": 94371840, "held_from": "pss", "held_at": 1000.0}
    >>> ram(held, 1005.0), ram(held, 1120.0), ram({**held, "held_at": None}, 1120.0)
    ('90 MiB', '90 MiB (2m ago)', '90 MiB')
    """
    shown, at = size(agent["held_bytes"]), agent["held_at"]
    return shown if at is None or now - at < OLD_S else f"{shown} ({span(now - at)} ago)"


def span(seconds: float | None) -> str:
    """A length of time, in its two largest units.

    >>> span(0.4), span(59), span(3700), span(90000), span(None)
    ('0s', '59s', '1h 1m', '1d 1h', '-')
    """
    if seconds is None:
        return UNKNOWN
    left = int(max(0.0, seconds))
    parts: list[str] = []
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        if left >= length or (unit == "s" and not parts):
            parts.append(f"{left // length}{unit}")
            left %= length
    return " ".join(parts[:2])


def ago(then: float | None, now: float) -> str:
    """Time since a Unix time, in words.

    >>> ago(100.0, 165.0), ago(None, 0.0)
    ('1m 5s ago', '-')
    """
    return UNKNOWN if then is None else f"{span(now - then)} ago"


def milliseconds(ms: float | None) -> str:
    """
    >>> milliseconds(2.53), milliseconds(1234.0), milliseconds(None)
    ('2.5 ms', '1,234 ms', '-')
    """
    if ms is None:
        return UNKNOWN
    return f"{ms:.1f} ms" if ms < 100 else f"{ms:,.0f} ms"


def status(found: str) -> str:
    """The status of an agent, to go into a sentence.

    >>> status("stopped"), status("error")
    ('stopped', 'in error')
    """
    return "in error" if found == "error" else found


def state_of(view: Mapping[str, Any]) -> str:
    """The state of an agent, with its depth of sleep.

    >>> state_of({"status": "paused", "depth": "deep"}), state_of({"status": "running", "depth": "awake"})
    ('paused (deep)', 'running')
    """
    depth = view["depth"]
    return f"{view['status']} ({depth})" if view["status"] == "paused" and depth != "awake" else str(view["status"])


def look_of(view: Mapping[str, Any]) -> str:
    """The command that says more of an agent that failed; empty where its log has nothing about it.

    >>> look_of({"name": "bob", "status": "error", "reason": "exited with 1"})
    'hive agent logs bob'
    >>> look_of({"name": "bob", "status": "error", "reason": "no such command: x"})
    ''
    """
    has_run = view["status"] == "error" and view["reason"].startswith(("exited with ", "ended"))
    return f"hive agent logs {view['name']}" if has_run else ""


def one_line(text: str) -> str:
    r"""`harmless`, and on one line: a line break in what an agent said would forge a row.

    >>> one_line("multi\nline\t1")
    'multi line 1'
    """
    return harmless(" ".join(text.split()) if "\n" in text or "\t" in text else text)


def harmless(text: str, *, colours: bool = False) -> str:
    r"""Text an agent chose, without what would steer the terminal; with `colours` those are kept.

    >>> harmless("a\x1b]0;title\x07b\nc"), harmless("\x1b[31mred\x1b[2J", colours=True), harmless("\u202eevil")
    ('a\\x1b]0;title\\x07b\nc', '\x1b[31mred\\x1b[2J', '\\u202eevil')
    """
    pieces = _COLOUR.split(text) if colours else [text]
    return "".join(piece if colours and _COLOUR.fullmatch(piece) else escaped(piece) for piece in pieces)
