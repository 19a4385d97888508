"""The orders of operators to the pool: load, unload, pin. A load and an unload are jobs."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from hive.agents.transition_lock import outcome_of
from hive.audit.approval import Approval
from hive.audit.audit_log import AuditLog
from hive.audit.jobs import AlsoOfJob, Jobs, both, job_error
from hive.domain import BackendInfo, Band, DeploymentState, JobState
from hive.errors import Cancelled, DependencyDown, HiveError, ModelBusy, NotApproved, WrongState
from hive.pool.expected import expected_in_s
from hive.pool.state import Demand, SlotState
from hive.pooling.deployments import Deployments, RegistryChange
from hive.pooling.pool_views import explanation_of, progress_of, slot_view, view_of
from hive.pooling.pooled_slot import HELD, PooledSlot
from hive.pooling.pooling import ModelPool
from hive.pooling.slot_servers import SlotServers
from hive.settings.table import Settings
from hive.shapes.pool import PoolExplanation, PoolSlot, PoolView
from hive.store import load_tasks
from hive.store import pool as store
from hive.store.database import Database
from hive.store.deployments import StoredDeployment
from hive.store.jobs import StoredJob
from hive.tasks import spawn

LOAD = "model.load"
UNLOAD = "model.unload"
AGAIN_S = 1.0
CANCELLED_WITHIN_S = 5.0
READ_WITHIN_S = 2.0
"""The model's files are read anew for an order, where the disk answers so soon."""


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
        deployments: Deployments,
        has_rule: Callable[[str], bool] = lambda _: False,
        in_use: Callable[[], BackendInfo | None] = lambda: None,
    ) -> None:
        """`has_rule`: whether an operation needs more than a role; `in_use`: the backend beside the pool."""
        self.pool = pool
        self._has_rule = has_rule
        self._in_use = in_use
        self._why_off = why_off
        self._jobs = jobs
        self._database = database
        self._audit_log = audit_log
        self._helper = helper
        self._deployments = deployments
        self._loading: dict[str, tuple[PooledSlot, Demand]] = {}
        """The orders to load that are under way, by job."""
        self._beginning: list[tuple[PooledSlot, bool]] = []
        """The slots of which an order to load is being written down, and whether another model leaves for it."""

    def __repr__(self) -> str:
        return f"<PoolOrders of {self.pool}>"

    # looking ----------------------------------------------------------------------------------------------------------

    async def refresh(self) -> None:
        await self.pool.refresh()

    def view(self) -> PoolView:
        return view_of(self.pool, why_off=self._why_off, in_use=self._in_use())

    def explain(self, model: str, band: Band) -> PoolExplanation:
        """Raises NotFound with the names there are."""
        return explanation_of(self.pool, model, band)

    def progress(self, model: str) -> str:
        return progress_of(self.pool, model)

    def has(self, model: str) -> bool:
        """Whether the pool has a model of this name, or one on record that hive.conf has no more."""
        is_slot = any(model == slot.model for slot in self.pool.slots.values())
        return is_slot or self._deployments.in_pool(model) is not None

    async def log(self, model: str, lines: int) -> str:
        """The last lines that the model's server wrote. Raises NotFound, LinkLost."""
        return await self._helper.slot_log(self.pool.find(model).id, lines)

    # ordering ---------------------------------------------------------------------------------------------------------

    def is_ordered(self, slot: PooledSlot) -> bool:
        """Whether the slot is being loaded, or is to be."""
        is_beginning = any(slot is other for other, _ in self._beginning)
        return is_beginning or slot.order is not None or slot.state is SlotState.LOADING

    async def load(
        self, model: str, actor: str, *, approval: Approval, evict: str = "", of_job: AlsoOfJob | None = None
    ) -> StoredJob:
        """The job, done already where it is loaded. `evict`: the model that leaves for it first, and comes back where
        it fails (swaps.py). `of_job` is written with the job. Raises NotFound, WrongState where it cannot be loaded,
        ModelBusy where it is being loaded and one of the two orders is a swap, and as `Swaps.check` and
        `Approval.burn`."""
        approval.check("model-load")
        if evict:
            approval.check_eviction()
        slot = self.pool.find(model)
        leaving = self.pool.find(evict) if evict else None
        leaving = leaving if leaving is not None and leaving.grants else None
        if slot.why_not:
            raise WrongState(f"{slot.model} cannot be loaded: {slot.why_not}")
        is_swap = leaving is not None and slot.state is not SlotState.READY
        if (slot, True) in self._beginning or (is_swap and self.is_ordered(slot)):
            raise ModelBusy(f"{slot.model} is being loaded already", retry_after_s=AGAIN_S)
        beginning = slot, is_swap
        self._beginning.append(beginning)
        try:
            return await self._load(slot, leaving, actor, approval, of_job)
        finally:
            self._beginning.remove(beginning)

    async def _load(
        self,
        slot: PooledSlot,
        leaving: PooledSlot | None,
        actor: str,
        approval: Approval,
        of_job: AlsoOfJob | None,
    ) -> StoredJob:
        plan, digest = {"model": slot.model}, await self._digest(slot)
        if slot.state is SlotState.READY:
            change = self._deployments.deployed(
                slot.entry, digest, actor=actor, signature=approval.by, state=DeploymentState.LOADED
            )
            also, says = both(approval.burn, change.write), f"{slot.model} is loaded already"
            job = await self._jobs.begin(LOAD, plan=plan, progress=says, actor=actor, also=also, of_job=of_job)
            self._took(change, slot)
            return await self._jobs.end(job, JobState.DONE, result=plan | {"changed": False})
        if leaving is not None:
            self.pool.swaps.check(slot, leaving)
        now, before = time.monotonic(), self._deployments.row(slot.id)
        eta_s = expected_in_s(self.pool.facts(now), slot.id, now)
        change = self._deployments.deployed(
            slot.entry, digest, actor=actor, signature=approval.by, state=DeploymentState.LOADING
        )
        also, says = both(approval.burn, change.write), f"loading {slot.model}"
        job = await self._jobs.begin(LOAD, plan=plan, progress=says, actor=actor, eta_s=eta_s, also=also, of_job=of_job)
        self._took(change, slot)
        if slot.state is SlotState.FAILED:
            slot.state, slot.failures = SlotState.COLD, 0
            slot.ends.clear()
        slot.retry_at, slot.error, slot.never = 0.0, "", ""
        slot.unload_orders.clear()
        refused, others = "", slot.order
        if leaving is not None and leaving.grants and slot.state is not SlotState.READY:
            try:
                self.pool.swaps.begin(slot, leaving)
            except HiveError as error:  # what was checked has changed while the job was written
                refused = error.message
        order = others or Demand(Band.NORMAL, now)
        slot.order = others if refused or slot.state is SlotState.READY else order
        self._loading[job.id] = slot, order
        self.pool.wake()
        spawn(self._follow_load(job, slot, order, change, before, refused), name=f"follow load {slot.model}")
        return job

    def _took(self, change: RegistryChange, slot: PooledSlot) -> None:
        self._deployments.took(change)
        self.pool.look_at_approval(slot)

    async def _digest(self, slot: PooledSlot) -> str:
        """Of its files as they are now; as they were seen last where the disk is in no hurry."""
        with suppress(TimeoutError):
            async with asyncio.timeout(READ_WITHIN_S):
                await self.pool.footprints.facts_of(slot.entry)
        return self.pool.footprints.known(slot.entry).digest

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

    async def _follow_load(
        self,
        job: StoredJob,
        slot: PooledSlot,
        order: Demand,
        change: RegistryChange,
        before: StoredDeployment | None,
        refused: str = "",
    ) -> None:
        """`change`: what is on record of this order; `before`: what was. `refused`: why nothing is done of it."""
        (row,), began = change.puts, time.monotonic()
        while slot.ready_at < order.since and slot.state is not SlotState.READY:
            if job.id not in self._loading:
                error = job_error(Cancelled("it was cancelled"))
                back = self._deployments.taken_back(row.id, row.at, before)
                await self._end(job, JobState.CANCELLED, back, error=error)
                return
            if refused or slot.order is not order or slot.unload_ordered or slot.barred:
                del self._loading[job.id]
                slot.order = None if slot.order is order and not refused else slot.order
                why = refused or slot.never or slot.barred or slot.error or "another order came"
                failed = self._deployments.reached(row.id, row.at, DeploymentState.FAILED, why)
                lines = slot.last_lines if slot.error else ()
                error = job_error(WrongState(f"{slot.model} is not loaded: {why}"), lines)
                await self._end(job, JobState.FAILED, failed, error=error)
                return
            if slot.error and slot.state in (SlotState.COLD, SlotState.FAILED) and slot.retry_at > time.monotonic():
                slot.order = None
                del self._loading[job.id]
                error = job_error(DependencyDown(f"{slot.model}: {slot.error}"), slot.last_lines)
                failed = self._deployments.reached(row.id, row.at, DeploymentState.FAILED, slot.error)
                await self._end(job, JobState.FAILED, failed, error=error)
                return
            if (told := progress_of(self.pool, slot.id)) and told != job.progress:
                job = await self._tell(job, told)
            await self._next()
        self._loading.pop(job.id, None)
        result = {"model": slot.model, "changed": True, "took_s": round(time.monotonic() - began, 3)}
        job = msgspec.structs.replace(job, progress=f"{slot.model} is loaded")
        loaded = self._deployments.reached(row.id, row.at, DeploymentState.LOADED)
        await self._end(job, JobState.DONE, loaded, result=result)

    async def unload(self, model: str, actor: str, *, approval: Approval, force: bool = False) -> StoredJob:
        """The job, done already where it is not loaded. Raises NotFound, WrongState where it is pinned, unless `force`,
        which takes the pin away, and as `Approval.burn`."""
        approval.check("model-unload")
        row = self._deployments.in_pool(model)
        if row is not None and row.id not in self.pool.slots:
            return await self._forgotten(row, actor, approval)
        slot, registry = self.pool.find(model), self._deployments
        if slot.pinned_at is not None and not force:
            raise WrongState(f"{slot.model} is pinned", hint=f"hive model unpin {slot.model}, or --force")
        if slot.pinned_at is not None and self._has_rule("model-unpin") and not approval.is_break_glass:
            raise WrongState(
                f"{slot.model} is pinned, and who may unpin it has a rule of its own",
                hint=f"hive model unpin {slot.model}",
            )
        is_pinned, plan, row = slot.pinned_at is not None, {"model": slot.model}, registry.row(slot.id)
        at, is_gone = None if row is None else row.at, slot.state in (SlotState.COLD, SlotState.FAILED)
        change = registry.ended(slot.id, at, actor) if is_gone else registry.unloading(slot.id, actor)

        def also(conn: sqlite3.Connection) -> None:
            approval.burn(conn)
            if is_pinned:
                store.put_pin(conn, slot.model, False, actor, time.time())
            load_tasks.stays_out(conn, slot.model)
            change.write(conn)

        says = f"{slot.model} is not loaded" if is_gone else f"unloading {slot.model}"
        job = await self._jobs.begin(UNLOAD, plan=plan, progress=says, actor=actor, also=also)
        self._took(change, slot)
        self._unpinned(slot, actor)
        self.pool.swaps.unload_ordered(slot)
        if is_gone:
            return await self._jobs.end(job, JobState.DONE, result=plan | {"changed": False})
        if slot.state in HELD:  # it may have left meanwhile
            slot.unload_orders.add(job.id)
        slot.renewing = False
        self.pool.wake()
        spawn(self._follow_unload(job, slot, slot.generation, at), name=f"follow unload {slot.model}")
        return job

    def keep(self, model: str, job: StoredJob) -> None:
        """Takes an order to unload it back, and nobody else's: it is opened again where no other one holds."""
        self.pool.find(model).unload_orders.discard(job.id)
        self.pool.wake()

    async def _forgotten(self, row: StoredDeployment, actor: str, approval: Approval) -> StoredJob:
        """A model that hive.conf has no more is in no memory: nothing but its row goes."""
        plan, change = {"model": row.name}, self._deployments.ended(row.id, row.at, actor)
        also, says = both(approval.burn, change.write), f"hive.conf describes no {row.name} any more"
        job = await self._jobs.begin(UNLOAD, plan=plan, progress=says, actor=actor, also=also)
        self._deployments.took(change)
        return await self._jobs.end(job, JobState.DONE, result=plan | {"changed": False})

    def _unpinned(self, slot: PooledSlot, actor: str) -> None:
        """No order holds it any more, nor a pin."""
        slot.order = None
        self._is_pinned(slot, False, actor)

    async def _follow_unload(self, job: StoredJob, slot: PooledSlot, generation: int, at: float | None) -> None:
        """`at`: time of the order to load it that is on record."""
        while slot.generation == generation and slot.state not in (SlotState.COLD, SlotState.FAILED):
            if job.id not in slot.unload_orders and slot.state is not SlotState.STOPPING:
                error = job_error(WrongState(f"{slot.model} stays loaded: another order came"))
                kept = RegistryChange() if slot.unload_ordered else self._deployments.kept(slot.id, at)
                await self._end(job, JobState.FAILED, kept, error=error)
                return
            if slot.in_flight:
                job = await self._tell(job, f"{slot.in_flight} in flight at {slot.model} are waited for")
            await self._next()
        job = msgspec.structs.replace(job, progress=f"{slot.model} is unloaded")
        ended = self._deployments.ended(slot.id, at, job.actor)
        await self._end(job, JobState.DONE, ended, result={"model": slot.model, "changed": True})

    async def pin(self, model: str, actor: str, *, approval: Approval) -> PoolSlot:
        """Keeps the model loaded from now on, also after a restart. Raises NotFound, NotApproved, and as
        `Approval.burn`."""
        approval.check("model-pin")
        return await self._pin(model, actor, approval, is_pinned=True)

    async def unpin(self, model: str, actor: str, *, approval: Approval) -> PoolSlot:
        """Lets the model go when its memory is wanted. Raises NotFound, and as `Approval.burn`."""
        approval.check("model-unpin")
        return await self._pin(model, actor, approval, is_pinned=False)

    async def _pin(self, model: str, actor: str, approval: Approval, *, is_pinned: bool) -> PoolSlot:
        slot = self.pool.find(model)
        change = RegistryChange(actor=actor)
        if is_pinned:
            digest, is_loaded = await self._digest(slot), slot.state is SlotState.READY
            self.pool.look_at_approval(slot)
            if slot.unapproved:
                raise NotApproved(f"{slot.model} is not loaded, so it cannot be kept: {slot.unapproved}")
            change = self._deployments.pinned(slot.entry, digest, actor=actor, is_loaded=is_loaded)

        def work(conn: sqlite3.Connection) -> None:
            approval.burn(conn)
            store.put_pin(conn, slot.model, is_pinned, actor, time.time())
            change.write(conn)

        await self._database.write(work)
        self._took(change, slot)
        self._is_pinned(slot, is_pinned, actor)
        self.pool.wake()
        await self._next()  # a request right after this answer meets what holds now, and no earlier refusal
        now = time.monotonic()
        return slot_view(self.pool, slot, self.pool.facts(now), now)

    def _is_pinned(self, slot: PooledSlot, is_pinned: bool, actor: str) -> None:
        if is_pinned != (slot.pinned_at is not None):
            slot.pinned_at = time.monotonic() if is_pinned else None
            act = "model.pinned" if is_pinned else "model.unpinned"
            self._audit_log.note(act, target=slot.id, actor=actor, detail={"name": slot.model})

    # jobs -------------------------------------------------------------------------------------------------------------

    async def _next(self) -> None:
        try:
            async with asyncio.timeout(AGAIN_S):
                await self.pool.passed()
        except TimeoutError:
            return

    async def _tell(self, job: StoredJob, progress: str) -> StoredJob:
        told = await outcome_of(self._jobs.tell(job, progress)) if progress != job.progress else job
        return job if isinstance(told, HiveError) else told

    async def _end(self, job: StoredJob, state: JobState, change: RegistryChange, **came: dict[str, Any]) -> None:
        """`came`: its result or its error. What cannot be written is put right by the next look at the servers."""
        ended = await outcome_of(self._jobs.end(job, state, also=change.write, **came))
        if not isinstance(ended, HiveError):
            self._deployments.took(change)
