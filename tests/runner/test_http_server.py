"""Conversations with a runner's server as raw bytes over its unix socket."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hive.runner.faults import EngineFault
from hive.runner.http_server import CallRoute, EngineCall, RunnerServer
from tests.runner.comfy_box import wait_until

FORM = (
    b'--B\r\nContent-Disposition: form-data; name="model"\r\n\r\ntiny\r\n'
    b'--B\r\nContent-Disposition: form-data; name="timestamp_granularities[]"\r\n\r\nword\r\n'
    b'--B\r\nContent-Disposition: form-data; name="prompt"\r\n\r\na\r\nb\r\n'
    b'--B\r\nContent-Disposition: form-data; name="file"; filename="audio"\r\n\r\n'
)


class Talk:
    """A connection to the server."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(60)
        self.socket.connect(str(path))
        self.came = b""

    def close(self) -> None:
        self.socket.close()

    def ask(self, raw: bytes) -> tuple[int, bytes]:
        self.socket.sendall(raw)
        return self.answer()

    def until(self, mark: bytes) -> bytes:
        while mark not in self.came:
            piece = self.socket.recv(65536)
            assert piece, f"closed after {self.came!r}"
            self.came += piece
        found, _, self.came = self.came.partition(mark)
        return found

    def answer(self) -> tuple[int, bytes]:
        head = self.until(b"\r\n\r\n")
        size = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        while len(self.came) < size:
            self.came += self.socket.recv(65536)
        body, self.came = self.came[:size], self.came[size:]
        return int(head.split()[1]), body


class Work:
    """Routes under test."""

    def __init__(self) -> None:
        self.begun, self.go_on, self.stopped = threading.Semaphore(0), threading.Event(), threading.Event()
        self.order: list[str] = []

    def echo(self, call: EngineCall) -> None:
        call.answer_json(call.json())

    def form(self, call: EngineCall) -> None:
        form = call.form()
        assert form.file is not None
        call.cost = "audio_s=1.000"
        call.answer_json(
            {"fields": form.fields, "file": form.file.read().decode(), "all": form.all("timestamp_granularities")}
        )

    def slow(self, call: EngineCall) -> None:
        self.order.append(call.json()["n"])
        self.begun.release()
        while not self.go_on.wait(0.01):
            if call.is_gone():
                self.stopped.set()
                call.check_caller()
        call.answer_json({})

    def events(self, call: EngineCall) -> None:
        call.cost = "audio_s=2.000"
        call.event({"a": 1}, "first")
        call.event("[DONE]")
        call.end_events()

    def breaks(self, call: EngineCall) -> None:
        call.event({"a": 1})
        raise ValueError("secret")

    def refuses(self, call: EngineCall) -> None:
        raise EngineFault(400, "no speech in it", "invalid_audio", param="file")


@pytest.fixture
def work() -> Work:
    return Work()


@pytest.fixture
def server(tmp_path: Path) -> Path:
    """The socket of `listening`."""
    return tmp_path / "r.sock"


@pytest.fixture
def listening(work: Work, server: Path, tmp_path: Path) -> Iterator[RunnerServer]:
    routes = {
        ("POST", "/echo"): CallRoute(work.echo),
        ("POST", "/form"): CallRoute(work.form),
        ("POST", "/slow"): CallRoute(work.slow),
        ("GET", "/events"): CallRoute(work.events),
        ("GET", "/breaks"): CallRoute(work.breaks),
        ("POST", "/refuses"): CallRoute(work.refuses),
        ("GET", "/free"): CallRoute(lambda call: call.answer(b"free"), takes_turn=False),
    }
    made = RunnerServer(server, routes, spool=str(tmp_path))
    made.listen()
    yield made
    work.go_on.set()
    made.close()


@pytest.fixture
def dial(listening: RunnerServer, server: Path) -> Iterator[Callable[[], Talk]]:
    """Makes connections, and closes them."""
    talks: list[Talk] = []

    def made() -> Talk:
        talks.append(Talk(server))
        return talks[-1]

    yield made
    for talk in talks:
        talk.close()


def post(path: str, body: bytes, kind: str = "application/json") -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nHost: r\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        + body
    )


def test_json_is_answered_and_the_connection_goes_on(dial: Callable[[], Talk]) -> None:
    talk = dial()
    for text in ("a", "b"):
        assert talk.ask(post("/echo", json.dumps({"x": text}).encode())) == (200, json.dumps({"x": text}).encode())


def test_a_form_gives_its_fields_in_order_and_its_file(dial: Callable[[], Talk], tmp_path: Path) -> None:
    talk = dial()
    talk.socket.sendall(post("/form", FORM + b"RIFF\r\n--\r\n\r\n--B--\r\n", "multipart/form-data; boundary=B"))
    head = talk.until(b"\r\n\r\n")
    assert b"x-hive-cost: audio_s=1.000" in head
    talk.came = head + b"\r\n\r\n" + talk.came
    _, body = talk.answer()
    assert json.loads(body) == {
        "fields": [["model", "tiny"], ["timestamp_granularities[]", "word"], ["prompt", "a\r\nb"]],
        "file": "RIFF\r\n--\r\n",
        "all": ["word"],
    }
    assert [path.name for path in tmp_path.iterdir()] == ["r.sock"]


