"""The requests of Ollama's native API, translated for a backend that speaks OpenAI's: the way there. Pure but for a
clock.

| asked | the backend is asked |
|---|---|
| /api/chat | /v1/chat/completions |
| /api/generate | the same, with `system` and `prompt` as messages: Ollama too puts them into the model's template |
| /api/generate with `raw` | /v1/completions: no template |
| /api/embed, /api/embeddings | /v1/embeddings |

The way back is ollama_openai_answers.py. Mapped as Ollama of 2026-08-21 itself asks its llama-server
(llm/llama_server.go), but for names that vLLM has otherwise; both servers pass over fields they do not know (vLLM 0.32:
`extra="allow"`; llama-server 0c1e570: server-schema.cpp reads only its own). `null` is an absent field, as in Go.

What a client leaves out (temperature, top_p, …) is left out: the backend's and the model's own defaults hold, where
Ollama has 0.8, 0.9, ….
"""

from __future__ import annotations

import base64
import binascii
import re
import time
from collections.abc import Callable
from typing import Any

import msgspec

from hive.dialects.ollama_openai_answers import OllamaKept, TextBack, VectorsBack
from hive.dialects.translation import FieldFate, FieldRow, Sent, TranslatedEndpoint, WayBack
from hive.errors import BadRequest, NotSupported

Raw = msgspec.Raw
Clock = Callable[[], float]
_encode = msgspec.json.Encoder().encode
_object = msgspec.json.Decoder(dict[str, Raw]).decode
_objects = msgspec.json.Decoder(list[dict[str, Raw]]).decode
_texts = msgspec.json.Decoder(str | list[str]).decode
_string = msgspec.json.Decoder(str).decode
_float = msgspec.json.Decoder(float).decode
_TRUE, _NULL = b"true", b"null"
_NOTHING = frozenset({b"null", b"false", b'""', b"[]", b"{}"})
"""Values of a refused field that ask for nothing."""
_SHORT = 16
"""Bytes of a value that may be one of a few; a longer one is looked at no further."""
_BROKEN_JSON = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)

# --- what becomes of each field ---------------------------------------------------------------------------------------


def _mapped(to: str, why: str = "") -> FieldRow:
    return FieldRow(FieldFate.MAPPED, to, why)


def _refused(why: str) -> FieldRow:
    return FieldRow(FieldFate.REFUSED, why=why)


def _harmless(why: str) -> FieldRow:
    return FieldRow(FieldFate.HARMLESS, why=why)


_LOADING = _harmless("says how a model is loaded; Hive's models are loaded already")
_GONE = _harmless("Ollama itself has it no more and passes over it (api/types.go)")
OPTIONS = {
    "num_ctx": _LOADING,
    "num_batch": _LOADING,
    "num_gpu": _LOADING,
    "main_gpu": _LOADING,
    "num_thread": _LOADING,
    "use_mmap": _LOADING,
    "use_mlock": _LOADING,
    "numa": _LOADING,
    "low_vram": _LOADING,
    "f16_kv": _LOADING,
    "logits_all": _LOADING,
    "vocab_only": _LOADING,
    "embedding_only": _LOADING,
    "draft_num_predict": _LOADING,
    "num_keep": _harmless("what stays when a full context is shifted; these backends end the answer there"),
    "num_predict": _mapped("max_tokens", "below 1 there is no limit, and it is left out"),
    "seed": _mapped("seed"),
    "stop": _mapped("stop"),
    "temperature": _mapped("temperature"),
    "top_k": _mapped("top_k"),
    "top_p": _mapped("top_p"),
    "min_p": _mapped("min_p"),
    "presence_penalty": _mapped("presence_penalty"),
    "frequency_penalty": _mapped("frequency_penalty"),
    "repeat_penalty": _mapped("repetition_penalty, repeat_penalty", "the first is vLLM's, the second llama-server's"),
    "repeat_last_n": _mapped("repeat_last_n", "llama-server's; vLLM always looks at the whole text"),
    "typical_p": _refused("vLLM has no such sampling, and would pass over it; 1, which is none, is left out"),
    "tfs_z": _GONE,
    "mirostat": _GONE,
    "mirostat_tau": _GONE,
    "mirostat_eta": _GONE,
    "penalize_newline": _GONE,
}
"""Rows of the fields of `options`, at any endpoint; for embeddings all of them are harmless."""
MAX_LAST_N = 65536
"""The whole text (-1), for a server that takes no negative number here; as many as fields.py lets a client ask for."""

