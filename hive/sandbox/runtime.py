"""What every kind of sandbox does for the helper: the contract, per state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

from hive.host.process import Identity, Snapshot
from hive.link.messages import ProcessSpec, Stat


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """What the table keeps of a running agent, enough to find it again: its main process and its cgroup.

    `leaf`: path of the cgroup, None where it is stopped by signals. `since`: Unix seconds.
    """

    main: Identity
    leaf: str | None
    since: float


class Running(Protocol):
    """One started agent. It is *running* or *frozen* until its main process ended, then *gone*."""

    run: Run
    ended_fd: int
    """A pidfd: readable once the main process ended."""

    async def freeze(self, *, deadline_s: float, give_up: Callable[[], bool]) -> None:
        """Returns when no process of it runs any more. Frozen: at once.

        Raises WrongState as soon as `give_up()`, TimedOut after `deadline_s`; then it is told to thaw, which the
        caller verifies with `thaw`. Never blocks the loop.
        """

    def thaw_now(self) -> bool:
        """Thaws in one step, without waiting; whether that is verified already. Running: True. Gone: True."""

    async def thaw(self, *, deadline_s: float) -> None:
        """`thaw_now`, repeated until verified. Raises TimedOut."""

    def is_frozen(self) -> bool:
        """Ground truth, from the kernel."""

    def is_half_frozen(self) -> bool:
        """Someone began to freeze it and did not come to the end (a helper was killed meanwhile)."""

    def stat(self, snapshot: Snapshot) -> Stat:
        """Ground truth; `snapshot` is one walk of /proc that serves all agents of one question."""

    async def stop(self, *, grace_s: float) -> bool:
        """Thaws, then SIGTERM to all of it, after `grace_s` SIGKILL. Whether nothing of it is left."""

    async def kill(self) -> bool:
        """SIGKILL to all of it, frozen or not. Whether nothing of it is left (False: stuck in the kernel)."""

    def reap(self) -> int | None:
        """After the end: the exit code as a shell counts, None where this process is not its parent."""

    def close(self) -> None:
        """Gives back the pidfd and what else was held; after the end, or when the helper leaves it running."""


class Runtime(Protocol):
    """Makes agents run. Knows no names, no generations, no links."""

    def prepare(self, agent: str, spec: ProcessSpec) -> bool:
        """Checks the spec and makes what must exist before the first start; again: brings it up to date.

        Whether all of it is new. Raises BadRequest or NotPermitted for a spec this helper does not run, HiveError
        where the disk refuses; then nothing new is left.
        """

    def start(self, agent: str, spec: ProcessSpec, *, mark: str) -> Running:
        """Starts it; `mark` (`NAME=value`) is put into its environment.

        Raises NotFound, NotPermitted, WrongState (processes of an earlier start are left), HiveError; then nothing
        was started.
        """

    def adopt(self, agent: str, spec: ProcessSpec, run: Run, *, mark: str) -> Running | None:
        """Takes over what an earlier helper started; None where its main process is gone."""

    def find(self, agent: str, spec: ProcessSpec, snapshot: Snapshot, *, mark: str) -> Running | None:
        """Finds an agent an earlier helper started but could not write down any more."""

    def sweep(self, agent: str, spec: ProcessSpec, run: Run, *, mark: str) -> None:
        """Kills what is left of an agent whose main process ended while no helper was there."""

    def thaw_strays(self, known: set[str]) -> list[str]:
        """Thaws what is frozen under Hive's name but belongs to no known agent; says what that was."""

    def discard(self, agent: str, spec: ProcessSpec) -> None:
        """Deletes what `prepare` and the agent made on disk. Blocks for as long as the disk takes: not on the loop."""

    def trim_log(self, spec: ProcessSpec) -> None:
        """Cuts the agent's log back if it is too long."""
