"""The data path over real sockets: what goes upstream, what comes back, and what is given back on every exit."""

from __future__ import annotations

import ast
import asyncio
import json
from pathlib import Path

import msgspec
import pytest

from hive.domain import BackendKind, Tier
from hive.proxy.forward import Exchange
from tests.proxy.harness import (
    CHAT,
    JSON_ANSWER,
    MODEL_TOKEN,
    STREAM,
    Client,
    answer,
    chunked,
    get,
    nothing_is_held,
    post,
    proxied,
    read_request,
)
from tests.waiting import until

EVENTS = [
    b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n',
    b'data: {"choices":[{"delta":{"content":"b"}}]}\n\n',
    b'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":2,"total_tokens":7}}\n\n',
    b"data: [DONE]\n\n",
]


def test_the_steps_of_the_design_are_methods_in_their_order() -> None:
    source = (Path(__file__).parents[2] / "hive/proxy/forward.py").read_text()
    classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    (made,) = [node for node in classes if node.name == Exchange.__name__]
    names = [node.name for node in made.body if isinstance(node, ast.FunctionDef)]
    steps = [int(name.split("_")[1]) for name in names if name[:1] == "_" and name[1:2].isdigit()]
    assert steps == list(range(11)), "design.md §3, and nothing of it in a base class"
    assert Exchange.__bases__ == (object,)


async def test_a_chat_over_the_agents_own_socket_is_rebuilt_forwarded_and_metered(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, backend):
        client = await Client.unix(proxy.socket_path)
        status, fields, body = await client.ask(
            post(
                b"/v1/chat/completions",
                b'{ "MODEL" : "m", "temperature":1e0 }',
                fields=b"x-tenant-id: root\r\ncookie: a\r\n",
            )
        )
        assert (status, body) == (200, JSON_ANSWER)
        head, sent = backend.requests[0]
        assert head == (
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            b"content-length: 49\r\n\r\n"
        )
        assert sent == b'{"model":"m","temperature":1e0,"max_tokens":4096}'
        assert fields[b"x-request-id"] == b"e-1"
        assert b"x-queue-wait-ms" in fields
        event = proxy.events[0]
        assert (event.tokens_in, event.tokens_out, event.cut, event.agent_id, event.model) == (7, 3, False, "a1", "m")
        assert nothing_is_held(proxy)
        client.close()


@pytest.mark.parametrize(
    "request_bytes",
    [
        post(b"/v1/chat/completions", CHAT, token=MODEL_TOKEN),
        post(b"/v1/chat/completions", CHAT, fields=b"x-api-key: " + MODEL_TOKEN + b"\r\n"),
        post(b"/a/" + MODEL_TOKEN + b"/v1/chat/completions", CHAT),
    ],
)
async def test_on_tcp_a_token_says_who_asks(tmp_path: Path, request_bytes: bytes) -> None:
    async with proxied(tmp_path) as (proxy, backend):
        client = await Client.tcp(proxy.port)
        assert (await client.ask(request_bytes))[0] == 200
        assert (await client.ask(request_bytes))[0] == 200
        assert backend.connections == 1, "the backend connection is kept"
        assert [event.agent_id for event in proxy.events] == ["a1", "a1"]
        client.close()


async def test_a_wrong_token_is_401_and_closed_and_nothing_is_forwarded(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, backend):
        client = await Client.tcp(proxy.port)
        status, _, body = await client.ask(post(b"/v1/chat/completions", CHAT, token=b"hm_mallory"))
        assert status == 401
        assert json.loads(body)["error"]["src"] == "hive"
        assert await client.at_end()
        assert backend.requests == []
        client.close()


