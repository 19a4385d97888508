"""llama-server's control answers (llama.cpp commit 0c1e570), with one model or as a router of several."""

from __future__ import annotations

import asyncio

import msgspec

from hive.domain import BackendKind, ModelInfo
from hive.errors import BackendDown, BackendTimeout, NotFound, NotSupported
from hive.inference import prefix_cache
from hive.inference.concurrency import Busy, gauge
from hive.inference.prefix_cache import PrefixCache
from hive.inference.server import LOAD_S, Server, check_done, within

LOOK_S = 0.1


class _Props(msgspec.Struct):
    build_info: str
    total_slots: int | None = None


class _Meta(msgspec.Struct):
    size: int | None = None
    n_params: int | None = None


class _Status(msgspec.Struct):
    value: str


class _Model(msgspec.Struct):
    id: str
    status: _Status | None = None
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
    why_not_load = "this llama-server serves the one model it was started with; as a router it has several"

    async def models(self) -> list[ModelInfo]:
        models = await self._shape("/v1/models", _Models)
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

    async def mark(self) -> str:
        """Its build and the names it lists: with a small model it is back before anybody saw that it was gone."""
        try:
            props, listed = await asyncio.gather(self._props(), self._shape("/v1/models", _Models))
        except (BackendDown, BackendTimeout):
            return ""
        return "\n".join([props.build_info, *(model.id for model in listed.data)])

    async def loaded(self) -> frozenset[str] | None:
        """A router says of each; with one model it has in memory what it lists."""
        try:
            listed = (await self._shape("/v1/models", _Models)).data
        except (BackendDown, BackendTimeout):
            return None
        return frozenset(model.id for model in listed if model.status is None or model.status.value == "loaded")

    async def look_for_files(self) -> None:
        """A router lists what was in its directory when it started, until it is told to look again (seen, 0c1e570)."""
        await self._text("/models?reload=1")

    async def version(self) -> str:
        return (await self._props()).build_info

    async def busy(self) -> Busy:
        """`/metrics` is 501 without `--metrics`, and a router tells neither: then nothing is known."""
        slots, metrics = await asyncio.gather(self._slots(), self._text("/metrics"))
        return Busy(slots=slots, waiting=gauge(metrics, "llamacpp:requests_deferred") if metrics is not None else None)

    async def prefix_cache(self) -> PrefixCache | None:
        """A router has counters per model only: it tells none of its own."""
        metrics = await self._text("/metrics")
        return None if metrics is None else prefix_cache.llama(metrics)

    async def load(self, model: str) -> None:
        """A router answers at once and loads then, in a process of its own."""
        status = await self._status(model)
        if status in ("unloaded", "sleeping"):
            check_done(await self._post("/models/load", {"model": model}, within_s=LOAD_S), self.address)
        async with within(LOAD_S, f"{self.address} has not loaded {model}"):
            while (status := await self._status(model)) != "loaded":
                if status == "unloaded":
                    raise BackendDown(f"{self.address} could not load {model}", hint="its log says why")
                await asyncio.sleep(LOOK_S)

    async def unload(self, model: str) -> None:
        if await self._status(model) != "unloaded":
            check_done(await self._post("/models/unload", {"model": model}, within_s=LOAD_S), self.address)

    async def _status(self, model: str) -> str:
        """In the router's words: `unloaded`, `loading`, `loaded`, `sleeping`, …"""
        listed = (await self._shape("/models", _Models)).data
        found = next((entry for entry in listed if entry.id == model), None)
        if found is None:
            raise NotFound(f"{self.address} has no model {model[:80]!r}", hint="hive backend status")
        if found.status is None:
            raise NotSupported(f"{model} is not loaded or unloaded on request: {self.why_not_load}")
        return found.status.value

    async def _props(self) -> _Props:
        return await self._shape("/props", _Props)

    async def _slots(self) -> int | None:
        try:
            return (await self._props()).total_slots
        except (BackendDown, BackendTimeout):
            return None
