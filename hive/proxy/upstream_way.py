"""The way of requests to the active backend: its address, the key it is shown, and the check of its certificate."""

from __future__ import annotations

from collections.abc import Mapping

from hive.backends.kinds import spec_of
from hive.domain import BackendInfo, origin_of
from hive.host.access import access_of, context
from hive.settings.table import InferenceSection
from hive.wire.dial import Tls
from hive.wire.upstream import UpstreamWay, forms

NO_WAY = UpstreamWay("")


def way_to(backend: BackendInfo, inference: InferenceSection, env: Mapping[str, str]) -> UpstreamWay:
    """The way to this backend; files of `inference` are read now.

    Raises ConfigError, NotPermitted if the key or the authorities cannot be read.

    >>> way_to(BackendInfo(kind="llama", address="/run/l.sock"), InferenceSection(), {})
    <UpstreamWay /run/l.sock>
    """
    origin = origin_of(backend.address)
    is_remote = spec_of(backend.kind).is_remote
    if not origin.tls and not is_remote:
        return UpstreamWay(origin.dialled)
    access = access_of(inference, env).shown_to(backend.address, may_ask=is_remote)
    # Local servers are asked as localhost, as Ollama refuses other names; this one may be anywhere.
    is_plain = "://" not in backend.address and not origin.dialled.startswith("/")
    fields = b"host: %b\r\n" % (origin.dialled if is_plain else origin.host).encode()
    if access.key:
        fields += b"authorization: Bearer %b\r\n" % access.key.encode()
    tls = Tls(context(access), origin.name) if origin.tls else None
    bare, full = forms(fields)
    return UpstreamWay(origin.dialled, tls, origin.prefix.encode(), bare, full, bool(access.key))
