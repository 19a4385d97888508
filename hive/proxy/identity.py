"""Tokens and `X-…` fields of a request: the identity it shows, and the wishes of a trusted caller. Pure."""

from __future__ import annotations

from hive.domain import Band, CacheMode, is_name
from hive.errors import BadRequest
from hive.models.cache_epochs import cache_tag
from hive.routing.wishes import NO_WISHES, Wishes
from hive.wire.http1 import Request

MAX_CLIENT_ID = 80
"""Characters of a client's own request id that are recorded."""
HEARTBEAT_S = (1.0, 60.0)
"""A client may ask for a sign of life this often."""


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


def wishes_of(request: Request) -> Wishes:
    """`X-Tenant-ID`, `X-Priority`, `X-Cache-Mode` and `X-Cache-Tag` of a caller known to be trusted.

    `NO_WISHES` itself where there is none of them. Raises BadRequest for a value that means nothing.
    """
    tenant = _field(request, b"x-tenant-id")
    if tenant and not is_name(tenant):
        raise BadRequest("X-Tenant-ID: a tenant's name is a letter a-z, then up to 39 of a-z, 0-9 and -")
    tag = cache_tag(_field(request, b"x-cache-tag"))
    try:
        band = Band(_field(request, b"x-priority") or Band.NORMAL)
    except ValueError:
        raise BadRequest("X-Priority is high, normal or low") from None
    try:
        mode = CacheMode(_field(request, b"x-cache-mode") or CacheMode.AUTO)
    except ValueError:
        raise BadRequest("X-Cache-Mode is prefix, none or auto") from None
    wishes = Wishes(tenant, band, mode, tag)
    return NO_WISHES if wishes == NO_WISHES else wishes


def is_local_only(request: Request) -> bool:
    """Whether the request says itself that it is not to leave the box; whatever it says but `0` is yes."""
    return any(name == b"x-hive-local-only" and value.strip() != b"0" for name, value in request.fields)


def heartbeat_of(request: Request, default_s: float) -> float:
    """Seconds between two signs of life of a waiting stream: as `X-Hive-Heartbeat` asks, else the default; 0 for none.

    Raises BadRequest.
    """
    asked = request.field(b"x-hive-heartbeat")
    if asked is None:
        return default_s
    if not (asked.isdigit() and len(asked) <= 2) or not HEARTBEAT_S[0] <= int(asked) <= HEARTBEAT_S[1]:
        raise BadRequest("X-Hive-Heartbeat is a whole number of seconds from 1 to 60")
    return float(asked)


def _field(request: Request, name: bytes) -> str:
    value = request.field(name)
    return "" if value is None else value.decode("latin-1")
