"""Watches how many drafted tokens the inference servers accept: the one in use, and those of the pool."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

from hive.audit.audit_log import AuditLog
from hive.backends.backend import open_backend
from hive.backends.speculation import NONE, Acceptance
from hive.backends.switch import Target
from hive.control.active_backend import Active
from hive.exposition import Values
from hive.pool.state import SlotState
from hive.pooling.pool_views import speculation_view
from hive.pooling.pooled_slot import PooledSlot
from hive.pooling.pooling import ModelPool
from hive.shapes.system import Speculation

log = logging.getLogger("hive.daemon")

LOOK_S = 15.0


class SpeculationWatch:
    """Asks each server that may speculate for its counters, and tells once when speculation began to cost more than it
    gives: the event `speculation.costs`."""

    def __init__(self, *, active: Active, pool: ModelPool, audit_log: AuditLog) -> None:
        self._active = active
        self._pool = pool
        self._audit_log = audit_log
        self._of: Target | None = None
        self._of_active = Acceptance()

    def __repr__(self) -> str:
        return f"<SpeculationWatch {self._of_active!r}, {len(list(self._slots()))} slots>"

    async def run(self) -> None:
        """Looks every 15 s, until cancelled."""
        while True:
            await self.look(asyncio.get_running_loop().time())
            await asyncio.sleep(LOOK_S)

    async def look(self, now: float) -> None:
        """One look at each of them. A server that does not answer, or has no such counters, is passed over."""
        target, control = self._active.target, self._active.control
        if target != self._of:
            self._of, self._of_active = target, Acceptance()
        acceptance = self._of_active
        drafts = await control.drafts() if control is not None and self._active.up else None
        if acceptance.see(drafts, now):
            self._told(self._active_name, acceptance)
        for slot in list(self._slots()):
            acceptance = slot.acceptance
            if acceptance.see(await open_backend(slot.entry.kind, slot.address).drafts(), now):
                self._told(slot.model, acceptance)

    def view(self) -> Speculation | None:
        """Of the inference server in use; None where it has drafted nothing."""
        drafts = self._of_active.drafts
        return None if drafts is None or not drafts.drafted else speculation_view(self._of_active)

    @property
    def costly(self) -> dict[str, Acceptance]:
        """Those whose speculation costs more than it gives, by model."""
        return {name: acceptance for name, acceptance in self._known() if acceptance.costs}

    def metrics(self) -> dict[str, Values | None]:
        """The counters of the servers themselves; they begin anew with each start of one."""
        known = [(name, of.drafts) for name, of in self._known() if of.drafts is not None and of.drafts.drafted]
        return {
            "speculation_drafted_tokens": {(name,): drafts.drafted for name, drafts in known if drafts},
            "speculation_accepted_tokens": {(name,): drafts.accepted for name, drafts in known if drafts},
        }

    def _known(self) -> Iterator[tuple[str, Acceptance]]:
        if self._of is not None:
            yield self._active_name, self._of_active
        for slot in self._slots():
            yield slot.model, slot.acceptance

    def _slots(self) -> Iterator[PooledSlot]:
        for slot in self._pool.slots.values():
            if slot.entry.row.speculative != NONE and slot.state is SlotState.READY:
                yield slot

    @property
    def _active_name(self) -> str:
        """Its model, where it has one; else its kind."""
        _, models = self._active.seen
        return models[0].name if len(models) == 1 else str(self._of.kind if self._of is not None else "")

    def _told(self, model: str, acceptance: Acceptance) -> None:
        drafts = acceptance.drafts
        assert drafts is not None
        detail = {"model": model, "drafted": drafts.drafted, "accepted": drafts.accepted, "rate": acceptance.rate}
        log.warning("speculation_costs model=%s rate=%s", model, acceptance.rate)
        self._audit_log.note("speculation.costs", detail=detail)
