"""Answers of the demo backend: pure functions from a request to the whole reply. No model is asked.

It speaks Ollama's dialect under `/api` (server/routes.go of 2026-08) and OpenAI's under `/v1`, and says in every
answer that it is canned. One word is one token, in prompts and in answers, so usage can be counted by reading. Where
tools are offered it calls one, with arguments that fit, until it is told a result; where JSON by a schema is asked for
it answers with such a value: a newcomer's agent loop runs to its end without a model.
"""

from __future__ import annotations

import base64
import hashlib
import re
import struct
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import Any

import msgspec

from hive import __version__
from hive.demo.canned_json import value_for
from hive.domain import DEMO_SERVER
from hive.terminal_text import counted

MODEL = "hive-demo"
SERVER = DEMO_SERVER
"""The `Server` header by which the demo backend is told from a real one."""

EMBEDDING_SIZE = 64
_SENTENCES = (
    "A hive is a home for many bees, and each has its own work.",
    "Those with nothing to do sleep, and their room is given to others.",
    "When someone calls, the sleeper wakes and answers as if it had never slept.",
    "The keeper counts what each one takes and lets none of them starve.",
    "In the morning the first scout dances, and the others read the way from it.",
    "Honey that nobody counted is honey that nobody can share fairly.",
    "A cold comb costs nothing, a warm one costs wings.",
    "The door is narrow so that one guard can watch it.",
)


class CannedReply(msgspec.Struct, frozen=True, kw_only=True):
    """One answer. Each part is (tokens that take their time before it is sent, bytes).

    `streamed`: the parts are chunks of an answer whose length is not told in its head.
    """

    status: int = 200
    content_type: str = "application/json; charset=utf-8"
    parts: list[tuple[int, bytes]]
    streamed: bool = False
    allow: str = ""


class _Piece(msgspec.Struct):
    type: str = ""
    text: str = ""


class _Message(msgspec.Struct):
    role: str = ""
    content: str | list[_Piece] | None = None

    def text(self) -> str:
        if isinstance(self.content, list):
            return "\n".join(piece.text for piece in self.content)
        return self.content or ""


class _Options(msgspec.Struct):
    num_predict: int | None = None


class _StreamOptions(msgspec.Struct):
    include_usage: bool = False


class _Function(msgspec.Struct):
    name: str = ""
    parameters: dict[str, Any] | None = None


class _Tool(msgspec.Struct):
    function: _Function = msgspec.field(default_factory=_Function)


class _Choice(msgspec.Struct):
    """`tool_choice` that names a function."""

    function: _Function = msgspec.field(default_factory=_Function)


class _Schema(msgspec.Struct):
    schema: dict[str, Any] | None = None


class _ResponseFormat(msgspec.Struct):
    type: str = "text"
    json_schema: _Schema | None = None


class Wish(msgspec.Struct):
    """Every field of a request, of either dialect, that changes the answer."""

    model: str | None = None
    name: str | None = None
    stream: bool | None = None
    prompt: str | list[str] | None = None
    system: str | None = None
    messages: list[_Message] | None = None
    input: str | list[str] | None = None
    options: _Options | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream_options: _StreamOptions | None = None
    keep_alive: str | float | None = None
    encoding_format: str | None = None
    tools: list[_Tool] | None = None
    tool_choice: str | _Choice | None = None
    response_format: _ResponseFormat | None = None
    format: str | dict[str, Any] | None = None


class Moment(msgspec.Struct, frozen=True):
    """Inputs of an answer beside the request: Unix seconds, a number of its own, words per second."""

    now: float
    number: int
    tokens_per_s: float


class _Call(msgspec.Struct):
    """A call of a tool."""

    name: str
    arguments: dict[str, Any]


class _Talk(msgspec.Struct):
    """A prompt answered: `tokens` join to the text, or to the arguments of `call`."""

    prompt_tokens: int
    tokens: list[str]
    reason: str
    call: _Call | None = None


def mark(prompt: str) -> str:
    """Eight hex digits that an answer to `prompt` contains, so that a caller can check whose answer it got.

    >>> mark("hello"), mark("hello") in "".join(answer_words("hello"))
    ('2cf24dba', True)
    """
    return hashlib.sha256(prompt.encode()).hexdigest()[:8]


