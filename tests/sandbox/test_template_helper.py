"""Templates of a real helper: what it answers of them, and its end: kill -9, a leave, a daemon that is gone."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from hive.errors import NotFound
from hive.runtimes.template_fit import FOUND
from hive.settings.table import Paths
from tests.sandbox.harness import A, B, Daemon, HelperProcess, alive, read_when_written, template_spec, uid_of
from tests.waiting import until

Connect = Callable[..., Awaitable[Daemon]]
StartHelper = Callable[..., HelperProcess]
WAITS = ["-c", "print('up', flush=True)\nimport time; time.sleep(1000)"]


@asynccontextmanager
async def a_forked_agent(paths: Paths, daemon: Daemon) -> AsyncIterator[tuple[int, int]]:
    """Its pid, and its template's."""
    await daemon.client.define(A, template_spec(paths, A, WAITS))
    pid = (await daemon.client.start(A)).pid
    await read_when_written(paths.log(A))
    of_template = (await daemon.client.templates())["t"]
    assert (of_template.state, of_template.agents) == ("ready", (A,))
    assert of_template.pid is not None
    yield pid, of_template.pid


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
async def test_when_the_helper_ends_its_template_ends_and_the_agent_is_adopted_by_the_next(
    paths: Paths, helper_process: StartHelper, connect: Connect, how: signal.Signals
) -> None:
    helper = helper_process()
    daemon, up = await connect(), await connect(role="up")
    async with a_forked_agent(paths, daemon) as (pid, of_template):
        before = daemon.connected, up.connected
        helper.end(how)
        await until(lambda: not alive(of_template))
        assert alive(pid)
        helper_process()
        await until(lambda: daemon.connected > before[0] and up.connected > before[1])
        stat = (await daemon.client.stat([A]))[A]
        assert (stat.state, stat.pid, stat.template_note) == ("running", pid, "")
        assert await daemon.client.templates() == {}
        await daemon.client.freeze(A, 1)
        assert (await daemon.client.stat([A]))[A].state == "frozen"
        await daemon.client.thaw(A)
        await daemon.client.define(B, template_spec(paths, B, WAITS))
        await daemon.client.start(B)
        of_next = (await daemon.client.templates())["t"]
        assert (of_next.agents, of_next.older) == ((A, B), (A,))
        assert of_next.pid != of_template
        ending = daemon.client.stop(A, grace_s=20)
        up.client.reaped(pid, 143)
        assert (await ending).exit_code == 143
        assert not alive(pid)


async def test_an_agents_exit_code_comes_from_hive_up_which_reaps_it(
    paths: Paths, helper_process: StartHelper, connect: Connect
) -> None:
    helper_process()
    daemon, up = await connect(), await connect(role="up")
    async with a_forked_agent(paths, daemon) as (pid, _):
        up.client.reaped(pid, 7)
        os.kill(pid, signal.SIGTERM)
        await until(lambda: daemon.ended)
        assert [(end.agent, end.exit_code) for end in daemon.ended] == [(A, 7)]


async def test_the_reason_why_an_agent_was_not_forked_outlives_the_helper(
    paths: Paths, helper_process: StartHelper, connect: Connect
) -> None:
    helper = helper_process()
    daemon = await connect()
    await daemon.client.define(A, template_spec(paths, A, WAITS, env={"PYTHONHASHSEED": "1"}))
    pid = (await daemon.client.start(A)).pid
    why = "PYTHONHASHSEED is read only when an interpreter starts"
    await until(lambda: "up" in paths.log(A).read_text())
    assert (await daemon.client.stat([A]))[A].template_note == why
    before = daemon.connected
    helper.end(signal.SIGKILL)
    helper_process()
    await until(lambda: daemon.connected > before)
    stat = (await daemon.client.stat([A]))[A]
    assert (stat.pid, stat.template_note) == (pid, why)


@pytest.mark.parametrize("is_forked", [True, False])
async def test_an_agent_that_nobody_wrote_down_tells_what_can_be_known_of_its_start(
    paths: Paths, helper_process: StartHelper, connect: Connect, is_forked: bool
) -> None:
    """As where the helper is killed between a start and its note of it."""
    helper = helper_process()
    daemon = await connect()
    env = {} if is_forked else {"PYTHONHASHSEED": "1"}
    await daemon.client.define(A, template_spec(paths, A, WAITS, env=env))
    pid = (await daemon.client.start(A)).pid
    await until(lambda: "up" in paths.log(A).read_text())
    before = daemon.connected
    helper.end(signal.SIGKILL)
    (table,) = paths.state.rglob(f"{A}.json")
    kept = json.loads(table.read_bytes())
    table.write_text(json.dumps({**kept, "agent": {**kept["agent"], "run": None}}))
    helper_process()
    await until(lambda: daemon.connected > before)
    stat = (await daemon.client.stat([A]))[A]
    assert (stat.state, stat.pid) == ("running", pid)
    assert stat.template_note == ("" if is_forked and os.geteuid() == 0 else FOUND)


async def test_a_template_is_restarted_when_the_daemon_asks(
    paths: Paths, helper_process: StartHelper, connect: Connect
) -> None:
    helper_process()
    daemon = await connect()
    with pytest.raises(NotFound):
        await daemon.client.restart_template("t")
    async with a_forked_agent(paths, daemon) as (pid, of_template):
        fresh = await daemon.client.restart_template("t")
        assert fresh.pid not in (None, of_template)
        assert (fresh.state, fresh.agents, fresh.older) == ("ready", (A,), (A,))
        assert alive(pid)
        assert not alive(of_template)


async def test_a_program_runs_inside_a_forked_agent(
    paths: Paths, helper_process: StartHelper, connect: Connect
) -> None:
    """In its network, with its user and its environment, which /proc does not have of the template."""
    helper_process()
    daemon = await connect()
    async with a_forked_agent(paths, daemon) as (pid, _):
        shown = ["sh", "-c", "readlink /proc/self/ns/net; id -u; echo $HOME"]
        execution = await daemon.client.execute(A, "00000001", shown, None)
        assert await execution.ended == 0
        said = os.read(execution.descriptors[1], 4096).decode().split()
        uid = os.geteuid() if uid_of(A) is None else uid_of(A)
        assert said == [os.readlink(f"/proc/{pid}/ns/net"), str(uid), str(paths.home(A))]
        for descriptor in execution.descriptors:
            os.close(descriptor)


async def test_a_daemon_that_is_gone_changes_nothing_for_a_template_and_its_agents(
    paths: Paths, helper_process: StartHelper, connect: Connect
) -> None:
    helper_process()
    daemon = await connect()
    async with a_forked_agent(paths, daemon) as (pid, of_template):
        daemon.client.close()
        next_daemon = await connect()
        found = (await next_daemon.client.templates())["t"]
        assert (found.pid, found.agents) == (of_template, (A,))
        assert alive(pid)
