"""The fate of agents when the helper leaves or dies, seen with the helper as a process of its own."""

# ruff: noqa: ASYNC110, ASYNC240 - as in harness.py
from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator

import msgspec
import pytest

from hive.errors import ConfigError, WrongState
from hive.host.process import identify
from hive.link.client import LinkClient
from hive.link.helper import WENT_DOWN, AskListeners, Listener
from hive.link.link import Link, LinkReply
from hive.link.message import LinkMessage
from hive.link.messages import Done, Hello
from hive.settings.table import Paths
from tests.sandbox.harness import (
    BURN,
    PYTHON,
    SLEEP,
    A,
    B,
    Daemon,
    HelperProcess,
    OpenHelper,
    alive,
    read_when_written,
    running,
    spec,
)
from tests.waiting import until

Connect = Callable[..., Awaitable[Daemon]]
StartHelper = Callable[..., HelperProcess]


async def replaced(daemon: Daemon, helper: HelperProcess, start: StartHelper, signum: int) -> HelperProcess:
    """The next helper after the end of this one, with the daemon connected to it."""
    before = daemon.connected
    helper.end(signum)
    helper = start()
    await until(lambda: daemon.connected > before)
    return helper


async def test_an_agent_lives_on_when_its_helper_is_killed_and_the_next_one_adopts_it(
    paths: Paths, helper_process: StartHelper, connect: Connect
) -> None:
    helper = helper_process()
    daemon = await connect()
    pid = await running(daemon, paths, ["sh", "-c", "echo up; sleep 1000"])
    await read_when_written(paths.log(A))
    await replaced(daemon, helper, helper_process, signal.SIGKILL)
    truth = (await daemon.client.stat())[A]
    assert (truth.state, truth.pid) == ("running", pid)
    assert truth.processes == 2
    with pytest.raises(WrongState):
        await daemon.client.start(A)
    ended = await daemon.client.stop(A, grace_s=5)
    assert ended.pid == pid
    assert not alive(pid)


async def test_the_end_of_an_adopted_agent_is_noticed_and_unknown(
    paths: Paths, helper_process: StartHelper, connect: Connect
) -> None:
    helper = helper_process()
    daemon = await connect()
    pid = await running(daemon, paths, SLEEP)
    await replaced(daemon, helper, helper_process, signal.SIGKILL)
    os.kill(pid, signal.SIGTERM)
    await until(lambda: daemon.ended)
    assert [(end.agent, end.exit_code, end.pid) for end in daemon.ended] == [(A, None, pid)]


async def test_hive_up_knows_how_an_adopted_agent_ended(
    paths: Paths, helper_process: StartHelper, connect: Connect
) -> None:
    helper = helper_process()
    daemon, up = await connect(), await connect(role="up")
    pid = await running(daemon, paths, SLEEP)
    before = up.connected
    await replaced(daemon, helper, helper_process, signal.SIGKILL)
    await until(lambda: up.connected > before)
    up.client.reaped(pid, 7)
    os.kill(pid, signal.SIGTERM)
    await until(lambda: daemon.ended)
    assert daemon.ended[0].exit_code == 7


async def test_what_hive_up_reaped_while_there_was_no_helper_is_told_to_the_next(
    paths: Paths, helper_process: StartHelper, connect: Connect
) -> None:
    helper = helper_process()
    daemon, up = await connect(), await connect(role="up")
    pid = await running(daemon, paths, SLEEP)
    helper.end(signal.SIGKILL)
    os.kill(pid, signal.SIGTERM)
    await until(lambda: not alive(pid) and not up.client.connected)
    up.client.reaped(pid, 143)
    before = daemon.connected
    helper_process()
    await until(lambda: daemon.connected > before and up.client.connected)
    await until_exit_code(daemon, 143)


async def until_exit_code(daemon: Daemon, wanted: int) -> None:
    async with asyncio.timeout(60):
        while (await daemon.client.stat())[A].exit_code != wanted:
            await asyncio.sleep(0.01)


async def test_an_agent_that_ended_while_there_was_no_helper_is_gone_with_all_its_processes(
    paths: Paths, helper_process: StartHelper, connect: Connect
) -> None:
    helper = helper_process()
    daemon = await connect()
    pid = await running(daemon, paths, ["sh", "-c", "sleep 1000 & echo $!; wait"])
    child = int(await read_when_written(paths.log(A)))
    await daemon.client.freeze(A, 1)
    await daemon.client.confirm(A, 1)
    helper.end(signal.SIGKILL)
    os.kill(pid, signal.SIGKILL)
    before = daemon.connected
    helper_process()
    await until(lambda: daemon.connected > before)
    truth = (await daemon.client.stat())[A]
    assert (truth.state, truth.exit_code) == ("gone", None)
    await until(lambda: not alive(child))
    await daemon.client.start(A)


