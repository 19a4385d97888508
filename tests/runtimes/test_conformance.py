"""Promises of every runtime (hive/runtimes/runtime.py), shown on each of them: real processes, a real Docker engine.

The virtual machines' bench is `bench_firecracker.py`; unit_conformance_inside.py shows them on units of systemd.
"""

# ruff: noqa: ASYNC240 - as in harness.py
from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import select
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from hive.domain import Limits
from hive.errors import NotSupported, TimedOut, WrongState
from hive.host.process import Identity, ProcessTable, boot_id, has_environment
from hive.runtimes.runtime import RunningAgent
from hive.settings.table import Paths
from tests.runtimes import bench_firecracker
from tests.runtimes.benches import (
    MARKS,
    Bench,
    Floor,
    OpenBench,
    open_cgroup,
    open_docker,
    open_signals,
    open_template_cgroup,
    open_template_signals,
)
from tests.sandbox.harness import A, B
from tests.waiting import until

OPENERS: list[object] = [
    pytest.param(open_cgroup, id="process+cgroup", marks=pytest.mark.cgroup),
    pytest.param(open_signals, id="process+signals"),
    pytest.param(open_template_cgroup, id="template+cgroup", marks=pytest.mark.cgroup),
    pytest.param(open_template_signals, id="template+signals"),
    pytest.param(open_docker, id="docker", marks=pytest.mark.docker),
    pytest.param(bench_firecracker.open_bench, id="firecracker"),
    pytest.param(bench_firecracker.open_direct, id="firecracker+direct", marks=pytest.mark.wide),
]

MARK = MARKS[A]


@pytest.fixture(params=OPENERS)
async def bench(request: pytest.FixtureRequest, paths: Paths) -> AsyncIterator[Bench]:
    opener: OpenBench = request.param
    async with opener(paths) as opened:
        yield opened


@pytest.fixture
async def floor(bench: Bench) -> AsyncIterator[Floor]:
    floor = Floor(bench)
    yield floor
    await floor.close()


async def freeze(running: RunningAgent) -> None:
    await running.freeze(deadline_s=5, give_up=lambda: False)


async def thaw(running: RunningAgent) -> None:
    await running.thaw(deadline_s=5)


def state(running: RunningAgent) -> str:
    return running.stat(ProcessTable()).state


def has_ended(running: RunningAgent) -> bool:
    return bool(select.select([running.ended_fd], [], [], 0)[0])


async def cpu_us_over(running: RunningAgent, wait_s: float) -> int:
    """CPU time used in the next `wait_s` seconds."""
    before = running.stat(ProcessTable()).cpu_us
    await asyncio.sleep(wait_s)
    return running.stat(ProcessTable()).cpu_us - before


async def give_up_at_once(running: RunningAgent) -> None:
    with pytest.raises(WrongState):
        await running.freeze(deadline_s=5, give_up=lambda: True)


def skip_if(bench: Bench, what: str) -> None:
    if why := bench.cannot(what):
        pytest.skip(f"{bench.name}: {why}")


# --- started -----------------------------------------------------------------------------------------------------


async def test_a_prepared_home_is_new_once(bench: Bench) -> None:
    spec = bench.spec(A, "idle")
    assert await bench.runtime.prepare(A, spec)
    assert not await bench.runtime.prepare(A, spec)
    await bench.runtime.discard(A, spec)


async def test_a_started_agent_runs_and_says_what_it_costs(floor: Floor) -> None:
    running = await floor.start("idle")
    truth = running.stat(ProcessTable())
    assert (truth.state, truth.pid) == ("running", running.run.main.pid)
    assert truth.processes >= 1
    assert truth.rss_bytes > 0
    assert truth.freezer
    assert not running.is_frozen()
    assert not running.is_half_frozen()
    main = running.run.main.stat()
    assert main is not None
    assert main.alive


async def test_its_main_process_carries_the_mark(floor: Floor) -> None:
    skip_if(floor.bench, "mark")
    running = await floor.start("idle")
    assert has_environment(running.run.main.pid, MARK)


async def test_what_it_prints_is_in_its_log(floor: Floor) -> None:
    skip_if(floor.bench, "log")
    running = await floor.start("exit7")
    await until(lambda: has_ended(running))
    await running.reap()
    assert await floor.bench.printed(floor.bench.spec(A, "exit7")) == "bye\n"


async def test_work_is_seen_as_cpu_time(floor: Floor) -> None:
    running = await floor.start("burn")
    before = running.stat(ProcessTable()).cpu_us
    await until(lambda: running.stat(ProcessTable()).cpu_us > before)


async def test_its_socket_lies_where_the_kernel_can_hold_its_name(floor: Floor) -> None:
    spec = await floor.prepare("idle")
    place = floor.runtime.place(A, spec)
    assert place.jail is not None or len(os.fsencode(place.path)) <= 107
    assert place.path.is_socket()


