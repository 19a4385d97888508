"""Responses that agents had kept, as the proxy tells and asks of them: bound in bytes and in time, gone with the agent.

A response is told without an answer to it, and kept in the order of telling: a question that comes behind it finds it.
Until it is written, a killed daemon loses it; nobody was promised more, for the client has the answer itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from hive.agents.transition_lock import outcome_of
from hive.errors import HiveError, NotFound, StoreFull
from hive.link.link import LinkReply, failed
from hive.link.message import LinkMessage
from hive.link.messages import Done
from hive.link.responses import (
    AskHistory,
    AskInputItems,
    AskResponse,
    DropResponse,
    FromProxy,
    HistoryIs,
    KeepResponse,
    ResponseIs,
)
from hive.settings.table import Proxy
from hive.store import responses
from hive.store.response_items import ItemPage, no_such_item
from hive.store.responses import KeptResponse, KeptSum, no_such_response
from hive.store.responses_file import ResponsesFile
from hive.tasks import spawn

log = logging.getLogger("hive.daemon")

EVERY_S = 3600.0
"""Between two looks for what is too old."""
WAITING_MOST_BYTES = 64 * 1024 * 1024
"""Of one agent, told and not written yet; what is beyond is not kept."""
WAITING_ALL_BYTES = 4 * WAITING_MOST_BYTES
"""Of all agents together."""
TOLD_EVERY_S = 60.0
"""A reason for which responses are not kept is logged this often."""
MIB, DAY_S = 1024 * 1024, 86400.0


class MadeInBackground(Protocol):
    """Responses that are being made, or were not made to their end: they go with those that are kept."""

    async def forget(self, agent: str) -> None:
        """All of an agent's are ended and gone when this returns; what fails is logged."""
        ...

    async def forget_all(self) -> None: ...

    async def forget_older(self, before: float) -> None:
        """Those that ended before that time, in Unix seconds, are gone when this returns."""
        ...


