"""One server as a process: real ones, and whichever is killed, nothing is left."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hive.errors import DependencyDown
from hive.host.cgroup import Leaf, Subtree
from hive.host.process import ProcessTable, read_stat, words_of
from hive.worker.child import ServerProcess
from hive.worker.log_ring import LINES_MAX
from tests.waiting import until
from tests.worker.scripted import Folder

STUBBORN = ("--ignore-term", "--child", "fork", "--child", "setsid", "--child", "double")
"""A server with three processes beside it, none of which hears SIGTERM."""


@pytest.fixture
def leaf(tmp_path: Path) -> Iterator[Leaf]:
    subtree = Subtree.find(tmp_path)
    if subtree is None:
        pytest.skip("no writable cgroup v2 with a freezer")
    yield subtree.leaf("server")
    subtree.remove()
    assert not subtree.path.exists()


def process(place: Folder, *flags: str, grace_s: float = 0.2, leaf: Leaf | None = None) -> ServerProcess:
    found = place.launch(*flags)
    return ServerProcess(found.command, found.environment, grace_s=grace_s, leaf=leaf)


async def started(place: Folder, *flags: str, grace_s: float = 0.2, leaf: Leaf | None = None) -> ServerProcess:
    """A server that listens, with all of its children."""
    found = process(place, *flags, grace_s=grace_s, leaf=leaf)
    await found.start()
    count = 1 + flags.count("--child")
    await until(lambda: place.socket.exists() and len(place.pids()) == count, what=found.log.last)
    assert len(place.alive()) == count
    return found


def warden_of(found: ServerProcess) -> int:
    assert found.pid is not None
    stat = read_stat(found.pid)
    assert stat is not None
    return stat.parent


async def none_left(place: Folder) -> None:
    await until(lambda: not place.alive(), what=place.alive)


async def test_it_leads_a_session_and_group_of_its_own(tmp_path: Path) -> None:
    found = await started(Folder(tmp_path))
    assert found.pid is not None
    assert os.getsid(found.pid) == os.getpgid(found.pid) == found.pid
    assert found.is_alive()
    await found.end()
    assert not found.is_alive()
    assert found.code == 128 + signal.SIGTERM


async def test_children_that_ignore_sigterm_and_ran_away_are_ended(tmp_path: Path) -> None:
    place = Folder(tmp_path)
    found = await started(place, *STUBBORN)
    await found.end()
    assert found.code == 128 + signal.SIGKILL
    assert not place.alive()


@pytest.mark.cgroup
async def test_in_a_cgroup_of_its_own_nothing_is_left_and_its_cpu_time_is_known(tmp_path: Path, leaf: Leaf) -> None:
    place = Folder(tmp_path)
    found = await started(place, *STUBBORN, leaf=leaf)
    assert set(place.alive()) <= set(leaf.pids())
    assert found.cpu_s() > 0
    await found.end()
    assert not place.alive()
    assert not leaf.path.exists()


@pytest.mark.cgroup
async def test_what_a_killed_supervisor_left_in_the_cgroup_is_ended_before_the_next_start(
    tmp_path: Path, leaf: Leaf
) -> None:
    leaf.make()
    words = ["/bin/sh", "-c", f"echo 0 > {leaf.path}/cgroup.procs; exec sleep 600"]
    with subprocess.Popen(words) as left:  # noqa: ASYNC220 - it is what is left of another process
        await until(lambda: left.pid in leaf.pids(), what=leaf)
        found = await started(Folder(tmp_path), leaf=leaf)
        assert left.wait() == -signal.SIGKILL
    await found.end()


async def test_where_the_server_ends_by_itself_its_children_go_with_it(tmp_path: Path) -> None:
    place = Folder(tmp_path)
    found = await started(place, *STUBBORN)
    assert found.pid is not None
    os.kill(found.pid, signal.SIGKILL)
    await found.ended.wait()
    assert found.code == 128 + signal.SIGKILL
    assert not place.alive()
    await found.end()


MISSED = """
import os, sys
from hive.host.parent import become_subreaper
from hive.worker import warden
looks = []
look = warden.Tree._descendants
warden.Tree._descendants = staticmethod(lambda: looks.append(1) or ([] if len(looks) == 1 else look()))
become_subreaper()
tree = warden.Tree(["/bin/sh", "-c", "setsid sleep 1000 & echo $! >$1", "sh", sys.argv[1]], os.environ)
while tree.code is None:
    tree.reap()
tree.end(0)
sys.exit(not looks)
"""


def test_a_descendant_that_one_look_missed_is_ended_all_the_same(tmp_path: Path) -> None:
    """Its parent ended while /proc was being read: it was seen as nobody's."""
    told = tmp_path / "pid"
    subprocess.run([sys.executable, "-c", MISSED, str(told)], check=True, timeout=60)
    assert read_stat(int(told.read_text())) is None


async def test_where_the_warden_is_killed_nothing_is_left(tmp_path: Path) -> None:
    """A real vLLM left two processes here on 2026-11-23: they have titles of their own, which is where MARK was."""
    place = Folder(tmp_path)
    found = await started(place, *STUBBORN, "--child", "titled")
    assert len([pid for pid in place.alive() if not environment_of(pid)]) == 1
    os.kill(warden_of(found), signal.SIGKILL)
    await found.ended.wait()
    await found.end()
    await none_left(place)


async def test_a_warden_that_was_stopped_is_ended_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hive.worker.child.MARGIN_S", 0.3)
    place = Folder(tmp_path)
    found = await started(place, *STUBBORN)
    os.kill(warden_of(found), signal.SIGSTOP)
    await found.end()
    await none_left(place)


