"""Models that sleep instead of being unloaded: what is asked of their servers, what is measured, and what is left after
each failure. The servers are processes with vLLM's routes (sleep_world.py)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hive.domain import Band, JobState
from hive.pool.footprints import SleepFootprint
from hive.pool.state import MIB
from hive.pooling.pool_views import explanation_of, slot_view, view_of
from hive.pooling.slot_sleep import SlotSleep
from tests.approvals import LOAD, UNLOAD
from tests.fakes.fake_sleeping_vllm import CONTEXT_BYTES, PYTHON_BYTES
from tests.pooling.sleep_world import SleepWorld
from tests.waiting import until

World = Callable[..., Awaitable[SleepWorld]]
CONTEXT_MB, PYTHON_MB = CONTEXT_BYTES // MIB, PYTHON_BYTES // MIB
SLEPT = ["/v1/completions", "/sleep?level=1"]
WOKEN_1 = ["/wake_up", "/v1/completions"]
WOKEN_2 = [
    "/wake_up?tags=weights",
    "/collective_rpc",
    "/wake_up?tags=kv_cache",
    "/reset_prefix_cache",
    "/v1/completions",
]


@pytest.fixture
async def world(tmp_path: Path, short_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    """Steps of sleep that hang are given up after a second."""
    for name in ("fall_asleep_s", "wake_min_s", "token_s", "look_again_s"):
        monkeypatch.setattr(SlotSleep, name, 1.0)
    worlds: list[SleepWorld] = []

    async def make(*models: str, **settings: Any) -> SleepWorld:
        made = SleepWorld(tmp_path, short_path, *(models or ("a", "b")), **settings)
        worlds.append(made)
        await made.begin()
        return made

    yield make
    for made in worlds:
        await made.end()


async def asleep(world: World, **settings: Any) -> SleepWorld:
    """A box on which `a` sleeps for `b`, that nobody uses."""
    box = await world(**settings)
    await box.loaded("a")
    await box.loaded("b")
    assert box.state("a") == "asleep"
    return box


# --- as it should be ---


async def test_a_sleeper_that_left_for_a_load_that_failed_comes_back_with_all_that_it_needs_awake(world: World) -> None:
    box = await asleep(world)
    awake = sum(grant.charged_bytes for grant in box.pool.find("a").awake)
    await box.follow(await box.orders.unload("b", "uid:0", approval=UNLOAD))
    job = await box.orders.load("b", "uid:0", approval=LOAD, evict="a")
    await box.until("b", "loading")
    await until(lambda: box.id("b") in box.servers.processes)
    box.servers.kill(box.id("b"))
    assert (await box.follow(job)).state is JobState.FAILED
    await box.until("a", "ready")
    id, grant = box.servers.started[-1]
    assert (id, sum(grant.accounts.values())) == (box.id("a"), awake // MIB)
    box.pool_is_whole()


async def test_a_victim_sleeps_its_memory_is_measured_back_and_the_other_model_is_loaded(world: World) -> None:
    box = await asleep(world)
    assert box.asked("a") == SLEPT
    assert box.servers.stopped == []
    assert box.proxy.closed == [(box.id("a"), None)], "the proxy's word came first"
    assert not box.proxy.is_open(box.id("a"))
    assert (box.charged_mb("a"), box.held_mb("a")) == (CONTEXT_MB, CONTEXT_MB)
    act, detail = box.audit.acts[1]
    assert (act, detail["level"], detail["kept_bytes"], detail["reason"]) == (
        "model.asleep",
        "1",
        CONTEXT_BYTES,
        "room for b",
    )
    assert box.acts("b") == ["model.loaded"]
    counts = box.pool.counts.metrics()
    assert (counts["pool_sleeps"], counts["pool_evictions"]) == ({("1",): 1}, {("room",): 1})
    box.pool_is_whole()


async def test_a_request_wakes_it_once_it_holds_its_memory_again_and_has_generated_a_token(world: World) -> None:
    box = await asleep(world)
    before = box.servers.children[box.id("a")].pid
    box.ask("a")
    await box.until("a", "ready")
    assert box.state("b") == "asleep", "they change places"
    assert box.asked("a") == SLEPT + WOKEN_1
    assert box.servers.children[box.id("a")].pid == before
    assert box.proxy.is_open(box.id("a"))
    assert box.pool.find("a").generation == 1
    assert box.charged_mb("a") == 200
    assert box.acts("a") == ["model.loaded", "model.asleep", "model.woken"]
    await until(lambda: box.pool.footprints.sleep(box.pool.find("a").entry, box.pool.gpu, "1").wake_s)
    known = box.pool.footprints.sleep(box.pool.find("a").entry, box.pool.gpu, "1")
    assert (known.kept_bytes, known.why_banned, len(known.wake_s)) == (CONTEXT_BYTES, "", 1)
    box.pool_is_whole()


async def test_without_room_for_its_weights_on_the_host_it_sleeps_without_them_and_reads_them_again(
    world: World,
) -> None:
    box = await asleep(world, host_ram_mb=PYTHON_MB + 20)
    assert box.asked("a") == ["/v1/completions", "/sleep?level=2"]
    box.ask("a")
    await box.until("a", "ready")
    assert box.asked("a")[2:] == WOKEN_2
    assert '{"method":"reload_weights"}' in box.servers.asked(box.id("a"))[3]


async def test_a_host_without_room_for_any_sleeper_has_it_ended(world: World) -> None:
    box = await world(host_ram_mb=PYTHON_MB - 1)
    await box.loaded("a")
    await box.loaded("b")
    assert (box.state("a"), box.servers.stopped) == ("cold", [box.id("a")])
    assert box.asked("a") == []


async def test_what_sleeps_already_counts_against_the_hosts_memory(world: World) -> None:
    """Two sleepers of 44 MiB and three models; there is room for one and a half."""
    box = await world("a", "b", "c", host_ram_mb=60, total_mb=390)
    for model in ("a", "b", "c"):
        await box.loaded(model)
    assert box.asked("a") == SLEPT
    assert box.asked("b")[-1:] == ["/sleep?level=2"]
    assert [box.state(model) for model in ("a", "b", "c")] == ["asleep", "asleep", "ready"]


@pytest.mark.parametrize(
    ("row", "settings", "why"),
    [
        ({"sleep": False}, {}, "[model a] says sleep = false"),
        ({}, {"host_ram_mb": 0}, "host_ram_mb in [pool] is 0"),
        ({"category": "embedding"}, {}, "only a model that generates text can be tested after a wake"),
    ],
)
async def test_where_it_may_not_sleep_it_is_ended_and_the_reason_is_told(
    world: World, row: dict[str, Any], settings: dict[str, Any], why: str
) -> None:
    box = await world(rows=row, **settings)
    await box.loaded("a")
    told = f"It does not sleep: {why}" in explanation_of(box.pool, "a", Band.NORMAL)["lines"]
    assert told == ("sleep" not in row), "who wants no sleep need not be told"
    assert slot_view(box.pool, box.pool.find("a"), box.pool.facts(0.0), 0.0)["no_sleep"] == [why]
    await box.loaded("b")
    assert (box.state("a"), box.servers.stopped) == ("cold", [box.id("a")])


async def test_a_server_that_was_started_without_sleep_is_asked_for_none_and_banned_for_nothing(world: World) -> None:
    """hive.conf was changed since: its supervisor read another one."""
    box = await world()
    box.servers.settings = msgspec.structs.replace(
        box.settings, pool=msgspec.structs.replace(box.settings.pool, host_ram_mb=0)
    )
    await box.loaded("a")
    await box.loaded("b")
    assert (box.state("a"), box.asked("a")) == ("cold", [])
    assert "model.sleep_failed" not in box.acts("a")


async def test_a_sleeper_is_shown_with_the_time_of_its_wake(world: World) -> None:
    box = await asleep(world)
    view = next(slot for slot in view_of(box.pool, why_off="")["slots"] if slot["model"] == "a")
    assert (view["state"], view["grants"][0]["charged_bytes"]) == ("asleep", CONTEXT_BYTES)
    assert view["wake_s"] == pytest.approx(1.0, abs=0.1)
    assert view["why"].startswith("It sleeps at level 1; a wake takes about 1.0 s")
    assert explanation_of(box.pool, "a", Band.NORMAL)["would_leave"] == [{"model": "b", "in_s": 0.0, "level": "1"}]


async def test_an_order_to_unload_ends_a_sleeper(world: World) -> None:
    box = await asleep(world)
    await box.follow(await box.orders.unload("a", "uid:0", approval=UNLOAD))
    assert (box.state("a"), box.charged_mb("a"), box.servers.stopped) == ("cold", 0, [box.id("a")])
    box.pool_is_whole()


# --- as it should not be ---


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("frees_nothing", "MiB were still there"),
        ("hangs_in_sleep", "has not fallen asleep within 1 s"),
        ("dies_in_sleep", "does not answer POST /sleep?level=1"),
        ("refuses", "answers 400"),
    ],
)
async def test_a_level_that_fails_is_banned_and_the_server_ended(world: World, fault: str, why: str) -> None:
    box = await world()
    await box.loaded("a")
    box.servers.fault(box.id("a"), fault)
    await box.loaded("b")
    assert box.state("a") == "cold"
    assert box.acts("a") == ["model.loaded", "model.sleep_failed"]
    assert why in box.audit.acts[1][1]["reason"]
    entry = box.pool.find("a").entry
    assert why in box.pool.footprints.sleep(entry, box.pool.gpu, "1").why_banned
    assert box.pool.counts.metrics()["pool_sleep_failures"] == {("1",): 1}
    box.pool_is_whole()
    await box.loaded("a")  # the next time level 2 is tried, of which nothing bad is known
    assert [level.name for level in box.pool.facts(0.0).slot(box.id("a")).levels] == ["2"]
    told = explanation_of(box.pool, "a", Band.NORMAL)["lines"]
    assert any(
        line.startswith("It does not sleep: level 1 failed with version 0.32.0 of its server: ") for line in told
    )


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("wakes_empty", f"it woke with {CONTEXT_MB} of "),
        ("wakes_silent", "asked for a token of a it answers 500"),
        ("hangs_in_wake", "has not woken within 3"),
    ],
)
async def test_a_wake_that_is_not_whole_is_banned_and_the_model_is_loaded_cold(
    world: World, fault: str, why: str
) -> None:
    box = await asleep(world)
    box.servers.fault(box.id("a"), fault)
    box.ask("a")
    await until(lambda: box.pool.find("a").generation == 2 and box.state("a") == "ready")
    assert box.acts("a") == ["model.loaded", "model.asleep", "model.sleep_failed", "model.loaded"]
    reason = next(detail["reason"] for act, detail in box.audit.acts if act == "model.sleep_failed")
    assert why in reason
    assert box.pool.footprints.sleep(box.pool.find("a").entry, box.pool.gpu, "1").why_banned == reason
    assert [row.generation for row in box.proxy.told if row.id == box.id("a") and row.is_open] == [1, 2]
    box.pool_is_whole()


async def test_a_model_that_says_something_else_after_its_wake_is_not_trusted(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM woken from level 2 without its weights answers 200 with garbage (vllm #29341); here nobody reads them."""
    box = await asleep(world, host_ram_mb=PYTHON_MB + 20)

    async def bare(control: Any, level: str, *, within_s: float) -> None:
        await control._carry_on(control._sleeping().wake(control._server, "1"))

    monkeypatch.setattr("hive.backends.backend.BackendControl.wake", bare)
    box.ask("a")
    await until(lambda: box.pool.find("a").generation == 2 and box.state("a") == "ready")
    (reason,) = [detail["reason"] for act, detail in box.audit.acts if act == "model.sleep_failed"]
    assert reason == "after the wake it says '!' where it said ' eleven'"


