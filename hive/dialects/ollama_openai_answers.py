"""Answers of a backend that speaks OpenAI's dialect, as a client of Ollama's native API has them. Sans-I/O.

A stream's chunks become lines of NDJSON as they come. Its last object, the one with `done`, is written when `[DONE]`
comes: the reason of the end and the usage come in chunks of their own before that. If the backend says that it gave up,
or if its bytes cannot be read, there is no such object, so that no client takes the answer for whole.

Durations, in nanoseconds as Ollama has them, are measured where the backend tells them (llama-server's `timings`) and
estimated where it does not: `prompt_eval_duration` is the time from the answer's head to its first piece of text,
`eval_duration` from there to the end; of an answer in one piece the parts are not known and left out. `load_duration`
is the time before the head, which includes the queue in Ollama too. `total_duration` counts from the translation of the
request. An unknown count is left out, never 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import lru_cache
from typing import NamedTuple

import msgspec

from hive.dialects.errors import GaveUp, as_event, gave_up_saying
from hive.dialects.ndjson import one_line
from hive.dialects.openai_answers import (
    GIVEN_UP,
    NO_NAMES,
    NOT_JSON,
    CompletionChoice,
    Delta,
    Logprobs,
    Number,
    ServerTimings,
    Token,
    TokenUsage,
    ToolCall,
    ToolCalls,
    count,
    read,
    readable,
    words_of,
)
from hive.dialects.sse import SseReader
from hive.domain import Dialect
from hive.errors import BackendDown, StreamIncomplete

Raw = msgspec.Raw
_encode = msgspec.json.Encoder().encode


class OllamaKept(msgspec.Struct, omit_defaults=True):
    """The facts about the request that the way back needs: the model by the client's name, `began` (Unix seconds), the
    number of other tokens told with each token (None: no probabilities at all), the longest vector (0: any), and the
    client's names of tools by those the backend was told (hive.dialects.fitting)."""

    model: str
    began: float = 0.0
    alternatives: int | None = None
    dimensions: int = 0
    names: dict[str, str] = {}


# --- errors -----------------------------------------------------------------------------------------------------------


def error_body(status: int, body: bytes) -> bytes:
    """A backend's error as Ollama's clients take it.

    >>> error_body(404, b'{"error":{"message":"no such model"}}'), error_body(503, b"")
    (b'{"error":"no such model"}', b'{"error":"the backend answered 503 and did not say why"}')
    """
    return _encode({"error": words_of(body) or f"the backend answered {status} and did not say why"})


# --- tool calls and probabilities -------------------------------------------------------------------------------------


def _told_calls(calls: list[ToolCall], *, cut_off: bool, names: Mapping[str, str] = NO_NAMES) -> bytes:
    """The member `tool_calls`; empty where there is none. `cut_off`: the answer ended for its length, so that an
    unfinished call is left out, as `done_reason` tells. Else one that cannot be read raises BackendDown.

    >>> from hive.dialects.openai_answers import CalledFunction, CallPiece
    >>> calls = ToolCalls()
    >>> pieces = CallPiece(0, "c1", CalledFunction("f", '{"n":')), CallPiece(0, None, CalledFunction(None, "1e2}"))
    >>> _told_calls([calls.take(piece)[0] for piece in pieces][:1], cut_off=False)
    b',"tool_calls":[{"id":"c1","function":{"index":0,"name":"f","arguments":{"n":1e2}}}]'
    """
    told = []
    for index, call in enumerate(calls):
        arguments = _one_line_object(call.arguments.strip() or "{}")
        if arguments is None:
            if cut_off:
                continue
            raise BackendDown(call.unreadable)
        function = {"index": index, "name": names.get(call.name, call.name), "arguments": arguments}
        told.append({**({"id": call.id} if call.id else {}), "function": function})
    return b',"tool_calls":' + _encode(told) if told else b""


def _one_line_object(text: str) -> Raw | None:
    """A JSON object without white space between its parts, its numbers as they are; None for what is none."""
    try:
        msgspec.json.decode(text, type=dict[str, Raw])
        return Raw(msgspec.json.format(text, indent=-1).encode())
    except NOT_JSON:
        return None


def _told_logprobs(given: Logprobs | None, alternatives: int | None) -> bytes:
    """The member `logprobs`; empty where none were asked for or none came. Of alternatives no more than asked."""
    if given is None or alternatives is None:
        return b""
    tokens = given.content if given.content is not None else _of_completion(given)
    told = [{**_token(token), **_others(token, alternatives)} for token in tokens]
    return b',"logprobs":' + _encode(told) if told else b""


