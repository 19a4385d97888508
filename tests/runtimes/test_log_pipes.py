"""Agents' output on its way into their logs: rights on the pipes, their sizes, and kills of each process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import select
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hive.host.process import identify
from hive.runtimes import log_process
from hive.runtimes.log_pipes import reading
from hive.runtimes.log_process import LOCK, NEW, OVER, append, cut_back
from hive.settings.table import Paths
from tests.sandbox.harness import (
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
    runtime,
    spec,
)
from tests.waiting import until

Connect = Callable[..., Awaitable[Daemon]]
StartHelper = Callable[..., HelperProcess]
LIMIT = 4096
"""Bytes a log may have of the helpers that tests open in their own process."""


# --- what an agent may do to it ----------------------------------------------------------------------------------

ERASES = """
import os, sys
print("first", flush=True)
def tried(what, do):
    try:
        do()
        print(what, "done", flush=True)
    except OSError as error:
        print(what, error.strerror, flush=True)
tried("ftruncate", lambda: os.ftruncate(1, 0))
tried("pwrite", lambda: os.pwrite(1, b"x", 0))
tried("seek", lambda: os.lseek(1, 0, 0))
tried("read", lambda: os.read(1, 100))
tried("open to cut", lambda: os.open("/proc/self/fd/1", os.O_WRONLY | os.O_TRUNC))
tried("open to read", lambda: os.open("/proc/self/fd/1", os.O_RDONLY))
tried("open to read and write", lambda: os.open("/proc/self/fd/1", os.O_RDWR))
os.write(os.open("/dev/stderr", os.O_WRONLY), b"as /dev/stderr\\n")
print("last", flush=True)
"""


async def test_an_agent_cannot_erase_its_log(daemon: Daemon, paths: Paths) -> None:
    """It had the log itself as stdout: ftruncate(1, 0) left nothing of what it had printed before."""
    await running(daemon, paths, [PYTHON, "-S", "-c", ERASES])
    await until(lambda: "last" in paths.log(A).read_text())
    reads = ["open to read Permission denied", "open to read and write Permission denied"]
    if os.geteuid() != 0:  # agents are this user then, whose files and pipes are theirs
        reads = ["open to read done", "open to read and write done"]
    assert paths.log(A).read_text().splitlines() == [
        "first",
        "ftruncate Invalid argument",
        "pwrite Illegal seek",
        "seek Illegal seek",
        "read Bad file descriptor",
        "open to cut done",
        *reads,
        "as /dev/stderr",
        "last",
    ]


async def test_what_an_agent_gave_its_output_to_writes_nothing_after_its_end(
    daemon: Daemon, paths: Paths, open_fifo: Callable[[Path], int]
) -> None:
    """Stands for another agent that was sent the descriptor: the log of a removed agent would come back."""
    await running(daemon, paths, ["sh", "-c", "echo up; exec sleep 1000"])
    await read_when_written(paths.log(A))
    stranger = open_fifo(paths.log_pipes / A)
    os.write(stranger, b"while it lives\n")
    await daemon.client.stop(A, grace_s=1)
    assert paths.log(A).read_text() == "up\nwhile it lives\n"
    await until(lambda: is_broken(stranger))
    await daemon.client.start(A)
    await until(lambda: paths.log(A).read_text() == "up\nwhile it lives\nup\n")
    await daemon.client.remove(A)
    assert list(paths.log(A).parent.iterdir()) == []
    assert [path.name for path in paths.log_pipes.iterdir()] == [LOCK]


@pytest.fixture
def open_fifo() -> Iterator[Callable[[Path], int]]:
    opened: list[int] = []

    def open_(path: Path) -> int:
        opened.append(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
        return opened[-1]

    yield open_
    for fd in opened:
        os.close(fd)


def is_broken(fd: int) -> bool:
    """Whether nobody reads it any more."""
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    return any(event & select.POLLERR for _, event in poll.poll(0))


# --- how much there is -------------------------------------------------------------------------------------------


async def test_a_flood_never_takes_more_than_twice_the_bound(daemon: Daemon, paths: Paths) -> None:
    """Logs were cut back once a second: `yes` had 400 to 690 MB on the disk by then, at a bound of 8 MiB."""
    pid = await running(daemon, paths, ["yes", "a flood"])
    await until(lambda: size_of(paths.log(A).parent) > LIMIT // 2)
    most = 0
    async with asyncio.timeout(60):
        for _ in range(2000):
            most = max(most, size_of(paths.log(A).parent))
            await asyncio.sleep(0.001)
    assert LIMIT // 2 < most <= 2 * LIMIT
    assert alive(pid)
    assert set(paths.log(A).read_text().splitlines()[:-1]) == {"a flood"}


def size_of(directory: Path) -> int:
    """Of all that is in it, logs that are being cut back with what is kept of them."""
    total = 0
    for path in directory.iterdir():
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


async def test_who_floods_its_log_holds_up_nobody_else(daemon: Daemon, paths: Paths) -> None:
    await running(daemon, paths, ["yes", "a flood"])
    await running(daemon, paths, ["sh", "-c", "seq 1 20"], agent=B)
    await until(lambda: paths.log(B).read_text().endswith("20\n"))


@given(lines=st.lists(st.integers(0, 300), max_size=60), limit=st.integers(64, 2048), room=st.integers(1, 500))
def test_a_log_that_is_cut_back_is_the_end_of_the_whole_one_from_a_line_start(
    tmp_path_factory: pytest.TempPathFactory, lines: list[int], limit: int, room: int
) -> None:
    log = tmp_path_factory.mktemp("log") / "a.log"
    whole = b"".join(b"%d:" % number + b"x" * length + b"\n" for number, length in enumerate(lines))
    log.write_bytes(whole)
    cut_back(log, limit, room=room)
    kept = log.read_bytes()
    assert whole.endswith(kept)
    if len(whole) <= limit // 2 or len(whole) + room <= limit:
        assert kept == whole
    else:
        assert len(kept) <= limit // 2
        assert whole[: len(whole) - len(kept)].endswith(b"\n")
    assert list(log.parent.iterdir()) == [log]


def test_what_is_appended_is_never_more_than_the_bound(tmp_path: Path) -> None:
    for _ in range(5):
        assert append(tmp_path / "a.log", b"0123456\n" * 1000, 4096) <= 4096
    assert (tmp_path / "a.log").read_bytes().endswith(b"0123456\n" * 250)


# --- kills of each process ---------------------------------------------------------------------------------------

COUNTS = """
import itertools, time
for number in itertools.count(1):
    print(f"{number:0199d}", flush=True)
    if number % 200 == 0:
        time.sleep(0.05)
