"""The last word on responses made in the background that are not kept whole: failed ones, cancelled ones.

Their objects are put together from the recorded events, up to `output_max_mb` of them. That is done once, in a thread,
and for one response of an agent at a time: clients poll, and the daemon wakes agents on the same loop.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from weakref import WeakValueDictionary

import msgspec

from hive.dialects.openai_responses_background import Event, OutputSoFar, whole_event
from hive.errors import NotFound
from hive.lifecycle.background_events import RESPONSE, end_fields
from hive.lifecycle.job_output import JobOutputReader
from hive.store.jobs import StoredJob

KEPT_BYTES = 32 * 1024 * 1024
"""Of objects that are held in memory; those asked for last stay."""
AT_ONCE = 2
"""Objects in the making, of different agents."""


class FinalResponses:
    """`path_of`: where the output of a job is; `before`: a response's object before it was begun."""

    def __init__(self, path_of: Callable[[str], Path], before: Callable[[StoredJob], Awaitable[Event]]) -> None:
        self._path_of = path_of
        self._before = before
        self._held: OrderedDict[str, bytes] = OrderedDict()
        """By job, the one asked for last at the end."""
        self._bytes = 0
        self._making: set[str] = set()
        self._alone: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """Locks by agent, as long as it asks."""
        self._at_once = asyncio.Semaphore(AT_ONCE)

    def __repr__(self) -> str:
        return f"<FinalResponses {len(self._held)} of {self._bytes} bytes>"

    async def of(self, job: StoredJob) -> bytes:
        """The object of a response whose job has ended. Raises NotFound where nothing of it is kept any more."""
        if (found := self._found(job.id)) is not None:
            return found
        agent = str(job.plan["agent"])
        alone = self._alone.get(agent)
        if alone is None:
            alone = self._alone[agent] = asyncio.Lock()
        async with alone, self._at_once:
            if (found := self._found(job.id)) is not None:
                return found
            self._making.add(job.id)
            try:
                made = await asyncio.to_thread(_made, job, await self._before(job), self._path_of(job.id))
                if job.id in self._making:
                    self._hold(job.id, made)
            finally:
                self._making.discard(job.id)
            return made

    def forget(self, job: str) -> None:
        """Nothing of it is in memory when this returns."""
        self._making.discard(job)
        self._bytes -= len(self._held.pop(job, b""))

    def _found(self, job: str) -> bytes | None:
        found = self._held.get(job)
        if found is not None:
            self._held.move_to_end(job)
        return found

    def _hold(self, job: str, made: bytes) -> None:
        self._held[job] = made
        self._bytes += len(made)
        while self._bytes > KEPT_BYTES:
            _, gone = self._held.popitem(last=False)
            self._bytes -= len(gone)


def _made(job: StoredJob, queued: Event, path: Path) -> bytes:
    """Puts it together from what was recorded, which is nothing where that is kept no more. Blocks."""
    output, reader = OutputSoFar(), JobOutputReader(path)
    with suppress(NotFound):
        while events := reader.read():
            for event in events:
                if event.event == RESPONSE:
                    output.take(event.data)
    if output.end is not None:
        return msgspec.json.encode(whole_event(output.end, queued)["response"])
    error = job.error or {}
    code, message = str(error.get("code", "")), str(error.get("message", ""))
    return msgspec.json.encode({**queued, **end_fields(job.state, code, message, output)})
