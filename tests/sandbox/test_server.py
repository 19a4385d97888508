"""The helper's verbs, on real processes, frozen both ways."""

# ruff: noqa: ASYNC240 - as in harness.py
from __future__ import annotations

import asyncio
import os
import signal
import stat
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from hive.errors import BadRequest, HiveError, NotFound, NotPermitted, TimedOut, WrongState
from hive.host.cgroup import Leaf
from hive.host.process import is_stopped, read_stat
from hive.runtimes import home
from hive.runtimes.signals import SignalGroup
from hive.settings.table import Paths
from tests.sandbox.harness import (
    BURN,
    PYTHON,
    SLEEP,
    A,
    B,
    Daemon,
    OpenHelper,
    alive,
    cpu_us_after,
    read_when_written,
    running,
    spec,
    uid_of,
)
from tests.waiting import until

Connect = Callable[..., Awaitable[Daemon]]

ROOT = os.geteuid() == 0


# --- start and end -----------------------------------------------------------------------------------------------


async def test_a_started_agent_has_a_session_a_home_and_an_environment_of_its_own(
    paths: Paths, open_helper: OpenHelper, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HIVE_INTERNAL_TOKEN", "secret")
    await open_helper()
    daemon = await connect()
    command = ["sh", "-c", "pwd; id -u; id -G; umask; env; sleep 1000"]
    await daemon.client.define(A, spec(paths, A, command, env={"OPENAI_API_KEY": "k"}))
    pid = (await daemon.client.start(A)).pid
    await until(lambda: "OPENAI" in paths.log(A).read_text())
    said = paths.log(A).read_text()
    uid = str(uid_of(A)) if ROOT else str(os.geteuid())
    assert said.splitlines()[:2] == [str(paths.home(A)), uid]
    if ROOT:
        assert said.splitlines()[2] == uid
    assert f"HOME={paths.home(A)}" in said
    assert "OPENAI_API_KEY=k" in said
    assert "secret" not in said
    found = read_stat(pid)
    assert found is not None
    assert found.session == pid
    assert stat.S_IMODE(paths.home(A).stat().st_mode) == 0o700
    assert stat.S_IMODE(paths.log(A).stat().st_mode) == 0o600
    assert paths.log(A).stat().st_uid == os.geteuid()


async def test_the_end_of_an_agent_is_told_with_its_exit_code(paths: Paths, daemon: Daemon) -> None:
    pid = await running(daemon, paths, ["sh", "-c", "exit 3"])
    await until(lambda: daemon.ended)
    assert [(end.agent, end.exit_code, end.pid) for end in daemon.ended] == [(A, 3, pid)]
    truth = (await daemon.client.stat([A]))[A]
    assert (truth.state, truth.exit_code) == ("gone", 3)


async def test_an_agent_ended_by_a_signal_has_the_exit_code_a_shell_would_show(paths: Paths, daemon: Daemon) -> None:
    os.kill(await running(daemon, paths, SLEEP), signal.SIGSEGV)
    await until(lambda: daemon.ended)
    assert daemon.ended[0].exit_code == 128 + signal.SIGSEGV


async def test_what_an_ended_agent_leaves_behind_ends_with_it(paths: Paths, daemon: Daemon) -> None:
    await running(daemon, paths, ["sh", "-c", "sleep 1000 & echo $!; wait_for_nobody=1; exit 0"])
    child = int(await read_when_written(paths.log(A)))
    await until(lambda: daemon.ended)
    assert not alive(child)
    await daemon.client.start(A)


@pytest.mark.parametrize("own_uid", [True, False])
async def test_a_child_that_forked_twice_and_left_the_session_ends_with_its_agent(
    paths: Paths, daemon: Daemon, own_uid: bool
) -> None:
    """Without cgroup and uid only the mark in its environment tells whose it is."""
    command = [PYTHON, "-S", "-c", DOUBLE_FORK]
    await daemon.client.define(A, spec(paths, A, command, uid=uid_of(A) if own_uid else None))
    await daemon.client.start(A)
    stray = int(await read_when_written(paths.log(A)))
    await daemon.client.stop(A, grace_s=0.1)
    assert not alive(stray)


DOUBLE_FORK = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        print(os.getpid(), flush=True)
        while True: pass
    os._exit(0)
os.wait()
time.sleep(1000)
"""


async def test_stop_lets_the_whole_session_end_within_the_grace(paths: Paths, daemon: Daemon) -> None:
    """The shell dies of SIGTERM at once; its child takes its time and must get it."""
    await running(daemon, paths, ["sh", "-c", f"{PYTHON} -S -c '{SLOW_TO_END}'; true"])
    await read_when_written(paths.log(A))
    ended = await daemon.client.stop(A, grace_s=10)
    assert ended.exit_code == 128 + signal.SIGTERM
    assert paths.log(A).read_text() == "1\nbye\n"


SLOW_TO_END = """
import os, signal, sys, time
def end(*_):
    time.sleep(0.2)
    os.write(1, b"bye\\n")   # print may be what the signal interrupts, and is not re-entrant
    sys.exit()
signal.signal(signal.SIGTERM, end)
os.write(1, b"1\\n")
while True:
    time.sleep(0.01)   # a signal just before a long sleep is heard after it (seen: 2 of 6,855)
"""


async def test_an_agent_deaf_to_sigterm_is_killed_after_the_grace(paths: Paths, daemon: Daemon) -> None:
    await running(daemon, paths, ["sh", "-c", "trap '' TERM; echo ready; while :; do sleep 0.01; done"])
    await read_when_written(paths.log(A))
    ended = await daemon.client.stop(A, grace_s=0.05)
    assert ended.exit_code == 128 + signal.SIGKILL
    assert (await daemon.client.stat())[A].processes == 0


async def test_a_frozen_agent_hears_sigterm(paths: Paths, daemon: Daemon) -> None:
    """SIGTERM to a frozen process stays pending for ever: it must be thawed first."""
    await running(daemon, paths, ["sh", "-c", "trap 'echo bye; exit 7' TERM; echo ready; while :; do sleep 0.01; done"])
    await read_when_written(paths.log(A))
    await daemon.client.freeze(A, 1)
    await daemon.client.confirm(A, 1)
    ended = await daemon.client.stop(A, grace_s=20)
    assert ended.exit_code == 7
    assert paths.log(A).read_text().endswith("bye\n")


async def test_stop_is_answered_to_its_asker_and_told_to_the_others(
    paths: Paths, open_helper: OpenHelper, connect: Connect
) -> None:
    await open_helper()
    asker, other = await connect(), await connect()
    pid = await running(asker, paths, SLEEP)
    ended = await asker.client.stop(A, grace_s=1)
    assert ended.pid == pid
    await until(lambda: other.ended)
    assert other.ended == [ended]
    assert asker.ended == []
    assert await asker.client.stop(A, grace_s=1) == ended


async def test_starting_what_runs_is_refused(paths: Paths, daemon: Daemon) -> None:
    pid = await running(daemon, paths, SLEEP)
    with pytest.raises(WrongState, match=str(pid)):
        await daemon.client.start(A)


@pytest.mark.parametrize(
    ("command", "error", "says"),
    [
        (["no-such-program"], NotFound, "no-such-program"),
        (["/etc/passwd"], NotPermitted, "/etc/passwd"),
        ([""], BadRequest, "empty"),
    ],
)
async def test_a_command_that_cannot_run_is_refused_and_leaves_nothing(
    paths: Paths, daemon: Daemon, command: list[str], error: type[HiveError], says: str
) -> None:

    async def define_and_start() -> None:
        await daemon.client.define(A, spec(paths, A, command))
        await daemon.client.start(A)

    with pytest.raises(error, match=says):
        await define_and_start()
    assert all(truth.state == "gone" for truth in (await daemon.client.stat()).values())
    await daemon.client.define(A, spec(paths, A, SLEEP))
    await daemon.client.start(A)


# --- asleep and awake --------------------------------------------------------------------------------------------


async def test_a_frozen_agent_uses_no_cpu_and_a_thawed_one_does(paths: Paths, daemon: Daemon, freezer: str) -> None:
    await running(daemon, paths, BURN)
    frozen = await daemon.client.freeze(A, 1)
    assert frozen.how == freezer
    before = await cpu_us_after(daemon, A, 0.05)
    assert await cpu_us_after(daemon, A, 0.3) == before
    assert (await daemon.client.stat())[A].state == "frozen"
    await daemon.client.thaw(A)
    assert (await daemon.client.stat())[A].state == "running"
    await until_cpu_moves(daemon, before)


async def until_cpu_moves(daemon: Daemon, from_us: int) -> None:
    async with asyncio.timeout(60):
        while await cpu_us_after(daemon, A, 0.01) <= from_us:
            pass


async def test_every_process_of_an_agent_is_frozen_also_those_that_left_its_session(
    paths: Paths, daemon: Daemon
) -> None:
    await running(daemon, paths, [PYTHON, "-S", "-c", DOUBLE_FORK])
    stray = int(await read_when_written(paths.log(A)))
    await daemon.client.freeze(A, 1)
    before = read_stat(stray)
    await asyncio.sleep(0.3)
    after = read_stat(stray)
    assert before is not None
    assert after is not None
    assert before.cpu_ticks == after.cpu_ticks
    assert (await daemon.client.stat())[A].processes == 2


async def test_an_agent_that_forks_all_the_time_is_frozen_whole(
    paths: Paths, open_helper: OpenHelper, connect: Connect
) -> None:
    program = """
import os, time
for _ in range(4):
    if os.fork() == 0: break
print("up", flush=True)
while True:
    pid = os.fork()
    if pid == 0:
        time.sleep(0.002); os._exit(0)
    os.wait()
"""
    await open_helper(freeze_s=20)
    daemon = await connect()
    await running(daemon, paths, [PYTHON, "-S", "-c", program])
    await read_when_written(paths.log(A))
    for generation in range(1, 4):
        await daemon.client.freeze(A, generation)
        before = (await daemon.client.stat())[A]
        await asyncio.sleep(0.1)
        after = (await daemon.client.stat())[A]
        assert (after.state, after.processes) == ("frozen", before.processes)
        assert after.cpu_us - before.cpu_us < 2_000, "awake it is 100,000: a child on its way out may finish that"
        await daemon.client.thaw(A)


async def test_a_process_waiting_for_a_stopped_child_between_vfork_and_exec_counts_as_frozen(
    paths: Paths, open_helper: OpenHelper, connect: Connect
) -> None:
    """It stays in state D with SIGSTOP pending, so `T` alone never came and the pause failed; a shell loop does this.

    The thaw must take the pending signal back, or the process stops by itself right after.
    """
    program = """
import ctypes, os, time
ctypes.CDLL(None).vfork()
time.sleep(1000)
"""
    await open_helper(freeze_s=20)
    daemon = await connect()
    pid = await running(daemon, paths, [PYTHON, "-S", "-c", program])
    await until(lambda: state_of(pid) == "D")
    await daemon.client.freeze(A, 1)
    await daemon.client.thaw(A)
    truth = (await daemon.client.stat())[A]
    assert (truth.state, truth.processes) == ("running", 2)
    assert not is_stopped(pid)
    assert "ShdPnd:\t0000000000000000" in Path(f"/proc/{pid}/status").read_text()


def state_of(pid: int) -> str:
    found = read_stat(pid)
    return found.state if found else "gone"


async def test_a_freeze_nobody_confirms_is_undone_and_told(
    paths: Paths, open_helper: OpenHelper, connect: Connect
) -> None:
    await open_helper(confirm_s=0.05)
    daemon = await connect()
    await running(daemon, paths, BURN)
    await daemon.client.freeze(A, 1)
    await until(lambda: daemon.thawed_alone)
    assert [agent for agent, _ in daemon.thawed_alone] == [A]
    assert (await daemon.client.stat())[A].state == "running"
    with pytest.raises(WrongState):
        await daemon.client.confirm(A, 1)


async def test_a_confirmed_freeze_stays(paths: Paths, open_helper: OpenHelper, connect: Connect) -> None:
    """A confirmation within 0.2 s was too late on a machine that had other things to do."""
    await open_helper(confirm_s=2.0)
    daemon = await connect()
    await running(daemon, paths, BURN)
    await daemon.client.freeze(A, 1)
    await daemon.client.confirm(A, 1)
    await asyncio.sleep(2.1)
    assert (await daemon.client.stat())[A].state == "frozen"
    assert daemon.thawed_alone == []


async def test_a_thaw_during_a_freeze_wins(paths: Paths, daemon: Daemon) -> None:
    """Both frames arrive in one read: the thaw is there before the freeze has begun, and must be seen by it."""
    await running(daemon, paths, BURN)
    freezing = asyncio.ensure_future(daemon.client.freeze(A, 1))
    await asyncio.sleep(0)
    await daemon.client.thaw(A)
    with pytest.raises(WrongState, match="woken"):
        await freezing
    assert (await daemon.client.stat())[A].state == "running"


async def test_a_freeze_that_does_not_come_to_an_end_leaves_the_agent_awake(
    paths: Paths, freezer: str, open_helper: OpenHelper, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody else lets it go on as often as it is frozen, at the worst moment.

    It was left to chance: eight that computed were frozen with no time for it until one was too slow, and a quick
    machine froze them a hundred times.
    """
    group: type[Leaf | SignalGroup] = Leaf if freezer == "cgroup" else SignalGroup
    freeze = group.freeze

    def freeze_in_vain(self: Any) -> None:
        freeze(self)
        if isinstance(self, Leaf):
            (self.path / "cgroup.freeze").write_text("0")
        for one in self.pids():
            os.kill(one, signal.SIGCONT)

    monkeypatch.setattr(group, "freeze", freeze_in_vain)
    await open_helper(freeze_s=0.1)
    daemon = await connect()
    pid = await running(daemon, paths, BURN)
    with pytest.raises(TimedOut, match=r"did not all stop within 0\.1 s"):
        await daemon.client.freeze(A, 1)
    assert (await daemon.client.stat())[A].state == "running"
    assert alive(pid)
    assert not is_stopped(pid)
    with pytest.raises(WrongState):
        await daemon.client.confirm(A, 1)
    monkeypatch.undo()
    await daemon.client.freeze(A, 2)
    await daemon.client.confirm(A, 2)


async def test_a_freeze_of_an_older_generation_is_refused(paths: Paths, daemon: Daemon) -> None:
    await running(daemon, paths, SLEEP)
    await daemon.client.freeze(A, 5)
    await daemon.client.thaw(A)
    with pytest.raises(WrongState, match="older"):
        await daemon.client.freeze(A, 4)
    await daemon.client.freeze(A, 6)
    with pytest.raises(WrongState):
        await daemon.client.confirm(A, 5)


async def test_what_does_not_run_is_neither_frozen_nor_thawed(paths: Paths, daemon: Daemon) -> None:
    await daemon.client.define(A, spec(paths, A, SLEEP))
    with pytest.raises(WrongState):
        await daemon.client.freeze(A, 1)
    with pytest.raises(WrongState):
        await daemon.client.thaw(A)
    with pytest.raises(NotFound):
        await daemon.client.freeze(B, 1)


async def test_an_agent_killed_while_frozen_is_told_as_ended(paths: Paths, daemon: Daemon) -> None:
    pid = await running(daemon, paths, ["sh", "-c", "sleep 1000 & sleep 1000"])
    await daemon.client.freeze(A, 1)
    await daemon.client.confirm(A, 1)
    os.kill(pid, signal.SIGKILL)
    await until(lambda: daemon.ended)
    assert daemon.ended[0].exit_code == 137
    assert (await daemon.client.stat())[A].state == "gone"
    await daemon.client.start(A)


async def test_one_agent_being_stopped_keeps_no_other_waiting(paths: Paths, daemon: Daemon) -> None:
    await running(daemon, paths, ["sh", "-c", "trap '' TERM; echo ready; while :; do sleep 0.01; done"])
    await running(daemon, paths, SLEEP, agent=B)
    await read_when_written(paths.log(A))
    stopping = asyncio.ensure_future(daemon.client.stop(A, grace_s=1))
    await daemon.client.freeze(B, 1)
    await daemon.client.thaw(B)
    assert not stopping.done()
    await stopping


async def test_a_file_that_takes_its_time_keeps_no_other_waiting(
    paths: Paths, open_helper: OpenHelper, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that hangs: homes were once filled on the helper's loop, where every wake waits."""
    reading, goes_on, copy = threading.Event(), threading.Event(), home._copy

    def copy_slowly(*arguments: Any) -> None:
        reading.set()
        assert goes_on.wait(60)
        copy(*arguments)

    monkeypatch.setattr(home, "_copy", copy_slowly)
    await open_helper()
    daemon = await connect()
    await running(daemon, paths, SLEEP, agent=B)
    files = {str(Path(__file__)): "agent.py"}
    defining = asyncio.ensure_future(daemon.client.define(A, spec(paths, A, SLEEP, files=files)))
    try:
        await until(reading.is_set)
        await daemon.client.freeze(B, 1)
        await daemon.client.thaw(B)
        assert not defining.done()
    finally:
        goes_on.set()
    await defining
    assert (paths.home(A) / "agent.py").read_bytes() == Path(__file__).read_bytes()


async def test_reconcile_confirms_who_sleeps_and_wakes_all_others(
    paths: Paths, open_helper: OpenHelper, connect: Connect
) -> None:
    """Time for a confirmation is longer than a freeze by signals takes on a busy machine: 0.7 s were seen."""
    await open_helper(confirm_s=3.0)
    daemon = await connect()
    await running(daemon, paths, BURN)
    await running(daemon, paths, BURN, agent=B)
    await daemon.client.freeze(A, 4)
    await daemon.client.freeze(B, 9)
    truth = await daemon.client.reconcile({A: 4, "unknown": 1})
    assert {agent: found.state for agent, found in truth.items()} == {A: "frozen", B: "running"}
    await asyncio.sleep(3.2)
    assert (await daemon.client.stat([A]))[A].state == "frozen"


async def test_who_is_to_be_woken_does_not_wait_for_a_look_at_everybody(
    paths: Paths, open_helper: OpenHelper, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hive.sandbox.server.STATS_AT_ONCE", 1)
    await open_helper()
    daemon = await connect()
    for agent in (A, B):
        await running(daemon, paths, SLEEP, agent=agent)
    await daemon.client.freeze(A, 1)
    answered: list[str] = []

    async def note(what: str, asked: Awaitable[object]) -> None:
        await asked
        answered.append(what)

    await asyncio.gather(note("stat", daemon.client.stat()), note("thaw", daemon.client.thaw(A)))
    assert answered == ["thaw", "stat"]
