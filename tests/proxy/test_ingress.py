"""Callers of an agent: authorised first, then woken for, then forwarded as they asked."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path

import msgspec
import pytest

from hive.domain import WakeCause
from tests.proxy.harness import (
    INGRESS_TOKEN,
    MODEL_TOKEN,
    Backend,
    Client,
    Proxy,
    answer,
    chunked,
    get,
    proxied,
    read_request,
)
from tests.waiting import until


def call(target: bytes, *, token: bytes | None = INGRESS_TOKEN, method: bytes = b"GET", rest: bytes = b"") -> bytes:
    auth = b"x-hive-token: %b\r\n" % token if token else b""
    return b"%b %b HTTP/1.1\r\nhost: h\r\n%b%b\r\n" % (method, target, auth, rest)


async def agent_of(proxy: Proxy) -> Backend:
    agent = Backend()
    await agent.start()
    proxy.registry.learn(msgspec.structs.replace(proxy.row, address=agent.address))
    return agent


async def test_a_caller_reaches_the_agents_port_with_what_it_asked(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, _):
        agent = await agent_of(proxy)
        agent.reply = answer(b"hello")
        client = await Client.tcp(proxy.ingress_port)
        body = b"content-length: 3\r\nauthorization: Basic x\r\nforwarded: for=evil\r\n\r\nabc"
        status, _, got = await client.ask(call(b"/agents/alice/turn?q=%2F", method=b"POST", rest=body)[:-2])
        assert (status, got) == (200, b"hello")
        head, sent = agent.requests[0]
        assert head.startswith(b"POST /turn?q=%2F HTTP/1.1\r\n")
        assert sent == b"abc"
        assert b"authorization: Basic x" in head
        assert b"x-forwarded-prefix: /agents/alice\r\n" in head
        assert b"x-hive-token" not in head
        assert b"evil" not in head
        client.close()
        await agent.stop()


@pytest.mark.parametrize(
    "request_bytes",
    [
        call(b"/agents/alice/", token=None),
        call(b"/agents/alice/", token=b"hi_wrong"),
        call(b"/agents/alice/", token=MODEL_TOKEN),
        call(b"/agents/nobody/"),
        call(b"/agents/alice/t/hi_wrong/", token=None),
    ],
)
async def test_unknown_name_and_wrong_token_are_the_same_401_and_wake_nobody(
    tmp_path: Path, request_bytes: bytes
) -> None:
    async with proxied(tmp_path) as (proxy, _):
        agent = await agent_of(proxy)
        assert proxy.alice.gate.close(2, now=0.0) is None
        client = await Client.tcp(proxy.ingress_port)
        status, _, body = await client.ask(request_bytes)
        assert status == 401
        assert b"unknown agent or wrong token" in body
        assert proxy.wakes == []
        assert agent.requests == []
        client.close()
        await agent.stop()


@pytest.mark.parametrize(
    "request_bytes",
    [call(b"/agents/alice/t/hi_alice/x", token=None), call(b"/agents/alice/x", token=b"internal")],
)
async def test_the_token_may_be_in_the_path_or_be_the_internal_one(tmp_path: Path, request_bytes: bytes) -> None:
    async with proxied(tmp_path) as (proxy, _):
        agent = await agent_of(proxy)
        client = await Client.tcp(proxy.ingress_port)
        assert (await client.ask(request_bytes))[0] == 200
        assert agent.requests[0][0].startswith(b"GET /x ")
        client.close()
        await agent.stop()


async def test_a_sleeping_agent_is_woken_and_the_caller_waits(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, _):
        agent = await agent_of(proxy)
        gate = proxy.alice.gate
        assert gate.close(2, now=0.0) is None
        gate.asleep(2)
        client = await Client.tcp(proxy.ingress_port)
        client.writer.write(call(b"/agents/alice/"))
        await until(lambda: proxy.wakes == [("a1", WakeCause.INGRESS)])
        assert agent.requests == []
        gate.open(3)
        assert (await client.answer())[0] == 200
        await until(lambda: gate.ingress == 0)
        client.close()
        await agent.stop()


async def test_an_open_caller_keeps_the_agent_awake(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, _):
        agent = await agent_of(proxy)

        async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()

        agent.script = hang
        client = await Client.tcp(proxy.ingress_port)
        client.writer.write(call(b"/agents/alice/"))
        await until(lambda: proxy.alice.gate.ingress == 1)
        assert proxy.alice.gate.close(2, now=0.0) == "1 caller is open"
        client.writer.transport.abort()
        await until(lambda: proxy.alice.gate.ingress == 0)
        assert proxy.alice.gate.close(3, now=0.0) is None
        await agent.stop()


async def test_an_agent_that_does_not_listen_yet_is_tried_again_then_502(tmp_path: Path) -> None:
    async with proxied(tmp_path, gate_wait_s=0.5) as (proxy, _):
        agent, place = Backend(), socket.socket()
        place.bind(("127.0.0.1", 0))  # keeps the port from others while nothing listens there
        agent.address = f"127.0.0.1:{place.getsockname()[1]}"
        proxy.registry.learn(msgspec.structs.replace(proxy.row, address=agent.address))
        client = await Client.tcp(proxy.ingress_port)
        status, _, body = await client.ask(call(b"/agents/alice/"))
        assert status == 502
        assert f"agent alice is not reached: nothing listens on {agent.address}".encode() in body
        assert b"HIVE_AGENT_PORT has the number" in body
        assert b"backend" not in body
        assert b'"code":"agent_unavailable"' in body
        client.writer.write(call(b"/agents/alice/"))
        await asyncio.sleep(0.15)
        late = await asyncio.start_server(agent._serve, sock=place)
        assert (await client.answer())[0] == 200
        client.close()
        late.close()


async def test_an_agent_that_ends_without_an_answer_is_called_an_agent(tmp_path: Path) -> None:
    """A caller was told `the agent broke off: the backend closed the connection without an answer`."""

    async def leave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.close()

    async with proxied(tmp_path) as (proxy, _):
        agent = await agent_of(proxy)
        agent.script = leave
        client = await Client.tcp(proxy.ingress_port)
        status, _, body = await client.ask(call(b"/agents/alice/"))
        assert status == 502
        assert b"the agent closed the connection without an answer" in body
        assert b"backend" not in body
        client.close()
        await agent.stop()


async def test_streams_pass_and_a_broken_one_is_no_clean_end(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, _):
        agent = await agent_of(proxy)
        client = await Client.tcp(proxy.ingress_port)
        agent.reply = chunked(b"a", b"bc", content_type=b"text/plain")
        assert (await client.ask(call(b"/agents/alice/")))[2] == b"abc"

        async def broken(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(chunked(b"a", end=False))

        agent.script = broken
        with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError)):
            await client.ask(call(b"/agents/alice/"))
        client.close()
        await agent.stop()


async def test_more_than_the_open_limit_are_refused(tmp_path: Path) -> None:
    async with proxied(tmp_path, ingress_open_max=1) as (proxy, _):
        agent = await agent_of(proxy)

        async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()

        agent.script = hang
        first, second = await Client.tcp(proxy.ingress_port), await Client.tcp(proxy.ingress_port)
        first.writer.write(call(b"/agents/alice/"))
        await until(lambda: proxy.alice.gate.ingress == 1)
        assert (await second.ask(call(b"/agents/alice/")))[0] == 503
        first.close()
        second.close()
        await agent.stop()


async def test_an_agent_without_a_port_and_a_leaving_hive_say_so(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, _):
        client = await Client.tcp(proxy.ingress_port)
        assert (await client.ask(call(b"/agents/alice/")))[0] == 404
        assert (await client.ask(get(b"/etc/passwd")))[0] == 404
        proxy.ingress.leave()
        assert (await client.ask(call(b"/agents/alice/")))[0] == 503
        client.close()


async def test_head_is_answered_without_a_body(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, _):
        agent = await agent_of(proxy)

        async def head_only(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n")

        agent.script = head_only
        client = await Client.tcp(proxy.ingress_port)
        status, fields, _ = await client.ask(call(b"/agents/alice/", method=b"HEAD"))
        assert (status, fields[b"content-length"]) == (200, b"10")
        client.close()
        await agent.stop()


async def test_a_message_to_a_sleeping_agent_wakes_it_and_is_an_open_caller_until_it_is_answered(
    tmp_path: Path,
) -> None:
    """As the daemon's message delivery sends one: a POST with the agent's own ingress token."""
    go = asyncio.Event()

    async def inbox(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head, body = await read_request(reader)
        assert (head.split(b" ")[:2], body) == ([b"POST", b"/inbox"], b'{"text":"hello"}')
        await go.wait()
        writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")

    async with proxied(tmp_path) as (proxy, _):
        agent = await agent_of(proxy)
        agent.script = inbox
        gate = proxy.alice.gate
        assert gate.close(2, now=0.0) is None
        gate.asleep(2)
        client = await Client.tcp(proxy.ingress_port)
        body = b'{"text":"hello"}'
        fields = b"content-type: application/json\r\ncontent-length: %d\r\n" % len(body)
        client.writer.write(call(b"/agents/alice/inbox", method=b"POST", rest=fields) + body)
        await until(lambda: proxy.wakes == [("a1", WakeCause.INGRESS)])
        gate.open(3)
        await until(lambda: agent.connections == 1)
        assert gate.close(4, now=0.0) == "1 caller is open"
        go.set()
        assert (await client.answer())[0] == 204
        await until(lambda: proxy.quiets == ["a1"])
        assert gate.close(5, now=0.0) is None
        client.close()
        await agent.stop()


# Hive's own answers ------------------------------------------------------------------------------------------------

STATE = b"/agents/alice/.hive/state"


async def state_of(client: Client, request: bytes = call(STATE)) -> tuple[int, dict[str, object]]:
    status, _, body = await client.ask(request)
    return status, json.loads(body)


async def test_hive_tells_an_agents_state_without_asking_or_waking_it(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, _):
        agent = await agent_of(proxy)
        gate = proxy.alice.gate
        client = await Client.tcp(proxy.ingress_port)
        assert await state_of(client) == (200, {"agent": "alice", "state": "awake", "open": 0, "parked": 0})
        assert gate.close(2, now=0.0) is None
        assert (await state_of(client))[1]["state"] == "pausing"
        gate.asleep(2)
        assert (await state_of(client, call(STATE + b"?probe=1")))[1]["state"] == "asleep"
        assert (await state_of(client, call(b"/agents/alice/t/hi_alice/.hive/state", token=None)))[0] == 200
        assert (await client.ask(call(STATE, method=b"HEAD")))[0] == 200
        assert (gate.last_active, proxy.wakes, agent.connections) == (None, [], 0)
        waiting = await Client.tcp(proxy.ingress_port)
        waiting.writer.write(call(b"/agents/alice/"))
        await until(lambda: gate.parked == 1)
        assert await state_of(client) == (200, {"agent": "alice", "state": "waking", "open": 1, "parked": 1})
        gate.refuse(3, "stopped")
        status, _, body = await client.ask(call(STATE))
        assert status == 503
        assert b"stopped" in body
        await agent.stop()


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (call(STATE, token=b"hi_wrong"), 401),
        (call(b"/agents/nobody/.hive/state"), 401),
        (call(STATE, method=b"POST"), 405),
        (call(b"/agents/alice/.hive/secrets"), 404),
        (call(b"/agents/alice/.hive/"), 404),
    ],
)
async def test_what_is_asked_of_hive_itself_never_reaches_the_agent(
    tmp_path: Path, request_bytes: bytes, status: int
) -> None:
    async with proxied(tmp_path) as (proxy, _):
        agent = await agent_of(proxy)
        client = await Client.tcp(proxy.ingress_port)
        assert (await client.ask(request_bytes))[0] == status
        assert (agent.connections, proxy.wakes) == (0, [])
        await agent.stop()


async def test_an_agent_without_a_port_has_a_state_all_the_same(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, _):
        client = await Client.tcp(proxy.ingress_port)
        assert (await state_of(client))[1]["state"] == "awake"