MESSAGE = {
    "role": _mapped("role"),
    "content": _mapped("content"),
    "thinking": _mapped("reasoning_content", "vLLM takes it for its own `reasoning`"),
    "images": _mapped("content.image_url"),
    "tool_calls": _mapped("tool_calls"),
    "tool_calls.id": _mapped("tool_calls.id", "made where there is none: call_0, call_1, …"),
    "tool_calls.type": _mapped("tool_calls.type", "always `function`"),
    "tool_calls.function": _mapped("tool_calls.function"),
    "tool_calls.function.index": _harmless("the place in the list says it"),
    "tool_calls.function.name": _mapped("tool_calls.function.name"),
    "tool_calls.function.arguments": _mapped("tool_calls.function.arguments", "the same object as text"),
    "tool_name": _mapped("name"),
    "tool_call_id": _mapped("tool_call_id", "found by `tool_name`, else by order, where there is none"),
}
"""Rows of the fields of one message. Another field is left out and told, as Ollama ignores it too."""

_NOT_OLLAMAS = _refused("no field of Ollama's dialect")
_EVERYWHERE = {
    "model": _mapped("model"),
    "keep_alive": _harmless("how long a model stays loaded is Hive's to decide"),
    **dict.fromkeys(
        (
            *("request_id", "priority", "cache_salt", "session_id", "lora", "chat_template", "chat_template_kwargs"),
            *("mm_processor_kwargs", "media_io_kwargs", "prompt_embeds", "kv_transfer_params", "ec_transfer_params"),
            "vllm_xargs",
        ),
        _NOT_OLLAMAS,
    ),
    "template": _refused("the model's own template is the backend's; a request cannot replace it"),
    "_debug_render_only": _refused("the backend has no such look at the rendered prompt"),
}
_TEXT = {
    **_EVERYWHERE,
    "stream": _mapped("stream", "true where it is absent; the usage is asked for with it"),
    "options": _mapped(""),
    **{f"options.{name}": row for name, row in OPTIONS.items()},
    "format": _mapped("response_format"),
    "think": _mapped(
        "chat_template_kwargs.enable_thinking, reasoning_effort",
        "true and false are the first (vLLM, llama-server), a level the second",
    ),
    "truncate": _harmless("a prompt that is too long is refused by these backends, never cut"),
    "shift": _harmless("these backends end an answer where the context is full"),
    "logprobs": _mapped("logprobs"),
    "top_logprobs": _mapped("top_logprobs"),
}
CHAT_ROWS = {
    **_TEXT,
    "messages": _mapped("messages"),
    **{f"messages.{name}": row for name, row in MESSAGE.items()},
    "tools": _mapped("tools", "an empty list is left out: vLLM refuses one"),
}
_PICTURE = _harmless("for models that make pictures; these make text")
GENERATE_ROWS = {
    **_TEXT,
    "prompt": _mapped("messages, prompt", "the second with `raw`, where hive.conf opens that"),
    "system": _mapped("messages"),
    "images": _mapped("messages.content.image_url"),
    "suffix": _refused("llama-server passes over it in /v1/completions, and vLLM has it for one family of models"),
    "raw": _mapped("prompt", "refused unless hive.conf opens it; then that of /v1/completions, which has no template"),
    "context": _refused("its numbers are tokens of the server that gave them; send the earlier turns to /api/chat"),
    "width": _PICTURE,
    "height": _PICTURE,
    "steps": _PICTURE,
}
_NO_SAMPLING = _harmless("nothing is sampled for an embedding")
_VECTORS = {
    **_EVERYWHERE,
    "stream": _harmless("an embedding comes in one piece"),
    "options": _NO_SAMPLING,
    **{f"options.{name}": _LOADING if row is _LOADING else _NO_SAMPLING for name, row in OPTIONS.items()},
}
EMBED_ROWS = {
    **_VECTORS,
    "input": _mapped("input"),
    "truncate": _mapped(
        "truncate_prompt_tokens", "vLLM's, -1 unless it is false; llama-server refuses a text that is too long"
    ),
    "dimensions": _mapped(
        "dimensions", "a longer vector is cut and scaled to length 1 on the way back, as Ollama does"
    ),
}
EMBEDDINGS_ROWS = {**_VECTORS, "prompt": _mapped("input")}

