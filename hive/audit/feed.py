"""Events to many slow or fast readers, without one holding up another or the daemon."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Self

Event = dict[str, Any]

DROPPED = "events.dropped"
FEED_MAX = 1000
"""Events one reader may lag behind; beyond it its oldest are dropped and it is told how many."""


class Feed(AbstractContextManager["Feed"], AsyncIterator[Event]):
    """One reader's events. Where n were dropped stands one of the kind `events.dropped` with `count` n, as of the time
    of the last of them."""

    def __init__(self, readers: set[Feed], limit: int) -> None:
        self._readers = readers
        self._limit = limit
        self._events: deque[Event] = deque()
        self._dropped = 0
        self._dropped_to = 0.0
        self._arrived = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Feed {len(self._events)} waiting, {self._dropped} dropped>"

    def put(self, event: Event) -> None:
        if len(self._events) == self._limit:
            self._dropped_to = self._events.popleft()["at"]
            self._dropped += 1
        self._events.append(event)
        self._arrived.set()

    async def __anext__(self) -> Event:
        await self._arrived.wait()
        if self._dropped:
            count, self._dropped = self._dropped, 0
            about = {"agent": "hive", "actor": "hive", "outcome": "ok"}
            return {"at": self._dropped_to, "kind": DROPPED, **about, "count": count}
        event = self._events.popleft()
        if not self._events:
            self._arrived.clear()
        return event

    def __enter__(self) -> Self:
        self._readers.add(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._readers.discard(self)


class Events:
    """Events, told to every reader there is now."""

    def __init__(self) -> None:
        self._readers: set[Feed] = set()

    def __repr__(self) -> str:
        return f"<Events {len(self._readers)} readers>"

    def publish(self, event: Event) -> None:
        for reader in self._readers:
            reader.put(event)

    def subscribe(self, limit: int = FEED_MAX) -> Feed:
        """A reader; it gets what is published while it is entered (`with`)."""
        return Feed(self._readers, limit)
