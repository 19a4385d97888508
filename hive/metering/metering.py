"""Reads from a copy of an answer its cost, and whether it was whole; never changes or delays a byte.

The source of the count (endpoint × backend); `unknown` is a value, never 0:

| endpoint | ollama, demo | llama | vllm |
|---|---|---|---|
| /api/chat, /api/generate | last object: prompt_eval_count, eval_count | – | – |
| /api/embed | prompt_eval_count | – | – |
| /v1/chat/completions, /v1/completions, one answer | usage | usage | usage |
| the same, stream | usage, asked for by Hive where the client did not | timings | usage, as for ollama |
| /v1/embeddings, /v1/rerank, /v1/score | usage | usage | usage |
| /v1/responses, which is asked as /v1/chat/completions | as there | as there | as there |
| /v1/messages, one answer | usage | usage | usage |
| the same, stream | message_start and message_delta | the same | the same |
| /api/embeddings, /api/show, /v1/messages/count_tokens, /tokenize, lists | unknown | unknown | unknown |

`tokens_in` is all that the model was given, cached or not: `prompt_tokens`, `prompt_eval_count`, and in Anthropic's
dialect, which counts them apart, `input_tokens + cache_read_input_tokens + cache_creation_input_tokens`.
`cached_tokens` is the part that a cache saved.
"""

from __future__ import annotations

from typing import Protocol

import msgspec
from msgspec import Raw

from hive.backends.kinds import spec_of
from hive.dialects.errors import GaveUp, gave_up_saying
from hive.dialects.ndjson import NdjsonReader
from hive.dialects.openai_answers import GIVEN_UP, NONE, NOT_JSON, count
from hive.dialects.sse import SseReader
from hive.domain import RequestUsage
from hive.endpoints.endpoints import Endpoint, Meter
from hive.errors import BackendDown
from hive.metering.metering_rows import (
    EndedChoice,
    MessagesEvent,
    TokenCounts,
    ToldMembers,
    decode_choices,
    decode_counts,
    decode_delta,
    decode_evaluated,
    decode_messages_event,
    decode_timings,
    decode_told,
)

_OPENAI = Meter.OPENAI
"""By a name of its own, see `hive.queue.gate`."""
UNKNOWN = RequestUsage()
ONLY_IF_ASKED = "usage, if it is asked for"
MAX_WHOLE = 1024 * 1024
"""Bytes of a one-piece answer that are kept to be read; of a longer one its two ends are."""
END_KEPT = 8 * 1024
_NULL, _TRUE, _ERROR = Raw(b"null"), Raw(b"true"), Raw(b'"error"')
_GIVEN_UP = frozenset(b'"%b"' % reason.encode() for reason in GIVEN_UP)
_NO_END = _GIVEN_UP | {b"null"}
"""Reasons that a choice of a whole answer does not have."""


def source_of(endpoint: Endpoint, backend: str, *, stream: bool) -> str:
    """The source of a request's count, as in the table above.

    >>> from hive.endpoints.endpoints import find
    >>> source_of(find(b"POST", b"/v1/chat/completions"), "llama", stream=True)
    'timings'
    """
    if endpoint.meter is Meter.NONE:
        return "unknown"
    if endpoint.meter is Meter.RUNNER:
        return "x-hive-cost"
    if endpoint.meter is Meter.OLLAMA:
        return "last object"
    if endpoint.meter is Meter.ANTHROPIC:
        return "message_start and message_delta" if stream else "usage"
    if not stream or endpoint.name in _NEEDS:
        return "usage"
    return "timings" if spec_of(backend).requests.tells_cost else ONLY_IF_ASKED


def asks_usage(endpoint: Endpoint, backend: str) -> bool:
    """Whether a stream of this endpoint tells its cost only if it is asked to (llama-server always does)."""
    return source_of(endpoint, backend, stream=True) == ONLY_IF_ASKED


def read_cost(payload: bytes) -> RequestUsage:
    """The counts in one JSON object of any dialect.

    >>> read_cost(b'{"timings":{"cache_n":31,"prompt_n":1,"predicted_n":4}}')
    RequestUsage(tokens_in=32, tokens_out=4, cached_tokens=31)
    >>> read_cost(b'{"choices":[]}')
    RequestUsage(tokens_in=None, tokens_out=None, cached_tokens=None)
    """
    try:
        return _cost_of(decode_told(payload), payload)
    except NOT_JSON:
        return UNKNOWN


