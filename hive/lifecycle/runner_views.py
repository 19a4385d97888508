"""The runner as its clients see it: what is loaded, what may be, and how much room and work there is.

Gathered from the pool, the inference server in use, the GPUs and the proxy; what none of them tells is left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping

from hive.build import version
from hive.control.active_backend import Active
from hive.control.effects import DaemonEffects
from hive.control.runner_counts import RunnerCounts
from hive.domain import BackendKind, ModelInfo
from hive.errors import HiveError
from hive.host.gpu_memory import GpuMemoryReader
from hive.host.nvml import GpuState
from hive.lifecycle.memory_split import SERVING, MemorySplit, kv_usage_of, total
from hive.lifecycle.runner_health import is_full, load_faults, most_waiting
from hive.link.proxy_link import ProxyGates
from hive.link.requests import QueueView
from hive.models.catalog import Catalog
from hive.pool.accounts import free_bytes
from hive.pool.bound import load_progress
from hive.pool.expected import expected_in_s
from hive.pool.state import MIB, SlotState
from hive.pooling.deployments import Deployments
from hive.pooling.pooled_slot import PooledSlot
from hive.pooling.pooling import ModelPool
from hive.shapes.runner import (
    LoadedModel,
    LoadingModel,
    RunnerCapabilities,
    RunnerModels,
    RunnerQueue,
    RunnerResources,
)
from hive.terminal_text import counted

ALMOST = 0.99
"""A load that takes longer than usual is never said to be over."""


class RunnerViews:
    """One for the daemon. `models`: everything that may be asked for, as the catalog has it now."""

    def __init__(
        self,
        *,
        pool: ModelPool,
        active: Active,
        effects: DaemonEffects,
        gpus: GpuMemoryReader,
        proxy_link: ProxyGates,
        counts: RunnerCounts,
        catalog: Callable[[], Catalog],
        deployments: Deployments,
        memory: MemorySplit,
        adapters: Callable[[], Mapping[str, tuple[ModelInfo, bool]]],
    ) -> None:
        """`adapters`: each that is loaded, as a model of its name, and whether it is in memory."""
        self._pool = pool
        self._active = active
        self._effects = effects
        self._gpus = gpus
        self._proxy_link = proxy_link
        self._counts = counts
        self._catalog = catalog
        self._deployments = deployments
        self._memory = memory
        self._adapters = adapters

    # models -----------------------------------------------------------------------------------------------------------

    async def models(self) -> RunnerModels:
        catalog, now = self._catalog(), time.monotonic()
        slots = {
            model.name: (slot, model)
            for slot in self._pool.slots.values()
            if slot.entry.adapter is None
            for model in slot.models
        }
        in_memory, adapters = await self.in_memory(), self._adapters()
        loaded = [self._loaded(catalog, model, slot, now) for slot, model in slots.values() if slot.state in SERVING]
        for model, is_ready in adapters.values():
            if is_ready and (slot := self._slot_of(model)) is not None:
                loaded.append(self._loaded(catalog, model, slot, now))
            elif is_ready:
                loaded.append(_of_server(catalog, model))
        others = [model for model in catalog.models if model.name not in slots.keys() | adapters.keys()]
        loaded += [_of_server(catalog, model) for model in others if model.name in in_memory]
        starting = [pair for pair in slots.values() if pair[0].state is SlotState.LOADING]
        loading = [self._loading(slot, model, now) for slot, model in starting]
        there = {one["id"] for one in loaded} | {one["id"] for one in loading}
        return {
            "loaded": loaded,
            "loading": loading,
            "available": sorted(model.name for model in catalog.models if model.name not in there),
        }

    async def in_memory(self) -> Collection[str]:
        """The models in the memory of the inference server in use. One that does not tell and has a single model
        serves it; somebody else's server has its models where it likes."""
        backend, models = self._active.seen
        if backend is None or not backend.up:
            return ()
        told = await self._active.loaded()
        if told is not None:
            return told
        return () if backend.kind == BackendKind.REMOTE else [model.name for model in models]

    def _slot_of(self, adapter: ModelInfo) -> PooledSlot | None:
        """The slot of an adapter that has a server of its own, of the build that its name leads to."""
        for slot in self._pool.slots.values():
            of = slot.entry.adapter
            if of is not None and (of.name, of.digest) == (adapter.name, adapter.digest):
                return slot
        return None

    def _loaded(self, catalog: Catalog, model: ModelInfo, slot: PooledSlot, now: float) -> LoadedModel:
        found = LoadedModel(id=model.name, loadedAt=round(time.time() - (now - slot.ready_at)))
        if quantization := catalog.quantization(model):
            found["quantization"] = quantization
        if context := context_of(self._pool, slot):
            found["contextLength"] = context
        if len(slot.models) == 1 and (bytes := measured_bytes(slot)) is not None:  # else all of them have it together
            found["gpuMemoryMB"] = round(bytes / MIB)
        if (row := self._deployments.row(slot.id)) is not None:
            found["deployedBy"] = row.deployed_by
        return found

    def _loading(self, slot: PooledSlot, model: ModelInfo, now: float) -> LoadingModel:
        found = LoadingModel(id=model.name)
        progress, eta_s = self.progress(slot, now)
        if progress is not None:
            found["progress"] = progress
        if eta_s is not None:
            found["eta"] = eta_s
        return found

    def progress(self, slot: PooledSlot, now: float) -> tuple[float | None, int | None]:
        """The share of a load that is done, by the time that it usually takes, and seconds until it serves; None is not
        known."""
        told = load_progress(self._pool.slot_facts(slot, now), now)
        progress = 0.0 if slot.waiting else None
        if told is not None:
            progress = round(min(ALMOST, told.passed_s / max(told.about_s, 0.001)), 2)
        eta_s = expected_in_s(self._pool.facts(now), slot.id, now)
        return progress, None if eta_s is None else max(0, round(eta_s))

    # room and work ----------------------------------------------------------------------------------------------------

    async def resources(self) -> RunnerResources:
        models = await self._memory.seen()
        gpus = (await self._gpus.seen()).gpus
        found = _of_gpus(gpus) if gpus else self._of_host()
        if (weights := total([model.weights_bytes for model in models])) is not None:
            found["weightsSizeMB"] = round(weights / MIB)
        if (kv_bytes := total([model.kv_bytes for model in models])) is not None:
            found["kvCacheSizeMB"] = round(kv_bytes / MIB)
        if (usage := kv_usage_of(models)) is not None:
            found["kvCacheUtilization"] = usage
        return found

    def _of_host(self) -> RunnerResources:
        """The pool's share of the host's memory."""
        found = RunnerResources(gpuIds=[])
        accounts = self._pool.reading.accounts
        if not accounts:
            return found
        total, free = sum(account.total_bytes for account in accounts), self.free_bytes()
        found["gpuMemoryTotalMB"], found["gpuMemoryFreeMB"] = round(total / MIB), round(free / MIB)
        found["gpuMemoryUsedMB"] = round((total - free) / MIB)
        return found

    def free_bytes(self) -> int:
        """Bytes that are free in the pool's accounts together."""
        facts = self._pool.facts(time.monotonic())
        return sum(max(0, free_bytes(account, facts.slots, facts.rules)) for account in facts.accounts)

    async def queue_view(self) -> QueueView | None:
        """The line as the proxy has it; None where it cannot be asked."""
        try:
            return (await self._proxy_link.queue()).queue
        except HiveError:
            return None

    async def queue(self) -> RunnerQueue:
        seen = await self.queue_view()
        settings = self._effects.settings
        most = most_waiting(seen, settings.proxy.queue_depth, settings.tenants, self._lines)
        found = RunnerQueue(maxDepth=most)
        if seen is not None:
            found["depth"] = seen.waiting
        if (waits := self._counts.waits_ms()) is not None:
            found["avgWaitMs"], found["p95WaitMs"] = waits
        return found

    # what it is -------------------------------------------------------------------------------------------------------

    def kinds(self) -> set[str]:
        """The kinds of servers in use."""
        kinds = {slot.entry.kind for slot in self._pool.slots.values()}
        backend, _ = self._active.seen
        return kinds if backend is None else kinds | {str(backend.kind)}

    def runner_type(self) -> str:
        """`vllm-0.32.0` where one kind of server is in use and says its version, else Hive's own."""
        backend, _ = self._active.seen
        versions = {(slot.entry.kind, slot.backend.version) for slot in self._pool.slots.values() if slot.is_open}
        if backend is not None:
            versions.add((str(backend.kind), backend.version))
        named = {kind: said for kind, said in versions if said}
        if len(self.kinds()) == 1 and len(named) == 1:
            return "-".join(next(iter(named.items())))
        return f"hive-{version()}"

    def capabilities(self) -> RunnerCapabilities:
        models = self._catalog().models
        has_cache = self.kinds() & {BackendKind.LLAMA, BackendKind.OLLAMA, BackendKind.VLLM}
        if self.kinds() == {BackendKind.VLLM}:
            has_cache = has_cache if self._effects.settings.inference.vllm_prefix_caching else set()
        return {
            "streaming": True,
            "prefixCaching": bool(has_cache),
            "multiTenant": True,
            "visionInput": any("vision" in model.capabilities for model in models),
            "audioInput": any({"audio", "transcription"} & {*model.capabilities} for model in models),
            "functionCalling": any("tools" in model.capabilities or "tools" in model.template for model in models),
        }

    def faults(self, seen: QueueView | None) -> list[str]:
        """The reasons for which no request would be served now, clauses; none where some would."""
        backend, _ = self._active.seen
        slots, is_up = self._pool.slots.values(), backend is not None and backend.up
        found = load_faults(slots, is_up=is_up, now=time.monotonic())
        settings = self._effects.settings
        if seen is not None and is_full(seen, settings.proxy.queue_depth, settings.tenants, self._lines):
            found.append(f"the queue is full: {counted(seen.waiting, 'request waits', 'requests wait')}")
        return found

    @property
    def _lines(self) -> int:
        """The lines that there are: one for each model of the pool, and one for the inference server in use."""
        return len(self._pool.slots) + (self._active.seen[0] is not None)


