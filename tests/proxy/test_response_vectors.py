"""The answers of tests/wire/response_vectors.py through the whole data path: relayed, refused with 502, or cut."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from hive.domain import BackendKind
from tests.proxy.harness import CHAT, STREAM, Client, get, post, proxied
from tests.wire.response_vectors import ANSWERS, Answer


@pytest.mark.parametrize("answer", ANSWERS, ids=[answer.name for answer in ANSWERS])
async def test_no_nonsense_of_a_backend_reaches_the_client(tmp_path: Path, answer: Answer) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for piece in answer.pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.01 if len(answer.pieces) < 10 else 0)
        if not answer.closes:
            await reader.read()

    async with proxied(tmp_path) as (proxy, backend):
        backend.script = serve
        client = await Client.unix(proxy.socket_path)
        if answer.outcome == "cut":
            client.writer.write(post(b"/v1/chat/completions", STREAM))
            seen = await asyncio.wait_for(read_until_cut(client), 5)
            assert seen.startswith(b"HTTP/1.1 200 OK\r\n")
            assert answer.body in seen
            assert not seen.endswith(b"0\r\n\r\n"), "a cut stream must not end cleanly"
            return
        if answer.outcome == "relayed":
            proxy.use(backend, BackendKind.OLLAMA)  # its greeting is a sentence: anything
            status, fields, body = await client.ask(get(b"/"))
            assert (status, body) == (200, answer.body)
            assert not {b"x", b"x-a", b"upgrade", b"trailer", b"link"} & set(fields)
            return
        status, fields, body = await client.ask(post(b"/v1/chat/completions", CHAT))
        assert status == 502
        assert b'"code":"backend_unavailable"' in body
        backend.script = None
        assert (await client.ask(post(b"/v1/chat/completions", CHAT)))[0] == 200, "the client's connection lives"


async def read_until_cut(client: Client) -> bytes:
    seen = b""
    try:
        while piece := await client.reader.read(65536):
            seen += piece
    except ConnectionError:
        pass
    return seen
