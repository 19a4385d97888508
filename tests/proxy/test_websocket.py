"""WebSockets through ingress: asked for rightly, answered rightly, then bytes; and an agent that stays awake for it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import msgspec
import pytest

from hive.domain import WakeCause
from hive.wire.websocket import Handshake
from tests.proxy.at_rest import complaints, held
from tests.proxy.harness import INGRESS_TOKEN, Backend, Client, Proxy, answer, proxied
from tests.proxy.websocket_agent import ACCEPT, KEY, Echo, ask, switched
from tests.waiting import until

PING = b"\x89\x80\x00\x00\x00\x00"
"""A client's, masked, without a body."""
RESET = struct.pack("ii", 1, 0)
Agent = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def called(tmp_path: Path, agent: Agent, **settings: Any) -> AsyncIterator[tuple[Proxy, Backend]]:
    """A proxy with an alice that answers each connection with `agent`. Nothing that was begun is left at the end."""
    async with proxied(tmp_path, **settings) as (proxy, _), serving(agent) as backend:
        proxy.registry.learn(msgspec.structs.replace(proxy.row, address=backend.address))
        with complaints() as found:
            before = held(proxy)
            yield proxy, backend
            while Client.opened:
                Client.opened.pop().close()
            await until(lambda: held(proxy) == before)
            assert proxy.ingress.sockets == set()
            await until(lambda: backend.closed == backend.connections)
        assert found == []


@contextlib.asynccontextmanager
async def serving(agent: Agent) -> AsyncIterator[Backend]:
    backend = Backend()
    await backend.start()
    backend.script = agent
    try:
        yield backend
    finally:
        await backend.stop()


async def opened(proxy: Proxy, request: bytes = b"") -> tuple[Client, bytes]:
    """A client with an open WebSocket, and the head that said so."""
    client = await Client.tcp(proxy.ingress_port)
    client.writer.write(request or ask())
    head = await asyncio.wait_for(client.reader.readuntil(b"\r\n\r\n"), 5)
    assert head.startswith(b"HTTP/1.1 101 "), head
    return client, head


async def refused(client: Client) -> tuple[int, bytes]:
    """(status, body) of an answer after which the connection is closed, with nothing behind it."""
    status, fields, body = await client.answer()
    assert fields[b"connection"] == b"close"
    assert await client.at_end()
    return status, body


# the handshake -----------------------------------------------------------------------------------------------------


async def test_the_agent_sees_the_handshake_and_nothing_that_is_hives(tmp_path: Path) -> None:
    echo = Echo()
    async with called(tmp_path, echo) as (proxy, _):
        more = (
            b"origin: http://x\r\nsec-websocket-protocol: chat\r\nsec-websocket-secret: s\r\nx-forwarded-for: evil\r\n"
        )
        client, head = await opened(proxy, ask(b"/ws?room=1", more=more))
        assert echo.head.startswith(b"GET /ws?room=1 HTTP/1.1\r\n")
        lines = echo.head.split(b"\r\n")
        for line in (b"upgrade: websocket", b"connection: Upgrade", b"sec-websocket-key: " + KEY):
            assert lines.count(line) == 1
        assert b"sec-websocket-protocol: chat" in lines
        assert b"origin: http://x" in lines
        assert b"x-forwarded-prefix: /agents/alice" in lines
        assert not [line for line in lines if b"secret" in line or b"evil" in line or INGRESS_TOKEN in line]
        assert b"sec-websocket-accept: %b\r\n" % ACCEPT in head
        client.close()


async def test_bytes_pass_both_ways_as_they_are(tmp_path: Path) -> None:
    echo = Echo(switched(b"X-Own: a=b", b"Set-Cookie: a=b") + b"first")
    async with called(tmp_path, echo) as (proxy, _):
        client, head = await opened(proxy)
        assert b"x-own: a=b\r\n" in head
        assert b"set-cookie" not in head.replace(b"x-hive-dropped: set-cookie\r\n", b"")
        for sent in (PING, bytes(range(256)), b"GET / HTTP/1.1\r\n\r\n", b"\r\n"):
            client.writer.write(sent)
        sent = PING + bytes(range(256)) + b"GET / HTTP/1.1\r\n\r\n\r\n"
        assert await asyncio.wait_for(client.reader.readexactly(5 + len(sent)), 5) == b"first" + sent
        client.close()


