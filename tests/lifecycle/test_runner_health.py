"""Words of the runner API about itself: `GET /health` is 503 only where no request would be served, and only for as
long as that; nothing is invented. Helper, proxy and memory are played (pool_world.py)."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hive.domain import JobState
from hive.errors import Unhealthy
from hive.lifecycle import runner_health
from hive.lifecycle.runner import RunnerDesk
from hive.lifecycle.runner_views import RunnerViews
from hive.link.requests import QueueView, TenantView
from hive.models.catalog import Catalog
from hive.models.routing import preferences
from hive.store.load_tasks import StoredLoad
from tests.approvals import LOAD
from tests.pooling.pool_world import PoolWorld
from tests.pooling.test_deployments import NoServerInUse

OOM = ["cudaMalloc failed: out of memory"]


class PlayedLine:
    """The proxy's line: so many of each tenant wait."""

    session = True

    def __init__(self) -> None:
        self.waiting: dict[str, int] = {}

    async def queue(self) -> Any:
        rows = [TenantView(name, 1.0, 1, count, 0.0) for name, count in self.waiting.items()]
        return SimpleNamespace(queue=QueueView(1, sum(self.waiting.values()), 1, None, rows))


class HealthWorld(PoolWorld):
    """Two models that fit one at a time, and what answers for them."""

    def desk(self, line: PlayedLine) -> RunnerDesk:
        given: Any = {"active": NoServerInUse(), "proxy_link": line}
        seen: Any = {
            "effects": SimpleNamespace(settings=self.settings),
            "gpus": None,
            "memory": None,
            "adapters": dict,
            "counts": SimpleNamespace(waits_ms=lambda: None),
        }
        views = RunnerViews(
            pool=self.pool,
            catalog=lambda: Catalog([slot.models[0] for slot in self.pool.slots.values()], preferences()),
            deployments=self.deployments,
            **given,
            **seen,
        )
        rest: Any = dict.fromkeys(("tasks", "models", "jobs", "cache"))
        return RunnerDesk(
            views=views,
            orders=self.orders,
            runner_id="r",
            started_at=time.time(),
            is_degraded=lambda: False,
            **given,
            **rest,
        )

    async def fails(self, model: str, lines: list[str]) -> None:
        self.servers.comes_up[self.id(model)], self.servers.last[self.id(model)] = "ended", lines
        job = await self.follow(await self.orders.load(model, "uid:0", approval=LOAD))
        assert job.state is JobState.FAILED


@pytest.fixture
async def box(tmp_path: Path) -> AsyncIterator[HealthWorld]:
    made = HealthWorld(tmp_path, {"a": 60, "b": 60}, total_mb=100)
    await made.begin()
    yield made
    await made.end()


async def test_a_load_that_died_for_memory_is_told_of_only_where_nothing_serves_and_for_a_while(
    box: HealthWorld, monkeypatch: Any
) -> None:
    desk = box.desk(PlayedLine())
    slot = box.pool.find("a")
    slot.failures = 1  # the first time it is tried again at once, with more memory
    await box.fails("a", OOM)
    with pytest.raises(Unhealthy, match="memory was not enough for a"):
        await desk.health()
    monkeypatch.setattr(runner_health, "OOM_TOLD_S", 0.0)
    assert (await desk.health())["status"] == "healthy"
    monkeypatch.undo()
    await box.follow(await box.orders.load("b", "uid:0", approval=LOAD))
    assert (await desk.health())["modelsLoaded"] == 1


async def test_where_all_loads_have_failed_it_is_said(box: HealthWorld) -> None:
    desk = box.desk(PlayedLine())
    box.pool.find("a").failures = box.pool.find("b").failures = 9
    await box.fails("a", ["no such tensor"])
    assert (await desk.health())["modelsLoaded"] == 0
    await box.fails("b", ["no such tensor"])
    with pytest.raises(Unhealthy, match="all models failed to load"):
        await desk.health()


async def test_one_tenants_full_line_is_nobody_elses_503(box: HealthWorld) -> None:
    line, depth = PlayedLine(), box.settings.proxy.queue_depth
    desk = box.desk(line)
    line.waiting = {"acme": 2 * depth, "default": 0}
    assert (await desk.health())["queueDepth"] == 2 * depth
    line.waiting = {"acme": 2 * depth, "default": 2 * depth}
    with pytest.raises(Unhealthy, match=f"the queue is full: {4 * depth} requests wait"):
        await desk.health()


async def test_the_depth_of_the_line_and_the_most_it_may_be_are_of_the_same_tenants(box: HealthWorld) -> None:
    line, depth = PlayedLine(), box.settings.proxy.queue_depth
    line.waiting = {"acme": 2 * depth, "default": 1}
    told = await box.desk(line)._views.queue()
    assert (told["depth"], told["maxDepth"]) == (2 * depth + 1, 4 * depth)


async def test_a_load_at_the_server_in_use_tells_no_progress_that_nobody_knows(box: HealthWorld) -> None:
    load = StoredLoad(job="j", asked="elsewhere", model="elsewhere", begun_at=1.0)
    assert box.desk(PlayedLine())._told_of(load) == {"taskId": "load-j", "status": "loading", "modelId": "elsewhere"}
