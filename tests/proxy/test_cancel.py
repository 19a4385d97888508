"""A client leaves, in every state a request can be in: all that it caused is cancelled, nothing of it stays.

On uvloop, as in the proxy: what a transport reports of FIN and RST is the loop's own business. How fast it is,
`benchmarks/cancel.py` prints.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from hive.bodies.body_workers import DeepReaders
from hive.domain import BackendInfo, BackendKind, UsageEvent
from hive.proxy.forward import Exchange
from hive.queue.gate import GateState
from tests.proxy.at_rest import complaints, connecting, held, idle, turns
from tests.proxy.harness import (
    CHAT,
    JSON_ANSWER,
    MODEL_TOKEN,
    STREAM,
    Backend,
    Client,
    Proxy,
    answer,
    chunked,
    full_backlog,
    post,
    proxied,
    read_request,
)
from tests.waiting import until

CHUNK = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
DONE = b"data: [DONE]\n\n"
MIB = 1 << 20
LARGE = b'{"model":"m","messages":[{"role":"user","content":"%b"}]}' % (b"x" * 15 * MIB)
RESET = struct.pack("ii", 1, 0)
PATIENT: dict[str, Any] = {"connect_s": 60.0, "gate_wait_s": 60.0, "queue_wait_s": 60.0, "window_requests": 100_000}
"""No clock of the proxy's own may be what ends a request here."""