"""
"""Some 0.5 MB/s in lines of 200 bytes."""


def numbers(path: Path) -> list[int]:
    return [int(line) for line in path.read_text().split("\n")[:-1]]


async def test_a_reader_that_is_killed_costs_no_line_and_no_agent(
    paths: Paths, helper_process: StartHelper, connect: Connect
) -> None:
    """Nor is a line written twice: what is taken out of the pipe is in the log."""
    helper_process()
    daemon = await connect()
    pid = await running(daemon, paths, [PYTHON, "-S", "-c", COUNTS])
    readers: set[int] = set()
    for _ in range(5):
        await until(lambda: reading(paths.log_pipes) not in {0, *readers})
        readers.add(reading(paths.log_pipes))
        size = paths.log(A).stat().st_size
        await until(lambda size=size: paths.log(A).stat().st_size > size)  # type: ignore[misc]
        os.kill(reading(paths.log_pipes), signal.SIGKILL)
    await until(lambda: reading(paths.log_pipes) not in {0, *readers})
    assert alive(pid)
    await daemon.client.stop(A, grace_s=1)
    found = numbers(paths.log(A))
    assert found == list(range(1, len(found) + 1))
    assert daemon.ended == []


async def test_the_last_words_wait_for_a_reader_that_starts_late(
    daemon: Daemon, paths: Paths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a starved machine the reader took more than 3 s to start, and the lines of an agent that ended were lost."""
    late = tmp_path / "late.py"
    late.write_text(
        f"import runpy, time\ntime.sleep(1)\nrunpy.run_path({log_process.__file__!r}, run_name='__main__')\n"
    )
    monkeypatch.setattr(log_process, "__file__", str(late))
    monkeypatch.setattr("hive.runtimes.log_pipes.LAST_WORDS_S", 0.05)
    await daemon.client.define(A, spec(paths, A, ["echo", "said at the end"]))
    await daemon.client.start(A)
    await until(lambda: daemon.ended)
    assert paths.log(A).read_text() == "said at the end\n"


