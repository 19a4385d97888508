"""The cost of one agent where there are many: `python benchmarks/growth.py [--to 10000] [--processes 1000]`.

A whole Hive of its own that grows to 10, 100, 1,000 … 10,000 external agents, each made at the API. At each size agents
are made, shown, listed by the page and removed, one at a time: the curve, and the ratio of its end to its beginning.
Then 5,000 are removed by one command. Then, in another Hive, process agents (`/bin/sleep`): made without being started,
listed, put to sleep, and 500 of them woken by one client, all at once and one after the other.

Wall time is the median, the processor's is what daemon, helper, proxy and Redis took together: it is what a busy
machine leaves as it is. Needs redis-server; loopback only; ends by itself, within some three minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent.parent
sys.path[:0] = [str(HERE / "tests"), str(HERE)]

from build_line import build_line
from journeys.stack import PROCESSES, Stack  # a Hive of its own, as the tests have it

SIZES = (10, 100, 1_000, 10_000)
EACH = 40
"""Times each thing is done at each size."""
AT_ONCE = 16
"""Requests under way while it grows."""
RATIO = 1.5
CREATED_MS, CREATED_PROCESS_MS, LISTED_MS, REMOVED_S, WOKEN_S = 40.0, 120.0, 150.0, 20.0, 2.0
"""Promises on two quiet cores. A list is of 1,000, a removal of 5,000, wakes are 500."""
REMOVED, WOKEN = 5_000, 500

Order = tuple[str, str, dict[str, Any] | None]


class Cost(NamedTuple):
    """Milliseconds: of the wall clock, the median, and of Hive's processors, the mean."""

    wall: float
    cpu: float


def cpu_ms(hive: Stack) -> float:
    """Of Hive's processes until now; the kernel counts nanoseconds for each thread."""
    spent = 0
    for name in PROCESSES:
        for thread in Path(f"/proc/{hive.pid_of(name)}/task").iterdir():
            with suppress(OSError):
                spent += int((thread / "schedstat").read_text().split()[0])
    return spent / 1e6


def cost(hive: Stack, work: Iterable[Callable[[], object]]) -> Cost:
    """Of each of these, one after the other."""
    took, before = [], cpu_ms(hive)
    for one in work:
        began = time.perf_counter()
        one()
        took.append(1000 * (time.perf_counter() - began))
    return Cost(statistics.median(took), (cpu_ms(hive) - before) / len(took))


async def ask(path: Path, order: Order) -> float:
    """Sends it on a connection of its own; when it was answered."""
    method, target, body = order
    data = b"" if body is None else json.dumps(body).encode()
    reader, writer = await asyncio.open_unix_connection(path)
    head = f"{method} {target} HTTP/1.1\r\nHost: hive\r\nConnection: close\r\nContent-Length: {len(data)}\r\n"
    writer.write(f"{head}Content-Type: application/json\r\n\r\n".encode() + data)
    answer = await reader.read(-1)
    writer.close()
    assert answer.startswith(b"HTTP/1.1 2"), answer[:400]
    return time.perf_counter()


async def ask_all(path: Path, orders: Iterable[Order], at_once: int) -> list[float]:
    """All of them, so many at a time; when each was answered, in seconds from the beginning."""
    permits, began = asyncio.Semaphore(at_once), time.perf_counter()

    async def one(order: Order) -> float:
        async with permits:
            return await ask(path, order) - began

    return await asyncio.gather(*map(one, orders))


def external(number: int) -> dict[str, Any]:
    return {"name": f"agent-{number:05}", "runtime": "external"}


def process(number: int) -> dict[str, Any]:
    return {"name": f"p{number:05}", "command": ["/bin/sleep", "1000000"], "deepest": "light"}


@contextmanager
def whole_hive() -> Iterator[Stack]:
    base = Path(tempfile.mkdtemp(prefix="hive-bench-", dir="/var/tmp"))
    base.chmod(0o711)
    hive = Stack(base, url=None, config="[inference]\nauto_sleep_enabled = false\n")
    try:
        hive.start()
        yield hive
    finally:
        if hive.process is not None and hive.process.poll() is None:
            hive.stop()
        shutil.rmtree(base, ignore_errors=True)


def at_size(hive: Stack) -> dict[str, Cost]:
    """Costs of each thing with as many agents as there are."""
    client, name = hive.client(), "/api/agents/agent-x{:02}".format
    return {
        "create": cost(
            hive,
            [lambda n=n: client.post("/api/agents", {**external(n), "name": f"agent-x{n:02}"}) for n in range(EACH)],
        ),
        "show": cost(hive, [lambda n=n: client.get(name(n)) for n in range(EACH)]),
        "resume": cost(hive, [lambda n=n: client.post(name(n) + "/resume") for n in range(EACH)]),
        "page of 10": cost(hive, [lambda: client.get("/api/agents", limit=10)] * EACH),
        "remove": cost(hive, [lambda n=n: client.delete(name(n)) for n in range(EACH)]),
    }


