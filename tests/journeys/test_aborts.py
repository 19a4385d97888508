"""Ten thousand requests that are given up at a random moment, through a real proxy process: nothing of them stays."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import struct
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import uvloop

from tests.journeys.alone import TOKEN, Alone, alone
from tests.waiting import until

ABORTS = int(os.environ.get("HIVE_ABORTS", "10000"))
AT_ONCE = 50
LONGEST_S = 0.2
"""A caller stays at most this long; an answer takes 0 to 60 ms here, or never comes."""
WARM_UP = 500
"""Requests before what the process holds is noted: its pools and caches have grown by then."""
MORE_MIB = 16
"""Memory that the process may hold more after 10,000 than after WARM_UP: a leak of 2 KiB a request would show."""
FILES_MORE = 4
"""A file of the spool may have been opened since."""
CONFIG = """
queue_depth = 32
tier_high_concurrency = 16
body_idle_s = 3
head_s = 3
"""
MOODS = (
    "whole",
    "stream",
    "slow head",
    "slow stream",
    "long",
    "error",
    "silence",
    "stall",
    "broken",
    "refuse",
    "nonsense",
)
EVENT = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
ANSWER = b'{"id":"c","choices":[{"message":{"content":"hi"},"finish_reason":"stop"}],"usage":{"prompt_tokens":7,'
ANSWER += b'"completion_tokens":3,"total_tokens":10}}'
RESET = struct.pack("ii", 1, 0)


def whole(body: bytes, *, status: bytes = b"200 OK") -> bytes:
    head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % (status, len(body))
    return head + body


class Backend:
    """Does what the prompt says, one of MOODS; counts who is connected."""

    def __init__(self) -> None:
        self.open = 0
        self.asked = dict.fromkeys(MOODS, 0)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open += 1
        try:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, RuntimeError):
                while await self._one(reader, writer):
                    await writer.drain()
        finally:
            self.open -= 1
            writer.transport.abort()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
        body = await reader.readexactly(length)
        mood = next(mood for mood in MOODS if b'"content":"%b"' % mood.encode() in body)
        self.asked[mood] += 1
        match mood:
            case "whole":
                writer.write(whole(ANSWER))
            case "slow head":
                await asyncio.sleep(0.06)
                writer.write(whole(ANSWER))
            case "long":
                writer.write(whole(b"x" * 3_000_000))
            case "error":
                writer.write(whole(b'{"error":{"message":"no"}}', status=b"500 Internal Server Error"))
            case "nonsense":
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nx")
            case "silence":
                await reader.read()
            case "refuse":
                return False
            case _:
                return await self._stream(mood, reader, writer)
        return True

    async def _stream(self, mood: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        for _ in range(8):
            writer.write(b"%x\r\n%b\r\n" % (len(EVENT), EVENT))
            await writer.drain()
            if mood == "slow stream":
                await asyncio.sleep(0.005)
        if mood == "stall":
            await reader.read()
        if mood == "broken":
            return False
        writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        return True


def request(mood: str, listener: str, chance: random.Random) -> bytes:
    size = chance.choice((10, 10, 10, 5_000, 200_000))
    stream = b'"stream":true,' if mood in ("stream", "slow stream", "stall", "broken") else b""
    body = b'{"model":"m",%b"messages":[{"role":"user","content":"%b"},{"role":"user","content":"%b"}]}' % (
        stream,
        mood.encode(),
        b"x" * size,
    )
    auth = b"" if listener == "unix" else b"authorization: Bearer %b\r\n" % TOKEN.encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: h\r\ncontent-type: application/json\r\n"
    return head + auth + b"content-length: %d\r\n\r\n" % len(body) + body


async def give_up(hive: Alone, chance: random.Random) -> int:
    """One caller: sends all or a part, reads or does not, goes. Returns how many bytes it was answered."""
    loop, listener, got = asyncio.get_running_loop(), chance.choice(("unix", "tcp")), 0
    data = request(chance.choice(MOODS), listener, chance)
    if chance.random() < 0.2:
        data = data[: chance.randrange(len(data))]
    reads = chance.random() < 0.7
    with await hive.connect(listener) as sock, contextlib.suppress(OSError):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(chance.uniform(0, LONGEST_S)):
                await loop.sock_sendall(sock, data)
                while reads and (more := await loop.sock_recv(sock, 65536)):
                    got += len(more)
                await asyncio.sleep(LONGEST_S)
        match chance.choice(("close", "reset", "half", "half")):
            case "half":
                sock.shutdown(socket.SHUT_WR)
                await asyncio.sleep(chance.uniform(0, 0.02))
            case "reset" if listener == "tcp":
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    return got


async def many(hive: Alone, count: int, chance: random.Random) -> int:
    left, answered = count, 0

    async def caller() -> None:
        nonlocal left, answered
        while left > 0:
            left -= 1
            got = await give_up(hive, chance)
            answered += got > 0

    await asyncio.gather(*[caller() for _ in range(AT_ONCE)])
    return answered


async def at_rest(hive: Alone, backend: Backend) -> dict[str, float]:
    """Memory and descriptors once nothing has moved for a moment: the backend's idle connections are closed by then."""
    await until(lambda: backend.open == 0, what="every connection to the backend is closed")
    gauges: dict[str, float] = {}

    async def settled() -> bool:
        nonlocal gauges
        gauges = await hive.gauges()
        return not any(
            gauges[name] for name in ("in_flight", "parked", "queue_waiting", "queue_running", "connections")
        )

    await until(settled, what=f"nothing in flight any more: {gauges}")
    activity = (await hive.activity()).agents["alone"]
    assert (activity.in_flight, activity.parked, activity.ingress) == (0, 0, 0)
    return {name: gauges[name] for name in HELD}


HELD = (
    "queue_waiting",
    "queue_running",
    "in_flight",
    "parked",
    "connections",
    "half_open_heads",
    "request_body_bytes",
    "upstream_connections",
)


@contextlib.asynccontextmanager
async def serving(backend: Backend) -> AsyncIterator[str]:
    server = await asyncio.start_server(backend.serve, "127.0.0.1", 0, backlog=1024)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


async def _ten_thousand(base: Path) -> None:
    chance, backend = random.Random(20261120), Backend()
    async with serving(backend) as address, alone(base, backend=address, config=CONFIG) as hive:
        await many(hive, WARM_UP, chance)
        before, files, rss = await at_rest(hive, backend), hive.descriptors(), hive.seen.memory_info().rss
        answered = await many(hive, ABORTS, chance)
        after = await at_rest(hive, backend)
        grown = (hive.seen.memory_info().rss - rss) / 2**20
        print(f"{ABORTS} given up, {answered} of them after a part of the answer; RSS grew by {grown:.1f} MiB")
        print(f"asked: {backend.asked}; held at rest: {after}; files open: {files} → {hive.descriptors()}")
        assert min(backend.asked.values()) > ABORTS / 200, "some moods were hardly met"
        assert after == before
        assert sum(hive.descriptors().values()) <= sum(files.values()) + FILES_MORE
        assert grown < MORE_MIB
        assert hive.told_twice == 0
        assert len(hive.events) > ABORTS / 4
        assert "task_failed" not in hive.log
        assert "Traceback" not in hive.log
        assert await hive.end() == 0


@pytest.mark.chaos
@pytest.mark.timeout(600)
def test_of_ten_thousand_requests_given_up_nothing_stays(short_path: Path) -> None:
    uvloop.run(_ten_thousand(short_path))
