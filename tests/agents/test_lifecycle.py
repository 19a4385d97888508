"""A life in a world that is slow, loses links, refuses and crashes. No clock: the loop's time is virtual."""

from __future__ import annotations

import asyncio

import pytest

from hive.agents.lifecycle import AgentLifecycle
from hive.agents.transition_lock import outcome_of
from hive.domain import Agent, AgentStatus, RestartPolicy, WakeCause
from hive.errors import AgentBusy, HiveError, LinkLost, NotFound, StoreFull, TimedOut, WrongState
from hive.link.messages import Activity, Open, Refused
from tests.fakes.agent_world import MemoryWorld, VirtualLoop
from tests.fakes.lives import PAUSED, RUNNING, agree, asleep, started, wake

# To sleep and back ------------------------------------------------------------------------------------------------


def test_a_pause_writes_its_intent_freezes_commits_and_confirms(world: MemoryWorld) -> None:
    generation = world.life.agent.generation
    world.run(world.life.pause(timeout_s=1, now=False, actor="uid:0"))
    agree(world, PAUSED, "frozen", "asleep")
    assert world.helper.calls == ["freeze", "confirm"]
    assert world.helper.confirmed
    assert world.life.agent.generation == generation + 1
    assert world.life.agent.depth == "light"


def test_a_wake_opens_the_gate_before_anything_is_recorded(loop: VirtualLoop) -> None:
    world = asleep(loop)
    world.wire.delays = [5.0]
    answers = wake(world)
    loop.spend(0.5)
    assert isinstance(answers[0], Open)
    assert answers[0].generation == world.life.agent.generation
    assert (world.gates.gate, world.helper.state) == ("open", "running")
    assert world.record.status is PAUSED
    loop.spend(20)
    agree(world, RUNNING, "running", "open")
    assert world.life.last_wake is not None
    assert world.life.last_wake[1] is WakeCause.INGRESS


def test_many_wakes_at_once_thaw_once_and_all_are_answered(loop: VirtualLoop) -> None:
    world = asleep(loop)
    answers = [wake(world) for _ in range(20)]
    loop.spend(1)
    assert all(isinstance(got, Open) for (got,) in answers)
    assert world.helper.calls.count("thaw") == 1
    assert (world.life.wakes, len(world.wake_ms)) == (1, 1)


def test_a_busy_proxy_keeps_the_agent_awake_and_nothing_freezes(world: MemoryWorld) -> None:
    world.gates.busy = "2 requests are in flight"
    with pytest.raises(AgentBusy, match=r"bob stays awake: 2 requests are in flight") as caught:
        world.run(world.life.pause(timeout_s=1, now=True, actor="uid:0"))
    assert (caught.value.code, caught.value.status) == ("busy", 409)
    agree(world, RUNNING, "running", "open")
    assert world.helper.calls == []


def test_an_operators_pause_waits_for_quiet(loop: VirtualLoop, world: MemoryWorld) -> None:
    world.gates.busy = "a request is in flight"
    began = loop.time()
    loop.call_later(0.7, world.gates.become_quiet)
    world.run(world.life.pause(timeout_s=30, now=False, actor="uid:0"))
    assert loop.time() - began < 0.8
    agree(world, PAUSED, "frozen", "asleep")


def test_an_operators_pause_survives_a_quiet_that_got_lost(loop: VirtualLoop, world: MemoryWorld) -> None:
    world.gates.busy = "a request is in flight"

    def quiet_unheard() -> None:
        world.gates.busy = ""

    loop.call_later(3.0, quiet_unheard)
    world.run(world.life.pause(timeout_s=30, now=False, actor="uid:0"))
    agree(world, PAUSED, "frozen", "asleep")


def test_an_operators_pause_that_is_never_possible_times_out_awake(loop: VirtualLoop, world: MemoryWorld) -> None:
    world.gates.busy = "a request is in flight"
    began = loop.time()
    with pytest.raises(TimedOut, match=r"within 30 s: a request is in flight; it is awake"):
        world.run(world.life.pause(timeout_s=30, now=False, actor="uid:0"))
    assert 30 <= loop.time() - began < 31
    agree(world, RUNNING, "running", "open")


