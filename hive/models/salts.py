"""Whose prompts may meet in a backend's prefix cache. Pure.

A cache hit is faster than a miss, and so tells one caller what another one asked (CVE-2025-46570). vLLM keeps prompts
with different salts apart; llama-server can only be told not to look at what it kept.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import msgspec

from hive.domain import BackendInfo, BackendKind, Band

VLLM_PRIORITY = {Band.HIGH: b"0", Band.NORMAL: b"10", Band.LOW: b"20"}
"""vLLM's `priority`: a lower number goes first."""
_SALTED = frozenset(
    {
        *("/v1/chat/completions", "/v1/completions", "/v1/embeddings"),
        *("/v1/rerank", "/rerank", "/v1/score", "/score"),
    }
)
"""Endpoints of vLLM 0.32 and 0.33 whose schema has `cache_salt` and `priority`; older ones pass over them."""
_SLOTTED = frozenset({"/v1/chat/completions", "/v1/completions"})
"""Endpoints of llama-server that read `cache_prompt`; its /v1/messages does not (measured, 0c1e570)."""
NOT_KEPT = ("cache_prompt", b"false")
_NEITHER = "/v1/messages"
"""Begins the endpoints where neither of the two can be told to keep prompts apart."""


def salt(*parts: str) -> str:
    """32 hex digits that two lists of parts share only if they are equal, part by part.

    Each part goes in with its length: joined plainly, `org_1` + `2345` would be `org_12345` (tinfoil #386).

    >>> salt("org_1", "2345") == salt("org_12345", ""), salt("a", "b") == salt("a", "b")
    (False, True)
    """
    digest = hashlib.sha256(b"hive prefix cache")
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()[:32]


def cache_group(tenant: str, group: str) -> str:
    """Whose prompts may meet: the tenant's own, or those of all tenants that name the same group (`cache_group`).

    >>> cache_group("acme", ""), cache_group("acme", "us") == cache_group("other", "us")
    ('tenant acme', True)
    """
    return f"group {group}" if group else f"tenant {tenant}"


def is_kept(fields: Iterable[tuple[str, bytes]]) -> bool:
    """Whether a backend told this (`cache_fields`) keeps what it reads for a later request.

    >>> is_kept([("cache_prompt", b"false")]), is_kept([("cache_salt", b'"x"')]), is_kept(())
    (False, True, True)
    """
    return NOT_KEPT not in fields


def cache_fields(
    backend: BackendInfo, endpoint: str, *, group: str, tag: str = "", apart: bool
) -> tuple[tuple[str, bytes], ...]:
    """Body fields (name, raw JSON) that keep a prompt among its own group's in the prefix cache.

    `apart`: other groups use this backend too. Ollama has no such field: its cache is shared between all.

    >>> vllm = BackendInfo(kind=BackendKind.VLLM, address="x")
    >>> [name for name, raw in cache_fields(vllm, "/v1/completions", group="tenant a", apart=False)]
    ['cache_salt']
    >>> llama = BackendInfo(kind=BackendKind.LLAMA, address="x")
    >>> cache_fields(llama, "/v1/completions", group="tenant a", apart=True)
    (('cache_prompt', b'false'),)
    """
    if backend.kind is BackendKind.VLLM and endpoint in _SALTED:
        return (("cache_salt", msgspec.json.encode(salt(group, tag))),)
    if backend.kind is BackendKind.LLAMA and endpoint in _SLOTTED and apart:
        return (NOT_KEPT,)
    return ()


def can_keep_apart(backend: BackendInfo, endpoint: str) -> bool:
    """Whether prompts of this endpoint can be kept out of other groups' caches, where the backend can do so at all.

    >>> can_keep_apart(BackendInfo(kind=BackendKind.LLAMA, address="x"), "/v1/messages?beta=true")
    False
    """
    return backend.kind not in (BackendKind.VLLM, BackendKind.LLAMA) or not endpoint.startswith(_NEITHER)


def priority_fields(backend: BackendInfo, endpoint: str, band: Band) -> tuple[tuple[str, bytes], ...]:
    """The field that tells the backend's own queue of the band, where it orders by one.

    >>> vllm = BackendInfo(kind=BackendKind.VLLM, address="x", priority=True)
    >>> priority_fields(vllm, "/v1/completions", Band.HIGH)
    (('priority', b'0'),)
    """
    if backend.priority and endpoint in _SALTED:
        return (("priority", VLLM_PRIORITY[band]),)
    return ()
