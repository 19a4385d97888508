"""From light sleep to deep and back: at any moment a wake wins, and after any crash the record tells the truth."""

from __future__ import annotations

import time

import msgspec
import pytest

from hive.agents.transition_lock import outcome_of
from hive.domain import AgentStatus, SleepDepth, WakeCause
from hive.errors import HiveError, LinkLost, NotSupported, Saturated, StoreFull, WrongState
from hive.link.messages import Open
from tests.fakes.agent_world import MemoryWorld, VirtualLoop
from tests.fakes.lives import PAUSED, RUNNING, agree, asleep, deep_asleep, started, wake

LIGHT, DEEP = SleepDepth.LIGHT, SleepDepth.DEEP


def depths(world: MemoryWorld) -> tuple[SleepDepth, SleepDepth]:
    """As recorded, which is as in memory."""
    assert world.record == world.life.agent
    return world.record.depth, world.record.depth_goal


def paging(loop: VirtualLoop, *, takes_s: float = 100.0) -> MemoryWorld:
    """One whose memory is being paged out, which will take long."""
    world = asleep(loop)
    world.helper.page_out_s = takes_s
    loop.create_task(outcome_of(world.life.go_deep()))
    loop.spend(takes_s / 10)
    assert depths(world) == (LIGHT, DEEP)
    return world


# The way down -----------------------------------------------------------------------------------------------------


def test_a_sleeper_goes_deep_in_the_same_sleep(loop: VirtualLoop) -> None:
    world = asleep(loop)
    before = world.life.agent
    world.run(world.life.go_deep())
    assert depths(world) == (DEEP, DEEP)
    assert msgspec.structs.replace(world.life.agent, depth=LIGHT, depth_goal=LIGHT) == before
    assert world.helper.calls == ["freeze", "confirm", "page_out"]
    agree(world, PAUSED, "frozen", "asleep")


def test_the_goal_is_recorded_before_anything_is_paged_out(loop: VirtualLoop) -> None:
    world = asleep(loop)
    world.wire.delays = [1.0]
    loop.create_task(world.life.go_deep())
    loop.spend(1.5)
    assert (world.record.depth, world.record.depth_goal) == (LIGHT, DEEP)
    assert "page_out" not in world.helper.calls
    loop.spend(10)
    assert depths(world) == (DEEP, DEEP)
    assert world.wrong == []


def test_a_deep_pause_returns_once_memory_is_paged_out(loop: VirtualLoop, world: MemoryWorld) -> None:
    world.helper.page_out_s = 2.0
    began = loop.time()
    world.run(world.life.pause(timeout_s=1, now=False, actor="uid:0", deep=True))
    assert loop.time() - began >= 2.0
    assert depths(world) == (DEEP, DEEP)


def test_a_deep_pause_of_one_that_sleeps_light_pages_it_out_and_of_a_deep_one_changes_nothing(
    loop: VirtualLoop,
) -> None:
    world = asleep(loop)
    for _ in range(2):
        world.run(world.life.pause(timeout_s=1, now=False, actor="uid:0", deep=True))
    assert depths(world) == (DEEP, DEEP)
    assert world.helper.calls.count("page_out") == 1


def test_an_agent_that_is_not_to_sleep_deep_does_not(loop: VirtualLoop) -> None:
    world = asleep(loop, deepest=LIGHT)
    with pytest.raises(NotSupported, match="bob is not to sleep deep"):
        world.run(world.life.pause(timeout_s=1, now=False, actor="uid:0", deep=True))
    assert depths(world) == (LIGHT, LIGHT)
    assert "page_out" not in world.helper.calls


def test_a_deep_pause_that_fails_says_that_the_agent_sleeps_all_the_same(loop: VirtualLoop) -> None:
    """`hive agent pause --deep` said `this host has no swap`, and not that the agent was asleep now."""
    world = started(loop)
    world.helper.page_out_error = NotSupported("deep sleep: this host has no swap", hint="turn on swap")
    with pytest.raises(NotSupported) as refused:
        world.run(world.life.pause(timeout_s=1, now=False, actor="uid:0", deep=True))
    assert refused.value.message == "bob sleeps light; deep sleep: this host has no swap"
    assert refused.value.hint == "turn on swap"


