"""The hand-over of an agent's unit from its stub to a process that a template has forked.

The child is nobody systemd started, and becomes the unit's main process all the same: its parent is process 1, which
reaps it, and it is in the unit's control group. So its exit code, an OOM kill, ExecStop= and every limit are those of
an ordinary agent. In order, so that a helper killed between any two steps leaves nothing that runs:

1. the stub is there; its descriptors of limits, its groups and its /tmp are what the child gets
2. the child waits, and has been looked at (template_check.py)
3. it goes into the stub's groups, and below them into the leaf it is frozen by
4. `MAINPID=` in the stub's name, and is that so? `READY=1` in the child's
5. the stub is killed, and the child released: until then its end of a socket tells it that the helper is gone

Traps (systemd 252): of a sender with uid 0 systemd believes any pid, and would stop another service by it, so the
messages have the agent's uid. `MAINPID=` of a process that is gone is dropped while `READY=1` beside it counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import signal
import socket
import struct
import time
from itertools import count
from pathlib import Path

import msgspec

from hive.errors import DependencyDown, HiveError, NotPermitted, TimedOut
from hive.host import systemd
from hive.host.cgroup import Leaf, mount_of_v1
from hive.host.process import Identity, identify, write_control
from hive.runtimes import template_unit_plan
from hive.runtimes.process import look_again
from hive.runtimes.template import WaitingChild
from hive.runtimes.unit_plan import LEAF

NOTIFY = "/run/systemd/notify"
JOURNAL = "/run/systemd/journal/stdout"
STUB_S = 10.0
"""Seconds from the request for a stub until it runs; 30 ms on an idle machine."""
CONFIRM_S = 5.0
ASK_S = 0.25
"""Between questions whether a stub that is not there yet has failed."""
DAEMON_INFO = 30
"""Facility and priority of what an agent prints, as systemd has it."""


class RunningStub(msgspec.Struct, frozen=True):
    """The first process of an agent's unit, which waits for nothing. `group`: of the unit."""

    unit: str
    main: Identity
    pidfd: int
    group: Path

    def end(self) -> None:
        """SIGKILL, by the pidfd."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)


async def wait_for_stub(unit: str, group: Path) -> RunningStub:
    """The stub of a unit that was begun, once it runs in its sandbox; the caller closes its pidfd.

    Raises HiveError where systemd cannot start it, TimedOut.
    """
    until, asked = time.monotonic() + STUB_S, time.monotonic()
    for attempt in count():
        if (main := _stub_in(group)) is not None and (pidfd := main.open()) is not None:
            return RunningStub(unit, main, pidfd, group)
        if time.monotonic() - asked > ASK_S:
            asked = time.monotonic()
            shown = await systemd.show(unit, "ActiveState", "Result")
            if shown.get("ActiveState") in ("failed", "inactive"):
                raise HiveError(
                    f"its unit could not be set up: {shown.get('Result', '')}", hint=f"journalctl -u {unit}"
                )
        if asked > until:
            raise TimedOut(f"its unit did not start within {STUB_S:g} s")
        await look_again(attempt)
    raise AssertionError


def _stub_in(group: Path) -> Identity | None:
    try:
        pids = [int(line) for line in (group / "cgroup.procs").read_text().split()]
    except OSError:
        return None
    return next((identify(pid) for pid in pids if is_stub(pid)), None)


def is_stub(pid: int) -> bool:
    """Whether this process is a stub: of an agent that was not handed over, its helper was killed."""
    try:
        return template_unit_plan.is_stub(Path(f"/proc/{pid}/cmdline").read_bytes())
    except OSError:
        return False


async def hand_over(stub: RunningStub, child: WaitingChild, *, uid: int, gid: int) -> Leaf:
    """Makes the child the main process of the stub's unit, and ends the stub; returns the child's leaf.

    The caller releases the child. Raises HiveError; then the caller ends both.
    """
    leaf = Leaf(stub.group / LEAF)
    try:
        _check_limits(child, stub)
        _enter_groups(child.pid, stub.main.pid)
        leaf.make()
        write_control(leaf.path / "cgroup.procs", str(child.pid).encode())
    except OSError as error:
        raise DependencyDown(f"its child cannot be moved into its unit: {error.strerror}") from error
    _notify(f"MAINPID={child.pid}", pid=stub.main.pid, uid=uid, gid=gid)
    await _confirm(stub.unit, child)
    _notify("READY=1", pid=child.pid, uid=uid, gid=gid)
    stub.end()
    return leaf


def _enter_groups(pid: int, like: int) -> None:
    """Puts it into the v1 groups that another process is in, where this host has any; the v2 group is the caller's."""
    mounts = Path("/proc/self/mounts").read_text()
    for line in Path(f"/proc/{like}/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and (mount := mount_of_v1(controllers.partition(",")[0], mounts)) is not None:
            write_control(mount / path.strip("/") / "cgroup.procs", str(pid).encode())


def limits_of_stub(stub: RunningStub) -> list[tuple[int, int, int]]:
    """The limits that systemd gives to an agent's program, as (RLIMIT_…, soft, hard): the child takes them itself.

    Not by prlimit(2) from here: that takes a right that a container may not have.
    """
    names = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    kinds = sorted({getattr(resource, name) for name in names})
    return [(kind, *resource.prlimit(stub.main.pid, kind)) for kind in kinds]


def _check_limits(child: WaitingChild, stub: RunningStub) -> None:
    wanted, found = (Path(f"/proc/{pid}/limits").read_text().splitlines() for pid in (stub.main.pid, child.pid))
    if differing := [line[:25].strip() for line, other in zip(wanted, found, strict=True) if line != other]:
        raise NotPermitted(f"its child has other limits than its unit: {', '.join(differing)}")


def _notify(message: str, *, pid: int, uid: int, gid: int) -> None:
    """sd_notify(3) in the name of another process."""
    credentials = struct.pack("=iII", pid, uid, gid)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            sock.connect(NOTIFY)
            sock.sendmsg([message.encode()], [(socket.SOL_SOCKET, socket.SCM_CREDENTIALS, credentials)])
    except OSError as error:
        raise DependencyDown(f"systemd cannot be told of its child: {error.strerror}") from error


async def _confirm(unit: str, child: WaitingChild) -> None:
    until = time.monotonic() + CONFIRM_S
    while (await systemd.show(unit, "MainPID")).get("MainPID") != str(child.pid):
        if not child.main.is_alive():
            raise DependencyDown("its child has ended")
        if time.monotonic() > until:
            raise DependencyDown("systemd does not take its child for the unit's main process")
        await asyncio.sleep(0.005)


def journal_stream(identifier: str, unit: str) -> int:
    """A descriptor that leads into the journal, as systemd gives it to a unit's program (sd_journal_stream_fd(3)).

    journald knows the unit of a line by the process that wrote it. Raises DependencyDown.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        sock.connect(JOURNAL)
        sock.shutdown(socket.SHUT_RD)
        # identifier, unit, priority, whether lines begin with a level, and where else they go
        sock.sendall(f"{identifier}\n{unit}\n{DAEMON_INFO}\n1\n0\n0\n0\n".encode())
    except OSError as error:
        sock.close()
        raise DependencyDown(f"the journal cannot be reached: {error.strerror}") from error
    return sock.detach()
