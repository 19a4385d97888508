"""A host with many agents and too little memory: enough of helper, proxy and kernel for lives that do not fail.

One that is woken touches all of its memory, at the speed at which pages come back from zram. Used by tests on a
VirtualLoop and by benchmarks/idle.py on a real one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any

from hive.agents.effects import HostMemory
from hive.agents.lifecycle import AgentLifecycle
from hive.agents.roster import Roster
from hive.domain import Agent, AgentSpec, AgentStatus, SleepDepth, Tier, WakeCause
from hive.errors import DependencyDown
from hive.link.helper import PagedOut, Started, Stat
from hive.link.messages import Activity, Busy, Closed
from hive.link.specs import SandboxSpec
from hive.settings.table import Settings

MIB = 1 << 20
STEP_S = 0.05
BACK_BYTES_PER_S = 300 * MIB
"""300 MiB touched again from zram took 0.98 s (see hive/agents/admission.py)."""


class Held:
    """One agent on this host."""

    def __init__(self, holds: int, *, state: str = "running") -> None:
        self.state = state
        self.holds = holds
        self.resident = holds
        self.cpu_us = 0
        self.working_set: int | None = None


class Host:
    """The helper's verbs, each done at once. `log`: what was asked, in order; `least_available`: over all time."""

    connected = True

    def __init__(self, total_bytes: int | None) -> None:
        self.total = total_bytes
        self.held: dict[str, Held] = {}
        self.log: list[tuple[str, str]] = []
        self.least_available = total_bytes or 0
        self.starts_at_once = self.most_starts_at_once = 0
        self.start_s = 0.0
        self.page_out_s = 0.0
        self.away: set[str] = set()
        """Agents whose engine is down."""

    @property
    def available(self) -> int | None:
        return None if self.total is None else self.total - sum(held.resident for held in self.held.values())

    async def define(self, agent: str, spec: SandboxSpec) -> None: ...

    async def start(self, agent: str) -> Started:
        self.log.append(("start", agent))
        if agent in self.away:
            raise DependencyDown("the engine is down")
        self.starts_at_once += 1
        self.most_starts_at_once = max(self.most_starts_at_once, self.starts_at_once)
        await asyncio.sleep(self.start_s)
        self.starts_at_once -= 1
        self.held[agent] = Held(MIB)
        return Started(pid=len(self.log))

    async def stop(self, agent: str, *, grace_s: float) -> None:
        self.held.pop(agent, None)

    async def freeze(self, agent: str, generation: int) -> None:
        self.held[agent].state = "frozen"

    async def confirm(self, agent: str, generation: int) -> None: ...

    async def thaw(self, agent: str) -> None:
        self.log.append(("thaw", agent))
        self.held[agent].state = "running"
        asyncio.get_running_loop().call_later(STEP_S, self._touch, self.held[agent])

    def _touch(self, held: Held) -> None:
        """It goes on touching what is not there yet, for as long as it runs."""
        used = held.holds if held.working_set is None else held.holds // 10 + held.working_set
        if held.state != "running" or held.resident >= used:
            return
        held.resident = min(used, held.resident + int(BACK_BYTES_PER_S * STEP_S))
        self.least_available = min(self.least_available, self.available or 0)
        asyncio.get_running_loop().call_later(STEP_S, self._touch, held)

    async def page_out(self, agent: str, generation: int) -> PagedOut:
        self.log.append(("page_out", agent))
        await asyncio.sleep(self.page_out_s)
        held = self.held[agent]
        held.resident = held.holds // 10
        return PagedOut(
            took_ms=1.0,
            kept_bytes=held.resident,
            swap_bytes=held.holds - held.resident,
            how="madvise",
            working_set_bytes=held.working_set,
        )

    async def remove(self, agent: str) -> None:
        self.held.pop(agent, None)

    def truth(self, agent: str) -> Stat:
        held = self.held.get(agent)
        if held is None:
            return Stat(state="gone")
        swap = held.holds - held.resident
        return Stat(
            state=held.state,
            pid=1,
            cpu_us=held.cpu_us,
            rss_bytes=held.resident,
            held_bytes=held.resident,
            swap_bytes=swap,
            working_set_bytes=held.working_set,
        )

    async def stat(self, agents: list[str], *, pss: bool = False) -> dict[str, Stat]:
        self.log.append(("stat", str(len(agents))))
        return {agent: self.truth(agent) for agent in agents or self.held}

    async def reconcile(self, asleep: dict[str, int]) -> dict[str, Stat]:
        return {agent: self.truth(agent) for agent in self.held}


