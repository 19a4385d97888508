"""The HTTP client of this host: answers cut anywhere, and calls on real sockets."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hive.host.http_call import HttpCall, calling, connected_unix, streams_of
from hive.http_answer import HEAD_MAX_BYTES, AnswerTooLarge, CallFailed, HttpAnswer, HungUp, NotHttp, encode_request

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nabcd"
NO_REASON = b"HTTP/1.1 204 \r\nConnection: keep-alive\r\n\r\n"
NO_SPACE = b"HTTP/1.1 503\r\ncontent-length:2\r\n\r\n{}"
CHUNKED = b"HTTP/1.1 200 X\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n2\r\ncd\r\n0\r\n\r\n"
TO_THE_END = b"HTTP/1.1 200 X\r\nConnection: close\r\n\r\nabcd"
REQUEST = encode_request("GET", "/", {"Host": "x"})


# --- bytes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "status", "body"),
    [(OK, 200, b"abcd"), (NO_REASON, 204, b""), (NO_SPACE, 503, b"{}"), (CHUNKED, 200, b"abcd")],
)
def test_an_answer_is_complete_with_its_last_byte_and_no_sooner(raw: bytes, status: int, body: bytes) -> None:
    answer, content = HttpAnswer(), b""
    for at in range(len(raw)):
        assert not answer.complete
        answer.feed(raw[at : at + 1])
        content += answer.take()
    assert (answer.complete, answer.status, content) == (True, status, body)
    answer.feed(b"")
    answer.feed(b"bytes behind it")


def test_bytes_behind_an_answer_are_ignored() -> None:
    answer = HttpAnswer()
    answer.feed(OK + b"behind")
    assert (answer.complete, answer.take()) == (True, b"abcd")


def test_a_body_without_a_length_goes_to_the_end_of_the_connection() -> None:
    answer = HttpAnswer()
    answer.feed(TO_THE_END)
    assert not answer.complete
    answer.feed(b"")
    assert (answer.complete, answer.take()) == (True, b"abcd")


@pytest.mark.parametrize("raw", [b"", b"HTTP/1.1 200 OK\r\nContent-Le", OK[:-1], CHUNKED[:-1], CHUNKED[:-10]])
def test_an_end_before_the_end_is_told(raw: bytes) -> None:
    answer = HttpAnswer()
    if raw:
        answer.feed(raw)
    with pytest.raises(HungUp):
        answer.feed(b"")


@pytest.mark.parametrize("raw", [b"SSH-2.0-OpenSSH\r\n\r\n", b"HTTP/2 200\r\n\r\n", b"HTTP/1.1 2000\r\n\r\n", b"\0\0"])
def test_what_is_no_http_is_told_with_its_first_bytes(raw: bytes) -> None:
    with pytest.raises(NotHttp) as told:
        HttpAnswer().feed(raw)
    assert told.value.begin == raw


def test_a_head_that_does_not_end_is_too_large() -> None:
    answer = HttpAnswer()
    answer.feed(b"HTTP/1.1 200 OK\r\n")
    with pytest.raises(AnswerTooLarge):
        answer.feed(b"x: " + b"x" * HEAD_MAX_BYTES)


@given(st.lists(st.binary(max_size=100), max_size=5))
def test_any_bytes_are_an_answer_or_none_yet_or_refused(pieces: list[bytes]) -> None:
    answer = HttpAnswer()
    try:
        for piece in pieces:
            answer.feed(piece)
    except CallFailed:
        return
    assert 0 <= answer.status <= 999


# --- calls -------------------------------------------------------------------------------------------------------

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def answering(*raw: bytes) -> Talk:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for piece in raw:
            writer.write(piece)
            await writer.drain()
        writer.close()

    return talk


async def body_of(path: Path, raw: bytes, limit: int) -> bytes:
    async with (
        await asyncio.start_unix_server(answering(raw), path),
        calling(streams_of(await connected_unix(path)), REQUEST) as call,
    ):
        return await call.body(limit)


@pytest.mark.parametrize("raw", [OK, CHUNKED, TO_THE_END])
async def test_a_body_is_read_whole_or_is_too_large(short_path: Path, raw: bytes) -> None:
    assert await body_of(short_path / "a", raw, limit=4) == b"abcd"
    with pytest.raises(AnswerTooLarge, match="larger than 3 bytes"):
        await body_of(short_path / "b", raw, limit=3)


async def test_a_declared_length_is_refused_before_the_body_is_read(short_path: Path) -> None:
    with pytest.raises(AnswerTooLarge):
        await body_of(short_path / "a", b"HTTP/1.1 200 X\r\nContent-Length: 99\r\n\r\n", limit=98)


async def test_a_body_is_given_as_it_comes_until_the_other_end_breaks_off(short_path: Path) -> None:
    path, found = short_path / "a", bytearray()

    async def read(call: HttpCall) -> None:
        async for piece in call.pieces():
            found.extend(piece)

    async with (
        await asyncio.start_unix_server(answering(OK[:-2]), path),
        calling(streams_of(await connected_unix(path)), REQUEST) as call,
    ):
        assert await call.status() == 200
        with pytest.raises(HungUp):
            await read(call)
    assert found == b"ab"


async def test_a_call_over_tcp_is_the_same() -> None:
    server = await asyncio.start_server(answering(OK), "127.0.0.1", 0)
    async with server:
        host, port = server.sockets[0].getsockname()
        async with calling(asyncio.open_connection(host, port), REQUEST) as call:
            assert (await call.status(), await call.body(10)) == (200, b"abcd")


async def test_a_socket_may_have_a_path_of_any_length(short_path: Path) -> None:
    deep = short_path / ("d" * 100)
    deep.mkdir()
    here = os.open(deep, os.O_RDONLY)
    try:
        async with await asyncio.start_unix_server(answering(OK), f"/proc/self/fd/{here}/a"):
            (await connected_unix(deep / "a")).close()
    finally:
        os.close(here)


async def test_a_full_backlog_is_waited_for(short_path: Path) -> None:
    path = short_path / "a"
    with closing(socket.socket(socket.AF_UNIX)) as listener, closing(socket.socket(socket.AF_UNIX)) as first:
        listener.bind(str(path))
        listener.listen(0)
        first.connect(str(path))
        waiting = asyncio.ensure_future(connected_unix(path))
        await asyncio.sleep(0.02)
        assert not waiting.done()
        listener.accept()[0].close()
        (await waiting).close()
