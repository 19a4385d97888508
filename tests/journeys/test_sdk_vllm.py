"""The real `openai` and `anthropic` packages on a real vLLM (CPU, tiny random model), directly and through Hive.

A busy vLLM puts several tokens into one event, so streams are compared by what they say, not by how they are cut.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest

from hive.backends.backend import open_backend
from hive.backends.recognise import recognise
from hive.domain import BackendKind
from tests.journeys.sdk import (
    AFTER_A_TOOL,
    ANTHROPIC_AFTER_A_TOOL,
    ANTHROPIC_TOOLS,
    CITY,
    HELLO,
    LONG,
    STEADY,
    TOOLS,
    Door,
    door_of,
    steady,
    told,
    totals,
)
from tests.journeys.stack import Stack, stack, until
from tests.vllm import MODEL, SEQUENCES, VllmServer

pytestmark = [pytest.mark.redis, pytest.mark.vllm, pytest.mark.timeout(600)]
CHAT: dict[str, Any] = {"model": MODEL, "messages": HELLO, "max_tokens": 40, **STEADY}
MESSAGE: dict[str, Any] = {"model": MODEL, "messages": HELLO, "max_tokens": 40, "temperature": 0}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
NAMED = {"type": "function", "function": {"name": "look_up"}}
FOREVER = 30_000
"""Tokens: seconds, far longer than it takes to leave."""
CONFIG = f"""
[inference]
vllm_max_sequences = {SEQUENCES}
vllm_scheduling_policy = priority
"""


@pytest.fixture(scope="module")
def hive(vllm_server: VllmServer) -> Iterator[Stack]:
    with stack(url=vllm_server.url, config=CONFIG) as hive:
        hive.create("alice", "idler.py", tier="high")
        hive.create("counted", "idler.py", tier="high")
        yield hive


@pytest.fixture
def through(hive: Stack) -> Door:
    return door_of(hive, "alice")


@pytest.fixture
def direct(vllm_server: VllmServer) -> Door:
    return Door(vllm_server.url, "none")


ONE_PIECE = {
    "chat": ("/v1/chat/completions", CHAT),
    "long prompt": ("/v1/chat/completions", {**CHAT, "messages": LONG}),
    "a tool by name": ("/v1/chat/completions", {**CHAT, "max_tokens": 100, "tools": TOOLS, "tool_choice": NAMED}),
    "after a tool": ("/v1/chat/completions", {**CHAT, "messages": AFTER_A_TOOL}),
    "a schema": ("/v1/chat/completions", {**CHAT, "response_format": SCHEMA}),
    "completion": ("/v1/completions", {"model": MODEL, "prompt": "Hello", "max_tokens": 40, **STEADY}),
    "message": ("/v1/messages", MESSAGE),
    "message, beta": ("/v1/messages?beta=true", MESSAGE),
    "message, system": ("/v1/messages", {**MESSAGE, "system": "Be short."}),
    "message, a tool": ("/v1/messages", {**MESSAGE, "tools": ANTHROPIC_TOOLS, "tool_choice": {"type": "any"}}),
    "message, after a tool": ("/v1/messages", {**MESSAGE, "messages": ANTHROPIC_AFTER_A_TOOL}),
    "count": ("/v1/messages/count_tokens", {"model": MODEL, "messages": HELLO}),
}
STREAMED = [name for name in ONE_PIECE if name != "count"]
TOO_LONG: Any = [{"role": "user", "content": "word " * 20_000}]
REFUSED = {
    "too long": ("/v1/chat/completions", {**CHAT, "messages": TOO_LONG}),
    "too long, streamed": ("/v1/chat/completions", {**CHAT, "stream": True, "messages": TOO_LONG}),
    "message too long": ("/v1/messages", {**MESSAGE, "messages": TOO_LONG}),
    "a schema that is none": ("/v1/chat/completions", {**CHAT, "response_format": {"type": "json_schema"}}),
}


@pytest.mark.parametrize("name", ONE_PIECE)
def test_an_answer_is_byte_for_byte_the_direct_one(direct: Door, through: Door, name: str) -> None:
    path, body = ONE_PIECE[name]
    expected, got = direct.post(path, body), through.post(path, body)
    assert (expected.status_code, got.status_code) == (200, 200), got.text
    assert steady(got.content) == steady(expected.content)
    assert got.headers["content-type"] == expected.headers["content-type"]
    assert "x-hive-dropped" not in got.headers


@pytest.mark.parametrize("name", STREAMED)
def test_a_stream_says_what_the_direct_one_says(direct: Door, through: Door, name: str) -> None:
    path, body = ONE_PIECE[name]
    expected, got = direct.post(path, {**body, "stream": True}), through.post(path, {**body, "stream": True})
    assert (expected.status_code, got.status_code) == (200, 200), got.text
    assert told(got.content) == told(expected.content)
    if "messages" not in path:
        assert b'"usage"' not in got.content


def test_usage_in_a_stream_is_there_for_who_asked(direct: Door, through: Door) -> None:
    body = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
    expected, got = (door.post("/v1/chat/completions", body) for door in (direct, through))
    assert told(got.content) == told(expected.content)
    assert got.content.count(b'"usage":{') == 1


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_backend_refuses_is_refused_in_its_own_words(direct: Door, through: Door, name: str) -> None:
    path, body = REFUSED[name]
    expected, got = direct.post(path, body), through.post(path, body)
    assert expected.status_code >= 400
    assert (got.status_code, got.content) == (expected.status_code, expected.content)


def test_that_its_model_makes_no_embeddings_is_said_in_words(direct: Door, through: Door) -> None:
    """It was the server's `{"detail":"Not Found"}`."""
    asked = ("/v1/embeddings", {"model": MODEL, "input": "hello"})
    assert (direct.post(*asked).status_code, through.post(*asked).status_code) == (404, 501)
    assert "its model makes text and no embeddings" in through.post(*asked).json()["error"]["message"]