async def test_a_ban_holds_over_daemons_and_ends_with_another_version_of_the_server(world: World) -> None:
    box = await world()
    await box.loaded("a")
    box.servers.fault(box.id("a"), "frees_nothing")
    await box.loaded("b")
    await box.kill()
    await box.again()
    await box.loaded("a")
    await until(lambda: box.pool.find("a").can_sleep)

    def levels() -> list[str]:
        return [level.name for level in box.pool.facts(0.0).slot(box.id("a")).levels]

    assert levels() == ["2"]
    slot = box.pool.find("a")
    slot.backend = msgspec.structs.replace(slot.backend, version="0.33.0")
    assert levels() == ["1", "2"]


async def test_a_server_that_dies_asleep_is_cold_and_its_memory_free(world: World) -> None:
    box = await asleep(world)
    box.servers.kill(box.id("a"))
    await box.until("a", "cold")
    assert box.audit.acts[-1][0] == "model.crashed"
    assert "while it slept" in box.audit.acts[-1][1]["reason"]
    known = box.pool.footprints.sleep(box.pool.find("a").entry, box.pool.gpu, "1")
    assert known.why_banned == "", "somebody killed it: that says nothing of its sleep"
    box.pool_is_whole()
    box.ask("a")
    await box.until("a", "ready")
    assert box.pool.find("a").generation == 2