def context_of(pool: ModelPool, slot: PooledSlot) -> int | None:
    """Tokens of one request of the slot's model, prompt and answer together, as it is described; None where nothing
    tells."""
    facts = pool.footprints.known(slot.entry)
    if not facts.context:
        return slot.models[0].context_length
    return facts.context // max(1, facts.parallel) if slot.entry.kind == BackendKind.LLAMA else facts.context


def measured_bytes(slot: PooledSlot) -> int | None:
    """Bytes that the slot's server holds, as they were measured last; None where a part of it is not known."""
    known = [grant.measured_bytes for grant in slot.grants if grant.measured_bytes is not None]
    return sum(known) if known and len(known) == len(slot.grants) else None


def _of_server(catalog: Catalog, model: ModelInfo) -> LoadedModel:
    """A model of the inference server in use, which tells neither when it was loaded nor what it takes."""
    found = LoadedModel(id=model.name)
    if quantization := catalog.quantization(model):
        found["quantization"] = quantization
    if model.context_length:
        found["contextLength"] = model.context_length
    return found


def _of_gpus(gpus: tuple[GpuState, ...]) -> RunnerResources:
    """The GPUs together; a figure that one of them does not tell is left out.

    >>> _of_gpus((GpuState(0, total_bytes=8 * MIB, used_bytes=MIB, busy_percent=50), GpuState(1, total_bytes=MIB)))
    {'gpuIds': [0, 1], 'gpuMemoryTotalMB': 9}
    """
    found = RunnerResources(gpuIds=[gpu.number for gpu in gpus])
    totals, used = [gpu.total_bytes for gpu in gpus], [gpu.used_bytes for gpu in gpus]
    free, busy = [gpu.free_bytes for gpu in gpus], [gpu.busy_percent for gpu in gpus]
    if None not in totals:
        found["gpuMemoryTotalMB"] = round(sum(filter(None, totals)) / MIB)
    if None not in used:
        found["gpuMemoryUsedMB"] = round(sum(filter(None, used)) / MIB)
    if None not in free:
        found["gpuMemoryFreeMB"] = round(sum(filter(None, free)) / MIB)
    if None not in busy:
        found["gpuUtilization"] = round(sum(filter(None, busy)) / len(busy) / 100, 2)
    return found
