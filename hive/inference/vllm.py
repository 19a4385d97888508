"""vLLM's control answers (0.32): `/health`, `/version`, `/v1/models`, `/metrics`."""

from __future__ import annotations

import msgspec

from hive.domain import BackendCapabilities, BackendKind, ModelInfo
from hive.errors import BackendDown, BackendTimeout
from hive.inference import prefix_cache
from hive.inference.concurrency import Busy, gauge
from hive.inference.prefix_cache import PrefixCache
from hive.inference.server import Server


class _Version(msgspec.Struct):
    version: str


class _Model(msgspec.Struct):
    id: str
    owned_by: str = ""
    created: int = 0
    parent: str | None = None
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class Vllm(Server):
    """Keeps the contract of `Backend`. `/health` is 503 once the engine died; before loading is done no port is bound.

    Asleep (`/sleep`) it still says 200 while requests hang, so health does not tell sleep.
    """

    kind = BackendKind.VLLM
    health_path = "/health"
    why_not_load = "vLLM serves the model it was started with"

    async def models(self) -> list[ModelInfo]:
        models = await self._shape("/v1/models", _Models)
        return [
            ModelInfo(
                name=model.id,
                owned_by=model.owned_by,
                created=model.created,
                parent=model.parent or "",
                context_length=model.max_model_len,
            )
            for model in models.data
        ]

    async def loaded(self) -> frozenset[str] | None:
        """All that it lists."""
        try:
            return frozenset(model.name for model in await self.models())
        except (BackendDown, BackendTimeout):
            return None

    async def version(self) -> str:
        return (await self._shape("/version", _Version)).version

    async def busy(self) -> Busy:
        """`--max-num-seqs` is told nowhere, not even in its metrics."""
        metrics = await self._text("/metrics")
        return Busy(waiting=gauge(metrics, "vllm:num_requests_waiting") if metrics is not None else None)

    async def capabilities(self) -> BackendCapabilities:
        """From `/openapi.json`, which `--disable-fastapi-docs` takes away."""
        return await self._described() or BackendCapabilities()

    async def prefix_cache(self) -> PrefixCache | None:
        metrics = await self._text("/metrics")
        return None if metrics is None else prefix_cache.vllm(metrics)
