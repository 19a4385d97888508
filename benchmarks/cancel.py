"""The delay after which a client's leaving is felt: `python benchmarks/cancel.py [--rounds 50]`.

In every state a request can be in the client leaves, by FIN and by RST, and two moments are noted: the backend's
connection is closed (what it computes is given up), and the proxy tells the daemon that nothing is in flight (place,
position in line, everything is free). The peer is nginx, for those states in which nginx has asked the backend.
A real proxy process; daemon, helper and backend are in this process. Needs nginx.
Loopback and unix sockets only; ends by itself.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import socket
import struct
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import ClassVar, NamedTuple

import uvloop
from build_line import build_line
from peers import Peers, percentile

sys.path[:0] = [str(Path(__file__).parent.parent / part) for part in ("tests/proxy", "tests", "")]

from harness import full_backlog
from journeys.alone import AGENT, TOKEN, Alone, alone

from hive.domain import Tier
from tests.waiting import until

TARGET_MS = 50.0
MIB = 1 << 20
RESET = struct.pack("ii", 1, 0)
CONFIG = "connect_s = 60\nqueue_wait_s = 60\ngate_wait_s = 60\nagent_connections_max = 1000\n"
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
CHUNK = b"%x\r\n%b\r\n" % (len(EVENT), EVENT)
BEGINS = {
    b"silence": b"",
    b"stream": HEAD + CHUNK,
    b"half": b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 1000\r\n\r\n"
    + b'{"x":"'
    + b"x" * 400,
    b"flood": HEAD + CHUNK * 200_000,
}
"""Answers of the backend, by what the user says; none of them ends."""


class BackendConnection(asyncio.Protocol):
    """Begins to answer; notes when it is hung up on."""

    asked = 0
    lost_at: ClassVar[list[float]] = []
    lost: ClassVar[asyncio.Event]

    def __init__(self) -> None:
        self._got = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._got += data
        for word, answer in BEGINS.items():
            if word in self._got:
                BackendConnection.asked += 1
                self._got = b""
                self._transport.write(answer)  # type: ignore[attr-defined]

    def connection_lost(self, _: Exception | None) -> None:
        BackendConnection.lost_at.append(time.perf_counter())
        BackendConnection.lost.set()


class Caller(NamedTuple):
    """One connected client."""

    sock: socket.socket
    unix: bool

    async def send(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.sock, data)

    async def says(self, word: bytes, *, size: int = 0, part: int | None = None) -> None:
        """Asks for what this word gets; `size`: of the prompt, `part`: bytes of the request that are sent."""
        stream = b'"stream":true,' if word in (b"stream", b"flood") else b""
        body = b'{"model":"m",%b"messages":[{"role":"user","content":"%b%b"}]}' % (stream, word, b"x" * size)
        auth = b"" if self.unix else b"authorization: Bearer %b\r\n" % TOKEN.encode()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: h\r\ncontent-type: application/json\r\n%b" % auth
        await self.send((head + b"content-length: %d\r\n\r\n%b" % (len(body), body))[:part])

    async def reads(self, mark: bytes) -> None:
        data = b""
        while mark not in data:
            data += await asyncio.get_running_loop().sock_recv(self.sock, 65536)

    def leave(self, how: str) -> float:
        """Returns when. `fin` closes one way, as a closing client does first; `rst` is gone at once."""
        if how == "fin":
            self.sock.shutdown(socket.SHUT_WR)
        elif not self.unix:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        left_at = time.perf_counter()
        if how == "rst":
            self.sock.close()
        return left_at


class State(NamedTuple):
    """`reach`: brings a caller there; `upstream`: the backend has been asked; `nginx`: nginx has this state, too."""

    name: str
    reach: Callable[[Caller, Alone | None], Awaitable[None]]
    upstream: bool = True
    nginx: bool = True
    ahead: int = 0


async def asked(by: int) -> None:
    await until(lambda: BackendConnection.asked >= by, what="the backend is asked")


async def parked(caller: Caller, hive: Alone | None) -> None:
    assert hive is not None
    hive.wake()
    await until(hive.put_to_sleep, what="asleep")
    await caller.says(b"silence")
    await in_flight(hive, 1, parked=1)


async def uploading(caller: Caller, hive: Alone | None) -> None:
    assert hive is not None
    await caller.says(b"silence", size=8 * MIB, part=4 * MIB)
    await in_flight(hive, 1)


async def being_read(caller: Caller, hive: Alone | None) -> None:
    assert hive is not None
    await caller.says(b"silence", size=15 * MIB)
    await in_flight(hive, 1)


async def queued(caller: Caller, hive: Alone | None) -> None:
    assert hive is not None
    await caller.says(b"silence")
    await in_flight(hive, 3)


async def connecting(caller: Caller, hive: Alone | None) -> None:
    assert hive is not None
    await caller.says(b"silence")
    await in_flight(hive, 1)


async def headers_pending(caller: Caller, _: Alone | None) -> None:
    before = BackendConnection.asked
    await caller.says(b"silence")
    await asked(before + 1)


async def streaming(caller: Caller, _: Alone | None) -> None:
    await caller.says(b"stream")
    await caller.reads(EVENT)


async def answering(caller: Caller, _: Alone | None) -> None:
    before = BackendConnection.asked
    await caller.says(b"half")
    await asked(before + 1)


async def not_reading(caller: Caller, _: Alone | None) -> None:
    await caller.says(b"flood")
    await caller.reads(EVENT)
    await asyncio.sleep(0.05)


async def in_flight(hive: Alone, count: int, *, parked: int = 0) -> None:
    async def so() -> bool:
        activity = (await hive.activity()).agents[AGENT]
        return (activity.in_flight, activity.parked) == (count, parked)

    await until(so, what=f"{count} in flight")


STATES = [
    State("parked", parked, upstream=False, nginx=False),
    State("uploading", uploading, upstream=False, nginx=False),
    State("being read", being_read, upstream=False, nginx=False),
    State("queued", queued, upstream=False, nginx=False, ahead=2),
    State("connecting", connecting, upstream=False, nginx=False),
    State("headers pending", headers_pending),
    State("streaming", streaming),
    State("not streaming", answering),
    State("client not reading", not_reading),
]


# --- one measurement -------------------------------------------------------------------------------------------------


async def freed(hive: Alone, left_at: float, count: int) -> float:
    """Milliseconds until the proxy says that so many are in flight."""
    while (await hive.activity()).agents[AGENT].in_flight != count:
        if time.perf_counter() - left_at > 10:
            return 10_000.0
    return (time.perf_counter() - left_at) * 1e3


async def closed(left_at: float) -> float:
    """Milliseconds until the backend's connection is closed."""
    try:
        await asyncio.wait_for(BackendConnection.lost.wait(), 10)
    except TimeoutError:
        return 10_000.0
    return (BackendConnection.lost_at[-1] - left_at) * 1e3