class KeptResponses:
    """`is_there`: whether an agent of that id is there; `settings`: those in force. The owner spawns `run`."""

    def __init__(self, file: ResponsesFile, is_there: Callable[[str], bool], settings: Callable[[], Proxy]) -> None:
        self._file = file
        self._is_there = is_there
        self._settings = settings
        self._waiting: Counter[str] = Counter()
        """Agent → bytes told and not written yet."""
        self._look_again = asyncio.Event()
        self._told_at: dict[str, float] = {}
        self.dropped = 0
        """Responses that were to be kept and are not."""
        self.in_background: MadeInBackground | None = None

    def __repr__(self) -> str:
        return f"<KeptResponses {self._waiting.total()} B waiting, {self.dropped} dropped>"

    async def run(self) -> None:
        """Deletes what is too old, too much or orphaned: now, every hour and when settings change. Until cancelled."""
        while True:
            self._look_again.clear()
            if isinstance(error := await outcome_of(self.tidy()), HiveError):
                log.warning("responses_not_tidied error=%s", error.message)
            try:
                async with asyncio.timeout(EVERY_S):
                    await self._look_again.wait()
            except TimeoutError:
                continue

    def settings_changed(self) -> None:
        self._look_again.set()

    async def tidy(self) -> None:
        """Raises as `ResponsesFile.do`."""
        if self.in_background is not None and not self._settings().responses_kept_mb:
            await self.in_background.forget_all()
        proxy, now = self._settings(), time.time()
        most_bytes, before = proxy.responses_kept_mb * MIB, now - proxy.responses_kept_days * DAY_S
        if self.in_background is not None:
            await self.in_background.forget_older(before)
        if not self._file.exists:
            return
        gone = {agent for agent in await self._file.do(responses.agents) if not self._is_there(agent)}
        went, left = await self._file.do(
            lambda conn: responses.tidy(conn, gone=gone, most_bytes=most_bytes, before=before), then_clean=True
        )
        if went:
            log.info("responses_deleted count=%d left=%d", went, left)

    async def forget(self, agent: str) -> None:
        """All of a removed agent's are gone when this returns; where that fails, the next look sees to it."""
        try:
            await self.delete(agent)
        except HiveError as error:
            log.error("responses_not_deleted agent=%s error=%s", agent, error.message)

    async def delete(self, agent: str) -> int:
        """All of the agent's, and how many that were. Raises as `ResponsesFile.do`."""
        if self.in_background is not None:
            await self.in_background.forget(agent)
        if not self._file.exists:
            return 0
        return await self._file.do(lambda conn: responses.forget(conn, agent), then_clean=True)

    async def response(self, agent: str, name: str) -> bytes:
        """The object of one that is kept. Raises NotFound, and as `ResponsesFile.do`."""
        if not self._file.exists:
            raise no_such_response(name)
        return await self._file.do(lambda conn: responses.get(conn, agent, name))

    async def drop(self, agent: str, name: str) -> None:
        """It is kept no more, if it was. Raises as `ResponsesFile.do`."""
        if self._file.exists:
            with contextlib.suppress(NotFound):
                await self._file.do(lambda conn: responses.delete(conn, agent, name), then_clean=True)

    async def summed(self, agent: str) -> KeptSum:
        """Raises as `ResponsesFile.do`."""
        return await self._file.do(lambda conn: responses.summed(conn, agent)) if self._file.exists else KeptSum()

    async def total(self) -> KeptSum:
        """The sum over all agents. Raises as `ResponsesFile.do`."""
        return await self._file.do(responses.total) if self._file.exists else KeptSum()

    async def readable(self) -> Path | None:
        """The file, open for other processes to read; None where there is none. Raises as `ResponsesFile.do`."""
        if not self._file.exists:
            return None
        await self._file.do(lambda conn: None)  # noqa: ARG005 - opens it
        return self._file.path

    def close(self) -> None:
        self._file.close()

    # what the proxy says ------------------------------------------------------------------------------------------

    def hear(self, message: FromProxy, reply: LinkReply | None) -> None:
        """Begins at once, so that everything is done in the order in which it was told."""
        if isinstance(message, KeepResponse):
            self._keep(message)
        elif reply is not None:
            try:
                answer = self._begin(message)
            except HiveError as error:
                reply(failed(error))
            else:
                spawn(_answer(answer, reply), name="kept response")

    def _begin(self, asked: AskHistory | AskResponse | AskInputItems | DropResponse) -> asyncio.Future[LinkMessage]:
        if not self._file.exists:
            raise _nothing_of(asked)
        match asked:
            case AskHistory():
                return self._file.do(lambda conn: _history(conn, asked))
            case AskResponse(agent=agent, id=name):
                return self._file.do(lambda conn: ResponseIs(content=responses.get(conn, agent, name)))
            case AskInputItems(agent=agent, id=name, most_bytes=most):
                page = ItemPage(asked.limit, asked.after, asked.ascending)
                return self._file.do(
                    lambda conn: ResponseIs(content=responses.input_items(conn, agent, name, page, most_bytes=most))
                )
            case DropResponse(agent=agent, id=name):
                return self._file.do(lambda conn: _dropped(conn, agent, name), then_clean=True)

    def _keep(self, told: KeepResponse) -> None:
        most_bytes, size = self._settings().responses_kept_mb * MIB, len(told.asked) + len(told.response)
        if not most_bytes or not self._is_there(told.agent):
            return  # it was turned off, or the agent removed, while the answer was under way
        if self._waiting[told.agent] + size > WAITING_MOST_BYTES or self._waiting.total() + size > WAITING_ALL_BYTES:
            self._not_kept(told.agent, StoreFull("more is told than the disk takes"))
            return
        one = KeptResponse(told.agent, told.id, told.previous_id or None, told.asked, told.response)
        now = time.time()

        def work(conn: sqlite3.Connection) -> int:
            self._file.room_for(size)
            return responses.keep(conn, one, most_bytes=most_bytes, now=now)

        try:
            kept = self._file.do(work)
        except HiveError as error:
            self._not_kept(told.agent, error)
            return
        self._waiting[told.agent] += size
        kept.add_done_callback(lambda done: self._kept(told.agent, size, done))

    def _kept(self, agent: str, size: int, done: asyncio.Future[int]) -> None:
        self._waiting[agent] -= size
        if self._waiting[agent] <= 0:
            del self._waiting[agent]
        if done.cancelled():
            return
        error = done.exception()
        if isinstance(error, HiveError):
            self._not_kept(agent, error)
        elif error is not None:
            self.dropped += 1
            log.error("response_not_kept agent=%s", agent, exc_info=error)

    def _not_kept(self, agent: str, error: HiveError) -> None:
        self.dropped += 1
        now = time.monotonic()
        if now - self._told_at.get(error.code, -TOLD_EVERY_S) >= TOLD_EVERY_S:
            self._told_at[error.code] = now
            log.warning("response_not_kept agent=%s error=%r dropped=%d", agent, error.message, self.dropped)


def _nothing_of(asked: AskHistory | AskResponse | AskInputItems | DropResponse) -> NotFound:
    if not isinstance(asked, AskHistory):
        return no_such_response(asked.id)
    return no_such_item("".join(asked.items[:1])) if not asked.previous_id else no_such_response(asked.previous_id)


def _history(conn: sqlite3.Connection, asked: AskHistory) -> LinkMessage:
    history, most = b"[]", asked.most_bytes
    if asked.previous_id:
        history = responses.history(conn, asked.agent, asked.previous_id, most_bytes=most)
    items = responses.items_named(conn, asked.agent, asked.items, most_bytes=most - len(history))
    return HistoryIs(history=history, items=items)


def _dropped(conn: sqlite3.Connection, agent: str, name: str) -> LinkMessage:
    responses.delete(conn, agent, name)
    return Done()


async def _answer(answer: asyncio.Future[LinkMessage], reply: LinkReply) -> None:
    try:
        reply(await answer)
    except HiveError as error:
        reply(failed(error))
    except Exception:
        reply(failed(HiveError("what was kept cannot be read")))
        raise
