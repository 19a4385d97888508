"""The tour from its first word to its last: cleans what a killed one left, brings its Hive up, goes from step to step
as its audience wants, and leaves nothing behind, however it ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Sequence
from enum import StrEnum
from typing import Protocol

from hive.client.calls import Answer
from hive.demo.port_claims import PortClaims
from hive.errors import HiveError, TimedOut
from hive.tour import leftovers
from hive.tour.asking import callers
from hive.tour.own_hive import OwnHive
from hive.tour.scenes import Scenes
from hive.tour.steps import TourStep
from hive.up.signals import Interrupts, unless

WORK_S = 150.0
"""All steps together, without the time in which a person reads: with start and end it stays below three minutes."""
INTERRUPTED = 130


class TourChoice(StrEnum):
    """The answer of the audience before a step, or in the middle of it."""

    GO = "go"
    SKIP = "skip"
    QUIT = "quit"


class TourAudience(Protocol):
    """The reader of the tour: a person at a terminal, a pipe, a program.

    `stopped` is set while a step runs as soon as it is to end before its time; `choice` then says what is to follow.
    """

    stopped: asyncio.Event
    choice: TourChoice

    def begins(self, number: int, step: TourStep) -> None:
        """A step is next: its words."""

    async def choose(self) -> TourChoice:
        """Waits for a person's key; GO at once where nobody is asked."""

    def goes_on(self, text: str) -> None:
        """Something that is of interest only as long as it goes on. Never raises."""

    def is_up(self, health: Answer, took_s: float) -> None:
        """The Hive is up."""

    def ended(self, number: int, step: TourStep, figures: Answer | None, took_s: float) -> None:
        """A step is over; without figures it was skipped."""

    def says(self, text: str) -> None:
        """A sentence besides."""

    def leaves(self) -> None:
        """No more steps: what runs is ended now. Never raises."""

    def is_over(self, took_s: float) -> None:
        """Nothing is left."""


async def take(steps: Sequence[tuple[int, TourStep]], audience: TourAudience) -> int:
    """The whole tour; its exit code. Raises HiveError; then, too, nothing is left."""
    begun = time.monotonic()
    interrupts = Interrupts()
    try:
        swept = await unless(interrupts.asked, _sweep(audience, interrupts), name="sweep")
        if swept is None:
            return INTERRUPTED
        async with _own_hive(interrupts) as hive:
            guide = _Guide(hive, steps, audience)
            try:
                done = await unless(interrupts.asked, guide.whole(), name="tour")
            finally:
                audience.leaves()
        if done is None:
            return INTERRUPTED
        if guide.broken is not None:
            raise guide.broken
        audience.is_over(time.monotonic() - begun)
        return 0
    finally:
        interrupts.close()


async def _sweep(audience: TourAudience, interrupts: Interrupts) -> int:
    """Ends and removes what killed tours of this user left; how many. One that cannot be removed is said."""
    count, uid = 0, os.getuid()
    for directory in leftovers.left(leftovers.place(uid), uid):
        count += 1
        audience.says(f"a tour was killed here and left {directory.path}: that is ended and removed first")
        try:
            await OwnHive(directory.path).end_what_is_left(interrupts.hurry)
            directory.remove()
        except HiveError as error:
            audience.says(f"{directory.path} is still there: {error.message}")
        finally:
            directory.close()
    return count


@contextlib.asynccontextmanager
async def _own_hive(interrupts: Interrupts) -> AsyncIterator[OwnHive]:
    """A Hive that may come up, in a directory of its own; at the end neither of them is left."""
    uid = os.getuid()
    directory = leftovers.make(leftovers.place(uid), uid)
    hive = OwnHive(directory.path)
    try:
        yield hive
    finally:
        try:
            await hive.end(interrupts.hurry)
            directory.remove()
        finally:
            directory.close()


class _Guide:
    """One way through the steps."""

    def __init__(self, hive: OwnHive, steps: Sequence[tuple[int, TourStep]], audience: TourAudience) -> None:
        self._hive = hive
        self._steps = steps
        self._audience = audience
        self._left_s = WORK_S
        self.broken: OSError | None = None
        """The reason that nothing can be told any more: nobody reads it."""

    def __repr__(self) -> str:
        return f"<_Guide {len(self._steps)} steps, {self._left_s:.0f} s left>"

    async def whole(self) -> int:
        """Every step; how many were taken."""
        try:
            return await self._steps_taken()
        except OSError as error:
            self.broken = error
            return 0

    async def _steps_taken(self) -> int:
        taken, begun = 0, time.monotonic()
        self._audience.goes_on("a Hive comes up")
        health = await self._hive.come_up()
        self._audience.is_up(health, time.monotonic() - begun)
        with contextlib.closing(PortClaims()) as ports:
            async with callers() as client:
                scenes = Scenes(self._hive, health, client, ports, self._audience.goes_on)
                for number, step in self._steps:
                    self._audience.begins(number, step)
                    choice = await self._audience.choose()
                    if choice is TourChoice.GO:
                        choice = await self._take(scenes, number, step)
                        taken += choice is TourChoice.GO
                    elif choice is TourChoice.SKIP:
                        self._audience.ended(number, step, None, 0.0)
                    if choice is TourChoice.QUIT:
                        break
        return taken

    async def _take(self, scenes: Scenes, number: int, step: TourStep) -> TourChoice:
        """One step, unless the audience ends it. Raises HiveError: that of its Hive, where that has ended meanwhile."""
        begun = time.monotonic()
        try:
            async with asyncio.timeout(self._left_s):
                figures = await unless(self._audience.stopped, scenes.of(step.name)(), name=f"step-{step.name}")
        except TimeoutError:
            raise TimedOut(
                f"the steps have worked for {WORK_S:g} s, and {step.name} is not done",
                hint="the machine is too slow or too busy for the whole tour: hive demo --step N takes one of them",
            ) from None
        except HiveError:
            await self._hive.check_soon()
            raise
        took_s = time.monotonic() - begun
        self._left_s = max(1.0, self._left_s - took_s)
        choice = TourChoice.GO if figures is not None else self._audience.choice
        if choice is not TourChoice.QUIT:
            self._audience.ended(number, step, figures, took_s)
        return choice
