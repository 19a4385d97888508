"""The client of the Engine API: against a server of scripted bytes, and against a real engine."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hive.errors import (
    BadRequest,
    DependencyDown,
    HiveError,
    NotFound,
    NotPermitted,
    NotSupported,
    TimedOut,
    WrongState,
)
from hive.host.engine import FRAME_MAX_BYTES, Engine, Frames, as_since, choose_version, error_of
from tests import docker_engine

VERSION = b'HTTP/1.1 200 OK\r\nContent-Length: 48\r\n\r\n{"ApiVersion": "1.43", "MinAPIVersion": "1.24"} '
EMPTY = b"HTTP/1.1 204 No Content\r\n\r\n"


class Scripted:
    """Answers each connection with the next of its answers, then hangs up; None: says nothing and stays."""

    def __init__(self, answers: list[bytes | None]) -> None:
        self.answers = answers
        self.asked: list[bytes] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(int(line.split()[1]) for line in head.split(b"\r\n") if line.startswith(b"Content-Length:"))
        self.asked.append(head + await reader.readexactly(length))
        answer = self.answers.pop(0)
        if answer is None:
            await reader.read()
        else:
            writer.write(answer)
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


Script = Callable[..., Awaitable[tuple[Engine, Scripted]]]


@pytest.fixture
async def script(short_path: Path) -> AsyncIterator[Script]:
    servers: list[asyncio.Server] = []

    async def serve(*answers: bytes | None, version: bytes | None = VERSION) -> tuple[Engine, Scripted]:
        scripted = Scripted([version, *answers])
        path = short_path / "docker.sock"
        servers.append(await asyncio.start_unix_server(scripted.serve, path))
        return Engine(path), scripted

    yield serve
    for server in servers:
        server.close()


def answer(status: int, body: bytes, *more: bytes) -> bytes:
    fields = b"".join(field + b"\r\n" for field in (b"Content-Length: %d" % len(body), *more))
    return b"HTTP/1.1 %d X\r\n%s\r\n%s" % (status, fields, body)


# --- questions and answers ---------------------------------------------------------------------------------------


async def test_a_call_is_one_request_of_the_version_agreed_on(script: Script) -> None:
    engine, scripted = await script(answer(200, b'{"Id": "a"}'), EMPTY)
    assert await engine.ask("POST", "/containers/create", {"Image": "x"}, query={"name": "a b"}) == {"Id": "a"}
    assert await engine.ask("POST", "/containers/a/start") is None
    _, create, start = scripted.asked
    assert create.startswith(b"POST /v1.41/containers/create?name=a+b HTTP/1.1\r\n")
    assert create.endswith(b'\r\n\r\n{"Image": "x"}')
    assert start.startswith(b"POST /v1.41/containers/a/start HTTP/1.1\r\n")


async def test_an_answer_may_come_in_chunks_or_end_with_the_connection(script: Script) -> None:
    chunked = b'HTTP/1.1 200 X\r\nTransfer-Encoding: chunked\r\n\r\n4\r\n{"a"\r\n4\r\n: 1}\r\n0\r\n\r\n'
    engine, _ = await script(chunked, b'HTTP/1.1 200 X\r\nConnection: close\r\n\r\n{"a": 2}')
    assert await engine.ask("GET", "/info") == {"a": 1}
    assert await engine.ask("GET", "/info") == {"a": 2}


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (400, BadRequest),
        (403, NotPermitted),
        (404, NotFound),
        (409, WrongState),
        (500, HiveError),
        (501, NotSupported),
        (503, DependencyDown),
        (418, HiveError),
    ],
)
async def test_the_engines_own_sentence_is_the_errors(script: Script, status: int, error: type[HiveError]) -> None:
    engine, _ = await script(answer(status, b'{"message": "so it is"}'))
    with pytest.raises(HiveError, match="so it is") as raised:
        await engine.ask("GET", "/info")
    assert type(raised.value) is error


@pytest.mark.parametrize("body", [b"", b"oops", b"[]", b'{"Message": 1}', b"\xff"])
def test_an_error_without_a_message_is_still_one(body: bytes) -> None:
    assert str(error_of(500, body)).startswith("the engine answered 500")


async def test_an_engine_that_does_not_answer_is_not_waited_for(script: Script) -> None:
    engine, _ = await script(None)
    with pytest.raises(TimedOut, match=r"GET /info within 0\.05 s"):
        await engine.ask("GET", "/info", timeout_s=0.05)


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 200 OK\r\nContent-Le", b"SSH-2.0-OpenSSH\r\n", b"\0\0\0"])
async def test_what_breaks_off_or_is_no_http_is_an_engine_that_is_down(script: Script, said: bytes) -> None:
    engine, _ = await script(said)
    with pytest.raises(DependencyDown) as raised:
        await engine.ask("GET", "/info")
    assert "docker_socket" in raised.value.hint


@pytest.mark.parametrize("said", [b"no json", b'{"a":'])
async def test_an_answer_that_is_no_json_is_an_error(script: Script, said: bytes) -> None:
    engine, _ = await script(answer(200, said))
    with pytest.raises(HiveError, match="no JSON"):
        await engine.ask("GET", "/info")


@pytest.mark.parametrize("said", [b"[]", b'"x"', b"{}", b'{"ApiVersion": "new"}'])
async def test_what_names_no_version_is_no_docker_engine(script: Script, said: bytes) -> None:
    engine, _ = await script(version=answer(200, said))
    with pytest.raises(HiveError):
        await engine.ask("GET", "/info")


async def test_an_engine_too_old_is_named(script: Script) -> None:
    engine, _ = await script(version=answer(200, b'{"ApiVersion": "1.40", "MinAPIVersion": "1.12"}'))
    with pytest.raises(NotSupported, match=r"1\.40"):
        await engine.ask("GET", "/info")


async def test_nobody_there_says_where_and_what_to_do(short_path: Path) -> None:
    engine = Engine(short_path / "docker.sock")
    with pytest.raises(DependencyDown, match=str(engine.path)) as raised:
        await engine.ask("GET", "/info")
    assert "systemctl start docker" in raised.value.hint
    with socket.socket(socket.AF_UNIX) as dead:  # the name is there, its engine is not
        dead.bind(str(engine.path))
    with pytest.raises(DependencyDown, match=os.strerror(errno.ECONNREFUSED)):
        await engine.ask("GET", "/info")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
async def test_a_socket_that_is_anothers_is_not_permitted(script: Script) -> None:
    engine, _ = await script(answer(200, b"{}"))
    engine.path.chmod(0o600)
    engine.path.parent.chmod(0o711)
    os.seteuid(65534)
    try:
        with pytest.raises(NotPermitted) as raised:
            await engine.ask("GET", "/info")
    finally:
        os.seteuid(0)
    assert "group docker" in raised.value.hint


@pytest.mark.parametrize(
    ("oldest", "newest", "spoken"),
    [("1.12", "1.41", (1, 41)), ("1.24", "1.52", (1, 41)), ("1.44", "1.52", (1, 44)), ("1.24", "2.0", (1, 41))],
)
def test_the_version_is_ours_where_the_engine_still_speaks_it(
    oldest: str, newest: str, spoken: tuple[int, int]
) -> None:
    assert choose_version(oldest, newest) == spoken


# --- what a container prints -------------------------------------------------------------------------------------


def framed(payload: bytes, stream: int = 1) -> bytes:
    return bytes([stream, 0, 0, 0]) + len(payload).to_bytes(4, "big") + payload


@given(st.lists(st.binary(max_size=300), max_size=8), st.integers(1, 50))
def test_frames_are_the_same_however_they_are_cut(payloads: list[bytes], piece: int) -> None:
    frames, stream = Frames(), b"".join(framed(payload) for payload in payloads)
    found = [frame for at in range(0, len(stream), piece) for frame in frames.feed(stream[at : at + piece])]
    assert found == payloads


@pytest.mark.parametrize("head", [b"HTTP/1.1", framed(b"")[:4] + (FRAME_MAX_BYTES + 1).to_bytes(4, "big")])
def test_what_is_no_stream_of_frames_is_refused(head: bytes) -> None:
    with pytest.raises(HiveError):
        Frames().feed(head)


def test_since_keeps_all_nine_decimals() -> None:
    assert as_since("2026-11-20T14:25:03.000000009") == "1795184703.000000009"


async def test_a_stream_is_given_as_it_comes_and_ends_with_the_answer(script: Script) -> None:
    engine, _ = await script(b"HTTP/1.1 200 X\r\n\r\n" + framed(b"hi") + framed(b"you", stream=2))
    frames, found = Frames(), []
    async with engine.stream("GET", "/containers/a/logs") as chunks:
        async for chunk in chunks:
            found += frames.feed(chunk)
    assert found == [b"hi", b"you"]


async def test_a_stream_that_is_refused_says_why(script: Script) -> None:
    engine, _ = await script(answer(409, b'{"message": "Container a is paused"}'))
    with pytest.raises(WrongState, match="is paused"):
        async with engine.stream("POST", "/exec/a/start"):
            raise AssertionError("the head was not looked at")


# --- a real one --------------------------------------------------------------------------------------------------


@pytest.mark.docker
async def test_a_real_engine_is_understood() -> None:
    real = docker_engine.shared()
    engine = Engine(real.socket)
    info = await engine.ask("GET", "/info")
    assert info["OSType"] == "linux"
    with pytest.raises(NotFound, match="No such container"):
        await engine.ask("GET", "/containers/nobody/json")
    with pytest.raises(BadRequest):
        await engine.ask("POST", "/containers/create", {"Image": real.image, "HostConfig": {"Memory": 1}})
    assert (await engine.ask("GET", f"/images/{real.image}/json"))["Os"] == "linux"
    assert str(real.socket) in repr(engine)
