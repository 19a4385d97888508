"""Chat completions as Anthropic's Messages: the ways back of anthropic_openai.py. Sans I/O.

A stream becomes Anthropic's events in Anthropic's order: message_start; for each block of thinking, text or tool use
content_block_start, its deltas and content_block_stop; message_delta with the reason and the usage; message_stop.
OpenAI tells the usage last, so `message_start` has zeros, and `message_delta` the true counts; where the backend told
none, its `output_tokens` is 0, as clients fail without it. Only `[DONE]` makes a message_stop: a stream that was cut,
that was aborted, or that told an error has none.

The signature of thinking is empty: no server here checks one. Only vLLM tells the stop sequence that was met
(`stop_reason` of a choice); of other servers it is `end_turn`.
"""

from __future__ import annotations

import msgspec

from hive.dialects.anthropic_blocks import TEXT, THINKING, Blocks
from hive.dialects.completion_stream import CompletionStream
from hive.dialects.errors import as_event
from hive.dialects.openai_answers import (
    MAX_WORDS,
    NONE,
    NOT_JSON,
    Cached,
    Completion,
    CompletionChoice,
    Delta,
    Number,
    TokenUsage,
    ToolCall,
    ToolCalls,
    count,
    is_object,
    read_whole,
    words_of,
)
from hive.domain import Dialect
from hive.errors import BackendDown, HiveError

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
"""Error types by status. Of the other ones 5xx is `api_error`, 4xx `invalid_request_error`."""
_REASONS = {
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "function_call": "tool_use",
    "content_filter": "refusal",
}
"""`stop`, and what no server is known to say, is the end of a turn."""


class AnthropicKept(msgspec.Struct, frozen=True):
    """The facts about the request that the way back needs: the model as it was named there, its stop sequences, a mark
    that thoughts are to be left out, and its names of tools by those the backend was told (hive.dialects.fitting).
    `edits`: the edits made to the conversation before; None if none were asked for."""

    model: str = ""
    stop: list[str] = []
    hidden: bool = False
    names: dict[str, str] = {}
    edits: list[dict[str, str | int]] | None = None


_text = msgspec.json.Decoder(str).decode
_encode = msgspec.json.Encoder().encode


def _count(number: Number | None) -> int:
    """Anthropic's clients need a number."""
    return count(number) or 0


def _usage_of(usage: TokenUsage | None) -> dict[str, object]:
    """Anthropic's `input_tokens` leave out what came from a cache or went into one.

    >>> _usage_of(TokenUsage(prompt_tokens=30, completion_tokens=5, prompt_tokens_details=Cached(cached_tokens=29)))
    {'input_tokens': 1, 'cache_read_input_tokens': 29, 'output_tokens': 5}
    """
    if usage is None:
        return {"output_tokens": 0}
    parts: dict[str, object] = {}
    rest = _count(usage.prompt_tokens)
    details = usage.prompt_tokens_details or Cached()
    if details.written is not None:
        parts["cache_creation_input_tokens"] = _count(details.written)
        rest -= _count(details.written)
    if details.cached_tokens is not None:
        parts["cache_read_input_tokens"] = _count(details.cached_tokens)
        rest -= _count(details.cached_tokens)
    told: dict[str, object] = {"input_tokens": max(0, rest)} if usage.prompt_tokens is not None else {}
    told |= {**parts, "output_tokens": _count(usage.completion_tokens)}
    if usage.completion_tokens_details is not None and usage.completion_tokens_details.reasoning_tokens is not None:
        told["output_tokens_details"] = {"thinking_tokens": _count(usage.completion_tokens_details.reasoning_tokens)}
    return told


def _message_id(given: str | int | None, request_id: str) -> str:
    """Anthropic's begin with `msg_`. Where the backend gives none, the request's own makes it unlike all others.

    >>> _message_id("chatcmpl-8ddb", "e-7"), _message_id(None, "e-7"), _message_id("msg_x", "e-7")
    ('msg_8ddb', 'msg_e-7', 'msg_x')
    """
    told = "" if given is None else str(given).removeprefix("chatcmpl-").removeprefix("msg_")
    return f"msg_{told or request_id}"


def _kind_of(status: int) -> str:
    """The `type` of an error.

    >>> _kind_of(400), _kind_of(429), _kind_of(500), _kind_of(529)
    ('invalid_request_error', 'rate_limit_error', 'api_error', 'overloaded_error')
    """
    return _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")


def _error(kind: str, words: str, request_id: str) -> bytes:
    return _encode({"type": "error", "error": {"type": kind, "message": words}, "request_id": request_id or None})


# --- what the client gets ---------------------------------------------------------------------------------------------


def _event(name: str, fields: dict[str, object]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), _encode({"type": name, **fields}))


_END = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'


