"""Responses before any backend: it is asked by chat completions, answers in events of Responses, and is counted."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from hive.backends.kinds import spec_of
from hive.bodies.body_workers import DeepReaders
from hive.domain import BackendKind, FoundCapabilities, Tier
from hive.settings.table import Settings
from tests.proxy.harness import Client, Proxy, answer, chunked, nothing_is_held, post, proxied, read_request
from tests.waiting import until

STREAMS = Path(__file__).with_name("streams")
LARK = {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch"'}
CHAT = b"POST /v1/chat/completions HTTP/1.1\r\n"
EVENT: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)
HI = b'data: {"id":"c","choices":[{"index":0,"delta":{"content":"hi"}}]}\n\n'
BEAT = b"x-hive-heartbeat: 1\r\n"


async def asked(proxy: Proxy, body: dict[str, Any], fields: bytes = b"") -> tuple[int, dict[bytes, bytes], bytes]:
    client = await Client.unix(proxy.socket_path)
    return await client.ask(post(b"/v1/responses", json.dumps({"model": "m", **body}).encode(), fields=fields))


def events_of(said: bytes) -> list[dict[str, Any]]:
    """Of a stream, each told by its own name; every one is of OpenAI's schema, and they are numbered."""
    told = []
    for event in said.split(b"\n\n"):
        lines = [line for line in event.split(b"\n") if line and not line.startswith(b":")]
        if not lines:
            continue
        data = json.loads(lines[1].removeprefix(b"data: "))
        assert lines[0] == b"event: " + data["type"].encode()
        EVENT.validate_python(data)
        told.append(data)
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    return told


@pytest.mark.parametrize("kind", [kind for kind in BackendKind if not spec_of(kind).category])
async def test_every_kind_of_backend_is_asked_by_chat_completions(tmp_path: Path, kind: BackendKind) -> None:
    async with proxied(tmp_path) as (proxy, backend):
        proxy.use(backend, kind)
        status, fields, body = await asked(proxy, {"input": "hello", "instructions": "Be short.", "store": True})
        assert (status, fields[b"content-type"]) == (200, b"application/json")
        told = Response.model_validate_json(body)
        assert (told.output_text, told.status, told.model, told.id) == ("hi", "completed", "m", "resp_e-1")
        assert json.loads(body)["store"] is False
        head, sent = backend.requests[0]
        assert head.startswith(CHAT)
        wanted = json.loads(sent)
        assert wanted["messages"] == [
            {"role": "system", "content": "Be short."},
            {"role": "user", "content": "hello"},
        ]
        assert not {"store", "previous_response_id", "input"} & wanted.keys()
        event = proxy.events[0]
        assert (event.endpoint, event.tokens_in, event.tokens_out, event.cut) == ("/v1/responses", 7, 3, False)
        assert told.usage is not None
        assert (told.usage.input_tokens, told.usage.output_tokens, told.usage.total_tokens) == (7, 3, 10)
        await until(lambda: nothing_is_held(proxy))


@pytest.mark.parametrize("name", ["llama-chat-asked.sse", "vllm-chat-asked.sse"])
async def test_a_recorded_stream_becomes_events_and_ends_with_the_whole_answer(tmp_path: Path, name: str) -> None:
    async with proxied(tmp_path) as (proxy, backend):
        recorded = (STREAMS / name).read_bytes()
        backend.reply = chunked(*(recorded[at : at + 100] for at in range(0, len(recorded), 100)))
        status, fields, said = await asked(proxy, {"input": "hello", "stream": True})
        assert (status, fields[b"content-type"]) == (200, b"text/event-stream; charset=utf-8")
        told = events_of(said)
        kinds = [event["type"] for event in told]
        assert kinds[:4] == [
            *("response.created", "response.in_progress", "response.output_item.added", "response.content_part.added")
        ]
        assert kinds[-4:-1] == [
            *("response.output_text.done", "response.content_part.done", "response.output_item.done")
        ]
        last = told[-1]["response"]
        assert told[-1]["type"] == f"response.{last['status']}"
        text = "".join(event["delta"] for event in told if event["type"] == "response.output_text.delta")
        assert text == last["output"][0]["content"][0]["text"] != ""
        event = proxy.events[0]
        assert (last["usage"]["input_tokens"], last["usage"]["output_tokens"]) == (event.tokens_in, event.tokens_out)
        assert json.loads(backend.requests[0][1])["stream_options"] == {"include_usage": True}
        await until(lambda: nothing_is_held(proxy))


