"""A server in use of which nothing gets on: no request of it moves, and neither a core nor its GPU works for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from hive.link.pool import SlotFlow, SlotFlows
from hive.pooling.slot_steps import SlotSteps
from tests.pooling.pool_world import PoolWorld
from tests.waiting import until

STALL_S = 0.6


@pytest.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[PoolWorld]:
    """One model on one GPU, loaded, with a request that has moved nothing for a minute."""
    monkeypatch.setattr(SlotSteps, "stall_s", STALL_S)
    monkeypatch.setattr("hive.pooling.pooling.LOOK_S", 0.05)
    world = PoolWorld(tmp_path, {"a": 40}, total_mb=100)
    await world.begin()
    world.ask("a")
    await world.until("a", "ready")
    world.leave("a")
    _compute(world, 3.0)
    yield world
    await world.end()


def _compute(world: PoolWorld, cpu_s: float) -> None:
    id = world.id("a")
    world.servers.processes[id] = msgspec.structs.replace(world.servers.processes[id], cpu_s=cpu_s)


def _hangs(world: PoolWorld, moved_s: float = 60.0) -> None:
    flow = SlotFlow(in_flight=1, agents=["a1"], begun=1, moved_s=moved_s)
    world.pool.flows(SlotFlows(slots={world.id("a"): flow}))


def _stopped(world: PoolWorld) -> bool:
    return world.id("a") in world.servers.stopped


async def test_a_server_that_hangs_on_an_idle_gpu_is_ended_and_the_reason_is_told(world: PoolWorld) -> None:
    world.memory.is_idle = True
    _hangs(world)
    await until(lambda: _stopped(world))
    await until(lambda: world.state("a") == "cold")
    act, detail = world.audit.acts[-1]
    assert act == "model.crashed"
    assert detail["reason"] == f"stall_timeout: no request moved and no CPU and no GPU was used for {STALL_S:g} s"


async def test_one_on_a_gpu_that_computes_is_left_to_the_health_probe(world: PoolWorld) -> None:
    """The driver does not say for whom it computes; nor does one that does not answer say that it idles."""
    _hangs(world)
    await asyncio.sleep(STALL_S * 3)
    assert world.state("a") == "ready"
    assert not _stopped(world)


async def test_one_that_computes_on_a_core_is_not_ended(world: PoolWorld) -> None:
    world.memory.is_idle = True
    _hangs(world)
    for second in range(12):
        _compute(world, 3.0 + second)
        await asyncio.sleep(STALL_S / 4)
    assert not _stopped(world)


async def test_one_whose_requests_move_is_not_ended_nor_one_of_which_nothing_is_asked(world: PoolWorld) -> None:
    world.memory.is_idle = True
    _hangs(world, moved_s=0.1)
    await asyncio.sleep(STALL_S * 2)
    assert not _stopped(world)
    world.use("a", 0)
    await asyncio.sleep(STALL_S * 2)
    assert not _stopped(world)
    _hangs(world)  # its time begins with its request, not with the last one
    await asyncio.sleep(STALL_S / 3)
    assert not _stopped(world)