async def test_what_a_client_sends_ahead_is_the_agents_after_its_101_and_no_request(tmp_path: Path) -> None:
    echo = Echo()
    async with called(tmp_path, echo) as (proxy, _):
        client = await Client.tcp(proxy.ingress_port)
        client.writer.write(ask() + ask(b"/smuggled"))
        await until(lambda: echo.got == ask(b"/smuggled"))
        client.close()


ANSWERS = {
    "200": answer(b"hello"),
    "403": answer(b"no", status=b"403 Forbidden"),
    "404 and a second answer": answer(b"no", status=b"404 Not Found") + answer(b"smuggled"),
    "100 before it": b"HTTP/1.1 100 Continue\r\n\r\n" + switched(),
    "another accept": switched(accept=Handshake(b"AAAAAAAAAAAAAAAAAAAAAA==").accept),
    "no accept": b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
    "another upgrade": switched().replace(b"websocket", b"h2c"),
    "a length": switched(b"Content-Length: 5") + b"hello",
    "unoffered subprotocol": switched(b"Sec-WebSocket-Protocol: chat"),
    "unoffered extension": switched(b"Sec-WebSocket-Extensions: permessage-deflate"),
    "HTTP/1.0": switched(status=b"HTTP/1.0 101 Switching Protocols"),
    "junk": b"\x81\x05hello",
    "a bare line end": switched().replace(b"\r\nConnection", b"\nConnection"),
    "an endless head": b"HTTP/1.1 101 Switching Protocols\r\n" + b"X: y\r\n" * 20_000,
    "nothing": b"",
}


@pytest.mark.parametrize("said", ANSWERS.values(), ids=ANSWERS.keys())
async def test_any_other_answer_than_the_right_101_is_502_and_nothing_of_it_passes(tmp_path: Path, said: bytes) -> None:
    asked = 0

    async def agent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        with contextlib.suppress(ConnectionError):
            await reader.readuntil(b"\r\n\r\n")
            asked += 1
            writer.write(said)
            await writer.drain()
            if said:
                asked += (await reader.read()).count(b"HTTP/1.1")

    async with called(tmp_path, agent) as (proxy, _):
        client = await Client.tcp(proxy.ingress_port)
        client.writer.write(ask() + ask(b"/smuggled"))
        status, body = await refused(client)
        assert status == 502
        assert b"did not open the WebSocket" in body
        assert b"hello" not in body
        assert b"smuggled" not in body
        assert asked == 1, "what followed the request is no request"
        client.close()


@pytest.mark.parametrize(
    "request_bytes",
    [
        ask(key=b"short"),
        ask(more=b"sec-websocket-key: " + KEY + b"\r\n"),
        ask(more=b"sec-websocket-version: 8\r\n"),
    ],
)
async def test_a_wrong_request_is_400_and_wakes_nobody(tmp_path: Path, request_bytes: bytes) -> None:
    async with called(tmp_path, Echo()) as (proxy, backend):
        assert proxy.alice.gate.close(2, now=0.0) is None
        client = await Client.tcp(proxy.ingress_port)
        client.writer.write(request_bytes)
        assert (await refused(client))[0] == 400
        assert proxy.wakes == []
        assert backend.connections == 0
        client.close()


async def test_a_wrong_token_is_401_and_wakes_nobody(tmp_path: Path) -> None:
    async with called(tmp_path, Echo()) as (proxy, backend):
        assert proxy.alice.gate.close(2, now=0.0) is None
        client = await Client.tcp(proxy.ingress_port)
        client.writer.write(ask(token=b"hi_wrong"))
        assert (await refused(client))[0] == 401
        assert proxy.wakes == []
        assert backend.connections == 0
        client.close()