async def test_the_next_helper_starts_a_reader_of_its_own(
    paths: Paths, helper_process: StartHelper, connect: Connect
) -> None:
    helper = helper_process()
    daemon = await connect()
    await running(daemon, paths, [PYTHON, "-S", "-c", COUNTS])
    await until(lambda: reading(paths.log_pipes))
    for _ in range(3):
        before, first = daemon.connected, reading(paths.log_pipes)
        helper.end(signal.SIGKILL)
        helper = helper_process()
        await until(lambda before=before: daemon.connected > before)  # type: ignore[misc]
        await until(lambda first=first: reading(paths.log_pipes) not in (0, first) and not alive(first))  # type: ignore[misc]
    await daemon.client.stop(A, grace_s=1)
    found = numbers(paths.log(A))
    assert found == list(range(1, len(found) + 1))


def pipes_read(directory: Path) -> set[str]:
    """The agents whose pipes the reader has open: of a new one it hears from the helper, some milliseconds later."""
    found: set[str] = set()
    with contextlib.suppress(FileNotFoundError):  # it opens and closes the logs all the time
        for descriptor in Path(f"/proc/{reading(directory)}/fd").iterdir():
            opened = descriptor.readlink()
            if opened.parent == directory and opened.name != LOCK:
                found.add(opened.name)
    return found


async def test_no_agent_is_without_a_reader_while_the_next_helper_takes_them_up(
    paths: Paths, helper_process: StartHelper, connect: Connect
) -> None:
    """The earlier helper's reader was killed at the first agent; the others had no reader then: SIGPIPE."""
    helper = helper_process()
    daemon = await connect()
    agents = [f"c{number}b2c3d4e5f6" for number in range(6)]
    pids = {}
    for agent in agents:
        pids[agent] = await running(daemon, paths, ["sh", "-c", "while echo up; do sleep 0.001; done"], agent=agent)
    await until(lambda: pipes_read(paths.log_pipes) == set(agents))
    before = daemon.connected
    helper.end(signal.SIGKILL)
    helper_process()
    await until(lambda: daemon.connected > before)
    await until(lambda: reading(paths.log_pipes, byte=1))
    assert {agent: stat.pid for agent, stat in (await daemon.client.stat()).items()} == pids
    assert all(alive(pid) for pid in pids.values())


async def test_a_helper_killed_before_its_reader_reads_leaves_the_next_one_a_reader(
    paths: Paths, helper_process: StartHelper, connect: Connect
) -> None:
    """The late one came first, heard nobody any more, and the next helper's waited for it for ever."""
    helper = helper_process()
    daemon = await connect()
    await daemon.client.define(A, spec(paths, A, ["sh", "-c", "while echo up; do sleep 0.01; done"]))
    await daemon.client.start(A)
    helper.end(signal.SIGKILL)
    before = daemon.connected
    helper_process()
    await until(lambda: daemon.connected > before)
    await daemon.client.define(B, spec(paths, B, ["sh", "-c", "echo here; exec sleep 1000"]))
    await daemon.client.start(B)
    assert await read_when_written(paths.log(B)) == "here"


