"""Streams through Hive's proxy beside nginx's, in one run: `python benchmarks/streams.py [--seconds 4] [--rounds 5]`.

A backend of its own sends OpenAI chunks by the clock and writes into each when it was sent; the client in this process
says how long each was on its way (one clock: CLOCK_MONOTONIC). Directly, through nginx (benchmarks/nginx.conf) and
through Hive in turn, everything on: the usage is asked for by Hive and taken out again, each event metered. Measured:

- CPU time of the proxy per chunk, transit of a chunk (p50, p99), chunks lost, memory, with `--streams` at `--rate`;
- memory per open stream, with `--open` streams that stand still.

Needs nginx. Loopback only; ends by itself; `--rounds 2 --seconds 2` in under a minute.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple, cast

import uvloop
from build_line import build_line
from peers import TOKEN, Peer, Peers, free_port, percentile, spread, wait_for_port

from hive.domain import BackendKind

CPU_RATIO_MAX = 2.0
TRANSIT_RATIO_MAX = 2.0
RSS_MIB_MAX = 80
KIB_PER_STREAM_MAX = 40
HOLD = "hold"
"""Words of a user for a stream that stands still after its first chunk."""
HOLD_S = 30.0
"""It gets another chunk this often: nobody gives it up."""
LEAD_S = 1.0
"""A stream lasts so much longer than what is measured of it."""
CONNECTING = 100
"""Streams opened at once."""
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
_STAMP = re.compile(rb'"content":"([0-9]+) ([0-9]+)"')
_ASKED = re.compile(rb'"content":"([a-z]+) ([0-9]+) ([0-9]+)"')


def now_ns() -> int:
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC)


# the backend ---------------------------------------------------------------------------------------------------------


def chunk(number: int) -> bytes:
    """One event in the shape of vLLM's, in one chunk of HTTP; its content is its number and the time."""
    event = (
        b'data: {"id":"chatcmpl-8f9b4d6c2a","object":"chat.completion.chunk","created":1700000000,"model":"m",'
        b'"choices":[{"index":0,"delta":{"content":"%d %d"},"logprobs":null,"finish_reason":null}]}\n\n'
        % (number, now_ns())
    )
    return b"%x\r\n%b\r\n" % (len(event), event)


LAST = (
    b'data: {"id":"chatcmpl-8f9b4d6c2a","object":"chat.completion.chunk","created":1700000000,"model":"m","choices":'
    b'[{"index":0,"delta":{},"logprobs":null,"finish_reason":"stop"}]}\n\n'
)
USAGE = (
    b'data: {"id":"chatcmpl-8f9b4d6c2a","object":"chat.completion.chunk","created":1700000000,"model":"m","choices":[],'
    b'"usage":{"prompt_tokens":10,"total_tokens":110,"completion_tokens":100}}\n\n'
)
DONE = b"data: [DONE]\n\n"


