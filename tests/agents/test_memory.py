"""A host with too little memory for all that sleep on it: the order of going deep, and of coming back."""

from __future__ import annotations

from typing import Any

import pytest

from hive.agents.deepener import AT_ONCE, LOOK_S, Deepener
from hive.agents.effects import HostMemory
from hive.agents.lifecycle import AgentLifecycle
from hive.agents.sleeper import Sleeper
from hive.agents.transition_lock import outcome_of
from hive.domain import AgentStatus, SleepDepth, Tier, WakeCause
from hive.errors import NotSupported
from hive.link.helper import Stat
from hive.link.messages import Activity, Open, Refused
from tests.fakes.agent_world import VirtualLoop
from tests.fakes.many_agents import MIB, ManyWorld

RUNNING, PAUSED, LIGHT, DEEP = AgentStatus.RUNNING, AgentStatus.PAUSED, SleepDepth.LIGHT, SleepDepth.DEEP
DEADLINE_S = 5.0
"""Time for which the proxy lets a request wait for its agent (`gate_wait_s`)."""


def make(loop: VirtualLoop, **world: Any) -> ManyWorld:
    return loop.do(lambda: ManyWorld(**world))


def light(loop: VirtualLoop, world: ManyWorld, name: str, holds_mb: int = 300, **spec: Any) -> AgentLifecycle:
    """Sleeps light from now on."""
    return loop.do(lambda: world.add(name, PAUSED, depth=LIGHT, holds=holds_mb * MIB, **spec))


@pytest.fixture
def world(loop: VirtualLoop) -> ManyWorld:
    """Deep after 30 s or from a pressure of 10 % on."""
    return make(loop)


def deepener(loop: VirtualLoop, world: ManyWorld) -> Deepener:
    found: Deepener = loop.do(Deepener, world.roster, world)
    loop.do(lambda: loop.create_task(found.run()))
    return found


def order(world: ManyWorld, verb: str) -> list[str]:
    return [agent for asked, agent in world.helper.log if asked == verb]


# Going deep -------------------------------------------------------------------------------------------------------


def test_a_sleeper_goes_deep_after_its_time(loop: VirtualLoop, world: ManyWorld) -> None:
    life = light(loop, world, "bob")
    found = deepener(loop, world)
    loop.spend(18.4)
    assert loop.do(found.how_asleep, life) == "light sleep, deep in 12 s"
    loop.spend(30)
    assert (life.agent.depth, loop.do(found.how_asleep, life)) == (DEEP, "deep sleep")


def test_the_time_to_deep_sleep_counts_from_each_sleep_anew(loop: VirtualLoop, world: ManyWorld) -> None:
    life = light(loop, world, "bob")
    found = deepener(loop, world)
    loop.spend(100)
    loop.run_until_complete(life.resume("uid:0"))
    loop.spend(100)
    loop.run_until_complete(life.pause(timeout_s=1, now=True, actor="uid:0"))
    assert (life.agent.depth, loop.do(found.how_asleep, life)) == (LIGHT, "light sleep, deep in 30 s")


def test_under_pressure_the_largest_and_longest_asleep_go_first_a_few_at_a_time(
    loop: VirtualLoop, world: ManyWorld
) -> None:
    for name, holds_mb in (("small", 100), ("large", 900), ("middle", 500)):
        light(loop, world, name, holds_mb)
    loop.spend(9)
    light(loop, world, "largest", 1000)
    loop.spend(1)
    world.helper.page_out_s = 1.0
    world.some_avg10 = 40.0
    found = deepener(loop, world)
    loop.spend(LOOK_S + 0.5)
    assert order(world, "page_out") == ["large", "middle"][:AT_ONCE]
    how = loop.do(found.how_asleep, world.roster.find("large"))
    assert how == "light sleep, its memory is being paged out"
    loop.spend(1)
    assert sorted(order(world, "page_out")[2:]) == ["largest", "small"]
    loop.spend(3)
    assert {life.agent.depth for life in world.roster} == {DEEP}


def test_once_the_pressure_is_gone_the_rest_sleeps_on_light(loop: VirtualLoop, world: ManyWorld) -> None:
    for number in range(10):
        light(loop, world, f"a{number}")
    world.helper.page_out_s = 1.0
    world.some_avg10 = 40.0
    deepener(loop, world)
    loop.spend(LOOK_S + 0.5)
    world.some_avg10 = 0.0
    loop.spend(5)
    assert len(order(world, "page_out")) == AT_ONCE


