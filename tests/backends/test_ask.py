"""Control questions: addresses as people write them, and answers that are none."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import msgspec
import pytest

from hive.backends import ask
from hive.backends.conversation import AskedServer, decoded
from hive.errors import BackendDown, BackendTimeout, UsageError
from tests.listening import listening


class Found(msgspec.Struct):
    version: str


@contextlib.asynccontextmanager
async def answering(answer: bytes) -> AsyncIterator[str]:
    """A server that reads a head and writes `answer`, whatever was asked; its address."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()

    async with listening(handle) as address:
        yield address


@pytest.mark.parametrize(
    ("written", "address"),
    [
        ("http://127.0.0.1:11434", "127.0.0.1:11434"),
        ("http://127.0.0.1:11434/", "127.0.0.1:11434"),
        ("localhost:8000", "localhost:8000"),
        ("http://box", "box:80"),
        ("[::1]:8080", "[::1]:8080"),
        ("/run/llama.sock", "/run/llama.sock"),
        ("unix:///run/llama.sock", "/run/llama.sock"),
        ("http://box:8000/v1", "box:8000"),
        ("https://box:443", "https://box"),
        ("https://BOX:8443/llm/v1/", "https://box:8443/llm"),
        ("http://[::1]:80/llm/v1", "http://[::1]/llm"),
        ("https://bücher.example/v1", "https://xn--bcher-kva.example"),
    ],
)
def test_an_address_is_understood(written: str, address: str) -> None:
    assert ask.parse_address(written) == address


@pytest.mark.parametrize(
    "written",
    [
        *("", "https://", "http://user:secret@box", "ftp://box", "unix://run/x", "box:port"),
        *("https://box/v1?key=secret", "https://box/v1#x", "https://box/a%2fb/v1", "https://box/a b"),
    ],
)
def test_what_is_no_address_is_refused_and_a_secret_in_it_not_repeated(written: str) -> None:
    with pytest.raises(UsageError) as refused:
        ask.parse_address(written)
    if "secret" in written:
        assert "secret" not in refused.value.message + refused.value.hint


async def test_a_port_where_nobody_listens_is_down() -> None:
    async with answering(b"") as address:
        pass
    with pytest.raises(BackendDown):
        await ask.get(address, "/")


async def test_a_socket_that_does_not_exist_is_down() -> None:
    with pytest.raises(BackendDown):
        await ask.get("/nonexistent/x.sock", "/")


@pytest.mark.parametrize(
    "answer", [b"", b"SSH-2.0-OpenSSH_9\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nshort"]
)
async def test_an_answer_that_is_no_whole_http_is_down(answer: bytes) -> None:
    async with answering(answer) as address:
        with pytest.raises(BackendDown):
            await ask.get(address, "/")


async def test_an_answer_without_end_is_cut_at_the_limit() -> None:
    async def pour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            writer.write(bytes(65536))
            await writer.drain()

    async with listening(pour) as address:
        with pytest.raises(BackendDown, match="larger than"):
            await ask.get(address, "/", within_s=60)


async def test_silence_is_a_timeout() -> None:
    async def sit(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with listening(sit) as address:
        with pytest.raises(BackendTimeout):
            await ask.get(address, "/", within_s=0.05)


async def test_an_answer_that_drips_is_a_timeout_too() -> None:
    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for byte in b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 10_000:
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0.02)

    async with listening(drip) as address:
        with pytest.raises(BackendTimeout):
            await ask.get(address, "/", within_s=0.1)


async def _found(address: str) -> Found:
    return decoded(AskedServer(address), "/", await ask.get(address, "/"), Found)


@pytest.mark.parametrize(
    "body", [b"[]", b'{"version": 3}', b"not json", b"{}", b'{"version": "\xff"}'], ids=lambda body: repr(body)
)
async def test_json_of_another_shape_is_down(body: bytes) -> None:
    async with answering(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)) as address:
        with pytest.raises(BackendDown):
            await _found(address)


async def test_a_redirect_is_not_followed() -> None:
    head = b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n"
    async with answering(head) as address:
        assert (await ask.get(address, "/")).status == 302
        with pytest.raises(BackendDown, match="status 302"):
            await _found(address)