async def test_another_token_on_a_known_connection_is_401_and_closed(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, backend):
        client = await Client.tcp(proxy.port)
        assert (await client.ask(post(b"/v1/chat/completions", CHAT, token=MODEL_TOKEN)))[0] == 200
        assert (await client.ask(post(b"/v1/chat/completions", CHAT, token=b"internal")))[0] == 401
        assert await client.at_end()
        assert len(backend.requests) == 1
        client.close()


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (get(b"/api/delete"), 403),
        (get(b"/api/%74ags"), 403),
        (get(b"//api/tags"), 403),
        (get(b"/api/delete?x"), 403),
        (get(b"/v1/models?limit=0"), 400),
        (get(b"/v1/models?after_id=gpt-9"), 400),
        (get(b"/v1/models/../../api/tags"), 404),
        (get(b"/api/chat"), 405),
        (post(b"/api/tags", b"{}"), 405),
        (post(b"/v1/chat/completions", b"[]"), 400),
        (post(b"/v1/chat/completions", b"{"), 400),
        (post(b"/v1/chat/completions", b'{"model":"a","model":"b"}'), 400),
        (post(b"/v1/chat/completions", b'{"model":7}'), 400),
        (post(b"/v1/chat/completions", b'{"stream":"yes"}'), 400),
        (post(b"/v1/chat/completions", b"\xff{}"), 400),
        (post(b"/v1/chat/completions", b"[" * 100_000), 400),
        (post(b"/v1/chat/completions", CHAT, fields=b"content-encoding: gzip\r\n"), 415),
        (post(b"/api/push", CHAT), 403),
        (get(b"/api/pull"), 405),
        (post(b"/v1/chat/completions", CHAT.replace(b'"m"', b'"gpt-9"')), 404),
    ],
)
async def test_what_may_not_be_asked_is_refused_and_the_connection_lives(
    tmp_path: Path, request_bytes: bytes, status: int
) -> None:
    async with proxied(tmp_path) as (proxy, backend):
        client = await Client.unix(proxy.socket_path)
        assert (await client.ask(request_bytes))[0] == status
        assert backend.requests == []
        assert (await client.ask(post(b"/v1/chat/completions", CHAT)))[0] == 200
        assert nothing_is_held(proxy)
        client.close()


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET /api/tags HTTP/1.1\r\n\r\n",
        b"GET /api/tags HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n",
        b"POST /api/chat HTTP/1.1\r\nhost: h\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n",
        b"POST /api/chat HTTP/1.1\r\nhost: h\r\ncontent-length: +2\r\n\r\n",
        b"GET /api/tags HTTP/2.0\r\nhost: h\r\n\r\n",
        b"GET /api/tags HTTP/1.1\r\nhost: h\r\nContent_Length: 2\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET /" + b"x" * 20_000,
    ],
)
async def test_malformed_requests_end_the_connection(tmp_path: Path, request_bytes: bytes) -> None:
    async with proxied(tmp_path) as (proxy, backend):
        client = await Client.unix(proxy.socket_path)
        status, fields, _ = await client.ask(request_bytes)
        assert status in (400, 414, 505)
        assert fields[b"connection"] == b"close"
        assert await client.at_end()
        assert backend.requests == []
        client.close()
        await until(lambda: nothing_is_held(proxy))


async def test_errors_speak_the_dialect_of_the_path(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, _):
        client = await Client.unix(proxy.socket_path)
        assert isinstance(json.loads((await client.ask(get(b"/api/push")))[2])["error"], str)
        assert json.loads((await client.ask(get(b"/v1/files")))[2])["error"]["code"] == "forbidden"
        client.close()


async def test_a_stream_is_relayed_chunk_by_chunk_and_metered(tmp_path: Path) -> None:
    go = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        whole = chunked(*EVENTS)
        first = whole.index(b"\r\n\r\n") + 4 + len(EVENTS[0]) + 6
        writer.write(whole[:first])
        await go.wait()
        writer.write(whole[first:])

    async with proxied(tmp_path) as (proxy, backend):
        backend.script = script
        client = await Client.unix(proxy.socket_path)
        client.writer.write(post(b"/v1/chat/completions", STREAM))
        head = await client.reader.readuntil(b"\r\n\r\n")
        assert b"transfer-encoding: chunked" in head
        assert b"x-accel-buffering: no" in head
        size = int(await client.reader.readuntil(b"\r\n"), 16)
        assert await client.reader.readexactly(size + 2) == EVENTS[0] + b"\r\n", (
            "the first chunk came while the rest waits"
        )
        assert proxy.events == []
        go.set()
        rest = await client.reader.readuntil(b"0\r\n\r\n")
        assert b"[DONE]" in rest
        assert (proxy.events[0].tokens_in, proxy.events[0].tokens_out, proxy.events[0].cut) == (5, 2, False)
        client.close()


