"""The faults of a backend and of a client, one after another, and after each the same questions.

Did the client get a well-formed answer, or a stream it can tell was cut? Is everything given back? Did nothing escape
into the loop? Is the next request served? Bad HTTP of a backend is in test_response_vectors.py, leaving clients in
test_cancel.py, `kill -9` in journeys/test_chaos.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import psutil
import pytest

from hive.domain import BackendInfo, BackendKind
from tests.proxy.at_rest import complaints, held
from tests.proxy.harness import (
    CHAT,
    JSON_ANSWER,
    STREAM,
    Backend,
    Client,
    Proxy,
    answer,
    chunked,
    digest,
    post,
    proxied,
    read_request,
)
from tests.waiting import until

MIB = 1 << 20
ASK = post(b"/v1/chat/completions", CHAT)
ASK_STREAM = post(b"/v1/chat/completions", STREAM)
EVENTS = [
    b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n',
    b": a comment\n\n",
    b'data: {"choices":[{"delta":{"content":"b"}}]}\n\n',
    b'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":2,"total_tokens":7}}\n\n',
    b"data: [DONE]\n\n",
]
LINES = [
    b'{"message":{"content":"a"},"done":false}\n',
    b'{"message":{"content":"b"},"done":false}\n',
    b'{"done":true,"prompt_eval_count":4,"eval_count":9}\n',
]
RESET = struct.pack("ii", 1, 0)


@contextlib.asynccontextmanager
async def faulty(tmp_path: Path, **settings: Any) -> AsyncIterator[tuple[Proxy, Backend]]:
    """A data path; at the end, after any fault, nothing is held, nothing escaped, the next request is served."""
    async with proxied(tmp_path, **settings) as (proxy, backend):
        before = held(proxy)
        with complaints() as found:
            yield proxy, backend
            while Client.opened:
                Client.opened.pop().close()
            await until(lambda: held(proxy) == before)
            ids = [event.id for event in proxy.events]
            assert len(ids) == len(set(ids)), "nobody pays twice"
            backend.script, backend.reply = None, answer(JSON_ANSWER)
            proxy.path.use_backend(None, [])
            proxy.use(backend)
            assert (await (await Client.unix(proxy.socket_path)).ask(ASK))[0] == 200
            assert found == []


async def everything(client: Client) -> bytes:
    """All that still comes, up to the end, however the connection ends."""
    data = b""
    with contextlib.suppress(ConnectionError):
        while more := await asyncio.wait_for(client.reader.read(65536), 10):
            data += more
    return data


# --- it is not there -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["port", "no socket file", "socket nobody listens on", "name of no host"])
async def test_a_backend_that_refuses_is_502_again_and_again_until_it_is_back(tmp_path: Path, where: str) -> None:
    async with faulty(tmp_path) as (proxy, _):
        with socket.socket() as closed, socket.socket(socket.AF_UNIX) as deaf:
            closed.bind(("127.0.0.1", 0))
            deaf.bind(str(tmp_path / "deaf.sock"))
            address = {
                "port": f"127.0.0.1:{closed.getsockname()[1]}",
                "no socket file": str(tmp_path / "none.sock"),
                "socket nobody listens on": str(tmp_path / "deaf.sock"),
                "name of no host": "backend.invalid:80",
            }[where]
            proxy.path.use_backend(BackendInfo(kind=BackendKind.LLAMA, address=address, up=True), [])
            client = await Client.unix(proxy.socket_path)
            for body in (CHAT, STREAM) * 4:
                status, fields, content = await client.ask(post(b"/v1/chat/completions", body))
                assert (status, json.loads(content)["error"]["code"]) == (502, "backend_unavailable")
                assert fields[b"content-type"] == b"application/json"


async def test_a_unix_backend_whose_backlog_is_full_is_an_error_and_no_wait_for_ever(tmp_path: Path) -> None:
    async with faulty(tmp_path, connect_s=0.5) as (proxy, _):
        path = tmp_path / "full.sock"
        with socket.socket(socket.AF_UNIX) as listening, contextlib.ExitStack() as fillers:
            listening.bind(str(path))
            listening.listen(0)
            for _ in range(4):
                filler = fillers.enter_context(socket.socket(socket.AF_UNIX))
                filler.setblocking(False)
                filler.connect_ex(str(path))
            proxy.path.use_backend(BackendInfo(kind=BackendKind.LLAMA, address=str(path), up=True), [])
            client = await Client.unix(proxy.socket_path)
            assert (await client.ask(ASK))[0] in (502, 503, 504)


# --- it dies ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["fin", "rst"])
@pytest.mark.parametrize("request_bytes", [ASK, ASK_STREAM], ids=["one piece", "stream"])
@pytest.mark.parametrize("spoke", [b"", b"HTTP/1.1 200 OK\r\ncontent-le"], ids=["nothing", "half a head"])
async def test_a_backend_that_dies_before_its_head_is_502_and_is_not_asked_twice(
    tmp_path: Path, how: str, request_bytes: bytes, spoke: bytes
) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        backend.requests.append(await read_request(reader))
        writer.write(spoke)
        await _dies(writer, how)

    async with faulty(tmp_path) as (proxy, backend):
        backend.script = script
        client = await Client.unix(proxy.socket_path)
        status, _, content = await client.ask(request_bytes)
        assert (status, json.loads(content)["error"]["src"]) == (502, "hive")
        assert len(backend.requests) == 1, "a request may have cost something already"
        assert [event.cut for event in proxy.events] == [True]


async def _dies(writer: asyncio.StreamWriter, how: str) -> None:
    """Ends the connection behind the written bytes, which arrive: with the end, or a reset."""
    if how == "rst":
        await asyncio.sleep(0.002)  # a reset overtakes what has not been read
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        writer.transport.abort()


class Kind(NamedTuple):
    """An answer in one dialect: its bytes, where its pieces end, and what asks for it."""

    backend: BackendKind
    request: bytes
    whole: bytes
    boundaries: list[int]
    content: bytes


def stream(backend: BackendKind, target: bytes, body: bytes, pieces: list[bytes], content_type: bytes) -> Kind:
    whole, at, boundaries = chunked(*pieces, content_type=content_type), 0, []
    at = whole.index(b"\r\n\r\n") + 4
    boundaries.append(at)
    for piece in pieces:
        size_line = len(b"%x\r\n" % len(piece))
        boundaries += [at + size_line, at + size_line + len(piece), at + size_line + len(piece) + 2]
        at = boundaries[-1]
    boundaries += [len(whole) - 4, len(whole) - 2]
    return Kind(backend, post(target, body), whole, boundaries, b"".join(pieces))


SSE = b"text/event-stream"
NDJSON = b"application/x-ndjson"
ONE_PIECE = answer(JSON_ANSWER)
KINDS = {
    "SSE": stream(BackendKind.LLAMA, b"/v1/chat/completions", STREAM, EVENTS, SSE),
    "SSE, usage taken out": stream(BackendKind.VLLM, b"/v1/chat/completions", STREAM, EVENTS, SSE),
    "NDJSON": stream(BackendKind.OLLAMA, b"/api/chat", CHAT, LINES, NDJSON),
    "one piece": Kind(
        BackendKind.LLAMA,
        ASK,
        ONE_PIECE,
        [ONE_PIECE.index(b"\r\n\r\n") + 4, len(ONE_PIECE) - len(JSON_ANSWER) // 2],
        JSON_ANSWER,
    ),
}


def is_whole(raw: bytes) -> bool:
    """Whether a client that believes in framing takes this for a complete 200."""
    head, _, body = raw.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200"):
        return False
    if b"chunked" in head:
        return body.endswith(b"\r\n0\r\n\r\n") or body == b"0\r\n\r\n"
    return b"content-length: %d\r\n" % len(body) in head + b"\r\n"


@pytest.mark.parametrize("how", ["fin", "rst"])
@pytest.mark.parametrize("name", KINDS)
async def test_a_backend_that_dies_at_any_boundary_of_its_answer_never_makes_a_clean_end(
    tmp_path: Path, name: str, how: str
) -> None:
    kind, cut = KINDS[name], 0

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(kind.whole[:cut])
        await _dies(writer, how)

    async with faulty(tmp_path, window_requests=10_000) as (proxy, backend):
        proxy.use(backend, kind.backend)
        backend.script = script
        cuts = sorted({at + step for at in kind.boundaries for step in (-1, 0, 1)} - {len(kind.whole)})
        for number, at in enumerate(cuts, 1):
            cut = at
            client = await Client.unix(proxy.socket_path)
            client.writer.write(kind.request)
            raw = await what_came_of_it(client)
            assert not is_whole(raw), f"cut at {at} of {len(kind.whole)}: {raw!r}"
            assert raw.startswith((b"HTTP/1.1 200", b"HTTP/1.1 502")), f"cut at {at}: {raw!r}"
            assert len(proxy.events) == number, f"cut at {at}: one event for one request"
            assert proxy.events[-1].cut
            client.close()


async def what_came_of_it(client: Client) -> bytes:
    """The client's bytes when it knows that no more comes: behind an error of Hive's the connection stays open."""
    data = b""
    with contextlib.suppress(ConnectionError):
        while more := await asyncio.wait_for(client.reader.read(65536), 10):
            data += more
            head, _, body = data.partition(b"\r\n\r\n")
            if head.startswith(b"HTTP/1.1 502") and b"content-length: %d\r\n" % len(body) in head + b"\r\n":
                break
    return data


# --- it is too much --------------------------------------------------------------------------------------------------


async def test_a_line_of_64_mib_is_relayed_and_not_kept(tmp_path: Path) -> None:
    piece, count = b"x" * MIB, 64

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/x-ndjson\r\ntransfer-encoding: chunked\r\n\r\n")
        for _ in range(count):
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            await writer.drain()
        last = b"\n" + LINES[-1]
        writer.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(last), last))

    async with faulty(tmp_path) as (proxy, backend):
        proxy.use(backend, BackendKind.OLLAMA)
        backend.script = script
        client = await Client.unix(proxy.socket_path)
        client.writer.write(post(b"/api/chat", CHAT))
        before, most, xs, end = psutil.Process().memory_info().rss, 0, 0, b""
        while not end.endswith(b"\r\n0\r\n\r\n"):
            data = await asyncio.wait_for(client.reader.read(MIB), 10)
            xs += data.count(b"x")
            end = (end + data)[-200:]
            most = max(most, psutil.Process().memory_info().rss)
        assert xs >= count * MIB
        assert most - before < 32 * MIB, "client, backend and proxy together hold buffers, not the line"
        event = proxy.events[0]
        assert (event.tokens_in, event.tokens_out, event.cut) == (4, 9, False), "the line behind it is read again"


async def test_a_line_that_never_ends_is_an_incomplete_answer(tmp_path: Path) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(chunked(*[b"x" * MIB] * 3, content_type=NDJSON))

    async with faulty(tmp_path) as (proxy, backend):
        proxy.use(backend, BackendKind.OLLAMA)
        backend.script = script
        client = await Client.unix(proxy.socket_path)
        client.writer.write(post(b"/api/chat", CHAT))
        assert not is_whole(await everything(client))
        assert [event.cut for event in proxy.events] == [True]


# --- the client is slow ----------------------------------------------------------------------------------------------


async def _floods(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await read_request(reader)
    writer.write(chunked(EVENTS[0], end=False))
    try:
        while True:
            writer.write(b"2000\r\n%b\r\n" % (b"x" * 8192))
            await writer.drain()
    finally:
        writer.transport.abort()  # uvloop would wait for ever, as nothing reads it


async def test_a_client_that_reads_no_more_loses_its_place(tmp_path: Path) -> None:
    """It stalls as a backend does: `between_bytes_s` holds for both, or a place is lost for ever."""
    async with faulty(tmp_path, between_bytes_s=0.3) as (proxy, backend):
        backend.script = _floods
        client = Client(*await asyncio.open_unix_connection(str(proxy.socket_path), limit=1000))
        client.writer.write(ASK_STREAM)
        await client.reader.readuntil(b"\r\n")
        await until(lambda: proxy.alice.gate.in_flight == 0)
        assert [event.cut for event in proxy.events] == [True]
        await until(lambda: backend.closed == backend.connections)


async def test_a_client_that_reads_little_by_little_is_served_to_the_end(tmp_path: Path) -> None:
    long = JSON_ANSWER.replace(b'"hi"', b'"%b"' % (b"x" * (2 * MIB)))

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(answer(long))

    async with faulty(tmp_path, between_bytes_s=0.5) as (proxy, backend):
        backend.script = script
        client = Client(*await asyncio.open_unix_connection(str(proxy.socket_path), limit=1000))
        client.writer.write(ASK)
        await client.reader.readuntil(b"\r\n\r\n")
        got = b""
        while len(got) < len(long):
            piece = await asyncio.wait_for(client.reader.read(32768), 10)
            assert piece, "it was cut"
            got += piece
            await asyncio.sleep(0.015)
        assert got == long
        assert [event.cut for event in proxy.events] == [False]


# --- the proxy itself stands still -----------------------------------------------------------------------------------


async def test_requests_in_flight_outlive_a_loop_that_stood_still(tmp_path: Path) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await read_request(reader)
            await asyncio.sleep(0.05)
            writer.write(answer(JSON_ANSWER))

    async with faulty(tmp_path, tier_low_concurrency=10) as (proxy, backend):
        backend.script = script
        clients = [await Client.unix(proxy.socket_path) for _ in range(20)]
        for client in clients:
            client.writer.write(ASK)
        await until(lambda: proxy.alice.gate.in_flight == 20)
        time.sleep(1.5)  # noqa: ASYNC251 - this is the fault
        assert [(await client.answer())[0] for client in clients] == [200] * 20


async def test_a_flood_of_one_tenant_is_refused_and_every_request_of_the_other_is_served(tmp_path: Path) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await read_request(reader)
            await asyncio.sleep(0.005)
            writer.write(answer(JSON_ANSWER))

    async with faulty(tmp_path, backend_concurrency=2, window_requests=10_000, queue_depth=16) as (proxy, backend):
        backend.script = script
        row = msgspec.structs.replace(proxy.row, id="b1", name="bob", tenant="quiet", model_digest=digest(b"hm_bob"))
        proxy.registry.learn(row)
        flooding = [await Client.unix(proxy.socket_path) for _ in range(60)]
        refused, over = 0, False

        async def floods(client: Client) -> None:
            nonlocal refused
            while not over:
                refused += (await client.ask(ASK))[0] == 503

        tasks = [asyncio.ensure_future(floods(client)) for client in flooding]
        await until(lambda: refused > 0)
        bob = await Client.tcp(proxy.port)
        ask = post(b"/v1/chat/completions", CHAT, token=b"hm_bob")
        statuses = [(await bob.ask(ask))[0] for _ in range(50)]
        over = True
        await asyncio.gather(*tasks)
        assert statuses == [200] * 50
        proxy.registry.forget("b1")
