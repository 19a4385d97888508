"""What an answer says it cost, and whether it was whole. Reads a copy; never changes or delays a byte.

Where the count comes from (endpoint × backend); `unknown` is a value, never 0:

| endpoint | ollama, demo | llama | vllm |
|---|---|---|---|
| /api/chat, /api/generate | last object: prompt_eval_count, eval_count | – | – |
| /api/embed | prompt_eval_count | – | – |
| /v1/chat/completions, /v1/completions, one answer | usage | usage | usage |
| the same, stream | usage, asked for by Hive where the client did not | timings | usage, as for ollama |
| /v1/embeddings | usage | usage | usage |
| /v1/messages, one answer | usage | usage | usage |
| the same, stream | message_start and message_delta | the same | the same |
| /api/embeddings, /api/show, /v1/messages/count_tokens, lists | unknown | unknown | unknown |

`tokens_in` is all that the model was given, cached or not: `prompt_tokens`, `prompt_eval_count`, and in Anthropic's
dialect, which counts them apart, `input_tokens + cache_read_input_tokens + cache_creation_input_tokens`.
`cached_tokens` is the part that a cache saved.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from hive.dialects.ndjson import NdjsonReader
from hive.dialects.sse import SseReader
from hive.domain import BackendKind, Usage
from hive.proxy.endpoints import Endpoint, Meter

UNKNOWN = Usage()
ONLY_IF_ASKED = "usage, if it is asked for"
MAX_WHOLE = 1024 * 1024
"""Bytes of a one-piece answer that are kept to be read; of a longer one its two ends are."""
END_KEPT = 8 * 1024


class _Cached(msgspec.Struct):
    cached_tokens: int | None = None


class _Counts(msgspec.Struct):
    """OpenAI's three, then Anthropic's four."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Cached | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None


class _Timings(msgspec.Struct):
    """llama-server's; `prompt_n` leaves out what came from its cache."""

    prompt_n: int
    predicted_n: int
    cache_n: int = 0


class _Cost(msgspec.Struct):
    """Wherever the dialects put it; everything else in the object is passed over."""

    usage: _Counts | None = None
    timings: _Timings | None = None
    prompt_eval_count: int | None = None
    eval_count: int | None = None
    prompt_eval_cached_count: int | None = None
    done: bool = False


_cost = msgspec.json.Decoder(_Cost).decode


def source_of(endpoint: Endpoint, backend: BackendKind, *, stream: bool) -> str:
    """Where the count of a request comes from, as the table above has it.

    >>> from hive.proxy.endpoints import find
    >>> source_of(find(b"POST", b"/v1/chat/completions"), BackendKind.LLAMA, stream=True)
    'timings'
    """
    if endpoint.meter is Meter.NONE:
        return "unknown"
    if endpoint.meter is Meter.OLLAMA:
        return "last object"
    if endpoint.meter is Meter.ANTHROPIC:
        return "message_start and message_delta" if stream else "usage"
    if not stream or endpoint.target == b"/v1/embeddings":
        return "usage"
    return "timings" if backend is BackendKind.LLAMA else ONLY_IF_ASKED


def asks_usage(endpoint: Endpoint, backend: BackendKind) -> bool:
    """Whether a stream of this endpoint tells its cost only if it is asked to (llama-server always does)."""
    return source_of(endpoint, backend, stream=True) == ONLY_IF_ASKED


