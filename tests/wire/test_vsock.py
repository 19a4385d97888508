"""AF_VSOCK: the whole data path on its transport, the agent of a guest, listeners.

Few machines have a vsock that leads anywhere (tests/host/test_vsock_vm.py makes one), so here the data path's
listeners are AF_UNIX and TCP and only their transport is AF_VSOCK's; on uvloop and on asyncio's own loop (conftest.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import random
import socket
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hive.domain import BackendKind
from hive.errors import DependencyDown
from hive.link.messages import AgentRow
from hive.wire import vsock
from hive.wire.listeners import listen_tcp
from hive.wire.vsock import SocketTransport, VsockListener, listen_vsock
from tests.descriptors import open_descriptors
from tests.proxy.harness import CHAT, MODEL_TOKEN, STREAM, Client, answer, chunked, get, post, proxied, read_request
from tests.proxy.test_vectors import CLASSES, CONFLICTS, LISTENERS, NOT_FOR_INGRESS, SPOKEN_ANYWAY, VECTORS, judged
from tests.waiting import until

MIB = 1 << 20


class Noting(asyncio.Protocol):
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.told.append("connection_made")

    def connection_lost(self, exc: Exception | None) -> None:
        self.told.append("connection_lost")


# the data path --------------------------------------------------------------------------------------------------------


@pytest.fixture
def on_the_transport(monkeypatch: pytest.MonkeyPatch) -> None:
    """The harness's three listeners make their connections as AF_VSOCK's does."""
    monkeypatch.setattr("tests.proxy.harness.SocketListener", VsockListener)


@pytest.mark.usefixtures("on_the_transport")
@pytest.mark.parametrize("cls", CLASSES)
async def test_every_vector_is_answered_as_on_the_loops_own_transport(tmp_path: Path, cls: str) -> None:
    wrong: dict[str, list[str]] = defaultdict(list)
    async with proxied(tmp_path, window_requests=1_000_000) as (proxy, backend):
        proxy.use(backend, BackendKind.OLLAMA)
        proxy.registry.learn(msgspec.structs.replace(proxy.row, address=backend.address))
        for vector in VECTORS:
            for listener in LISTENERS:
                if vector["cls"] != cls or (listener, vector["id"]) in CONFLICTS:
                    continue
                if listener == "ingress" and cls in NOT_FOR_INGRESS and vector["id"] not in SPOKEN_ANYWAY:
                    continue
                if said := await judged(proxy, backend, vector, listener):
                    wrong[vector["id"]].append(f"{listener}: {said}")
    assert wrong == {}


@pytest.mark.usefixtures("on_the_transport")
async def test_a_body_of_16_mib_goes_through_and_an_answer_of_16_mib_comes_back(tmp_path: Path) -> None:
    content = b"x" * (16 * MIB - 100)
    body = b'{"model":"m","messages":[{"role":"user","content":"%b"}]}' % content
    async with proxied(tmp_path) as (proxy, backend):
        backend.reply = answer(b'{"choices":[],"text":"%b"}' % (b"y" * 16 * MIB))
        client = await Client.unix(proxy.socket_path)
        status, _, answered = await client.ask(post(b"/v1/chat/completions", body))
        assert (status, len(answered)) == (200, 16 * MIB + 24)
        assert content in backend.requests[0][1]
        (connection,) = proxy.connections
        assert isinstance(connection._transport, SocketTransport)
        assert (await client.ask(get(b"/v1/models")))[0] == 200, "the connection is kept and in step"


@pytest.mark.usefixtures("on_the_transport")
async def test_a_client_that_does_not_read_stops_the_backend(tmp_path: Path) -> None:
    written = 0
    piece = b'data: {"choices":[{"delta":{"content":"%b"}}]}\n\n' % (b"x" * 10_000)

    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal written
        await read_request(reader)
        writer.write(chunked(piece, end=False))
        while True:
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            await writer.drain()
            written += len(piece)

    async with proxied(tmp_path) as (proxy, backend):
        backend.script = endless
        client = await Client.unix(proxy.socket_path)
        client.writer.write(post(b"/v1/chat/completions", STREAM))
        before = -1
        while written != before or not written:
            before = written
            await asyncio.sleep(0.1)
        assert written < 32 * MIB, "what lies in sockets and buffers on the way"
        for _ in range(200):
            await asyncio.wait_for(client.reader.readexactly(100_000), 5)
        await until(lambda: written > before)
        client.close()
        await until(lambda: backend.closed == 1)


async def leave(client: Client, how: str) -> None:
    if how == "abort":
        client.writer.transport.abort()
    elif how == "eof":
        client.writer.write_eof()
    else:
        client.close()


@pytest.mark.usefixtures("on_the_transport")
async def test_nothing_is_left_of_a_thousand_clients_that_left_at_random(tmp_path: Path) -> None:
    chance = random.Random(7)
    whole = [post(b"/v1/chat/completions", CHAT), post(b"/v1/chat/completions", STREAM), get(b"/v1/models")]

    async def sometimes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await read_request(reader)
            writer.write(chunked(b'data: {"choices":[]}\n\n', end=False))
            await asyncio.sleep(chance.choice([0, 0.002, 0.01]))
            writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")

    async with proxied(tmp_path, window_requests=1_000_000, upstream_idle_s=0.1) as (proxy, backend):
        backend.script = sometimes
        descriptors = open_descriptors()

        async def one() -> None:
            client = await (Client.unix(proxy.socket_path) if chance.random() < 0.7 else Client.tcp(proxy.port))
            raw = b"".join(chance.choices(whole, k=chance.choice([1, 1, 2])))
            client.writer.write(raw[: chance.randrange(len(raw) + 1)])
            await asyncio.sleep(chance.choice([0, 0, 0.001, 0.005]))
            await leave(client, chance.choice(["abort", "eof", "close"]))
            await asyncio.sleep(0.02)
            client.close()
            Client.opened.remove(client)

        for _ in range(20):
            await asyncio.gather(*(one() for _ in range(50)))
        await until(lambda: not proxy.connections)
        await until(lambda: open_descriptors() == descriptors)
        assert (proxy.alice.gate.in_flight, repr(proxy.half_open)) == (0, "<HalfOpen 0 heads of 0 owners>")
        client = await Client.tcp(proxy.port)
        assert (await client.ask(get(b"/v1/models", token=MODEL_TOKEN)))[0] == 200


# the agent of a guest -------------------------------------------------------------------------------------------------


def row(name: str, cid: int | None) -> AgentRow:
    return AgentRow(id=name, name=name, generation=1, gate="open", status="running", cid=cid)


@pytest.mark.parametrize(
    ("told", "whose"),
    [
        ([], {1: None, 2: None, 3: None, 5: None}),
        ([("is", "bob", 5)], {5: "bob", 6: None, 2**32 - 1: None}),
        ([("is", "bob", None)], {5: None}),
        ([("is", "bob", 5), ("is", "bob", 6)], {5: None, 6: "bob"}),
        ([("is", "bob", 5), ("is", "bob", None)], {5: None}),
        ([("is", "bob", 5), ("gone", "bob", None)], {5: None}),
        ([("is", "bob", 5), ("is", "eve", 6)], {5: "bob", 6: "eve"}),
        ([("is", "bob", 5), ("gone", "bob", None), ("is", "eve", 5)], {5: "eve"}),
        ([("is", "bob", 5), ("is", "bob", 6), ("is", "eve", 5), ("gone", "bob", None)], {5: "eve", 6: None}),
        ([("is", "bob", 5), ("table", "eve", 5)], {5: "eve"}),
        ([("is", "bob", 5), ("table", "eve", 6)], {5: None, 6: "eve"}),
        ([("is", "bob", 5), ("is", "eve", 6), ("table", "bob", 6)], {5: None, 6: "bob"}),
    ],
)
async def test_a_context_id_is_that_of_the_agent_the_daemon_named_last(
    tmp_path: Path, told: list[tuple[str, str, int | None]], whose: dict[int, str | None]
) -> None:
    async with proxied(tmp_path) as (proxy, _):
        for what, name, cid in told:
            if what == "is":
                proxy.registry.learn(row(name, cid))
            elif what == "gone":
                proxy.registry.forget(name)
            else:
                proxy.registry.replace_all([proxy.row, row(name, cid)], "")
        found = {cid: proxy.registry.by_cid(cid) for cid in whose}
        assert {cid: entry and entry.row.name for cid, entry in found.items()} == whose


# listening ------------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def listening(make: Callable[[socket.socket], Any]) -> AsyncIterator[tuple[VsockListener, tuple[str, int]]]:
    sock = listen_tcp(0, move=False)
    where = sock.getsockname()
    listener = VsockListener(sock, make)
    yield listener, where
    listener.close()


def _left(sock: socket.socket) -> None:
    raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")


@pytest.mark.parametrize("make", [lambda sock: None, _left])
async def test_a_caller_that_is_refused_or_has_left_is_hung_up_on(make: Callable[[socket.socket], None]) -> None:
    async with listening(make) as (_, where):
        for _ in range(3):
            reader, writer = await asyncio.open_connection(*where)
            with contextlib.suppress(ConnectionError):
                assert await asyncio.wait_for(reader.read(), 5) == b""
            writer.close()


async def test_whoever_waits_can_be_taken_at_any_moment_and_before_the_end() -> None:
    """The gate asks for the first, a listener that is handed over for the second."""
    made: list[Noting] = []

    def make(sock: socket.socket) -> Noting:
        made.append(Noting())
        return made[-1]

    async with listening(make) as (listener, where):
        callers = [socket.create_connection(where) for _ in range(3)]
        listener.accept_waiting()
        assert [protocol.told for protocol in made] == [["connection_made"]] * 3
        callers.append(socket.create_connection(where))
        listener.close(empty_first=True)
        assert len(made) == 4
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(where)
        for caller in callers:
            caller.close()
        await until(lambda: all(protocol.told[-1] == "connection_lost" for protocol in made))


@pytest.mark.parametrize(
    ("number", "said", "hint"),
    [
        (errno.EAFNOSUPPORT, "this kernel has no AF_VSOCK", "modprobe vhost_vsock"),
        (errno.EADDRINUSE, "AF_VSOCK port 11434 cannot be taken: Address already in use", "ss --vsock"),
        (errno.EACCES, "AF_VSOCK port 11434 cannot be taken: Permission denied", "below 1024"),
    ],
)
def test_why_there_is_no_listener_is_said_with_the_way_out(number: int, said: str, hint: str) -> None:
    error = vsock._not_had(11434, OSError(number, os.strerror(number)))
    assert said in error.message
    assert hint in error.hint
    assert error.exit_code == 5


def test_a_vsock_port_is_taken_once() -> None:
    """Listening needs only the kernel's AF_VSOCK, with or without guests on this machine."""
    try:
        first = listen_vsock(21434)
    except DependencyDown as error:
        pytest.skip(error.message)
    with first, pytest.raises(DependencyDown, match="cannot be taken: Address already in use"):
        listen_vsock(21434)
