"""Looks at every agent for readers that ask again and again, as often as it pays, and says what changed meanwhile."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Collection, Hashable

from hive.agents.lifecycle import AgentLifecycle
from hive.agents.roster import Roster
from hive.agents.sleeper import Sleeper
from hive.control.changed import Changed, ChangeLog, Ration
from hive.control.counters import Counters
from hive.domain import ALIVE
from hive.link.helper import Stat

Stats = dict[str, Stat]
AskStats = Callable[[list[str]], Awaitable[Stats | None]]

LOOKED_AT_ONCE = 1000
"""Before others have their turn: a millisecond."""
FAILED_S = 0.05
"""As if it had taken so long: asked again in 10 s."""


class ChangeFeed:
    """One per daemon. A look at all agents takes one two-hundredth of the time at most, for any number of readers.

    `stat` asks the helper: of those named, of all where none is; None where it cannot be asked.
    """

    def __init__(self, roster: Roster, sleeper: Sleeper, counters: Counters, stat: AskStats) -> None:
        self._roster = roster
        self._sleeper = sleeper
        self._counters = counters
        self._stat = stat
        self._log = ChangeLog(secrets.token_hex(4))
        self._stats: Stats | None = {}
        self._figures: dict[str, Hashable] = {}
        """The helper's figures that count as a change, from the last time all were asked for."""
        self._everybody = Ration(share=0.005, least_s=0.5, most_s=10.0)
        self._truth_of_all = Ration(share=0.005, least_s=0.5, most_s=120.0)
        self._truth_of_some = Ration(share=0.005, least_s=0.5, most_s=10.0)
        self._turn = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<ChangeFeed {self._log!r}>"

    async def look(self, cursor: str, fresh: Collection[str]) -> tuple[Changed, Stats | None]:
        """The changes since `cursor` (`ChangeLog.since`), and ground truth.

        It is asked of the helper anew for agents changed or named in `fresh`; of the others it may be old.
        """
        async with self._turn:
            await self._look_at_everybody()
            changed = self._log.since(cursor)
            named = {*changed.there, *fresh}
            await self._ask_of(self._doubtful(named) if changed.is_whole else named)
            return changed, self._stats

    async def _look_at_everybody(self) -> None:
        if self._truth_of_all.is_due(self._now()):
            await self._ask_of_everybody()
        if self._everybody.is_due(began := self._now()):
            await self._sleeper.look()
            facts = {}
            for count, life in enumerate(self._roster, 1):
                facts[life.agent.id] = self._facts(life)
                if count % LOOKED_AT_ONCE == 0:
                    await asyncio.sleep(0)
            self._log.note(facts)
            self._everybody.took(self._now() - began, now=self._now())

    async def _ask_of_everybody(self) -> None:
        began, agents = self._now(), [life.agent.id for life in self._roster]
        self._stats = _whole(agents, await self._stat([]))
        self._figures = {agent: _figures(stat) for agent, stat in (self._stats or {}).items()}
        self._took(self._truth_of_all, began, self._stats)

    async def _ask_of(self, named: Collection[str]) -> None:
        """Asks anew about these, where it is their turn; about an agent of unknown state at once."""
        agents = [agent for agent in named if self._roster.get(agent) is not None]
        if not agents or not (self._doubtful(agents) or self._truth_of_some.is_due(self._now())):
            return
        began = self._now()
        stats = _whole(agents, await self._stat(agents))
        self._took(self._truth_of_some, began, stats)
        if stats is None:
            self._stats = None
        elif self._stats is None:  # the helper is back: the state of the others is unknown
            await self._ask_of_everybody()
        else:
            self._stats |= stats

    def _doubtful(self, agents: Collection[str]) -> list[str]:
        """The agents the helper was not asked about since they were made, or since they began or ceased to live."""
        if self._stats is None:
            return []
        found = []
        for agent in agents:
            life, stat = self._roster.get(agent), self._stats.get(agent)
            if life is not None and (stat is None or (stat.state == "gone") is (life.status in ALIVE)):
                found.append(agent)
        return found

    def _took(self, ration: Ration, began: float, stats: Stats | None) -> None:
        """A helper that hangs is no reason to ask it as seldom as one with much to do."""
        now = self._now()
        ration.took(now - began if stats is not None else min(now - began, FAILED_S), now=now)

    def _facts(self, life: AgentLifecycle) -> Hashable:
        """All of its view that changes otherwise than with time alone."""
        agent = life.agent
        seen, used = self._sleeper.activity(agent.id), self._counters.used(agent.id)
        return (
            agent,
            *(life.pid, life.wakes, life.pauses, life.last_wake, life.deep_failure),
            *(used.requests, used.tokens_in, used.tokens_out, used.last_active_at),
            *(seen.in_flight, seen.parked, seen.ingress),
            *(life.restarts.count, life.restarts.reason, life.restarts.next_at),
            self._figures.get(agent.id),
        )

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def _whole(asked: Collection[str], stats: Stats | None) -> Stats | None:
    """The stats with those added that the helper does not know: it holds nothing of them.

    >>> found = _whole(["ann", "bob"], {"bob": Stat(state="running")})
    >>> found["ann"].state, found["bob"].state
    ('gone', 'running')
    """
    return None if stats is None else {agent: Stat(state="gone") for agent in asked} | stats


def _figures(stat: Stat) -> Hashable:
    """Not the RAM that is shown: a PSS moves with each neighbour that comes or goes."""
    return stat.state, stat.pid, stat.rss_bytes, stat.held_bytes is None, stat.swap_bytes, stat.processes, stat.limits