async def test_a_frozen_agent_stays_frozen_over_a_kill_of_the_helper_until_the_daemon_says(
    paths: Paths, helper_process: StartHelper, connect: Connect
) -> None:
    helper = helper_process()
    daemon = await connect()
    await running(daemon, paths, BURN)
    await daemon.client.freeze(A, 3)
    await daemon.client.confirm(A, 3)
    helper = await replaced(daemon, helper, helper_process, signal.SIGKILL)
    assert (await daemon.client.stat())[A].state == "frozen"
    assert (await daemon.client.reconcile({A: 3}))[A].state == "frozen"
    await daemon.client.confirm(A, 3)
    helper = await replaced(daemon, helper, helper_process, signal.SIGKILL)
    assert (await daemon.client.reconcile({}))[A].state == "running"


async def test_a_restarted_helper_gives_a_frozen_agent_only_so_long(
    paths: Paths, helper_process: StartHelper, open_helper: OpenHelper, connect: Connect
) -> None:
    helper = helper_process()
    daemon = await connect()
    await running(daemon, paths, BURN)
    await daemon.client.freeze(A, 3)
    await daemon.client.confirm(A, 3)
    helper.end(signal.SIGKILL)
    before = daemon.connected
    await open_helper(adopted_confirm_s=0.3)
    await until(lambda: daemon.connected > before)
    await until(lambda: daemon.thawed_alone)
    assert (await daemon.client.stat())[A].state == "running"


async def test_a_helper_killed_in_the_middle_of_a_freeze_leaves_nobody_half_frozen(
    paths: Paths, helper_process: StartHelper, open_helper: OpenHelper, connect: Connect, freezer: str
) -> None:
    """Its place is taken by hand: one of two processes stopped, as a walk cut short would leave it."""
    if freezer == "cgroup":
        pytest.skip("the kernel freezes all of a cgroup or none")
    helper = helper_process()
    daemon = await connect()
    pid = await running(daemon, paths, ["sh", "-c", "sleep 1000 & echo $!; wait"])
    child = int(await read_when_written(paths.log(A)))
    helper.end(signal.SIGKILL)
    os.kill(child, signal.SIGSTOP)
    await until(lambda: state(child) == "T")  # a moment later than the signal
    await open_helper()
    await until(lambda: state(child) == "S" and state(pid) == "S")


def state(pid: int) -> str:
    who = identify(pid)
    found = who.stat() if who else None
    return found.state if found else "gone"


@pytest.mark.parametrize("how", ["SIGTERM", "SIGINT", "its parent is gone"])
async def test_a_leaving_helper_wakes_everyone_and_leaves_no_socket(
    paths: Paths, helper_process: StartHelper, connect: Connect, how: str
) -> None:
    reads, writes = os.pipe()
    helper = helper_process(watch_fd=reads)
    os.close(reads)
    daemon = await connect()
    pid = await running(daemon, paths, SLEEP)
    await daemon.client.freeze(A, 1)
    await daemon.client.confirm(A, 1)
    if how.startswith("SIG"):
        helper.process.send_signal(signal.Signals[how])
    os.close(writes)
    assert await asyncio.to_thread(helper.process.wait) == 0
    assert alive(pid)
    await until(lambda: state(pid) == "S")
    assert daemon.thawed_alone == [(A, "the helper is leaving")]
    assert [entry for entry in paths.runtime.rglob("*") if not entry.is_dir()] == []


async def test_a_helper_that_another_follows_leaves_asleep_whoever_sleeps(
    paths: Paths, open_helper: OpenHelper, connect: Connect
) -> None:
    """A restart, as of an upgrade, woke everybody. A pause that is not committed yet is still undone."""
    first = await open_helper()
    daemon = await connect()
    sleeps, begins = await running(daemon, paths, SLEEP), await running(daemon, paths, SLEEP, agent=B)
    await daemon.client.freeze(A, 1)
    await daemon.client.confirm(A, 1)
    await daemon.client.freeze(B, 1)
    await first.leave(for_another=True)
    assert daemon.thawed_alone == [(B, "the helper is leaving")]
    before = daemon.connected
    await open_helper()
    await until(lambda: daemon.connected > before)
    found = await daemon.client.reconcile({A: 1})
    assert {agent: (stat.state, stat.pid) for agent, stat in found.items()} == {
        A: ("frozen", sleeps),
        B: ("running", begins),
    }
    await daemon.client.thaw(A)
    assert (await daemon.client.stat())[A].state == "running"


