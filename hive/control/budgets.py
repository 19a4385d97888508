"""Budgets in the daemon: what the proxy asks of them, what people see of them, and the events when one runs out."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import Callable, Iterable
from datetime import UTC
from typing import NamedTuple

from hive.agents.roster import Roster
from hive.agents.transition_lock import outcome_of
from hive.audit.audit_log import AuditLog
from hive.budgets import SOFT, BudgetKind, BudgetPeriods, TokenLimits, periods_at, tighter, zone_of
from hive.domain import UsageEvent
from hive.errors import HiveError
from hive.exposition import Values
from hive.link.link import failed
from hive.link.messages import Failed
from hive.link.usage import AskSpent, SpentIs, SpentRow
from hive.settings.table import Settings
from hive.shapes.usage import BudgetList
from hive.store import usage
from hive.store.audit import Filter
from hive.store.database import Database
from hive.store.usage import PeriodTokens, SpentOfAll

log = logging.getLogger("hive.usage")

SOFT_EVENT, SPENT_EVENT = "budget.soft", "budget.spent"
CHECK_S = 1.0
"""Between two looks whether a budget runs out."""
AGENT, TENANT = "agent", "tenant"


class KnownBudget(NamedTuple):
    """One limit of one tenant or agent, and what has been spent of it by requests that have ended."""

    scope: str
    key: str
    name: str
    kind: BudgetKind
    limit: int
    used: int

    @property
    def share(self) -> float:
        return self.used / self.limit

    @property
    def state(self) -> str:
        """
        >>> [KnownBudget("agent", "a", "a", BudgetKind.DAY, 100, used).state for used in (79, 80, 100)]
        ['ok', 'soft', 'spent']
        """
        return "spent" if self.used >= self.limit else "soft" if self.share >= SOFT else "ok"


class BudgetReport:
    """`spent`, `view` and `of_agents` raise as `Database.read`. The owner spawns `run` once."""

    def __init__(
        self, *, database: Database, roster: Roster, audit_log: AuditLog, settings: Callable[[], Settings]
    ) -> None:
        self._database = database
        self._roster = roster
        self._audit_log = audit_log
        self._settings = settings
        self._changed = asyncio.Event()
        self._told: set[tuple[str, str, str, float, str]] = set()
        self._seen: list[KnownBudget] = []
        """As they were looked at last."""
        self._shares: dict[tuple[str, str], float] = {}
        """The largest share that is spent, by scope and key, of the same look."""

    def __repr__(self) -> str:
        return f"<BudgetReport of {len(self._limits())} tenants and agents>"

    def _limits(self) -> dict[tuple[str, str], tuple[str, TokenLimits]]:
        """The limits of every tenant and agent that has any, by scope and key, with its name."""
        settings = self._settings()
        found = {(TENANT, name): (name, row.budget) for name, row in settings.tenants.items() if row.budget.is_set}
        for life in self._roster:
            limits = tighter(life.agent.spec.budget, settings.budget.of_tier(life.agent.spec.tier))
            if limits.is_set:
                found[AGENT, life.agent.id] = life.agent.name, limits
        return found

    def periods(self) -> BudgetPeriods:
        return periods_at(time.time(), zone_of(self._settings().budget.zone) or UTC)

    def periods_in_use(self) -> BudgetPeriods | None:
        """The day and the month that budgets add up now; None where nobody has one."""
        return self.periods() if self._limits() else None

    # for the proxy ----------------------------------------------------------------------------------------------------

    async def answer(self, asked: AskSpent, reply: Callable[[SpentIs | Failed], None]) -> None:
        told = await outcome_of(self.spent(asked))
        reply(failed(told) if isinstance(told, HiveError) else told)

    async def spent(self, asked: AskSpent) -> SpentIs:
        """Both are of one moment: the sums, and the event up to which those of the asking proxy are in them."""

        prices = self._settings().budget.prices

        def work(conn: sqlite3.Connection) -> tuple[SpentOfAll, int]:
            mark = usage.marks(conn).get(asked.epoch)
            found = usage.spent_of_all(conn, asked.day_begins, asked.month_begins, prices)
            return found, 0 if mark is None else mark.committed_to

        found, committed_to = await self._database.read(work)
        nothing = PeriodTokens()
        return SpentIs(
            committed_to=committed_to,
            agents={agent: SpentRow(*found.agents.get(agent, nothing)) for agent in asked.agents},
            tenants={tenant: SpentRow(*found.tenants.get(tenant, nothing)) for tenant in asked.tenants},
        )

    # for people -------------------------------------------------------------------------------------------------------

    async def known(self) -> list[KnownBudget]:
        """Every budget there is, what is nearest to its end first."""
        limits, periods, prices = self._limits(), self.periods(), self._settings().budget.prices
        if not limits:
            self._seen, self._shares = [], {}
            return []
        found: SpentOfAll = await self._database.read(
            lambda conn: usage.spent_of_all(conn, periods.day_begins, periods.month_begins, prices)
        )
        budgets = []
        for (scope, key), (name, wanted) in limits.items():
            spent = (found.agents if scope == AGENT else found.tenants).get(key, PeriodTokens())
            for kind, used in zip(BudgetKind, spent, strict=True):
                if limit := wanted.of(kind):
                    budgets.append(KnownBudget(scope, key, name, kind, limit, used))
        self._shares = {}
        for budget in budgets:
            whose = budget.scope, budget.key
            self._shares[whose] = max(budget.share, self._shares.get(whose, 0.0))
        self._seen = sorted(budgets, key=lambda budget: (-budget.share, budget.scope, budget.name))
        return self._seen

    async def view(self) -> BudgetList:
        """The answer of `GET /api/budgets`."""
        settings, periods = self._settings(), self.periods()
        return {
            "zone": settings.budget.zone,
            "budgets": [
                {
                    "scope": budget.scope,
                    "id": budget.key,
                    "name": budget.name,
                    "budget": str(budget.kind),
                    "limit": budget.limit,
                    "used": budget.used,
                    "left": max(0, budget.limit - budget.used),
                    "state": budget.state,
                    "resets_at": periods.ends(budget.kind),
                }
                for budget in await self.known()
            ],
        }

    def percent_of(self, agent: str, tenant: str) -> int | None:
        """The share that is spent of the budget that ends first of this agent and its tenant, as it was looked at last;
        None without one."""
        shares = [self._shares[key] for key in ((AGENT, agent), (TENANT, tenant)) if key in self._shares]
        return int(100 * max(shares)) if shares else None

    def metrics(self) -> dict[str, Values]:
        """The limits, and what was spent as it was looked at last, for Prometheus."""
        label = {(budget.scope, budget.name, str(budget.kind)): budget for budget in self._seen}
        return {
            "budget_limit_tokens": {key: budget.limit for key, budget in label.items()},
            "budget_used_tokens": {key: budget.used for key, budget in label.items()},
        }

    # events -----------------------------------------------------------------------------------------------------------

    def used(self, events: Iterable[UsageEvent]) -> None:
        """These requests have ended and are in the rows."""
        if any(True for _ in events):
            self._changed.set()

    def settings_changed(self) -> None:
        """Other limits may be in force: one that is reached is told of."""
        self._changed.set()

    async def run(self) -> None:
        """Tells of each budget once in its period that it runs out, and that it has; until cancelled."""
        while True:
            if isinstance(error := await outcome_of(self.see_to()), HiveError):
                log.warning("budgets_not_looked_at error=%s", error.message)
            await asyncio.sleep(CHECK_S)
            await self._changed.wait()
            self._changed.clear()

    async def see_to(self) -> None:
        periods = self.periods()
        for budget in await self.known():
            if budget.state != "ok":
                await self._tell(budget, SOFT_EVENT, periods)
            if budget.state == "spent":
                await self._tell(budget, SPENT_EVENT, periods)

    async def _tell(self, budget: KnownBudget, act: str, periods: BudgetPeriods) -> None:
        """The audit table knows whether it was told, also by an earlier daemon."""
        begins = periods.begins(budget.kind)
        key = budget.scope, budget.key, str(budget.kind), begins, act
        if key in self._told:
            return
        self._told = {one for one in self._told if one[3] >= periods.month_begins} | {key}
        rows = await self._audit_log.page(Filter(agent=(budget.key,), act=act, since=begins), 100)
        if any(row.row.detail.get("budget") == str(budget.kind) for row in rows):
            return
        detail = {"name": budget.name, "scope": budget.scope, "budget": str(budget.kind)}
        self._audit_log.note(act, target=budget.key, detail={**detail, "limit": budget.limit, "used": budget.used})