async def test_a_driver_that_is_silent_while_one_falls_asleep_has_it_ended_and_bans_nothing(world: World) -> None:
    box = await world()
    await box.loaded("a")
    box.memory.is_known = False
    box.ask("b")
    await box.until("b", "ready")
    assert (box.state("a"), box.acts("a")) == ("cold", ["model.loaded", "model.unloaded"])
    assert box.pool.footprints.sleep(box.pool.find("a").entry, box.pool.gpu, "1") == SleepFootprint("1")


async def test_a_server_that_does_not_generate_is_not_put_to_sleep_and_its_level_not_banned(world: World) -> None:
    box = await world()
    await box.loaded("a")
    child = box.servers.children[box.id("a")]
    child.send_signal(19)  # SIGSTOP
    box.ask("b")
    await box.until("b", "ready")
    assert (box.state("a"), box.acts("a")) == ("cold", ["model.loaded", "model.unloaded"])
    assert box.pool.footprints.sleep(box.pool.find("a").entry, box.pool.gpu, "1").why_banned == ""


# --- the next daemon ---


@pytest.mark.parametrize(("host_mb", "level"), [(1024, "1"), (PYTHON_MB + 20, "2")])
async def test_the_next_daemon_finds_a_sleeper_asleep_and_wakes_it_as_its_level_needs(
    world: World, host_mb: int, level: str
) -> None:
    box = await asleep(world, host_ram_mb=host_mb)
    await box.kill()
    await box.again()
    await box.until("a", "asleep")
    await box.until("b", "ready")
    assert not any(row.is_open for row in box.proxy.told if row.id == box.id("a"))
    assert box.charged_mb("a") == CONTEXT_MB
    box.pool_is_whole()
    box.use("b", 0)
    box.ask("a")
    await box.until("a", "ready")
    assert box.asked("a")[2:] == (WOKEN_1 if level == "1" else WOKEN_2)
    assert (box.pool.find("a").generation, box.charged_mb("a"), len(box.servers.started)) == (1, 200, 2)


