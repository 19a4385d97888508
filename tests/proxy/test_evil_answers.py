"""Answers that are none, in every dialect and way: no client's own package takes one for whole, none is counted whole.

The judge is the package itself (`openai`, `anthropic`, `ollama`), each over HTTP through the data path to a backend
that writes raw bytes. Ways: the backend speaks the client's dialect or another; a stream or one piece.
"""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import anthropic
import ollama
import openai
import pytest

from hive.domain import BackendKind
from tests.proxy.harness import Backend, nothing_is_held, proxied, read_request
from tests.waiting import until

HELLO: Any = [{"role": "user", "content": "hello"}]


class Heard(NamedTuple):
    """A package's result for an answer."""

    text: str


# what a client asks ---------------------------------------------------------------------------------------------------


def openai_of(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=url + "/v1", api_key="hm_alice", max_retries=0)


def anthropic_of(url: str) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=url, api_key="hm_alice", max_retries=0)


def ollama_of(url: str) -> ollama.AsyncClient:
    return ollama.AsyncClient(host=url, headers={"authorization": "Bearer hm_alice"})


async def openai_chat(client: openai.AsyncOpenAI, stream: bool) -> Heard:
    if not stream:
        whole = await client.chat.completions.create(model="m", messages=HELLO)
        return Heard(whole.choices[0].message.content or "")
    text = ""
    async for chunk in await client.chat.completions.create(model="m", messages=HELLO, stream=True):
        text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
    return Heard(text)


async def openai_completion(client: openai.AsyncOpenAI, stream: bool) -> Heard:
    if not stream:
        return Heard((await client.completions.create(model="m", prompt="x")).choices[0].text)
    text = ""
    async for chunk in await client.completions.create(model="m", prompt="x", stream=True):
        text += chunk.choices[0].text if chunk.choices else ""
    return Heard(text)


async def openai_response(client: openai.AsyncOpenAI, stream: bool) -> Heard:
    if not stream:
        return Heard((await client.responses.create(model="m", input="hello")).output_text)
    text = ""
    async for event in await client.responses.create(model="m", input="hello", stream=True):
        text += event.delta if event.type == "response.output_text.delta" else ""
    return Heard(text)


async def anthropic_message(client: anthropic.AsyncAnthropic, stream: bool) -> Heard:
    if not stream:
        final: Any = await client.messages.create(model="m", max_tokens=9, messages=HELLO)
    else:
        async with client.messages.stream(model="m", max_tokens=9, messages=HELLO) as got:
            final = await got.get_final_message()
    return Heard("".join(block.text for block in final.content if block.type == "text"))


async def ollama_chat(client: ollama.AsyncClient, stream: bool) -> Heard:
    if not stream:
        return Heard((await client.chat(model="m", messages=HELLO)).message.content or "")
    parts = await client.chat(model="m", messages=HELLO, stream=True)
    return Heard("".join([part.message.content or "" async for part in parts]))


async def ollama_generate(client: ollama.AsyncClient, stream: bool) -> Heard:
    if not stream:
        return Heard((await client.generate(model="m", prompt="x")).response or "")
    parts = await client.generate(model="m", prompt="x", stream=True)
    return Heard("".join([part.response or "" async for part in parts]))


# what a backend says --------------------------------------------------------------------------------------------------


class Speaks(NamedTuple):
    """The forms of a backend's dialect for a piece of text, its end, and an answer in one piece, each with its own
    fields."""

    kind: bytes
    piece: bytes
    end: bytes
    whole: dict[str, Any]
    first: bytes = b""

    @property
    def stream(self) -> bytes:
        return self.first + self.piece + self.end


def sse(*events: Any) -> bytes:
    told = [event if isinstance(event, str) else json.dumps(event, separators=(",", ":")) for event in events]
    return b"".join(b"data: %b\n\n" % one.encode() for one in told)


