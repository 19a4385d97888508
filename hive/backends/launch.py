"""Start of each inference server of an installed Hive. The lists are fixed: a new kind is in none of them. Pure.

Each listens on a unix socket of its own in `RUNTIME`, but Ollama, which knows none: it listens on the loopback of a
network of its own, and systemd carries the socket there. None of them needs another network, and none is asked to
fetch anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from hive.backends.command_line import Launch, Order
from hive.backends.kinds import spec_of
from hive.domain import BackendKind
from hive.models.salts import cache_group
from hive.settings.table import InferenceSection, Settings

RUNTIME = Path("/run/hive-inference")
"""Directory in which an installed Hive's inference servers listen."""
STATE = Path("/var/lib/hive/inference")
"""Their HOME: what they cache."""
SECRET = ("HIVE_", "INFERENCE_", "REDIS_", "CREDENTIALS_", "NOTIFY_")
"""Beginnings of names in the environment that are none of an inference server's business."""

STARTED = (BackendKind.OLLAMA, BackendKind.VLLM, BackendKind.LLAMA)
"""The kinds whose program somebody installs, and Hive starts."""
SERVICES = (*STARTED, BackendKind.DEMO)
"""The kinds that are services of an installed Hive. The demo backend is Hive's own program, and is chosen by name only:
a box without an inference server does not pretend to have one."""


def socket_of(kind: str, runtime: Path = RUNTIME) -> Path:
    """Socket at which the proxy finds this kind of server.

    >>> socket_of(BackendKind.VLLM).as_posix()
    '/run/hive-inference/vllm.sock'
    """
    return runtime / f"{kind}.sock"


def unit_of(kind: str) -> str:
    """The service that runs this kind of server.

    >>> unit_of(BackendKind.OLLAMA), unit_of(BackendKind.LLAMA)
    ('hive-inference.service', 'hive-inference-llama.service')
    """
    return "hive-inference.service" if kind == BackendKind.OLLAMA else f"hive-inference-{kind}.service"


def launch(
    kind: str,
    inference: InferenceSection,
    environment: Mapping[str, str],
    *,
    runtime: Path = RUNTIME,
    state: Path = STATE,
    max_rank: int = 64,
) -> Launch:
    """Command line of a server of `kind` with these settings from this environment. `max_rank`: of adapters.

    Raises ValueError for a kind that is not in STARTED.
    """
    how = spec_of(kind).launch if kind in STARTED else None
    if how is None:
        raise ValueError(f"{kind} is no program that settings describe (the demo backend is Hive's own)")
    return how(Order(inference, shown_environment(environment, state), socket_of(kind, runtime), state, max_rank))


def without_ram_cache(settings: Settings) -> InferenceSection:
    """The settings of a server: prompts of more than one cache group are kept where a flush reaches them.

    >>> from hive.settings.table import TenantRow
    >>> inference = InferenceSection(llama_cache_ram_mb=512)
    >>> one, two = Settings(inference=inference), Settings(inference=inference, tenants={"acme": TenantRow()})
    >>> without_ram_cache(one).llama_cache_ram_mb, without_ram_cache(two).llama_cache_ram_mb
    (512, 0)
    """
    groups = {cache_group(name, row.cache_group) for name, row in settings.tenants.items()}
    if "default" not in settings.tenants:
        groups.add(cache_group("default", ""))
    inference = settings.inference
    return inference if len(groups) == 1 else msgspec.structs.replace(inference, llama_cache_ram_mb=0)


def shown_environment(environment: Mapping[str, str], state: Path) -> dict[str, str]:
    """The part of an environment that an inference server may see, with its own home.

    >>> shown_environment({"LANG": "C", "HIVE_X": "1"}, Path("/s"))
    {'LANG': 'C', 'HOME': '/s', 'XDG_CACHE_HOME': '/s/cache'}
    """
    base = {name: value for name, value in environment.items() if not name.startswith(SECRET)}
    return base | {"HOME": str(state), "XDG_CACHE_HOME": str(state / "cache")}
