"""One conversation through every client package before every kind of real server: what is said is the same.

An Ollama is none of these servers: no registry has one (tests/journeys/test_sdk_ollama.py has a stand-in).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import ollama
import openai
import pytest
from journeys.sdk import CITY, HELLO, TEMPLATE, TOOLS, Door, door_of
from journeys.stack import Stack, stack, until

from tests.llama import MODEL, serve
from tests.vllm import VllmServer, vllm_server

__all__ = ["vllm_server"]
pytestmark = pytest.mark.redis
LENGTH = 12
"""Tokens; the tiny models never end by themselves."""
OPTIONS: Any = {"temperature": 0, "num_predict": LENGTH}
SYSTEM = "Be short."


@pytest.fixture(scope="module", params=["llama-server", "vLLM"])
def hive(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    if request.param == "vLLM":
        vllm: VllmServer = request.getfixturevalue("vllm_server")
        with stack(url=vllm.url) as hive:
            hive.create("alice", "idler.py", tier="high")
            yield hive
        return
    with serve(tmp_path_factory.mktemp("any"), template=TEMPLATE) as server, stack(url=server.url) as hive:
        hive.create("alice", "idler.py", tier="high")
        yield hive


@pytest.fixture
def door(hive: Stack) -> Door:
    return door_of(hive, "alice")


@pytest.fixture
def by_ollama(hive: Stack) -> Iterator[ollama.Client]:
    client = ollama.Client(host=hive.get("/api/agents/alice/tokens")["ollama_host"])
    yield client
    client._client.close()


def said_by_openai(door: Door, messages: Any, **more: Any) -> tuple[str, int, int]:
    with door.openai() as client:
        answer = client.chat.completions.create(
            model=MODEL, messages=messages, max_tokens=LENGTH, temperature=0, **more
        )
    assert answer.usage is not None
    return answer.choices[0].message.content or "", answer.usage.prompt_tokens, answer.usage.completion_tokens


@pytest.mark.llama
@pytest.mark.vllm
def test_all_three_say_the_same_and_count_the_same(door: Door, by_ollama: ollama.Client) -> None:
    text, tokens_in, tokens_out = said_by_openai(door, HELLO)
    chat = by_ollama.chat(MODEL, HELLO, options=OPTIONS)
    assert (chat.message.content, chat.prompt_eval_count, chat.eval_count) == (text, tokens_in, tokens_out)
    assert (chat.model, chat.done, chat.done_reason) == (MODEL, True, "length")
    with door.anthropic() as client:
        message = client.messages.create(model=MODEL, messages=HELLO, max_tokens=LENGTH, extra_body={"temperature": 0})
    assert "".join(block.text for block in message.content if block.type == "text") == text
    used = message.usage
    assert (used.input_tokens + (used.cache_read_input_tokens or 0), used.output_tokens) == (tokens_in, tokens_out)


@pytest.mark.llama
@pytest.mark.vllm
def test_a_stream_is_the_same_piece_by_piece(door: Door, by_ollama: ollama.Client) -> None:
    text, tokens_in, tokens_out = said_by_openai(door, HELLO)
    chunks = list(by_ollama.chat(MODEL, HELLO, stream=True, options=OPTIONS))
    assert "".join(chunk.message.content or "" for chunk in chunks) == text
    assert len(chunks) > 2, "it came at once"
    last = chunks[-1]
    assert (last.done, last.prompt_eval_count, last.eval_count) == (True, tokens_in, tokens_out)
    assert (last.total_duration or 0) >= (last.eval_duration or 0) > 0


@pytest.mark.llama
@pytest.mark.vllm
def test_generate_is_a_chat_of_one_turn_with_its_system(door: Door, by_ollama: ollama.Client) -> None:
    system = [{"role": "system", "content": SYSTEM}, *HELLO]
    text, tokens_in, _ = said_by_openai(door, system)
    whole = by_ollama.generate(MODEL, HELLO[0]["content"], system=SYSTEM, options=OPTIONS)
    assert (whole.response, whole.prompt_eval_count) == (text, tokens_in)
    pieces = by_ollama.generate(MODEL, HELLO[0]["content"], system=SYSTEM, options=OPTIONS, stream=True)
    assert "".join(piece.response for piece in pieces) == text


@pytest.mark.llama
@pytest.mark.vllm
def test_a_schema_binds_the_answer_whoever_asks(door: Door, by_ollama: ollama.Client) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
    bound, _, _ = said_by_openai(door, HELLO, response_format=schema)
    free, _, _ = said_by_openai(door, HELLO)
    assert by_ollama.chat(MODEL, HELLO, format=CITY, options=OPTIONS).message.content == bound
    assert bound.lstrip().startswith("{")
    assert bound != free


@pytest.mark.llama
@pytest.mark.vllm
def test_a_conversation_with_a_tool_goes_on(door: Door, by_ollama: ollama.Client) -> None:
    call = {"function": {"name": "look_up", "arguments": {"city": "Paris"}}}
    messages: Any = [
        *HELLO,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_name": "look_up", "content": "The capital of France."},
    ]
    answer = by_ollama.chat(MODEL, messages, tools=TOOLS, options=OPTIONS)
    assert answer.eval_count == LENGTH


@pytest.mark.llama
@pytest.mark.vllm
def test_errors_are_each_packages_own(door: Door, by_ollama: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match="not found") as unknown:
        by_ollama.chat("gpt-9", HELLO)
    assert unknown.value.status_code == 404
    with door.openai() as client, pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-9", messages=HELLO)
    with door.anthropic() as client, pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="gpt-9", messages=HELLO, max_tokens=3)
    too_long = [{"role": "user", "content": "word " * 60_000}]
    for stream in (False, True):
        with pytest.raises(ollama.ResponseError) as refused:
            list(by_ollama.chat(MODEL, too_long, stream=stream))  # type: ignore[call-overload]
        assert refused.value.status_code == 400
        assert refused.value.error


@pytest.mark.llama
@pytest.mark.vllm
def test_what_clients_ask_besides_is_answered(by_ollama: ollama.Client) -> None:
    assert [model.model for model in by_ollama.list().models] == [MODEL]
    assert [model.name for model in by_ollama.ps().models] == [MODEL]
    assert by_ollama.show(MODEL).capabilities == ["completion"]


@pytest.mark.llama
@pytest.mark.vllm
def test_who_leaves_a_translated_stream_frees_the_backend(hive: Stack, by_ollama: ollama.Client) -> None:
    stream = by_ollama.chat(MODEL, HELLO, stream=True, options={"num_predict": 3000})
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    by_ollama._client.close()
    until(lambda: hive.get("/api/agents/alice")["in_flight"] == 0, within_s=5, what="nothing in flight")
