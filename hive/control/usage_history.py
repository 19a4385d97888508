"""The keeping of usage over time: requests of an older Hive are added to the sums, and old rows are pruned."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import Callable

from hive.agents.transition_lock import outcome_of
from hive.budgets import BudgetPeriods
from hive.errors import HiveError
from hive.settings.table import DaemonSection
from hive.store import rollups
from hive.store.database import Database

log = logging.getLogger("hive.usage")

EVERY_S = 3600.0
PAUSE_S = 0.02
"""Between two transactions of about that length, so that others get their turn."""

Step = Callable[[sqlite3.Connection], int]


class UsageHistory:
    """The owner spawns `run` once. `settings`: how long is what kept, for as long as the daemon runs. `budgeted`: the
    day and the month that budgets add up, which are kept in any case; None where nobody has one."""

    def __init__(
        self,
        database: Database,
        settings: DaemonSection,
        budgeted: Callable[[], BudgetPeriods | None] = lambda: None,
    ) -> None:
        self._database = database
        self._settings = settings
        self._budgeted = budgeted

    async def run(self) -> None:
        """Sees to it now and every hour, until cancelled."""
        while True:
            if isinstance(error := await outcome_of(self.see_to()), HiveError):
                log.warning("usage_not_pruned error=%s", error.message)
            await asyncio.sleep(EVERY_S)

    async def see_to(self) -> None:
        """Brings every request into the sums, then prunes. Raises as `Database.write`; what was done is done."""
        if rolled_up := await self._until_done(rollups.roll_up):
            log.info("usage_rolled_up requests=%d", rolled_up)
        settings, now = self._settings, time.time()
        wanted = rollups.keep_from(
            now, requests_days=settings.usage_retention_days, sums_days=settings.usage_rollup_days
        )
        if (periods := self._budgeted()) is not None:
            wanted = rollups.with_periods(wanted, day_begins=periods.day_begins, month_begins=periods.month_begins)
        await self._database.write(lambda conn: rollups.let_go(conn, wanted, now=now))
        requests = await self._until_done(rollups.prune_requests)
        sums = await self._until_done(rollups.prune_sums)
        if requests or sums:
            log.info("usage_pruned requests=%d sums=%d", requests, sums)

    async def _until_done(self, step: Step) -> int:
        """Takes the step, a transaction each, until it finds nothing more to do; how many rows that were."""
        rows = 0
        while done := await self._database.write(step):
            rows += done
            await asyncio.sleep(PAUSE_S)
        return rows
