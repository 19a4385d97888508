"""One streamed answer of a server at a unix socket: its data events, and the marks of its progress."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from pathlib import Path

import msgspec

from hive.dialects.openai_answers import GIVEN_UP, NOT_JSON, Completion, code_of, read, words_of
from hive.dialects.sse import SseReader
from hive.host.http_call import calling, connected_unix, streams_of
from hive.http_answer import CallFailed, encode_request
from hive.worker.judge import FailReason, InFlight

COMPLETIONS = "/v1/chat/completions"
REPETITION = "repetition"
"""The `finish_reason` of a vLLM that was asked for `repetition_detection`, and found some."""
DONE = b"[DONE]"
ERROR_MAX_BYTES = 65536
CONTROL_MAX_BYTES = 1024 * 1024
_FIELDS = {"Host": "localhost", "Connection": "close", "Accept": "text/event-stream"}
_JSON = {**_FIELDS, "Content-Type": "application/json"}

Clock = Callable[[], float]


class AnswerFailed(Exception):
    """The answer came to nothing, or to a part. `reason`: for programs; the text: for people."""

    def __init__(self, reason: FailReason, why: str, code: str = "") -> None:
        """`code`: of the error that the server told, where it has one."""
        super().__init__(why)
        self.reason = reason
        self.code = code


class AnswerRefused(AnswerFailed):
    """The server answered with an error before it began. `retry_after_s`: None where it did not say."""

    def __init__(self, status: int, body: bytes, retry_after_s: float | None) -> None:
        super().__init__(FailReason.BACKEND_ERROR, f"{status}: {words_of(body)}", code_of(body))
        self.status = status
        self.retry_after_s = retry_after_s


class ServerUnreachable(AnswerFailed):
    """Nobody listens at the server's socket."""


class Progress:
    """Marks of one request, written here and read by whoever judges it. Times of `clock`."""

    def __init__(self, clock: Clock, *, began_at: float | None = None) -> None:
        self.clock = clock
        self.asked_at = clock()
        self.began_at = began_at
        """Beginning of the whole request, where this is a later turn of it."""
        self.connected_at: float | None = None
        self.headed_at: float | None = None
        self.byte_at: float | None = None
        """The last byte of the body, whatever it was."""
        self.data_at: float | None = None
        self.waited_for_head_s = 0.0
        self.is_answered = False

    def facts(self) -> InFlight:
        return InFlight(
            asked_at=self.asked_at,
            connected_at=self.connected_at,
            headed_at=self.headed_at,
            data_at=self.data_at,
            waited_for_head_s=self.waited_for_head_s,
            began_at=self.began_at,
            is_answered=self.is_answered,
        )


async def answer(
    socket: Path, body: bytes, progress: Progress, *, fields: Mapping[str, str] = {}, last_bytes_s: float = 0.0
) -> AsyncGenerator[Completion, None]:
    """The chunks of the chat completion that `body` asks for, as they come; returns after a whole answer. `fields`: of
    its head, beside those that it needs. `last_bytes_s`: behind its end marker the last bytes of the body are waited
    for so long: whoever meters takes an answer for cut whose reader left before.

    Whole: it has its end marker, and no error and no abort in it. Raises AnswerFailed for all else. Without a limit of
    time: whoever judges `progress` cancels.
    """
    events = SseReader()
    try:
        sock = await connected_unix(socket)
    except (ConnectionRefusedError, FileNotFoundError) as error:
        raise ServerUnreachable(FailReason.CONNECT_FAILED, f"nobody listens at {socket}: {error.strerror}") from None
    except OSError as error:
        raise AnswerFailed(FailReason.CONNECT_FAILED, f"{socket}: {error.strerror or error}") from None
    progress.connected_at = progress.clock()
    try:
        async with calling(streams_of(sock), encode_request("POST", COMPLETIONS, {**_JSON, **fields}, body)) as call:
            status = await call.status()
            progress.headed_at = progress.clock()
            if status != 200:
                raise AnswerRefused(status, await call.body(ERROR_MAX_BYTES), call.retry_after_s)
            pieces = call.pieces()
            async for piece in pieces:
                progress.byte_at = progress.clock()
                payloads = events.feed(piece)
                if payloads:
                    progress.data_at = progress.byte_at
                for payload in payloads:
                    if payload == DONE:
                        await _read_out(pieces, last_bytes_s)
                        return
                    yield _chunk(payload)
    except (OSError, CallFailed) as error:
        raise AnswerFailed(FailReason.STREAM_INCOMPLETE, f"the server broke off its answer: {error}") from None
    raise AnswerFailed(FailReason.STREAM_INCOMPLETE, "the server ended its answer before its end marker")


async def _read_out(pieces: AsyncIterator[bytes], within_s: float) -> None:
    """Drops what is left, as far as it comes in time."""
    if within_s:
        with contextlib.suppress(TimeoutError, OSError, CallFailed):
            async with asyncio.timeout(within_s):
                async for _ in pieces:
                    pass


def _chunk(payload: bytes) -> Completion:
    try:
        chunk = read(payload)
    except NOT_JSON:
        raise AnswerFailed(FailReason.BACKEND_ERROR, "the server sent an event that is no JSON") from None
    if chunk.is_error:
        raise AnswerFailed(FailReason.BACKEND_ERROR, words_of(payload), code_of(payload))
    finish_reason = chunk.choices[0].finish_reason if chunk.choices else None
    if finish_reason in GIVEN_UP:
        raise AnswerFailed(FailReason.STREAM_INCOMPLETE, "the server gave up on its answer")
    if finish_reason == REPETITION:
        raise AnswerFailed(FailReason.REPEATED_LINE_LOOP, "the server found that the model repeats itself")
    return chunk


async def status_of(socket: Path, path: str, progress: Progress) -> int | None:
    """Status of the answer to `GET path`, None where none came. Without a limit of time, as `answer`."""
    with contextlib.suppress(OSError, CallFailed):
        sock = await connected_unix(socket)
        progress.connected_at = progress.clock()
        async with calling(streams_of(sock), encode_request("GET", path, _FIELDS)) as call:
            status = await call.status()
            progress.headed_at = progress.clock()
            await call.body(CONTROL_MAX_BYTES)
            progress.data_at = progress.clock()
            return status
    return None


async def generates(socket: Path, model: str, clock: Clock) -> None:
    """Returns once the server has generated a token. Raises AnswerFailed."""
    fields = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, "stream": True}
    async for _ in answer(socket, msgspec.json.encode(fields), Progress(clock)):
        pass
