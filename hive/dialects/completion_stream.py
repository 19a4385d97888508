"""A stream of chat completions on its way into Messages or Responses: the reading, which both share. Sans I/O."""

from __future__ import annotations

from abc import ABC, abstractmethod

from hive.dialects.errors import GaveUp, gave_up_saying
from hive.dialects.openai_answers import (
    GIVEN_UP,
    NOT_JSON,
    Completion,
    CompletionChoice,
    TokenUsage,
    read,
    status_of,
)
from hive.dialects.sse import SseReader
from hive.errors import BackendDown, HiveError


class CompletionStream(ABC):
    """One answer on its way back. A subclass writes the events of its dialect, and `_taken` gives them out.

    `gave_up`: why the stream ends without its end, once that is so; then nothing more is written.
    """

    __slots__ = ("_begun", "_over", "_reader", "_reason", "_usage", "gave_up")

    def __init__(self) -> None:
        self._reader = SseReader()
        self._begun = False
        self._over = False
        """True once nothing more is written: after the last event, or after an error."""
        self._reason = ""
        """The `finish_reason`."""
        self._usage: TokenUsage | None = None
        self.gave_up: GaveUp | None = None

    def feed(self, data: bytes) -> bytes:
        """Whole events of the client's dialect for the bytes of a stream of OpenAI's, split anywhere."""
        return self._take(self._reader.feed(data))

    def end(self) -> bytes:
        """The events that the end of the bytes completes; no end marker."""
        return self._take(self._reader.end())

    def _take(self, payloads: list[bytes]) -> bytes:
        try:
            for payload in payloads:
                if self._over:
                    break
                if payload == b"[DONE]":
                    self._over = True
                    if self._begun:
                        self._finish()
                else:
                    self._read(payload)
            if self._reader.lost and not self._over:
                raise BackendDown("an event of the backend is longer than 1 MiB")
        except HiveError as error:
            self._fail(GaveUp(self._own_error(error)))
        return self._taken()

    def _read(self, payload: bytes) -> None:
        try:
            chunk = read(payload)
        except NOT_JSON:
            raise BackendDown("the backend sent an event that is none of OpenAI's dialect") from None
        if chunk.is_error:
            told = gave_up_saying(payload)
            self._fail(GaveUp(self.error(status_of(payload) or 500, payload), told.status) if told.body else told)
            return
        if not self._begun:
            self._begun = True
            self._begin(chunk)
        if chunk.usage is not None:
            self._usage = chunk.usage
        if chunk.choices:
            choice = chunk.choices[0]
            self._say(choice)
            if choice.finish_reason is not None:
                self._reason = choice.finish_reason
                if choice.finish_reason in GIVEN_UP:
                    self._fail(GaveUp())
        elif chunk.usage is not None:
            self._usage_told()

    def _fail(self, why: GaveUp) -> None:
        self._over = True
        self.gave_up = why

    # The dialect of the client ----------------------------------------------------------------------------------------

    @abstractmethod
    def _begin(self, first: Completion) -> None:
        """Writes what stands before all else."""

    @abstractmethod
    def _say(self, choice: CompletionChoice) -> None:
        """Writes one piece. Raises BackendDown for one that cannot be."""

    def _usage_told(self) -> None:  # noqa: B027 - one dialect says its usage at the end
        """The usage came by itself, which is the last thing before the end."""

    @abstractmethod
    def _finish(self) -> None:
        """Writes the end. Raises BackendDown where there can be none."""

    @abstractmethod
    def _taken(self) -> bytes:
        """Gives out the bytes written since the last time."""

    @abstractmethod
    def _own_error(self, error: HiveError) -> bytes:
        """The body of an error of Hive's own."""

    @abstractmethod
    def error(self, status: int, body: bytes) -> bytes:
        """The backend's own error, its words kept."""