# --- reading values ---------------------------------------------------------------------------------------------------


class JudgedBody:
    """The fields of a body, judged by their rows; `dropped` are those that were left out.

    >>> JudgedBody(b'{"model":"m","keep_alive":0,"raw":null}', GENERATE_ROWS).dropped
    ['keep_alive']
    """

    def __init__(self, body: bytes, rows: dict[str, FieldRow]) -> None:
        try:
            given = _object(body)
        except _BROKEN_JSON as error:
            raise BadRequest(f"the body is no JSON object: {error}") from None
        self.dropped: list[str] = []
        self.fields = self._judged(given, rows, "")
        self.model = self.text("model")
        if not self.model:
            raise BadRequest('"model" is missing')

    def _judged(self, given: dict[str, Raw], rows: dict[str, FieldRow], inside: str) -> dict[str, Raw]:
        fields = {}
        for name, value in given.items():
            if _short(value) == _NULL:
                continue
            path = inside + name
            row = rows.get(path)
            if row is None:
                raise NotSupported(f"{path[:60]!a} cannot be said to this backend", hint="leave it out")
            if row.fate is FieldFate.MAPPED:
                fields[name] = value
            elif row.fate is FieldFate.HARMLESS:
                self.dropped.append(path)
            elif _short(value) not in _NOTHING and not _is_one(path, value):
                raise NotSupported(f'"{path}" cannot be said to this backend: {row.why}', hint="leave it out")
        return fields

    def options(self) -> dict[str, Raw]:
        """The options that are mapped, by their names within `options`."""
        raw = self.fields.get("options")
        if raw is None:
            return {}
        try:
            given = _object(raw)
        except _BROKEN_JSON:
            raise BadRequest('"options" must be an object') from None
        return self._judged(given, _TEXT, "options.")

    def text(self, name: str) -> str:
        """A string; empty where it is absent."""
        raw = self.fields.get(name)
        return "" if raw is None else _text(raw, name)

    def flag(self, name: str, *, default: bool = False) -> bool:
        raw = self.fields.get(name)
        if raw is None:
            return default
        if _short(raw) not in (_TRUE, b"false"):
            raise BadRequest(f'"{name}" must be true or false')
        return _short(raw) == _TRUE


def _short(raw: Raw) -> bytes:
    view = memoryview(raw)
    return bytes(view) if len(view) <= _SHORT else b""


def _is_one(path: str, value: Raw) -> bool:
    return path == "options.typical_p" and _number(value, path) == 1


def _text(raw: Raw, name: str) -> str:
    try:
        return _string(raw)
    except _BROKEN_JSON:
        raise BadRequest(f'"{name}" must be a string') from None


def _number(raw: Raw, name: str) -> float:
    try:
        return _float(raw)
    except _BROKEN_JSON:
        raise BadRequest(f'"{name}" must be a number') from None


def _list_of_texts(raw: Raw, name: str) -> list[str]:
    try:
        texts = _texts(raw)
    except _BROKEN_JSON:
        raise BadRequest(f'"{name}" must be a list of strings') from None
    return [texts] if isinstance(texts, str) else texts


_PICTURES = ((b"\x89PNG\r\n\x1a\n", "png"), (b"\xff\xd8\xff", "jpeg"), (b"GIF87a", "gif"), (b"GIF89a", "gif"))


def picture_url(data: str) -> str:
    """The `data:` URL of a picture in base64, its kind told by its first bytes. Raises BadRequest for another kind.

    >>> picture_url("iVBORw0KGgoAAAANSUhEUg==")
    'data:image/png;base64,iVBORw0KGgoAAAANSUhEUg=='
    """
    try:
        begin = base64.b64decode(data[:16].encode(), validate=True)
    except (binascii.Error, ValueError):
        raise BadRequest("a picture is not base64", hint='"images" takes base64 without `data:` before it') from None
    kinds = [kind for magic, kind in _PICTURES if begin.startswith(magic)]
    if begin.startswith(b"RIFF") and begin[8:12] == b"WEBP":
        kinds = ["webp"]
    if not kinds:
        raise BadRequest("a picture is none of PNG, JPEG, GIF and WebP", hint="send it as one of them, in base64")
    return f"data:image/{kinds[0]};base64,{data}"


