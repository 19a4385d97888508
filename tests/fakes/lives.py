"""One agent's life in the world of agent_world.py, brought to where a test begins."""

from __future__ import annotations

from typing import Any

from hive.domain import Agent, AgentSpec, AgentStatus, RestartPolicy, WakeCause
from hive.link.messages import Open, Refused
from tests.fakes.agent_world import MemoryWorld, VirtualLoop

RUNNING, PAUSED = AgentStatus.RUNNING, AgentStatus.PAUSED


def agent_of(restart: RestartPolicy = RestartPolicy.NO, **more: Any) -> Agent:
    return Agent(id="a1", spec=AgentSpec(name="bob", command=["/bin/true"], restart=restart, **more))


def started(
    loop: VirtualLoop,
    *,
    restart: RestartPolicy = RestartPolicy.NO,
    delays: tuple[float, ...] = (0.001,),
    **more: Any,
) -> MemoryWorld:
    """Runs, past its minimum awake time. `more`: fields of its spec."""

    async def make() -> MemoryWorld:
        return MemoryWorld(loop, agent_of(restart, **more), delays)

    world: MemoryWorld = loop.run_until_complete(make())
    world.run(world.life.start("uid:0"))
    loop.spend(60)
    world.helper.calls.clear()
    return world


def asleep(loop: VirtualLoop, **more: Any) -> MemoryWorld:
    """Sleeps light."""
    world = started(loop, **more)
    world.run(world.life.pause(timeout_s=1, now=False, actor="uid:0"))
    loop.spend(0.01)
    assert (world.life.status, world.helper.state, world.gates.gate) == (PAUSED, "frozen", "asleep")
    return world


def deep_asleep(loop: VirtualLoop) -> MemoryWorld:
    """Sleeps, its memory paged out."""
    world = asleep(loop)
    world.run(world.life.go_deep())
    loop.spend(0.01)
    assert (world.record.depth, world.record.depth_goal, world.helper.swap_bytes) == (
        "deep",
        "deep",
        world.helper.HOLDS,
    )
    world.helper.calls.clear()
    return world


def agree(world: MemoryWorld, status: AgentStatus, truth: str, gate: str) -> None:
    """Memory, record, sandbox and gate say the same."""
    world.loop.spend(0.01)
    assert world.life.status is status
    assert world.record.status is status
    assert world.record.generation == world.life.agent.generation
    assert world.helper.state == truth
    assert world.gates.gate == gate
    assert world.wrong == []
    assert world.life.waiting == 0


def wake(world: MemoryWorld, cause: WakeCause = WakeCause.INGRESS) -> list[Open | Refused]:
    answers: list[Open | Refused] = []
    world.loop.do(world.life.wake, cause, answers.append)
    return answers
