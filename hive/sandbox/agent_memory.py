"""The RAM of one started agent as it is shown: the charge of its control group, else the last PSS and its age."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import msgspec

from hive.host.charge import Charge, Pss, read_charge, read_pss
from hive.link.helper import PagedOut, Stat
from hive.runtimes.runtime import Measurable, RunningAgent
from hive.sandbox.working_set import WorkingSet

FRESH_S = 1.0
"""A PSS as old as that is measured anew where somebody looks; one of a sleeper stays true as long as it sleeps."""

CGROUP, PSS = "cgroup", "pss"


class AgentMemory:
    """Belongs to one start of an agent. A walk of all its memory is made off the loop, and seldom."""

    def __init__(self, running: RunningAgent | None) -> None:
        """None: of one that does not run."""
        self._measured = running if isinstance(running, Measurable) else None
        self._working_set = None if self._measured is None else WorkingSet(self._measured.pids)
        self._pss: Pss | None = None
        self._pss_at = 0.0
        self._of_sleep: int | None = None

    def __repr__(self) -> str:
        return f"<AgentMemory {self._pss}>"

    def charge(self) -> Charge | None:
        """The charge now; None where no memory controller has a group of this agent alone."""
        group = None if self._measured is None else self._measured.memory_group()
        return None if group is None else read_charge(group)

    def age_s(self, sleep: int | None) -> float:
        """Age of the PSS, if a list would need a newer one; 0 where it needs none.

        `sleep`: which sleep it is in, None awake.
        """
        if self._measured is None or (sleep is not None and sleep == self._of_sleep) or self.charge() is not None:
            return 0.0
        age = time.time() - self._pss_at
        return age if age > FRESH_S else 0.0

    async def measure(self, sleep: int | None) -> None:
        """Takes its PSS anew; what cannot be looked at stays unknown."""
        if self._measured is None:
            return
        pids = self._measured.pids()
        found = await asyncio.to_thread(read_pss, pids)
        if found is not None:
            self._pss, self._pss_at, self._of_sleep = found, time.time(), sleep

    def told(self, stat: Stat) -> Stat:
        """`stat` with what it holds. A runtime that says so itself is believed."""
        if stat.held_bytes is not None or self._measured is None:
            return stat
        pss = self._pss
        used = None if self._working_set is None else self._working_set.size_bytes
        told = msgspec.structs.replace(stat, working_set_bytes=used)
        if pss is not None:
            told = msgspec.structs.replace(told, pss_bytes=pss.held_bytes, pss_at=self._pss_at)
        if (charge := self.charge()) is not None:
            held, cached = charge
            return msgspec.structs.replace(told, held_bytes=held, held_from=CGROUP, swap_cached_bytes=cached)
        if pss is None:
            return told
        return msgspec.structs.replace(told, held_bytes=pss.held_bytes, held_from=PSS, held_at=self._pss_at)

    def wakes(self, sleep: int) -> None:
        """It was told to go on, from `sleep`: its working set is read beside it, where that helps."""
        if self._working_set is not None:
            self._working_set.prefetch(sleep)

    def rests(self) -> None:
        """It falls asleep, or has ended."""
        if self._working_set is not None:
            self._working_set.halt()

    async def page_out(self, page_out: Callable[[], Awaitable[PagedOut]], sleep: int) -> PagedOut:
        """Notes what it used since it woke, then has it paged out. Raises what that does.

        The answer has what is left in RAM by its group's charge, where there is one; its PSS is taken besides.
        """
        if self._working_set is not None:
            await self._working_set.record(sleep)
        paged = await page_out()
        await self.measure(sleep)
        charge, used = self.charge(), None
        if self._working_set is not None:
            self._working_set.paged_out(sleep)
            used = self._working_set.size_bytes
        kept = paged.kept_bytes if charge is None else charge.held_bytes
        return msgspec.structs.replace(paged, kept_bytes=kept, working_set_bytes=used)
