"""Where a request says who it is: the token in its path or in its head. Pure."""

from __future__ import annotations

from hive.wire.http1 import Request

MAX_CLIENT_ID = 80
"""Characters of a client's own request id that are recorded."""


def split_token(target: bytes) -> tuple[bytes, bytes]:
    """`/a/<token>/api/chat` → the token and `/api/chat`; no token for any other target.

    >>> split_token(b"/a/hm_x/api/chat"), split_token(b"/api/chat")
    ((b'hm_x', b'/api/chat'), (b'', b'/api/chat'))
    """
    if not target.startswith(b"/a/"):
        return b"", target
    token, slash, rest = target[3:].partition(b"/")
    return token, slash + rest


def bearer(request: Request) -> bytes:
    """The token of `Authorization: Bearer` or `x-api-key`; empty where there is none."""
    for name, value in request.fields:
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            return value[7:].strip()
        if name == b"x-api-key":
            return value
    return b""


def client_id(request: Request | None) -> str | None:
    """The client's own request id, printable and bounded: it is only recorded."""
    value = request.field(b"x-request-id") if request is not None else None
    if value is None:
        return None
    return "".join(char for char in value.decode("latin-1")[:MAX_CLIENT_ID] if char.isprintable()) or None