class Caller:
    """A client that is nothing but a socket: it can leave in more ways than a stream can."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._loop = asyncio.get_running_loop()

    @classmethod
    async def of(cls, proxy: Proxy, listener: str) -> Caller:
        unix = listener == "unix"
        sock = socket.socket(socket.AF_UNIX if unix else socket.AF_INET)
        sock.setblocking(False)
        where = str(proxy.socket_path) if unix else ("127.0.0.1", proxy.port)
        await asyncio.get_running_loop().sock_connect(sock, where)
        return cls(sock)

    async def send(self, data: bytes) -> None:
        await self._loop.sock_sendall(self.sock, data)

    async def read_until(self, mark: bytes) -> bytes:
        data = b""
        while mark not in data:
            more = await self._loop.sock_recv(self.sock, 65536)
            if not more:
                raise ConnectionError(f"the proxy closed after {data!r}")
            data += more
        return data

    def leave(self, how: str) -> None:
        """`fin`: says that it has nothing more to say (its socket stays). `rst`: is gone, all of it at once."""
        if how == "fin":
            self.sock.shutdown(socket.SHUT_WR)
            return
        if self.sock.family == socket.AF_INET:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        self.sock.close()


class Scene:
    """A data path before a backend that writes `begins`, floods if it is told to, and never ends an answer."""

    def __init__(self, proxy: Proxy, backend: Backend, listener: str) -> None:
        self.proxy = proxy
        self.backend = backend
        self.begins = b""
        self.floods = False
        self.asked = 0
        self.flooded = 0
        self._token = None if listener == "unix" else MODEL_TOKEN
        backend.script = self._serve

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await read_request(reader)
            writer.write(self.begins)
            self.asked += 1
            while self.floods:
                writer.write(b"2000\r\n%b\r\n" % (b"x" * 8192))
                await writer.drain()
                self.flooded += 1
            await reader.read()
        finally:
            writer.transport.abort()  # uvloop would wait for ever, as nothing reads it

    def chat(self, body: bytes = CHAT, fields: bytes = b"") -> bytes:
        return post(b"/v1/chat/completions", body, token=self._token, fields=fields)

    @property
    def waiting(self) -> object:
        return turns(self.proxy.path)["waiting"]


async def parked(scene: Scene, caller: Caller) -> None:
    assert scene.proxy.alice.gate.close(2, now=0.0) is None
    await caller.send(scene.chat())
    await until(lambda: scene.proxy.alice.gate.parked == 1)


async def half_a_head(scene: Scene, caller: Caller) -> None:
    before = repr(scene.proxy.half_open)
    await caller.send(scene.chat()[:40])
    await until(lambda: repr(scene.proxy.half_open) != before)


async def half_a_body(scene: Scene, caller: Caller) -> None:
    await caller.send(scene.chat()[:-20])
    await until(lambda: scene.proxy.path.budget.used > 0)


async def half_a_large_body(scene: Scene, caller: Caller) -> None:
    await caller.send(scene.chat(LARGE)[: 8 * MIB])
    await until(lambda: scene.proxy.path.budget.used > 4 * MIB)


async def told_to_continue(scene: Scene, caller: Caller) -> None:
    await caller.send(scene.chat(fields=b"expect: 100-continue\r\n")[: -len(CHAT)])
    await caller.read_until(b"100 Continue\r\n\r\n")


async def large_body_just_in(scene: Scene, caller: Caller) -> None:
    """Leaves with a large body just in: being decoded, being sent on, waiting for an answer."""
    await caller.send(scene.chat(LARGE))


async def queued(scene: Scene, caller: Caller) -> None:
    await caller.send(scene.chat())
    await until(lambda: scene.waiting == 1)


async def connects(scene: Scene, caller: Caller) -> None:
    await caller.send(scene.chat())
    await until(lambda: connecting(scene.proxy.path) == 1)


async def headers_pending(scene: Scene, caller: Caller) -> None:
    await caller.send(scene.chat())
    await until(lambda: scene.asked == 1)


async def the_next_waits_behind_it(scene: Scene, caller: Caller) -> None:
    await caller.send(scene.chat() + scene.chat(STREAM))
    await until(lambda: scene.asked == 1)


async def head_alone(scene: Scene, caller: Caller) -> None:
    scene.begins = chunked(end=False)
    await caller.send(scene.chat(STREAM))
    await until(lambda: scene.asked == 1)


async def streaming(scene: Scene, caller: Caller) -> None:
    scene.begins = chunked(CHUNK, end=False)
    await caller.send(scene.chat(STREAM))
    await caller.read_until(CHUNK)


async def half_a_held_answer(scene: Scene, caller: Caller) -> None:
    scene.begins = answer(JSON_ANSWER)[:-20]
    await caller.send(scene.chat())
    await until(lambda: scene.asked == 1)


async def half_a_long_answer(scene: Scene, caller: Caller) -> None:
    scene.begins = answer(b'{"data":"' + b"x" * 2 * MIB)[:-MIB]
    await caller.send(scene.chat())
    await caller.read_until(b"xxxx")


async def not_reading(scene: Scene, caller: Caller) -> None:
    """Until the backend can write no more: every buffer between the two is full."""
    scene.begins = chunked(CHUNK, end=False)
    scene.floods = True
    await caller.send(scene.chat(STREAM))
    before = -1
    while scene.flooded != before or not before:
        before = scene.flooded
        await asyncio.sleep(0.05)


class Stage(NamedTuple):
    """A stage of a request and the way there; `cuts`: usage events it leaves (None: depends); `ahead`: others that hold
    the places."""

    reach: Callable[[Scene, Caller], Awaitable[None]]
    cuts: int | None = 1
    ahead: int = 0


STATES = [
    Stage(parked, cuts=0),
    Stage(half_a_head, cuts=0),
    Stage(half_a_body, cuts=0),
    Stage(half_a_large_body, cuts=0),
    Stage(told_to_continue, cuts=0),
    Stage(large_body_just_in, cuts=None),
    Stage(queued, cuts=2, ahead=2),
    Stage(connects, cuts=None),
    Stage(headers_pending),
    Stage(the_next_waits_behind_it),
    Stage(head_alone),
    Stage(streaming),
    Stage(half_a_held_answer),
    Stage(half_a_long_answer),
    Stage(not_reading),
]


@pytest.mark.parametrize("listener", ["unix", "tcp"])
@pytest.mark.parametrize("how", ["fin", "rst"])
@pytest.mark.parametrize("state", STATES, ids=lambda state: state.reach.__name__)
async def test_whoever_leaves_takes_everything_along(tmp_path: Path, state: Stage, how: str, listener: str) -> None:
    async with asyncio.timeout(60), proxied(tmp_path, **PATIENT) as (proxy, backend):
        with complaints() as found, full_backlog() as nowhere, contextlib.ExitStack() as sockets:
            before = held(proxy)
            scene = Scene(proxy, backend, listener)
            if state.reach is connects:
                proxy.path.use_backend(BackendInfo(kind=BackendKind.LLAMA, address=nowhere, up=True), [])
            ahead = [await Caller.of(proxy, listener) for _ in range(state.ahead)]
            caller = await Caller.of(proxy, listener)
            for other in (*ahead, caller):
                sockets.enter_context(other.sock)
            for other in ahead:
                await other.send(scene.chat())
            await until(lambda: scene.asked == state.ahead)
            await state.reach(scene, caller)

            caller.leave(how)
            await until(lambda: proxy.alice.gate.in_flight == state.ahead)
            assert backend.closed == 0 or not state.ahead, "those ahead of it stay"
            for other in ahead:
                other.leave("rst")
            await until(lambda: held(proxy) == before)  # both ends of `caller` may still be open by `fin`
            await until(lambda: backend.connections - backend.closed == idle(proxy.path))
            if state.cuts is not None:
                assert [event.cut for event in proxy.events] == [True] * state.cuts, "what it cost is recorded, once"

            proxy.alice.gate.open(2)
            backend.script = None
            proxy.path.use_backend(None, [])  # a kept connection would lead to the scene
            proxy.use(backend)
            after = await Client.unix(proxy.socket_path)
            assert (await after.ask(post(b"/v1/chat/completions", CHAT)))[0] == 200
            assert found == []


ABORTS = 2_000
AT_ONCE = 50
SECONDS_AT_MOST = 0.1
"""A request takes some 30 ms beside 49 others: most leave in the middle of something, some after it."""


class Moods:
    """A backend that does something else each time: late, slow, in one piece, broken off, nonsense, for ever."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(RuntimeError):  # uvloop's word for a transport that is gone
                while await self._one(reader, writer):
                    pass
        finally:
            writer.transport.abort()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        await read_request(reader)
        await asyncio.sleep(self._chance.choice((0, 0, 0.001, 0.003)))
        mood = self._chance.choice(
            ("whole", "whole", "stream", "broken", "closed", "nonsense", "flood", "error", "ever")
        )
        match mood:
            case "whole":
                writer.write(answer(JSON_ANSWER))
            case "stream":
                for piece in (chunked(CHUNK, end=False), *[b"%x\r\n%b\r\n" % (len(CHUNK), CHUNK)] * 5):
                    writer.write(piece)
                    await asyncio.sleep(0.0005)
                writer.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(DONE), DONE))
            case "broken":
                writer.write(chunked(CHUNK, end=False))
            case "nonsense":
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n")
            case "flood":
                writer.write(answer(b"x" * 300_000))
            case "error":
                writer.write(answer(b'{"error":"no"}', status=b"500 Internal Server Error"))
            case "ever":
                await reader.read()
        await writer.drain()
        return mood not in ("broken", "closed", "ever")