def named(*events: dict[str, Any]) -> bytes:
    return b"".join(b"event: %b\n%b" % (event["type"].encode(), sse(event)) for event in events)


def lines(*objects: Any) -> bytes:
    return b"".join(json.dumps(one, separators=(",", ":")).encode() + b"\n" for one in objects)


USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
CHUNK: dict[str, Any] = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
MESSAGE: dict[str, Any] = {"id": "msg_1", "type": "message", "role": "assistant", "model": "m"}
MESSAGE |= {"content": [], "stop_reason": None, "stop_sequence": None, "usage": {"input_tokens": 3, "output_tokens": 0}}
OPENAI_CHAT = Speaks(
    b"text/event-stream",
    sse({**CHUNK, "choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": None}]}),
    sse({**CHUNK, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}, "[DONE]"),
    {
        **CHUNK,
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "a"}, "finish_reason": "stop"}],
        "usage": USAGE,
    },
)
OPENAI_COMPLETION = Speaks(
    b"text/event-stream",
    sse({**CHUNK, "choices": [{"index": 0, "text": "a", "finish_reason": None}]}),
    sse({**CHUNK, "choices": [{"index": 0, "text": "", "finish_reason": "stop"}]}, "[DONE]"),
    {**CHUNK, "choices": [{"index": 0, "text": "a", "finish_reason": "stop"}], "usage": USAGE},
)
ANTHROPIC = Speaks(
    b"text/event-stream",
    named({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "a"}}),
    named(
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 2}},
        {"type": "message_stop"},
    ),
    {**MESSAGE, "content": [{"type": "text", "text": "a"}], "stop_reason": "end_turn"},
    named(
        {"type": "message_start", "message": MESSAGE},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
    ),
)
LINE: dict[str, Any] = {"model": "m", "created_at": "2026-01-01T00:00:00Z"}
OLLAMA_CHAT = Speaks(
    b"application/x-ndjson",
    lines({**LINE, "message": {"role": "assistant", "content": "a"}, "done": False}),
    lines({**LINE, "message": {"role": "assistant", "content": ""}, "done": True, "eval_count": 2}),
    {**LINE, "message": {"role": "assistant", "content": "a"}, "done": True, "eval_count": 2},
)
OLLAMA_GENERATE = Speaks(
    b"application/x-ndjson",
    lines({**LINE, "response": "a", "done": False}),
    lines({**LINE, "response": "", "done": True, "eval_count": 2}),
    {**LINE, "response": "a", "done": True, "eval_count": 2},
)


class Pair(NamedTuple):
    """A client, and what the backend behind Hive speaks."""

    client: Callable[[str], Any]
    ask: Callable[[Any, bool], Any]
    kind: BackendKind
    speaks: Speaks


PAIRS = {
    "openai-chat": Pair(openai_of, openai_chat, BackendKind.VLLM, OPENAI_CHAT),
    "openai-chat-llama": Pair(openai_of, openai_chat, BackendKind.LLAMA, OPENAI_CHAT),
    "openai-completion": Pair(openai_of, openai_completion, BackendKind.VLLM, OPENAI_COMPLETION),
    "anthropic": Pair(anthropic_of, anthropic_message, BackendKind.VLLM, ANTHROPIC),
    "ollama-chat": Pair(ollama_of, ollama_chat, BackendKind.OLLAMA, OLLAMA_CHAT),
    "ollama-generate": Pair(ollama_of, ollama_generate, BackendKind.OLLAMA, OLLAMA_GENERATE),
    "anthropic-by-openai": Pair(anthropic_of, anthropic_message, BackendKind.REMOTE, OPENAI_CHAT),
    "openai-response-by-chats": Pair(openai_of, openai_response, BackendKind.VLLM, OPENAI_CHAT),
    "openai-response-by-chats-llama": Pair(openai_of, openai_response, BackendKind.LLAMA, OPENAI_CHAT),
    "ollama-chat-by-openai": Pair(ollama_of, ollama_chat, BackendKind.VLLM, OPENAI_CHAT),
    "ollama-generate-by-openai": Pair(ollama_of, ollama_generate, BackendKind.LLAMA, OPENAI_CHAT),
}

