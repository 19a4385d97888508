"""A stand-in that replays the published shapes of answers a tiny random model does not give: a tool called, thinking.

As Ollama 0.32.15 (its shapes were seen over a socket; no package has an Ollama to be asked in tests), as llama-server
0c1e570 or as vLLM 0.32: the bytes are those of tests/proxy/streams, the words are its own. What is asked says which
answer comes; nothing is computed. An Ollama's model can what its capabilities say, thinks unless it is told not to, and
calls a tool only where `calls` says so: nobody can force it.
"""

from __future__ import annotations

import base64
import json
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from tests.fakes import ollama_words

Object = dict[str, Any]
MODEL = "tiny"
WORDS = ["Hello", " there", ",", " how", " are", " you", "?"]
THOUGHTS = ["Let", " me", " see."]
CALL = ("look_up", {"city": "Paris"})
VECTOR = [0.5, -0.25, 0.125]
ENDLESS = 1000
"""A longer answer than this is asked for by who leaves: it comes slowly."""
LISTED = {"id": MODEL, "object": "model", "created": 1}
ANSWERS: dict[str, dict[str, Any]] = {
    "llama": {
        "/health": {"status": "ok"},
        "/props": {"build_info": "b1-0c1e570", "total_slots": 4},
        "/v1/models": {"object": "list", "data": [{**LISTED, "owned_by": "llamacpp"}]},
    },
    "vllm": {
        "/health": {},
        "/version": {"version": "0.32.0"},
        "/v1/models": {"object": "list", "data": [{**LISTED, "owned_by": "vllm", "max_model_len": 4096}]},
    },
}


class Reply(NamedTuple):
    """The answer before any dialect."""

    words: list[str]
    thoughts: list[str]
    called: bool
    reason: str
    tokens_in: int
    slow: bool = False
    held: bool = False
    """All text comes with the end: it might have become a call."""

    @property
    def tokens_out(self) -> int:
        return len(self.words) + len(self.thoughts) + 9 * self.called


def reply_to(body: Object) -> Reply:
    """By the fields of whichever dialect, as llama-server and vLLM have them."""
    messages = body["messages"]
    texts = [*map(_text, messages), _text({"content": body.get("system") or ""})]
    tokens_in = 8 + sum(len(text.split()) for text in texts)
    options = body.get("options") or {}
    length = options.get("num_predict") or body.get("max_tokens") or ENDLESS
    stops = options.get("stop") or body.get("stop") or body.get("stop_sequences") or []
    if length > ENDLESS:
        return Reply(WORDS * 100, [], False, "length", tokens_in, slow=True)
    if body.get("tools") and not _is_result(messages[-1]):
        return Reply([], [], True, "tool_calls", tokens_in)
    words = ['{"city"', ':"Paris"}'] if _format(body) else WORDS
    words = ["A picture of", f" {_picture(messages)}"] if _picture(messages) else words
    return Reply(_until(words, stops), THOUGHTS if _thinks(body) else [], False, "stop", tokens_in)


def ollama_reply_to(path: str, body: Object, capabilities: list[str], calls: bool) -> Reply:
    """Fields that Ollama passes over are as if not asked for: `tool_choice`, and Anthropic's JSON by a schema."""
    offered = bool(body.get("tools"))
    passed_over = {"output_config", "tool_choice", "max_completion_tokens", *(() if calls else ("tools",))}
    said = reply_to({name: value for name, value in body.items() if name not in passed_over})
    if said.slow or said.called:
        return said
    thoughts = THOUGHTS if ollama_words.thinks(body, capabilities) else []
    return said._replace(thoughts=thoughts, held=offered and path != "/api/generate")


def _until(words: list[str], stops: list[str]) -> list[str]:
    """The pieces of what comes before the first of `stops`."""
    text = "".join(words)
    left = min((text.find(stop) for stop in stops if stop in text), default=len(text))
    kept = []
    for word in words:
        kept.append(word[:left])
        left -= len(kept[-1])
    return [word for word in kept if word]


