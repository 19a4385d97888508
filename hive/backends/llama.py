"""llama-server (llama.cpp commit 0c1e570), with one model or as a router of several: data and pure functions."""

from __future__ import annotations

from typing import Any, TypeVar
from urllib.parse import quote

import msgspec

from hive.backends import openai_answers
from hive.backends.command_line import Launch, Order, model, program, served_name
from hive.backends.conversation import (
    LOAD_S,
    Answers,
    AskedServer,
    ControlAnswer,
    Conversation,
    Pause,
    Question,
    check_done,
    decoded,
    get,
    json_of,
    post,
    shape,
    text,
    text_in,
    texts,
)
from hive.backends.counters import Drafts, PrefixCache, ReportedLimits, draft_counters, gauge, prefix_counters, share
from hive.backends.openai_answers import MODELS
from hive.backends.spec import Asking, BackendSpec, Fields, KeptPrompt, Requests
from hive.backends.speculation import llama_words
from hive.domain import BackendKind, Dialect, ModelInfo
from hive.errors import BackendDown, BackendTimeout, NotFound, NotSupported
from hive.models.cache_epochs import FlushedBy
from hive.models.capabilities import EDITS, NO_SCHEMA, Over
from hive.models.salts import NOT_KEPT
from hive.settings.table import InferenceSection

LOOK_S = 0.1
MOST_TEMPLATE = 64 * 1024
"""Characters of a chat template that are passed on; of a longer one nothing is."""
MOST_META = 32
ENGINE = "engine"
"""Directory in `llama_slot_dir` where servers write: what is there is nobody's to keep."""
ERASE_S = 1.0
SAVE_S = 5.0
RESTORE_S = 60.0
"""A request waits less long, but what comes late is to be known."""
PING_S = 1
"""A llama-server that is stopped ends at the next ping: after 30 s with its default (seen, commit 0c1e570)."""
_KEPT = frozenset({"/v1/chat/completions", "/v1/completions"})
"""Endpoints that read `cache_prompt`; its /v1/messages does not (measured, 0c1e570)."""
_ONE_MODEL = "this llama-server serves the one model it was started with; as a router it has several"
_NO_DOCUMENTS = Over("return_documents", "it answers with each document's index alone", idle=(False,))


# --- which it is, and what it says of itself ---------------------------------------------------------------------


class _Modalities(msgspec.Struct, frozen=True):
    vision: bool = False
    audio: bool = False


class _TemplateCaps(msgspec.Struct, frozen=True):
    supports_tools: bool = False


class _Props(msgspec.Struct):
    build_info: str
    total_slots: int | None = None


class _OneModel(msgspec.Struct):
    """The model of a server that has one, by `/props`."""

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


class _Slot(msgspec.Struct):
    """An older llama-server tells of no tokens."""

    id: int
    is_processing: bool
    id_task: int = -1
    n_prompt_tokens: int | None = None
    n_prompt_tokens_cache: int | None = None
    n_prompt_tokens_processed: int | None = None


class _Erased(msgspec.Struct):
    n_erased: int


class _Saved(msgspec.Struct):
    n_saved: int
    n_written: int


class _Restored(msgspec.Struct):
    n_restored: int
    n_read: int


_Told = TypeVar("_Told", _Saved, _Restored)


class _Generation(msgspec.Struct, frozen=True):
    n_ctx: int = 0


class _MadeFor(msgspec.Struct):
    build_info: str
    model_path: str = ""
    total_slots: int | None = None
    default_generation_settings: _Generation = _Generation()


class _Models(msgspec.Struct):
    data: list[_Model]


def recognise(answers: Answers) -> str | None:
    return text_in(json_of(answers, "/props"), "build_info") or None


def models(server: AskedServer) -> Conversation[list[ModelInfo]]:
    """With one model `/props` tells more of it; a router's tells nothing of any."""
    listed = (yield from shape(server, MODELS, _Models)).data
    props = (yield from _told_of_one(server)) if len(listed) == 1 and listed[0].status is None else None
    return [_model_of(model, props) for model in listed]


def _told_of_one(server: AskedServer) -> Conversation[_OneModel | None]:
    try:
        return (yield from shape(server, "/props", _OneModel))
    except (BackendDown, BackendTimeout):
        return None