def test_whoever_does_not_fit_into_swap_sleeps_light_and_the_others_do_not_wait_for_it(
    loop: VirtualLoop, world: ManyWorld
) -> None:
    huge, small = light(loop, world, "huge", 900), light(loop, world, "small", 100)
    world.swap_free = 500 * MIB
    found = deepener(loop, world)
    loop.spend(40)
    assert (huge.agent.depth, small.agent.depth) == (LIGHT, DEEP)
    assert loop.do(found.how_asleep, huge) == "light sleep, not deep: 900 MiB in RAM, 500 MiB of free swap"


def test_how_much_a_sleeper_holds_is_asked_once_a_sleep(loop: VirtualLoop, world: ManyWorld) -> None:
    light(loop, world, "bob", 900)
    world.swap_free = 500 * MIB
    deepener(loop, world)
    loop.spend(120)
    assert order(world, "stat") == ["1"]


def test_a_host_that_does_not_allow_it_is_asked_once_for_each_agent(loop: VirtualLoop, world: ManyWorld) -> None:
    asked: list[str] = []

    async def page_out(agent: str, generation: int) -> object:
        asked.append(agent)
        raise NotSupported("not permitted here")

    world.helper.page_out = page_out  # type: ignore[method-assign, assignment]
    lives = [light(loop, world, name) for name in ("ann", "bob")]
    found = deepener(loop, world)
    loop.spend(300)
    assert sorted(asked) == ["ann", "bob"]
    assert loop.do(found.how_asleep, lives[0]) == "light sleep, not deep: not permitted here, next try in 56 min"


def test_who_sleeps_deep_or_is_awake_costs_the_look_nothing(loop: VirtualLoop, world: ManyWorld) -> None:
    loop.do(world.sleeper, "deep")
    loop.do(world.add, "awake")
    deepener(loop, world)
    loop.spend(300)
    assert world.helper.log == []


# Coming back ------------------------------------------------------------------------------------------------------


class Calls:
    """Requests for sleepers, all at once; each gives up after the proxy's deadline."""

    def __init__(self, loop: VirtualLoop, lives: list[AgentLifecycle]) -> None:
        self.loop = loop
        self.asked_at = loop.time()
        self.answered: dict[str, float] = {}
        for life in lives:
            loop.do(life.wake, WakeCause.INGRESS, lambda answer, life=life: self._note(life, answer))

    def _note(self, life: AgentLifecycle, answer: Open | Refused) -> None:
        assert isinstance(answer, Open)
        self.answered[life.agent.name] = self.loop.time() - self.asked_at

    @property
    def in_time(self) -> list[str]:
        return [name for name, took_s in self.answered.items() if took_s <= DEADLINE_S]


def twenty(loop: VirtualLoop, *, total_mb: int | None) -> tuple[ManyWorld, list[AgentLifecycle]]:
    """Twenty deep sleepers of 300 MiB, 600 MiB of which 30 MiB each are in RAM."""
    world = make(loop, total_bytes=None if total_mb is None else total_mb * MIB)
    tiers = [Tier.LOW, Tier.MEDIUM, Tier.HIGH]
    lives = [loop.do(lambda n=n: world.sleeper(f"a{n}", tier=tiers[n % 3])) for n in range(20)]
    loop.run_until_complete(world.roster.reconcile())  # as after every start of a daemon: what each has in swap
    return world, lives


def test_twenty_deep_sleepers_woken_at_once_come_back_as_there_is_memory(loop: VirtualLoop) -> None:
    """Memory for five of them. An agent that has answered sleeps again, as under pressure it does. None is ever killed
    for want of memory: each is answered or still waits, and says so, when its caller is refused."""
    world, lives = twenty(loop, total_mb=600 + 256 + 5 * 270)
    calls = Calls(loop, lives)
    waiting = [life for life in lives if world.roster.line.why(life.agent.id)]
    assert len(waiting) == 15
    for _ in range(200):
        loop.spend(0.2)
        for life in lives:
            if life.status is RUNNING and world.helper.held[life.agent.id].resident == 300 * MIB:
                loop.run_until_complete(life.pause(timeout_s=1, now=True, actor="uid:0", deep=True))
    assert world.helper.least_available >= 0
    assert len(calls.answered) == 20
    assert len(calls.in_time) >= 10
    tiers = [world.roster.find(name).agent.spec.tier for name in calls.answered]
    assert tiers[5:] == sorted(tiers[5:], key=[Tier.HIGH, Tier.MEDIUM, Tier.LOW].index)


