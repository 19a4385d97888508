"""Requests that left the box, as events: told of their usage rows, so each is counted once, whoever was restarted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

from hive.domain import UsageEvent

EVENT = "request.left_box"
TOLD_EVERY_S = 60.0
"""For an agent and a model one event in so long; the next one says how many there were since the last."""
KEPT = 1000


class LeftBox:
    """`note(agent, model, tenant, requests)` is called for each event. The caller passes the time (monotonic).

    >>> told = []
    >>> left = LeftBox(lambda *event: told.append(event))
    >>> one = UsageEvent(id="1", epoch="e", event_no=1, agent_id="a", tenant="t", model="m", backend="remote",
    ...     endpoint="/v1/chat/completions", far=True)
    >>> left.ended([one, one], 0.0); left.ended([one], 1.0); left.ended([one], 2.0); left.ended([], 61.0); told
    [('a', 'm', 't', 2), ('a', 'm', 't', 2)]
    """

    def __init__(self, note: Callable[[str, str, str, int], None]) -> None:
        self._note = note
        self._told_at: dict[tuple[str, str], float] = {}
        self._counts: dict[tuple[str, str], tuple[str, int]] = {}

    def __repr__(self) -> str:
        return f"<LeftBox {sum(count for _, count in self._counts.values())} not told>"

    async def run(self) -> None:
        """Says of what was kept once it is time to, until it is cancelled."""
        while True:
            await asyncio.sleep(TOLD_EVERY_S)
            self.ended([], time.monotonic())

    def ended(self, events: Iterable[UsageEvent], now: float) -> None:
        """These requests have ended. Says of those that left, or keeps their number until it is time to."""
        for event in events:
            if event.far:
                key = event.agent_id, event.model
                self._counts[key] = event.tenant, self._counts.get(key, ("", 0))[1] + 1
        due = [key for key in self._counts if now - self._told_at.get(key, float("-inf")) >= TOLD_EVERY_S]
        for key in due:
            if len(self._told_at) >= KEPT:
                self._told_at = {one: at for one, at in self._told_at.items() if now - at < TOLD_EVERY_S}
            self._told_at[key] = now
            tenant, count = self._counts.pop(key)
            self._note(*key, tenant, count)
