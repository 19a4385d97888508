"""Work that is carried through whoever asked for it, and what arrives until the server stops."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from hive.errors import HiveError
from hive.tasks import spawn

Result = TypeVar("Result")


async def carried_through(work: Coroutine[Any, Any, Result]) -> Result:
    """Awaits `work` in a task of its own: whoever asked for it may leave, it goes on."""
    outcome = await asyncio.shield(spawn(_outcome(work), name="api transition"))
    if isinstance(outcome, HiveError):
        raise outcome
    return outcome


async def _outcome(work: Coroutine[Any, Any, Result]) -> Result | HiveError:
    """A refusal is an outcome here: raised, it would be logged as the failure of a task."""
    try:
        return await work
    except HiveError as error:
        return error


async def unless(stopping: asyncio.Event, arrival: Coroutine[Any, Any, Result], *, timeout_s: float) -> Result | None:
    """What arrives; None once `stopping` is set or `timeout_s` have passed."""
    arriving, stopped = spawn(arrival, name="api arrival"), spawn(stopping.wait(), name="api stopping")
    try:
        await asyncio.wait([arriving, stopped], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        return arriving.result() if arriving.done() else None
    finally:
        arriving.cancel()
        stopped.cancel()
