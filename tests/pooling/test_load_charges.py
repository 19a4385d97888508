"""The charge of a load: the daemon tells the proxy whose demand it was for. Helper and proxy are played."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from hive.domain import Band
from tests.approvals import LOAD
from tests.pooling.pool_world import PoolWorld
from tests.waiting import until


@pytest.fixture
async def box(tmp_path: Path) -> AsyncIterator[PoolWorld]:
    made = PoolWorld(tmp_path, {"a": 40, "b": 40}, total_mb=100)
    await made.begin()
    yield made
    await made.end()


async def test_a_load_is_charged_to_the_tenant_that_asked_with_its_seconds_before_the_gate_opens(
    box: PoolWorld,
) -> None:
    box.servers.load_s = 0.1
    box.ask("a", agent="ann", tenant="acme", band=Band.HIGH)
    await until(lambda: box.servers.started)
    box.leave("a")  # it goes while the load is under way: the load was for it all the same
    await box.until("a", "ready")
    (charge,) = box.proxy.charged
    assert (charge.id, charge.tenant, charge.agent, charge.band) == (box.id("a"), "acme", "ann", Band.HIGH)
    assert charge.seconds > 0.09  # a timer of the loop may come a little early


async def test_a_pin_and_an_operators_order_are_charged_to_nobody(box: PoolWorld) -> None:
    box.pool.find("a").pinned_at = 0.0
    box.ask("a")
    await box.until("a", "ready")
    await box.orders.load("b", "root", approval=LOAD)
    await box.until("b", "ready")
    assert box.proxy.charged == []


async def test_a_load_that_failed_and_one_that_is_taken_over_are_charged_to_nobody(box: PoolWorld) -> None:
    box.servers.comes_up[box.id("a")] = "ended"
    box.ask("a")
    await until(lambda: box.pool.find("a").failures == 1)
    box.leave("a")
    box.ask("b")
    await box.until("b", "ready")
    await box.kill()
    await box.again()
    await box.until("b", "ready")
    assert [charge.id for charge in box.proxy.charged] == [box.id("b")]
