"""The words of a job on their way to the daemon: in order, in few messages, and no more of them unsent than fits."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from hive.errors import HiveError
from hive.link.jobs import JobWord
from hive.tasks import spawn

TOGETHER_S = 0.05
"""Pieces of text that come within this are told as one."""
UNSENT_MAX_BYTES = 256 * 1024
MERGED = frozenset({"delta", "thinking"})


class Telling:
    """The events of one job. `send(words)` returns once the daemon keeps them; what it raises ends the job."""

    def __init__(self, send: Callable[[list[JobWord]], Awaitable[object]]) -> None:
        self._send = send
        self._words: list[JobWord] = []
        self._bytes = 0
        self._failure: HiveError | None = None
        self._sent = asyncio.Event()
        self._hurry = asyncio.Event()
        self._sending: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<Telling {len(self._words)} words, {self._bytes} B>"

    async def say(self, event: str, data: dict[str, Any]) -> None:
        """Tells it soon. Waits while too much is unsent. Raises what kept the daemon from an earlier one."""
        while self._bytes > UNSENT_MAX_BYTES and self._failure is None:
            self._sent.clear()
            self._hurry.set()
            await self._sent.wait()
        self._check()
        self._take(JobWord(time.time(), event, data))
        if self._sending is None or self._sending.done():
            self._sending = spawn(self._send_all(), name="job words")

    async def flush(self) -> None:
        """Returns once all of it is kept. Raises what kept the daemon from it."""
        while self._sending is not None and not self._sending.done():
            self._hurry.set()
            await asyncio.wait({self._sending})
        self._check()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _take(self, word: JobWord) -> None:
        last = self._words[-1] if self._words else None
        if last is not None and last.event == word.event in MERGED and last.data["turn"] == word.data["turn"]:
            text = word.data["text"]
            last.data["text"] += text
            self._bytes += len(text)
        else:
            self._words.append(word)
            self._bytes += len(msgspec.json.encode(word))

    async def _send_all(self) -> None:
        while self._words:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TOGETHER_S):
                    await self._hurry.wait()
            self._hurry.clear()
            words, self._words, self._bytes = self._words, [], 0
            try:
                await self._send(words)
            except Exception as error:  # a number that no message can hold, too: what is lost is never passed over
                self._failure = error if isinstance(error, HiveError) else HiveError(f"it cannot be told: {error!r}")
                self._words, self._bytes = [], 0
            self._sent.set()
