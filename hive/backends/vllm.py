"""vLLM (0.32): data and pure functions."""

from __future__ import annotations

import msgspec

from hive.backends import openai_answers
from hive.backends.command_line import Launch, Order, model, program, served_name
from hive.backends.conversation import (
    LOAD_S,
    Answers,
    AskedServer,
    ControlAnswer,
    Conversation,
    check_done,
    decoded,
    get,
    json_of,
    post,
    shape,
    text,
    text_in,
)
from hive.backends.counters import Drafts, PrefixCache, ReportedLimits, draft_counters, gauge, prefix_counters, share
from hive.backends.openai_answers import MODELS
from hive.backends.spec import Asking, BackendSpec, Fields, Requests, Sleeping
from hive.backends.speculation import DRAFT, vllm_words
from hive.backends.vllm_fields import priority_field, salt_field
from hive.domain import BackendKind, Band, Dialect, ModelInfo
from hive.errors import AdapterMismatch, BackendDown, NotSupported
from hive.models.adapter_names import is_engine_name
from hive.models.cache_epochs import FlushedBy
from hive.models.capabilities import EDITS
from hive.settings.table import InferenceSection

MOST_SAID = 400
"""Characters of its own words in an error."""
_SCORES = ("/v1/rerank", "/rerank", "/v1/score", "/score")
_SALTED = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/embeddings", *_SCORES})
"""Endpoints of 0.32 and 0.33 whose schema has `cache_salt` and `priority`, where it describes none; older ones pass
over them."""


# --- which it is, and what it says of itself ---------------------------------------------------------------------


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


def recognise(answers: Answers) -> str | None:
    version = text_in(json_of(answers, "/version"), "version")
    listed = json_of(answers, MODELS).get("data")
    entries = listed if isinstance(listed, list) else []
    owners = {text_in(entry, "owned_by") for entry in entries if isinstance(entry, dict)}
    return version if version and "vllm" in owners else None


def version(server: AskedServer) -> Conversation[str]:
    return (yield from shape(server, "/version", _Version)).version


def models(server: AskedServer) -> Conversation[list[ModelInfo]]:
    listed = yield from shape(server, MODELS, _Models)
    return [
        ModelInfo(
            name=model.id,
            owned_by=model.owned_by,
            created=model.created,
            parent=model.parent or "",
            context_length=model.max_model_len,
        )
        for model in listed.data
    ]


def busy() -> Conversation[ReportedLimits]:
    """`--max-num-seqs` is told nowhere, not even in its metrics."""
    metrics = yield from text("/metrics")
    return ReportedLimits(waiting=gauge(metrics, "vllm:num_requests_waiting") if metrics is not None else None)


def prefix_cache() -> Conversation[PrefixCache | None]:
    """vLLM without prefix caching has no counters."""
    metrics = yield from text("/metrics")
    return None if metrics is None else cached_in(metrics)


def kv_usage() -> Conversation[float | None]:
    metrics = yield from text("/metrics")
    return None if metrics is None else share(metrics, "vllm:kv_cache_usage_perc")


def drafts() -> Conversation[Drafts | None]:
    """Its counters of speculation."""
    metrics = yield from text("/metrics")
    return None if metrics is None else draft_counters(metrics, "vllm")


def cached_in(metrics: bytes) -> PrefixCache | None:
    """Prompt tokens in all and from the cache.

    >>> told = b'vllm:prefix_cache_queries_total{engine="0"} 700.0\\nvllm:prefix_cache_hits_total{engine="0"} 640.0\\n'
    >>> cached_in(told)
    PrefixCache(queried=700, hit=640)
    """
    return prefix_counters(metrics, "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total")


# --- sleep (read in 0.32 and seen on a CPU, which has the routes and frees nothing; no GPU was used) ----------------


class _IsSleeping(msgspec.Struct):
    is_sleeping: bool


LEVELS = {"1": True, "2": False}
"""`/sleep?level=N`: 1 moves the weights to the host's memory, 2 drops them; both drop the cache of prompts."""
_DEEPEST = "2"
_STATES = {"weights_offloaded": "1", "discard_all": "2"}


def asleep(server: AskedServer) -> Conversation[str | None]:
    """Its level. That is told by its metrics alone; where they do not, a wake from the deepest is right for both."""
    answer = yield from get("/is_sleeping")
    if answer.status == 404:  # it was started without VLLM_SERVER_DEV_MODE
        return None
    if not decoded(server, "/is_sleeping", answer, _IsSleeping).is_sleeping:
        return ""
    metrics = yield from text("/metrics")
    return _DEEPEST if metrics is None else level_in(metrics)


