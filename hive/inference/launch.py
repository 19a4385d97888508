"""How each inference server is started: its command, its environment, and what has to be there before. Pure.

Each listens on a unix socket of its own in `RUNTIME`, but Ollama, which knows none: it listens on the loopback of a
network of its own, and systemd carries the socket there. None of them needs another network, and none is asked to
fetch anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from hive.domain import BackendKind
from hive.settings import Inference

RUNTIME = Path("/run/hive-inference")
"""Where an installed Hive's inference servers listen."""
STATE = Path("/var/lib/hive/inference")
"""Their HOME: what they cache."""
OLLAMA_ADDRESS = "127.0.0.1:11434"
"""In Ollama's own network."""
DRAFT_TOKENS = 5
"""Tokens the draft model is ahead (vLLM `num_speculative_tokens`, which has no default; its documentation uses 5)."""
PING_S = 1
"""A llama-server that is stopped ends at the next ping: after 30 s with its default (seen, commit 0c1e570)."""
SECRET = ("HIVE_", "INFERENCE_", "REDIS_", "CREDENTIALS_", "NOTIFY_")
"""Beginnings of names in the environment that are none of an inference server's business."""

STARTED = (BackendKind.OLLAMA, BackendKind.VLLM, BackendKind.LLAMA)
"""The kinds whose program somebody installs, and Hive starts."""
SERVICES = (*STARTED, BackendKind.DEMO)
"""The kinds that are services of an installed Hive. The demo backend is Hive's own program, and is chosen by name only:
a box without an inference server does not pretend to have one."""


class Needed(msgspec.Struct, frozen=True):
    """One path that must exist. `key`: the setting it comes from; `hint`: what to do where it does not."""

    key: str
    path: Path
    hint: str
    is_program: bool = False


class Launch(msgspec.Struct, frozen=True):
    """One server's start. `socket`: where it listens once it is up; None where it has none of its own making."""

    command: tuple[str, ...]
    environment: dict[str, str]
    needed: tuple[Needed, ...]
    socket: Path | None


def socket_of(kind: BackendKind, runtime: Path = RUNTIME) -> Path:
    """Where the proxy finds this kind of server.

    >>> socket_of(BackendKind.VLLM).as_posix()
    '/run/hive-inference/vllm.sock'
    """
    return runtime / f"{kind}.sock"


def unit_of(kind: BackendKind) -> str:
    """The service that runs this kind of server.

    >>> unit_of(BackendKind.OLLAMA), unit_of(BackendKind.LLAMA)
    ('hive-inference.service', 'hive-inference-llama.service')
    """
    return "hive-inference.service" if kind is BackendKind.OLLAMA else f"hive-inference-{kind}.service"


def launch(
    kind: BackendKind,
    inference: Inference,
    environment: Mapping[str, str],
    *,
    runtime: Path = RUNTIME,
    state: Path = STATE,
) -> Launch:
    """How a server of `kind`, one of STARTED, is started with these settings from this environment."""
    base = {name: value for name, value in environment.items() if not name.startswith(SECRET)}
    home = {"HOME": str(state), "XDG_CACHE_HOME": str(state / "cache")}
    match kind:
        case BackendKind.OLLAMA:
            return _ollama(inference, base | home)
        case BackendKind.VLLM:
            return _vllm(inference, base | home, socket_of(kind, runtime), state)
        case BackendKind.LLAMA:
            return _llama(inference, base | home, socket_of(kind, runtime))
        case BackendKind.DEMO | BackendKind.REMOTE:
            raise ValueError(f"{kind} is no program that settings describe (the demo backend is Hive's own)")


def _ollama(inference: Inference, environment: dict[str, str]) -> Launch:
    less = {"OLLAMA_NO_CLOUD": "1"}  # what would leave the box fails there, whatever it is named; a drop-in may say 0
    more = {
        "OLLAMA_HOST": OLLAMA_ADDRESS,
        "OLLAMA_MODELS": inference.ollama_models,
        # At its start Ollama deletes what it thinks no model uses any more.
        "OLLAMA_NOPRUNE": "1",
    }
    store = Needed(
        "ollama_models", Path(inference.ollama_models), "make it, or point inference.ollama_models to a store"
    )
    return Launch(
        (inference.ollama_program, "serve"),
        less | environment | more,
        (_program("ollama_program", inference.ollama_program), store),
        None,
    )


def _vllm(inference: Inference, environment: dict[str, str], socket: Path, state: Path) -> Launch:
    command = [
        *(inference.vllm_program, "serve", inference.vllm_model),
        *("--served-model-name", served_name(inference.default_model, inference.vllm_model)),
        *("--uds", str(socket)),
        "--enable-prefix-caching" if inference.vllm_prefix_caching else "--no-enable-prefix-caching",
        "--enable-chunked-prefill",
        *("--max-num-seqs", str(inference.vllm_max_sequences)),
        *("--gpu-memory-utilization", f"{inference.vllm_gpu_memory_util:g}"),
        *("--scheduling-policy", inference.vllm_scheduling_policy),
        # Without it nothing tells how much of a prompt came from the cache.
        "--enable-prompt-tokens-details",
        "--disable-uvicorn-access-log",
    ]
    needed = [_program("vllm_program", inference.vllm_program), _model("vllm_model", inference.vllm_model)]
    if draft := inference.vllm_speculative_model:
        config = {"model": draft, "num_speculative_tokens": DRAFT_TOKENS}
        command += ["--speculative-config", msgspec.json.encode(config).decode()]
        needed.append(_model("vllm_speculative_model", draft))
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
    return Launch(tuple(command), environment | more, tuple(needed), socket)


def _llama(inference: Inference, environment: dict[str, str], socket: Path) -> Launch:
    path = inference.llama_model
    one = ("-m", path, "--alias", served_name(inference.default_model, path))
    command = (
        *(inference.llama_program, *(("--models-dir", path) if path.endswith("/") else one)),
        *("--host", str(socket)),
        *("--parallel", str(inference.llama_parallel), "-c", str(inference.llama_context)),
        *("--slots", "--metrics", "--sse-ping-interval", str(PING_S)),
        *("--offline", "--no-webui"),
    )
    needed = (_program("llama_program", inference.llama_program), _model("llama_model", inference.llama_model))
    return Launch(command, environment, needed, socket)


def served_name(default_model: str, path: str) -> str:
    """What the one model of a server is called: as requests without a model ask for it, else after its file.

    >>> served_name("", "/var/lib/hive/models/qwen3-8b.gguf"), served_name("llama3.2", "/var/lib/hive/models/default")
    ('qwen3-8b', 'llama3.2')
    """
    return default_model or Path(path).name.removesuffix(".gguf")


def _program(key: str, path: str) -> Needed:
    return Needed(key, Path(path), f"install it there, or set inference.{key} in hive.conf", is_program=True)


def _model(key: str, path: str) -> Needed:
    return Needed(key, Path(path), f"put a model there, or set inference.{key} in hive.conf")
