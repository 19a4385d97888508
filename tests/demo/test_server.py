"""The demo backend as a process: the unmodified client packages, and the raw wire."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ollama
import openai
import pytest

from hive.demo.canned import MODEL, answer_words
from hive.demo.server import listen, main
from hive.errors import HiveError, UsageError
from tests.fakes.programs import Program, demo_backend

HELLO = [{"role": "user", "content": "hello there"}]
TEXT = "".join(answer_words("hello there"))
CHAT = b'{"messages":[{"role":"user","content":"hello there"}]}'


@pytest.fixture(scope="module")
def demo() -> Iterator[Program]:
    with demo_backend() as server:
        yield server


@pytest.fixture
def by_ollama(demo: Program) -> Iterator[ollama.Client]:
    client = ollama.Client(demo.url)
    yield client
    client._client.close()


@pytest.fixture
def by_openai(demo: Program) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{demo.url}/v1", api_key="none", max_retries=0) as client:
        yield client


# --- the ollama package ------------------------------------------------------------------------------------------


def test_ollama_lists_and_shows_the_model(by_ollama: ollama.Client) -> None:
    assert [model.model for model in by_ollama.list().models] == [MODEL]
    assert [model.model for model in by_ollama.ps().models] == [MODEL]
    assert "completion" in (by_ollama.show(MODEL).capabilities or ())


def test_ollama_chats_whole_and_streamed_alike(by_ollama: ollama.Client) -> None:
    whole = by_ollama.chat(MODEL, HELLO)
    stream = list(by_ollama.chat(MODEL, HELLO, stream=True))
    assert whole.message.content == TEXT == "".join(part.message.content or "" for part in stream)
    assert whole.eval_count == stream[-1].eval_count == len(stream) - 1 == len(TEXT.split())
    assert whole.prompt_eval_count == stream[-1].prompt_eval_count == 2
    assert (whole.model, whole.done_reason) == (MODEL, "stop")


def test_ollama_generates_whole_and_streamed_alike(by_ollama: ollama.Client) -> None:
    whole = by_ollama.generate(MODEL, "hello there", options={"num_predict": 4})
    stream = list(by_ollama.generate(MODEL, "hello there", stream=True, options={"num_predict": 4}))
    assert whole.response == "".join(part.response or "" for part in stream) == "".join(answer_words("hello there")[:4])
    assert whole.eval_count == stream[-1].eval_count == 4
    assert whole.done_reason == stream[-1].done_reason == "length"


def test_ollama_embeds_one_and_many(by_ollama: ollama.Client) -> None:
    many = by_ollama.embed(MODEL, ["a bee", "a ship"])
    assert len(many.embeddings) == 2
    assert list(by_ollama.embed(MODEL, "a bee").embeddings[0]) == list(many.embeddings[0])
    assert list(by_ollama.embeddings(MODEL, "a bee").embedding) == list(many.embeddings[0])


def test_ollama_is_told_of_a_model_that_is_not_there(by_ollama: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match="demo backend"):
        by_ollama.chat("llama3.2", HELLO)


# --- the openai package ------------------------------------------------------------------------------------------


def test_openai_lists_and_retrieves_the_model(by_openai: openai.OpenAI) -> None:
    assert [model.id for model in by_openai.models.list()] == [MODEL]
    assert by_openai.models.retrieve(MODEL).owned_by == "hive-demo"
    with pytest.raises(openai.NotFoundError):
        by_openai.models.retrieve("meta/llama-3 x")


def test_openai_chats_whole_and_streamed_alike(by_openai: openai.OpenAI) -> None:
    wanted: Any = {"model": MODEL, "messages": HELLO}
    whole = by_openai.chat.completions.create(**wanted)
    *stream, last = by_openai.chat.completions.create(**wanted, stream=True, stream_options={"include_usage": True})
    assert whole.choices[0].message.content == TEXT
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == TEXT
    assert whole.usage == last.usage
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (2, len(TEXT.split()))
    assert (whole.choices[0].finish_reason, stream[-1].choices[0].finish_reason) == ("stop", "stop")


def test_openai_completes(by_openai: openai.OpenAI) -> None:
    found = by_openai.completions.create(model=MODEL, prompt="hello there", max_tokens=3)
    assert found.choices[0].text == "".join(answer_words("hello there")[:3])
    assert found.choices[0].finish_reason == "length"


def test_openai_embeds(by_openai: openai.OpenAI) -> None:
    found = by_openai.embeddings.create(model=MODEL, input=["a bee", "a ship"])
    assert [len(entry.embedding) for entry in found.data] == [64, 64]
    assert found.usage.total_tokens == 4


# --- the wire ----------------------------------------------------------------------------------------------------


def connect(server: Program) -> socket.socket:
    host, _, port = server.address.partition(":")
    if server.address.startswith("/"):
        client = socket.socket(socket.AF_UNIX)
        client.connect(server.address)
    else:
        client = socket.create_connection((host, int(port)))
    client.settimeout(60)
    return client


def post(path: str, body: bytes, *, version: str = "1.1") -> bytes:
    head = f"POST {path} HTTP/{version}\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def read_all(client: socket.socket) -> bytes:
    found = bytearray()
    with contextlib.suppress(ConnectionResetError):
        while data := client.recv(65536):
            found += data
    return bytes(found)


def test_every_answer_names_the_server(demo: Program) -> None:
    for path in ("/", "/api/version", "/nothing"):
        assert demo.get(path).headers["server"] == "hive-demo"


def test_a_head_request_has_the_heads_of_get_and_no_body(demo: Program) -> None:
    with connect(demo) as client:
        client.sendall(b"HEAD /api/version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        head, _, rest = read_all(client).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert f"Content-Length: {len(demo.get('/api/version').content)}".encode() in head
    assert rest == b""


def test_pipelined_requests_are_answered_whole_and_in_order(demo: Program) -> None:
    with connect(demo) as client:
        asked = [post("/api/chat", CHAT), b"GET /api/tags HTTP/1.1\r\nHost: x\r\n\r\n", post("/v1/nope", b"{}")]
        client.sendall(b"".join(asked) + b"GET /api/version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        found = read_all(client)
    assert re.findall(rb"HTTP/1.1 (\d+) ", found) == [b"200", b"200", b"404", b"200"]
    assert found.index(b'"done":true') < found.index(b'"models"') < found.index(b"/v1/nope") < found.index(b'"version"')


def test_more_pipelined_requests_than_anyone_needs_end_the_connection(demo: Program) -> None:
    with connect(demo) as client:
        with contextlib.suppress(ConnectionError):
            client.sendall(post("/api/chat", CHAT) * 40)
        assert read_all(client).count(b'"done":true') < 40


def test_a_request_may_come_in_single_bytes(demo: Program) -> None:
    with connect(demo) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in post("/api/chat", CHAT.replace(b"}]}", b'}],"stream":false}')):
            client.send(bytes([byte]))
        head, _, body = client.recv(65536).partition(b"\r\n\r\n")
    assert head.endswith(b"Content-Length: %d" % len(body))
    assert json.loads(body)["message"]["content"] == TEXT


def test_an_old_client_gets_a_stream_that_ends_with_the_connection(demo: Program) -> None:
    with connect(demo) as client:
        client.sendall(post("/api/chat", CHAT, version="1.0"))
        head, _, body = read_all(client).partition(b"\r\n\r\n")
    assert b"chunked" not in head
    assert b"Connection: close" in head
    assert json.loads(body.splitlines()[-1])["done"] is True


def test_who_expects_a_continue_gets_one(demo: Program) -> None:
    with connect(demo) as client:
        head, _, body = post("/api/chat", CHAT).partition(b"\r\n\r\n")
        client.sendall(head + b"\r\nExpect: 100-continue\r\n\r\n")
        assert client.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.sendall(body)
        assert client.recv(65536).startswith(b"HTTP/1.1 200 OK\r\n")


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"hello\r\n\r\n", b"400"),
        (b"POST /api/chat HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nX: " + b"x" * 70_000 + b"\r\n\r\n", b"431"),
        (b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\n\r\n", b"431"),
    ],
)
def test_what_is_no_request_is_refused_and_the_connection_closed(demo: Program, raw: bytes, status: bytes) -> None:
    with connect(demo) as client:
        client.sendall(raw)
        assert read_all(client).split(b" ")[1] == status
    assert demo.get("/").status_code == 200


def test_it_stops_speaking_when_its_client_leaves(tmp_path: Path) -> None:
    with demo_backend(socket=tmp_path / "d.sock", rate=20) as server:
        with connect(server) as client:
            client.sendall(post("/api/chat", CHAT))
            assert client.recv(1000).startswith(b"HTTP/1.1 200 OK")
        line = server.next_line()
    assert line.startswith("demo_answer_cut parts_unsent=")
    assert int(line.rpartition("=")[2]) > 20  # of the 40 or so that a whole answer has


def test_a_client_that_does_not_read_is_waited_for(tmp_path: Path) -> None:
    with demo_backend(socket=tmp_path / "d.sock", rate=1e6) as server, connect(server) as client:
        client.sendall(post("/api/chat", CHAT) * 16)
        assert server.get("/").status_code == 200  # the others are served meanwhile
        client.shutdown(socket.SHUT_RD)
        assert server.get("/").status_code == 200


# --- its life ----------------------------------------------------------------------------------------------------


def test_sigterm_ends_it_at_once_in_the_middle_of_an_answer(tmp_path: Path) -> None:
    path = tmp_path / "d.sock"
    with demo_backend(socket=path, rate=0.1) as server, connect(server) as client:
        client.sendall(post("/api/chat", CHAT))
        assert client.recv(1000).startswith(b"HTTP/1.1 200 OK")
        assert server.end() == 0
        assert b'"done":true' not in read_all(client)
    assert not path.exists()


def test_it_ends_when_the_pipe_it_watches_ends(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    try:
        with demo_backend(socket=tmp_path / "d.sock", watch_fd=reader) as server:
            os.write(writer, b"still here")
            assert server.get("/").status_code == 200
            os.close(writer)
            assert server.process.wait(60) == 0
    finally:
        os.close(reader)


def test_its_socket_is_for_its_own_user_only(tmp_path: Path) -> None:
    with demo_backend(socket=tmp_path / "d.sock") as server:
        assert stat.S_IMODE(os.stat(server.address).st_mode) == 0o600


def test_as_a_service_its_group_may_ask_and_nobody_else(tmp_path: Path) -> None:
    with listen(socket=tmp_path / "d.sock", shared=True):
        assert stat.S_IMODE(os.stat(tmp_path / "d.sock").st_mode) == 0o660


def test_a_socket_left_by_a_killed_one_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "d.sock"
    with demo_backend(socket=path) as server:
        server.process.kill()
        server.process.wait(60)
        assert path.exists()
    with demo_backend(socket=path) as server:
        assert server.get("/").status_code == 200


def test_a_socket_in_use_or_a_file_in_its_place_is_left_alone(tmp_path: Path) -> None:
    path, file = tmp_path / "d.sock", tmp_path / "file"
    file.write_text("mine")
    with demo_backend(socket=path) as server:
        with pytest.raises(HiveError, match="in use"):
            listen(socket=path)
        with pytest.raises(HiveError, match="in use"):
            listen(socket=file)
        assert server.get("/").status_code == 200
    assert file.read_text() == "mine"


def test_a_taken_port_is_said(demo: Program) -> None:
    with pytest.raises(HiveError, match=demo.address):
        listen(port=int(demo.address.partition(":")[2]))


@pytest.mark.parametrize("arguments", [{}, {"socket": Path("/x"), "port": 1}, {"port": 0, "tokens_per_s": 0}])
def test_arguments_that_make_no_sense_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        main(**arguments)
