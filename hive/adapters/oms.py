"""Signatures of adapters: OpenSSF Model Signing 1.0, as `model_signing` writes and reads them. Pure but for the keys.

A Sigstore bundle 0.3 around a DSSE envelope around an in-toto statement that lists the SHA-256 of every file. Read are
those made with a key, or with a certificate, of which only the key counts: whom to trust is said by TrustedKeys, by no
authority. Not read: keyless signatures of Sigstore (they need its services), hashes of shards, statements before 1.0.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeVar

import msgspec

from hive.adapters.keys import EcPublicKey, EcSecretKey, KnownKeys, public_key_of_certificate
from hive.errors import BadRequest, SignatureInvalid, SignatureMismatch, SignatureUnverifiable

BUNDLE = "application/vnd.dev.sigstore.bundle.v0.3+json"
PAYLOAD = "application/vnd.in-toto+json"
STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "https://model_signing/signature/v1.0"
BUNDLE_MAX_BYTES = 4 * 1024 * 1024
IGNORED = (".git", ".gitattributes", ".github", ".gitignore")
"""Paths that the tool leaves out of every signature. Nothing from there is installed."""
ONE_FILE = "."
"""The name of the file in a signature of one file."""
Kind = TypeVar("Kind")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_WITH_FILES = "model_signing sign key DIR --private_key FILE, or hive adapter sign, makes one that is read here"


class _Hinted(msgspec.Struct):
    hint: str | None = ""


class _RawCertificate(msgspec.Struct, rename="camel"):
    raw_bytes: str


class _CertificateChain(msgspec.Struct):
    certificates: list[_RawCertificate] = []


class _Material(msgspec.Struct, rename="camel"):
    public_key: _Hinted | None = None
    x509_certificate_chain: _CertificateChain | None = None
    certificate: _RawCertificate | None = None


class _EnvelopeSignature(msgspec.Struct):
    sig: str


class _Dsse(msgspec.Struct, rename="camel"):
    payload: str
    payload_type: str
    signatures: list[_EnvelopeSignature]


class _Bundle(msgspec.Struct, rename="camel"):
    media_type: str
    verification_material: _Material
    dsse_envelope: _Dsse


class _Subject(msgspec.Struct):
    digest: dict[str, str]
    name: str = ""


class _Resource(msgspec.Struct):
    name: str
    algorithm: str
    digest: str


class _Serialization(msgspec.Struct):
    method: str
    hash_type: str = "sha256"
    allow_symlinks: bool = False
    ignore_paths: list[str] = []


class _Predicate(msgspec.Struct):
    serialization: _Serialization
    resources: list[_Resource]


class _Statement(msgspec.Struct, rename={"type_": "_type", "predicate_type": "predicateType"}):
    type_: str
    subject: list[_Subject]
    predicate_type: str
    predicate: msgspec.Raw


class SignedFiles(NamedTuple):
    """Files that a trusted key has signed: SHA-256 by path. `ignored`: paths of which it says nothing."""

    key_id: str
    digests: dict[str, str]
    ignored: tuple[str, ...]

    def compare(self, found: Mapping[str, str]) -> None:
        """`found`: SHA-256 by path of all files that are there. Raises SignatureMismatch.

        >>> SignedFiles("", {"a": "00"}, ("b",)).compare({"a": "00", "b/c": "22"})
        >>> SignedFiles("", {"a": "00"}, ()).compare({"a": "11"})
        Traceback (most recent call last):
        hive.errors.SignatureMismatch: a is not the file that was signed
        """
        for path in sorted(self.digests):
            if path not in found:
                raise SignatureMismatch(f"{path} was signed and is missing")
            if found[path] != self.digests[path]:
                raise SignatureMismatch(f"{path} is not the file that was signed")
        for path in sorted(found):
            if path not in self.digests and not is_below(path, self.ignored):
                raise SignatureMismatch(f"{path} is there and was not signed")


def is_below(path: str, places: Iterable[str]) -> bool:
    """
    >>> is_below(".git/x", IGNORED), is_below("a/.git", IGNORED), is_below(".git", IGNORED)
    (True, False, True)
    """
    return any(path == place or path.startswith(f"{place}/") for place in places)


def verify(bundle: bytes, digests: Mapping[str, str], keys: KnownKeys) -> str:
    """The id of the trusted key that signed exactly these files. `digests`: SHA-256 by path.

    Raises SignatureUnverifiable, SignatureInvalid, SignatureMismatch; ConfigError where a key is not to be believed.
    """
    signed = read_signed(bundle, keys)
    signed.compare(digests)
    return signed.key_id


def read_signed(data: bytes, keys: KnownKeys) -> SignedFiles:
    """The files that a trusted key has signed with this. Raises as `verify` does."""
    if len(data) > BUNDLE_MAX_BYTES:
        raise SignatureInvalid(f"a signature of more than {BUNDLE_MAX_BYTES} bytes")
    bundle = _decoded(data, _Bundle, "the signature")
    envelope = bundle.dsse_envelope
    if bundle.media_type != BUNDLE or envelope.payload_type != PAYLOAD:
        raise SignatureUnverifiable(
            f"it is {bundle.media_type[:80]!r} of {envelope.payload_type[:80]!r}, no signature of a model",
            hint=_WITH_FILES,
        )
    if len(envelope.signatures) != 1:
        raise SignatureInvalid(f"it has {len(envelope.signatures)} signatures; expected one")
    payload, signature = _base64(envelope.payload), _base64(envelope.signatures[0].sig)
    signer = _signer(bundle.verification_material, keys, signature, pae(payload))
    return SignedFiles(signer.id, *_files(payload))


def _signer(material: _Material, keys: KnownKeys, signature: bytes, message: bytes) -> EcPublicKey:
    """The trusted key that made the signature. Raises SignatureUnverifiable, SignatureInvalid, ConfigError."""
    key_id = _named(material)
    keys.refuse_revoked(key_id)
    if key_id:
        if (key := keys.find(key_id)) is None:
            raise SignatureUnverifiable(f"it is signed by the key {key_id}, which is not trusted here")
        if not key.verifies(signature, message):
            raise SignatureInvalid(f"the signature is not the key's that it names, {key_id}")
        return key
    found = next((key for key in keys.trusted() if key.verifies(signature, message)), None)  # of early tools
    if found is None:
        raise SignatureUnverifiable("it names no key, and none of the trusted ones has signed it")
    return found


def _named(material: _Material) -> str:
    """The id of the key that a signature names, or whose certificate it brings; empty where it names none."""
    chain = material.x509_certificate_chain.certificates if material.x509_certificate_chain else []
    leaf = material.certificate or (chain[0] if chain else None)
    if leaf is not None:
        try:
            return public_key_of_certificate(_base64(leaf.raw_bytes)).id
        except BadRequest as error:
            raise SignatureUnverifiable(f"its certificate cannot be used: {error.message}") from None
    if material.public_key is None:
        raise SignatureUnverifiable("it names no key and brings no certificate", hint=_WITH_FILES)
    return material.public_key.hint or ""


def _files(payload: bytes) -> tuple[dict[str, str], tuple[str, ...]]:
    """SHA-256 by path in a payload whose signature was verified, and the paths that it leaves out."""
    statement = _decoded(payload, _Statement, "what was signed")
    if (statement.type_, statement.predicate_type) != (STATEMENT, PREDICATE):
        raise SignatureUnverifiable(f"what was signed is {statement.predicate_type[:80]!r}", hint=_WITH_FILES)
    predicate = _decoded(statement.predicate, _Predicate, "what was signed")
    how = predicate.serialization
    if (how.method, how.hash_type) != ("files", "sha256"):
        raise SignatureUnverifiable(
            f"it was made with {how.method[:20]} and {how.hash_type[:20]}; whole files and sha256 are read here",
            hint=_WITH_FILES,
        )
    digests = {resource.name: resource.digest for resource in predicate.resources}
    if len(digests) != len(predicate.resources):
        raise SignatureInvalid("it names a file twice")
    if any(
        resource.algorithm != "sha256" or not _SHA256.fullmatch(resource.digest) for resource in predicate.resources
    ):
        raise SignatureInvalid("it holds a hash that is no sha256")
    if wrong := next((name for name in digests if not _is_inside(name)), None):
        raise SignatureInvalid(f"it names {wrong[:80]!r}, which is outside of the adapter")
    if [subject.digest.get("sha256") for subject in statement.subject] != [_root(digests.values())]:
        raise SignatureInvalid("its sum is not of its files")
    return digests, (*IGNORED, *how.ignore_paths)


def _is_inside(name: str) -> bool:
    """
    >>> [_is_inside(name) for name in ("a/b", ".", "/a", "a/../b", "", "a//b")]
    [True, True, False, False, False, False]
    """
    return name == ONE_FILE or not any(part in ("", ".", "..") for part in name.split("/"))


def sign(digests: Mapping[str, str], key: EcSecretKey, *, subject: str, ignored: Iterable[str] = ()) -> bytes:
    """A signature of these files: SHA-256 by path. `subject`: the name of their directory. `ignored`: paths beside
    IGNORED of which it says nothing, that of the signature above all."""
    paths = sorted(digests)
    statement = {
        "_type": STATEMENT,
        "subject": [{"name": subject, "digest": {"sha256": _root(digests[path] for path in paths)}}],
        "predicateType": PREDICATE,
        "predicate": {
            "serialization": {
                "method": "files",
                "hash_type": "sha256",
                "allow_symlinks": False,
                "ignore_paths": sorted({*IGNORED, *ignored}),
            },
            "resources": [{"name": path, "algorithm": "sha256", "digest": digests[path]} for path in paths],
        },
    }
    payload = msgspec.json.encode(statement)
    signature = key.sign(pae(payload))
    bundle = {
        "mediaType": BUNDLE,
        "verificationMaterial": {"publicKey": {"hint": key.public.id}, "tlogEntries": []},
        "dsseEnvelope": {
            "payload": base64.b64encode(payload).decode(),
            "payloadType": PAYLOAD,
            "signatures": [{"sig": base64.b64encode(signature).decode(), "keyid": ""}],
        },
    }
    return msgspec.json.encode(bundle) + b"\n"


def pae(payload: bytes) -> bytes:
    """The bytes that a signature is over (DSSE 1.0, pre-authentication encoding).

    >>> pae(b"{}")
    b'DSSEv1 28 application/vnd.in-toto+json 2 {}'
    """
    return b"DSSEv1 %d %s %d %s" % (len(PAYLOAD), PAYLOAD.encode(), len(payload), payload)


def _root(digests: Iterable[str]) -> str:
    """The sum over all files' hashes, in the order of the statement."""
    return hashlib.sha256(b"".join(map(bytes.fromhex, digests))).hexdigest()


def _base64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise SignatureInvalid("it holds base64 that is none") from None


def _decoded(data: bytes | msgspec.Raw, kind: type[Kind], what: str) -> Kind:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise SignatureInvalid(f"{what} is none that can be read: {error}") from None
