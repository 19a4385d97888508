"""Edits of a conversation that Anthropic's clients ask for, before and after a second tenant came."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anthropic
import pytest

from hive.dialects.anthropic_editing import CLEARED, TYPE
from hive.domain import BackendInfo, BackendKind, ModelInfo
from hive.settings.table import TenantRow
from tests import llama
from tests.proxy.harness import MODEL_TOKEN, Client, Proxy, answer, post, proxied

LONG = "it is far away. " * 40
EDIT: Any = {"edits": [{"type": TYPE, "trigger": {"type": "tool_uses", "value": 2}}]}
TOOL: Any = {"name": "look", "description": "Looks.", "input_schema": {"type": "object", "properties": {}}}
MESSAGE = b'{"type":"message","content":[],"usage":{"input_tokens":1,"output_tokens":1},"stop_reason":"end_turn"}'
CHAT = (
    b'{"id":"chatcmpl-1","choices":[{"message":{"content":"hi"},"finish_reason":"stop"}],"usage":{"prompt_tokens":5}}'
)


def conversation() -> Any:
    said: list[Any] = [{"role": "user", "content": "look around"}]
    for number in range(5):
        call = {"type": "tool_use", "id": f"c{number}", "name": "look", "input": {}}
        result = {"type": "tool_result", "tool_use_id": f"c{number}", "content": LONG}
        said += [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    return said


async def test_the_first_agent_of_a_second_tenant_ends_no_conversation_with_edits(tmp_path: Path) -> None:
    """It turned 200 into 501: the server itself passes over the edits, and the translation refused them."""
    async with proxied(tmp_path, tenants={"acme": TenantRow()}) as (proxy, backend):
        client = await Client.unix(proxy.socket_path)
        body = {"model": "m", "max_tokens": 5, "messages": conversation(), "context_management": EDIT}
        asked = post(b"/v1/messages", json.dumps(body).encode())
        backend.reply = answer(MESSAGE)
        status, fields, said = await client.ask(asked)
        assert (status, fields[b"x-hive-ignored"], said) == (200, b"context_management", MESSAGE)
        proxy.another("carol", tenant="acme")
        backend.reply = answer(CHAT)
        status, fields, said = await client.ask(asked)
        assert (status, b"x-hive-ignored" in fields) == (200, False)
        (applied,) = json.loads(said)["context_management"]["applied_edits"]
        assert (applied["type"], applied["cleared_tool_uses"]) == (TYPE, 2)
        sent = backend.requests[-1][1]
        assert (sent.count(bytes(CLEARED)), sent.count(LONG.encode())) == (2, 3)


@pytest.mark.llama
async def test_anthropics_own_package_hears_of_them_before_a_real_llama_server(tmp_path: Path) -> None:
    with llama.serve(tmp_path) as server:
        async with proxied(tmp_path, tenants={"acme": TenantRow()}) as (proxy, _):
            info = BackendInfo(kind=BackendKind.LLAMA, address=server.address, up=True)
            proxy.path.use_backend(info, [ModelInfo(name=llama.MODEL)])
            proxy.another("carol", tenant="acme")
            whole = await asyncio.to_thread(by_package, proxy, lambda client, asked: client.create(**asked))
            streamed = await asyncio.to_thread(by_package, proxy, last_of_a_stream)
            plain = await asyncio.to_thread(by_package, proxy, lambda client, asked: client.create(**asked), edits=None)
    for found in (whole, streamed):
        (applied,) = found.context_management.applied_edits
        assert (applied.type, applied.cleared_tool_uses) == (TYPE, 2)
        assert applied.cleared_input_tokens > 300
    assert plain.context_management is None
    assert plain.usage.input_tokens - whole.usage.input_tokens > 300


def by_package(proxy: Proxy, ask: Callable[[Any, Any], Any], edits: Any = EDIT) -> Any:
    url = f"http://127.0.0.1:{proxy.port}"
    with anthropic.Anthropic(base_url=url, api_key=MODEL_TOKEN.decode(), max_retries=0) as client:
        asked = {"model": llama.MODEL, "max_tokens": 5, "messages": conversation(), "tools": [TOOL]}
        return ask(client.beta.messages, asked | ({"context_management": edits} if edits else {}))


def last_of_a_stream(client: Any, asked: Any) -> Any:
    with client.stream(**asked) as stream:
        return stream.get_final_message()
