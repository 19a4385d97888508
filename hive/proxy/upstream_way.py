"""What every request to the active backend has in common: where it goes, and the fields Hive itself writes there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from hive.domain import BackendInfo, BackendKind, origin_of
from hive.host.access import access_of, context
from hive.settings import Inference
from hive.wire.dial import Tls


class UpstreamWay(NamedTuple):
    """`prefix`: before every path, empty for none. `fields`: those of every request, each with its line end. `has_key`:
    the backend is shown a key of Hive's, so what it says of it is not the agents' to read."""

    dialled: str
    tls: Tls | None = None
    prefix: bytes = b""
    fields: bytes = b"host: localhost\r\n"
    has_key: bool = False

    def __repr__(self) -> str:
        return f"<UpstreamWay {self.dialled}{' by TLS' if self.tls else ''}{' with a key' if self.has_key else ''}>"

    def line(self, line: bytes) -> bytes:
        """A request line with the prefix before its path.

        >>> UpstreamWay("h:80", prefix=b"/llm").line(b"POST /v1/completions HTTP/1.1\\r\\n")
        b'POST /llm/v1/completions HTTP/1.1\\r\\n'
        """
        method, _, rest = line.partition(b" ")
        return b"%b %b%b" % (method, self.prefix, rest)


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
    fields = b"host: %b\r\n" % origin.host.encode()
    if access.key:
        fields += b"authorization: Bearer %b\r\n" % access.key.encode()
    tls = Tls(context(access), origin.name) if origin.tls else None
    return UpstreamWay(origin.dialled, tls, origin.prefix.encode(), fields, bool(access.key))