def curve(to: int) -> None:
    sizes = [size for size in SIZES if size <= to]
    found: list[dict[str, Cost]] = []
    with whole_hive() as hive:
        socket, there = hive.client().path, 0
        client = hive.client()
        client.post("/api/agents", {**external(0), "name": "first"})  # what the first one needs is no price of others
        client.delete("/api/agents/first")
        for size in sizes:
            orders: list[Order] = [("POST", "/api/agents", external(n)) for n in range(there, size)]
            before, began = cpu_ms(hive), time.perf_counter()
            asyncio.run(ask_all(socket, orders, AT_ONCE))
            each_ms, grown_s = (cpu_ms(hive) - before) / len(orders), time.perf_counter() - began
            print(f"{size:6} external agents   ({len(orders)} made in {grown_s:.1f} s, {each_ms:.2f} ms of CPU each)")
            there = size
            time.sleep(1)
            found.append(at_size(hive))
            for what, spent in found[-1].items():
                promised = f"   promised: ≤ {CREATED_MS:g} ms" if what == "create" else ""
                print(f"    {what:12} {spent.wall:8.2f} ms   {spent.cpu:8.2f} ms of CPU{promised}")
        print(f"{sizes[-1]} agents to {sizes[0]}: ratio of the wall time, of the CPU time   promised: ≤ {RATIO}")
        for what, first in found[0].items():
            last = found[-1][what]
            print(f"    {what:12} {last.wall / first.wall:8.2f}      {last.cpu / first.cpu:8.2f}")
        whole_lists(hive, there)
        remove_by_one_command(hive, min(REMOVED, there))


def whole_lists(hive: Stack, agents: int) -> None:
    client = hive.client()
    for what, work in (
        (f"list of {agents}", lambda: client.get("/api/agents")),
        ("list of 1000 (a page)", lambda: client.get("/api/agents", limit=1000)),
        (f"hive ps -q of {agents}", lambda: command(hive, "ps", "-q")),
    ):
        spent = cost(hive, [work] * 5)
        promised = f"   promised: ≤ {LISTED_MS:g} ms" if what.startswith("list of 1000 ") else ""
        print(f"    {what:24} {spent.wall:8.1f} ms   {spent.cpu:8.1f} ms of CPU{promised}")


def command(hive: Stack, *words: str) -> None:
    socket = ("--socket", str(hive.client().path))
    subprocess.run([sys.executable, "-m", "hive", *words, *socket], stdout=subprocess.DEVNULL, check=True)


def remove_by_one_command(hive: Stack, count: int) -> None:
    names = [external(number)["name"] for number in range(count)]
    spent = cost(hive, [lambda: command(hive, "agent", "remove", *names, "--yes")])
    left = hive.get("/api/agents", limit="1")["total"]
    took = f"{spent.wall / 1000:.1f} s, {spent.cpu / 1000:.1f} s of CPU, {left} left"
    print(f"    removal of {count} by one command: {took}   promised: ≤ {REMOVED_S:g} s")


def processes(count: int) -> None:
    with whole_hive() as hive:
        client, there = hive.client(), 0
        for size in sorted({10, count}):
            orders: list[Order] = [("POST", "/api/agents", process(n)) for n in range(there, size)]
            asyncio.run(ask_all(client.path, orders, 8))
            there = size
            made = [f"x{size}-{n}" for n in range(10)]
            spent = cost(
                hive,
                [lambda name=name: client.put(f"/api/agents/{name}", {**process(0), "name": name}) for name in made],
            )
            print(f"{size:6} process agents")
            promised = f"   promised: ≤ {CREATED_PROCESS_MS:g} ms"
            print(f"    made, not started        {spent.wall:8.2f} ms   {spent.cpu:8.2f} ms of CPU{promised}")
            started = cost(hive, [lambda name=name: client.post(f"/api/agents/{name}/start") for name in made])
            print(f"    started                  {started.wall:8.2f} ms   {started.cpu:8.2f} ms of CPU")
            spent = cost(hive, [lambda: client.get("/api/agents")] * 5)
            promised = f"   promised: ≤ {LISTED_MS:g} ms for 1000"
            print(f"    list of all              {spent.wall:8.2f} ms   {spent.cpu:8.2f} ms of CPU{promised}")
        wake_many(hive, min(WOKEN, count))


def wake_many(hive: Stack, count: int) -> None:
    client = hive.client()

    def orders(verb: str) -> list[Order]:
        return [
            ("POST", f"/api/agents/{process(n)['name']}/{verb}", {} if verb == "pause" else None) for n in range(count)
        ]

    asyncio.run(ask_all(client.path, orders("pause"), 100))
    before = cpu_ms(hive)
    answered = asyncio.run(ask_all(client.path, orders("resume"), count))
    spent_s = (cpu_ms(hive) - before) / 1000
    took = f"the first answered after {min(answered):.2f} s, the last after {max(answered):.2f} s"
    print(f"    {count} wakes at once: {took}, {spent_s:.2f} s of CPU   promised: ≤ {WOKEN_S:g} s for the last")
    asyncio.run(ask_all(client.path, orders("pause"), 100))
    before, began = cpu_ms(hive), time.perf_counter()
    for _, target, _ in orders("resume"):
        client.post(target)
    took_s, spent_s = time.perf_counter() - began, (cpu_ms(hive) - before) / 1000
    print(f"    {count} wakes one after the other: {took_s:.2f} s, {spent_s:.2f} s of CPU   promised: ≤ {WOKEN_S:g} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--to", type=int, default=10_000, help="external agents; 0: none")
    parser.add_argument("--processes", type=int, default=1_000, help="process agents; 0: none")
    arguments = parser.parse_args()
    print(build_line())
    if arguments.to >= SIZES[0]:
        curve(arguments.to)
    if arguments.processes:
        processes(arguments.processes)
