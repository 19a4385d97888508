"""Benches of the conformance suite: one per runtime, each with the same four kinds of agent."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol

import msgspec

from hive.domain import DockerSpec, RuntimeKind
from hive.link.server import bind_private
from hive.link.specs import SandboxSpec
from hive.runtimes.docker import DockerRuntime
from hive.runtimes.jail import bind_in
from hive.runtimes.runtime import RunningAgent, Runtime
from hive.sandbox.server import make_directories
from hive.settings.table import Paths, Sandbox
from tests import docker_engine
from tests.sandbox import harness
from tests.sandbox.harness import A, B

KINDS = {
    "idle": ["sh", "-c", "sleep 1000 & echo ready; wait"],
    "burn": ["sh", "-c", "echo ready; while :; do :; done"],
    "exit7": ["sh", "-c", "echo bye; exit 7"],
    "stubborn": ["sh", "-c", "trap '' TERM; echo ready; while :; do sleep 0.01; done"],
}
"""`ready` is said once it is what it is called."""


class Bench(Protocol):
    """A runtime, and agents for it. `cannot(what)`: why this one does not show `what`, empty where it does.

    Asked for: `mark` (in the environment of its main process), `log` (what it prints), `exit_code`, `find`, `page_out`,
    `other mark` (with another one it is not found), `strays` (frozen, and in no helper's table).
    """

    name: str
    runtime: Runtime

    def spec(self, agent: str, kind: str) -> SandboxSpec: ...
    def cannot(self, what: str) -> str: ...
    async def printed(self, spec: SandboxSpec) -> str: ...


MARKS = {agent: f"HIVE_MARK={secrets.token_hex(16)}" for agent in (A, B)}

OpenBench = Callable[[Paths], AbstractAsyncContextManager[Bench]]


class ProcessBench:
    def __init__(self, paths: Paths, freezer: str) -> None:
        self.name = f"process+{freezer}"
        self.runtime: Runtime = harness.runtime(paths, freezer)
        self._paths = paths
        self._freezer = freezer

    def spec(self, agent: str, kind: str) -> SandboxSpec:
        return harness.spec(self._paths, agent, KINDS[kind])

    def cannot(self, what: str) -> str:
        if what == "strays" and self._freezer == "signals":
            return "nothing tells a process Hive stopped from others without knowing the agent"
        return ""

    async def printed(self, spec: SandboxSpec) -> str:
        return printed(spec)


SCRIPTS = {
    "idle": "import subprocess; p = subprocess.Popen(['sleep', '1000']); print('ready', flush=True); p.wait()",
    "burn": "print('ready', flush=True)\nwhile True: pass",
    "exit7": "import sys; print('bye'); sys.exit(7)",
    "stubborn": "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True)\n"
    "while True: time.sleep(0.01)",
}
"""The same kinds of agent for a template."""


class TemplateBench(ProcessBench):
    """Agents that are forked from a template; this process is who reaps them, as `hive up` is."""

    def __init__(self, paths: Paths, freezer: str) -> None:
        super().__init__(paths, freezer)
        self.name = f"template+{freezer}"
        self.processes = harness.runtime(paths, freezer)
        self.runtime = self.processes

    def spec(self, agent: str, kind: str) -> SandboxSpec:
        return harness.template_spec(self._paths, agent, ["-c", SCRIPTS[kind]])


class DockerBench:
    name = "docker"

    def __init__(self, paths: Paths, engine: docker_engine.DockerEngine) -> None:
        self.engine = engine
        self.runtime: Runtime = DockerRuntime(paths, Sandbox(docker_socket=str(engine.socket)), log_max_bytes=1 << 18)
        self._paths = paths

    def spec(self, agent: str, kind: str) -> SandboxSpec:
        return docker_spec(self._paths, agent, KINDS[kind])

    def cannot(self, what: str) -> str:
        return ""

    async def printed(self, spec: SandboxSpec) -> str:
        return printed(spec)


def docker_spec(paths: Paths, agent: str, command: list[str], **more: object) -> SandboxSpec:
    """A container of the test image without a network."""
    plain = harness.spec(
        paths,
        agent,
        command,
        runtime=RuntimeKind.DOCKER,
        docker=DockerSpec(image=docker_engine.IMAGE),
        egress=[],
        uid=harness.uid_of(agent),
        gid=harness.uid_of(agent),
    )
    return msgspec.structs.replace(plain, **more)


class Floor:
    """Agents on one bench, as the helper would hold them; what is left of them ends with the test."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.runtime = bench.runtime
        self.sockets: dict[str, socket.socket] = {}
        """The listener of each agent."""
        self._running: dict[str, RunningAgent] = {}

    async def prepare(self, kind: str, agent: str = A, **more: object) -> SandboxSpec:
        """Defined, with a socket where it belongs; `more` replaces fields of the kind's spec."""
        spec = msgspec.structs.replace(self.bench.spec(agent, kind), **more)
        await self.runtime.prepare(agent, spec)
        self._bind(agent, spec)
        return spec

    def _bind(self, agent: str, spec: SandboxSpec) -> None:
        place, owner = self.runtime.place(agent, spec), None if spec.uid is None else (spec.uid, spec.gid or spec.uid)
        if (old := self.sockets.get(agent)) is not None:
            old.close()
        if place.jail is None:
            self.sockets[agent] = bind_private(place.path, owner=owner)
        else:
            self.sockets[agent] = bind_in(place.jail, place.path, owner=owner)

    async def start(self, kind: str, agent: str = A, **more: object) -> RunningAgent:
        """Started, and ready where it can say so."""
        spec = await self.prepare(kind, agent, **more)
        running = self._running[agent] = await self.runtime.start(agent, spec, mark=MARKS[agent])
        if kind != "exit7" and not self.bench.cannot("log"):
            async with asyncio.timeout(60):
                while "ready" not in await self.bench.printed(spec):  # noqa: ASYNC110 - nobody tells of it
                    await asyncio.sleep(0.002)
        return running

    def hold(self, running: RunningAgent | None, agent: str = A) -> RunningAgent:
        """An agent that another helper took over."""
        assert running is not None
        self._running[agent] = running
        return running

    async def close(self) -> None:
        for agent, running in self._running.items():
            if running.ended_fd >= 0:
                await running.kill()
                await running.reap()
                running.close()
            await self.runtime.discard(agent, self.bench.spec(agent, "idle"))
        for sock in self.sockets.values():
            sock.close()


def printed(spec: SandboxSpec) -> str:
    """The agent's log so far."""
    try:
        return Path(spec.log).read_text(errors="replace")
    except OSError:
        return ""


@contextlib.asynccontextmanager
async def open_cgroup(paths: Paths) -> AsyncIterator[Bench]:
    make_directories(paths)
    yield ProcessBench(paths, "cgroup")


@contextlib.asynccontextmanager
async def open_signals(paths: Paths) -> AsyncIterator[Bench]:
    make_directories(paths)
    yield ProcessBench(paths, "signals")


@contextlib.asynccontextmanager
async def _open_template(paths: Paths, freezer: str) -> AsyncIterator[Bench]:
    make_directories(paths)
    bench = TemplateBench(paths, freezer)
    with harness.sub_reaper():
        yield bench
        await bench.processes.templates.leave()


def open_template_cgroup(paths: Paths) -> AbstractAsyncContextManager[Bench]:
    return _open_template(paths, "cgroup")


def open_template_signals(paths: Paths) -> AbstractAsyncContextManager[Bench]:
    return _open_template(paths, "signals")


@contextlib.asynccontextmanager
async def open_docker(paths: Paths) -> AsyncIterator[Bench]:
    make_directories(paths)
    engine = docker_engine.shared()
    try:
        yield DockerBench(paths, engine)
    finally:
        engine.clear(paths.state)
