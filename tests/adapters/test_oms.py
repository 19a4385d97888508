"""Signatures: what is made with `model_signing` is taken, and it takes what Hive makes; everything else is refused."""

from __future__ import annotations

import base64
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from hive.adapters import oms
from hive.adapters.keys import EcSecretKey
from hive.adapters.source import opened
from hive.errors import ConfigError, KeyRevoked, SignatureInvalid, SignatureMismatch, SignatureUnverifiable
from tests.adapters.lora_files import Box, gguf_adapter, model_signing, new_key, peft_adapter, secret_pem, sign

DIGESTS = {"a": "11" * 32, "b/c": "22" * 32}


def signed_by_tool(box: Box, source: Path, to: Path, curve: ec.EllipticCurve, *options: str) -> EcSecretKey:
    pem = secret_pem(curve)
    secret = box.beneath.parent / "secret.pem"
    secret.write_bytes(pem)
    ran = model_signing("sign", "key", source, "--private_key", secret, "--signature", to, *options)
    assert ran.returncode == 0, ran.stderr
    return EcSecretKey(pem)


# With the real tool ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("curve", [ec.SECP256R1(), ec.SECP384R1(), ec.SECP521R1()])
def test_what_model_signing_signs_is_installed(box: Box, curve: ec.EllipticCurve) -> None:
    source = peft_adapter(box.beneath / "legal")
    (source / "sub").mkdir()
    (source / "sub" / "notes.md").write_text("x")
    (source / ".git").mkdir()
    (source / ".git" / "adapter_model.bin").write_text("x")
    key = signed_by_tool(box, source, source / "model.sig", curve)
    with pytest.raises(SignatureUnverifiable, match=f"signed by the key {key.public.id}, which is not trusted"):
        box.install(source)
    box.keys.trust(key.public.pem)
    assert box.install(source).key_id == key.public.id


def test_what_model_signing_refuses_is_refused(box: Box) -> None:
    source = peft_adapter(box.beneath / "legal")
    key = signed_by_tool(box, source, source / "model.sig", ec.SECP256R1())
    box.keys.trust(key.public.pem)
    public, readme = box.beneath.parent / "public.pem", source / "README.md"
    public.write_bytes(key.public.pem)

    def refused() -> None:
        verify = ("verify", "key", source, "--signature", source / "model.sig", "--public_key", public)
        assert model_signing(*verify).returncode != 0
        with pytest.raises(SignatureMismatch):
            box.install(source)

    content = readme.read_text()
    readme.write_text("tampered")
    refused()
    readme.unlink()
    refused()
    readme.write_text(content)
    (source / "extra").write_text("x")
    refused()


@pytest.mark.parametrize("curve", [ec.SECP256R1(), ec.SECP521R1()])
def test_model_signing_takes_what_hive_signs(box: Box, curve: ec.EllipticCurve) -> None:
    key = new_key(curve)
    source = sign(peft_adapter(box.beneath / "legal"), key)
    (source / ".gitattributes").write_text("x")
    public = box.beneath.parent / "public.pem"
    public.write_bytes(key.public.pem)
    verify = ("verify", "key", source, "--signature", source / "model.sig", "--public_key", public)
    ran = model_signing(*verify)
    assert ran.returncode == 0, ran.stderr
    (source / "README.md").write_text("tampered")
    assert model_signing(*verify).returncode != 0


def test_one_file_is_signed_by_either_and_taken_by_both(box: Box) -> None:
    source = gguf_adapter(box.beneath / "legal.gguf")
    signature = box.beneath / "legal.gguf.sig"
    key = signed_by_tool(box, source, signature, ec.SECP256R1())
    box.keys.trust(key.public.pem)
    assert box.install("legal.gguf").key_id == key.public.id
    with opened(source, beneath=box.beneath) as found:
        digest = found.copy("legal.gguf", None, lambda _: None).sha256
    signature.write_bytes(oms.sign({oms.ONE_FILE: digest}, key, subject="legal.gguf"))
    public = box.beneath.parent / "public.pem"
    public.write_bytes(key.public.pem)
    ran = model_signing("verify", "key", source, "--signature", signature, "--public_key", public)
    assert ran.returncode == 0, ran.stderr
    assert box.install("legal.gguf").key_id == key.public.id


