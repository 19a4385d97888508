"""The orders of operators to the pool: load, unload, pin. A load and an unload are jobs."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec

from hive.agents.transition_lock import outcome_of
from hive.audit.audit_log import AuditLog
from hive.audit.jobs import Jobs
from hive.domain import Band, JobState
from hive.errors import DependencyDown, HiveError, WrongState
from hive.pool.expected import expected_in_s
from hive.pool.state import Demand, SlotState
from hive.pooling.pool_views import explanation_of, progress_of, slot_view, view_of
from hive.pooling.pooled_slot import HELD, PooledSlot
from hive.pooling.pooling import ModelPool
from hive.pooling.slot_servers import SlotServers
from hive.settings.table import Settings
from hive.shapes.pool import PoolExplanation, PoolSlot, PoolView
from hive.store import pool as store
from hive.store.database import Database
from hive.store.jobs import StoredJob
from hive.tasks import spawn

LOAD = "model.load"
UNLOAD = "model.unload"
AGAIN_S = 1.0
CANCELLED_WITHIN_S = 5.0


def why_off(settings: Settings) -> str:
    """The setting for which there is no pool; empty where there may be one."""
    if not settings.pool.enabled:
        return "[pool] enabled = false"
    return "" if settings.sandbox.enabled else "[sandbox] enabled = false: without the helper no server is started"


class PoolOrders:
    """Questions and orders of the API to the pool. Every method that writes raises as `Database.write` does."""

    def __init__(
        self,
        pool: ModelPool,
        *,
        why_off: str,
        jobs: Jobs,
        database: Database,
        audit_log: AuditLog,
        helper: SlotServers,
    ) -> None:
        self.pool = pool
        self._why_off = why_off
        self._jobs = jobs
        self._database = database
        self._audit_log = audit_log
        self._helper = helper
        self._loading: dict[str, tuple[PooledSlot, Demand]] = {}
        """The orders to load that are under way, by job."""

    def __repr__(self) -> str:
        return f"<PoolOrders of {self.pool}>"

    # looking ----------------------------------------------------------------------------------------------------------

    def view(self) -> PoolView:
        return view_of(self.pool, why_off=self._why_off)

    def explain(self, model: str, band: Band) -> PoolExplanation:
        """Raises NotFound with the names there are."""
        return explanation_of(self.pool, model, band)

    def progress(self, model: str) -> str:
        return progress_of(self.pool, model)

    def has(self, model: str) -> bool:
        """Whether the pool has a model of this name."""
        return any(model == slot.model for slot in self.pool.slots.values())

    async def log(self, model: str, lines: int) -> str:
        """The last lines that the model's server wrote. Raises NotFound, LinkLost."""
        return await self._helper.slot_log(self.pool.find(model).id, lines)

    # ordering ---------------------------------------------------------------------------------------------------------

    async def load(self, model: str, actor: str) -> StoredJob:
        """The job, done already where it is loaded. Raises NotFound, WrongState where it is being unloaded by order."""
        slot = self.pool.find(model)
        if slot.why_not:
            raise WrongState(f"{slot.model} cannot be loaded: {slot.why_not}")
        plan = {"model": slot.model}
        if slot.state is SlotState.READY:
            job = await self._jobs.begin(LOAD, plan=plan, progress=f"{slot.model} is loaded already", actor=actor)
            return await self._jobs.end(job, JobState.DONE, result=plan | {"changed": False})
        now = time.monotonic()
        eta_s = expected_in_s(self.pool.facts(now), slot.id, now)
        job = await self._jobs.begin(LOAD, plan=plan, progress=f"loading {slot.model}", actor=actor, eta_s=eta_s)
        if slot.state is SlotState.FAILED:
            slot.state, slot.failures = SlotState.COLD, 0
            slot.ends.clear()
        slot.retry_at, slot.error, slot.never, slot.unload_ordered = 0.0, "", "", False
        slot.order = order = slot.order or Demand(Band.NORMAL, now)
        self._loading[job.id] = slot, order
        self.pool.wake()
        spawn(self._follow_load(job, slot, order), name=f"follow load {slot.model}")
        return job

    def is_loading(self, job_id: str) -> bool:
        """Whether this is an order to load that is under way."""
        return job_id in self._loading

    async def cancel(self, job_id: str) -> StoredJob:
        """Takes an order to load back; the job, once it has ended. A load that others wait for goes on. Raises
        NotFound."""
        slot, order = self._loading.pop(job_id)
        if slot.order is order and not any(other is order for _, other in self._loading.values()):
            slot.order = None
        self.pool.wake()
        return await self._jobs.get(job_id, wait_s=CANCELLED_WITHIN_S)

    async def _follow_load(self, job: StoredJob, slot: PooledSlot, order: Demand) -> None:
        began = time.monotonic()
        while slot.ready_at < order.since and slot.state is not SlotState.READY:
            if job.id not in self._loading:
                error = {"code": "cancelled", "message": "it was cancelled", "hint": "", "log": []}
                await outcome_of(self._jobs.end(job, JobState.CANCELLED, error=error))
                return
            if slot.order is not order or slot.unload_ordered or slot.why_not:
                del self._loading[job.id]
                slot.order = None if slot.order is order else slot.order
                why = slot.never or slot.why_not or slot.error or "another order came"
                await self._fail(job, WrongState(f"{slot.model} is not loaded: {why}"))
                return
            if slot.error and slot.state in (SlotState.COLD, SlotState.FAILED) and slot.retry_at > time.monotonic():
                slot.order = None
                del self._loading[job.id]
                await self._fail(job, DependencyDown(f"{slot.model}: {slot.error}"), slot.last_lines)
                return
            if (told := progress_of(self.pool, slot.id)) and told != job.progress:
                job = await self._told(job, told)
            await self._next()
        self._loading.pop(job.id, None)
        result = {"model": slot.model, "changed": True, "took_s": round(time.monotonic() - began, 3)}
        job = msgspec.structs.replace(job, progress=f"{slot.model} is loaded")
        await outcome_of(self._jobs.end(job, JobState.DONE, result=result))

    async def unload(self, model: str, actor: str, *, force: bool = False) -> StoredJob:
        """The job, done already where it is not loaded. Raises NotFound, WrongState where it is pinned, unless `force`,
        which takes the pin away."""
        slot = self.pool.find(model)
        if slot.pinned_at is not None and not force:
            raise WrongState(f"{slot.model} is pinned", hint=f"hive model unpin {slot.model}, or --force")
        if slot.pinned_at is not None:
            await self.unpin(slot.id, actor)
        plan = {"model": slot.model}
        slot.order = None
        if slot.state in (SlotState.COLD, SlotState.FAILED):
            job = await self._jobs.begin(UNLOAD, plan=plan, progress=f"{slot.model} is not loaded", actor=actor)
            return await self._jobs.end(job, JobState.DONE, result=plan | {"changed": False})
        job = await self._jobs.begin(UNLOAD, plan=plan, progress=f"unloading {slot.model}", actor=actor)
        slot.unload_ordered = slot.state in HELD  # it may have left meanwhile
        self.pool.wake()
        spawn(self._follow_unload(job, slot, slot.generation), name=f"follow unload {slot.model}")
        return job

    async def _follow_unload(self, job: StoredJob, slot: PooledSlot, generation: int) -> None:
        while slot.generation == generation and slot.state not in (SlotState.COLD, SlotState.FAILED):
            if not slot.unload_ordered and slot.state is not SlotState.STOPPING:
                await self._fail(job, WrongState(f"{slot.model} stays loaded: another order came"))
                return
            if slot.in_flight:
                job = await self._told(job, f"{slot.in_flight} in flight at {slot.model} are waited for")
            await self._next()
        job = msgspec.structs.replace(job, progress=f"{slot.model} is unloaded")
        await outcome_of(self._jobs.end(job, JobState.DONE, result={"model": slot.model, "changed": True}))

    async def pin(self, model: str, actor: str) -> PoolSlot:
        """Keeps the model loaded from now on, also after a restart. Raises NotFound."""
        return await self._pin(model, actor, is_pinned=True)

    async def unpin(self, model: str, actor: str) -> PoolSlot:
        """Lets the model go when its memory is wanted. Raises NotFound."""
        return await self._pin(model, actor, is_pinned=False)

    async def _pin(self, model: str, actor: str, *, is_pinned: bool) -> PoolSlot:
        slot = self.pool.find(model)
        await self._database.write(lambda conn: store.put_pin(conn, slot.model, is_pinned, actor, time.time()))
        now = time.monotonic()
        if is_pinned != (slot.pinned_at is not None):
            slot.pinned_at = now if is_pinned else None
            act = "model.pinned" if is_pinned else "model.unpinned"
            self._audit_log.note(act, target=slot.id, actor=actor, detail={"name": slot.model})
        self.pool.wake()
        return slot_view(self.pool, slot, self.pool.facts(now), now)

    # jobs -------------------------------------------------------------------------------------------------------------

    async def _next(self) -> None:
        try:
            await asyncio.wait_for(self.pool.passed(), AGAIN_S)
        except TimeoutError:
            return

    async def _told(self, job: StoredJob, progress: str) -> StoredJob:
        told = await outcome_of(self._jobs.tell(job, progress)) if progress != job.progress else job
        return job if isinstance(told, HiveError) else told

    async def _fail(self, job: StoredJob, error: HiveError, lines: list[str] | None = None) -> None:
        told: dict[str, Any] = {"code": error.code, "message": error.message, "hint": error.hint, "log": lines or []}
        await outcome_of(self._jobs.end(job, JobState.FAILED, error=told))