def answer_words(prompt: str) -> list[str]:
    """The canned text for `prompt` as tokens, each a word with the space before it; the same for the same prompt.

    >>> "".join(answer_words("hello"))[:52]
    '[hive-demo] This is canned text; no model was asked.'
    """
    seed = int(mark(prompt), 16)
    picked = [_SENTENCES[(seed >> 3 * turn) % len(_SENTENCES)] for turn in range(2 + seed % 3)]
    text = (
        "[hive-demo] This is canned text; no model was asked. "
        f"Your prompt had {counted(len(prompt.split()), 'word')} and has the mark {mark(prompt)}. "
    )
    return re.findall(r"\s*\S+", text + " ".join(picked))


def embedding(text: str) -> list[float]:
    """A vector of length 1 that counts words by hash: texts that share words are near each other."""
    counts = [0.0] * EMBEDDING_SIZE
    for word in text.lower().split() or [""]:
        counts[hashlib.sha256(word.encode()).digest()[0] % EMBEDDING_SIZE] += 1.0
    length = sum(count * count for count in counts) ** 0.5
    return [count / length for count in counts]


def reply_to(method: str, target: str, body: bytes, moment: Moment) -> CannedReply:
    """The answer to any request: unknown paths are 404, other methods 405, nonsense 400, in the path's dialect."""
    path = target.partition("?")[0]
    row = _ROWS.get(path)
    if row is None:
        return refuse(path, 404, f"{SERVER} has no {path}; its only model is {MODEL}")
    wanted, act = row
    if method != wanted and not (wanted == "GET" and method == "HEAD"):
        return refuse(path, 405, f"{path} takes {wanted}", allow="GET, HEAD" if wanted == "GET" else wanted)
    try:
        wish = msgspec.json.decode(body, type=Wish) if wanted == "POST" else Wish()
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return refuse(path, 400, f"{SERVER} cannot read the request: {error}")
    model = wish.model or wish.name or MODEL
    if model.removesuffix(":latest") != MODEL:
        return refuse(path, 404, f"model '{model}' not found: this is the demo backend, it has only {MODEL}")
    return act(wish, moment)


def refuse(path: str, status: int, message: str, *, allow: str = "") -> CannedReply:
    """An error in the dialect of `path`: a string under `/api`, OpenAI's object under `/v1`."""
    error: Any = message
    if path.startswith("/v1"):
        kind = "not_found_error" if status == 404 else "invalid_request_error"
        error = {"message": message, "type": kind, "param": None, "code": None}
    return CannedReply(status=status, parts=[(0, msgspec.json.encode({"error": error}))], allow=allow)


def _whole(found: object, tokens: int = 0) -> CannedReply:
    return CannedReply(parts=[(tokens, msgspec.json.encode(found))])


# --- the prompt ----------------------------------------------------------------------------------------------------


def _talk(wish: Wish) -> _Talk:
    if wish.messages is not None:
        texts = [message.text() for message in wish.messages]
        asked = next((message.text() for message in reversed(wish.messages) if message.role == "user"), "")
    else:
        asked = "\n".join(wish.prompt) if isinstance(wish.prompt, list) else wish.prompt or ""
        texts = [wish.system or "", asked]
    prompt_tokens = sum(len(text.split()) for text in texts)
    call = _call(wish, asked)
    if call is not None:
        return _Talk(prompt_tokens, _spoken(_json(call.arguments)), "tool_calls", call)
    tokens = answer_words(asked) if (schema := _schema(wish)) is None else _spoken(_json(value_for(schema, asked)))
    limit = _limit(wish)
    return _Talk(
        prompt_tokens=prompt_tokens,
        tokens=tokens[:limit],
        reason="length" if limit is not None and limit < len(tokens) else "stop",
    )