def level_in(metrics: bytes) -> str:
    """The level that a sleeping server's metrics tell.

    >>> level_in(b'vllm:engine_sleep_state{engine="0",sleep_state="weights_offloaded"} 1.0\\n')
    '1'
    >>> level_in(b'vllm:engine_sleep_state{engine="0",sleep_state="weights_offloaded"} 0.0\\n')
    '2'
    """
    for line in metrics.decode(errors="replace").splitlines():
        name, _, value = line.rpartition(" ")
        if name.startswith("vllm:engine_sleep_state{") and value in ("1", "1.0"):
            for state, level in _STATES.items():
                if f'sleep_state="{state}"' in name:
                    return level
    return _DEEPEST


def fall_asleep(server: AskedServer, level: str) -> Conversation[None]:
    yield from _done(server, f"/sleep?level={level}", {})
    if not (yield from shape(server, "/is_sleeping", _IsSleeping)).is_sleeping:
        raise BackendDown(f"{server} says that it does not sleep")


def wake(server: AskedServer, level: str) -> Conversation[None]:
    """From level 2 the weights are read anew, before the cache takes the rest of the memory: a bare `/wake_up` would
    answer requests from memory that holds anything (vllm #29341)."""
    if level == "1":
        yield from _done(server, "/wake_up", {})
    else:
        yield from _done(server, "/wake_up?tags=weights", {})
        yield from _done(server, "/collective_rpc", {"method": "reload_weights"})
        yield from _done(server, "/wake_up?tags=kv_cache", {})
        yield from _done(server, "/reset_prefix_cache", {})
    if (yield from shape(server, "/is_sleeping", _IsSleeping)).is_sleeping:
        raise BackendDown(f"{server} says that it still sleeps")


def _done(server: AskedServer, path: str, body: dict[str, object]) -> Conversation[None]:
    check_done((yield from post(path, body, within_s=LOAD_S)), server)


# --- adapters (0.32, started with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1) -------------------------------------------------

