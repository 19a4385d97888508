"""The cost of a wake from a swap file, its working set read beside it or not: `python benchmarks/prefetch.py`.

One agent with a heap of `--mib`, of which each turn uses the same fifth, under a real helper, on a swap file made for
the run. A round: the turn awake; a page-out whose swap cache is emptied, thaw and turn at once; in turn without the
reading and with it. The penalty is the turn's median less that awake. Read in time: the share of the major faults
without it that there are none of with it. Needs root; turns its swap off again; ends by itself.
"""

# ruff: noqa: ASYNC240 - nobody else waits for this loop
from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

sys.path[:0] = [str(Path(__file__).parent.parent)]

import uvloop
from build_line import build_line

from hive.domain import Limits
from hive.host.memory import read_swaps
from hive.sandbox import working_set
from hive.sandbox.server import HelperServer
from hive.sandbox.supervised_agent import FreezeLimits
from hive.settings.table import Paths
from tests.sandbox import turns
from tests.sandbox.harness import A, Daemon, kill_all_under, runtimes, spec
from tests.swapspace import file_swap
from tests.waiting import until

MIB = 1024 * 1024


class Woken(NamedTuple):
    """One wake: milliseconds from the thaw's asking to the end of the turn, its major faults, what was cached still."""

    took_ms: float
    faults: int
    cached_bytes: int


class Subject:
    """The agent, in a memory group of its own."""

    def __init__(self, daemon: Daemon, address: str, pid: int, group: Path) -> None:
        self._client = daemon.client
        self._address = address
        self._pid = pid
        self._group = group
        self._generation = 0

    async def turn(self) -> float:
        began = time.perf_counter()
        reader, writer = await asyncio.open_unix_connection(self._address)
        writer.write(b"turn")
        if not await reader.read(64):
            raise SystemExit("the agent hung up")
        writer.close()
        return (time.perf_counter() - began) * 1e3

    async def wake(self, *, reads: bool) -> Woken:
        """Asleep, paged out and cold; then woken with a turn at once."""
        self._generation += 1
        await self._client.freeze(A, self._generation)
        await self._client.confirm(A, self._generation)
        await self._client.page_out(A, self._generation)
        cached = turns.empty_swap_cache(self._group)
        working_set.is_on_a_disk = lambda _: reads  # type: ignore[attr-defined]
        faults, began = turns.major_faults(self._pid), time.perf_counter()
        await self._client.thaw(A)
        await self.turn()
        took_ms = (time.perf_counter() - began) * 1e3
        return Woken(took_ms, turns.major_faults(self._pid) - faults, cached)


async def measure(mib: int, rounds: int) -> None:
    with tempfile.TemporaryDirectory(prefix="hive-") as directory:
        top = Path(directory)
        top.chmod(0o711)
        paths = Paths(state=top / "d", runtime=top / "r")
        helper = HelperServer(paths, runtimes(paths, "cgroup"), limits=FreezeLimits())
        await helper.open()
        daemon = Daemon(paths)
        try:
            await until(lambda: daemon.client.connected)
            await daemon.client.define(A, spec(paths, A, turns.command(mib), limits=Limits(memory_mb=2 * mib + 128)))
            pid = (await daemon.client.start(A)).pid
            await until(lambda: "ready" in paths.log(A).read_text(), within_s=120)
            group = helper._held[A]._running.memory_group()  # type: ignore[union-attr]
            if group is None:
                raise SystemExit("no memory controller here: the swap cache cannot be emptied")
            subject = Subject(daemon, f"{paths.home(A)}/s", pid, group)
            await subject.turn()
            await subject.wake(reads=False)  # the first sleep records nothing
            base, without, with_ = [], [], []
            for _ in range(rounds):
                base.append(await subject.turn())
                without.append(await subject.wake(reads=False))
                base.append(await subject.turn())
                with_.append(await subject.wake(reads=True))
            show(base, without, with_)
            await daemon.client.stop(A, grace_s=0)
        finally:
            daemon.client.close()
            await helper.leave()
            kill_all_under(paths)


def show(base: list[float], without: list[Woken], with_: list[Woken]) -> None:
    awake = statistics.median(base)
    cost = {}
    print(f"  turn awake: p50 {awake:.1f} ms")
    for label, found in (("without", without), ("with", with_)):
        times = sorted(one.took_ms for one in found)
        cost[label] = statistics.median(times) - awake
        print(
            f"  wake and turn, {label:7} p50 {statistics.median(times):7.1f} ms, longest {times[-1]:7.1f} ms, "
            f"penalty {cost[label]:6.1f} ms, major faults p50 {statistics.median(one.faults for one in found):.0f}, "
            f"left in the swap cache {max(one.cached_bytes for one in found) / MIB:.1f} MiB at most"
        )
    faults = [sum(one.faults for one in found) for found in (without, with_)]
    in_time = 1 - faults[1] / faults[0] if faults[0] else 0.0
    print(f"  penalty with / without: {cost['with'] / cost['without']:.0%} (promised: ≤ 45 %)")
    print(f"  read before the turn needed it: {in_time:.1%} (promised: ≥ 90 %)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    print(build_line())
    if os.geteuid() != 0:
        raise SystemExit("only root turns swap on")
    with file_swap(2 * args.mib + 64):
        print(f"{args.mib} MiB, {args.rounds} rounds each, Linux {os.uname().release}")
        uvloop.run(measure(args.mib, args.rounds))
    if any(swap.path.endswith("/swap") and "hive-swap-" in swap.path for swap in read_swaps() or ()):
        raise SystemExit("its swap is still on")


if __name__ == "__main__":
    main()