def read_cost(payload: bytes) -> Usage:
    """The counts in one JSON object of any dialect.

    >>> read_cost(b'{"timings":{"cache_n":31,"prompt_n":1,"predicted_n":4}}')
    Usage(tokens_in=32, tokens_out=4, cached_tokens=31)
    >>> read_cost(b'{"choices":[]}')
    Usage(tokens_in=None, tokens_out=None, cached_tokens=None)
    """
    try:
        cost = _cost(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return UNKNOWN
    if cost.usage is not None and cost.usage.prompt_tokens is not None:
        details = cost.usage.prompt_tokens_details
        return Usage(
            tokens_in=_count(cost.usage.prompt_tokens),
            tokens_out=_count(cost.usage.completion_tokens),
            cached_tokens=_count(details.cached_tokens) if details is not None else None,
        )
    if cost.usage is not None and cost.usage.input_tokens is not None:
        return _anthropic_usage(cost.usage)
    if cost.timings is not None:
        timings = cost.timings
        return Usage(
            tokens_in=_count(timings.prompt_n + timings.cache_n),
            tokens_out=_count(timings.predicted_n),
            cached_tokens=_count(timings.cache_n),
        )
    return Usage(
        tokens_in=_count(cost.prompt_eval_count),
        tokens_out=_count(cost.eval_count),
        cached_tokens=_count(cost.prompt_eval_cached_count),
    )


def _anthropic_usage(counts: _Counts) -> Usage:
    """Anthropic's `input_tokens` leave out what came from a cache or went into one."""
    parts = [counts.input_tokens, counts.cache_read_input_tokens, counts.cache_creation_input_tokens]
    given = [part for part in map(_count, parts) if part is not None]
    return Usage(
        tokens_in=sum(given) if given else None,
        tokens_out=_count(counts.output_tokens),
        cached_tokens=_count(counts.cache_read_input_tokens),
    )


class _Choice(msgspec.Struct):
    finish_reason: str | None = None


class _Fate(msgspec.Struct):
    error: msgspec.Raw = msgspec.Raw(b"null")
    choices: list[_Choice] = []


_fate = msgspec.json.Decoder(_Fate).decode


def _is_done(payload: bytes) -> bool:
    """Whether this is Ollama's last object; what a tool is called with may say `done` too.

    >>> _is_done(b'{"done":true}'), _is_done(b'{"message":{"tool_calls":[{"done":true}]},"done":false}')
    (True, False)
    """
    try:
        return _cost(payload).done
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False


def _gave_up(payload: bytes) -> bool:
    """Whether this event says that the backend did not finish.

    >>> _gave_up(b'{"error":{"message":"EngineCore encountered an issue"}}')
    True
    >>> _gave_up(b'{"choices":[{"finish_reason":"abort"}]}'), _gave_up(b'{"choices":[{"delta":{"content":"error"}}]}')
    (True, False)
    """
    try:
        fate = _fate(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False
    return bytes(fate.error) != b"null" or any(choice.finish_reason == "abort" for choice in fate.choices)


def _count(number: int | None) -> int | None:
    """Backends use -1 for a count they do not have (llama-swap #760)."""
    return None if number is None or number < 0 else number


class Reading(Protocol):
    """Reads one answer as it passes.

    `events`: pieces of text, as far as they can be told from the rest: what a cut stream is estimated by.
    `whole`: the end the dialect demands was seen, and nothing that says the backend gave up (asked when bytes have
    ended). A killed vLLM ends its stream cleanly: an error event, then `[DONE]`; a stopped one says `abort`.
    """

    usage: Usage
    events: int
    whole: bool

    @property
    def broken(self) -> bool:
        """Whether the backend has said, in the middle of a stream, that it gave up."""
        ...

    @property
    def begun(self) -> bool:
        """Whether anything has come but comments and other signs of life."""
        ...

    @property
    def at_boundary(self) -> bool:
        """Whether the bytes so far end where an event of a stream may follow."""
        ...

    def feed(self, data: bytes) -> None: ...

    def end(self) -> None:
        """The bytes are complete: whatever is read only at the end is read now."""
        ...


class SseReading:
    """A stream of the OpenAI dialect; its end is `data: [DONE]`."""

    __slots__ = ("_costing", "_reader", "broken", "events", "usage", "whole")

    def __init__(self) -> None:
        self._reader = SseReader()
        self._costing = b""
        self.broken = False
        self.usage = UNKNOWN
        self.events = 0
        self.whole = False

    @property
    def begun(self) -> bool:
        return self.events > 0 or self.whole or self._reader.begun

    @property
    def at_boundary(self) -> bool:
        return self._reader.at_boundary

    def feed(self, data: bytes) -> None:
        self._take(self._reader.feed(data))

    def _take(self, payloads: list[bytes]) -> None:
        for payload in payloads:
            if payload == b"[DONE]":
                self.whole = not self.broken
                continue
            self.events += 1
            if b"error" in payload or b"abort" in payload:
                self.broken = self.broken or _gave_up(payload)
            if b'"timings":' in payload or (b'"usage":' in payload and b'"usage":null' not in payload):
                self._costing = payload

    def end(self) -> None:
        self._take(self._reader.end())
        if self._costing:
            self.usage = read_cost(self._costing)


class _Message(msgspec.Struct):
    usage: _Counts | None = None


class _Delta(msgspec.Struct):
    stop_reason: str | msgspec.UnsetType | None = msgspec.UNSET


class _MessagesEvent(msgspec.Struct):
    type: str = ""
    message: _Message | None = None
    delta: _Delta | None = None
    usage: _Counts | None = None


_messages_event = msgspec.json.Decoder(_MessagesEvent).decode


class MessagesReading:
    """A stream of the Anthropic dialect; its end is the event `message_stop`.

    What went in is told by `message_start`, and again by `message_delta` where it has it: vLLM 0.32 tells the cached
    part only there, Ollama only estimates before. What came out is told by `message_delta` alone (cumulative). A
    `stop_reason` of null in it is how vLLM says `abort` here.
    """

    __slots__ = ("_given", "_out", "_reader", "broken", "events", "usage", "whole")

    def __init__(self) -> None:
        self._reader = SseReader()
        self.broken = False
        self._given = UNKNOWN
        self._out: int | None = None
        self.usage = UNKNOWN
        self.events = 0
        self.whole = False

    @property
    def begun(self) -> bool:
        return self.events > 0 or self.whole or self.broken or self._given is not UNKNOWN

    @property
    def at_boundary(self) -> bool:
        return self._reader.at_boundary

    def feed(self, data: bytes) -> None:
        self._take(self._reader.feed(data))

    def _take(self, payloads: list[bytes]) -> None:
        for payload in payloads:
            if b'"content_block_delta"' in payload:  # inside a JSON string its quotes would be escaped
                self.events += 1
            else:
                self._note(payload)

    def _note(self, payload: bytes) -> None:
        """Any other event; there are five in an answer."""
        if b'"error"' in payload and _gave_up(payload):
            self.broken = True
            return
        try:
            event = _messages_event(payload)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return
        if event.type == "message_stop":
            self.whole = not self.broken
        elif event.type == "message_start":
            self._given = _anthropic_usage(event.message.usage) if event.message and event.message.usage else Usage()
        elif event.type == "message_delta":
            self.broken = self.broken or (event.delta is not None and event.delta.stop_reason is None)
            if event.usage is not None:
                told = _anthropic_usage(event.usage)
                self._given = told if told.tokens_in else self._given
                self._out = told.tokens_out if told.tokens_out is not None else self._out

    def end(self) -> None:
        self._take(self._reader.end())
        given = self._given
        self.usage = Usage(tokens_in=given.tokens_in, tokens_out=self._out, cached_tokens=given.cached_tokens)


class NdjsonReading:
    """A stream of the Ollama dialect; its end is the object with `"done":true`."""

    __slots__ = ("_last", "_reader", "events", "usage", "whole")

    broken = False
    """An error is a line like any other: it is known for the last one at the end."""

    def __init__(self) -> None:
        self._reader = NdjsonReader()
        self._last = b""
        self.usage = UNKNOWN
        self.events = 0
        self.whole = False

    @property
    def begun(self) -> bool:
        return self.events > 0 or not self._reader.at_boundary

    @property
    def at_boundary(self) -> bool:
        return self._reader.at_boundary

    def feed(self, data: bytes) -> None:
        lines = self._reader.feed(data)
        if lines:
            self.events += len(lines)
            self._last = lines[-1]

    def end(self) -> None:
        if self._last:
            self.usage = read_cost(self._last)
            self.whole = _is_done(self._last) and not _gave_up(self._last)


class WholeReading:
    """An answer in one piece, framed by its length; `usage` is read from it at the end.

    Nothing can be put into it, so it has no boundary.
    """

    at_boundary = False

    __slots__ = ("_kept", "_kept_bytes", "_tail", "events", "usage", "whole")

    broken = False
    """What is in one piece either comes whole or not at all."""

    def __init__(self) -> None:
        self._kept: list[bytes] = []
        self._kept_bytes = 0
        self._tail = b""
        self.usage = UNKNOWN
        self.events = 0
        self.whole = True

    @property
    def begun(self) -> bool:
        return self._kept_bytes > 0 or bool(self._tail)

    def feed(self, data: bytes) -> None:
        if not self._tail and self._kept_bytes + len(data) <= MAX_WHOLE:
            self._kept.append(data)
            self._kept_bytes += len(data)
        else:
            self._tail = (self._tail + data)[-END_KEPT:]

    def end(self) -> None:
        if self._tail:
            self.usage = _cost_at_the_end(self._tail)
        elif self._kept:
            answer = self._kept[0] if len(self._kept) == 1 else b"".join(self._kept)
            self.usage = read_cost(answer)
            self.whole = b'"abort"' not in answer or not _was_aborted(answer)


def _was_aborted(answer: bytes) -> bool:
    """Whether the backend was stopped over it (vLLM: `finish_reason: abort`, under 200)."""
    try:
        return any(choice.finish_reason == "abort" for choice in _fate(answer).choices)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False


def _cost_at_the_end(tail: bytes) -> Usage:
    """The counts of an answer too long to keep: servers write them after the vectors."""
    for name in (b'"usage"', b'"prompt_eval_count"'):
        at = tail.rfind(name)
        if at >= 0:
            return read_cost(b"{" + tail[at:].rstrip())
    return UNKNOWN


def reading_for(endpoint: Endpoint, *, stream: bool, content_type: bytes) -> Reading:
    """Who reads this answer: by what was asked and by what the backend says it sends."""
    if stream and content_type.startswith(b"text/event-stream"):
        return MessagesReading() if endpoint.meter is Meter.ANTHROPIC else SseReading()
    if stream and endpoint.meter is Meter.OLLAMA and content_type.startswith(b"application/x-ndjson"):
        return NdjsonReading()
    return WholeReading()
