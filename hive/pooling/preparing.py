"""Has the helper keep a supervisor waiting for the slot that is most probably loaded next (`hive.pool.next_up`)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

from hive.errors import HiveError
from hive.host.memory_box import BoxMemory, read_box
from hive.pooling.slot_servers import PoolServers
from hive.tasks import spawn

log = logging.getLogger("hive.pool")

ROOM_BYTES = 256 << 20
"""Memory of the host that must be available: such a supervisor and its warden have 25 MB of their own."""
LATER_S = 0.05
"""From a guess to its order: the start that has just been decided goes first."""
RENEW_S = 60.0
"""It ends by itself where it is not asked for again: worker/waiting.py waits five times as long."""


class Preparing:
    """One wish at a time goes to the helper; what was wished meanwhile, last, is the next one."""

    def __init__(self, helper: PoolServers, *, box: Callable[[], BoxMemory] = read_box) -> None:
        self._helper = helper
        self._box = box
        self._wanted = ""
        self._told = ""
        self._told_at = float("-inf")
        self._hurry = asyncio.Event()
        self._telling: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<Preparing {self._wanted or 'nothing'}>"

    def want(self, slot: str, *, at_once: bool = False) -> None:
        """From now on one of this slot is to wait; empty: none. Not `at_once`: what the helper does now goes first."""
        self._wanted = slot
        if at_once:
            self._hurry.set()
        else:
            self._hurry.clear()
        if self._is_news() and (self._telling is None or self._telling.done()):
            self._telling = spawn(self._tell(), name="prepare")

    def used(self, slot: str) -> None:
        """A start of this slot has taken the one that waited, if there was one."""
        if self._told == slot:
            self._told = ""

    def helper_here(self) -> None:
        """Another helper has connected: none waits there."""
        self._told = ""

    def _is_news(self) -> bool:
        is_old = bool(self._told) and time.monotonic() - self._told_at > RENEW_S
        return self._wanted != self._told or is_old

    async def _tell(self) -> None:
        while self._is_news():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LATER_S):
                    await self._hurry.wait()
            self._told, self._told_at = self._wanted, time.monotonic()
            available = self._box().available_bytes
            slot = "" if available is not None and available < ROOM_BYTES else self._wanted
            try:
                await self._helper.slot_prepare(slot)
            except HiveError as error:  # a load does without; it is asked for again in a while
                log.debug("not_prepared slot=%s error=%s", slot, error.message)
