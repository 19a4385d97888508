"""Tokens between Hive and securesystemslib, the implementation of DSSE that in-toto and TUF use; both ways."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from securesystemslib.dsse import Envelope
from securesystemslib.exceptions import VerificationError
from securesystemslib.signer._crypto_signer import CryptoSigner
from securesystemslib.signer._key import Key, SSlibKey

from hive.errors import OpTokenThreshold
from hive.governance.envelope import PAYLOAD_TYPE, pae
from hive.governance.keys import PublicKey, SecretKey, new_secret_pem
from hive.governance.rules import SignRule, SignRules
from tests.governance.signing import KEYS, judged, operation, signed


def peer_key(public: PublicKey) -> Key:
    return SSlibKey(public.id, "ed25519", "ed25519", {"public": public.raw.hex()})


def test_the_peer_verifies_what_hive_signs() -> None:
    made: dict[str, Any] = json.loads(signed(operation().as_json(), "ann", "ben").as_json())
    envelope = Envelope.from_dict(made)
    keys = [peer_key(KEYS[name].public) for name in ("ann", "ben", "cy")]
    assert set(envelope.verify(keys, 2)) == {KEYS[name].public.id for name in ("ann", "ben")}
    with pytest.raises(VerificationError):
        envelope.verify(keys, 3)


def test_hive_verifies_what_the_peer_signs() -> None:
    pems = {name: new_secret_pem() for name in ("ann", "ben")}
    own = {name: SecretKey(pem) for name, pem in pems.items()}
    rules = SignRules({name: key.public for name, key in own.items()})
    envelope = Envelope(operation().as_json(), PAYLOAD_TYPE, {})

    def token() -> str:
        return base64.urlsafe_b64encode(json.dumps(envelope.to_dict()).encode()).decode().rstrip("=")

    for name, pem in pems.items():
        with pytest.raises(OpTokenThreshold):
            judged(token(), rules=rules, rule=SignRule(2, ("ann", "ben")))
        secret = load_pem_private_key(pem, None)
        assert isinstance(secret, Ed25519PrivateKey)
        public = own[name].public
        envelope.sign(CryptoSigner(secret, SSlibKey(public.id, "ed25519", "ed25519", {"public": public.raw.hex()})))
    assert judged(token(), rules=rules, rule=SignRule(2, ("ann", "ben"))).by == "ann, ben"


def test_both_sign_the_same_bytes() -> None:
    payload = operation(params={"modelId": "möwe/\u20ac"}).as_json()
    assert Envelope(payload, PAYLOAD_TYPE, {}).pae() == pae(PAYLOAD_TYPE, payload)