async def test_salt_and_limit_hold_as_for_chat_completions(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, backend):
        proxy.use(backend, BackendKind.VLLM)
        most = Settings().proxy.tier_low_max_tokens
        _, fields, body = await asked(proxy, {"input": "hello", "max_output_tokens": 10 * most})
        wanted = json.loads(backend.requests[0][1])
        assert len(wanted["cache_salt"]) == 32
        assert wanted["max_tokens"] == most == json.loads(body)["max_output_tokens"]
        assert fields[b"x-hive-clamped"] == b"max_output_tokens=%d" % most
        await asked(proxy, {"input": "hello"})
        assert json.loads(backend.requests[1][1])["max_tokens"] == most


async def test_a_schema_is_counted_by_its_place_in_the_request(tmp_path: Path) -> None:
    many = {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(300)}}
    custom = {"type": "custom", "name": "f", "format": {"type": "grammar", "syntax": "regex", "definition": "(a*)*b"}}
    async with proxied(tmp_path) as (proxy, backend):
        for body, where in (
            ({"text": {"format": {"type": "json_schema", "name": "n", "schema": many}}}, "/text/format/schema"),
            ({"tools": [{"type": "function", "name": "f", "parameters": many}]}, "/tools/0/parameters"),
            ({"tools": [custom]}, "/tools/0/format"),
            ({"tools": [{"type": "namespace", "name": "s", "tools": [custom]}]}, "/tools/0/tools/0/format"),
            ({"tools": [{"type": "function", "name": "f", "parameters": many, "format": LARK}]}, "/tools/0/parameters"),
        ):
            status, _, told = await asked(proxy, {"input": "hello", **body})
            error = json.loads(told)["error"]
            assert (status, error["code"]) == (400, "grammar_too_complex"), told
            assert error["message"].startswith(where)
        assert backend.requests == []


async def test_a_lark_grammar_goes_to_the_model_in_words_and_that_is_told(tmp_path: Path) -> None:
    """Codex gives one with `apply_patch` to models it knows; no server here compiles it."""
    tools = [{"type": "custom", "name": "apply_patch", "description": "Edits.", "format": LARK}]
    async with proxied(tmp_path) as (proxy, backend):
        status, fields, _ = await asked(proxy, {"input": "hello", "tools": tools})
        assert (status, fields[b"x-hive-dropped"]) == (200, b"tools[custom].format[grammar]")
        function = json.loads(backend.requests[0][1])["tools"][0]["function"]
        assert function["name"] == "apply_patch"
        assert "*** Begin Patch" in function["description"]


async def test_the_backends_own_error_keeps_its_words_and_status(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, backend):
        backend.reply = answer(b'{"error":{"message":"too long","type":"BadRequestError"}}', status=b"400 Bad Request")
        for stream in (False, True):
            status, _, body = await asked(proxy, {"input": "hello", "stream": stream})
            assert (status, json.loads(body)["error"]["message"]) == (400, "too long")
        backend.reply = answer(b'{"detail":"Not Found"}', status=b"404 Not Found")
        status, _, body = await asked(proxy, {"input": "hello"})
        assert (status, json.loads(body)["error"]["message"]) == (404, "the backend refused it (404): Not Found")
        assert nothing_is_held(proxy)


