"""Models of the pool that a flush loads anew: beside long requests, and beside orders of an operator. Helper and memory
are played."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from hive.lifecycle.load_anew import SlotLoader
from hive.pooling.pooled_slot import PooledSlot
from hive.pooling.slot_steps import RENEW_S
from tests.approvals import LOAD, UNLOAD
from tests.pooling.pool_world import PoolWorld
from tests.waiting import until

DRAIN_S = 0.3


@pytest.fixture
async def box(tmp_path: Path) -> AsyncIterator[PoolWorld]:
    made = PoolWorld(tmp_path, {"a": 60, "b": 60}, total_mb=100, drain_s=DRAIN_S)
    await made.begin()
    yield made
    await made.end()


async def flushing(box: PoolWorld, in_flight: int) -> tuple[PooledSlot, asyncio.Task[None]]:
    """A flush that waits for requests."""
    slot = box.pool.find("a")
    box.ask("a")
    await box.until("a", "ready")
    box.use("a", in_flight)
    task = asyncio.ensure_future(SlotLoader(box.pool).load_anew(slot))
    if in_flight:
        await until(lambda: any((drain_s or 0) > RENEW_S - 60 for _, drain_s in box.proxy.closed))
    return slot, task


def ends(box: PoolWorld) -> None:
    """The requests that are there end."""
    box.proxy.in_flight.clear()


async def test_a_long_request_is_not_cut_and_the_model_is_loaded_again_after_it(box: PoolWorld) -> None:
    slot, task = await flushing(box, 1)
    await asyncio.sleep(3 * DRAIN_S)
    assert (slot.state, slot.was_cut, box.proxy.in_flight, task.done()) == ("draining", False, {box.id("a"): 1}, False)
    ends(box)
    await task
    await until(lambda: slot.generation == 2 and slot.state == "ready")
    assert not slot.renewing
    assert ("model.unloaded", {"name": "a", "reason": "its prompt cache is flushed"}) in box.audit.acts


async def test_an_order_to_unload_cuts_as_always_and_is_not_undone(box: PoolWorld) -> None:
    slot, task = await flushing(box, 1)
    job = await box.orders.unload("a", "ann", approval=UNLOAD)
    assert (await box.follow(job)).state == "done"
    await task
    await asyncio.sleep(0.1)
    assert (slot.state, slot.generation, slot.order, box.proxy.in_flight) == ("cold", 1, None, {})


async def test_an_order_to_load_meanwhile_neither_ends_nor_hangs_it(box: PoolWorld) -> None:
    """It reset the order to unload, and the flush waited for an hour."""
    slot, task = await flushing(box, 1)
    job = await box.orders.load("a", "ann", approval=LOAD)
    ends(box)
    await task
    assert (await box.follow(job)).state == "done"
    await until(lambda: slot.generation == 2 and slot.state == "ready")


async def test_a_withdrawn_order_to_unload_has_the_flush_go_on(box: PoolWorld) -> None:
    slot, task = await flushing(box, 1)
    slot.renewing = False
    await until(lambda: slot.renewing)
    ends(box)
    await task
    await until(lambda: slot.generation == 2 and slot.state == "ready")


async def test_two_flushes_at_once_load_it_once(box: PoolWorld) -> None:
    slot, task = await flushing(box, 1)
    other = asyncio.ensure_future(SlotLoader(box.pool).load_anew(slot))
    ends(box)
    await asyncio.gather(task, other)
    await until(lambda: slot.generation == 2 and slot.state == "ready")
    await asyncio.sleep(0.1)
    assert (slot.generation, slot.order) == (2, None)


async def test_a_cancelled_flush_opens_the_model_again(box: PoolWorld) -> None:
    slot, task = await flushing(box, 1)
    task.cancel()
    await box.until("a", "ready")
    assert (slot.generation, slot.renewing, box.proxy.in_flight) == (1, False, {box.id("a"): 1})