async def test_the_reader_outlives_the_helper_and_ends_after_the_last_agent(
    paths: Paths, helper_process: StartHelper, connect: Connect
) -> None:
    helper = helper_process()
    daemon = await connect()
    agent = await running(daemon, paths, [PYTHON, "-S", "-c", COUNTS])
    await until(lambda: reading(paths.log_pipes))
    reader = reading(paths.log_pipes)
    who = identify(reader)
    helper.end(signal.SIGKILL)
    size = paths.log(A).stat().st_size
    await until(lambda: paths.log(A).stat().st_size > size + 100_000)
    assert reading(paths.log_pipes) == reader
    os.kill(agent, signal.SIGKILL)
    await until(lambda: reading(paths.log_pipes) == 0 and who is not None and not who.is_alive())
    before = daemon.connected
    helper_process()
    await until(lambda: daemon.connected > before)
    found = numbers(paths.log(A))
    assert found == list(range(1, len(found) + 1))
    await until(lambda: not (paths.log_pipes / A).exists())


async def test_last_words_that_nobody_read_are_in_the_log_when_the_next_helper_is_there(
    paths: Paths, helper_process: StartHelper, connect: Connect
) -> None:
    """Helper and reader are killed, the agent prints and ends: an end of the pipe that is not read keeps its bytes."""
    helper = helper_process()
    daemon = await connect()
    script = 'trap "echo last words; exit 0" TERM; echo up; while :; do sleep 0.01; done'
    agent = await running(daemon, paths, ["sh", "-c", script])
    await read_when_written(paths.log(A))
    keeps = os.open(paths.log_pipes / A, os.O_RDWR | os.O_NONBLOCK)  # as a third process of Hive would
    try:
        reader = reading(paths.log_pipes)
        helper.end(signal.SIGKILL)
        os.kill(reader, signal.SIGKILL)
        os.kill(agent, signal.SIGTERM)
        await until(lambda: not alive(agent))
        before = daemon.connected
        helper_process()
        await until(lambda: daemon.connected > before)
        assert (await daemon.client.stat())[A].state == "gone"
        await until(lambda: paths.log(A).read_text() == "up\nlast words\n")
    finally:
        os.close(keeps)


async def test_an_agent_that_survives_a_moment_without_any_reader_is_read_again(
    paths: Paths, helper_process: StartHelper, connect: Connect
) -> None:
    """Helper and reader killed at once: what is printed meanwhile is EPIPE; afterwards all is as before."""
    helper = helper_process()
    daemon = await connect()
    goes_on = "import signal\nwhile True:\n try: print(input.__name__, flush=True)\n except OSError: pass\n"
    goes_on += " __import__('time').sleep(0.01)"
    pid = await running(daemon, paths, [PYTHON, "-S", "-c", goes_on])
    await until(lambda: reading(paths.log_pipes))
    reader = reading(paths.log_pipes)
    helper.end(signal.SIGKILL)
    os.kill(reader, signal.SIGKILL)
    await until(lambda: not alive(reader))
    before, size = daemon.connected, paths.log(A).stat().st_size
    helper_process()
    await until(lambda: daemon.connected > before)
    await until(lambda: paths.log(A).stat().st_size > size)
    assert (await daemon.client.stat())[A].pid == pid


