"""Waiting until something is so. No test is about the time it takes: the limit keeps one that fails from hanging."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable

LIMIT_S = 60.0
"""A machine that runs five tests on two cores may stand still for seconds."""
LOOK_S, ASK_S = 0.002, 0.02
"""Between two looks, and between two questions to another process."""


async def until(condition: Callable[[], object], *, what: object = "", within_s: float = LIMIT_S) -> None:
    """Returns once the condition, or the answer that it gives to be awaited, is true.

    `what` is told where it does not come true, or what it returns is. `within_s`: more than the limit of all. Raises
    AssertionError.
    """
    limit_s = max(within_s, LIMIT_S)
    deadline = time.monotonic() + limit_s
    while True:
        found = condition()
        asks = inspect.isawaitable(found)
        if await found if inspect.isawaitable(found) else found:
            return
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {limit_s:g} s: {what() if callable(what) else what}")
        await asyncio.sleep(ASK_S if asks else LOOK_S)
