"""The gate of the active backend in the state the daemon wants, and the end of requests that are at a server when its
gate closes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

from hive.link.link import LinkReply
from hive.link.messages import CloseBackend, DaemonTable, Drained, OpenBackend
from hive.proxy.datapath import DataPath
from hive.queue.slot_gate import Switching
from hive.routing.slot import Slot
from hive.tasks import spawn

log = logging.getLogger("hive.proxy")

LOOK_S = 0.02
"""The time between two looks at the requests that are at the backend."""
ALONE_S = 60.0
"""A gate whose daemon ended in mid-switch opens after this long without one: an error tells more than waiting."""


class Drain:
    """The wait until nothing is at a slot's server any more. `end`: another order has come, and nothing is cut."""

    def __init__(self, slot: Slot) -> None:
        self._slot = slot
        self._ended = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Drain of {self._slot}{', ended' * self._ended.is_set()}>"

    def end(self) -> None:
        self._ended.set()

    async def run(self, until: float) -> int | None:
        """Requests that were cut at `until` (monotonic seconds); None where it was ended."""
        slot = self._slot
        while not slot.is_drained and time.monotonic() < until and not self._ended.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._ended.wait()
        return None if self._ended.is_set() else slot.cut_off()


class SwitchingGate:
    """One proxy's gate of the backend. Every method is called on the loop."""

    def __init__(self, path: DataPath) -> None:
        self._path = path
        self._draining = Drain(path.slot)
        """Ended by the daemon's next word."""
        self._alone: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<SwitchingGate {self._path.slot.gate}>"

    def close(self, message: CloseBackend, reply: LinkReply) -> None:
        """Answers once nothing is at the backend any more."""
        drain, now = self._next_order(), time.monotonic()
        self._path.slot.close(Switching(now + message.wait_s, message.towards))
        log.info("backend_closed towards=%s drained=%s", message.towards, self._path.slot.is_drained)
        spawn(self._drain(drain, now + message.drain_s, reply), name="drain the backend")

    async def _drain(self, drain: Drain, until: float, reply: LinkReply) -> None:
        cut = await drain.run(until)
        if cut is None:
            reply(Drained())  # the daemon has changed its mind, or is gone
            return
        log.info("backend_drained cut=%d", cut)
        reply(Drained(cut=cut))

    def _next_order(self) -> Drain:
        self._draining.end()
        self._draining = Drain(self._path.slot)
        return self._draining

    def open(self, message: OpenBackend) -> None:
        self._next_order()
        log.info("backend_opened address=%s", message.backend.address if message.backend is not None else "none")
        self._path.open_backend(message.backend, message.models)

    def heard(self, table: DaemonTable) -> None:
        """A daemon is there (again) and says how it is."""
        if self._alone is not None:
            self._alone.cancel()
            self._alone = None
        self._next_order()
        if table.switching_to:
            self._path.slot.close(Switching(time.monotonic() + table.backend_wait_s, table.switching_to))
            self._path.use_backend(table.backend, table.models)
        elif self._path.slot.gate.is_closed:
            self._path.open_backend(table.backend, table.models)
        else:
            self._path.use_backend(table.backend, table.models)

    def daemon_lost(self) -> None:
        """The next one finishes the switch, or goes back."""
        if self._path.slot.gate.is_closed and self._alone is None:
            self._alone = asyncio.get_running_loop().call_later(ALONE_S, self._open_alone)

    def _open_alone(self) -> None:
        self._alone = None
        self._next_order()
        log.error("backend_opened_alone s=%g", ALONE_S)
        self._path.open_backend(self._path.slot.backend, self._path.slot.models)
