"""The programs that somebody runs inside one agent, each until it ends, its caller leaves, or the agent ends."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from typing import NamedTuple

from hive.errors import BadRequest, HiveError, Saturated, WrongState
from hive.link.execution import Executed, Executing
from hive.link.link import Link
from hive.link.message import LinkMessage
from hive.runtimes.entering import Entered
from hive.tasks import spawn

log = logging.getLogger("hive.sandbox")

AT_ONCE = 16
"""Programs inside one agent."""


class Handed(NamedTuple):
    """An answer and the descriptors that go with it, closed here once they are sent."""

    message: LinkMessage
    descriptors: list[int]

    def close(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)


class _UnderWay(NamedTuple):
    entered: Entered
    owner: Link
    over: asyncio.Event


class Executions:
    """Programs inside one agent, each of the link it was asked for on, where `Executed` is told."""

    def __init__(self, name: Callable[[], str]) -> None:
        """`name()`: of the agent, for log lines."""
        self._name = name
        self._under_way: dict[str, _UnderWay] = {}

    def __repr__(self) -> str:
        return f"<Executions {len(self._under_way)} in {self._name()}>"

    def __bool__(self) -> bool:
        return bool(self._under_way)

    def has(self, run: str) -> bool:
        return run in self._under_way

    def check_room(self, run: str) -> None:
        """Raises Saturated, BadRequest."""
        if len(self._under_way) >= AT_ONCE:
            raise Saturated(f"{AT_ONCE} programs run inside {self._name()} already")
        if run in self._under_way:
            raise BadRequest(f"there is a program {run} already")

    def take(self, run: str, entered: Entered, owner: Link) -> Handed:
        """It has begun. Where `owner` is gone meanwhile, it ends at once."""
        under_way = _UnderWay(entered, owner, asyncio.Event())
        self._under_way[run] = under_way
        log.info("program_begun agent=%s run=%s", self._name(), run)
        spawn(self._follow(run, under_way), name=f"program {run}")
        if owner.lost:
            spawn(self._kill(under_way), name=f"end {run}")
        return Handed(Executing(form=entered.form), entered.descriptors)

    async def _follow(self, run: str, under_way: _UnderWay) -> None:
        """Follows a program to its end; all that it left behind goes with it."""
        exit_code = None
        try:
            exit_code = await under_way.entered.ended()
            if not await under_way.entered.kill():
                log.error("program_left_a_process agent=%s run=%s", self._name(), run)
        except (HiveError, OSError) as error:
            log.warning("program_end_unknown agent=%s run=%s error=%s", self._name(), run, error)
        finally:
            self._under_way.pop(run, None)
            under_way.entered.close()
            under_way.over.set()
        log.info("program_ended agent=%s run=%s exit_code=%s", self._name(), run, exit_code)
        under_way.owner.tell(Executed(run=run, exit_code=exit_code))

    async def _kill(self, under_way: _UnderWay) -> None:
        try:
            await under_way.entered.kill()
        except (HiveError, OSError) as error:
            log.warning("program_not_killed agent=%s error=%s", self._name(), error)
        await under_way.over.wait()

    async def end(self, run: str) -> bool:
        """Kills it; False where there was none. Nothing of it is left."""
        if (under_way := self._under_way.get(run)) is None:
            return False
        await self._kill(under_way)
        return True

    async def end_all(self, *, of: Link | None = None) -> None:
        """Ends the programs of that link, or all."""
        which = [one for one in self._under_way.values() if of is None or one.owner is of]
        await asyncio.gather(*(self._kill(one) for one in which))

    async def resize(self, run: str, rows: int, columns: int) -> None:
        """Raises WrongState where it has ended."""
        if (under_way := self._under_way.get(run)) is None:
            raise WrongState(f"there is no program {run}")
        await under_way.entered.resize(rows, columns)
