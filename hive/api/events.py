"""The part of the API that is about what happens: streams of server-sent events."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from hive.api.params import FOLLOW, Number, named
from hive.api.responses import as_event
from hive.api.routes import EVENTS, RouteRow
from hive.audit.feed import DROPPED, FEED_MAX, Event
from hive.audit.shielded import unless
from hive.domain import Role

if TYPE_CHECKING:
    from hive.api.services import Services

HEARTBEAT_S = 15.0
"""A comment this often keeps proxies and clients from taking a silent event stream for a dead one."""

PAST_MAX = 10_000
"""6 MB, which a reader that does not read keeps in memory; `GET /api/audit` has all of them, page by page."""
TOLD_AT_ONCE = 200
"""Before others have their turn: a millisecond."""

PAST = Number("tail", "So many past events first.", default=20, most=PAST_MAX)


class EventApi:
    """The handlers. The `event` of each is its kind, its `data` an `Event` as JSON. With `follow` a comment comes every
    15 s where nothing happens, and `events.dropped` where a reader was too slow for all of them."""

    def __init__(self, services: Services, *, stopping: asyncio.Event) -> None:
        self._services = services
        self._stopping = stopping

    def rows(self) -> list[RouteRow]:
        one = "/api/agents/{ref}/events"
        return [
            RouteRow(
                "GET",
                "/api/events",
                Role.VIEWER,
                "events",
                self.events,
                "What happened, and what happens.",
                EVENTS,
                query=(PAST, FOLLOW),
            ),
            RouteRow(
                "GET",
                one,
                Role.VIEWER,
                "agent_events",
                self.agent_events,
                "What happened, and happens, to one agent.",
                EVENTS,
                query=(PAST, FOLLOW),
            ),
        ]

    async def events(self, request: Request) -> Response:
        """Events of the whole Hive."""
        return self._streamed(request, "")

    async def agent_events(self, request: Request) -> Response:
        """Events of one agent: also of a removed one, by its id."""
        return self._streamed(request, self._services.roster.once_known(named(request)))

    def _streamed(self, request: Request, agent: str) -> Response:
        return StreamingResponse(
            self._event_stream(PAST.of(request), agent, live=FOLLOW.of(request)),
            media_type="text/event-stream",
            headers={"cache-control": "no-store"},
        )

    async def _event_stream(self, tail: int, agent: str, *, live: bool) -> AsyncGenerator[bytes, None]:
        """Past events, then live ones: listening begins before the past is read, so that none falls between."""
        with self._services.audit_log.subscribe() as feed:
            past, both, seen = deque(await self._services.audit_log.past(tail, agent)), set[bytes](), 0
            while past:
                told = as_event(past.popleft())
                if len(past) < FEED_MAX:
                    both.add(told)  # it may be in the feed, too, which has no more than so many
                yield told
                if len(past) % TOLD_AT_ONCE == 0:
                    await asyncio.sleep(0)
            while live:
                arrival = await unless(self._stopping, _next(feed), timeout_s=HEARTBEAT_S)
                if arrival is None and self._stopping.is_set():
                    return
                if arrival is None:
                    yield b": still here\n\n"
                    continue
                told, seen = as_event(arrival), seen + 1
                if told not in both and _is_of(arrival, agent):
                    yield told
                if seen == FEED_MAX:
                    both.clear()  # all that was waiting in the feed has been told


def _is_of(event: Event, agent: str) -> bool:
    """Whether it is for a follower of this agent; `events.dropped` is for all."""
    return not agent or event["kind"] == DROPPED or event["agent"] == agent


async def _next(feed: AsyncIterator[Event]) -> Event:
    return await anext(feed)
