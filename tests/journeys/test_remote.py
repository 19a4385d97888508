"""A remote server as the backend: a real llama-server behind a real nginx with TLS, a path and a key."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import ollama
import openai
import psutil
import pytest

from tests.journeys.sdk import HELLO, Door, door_of
from tests.journeys.stack import Stack, stack, until
from tests.llama import MODEL, LlamaServer
from tests.tls_front import KEY, Front, front, key_file

pytestmark = [pytest.mark.redis, pytest.mark.llama]
LENGTH = 12
OPTIONS: Any = {"temperature": 0, "num_predict": LENGTH}


@pytest.fixture(scope="module")
def remote(llama_server: LlamaServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    with front(tmp_path_factory.mktemp("nginx"), llama_server.address) as found:
        yield found


@pytest.fixture(scope="module")
def hive(remote: Front, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """It begins with the demo backend and is switched to the remote one."""
    key = key_file(tmp_path_factory.mktemp("key"))
    with stack(config=f"backend_ca_file = {remote.ca}\nbackend_api_key_file = {key}\n") as hive:
        job = hive.post("/api/system/inference", {"backend": remote.url})
        until(lambda: hive.get(f"/api/jobs/{job['id']}")["state"] == "done", within_s=20, what="switched")
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


def test_it_is_listed_as_remote_and_its_key_is_told_nowhere(hive: Stack, remote: Front) -> None:
    listed = hive.get("/api/system/backends")
    (in_use,) = [backend for backend in listed["backends"] if backend["in_use"]]
    address = remote.url.removesuffix("/v1")
    assert (in_use["backend"], in_use["address"], in_use["answers"]) == ("remote", address, True)
    inference = hive.get("/api/system/inference")
    assert (inference["backend"], inference["running"]) == ("remote", True)
    (switched,) = [row for row in hive.get("/api/audit")["rows"] if row["act"] == "backend.switched"]
    assert "version" in switched["detail"]
    told = [str(listed), str(inference), str(switched), hive.log, str(hive.get("/api/config")), str(hive.health())]
    assert hive.process is not None
    processes = [psutil.Process(hive.process.pid), *psutil.Process(hive.process.pid).children(recursive=True)]
    told += [str(process.cmdline()) for process in processes]
    told += [path.read_bytes().decode(errors="replace") for path in hive.state.rglob("*") if path.is_file()]
    assert not [text[:200] for text in told if KEY in text]


def test_the_openai_package_gets_a_whole_answer_and_a_stream(door: Door) -> None:
    with door.openai() as client:
        whole = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=LENGTH, temperature=0)
        events = list(
            client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=LENGTH, temperature=0, stream=True)
        )
        assert whole.usage is not None
        assert whole.usage.completion_tokens == LENGTH
        assert len(events) > 2, "it came at once"
        assert "".join(event.choices[0].delta.content or "" for event in events) == whole.choices[0].message.content
        assert client.models.list().data[0].id == MODEL


def test_the_ollama_package_gets_a_whole_answer_and_a_stream(by_ollama: ollama.Client) -> None:
    whole = by_ollama.chat(MODEL, HELLO, options=OPTIONS)
    chunks = list(by_ollama.chat(MODEL, HELLO, stream=True, options=OPTIONS))
    assert whole.eval_count == LENGTH
    assert "".join(chunk.message.content or "" for chunk in chunks) == whole.message.content
    assert by_ollama.generate(MODEL, HELLO[0]["content"], options=OPTIONS).response == whole.message.content


def test_the_anthropic_package_gets_a_whole_answer_and_a_stream(door: Door) -> None:
    asked: Any = {"model": MODEL, "messages": HELLO, "max_tokens": LENGTH, "extra_body": {"temperature": 0}}
    with door.anthropic() as client:
        whole = client.messages.create(**asked)
        with client.messages.stream(**asked) as stream:
            streamed = "".join(stream.text_stream)
    assert whole.usage.output_tokens == LENGTH
    assert streamed == "".join(block.text for block in whole.content if block.type == "text")


def test_what_openais_schema_has_no_word_for_is_refused_with_the_reason(door: Door, by_ollama: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match=r"options\.top_k.*OpenAI's schema alone") as refused:
        by_ollama.chat(MODEL, HELLO, options={"top_k": 3})
    assert refused.value.status_code == 501
    prefill: Any = [*HELLO, {"role": "assistant", "content": "I"}]
    with door.anthropic() as client, pytest.raises(anthropic.APIStatusError, match="last message"):
        client.messages.create(model=MODEL, messages=prefill, max_tokens=4)
    options = {"top_k": 0, "num_predict": 4}
    answer = door.post("/api/chat", {"model": MODEL, "messages": HELLO, "stream": False, "options": options})
    assert (answer.status_code, answer.headers["x-hive-dropped"]) == (200, "options.top_k")


def test_its_own_refusal_comes_with_its_own_words(door: Door) -> None:
    with door.openai() as client, pytest.raises(openai.APIStatusError, match="does not support embeddings"):
        client.embeddings.create(model=MODEL, input="hi")


def test_a_key_that_is_wrong_is_hives_fault_and_shown_to_nobody(
    remote: Front, hive: Stack, door: Door, tmp_path: Path
) -> None:
    """Last of this file: nginx says the key in its own words, which no agent reads."""
    key = Path(hive.state.parent / "hive.conf").read_text().partition("backend_api_key_file = ")[2].split()[0]
    Path(key).write_text("sk-wrong\n")
    os.kill(hive.pid_of("proxy"), signal.SIGHUP)
    until(lambda: door.post("/v1/chat/completions", ASKED).status_code != 200, within_s=5, what="the wrong key")
    answer = door.post("/v1/chat/completions", ASKED)
    assert answer.status_code == 502
    assert "does not accept the key" in answer.text
    assert "sk-" not in answer.text
    Path(key).write_text(f"{KEY}\n")
    os.kill(hive.pid_of("proxy"), signal.SIGHUP)
    until(lambda: door.post("/v1/chat/completions", ASKED).status_code == 200, within_s=5, what="the right key")


ASKED: Any = {"model": MODEL, "messages": HELLO, "max_tokens": 1}