def _content(text: str, pictures: list[str]) -> object:
    if not pictures:
        return text
    parts: list[object] = [{"type": "text", "text": text}] if text else []
    return parts + [{"type": "image_url", "image_url": {"url": picture_url(data)}} for data in pictures]


# --- messages ---------------------------------------------------------------------------------------------------------

_PLAIN_NAME = re.compile(r"[A-Za-z0-9_-]{1,40}")


class Conversation:
    """Messages one after the other; tool calls get ids, which their results find again.

    >>> talk = Conversation()
    >>> call = {"role": Raw(b'"assistant"'), "tool_calls": Raw(b'[{"function":{"name":"f","arguments":{"n":1e2}}}]')}
    >>> talk.message(call)["tool_calls"][0]["function"]
    {'name': 'f', 'arguments': '{"n":1e2}'}
    >>> talk.message({"role": Raw(b'"tool"'), "content": Raw(b'"7"'), "tool_name": Raw(b'"f"')})
    {'role': 'tool', 'content': '7', 'tool_call_id': 'call_0', 'name': 'f'}
    """

    def __init__(self) -> None:
        self.unknown: dict[str, None] = {}
        """Names left out, each once, as a header may carry them."""
        self._ids: set[str] = set()
        self._open: list[tuple[str, str]] = []
        """Id and function of the calls that have no result yet."""
        self._made = 0

    def message(self, given: dict[str, Raw]) -> dict[str, Any]:
        fields = self._known(given, "")
        role = _text(fields["role"], "role").lower() if "role" in fields else ""
        if not role:
            raise BadRequest('a message has no "role"')
        text = _text(fields["content"], "content") if "content" in fields else ""
        pictures = _list_of_texts(fields["images"], "images") if "images" in fields else []
        said: dict[str, Any] = {"role": role, "content": _content(text, pictures)}
        if "thinking" in fields and (thinking := _text(fields["thinking"], "thinking")):
            said["reasoning_content"] = thinking
        if "tool_calls" in fields and (calls := self._calls(fields["tool_calls"])):
            said["tool_calls"] = calls
        if role == "tool":
            name = _text(fields["tool_name"], "tool_name") if "tool_name" in fields else ""
            told = _text(fields["tool_call_id"], "tool_call_id") if "tool_call_id" in fields else ""
            said["tool_call_id"] = self._answered(told, name)
            if name:
                said["name"] = name
        return said

    def _known(self, given: dict[str, Raw], inside: str) -> dict[str, Raw]:
        fields: dict[str, Raw] = {}
        for written, value in given.items():
            name = written if inside + written in MESSAGE else written.casefold()
            if name in fields:
                raise BadRequest(f'a message has "{inside}{name}" twice')
            if inside + name not in MESSAGE:
                shown = name if _PLAIN_NAME.fullmatch(name) else "?"
                self.unknown[f"messages.{inside}{shown}"] = None
            elif _short(value) != _NULL:
                fields[name] = value
        return fields

    def _calls(self, raw: Raw) -> list[dict[str, Any]]:
        try:
            given = [self._known(call, "tool_calls.") for call in _objects(raw)]
            functions = [self._known(_object(call["function"]), "tool_calls.function.") for call in given]
        except (KeyError, *_BROKEN_JSON):
            raise BadRequest('"tool_calls" must be a list of objects, each with a "function"') from None
        return [self._call(*pair) for pair in zip(given, functions, strict=True)]

    def _call(self, call: dict[str, Raw], function: dict[str, Raw]) -> dict[str, Any]:
        name = _text(function["name"], "function.name") if "name" in function else ""
        arguments = bytes(function["arguments"]) if "arguments" in function else b"{}"
        if not name or not arguments.startswith(b"{"):
            raise BadRequest('a tool call needs a "name" and, in "arguments", an object')
        told = (_text(call["id"], "id") if "id" in call else "") or self._new_id()
        self._ids.add(told)
        self._open.append((told, name))
        return {"id": told, "type": "function", "function": {"name": name, "arguments": arguments.decode()}}

    def _answered(self, told: str, name: str) -> str:
        """The id of the call a result belongs to: the one told, else the first open one by name, else the first."""
        of_name = [id for id, function in self._open if function == name]
        found = told or next(iter(of_name or [id for id, _ in self._open]), "") or self._new_id()
        self._open = [(id, function) for id, function in self._open if id != found]
        return found

    def _new_id(self) -> str:
        while (made := f"call_{self._made}") in self._ids:
            self._made += 1
        self._ids.add(made)
        return made