@pytest.mark.parametrize(
    "upstream",
    [
        chunked(*EVENTS[:2], end=False),
        chunked(*EVENTS[:3]),
        answer(b'{"usage"')[:-3],
    ],
    ids=["broken off", "ends cleanly without its marker", "shorter than its length"],
)
async def test_an_incomplete_answer_is_never_a_clean_end(tmp_path: Path, upstream: bytes) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(upstream)

    async with proxied(tmp_path) as (proxy, backend):
        backend.script = script
        client = await Client.unix(proxy.socket_path)
        client.writer.write(post(b"/v1/chat/completions", STREAM))
        try:
            status, _, _ = await client.answer()
        except (asyncio.IncompleteReadError, ConnectionResetError):
            status = 0
        assert status in (0, 502)
        await until(lambda: nothing_is_held(proxy))
        assert [event.cut for event in proxy.events] == [True]
        client.close()


async def test_ollamas_last_object_is_the_end_and_the_count(tmp_path: Path) -> None:
    lines = b'{"message":{"content":"a"},"done":false}\n{"done":true,"prompt_eval_count":4,"eval_count":9}\n'
    async with proxied(tmp_path) as (proxy, backend):
        proxy.use(backend, BackendKind.OLLAMA)
        backend.reply = chunked(lines[:20], lines[20:], content_type=b"application/x-ndjson")
        client = await Client.unix(proxy.socket_path)
        assert (await client.ask(post(b"/api/chat", CHAT)))[2] == lines
        assert (proxy.events[0].tokens_in, proxy.events[0].tokens_out, proxy.events[0].cut) == (4, 9, False)
        client.close()


async def test_head_is_asked_as_get_and_answered_without_a_body(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, backend):
        proxy.use(backend, BackendKind.OLLAMA)
        client = await Client.unix(proxy.socket_path)
        for _ in range(2):
            status, fields, _ = await client.ask(get(b"/api/tags", method=b"HEAD"))
            assert (status, fields[b"content-length"]) == (200, b"%d" % len(JSON_ANSWER))
        assert backend.requests[0][0].startswith(b"GET /api/tags ")
        assert proxy.events == [], "lists are not metered"
        client.close()


async def test_lists_are_answered_from_the_daemons_list(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, backend):
        client = await Client.unix(proxy.socket_path)
        rows = json.loads((await client.ask(get(b"/v1/models")))[2])["data"]
        assert [row["id"] for row in rows] == ["meta/llama-3 x", "m"]
        assert isinstance(rows[0]["created"], int)
        assert (await client.ask(get(b"/v1/models/meta%2Fllama-3%20x")))[0] == 200
        assert (await client.ask(get(b"/v1/models/other")))[0] == 404
        assert backend.requests == []
        client.close()


