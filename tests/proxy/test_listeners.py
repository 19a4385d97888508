"""An agent's own listeners: the socket in its directory, and a TCP one made inside its network. Both tell the
caller."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from pathlib import Path
from typing import Any

import pytest

from hive.domain import Tier
from hive.link.helper import Listener as ListenerIs
from hive.link.helper import ListenerGone
from hive.link.messages import AgentIs, AgentRow, Busy, Close, Closed
from hive.wire.listeners import SocketListener
from tests.proxy.harness import (
    CHAT,
    INGRESS_TOKEN,
    JSON_ANSWER,
    MODEL_TOKEN,
    Backend,
    Client,
    Proxy,
    answer,
    digest,
    post,
    proxied,
)
from tests.proxy.proxy_process import ALICE, House, house
from tests.proxy.websocket_agent import Echo, ask
from tests.waiting import until

INNER = "inner:127.0.0.1:11434"
ASK = post(b"/v1/chat/completions", CHAT)


def listening() -> socket.socket:
    """As the helper makes one inside the agent's network."""
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    sock.listen(64)
    return sock


def inner(proxy: Proxy) -> int:
    """Gives alice an inner listener; its port."""
    sock = listening()
    proxy.alice.listeners[INNER] = SocketListener(sock, proxy.alice_connects)
    return int(sock.getsockname()[1])


def bob(proxy: Proxy) -> bytes:
    """Another agent; its token."""
    row = AgentRow(id="b1", name="bob", generation=1, gate="open", status="running", model_digest=digest(b"hm_bob"))
    proxy.registry.learn(row)
    return b"hm_bob"


@pytest.mark.parametrize("kind", ["unix", "inner"])
async def test_whoever_connects_to_an_agents_own_listener_is_that_agent_with_or_without_a_key(
    tmp_path: Path, kind: str
) -> None:
    async with proxied(tmp_path) as (proxy, _):
        port = inner(proxy)
        client = await (Client.unix(proxy.socket_path) if kind == "unix" else Client.tcp(port))
        for token in (None, MODEL_TOKEN, b"sk-whatever-an-sdk-needs", None):
            assert (await client.ask(post(b"/v1/chat/completions", CHAT, token=token)))[0] == 200
        assert [event.agent_id for event in proxy.events] == ["a1"] * 4


@pytest.mark.parametrize("kind", ["unix", "inner"])
@pytest.mark.parametrize("where", ["field", "path"])
async def test_a_token_of_somebody_else_is_401_there_and_closes(tmp_path: Path, kind: str, where: str) -> None:
    async with proxied(tmp_path) as (proxy, backend):
        port = inner(proxy)
        for token in (bob(proxy), b"internal"):
            client = await (Client.unix(proxy.socket_path) if kind == "unix" else Client.tcp(port))
            target = b"/v1/chat/completions" if where == "field" else b"/a/%b/v1/chat/completions" % token
            assert (await client.ask(post(target, CHAT, token=token if where == "field" else None)))[0] == 401
            assert await client.at_end()
        assert backend.requests == []


async def test_the_gate_looks_into_every_listener_of_the_agent_and_at_what_none_has_accepted_yet(
    tmp_path: Path,
) -> None:
    async with proxied(tmp_path) as (proxy, _):
        port, gate = inner(proxy), proxy.alice.gate
        with socket.socket() as tcp, socket.socket(socket.AF_UNIX) as unix:
            doors: list[tuple[socket.socket, Any]] = [(tcp, ("127.0.0.1", port)), (unix, str(proxy.socket_path))]
            for generation, (sock, address) in enumerate(doors, start=2):
                assert gate.close(2 * generation, now=0.0) is None
                sock.connect(address)
                sock.send(b"P")
                assert gate.still_closed(2 * generation, now=0.0) == "bytes of a request are waiting"
                sock.close()
                await until(lambda: not proxy.alice.connections)
                gate.open(2 * generation + 1)


async def test_over_an_inner_listener_an_answer_that_is_not_acknowledged_keeps_the_agent_awake(tmp_path: Path) -> None:
    """A second after its last byte as over all TCP, and beyond that while the peer's kernel has no room for it."""
    async with proxied(tmp_path) as (proxy, backend):
        backend.reply = answer(JSON_ANSWER.replace(b'"hi"', b'"%b"' % (b"x" * 120_000)))
        loop = asyncio.get_running_loop()
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        await loop.sock_connect(sock, ("127.0.0.1", inner(proxy)))
        await loop.sock_sendall(sock, ASK)
        await until(lambda: len(proxy.events) == 1 and proxy.alice.gate.in_flight == 0)
        (connection,) = proxy.alice.connections
        await until(lambda: connection.why_busy(loop.time() + 2) == "the answer has not been read")
        assert proxy.alice.gate.close(2, now=loop.time() + 2) == "the answer has not been read"
        assert proxy.alice.gate.close(3, now=loop.time() + 61) is None, "but not for longer than 60 s"
        proxy.alice.gate.open(4)
        got = 0
        while got < 120_000:
            got += len(await loop.sock_recv(sock, 65536))
        await until(lambda: connection.why_busy(loop.time() + 2) is None)
        assert connection.why_busy(loop.time()) == "an answer was sent less than 1 s ago"
        sock.close()


