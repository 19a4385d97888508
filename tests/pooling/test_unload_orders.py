"""Orders to unload a model: each is a job of its own, and one that is taken back takes nobody else's with it. Helper,
proxy and memory are played (pool_world.py)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from hive.domain import DeploymentState, JobState
from tests.approvals import LOAD, UNLOAD
from tests.pooling.pool_world import PoolWorld
from tests.waiting import until


@pytest.fixture
async def box(tmp_path: Path) -> AsyncIterator[PoolWorld]:
    made = PoolWorld(tmp_path, {"a": 60}, total_mb=100, drain_s=60)
    await made.begin()
    await made.follow(await made.orders.load("a", "uid:0", approval=LOAD))
    made.audit.acts.clear()
    yield made
    await made.end()


def ends(box: PoolWorld) -> list[str]:
    return [detail["state"] for act, detail in box.audit.acts if act == "job.ended"]


async def test_an_unload_ends_its_job_once(box: PoolWorld) -> None:
    box.use("a", 0)
    assert (await box.follow(await box.orders.unload("a", "uid:0", approval=UNLOAD))).state is JobState.DONE
    box.pool.wake()
    await box.pool.passed()
    assert (ends(box), box.state("a")) == (["done"], "cold")


async def test_one_that_is_taken_back_leaves_the_other_one_as_it_is(box: PoolWorld) -> None:
    box.use("a", 1)
    forced = await box.orders.unload("a", "uid:0", approval=UNLOAD, force=True)
    gentle = await box.orders.unload("a", "uid:7", approval=UNLOAD)
    await box.until("a", "draining")
    box.orders.keep("a", gentle)
    assert (await box.follow(gentle)).state is JobState.FAILED
    row = box.deployments.row(box.id("a"))
    assert (row and row.state, box.state("a")) == (DeploymentState.UNLOADING, "draining")
    box.use("a", 0)
    assert (await box.follow(forced)).state is JobState.DONE
    assert (box.state("a"), box.deployments.row(box.id("a"))) == ("cold", None)


async def test_where_no_other_one_holds_it_is_opened_again(box: PoolWorld) -> None:
    box.use("a", 1)
    gentle = await box.orders.unload("a", "uid:7", approval=UNLOAD)
    await box.until("a", "draining")
    box.orders.keep("a", gentle)
    assert (await box.follow(gentle)).state is JobState.FAILED
    await box.until("a", "ready")
    await until(lambda: (row := box.deployments.row(box.id("a"))) is not None and row.state is DeploymentState.LOADED)
