"""The ends of a stream, and signs of life for its reader: never a clean end for half an answer."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from hive.domain import BackendKind
from tests.proxy.harness import (
    CHAT,
    JSON_ANSWER,
    STREAM,
    Backend,
    Client,
    Proxy,
    answer,
    chunked,
    nothing_is_held,
    post,
    proxied,
    read_request,
)
from tests.waiting import until

TEXT = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
DONE = b"data: [DONE]\n\n"
LINE = b'{"model":"m","message":{"role":"assistant","content":"a"},"done":false}\n'
LAST_LINE = b'{"model":"m","done":true,"prompt_eval_count":1,"eval_count":2}\n'
OLLAMA_STREAM = b'{"model":"m","messages":[{"role":"user","content":"hello"}]}'
NDJSON = b"application/x-ndjson"


async def heard(proxy: Proxy, request: bytes) -> bytes:
    """Every byte of the answer, until the proxy closes."""
    client = await Client.unix(proxy.socket_path)
    client.writer.write(request)
    return await asyncio.wait_for(client.reader.read(), 10)


def breaks_off(*pieces: bytes, content_type: bytes = b"text/event-stream") -> bytes:
    return chunked(*pieces, content_type=content_type, end=False)


def sends_and_dies(backend: Backend, first: bytes, rest: bytes = b"") -> None:
    """The rest comes a moment later, so that the first part has been relayed."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(first)
        await asyncio.sleep(0.05)
        writer.write(rest)
        await writer.drain()

    backend.script = script


def as_chunks(*pieces: bytes, end: bool = True) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + (b"0\r\n\r\n" if end else b"")


@pytest.mark.parametrize(
    "rest",
    [b"", b"0\r\n\r\n", as_chunks(b": ping\n\n", end=False)],
    ids=["the connection ends", "no end marker", "the connection ends after a comment"],
)
async def test_a_broken_event_stream_says_so_and_its_framing_stays_open(tmp_path: Path, rest: bytes) -> None:
    async with proxied(tmp_path) as (proxy, backend):
        sends_and_dies(backend, breaks_off(TEXT), rest)
        said = await heard(proxy, post(b"/v1/chat/completions", STREAM))
        last = said[said.rindex(b"data: ") + 6 :].split(b"\n\n")[0]
        error = json.loads(last)["error"]
        assert (error["code"], error["src"]) == ("stream_incomplete", "hive")
        assert not said.endswith(b"0\r\n\r\n")
        await until(lambda: nothing_is_held(proxy))
        assert [event.cut for event in proxy.events] == [True]


async def test_a_broken_ndjson_stream_ends_with_an_error_line(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, backend):
        proxy.use(backend, BackendKind.OLLAMA)
        sends_and_dies(backend, breaks_off(LINE, content_type=NDJSON))
        said = await heard(proxy, post(b"/api/chat", OLLAMA_STREAM))
        lines = [line for line in said.split(b"\r\n") if line.startswith(b"{")]
        assert b'"error":' in lines[-1]
        assert json.loads(lines[-1])["src"] == "hive"
        assert not said.endswith(b"0\r\n\r\n")


async def test_an_event_that_stops_in_its_middle_gets_no_words_behind_it(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, backend):
        sends_and_dies(backend, breaks_off(TEXT, TEXT[:20]))
        client = await Client.unix(proxy.socket_path)
        client.writer.write(post(b"/v1/chat/completions", STREAM))
        said = b""
        try:
            while piece := await asyncio.wait_for(client.reader.read(65536), 10):
                said += piece
        except ConnectionResetError:
            pass
        assert b"stream_incomplete" not in said
        assert not said.endswith(b"0\r\n\r\n")