async def test_pipelined_requests_are_answered_in_order(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, _):
        client = await Client.unix(proxy.socket_path)
        whole = post(b"/v1/chat/completions", CHAT) + get(b"/v1/models") + post(b"/v1/chat/completions", CHAT)
        for cut in (1, 40, len(whole) // 2, len(whole) - 3, len(whole)):
            client.writer.write(whole[:cut])
            await client.writer.drain()
            await asyncio.sleep(0.005)
            client.writer.write(whole[cut:])
            answers = [await client.answer() for _ in range(3)]
            assert [status for status, _, _ in answers] == [200, 200, 200]
            assert [b"chat.completion" in body for _, _, body in answers] == [True, False, True]
        assert nothing_is_held(proxy)
        client.close()


async def test_a_body_beyond_the_limit_is_413_also_when_chunked(tmp_path: Path) -> None:
    async with proxied(tmp_path, body_max_bytes=1000) as (proxy, backend):
        client = await Client.unix(proxy.socket_path)
        status, _, told = await client.ask(post(b"/v1/chat/completions", b"x" * 1001))
        said = "a body of 1001 bytes exceeds 1000 bytes ([proxy] body_max_bytes)"
        assert (status, json.loads(told)["error"]["message"]) == (413, said)
        client.close()
        client = await Client.unix(proxy.socket_path)
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n"
        status, _, _ = await client.ask(head + b"1f4\r\n%b\r\n" % (b"x" * 500) * 3)
        assert status == 413
        client.close()
        assert backend.requests == []
        await until(lambda: nothing_is_held(proxy))


async def test_100_continue_comes_only_after_the_checks(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, _):
        client = await Client.unix(proxy.socket_path)
        head, _, body = post(b"/v1/chat/completions", CHAT, fields=b"expect: 100-continue\r\n").partition(b"\r\n\r\n")
        client.writer.write(head + b"\r\n\r\n")
        assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        assert (await client.ask(body))[0] == 200
        status, fields, _ = await client.ask(
            post(b"/api/push", b"", fields=b"expect: 100-continue\r\n")[:-4] + b"\r\n\r\n"
        )
        assert (status, b"connection" in fields) == (403, True)
        client.close()


async def test_the_window_refuses_with_retry_after_and_lists_are_free(tmp_path: Path) -> None:
    async with proxied(tmp_path, window_requests=2) as (proxy, _):
        client = await Client.unix(proxy.socket_path)
        statuses = [(await client.ask(post(b"/v1/chat/completions", CHAT)))[0] for _ in range(2)]
        status, fields, _ = await client.ask(post(b"/v1/chat/completions", CHAT))
        assert (statuses, status) == ([200, 200], 429)
        assert 0 < int(fields[b"retry-after"]) <= 60
        assert (await client.ask(get(b"/v1/models")))[0] == 200
        client.close()


async def test_thirty_requests_at_once_of_one_agent_are_all_answered_by_default(tmp_path: Path) -> None:
    """A run of LangGraph (a map of thirty branches, six calls each) failed in 9 of them: 16 could wait, 120 could come
    in a minute, and its client gives up after the third refusal."""
    async with proxied(tmp_path) as (proxy, backend):
        most = 0

        async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal most
            while True:
                await read_request(reader)
                most = max(most, proxy.registry.queue.waiting)
                await asyncio.sleep(0)
                writer.write(answer(JSON_ANSWER))

        backend.script = script
        clients = [await Client.unix(proxy.socket_path) for _ in range(30)]
        for _ in range(6):
            found = await asyncio.gather(*(client.ask(post(b"/v1/chat/completions", CHAT)) for client in clients))
            assert [status for status, _, _ in found] == [200] * 30
        assert most > 16
        assert nothing_is_held(proxy)


@pytest.mark.parametrize(("status", "cost"), [(400, (0, 0)), (404, (0, 0)), (500, (None, None))])
async def test_a_request_that_the_backend_refused_has_cost_nothing(
    tmp_path: Path, status: int, cost: tuple[int | None, int | None]
) -> None:
    """It was counted as one of unknown cost, and its agent charged with the expected cost."""
    async with proxied(tmp_path) as (proxy, backend):
        backend.reply = answer(b'{"error":{"message":"too long"}}').replace(b"200 OK", b"%d No" % status)
        client = await Client.unix(proxy.socket_path)
        assert (await client.ask(post(b"/v1/chat/completions", CHAT)))[0] == status
        (event,) = proxy.events
        assert (event.status, (event.tokens_in, event.tokens_out)) == (status, cost)


async def test_above_its_tier_an_agent_waits_in_line_and_a_full_line_refuses_with_retry_after(tmp_path: Path) -> None:
    go = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            backend.requests.append(await read_request(reader))
            await go.wait()
            writer.write(answer(JSON_ANSWER))

    async with proxied(tmp_path, queue_depth=3) as (proxy, backend):
        backend.script = script
        clients = [await Client.unix(proxy.socket_path) for _ in range(6)]
        for client in clients[:5]:
            client.writer.write(post(b"/v1/chat/completions", CHAT))
            await asyncio.sleep(0.01)
        await until(lambda: len(backend.requests) == 2)
        queue = proxy.registry.queue
        assert (queue.running, queue.waiting) == (2, 3)
        status, fields, _ = await clients[5].ask(post(b"/v1/chat/completions", CHAT))
        assert (status, b"retry-after" in fields) == (503, True)
        go.set()
        assert [(await client.answer())[0] for client in clients[:5]] == [200] * 5
        assert nothing_is_held(proxy)
        assert len(proxy.events) == 5
        for client in clients:
            client.close()


async def test_whoever_waits_too_long_in_line_is_refused_and_gets_its_charge_back(tmp_path: Path) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        await asyncio.sleep(3)

    async with proxied(tmp_path, queue_wait_s=0.2) as (proxy, backend):
        backend.script = script
        clients = [await Client.unix(proxy.socket_path) for _ in range(3)]
        for client in clients:
            client.writer.write(post(b"/v1/chat/completions", CHAT))
            await asyncio.sleep(0.01)
        assert (await clients[2].answer())[0] == 503
        assert repr(proxy.alice.window) == "<SlidingWindow 2/600 in 60 s>"
        for client in clients:
            client.close()
        await until(lambda: nothing_is_held(proxy))


@pytest.mark.parametrize("stage", ["headers pending", "streaming", "in line", "uploading"])
async def test_a_client_that_leaves_cancels_everything_it_caused(tmp_path: Path, stage: str) -> None:
    begun = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        if stage == "streaming":
            writer.write(chunked(*EVENTS[:2], end=False))
        begun.set()
        await reader.read()

    async with proxied(tmp_path) as (proxy, backend):
        backend.script = script
        ahead = [await Client.unix(proxy.socket_path) for _ in range(2 if stage == "in line" else 0)]
        for client in ahead:
            client.writer.write(post(b"/v1/chat/completions", STREAM))
        client = await Client.unix(proxy.socket_path)
        request = post(b"/v1/chat/completions", STREAM)
        client.writer.write(request[:-5] if stage == "uploading" else request)
        if stage == "streaming":
            await client.reader.readuntil(b"\r\n\r\n")
        elif stage == "in line":
            await until(lambda: proxy.registry.queue.waiting == 1)
        elif stage == "uploading":
            await until(lambda: proxy.alice.gate.in_flight == 1)
        else:
            await begun.wait()
        client.writer.transport.abort()
        await until(lambda: proxy.alice.gate.in_flight == len(ahead))
        assert proxy.registry.queue.waiting == 0
        if stage in ("headers pending", "streaming"):
            await until(lambda: backend.closed == 1)
            assert [event.cut for event in proxy.events] == [True]
        for other in ahead:
            other.close()
        await until(lambda: nothing_is_held(proxy))


async def test_a_slow_reader_stops_the_backend_not_the_memory(tmp_path: Path) -> None:
    sent = 0

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await read_request(reader)
        event = b'data: {"choices":[{"delta":{"content":"%b"}}]}\n\n' % (b"x" * 10_000)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        for _ in range(2000):
            writer.write(b"%x\r\n%b\r\n" % (len(event), event))
            sent += len(event)
            await writer.drain()
        writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")

    async with proxied(tmp_path) as (proxy, backend):
        backend.script = script
        client = Client(*await asyncio.open_unix_connection(str(proxy.socket_path), limit=1000))
        client.writer.write(post(b"/v1/chat/completions", STREAM))
        await client.reader.readuntil(b"\r\n")
        before = -1
        while sent != before:
            before = sent
            await asyncio.sleep(0.1)
        assert sent < 12_000_000, "the sockets' buffers are full, the proxy holds a bounded rest"
        whole = 0
        while b"0\r\n\r\n" not in (data := await client.reader.read(65536)) or whole < 15_000_000:
            assert data
            whole += len(data)
        await until(lambda: nothing_is_held(proxy))
        assert [event.cut for event in proxy.events] == [False]
        client.close()


async def test_a_kept_backend_connection_that_died_is_asked_again_once(tmp_path: Path) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        backend.requests.append(await read_request(reader))
        writer.write(answer(JSON_ANSWER))
        backend.requests.append(await read_request(reader))  # and closes without a byte

    async with proxied(tmp_path) as (proxy, backend):
        backend.script = script
        client = await Client.unix(proxy.socket_path)
        assert (await client.ask(post(b"/v1/chat/completions", CHAT)))[0] == 200
        assert (await client.ask(post(b"/v1/chat/completions", CHAT)))[0] == 200
        assert (backend.connections, len(backend.requests)) == (2, 3)
        assert len(proxy.events) == 2
        client.close()


async def test_no_backend_is_503_a_dead_one_502(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, backend):
        client = await Client.unix(proxy.socket_path)
        await backend.stop()
        status, fields, _ = await client.ask(post(b"/v1/chat/completions", CHAT))
        assert status == 502
        assert fields[b"content-type"] == b"application/json"
        proxy.path.use_backend(None, [])
        assert (await client.ask(post(b"/v1/chat/completions", CHAT)))[0] == 503
        assert nothing_is_held(proxy)
        client.close()


async def test_a_silent_backend_is_504_and_a_stalled_one_is_cut(tmp_path: Path) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        _, body = await read_request(reader)
        if b"stream" in body:
            writer.write(chunked(*EVENTS[:1], end=False))
        await reader.read()

    async with proxied(tmp_path, first_byte_s=0.2, between_bytes_s=0.2) as (proxy, backend):
        backend.script = script
        client = await Client.unix(proxy.socket_path)
        assert (await client.ask(post(b"/v1/chat/completions", CHAT)))[0] == 504
        with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError)):
            await client.ask(post(b"/v1/chat/completions", STREAM))
        await until(lambda: backend.closed == 2)
        await until(lambda: nothing_is_held(proxy))
        client.close()


