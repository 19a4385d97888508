"""A model in the variant that a tier is worth, on the data path: what goes upstream, and what the client reads."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from hive.bodies.body_workers import DeepReaders
from hive.domain import ModelInfo
from hive.settings.table import TenantRow
from tests.proxy.harness import CHAT, JSON_ANSWER, STREAM, Client, Proxy, answer, chunked, post, proxied

THERE = [ModelInfo(name="m:q4_0"), ModelInfo(name="m:q8_0"), ModelInfo(name="other")]

TARGET = b"/v1/chat/completions"


def route(proxy: Proxy, **inference: object) -> None:
    settings = proxy.path.settings
    changed = msgspec.structs.replace(settings.inference, **inference)
    proxy.path.use_settings(msgspec.structs.replace(settings, inference=changed))
    proxy.path.use_backend(proxy.path.slot.backend, THERE)


async def test_the_body_names_the_variant_and_the_answer_the_name_that_was_asked_for(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, backend):
        route(proxy, quantization_routing=True, tier_medium_models="q4_0", tier_high_models="q4_0")
        backend.reply = answer(
            b'{"id":"1","model":"m:q4_0","choices":[{"message":{"content":"\\"model\\":\\"m:q4_0\\""}}]}'
        )
        client = await Client.unix(proxy.socket_path)
        status, _, body = await client.ask(post(TARGET, CHAT))
        assert status == 200
        assert json.loads(body) == {"id": "1", "model": "m", "choices": [{"message": {"content": '"model":"m:q4_0"'}}]}
        sent = json.loads(backend.requests[0][1])
        assert sent["model"] == "m:q4_0"
        assert sent["messages"] == json.loads(CHAT)["messages"]


@pytest.mark.parametrize("size", [1, 7, 10_000])
async def test_a_stream_names_it_in_every_event(tmp_path: Path, size: int) -> None:
    async with proxied(tmp_path) as (proxy, backend):
        route(proxy, aliases="m = m:q4_0")
        events = b"".join(b'data: {"model":"m:q4_0","choices":[{"delta":{"content":"%d"}}]}\n\n' % n for n in range(3))
        events += b"data: [DONE]\n\n"
        backend.reply = chunked(*(events[at : at + size] for at in range(0, len(events), size)))
        client = await Client.unix(proxy.socket_path)
        status, _, body = await client.ask(post(TARGET, STREAM))
        assert (status, body) == (200, events.replace(b"m:q4_0", b"m"))


async def test_a_model_that_is_not_there_is_refused_before_anything_is_asked(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, backend):
        route(proxy)
        client = await Client.unix(proxy.socket_path)
        status, _, body = await client.ask(post(TARGET, CHAT))
        assert status == 404
        told = json.loads(body)["error"]
        assert "model 'm' not found; there is m:q4_0, m:q8_0, other" in told["message"]
        assert told["code"] == "model_not_found"
        assert backend.requests == []
        assert (await client.ask(post(TARGET, CHAT.replace(b'"m"', b'"other:latest"'))))[0] == 200


async def test_a_translated_request_names_the_variant_and_its_answer_the_name_asked_for(
    tmp_path: Path,
) -> None:
    async with proxied(tmp_path) as (proxy, backend):
        route(proxy, aliases="m = m:q4_0")
        backend.reply = answer(JSON_ANSWER.replace(b'"model":"m"', b'"model":"m:q4_0"'))
        client = await Client.unix(proxy.socket_path)
        status, _, body = await client.ask(post(b"/api/chat", CHAT[:-1] + b',"stream":false}'))
        assert (status, json.loads(body)["model"]) == (200, "m")
        assert json.loads(backend.requests[0][1])["model"] == "m:q4_0"
        assert proxy.events[0].model == "m:q4_0"


async def test_a_large_body_names_the_variant_too(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, backend):
        route(proxy, aliases="m = m:q4_0")
        proxy.path.readers = readers = DeepReaders()
        readers.start()
        try:
            text = "x" * 3_000_000
            client = await Client.unix(proxy.socket_path)
            assert (await client.ask(post(TARGET, CHAT.replace(b"hello", text.encode()))))[0] == 200
            sent = json.loads(backend.requests[0][1])
            assert (sent["model"], sent["messages"][0]["content"]) == ("m:q4_0", text)
        finally:
            readers.close()


@pytest.mark.parametrize("models", ["", "claude-sonnet-4-5", "other"])
async def test_a_dated_claude_name_is_the_alias_of_its_name_without(tmp_path: Path, models: str) -> None:
    """Anthropic's clients name a model with its date, and no alias was for that."""
    tenants = {"default": TenantRow(models=models)}
    async with proxied(tmp_path, tenants=tenants) as (proxy, backend):
        route(proxy, aliases="claude-sonnet-4-5 = other")
        client = await Client.unix(proxy.socket_path)
        for name in ("claude-sonnet-4-5-20250929", "claude-sonnet-4-5-latest", "Claude-Sonnet-4-5@20250929"):
            backend.reply = answer(b'{"model":"other","choices":[{"message":{"content":"a"}}]}')
            status, _, body = await client.ask(post(TARGET, CHAT.replace(b'"m"', b'"%b"' % name.encode())))
            if models == "other":  # the alias itself is not among what this tenant was given
                assert (status, backend.requests) == (403, [])
                continue
            assert (status, json.loads(body)["model"]) == (200, name)
            assert json.loads(backend.requests.pop()[1])["model"] == "other"
        for name in ("claude-opus-4-1-20250805", "claude-sonnet-4-5-2025", "xclaude-sonnet-4-5-20250929"):
            status, _, _ = await client.ask(post(TARGET, CHAT.replace(b'"m"', b'"%b"' % name.encode())))
            assert status == (404 if not models else 403)


async def test_an_alias_is_shown_as_the_model_it_stands_for(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, backend):
        route(proxy, aliases="gpt-4 = other")
        client = await Client.unix(proxy.socket_path)
        status, _, body = await client.ask(post(b"/api/show", b'{"model":"gpt-4"}'))
        assert (status, json.loads(body)["model_info"]["general.basename"]) == (200, "other")
        assert backend.requests == []
