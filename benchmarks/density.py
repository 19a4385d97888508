"""Agents that fit into a fixed memory: `python benchmarks/density.py [--box-mib 640] [--mib 60] [--awake 0.1]`.

A box (a memory cgroup) holds real process agents. Turn after turn one of them is asked, touches 30 % of its heap and
answers; agents are added until one is killed for memory or answers later than the objective. Three ways to live:
`no swap`, `swap, nobody sleeps` (the kernel swaps as it sees fit), `Hive` (all but a share are frozen and paged out by
a real helper). What zram takes is not charged to the box by the kernel, so the box is made smaller by as much, again
and again. Needs root; two test sessions wait for each other; ends by itself.
"""

# ruff: noqa: ASYNC240 - nobody else waits for this loop
from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

sys.path[:0] = [str(Path(__file__).parent.parent / "tests"), str(Path(__file__).parent.parent)]

import pytest
import uvloop
from build_line import build_line
from sandbox.harness import HelperProcess, kill_all_under, spec
from sleep import AGENT, SWAPS, zram_bytes
from swapspace import without_swap

from hive.errors import HiveError, LinkLost, WrongState
from hive.host.cgroup import Subtree, mount_of_v1
from hive.host.limits import oom_kills
from hive.host.process import write_control
from hive.sandbox.client import SandboxClient
from hive.settings.table import Paths
from hive.tasks import spawn
from tests.waiting import until

MIB = 1024 * 1024
PROMISED = {"zram": 2.5, "file": 5.0}
AWAKE = (0.05, 0.1, 0.2, 0.3)
RESERVE_MIB = 4
"""The limit is set anew after every turn; between two of them zram may grow by about as much."""


class Box:
    """A memory cgroup that stands for a machine of `mib`. `device`: the swap whose RAM belongs to that machine too."""

    def __init__(self, mib: int, device: str, state: Path) -> None:
        v1 = mount_of_v1("memory", Path("/proc/self/mounts").read_text())
        subtree = Subtree.find(state)
        if v1 is None and subtree is None:
            raise SystemExit("no memory cgroup may be written here")
        self.bytes = mib * MIB
        self._device = device
        self._is_v1 = v1 is not None
        self._path = v1 / f"hive-density-{os.getpid()}" if v1 is not None else subtree.path
        self._path.mkdir(exist_ok=True)
        self.fit()

    def take(self, pid: int) -> None:
        """With v2 the agent's leaf is below the box already."""
        if self._is_v1:
            write_control(self._path / "cgroup.procs", str(pid).encode())

    def fit(self) -> None:
        """Leaves to the agents what zram has not taken; a kernel that cannot reclaim so fast keeps the old limit."""
        left = self.bytes - zram_bytes(self._device) - RESERVE_MIB * MIB
        with contextlib.suppress(OSError):
            name = "memory.limit_in_bytes" if self._is_v1 else "memory.max"
            write_control(self._path / name, str(max(left, MIB)).encode())

    def killed(self) -> int:
        return oom_kills(self._path)

    def remove(self) -> None:
        if self._is_v1:
            self._path.rmdir()


class Agent(NamedTuple):
    name: str
    pid: int
    socket: str


