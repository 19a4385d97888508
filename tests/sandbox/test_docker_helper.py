"""A helper with containers, asked over its real link: what daemon and `hive up` do with it."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import pytest

from hive.domain import RuntimeKind
from hive.errors import DependencyDown, NotFound, NotSupported, WrongState
from hive.host.process import spawn
from hive.link.specs import SandboxSpec
from hive.runtimes.docker import DockerRuntime
from hive.runtimes.process import ProcessRuntime
from hive.runtimes.runtime import Runtime
from hive.sandbox.server import HelperServer
from hive.sandbox.supervised_agent import FreezeLimits
from hive.settings.table import Paths, Sandbox
from tests import docker_engine
from tests.docker_engine import DockerEngine
from tests.runtimes.benches import KINDS, docker_spec, printed
from tests.sandbox.harness import A, B, Daemon, spec
from tests.waiting import until

pytestmark = pytest.mark.docker

OpenHelper = Callable[..., Awaitable[HelperServer]]
Connect = Callable[..., Awaitable[Daemon]]
StartHelper = Callable[[], "HelperProcess"]


@pytest.fixture
def engine(paths: Paths) -> Iterator[DockerEngine]:
    engine = docker_engine.shared()
    yield engine
    engine.clear(paths.state)


@pytest.fixture
async def open_docker(paths: Paths, engine: DockerEngine) -> AsyncIterator[OpenHelper]:
    """Helpers in this process; what a test left open is left in order."""
    opened: list[HelperServer] = []

    async def open_(docker_socket: str = str(engine.socket), **limits: float) -> HelperServer:
        docker = DockerRuntime(paths, Sandbox(docker_socket=docker_socket), log_max_bytes=1 << 17)
        process = ProcessRuntime(paths, subtree=None, log_max_bytes=65536)
        runtimes: dict[RuntimeKind, Runtime] = {RuntimeKind.DOCKER: docker, RuntimeKind.PROCESS: process}
        helper = HelperServer(paths, runtimes, limits=FreezeLimits(**{"log_check_s": 0.02, **limits}))
        await helper.open()
        opened.append(helper)
        return helper

    yield open_
    for helper in opened:
        if not helper.left:
            await helper.leave()


def container(paths: Paths, kind: str = "idle", agent: str = A, **more: object) -> SandboxSpec:
    return docker_spec(paths, agent, KINDS[kind], **more)


async def state(daemon: Daemon, agent: str = A) -> str:
    return (await daemon.client.stat([agent]))[agent].state


async def test_a_container_lives_its_life_over_the_link(
    paths: Paths, engine: DockerEngine, open_docker: OpenHelper, connect: Connect
) -> None:
    await open_docker()
    daemon = await connect()
    socket = await daemon.client.define(A, container(paths, "burn"))
    assert socket.is_socket()
    pid = (await daemon.client.start(A)).pid
    with pytest.raises(WrongState, match=str(pid)):
        await daemon.client.start(A)
    await until(lambda: "ready" in printed(container(paths)))
    frozen = await daemon.client.freeze(A, 1)
    assert frozen.how == "docker"
    await daemon.client.confirm(A, 1)
    assert await state(daemon) == "frozen"
    await daemon.client.thaw(A)
    assert await state(daemon) == "running"
    assert (await daemon.client.stop(A, grace_s=30)).exit_code == 128 + signal.SIGTERM
    assert await state(daemon) == "gone"
    await daemon.client.remove(A)
    assert not socket.exists()
    assert not paths.home(A).exists()
    assert engine.containers(paths.state) == engine.networks(paths.state) == []


async def test_its_end_is_told_with_its_exit_code_and_its_log_is_whole_then(
    paths: Paths, open_docker: OpenHelper, connect: Connect
) -> None:
    await open_docker()
    daemon = await connect()
    await daemon.client.define(A, container(paths, "exit7"))
    await daemon.client.start(A)
    await until(lambda: daemon.ended)
    assert (daemon.ended[0].agent, daemon.ended[0].exit_code) == (A, 7)
    assert printed(container(paths)) == "bye\n"


async def test_a_container_and_a_process_live_side_by_side(
    paths: Paths, open_docker: OpenHelper, connect: Connect
) -> None:
    await open_docker()
    daemon = await connect()
    await daemon.client.define(A, container(paths))
    await daemon.client.define(B, spec(paths, B, KINDS["idle"]))
    for agent in (A, B):
        await daemon.client.start(agent)
    truths = await daemon.client.stat()
    assert {agent: truth.freezer for agent, truth in truths.items()} == {A: "docker", B: "signals"}


async def test_a_sleeper_nobody_confirms_is_woken(paths: Paths, open_docker: OpenHelper, connect: Connect) -> None:
    await open_docker(confirm_s=0.05)
    daemon = await connect()
    await daemon.client.define(A, container(paths))
    await daemon.client.start(A)
    await daemon.client.freeze(A, 1)
    await until(lambda: daemon.thawed_alone)
    assert await state(daemon) == "running"


async def test_a_container_removed_by_hand_asleep_is_told_as_ended(
    paths: Paths, engine: DockerEngine, open_docker: OpenHelper, connect: Connect
) -> None:
    await open_docker()
    daemon = await connect()
    await daemon.client.define(A, container(paths))
    pid = (await daemon.client.start(A)).pid
    await daemon.client.freeze(A, 1)
    await daemon.client.confirm(A, 1)
    (found,) = engine.containers(paths.state)
    engine.call("DELETE", f"/containers/{found['Id']}?force=1")
    await until(lambda: daemon.ended)
    assert (daemon.ended[0].agent, daemon.ended[0].exit_code, daemon.ended[0].pid) == (A, None, pid)
    assert (await daemon.client.start(A)).pid != pid


async def test_what_a_human_paused_stays_so_when_helpers_come_and_go(
    paths: Paths, engine: DockerEngine, open_docker: OpenHelper, connect: Connect
) -> None:
    """The leaving one thaws everyone, the coming one reconciles with a daemon that holds the agent awake."""
    first = await open_docker()
    daemon = await connect()
    await daemon.client.define(A, container(paths))
    await daemon.client.start(A)
    (found,) = engine.containers(paths.state)
    assert engine.do(found["Id"], "pause") == 204
    await first.leave()
    await open_docker(adopted_confirm_s=0.05)
    await until(lambda: daemon.client.connected and daemon.connected == 2)
    truths = await daemon.client.reconcile({})
    assert truths[A].freezer == "docker, paused by hand"
    await daemon.client.thaw(A)
    told = engine.state(found["Id"])
    assert told is not None
    assert told["Paused"]
    assert daemon.thawed_alone == []


async def test_what_hive_paused_is_confirmed_to_the_next_helper_or_woken_by_it(
    paths: Paths, docker_process: StartHelper, connect: Connect, open_docker: OpenHelper
) -> None:
    """The first helper is killed: it thaws nobody."""
    helper = docker_process()
    daemon = await connect()
    for agent in (A, B):
        await daemon.client.define(agent, container(paths, agent=agent))
        await daemon.client.start(agent)
        await daemon.client.freeze(agent, 3)
        await daemon.client.confirm(agent, 3)
    helper.kill()
    await open_docker()
    await until(lambda: daemon.connected == 2)
    truths = await daemon.client.reconcile({A: 3})
    assert {agent: truth.state for agent, truth in truths.items()} == {A: "frozen", B: "running"}
    await daemon.client.thaw(A)
    assert await state(daemon) == "running"


async def test_a_helper_killed_while_its_agents_print_loses_no_agent_and_no_line(
    paths: Paths, docker_process: StartHelper, connect: Connect, open_docker: OpenHelper
) -> None:
    helper = docker_process()
    daemon = await connect()
    counts = ["sh", "-c", "i=0; while :; do i=$((i+1)); echo line $i; sleep 0.005; done"]
    await daemon.client.define(A, docker_spec(paths, A, counts))
    pid = (await daemon.client.start(A)).pid
    await until(lambda: "line 50\n" in printed(container(paths)))
    helper.kill()
    await open_docker()
    await until(lambda: daemon.connected == 2)
    assert (await daemon.client.stat())[A].pid == pid
    last = int(printed(container(paths)).split()[-1])
    await until(lambda: f"line {last + 100}\n" in printed(container(paths)))
    await daemon.client.stop(A, grace_s=0)
    numbers = [int(line.split()[1]) for line in printed(container(paths)).splitlines()]
    assert numbers == list(range(1, len(numbers) + 1))


async def test_without_an_engine_the_answer_says_so_and_other_agents_start(
    paths: Paths, open_docker: OpenHelper, connect: Connect
) -> None:
    await open_docker(docker_socket=str(paths.runtime / "no-engine.sock"))
    daemon = await connect()
    await daemon.client.define(A, container(paths))
    with pytest.raises(DependencyDown) as raised:
        await daemon.client.start(A)
    assert "systemctl start docker" in raised.value.hint
    assert await state(daemon) == "gone"
    await daemon.client.define(B, spec(paths, B, KINDS["idle"]))
    await daemon.client.start(B)
    await daemon.client.remove(A)


async def test_what_a_container_may_not_have_is_refused_when_it_is_defined(
    paths: Paths, open_docker: OpenHelper, connect: Connect
) -> None:
    await open_docker()
    daemon = await connect()
    with pytest.raises(NotSupported, match="some networks"):
        await daemon.client.define(A, container(paths, egress=["192.0.2.0/24"]))
    with pytest.raises(NotFound):
        await daemon.client.start(A)
    assert not paths.home(A).exists()


async def test_an_agent_may_become_a_process_and_a_container_again(
    paths: Paths, engine: DockerEngine, open_docker: OpenHelper, connect: Connect
) -> None:
    await open_docker()
    daemon = await connect()
    await daemon.client.define(A, container(paths))
    await daemon.client.start(A)
    with pytest.raises(WrongState, match="runs as docker"):
        await daemon.client.define(A, spec(paths, A, KINDS["idle"]))
    await daemon.client.stop(A, grace_s=0)
    await daemon.client.define(A, spec(paths, A, KINDS["idle"]))
    assert engine.containers(paths.state) == []
    await daemon.client.start(A)
    await daemon.client.stop(A, grace_s=0)
    await daemon.client.define(A, container(paths))
    await daemon.client.start(A)
    assert (await daemon.client.stat())[A].freezer == "docker"


class HelperProcess:
    """A helper with containers as a process of its own, to be killed."""

    PROGRAM = """
import asyncio, sys
from pathlib import Path
from hive.domain import RuntimeKind
from hive.runtimes.docker import DockerRuntime
from hive.sandbox.server import HelperServer
from hive.settings.table import Paths, Sandbox
state, runtime, docker = sys.argv[1:]
paths = Paths(Path(state), Path(runtime))
async def main():
    kinds = {RuntimeKind.DOCKER: DockerRuntime(paths, Sandbox(docker_socket=docker), log_max_bytes=1 << 17)}
    await HelperServer(paths, kinds).open()
    await asyncio.Event().wait()
asyncio.run(main())
"""

    def __init__(self, paths: Paths, engine: DockerEngine) -> None:
        command = [sys.executable, "-c", self.PROGRAM, str(paths.state), str(paths.runtime), str(engine.socket)]
        self._process = spawn(command, env=dict(os.environ), pdeathsig=signal.SIGKILL)

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()


@pytest.fixture
def docker_process(paths: Paths, engine: DockerEngine) -> Iterator[StartHelper]:
    """The first helper of a test that kills it."""
    started: list[HelperProcess] = []

    def start() -> HelperProcess:
        started.append(HelperProcess(paths, engine))
        return started[-1]

    yield start
    for helper in started:
        helper.kill()