def test_a_host_that_gets_swap_is_not_waited_for_an_hour(loop: VirtualLoop) -> None:
    """Without swap a deep pause was hopeless, so that nobody was paged out for an hour after `swapon`."""
    world = started(loop)
    world.memory_is = msgspec.structs.replace(world.memory_is, swap_free_bytes=0)
    world.helper.page_out_error = NotSupported("deep sleep: this host has no swap")
    world.run(outcome_of(world.life.pause(timeout_s=1, now=False, actor="uid:0", deep=True)))
    assert round(world.life.retry_deep_at - loop.time()) == 30


def test_one_that_is_awake_does_not_go_deep(world: MemoryWorld) -> None:
    with pytest.raises(WrongState, match="bob is running"):
        world.run(world.life.go_deep())
    assert world.helper.calls == []


@pytest.mark.parametrize(
    ("error", "left_s"),
    [(Saturated("swap is full"), 30), (NotSupported("memory.reclaim is not there"), 3600)],
)
def test_what_cannot_be_paged_out_sleeps_light_says_why_and_is_left_alone(
    loop: VirtualLoop, error: HiveError, left_s: float
) -> None:
    world = started(loop)
    world.helper.page_out_error = error
    with pytest.raises(type(error), match=error.message):
        world.run(world.life.pause(timeout_s=1, now=False, actor="uid:0", deep=True))
    assert depths(world) == (LIGHT, LIGHT)
    agree(world, PAUSED, "frozen", "asleep")
    assert world.life.deep_note == error.message
    assert round(world.life.retry_deep_at - loop.time()) == left_s
    world.helper.page_out_error = None
    world.run(world.life.pause(timeout_s=1, now=False, actor="uid:0", deep=True))
    assert depths(world) == (DEEP, DEEP)
    assert (world.life.deep_note, world.life.retry_deep_at) == ("", 0.0)


def test_it_is_left_alone_for_longer_each_time_over_all_its_sleeps(loop: VirtualLoop) -> None:
    world = asleep(loop)
    world.helper.page_out_error = Saturated("swap is full")
    left = []
    for _ in range(6):
        assert isinstance(world.run(outcome_of(world.life.go_deep())), Saturated)
        left.append(round(world.life.retry_deep_at - loop.time()))
        world.run(world.life.resume("uid:0"))
        assert world.life.deep_note == ""
        world.run(world.life.pause(timeout_s=1, now=False, actor="uid:0"))
    assert left == [30, 60, 120, 240, 480, 600]


def test_another_helper_is_asked_at_once_what_the_last_one_could_not(loop: VirtualLoop) -> None:
    world = asleep(loop)
    world.helper.page_out_error = NotSupported("not permitted here")
    world.run(outcome_of(world.life.go_deep()))
    world.helper.wire.lose()
    world.helper.wire.connected = True
    world.run(world.roster.reconcile())
    assert (world.life.retry_deep_at, world.life.deep_note) == (0.0, "")


def test_a_goal_that_cannot_be_recorded_pages_nothing_out(loop: VirtualLoop) -> None:
    world = asleep(loop)
    world.disk_full = True
    with pytest.raises(StoreFull):
        world.run(world.life.go_deep())
    assert "page_out" not in world.helper.calls
    assert (world.life.agent.depth_goal, world.life.deep_note) == (LIGHT, "The disk is full.")
    world.disk_full = False
    loop.spend(2)
    assert depths(world) == (LIGHT, LIGHT)


# A wake wins ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at_s", [0.0, 0.05, 0.15, 0.25, 0.35, 5.0, 50.0, 99.0, 100.25, 100.35, 100.45, 100.55])
def test_a_wake_at_any_moment_of_a_page_out_wins_at_once(loop: VirtualLoop, at_s: float) -> None:
    """Each ask takes 0.2 s, the page-out 100 s; a thaw takes 0.2 s, and no more than that is waited for."""
    world = asleep(loop)
    for wire in (world.helper.wire, world.wire):
        wire.delays = [0.1]
    world.helper.page_out_s = 100.0
    deepening = loop.create_task(outcome_of(world.life.go_deep()))
    loop.spend(at_s)
    asked, answered = loop.time(), list[float]()
    loop.do(world.life.wake, WakeCause.INGRESS, lambda answer: answered.append(loop.time()))
    loop.spend(1)
    assert answered[0] - asked <= 0.21
    assert deepening.done()
    loop.spend(200)
    agree(world, RUNNING, "running", "open")
    assert depths(world) == (SleepDepth.AWAKE, SleepDepth.AWAKE)
    assert world.helper.swap_bytes == 0


