"""The time for which a task keeps its model: longer than the pool says, never shorter, and no longer turn for it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from hive.domain import Band
from hive.link.pool import SlotFlow, SlotFlows
from hive.pool.state import Demand, Rules, SlotFacts
from hive.pool.turns import may_leave_at, turn_ends_at
from tests.pooling.pool_world import PoolWorld


@pytest.fixture
async def box(tmp_path: Path) -> AsyncIterator[PoolWorld]:
    made = PoolWorld(tmp_path, {"a": 60, "b": 60}, total_mb=100)
    await made.begin()
    made.ask("a")
    await made.until("a", "ready")
    made.use("a", 0)
    yield made
    await made.end()


def served(box: PoolWorld, keep_s: float) -> float:
    """A request of a task with this `keep_alive_s` was at the model a; when that was."""
    box.pool.flows(SlotFlows(slots={box.id("a"): SlotFlow(in_flight=0, begun=1, keep_s=keep_s)}))
    return time.monotonic()


def facts(box: PoolWorld, now: float) -> SlotFacts:
    return box.pool.slot_facts(box.pool.find("a"), now)


async def test_a_task_keeps_the_model_and_shortens_no_other_keep(box: PoolWorld) -> None:
    assert facts(box, time.monotonic()).keep_alive_s == 0.0
    at = served(box, 600.0)
    assert facts(box, at).keep_alive_s == pytest.approx(600.0, abs=1.0)
    served(box, 5.0)
    assert facts(box, at + 60).keep_alive_s == pytest.approx(600.0, abs=1.0), "a shorter one takes nothing back"
    assert facts(box, at + 601).keep_alive_s == 0.0, "then it is kept as the pool says: for ever, until it is wanted"


async def test_it_holds_against_who_is_not_late_and_lengthens_no_turn(box: PoolWorld) -> None:
    at = served(box, 600.0)
    victim, rules = facts(box, at), Rules()
    waits = {band: SlotFacts("b", "b", 1, waiting=(Demand(band, at),)) for band in Band}
    kept = {band: may_leave_at(victim, waits[band], rules, at) - at for band in Band}
    assert kept[Band.NORMAL] == pytest.approx(rules.patience_normal_s, abs=1.0)
    assert kept[Band.LOW] > rules.patience_low_s, "a wish of another task waits for longer"
    for band in Band:
        without = facts(box, at + 601)
        assert turn_ends_at(victim, waits[band], rules) == turn_ends_at(without, waits[band], rules)


async def test_the_proxy_is_told_how_long_a_load_takes(box: PoolWorld) -> None:
    """By that it knows whether a budget can hold, before anybody waits for the model."""
    (row,) = (row for row in box.pool.rows() if row.id == box.id("b"))
    assert (row.load_s > 0, row.ready_in_s) == (True, None), "nobody waits for it"
