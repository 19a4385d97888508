"""How requests reach the active backend: where it is, the key it is shown, and how it is checked."""

from __future__ import annotations

from collections.abc import Mapping

from hive.domain import BackendInfo, BackendKind, origin_of
from hive.host.access import access_of, context
from hive.settings import Inference
from hive.wire.dial import Tls
from hive.wire.upstream import UpstreamWay, forms

NO_WAY = UpstreamWay("")


def way_to(backend: BackendInfo, inference: Inference, env: Mapping[str, str]) -> UpstreamWay:
    """How requests to this backend are made; files of `inference` are read now.

    Raises ConfigError, NotPermitted where the key or the authorities cannot be had.

    >>> way_to(BackendInfo(kind=BackendKind.LLAMA, address="/run/l.sock"), Inference(), {})
    <UpstreamWay /run/l.sock>
    """
    origin = origin_of(backend.address)
    if not origin.tls and backend.kind is not BackendKind.REMOTE:
        return UpstreamWay(origin.dialled)
    access = access_of(inference, env).shown_to(backend.kind, backend.address)
    # Local servers are asked as localhost, as Ollama refuses other names; this one may be anywhere.
    is_plain = "://" not in backend.address and not origin.dialled.startswith("/")
    fields = b"host: %b\r\n" % (origin.dialled if is_plain else origin.host).encode()
    if access.key:
        fields += b"authorization: Bearer %b\r\n" % access.key.encode()
    tls = Tls(context(access), origin.name) if origin.tls else None
    bare, full = forms(fields)
    return UpstreamWay(origin.dialled, tls, origin.prefix.encode(), bare, full, bool(access.key))
