"""kill -9 at random moments, of whichever process: nothing of a server is ever left, counted by pids."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hive.host.process import ProcessTable, words_of
from tests.waiting import until
from tests.worker.scripted import Folder

ROUNDS = 60
HOST = """
import asyncio, os, pathlib, sys
from hive.backends.command_line import Launch
from hive.worker.profile import TimeoutProfile
from hive.worker.worker import LlamaWorker
async def main():
    launch = Launch(tuple(sys.argv[2:]), dict(os.environ), (), pathlib.Path(sys.argv[1]))
    profile = TimeoutProfile(backoff_first_s=0.01, backoff_longest_s=0.01, crash_limit=99)
    worker = LlamaWorker(launch, slots=2, profile=profile)
    asyncio.get_running_loop().add_signal_handler(15, stopped.set)
    await worker.start()
    print("ready", flush=True)
    await stopped.wait()
    await worker.stop()
stopped = asyncio.Event()
asyncio.run(main())
"""


def beginning_with(socket: Path) -> dict[str, list[int]]:
    """Living wardens and servers of a socket, the oldest first."""
    found: dict[str, list[int]] = {"warden": [], "server": []}
    for pid, stat in sorted(ProcessTable().processes.items(), key=lambda item: item[1].start_ticks):
        said = words_of(pid) if stat.alive else ()
        if str(socket) in said and HOST not in said:
            found["warden" if "hive.worker.warden" in said else "server"].append(pid)
    return found


@pytest.mark.chaos
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [1, 2])
async def test_nothing_is_left_whatever_is_killed_and_when(tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    for number in range(ROUNDS):
        folder = tmp_path / str(number)
        folder.mkdir()
        place = Folder(folder)
        launch = place.launch("--ignore-term", "--child", "fork", "--child", "setsid", "--child", "double")
        words = [sys.executable, "-P", "-c", HOST, str(place.socket), *launch.command]
        with subprocess.Popen(words, stderr=subprocess.PIPE) as host:  # noqa: ASYNC220 - it is killed
            for _ in range(dice.randint(0, 3)):  # of these it recovers
                await asyncio.sleep(dice.uniform(0, 0.7))
                await kill_one(place, dice.choice(["warden", "server"]), host)
            await asyncio.sleep(dice.uniform(0, 0.7))
            host.send_signal(dice.choice([signal.SIGKILL, signal.SIGTERM]))
            await asyncio.to_thread(host.communicate)
            await none_left(place)


async def kill_one(place: Folder, what: str, host: subprocess.Popen[bytes]) -> None:
    """Waits until the host has found what it leaves, and has begun anew, or ended as its first start failed: host and
    warden killed together need a cgroup."""
    found = beginning_with(place.socket)
    if found[what]:
        before = set(found["warden"])
        os.kill(found[what][0], signal.SIGKILL)
        await until(
            lambda: host.poll() is not None or set(beginning_with(place.socket)["warden"]) - before, what=place.alive
        )


async def none_left(place: Folder) -> None:
    await until(
        lambda: not any(beginning_with(place.socket).values()) and not place.alive(),
        what=lambda: (place.socket, beginning_with(place.socket), place.alive()),
    )
