"""The agents started when the machine, or Hive, comes up again, and the part that stopped them."""

from __future__ import annotations

import itertools

import pytest

from hive.agents.boot import why_started
from hive.agents.starting import HIVE
from hive.domain import Agent, AgentSpec, AgentStatus, RestartPolicy, Tier
from hive.link.helper import WENT_DOWN
from hive.link.messages import Open
from tests.fakes.agent_world import MemoryWorld, VirtualLoop
from tests.fakes.lives import PAUSED, RUNNING, agree, asleep, started, wake
from tests.fakes.many_agents import ManyWorld

TABLE = """
status   restart         stopped_by  autostart  new boot                           Hive came back
running  no              -           no         it ran when the machine went down  -
paused   no              -           no         it ran when the machine went down  -
stopping always          operator    yes        autostart                          -
stopped  no              -           no         -                                  -
stopped  no              hive        no         it ran when Hive went down         it ran when Hive went down
stopped  no              operator    no         -                                  -
stopped  no              operator    yes        autostart                          -
stopped  no              hive        yes        it ran when Hive went down         it ran when Hive went down
stopped  on-failure      hive        no         it ran when Hive went down         it ran when Hive went down
stopped  on-failure      operator    no         -                                  -
stopped  always          operator    no         restart = always                   -
stopped  always          hive        no         it ran when Hive went down         it ran when Hive went down
stopped  unless-stopped  operator    no         -                                  -
stopped  unless-stopped  hive        no         it ran when Hive went down         it ran when Hive went down
stopped  unless-stopped  -           no         restart = unless-stopped           -
error    no              -           no         -                                  -
error    always          -           no         restart = always                   -
created  always          -           no         -                                  -
created  no              -           yes        autostart                          -
"""


def rows() -> list[tuple[Agent, str, str]]:
    found = []
    for line in TABLE.strip().splitlines()[1:]:
        status, restart, by, autostart, rest = line.split(maxsplit=4)
        new_boot, came_back = (text.strip().replace("-", "", text.strip() == "-") for text in rest.split("  ", 1))
        spec = AgentSpec(name="bob", restart=RestartPolicy(restart), autostart=autostart == "yes")
        agent = Agent(id="a1", spec=spec, status=AgentStatus(status), stopped_by="" if by == "-" else by)
        found.append((agent, new_boot, came_back))
    return found


@pytest.mark.parametrize(("agent", "new_boot", "came_back"), rows())
def test_policy_and_who_stopped_it_say_whether_it_comes_back(agent: Agent, new_boot: str, came_back: str) -> None:
    assert why_started(agent, is_new_boot=True) == new_boot
    assert why_started(agent, is_new_boot=False) == came_back


def test_an_operators_stop_is_recorded_as_one_and_a_start_forgets_it(loop: VirtualLoop, world: MemoryWorld) -> None:
    world.run(world.life.stop("uid:0"))
    assert (world.record.status, world.record.stopped_by) == ("stopped", "operator")
    world.run(world.life.start("uid:0"))
    assert world.record.stopped_by == ""
    world.run(world.life.stop("uid:0", by=HIVE))
    assert (world.record.stopped_by, world.record.reason) == ("hive", "Hive went down")


def test_what_an_operator_had_stopped_before_hive_went_down_stays_the_operators(world: MemoryWorld) -> None:
    world.run(world.life.stop("uid:0"))
    world.run(world.life.stop("uid:0", by=HIVE))
    assert world.record.stopped_by == "operator"


def test_an_operator_who_stops_what_has_ended_by_itself_does_not_want_it_back_after_a_boot(
    loop: VirtualLoop, world: MemoryWorld
) -> None:
    loop.do(world.helper.end, 1)
    loop.spend(1)
    assert (world.record.status, world.record.stopped_by) == ("error", "")
    world.run(world.life.stop("uid:0"))
    assert (world.record.status, world.record.stopped_by) == ("error", "operator")


def test_a_stop_whose_helper_is_lost_is_still_the_operators_when_it_is_finished(loop: VirtualLoop) -> None:
    world = asleep(loop)
    stopping = loop.create_task(world.life.stop("uid:0"))
    loop.spend(0.0015)
    world.helper.wire.lose()
    loop.spend(1)
    assert stopping.exception() is not None
    assert world.record.status is AgentStatus.STOPPING
    world.crash()
    world.helper.wire.connected = True
    world.run(world.roster.reconcile())
    assert (world.record.status, world.record.stopped_by) == ("stopped", "operator")


