"""One job that makes a response in the background: one request at the proxy, and its events recorded as they come.

The request is the client's own, asked by the same agent. So it waits in the same queue, within the same limits, and the
proxy keeps its answer under the id that the client was given.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from hive.dialects.openai_responses_background import (
    ENDS,
    FIRST_NUMBER,
    BackgroundAsked,
    Event,
    OutputSoFar,
    error_word,
    failed_event,
    recorded,
)
from hive.host.http_call import HttpCall
from hive.http_answer import CallFailed
from hive.jobs.access import JobAccess
from hive.jobs.ending import JobEnding, completed, failed
from hive.jobs.exit_tools import EXIT_TOOLS, ending_names
from hive.jobs.model_run import again_in_s
from hive.jobs.order import JobWork
from hive.jobs.telling import Telling
from hive.jobs.toolloop import arguments_of
from hive.worker.judge import FailReason
from hive.worker.stream import ERROR_MAX_BYTES, AnswerFailed, AnswerRefused, ServerUnreachable

RESPONSES = "/v1/responses"
EVENT_MAX_BYTES = 64 * 1024 * 1024
"""The last event has all texts of the answer once more, 16 Mi characters at most."""
END_S = 5.0
"""From the last event to the end of the bytes."""
SERVER_ERROR = "server_error"
Raw = msgspec.Raw
_object = msgspec.json.Decoder(dict[str, Raw]).decode
_event = msgspec.json.Decoder(dict[str, Any]).decode
_EXITS = {tool.name: tool for tool in EXIT_TOOLS}


async def run_response(work: JobWork, access: JobAccess, telling: Telling) -> JobEnding:
    """The job, to the end of its answer. Raises what keeps the daemon from keeping what it says."""
    body = work.order.body or {}
    queued: dict[str, Any] = body["response"]
    asked = BackgroundAsked(job=access.job, created_at=queued["created_at"])
    return await ResponseRun(body_of(body["request"], asked), queued, access, telling).run()


def body_of(request: str, asked: BackgroundAsked) -> bytes:
    """The body of the job's own request: the client's, as a stream, with the job's name; and with the schema of each of
    Hive's exit tools that the client only named.

    >>> body_of('{"model":"m","n":1e2,"background":true}', BackgroundAsked("ab", 7))
    b'{"model":"m","n":1e2,"background":{"job":"ab","created_at":7},"stream":true}'
    """
    found: dict[str, Any] = dict(_object(request))
    if "tools" in found and bytes(found["tools"])[:1] == b"[":
        found["tools"] = [_tool(raw) for raw in msgspec.json.decode(found["tools"], type=list[Raw])]
    return msgspec.json.encode({**found, "background": asked, "stream": True})


def _tool(raw: Raw) -> object:
    """A function named as one of Hive's exit tools and without parameters of its own becomes that one."""
    try:
        fields = msgspec.json.decode(raw)
    except msgspec.MsgspecError:
        return raw
    exit_tool = _EXITS.get(fields.get("name", "")) if isinstance(fields, dict) else None
    if exit_tool is None or fields.get("type") != "function" or fields.get("parameters") is not None:
        return raw
    return {
        "type": "function",
        "name": exit_tool.name,
        "description": exit_tool.description,
        "parameters": exit_tool.parameters,
    }


class ResponseEventReader:
    """The events of a stream of Hive's own proxy, as objects.

    >>> reader = ResponseEventReader()
    >>> reader.feed(b'event: a\\ndata: {"type"'), reader.feed(b':"a"}\\n\\n: waiting\\n\\n')
    ([], [{'type': 'a'}])
    """

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._bytes = 0

    def feed(self, data: bytes) -> list[Event]:
        """Raises AnswerFailed for what is no such stream."""
        self._pieces.append(data)
        self._bytes += len(data)
        if self._bytes > EVENT_MAX_BYTES:
            raise AnswerFailed(FailReason.BACKEND_ERROR, f"an event is longer than {EVENT_MAX_BYTES} bytes")
        if not data.endswith(b"\n") and b"\n\n" not in data:
            return []
        *texts, rest = b"".join(self._pieces).split(b"\n\n")
        self._pieces, self._bytes = [rest], len(rest)
        return [event for text in texts if (event := _read(text)) is not None]


def _read(text: bytes) -> Event | None:
    """None for a comment."""
    data = text.partition(b"data: ")[2]
    if not data:
        return None
    try:
        return _event(data)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise AnswerFailed(FailReason.BACKEND_ERROR, "the proxy sent an event that is no JSON") from None


