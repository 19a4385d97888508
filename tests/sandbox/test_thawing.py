"""`hive sandbox-thaw`: nobody stays frozen where a helper was killed, and none is thawed behind a living one's back."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable

import pytest

from hive.errors import DependencyDown
from hive.host.cgroup import Leaf, Subtree
from hive.runtimes.process import ProcessRuntime
from hive.sandbox.thawing import thaw_everybody
from hive.settings.table import Paths
from tests.sandbox.harness import SLEEP, A, B, Daemon, HelperProcess, running, runtime
from tests.waiting import until

Connect = Callable[..., Awaitable[Daemon]]
StartHelper = Callable[..., HelperProcess]


@pytest.fixture(params=[pytest.param("cgroup", marks=pytest.mark.cgroup)])
def freezer(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def thaw(paths: Paths) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "hive", "sandbox-thaw"]
    places = ["--state-dir", str(paths.state), "--runtime-dir", str(paths.runtime)]
    return subprocess.run([*command, *places], capture_output=True, text=True, check=False)


def leaf(paths: Paths, agent: str) -> Leaf:
    subtree = Subtree.find(paths.state)
    assert subtree is not None
    return subtree.leaf(agent)


async def asleep(daemon: Daemon, paths: Paths, agent: str) -> None:
    await running(daemon, paths, SLEEP, agent)
    await daemon.client.freeze(agent, 1)
    assert leaf(paths, agent).is_frozen()


async def test_who_a_killed_helper_left_frozen_is_thawed(
    paths: Paths, helper_process: StartHelper, connect: Connect
) -> None:
    helper = helper_process()
    daemon = await connect()
    for agent in (A, B):
        await asleep(daemon, paths, agent)
    helper.process.kill()
    helper.process.wait()
    done = await asyncio.to_thread(thaw, paths)
    assert done.returncode == 0, done.stderr
    assert "everybody_thawed agents=2" in done.stderr
    await until(lambda: not any(leaf(paths, agent).is_frozen() for agent in (A, B)))
    assert all(leaf(paths, agent).pids() for agent in (A, B)), "they live on"


async def test_a_living_helper_is_not_interfered_with(
    paths: Paths, helper_process: StartHelper, connect: Connect
) -> None:
    helper_process()
    await asleep(await connect(), paths, A)
    refused = await asyncio.to_thread(thaw, paths)
    assert refused.returncode == 1
    assert "a helper uses" in refused.stderr
    assert leaf(paths, A).is_frozen()


async def test_where_no_helper_ever_was_nobody_is_thawed(paths: Paths) -> None:
    paths.state.mkdir()
    done = await asyncio.to_thread(thaw, paths)
    assert (done.returncode, "everybody_thawed agents=0" in done.stderr) == (0, True)


class Silent(ProcessRuntime):
    """Its engine does not answer."""

    async def thaw_strays(self, known: set[str]) -> list[str]:
        raise DependencyDown("no engine here")


async def test_a_runtime_that_cannot_be_asked_keeps_no_other_from_it(
    paths: Paths, helper_process: StartHelper, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    helper = helper_process()
    await asleep(await connect(), paths, A)
    helper.process.kill()
    helper.process.wait()
    silent = Silent(paths, subtree=None, log_max_bytes=4096)
    assert await thaw_everybody([silent, runtime(paths, "cgroup")]) == [A]
    await until(lambda: not leaf(paths, A).is_frozen())
    assert "not_thawed" in caplog.text
