"""Output of a program is passed on as it comes, and the program ends with its reader. Real processes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from hive.errors import NotFound
from hive.host.journal import follow_output
from hive.host.process import read_stat

COUNTS = ["/bin/sh", "-c", "echo $$; n=0; while :; do n=$((n + 1)); echo $n; done"]
WAITS = ["/bin/sh", "-c", "echo $$; exec sleep 1000"]


def is_there(pid: int) -> bool:
    return read_stat(pid) is not None


async def test_what_it_prints_comes_whole_and_in_order_and_ends_with_it() -> None:
    command = ["/bin/sh", "-c", "echo one; echo two >&2; seq 100000"]
    pieces = [piece async for piece in follow_output(command, stopping=asyncio.Event())]
    assert b"".join(pieces).decode().split() == ["one", "two", *map(str, range(1, 100_001))]


async def test_it_is_killed_and_waited_for_when_its_reader_leaves() -> None:
    pieces = follow_output(COUNTS, stopping=asyncio.Event())
    pid = int((await anext(pieces)).split()[0])
    assert is_there(pid)
    await pieces.aclose()
    assert not is_there(pid)


async def test_it_is_killed_when_the_answer_is_cancelled_while_nothing_comes() -> None:
    began = asyncio.Event()
    pids: list[int] = []

    async def read() -> None:
        async for piece in follow_output(WAITS, stopping=asyncio.Event()):
            pids.append(int(piece))
            began.set()

    reading = asyncio.ensure_future(read())
    await began.wait()
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert not is_there(pids[0])


async def test_it_ends_when_the_server_stops() -> None:
    stopping = asyncio.Event()
    found = []
    async for piece in follow_output(WAITS, stopping=stopping):
        found.append(piece)
        stopping.set()
    assert len(found) == 1
    assert not is_there(int(found[0]))


async def test_it_is_not_read_faster_than_its_reader_takes() -> None:
    pieces = follow_output(COUNTS, stopping=asyncio.Event())
    await anext(pieces)
    await asyncio.sleep(0.1)
    held = len(await anext(pieces))
    assert held <= 64 * 1024, "one pipe full, however long nobody took it"
    await pieces.aclose()


async def test_there_may_be_no_such_program() -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(NotFound):
        await anext(follow_output(["no-such-journalctl"], stopping=asyncio.Event()))
    assert len(os.listdir("/proc/self/fd")) == len(before)


READER = """
import asyncio, sys
from hive.host.journal import follow_output
async def main():
    async for piece in follow_output(["/bin/sh", "-c", "echo $$; exec sleep 1000"], stopping=asyncio.Event()):
        print(piece.decode().strip(), flush=True)
asyncio.run(main())
"""


def test_it_does_not_outlive_a_daemon_that_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", READER], stdout=subprocess.PIPE, text=True) as daemon:
        assert daemon.stdout is not None
        pid = int(daemon.stdout.readline())
        gone = os.pidfd_open(pid)
        daemon.send_signal(signal.SIGKILL)
    readable = asyncio.run(_readable(gone))
    os.close(gone)
    assert readable


async def _readable(fd: int) -> bool:
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(fd, ended.set)
    async with asyncio.timeout(60):
        await ended.wait()
    return True
