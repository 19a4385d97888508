"""The limits of a tenant, the callers that may act for one, and the separation of prompts in the prefix cache."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hive.domain import BackendInfo, BackendKind, Tier
from hive.link.messages import AgentRow
from hive.queue.tenants import Tenants
from hive.settings.table import TenantRow
from tests.proxy.harness import CHAT, JSON_ANSWER, Client, Proxy, answer, digest, get, post, proxied, read_request
from tests.waiting import until

OPERATOR = b"internal"
TAGS = b'{"models":[{"name":"llama3.2:latest","size":3},{"name":"huge:70b","size":9}]}'


def add_agent(proxy: Proxy, name: str, tenant: str) -> None:
    proxy.registry.learn(
        AgentRow(id=name, name=name, generation=1, gate="open", status="running", tier=Tier.HIGH, tenant=tenant)
    )


def sent(body: bytes) -> dict[str, object]:
    fields: dict[str, object] = json.loads(body)
    return fields


async def test_a_tenants_limit_holds_for_all_its_agents_and_says_when_to_come_again(tmp_path: Path) -> None:
    async with proxied(tmp_path, tenants={"default": TenantRow(rate_limit="2req/min")}) as (proxy, _):
        client = await Client.unix(proxy.socket_path)
        assert [(await client.ask(post(b"/v1/chat/completions", CHAT)))[0] for _ in range(2)] == [200, 200]
        status, fields, body = await client.ask(post(b"/v1/chat/completions", CHAT))
        error = json.loads(body)["error"]
        assert (status, error["code"], error["limit"], error["remaining"]) == (429, "rate_limit_exceeded", 2, 0)
        assert 0 < int(fields[b"retry-after"]) <= 60
        assert error["resetAt"] > 1_700_000_000
        assert "Tenant default exceeded" in error["message"]
        assert repr(proxy.alice.window) == "<SlidingWindow 2/600 in 60 s>", "the agent was not charged for it"
        other = await Client.tcp(proxy.port)
        status, _, _ = await other.ask(
            post(b"/v1/chat/completions", CHAT, token=OPERATOR, fields=b"x-tenant-id: another\r\n")
        )
        assert status == 200


async def test_without_a_section_a_tenant_has_no_limit_of_its_own(tmp_path: Path) -> None:
    async with proxied(tmp_path, tenants={"acme": TenantRow(rate_limit="1/hour")}) as (proxy, _):
        client = await Client.unix(proxy.socket_path)
        assert [(await client.ask(post(b"/v1/chat/completions", CHAT)))[0] for _ in range(5)] == [200] * 5


def test_more_tenants_than_may_be_remembered_forget_those_without_a_section() -> None:
    tenants = Tenants({"acme": TenantRow(rate_limit="5/s")})
    acme = tenants.of("acme")
    for number in range(3000):
        tenants.of(f"t{number}")
    assert tenants.of("acme") is acme
    assert len(tenants._tenants) <= 1000


async def test_a_model_that_is_not_the_tenants_is_refused_before_anything_is_asked(tmp_path: Path) -> None:
    async with proxied(tmp_path, tenants={"default": TenantRow(models="llama3.2, qwen:7b")}) as (proxy, backend):
        proxy.use(backend, models=("llama3.2:latest", "qwen:7b", "m"))
        client = await Client.unix(proxy.socket_path)
        status, _, body = await client.ask(post(b"/v1/chat/completions", CHAT))
        assert status == 403
        assert json.loads(body)["error"]["message"] == 'tenant default may not use the model "m"'
        assert backend.requests == []
        for name in (b"llama3.2", b"llama3.2:latest", b"qwen:7b"):
            status, _, _ = await client.ask(post(b"/v1/chat/completions", CHAT.replace(b'"m"', b'"%b"' % name)))
            assert status == 200, name
        for name in (b"LLAMA3.2", b"library/llama3.2", b"qwen", b"qwen:latest"):
            status, _, _ = await client.ask(post(b"/v1/chat/completions", CHAT.replace(b'"m"', b'"%b"' % name)))
            assert status == 403, name


async def test_ollamas_own_lists_show_only_what_the_caller_may_use(tmp_path: Path) -> None:
    async with proxied(tmp_path, tenants={"default": TenantRow(models="llama3.2")}) as (proxy, backend):
        proxy.use(backend, BackendKind.OLLAMA)
        backend.reply = answer(TAGS)
        client = await Client.unix(proxy.socket_path)
        status, fields, body = await client.ask(get(b"/api/tags"))
        assert (status, body) == (200, b'{"models":[{"name":"llama3.2:latest","size":3}]}')
        assert int(fields[b"content-length"]) == len(body)
        status, fields, body = await client.ask(get(b"/api/tags", method=b"HEAD"))
        assert (status, fields[b"content-length"]) == (200, b"48")
        backend.reply = answer(b"<html>")
        assert (await client.ask(get(b"/api/ps")))[0] == 502


async def test_a_caller_without_limits_gets_ollamas_list_byte_for_byte(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, backend):
        proxy.use(backend, BackendKind.OLLAMA)
        backend.reply = answer(TAGS)
        client = await Client.unix(proxy.socket_path)
        assert (await client.ask(get(b"/api/tags")))[2] == TAGS


SHOWN: dict[str, Any] = {
    "modelfile": "# made by ollama show\n# FROM tiny:latest\n\nFROM /var/lib/hive/models/ollama/blobs/sha256-ab\n"
    'ADAPTER "/srv/my models/x.gguf"\nTEMPLATE """{{ .Prompt }} of /etc"""\nPARAMETER stop /a/b\n',
    "details": {"parent_model": "/root/models/base.gguf", "format": "gguf"},
    "model_info": {"general.parameter_count": 1e9},
}


async def test_what_is_shown_of_a_model_names_no_directory_of_the_host(tmp_path: Path) -> None:
    """Ollama's Modelfile names the blobs it is made of by their paths, and agents were told where models lie."""
    async with proxied(tmp_path) as (proxy, backend):
        proxy.use(backend, BackendKind.OLLAMA)
        backend.reply = answer(json.dumps(SHOWN).encode())
        client = await Client.unix(proxy.socket_path)
        status, fields, body = await client.ask(post(b"/api/show", b'{"model":"m"}'))
        shown = json.loads(body)
        assert (status, int(fields[b"content-length"])) == (200, len(body))
        assert shown["details"] == {"parent_model": "base.gguf", "format": "gguf"}
        assert shown["model_info"] == SHOWN["model_info"]
        told = SHOWN["modelfile"].replace("/var/lib/hive/models/ollama/blobs/", "")
        assert shown["modelfile"] == told.replace('"/srv/my models/x.gguf"', "x.gguf")
        backend.reply = answer(b"<html>")
        assert (await client.ask(post(b"/api/show", b'{"model":"m"}')))[0] == 502, "a page is no answer"