def test_what_model_signing_leaves_out_is_not_asked_for_and_never_installed(box: Box) -> None:
    source = peft_adapter(box.beneath / "legal")
    key = signed_by_tool(box, source, source / "model.sig", ec.SECP256R1(), "--ignore-paths", str(source / "README.md"))
    box.keys.trust(key.public.pem)
    (source / "README.md").write_text("changed since")
    assert box.install(source).signature == "verified"


def test_a_certificate_counts_for_its_key(box: Box) -> None:
    """Made by the tool with a certificate; no authority is asked, the key is trusted or it is not."""
    source, place = peft_adapter(box.beneath / "legal"), box.beneath.parent
    secret = place / "secret.pem"
    secret.write_bytes(secret_pem())
    request = f"openssl req -x509 -new -key {secret} -subj /CN=signer -out {place}/cert.pem"
    subprocess.run(request.split(), check=True, capture_output=True)
    words = ("sign", "certificate", source, "--private_key", secret, "--signing_certificate", place / "cert.pem")
    ran = model_signing(*words, "--certificate_chain", place / "cert.pem", "--signature", source / "model.sig")
    assert ran.returncode == 0, ran.stderr
    with pytest.raises(SignatureUnverifiable, match="is not trusted here"):
        box.install(source)
    key = box.keys.trust((place / "cert.pem").read_bytes())
    assert box.install(source).key_id == key.id


# What a bundle may say ---------------------------------------------------------------------------------------------


def changed(box: Box, change: Callable[[dict[str, Any]], object]) -> bytes:
    """A signature of DIGESTS with something else in its bundle."""
    bundle = json.loads(oms.sign(DIGESTS, box.key, subject="x"))
    change(bundle)
    return json.dumps(bundle).encode()


def signed_statement(box: Box, change: Callable[[dict[str, Any]], object]) -> bytes:
    """A signature by the trusted key of a statement with something else in it."""
    bundle = json.loads(oms.sign(DIGESTS, box.key, subject="x"))
    envelope = bundle["dsseEnvelope"]
    statement = json.loads(base64.b64decode(envelope["payload"]))
    change(statement)
    payload = json.dumps(statement).encode()
    envelope["payload"] = base64.b64encode(payload).decode()
    envelope["signatures"][0]["sig"] = base64.b64encode(box.key.sign(oms.pae(payload))).decode()
    return json.dumps(bundle).encode()


def test_a_signature_is_of_exactly_these_files(box: Box) -> None:
    bundle = oms.sign(DIGESTS, box.key, subject="x")
    assert oms.verify(bundle, DIGESTS, box.keys) == box.key.public.id
    with pytest.raises(SignatureMismatch, match="a was signed and is missing"):
        oms.verify(bundle, {"b/c": "22" * 32}, box.keys)
    with pytest.raises(SignatureMismatch, match="b/c is not the file"):
        oms.verify(bundle, DIGESTS | {"b/c": "33" * 32}, box.keys)
    with pytest.raises(SignatureMismatch, match="d is there and was not signed"):
        oms.verify(bundle, DIGESTS | {"d": "33" * 32}, box.keys)


def test_a_signature_that_names_no_key_is_tried_with_each(box: Box) -> None:
    def without_hint(bundle: dict[str, Any]) -> None:
        bundle["verificationMaterial"]["publicKey"] = {}

    assert oms.verify(changed(box, without_hint), DIGESTS, box.keys) == box.key.public.id
    box.keys.revoke(box.key.public.id)
    with pytest.raises(SignatureUnverifiable, match="none of the trusted ones"):
        oms.verify(changed(box, without_hint), DIGESTS, box.keys)


def test_a_key_that_signs_in_the_name_of_another_is_found_out(box: Box) -> None:
    other = new_key()
    bundle = json.loads(oms.sign(DIGESTS, other, subject="x"))
    bundle["verificationMaterial"]["publicKey"]["hint"] = box.key.public.id
    with pytest.raises(SignatureInvalid, match="not the key's that it names"):
        oms.verify(json.dumps(bundle).encode(), DIGESTS, box.keys)


def test_a_revoked_key_verifies_nothing(box: Box) -> None:
    bundle = oms.sign(DIGESTS, box.key, subject="x")
    box.keys.revoke(box.key.public.id)
    with pytest.raises(KeyRevoked):
        oms.verify(bundle, DIGESTS, box.keys)


