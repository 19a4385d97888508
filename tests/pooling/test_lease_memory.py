"""Leases on GPUs: what they have is measured over the real wrapper of NVIDIA's library, which a fake one answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from hive.errors import LeaseWaited
from hive.link.slots import ProcessState, SlotGrant, SlotProcess
from hive.pool.state import MIB
from hive.pooling.pooled_lease import LeaseState, PooledLease
from tests.fakes.fake_nvml import GIB, Gpu, in_place_of
from tests.pooling.lease_world import ANN, LeaseWorld
from tests.pooling.test_pool_memory import MeasuredBox, here, server
from tests.waiting import until


@pytest.fixture(autouse=True)
def library() -> Iterator[None]:
    """The wrapper's library is set by `here`; what was there before is put back."""
    with in_place_of(None):
        yield


def program(id: str, *pids: int, on: tuple[str, ...] = ("GPU-0",)) -> SlotProcess:
    grant = SlotGrant(accounts=dict.fromkeys(on, 1000))
    return SlotProcess(id=id, run="1", state=ProcessState.SERVING, pids=list(pids), grant=grant)


# --- one look ------------------------------------------------------------------------------------------------------


async def test_a_program_that_has_allocated_nothing_has_nothing_and_a_server_is_not_known(tmp_path: Path) -> None:
    box = here(MeasuredBox(tmp_path / "nvidia", Gpu(used=3 * GIB, processes=[(99, 3 * GIB)])))
    processes = {"l-1": program("l-1", 11), "a": server("a", 12)}
    reading = await box.pool.look(processes, programs=["l-1"])
    assert reading.by_slot == {"l-1": {"GPU-0": 0}, "a": {"GPU-0": None}}


async def test_where_the_driver_names_no_processes_nothing_is_known_of_a_program(tmp_path: Path) -> None:
    box = here(MeasuredBox(tmp_path / "nvidia", Gpu(used=3 * GIB, processes=[(99, 3 * GIB)]), shares_pids=False))
    reading = await box.pool.look({"l-1": program("l-1", 11)}, programs=["l-1"])
    assert reading.by_slot == {"l-1": {"GPU-0": None}}


async def test_what_is_used_beyond_all_that_is_known_is_taken_to_be_the_unseen_holders(tmp_path: Path) -> None:
    gpu = Gpu(used=10 * GIB, processes=[(11, 6 * GIB), (99, 4 * GIB)])
    box = here(MeasuredBox(tmp_path / "nvidia", gpu))
    assert (await box.look(server("a", 11))).accounts[0].foreign_bytes == 4 * GIB
    unseen = {"l-1": {"GPU-0": 5 * GIB}}
    for used, own, foreign in ((10, 0, 4), (13, 3, 4), (15, 5, 4), (18, 5, 7)):
        gpu.used = used * GIB
        reading = await box.pool.look({"a": server("a", 11)}, unseen=unseen)
        assert reading.by_slot["l-1"] == {"GPU-0": own * GIB}, used
        assert reading.accounts[0].foreign_bytes == foreign * GIB, used


async def test_two_unseen_holders_share_what_is_left_and_nothing_is_guessed_without_a_measure(tmp_path: Path) -> None:
    gpu = Gpu(used=7 * GIB)
    box = here(MeasuredBox(tmp_path / "nvidia", gpu))
    unseen = {"l-1": {"GPU-0": 5 * GIB}, "l-2": {"GPU-0": 5 * GIB}}
    reading = await box.pool.look({}, unseen=unseen)
    assert reading.by_slot == {"l-1": {"GPU-0": 5 * GIB}, "l-2": {"GPU-0": 2 * GIB}}
    reading = await box.pool.look({"a": server("a", 12)}, unseen=unseen)
    assert reading.by_slot["l-1"] == {"GPU-0": None}, "what the server has is not known"


# --- a pool on two GPUs ----------------------------------------------------------------------------------------------


@pytest.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[LeaseWorld]:
    """A model of 40 MiB, and two GPUs of 100 MiB."""
    monkeypatch.setattr("hive.pooling.pooling.LOOK_S", 0.05)
    made = LeaseWorld(tmp_path, {"a": 40}, total_mb=100, reserve_mb=0)
    gpus = Gpu(total=100 * MIB), Gpu(total=100 * MIB)
    box = here(MeasuredBox(tmp_path / "nvidia", *gpus))
    box.settings = made.settings
    given: Any = box.pool
    made.memory = given
    made.gpus = gpus  # type: ignore[attr-defined]
    made.pool = made.make()
    await made.begin()
    yield made
    await made.end()


