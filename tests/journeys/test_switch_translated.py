"""`hive backend switch` in the middle of a conversation: who talks in another dialect than the new one goes on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import anthropic
import ollama
import pytest

from tests import llama
from tests.journeys.sdk import Door, door_of
from tests.journeys.stack import Stack, stack
from tests.journeys.test_switch import QUICK, in_use, switch
from tests.llama import LlamaServer

pytestmark = [pytest.mark.redis, pytest.mark.llama]
MODEL = "hive-demo"
"""The demo backend's; the llama-server offers its own under that name too, so that no client has to change."""
CANNED = "[hive-demo]"
LENGTH = 8


class Talk(Protocol):
    """One conversation of one client, that remembers what was said."""

    messages: list[Any]

    def turn(self, words: str) -> str:
        """The answer, as a stream."""

    def close(self) -> None: ...


class ByOllama:
    def __init__(self, host: str) -> None:
        self.messages: list[Any] = []
        self._client = ollama.Client(host=host)

    def turn(self, words: str) -> str:
        self.messages.append({"role": "user", "content": words})
        options = {"temperature": 0, "num_predict": LENGTH}
        chunks = list(self._client.chat(MODEL, self.messages, stream=True, options=options))
        text = "".join(chunk.message.content or "" for chunk in chunks)
        self.messages.append({"role": "assistant", "content": text})
        last = chunks[-1]
        told = (last.done, last.done_reason, last.model, last.eval_count)
        assert told == (True, "length", MODEL, LENGTH)
        return text

    def close(self) -> None:
        self._client._client.close()


class ByAnthropic:
    def __init__(self, client: anthropic.Anthropic) -> None:
        self.messages: list[Any] = []
        self._client = client

    def turn(self, words: str) -> str:
        self.messages.append({"role": "user", "content": words})
        more = {"temperature": 0}
        with self._client.messages.stream(
            model=MODEL, messages=self.messages, max_tokens=LENGTH, extra_body=more
        ) as stream:
            text = "".join(stream.text_stream)
            last = stream.get_final_message()
        self.messages.append({"role": "assistant", "content": text})
        assert (last.stop_reason, last.model, last.usage.output_tokens) == ("max_tokens", MODEL, LENGTH)
        return text

    def close(self) -> None:
        self._client.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LlamaServer]:
    with llama.serve(tmp_path, more=["--alias", MODEL]) as server:
        yield server


@pytest.fixture
def hive() -> Iterator[Stack]:
    with stack(config=QUICK) as hive:
        hive.post("/api/agents", {"name": "alice", "runtime": "external", "tier": "high"})
        yield hive


@pytest.fixture
def talks(hive: Stack) -> Iterator[list[Talk]]:
    door = door_of(hive, "alice")
    by_anthropic = anthropic.Anthropic(base_url=door.root, api_key=door.token, max_retries=0, timeout=60)
    talks: list[Talk] = [ByOllama(hive.get("/api/agents/alice/tokens")["ollama_host"]), ByAnthropic(by_anthropic)]
    yield talks
    for talk in talks:
        talk.close()


@pytest.mark.wide
def test_the_next_turn_of_a_conversation_is_answered_by_the_new_backend_and_back(
    hive: Stack, server: LlamaServer, talks: list[Talk]
) -> None:
    """The demo backend speaks Ollama's dialect and not Anthropic's, llama-server the other way round: each client is
    relayed at one of them and translated at the other. It keeps its connection and its words."""
    demo = in_use(hive)
    for talk in talks:
        assert talk.turn("Hello.").startswith(CANNED)
    assert switch(hive, server.url).returncode == 0
    for talk in talks:
        for words in ("How are you today?", "And now?"):
            answer = talk.turn(words)
            assert answer == _directly(server, talk.messages[:-1])
            assert not answer.startswith(CANNED)
    assert switch(hive, "demo").returncode == 0
    assert in_use(hive) == demo
    for talk in talks:
        assert talk.turn("Who is there?").startswith(CANNED)
        assert len(talk.messages) == 8


def _directly(server: LlamaServer, messages: list[Any]) -> str:
    """The server's words on the whole conversation, asked by itself in its own dialect."""
    with Door(server.url, "none").openai() as client:
        found = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=LENGTH, temperature=0)
    return found.choices[0].message.content or ""
