"""The pool in the daemon: what is loaded, evicted, refused, and what is left after faults. Helper, proxy and memory are
played (pool_world.py), so that each fault comes when it is to come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from hive.domain import Band, JobState
from hive.errors import NotFound, WrongState
from hive.link.pool import CrashBlame
from hive.link.slots import ProcessState, SlotGrant, SlotProcess
from hive.pool.state import MIB
from hive.store.pool import pins
from tests.approvals import LOAD, PIN, UNLOAD, UNPIN
from tests.pooling.pool_world import GPU, PoolWorld
from tests.waiting import until

World = Callable[..., Awaitable[PoolWorld]]


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    worlds: list[PoolWorld] = []

    async def make(models: dict[str, int], *, total_mb: int = 100, **settings: Any) -> PoolWorld:
        made = PoolWorld(tmp_path, models, total_mb=total_mb, **settings)
        worlds.append(made)
        await made.begin()
        return made

    yield make
    for made in worlds:
        await made.end()


# --- loading and leaving ---


async def test_a_model_is_loaded_when_it_is_asked_for_and_the_proxy_is_told_where_it_is(world: World) -> None:
    box = await world({"a": 40})
    assert box.state("a") == "cold"
    box.ask("a")
    await box.until("a", "ready")
    await until(lambda: box.proxy.is_open(box.id("a")))
    row = box.proxy.last_row(box.id("a"))
    assert (row.backend.address, row.backend.places, row.generation) == (f"/nowhere/{box.id('a')}.sock", 4, 1)
    ((_, grant),) = box.servers.started
    assert grant == SlotGrant(accounts={GPU: 40}, generation=1)
    assert [act for act, _ in box.audit.acts] == ["model.loaded"]


async def test_two_that_fit_are_both_loaded_and_one_after_the_other(world: World) -> None:
    box = await world({"a": 40, "b": 40})
    box.servers.load_s = 0.05
    box.ask("a")
    box.ask("b")
    await until(lambda: box.servers.started)
    assert len(box.servers.started) == 1  # one move of memory at a time
    await box.until("a", "ready")
    box.use("a", 0)
    await box.until("b", "ready")
    assert box.servers.stopped == []


async def test_an_idle_model_without_an_audience_gives_way_at_once(world: World) -> None:
    box = await world({"a": 60, "b": 60})
    box.ask("a")
    await box.until("a", "ready")
    box.use("a", 0)
    box.ask("b", agent="b1")
    await box.until("b", "ready")
    assert box.state("a") == "cold"
    assert box.proxy.closed == [(box.id("a"), None)]
    assert box.pool.counts.metrics()["pool_evictions"] == {("room",): 1}
    assert not box.proxy.is_open(box.id("a"))
    (why,) = [detail["reason"] for act, detail in box.audit.acts if act == "model.unloaded"]
    assert why == "room for b", "people know it by its name"


async def test_the_model_that_room_is_made_for_is_prepared_and_then_the_one_that_left(world: World) -> None:
    box = await world({"a": 60, "b": 60, "c": 20}, swap_share=0.99, swap_share_high=0.99)
    box.ask("a")
    await box.until("a", "ready")
    box.use("a", 1)
    assert box.servers.prepared == []  # of the others none was ever used
    box.ask("b", agent="b1")
    await until(lambda: box.servers.prepared == [box.id("b")])
    assert len(box.servers.started) == 1  # before room is made
    await box.until("b", "ready")
    await until(lambda: box.servers.prepared == [box.id("b"), box.id("a")])
    assert box.state("a") == "cold"


async def test_nothing_is_prepared_where_that_is_not_wanted(world: World) -> None:
    box = await world({"a": 60, "b": 60}, prepare=False)
    for model in ("a", "b", "a"):
        box.ask(model)
        await box.until(model, "ready")
        box.use(model, 0)
    await box.pool.passed()
    assert box.servers.prepared == []


async def test_the_next_helper_is_told_again_what_is_to_wait(world: World) -> None:
    box = await world({"a": 60, "b": 60})
    for model in ("a", "b"):
        box.ask(model)
        await box.until(model, "ready")
        box.use(model, 0)
    await until(lambda: box.servers.prepared[-1:] == [box.id("a")])
    box.servers.prepared.clear()
    box.pool.helper_here()
    await until(lambda: box.servers.prepared == [box.id("a")])


async def test_what_is_in_flight_is_waited_for_and_cut_only_after_the_turn_and_the_drain(world: World) -> None:
    box = await world({"a": 60, "b": 60}, swap_share=0.99, swap_share_high=0.99)
    box.ask("a")
    await box.until("a", "ready")
    box.use("a", 1)
    box.ask("b", agent="b1")
    await box.until("a", "draining")
    assert box.servers.stopped == []
    await box.until("b", "ready")  # after drain_s the proxy has cut it
    id, drain_s = box.proxy.closed[-1]
    assert (id, round(drain_s or 0.0, 2)) == (box.id("a"), 0.3)


async def test_one_that_is_busy_when_it_is_to_be_closed_stays_and_nothing_is_taken_from_it(world: World) -> None:
    box = await world({"a": 60, "b": 60}, patience_normal_s=30)
    box.ask("a")
    await box.until("a", "ready")
    box.use("a", 0)
    box.proxy.in_flight[box.id("a")] = 2  # came after the last word of the proxy
    box.ask("b", agent="b1")
    await until(lambda: box.proxy.closed)
    await box.until("a", "ready")
    assert box.pool.find("a").in_flight == 2
    assert box.servers.stopped == []
    assert box.state("b") == "cold"


async def test_a_pinned_model_is_loaded_unasked_and_never_leaves(world: World) -> None:
    box = await world({"a": 60, "b": 60})
    box.pool.find("a").pinned_at = 0.0
    box.pool.wake()
    await box.until("a", "ready")
    box.use("a", 0)
    box.ask("b", agent="b1")
    await until(lambda: box.pool.find("b").never)
    row = box.proxy.last_row(box.id("b"))
    assert row.never == "b does not fit beside what is pinned: a"
    box.pool.find("a").pinned_at = None
    box.pool.wake()
    await until(lambda: not box.proxy.last_row(box.id("b")).never)  # requests for it are taken again


async def test_a_model_larger_than_the_gpu_is_refused_with_the_arithmetic(world: World) -> None:
    box = await world({"a": 200})
    box.ask("a")
    await until(lambda: box.pool.find("a").never)
    assert box.proxy.last_row(box.id("a")).never == f"a needs {200 * MIB} bytes, more than can ever be free"


async def test_a_model_that_others_leave_no_room_for_is_refused_until_they_end(world: World) -> None:
    box = await world({"a": 60})
    box.memory.foreign_mb = 90
    await box.pool.look()
    box.ask("a")
    await until(lambda: box.pool.find("a").never)
    told = f"a needs {60 * MIB} bytes, more than is free beside the {90 * MIB} bytes of others"
    assert box.proxy.last_row(box.id("a")).never == told
    box.memory.foreign_mb = 0
    await until(lambda: not box.proxy.last_row(box.id("a")).never)  # an idle pool does not look so soon


async def test_nobody_is_refused_by_a_look_that_is_older_than_what_is_free_now(world: World) -> None:
    box = await world({"a": 60})
    box.memory.foreign_mb = 90
    await box.pool.look()
    box.memory.foreign_mb = 0
    await asyncio.sleep(0.2)
    box.ask("a")
    await box.until("a", "ready")


async def test_a_model_whose_file_is_missing_is_refused_until_it_is_there(world: World, tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    box = PoolWorld(tmp_path / "gone", {"a": 10}, total_mb=100)
    (tmp_path / "gone" / "a.gguf").unlink()
    await box.begin()
    try:
        box.ask("a")
        await until(lambda: box.pool.find("a").why_not)
        assert "a.gguf" in box.proxy.last_row(box.id("a")).never
        assert box.servers.started == []
    finally:
        await box.end()


async def test_an_idle_model_leaves_after_its_keep_alive(world: World) -> None:
    box = await world({"a": 40}, keep_alive_s=0.2)
    box.ask("a")
    await box.until("a", "ready")
    box.use("a", 0)
    await box.until("a", "cold")
    assert box.audit.acts[-1] == ("model.unloaded", {"name": "a", "reason": "idle"})
    assert box.pool.counts.metrics()["pool_evictions"] == {("idle",): 1}


# --- loads that fail ---


async def test_a_load_that_dies_for_memory_is_tried_once_more_with_more(world: World) -> None:
    box = await world({"a": 40})
    box.servers.comes_up[box.id("a")] = "ended"
    box.servers.last[box.id("a")] = ["CUDA error: out of memory"]
    box.ask("a")
    await until(lambda: len(box.servers.started) == 2)
    assert [grant.accounts[GPU] for _, grant in box.servers.started] == [40, 50]
    await until(lambda: len(box.audit.acts) == 2)  # the last thing of a load that failed
    assert box.pool.find("a").failures == 2
    assert box.pool.find("a").retry_at > 0
    assert "out of memory" in box.pool.find("a").error


async def test_a_load_that_fails_is_not_tried_again_at_once_and_its_reason_is_kept(world: World) -> None:
    box = await world({"a": 40})
    box.servers.comes_up[box.id("a")] = "ended"
    box.servers.last[box.id("a")] = ["error loading model"]
    box.ask("a")
    await until(lambda: box.pool.find("a").failures == 1)
    await asyncio.sleep(0.1)
    assert len(box.servers.started) == 1
    assert box.pool.find("a").error == "its server ended with exit code 1: error loading model"
    assert box.pool.find("a").grants == ()


# --- memory ---


async def test_a_server_that_takes_more_than_it_was_charged_is_charged_that(world: World) -> None:
    box = await world({"a": 40, "b": 40})
    box.memory.takes_mb[box.id("a")] = 70
    box.ask("a")
    await box.until("a", "ready")
    await box.pool.look()
    assert box.pool.find("a").grants[0].charged_bytes == 70 * MIB
    box.use("a", 1)
    box.ask("b", agent="b1")
    await asyncio.sleep(0.1)
    assert box.state("b") == "cold"  # it would fit by what was declared
    box.use("a", 0)
    box.proxy.in_flight.clear()
    await box.until("b", "ready")
    assert box.pool.need_bytes(box.pool.find("a")) == 70 * MIB  # and is charged that by the next load


async def test_memory_that_does_not_come_back_is_booked_as_foreign_and_the_pool_goes_on(world: World) -> None:
    box = await world({"a": 60, "b": 60}, total_mb=130)
    box.ask("a")
    await box.until("a", "ready")
    box.use("a", 0)
    box.memory.left_mb = 60  # whatever holds it
    box.pool.find("a").unload_orders.add("job")
    box.pool.wake()
    await box.until("a", "cold")
    assert ("pool.foreign", {"name": "a", "account": GPU, "bytes": 60 * MIB}) in box.audit.acts
    box.ask("b", agent="b1")
    await box.until("b", "ready")


async def test_a_crashed_server_whose_memory_is_back_before_anybody_looks_is_loaded_again(world: World) -> None:
    box = await world({"a": 60})
    box.ask("a")
    await box.until("a", "ready")
    box.use("a", 1)
    box.servers.end(box.id("a"), exit_code=139)
    box.ask("a")
    await until(lambda: box.pool.find("a").generation == 2 and box.state("a") == "ready")
    act, detail = box.audit.acts[1]
    assert (act, detail["reason"]) == ("model.crashed", "its server ended with exit code 139")


async def test_foreign_memory_keeps_a_load_from_beginning_and_takes_nothing_from_residents(world: World) -> None:
    box = await world({"a": 40, "b": 40})
    box.ask("a")
    await box.until("a", "ready")
    box.use("a", 1)
    box.memory.foreign_mb = 40
    await box.pool.look()
    box.ask("b", agent="b1")
    await asyncio.sleep(0.1)
    assert (box.state("a"), box.state("b")) == ("ready", "cold")


async def test_without_nvml_the_books_decide(world: World) -> None:
    box = await world({"a": 60, "b": 60})
    box.memory.is_known = False
    box.ask("a")
    await box.until("a", "ready")
    box.use("a", 0)
    assert box.pool.find("a").grants[0].charged_bytes == 60 * MIB
    box.ask("b", agent="b1")
    await box.until("b", "ready")
    assert box.state("a") == "cold"


# --- crashes and faults of the others ---


async def test_five_crashes_in_a_row_and_it_is_failed_but_not_those_that_an_agent_is_blamed_for(world: World) -> None:
    box = await world({"a": 60})
    slot = box.pool.find("a")
    box.proxy.blame = CrashBlame(agents=["evil"], refused=["evil"])
    for crashes in range(1, 7):
        box.ask("a")
        await box.until("a", "ready")
        box.leave("a")
        box.servers.end(slot.id)
        await until(lambda: box.state("a") == "cold")
        assert slot.generation == crashes
    assert box.audit.acts[-1][1]["agents"] == "evil"
    box.proxy.blame = CrashBlame(agents=[])
    for _ in range(5):
        slot.retry_at = 0.0
        box.ask("a")
        await box.until("a", "ready")
        box.leave("a")
        box.servers.end(slot.id)
        await until(lambda: box.state("a") in ("cold", "failed"))
    assert box.state("a") == "failed"
    box.ask("a")
    await until(lambda: box.proxy.last_row(slot.id).never)
    assert box.proxy.last_row(slot.id).never == "its loads have failed"


async def test_the_next_daemon_takes_over_what_runs_and_ends_what_it_does_not_know(world: World) -> None:
    box = await world({"a": 40, "b": 40})
    box.ask("a")
    await box.until("a", "ready")
    box.servers.processes["stray-00000000"] = SlotProcess(id="stray-00000000", run="9", state=ProcessState.SERVING)
    await box.kill()
    await box.again()
    await box.until("a", "ready")
    assert box.pool.find("a").generation == 1  # the same server: what is in flight goes on
    assert box.pool.find("a").grants[0].charged_bytes == 40 * MIB
    assert len(box.servers.started) == 1
    assert box.servers.stopped == ["stray-00000000"]


@pytest.mark.parametrize("moment", ["loading", "draining", "stopping"])
async def test_a_daemon_killed_at_any_step_leaves_nothing_charged_that_does_not_run(world: World, moment: str) -> None:
    box = await world({"a": 60, "b": 60}, drain_s=30)
    box.servers.load_s = 0.2 if moment == "loading" else 0.0
    box.ask("a")
    if moment == "loading":
        await until(lambda: box.servers.started)
    else:
        await box.until("a", "ready")
        box.use("a", 1)
        box.pool.find("a").unload_orders.add("job")
        box.pool.wake()
        await box.until("a", "draining")
        if moment == "stopping":
            box.servers.is_there = False
            box.proxy.in_flight.clear()
            await box.until("a", "stopping")
    await box.kill()
    box.servers.is_there = True
    await box.again()
    await box.until("a", "ready")
    charged = sum(grant.charged_bytes for slot in box.pool.slots.values() for grant in slot.grants)
    assert charged == 60 * MIB
    box.use("a", 0)
    box.ask("b", agent="b1")
    await box.until("b", "ready")


async def test_a_server_that_ends_while_the_daemon_leaves_has_not_crashed(world: World) -> None:
    """With the machine all go at once; a daemon that still had to say goodbye to its callers loaded them again."""
    box = await world({"a": 40})
    box.ask("a")
    await box.until("a", "ready")
    await box.pool.close()
    box.servers.end(box.id("a"))
    await box.pool.run()  # it ends at once
    assert box.state("a") == "ready"
    assert [act for act, _ in box.audit.acts] == ["model.loaded"]
    assert len(box.servers.started) == 1


async def test_a_helper_that_is_away_delays_a_load_and_loses_nothing(world: World) -> None:
    box = await world({"a": 60})
    box.servers.is_there = False
    box.ask("a")
    await asyncio.sleep(0.1)
    assert box.state("a") in ("cold", "loading")
    box.servers.is_there = True
    box.pool.helper_here()
    await box.until("a", "ready")
    assert len(box.servers.started) == 1


async def test_a_server_that_ends_while_the_helper_is_away_is_noticed_when_it_is_back(world: World) -> None:
    box = await world({"a": 60})
    box.ask("a")
    await box.until("a", "ready")
    box.use("a", 1)
    box.servers.is_there = False
    del box.servers.processes[box.id("a")]
    box.servers.is_there = True
    box.pool.helper_here()
    await until(lambda: not box.proxy.is_open(box.id("a")))
    box.ask("a")
    await until(lambda: box.pool.find("a").generation == 2 and box.state("a") == "ready")


async def test_nothing_is_stopped_without_the_proxys_word(world: World) -> None:
    box = await world({"a": 60, "b": 60})
    box.ask("a")
    await box.until("a", "ready")
    box.use("a", 1)
    box.proxy.is_there = False
    box.pool.find("a").unload_orders.add("job")
    box.pool.wake()
    await box.until("a", "draining")
    await asyncio.sleep(0.5)  # longer than drain_s
    assert box.servers.stopped == []
    box.proxy.is_there = True
    box.proxy.in_flight.clear()
    box.pool.proxy_here()
    await box.until("a", "cold")


async def test_those_of_the_high_band_wait_less_long(world: World) -> None:
    box = await world(
        {"a": 60, "b": 60}, patience_normal_s=30, patience_high_s=0.05, swap_share=0.99, swap_share_high=0.99
    )
    box.ask("a")
    await box.until("a", "ready")
    box.use("a", 1)
    box.ask("b", band=Band.HIGH, agent="b1")
    await box.until("b", "ready")


# --- orders ---


async def test_an_order_to_load_is_a_job_that_ends_with_the_load_and_may_be_taken_back(world: World) -> None:
    box = await world({"a": 60, "b": 60}, swap_share=0.01)
    done = await box.follow(await box.orders.load("a", "uid:0", approval=LOAD))
    assert (done.state, done.result and done.result["changed"]) == (JobState.DONE, True)
    assert done.progress == "a is loaded"
    again = await box.orders.load("a", "uid:0", approval=LOAD)
    assert (again.state, again.result and again.result["changed"]) == (JobState.DONE, False)
    box.use("a", 1)
    waits = await box.orders.load("b", "uid:0", approval=LOAD)
    cancelled = await box.orders.cancel(waits.id)
    assert cancelled.state == JobState.CANCELLED
    assert not box.orders.is_loading(waits.id)
    assert box.pool.find("b").waiting == ()


async def test_an_order_says_why_a_load_failed_and_the_next_one_tries_at_once(world: World) -> None:
    box = await world({"a": 60})
    box.servers.comes_up[box.id("a")] = "ended"
    box.servers.last[box.id("a")] = ["error loading model"]
    failed = await box.follow(await box.orders.load("a", "uid:0", approval=LOAD))
    assert failed.state == JobState.FAILED
    assert failed.error is not None
    assert (failed.error["message"], failed.error["log"]) == (
        "a: its server ended with exit code 1: error loading model",
        ["error loading model"],
    )
    box.servers.comes_up.clear()
    assert (await box.follow(await box.orders.load("a", "uid:0", approval=LOAD))).state == JobState.DONE


async def test_an_unload_waits_for_what_is_in_flight_and_a_pinned_model_stays(world: World) -> None:
    box = await world({"a": 60}, drain_s=30)
    await box.follow(await box.orders.load("a", "uid:0", approval=LOAD))
    await box.orders.pin("a", "uid:0", approval=PIN)
    with pytest.raises(WrongState, match="pinned"):
        await box.orders.unload("a", "uid:0", approval=UNLOAD)
    await box.orders.unpin("a", "uid:0", approval=UNPIN)
    box.use("a", 1)
    job = await box.orders.unload("a", "uid:0", approval=UNLOAD)
    await box.until("a", "draining")
    box.proxy.in_flight.clear()
    assert (await box.follow(job)).state == JobState.DONE
    assert box.state("a") == "cold"


async def test_a_pin_is_kept_for_the_next_daemon_and_goes_before_the_description(world: World) -> None:
    box = await world({"a": 60})
    await box.orders.pin("a", "uid:0", approval=PIN)
    await box.until("a", "ready")
    await box.kill()
    await box.again(box.database.read_now(lambda conn: {name: pinned for name, (pinned, _) in pins(conn).items()}))
    assert box.pool.find("a").pinned_at is not None
    with pytest.raises(NotFound, match="no model"):
        await box.orders.pin("x", "uid:0", approval=PIN)


async def test_a_fault_of_hives_own_in_a_step_leaves_no_slot_between_two_states(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = await world({"a": 60})

    async def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(box.pool.steps, "_describe", broken)
    box.ask("a")
    await until(lambda: box.pool.find("a").failures == 1)
    assert (box.state("a"), box.pool.find("a").grants) == ("cold", ())
    assert box.servers.stopped == [box.id("a")]


async def test_a_fault_of_hives_own_in_a_decision_does_not_end_the_pool(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = await world({"a": 60})
    with monkeypatch.context() as broken:
        broken.setattr(box.pool, "_decide", lambda: 1 / 0)
        box.ask("a")
        await asyncio.sleep(0.05)
    await box.until("a", "ready")


async def test_an_end_that_nobody_was_told_of_is_seen_with_the_next_look(world: World) -> None:
    box = await world({"a": 60})
    box.ask("a")
    await box.until("a", "ready")
    box.use("a", 1)
    del box.servers.processes[box.id("a")]
    await box.pool.look()
    await until(lambda: not box.proxy.is_open(box.id("a")))
    await until(lambda: "model.crashed" in [act for act, _ in box.audit.acts])
    assert box.audit.acts[-1][1]["reason"] == "its server ended: it is gone"


async def test_a_server_that_ends_while_it_is_asked_what_it_is_never_becomes_ready(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = await world({"a": 60})
    describe = box.pool.steps._describe

    async def dies(*given: Any) -> Any:
        box.servers.end(box.id("a"), exit_code=139)
        return await describe(*given)

    monkeypatch.setattr(box.pool.steps, "_describe", dies)
    box.ask("a")
    await until(lambda: box.pool.find("a").failures == 1)
    assert not any(row.is_open for row in box.proxy.told)


async def test_a_pinned_model_whose_file_is_missing_evicts_nobody(world: World, tmp_path: Path) -> None:
    box = await world({"a": 60, "b": 60})
    box.ask("a")
    await box.until("a", "ready")
    box.use("a", 0)
    (tmp_path / "b.gguf").unlink()
    await box.pool.footprints.facts_of(box.pool.find("b").entry)
    box.pool.find("b").pinned_at = 0.0
    box.pool.wake()
    await asyncio.sleep(0.2)
    assert (box.state("a"), box.state("b")) == ("ready", "cold")


async def test_two_orders_to_load_the_same_model_end_with_the_same_load(world: World) -> None:
    box = await world({"a": 60})
    box.servers.load_s = 0.1
    first, second = (
        await box.orders.load("a", "uid:0", approval=LOAD),
        await box.orders.load("a", "uid:1", approval=LOAD),
    )
    assert [(await box.follow(job)).state for job in (first, second)] == [JobState.DONE] * 2
    assert len(box.servers.started) == 1


async def test_a_server_whose_grant_cannot_be_read_is_charged_all_the_same(world: World) -> None:
    box = await world({"a": 60, "b": 60}, patience_normal_s=30)
    box.ask("a")
    await box.until("a", "ready")
    running = box.servers.processes[box.id("a")]
    await box.kill()
    box.servers.processes[box.id("a")] = SlotProcess(id=running.id, run="1", state=ProcessState.SERVING, pids=[1])
    await box.again()
    await box.until("a", "ready")
    assert sum(grant.charged_bytes for grant in box.pool.find("a").grants) == 60 * MIB
