"""Responses that are made in the background, as the proxy asks the daemon for them (link/background.py), and their
events on the way to a client.

The daemon is asked for events as fast as the client reads them, so none are held here. A daemon that is away is waited
for: its jobs have failed by then, and their streams say so.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from weakref import WeakValueDictionary

from hive.dialects.errors import heartbeat
from hive.domain import Dialect
from hive.errors import LinkLost, RequestTimeout, Saturated
from hive.link.background import (
    AskBackground,
    AskBackgroundEvents,
    AskBeginBackground,
    BackgroundEventsAre,
    BackgroundIs,
    CancelBackground,
    DropBackground,
)
from hive.link.link import Link
from hive.link.messages import Done
from hive.proxy.stored_responses import ANSWER_S, AT_ONCE, UNSENT_MOST_BYTES, ask_daemon

EVENTS_MOST_BYTES = 64 * 1024
"""Of one answer about events; a client that does not read holds no more than one."""
WAIT_S = 10.0
"""The daemon answers after so long where there is nothing to tell."""
AWAY_S = 60.0
AGAIN_S = 0.5
"""Between attempts to ask a daemon that is away, which are given up after `AWAY_S`."""


class BackgroundSource:
    """`link`: the live link to the daemon; it raises LinkLost where there is none.

    Every method raises what the daemon refuses, and Saturated where it cannot be asked.
    """

    def __init__(self, link: Callable[[], Link]) -> None:
        self._link = link
        self._alone: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()
        """Locks by question and agent, as long as it asks: so the objects that are held unread are bounded."""
        self._at_once = asyncio.Semaphore(AT_ONCE)

    def __repr__(self) -> str:
        return f"<BackgroundSource {len(self._alone)} ask>"

    def _one_of(self, question: str, agent: str) -> asyncio.Lock:
        alone = self._alone.get((question, agent))
        if alone is None:
            alone = self._alone[question, agent] = asyncio.Lock()
        return alone

    @property
    def _unsent_bytes(self) -> int:
        try:
            return self._link().unsent_bytes
        except LinkLost:
            return 0

    async def begin(
        self, agent: str, *, model: str, request: bytes, response: bytes, is_local_only: bool
    ) -> BackgroundIs:
        """Begins the job that makes a response. `request`: the body as it came; `response`: the answer's object without
        its id; `is_local_only`: it is not to leave this box."""
        if self._unsent_bytes + len(request) > UNSENT_MOST_BYTES:
            raise Saturated("the daemon reads too slowly", retry_after_s=5)
        question = AskBeginBackground(
            agent=agent, model=model, request=request, response=response, is_local_only=is_local_only
        )
        return await ask_daemon(self._link, agent, question, BackgroundIs, timeout_s=ANSWER_S)

    async def get(self, agent: str, name: str) -> bytes:
        """The answer's object as it stands."""
        question = AskBackground(agent=agent, id=name)
        async with self._one_of("get", agent), self._at_once:
            return (await ask_daemon(self._link, agent, question, BackgroundIs, timeout_s=ANSWER_S)).content

    async def cancel(self, agent: str, name: str) -> bytes:
        """The answer's object, once nothing more comes to it."""
        question = CancelBackground(agent=agent, id=name)
        async with self._one_of("cancel", agent):
            return (await ask_daemon(self._link, agent, question, BackgroundIs, timeout_s=ANSWER_S)).content

    async def delete(self, agent: str, name: str) -> None:
        """Returns once it is ended, and on the disk no more."""
        await ask_daemon(self._link, agent, DropBackground(agent=agent, id=name), Done, timeout_s=ANSWER_S)

    async def events(self, agent: str, name: str, *, after: int, wait_s: float) -> BackgroundEventsAre:
        """The events behind this number."""
        question = AskBackgroundEvents(
            agent=agent, id=name, after=after, most_bytes=EVENTS_MOST_BYTES, wait_s=min(wait_s, WAIT_S)
        )
        return await ask_daemon(self._link, agent, question, BackgroundEventsAre, timeout_s=ANSWER_S + wait_s)


class BackgroundStream:
    """The events of one response on their way to its client. `number`: of the last one that was sent.

    `beat_s`: between signs of life, 0 for none; `blocked_s`: a client may read nothing for so long; `is_leaving`:
    whether the proxy is on its way out, which no stream holds up, as it can be gone on with.
    """

    def __init__(
        self,
        source: BackgroundSource,
        agent: str,
        name: str,
        *,
        after: int,
        beat_s: float,
        blocked_s: float,
        is_leaving: Callable[[], bool],
    ) -> None:
        self.number = after
        self._source = source
        self._agent = agent
        self._name = name
        self._beat_s = beat_s
        self._blocked_s = blocked_s
        self._is_leaving = is_leaving
        self._may_write = asyncio.Event()
        self._may_write.set()

    def __repr__(self) -> str:
        return f"<BackgroundStream {self._name} after {self.number}>"

    def hold(self) -> None:
        """The client does not read."""
        self._may_write.clear()

    def go_on(self) -> None:
        self._may_write.set()

    async def next(self) -> BackgroundEventsAre:
        """The first events to send. Raises NotFound, BadRequest, Saturated."""
        return await self._source.events(self._agent, self._name, after=self.number, wait_s=0.0)

    async def relay(self, first: BackgroundEventsAre, write: Callable[[bytes], None]) -> None:
        """Writes `first`, and all that comes behind it, to the last event.

        Raises NotFound where it is deleted meanwhile, Saturated where the daemon does not come back or the proxy
        leaves, RequestTimeout for a client that does not read.
        """
        batch = first
        while True:
            self.number = max(self.number, batch.last)
            if batch.events:
                write(batch.events)
            if batch.is_over:
                return
            if self._is_leaving():
                raise Saturated("Hive's proxy starts anew: ask for the events behind this one", retry_after_s=1)
            await self._until_read()
            batch = await self._next_batch()
            if not batch.events and not batch.is_over and self._beat_s:
                write(heartbeat(Dialect.OPENAI, b"", ""))

    async def _until_read(self) -> None:
        try:
            async with asyncio.timeout(self._blocked_s):
                await self._may_write.wait()
        except TimeoutError:
            raise RequestTimeout(f"the client read nothing for {self._blocked_s:g} s") from None

    async def _next_batch(self) -> BackgroundEventsAre:
        away_since: float | None = None
        while True:
            try:
                return await self._source.events(
                    self._agent, self._name, after=self.number, wait_s=self._beat_s or WAIT_S
                )
            except Saturated:
                now = time.monotonic()
                away_since = now if away_since is None else away_since
                if now - away_since >= AWAY_S:
                    raise
                await asyncio.sleep(AGAIN_S)
