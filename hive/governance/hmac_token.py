"""The original specification's token: an HMAC with a key that two services share.

Whoever has that key can name any signers, so it is one authority's word, and never counts towards a threshold. It is
over the bytes of `opToken` as they stand in the token: no form of JSON has to be agreed on.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from typing import Any, NamedTuple

import msgspec

from hive.errors import OpTokenExpired, OpTokenInvalid
from hive.governance.exact_json import members

OPERATIONS = ("model-load", "model-unload", "cache-flush")
"""Those the form can say; it signs the model, and nothing else of what is asked for."""
HOLDS_S = 300
KEY_MIN_BYTES = 16
NONCE_MAX = 128
_TOKEN = frozenset({"opToken", "signature"})
_MEMBERS = frozenset({"operation", "modelId", "issuedAt", "signers", "nonce"})
_HEX = re.compile("[0-9a-f]{64}")


class HmacOperation(NamedTuple):
    """`signers`: names that the authority vouches for; nothing here checks them."""

    operation: str
    model: str | None
    issued_at: int
    signers: tuple[str, ...]
    nonce: str
    signed: bytes
    signature: str

    def check_time(self, now: float) -> None:
        """Raises OpTokenExpired outside of the five minutes."""
        if not self.issued_at <= now <= self.issued_at + HOLDS_S:
            raise OpTokenExpired(f"the operation token is of another time: it holds for {HOLDS_S} s from issuedAt on")

    def is_signed_with(self, key: bytes) -> bool:
        return hmac.compare_digest(hmac.new(key, self.signed, hashlib.sha256).hexdigest(), self.signature)


def hmac_operation_of(found: dict[str, Any], text: bytes) -> HmacOperation:
    """The operation in the object of a token, whose text is `text`. Raises OpTokenInvalid."""
    members(found, _TOKEN, "the operation token")
    token, signature = found["opToken"], found["signature"]
    if not isinstance(token, dict) or not isinstance(signature, str) or not _HEX.fullmatch(signature):
        raise OpTokenInvalid("opToken is an object, and signature 64 hex digits of an HMAC-SHA-256")
    token = {"modelId": None, **token}
    members(token, _MEMBERS, "opToken")
    signers, nonce = token["signers"], token["nonce"]
    if not isinstance(token["operation"], str) or not isinstance(token["modelId"], str | None):
        raise OpTokenInvalid("operation and modelId are text")
    if type(token["issuedAt"]) is not int or not isinstance(nonce, str) or not 16 <= len(nonce) <= NONCE_MAX:
        raise OpTokenInvalid(f"issuedAt is a whole number, and nonce 16 to {NONCE_MAX} characters")
    if not isinstance(signers, list) or not all(isinstance(each, str) for each in signers):
        raise OpTokenInvalid("signers is a list of names")
    try:
        signed = bytes(msgspec.json.decode(text, type=dict[str, msgspec.Raw])["opToken"])
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # a lone surrogate, which `json` takes
        raise OpTokenInvalid(f"the operation token is no JSON: {error}") from None
    return HmacOperation(
        token["operation"], token["modelId"], token["issuedAt"], tuple(signers), nonce, signed.strip(), signature
    )
