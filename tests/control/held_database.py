"""A database whose writer is held up, so that somebody can leave in the middle of a write."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Coroutine
from typing import Any

from hive.store.database import Database


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
    doing = asyncio.ensure_future(work)
    while database._jobs.empty():  # noqa: ASYNC110 - a thread's queue has no event
        await asyncio.sleep(0)
    second = Hold(database)
    while database._jobs.qsize() < 2:  # noqa: ASYNC110
        await asyncio.sleep(0)
    first.let_go()
    await second.begun()  # in one transaction with the write of `work`, behind it
    doing.cancel()
    await asyncio.wait([doing])
    second.let_go()
    await asyncio.wait([first.writing, second.writing])
    await database.write(lambda conn: None)