def _text(message: Object) -> str:
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return " ".join(_text(part) if part.get("type") == "tool_result" else part.get("text", "") for part in content)


def _is_result(message: Object) -> bool:
    content = message.get("content")
    in_parts = isinstance(content, list) and any(part["type"] == "tool_result" for part in content)
    return message["role"] == "tool" or in_parts


def _format(body: Object) -> bool:
    return bool(body.get("format") or body.get("response_format") or body.get("output_config"))


def _thinks(body: Object) -> bool:
    if (body.get("thinking") or {}).get("type") == "enabled" or body.get("thinking_token_budget"):
        return True
    if body.get("reasoning_effort", "none") != "none":
        return True
    return bool(body.get("think") or (body.get("chat_template_kwargs") or {}).get("enable_thinking"))


def _picture(messages: list[Object]) -> int:
    """Characters of base64 of the pictures: that all of them arrived."""
    total = sum(len(data) for message in messages for data in message.get("images") or [])
    for message in messages:
        for part in message["content"] if isinstance(message.get("content"), list) else []:
            url = (part.get("image_url") or {}).get("url", "")
            total += len(url.partition(",")[2]) + len((part.get("source") or {}).get("data", ""))
    return total


# --- Ollama -----------------------------------------------------------------------------------------------------------


def ollama_lines(said: Reply) -> Iterator[Object]:
    head = {"model": MODEL, "created_at": "2026-11-20T10:44:35.131415926Z"}
    for thought in said.thoughts:
        yield {**head, "message": {"role": "assistant", "content": "", "thinking": thought}, "done": False}
    for word in said.words if not said.held else ():
        yield {**head, "message": {"role": "assistant", "content": word}, "done": False}
    if said.called:
        yield {**head, "message": {"role": "assistant", "content": "", "tool_calls": [_ollama_call()]}, "done": False}
    reason = "stop" if said.reason == "tool_calls" else said.reason
    held = "".join(said.words) if said.held else ""
    last = {"message": {"role": "assistant", "content": held}, "done": True, "done_reason": reason}
    yield {**head, **last, **_cost(said)}


def ollama_whole(said: Reply) -> Object:
    *_, last = ollama_lines(said)
    message: Object = {"role": "assistant", "content": "".join(said.words)}
    if said.thoughts:
        message["thinking"] = "".join(said.thoughts)
    if said.called:
        message["tool_calls"] = [_ollama_call()]
    return {**last, "message": message}


def _ollama_call() -> Object:
    return {"id": "call_x1", "function": {"index": 0, "name": CALL[0], "arguments": CALL[1]}}


def _cost(said: Reply) -> Object:
    counts = {"prompt_eval_count": said.tokens_in, "eval_count": said.tokens_out}
    return {"total_duration": 4883583458, "load_duration": 1334875, "prompt_eval_duration": 342546000, **counts}


# --- OpenAI -----------------------------------------------------------------------------------------------------------