def _token(token: Token) -> dict[str, object]:
    told: dict[str, object] = {"token": token.token, "logprob": token.logprob}
    return {**told, "bytes": token.bytes} if token.bytes else told


def _others(token: Token, alternatives: int) -> dict[str, object]:
    others = (token.top_logprobs or [])[:alternatives]
    return {"top_logprobs": [_token(other) for other in others]} if others else {}


def _of_completion(given: Logprobs) -> list[Token]:
    tokens = given.tokens or []
    probabilities = given.token_logprobs or [None] * len(tokens)
    others = given.top_logprobs or [None] * len(tokens)
    return [
        Token(token, 0.0 if logprob is None else logprob, top_logprobs=_by_likelihood(other or {}))
        for token, logprob, other in zip(tokens, probabilities, others, strict=False)
    ]


def _by_likelihood(others: dict[str, float]) -> list[Token]:
    return [Token(token, logprob) for token, logprob in sorted(others.items(), key=lambda other: -other[1])]


# --- texts ------------------------------------------------------------------------------------------------------------


class _Shape(NamedTuple):
    """The JSON around a text: `{"message":{…}}` in /api/chat, `"response"` in /api/generate."""

    before: bytes
    after: bytes


_PIECE = b'%b%06d%b%b%b,"done":false}\n'
"""A piece of text alone, as most of them are: one formatting instead of `_line`'s six pieces."""
_CHAT = _Shape(b'"message":{"role":"assistant","content":', b"}")
_GENERATE = _Shape(b'"response":', b"")
_ENDINGS = {"tool_calls": "stop", "function_call": "stop"}
"""Ollama has `stop` and `length`; another word of the backend's goes on as it is."""