def test_a_key_file_that_is_not_to_be_believed_verifies_nothing(box: Box) -> None:
    (box.keys.keys_dir / f"{box.key.public.id}.pem").chmod(0o666)
    with pytest.raises(ConfigError):
        oms.verify(oms.sign(DIGESTS, box.key, subject="x"), DIGESTS, box.keys)


def replaced(*path: str, by: object) -> Callable[[dict[str, Any]], None]:
    def change(bundle: dict[str, Any]) -> None:
        for name in path[:-1]:
            bundle = bundle[name]
        bundle[path[-1]] = by

    return change


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (replaced("mediaType", by="application/vnd.dev.sigstore.bundle+json;version=0.2"), SignatureUnverifiable),
        (replaced("dsseEnvelope", "payloadType", by="text/plain"), SignatureUnverifiable),
        (replaced("dsseEnvelope", "payload", by="%%%"), SignatureInvalid),
        (replaced("dsseEnvelope", "payload", by="e30="), SignatureInvalid),
        (replaced("dsseEnvelope", "signatures", by=[]), SignatureInvalid),
        (replaced("dsseEnvelope", "signatures", by=[{"sig": "AAAA"}, {"sig": "AAAA"}]), SignatureInvalid),
        (replaced("dsseEnvelope", "signatures", by=[{"sig": "AAAA"}]), SignatureInvalid),
        (replaced("dsseEnvelope", by=None), SignatureInvalid),
        (replaced("messageSignature", by={}), None),
        (replaced("verificationMaterial", by={}), SignatureUnverifiable),
        (replaced("verificationMaterial", "publicKey", "hint", by="ab" * 32), SignatureUnverifiable),
        (replaced("verificationMaterial", "publicKey", "hint", by="../../etc/x"), SignatureUnverifiable),
        (replaced("verificationMaterial", by={"certificate": {"rawBytes": "AAAA"}}), SignatureUnverifiable),
        (replaced("verificationMaterial", by={"x509CertificateChain": {"certificates": []}}), SignatureUnverifiable),
    ],
)
def test_a_bundle_that_is_another_than_it_was_is_refused(
    box: Box, change: Callable[[dict[str, Any]], object], error: type[Exception] | None
) -> None:
    if error is None:
        assert oms.verify(changed(box, change), DIGESTS, box.keys)
        return
    with pytest.raises(error):
        oms.verify(changed(box, change), DIGESTS, box.keys)


def twice(statement: dict[str, Any]) -> None:
    statement["predicate"]["resources"] *= 2


def outside(statement: dict[str, Any]) -> None:
    statement["predicate"]["resources"][0]["name"] = "../a"


@pytest.mark.parametrize(
    ("change", "error", "why"),
    [
        (replaced("_type", by="https://in-toto.io/Statement/v0.1"), SignatureUnverifiable, "what was signed is"),
        (replaced("predicateType", by="https://slsa.dev/provenance/v1"), SignatureUnverifiable, "slsa"),
        (replaced("predicateType", by="https://model_signing/Digests/v0.1"), SignatureUnverifiable, "Digests/v0.1"),
        (replaced("predicate", "serialization", "method", by="shards"), SignatureUnverifiable, "made with shards"),
        (replaced("predicate", "serialization", "hash_type", by="blake2b"), SignatureUnverifiable, "blake2b"),
        (replaced("predicate", "resources", by=[]), SignatureInvalid, "its sum"),
        (replaced("subject", by=[]), SignatureInvalid, "its sum"),
        (replaced("subject", by=[{"digest": {"sha256": "00"}}]), SignatureInvalid, "its sum"),
        (replaced("predicate", by=[]), SignatureInvalid, "none that can be read"),
        (twice, SignatureInvalid, "names a file twice"),
        (outside, SignatureInvalid, "outside of the adapter"),
    ],
)
def test_a_trusted_key_that_signed_something_else_signed_no_adapter(
    box: Box, change: Callable[[dict[str, Any]], object], error: type[Exception], why: str
) -> None:
    with pytest.raises(error, match=why):
        oms.verify(signed_statement(box, change), DIGESTS, box.keys)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 10_000, b" " * ((4 << 20) + 1)])
def test_what_is_no_bundle_is_refused(box: Box, data: bytes) -> None:
    with pytest.raises(SignatureInvalid):
        oms.verify(data, DIGESTS, box.keys)
