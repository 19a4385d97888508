"""HTTP itself at the API: methods, media types, bodies and names that nobody sends by accident."""

from __future__ import annotations

import json
import socket
from asyncio import to_thread
from pathlib import Path
from typing import NamedTuple

import pytest

from hive.client.client import Client
from tests.control.box import Box

SPEC = b'{"name": "alice", "command": ["/bin/sleep", "9"]}'


class Answer(NamedTuple):
    status: int
    head: dict[str, str]
    body: bytes

    @property
    def code(self) -> str:
        """Of a problem, which this has to be."""
        assert self.head["content-type"] == "application/problem+json"
        problem = json.loads(self.body)
        assert set(problem) == {"type", "title", "status", "detail", "code", "hint"}
        assert problem["status"] == self.status
        return str(problem["code"])


class Asking:
    def __init__(self, path: Path) -> None:
        self._path = path

    async def __call__(self, method: str, target: str, body: bytes = b"", **head: str) -> Answer:
        lines = [f"{method} {target} HTTP/1.1", "Host: hive", "Connection: close", f"Content-Length: {len(body)}"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in head.items()]
        return await to_thread(self._answer, "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body)

    def _answer(self, request: bytes) -> Answer:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(60)
            sock.connect(str(self._path))
            sock.sendall(request)
            head, _, body = b"".join(iter(lambda: sock.recv(65536), b"")).partition(b"\r\n\r\n")
        status, *fields = head.decode("latin-1").split("\r\n")
        split = (field.partition(":") for field in fields)
        return Answer(int(status.split()[1]), {name.lower(): value.strip() for name, _, value in split}, body)


@pytest.fixture
def ask(live: Box) -> Asking:
    return Asking(live.paths.api_socket)


# methods --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["/api/health", "/api/agents", "/metrics", "/api/openapi.json"])
async def test_head_is_get_without_a_body(ask: Asking, target: str) -> None:
    got, head = await ask("GET", target), await ask("HEAD", target)
    assert (head.status, head.body) == (200, b"")
    assert head.head == got.head


@pytest.mark.parametrize("target", ["/api/events?follow=1", "/api/agents/alice/logs?follow=1"])
async def test_head_of_a_stream_ends(ask: Asking, live: Box, target: str) -> None:
    await ask("POST", "/api/agents", SPEC)
    live.output("alice").path.write_text("one\n")
    answer = await ask("HEAD", target)
    assert (answer.status, answer.body) == (200, b"")
    assert not live.followers


async def test_head_of_what_is_not_there_is_404_without_a_body(ask: Asking) -> None:
    answer = await ask("HEAD", "/api/agents/nobody")
    assert (answer.status, answer.body) == (404, b"")


@pytest.mark.parametrize("method", ["OPTIONS", "TRACE", "PATCH", "PUT", "PROPFIND", "PURGE", "SUBSCRIBE"])
async def test_another_method_is_405_with_what_there_is(ask: Asking, method: str) -> None:
    answer = await ask(method, "/api/agents", origin="https://example.org")
    assert (answer.status, answer.code, answer.head["allow"]) == (405, "method_not_allowed", "GET, HEAD, POST")
    assert not [name for name in answer.head if name.startswith("access-control")]


async def test_a_method_that_is_none_is_400(ask: Asking) -> None:
    assert (await ask("FOO", "/api/agents")).status == 400


async def test_a_path_that_takes_only_orders_has_no_head(ask: Asking) -> None:
    answer = await ask("HEAD", "/api/agents/alice/start")
    assert (answer.status, answer.head["allow"]) == (405, "POST")


# paths and queries ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "target",
    [
        "/",
        "/api",
        "/api/",
        "/api/agents/",  # nobody is sent elsewhere
        "//api/agents",
        "/api/agents/a/b/c",
        "/api/agents/%2e%2e/logs",
        "/api/agents/a%2Fb",
        "/api/agents/%00",
        "/api/agents/%FF%FE",
        "/api/agents/%25ff%2500",
        "/api/agents/%ED%A0%80",
        "/api/agents/" + "a" * 5000,
        "/api/agents/%1b[2J",
        "/api/jobs/%00",
        "/api/requests/%F0%9F%90%9D",
        "/API/HEALTH",
    ],
)
async def test_a_name_nobody_has_is_404(ask: Asking, target: str) -> None:
    assert (await ask("GET", target)).code == "not_found"