ADAPTER_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that it can be told to make room for."""
NO_ADAPTERS = "set adapters = N in its [model NAME], or vllm_adapters = N in [inference], and start it anew"
_NOT_FOUND = b'{"detail":"Not Found"}'
"""The answer of a server without that route."""


class _Said(msgspec.Struct):
    message: str = ""


class _Refusal(msgspec.Struct):
    error: _Said


def adapters_at(server: AskedServer) -> Conversation[frozenset[str]]:
    """The adapters that Hive had loaded there."""
    return frozenset(model.name for model in (yield from models(server)) if model.parent and is_engine_name(model.name))


def load_adapter(server: AskedServer, name: str, path: str) -> Conversation[None]:
    """Has it answer to `name` with the adapter in the directory `path`, and asks that for a token: it takes some
    weights that it cannot use. Raises NotSupported, AdapterMismatch where it refuses these weights, BackendDown,
    BackendTimeout. One that it has by this name is the same weights."""
    answer = yield from post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path}, within_s=LOAD_S)
    if answer.status == 404 and answer.body.strip() == _NOT_FOUND:
        raise NotSupported(f"{server} was started without room for adapters", hint=NO_ADAPTERS)
    if answer.status != 200 and name not in (yield from adapters_at(server)):
        raise _refused(server, name, answer)
    target, body = openai_answers.completion(name, "max_tokens")
    answer = yield from post(target, body, within_s=LOAD_S)
    if answer.status != 200:
        yield from unload_adapter(server, name)
        raise _refused(server, name, answer)


def _refused(server: AskedServer, name: str, answer: ControlAnswer) -> AdapterMismatch:
    said = " ".join(_error_in(answer.body).split())[:MOST_SAID]
    return AdapterMismatch(f"{server} refuses {name}: {said or answer.status}")


def _error_in(body: bytes) -> str:
    """Its own words.

    >>> _error_in(b'{"error":{"message":"no rank"}}'), _error_in(b"x")
    ('no rank', '')
    """
    try:
        return msgspec.json.decode(body, type=_Refusal).error.message
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return ""


def unload_adapter(server: AskedServer, name: str) -> Conversation[None]:
    """It answers to this name no more. The weights stay in its memory until others need the room (#54839)."""
    answer = yield from post("/v1/unload_lora_adapter", {"lora_name": name}, within_s=LOAD_S)
    if answer.status not in (200, 404):
        check_done(answer, server)


# --- what requests say to it -------------------------------------------------------------------------------------


def cache_fields(
    endpoint: str,
    group: str,
    tag: str,
    apart: bool,  # noqa: ARG001 - a salt costs nothing
    flushed: tuple[str, ...],
) -> Fields:
    return salt_field(group, tag, flushed) if endpoint in _SALTED else ()


def priority_fields(endpoint: str, band: Band) -> Fields:
    return priority_field(band) if endpoint in _SALTED else ()


# --- how it is started -------------------------------------------------------------------------------------------


def places(told: int | None, inference: InferenceSection) -> tuple[int | None, str]:  # noqa: ARG001 - it tells nothing
    return inference.vllm_max_sequences, "vllm_max_sequences in hive.conf"


def adapter_words(adapters: int, max_rank: int) -> tuple[str, ...]:
    """The words of its command line for so many adapters at once, of this rank at most.

    >>> adapter_words(0, 64), adapter_words(4, 40)[-2:]
    ((), ('--max-lora-rank', '64'))
    """
    if not adapters:
        return ()
    rank = next((rank for rank in ADAPTER_RANKS if rank >= max_rank), ADAPTER_RANKS[-1])
    return "--enable-lora", "--max-loras", str(adapters), "--max-lora-rank", str(rank)


def launch(order: Order) -> Launch:
    inference, state = order.inference, order.state
    command = [
        *(inference.vllm_program, "serve", inference.vllm_model),
        *("--served-model-name", served_name(inference.default_model, inference.vllm_model)),
        *("--uds", str(order.socket)),
        "--enable-prefix-caching" if inference.vllm_prefix_caching else "--no-enable-prefix-caching",
        "--enable-chunked-prefill",
        *("--max-num-seqs", str(inference.vllm_max_sequences)),
        *(("--max-model-len", str(inference.vllm_context)) if inference.vllm_context else ()),
        *("--gpu-memory-utilization", f"{inference.vllm_gpu_memory_util:g}"),
        *("--scheduling-policy", inference.vllm_scheduling_policy),
        # Without it nothing tells how much of a prompt came from the cache.
        "--enable-prompt-tokens-details",
        "--disable-uvicorn-access-log",
    ]
    needed = [program("vllm_program", inference.vllm_program), model("vllm_model", inference.vllm_model)]
    command += [*vllm_words(inference), *adapter_words(inference.vllm_adapters, order.max_rank)]
    if inference.speculative == DRAFT and (draft := inference.vllm_speculative_model):
        needed.append(model("vllm_speculative_model", draft))
    more = {
        "VLLM_CACHE_ROOT": str(state / "vllm"),
        "VLLM_CONFIG_ROOT": str(state / "vllm"),
        "HF_HOME": str(state / "huggingface"),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        # Its parts talk over the loopback, the only interface there is.
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
    }
    if inference.vllm_adapters:
        more["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    return Launch(tuple(command), order.environment | more, tuple(needed), order.socket)


SPEC = BackendSpec(
    kind=BackendKind.VLLM,
    label="vLLM",
    dialects=frozenset({Dialect.OPENAI, Dialect.ANTHROPIC}),
    adds=frozenset({*_SCORES, "/tokenize", "/detokenize"}),
    not_relayed={
        **dict.fromkeys(("/pooling", "/classify"), "/v1/embeddings"),
        **dict.fromkeys(("/v1/audio/transcriptions", "/v1/audio/translations"), ""),
    },
    describes_all=True,  # its description is made of its routes
    questions=("/version", MODELS),
    recognise=recognise,
    asking=Asking(
        health_path="/health",  # 503 once the engine died; asleep (`/sleep`) still 200, while requests hang
        version=version,
        models=models,
        busy=busy,
        prefix_cache=prefix_cache,
        kv_usage=kv_usage,
        drafts=drafts,
        loaded=openai_answers.all_listed,
        why_not_load="vLLM serves the model it was started with",
        described_at="/openapi.json",  # which `--disable-fastapi-docs` takes away
    ),
    one_token=openai_answers.completion,
    tokens_in=openai_answers.tokens_in,
    requests=Requests(
        passed_over={"/v1/messages": (EDITS,)},  # measured with 0.32.0
        cache_fields=cache_fields,
        priority_fields=priority_fields,
        cannot_keep_apart=("/v1/messages",),
        short_completions=True,
        grammar="grammar_vllm",
    ),
    places=places,
    orders_by_priority=lambda inference: inference.vllm_scheduling_policy == "priority",
    prefix_cache="separated by tenant (salt)",
    flushed_by=FlushedBy.SALT,
    can_separate=True,
    is_as_described=True,
    model_format="hf",
    model_key="vllm_model",
    program=lambda inference: inference.vllm_program,
    launch=launch,
    sleeping=Sleeping(
        flags=("--enable-sleep-mode",),
        environment={"VLLM_SERVER_DEV_MODE": "1"},
        levels=LEVELS,
        asleep=asleep,
        fall_asleep=fall_asleep,
        wake=wake,
    ),
)