class Felt(NamedTuple):
    """Milliseconds after the client left; None where the state has no such moment."""

    upstream_closed: float | None
    place_free: float | None


async def once(state: State, how: str, hive: Alone | None, connect: Callable[[], Awaitable[Caller]]) -> Felt:
    caller = await connect()
    with caller.sock:
        await state.reach(caller, hive)
        BackendConnection.lost_at.clear()
        BackendConnection.lost.clear()
        left_at = caller.leave(how)
        closing = asyncio.ensure_future(closed(left_at)) if state.upstream else None
        free = await freed(hive, left_at, state.ahead) if hive is not None else None
        return Felt(await closing if closing is not None else None, free)


@contextlib.asynccontextmanager
async def prepared(state: State, hive: Alone, backend: str) -> AsyncIterator[None]:
    """Makes what the state needs around it."""
    readers = [child for child in hive.seen.children() if "hive.bodies.body_worker" in child.cmdline()]
    hive.answers_wakes = state.reach is not parked
    async with contextlib.AsyncExitStack() as after:
        for _ in range(state.ahead):
            holder = Caller(await hive.connect("unix"), unix=True)
            after.enter_context(holder.sock)
            await headers_pending(holder, hive)
        if state.reach is connecting:
            hive.use_backend(after.enter_context(full_backlog()))
            after.callback(hive.use_backend, backend)
        if state.reach is being_read:
            for reader in readers:
                reader.suspend()
                after.callback(reader.resume)
        yield
    hive.answers_wakes = True
    hive.wake()
    await in_flight(hive, 0)


def show(label: str, felt: list[Felt]) -> None:
    """A line: upstream closed and place free, p50, p99 and longest."""
    columns = []
    for name in Felt._fields:
        values = [value for each in felt if (value := getattr(each, name)) is not None]
        if values:
            verdict = "" if percentile(values, 0.99) <= TARGET_MS else "  MISSED"
            figures = f"{percentile(values, 0.5):6.2f} {percentile(values, 0.99):6.2f} {max(values):6.2f}{verdict}"
            columns.append(f"{name.replace('_', ' ')} {figures}")
    print(f"  {label:40} {'   '.join(columns)}")


async def run(rounds: int) -> None:
    async with Peers() as peers:
        loop = asyncio.get_running_loop()
        BackendConnection.lost = asyncio.Event()
        server = await loop.create_server(BackendConnection, "127.0.0.1", 0, backlog=1024)
        port = server.sockets[0].getsockname()[1]
        nginx = peers.nginx("proxy", backend=port)
        backend = f"127.0.0.1:{port}"

        async def to_nginx() -> Caller:
            sock = socket.socket()
            sock.setblocking(False)
            await loop.sock_connect(sock, ("127.0.0.1", nginx.port))
            return Caller(sock, unix=False)

        async with alone(peers.directory, backend=backend, config=CONFIG, tier=Tier.LOW) as hive:
            print(f"ms after the client left: p50, p99, longest of {rounds} rounds; promised: at most {TARGET_MS:g} ms")
            for state in STATES:
                for how in ("fin", "rst"):
                    for listener in ("unix", "tcp") if state.reach is not parked else ("unix",):

                        async def to_hive(listener: str = listener) -> Caller:
                            return Caller(await hive.connect(listener), unix=listener == "unix")

                        async with prepared(state, hive, backend):
                            figures = [await once(state, how, hive, to_hive) for _ in range(rounds)]
                        show(f"{state.name}, {how.upper()}, {listener}: hive", figures)
                    if state.nginx:
                        figures = [await once(state, how, None, to_nginx) for _ in range(rounds)]
                        show(f"{state.name}, {how.upper()}, tcp: nginx", figures)
        server.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=50)
    rounds = parser.parse_args().rounds
    print(build_line())
    uvloop.run(run(rounds))


if __name__ == "__main__":
    main()
