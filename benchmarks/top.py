"""The cost of `hive top` with many agents: `python benchmarks/top.py [--agents 1000] [--living 50] [--for 20]`.

A whole Hive of its own with so many agents recorded, some of them living processes; `hive top` at 120 columns without a
terminal in this process, a look a second. Prints the CPU time of `hive top`, and what more than without it daemon,
helper, proxy and Redis took; the longest time the screen stood still; and for a `hive top` that is started anew in a
terminal of its own, the time until its agents are there and until it takes keys. Needs redis-server; loopback only;
ends by itself, within a minute for 1,000 agents.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import os
import pty
import shutil
import signal
import sqlite3
import struct
import sys
import tempfile
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).parent.parent
sys.path[:0] = [str(HERE / "tests"), str(HERE)]

import psutil
from build_line import build_line
from journeys.stack import PROCESSES, Stack  # a Hive of its own, as the tests have it

from hive.domain import Agent, AgentSpec
from hive.store import agents as agents_store
from hive.store.database import Database
from hive.tui.app import Top
from hive.tui.source import Source

SIZE = (120, 40)
WITHOUT_S = 10.0
"""Time for which Hive is measured before somebody looks."""
OF_A_CORE_PERCENT = {"hive top": 3.0, "daemon": 1.0}
PAINTED_IN_S = 0.5
"""Promises for 1,000 agents."""


async def fill(path: Path, agents: int) -> None:
    """A database with so many agents that were never started. The first 8 digits of an id name its socket."""
    database = Database.open(path)

    def work(conn: sqlite3.Connection) -> None:
        for number in range(agents):
            spec = AgentSpec(name=f"agent-{number:05}", command=["/bin/sleep", "1000000"])
            agents_store.insert(conn, Agent(id=f"{number:08x}{0:024x}", spec=spec, created_at=time.time()))

    await database.write(work)
    database.close()


@contextmanager
def hive_with(agents: int, living: int) -> Iterator[Stack]:
    base = Path(tempfile.mkdtemp(prefix="hive-bench-", dir="/var/tmp"))
    base.chmod(0o711)
    hive = Stack(base, url=None, config="[inference]\nauto_sleep_enabled = false\n")
    try:
        hive.state.mkdir(mode=0o711)
        asyncio.run(fill(hive.state / "hive.db", agents))
        hive.start()
        for number in range(living):
            hive.post(f"/api/agents/agent-{number * agents // living:05}/start")
        yield hive
    finally:
        if hive.process is not None and hive.process.poll() is None:
            hive.stop()
        shutil.rmtree(base, ignore_errors=True)


class Meter:
    """CPU seconds of Hive's processes since it was begun."""

    def __init__(self, hive: Stack) -> None:
        self._processes = {name: psutil.Process(hive.pid_of(name)) for name in PROCESSES}
        self._began, self._used = time.monotonic(), self._now()

    def _now(self) -> dict[str, float]:
        return {name: sum(process.cpu_times()[:2]) for name, process in self._processes.items()}

    def percent(self) -> dict[str, float]:
        """Of a core, by process."""
        now, took_s = self._now(), time.monotonic() - self._began
        return {name: 100 * (now[name] - self._used[name]) / took_s for name in now}


async def look_on(hive: Stack, socket: Path, for_s: float) -> tuple[float, dict[str, float], float]:
    """Percent of a core of this process and of Hive's, and the longest the screen stood still, over `for_s`."""
    source = Source([socket], hive.state, uid=os.geteuid(), env={})
    app = Top(source, await asyncio.to_thread(source.look))
    async with app.run_test(size=SIZE) as pilot:
        await pilot.pause(2)
        meter, own, began = Meter(hive), time.process_time(), time.monotonic()
        stood_s = 0.0
        while (now := time.monotonic()) < began + for_s:
            await asyncio.sleep(0.1)
            stood_s = max(stood_s, time.monotonic() - now - 0.1)
        used = time.process_time() - own
        return 100 * used / (time.monotonic() - began), meter.percent(), stood_s


def starts_s(socket: Path) -> tuple[float, float]:
    """From the start of `hive top` in a terminal to the first agents on it, and to the application's keys.

    The best of five. With bytecode, as installed.
    """
    took = [start_s(socket) for _ in range(5)]
    return min(first for first, _ in took), min(keys for _, keys in took)


def start_s(socket: Path) -> tuple[float, float]:
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    words = [str(Path(sys.executable).with_name("hive")), "top", "--socket", str(socket)]
    began, first, seen = time.monotonic(), 0.0, b""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(words[0], words, {**os.environ, "TERM": "xterm-256color"})
    columns, rows = SIZE
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    try:
        while b"Quit" not in seen:
            seen += os.read(terminal, 65536)
            if not first and b"agent-00000" in seen:
                first = time.monotonic() - began
        return first, time.monotonic() - began
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(terminal)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--agents", type=int, default=1000)
    parser.add_argument("--living", type=int, default=50)
    parser.add_argument("--for", type=float, default=20.0, dest="for_s")
    given = parser.parse_args()
    print(build_line())
    with hive_with(given.agents, given.living) as hive:
        socket = Path((hive.state / "socket").read_text().strip())
        time.sleep(2)
        meter = Meter(hive)
        time.sleep(WITHOUT_S)
        before = meter.percent()
        own, after, stood_s = asyncio.run(look_on(hive, socket, given.for_s))
        paint_s, keys_s = starts_s(socket)
    shares = {"hive top": own} | {name: after[name] - before[name] for name in ("daemon", "sandbox", "proxy", "redis")}
    print(f"{given.agents} agents, {given.living} of them living, a look a second, {given.for_s:.0f} s")
    for name, share in shares.items():
        promised = f"   promised {OF_A_CORE_PERCENT[name]:g} %" if name in OF_A_CORE_PERCENT else ""
        without = f"   ({before[name]:.2f} % without it)" if name in before else ""
        print(f"  {name:14} {share:6.2f} % of a core{promised}{without}")
    print(f"  stood still    {1000 * stood_s:6.0f} ms at most")
    print(f"  first paint    {1000 * paint_s:6.0f} ms   promised {1000 * PAINTED_IN_S:.0f} ms")
    print(f"  its keys       {1000 * keys_s:6.0f} ms")
    is_kept = paint_s <= PAINTED_IN_S and all(shares[name] <= most for name, most in OF_A_CORE_PERCENT.items())
    return 0 if is_kept or given.agents > 1000 else 1


if __name__ == "__main__":
    sys.exit(main())
