"""Agents that are reached otherwise than over TCP: a unix socket, a guest's port behind its VMM, and where only the
helper gets to."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hive.domain import WakeCause
from hive.link.helper import dialled
from tests.muxer import Muxer
from tests.proxy.at_rest import complaints, held
from tests.proxy.harness import INGRESS_TOKEN, Backend, Client, Proxy, answer, proxied
from tests.proxy.websocket_agent import Echo, ask
from tests.waiting import until

CALL = b"GET /agents/alice/turn HTTP/1.1\r\nhost: h\r\nx-hive-token: %b\r\n\r\n" % INGRESS_TOKEN
PORT = 8080


@contextlib.asynccontextmanager
async def guest(short_path: Path, **settings: Any) -> AsyncIterator[tuple[Proxy, Muxer, Backend]]:
    """Alice is a virtual machine, and a server listens on PORT in it. Nothing that was begun is left at the end."""
    muxer, inside = Muxer(short_path / "v.sock"), Backend()
    inside.reply = answer(b"hello")
    await muxer.start()
    await inside.start()
    muxer.guest[PORT] = int(inside.address.rpartition(":")[2])
    try:
        async with proxied(short_path, **settings) as (proxy, _):
            proxy.registry.learn(msgspec.structs.replace(proxy.row, address=muxer.address(PORT)))
            with complaints() as found:
                before = held(proxy)
                yield proxy, muxer, inside
                while Client.opened:
                    Client.opened.pop().close()
                await until(lambda: held(proxy) == before)
                await until(lambda: muxer.open == 0)
            assert found == []
    finally:
        await muxer.stop()
        await inside.stop()


async def test_an_agent_behind_a_unix_socket_is_reached(short_path: Path) -> None:
    async with proxied(short_path) as (proxy, _):
        agent = Backend()
        agent.reply = answer(b"hello")
        server = await asyncio.start_unix_server(agent._serve, str(short_path / "agent.sock"))
        proxy.registry.learn(msgspec.structs.replace(proxy.row, address=f"unix:{short_path}/agent.sock"))
        client = await Client.tcp(proxy.ingress_port)
        assert (await client.ask(CALL))[::2] == (200, b"hello")
        assert agent.requests[0][0].startswith(b"GET /turn HTTP/1.1\r\n")
        await until(lambda: agent.closed == 1)
        server.close()


async def test_an_agent_in_a_virtual_machine_is_reached(short_path: Path) -> None:
    async with guest(short_path) as (proxy, muxer, inside):
        client = await Client.tcp(proxy.ingress_port)
        for _ in range(2):
            assert (await client.ask(CALL))[::2] == (200, b"hello")
        assert muxer.said == [b"CONNECT 8080\n"] * 2, "a connection of its own each: what slept keeps none"
        assert inside.requests[0][0].startswith(b"GET /turn HTTP/1.1\r\n")


async def test_a_guest_that_does_not_listen_yet_is_tried_again(short_path: Path) -> None:
    async with guest(short_path, gate_wait_s=30.0) as (proxy, muxer, _):
        port = muxer.guest.pop(PORT)
        client = await Client.tcp(proxy.ingress_port)
        client.writer.write(CALL)
        await until(lambda: len(muxer.said) >= 3)
        muxer.guest[PORT] = port
        assert (await client.answer())[0] == 200


async def test_a_guest_that_never_listens_is_502_and_the_reason(short_path: Path) -> None:
    async with guest(short_path, gate_wait_s=0.3) as (proxy, muxer, _):
        muxer.guest.clear()
        client = await Client.tcp(proxy.ingress_port)
        status, _, body = await client.ask(CALL)
        assert status == 502
        # The last of its tries may be cut off before the guest has said so.
        assert b"nobody in the guest listens on port 8080" in body or b"did not accept in " in body


async def test_a_vmm_that_accepts_and_says_nothing_is_502_at_the_deadline(short_path: Path) -> None:
    """connect() to a frozen VMM succeeds: without a deadline for the OK the caller would wait for ever (trap 21)."""
    async with guest(short_path, gate_wait_s=0.3) as (proxy, muxer, _):
        muxer.running.clear()
        client = await Client.tcp(proxy.ingress_port)
        status, _, body = await client.ask(CALL)
        assert status == 502
        assert b"did not accept" in body
        await until(lambda: muxer.open == 0)


@pytest.mark.parametrize("how", ["fin", "rst"])
async def test_a_caller_that_leaves_while_the_vmm_says_nothing_takes_its_connection_along(
    short_path: Path, how: str
) -> None:
    async with guest(short_path, gate_wait_s=60.0) as (proxy, muxer, _):
        muxer.running.clear()
        client = await Client.tcp(proxy.ingress_port)
        client.writer.write(CALL)
        await until(lambda: muxer.said != [])
        client.close() if how == "fin" else client.writer.transport.abort()
        await until(lambda: muxer.open == 0)
        assert proxy.alice.gate.ingress == 0


async def test_a_caller_waits_for_a_paused_vmm_as_for_a_sleeping_agent(short_path: Path) -> None:
    """The gate opens with the thaw; the VMM may say its OK a moment later."""
    async with guest(short_path, gate_wait_s=60.0) as (proxy, muxer, _):
        muxer.running.clear()
        gate = proxy.alice.gate
        assert gate.close(2, now=0.0) is None
        gate.asleep(2)
        client = await Client.tcp(proxy.ingress_port)
        client.writer.write(CALL)
        await until(lambda: proxy.wakes == [("a1", WakeCause.INGRESS)])
        assert muxer.said == []
        gate.open(3)
        await until(lambda: muxer.said != [])
        muxer.running.set()
        assert (await client.answer())[0] == 200


async def test_a_websocket_reaches_into_a_virtual_machine(short_path: Path) -> None:
    async with guest(short_path) as (proxy, _, inside):
        inside.script = Echo()
        client = await Client.tcp(proxy.ingress_port)
        client.writer.write(ask())
        assert (await client.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101 ")
        client.writer.write(b"hello")
        assert await client.reader.readexactly(5) == b"hello"


async def test_an_agent_that_lost_its_port_while_it_was_woken_is_404(short_path: Path) -> None:
    async with guest(short_path) as (proxy, _, _):
        gate = proxy.alice.gate
        assert gate.close(2, now=0.0) is None
        client = await Client.tcp(proxy.ingress_port)
        client.writer.write(CALL)
        await until(lambda: gate.parked == 1)
        proxy.registry.learn(msgspec.structs.replace(proxy.row, generation=3, address=None))
        assert (await client.answer())[0] == 404


# --- where only the helper gets to ---------------------------------------------------------------------------------


async def test_an_agent_the_helper_connects_to_is_reached_awake_and_asleep(short_path: Path) -> None:
    async with proxied(short_path) as (proxy, _):
        agent = Backend()
        agent.reply = answer(b"hello")
        server = await asyncio.start_unix_server(agent._serve, str(short_path / "agent.sock"))
        proxy.fetched["a1"] = str(short_path / "agent.sock")
        proxy.registry.learn(msgspec.structs.replace(proxy.row, address=dialled("a1")))
        client = await Client.tcp(proxy.ingress_port)
        assert (await client.ask(CALL))[::2] == (200, b"hello")
        assert proxy.alice.gate.close(2, 1e9) is None
        proxy.alice.gate.asleep(2)
        client.writer.write(CALL)
        await until(lambda: proxy.wakes)
        assert len(agent.requests) == 1, "nobody is connected to before it is awake"
        proxy.alice.gate.open(2)
        assert (await client.answer())[::2] == (200, b"hello")
        await until(lambda: agent.closed == 2)
        server.close()


async def test_a_helper_that_is_away_for_a_moment_costs_a_caller_that_moment(short_path: Path) -> None:
    async with proxied(short_path, gate_wait_s=30.0) as (proxy, _):
        agent = Backend()
        agent.reply = answer(b"hello")
        server = await asyncio.start_unix_server(agent._serve, str(short_path / "agent.sock"))
        proxy.registry.learn(msgspec.structs.replace(proxy.row, address=dialled("a1")))
        client = await Client.tcp(proxy.ingress_port)
        client.writer.write(CALL)
        await asyncio.sleep(0.1)
        proxy.fetched["a1"] = str(short_path / "agent.sock")
        assert (await client.answer())[::2] == (200, b"hello")
        await until(lambda: agent.closed == 1)
        server.close()


async def test_without_a_helper_it_is_502_and_the_reason(short_path: Path) -> None:
    async with proxied(short_path, gate_wait_s=0.2) as (proxy, _):
        proxy.registry.learn(msgspec.structs.replace(proxy.row, address=dialled("a1")))
        client = await Client.tcp(proxy.ingress_port)
        status, _, body = await client.ask(CALL)
        assert status == 502
        assert b"agent alice is not reached: helper is not connected" in body


async def test_a_websocket_in_a_guest_the_helper_connects_to_is_opened(short_path: Path) -> None:
    async with guest(short_path) as (proxy, muxer, inside):
        inside.script = Echo()
        proxy.fetched["a1"] = str(muxer.path)
        proxy.registry.learn(msgspec.structs.replace(proxy.row, address=dialled("a1", PORT)))
        client = await Client.tcp(proxy.ingress_port)
        client.writer.write(ask())
        assert (await client.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101 ")
        client.writer.write(b"hello")
        assert await client.reader.readexactly(5) == b"hello"
        assert muxer.said == [b"CONNECT 8080\n"]
