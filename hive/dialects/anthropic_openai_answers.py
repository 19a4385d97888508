"""Chat completions as Anthropic's Messages: the ways back of anthropic_openai.py. Sans I/O.

A stream becomes Anthropic's events in Anthropic's order: message_start; for each block of thinking, text or tool use
content_block_start, its deltas and content_block_stop; message_delta with the reason and the usage; message_stop.
OpenAI tells the usage last, so `message_start` has zeros, and `message_delta` the true counts; where the backend told
none, its `output_tokens` is 0, as clients fail without it. Only `[DONE]` makes a message_stop: a stream that was cut,
that was aborted, or that told an error has none.

The signature of thinking is empty: nobody here checks one. Which stop sequence was met only vLLM tells (`stop_reason`
of a choice); of other servers it is `end_turn`.
"""

from __future__ import annotations

import msgspec

from hive.dialects.sse import SseReader
from hive.errors import BackendDown, StreamIncomplete

Raw = msgspec.Raw
_TYPES = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
"""Of the rest, 5xx is `api_error`, 4xx `invalid_request_error`."""
_REASONS = {
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "function_call": "tool_use",
    "content_filter": "refusal",
}
"""`stop`, and what no server is known to say, is the end of a turn."""
_GIVEN_UP = frozenset({"abort", "error"})
"""Reasons of a backend that was stopped (vLLM) or that failed (OpenRouter)."""
_NULL = b"null"
_NONE = Raw(_NULL)


class Kept(msgspec.Struct, frozen=True):
    """Of the request: the model as it was named there, its stop sequences, whether thoughts are to be left out."""

    model: str = ""
    stop: list[str] = []
    hidden: bool = False


# --- what the backend says --------------------------------------------------------------------------------------------


class _Function(msgspec.Struct, gc=False):
    name: str | None = None
    arguments: str | None = None


class _Call(msgspec.Struct, gc=False):
    index: int | None = None
    id: str | None = None
    function: _Function | None = None


class _Said(msgspec.Struct, gc=False):
    """A delta, or a message. vLLM says `reasoning`, others `reasoning_content`."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[_Call] | None = None


class _Choice(msgspec.Struct, gc=False):
    delta: _Said | None = None
    message: _Said | None = None
    finish_reason: str | None = None
    stop_reason: Raw = Raw(_NULL)


class _Details(msgspec.Struct, gc=False):
    cached_tokens: int | None = None
    created_cache_tokens: int | None = None


class _Thought(msgspec.Struct, gc=False):
    reasoning_tokens: int | None = None


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    completion_tokens_details: _Thought | None = None


class _Chunk(msgspec.Struct, gc=False):
    """One event of a stream, or the one answer."""

    id: str = ""
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Raw = _NONE


_chunk = msgspec.json.Decoder(_Chunk).decode
_text = msgspec.json.Decoder(str).decode
_object = msgspec.json.Decoder(dict[str, Raw]).decode
_encode = msgspec.json.Encoder().encode
_BAD = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def _count(number: int | None) -> int:
    """Some backends say -1 for a count they do not have (llama-swap #760)."""
    return max(0, number or 0)


def _usage_of(usage: _Usage | None) -> dict[str, object]:
    """Anthropic's `input_tokens` leave out what came from a cache or went into one.

    >>> _usage_of(_Usage(prompt_tokens=30, completion_tokens=5, prompt_tokens_details=_Details(cached_tokens=29)))
    {'input_tokens': 1, 'cache_read_input_tokens': 29, 'output_tokens': 5}
    """
    if usage is None:
        return {"output_tokens": 0}
    parts: dict[str, object] = {}
    rest = _count(usage.prompt_tokens)
    details = usage.prompt_tokens_details or _Details()
    if details.created_cache_tokens is not None:
        parts["cache_creation_input_tokens"] = _count(details.created_cache_tokens)
        rest -= _count(details.created_cache_tokens)
    if details.cached_tokens is not None:
        parts["cache_read_input_tokens"] = _count(details.cached_tokens)
        rest -= _count(details.cached_tokens)
    told: dict[str, object] = {"input_tokens": max(0, rest)} if usage.prompt_tokens is not None else {}
    told |= {**parts, "output_tokens": _count(usage.completion_tokens)}
    if usage.completion_tokens_details is not None and usage.completion_tokens_details.reasoning_tokens is not None:
        told["output_tokens_details"] = {"thinking_tokens": _count(usage.completion_tokens_details.reasoning_tokens)}
    return told


def _message_id(given: str) -> str:
    """Anthropic's begin with `msg_`.

    >>> _message_id("chatcmpl-8ddb")
    'msg_8ddb'
    """
    return "msg_" + given.removeprefix("chatcmpl-")


def _kind_of(status: int) -> str:
    """The `type` of an error.

    >>> _kind_of(400), _kind_of(429), _kind_of(500), _kind_of(529)
    ('invalid_request_error', 'rate_limit_error', 'api_error', 'overloaded_error')
    """
    return _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")


def _words_of(error: Raw | bytes) -> tuple[str, int]:
    """The words of an error, as servers spell it, and the status in it (0 for none).

    >>> _words_of(b'{"message":"busy","code":503}'), _words_of(b'"Unauthorized"'), _words_of(b'<html>')
    (('busy', 503), ('Unauthorized', 0), ('<html>', 0))
    """
    try:
        found = _object(error)
    except _BAD:
        try:
            return _text(error), 0
        except _BAD:
            return bytes(error).decode("utf-8", "replace"), 0
    for name in ("error", "message", "detail"):
        if name in found and bytes(found[name]) != _NULL:
            words, code = _words_of(found[name])
            return words, code or _status(found.get("code"))
    return bytes(error).decode("utf-8", "replace"), _status(found.get("code"))


def _status(raw: Raw | None) -> int:
    code = bytes(raw or b"")
    return int(code) if len(code) == 3 and code.isdigit() else 0


def _error(kind: str, words: str) -> bytes:
    return _encode({"type": "error", "error": {"type": kind, "message": words}})


# --- what the client gets ---------------------------------------------------------------------------------------------


def _event(name: str, fields: dict[str, object]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), _encode({"type": name, **fields}))


