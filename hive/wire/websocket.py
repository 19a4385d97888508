"""The opening handshake of a WebSocket (RFC 6455 §4), as strict on both sides as Hive's other heads. Pure.

Only exactly one 101 with the right proof is a switch: bytes behind anything else must not be taken for frames by one
side and for HTTP by the other (request smuggling by upgrade).
"""

from __future__ import annotations

import base64
import hashlib
import re

import httptools
import msgspec

from hive.errors import BadRequest
from hive.wire.heads import MAX_FIELDS, BadResponse, Fields, read_fields, read_status_line, tokens_of
from hive.wire.http1 import Request

VERSION = b"13"
PREFIX = b"sec-websocket-"
"""The beginning of the handshake's own fields: they are written anew, never passed on."""
_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_KEY = re.compile(rb"[A-Za-z0-9+/]{21}[AQgw]==")
"""16 bytes in base64: of the last letter but two bits are zero."""


class Handshake(msgspec.Struct, frozen=True):
    """A client's request for a WebSocket. `protocols`, `extensions`: its offers as it wrote them, in order."""

    key: bytes
    protocols: tuple[bytes, ...] = ()
    extensions: tuple[bytes, ...] = ()

    @property
    def accept(self) -> bytes:
        """The proof that the server has read the key (RFC 6455 §4.2.2).

        >>> Handshake(b"dGhlIHNhbXBsZSBub25jZQ==").accept
        b's3pPLMBiTxaQ9kYGzzhZRbK+xOo='
        """
        return base64.b64encode(hashlib.sha1(self.key + _GUID, usedforsecurity=False).digest())

    def request_fields(self) -> bytes:
        """The lines of the request that are the handshake's."""
        lines = [b"upgrade: websocket\r\nconnection: Upgrade\r\n"]
        lines.append(b"sec-websocket-key: %b\r\nsec-websocket-version: %b\r\n" % (self.key, VERSION))
        if self.protocols:
            lines.append(b"sec-websocket-protocol: %b\r\n" % b", ".join(self.protocols))
        if self.extensions:
            lines.append(b"sec-websocket-extensions: %b\r\n" % b", ".join(self.extensions))
        return b"".join(lines)

    def check(self, head: bytes) -> tuple[bytes, Fields]:
        """(the lines of the answer that are the handshake's, all its fields). Raises BadResponse for any other answer
        than the one 101 this handshake waits for."""
        status, v11 = read_status_line(head[: head.find(b"\r\n")], may_switch=True)
        if status != 101 or not v11:
            raise BadResponse(f"the answer is {status}, not 101")
        try:
            fields = read_fields(head, httptools.HttpResponseParser)
        except httptools.HttpParserError as error:
            raise BadResponse(f"malformed answer: {str(error)[:80]}") from None
        if len(fields) > MAX_FIELDS:
            raise BadResponse(f"more than {MAX_FIELDS} fields")
        if _all(fields, b"content-length") or _all(fields, b"transfer-encoding"):
            raise BadResponse("a 101 has no body")
        if not _upgrades(fields):
            raise BadResponse("a 101 that does not say it switches to websocket")
        if _all(fields, PREFIX + b"accept") != [self.accept]:
            raise BadResponse("a 101 with a wrong Sec-WebSocket-Accept")
        return self._answer_fields(fields), fields

    def _answer_fields(self, fields: Fields) -> bytes:
        lines = b"upgrade: websocket\r\nconnection: Upgrade\r\nsec-websocket-accept: %b\r\n" % self.accept
        protocol = _all(fields, PREFIX + b"protocol")
        if len(protocol) > 1 or not set(protocol) <= set(self.protocols):
            raise BadResponse("a 101 with a subprotocol nobody offered")
        extensions = _listed(fields, PREFIX + b"extensions")
        if not {_name_of(given) for given in extensions} <= {_name_of(offered) for offered in self.extensions}:
            raise BadResponse("a 101 with an extension nobody offered")
        if protocol:
            lines += b"sec-websocket-protocol: %b\r\n" % protocol[0]
        if extensions:
            lines += b"sec-websocket-extensions: %b\r\n" % b", ".join(extensions)
        return lines


def read_handshake(request: Request) -> Handshake | None:
    """The handshake in a request for a WebSocket; None for any other request. Raises BadRequest for a wrong handshake.

    An Upgrade to anything else, or one that Connection does not name, is an offer that need not be taken (RFC 9110
    §7.8).

    >>> fields = [(b"upgrade", b"h2c"), (b"connection", b"upgrade")]
    >>> read_handshake(Request(b"GET", b"/", fields)) is None
    True
    """
    if not is_asked(request):
        return None
    fields = request.fields
    keys = _all(fields, PREFIX + b"key")
    if len(keys) != 1 or _KEY.fullmatch(keys[0]) is None:
        raise BadRequest("a WebSocket needs one Sec-WebSocket-Key of 16 bytes in base64")
    if _all(fields, PREFIX + b"version") != [VERSION]:
        raise BadRequest("only WebSocket version 13 is spoken here")
    protocols = _listed(fields, PREFIX + b"protocol")
    return Handshake(keys[0], tuple(protocols), tuple(_listed(fields, PREFIX + b"extensions")))


def is_asked(request: Request) -> bool:
    """Whether a WebSocket is asked for, rightly or not."""
    return request.method == b"GET" and request.chunks and _upgrades(request.fields)


def _upgrades(fields: Fields) -> bool:
    """Whether it switches to websocket and to nothing else."""
    asked = [value.lower() for value in _all(fields, b"upgrade")]
    return asked == [b"websocket"] and any(b"upgrade" in tokens_of(value) for value in _all(fields, b"connection"))


def _all(fields: Fields, wanted: bytes) -> list[bytes]:
    return [value for name, value in fields if name == wanted]


def _listed(fields: Fields, wanted: bytes) -> list[bytes]:
    """The members of a list field, over all its lines."""
    members = [member.strip(b" \t") for value in _all(fields, wanted) for member in value.split(b",")]
    return [member for member in members if member]


def _name_of(extension: bytes) -> bytes:
    return extension.partition(b";")[0].strip(b" \t").lower()