class AnthropicAnswer(CompletionStream):
    """One answer on its way back.

    >>> answer = AnthropicAnswer(AnthropicKept(model="m"), stream=True)
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

    __slots__ = ("_blocks", "_ended", "_kept", "_refused", "_request_id", "_said", "_stop", "content_type")

    def __init__(self, kept: AnthropicKept, *, stream: bool, request_id: str = "") -> None:
        """`request_id`: Hive's, which errors tell, and ids are made of that the backend does not give."""
        super().__init__()
        self._request_id = request_id
        self.content_type = b"text/event-stream; charset=utf-8" if stream else b"application/json"
        self._kept = kept
        self._said: list[bytes] = []
        self._blocks = Blocks(hidden=kept.hidden, tag=self._tag, names=kept.names)
        self._stop = NONE
        self._refused = False
        self._ended = False
        """True once message_delta has been written."""

    @property
    def _tag(self) -> str:
        """The prefix of calls' ids, in front of their number."""
        return f"{self._request_id}_" if self._request_id else ""

    def __repr__(self) -> str:
        return f"<AnthropicAnswer {self._blocks!r}{', over' if self._over else ''}>"

    # a stream ---------------------------------------------------------------------------------------------------------

    def _begin(self, first: Completion) -> None:
        usage: dict[str, object] = {"input_tokens": 0, "output_tokens": 0}
        message = {**self._envelope(first.id, [], usage), "stop_reason": None, "stop_sequence": None}
        self._said.append(_event("message_start", {"message": message}))

    def _say(self, choice: CompletionChoice) -> None:
        if (delta := choice.delta) is not None:
            self._refused = self._refused or bool(delta.refusal)
            if self._ended and (delta.text or delta.thinking or delta.tool_calls):
                raise BackendDown("the backend went on after the end of its answer")
            self._blocks.take(delta, self._said)
        if choice.finish_reason is not None:
            self._stop = choice.stop_reason

    def _usage_told(self) -> None:
        if self._reason:
            self._tell_end()

    def _tell_end(self) -> None:
        if self._ended:
            return
        self._ended = True
        self._blocks.end(self._said, cut_off=self._reason == "length")
        reason, sequence = self._why(self._reason, self._stop, called=self._blocks.called, refused=self._refused)
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        self._said.append(_event("message_delta", {"delta": delta, "usage": _usage_of(self._usage), **self._edits()}))

    def _finish(self) -> None:
        self._tell_end()
        self._said.append(_END)

    def _taken(self) -> bytes:
        said, self._said = self._said, []
        return said[0] if len(said) == 1 else b"".join(said)

    def _own_error(self, error: HiveError) -> bytes:
        return _error(_kind_of(500), error.message, self._request_id)

    # one piece --------------------------------------------------------------------------------------------------------

    def whole(self, body: bytes) -> bytes:
        """The Message. Raises BackendDown for what is no chat completion, StreamIncomplete for an aborted one."""
        found, choice, message = read_whole(body)
        finish = choice.finish_reason or ""
        calls = ToolCalls().take_whole(message.calls)
        reason, sequence = self._why(finish, choice.stop_reason, called=bool(calls), refused=bool(message.refusal))
        content = self._content(message)
        content.extend(self._tool_use(call, finish) for call in calls)
        usage = {"input_tokens": 0, **_usage_of(found.usage)}
        answer = self._envelope(found.id, content, usage)
        return _encode({**answer, "stop_reason": reason, "stop_sequence": sequence, **self._edits()})

    def error(self, status: int, body: bytes) -> bytes:
        """The backend's own error, its words kept.

        >>> answer = AnthropicAnswer(AnthropicKept(), stream=False)
        >>> answer.error(404, b'{"error":{"message":"no such model","type":"x"}}')
        b'{"type":"error","error":{"type":"not_found_error","message":"no such model"},"request_id":null}'
        """
        words = words_of(body) or body[:MAX_WORDS].decode("utf-8", "replace").strip()
        words = words or f"the backend answered {status}"
        return _error(_kind_of(status), words, self._request_id)

    def as_event(self, told: bytes) -> bytes:
        """An error's body, which is one line, as the last event."""
        return as_event(told, Dialect.ANTHROPIC)

    def _content(self, message: Delta) -> list[object]:
        blocks: list[object] = []
        if message.thinking:
            blocks.append({**THINKING, "thinking": "" if self._kept.hidden else message.thinking})
        if message.text:
            blocks.append({**TEXT, "text": message.text})
        return blocks

    # both -------------------------------------------------------------------------------------------------------------

    def _envelope(
        self, given_id: str | int | None, content: list[object], usage: dict[str, object]
    ) -> dict[str, object]:
        head = {
            "id": _message_id(given_id, self._request_id),
            "type": "message",
            "role": "assistant",
            "model": self._kept.model,
        }
        return {**head, "content": content, "usage": usage}

    def _edits(self) -> dict[str, object]:
        """Edits done to the conversation, if any were asked for."""
        edits = self._kept.edits
        return {} if edits is None else {"context_management": {"applied_edits": edits}}

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
            except NOT_JSON:
                sequence = ""
            if sequence in self._kept.stop:
                return "stop_sequence", sequence
        return ("tool_use" if called else "end_turn"), None

    def _tool_use(self, call: ToolCall, finish: str) -> object:
        """Arguments are kept as they were written. Raises BackendDown where they are no object, but of one cut short.

        A client must not run a tool with other arguments than the model's; that of an answer cut short it does not run.
        """
        arguments = call.arguments.strip() or "{}"
        if not is_object(arguments):
            if finish != "length":
                raise BackendDown(call.unreadable)
            arguments = "{}"
        return {
            "type": "tool_use",
            "id": call.id or f"toolu_{self._tag}{call.number}",
            "name": self._kept.names.get(call.name, call.name),
            "input": Raw(arguments.encode()),
        }
