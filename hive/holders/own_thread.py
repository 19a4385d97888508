"""A thread for what may hang in the kernel: one after the other, never on the loop, and it ends with the process."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

Result = TypeVar("Result")


class OwnThread:
    """Begins with its first work. Unlike a pool's, it holds up neither others nor the end of this process."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop = asyncio.get_running_loop()
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def __repr__(self) -> str:
        return f"<OwnThread {self._name} {self.behind} behind>"

    @property
    def behind(self) -> int:
        """So many works wait for one that hangs."""
        return self._work.qsize()

    def do(self, work: Callable[[], Result]) -> asyncio.Future[Result]:
        """Its result, or the OSError that it raised."""
        done: asyncio.Future[Result] = self._loop.create_future()
        self._work.put(lambda: self._do(work, done))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        return done

    def end(self) -> None:
        """Nothing comes after what it was given."""
        self._work.put(None)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()

    def _do(self, work: Callable[[], Result], done: asyncio.Future[Result]) -> None:
        try:
            found = work()
        except OSError as error:
            self._tell(done, done.set_exception, error)
        else:
            self._tell(done, done.set_result, found)

    def _tell(self, done: asyncio.Future[Any], tell: Callable[[Any], None], what: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(lambda: None if done.done() else tell(what))