async def test_what_hive_up_had_stopped_is_told_to_have_gone_down_with_it(
    paths: Paths, open_helper: OpenHelper, connect: Connect
) -> None:
    """To the next daemon: it was recorded as running, and came back as `error: exited with 143`."""
    await open_helper()
    daemon, up = await connect(), await connect(role="up")
    for agent in (A, B):
        await running(daemon, paths, SLEEP, agent=agent)
    await up.client.stop(A, grace_s=5)
    await daemon.client.stop(B, grace_s=5)
    truth = await daemon.client.stat()
    assert {agent: (stat.state, stat.why) for agent, stat in truth.items()} == {
        A: ("gone", WENT_DOWN),
        B: ("gone", ""),
    }
    assert daemon.ended[0].why == WENT_DOWN
    await running(daemon, paths, ["sh", "-c", "exit 3"])
    await until(lambda: len(daemon.ended) > 1)
    assert (await daemon.client.stat())[A].why == ""


TALKS = """
import time
number = 0
while True:
    for _ in range(1000):
        number += 1
        print(f"{number:0999d}")
    time.sleep(1)
"""
"""1 MB/s in lines of 1,000 bytes."""


async def test_no_agent_dies_and_no_line_is_lost_when_the_helper_is_killed_while_agents_talk_a_megabyte_a_second(
    paths: Paths, helper_process: StartHelper, connect: Connect
) -> None:
    """They write through a descriptor of their own, not through the helper."""
    helper = helper_process()
    daemon = await connect()
    agents = {A: 0, B: 0}
    for agent in agents:
        agents[agent] = await running(daemon, paths, [PYTHON, "-u", "-S", "-c", TALKS], agent=agent)
    for _ in range(3):
        await until(lambda: all(paths.log(agent).stat().st_size for agent in agents))
        helper = await replaced(daemon, helper, helper_process, signal.SIGKILL)
        sizes = {agent: paths.log(agent).stat().st_size for agent in agents}
        await until(lambda sizes=sizes: all(paths.log(agent).stat().st_size > size for agent, size in sizes.items()))  # type: ignore[misc]
    assert {agent: found.pid for agent, found in (await daemon.client.stat()).items()} == agents
    assert daemon.ended == []
    for agent in agents:
        await daemon.client.stop(agent, grace_s=1)
        numbers = [int(line) for line in paths.log(agent).read_text().split("\n")[:-1]]
        assert numbers == list(range(1, len(numbers) + 1))
        assert len(numbers) > 3000


async def test_a_started_agent_that_could_not_be_written_down_is_found_by_its_mark(
    paths: Paths, helper_process: StartHelper, connect: Connect
) -> None:
    helper = helper_process()
    daemon = await connect()
    pid = await running(daemon, paths, SLEEP)
    helper.end(signal.SIGKILL)
    kept = paths.sandbox_table / f"{A}.json"
    record = msgspec.json.decode(kept.read_bytes())
    record["agent"]["run"] = None
    kept.write_bytes(msgspec.json.encode(record))
    before = daemon.connected
    helper_process()
    await until(lambda: daemon.connected > before)
    truth = (await daemon.client.stat())[A]
    assert (truth.state, truth.pid) == ("running", pid)


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(SLEEP, start_new_session=True)
    yield process
    process.kill()
    process.wait()


async def test_a_process_that_got_the_pid_of_an_ended_agent_is_left_alone(
    paths: Paths, helper_process: StartHelper, connect: Connect, bystander: subprocess.Popen[bytes]
) -> None:
    """The table names a living pid with another start time, and a process whose boot id is of another boot."""
    helper = helper_process()
    daemon = await connect()
    await daemon.client.define(A, spec(paths, A, SLEEP, uid=None))
    await daemon.client.start(A)
    await daemon.client.stop(A, grace_s=1)
    helper.end(signal.SIGKILL)
    who = identify(bystander.pid)
    assert who is not None
    kept = paths.sandbox_table / f"{A}.json"
    record = msgspec.json.decode(kept.read_bytes())
    for main in (
        {"pid": who.pid, "start_ticks": who.start_ticks - 1, "boot": who.boot},
        {"pid": who.pid, "start_ticks": who.start_ticks, "boot": "another"},
    ):
        record["agent"]["run"] = {"main": main, "leaf": None, "since": 0.0}
        kept.write_bytes(msgspec.json.encode(record))
        before = daemon.connected
        helper = helper_process()
        await until(lambda now=before: daemon.connected > now)  # type: ignore[misc]
        assert (await daemon.client.stat())[A].state == "gone"
        await daemon.client.stop(A, grace_s=1)
        assert state(bystander.pid) == "S"
        helper.end(signal.SIGKILL)


