"""Process between a supervisor and its inference server: whichever of the three is killed, nothing of it is left.

    python -I -m hive.worker.warden LIFELINE_FD STATUS_FD GRACE_S COMMAND…

It starts COMMAND in a session of its own, with its own environment. It is the sub-reaper of all that comes of it, so
that no double fork and no setsid gets away. The tree is ended when the other end of LIFELINE_FD is closed (the
supervisor ended, or was killed), on SIGTERM, and when the server ends by itself: SIGTERM to the server's group,
GRACE_S, SIGKILL to everything left. Where the warden is killed, the kernel kills the server; the supervisor looks for
the rest. STATUS_FD gets one line: `pid N`, or `error WHY`. Its exit code is the server's, as a shell counts.

A warden without a COMMAND waits for its order, which comes through LIFELINE_FD (order.py).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Mapping, Sequence

from hive.errors import HiveError
from hive.host.parent import become_subreaper
from hive.host.process import ProcessTable, exit_code, spawn
from hive.worker.order import decode_order

LOOK_S = 0.005
"""Between two looks while the tree is being ended."""
GIVE_UP_S = 30.0
"""Longest time spent on processes that not even SIGKILL ends: they hang in the kernel."""


class Tree:
    """The server and all that came of it. `code`: the server's exit code, once it has ended."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        # Not reaped by Popen: `reap` takes the end of every child, the inherited ones too.
        self._server = spawn(command, env=environment, pdeathsig=signal.SIGKILL)
        self.pid = self._server.pid
        self.code: int | None = None
        self._is_childless = False

    def reap(self) -> None:
        """Takes whatever has ended by now."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                self._is_childless = True  # the sub-reaper of all of them has none: nothing is left
                return
            if pid == 0:
                return
            if pid == self.pid:
                self._server.returncode = os.waitstatus_to_exitcode(status)
                self.code = exit_code(self._server.returncode)

    def end(self, grace_s: float) -> None:
        """SIGTERM to the group, at most `grace_s`, SIGKILL to all that is left; returns once nothing is."""
        if self.code is None:
            self._signal_group(signal.SIGTERM)
            self._wait(grace_s)
        until = time.monotonic() + GIVE_UP_S
        # Not until a look finds no descendant: it misses one whose parent ends meanwhile.
        while not self._is_childless and time.monotonic() < until:
            for pid in self._descendants():
                _kill(pid)
            time.sleep(LOOK_S)
            self.reap()

    def _wait(self, grace_s: float) -> None:
        until = time.monotonic() + grace_s
        while self.code is None and time.monotonic() < until:
            time.sleep(LOOK_S)
            self.reap()

    def _signal_group(self, signum: int) -> None:
        try:
            os.killpg(self.pid, signum)
        except (ProcessLookupError, PermissionError):
            return

    @staticmethod
    def _descendants() -> list[int]:
        table = ProcessTable()
        below = table.with_descendants({os.getpid()}) - {os.getpid()}
        return [pid for pid in below if table.processes[pid].alive]


def _kill(pid: int) -> None:
    """A pid below us is ours until `reap` took it: no other process has it."""
    try:
        os.kill(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def watch(tree: Tree, lifeline_fd: int, wakeup_fd: int) -> None:
    """Returns once the tree is to be ended."""
    while tree.code is None:
        readable, _, _ = select.select([lifeline_fd, wakeup_fd], [], [])
        if wakeup_fd in readable and signal.SIGTERM in os.read(wakeup_fd, 64):
            return
        if lifeline_fd in readable and not os.read(lifeline_fd, 64):
            return
        tree.reap()


def wait_for_order(lifeline_fd: int, status_fd: int, grace_s: float) -> int:
    """The life of a warden that is told later what to start; 0 where nobody tells it."""
    data = bytearray()
    while (found := decode_order(bytes(data))) is None:
        if not (more := os.read(lifeline_fd, 65536)):
            return 0
        data += more
    return guard(lifeline_fd, status_fd, grace_s, *found)


def guard(
    lifeline_fd: int, status_fd: int, grace_s: float, command: Sequence[str], environment: Mapping[str, str]
) -> int:
    """Starts the server and is its warden, as the head of this file says; returns its exit code."""
    wakeup_fd, woken_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(woken_fd, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.set_inheritable(lifeline_fd, False)
    os.set_inheritable(status_fd, False)
    become_subreaper()
    try:
        tree = Tree(command, environment)
    except HiveError as error:
        os.write(status_fd, f"error {' '.join(error.message.split())}\n".encode())
        return error.exit_code
    try:
        with contextlib.suppress(BrokenPipeError):  # the supervisor was killed meanwhile: the lifeline tells it too
            os.write(status_fd, f"pid {tree.pid}\n".encode())
        os.close(status_fd)
        watch(tree, lifeline_fd, wakeup_fd)
    finally:
        tree.end(grace_s)
    return 1 if tree.code is None else tree.code


def main(words: list[str]) -> int:
    lifeline_fd, status_fd, grace_s, command = int(words[0]), int(words[1]), float(words[2]), words[3:]
    return guard(lifeline_fd, status_fd, grace_s, command, os.environ)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
