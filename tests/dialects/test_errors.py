"""Hive's errors and heartbeats, read by the real packages of each dialect."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import anthropic
import msgspec
import ollama
import openai
import pytest

from hive.dialects.errors import as_event, error_fields, heartbeat, render
from hive.domain import Dialect
from hive.errors import (
    BackendDown,
    BackendTimeout,
    BadRequest,
    HiveError,
    NotFound,
    QueueFull,
    Refusal,
    StreamIncomplete,
    TooLarge,
    TooManyRequests,
    Unauthorized,
)

HELLO: Any = [{"role": "user", "content": "hello"}]
SSE, NDJSON = b"text/event-stream", b"application/x-ndjson"
OPENAI_CHUNK = (
    b'data: {"id":"c","object":"chat.completion.chunk","created":0,"model":"m","choices":[{"index":0,"delta":'
    b'{"role":"assistant","content":"hi"},"finish_reason":null}]}\n\n'
)
MESSAGE_START = (
    b'event: message_start\ndata: {"type":"message_start","message":{"id":"msg_1","type":"message","role":"assistant",'
    b'"content":[],"model":"m","stop_reason":null,"stop_sequence":null,"usage":{"input_tokens":1,"output_tokens":0}}}\n\n'
)
MESSAGE_STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'


@contextlib.contextmanager
def answering(answer: bytes) -> Iterator[str]:
    """A server that gives the same bytes to every connection, once; its URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=_answer, args=(listener, answer), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(5)


def _answer(listener: socket.socket, answer: bytes) -> None:
    with contextlib.suppress(OSError):
        while True:
            sock, _ = listener.accept()
            with sock:
                asked = b""
                while b"\r\n\r\n" not in asked:
                    asked += sock.recv(65536)
                sock.sendall(answer)
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(65536):
                    pass


def stream_of(kind: bytes, *events: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\nconnection: close\r\n\r\n" % kind + b"".join(events)


def answer_of(error: HiveError, dialect: Dialect) -> bytes:
    body = render(error, dialect, "e-7")
    head = b"HTTP/1.1 %d Refused\r\ncontent-type: application/json\r\ncontent-length: %d\r\n%bconnection: close\r\n\r\n"
    return head % (error.status, len(body), error_fields(error)) + body


ANTHROPIC_ERRORS = [
    (BadRequest("malformed"), anthropic.BadRequestError, "invalid_request_error"),
    (Unauthorized("no token"), anthropic.AuthenticationError, "authentication_error"),
    (Refusal("not yours"), anthropic.PermissionDeniedError, "permission_error"),
    (NotFound("no model"), anthropic.NotFoundError, "not_found_error"),
    (TooLarge("16 MiB"), anthropic.RequestTooLargeError, "request_too_large"),
    (TooManyRequests("slow down", retry_after_s=1), anthropic.RateLimitError, "rate_limit_error"),
    (QueueFull("full", retry_after_s=1), anthropic.ServiceUnavailableError, "overloaded_error"),
    (BackendDown("gone"), anthropic.InternalServerError, "api_error"),
    (BackendTimeout("late"), anthropic.DeadlineExceededError, "timeout_error"),
]


@pytest.mark.parametrize(("error", "expected", "kind"), ANTHROPIC_ERRORS)
def test_the_anthropic_package_raises_its_own_error(
    error: HiveError, expected: type[anthropic.APIStatusError], kind: str
) -> None:
    with (
        answering(answer_of(error, Dialect.ANTHROPIC)) as url,
        anthropic.Anthropic(base_url=url, api_key="k", max_retries=0) as client,
        pytest.raises(expected) as raised,
    ):
        client.messages.create(model="m", max_tokens=1, messages=HELLO)
    assert raised.value.status_code == error.status
    body: Any = raised.value.body
    assert body["type"] == "error"
    assert (body["error"]["type"], body["error"]["src"], body["error"]["code"]) == (kind, "hive", error.code)
    assert body["request_id"] == "e-7"


def test_numbers_of_an_error_are_in_its_object_in_every_dialect() -> None:
    error = QueueFull("full", details={"queue_position": 3})
    assert msgspec.json.decode(render(error, Dialect.OLLAMA))["queue_position"] == 3
    for dialect in (Dialect.OPENAI, Dialect.ANTHROPIC):
        assert msgspec.json.decode(render(error, dialect))["error"]["queue_position"] == 3


def test_the_openai_package_skips_heartbeats_and_raises_what_ends_a_stream() -> None:
    beat = heartbeat(Dialect.OPENAI, b"/v1/chat/completions", "m")
    error = as_event(render(StreamIncomplete("it broke off"), Dialect.OPENAI), Dialect.OPENAI)
    texts: list[str | None] = []
    with (
        answering(stream_of(SSE, beat, OPENAI_CHUNK, beat, error)) as url,
        openai.OpenAI(base_url=url, api_key="k", max_retries=0) as client,
        pytest.raises(openai.APIError, match="it broke off") as raised,
    ):
        texts.extend(
            chunk.choices[0].delta.content
            for chunk in client.chat.completions.create(model="m", messages=HELLO, stream=True)
        )
    assert texts == ["hi"]
    assert raised.value.code == "stream_incomplete"


def test_the_anthropic_package_skips_heartbeats_and_raises_what_ends_a_stream() -> None:
    beat = heartbeat(Dialect.ANTHROPIC, b"/v1/messages", "m")
    error = as_event(render(StreamIncomplete("it broke off"), Dialect.ANTHROPIC, "e-7"), Dialect.ANTHROPIC)
    kinds: list[str] = []
    with (
        answering(stream_of(SSE, beat, MESSAGE_START, beat, error)) as url,
        anthropic.Anthropic(base_url=url, api_key="k", max_retries=0) as client,
        pytest.raises(anthropic.APIStatusError, match="it broke off"),
    ):
        kinds.extend(
            event.type for event in client.messages.create(model="m", max_tokens=1, messages=HELLO, stream=True)
        )
    assert kinds == ["message_start"]


def test_the_anthropic_package_takes_a_stream_with_heartbeats_for_whole() -> None:
    beat = heartbeat(Dialect.ANTHROPIC, b"/v1/messages", "m")
    with (
        answering(stream_of(SSE, beat, beat, MESSAGE_START, beat, MESSAGE_STOP)) as url,
        anthropic.Anthropic(base_url=url, api_key="k", max_retries=0) as client,
    ):
        stream = client.messages.create(model="m", max_tokens=1, messages=HELLO, stream=True)
        assert [event.type for event in stream] == ["message_start", "message_stop"]


@pytest.mark.parametrize("target", [b"/api/chat", b"/api/generate"])
def test_the_ollama_package_takes_heartbeats_for_chunks_without_text_and_raises_the_error(target: bytes) -> None:
    beat = heartbeat(Dialect.OLLAMA, target, "m")
    error = as_event(render(StreamIncomplete("it broke off"), Dialect.OLLAMA), Dialect.OLLAMA)
    got: list[Any] = []
    with answering(stream_of(NDJSON, beat, beat, error)) as url:
        client = ollama.Client(host=url)
        with pytest.raises(ollama.ResponseError, match="it broke off"):
            got.extend(
                client.chat(model="m", messages=HELLO, stream=True)
                if target == b"/api/chat"
                else client.generate(model="m", prompt="hello", stream=True)
            )
        client._client.close()
    texts = [chunk.message.content if target == b"/api/chat" else chunk.response for chunk in got]
    assert (texts, [chunk.done for chunk in got]) == (["", ""], [False, False])