def _cost_of(told: ToldMembers, payload: bytes) -> RequestUsage:
    try:
        if told.usage is not NONE and (usage := _usage(told.usage)) is not None:
            return usage
        if told.timings is not NONE and told.timings != _NULL:
            timings = decode_timings(told.timings)
            return RequestUsage(
                tokens_in=count(timings.prompt_n + timings.cache_n),
                tokens_out=count(timings.predicted_n),
                cached_tokens=count(timings.cache_n),
            )
        if told.prompt_eval_count is NONE and b'"eval_count"' not in payload:
            return UNKNOWN
        counts = decode_evaluated(payload)
    except NOT_JSON:
        return UNKNOWN
    return RequestUsage(
        tokens_in=count(counts.prompt_eval_count),
        tokens_out=count(counts.eval_count),
        cached_tokens=count(counts.prompt_eval_cached_count),
    )


def _usage(raw: Raw) -> RequestUsage | None:
    """OpenAI's or Anthropic's; None where it is neither. Raises one of NOT_JSON."""
    if raw == _NULL:
        return None
    counts = decode_counts(raw)
    if counts.prompt_tokens is not None:
        details = counts.prompt_tokens_details
        return RequestUsage(
            tokens_in=count(counts.prompt_tokens),
            tokens_out=count(counts.completion_tokens),
            cached_tokens=count(details.cached_tokens) if details is not None else None,
        )
    return _anthropic_usage(counts) if counts.input_tokens is not None else None


def _anthropic_usage(counts: TokenCounts) -> RequestUsage:
    """Anthropic's `input_tokens` leave out tokens that came from a cache or went into one."""
    parts = [counts.input_tokens, counts.cache_read_input_tokens, counts.cache_creation_input_tokens]
    given = [part for part in map(count, parts) if part is not None]
    return RequestUsage(
        tokens_in=sum(given) if given else None,
        tokens_out=count(counts.output_tokens),
        cached_tokens=count(counts.cache_read_input_tokens),
    )


def gave_up_in(payload: bytes) -> GaveUp | None:
    """The error in an event that says that the backend did not finish, else None.

    >>> gave_up_in(b'{"error":{"message":"too long","code":400},"choices":null}').status
    400
    >>> gave_up_in(b'{"choices":[{"finish_reason":"abort"}]}'), gave_up_in(b'{"choices":[{"delta":{"content":"a"}}]}')
    (GaveUp(body=b'', status=502), None)
    """
    try:
        told = decode_told(payload)
    except NOT_JSON:
        return None
    if _is_error(told):
        return gave_up_saying(payload)
    return GaveUp() if _reasons(_choices_of(told)) & _GIVEN_UP else None


def _is_error(told: ToldMembers) -> bool:
    return (
        (told.error is not NONE and told.error != _NULL)
        or told.object == _ERROR  # vLLM before 0.10
        or told.type == _ERROR
    )


def _choices_of(told: ToldMembers) -> list[EndedChoice]:
    try:
        return decode_choices(told.choices)
    except NOT_JSON:
        return []


def _reasons(choices: list[EndedChoice]) -> set[bytes]:
    """The reasons why choices ended, as written; null for one that says that it has not."""
    return {bytes(choice.finish_reason) for choice in choices if choice.finish_reason is not NONE}


def _is_done(payload: bytes) -> bool:
    """Whether this is Ollama's last object; the arguments of a tool may have a `done` too.

    >>> _is_done(b'{"done":true}'), _is_done(b'{"message":{"tool_calls":[{"done":true}]},"done":false}')
    (True, False)
    """
    try:
        return decode_told(payload).done == _TRUE
    except NOT_JSON:
        return False


def _is_cut_short(payload: bytes) -> bool:
    """Whether an event is no whole object: half of one, most of all."""
    if payload[-1] == 0x7D:  # a closing brace: the others need a closer look
        return False
    try:
        decode_told(payload)
    except NOT_JSON:
        return True
    return False


class AnswerReading(Protocol):
    """Reads one answer as it passes.

    `events`: pieces of text, as far as they can be told from the rest: what a cut stream is estimated by.
    `whole`: the end the dialect demands was seen, and nothing that says the backend gave up (asked when bytes have
    ended). A killed vLLM ends its stream cleanly: an error event, then `[DONE]`; a stopped one says `abort`.
    `gave_up`: what it said then.
    """

    usage: RequestUsage
    events: int
    whole: bool
    gave_up: GaveUp | None

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
        """Reads what can be read only at the end: the bytes are complete."""
        ...


