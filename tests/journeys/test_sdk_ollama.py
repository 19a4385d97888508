"""The real `ollama` package through a whole Hive, on a stand-in: no Ollama server can be had from the registries."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import ollama
import openai
import pytest

from tests.fakes.programs import Program, fake_backend
from tests.journeys.stack import Stack, stack, until

pytestmark = pytest.mark.redis
HELLO: Any = [{"role": "user", "content": "Hello, how are you today?"}]
TOOLS: Any = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}]
MODEL = "tiny"


@pytest.fixture(scope="module")
def stand_in() -> Iterator[Program]:
    with fake_backend("ollama", "--tokens", "40", "--token-delay", "0.02") as backend:
        yield backend


@pytest.fixture(scope="module")
def hive(stand_in: Program) -> Iterator[Stack]:
    with stack(url=stand_in.url) as hive:
        hive.create("alice", "idler.py", tier="high")
        yield hive


@pytest.fixture(params=["direct", "through Hive"])
def host(request: pytest.FixtureRequest, hive: Stack, stand_in: Program) -> str:
    through: str = hive.get("/api/agents/alice/tokens")["ollama_host"]
    return stand_in.url if request.param == "direct" else through


@pytest.fixture
def client(host: str) -> Iterator[ollama.Client]:
    client = ollama.Client(host=host)
    yield client
    client._client.close()


def test_it_chats_streams_generates_and_embeds(client: ollama.Client) -> None:
    wanted: Any = {"model": MODEL, "messages": HELLO, "options": {"num_predict": 7, "temperature": 0}}
    whole = client.chat(**wanted, tools=TOOLS)
    chunks = list(client.chat(**wanted, stream=True))
    assert "".join(chunk.message.content or "" for chunk in chunks) == whole.message.content
    assert (chunks[-1].done, chunks[-1].eval_count, whole.eval_count) == (True, 7, 7)
    generated = client.generate(model=MODEL, prompt="Hello", options={"num_predict": 3})
    assert (generated.done, generated.eval_count) == (True, 3)
    assert len(client.embed(model=MODEL, input=["a", "b"]).embeddings) == 2
    assert [model.model for model in client.list().models] == [MODEL]
    assert client.show(MODEL).capabilities == ["completion", "tools"]


def test_it_raises_the_backends_own_error(client: ollama.Client) -> None:
    for stream in (False, True):
        with pytest.raises(ollama.ResponseError, match="model 'nope' not found") as refused:
            list(client.chat(model="nope", messages=HELLO, stream=stream))
        assert refused.value.status_code == 404


def test_what_a_model_cannot_is_told_in_the_backends_own_words(client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match='"tiny" does not support thinking') as refused:
        client.chat(model=MODEL, messages=HELLO, think=True)
    assert refused.value.status_code == 400
    with pytest.raises(ollama.ResponseError) as blind:
        client.chat(model=MODEL, messages=[{"role": "user", "content": "", "images": [b"hi"]}])
    assert "image input is not supported" in json.loads(blind.value.error)["error"]["message"]


def test_what_might_become_a_call_comes_with_the_end(client: ollama.Client) -> None:
    (last,) = client.chat(model=MODEL, messages=HELLO, tools=TOOLS, stream=True)
    assert (last.done, bool(last.message.content)) == (True, True)


def test_a_runner_that_dies_is_an_error_and_no_clean_end() -> None:
    """Before OpenAI's clients Ollama itself ends such a stream as if it were whole."""
    with fake_backend("ollama", "--error-mid-stream", "3") as dying, stack(url=dying.url) as hive:
        access = hive.post("/api/agents", {"name": "bob", "runtime": "external"}) and hive.get("/api/agents/bob/tokens")
        own = ollama.Client(host=access["ollama_host"])
        with pytest.raises(ollama.ResponseError, match="unexpected EOF"):
            list(own.chat(model=MODEL, messages=HELLO, stream=True))
        own._client.close()
        openais = openai.OpenAI(base_url=access["openai_base_url"], api_key=access["model"], max_retries=0)
        with openais, pytest.raises((openai.APIError, httpx.RemoteProtocolError)):
            list(openais.chat.completions.create(model=MODEL, messages=HELLO, stream=True))


def test_loading_and_pulling_are_hives_to_answer(hive: Stack, stand_in: Program) -> None:
    """The first questions of `ollama run`: `show`, then a prompt that is empty."""
    client = ollama.Client(host=hive.get("/api/agents/alice/tokens")["ollama_host"])
    before = stand_in.stats()["begun"]
    assert client.generate(MODEL).done_reason == "load"
    assert client.chat(MODEL, keep_alive=0).done_reason == "unload"
    assert [part.status for part in client.pull(MODEL, stream=True)] == ["success"]
    with pytest.raises(ollama.ResponseError, match="agents fetch no models") as refused:
        client.pull("llama3.2")
    assert refused.value.status_code == 403
    with pytest.raises(ollama.ResponseError, match="not offered to agents"):
        client.push(MODEL)
    client._client.close()
    assert stand_in.stats()["begun"] == before


async def test_who_leaves_a_stream_frees_the_backend(hive: Stack, stand_in: Program) -> None:
    client = ollama.AsyncClient(host=hive.get("/api/agents/alice/tokens")["ollama_host"])
    before = stand_in.stats()["cancelled"]
    stream = await client.chat(model=MODEL, messages=HELLO, stream=True)
    first = await anext(aiter(stream))
    assert first.message.content
    await stream.aclose()  # type: ignore[attr-defined]
    await client._client.aclose()
    until(lambda: stand_in.stats()["cancelled"] == before + 1, within_s=5, what="the stand-in was left")


def test_an_anthropic_count_of_tokens_is_estimated_because_ollama_has_none(hive: Stack) -> None:
    access = hive.get("/api/agents/alice/tokens")
    told = httpx.post(
        access["openai_base_url"] + "/messages/count_tokens",
        json={"model": MODEL, "messages": HELLO},
        headers={"x-api-key": access["model"]},
        trust_env=False,
    )
    assert (told.status_code, told.headers["x-hive-estimated"], told.json()["estimated"]) == (200, "true", True)
    assert told.json()["input_tokens"] > 0
