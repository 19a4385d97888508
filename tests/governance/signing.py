"""Signers with real keys, and operations they sign."""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from hive.governance.envelope import Signature, TokenEnvelope
from hive.governance.keys import SecretKey
from hive.governance.operation import Operation
from hive.governance.rules import SignRule, SignRules
from hive.governance.verdict import AskedOperation, TokenVerdict, judge

NOW = 1_800_000_000
BOX = "box-1"
LOAD = {"modelId": "qwen3-32b"}


def own_key(name: str) -> SecretKey:
    """The same in every process, as names of tests have it in them."""
    seed = Ed25519PrivateKey.from_private_bytes(hashlib.sha256(name.encode()).digest())
    return SecretKey(seed.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))


KEYS = {name: own_key(name) for name in ("ann", "ben", "cy", "dee")}
RULE = SignRule(2, ("ann", "ben", "cy"))
RULES = SignRules({name: key.public for name, key in KEYS.items()}, {"model-load": RULE})
ASKED = AskedOperation("model-load", LOAD, BOX)
HMAC_KEY = b"a key of thirty-two bytes or so."


def operation(**changes: Any) -> Operation:
    asked = Operation("model-load", BOX, LOAD, NOW, NOW + 300, secrets.token_hex(16))
    return asked._replace(**changes)


def signed(payload: bytes, *names: str) -> TokenEnvelope:
    envelope = TokenEnvelope(payload)
    signatures = tuple(Signature(KEYS[name].public.id, KEYS[name].sign(envelope.signed)) for name in names)
    return envelope._replace(signatures=signatures)


def token(*names: str, **changes: Any) -> str:
    return signed(operation(**changes).as_json(), *names).as_token()


def judged(
    text: str,
    *,
    now: float = NOW + 1,
    mark: float = NOW,
    rule: SignRule = RULE,
    rules: SignRules = RULES,
    hmac_key: bytes | None = None,
    asked: AskedOperation = ASKED,
) -> TokenVerdict:
    return judge(text, asked, rules, rule, now=now, mark=mark, hmac_key=hmac_key)


def hmac_token(*, key: bytes = HMAC_KEY, spaced: bool = False, **changes: Any) -> str:
    """The original specification's, as `JSON.stringify` or Python's `json.dumps` writes it."""
    op = {
        "operation": "model-load",
        "modelId": LOAD["modelId"],
        "issuedAt": NOW,
        "signers": ["admin1", "admin2", "admin3"],
        "nonce": secrets.token_hex(16),
        **changes,
    }
    text = json.dumps(op, separators=None if spaced else (",", ":"))
    signature = hmac.new(key, text.encode(), hashlib.sha256).hexdigest()
    return f'{{"opToken":{text},"signature":"{signature}"}}'
