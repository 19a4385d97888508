"""Fairness of the one queue, through the real proxy: `python benchmarks/fairness.py [--requests 2000]`.

A `hive proxy` process, agents with tokens of their own on TCP, and a stand-in backend of `PLACES` places whose answers
take as long as their tokens and say them as usage. What a request will cost the proxy cannot know before. Measured:
the share of tokens of two tenants that always have more to ask, with service times of 10:1; the wait of a tenant
below its share beside a flood from many agents, and beside one tenant that takes no more than its share, in turn; and
tokens per second beside first come first served (the same requests, all from one agent). A wait is from the first
byte sent until the backend begins. Loopback only; ends by itself after about a minute.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import itertools
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path

from build_line import build_line
from proxy import Daemon

from hive.domain import BackendInfo, BackendKind, ModelInfo, Tier
from hive.link.link import Link
from hive.link.messages import AgentRow, DaemonTable, Hello
from hive.settings.table import Paths

PLACES = 4
TOKENS_PER_S = 6000.0
"""Of one place."""
SHORT, LONG = 100, 1000
OPEN = 9
"""Requests of a backlogged client that are open at once: with nine more of another one there is always a line, and
all of them fit into the line of one tenant (16 deep, and 4 at the backend)."""
FLOOD_AGENTS, FLOOD_OPEN = 20, 4
PAIRS = 2
"""Rounds: those that are compared are measured in turn, so often."""
LIGHT_LOAD = 0.4
"""Of its share of the backend."""
TENANTS = {"short": "short", "long": "long", "light": "light", "equal": "equal", "everybody": "everybody"} | {
    f"flood-{number}": "flood" for number in range(FLOOD_AGENTS)
}
"""Tenant by agent."""
CONF = """
[proxy]
window_requests = 100000000
"""


class Places:
    """The backend: answers each request after `tokens / TOKENS_PER_S`, `PLACES` at a time, the others in its own line.

    `begun_at`: when a request got its place, by its number.
    """

    def __init__(self) -> None:
        self.begun_at: dict[int, float] = {}
        self.most = 0
        self._open = 0
        self._free = asyncio.Semaphore(PLACES)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            while True:
                _, body = await read_message(reader)
                number, tokens = map(int, json.loads(body)["messages"][0]["content"].split())
                self._open += 1
                self.most = max(self.most, self._open)
                async with self._free:
                    self.begun_at[number] = time.perf_counter()
                    await asyncio.sleep(tokens / TOKENS_PER_S)
                self._open -= 1
                writer.write(answer(tokens))
        writer.close()


def answer(tokens: int) -> bytes:
    body = json.dumps(
        {
            "id": "c",
            "object": "chat.completion",
            "created": 0,
            "model": "m",
            "choices": [{"index": 0, "message": {"role": "assistant", "content": "x"}, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 0, "completion_tokens": tokens, "total_tokens": tokens},
        }
    ).encode()
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


async def read_message(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """(head, body) of a request or an answer with a Content-Length."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
    return head, await reader.readexactly(length)


class Table(Daemon):
    """The stand-in daemon: tells the proxy all agents of `TENANTS` and the backend with its places."""

    def _here(self, link: Link) -> None:
        rows = [
            AgentRow(
                id=agent,
                name=agent,
                generation=1,
                gate="open",
                status="running",
                tier=Tier.HIGH,
                tenant=tenant,
                model_digest=hashlib.sha256(f"hm_{agent}".encode()).hexdigest(),
            )
            for agent, tenant in TENANTS.items()
        ]
        backend = BackendInfo(kind=BackendKind.LLAMA, address=self._backend, up=True, places=PLACES)
        link.tell(Hello(role="daemon", epoch="bench"))
        link.tell(DaemonTable(agents=rows, backend=backend, models=[ModelInfo(name="m")], marks={}))