async def test_a_sleeper_of_an_earlier_daemon_that_wakes_empty_is_loaded_cold(world: World) -> None:
    box = await asleep(world)
    await box.kill()
    await box.again()
    await box.until("a", "asleep")
    await box.until("b", "ready")
    box.use("b", 0)
    box.servers.fault(box.id("a"), "wakes_empty")
    box.ask("a")
    await until(lambda: box.pool.find("a").generation == 2 and box.state("a") == "ready")
    assert f"it woke with {CONTEXT_MB} of" in next(
        detail["reason"] for act, detail in box.audit.acts if act == "model.sleep_failed"
    )


@pytest.mark.parametrize("fault", ["hangs_in_sleep", "hangs_in_wake"])
async def test_a_daemon_killed_in_the_middle_of_a_step_leaves_books_that_are_what_is_held(
    world: World, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("fall_asleep_s", "wake_min_s"):
        monkeypatch.setattr(SlotSleep, name, 60.0)
    box = await world()
    await box.loaded("a")
    if fault == "hangs_in_wake":
        await box.loaded("b")
    box.servers.fault(box.id("a"), fault)
    step = "/sleep" if fault == "hangs_in_sleep" else "/wake_up"
    box.ask("b" if fault == "hangs_in_sleep" else "a")
    await until(lambda: any(line.startswith(step) for line in box.asked("a")))
    await box.kill()
    await box.again()
    await until(lambda: box.state("a") in ("cold", "asleep"))
    box.pool_is_whole()
    box.servers.fault(box.id("a"), "")
    if fault == "hangs_in_sleep":  # it says that it sleeps, and holds all of it: it was ended
        assert (box.state("a"), box.charged_mb("a")) == ("cold", 0)
    box.ask("b")
    await box.until("b", "ready")
    box.pool_is_whole()
    assert not box.pool.footprints.sleep(box.pool.find("a").entry, box.pool.gpu, "1").why_banned


@pytest.mark.parametrize("step", ["sleep", "wake"])
async def test_a_server_killed_in_the_middle_of_a_step_leaves_nothing_charged(world: World, step: str) -> None:
    box = await world()
    await box.loaded("a")
    if step == "wake":
        await box.loaded("b")
    box.servers.fault(box.id("a"), f"hangs_in_{step}")
    box.ask("b" if step == "sleep" else "a")
    await until(lambda: any(line.startswith(f"/{step}") for line in box.asked("a")))
    box.servers.kill(box.id("a"))
    if step == "sleep":
        await box.until("b", "ready")
        assert (box.state("a"), box.charged_mb("a")) == ("cold", 0)
    else:
        await until(lambda: box.pool.find("a").generation == 2 and box.state("a") == "ready")
    box.pool_is_whole()


async def test_a_helper_that_is_away_while_one_falls_asleep_loses_nothing(world: World) -> None:
    box = await world(free_s=20.0)
    await box.loaded("a")
    box.servers.is_there = False
    box.pool.wake()
    box.ask("b")
    await asyncio.sleep(0.3)
    box.servers.is_there = True
    box.pool.helper_here()
    await box.until("b", "ready")
    assert box.state("a") in ("asleep", "cold")
    box.pool_is_whole()
