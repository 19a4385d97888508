"""Kept responses, as the proxy sends them and asks for them: the daemon stores them (link/responses.py).

Only a request that names a stored response waits here. Each agent asks one thing at a time, and few at once ask at all:
so the answers that are held unread are bounded.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import TypeVar
from weakref import WeakValueDictionary

from hive.errors import HiveError, LinkLost, NotFound, PreviousNotFound, Refusal, Saturated
from hive.link.link import Link
from hive.link.message import LinkMessage
from hive.link.messages import Done
from hive.link.responses import (
    AskHistory,
    AskInputItems,
    AskResponse,
    DropResponse,
    HistoryIs,
    KeepResponse,
    ResponseIs,
)
from hive.proxy.connection_limits import Seldom
from hive.store.response_items import ItemPage

log = logging.getLogger("hive.proxy")
Answer = TypeVar("Answer", bound=LinkMessage)

ANSWER_S = 10.0
"""The daemon reads a conversation of 16 MiB in some 50 ms; those of other agents may be before it."""
AT_ONCE = 4
"""Questions under way, of different agents."""
UNSENT_MOST_BYTES = 32 * 1024 * 1024
"""Bytes on their way to the daemon beyond which nothing more is given it to keep: wakes are behind them."""
ANSWER_MOST_BYTES = 32 * 1024 * 1024
"""Bound for an answer of the daemon's, also if bodies may be longer: half of the largest frame of the link."""


class StoredResponses:
    """`link`: the live link to the daemon; it raises LinkLost where there is none."""

    def __init__(self, link: Callable[[], Link]) -> None:
        self._link = link
        self._alone: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """Locks by agent, as long as it asks."""
        self._at_once = asyncio.Semaphore(AT_ONCE)
        self._seldom = Seldom()
        self.dropped = 0
        """Responses that were to be kept and could not be told."""

    def __repr__(self) -> str:
        return f"<StoredResponses {len(self._alone)} agents ask, {self.dropped} dropped>"

    @property
    def is_here(self) -> bool:
        """Whether something can be kept now."""
        try:
            return not self._link().lost
        except LinkLost:
            return False

    def keep(self, agent: str, response_id: str, *, previous_id: str, asked: bytes, response: bytes) -> bool:
        """Tells the daemon, and waits for nothing: what the agent asks from now on finds it. Whether it could be told.

        `asked`: the `input` of the request, without what it went on from; `response`: the answer's object; JSON.
        """
        try:
            link = self._link()
            if link.unsent_bytes + len(asked) + len(response) > UNSENT_MOST_BYTES:
                raise Saturated("the daemon reads too slowly")
        except HiveError as error:
            self.dropped += 1
            if (more := self._seldom.left_out("response_not_kept", time.monotonic())) is not None:
                log.warning("response_not_kept agent=%s error=%r more=%d", agent, error.message, more)
            return False
        link.tell(
            KeepResponse(agent=agent, id=response_id, previous_id=previous_id or None, asked=asked, response=response)
        )
        return True

    async def history(self, agent: str, previous_id: str, items: list[str], *, most_bytes: int) -> HistoryIs:
        """The conversation up to the response that is named, an array of items; and the items of these ids.

        Raises PreviousNotFound, NotFound (an item), BadRequest (too long), Saturated where the daemon cannot be asked.
        """
        most_bytes = min(most_bytes, ANSWER_MOST_BYTES)
        question = AskHistory(agent=agent, previous_id=previous_id, items=items, most_bytes=most_bytes)
        try:
            return await self._ask(agent, question, HistoryIs)
        except NotFound as error:
            if error.message.startswith("Response"):
                raise PreviousNotFound(f"Previous r{error.message[1:]}") from None
            raise

    async def get(self, agent: str, response_id: str) -> bytes:
        """The answer's object. Raises NotFound, Saturated."""
        return (await self._ask(agent, AskResponse(agent=agent, id=response_id), ResponseIs)).content

    async def input_items(self, agent: str, response_id: str, page: ItemPage, *, most_bytes: int) -> bytes:
        """A page of the model's input, as the API lists it. Raises NotFound, BadRequest, Saturated."""
        question = AskInputItems(
            agent=agent,
            id=response_id,
            limit=page.limit,
            after=page.after,
            ascending=page.ascending,
            most_bytes=min(most_bytes, ANSWER_MOST_BYTES),
        )
        return (await self._ask(agent, question, ResponseIs)).content

    async def delete(self, agent: str, response_id: str) -> None:
        """Returns once it is on the disk no more. Raises NotFound, Saturated."""
        await self._ask(agent, DropResponse(agent=agent, id=response_id), Done)

    async def _ask(self, agent: str, question: LinkMessage, answer: type[Answer]) -> Answer:
        alone = self._alone.get(agent)
        if alone is None:
            alone = self._alone[agent] = asyncio.Lock()
        async with alone, self._at_once:
            return await ask_daemon(self._link, agent, question, answer, timeout_s=ANSWER_S)


async def ask_daemon(
    link: Callable[[], Link], agent: str, question: LinkMessage, answer: type[Answer], *, timeout_s: float
) -> Answer:
    """The daemon's answer about responses. Raises what it refuses, and Saturated where it cannot be asked."""
    try:
        return await link().ask(question, answer, timeout_s=timeout_s)
    except Refusal:
        raise
    except LinkLost:
        raise Saturated("what is kept of responses cannot be read: Hive's daemon is away", retry_after_s=1) from None
    except HiveError as error:  # its words may name files
        log.warning("responses_not_read agent=%s error=%r", agent, error.message)
        raise Saturated("what is kept of responses cannot be read now", retry_after_s=5) from None