class Asker:
    """Asks through the proxy on kept connections. `tokens`: of answered requests, by tenant; `waits_s`: by agent."""

    def __init__(self, port: int, places: Places) -> None:
        self._port = port
        self._places = places
        self._numbers = itertools.count()
        self._idle: dict[str, list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]] = {}
        self._over = False
        self._count_anew()

    def _count_anew(self) -> None:
        self.began = time.perf_counter()
        self.tokens = dict.fromkeys(TENANTS.values(), 0)
        self.waits_s: dict[str, list[float]] = {agent: [] for agent in TENANTS}
        self.answered = self.refused = 0

    @property
    def tokens_per_s(self) -> float:
        return sum(self.tokens.values()) / (time.perf_counter() - self.began)

    async def ask(self, agent: str, tokens: int) -> bool:
        """Whether it was answered; False for a 503."""
        number = next(self._numbers)
        body = json.dumps({"model": "m", "messages": [{"role": "user", "content": f"{number} {tokens}"}]}).encode()
        idle = self._idle.setdefault(agent, [])
        reader, writer = idle.pop() if idle else await asyncio.open_connection("127.0.0.1", self._port)
        sent_at = time.perf_counter()
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer hm_%b\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (agent.encode(), len(body), body)
        )
        head, told = await read_message(reader)
        idle.append((reader, writer))
        status = int(head[9:12])
        if status == 200:
            self.answered += 1
            self.tokens[TENANTS[agent]] += tokens
            self.waits_s[agent].append(self._places.begun_at.pop(number) - sent_at)
        elif status == 503:
            self.refused += 1
        else:
            raise SystemExit(f"the proxy answered {head!r} {told!r}")
        return status == 200

    async def backlogged(self, agent: str, tokens: Iterator[int]) -> None:
        """One after the other; refused it comes again after 100 ms, whatever it was told."""
        while not self._over:
            if not await self.ask(agent, next(tokens)):
                await asyncio.sleep(0.1)

    async def now_and_then(self, agent: str, tokens: int, per_s: float, chance: random.Random) -> None:
        """At random moments, whether or not the last one has ended."""
        async with asyncio.TaskGroup() as group:
            due = time.perf_counter()
            while not self._over:
                due += chance.expovariate(per_s)
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                group.create_task(self.ask(agent, tokens))

    def close(self) -> None:
        for idle in self._idle.values():
            for _, writer in idle:
                writer.close()

    @contextlib.asynccontextmanager
    async def at_work(self, *clients: Coroutine[None, None, None]) -> AsyncIterator[None]:
        """All of them, counted from the moment the block begins; at its end what is open is still answered."""
        self._over = False
        async with asyncio.TaskGroup() as group:
            for client in clients:
                group.create_task(client)
            await asyncio.sleep(0.5)
            self._count_anew()
            yield
            self._over = True


async def until(done: Callable[[], bool]) -> None:
    while not done():
        await asyncio.sleep(0.02)


async def two_tenants(asker: Asker, requests: int) -> tuple[int, int, float]:
    """(tokens of the short requests' tenant, of the long ones', tokens per second); both always have more to ask."""
    both = [("short", itertools.repeat(SHORT)), ("long", itertools.repeat(LONG))]
    async with asker.at_work(*(asker.backlogged(agent, tokens) for agent, tokens in both * OPEN)):
        await until(lambda: asker.answered >= requests)
        result = asker.tokens["short"], asker.tokens["long"], asker.tokens_per_s
    if asker.refused:
        raise SystemExit(f"{asker.refused} of the backlogged requests were refused")
    return result


async def first_come(asker: Asker, requests: int) -> float:
    """Tokens per second with as many open as in `two_tenants`, in the same proportion, all of one agent."""
    mixed = itertools.cycle([SHORT] * 5 + [LONG] + [SHORT] * 5)
    async with asker.at_work(*(asker.backlogged("everybody", mixed) for _ in range(2 * OPEN))):
        await until(lambda: asker.answered >= requests)
        return asker.tokens_per_s


async def light_waits_s(asker: Asker, neighbours: list[str], each: int, requests: int, seed: int) -> list[float]:
    """The waits of a tenant that asks for `LIGHT_LOAD` of its share, beside agents that have `each` open at once."""
    share_per_s = PLACES * TOKENS_PER_S / SHORT / 2
    light = asker.now_and_then("light", SHORT, LIGHT_LOAD * share_per_s, random.Random(seed))
    backlogged = (asker.backlogged(agent, itertools.repeat(SHORT)) for agent in neighbours * each)
    async with asker.at_work(light, *backlogged):
        await until(lambda: len(asker.waits_s["light"]) >= requests)
        return asker.waits_s["light"][:]