def _messages(request: JudgedBody) -> list[dict[str, Any]]:
    try:
        given = _objects(request.fields["messages"])
    except KeyError:
        raise BadRequest('"messages" is missing') from None
    except _BROKEN_JSON:
        raise BadRequest('"messages" must be a list of objects') from None
    talk = Conversation()
    said = [talk.message(message) for message in given]
    request.dropped.extend(talk.unknown)
    return said


# --- what the text endpoints have in common ---------------------------------------------------------------------------


def _put_options(request: JudgedBody, sent: dict[str, Any]) -> None:
    options = request.options()
    if (last_n := options.pop("repeat_last_n", None)) is not None:
        tokens = _number(last_n, "options.repeat_last_n")
        if tokens == 0 and options.pop("repeat_penalty", None) is not None:  # a penalty that looks at nothing
            request.dropped.append("options.repeat_penalty")
        sent["repeat_last_n"] = last_n if tokens >= 0 else MAX_LAST_N
    if (limit := options.pop("num_predict", None)) is not None and _number(limit, "options.num_predict") >= 1:
        sent["max_tokens"] = limit
    for name, value in options.items():
        for to in OPTIONS[name].to.split(", "):
            sent[to] = value


def _put_format(request: JudgedBody, sent: dict[str, Any]) -> None:
    raw = request.fields.get("format")
    if raw is None or _short(raw) == b'""':
        return
    if _short(raw) == b'"json"':
        sent["response_format"] = {"type": "json_object"}
    elif bytes(memoryview(raw)[:1]) == b"{":
        sent["response_format"] = {"type": "json_schema", "json_schema": {"name": "schema", "schema": raw}}
    else:
        raise BadRequest('"format" must be "json" or a JSON schema')


_THINK: dict[bytes, bool | str] = {_TRUE: True, b"false": False}
_THINK |= {_encode(level): level for level in ("low", "medium", "high", "max")}  # all of them vLLM's too


def _think(request: JudgedBody) -> bool | str | None:
    raw = request.fields.get("think")
    if raw is None:
        return None
    if _short(raw) not in _THINK:
        raise BadRequest('"think" must be true, false, "low", "medium", "high" or "max"')
    return _THINK[_short(raw)]


def _put_think(request: JudgedBody, sent: dict[str, Any]) -> None:
    think = _think(request)
    if isinstance(think, str):
        sent["reasoning_effort"] = think
    elif think is not None:
        sent["chat_template_kwargs"] = {"enable_thinking": think}


def _alternatives(request: JudgedBody) -> int | None:
    """The number of other tokens told with each token; None if no probabilities are asked for at all."""
    if not request.flag("logprobs"):
        if "top_logprobs" in request.fields:
            request.dropped.append("top_logprobs")  # Ollama too takes it only with the other
        return None
    raw = request.fields.get("top_logprobs")
    return 0 if raw is None else max(0, int(min(_number(raw, "top_logprobs"), 20)))


def _put_stream(request: JudgedBody, sent: dict[str, Any]) -> None:
    sent["stream"] = request.flag("stream", default=True)
    if sent["stream"]:
        sent["stream_options"] = {"include_usage": True}


# --- the endpoints ----------------------------------------------------------------------------------------------------

Asking = tuple[str, dict[str, Any], OllamaKept]
"""The path the backend is asked at, the body, and the facts that the way back needs."""
_COMPLETIONS, _CHAT, _EMBEDDINGS = "/v1/completions", "/v1/chat/completions", "/v1/embeddings"


def _ask_chat(request: JudgedBody, began: float, messages: list[dict[str, Any]]) -> Asking:
    sent: dict[str, Any] = {"model": request.model, "messages": messages}
    _put_stream(request, sent)
    if "tools" in request.fields and _short(request.fields["tools"]) != b"[]":
        sent["tools"] = request.fields["tools"]
    _put_format(request, sent)
    _put_think(request, sent)
    alternatives = _alternatives(request)
    if alternatives is not None:  # llama-server gives none at all for 0, and 20 where it is not said
        sent |= {"logprobs": True, "top_logprobs": max(1, alternatives)}
    _put_options(request, sent)
    return _CHAT, sent, OllamaKept(request.model, began, alternatives)