@pytest.mark.parametrize(
    "last_words",
    [
        b'data: {"error": {"message": "EngineCore encountered an issue", "code": 500}}\n\n',
        b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"abort"}]}\n\n',
    ],
    ids=["an error event", "finish_reason abort"],
)
@pytest.mark.parametrize("together", [True, False], ids=["in one piece", "piece by piece"])
async def test_the_end_marker_of_a_backend_that_gave_up_is_not_relayed(
    tmp_path: Path, last_words: bytes, together: bool
) -> None:
    async with proxied(tmp_path) as (proxy, backend):
        proxy.use(backend, BackendKind.VLLM)
        sends_and_dies(backend, breaks_off(TEXT), as_chunks(*([last_words + DONE] if together else [last_words, DONE])))
        said = await heard(proxy, post(b"/v1/chat/completions", STREAM))
        assert last_words in said, "the backend's own word comes through"
        assert b"stream_incomplete" in said
        assert b"[DONE]" not in said
        await until(lambda: [event.cut for event in proxy.events] == [True])


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "one piece"])
@pytest.mark.parametrize(
    ("kind", "target", "told", "status"),
    [
        (BackendKind.VLLM, b"/v1/chat/completions", b'{"error":{"message":"busy","code":503}}', 503),
        (
            BackendKind.VLLM,
            b"/v1/messages",
            b'{"type":"error","error":{"type":"rate_limit_error","message":"busy"}}',
            429,
        ),
        (BackendKind.OLLAMA, b"/api/chat", b'{"error":"busy"}', 502),
        (BackendKind.LLAMA, b"/api/chat", b'{"error":{"message":"busy","code":400}}', 400),
        (BackendKind.REMOTE, b"/v1/messages", b'{"error":{"message":"busy","code":429}}', 429),
        (BackendKind.REMOTE, b"/v1/messages", b'{"error":{"message":"busy: sk-12***","code":401}}', 502),
    ],
)
async def test_an_error_that_comes_with_its_end_keeps_its_words_and_its_status(
    tmp_path: Path, kind: BackendKind, target: bytes, told: bytes, status: int, stream: bool
) -> None:
    """In one read with its end an error became "the backend ended its answer early" with 502; in one piece under 200 it
    was passed on as an answer. What is said of Hive's own key is not passed on."""
    event = told + b"\n" if kind is BackendKind.OLLAMA else b"data: %b\n\n" % told + DONE
    async with proxied(tmp_path) as (proxy, backend):
        proxy.use(backend, kind)
        content_type = NDJSON if kind is BackendKind.OLLAMA else b"text/event-stream"
        backend.reply = chunked(event, content_type=content_type) if stream else answer(told)
        body = b'{"model":"m","max_tokens":9,"stream":%b,' % (b"true" if stream else b"false") + CHAT[13:]
        if target == b"/api/chat":
            body = body.replace(b'"max_tokens":9,', b"")
        client = await Client.unix(proxy.socket_path)
        got, fields, said = await client.ask(post(target, body))
        assert (got, fields[b"content-type"]) == (status, b"application/json")
        assert (b"busy" in said) is (b"sk-" not in told)
        if kind in (BackendKind.OLLAMA, BackendKind.VLLM):
            assert json.loads(said) == json.loads(told), "in its own dialect it stays as it is"
        await until(lambda: [(event.cut, event.status) for event in proxy.events] == [(True, status)])


@pytest.mark.parametrize("old", [False, True], ids=["HTTP/1.1", "HTTP/1.0"])
async def test_a_stream_that_has_a_length_is_not_ended_by_it(tmp_path: Path, old: bool) -> None:
    """It kept its Content-Length, so that all bytes of a stream that gave up made a whole answer."""
    error = b'data: {"error":{"message":"busy"}}\n\n'
    whole = answer(TEXT + error + DONE, content_type=b"text/event-stream")
    async with proxied(tmp_path) as (proxy, backend):
        begun = len(whole) - len(error + DONE)
        sends_and_dies(backend, whole[:begun], whole[begun:])
        said = await heard(proxy, OLD if old else post(b"/v1/chat/completions", STREAM))
        assert b"content-length" not in said
        assert error in said
        assert b"[DONE]" not in said
        assert not said.endswith(b"0\r\n\r\n")
        await until(lambda: [event.cut for event in proxy.events] == [True])