def test_repeating_a_done_act_changes_nothing(loop: VirtualLoop) -> None:
    world = asleep(loop)
    before = world.life.agent
    world.run(world.life.pause(timeout_s=1, now=True, actor="uid:0"))
    world.run(world.life.start("uid:0"))
    assert world.life.agent == before
    world.run(world.life.resume("uid:0"))
    before = world.life.agent
    world.run(world.life.resume("uid:0"))
    world.run(world.life.start("uid:0"))
    assert world.life.agent == before
    world.run(world.life.stop("uid:0"))
    before = world.life.agent
    world.run(world.life.stop("uid:0"))
    assert world.life.agent == before


def test_a_wrong_state_is_named(loop: VirtualLoop) -> None:
    world = started(loop)
    world.run(world.life.stop("uid:0"))
    with pytest.raises(WrongState, match="bob is stopped"):
        world.run(world.life.pause(timeout_s=1, now=False, actor="uid:0"))
    with pytest.raises(WrongState, match="bob is stopped"):
        world.run(world.life.resume("uid:0"))


def test_an_idle_agent_is_not_put_to_sleep_before_its_minimum_awake_time(loop: VirtualLoop) -> None:
    world = asleep(loop)
    world.run(world.life.resume("uid:0"))
    loop.spend(9)
    assert world.run(world.life.fall_asleep("idle")).why_not == "it was woken a moment ago"
    loop.spend(1.1)
    assert world.run(world.life.fall_asleep("idle")).why_not is None
    agree(world, PAUSED, "frozen", "asleep")


@pytest.mark.parametrize(("cause", "why"), [(WakeCause.SCHEDULE, "woken a moment ago"), (WakeCause.INGRESS, None)])
def test_who_is_awake_at_its_time_is_not_put_to_sleep_a_moment_later(
    loop: VirtualLoop, cause: WakeCause, why: str | None
) -> None:
    """A schedule that found its agent awake let it fall asleep the same second. A request shows as activity instead."""
    world = started(loop)
    assert isinstance(wake(world, cause)[0], Open)
    said = world.run(world.life.fall_asleep("idle")).why_not
    assert said == (why and f"it was {why}")


# Wakes that race --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at_s", [0.0, 0.05, 0.15, 0.25, 0.35, 0.45, 0.55, 0.65, 0.75, 0.85, 0.95, 1.05])
def test_a_wake_at_any_moment_of_a_pause_wins_at_once(loop: VirtualLoop, at_s: float) -> None:
    """Each of the five asks takes 0.2 s; a thaw takes as long, and no more than that is waited for."""
    world = started(loop, delays=(0.1,))
    pausing = loop.create_task(world.life.fall_asleep("idle"))
    loop.spend(at_s)
    asked = loop.time()
    answered: list[float] = []
    loop.do(world.life.wake, WakeCause.REQUEST, lambda answer: answered.append(loop.time()))
    loop.spend(3)
    assert answered[0] - asked <= 0.21
    assert pausing.done()
    agree(world, RUNNING, "running", "open")


def test_a_freeze_that_comes_through_after_the_wake_is_undone(loop: VirtualLoop) -> None:
    """A helper that freezes after it has thawed would leave an agent frozen that everybody holds to be awake."""
    world = started(loop)
    slow = world.helper.wire
    pausing = loop.create_task(world.life.fall_asleep("idle"))
    slow.delays = [2.0]
    loop.spend(0.5)
    slow.delays = [0.001]
    answers = wake(world)
    loop.spend(0.1)
    assert isinstance(answers[0], Open)
    loop.spend(10)
    assert pausing.done()
    agree(world, RUNNING, "running", "open")


def test_a_client_that_leaves_does_not_cancel_the_transition(loop: VirtualLoop) -> None:
    world = started(loop, delays=(0.1,))
    task = loop.create_task(world.life.pause(timeout_s=5, now=False, actor="uid:0"))
    loop.spend(0.3)
    task.cancel()
    loop.spend(5)
    agree(world, PAUSED, "frozen", "asleep")


def test_a_leaving_resumer_does_not_cancel_the_wake(loop: VirtualLoop) -> None:
    world = asleep(loop)
    task = loop.create_task(world.life.resume("uid:0"))
    loop.call_soon(task.cancel)
    loop.spend(1)
    agree(world, RUNNING, "running", "open")


# Failures end awake -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at_s", [0.05, 0.25, 0.45, 0.65, 0.85])
def test_a_lost_proxy_aborts_the_pause_under_way(loop: VirtualLoop, at_s: float) -> None:
    world = started(loop, delays=(0.1,))
    loop.create_task(outcome_of(world.life.fall_asleep("idle")))
    loop.spend(at_s)
    loop.do(world.gates.lose)
    loop.spend(3)
    assert (world.life.status, world.helper.state) == (RUNNING, "running")
    loop.do(world.gates.connect)
    agree(world, RUNNING, "running", "open")


