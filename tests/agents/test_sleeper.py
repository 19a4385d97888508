"""The periodic check, in a world whose time is virtual."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import msgspec
import pytest

from hive.agents.sleeper import Sleeper
from hive.domain import Agent, AgentSpec, AgentStatus
from hive.link.helper import Stat
from hive.link.messages import Activity
from hive.settings.table import InferenceSection, Settings, Sleep
from tests.fakes.agent_world import MemoryWorld, VirtualLoop


class Night:
    """One running agent, idle after 20 s, checked every 5 s."""

    def __init__(self, loop: VirtualLoop) -> None:
        async def make() -> MemoryWorld:
            return MemoryWorld(loop, Agent(id="a1", spec=AgentSpec(name="bob", command=["/bin/true"])), (0.001,))

        self.loop = loop
        self.world: MemoryWorld = loop.run_until_complete(make())
        self.world.settings = Settings(
            inference=InferenceSection(auto_sleep_idle_seconds=20), sleep=Sleep(check_s=5, minimum_awake_s=3)
        )
        self.world.run(self.world.life.start("uid:0"))
        self.sleeper: Sleeper = loop.do(Sleeper, self.world.roster, self.world)
        self.world.helper.calls.clear()
        loop.do(lambda: loop.create_task(self.sleeper.run()))

    @property
    def status(self) -> AgentStatus:
        return self.world.life.status

    @property
    def why(self) -> str:
        return self.loop.do(self.sleeper.verdict, self.world.life).why


@pytest.fixture
def night() -> Iterator[Night]:
    loop = VirtualLoop()
    yield Night(loop)
    loop.kill_tasks()
    loop.close()


def test_an_agent_without_any_activity_sleeps_after_its_idle_time(night: Night) -> None:
    night.loop.spend(19)
    assert night.status is AgentStatus.RUNNING
    night.loop.spend(7)
    assert night.status is AgentStatus.PAUSED  # type: ignore[comparison-overlap]
    assert night.world.helper.state == "frozen"


def test_an_agent_that_computes_is_left_awake_until_it_stops(night: Night) -> None:
    def burn() -> None:
        night.world.helper.cpu_us += 500_000
        timers.append(night.loop.call_later(1, burn))

    timers: list[asyncio.TimerHandle] = []
    night.loop.do(burn)
    night.loop.spend(60)
    assert night.why == "awake: computing, 50.0 % of a core (quiet is under 2 %)"
    timers[-1].cancel()
    night.loop.spend(11)
    assert night.status is AgentStatus.PAUSED


def test_cpu_time_is_not_asked_for_while_the_agent_is_far_from_idle(night: Night) -> None:
    asked: list[float] = []
    stat = night.world.helper.stat

    async def counted(agents: list[str], *, pss: bool = False) -> dict[str, Stat]:
        asked.append(round(night.loop.time() - 1000))
        return await stat(agents, pss=pss)

    night.world.helper.stat = counted  # type: ignore[method-assign]
    night.loop.spend(16)
    assert asked == [15]


def test_activity_the_proxy_tells_of_puts_sleep_off(night: Night) -> None:
    night.world.gates.seen = Activity(quiet_s=1.0)
    night.loop.spend(40)
    assert night.status is AgentStatus.RUNNING
    assert night.why.endswith("s until idle")


def test_an_agent_may_have_an_idle_time_of_its_own_or_none(night: Night) -> None:
    spec = msgspec.structs.replace(night.world.life.agent.spec, idle_s=0.0)
    night.world.run(night.world.life.change_spec(spec))
    night.loop.spend(100)
    assert night.why == "awake: this agent is never put to sleep (idle_s = 0)"
    night.world.run(night.world.life.change_spec(msgspec.structs.replace(spec, idle_s=1.0)))
    night.loop.spend(11)
    assert night.status is AgentStatus.PAUSED


def test_one_that_is_kept_awake_says_for_how_long_and_by_whom(night: Night) -> None:
    night.world.run(night.world.life.keep_awake(time.time() + 540, "uid:0"))
    assert night.why == "awake: kept awake for another 9 min by uid:0"
    night.loop.spend(530)
    assert night.status is AgentStatus.RUNNING
    night.loop.spend(20)
    assert night.status is AgentStatus.PAUSED  # type: ignore[comparison-overlap]


def test_who_sleeps_long_enough_sleeps_deep(night: Night) -> None:
    night.loop.spend(27)
    assert night.why.partition(", ")[2].startswith("light sleep, deep in ")
    night.loop.spend(35)
    assert night.why.partition(", ")[2] == "deep sleep; wakes on ingress, message, schedule, request or resume"
    assert night.world.record.depth == "deep"


def test_nothing_is_asked_of_anybody_while_all_sleep(night: Night) -> None:
    night.loop.spend(70)
    assert night.world.record.depth == "deep"
    night.world.helper.calls.clear()
    night.world.gates.activity = night.world.helper.stat = None  # type: ignore[method-assign, assignment]
    night.loop.spend(300)
    assert night.world.helper.calls == []


def test_a_woken_agent_is_measured_anew(night: Night) -> None:
    """CPU time from before it slept is no reason to keep it awake, nor that of its wake."""
    night.loop.spend(30)
    assert night.status is AgentStatus.PAUSED
    night.world.run(night.world.life.resume("uid:0"))
    night.world.helper.cpu_us += 10_000_000
    night.loop.spend(31)
    assert night.status is AgentStatus.PAUSED


def test_without_proxy_or_helper_nobody_is_put_to_sleep_and_the_check_goes_on(night: Night) -> None:
    night.world.helper.wire.lose()
    night.loop.spend(60)
    assert night.status is AgentStatus.RUNNING
    night.world.helper.wire.connected = True
    night.loop.do(night.world.gates.lose)
    night.loop.spend(60)
    assert night.status is AgentStatus.RUNNING
    night.loop.do(night.world.gates.connect)
    night.loop.spend(30)
    assert night.status is AgentStatus.PAUSED  # type: ignore[comparison-overlap]