async def test_a_long_answer_in_one_piece_that_is_none_stays_short_of_its_length(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, backend):
        body = b'{"data":[' + b"0.5," * 400_000
        sends_and_dies(backend, answer(body)[:-9], body[-9:])
        said = await heard_or_reset(proxy, post(b"/v1/embeddings", b'{"model":"m","input":"x"}'))
        head, _, got = said.partition(b"\r\n\r\n")
        assert b"content-length: %d" % len(body) in head
        assert len(got) < len(body)
        await until(lambda: [event.cut for event in proxy.events] == [True])


async def heard_or_reset(proxy: Proxy, request: bytes) -> bytes:
    client, said = await Client.unix(proxy.socket_path), b""
    client.writer.write(request)
    try:
        while piece := await asyncio.wait_for(client.reader.read(65536), 10):
            said += piece
    except ConnectionResetError:
        pass
    return said


OLD = post(b"/v1/chat/completions", STREAM, token=b"hm_alice").replace(b"HTTP/1.1", b"HTTP/1.0")


async def test_a_client_of_http_1_0_has_no_framing_and_gets_the_error_all_the_same(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, backend):
        sends_and_dies(backend, breaks_off(TEXT))
        said = await heard(proxy, OLD)
        assert b"transfer-encoding" not in said
        assert b"stream_incomplete" in said


async def test_a_client_of_http_1_0_sees_a_reset_where_no_event_can_follow(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, backend):
        sends_and_dies(backend, breaks_off(TEXT, TEXT[:20]))
        client = await Client.tcp(proxy.port)
        client.writer.write(OLD)
        with pytest.raises(ConnectionResetError):
            await asyncio.wait_for(client.reader.read(), 10)


# signs of life -------------------------------------------------------------------------------------------------------


async def test_a_waiting_stream_hears_nothing_unless_it_is_asked_for(tmp_path: Path) -> None:
    async with proxied(tmp_path, first_byte_s=1.5) as (proxy, backend):
        silent(backend)
        client = await Client.unix(proxy.socket_path)
        assert (await client.ask(post(b"/v1/chat/completions", STREAM)))[0] == 504


def silent(backend: Backend, then: bytes = b"", *, after_s: float = 30.0) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        await asyncio.sleep(after_s)
        writer.write(then)
        await writer.drain()

    backend.script = script


BEAT = b"x-hive-heartbeat: 1\r\n"


async def test_an_event_stream_that_asks_gets_comments_until_its_first_event(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, backend):
        silent(backend, chunked(TEXT, DONE), after_s=5)
        client = await Client.unix(proxy.socket_path)
        status, fields, body = await client.ask(post(b"/v1/chat/completions", STREAM, fields=BEAT))
        assert (status, fields[b"content-type"]) == (200, b"text/event-stream")
        before, _, rest = body.partition(b"data: ")
        assert before.startswith(b":")
        assert before.replace(b"\n", b"").count(b":") >= 2
        assert rest == (TEXT + DONE)[6:]
        assert [event.cut for event in proxy.events] == [False]


async def test_an_ndjson_stream_gets_empty_chunks_its_client_can_read(tmp_path: Path) -> None:
    async with proxied(tmp_path, heartbeat_s=1) as (proxy, backend):
        proxy.use(backend, BackendKind.OLLAMA)
        silent(backend, chunked(LINE, LAST_LINE, content_type=NDJSON), after_s=1.7)
        client = await Client.unix(proxy.socket_path)
        status, fields, body = await client.ask(post(b"/api/chat", OLLAMA_STREAM))
        assert (status, fields[b"content-type"]) == (200, NDJSON)
        first, *_, last = [json.loads(line) for line in body.splitlines()]
        assert (first["done"], first["message"]["content"], first["model"]) == (False, "", "m")
        assert last["done"] is True