def _call(wish: Wish, asked: str) -> _Call | None:
    """The call of a tool that is offered: the one that is asked for by name, else the one whose name's words the prompt
    has most of, else the first. None where none is wanted, and where a result has come: that ends the loop."""
    tools = [tool.function for tool in wish.tools or () if tool.function.name]
    if not tools or wish.tool_choice == "none" or not wish.messages or wish.messages[-1].role == "tool":
        return None
    named = wish.tool_choice.function.name if isinstance(wish.tool_choice, _Choice) else ""
    said = set(re.findall(r"[a-z0-9]+", asked.lower()))
    tools.sort(key=lambda one: (one.name != named, -len(said & set(re.findall(r"[a-z0-9]+", one.name.lower())))))
    found = value_for(tools[0].parameters or {"type": "object"}, asked)
    return _Call(tools[0].name, found if isinstance(found, dict) else {})


def _schema(wish: Wish) -> object:
    """The schema that the answer has to fit, as OpenAI's clients or Ollama's say it; None where text is wanted."""
    if wish.response_format is not None and wish.response_format.type == "json_schema":
        return (wish.response_format.json_schema or _Schema()).schema or {"type": "object"}
    wants_json = wish.format == "json" or (wish.response_format and wish.response_format.type == "json_object")
    return wish.format if isinstance(wish.format, dict) else {"type": "object"} if wants_json else None


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _spoken(text: str) -> list[str]:
    """A text as tokens of a few letters each."""
    return re.findall(r"(?s).{1,6}", text)


def _limit(wish: Wish) -> int | None:
    """The most tokens wanted, None for no limit (Ollama says -1 or -2 for that)."""
    wanted = (wish.max_completion_tokens, wish.max_tokens, wish.options.num_predict if wish.options else None)
    limit = next((number for number in wanted if number is not None), -1)
    return None if limit < 0 else limit


# --- Ollama --------------------------------------------------------------------------------------------------------

_DETAILS = {
    "parent_model": "",
    "format": "canned",
    "family": MODEL,
    "families": [MODEL],
    "parameter_size": "0",
    "quantization_level": "none",
}
_TAG = {"name": MODEL, "model": MODEL, "size": 0, "digest": hashlib.sha256(MODEL.encode()).hexdigest()}


def _root(_wish: Wish, _moment: Moment) -> CannedReply:
    words = f"{SERVER} is running: canned text, no model\n".encode()
    return CannedReply(content_type="text/plain; charset=utf-8", parts=[(0, words)])


def _version(_wish: Wish, _moment: Moment) -> CannedReply:
    return _whole({"version": f"{__version__}-{SERVER}"})


def _tags(_wish: Wish, _moment: Moment) -> CannedReply:
    return _whole({"models": [{**_TAG, "modified_at": _time(0), "details": _DETAILS}]})


def _ps(_wish: Wish, moment: Moment) -> CannedReply:
    loaded = {"details": _DETAILS, "expires_at": _time(moment.now + 300), "size_vram": 0, "context_length": 4096}
    return _whole({"models": [{**_TAG, **loaded}]})


def _show(_wish: Wish, _moment: Moment) -> CannedReply:
    return _whole(
        {
            "license": "",
            "modelfile": f"# {MODEL}: canned text, no model",
            "parameters": "",
            "template": "{{ .Prompt }}",
            "details": _DETAILS,
            "model_info": {"general.architecture": MODEL, "general.parameter_count": 0},
            "capabilities": ["completion", "tools", "embedding"],
            "modified_at": _time(0),
        }
    )


def _generate(wish: Wish, moment: Moment) -> CannedReply:
    return _ollama(wish, moment, bool(wish.prompt), lambda word: {"response": word}, {"context": []})


