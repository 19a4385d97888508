"""Has the daemon look for a model that a request names and that is not in the list.

The list is up to `models_refresh_s` old. A request for a model in the list does not wait; one that would be refused
waits a moment for a new list. At most one look is under way for all requests, and none is begun soon after the last:
requests for a model that does not exist cost no more than that.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from hive.errors import HiveError
from hive.tasks import spawn

LOOK_S = 2.0
"""A request waits for no longer than that."""
AGAIN_S = 3.0
"""Between the begins of two questions."""


class Looking:
    """`ask()`: asks the daemon, and returns when its findings have come; raises HiveError."""

    def __init__(self, ask: Callable[[], Coroutine[Any, Any, object]]) -> None:
        self._ask = ask
        self._asking: asyncio.Task[None] | None = None
        self._asked_at = float("-inf")

    def __repr__(self) -> str:
        return f"<Looking {'asking' if self._is_asking else 'idle'}>"

    @property
    def _is_asking(self) -> bool:
        return self._asking is not None and not self._asking.done()

    def begin(self) -> bool:
        """Whether a question is under way: one that was, or one that begins now; False so soon after the last."""
        if not self._is_asking:
            now = time.monotonic()
            if now - self._asked_at < AGAIN_S:
                return False
            self._asked_at = now
            self._asking = spawn(self._look(), name="look for models")
        return True

    def wait(self, then: Callable[[], None]) -> asyncio.Task[None] | None:
        """Calls `then` once the list is new, or nothing came of it within `LOOK_S`; None where nothing is asked."""
        if not self.begin() or self._asking is None:
            return None
        return spawn(self._wait(self._asking, then), name="wait for a model")

    async def _look(self) -> None:
        with suppress(HiveError, TimeoutError):  # then the old list decides
            async with asyncio.timeout(LOOK_S):
                await self._ask()

    async def _wait(self, asking: asyncio.Task[None], then: Callable[[], None]) -> None:
        await asyncio.wait([asking])  # a cancelled request leaves the look to the others
        then()
