"""A state directory agents of any uid can pass through, and a helper in it, in this process or not; a Docker engine."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hive.host.cgroup import Subtree
from hive.sandbox.server import HelperServer
from hive.sandbox.supervised_agent import FreezeLimits
from hive.settings.table import Paths
from tests import docker_engine
from tests.docker_engine import DockerEngine
from tests.sandbox.harness import Daemon, HelperProcess, OpenHelper, kill_all_under, runtime, runtimes
from tests.waiting import until


@pytest.fixture
def paths() -> Iterator[Paths]:
    """Not pytest's tmp_path: that is 0700, and sockets in it have long names."""
    top = Path(tempfile.mkdtemp(prefix="hive-"))
    top.chmod(0o711)
    found = Paths(state=top / "d", runtime=top / "r")
    yield found
    kill_all_under(found)
    shutil.rmtree(top)


def has_cgroup() -> bool:
    """Whether agents can have control groups here."""
    if (subtree := Subtree.find(Path(tempfile.gettempdir()) / f"hive-probe-{os.getpid()}")) is None:
        return False
    subtree.remove()
    return True


@pytest.fixture(
    params=[
        pytest.param("cgroup", marks=pytest.mark.cgroup),
        # What both do alike is in test_conformance.py, for both.
        pytest.param("signals", marks=[pytest.mark.wide] if has_cgroup() else []),
    ]
)
def freezer(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def open_helper(paths: Paths, freezer: str) -> AsyncIterator[OpenHelper]:
    helpers: list[HelperServer] = []

    async def open_(**limits: float) -> HelperServer:
        helper = HelperServer(paths, runtimes(paths, freezer), limits=FreezeLimits(**{"log_check_s": 0.02, **limits}))
        await helper.open()
        helpers.append(helper)
        return helper

    yield open_
    for helper in helpers:
        if not helper.left:
            await helper.leave()


@pytest.fixture
async def connect(paths: Paths) -> AsyncIterator[Callable[..., Awaitable[Daemon]]]:
    daemons: list[Daemon] = []

    async def connect_(**options: str) -> Daemon:
        daemon = Daemon(paths, **options)
        daemons.append(daemon)
        await until(lambda: daemon.client.connected)
        return daemon

    yield connect_
    for daemon in daemons:
        daemon.client.close()
    await asyncio.sleep(0)


@pytest.fixture
async def daemon(open_helper: OpenHelper, connect: Callable[..., Awaitable[Daemon]]) -> Daemon:
    """Connected to a helper in this process."""
    await open_helper()
    return await connect()


@pytest.fixture
def helper_process(paths: Paths, freezer: str) -> Iterator[Callable[..., HelperProcess]]:
    runtime(paths, freezer)
    started: list[HelperProcess] = []

    def start(**options: Any) -> HelperProcess:
        started.append(HelperProcess(paths, freezer, **options))
        return started[-1]

    yield start
    for helper in started:
        if helper.process.poll() is None:
            helper.end(signal.SIGKILL)


@pytest.fixture
def engine() -> DockerEngine:
    """Not to be killed: it is everybody's."""
    return docker_engine.shared()