async def test_two_agents_have_sockets_and_ends_of_their_own(floor: Floor) -> None:
    one, other = await floor.start("idle", A), await floor.start("idle", B)
    places = {floor.runtime.place(agent, floor.bench.spec(agent, "idle")).path for agent in (A, B)}
    assert len(places) == 2
    await freeze(one)
    assert state(other) == "running"
    assert await one.kill()
    assert state(other) == "running"


async def test_it_says_which_limits_it_does_not_enforce(floor: Floor) -> None:
    """With all of them enforced nothing is said; with any missing, those asked for are named."""
    limits = Limits(memory_mb=64, cpu=0.5, pids=64, files=256)
    capabilities = await floor.runtime.capabilities()
    assert capabilities.why_not == ""
    running = await floor.start("idle", limits=limits)
    said = running.stat(ProcessTable()).limits
    assert bool(said) == bool(capabilities.limits)


# --- asleep ------------------------------------------------------------------------------------------------------


async def test_a_frozen_agent_uses_no_cpu_until_it_is_thawed(floor: Floor) -> None:
    running = await floor.start("burn")
    await freeze(running)
    assert running.is_frozen()
    assert not running.is_half_frozen()
    assert state(running) == "frozen"
    assert await cpu_us_over(running, 0.2) == 0
    await thaw(running)
    assert not running.is_frozen()
    assert state(running) == "running"
    before = running.stat(ProcessTable()).cpu_us
    await until(lambda: running.stat(ProcessTable()).cpu_us > before)


async def test_freezing_what_is_frozen_and_thawing_what_runs_changes_nothing(floor: Floor) -> None:
    running = await floor.start("idle")
    assert running.thaw_now()
    await thaw(running)
    for _ in range(2):
        await freeze(running)
        assert running.is_frozen()
    for _ in range(2):
        await thaw(running)
        assert not running.is_frozen()
    assert running.thaw_now()


async def test_it_can_be_frozen_and_thawed_again_and_again(floor: Floor) -> None:
    running = await floor.start("burn")
    for _ in range(5):
        await freeze(running)
        assert state(running) == "frozen"
        await thaw(running)
        assert state(running) == "running"


async def test_a_freeze_gives_up_when_it_is_told_to_and_the_agent_runs(floor: Floor) -> None:
    running = await floor.start("burn")
    await give_up_at_once(running)
    await thaw(running)
    assert state(running) == "running"
    before = running.stat(ProcessTable()).cpu_us
    await until(lambda: running.stat(ProcessTable()).cpu_us > before)


async def test_a_freeze_that_is_cancelled_leaves_the_agent_awake(floor: Floor) -> None:
    running = await floor.start("burn")
    freezing = asyncio.ensure_future(freeze(running))
    await asyncio.sleep(0)
    freezing.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await freezing
    await thaw(running)
    assert state(running) == "running"


async def test_a_thaw_begun_is_done_soon(floor: Floor) -> None:
    running = await floor.start("idle")
    await freeze(running)
    running.thaw_now()
    await until(running.thaw_now)
    assert state(running) == "running"


async def test_the_memory_of_a_frozen_agent_is_paged_out(floor: Floor) -> None:
    skip_if(floor.bench, "page_out")
    running = await floor.start("idle")
    await freeze(running)
    try:
        paged = await running.page_out(give_up=lambda: False)
    except NotSupported as error:
        pytest.skip(error.message)
    assert paged.how in ("madvise", "reclaim")
    assert running.is_frozen()
    await thaw(running)
    assert state(running) == "running"


async def test_a_page_out_gives_up_when_it_is_told_to(floor: Floor) -> None:
    skip_if(floor.bench, "page_out")
    running = await floor.start("idle")
    await freeze(running)
    with pytest.raises((WrongState, NotSupported)):
        await running.page_out(give_up=lambda: True)
    assert running.is_frozen()


# --- the end -----------------------------------------------------------------------------------------------------


async def test_its_end_can_be_waited_for(floor: Floor) -> None:
    running = await floor.start("idle")
    assert not has_ended(running)
    assert await running.kill()
    await until(lambda: has_ended(running))


async def test_the_exit_code_is_the_programs(floor: Floor) -> None:
    skip_if(floor.bench, "exit_code")
    running = await floor.start("exit7")
    await until(lambda: has_ended(running))
    assert await running.kill()
    assert await running.reap() == 7


@pytest.mark.parametrize("asleep", [False, True])
async def test_stop_lets_it_end_by_itself(floor: Floor, asleep: bool) -> None:
    """A frozen process hears nothing: it is thawed first."""
    running = await floor.start("idle")
    if asleep:
        await freeze(running)
    began = time.monotonic()
    assert await running.stop(grace_s=60)
    assert time.monotonic() - began < 60
    await until(lambda: has_ended(running))
    if not floor.bench.cannot("exit_code"):
        # Signals go to one process after the other: a shell whose child's end comes to it before its own says 0.
        assert await running.reap() in (128 + 15, 0)