async def test_the_backends_own_errors_pass_unchanged(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, backend):
        error = b'{"error":{"message":"too long","type":"exceed_context_size_error","code":400}}'
        backend.reply = answer(error, status=b"400 Bad Request")
        client = await Client.unix(proxy.socket_path)
        for body in (CHAT, STREAM):
            status, _, got = await client.ask(post(b"/v1/chat/completions", body))
            assert (status, got) == (400, error)
        assert [(event.status, event.tokens_out) for event in proxy.events] == [(400, 0), (400, 0)]
        client.close()


async def test_a_slow_head_is_408(tmp_path: Path) -> None:
    async with proxied(tmp_path, head_s=0.2) as (proxy, _):
        client = await Client.unix(proxy.socket_path)
        assert (await client.ask(b"POST /v1/chat"))[0] == 408
        assert await client.at_end()
        client.close()


async def test_a_cached_prefix_is_told_in_the_head_of_a_whole_answer(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, backend):
        backend.reply = answer(b'{"choices":[{}],"timings":{"cache_n":31,"prompt_n":1,"predicted_n":4}}')
        client = await Client.unix(proxy.socket_path)
        _, fields, _ = await client.ask(post(b"/v1/chat/completions", CHAT))
        assert (fields[b"x-cache-hit"], fields[b"x-cache-tokens-reused"]) == (b"true", b"31")
        assert (proxy.events[0].tokens_in, proxy.events[0].tokens_out) == (32, 4)
        client.close()


