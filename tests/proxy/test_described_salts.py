"""A server of the kind `remote` that describes a salt: what reaches it through the proxy, tenant by tenant."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hive.backends.described import prefix_cache
from hive.control.backends import BackendWatch
from hive.domain import BackendInfo, BackendKind, FoundCapabilities, ModelInfo
from hive.models.cache_epochs import CacheEpochs
from hive.settings.table import InferenceSection, Settings
from tests.proxy.harness import Backend, Client, Proxy, answer, post, proxied, read_request

OPERATOR = b"internal"
CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": "m", "messages": [{"role": "user", "content": "x"}]},
    COMPLETIONS: {"model": "m", "prompt": "x"},
    EMBEDDINGS: {"model": "m", "input": "x"},
    "/v1/messages": {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "x"}]},
    "/api/chat": {"model": "m", "stream": False, "messages": [{"role": "user", "content": "x"}]},
    "/v1/responses": {"model": "m", "input": "x"},
}
SALTED = FoundCapabilities(
    endpoints=(CHAT, COMPLETIONS, EMBEDDINGS),
    fields=("cache_salt", "priority"),
    salted=(CHAT, COMPLETIONS),
    ordered=(CHAT,),
    found="/openapi.json",
)


@asynccontextmanager
async def before(
    tmp_path: Path, told: FoundCapabilities = SALTED, *, priority: bool = False, **settings: Any
) -> AsyncIterator[tuple[Proxy, Backend]]:
    async with proxied(tmp_path, **settings) as (proxy, backend):
        info = BackendInfo(
            kind=BackendKind.REMOTE, address=backend.address, up=True, capabilities=told, priority=priority
        )
        proxy.path.use_backend(info, [ModelInfo(name="m")])
        yield proxy, backend


async def sent(
    proxy: Proxy, backend: Backend, target: str, *, tenant: str = "acme", fields: bytes = b""
) -> tuple[str, dict[str, Any]]:
    client = await Client.tcp(proxy.port)
    more = b"x-tenant-id: %b\r\n" % tenant.encode() + fields
    body = json.dumps(BODIES[target]).encode()
    status, _, said = await client.ask(post(target.encode(), body, token=OPERATOR, fields=more))
    assert status == 200, said
    head, asked = backend.requests[-1]
    return head.split()[1].decode(), json.loads(asked)


@pytest.mark.parametrize("target", [CHAT, COMPLETIONS, "/v1/messages", "/api/chat", "/v1/responses"])
async def test_a_described_salt_reaches_the_server_and_is_another_for_each_tenant(tmp_path: Path, target: str) -> None:
    """Before Ray Serve all tenants shared the cluster's cache, although it takes a salt as any vLLM does."""
    async with before(tmp_path) as (proxy, backend):
        at, first = await sent(proxy, backend, target)
        assert at in SALTED.salted  # type: ignore[operator]
        _, again = await sent(proxy, backend, target)
        _, other = await sent(proxy, backend, target, tenant="other")
        _, alone = await sent(proxy, backend, target, fields=b"x-cache-mode: none\r\n")
        assert len(first["cache_salt"]) == 32
        assert first["cache_salt"] == again["cache_salt"]
        assert len({one["cache_salt"] for one in (first, other, alone)}) == 3
        proxy.registry.use_epochs(CacheEpochs({"tenant acme": 2}))
        _, flushed = await sent(proxy, backend, target)
        _, unflushed = await sent(proxy, backend, target, tenant="other")
        assert flushed["cache_salt"] != first["cache_salt"]
        assert unflushed["cache_salt"] == other["cache_salt"]


async def test_no_salt_goes_where_none_is_described_and_none_without_isolation(tmp_path: Path) -> None:
    async with before(tmp_path) as (proxy, backend):
        backend.reply = b"HTTP/1.1 200 OK\r\ncontent-length: 11\r\n\r\n" + b'{"data":[]}'
        _, asked = await sent(proxy, backend, EMBEDDINGS)
        assert "cache_salt" not in asked
    (tmp_path / "none").mkdir()
    async with before(tmp_path / "none", FoundCapabilities(fields=())) as (proxy, backend):
        assert "cache_salt" not in (await sent(proxy, backend, CHAT))[1]
    (tmp_path / "shared").mkdir()
    async with before(tmp_path / "shared", cache_isolation=False) as (proxy, backend):
        assert "cache_salt" not in (await sent(proxy, backend, CHAT))[1]


async def test_a_clients_own_salt_and_priority_are_not_passed_on(tmp_path: Path) -> None:
    """Else a tenant could name another one's salt, and read by the speed of an answer what that had asked."""
    async with before(tmp_path) as (proxy, backend):
        client = await Client.unix(proxy.socket_path)
        body = json.dumps({**BODIES[CHAT], "cache_salt": "another's", "priority": -5}).encode()
        assert (await client.ask(post(CHAT.encode(), body)))[0] == 200
        asked = json.loads(backend.requests[-1][1])
        assert asked["cache_salt"] != "another's"
        assert "priority" not in asked


async def test_a_priority_goes_along_where_the_server_orders_by_it(tmp_path: Path) -> None:
    async with before(tmp_path, priority=True) as (proxy, backend):
        _, high = await sent(proxy, backend, CHAT, fields=b"x-priority: high\r\n")
        _, low = await sent(proxy, backend, CHAT, fields=b"x-priority: low\r\n")
        _, undescribed = await sent(proxy, backend, COMPLETIONS, fields=b"x-priority: low\r\n")
        assert (high["priority"], low["priority"], "priority" in undescribed) == (0, 20, False)


def described(*fields: str) -> bytes:
    schema: dict[str, Any] = {"properties": {"model": {}, **{key: {} for key in fields}}}
    post_ = {"post": {"requestBody": {"content": {"application/json": {"schema": schema}}}}}
    return json.dumps({"paths": {CHAT: post_}}).encode()


@pytest.mark.parametrize("orders", [False, True])
async def test_what_a_ray_serve_describes_is_read_told_and_used(tmp_path: Path, orders: bool) -> None:
    """The whole way: its description over HTTP, the words of `hive backend status`, the body that it gets."""
    answers = {
        b"/v1/models": b'{"data":[{"id":"m","owned_by":"somebody"}]}',
        b"/openapi.json": described("cache_salt", "priority"),
        b"/-/routes": b'{"/":"llm"}',
    }
    async with proxied(tmp_path) as (proxy, backend):
        chat_answer = backend.reply

        async def script(reader: Any, writer: Any) -> None:
            while True:
                head, body = await read_request(reader)
                backend.requests.append((head, body))
                target = head.split()[1]
                said = answers.get(target)
                is_chat = target == CHAT.encode()
                writer.write(
                    answer(said) if said else chat_answer if is_chat else answer(b"{}", status=b"404 Not Found")
                )
                await writer.drain()

        backend.script = script
        settings = Settings(inference=InferenceSection(backend_priority=orders))
        watch = BackendWatch(None, backend.address, settings=lambda: settings, on_checked=lambda _: None, is_named=True)
        await watch.check()
        assert watch.info is not None
        assert (watch.info.kind, watch.info.version, watch.info.priority) == (BackendKind.REMOTE, "Ray Serve", orders)
        assert prefix_cache(watch.info, settings) == "separated by tenant (salt), as it describes itself"
        proxy.path.use_backend(msgspec.structs.replace(watch.info), watch.models)
        _, asked = await sent(proxy, backend, CHAT)
        assert len(asked["cache_salt"]) == 32
        assert ("priority" in asked) is orders