class Backend(asyncio.Protocol):
    """Sends as many chunks as asked, so many a second, on the tick; the usage only where it was asked for."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._received = b""
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._number = self._count = 0
        self._begun_at = self._period_s = 0.0
        self._with_usage = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass of it

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, end, body = self._received.partition(b"\r\n\r\n")
        length = re.search(rb"(?i)content-length: *([0-9]+)", head)
        if not end or length is None or len(body) < int(length[1]):
            return
        self._received = b""
        asked = _ASKED.search(body)
        assert asked is not None
        self._with_usage = b'"include_usage":true' in body
        self._number, self._count = 0, int(asked[2])
        self._period_s = HOLD_S if asked[1] == HOLD.encode() else 1 / int(asked[3])
        self._begun_at = self._loop.time()
        self._write(HEAD + chunk(0))
        self._send_later()

    def _send_later(self) -> None:
        self._number += 1
        self._timer = self._loop.call_at(self._begun_at + self._number * self._period_s, self._send)

    def _send(self) -> None:
        if self._number < self._count:
            self._write(chunk(self._number))
            self._send_later()
            return
        self._timer = None
        end = LAST + (USAGE if self._with_usage else b"") + DONE
        self._write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(end), end))

    def _write(self, data: bytes) -> None:
        assert self._transport is not None
        self._transport.write(data)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        if self._timer is not None:
            self._timer.cancel()


async def serve(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(Backend, "127.0.0.1", port, backlog=4096)
    await server.serve_forever()


# the client ----------------------------------------------------------------------------------------------------------


class Tally:
    """Findings of all streams of one measurement."""

    def __init__(self) -> None:
        self.transit_ms: list[float] = []
        self.lost = 0


class Client(asyncio.Protocol):
    """One stream. `ended` is done with whether its end was seen; `begun` once the first chunk is here."""

    def __init__(self, request: bytes, count: int, tally: Tally) -> None:
        loop = asyncio.get_running_loop()
        self.begun: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[None] = loop.create_future()
        self.transport: asyncio.Transport | None = None
        self._request = request
        self._count = count
        self._next = 0
        self._tally = tally
        self._rest = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if not self.begun.done():
            if not data.startswith(b"HTTP/1.1 200"):
                raise SystemExit(f"answered {data[:300]!r}")
            self.begun.set_result(None)
        now, tally = now_ns(), self._tally
        data = self._rest + data
        at = 0
        for stamp in _STAMP.finditer(data):
            at = stamp.end()
            number = int(stamp[1])
            tally.lost += number - self._next
            self._next = number + 1
            tally.transit_ms.append((now - int(stamp[2])) / 1e6)
        self._rest = data[at:][-300:]
        if data.endswith(b"0\r\n\r\n") and DONE in data:
            tally.lost += self._count - self._next
            if not self.ended.done():
                self.ended.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        for future in (self.begun, self.ended):
            if not future.done():
                future.set_exception(ConnectionResetError("the stream was cut"))
                future.exception()  # looked at: whoever waits for the other one need not ask


def request_for(kind: str, count: int, rate: int) -> bytes:
    body = json.dumps(
        {
            "model": "m",
            "stream": True,
            "messages": [
                {"role": "system", "content": "x" * 1900},
                {"role": "user", "content": f"{kind} {count} {rate}"},
            ],
        },
        separators=(",", ":"),
    )
    return (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {TOKEN}\r\nContent-Length: {len(body)}\r\n\r\n{body}"
    ).encode()


async def open_streams(port: int, request: bytes, count: int, streams: int, tally: Tally) -> list[Client]:
    """Opens them a few at a time, so that no backlog overflows, and evenly, so that they do not tick together."""
    loop = asyncio.get_running_loop()
    room = asyncio.Semaphore(CONNECTING)

    async def one() -> Client:
        async with room:
            _, client = await loop.create_connection(lambda: Client(request, count, tally), "127.0.0.1", port)
            await asyncio.wait_for(asyncio.shield(client.begun), 30)
            return client

    tasks = []
    for _ in range(streams):
        tasks.append(loop.create_task(one()))
        await asyncio.sleep(0.001)
    return await asyncio.gather(*tasks)


def close_streams(clients: Sequence[Client]) -> None:
    for client in clients:
        if client.transport is not None:
            client.transport.abort()


# what is measured ----------------------------------------------------------------------------------------------------


class Flow(NamedTuple):
    """One measurement of many streams through one peer."""

    us_a_chunk: float
    p50_ms: float
    p99_ms: float
    chunks: int
    lost: int
    rss_bytes: int


async def flow(peer: Peer, streams: int, rate: int, seconds: float) -> Flow:
    """Measured while all of them run; those that begin first have a second more to go then."""
    count = int(rate * (seconds + LEAD_S))
    tally = Tally()
    clients = await open_streams(peer.port, request_for("flow", count, rate), count, streams, tally)
    tally.transit_ms.clear()
    before = peer.cpu_s if peer.pid else 0.0
    await asyncio.sleep(seconds)
    used = (peer.cpu_s if peer.pid else 0.0) - before
    transit = list(tally.transit_ms)
    rss = peer.rss_bytes if peer.pid else 0
    await asyncio.wait_for(asyncio.gather(*(client.ended for client in clients)), seconds + 60)
    close_streams(clients)
    p50_ms, p99_ms = statistics.median(transit), percentile(transit, 0.99)
    return Flow(used / len(transit) * 1e6, p50_ms, p99_ms, streams * count, tally.lost, rss)


async def compare_flow(arguments: argparse.Namespace, direct: Peer, nginx: Peer, hive: Peer) -> None:
    peers = (direct, nginx, hive)
    found: dict[str, list[Flow]] = {peer.name: [] for peer in peers}
    for warm in range(arguments.rounds + 1):
        for peer in peers:
            one = await flow(peer, arguments.streams, arguments.rate, arguments.seconds if warm else 0.5)
            if warm:
                found[peer.name].append(one)
            await asyncio.sleep(0.1)
    ours, theirs = found["hive"], found["nginx"]
    ratios = [a.us_a_chunk / b.us_a_chunk for a, b in zip(ours, theirs, strict=True)]
    print(
        f"  {'CPU of the proxy':21} hive {_median(ours, 0):.1f} µs   nginx {_median(theirs, 0):.1f} µs a chunk"
        f"   ratio {spread(ratios)}; at most {CPU_RATIO_MAX}"
    )
    for label, column in (("transit p50", 1), ("transit p99", 2)):
        told = "   ".join(f"{name} {_median(flows, column):.2f} ms" for name, flows in found.items())
        ratio = spread([a[column] / b[column] for a, b in zip(ours, theirs, strict=True)])
        print(f"  {label:21} {told}   ratio {ratio}" + (f"; at most {TRANSIT_RATIO_MAX}" if column == 2 else ""))
    told = "   ".join(f"{name} {sum(each.lost for each in flows)}" for name, flows in found.items())
    print(f"  {'chunks lost':21} {told}   of {sum(each.chunks for each in ours):,}; none")
    most = [max(each.rss_bytes for each in flows) / 2**20 for flows in (ours, theirs)]
    print(f"  {'memory':21} hive {most[0]:.0f} MiB   nginx {most[1]:.0f} MiB; at most {RSS_MIB_MAX} MiB")


def _median(flows: Sequence[Flow], column: int) -> float:
    return statistics.median(each[column] for each in flows)


async def compare_open(arguments: argparse.Namespace, nginx: Peer, hive: Peer) -> None:
    """Streams that stand still. Each takes two descriptors of a proxy; fewer are opened where it may not have them."""
    room = (resource.getrlimit(resource.RLIMIT_NOFILE)[1] - 500) // 2
    streams = min(arguments.open, room)
    told = []
    for peer in (hive, nginx):
        before = peer.rss_bytes
        clients = await open_streams(peer.port, request_for(HOLD, 1000, 1), 1000, streams, Tally())
        await asyncio.sleep(0.5)
        kib = (peer.rss_bytes - before) / streams / 1024
        told.append(f"{peer.name} {kib:.1f} KiB ({before / 2**20:.0f} MiB before)")
        close_streams(clients)
        await asyncio.sleep(0.5)
    print(f"memory a stream, {streams:,} open at once")
    print(f"  {'':21} {'   '.join(told)}; at most {KIB_PER_STREAM_MAX} KiB")


async def run(arguments: argparse.Namespace) -> None:
    async with Peers() as peers:
        port = free_port()
        peers.run(sys.executable, __file__, "--serve", str(port))
        wait_for_port(port)
        nginx = peers.nginx("proxy", backend=port)
        hive = await peers.hive(port, kind=BackendKind.VLLM)
        print(f"{arguments.streams} streams of {arguments.rate} chunks a second, {arguments.seconds:g} s each time")
        await compare_flow(arguments, Peer("direct", 0, port), nginx, hive)
        if arguments.open:
            await compare_open(arguments, nginx, hive)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--rate", type=int, default=50, help="chunks a second of one stream")
    parser.add_argument("--seconds", type=float, default=4.0, help="length of one measurement")
    parser.add_argument("--rounds", type=int, default=5, help="pairs measured")
    parser.add_argument("--open", type=int, default=5000, help="streams open at once for the memory of one; 0: none")
    parser.add_argument("--serve", type=int, metavar="PORT", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not arguments.serve:
        print(build_line())
    uvloop.run(serve(arguments.serve) if arguments.serve else run(arguments))


if __name__ == "__main__":
    main()
