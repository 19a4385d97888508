"""A page of the book as its reader follows it: its files are written, its commands typed, what it shows compared.

The rules that such a page keeps:

- a block ```` ```console ```` is typed at a terminal: a line that begins with `$ ` is a command, one that ends in a
  backslash goes on in the next line; `^C` is Ctrl-C; every other line is what the command before it prints;
- a block under a line that ends in `` `NAME`: `` is the file NAME in the directory in which the reader is;
- `…` stands for anything within a line, and alone on a line for any lines; what is shown without it came so, but for
  times, sizes, ids, ports and the like (MASKS);
- `./install.sh up` and `^C` are of a first terminal, all else of a second one;
- a block of another kind is not run, and the page says so where it matters.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.ports import free_port

ROOT = Path(__file__).parents[1]
UP = "./install.sh up"
INTERRUPT = "^C"
WITHIN_S = 90.0
"""Longest wait for the sight that a page shows, on a machine with much else to do."""
LOOKS = re.compile(r"hive (ps|status|usage|events|agent (list|show|usage|logs|messages))\b|curl .*\.hive/state")
"""Commands that change nothing: a reader who does not see yet what the page shows looks again."""
SAMPLES = ("librarian", "scribe", "watcher")
"""Agents of `hive up --demo`, called by others all the time: only that they are there is compared."""
MASKS = [
    (r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d(:\d\d)?( UTC)?", "<date>"),
    (r"\[\d\d/\w{3}/\d{4} \d\d:\d\d:\d\d\]", "<date>"),
    (r"(127\.0\.0\.1|localhost):\d+", r"\1:<port>"),
    (r"\b[0-9a-f]{8,}\b", "<id>"),
    (r"\b(pid|uid) \d+", r"\1 <number>"),
    (r"\b\d[\d,]*(\.\d+)? ms\b", "<time>"),
    (r"\b\d[\d,]*(\.\d+)? [KMGT]?i?B\b", "<size>"),
    (r"\b\d+[dhms]( \d+[dhms])?\b", "<time>"),
    (r"\b\d+(\.\d+)? s\b", "<time>"),
]
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_NAMED = re.compile(r"`([\w.-]+)`:\n\n$")


class Written(NamedTuple):
    """A file that the reader writes."""

    name: str
    content: str


class Typed(NamedTuple):
    """A command that the reader types, and the lines that the page shows for it."""

    command: str
    shown: list[str]


Step = Written | Typed


def steps_of(page: str) -> list[Step]:
    r"""The acts of the reader, in the order of the page.

    >>> steps_of("The file `a.py`:\n\n```python\npass\n```\n\n```console\n$ cat \\\n  a.py\npass\n```\n")
    [Written(name='a.py', content='pass\n'), Typed(command='cat \\\n  a.py', shown=['pass'])]
    """
    steps: list[Step] = []
    for block in _FENCE.finditer(page):
        kind, content = block[1], block[2]
        if kind == "console":
            steps += _typed(content.splitlines())
        elif (named := _NAMED.search(page[: block.start()])) is not None:
            steps.append(Written(named[1], content))
    return steps


def _typed(lines: list[str]) -> Iterator[Typed]:
    at = 0
    while at < len(lines):
        assert lines[at].startswith("$ ") or lines[at] == INTERRUPT, f"a console block begins with {lines[at]!r}"
        command = [lines[at].removeprefix("$ ")]
        at += 1
        while command[-1].endswith("\\"):
            command.append(lines[at])
            at += 1
        shown = []
        while at < len(lines) and not lines[at].startswith("$ ") and lines[at] != INTERRUPT:
            shown.append(lines[at])
            at += 1
        yield Typed("\n".join(command), shown)


def masked(line: str) -> str:
    """The line without what is another each time, and with one space between its words.

    >>> masked("scribe     running  3s  2  80 MiB"), masked("greeter  paused (light)  1m 3s  6 / 45  -  1.1 ms")
    ('scribe', 'greeter paused (light) <time> 6 / 45 - <time>')
    """
    if line.split(" ")[0] in SAMPLES:
        return line.split(" ")[0]
    for pattern, word in MASKS:
        line = re.sub(pattern, word, line)
    return " ".join(line.split())


def is_shown(shown: list[str], came: str) -> bool:
    """Whether what came is what the page shows.

    >>> is_shown(["NAME  STATUS", "…", "alice  running for 3s"], "NAME STATUS\\nzoe\\nalice running for 14s\\n")
    True
    >>> is_shown(["alice  2 requests"], "alice 3 requests"), is_shown([], "a warning")
    (False, False)
    """
    pattern = ""
    for line in shown:
        if line.strip() == "…":
            pattern += r"(?:[^\n]*\n)*"
        else:
            pattern += "[^\n]*".join(re.escape(part) for part in masked(line).split("…")) + "\n"
    lines = [masked(line) for line in came.splitlines()]
    return re.fullmatch(pattern, "".join(f"{line}\n" for line in lines)) is not None


class Reader:
    """Somebody at two terminals, in an environment of their own."""

    def __init__(self, base: Path, put: Mapping[str, str]) -> None:
        """`put`: words of the page → what stands for them here: ports and places that others may have, too."""
        self.base = base
        self._put = put
        ports = {f"HIVE_{name}": str(free_port()) for name in ("PROXY_PORT", "PROXY_INGRESS_PORT", "API_PORT")}
        self._env = {
            "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
            "HOME": str(base),
            "LANG": "C.UTF-8",
            "TZ": "UTC",
            "HIVE_STATE_DIR": str(base / "state"),
            **ports,
        }
        self._up: subprocess.Popen[bytes] | None = None
        self._up_log = base / "up.log"
        self._read = 0
        """Bytes of `_up_log` that were compared."""
        self._shell = subprocess.Popen(
            ["bash", "--noprofile", "--norc"],
            env=self._env,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            umask=0o022,
        )

    def follow(self, page: str) -> None:
        """Does all that the page says. Raises AssertionError where something else comes than it shows."""
        for word, stands in self._put.items():
            page = page.replace(word, stands)
        for step in steps_of(page):
            if isinstance(step, Written):
                self._write(step)
            elif step.command.startswith(UP):
                self.up(step.command, step.shown)
            elif step.command == INTERRUPT:
                self._interrupt(step.shown)
            else:
                self._type(step)

    def up(self, command: str = f"{UP} --backend demo", shown: list[str] | None = None) -> None:
        """`./install.sh up` in the first terminal; where this tree was not installed by it, what it comes to."""
        if not _is_installed():
            command = f"{sys.executable} -P -m hive up --demo{command.removeprefix(UP)}"
        with self._up_log.open("wb") as log:
            self._up = subprocess.Popen(
                ["bash", "-c", f"exec {command}"],
                env=self._env,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                umask=0o022,
            )
        self._comes(shown or ["…", "Hive … is up; Ctrl-C ends it", "…"], command)

    def _comes(self, shown: list[str], command: str) -> None:
        """Waits until the first terminal shows it."""
        assert self._up is not None
        until = time.monotonic() + WITHIN_S
        while not is_shown(shown, said := self._up_log.read_bytes()[self._read :].decode(errors="replace")):
            assert time.monotonic() < until, f"`{command}` shows\n{said}\nand not\n" + "\n".join(shown)
            time.sleep(0.2)
        self._read = self._up_log.stat().st_size

    def _interrupt(self, shown: list[str]) -> None:
        assert self._up is not None
        os.killpg(self._up.pid, signal.SIGINT)
        assert self._up.wait(WITHIN_S) == 0
        self._comes(shown, INTERRUPT)

    def _write(self, file: Written) -> None:
        where = Path(self._run('printf %s "$PWD"'))
        (where / file.name).write_text(file.content)
        (where / file.name).chmod(0o644)

    def _type(self, step: Typed) -> None:
        until = time.monotonic() + WITHIN_S
        came = self._run(step.command)
        while not is_shown(step.shown, came) and LOOKS.match(step.command) and time.monotonic() < until:
            time.sleep(0.5)
            came = self._run(step.command)
        assert is_shown(step.shown, came), f"`{step.command}` shows\n{came}\nand not\n" + "\n".join(step.shown)

    def _run(self, command: str) -> str:
        """The output of a command in the second terminal, whose directory and variables stay."""
        shell, mark = self._shell, f"--- {os.urandom(8).hex()} ---"
        assert shell.stdin is not None
        assert shell.stdout is not None
        shell.stdin.write(f"{{ {command}\n}} </dev/null\necho; echo '{mark}'\n".encode())
        shell.stdin.flush()
        came = b""
        while not came.endswith(f"\n{mark}\n".encode()):
            line = shell.stdout.readline()
            assert line, f"the shell ended at `{command}`: {came.decode(errors='replace')}"
            came += line
        return came.decode(errors="replace").removesuffix(f"\n{mark}\n")

    def close(self) -> None:
        """Leaves both terminals; nothing of either goes on."""
        if self._up is not None and self._up.poll() is None:
            self._up.send_signal(signal.SIGTERM)
            try:
                self._up.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(self._up.pid, signal.SIGKILL)
                self._up.wait()
        self._shell.kill()
        self._shell.wait()
        for pipe in (self._shell.stdin, self._shell.stdout):
            if pipe is not None:
                pipe.close()


def _is_installed() -> bool:
    """Whether `./install.sh up` would go on at once: it made this tree's environment of what it needs now."""
    venv = ROOT / ".venv"
    made_of = f"{venv}\n".encode() + b"".join(
        (ROOT / name).read_bytes() for name in ("pyproject.toml", "constraints.txt")
    )
    stamp = venv / "installed-run"
    is_new = stamp.exists() and stamp.read_text().strip() == hashlib.sha256(made_of).hexdigest()
    return is_new and not (venv / "unfinished").exists()


@contextmanager
def reader(put: Mapping[str, str]) -> Iterator[Reader]:
    """A reader with a directory of their own; `put` may name it as `BASE`."""
    base = Path(tempfile.mkdtemp(prefix="hive-page-", dir="/var/tmp"))
    base.chmod(0o755)
    found = Reader(base, {word: stands.replace("BASE", str(base)) for word, stands in put.items()})
    try:
        yield found
    finally:
        found.close()
        shutil.rmtree(base, ignore_errors=True)