# how it is evil -------------------------------------------------------------------------------------------------------

Pieces = tuple[bytes, ...]
"""Pieces that are written with a moment between two; then the backend closes."""


def head(kind: bytes, *, status: bytes = b"200 OK", fields: bytes = b"") -> bytes:
    return b"HTTP/1.1 %b\r\ncontent-type: %b\r\n%b\r\n" % (status, kind, fields)


def chunks(*pieces: bytes, end: bool = True) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(one), one) for one in pieces if one) + (b"0\r\n\r\n" if end else b"")


CHUNKED = b"transfer-encoding: chunked\r\n"


def by_length(kind: bytes, body: bytes, *, cut: int = 0, status: bytes = b"200 OK", fields: bytes = b"") -> bytes:
    fields += b"content-length: %d\r\n" % len(body)
    return head(kind, status=status, fields=fields) + body[: len(body) - cut]


def ends(speaks: Speaks) -> dict[str, bytes]:
    """Bytes that a stream may have after its first piece instead of its end."""
    if speaks.kind == b"application/x-ndjson":
        wrong: list[tuple[str, bytes]] = [
            ("error", lines({"error": "out of memory"})),
            ("error then end", lines({"error": "out of memory"}) + speaks.end),
            ("error object then end", lines({"error": {"message": "x"}, "done": False}) + speaks.end),
            ("error and done in one", lines({"error": "x", "done": True})),
            ("half a line then end", speaks.piece[:30] + b"\n" + speaks.end),
            ("not done", lines({**LINE, "done": False})),
            ("done is a word", lines({**LINE, "done": "true"})),
        ]
    elif speaks is ANTHROPIC:
        error = {"type": "error", "error": {"type": "overloaded_error", "message": "busy"}}
        null = {"type": "message_delta", "delta": {"stop_reason": None}, "usage": {"output_tokens": 2}}
        wrong = [
            ("error", named(error)),
            ("error then end", named(error) + speaks.end),
            ("error without a name then end", sse(error) + speaks.end),
            ("reason of null", named(null, {"type": "message_stop"})),
            ("no reason", named({"type": "message_stop"})),
            ("half an event then end", speaks.piece[:60] + b"\n\n" + speaks.end),
            ("openai's marker", sse("[DONE]")),
        ]
    else:
        error = {"error": {"message": "busy", "type": "x", "code": 503}}
        abort = {**CHUNK, "choices": [{"index": 0, "delta": {}, "text": "", "finish_reason": "abort"}]}
        wrong = [
            ("error", sse(error)),
            ("error then end", sse(error) + speaks.end),
            ("error in a word then end", sse({"error": "busy", "choices": None}) + speaks.end),
            ("error in capitals of crlf then end", sse(error).replace(b"\n", b"\r\n") + speaks.end),
            ("error of an old vllm then end", sse({"object": "error", "message": "busy", "code": 400}) + speaks.end),
            ("abort then end", sse(abort, "[DONE]")),
            ("reason error then end", sse(abort).replace(b"abort", b"error") + sse("[DONE]")),
            ("half an event then end", speaks.piece[:60] + b"\n\n" + speaks.end),
            ("reason without the marker", speaks.end.replace(b"data: [DONE]\n\n", b"")),
            ("half the marker", sse("[DONE]")[:9]),
        ]
    return {"nothing": b"", "half the end": speaks.end[: len(speaks.end) // 3], **dict(wrong)}


def evil_streams(speaks: Speaks) -> dict[str, Pieces]:
    begun, kind = speaks.first + speaks.piece, speaks.kind
    found: dict[str, Pieces] = {}
    for name, end in ends(speaks).items():
        found[f"{name}, chunked, in one read"] = (head(kind, fields=CHUNKED) + chunks(begun, end),)
        found[f"{name}, chunked, in two reads"] = (head(kind, fields=CHUNKED) + chunks(begun, end=False), chunks(end))
        found[f"{name}, by length, in two reads"] = (by_length(kind, begun + end, cut=len(end)), end or b"")
        found[f"{name}, by length, in one read"] = (by_length(kind, begun + end),)
        found[f"{name}, until the close"] = (head(kind, fields=b"connection: close\r\n") + begun + end,)
        found[f"{name}, alone"] = (head(kind, fields=CHUNKED) + chunks(speaks.first + end),)
    whole = speaks.stream
    found |= {
        "no end, type in capitals": (by_length(kind.upper(), begun),),
        "the marker alone": (head(kind, fields=CHUNKED) + chunks(sse("[DONE]")),),
        "an empty body": (head(kind, fields=CHUNKED) + chunks(),),
        "comments alone": (head(kind, fields=CHUNKED) + chunks(b": ping\n\n"),),
        "the body of no length": (by_length(kind, b""),),
        "closed without an answer": (b"",),
        "closed in the head": (head(kind)[:-4],),
        "a chunk cut short": (head(kind, fields=CHUNKED) + chunks(begun, end=False)[:-9],),
        "a length cut short": (by_length(kind, whole, cut=20),),
        "a length cut short later": (by_length(kind, whole, cut=40), whole[-40:-20]),
        "as a page": (by_length(b"text/html", b"<html>busy</html>"),),
        "as text": (by_length(b"text/plain", whole),),
        "as bytes": (by_length(b"application/octet-stream", whole),),
        "packed": (by_length(kind, whole, fields=b"content-encoding: gzip\r\n"),),
        "an error in json under 200": (by_length(b"application/json", b'{"error":"busy"}'),),
        "the openai error under 200": (by_length(b"application/json", b'{"error":{"message":"busy","code":503}}'),),
        "an empty object under 200": (by_length(b"application/json", b"{}"),),
        **statuses(kind, whole),
    }
    return found


def statuses(kind: bytes, body: bytes) -> dict[str, Pieces]:
    return {
        "204": (b"HTTP/1.1 204 No Content\r\n\r\n",),
        "304": (b"HTTP/1.1 304 Not Modified\r\n\r\n",),
        "201": (by_length(kind, body, status=b"201 Created"),),
        "206": (by_length(kind, body, status=b"206 Partial Content"),),
        "302": (by_length(b"text/html", b"<a>", status=b"302 Found", fields=b"location: /login\r\n"),),
        "500 without words": (by_length(b"text/plain", b"", status=b"500 Oops"),),
        "503 with a page": (by_length(b"text/html", b"<html>busy</html>", status=b"503 Busy"),),
        "400 with the whole answer": (by_length(kind, body, status=b"400 Bad Request"),),
    }


def evil_wholes(speaks: Speaks) -> dict[str, Pieces]:
    body = json.dumps(speaks.whole).encode()
    json_type = b"application/json"

    def other(**fields: Any) -> bytes:
        return json.dumps({**speaks.whole, **fields}).encode()

    bodies = {
        "nothing": b"",
        "half": body[: len(body) // 2],
        "all but the last brace": body[:-1],
        "a page": b"<!doctype html><title>busy</title>",
        "null": b"null",
        "a list": b"[]",
        "a word": b'"busy"',
        "an empty object": b"{}",
        "an error": b'{"error":"busy"}',
        "an error object": b'{"error":{"message":"busy","type":"x","code":503}}',
        "an error beside the answer": other(error={"message": "busy"}),
        "an error of anthropic's": b'{"type":"error","error":{"type":"overloaded_error","message":"busy"}}',
        "an error of an old vllm": b'{"object":"error","message":"busy","code":400}',
        "no utf-8": body.replace(b'"a"', b'"\xff"'),
        "two objects": body + body,
        "as a stream": speaks.stream,
    }
    if "choices" in speaks.whole:
        choice = speaks.whole["choices"][0]
        bodies |= {
            "no choices": other(choices=[]),
            "choices of null": other(choices=None),
            "a reason of null": other(choices=[{**choice, "finish_reason": None}]),
            "aborted": other(choices=[{**choice, "finish_reason": "abort"}]),
            "reason error": other(choices=[{**choice, "finish_reason": "error"}]),
        }
    elif "stop_reason" in speaks.whole:
        bodies |= {"a reason of null": other(stop_reason=None)}
    else:
        bodies |= {"not done": other(done=False), "done of null": other(done=None)}
    found: dict[str, Pieces] = {}
    for name, evil in bodies.items():
        found[f"{name}, by length"] = (by_length(json_type, evil),)
        found[f"{name}, chunked"] = (head(json_type, fields=CHUNKED) + chunks(evil[:9], evil[9:]),)
        found[f"{name}, in two reads"] = (
            by_length(json_type, evil, cut=len(evil) // 2),
            evil[len(evil) - len(evil) // 2 :],
        )
        found[f"{name}, until the close"] = (head(json_type, fields=b"connection: close\r\n") + evil,)
    return found | {
        "a length cut short": (by_length(json_type, body, cut=1),),
        "a chunk cut short": (head(json_type, fields=CHUNKED) + chunks(body, end=False),),
        "packed": (by_length(json_type, body, fields=b"content-encoding: gzip\r\n"),),
        "closed without an answer": (b"",),
        **statuses(json_type, body),
    }


# the matrix -----------------------------------------------------------------------------------------------------------


def says(backend: Backend, pieces: Pieces) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        for at, one in enumerate(pieces):
            if at:
                await asyncio.sleep(0.005)
            writer.write(one)
            await writer.drain()

    backend.script = script


async def outcome(pair: Pair, client: Any, *, stream: bool) -> Heard | None:
    """The package's result, None if it raises."""
    try:
        return await asyncio.wait_for(pair.ask(client, stream), 20)
    except Exception:  # each package has errors of its own, and passes on those of two HTTP clients and of json
        return None


@pytest.mark.breadth(3)
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "one piece"])
@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
async def test_no_evil_answer_ends_clean(tmp_path: Path, pair: Pair, stream: bool) -> None:
    """Of 117 such answers in four dialects and ways 9 ended clean or were counted as whole."""
    evil = (evil_streams if stream else evil_wholes)(pair.speaks)
    clean: list[str] = []
    async with proxied(tmp_path) as (proxy, backend):
        proxy.use(backend, pair.kind)
        client = pair.client(f"http://127.0.0.1:{proxy.port}")
        for name, pieces in evil.items():
            before = len(proxy.events)
            says(backend, pieces)
            heard = await outcome(pair, client, stream=stream)
            await until(lambda before=before: len(proxy.events) > before and nothing_is_held(proxy))  # type: ignore[misc]
            event = proxy.events[-1]
            if heard is not None or (not event.cut and event.status < 400):
                clean.append(f"{name}: heard {heard}, cut {event.cut}, status {event.status}")
        assert clean == [], f"of {len(evil)}"
        says(backend, (answered(pair.speaks, stream=stream),))
        assert await outcome(pair, client, stream=stream) == Heard("a"), "what is whole is heard"
        assert (proxy.events[-1].cut, proxy.events[-1].status) == (False, 200)
        await (client._client.aclose() if isinstance(client, ollama.AsyncClient) else client.close())
        await asyncio.sleep(0.05)
        gc.collect()  # what a package left of a broken stream


def answered(speaks: Speaks, *, stream: bool) -> bytes:
    if stream:
        return by_length(speaks.kind.title(), speaks.stream)
    return by_length(b"application/json", json.dumps(speaks.whole).encode())
