"""Holders of leases without a control group, for a user to whom none is delegated: found by /proc, ended by signals.

What cannot be seen: a process that clears its environment, and loses its parent before it was looked at once (they are
looked at every second, and whenever one of them ends). And what has become another user's (sudo) is seen as long as
its parent lives, and cannot be ended by this user.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal

from hive.holders.hold import Hold, HolderUse, MemoryLook
from hive.holders.records import HolderPlace
from hive.host.process import Identity, ProcessTable
from hive.runtimes.signals import SignalGroup

LOOK_S = 1.0
"""Between looks for what came of them: a walk of /proc costs some 10 ms."""
CALM_S = 0.1
"""From the end of one until they are looked for: ends that come together are one walk."""


class SessionHold:
    """See `Hold`. A pidfd of each process that was found tells its end; the walks find the others."""

    def __init__(self, main: Identity, mark: str) -> None:
        self._group = SignalGroup(main, uid=None, mark=mark)
        self._memory = MemoryLook(None)
        self._watched: dict[Identity, int] = {}
        self._ended = asyncio.Event()

    def __repr__(self) -> str:
        return f"<SessionHold {self._group!r}>"

    def pids(self) -> list[int]:
        return self._group.pids()

    def terminate(self) -> None:
        self._group.signal(signal.SIGTERM)
        self._group.signal(signal.SIGCONT)

    def kill(self) -> None:
        self._group.kill()

    async def over(self) -> None:
        try:
            while found := self._group.members(ProcessTable()):
                self._watch({Identity.of(stat) for stat in found})
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_S):
                        await self._ended.wait()
                        await asyncio.sleep(CALM_S)  # what forks and ends all the time costs no walk each time
                self._ended.clear()
        finally:
            self._watch(set())

    def _watch(self, wanted: set[Identity]) -> None:
        """Hears of the end of these, and of no other ones any more."""
        loop = asyncio.get_running_loop()
        for who in self._watched.keys() - wanted:
            fd = self._watched.pop(who)
            loop.remove_reader(fd)
            os.close(fd)
        for who in wanted - self._watched.keys():
            if (opened := who.open()) is not None:
                self._watched[who] = opened
                loop.add_reader(opened, self._hear, who)

    def _hear(self, who: Identity) -> None:
        """One has ended. Its descriptor stays readable, so it goes at once."""
        fd = self._watched.pop(who)
        asyncio.get_running_loop().remove_reader(fd)
        os.close(fd)
        self._ended.set()

    async def look(self) -> HolderUse:
        pids = self.pids()
        return HolderUse(pids, await self._memory.held_by(pids))

    def let_go(self) -> None:
        """They go on, and the next helper finds them by their mark."""

    def remove(self) -> None:
        """There is nothing to remove."""


class SessionPlaces:
    """The way that is left where there is no control group; see `HolderPlaces`."""

    holds = "session"

    def __repr__(self) -> str:
        return "<SessionPlaces>"

    def plan(self, id: str, main: Identity) -> HolderPlace:  # noqa: ARG002 - the same for all
        return HolderPlace(self.holds)

    async def enter(self, id: str, place: HolderPlace, main: Identity) -> HolderPlace:  # noqa: ARG002 - it stays where it is
        return place

    def hold(self, place: HolderPlace, main: Identity, mark: str) -> Hold:  # noqa: ARG002
        return SessionHold(main, mark)