class Village:
    """Agents in a box, and who of them is awake."""

    def __init__(self, client: SandboxClient, paths: Paths, box: Box, *, mib: int, share: float, sleeps: bool) -> None:
        self._client = client
        self._paths = paths
        self._box = box
        self._mib = mib
        self._share = share
        self._sleeps = sleeps
        self._generation = 0
        self.agents: list[Agent] = []
        self._awake: deque[Agent] = deque()
        self._paging: asyncio.Task[None] | None = None
        self._going: Agent | None = None
        self.whole: list[int] = []
        """Bytes of an agent before it sleeps for the first time."""
        self.kept: list[int] = []
        """Bytes of one that sleeps."""

    async def settle_one(self) -> None:
        """Starts one more; its heap grows inside the box."""
        name = f"a{len(self.agents)}"
        await self._client.define(name, spec(self._paths, name, ["/usr/bin/python3", "-S", "-c", AGENT, "0"]))
        pid = (await self._client.start(name)).pid
        agent = Agent(name, pid, str(self._paths.home(name) / "s"))
        await until(lambda: "ready" in self._paths.log(name).read_text())
        self._box.take(pid)
        await ask(agent, f"grow {self._mib}")
        self.agents.append(agent)
        self.whole.append(anonymous_bytes(pid))
        await self._was_used(agent)

    async def turn(self, agent: Agent) -> float:
        """Seconds from the request to its answer, a wake included."""
        if agent is self._going:
            await self.rest()
        begun = time.perf_counter()
        if self._sleeps and agent not in self._awake:
            await self._client.thaw(agent.name)
        await ask(agent, "0.3")
        took_s = time.perf_counter() - begun
        await self._was_used(agent)
        return took_s

    async def _was_used(self, agent: Agent) -> None:
        """The longest unused goes to sleep while the next is asked already."""
        await self.rest()
        if agent in self._awake:
            self._awake.remove(agent)
        self._awake.append(agent)
        if self._sleeps and len(self._awake) > max(1, round(self._share * len(self.agents))):
            self._going = self._awake.popleft()
            self._paging = spawn(self._put_to_sleep(self._going), name="page out")
        self._box.fit()

    async def _put_to_sleep(self, agent: Agent) -> None:
        self._generation += 1
        with contextlib.suppress(WrongState, LinkLost, FileNotFoundError):  # killed for memory: the box counts those
            await self._client.freeze(agent.name, self._generation)
            await self._client.confirm(agent.name, self._generation)
            await self._client.page_out(agent.name, self._generation)
            self.kept.append(anonymous_bytes(agent.pid))
        self._box.fit()

    async def rest(self) -> None:
        """Returns once nobody is on the way to sleep."""
        if self._paging is not None:
            await self._paging
            self._paging = self._going = None


def anonymous_bytes(pid: int) -> int:
    """RAM of the process that is its alone: mapped files are shared by all agents, and in no box."""
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("RssAnon:"))


async def ask(agent: Agent, word: str) -> None:
    """Raises ConnectionError where it is gone."""
    reader, writer = await asyncio.open_unix_connection(agent.socket)
    writer.write(word.encode())
    if not await reader.read(64):
        raise ConnectionResetError("no answer")
    writer.close()


class Fit(NamedTuple):
    """Agents that fitted. `limit`: what kept one more out. `kept`: RAM of a sleeper incl. zram, as a share of its
    own."""

    agents: int
    limit: str
    slowest_s: float
    median_s: float
    kept: float | None


async def fill(village: Village, box: Box, device: str, arguments: argparse.Namespace) -> Fit:
    """Adds agents until the objective is missed; after each, every agent is asked once more, the oldest first."""
    good = Fit(0, "", 0.0, 0.0, None)
    while True:
        try:
            await village.settle_one()
            if len(village.agents) % arguments.step:
                continue
            times = [await village.turn(agent) for agent in list(village.agents)]
            await village.rest()
        except (ConnectionError, TimeoutError, HiveError) as error:
            why = f"{box.killed()} killed for memory" if box.killed() else str(error)
            return good._replace(limit=f"at {len(village.agents) + 1}: {why}")
        if box.killed():
            return good._replace(limit=f"at {len(village.agents)}: {box.killed()} killed for memory")
        if max(times) > arguments.objective_s:
            return good._replace(limit=f"at {len(village.agents)}: an answer after {max(times):.2f} s")
        good = Fit(len(village.agents), "", max(times), statistics.median(times), share_kept(village, device))
        if good.agents >= arguments.most:
            return good._replace(limit=f"not tried beyond {arguments.most}")


def share_kept(village: Village, device: str) -> float | None:
    """Of a sleeper's RAM: what its process holds, and its part of what zram takes."""
    if not village.kept:
        return None
    sleepers = max(1, len(village.agents) - 1)
    kept = statistics.median(village.kept[-sleepers:]) + zram_bytes(device) / sleepers
    return kept / statistics.median(village.whole)


