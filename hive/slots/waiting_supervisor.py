"""The one supervisor that a helper has waiting for its grant, at most: so the next load starts no Python.

It has no server and no grant, and is in none of the daemon's books. A mark beside the grant to come keeps it waiting;
without the mark, without this helper, and where nobody asks for it again in time, it ends by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from pathlib import Path

from hive.errors import HiveError
from hive.host import files
from hive.link.slots import mark_of
from hive.settings.table import Paths
from hive.slots.slot_run import SLOT_ID, RunningSlot, SlotStarter
from hive.tasks import spawn

log = logging.getLogger("hive.sandbox")


class WaitingSupervisor:
    """`prepare` replaces the one that waits; `take` hands it out, to be started."""

    def __init__(self, paths: Paths, starter: SlotStarter) -> None:
        self._paths = paths
        self._starter = starter
        self._slot = ""
        self._running: RunningSlot | None = None
        self._life: asyncio.Task[None] | None = None
        self._coming = ""
        """The slot for which one is being begun."""
        self._lock = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<WaitingSupervisor of {self._slot or 'nothing'}>"

    async def prepare(self, slot: str) -> None:
        """Returns once one of this slot waits, and no other one. Raises HiveError; then none waits."""
        async with self._lock:
            if self._slot == slot and self._running is not None and self._running.lives():
                os.utime(self._mark(slot))
                return
            self._coming = slot
            try:
                await self._end()
                files.write_whole(self._mark(slot), b"", mode=0o644)
                running = await self._starter.prepare(slot)
            except BaseException:
                self.unmark(slot)
                raise
            finally:
                self._coming = ""
            log.info("slot_prepared id=%s pid=%d", slot, running.pid)
            self._slot, self._running = slot, running
            self._life = spawn(self._live(slot, running), name="prepared slot")

    async def _live(self, slot: str, running: RunningSlot) -> None:
        """Clears away what is left of one that ended."""
        with contextlib.suppress(HiveError, OSError):
            await running.over()
        self.unmark(slot)
        if self._running is running:
            self._slot, self._running = "", None

    async def take(self, slot: str) -> RunningSlot | None:
        """The one that waits, if it is of this slot: from now on it is the caller's, which takes the mark away too."""
        if slot not in (self._slot, self._coming):
            return None  # another one's may be on its way: nothing to wait for
        async with self._lock:
            if self._slot != slot or (running := self._running) is None or self._life is None:
                return None
            if not running.lives():
                await self._end()
                return None
            self._life.cancel()
            self._slot, self._running, self._life = "", None, None
            return running

    async def end(self) -> None:
        """Returns once none waits, and nothing of it is left. Raises HiveError."""
        async with self._lock:
            await self._end()

    async def _end(self) -> None:
        running, life, slot = self._running, self._life, self._slot
        if running is None or life is None:
            return
        self.unmark(slot)
        await running.stop(0.0)
        await asyncio.wait({life})

    def leave(self) -> None:
        """The helper leaves: what waits ends by itself, and the next helper clears it away."""
        if self._life is not None:
            self._life.cancel()
        if self._running is not None:
            self.unmark(self._slot)
            self._running.let_go()

    # --- marks ---------------------------------------------------------------------------------------------------

    def marked(self) -> set[str]:
        """The slots whose supervisors an earlier helper had waiting, and that were given no grant."""
        found = {path.stem for path in self._paths.slot_grants.glob(f"*{mark_of(Path('x')).suffix}")}
        return {slot for slot in found if SLOT_ID.fullmatch(slot) and not self._paths.slot_grant(slot).exists()}

    def unmark(self, slot: str) -> None:
        """Takes the mark away: a supervisor without a grant ends."""
        with contextlib.suppress(OSError):
            self._mark(slot).unlink(missing_ok=True)

    def _mark(self, slot: str) -> Path:
        return mark_of(self._paths.slot_grant(slot))
