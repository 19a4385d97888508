"""Work that is carried through after its caller has left, and waits that end when the server stops."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from hive.agents.transition_lock import outcome_of
from hive.errors import Cancelled, HiveError
from hive.tasks import spawn

Result = TypeVar("Result")


async def carried_through(work: Coroutine[Any, Any, Result]) -> Result:
    """Awaits `work` in a task of its own: the caller may leave, the work goes on."""
    outcome = await asyncio.shield(spawn(outcome_of(work), name="api transition"))
    if isinstance(outcome, HiveError):
        raise outcome
    return outcome


async def waited_for(
    ask: Callable[[float], Coroutine[Any, Any, Result]],
    wait_s: float,
    receive: Callable[[], Awaitable[Any]],
    stopping: asyncio.Event,
) -> Result:
    """Awaits the answer of `ask(wait_s)`; takes the present one once the client has left or `stopping` is set.

    `receive`: of a request with its body read, so that the only message to come is that its client has left. The server
    cancels nothing for that, and a wait for a client that has left would be bounded by nothing.
    """
    if not wait_s:
        return await ask(0.0)

    async def until_left() -> None:
        await receive()

    asking = spawn(outcome_of(ask(wait_s)), name="api waiting")
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


async def unless_left(
    work: Coroutine[Any, Any, Result], receive: Callable[[], Awaitable[Any]], stopping: asyncio.Event
) -> Result:
    """Result of `work`, which is cancelled once the client has left or `stopping` is set. Raises Cancelled then.

    `receive`: as for `waited_for`.
    """

    async def until_left() -> None:
        await receive()

    working = spawn(outcome_of(work), name="api asking")
    left, stopped = spawn(until_left(), name="api client"), spawn(stopping.wait(), name="api stopping")
    try:
        await asyncio.wait([working, left, stopped], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Cancelled("the daemon ends" if stopped.done() else "the client left before the answer")
        outcome = working.result()
    finally:
        for task in (working, left, stopped):
            task.cancel()
    if isinstance(outcome, HiveError):
        raise outcome
    return outcome


async def unless(stopping: asyncio.Event, arrival: Coroutine[Any, Any, Result], *, timeout_s: float) -> Result | None:
    """Awaits `arrival`; None once `stopping` is set or `timeout_s` have passed."""
    arriving, stopped = spawn(arrival, name="api arrival"), spawn(stopping.wait(), name="api stopping")
    try:
        await asyncio.wait([arriving, stopped], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        return arriving.result() if arriving.done() else None
    finally:
        arriving.cancel()
        stopped.cancel()
