"""The keys that adapters are signed with: who is trusted, who is trusted no more. Files of a directory, read anew each
time: `ID.pem` is a trusted public key, `ID.revoked` one that was, or that never shall be.

An id is what `openssl pkey -pubin -in FILE | sha256sum` prints, and what `model_signing` writes into a signature.
`cryptography` is imported inside (21 ms, 17 MB): who loads no adapter never pays for it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from hive.adapters.record import VERIFIED, AdapterRecord
from hive.errors import BadRequest, ConfigError, KeyRevoked, NotFound, SignatureUnverifiable, UsageError, WrongState
from hive.host.files import create_whole, sync, translated, write_whole
from hive.host.trusted_file import read_trusted
from hive.settings.adapters import REQUIRED

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric import ec

CURVES = {"secp256r1": "P-256", "secp384r1": "P-384", "secp521r1": "P-521"}
"""Those of OpenSSF Model Signing, by their names in OpenSSL."""
TRUSTED, REVOKED = "trusted", "revoked"
PEM_MAX_BYTES = 64 * 1024
_ID = re.compile(r"[0-9a-f]{64}")
_SHORT_ID = re.compile(r"[0-9a-f]{6,64}")
_NO_KEY = "expected a public key on P-256, P-384 or P-521 in PEM, or a certificate with one"
_READABLE = "it has to be readable for the daemon: chmod a+rx"
_MAKES_ONE = "openssl ecparam -name prime256v1 -genkey -noout -out adapter.key makes a secret key"


class EcPublicKey:
    """A public key that verifies adapters' signatures. `pem`: as every tool writes it."""

    def __init__(self, key: ec.EllipticCurvePublicKey) -> None:
        from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

        if key.curve.name not in CURVES:
            raise BadRequest(f"a key on the curve {key.curve.name}: {_NO_KEY}")
        self._key = key
        self.curve = CURVES[key.curve.name]
        self.pem = key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        self.id = hashlib.sha256(self.pem).hexdigest()

    def __repr__(self) -> str:
        return f"<EcPublicKey {self.id} {self.curve}>"

    def verifies(self, signature: bytes, message: bytes) -> bool:
        from cryptography.exceptions import InvalidSignature

        try:
            self._key.verify(signature, message, _algorithm(self._key.curve))
        except (InvalidSignature, ValueError):
            return False
        return True