def test_the_thaw_is_sent_while_the_page_out_still_runs(loop: VirtualLoop) -> None:
    world = paging(loop)
    began = loop.time()
    assert isinstance(wake(world), list)
    loop.spend(0.1)
    agree(world, RUNNING, "running", "open")
    assert loop.time() - began < 1
    assert world.life.deep_note == ""


def test_a_wake_asked_for_before_the_page_out_had_its_turn_does_not_wait_behind_it(loop: VirtualLoop) -> None:
    world = asleep(loop)
    world.helper.page_out_s = 100.0
    world.wire.delays = [0.5]
    loop.create_task(world.life.keep_awake(None, "uid:0"))  # has the turn, and takes a second
    loop.spend(0.1)
    deepening = loop.create_task(outcome_of(world.life.go_deep()))
    loop.spend(0.1)
    answers = wake(world)
    loop.spend(2)
    assert isinstance(answers[0], Open)
    assert isinstance(deepening.result(), WrongState)
    assert "page_out" not in world.helper.calls


def test_a_deep_sleeper_wakes_and_the_wake_is_counted_as_one_from_deep(loop: VirtualLoop) -> None:
    world = deep_asleep(loop)
    answers = [wake(world) for _ in range(20)]
    loop.spend(1)
    assert all(isinstance(got, Open) for (got,) in answers)
    assert (world.helper.calls, world.woken_from) == (["thaw"], [DEEP])
    agree(world, RUNNING, "running", "open")


def test_a_stop_does_not_wait_for_a_page_out(loop: VirtualLoop) -> None:
    world = paging(loop)
    began = loop.time()
    world.run(world.life.stop("uid:0"))
    assert loop.time() - began < 1
    agree(world, AgentStatus.STOPPED, "gone", "refused")


def test_a_daemon_that_leaves_does_not_wait_for_a_page_out(loop: VirtualLoop) -> None:
    world = paging(loop)
    began = loop.time()
    world.run(world.life.settle())
    assert loop.time() - began < 1
    assert depths(world) == (LIGHT, DEEP)


def test_one_that_dies_while_it_is_paged_out_has_ended(loop: VirtualLoop) -> None:
    world = paging(loop)
    loop.do(world.helper.end, 137)
    loop.spend(2)
    agree(world, AgentStatus.ERROR, "gone", "refused")


# Failures and crashes ---------------------------------------------------------------------------------------------


def test_a_lost_proxy_ends_the_try_and_it_sleeps_on(loop: VirtualLoop) -> None:
    world = paging(loop, takes_s=4.0)
    loop.do(world.gates.lose)
    loop.spend(5)
    assert depths(world) == (LIGHT, DEEP)
    loop.do(world.gates.connect)
    world.run(world.life.go_deep())
    assert depths(world) == (DEEP, DEEP)
    agree(world, PAUSED, "frozen", "asleep")


@pytest.mark.parametrize(("away_s", "depth"), [(0.1, LIGHT), (10.0, DEEP)])
def test_a_lost_helper_is_asked_for_the_truth_when_it_is_back(
    loop: VirtualLoop, away_s: float, depth: SleepDepth
) -> None:
    """The helper lives on and pages on; how far it came says what is in swap."""
    world = asleep(loop)
    world.helper.page_out_s = 4.0
    deepening = loop.create_task(outcome_of(world.life.go_deep()))
    loop.spend(0.1)
    world.helper.wire.lose()
    loop.spend(away_s)
    assert isinstance(deepening.result(), LinkLost)
    assert depths(world) == (LIGHT, DEEP)
    world.helper.wire.connected = True
    world.run(world.roster.reconcile())
    assert depths(world) == (depth, DEEP)
    assert world.life.deep_note == ""


STEPS = [0.0, 0.05, 0.15, 0.25, 0.35, 0.45, 0.75, 1.15, 1.25, 1.35, 1.45, 1.55, 1.65, 2.0]
"""Moments in a go_deep whose asks take 0.2 s each and whose page-out takes 1 s: before, in and after each await."""


