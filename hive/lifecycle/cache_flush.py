"""The prompt cache: what servers keep of prompts, shown and flushed. A flush is a job.

A job is done only once nothing that was kept before is ever used again: the epochs are in SQLite, the proxy has said
that it sends no request with an earlier one, and what a server keeps without salts is erased there (decision 042).
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import msgspec

from hive.agents.roster import Roster
from hive.agents.transition_lock import outcome_of
from hive.audit.approval import Approval
from hive.audit.audit_log import AuditLog
from hive.audit.jobs import Jobs, check_job, job_error
from hive.backends.backend import BackendControl, open_backend
from hive.backends.described import flushed_by, prefix_cache, why_not_flushed
from hive.backends.kinds import spec_of
from hive.control.active_backend import Active
from hive.control.effects import DaemonEffects
from hive.control.models import Models
from hive.domain import JobState, UsageEvent, origin_of
from hive.errors import (
    BackendDown,
    BackendTimeout,
    Cancelled,
    DependencyDown,
    HiveError,
    LinkLost,
    NotFound,
    NotSupported,
    TimedOut,
    did_you_mean,
)
from hive.lifecycle.cache_counts import CacheCounts
from hive.lifecycle.flush_plan import CacheServer, FlushPlan, ModelAt, Unerased, plan_of
from hive.lifecycle.load_anew import DOWN_S, HOLD, LONGEST_S, LOOK_S, PROXY_S, ActiveLoader, SlotLoader, is_gone
from hive.lifecycle.parking import Parking
from hive.link.cache import UseCacheEpochs
from hive.link.proxy_link import ProxyGates
from hive.link.slots import ProcessState
from hive.models.cache_epochs import SHARED, FlushedBy, FlushKind, FlushScope, raised_by
from hive.models.names import spelled
from hive.models.salts import cache_group
from hive.pool.state import SlotState
from hive.pooling.pooled_slot import PooledSlot
from hive.pooling.pooling import ModelPool
from hive.settings.table import TenantRow
from hive.shapes.cache import CachedModel, CacheFlush, CacheFlushed, CacheView
from hive.store import cache_epochs as store
from hive.store import rollups
from hive.store.cache_epochs import RaisedEpoch
from hive.store.database import Database
from hive.store.jobs import StoredJob
from hive.tasks import spawn

log = logging.getLogger("hive.daemon")

FLUSH = "cache.flush"
ANSWER_S = 5.0
"""A flush that takes longer is answered as a job."""
_NO_ROW = TenantRow()


class FlushResult(msgspec.Struct, frozen=True, kw_only=True):
    """`job`: as it is now; it runs where the flush takes long. `entries_removed`, `memory_freed_mb`: None where that is
    not known; `left_out`: what no flush reaches."""

    scope: FlushScope
    job: StoredJob
    entries_removed: int | None = None
    memory_freed_mb: int | None = None
    left_out: tuple[str, ...] = ()

    @property
    def flushed(self) -> bool:
        return self.job.state is JobState.DONE

    def view(self) -> CacheFlush:
        return {
            "flushed": self.flushed,
            "scope": str(self.scope.kind),
            "name": self.scope.name,
            "entries_removed": self.entries_removed,
            "memory_freed_mb": self.memory_freed_mb,
            "left_out": list(self.left_out),
            "id": self.job.id,
        }


class CacheFlusher:
    """One for the daemon. Every method that writes raises as `Database.write` does."""

    def __init__(
        self,
        *,
        recorded: Iterable[RaisedEpoch],
        effects: DaemonEffects,
        roster: Roster,
        active: Active,
        pool: ModelPool,
        models: Models,
        proxy_link: ProxyGates,
        jobs: Jobs,
        database: Database,
        audit_log: AuditLog,
        parking: Parking,
        served_as: Callable[[str], str],
    ) -> None:
        """`served_as`: the model under which a server keeps the prompts of an adapter; any other name as it is."""
        self._parking = parking
        self._served_as = served_as
        self._raised = list(recorded)
        self._effects = effects
        self._roster = roster
        self._active = active
        self._pool = pool
        self._models = models
        self._proxy_link = proxy_link
        self._jobs = jobs
        self._database = database
        self._audit_log = audit_log
        self._loader = ActiveLoader(active=active, proxy_link=proxy_link)
        self._slot_loader = SlotLoader(pool)
        self._fresh: Counter[str] = Counter()
        """Servers at which flushes are under way: how many."""
        self._writing = asyncio.Lock()
        self._going: dict[str, asyncio.Task[None]] = {}
        self._is_leaving = False
        self.counts = CacheCounts()

    def __repr__(self) -> str:
        return f"<CacheFlusher {len(self._raised)} epochs, {len(self._going)} under way>"

    async def begin(self) -> None:
        """Raises all where the database was put back to an earlier state, before anybody is told of epochs."""
        if await self._database.read(store.is_due):
            await self._database.write(lambda conn: store.raise_as_due(conn, time.time()))
            self._raised = await self._database.read(store.epochs)

    def epochs(self) -> UseCacheEpochs:
        """All that the proxy has to know."""
        fresh = sorted(name for name, count in self._fresh.items() if count > 0)
        return UseCacheEpochs(numbers={one.key: one.number for one in self._raised}, fresh=fresh)

    def used(self, events: Iterable[UsageEvent]) -> None:
        """Requests ended."""
        self.counts.used(events)

    # looking ----------------------------------------------------------------------------------------------------------

    async def view(self) -> CacheView:
        effects = self._effects
        backend = effects.backend
        told = [self._view_of(server, model) for server in await self._servers() for model in server.models]
        return {
            "separation": "" if backend is None else prefix_cache(backend, effects.settings),
            "models": sorted(told, key=lambda one: one["model"]),
            "flushes": [self._view_of_flush(one) for one in self._raised if one.key != SHARED],
            "flushing": list(self._going),
            "parking": self._parking.view(),
        }

    def _view_of(self, server: CacheServer, model: str) -> CachedModel:
        counted = self.counts.by_model.get(model)
        return {
            "model": model,
            "backend": str(server.kind),
            "pooled": bool(server.name),
            "flushed_by": str(flushed_by(server.kind, server.told)),
            "why_not": why_not_flushed(server.kind, server.told),
            "requests": None if counted is None else counted.requests,
            "hits": None if counted is None else counted.hits,
            "tokens": None if counted is None else counted.tokens,
            "tokens_reused": None if counted is None else counted.reused,
            "hit_rate": None if counted is None else round(counted.hit_rate, 4),
        }

    def _view_of_flush(self, one: RaisedEpoch) -> CacheFlushed:
        kind, _, name = one.key.partition(" ")
        if kind == "server":
            slot = self._pool.slots.get(name)
            kind, name = "model", name if slot is None else slot.model
        return {"scope": kind, "name": name, "at": one.at, "actor": one.actor}

    async def _servers(self) -> list[CacheServer]:
        """The active backend, with its models that are none of the pool's, and the slots."""
        servers = [
            CacheServer(
                name=slot.id,
                kind=slot.entry.kind,
                address=slot.backend.address,
                models=(slot.model,),
                holds=_holds(slot),
                told=slot.backend.capabilities,
            )
            for slot in self._pool.slots.values()
        ]
        info, offered = self._active.seen
        if info is None:
            return servers
        pooled = {spelled(name) for slot in self._pool.slots.values() for name in (slot.model, slot.entry.at_server)}
        own = [model.name for model in offered if spelled(model.name) not in pooled]
        if spec_of(info.kind).flushed_by in (FlushedBy.SLOTS, FlushedBy.LOAD):
            loaded = await self._active.loaded()
            own = [name for name in own if loaded is None or name in loaded]
        target = self._active.target
        is_own = target is not None and bool(target.unit)
        return [
            CacheServer(
                name="", kind=info.kind, address=info.address, models=tuple(own), is_own=is_own, told=info.capabilities
            ),
            *servers,
        ]

    # flushing ---------------------------------------------------------------------------------------------------------

    async def flush(self, scope: FlushScope, *, actor: str, approval: Approval) -> FlushResult:
        """Returns once it is done, or after 5 s with its job, which runs.

        Raises NotFound for a model or a tenant that is not known, NotSupported where no flush reaches any of it,
        DependencyDown where the proxy has not taken the new epochs, BackendDown, BackendTimeout; none of them is
        flushed.
        """
        approval.check("cache-flush")
        await self._until_known()
        scope, keys = await self._meant(scope)
        plan = plan_of(scope, await self._servers())
        if plan.is_in_vain:
            raise NotSupported(f"{scope} is not flushed: {'; '.join(plan.left_out)}", hint="hive cache show")
        job = await self._begin(scope, keys, plan, actor, approval)
        task = self._going[job.id] = spawn(self._run(job, scope, plan), name=f"flush {scope}")
        task.add_done_callback(lambda _: self._going.pop(job.id, None))
        await asyncio.wait([task], timeout=ANSWER_S)
        return self.result_of(scope, await self._jobs.get(job.id))

    async def _until_known(self) -> None:
        """Returns once it is known which servers run: one that an earlier daemon started keeps what it kept. Raises
        DependencyDown."""
        try:
            async with asyncio.timeout(PROXY_S):
                await self._active.chosen.wait()
                await self._active.known()
                await self._pool.known()
                await self._until_seen()
        except TimeoutError:
            raise DependencyDown(
                "it is not known yet which inference servers run, so nothing is flushed", hint="hive status"
            ) from None

    async def _until_seen(self) -> None:
        """Returns once the active backend has said which models it has, or is not there and so keeps none. One that is
        elsewhere is not Hive's to flush."""
        active = self._active
        while active.address and origin_of(active.address).is_here and active.models_seen_at is None:
            await active.refresh()
            if active.models_seen_at is None and await is_gone(active.address):
                return
            await asyncio.sleep(LOOK_S)

    @staticmethod
    def result_of(scope: FlushScope, job: StoredJob) -> FlushResult:
        """The outcome of the job so far. Raises what it failed with."""
        check_job(job)
        told = job.result or {}
        return FlushResult(
            scope=scope,
            job=job,
            entries_removed=told.get("entries_removed"),
            memory_freed_mb=told.get("memory_freed_mb"),
            left_out=tuple(job.plan.get("left_out", ())),
        )

    async def _meant(self, scope: FlushScope) -> tuple[FlushScope, tuple[str, ...]]:
        """The scope by the names that servers have, and the epochs to raise. Raises NotFound."""
        match scope.kind:
            case FlushKind.MODEL:
                name = self._served_as(scope.name)
                if not any(name == slot.model for slot in self._pool.slots.values()):
                    name = self._models.catalog.find(name).name
                slot = next((slot for slot in self._pool.slots.values() if name in (slot.model, slot.id)), None)
                found = FlushScope(FlushKind.MODEL, name if slot is None else slot.model)
                return found, raised_by(found, server="" if slot is None else slot.id)
            case FlushKind.TENANT:
                await self._check_tenant(scope.name)
                return scope, raised_by(scope, groups=self._groups_of(scope))
            case _:
                return scope, raised_by(scope)

    def _groups_of(self, scope: FlushScope) -> tuple[str, ...]:
        """The cache groups in which prompts of the tenant may be."""
        row = self._effects.settings.tenants.get(scope.name, _NO_ROW)
        return tuple(dict.fromkeys((cache_group(scope.name, ""), cache_group(scope.name, row.cache_group))))

    def _server_of(self, scope: FlushScope) -> str:
        """The id of the slot that has the model; empty for the active backend."""
        return next((slot.id for slot in self._pool.slots.values() if slot.model == scope.name), "")

    async def _check_tenant(self, name: str) -> None:
        """Raises NotFound for one that no setting, no agent and no request has named."""
        settings = self._effects.settings
        known = {"default", *settings.tenants, *(life.agent.spec.tenant for life in self._roster)}
        if name in known or not settings.inference.token_tracking:
            return
        if await self._database.read(lambda conn: rollups.id_of(conn, name)) is None:
            raise NotFound(f"there is no tenant {name!r}", hint=did_you_mean(name, sorted(known)))

    async def _begin(
        self, scope: FlushScope, keys: tuple[str, ...], plan: FlushPlan, actor: str, approval: Approval
    ) -> StoredJob:
        """Writes down the job and the new epochs, in one transaction; what is flushed once is never found again."""
        at = time.time()

        def also(conn: sqlite3.Connection) -> None:
            approval.burn(conn)
            store.raise_epochs(conn, keys, actor, at)

        told = {"scope": str(scope.kind), "name": scope.name, "left_out": list(plan.left_out)}
        if approval.by:
            told["approved_by"] = approval.by
        async with self._writing:
            job = await self._jobs.begin(FLUSH, plan=told, progress=f"flushing {scope}", actor=actor, also=also)
            self._raised = await self._database.read(store.epochs)
        return job

    async def _run(self, job: StoredJob, scope: FlushScope, plan: FlushPlan) -> None:
        fresh = {at.server.name for at in plan.slots}
        self._fresh.update(fresh)
        try:
            groups, server = self._groups_of(scope), self._server_of(scope)
            with self._parking.flushing(scope, groups=groups, server=server):
                async with asyncio.timeout(LONGEST_S):
                    try:
                        await self._parking.flush(scope, groups=groups, server=server)
                    except Exception:  # the servers' memory all the same
                        await outcome_of(self._flush(plan))
                        raise
                    came = await outcome_of(self._flush(plan))
        except TimeoutError:
            came = TimedOut(f"requests under way held it up for {LONGEST_S:g} s")
        except asyncio.CancelledError:
            came = Cancelled("it was cancelled")
        except Exception as fault:  # a fault of Hive's own: the job has an end all the same
            log.exception("flush_failed scope=%s", scope)
            came = HiveError(f"a fault in Hive itself: {type(fault).__name__}: {fault}")
        finally:
            self._fresh.subtract(fresh)
        if fresh:
            self._proxy_link.say(self.epochs())
        if not self._is_leaving:  # else the next daemon says that it did not end
            await self._end(job, scope, came)

    async def _flush(self, plan: FlushPlan) -> int | None:
        """The prompts that were erased; None where that is not known. Raises HiveError."""
        await self._tell_proxy()
        erasing = [self._erase(at) for at in plan.slots]
        servers = dict.fromkeys(at.server for at in plan.loads)
        loading = [self._load_anew([at for at in plan.loads if at.server == server]) for server in servers]
        found = await asyncio.gather(*(outcome_of(work) for work in (*erasing, *loading)))
        erased = 0
        for one in found:
            if isinstance(one, HiveError):
                raise one
            erased += one
        return None if plan.salted or plan.loads else erased

    async def _tell_proxy(self) -> None:
        """Returns once the proxy has all epochs. Raises DependencyDown."""
        until = time.monotonic() + PROXY_S
        while True:
            try:
                await self._proxy_link.use_cache_epochs(self.epochs())
            except (LinkLost, TimedOut) as error:
                if time.monotonic() >= until:
                    raise DependencyDown(
                        f"the proxy has not taken the flush: {error.message}", hint="it takes it when it is back"
                    ) from None
                await asyncio.sleep(LOOK_S)
            else:
                return

    async def _end(self, job: StoredJob, scope: FlushScope, came: int | HiveError | None) -> None:
        if isinstance(came, HiveError):
            state = JobState.CANCELLED if isinstance(came, Cancelled) else JobState.FAILED
            ended = await outcome_of(self._jobs.end(job, state, error=job_error(came)))
        else:
            self.counts.flushed(str(scope.kind))
            detail = {"name": str(scope), "approved_by": job.plan.get("approved_by", "")}
            self._audit_log.note("cache.flushed", actor=job.actor, detail=detail)
            result = {"flushed": True, "entries_removed": came, "memory_freed_mb": None}
            ended = await outcome_of(
                self._jobs.end(
                    msgspec.structs.replace(job, progress=f"{scope} is flushed"), JobState.DONE, result=result
                )
            )
        if isinstance(ended, HiveError):
            log.error("flush_not_written job=%s error=%s", job.id, ended.message)

    def has(self, job_id: str) -> bool:
        """Whether that is a flush that is under way."""
        return job_id in self._going

    async def cancel(self, job_id: str) -> StoredJob:
        """The job, once it has ended. The new epochs stay. Raises NotFound."""
        if (task := self._going.get(job_id)) is not None:
            task.cancel()
        return await self._jobs.get(job_id, wait_s=ANSWER_S)

    def close(self) -> None:
        """The daemon leaves."""
        self._is_leaving = True
        for task in list(self._going.values()):
            task.cancel()

    # a llama-server ---------------------------------------------------------------------------------------------------

    async def _erase(self, at: ModelAt) -> int:
        """Erases its idle slots, and each other one when the request is over that was there. Raises NotSupported,
        BackendDown, BackendTimeout."""
        server, slots, erased, asked_at = at.server, Unerased(), 0, time.monotonic()
        control, still_there = self._control(server), self._still_there(server)
        while not slots.is_done:
            if not still_there():
                return erased  # what it kept went with it
            try:
                for slot in slots.look(await control.kept(at.model)):
                    erased += await control.erase(at.model, slot) > 0
                    slots.erased(slot)
                asked_at = time.monotonic()
            except (BackendDown, BackendTimeout):
                if await is_gone(control.address):
                    return erased
                if time.monotonic() - asked_at >= DOWN_S:
                    raise
            if not slots.is_done:
                await asyncio.sleep(LOOK_S)
        return erased

    def _control(self, server: CacheServer) -> BackendControl:
        own = self._active.control
        if not server.name and own is not None and own.address == server.address:
            return own
        return open_backend(server.kind, server.address)

    def _still_there(self, server: CacheServer) -> Callable[[], bool]:
        """Tells whether it is the same server as now. Of the active backend nothing is told but by its own answers."""
        slot = self._pool.slots.get(server.name)
        if slot is None:
            return lambda: True
        generation = slot.generation
        return lambda: slot.generation == generation and (_holds(slot) or slot.state is SlotState.STOPPING)

    # Ollama -----------------------------------------------------------------------------------------------------------

    async def _load_anew(self, loads: Sequence[ModelAt]) -> int:
        """Has the models unloaded, after their requests, and loaded again; what they kept goes with their processes.
        Raises HiveError."""
        server = loads[0].server
        if (slot := self._pool.slots.get(server.name)) is not None:
            await self._slot_loader.load_anew(slot)
        else:
            await self._loader.load_anew(self._control(server), [at.model for at in loads])
        return 0


def _holds(slot: PooledSlot) -> bool:
    """Whether its server may keep something, and goes on: also one of an earlier daemon that is being taken over."""
    if slot.state is SlotState.LOADING:
        return slot.process is not None and slot.process.state is ProcessState.SERVING
    return slot.state in HOLD