async def test_without_token_tracking_nothing_is_recorded(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, _):
        import msgspec

        inference = msgspec.structs.replace(proxy.settings.inference, token_tracking=False)
        proxy.path.settings = msgspec.structs.replace(proxy.settings, inference=inference)
        client = await Client.unix(proxy.socket_path)
        assert (await client.ask(post(b"/v1/chat/completions", CHAT)))[0] == 200
        assert proxy.events == []
        client.close()


async def test_the_default_model_is_used_where_agent_and_request_name_none(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, backend):
        import msgspec

        inference = msgspec.structs.replace(proxy.settings.inference, default_model="fallback")
        proxy.use(backend, models=("fallback", "mine", "asked"))
        proxy.path.settings = msgspec.structs.replace(proxy.settings, inference=inference)
        client = await Client.unix(proxy.socket_path)
        await client.ask(post(b"/v1/chat/completions", b'{"messages":[]}'))
        proxy.registry.learn(msgspec.structs.replace(proxy.row, model="mine"))
        await client.ask(post(b"/v1/chat/completions", b'{"messages":[]}'))
        await client.ask(post(b"/v1/chat/completions", b'{"messages":[],"model":"asked"}'))
        assert [json.loads(body)["model"] for _, body in backend.requests] == ["fallback", "mine", "asked"]
        client.close()


NULLS = [event.replace(b"}\n\n", b',"usage":null}\n\n') if b'choices":[{' in event else event for event in EVENTS]


