"""Ed25519 keys of signers: their text, their id, signing and verifying.

`cryptography` is imported inside (21 ms, 17 MB): a Hive without rules never pays for it.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from typing import NamedTuple

from hive.errors import BadRequest, ConfigError

KIND = "ed25519:"
PUBLIC_BYTES = 32
_P = 2**255 - 19


class PublicKey(NamedTuple):
    """32 bytes. `text` is how it stands in governance.toml, `id` what a signature names it by."""

    raw: bytes

    @property
    def text(self) -> str:
        return KIND + base64.b64encode(self.raw).decode()

    @property
    def id(self) -> str:
        """SHA-256 of the 32 bytes, 64 hex digits."""
        return hashlib.sha256(self.raw).hexdigest()

    def verifies(self, signature: bytes, message: bytes) -> bool:
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

        try:
            Ed25519PublicKey.from_public_bytes(self.raw).verify(signature, message)
        except (InvalidSignature, ValueError):
            return False
        return True


def public_key(text: str) -> PublicKey:
    """The key in `ed25519:BASE64`. Raises ConfigError.

    >>> public_key("ed25519:" + "A" * 43 + "=").raw == bytes(32)
    True
    >>> public_key("rsa:AAAA")
    Traceback (most recent call last):
    hive.errors.ConfigError: expected ed25519: and the base64 of 32 bytes, as `hive op keygen` prints it
    """
    try:
        raw = base64.b64decode(text.removeprefix(KIND), validate=True)
    except (binascii.Error, ValueError):
        raw = b""
    key = PublicKey(raw)
    if len(raw) != PUBLIC_BYTES or key.text != text or int.from_bytes(raw, "little") % 2**255 >= _P:
        raise ConfigError("expected ed25519: and the base64 of 32 bytes, as `hive op keygen` prints it")
    return key


class SecretKey:
    """A signer's own. It is never shown: its `repr` is that of its public half."""

    def __init__(self, pem: bytes) -> None:
        """`pem`: PKCS #8 without a passphrase, as `hive op keygen` and openssl write it. Raises BadRequest."""
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        try:
            key = load_pem_private_key(pem, password=None)
        except (ValueError, TypeError, UnsupportedAlgorithm):
            raise BadRequest("there is no Ed25519 key in it that can be read without a passphrase") from None
        if not isinstance(key, Ed25519PrivateKey):
            raise BadRequest("the key in it is no Ed25519 key")
        self._key = key

    def __repr__(self) -> str:
        return f"<SecretKey of {self.public.text}>"

    @property
    def public(self) -> PublicKey:
        return PublicKey(self._key.public_key().public_bytes_raw())

    def sign(self, message: bytes) -> bytes:
        return self._key.sign(message)


def new_secret_pem() -> bytes:
    """A new key, as PKCS #8 in PEM."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    return Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