def mark(server: AskedServer) -> Conversation[str]:
    """Its build and the names it lists: with a small model it is back before anybody saw that it was gone."""
    answered = yield (Question("/props"), Question(MODELS))
    props, listed = (found if isinstance(found, ControlAnswer) else None for found in answered)
    if props is None or listed is None:
        return ""
    try:
        build, names = decoded(server, "/props", props, _Props), decoded(server, MODELS, listed, _Models)
    except BackendDown:
        return ""
    return "\n".join([build.build_info, *(model.id for model in names.data)])


def loaded(server: AskedServer) -> Conversation[frozenset[str] | None]:
    """A router says of each; with one model it has in memory what it lists."""
    try:
        listed = (yield from shape(server, MODELS, _Models)).data
    except (BackendDown, BackendTimeout):
        return None
    return frozenset(model.id for model in listed if model.status is None or model.status.value == "loaded")


def version(server: AskedServer) -> Conversation[str]:
    return (yield from shape(server, "/props", _Props)).build_info


def busy() -> Conversation[ReportedLimits]:
    """`/metrics` is 501 without `--metrics`, and a router tells neither: then nothing is known."""
    props, metrics = yield from texts("/props", "/metrics")
    waiting = gauge(metrics, "llamacpp:requests_deferred") if metrics is not None else None
    return ReportedLimits(places=None if props is None else _places_in(props), waiting=waiting)


def _places_in(props: bytes) -> int | None:
    try:
        return msgspec.json.decode(props, type=_Props).total_slots
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def prefix_cache() -> Conversation[PrefixCache | None]:
    """A router has counters per model only: it tells none of its own."""
    metrics = yield from text("/metrics")
    return None if metrics is None else cached_in(metrics)


def kv_usage() -> Conversation[float | None]:
    """An older llama-server tells it; that of 0.5.0 has no such figure, and /slots does not say what answers take."""
    metrics = yield from text("/metrics")
    return None if metrics is None else share(metrics, "llamacpp:kv_cache_usage_ratio")


def drafts() -> Conversation[Drafts | None]:
    """Its counters of speculation."""
    metrics = yield from text("/metrics")
    return None if metrics is None else draft_counters(metrics, "llamacpp")


def cached_in(metrics: bytes) -> PrefixCache | None:
    """It counts the tokens it had in its cache apart from those it read.

    >>> cached_in(b"llamacpp:prompt_tokens_total 12\\nllamacpp:prompt_tokens_cached_total 31\\n")
    PrefixCache(queried=43, hit=31)
    """
    counted = prefix_counters(metrics, "llamacpp:prompt_tokens_total", "llamacpp:prompt_tokens_cached_total")
    return None if counted is None else PrefixCache(counted.queried + counted.hit, counted.hit)


def load(server: AskedServer, name: str) -> Conversation[None]:
    """A router answers at once and loads then, in a process of its own."""
    status = yield from _status(server, name)
    if status in ("unloaded", "sleeping"):
        check_done((yield from post("/models/load", {"model": name}, within_s=LOAD_S)), server)
    while (status := (yield from _status(server, name))) != "loaded":
        if status == "unloaded":
            raise BackendDown(f"{server} could not load {name}", hint="its log says why")
        yield Pause(LOOK_S)


def unload(server: AskedServer, name: str) -> Conversation[None]:
    if (yield from _status(server, name)) != "unloaded":
        check_done((yield from post("/models/unload", {"model": name}, within_s=LOAD_S)), server)


def kept(server: AskedServer, name: str) -> Conversation[list[KeptPrompt]]:
    """Contents of the slots of the model's server. A router passes the question on, and loads nothing for it."""
    path = f"/slots?model={quote(name, safe='')}&autoload=false"
    answer = yield from get(path)
    if answer.status == 501:
        raise NotSupported(f"{server} does not tell of its slots", hint="llama-server needs --slots")
    return [
        KeptPrompt(
            slot.id,
            slot.is_processing,
            slot.id_task,
            slot.n_prompt_tokens,
            slot.n_prompt_tokens_cache,
            slot.n_prompt_tokens_processed,
        )
        for slot in decoded(server, "/slots", answer, list[_Slot])
    ]