async def test_an_answer_in_one_piece_gets_no_sign_of_life(tmp_path: Path) -> None:
    async with proxied(tmp_path, heartbeat_s=1) as (proxy, backend):
        silent(backend, answer(JSON_ANSWER), after_s=1.5)
        client = await Client.unix(proxy.socket_path)
        assert (await client.ask(post(b"/v1/chat/completions", CHAT)))[2] == JSON_ANSWER


async def test_after_a_sign_of_life_the_backends_error_comes_in_the_stream(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, backend):
        refusal = b'{\n  "error": {"message": "too long", "code": 400}\n}'
        silent(backend, answer(refusal, status=b"400 Bad Request"), after_s=1.5)
        said = await heard(proxy, post(b"/v1/chat/completions", STREAM, fields=BEAT))
        assert said.startswith(b"HTTP/1.1 200")
        assert b'data: {"error":{"message":"too long","code":400}}\n\n' in said
        assert not said.endswith(b"0\r\n\r\n")


async def test_whoever_waits_in_the_queue_gets_signs_of_life_too_and_then_its_refusal(tmp_path: Path) -> None:
    async with proxied(tmp_path, queue_wait_s=1.6, backend_concurrency=1) as (proxy, backend):
        silent(backend)
        ahead = await Client.unix(proxy.socket_path)
        ahead.writer.write(post(b"/v1/chat/completions", CHAT))
        await until(lambda: backend.connections == 1)
        said = await heard(proxy, post(b"/v1/chat/completions", STREAM, fields=BEAT))
        assert said.startswith(b"HTTP/1.1 200")
        assert b"no place came free" in said
        assert not said.endswith(b"0\r\n\r\n")


async def test_a_heartbeat_that_is_no_number_of_seconds_is_400(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, _):
        client = await Client.unix(proxy.socket_path)
        status, _, _ = await client.ask(post(b"/v1/chat/completions", STREAM, fields=b"x-hive-heartbeat: 0.1\r\n"))
        assert status == 400


# time ----------------------------------------------------------------------------------------------------------------


