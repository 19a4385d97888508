"""A stub of Ollama's cloud under a plain name, before every way to a backend: nothing that is said leaves the box."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hive.domain import BackendInfo, BackendKind, ModelInfo
from hive.link.messages import Failed
from hive.link.prompts import Prewarm, Prewarmed
from hive.proxy.prewarms import Prewarms
from hive.settings.table import InferenceSection, TenantRow
from tests.proxy.harness import CHAT, JSON_ANSWER, Backend, Client, Proxy, answer, get, nothing_is_held, post, proxied
from tests.waiting import until

NEAR = ModelInfo(name="tiny:latest", size_bytes=656640)
STUB = ModelInfo(name="work-helper:latest", size_bytes=196, remote_host="https://cloud.invalid:443", remote_model="big")
TURN = [{"role": "user", "content": "our secret"}]
ENDPOINTS: dict[bytes, dict[str, Any]] = {
    b"/api/generate": {"prompt": "our secret"},
    b"/api/chat": {"messages": TURN},
    b"/api/embed": {"input": "our secret"},
    b"/api/embeddings": {"prompt": "our secret"},
    b"/api/show": {},
    b"/v1/chat/completions": {"messages": TURN},
    b"/v1/completions": {"prompt": "our secret"},
    b"/v1/embeddings": {"input": "our secret"},
    b"/v1/messages": {"messages": TURN, "max_tokens": 5},
    b"/v1/responses": {"input": "our secret"},
}


def before_ollama(proxy: Proxy, backend: Backend, *models: ModelInfo, up: bool = True, **inference: Any) -> None:
    wanted = InferenceSection(**inference)
    proxy.path.use_settings(msgspec.structs.replace(proxy.settings, inference=wanted))
    proxy.path.use_backend(BackendInfo(kind=BackendKind.OLLAMA, address=backend.address, up=up), list(models))


async def said(proxy: Proxy, target: bytes, body: dict[str, Any]) -> tuple[int, str]:
    client = await Client.unix(proxy.socket_path)
    status, _, content = await client.ask(post(target, json.dumps(body).encode()))
    return status, content.decode()


@pytest.mark.parametrize("target", ENDPOINTS)
@pytest.mark.parametrize("name", ["work-helper", "Work-Helper:Latest", "registry.ollama.ai/library/work-helper"])
async def test_a_stub_under_a_plain_name_is_far_at_every_endpoint(tmp_path: Path, target: bytes, name: str) -> None:
    """The guard went by the name alone: `work-helper` with a `remote_host` passed, and the prompt left."""
    async with proxied(tmp_path) as (proxy, backend):
        before_ollama(proxy, backend, NEAR, STUB)
        status, content = await said(proxy, target, {"model": name, **ENDPOINTS[target]})
        assert (status, backend.requests) == (403, [])
        assert "would leave this box: Ollama sends it to https://cloud.invalid:443, as big" in content
        status, _ = await said(proxy, target, {"model": "tiny", **ENDPOINTS[target]})
        assert len(backend.requests) == 1, "what is near is asked as before"
        await until(lambda: nothing_is_held(proxy))


@pytest.mark.parametrize("target", ENDPOINTS)
async def test_before_its_list_was_read_nothing_is_sent_to_an_ollama(tmp_path: Path, target: bytes) -> None:
    """An empty list let every name pass: a request before the daemon had looked was sent to any place Ollama would
    choose."""
    async with proxied(tmp_path) as (proxy, backend):
        before_ollama(proxy, backend, up=False)
        client = await Client.unix(proxy.socket_path)
        body = json.dumps({"model": "work-helper", **ENDPOINTS[target]}).encode()
        status, fields, _ = await client.ask(post(target, body))
        assert (status, fields[b"retry-after"], backend.requests) == (503, b"1", [])
        before_ollama(proxy, backend, up=True)
        assert (await said(proxy, target, json.loads(body)))[0] == 404
        before_ollama(proxy, backend, NEAR)
        assert (await said(proxy, target, json.loads(body)))[0] == 404
        assert backend.requests == []


@pytest.mark.parametrize("way", ["default", "own", "alias", "alias of a variant", "routing", "asked variant"])
async def test_no_way_to_a_model_leads_to_a_stub(tmp_path: Path, way: str) -> None:
    """A stub of 196 bytes is the smallest variant of any model it names itself after."""
    ways: dict[str, dict[str, Any]] = {
        "default": {"default_model": "work-helper"},
        "alias": {"aliases": "fast = work-helper"},
        "alias of a variant": {"aliases": "fast = helper", "quantization_routing": True},
        "routing": {"quantization_routing": True},
        "asked variant": {"quantization_routing": True},
    }
    asked = {"alias": "fast", "alias of a variant": "fast", "routing": "helper", "asked variant": "helper:q4_0"}.get(
        way
    )
    variant = msgspec.structs.replace(STUB, name="helper:q4_0", quantization="Q4_0")
    async with proxied(tmp_path) as (proxy, backend):
        if way == "own":
            proxy.registry.learn(msgspec.structs.replace(proxy.row, model="work-helper"))
        before_ollama(proxy, backend, NEAR, STUB, variant, **ways.get(way, {}))
        body = {"messages": TURN} | ({"model": asked} if asked else {})
        status, content = await said(proxy, b"/v1/chat/completions", body)
        assert (status, backend.requests) == (403, [])
        assert "would leave this box" in content


async def test_routing_takes_the_near_variant_beside_a_far_one(tmp_path: Path) -> None:
    far = msgspec.structs.replace(STUB, name="helper:q4_0")
    near = ModelInfo(name="helper:q4_K_M", size_bytes=10**9)
    async with proxied(tmp_path) as (proxy, backend):
        before_ollama(proxy, backend, far, near, quantization_routing=True)
        backend.reply = answer(JSON_ANSWER)
        assert (await said(proxy, b"/v1/chat/completions", {"model": "helper", "messages": TURN}))[0] == 200
        assert json.loads(backend.requests[0][1])["model"] == "helper:q4_K_M"


async def test_of_two_names_that_are_spelled_alike_one_far_one_is_enough(tmp_path: Path) -> None:
    """Hive folds names more than Ollama does: `Meta/X` was found at hf.co, and Ollama has its own."""
    near, far = ModelInfo(name="hf.co/meta/x:latest"), msgspec.structs.replace(STUB, name="meta/x:latest")
    async with proxied(tmp_path) as (proxy, backend):
        before_ollama(proxy, backend, near, far)
        assert (await said(proxy, b"/v1/chat/completions", {"model": "Meta/X", "messages": TURN}))[0] == 403
        assert backend.requests == []


@pytest.mark.parametrize(
    ("models", "asked", "status"),
    [
        ("work-helper", "work-helper", 200),
        ("fast", "fast", 200),
        ("tiny", "work-helper", 403),
        ("helper", "helper", 403),
    ],
)
async def test_a_far_model_is_used_by_who_has_that_very_one_named(
    tmp_path: Path, models: str, asked: str, status: int
) -> None:
    """A tenant limited to any list of models could use every far one that routing led to."""
    variant = msgspec.structs.replace(STUB, name="helper:q4_0", quantization="Q4_0")
    async with proxied(tmp_path, tenants={"default": TenantRow(models=models)}) as (proxy, backend):
        backend.reply = answer(JSON_ANSWER)
        before_ollama(proxy, backend, NEAR, STUB, variant, aliases="fast = work-helper", quantization_routing=True)
        client = await Client.tcp(proxy.port)
        body = json.dumps({"model": asked, "messages": TURN}).encode()
        assert (await client.ask(post(b"/v1/chat/completions", body, token=b"hm_alice")))[0] == status
        assert len(backend.requests) == (status == 200)


async def test_a_model_that_becomes_a_stub_while_a_request_waits_is_not_sent_it(tmp_path: Path) -> None:
    """A request was judged when it came, and sent when its turn was: up to 30 s and several lists later."""
    async with proxied(tmp_path, backend_concurrency=1) as (proxy, backend):
        held, released = asyncio.Event(), asyncio.Event()

        async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            held.set()
            await released.wait()
            writer.write(answer(JSON_ANSWER))
            await writer.drain()

        backend.script = script
        near = msgspec.structs.replace(STUB, remote_host="", remote_model="", size_bytes=10**9)
        before_ollama(proxy, backend, near)
        first, second = await Client.unix(proxy.socket_path), await Client.unix(proxy.socket_path)
        request = post(b"/v1/chat/completions", CHAT.replace(b'"m"', b'"work-helper"'))
        first.writer.write(request)
        await held.wait()
        second.writer.write(request)
        await until(lambda: proxy.registry.queue.waiting == 1)
        before_ollama(proxy, backend, STUB)
        released.set()
        assert (await first.answer())[0] == 200
        status, _, content = await second.answer()
        assert (status, b"would leave this box" in content, backend.connections) == (403, True, 1)
        await until(lambda: nothing_is_held(proxy))


async def test_a_stub_is_in_no_list_but_of_who_may_use_it(tmp_path: Path) -> None:
    """Clients that take the first model of the list were led to one they may not use."""
    tags = json.dumps({"models": [{"name": "work-helper:latest"}, {"name": "tiny:latest"}]}).encode()
    async with proxied(tmp_path) as (proxy, backend):
        backend.reply = answer(tags)
        before_ollama(proxy, backend, STUB, NEAR)
        client = await Client.unix(proxy.socket_path)
        listed = json.loads((await client.ask(get(b"/v1/models")))[2])
        assert [row["id"] for row in listed["data"]] == ["tiny:latest"]
        assert (await client.ask(get(b"/v1/models/work-helper:latest")))[0] == 404
        listed = json.loads((await client.ask(get(b"/api/tags")))[2])
        assert [row["name"] for row in listed["models"]] == ["tiny:latest"]
    (tmp_path / "b").mkdir()
    async with proxied(tmp_path / "b", tenants={"default": TenantRow(models="work-helper")}) as (proxy, backend):
        backend.reply = answer(tags)
        before_ollama(proxy, backend, STUB, NEAR)
        client = await Client.tcp(proxy.port)
        listed = json.loads((await client.ask(get(b"/v1/models", token=b"hm_alice")))[2])
        assert [row["id"] for row in listed["data"]] == ["work-helper:latest"]


@pytest.mark.parametrize("tenants", [{}, {"default": TenantRow(models="work-helper")}], ids=["nobody", "permitted"])
async def test_no_prompt_is_read_ahead_by_a_far_model(tmp_path: Path, tenants: dict[str, TenantRow]) -> None:
    """Also if the agent's own requests may go there: no agent asked for that one."""
    async with proxied(tmp_path, tenants=tenants) as (proxy, backend):
        before_ollama(proxy, backend, NEAR, STUB)
        answered: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        prewarms = Prewarms(proxy.path, proxy._connect)
        prewarms.begin(
            Prewarm(agent="a1", model="work-helper", system_prompt="our secret"),
            lambda message, _=(): answered.set_result(message),
        )
        found = await asyncio.wait_for(answered, 10)
        assert not isinstance(found, Prewarmed)
        assert isinstance(found, Failed)
        assert "leave" in found.message
        assert (backend.requests, backend.connections) == ([], 0)