class TextBack:
    """The answer to a chat or to a prompt.

    >>> back = TextBack(OllamaKept("m"), lambda: 0.0, _GENERATE)
    >>> back.feed(b'data: {"choices":[{"text":"hi"}]}\\n\\ndata: [DO')
    b'{"model":"m","created_at":"1970-01-01T00:00:00.000000Z","response":"hi","done":false}\\n'
    """

    content_type = b"application/x-ndjson"

    __slots__ = (
        "_alternatives",
        "_before",
        "_began",
        "_calls",
        "_date",
        "_first",
        "_head",
        "_names",
        "_now",
        "_opened",
        "_over",
        "_reader",
        "_reason",
        "_second",
        "_shape",
        "_timings",
        "_usage",
        "gave_up",
    )

    def __init__(self, kept: OllamaKept, now: Callable[[], float], shape: _Shape) -> None:
        self._now = now
        self._shape = shape
        self._alternatives = kept.alternatives
        self._names = kept.names
        self._head = b'{"model":' + _encode(kept.model) + b',"created_at":"'
        self._before = b'Z",' + shape.before
        self._reader = SseReader()
        self._calls = ToolCalls()
        self._usage: TokenUsage | None = None
        self._timings: ServerTimings | None = None
        self._reason = ""
        self._over = False
        """True once the end was told, or that there will be none."""
        self.gave_up: GaveUp | None = None
        self._second = -1
        self._date = b""
        self._began = kept.began
        self._opened = now()
        self._first: float | None = None
        """The time at which the first piece of a text or of a call came."""

    @classmethod
    def of_chat(cls, kept: OllamaKept, now: Callable[[], float]) -> TextBack:
        return cls(kept, now, _CHAT)

    @classmethod
    def of_generate(cls, kept: OllamaKept, now: Callable[[], float]) -> TextBack:
        return cls(kept, now, _GENERATE)

    def feed(self, data: bytes) -> bytes:
        payloads = self._reader.feed(data)
        if self._reader.lost and not self._over:
            self._give_up("the backend sent an event longer than 1 MiB")
        if len(payloads) == 1:
            return self._take(payloads[0])
        return b"".join([self._take(payload) for payload in payloads]) if payloads else b""

    def end(self) -> bytes:
        return b"".join([self._take(payload) for payload in self._reader.end()])

    def whole(self, body: bytes) -> bytes:
        try:
            answer = read(body)
        except NOT_JSON:
            raise BackendDown("the backend's answer cannot be read") from None
        if answer.is_error:
            raise BackendDown(words_of(body) or "the backend's answer is an error")
        if not answer.choices:
            raise BackendDown("the backend's answer has no text")
        choice = answer.choices[0]
        if choice.finish_reason in GIVEN_UP:
            raise StreamIncomplete
        self._usage, self._timings, self._reason = answer.usage, answer.timings, choice.finish_reason or ""
        said = choice.message or Delta(content=choice.text)
        made = self._calls.take_whole(said.calls)
        calls = _told_calls(made, cut_off=self._reason == "length", names=self._names)
        now, logprobs = self._now(), _told_logprobs(choice.logprobs, self._alternatives)
        return self._line(now, said.text, said.thinking, calls, logprobs, self._ending(now, streamed=False))

    def error(self, status: int, body: bytes) -> bytes:
        return error_body(status, body)

    def as_event(self, told: bytes) -> bytes:
        return as_event(told, Dialect.OLLAMA)

    def _take(self, payload: bytes) -> bytes:
        if self._over:
            return b""
        if payload == b"[DONE]":
            return self._finish()
        try:
            chunk = read(payload)
        except NOT_JSON:
            return self._give_up("the backend sent an event that cannot be read")
        if chunk.usage is not None:
            self._usage = chunk.usage
        if chunk.timings is not None:
            self._timings = chunk.timings
        if chunk.is_error:
            told = gave_up_saying(payload)
            words = words_of(payload) if told.body else ""
            return self._give_up(words or "the backend gave up", told.status)
        return self._choose(chunk.choices[0]) if chunk.choices else b""

    def _choose(self, choice: CompletionChoice) -> bytes:
        text, thinking, said = choice.text, "", choice.delta
        if said is not None:
            text = said.content or said.refusal
            thinking = said.reasoning or said.reasoning_content or ""
            try:
                for piece in said.calls if said.tool_calls or said.function_call is not None else ():
                    self._calls.take(piece)
            except BackendDown as error:
                return self._give_up(error.message)
        logprobs = b"" if choice.logprobs is None else _told_logprobs(choice.logprobs, self._alternatives)
        if choice.finish_reason is not None:
            self._reason = choice.finish_reason
            if self._reason in GIVEN_UP:
                self._give_up("")
        if not (text or thinking or logprobs):
            if self._calls and self._first is None:
                self._first = self._now()
            return b""
        now = self._now()
        if self._first is None:
            self._first = now
        if thinking or logprobs:
            return self._line(now, text or "", thinking, b"", logprobs, b',"done":false') + b"\n"
        if (second := int(now)) != self._second:
            self._begin_second(second)
        return one_line(
            _PIECE % (self._date, int((now - second) * 1e6), self._before, _encode(text), self._shape.after)
        )

    def _finish(self) -> bytes:
        calls = b""
        if self._calls:
            try:
                calls = _told_calls(self._calls.in_order(), cut_off=self._reason == "length", names=self._names)
            except BackendDown as error:
                return self._give_up(error.message)
        self._over = True
        now = self._now()
        called = self._line(now, "", "", calls, b"", b',"done":false') + b"\n" if calls else b""
        return called + self._line(now, "", "", b"", b"", self._ending(now, streamed=True)) + b"\n"

    def _give_up(self, why: str, status: int = 502) -> bytes:
        self._over = True
        self.gave_up = GaveUp(_encode({"error": why}) if why else b"", status)
        return b""

    def _line(self, now: float, text: str, thinking: str, calls: bytes, logprobs: bytes, end: bytes) -> bytes:
        if (second := int(now)) != self._second:
            self._begin_second(second)
        told = b"%b%06d%b%b" % (self._date, int((now - second) * 1e6), self._before, _encode(text))
        if thinking:
            told += b',"thinking":' + _encode(thinking)
        return one_line(told + calls + self._shape.after + end + logprobs + b"}")

    def _begin_second(self, second: int) -> None:
        self._second = second
        self._date = self._head + _date(second)

    def _ending(self, now: float, *, streamed: bool) -> bytes:
        numbers: dict[str, int | None] = {"total_duration": _ns(now - self._began)}
        if streamed:
            numbers["load_duration"] = _ns(self._opened - self._began)
        given, cached, made = self._counts()
        prompt_ns, made_ns = self._durations(now, streamed=streamed)
        numbers |= {"prompt_eval_count": given, "prompt_eval_cached_count": cached, "prompt_eval_duration": prompt_ns}
        numbers |= {"eval_count": made, "eval_duration": made_ns}
        known = {name: number for name, number in numbers.items() if number is not None}
        reason = _ENDINGS.get(self._reason, self._reason) or "stop"
        return b',"done":true,"done_reason":%b,%b' % (_encode(reason), _encode(known)[1:-1])

    def _counts(self) -> tuple[int | None, int | None, int | None]:
        """Tokens of the prompt, those of them that a cache had, tokens made."""
        usage, timings = self._usage, self._timings
        if usage is not None and usage.prompt_tokens is not None:
            details = usage.prompt_tokens_details
            cached = None if details is None else count(details.cached_tokens)
            return count(usage.prompt_tokens), cached, count(usage.completion_tokens)
        if timings is not None:
            return count(timings.cache_n + timings.prompt_n), count(timings.cache_n), count(timings.predicted_n)
        return None, None, None

    def _durations(self, now: float, *, streamed: bool) -> tuple[int | None, int | None]:
        if self._timings is not None:
            return _ns_of(self._timings.prompt_ms), _ns_of(self._timings.predicted_ms)
        if not streamed or self._first is None:
            return None, None
        return _ns(self._first - self._opened), _ns(now - self._first)


