"""Has the daemon look whether a model is there by now that a request names and nobody knows.

The list is up to `models_refresh_s` old. Who asks for what is in it waits for nobody; who would be refused waits for
this a moment. However many ask, one question is under way, and none is begun soon after the last: who asks for a model
that does not exist costs no more than that.
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


class Waiter:
    """One request that waits; `cancel` where its client leaves."""

    def __init__(self, then: Callable[[], None]) -> None:
        self._then: Callable[[], None] | None = then

    def cancel(self) -> None:
        self._then = None

    def tell(self) -> None:
        then, self._then = self._then, None
        if then is not None:
            then()


class Looking:
    """`ask()`: asks the daemon, and returns when what it found has been told; raises HiveError."""

    def __init__(self, ask: Callable[[], Coroutine[Any, Any, object]]) -> None:
        self._ask = ask
        self._waiting: list[Waiter] = []
        self._is_asking = False
        self._asked_at = float("-inf")

    def __repr__(self) -> str:
        return f"<Looking {len(self._waiting)} waiting>"

    def begin(self) -> bool:
        """Whether a question is under way: one that was, or one that begins now; False so soon after the last."""
        if not self._is_asking:
            now = time.monotonic()
            if now - self._asked_at < AGAIN_S:
                return False
            self._is_asking, self._asked_at = True, now
            spawn(self._look(), name="look for models")
        return True

    def wait(self, then: Callable[[], None]) -> Waiter | None:
        """Calls `then` once the list is new, or nothing came of it within `LOOK_S`; None where nothing is asked."""
        if not self.begin():
            return None
        waiter = Waiter(then)
        self._waiting.append(waiter)
        return waiter

    async def _look(self) -> None:
        with suppress(HiveError, TimeoutError):  # then the old list decides
            async with asyncio.timeout(LOOK_S):
                await self._ask()
        self._is_asking = False
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            waiter.tell()
