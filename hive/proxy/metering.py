"""What an answer says it cost, and whether it was whole. Reads a copy; never changes or delays a byte.

Where the count comes from (endpoint × backend); `unknown` is a value, never 0:

| endpoint | ollama, demo | llama | vllm |
|---|---|---|---|
| /api/chat, /api/generate | last object: prompt_eval_count, eval_count | – | – |
| /api/embed | prompt_eval_count | – | – |
| /v1/chat/completions, /v1/completions, one answer | usage | usage | usage |
| the same, stream | usage, asked for by Hive where the client did not | timings | usage, as for ollama |
| /v1/embeddings | usage | usage | usage |
| /api/embeddings, /api/show, lists | unknown | unknown | unknown |
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


class _OpenAiUsage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Cached | None = None


class _Timings(msgspec.Struct):
    """llama-server's; `prompt_n` leaves out what came from its cache."""

    prompt_n: int
    predicted_n: int
    cache_n: int = 0


class _Cost(msgspec.Struct):
    """Wherever the two dialects put it; everything else in the object is passed over."""

    usage: _OpenAiUsage | None = None
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
    if not stream or endpoint.target == b"/v1/embeddings":
        return "usage"
    return "timings" if backend is BackendKind.LLAMA else ONLY_IF_ASKED


def asks_usage(endpoint: Endpoint, backend: BackendKind) -> bool:
    """Whether a stream of this endpoint tells its cost only if it is asked to (llama-server always does)."""
    return source_of(endpoint, backend, stream=True) == ONLY_IF_ASKED


def read_cost(payload: bytes) -> Usage:
    """The counts in one JSON object of either dialect.

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


class _Choice(msgspec.Struct):
    finish_reason: str | None = None


class _Fate(msgspec.Struct):
    error: msgspec.Raw = msgspec.Raw(b"null")
    choices: list[_Choice] = []


_fate = msgspec.json.Decoder(_Fate).decode


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

    `whole`: the end the dialect demands was seen, and nothing that says the backend gave up (asked when bytes have
    ended). A killed vLLM ends its stream cleanly: an error event, then `[DONE]`; a stopped one says `abort`.
    """

    usage: Usage
    events: int
    whole: bool

    def feed(self, data: bytes) -> None: ...

    def end(self) -> None:
        """The bytes are complete: whatever is read only at the end is read now."""
        ...


class SseReading:
    """A stream of the OpenAI dialect; its end is `data: [DONE]`."""

    __slots__ = ("_broken", "_costing", "_reader", "events", "usage", "whole")

    def __init__(self) -> None:
        self._reader = SseReader()
        self._costing = b""
        self._broken = False
        self.usage = UNKNOWN
        self.events = 0
        self.whole = False

    def feed(self, data: bytes) -> None:
        self._take(self._reader.feed(data))

    def _take(self, payloads: list[bytes]) -> None:
        for payload in payloads:
            if payload == b"[DONE]":
                self.whole = not self._broken
                continue
            self.events += 1
            if b"error" in payload or b"abort" in payload:
                self._broken = self._broken or _gave_up(payload)
            if b'"timings":' in payload or (b'"usage":' in payload and b'"usage":null' not in payload):
                self._costing = payload

    def end(self) -> None:
        self._take(self._reader.end())
        if self._costing:
            self.usage = read_cost(self._costing)


class NdjsonReading:
    """A stream of the Ollama dialect; its end is the object with `"done":true`."""

    __slots__ = ("_last", "_reader", "events", "usage", "whole")

    def __init__(self) -> None:
        self._reader = NdjsonReader()
        self._last = b""
        self.usage = UNKNOWN
        self.events = 0
        self.whole = False

    def feed(self, data: bytes) -> None:
        lines = self._reader.feed(data)
        if lines:
            self.events += len(lines)
            self._last = lines[-1]

    def end(self) -> None:
        if self._last:
            self.usage = read_cost(self._last)
            self.whole = b'"done":true' in self._last.replace(b" ", b"") and not _gave_up(self._last)


class WholeReading:
    """An answer in one piece, framed by its length; `usage` is read from it at the end."""

    __slots__ = ("_kept", "_kept_bytes", "_tail", "events", "usage", "whole")

    def __init__(self) -> None:
        self._kept: list[bytes] = []
        self._kept_bytes = 0
        self._tail = b""
        self.usage = UNKNOWN
        self.events = 0
        self.whole = True

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
            self.usage = read_cost(self._kept[0] if len(self._kept) == 1 else b"".join(self._kept))


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
        return SseReading()
    if stream and endpoint.meter is Meter.OLLAMA and content_type.startswith(b"application/x-ndjson"):
        return NdjsonReading()
    return WholeReading()