def erase(server: AskedServer, name: str, slot: int) -> Conversation[int]:
    """The tokens that were in it. A busy one is erased when its request ends, so the question is dropped sooner: it
    would stand before requests that wait for any slot."""
    answer = yield from post(f"/slots/{slot}?action=erase&autoload=false", {"model": name}, within_s=ERASE_S)
    if answer.status == 501:
        raise NotSupported(f"{server} erases nothing that it keeps", hint="llama-server needs --slot-save-path")
    check_done(answer, server)
    try:
        return msgspec.json.decode(answer.body, type=_Erased).n_erased
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BackendDown(f"{server} answers an erase with something else: {error}") from None


def slots_made_for(server: AskedServer) -> Conversation[tuple[str, list[str]]]:
    """All that it tells of what a saved slot is good for: its build, its model, the context of a slot, its adapters;
    and the files of model and adapters. Raises NotSupported for a router, whose slots are its models'."""
    told = yield from shape(server, "/props", _MadeFor)
    if not told.model_path or told.total_slots is None:
        raise NotSupported(f"{server} is a router")
    listed = yield from shape(server, MODELS, _Models)
    adapters = yield from shape(server, "/lora-adapters", list[dict[str, Any]])
    meta = [{**(model.meta or {}), "id": model.id} for model in listed.data]
    facts = [told.build_info, told.model_path, told.default_generation_settings, told.total_slots, meta, adapters]
    return msgspec.json.encode(facts, order="deterministic").decode(), [
        told.model_path,
        *(str(adapter.get("path", "")) for adapter in adapters),
    ]


def save_slot(server: AskedServer, slot: int, filename: str) -> Conversation[tuple[int, int]]:
    """Tokens and bytes that were written to a file of this name in its own directory. A busy slot is saved when its
    request ends, so the question is dropped sooner."""
    answer = yield from post(f"/slots/{slot}?action=save", {"filename": filename}, within_s=SAVE_S)
    told = _slot_done(server, answer, _Saved)
    return told.n_saved, told.n_written


def restore_slot(server: AskedServer, slot: int, filename: str) -> Conversation[tuple[int, int]]:
    """Tokens and bytes that were read. Raises BackendDown for a file that it does not take; the slot is empty then."""
    answer = yield from post(f"/slots/{slot}?action=restore", {"filename": filename}, within_s=RESTORE_S)
    told = _slot_done(server, answer, _Restored)
    return told.n_restored, told.n_read


