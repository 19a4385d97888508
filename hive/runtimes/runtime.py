"""The contract of every runtime with the helper, per state."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

import msgspec

from hive.host.process import Identity, ProcessTable
from hive.link.helper import PagedOut, Stat
from hive.link.specs import RuntimeCapabilities, SandboxSpec


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """The table's note of a running agent, enough to find it again: its main process and its cgroup.

    `leaf`: path of the cgroup Hive froze it by, None where it is stopped otherwise. `handle`: its runtime's name for it
    (a container's id), empty where its main process says all. `since`: Unix seconds. `template`: the process it was
    forked from (`templates.label`), empty for an ordinary program; `template_note`: why it is one although it names a
    template, a clause.
    """

    main: Identity
    leaf: str | None
    since: float
    handle: str = ""
    template: str = ""
    template_note: str = ""


NO_EXEC = "nothing of Hive's is inside a virtual machine that could start a program there"


class SocketPlace(NamedTuple):
    """The place of an agent's socket. `jail`: the trusted directory above it where the agent may write."""

    path: Path
    jail: Path | None = None


class RunningAgent(Protocol):
    """One started agent. It is *running* or *frozen* until its main process ended, then *gone*."""

    run: Run
    ended_fd: int
    """A pidfd: readable once the main process ended."""
    address: str
    """The address of its port (`AgentRow.address`), empty for 127.0.0.1."""

    @property
    def freezer(self) -> str:
        """The means by which it is frozen: `cgroup`, `signals`, `docker` or `firecracker`."""

    async def freeze(self, *, deadline_s: float, give_up: Callable[[], bool]) -> None:
        """Returns when no process of it runs any more. Frozen: at once.

        Raises WrongState as soon as `give_up()`, TimedOut after `deadline_s`, NotSupported where it must not be
        frozen; then it is told to thaw, which the caller verifies with `thaw`. Never blocks the loop.
        """

    def thaw_now(self) -> bool:
        """Begins to thaw, without waiting; whether that is done and verified already. Running: True. Gone: True."""

    async def thaw(self, *, deadline_s: float) -> None:
        """`thaw_now`, repeated until verified. Raises TimedOut."""

    def is_frozen(self) -> bool:
        """Ground truth, from the kernel; a runtime that has to ask an engine tells its last answer."""

    def is_half_frozen(self) -> bool:
        """A freeze of it was begun and did not come to the end (a helper was killed meanwhile)."""

    async def page_out(self, *, give_up: Callable[[], bool]) -> PagedOut:
        """Pages out what it holds of anonymous memory, in slices; frozen only. Off the loop, `give_up` between slices.

        Raises WrongState as soon as `give_up()`, NotSupported where this host does not allow it, Saturated where
        swap has no room (what was paged out stays so).
        """

    def stat(self, snapshot: ProcessTable) -> Stat:
        """Ground truth; `snapshot` is one walk of /proc that serves all agents of one question."""

    async def stop(self, *, grace_s: float) -> bool:
        """Thaws, then asks it to end (SIGTERM to all of it), after `grace_s` kills. Whether nothing of it is left."""

    async def kill(self) -> bool:
        """Kills all of it, frozen or not. Whether nothing of it is left (False: stuck in the kernel)."""

    async def reap(self) -> int | None:
        """After the end: the exit code as a shell counts, None where it cannot be known here."""

    def close(self) -> None:
        """Gives back the pidfd and what else was held; after the end, or when the helper leaves it running."""


@runtime_checkable
class SaysWhy(Protocol):
    """One started agent that may know of its end what the exit code does not tell."""

    why_ended: str
    """In words, once it is reaped; empty where there is nothing to say."""


@runtime_checkable
class BringsInner(Protocol):
    """A started agent with a runtime that made the socket inside its network itself, before the agent's program ran."""

    def take_inner(self) -> socket.socket | None:
        """The socket, which is the caller's from then on; None where there is none, or it was taken."""


@runtime_checkable
class Dialable(Protocol):
    """A started agent with a port that only the helper may reach; `address` is then what `dialled` says."""

    async def connect(self) -> socket.socket:
        """Connects to its port, or to its VMM, which waits for a `CONNECT`; the caller closes it and limits the time.
        Raises NotSupported where its port is elsewhere or it has none, WrongState, OSError, HiveError.
        """


@runtime_checkable
class Measurable(Protocol):
    """A started agent with processes that the kernel's figures of memory can be asked of."""

    def pids(self) -> list[int]:
        """Its living processes; none once it has ended."""

    def memory_group(self) -> Path | None:
        """The control group that its memory and nobody else's is charged to, in v2 or in v1's memory hierarchy.

        None where there is no such group: no controller, or it is not given to this user.
        """


class Runtime(Protocol):
    """Makes agents run. Knows no names, no generations, no links."""

    async def capabilities(self) -> RuntimeCapabilities:
        """Its abilities here and now; asked anew each time, for an engine may come and go."""

    def place(self, agent: str, spec: SandboxSpec) -> SocketPlace:
        """The place of the agent's own socket, so that it is found from inside."""

    async def prepare(self, agent: str, spec: SandboxSpec) -> bool:
        """Checks the spec and makes what must exist before the first start; again: brings it up to date.

        Whether all of it is new. Raises BadRequest or NotPermitted for a spec this helper does not run, HiveError
        where the disk refuses; then nothing new is left.
        """

    async def start(self, agent: str, spec: SandboxSpec, *, mark: str) -> RunningAgent:
        """Starts it; `mark` (`NAME=value`) is put into its environment.

        Raises NotFound (program, image, kernel), NotPermitted, WrongState (processes of an earlier start are left),
        DependencyDown (its engine), HiveError; then nothing was started.
        """

    async def adopt(self, agent: str, spec: SandboxSpec, run: Run, *, mark: str) -> RunningAgent | None:
        """Takes over what an earlier helper started; None where its main process is gone."""

    async def find(self, agent: str, spec: SandboxSpec, snapshot: ProcessTable, *, mark: str) -> RunningAgent | None:
        """Finds an agent an earlier helper started but could not write down any more."""

    async def sweep(self, agent: str, spec: SandboxSpec, run: Run, *, mark: str) -> None:
        """Kills all that is left of an agent that lost its main process while no helper was there."""

    async def thaw_strays(self, known: set[str]) -> list[str]:
        """Thaws what is frozen under Hive's name but belongs to no known agent; says what that was."""

    async def discard(self, agent: str, spec: SandboxSpec) -> None:
        """Deletes what `prepare` and the agent made on disk. Off the loop: it takes as long as the disk takes."""

    def trim_log(self, spec: SandboxSpec) -> None:
        """Cuts the agent's log back if it is too long."""