@pytest.mark.parametrize(
    "change",
    [
        (b"upgrade: websocket", b"upgrade: h2c"),
        (b"upgrade: websocket", b"upgrade: websocket, h2c"),
        (b"connection: Upgrade", b"connection: keep-alive"),
        (b" HTTP/1.1\r\n", b" HTTP/1.0\r\n"),
    ],
)
async def test_any_other_upgrade_is_dropped_with_all_that_belongs_to_it(
    tmp_path: Path, change: tuple[bytes, bytes]
) -> None:
    heads = []

    async def agent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append((await reader.readuntil(b"\r\n\r\n")).lower())
        writer.write(answer(b"plain"))

    async with called(tmp_path, agent) as (proxy, _):
        client = await Client.tcp(proxy.ingress_port)
        client.writer.write(ask().replace(*change))
        assert (await client.answer())[::2] == (200, b"plain")
        assert b"upgrade" not in heads[0]
        assert b"sec-websocket" not in heads[0]
        client.close()


async def test_an_agent_that_answers_late_is_waited_for_and_one_that_never_does_is_504(tmp_path: Path) -> None:
    async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with called(tmp_path, mute, first_byte_s=0.3) as (proxy, _):
        client = await Client.tcp(proxy.ingress_port)
        client.writer.write(ask())
        assert (await refused(client))[0] == 504
        client.close()


async def test_a_client_that_leaves_before_the_101_takes_the_agents_connection_along(tmp_path: Path) -> None:
    async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with called(tmp_path, mute) as (proxy, backend):
        client = await Client.tcp(proxy.ingress_port)
        client.writer.write(ask())
        await until(lambda: backend.connections == 1)
        client.close()
        await until(lambda: backend.closed == 1)
        assert proxy.alice.gate.ingress == 0


# sleep -------------------------------------------------------------------------------------------------------------


async def test_a_sleeping_agent_is_woken_and_its_websocket_opens(tmp_path: Path) -> None:
    echo = Echo()
    async with called(tmp_path, echo) as (proxy, _):
        gate = proxy.alice.gate
        assert gate.close(2, now=0.0) is None
        gate.asleep(2)
        client = await Client.tcp(proxy.ingress_port)
        client.writer.write(ask())
        await until(lambda: proxy.wakes == [("a1", WakeCause.INGRESS)])
        assert echo.head == b""
        gate.open(3)
        assert (await asyncio.wait_for(client.reader.readuntil(b"\r\n\r\n"), 5)).startswith(b"HTTP/1.1 101 ")
        client.close()