async def test_a_server_that_was_stopped_is_ended_too(tmp_path: Path) -> None:
    place = Folder(tmp_path)
    found = await started(place)
    assert found.pid is not None
    os.kill(found.pid, signal.SIGSTOP)
    await found.end()
    assert not place.alive()


SUPERVISOR = """
import asyncio, json, sys
from hive.worker.child import ServerProcess
async def main():
    server = ServerProcess(json.loads(sys.argv[1]), {})
    await server.start()
    print(server.pid, flush=True)
    await server.ended.wait()
asyncio.run(main())
"""


async def test_where_the_supervisor_is_killed_nothing_is_left(tmp_path: Path) -> None:
    place = Folder(tmp_path)
    command = json.dumps(place.launch(*STUBBORN).command)
    supervisor = subprocess.Popen(  # noqa: ASYNC220 - it is killed
        [sys.executable, "-P", "-c", SUPERVISOR, command], stdout=subprocess.PIPE
    )
    with supervisor:
        assert supervisor.stdout is not None
        supervisor.stdout.readline()
        await until(lambda: len(place.pids()) == 4, what=place.pids)
        assert len(place.alive()) == 4
        supervisor.kill()
        await none_left(place)
        await until(lambda: not wardens(place), what="its warden has ended")


def environment_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/environ").read_bytes().strip(b"\0")


def wardens(place: Folder) -> list[int]:
    """Wardens of this socket's server."""
    words = {pid: words_of(pid) for pid, stat in ProcessTable().processes.items() if stat.alive}
    return [pid for pid, said in words.items() if "hive.worker.warden" in said and str(place.socket) in said]


async def test_ending_twice_and_at_the_same_time_is_one_end(tmp_path: Path) -> None:
    place = Folder(tmp_path)
    found = await started(place, *STUBBORN)
    await asyncio.gather(found.end(), found.end())
    await found.end()
    assert not place.alive()


async def test_an_end_that_is_not_waited_for_goes_on(tmp_path: Path) -> None:
    place = Folder(tmp_path)
    found = await started(place, *STUBBORN)
    ending = asyncio.create_task(found.end())
    await asyncio.sleep(0)
    ending.cancel()
    await asyncio.wait([ending])
    await none_left(place)
    await found.end()


async def test_an_end_during_the_start_wins(tmp_path: Path) -> None:
    place = Folder(tmp_path)
    found = process(place)
    starting = asyncio.create_task(found.start())
    await asyncio.sleep(0)
    await found.end()
    await asyncio.wait([starting])
    assert not found.is_alive()
    await none_left(place)


async def test_a_program_that_does_not_exist_is_named(tmp_path: Path) -> None:
    found = ServerProcess(["/nonexistent/llama-server"], {})
    with pytest.raises(DependencyDown, match="/nonexistent/llama-server"):
        await found.start()
    assert not found.is_alive()


async def test_a_server_that_talks_much_never_waits_for_a_reader_and_costs_a_bounded_log(tmp_path: Path) -> None:
    """64 KiB fill a pipe that nobody reads; the socket comes after 8 MB of talk."""
    found = await started(Folder(tmp_path), "--chatter", "8000000")
    assert len(found.log.last()) == LINES_MAX
    await found.end()


async def test_its_last_words_are_in_the_log(tmp_path: Path) -> None:
    found = process(Folder(tmp_path), "--crash-at-start", "3")
    await found.start()
    await found.ended.wait()
    assert (found.code, found.log.last()) == (3, ["scripted end at start"])
    await found.end()


async def test_no_descriptor_is_left(tmp_path: Path) -> None:
    found = process(Folder(tmp_path))
    await found.start()  # what asyncio opens once is open now
    await found.end()
    before = len(os.listdir("/proc/self/fd"))
    for number in range(3):
        (tmp_path / str(number)).mkdir()
        found = await started(Folder(tmp_path / str(number)), *STUBBORN)
        await found.end()
    found = ServerProcess(["/nonexistent"], {})
    with pytest.raises(DependencyDown):
        await found.start()
    assert len(os.listdir("/proc/self/fd")) == before


async def test_cpu_time_of_children_counts(tmp_path: Path) -> None:
    burn = "import os, time\nos.fork()\nwhile time.process_time() < 0.3: pass\ntime.sleep(60)"
    found = ServerProcess([sys.executable, "-I", "-S", "-c", burn], {})
    await found.start()
    await until(lambda: found.cpu_s() > 0.5, what=found.cpu_s)
    await found.end()


def test_a_warden_with_a_dead_supervisor_leaves_nothing_of_the_server(tmp_path: Path) -> None:
    """It could not tell the server's pid, ended by that error, and what the server had forked lived on."""
    place = Folder(tmp_path)
    lifeline, theirs = os.pipe()
    status, status_theirs = os.pipe()
    os.close(status)
    command = place.launch("--ignore-term", "--child", "fork", "--child", "setsid").command
    words = [sys.executable, "-I", "-m", "hive.worker.warden", str(lifeline), str(status_theirs), "0.2", *command]
    with subprocess.Popen(words, pass_fds=[lifeline, status_theirs]) as warden:
        os.close(lifeline)
        os.close(status_theirs)
        until_children = time.monotonic() + 20
        while len(place.alive()) < 3:
            assert time.monotonic() < until_children, "the server did not start"
            time.sleep(0.01)
        assert warden.poll() is None
        os.close(theirs)
        warden.wait(60)
    assert place.alive() == []
