"""A program that somebody runs inside an agent: what it is given, and what holds it until nothing of it is left."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import re
import shutil
import struct
import subprocess
import termios
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

from hive.domain import PROGRAM_PATH, RuntimeKind
from hive.errors import BadRequest, NotFound
from hive.host.cgroup import Leaf
from hive.host.process import exit_code
from hive.link.execution import TerminalSize
from hive.link.specs import SandboxSpec
from hive.runtimes.signals import SignalGroup

RUN_MARK = "HIVE_EXEC"
"""In the environment of such a program and of all it starts: by it the next helper finds what a killed one left."""
RUN_ID = re.compile("[0-9a-f]{8,32}")
"""Names of programs, which are parts of names of control groups and units."""
GROUP = "exec-"
"""Begins the name of its control group, below that of the agent."""
KILL_S = 2.0


class EnteredProgram(NamedTuple):
    """A program that is to be run inside. `spec`: of the agent, as the policy lets it run, with this as its command.

    `mark`: the agent's own, `run_mark`: of this program alone, each `NAME=value` for the environment.
    """

    run: str
    spec: SandboxSpec
    mark: str
    run_mark: str
    terminal: TerminalSize | None


class Entered(Protocol):
    """One such program, begun."""

    form: str
    """Kind of the descriptors: as `Executing` has it."""
    descriptors: list[int]
    """The caller's ends of the streams; the code that takes them closes them."""

    async def ended(self) -> int | None:
        """Returns how its main process ended, once it has; None where nobody knows."""

    async def kill(self) -> bool:
        """Kills it and all it started. Whether nothing of it is left."""

    async def resize(self, rows: int, columns: int) -> None:
        """Its terminal has this size from now on; nothing where it has none."""

    def close(self) -> None:
        """After the end: gives back what was held."""


@runtime_checkable
class Enterable(Protocol):
    """A started agent inside which another program can be run."""

    async def enter(self, program: EnteredProgram) -> Entered:
        """Raises NotFound, NotPermitted, WrongState, DependencyDown; then nothing was started."""


class Channels(NamedTuple):
    """stdin, stdout, stderr of a program, and the other ends, its caller's."""

    program: list[int]
    caller: list[int]
    form: str

    def close_program(self) -> None:
        for descriptor in set(self.program):
            os.close(descriptor)

    def close(self) -> None:
        self.close_program()
        for descriptor in self.caller:
            os.close(descriptor)


def make_channels(terminal: TerminalSize | None, uid: int | None) -> Channels:
    """Pipes, or a terminal that belongs to `uid`. Raises OSError."""
    if terminal is None:
        pairs = [os.pipe2(os.O_CLOEXEC) for _ in range(3)]
        return Channels([pairs[0][0], pairs[1][1], pairs[2][1]], [pairs[0][1], pairs[1][0], pairs[2][0]], "pipes")
    master, slave = os.openpty()
    set_size(master, terminal.rows, terminal.columns)
    if uid is not None:
        os.fchown(slave, uid, -1)
    return Channels([slave, slave, slave], [master], "terminal")


def set_size(descriptor: int, rows: int, columns: int) -> None:
    """Sets the size of a terminal; its foreground processes get SIGWINCH. Raises OSError."""
    fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("4H", rows, columns, 0, 0))


class EnteredHere:
    """The part of `Entered` for a program that runs on this host, in a control group below the agent's."""

    def __init__(self, group: Leaf | SignalGroup, channels: Channels, *, pidfd: int) -> None:
        """`pidfd`: of its main process, -1 for none."""
        self.form = channels.form
        self.descriptors = channels.caller
        self._group = group
        self._pidfd = pidfd
        self._terminal_fd = os.dup(channels.caller[0]) if channels.form == "terminal" else -1

    async def resize(self, rows: int, columns: int) -> None:
        if self._terminal_fd >= 0:
            set_size(self._terminal_fd, rows, columns)

    def close(self) -> None:
        self._group.remove()
        for descriptor in (self._pidfd, self._terminal_fd):
            if descriptor >= 0:
                os.close(descriptor)
        self._pidfd = self._terminal_fd = -1


class EnteredProcess(EnteredHere):
    """See `Entered`; one that is this helper's child."""

    def __init__(
        self, child: subprocess.Popen[bytes], group: Leaf | SignalGroup, channels: Channels, *, pidfd: int
    ) -> None:
        super().__init__(group, channels, pidfd=pidfd)
        self._child = child

    def __repr__(self) -> str:
        return f"<EnteredProcess {self._child.pid}>"

    async def ended(self) -> int | None:
        await readable(self._pidfd)
        returncode = self._child.poll()
        return None if returncode is None else exit_code(returncode)

    async def kill(self) -> bool:
        until = time.monotonic() + KILL_S
        while self._child.poll() is None or self._group.pids():
            if self._child.returncode is None:
                self._child.kill()
            self._group.kill()
            if time.monotonic() > until:
                return False
            await asyncio.sleep(0.002)
        return True


async def readable(descriptor: int) -> None:
    """Waits until there is something to read, or no writer is left."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_reader(descriptor, lambda: None if ready.done() else ready.set_result(None))
    try:
        await ready
    finally:
        loop.remove_reader(descriptor)


async def kill_groups(leaf: Path) -> None:
    """Kills what a helper that was killed left of such programs in the agent's control group."""
    with contextlib.suppress(OSError):
        for entry in os.listdir(leaf):
            if entry.startswith(GROUP):
                await kill_group(Leaf(leaf / entry))


async def kill_group(group: Leaf) -> bool:
    """Kills all that is in it, and removes it. Whether nothing is left."""
    until = time.monotonic() + KILL_S
    while group.pids():
        group.kill()
        if time.monotonic() > until:
            return False
        await asyncio.sleep(0.002)
    group.remove()
    return True


def left_by_others(environments: Mapping[int, frozenset[bytes]], label: str, epoch: str) -> list[int]:
    """The pids of programs that an earlier helper of this state directory began, by the marks in their environments.

    `label`: of the state directory; `epoch`: of this helper; its own programs are left alone.

    >>> marks = {7: frozenset({b"HIVE_EXEC=s1.e1.r"}), 8: frozenset({b"HIVE_EXEC=s1.e2.r"}), 9: frozenset({b"A=b"})}
    >>> left_by_others(marks, "s1", "e2")
    [7]
    """
    all_, own = f"{RUN_MARK}={label}.".encode(), f"{RUN_MARK}={label}.{epoch}.".encode()
    return [
        pid
        for pid, entries in environments.items()
        if any(entry.startswith(all_) and not entry.startswith(own) for entry in entries)
    ]


def command_inside(spec: SandboxSpec, command: list[str]) -> list[str]:
    """The command with its program's full path where it is one of this host's: a policy names files.

    Raises BadRequest for none, NotFound.
    """
    if not command or not command[0] or any("\0" in word for word in command):
        raise BadRequest("the command is empty, or has a NUL in it")
    if spec.runtime is not RuntimeKind.PROCESS or "/" in command[0]:
        return command
    found = shutil.which(command[0], path=PROGRAM_PATH)
    if found is None:
        raise NotFound(f"no such command: {command[0]}")
    return [found, *command[1:]]
