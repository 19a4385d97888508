"""Start of the server of one entry of the pool: the kind's own launch, with what the entry and its grant say. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from hive.backends.command_line import Launch, Needed, Order
from hive.backends.entries import ModelEntry
from hive.backends.kinds import spec_of
from hive.backends.launch import shown_environment
from hive.domain import BackendKind
from hive.errors import BadRequest
from hive.settings.pool import CATEGORIES
from hive.settings.table import InferenceSection

CPU = "cpu"
MIB = 1 << 20
VLLM_CPU_KV_MIN_GIB = 1
"""vLLM's smallest cache on a CPU (`VLLM_CPU_KVCACHE_SPACE` is whole GiB)."""


def launch_entry(
    entry: ModelEntry,
    accounts: Mapping[str, int],
    context: int,
    inference: InferenceSection,
    environment: Mapping[str, str],
    *,
    socket: Path,
    state: Path,
    weights_bytes: int = 0,
    may_sleep: bool = False,
    max_rank: int = 64,
    most_audio_s: float = 7200,
) -> Launch:
    """The start of `entry` in these accounts (MiB by account) with this context (0: the entry's).

    `environment`: of the process that starts it. `weights_bytes`: of its files, for a server whose cache is given in
    bytes; `may_sleep`: it is started so that it can; `max_rank`: of adapters, where it takes several; `most_audio_s`:
    of one file of sound. Raises BadRequest for a context larger than the entry's, and for a model of Ollama.

    >>> from hive.settings.pool import ModelRow
    >>> entry = ModelEntry(id="q-1", name="q", kind="llama", path=Path("/m/q.gguf"), row=ModelRow(file="/m/q.gguf"))
    >>> made = launch_entry(entry, {"cpu": 900}, 0, InferenceSection(), {}, socket=Path("/r/q.sock"), state=Path("/s"))
    >>> made.command[1:5], made.environment["LLAMA_ARG_DEVICE"], made.environment["CUDA_VISIBLE_DEVICES"]
    (('-m', '/m/q.gguf', '--alias', 'q'), 'none', '')
    """
    if entry.is_ollamas:
        raise BadRequest(f"{entry.name} is a model of Ollama, which has no server for it alone")
    row = entry.row
    own = row.context or (inference.llama_context if entry.kind == BackendKind.LLAMA else 0)
    inference = msgspec.structs.replace(inference, vllm_context=0)  # that is of the service of `hive backend`
    if own and context > own:
        raise BadRequest(f"{entry.name} has a context of {own} tokens, and {context} were granted")
    is_llama, is_runner = entry.kind == BackendKind.LLAMA, entry.kind in CATEGORIES
    fields: dict[str, object] = {}
    if not is_runner:
        fields = _llama_fields(entry, context or own, inference) if is_llama else _vllm_fields(entry, inference)
    gpus = [account for account in accounts if account != CPU]
    order = Order(
        msgspec.structs.replace(inference, **fields),
        shown_environment(environment, state),
        socket,
        state,
        max_rank=max_rank,
        name=entry.name,
        model=str(entry.path),
        gpus=tuple(gpus),
        gpu_mb=tuple(accounts[gpu] for gpu in gpus),
        most_audio_s=most_audio_s,
        steps=row.steps,
        url=row.url,
    )
    make = spec_of(entry.kind).launch
    if make is None:
        raise BadRequest(f"{entry.kind} is started by somebody else")
    made = make(order)
    more, variables = list[str](), dict[str, str]()
    if not is_runner:
        more, variables = (
            _llama_more(entry, gpus) if is_llama else _vllm_more(entry, accounts, gpus, context or own, weights_bytes)
        )
    if may_sleep and gpus and (sleeping := spec_of(entry.kind).sleeping) is not None:
        more += sleeping.flags
        variables |= sleeping.environment
    # By UUID: the numbers of GPUs are others in another process.
    variables["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    needed = [_named(need, entry) for need in made.needed]
    if row.chat_template:
        needed.append(Needed("chat_template", Path(row.chat_template), f"named in {entry.origin}"))
    if entry.adapter is not None:
        needed.append(Needed("adapter", entry.adapter.path, f"hive adapter pull installs {entry.adapter.name} anew"))
    return Launch((*made.command, *more), made.environment | variables, tuple(needed), made.socket)


def _llama_fields(entry: ModelEntry, context: int, inference: InferenceSection) -> dict[str, object]:
    return {
        "default_model": entry.name,
        "llama_model": str(entry.path),
        "llama_context": context,
        "llama_parallel": entry.row.parallel or inference.llama_parallel,
        "llama_speculative_model": "" if entry.draft is None else str(entry.draft),
        **_speculation(entry, inference),
    }


def _vllm_fields(entry: ModelEntry, inference: InferenceSection) -> dict[str, object]:
    return {
        "default_model": entry.name,
        "vllm_model": str(entry.path),
        "vllm_adapters": entry.row.adapters,
        "vllm_max_sequences": entry.row.parallel or inference.vllm_max_sequences,
        "vllm_speculative_model": "" if entry.draft is None else str(entry.draft),
        **_speculation(entry, inference),
        # It refuses to start where this share of the GPU is not free, also if its cache is told in bytes.
        "vllm_gpu_memory_util": 0.01,
    }


def _speculation(entry: ModelEntry, inference: InferenceSection) -> dict[str, object]:
    """An entry speaks for itself: what [inference] says is of the service of `hive backend`."""
    row = entry.row
    return {
        "speculative": row.speculative,
        "speculative_draft_tokens": row.speculative_draft_tokens or inference.speculative_draft_tokens,
    }


def _llama_more(entry: ModelEntry, gpus: list[str]) -> tuple[list[str], dict[str, str]]:
    """Flags and variables of a llama-server. What not every build knows is a variable: an older one passes over it."""
    row, more = entry.row, list[str]()
    if entry.adapter is not None:
        more += ["--lora", str(entry.adapter.path)]
    # Mapped weights would be the page cache's memory, not the server's, and could not be measured.
    variables = {"LLAMA_ARG_LOAD_MODE": "none", "LLAMA_ARG_NO_MMAP": "1"}
    if row.chat_template:
        more += ["--chat-template-file", row.chat_template]
    if row.thinking != "auto":
        more += ["--reasoning-budget", "0" if row.thinking == "off" else "-1"]
    if row.category == "embedding":
        more.append("--embeddings")
    if gpus:  # all layers, or an error: layers that are left on the host would be slow, and told to nobody
        more += ["-ngl", "999", *(("--spec-draft-ngl", "999") if entry.draft is not None else ())]
        variables["LLAMA_ARG_FIT"] = "off"
    else:  # prompts that it keeps besides its context would be memory that nobody has granted
        variables |= {"LLAMA_ARG_DEVICE": "none", "LLAMA_ARG_CACHE_RAM": "0"}
    return more, variables


def _vllm_more(
    entry: ModelEntry, accounts: Mapping[str, int], gpus: list[str], context: int, weights_bytes: int
) -> tuple[list[str], dict[str, str]]:
    """Its cache is what the grant has beside the weights, in bytes: a share of the whole GPU would be the others' too
    (facts: --gpu-memory-utilization)."""
    row, more, variables = entry.row, list[str](), dict[str, str]()
    left = sum(accounts.values()) * MIB - int(weights_bytes * 1.3)
    if gpus:
        more += ["--kv-cache-memory-bytes", str(max(64 * MIB, left // len(gpus)))]
        if len(gpus) > 1:
            more += ["--tensor-parallel-size", str(len(gpus))]
    else:
        variables["VLLM_CPU_KVCACHE_SPACE"] = str(max(VLLM_CPU_KV_MIN_GIB, left // (1024 * MIB)))
    if context:
        more += ["--max-model-len", str(context)]
    if row.chat_template:
        more += ["--chat-template", row.chat_template]
    if row.thinking != "auto":
        told = msgspec.json.encode({"enable_thinking": row.thinking == "on"}).decode()
        more += ["--default-chat-template-kwargs", told]
    return more, variables


def _named(needed: Needed, entry: ModelEntry) -> Needed:
    """The path as the description of the model names it."""
    if needed.path == entry.draft:
        return Needed("draft", needed.path, f"put it there, or change [model {entry.row.draft}]")
    if needed.path != entry.path:
        return needed
    return Needed("file", needed.path, f"put it there, or change {entry.origin}")
