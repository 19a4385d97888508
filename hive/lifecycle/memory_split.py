"""The memory of loaded models by what is in it: weights, and the cache of keys and values. What is not known is left
out: of a vLLM the size of its cache is not, of a llama-server how much of it is in use."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import NamedTuple, TypeVar

from hive.backends.backend import open_backend
from hive.control.active_backend import Active
from hive.domain import BackendKind
from hive.exposition import Values
from hive.pool.estimate import kv_cache_bytes
from hive.pool.state import SlotState
from hive.pooling.pooled_slot import PooledSlot
from hive.pooling.pooling import ModelPool

SERVING = (SlotState.READY, SlotState.DRAINING)
ANSWER_S = 1.0
"""A scrape and the capabilities wait for no server longer than this."""
Found = TypeVar("Found")
WITH_CACHE = (BackendKind.LLAMA, BackendKind.OLLAMA, BackendKind.VLLM)


class ModelMemory(NamedTuple):
    """One loaded model. `weights_bytes`: of its files; `kv_bytes`: reckoned from its shape; `kv_usage`: the share of
    that in use, as its server tells. None is not known."""

    model: str
    weights_bytes: int | None = None
    kv_bytes: int | None = None
    kv_usage: float | None = None


def total(parts: Sequence[int | None]) -> int | None:
    """The sum, None where a part of it is not known or there is none.

    >>> total([1, 2]), total([1, None]), total([])
    (3, None, None)
    """
    known = [part for part in parts if part is not None]
    return sum(known) if known and len(known) == len(parts) else None


def kv_usage_of(models: Sequence[ModelMemory]) -> float | None:
    """The share of all caches that is in use: of one the server's own figure, of more by their sizes.

    >>> kv_usage_of([ModelMemory("a", kv_usage=0.5)])
    0.5
    >>> kv_usage_of([ModelMemory("a", kv_bytes=300, kv_usage=0.5), ModelMemory("b", kv_bytes=100, kv_usage=0.1)])
    0.4
    >>> kv_usage_of([ModelMemory("a", kv_usage=0.5), ModelMemory("b", kv_usage=0.1)])
    >>> kv_usage_of([ModelMemory("a", kv_bytes=300, kv_usage=0.5), ModelMemory("b", kv_bytes=100)])
    >>> kv_usage_of([])
    """
    if len(models) == 1:
        return models[0].kv_usage
    size = total([model.kv_bytes for model in models])
    if not size or any(model.kv_usage is None for model in models):
        return None
    return round(sum((model.kv_bytes or 0) * (model.kv_usage or 0.0) for model in models) / size, 4)


class MemorySplit:
    """One for the daemon: the models of the pool that serve, and that of the inference server in use."""

    def __init__(self, pool: ModelPool, active: Active) -> None:
        self._pool = pool
        self._active = active

    def __repr__(self) -> str:
        return f"<MemorySplit of {self._pool!r}>"

    async def seen(self) -> list[ModelMemory]:
        """Asks each server how much of its cache is in use; one that does not answer tells nothing. Never raises."""
        slots = [slot for slot in self._pool.slots.values() if slot.state in SERVING and slot.entry.kind in WITH_CACHE]
        pooled, active = await asyncio.gather(
            asyncio.gather(*(self._of_slot(slot) for slot in slots)), self._of_active()
        )
        return [*pooled, *active]

    async def metrics(self) -> dict[str, Values | None]:
        """For Prometheus (`hive.control.runner_counts.TABLE`)."""
        models = await self.seen()
        return {
            "gpu_memory_weights": {(one.model,): one.weights_bytes for one in models if one.weights_bytes is not None},
            "gpu_memory_kv_cache": {(one.model,): one.kv_bytes for one in models if one.kv_bytes is not None},
            "kv_cache_usage": {(one.model,): one.kv_usage for one in models if one.kv_usage is not None},
        }

    async def _of_slot(self, slot: PooledSlot) -> ModelMemory:
        if not slot.entry.has_server_here:
            return ModelMemory(slot.model)
        facts = self._pool.footprints.known(slot.entry)
        kv = None
        if slot.entry.kind == BackendKind.LLAMA and facts.shape is not None and facts.context:
            kv = kv_cache_bytes(facts.shape, facts.context)  # a vLLM has what its grant leaves
        usage = await _in_time(open_backend(slot.entry.kind, slot.address).kv_usage())
        return ModelMemory(slot.model, facts.size_bytes or None, kv, usage)

    async def _of_active(self) -> list[ModelMemory]:
        (backend, models), control = self._active.seen, self._active.control
        if backend is None or control is None or not backend.up or backend.kind not in WITH_CACHE:
            return []
        if backend.kind == BackendKind.OLLAMA and not await _in_time(self._active.loaded()):
            return []
        return [
            ModelMemory(models[0].name if models else str(backend.kind), kv_usage=await _in_time(control.kv_usage()))
        ]


async def _in_time(answer: Awaitable[Found | None]) -> Found | None:
    """None where a server does not tell in time: a llama-server answers between two batches of a prompt."""
    try:
        async with asyncio.timeout(ANSWER_S):
            return await answer
    except TimeoutError:
        return None