# After a boot -----------------------------------------------------------------------------------------------------


def reboot(world: MemoryWorld) -> None:
    """The machine goes down and comes up again: a daemon and a helper that know what was recorded, no process."""
    world.helper.state, world.helper.exit_code = "gone", None
    world.crash()
    world.new_boot = True
    world.helper.wire.connected = True
    world.loop.do(world.gates.connect)


@pytest.mark.parametrize("slept", [False, True])
def test_what_ran_when_the_machine_went_down_runs_again(loop: VirtualLoop, slept: bool) -> None:
    """Its end was nobody's fault: no policy is asked, and no failure is counted."""
    world = asleep(loop) if slept else started(loop)
    reboot(world)
    world.run(world.roster.reconcile())
    assert (world.life.status, world.record.status) == (AgentStatus.STARTING, AgentStatus.STARTING)
    answers = wake(world)
    world.run(world.roster.start_after_boot())
    agree(world, RUNNING, "running", "open")
    assert (world.failures, [type(answer) for answer in answers]) == (0, [Open])
    assert not world.new_boot


def test_without_a_boot_an_agent_that_is_gone_has_failed(loop: VirtualLoop) -> None:
    world = started(loop)
    reboot(world)
    world.new_boot = False
    world.run(world.roster.reconcile())
    world.run(world.roster.start_after_boot())
    agree(world, AgentStatus.ERROR, "gone", "refused")


def test_a_daemon_killed_while_it_starts_what_ran_goes_on_where_it_was(loop: VirtualLoop) -> None:
    world = started(loop)
    reboot(world)
    world.run(world.roster.reconcile())
    world.crash()
    world.helper.wire.connected = True
    loop.do(world.gates.connect)
    world.run(world.roster.reconcile())
    world.run(world.roster.start_after_boot())
    agree(world, RUNNING, "running", "open")


def test_what_an_operator_stops_meanwhile_is_not_started(loop: VirtualLoop) -> None:
    world = started(loop)
    reboot(world)
    world.run(world.roster.reconcile())
    world.run(world.life.stop("uid:0"))
    world.run(world.roster.start_after_boot())
    agree(world, AgentStatus.STOPPED, "gone", "refused")


def test_a_few_are_started_at_a_time_high_tier_first(loop: VirtualLoop) -> None:
    async def make() -> ManyWorld:
        world = ManyWorld()
        numbers = itertools.count()
        for tier in (Tier.LOW, Tier.HIGH, Tier.MEDIUM):
            for number in range(5):
                world.add(
                    f"{tier}-{number}",
                    AgentStatus.STOPPED,
                    tier=tier,
                    autostart=True,
                    stopped_by="hive",
                    created_at=float(next(numbers)),
                )
        world.add("mine", AgentStatus.STOPPED, stopped_by="operator", autostart=True)
        world.helper.start_s = 1.0
        return world

    world = loop.run_until_complete(make())
    loop.run_until_complete(world.roster.start_after_boot())
    order = [agent for verb, agent in world.helper.log if verb == "start"]
    assert order == [f"{tier}-{n}" for tier in ("high", "medium", "low") for n in range(5)]
    assert world.helper.most_starts_at_once == 4


def test_what_hive_stops_because_it_goes_down_is_not_started_by_a_helper_that_comes_back(loop: VirtualLoop) -> None:
    world = started(loop, restart=RestartPolicy.ALWAYS)
    world.run(world.roster.start_after_boot())
    world.run(world.life.stop("uid:0", by=HIVE))
    world.run(world.roster.reconcile())
    world.run(world.roster.start_after_boot())
    agree(world, AgentStatus.STOPPED, "gone", "refused")


def test_what_cannot_be_started_is_in_error_and_keeps_nobody_from_starting(loop: VirtualLoop) -> None:
    world = started(loop, restart=RestartPolicy.ALWAYS)
    world.run(world.life.stop("uid:0", by=HIVE))
    world.helper.fail_start = True
    world.run(world.roster.start_after_boot())
    agree(world, AgentStatus.ERROR, "gone", "refused")


