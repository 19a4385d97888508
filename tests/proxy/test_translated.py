"""Clients of one dialect before a backend of another: what it is asked, what comes back, and what is counted."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import ollama
import pytest

from hive.bodies.body_workers import DeepReaders
from hive.domain import BackendKind, FoundCapabilities
from hive.queue.slot_gate import Switching
from tests.proxy.harness import (
    MODEL_TOKEN,
    Client,
    Proxy,
    answer,
    chunked,
    get,
    nothing_is_held,
    post,
    proxied,
    read_request,
)
from tests.waiting import until

STREAMS = Path(__file__).with_name("streams")
BEAT = b"x-hive-heartbeat: 1\r\n"
HELLO = [{"role": "user", "content": "hello"}]
EMBEDDED = b'{"object":"list","data":[{"object":"embedding","index":0,"embedding":[1e2,0.5]}],"model":"m",'
EMBEDDED += b'"usage":{"prompt_tokens":3,"total_tokens":3}}'


async def asked(proxy: Proxy, target: bytes, body: dict[str, Any]) -> tuple[int, dict[bytes, bytes], bytes]:
    client = await Client.unix(proxy.socket_path)
    return await client.ask(post(target, json.dumps({"model": "m", **body}).encode()))


async def test_an_ollama_chat_is_asked_and_answered_in_openais_words(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, backend):
        status, fields, body = await asked(
            proxy, b"/api/chat", {"messages": HELLO, "stream": False, "options": {"temperature": 0, "num_predict": 9}}
        )
        assert (status, fields[b"content-type"]) == (200, b"application/json")
        told = ollama.ChatResponse.model_validate_json(body)
        assert (told.model, told.message.content, told.done, told.eval_count) == ("m", "hi", True, 3)
        head, sent = backend.requests[0]
        assert head.startswith(b"POST /v1/chat/completions HTTP/1.1\r\n")
        wanted = json.loads(sent)
        assert (wanted["messages"], wanted["temperature"], wanted["max_tokens"]) == (HELLO, 0, 9)
        event = proxy.events[0]
        assert (event.endpoint, event.tokens_in, event.tokens_out, event.cut) == ("/api/chat", 7, 3, False)
        await until(lambda: nothing_is_held(proxy))


@pytest.mark.parametrize(
    ("target", "body"),
    [(b"/api/chat", {"messages": HELLO}), (b"/api/generate", {"prompt": "hello", "system": "Be short."})],
)
async def test_a_stream_comes_as_lines_and_ends_with_its_cost(
    tmp_path: Path, target: bytes, body: dict[str, Any]
) -> None:
    async with proxied(tmp_path) as (proxy, backend):
        recorded = (STREAMS / "llama-chat-asked.sse").read_bytes()
        backend.reply = chunked(*(recorded[at : at + 100] for at in range(0, len(recorded), 100)))
        status, fields, answered = await asked(proxy, target, body)
        assert (status, fields[b"content-type"]) == (200, b"application/x-ndjson")
        lines = [json.loads(line) for line in answered.splitlines()]
        assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
        assert all(line["model"] == "m" for line in lines)
        event = proxy.events[0]
        assert (lines[-1]["prompt_eval_count"], lines[-1]["eval_count"]) == (event.tokens_in, event.tokens_out)
        assert event.tokens_out
        assert json.loads(backend.requests[0][1])["stream_options"] == {"include_usage": True}
        await until(lambda: nothing_is_held(proxy))


async def test_what_hive_puts_into_a_body_is_put_into_the_translated_one(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, backend):
        proxy.use(backend, BackendKind.VLLM)
        await asked(proxy, b"/api/chat", {"messages": HELLO, "stream": False})
        assert len(json.loads(backend.requests[0][1])["cache_salt"]) == 32


async def test_vectors_keep_their_digits(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, backend):
        backend.reply = answer(EMBEDDED)
        _, _, body = await asked(proxy, b"/api/embed", {"input": ["hello"]})
        assert b'"embeddings":[[1e2,0.5]]' in body
        assert json.loads(body)["prompt_eval_count"] == 3
        assert backend.requests[0][0].startswith(b"POST /v1/embeddings ")


async def test_the_backends_own_error_is_told_in_the_clients_words(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, backend):
        backend.reply = answer(b'{"error":{"message":"too long","type":"BadRequestError"}}', status=b"400 Bad Request")
        for stream in (False, True):
            status, _, body = await asked(proxy, b"/api/chat", {"messages": HELLO, "stream": stream})
            assert (status, json.loads(body)["error"]) == (400, "too long")
            status, _, body = await asked(proxy, b"/api/generate", {"prompt": "x", "stream": stream})
            assert (status, json.loads(body)["error"]) == (400, "too long")
        assert nothing_is_held(proxy)


@pytest.mark.parametrize("ending", [b"", b'data: {"error":{"message":"out of memory"}}\n\ndata: [DONE]\n\n'])
async def test_a_stream_that_breaks_is_never_done(tmp_path: Path, ending: bytes) -> None:
    piece = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
    goes_on = asyncio.Event()

    async def breaks(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(chunked(piece, end=False))
        await goes_on.wait()
        writer.write((b"%x\r\n%b\r\n" % (len(ending), ending) if ending else b"") + b"0\r\n\r\n")

    async with proxied(tmp_path) as (proxy, backend):
        backend.script = breaks
        client = await Client.unix(proxy.socket_path)
        client.writer.write(post(b"/api/chat", b'{"model":"m","messages":[{"role":"user","content":"x"}]}'))
        said = await asyncio.wait_for(client.reader.readuntil(b'"content":"a"'), 10)
        goes_on.set()
        said += await asyncio.wait_for(client.reader.read(), 10)
        assert b'"done":true' not in said
        assert b'{"error":' in said
        assert not said.endswith(b"0\r\n\r\n")
        assert proxy.events[0].cut
        await until(lambda: nothing_is_held(proxy))


@pytest.mark.parametrize(
    ("target", "told"), [(b"/api/chat", b'{"error":"too long"}\n'), (b"/v1/messages", b"event: error\ndata: ")]
)
async def test_an_error_behind_a_sign_of_life_is_told_before_the_stream_is_cut(
    tmp_path: Path, target: bytes, told: bytes
) -> None:
    """A sign of life had opened the stream with 200, and a translated answer broke off without a word."""
    beaten = asyncio.Event()

    async def refuses(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        await beaten.wait()
        writer.write(answer(b'{"error":{"message":"too long"}}', status=b"400 Bad Request"))

    async with proxied(tmp_path) as (proxy, backend):
        proxy.use(backend, BackendKind.REMOTE)
        backend.script = refuses
        client = await Client.unix(proxy.socket_path)
        body = json.dumps({"model": "m", "messages": HELLO, "max_tokens": 9, "stream": True}).encode()
        client.writer.write(
            post(target, body.replace(b'"max_tokens": 9, ', b"") if b"api" in target else body, fields=BEAT)
        )
        said = await asyncio.wait_for(client.reader.readuntil((b"waiting", b'"done":false')[b"api" in target]), 20)
        beaten.set()
        said += await asyncio.wait_for(client.reader.read(), 10)
        assert told in said
        assert b"too long" in said
        assert not said.endswith(b"0\r\n\r\n")


async def test_a_field_that_cannot_be_said_there_is_refused_before_anything_is_asked(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, backend):
        status, _, body = await asked(proxy, b"/api/generate", {"prompt": "x", "context": [1, 2]})
        assert status in (400, 501)
        assert b"context" in body
        assert backend.requests == []
        assert nothing_is_held(proxy)


async def test_a_large_body_is_translated_in_a_worker(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, backend):
        proxy.path.readers = readers = DeepReaders()
        readers.start()
        try:
            text = "x" * 3_000_000
            status, _, body = await asked(
                proxy, b"/api/chat", {"messages": [{"role": "user", "content": text}], "stream": False}
            )
            assert (status, json.loads(body)["message"]["content"]) == (200, "hi")
            assert json.loads(backend.requests[0][1])["messages"][0]["content"] == text
        finally:
            readers.close()


async def test_an_anthropic_client_is_answered_by_a_backend_that_never_heard_of_it(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, backend):
        proxy.use(backend, BackendKind.DEMO)
        status, _, body = await asked(proxy, b"/v1/messages?beta=true", {"max_tokens": 5, "messages": HELLO})
        told = json.loads(body)
        assert (status, told["content"][0]["text"], told["usage"]["output_tokens"]) == (200, "hi", 3)
        assert backend.requests[0][0].startswith(b"POST /v1/chat/completions ")
        assert proxy.events[0].endpoint == "/v1/messages"


@pytest.mark.parametrize("kind", [BackendKind.OLLAMA, BackendKind.REMOTE, BackendKind.DEMO])
@pytest.mark.parametrize("query", [b"", b"?beta=true"])
async def test_tokens_are_estimated_where_nobody_counts_and_it_is_said(
    tmp_path: Path, kind: BackendKind, query: bytes
) -> None:
    """It was 501, and Claude Code asks it all the time."""
    async with proxied(tmp_path) as (proxy, backend):
        proxy.use(backend, kind)
        status, fields, body = await asked(proxy, b"/v1/messages/count_tokens" + query, {"messages": HELLO})
        told = json.loads(body)
        assert (status, fields[b"x-hive-estimated"], told["estimated"]) == (200, b"true", True)
        assert 2 <= told["input_tokens"] <= 12
        tools = [{"name": "f", "description": "d" * 700, "input_schema": {"type": "object"}}]
        _, _, body = await asked(proxy, b"/v1/messages/count_tokens" + query, {"messages": HELLO, "tools": tools})
        assert json.loads(body)["input_tokens"] - told["input_tokens"] > 200
        assert (backend.requests, proxy.events) == ([], [])
        assert nothing_is_held(proxy)
        status, _, _ = await asked(proxy, b"/v1/messages/count_tokens", {"model": "gpt-9", "messages": HELLO})
        assert status == 404


async def test_a_server_that_says_it_cannot_count_is_not_asked(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, backend):
        proxy.use(backend, BackendKind.VLLM)
        assert proxy.path.slot.backend is not None
        told = FoundCapabilities(endpoints=("/v1/messages", "/v1/chat/completions"))
        proxy.path.use_backend(
            msgspec.structs.replace(proxy.path.slot.backend, capabilities=told), proxy.path.slot.models
        )
        _, _, body = await asked(proxy, b"/v1/messages/count_tokens", {"messages": HELLO})
        assert json.loads(body)["estimated"]
        assert backend.requests == []


async def test_a_long_prompt_is_estimated_in_a_worker(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, backend):
        proxy.use(backend, BackendKind.DEMO)
        proxy.path.readers = readers = DeepReaders()
        readers.start()
        try:
            image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "A" * 2_000_000}}
            turns = [{"role": "user", "content": [image, {"type": "text", "text": "x" * 700_000}]}]
            _, _, body = await asked(proxy, b"/v1/messages/count_tokens", {"messages": turns})
            assert 200_000 <= json.loads(body)["input_tokens"] <= 203_000
        finally:
            readers.close()


async def test_an_anthropic_client_reads_which_request_it_was(tmp_path: Path) -> None:
    """The package looks for `request-id` in the head and `request_id` in an error; answers that were translated, and
    errors in them, had neither."""
    async with proxied(tmp_path) as (proxy, backend):
        proxy.use(backend, BackendKind.DEMO)
        body = {"max_tokens": 5, "messages": HELLO}
        _, fields, _ = await asked(proxy, b"/v1/messages", body)
        assert fields[b"request-id"] == fields[b"x-request-id"] == b"e-1"
        backend.reply = answer(b'{"error":{"message":"too long","type":"BadRequestError"}}', status=b"400 Bad Request")
        _, fields, told = await asked(proxy, b"/v1/messages", body)
        assert json.loads(told)["request_id"].encode() == fields[b"request-id"] == b"e-2"
        _, fields, told = await asked(proxy, b"/v1/messages", {"messages": HELLO})
        assert json.loads(told)["request_id"].encode() == fields[b"request-id"] == b"e-3"
        backend.reply = answer(b'{"choices":[{"message":{"content":"a"},"finish_reason":"stop"}]}')
        assert json.loads((await asked(proxy, b"/v1/messages", body))[2])["id"] == "msg_e-4"
        status, fields, _ = await asked(proxy, b"/v1/chat/completions", {"messages": HELLO})
        assert (status, b"request-id" in fields) == (200, False)


async def test_a_backends_own_request_id_gives_way_to_hives(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, backend):
        proxy.use(backend, BackendKind.LLAMA)
        message = b'{"type":"message","content":[],"usage":{"input_tokens":1,"output_tokens":1},"stop_reason":"end"}'
        backend.reply = answer(message).replace(b"\r\n", b"\r\nrequest-id: theirs\r\n", 1)
        client = await Client.unix(proxy.socket_path)
        body = {"model": "m", "max_tokens": 5, "messages": HELLO}
        client.writer.write(post(b"/v1/messages", json.dumps(body).encode()))
        head = await asyncio.wait_for(client.reader.readuntil(b"\r\n\r\n"), 10)
        assert head.count(b"request-id: e-1\r\n") == 2
        assert b"theirs" not in head


async def test_where_there_is_no_ollama_hive_says_what_its_clients_ask_besides(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, backend):
        client = await Client.tcp(proxy.port)
        for method in (b"GET", b"HEAD"):
            assert (await client.ask(get(b"/", token=MODEL_TOKEN, method=method)))[0] == 200
        status, fields, body = await client.ask(get(b"/", token=MODEL_TOKEN))
        assert (status, fields[b"content-type"], body) == (200, b"text/plain; charset=utf-8", b"Ollama is running")
        listed = ollama.ListResponse.model_validate_json((await client.ask(get(b"/api/tags", token=MODEL_TOKEN)))[2])
        assert [model.model for model in listed.models] == ["meta/llama-3 x", "m"]
        loaded = ollama.ProcessResponse.model_validate_json((await client.ask(get(b"/api/ps", token=MODEL_TOKEN)))[2])
        assert [model.name for model in loaded.models] == ["meta/llama-3 x", "m"]
        assert json.loads((await client.ask(get(b"/api/version", token=MODEL_TOKEN)))[2])["version"]
        show = post(b"/api/show", b'{"model":"m:latest"}', token=MODEL_TOKEN)
        assert ollama.ShowResponse.model_validate_json((await client.ask(show))[2]).capabilities == ["completion"]
        missing = post(b"/api/show", b'{"model":"gpt-9"}', token=MODEL_TOKEN)
        status, _, body = await client.ask(missing)
        told = json.loads(body)
        assert (status, told["code"], "not found" in told["error"]) == (404, "model_not_found", True)
        assert backend.requests == []
        assert nothing_is_held(proxy)


async def test_a_tenant_sees_its_own_models_in_hives_lists(tmp_path: Path) -> None:
    from hive.settings.table import TenantRow

    async with proxied(tmp_path, tenants={"default": TenantRow(models="m")}) as (proxy, _):
        client = await Client.unix(proxy.socket_path)
        assert [row["name"] for row in json.loads((await client.ask(get(b"/api/tags")))[2])["models"]] == ["m"]


async def test_a_request_that_waits_over_a_switch_is_translated_for_the_new_backend(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, backend):
        proxy.use(backend, BackendKind.OLLAMA)
        proxy.path.slot.close(Switching(1e18, "llama"))
        client = await Client.unix(proxy.socket_path)
        body = {"model": "m", "stream": False, "messages": HELLO}
        client.writer.write(post(b"/api/chat", json.dumps(body).encode()))
        lists = await Client.unix(proxy.socket_path)
        lists.writer.write(get(b"/api/tags"))
        await until(lambda: proxy.registry.queue.waiting == 2)
        assert proxy.path.slot.backend is not None
        proxy.path.open_backend(
            msgspec.structs.replace(proxy.path.slot.backend, kind=BackendKind.LLAMA), proxy.path.slot.models
        )
        assert json.loads((await client.answer())[2])["message"]["content"] == "hi"
        assert len(json.loads((await lists.answer())[2])["models"]) == 2
        assert [head.split(b" ")[1] for head, _ in backend.requests] == [b"/v1/chat/completions"]
        await until(lambda: nothing_is_held(proxy))
