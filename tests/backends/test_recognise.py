"""The recognition of a server by its answers alone."""

from __future__ import annotations

import http.server
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hive.backends.conversation import ControlAnswer
from hive.backends.recognise import CANDIDATES, find, identify, recognise
from hive.domain import BackendKind
from tests.fakes.programs import demo_backend, fake_backend


def ok(body: bytes, **headers: str) -> ControlAnswer:
    return ControlAnswer(200, {name.replace("_", "-"): value for name, value in headers.items()}, body)


def no(status: int, body: bytes = b"", **headers: str) -> ControlAnswer:
    return ControlAnswer(status, {name.replace("_", "-"): value for name, value in headers.items()}, body)


OLLAMA = {"/": ok(b"Ollama is running"), "/api/version": ok(b'{"version":"0.30.1"}')}
DEMO = {"/": ok(b"hive-demo is running"), "/api/version": ok(b'{"version":"1-hive-demo"}', server="hive-demo")}
VLLM = {"/version": ok(b'{"version":"0.32.0"}'), "/v1/models": ok(b'{"data":[{"id":"m","owned_by":"vllm"}]}')}
LLAMA = {"/props": ok(b'{"total_slots":4,"build_info":"b1-0c1e570"}'), "/": no(404)}
ROUTER = {"/props": ok(b'{"role":"router","max_instances":2,"build_info":"b1-0c1e570"}'), "/v1/models": ok(b"{}")}


@pytest.mark.parametrize(
    ("answers", "found"),
    [
        (OLLAMA, (BackendKind.OLLAMA, "0.30.1")),
        (DEMO, (BackendKind.DEMO, "1-hive-demo")),
        (VLLM, (BackendKind.VLLM, "0.32.0")),
        (LLAMA, (BackendKind.LLAMA, "b1-0c1e570")),
        (ROUTER, (BackendKind.LLAMA, "b1-0c1e570")),
    ],
    ids=["ollama", "demo", "vllm", "llama-server", "llama-server as router"],
)
def test_a_backend_is_known_by_its_answers(answers: dict[str, ControlAnswer], found: tuple[BackendKind, str]) -> None:
    assert identify(answers) == found


NOT_BACKENDS: dict[str, dict[str, ControlAnswer]] = {
    "nothing answered": {},
    "a web server that says 200 to all": dict.fromkeys(
        ("/", "/api/version", "/version", "/v1/models", "/props"), ok(b"<html>hi</html>")
    ),
    "JSON that is no object": dict.fromkeys(("/api/version", "/version", "/v1/models", "/props"), ok(b"[1]")),
    "a version under /api alone": {"/api/version": ok(b'{"version":"1"}'), "/": no(404)},
    "Ollama's words alone": {"/": ok(b"Ollama is running")},
    "a version of another type": {"/": ok(b"Ollama is running"), "/api/version": ok(b'{"version":3}')},
    "models of another owner": {**VLLM, "/v1/models": ok(b'{"data":[{"id":"m","owned_by":"openai"}]}')},
    "models of a strange shape": {**VLLM, "/v1/models": ok(b'{"data":{"owned_by":"vllm"}}')},
    "entries of a strange shape": {**VLLM, "/v1/models": ok(b'{"data":["vllm",null]}')},
    "vLLM without its version": {"/v1/models": VLLM["/v1/models"]},
    "vLLM behind a key we do not have": {**VLLM, "/v1/models": no(401, b'{"error":"Unauthorized"}')},
    "llama-server that still loads": {"/props": no(503, b'{"error":{"message":"Loading model"}}')},
    "a version that would steer a terminal": {"/props": ok(b'{"build_info":"\\u001b[2J"}')},
    "a version that is no UTF-8": {"/props": ok(b'{"build_info":"\xff"}')},
    "an endless version": {"/props": ok(b'{"build_info":"' + b"x" * 201 + b'"}')},
}


@pytest.mark.parametrize("answers", NOT_BACKENDS.values(), ids=NOT_BACKENDS)
def test_what_is_no_backend_is_not_taken_for_one(answers: dict[str, ControlAnswer]) -> None:
    assert identify(answers) is None


HIVES_OWN = {
    "its refusal under /api": {"/props": no(403, b'{"error":"no","src":"hive"}')},
    "its refusal under /v1": {"/props": no(403, b'{"error":{"message":"no","src":"hive"}}')},
    "its head": {"/v1/models": ok(b"{}", x_queue_wait_ms="0", x_request_id="e-1")},
}


@pytest.mark.parametrize("marked", HIVES_OWN.values(), ids=HIVES_OWN)
@pytest.mark.parametrize("behind", [OLLAMA, DEMO, VLLM, LLAMA], ids=["ollama", "demo", "vllm", "llama-server"])
def test_hives_own_proxy_is_no_backend_whatever_is_behind_it(
    behind: dict[str, ControlAnswer], marked: dict[str, ControlAnswer]
) -> None:
    assert identify(behind) is not None
    assert identify({**behind, **marked}) is None


def test_a_model_list_that_names_hive_is_not_hives_proxy() -> None:
    assert identify({**VLLM, "/": no(404, b'{"error":"src hive"}')}) is not None


@pytest.mark.parametrize("on_socket", [False, True], ids=["tcp", "socket"])
@pytest.mark.parametrize("kind", ["ollama", "vllm", "llama"])
async def test_a_running_backend_is_recognised_without_a_prompt(kind: str, on_socket: bool, tmp_path: Path) -> None:
    with fake_backend(kind, socket=tmp_path / "b.sock" if on_socket else None) as server:
        info = await recognise(server.address)
        asked = server.stats()["asked"]
    assert info is not None
    assert (info.kind, info.address, info.up) == (kind, server.address, True)
    assert server.address in info.label
    assert all(question.startswith("GET ") for question in asked)


async def test_the_demo_backend_is_recognised_as_what_it_is(tmp_path: Path) -> None:
    with demo_backend(socket=tmp_path / "d.sock") as server:
        info = await recognise(server.address)
    assert info is not None
    assert info.kind is BackendKind.DEMO
    assert "canned text" in info.label


@pytest.fixture
def plain_web_server() -> Iterator[str]:
    """Python's own file server, in an empty folder's place: 404 and HTML."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Silent)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


class Silent(http.server.BaseHTTPRequestHandler):
    """Says 200 and a page to everything, as a single-page application does."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(b"<!doctype html><title>Ollama</title>")

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def silent_port() -> Iterator[str]:
    """A port that accepts and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


async def test_another_web_server_is_none(plain_web_server: str) -> None:
    assert await recognise(plain_web_server) is None


async def test_a_port_that_never_answers_is_none(silent_port: str) -> None:
    assert await recognise(silent_port) is None


async def test_the_first_candidate_that_is_a_backend_is_found(plain_web_server: str, silent_port: str) -> None:
    with fake_backend("llama") as llama, fake_backend("vllm") as vllm:
        found = await find([plain_web_server, silent_port, "/nonexistent.sock", llama.address, vllm.address])
        other = await find([vllm.address, llama.address])
    assert found is not None
    assert found.kind is BackendKind.LLAMA
    assert other is not None
    assert other.kind is BackendKind.VLLM


async def test_where_nothing_listens_nothing_is_found() -> None:
    assert await find(["127.0.0.1:1", "/nonexistent.sock"]) is None


def test_only_loopback_is_looked_at_by_default() -> None:
    assert all(address.startswith("127.0.0.1:") for address in CANDIDATES)
