"""The real `openai` and `anthropic` packages on a real llama-server, directly and through a whole Hive."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest

from tests.journeys.sdk import (
    AFTER_A_TOOL,
    ANTHROPIC_AFTER_A_TOOL,
    ANTHROPIC_TOOLS,
    CITY,
    HELLO,
    LONG,
    STEADY,
    TEMPLATE,
    TOOLS,
    Door,
    door_of,
    steady,
    totals,
)
from tests.journeys.stack import Stack, stack, until
from tests.llama import MODEL, LlamaServer, serve

pytestmark = [pytest.mark.redis, pytest.mark.llama]
ON: Any = {"ignore_eos": True}
CHAT: dict[str, Any] = {"model": MODEL, "messages": HELLO, "max_tokens": 12, **STEADY, **ON}
MESSAGE: dict[str, Any] = {"model": MODEL, "messages": HELLO, "max_tokens": 12, "temperature": 0, **ON}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
FOREVER = 3500
"""Tokens: half a second, far longer than it takes to leave."""


@pytest.fixture(scope="module")
def llama_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaServer]:
    with serve(tmp_path_factory.mktemp("llama-sdk"), template=TEMPLATE) as server:
        yield server


@pytest.fixture(scope="module")
def hive(llama_server: LlamaServer) -> Iterator[Stack]:
    with stack(url=llama_server.url) as hive:
        hive.create("alice", "idler.py", tier="high")
        hive.create("counted", "idler.py", tier="high")
        hive.create("bob", "idler.py", tier="medium")
        yield hive


@pytest.fixture
def through(hive: Stack) -> Door:
    return door_of(hive, "alice")


@pytest.fixture
def direct(llama_server: LlamaServer) -> Door:
    return Door(llama_server.url, "none")


ONE_PIECE = {
    "chat": ("/v1/chat/completions", CHAT),
    "long prompt": ("/v1/chat/completions", {**CHAT, "messages": LONG}),
    "tools": ("/v1/chat/completions", {**CHAT, "tools": TOOLS}),
    "after a tool": ("/v1/chat/completions", {**CHAT, "tools": TOOLS, "messages": AFTER_A_TOOL}),
    "a schema": ("/v1/chat/completions", {**CHAT, "max_tokens": 60, "response_format": SCHEMA, "ignore_eos": False}),
    "log probabilities": ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 2}),
    "completion": ("/v1/completions", {"model": MODEL, "prompt": "Hello", "max_tokens": 12, **STEADY, **ON}),
    "message": ("/v1/messages", MESSAGE),
    "message, beta": ("/v1/messages?beta=true", MESSAGE),
    "message, system": ("/v1/messages", {**MESSAGE, "system": "Be short."}),
    "message, tools": ("/v1/messages", {**MESSAGE, "tools": ANTHROPIC_TOOLS}),
    "message, after a tool": (
        "/v1/messages",
        {**MESSAGE, "tools": ANTHROPIC_TOOLS, "messages": ANTHROPIC_AFTER_A_TOOL},
    ),
    "count": ("/v1/messages/count_tokens", {"model": MODEL, "messages": HELLO}),
    "count, beta": ("/v1/messages/count_tokens?beta=true", {"model": MODEL, "messages": HELLO}),
}
STREAMED = [name for name in ONE_PIECE if not name.startswith("count")]
REFUSED = {
    "too long": ("/v1/chat/completions", {**CHAT, "messages": [{"role": "user", "content": "word " * 20_000}]}),
    "too long, streamed": (
        "/v1/chat/completions",
        {**CHAT, "stream": True, "messages": [{"role": "user", "content": "word " * 20_000}]},
    ),
    "no messages": ("/v1/chat/completions", {"model": MODEL, "messages": [{"role": "user"}]}),
    "message too long": ("/v1/messages", {**MESSAGE, "messages": [{"role": "user", "content": "word " * 20_000}]}),
    "no such role": ("/v1/chat/completions", {"model": MODEL, "messages": [{"content": "hello"}]}),
    "no embeddings here": ("/v1/embeddings", {"model": MODEL, "input": "hello"}),
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
def test_a_stream_is_byte_for_byte_the_direct_one(direct: Door, through: Door, name: str) -> None:
    path, body = ONE_PIECE[name]
    expected, got = direct.post(path, {**body, "stream": True}), through.post(path, {**body, "stream": True})
    assert (expected.status_code, got.status_code) == (200, 200), got.text
    assert steady(got.content) == steady(expected.content)


def test_the_tools_and_the_schema_have_reached_the_model(through: Door) -> None:
    def answer(name: str) -> Any:
        return through.post(*ONE_PIECE[name]).json()

    assert answer("tools")["usage"]["prompt_tokens"] > 100 + answer("chat")["usage"]["prompt_tokens"]
    assert answer("message, tools")["usage"] != answer("message")["usage"]
    assert json.loads(answer("a schema")["choices"][0]["message"]["content"])["city"] in ("Paris", "Rome")


def test_usage_in_a_stream_is_there_for_who_asked(direct: Door, through: Door) -> None:
    body = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
    expected, got = (door.post("/v1/chat/completions", body) for door in (direct, through))
    assert steady(got.content) == steady(expected.content)
    assert b'"usage":{' in got.content


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_backend_refuses_is_refused_in_its_own_words(direct: Door, through: Door, name: str) -> None:
    path, body = REFUSED[name]
    expected, got = direct.post(path, body), through.post(path, body)
    assert expected.status_code >= 400
    assert (got.status_code, got.content) == (expected.status_code, expected.content)


def test_a_field_hive_drops_is_named_and_the_answer_is_as_without_it(direct: Door, hive: Stack) -> None:
    path, body = ONE_PIECE["chat"]
    got = door_of(hive, "bob").post(path, {**body, "made_up": 1})
    assert "made_up" in got.headers["x-hive-dropped"]
    without = {name: value for name, value in body.items() if name not in got.headers["x-hive-dropped"].split(", ")}
    assert steady(got.content) == steady(direct.post(path, without).content)


def test_the_openai_package_chats_streams_and_lists(direct: Door, through: Door) -> None:
    texts = []
    for door in (direct, through):
        with door.openai() as client:
            assert [model.id for model in client.models.list()] == [MODEL]
            wanted: Any = {"model": MODEL, "messages": HELLO, "max_tokens": 12, **STEADY, "extra_body": ON}
            whole = client.chat.completions.create(**wanted)
            text = ""
            for chunk in client.chat.completions.create(**wanted, stream=True):
                text += chunk.choices[0].delta.content or ""
                reason = chunk.choices[0].finish_reason
            assert (text, reason) == (whole.choices[0].message.content, "length")
            texts.append(text)
    assert texts[0] == texts[1] != ""


async def test_the_openai_package_runs_many_at_once(through: Door) -> None:
    """More than the server has slots: what waits, waits in Hive."""
    client = through.openai_async()
    wanted: Any = {"model": MODEL, "messages": HELLO, "max_tokens": 40, **STEADY, "extra_body": ON}
    answers = await asyncio.gather(*(client.chat.completions.create(**wanted) for _ in range(20)))
    await client.close()
    assert {answer.choices[0].message.content for answer in answers} == {answers[0].choices[0].message.content}


def test_the_openai_package_raises_what_it_raises_directly(direct: Door, through: Door) -> None:
    for door in (direct, through):
        with door.openai() as client:
            with pytest.raises(openai.BadRequestError, match="context"):
                client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "word " * 20_000}])
            with pytest.raises(openai.BadRequestError, match="context"):
                client.chat.completions.create(
                    model=MODEL, messages=[{"role": "user", "content": "word " * 20_000}], stream=True
                )
    with through.openai() as client, pytest.raises(openai.PermissionDeniedError):
        client.files.list()
    with Door(through.root, "hm_nobody").openai() as client, pytest.raises(openai.AuthenticationError):
        client.models.list()


def test_the_anthropic_package_talks_streams_and_counts(direct: Door, through: Door) -> None:
    texts = []
    for door in (direct, through):
        with door.anthropic() as client:
            wanted: Any = {"model": MODEL, "messages": HELLO, "max_tokens": 12, "extra_body": {"temperature": 0, **ON}}
            whole = client.messages.create(**wanted)
            with client.messages.stream(**wanted) as stream:
                text = "".join(stream.text_stream)
                final = stream.get_final_message()
            assert whole.content[0].type == "text"
            assert text == whole.content[0].text
            assert (final.stop_reason, final.usage.output_tokens) == ("max_tokens", 12)
            beta = client.beta.messages.create(**wanted)
            assert beta.content[0].type == "text"
            counted = client.messages.count_tokens(model=MODEL, messages=HELLO).input_tokens
            assert counted == client.beta.messages.count_tokens(model=MODEL, messages=HELLO).input_tokens
            assert counted == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)
            texts += [text, beta.content[0].text]
    assert len(set(texts)) == 1


def test_the_anthropic_package_raises_its_own_errors(through: Door) -> None:
    with through.anthropic() as client:
        with pytest.raises(anthropic.BadRequestError, match="context"):
            client.messages.create(model=MODEL, max_tokens=1, messages=[{"role": "user", "content": "word " * 20_000}])
        with pytest.raises(anthropic.PermissionDeniedError) as refused:
            client.messages.batches.list()
    body: Any = refused.value.body
    assert (body["type"], body["error"]["type"], body["error"]["src"]) == ("error", "permission_error", "hive")
    with Door(through.root, "hm_nobody").anthropic() as client, pytest.raises(anthropic.AuthenticationError):
        client.messages.create(model=MODEL, max_tokens=1, messages=HELLO)


def test_what_every_dialect_costs_is_counted_to_the_token(hive: Stack) -> None:
    counted = door_of(hive, "counted")
    expected_in = expected_out = 0
    with counted.openai() as client:
        wanted: Any = {"model": MODEL, "messages": HELLO, "max_tokens": 9, "extra_body": ON}
        whole = client.chat.completions.create(**wanted)
        assert whole.usage is not None
        assert all(chunk.usage is None for chunk in client.chat.completions.create(**wanted, stream=True))
        expected_in += 2 * whole.usage.prompt_tokens
        expected_out += 18
    with counted.anthropic() as client:
        wanted = {"model": MODEL, "messages": HELLO, "max_tokens": 5, "extra_body": ON}
        asked = client.messages.count_tokens(model=MODEL, messages=HELLO).input_tokens
        client.messages.create(**wanted)
        list(client.messages.create(**wanted, stream=True))
        expected_in += 2 * asked
        expected_out += 10
    until(
        lambda: totals(hive, "counted") == (expected_in, expected_out),
        within_s=10,
        what=f"{expected_in, expected_out}",
    )


def busy_slots(server: LlamaServer) -> int:
    slots = httpx.get(f"{server.url}/slots", trust_env=False).json()
    return sum(slot["is_processing"] for slot in slots)


def test_who_leaves_a_stream_frees_the_slot(llama_server: LlamaServer, through: Door) -> None:
    with through.openai() as client:
        stream = client.chat.completions.create(
            model=MODEL, messages=HELLO, max_tokens=FOREVER, stream=True, extra_body=ON
        )
        next(iter(stream))
        assert busy_slots(llama_server) == 1
        stream.close()
        until(lambda: busy_slots(llama_server) == 0, within_s=5, what="the slot is free")
    with through.anthropic() as client:
        messages = client.messages.create(model=MODEL, messages=HELLO, max_tokens=FOREVER, stream=True, extra_body=ON)
        next(iter(messages))
        messages.close()
        until(lambda: busy_slots(llama_server) == 0, within_s=5, what="the slot is free")


async def test_who_gives_up_on_an_answer_in_one_piece_holds_no_turn(
    hive: Stack, llama_server: LlamaServer, through: Door
) -> None:
    """llama-server 0c1e570 itself works on until such an answer is done, asked directly too; what waits never goes."""
    client = through.openai_async()
    asked = [
        asyncio.create_task(
            client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=FOREVER, extra_body=ON)
        )
        for _ in range(8)
    ]
    await asyncio.to_thread(until, lambda: busy_slots(llama_server) == 4, within_s=5, what="all slots are busy")
    for task in asked:
        task.cancel()
    await asyncio.gather(*asked, return_exceptions=True)
    await asyncio.to_thread(
        until, lambda: hive.get("/api/agents/alice")["in_flight"] == 0, within_s=5, what="nothing is in flight"
    )
    await asyncio.to_thread(until, lambda: busy_slots(llama_server) == 0, within_s=60, what="the slots are free")
    await client.close()


def test_hive_tells_the_slots_of_the_server(hive: Stack) -> None:
    told = hive.get("/api/system/inference")
    assert (told["slots"], told["slots_from"]) == (4, "/props total_slots")