def p95(values: list[float]) -> float:
    return statistics.quantiles(values, n=20)[-1]


def verdict(met: bool) -> str:
    return "met" if met else "MISSED"


async def figures(asker: Asker, places: Places, requests: int) -> None:
    await shares(asker, requests)
    await waits(asker, requests // 2)
    print(f"  requests at the backend at once, at most: {places.most} of {PLACES}")


async def shares(asker: Asker, requests: int) -> None:
    short = long = 0
    rates, first_come_rates = [], []
    for _ in range(PAIRS):
        of_short, of_long, rate = await two_tenants(asker, requests // PAIRS)
        short, long = short + of_short, long + of_long
        rates.append(rate)
        first_come_rates.append(await first_come(asker, requests // PAIRS))
    part = short / (short + long)
    error = abs(part - 0.5) / 0.5
    print(f"  tokens of two backlogged tenants, service times 10:1, {requests} requests")
    print(f"    {part:.1%} : {1 - part:.1%}   error {error:.1%}   target <= 5 %   {verdict(error <= 0.05)}")
    ratio = statistics.mean(rates) / statistics.mean(first_come_rates)
    print(f"  throughput {statistics.mean(rates):.0f} tokens/s, ", end="")
    print(f"first come first served {statistics.mean(first_come_rates):.0f}")
    print(f"    {ratio:.1%}   target >= 95 %   {verdict(ratio >= 0.95)}")


async def waits(asker: Asker, requests: int) -> None:
    beside: dict[str, list[float]] = {"equal": [], "flood": []}
    refused = 0
    flood = [agent for agent, tenant in TENANTS.items() if tenant == "flood"]
    for seed in range(2 * PAIRS):
        beside["equal"] += await light_waits_s(asker, ["equal"], OPEN, requests // PAIRS // 2, seed)
        beside["flood"] += await light_waits_s(asker, flood, FLOOD_OPEN, requests // PAIRS // 2, seed)
        refused += asker.refused
    equal_ms, flood_ms = p95(beside["equal"]) * 1e3, p95(beside["flood"]) * 1e3
    ratio = flood_ms / equal_ms
    print(f"  p95 wait of a tenant that asks for {LIGHT_LOAD:.0%} of its share, {len(beside['flood'])} requests")
    print(f"    {flood_ms:.1f} ms beside {FLOOD_AGENTS} agents of one tenant ({refused} refused), ", end="")
    print(f"{equal_ms:.1f} ms beside one equal tenant")
    print(f"    {ratio:.2f}   target <= 1.25   {verdict(ratio <= 1.25)}")


async def run(requests: int) -> None:
    with tempfile.TemporaryDirectory(prefix="hive-bench-") as name:
        directory = Path(name)
        paths = Paths(directory / "state", directory / "run")
        paths.state.mkdir()
        paths.runtime.mkdir()
        (directory / "hive.conf").write_text(CONF)
        places = Places()
        backend = await asyncio.start_server(places.serve, "127.0.0.1", 0)
        started: list[subprocess.Popen[bytes]] = []
        try:
            table = Table(paths, f"127.0.0.1:{backend.sockets[0].getsockname()[1]}")
            started.append(
                subprocess.Popen(
                    [
                        *(sys.executable, "-m", "hive", "proxy"),
                        *("--state-dir", str(paths.state), "--runtime-dir", str(paths.runtime)),
                        *("--config", str(directory / "hive.conf"), "--port", "0", "--ingress-port", "0"),
                    ]
                )
            )
            asker = Asker(await asyncio.wait_for(table.port, 20), places)
            print(f"fairness through the proxy: {PLACES} places of {TOKENS_PER_S:.0f} tokens/s")
            await figures(asker, places, requests)
            asker.close()
        finally:
            for process in reversed(started):
                process.terminate()
                process.wait(20)
            backend.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=2000, help="of the first figure; the others follow it")
    requests = parser.parse_args().requests
    print(build_line())
    asyncio.run(run(requests))


if __name__ == "__main__":
    main()
