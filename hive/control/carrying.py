"""Work that is carried through whoever asked for it, and what arrives until the server stops."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
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


async def waited_for(
    ask: Callable[[float], Coroutine[Any, Any, Result]],
    wait_s: float,
    receive: Callable[[], Awaitable[Any]],
    stopping: asyncio.Event,
) -> Result:
    """What `ask(wait_s)` answers; as it is by now once the client has left or `stopping` is set.

    `receive`: of a request whose body has been read, so that all that still comes is that its client has left. The
    server cancels nobody for that, and what waits on for nobody would be bounded by nothing.
    """
    if not wait_s:
        return await ask(0.0)

    async def until_left() -> None:
        await receive()

    asking = spawn(_outcome(ask(wait_s)), name="api waiting")
    ends = [spawn(until_left(), name="api client"), spawn(stopping.wait(), name="api stopping")]
    try:
        await asyncio.wait([asking, *ends], return_when=asyncio.FIRST_COMPLETED)
        outcome = asking.result() if asking.done() else await ask(0.0)
    finally:
        for task in (asking, *ends):
            task.cancel()
    if isinstance(outcome, HiveError):
        raise outcome
    return outcome


async def unless(stopping: asyncio.Event, arrival: Coroutine[Any, Any, Result], *, timeout_s: float) -> Result | None:
    """What arrives; None once `stopping` is set or `timeout_s` have passed."""
    arriving, stopped = spawn(arrival, name="api arrival"), spawn(stopping.wait(), name="api stopping")
    try:
        await asyncio.wait([arriving, stopped], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        return arriving.result() if arriving.done() else None
    finally:
        arriving.cancel()
        stopped.cancel()
