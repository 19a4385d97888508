"""The registry in the daemon: rows with their jobs, over kills at every step, and what may be loaded under a rule."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from hive.audit.approval import Approval
from hive.control.active_backend import Active
from hive.domain import DeploymentState, JobState
from hive.errors import NotApproved, NotFound, OpTokenReplayed, StoreFull, WrongState
from hive.lifecycle.deployment_watch import NOT_DESCRIBED, DeploymentWatch
from hive.pool.deployed import CHANGED, LEFT, NOT_AGAIN
from hive.pool.state import SlotState
from hive.settings.registry import RegistrySection
from hive.store import deployments as store
from hive.store import jobs as stored_jobs
from hive.store import pool as stored_pool
from hive.store.deployments import StoredDeployment
from hive.store.jobs import StoredJob
from tests.pooling.pool_world import PoolWorld
from tests.waiting import until

S = DeploymentState


class NoServerInUse:
    """No inference server is in use beside the pool."""

    target, up, control = None, False, None
    seen: tuple[None, list[Any]] = (None, [])

    async def loaded(self) -> frozenset[str] | None:
        return None


class RegistryWorld(PoolWorld):
    """A pool whose deployments are watched."""

    watch: DeploymentWatch

    def watched(self) -> DeploymentWatch:
        active = cast("Active", NoServerInUse())
        self.watch = DeploymentWatch(self.deployments, pool=self.pool, active=active, settings=lambda: self.settings)
        return self.watch

    def restore(self) -> None:
        self.settings = msgspec.structs.replace(self.settings, registry=RegistrySection(restore=True))

    async def next_daemon(self) -> None:
        """Killed and started again: what runs goes on, jobs that were under way have failed."""
        await self.kill()
        await self.again()
        await self.jobs.give_up(self.database.read_now(stored_jobs.running))
        await self.watched().look()

    def on_disk(self) -> dict[str, StoredDeployment]:
        return {row.name: row for row in self.database.read_now(store.living)}

    def recorded(self, model: str) -> tuple[str, str]:
        row = self.on_disk()[model]
        assert self.deployments.row(row.id) == row  # memory says what the disk says
        return row.state, row.last_error


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[RegistryWorld]:
    made = RegistryWorld(tmp_path, {"alpha": 60, "beta": 60}, total_mb=100)
    await made.begin()
    made.watched()
    yield made
    await made.end()


def may(operation: str, by: str = "") -> Approval:
    return Approval(f"model-{operation}", by)


async def load(world: RegistryWorld, model: str, actor: str = "uid:7", *, by: str = "") -> StoredJob:
    return await world.orders.load(model, actor, approval=may("load", by))


async def unload(world: RegistryWorld, model: str, *, force: bool = False) -> StoredJob:
    return await world.orders.unload(model, "uid:8", approval=may("unload"), force=force)


async def loaded(world: RegistryWorld, model: str, actor: str = "uid:7", *, by: str = "") -> None:
    job = await world.follow(await load(world, model, actor, by=by))
    assert job.state is JobState.DONE


async def test_a_load_by_order_is_on_record_with_its_actor_and_an_unload_ends_it(world: RegistryWorld) -> None:
    await loaded(world, "alpha", "token:ci")
    row = world.on_disk()["alpha"]
    entry = world.pool.find("alpha").entry
    assert (row.id, row.deployed_by, row.state, row.path) == (entry.id, "token:ci", S.LOADED, str(entry.path))
    assert row.digest == world.pool.footprints.known(entry).digest != ""
    assert ("model.deployed", "token:ci") in world.audit.by
    job = await world.follow(await unload(world, "alpha"))
    assert job.state is JobState.DONE
    assert world.on_disk() == {}
    assert world.deployments.rows() == []
    assert ("model.undeployed", "uid:8") in world.audit.by


async def test_an_unknown_name_is_refused_before_anything_is_written(world: RegistryWorld) -> None:
    orders: dict[str, Any] = {"load": world.orders.load, "unload": world.orders.unload, "pin": world.orders.pin}
    for operation, order in orders.items():
        with pytest.raises(NotFound):
            await order("nobody", "uid:7", approval=may(operation))
    assert world.on_disk() == {}
    assert world.database.read_now(lambda conn: stored_jobs.recent(conn, 10)) == []
    assert world.audit.by == []


async def test_a_job_that_cannot_be_written_leaves_no_row(world: RegistryWorld, monkeypatch: Any) -> None:
    def full(*_: object) -> None:
        raise StoreFull

    monkeypatch.setattr("hive.audit.jobs.jobs.add", full)
    with pytest.raises(StoreFull):
        await load(world, "alpha", "uid:7")
    monkeypatch.undo()
    monkeypatch.setattr("hive.store.deployments.put", full)
    with pytest.raises(StoreFull):
        await load(world, "alpha", "uid:7")
    assert (world.on_disk(), world.deployments.rows()) == ({}, [])
    assert world.database.read_now(lambda conn: stored_jobs.recent(conn, 10)) == []
    assert world.pool.find("alpha").state is SlotState.COLD


class UsedToken(Approval):
    """One whose token was used by somebody else a moment ago."""

    def burn(self, conn: Any) -> None:
        raise OpTokenReplayed


async def test_an_order_whose_token_was_used_meanwhile_leaves_nothing(world: RegistryWorld) -> None:
    with pytest.raises(OpTokenReplayed):
        await world.orders.load("alpha", "uid:7", approval=UsedToken("model-load", "ann, ben"))
    with pytest.raises(OpTokenReplayed):
        await world.orders.pin("alpha", "uid:7", approval=UsedToken("model-pin", "ann, ben"))
    assert (world.on_disk(), world.deployments.rows()) == ({}, [])
    assert world.database.read_now(lambda conn: stored_jobs.recent(conn, 10)) == []
    assert world.database.read_now(stored_pool.pins) == {}
    assert world.pool.find("alpha").order is None
    await loaded(world, "alpha", by="ann, ben")
    row = world.on_disk()["alpha"]
    with pytest.raises(OpTokenReplayed):
        await world.orders.unload("alpha", "uid:7", approval=UsedToken("model-unload"))
    assert world.on_disk() == {"alpha": row}
    assert not world.pool.find("alpha").unload_ordered


async def test_a_load_that_fails_is_on_record_with_the_error_and_so_is_a_crash_later(world: RegistryWorld) -> None:
    id = world.pool.find("alpha").id
    world.servers.comes_up[id] = "ended"
    world.servers.last[id] = ["no such tensor"]
    job = await world.follow(await load(world, "alpha", "uid:7"))
    assert job.state is JobState.FAILED
    assert world.recorded("alpha") == (S.FAILED, "its server ended with exit code 1: no such tensor")
    del world.servers.comes_up[id]
    await loaded(world, "alpha")
    assert world.recorded("alpha") == (S.LOADED, "")
    world.servers.end(id)
    await until(lambda: world.pool.find("alpha").state is SlotState.COLD)
    await world.watch.look()
    assert world.recorded("alpha") == (S.FAILED, "its server ended with exit code 1: no such tensor")


async def test_a_cancelled_load_leaves_what_was_on_record_before(world: RegistryWorld) -> None:
    world.servers.load_s = 60
    job = await load(world, "alpha", "uid:7")
    assert world.recorded("alpha") == (S.LOADING, "")
    await world.orders.cancel(job.id)
    assert world.on_disk() == {}
    world.servers.load_s = 0
    for id in list(world.servers.processes):
        world.servers.serve(id)
    await loaded(world, "alpha", "uid:7", by="ann, ben")
    before = world.on_disk()["alpha"]
    world.servers.end(world.pool.find("alpha").id)
    await until(lambda: world.pool.find("alpha").state is SlotState.COLD)
    world.servers.load_s = 60
    job = await load(world, "alpha", "uid:8")
    await world.orders.cancel(job.id)
    assert world.on_disk()["alpha"] == before


async def test_a_model_that_left_for_another_one_stays_on_record_and_is_loaded_again(world: RegistryWorld) -> None:
    await loaded(world, "alpha")
    await loaded(world, "beta")  # there is room for one
    await world.watch.look()
    assert world.recorded("alpha") == (S.EVICTED, LEFT)
    assert world.recorded("beta") == (S.LOADED, "")
    world.restore()
    await world.next_daemon()
    assert world.recorded("alpha") == (S.EVICTED, LEFT)  # it was not loaded when Hive ended
    await loaded(world, "alpha", "uid:8")
    assert world.recorded("alpha") == (S.LOADED, "")
    assert world.on_disk()["alpha"].deployed_by == "uid:8"


async def test_a_pin_is_on_record_once_and_takes_nothing_from_an_earlier_order(world: RegistryWorld) -> None:
    await world.orders.pin("alpha", "uid:7", approval=may("pin"))
    row = world.on_disk()["alpha"]
    assert (row.deployed_by, row.state) == ("uid:7", S.LOADING)
    await until(lambda: world.pool.find("alpha").state is SlotState.READY)
    await world.watch.look()
    assert world.recorded("alpha") == (S.LOADED, "")
    await world.orders.pin("alpha", "uid:8", approval=may("pin"))
    assert world.on_disk()["alpha"].deployed_by == "uid:7"
    await world.orders.unpin("alpha", "uid:8", approval=may("unpin"))
    assert "alpha" in world.on_disk()  # it is loaded still


async def test_an_unload_by_force_takes_pin_and_row_together(world: RegistryWorld, monkeypatch: Any) -> None:
    await world.orders.pin("alpha", "uid:7", approval=may("pin"))
    await until(lambda: world.pool.find("alpha").state is SlotState.READY)
    with pytest.raises(WrongState):
        await unload(world, "alpha")

    def full(*_: object) -> None:
        raise StoreFull

    monkeypatch.setattr("hive.audit.jobs.jobs.add", full)
    with pytest.raises(StoreFull):
        await unload(world, "alpha", force=True)
    monkeypatch.undo()
    assert world.pool.find("alpha").pinned_at is not None
    assert world.database.read_now(stored_pool.pins)["alpha"][0]
    assert "alpha" in world.on_disk()
    job = await world.follow(await unload(world, "alpha", force=True))
    assert job.state is JobState.DONE
    assert not world.database.read_now(stored_pool.pins)["alpha"][0]
    assert world.on_disk() == {}


async def test_an_unload_that_another_load_overtakes_leaves_the_row_of_that(world: RegistryWorld) -> None:
    await loaded(world, "alpha")
    world.proxy.in_flight[world.pool.find("alpha").id] = 1
    first = await unload(world, "alpha")
    second = await load(world, "alpha", "uid:9")
    await world.follow(second)
    await world.follow(first)
    row = world.on_disk()["alpha"]
    assert row.deployed_by == "uid:9"
    assert world.deployments.row(row.id) == row


# --- the next daemon ---


@pytest.mark.parametrize("restore", [True, False])
async def test_killed_while_it_loads_the_next_daemon_follows_the_load(world: RegistryWorld, restore: bool) -> None:
    if restore:
        world.restore()
    world.servers.load_s = 60
    job = await load(world, "alpha", "uid:7")
    await until(lambda: bool(world.servers.processes))
    await world.next_daemon()
    assert world.recorded("alpha") == (S.LOADING, "")
    assert (await world.jobs.get(job.id)).state is JobState.FAILED
    for id in list(world.servers.processes):
        world.servers.serve(id)
    await until(lambda: world.pool.find("alpha").state is SlotState.READY)
    await world.watch.look()
    assert world.recorded("alpha") == (S.LOADED, "")
    assert len(world.servers.started) == 1  # it was not loaded a second time


async def test_killed_with_the_order_written_and_nothing_begun(world: RegistryWorld) -> None:
    world.pool.slots[world.pool.find("alpha").id].retry_at = float("inf")
    await world.kill()  # the pool decides nothing any more
    await load(world, "alpha", "uid:7")
    await world.again()
    await world.watched().look()
    assert world.recorded("alpha") == (S.ABSENT, NOT_AGAIN)
    world.restore()
    await world.next_daemon()
    assert world.recorded("alpha") == (S.LOADING, "")
    await until(lambda: world.pool.find("alpha").state is SlotState.READY)
    await world.watch.look()
    assert world.recorded("alpha") == (S.LOADED, "")
    assert world.on_disk()["alpha"].deployed_by == "uid:7"


async def test_what_the_machine_took_along_is_loaded_again_where_that_is_wanted(world: RegistryWorld) -> None:
    await loaded(world, "alpha")
    await world.kill()
    world.servers.processes.clear()
    await world.again()
    await world.watched().look()
    assert world.recorded("alpha") == (S.ABSENT, NOT_AGAIN)
    assert world.servers.processes == {}
    world.restore()
    await world.next_daemon()
    await until(lambda: world.pool.find("alpha").state is SlotState.READY)
    await world.watch.look()
    assert world.recorded("alpha") == (S.LOADED, "")


async def test_killed_while_it_unloads(world: RegistryWorld) -> None:
    await loaded(world, "alpha")
    world.proxy.is_there = False  # its gate cannot be closed
    await unload(world, "alpha")
    assert world.recorded("alpha")[0] is S.UNLOADING
    await world.next_daemon()
    assert world.recorded("alpha") == (S.LOADED, "")  # the order was lost, its job has failed
    await unload(world, "alpha")
    await world.kill()
    world.servers.processes.clear()
    await world.again()
    await world.watched().look()
    assert world.on_disk() == {}  # it was carried out


async def test_rows_that_lack_rows_too_many_and_files_that_changed(world: RegistryWorld) -> None:
    await loaded(world, "alpha")
    row = world.on_disk()["alpha"]
    await world.kill()
    nobody = msgspec.structs.replace(row, id="gone-1", name="gone")

    def spoil(conn: Any) -> None:
        store.remove(conn, row)  # alpha is loaded and has none
        store.put(conn, nobody)
        store.put(conn, msgspec.structs.replace(row, id=world.pool.find("beta").id, name="beta", digest="another"))

    await world.database.write(spoil)
    world.restore()
    await world.again()
    await world.watched().look()
    assert world.recorded("gone") == (S.ABSENT, NOT_DESCRIBED)
    assert world.recorded("beta") == (S.ABSENT, CHANGED)
    assert "alpha" not in world.on_disk()
    assert world.pool.find("alpha").state is SlotState.READY  # it stays, it was nobody's order
    with pytest.raises(NotFound):
        await load(world, "gone", "uid:7")
    assert world.orders.has("gone")
    job = await unload(world, "gone")
    assert job.state is JobState.DONE
    assert "gone" not in world.on_disk()
    assert not world.orders.has("gone")


# --- under a rule ---


async def test_under_a_rule_the_pool_loads_only_what_a_signed_order_had_loaded(world: RegistryWorld) -> None:
    world.rules.add("model-load")
    alpha = world.pool.find("alpha")
    world.ask("alpha")
    await until(lambda: world.proxy.last_row(alpha.id).unapproved)
    row = world.proxy.last_row(alpha.id)
    assert "no signed load" in row.never
    assert world.servers.started == []
    with pytest.raises(NotApproved):
        await world.orders.pin("alpha", "uid:7", approval=may("pin"))
    assert world.on_disk() == {}
    assert world.database.read_now(stored_pool.pins) == {}
    await loaded(world, "alpha", "uid:7", by="ann, ben")
    assert world.on_disk()["alpha"].signature == "ann, ben"
    await world.orders.pin("alpha", "uid:8", approval=may("pin"))
    assert world.on_disk()["alpha"].signature == "ann, ben"  # a pin takes no signature away
    await world.orders.unpin("alpha", "uid:8", approval=may("unpin"))
    world.leave("alpha")
    await loaded(world, "beta", "uid:7", by="ann, ben")
    assert alpha.state is SlotState.COLD
    world.ask("alpha")
    await until(lambda: alpha.state is SlotState.READY)  # evicted and loaded again by itself
    world.leave("alpha")
    await world.follow(await unload(world, "alpha"))
    world.ask("alpha")
    await until(lambda: world.proxy.last_row(alpha.id).unapproved)
    assert alpha.state is SlotState.COLD


async def test_a_signature_is_for_the_files_that_were_there(world: RegistryWorld) -> None:
    world.rules.add("model-load")
    await loaded(world, "alpha", "uid:7", by="ann, ben")
    alpha = world.pool.find("alpha")
    alpha.entry.path.write_bytes(world.pool.find("beta").entry.path.read_bytes())
    await world.kill()
    world.servers.processes.clear()
    world.restore()
    await world.again()
    await world.watched().look()
    assert world.recorded("alpha") == (S.ABSENT, CHANGED)
    world.ask("alpha")
    await until(lambda: world.proxy.last_row(alpha.id).unapproved)
    assert "have changed since it was approved" in world.proxy.last_row(alpha.id).never


async def test_what_was_loaded_before_there_was_a_rule_is_loaded_no_second_time(world: RegistryWorld) -> None:
    await loaded(world, "alpha")
    world.rules.add("model-load")
    alpha = world.pool.find("alpha")
    world.servers.end(alpha.id)
    await until(lambda: alpha.state is SlotState.COLD)
    world.ask("alpha")
    await until(lambda: world.proxy.last_row(alpha.id).unapproved)
    assert "uid:7 had it loaded without a signature" in world.proxy.last_row(alpha.id).never
