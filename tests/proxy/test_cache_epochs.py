"""Flushes as requests meet them: salts with the epochs, in the line and on the way, and servers that keep nothing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hive.domain import BackendInfo, BackendKind, ModelInfo
from hive.errors import BadRequest
from hive.link.pool import SlotRow
from hive.models.cache_epochs import CacheEpochs, flush_scope
from hive.proxy.forward import KEPT_BODY_MAX
from hive.proxy.identity import wishes_of
from hive.settings.table import TenantRow
from hive.wire.dial import dial
from hive.wire.http1 import Request
from tests.proxy.harness import JSON_ANSWER, Backend, Client, Proxy, answer, post, proxied, read_request
from tests.waiting import until

OPERATOR = b"internal"
BODY = b'{"model":"m","prompt":"x"}'


async def salt_for(proxy: Proxy, backend: Backend, fields: bytes = b"") -> str:
    client = await Client.tcp(proxy.port)
    status, _, body = await client.ask(post(b"/v1/completions", BODY, token=OPERATOR, fields=fields))
    assert status == 200, body
    return str(json.loads(backend.requests[-1][1]).get("cache_salt"))


async def test_a_flush_changes_the_salts_of_what_it_is_about_and_no_others(tmp_path: Path) -> None:
    tenants = {"red": TenantRow(cache_group="warm")}
    asked = {
        "plain": b"",
        "acme": b"x-tenant-id: acme\r\n",
        "acme tagged": b"x-tenant-id: acme\r\nx-cache-tag: t\r\n",
        "tagged": b"x-cache-tag: t\r\n",
        "other tag": b"x-cache-tag: u\r\n",
        "red": b"x-tenant-id: red\r\n",
    }
    changes = {
        "all": set(asked),
        "server ": set(asked),
        "server x-1": set[str](),
        "tenant acme": {"acme", "acme tagged"},
        "group warm": {"red"},
        "tenant red": set[str](),
        "tag t": {"acme tagged", "tagged"},
        "tags": {"acme tagged", "tagged", "other tag"},
        "shared": set[str](),
    }
    async with proxied(tmp_path, tenants=tenants) as (proxy, backend):
        proxy.use(backend, BackendKind.VLLM)
        before = {name: await salt_for(proxy, backend, fields) for name, fields in asked.items()}
        assert len(set(before.values())) == len(before)
        for key, changed in changes.items():
            proxy.registry.use_epochs(CacheEpochs({key: 5}))
            after = {name: await salt_for(proxy, backend, fields) for name, fields in asked.items()}
            assert {name for name in asked if after[name] != before[name]} == changed, key
        proxy.registry.use_epochs(CacheEpochs())
        assert {name: await salt_for(proxy, backend, fields) for name, fields in asked.items()} == before


async def test_a_flush_reaches_what_tenants_keep_together(tmp_path: Path) -> None:
    async with proxied(tmp_path, cache_isolation=False) as (proxy, backend):
        proxy.use(backend, BackendKind.VLLM)
        assert await salt_for(proxy, backend) == "None"
        salts = []
        for epochs in ({"shared": 1}, {"shared": 2}, {"shared": 2, "all": 3}, {"shared": 2, "all": 3, "tenant a": 1}):
            proxy.registry.use_epochs(CacheEpochs(epochs))
            salts.append(await salt_for(proxy, backend))
            assert await salt_for(proxy, backend, b"x-tenant-id: acme\r\n") == salts[-1], "they still share it"
        assert len(set(salts)) == 3
        assert salts[2] == salts[3]


async def test_a_request_in_the_line_is_sent_with_the_epochs_of_its_turn(tmp_path: Path) -> None:
    async with proxied(tmp_path, backend_concurrency=1) as (proxy, backend):
        proxy.use(backend, BackendKind.VLLM)
        seen: list[dict[str, str]] = []
        release = asyncio.Event()

        async def scene(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while True:
                _, body = await read_request(reader)
                seen.append(json.loads(body))
                await release.wait()
                writer.write(answer(JSON_ANSWER))

        backend.script = scene
        first, second = await Client.unix(proxy.socket_path), await Client.unix(proxy.socket_path)
        asking = [asyncio.ensure_future(client.ask(post(b"/v1/completions", BODY))) for client in (first, second)]
        await until(lambda: len(seen) == 1 and proxy.registry.queue.waiting == 1)
        proxy.registry.use_epochs(CacheEpochs({"tenant default": 1}))
        release.set()
        assert [status for status, _, _ in await asyncio.gather(*asking)] == [200, 200]
        third = await Client.unix(proxy.socket_path)
        await third.ask(post(b"/v1/completions", BODY))
        before, turned, later = (one["cache_salt"] for one in seen)
        assert before != turned == later
        assert proxy.registry.queue.running == 0


def flush_while_connecting(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the next connection to the server wait for a flush."""

    async def flushed_meanwhile(*words: Any, **named: Any) -> Any:
        monkeypatch.undo()
        proxy.registry.use_epochs(CacheEpochs({"all": 1}))
        return await dial(*words, **named)

    monkeypatch.setattr("hive.wire.upstream.dial", flushed_meanwhile)


async def test_a_request_whose_connection_is_being_made_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with proxied(tmp_path) as (proxy, backend):
        proxy.use(backend, BackendKind.VLLM)
        flush_while_connecting(proxy, monkeypatch)
        client = await Client.unix(proxy.socket_path)
        assert (await client.ask(post(b"/v1/completions", BODY)))[0] == 200
        assert json.loads(backend.requests[0][1])["cache_salt"] == await salt_for(proxy, backend)
        assert len(backend.requests) == 2


