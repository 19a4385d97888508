"""Ctrl-C and its relatives: the first asks `hive up` to end in order, the second to hurry."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable
from typing import TypeVar

from hive.errors import HiveError
from hive.tasks import spawn

Result = TypeVar("Result")
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """Counts the signals that ask for the end."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.hurry = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._taken = [number for number in ENDING if signal.getsignal(number) is not signal.SIG_IGN]  # nohup ignores
        for number in self._taken:
            self._loop.add_signal_handler(number, self._count)

    def __repr__(self) -> str:
        return f"<Interrupts asked={self.asked.is_set()} hurry={self.hurry.is_set()}>"

    def _count(self) -> None:
        if self.asked.is_set():
            self.hurry.set()
        self.asked.set()

    def close(self) -> None:
        for number in self._taken:
            self._loop.remove_signal_handler(number)


async def unless(event: asyncio.Event, work: Awaitable[Result], *, name: str) -> Result | None:
    """The result of `work`, or None as soon as `event` is set: then it is cancelled. Raises what `work` raises."""

    async def run() -> Result | HiveError:
        try:
            return await work
        except HiveError as error:
            return error  # raised below, for the caller alone: it is no fault of a task

    task = spawn(run(), name=name)
    waiting = spawn(_until(event), name=f"{name}-or-not")
    try:
        await asyncio.wait((task, waiting), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            return None
        result = task.result()
        if isinstance(result, HiveError):
            raise result
        return result
    finally:
        for one in (task, waiting):
            one.cancel()
        await asyncio.wait((task, waiting))


async def _until(event: asyncio.Event) -> None:
    await event.wait()
