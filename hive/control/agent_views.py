"""Agents as the API shows them: their records, and what helper, proxy, messages and schedules know of them."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable
from typing import NamedTuple

from hive.agents.lifecycle import AgentLifecycle
from hive.agents.roster import Roster
from hive.agents.sleeper import Sleeper
from hive.agents.transition_lock import outcome_of
from hive.control import views
from hive.control.budgets import BudgetReport
from hive.control.change_feed import ChangeFeed
from hive.control.counters import Counters
from hive.control.external_agents import WithElsewhere
from hive.control.message_delivery import MessageDelivery
from hive.control.prewarming import Prewarmer
from hive.control.runtimes import RuntimeWatch
from hive.control.scheduler import Scheduler
from hive.domain import AgentStatus
from hive.errors import HiveError
from hive.link.helper import Stat
from hive.shapes.agents import AgentChanges, AgentPage, AgentView, ShortPage

VIEWS_AT_ONCE = 200
"""Shown before others have their turn: some 5 ms."""
FREEZERS = {"signals": "signal"}
"""The helper's word → the API's."""


class SeenAgents(NamedTuple):
    """The facts asked for the views: ground truth, messages that wait, times of the next wakes; by agent.

    None where the service that knows could not be asked.
    """

    stats: dict[str, Stat] | None
    waiting: dict[str, int] | None
    next_times: dict[str, float]


class AgentViews:
    """`freezer`: how agents are frozen here; until one has been seen, as the daemon expects."""

    def __init__(
        self,
        *,
        roster: Roster,
        sleeper: Sleeper,
        counters: Counters,
        helper: WithElsewhere,
        runtimes: RuntimeWatch,
        message_delivery: MessageDelivery,
        scheduler: Scheduler,
        prewarmer: Prewarmer,
        budgets: BudgetReport,
        freezer: str,
    ) -> None:
        self._roster = roster
        self._sleeper = sleeper
        self._counters = counters
        self._helper = helper
        self._runtimes = runtimes
        self._message_delivery = message_delivery
        self._scheduler = scheduler
        self._prewarmer = prewarmer
        self._budgets = budgets
        self.freezer = freezer
        self._changes = ChangeFeed(roster, sleeper, counters, self._stats)
        self._lacking: dict[str, str] = {}
        """Agent → what of its limits is not enforced, as it was seen last."""

    def __repr__(self) -> str:
        return f"<AgentViews of {len(self._roster)} agents>"

    @property
    def failed(self) -> dict[str, str]:
        """Those in `error`, by name, with the reason."""
        lives = self._roster.by_name()
        return {life.agent.name: life.agent.reason for life in lives if life.status is AgentStatus.ERROR}

    async def of(self, life: AgentLifecycle, *, pss: bool = False) -> AgentView:
        """`pss`: with a PSS of now, for which the kernel walks all of its memory."""
        return self._view(life, await self._look([life.agent.id], pss=pss))

    async def all(self) -> list[AgentView]:
        """Every agent, by name."""
        return await self._shown(self._roster.by_name(), await self._look([]))

    async def page(self, after: str, limit: int) -> AgentPage:
        """A page of agents by name: those behind `after`, at most `limit`."""
        lives, following = self._page(after, limit)
        seen = await self._look([life.agent.id for life in lives]) if lives else SeenAgents({}, {}, {})
        return {"agents": await self._shown(lives, seen), "next": following, "total": len(self._roster)}

    def shorts(self, after: str, limit: int) -> ShortPage:
        """The same without asking helper or proxy."""
        lives, following = self._page(after, limit)
        found = [views.short_view(life.agent) for life in lives]
        return {"agents": found, "next": following, "total": len(self._roster)}

    async def changes(self, since: str, fresh: Collection[str]) -> AgentChanges:
        """The agents changed since the answer with that cursor.

        All there are, and `is_whole`, where `since` is empty or too old. Values that move with time alone (`why`,
        `cpu_us` …), and messages and schedules, are no change; agents named in `fresh`, by id, are in `agents` in any
        case.
        """
        changed, stats = await self._changes.look(since, fresh)
        named = {*changed.there, *fresh}
        waiting = await outcome_of(self._message_delivery.waiting([] if changed.is_whole else named)) if named else {}
        seen = SeenAgents(stats, None if isinstance(waiting, HiveError) else waiting, self._scheduler.next_times())
        found = [life for agent in named if (life := self._roster.get(agent)) is not None]
        found.sort(key=lambda life: life.agent.name)
        return {
            "agents": await self._shown(found, seen),
            "gone": changed.gone,
            "cursor": changed.cursor,
            "is_whole": changed.is_whole,
        }

    @property
    def limits(self) -> str:
        """Enforcement of agents' limits, in words."""
        lacking = {text for text in self._lacking.values() if text}
        return "; ".join(sorted(lacking)) or "as far as this host enforces them; hive agent show says what is not"

    def forget(self, agent: str) -> None:
        """Forgets what was seen of an agent that is removed."""
        self._lacking.pop(agent, None)

    def _page(self, after: str, limit: int) -> tuple[list[AgentLifecycle], str | None]:
        """The lives of a page, and `after` for the next one; None where no agent comes behind it."""
        found = self._roster.by_name(after=after, limit=limit + 1)
        return found[:limit], found[limit - 1].agent.name if len(found) > limit else None

    async def _shown(self, lives: Iterable[AgentLifecycle], seen: SeenAgents) -> list[AgentView]:
        shown = []
        for life in lives:
            shown.append(self._view(life, seen))
            if len(shown) % VIEWS_AT_ONCE == 0:
                await asyncio.sleep(0)
        return shown

    async def _look(self, agents: list[str], *, pss: bool = False) -> SeenAgents:
        """Asks each service about the agents named, about all where none is; one that cannot be asked is left out."""
        stats, _, waiting = await asyncio.gather(
            self._stats(agents, pss=pss), self._sleeper.look(agents), outcome_of(self._message_delivery.waiting(agents))
        )
        return SeenAgents(stats, None if isinstance(waiting, HiveError) else waiting, self._scheduler.next_times())

    async def _stats(self, agents: list[str], *, pss: bool = False) -> dict[str, Stat] | None:
        """None where the helper cannot be asked."""
        stats = await outcome_of(self._helper.stat(agents, pss=pss))
        if isinstance(stats, HiveError):
            return None
        for agent, stat in stats.items():
            self._lacking[agent] = stat.limits
            self.freezer = FREEZERS.get(stat.freezer, stat.freezer) or self.freezer
        return stats

    def _view(self, life: AgentLifecycle, seen: SeenAgents) -> AgentView:
        agent = life.agent.id
        stat = None if seen.stats is None else seen.stats.get(agent, Stat(state="gone"))
        verdict = self._sleeper.verdict(life)
        return views.agent_view(
            life,
            why=verdict.why,
            brief=verdict.brief,
            sentence=self._sleeper.why(life, stat, verdict),
            stat=stat,
            seen=self._sleeper.activity(agent),
            used=self._counters.used(agent),
            messages_waiting=None if seen.waiting is None else seen.waiting.get(agent, 0),
            next_wake_at=seen.next_times.get(agent),
            can=self._runtimes.found.get(life.agent.spec.runtime),
            prewarm_note=self._prewarmer.note(life),
            budget_percent=self._budgets.percent_of(agent, life.agent.spec.tenant),
        )
