"""The leases of the daemon. Helper, proxy and memory are played (pool_world.py); a real program that takes one is in
tests/journeys/test_leases.py."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from hive.errors import (
    LeaseTooLarge,
    LeaseWaited,
    NotFound,
    NotPermitted,
    NotSupported,
    StaleToken,
    TimedOut,
    TooManyRequests,
    WrongState,
)
from hive.link.leases import HolderState, LeaseGrant, LeaseHolder
from hive.pooling.lease_rows import WAITING_OF_USER
from hive.pooling.pooled_lease import LeaseState, PooledLease
from hive.settings.lease import LeaseSection
from hive.store import leases as store
from tests.approvals import END
from tests.pooling.lease_world import ANN, BEN, ROOT, LeaseWorld
from tests.waiting import until


@pytest.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[LeaseWorld]:
    """Two models of 60 and 30 MiB on 100."""
    monkeypatch.setattr("hive.pooling.pooling.LOOK_S", 0.05)
    monkeypatch.setattr("hive.pooling.leases.AGAIN_S", 0.02)
    made = LeaseWorld(tmp_path, {"a": 60, "b": 30}, total_mb=100)
    await made.begin()
    yield made
    await made.end()


async def loaded(world: LeaseWorld, model: str) -> None:
    world.ask(model)
    await world.until(model, "ready")
    world.use(model, 0)


# --- grants ----------------------------------------------------------------------------------------------------


async def test_a_lease_that_fits_is_granted_at_once_and_runs_once_its_program_is_let_in(world: LeaseWorld) -> None:
    world.servers.holders.comes = False
    lease = await world.lease(40, is_read=False)
    await world.until_lease(lease, "granted")
    view = world.desk.view(lease, ANN)
    (grant,) = world.servers.holders.expected
    assert (view["nonce"], view["socket"], view["gpus"]) == (grant.nonce, "/nowhere/lease.sock", ["GPU-0"])
    assert (grant.uid, grant.token, grant.accounts) == (1000, lease.row.token, {"GPU-0": 40})
    assert view["environment"] == {
        "CUDA_VISIBLE_DEVICES": "GPU-0",
        "HIVE_LEASE": lease.id,
        "HIVE_LEASE_TOKEN": str(lease.row.token),
    }
    assert world.desk.view(lease, BEN)["nonce"] == ""
    world.servers.holders.come(lease.id)
    await world.until_lease(lease, "running")
    assert world.desk.view(lease, ANN)["nonce"] == ""
    assert world.books() == {lease.id: 40}


async def test_room_is_made_by_the_same_rules_as_for_a_model_and_given_back_once_it_is_measured(
    world: LeaseWorld,
) -> None:
    await loaded(world, "a")
    lease = await world.lease(70)
    await world.until_lease(lease, "running")
    assert world.state("a") == "cold"
    world.ask("a")
    world.servers.holders.leave(lease.id)
    await world.until_lease(lease, "gone")
    await world.until("a", "ready")
    assert (await world.desk.look(lease.id, ANN))["state"] == "ended"
    assert world.servers.holders.forgotten == [lease.id]


async def test_a_busy_model_keeps_its_turn_and_the_waiting_lease_says_for_what_it_waits(world: LeaseWorld) -> None:
    await loaded(world, "a")
    world.use("a", 1)
    lease = await world.lease(70)
    await until(lambda: lease.place == 1)
    assert lease.why == "a is in its way"
    assert lease.ready_in_s is not None
    assert lease.bound_s is not None
    assert lease.ready_in_s <= lease.bound_s


async def test_the_line_is_told_in_its_order_and_a_small_lease_does_not_pass_a_large_one(world: LeaseWorld) -> None:
    first = await world.lease(80)
    await world.until_lease(first, "running")
    large = await world.lease(50, label="large", max_s=60.0)
    small = await world.lease(10, label="small")
    await until(lambda: small.place == 2)
    assert (large.place, small.before) == (1, [f"{large.id} large (uid 1000)"])
    assert small.why == "1 lease is before it"
    world.servers.holders.leave(first.id)
    await world.until_lease(large, "running")
    await world.until_lease(small, "running")


async def test_without_a_wait_a_lease_has_its_memory_now_or_an_error(world: LeaseWorld) -> None:
    await loaded(world, "a")
    world.use("a", 1)
    with pytest.raises(LeaseWaited):
        await world.lease(70, wait_s=0.0)
    assert world.state("a") == "ready"
    lease = await world.lease(30, wait_s=0.0)
    assert lease.state in (LeaseState.GRANTED, LeaseState.RUNNING)


async def test_a_lease_larger_than_the_gpu_is_refused_with_the_arithmetic(world: LeaseWorld) -> None:
    with pytest.raises(LeaseTooLarge, match="it asks for 101 MiB on a GPU, and GPU-0 can have 100: 100"):
        await world.lease(101)
    with pytest.raises(LeaseTooLarge, match="it asks for 2 GPUs, and there is 1"):
        await world.lease(1, gpus=2)
    with pytest.raises(LeaseTooLarge, match=r"not preemptible may hold 50 on GPU-0: 0.5 of 100"):
        await world.lease(51, is_whole=False)
    assert await world.lease(51, is_whole=False, preemptible=True)


async def test_the_limits_of_a_user_hold_for_all_its_leases_and_not_for_an_admin(world: LeaseWorld) -> None:
    world.settings = replace(world.settings, lease=LeaseSection(max_mb=50, max_s=60))
    await world.lease(30, max_s=60.0)
    with pytest.raises(NotPermitted, match="30 MiB are more than you may have: 50 together, of which you have 30"):
        await world.lease(30)
    with pytest.raises(NotPermitted, match="61 s are longer"):
        await world.lease(10, max_s=61.0)
    lease = await world.lease(10)
    assert lease.row.max_s == 60
    assert (await world.lease(60, who=ROOT)).row.max_s is None


async def test_the_limit_of_a_user_holds_for_what_is_asked_for_at_the_same_time(world: LeaseWorld) -> None:
    world.settings = replace(world.settings, lease=LeaseSection(max_mb=30))
    got = await asyncio.gather(*(world.lease(20) for _ in range(5)), return_exceptions=True)
    assert sorted(type(one).__name__ for one in got) == [*["NotPermitted"] * 4, "PooledLease"]
    assert list(world.books().values()) == [20]


async def test_the_line_of_a_user_has_a_length_and_names_the_nearest_before_one(world: LeaseWorld) -> None:
    first = await world.lease(80)
    await world.until_lease(first, "running")
    for _ in range(WAITING_OF_USER):
        last = await world.lease(50)
    with pytest.raises(TooManyRequests, match="32 of your leases wait already"):
        await world.lease(50)
    await until(lambda: last.place == WAITING_OF_USER)
    assert [len(last.before), last.before[0]] == [21, "11 more"]
    assert (await world.lease(50, who=BEN)).state is LeaseState.WAITING


async def test_a_wait_that_is_over_and_one_without_a_reader_leave_the_line(
    world: LeaseWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hive.pooling.leases.LEFT_S", 0.1)
    first = await world.lease(80)
    await world.until_lease(first, "running")
    waits = await world.lease(50, wait_s=0.3)
    unread = await world.lease(50, is_read=False)
    await world.until_lease(waits, "gone")
    await world.until_lease(unread, "gone")
    told = await world.desk.look(waits.id, ANN)
    assert (told["code"], told["why"]) == ("lease_waited", "it waited 0.3 s")
    assert (await world.desk.look(unread.id, ANN))["why"] == "nobody waits for it any more"


async def test_a_model_beside_a_lease_without_an_end_is_refused_at_once_with_its_name(world: LeaseWorld) -> None:
    lease = await world.lease(60, label="train")
    await world.until_lease(lease, "running")
    world.ask("a")
    await until(lambda: world.pool.find("a").never)
    never = f"a does not fit beside lease {lease.id} (train), which has no end"
    assert world.pool.find("a").never == never
    assert world.orders.explain("a", lease.band)["blocked"] == never
    world.servers.holders.leave(lease.id)
    world.ask("a")
    await world.until("a", "ready")


async def test_the_bound_of_a_model_counts_a_lease_that_has_an_end(world: LeaseWorld) -> None:
    lease = await world.lease(60, label="train", max_s=300.0)
    await world.until_lease(lease, "running")
    told = world.orders.explain("a", lease.band)
    assert told["bound_s"] is not None
    assert [part for part in told["parts"] if part["what"].startswith(f"lease {lease.id} (train) ends")]


@pytest.mark.parametrize("kind", ["job", "held"])
async def test_what_is_refused_as_it_was_not_granted_at_once_keeps_no_memory(
    world: LeaseWorld, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr("hive.pooling.leases.FIRST_WORD_S", 0.1)
    written = world.pool.leases._written
    may_write = asyncio.Event()

    async def slow(lease: PooledLease) -> None:
        await may_write.wait()
        await written(lease)

    monkeypatch.setattr(world.pool.leases, "_written", slow)
    with pytest.raises(LeaseWaited, match="it was not granted at once"):
        await world.lease(40, kind=kind, wait_s=0.0)
    may_write.set()
    await until(lambda: not world.pool.leases.has_any)
    assert world.books() == {}
    (over,) = await world.pool.leases.all_ended(5)
    assert (over.why, over.code) == ("it was not granted at once", "lease_waited")


# --- ends ------------------------------------------------------------------------------------------------------


async def test_a_preemptible_lease_ends_for_a_late_model_with_the_reason(world: LeaseWorld) -> None:
    lease = await world.lease(80, preemptible=True)
    await world.until_lease(lease, "running")
    world.ask("a")
    await world.until("a", "ready")
    assert world.servers.holders.told_to_end == [(lease.id, "its memory is wanted: room for a")]
    assert (await world.desk.look(lease.id, ANN))["code"] == "lease_preempted"
    assert world.acts("lease.preempted")


async def test_a_preemptible_lease_ends_for_one_of_a_higher_band_and_for_no_other(world: LeaseWorld) -> None:
    lease = await world.lease(80, preemptible=True)
    await world.until_lease(lease, "running")
    same = await world.lease(50)
    await until(lambda: same.place == 1)
    await asyncio.sleep(0.2)
    assert world.lease_state(lease.id) == "running"
    high = await world.lease(60, band="high")
    await world.until_lease(high, "running")
    assert world.lease_state(lease.id) == "gone"


async def test_its_longest_time_ends_a_lease(world: LeaseWorld) -> None:
    lease = await world.lease(40, max_s=0.2)
    await world.until_lease(lease, "gone")
    told = await world.desk.look(lease.id, ANN)
    assert (told["code"], told["why"]) == ("lease_over", "its time of 0.2 s is over")


async def test_a_program_that_does_not_end_stays_charged(world: LeaseWorld) -> None:
    lease = await world.lease(40)
    await world.until_lease(lease, "running")
    world.servers.holders.stubborn.add(lease.id)
    await world.desk.end(lease.id, ROOT, approval=END)
    await world.until_lease(lease, "ending")
    await asyncio.sleep(0.2)
    assert world.books() == {lease.id: 40}
    world.servers.holders.leave(lease.id)
    await world.until_lease(lease, "gone")
    assert (await world.desk.look(lease.id, ANN))["why"] == "ended by uid:0"


async def test_what_a_program_has_beyond_its_word_is_booked_and_told_or_ended(world: LeaseWorld) -> None:
    lease = await world.lease(40)
    await world.until_lease(lease, "running")
    world.memory.takes_mb[lease.id] = 55
    await until(lambda: world.books() == {lease.id: 55})
    assert world.acts("lease.overrun")[0]["used_mb"] == 55
    world.settings = replace(world.settings, lease=LeaseSection(overrun="end"))
    other = await world.lease(20)
    await world.until_lease(other, "running")
    world.memory.takes_mb[other.id] = 30
    await world.until_lease(other, "gone")
    assert (await world.desk.look(other.id, ANN))["code"] == "lease_overrun"
    assert world.lease_state(lease.id) == "running"


async def test_memory_that_does_not_come_back_is_booked_as_foreign_after_a_while(world: LeaseWorld) -> None:
    lease = await world.lease(40)
    await world.until_lease(lease, "running")
    world.memory.left_mb = 40
    world.servers.holders.leave(lease.id)
    await world.until_lease(lease, "gone")
    assert world.acts("pool.foreign")[0]["bytes"] > 0


async def test_nobody_who_comes_for_a_grant_loses_it(world: LeaseWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hive.pooling.leases.COME_S", 0.1)
    monkeypatch.setattr("hive.pooling.leases.SILENT_S", 0.1)
    world.servers.holders.comes = False
    lease = await world.lease(40)
    await world.until_lease(lease, "gone")
    assert (await world.desk.look(lease.id, ANN))["why"] == "nobody came to hold it"


# --- held leases -----------------------------------------------------------------------------------------------


async def test_a_held_lease_lives_while_it_is_renewed_and_its_token_is_its_own(world: LeaseWorld) -> None:
    lease = await world.lease(40, kind="held", ttl_s=0.3)
    assert lease.state is LeaseState.RUNNING
    for _ in range(4):
        await asyncio.sleep(0.1)
        await world.desk.renew(lease.id, lease.row.token, None, ANN)
    assert lease.state is LeaseState.RUNNING
    with pytest.raises(StaleToken):
        await world.desk.renew(lease.id, lease.row.token + 1, None, ANN)
    with pytest.raises(NotPermitted):
        await world.desk.release(lease.id, lease.row.token, BEN)
    await world.desk.release(lease.id, lease.row.token, ANN)
    await world.until_lease(lease, "gone")
    with pytest.raises(StaleToken):
        await world.desk.renew(lease.id, lease.row.token, None, ANN)
    with pytest.raises(NotFound):
        await world.desk.end("l-999", ROOT, approval=END)
    with pytest.raises(NotFound):
        await world.desk.release("l-999", 999, ANN)
    with pytest.raises(NotFound):
        await world.desk.renew("l-999", 999, None, ANN)
    assert (await world.lease(10, kind="held")).row.token > lease.row.token


async def test_an_overdue_lease_keeps_its_memory_until_that_is_seen_to_be_free(world: LeaseWorld) -> None:
    lease = await world.lease(80, kind="held", ttl_s=0.2)
    world.memory.takes_mb[lease.id] = 80
    await world.until_lease(lease, "overdue")
    assert world.acts("lease.overdue")
    other = await world.lease(50, wait_s=60.0)
    await asyncio.sleep(0.3)
    assert (world.lease_state(other.id), world.books()) == ("waiting", {lease.id: 80})
    world.memory.takes_mb[lease.id] = 0
    await world.until_lease(lease, "gone")
    await world.until_lease(other, "running")


async def test_an_overdue_lease_that_is_renewed_goes_on(world: LeaseWorld) -> None:
    lease = await world.lease(80, kind="held", ttl_s=0.2)
    world.memory.takes_mb[lease.id] = 80
    await world.until_lease(lease, "overdue")
    await world.desk.renew(lease.id, lease.row.token, 60.0, ANN)
    assert lease.state is LeaseState.RUNNING
    job = await world.lease(10)
    await world.until_lease(job, "running")
    with pytest.raises(WrongState):
        await world.desk.renew(job.id, job.row.token, 1.0, ANN)


# --- a daemon or a helper that is killed -----------------------------------------------------------------------


async def test_a_killed_daemon_leaves_running_held_and_waiting_leases_to_the_next_one(
    world: LeaseWorld,
) -> None:
    job, held = await world.lease(40, max_s=600.0), await world.lease(30, kind="held", ttl_s=600.0)
    await world.until_lease(job, "running")
    waits = await world.lease(70, is_read=False)
    before, until_s = world.books(), job.row.until_s
    await world.kill()
    await world.again()
    assert world.books() == before
    again = world.pool.leases.get(job.id)
    assert again is not None
    assert again.state is LeaseState.RUNNING
    assert again.row.until_s == pytest.approx(until_s, abs=1.0)
    await world.desk.renew(held.id, held.row.token, 60.0, ANN)
    assert world.lease_state(waits.id) == "waiting"
    world.servers.holders.leave(job.id)
    await world.desk.release(held.id, held.row.token, ANN)
    await world.until_lease(waits, "running")


async def test_an_end_that_nobody_heard_of_is_found_by_the_next_daemon(world: LeaseWorld) -> None:
    ended, gone = await world.lease(40), await world.lease(30)
    for lease in (ended, gone):
        await world.until_lease(lease, "running")
    await world.database.write(store.living)  # after that is written
    await world.kill()
    world.servers.holders.leave(ended.id)
    del world.servers.holders.holders[gone.id]
    await world.again()
    for lease in (ended, gone):
        await world.until_lease(lease, "gone")
    assert (await world.desk.look(gone.id, ANN))["why"] == "its holder is gone"
    assert world.books() == {}


async def test_a_grant_that_the_helper_never_heard_of_goes_back_into_the_line(world: LeaseWorld) -> None:
    lease = await world.lease(40)
    await world.until_lease(lease, "running")
    await world.kill()
    row = lease.row
    world.servers.holders.holders.clear()
    await world.database.write(lambda conn: store.update(conn, _granted(row)))
    await world.again()
    await world.until_lease(lease, "waiting")
    assert len(world.servers.holders.expected) == 1  # nobody is there who would come for it
    assert [view["state"] for view in await world.read(lease.id)][-1] in ("granted", "running")
    await world.until_lease(lease, "running")
    assert len(world.servers.holders.expected) == 2


async def test_a_grant_whose_daemon_was_killed_before_it_told_it_is_told_by_the_next_one(world: LeaseWorld) -> None:
    world.servers.holders.comes = False
    lease = await world.lease(40, is_read=False)
    await world.until_lease(lease, "granted")
    await world.database.write(store.living)
    await world.kill()
    await world.again()
    (told,) = await world.read(lease.id)
    assert (told["state"], told["nonce"]) == ("granted", world.servers.holders.expected[-1].nonce)
    world.servers.holders.come(lease.id)
    await world.until_lease(lease, "running")


async def test_a_reader_goes_on_while_what_it_waits_for_goes_back_into_the_line(
    world: LeaseWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget = world.servers.holders.lease_forget

    async def after_a_round_trip(id: str) -> None:
        await asyncio.sleep(0.01)
        await forget(id)

    monkeypatch.setattr(world.servers.holders, "lease_forget", after_a_round_trip)
    lease = await world.lease(40)
    await world.until_lease(lease, "running")
    await world.kill()
    row = lease.row
    world.servers.holders.holders.clear()
    await world.database.write(lambda conn: store.update(conn, _granted(row)))
    world.servers.is_there = False
    await world.again(wait=False)
    read = asyncio.create_task(world.read(lease.id))
    await asyncio.sleep(0.2)
    world.servers.is_there = True
    world.pool.helper_here()
    states = [view["state"] for view in await read]
    assert set(states[:-1]) == {"waiting"}
    assert states[-1] in ("granted", "running")


async def test_one_that_goes_back_and_is_ended_meanwhile_is_over(world: LeaseWorld) -> None:
    lease = await world.lease(40)
    await world.until_lease(lease, "running")
    await world.kill()
    row = lease.row
    world.servers.holders.holders.clear()
    world.memory.left_mb = 40  # it takes a while until its memory counts as back
    await world.database.write(lambda conn: store.update(conn, _granted(row)))
    await world.again()
    again = world.pool.leases.get(lease.id)
    assert again is not None
    assert (again.is_releasing, again.goes_back) == (True, True)
    await world.desk.end(lease.id, ROOT, approval=END)
    await world.until_lease(lease, "gone")
    assert (await world.desk.look(lease.id, ANN))["why"] == "ended by uid:0"


async def test_the_time_in_which_somebody_has_to_come_begins_when_the_helper_expects_him(
    world: LeaseWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hive.pooling.leases.COME_S", 0.3)
    monkeypatch.setattr("hive.pooling.leases.SILENT_S", 0.2)
    running = await world.lease(10)
    await world.until_lease(running, "running")
    world.servers.is_there = False
    world.servers.holders.comes = False
    waits = await world.lease(40)
    await asyncio.sleep(0.8)
    world.servers.is_there = True
    world.pool.helper_here()
    await world.until_lease(waits, "granted")
    world.servers.holders.come(waits.id)
    await world.until_lease(waits, "running")


def _granted(row: store.StoredLease) -> store.StoredLease:
    return replace(row, state="granted", granted_s=None)


async def test_an_end_under_way_is_carried_on_by_the_next_daemon(world: LeaseWorld) -> None:
    lease = await world.lease(40)
    await world.until_lease(lease, "running")
    world.servers.holders.stubborn.add(lease.id)
    await world.desk.end(lease.id, ROOT, approval=END)
    await until(lambda: world.servers.holders.told_to_end)
    await world.kill()
    world.servers.holders.stubborn.clear()
    await world.again()
    await world.until_lease(lease, "gone")
    assert len(world.servers.holders.told_to_end) == 2


async def test_leases_of_an_earlier_run_of_the_machine_are_over(world: LeaseWorld) -> None:
    lease = await world.lease(40, kind="held", ttl_s=600.0)
    await world.kill()
    row = replace(lease.row, boot="another")
    await world.database.write(lambda conn: store.update(conn, row))
    await world.again()
    assert world.books() == {}
    assert (await world.desk.look(lease.id, ANN))["why"] == "the machine was started anew"


async def test_a_holder_of_no_row_is_booked_and_one_of_an_ended_lease_is_ended(world: LeaseWorld) -> None:
    stranger, ended = await world.lease(40), await world.lease(20)
    for lease in (stranger, ended):
        await world.until_lease(lease, "running")
    await world.kill()
    over = ended.row
    await world.database.write(lambda conn: conn.execute("DELETE FROM leases WHERE token = ?", (stranger.row.token,)))
    await world.database.write(lambda conn: store.update(conn, _over(over)))
    await world.again()
    await until(lambda: world.books() == {stranger.id: 40})
    assert world.servers.holders.told_to_end == [(ended.id, "its lease is over")]
    world.servers.holders.leave(stranger.id)
    await world.until_lease(stranger, "gone")


def _over(row: store.StoredLease) -> store.StoredLease:
    return replace(row, state="ended", ended_at=1.0)


async def test_a_helper_that_is_away_delays_grants_and_ends_and_loses_none(world: LeaseWorld) -> None:
    running = await world.lease(30)
    await world.until_lease(running, "running")
    world.servers.is_there = False
    waits = await world.lease(40)  # the pool knows the memory: it is decided, and its helper waited for
    await world.desk.end(running.id, ROOT, approval=END)
    await asyncio.sleep(0.1)
    assert world.books()[running.id] == 30
    world.servers.is_there = True
    world.pool.helper_here()
    await world.until_lease(running, "gone")
    await world.until_lease(waits, "running")


async def test_while_the_helper_is_away_the_times_of_leases_go_on_and_an_order_is_answered(
    world: LeaseWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hive.pooling.pooling.AGAIN_S", 0.05)
    job = await world.lease(50)
    await world.until_lease(job, "running")
    held = await world.lease(30, kind="held", ttl_s=0.4)
    world.memory.takes_mb[held.id] = 30
    waits = await world.lease(60, wait_s=0.4)
    world.servers.is_there = False
    monkeypatch.setattr(world.pool, "helper_here", lambda: None)
    await until(lambda: not world.pool._adopted.is_set())
    await world.until_lease(waits, "gone")
    await world.until_lease(held, "overdue")
    monkeypatch.setattr("hive.pooling.leases.KNOWN_S", 0.2)
    world.pool._adopted.set()  # it is lost between this and the next decision
    with pytest.raises(LeaseWaited):
        await world.lease(10, wait_s=0.0)
    assert world.lease_state(job.id) == "running"


async def test_a_helper_that_is_too_slow_to_tell_its_leases_is_asked_again_and_none_is_lost(
    world: LeaseWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = await world.lease(40)
    await world.until_lease(lease, "running")
    asked: list[bool] = []

    async def slow() -> dict[str, LeaseHolder]:
        asked.append(True)
        if len(asked) < 3:
            raise TimedOut("sandbox did not answer AskLeases within 15 s")
        return dict(world.servers.holders.holders)

    monkeypatch.setattr("hive.pooling.pooling.AGAIN_S", 0.02)
    monkeypatch.setattr(world.servers.holders, "leases", slow)
    world.pool.helper_here()
    await world.pool.adopted()
    assert len(asked) >= 3
    assert (world.lease_state(lease.id), world.books()) == ("running", {lease.id: 40})
    assert world.servers.holders.told_to_end == []


async def test_a_helper_that_is_older_knows_of_no_lease(world: LeaseWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    lease = await world.lease(40)
    await world.until_lease(lease, "running")

    async def older() -> dict[str, LeaseHolder]:
        raise NotSupported("this helper lets no lease's holder in")

    monkeypatch.setattr(world.servers.holders, "leases", older)
    world.pool.helper_here()
    await world.until_lease(lease, "gone")
    assert (await world.desk.look(lease.id, ANN))["why"] == "its holder is gone"


async def test_a_holder_whose_lease_is_over_has_its_own_grace(world: LeaseWorld) -> None:
    ended = await world.lease(20, grace_s=17.0)
    await world.until_lease(ended, "running")
    await world.kill()
    over = ended.row
    await world.database.write(lambda conn: store.update(conn, _over(over)))
    await world.again()
    await until(lambda: world.servers.holders.told_to_end)
    assert world.servers.holders.graces == [17.0]


async def test_a_clock_that_is_set_back_ends_and_prolongs_nothing(
    world: LeaseWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = await world.lease(40, kind="held", ttl_s=0.5)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now - 86_400)
    await world.desk.renew(lease.id, lease.row.token, None, ANN)
    world.memory.takes_mb[lease.id] = 40
    assert lease.state is LeaseState.RUNNING
    await world.until_lease(lease, "overdue")


async def test_an_end_of_what_is_in_no_books_is_forgotten_by_the_helper(world: LeaseWorld) -> None:
    grant = LeaseGrant(id="l-999", token=999, nonce="n" * 32, uid=0, accounts={"GPU-0": 1})
    await world.servers.holders.lease_expect(grant)
    world.servers.holders.leave("l-999")
    await until(lambda: world.servers.holders.forgotten == ["l-999"])


async def test_the_state_of_a_holder_is_never_older_than_its_end(world: LeaseWorld) -> None:
    lease = await world.lease(40)
    await world.until_lease(lease, "running")
    running = world.servers.holders.holders[lease.id]
    world.servers.holders.leave(lease.id)
    world.pool.leases.holder_moved(running)
    assert lease.holder is not None
    assert lease.holder.state is HolderState.ENDED
    await world.until_lease(lease, "gone")
