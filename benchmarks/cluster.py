"""A whole Hive before a cluster: `python benchmarks/cluster.py [--rounds 20] [--service 2]`.

The cluster is played on a port: Ray Serve's HTTP proxy and dashboard with two replicas of four requests each, as
recorded; what is more waits in it, first come, first served. Measured, with the default `cluster_poll_s`:

- the time from the answer of the engine that tells another number of replicas until the proxy's own queue has another
  number of places, down and up, each beginning at a random moment between two looks;
- the first byte of a light tenant's stream beside a flood: 20 streams of another tenant, and 0.9 s later one of its
  own, with `backend_cluster = none` and `auto` in turn, against the time of one stream.

Loopback only; needs redis-server; ends by itself after some two minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from build_line import build_line

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS.parent), str(TESTS)]

from journeys.sdk import Door, door_of
from journeys.stack import Stack, stack

from tests.control.played_engine import PlayedEngine, playing_in_a_thread

FLOOD, LATER_S, PIECES = 20, 0.9, 4
CHUNK = {
    "id": "c",
    "object": "chat.completion.chunk",
    "created": 0,
    "model": "tiny",
    "choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason": None}],
}
CONFIG = """backend_cluster = {cluster}
backend_cluster_url = http://{address}
[proxy]
tier_high_concurrency = 50
[tenant flood]
weight = 1
[tenant light]
weight = 1
"""


class Serving(PlayedEngine):
    """Streams of `service_s`, eight at a time."""

    def __init__(self, service_s: float) -> None:
        super().__init__()
        self._service_s = service_s
        self._places = asyncio.Semaphore(8)

    async def work(self, writer: asyncio.StreamWriter) -> None:
        async with self._places:
            head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
            writer.write(head)
            for _ in range(PIECES):
                event = b"data: %b\n\n" % json.dumps(CHUNK).encode()
                writer.write(b"%x\r\n%b\r\n" % (len(event), event))
                await asyncio.sleep(self._service_s / PIECES)
            writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--rounds", type=int, default=20)
    arguments.add_argument("--service", type=float, default=2.0, help="seconds of one stream")
    chosen = arguments.parse_args()
    print(build_line())
    with playing_in_a_thread(lambda: Serving(chosen.service)) as engine:
        engine.serve("RUNNING", "RUNNING")
        with hive_before(engine, "auto") as hive:
            down, up = followed(engine, hive, chosen.rounds)
        print(f"{chosen.rounds} rounds, cluster_poll_s = 1")
        for name, times in (("8 to 4 places", down), ("4 to 8 places", up)):
            print(f"  {name}: p50 {statistics.median(times):.2f} s, p95 {p95(times):.2f} s, most {max(times):.2f} s")
        for cluster in ("none", "auto", "none", "auto"):
            with hive_before(engine, cluster) as hive:
                first_s, waits_ms = beside_a_flood(hive)
            print(
                f"  light tenant beside a flood, backend_cluster = {cluster}: first byte after {first_s:.2f} s "
                f"({first_s / chosen.service:.2f} x one stream), X-Queue-Wait-Ms {waits_ms}"
            )


def hive_before(engine: PlayedEngine, cluster: str) -> Any:
    return stack(url=f"http://{engine.address}/v1", config=CONFIG.format(cluster=cluster, address=engine.address))


def p95(times: list[float]) -> float:
    return sorted(times)[max(0, -(-len(times) * 95 // 100) - 1)]


def followed(engine: PlayedEngine, hive: Stack, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds until the proxy's queue has the places that the engine tells: down, up."""
    times: tuple[list[float], list[float]] = [], []
    client = hive.client()

    def places() -> Any:
        return client.get("/api/queue")["slots"]

    wait_for(places, 8)
    for _ in range(rounds):
        for taken, states, wanted in ((times[0], ("RUNNING",), 4), (times[1], ("RUNNING", "RUNNING"), 8)):
            time.sleep(random.uniform(1.5, 2.5))
            engine.serve(*states)
            told_at = time.perf_counter()
            wait_for(places, wanted)
            taken.append(time.perf_counter() - told_at)
    return times


def wait_for(places: Callable[[], Any], wanted: int) -> None:
    until_at = time.perf_counter() + 30
    while places() != wanted:
        if time.perf_counter() > until_at:
            raise SystemExit(f"not {wanted} places within 30 s")
        time.sleep(0.01)


def beside_a_flood(hive: Stack) -> tuple[float, str]:
    """Seconds to the first byte of the light tenant's stream, and what Hive says that it waited in its queue."""
    doors = {}
    for name in ("flood", "light"):
        hive.create(name, "idler.py", tier="high", tenant=name)
        doors[name] = door_of(hive, name)
    return asyncio.run(flooded(doors["flood"], doors["light"]))


async def flooded(flood: Door, light: Door) -> tuple[float, str]:
    async with httpx.AsyncClient(timeout=120, trust_env=False, limits=httpx.Limits(max_connections=None)) as client:
        asked = [asyncio.create_task(stream(client, flood)) for _ in range(FLOOD)]
        await asyncio.sleep(LATER_S)
        found = await stream(client, light)
        await asyncio.gather(*asked)
        return found


async def stream(client: httpx.AsyncClient, door: Door) -> tuple[float, str]:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    began, first_s = time.perf_counter(), 0.0
    url, fields = f"{door.root}/v1/chat/completions", {"Authorization": f"Bearer {door.token}"}
    async with client.stream("POST", url, json=body, headers=fields) as answer:
        async for _ in answer.aiter_bytes():
            first_s = first_s or time.perf_counter() - began
        return first_s, answer.headers.get("x-queue-wait-ms", "")


if __name__ == "__main__":
    main()
