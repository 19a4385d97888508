"""The runner API's service: one way to see and to steer every kind of inference server.

What it does is done by the services that do it for every other caller: the pool's orders, the models of the server in
use. Here names are resolved, limits checked before anything moves, and tasks kept.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import NamedTuple

from hive.audit.approval import Approval
from hive.audit.jobs import Jobs, check_job
from hive.backends import ollama_memory
from hive.backends.backend import BackendControl
from hive.backends.kinds import spec_of
from hive.control.active_backend import Active
from hive.control.models import Models
from hive.domain import BackendKind, Band, JobState, ModelInfo
from hive.errors import (
    BadRequest,
    DependencyDown,
    HiveError,
    ModelBusy,
    ModelNotFound,
    NotSupported,
    RunnerNotReady,
    TimedOut,
    Unhealthy,
    WrongState,
)
from hive.lifecycle.cache_flush import CacheFlusher
from hive.lifecycle.load_tasks import PREFIX, LoadTasks, in_job
from hive.lifecycle.runner_models import chosen
from hive.lifecycle.runner_views import RunnerViews, context_of, measured_bytes
from hive.link.proxy_link import ProxyGates
from hive.models.cache_epochs import FlushKind, FlushScope
from hive.pool.bound import waiting_bound
from hive.pool.state import MIB, Demand, SlotState
from hive.pooling.pool_orders import PoolOrders
from hive.pooling.pooled_slot import PooledSlot
from hive.pooling.swaps import no_room
from hive.shapes.runner import Flushed, LoadTask, Runner, RunnerHealth, Unloaded
from hive.store.jobs import StoredJob
from hive.store.load_tasks import StoredLoad
from hive.terminal_text import counted

TTL_S = 5.0
"""An answer about capabilities is so old at most."""
STARTING_S = 2.0
DRAINED_BY = 0.8
"""An unload that does not force waits for so much of the time after which requests are cut, then is taken back."""
UNLOADED_S = 120.0
"""Longest wait for an unload, besides the time to drain."""
LOOK_S = 0.05
FROM_FILES = (BackendKind.LLAMA, BackendKind.VLLM)
"""Servers that have what is in the files that they were started with."""
AGAIN_S = 5.0


class LoadWish(NamedTuple):
    """The wishes for a load; None is none."""

    model_id: str
    quantization: str | None = None
    max_context: int | None = None
    budget_mb: int | None = None
    evict: str | None = None


class Ordered(NamedTuple):
    """The caller of an order, and the leave to do it."""

    actor: str
    approval: Approval


class RunnerDesk:
    """One for the daemon. Every method raises a HiveError that says what is wrong."""

    def __init__(
        self,
        *,
        views: RunnerViews,
        tasks: LoadTasks,
        orders: PoolOrders,
        models: Models,
        active: Active,
        jobs: Jobs,
        proxy_link: ProxyGates,
        runner_id: str,
        started_at: float,
        is_degraded: Callable[[], bool],
        cache: CacheFlusher,
    ) -> None:
        self._views = views
        self._tasks = tasks
        self._orders = orders
        self._pool = orders.pool
        self._models = models
        self._active = active
        self._jobs = jobs
        self._proxy_link = proxy_link
        self._id = runner_id
        self._started_at = started_at
        self._is_degraded = is_degraded
        self._cache = cache
        self._told: tuple[float, Runner] | None = None
        self._telling: asyncio.Lock = asyncio.Lock()
        self.is_stopping = False

    # looking ----------------------------------------------------------------------------------------------------------

    def check_ready(self) -> None:
        """Raises RunnerNotReady while Hive starts or stops: what would be told then is not so."""
        if self.is_stopping:
            raise RunnerNotReady("Hive is stopping", retry_after_s=AGAIN_S)
        if self._proxy_link.session is None or not self._pool.has_adopted:
            raise RunnerNotReady("Hive is starting", retry_after_s=STARTING_S)

    async def capabilities(self) -> tuple[Runner, float]:
        """The answer, and for how many seconds it holds. Raises RunnerNotReady."""
        self.check_ready()
        async with self._telling:  # however many ask at once, the servers are asked once
            now = time.monotonic()
            if self._told is None or now - self._told[0] >= TTL_S:
                self._told = now, await self._gathered()
        at, told = self._told
        return told, max(0.0, TTL_S - (time.monotonic() - at))

    async def _gathered(self) -> Runner:
        models, resources, queue, seen = await asyncio.gather(
            self._views.models(), self._views.resources(), self._views.queue(), self._views.queue_view()
        )
        is_unhealthy = bool(self._views.faults(seen))
        return {
            "runnerType": self._views.runner_type(),
            "runnerId": self._id,
            "models": models,
            "resources": resources,
            "queue": queue,
            "capabilities": self._views.capabilities(),
            "health": "unhealthy" if is_unhealthy else "degraded" if self._is_degraded() else "healthy",
        }

    async def health(self) -> RunnerHealth:
        """Raises RunnerNotReady, and Unhealthy where no request would be served."""
        self.check_ready()
        seen = await self._views.queue_view()
        if faults := self._views.faults(seen):
            raise Unhealthy("; ".join(faults), retry_after_s=AGAIN_S)
        loaded = (await self._views.models())["loaded"]
        found = RunnerHealth(
            status="degraded" if self._is_degraded() else "healthy",
            uptime=max(0, round(time.time() - self._started_at)),
            modelsLoaded=len(loaded),
        )
        if seen is not None:
            found["queueDepth"] = seen.waiting
        return found

    # loading ----------------------------------------------------------------------------------------------------------

    async def load(self, wish: LoadWish, ordered: Ordered) -> LoadTask:
        """The task, completed already where the model is loaded."""
        self.check_ready()
        catalog = self._models.catalog
        try:
            model = chosen(catalog, wish.model_id, wish.quantization)
        except ModelNotFound:
            await self._check_no_other(wish.model_id)
            raise
        evicts = None if wish.evict is None else chosen(catalog, wish.evict)
        load = self._load_pooled if self._orders.has(model.name) else self._load_at_server
        job = await load(model, evicts, wish, ordered)
        self._told = None
        return self._told_of(await self._tasks.begun(job, **_about(model, evicts, wish)))

    async def _load_pooled(
        self, model: ModelInfo, evicts: ModelInfo | None, wish: LoadWish, ordered: Ordered
    ) -> StoredJob:
        slot = self._pool.find(model.name)
        if slot.entry.is_remote:
            raise NotSupported(f"{model.name} is loaded where its server is, not here")
        self._check_beside(model, evicts)
        if slot.why_not:
            raise WrongState(f"{slot.model} cannot be loaded: {slot.why_not}")
        self._check_wish(slot, wish)
        if self._orders.is_ordered(slot):
            raise ModelBusy(f"{slot.model} is being loaded already", retry_after_s=AGAIN_S)
        leaving = None if evicts is None else self._pool.find(evicts.name)
        if slot.state is not SlotState.READY:
            if leaving is not None and leaving.grants:
                self._pool.swaps.check(slot, leaving)
            else:
                self._check_room(slot)
        evict = "" if leaving is None else leaving.model
        task = in_job(**_about(model, evicts, wish))
        return await self._orders.load(slot.model, ordered.actor, approval=ordered.approval, evict=evict, of_job=task)

    def _check_wish(self, slot: PooledSlot, wish: LoadWish) -> None:
        """Raises BadRequest, InsufficientMemory."""
        most = context_of(self._pool, slot)
        if wish.max_context is not None and most is not None and wish.max_context > most:
            raise BadRequest(
                f"maxContextLength: {slot.model} is described with {most} tokens for one request",
                hint=f"context in {slot.entry.origin}",
            )
        need = self._pool.need_bytes(slot)
        if wish.budget_mb is not None and need > wish.budget_mb * MIB:
            raise no_room(slot.model, need, wish.budget_mb * MIB, beside=" by gpuMemoryBudgetMB")

    def _check_room(self, slot: PooledSlot) -> None:
        """Raises InsufficientMemory where it can never be loaded as things are, whoever leaves."""
        now = time.monotonic()
        facts = self._pool.facts(now)
        if waiting_bound(facts, slot.id, Demand(Band.NORMAL, now), now).seconds is None:
            raise no_room(slot.model, self._pool.need_bytes(slot), self._views.free_bytes())

    async def _load_at_server(
        self, model: ModelInfo, evicts: ModelInfo | None, wish: LoadWish, ordered: Ordered
    ) -> StoredJob:
        """The inference server in use loads it, in the place of `evicts`, which comes back where that fails. There is
        no reservation: such a server shares its memory out itself."""
        server = self._server()
        spec = spec_of(server.kind)
        if spec.is_remote or spec.is_canned:
            raise NotSupported(f"the {spec.label} in use loads nothing on request")
        if wish.max_context is not None and model.context_length and wish.max_context > model.context_length:
            raise BadRequest(f"maxContextLength: {model.name} has {model.context_length} tokens")
        self._check_beside(model, evicts)
        actor, approval, task = ordered.actor, ordered.approval, in_job(**_about(model, evicts, wish))
        if spec.asking.load is None:  # it has this one model, and serves it
            plan, said = {"model": model.name}, f"{model.name} is loaded already"
            job = await self._jobs.begin(
                "model.load", plan=plan, progress=said, actor=actor, also=approval.burn, of_job=task
            )
            return await self._jobs.end(job, JobState.DONE, result=plan | {"changed": False})
        evict = "" if evicts is None else evicts.name
        return await self._models.load(model.name, actor, approval=approval, evict=evict, of_job=task)

    async def _check_no_other(self, name: str) -> None:
        """Raises NotSupported where a model lies on this box, and the server in use was started with others."""
        backend, _ = self._active.seen
        spec = None if backend is None else spec_of(backend.kind)
        if spec is not None and spec.kind in FROM_FILES and (file := await self._models.file_of(name)) is not None:
            raise NotSupported(
                f"{name[:80]} lies at {file}, and the {spec.label} in use was started without it",
                hint=f"[model {name[:80]}] in hive.conf gives it to the pool, which loads it; or name it as "
                f"{spec.kind}_model of [inference] and switch: hive backend switch {spec.kind}",
            )

    def _check_beside(self, model: ModelInfo, evicts: ModelInfo | None) -> None:
        """Raises BadRequest where one of the two is the pool's and the other is not."""
        if evicts is not None and self._orders.has(evicts.name) is not self._orders.has(model.name):
            raise BadRequest(f"{evicts.name} is another server's: its memory is not {model.name}'s to have")

    async def task(self, task_id: str) -> LoadTask:
        """Raises NotFound."""
        return self._told_of(await self._tasks.get(task_id))

    def _told_of(self, load: StoredLoad) -> LoadTask:
        told = LoadTask(taskId=PREFIX + load.job, status="loading", modelId=load.asked)
        if load.state is JobState.DONE:
            told["status"] = "completed"
            if load.memory_mb is not None:
                told["gpuMemoryUsedMB"] = load.memory_mb
            if load.took_ms is not None:
                told["loadTimeMs"] = load.took_ms
        elif load.ended:
            told["status"], told["error"] = "failed", load.error
        else:
            slot = next((slot for slot in self._pool.slots.values() if slot.model == load.model), None)
            progress, eta_s = (None, None) if slot is None else self._views.progress(slot, time.monotonic())
            if progress is not None:
                told["progress"] = progress
            if eta_s is not None:
                told["eta"] = eta_s
        return told

    # unloading --------------------------------------------------------------------------------------------------------

    async def unload(self, model_id: str, ordered: Ordered, *, force: bool = False) -> Unloaded:
        """Returns once the model has left. Raises ModelBusy where its requests do not end and it is not forced."""
        self.check_ready()
        model = chosen(self._models.catalog, model_id)
        if self._orders.has(model.name):
            freed = await self._unload_pooled(self._pool.find(model.name), ordered, force=force)
        else:
            freed = await self._unload_at_server(model, ordered)
        self._told = None
        told = Unloaded(modelId=model_id, kvCacheFlushed=True)  # the cache was its server's, or its part of it
        if freed is not None:
            told["gpuMemoryFreedMB"] = round(freed / MIB)
        return told

    async def _unload_pooled(self, slot: PooledSlot, ordered: Ordered, *, force: bool) -> int | None:
        if slot.entry.is_remote:
            raise NotSupported(f"{slot.model} is loaded where its server is, not here")
        if not force and slot.pinned_at is not None:
            raise ModelBusy(f"{slot.model} is pinned", hint=f"hive model unpin {slot.model}, or force")
        if not force and self._orders.is_ordered(slot):
            raise ModelBusy(f"{slot.model} is being loaded", retry_after_s=AGAIN_S)
        if slot.grants:
            await self._pool.look()
        held = measured_bytes(slot) if slot.grants else 0
        job = await self._orders.unload(slot.model, ordered.actor, approval=ordered.approval, force=force)
        until = time.monotonic() + self._pool.rules.drain_s + UNLOADED_S
        while not job.ended:
            waited_s = time.monotonic() - slot.closed_at
            is_over = waited_s >= DRAINED_BY * self._pool.rules.drain_s
            if not force and slot.state is SlotState.DRAINING and slot.in_flight and is_over:
                in_flight = slot.in_flight
                self._orders.keep(slot.model, job)
                raise ModelBusy(
                    f"{counted(in_flight, 'request is', 'requests are')} still at {slot.model}",
                    hint="force ends them",
                    retry_after_s=AGAIN_S,
                )
            if time.monotonic() > until:
                raise TimedOut(f"{slot.model} has not left within {UNLOADED_S:g} s", hint="hive pool shows why")
            job = await self._jobs.get(job.id, wait_s=LOOK_S)
        check_job(job)
        return held

    async def flush(self, scope: FlushScope, ordered: Ordered) -> Flushed:
        """Returns once nothing that was kept before is used again, or after 5 s, not flushed yet: that goes on then."""
        self.check_ready()
        if scope.kind is FlushKind.MODEL:
            scope = FlushScope(scope.kind, chosen(self._models.catalog, scope.name).name)
        came = await self._cache.flush(scope, actor=ordered.actor, approval=ordered.approval)
        told = Flushed(flushed=came.flushed)
        if came.entries_removed is not None:
            told["entriesRemoved"] = came.entries_removed
        if came.memory_freed_mb is not None:
            told["memoryFreedMB"] = came.memory_freed_mb
        return told

    async def _unload_at_server(self, model: ModelInfo, ordered: Ordered) -> int | None:
        spec = spec_of(self._server().kind)
        if spec.asking.unload is None:
            raise NotSupported(
                f"the {spec.label} in use does not unload {model.name}: {spec.asking.why_not_load or 'it cannot'}",
                hint="hive backend switch none stops a server",
            )
        held = await self._held_at_server(model.name)
        await self._done(await self._models.unload(model.name, ordered.actor, approval=ordered.approval))
        await self._until_gone(model.name)
        return held

    async def _until_gone(self, model: str) -> None:
        """A router answers before the model has left. Raises TimedOut."""
        until = time.monotonic() + UNLOADED_S
        while model in (await self._active.loaded() or ()):
            if time.monotonic() > until:
                raise TimedOut(f"{model} has not left within {UNLOADED_S:g} s", hint="hive backend status")
            await asyncio.sleep(LOOK_S)

    async def _held_at_server(self, model: str) -> int | None:
        """Bytes that Ollama says the model holds; None of another kind of server, which does not tell."""
        server = self._active.control
        if server is None or server.kind != BackendKind.OLLAMA:
            return None
        try:
            found = await server.converse(ollama_memory.in_memory)
        except HiveError:
            return None
        return sum(row.size_vram or row.size for row in found if row.name == model)

    def _server(self) -> BackendControl:
        server = self._active.control
        if server is None or not self._active.up:
            raise DependencyDown("no inference server answers", hint="hive backend status")
        return server

    async def _done(self, job: StoredJob) -> None:
        """Returns once the job has ended well. Raises its error, TimedOut."""
        job = job if job.ended else await self._jobs.get(job.id, wait_s=UNLOADED_S)
        if not job.ended:
            raise TimedOut(f"{job.progress}: not done within {UNLOADED_S:g} s")
        check_job(job)


def _about(model: ModelInfo, evicts: ModelInfo | None, wish: LoadWish) -> dict[str, str]:
    """The words of a task."""
    return {"asked": wish.model_id, "model": model.name, "evicts": "" if evicts is None else evicts.name}
