"""llama-server's control answers (llama.cpp commit 0c1e570), with one model or as a router of several."""

from __future__ import annotations

import asyncio

import msgspec

from hive.domain import BackendKind, ModelInfo
from hive.errors import BackendDown, BackendTimeout
from hive.inference import ask, prefix_cache
from hive.inference.concurrency import Busy, gauge
from hive.inference.prefix_cache import PrefixCache
from hive.inference.server import Server


class _Props(msgspec.Struct):
    build_info: str
    total_slots: int | None = None


class _Meta(msgspec.Struct):
    size: int | None = None
    n_params: int | None = None


class _Model(msgspec.Struct):
    id: str
    owned_by: str = ""
    created: int = 0
    meta: _Meta | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class LlamaServer(Server):
    """Keeps the contract of `Backend`. `/health` is 503 while the model loads, and 200 when all slots are busy.

    `/health`, `/props` and `/v1/models` do not wake a model unloaded by `--sleep-idle-seconds`. A router lists what
    it could load, and only loaded models have a size.
    """

    kind = BackendKind.LLAMA
    health_path = "/health"

    async def models(self) -> list[ModelInfo]:
        models = await ask.get_shape(self.address, "/v1/models", _Models)
        return [
            ModelInfo(
                name=model.id,
                size_bytes=model.meta.size if model.meta else None,
                owned_by=model.owned_by,
                created=model.created,
                parameters=model.meta.n_params if model.meta else None,
            )
            for model in models.data
        ]

    async def version(self) -> str:
        return (await self._props()).build_info

    async def busy(self) -> Busy:
        """`/metrics` is 501 without `--metrics`, and a router tells neither: then nothing is known."""
        slots, metrics = await asyncio.gather(self._slots(), ask.text(self.address, "/metrics"))
        return Busy(slots=slots, waiting=gauge(metrics, "llamacpp:requests_deferred") if metrics is not None else None)

    async def prefix_cache(self) -> PrefixCache | None:
        """A router has counters per model only: it tells none of its own."""
        metrics = await ask.text(self.address, "/metrics")
        return None if metrics is None else prefix_cache.llama(metrics)

    async def _props(self) -> _Props:
        return await ask.get_shape(self.address, "/props", _Props)

    async def _slots(self) -> int | None:
        try:
            return (await self._props()).total_slots
        except (BackendDown, BackendTimeout):
            return None