def test_the_openai_package_chats_streams_calls_a_tool_and_lists(direct: Door, through: Door) -> None:
    seen = []
    for door in (direct, through):
        with door.openai() as client:
            assert [model.id for model in client.models.list()] == [MODEL]
            wanted: Any = {"model": MODEL, "messages": HELLO, "max_tokens": 40, **STEADY}
            whole = client.chat.completions.create(**wanted)
            text = ""
            for chunk in client.chat.completions.create(**wanted, stream=True):
                text += chunk.choices[0].delta.content or ""
                reason = chunk.choices[0].finish_reason
            assert (text, reason) == (whole.choices[0].message.content, "length")
            called: Any = client.chat.completions.create(  # type: ignore[call-overload]
                **{**wanted, "max_tokens": 100}, tools=TOOLS, tool_choice=NAMED
            )
            call = called.choices[0].message.tool_calls[0].function
            seen.append((text, call.name, call.arguments))
    assert seen[0] == seen[1]
    assert seen[0][1] == "look_up"


def test_the_openai_package_raises_what_it_raises_directly(direct: Door, through: Door) -> None:
    for door in (direct, through):
        with door.openai() as client:
            with pytest.raises(openai.BadRequestError, match="context length"):
                client.chat.completions.create(model=MODEL, messages=TOO_LONG, stream=True)
            with pytest.raises(openai.NotFoundError, match=r"does not exist|'nope' not found"):
                client.chat.completions.create(model="nope", messages=HELLO)


def test_the_anthropic_package_talks_streams_calls_a_tool_and_counts(direct: Door, through: Door) -> None:
    seen = []
    for door in (direct, through):
        with door.anthropic() as client:
            wanted: Any = {"model": MODEL, "messages": HELLO, "max_tokens": 40, "extra_body": {"temperature": 0}}
            whole = client.messages.create(**wanted)
            with client.messages.stream(**wanted) as stream:
                text = "".join(stream.text_stream)
                final = stream.get_final_message()
            assert whole.content[0].type == "text"
            assert (text, final.stop_reason) == (whole.content[0].text, "max_tokens")
            assert final.usage.output_tokens == 40
            called = client.messages.create(**wanted, tools=ANTHROPIC_TOOLS, tool_choice={"type": "any"})
            counted = client.messages.count_tokens(model=MODEL, messages=HELLO).input_tokens
            assert counted == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)
            assert client.beta.messages.create(**wanted).content[0].to_dict()["text"] == text
            seen.append((text, called.content[0].type, counted))
    assert seen[0] == seen[1]


def test_the_anthropic_package_raises_its_own_errors(through: Door) -> None:
    with through.anthropic() as client:
        with pytest.raises(anthropic.BadRequestError, match="context length"):
            client.messages.create(model=MODEL, max_tokens=1, messages=TOO_LONG)
        with pytest.raises(anthropic.PermissionDeniedError):
            client.messages.batches.list()