async def test_a_full_pipe_slows_the_agent_and_nothing_else(
    paths: Paths, open_helper: OpenHelper, connect: Connect
) -> None:
    """The reader is stopped: the agent waits, is put to sleep and woken, and prints on when there is a reader."""
    await open_helper()
    daemon = await connect()
    pid = await running(daemon, paths, ["sh", "-c", "seq 1 100000; echo all; exec sleep 1000"])
    await until(lambda: reading(paths.log_pipes))
    reader = reading(paths.log_pipes)
    os.kill(reader, signal.SIGSTOP)
    try:
        await daemon.client.freeze(A, 1)
        await daemon.client.thaw(A)
        assert (await daemon.client.stat())[A].pid == pid
        await running(daemon, paths, SLEEP, agent=B)
    finally:
        os.kill(reader, signal.SIGCONT)
    await until(lambda: paths.log(A).read_text().endswith("100000\nall\n"))


async def test_an_agent_that_has_its_log_itself_is_cut_back_by_the_helper(paths: Paths, freezer: str) -> None:
    """One that an older Hive started, and that runs on over the upgrade."""
    processes = runtime(paths, freezer, log_max_bytes=LIMIT)
    paths.log(A).parent.mkdir(parents=True)
    paths.log(A).write_bytes(b"0123456\n" * 1000)
    processes.trim_log(spec(paths, A, SLEEP))
    assert paths.log(A).read_bytes() == b"0123456\n" * (LIMIT // 2 // 8 - 1)


# --- the program by itself ---------------------------------------------------------------------------------------


class Reader:
    """The program as a helper starts it, with at most `file_bytes` for a file: a disk without room."""

    def __init__(self, directory: Path, *, limit_bytes: int, file_bytes: int) -> None:
        self.pipes, self.logs = directory / "pipes", directory / "logs"
        self.pipes.mkdir(exist_ok=True)
        self.logs.mkdir(exist_ok=True)
        control, self._control = os.pipe()
        arguments = [str(self.pipes), str(self.logs), str(limit_bytes), str(control)]
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", log_process.__file__, *arguments],
            pass_fds=(control,),
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, resource.RLIM_INFINITY)),
        )
        os.close(control)

    def give_room(self) -> None:
        unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, unlimited)

    def open(self, agent: str) -> int:
        os.mkfifo(self.pipes / agent)
        fd = os.open(self.pipes / agent, os.O_RDWR)
        self.say(NEW, agent)
        return fd

    def say(self, word: str, agent: str) -> None:
        os.write(self._control, f"{word}{agent}\n".encode())

    def end(self) -> int:
        os.close(self._control)
        return self.process.wait(60)


@pytest.fixture
def open_reader(tmp_path: Path) -> Iterator[Callable[..., Reader]]:
    opened: list[Reader] = []

    def open_(*, file_bytes: int = 1 << 30) -> Reader:
        opened.append(Reader(tmp_path, limit_bytes=1 << 20, file_bytes=file_bytes))
        return opened[-1]

    yield open_
    for reader in opened:
        reader.process.kill()
        reader.process.wait()


async def test_what_a_full_disk_does_not_take_is_dropped_and_told_and_the_agent_goes_on(
    open_reader: Callable[..., Reader],
) -> None:
    """An agent that waited for room on a disk would hang for ever, with nobody to tell why."""
    reader = open_reader(file_bytes=1000)
    agent = reader.open("a")
    for _ in range(100):
        os.write(agent, b"x" * 9999 + b"\n")  # 1 MB: had nobody read it, this would hang
    log = reader.logs / "a.log"
    await until(lambda: log.exists() and log.stat().st_size == 1000)
    os.write(agent, b"lost\n")
    await asyncio.sleep(0.1)
    reader.give_room()
    os.write(agent, b"there is room\n")
    await until(lambda: log.read_text().endswith("there is room\n"))
    lost, last = log.read_bytes()[1000:].decode().splitlines()
    assert lost == "hive: 999005 bytes of its output are not here: File too large"
    assert last == "there is room"
    os.close(agent)
    assert reader.end() == 0