async def test_comments_do_not_end_the_wait_for_the_first_byte(tmp_path: Path) -> None:
    """llama-server and vLLM can send pings while a request waits in their own queue."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(breaks_off())
        while True:
            writer.write(b"3\r\n:\n\n\r\n")
            await asyncio.sleep(0.1)

    async with proxied(tmp_path, first_byte_s=0.6, between_bytes_s=30) as (proxy, backend):
        backend.script = script
        said = await heard(proxy, post(b"/v1/chat/completions", STREAM))
        assert b"the backend sent nothing for 0.6 s" in said


async def test_a_request_may_be_given_a_time_for_its_whole_answer(tmp_path: Path) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(breaks_off())
        while True:
            writer.write(b"%x\r\n%b\r\n" % (len(TEXT), TEXT))
            await asyncio.sleep(0.05)

    async with proxied(tmp_path, request_s=0.7) as (proxy, backend):
        backend.script = script
        said = await heard(proxy, post(b"/v1/chat/completions", STREAM))
        assert b"the request took longer than 0.7 s" in said
        await until(lambda: nothing_is_held(proxy))


async def test_a_client_that_reads_nothing_does_not_keep_its_place(tmp_path: Path) -> None:
    block = b"data: " + b"x" * 60_000 + b"\n\n"

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(breaks_off())
        while True:
            writer.write(as_chunks(block, end=False))
            await writer.drain()

    async with proxied(tmp_path, between_bytes_s=0.5) as (proxy, backend):
        backend.script = script
        client = await Client.unix(proxy.socket_path)
        client.transport.pause_reading()
        client.writer.write(post(b"/v1/chat/completions", STREAM))
        await until(lambda: len(proxy.events) == 1)
        await until(lambda: not proxy.connections)
        assert nothing_is_held(proxy)
        assert proxy.events[0].cut


async def test_what_was_written_before_a_close_is_not_kept_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hive.wire.connection.CLOSE_S", 0.5)
    async with proxied(tmp_path, body_max_bytes=1000) as (proxy, backend):
        backend.reply = answer(b"x" * 900_000)
        client = await Client.unix(proxy.socket_path)
        client.transport.pause_reading()
        client.writer.write(post(b"/v1/chat/completions", CHAT, fields=b"connection: close\r\n"))
        await until(lambda: len(proxy.events) == 1)
        await until(lambda: not proxy.connections)


# found by reading -----------------------------------------------------------------------------------------------------

MESSAGES = [
    b"event: message_start\n"
    b'data: {"type":"message_start","message":{"usage":{"input_tokens":3,"output_tokens":1}}}\n\n',
    b'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,"delta":{"text":"hi"}}\n\n',
    b"event: message_delta\n"
    b'data: {"type":"message_delta","delta":{"stop_reason":"end_turn"},"usage":{"output_tokens":3}}\n\n',
    b'event: message_stop\ndata: {"type":"message_stop"}\n\n',
]


async def test_an_anthropic_stream_goes_on_after_its_signs_of_life(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, backend):
        silent(backend, chunked(*MESSAGES), after_s=1.5)
        client = await Client.unix(proxy.socket_path)
        request = b'{"model":"m","max_tokens":5,"stream":true,"messages":[{"role":"user","content":"hello"}]}'
        status, _, body = await client.ask(post(b"/v1/messages", request, fields=BEAT))
        assert status == 200
        assert body.endswith(b"".join(MESSAGES))
        assert [(event.tokens_in, event.tokens_out, event.cut) for event in proxy.events] == [(3, 3, False)]


REFUSED = b'{"error":{"message":"too long"}}'


async def test_no_sign_of_life_gets_between_a_head_and_its_body(tmp_path: Path) -> None:
    """The backend refuses a stream, and takes its time behind the head."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        whole = answer(REFUSED, status=b"400 Bad Request")
        head = whole.index(b"\r\n\r\n") + 4
        writer.write(whole[:head])
        await asyncio.sleep(1.5)
        writer.write(whole[head:])
        await writer.drain()

    async with proxied(tmp_path) as (proxy, backend):
        backend.script = script
        client = await Client.unix(proxy.socket_path)
        status, fields, body = await client.ask(post(b"/v1/chat/completions", STREAM, fields=BEAT))
        assert (status, fields[b"content-type"], body) == (400, b"application/json", REFUSED)


async def test_a_heartbeat_of_five_thousand_digits_is_400_like_any_other(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, _):
        client = await Client.unix(proxy.socket_path)
        fields = b"x-hive-heartbeat: %b\r\n" % (b"1" * 5000)
        assert (await client.ask(post(b"/v1/chat/completions", STREAM, fields=fields)))[0] == 400


async def test_a_stream_of_known_length_is_framed_anew_where_something_is_taken_out(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, backend):
        proxy.use(backend, BackendKind.VLLM)
        usage = b'data: {"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":1,"total_tokens":2}}\n\n'
        backend.reply = answer(TEXT + usage + DONE, content_type=b"text/event-stream")
        client = await Client.unix(proxy.socket_path)
        for _ in range(2):
            status, _, body = await client.ask(post(b"/v1/chat/completions", STREAM))
            assert (status, body) == (200, TEXT + DONE)


async def test_removing_an_agent_tells_a_client_without_framing_too(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, backend):
        silent(backend)
        client = await Client.tcp(proxy.port)
        client.writer.write(OLD)
        await until(lambda: backend.connections == 1)
        proxy.registry.forget("a1")
        assert b"the agent is removed" in await asyncio.wait_for(client.reader.read(), 5)
        await until(lambda: proxy.registry.queue.running == 0)
