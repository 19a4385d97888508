"""With time requests become sums, and old ones go: in small steps, on a real database."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest

from hive.budgets import BudgetPeriods, UnitPrices
from hive.control import usage_history
from hive.control.usage_history import UsageHistory
from hive.domain import UsageEvent
from hive.settings.table import DaemonSection as DaemonSettings
from hive.store import rollups, usage
from hive.store.database import Database
from hive.store.usage import PeriodTokens, spent_of_all
from tests.fakes.usage_events import usage_event

DAY_S = 86400.0


def event(no: int, **fields: Any) -> UsageEvent:
    return usage_event(no, **{"tokens_in": no, **fields})


def spent(conn: sqlite3.Connection) -> tuple[int, int]:
    found = usage.used_in_all(conn)
    return found.requests, found.tokens_in


async def rows_of(database: Database) -> list[tuple[str, int]]:
    found = await database.read(
        lambda conn: conn.execute("SELECT id, rolled_up FROM inference_usage ORDER BY created_at DESC").fetchall()
    )
    return [tuple(row) for row in found]


async def test_requests_of_an_older_hive_get_into_the_sums_and_old_ones_go(
    database: Database, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(usage_history, "PAUSE_S", 0.0)
    for name in ("ROLLED_UP_AT_ONCE", "PRUNED_AT_ONCE"):
        monkeypatch.setattr(rollups, name, 3)
    now = time.time()
    events = [event(no, created_at=now - no * DAY_S) for no in range(20)]
    await database.write(lambda conn: usage.insert(conn, events))
    await database.write(lambda conn: conn.execute("DELETE FROM usage_hours").rowcount)
    for statement in ("DELETE FROM usage_days", "DELETE FROM usage_weeks", "UPDATE inference_usage SET rolled_up = 0"):
        await database.write(lambda conn, text=statement: conn.execute(text).rowcount)  # type: ignore[misc]
    history = UsageHistory(database, DaemonSettings(usage_retention_days=4, usage_rollup_days=7))
    with caplog.at_level(logging.INFO):
        await history.see_to()
    assert await rows_of(database) == [(f"p1-{no}", 1) for no in range(5)]
    assert "usage_rolled_up requests=20" in caplog.text
    assert "usage_pruned requests=15 sums=" in caplog.text
    assert await database.read(spent) == (20, 190)
    found = await database.read(lambda conn: usage.spent_since(conn, 0.0))
    whole_weeks = (now - 7 * DAY_S) // (7 * DAY_S) * 7 * DAY_S
    assert found.requests == sum(one.created_at >= whole_weeks for one in events) < 16
    caplog.clear()
    await history.see_to()
    assert caplog.text == ""


async def test_usage_is_kept_for_ever_where_the_settings_say_so(database: Database) -> None:
    await database.write(lambda conn: usage.insert(conn, [event(1)]))
    await UsageHistory(database, DaemonSettings(usage_retention_days=0, usage_rollup_days=1)).see_to()
    assert await rows_of(database) == [("p1-1", 1)]
    assert (await database.read(lambda conn: usage.spent_since(conn, 0.0))).requests == 1


async def test_other_writes_come_between_while_much_is_rolled_up(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage_history, "PAUSE_S", 0.001)
    monkeypatch.setattr(rollups, "ROLLED_UP_AT_ONCE", 2)
    events = [event(no, created_at=time.time()) for no in range(40)]
    await database.write(lambda conn: usage.insert(conn, events))
    await database.write(lambda conn: conn.execute("UPDATE inference_usage SET rolled_up = 0").rowcount)
    left = []
    seeing = asyncio.create_task(UsageHistory(database, DaemonSettings()).see_to())
    while not seeing.done():
        left.append(
            await database.write(
                lambda conn: conn.execute("SELECT count(*) FROM inference_usage WHERE rolled_up = 0").fetchone()[0]
            )
        )
        await asyncio.sleep(0)
    await seeing
    assert len(set(left)) > 5


async def test_a_database_that_takes_nothing_now_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(usage_history, "EVERY_S", 0.001)
    database = Database.open(tmp_path / "closed.db")
    database.close()
    running = asyncio.create_task(UsageHistory(database, DaemonSettings()).run())
    while caplog.text.count("usage_not_pruned error=the database is closed") < 2:
        assert not running.done()
        await asyncio.sleep(0.001)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


@pytest.mark.parametrize("has_budget", [True, False])
async def test_what_a_budget_adds_up_is_kept_however_short_usage_is(database: Database, has_budget: bool) -> None:
    """A month's budget shrank by each day that was pruned: with sums of a week the month began anew every week."""
    now = time.time()
    month = BudgetPeriods(now - 0.5 * DAY_S, now + 0.5 * DAY_S, now - 25 * DAY_S, now + 5 * DAY_S)
    events = [event(no, agent_id="a1", tokens_in=100, tokens_out=0, created_at=now - no * DAY_S) for no in range(40)]
    await database.write(lambda conn: usage.insert(conn, events))

    def used(conn: sqlite3.Connection) -> PeriodTokens:
        return spent_of_all(conn, month.day_begins, month.month_begins, UnitPrices(10.0, 40.0)).agents["a1"]

    before = await database.read(used)
    assert before.day == 100
    assert before.month >= 2500
    settings = DaemonSettings(usage_retention_days=1, usage_rollup_days=1)
    await UsageHistory(database, settings, lambda: month if has_budget else None).see_to()
    after = await database.read(used)
    assert len(await rows_of(database)) <= 3, "requests go all the same"
    assert (after == before) is has_budget
    assert after.month < before.month or has_budget


async def test_a_budget_adds_up_audio_and_images_at_their_prices(database: Database) -> None:
    """Of the rows and of the sums, of agents and of tenants alike."""
    now = time.time()
    month = BudgetPeriods(now - 0.5 * DAY_S, now + 0.5 * DAY_S, now - 25 * DAY_S, now + 5 * DAY_S)
    told = [
        event(1, agent_id="a1", tokens_in=100, tokens_out=0, created_at=now),
        event(2, agent_id="a1", tokens_in=None, tokens_out=None, unit="audio_s", amount=6.02, created_at=now),
        event(3, agent_id="a1", tokens_in=None, tokens_out=None, unit="images", amount=1.0, work=1e7, created_at=now),
        event(
            4, agent_id="a1", tokens_in=None, tokens_out=None, unit="audio_s", amount=1.0, created_at=now - 2 * DAY_S
        ),
    ]
    await database.write(lambda conn: usage.insert(conn, told))
    prices = UnitPrices(audio_s=10.0, megapixel_step=40.0)
    found = await database.read(lambda conn: spent_of_all(conn, month.day_begins, month.month_begins, prices))
    assert found.agents["a1"] == found.tenants["default"] == PeriodTokens(day=100 + 461, month=100 + 471)
