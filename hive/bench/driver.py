"""The callers of a density run: bursts of turns over all agents, from outside the box."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from hive.bench.search import Series, percentile
from hive.host.process import TICK_US, read_stat

TURN_S = 30.0
"""A turn that takes longer has no answer."""
BURST_S = 1.0
"""All turns of a burst begin within this."""


class CalledAgent(NamedTuple):
    """An agent, and where it takes its turns."""

    name: str
    host: str
    port: int
    path: str = ""
    token: str = ""


class BurstPace(NamedTuple):
    """Times and counts of measuring. The first burst of a series is not counted.

    `series` of each step; `bursts` counted in a series, one each `period_s`; `way_s`: a way has so long on the average,
    no step of it begins later.
    """

    series: int
    bursts: int
    period_s: float
    way_s: float


FULL = BurstPace(series=2, bursts=10, period_s=4.5, way_s=720.0)
QUICK = BurstPace(series=1, bursts=5, period_s=3.0, way_s=60.0)


class Turns:
    """Chooses who has a turn next: all agents in an order of chance, again and again.

    >>> turns = Turns(random.Random(1))
    >>> sorted(turns.take(2, of=3) + turns.take(1, of=3))
    [0, 1, 2]
    """

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._left: list[int] = []

    def take(self, count: int, *, of: int) -> list[int]:
        """The next `count` of agents 0 to `of`."""
        taken: list[int] = []
        while len(taken) < count:
            if not self._left:
                self._left = self._chance.sample(range(of), of)
            number = self._left.pop()
            if number < of and number not in taken:
                taken.append(number)
        return taken


def burst_size(agents: int, share: float) -> int:
    """
    >>> burst_size(104, 0.1), burst_size(3, 0.1)
    (10, 1)
    """
    return max(1, round(agents * share))


async def measure(
    targets: Sequence[CalledAgent], share: float, pace: BurstPace, *, serving: Sequence[int], killed: Callable[[], int]
) -> Series:
    """One series. `serving`: pids of the stub and of Hive, whose CPU counts; `killed`: by the kernel, for memory."""
    chance = random.Random(len(targets))
    turns, took, failed = Turns(chance), [], 0
    killed_before, used_before, begun = killed(), cpu_s(serving), time.perf_counter()
    for number in range(pace.bursts + 1):
        at = begun + number * pace.period_s
        await asyncio.sleep(max(0.0, at - time.perf_counter()))
        chosen = turns.take(burst_size(len(targets), share), of=len(targets))
        found = await asyncio.gather(*(_late(chance.uniform(0, BURST_S), targets[index]) for index in chosen))
        failed += sum(1 for each in found if each is None)
        if number:
            took += [each for each in found if each is not None]
        if killed() > killed_before:
            break
    wall_s = time.perf_counter() - begun
    busy = (cpu_s(serving) - used_before) / wall_s / (os.cpu_count() or 1)
    p50_s, p95_s = (round(percentile(took, share), 3) for share in (0.5, 0.95))
    return Series(p50_s, p95_s, len(took), failed, killed() - killed_before, round(max(0.0, busy), 3))


def cpu_s(pids: Sequence[int]) -> float:
    """CPU seconds of this process, which drives, and of these."""
    own = os.times()
    return own.user + own.system + sum(_ticks(pid) for pid in pids) * TICK_US / 1e6


def _ticks(pid: int) -> int:
    stat = read_stat(pid)
    return 0 if stat is None else stat.cpu_ticks


async def _late(after_s: float, target: CalledAgent) -> float | None:
    await asyncio.sleep(after_s)
    return await turn(target)


async def turn(target: CalledAgent, path: str = "/turn") -> float | None:
    """Seconds from the connect to the whole answer, a wake included; None where there is none, or another than 200."""
    begun = time.perf_counter()
    status = await ask("POST", target, path)
    return time.perf_counter() - begun if status == 200 else None


async def ask(method: str, target: CalledAgent, path: str, *, within_s: float = TURN_S) -> int:
    """The status of the answer once all of it is there; 0 where there is none."""
    try:
        async with asyncio.timeout(within_s):
            reader, writer = await asyncio.open_connection(target.host, target.port)
            try:
                writer.write(_request(method, target, path))
                answer = await reader.read()
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return 0
    words = answer.split(b" ", 2)
    return int(words[1]) if len(words) > 2 and words[1].isdigit() else 0


def _request(method: str, target: CalledAgent, path: str) -> bytes:
    token = f"X-Hive-Token: {target.token}\r\n" if target.token else ""
    return (
        f"{method} {target.path}{path} HTTP/1.1\r\nHost: {target.host}\r\n{token}"
        "Content-Length: 0\r\nConnection: close\r\n\r\n"
    ).encode()


def waves(count: int, size: int) -> Iterator[range]:
    """
    >>> list(waves(5, 2))
    [range(0, 2), range(2, 4), range(4, 5)]
    """
    return (range(begin, min(begin + size, count)) for begin in range(0, count, size))
