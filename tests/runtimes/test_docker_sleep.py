"""Containers asleep: paused by Hive, by hand, behind the engine's back; and an engine that goes, hangs, comes back.

Traps are numbered as in the list of sleeping and waking on one host; see test_docker.py.
"""

from __future__ import annotations

import asyncio
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from hive.domain import Limits
from hive.errors import DependencyDown, HiveError, TimedOut, WrongState
from hive.host.process import ProcessTable
from hive.link.specs import SandboxSpec
from hive.runtimes.container import RunningContainer
from hive.runtimes.container_notes import Notes
from hive.runtimes.docker import DockerRuntime
from hive.sandbox.server import make_directories
from hive.settings.table import Paths, Sandbox
from tests import docker_engine
from tests.docker_engine import DockerEngine, PrivateEngine
from tests.runtimes.benches import MARKS, Floor, docker_spec, printed
from tests.runtimes.containers import (
    COUNTS,
    FILLS,
    GENTLY,
    ROOT,
    WITH_PROGRAMS,
    freeze,
    group,
    has_ended,
    inside,
    lines_of,
    open_floor,
    paused,
    started,
    thaw,
    truth,
    works,
)
from tests.sandbox.harness import A, B
from tests.swapspace import zram_swap
from tests.waiting import until

pytestmark = pytest.mark.docker


@pytest.fixture
async def own(paths: Paths) -> AsyncIterator[tuple[Floor, PrivateEngine]]:
    """With an engine that may be killed."""
    with docker_engine.private() as engine:
        async with open_floor(paths, engine) as floor:
            yield floor, engine


async def taken_over(floor: Floor, spec: SandboxSpec, running: RunningContainer) -> RunningContainer:
    """The agent as the next helper has it."""
    adopted = floor.hold(await floor.runtime.adopt(A, spec, running.run, mark=MARKS[A]))
    assert isinstance(adopted, RunningContainer)
    return adopted


# --- paused by Hive, by hand, behind the engine's back -----------------------------------------------------------


async def test_trap_5_what_is_paused_or_unpaused_already_is_so(floor: Floor, engine: DockerEngine) -> None:
    """Docker answers 409 and 500 `is not paused`."""
    running = await started(floor)
    await freeze(running)
    assert engine.do(running.run.handle, "pause") == 409
    await freeze(running)
    assert engine.do(running.run.handle, "unpause") == 204
    assert not running.is_frozen()
    assert truth(running) == "running"
    await thaw(running)
    assert running.thaw_now()
    assert engine.do(running.run.handle, "unpause") == 500