def test_what_every_dialect_costs_is_counted_to_the_token(hive: Stack) -> None:
    counted = door_of(hive, "counted")
    expected_in = expected_out = 0
    with counted.openai() as client:
        wanted: Any = {"model": MODEL, "messages": LONG, "max_tokens": 9}
        whole = client.chat.completions.create(**wanted)
        assert whole.usage is not None
        assert all(chunk.usage is None for chunk in client.chat.completions.create(**wanted, stream=True))
        expected_in += 2 * whole.usage.prompt_tokens
        expected_out += 18
    with counted.anthropic() as client:
        asked = client.messages.count_tokens(model=MODEL, messages=LONG).input_tokens
        client.messages.create(model=MODEL, messages=LONG, max_tokens=5)
        list(client.messages.create(model=MODEL, messages=LONG, max_tokens=5, stream=True))
        expected_in += 2 * asked
        expected_out += 10
    until(
        lambda: totals(hive, "counted") == (expected_in, expected_out),
        within_s=10,
        what=f"{expected_in, expected_out}",
    )


def requests_at(server: VllmServer, state: str) -> int:
    """Requests `running` or `waiting`, by its own metrics."""
    shown = httpx.get(f"{server.url}/metrics", trust_env=False).text
    found = re.search(rf"^vllm:num_requests_{state}\{{.*\}} ([0-9.]+)$", shown, re.MULTILINE)
    assert found
    return int(float(found[1]))


def generated(server: VllmServer) -> int:
    """Tokens so far, by its own metrics."""
    shown = httpx.get(f"{server.url}/metrics", trust_env=False).text
    found = re.search(r"^vllm:generation_tokens_total\{.*\} ([0-9.e+]+)$", shown, re.MULTILINE)
    assert found
    return int(float(found[1]))


def test_who_leaves_a_stream_frees_the_backend(vllm_server: VllmServer, through: Door) -> None:
    wanted: Any = {"model": MODEL, "messages": HELLO, "max_tokens": FOREVER, "stream": True}
    with through.openai() as client:
        before = generated(vllm_server)
        stream = client.chat.completions.create(**wanted)
        next(iter(stream))  # so it runs
        stream.close()
        until(lambda: requests_at(vllm_server, "running") == 0, within_s=20, what="it was cancelled")
        assert generated(vllm_server) - before < FOREVER, "it did not end by itself"
    with through.anthropic() as client:
        before = generated(vllm_server)
        messages = client.messages.create(**wanted)
        next(iter(messages))
        messages.close()
        until(lambda: requests_at(vllm_server, "running") == 0, within_s=20, what="it was cancelled")
        assert generated(vllm_server) - before < FOREVER


async def test_who_gives_up_on_an_answer_in_one_piece_frees_the_backend(vllm_server: VllmServer, through: Door) -> None:
    """More than it works on at once: the rest waits in Hive's queue, none in vLLM's own."""
    client = through.openai_async()
    asked = [
        asyncio.create_task(client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=FOREVER))
        for _ in range(2 * SEQUENCES)
    ]

    def running() -> float:
        return requests_at(vllm_server, "running")

    await asyncio.to_thread(until, lambda: running() == SEQUENCES, within_s=10, what="all sequences run")
    assert requests_at(vllm_server, "waiting") == 0
    for task in asked:
        task.cancel()
    await asyncio.gather(*asked, return_exceptions=True)
    await asyncio.to_thread(until, lambda: running() == 0, within_s=20, what="nothing runs")
    await client.close()


def test_hive_tells_what_it_knows_of_vllm(hive: Stack) -> None:
    found = hive.get("/api/system/inference")
    assert (found["backend"], found["slots"], found["slots_from"]) == (
        "vllm",
        SEQUENCES,
        "vllm_max_sequences in hive.conf",
    )
    assert (found["priority"], found["prefix_cache"]) == (True, "separated by tenant (salt)")


async def test_vllms_own_queue_is_seen_when_it_fills(vllm_server: VllmServer) -> None:
    """Past Hive, more than it works on at once."""
    backend = open_backend(BackendKind.VLLM, vllm_server.address)
    info = await recognise(vllm_server.address)
    assert info is not None
    assert (info.kind, (await backend.busy()).waiting) == (BackendKind.VLLM, 0)
    body = {"model": MODEL, "prompt": "hello", "max_tokens": FOREVER}
    seen: set[int | None] = set()
    async with httpx.AsyncClient(base_url=vllm_server.url, timeout=60, trust_env=False) as client:
        asked = [asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(SEQUENCES + 3)]
        while not any(seen) and not all(task.done() for task in asked):
            seen.add((await backend.busy()).waiting)
        for task in asked:
            task.cancel()
        ends = await asyncio.gather(*asked, return_exceptions=True)
    assert any(seen), (seen, ends)