def _chat(request: JudgedBody, began: float) -> Asking:
    return _ask_chat(request, began, _messages(request))


def _generate(request: JudgedBody, began: float) -> Asking:
    prompt, system = request.text("prompt"), request.text("system")
    if request.flag("raw"):
        return _complete(request, began, prompt)
    pictures = _list_of_texts(request.fields["images"], "images") if "images" in request.fields else []
    messages = [{"role": "system", "content": system}] if system else []
    return _ask_chat(request, began, [*messages, {"role": "user", "content": _content(prompt, pictures)}])


def _complete(request: JudgedBody, began: float, prompt: str) -> Asking:
    """A prompt that goes into no template, so that what a template has to carry cannot be said."""
    asked = [name for name in ("system", "images", "format") if _is_asked(request, name)]
    asked += ["think"] if _think(request) else []
    if asked:
        raise NotSupported(f'"{asked[0]}" needs a template, and with "raw" there is none', hint="leave one of them out")
    sent: dict[str, Any] = {"model": request.model, "prompt": prompt, "max_tokens": None}  # absent, it would be 16
    _put_stream(request, sent)
    alternatives = _alternatives(request)
    if alternatives is not None:
        sent["logprobs"] = max(1, alternatives)
    _put_options(request, sent)
    return _COMPLETIONS, sent, OllamaKept(request.model, began, alternatives)


def _is_asked(request: JudgedBody, name: str) -> bool:
    return name in request.fields and _short(request.fields[name]) not in _NOTHING


def _embed(request: JudgedBody, began: float) -> Asking:
    if "input" not in request.fields:
        raise BadRequest('"input" is missing')
    texts = _list_of_texts(request.fields["input"], "input")
    sent: dict[str, Any] = {"model": request.model, "input": texts}
    if request.flag("truncate", default=True):
        sent["truncate_prompt_tokens"] = -1
    dimensions = 0
    if "dimensions" in request.fields:
        dimensions = int(min(_number(request.fields["dimensions"], "dimensions"), 2**31))
    if dimensions > 0:
        sent["dimensions"] = dimensions
    return _EMBEDDINGS, sent, OllamaKept(request.model, began, dimensions=max(0, dimensions))


def _embed_one(request: JudgedBody, began: float) -> Asking:
    sent = {"model": request.model, "input": request.text("prompt")}
    return _EMBEDDINGS, sent, OllamaKept(request.model, began)


Back = Callable[[OllamaKept, Clock], WayBack]


class OllamaWay:
    """One endpoint of Ollama's. `now` is Unix seconds: durations are told by it, and when a chunk was made.

    >>> way = OllamaWay(EMBEDDINGS_ROWS, _embed_one, VectorsBack.one, now=lambda: 0.0)
    >>> sent = way.there(b'{"model":"m","prompt":"hi"}')
    >>> sent.target, sent.body, sent.kept
    ('/v1/embeddings', b'{"model":"m","input":"hi"}', b'{"model":"m","began":0.0}')
    """

    def __init__(
        self,
        rows: dict[str, FieldRow],
        ask: Callable[[JudgedBody, float], Asking],
        back: Back,
        now: Clock = time.time,
    ) -> None:
        self._rows = rows
        self._ask = ask
        self._back = back
        self._now = now

    @property
    def rows(self) -> dict[str, FieldRow]:
        return self._rows

    def there(self, body: bytes) -> Sent:
        request = JudgedBody(body, self._rows)
        target, sent, kept = self._ask(request, self._now())
        return Sent(target, _encode(sent), tuple(request.dropped), _encode(kept))

    def back(self, kept: bytes, *, stream: bool, request_id: str = "") -> WayBack:  # noqa: ARG002 – no place for them
        return self._back(msgspec.json.decode(kept, type=OllamaKept), self._now)


def ways(now: Clock = time.time) -> dict[str, TranslatedEndpoint]:
    """Every endpoint, with this clock."""
    return {
        "/api/chat": OllamaWay(CHAT_ROWS, _chat, TextBack.of_chat, now),
        "/api/generate": OllamaWay(GENERATE_ROWS, _generate, TextBack.of_generate, now),
        "/api/embed": OllamaWay(EMBED_ROWS, _embed, VectorsBack.all, now),
        "/api/embeddings": OllamaWay(EMBEDDINGS_ROWS, _embed_one, VectorsBack.one, now),
    }


WAYS = ways()