@lru_cache(maxsize=4)
def _date(second: int) -> bytes:
    """The same for all answers of a second.

    >>> _date(0)
    b'1970-01-01T00:00:00.'
    """
    return datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%dT%H:%M:%S.").encode()


def _ns_of(milliseconds: Number) -> int | None:
    """Nanoseconds from a server's milliseconds; None for a number that no clock can show.

    >>> _ns_of(1.5), _ns_of(-1), _ns_of(10**400)
    (1500000, None, None)
    """
    return None if count(milliseconds) is None else _ns(milliseconds / 1000)


def _ns(seconds: float) -> int:
    """Nanoseconds; a clock that was set back gives none."""
    return round(max(0.0, seconds) * 1e9)


# --- vectors ----------------------------------------------------------------------------------------------------------


class _Vector(msgspec.Struct):
    embedding: Raw
    index: int = 0


class _VectorsAnswer(msgspec.Struct):
    data: list[_Vector]
    usage: TokenUsage | None = None


_vectors = msgspec.json.Decoder(_VectorsAnswer).decode


def _read_vectors(body: bytes) -> _VectorsAnswer:
    try:
        return _vectors(body)
    except msgspec.DecodeError:
        return _vectors(readable(body))


_floats = msgspec.json.Decoder(list[float]).decode


class VectorsBack:
    """The answer to an embedding: of /api/embed all vectors, of /api/embeddings the one."""

    content_type = b"application/json"
    gave_up: GaveUp | None = None

    def __init__(self, kept: OllamaKept, now: Callable[[], float], *, only_one: bool) -> None:
        self._kept = kept
        self._now = now
        self._only_one = only_one

    @classmethod
    def all(cls, kept: OllamaKept, now: Callable[[], float]) -> VectorsBack:
        return cls(kept, now, only_one=False)

    @classmethod
    def one(cls, kept: OllamaKept, now: Callable[[], float]) -> VectorsBack:
        return cls(kept, now, only_one=True)

    def feed(self, data: bytes) -> bytes:  # noqa: ARG002 – no embedding comes as a stream
        return b""

    def end(self) -> bytes:
        return b""

    def whole(self, body: bytes) -> bytes:
        try:
            answer = _read_vectors(body)
            given = sorted(answer.data, key=lambda vector: vector.index)
            vectors = [_cut(vector.embedding, self._kept.dimensions) for vector in given]
        except NOT_JSON:
            raise BackendDown(words_of(body) or "the backend's answer has no embedding") from None
        if not vectors:
            raise BackendDown("the backend's answer has no embedding")
        if self._only_one:
            return _encode({"embedding": vectors[0]})
        told: dict[str, object] = {"model": self._kept.model, "embeddings": vectors}
        told["total_duration"] = _ns(self._now() - self._kept.began)
        if answer.usage is not None and (given_count := count(answer.usage.prompt_tokens)) is not None:
            told["prompt_eval_count"] = given_count
        return _encode(told)

    def error(self, status: int, body: bytes) -> bytes:
        return error_body(status, body)

    def as_event(self, told: bytes) -> bytes:
        return as_event(told, Dialect.OLLAMA)


def _cut(vector: Raw, dimensions: int) -> Raw | list[float]:
    """The first `dimensions` numbers of a vector (0: all, as they were written), scaled to length 1 as Ollama scales a
    cut one.

    >>> _cut(Raw(b"[3.0,4.0,12.0]"), 2), bytes(_cut(Raw(b"[3.0,4.0]"), 2))
    ([0.6, 0.8], b'[3.0,4.0]')
    """
    if not dimensions or bytes(vector).count(b",") < dimensions:
        if bytes(memoryview(vector)[:1]) != b"[":
            raise msgspec.DecodeError("no list of numbers")
        return vector
    numbers = _floats(vector)[:dimensions]
    length = max(math.sqrt(sum(number * number for number in numbers)), 1e-12)
    return [number / length for number in numbers]