_DELTA = (
    b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":'
    b'{"type":"%b_delta","%b":%b}}\n\n'
)
_STOPPED = b'event: content_block_stop\ndata: {"type":"content_block_stop","index":%d}\n\n'
_SIGNATURE = _DELTA.replace(b"%b_delta", b"signature_delta").replace(b'"%b":%b', b'"signature":""')
_END = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
_TEXT: dict[str, object] = {"type": "text", "text": ""}
_THINKING: dict[str, object] = {"type": "thinking", "thinking": "", "signature": ""}


class Answer:
    """One answer on its way back.

    >>> answer = Answer(Kept(model="m"), stream=True)
    >>> answer.feed(b'data: {"id":"chatcmpl-1","choices":[{"delta":{"content":"hi"}}]}\\n\\n').count(b"event: ")
    3
    >>> print(answer.feed(b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\\n\\ndata: [DO').decode(), end="")
    >>> print(answer.feed(b"NE]\\n\\n").decode(), end="")  # doctest: +ELLIPSIS
    event: content_block_stop
    data: {"type":"content_block_stop","index":0}
    <BLANKLINE>
    event: message_delta
    data: {"type":"message_delta","delta":{"stop_reason":"end_turn","stop_sequence":null},"usage":{"output_tokens":0}}
    <BLANKLINE>
    event: message_stop
    data: {"type":"message_stop"}
    <BLANKLINE>
    """

    __slots__ = (
        *("_begun", "_block", "_calls", "_ended", "_kept", "_last_call", "_open", "_over", "_reader", "_reason"),
        *("_refused", "_stop", "_usage", "content_type"),
    )

    def __init__(self, kept: Kept, *, stream: bool) -> None:
        self.content_type = b"text/event-stream; charset=utf-8" if stream else b"application/json"
        self._kept = kept
        self._reader = SseReader()
        self._begun = False
        self._over = False
        """Whether nothing more is said: after message_stop, an error, or a reason that means the backend gave up."""
        self._open = ""
        """What the open block is of: text, thinking or tool_use."""
        self._block = -1
        """The index of the last block that was begun."""
        self._calls: dict[int, tuple[int, str]] = {}
        """The blocks of calls, and the ids the backend gave them, by its index of the call."""
        self._last_call = -1
        self._reason = ""
        self._stop = Raw(_NULL)
        self._refused = False
        self._usage: _Usage | None = None
        self._ended = False
        """Whether message_delta has been written."""

    def __repr__(self) -> str:
        return f"<Answer {self._block + 1} blocks, {'over' if self._over else self._open or 'waiting'}>"

    # a stream ---------------------------------------------------------------------------------------------------------

    def feed(self, data: bytes) -> bytes:
        """Whole events of Anthropic's for the bytes of a stream of OpenAI's, split anywhere."""
        return self._take(self._reader.feed(data))

    def end(self) -> bytes:
        """What an end of bytes completes; no end marker."""
        return self._take(self._reader.end())

    def _take(self, payloads: list[bytes]) -> bytes:
        said: list[bytes] = []
        for payload in payloads:
            if self._over:
                break
            if payload == b"[DONE]":
                self._finish(said)
            else:
                self._read(payload, said)
        if self._reader.lost and not self._over:
            self._fail("an event of the backend is longer than 1 MiB", 0, said)
        return said[0] if len(said) == 1 else b"".join(said)

    def _read(self, payload: bytes, said: list[bytes]) -> None:
        try:
            chunk = _chunk(payload)
        except _BAD:
            self._fail("the backend sent an event that is none of OpenAI's dialect", 0, said)
            return
        if chunk.error is not _NONE and bytes(chunk.error) != _NULL:
            self._fail(*_words_of(chunk.error), said)
            return
        if not self._begun:
            self._begin(chunk.id, said)
        if chunk.usage is not None:
            self._usage = chunk.usage
        if chunk.choices:
            choice = chunk.choices[0]
            if choice.delta is not None:
                self._say(choice.delta, said)
            if choice.finish_reason is not None:
                self._reason, self._stop = choice.finish_reason, choice.stop_reason
                self._over = choice.finish_reason in _GIVEN_UP
        elif self._reason and chunk.usage is not None:
            self._tell_end(said)

    def _begin(self, given_id: str, said: list[bytes]) -> None:
        self._begun = True
        usage: dict[str, object] = {"input_tokens": 0, "output_tokens": 0}
        message = {**self._envelope(given_id, [], usage), "stop_reason": None, "stop_sequence": None}
        said.append(_event("message_start", {"message": message}))

    def _say(self, delta: _Said, said: list[bytes]) -> None:
        thought = delta.reasoning_content or delta.reasoning
        if thought:
            if self._open != "thinking":
                self._begin_block("thinking", _THINKING, said)
            if not self._kept.hidden:
                said.append(_DELTA % (self._block, b"thinking", b"thinking", _encode(thought)))
        text = delta.content or delta.refusal
        if text:
            if self._open != "text":
                self._begin_block("text", _TEXT, said)
            said.append(_DELTA % (self._block, b"text", b"text", _encode(text)))
        self._refused = self._refused or bool(delta.refusal)
        for call in delta.tool_calls or ():
            self._call(call, said)

    def _call(self, call: _Call, said: list[bytes]) -> None:
        """A call begins with its first delta, or where one index comes with a new id (some servers say 0 for all)."""
        function = call.function or _Function()
        index = call.index if call.index is not None else self._last_call + bool(call.id and self._is_new(call.id))
        known = self._calls.get(index)
        if known is None or (call.id and known[1] and call.id != known[1]):
            given = call.id or f"toolu_{self._block + 1}"
            block: dict[str, object] = {"type": "tool_use", "id": given, "name": function.name or "", "input": {}}
            self._begin_block("tool_use", block, said)
            known = self._calls[index] = (self._block, call.id or "")
        self._last_call = index
        if function.arguments:  # of a call whose block has ended they still go there: readers add up by index
            said.append(_DELTA % (known[0], b"input_json", b"partial_json", _encode(function.arguments)))

    def _is_new(self, call_id: str) -> bool:
        return all(known != call_id for _, known in self._calls.values())

    def _begin_block(self, kind: str, block: dict[str, object], said: list[bytes]) -> None:
        self._end_block(said)
        self._block += 1
        self._open = kind
        said.append(_event("content_block_start", {"index": self._block, "content_block": block}))

    def _end_block(self, said: list[bytes]) -> None:
        if self._open == "thinking":
            said.append(_SIGNATURE % self._block)
        if self._open:
            said.append(_STOPPED % self._block)
        self._open = ""

    def _tell_end(self, said: list[bytes]) -> None:
        if self._ended:
            return
        self._ended = True
        self._end_block(said)
        reason, sequence = self._why(self._reason, self._stop, called=bool(self._calls), refused=self._refused)
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        said.append(_event("message_delta", {"delta": delta, "usage": _usage_of(self._usage)}))

    def _finish(self, said: list[bytes]) -> None:
        self._over = True
        if self._begun:
            self._tell_end(said)
            said.append(_END)

    def _fail(self, words: str, status: int, said: list[bytes]) -> None:
        self._over = True
        told = _error(_kind_of(status or 500), words)
        said.append(b"event: error\ndata: %b\n\n" % told)

    # one piece --------------------------------------------------------------------------------------------------------

    def whole(self, body: bytes) -> bytes:
        """The Message. Raises BackendDown for what is no chat completion, StreamIncomplete for an aborted one."""
        try:
            found = _chunk(body)
        except _BAD:
            raise BackendDown("the backend's answer is no chat completion") from None
        if bytes(found.error) != _NULL:
            raise BackendDown(f"the backend failed: {_words_of(found.error)[0]}")
        message = found.choices[0].message if found.choices else None
        if not found.choices or message is None:
            raise BackendDown("the backend's answer has no message")
        choice = found.choices[0]
        finish = choice.finish_reason or ""
        if finish in _GIVEN_UP:
            raise StreamIncomplete
        calls = message.tool_calls or []
        reason, sequence = self._why(finish, choice.stop_reason, called=bool(calls), refused=bool(message.refusal))
        content = self._blocks(message)
        content.extend(_tool_use(call, number, finish) for number, call in enumerate(calls))
        usage = {"input_tokens": 0, **_usage_of(found.usage)}
        answer = self._envelope(found.id, content, usage)
        return _encode({**answer, "stop_reason": reason, "stop_sequence": sequence})

    def error(self, status: int, body: bytes) -> bytes:
        """The backend's own error, its words kept.

        >>> Answer(Kept(), stream=False).error(404, b'{"error":{"message":"no such model","type":"x"}}')
        b'{"type":"error","error":{"type":"not_found_error","message":"no such model"}}'
        """
        words = _words_of(body)[0] if body.strip() else f"the backend answered {status}"
        return _error(_kind_of(status), words)

    def _blocks(self, message: _Said) -> list[object]:
        blocks: list[object] = []
        thought = message.reasoning_content or message.reasoning
        if thought:
            blocks.append({**_THINKING, "thinking": "" if self._kept.hidden else thought})
        text = message.content or message.refusal
        if text:
            blocks.append({**_TEXT, "text": text})
        return blocks

    # both -------------------------------------------------------------------------------------------------------------

    def _envelope(self, given_id: str, content: list[object], usage: dict[str, object]) -> dict[str, object]:
        head = {"id": _message_id(given_id), "type": "message", "role": "assistant", "model": self._kept.model}
        return {**head, "content": content, "usage": usage}

    def _why(self, finish: str, met: Raw, *, called: bool, refused: bool) -> tuple[str, str | None]:
        """Anthropic's reason, and the stop sequence that was met, where the backend told one of the client's own.

        Where a tool is forced by its name, vLLM ends with `stop`.
        """
        if refused:
            return "refusal", None
        if finish in _REASONS:
            return _REASONS[finish], None
        if self._kept.stop and bytes(met)[:1] == b'"':
            try:
                sequence = _text(met)
            except _BAD:
                sequence = ""
            if sequence in self._kept.stop:
                return "stop_sequence", sequence
        return ("tool_use" if called else "end_turn"), None


def _tool_use(call: _Call, number: int, finish: str) -> object:
    """Arguments are kept as they were written. Raises BackendDown where they are no object, but for those cut short.

    A client must not run a tool with other arguments than the model's; that of an answer cut short it does not run.
    """
    function = call.function or _Function()
    arguments = (function.arguments or "").strip() or "{}"
    try:
        _object(arguments)
    except _BAD:
        if finish != "length":
            name = (function.name or "")[:60]
            raise BackendDown(f"the model calls {name!r} with arguments that are no JSON object") from None
        arguments = "{}"
    given = call.id or f"toolu_{number}"
    return {"type": "tool_use", "id": given, "name": function.name or "", "input": Raw(arguments.encode())}
