"""The refusal of a path that has no row in the allowlist: the reason, and a path that is offered instead. Pure.

No backend is asked at any of these paths. Dated: Ollama's routes of 2026-08, vLLM 0.32, llama-server 0c1e570.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from hive.backends.kinds import specs
from hive.errors import HiveError, NotSupported, Refusal

TOLD_BYTES = 80
"""Bytes of a path that are shown in an error about it."""
NEAR = 0.6
"""Share of the letters at both ends that two paths have in common where one may be meant by the other."""
_CHANGES = "it changes the inference server for everybody, which is an operator's to do (`hive model`, `hive backend`)"
_TELLS = "it tells of everybody's requests, or of the server itself"
_FAR = "it is a cloud service's, and no inference server here has it"
_NOT_RELAYED = "Hive does not relay it"
_CHATS = (("/api", "/api/chat"), ("/v1/messages", "/v1/messages"))
_NOT_BUILT = "no server here makes speech, or changes a picture that it is sent"
_ANYTHING_ELSE = "it is on no list of endpoints"


class Known(NamedTuple):
    """A path of a known API that no agent may use. `kinds`: servers that answer it with a model, so that another one
    cannot (501); `instead`: what comes nearest to it; `is_built`: False if no kind has it (501)."""

    why: str
    kinds: frozenset[str] = frozenset()
    instead: str = ""
    is_built: bool = True


def _not_relayed() -> dict[str, Known]:
    """Paths that servers answer with a model, and are not asked, by what is known of their kinds."""
    by_path = {path: instead for spec in specs() for path, instead in spec.not_relayed.items()}
    return {
        path: Known(_NOT_RELAYED, frozenset(spec.kind for spec in specs() if path in spec.not_relayed), instead)
        for path, instead in by_path.items()
    }


KNOWN: dict[str, Known] = {
    **dict.fromkeys(("/api/push", "/api/create", "/api/copy", "/api/delete"), Known(_CHANGES, instead="/api/tags")),
    **dict.fromkeys(
        (
            *("/models/load", "/models/unload", "/lora-adapters", "/sleep", "/wake_up", "/reset_prefix_cache"),
            *("/collective_rpc", "/release_kv_cache_memory", "/pause", "/resume"),
            *("/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
        ),
        Known(_CHANGES, instead="/v1/models"),
    ),
    **dict.fromkeys(
        ("/slots", "/props", "/metrics", "/load", "/server_info", "/is_sleeping"), Known(_TELLS, instead="/v1/models")
    ),
    **dict.fromkeys(("/health", "/v1/health", "/ping", "/version"), Known(_TELLS, instead="/api/version")),
    **dict.fromkeys(
        (
            *("/v1/files", "/v1/batches", "/v1/assistants", "/v1/threads", "/v1/moderations", "/v1/vector_stores"),
            *("/v1/fine_tuning/jobs", "/v1/messages/batches"),
        ),
        Known(_FAR),
    ),
    **dict.fromkeys(("/v1/audio/speech",), Known(_NOT_BUILT, instead="/v1/audio/transcriptions", is_built=False)),
    **dict.fromkeys(
        ("/v1/images/edits", "/v1/images/variations"),
        Known(_NOT_BUILT, instead="/v1/images/generations", is_built=False),
    ),
    **_not_relayed(),
}
"""Servers' paths besides those of the allowlist, which is asked first."""


def not_offered(path: bytes, kind: str | None, offered: Collection[str]) -> HiveError:
    """The answer to a path that is not in `offered`, while a backend of that kind is active (None: not known).

    It is 501 for a path that another kind of server answers with a model, else 403. The path is told, cut to
    TOLD_BYTES.

    >>> not_offered(b"/chat/completions", "demo", ("/v1/chat/completions", "/api/chat")).message
    '/chat/completions is not offered to agents: it is on no list of endpoints'
    >>> not_offered(b"/chat/completions", "demo", ("/v1/chat/completions", "/api/chat")).hint
    'the nearest that is offered is /v1/chat/completions'
    >>> [not_offered(b"/pooling", kind, ("/",)).status for kind in ("ollama", "vllm")]
    [501, 403]
    """
    name = path.decode("ascii", "backslashreplace")
    told = (name if len(name) <= TOLD_BYTES else name[:TOLD_BYTES] + "…") or "an empty path"
    known = KNOWN.get(name, Known(_ANYTHING_ELSE))
    near = known.instead if known.instead in offered else nearest(name, offered, is_typed=known.why is _ANYTHING_ELSE)
    hint = f"the nearest that is offered is {near}" if near else ""
    if not known.is_built:
        return NotSupported(f"{told} is not offered: {known.why}", hint=hint)
    if kind is not None and known.kinds and kind not in known.kinds:
        kinds = " and ".join(sorted(known.kinds))
        return NotSupported(f"the active backend ({kind}) has no {told}: {kinds} have it, but {known.why}", hint=hint)
    return Refusal(f"{told} is not offered to agents: {known.why}", hint=hint)


def nearest(name: str, offered: Collection[str], *, is_typed: bool = True) -> str:
    """The one of `offered` that begins and ends most like `name`; if none is like it, or if it is no typing error, the
    path for chats in that dialect.

    >>> paths = ("/", "/api/chat", "/api/embed", "/v1/messages", "/v1/chat/completions")
    >>> [nearest(name, paths) for name in ("/v1/v1/chat/completions", "/v1/message/", "/api/v2/chat", "/api/x", "/x")]
    ['/v1/chat/completions', '/v1/messages', '/api/chat', '/api/chat', '/v1/chat/completions']
    """
    found = max(sorted(offered), key=lambda path: _likeness(name, path), default="") if is_typed else ""
    if found and _likeness(name, found) >= NEAR:
        return found
    chats = next((path for begins, path in _CHATS if name.startswith(begins)), "/v1/chat/completions")
    return chats if chats in offered else ""


def _likeness(one: str, other: str) -> float:
    """Share of the longer one that both have in common, counted from both ends: 0 to 1.

    >>> _likeness("/v1/models", "/v1/models"), _likeness("/v1/model", "/v1/models"), _likeness("abc", "xyz")
    (1.0, 0.9, 0.0)
    """
    one, other = one[: 2 * TOLD_BYTES].casefold(), other.casefold()
    same = _same_beginning(one, other) + _same_beginning(one[::-1], other[::-1])
    return min(same, len(one), len(other)) / max(len(one), len(other), 1)


def _same_beginning(one: str, other: str) -> int:
    for at, (letter, counterpart) in enumerate(zip(one, other, strict=False)):
        if letter != counterpart:
            return at
    return min(len(one), len(other))
