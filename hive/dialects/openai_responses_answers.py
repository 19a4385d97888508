"""OpenAI's Responses on a backend that is asked by chat completions: the answers. Sans I/O.

A stream becomes the events of Responses in their order: created and in_progress; for each item of reasoning, message or
call output_item.added, its parts, deltas and ends, output_item.done; completed or incomplete, with the whole answer.
Only `[DONE]` makes that last one: a stream that was cut, that was aborted, or that told an error has none. Where it
breaks after it has begun, an `error` and response.failed are its last words.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from hive.dialects.completion_stream import CompletionStream
from hive.dialects.errors import as_response_error, render
from hive.dialects.openai_answers import (
    MAX_WORDS,
    NOT_JSON,
    Cached,
    Completion,
    CompletionChoice,
    TokenUsage,
    count,
    kind_of,
    read_whole,
    words_of,
)
from hive.dialects.openai_responses_output import Called, ResponseEvents, ResponseOutput, likely_of
from hive.domain import Dialect
from hive.errors import HiveError

Raw = msgspec.Raw
_encode = msgspec.json.Encoder().encode
_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
_LIMITED = "rate_limit_error"


class ResponsesKept(msgspec.Struct, frozen=True):
    """The facts about the request that the way back needs: the model as it was named there, the fields that an answer
    repeats, its names of tools by those the backend was told (hive.dialects.fitting), the tools it calls by other
    names, marks for thoughts as a summary, for log probabilities and for storage, the response it continues, and its
    time in Unix seconds where it was asked for before it could be asked."""

    model: str = ""
    echo: dict[str, Raw] = {}
    names: dict[str, str] = {}
    calls: dict[str, Called] = {}
    summary: bool = False
    logprobs: bool = False
    store: bool = False
    previous: str = ""
    created_at: int = 0


def response_id(request_id: str) -> str:
    """The id of the response to a request.

    >>> response_id("a1b2-7")
    'resp_a1b2-7'
    """
    return f"resp_{request_id or '0'}"


def usage_of(usage: TokenUsage | None) -> dict[str, Any] | None:
    """The counts as Responses have them; None where the backend told none.

    >>> usage_of(TokenUsage(prompt_tokens=30, completion_tokens=5))["total_tokens"]
    35
    """
    if usage is None or (usage.prompt_tokens is None and usage.completion_tokens is None):
        return None
    given, made = count(usage.prompt_tokens) or 0, count(usage.completion_tokens) or 0
    details = usage.prompt_tokens_details or Cached()
    thought = usage.completion_tokens_details
    return {
        "input_tokens": given,
        "input_tokens_details": {
            "cached_tokens": count(details.cached_tokens) or 0,
            "cache_write_tokens": count(details.written) or 0,
        },
        "output_tokens": made,
        "output_tokens_details": {"reasoning_tokens": (count(thought.reasoning_tokens) or 0) if thought else 0},
        "total_tokens": given + made,
    }


def response_object(
    kept: ResponsesKept, name: str, created_at: int, status: str, output: list[dict[str, Any]]
) -> dict[str, Any]:
    """An answer's object as it stands, without what only its end knows.

    >>> made = response_object(ResponsesKept(model="m"), "resp_1", 7, "in_progress", [])
    >>> made["id"], made["status"], made["usage"], made["error"]
    ('resp_1', 'in_progress', None, None)
    """
    return {
        "id": name,
        "object": "response",
        "created_at": created_at,
        "status": status,
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "model": kept.model,
        "output": output,
        "previous_response_id": kept.previous or None,
        "store": kept.store,
        "usage": None,
        **kept.echo,
    }


class ResponseBack(CompletionStream):
    """One answer on its way back.

    >>> back = ResponseBack(ResponsesKept(model="m"), stream=True, request_id="e-1", clock=lambda: 7.0)
    >>> said = back.feed(b'data: {"id":"chatcmpl-1","choices":[{"delta":{"content":"hi"}}]}\\n\\n')
    >>> [line[7:].decode() for line in said.splitlines() if line.startswith(b"event:")][2:]
    ['response.output_item.added', 'response.content_part.added', 'response.output_text.delta']
    >>> back.feed(b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\\n\\n')
    b''
    >>> back.feed(b"data: [DONE]\\n\\n").count(b"event: "), back.kept_response()[:50]
    (4, b'{"id":"resp_e-1","object":"response","created_at":')
    """

    __slots__ = ("_clock", "_created_at", "_events", "_kept", "_made", "_output", "_request_id", "content_type")

    def __init__(self, kept: ResponsesKept, *, stream: bool, request_id: str, clock: Callable[[], float]) -> None:
        """`request_id`: Hive's, of which ids are made."""
        super().__init__()
        self.content_type = b"text/event-stream; charset=utf-8" if stream else b"application/json"
        self._kept = kept
        self._request_id = request_id
        self._clock = clock
        self._created_at = kept.created_at or int(clock())
        self._events = ResponseEvents()
        tag = request_id or "0"
        self._output = ResponseOutput(self._events, tag, names=kept.names, called=kept.calls, as_summary=kept.summary)
        self._made = b""

    def __repr__(self) -> str:
        return f"<ResponseBack {self._output!r}{', over' if self._over else ''}>"

    def kept_response(self) -> bytes:
        """The whole answer, as JSON, once it is completed or incomplete; empty before, and of one that broke."""
        return self._made

    # a stream ---------------------------------------------------------------------------------------------------------

    def _begin(self, first: Completion) -> None:  # noqa: ARG002 - nothing of it is told
        for name in ("response.created", "response.in_progress"):
            self._events.add(name, {"response": self._response("in_progress", [])})

    def _say(self, choice: CompletionChoice) -> None:
        if choice.delta is not None:
            self._output.take(choice.delta, likely_of(choice.logprobs) if self._kept.logprobs else [])

    def _finish(self) -> None:
        self._output.end(cut_off=self._reason == "length")
        status = self._status
        made = self._response(status, self._output.told())
        self._made = _encode(made)
        self._events.add(f"response.{status}", {"response": Raw(self._made)})

    def _taken(self) -> bytes:
        return self._events.take()

    def _own_error(self, error: HiveError) -> bytes:
        return render(error, Dialect.OPENAI)

    def as_event(self, told: bytes) -> bytes:
        """An error's body as the last events of this stream; of one that has begun also that the answer failed."""
        said = [as_response_error(told, self._events.number)]
        self._events.number += 1
        if self._begun:
            failed = self._response("failed", self._output.told())
            limited = kind_of(told) == _LIMITED
            code = "rate_limit_exceeded" if limited else "server_error"
            failed["error"] = {"code": code, "message": words_of(told)}
            self._events.add("response.failed", {"response": failed})
            said.append(self._events.take())
        return b"".join(said)

    # one piece --------------------------------------------------------------------------------------------------------

    def whole(self, body: bytes) -> bytes:
        """The answer. Raises BackendDown for what is no chat completion, StreamIncomplete for an aborted one."""
        found, choice, message = read_whole(body)
        self._reason, self._usage, calls = choice.finish_reason or "", found.usage, message.calls
        message.tool_calls = message.function_call = None
        self._output.take(message, likely_of(choice.logprobs) if self._kept.logprobs else [])
        self._output.take_whole_calls(calls)
        self._output.end(cut_off=self._reason == "length")
        self._events.take()
        self._made = _encode(self._response(self._status, self._output.told()))
        return self._made

    def error(self, status: int, body: bytes) -> bytes:
        """The backend's own error, its words kept; as it is, where it is one of OpenAI's already.

        >>> back = ResponseBack(ResponsesKept(), stream=False, request_id="", clock=lambda: 0.0)
        >>> back.error(404, b'{"detail":"Not Found"}')
        b'{"error":{"message":"Not Found","type":"not_found_error","param":null,"code":null}}'
        """
        try:
            inner = msgspec.json.decode(body, type=dict[str, Raw]).get("error", Raw(b"null"))
            if bytes(inner)[:1] == b"{":
                return _encode({"error": inner})
        except NOT_JSON:
            pass
        words = words_of(body) or body[:MAX_WORDS].decode("utf-8", "replace").strip()
        words = words or f"the backend answered {status}"
        kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: _LIMITED}
        kind = kinds.get(status, "server_error" if status >= 500 else "invalid_request_error")
        return _encode({"error": {"message": words, "type": kind, "param": None, "code": None}})

    # both -------------------------------------------------------------------------------------------------------------

    @property
    def _status(self) -> str:
        return "incomplete" if self._reason in _INCOMPLETE else "completed"

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        made = response_object(self._kept, response_id(self._request_id), self._created_at, status, output)
        if status == "completed":
            made["completed_at"] = int(self._clock())
        if status == "incomplete":
            made["incomplete_details"] = {"reason": _INCOMPLETE.get(self._reason)}
        if status not in ("in_progress", "failed"):
            made["usage"] = usage_of(self._usage)
        return made
