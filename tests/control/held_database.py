"""A database whose writer is held up, so that somebody can leave in the middle of a write."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from typing import Any

from hive.store.database import Database

IS_CANCELLED = ContextVar("is_cancelled", default=False)
"""Set in the work that will be cancelled, and in the tasks that it starts."""


class Hold:
    """A write that goes on until it is let go; what is written meanwhile waits, or waits for the same commit."""

    def __init__(self, database: Database) -> None:
        self._begun, self._let_go = threading.Event(), threading.Event()
        self.writing = asyncio.ensure_future(database.write(self._work))

    def _work(self, _: sqlite3.Connection) -> None:
        self._begun.set()
        self._let_go.wait()

    async def begun(self) -> None:
        await asyncio.to_thread(self._begun.wait)

    def let_go(self) -> None:
        self._let_go.set()


async def cancelled_while_it_writes(database: Database, work: Coroutine[Any, Any, object]) -> None:
    """`work` is cancelled once its write has begun, before that is committed; returns when it is on the disk."""
    first = Hold(database)
    await first.begun()
    write, is_queued = database.write, asyncio.Event()

    def noting(change: Callable[[sqlite3.Connection], Any]) -> Coroutine[Any, Any, Any]:
        if IS_CANCELLED.get():  # other tasks of the daemon write, too
            asyncio.get_running_loop().call_soon(is_queued.set)
        return write(change)

    database.write = noting  # type: ignore[method-assign, assignment]
    token = IS_CANCELLED.set(True)
    doing = asyncio.ensure_future(work)
    IS_CANCELLED.reset(token)
    await is_queued.wait()
    before = database._jobs.qsize()
    second = Hold(database)
    while database._jobs.qsize() <= before:  # noqa: ASYNC110 - a thread's queue has no event
        await asyncio.sleep(0)
    del database.write
    first.let_go()
    await second.begun()  # in one transaction with the write of `work`, behind it
    doing.cancel()
    await asyncio.wait([doing])
    second.let_go()
    await asyncio.wait([first.writing, second.writing])
    await database.write(lambda conn: None)