def anything(chance: random.Random, token: bytes | None) -> bytes:
    """A request, good or bad, or two in a row."""
    good = [post(b"/v1/chat/completions", body, token=token) for body in (CHAT, STREAM)]
    fields = b"expect: 100-continue\r\n"
    large = b'{"messages":"%b"}' % (b"x" * 200_000)
    return chance.choice(
        (
            *good * 3,
            good[0] + good[1],
            post(b"/v1/chat/completions", large, token=token),
            post(b"/v1/chat/completions", CHAT, token=token, fields=fields),
            post(b"/v1/chat/completions", b"[]", token=token),
            post(b"/api/delete", CHAT, token=token),
            post(b"/v1/chat/completions", CHAT, token=b"hm_nobody"),
            b"GET /v1/models HTTP/1.1\r\nhost: h\r\nhost: h\r\n\r\n",
        )
    )


async def _abort(proxy: Proxy, chance: random.Random) -> None:
    """Sends some of a request, waits or reads for a while, is gone."""
    listener = chance.choice(("unix", "tcp"))
    caller = await Caller.of(proxy, listener)
    with caller.sock, contextlib.suppress(OSError, asyncio.TimeoutError):
        whole = anything(chance, None if listener == "unix" else MODEL_TOKEN)
        part = whole if chance.random() < 0.7 else whole[: chance.randrange(len(whole))]
        async with asyncio.timeout(chance.uniform(0, SECONDS_AT_MOST)):
            await caller.send(part)
            if chance.random() < 0.5:
                await asyncio.sleep(SECONDS_AT_MOST)
            await caller.read_until(b"never")
        caller.leave(chance.choice(("fin", "rst")))


