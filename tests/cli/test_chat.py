"""`hive run` against an HTTP server that speaks as the proxy does."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import CLOSED_PORT, show_backend
from tests.cli.http_server import in_thread

Hive = Any
"""conftest.Hive: test modules import no siblings."""


class Proxy(ThreadingHTTPServer):
    """Answers `/v1/chat/completions` with `lines`, and keeps what it was asked."""

    daemon_threads = True
    status = 200
    lines: tuple[str, ...] = ()

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[tuple[str, str | None, Any]] = []


class Handler(BaseHTTPRequestHandler):
    server: Proxy

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, self.headers["Authorization"], body))
        self.send_response(self.server.status)
        self.end_headers()
        for line in self.server.lines:
            self.wfile.write(line.encode() + b"\n\n")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    server = Proxy()
    with in_thread(server):
        yield server


@pytest.fixture
def proxy_port(request: pytest.FixtureRequest) -> int:
    if "proxy" not in request.fixturenames:
        return CLOSED_PORT
    port: int = request.getfixturevalue("proxy").server_port
    return port


def said(text: str) -> str:
    return "data: " + json.dumps({"choices": [{"delta": {"content": text}}]})


GREETING = (
    ": comment",
    'data: {"choices": [{"delta": {"role": "assistant"}}]}',
    said("Hel"),
    said("lo"),
    "data: [DONE]",
)


def test_an_answer_is_printed_as_it_comes(proxy: Proxy, hive: Hive) -> None:
    proxy.lines = GREETING
    result = hive("run", "m", "say", "hello")
    assert (result.code, result.out) == (0, "Hello\n")
    path, authorization, body = proxy.asked[0]
    assert (path, authorization) == ("/v1/chat/completions", f"Bearer {hive.box.services.internal_token}")
    assert body == {
        "model": "m",
        "messages": [{"role": "user", "content": "say hello"}],
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_json_is_one_object_with_the_whole_text(proxy: Proxy, hive: Hive) -> None:
    proxy.lines = GREETING
    said = {"model": "m", "text": "Hello", "tokens_in": None, "tokens_out": None}
    assert hive("run", "m", "hi", "--json").json == {"schema": "run", "version": 1, **said}


def test_the_prompt_may_come_from_a_file_before_what_the_words_say(
    proxy: Proxy, hive: Hive, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    proxy.lines = GREETING
    given = tmp_path / "given"
    given.write_bytes(b"line\nline\n")
    with given.open() as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert hive("run", "m").out == "Hello\n"
    assert proxy.asked[0][2]["messages"][0]["content"] == "line\nline\n"
    with given.open() as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert hive("run", "m", "what", "is", "this").out == "Hello\n"
    assert proxy.asked[1][2]["messages"][0]["content"] == "line\nline\n what is this"
    given.write_bytes(b" \n")
    with given.open() as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert hive("run", "m").code == 2


def typed(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    stdin = io.StringIO(text)
    monkeypatch.setattr(stdin, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdin", stdin)


def test_a_conversation_keeps_what_was_said(proxy: Proxy, hive: Hive, monkeypatch: pytest.MonkeyPatch) -> None:
    proxy.lines = GREETING
    typed(monkeypatch, "one\n\ntwo\n")
    result = hive("run", "llama3.2")
    assert (result.code, result.out.count("Hello")) == (0, 2)
    assert [message["content"] for message in proxy.asked[1][2]["messages"]] == ["one", "Hello", "two"]


@pytest.mark.breadth(3)
@pytest.mark.parametrize(
    ("status", "lines", "code", "message"),
    [
        (404, ('{"error": {"message": "no such model: m"}}',), 3, "no such model: m"),
        (401, ('{"error": {"message": "no"}}',), 4, "no"),
        (503, ('{"error": {"message": "full"}}',), 5, "full"),
        (504, ('{"error": {"message": "slow"}}',), 7, "slow"),
        (500, ("oops",), 1, "the proxy answered 500"),
        (200, (said("Hel"),), 5, "the answer broke off"),
        (200, ("data: nonsense",), 5, "broke off"),
        (200, ('data: {"error": {"message": "CUDA"}}', "data: [DONE]"), 5, "CUDA"),
    ],
)
def test_a_refusal_or_a_cut_answer_is_not_taken_for_an_answer(
    proxy: Proxy, hive: Hive, status: int, lines: tuple[str, ...], code: int, message: str
) -> None:
    proxy.status, proxy.lines = status, lines
    result = hive("run", "m", "hi")
    assert result.code == code
    assert message in result.err


def test_a_proxy_that_is_down_is_said_so(hive: Hive) -> None:
    result = hive("run", "m", "hi")
    assert result.code == 5
    assert "the proxy does not answer at 127.0.0.1:1" in result.err


def test_a_conversation_takes_what_ollamas_users_type(
    proxy: Proxy, hive: Hive, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy.lines = GREETING
    typed(
        monkeypatch,
        'first\n/clear\n/set system be brief\n"""two\n/lines"""\n/sing\n/set system\nlast\n/bye\nnever said\n',
    )
    result = hive("run", "llama3.2", "--system", "be long")
    assert (result.code, "there is no command /sing" in result.err) == (0, True)
    asked = [[(one["role"], one["content"]) for one in body["messages"]] for _, _, body in proxy.asked]
    two = [("user", "two\n/lines")]
    assert asked == [
        [("system", "be long"), ("user", "first")],
        [("system", "be brief"), *two],
        [*two, ("assistant", "Hello"), ("user", "last")],
    ]


def test_an_error_ends_an_answer_and_not_the_conversation(
    proxy: Proxy, hive: Hive, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy.status, proxy.lines = 503, ('{"error": {"message": "full"}}',)
    typed(monkeypatch, "one\ntwo\n")
    result = hive("run", "llama3.2")
    assert (result.code, result.err.count("hive: full")) == (0, 2)
    assert [body["messages"] for _, _, body in proxy.asked] == [
        [{"role": "user", "content": "one"}],
        [{"role": "user", "content": "two"}],
    ]


def test_verbose_tells_the_tokens_the_server_counted(proxy: Proxy, hive: Hive) -> None:
    counted = 'data: {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 1234}}'
    proxy.lines = (*GREETING[:-1], counted, GREETING[-1])
    result = hive("run", "m", "hi", "--verbose")
    assert result.out == "Hello\n"
    assert "Prompt: 7 tokens" in result.err
    assert "Answer: 1,234 tokens" in result.err
    assert "tokens/s" in result.err


def test_an_unknown_model_suggests_the_nearest(proxy: Proxy, hive: Hive, monkeypatch: pytest.MonkeyPatch) -> None:
    hive.daemon.call(show_backend, hive.box, "llama3.2:q4_0")
    proxy.status, proxy.lines = 404, ('{"error": {"message": "no such model"}}',)
    once = hive("run", "lama3.2:q4_0", "hi")
    assert (once.code, "did you mean `llama3.2:q4_0`?" in once.err) == (3, True)
    typed(monkeypatch, "a long question\n")
    before = hive("run", "fasd")
    assert (before.code, "did you mean `fast`?" in before.err, len(proxy.asked)) == (3, True, 1)