async def test_what_is_deaf_to_sigterm_is_killed_after_the_grace(floor: Floor) -> None:
    running = await floor.start("stubborn")
    assert await running.stop(grace_s=0.05)
    await until(lambda: has_ended(running))
    if not floor.bench.cannot("exit_code"):
        assert await running.reap() == 128 + 9


async def test_a_frozen_agent_can_be_killed(floor: Floor) -> None:
    running = await floor.start("burn")
    await freeze(running)
    assert await running.kill()
    await until(lambda: has_ended(running))


async def test_what_ended_counts_as_thawed_and_is_stopped_already(floor: Floor) -> None:
    running = await floor.start("idle")
    await freeze(running)
    assert await running.kill()
    assert running.thaw_now()
    await thaw(running)
    assert await running.stop(grace_s=0)
    with pytest.raises((WrongState, TimedOut)):
        await running.freeze(deadline_s=0.2, give_up=lambda: has_ended(running))


async def test_it_can_be_started_again_with_its_counters_at_zero(floor: Floor) -> None:
    first = await floor.start("burn")
    await until(lambda: first.stat(ProcessTable()).cpu_us > 300_000)
    assert await first.kill()
    await first.reap()
    first.close()
    second = await floor.start("idle")
    assert second.run.main != first.run.main
    assert second.stat(ProcessTable()).cpu_us < 300_000


async def test_nothing_is_left_after_it_is_discarded(floor: Floor) -> None:
    running = await floor.start("idle")
    spec = floor.bench.spec(A, "idle")
    assert await running.kill()
    await running.reap()
    running.close()
    await floor.runtime.discard(A, spec)
    assert not Path(spec.home).exists()
    assert not Path(spec.log).exists()
    await floor.runtime.discard(A, spec)


# --- across helpers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asleep", [False, True])
async def test_the_next_helper_takes_it_over_as_it_is(floor: Floor, asleep: bool) -> None:
    first = await floor.start("burn")
    spec = floor.bench.spec(A, "burn")
    if asleep:
        await freeze(first)
    first.close()
    second = floor.hold(await floor.runtime.adopt(A, spec, first.run, mark=MARK))
    assert second.run.main == first.run.main
    assert second.is_frozen() == asleep
    assert state(second) == ("frozen" if asleep else "running")
    await thaw(second)
    await freeze(second)
    await thaw(second)
    assert await second.kill()
    await until(lambda: has_ended(second))


async def test_an_agent_nobody_wrote_down_is_found_by_its_mark(floor: Floor) -> None:
    skip_if(floor.bench, "find")
    first = await floor.start("idle")
    spec = floor.bench.spec(A, "idle")
    first.close()
    if not floor.bench.cannot("other mark"):
        assert await floor.runtime.find(A, spec, ProcessTable(), mark=f"HIVE_MARK={secrets.token_hex(16)}") is None
    found = floor.hold(await floor.runtime.find(A, spec, ProcessTable(), mark=MARK))
    assert found.run.main == first.run.main
    assert found.run.handle == first.run.handle
    await freeze(found)
    await thaw(found)


async def test_one_that_ended_without_a_helper_is_swept_away_and_can_be_started_again(floor: Floor) -> None:
    first = await floor.start("idle")
    spec = floor.bench.spec(A, "idle")
    assert await first.kill()
    main = first.run.main.stat()
    if main is not None and main.parent == 1:
        await until(lambda: first.run.main.stat() is None)  # who has no helper is reaped by process 1
    first.close()
    assert await floor.runtime.adopt(A, spec, first.run, mark=MARK) is None
    await floor.runtime.sweep(A, spec, first.run, mark=MARK)
    second = await floor.start("idle")
    assert state(second) == "running"


async def test_one_that_never_was_is_not_taken_over(floor: Floor) -> None:
    running = await floor.start("idle")
    gone = Identity(running.run.main.pid, running.run.main.start_ticks + 1, boot_id())
    stranger = msgspec.structs.replace(running.run, main=gone)
    assert await floor.runtime.adopt(A, floor.bench.spec(A, "idle"), stranger, mark=MARK) is None
    other_boot = msgspec.structs.replace(running.run, main=msgspec.structs.replace(running.run.main, boot="other"))
    assert await floor.runtime.adopt(A, floor.bench.spec(A, "idle"), other_boot, mark=MARK) is None


async def test_what_sleeps_without_an_agent_is_woken(floor: Floor) -> None:
    """As after the loss of the helper's table; those the table knows sleep on."""
    skip_if(floor.bench, "strays")
    stray, known = await floor.start("burn", A), await floor.start("burn", B)
    await freeze(stray)
    await freeze(known)
    await floor.runtime.thaw_strays({B})
    before = stray.stat(ProcessTable()).cpu_us
    await until(lambda: stray.stat(ProcessTable()).cpu_us > before)
    assert state(known) == "frozen"