async def test_a_new_helper_binds_the_sockets_afresh_and_hands_them_out(
    paths: Paths, helper_process: StartHelper, connect: Connect
) -> None:
    helper = helper_process()
    daemon = await connect()
    path = await daemon.client.define(A, spec(paths, A, SLEEP))
    (paths.runtime / "a" / "deadbeef.sock").touch()
    old_inode = path.stat().st_ino
    await replaced(daemon, helper, helper_process, signal.SIGKILL)
    assert path.stat().st_ino != old_inode
    assert list(path.parent.iterdir()) == [path]
    assert await ask_for_listeners(paths) == [(A, str(path))]


async def ask_for_listeners(paths: Paths) -> list[tuple[str, str]]:
    got: list[tuple[str, str]] = []

    def told(link: Link, message: LinkMessage, reply: LinkReply | None) -> None:
        if isinstance(message, Listener):
            got.append((message.agent, message.path))

    client = LinkClient(paths.sandbox_socket, name="proxy", on_link=lambda _: None, on_message=told)
    await until(lambda: client.connected)
    client.link.tell(Hello(role="proxy", epoch="p"))
    await client.link.ask(AskListeners(), Done, timeout_s=10)
    client.close()
    await asyncio.sleep(0)
    return got


async def test_a_damaged_table_is_named(paths: Paths, open_helper: OpenHelper) -> None:
    paths.sandbox_table.mkdir(mode=0o700, parents=True)
    (paths.sandbox_table / f"{A}.json").write_text('{"version": 2, "agent"')
    with pytest.raises(ConfigError, match=rf"{A}\.json"):
        await open_helper()


async def test_a_second_helper_on_the_same_state_directory_is_refused(
    paths: Paths, open_helper: OpenHelper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hive.sandbox.server.LOCK_WAIT_S", 0.05)
    await open_helper()
    with pytest.raises(WrongState, match="another helper"):
        await open_helper()


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
async def test_a_user_without_rights_runs_and_freezes_agents_too(paths: Paths) -> None:
    """As uid 65534, in a directory of its own: no cgroup, no uids, the same verbs."""
    top = paths.state.parent
    os.chown(top, 65534, 65534)
    program = f"""
import asyncio, sys
from pathlib import Path
from tests.sandbox.harness import BURN, Daemon, HelperServer, runtimes, spec, cpu_us_after
from tests.waiting import until
from hive.settings.table import Paths
async def main():
    paths = Paths(Path({str(paths.state)!r}), Path({str(paths.runtime)!r}))
    helper = HelperServer(paths, runtimes(paths, "signals"))
    await helper.open()
    daemon = Daemon(paths)
    await until(lambda: daemon.client.connected)
    await daemon.client.define("a1", spec(paths, "a1", BURN))
    await daemon.client.start("a1")
    await daemon.client.freeze("a1", 1)
    before = await cpu_us_after(daemon, "a1", 0.05)
    after = await cpu_us_after(daemon, "a1", 0.1)
    await daemon.client.thaw("a1")
    ended = await daemon.client.stop("a1", grace_s=5)
    await daemon.client.remove("a1")
    daemon.client.close()
    await helper.leave()
    print(after - before, ended.exit_code, sorted(p.name for p in paths.runtime.rglob("*")))
asyncio.run(main())
"""
    python = os.path.realpath("/usr/bin/python3")
    packages = os.path.dirname(os.path.dirname(msgspec.__file__))
    if sys.version_info[:2] != _version_of(python):
        pytest.skip("the system's python is of another version than the tests'")
    process = await asyncio.create_subprocess_exec(
        python,
        "-c",
        program,
        env={"PYTHONPATH": f"{packages}:{os.getcwd()}"},
        stdout=subprocess.PIPE,
        user=65534,
        group=65534,
        extra_groups=[],
    )
    out, _ = await process.communicate()
    assert out == b"0 143 ['a']\n"


def _version_of(python: str) -> tuple[int, ...]:
    out = subprocess.check_output([python, "-c", "import sys; print(*sys.version_info[:2])"])
    return tuple(int(part) for part in out.split())
