"""The look at memory: gathers facts, lets depth.py decide, and pages out the agents it names, a few at a time."""

from __future__ import annotations

import asyncio
import logging

from hive.agents import depth
from hive.agents.depth import DepthFacts, DepthVerdict
from hive.agents.effects import Effects, HostMemory
from hive.agents.lifecycle import AgentLifecycle
from hive.agents.roster import Roster
from hive.agents.transition_lock import outcome_of
from hive.domain import AgentStatus, SleepDepth
from hive.errors import HiveError
from hive.tasks import spawn

log = logging.getLogger("hive.agents")

LOOK_S = 2.0
"""PSI's shortest average is over 10 s; a look that finds no agent due costs 4 ms with 10,000 agents."""
AT_ONCE = 2
"""Paging out compresses, one core each; a wake meanwhile finds the others."""
ASKED_AT_ONCE = 200
"""Sleepers measured in one look at most; one costs the helper some 50 µs, once per sleep."""
FRESH_S = 1.0
"""Sentences may speak of memory as it was so long ago."""


class Deepener:
    """`run` looks until it is cancelled; what is under way goes on."""

    def __init__(self, roster: Roster, effects: Effects) -> None:
        self._roster = roster
        self._effects = effects
        self._loop = asyncio.get_running_loop()
        self._memory = HostMemory()
        self._seen_at = float("-inf")
        self._resident: dict[str, tuple[int, int]] = {}
        """Agent → generation of the sleep in which it was asked, and the RAM it held: that does not grow asleep."""
        self._under_way: set[str] = set()

    def __repr__(self) -> str:
        return f"<Deepener {len(self._under_way)} under way>"

    def how_asleep(self, life: AgentLifecycle) -> str:
        """The sleep of a sleeping agent: its depth, and the reason against a deeper one; or the wait of its wake."""
        if waits := self._roster.line.why(life.agent.id):
            return f"{life.agent.depth} sleep, {waits}"
        if life.agent.id in self._under_way:
            return "light sleep, its memory is being paged out"
        now = self._loop.time()
        if now - self._seen_at > FRESH_S:
            self._look()
        found = self._verdict(life, now)
        return f"light sleep, about to go deep: {found.why}" if found.deepen else found.why

    async def run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            await self.check()

    async def check(self) -> None:
        """Takes one look at every agent in light sleep that may be due."""
        self._look()
        near = self._near()
        if len(near) == 0 or not self._effects.helper.connected:
            return
        await self._ask(near)
        self._begin()

    def _look(self) -> None:
        self._memory, self._seen_at = self._effects.memory(), self._loop.time()

    def _near(self) -> list[AgentLifecycle]:
        """The lives that may be due: the decider's first question, asked without making its facts for every sleeper."""
        sleep, now, free = self._effects.settings.sleep, self._loop.time(), self._memory.swap_free_bytes
        if free == 0:
            return []
        pressed = depth.is_pressed(self._memory.some_avg10, sleep.pressure_some_avg10)
        due = now - sleep.deep_after_s if sleep.deep_after_s > 0 else float("-inf")
        return [
            life
            for life in self._roster
            if (agent := life.agent).depth is SleepDepth.LIGHT  # the cheapest first: most sleepers are not due
            and (pressed or life.asleep_since <= due or agent.depth_goal is not SleepDepth.LIGHT)
            and agent.status is AgentStatus.PAUSED
            and agent.spec.deepest is SleepDepth.DEEP
            and life.retry_deep_at <= now
            and (free is None or (self._resident_bytes(life) or 0) <= free)
        ]

    async def _ask(self, lives: list[AgentLifecycle]) -> None:
        """Asks for the RAM of those for which it is not known yet; a sleeping agent's memory does not change."""
        unknown = [life for life in lives if self._resident_bytes(life) is None][:ASKED_AT_ONCE]
        if not unknown:
            return
        generations = {life.agent.id: life.agent.generation for life in unknown}
        stats = await outcome_of(self._effects.helper.stat(list(generations)))
        if isinstance(stats, HiveError):
            return
        known = {life.agent.id for life in self._roster if life.status is AgentStatus.PAUSED}
        self._resident = {agent: seen for agent, seen in self._resident.items() if agent in known}
        for agent, generation in generations.items():
            if (stat := stats.get(agent)) is not None:
                self._resident[agent] = (generation, stat.rss_bytes if stat.held_bytes is None else stat.held_bytes)

    def _resident_bytes(self, life: AgentLifecycle) -> int | None:
        generation, resident = self._resident.get(life.agent.id, (None, 0))
        return resident if generation == life.agent.generation else None

    def _begin(self) -> None:
        """Pages out the largest and longest asleep, as many as are free to go."""
        now, under_way = self._loop.time(), self._under_way
        if len(under_way) >= AT_ONCE:
            return
        due = [life for life in self._near() if life.agent.id not in under_way and self._verdict(life, now).deepen]
        due.sort(key=lambda life: (self._resident_bytes(life) or 0) * (now - life.asleep_since), reverse=True)
        for life in due[: AT_ONCE - len(under_way)]:
            under_way.add(life.agent.id)
            spawn(self._go_deep(life, self._verdict(life, now).why), name=f"go deep {life.agent.name}")

    async def _go_deep(self, life: AgentLifecycle, why: str) -> None:
        outcome = await outcome_of(life.go_deep())
        self._under_way.discard(life.agent.id)
        if isinstance(outcome, HiveError):
            log.info("agent_not_deep agent=%s error=%r", life.agent.name, outcome.message)
            return
        log.debug("agent_paged_out agent=%s why=%r", life.agent.name, why)
        self._look()
        self._begin()  # the next one, as long as there is reason

    def _verdict(self, life: AgentLifecycle, now: float) -> DepthVerdict:
        return depth.verdict(self._facts(life), now)

    def _facts(self, life: AgentLifecycle) -> DepthFacts:
        sleep, memory, agent = self._effects.settings.sleep, self._memory, life.agent
        return DepthFacts(
            depth=agent.depth,
            goal=agent.depth_goal,
            deepest=agent.spec.deepest,
            asleep_since=life.asleep_since,
            deep_after_s=sleep.deep_after_s,
            some_avg10=memory.some_avg10,
            pressure_some_avg10=sleep.pressure_some_avg10,
            swap_free_bytes=memory.swap_free_bytes,
            resident_bytes=self._resident_bytes(life),
            retry_at=life.retry_deep_at,
            failure=life.deep_failure,
        )
