"""One token, asked of what can give it and of what cannot."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from hive.backends import one_token
from hive.demo.server import listen, serve
from hive.domain import BackendKind
from hive.errors import BackendDown, BackendTimeout
from tests.listening import listening
from tests.llama import MODEL, LlamaServer


@asynccontextmanager
async def answering(path: Path, answer: bytes) -> AsyncIterator[list[bytes]]:
    """A server that answers everything with this; what it was asked. Without an answer it says nothing."""
    asked: list[bytes] = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        asked.append(head.split(b"\r\n")[0] + b" " + await reader.read(65536))
        writer.write(answer)
        if not answer:
            await reader.read()

    async with listening(talk, path):
        yield asked


def ok(body: bytes, status: bytes = b"200 OK") -> bytes:
    return b"HTTP/1.1 %b\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body)


@pytest.mark.parametrize(
    ("kind", "asked", "answer"),
    [
        (
            BackendKind.VLLM,
            b'POST /v1/completions HTTP/1.1 {"model":"m","prompt":"Hi","max_tokens":1}',
            b'{"usage":{"completion_tokens":1}}',
        ),
        (
            BackendKind.OLLAMA,
            b'POST /api/generate HTTP/1.1 {"model":"m","prompt":"Hi","stream":false,"options":{"num_predict":1}}',
            b'{"response":"x","eval_count":1}',
        ),
    ],
)
async def test_it_is_asked_in_the_servers_own_dialect(
    short_path: Path, kind: BackendKind, asked: bytes, answer: bytes
) -> None:
    async with answering(short_path / "b.sock", ok(answer)) as seen:
        await one_token.generate(kind, str(short_path / "b.sock"), "m", within_s=5)
    assert seen == [asked]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (ok(b'{"error":\n"no kernel"}', b"500 X"), 'asked for a token of m it answers 500: {"error": "no kernel"}'),
        (ok(b'{"usage":{"completion_tokens":0}}'), "it generated none"),
        (ok(b"<html>"), "it generated none"),
        (ok(b"\xff\xfe", b"404 X"), "it answers 404: "),
        (b"nonsense", "does not answer POST /v1/completions"),
    ],
)
async def test_what_gives_none_is_down_with_what_it_said(short_path: Path, answer: bytes, said: str) -> None:
    async with answering(short_path / "b.sock", answer):
        with pytest.raises(BackendDown) as raised:
            await one_token.generate(BackendKind.LLAMA, str(short_path / "b.sock"), "m", within_s=5)
    assert said in raised.value.message


async def test_it_does_not_wait_for_ever(short_path: Path) -> None:
    async with answering(short_path / "b.sock", b""):
        with pytest.raises(BackendTimeout):
            await one_token.generate(BackendKind.LLAMA, str(short_path / "b.sock"), "m", within_s=0.1)


async def test_the_demo_backend_gives_one(short_path: Path) -> None:
    path = short_path / "demo.sock"
    serving = asyncio.ensure_future(serve(listen(socket=path), handle_signals=False))
    try:
        await one_token.generate(BackendKind.DEMO, str(path), "hive-demo", within_s=10)
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


@pytest.mark.llama
async def test_a_real_llama_server_gives_one(llama_server: LlamaServer) -> None:
    await one_token.generate(BackendKind.LLAMA, llama_server.address, MODEL, within_s=20)


REFUSED = b'{"error":{"message":"Unsupported parameter: max_tokens. Use max_completion_tokens instead."}}'


async def test_who_wants_the_limit_by_another_name_is_said_how(short_path: Path) -> None:
    """A switch to a gateway before OpenAI's models failed, and nothing said what to do."""
    asked: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        asked.append(await reader.readexactly(length))
        is_known = b"max_completion_tokens" in asked[-1]
        body, status = (b'{"usage":{"completion_tokens":1}}', b"200 OK") if is_known else (REFUSED, b"400 Bad Request")
        writer.write(b"HTTP/1.1 %b\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b" % (status, len(body), body))

    async with listening(serve, short_path / "g.sock") as path:
        with pytest.raises(BackendDown) as refused:
            await one_token.generate(BackendKind.REMOTE, path, "m", within_s=20)
        assert "backend_limit_name = max_completion_tokens" in refused.value.hint
        await one_token.generate(BackendKind.REMOTE, path, "m", within_s=20, limit="max_completion_tokens")
    assert [b'"max_tokens"' in body for body in asked] == [True, False]
