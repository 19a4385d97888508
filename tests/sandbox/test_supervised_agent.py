"""Events in between: a page-out that is overtaken, a helper that lacks a runtime, an engine that is down."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from hive.domain import DockerSpec, RuntimeKind
from hive.errors import DependencyDown, NotSupported, WrongState
from hive.link.helper import PagedOut
from hive.link.specs import SandboxSpec
from hive.runtimes.process import ProcessRuntime, RunningProcess
from hive.runtimes.runtime import Run, RunningAgent
from hive.sandbox.server import HelperServer
from hive.settings.table import Paths
from tests.sandbox.harness import SLEEP, A, B, Daemon, OpenHelper, alive, running, runtime, spec
from tests.waiting import until

Connect = Callable[..., Awaitable[Daemon]]


# --- logs --------------------------------------------------------------------------------------------------------


async def test_a_sleepers_log_is_looked_at_once_and_anew_after_it_was_awake(
    paths: Paths, open_helper: OpenHelper, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = Counter[str]()
    monkeypatch.setattr(ProcessRuntime, "trim_log", lambda _, spec: looked.update([spec.log]))
    sleeper, clock = str(paths.log(A)), str(paths.log(B))
    await open_helper()
    daemon = await connect()

    async def looked_in_rounds(rounds: int) -> int:
        """The number of looks at the sleeper, in so many at the other."""
        before, until_round = looked[sleeper], looked[clock] + rounds
        await until(lambda: looked[clock] >= until_round)
        return looked[sleeper] - before

    await running(daemon, paths, SLEEP)
    await running(daemon, paths, SLEEP, agent=B)
    for _ in range(2):
        assert await looked_in_rounds(3) >= 2
        await daemon.client.freeze(A, 1)
        assert await looked_in_rounds(3) <= 1  # for what it wrote last, unless that was seen before the answer came
        assert await looked_in_rounds(3) == 0
        await daemon.client.thaw(A)


async def test_what_a_sleeper_wrote_last_is_cut_back_while_it_sleeps(
    paths: Paths, open_helper: OpenHelper, connect: Connect
) -> None:
    await open_helper(log_check_s=0.3)
    daemon = await connect()
    await running(daemon, paths, ["sh", "-c", "seq 100000; touch written; exec sleep 1000"])
    await until((paths.home(A) / "written").exists)
    await daemon.client.freeze(A, 1)
    await until(lambda: paths.log(A).stat().st_size <= 4096)


# --- page-out ----------------------------------------------------------------------------------------------------


class SlowPageOut:
    """Stands for a slice of a page-out that lasts until `end` is set; then it asks whether to go on, or does not."""

    def __init__(self) -> None:
        self.began = 0
        self.end = asyncio.Event()
        self.at_once = 0
        self.gave_up: list[bool] = []
        self.closed_meanwhile = False

    async def page_out(self, running: RunningProcess, *, give_up: Callable[[], bool]) -> PagedOut:
        self.began += 1
        self.at_once += 1
        assert self.at_once == 1, "one at a time"
        await self.end.wait()
        self.at_once -= 1
        self.gave_up.append(give_up())
        self.closed_meanwhile |= running.ended_fd < 0
        return PagedOut(took_ms=1, kept_bytes=1, swap_bytes=1, how="test")


@pytest.fixture
async def slow(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[SlowPageOut]:
    found = SlowPageOut()

    async def page_out(self: RunningProcess, *, give_up: Callable[[], bool]) -> PagedOut:
        return await found.page_out(self, give_up=give_up)

    monkeypatch.setattr(RunningProcess, "page_out", page_out)
    yield found
    found.end.set()


async def paging(daemon: Daemon, paths: Paths, slow: SlowPageOut) -> tuple[int, asyncio.Task[PagedOut]]:
    """An agent asleep whose memory is being paged out; its pid."""
    pid = await running(daemon, paths, SLEEP)
    await daemon.client.freeze(A, 3)
    await daemon.client.confirm(A, 3)
    task = asyncio.create_task(daemon.client.page_out(A, 3))
    await until(lambda: slow.began)
    return pid, task


async def test_a_page_out_that_nobody_disturbs_says_what_it_did(
    paths: Paths, open_helper: OpenHelper, connect: Connect, slow: SlowPageOut
) -> None:
    await open_helper()
    _, task = await paging(await connect(), paths, slow)
    slow.end.set()
    assert (await task).how == "test"
    assert slow.gave_up == [False]


async def test_a_thaw_does_not_wait_for_a_page_out_which_is_void_then(
    paths: Paths, daemon: Daemon, slow: SlowPageOut
) -> None:
    """Its last slice may be done when the thaw comes: the daemon must not write down an agent as deep that is awake."""
    _, task = await paging(daemon, paths, slow)
    await daemon.client.thaw(A)
    assert (await daemon.client.stat())[A].state == "running"
    assert not task.done()
    slow.end.set()
    with pytest.raises(WrongState, match="woken"):
        await task
    assert slow.gave_up == [True]


@pytest.mark.parametrize("verb", ["stop", "remove", "end"])
async def test_nothing_is_closed_under_the_hands_of_a_page_out(
    paths: Paths, open_helper: OpenHelper, connect: Connect, slow: SlowPageOut, verb: str
) -> None:
    helper = await open_helper()
    daemon = await connect()
    pid, task = await paging(daemon, paths, slow)
    ending: Awaitable[object]
    if verb == "end":
        os.kill(pid, signal.SIGKILL)
        ending = until(lambda: daemon.ended)
    else:
        ending = asyncio.ensure_future(daemon.client.stop(A, grace_s=1) if verb == "stop" else daemon.client.remove(A))
    await until(lambda: not alive(pid) and helper._held[A]._exited.is_set())
    slow.end.set()
    await ending
    with pytest.raises(WrongState):
        await task
    assert slow.gave_up == [True]
    assert not slow.closed_meanwhile


async def test_a_page_out_of_an_earlier_sleep_never_touches_the_next_start(
    paths: Paths, open_helper: OpenHelper, connect: Connect, slow: SlowPageOut
) -> None:
    """The agent is stopped while a second page-out waits for the first: started again, it is not asleep at all."""
    helper = await open_helper()
    daemon = await connect()
    _, first = await paging(daemon, paths, slow)
    second = asyncio.create_task(daemon.client.page_out(A, 3))
    stopping = asyncio.create_task(daemon.client.stop(A, grace_s=1))
    await until(lambda: not helper._held[A]._asleep)
    slow.end.set()
    await stopping
    await daemon.client.start(A)
    for task in (first, second):
        with pytest.raises(WrongState):
            await task
    assert slow.began == 1


@pytest.mark.parametrize("state", ["awake", "not confirmed", "another generation"])
async def test_only_who_sleeps_for_this_generation_is_paged_out(
    paths: Paths, daemon: Daemon, slow: SlowPageOut, state: str
) -> None:
    await running(daemon, paths, SLEEP)
    if state != "awake":
        await daemon.client.freeze(A, 3)
    if state == "another generation":
        await daemon.client.confirm(A, 3)
    with pytest.raises(WrongState, match="not asleep"):
        await daemon.client.page_out(A, 4 if state == "another generation" else 3)
    assert slow.began == 0


# --- runtimes that are not there ---------------------------------------------------------------------------------


async def test_a_helper_that_lacks_a_runtime_starts_and_holds_its_agents_as_gone(
    paths: Paths, freezer: str, open_helper: OpenHelper, connect: Connect
) -> None:
    first = await open_helper()
    daemon = await connect()
    pid = await running(daemon, paths, SLEEP)
    await first.leave()
    helper = HelperServer(paths, {})
    await helper.open()
    await until(lambda: daemon.connected == 2)
    assert (await daemon.client.stat())[A].state == "gone"
    for verb in (daemon.client.start(A), daemon.client.stop(A, grace_s=1)):
        with pytest.raises(NotSupported, match="runs no process agents"):
            await verb
    assert alive(pid), "it is not this helper's to end"
    await helper.leave()
    await open_helper()
    await until(lambda: daemon.connected == 3)
    assert (await daemon.client.stat())[A].pid == pid


async def test_an_agent_of_a_runtime_that_is_not_there_can_be_forgotten(
    paths: Paths, freezer: str, open_helper: OpenHelper, connect: Connect
) -> None:
    first = await open_helper()
    daemon = await connect()
    await daemon.client.define(A, spec(paths, A, SLEEP))
    await first.leave()
    helper = HelperServer(paths, {})
    await helper.open()
    await until(lambda: daemon.connected == 2)
    await daemon.client.remove(A)
    assert await daemon.client.stat() == {}
    assert not list(paths.sandbox_table.iterdir())
    await helper.leave()


class EngineDown(ProcessRuntime):
    """A runtime that has to ask an engine, which does not answer for now."""

    down = True

    async def adopt(self, agent: str, spec: SandboxSpec, run: Run, *, mark: str) -> RunningAgent | None:
        if self.down:
            raise DependencyDown("the engine does not answer")
        return await super().adopt(agent, spec, run, mark=mark)


async def test_an_agent_whose_engine_is_down_at_the_start_is_taken_up_when_it_is_back(
    paths: Paths, freezer: str, open_helper: OpenHelper, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    """It runs on all the while, so nothing may be started beside it, and nobody may be told that it was stopped."""
    first = await open_helper()
    daemon = await connect()
    pid = await running(daemon, paths, SLEEP)
    await running(daemon, paths, SLEEP, agent=B)
    await first.leave()
    asked = EngineDown(paths, subtree=runtime(paths, freezer)._subtree, log_max_bytes=4096)
    helper = HelperServer(paths, {RuntimeKind.PROCESS: asked})
    await helper.open()
    await until(lambda: daemon.connected == 2)
    assert "agent_not_adopted agent=a error=the engine does not answer" in caplog.text
    for verb in (daemon.client.start(A), daemon.client.stop(A, grace_s=1), daemon.client.remove(A)):
        with pytest.raises(DependencyDown):
            await verb
    asked.down = False
    with pytest.raises(WrongState, match=f"running as pid {pid}"):
        await daemon.client.start(A)
    assert (await daemon.client.stat())[A].pid == pid
    ended = await daemon.client.stop(B, grace_s=1)
    assert ended.pid > 0
    assert not alive(ended.pid)
    await helper.leave()


async def test_an_end_that_cannot_be_looked_into_now_is_told_later(
    paths: Paths, open_helper: OpenHelper, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    await open_helper(settle_again_s=0.05)
    daemon = await connect()
    asked, kill = 0, RunningProcess.kill

    async def down_at_first(self: RunningProcess) -> bool:
        nonlocal asked
        asked += 1
        if asked < 3:
            raise DependencyDown("the engine does not answer")
        return await kill(self)

    monkeypatch.setattr(RunningProcess, "kill", down_at_first)
    pid = await running(daemon, paths, ["sh", "-c", "exit 4"])
    await until(lambda: daemon.ended)
    assert [(end.exit_code, end.pid) for end in daemon.ended] == [(4, pid)]
    assert asked == 3


async def test_an_agent_stays_what_it_was_when_its_new_runtime_does_not_take_it(
    paths: Paths, open_helper: OpenHelper, connect: Connect
) -> None:
    helper = await open_helper()

    class Refuses(ProcessRuntime):
        async def prepare(self, agent: str, spec: SandboxSpec) -> bool:
            raise DependencyDown("no engine")

    docker = Refuses(paths, subtree=None, log_max_bytes=4096)
    helper._runtimes = {**helper._runtimes, RuntimeKind.DOCKER: docker}
    daemon = await connect()
    await daemon.client.define(A, spec(paths, A, SLEEP))
    helper._held[A]._runtimes = helper._runtimes
    container = spec(paths, A, [], runtime=RuntimeKind.DOCKER, docker=DockerSpec(image="x"))
    with pytest.raises(DependencyDown, match="no engine"):
        await daemon.client.define(A, container)
    pid = (await daemon.client.start(A)).pid
    with pytest.raises(WrongState, match="runs as process"):
        await daemon.client.define(A, container)
    assert alive(pid)