class SseReading:
    """A stream of the OpenAI dialect; its end is `data: [DONE]`, after one event at least that has `choices`."""

    __slots__ = ("_chose", "_costing", "_has_hole", "_reader", "events", "gave_up", "usage", "whole")

    def __init__(self) -> None:
        self._reader = SseReader()
        self._costing = b""
        self._chose = self._has_hole = False
        self.gave_up: GaveUp | None = None
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
                self.whole = self._chose and not self._has_hole and self.gave_up is None
                continue
            self.events += 1
            if not self._chose:
                self._chose = payload.find(b'"choices"') >= 0
            if payload[-1] != 0x7D:
                self._has_hole = self._has_hole or _is_cut_short(payload)
            look = payload.find  # `in` raises and catches a TypeError first: 0.3 µs each time
            if look(b"error") >= 0 or look(b"abort") >= 0:
                self.gave_up = self.gave_up or gave_up_in(payload)
            if look(b'"timings":') >= 0 or (look(b'"usage":') >= 0 and look(b'"usage":null') < 0):
                self._costing = payload

    def end(self) -> None:
        self._take(self._reader.end())
        if self._costing:
            usage = read_cost(self._costing)
            if (
                usage.tokens_in or usage.tokens_out
            ):  # a chunk of Ollama's /v1/completions has 0 for what it does not tell
                self.usage = usage


class MessagesReading:
    """A stream of the Anthropic dialect; its end is the event `message_stop`, after a `message_delta` with a reason.

    What went in is told by `message_start`, and again by `message_delta` where it has it: vLLM 0.32 tells the cached
    part only there, Ollama only estimates before. What came out is told by `message_delta` alone (cumulative). A
    `stop_reason` of null in it is how vLLM says `abort` here.
    """

    __slots__ = ("_given", "_has_hole", "_has_reason", "_out", "_reader", "events", "gave_up", "usage", "whole")

    def __init__(self) -> None:
        self._reader = SseReader()
        self.gave_up: GaveUp | None = None
        self._given = UNKNOWN
        self._out: int | None = None
        self._has_hole = self._has_reason = False
        self.usage = UNKNOWN
        self.events = 0
        self.whole = False

    @property
    def begun(self) -> bool:
        return self.events > 0 or self.whole or self.gave_up is not None or self._given is not UNKNOWN

    @property
    def at_boundary(self) -> bool:
        return self._reader.at_boundary

    def feed(self, data: bytes) -> None:
        self._take(self._reader.feed(data))

    def _take(self, payloads: list[bytes]) -> None:
        for payload in payloads:
            if payload.find(b'"content_block_delta"') >= 0:  # inside a JSON string its quotes would be escaped
                self.events += 1
                if payload[-1] != 0x7D:
                    self._has_hole = self._has_hole or _is_cut_short(payload)
            else:
                self._note(payload)

    def _note(self, payload: bytes) -> None:
        """Any other event; there are five in an answer."""
        if b'"error"' in payload and (why := gave_up_in(payload)) is not None:
            self.gave_up = self.gave_up or why
            return
        try:
            event = decode_messages_event(payload)
            kind = bytes(event.type)
            if kind == b'"message_stop"':
                self.whole = self._has_reason and not self._has_hole and self.gave_up is None
            elif kind == b'"message_start"':
                self._given = RequestUsage()
                self._given = _usage_in(decode_messages_event(event.message).usage) or self._given
            elif kind == b'"message_delta"':
                self._note_end(event)
        except NOT_JSON:
            self._has_hole = True

    def _note_end(self, event: MessagesEvent) -> None:
        delta = decode_delta(event.delta)
        if delta is not None and delta.stop_reason is not NONE:
            self._has_reason = delta.stop_reason != _NULL
            if not self._has_reason:
                self.gave_up = self.gave_up or GaveUp()
        told = _usage_in(event.usage)
        if told is not None:
            self._given = told if told.tokens_in else self._given
            self._out = told.tokens_out if told.tokens_out is not None else self._out

    def end(self) -> None:
        self._take(self._reader.end())
        given = self._given
        self.usage = RequestUsage(tokens_in=given.tokens_in, tokens_out=self._out, cached_tokens=given.cached_tokens)


def _usage_in(raw: Raw) -> RequestUsage | None:
    """Anthropic's; None where none is told, or none that can be read."""
    try:
        return None if raw == _NULL else _anthropic_usage(decode_counts(raw))
    except NOT_JSON:
        return None


class NdjsonReading:
    """A stream of the Ollama dialect; its end is the object with `"done":true`. A line with an error is no part of an
    answer, even if other lines follow it."""

    __slots__ = ("_has_hole", "_last", "_reader", "events", "gave_up", "usage", "whole")

    def __init__(self) -> None:
        self._reader = NdjsonReader()
        self._last = b""
        self._has_hole = False
        self.gave_up: GaveUp | None = None
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
        self._take(self._reader.feed(data))

    def _take(self, lines: list[bytes]) -> None:
        for line in lines:
            if line.find(b'"error"') >= 0:  # inside a JSON string its quotes would be escaped
                self.gave_up = self.gave_up or gave_up_in(line)
            if line[-1] != 0x7D:
                self._has_hole = self._has_hole or _is_cut_short(line)
            self._last = line
        self.events += len(lines)

    def end(self) -> None:
        rest = self._reader.rest
        if rest:  # the last line needs no line end
            self._take([rest])
            self.events -= 1
        if self._last:
            self.usage = read_cost(self._last)
            self.whole = self.gave_up is None and not self._has_hole and _is_done(self._last)