def holds(world: LeaseWorld, lease: PooledLease, mb: int) -> None:
    """The program of a lease has so much on each of its GPUs; nobody else has anything there."""
    assert lease.holder is not None
    for number, gpu in enumerate(world.gpus):  # type: ignore[attr-defined]
        if f"GPU-{number}" in lease.row.accounts:
            gpu.used, gpu.processes = mb * MIB, [(lease.holder.pid, mb * MIB)] if mb else []


async def test_two_that_want_both_gpus_have_them_one_after_the_other(world: LeaseWorld) -> None:
    first, second = await world.lease(70, gpus=2), await world.lease(70, gpus=2)
    await world.until_lease(first, "running")
    assert world.desk.view(first, ANN)["environment"]["CUDA_VISIBLE_DEVICES"] == "GPU-0,GPU-1"
    holds(world, first, 60)
    await until(lambda: first.used_mb == 60)
    assert world.books() == {first.id: 140}
    assert world.lease_state(second.id) == "waiting"
    world.servers.holders.leave(first.id)
    await world.until_lease(first, "ending")
    assert world.lease_state(second.id) == "waiting", "its memory is not back"
    holds(world, first, 0)
    await world.until_lease(second, "running")
    assert world.books() == {second.id: 140}


async def test_small_ones_go_to_the_gpu_that_they_fit_tightest(world: LeaseWorld) -> None:
    first = await world.lease(60)
    await world.until_lease(first, "running")
    second, third = await world.lease(30), await world.lease(80)
    for lease in (second, third):
        await world.until_lease(lease, "running")
    assert second.row.accounts.keys() == first.row.accounts.keys()
    assert third.row.accounts.keys() != first.row.accounts.keys()


async def test_an_overdue_lease_ends_once_its_gpu_shows_no_memory_that_nobody_explains(world: LeaseWorld) -> None:
    gpu: Gpu = world.gpus[0]  # type: ignore[attr-defined]
    lease = await world.lease(60, kind="held", ttl_s=0.3)
    (account,) = lease.row.accounts
    gpu = world.gpus[int(account.removeprefix("GPU-"))]  # type: ignore[attr-defined]
    gpu.used, gpu.processes = 50 * MIB, [(77, 50 * MIB)]
    await until(lambda: lease.used_mb == 50)
    await world.until_lease(lease, "overdue")
    assert lease.state is LeaseState.OVERDUE
    assert world.books() == {lease.id: 60}
    gpu.used, gpu.processes = 0, []
    await world.until_lease(lease, "gone")


async def test_of_two_held_leases_on_a_gpu_the_overdue_one_is_taken_to_have_what_is_used(world: LeaseWorld) -> None:
    first = await world.lease(50, kind="held", ttl_s=60.0, gpus=2)
    second = await world.lease(50, kind="held", ttl_s=0.3, gpus=2)
    for gpu in world.gpus:  # type: ignore[attr-defined]
        gpu.used, gpu.processes = 48 * MIB, [(77, 48 * MIB)]
    await world.until_lease(second, "overdue")
    await until(lambda: (second.used_mb, first.used_mb) == (48, 0))
    await asyncio.sleep(0.3)
    assert world.lease_state(second.id) == "overdue"
    with pytest.raises(LeaseWaited):
        await world.lease(50, kind="held", wait_s=0.0)
    assert world.books() == {first.id: 100, second.id: 100}


async def test_an_overdue_lease_is_not_free_as_a_stranger_has_left(world: LeaseWorld) -> None:
    gpus = world.gpus  # type: ignore[attr-defined]
    for gpu in gpus:
        gpu.used, gpu.processes = 50 * MIB, [(88, 40 * MIB), (89, 10 * MIB)]
    assert [account.foreign_bytes for account in (await world.pool.look()).accounts] == [50 * MIB] * 2
    lease = await world.lease(40, kind="held", ttl_s=0.5, gpus=2)
    for gpu in gpus:
        gpu.used, gpu.processes = 50 * MIB, [(77, 40 * MIB), (89, 10 * MIB)]
    await world.until_lease(lease, "overdue")
    await asyncio.sleep(0.4)
    assert (world.lease_state(lease.id), lease.used_mb) == ("overdue", 40)
    for gpu in gpus:
        gpu.used, gpu.processes = 10 * MIB, [(89, 10 * MIB)]
    await world.until_lease(lease, "gone")