class ResponseRun:
    """`queued`: the answer's object before it was begun, whose fields are not recorded again."""

    def __init__(self, body: bytes, queued: Mapping[str, Any], access: JobAccess, telling: Telling) -> None:
        self._body = body
        self._queued = queued
        self._access = access
        self._telling = telling
        self._number = FIRST_NUMBER
        self._output = OutputSoFar()
        self._error: Event = {}

    def __repr__(self) -> str:
        return f"<ResponseRun at event {self._number}>"

    async def run(self) -> JobEnding:
        begun_at = time.monotonic()
        while True:
            try:
                return await self._ask()
            except AnswerFailed as error:
                is_begun = self._number > FIRST_NUMBER
                wait_s = None if is_begun else again_in_s(error, time.monotonic() - begun_at)
                if wait_s is None:
                    return await self._fail(error)
            await asyncio.sleep(wait_s)

    async def _ask(self) -> JobEnding:
        """Raises AnswerFailed where it came to nothing, or to a part."""
        access = self._access
        try:
            async with access.asking("POST", RESPONSES, self._body, {"Accept": "text/event-stream"}) as call:
                return await self._take_all(call)
        except (ConnectionRefusedError, FileNotFoundError) as error:
            why = f"nobody listens at {access.socket}: {error.strerror}"
            raise ServerUnreachable(FailReason.CONNECT_FAILED, why) from None
        except (OSError, CallFailed) as error:
            raise AnswerFailed(FailReason.STREAM_INCOMPLETE, f"the proxy broke off its answer: {error}") from None

    async def _take_all(self, call: HttpCall) -> JobEnding:
        status = await call.status()
        if status != 200:
            raise AnswerRefused(status, await call.body(ERROR_MAX_BYTES), call.retry_after_s)
        reader, pieces = ResponseEventReader(), call.pieces()
        async for piece in pieces:
            for event in reader.feed(piece):
                ending = await self._take(event)
                if ending is not None:
                    await _read_out(pieces)
                    return ending
        raise AnswerFailed(FailReason.STREAM_INCOMPLETE, "the proxy ended its answer before its last event")

    async def _take(self, event: Event) -> JobEnding | None:
        kind = event.get("type", "")
        if kind == "response.created":
            return None
        if kind == "error":  # what it says is said once more in the response, which its reader is given
            self._error = event
            return None
        await self._record(recorded(event, self._queued, self._number))
        if kind == "response.output_item.done":
            await self._note_signal(event["item"])
        if kind not in ENDS:
            return None
        return await self._end(event["response"])

    async def _record(self, event: Event) -> None:
        self._number += 1
        self._output.take(event)
        await self._telling.say("response", event)

    async def _note_signal(self, item: Mapping[str, Any]) -> None:
        if item.get("type") != "function_call" or item.get("name") not in _EXITS:
            return
        arguments = arguments_of(str(item.get("arguments", "")))
        if arguments is not None:
            name = item["name"]
            signal = {"name": name, "arguments": arguments, "turn": 1, "has_ended": name in ending_names()}
            await self._telling.say("signal", signal)

    async def _end(self, response: Mapping[str, Any]) -> JobEnding:
        text = text_of(response.get("output", ()))
        if response["status"] == "failed":
            told = response.get("error") or {}
            return failed(str(self._error.get("code") or SERVER_ERROR), str(told.get("message", "")), text)
        is_cut = response["status"] == "incomplete"
        await self._telling.say("turn", turn_of(response, "length" if is_cut else "stop"))
        return completed(text, "length" if is_cut else "stop")

    async def _fail(self, error: AnswerFailed) -> JobEnding:
        """Records its last event, with what there is of the answer."""
        code = error.code or str(self._error.get("code") or "") or error.reason.value
        word = error_word(error.status) if isinstance(error, AnswerRefused) else SERVER_ERROR
        message = str(self._error.get("message") or "") or str(error)
        output = self._output.told()
        await self._record(failed_event(word, message, self._number, output))
        return failed(code, message, text_of(output))


async def _read_out(pieces: AsyncIterator[bytes]) -> None:
    """Reads to the end, so that the proxy does not take its answer for one that was cut."""
    with suppress(OSError, CallFailed, TimeoutError):
        async with asyncio.timeout(END_S):
            async for _ in pieces:
                pass


def text_of(output: Sequence[Mapping[str, Any]]) -> str:
    """The text of all messages in an output.

    >>> part = {"type": "output_text", "text": "Hi"}
    >>> text_of([{"type": "message", "content": [part, {"type": "refusal", "refusal": "No"}]}, {"type": "reasoning"}])
    'Hi'
    """
    parts = [part for item in output if item.get("type") == "message" for part in item.get("content", ())]
    return "".join(part.get("text", "") for part in parts if part.get("type") == "output_text")


def turn_of(response: Mapping[str, Any], finish_reason: str) -> dict[str, Any]:
    """The turn as which an answer is on record: what it cost. What it says is kept with all other responses, not in the
    database that is in each backup.

    >>> turn_of({"usage": {"input_tokens": 3, "output_tokens": 2}}, "stop")["tokens_out"]
    2
    """
    usage = response.get("usage") or {}
    return {
        "turn": 1,
        "finish_reason": finish_reason,
        "tokens_in": usage.get("input_tokens"),
        "tokens_out": usage.get("output_tokens"),
        "tokens_cached": (usage.get("input_tokens_details") or {}).get("cached_tokens"),
    }