def test_whose_working_set_is_recorded_needs_no_more_than_that(loop: VirtualLoop) -> None:
    """Room for five of all their memory, for twenty of what they use of it: 12 MiB and the margin of 8 each."""
    world, lives = twenty(loop, total_mb=600 + 256 + 20 * 20)
    for held in world.helper.held.values():
        held.working_set = 12 * MIB
    loop.run_until_complete(world.roster.reconcile())
    calls = Calls(loop, lives)
    assert [life for life in lives if world.roster.line.why(life.agent.id)] == []
    loop.spend(2)
    assert len(calls.in_time) == 20
    assert world.helper.least_available >= 256 * MIB


def test_what_a_page_out_tells_of_the_working_set_is_what_the_next_wake_waits_for(loop: VirtualLoop) -> None:
    world, lives = twenty(loop, total_mb=600)
    first, second, *_ = lives
    Calls(loop, [first])
    world.helper.held[second.agent.id].working_set = 12 * MIB
    loop.run_until_complete(second.resume("uid:0"))
    loop.run_until_complete(second.pause(timeout_s=1, now=True, actor="uid:0", deep=True))
    Calls(loop, [lives[2], second])
    loop.spend(0.01)
    assert "needs 20 MiB" in world.roster.line.why(second.agent.id)


def test_a_turn_that_waits_for_its_model_holds_no_memory_from_others(loop: VirtualLoop) -> None:
    """270 MiB would be held for it for 1.8 s."""
    world, lives = twenty(loop, total_mb=600 + 256 + 2 * 270 + 110)
    world.helper.held[lives[0].agent.id].working_set = 0  # it touches nothing more: its memory was not needed
    calls = Calls(loop, lives[:3])
    loop.spend(0.2)
    assert len(calls.answered) == 2
    world.gates.seen = {lives[0].agent.id: Activity(in_flight=1)}
    loop.spend(0.5)
    assert len(calls.answered) == 3


def test_without_knowing_the_memory_all_come_back_at_once(loop: VirtualLoop) -> None:
    """The reason for the line: the same twenty on the same host, whose kernel does not say what is available."""
    world, lives = twenty(loop, total_mb=600 + 256 + 5 * 270)
    world.memory = HostMemory  # type: ignore[method-assign]
    calls = Calls(loop, lives)
    loop.spend(2)
    assert len(calls.in_time) == 20
    assert world.helper.least_available < 0


def test_who_waits_for_memory_says_what_for(loop: VirtualLoop) -> None:
    world, lives = twenty(loop, total_mb=600 + 256 + 270)
    sleeper: Sleeper = loop.do(Sleeper, world.roster, world)
    Calls(loop, lives[:2])
    loop.spend(0.3)
    assert lives[0].status is RUNNING
    why = loop.do(sleeper.verdict, lives[1]).why
    assert why.startswith("asleep since ")
    assert "deep sleep, is being woken, waits for memory: needs 270 MiB (" in why
    assert "of it promised, 256 MiB kept free)" in why


def test_where_nobody_is_coming_back_the_next_one_may_so_that_nobody_waits_for_ever(loop: VirtualLoop) -> None:
    _, lives = twenty(loop, total_mb=600)  # not one of them fits
    calls = Calls(loop, lives[:3])
    loop.spend(0.1)
    assert len(calls.answered) == 1
    loop.spend(10)
    assert len(calls.answered) == 3


def test_one_that_sleeps_again_gives_back_what_it_was_promised(loop: VirtualLoop) -> None:
    """270 MiB are promised for 1.8 s; this one needs them no longer."""
    _, lives = twenty(loop, total_mb=600 + 256 + 270)
    calls = Calls(loop, lives[:2])
    loop.spend(1.2)
    assert list(calls.answered) == ["a0"]
    loop.run_until_complete(lives[0].pause(timeout_s=1, now=True, actor="uid:0", deep=True))
    loop.spend(0.2)
    assert list(calls.answered) == ["a0", "a1"]


def test_a_light_sleeper_is_woken_at_once_however_many_wait(loop: VirtualLoop) -> None:
    world, lives = twenty(loop, total_mb=600)
    nimble = light(loop, world, "nimble", 1)
    Calls(loop, lives)
    calls = Calls(loop, [nimble])
    loop.spend(0.01)
    assert calls.in_time == ["nimble"]