@pytest.mark.parametrize("split", [1, 7, 64, 10_000])
async def test_usage_the_client_did_not_ask_for_is_asked_for_counted_and_taken_out_again(
    tmp_path: Path, split: int
) -> None:
    whole = b"".join(NULLS)
    async with proxied(tmp_path) as (proxy, backend):
        proxy.use(backend, BackendKind.VLLM)
        backend.reply = chunked(*[whole[at : at + split] for at in range(0, len(whole), split)])
        client = await Client.unix(proxy.socket_path)
        _, _, body = await client.ask(post(b"/v1/chat/completions", STREAM))
        assert body == EVENTS[0] + EVENTS[1] + EVENTS[3], "what a client that did not ask would have got"
        assert json.loads(backend.requests[0][1])["stream_options"] == {"include_usage": True}
        assert (proxy.events[0].tokens_in, proxy.events[0].tokens_out, proxy.events[0].cut) == (5, 2, False)
        asked = STREAM[:-1] + b',"stream_options":{"include_usage":true,"include_obfuscation":false}}'
        assert (await client.ask(post(b"/v1/chat/completions", asked)))[2] == whole, "who asked gets it all"
        assert json.loads(backend.requests[1][1])["stream_options"] == {
            "include_usage": True,
            "include_obfuscation": False,
        }
        client.close()


async def test_usage_is_not_asked_of_a_backend_that_always_tells(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, backend):
        backend.reply = chunked(*EVENTS)
        client = await Client.unix(proxy.socket_path)
        await client.ask(post(b"/v1/chat/completions", STREAM))
        await client.ask(post(b"/v1/embeddings", b'{"input":"x","model":"m"}'))
        assert not [body for _, body in backend.requests if b"stream_options" in body]
        client.close()


@pytest.mark.parametrize(
    "last_words",
    [
        b'data: {"error": {"message": "EngineCore encountered an issue", "code": 500}}\n\n',
        b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"abort"}]}\n\n',
    ],
)
async def test_a_backend_that_gave_up_in_mid_stream_is_never_a_clean_end(tmp_path: Path, last_words: bytes) -> None:
    """vLLM killed (SIGKILL, SIGTERM) ends its stream with [DONE] and the last chunk, under 200 (measured)."""
    async with proxied(tmp_path) as (proxy, backend):
        proxy.use(backend, BackendKind.VLLM)
        backend.reply = chunked(EVENTS[0], last_words, EVENTS[3])
        client = await Client.unix(proxy.socket_path)
        client.writer.write(post(b"/v1/chat/completions", STREAM))
        try:
            status, _, _ = await client.answer()
        except (asyncio.IncompleteReadError, ConnectionResetError):
            status = 0
        assert status in (0, 500, 502)
        await until(lambda: [event.cut for event in proxy.events] == [True])
        assert nothing_is_held(proxy)
        client.close()


async def test_what_ollama_passes_over_is_told_and_its_limit_reaches_it_by_the_name_it_knows(tmp_path: Path) -> None:
    """`max_completion_tokens` did nothing before Ollama for a tier without a limit: asked for 5, it made 200, on its
    only place. A forced tool was not forced, and nobody was told."""
    async with proxied(tmp_path) as (proxy, backend):
        proxy.use(backend, BackendKind.OLLAMA)
        proxy.registry.learn(msgspec.structs.replace(proxy.row, tier=Tier.HIGH))
        backend.reply = answer(JSON_ANSWER)
        client = await Client.unix(proxy.socket_path)
        asked = CHAT[:-1] + b',"max_completion_tokens":5,"tool_choice":"required"}'
        status, fields, _ = await client.ask(post(b"/v1/chat/completions", asked))
        assert (status, fields[b"x-hive-ignored"]) == (200, b"tool_choice")
        sent = json.loads(backend.requests[0][1])
        assert (sent["max_tokens"], sent["tool_choice"]) == (5, "required")
        status, fields, content = await client.ask(post(b"/v1/chat/completions", CHAT[:-1] + b',"n":2}'))
        assert (status, len(backend.requests)) == (501, 1)
        assert b"it gives one answer, however many are asked for" in content
        proxy.use(backend, BackendKind.LLAMA)
        status, fields, _ = await client.ask(post(b"/v1/chat/completions", asked))
        assert (status, b"x-hive-ignored" in fields) == (200, False)