class WholeReading:
    """An answer in one piece; `usage` is read from it at the end, and whether it is one.

    Nothing can be put into it, so it has no boundary. What is in one piece either comes whole or not at all: so
    `gave_up` is known at the end.
    """

    at_boundary = False

    __slots__ = ("_endpoint", "_kept", "_kept_bytes", "_tail", "events", "gave_up", "usage", "whole")

    def __init__(self, endpoint: Endpoint | None = None) -> None:
        """`endpoint`: the one whose answer it has to be; None for an error, which may be anything."""
        self._endpoint = endpoint
        self._kept: list[bytes] = []
        self._kept_bytes = 0
        self._tail = b""
        self.gave_up: GaveUp | None = None
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
        if self._endpoint is None:
            return
        if self._tail:
            self.usage = _cost_at_the_end(self._tail)
            first = self._kept[0] if self._kept else b"{"
            self.whole = first.lstrip()[:1] == b"{" and self._tail.rstrip()[-1:] == b"}"
        elif self._endpoint.target != b"/":  # a sentence
            self._judge(self._endpoint, b"".join(self._kept))
        if self._endpoint.name in _NEEDS and self.usage.tokens_in is not None:  # vectors are no tokens
            self.usage = msgspec.structs.replace(self.usage, tokens_out=0)

    def _judge(self, endpoint: Endpoint, answer: bytes) -> None:
        self.whole = False
        try:
            answer.decode()  # else no client can read it; fields ignored below are not looked at
            told = decode_told(answer)
        except NOT_JSON:
            return
        self.usage = _cost_of(told, answer)
        if _is_error(told):
            self.gave_up = gave_up_saying(answer)
        else:
            self.whole = _is_answer(endpoint, told)


_NEEDS = {
    "/v1/embeddings": "data",
    "/api/embed": "embeddings",
    "/api/embeddings": "embedding",
    "/v1/rerank": "results",
    "/rerank": "results",
    "/v1/score": "data",
    "/score": "data",
}
"""The list in an answer without words, by its field; such an answer is never a stream."""


def _is_answer(endpoint: Endpoint, told: ToldMembers) -> bool:
    """Whether this object is a whole answer of that endpoint, by the fields its clients need.

    >>> from hive.endpoints.endpoints import find
    >>> chat = find(b"POST", b"/v1/chat/completions")
    >>> ended = [decode_told(b'{"choices":[{"finish_reason":%b}]}' % reason) for reason in (b'"stop"', b"null")]
    >>> [_is_answer(chat, told) for told in ended]
    [True, False]
    >>> _is_answer(find(b"POST", b"/api/chat"), decode_told(b'{"message":{},"done":false}'))
    False
    """
    needed = _NEEDS.get(endpoint.name)
    if needed is not None:
        return bytes(getattr(told, needed)).startswith(b"[")
    if endpoint.meter is _OPENAI:
        choices = _choices_of(told)
        return bool(choices) and _reasons(choices).isdisjoint(_NO_END)
    if endpoint.meter is Meter.ANTHROPIC:
        return bytes(told.stop_reason).startswith(b'"')
    return endpoint.meter is not Meter.OLLAMA or told.done == _TRUE


def _cost_at_the_end(tail: bytes) -> RequestUsage:
    """The counts of an answer too long to keep: servers write them after the vectors."""
    for name in (b'"usage"', b'"prompt_eval_count"'):
        at = tail.rfind(name)
        if at >= 0:
            return read_cost(b"{" + tail[at:].rstrip())
    return UNKNOWN


def reading_for(endpoint: Endpoint, *, status: int, stream: bool, content_type: bytes) -> AnswerReading:
    """Chooses the reading for an answer by the request and by the content type that the backend sends. Raises
    BackendDown for a status that no answer has, and for an answer that is no stream where one was asked for: its
    clients would find it empty.
    """
    if status >= 400:
        return WholeReading()
    if status != 200:
        raise BackendDown(f"the backend answered {status}, which is no answer to this")
    if not stream or endpoint.meter is Meter.NONE or endpoint.name in _NEEDS:
        return WholeReading(endpoint)
    kind = content_type.partition(b";")[0].strip().lower()
    if endpoint.meter is Meter.OLLAMA:
        if kind in (b"application/x-ndjson", b"application/json", b""):  # an answer at once is a line of its own
            return NdjsonReading()
    elif kind in (b"text/event-stream", b""):
        return MessagesReading() if endpoint.meter is Meter.ANTHROPIC else SseReading()
    raise BackendDown(f"the backend answered with {kind.decode('latin-1')[:60]}, which is no stream")
