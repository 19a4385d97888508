"""One request to a worker: its turns, its output as it comes, and its one end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import aclosing
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from hive.dialects.openai_answers import CallPiece, Completion
from hive.worker.dialogue import Dialogue
from hive.worker.judge import FailReason
from hive.worker.records import (
    CANCELED,
    ModelAnswer,
    RequestResult,
    RequestState,
    RequestStatus,
    ToolCallText,
)
from hive.worker.runaway import Runaway
from hive.worker.stream import AnswerFailed, Clock, Progress, answer

_WITH_USAGE: Mapping[str, Any] = {"include_usage": True}
CALLS_LENGTH_MAX = 1 << 20
"""Characters of all calls of one answer, names and arguments; the rest is dropped, so the last call is no JSON."""
TOKENS_MOST = 1 << 53
MAX_CALLS = 128
"""Tool calls of one answer; what a model writes beyond is dropped."""


class AnswerText:
    """One answer while it comes."""

    def __init__(self) -> None:
        self._text: list[str] = []
        self._thinking: list[str] = []
        self._call_length = 0
        self._calls: dict[int, ToolCallText] = {}
        self._finish_reason: str | None = None
        self._tokens: tuple[int | None, int | None] = (None, None)
        self._cached: int | None = None
        self._runaways = Runaway(), Runaway(), Runaway()
        self.length = 0

    def take(self, chunk: Completion) -> str:
        """Keeps what is in it. Returns in words why the model is not to go on; empty: it may."""
        if chunk.usage is not None:
            self._tokens = _whole(chunk.usage.prompt_tokens), _whole(chunk.usage.completion_tokens)
            if chunk.usage.prompt_tokens_details is not None:
                self._cached = _whole(chunk.usage.prompt_tokens_details.cached_tokens)
        if chunk.timings is not None:
            self._cached = _whole(chunk.timings.cache_n)
        choice = chunk.choices[0] if chunk.choices else None
        if choice is None:
            return ""
        self._finish_reason = choice.finish_reason or self._finish_reason
        if choice.delta is None:
            return ""
        text, thinking, arguments = self._runaways
        why = ""
        for piece in choice.delta.calls:
            why = arguments.feed(self._take_call(piece)) or why
        if choice.delta.thinking:
            self._thinking.append(choice.delta.thinking)
            why = thinking.feed(choice.delta.thinking) or why
        if said := choice.delta.text:
            self._text.append(said)
            self.length += len(said)
            why = text.feed(said) or why
        return why

    @property
    def calls_begun(self) -> int:
        return len(self._calls)

    def whole_calls(self) -> tuple[ToolCallText, ...]:
        """All but the last: a call is whole once another one has begun."""
        return tuple(self._calls[index] for index in sorted(self._calls)[:-1])

    def _take_call(self, piece: CallPiece) -> str:
        """Returns its piece of arguments."""
        index = piece.index if piece.index is not None else max(self._calls, default=0)
        if index not in self._calls and len(self._calls) >= MAX_CALLS:
            return ""
        call = self._calls.setdefault(index, ToolCallText())
        call.id = piece.id or call.id
        if piece.function is None:
            return ""
        name, arguments = piece.function.name or "", piece.function.arguments or ""
        self._call_length += len(name) + len(arguments)
        if self._call_length <= CALLS_LENGTH_MAX:
            call.name += name
            call.arguments += arguments
        return arguments

    def so_far(self) -> ModelAnswer:
        calls = tuple(self._calls[index] for index in sorted(self._calls))
        text, thinking = "".join(self._text), "".join(self._thinking)
        return ModelAnswer(text, thinking, calls, self._finish_reason, *self._tokens, self._cached)


def _whole(number: float | None) -> int | None:
    """A count of tokens as a server tells it, within what any table holds.

    >>> _whole(None), _whole(3.0), _whole(-5), _whole(1e300) == TOKENS_MOST
    (None, 3, 0, True)
    """
    return None if number is None else int(min(max(number, 0), TOKENS_MOST))


class SubmittedRequest:
    """One request. `params`: the caller's, passed on untouched but for what the worker controls."""

    def __init__(
        self, request_id: int, job_name: str, dialogue: Dialogue, params: Mapping[str, Any], clock: Clock
    ) -> None:
        self.request_id = request_id
        self.job_name = job_name
        self.progress = Progress(clock)
        self._alive_at: float | None = None
        self.task: asyncio.Task[None] | None = None
        self._dialogue = dialogue
        self._params = params
        self._clock = clock
        self._state = RequestState.RUNNING
        self._reason: str | None = None
        self._detail = ""
        self._text = AnswerText()
        self._turns: list[ModelAnswer] = []
        self._length_before = 0
        self._before: Progress | None = None
        """Of the turn before."""
        self._asked_at = self.progress.asked_at
        self._created_at = time.time()
        self._first_data_at: float | None = None
        self._ended_at: float | None = None

    def __repr__(self) -> str:
        return f"<SubmittedRequest {self.request_id} {self.job_name} {self._state} {self._reason or ''}>"

    @property
    def is_running(self) -> bool:
        return self._state is RequestState.RUNNING

    async def run(self, socket: Path, answered: Callable[[Progress], None]) -> None:
        """Its turns until the end; `answered` is told each time the server has done its part.

        Raises AnswerFailed, and what its dialogue raises; other ends are set from outside, by `end` and a cancel.
        """
        while self.is_running:
            await self._ask(socket)
            self.progress.is_answered = True
            answered(self.progress)
            self._turns.append(self._text.so_far())
            if not await self._dialogue.after(self._turns[-1]):
                self.end(RequestState.COMPLETED)
                return
            self._before, self.progress = self.progress, Progress(self._clock, began_at=self._asked_at)

    async def _ask(self, socket: Path) -> None:
        """One turn: its answer is in `_text`, whole, or as much of it as its dialogue needs."""
        self._length_before += self._text.length
        self._text, calls = AnswerText(), 1
        async with aclosing(answer(socket, self._body(), self.progress)) as chunks:
            async for chunk in chunks:
                if self._first_data_at is None:
                    self._first_data_at = self.progress.data_at or self._clock()
                if why := self._text.take(chunk):
                    raise AnswerFailed(FailReason.REPEATED_LINE_LOOP, why)
                if self._text.calls_begun > calls:
                    calls = self._text.calls_begun
                    if self._dialogue.is_enough(self._text.whole_calls()):
                        return

    def _body(self) -> bytes:
        fields = self._dialogue.fields(datetime.now().astimezone())
        controlled = {"stream": True, "stream_options": self._params.get("stream_options") or _WITH_USAGE}
        return encode({**self._params, **fields, **controlled})

    def end(self, state: RequestState, reason: str | None = None, detail: str = "") -> None:
        """Sets its end, once."""
        if self.is_running:
            self._state, self._reason, self._detail = state, reason, detail
            self._ended_at = self._clock()

    def fail(self, reason: FailReason, detail: str) -> None:
        """Ends it as failed, and its stream with it."""
        self.end(RequestState.FAILED, reason.value, detail)
        self._cut()

    def note_life(self, at: float) -> None:
        """The server was seen to work; before this request began, that says nothing about it."""
        if at >= self._asked_at:
            self._alive_at = at

    def cancel(self) -> None:
        self.end(RequestState.CANCELED, CANCELED, "canceled")
        self._cut()

    def _cut(self) -> None:
        if self.task is not None:
            self.task.cancel()

    def status(self) -> RequestStatus:
        data_at, byte_at = self._last("data_at"), self._last("byte_at")
        last = [at for at in (data_at, self._alive_at) if at is not None]
        return RequestStatus(
            request_id=self.request_id,
            job_name=self.job_name,
            state=self._state,
            reason=self._reason,
            created_at=self._created_at,
            first_data_at=self._wall(self._first_data_at),
            last_stream_byte_at=self._wall(byte_at),
            last_liveness_at=self._wall(self._alive_at),
            last_progress_at=self._created_at + max(last, default=self._asked_at) - self._asked_at,
            ended_at=self._wall(self._ended_at),
            output_length=self._length_before + self._text.length,
            tool_iterations_remaining=self._dialogue.iterations_remaining,
            signals=tuple(self._dialogue.signals),
        )

    def _last(self, mark: str) -> float | None:
        """Mark of this turn's progress, before it has one that of the turn before."""
        found: float | None = getattr(self.progress, mark)
        return found if found is not None or self._before is None else getattr(self._before, mark)

    def result(self) -> RequestResult:
        so_far = self._text.so_far()
        return RequestResult(
            request_id=self.request_id,
            job_name=self.job_name,
            state=self._state,
            reason=self._reason,
            detail=self._detail,
            answer=self._dialogue.shown(so_far) if self._state is RequestState.COMPLETED else so_far,
            signals=tuple(self._dialogue.signals),
            turns=tuple(self._turns),
        )

    def _wall(self, at: float | None) -> float | None:
        """Time of our clock as Unix time: a clock that is set meanwhile moves none of them."""
        return None if at is None else self._created_at + at - self._asked_at


def encode(fields: Mapping[str, Any]) -> bytes:
    """A body. Raises TypeError, ValueError for what is no JSON."""
    return msgspec.json.encode(fields)
