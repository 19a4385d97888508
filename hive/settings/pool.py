"""The settings of the pool of models: `[pool]`, and `[model NAME]`, one for each model."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from hive.settings.comfyui import NAME as COMFYUI
from hive.settings.comfyui import PREFIX as COMFY_PREFIX
from hive.settings.meta import setting_meta as _s

SLUG_MAX = 20


class PoolSection(msgspec.Struct, frozen=True, kw_only=True):
    """`[pool]`: the models of `[model NAME]`, each in a server of its own, loaded when asked for."""

    enabled: Annotated[bool, _s("Load the models that are described, each in a server of its own.")] = True
    found: Annotated[bool, _s("Files in models_dir are models of the pool too, without a description.")] = False
    reserve_mb: Annotated[int, _s("Memory of each GPU, and of the host, that no model is given.", unit="MiB", ge=0)] = (
        512
    )
    cpu_mb: Annotated[
        int, _s("Memory of the host for models without a GPU; 0: all but reserve_mb.", unit="MiB", ge=0)
    ] = 0
    estimate_margin_percent: Annotated[
        float, _s("Added to an estimate from a model's metadata, until it is measured.", unit="%", ge=0, le=100)
    ] = 10
    gpu_context_mb: Annotated[
        int,
        _s(
            "Added to the estimate of a llama-server on a GPU for what the driver takes for it, until it is measured;"
            " at most 1/32 of the GPU's memory.",
            unit="MiB",
            ge=0,
        ),
    ] = 850
    foreign_margin_percent: Annotated[
        float, _s("Added to the memory of processes that are none of the pool's.", unit="%", ge=0, le=100)
    ] = 10
    swap_share: Annotated[
        float, _s("Of the time of a busy box that may be lost to loading; it bounds every wait.", gt=0, lt=1)
    ] = 0.25
    swap_share_high: Annotated[float, _s("The same for requests of the high band.", gt=0, lt=1)] = 0.5
    patience_high_s: Annotated[float, _s("A request of the high band is late after that.", unit="s", ge=0)] = 2
    patience_normal_s: Annotated[float, _s("A request of the normal band is late after that.", unit="s", ge=0)] = 10
    patience_low_s: Annotated[float, _s("A request of the low band is late after that.", unit="s", ge=0)] = 60
    audience_s: Annotated[
        float, _s("An agent counts as a model's audience for so long after its last answer.", unit="s", ge=0)
    ] = 30
    keep_alive_s: Annotated[
        float, _s("An idle model stays so long, then it is unloaded; 0: until its memory is wanted.", unit="s", ge=0)
    ] = 0
    load_wait_s: Annotated[float, _s("A request waits so long for its model to be loaded.", unit="s", gt=0)] = 300
    load_depth: Annotated[int, _s("Requests that may wait for one model to be loaded.", ge=1)] = 64
    drain_s: Annotated[
        float, _s("Requests in flight may go on for so long after a model's turn, then they are cut.", unit="s", ge=0)
    ] = 60
    free_s: Annotated[
        float,
        _s("Longest wait until the memory of a stopped server is back; then it counts as foreign.", unit="s", ge=0),
    ] = 10
    prepare: Annotated[
        bool,
        _s("A supervisor waits, begun, for the model that is probably loaded next; it has some 25 MB of the host."),
    ] = True
    finish_loads: Annotated[bool, _s("A load goes on when all who waited for it have left.")] = True
    host_ram_mb: Annotated[
        int, _s("Host memory that models of vLLM on GPUs may sleep in; 0: none sleeps.", unit="MiB", ge=0)
    ] = 0
    fail_hold_s: Annotated[
        float, _s("A model whose loads have failed is tried again after that; 0: by an order only.", unit="s", ge=0)
    ] = 900


class ModelRow(msgspec.Struct, frozen=True, kw_only=True):
    """`[model NAME]`: one model of the pool. Requests ask for NAME."""

    backend: Annotated[str, _s("The kind of its server.", pattern="^(llama|vllm|ollama|remote|whisper|diffusers)$")] = (
        "llama"
    )
    file: Annotated[
        str,
        _s(
            "Its GGUF file, its directory for vLLM, Whisper or diffusers, or its name at Ollama or a remote server "
            "where that is another.",
            pattern=r"^(/.*|[A-Za-z0-9][A-Za-z0-9._:/@-]*)?$",
            expected="an absolute path, or the name of a model at its server",
        ),
    ] = ""
    url: Annotated[
        str,
        _s(
            "Of a remote model: where its server is, `https://HOST/v1`.",
            pattern=r"^(https?://[^\s@?#]+)?$",
            expected="http://HOST:PORT/v1 or https://HOST/v1",
        ),
    ] = ""
    api_key_file: Annotated[
        str,
        _s(
            "Of a remote model: a file (0600) with the key for its server.",
            pattern="^(/.*)?$",
            expected="an absolute path",
        ),
    ] = ""
    ca_file: Annotated[
        str,
        _s(
            "Of a remote model: certificates of the authorities its server's own is checked with; empty: the system's.",
            pattern="^(/.*)?$",
            expected="an absolute path",
        ),
    ] = ""
    category: Annotated[
        str, _s("What it is: llm, embedding, vision, image, audio.", pattern="^(llm|embedding|vision|image|audio)$")
    ] = "llm"
    context: Annotated[int, _s("Tokens of context of all its requests together.", unit="tokens", ge=0)] = 0
    parallel: Annotated[int, _s("Requests it works on at once; 0: as [inference] says.", ge=0)] = 0
    vram_mb: Annotated[int, _s("Memory it takes; 0: estimated, then measured.", unit="MiB", ge=0)] = 0
    pin: Annotated[bool, _s("Always loaded.")] = False
    keep_alive_s: Annotated[float, _s("As in [pool]; below 0: as [pool] says.", unit="s")] = -1
    first_byte_s: Annotated[
        float, _s("First body byte of an answer of its server; 0: as [proxy] says.", unit="s", ge=0)
    ] = 0
    gpus: Annotated[
        str,
        _s(
            "UUIDs of the GPUs it may be on, separated by commas; `cpu`: none; empty: any.",
            pattern=r"^(cpu|(GPU-|MIG-)[A-Za-z0-9-]+( *, *(GPU-|MIG-)[A-Za-z0-9-]+)*)?$",
            expected="UUIDs as `nvidia-smi -L` shows them (GPU-…, MIG-…), separated by commas, or cpu",
        ),
    ] = ""
    sleep: Annotated[
        bool, _s("It may sleep instead of being unloaded, where its server can: vLLM on a GPU, with host_ram_mb.")
    ] = True
    role: Annotated[
        str,
        _s(
            "What it is for: `model`, which requests ask for; `draft`, which other models of the pool draft with.",
            pattern="^(model|draft)$",
        ),
    ] = "model"
    speculative: Annotated[
        str,
        _s(
            "Tokens are guessed and then checked by it: `none`; `ngram`, from what the text has said before; `draft`, "
            "by the model that `draft` names.",
            pattern="^(none|ngram|draft)$",
        ),
    ] = "none"
    draft: Annotated[str, _s("The [model NAME] with `role = draft` that it drafts with.")] = ""
    speculative_draft_tokens: Annotated[
        int, _s("Tokens that are guessed ahead; 0: as [inference] says.", unit="tokens", ge=0, le=64)
    ] = 0
    adapters: Annotated[
        int, _s("Of vLLM: LoRA adapters that it works with at once; 0: it takes none.", ge=0, le=256)
    ] = 0
    chat_template: Annotated[
        str, _s("A Jinja file instead of the model's own template.", pattern="^(/.*)?$", expected="an absolute path")
    ] = ""
    thinking: Annotated[
        str, _s("Whether it thinks where a request does not say: auto, on, off.", pattern="^(auto|on|off)$")
    ] = "auto"
    steps: Annotated[
        int, _s("Of diffusers: steps of an image where a request does not say; 0: the pipeline's own.", ge=0, le=1000)
    ] = 0


OLLAMA, REMOTE, DIFFUSERS = "ollama", "remote", "diffusers"
CATEGORIES = {"whisper": "audio", "diffusers": "image", "comfyui": "image"}
"""Kinds of server (hive.runner) whose models are all of one category."""
OF_TEXT = ("context", "parallel", "adapters", "chat_template", "thinking")
"""Keys of a `[model NAME]` that are of models of text."""
OF_REMOTE = ("url", "api_key_file", "ca_file")
OF_SPECULATION = ("role", "speculative", "draft", "speculative_draft_tokens")
VLLM = "vllm"
LEFT_TO_REMOTE = (
    *("context", "vram_mb", "keep_alive_s", "gpus", "sleep", "chat_template", "thinking", "pin", "adapters"),
    *OF_SPECULATION,
)
"""Keys of a `[model NAME]` that whoever runs a remote server decides, or that have no meaning there."""
UNTOLD = {
    "context": "Ollama takes it from the model (PARAMETER num_ctx) or OLLAMA_CONTEXT_LENGTH",
    "chat_template": "Ollama takes it from the model (TEMPLATE)",
    "thinking": "Ollama's requests say it",
    **dict.fromkeys(OF_SPECULATION, "Ollama does not speculate"),
}
"""Keys of a `[model NAME]` that an Ollama is not told, and where it has them from."""


def category_of(row: ModelRow) -> str:
    """The category of a described model: its server's, where that has one only.

    >>> category_of(ModelRow()), category_of(ModelRow(backend="whisper"))
    ('llm', 'audio')
    """
    return CATEGORIES.get(row.backend, row.category)


def _why_not_of_runner(kind: str, values: Mapping[str, Any]) -> tuple[str, str]:
    """
    >>> _why_not_of_runner("whisper", {"category": "llm"})
    ('category', 'every model with backend = whisper is audio: leave it out')
    >>> _why_not_of_runner("whisper", {"context": 4096})
    ('context', 'it has no effect with backend = whisper: leave it out')
    """
    category = CATEGORIES[kind]
    if values.get("category", category) != category:
        return "category", f"every model with backend = {kind} is {category}: leave it out"
    others = () if kind == DIFFUSERS else ("steps",)
    told = next((key for key in (*OF_TEXT, *OF_SPECULATION, *others) if key in values), "")
    return (told, f"it has no effect with backend = {kind}: leave it out") if told else ("", "")


def why_not_described(name: str, values: Mapping[str, Any]) -> tuple[str, str]:
    """(the key, what is wrong with it) of a model's description, whose keys are right by themselves; two empty texts
    where nothing is.

    >>> why_not_described("m", {"file": "m:8b"}), why_not_described("m:8b", {"backend": "ollama"})
    (('file', "expected an absolute path, found 'm:8b'"), ('', ''))
    >>> why_not_described("m", {"backend": "ollama", "file": "/m.gguf"})
    ('file', "expected the model's name at Ollama, found '/m.gguf'")
    """
    if name == COMFYUI or name.startswith(COMFY_PREFIX):
        return "backend", f"the name {name[:60]} is that of a model of [comfyui]: choose another one"
    file = values.get("file", "")
    if values.get("backend") == REMOTE:
        return _why_not_remote(file, values)
    if values.get("steps") and values.get("backend") not in CATEGORIES:
        return "steps", "only a model with backend = diffusers has it"
    if key := next((key for key in OF_REMOTE if values.get(key)), ""):
        return key, "only a model with backend = remote has one"
    if values.get("adapters") and values.get("backend") != VLLM:
        why = "only vLLM is told: llama-server has a server for each" if values.get("backend") != OLLAMA else ""
        return "adapters", why or "Ollama takes none: leave it out"
    if values.get("backend") != OLLAMA:
        if not file.startswith("/"):
            return "file", f"expected an absolute path, found {file!r}"
        if values.get("backend") in CATEGORIES:
            return _why_not_of_runner(values["backend"], values)
        return _why_not_speculating(values)
    if file.startswith("/") or (not file and "+" in name):
        return "file", f"expected the model's name at Ollama, found {file or name!r}"
    told = next((key for key in UNTOLD if key in values), "")
    return (told, f"{UNTOLD[told]}: leave it out") if told else ("", "")


def _why_not_speculating(values: Mapping[str, Any]) -> tuple[str, str]:
    """
    >>> _why_not_speculating({"speculative": "draft"})
    ('draft', 'missing: the [model NAME] with role = draft')
    >>> _why_not_speculating({"draft": "d"})
    ('draft', 'it has no effect without speculative = draft')
    >>> _why_not_speculating({"role": "draft", "pin": True})
    ('pin', 'a draft is loaded with the models that draft with it: leave it out')
    """
    if values.get("role") == "draft":
        told = next(
            (key for key in ("pin", "speculative", "draft") if values.get(key) not in (None, False, "", "none")), ""
        )
        return (told, "a draft is loaded with the models that draft with it: leave it out") if told else ("", "")
    if (values.get("speculative") == "draft") is not bool(values.get("draft")):
        why = "it has no effect without speculative = draft" if values.get("draft") else ""
        return "draft", why or "missing: the [model NAME] with role = draft"
    return "", ""


def why_no_draft(values: Mapping[str, Any], models: Mapping[str, Mapping[str, Any]]) -> str:
    """The fault of the draft that a model names, among all that are described; empty where nothing is.

    >>> models = {"d": {"role": "draft", "file": "/d"}, "m": {}}
    >>> why_no_draft({"draft": "d"}, models), why_no_draft({"draft": "m"}, models)
    ('', '[model m] is no draft: it lacks role = draft')
    >>> why_no_draft({"draft": "d", "backend": "vllm"}, models), why_no_draft({"draft": "x"}, models)
    ('[model d] is for another kind of server', 'there is no [model x]')
    """
    if not (name := values.get("draft")):
        return ""
    if (draft := models.get(name)) is None:
        return f"there is no [model {name}]"
    if draft.get("role") != "draft":
        return f"[model {name}] is no draft: it lacks role = draft"
    if draft.get("backend", "llama") != values.get("backend", "llama"):
        return f"[model {name}] is for another kind of server"
    return ""


def _why_not_remote(file: str, values: Mapping[str, Any]) -> tuple[str, str]:
    """
    >>> _why_not_remote("", {"url": "https://h/v1"}), _why_not_remote("", {})
    (('', ''), ('url', 'missing: where its server is'))
    """
    if not values.get("url"):
        return "url", "missing: where its server is"
    if file.startswith("/"):
        return "file", f"expected the model's name at its server, found {file!r}"
    told = next((key for key in LEFT_TO_REMOTE if key in values), "")
    return (told, "whoever runs the remote server decides it: leave it out") if told else ("", "")


def as_ollama(name: str) -> str:
    """The name as Ollama writes it out, folded: two that are one model there are equal.

    >>> as_ollama("Tiny"), as_ollama("library/tiny:latest"), as_ollama("hf.co/Meta/X:Q4_0")
    ('tiny:latest', 'tiny:latest', 'hf.co/meta/x:q4_0')
    """
    folded = name.strip().lower().removeprefix("registry.ollama.ai/").removeprefix("library/")
    return folded if ":" in folded.rpartition("/")[2] else f"{folded}:latest"


def slot_id(name: str) -> str:
    """The id of the slot of the model `name`.

    >>> slot_id("meta-llama/Llama-3.1:8b"), slot_id("qwen3-8b")
    ('meta-llama-llama-3-1-5e5b7f4f', 'qwen3-8b-f9b30c0d')
    """
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:SLUG_MAX].strip("-")
    return f"{slug or 'model'}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
