"""The recorded events of one response on their way to one reader: whole, in order, and with an end in every case."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

from hive.dialects.openai_responses_background import Event, OutputSoFar, as_sse, first_events, whole_event
from hive.domain import JobState
from hive.jobs.order import JobEvent
from hive.link.background import BackgroundEventsAre
from hive.tasks import spawn

TOGETHER_S = 0.005
"""Events that come within this of one another go in one answer."""
ENDED, RESPONSE = "ended", "response"


def end_fields(state: JobState, code: str, message: str, output: OutputSoFar) -> Event:
    """Fields of the object of a response that did not come to its end.

    >>> end_fields(JobState.CANCELLED, "", "", OutputSoFar())
    {'status': 'cancelled', 'output': []}
    """
    if state is JobState.CANCELLED:
        return {"status": "cancelled", "output": output.told()}
    told = f"{code}: {message}" if code and code not in message else message
    return {"status": "failed", "output": output.told(), "error": {"code": "server_error", "message": told}}


class EventCursor:
    """A reader's place among the events of a job. `queued`: the answer's object before it was begun, with its id.

    `events`: all of the job's, from the first; they go on while it runs, and end behind `ended`.
    """

    def __init__(self, queued: Mapping[str, Any], events: AsyncIterator[JobEvent], after: int) -> None:
        self.last = after
        self._queued = queued
        self._events = events
        self._first = first_events(queued)
        self._output = OutputSoFar()
        self._coming: asyncio.Task[JobEvent | None] | None = None
        self._is_over = False

    def __repr__(self) -> str:
        return f"<EventCursor after {self.last}>"

    async def read(self, most_bytes: int, wait_s: float) -> BackgroundEventsAre:
        """The next events, some `most_bytes` of them; where there are none, as soon as there is one, or none after
        `wait_s`. Raises NotFound where they are kept no more."""
        said = [self._told(event) for event in self._first]
        self._first = []
        size = sum(map(len, said))
        while not self._is_over and size < most_bytes:
            event = await self._next(TOGETHER_S if size else wait_s)
            if event is None:
                break
            piece = self._take(event)
            said.append(piece)
            size += len(piece)
        return BackgroundEventsAre(events=b"".join(said), last=self.last, is_over=self._is_over)

    async def _next(self, wait_s: float) -> JobEvent | None:
        """None where none came in time, and at the end."""
        if self._coming is None:
            self._coming = spawn(self._following(), name="next event")
        done, _ = await asyncio.wait({self._coming}, timeout=wait_s)
        if not done:
            return None
        coming, self._coming = self._coming, None
        found = coming.result()
        self._is_over = found is None
        return found

    async def _following(self) -> JobEvent | None:
        return await anext(self._events, None)

    def _take(self, event: JobEvent) -> bytes:
        """The bytes for the reader of an event of the job; empty for what is none of the response's. The last one is
        told once the job has ended: a client that hears it and asks for the response is given all of it."""
        if event.event == RESPONSE:
            self._output.take(event.data)
            return b"" if self._output.end is not None else self._told(event.data)
        if event.event != ENDED:
            return b""
        self._is_over = True
        return self._told(self._output.end or self._ending(event.data))

    def _ending(self, ended: Mapping[str, Any]) -> Event:
        """The last event where the job did not come to record one. Clients know no event for what was cancelled."""
        state = JobState.CANCELLED if ended.get("status") == "cancelled" else JobState.FAILED
        fields = end_fields(state, str(ended.get("reason", "")), str(ended.get("detail", "")), self._output)
        return {"type": "response.failed", "response": fields, "sequence_number": self._output.number + 1}

    def _told(self, event: Event) -> bytes:
        number = event["sequence_number"]
        if number <= self.last:
            return b""
        self.last = number
        return as_sse(whole_event(event, self._queued))

    def close(self) -> None:
        if self._coming is not None:
            self._coming.cancel()
            self._coming = None
