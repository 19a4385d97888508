"""The fake backend is what it stands for: shapes the real clients take, counts that add up, faults as ordered."""

from __future__ import annotations

import contextlib
import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ollama
import openai
import pytest

from tests.fakes.programs import Program, fake_backend

HELLO: Any = [{"role": "user", "content": "hello there"}]
KINDS = ["ollama", "vllm", "llama"]


def openai_client(server: Program) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@contextlib.contextmanager
def ollama_client(server: Program) -> Iterator[ollama.Client]:
    client = ollama.Client(server.url)
    yield client
    client._client.close()


def exchange(server: Program, *requests: bytes, until: bytes = b"") -> bytes:
    """Answers to raw requests, up to `until` or the end of the connection."""
    host, _, port = server.address.partition(":")
    found = bytearray()
    with socket.create_connection((host, int(port)), timeout=20) as client:
        client.sendall(b"".join(requests))
        with contextlib.suppress(ConnectionResetError):
            while data := client.recv(65536):
                found += data
                if until and until in found:
                    break
    return bytes(found)


def post(path: str, body: dict[str, Any], *fields: str) -> bytes:
    raw = json.dumps({"model": "tiny", **body}).encode()
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(raw)}", *fields]
    return "\r\n".join([*lines, "", ""]).encode() + raw


CHAT = {"messages": HELLO, "stream": True}
PATHS = {"ollama": "/api/chat", "vllm": "/v1/chat/completions", "llama": "/v1/chat/completions"}


@pytest.mark.parametrize("kind", KINDS)
def test_the_openai_package_takes_its_answers(kind: str) -> None:
    with fake_backend(kind, "--tokens", "9") as server, openai_client(server) as client:
        assert [model.id for model in client.models.list()] == ["tiny"]
        whole = client.chat.completions.create(model="tiny", messages=HELLO)
        options: Any = {"include_usage": True}
        stream = list(client.chat.completions.create(model="tiny", messages=HELLO, stream=True, stream_options=options))
        silent = list(client.chat.completions.create(model="tiny", messages=HELLO, stream=True))
        stats = server.stats()
    text = "".join(choice.delta.content or "" for chunk in stream for choice in chunk.choices)
    assert whole.choices[0].message.content == text
    assert stream[-1].usage is not None
    assert whole.usage is not None
    assert (stream[-1].usage.prompt_tokens, stream[-1].usage.completion_tokens) == (10, 9)
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (10, 9)
    assert all(chunk.usage is None for chunk in silent)
    assert (stats["begun"], stats["whole"], stats["tokens_in"], stats["tokens_out"]) == (3, 3, 30, 27)


def test_the_ollama_package_takes_its_answers() -> None:
    with fake_backend("ollama") as server, ollama_client(server) as client:
        assert [model.model for model in client.list().models] == ["tiny"]
        stream = list(client.chat("tiny", HELLO, stream=True, options={"num_predict": 5}))
        whole = client.generate("tiny", "hello there", options={"num_predict": 5})
        assert len(client.embed("tiny", ["a", "b"]).embeddings) == 2
        assert client.show("tiny").capabilities == ["completion", "tools"]
        with pytest.raises(ollama.ResponseError, match="not found"):
            client.chat("other", HELLO)
    assert "".join(part.message.content or "" for part in stream) == whole.response
    assert (stream[-1].prompt_eval_count, stream[-1].eval_count, stream[-1].done_reason) == (10, 5, "length")
    assert (whole.prompt_eval_count, whole.eval_count) == (10, 5)


def test_llama_puts_two_events_into_its_first_chunk_and_timings_into_its_last() -> None:
    with fake_backend("llama", "--tokens", "3") as server:
        found = exchange(server, post("/v1/chat/completions", CHAT), until=b"\r\n0\r\n\r\n")
        with_usage = {**CHAT, "stream_options": {"include_usage": True}}
        asked = exchange(server, post("/v1/chat/completions", with_usage), until=b"\r\n0\r\n\r\n")
    chunks = re.split(rb"\r\n[0-9a-f]+\r\n", found.partition(b"\r\n\r\n")[2])
    assert chunks[0].count(b"data: ") == 2
    last = [json.loads(line[6:]) for line in found.splitlines() if line.startswith(b'data: {"')][-1]
    assert (last["timings"]["cache_n"] + last["timings"]["prompt_n"], last["timings"]["predicted_n"]) == (10, 3)
    assert "usage" not in last
    moved = [json.loads(line[6:]) for line in asked.splitlines() if line.startswith(b'data: {"')][-1]
    assert moved["choices"] == []
    assert {"usage", "timings"} <= moved.keys()


def test_llama_closes_after_a_hundred_requests_and_after_an_error() -> None:
    with fake_backend("llama") as server:
        found = exchange(server, post("/v1/chat/completions", {"messages": HELLO}) * 120)
        assert len(re.findall(rb"HTTP/1.1 200", found)) == 100
        assert found.count(b"Connection: close") == 1
        assert exchange(server, b"GET /nope HTTP/1.1\r\nHost: localhost\r\n\r\n").startswith(b"HTTP/1.1 404 ")


