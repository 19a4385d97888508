"""Unmodified client packages through a whole Hive: `openai` on a real llama-server, `ollama` on a stand-in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ollama
import openai
import pytest

from tests.fakes.programs import Program, fake_backend
from tests.journeys.stack import Stack, stack, until
from tests.llama import MODEL

MESSAGES: Any = [{"role": "user", "content": "Hello, how are you today?"}]


def totals(hive: Stack, name: str) -> tuple[int, int]:
    """(tokens in, tokens out) as `hive usage` tells them."""
    got = hive.get(f"/api/agents/{name}/usage", period="1h")["totals"]
    return got["tokensIn"], got["tokensOut"]


@pytest.fixture
def on_llama(llama_server: Any) -> Iterator[Stack]:
    with stack(url=llama_server.url) as hive:
        hive.create("alice", "idler.py", start=False)
        hive.create("bob", "idler.py", start=False)
        for name in ("alice", "bob"):
            hive.post(f"/api/agents/{name}/start")
        yield hive


@pytest.mark.redis
@pytest.mark.llama
def test_the_openai_package_chats_streams_and_lists_on_a_real_llama_server(on_llama: Stack) -> None:
    hive = on_llama
    access = hive.get("/api/agents/alice/tokens")
    client = openai.OpenAI(base_url=access["openai_base_url"], api_key=access["model"], max_retries=0)
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    expected_in = expected_out = 0
    for _ in range(3):
        answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=7)
        assert answer.choices[0].message.content
        assert answer.usage is not None
        expected_in += answer.usage.prompt_tokens
        expected_out += answer.usage.completion_tokens
    text, told = "", None
    for event in client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=20, stream=True, stream_options={"include_usage": True}
    ):
        text += (event.choices[0].delta.content or "") if event.choices else ""
        told = event.usage or told
    assert text
    assert told is not None
    expected_in += told.prompt_tokens
    expected_out += told.completion_tokens
    # without include_usage the client is told nothing, and llama-server's timings are counted all the same
    events = list(client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=11, stream=True))
    assert all(event.usage is None for event in events)
    expected_in += told.prompt_tokens
    expected_out += 11
    with pytest.raises(openai.PermissionDeniedError):
        client.files.list()
    client.close()
    until(lambda: totals(hive, "alice") == (expected_in, expected_out), within_s=10, what="the sums agree")
    assert totals(hive, "bob") == (0, 0)


@pytest.mark.redis
@pytest.mark.llama
def test_what_the_backend_refuses_reaches_the_client_as_its_own_error(on_llama: Stack) -> None:
    access = on_llama.get("/api/agents/alice/tokens")
    client = openai.OpenAI(base_url=access["openai_base_url"], api_key=access["model"], max_retries=0)
    with pytest.raises(openai.BadRequestError, match="context"):
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "word " * 20_000}])
    client.close()
    stranger = openai.OpenAI(base_url=access["openai_base_url"], api_key="hm_nobody", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        stranger.models.list()
    stranger.close()


@pytest.fixture
def stand_in() -> Iterator[Program]:
    with fake_backend("ollama") as backend:
        yield backend


@pytest.mark.redis
def test_the_ollama_package_works_on_an_ollama_speaking_stand_in(stand_in: Program) -> None:
    """A stand-in: no Ollama server can be had from the package registries."""
    with stack(url=stand_in.url) as hive:
        hive.create("alice", "idler.py")
        client = ollama.Client(host=hive.get("/api/agents/alice/tokens")["ollama_host"])
        model = client.list().models[0].model
        assert model is not None
        expected_in = expected_out = 0
        answer = client.chat(model=model, messages=MESSAGES)
        expected_in += answer.prompt_eval_count or 0
        expected_out += answer.eval_count or 0
        last = list(client.chat(model=model, messages=MESSAGES, stream=True))[-1]
        assert last.done
        expected_in += last.prompt_eval_count or 0
        expected_out += last.eval_count or 0
        generated = client.generate(model=model, prompt="Hello")
        expected_in += generated.prompt_eval_count or 0
        expected_out += generated.eval_count or 0
        embedded = client.embed(model=model, input="Hello")
        expected_in += embedded.prompt_eval_count or 0
        with pytest.raises(ollama.ResponseError):
            client.pull("llama3.2")
        until(
            lambda: totals(hive, "alice") == (expected_in, expected_out),
            within_s=10,
            what=f"{expected_in, expected_out}",
        )
        client._client.close()