class EcSecretKey:
    """A signer's own. It is never shown."""

    def __init__(self, pem: bytes) -> None:
        """`pem`: PKCS #8 or SEC 1, without a passphrase, as openssl writes it. Raises BadRequest."""
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        try:
            key = load_pem_private_key(pem, password=None)
        except (ValueError, TypeError, UnsupportedAlgorithm):
            raise BadRequest(
                "there is no secret key in it that can be read without a passphrase", hint=_MAKES_ONE
            ) from (None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise BadRequest("the key in it is none on P-256, P-384 or P-521", hint=_MAKES_ONE)
        self._key = key
        self.public = EcPublicKey(key.public_key())

    def __repr__(self) -> str:
        return f"<EcSecretKey of {self.public.id}>"

    def sign(self, message: bytes) -> bytes:
        return self._key.sign(message, _algorithm(self._key.curve))


def _algorithm(curve: ec.EllipticCurve) -> ec.ECDSA:
    """The hash that goes with the curve (Sigstore's algorithm registry)."""
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    of_bits = {256: hashes.SHA256(), 384: hashes.SHA384(), 521: hashes.SHA512()}
    return ec.ECDSA(of_bits[curve.key_size])


def public_key(pem: bytes) -> EcPublicKey:
    """The key of a PEM public key, or of a PEM certificate. Raises BadRequest."""
    from cryptography import x509
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    if b"PRIVATE KEY-----" in pem:
        raise BadRequest(
            "that is a secret key, which stays with its owner",
            hint="openssl pkey -in FILE -pubout prints its public half",
        )
    try:
        is_certificate = b"-----BEGIN CERTIFICATE-----" in pem
        key = x509.load_pem_x509_certificate(pem).public_key() if is_certificate else load_pem_public_key(pem)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise BadRequest(_NO_KEY) from None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise BadRequest(_NO_KEY)
    return EcPublicKey(key)


def public_key_of_certificate(der: bytes) -> EcPublicKey:
    """The key of a certificate. Raises BadRequest."""
    from cryptography import x509
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric import ec

    try:
        key = x509.load_der_x509_certificate(der).public_key()
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise BadRequest("that is no certificate") from None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise BadRequest(_NO_KEY)
    return EcPublicKey(key)


class KnownKeys(Protocol):
    """An answer to the question which keys count."""

    def refuse_revoked(self, key_id: str) -> None:
        """Raises KeyRevoked."""

    def find(self, key_id: str) -> EcPublicKey | None:
        """The key, where it counts now. Raises ConfigError where it is not to be believed."""

    def trusted(self) -> list[EcPublicKey]:
        """All that count now. Raises ConfigError."""


class OneKey:
    """Only this one counts, and nothing revokes it."""

    def __init__(self, key: EcPublicKey) -> None:
        self._key = key

    def __repr__(self) -> str:
        return f"<OneKey {self._key.id}>"

    def refuse_revoked(self, key_id: str) -> None:
        """Nothing is revoked."""

    def find(self, key_id: str) -> EcPublicKey | None:
        return self._key if key_id == self._key.id else None

    def trusted(self) -> list[EcPublicKey]:
        return [self._key]


class KeyOnFile(NamedTuple):
    """One key of the directory. `state`: trusted or revoked."""

    id: str
    state: str


class TrustedKeys:
    """The directory. Every method reads or writes the disk; a key file must be root's or this user's own."""

    def __init__(self, keys_dir: Path) -> None:
        self.keys_dir = keys_dir

    def __repr__(self) -> str:
        return f"<TrustedKeys in {self.keys_dir}>"

    # reading ------------------------------------------------------------------------------------------------------

    def listed(self) -> list[KeyOnFile]:
        """All keys by id. One with both files is revoked. Raises ConfigError where nobody may look."""
        try:
            names = sorted(os.listdir(self.keys_dir))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise ConfigError(f"cannot read {self.keys_dir}: {error.strerror}", hint=_READABLE) from None
        found: dict[str, str] = {}
        for name in names:
            stem, _, end = name.rpartition(".")
            if _ID.fullmatch(stem) and end in ("pem", REVOKED):
                found[stem] = REVOKED if REVOKED in (end, found.get(stem)) else TRUSTED
        return [KeyOnFile(id, state) for id, state in found.items()]

    def find(self, key_id: str) -> EcPublicKey | None:
        """The key, where it is trusted now. Raises ConfigError where its file is not to be believed."""
        if not _ID.fullmatch(key_id) or self.is_revoked(key_id):
            return None
        path = self.keys_dir / f"{key_id}.pem"
        try:
            key = public_key(read_trusted(path, "the key", {0, os.geteuid()}))
        except FileNotFoundError:
            return None
        except BadRequest as error:
            raise ConfigError(f"{path}: {error.message}") from None
        if key.id != key_id:
            raise ConfigError(
                f"{path} holds the key {key.id}", hint="hive adapter trust FILE writes it where it belongs"
            )
        return key

    def trusted(self) -> list[EcPublicKey]:
        """All keys that are trusted now. Raises ConfigError."""
        found = (self.find(key.id) for key in self.listed() if key.state == TRUSTED)
        return [key for key in found if key is not None]

    def is_revoked(self, key_id: str) -> bool:
        """Whether it was. Raises ConfigError where nobody may look: then nobody knows."""
        try:
            os.lstat(self.keys_dir / f"{key_id}.{REVOKED}")
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            raise ConfigError(f"cannot read {self.keys_dir}: {error.strerror}", hint=_READABLE) from None
        return True

    def refuse_revoked(self, key_id: str) -> None:
        """Raises KeyRevoked."""
        if _ID.fullmatch(key_id) and self.is_revoked(key_id):
            raise KeyRevoked(f"the key {key_id} was revoked")

    def check(self, record: AdapterRecord, policy: str) -> None:
        """Raises SignatureUnverifiable where an installed adapter may not be loaded now: its key is revoked or gone, or
        nobody signed it and somebody has to. Raises ConfigError."""
        if record.signature != VERIFIED:
            if policy == REQUIRED:
                raise SignatureUnverifiable(f"{record.engine_name} is not signed, and [adapters] signatures = required")
            return
        self.refuse_revoked(record.key_id)
        if policy == REQUIRED and self.find(record.key_id) is None:
            raise SignatureUnverifiable(f"{record.engine_name}: the key {record.key_id} is not trusted any more")

    # writing ------------------------------------------------------------------------------------------------------

    def trust(self, pem: bytes) -> EcPublicKey:
        """From now on adapters of this key are taken. Nothing is done where it is trusted already.

        Raises BadRequest for what is no such key, WrongState for one that was revoked, NotPermitted, StoreFull.
        """
        key = public_key(pem)
        if self.is_revoked(key.id):
            raise WrongState(
                f"the key {key.id} was revoked",
                hint=f"a revoked key stays revoked; if that was a mistake, remove {self.keys_dir / key.id}.{REVOKED}",
            )
        with translated(self.keys_dir):
            self.keys_dir.mkdir(parents=True, exist_ok=True)
            self.keys_dir.chmod(0o755)
        create_whole(self.keys_dir / f"{key.id}.pem", key.pem, mode=0o644)
        return key

    def revoke(self, key_id: str) -> str:
        """From now on nothing of this key is taken; its whole id. A key that is not here is revoked in advance.

        Raises UsageError, NotFound for a shortened id of none or several, NotPermitted, StoreFull.
        """
        id = self.whole_id(key_id)
        path = self.keys_dir / f"{id}.{REVOKED}"
        with translated(self.keys_dir):
            self.keys_dir.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                os.rename(self.keys_dir / f"{id}.pem", path)
                sync(self.keys_dir)
                return id
        if not os.path.lexists(path):
            write_whole(path, b"", mode=0o644)
        return id

    def whole_id(self, key_id: str) -> str:
        """The id that begins so. Raises UsageError, NotFound."""
        if not _SHORT_ID.fullmatch(key_id):
            raise UsageError(f"{key_id[:80]!r} is no id of a key: expected 64 hex digits, or the first of them")
        if _ID.fullmatch(key_id):
            return key_id
        found = [key.id for key in self.listed() if key.id.startswith(key_id)]
        if len(found) != 1:
            told = "several keys begin" if found else "no key begins"
            raise NotFound(f"{told} with {key_id}", hint=f"ls {self.keys_dir}")
        return found[0]