@pytest.mark.parametrize("helper_too", [False, True])
@pytest.mark.parametrize("at_s", STEPS)
def test_a_daemon_killed_at_any_moment_leaves_a_sleeper_whose_record_becomes_true(
    loop: VirtualLoop, at_s: float, helper_too: bool
) -> None:
    """`helper_too`: the helper is killed as well and another one finds what is frozen (nobody pages on)."""
    world = asleep(loop)
    for wire in (world.helper.wire, world.wire):
        wire.delays = [0.1]
    world.helper.page_out_s = 1.0
    loop.create_task(outcome_of(world.life.go_deep()))
    loop.spend(at_s)
    world.crash()
    if helper_too:
        world.helper.thaws += 1  # no slice comes after this
    loop.spend(5)
    world.helper.wire.connected = True
    loop.do(world.gates.connect)
    world.run(world.roster.reconcile())
    agree(world, PAUSED, "frozen", "asleep")
    assert world.life.agent.depth is (DEEP if world.helper.swap_bytes > 0.66 * world.helper.HOLDS else LIGHT)
    assert depths(world)[0] is world.life.agent.depth
    answers = wake(world)
    loop.spend(1)
    assert isinstance(answers[0], Open)
    agree(world, RUNNING, "running", "open")


@pytest.mark.parametrize("at_s", [0.0, 0.05, 0.15, 0.25, 0.35, 0.45, 0.55])
def test_a_daemon_killed_at_any_moment_of_a_wake_from_deep_leaves_nobody_frozen_without_a_way_back(
    loop: VirtualLoop, at_s: float
) -> None:
    world = deep_asleep(loop)
    for wire in (world.helper.wire, world.wire):
        wire.delays = [0.1]
    loop.do(world.gates.request)
    loop.spend(at_s)
    world.crash()
    world.helper.wire.connected = True
    world.run(world.roster.reconcile())
    loop.do(world.gates.connect)
    loop.spend(2)
    agree(world, RUNNING, "running", "open")
    assert depths(world) == (SleepDepth.AWAKE, SleepDepth.AWAKE)


def test_one_recorded_deep_whose_memory_came_back_is_light(loop: VirtualLoop) -> None:
    """Somebody switched swap off."""
    world = deep_asleep(loop)
    world.helper.swap_bytes = 0
    world.helper.wire.lose()
    world.helper.wire.connected = True
    world.run(world.roster.reconcile())
    assert (world.record.depth, world.life.agent.depth) == (LIGHT, LIGHT)


def test_one_that_the_kernel_swapped_out_by_itself_is_deep(loop: VirtualLoop) -> None:
    world = asleep(loop)
    world.helper.swap_bytes = world.helper.HOLDS
    world.crash()
    world.helper.wire.connected = True
    world.run(world.roster.reconcile())
    assert depths(world) == (DEEP, DEEP)


# Kept awake -------------------------------------------------------------------------------------------------------


def in_s(seconds: float) -> float:
    return time.time() + seconds


def test_one_that_is_kept_awake_does_not_sleep_because_it_is_idle_until_that_is_over(
    loop: VirtualLoop, world: MemoryWorld
) -> None:
    world.run(world.life.keep_awake(in_s(100), "uid:0"))
    assert world.run(world.life.fall_asleep("idle")).why_not == "it is kept awake"
    loop.spend(101)
    assert world.life.kept_awake_until is None
    assert world.run(world.life.fall_asleep("idle")).why_not is None


def test_keeping_awake_survives_the_daemon_and_can_be_ended(loop: VirtualLoop, world: MemoryWorld) -> None:
    until = in_s(100)
    world.run(world.life.keep_awake(until, "uid:0"))
    world.crash()
    assert (world.record.keep_awake_until, world.life.kept_awake_until) == (until, until)
    assert 99 < world.life.kept_awake_for_s <= 100
    world.run(world.life.keep_awake(None, "uid:0"))
    assert (world.record.keep_awake_until, world.life.kept_awake_until) == (None, None)


def test_an_operators_pause_is_carried_out_although_it_is_kept_awake(loop: VirtualLoop, world: MemoryWorld) -> None:
    world.run(world.life.keep_awake(in_s(100), "uid:0"))
    world.run(world.life.pause(timeout_s=1, now=True, actor="uid:0"))
    agree(world, PAUSED, "frozen", "asleep")


def test_keeping_awake_that_cannot_be_recorded_is_no_promise(world: MemoryWorld) -> None:
    world.disk_full = True
    with pytest.raises(StoreFull):
        world.run(world.life.keep_awake(in_s(100), "uid:0"))
    assert world.life.kept_awake_until is None
