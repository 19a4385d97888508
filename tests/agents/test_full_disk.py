"""An agent's life while nothing can be written, in a world whose time is virtual."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from hive.agents.sleeper import Sleeper
from hive.domain import Agent, AgentSpec, AgentStatus
from hive.errors import StoreFull
from hive.settings.table import InferenceSection, Settings, Sleep
from tests.fakes.agent_world import MemoryWorld, VirtualLoop


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    loop = VirtualLoop()
    yield loop
    loop.kill_tasks()
    loop.close()


@pytest.fixture
def world(loop: VirtualLoop) -> MemoryWorld:
    """One agent that runs; it falls asleep after 5 s of quiet, looked at every second."""

    async def make() -> MemoryWorld:
        return MemoryWorld(loop, Agent(id="a1", spec=AgentSpec(name="bob", command=["/bin/true"])), (0.001,))

    world: MemoryWorld = loop.run_until_complete(make())
    world.settings = Settings(
        inference=InferenceSection(auto_sleep_idle_seconds=5), sleep=Sleep(check_s=1, minimum_awake_s=1)
    )
    world.run(world.life.start("uid:0"))
    return world


def test_an_operators_pause_on_a_full_disk_fails_at_once_and_tries_no_more(
    loop: VirtualLoop, world: MemoryWorld
) -> None:
    """It tried ten times a second until its timeout: 300 generations and as many log lines, and a command that hung."""
    world.disk_full = True
    before, asked_at = world.life.agent.generation, loop.time()
    with pytest.raises(StoreFull):
        world.run(world.life.pause(timeout_s=30, now=False, actor="uid:0"))
    loop.spend(30)
    assert loop.time() - asked_at < 31
    assert world.life.agent.generation == before + 1
    assert (world.life.status, world.gates.gate) == (AgentStatus.RUNNING, "open")


def test_an_idle_agent_is_left_alone_for_a_while_where_its_sleep_cannot_be_recorded(
    loop: VirtualLoop, world: MemoryWorld
) -> None:
    """Every check tried again: as long as the disk was full, each agent got a generation and three lines a second."""
    sleeper: Sleeper = loop.do(Sleeper, world.roster, world)
    loop.do(lambda: loop.create_task(sleeper.run()))
    world.disk_full = True
    before = world.life.agent.generation
    loop.spend(25)
    assert world.life.agent.generation == before + 1
    assert loop.do(sleeper.verdict, world.life).why.startswith("awake: it could not be put to sleep, next try in ")
    world.disk_full = False
    loop.spend(20)
    assert world.life.status is AgentStatus.PAUSED


def test_a_state_that_cannot_be_recorded_is_told_once_and_so_is_the_end_of_that(
    loop: VirtualLoop, world: MemoryWorld, caplog: pytest.LogCaptureFixture
) -> None:
    """One error line a second and agent filled the screen of the person that looked for the cause."""
    caplog.set_level(logging.INFO, "hive.agents")
    world.run(world.life.pause(timeout_s=1, now=False, actor="uid:0"))
    world.disk_full = True
    world.run(world.life.resume("uid:0"))
    loop.spend(10)
    world.disk_full = False
    loop.spend(2)
    told = [record.message.split()[0] for record in caplog.records if "record" in record.message]
    assert told == ["agent_not_recorded", "agent_recorded_again"]
    assert world.record.status is AgentStatus.RUNNING
