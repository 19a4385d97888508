"""The stream of events where there is much to tell."""

from __future__ import annotations

import asyncio
import gc
import json
import weakref
from asyncio import to_thread
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

import pytest

from hive.api.events import PAST_MAX, EventApi
from hive.audit.feed import DROPPED, FEED_MAX, Events, Feed
from hive.client.client import Client
from hive.errors import BadRequest
from hive.shapes.system import Event


class Told(dict[str, Any]):
    """An event of which it can be seen whether anybody still has it."""


def event(number: int) -> Told:
    about = {"agent": "a", "actor": "idle", "outcome": "ok"}
    return Told({"at": float(number), "kind": "agent.paused", **about, "reason": str(number)})


class Journal:
    """The audit log, as far as a stream of events needs it."""

    def __init__(self, *past: Told) -> None:
        self.rows = [*past]
        self.feed = Events()

    async def past(self, limit: int, agent: str = "") -> list[Told]:
        return [row for row in self.rows if agent in ("", row["agent"])][-limit:]

    def subscribe(self) -> Feed:
        return self.feed.subscribe()


def api_of(journal: Journal, stopping: asyncio.Event | None = None) -> EventApi:
    services: Any = SimpleNamespace(audit_log=journal)
    return EventApi(services, stopping=stopping or asyncio.Event())


def told(piece: bytes) -> Any:
    return json.loads(piece.partition(b"data: ")[2])


async def test_no_more_past_is_told_than_fits_into_memory_for_everybody(client: Client) -> None:
    """100,000 events of 600 bytes each were kept for every reader: 62 MB, times 128 connections."""
    assert PAST_MAX <= 10_000
    with pytest.raises(BadRequest, match=f"from 0 to {PAST_MAX}"):
        await to_thread(lambda: list(client.events(tail=PAST_MAX + 1)))


async def test_others_have_their_turn_while_a_long_past_is_told() -> None:
    """An answer of 100,000 events stalled the loop for 0.37 s."""
    api, turns = api_of(Journal(*map(event, range(5000)))), 0

    async def another() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    other = asyncio.ensure_future(another())
    async with aclosing(api._event_stream(5000, "", live=False)) as stream:
        found = [told(piece)["reason"] async for piece in stream]
    other.cancel()
    assert found == [str(number) for number in range(5000)]
    assert turns >= 5000 / 200


async def test_what_was_told_is_not_kept_and_nothing_is_told_twice() -> None:
    """The whole past stayed in memory for the life of a stream, and each event was looked for in all of it."""
    journal = Journal(*map(event, range(3 * FEED_MAX)))
    kept = [weakref.ref(past) for past in journal.rows]
    stopping = asyncio.Event()
    async with aclosing(api_of(journal, stopping)._event_stream(PAST_MAX, "", live=True)) as stream:
        for number in range(3 * FEED_MAX):
            assert told(await anext(stream))["at"] == number
        journal.rows.clear()
        for number in range(2 * FEED_MAX, 3 * FEED_MAX):  # while the past was read, all of these arrived
            journal.feed.publish(event(number))
        waiting = asyncio.ensure_future(anext(stream))
        while "<Feed 0 waiting" not in repr(next(iter(journal.feed._readers))):  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0)
        journal.feed.publish(event(3 * FEED_MAX))
        assert told(await waiting)["at"] == 3 * FEED_MAX
        gc.collect()
        assert [ref for ref in kept if ref() is not None] == []


async def test_an_agents_stream_tells_that_events_were_dropped_as_an_event_has_to_be() -> None:
    """It had neither `at` nor `agent`, `actor` and `outcome`, which the description says every event has."""
    journal = Journal(event(0))
    async with aclosing(api_of(journal)._event_stream(5, "a", live=True)) as stream:
        await anext(stream)
        for number in range(1, FEED_MAX + 4):
            journal.feed.publish(event(number))
        found = told(await anext(stream))
        assert found.keys() >= Event.__required_keys__
        assert (found["kind"], found["count"], found["at"]) == (DROPPED, 3, 3.0)
        assert told(await anext(stream))["at"] == 4.0
