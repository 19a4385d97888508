"""The envelope of an operation token: DSSE (secure-systems-lab/dsse, protocol 1.0), signatures over payload and type.

Each bit of a token matters: base64 is canonical, no member is unknown, and a signature names its key by the key's own
id, although DSSE takes that for a hint.
"""

from __future__ import annotations

import base64
import binascii
import json
from typing import Any, NamedTuple

from hive.errors import OpTokenInvalid
from hive.governance.exact_json import members, read_object

PAYLOAD_TYPE = "application/vnd.hive.operation+json"
TOKEN_MAX_BYTES = 16 * 1024
"""Characters of a token, and bytes of the envelope in it."""
SIGNATURES_MAX = 16
SIGNATURE_BYTES = 64
_ENVELOPE = frozenset({"payloadType", "payload", "signatures"})
_SIGNATURE = frozenset({"keyid", "sig"})


class Signature(NamedTuple):
    """`key_id`: of the key it is said to be made with."""

    key_id: str
    raw: bytes


class TokenEnvelope(NamedTuple):
    """A payload and those who signed it; the payload is any bytes here."""

    payload: bytes
    signatures: tuple[Signature, ...] = ()

    @property
    def signed(self) -> bytes:
        """The bytes that each signature is over."""
        return pae(PAYLOAD_TYPE, self.payload)

    def with_signature(self, signature: Signature) -> TokenEnvelope:
        """The same with one more; an earlier one by that key goes."""
        others = tuple(each for each in self.signatures if each.key_id != signature.key_id)
        return self._replace(signatures=(*others, signature))

    def as_json(self, indent: int | None = None) -> bytes:
        found = {
            "payloadType": PAYLOAD_TYPE,
            "payload": base64.b64encode(self.payload).decode(),
            "signatures": [
                {"keyid": each.key_id, "sig": base64.b64encode(each.raw).decode()} for each in self.signatures
            ],
        }
        return json.dumps(found, indent=indent, separators=(",", ":") if indent is None else None).encode()

    def as_token(self) -> str:
        """As it is sent: base64url without padding."""
        return base64.urlsafe_b64encode(self.as_json()).decode().rstrip("=")


def pae(payload_type: str, payload: bytes) -> bytes:
    """DSSE's pre-authentication encoding.

    >>> pae("http://example.com/HelloWorld", b"hello world")
    b'DSSEv1 29 http://example.com/HelloWorld 11 hello world'
    """
    kind = payload_type.encode()
    return b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload)


def token_object(token: str) -> dict[str, Any]:
    """The JSON object in a token: base64url of it, or itself. Raises OpTokenInvalid."""
    if len(token) > TOKEN_MAX_BYTES or not token.isascii():
        raise OpTokenInvalid(f"an operation token has {TOKEN_MAX_BYTES} ASCII characters at most")
    data = token.encode() if token.startswith("{") else _from_base64url(token)
    return read_object(data, "the operation token")


def _from_base64url(token: str) -> bytes:
    try:
        data = base64.b64decode(token + "=" * (-len(token) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        data = b""
    if not data or base64.urlsafe_b64encode(data).decode().rstrip("=") != token:
        raise OpTokenInvalid("the operation token is no base64url without padding")
    return data


def envelope_of(found: dict[str, Any]) -> TokenEnvelope:
    """The envelope in the object of a token. Raises OpTokenInvalid."""
    members(found, _ENVELOPE, "the envelope")
    if found["payloadType"] != PAYLOAD_TYPE:
        raise OpTokenInvalid(f"the payload is {str(found['payloadType'])[:80]!r}, not {PAYLOAD_TYPE}")
    signatures = found["signatures"]
    if not isinstance(signatures, list) or len(signatures) > SIGNATURES_MAX:
        raise OpTokenInvalid(f"an operation token has {SIGNATURES_MAX} signatures at most, in a list")
    return TokenEnvelope(_bytes(found["payload"], "the payload"), tuple(map(_signature, signatures)))


def _signature(found: object) -> Signature:
    if not isinstance(found, dict):
        raise OpTokenInvalid("a signature is no object")
    members(found, _SIGNATURE, "a signature")
    raw = _bytes(found["sig"], "a signature")
    if not isinstance(found["keyid"], str) or len(raw) != SIGNATURE_BYTES:
        raise OpTokenInvalid(f"a signature has a keyid and {SIGNATURE_BYTES} bytes")
    return Signature(found["keyid"], raw)


def _bytes(text: object, what: str) -> bytes:
    try:
        data = base64.b64decode(text, validate=True) if isinstance(text, str) else b""
    except (binascii.Error, ValueError):
        data = b""
    if not data or base64.b64encode(data).decode() != text:
        raise OpTokenInvalid(f"{what} is no base64")
    return data
