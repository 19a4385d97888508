"""A load in the place of a model that its order names: one reservation, undone where the load fails. Helper, proxy and
memory are played (pool_world.py)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from hive.domain import JobState
from hive.errors import InsufficientMemory, ModelBusy
from hive.pool.accounts import charged_in
from hive.pool.state import MIB
from hive.store.jobs import StoredJob
from tests.approvals import LOAD, PIN, UNLOAD
from tests.pooling.pool_world import GPU, PoolWorld
from tests.waiting import until

World = Callable[..., Awaitable[PoolWorld]]


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    worlds: list[PoolWorld] = []

    async def make(models: dict[str, int], **settings: Any) -> PoolWorld:
        made = PoolWorld(tmp_path, models, total_mb=100, **settings)
        worlds.append(made)
        await made.begin()
        made.ask("a")
        await made.until("a", "ready")
        made.use("a", 0)
        return made

    yield make
    for made in worlds:
        await made.end()


def charged_mb(box: PoolWorld) -> int:
    return charged_in(GPU, box.pool.facts(0.0).slots) // MIB


async def test_nobody_is_given_the_rest_of_its_place_until_the_load_is_over(world: World) -> None:
    box = await world({"a": 80, "b": 30, "c": 30})
    box.servers.comes_up[box.id("b")] = "nothing"
    job = await box.orders.load("b", "uid:0", approval=LOAD, evict="a")
    box.ask("c", agent="c1")  # it would fit beside b
    await box.until("b", "loading")
    await asyncio.sleep(0.1)
    assert (box.state("a"), box.state("c"), charged_mb(box)) == ("cold", "cold", 80)
    box.servers.serve(box.id("b"))
    assert (await box.follow(job)).state is JobState.DONE
    await box.until("c", "ready")
    assert (box.state("b"), charged_mb(box)) == ("ready", 60)


async def test_who_left_is_back_where_the_load_fails_although_others_wait(world: World) -> None:
    box = await world({"a": 80, "b": 30, "c": 60})
    box.servers.comes_up[box.id("b")], box.servers.last[box.id("b")] = "ended", ["no such tensor"]
    job = await box.orders.load("b", "uid:0", approval=LOAD, evict="a")
    box.ask("c", agent="c1")
    ended = await box.follow(job)
    assert ended.state is JobState.FAILED
    assert ended.error is not None
    assert "no such tensor" in str(ended.error)
    await until(lambda: len(box.servers.started) >= 3)
    assert [id for id, _ in box.servers.started[:3]] == [box.id("a"), box.id("b"), box.id("a")]
    assert box.servers.started[2][1].accounts == {GPU: 80}


async def test_who_still_drains_is_opened_again_where_the_order_is_taken_back(world: World) -> None:
    box = await world({"a": 80, "b": 30}, drain_s=60)
    box.use("a", 1)
    job = await box.orders.load("b", "uid:0", approval=LOAD, evict="a")
    await box.until("a", "draining")
    assert (await box.orders.cancel(job.id)).state is JobState.CANCELLED
    box.use("a", 0)
    await box.until("a", "ready")
    assert (box.state("b"), charged_mb(box), len(box.servers.started)) == ("cold", 80, 1)


async def test_what_would_not_fit_even_then_is_refused_with_the_figures_and_nothing_moves(world: World) -> None:
    box = await world({"a": 40, "b": 120})
    with pytest.raises(InsufficientMemory) as refused:
        await box.orders.load("b", "uid:0", approval=LOAD, evict="a")
    assert refused.value.details == {"neededMB": 120, "freeMB": 100}
    assert (box.state("a"), box.state("b"), box.servers.stopped) == ("ready", "cold", [])


async def test_a_pinned_one_and_one_that_is_in_a_swap_do_not_leave(world: World) -> None:
    box = await world({"a": 40, "b": 40, "c": 40})
    box.servers.comes_up[box.id("b")] = "nothing"
    await box.orders.load("b", "uid:0", approval=LOAD, evict="a")
    await box.until("b", "loading")
    with pytest.raises(ModelBusy):
        await box.orders.load("c", "uid:0", approval=LOAD, evict="b")
    box.servers.serve(box.id("b"))
    await box.until("b", "ready")
    await box.orders.pin("b", "uid:0", approval=PIN)
    with pytest.raises(ModelBusy, match="b is pinned"):
        await box.orders.load("c", "uid:0", approval=LOAD, evict="b")
    assert box.state("c") == "cold"


async def test_of_two_orders_at_once_one_is_carried_out_and_the_other_is_refused(world: World) -> None:
    box = await world({"a": 80, "b": 30})
    both = [box.orders.load("b", "uid:0", approval=LOAD, evict="a") for _ in range(2)]
    came = await asyncio.gather(*both, return_exceptions=True)
    (job,) = [one for one in came if isinstance(one, StoredJob)]
    (refused,) = [one for one in came if not isinstance(one, StoredJob)]
    assert isinstance(refused, ModelBusy)
    assert (await box.follow(job)).state is JobState.DONE
    assert (box.state("a"), box.state("b"), len(box.servers.started)) == ("cold", "ready", 2)


async def test_an_order_beside_a_swap_does_not_end_it(world: World) -> None:
    box = await world({"a": 80, "b": 30})
    swap, beside = await asyncio.gather(
        box.orders.load("b", "uid:0", approval=LOAD, evict="a"),
        box.orders.load("b", "uid:0", approval=LOAD),
        return_exceptions=True,
    )
    assert isinstance(swap, StoredJob)
    assert isinstance(beside, ModelBusy)
    with pytest.raises(ModelBusy):
        await box.orders.load("b", "uid:0", approval=LOAD, evict="a")
    assert (await box.follow(swap)).state is JobState.DONE


async def test_who_is_being_stopped_when_the_order_is_taken_back_is_loaded_again(world: World) -> None:
    box = await world({"a": 80, "b": 30, "c": 60})
    box.servers.unload_s = 0.3
    job = await box.orders.load("b", "uid:0", approval=LOAD, evict="a")
    box.ask("c", agent="c1")
    await box.until("a", "stopping")
    assert (await box.orders.cancel(job.id)).state is JobState.CANCELLED
    await until(lambda: len(box.servers.started) >= 2)
    assert (box.servers.started[1][0], box.servers.started[1][1].accounts) == (box.id("a"), {GPU: 80})


async def test_who_left_stays_out_if_that_was_ordered_while_the_other_one_was_loaded(world: World) -> None:
    box = await world({"a": 80, "b": 30})
    box.servers.comes_up[box.id("b")] = "nothing"
    swap = await box.orders.load("b", "uid:0", approval=LOAD, evict="a")
    await box.until("b", "loading")
    out = await box.orders.unload("a", "uid:0", approval=UNLOAD)
    assert (out.state, out.result and out.result["changed"]) == (JobState.DONE, False)
    await until(lambda: box.id("b") in box.servers.processes)
    box.servers.end(box.id("b"))
    assert (await box.follow(swap)).state is JobState.FAILED
    box.pool.wake()
    await box.pool.passed()
    assert (box.state("a"), box.pool.find("a").waiting, charged_mb(box)) == ("cold", (), 0)