def test_without_a_proxy_nobody_is_put_to_sleep(loop: VirtualLoop, world: MemoryWorld) -> None:
    loop.do(world.gates.lose)
    assert world.run(world.life.fall_asleep("idle")).why_not == "the proxy is not connected"
    assert world.helper.calls == []


def test_a_sleeper_with_parked_work_is_woken_when_the_proxy_is_back(loop: VirtualLoop) -> None:
    world = asleep(loop)
    loop.do(world.gates.lose)
    loop.do(world.gates.request)
    loop.spend(1)
    assert world.life.status is PAUSED
    loop.do(world.gates.connect)
    loop.spend(1)
    agree(world, RUNNING, "running", "open")
    assert world.gates.parked == []


def test_an_agent_that_cannot_be_frozen_stays_awake_and_is_left_alone_for_longer_each_time(
    loop: VirtualLoop, world: MemoryWorld
) -> None:
    world.helper.fail_freeze = True
    left = []
    for _ in range(7):
        assert world.run(world.life.fall_asleep("idle")).why_not == "it does not stop"
        left.append(round(world.life.retry_freeze_at - loop.time()))
    assert left == [30, 60, 120, 240, 480, 600, 600]
    for _ in range(1100):  # 2 to the power of that is more than a float can be
        attempt = world.run(world.life.fall_asleep("idle"))
    assert attempt.why_not == "it does not stop"
    agree(world, RUNNING, "running", "open")


def test_a_pause_whose_intent_cannot_be_written_freezes_nothing(world: MemoryWorld) -> None:
    world.disk_full = True
    assert world.run(world.life.fall_asleep("idle")).why_not == "The disk is full."
    assert world.helper.calls == []
    assert (world.life.status, world.gates.gate) == (RUNNING, "open")


def test_a_pause_whose_commit_cannot_be_written_ends_awake(loop: VirtualLoop) -> None:
    world = started(loop, delays=(0.1,))
    attempt = loop.create_task(world.life.fall_asleep("idle"))
    loop.spend(0.45)
    world.disk_full = True
    loop.spend(2)
    assert attempt.result().why_not == "The disk is full."
    assert (world.life.status, world.helper.state, world.gates.gate) == (RUNNING, "running", "open")


def test_a_wake_is_carried_out_although_it_cannot_be_recorded(loop: VirtualLoop) -> None:
    world = asleep(loop)
    world.disk_full = True
    assert isinstance(world.run(_answer(world.life)), Open)
    loop.spend(0.01)
    assert (world.helper.state, world.gates.gate) == ("running", "open")


async def _answer(life: AgentLifecycle) -> Open | Refused:
    future: asyncio.Future[Open | Refused] = asyncio.get_running_loop().create_future()
    life.wake(WakeCause.INGRESS, future.set_result)
    return await future


def test_a_wake_without_helper_goes_on_until_the_helper_is_back(loop: VirtualLoop) -> None:
    world = asleep(loop)
    world.helper.wire.lose()
    answers = wake(world)
    loop.spend(30)
    assert answers == []
    world.helper.wire.connected = True
    loop.spend(0.3)
    assert isinstance(answers[0], Open)


def test_a_thaw_that_is_not_verified_is_repeated(loop: VirtualLoop) -> None:
    world = asleep(loop)
    world.helper.fail_thaw = True
    answers = wake(world)
    loop.spend(3)
    assert answers == []
    assert world.helper.calls.count("thaw") > 5
    world.helper.fail_thaw = False
    loop.spend(0.3)
    assert isinstance(answers[0], Open)
    agree(world, RUNNING, "running", "open")


def test_a_confirm_that_comes_too_late_takes_the_wake_path(loop: VirtualLoop) -> None:
    world = started(loop)
    world.helper.CONFIRM_WITHIN_S = 0.0005
    attempt = world.run(world.life.fall_asleep("idle"))
    assert attempt.why_not is not None
    loop.spend(1)
    agree(world, RUNNING, "running", "open")


