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


MOST_TEMPLATE = 64 * 1024
"""Characters of a chat template that are passed on; of a longer one nothing is."""
MOST_META = 32


class _Modalities(msgspec.Struct, frozen=True):
    vision: bool = False
    audio: bool = False


class _TemplateCaps(msgspec.Struct, frozen=True):
    supports_tools: bool = False


class _Props(msgspec.Struct):
    build_info: str
    total_slots: int | None = None


class _OneModel(msgspec.Struct):
    """What `/props` tells of the model of a server that has one."""

    chat_template: str = ""
    chat_template_caps: _TemplateCaps = _TemplateCaps()
    modalities: _Modalities = _Modalities()


_Meta = dict[str, object]
"""`size` (bytes), `n_params`, `n_ctx` (of one conversation), `n_ctx_train`, `n_embd`, `ftype`, …"""


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
        """With one model `/props` tells more of it; a router's tells nothing of any."""
        listed = (await self._shape("/v1/models", _Models)).data
        props = await self._told_of_one() if len(listed) == 1 and listed[0].status is None else None
        return [_model_of(model, props) for model in listed]

    async def _told_of_one(self) -> _OneModel | None:
        try:
            return await self._shape("/props", _OneModel)
        except (BackendDown, BackendTimeout):
            return None

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


def _model_of(model: _Model, props: _OneModel | None) -> ModelInfo:
    """One row of its list, with what `/props` tells of it.

    >>> row = _Model(id="tiny", meta={"n_params": 5, "n_ctx": 4096, "x": [], "ftype": "all F32"})
    >>> found = _model_of(row, _OneModel(modalities=_Modalities(vision=True)))
    >>> found.parameters, found.context_length, found.capabilities, found.meta
    (5, 4096, ('completion', 'vision'), {'n_params': 5, 'n_ctx': 4096, 'ftype': 'all F32'})
    """
    meta = {key: value for key, value in (model.meta or {}).items() if isinstance(value, int | float | str)}
    can = (("completion", True),) if props is None else _abilities(props)
    template = "" if props is None or len(props.chat_template) > MOST_TEMPLATE else props.chat_template
    return ModelInfo(
        name=model.id,
        size_bytes=_whole(meta.get("size")),
        owned_by=model.owned_by,
        created=model.created,
        parameters=_whole(meta.get("n_params")),
        context_length=_whole(meta.get("n_ctx")) or _whole(meta.get("n_ctx_train")),
        capabilities=tuple(name for name, is_there in can if is_there),
        template=template,
        meta=dict(list(meta.items())[:MOST_META]),
    )


def _abilities(props: _OneModel) -> tuple[tuple[str, bool], ...]:
    return (
        ("completion", True),
        ("tools", props.chat_template_caps.supports_tools),
        ("vision", props.modalities.vision),
        ("audio", props.modalities.audio),
    )


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