def _chat(wish: Wish, moment: Moment) -> CannedReply:
    def spoken(word: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": word}}

    return _ollama(wish, moment, bool(wish.messages), spoken, {})


def _ollama(
    wish: Wish, moment: Moment, asked: bool, spoken: Callable[[str], dict[str, Any]], more: dict[str, Any]
) -> CannedReply:
    """NDJSON unless `stream` is false; without a prompt it only says that the model is loaded, or unloaded."""
    base = {"model": MODEL, "created_at": _time(moment.now)}
    if not asked:
        reason = "unload" if wish.keep_alive in (0, "0", "0s") else "load"
        return _whole({**base, **spoken(""), "done": True, "done_reason": reason})
    talk = _talk(wish)
    if talk.call is not None:
        return _ollama_call(wish, moment, talk, base)
    last = {"done": True, "done_reason": talk.reason, **more, **_durations(talk, moment)}
    if wish.stream is False:
        return _whole({**base, **spoken("".join(talk.tokens)), **last}, len(talk.tokens))
    lines: list[tuple[int, dict[str, Any]]] = [(1, {**base, **spoken(word), "done": False}) for word in talk.tokens]
    lines.append((0, {**base, **spoken(""), **last}))
    parts = [(tokens, msgspec.json.encode(line) + b"\n") for tokens, line in lines]
    return CannedReply(content_type="application/x-ndjson", parts=parts, streamed=True)


def _ollama_call(wish: Wish, moment: Moment, talk: _Talk, base: dict[str, Any]) -> CannedReply:
    """A call is said in one line, and its end in another (0.32)."""
    assert talk.call is not None
    function = {"name": talk.call.name, "arguments": talk.call.arguments}
    message = {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}
    last = {"done": True, "done_reason": "stop", **_durations(talk, moment)}
    if wish.stream is False:
        return _whole({**base, "message": message, **last}, len(talk.tokens))
    end = {"message": {"role": "assistant", "content": ""}, **last}
    lines = [(len(talk.tokens), {**base, "message": message, "done": False}), (0, {**base, **end})]
    parts = [(tokens, msgspec.json.encode(line) + b"\n") for tokens, line in lines]
    return CannedReply(content_type="application/x-ndjson", parts=parts, streamed=True)


def _durations(talk: _Talk, moment: Moment) -> dict[str, int]:
    """Ollama's counts and times (ns), as the pace of the demo makes them."""
    answering = int(len(talk.tokens) / moment.tokens_per_s * 1e9)
    reading = talk.prompt_tokens * 1000
    return {
        "total_duration": answering + reading,
        "load_duration": 0,
        "prompt_eval_count": talk.prompt_tokens,
        "prompt_eval_duration": reading,
        "eval_count": len(talk.tokens),
        "eval_duration": answering,
    }


def _embed(wish: Wish, _moment: Moment) -> CannedReply:
    texts = _inputs(wish)
    found = [embedding(text) for text in texts]
    durations = {"total_duration": 1000 * len(texts), "load_duration": 0, "prompt_eval_count": _count(texts)}
    return _whole({"model": MODEL, "embeddings": found, **durations})


def _embeddings(wish: Wish, _moment: Moment) -> CannedReply:
    return _whole({"embedding": embedding(wish.prompt if isinstance(wish.prompt, str) else "")})


def _time(at: float) -> str:
    """Unix seconds as Ollama writes times: RFC 3339 with nanoseconds.

    >>> _time(0.25)
    '1970-01-01T00:00:00.250000000Z'
    """
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f") + "000Z"


def _inputs(wish: Wish) -> list[str]:
    return wish.input if isinstance(wish.input, list) else [wish.input or ""]


def _count(texts: Iterable[str]) -> int:
    return sum(len(text.split()) for text in texts)


# --- OpenAI --------------------------------------------------------------------------------------------------------

_LISTED = {"id": MODEL, "object": "model", "created": 0, "owned_by": SERVER}


def _models(_wish: Wish, _moment: Moment) -> CannedReply:
    return _whole({"object": "list", "data": [_LISTED]})


def _model(_wish: Wish, _moment: Moment) -> CannedReply:
    return _whole(_LISTED)


def _chat_completions(wish: Wish, moment: Moment) -> CannedReply:
    base = {"id": f"chatcmpl-demo-{moment.number}", "created": int(moment.now), "model": MODEL}
    talk = _talk(wish)
    if not wish.stream:
        message: dict[str, Any] = {"role": "assistant", "content": "".join(talk.tokens)}
        if talk.call is not None:
            function = {"name": talk.call.name, "arguments": "".join(talk.tokens)}
            call = {"id": f"call_demo_{moment.number}", "type": "function", "function": function}
            message |= {"content": None, "tool_calls": [call]}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": talk.reason}
        found = {**base, "object": "chat.completion", "choices": [choice], "usage": _usage(talk)}
        return _whole(found, len(talk.tokens))
    deltas: list[tuple[int, dict[str, Any], str | None]] = [(0, {"role": "assistant", "content": ""}, None)]
    if talk.call is not None:
        opened = {"id": f"call_demo_{moment.number}", "type": "function"}
        deltas.append((0, _call_delta({"name": talk.call.name, "arguments": ""}, opened), None))
        deltas += [(1, _call_delta({"arguments": word}), None) for word in talk.tokens]
    else:
        deltas += [(1, {"content": word}, None) for word in talk.tokens]
    deltas.append((0, {}, talk.reason))
    choices = [
        (tokens, {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason})
        for tokens, delta, reason in deltas
    ]
    return _events({**base, "object": "chat.completion.chunk"}, choices, wish, talk)


def _call_delta(function: dict[str, str], more: dict[str, str] | None = None) -> dict[str, Any]:
    return {"tool_calls": [{"index": 0, **(more or {}), "function": function}]}


def _completions(wish: Wish, moment: Moment) -> CannedReply:
    base = {"id": f"cmpl-demo-{moment.number}", "object": "text_completion", "created": int(moment.now), "model": MODEL}
    talk = _talk(wish)

    def choice(text: str, reason: str | None) -> dict[str, Any]:
        return {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}

    if not wish.stream:
        found = {**base, "choices": [choice("".join(talk.tokens), talk.reason)], "usage": _usage(talk)}
        return _whole(found, len(talk.tokens))
    return _events(base, [*((1, choice(word, None)) for word in talk.tokens), (0, choice("", talk.reason))], wish, talk)


def _events(base: dict[str, Any], choices: list[tuple[int, dict[str, Any]]], wish: Wish, talk: _Talk) -> CannedReply:
    """Server-sent events up to `[DONE]`; with `include_usage` one more, without choices, that has the usage."""
    with_usage = wish.stream_options is not None and wish.stream_options.include_usage
    unknown = {"usage": None} if with_usage else {}
    events = [(tokens, {**base, "choices": [choice], **unknown}) for tokens, choice in choices]
    if with_usage:
        events.append((0, {**base, "choices": [], "usage": _usage(talk)}))
    parts = [(tokens, b"data: " + msgspec.json.encode(event) + b"\n\n") for tokens, event in events]
    parts.append((0, b"data: [DONE]\n\n"))
    return CannedReply(content_type="text/event-stream; charset=utf-8", parts=parts, streamed=True)


def _usage(talk: _Talk) -> dict[str, int]:
    answered = len(talk.tokens)
    return {
        "prompt_tokens": talk.prompt_tokens,
        "completion_tokens": answered,
        "total_tokens": talk.prompt_tokens + answered,
    }


def _v1_embeddings(wish: Wish, _moment: Moment) -> CannedReply:
    texts = _inputs(wish)
    vectors: list[Any] = [embedding(text) for text in texts]
    if wish.encoding_format == "base64":
        vectors = [base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode() for vector in vectors]
    data = [{"object": "embedding", "index": index, "embedding": vector} for index, vector in enumerate(vectors)]
    words = _count(texts)
    usage = {"prompt_tokens": words, "total_tokens": words}
    return _whole({"object": "list", "data": data, "model": MODEL, "usage": usage})


_ROWS: dict[str, tuple[str, Callable[[Wish, Moment], CannedReply]]] = {
    "/": ("GET", _root),
    "/api/version": ("GET", _version),
    "/api/tags": ("GET", _tags),
    "/api/ps": ("GET", _ps),
    "/api/show": ("POST", _show),
    "/api/generate": ("POST", _generate),
    "/api/chat": ("POST", _chat),
    "/api/embed": ("POST", _embed),
    "/api/embeddings": ("POST", _embeddings),
    "/v1/models": ("GET", _models),
    f"/v1/models/{MODEL}": ("GET", _model),
    "/v1/chat/completions": ("POST", _chat_completions),
    "/v1/completions": ("POST", _completions),
    "/v1/embeddings": ("POST", _v1_embeddings),
}