async def test_other_servers_are_asked_without_a_list_as_before(tmp_path: Path) -> None:
    for kind in (BackendKind.VLLM, BackendKind.LLAMA, BackendKind.REMOTE):
        (tmp_path / kind).mkdir()
        async with proxied(tmp_path / kind) as (proxy, backend):
            backend.reply = answer(JSON_ANSWER)
            proxy.use(backend, kind, models=())
            assert (await said(proxy, b"/v1/chat/completions", {"model": "any", "messages": TURN}))[0] == 200


async def test_usage_tells_the_name_asked_for_the_model_that_served_it_and_whether_it_left_the_box(
    tmp_path: Path,
) -> None:
    tenants = {"default": TenantRow(models="fast, work-helper")}
    async with proxied(tmp_path, tenants=tenants) as (proxy, backend):
        before_ollama(proxy, backend, NEAR, STUB, aliases="fast = tiny")
        for asked in ("fast", "work-helper"):
            assert (await said(proxy, b"/v1/chat/completions", {"model": asked, "messages": TURN}))[0] == 200
        proxy.path.use_backend(BackendInfo(kind=BackendKind.REMOTE, address="https://192.0.2.1", up=True), [NEAR])
        assert proxy.path.slot.is_far(BackendInfo(kind=BackendKind.REMOTE, address="https://192.0.2.1"), "tiny:latest")
        told = [(event.asked, event.model, event.rung, event.far) for event in proxy.events]
        assert told == [("fast", "tiny:latest", None, False), ("work-helper", "work-helper:latest", None, True)]