@pytest.mark.parametrize(("kind", "status"), [("ollama", 400), ("vllm", 400), ("llama", 500)])
def test_broken_json_is_refused_as_each_kind_does(kind: str, status: int) -> None:
    with fake_backend(kind) as server:
        raw = f"POST {PATHS[kind]} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 1\r\n\r\n{{"
        found = exchange(server, raw.encode())
        assert server.stats()["tokens_out"] == 0
    assert found.startswith(b"HTTP/1.1 %d " % status)
    assert b"error" in found


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_that_dies_has_no_end(kind: str) -> None:
    with fake_backend(kind, "--die-mid-stream", "4") as server:
        found = exchange(server, post(PATHS[kind], CHAT))
        stats = server.stats()
    assert found.startswith(b"HTTP/1.1 200 ")
    assert not found.endswith(b"0\r\n\r\n")
    assert len(re.findall(rb"\r\n[0-9a-f]{2,}\r\n", found)) == 4
    assert (stats["begun"], stats["whole"], stats["cancelled"], stats["tokens_out"]) == (1, 0, 1, 0)


def test_a_whole_answer_that_dies_stops_in_its_middle() -> None:
    with fake_backend("vllm", "--die-mid-stream", "1") as server:
        found = exchange(server, post(PATHS["vllm"], {"messages": HELLO}))
    head, _, body = found.partition(b"\r\n\r\n")
    assert 0 < len(body) < int(head.rpartition(b"content-length: ")[2])


@pytest.mark.parametrize("kind", KINDS)
def test_without_end_marker_the_chunks_end_and_the_dialect_does_not(kind: str) -> None:
    with fake_backend(kind, "--no-end-marker") as server:
        found = exchange(server, post(PATHS[kind], CHAT, "Connection: close"))
    assert found.endswith(b"0\r\n\r\n")
    assert b"[DONE]" not in found
    assert b'"done":true' not in found


def test_vllms_dead_engine_ends_its_stream_cleanly() -> None:
    with fake_backend("vllm", "--error-mid-stream", "3") as server:
        found = exchange(server, post(PATHS["vllm"], CHAT, "Connection: close"))
    lines = [line for line in found.splitlines() if line.startswith(b"data: ")]
    assert json.loads(lines[3][6:])["error"]["code"] == 500
    assert lines[4:] == [b"data: [DONE]"]
    assert found.endswith(b"0\r\n\r\n")


def test_who_leaves_a_stalled_stream_is_counted_as_cancelled() -> None:
    with fake_backend("ollama", "--stall-after", "2") as server:
        found = exchange(server, post("/api/chat", CHAT), until=b'bee"')
        assert b'"done":true' not in found
        while server.stats()["cancelled"] == 0:  # the fake learns of it when the kernel tells
            pass
        assert server.stats()["whole"] == 0


def test_a_bad_head_is_bad() -> None:
    with (
        fake_backend("vllm", "--bad-head") as server,
        openai_client(server) as client,
        pytest.raises(openai.APIConnectionError),
    ):
        client.chat.completions.create(model="tiny", messages=HELLO)


def test_slow_and_busy_are_what_they_say() -> None:
    with fake_backend("llama", "--slow-head", "0.05", "--slow-first", "0.05", "--token-delay", "0.001") as server:
        found = exchange(server, post(PATHS["llama"], CHAT), until=b"\r\n0\r\n\r\n")
        assert found.count(b"[DONE]") == 1
    with fake_backend("llama", "--busy") as server:
        assert exchange(server, post(PATHS["llama"], CHAT)).startswith(b"HTTP/1.1 503 ")


def test_answers_are_listed_by_the_id_of_their_request() -> None:
    with fake_backend("vllm", "--record", "--spread", "5", "--seed", "3") as server:
        exchange(server, post(PATHS["vllm"], CHAT, "X-Fake-Id: mine", "Connection: close"))
        found = exchange(server, post(PATHS["vllm"], {"messages": HELLO}, "Connection: close"))
        stats = server.stats()
    number = json.loads(found.partition(b"\r\n\r\n")[2])["id"].removeprefix("chatcmpl-")
    assert stats["by_id"].keys() == {"mine", number}
    assert sum(told["tokens_out"] for told in stats["by_id"].values()) == stats["tokens_out"]
    assert {told["outcome"] for told in stats["by_id"].values()} == {"whole"}


def test_the_same_seed_gives_the_same_answers_and_another_gives_others() -> None:
    def answers(seed: str) -> list[Any]:
        with fake_backend("vllm", "--spread", "9", "--seed", seed) as server, openai_client(server) as client:
            found = [client.chat.completions.create(model="tiny", messages=HELLO) for _ in range(4)]
        return [(answer.choices[0].message.content, answer.usage) for answer in found]

    assert answers("1") == answers("1")
    assert answers("1") != answers("2")


def test_it_serves_on_a_unix_socket(tmp_path: Path) -> None:
    with fake_backend("llama", socket=tmp_path / "f.sock") as server:
        assert server.get("/props").json()["build_info"] == "b1-0c1e570"