@contextlib.asynccontextmanager
async def village(arguments: argparse.Namespace, device: str, *, sleeps: bool) -> AsyncIterator[tuple[Village, Box]]:
    with tempfile.TemporaryDirectory(prefix="hive-") as directory:
        top = Path(directory)
        top.chmod(0o711)
        paths = Paths(state=top / "d", runtime=top / "r")
        helper = HelperProcess(paths, "cgroup")
        connected = asyncio.Event()
        await until(paths.sandbox_socket.exists)
        client = SandboxClient(paths.sandbox_socket, role="daemon", epoch="bench", on_connected=connected.set)
        box = Box(arguments.box_mib, device, paths.state)
        try:
            await connected.wait()
            agents = Village(client, paths, box, mib=arguments.mib, share=arguments.awake, sleeps=sleeps)
            yield agents, box
            with contextlib.suppress(HiveError):
                await agents.rest()
        finally:
            client.close()
            helper.process.kill()
            helper.process.wait()
            kill_all_under(paths)
            await asyncio.sleep(0.2)
            box.remove()


async def live(arguments: argparse.Namespace, device: str, *, sleeps: bool) -> Fit:
    async with village(arguments, device, sleeps=sleeps) as (agents, box):
        return await fill(agents, box, device, arguments)


def run(
    label: str, swap: AbstractContextManager[str | None], arguments: argparse.Namespace, *, sleeps: bool
) -> Fit | None:
    try:
        with swap as device:
            fit = uvloop.run(live(arguments, device or "", sleeps=sleeps))
    except pytest.skip.Exception as skipped:
        print(f"  {label:28} {skipped}")
        return None
    kept = "" if fit.kept is None else f"   k {fit.kept:.2f}"
    print(
        f"  {label:28} {fit.agents:3} agents   answer median {fit.median_s * 1e3:5.0f} ms, slowest "
        f"{fit.slowest_s * 1e3:5.0f} ms{kept}   ended {fit.limit}"
    )
    return fit


def told(swap: str, fit: Fit, alone: Fit, awake: float) -> Iterator[str]:
    if fit.kept is None or not alone.agents:
        return
    for share in AWAKE:
        yield f"    a {share:4.0%}   1 / (a + (1 - a) k) = {1 / (share + (1 - share) * fit.kept):.1f} ×"
    yield (
        f"  measured at a = {awake:.0%} with {swap}: {fit.agents / alone.agents:.1f} ×; "
        f"promised: ≥ {PROMISED[swap]} × at 10 %"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--box-mib", type=int, default=640, help="memory of the machine the box stands for")
    parser.add_argument("--mib", type=int, default=60, help="size of each agent")
    parser.add_argument("--awake", type=float, default=0.1, help="share of the agents that is awake")
    parser.add_argument("--objective-s", type=float, default=2.0, help="every answer comes within")
    parser.add_argument("--swap", nargs="+", choices=("zram", "file"), default=["zram", "file"])
    parser.add_argument("--step", type=int, default=2, help="agents added between two rounds of turns")
    parser.add_argument("--most", type=int, default=80, help="no more agents than this")
    arguments = parser.parse_args()
    print(build_line())
    print(
        f"agents of {arguments.mib} MiB in {arguments.box_mib} MiB, {arguments.awake:.0%} awake, every answer within "
        f"{arguments.objective_s:g} s"
    )
    alone = run("no swap", without_swap(), arguments, sleeps=False)
    size_mib = arguments.most * (arguments.mib + 10)
    for swap in arguments.swap:
        make = SWAPS[swap]
        run(f"{swap}, nobody sleeps", make(size_mib), arguments, sleeps=False)
        fit = run(f"{swap}, Hive", make(size_mib), arguments, sleeps=True)
        if fit is not None and alone is not None:
            print("\n".join(told(swap, fit, alone, arguments.awake)))


if __name__ == "__main__":
    main()
