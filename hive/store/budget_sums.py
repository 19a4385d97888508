"""The spending of tenants and agents in a day and a month, of the rows and sums of usage that there are anyway."""

from __future__ import annotations

import sqlite3
from typing import NamedTuple

from hive.budgets import UnitPrices
from hive.domain import By
from hive.store.usage import CostSums, UsageFilter, usage_by, usage_since

_FAR = """
SELECT {column}, sum(coalesce(tokens_in, 0) + coalesce(tokens_out, 0)) FROM inference_usage
INDEXED BY inference_usage_far WHERE far = 1 AND created_at >= ? GROUP BY {column}
"""


class PeriodTokens(NamedTuple):
    """Tokens in and out since the day began, since the month began, and since the day began of requests that left."""

    day: int = 0
    month: int = 0
    cloud_day: int = 0


class SpentOfAll(NamedTuple):
    """By agent's id and by tenant's name; who is not there has spent nothing."""

    agents: dict[str, PeriodTokens]
    tenants: dict[str, PeriodTokens]


def spent_of_all(conn: sqlite3.Connection, day_begins: float, month_begins: float, prices: UnitPrices) -> SpentOfAll:
    """Adds it up; of audio and images what they count as by `prices`. Requests whose end is later than now, by a clock
    that was set back, are among them."""
    agents = [
        {cost.agent_id: _tokens(cost, prices) for cost in usage_since(conn, UsageFilter(since)).agents}
        for since in (day_begins, month_begins)
    ]
    tenants = [
        {str(cost.key): _tokens(cost, prices) for cost in usage_by(conn, By.TENANT, UsageFilter(since))}
        for since in (day_begins, month_begins)
    ]
    far = [_far(conn, column, day_begins) for column in ("agent_id", "tenant")]
    return SpentOfAll(_joined(agents[0], agents[1], far[0]), _joined(tenants[0], tenants[1], far[1]))


def _tokens(cost: CostSums, prices: UnitPrices) -> int:
    return cost.tokens_in + cost.tokens_out + prices.tokens(audio_ms=cost.audio_ms, pixel_steps=cost.pixel_steps)


def _far(conn: sqlite3.Connection, column: str, since: float) -> dict[str, int]:
    """Requests are kept one by one for a day at least, so the sums need not tell of these tokens. No server of audio or
    images is far."""
    return dict(conn.execute(_FAR.format(column=column), (since,)).fetchall())


def _joined(day: dict[str, int], month: dict[str, int], far: dict[str, int]) -> dict[str, PeriodTokens]:
    names = day.keys() | month.keys() | far.keys()
    return {name: PeriodTokens(day.get(name, 0), month.get(name, 0), far.get(name, 0)) for name in names}
