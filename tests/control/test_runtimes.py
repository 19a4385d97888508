"""The daemon's knowledge of the runtimes: from the helper that is there, and what an agent's view says of it."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest

from hive.control import runtimes
from hive.control.tail import Output
from hive.domain import RuntimeKind
from hive.errors import HiveError, NotPermitted
from hive.link.helper import AskRuntimes, Runtimes
from hive.link.specs import RuntimeCapabilities
from hive.runtimes.docker import DockerRuntime
from hive.runtimes.process import ProcessRuntime
from hive.sandbox.client import SandboxClient
from hive.sandbox.server import HelperServer
from hive.settings.table import Sandbox
from tests.control.box import Box
from tests.waiting import until

STEPS = 10
"""Of the loop, in which a task without I/O gets as far as it can."""


async def capabilities(box: Box) -> dict[str, str] | None:
    found: dict[str, str] | None = (await box.view("bob"))["capabilities"]
    return found


async def test_an_agent_says_what_its_runtime_is_good_for_here(box: Box) -> None:
    await box.everything()
    await box.create()
    await until(lambda: box.services.runtimes.found)
    found = await capabilities(box)
    assert found is not None
    assert (found["start"], found["pause"], found["exec"]) == ("", "", "")
    assert ("takes root" in found["egress"]) is (os.geteuid() != 0)


async def test_nothing_is_said_of_it_before_a_helper_has_been_there(box: Box) -> None:
    await box.everything()
    await box.create()
    await box.stop_daemon()
    await box.stop_helper()
    await box.start_daemon()
    assert await capabilities(box) is None
    await box.start_helper()
    await until(lambda: box.services.runtimes.found)
    assert await capabilities(box) is not None


async def test_a_runtime_whose_engine_is_down_can_do_nothing_and_says_why(box: Box) -> None:
    process = ProcessRuntime(box.paths, subtree=None, log_max_bytes=1_000_000)
    nowhere = Sandbox(docker_socket=str(box.paths.runtime / "docker.sock"))
    docker = DockerRuntime(box.paths, nowhere, log_max_bytes=1_000_000)
    box.helper = HelperServer(box.paths, {RuntimeKind.PROCESS: process, RuntimeKind.DOCKER: docker})
    await box.helper.open()
    await box.start_daemon()
    watch = box.services.runtimes
    await until(lambda: watch.found)
    assert repr(watch) == "<RuntimeWatch process, docker>"
    assert "no Docker engine" in watch.found[RuntimeKind.DOCKER].why_not
    assert watch.found[RuntimeKind.PROCESS].why_not == ""


async def test_an_engine_that_comes_is_seen_at_the_next_look(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtimes, "LOOK_S", 0.01)
    await box.everything()
    runtime: Any = box.helper._runtimes[RuntimeKind.PROCESS]  # type: ignore[union-attr]
    can = RuntimeCapabilities(why_not_freeze="not today")

    async def changed() -> RuntimeCapabilities:
        return can

    monkeypatch.setattr(runtime, "capabilities", changed)
    await until(lambda: box.services.runtimes.found == {RuntimeKind.PROCESS: can})
    monkeypatch.setattr(runtimes, "LOOK_S", 1000.0)


async def test_only_who_runs_agents_may_ask(box: Box) -> None:
    await box.start_helper()
    for role, answer in (("up", Runtimes), ("proxy", NotPermitted)):
        client = SandboxClient(box.paths.sandbox_socket, role=role, epoch="e")
        await until(lambda client=client: client.connected)  # type: ignore[misc]
        try:
            got: object = await client._client.link.ask(AskRuntimes(), Runtimes, timeout_s=5)
        except HiveError as error:
            got = error
        assert type(got) is answer
        client.close()


async def test_a_watch_that_is_cancelled_as_the_helper_comes_back_ends(box: Box) -> None:
    """asyncio.wait_for of Python 3.11 drops a cancellation that comes in the same step as what it waits for: a watch
    that was told to end went on for ever."""
    client = SandboxClient(box.paths.sandbox_socket, role="daemon", epoch="e")
    watch = runtimes.RuntimeWatch(client)
    watching = asyncio.create_task(watch.run())
    for _ in range(STEPS):
        await asyncio.sleep(0)
    watch.helper_here()
    watching.cancel()
    for _ in range(STEPS):
        await asyncio.sleep(0)
    is_over = watching.cancelled()
    watching.cancel()
    client.close()
    assert is_over


class JournalRuntime(ProcessRuntime):
    """Says of its agents what units say: their output is in the journal."""

    async def capabilities(self) -> RuntimeCapabilities:
        return RuntimeCapabilities(journal="agent-{}.service")


async def test_an_agents_output_is_where_its_runtime_says(box: Box) -> None:
    await box.everything()
    agent = (await box.create())["id"]
    await until(lambda: box.services.runtimes.found)
    assert box.output("bob") == Output(box.paths.log(agent))
    await box.stop_helper()
    box.helper = HelperServer(
        box.paths, {RuntimeKind.PROCESS: JournalRuntime(box.paths, subtree=None, log_max_bytes=1_000_000)}
    )
    await box.helper.open()
    await until(lambda: box.output("bob").unit == f"agent-{agent}.service")