def _slot_done(server: AskedServer, answer: ControlAnswer, kind: type[_Told]) -> _Told:
    if answer.status == 501:
        raise NotSupported(f"{server} saves no slot", hint="llama-server needs --slot-save-path")
    check_done(answer, server)
    try:
        return msgspec.json.decode(answer.body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BackendDown(f"{server} answers with something else: {error}") from None


def _status(server: AskedServer, name: str) -> Conversation[str]:
    """In the router's words: `unloaded`, `loading`, `loaded`, `sleeping`, …"""
    listed = (yield from shape(server, "/models", _Models)).data
    found = next((entry for entry in listed if entry.id == name), None)
    if found is None:
        raise NotFound(f"{server} has no model {name[:80]!r}", hint="hive backend status")
    if found.status is None:
        raise NotSupported(f"{name} is not loaded or unloaded on request: {_ONE_MODEL}")
    return found.status.value


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


# --- what requests say to it -------------------------------------------------------------------------------------

PASSED_OVER = {  # measured with 0c1e570
    "/v1/completions": (Over("suffix", "it continues the prompt, and knows of nothing behind it", refused=True),),
    "/v1/rerank": (_NO_DOCUMENTS,),
    "/rerank": (_NO_DOCUMENTS,),
    "/tokenize": (
        Over("prompt", "llama-server splits the text of `content`", refused=True),
        Over("messages", "llama-server splits the text of `content` alone", refused=True),
    ),
    "/v1/messages": (
        Over("output_config", NO_SCHEMA, refused=True, inner="format"),
        Over("output_format", NO_SCHEMA, refused=True),
        Over("thinking", "the template alone decides whether it thinks", idle=("enabled", "adaptive"), inner="type"),
        EDITS,
    ),
}


def cache_fields(
    endpoint: str,
    group: str,  # noqa: ARG001 - it has no groups
    tag: str,  # noqa: ARG001
    apart: bool,
    flushed: tuple[str, ...],  # noqa: ARG001 - its slots are erased
) -> Fields:
    """It can only be told not to look at what it kept.

    >>> [cache_fields("/v1/completions", "tenant a", "", apart, ()) for apart in (True, False)]
    [(('cache_prompt', b'false'),), ()]
    """
    return (NOT_KEPT,) if apart and endpoint in _KEPT else ()


# --- how it is started -------------------------------------------------------------------------------------------


def places(told: int | None, inference: InferenceSection) -> tuple[int | None, str]:  # noqa: ARG001 - it tells itself
    if told:
        return told, "/props total_slots"
    return None, "it does not tell; [proxy] backend_concurrency sets a limit"


def _slot_place(inference: InferenceSection, state: str) -> str:
    return f"{inference.llama_slot_dir}/{ENGINE}" if inference.llama_slot_dir else state


def launch(order: Order) -> Launch:
    inference, path = order.inference, order.inference.llama_model
    one = ("-m", path, "--alias", served_name(inference.default_model, path))
    command = (
        *(inference.llama_program, *(("--models-dir", path) if path.endswith("/") else one)),
        *("--host", str(order.socket)),
        *("--parallel", str(inference.llama_parallel), "-c", str(inference.llama_context)),
        *("--slots", "--metrics", "--sse-ping-interval", str(PING_S)),
        *("--offline", "--no-webui"),
        *(speculation := llama_words(inference)),
        # A flush erases slots; what is kept in RAM besides none reaches, and then none is to be said to have.
        *(() if inference.llama_cache_ram_mb else ("--slot-save-path", _slot_place(inference, str(order.state)))),
    )
    # A variable: an older one does not know the flag, and has no such cache.
    kept = {"LLAMA_ARG_CACHE_RAM": str(inference.llama_cache_ram_mb)}
    needed = [program("llama_program", inference.llama_program), model("llama_model", inference.llama_model)]
    if "-md" in speculation:
        needed.append(model("llama_speculative_model", inference.llama_speculative_model))
    return Launch(command, order.environment | kept, tuple(needed), order.socket)


SPEC = BackendSpec(
    kind=BackendKind.LLAMA,
    label="llama-server",
    dialects=frozenset({Dialect.OPENAI, Dialect.ANTHROPIC}),
    adds=frozenset({"/v1/rerank", "/rerank", "/tokenize", "/detokenize"}),
    not_relayed={
        **dict.fromkeys(("/v1/audio/transcriptions", "/v1/audio/translations"), ""),
        **dict.fromkeys(("/completion", "/infill", "/apply-template"), "/v1/completions"),
        "/embedding": "/v1/embeddings",
    },
    questions=("/props",),
    recognise=recognise,
    # None of these wakes a model unloaded by `--sleep-idle-seconds`. A router lists what it could load, and only loaded
    # models have a size.
    asking=Asking(
        health_path="/health",  # 503 while the model loads, 200 when all slots are busy
        version=version,
        models=models,
        mark=mark,
        busy=busy,
        prefix_cache=prefix_cache,
        kv_usage=kv_usage,
        drafts=drafts,
        loaded=loaded,
        load=load,
        unload=unload,
        kept=kept,
        erase=erase,
        # A router lists what was in its directory when it started, until it is told to look again (seen, 0c1e570).
        look_for_files_at="/models?reload=1",
        slots_made_for=slots_made_for,
        save_slot=save_slot,
        restore_slot=restore_slot,
    ),
    one_token=openai_answers.completion,
    tokens_in=openai_answers.tokens_in,
    requests=Requests(
        passed_over=PASSED_OVER,
        cache_fields=cache_fields,
        cannot_keep_apart=("/v1/messages",),
        tells_cost=True,
        grammar="grammar_llama",
        takes_slot=_KEPT,
    ),
    places=places,
    prefix_cache="separated: cache_prompt off when tenants differ",
    flushed_by=FlushedBy.SLOTS,
    can_separate=True,
    model_format="gguf",
    model_key="llama_model",
    program=lambda inference: inference.llama_program,
    launch=launch,
)