async def test_a_llama_server_is_told_to_use_nothing_while_a_flush_is_under_way(tmp_path: Path) -> None:
    messages = post(b"/v1/messages", b'{"model":"m","max_tokens":3,"messages":[{"role":"user","content":"x"}]}')
    async with proxied(tmp_path) as (proxy, backend):
        for fresh in ([], [""], ["another"]):
            proxy.registry.use_epochs(CacheEpochs({"all": 7}, fresh))
            client = await Client.unix(proxy.socket_path)
            await client.ask(post(b"/v1/completions", BODY))
            await client.ask(messages)
        told = [(head.split(b" ")[1].decode(), json.loads(body).get("cache_prompt")) for head, body in backend.requests]
        usual = [("/v1/completions", None), ("/v1/messages", None)]
        assert told == [*usual, ("/v1/completions", False), ("/v1/chat/completions", False), *usual]


async def test_vllms_messages_are_translated_for_the_sake_of_a_salt_once_something_was_flushed(tmp_path: Path) -> None:
    request = post(b"/v1/messages", b'{"model":"m","max_tokens":3,"messages":[{"role":"user","content":"x"}]}')
    async with proxied(tmp_path) as (proxy, backend):
        proxy.use(backend, BackendKind.VLLM)
        client = await Client.unix(proxy.socket_path)
        for epochs in ({}, {"all": 1}):
            proxy.registry.use_epochs(CacheEpochs(epochs))
            await client.ask(request)
        told = [(head.split(b" ")[1], "cache_salt" in json.loads(body)) for head, body in backend.requests]
        assert told == [(b"/v1/messages", False), (b"/v1/chat/completions", True)]


def dying_once(backend: Backend, meanwhile: Callable[[], None]) -> list[dict[str, str]]:
    """The first connection answers once, then ends at its next request after `meanwhile`; what all were asked."""
    seen: list[dict[str, str]] = []

    async def scene(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            _, body = await read_request(reader)
            seen.append(json.loads(body))
            if len(seen) == 2:
                meanwhile()
                return
            writer.write(answer(JSON_ANSWER))

    backend.script = scene
    return seen


@pytest.mark.parametrize("is_long", [False, True])
@pytest.mark.parametrize("is_pooled", [False, True])
async def test_a_request_whose_kept_connection_ended_is_not_sent_again_as_before_a_flush(
    tmp_path: Path, is_pooled: bool, is_long: bool
) -> None:
    """It went out with the old salt after the flush was said to be done; from a slot of the pool a long one was read
    from an emptied body, and answered 400."""
    async with proxied(tmp_path) as (proxy, backend):
        if is_pooled:
            at = BackendInfo(kind=BackendKind.VLLM, address=backend.address, up=True)
            row = SlotRow(id="m-1", generation=1, is_open=True, backend=at, models=[ModelInfo(name="m")], wait_s=30.0)
            proxy.path.learn_slots([row])
        else:
            proxy.use(backend, BackendKind.VLLM)
        seen = dying_once(backend, lambda: proxy.registry.use_epochs(CacheEpochs({"all": 1})))
        client = await Client.unix(proxy.socket_path)
        assert (await client.ask(post(b"/v1/completions", BODY)))[0] == 200
        body = BODY.replace(b'"x"', b'"%b"' % (b"x" * (KEPT_BODY_MAX + 1))) if is_long else BODY
        status, _, told = await client.ask(post(b"/v1/completions", body))
        is_whole = is_pooled and not is_long
        assert status == (200 if is_whole else 502), told
        assert seen[0]["cache_salt"] == seen[1]["cache_salt"]
        assert [one["cache_salt"] != seen[0]["cache_salt"] for one in seen[2:]] == [True] * is_whole
        again = await Client.unix(proxy.socket_path)
        assert (await again.ask(post(b"/v1/completions", BODY)))[0] == 200
        assert seen[-1]["cache_salt"] != seen[0]["cache_salt"]
        assert proxy.registry.queue.running == 0


async def test_a_flush_while_a_request_is_sent_again_has_it_not_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with proxied(tmp_path) as (proxy, backend):
        proxy.use(backend, BackendKind.VLLM)
        seen = dying_once(backend, lambda: None)
        client = await Client.unix(proxy.socket_path)
        assert (await client.ask(post(b"/v1/completions", BODY)))[0] == 200
        flush_while_connecting(proxy, monkeypatch)
        assert (await client.ask(post(b"/v1/completions", BODY)))[0] == 502
        assert len(seen) == 2
        assert proxy.registry.queue.running == 0


@pytest.mark.parametrize("tag", ["größe", "x" * 65, "a\tb"])
def test_a_tag_that_a_header_cannot_carry_is_refused_at_both_doors(tag: str) -> None:
    """It was answered as flushed, and never reached: the header is latin-1, and the order UTF-8."""
    with pytest.raises(BadRequest, match="ASCII"):
        flush_scope("tag", tag=tag)
    request = Request(b"POST", b"/v1/completions", [(b"x-cache-tag", tag.encode())])
    with pytest.raises(BadRequest, match="ASCII"):
        wishes_of(request)


def test_blanks_around_a_tag_are_none_of_it() -> None:
    request = Request(b"POST", b"/v1/completions", [(b"x-cache-tag", b" team a ")])
    assert wishes_of(request).cache_tag == flush_scope("tag", tag="  team a").name == "team a"
    with pytest.raises(BadRequest, match="needs tag"):
        flush_scope("tag", tag=" ")