def test_one_that_is_stopped_or_thawed_by_the_helper_waits_for_no_memory(loop: VirtualLoop) -> None:
    world, lives = twenty(loop, total_mb=600)
    first, stopped, thawed, *_ = lives
    calls = Calls(loop, [first])
    answers: list[object] = []
    for life in (stopped, thawed):
        loop.do(life.wake, WakeCause.INGRESS, answers.append)
    assert len(world.roster.line) == 2
    loop.run_until_complete(stopped.stop("uid:0"))
    loop.do(thawed.thawed_alone, "it is leaving")
    loop.spend(0.05)
    assert [type(answer) for answer in answers] == [Refused, Open]
    assert len(world.roster.line) == 0
    assert calls.in_time == ["a0"]


def test_who_waits_can_be_looked_at_paused_and_changed(loop: VirtualLoop) -> None:
    """Waiting for memory holds no turn: nothing else has to wait with it."""
    world, lives = twenty(loop, total_mb=600)
    Calls(loop, lives[:3])
    loop.spend(0.05)
    began = loop.time()
    loop.run_until_complete(lives[2].keep_awake(None, "uid:0"))
    loop.run_until_complete(lives[2].pause(timeout_s=1, now=True, actor="uid:0"))
    loop.run_until_complete(world.roster.reconcile())
    assert loop.time() - began < 0.1
    assert len(world.roster.line) == 2


def test_who_is_called_twice_waits_once(loop: VirtualLoop) -> None:
    world, lives = twenty(loop, total_mb=600)
    Calls(loop, [*lives[:2], *lives[:2]])
    loop.spend(0.05)
    assert (len(world.roster.line), order(world, "thaw")) == (1, ["a0"])
    loop.spend(10)
    assert order(world, "thaw") == ["a0", "a1"]


def said(loop: VirtualLoop, sleeper: Sleeper, life: AgentLifecycle, stat: Stat | None) -> str:
    sentence: str = loop.do(lambda: sleeper.why(life, stat, sleeper.verdict(life)))
    return sentence


# The sentence -----------------------------------------------------------------------------------------------------


def test_the_sentence_says_what_the_agent_costs_now(loop: VirtualLoop, world: ManyWorld) -> None:
    sleeper: Sleeper = loop.do(Sleeper, world.roster, world)
    life = loop.do(world.add, "bob")
    stat = Stat(state="running", held_bytes=120 * MIB, cpu_us=5)
    assert said(loop, sleeper, life, stat) == "awake: 300 s until idle; costs 120 MiB of RAM"
    assert said(loop, sleeper, life, None) == "awake: 300 s until idle"
    deep = loop.do(world.sleeper, "deep")
    stat = Stat(state="frozen", held_bytes=30 * MIB, swap_bytes=270 * MIB)
    assert said(loop, sleeper, deep, stat).endswith("; costs 30 MiB of RAM, 270 MiB of swap")


def test_the_sentence_says_how_much_it_computes_where_that_was_measured(loop: VirtualLoop, world: ManyWorld) -> None:
    sleeper: Sleeper = loop.do(Sleeper, world.roster, world)
    life = loop.do(lambda: world.add("bob", idle_s=20))
    loop.spend(25)
    loop.run_until_complete(outcome_of(sleeper.check()))
    loop.spend(2)
    stat = Stat(state="running", held_bytes=120 * MIB, cpu_us=500_000)
    assert said(loop, sleeper, life, stat).endswith("; costs 120 MiB of RAM, 25.0 % of a core")


def test_how_much_it_computed_long_ago_is_not_what_it_costs_now(loop: VirtualLoop, world: ManyWorld) -> None:
    """Of one that was woken, the figure from before its sleep stayed in the sentence until the next check."""
    sleeper: Sleeper = loop.do(Sleeper, world.roster, world)
    life = loop.do(lambda: world.add("bob", idle_s=20))
    loop.spend(25)
    for cpu_us in (0, 500_000):
        loop.spend(1)
        world.helper.held[life.agent.id].cpu_us = cpu_us
        loop.run_until_complete(outcome_of(sleeper.check()))
    stat = Stat(state="running", held_bytes=120 * MIB, cpu_us=500_000)
    assert said(loop, sleeper, life, stat).endswith("; costs 120 MiB of RAM, 50.0 % of a core")
    loop.spend(1000)
    assert said(loop, sleeper, life, stat).endswith("; costs 120 MiB of RAM")
