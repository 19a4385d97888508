"""Tasks of the runner API over kills: each ends, truthfully, and a model that left for a load that failed is back by
then. Helper, proxy and memory are played (pool_world.py)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from hive.control.active_backend import Active
from hive.control.models import Models
from hive.domain import DeploymentState, JobState
from hive.errors import NotFound, StoreFull
from hive.lifecycle.deployment_watch import DeploymentWatch
from hive.lifecycle.load_tasks import PREFIX, LoadTasks, in_job, surely
from hive.pooling.pooling import ModelPool
from hive.settings.registry import RegistrySection
from hive.store import load_tasks
from hive.store.load_tasks import StoredLoad
from hive.tasks import spawn
from tests.approvals import LOAD, UNLOAD
from tests.pooling.pool_world import GPU, PoolWorld
from tests.pooling.test_deployments import NoServerInUse
from tests.waiting import until


class TaskWorld(PoolWorld):
    """A pool with tasks and a watched registry, that restores."""

    def make(self, pins: Mapping[str, bool] | None = None) -> ModelPool:
        pool = super().make(pins)
        left = self.database.read_now(load_tasks.under_way)
        self.tasks = LoadTasks(
            database=self.database,
            jobs=self.jobs,
            pool=pool,
            models=cast("Models", None),  # nothing of it is at a server in use
            deployments=self.deployments,
            measure=lambda _: None,
            left=left,
        )
        return pool

    async def begin_all(self) -> None:
        self.settings = msgspec.structs.replace(self.settings, registry=RegistrySection(restore=True))
        watch = DeploymentWatch(
            self.deployments,
            pool=self.pool,
            active=cast("Active", NoServerInUse()),
            settings=lambda: self.settings,
            resumed=self.tasks.resumed,
        )
        self.watching = spawn(watch.run(), name="watch")
        await self.tasks.resume()

    async def next_daemon(self) -> None:
        self.watching.cancel()
        await self.kill()
        await self.again(wait=False)
        await self.begin_all()

    async def swap(self) -> StoredLoad:
        """A task to load b in the place of a, whose server is being started."""
        task = in_job(asked="b", model="b", evicts="a")
        job = await self.orders.load("b", "uid:0", approval=LOAD, evict="a", of_job=task)
        begun = await self.tasks.begun(job, asked="b", model="b", evicts="a")
        await until(lambda: self.id("b") in self.servers.processes)
        return begun

    async def state_of(self, task: StoredLoad) -> JobState:
        return (await self.tasks.get(PREFIX + task.job)).state

    async def ended(self, task: StoredLoad) -> JobState:
        for _ in range(1000):
            if (state := await self.state_of(task)) is not JobState.RUNNING:
                return state
            await asyncio.sleep(0.01)
        raise AssertionError("the task does not end")

    def recorded(self, model: str) -> DeploymentState | None:
        row = self.deployments.row(self.id(model))
        return None if row is None else row.state


@pytest.fixture
async def box(tmp_path: Path) -> AsyncIterator[TaskWorld]:
    made = TaskWorld(tmp_path, {"a": 80, "b": 30, "c": 60}, total_mb=100)
    await made.begin()
    await made.begin_all()
    await made.follow(await made.orders.load("a", "uid:0", approval=LOAD))
    made.use("a", 0)
    made.servers.comes_up[made.id("b")] = "nothing"
    yield made
    made.watching.cancel()
    await made.end()


async def test_a_load_that_ends_with_its_daemon_has_failed_on_record_too_and_who_left_is_back(box: TaskWorld) -> None:
    task = await box.swap()
    del box.servers.processes[box.id("b")]
    await box.next_daemon()
    assert await box.ended(task) is JobState.FAILED
    assert (box.state("a"), box.state("b"), box.recorded("b")) == ("ready", "cold", DeploymentState.FAILED)
    assert [id for id, _ in box.servers.started] == [box.id("a"), box.id("b"), box.id("a")]
    await until(lambda: box.recorded("a") is DeploymentState.LOADED)


async def test_the_next_daemon_keeps_the_place_while_the_load_goes_on(box: TaskWorld) -> None:
    task = await box.swap()
    await box.next_daemon()
    box.ask("c", agent="c1")
    await asyncio.sleep(0.1)
    assert (box.state("b"), box.state("c"), await box.state_of(task)) == ("loading", "cold", JobState.RUNNING)
    box.servers.end(box.id("b"))
    assert await box.ended(task) is JobState.FAILED
    assert (box.servers.started[2][0], box.servers.started[2][1].accounts) == (box.id("a"), {GPU: 80})


async def test_a_second_kill_before_who_left_is_back_leaves_that_to_the_next_daemon(box: TaskWorld) -> None:
    task = await box.swap()
    box.servers.comes_up[box.id("a")] = "nothing"
    box.servers.end(box.id("b"))
    await until(lambda: len(box.servers.started) == 3)
    assert (await box.jobs.get(task.job, wait_s=20)).state is JobState.FAILED
    assert await box.state_of(task) is JobState.RUNNING
    del box.servers.processes[box.id("a")]
    box.servers.comes_up[box.id("a")] = "serving"
    await box.next_daemon()
    assert await box.ended(task) is JobState.FAILED
    assert box.state("a") == "ready"


async def test_who_was_ordered_out_since_stays_out_also_for_the_next_daemon(box: TaskWorld) -> None:
    task = await box.swap()
    await box.orders.unload("a", "uid:0", approval=UNLOAD)
    del box.servers.processes[box.id("b")]
    await box.next_daemon()
    assert await box.ended(task) is JobState.FAILED
    assert (box.state("a"), box.pool.find("a").waiting, len(box.servers.started)) == ("cold", (), 2)


async def test_a_task_whose_job_is_on_record_no_more_has_failed(box: TaskWorld) -> None:
    task = StoredLoad(job="gone", asked="b", model="b", begun_at=1.0)
    await box.database.write(lambda conn: load_tasks.put(conn, task))
    await box.next_daemon()
    assert await box.ended(task) is JobState.FAILED
    assert "on record no more" in (await box.tasks.get(f"{PREFIX}gone")).error


async def test_what_cannot_be_written_is_written_later(monkeypatch: Any) -> None:
    monkeypatch.setattr("hive.lifecycle.load_tasks.AGAIN_S", 0.001)
    answers: list[Any] = [StoreFull("no space"), StoreFull("no space"), "written", NotFound("gone")]

    async def ask() -> str:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return str(answer)

    assert await surely(ask, "it") == "written"
    with pytest.raises(NotFound):
        await surely(ask, "it")