# in the process ----------------------------------------------------------------------------------------------------


async def told(home: House, message: ListenerIs | ListenerGone, sock: socket.socket | None = None) -> None:
    await until(lambda: home.helper is not None)
    assert home.helper is not None
    home.helper.tell(message, [sock.fileno()] if sock is not None else ())


async def is_served(address: Path | int) -> bool:
    """Whether a chat without a token is answered there; False if nothing accepts."""
    try:
        client = await (Client.unix(address) if isinstance(address, Path) else Client.tcp(address))
        async with asyncio.timeout(0.5):
            return (await client.ask(ASK))[0] == 200
    except (OSError, TimeoutError, asyncio.IncompleteReadError):
        return False


async def becomes(address: Path | int, served: bool) -> None:
    async with asyncio.timeout(60):
        while await is_served(address) is not served:
            pass


async def test_listeners_come_and_go_by_their_path(short_path: Path) -> None:
    async with house(short_path) as home:
        proxy = await home.proxy()
        own = home.paths.agent_socket(ALICE)
        with listening() as first, listening() as second:
            ports = [sock.getsockname()[1] for sock in (first, second)]
            await told(home, ListenerIs(agent=ALICE, path=INNER), first)
            await becomes(ports[0], True)
            await becomes(own, True)
            await told(home, ListenerIs(agent=ALICE, path=INNER), second)
            await becomes(ports[1], True)
            assert not await is_served(ports[0]), "another one of the same path takes its place"
            await told(home, ListenerGone(agent=ALICE, path=INNER))
            await becomes(ports[1], False)
            assert await is_served(own)
            await told(home, ListenerIs(agent=ALICE, path=INNER), second)
            await becomes(ports[1], True)
            await told(home, ListenerGone(agent=ALICE))
            await becomes(own, False)
            assert not await is_served(ports[1]), "without a path all are meant"
        assert await proxy.stop() == 0
        assert "Traceback" not in proxy.said()


async def test_callers_of_an_inner_listener_wait_in_its_backlog_for_the_next_proxy(short_path: Path) -> None:
    async with house(short_path) as home:
        proxy = await home.proxy()
        with listening() as sock:
            await told(home, ListenerIs(agent=ALICE, path=INNER), sock)
            await becomes(sock.getsockname()[1], True)
            assert await proxy.stop() == 0
            client = await Client.tcp(sock.getsockname()[1])
            client.writer.write(ASK)
            home.helper = None
            await home.proxy()
            await told(home, ListenerIs(agent=ALICE, path=INNER), sock)
            assert (await client.answer())[0] == 200


async def test_the_daemon_is_told_busy_for_what_waits_in_an_inner_listener(short_path: Path) -> None:
    async with house(short_path) as home:
        await home.proxy()
        assert home.link is not None
        with listening() as sock, socket.socket() as half:
            await told(home, ListenerIs(agent=ALICE, path=INNER), sock)
            await becomes(sock.getsockname()[1], True)
            Client.opened.pop().close()
            await asyncio.sleep(1.1)  # over TCP the last answer must be a second old
            answer = await home.link.ask_any(Close(agent=ALICE, generation=2), timeout_s=5)
            assert isinstance(answer, Closed), answer
            home.link.tell(AgentIs(row=row_of(home, generation=3)))
            half.connect(sock.getsockname())
            half.send(b"P")
            answer = await home.link.ask_any(Close(agent=ALICE, generation=4), timeout_s=5)
            assert isinstance(answer, Busy), answer


def row_of(home: House, *, generation: int, address: str | None = None) -> AgentRow:
    return AgentRow(
        id=ALICE,
        name="alice",
        generation=generation,
        gate="open",
        status="running",
        tier=Tier.LOW,
        model_digest=digest(MODEL_TOKEN),
        ingress_digest=digest(INGRESS_TOKEN),
        address=address,
    )


async def test_a_proxy_that_leaves_ends_open_websockets_and_does_not_wait_for_them(short_path: Path) -> None:
    agent = Backend()
    agent.script = Echo()
    await agent.start()
    async with house(short_path) as home:
        home.config.write_text(home.config.read_text().replace("drain_s = 5", "drain_s = 1000"))
        proxy = await home.proxy()
        assert home.link is not None
        home.link.tell(AgentIs(row=row_of(home, generation=2, address=agent.address)))
        client = await Client.tcp(proxy.ingress_port)
        async with asyncio.timeout(60):
            while not await opens(client):
                client = await Client.tcp(proxy.ingress_port)
        client.writer.write(b"hello")
        assert await client.reader.readexactly(5) == b"hello"
        assert await proxy.stop() == 0
        assert await client.at_end()
        assert "cut=0" in proxy.said()
    await agent.stop()


async def opens(client: Client) -> bool:
    """False where the proxy has not heard yet that the agent has a port."""
    client.writer.write(ask())
    with contextlib.suppress(asyncio.IncompleteReadError):
        return (await client.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101 ")
    return False
