"""One transition of an agent at a time, each in a task of its own, and the waits in it can be cut short."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from hive.errors import HiveError, NotFound
from hive.tasks import spawn

log = logging.getLogger("hive.agents")
Result = TypeVar("Result")
Work = Callable[[], Coroutine[Any, Any, Result]]


class Interrupted(Exception):
    """Something happened to the agent that ends what was being done to it."""


class TransitionLock:
    """The right to act on one agent: one holder at a time, in the order of asking."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop = asyncio.get_running_loop()
        self._lock = asyncio.Lock()
        self._interrupted: asyncio.Future[str] = self._loop.create_future()
        self._asked = 0
        self._done = 0
        self._ended = False

    def __repr__(self) -> str:
        return f"<TransitionLock of {self._name}, {'taken' if self.taken else 'free'}>"

    @property
    def taken(self) -> bool:
        """Whether a task has the turn or waits for it. (Between two holders the lock itself is free.)"""
        return self._asked > self._done

    @property
    def moment(self) -> int:
        """Grows when a turn is asked for and when one ends: the same before and after means that nothing was done."""
        return self._asked + self._done

    async def take(self, work: Work[Result], verb: str) -> Result:
        """Runs `work` when nothing else is being done. The caller may leave, the work goes on.

        Raises the HiveError that `work` raises, NotFound after `end`.
        """
        self._asked += 1
        outcome = await asyncio.shield(spawn(self._alone(work), name=f"{verb} {self._name}"))
        if isinstance(outcome, HiveError):
            raise outcome
        return outcome

    def follow(self, work: Work[None], verb: str) -> None:
        """Takes a turn as `take` does, with no caller waiting for the result."""
        self._asked += 1
        spawn(self._followed(work, verb), name=f"{verb} {self._name}")

    def end(self) -> None:
        """Refuses a turn to all that still wait for one."""
        self._ended = True

    async def free(self) -> None:
        """Returns when no turn is taken."""
        async with self._lock:
            pass

    def interrupt(self, reason: str) -> None:
        """Ends the wait under way, if it is one that can be ended."""
        if not self._interrupted.done():
            self._interrupted.set_result(reason)

    def go_on(self) -> None:
        """Raises Interrupted where this turn was."""
        if self._interrupted.done():
            raise Interrupted(self._interrupted.result())

    async def first(self, task: asyncio.Task[Result]) -> Result:
        """Returns the result of `task`. Raises Interrupted as soon as this turn is; the task then ends by itself."""
        either: list[asyncio.Future[Any]] = [task, self._interrupted]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        self.go_on()
        return task.result()

    async def unless_interrupted(self, work: Coroutine[Any, Any, Result]) -> Result:
        """`first` of `work`. Raises what `work` raises, too."""
        outcome = await self.first(spawn(outcome_of(work), name=f"step {self._name}"))
        if isinstance(outcome, HiveError):
            raise outcome
        return outcome

    async def nap(self, seconds: float) -> None:
        """Waits, shorter where something happens to the agent."""
        if self._interrupted.done():
            self._interrupted = self._loop.create_future()
        await asyncio.wait([self._interrupted], timeout=seconds)

    async def _followed(self, work: Work[None], verb: str) -> None:
        outcome = await self._alone(work)
        if isinstance(outcome, HiveError) and not isinstance(outcome, NotFound):
            log.warning("agent_transition_failed agent=%s verb=%s error=%s", self._name, verb, outcome.message)

    async def _alone(self, work: Work[Result]) -> Result | HiveError:
        async with self._lock:
            try:
                if self._ended:
                    return NotFound(f"{self._name} was removed")
                self._interrupted = self._loop.create_future()
                return await outcome_of(work())
            finally:
                self._done += 1


async def outcome_of(work: Coroutine[Any, Any, Result]) -> Result | HiveError:
    """The result of `work` or the HiveError it raises: a task with a failure never awaited is no fault to log."""
    try:
        return await work
    except HiveError as error:
        return error