class Gates:
    """Nobody is ever busy. `seen`: what the proxy tells, the same of everybody where it names nobody."""

    session: int | None = 1

    def __init__(self) -> None:
        self.seen: dict[str, Activity] = {}
        self.opened: list[str] = []

    async def close(self, agent: str, generation: int) -> Closed | Busy:
        return Closed(agent=agent, generation=generation)

    async def still_closed(self, agent: str, generation: int) -> Closed | Busy:
        return Closed(agent=agent, generation=generation)

    async def activity(self, agents: Collection[str] = ()) -> dict[str, Activity]:
        return self.seen

    def asleep(self, agent: Agent) -> None: ...

    def open(self, agent: Agent) -> None:
        self.opened.append(agent.name)

    def refuse(self, agent: Agent) -> None: ...

    def tell(self, agent: Agent) -> None: ...

    def gone(self, agent: str) -> None: ...


class ManyWorld:
    """`hive.agents.effects.Effects` for as many agents as are added."""

    def __init__(self, *, total_bytes: int | None = None, **sleep: Any) -> None:
        self.settings = Settings(sleep=type(Settings().sleep)(**sleep))
        self.helper = Host(total_bytes)
        self.gates = Gates()
        self.some_avg10: float | None = 0.0
        self.swap_free: int | None = 1 << 40
        self.new_boot = False
        self.record: dict[str, Agent] = {}
        self.roster = Roster(self)

    def add(
        self,
        name: str,
        status: AgentStatus = AgentStatus.RUNNING,
        *,
        depth: SleepDepth = SleepDepth.AWAKE,
        holds: int = 300 * MIB,
        created_at: float = 0.0,
        stopped_by: str = "",
        **spec: Any,
    ) -> AgentLifecycle:
        """An agent that is recorded so, and is so."""
        agent = Agent(
            id=name,
            spec=AgentSpec(name=name, command=["/bin/true"], **spec),
            status=status,
            depth=depth,
            depth_goal=depth,
            created_at=created_at,
            stopped_by=stopped_by,
        )
        if status in (AgentStatus.RUNNING, AgentStatus.PAUSED):
            held = self.helper.held[name] = Held(holds, state="frozen" if depth is not SleepDepth.AWAKE else "running")
            if depth is SleepDepth.DEEP:
                held.resident = holds // 10
            self.helper.least_available = self.helper.available or 0
        self.record[name] = agent
        return self.roster.add(agent)

    def sleeper(self, name: str, *, holds: int = 300 * MIB, tier: Tier = Tier.MEDIUM) -> AgentLifecycle:
        """One that sleeps deep."""
        return self.add(name, AgentStatus.PAUSED, depth=SleepDepth.DEEP, holds=holds, tier=tier)

    async def save(self, agent: Agent) -> None:
        self.record[agent.id] = agent

    async def forget(self, agent: Agent, actor: str) -> None: ...

    async def sandbox_spec(self, agent: Agent) -> SandboxSpec:
        return SandboxSpec(name=agent.name, command=agent.spec.command, env={}, home="/h", log="/l")

    def changed(self, before: Agent, after: Agent, actor: str) -> None: ...

    def memory(self) -> HostMemory:
        return HostMemory(self.helper.available, self.swap_free, self.some_avg10)

    async def is_new_boot(self) -> bool:
        return self.new_boot

    async def note_boot(self) -> None:
        self.new_boot = False

    def woke(self, cause: WakeCause, took_ms: float, depth: SleepDepth) -> None: ...

    def fell_asleep(self) -> None: ...

    def failed(self, agent: Agent) -> None: ...
