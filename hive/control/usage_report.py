"""Usage as the API tells it: sums by agent, tenant, model or hour, one agent's, one request's, the server's."""

from __future__ import annotations

import asyncio
import sqlite3
import time

import msgspec

from hive.agents.roster import Roster
from hive.agents.sleeper import Sleeper
from hive.agents.transition_lock import outcome_of
from hive.control import request_views, views
from hive.control.counters import Counters
from hive.control.effects import DaemonEffects
from hive.domain import By
from hive.errors import HiveError, NotFound
from hive.host.gpu_memory import GpuMemoryReader
from hive.link.proxy_link import ProxyGates
from hive.link.requests import QueueIs
from hive.shapes import system
from hive.shapes.agents import AgentUsage
from hive.shapes.usage import InferenceStats, Usage
from hive.store import audit, usage
from hive.store.database import Database

EVERYBODY = usage.UsageFilter()


class UsageReport:
    """Every method raises as `Database.read` does."""

    def __init__(
        self,
        *,
        database: Database,
        roster: Roster,
        sleeper: Sleeper,
        counters: Counters,
        proxy_link: ProxyGates,
        gpus: GpuMemoryReader,
        effects: DaemonEffects,
    ) -> None:
        self._database = database
        self._roster = roster
        self._sleeper = sleeper
        self._counters = counters
        self._proxy_link = proxy_link
        self._gpus = gpus
        self._effects = effects

    def __repr__(self) -> str:
        return f"<UsageReport of {len(self._roster)} agents>"

    async def spent(self, since_s: float, by: By = By.AGENT, of: usage.UsageFilter = EVERYBODY) -> Usage:
        """The usage of the last `since_s` seconds. `of.agent` is a ref; the id of a removed one, too."""
        agent = None if of.agent is None else self._roster.once_known(of.agent)
        asked = msgspec.structs.replace(of, since=time.time() - since_s, agent=agent)
        tracked = self._effects.settings.inference.token_tracking
        if by is By.AGENT:
            return await self._database.read(lambda conn: _by_agent(conn, asked, tracked=tracked))
        costs: list[usage.GroupCost] = await self._database.read(lambda conn: usage.usage_by(conn, by, asked))
        return views.grouped_usage_view(tracked, by, costs)

    async def of_agent(self, agent: str, period_s: float, period: str, limit: int) -> AgentUsage:
        """The shape of the original specification; `recent` has at most `limit` requests."""
        since = time.time() - period_s
        found: usage.UsageOfAgent = await self._database.read(
            lambda conn: usage.agent_usage(conn, agent, since=since, period=period, limit=limit)
        )
        answer: AgentUsage = msgspec.to_builtins(found)
        return answer

    async def request(self, request_id: str, progress: request_views.Progress) -> system.RequestView:
        """One request, under way or ended. `progress`: of its model's load. Raises NotFound."""
        ended, queue = await asyncio.gather(
            self._database.read(lambda conn: usage.request(conn, request_id)), outcome_of(self._proxy_link.queue())
        )
        if ended is not None:
            life = self._roster.get(ended.agent)
            return request_views.ended_request_view(ended, None if life is None else life.agent.name)
        for told in queue.requests if isinstance(queue, QueueIs) else []:
            if told.id == request_id:
                return request_views.request_view(told, progress)
        missing = f"; {queue.message}" if isinstance(queue, HiveError) else ""
        raise NotFound(
            f"there is no request {request_id[:80]!r}{missing}",
            hint="one that ended is here within a second, for usage_retention_days; one that was refused never is",
        )

    async def inference(self) -> InferenceStats:
        """The shape of the original specification."""
        now = time.time()
        hour, day, gpus, _ = await asyncio.gather(
            self._database.read(lambda conn: usage.spent_since(conn, now - 3600)),
            self._database.read(lambda conn: usage.spent_since(conn, now - 86400)),
            self._gpus.seen(),
            self._sleeper.look(),
        )
        agents = [life.agent for life in self._roster]
        return views.inference_stats_view(
            self._effects.backend,
            hour,
            day,
            [(agent, self._counters.used(agent.id)) for agent in agents],
            gpus,
            sum(self._sleeper.activity(agent.id).in_flight for agent in agents),
        )


def _by_agent(conn: sqlite3.Connection, asked: usage.UsageFilter, *, tracked: bool) -> Usage:
    found = usage.usage_since(conn, asked)
    removed = audit.removed_names(conn, [cost.agent_id for cost in found.agents if cost.name is None])
    return views.usage_view(tracked, found, removed)