async def test_of_two_thousand_that_leave_at_a_random_moment_nothing_stays(tmp_path: Path) -> None:
    chance = random.Random(20261120)
    more: dict[str, Any] = {"tier_low_concurrency": 8, "queue_depth": 16, "parked_max": 20}
    async with proxied(tmp_path, **PATIENT, **more) as (proxy, backend):
        with complaints() as found:
            before = held(proxy)
            backend.script = Moods(chance).serve
            left = ABORTS

            async def callers() -> None:
                nonlocal left
                while left > 0:
                    left -= 1
                    await _abort(proxy, chance)

            async def sleeps_and_wakes() -> None:
                generation = 2
                while True:
                    for gate in (GateState.CLOSED, GateState.OPEN):
                        proxy.alice.gate.move(gate, generation, "test")
                        generation += 1
                        await asyncio.sleep(chance.uniform(0, 0.02))

            naps = asyncio.ensure_future(sleeps_and_wakes())
            await asyncio.gather(*[callers() for _ in range(AT_ONCE)])
            naps.cancel()
            proxy.alice.gate.move(GateState.OPEN, 1_000_000, "running")
            await until(lambda: held(proxy) == before)
            await until(lambda: backend.connections - backend.closed == idle(proxy.path))
            ids = [event.id for event in proxy.events]
            assert len(ids) == len(set(ids)), "nobody pays twice"
            assert len(ids) > ABORTS / 10, "hardly any of them came as far as the backend"
            assert any(event.cut for event in proxy.events)
            assert found == []
            backend.script = None
            proxy.path.use_backend(None, [])  # kept connections lead to the moods
            proxy.use(backend)
            after = await Client.unix(proxy.socket_path)
            assert (await after.ask(post(b"/v1/chat/completions", CHAT)))[0] == 200
            # On a busy machine nobody else has the patience.
            await until(lambda: any(not event.cut for event in proxy.events))


@contextlib.asynccontextmanager
async def stopped_readers(proxy: Proxy) -> AsyncIterator[DeepReaders]:
    """Readers of large bodies that accept work and do nothing, until the end."""
    readers = proxy.path.readers = DeepReaders()
    readers.start()
    await until(lambda: repr(readers).startswith("<DeepReaders 2/2 free"))
    pids = readers.pids
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield readers
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("how", ["fin", "rst"])
@pytest.mark.parametrize("ahead", [0, 2], ids=["being read", "waiting for a reader"])
async def test_whoever_leaves_while_its_body_is_read_elsewhere_takes_that_along(
    tmp_path: Path, how: str, ahead: int
) -> None:
    async with proxied(tmp_path, **PATIENT, body_budget_bytes=512 * MIB) as (proxy, backend):
        with complaints() as found, contextlib.ExitStack() as sockets:
            scene = Scene(proxy, backend, "tcp")
            before = held(proxy)
            async with stopped_readers(proxy) as readers:
                callers = [await Caller.of(proxy, "tcp") for _ in range(ahead + 1)]
                for number, caller in enumerate(callers, 1):
                    sockets.enter_context(caller.sock)
                    await caller.send(scene.chat(LARGE))
                    await until(lambda number=number: states(proxy).count("reading") == number)  # type: ignore[misc]
                callers[-1].leave(how)
                await until(lambda: states(proxy) == ["reading"] * ahead)
                assert len(readers.waiting) == max(0, ahead - 1), "of one agent one is read at a time"
                for caller in callers[:-1]:
                    caller.leave(how)
                await until(lambda: held(proxy) == before)
                assert scene.asked == 0
            backend.script = None
            after = await Client.tcp(proxy.port)
            assert (await after.ask(scene.chat(LARGE)))[0] == 200, "they read the next one"
            readers.close()
            assert found == []


def states(proxy: Proxy) -> list[str]:
    """The states of the requests under way."""
    return [exchange.state for connection in proxy.connections if isinstance(exchange := connection.exchange, Exchange)]


async def test_who_leaves_while_the_last_byte_is_held_back_leaves_nothing(tmp_path: Path) -> None:
    """On a full disk the last byte of an answer waits for its event to be safe: by then the client may be gone."""
    async with proxied(tmp_path) as (proxy, _):
        with complaints() as complained:
            before = held(proxy)
            held_back: list[Callable[[], None]] = []

            def record(event: UsageEvent, then: Callable[[], None] | None = None) -> int:
                assert then is not None
                held_back.append(then)
                return 1

            proxy.path.usage.record = record  # type: ignore[method-assign]
            client = await Client.tcp(proxy.port)
            client.writer.write(post(b"/v1/chat/completions", CHAT, token=MODEL_TOKEN))
            await until(lambda: bool(held_back))
            client.close()
            await until(lambda: not proxy.connections)
            held_back.pop()()
            await asyncio.sleep(0.01)
            assert (held(proxy), complained, held_back) == (before, [], [])