# X-… fields ----------------------------------------------------------------------------------------------------------

WISHES = b"x-tenant-id: acme\r\nx-priority: high\r\nx-cache-mode: none\r\nx-cache-tag: s1\r\n"


async def test_only_an_operator_may_name_a_tenant(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, _):
        agent, operator = await Client.unix(proxy.socket_path), await Client.tcp(proxy.port)
        await agent.ask(post(b"/v1/chat/completions", CHAT, fields=WISHES))
        await operator.ask(post(b"/v1/chat/completions", CHAT, fields=WISHES, token=OPERATOR))
        assert [event.tenant for event in proxy.events] == ["default", "acme"]


@pytest.mark.parametrize(
    "field",
    [b"x-tenant-id: ../x", b"x-priority: urgent", b"x-cache-mode: all", b"x-cache-tag: %b" % (b"x" * 65)],
)
async def test_a_wish_that_means_nothing_is_400_for_an_operator_and_nothing_for_an_agent(
    tmp_path: Path, field: bytes
) -> None:
    async with proxied(tmp_path) as (proxy, _):
        agent, operator = await Client.unix(proxy.socket_path), await Client.tcp(proxy.port)
        request = post(b"/v1/chat/completions", CHAT, fields=field + b"\r\n")
        assert (await agent.ask(request))[0] == 200
        request = post(b"/v1/chat/completions", CHAT, fields=field + b"\r\n", token=OPERATOR)
        assert (await operator.ask(request))[0] == 400


async def test_a_higher_band_goes_first_although_it_came_last(tmp_path: Path) -> None:
    order: list[str] = []
    go = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            _, body = await read_request(reader)
            order.append(str(sent(body)["user"]))
            await go.wait()
            writer.write(answer(JSON_ANSWER))

    async with proxied(tmp_path, backend_concurrency=1) as (proxy, backend):
        backend.script = script
        clients = []
        for user, band in (("first", b"normal"), ("low", b"low"), ("normal", b"normal"), ("high", b"high")):
            client = await Client.tcp(proxy.port)
            body = b'{"model":"m","user":"%b","messages":[{"role":"user","content":"hello"}]}' % user.encode()
            fields = b"x-priority: %b\r\n" % band
            client.writer.write(post(b"/v1/chat/completions", body, token=OPERATOR, fields=fields))
            clients.append(client)
            await until(lambda: proxy.registry.queue.running + proxy.registry.queue.waiting == len(clients))
        go.set()
        for client in clients:
            assert (await client.answer())[0] == 200
        assert order == ["first", "high", "normal", "low"]


