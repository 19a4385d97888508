"""`hive top` in a terminal of its own, from the first picture to the terminal it leaves behind."""

from __future__ import annotations

import asyncio
import fcntl
import gc
import os
import pty
import signal
import struct
import sys
import termios
import types
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path

import pytest

from hive.errors import DependencyDown
from hive.tui import opening
from hive.tui.panes import plain
from hive.tui.snapshot import Snapshot
from hive.tui.source import Source
from tests.control.box import Box
from tests.tui import frozen

ENTER, LEAVE = b"\x1b[?1049h", b"\x1b[?1049l"


class Terminal:
    """`hive top` in it, 100 × 30. `seen`: what came out of it."""

    def __init__(self, socket: Path) -> None:
        words = [sys.executable, "-m", "hive", "top", "--socket", str(socket)]
        self.pid, self._end = pty.fork()
        if self.pid == 0:
            os.execve(words[0], words, {**os.environ, "TERM": "xterm-256color"})
        fcntl.ioctl(self._end, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
        self.seen = b""

    def until(self, text: bytes) -> None:
        """Reads on until `text` has come; fails at the end of all there is."""
        while text not in self.seen:
            try:
                self.seen += os.read(self._end, 65536)
            except OSError:
                pytest.fail(f"{text!r} is not in {self.seen[-2000:]!r}")

    def press(self, keys: bytes) -> None:
        os.write(self._end, keys)

    def ended(self) -> int:
        """Its exit code, once it has ended; what it still writes is in `seen`."""
        try:
            while more := os.read(self._end, 65536):
                self.seen += more
        except OSError:
            pass
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@contextmanager
def terminal(socket: Path) -> Iterator[Terminal]:
    it = Terminal(socket)
    try:
        yield it
    finally:
        os.close(it._end)
        try:
            os.kill(it.pid, signal.SIGKILL)
            os.waitpid(it.pid, 0)
        except (ChildProcessError, ProcessLookupError):
            pass


async def test_the_first_picture_comes_before_the_application_and_q_gives_the_terminal_back(box: Box) -> None:
    await box.create("ann")

    def look() -> None:
        with terminal(box.paths.api_socket) as top:
            top.until(b"ann")
            assert top.seen.count(ENTER) == 1, "the application was there first"
            top.until(b"Quit")
            assert top.seen.count(ENTER) == 2
            top.press(b"q")
            assert top.ended() == 0
            assert top.seen.rindex(LEAVE) > top.seen.rindex(ENTER)
            assert top.seen.rindex(b"\x1b[?25h") > top.seen.rindex(b"\x1b[?25l")
            assert top.seen.rindex(b"\x1b[?7h") > top.seen.rindex(b"\x1b[?7l")

    await asyncio.to_thread(look)


class Looking(Source):
    """Sees what it is given, or raises it."""

    def __init__(self, seen: Snapshot | BaseException) -> None:
        super().__init__([], None, uid=0, env={})
        self._seen = seen

    def look(self, shown: Collection[str] | None = None) -> Snapshot:
        if isinstance(self._seen, BaseException):
            raise self._seen
        return self._seen


def test_a_look_that_fails_leaves_the_terminal_alone() -> None:
    terminal = StringIO()
    with pytest.raises(DependencyDown):
        opening.load(Looking(DependencyDown("no Hive answers")), terminal, unicode=True)
    assert terminal.getvalue() == ""
    assert gc.isenabled()


def test_who_interrupts_the_loading_has_the_terminal_back(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(types.ModuleType):
        def __getattr__(self, name: str) -> None:
            raise KeyboardInterrupt

    terminal = StringIO()
    monkeypatch.setitem(sys.modules, "hive.tui.app", Interrupted("hive.tui.app"))
    with pytest.raises(KeyboardInterrupt):
        opening.load(Looking(frozen.look()), terminal, unicode=True)
    assert terminal.getvalue().startswith(opening.SHOW)
    assert terminal.getvalue().endswith(opening.LEAVE)
    assert gc.isenabled()


@pytest.mark.parametrize("rows", [1, 5, 12, 100])
def test_the_first_picture_has_no_more_lines_than_the_terminal(rows: int) -> None:
    whole = plain(frozen.look(), 80, unicode=True).split("\n")
    assert plain(frozen.look(), 80, unicode=True, rows=rows).split("\n") == whole[:rows]
