"""Steps of which none is left behind: they are over when their caller is, cancelled or not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, TypeVarTuple

from hive.tasks import spawn

_Args = TypeVarTuple("_Args")
_R = TypeVar("_R")


async def in_thread(work: Callable[[*_Args], _R], *args: *_Args) -> _R:
    """The result of blocking work, which is over when this is, cancelled or not."""
    return await ended(asyncio.to_thread(work, *args))


async def ended(work: Coroutine[Any, Any, _R]) -> _R:
    """The result of work that is over when this is, cancelled or not, and however often: a wake is several changes."""
    task, cancelled = spawn(outcome(work), name="parking step"), None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    found = task.result()
    if isinstance(found, Exception):
        raise found
    return found


async def outcome(work: Coroutine[Any, Any, _R]) -> _R | Exception:
    """The result, or what was raised instead: to be raised where it is waited for."""
    try:
        return await work
    except Exception as error:
        return error
