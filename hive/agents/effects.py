"""The parts a life acts on: the helper (processes), the proxy (gates), the record, the listeners."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

import msgspec

from hive.domain import Agent, SleepDepth, WakeCause
from hive.link.helper import PagedOut, Started, Stat
from hive.link.messages import Activity, Busy, Closed
from hive.link.specs import SandboxSpec
from hive.settings.table import Settings


class HostMemory(msgspec.Struct, frozen=True):
    """The memory of this host, now; None where the kernel does not say. `some_avg10`: pressure (PSI) in per cent."""

    available_bytes: int | None = None
    swap_free_bytes: int | None = None
    some_avg10: float | None = None


class HelperVerbs(Protocol):
    """The sandbox helper's verbs.

    Each raises LinkLost while the helper is not connected, TimedOut where it did not answer in time, and what the
    helper itself answers: NotFound for an agent it does not know, WrongState where the verb does not fit.
    """

    @property
    def connected(self) -> bool: ...

    async def define(self, agent: str, spec: SandboxSpec) -> object: ...

    async def start(self, agent: str) -> Started:
        """Its pid and address. WrongState where a process of it lives."""
        ...

    async def stop(self, agent: str, *, grace_s: float) -> object:
        """Thawed, asked to end, and after `grace_s` killed: returns once nothing of it lives."""
        ...

    async def freeze(self, agent: str, generation: int) -> object:
        """Returns once every process of it is stopped; on an error the helper has thawed it or will within 10 s."""
        ...

    async def confirm(self, agent: str, generation: int) -> None:
        """WrongState where the helper has thawed it already."""
        ...

    async def thaw(self, agent: str) -> object:
        """Returns once it verifiably runs; thawing what runs is no error. WrongState where nothing of it lives."""
        ...

    async def page_out(self, agent: str, generation: int) -> PagedOut:
        """Deep sleep for one that sleeps; a `thaw` meanwhile wins. WrongState, NotSupported, Saturated."""
        ...

    async def remove(self, agent: str) -> None: ...

    async def stat(self, agents: list[str], *, pss: bool = False) -> dict[str, Stat]:
        """Ground truth of those named; of all where none is. `pss`: with a PSS of now (`AskStat`)."""
        ...

    async def reconcile(self, asleep: dict[str, int]) -> dict[str, Stat]:
        """Confirms the agents named and thaws every other frozen one; returns the ground truth of all."""
        ...


class GateVerbs(Protocol):
    """The proxy's gates. What is told while no proxy is connected is lost: the next table tells everything."""

    @property
    def session(self) -> int | None:
        """Names this connection of this proxy; None while none has sent its table. A new one voids every answer."""
        ...

    async def close(self, agent: str, generation: int) -> Closed | Busy:
        """Raises LinkLost, TimedOut."""
        ...

    async def still_closed(self, agent: str, generation: int) -> Closed | Busy:
        """Raises LinkLost, TimedOut."""
        ...

    async def activity(self, agents: Collection[str] = ()) -> dict[str, Activity]:
        """The proxy's activity for the agents named; for all it knows where none is. Raises LinkLost, TimedOut."""
        ...

    def asleep(self, agent: Agent) -> None: ...

    def open(self, agent: Agent) -> None: ...

    def refuse(self, agent: Agent) -> None: ...

    def tell(self, agent: Agent) -> None:
        """All the proxy should know of it; moves the gate to where its status belongs."""
        ...

    def gone(self, agent: str) -> None: ...


class Effects(Protocol):
    """One per daemon, shared by all lives."""

    @property
    def settings(self) -> Settings: ...

    @property
    def helper(self) -> HelperVerbs: ...

    @property
    def gates(self) -> GateVerbs: ...

    async def save(self, agent: Agent) -> None:
        """Returns once it is committed; saves of one agent happen in the order of their calls. Raises StoreFull …

        The caller is a transition or a step of one, which nobody cancels (transition_lock.py)."""
        ...

    async def forget(self, agent: Agent, actor: str) -> None:
        """Deletes the record and every key of it, frees its uid; that it is removed is told and audited."""
        ...

    async def sandbox_spec(self, agent: Agent) -> SandboxSpec:
        """The spec the helper runs it by. Raises DependencyDown where the proxy's port is not known in time, WrongState
        where another agent listens at its port."""
        ...

    def changed(self, before: Agent, after: Agent, actor: str) -> None:
        """Publishes and audits one transition. Never raises, never waits."""
        ...

    def memory(self) -> HostMemory:
        """Looked up in the kernel each time, in some 60 µs; never raises."""
        ...

    async def is_new_boot(self) -> bool:
        """Whether the machine was started since `note_boot` was called last; False where it never was.

        All processes are gone then, and nobody asked for that. Raises what the store raises.
        """
        ...

    async def note_boot(self) -> None:
        """All that is to be started after this boot has been."""
        ...

    def woke(self, cause: WakeCause, took_ms: float, depth: SleepDepth) -> None:
        """`depth`: where it slept."""
        ...

    def fell_asleep(self) -> None: ...

    def failed(self, agent: Agent) -> None:
        """It ended although nobody asked it to, or could not be started."""
        ...