async def test_a_pipe_that_comes_anew_follows_what_the_old_one_had_left(open_reader: Callable[..., Reader]) -> None:
    reader = open_reader()
    first = reader.open("a")
    os.write(first, b"first\n")
    log = reader.logs / "a.log"
    await until(lambda: log.exists() and log.stat().st_size)
    reader.process.send_signal(signal.SIGSTOP)
    os.write(first, b"first\n" * 4999)
    (reader.pipes / "a").unlink()
    second = reader.open("a")
    os.write(second, b"second\n")
    reader.process.send_signal(signal.SIGCONT)
    await until(lambda: log.exists() and log.read_bytes() == b"first\n" * 5000 + b"second\n")
    reader.say(OVER, "a")
    for fd in (first, second):
        os.close(fd)
    assert reader.end() == 0


async def test_the_log_of_a_removed_agent_is_not_made_again(open_reader: Callable[..., Reader]) -> None:
    """The reader hears of the end late: the log is gone by then, and a child of the agent may have printed still."""
    reader = open_reader()
    agents = [reader.open("a"), reader.open("b")]
    await until(lambda: all((reader.logs / f"{name}.log").exists() for name in "ab"))
    reader.process.send_signal(signal.SIGSTOP)
    for name, agent in zip("ab", agents, strict=True):
        (reader.pipes / name).unlink()
        reader.say(OVER, name)
        (reader.logs / f"{name}.log").unlink()
        os.write(agent, b"too late\n" * (name == "b"))
    reader.process.send_signal(signal.SIGCONT)
    for agent in agents:
        os.close(agent)
    assert reader.end() == 0
    assert list(reader.logs.iterdir()) == []


async def test_a_log_that_was_deleted_is_made_again_while_its_agent_runs(open_reader: Callable[..., Reader]) -> None:
    reader = open_reader()
    agent = reader.open("a")
    log = reader.logs / "a.log"
    await until(log.exists)
    log.unlink()
    os.write(agent, b"said after it was deleted\n")
    await until(lambda: log.exists() and log.read_bytes() == b"said after it was deleted\n")
    reader.say(OVER, "a")
    os.close(agent)
    assert reader.end() == 0


def test_what_is_moved_into_a_log_that_is_deleted_just_then_is_in_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its opening and its writing: the lines went into a file without a name."""
    log, (reads, writes), real = tmp_path / "a.log", os.pipe(), os.splice

    def splice(*args: Any, **named: Any) -> int:
        log.unlink()
        return real(*args, **named)

    monkeypatch.setattr(os, "splice", splice)
    for is_kept in (True, False):
        os.write(writes, b"said meanwhile\n")
        log.touch()
        assert log_process.move(reads, str(log), 1 << 20, is_kept=lambda is_kept=is_kept: is_kept) == 15  # type: ignore[misc]
        assert (log.read_bytes() if log.exists() else b"") == b"said meanwhile\n" * is_kept
        log.unlink(missing_ok=True)
    os.close(reads)
    os.close(writes)


async def test_a_reader_whose_helper_is_gone_reads_as_long_as_somebody_can_write(
    open_reader: Callable[..., Reader],
) -> None:
    reader = open_reader()
    agent = reader.open("a")
    await until(lambda: reading(reader.pipes) == reader.process.pid)
    os.close(reader._control)
    os.write(agent, b"said to the end\n")
    log = reader.logs / "a.log"
    await until(lambda: log.exists() and log.read_bytes() == b"said to the end\n")
    assert reader.process.poll() is None
    os.close(agent)
    assert reader.process.wait(60) == 0


async def test_a_pipe_that_was_left_behind_keeps_no_reader_alive(
    tmp_path: Path, open_reader: Callable[..., Reader]
) -> None:
    """Nobody has it open, so the kernel would tell of no last writer, and the reader would wait for one for ever."""
    (tmp_path / "pipes").mkdir()
    os.mkfifo(tmp_path / "pipes" / "a")
    reader = open_reader()
    await until(lambda: reading(reader.pipes) == reader.process.pid)
    assert reader.end() == 0
