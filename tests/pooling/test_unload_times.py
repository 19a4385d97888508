"""Times of unloads are learnt, and are what the turns and the printed bound reckon with. Helper and memory are
played."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from hive.domain import Band
from hive.pool.bound import waiting_bound
from hive.pool.state import Demand
from hive.store import pool
from tests.pooling.pool_world import PoolWorld
from tests.waiting import until


@pytest.fixture
async def box(tmp_path: Path) -> AsyncIterator[PoolWorld]:
    made = PoolWorld(tmp_path, {"a": 60, "b": 60}, total_mb=100)
    await made.begin()
    yield made
    await made.end()


async def unloaded(box: PoolWorld, model: str) -> None:
    box.ask(model)
    await box.until(model, "ready")
    box.use(model, 0)
    box.pool.find(model).unload_orders.add("job")
    box.pool.wake()
    await box.until(model, "cold")


async def test_an_unload_is_learnt_kept_and_reckoned_with(box: PoolWorld) -> None:
    slot = box.pool.find("a")
    assert box.pool.slot_facts(slot, 0.0).unload_s == 1.5
    box.servers.unload_s = 0.2
    await unloaded(box, "a")
    await until(lambda: box.pool.slot_facts(slot, 0.0).unload_s != 1.5)
    learnt = box.pool.slot_facts(slot, 0.0).unload_s
    assert learnt >= 0.2
    await until(lambda: f'"unload_s":[{learnt}' in next(iter(box.database.read_now(pool.footprints).values()), ""))
    box.ask("a")
    await box.until("a", "ready")
    box.use("a", 1)
    facts = box.pool.facts(0.0)
    parts = dict(waiting_bound(facts, box.id("b"), Demand(Band.NORMAL, 0.0), 0.0).parts)
    assert parts["unload of a"] == learnt + facts.rules.free_s


async def test_an_unload_whose_memory_never_came_back_is_no_measurement(box: PoolWorld) -> None:
    box.ask("a")
    await box.until("a", "ready")
    box.memory.left_mb = 60
    await unloaded(box, "a")
    assert "pool.foreign" in [act for act, _ in box.audit.acts]
    assert box.pool.slot_facts(box.pool.find("a"), 0.0).unload_s == 1.5
