"""The periodic check: gathers facts, lets idle.py decide, and puts to sleep the agents it names."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection

import msgspec

from hive.agents import idle
from hive.agents.deepener import Deepener
from hive.agents.effects import Effects
from hive.agents.idle import IdleFacts, IdleVerdict
from hive.agents.lifecycle import AgentLifecycle
from hive.agents.roster import Roster
from hive.agents.transition_lock import outcome_of
from hive.domain import AgentStatus
from hive.errors import HiveError
from hive.link.helper import Stat
from hive.link.messages import Activity
from hive.tasks import spawn

log = logging.getLogger("hive.agents")

STALE_CHECKS = 2.5
"""A CPU figure is stale once its measuring began longer ago than this many checks."""
SHORTEST_SPAN_S = 0.5
"""CPU time over less than this says more about the clock than about the agent."""


class _Cpu(msgspec.Struct, frozen=True):
    """CPU time used in all, when it was read, and percent of a core since the reading before (None: none before)."""

    used_us: int
    at: float
    percent: float | None = None


class Sleeper:
    """The last facts seen of every agent, for the verdict and for the sentence about why it is awake."""

    def __init__(self, roster: Roster, effects: Effects) -> None:
        self._roster = roster
        self._effects = effects
        self._loop = asyncio.get_running_loop()
        self._activity: dict[str, Activity] = {}
        self._seen_at = 0.0
        self._seen_alone: dict[str, tuple[Activity, float]] = {}
        """Agents that were asked about by themselves since, and when."""
        self._cpu: dict[str, _Cpu] = {}
        self._deepener = Deepener(roster, effects)

    def activity(self, agent: str) -> Activity:
        """The last activity of it that the proxy saw."""
        return self._seen(agent)[0]

    def _seen(self, agent: str) -> tuple[Activity, float]:
        """The last activity of it that the proxy saw, and its time."""
        return self._seen_alone.get(agent) or (self._activity.get(agent, Activity()), self._seen_at)

    def verdict(self, life: AgentLifecycle) -> IdleVerdict:
        """The verdict on putting it to sleep, by the facts of the last look."""
        return idle.verdict(self._facts(life), self._loop.time())

    def why(self, life: AgentLifecycle, stat: Stat | None, verdict: IdleVerdict) -> str:
        """The verdict's sentence, and what the agent costs now by `stat` (None: the helper could not be asked)."""
        why = verdict.why
        costs = "" if stat is None else idle.cost(stat, self._percent(life, stat))
        return f"{why}; costs {costs}" if costs else why

    def _percent(self, life: AgentLifecycle, stat: Stat) -> float | None:
        """CPU use in per cent of a core since its CPU time was last read; None where that was long ago."""
        before, now = self._cpu.get(life.agent.id), self._loop.time()
        if before is None or before.at < max(life.awake_since, self._oldest()):
            return None
        if now - before.at < SHORTEST_SPAN_S:
            return before.percent
        return idle.cpu_percent(stat.cpu_us - before.used_us, now - before.at)

    def _oldest(self) -> float:
        return self._loop.time() - STALE_CHECKS * self._effects.settings.sleep.check_s

    async def run(self) -> None:
        """A check every `check_s` and a look at memory more often, until cancelled."""
        await asyncio.gather(self._check_always(), self._deepener.run())

    async def _check_always(self) -> None:
        while True:
            await asyncio.sleep(self._effects.settings.sleep.check_s)
            await self.check()

    async def look(self, agents: Collection[str] = ()) -> None:
        """Asks the proxy what it sees now of the agents named, of all where none is.

        Where it cannot be asked, what was seen before stands.
        """
        if self._effects.gates.session is None:
            return
        activity = await outcome_of(self._effects.gates.activity(agents))
        if isinstance(activity, HiveError):
            return
        now = self._loop.time()
        if agents:
            self._seen_alone.update((agent, (activity.get(agent, Activity()), now)) for agent in agents)
        else:
            self._activity, self._seen_at = activity, now
            self._seen_alone.clear()

    async def check(self) -> None:
        """One round. The proxy is asked once for all, the helper only about agents that may be idle by the next check.

        A sleeping agent costs this round nothing but a look at its status.
        """
        awake = [life for life in self._roster if life.status is AgentStatus.RUNNING]
        if not awake:
            self._cpu.clear()
            self._seen_alone.clear()
            return
        await self.look()
        check_s = self._effects.settings.sleep.check_s
        now = self._loop.time()
        near = [life for life in awake if idle.worth_measuring(self._facts(life), now, within_s=check_s)]
        await self._measure(near)
        for life in near:
            found = self.verdict(life)
            if found.sleep:
                spawn(self._put_to_sleep(life, found.why), name=f"idle {life.agent.name}")

    async def _put_to_sleep(self, life: AgentLifecycle, why: str) -> None:
        attempt = await outcome_of(life.fall_asleep(why))
        if isinstance(attempt, HiveError):
            log.info("agent_not_paused agent=%s why=%s", life.agent.name, attempt.message)
        elif attempt.why_not is not None:
            log.info("agent_not_paused agent=%s why=%s", life.agent.name, attempt.why_not)

    async def _measure(self, lives: list[AgentLifecycle]) -> None:
        if not lives:
            self._cpu.clear()
            return
        stats = await outcome_of(self._effects.helper.stat([life.agent.id for life in lives]))
        if isinstance(stats, HiveError):
            self._cpu.clear()
            return
        now = self._loop.time()
        oldest = self._oldest()
        measured: dict[str, _Cpu] = {}
        for life in lives:
            if (stat := stats.get(life.agent.id)) is None:
                continue
            before = self._cpu.get(life.agent.id)
            percent = None
            if before is not None and before.at >= max(oldest, life.awake_since) and now > before.at:
                percent = idle.cpu_percent(stat.cpu_us - before.used_us, now - before.at)
            measured[life.agent.id] = _Cpu(stat.cpu_us, now, percent)
        self._cpu = measured

    def _facts(self, life: AgentLifecycle) -> IdleFacts:
        settings, agent = self._effects.settings, life.agent
        seen, seen_at = self._seen(agent.id)
        cpu = self._cpu.get(agent.id)
        idle_s = agent.spec.idle_s
        return IdleFacts(
            status=agent.status,
            since=agent.since,
            reason=agent.reason,
            auto_sleep=settings.inference.auto_sleep_enabled,
            idle_s=settings.inference.auto_sleep_idle_seconds if idle_s is None else idle_s,
            minimum_awake_s=settings.sleep.minimum_awake_s,
            cpu_quiet_percent=settings.sleep.cpu_quiet_percent,
            awake_since=life.awake_since,
            proxy_connected=self._effects.gates.session is not None,
            in_flight=seen.in_flight,
            parked=seen.parked,
            ingress=seen.ingress,
            why_busy=seen.why_busy,
            programs=life.held,
            last_active_at=None if seen.quiet_s is None else seen_at - seen.quiet_s,
            cpu_percent=None if cpu is None else cpu.percent,
            retry_at=life.retry_freeze_at,
            kept_awake_until=self._loop.time() + life.kept_awake_for_s,
            kept_awake_by=life.kept_awake_by,
            asleep_how=self._deepener.how_asleep(life) if agent.status is AgentStatus.PAUSED else "",
        )