def test_a_helper_that_thaws_by_itself_makes_the_agent_run(loop: VirtualLoop) -> None:
    world = asleep(loop)
    loop.do(world.helper.thaw_alone, "the helper is leaving")
    loop.spend(1)
    agree(world, RUNNING, "running", "open")
    assert world.life.agent.reason == "thawed by the helper: the helper is leaving"


# Start and end ----------------------------------------------------------------------------------------------------


def test_a_request_for_a_starting_agent_waits_for_the_start(loop: VirtualLoop) -> None:
    world = started(loop, delays=(0.1,))
    world.run(world.life.stop("uid:0"))
    loop.create_task(world.life.start("uid:0"))
    loop.spend(0.35)
    assert (world.life.status, world.gates.gate) == (AgentStatus.STARTING, "closed")
    answers = wake(world)
    loop.spend(2)
    assert isinstance(answers[0], Open)
    agree(world, RUNNING, "running", "open")


@pytest.mark.parametrize("verb", ["stop", "remove"])
def test_what_is_parked_for_an_agent_that_is_stopped_is_refused_at_once(loop: VirtualLoop, verb: str) -> None:
    world = asleep(loop)
    world.helper.wire.lose()
    answers = wake(world)
    loop.spend(1)
    world.helper.wire.connected = True
    world.run(getattr(world.life, verb)("uid:0"))
    assert answers == [Refused(agent="a1", generation=answers[0].generation, status="stopping")]
    assert world.helper.state == "gone"


@pytest.mark.parametrize("status", ["created", "stopped", "error"])
def test_a_request_never_starts_an_agent_that_is_at_rest(loop: VirtualLoop, status: str) -> None:
    world = started(loop)
    world.run(world.life.stop("uid:0"))
    world.life._state.agent = Agent(id="a1", spec=world.life.agent.spec, status=AgentStatus(status), generation=9)
    assert wake(world) == [Refused(agent="a1", generation=9, status=status)]


def test_a_command_that_does_not_exist_is_an_error_with_its_reason(loop: VirtualLoop) -> None:
    world = started(loop)
    world.run(world.life.stop("uid:0"))
    world.helper.fail_start = True
    with pytest.raises(NotFound, match="no such command: nosuch"):
        world.run(world.life.start("uid:0"))
    agree(world, AgentStatus.ERROR, "gone", "refused")
    assert world.life.agent.reason == "no such command: nosuch"
    world.helper.fail_start = False
    world.run(world.life.start("uid:0"))
    agree(world, RUNNING, "running", "open")


def test_a_start_whose_intent_cannot_be_written_does_not_happen(loop: VirtualLoop) -> None:
    world = started(loop)
    world.run(world.life.stop("uid:0"))
    world.helper.calls.clear()
    world.disk_full = True
    with pytest.raises(StoreFull):
        world.run(world.life.start("uid:0"))
    assert (world.life.status, world.helper.calls) == (AgentStatus.STOPPED, [])


def test_an_agent_that_ends_well_is_stopped(loop: VirtualLoop, world: MemoryWorld) -> None:
    loop.do(world.helper.end, 0)
    loop.spend(1)
    agree(world, AgentStatus.STOPPED, "gone", "refused")
    assert world.failures == 0


def test_an_agent_that_dies_asleep_is_an_error_and_its_callers_are_refused(loop: VirtualLoop) -> None:
    world = asleep(loop)
    world.gates.wire.connected = True
    loop.do(world.gates.request)
    loop.do(world.helper.end, 137)
    loop.spend(1)
    agree(world, AgentStatus.ERROR, "gone", "refused")
    assert (world.gates.refused, world.life.agent.reason) == (1, "exited with 137")


def test_a_failed_agent_is_started_again_with_growing_delay_then_is_an_error(loop: VirtualLoop) -> None:
    world = started(loop, restart=RestartPolicy.ON_FAILURE)
    waits = []
    for _ in range(4):
        loop.do(world.helper.end, 1)
        began, calls = loop.time(), world.helper.calls.count("start")
        while world.helper.calls.count("start") == calls:
            loop.spend(0.05)
        waits.append(round(loop.time() - began, 1))
        loop.spend(0.1)
        assert world.life.status is RUNNING
    assert [round(wait * 2) / 2 for wait in waits] == [0.5, 1.0, 2.0, 4.0]
    loop.do(world.helper.end, 1)
    loop.spend(30)
    agree(world, AgentStatus.ERROR, "gone", "refused")
    assert world.life.agent.reason == "exited with 1, 5 failures in a row"


