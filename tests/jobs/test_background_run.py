"""The job of one response: a server at a unix socket that streams as Hive's proxy does, well and badly."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from hive.dialects.openai_responses_background import BackgroundAsked
from hive.domain import JobState
from hive.jobs import model_run
from hive.jobs.access import JobAccess, ProgramInside
from hive.jobs.background_run import body_of, run_response
from hive.jobs.ending import JobEnding
from hive.jobs.exit_tools import EXIT_TOOLS
from hive.jobs.order import JobForm, JobOrder, JobWork
from hive.jobs.telling import Telling
from hive.jobs.toolloop import LoopLimits
from hive.link.jobs import JobWord
from tests.listening import listening

JOB = "0123456789ab"
QUEUED = {"id": "", "created_at": 7, "status": "queued", "model": "m", "output": [], "error": None, "usage": None}
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
ITEM = {"id": "msg_1", "type": "message", "status": "in_progress", "role": "assistant", "content": []}
Script = Callable[[asyncio.StreamWriter, int], Awaitable[None]]


def sse(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode()


def response(status: str, **fields: Any) -> dict[str, Any]:
    return {**QUEUED, "id": f"resp_{JOB}", "created_at": 9, "status": status, **fields}


BEGUN = (
    sse("response.created", response=response("in_progress"), sequence_number=0)
    + sse("response.in_progress", response=response("in_progress"), sequence_number=1)
    + sse("response.output_item.added", output_index=0, item=ITEM, sequence_number=2)
    + sse("response.output_text.delta", output_index=0, content_index=0, delta="Hel", sequence_number=3)
)
TEXT = {"type": "output_text", "text": "Hello"}
MESSAGE = {**ITEM, "status": "completed", "content": [TEXT]}
USAGE = {"input_tokens": 3, "input_tokens_details": {"cached_tokens": 1}, "output_tokens": 2}


def last(status: str, *output: dict[str, Any], **fields: Any) -> bytes:
    return sse(f"response.{status}", response=response(status, output=list(output), usage=USAGE, **fields))


class NoPrograms:
    """A response runs none."""

    async def begin(self, agent: str, command: Any) -> ProgramInside:
        raise AssertionError((agent, command))

    async def end(self, run: str) -> None:
        raise AssertionError(run)


class Ran(NamedTuple):
    ending: JobEnding
    words: list[JobWord]
    requests: list[dict[str, Any]]

    @property
    def events(self) -> list[dict[str, Any]]:
        return [word.data for word in self.words if word.event == "response"]


@contextlib.asynccontextmanager
async def proxy(path: Path, script: Script) -> AsyncIterator[list[dict[str, Any]]]:
    """Answers each request with `script(writer, number)`; the bodies that came."""
    bodies: list[dict[str, Any]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"Bearer secret" in head
        assert head.startswith(b"POST /v1/responses HTTP/1.1\r\n")
        length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
        bodies.append(json.loads(await reader.readexactly(length)))
        await script(writer, len(bodies))

    async with listening(serve, path):
        yield bodies


async def run(tmp_path: Path, script: Script | None, **body: Any) -> Ran:
    words: list[JobWord] = []

    async def keep(told: list[JobWord]) -> None:
        words.extend(told)

    path = tmp_path / "jobs.sock"
    telling = Telling(keep)
    access = JobAccess(JOB, path, {"Authorization": "Bearer secret"}, NoPrograms())
    request = json.dumps({"model": "m", "input": "hi", "background": True, **body})
    order = JobOrder(name="r", model="m", form=JobForm.RESPONSES, body={"request": request, "response": QUEUED})
    work = JobWork(order=order, limits=LoopLimits())
    async with contextlib.AsyncExitStack() as opened:
        bodies = [] if script is None else await opened.enter_async_context(proxy(path, script))
        ending = await run_response(work, access, telling)
        await telling.flush()
    return Ran(ending, words, bodies)


def says(*pieces: bytes) -> Script:
    async def script(writer: asyncio.StreamWriter, number: int) -> None:
        for piece in (HEAD, *pieces):
            writer.write(piece)
            await writer.drain()

    return script


async def test_it_asks_as_a_stream_with_its_name_and_records_what_comes(tmp_path: Path) -> None:
    done = sse("response.output_item.done", output_index=0, item=MESSAGE, sequence_number=4)
    ran = await run(tmp_path, says(BEGUN, done, last("completed", MESSAGE)), metadata={"a": "b"})
    assert ran.requests == [
        {
            "model": "m",
            "input": "hi",
            "metadata": {"a": "b"},
            "stream": True,
            "background": {"job": JOB, "created_at": 7},
        }
    ]
    assert [event["sequence_number"] for event in ran.events] == [2, 3, 4, 5, 6]
    assert ran.events[0] == {
        "type": "response.in_progress",
        "response": {"status": "in_progress"},
        "sequence_number": 2,
    }
    assert (ran.ending.state, ran.ending.answer, ran.ending.reason) == (JobState.DONE, "Hello", "")
    [turn] = [word.data for word in ran.words if word.event == "turn"]
    assert turn == {"turn": 1, "finish_reason": "stop", "tokens_in": 3, "tokens_out": 2, "tokens_cached": 1}


async def test_pieces_may_be_cut_anywhere(tmp_path: Path) -> None:
    whole = BEGUN + b": waiting\n\n" + last("completed", MESSAGE)
    ran = await run(tmp_path, says(*(whole[at : at + 7] for at in range(0, len(whole), 7))))
    assert ran.ending.state is JobState.DONE
    assert len(ran.events) == 4


async def test_an_answer_that_met_its_limit_is_incomplete(tmp_path: Path) -> None:
    ran = await run(tmp_path, says(BEGUN, last("incomplete", MESSAGE)))
    assert (ran.ending.state, ran.ending.reason, ran.ending.is_incomplete) == (JobState.DONE, "length", True)


async def test_an_answer_that_breaks_off_keeps_what_came(tmp_path: Path) -> None:
    ran = await run(tmp_path, says(BEGUN))
    assert (ran.ending.state, ran.ending.reason, ran.ending.answer) == (JobState.FAILED, "stream_incomplete", "Hel")
    end = ran.events[-1]
    assert (end["type"], end["sequence_number"], end["response"]["error"]["code"]) == (
        "response.failed",
        5,
        "server_error",
    )
    assert end["response"]["output"][0]["content"][0]["text"] == "Hel"
    assert len(ran.requests) == 1, "nothing is asked twice once it has begun"


async def test_what_the_proxy_says_at_the_end_is_the_reason(tmp_path: Path) -> None:
    error = sse("error", code="backend_down", message="the server is gone", sequence_number=4)
    failed = response("failed", output=[MESSAGE], error={"code": "server_error", "message": "the server is gone"})
    ran = await run(tmp_path, says(BEGUN, error, sse("response.failed", response=failed)))
    assert (ran.ending.state, ran.ending.reason, ran.ending.detail) == (
        JobState.FAILED,
        "backend_down",
        "the server is gone",
    )
    assert [event["type"] for event in ran.events][-1] == "response.failed"
    assert "error" not in [event["type"] for event in ran.events]


async def test_an_error_before_anything_begun_is_told_once(tmp_path: Path) -> None:
    ran = await run(tmp_path, says(sse("error", code="backend_down", message="the server is gone")))
    assert (ran.ending.reason, ran.ending.detail) == ("backend_down", "the server is gone")
    assert [event["type"] for event in ran.events] == ["response.failed"]


def refused(status: int, code: str, *, retry_after: int | None = None) -> bytes:
    body = json.dumps({"error": {"message": "No.", "code": code}}).encode()
    more = b"" if retry_after is None else b"retry-after: %d\r\n" % retry_after
    return b"HTTP/1.1 %d No\r\ncontent-length: %d\r\n%bconnection: close\r\n\r\n%b" % (status, len(body), more, body)


@pytest.mark.parametrize(
    ("answer", "word"),
    [
        (refused(400, "bad_request"), "invalid_prompt"),
        (refused(404, "not_found"), "invalid_prompt"),
        (refused(502, "backend_down"), "server_error"),
        (refused(429, "budget_exceeded", retry_after=36000), "rate_limit_exceeded"),
        (refused(503, "model_cold", retry_after=36000), "server_error"),
    ],
)
async def test_a_refusal_is_a_failed_response(answer: bytes, word: str, tmp_path: Path) -> None:
    async def script(writer: asyncio.StreamWriter, number: int) -> None:
        writer.write(answer)

    ran = await run(tmp_path, script)
    assert ran.ending.state is JobState.FAILED
    assert [event["response"]["error"]["code"] for event in ran.events] == [word]
    assert "No." in ran.ending.detail


async def test_one_that_finds_no_room_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_run, "AGAIN_S", 0.01)
    whole = says(BEGUN, last("completed", MESSAGE))

    async def script(writer: asyncio.StreamWriter, number: int) -> None:
        if number < 3:
            writer.write(refused(429, "queue_full", retry_after=0))
        else:
            await whole(writer, number)

    ran = await run(tmp_path, script)
    assert (ran.ending.state, len(ran.requests)) == (JobState.DONE, 3)


async def test_a_proxy_that_is_away_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_run, "AGAIN_S", 0.01)
    monkeypatch.setattr(model_run, "PATIENCE_S", 0.05)
    ran = await run(tmp_path, None)
    assert (ran.ending.state, ran.ending.reason) == (JobState.FAILED, "connect_failed")


@pytest.mark.parametrize("junk", [b"data: {no json}\n\n", b"data: \xff\n\n"])
async def test_what_is_no_stream_has_failed_it(junk: bytes, tmp_path: Path) -> None:
    ran = await run(tmp_path, says(BEGUN, junk))
    assert (ran.ending.state, ran.ending.reason) == (JobState.FAILED, "backend_error")


async def test_an_exit_tool_is_a_signal_too(tmp_path: Path) -> None:
    call = {"type": "function_call", "name": "POLICY_RISK", "arguments": '{"risk":"harm"}', "call_id": "c"}
    other = {**call, "name": "look_up"}
    broken = {**call, "arguments": "true"}
    done = [
        sse("response.output_item.done", output_index=at, item=item) for at, item in enumerate((call, other, broken))
    ]
    ran = await run(tmp_path, says(BEGUN, *done, last("completed", call, other)))
    [signal] = [word.data for word in ran.words if word.event == "signal"]
    assert signal == {"name": "POLICY_RISK", "arguments": {"risk": "harm"}, "turn": 1, "has_ended": True}


def test_only_an_exit_tool_without_a_schema_gets_hives() -> None:
    own = {"type": "function", "name": "LOW_CONFIDENCE", "parameters": {"type": "object"}}
    named = {"type": "function", "name": "POLICY_RISK", "parameters": None, "strict": True}
    others: list[Any] = [{"type": "function", "name": "f"}, {"type": "custom", "name": "POLICY_RISK"}, 7]
    body = json.dumps({"tools": [own, named, *others]})
    found = json.loads(body_of(body, BackgroundAsked(JOB, 7)))["tools"]
    [risk] = [tool for tool in EXIT_TOOLS if tool.name == "POLICY_RISK"]
    assert found[0] == own
    assert found[1]["parameters"] == json.loads(json.dumps(dict(risk.parameters)))
    assert found[2:] == others
