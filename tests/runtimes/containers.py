"""Containers of the test image, held as the helper holds them, and what is asked of them again and again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
from collections.abc import AsyncIterator

import pytest

from hive.domain import DockerSpec, Limits
from hive.host.engine import Frames
from hive.host.process import ProcessTable
from hive.link.specs import SandboxSpec
from hive.runtimes.container import RunningContainer
from hive.runtimes.container_group import ContainerGroup
from hive.runtimes.entering import EnteredProgram
from hive.sandbox.server import make_directories
from hive.settings.table import Paths
from tests import docker_engine
from tests.docker_engine import DockerEngine, PrivateEngine
from tests.runtimes.benches import DockerBench, Floor, printed
from tests.sandbox.harness import A
from tests.waiting import until

ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="agents have a user of their own only where Hive is root")
WITH_PROGRAMS = DockerSpec(image=docker_engine.IMAGE, mounts=[docker_engine.HOST_PROGRAMS])
GENTLY = Limits(cpu=0.2)
"""For what burns CPU beside an engine that has to start again."""
COUNTS = ["sh", "-c", "echo ready; i=0; while :; do i=$((i+1)); echo line $i $1; sleep 0.01; done", "sh"]
"""Prints `line 1`, `line 2`, … and whatever is given to it, 100 a second."""

FILLS = ["sh", "-c", "until [ -e $HOME/go ]; do sleep 0.01; done; cat /dev/zero > /tmp/fill"]
"""Takes all memory it is given, once there is a file `go` in its home."""


@contextlib.asynccontextmanager
async def open_floor(paths: Paths, engine: DockerEngine) -> AsyncIterator[Floor]:
    make_directories(paths)
    floor = Floor(DockerBench(paths, engine))
    yield floor
    if not engine.answers() and isinstance(engine, PrivateEngine):
        engine.start()
    await floor.close()
    engine.clear(paths.state)


async def started(floor: Floor, kind: str = "idle", agent: str = A, **more: object) -> RunningContainer:
    running = await floor.start(kind, agent, **more)
    assert isinstance(running, RunningContainer)
    return running


async def ran(floor: Floor, script: str, agent: str = A, **more: object) -> str:
    """The output of a script in a container, once it ended."""
    running = await started(floor, "exit7", agent, command=["sh", "-c", script], **more)
    await until(lambda: has_ended(running))
    await running.reap()
    running.close()
    return printed(floor.bench.spec(A, "idle"))


async def inside(running: RunningContainer, command: list[str], *, run: str = "0badcafe") -> tuple[int | None, bytes]:
    """Runs a program in it; how it ended, and what it printed."""
    spec = docker_spec_of(command)
    program = EnteredProgram(run, spec, "HIVE_MARK=test", f"HIVE_EXEC=test.test.{run}", None)
    entered = await running.enter(program)
    (descriptor,) = entered.descriptors
    try:
        code = await entered.ended()
        frames, said = Frames(), b""
        os.set_blocking(descriptor, True)
        while data := await asyncio.to_thread(os.read, descriptor, 65536):
            said += b"".join(frames.feed(data))
        return code, said
    finally:
        await entered.kill()
        os.close(descriptor)
        entered.close()


def docker_spec_of(command: list[str]) -> SandboxSpec:
    return SandboxSpec(name="a", command=command, env={}, home="/h", log="/l")


def has_ended(running: RunningContainer) -> bool:
    return bool(select.select([running.ended_fd], [], [], 0)[0])


async def freeze(running: RunningContainer) -> None:
    await running.freeze(deadline_s=5, give_up=lambda: False)


async def thaw(running: RunningContainer) -> None:
    await running.thaw(deadline_s=5)


def truth(running: RunningContainer) -> str:
    return running.stat(ProcessTable()).state


def group(running: RunningContainer) -> ContainerGroup:
    found = ContainerGroup.of(running.run.main.pid, running.run.handle)
    assert found is not None
    return found


async def works(running: RunningContainer) -> None:
    """Its processes make progress."""
    before = running.stat(ProcessTable()).cpu_us
    await until(lambda: running.stat(ProcessTable()).cpu_us > before)


def paused(engine: DockerEngine, running: RunningContainer) -> bool:
    state = engine.state(running.run.handle)
    assert state is not None
    return bool(state["Paused"])


def lines_of(text: str) -> list[int]:
    return [int(line.split()[1]) for line in text.splitlines() if line.startswith("line ")]
