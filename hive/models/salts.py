"""Salts and groups that keep prompts apart in a backend's prefix cache. Pure.

A cache hit is faster than a miss, and so tells one caller what another one asked (CVE-2025-46570). What keeps prompts
apart is each kind of backend's own (`hive.backends`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

NOT_KEPT = ("cache_prompt", b"false")
"""Tells a backend neither to look at what it kept nor to keep this."""


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
    """The group that shares a prefix cache: the tenant alone, or all tenants that name the same group (`cache_group`).

    >>> cache_group("acme", ""), cache_group("acme", "us") == cache_group("other", "us")
    ('tenant acme', True)
    """
    return f"group {group}" if group else f"tenant {tenant}"


def is_kept(fields: Iterable[tuple[str, bytes]]) -> bool:
    """Whether a backend told this keeps what it reads for a later request.

    >>> is_kept([("cache_prompt", b"false")]), is_kept([("cache_salt", b'"x"')]), is_kept(())
    (False, True, True)
    """
    return NOT_KEPT not in fields