# prefix caches -------------------------------------------------------------------------------------------------------


async def asked_with(
    proxy: Proxy, fields: bytes = b"", token: bytes = OPERATOR, path: bytes = b"/v1/completions"
) -> None:
    client = await Client.tcp(proxy.port)
    status, _, body = await client.ask(post(path, b'{"model":"m","prompt":"x"}', token=token, fields=fields))
    assert status == 200, body


async def test_vllms_cache_is_salted_by_tenant_and_by_the_tag_of_who_may_set_one(tmp_path: Path) -> None:
    tenants = {"red": TenantRow(cache_group="warm"), "blue": TenantRow(cache_group="warm")}
    async with proxied(tmp_path, tenants=tenants) as (proxy, backend):
        proxy.use(backend, BackendKind.VLLM)
        for fields in (
            b"",
            b"x-tenant-id: acme\r\n",
            b"x-tenant-id: acme\r\nx-cache-tag: s1\r\n",
            b"x-tenant-id: red\r\n",
            b"x-tenant-id: blue\r\n",
            b"x-cache-mode: none\r\n",
            b"x-cache-mode: none\r\n",
        ):
            await asked_with(proxy, fields)
        await asked_with(proxy, b"x-cache-tag: s1\r\n", token=b"hm_alice")
        salts = [sent(body)["cache_salt"] for _, body in backend.requests]
        own, acme, tagged, red, blue, none, none_again, alice = salts
        assert (red == blue, own == alice) == (True, True)
        assert len({own, acme, tagged, red, none, none_again}) == 6


async def test_a_client_cannot_choose_its_salt_or_its_slot(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, backend):
        proxy.use(backend, BackendKind.VLLM)
        client = await Client.unix(proxy.socket_path)
        own = b'{"model":"m","prompt":"x","cache_salt":"mine"}'
        status, _, _ = await client.ask(post(b"/v1/completions", own))
        assert status == 400 or sent(backend.requests[-1][1])["cache_salt"] != "mine"


async def test_llama_servers_cache_is_used_until_a_second_group_uses_it(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, backend):
        await asked_with(proxy)
        add_agent(proxy, "bob", "default")
        await asked_with(proxy)
        add_agent(proxy, "carol", "acme")
        await asked_with(proxy)
        proxy.registry.forget("carol")
        await asked_with(proxy)
        assert [sent(body).get("cache_prompt") for _, body in backend.requests] == [None, None, False, None]


async def test_what_ends_with_a_second_group_says_which_setting_brings_it_back(tmp_path: Path) -> None:
    """The first agent of a second tenant turned 200 into 501, and nothing told why."""
    asked = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "hello"}]}
    edited = asked | {"context_management": {"edits": [{"type": "compact_20260112"}]}}
    found = b'{"type":"message","content":[],"usage":{"input_tokens":1,"output_tokens":1},"stop_reason":"end_turn"}'
    async with proxied(tmp_path, tenants={"acme": TenantRow(), "us": TenantRow(cache_group="default")}) as (
        proxy,
        backend,
    ):
        client = await Client.unix(proxy.socket_path)

        async def ask() -> tuple[int, bytes]:
            backend.reply = answer(found)
            status, _, body = await client.ask(post(b"/v1/messages", json.dumps(edited).encode()))
            return status, body

        assert (await ask())[0] == 200
        add_agent(proxy, "carol", "acme")
        status, body = await ask()
        assert status == 501
        assert b"does not summarize a conversation" in body
        assert b"`cache_group`" in body
        proxy.registry.forget("carol")
        assert (await ask())[0] == 200
        proxy.use(backend, BackendKind.DEMO)
        status, body = await ask()
        assert (status, b"cache_group" in body) == (501, False)


async def test_without_cache_isolation_nothing_is_put_in(tmp_path: Path) -> None:
    async with proxied(tmp_path, cache_isolation=False) as (proxy, backend):
        proxy.use(backend, BackendKind.VLLM)
        await asked_with(proxy)
        assert "cache_salt" not in sent(backend.requests[0][1])