@pytest.mark.parametrize(
    "query",
    [
        "?tail=%FF",
        "?tail=%D9%A3",  # a digit, in Arabic
        "?tail=1e3",
        "?tail=-0",
        "?tail=+1",
        "?tail=" + "9" * 400,
        "?tail=",
        "?tail=1&tail=1",
        "?tail=1&other=%00",
        "?%00=1",
        "?follow=true",
    ],
)
async def test_a_query_that_is_not_as_it_is_described_is_400(ask: Asking, query: str) -> None:
    assert (await ask("GET", "/api/events" + query)).code == "bad_request"


# bodies ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["application/json", "application/json; charset=utf-8", "Application/JSON"])
async def test_a_body_says_that_it_is_json(ask: Asking, kind: str) -> None:
    assert (await ask("POST", "/api/agents", SPEC, content_type=kind)).status == 201


async def test_a_body_that_says_nothing_of_itself_is_taken(ask: Asking) -> None:
    assert (await ask("POST", "/api/agents", SPEC)).status == 201


@pytest.mark.parametrize(
    "head",
    [
        {"content_type": "text/plain"},
        {"content_type": "application/x-www-form-urlencoded"},
        {"content_type": "multipart/form-data; boundary=x"},
        {"content_type": "application/jsonp"},
        {"content_type": ""},
        {"content_type": "application/json", "content_encoding": "gzip"},
    ],
)
async def test_a_body_that_says_something_else_is_415(ask: Asking, head: dict[str, str]) -> None:
    """A page of the web may send none of these anywhere without asking: it may send a form, or text."""
    assert (await ask("POST", "/api/agents", SPEC, **head)).code == "unsupported_media_type"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b'""',
        b"{",
        b"\xef\xbb\xbf" + SPEC,
        SPEC.decode().encode("utf-16"),
        SPEC + SPEC,
        SPEC[:-1] + b', "name": "bob"}',
        SPEC[:-1] + b', "env": {"A": "1", "A": "2"}}',
        SPEC[:-1] + b', "idle_s": NaN}',
        SPEC[:-1] + b', "idle_s": Infinity}',
        SPEC[:-1] + b', "idle_s": 1e400}',
        SPEC[:-1] + b', "port": 1' + b"0" * 5000 + b"}",
        SPEC[:-1] + b', "port": "80"}',
        SPEC[:-1] + b', "env": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b"}",
        b"[" * 500_000,
        b'{"name": "alice", "command": ["\\u0000"]}',
        b'{"name": "alice\\u0000", "command": ["/bin/sleep"]}',
        b'{"name": "\\ud800", "command": ["/bin/sleep"]}',
        b'{"name": "alice", "command": ["/bin/sleep", "\xff"]}',
        b'{"name": "alice", "command": ["/bin/sleep", "\xed\xa0\x80"]}',
    ],
)
async def test_a_body_nobody_can_mean_is_400(ask: Asking, client: Client, body: bytes) -> None:
    assert (await ask("POST", "/api/agents", body)).code == "bad_request"
    assert await to_thread(client.get, "/api/agents") == {"agents": []}


async def test_a_member_that_is_there_twice_is_named(ask: Asking) -> None:
    answer = await ask("PUT", "/api/config", b'{"sleep.check_s": 1, "sleep.check_s": 2}')
    assert json.loads(answer.body)["detail"] == "'sleep.check_s' is there more than once"


async def test_a_name_that_is_nobodys_is_told_without_its_bytes(ask: Asking) -> None:
    """Names that were sent are in the answer as JSON writes them: no terminal is cleared by one."""
    answer = await ask("GET", "/api/agents/%1b%5b2J%0d%0aX-A:%20b")
    assert b"\x1b" not in answer.body
    assert "x-a" not in answer.head