@pytest.mark.parametrize(
    ("body", "kind", "status"),
    [
        (FORM + b"RIFF", "multipart/form-data; boundary=B", 400),  # it ends within the file
        (FORM + b"RIFF\r\n--C--", "multipart/form-data; boundary=B", 400),
        (FORM[:40], "multipart/form-data; boundary=B", 400),
        (b"", "multipart/form-data; boundary=B", 400),
        (FORM, "multipart/form-data", 415),
        (b"{}", "application/json", 415),
        (b"--B\r\nContent-Disposition: form-data\r\n\r\nx\r\n--B--", "multipart/form-data; boundary=B", 400),
        (b"--B\r\n" + b"x" * 9000, "multipart/form-data; boundary=B", 400),
        (FORM.replace(b"tiny", b"x" * 70000) + b"\r\n--B--", "multipart/form-data; boundary=B", 413),
        (FORM.replace(b"tiny", b"\xff") + b"\r\n--B--", "multipart/form-data; boundary=B", 400),
        (b'--B\r\nContent-Disposition: form-data; name="a"\r\n\r\n\r\n' * 70, "multipart/form-data; boundary=B", 413),
        (FORM.replace(b'"file"', b'"other"') + b"\r\n--B--", "multipart/form-data; boundary=B", 400),
    ],
)
def test_a_form_that_is_none_is_refused_in_words(dial: Callable[[], Talk], body: bytes, kind: str, status: int) -> None:
    answered, told = dial().ask(post("/form", body, kind))
    assert answered == status
    assert json.loads(told)["error"]["message"]


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", 404),
        (b"GET /echo HTTP/1.1\r\n\r\n", 405),
        (b"nonsense\r\n\r\n", 400),
        (b"POST /echo HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", 411),
        (b"POST /echo HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 400),
        (b"POST /echo HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n", 413),
        (b"GET / HTTP/1.1\r\nA: " + b"x" * 70000, 431),
        (post("/echo", b"[1]"), 400),
        (post("/echo", b"[" * 100000), 400),
        (post("/refuses", b"{}"), 400),
    ],
)
def test_what_it_does_not_serve_is_an_error_in_openais_shape(dial: Callable[[], Talk], raw: bytes, status: int) -> None:
    talk = dial()
    if b"99999999999" in raw:
        talk.socket.sendall(raw)
        talk.socket.shutdown(socket.SHUT_WR)
        assert talk.socket.recv(65536) == b""  # a body that never comes is waited for, not answered
        return
    answered, told = talk.ask(raw)
    assert answered == status
    assert set(json.loads(told)["error"]) == {"message", "type", "param", "code"}


def test_one_call_is_at_work_and_the_others_wait_in_order(
    dial: Callable[[], Talk], work: Work, listening: RunnerServer
) -> None:
    talks = []
    for waiting, number in enumerate(("1", "2", "3")):
        talks.append(dial())
        talks[-1].socket.sendall(post("/slow", json.dumps({"n": number}).encode()))
        if number == "1":
            assert work.begun.acquire(timeout=60)
        wait_until(lambda waiting=waiting: listening.line.waiting == waiting)
        assert dial().ask(b"GET /free HTTP/1.1\r\n\r\n") == (200, b"free")
    assert work.order == ["1"]
    work.go_on.set()
    assert [talk.answer()[0] for talk in talks] == [200] * 3
    assert work.order == ["1", "2", "3"]


@pytest.mark.parametrize("how", ["half", "whole"])
def test_a_client_that_leaves_ends_the_work_and_the_connection_closes_when_it_has_ended(
    dial: Callable[[], Talk], work: Work, how: str
) -> None:
    first, waiting = dial(), dial()
    first.socket.sendall(post("/slow", b'{"n": "1"}'))
    assert work.begun.acquire(timeout=60)
    waiting.socket.sendall(post("/slow", b'{"n": "2"}'))
    waiting.socket.shutdown(socket.SHUT_WR)
    assert waiting.socket.recv(1) == b""  # it left while it waited, and was never at work
    if how == "half":
        first.socket.shutdown(socket.SHUT_WR)
        assert first.socket.recv(1) == b""
    else:
        first.socket.close()
    assert work.stopped.wait(60)
    assert work.order == ["1"]


def test_a_stream_has_the_cost_in_its_head_and_an_end(dial: Callable[[], Talk]) -> None:
    talk = dial()
    talk.socket.sendall(b"GET /events HTTP/1.1\r\n\r\n")
    head = talk.until(b"\r\n\r\n")
    assert b"x-hive-cost: audio_s=2.000" in head
    assert talk.until(b"0\r\n\r\n") == b'1d\r\nevent: first\ndata: {"a": 1}\n\n\r\ne\r\ndata: [DONE]\n\n\r\n'


def test_an_engine_that_fails_within_a_stream_ends_it_with_an_error_and_no_end(dial: Callable[[], Talk]) -> None:
    talk = dial()
    talk.socket.sendall(b"GET /breaks HTTP/1.1\r\n\r\n")
    came = b""
    while piece := talk.socket.recv(65536):
        came += piece
    assert b"engine_failed" in came
    assert b"secret" not in came
    assert b"0\r\n\r\n" not in came