async def test_bands_reach_vllms_own_queue_where_it_orders_by_priority(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, backend):
        info = BackendInfo(kind=BackendKind.VLLM, address=backend.address, up=True, priority=True)
        proxy.path.use_backend(info, [])
        for band in (b"high", b"normal", b"low"):
            await asked_with(proxy, b"x-priority: %b\r\n" % band)
        proxy.path.use_backend(msgspec.structs.replace(info, priority=False), [])
        await asked_with(proxy, b"x-priority: high\r\n")
        assert [sent(body).get("priority") for _, body in backend.requests] == [0, 10, 20, None]


async def test_where_a_dialect_cannot_keep_prompts_apart_it_is_translated_once_there_is_a_second_group(
    tmp_path: Path,
) -> None:
    """llama-server's /v1/messages looks at its cache with any value of `cache_prompt` (measured)."""
    async with proxied(tmp_path) as (proxy, backend):
        client = await Client.unix(proxy.socket_path)
        request = post(b"/v1/messages", b'{"model":"m","max_tokens":3,"messages":[{"role":"user","content":"x"}]}')
        backend.reply = answer(
            b'{"id":"msg_1","type":"message","role":"assistant","model":"m","content":[{"type":"text","text":"hi"}],'
            b'"stop_reason":"end_turn","usage":{"input_tokens":7,"output_tokens":3}}'
        )
        assert (await client.ask(request))[0] == 200
        backend.reply = answer(JSON_ANSWER)
        add_agent(proxy, "carol", "acme")
        status, _, body = await client.ask(request)
        assert (status, json.loads(body)["type"]) == (200, "message")
        lines = [head.split(b" ")[1] for head, _ in backend.requests]
        assert lines == [b"/v1/messages", b"/v1/chat/completions"]
        assert sent(backend.requests[1][1])["cache_prompt"] is False


async def test_an_agent_that_moves_while_its_body_comes_takes_no_plan_of_the_old_tenant_along(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, backend):
        proxy.use(backend, BackendKind.VLLM)
        client = await Client.unix(proxy.socket_path)
        request = post(b"/v1/completions", b'{"model":"m","prompt":"x"}')
        client.writer.write(request[:-3])
        await until(lambda: proxy.alice.gate.in_flight == 1)
        proxy.registry.learn(msgspec.structs.replace(proxy.row, tenant="other"))
        client.writer.write(request[-3:])
        assert (await client.answer())[0] == 200
        assert (await client.ask(request))[0] == 200
        first, second = (sent(body)["cache_salt"] for _, body in backend.requests)
        assert first != second


async def test_a_token_that_was_changed_is_no_use_on_an_open_connection_either(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, _):
        client = await Client.tcp(proxy.port)
        request = post(b"/v1/chat/completions", CHAT, token=b"hm_alice")
        assert (await client.ask(request))[0] == 200
        proxy.registry.learn(msgspec.structs.replace(proxy.row, model_digest=digest(b"hm_new")))
        assert (await client.ask(request))[0] == 401


async def test_a_tenant_nobody_remembered_is_held_to_its_section_after_a_reload(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, _):
        for number in range(1500):
            proxy.registry.tenants.of(f"t{number}")
        limited = {"default": TenantRow(rate_limit="1/min")}
        proxy.path.use_settings(msgspec.structs.replace(proxy.settings, tenants=limited))
        client = await Client.unix(proxy.socket_path)
        statuses = [(await client.ask(post(b"/v1/chat/completions", CHAT)))[0] for _ in range(2)]
        assert statuses == [200, 429]


@pytest.mark.parametrize("name", ["gpt-oss:120b-cloud", "x:cloud", " X:Cloud "])
async def test_a_model_that_ollama_would_ask_elsewhere_is_used_only_by_who_may_name_it(
    tmp_path: Path, name: str
) -> None:
    async with proxied(tmp_path) as (proxy, backend):
        proxy.use(backend, BackendKind.OLLAMA)
        client = await Client.unix(proxy.socket_path)
        status, _, _ = await client.ask(post(b"/v1/chat/completions", CHAT.replace(b'"m"', json.dumps(name).encode())))
        assert (status, backend.requests) == (403, [])
    (tmp_path / "b").mkdir()
    async with proxied(tmp_path / "b", tenants={"default": TenantRow(models="x:cloud")}) as (proxy, backend):
        proxy.use(backend, BackendKind.OLLAMA)
        client = await Client.tcp(proxy.port)
        body = CHAT.replace(b'"m"', b'"x:cloud"')
        assert (await client.ask(post(b"/v1/chat/completions", body, token=b"hm_alice")))[0] == 200