# Always -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [RestartPolicy.ALWAYS, RestartPolicy.UNLESS_STOPPED])
def test_always_starts_again_after_a_good_end_too_and_never_gives_up(loop: VirtualLoop, policy: RestartPolicy) -> None:
    world = started(loop, restart=policy)
    waits = []
    for _ in range(9):
        loop.do(world.helper.end, 0)
        began, calls = loop.time(), world.helper.calls.count("start")
        while world.helper.calls.count("start") == calls:
            loop.spend(0.05)
        waits.append(round(2 * (loop.time() - began)) / 2)
        loop.spend(0.1)
    assert waits[:6] == [0.5, 1, 2, 4, 8, 10]
    assert max(waits) == 10
    assert (world.life.status, world.failures) == (RUNNING, 0)


def test_after_a_while_of_running_the_delay_begins_anew(loop: VirtualLoop) -> None:
    world = started(loop, restart=RestartPolicy.ALWAYS)
    for _ in range(5):
        loop.do(world.helper.end, 0)
        loop.spend(15)
    loop.spend(60)
    loop.do(world.helper.end, 0)
    loop.spend(0.6)
    agree(world, RUNNING, "running", "open")


def test_an_operators_stop_ends_always(loop: VirtualLoop) -> None:
    world = started(loop, restart=RestartPolicy.ALWAYS)
    world.run(world.life.stop("uid:0"))
    loop.spend(60)
    agree(world, AgentStatus.STOPPED, "gone", "refused")


def test_one_that_dies_asleep_is_started_again(loop: VirtualLoop) -> None:
    world = asleep(loop, restart=RestartPolicy.ALWAYS)
    assert world.life.status is PAUSED
    loop.do(world.helper.end, 137)
    loop.spend(2)
    agree(world, RUNNING, "running", "open")


# In a row -------------------------------------------------------------------------------------------------------------


def test_a_crash_loop_says_how_often_why_and_when_next(loop: VirtualLoop) -> None:
    """It was `starting`, or `running` for a moment, each time anybody looked: nothing told that it had ended."""
    world = started(loop, restart=RestartPolicy.ALWAYS)
    restarts = world.life.restarts
    assert (restarts.count, restarts.reason, restarts.next_at) == (0, "", None)
    for count in (1, 2, 3):
        loop.do(world.helper.end, 3)
        loop.spend(0.01)
        assert (restarts.count, restarts.reason, world.life.recent_ends) == (count, "exited with 3", count)
        assert restarts.next_at is not None
        assert world.record.reason.startswith("exited with 3; ")
        loop.spend(5)
        assert (world.life.status, restarts.next_at) == (RUNNING, None)  # type: ignore[comparison-overlap]
    assert world.record.reason.startswith("started, pid ")
    loop.spend(120)
    assert (restarts.count, world.life.recent_ends) == (3, 0)
    world.run(world.life.restart("uid:0"))
    assert (restarts.count, restarts.reason) == (0, "")


def test_one_that_waits_for_what_it_needs_keeps_no_other_from_starting(loop: VirtualLoop) -> None:
    """Four agents with an engine that was down held the four places all that time, and no other was started."""

    async def make() -> ManyWorld:
        world = ManyWorld()
        for number in range(8):
            world.add(
                f"waits-{number}", AgentStatus.STOPPED, tier=Tier.HIGH, stopped_by="hive", created_at=float(number)
            )
        world.add("free", AgentStatus.STOPPED, tier=Tier.LOW, stopped_by="hive", created_at=9.0)
        world.helper.away = {f"waits-{number}" for number in range(8)}
        return world

    world = loop.run_until_complete(make())
    loop.run_until_complete(world.roster.start_after_boot())
    lives = {life.agent.name: life for life in world.roster}
    assert lives.pop("free").status is RUNNING
    loop.spend(3)
    assert {life.status for life in lives.values()} == {AgentStatus.STARTING}
    assert {life.restarts.reason for life in lives.values()} == {"the engine is down"}
    loop.run_until_complete(lives["waits-0"].stop("uid:0"))
    world.helper.away.clear()
    loop.spend(1)
    assert {name: life.status for name, life in lives.items() if life.status is not RUNNING} == {
        "waits-0": AgentStatus.STOPPED
    }


def test_what_hive_up_ended_without_a_daemon_comes_back_as_what_a_daemon_stopped(loop: VirtualLoop) -> None:
    """The helper says that it was Hive, whether the daemon hears of it or finds it."""
    world = started(loop, restart=RestartPolicy.ON_FAILURE)
    world.helper.state = "gone"
    loop.do(world.life.ended, 143, 0, WENT_DOWN)
    loop.spend(1)
    assert (world.record.status, world.record.stopped_by, world.failures) == ("stopped", "hive", 0)
    assert why_started(world.record, is_new_boot=False) == "it ran when Hive went down"
