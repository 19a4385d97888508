"""How many requests a backend works on at once, where that is known from, and what contradicts it. Pure.

Requests beyond it wait in Hive's queue, which is fair; in the backend's own, nobody's turn is anybody's choice.
"""

from __future__ import annotations

import re

import msgspec

from hive.domain import BackendKind
from hive.settings import Settings

OLLAMA_PARALLEL = 1
"""Ollama's default of `OLLAMA_NUM_PARALLEL` (envconfig/config.go of 2026-08); its API does not tell what it is."""
WARN_AFTER = 2
"""Checks in a row that find the backend's own queue filled: one alone may have looked between two requests."""
CALM_AFTER = 12
"""Checks in a row that find it empty, until the warning is taken back: it is to be seen, not to flicker."""


class Busy(msgspec.Struct, frozen=True, kw_only=True):
    """What a backend says of its own limits: None is what it does not tell.

    `slots`: requests it works on at once; `waiting`: requests in its own queue.
    """

    slots: int | None = None
    waiting: int | None = None


def choose_slots(kind: BackendKind, told: int | None, settings: Settings) -> tuple[int | None, str]:
    """Requests to send at once and where that number comes from; None for no limit.

    >>> choose_slots(BackendKind.LLAMA, 4, Settings())
    (4, '/props total_slots')
    >>> choose_slots(BackendKind.DEMO, None, Settings())
    (None, 'no limit')
    """
    if settings.proxy.backend_concurrency:
        return settings.proxy.backend_concurrency, "backend_concurrency in hive.conf"
    match kind:
        case BackendKind.LLAMA if told:
            return told, "/props total_slots"
        case BackendKind.LLAMA:
            return None, "it does not tell; [proxy] backend_concurrency sets a limit"
        case BackendKind.VLLM:
            return settings.inference.vllm_max_sequences, "vllm_max_sequences in hive.conf"
        case BackendKind.OLLAMA:
            return OLLAMA_PARALLEL, "Ollama's default, it does not tell; [proxy] backend_concurrency overrides it"
        case BackendKind.REMOTE:
            return None, "a remote server does not tell; [proxy] backend_concurrency sets a limit"
        case BackendKind.DEMO:
            return None, "no limit"


def takes_priority(kind: BackendKind, settings: Settings) -> bool:
    """Whether the backend orders its own queue by the `priority` of a request."""
    return kind is BackendKind.VLLM and settings.inference.vllm_scheduling_policy == "priority"


def prefix_cache(kind: BackendKind, settings: Settings) -> str:
    """Who may meet whose prompts in the backend's prefix cache, in words.

    >>> prefix_cache(BackendKind.OLLAMA, Settings())
    'shared between all agents (Ollama cannot separate it)'
    """
    if kind is BackendKind.DEMO:
        return "none"
    if kind is BackendKind.OLLAMA:
        return "shared between all agents (Ollama cannot separate it)"
    if kind is BackendKind.REMOTE:
        return "whoever runs the remote server decides; Hive shows it one key for all agents"
    if not settings.proxy.cache_isolation:
        return "shared between all agents (cache_isolation = false)"
    if kind is BackendKind.VLLM:
        return "separated by tenant (salt)"
    return "separated: cache_prompt off when tenants differ"


def gauge(exposition: bytes, name: str) -> int | None:
    """The sum of a gauge over its labels in a Prometheus text, None where it is not there.

    >>> gauge(b'vllm:num_requests_waiting{engine="0"} 2.0\\nvllm:num_requests_waiting{engine="1"} 1.0\\n', \
'vllm:num_requests_waiting')
    3
    """
    found = re.findall(rb"^%b(?:\{.*\})? +([0-9.e+]{1,20})" % re.escape(name.encode()), exposition, re.MULTILINE)
    try:
        return int(sum(map(float, found))) if found else None
    except (ValueError, OverflowError):
        return None


class OwnQueue:
    """Watches the backend's own queue, which stays empty where Hive's limit is the lower one.

    >>> queue = OwnQueue()
    >>> [queue.see(waiting, slots=4) for waiting in (3, 0, 3)]
    ['', '', '']
    >>> queue.see(1, slots=4)[:36]
    'the backend queues 3 requests itself'
    """

    def __init__(self) -> None:
        self._filled = self._empty = self._most = 0
        self._is_warned = False

    def __repr__(self) -> str:
        return f"<OwnQueue {'filled' if self._is_warned else 'empty'}, {self._most} at most>"

    def see(self, waiting: int | None, *, slots: int | None) -> str:
        """After a check that found `waiting` (None: it does not tell): the warning that stands, empty for none."""
        if not waiting:
            self._filled = 0
            self._empty += 1
            if self._empty >= CALM_AFTER or not self._is_warned:
                self._most = 0
                self._is_warned = False
            return self._warning(slots)
        self._empty = 0
        self._filled += 1
        self._most = max(self._most, waiting)
        self._is_warned = self._is_warned or self._filled >= WARN_AFTER
        return self._warning(slots)

    def _warning(self, slots: int | None) -> str:
        if not self._is_warned:
            return ""
        many = "1 request" if self._most == 1 else f"{self._most} requests"
        limit = "without a limit" if slots is None else f"at most {slots} at once"
        why = "" if slots is None else "someone else uses it, or its own limit is lower; "
        sends = "and Hive sends" if slots is None else "although Hive sends"
        return f"the backend queues {many} itself {sends} {limit}: {why}set [proxy] backend_concurrency"