@pytest.mark.parametrize(
    "ending",
    [
        b"",
        b'data: {"error":{"message":"out of memory","code":500}}\n\ndata: [DONE]\n\n',
        b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"abort"}]}\n\ndata: [DONE]\n\n',
        b"data: nonsense\n\ndata: [DONE]\n\n",
        b'data: {"choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"id":"c","function":{"name":"f",'
        b'"arguments":"{\\"a\\":"}}]},"finish_reason":"tool_calls"}]}\n\ndata: [DONE]\n\n',
    ],
)
async def test_a_stream_that_breaks_never_looks_whole(tmp_path: Path, ending: bytes) -> None:
    goes_on = asyncio.Event()

    async def breaks(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(chunked(HI, end=False))
        await goes_on.wait()
        writer.write((b"%x\r\n%b\r\n" % (len(ending), ending) if ending else b"") + b"0\r\n\r\n")

    async with proxied(tmp_path) as (proxy, backend):
        backend.script = breaks
        client = await Client.unix(proxy.socket_path)
        client.writer.write(post(b"/v1/responses", b'{"model":"m","input":"x","stream":true}'))
        said = await asyncio.wait_for(client.reader.readuntil(b'"delta":"hi"'), 10)
        goes_on.set()
        said += await asyncio.wait_for(client.reader.read(), 10)
        assert b"response.completed" not in said
        assert b"response.incomplete" not in said
        assert not said.endswith(b"0\r\n\r\n")
        body = b"".join(line for line in said.split(b"\r\n\r\n", 1)[1].split(b"\r\n")[1::2])
        told = events_of(body)
        assert [event["type"] for event in told[-2:]] == ["error", "response.failed"]
        assert told[-2]["message"] == told[-2]["error"]["message"] == told[-1]["response"]["error"]["message"]
        assert told[-1]["response"]["output"][0]["content"][0]["text"] == "hi"
        assert proxy.events[0].cut
        await until(lambda: nothing_is_held(proxy))


async def test_what_comes_before_the_stream_is_numbered_too(tmp_path: Path) -> None:
    """A sign of life has opened it with 200, so the backend's refusal can only be an event."""

    async def refuses(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        await beaten.wait()
        writer.write(answer(b'{"error":{"message":"too long"}}', status=b"400 Bad Request"))

    beaten = asyncio.Event()
    async with proxied(tmp_path) as (proxy, backend):
        backend.script = refuses
        client = await Client.unix(proxy.socket_path)
        client.writer.write(post(b"/v1/responses", b'{"model":"m","input":"x","stream":true}', fields=BEAT))
        said = await asyncio.wait_for(client.reader.readuntil(b": waiting\n\n"), 20)
        beaten.set()
        said += await asyncio.wait_for(client.reader.read(), 10)
        assert b'event: error\ndata: {"type":"error","code":null,"message":"too long"' in said
        assert b'"sequence_number":0' in said
        assert not said.endswith(b"0\r\n\r\n")


async def test_a_server_without_chats_is_not_asked(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, backend):
        proxy.use(backend, BackendKind.REMOTE)
        assert proxy.path.slot.backend is not None
        told = FoundCapabilities(endpoints=("/v1/embeddings", "/v1/responses"))
        proxy.path.use_backend(
            msgspec.structs.replace(proxy.path.slot.backend, capabilities=told), proxy.path.slot.models
        )
        status, _, _ = await asked(proxy, {"input": "hello"})
        assert (status, backend.requests) == (501, [])


async def test_what_a_server_with_openais_schema_alone_lacks_is_said_in_its_way(tmp_path: Path) -> None:
    name = "mcp.files." + "x" * 80
    tools = [{"type": "custom", "name": name}, {"type": "function", "name": "f", "parameters": {}}]
    call = {"id": "c1", "type": "function", "function": {"name": "?", "arguments": '{"input":"a"}'}}
    async with proxied(tmp_path) as (proxy, backend):
        proxy.use(backend, BackendKind.REMOTE)
        assert proxy.path.slot.backend is not None
        told = FoundCapabilities(fields=())
        proxy.path.use_backend(
            msgspec.structs.replace(proxy.path.slot.backend, capabilities=told), proxy.path.slot.models
        )
        thought = [{"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}]
        items = [*thought, {"role": "assistant", "content": "so"}, {"role": "user", "content": "x"}]
        body = {"input": items, "tools": tools, "reasoning": {"effort": "xhigh"}}
        await asked(proxy, body)
        wanted = json.loads(backend.requests[0][1])
        call["function"]["name"] = wanted["tools"][0]["function"]["name"]  # type: ignore[index]
        assert len(call["function"]["name"]) == 64  # type: ignore[index]
        choice = {"index": 0, "message": {"role": "assistant", "tool_calls": [call]}, "finish_reason": "tool_calls"}
        backend.reply = answer(json.dumps({"choices": [choice]}).encode())
        status, fields, answered = await asked(proxy, body)
        assert status == 200
        assert wanted["reasoning_effort"] == "high"
        assert fields[b"x-hive-clamped"] == b"reasoning.effort=high"
        assert fields[b"x-hive-dropped"] == b"input[reasoning].content"
        item = json.loads(answered)["output"][0]
        assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", name, "a")


async def test_ollama_passes_over_a_choice_of_tools_and_that_is_told(tmp_path: Path) -> None:
    tools = [{"type": "function", "name": "f", "parameters": {}}]
    async with proxied(tmp_path) as (proxy, backend):
        proxy.use(backend, BackendKind.OLLAMA)
        _, fields, _ = await asked(proxy, {"input": "x", "tools": tools, "tool_choice": "required"})
        assert fields[b"x-hive-ignored"] == b"tool_choice"
        proxy.use(backend, BackendKind.VLLM)
        _, fields, _ = await asked(proxy, {"input": "x", "tools": tools, "tool_choice": "required"})
        assert b"x-hive-ignored" not in fields


async def test_a_large_body_is_translated_in_a_worker(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, backend):
        proxy.path.readers = readers = DeepReaders()
        readers.start()
        try:
            url = "data:image/png;base64," + "A" * 3_000_000
            parts = [{"type": "input_image", "image_url": url, "detail": "auto"}, {"type": "input_text", "text": "x"}]
            status, _, body = await asked(proxy, {"input": [{"role": "user", "content": parts}]})
            assert (status, Response.model_validate_json(body).output_text) == (200, "hi")
            sent = json.loads(backend.requests[0][1])["messages"][0]["content"]
            assert sent == [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "x"}]
        finally:
            readers.close()


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"previous_response_id": "resp_1"}, 400, "responses_kept_mb"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, 400, "responses_kept_mb"),
        ({"input": [{"id": "msg_1"}]}, 400, "responses_kept_mb"),
        ({"background": True}, 501, "background"),
        ({"conversation": "conv_1"}, 501, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, 501, "prompt"),
        ({"tools": [{"type": "web_search"}]}, 501, "nothing leaves this box"),
        ({"tools": [{"type": "mcp", "server_label": "x", "server_url": "https://x"}]}, 501, "nothing leaves this box"),
        ({"tools": [{"type": "file_search", "vector_store_ids": []}]}, 501, "nothing leaves this box"),
        ({"tools": [{"type": "code_interpreter", "container": "c"}]}, 501, "nothing leaves this box"),
        ({"tools": [{"type": "image_generation"}]}, 501, "nothing leaves this box"),
        ({"tools": [{"type": "computer_use_preview"}]}, 501, "only OpenAI's models"),
        ({"tool_choice": {"type": "web_search_preview"}}, 501, "nothing leaves this box"),
        ({"tool_choice": "required"}, 400, "no tools"),
        ({"made_up": 1}, 501, "made_up"),
        ({"include": ["made.up"]}, 501, "made.up"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "https://x/a.png"}]}]},
            400,
            "data: URL",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file", "file_url": "https://x/a.pdf"}]}]},
            400,
            "data: URL",
        ),
        (
            {
                "input": [
                    {
                        "type": "function_call_output",
                        "call_id": "c",
                        "output": [{"type": "input_image", "image_url": "https://x/a.png"}],
                    }
                ]
            },
            400,
            "data: URL",
        ),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]}, 501, "no store of files"),
    ],
)
async def test_what_has_no_way_is_refused_in_words_before_anything_is_asked(
    tmp_path: Path, body: dict[str, Any], status: int, words: str
) -> None:
    async with proxied(tmp_path) as (proxy, backend):
        proxy.registry.learn(msgspec.structs.replace(proxy.row, tier=Tier.HIGH))
        got, _, told = await asked(proxy, {"input": "hello", **body})
        assert (got, words in json.loads(told)["error"]["message"]) == (status, True), told
        assert backend.requests == []
        assert nothing_is_held(proxy)
