"""A process that kills itself (SIGKILL) at the n-th step of what it does, and one that bears such processes quickly.

A step is a callback of asyncio's loop, so every await has one before it and one after it, or something done to the
world: a file opened for writing, made, renamed or removed, a process spawned, a signal or a message sent, a socket
bound or connected. It dies *before* the step. What a child does between fork and exec are steps of its own kind.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_DONE_TO_THE_WORLD = frozenset(
    {
        "os.chmod",
        "os.chown",
        "os.kill",
        "os.mkdir",
        "os.remove",
        "os.rename",
        "os.rmdir",
        "resource.setrlimit",
        "socket.bind",
        "socket.connect",
        "subprocess.Popen",
    }
)
CHILD_LAGS_S = 0.3
"""Delay of an act of a child: on a busy host the next process is there before."""
BEGIN = "begin"
"""The order by which the fuse burns from the first step of the process on."""


class Fuse:
    """Burns from the moment it is lit, one step after the other.

    `order`: a file with `WHAT STEPS CHILD`: lit at the first `meet(WHAT)`; the process dies at step number STEPS, or,
    where that is 0, when a child it forks comes to its step number CHILD. The file is gone once the fuse is lit: the
    next process lives.
    """

    def __init__(self, order: Path) -> None:
        self._order = order
        self._pid = os.getpid()
        self._left = self._left_in_child = 0

    def meet(self, what: str) -> None:
        """Lights it if that is what the order names."""
        try:
            named, steps, child = self._order.read_text().split()
        except (FileNotFoundError, ValueError):
            return
        if named == what:
            self._order.unlink()
            self._left, self._left_in_child = int(steps), int(child)

    def step(self) -> None:
        if os.getpid() == self._pid:
            self._left -= 1
            if self._left == 0:
                os.kill(self._pid, signal.SIGKILL)
        else:
            self._left_in_child -= 1
            if self._left_in_child == 0:
                os.kill(self._pid, signal.SIGKILL)
                time.sleep(CHILD_LAGS_S)

    def install(self) -> None:
        """All of this process's steps are counted from now on; for good."""
        sys.addaudithook(self._hear)
        _before(asyncio.Handle, "_run", self.step)
        _before(signal, "pidfd_send_signal", self.step)
        for name in ("send", "sendmsg"):
            _before(socket.socket, name, self.step)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in _DONE_TO_THE_WORLD or (event == "open" and arguments[2] & _WRITES):
            self.step()


def _before(owner: Any, name: str, act: Callable[[], None]) -> None:
    real = getattr(owner, name)

    def call(*arguments: Any, **more: Any) -> Any:
        act()
        return real(*arguments, **more)

    setattr(owner, name, call)


def bear(program: Callable[[Fuse, int], object], order: Path) -> None:
    """Forks `program(fuse, watch_fd)` for each line of stdin; prints its pid, and after its end how it ended.

    Everything is imported before: a process is there in milliseconds. `watch_fd` reads its end when this one is gone.
    """
    while sys.stdin.readline():
        reads, writes = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(writes)
            _become(program, order, reads)
        os.close(reads)
        print(pid, flush=True)
        _, status = os.waitpid(pid, 0)
        os.close(writes)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _become(program: Callable[[Fuse, int], object], order: Path, watch_fd: int) -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    os.close(nothing)
    code = 1
    try:
        fuse = Fuse(order)
        fuse.install()
        fuse.meet(BEGIN)
        program(fuse, watch_fd)
        code = 0
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(code)