@pytest.mark.parametrize("how", ["fin", "rst", "agent"])
async def test_an_open_websocket_keeps_the_agent_awake_until_one_of_the_two_leaves(tmp_path: Path, how: str) -> None:
    go = asyncio.Event()

    async def agent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(switched())
        gone = asyncio.ensure_future(reader.read())
        left = asyncio.ensure_future(go.wait())
        await asyncio.wait([gone, left], return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
        left.cancel()
        writer.write(b"last words")

    async with called(tmp_path, agent) as (proxy, backend):
        gate = proxy.alice.gate
        client, _ = await opened(proxy)
        assert gate.close(2, now=0.0) == "1 caller is open"
        if how == "agent":
            go.set()
            assert await asyncio.wait_for(client.reader.read(), 5) == b"last words", "then a plain end"
        elif how == "fin":
            client.writer.write_eof()
            assert await asyncio.wait_for(client.reader.read(), 5) == b""
        else:
            client.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            client.close()
        await until(lambda: backend.closed == 1)
        await until(lambda: gate.ingress == 0)
        assert proxy.quiets == ["a1"], "the daemon is told what it waits for"
        assert gate.close(3, now=0.0) is None
        client.close()


async def test_a_hive_that_leaves_ends_open_websockets_and_opens_no_new_ones(tmp_path: Path) -> None:
    async with called(tmp_path, Echo()) as (proxy, backend):
        client, _ = await opened(proxy)
        proxy.ingress.leave()
        assert await client.at_end()
        await until(lambda: backend.closed == 1)
        late = await Client.tcp(proxy.ingress_port)
        late.writer.write(ask())
        assert (await refused(late))[0] == 503
        client.close()
        late.close()


async def asleep_with_it(proxy: Proxy) -> Client:
    """A client with an open WebSocket that is so idle that its agent was put to sleep."""
    client, _ = await opened(proxy)
    gate = proxy.alice.gate
    assert gate.close(2, now=0.0) is not None
    await until(lambda: gate.ingress == 0)
    assert proxy.quiets == ["a1"]
    assert gate.close(3, now=0.0) is None
    gate.asleep(3)
    return client


async def test_an_idle_one_lets_its_agent_sleep_where_that_is_set_and_wakes_it_with_its_next_byte(
    tmp_path: Path,
) -> None:
    echo = Echo()
    async with called(tmp_path, echo, websocket_idle_s=0.2) as (proxy, _):
        client = await asleep_with_it(proxy)
        client.writer.write(b"hello")
        await until(lambda: proxy.wakes == [("a1", WakeCause.INGRESS)])
        client.writer.write(b" again")
        assert echo.got == b""
        proxy.alice.gate.open(4)
        assert await asyncio.wait_for(client.reader.readexactly(11), 5) == b"hello again"
        assert proxy.alice.gate.ingress == 1, "it counts again"
        assert proxy.wakes == [("a1", WakeCause.INGRESS)]
        client.close()


async def test_pings_are_bytes_and_keep_the_agent_awake(tmp_path: Path) -> None:
    async with called(tmp_path, Echo(), websocket_idle_s=0.6) as (proxy, _):
        client, _ = await opened(proxy)
        for _ in range(8):
            await asyncio.sleep(0.15)
            client.writer.write(PING)
            assert proxy.alice.gate.ingress == 1
        client.close()


@pytest.mark.parametrize("end", ["refused", "late", "too many", "agent dies"])
async def test_an_idle_one_whose_agent_does_not_wake_is_cut(tmp_path: Path, end: str) -> None:
    kept: list[asyncio.StreamWriter] = []

    async def agent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        kept.append(writer)
        await Echo()(reader, writer)

    async with called(tmp_path, agent, gate_wait_s=0.3, parked_max=1, websocket_idle_s=0.2) as (proxy, _):
        client = await asleep_with_it(proxy)
        other = await Client.unix(proxy.socket_path)
        if end == "too many":
            other.writer.write(b"P")
            await until(lambda: proxy.alice.gate.parked == 1)
        client.writer.write(b"hello")
        if end == "refused":
            await until(lambda: proxy.wakes != [])
            proxy.alice.gate.refuse(4, "stopped")
        if end == "agent dies":
            kept[0].transport.abort()
        with contextlib.suppress(ConnectionResetError):
            assert await asyncio.wait_for(client.reader.read(), 5) == b""
        await until(lambda: proxy.alice.gate.ingress == 0)
        client.close()
        other.close()


# back-pressure -----------------------------------------------------------------------------------------------------

PIECE = bytes(range(256)) * 256
MUCH = 400
"""Pieces: 26 MB, more than all buffers on the way."""


async def test_a_client_that_reads_slowly_stops_the_agent_and_loses_nothing(tmp_path: Path) -> None:
    written = 0

    async def agent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal written
        await reader.readuntil(b"\r\n\r\n")
        writer.write(switched())
        for _ in range(MUCH):
            writer.write(PIECE)
            await writer.drain()
            written += 1

    async with called(tmp_path, agent) as (proxy, _):
        client, _ = await opened(proxy)
        client.reader._transport.pause_reading()  # type: ignore[attr-defined]
        await until(lambda: written > 0)
        before = -1
        while written != before:  # until it stands still
            before = written
            await asyncio.sleep(0.3)
        assert written < MUCH / 2
        client.reader._transport.resume_reading()  # type: ignore[attr-defined]
        for _ in range(MUCH):
            assert await asyncio.wait_for(client.reader.readexactly(len(PIECE)), 5) == PIECE
        assert await client.at_end()
        client.close()


async def test_an_agent_that_reads_slowly_stops_the_client_and_loses_nothing(tmp_path: Path) -> None:
    go, got = asyncio.Event(), 0

    async def agent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal got
        await reader.readuntil(b"\r\n\r\n")
        writer.write(switched())
        await go.wait()
        for _ in range(MUCH):
            assert await reader.readexactly(len(PIECE)) == PIECE
            got += 1

    async with called(tmp_path, agent) as (proxy, _):
        client, _ = await opened(proxy)
        sending = asyncio.ensure_future(send_much(client))
        await asyncio.sleep(0.5)
        assert not sending.done(), "what nobody takes is not taken from the client"
        go.set()
        await asyncio.wait_for(sending, 20)
        await until(lambda: got == MUCH)
        client.close()


async def send_much(client: Client) -> None:
    for _ in range(MUCH):
        client.writer.write(PIECE)
        await client.writer.drain()


@pytest.mark.parametrize("who", ["client", "agent"])
async def test_whoever_takes_nothing_for_too_long_loses_the_websocket(tmp_path: Path, who: str) -> None:
    """A socket that is not read reports neither FIN nor RST: this deadline also ends a WebSocket that has lost both
    sides."""
    over = asyncio.Event()

    async def agent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(switched())
        with contextlib.suppress(ConnectionError):
            if who == "agent":
                await over.wait()
            while True:
                writer.write(PIECE)
                await writer.drain()

    async with called(tmp_path, agent, between_bytes_s=0.4) as (proxy, _):
        client, _ = await opened(proxy)
        client.reader._transport.pause_reading()  # type: ignore[attr-defined]
        sending = asyncio.ensure_future(send_much(client) if who == "agent" else asyncio.sleep(0))
        await until(lambda: proxy.alice.gate.ingress == 0)
        over.set()
        sending.cancel()


# real programs -----------------------------------------------------------------------------------------------------


@pytest.fixture
def websockets() -> ModuleType:
    """The package of this name, client and server."""
    return cast(ModuleType, pytest.importorskip("websockets", reason="the websockets package is not installed"))


@contextlib.asynccontextmanager
async def real_agent(tmp_path: Path, websockets: ModuleType) -> AsyncIterator[tuple[Proxy, str]]:
    """An agent that is a server of the package and echoes; the URL a caller has for it."""

    async def echo(socket: Any) -> None:
        async for message in socket:
            if message == "bye":
                await socket.close(4001, "as you say")
                return
            await socket.send(message)

    async with (
        proxied(tmp_path) as (proxy, _),
        websockets.serve(echo, "127.0.0.1", 0, subprotocols=["chat"], ping_interval=0.05) as listening,
    ):
        port = listening.sockets[0].getsockname()[1]
        proxy.registry.learn(msgspec.structs.replace(proxy.row, address=f"127.0.0.1:{port}"))
        yield proxy, f"ws://127.0.0.1:{proxy.ingress_port}/agents/alice/t/{INGRESS_TOKEN.decode()}/ws?room=1"


async def test_a_real_client_talks_to_a_real_server(tmp_path: Path, websockets: ModuleType) -> None:
    async with real_agent(tmp_path, websockets) as (proxy, url):
        async with websockets.connect(url, subprotocols=["chat"], ping_interval=0.05) as talking:
            assert talking.subprotocol == "chat"
            assert talking.protocol.extensions, "permessage-deflate was agreed on"
            for message in ("hello", b"\x00\xff" * 1000, "x" * 900_000):
                await talking.send(message)
                assert await talking.recv() == message
            await (await talking.ping())
            await asyncio.sleep(0.3)  # several pings of both sides
            assert proxy.alice.gate.ingress == 1
            await talking.send("bye")
            with pytest.raises(websockets.ConnectionClosed) as closed:
                await talking.recv()
            assert (closed.value.rcvd.code, closed.value.rcvd.reason) == (4001, "as you say")
        await until(lambda: proxy.alice.gate.ingress == 0)


async def test_a_real_clients_close_is_answered_by_the_agent(tmp_path: Path, websockets: ModuleType) -> None:
    async with real_agent(tmp_path, websockets) as (proxy, url):
        talking = await websockets.connect(url, subprotocols=["chat"])
        await talking.close(1001, "off")
        assert talking.close_code == 1001
        await until(lambda: proxy.alice.gate.ingress == 0)


async def test_a_real_client_without_a_token_is_told_401(tmp_path: Path, websockets: ModuleType) -> None:
    async with real_agent(tmp_path, websockets) as (_, url):
        with pytest.raises(websockets.InvalidStatus) as refusal:
            await websockets.connect(url.replace(INGRESS_TOKEN.decode(), "hi_wrong"))
        assert refusal.value.response.status_code == 401
