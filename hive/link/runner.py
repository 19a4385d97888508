"""Messages between proxy and daemon about the runner's listener: who may ask there, and what the daemon answers."""

from __future__ import annotations

import msgspec

from hive.domain import Role
from hive.link.message import LinkMessage

CALLS_MAX = 64
"""Requests to the runner's own paths that are answered at once: each may be a whole body on the link that wakes agents,
and wait for as long as an unload takes."""


class TokenRow(msgspec.Struct, frozen=True):
    """A token of the API that is good. `expires_at`: Unix seconds, None for never."""

    role: Role
    expires_at: float | None = None


class RunnerTokens(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Told, by the daemon: all tokens by their digests (SHA-256, hex), in place of those told before."""

    tokens: dict[str, TokenRow]


class RunnerCall(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Ask, of the proxy: a request to one of the runner's own paths. Answer: `RunnerSaid`.

    `authorization`: the value of that field; `peer`: the client's address, empty on a unix socket.
    """

    method: str
    target: str
    authorization: bytes = b""
    content_type: str = ""
    body: bytes = b""
    peer: str = ""


class RunnerSaid(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Answer to `RunnerCall`. `fields`: of the head, without those that frame the body."""

    status: int
    fields: dict[str, str] = msgspec.field(default_factory=dict)
    body: bytes = b""