async def test_trap_10_what_a_human_paused_is_left_alone(
    floor: Floor, engine: DockerEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """By thaws that nobody asked for, by the next helper, by its look for strays; and Hive does not take it for its
    own. It is said in Stat and in the log, once."""
    running = await started(floor)
    assert engine.do(running.run.handle, "pause") == 204
    assert (truth(running), running.stat(ProcessTable()).freezer) == ("frozen", "docker, paused by hand")
    assert not running.is_frozen()
    assert not running.is_half_frozen()
    assert running.thaw_now()
    await thaw(running)
    with pytest.raises(WrongState, match="by hand"):
        await freeze(running)
    assert await floor.runtime.thaw_strays(set()) == []
    running.close()
    spec = floor.bench.spec(A, "idle")
    adopted = await taken_over(floor, spec, running)
    assert not adopted.is_frozen()
    assert not adopted.is_half_frozen()
    await thaw(adopted)
    assert paused(engine, running)
    assert caplog.text.count("container_paused_by_hand") == 1
    assert engine.do(running.run.handle, "unpause") == 204
    await freeze(adopted)
    assert adopted.is_frozen()


@pytest.mark.parametrize("verb", ["stop", "kill"])
async def test_what_a_human_paused_can_be_stopped(floor: Floor, engine: DockerEngine, verb: str) -> None:
    running = await started(floor)
    assert engine.do(running.run.handle, "pause") == 204
    assert await (running.stop(grace_s=30) if verb == "stop" else running.kill())
    assert await running.reap() == 128 + (15 if verb == "stop" else 9)


async def test_a_sleeper_unpaused_by_hand_runs_and_can_sleep_again(floor: Floor, engine: DockerEngine) -> None:
    running = await started(floor, "burn")
    await freeze(running)
    assert engine.do(running.run.handle, "unpause") == 204
    assert truth(running) == "running"
    await freeze(running)
    assert running.is_frozen()
    await thaw(running)
    await works(running)


async def test_trap_10_a_pause_of_hives_is_known_as_such_by_the_next_helper(floor: Floor, engine: DockerEngine) -> None:
    running = await started(floor, "burn")
    await freeze(running)
    running.close()
    spec = floor.bench.spec(A, "burn")
    adopted = await taken_over(floor, spec, running)
    assert adopted.is_frozen()
    await thaw(adopted)
    assert not paused(engine, running)


async def test_a_pause_that_was_only_begun_is_undone_by_the_next_helper(
    floor: Floor, engine: DockerEngine, paths: Paths
) -> None:
    """Killed between its note and the engine's answer: the pause may still come."""
    running = await started(floor, "burn")
    running.close()
    notes = Notes(paths.state / "docker" / A)
    notes.asleep = True
    spec = floor.bench.spec(A, "burn")
    adopted = await taken_over(floor, spec, running)
    assert adopted.is_half_frozen()
    await thaw(adopted)
    assert not adopted.is_half_frozen()
    assert not notes.asleep


async def test_trap_4_a_freeze_on_the_heels_of_a_thaw_comes_after_it(floor: Floor, engine: DockerEngine) -> None:
    """While the unpause is on its way the kernel still calls it frozen; that must not pass for the new freeze."""
    running = await started(floor, "burn")
    await freeze(running)
    assert not running.thaw_now()
    await asyncio.sleep(0.001)
    await freeze(running)
    assert running.is_frozen()
    await asyncio.sleep(0.1)
    assert running.is_frozen()
    await until(lambda: paused(engine, running))


async def test_a_wake_in_the_middle_of_a_freeze_wins(
    floor: Floor, engine: DockerEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pause is on its way to the engine, and is undone once it has come back.

    Its answer is held back: an engine that was quick, on a machine that was slow, had paused it before the wake.
    """
    running = await started(floor, "burn")
    paused_it, answers, call = asyncio.Event(), asyncio.Event(), running._call

    async def answer_late(verb: str, **more: Any) -> Any:
        found = await call(verb, **more)
        if verb == "pause":
            paused_it.set()
            await answers.wait()
        return found

    monkeypatch.setattr(running, "_call", answer_late)
    freezing = asyncio.ensure_future(running.freeze(deadline_s=20, give_up=paused_it.is_set))
    with pytest.raises(WrongState):
        await freezing
    answers.set()
    await thaw(running)
    await asyncio.sleep(0.1)
    await works(running)
    await until(lambda: not paused(engine, running))


async def test_where_it_cannot_be_noted_nobody_falls_asleep(floor: Floor, paths: Paths) -> None:
    """As on a full disk: without the note the next helper would take the pause for a human's."""
    running = await started(floor, "burn")
    shutil.rmtree(paths.state / "docker" / A)
    with pytest.raises(HiveError):
        await freeze(running)
    await works(running)
    assert running.thaw_now()


async def test_trap_13_a_command_in_a_sleeper_is_refused(floor: Floor, engine: DockerEngine) -> None:
    """Docker would make it, and hang or answer 409 at its start."""
    running = await started(floor)
    assert await inside(running, ["sh", "-c", "echo hello; exit 3"]) == (3, b"hello\n")
    await freeze(running)
    with pytest.raises(WrongState, match="asleep"):
        await inside(running, ["id"])


async def test_trap_14_a_record_that_is_behind_the_kernel_is_put_right(
    floor: Floor, engine: DockerEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """Thawed in the kernel, Docker still says `paused`, and its unpause fails: `container not paused`."""
    running = await started(floor, "burn")
    await freeze(running)
    group(running).thaw()
    assert paused(engine, running)
    assert engine.do(running.run.handle, "unpause") == 500
    await thaw(running)
    assert not paused(engine, running)
    await works(running)
    await freeze(running)
    group(running).thaw()
    await freeze(running)
    assert running.is_frozen()
    await until(lambda: paused(engine, running))


async def test_trap_14_what_was_frozen_in_the_kernel_only_is_thawed(floor: Floor, engine: DockerEngine) -> None:
    """Docker calls it running then, and can neither pause nor unpause it."""
    running = await started(floor, "burn")
    await freeze(running)
    assert engine.do(running.run.handle, "unpause") == 204
    group(running).freeze()
    await until(lambda: group(running).is_frozen())
    await thaw(running)
    await works(running)


async def test_trap_10_strays_are_thawed_only_where_hive_paused_them(
    floor: Floor, engine: DockerEngine, paths: Paths, tmp_path: Path
) -> None:
    ours, by_hand = await started(floor, "burn", A), await started(floor, "burn", B)
    await freeze(ours)
    assert engine.do(by_hand.run.handle, "pause") == 204
    other = Paths(state=tmp_path / "other", runtime=paths.runtime)
    foreign = DockerRuntime(other, Sandbox(docker_socket=str(engine.socket)), log_max_bytes=4096)
    assert await foreign.thaw_strays(set()) == []
    assert await floor.runtime.thaw_strays(set()) == [A]
    assert not paused(engine, ours)
    assert paused(engine, by_hand)


@ROOT
async def test_trap_17_the_anonymous_memory_of_a_sleeper_goes_to_swap_and_comes_back(floor: Floor) -> None:
    script = "import os; held = os.urandom(1 << 20) * 64; print('ready', flush=True); input()"
    command = ["sh", "-c", f'sleep 1000 | /usr/bin/python3 -S -c "{script}"']
    with zram_swap(192):
        running = await started(floor, docker=WITH_PROGRAMS, command=command)
        await freeze(running)
        before = running.stat(ProcessTable())
        paged = await running.page_out(give_up=lambda: False)
        after = running.stat(ProcessTable())
        assert before.rss_bytes > 64 << 20
        assert paged.swap_bytes > 60 << 20
        assert after.rss_bytes < before.rss_bytes - (60 << 20)
        assert after.swap_bytes > 60 << 20
        await thaw(running)
        assert await running.kill()


# --- the engine goes, hangs, comes back --------------------------------------------------------------------------


async def test_without_an_engine_everything_says_so(paths: Paths) -> None:
    make_directories(paths)
    runtime = DockerRuntime(paths, Sandbox(docker_socket=str(paths.runtime / "docker.sock")), log_max_bytes=4096)
    spec = docker_spec(paths, A, ["id"])
    assert await runtime.prepare(A, spec)
    with pytest.raises(DependencyDown) as raised:
        await runtime.start(A, spec, mark=MARKS[A])
    assert "systemctl start docker" in raised.value.hint
    assert "no Docker engine" in (await runtime.capabilities()).why_not
    assert await runtime.thaw_strays(set()) == []
    await runtime.discard(A, spec)
    assert not paths.home(A).exists()


async def test_an_agent_outlives_its_engine_and_is_woken_without_it(own: tuple[Floor, PrivateEngine]) -> None:
    """kill -9 of dockerd: what runs goes on, what sleeps can be woken, nothing falls asleep; and it all comes back."""
    floor, engine = own
    spec = floor.bench.spec(A, "burn")
    awake = await started(floor, "burn", A, limits=GENTLY)
    asleep = await started(floor, "burn", B, limits=GENTLY)
    await freeze(asleep)
    engine.kill()
    await works(awake)
    with pytest.raises(HiveError, match="no Docker engine") as raised:
        await freeze(awake)
    assert not isinstance(raised.value, DependencyDown), "that would be the helper's own absence, tried again at once"
    await thaw(awake)
    await works(awake)
    await thaw(asleep)
    await works(asleep)
    awake.close()
    adopted = await taken_over(floor, spec, awake)
    assert truth(adopted) == "running"
    engine.start()
    await until(lambda: not paused(engine, asleep))
    await works(asleep)
    for running in (adopted, asleep):
        await freeze(running)
        assert paused(engine, running)
        await thaw(running)


async def test_an_end_by_memory_is_known_from_the_kernel_where_the_engine_does_not_tell(
    own: tuple[Floor, PrivateEngine], caplog: pytest.LogCaptureFixture
) -> None:
    """Here it hangs; on a busy machine it also forgets some."""
    floor, engine = own
    running = await started(floor, "exit7", command=FILLS, limits=Limits(memory_mb=16))
    engine.send(signal.SIGSTOP)
    (Path(floor.bench.spec(A, "exit7").home) / "go").touch()
    await until(lambda: has_ended(running))
    assert await running.reap() is None
    assert running.why_ended == "out of memory"
    assert "agent_out_of_memory agent=a" in caplog.text
    engine.send(signal.SIGCONT)


async def test_an_engine_that_hangs_holds_up_neither_a_wake_nor_a_kill(own: tuple[Floor, PrivateEngine]) -> None:
    """Trap 6: a pause it was too slow for comes when it goes on, and is undone then."""
    floor, engine = own
    one = await started(floor, "burn", A, limits=GENTLY)
    other = await started(floor, "burn", B, limits=GENTLY)
    await freeze(one)
    engine.send(signal.SIGSTOP)
    with pytest.raises(TimedOut):
        await other.freeze(deadline_s=0.3, give_up=lambda: False)
    await thaw(one)
    await works(one)
    await thaw(other)
    await works(other)
    engine.send(signal.SIGCONT)
    await until(lambda: not paused(engine, one) and not paused(engine, other))
    await until(lambda: one.thaw_now() and other.thaw_now())
    await works(other)
    engine.send(signal.SIGSTOP)
    assert await one.kill()
    engine.send(signal.SIGCONT)
    assert await one.reap() == 137


async def test_the_log_goes_on_after_the_engine_came_back(own: tuple[Floor, PrivateEngine]) -> None:
    floor, engine = own
    spec = floor.bench.spec(A, "idle")
    running = await started(floor, command=COUNTS)
    await until(lambda: "line 20" in printed(spec))
    engine.stop()
    engine.start()
    last = lines_of(printed(spec))[-1]
    await until(lambda: f"line {last + 100}\n" in printed(spec))
    assert await running.kill()
    found = lines_of(printed(spec))
    assert found == list(range(1, len(found) + 1))


async def test_what_cannot_be_removed_now_is_removed_once_the_engine_is_back(
    own: tuple[Floor, PrivateEngine], paths: Paths
) -> None:
    floor, engine = own
    running = await started(floor)
    engine.kill()
    assert await running.kill()
    assert await running.reap() is None
    running.close()
    with pytest.raises(DependencyDown):
        await floor.runtime.discard(A, floor.bench.spec(A, "idle"))
    assert paths.home(A).exists()
    engine.start()
    await floor.runtime.discard(A, floor.bench.spec(A, "idle"))
    assert not paths.home(A).exists()
    assert engine.containers(paths.state) == []
