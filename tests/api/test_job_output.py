"""The stream of a job's output: numbered events, comments between, an end when the reader or the server goes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request

from hive.api import jobs
from hive.api.jobs import AFTER, FOLLOW, LAST_EVENT_ID, JobApi, _lines
from hive.errors import BadRequest
from hive.jobs.order import JobEvent


class Said:
    """Events of one job, some there already and some to come."""

    def __init__(self, *numbers: int) -> None:
        self.numbers = numbers
        self.more = asyncio.Event()
        self.is_closed = False

    async def events(self) -> AsyncIterator[JobEvent]:
        try:
            for number in self.numbers:
                yield JobEvent(number, float(number), "delta", {"text": "a\nb"})
            await self.more.wait()
            yield JobEvent(99, 99.0, "ended", {"status": "completed"})
        finally:
            self.is_closed = True


def api(stopping: asyncio.Event | None = None) -> JobApi:
    services: Any = SimpleNamespace()
    return JobApi(services, stopping=stopping or asyncio.Event())


def request(query: str = "", *headers: tuple[str, str]) -> Request:
    raw = [(name.lower().encode(), value.encode()) for name, value in headers]
    return Request({"type": "http", "query_string": query.encode(), "headers": raw})


async def test_an_event_has_its_number_as_id_and_all_of_it_as_data() -> None:
    said = Said(7)
    said.more.set()
    async with aclosing(api()._followed(said.events())) as stream:
        first, last = [piece async for piece in stream]
    assert first.startswith(b"id: 7\nevent: delta\ndata: {")
    assert first.endswith(b"}\n\n")
    assert first.count(b"\n") == 4, "no line break of a text may end a line of the stream"
    assert json.loads(first.partition(b"data: ")[2]) == {"n": 7, "at": 7.0, "event": "delta", "data": {"text": "a\nb"}}
    assert last.startswith(b"id: 99\nevent: ended\n")
    assert said.is_closed


async def test_a_comment_comes_where_nothing_happens_and_no_event_is_lost_by_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(jobs, "HEARTBEAT_S", 0.01)
    said = Said()
    async with aclosing(api()._followed(said.events())) as stream:
        assert await anext(stream) == await anext(stream) == b": still here\n\n"
        said.more.set()
        pieces = [piece async for piece in stream]
    assert next(piece for piece in pieces if piece != b": still here\n\n").startswith(b"id: 99\n")


async def test_the_stream_ends_when_the_server_stops_and_lets_go_of_the_job() -> None:
    said, stopping = Said(1), asyncio.Event()
    async with aclosing(api(stopping)._followed(said.events())) as stream:
        assert (await anext(stream)).startswith(b"id: 1\n")
        stopping.set()
        assert [piece async for piece in stream] == []
    assert said.is_closed


async def test_a_reader_that_leaves_while_it_waits_lets_go_of_the_job() -> None:
    said = Said()
    stream = api()._followed(said.events())
    reading = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    await stream.aclose()
    assert said.is_closed


async def test_lines_are_sent_together_and_none_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "PIECE_BYTES", 200)
    said = Said(*range(1, 21))
    said.more.set()
    pieces = [piece async for piece in _lines(said.events())]
    assert 1 < len(pieces) < 20
    assert [json.loads(line)["n"] for line in b"".join(pieces).splitlines()] == [*range(1, 21), 99]


@pytest.mark.parametrize("value", ["x", "-1", "1.5", "1234567890", "٣", ""])
def test_a_last_event_id_that_is_no_number_is_refused(value: str) -> None:
    with pytest.raises(BadRequest, match="Last-Event-ID"):
        LAST_EVENT_ID.of(request("", ("Last-Event-ID", value)))


def test_a_last_event_id_is_read_once() -> None:
    assert LAST_EVENT_ID.of(request()) is None
    assert LAST_EVENT_ID.of(request("", ("last-event-id", "12"))) == "12"
    with pytest.raises(BadRequest, match="one value"):
        LAST_EVENT_ID.of(request("", ("Last-Event-ID", "1"), ("Last-Event-ID", "2")))
    assert (AFTER.of(request("after=5")), FOLLOW.of(request("follow=1"))) == (5, True)
