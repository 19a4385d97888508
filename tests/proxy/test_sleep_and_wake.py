"""The traps of sleeping and waking that are the proxy's to avoid, by their number in the list this project keeps.

5 concurrent wakes · 11 connections kept over a sleep · 21 health checks · 22 traffic without a right to wake ·
24 callers that do not come again. The others are where they are avoided: tests/agents, tests/sandbox.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hive.domain import WakeCause
from hive.queue.limits import SlidingWindow
from hive.queue.wakes import LATEST_S, SOONEST_S, WakeTimes
from tests.proxy.harness import CHAT, INGRESS_TOKEN, Backend, Client, Proxy, answer, nothing_is_held, post, proxied
from tests.waiting import until


def call(target: bytes = b"/agents/alice/", *, token: bytes = INGRESS_TOKEN) -> bytes:
    return b"GET %b HTTP/1.1\r\nhost: h\r\nx-hive-token: %b\r\n\r\n" % (target, token)


async def sleeping(proxy: Proxy) -> Backend:
    """Alice, an agent that listens on a port and is asleep."""
    agent = Backend()
    agent.reply = answer(b"hello")
    await agent.start()
    proxy.registry.learn(msgspec.structs.replace(proxy.row, address=agent.address))
    assert proxy.alice.gate.close(2, now=0.0) is None
    proxy.alice.gate.asleep(2)
    return agent


async def test_trap_5_fifty_callers_at_once_are_one_wake_and_fifty_answers(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, _):
        agent = await sleeping(proxy)
        clients = [await Client.tcp(proxy.ingress_port) for _ in range(50)]
        for client in clients:
            client.writer.write(call())
        await until(lambda: proxy.alice.gate.parked == 50)
        assert proxy.wakes == [("a1", WakeCause.INGRESS)]
        proxy.alice.gate.open(3)
        proxy.alice.gate.open(3)  # told, and the answer to the ask: the same twice
        assert [(await client.answer())[0] for client in clients] == [200] * 50
        await until(lambda: nothing_is_held(proxy))
        await agent.stop()


async def test_trap_5_waiters_are_bounded_and_who_is_one_too_many_is_told_at_once(tmp_path: Path) -> None:
    async with proxied(tmp_path, parked_max=3) as (proxy, _):
        agent = await sleeping(proxy)
        clients = [await Client.tcp(proxy.ingress_port) for _ in range(3)]
        for client in clients:
            client.writer.write(call())
        await until(lambda: proxy.alice.gate.parked == 3)
        surplus = await Client.tcp(proxy.ingress_port)
        status, fields, body = await surplus.ask(call())
        assert (status, fields[b"retry-after"]) == (503, b"1")
        assert b"3 requests already wait for this agent to wake" in body
        proxy.alice.gate.open(3)
        assert [(await client.answer())[0] for client in clients] == [200] * 3
        assert (await surplus.ask(call()))[0] == 200, "its connection was kept"
        await agent.stop()


async def test_trap_11_a_connection_kept_over_a_sleep_is_there_for_the_first_request_after_it(tmp_path: Path) -> None:
    async with proxied(tmp_path, keepalive_s=0.2) as (proxy, _):
        client = await Client.unix(proxy.socket_path)
        assert (await client.ask(post(b"/v1/chat/completions", CHAT)))[0] == 200
        gate = proxy.alice.gate
        await until(lambda: gate.close(2, now=0.0) is None)
        gate.asleep(2)
        await asyncio.sleep(0.7)  # three times what an idle one is kept
        gate.open(3)
        assert (await client.ask(post(b"/v1/chat/completions", CHAT)))[0] == 200
        assert len(proxy.alice.connections) == 1


async def test_trap_11_a_connection_kept_over_a_sleep_is_no_work_in_flight(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, _):
        client = await Client.unix(proxy.socket_path)
        assert (await client.ask(post(b"/v1/chat/completions", CHAT)))[0] == 200
        await until(lambda: proxy.alice.gate.close(2, now=0.0) is None)


async def test_trap_21_a_probe_of_a_sleeping_agent_is_answered_by_hive_and_wakes_nobody(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, _):
        agent = await sleeping(proxy)
        probe = await Client.tcp(proxy.ingress_port)
        for _ in range(20):
            status, _, body = await probe.ask(call(b"/agents/alice/.hive/state"))
            assert (status, b'"state":"asleep"' in body) == (200, True)
        assert (proxy.wakes, agent.connections) == ([], 0)
        assert proxy.alice.gate.last_active is None, "nor does it count as activity"
        await agent.stop()


async def test_trap_22_who_may_not_wake_does_not_whatever_it_asks(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, _):
        agent = await sleeping(proxy)
        for target in (b"/agents/alice/", b"/agents/alice/.hive/state", b"/agents/alice/t/hi_wrong/", b"/agents/bob/"):
            client = await Client.tcp(proxy.ingress_port)
            assert (await client.ask(call(target, token=b"hi_wrong")))[0] == 401
        stranger = await Client.tcp(proxy.port)
        assert (await stranger.ask(post(b"/v1/chat/completions", CHAT, token=b"hm_wrong")))[0] == 401
        half = await Client.tcp(proxy.ingress_port)
        half.writer.write(call(token=b"hi_wrong")[:-2])
        nothing = await Client.tcp(proxy.ingress_port)
        await asyncio.sleep(0.1)
        assert (proxy.wakes, proxy.alice.gate.parked) == ([], 0)
        half.close()
        nothing.close()
        await agent.stop()


async def test_trap_22_callers_of_one_tenant_wake_so_many_agents_a_minute_and_no_more(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, _):
        agent = await sleeping(proxy)
        gate = proxy.alice.gate
        proxy.alice.tenant.wakes = SlidingWindow(2, 60.0)
        client = await Client.tcp(proxy.ingress_port)
        for generation in (4, 6):
            client.writer.write(call())
            await until(lambda: gate.parked == 1)
            second = await Client.tcp(proxy.ingress_port)
            second.writer.write(call())  # a request that only waits along is no wake
            await until(lambda: gate.parked == 2)
            gate.open(generation)
            assert ((await client.answer())[0], (await second.answer())[0]) == (200, 200)
            await until(lambda: gate.ingress == 0)
            assert gate.close(generation + 1, now=0.0) is None
        status, fields, body = await client.ask(call())
        assert (status, 1 <= int(fields[b"retry-after"]) <= 60) == (429, True)
        assert b"callers woke agents of tenant default 2 times in 60 s" in body
        assert (len(proxy.wakes), gate.parked) == (2, 0)
        gate.open(8)
        assert (await client.ask(call()))[0] == 200, "an agent that is awake is not waited for"
        await agent.stop()


async def test_trap_24_a_caller_is_held_up_to_the_deadline_and_then_told_when_to_come_again(tmp_path: Path) -> None:
    async with proxied(tmp_path, gate_wait_s=0.4) as (proxy, _):
        agent = await sleeping(proxy)
        for took_s in (0.1, 3.4, 3.4):
            proxy.registry.wakes.took(took_s)
        client = await Client.tcp(proxy.ingress_port)
        status, fields, body = await client.ask(call())
        assert status == 503
        assert b"did not wake within 0.4 s" in body
        assert fields[b"retry-after"] == b"3", "wakes that took longer than 0.4 s took 3 s more"
        assert (proxy.alice.gate.parked, agent.connections) == (0, 0)
        await agent.stop()


async def test_trap_24_a_wake_that_comes_late_but_in_time_is_an_answer_and_is_measured(tmp_path: Path) -> None:
    async with proxied(tmp_path, gate_wait_s=30.0) as (proxy, _):
        agent = await sleeping(proxy)
        client = await Client.tcp(proxy.ingress_port)
        client.writer.write(call())
        await until(lambda: proxy.alice.gate.parked == 1)
        proxy.alice.gate.wake_failed()  # the ask itself got no answer: the wake may still come
        await asyncio.sleep(0.2)
        proxy.alice.gate.open(3)
        assert (await client.answer())[0] == 200
        assert repr(proxy.registry.wakes).startswith("<WakeTimes 1 wakes, median ")
        assert proxy.registry.wakes.retry_after_s(0.0) == SOONEST_S
        await agent.stop()


@pytest.mark.parametrize("end", ["refused", "link lost", "removed"])
async def test_a_wake_that_never_came_is_not_measured(tmp_path: Path, end: str) -> None:
    async with proxied(tmp_path, gate_wait_s=30.0) as (proxy, _):
        agent = await sleeping(proxy)
        gate = proxy.alice.gate
        client = await Client.tcp(proxy.ingress_port)
        client.writer.write(call())
        await until(lambda: gate.parked == 1)
        if end == "refused":
            gate.refuse(3, "stopped")
        elif end == "removed":
            proxy.registry.forget("a1")
        else:
            gate.open(3)
            assert gate.close(4, now=0.0) is not None  # the caller is open
            await client.answer()
            await until(lambda: gate.ingress == 0)
            assert gate.close(5, now=0.0) is None
            client.writer.write(call())
            await until(lambda: gate.parked == 1)
            gate.link_lost()
        assert (await client.answer())[0] == (200 if end == "link lost" else 503)
        gate.open(9)
        assert repr(proxy.registry.wakes).startswith(f"<WakeTimes {int(end == 'link lost')} wakes")
        await agent.stop()


@given(st.lists(st.floats(0, 100), max_size=80), st.floats(0, 100))
def test_when_to_come_again_is_always_between_soonest_and_latest(took: list[float], waited_s: float) -> None:
    wakes = WakeTimes()
    for wake_s in took:
        wakes.took(wake_s)
    assert SOONEST_S <= wakes.retry_after_s(waited_s) <= LATEST_S
