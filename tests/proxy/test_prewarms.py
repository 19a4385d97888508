"""Prewarms: the backend reads them as the agent's own requests, and they delay no other request."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from hive.domain import BackendInfo, BackendKind, ModelInfo, Tier
from hive.link.message import LinkMessage
from hive.link.messages import AgentRow, Failed
from hive.link.prompts import Prewarm, Prewarmed
from hive.proxy.prewarms import Prewarms
from hive.queue.gate import GateState
from hive.queue.slot_gate import Switching
from tests.proxy.harness import (
    CHAT,
    JSON_ANSWER,
    Backend,
    Client,
    Proxy,
    answer,
    nothing_is_held,
    post,
    proxied,
    read_request,
)
from tests.waiting import until

PROMPT = "You answer for a shop. " * 20
WARM = JSON_ANSWER.replace(b'"total_tokens":10', b'"total_tokens":10,"prompt_tokens_details":{"cached_tokens":5}')
AS_AGENT = json.dumps({"model": "m", "messages": [{"role": "system", "content": PROMPT}]}).encode()
OLLAMA_ANSWER = (
    b'{"model":"m","message":{"role":"assistant","content":"h"},"done":true,"prompt_eval_count":7,"eval_count":1}'
)


def sending(proxy: Proxy) -> Prewarms:
    def connect(sock: Any, open_exchange: Any) -> Any:
        return proxy._connect(sock, open_exchange, proxy.path.shares.hives_own)

    return Prewarms(proxy.path, connect)


def asked(prewarms: Prewarms, agent: str = "a1", model: str = "m") -> asyncio.Future[LinkMessage]:
    answered: asyncio.Future[LinkMessage] = asyncio.get_running_loop().create_future()

    def reply(message: LinkMessage, descriptors: object = ()) -> None:
        answered.set_result(message)

    prewarms.begin(Prewarm(agent=agent, model=model, system_prompt=PROMPT), reply)
    return answered


async def outcome(prewarms: Prewarms, agent: str = "a1", model: str = "m") -> Any:
    return await asyncio.wait_for(asked(prewarms, agent, model), 10)


async def test_it_is_asked_as_the_agent_and_counted_as_hives_own(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, backend):
        backend.reply = answer(WARM)
        found = await outcome(sending(proxy))
        assert isinstance(found, Prewarmed)
        assert (found.model, found.tokens_in, found.cached_tokens) == ("m", 7, 5)
        [(head, body)] = backend.requests
        assert head.startswith(b"POST /v1/chat/completions HTTP/1.1\r\n")
        told = json.loads(body)
        assert told["messages"] == [{"role": "system", "content": PROMPT}, {"role": "user", "content": "."}]
        assert (told["model"], told["max_tokens"], told["stream"]) == ("m", 1, False)
        [event] = proxy.events
        assert (event.agent_id, event.tenant, event.tokens_in, event.status) == ("prewarm", "default", 7, 200)
        assert repr(proxy.alice.window) == "<SlidingWindow 0/600 in 60 s>"
        assert proxy.alice.usual_tokens_out == 128.0
        assert proxy.alice.gate.last_active is None
        assert nothing_is_held(proxy)
        assert not proxy.registry.stand_ins
        assert not proxy.path.slot.ahead


async def test_vllm_is_given_the_agents_own_salt_and_the_lowest_priority(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, backend):
        info = BackendInfo(kind=BackendKind.VLLM, address=backend.address, up=True, priority=True)
        proxy.path.use_backend(info, [ModelInfo(name="m")])
        proxy.registry.learn(
            AgentRow(id="eve", name="eve", generation=1, gate="open", status="running", tenant="other", tier=Tier.LOW)
        )
        prewarms = sending(proxy)
        await outcome(prewarms)
        await outcome(prewarms, "eve")
        client = await Client.unix(proxy.socket_path)
        await client.ask(post(b"/v1/chat/completions", AS_AGENT))
        mine, eves, alices = (json.loads(body) for _, body in backend.requests)
        assert mine["cache_salt"] == alices["cache_salt"] != eves["cache_salt"]
        assert (mine["priority"], alices["priority"]) == (20, 10)


async def test_ollama_is_asked_in_its_own_dialect(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, backend):
        proxy.use(backend, BackendKind.OLLAMA)
        backend.reply = answer(OLLAMA_ANSWER)
        found = await outcome(sending(proxy))
        assert isinstance(found, Prewarmed)
        assert found.tokens_in == 7
        [(head, body)] = backend.requests
        assert head.startswith(b"POST /api/chat ")
        assert json.loads(body)["options"]["num_predict"] == 1


async def test_a_remote_server_is_not_asked(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, backend):
        proxy.use(backend, BackendKind.REMOTE)
        found = await outcome(sending(proxy))
        assert isinstance(found, Failed)
        assert (found.code, backend.requests) == ("not_supported", [])
        assert "paid by the token" in found.message


async def test_a_sleeping_agent_sleeps_on_and_a_full_window_does_not_matter(tmp_path: Path) -> None:
    async with proxied(tmp_path, window_requests=1) as (proxy, _):
        client = await Client.unix(proxy.socket_path)
        assert (await client.ask(post(b"/v1/chat/completions", CHAT)))[0] == 200
        proxy.alice.gate.move(GateState.ASLEEP, 2, "paused")
        assert isinstance(await outcome(sending(proxy)), Prewarmed)
        assert proxy.wakes == []
        assert proxy.alice.gate.state is GateState.ASLEEP
        assert proxy.alice.gate.why_busy(0.0) is None


async def test_it_goes_after_every_request_that_waits(tmp_path: Path) -> None:
    order: list[str] = []
    go = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            _, body = await read_request(reader)
            order.append(json.loads(body)["messages"][-1]["content"])
            await go.wait()
            writer.write(answer(JSON_ANSWER))

    async with proxied(tmp_path, backend_concurrency=1) as (proxy, backend):
        backend.script = script
        first, second = await Client.unix(proxy.socket_path), await Client.unix(proxy.socket_path)
        first.writer.write(post(b"/v1/chat/completions", CHAT.replace(b"hello", b"first")))
        await until(lambda: proxy.registry.queue.running == 1)
        ahead = asked(sending(proxy))
        await until(lambda: proxy.registry.queue.waiting == 1)
        second.writer.write(post(b"/v1/chat/completions", CHAT.replace(b"hello", b"second")))
        await until(lambda: proxy.registry.queue.waiting == 2)
        go.set()
        assert isinstance(await asyncio.wait_for(ahead, 10), Prewarmed)
        assert [(await one.answer())[0] for one in (first, second)] == [200, 200]
        assert order == ["first", "second", "."]


async def test_a_request_that_needs_its_place_gets_it_at_once(tmp_path: Path) -> None:
    cancelled = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        _, body = await read_request(reader)
        if json.loads(body)["messages"][-1]["content"] == ".":
            assert await reader.read() == b""
            cancelled.set()
        else:
            writer.write(answer(JSON_ANSWER))

    async with proxied(tmp_path, backend_concurrency=1) as (proxy, backend):
        backend.script = script
        ahead = asked(sending(proxy))
        await until(lambda: backend.connections == 1)
        client = await Client.unix(proxy.socket_path)
        assert (await client.ask(post(b"/v1/chat/completions", CHAT)))[0] == 200
        await asyncio.wait_for(cancelled.wait(), 5)
        found = await asyncio.wait_for(ahead, 5)
        assert isinstance(found, Failed)
        assert found.message == "a request needs its place"
        assert nothing_is_held(proxy)


async def test_one_at_a_time_of_a_tenant(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, backend):
        go = asyncio.Event()

        async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await read_request(reader)
            await go.wait()
            writer.write(answer(JSON_ANSWER))

        backend.script = script
        prewarms = sending(proxy)
        both = [asked(prewarms), asked(prewarms)]
        await until(lambda: proxy.registry.queue.waiting == 1 and backend.connections == 1)
        go.set()
        assert all(isinstance(one, Prewarmed) for one in await asyncio.wait_for(asyncio.gather(*both), 10))
        assert [tenant.name for tenant in proxy.registry.queue.view(0.0).tenants] == ["default"]


async def test_where_llama_server_would_keep_nothing_it_is_not_asked(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, backend):
        row = AgentRow(id="eve", name="eve", generation=1, gate="open", status="running", tenant="other")
        proxy.registry.learn(row)
        found = await outcome(sending(proxy))
        assert isinstance(found, Failed)
        assert (found.code, backend.requests) == ("not_supported", [])
        assert "prompts of 2 groups would meet in its cache" in found.message
        proxy.registry.forget("eve")
        assert isinstance(await outcome(sending(proxy)), Prewarmed)


async def refused_by_the_backend(proxy: Proxy, backend: Backend) -> str:
    backend.reply = answer(b'{"error":{"message":"context"}}', status=b"400 Bad Request")
    return "the backend answered 400: "


async def down(proxy: Proxy, backend: Backend) -> str:
    proxy.path.use_backend(BackendInfo(kind=BackendKind.LLAMA, address="/nonexistent.sock"), proxy.path.slot.models)
    await backend.stop()
    return "is not reachable"


async def switching(proxy: Proxy, backend: Backend) -> str:
    proxy.path.slot.close(Switching(1e12, "vllm"))
    return "no inference server is active"


async def no_such_model(proxy: Proxy, backend: Backend) -> str:
    proxy.use(backend, models=("other",))
    return "model 'm' not found"


@pytest.mark.parametrize("trouble", [refused_by_the_backend, down, switching, no_such_model])
async def test_what_goes_wrong_is_told_and_nothing_is_left(tmp_path: Path, trouble: Any) -> None:
    async with proxied(tmp_path) as (proxy, backend):
        said = await trouble(proxy, backend)
        found = await outcome(sending(proxy))
        assert isinstance(found, Failed)
        assert said in found.message
        await until(lambda: nothing_is_held(proxy) and not proxy.connections)
        assert not proxy.registry.stand_ins


async def test_a_proxy_that_leaves_waits_for_none(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, backend):

        async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()

        backend.script = script
        prewarms = sending(proxy)
        asked(prewarms)
        await until(lambda: backend.connections == 1)
        prewarms.stop()
        await until(lambda: nothing_is_held(proxy) and not proxy.connections and backend.closed == 1)