@pytest.mark.parametrize(("slow", "status"), [(4, RUNNING), (5, AgentStatus.ERROR)])
def test_a_start_that_takes_too_long_is_tried_again_where_the_policy_wants_one(
    loop: VirtualLoop, slow: int, status: AgentStatus
) -> None:
    """Fifty starts at once after a boot: the last of them was an error for good, and its host was only busy."""
    world = started(loop, restart=RestartPolicy.ON_FAILURE)
    world.helper.slow_starts = slow
    loop.do(world.helper.end, 1)
    loop.spend(30)
    assert world.life.status is status
    if status is RUNNING:
        agree(world, RUNNING, "running", "open")
    else:
        agree(world, AgentStatus.ERROR, "gone", "refused")


def test_failures_far_apart_are_forgotten(loop: VirtualLoop) -> None:
    world = started(loop, restart=RestartPolicy.ON_FAILURE)
    for _ in range(12):
        loop.do(world.helper.end, 1)
        loop.spend(20)
    agree(world, RUNNING, "running", "open")


def test_an_end_that_nobody_reaped_counts_as_a_failure(loop: VirtualLoop) -> None:
    world = started(loop, restart=RestartPolicy.ON_FAILURE)
    world.helper.state = "gone"
    loop.do(world.roster.ended, "a1", None, world.helper.pid)
    loop.spend(2)
    assert world.failures == 1
    agree(world, RUNNING, "running", "open")


def test_the_end_of_an_earlier_process_is_ignored(loop: VirtualLoop, world: MemoryWorld) -> None:
    old = world.helper.pid
    world.run(world.life.restart("uid:0"))
    loop.do(world.roster.ended, "a1", 1, old)
    loop.spend(1)
    agree(world, RUNNING, "running", "open")
    assert world.helper.pid == old + 1


def test_a_process_that_ends_before_its_start_is_answered_is_not_held_to_run(loop: VirtualLoop) -> None:
    world = started(loop)
    world.run(world.life.stop("uid:0"))
    starting = loop.create_task(world.life.start("uid:0"))
    world.helper.wire.delays = [0.1]
    loop.spend(0.35)
    loop.do(world.helper.end, 127)
    loop.spend(2)
    assert starting.done()
    agree(world, AgentStatus.ERROR, "gone", "refused")


def test_a_stop_does_not_wait_for_the_backoff(loop: VirtualLoop) -> None:
    world = started(loop, restart=RestartPolicy.ON_FAILURE)
    loop.do(world.helper.end, 1)
    loop.spend(0.1)
    assert world.life.status is AgentStatus.STARTING
    began = loop.time()
    world.run(world.life.stop("uid:0"))
    assert loop.time() - began < 0.1
    agree(world, AgentStatus.STOPPED, "gone", "refused")


def test_a_removed_agent_is_gone_everywhere_and_takes_no_more_orders(loop: VirtualLoop) -> None:
    world = asleep(loop)
    world.run(world.life.remove("uid:0"))
    assert world.forgotten
    assert world.helper.state == "gone"
    assert world.gates.told[-1] == "gone"
    with pytest.raises(NotFound):
        world.run(world.life.start("uid:0"))


def test_a_stop_that_lost_its_helper_is_finished_when_the_helper_is_back(loop: VirtualLoop) -> None:
    world = asleep(loop)
    world.helper.wire.lose()
    with pytest.raises(LinkLost):
        world.run(world.life.stop("uid:0"))
    assert (world.life.status, world.gates.gate) == (AgentStatus.STOPPING, "refused")
    world.helper.wire.connected = True
    world.run(world.roster.reconcile())
    agree(world, AgentStatus.STOPPED, "gone", "refused")


def test_every_error_of_an_order_is_one_of_hives_own(loop: VirtualLoop) -> None:
    world = asleep(loop)
    world.helper.wire.lose()
    for work in (world.life.stop("uid:0"), world.life.start("uid:0")):
        assert isinstance(world.run(outcome_of(work)), HiveError)


def test_work_in_the_proxys_table_wakes_a_sleeper_only(loop: VirtualLoop) -> None:
    world = asleep(loop)
    loop.do(world.roster.proxy_table, {"a1": Activity(), "a2": Activity(parked=1)})
    loop.spend(1)
    assert world.life.status is PAUSED
    loop.do(world.roster.proxy_table, {"a1": Activity(ingress=1)})
    loop.spend(1)
    agree(world, RUNNING, "running", "open")