def openai_events(said: Reply, kind: str, with_usage: bool) -> Iterator[Object]:
    """A name first, then the arguments in pieces; Ollama calls in one delta."""
    if kind == "ollama":
        yield from _ollamas_openai_events(said, with_usage)
        return
    deltas: list[Object] = [{"role": "assistant", "content": ""}]
    deltas += [{_field(kind): thought} for thought in said.thoughts] + [{"content": word} for word in said.words]
    if said.called:
        begun = {"index": 0, "id": "call_x1", "type": "function", "function": {"name": CALL[0], "arguments": ""}}
        deltas += [{"tool_calls": [begun]}] + [
            {"tool_calls": [{"index": 0, "function": {"arguments": piece}}]} for piece in ('{"city":', ' "Par', 'is"}')
        ]
    base = {"id": "chatcmpl-7", "object": "chat.completion.chunk", "created": 1, "model": MODEL}
    for delta in deltas:
        yield {**base, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
    yield {**base, "choices": [{"index": 0, "delta": {}, "finish_reason": said.reason}]}
    if with_usage:
        yield {**base, "choices": [], "usage": _usage(said)}


def _ollamas_openai_events(said: Reply, with_usage: bool) -> Iterator[Object]:
    """The role is in the first delta alone, and the reason in one of its own."""
    words = ["".join(said.words)] if said.held and said.words else said.words
    deltas: list[Object] = [{"content": "", "reasoning": thought} for thought in said.thoughts]
    deltas += [{"content": word} for word in words]
    if said.called:
        deltas.append({"content": "", "tool_calls": [_openai_call(ollama=True)]})
    base = {"id": "chatcmpl-7", "object": "chat.completion.chunk", "created": 1, "model": MODEL}
    base["system_fingerprint"] = ollama_words.FINGERPRINT
    for place, delta in enumerate(deltas):
        role = {} if place else {"role": "assistant"}
        yield {**base, "choices": [{"index": 0, "delta": {**role, **delta}, "finish_reason": None}]}
    yield {**base, "choices": [{"index": 0, "delta": {}, "finish_reason": said.reason}]}
    if with_usage:
        yield {**base, "choices": [], "usage": _usage(said)}


def _openai_call(*, ollama: bool) -> Object:
    function = {"name": CALL[0], "arguments": json.dumps(CALL[1], separators=(",", ":") if ollama else None)}
    return {"id": "call_x1", **({"index": 0} if ollama else {}), "type": "function", "function": function}


def openai_whole(said: Reply, kind: str) -> Object:
    message: Object = {"role": "assistant", "content": "".join(said.words)}
    if said.thoughts:
        message[_field(kind)] = "".join(said.thoughts)
    if said.called:
        message["tool_calls"] = [_openai_call(ollama=kind == "ollama")]
    choice = {"index": 0, "message": message, "finish_reason": said.reason}
    head = {"id": "chatcmpl-7", "object": "chat.completion", "created": 1, "model": MODEL}
    if kind == "ollama":
        head["system_fingerprint"] = ollama_words.FINGERPRINT
    return {**head, "choices": [choice], "usage": _usage(said)}


def _field(kind: str) -> str:
    return "reasoning_content" if kind == "llama" else "reasoning"


def _usage(said: Reply) -> Object:
    counts = {"prompt_tokens": said.tokens_in, "completion_tokens": said.tokens_out}
    return {**counts, "total_tokens": said.tokens_in + said.tokens_out}


# --- Anthropic --------------------------------------------------------------------------------------------------------
# Ollama leaves out what is empty: `signature`, and `stop_sequence` always.


def anthropic_blocks(said: Reply, kind: str) -> list[Object]:
    blocks: list[Object] = []
    if said.thoughts:
        signature = {} if kind == "ollama" else {"signature": ""}
        blocks.append({"type": "thinking", "thinking": "".join(said.thoughts), **signature})
    if said.words:
        blocks.append({"type": "text", "text": "".join(said.words)})
    if said.called:
        blocks.append({"type": "tool_use", "id": "call_x1", "name": CALL[0], "input": CALL[1]})
    return blocks


def anthropic_whole(said: Reply, kind: str) -> Object:
    """A stop sequence is `end_turn`, too."""
    reason = {"tool_calls": "tool_use", "length": "max_tokens"}.get(said.reason, "end_turn")
    usage = {"input_tokens": said.tokens_in, "output_tokens": said.tokens_out}
    head = {"id": "msg_0f0e", "type": "message", "role": "assistant", "model": MODEL}
    sequence = {} if kind == "ollama" else {"stop_sequence": None}
    return {**head, "content": anthropic_blocks(said, kind), "stop_reason": reason, **sequence, "usage": usage}


def anthropic_events(said: Reply, kind: str) -> Iterator[Object]:
    """The tokens of the prompt are estimated where it begins, and counted at its end."""
    whole = anthropic_whole(said, kind)
    begun = {**whole, "content": [], "usage": {"input_tokens": said.tokens_in // 4, "output_tokens": 0}}
    begun["stop_reason"] = None
    if kind == "ollama":
        del begun["stop_reason"]
    yield {"type": "message_start", "message": begun}
    for index, block in enumerate(whole["content"]):
        empty = {"text": "", "thinking": "", "signature": "", "input": {}}
        start = {name: empty.get(name, value) for name, value in block.items()}
        yield {"type": "content_block_start", "index": index, "content_block": start}
        for delta in _deltas(block, said, kind):
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    delta = {name: whole[name] for name in ("stop_reason", "stop_sequence") if name in whole}
    yield {"type": "message_delta", "delta": delta, "usage": whole["usage"]}
    yield {"type": "message_stop"}


def _deltas(block: Object, said: Reply, kind: str) -> list[Object]:
    if block["type"] == "thinking":
        return [{"type": "thinking_delta", "thinking": thought} for thought in said.thoughts]
    if block["type"] == "text":
        words = [block["text"]] if said.held else said.words
        return [{"type": "text_delta", "text": word} for word in words]
    pieces = ['{"city":"Paris"}'] if kind == "ollama" else ['{"city":', ' "Par', 'is"}']
    return [{"type": "input_json_delta", "partial_json": piece} for piece in pieces]


# --- the server -------------------------------------------------------------------------------------------------------


class Standin(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Takes a client that left for no error."""

    def __init__(self, kind: str, capabilities: list[str], calls: bool) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.kind, self.capabilities, self.calls = kind, capabilities, calls

    def list_of(self, path: str) -> Any:
        """The answer to a GET; None where there is none."""
        row = ollama_words.tag(MODEL, 656640, "0" * 64, self.capabilities)
        if self.kind != "ollama":
            return ANSWERS[self.kind].get(path)
        return {
            "/": "Ollama is running",
            "/api/version": {"version": "0.32.15"},
            "/api/tags": {"models": [row]},
            "/api/ps": {"models": [ollama_words.running(row)]},
            "/v1/models": ollama_words.listed([MODEL]),
        }.get(path)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def standin(kind: str, *capabilities: str, calls: bool = True) -> Iterator[Standin]:
    """As `ollama`, `llama` or `vllm`, in a thread of this process. `capabilities`, `calls`: of an Ollama's model."""
    server = Standin(kind, ["completion", *capabilities], calls)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Standin

    def do_GET(self) -> None:
        if self._is_foreign():
            return
        found = self.server.list_of(self.path)
        self._whole(200 if found is not None else 404, found if found is not None else {"error": "404"})

    def _is_foreign(self) -> bool:
        """An Ollama on a loopback address answers to no name but its own."""
        if self.server.kind != "ollama" or ollama_words.is_for_itself(self.headers["host"] or ""):
            return False
        self.close_connection = True
        self._whole(403, "")
        return True

    def _refused(self, path: str, body: Object) -> bool:
        """Requests that Ollama refuses in words of its own."""
        status, said = 404, ""
        if ollama_words.tagged(body.get("model", "")) != f"{MODEL}:latest":
            said = ollama_words.unknown(path, body.get("model", ""))
        elif said := ollama_words.lacking(MODEL, body, self.server.capabilities):
            status = 400
        elif said := ollama_words.misread(path, body):
            status = 500
        if said:
            kind = {400: "invalid_request_error", 404: "not_found_error"}.get(status, "api_error")
            told: Any = {"message": said, "type": kind, "param": None, "code": None}
            if path.startswith("/v1/messages"):
                self._whole(status, {"type": "error", "error": {"type": kind, "message": said}})
            else:
                self._whole(status, {"error": told if path.startswith("/v1") else said})
        return bool(said)

    def do_POST(self) -> None:
        body: Object = json.loads(self.rfile.read(int(self.headers["content-length"])))
        path = self.path.partition("?")[0]
        is_ollama = self.server.kind == "ollama"
        if self._is_foreign() or (is_ollama and self._refused(path, body)):
            return
        if body.get("model") != MODEL and not is_ollama:
            self._whole(404, {"error": {"message": "no such model"}})
        elif path == "/api/show":
            self._whole(200, {"details": {}, "model_info": {}, "capabilities": self.server.capabilities})
        elif path == "/v1/completions":
            choices = [{"index": 0, "text": "x", "finish_reason": "length"}]
            self._whole(200, {"object": "text_completion", "choices": choices, "usage": {"completion_tokens": 1}})
        elif path in ("/api/embed", "/v1/embeddings"):
            self._whole(200, _vectors(path, body))
        elif "messages" in body:
            self._say(path, body, self._reply(path, body))
        else:
            self._generate(body)

    def _reply(self, path: str, body: Object) -> Reply:
        if self.server.kind != "ollama":
            return reply_to(body)
        return ollama_reply_to(path, body, self.server.capabilities, self.server.calls)

    def _generate(self, body: Object) -> None:
        """One turn; its system prompt counts as a message's."""
        said = self._reply("/api/generate", {**body, "messages": [{"role": "user", "content": body["prompt"]}]})
        lines = [_generated(line) for line in (ollama_lines(said) if body.get("stream") else [ollama_whole(said)])]
        if body.get("stream"):
            self._stream("application/x-ndjson", (_line(one) for one in lines), said.slow)
        else:
            self._whole(200, lines[0])

    def _say(self, path: str, body: Object, said: Reply) -> None:
        kind = self.server.kind
        if path == "/api/chat":
            if not body.get("stream", True):
                self._whole(200, ollama_whole(said))
            else:
                self._stream("application/x-ndjson", (_line(one) for one in ollama_lines(said)), said.slow)
        elif path == "/v1/chat/completions":
            if not body.get("stream"):
                self._whole(200, openai_whole(said, kind))
            else:
                with_usage = bool((body.get("stream_options") or {}).get("include_usage"))
                events = [b"data: " + _line(one) + b"\n" for one in openai_events(said, kind, with_usage)]
                self._stream("text/event-stream", iter([*events, b"data: [DONE]\n\n"]), said.slow)
        elif not body.get("stream"):
            self._whole(200, anthropic_whole(said, kind))
        else:
            found = (
                b"event: %b\ndata: %b\n" % (one["type"].encode(), _line(one)) for one in anthropic_events(said, kind)
            )
            self._stream("text/event-stream", found, said.slow)

    def _stream(self, kind: str, parts: Iterator[bytes], slow: bool) -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        with suppress(OSError):  # who asked may have left
            for part in parts:
                self.wfile.write(b"%x\r\n%b\r\n" % (len(part), part))
                time.sleep(0.02 if slow else 0)
            self.wfile.write(b"0\r\n\r\n")

    def _whole(self, status: int, found: Any) -> None:
        data = found.encode() if isinstance(found, str) else json.dumps(found).encode()
        self.send_response(status)
        self.send_header("content-type", "text/plain" if isinstance(found, str) else "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


def _generated(line: Object) -> Object:
    """The same line of /api/generate."""
    return {name: value for name, value in line.items() if name != "message"} | {"response": line["message"]["content"]}


def _line(found: Object) -> bytes:
    return json.dumps(found, separators=(",", ":")).encode() + b"\n"


def _vectors(path: str, body: Object) -> Object:
    texts = body["input"] if isinstance(body["input"], list) else [body["input"]]
    tokens = sum(len(text.split()) for text in texts)
    if path == "/api/embed":
        vectors = [VECTOR] * len(texts)
        return {"model": MODEL, "embeddings": vectors, "total_duration": 1000, "prompt_eval_count": tokens}
    packed: Any = VECTOR
    if body.get("encoding_format") == "base64":
        packed = base64.b64encode(struct.pack("<3f", *VECTOR)).decode()
    data = [{"object": "embedding", "index": at, "embedding": packed} for at in range(len(texts))]
    return {"object": "list", "model": MODEL, "data": data, "usage": {"prompt_tokens": tokens, "total_tokens": tokens}}
