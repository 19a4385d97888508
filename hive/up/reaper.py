"""Takes the end of every child: those `hive up` started, and those it inherits because it is the sub-reaper.

One place calls `waitpid`, so no exit status is taken by the wrong reader.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable

OnEnd = Callable[[int], None]


def shell_code(status: int) -> int:
    """A wait status as a shell counts it: the exit code, or 128 + the signal's number.

    >>> shell_code(0x0300), shell_code(9)
    (3, 137)
    """
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


class Reaper:
    """Calls what was `expect`ed of a pid when it ends, `on_stranger(pid, code)` for any other child."""

    def __init__(self, on_stranger: Callable[[int, int], None]) -> None:
        self._on_stranger = on_stranger
        self._expected: dict[int, OnEnd] = {}
        self._loop = asyncio.get_running_loop()
        self._loop.add_signal_handler(signal.SIGCHLD, self.reap)

    def __repr__(self) -> str:
        return f"<Reaper {len(self._expected)} expected>"

    def expect(self, pid: int, on_end: OnEnd) -> None:
        """`on_end(code)` is called once, on the loop, never before this returns."""
        self._expected[pid] = on_end

    def reap(self) -> None:
        """Takes whatever has ended by now; one SIGCHLD may stand for many ends."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            on_end = self._expected.pop(pid, None)
            if on_end is None:
                self._on_stranger(pid, shell_code(status))
            else:
                on_end(shell_code(status))

    def close(self) -> None:
        """Leaves SIGCHLD alone from now on."""
        self._loop.remove_signal_handler(signal.SIGCHLD)
