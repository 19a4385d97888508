"""Keys that adapters are signed with: trusted, revoked, and files that are not to be believed."""

from __future__ import annotations

import datetime
import hashlib
import subprocess
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from hive.adapters.keys import EcSecretKey, KeyOnFile, TrustedKeys, public_key
from hive.errors import BadRequest, ConfigError, KeyRevoked, NotFound, UsageError, WrongState
from tests.adapters.lora_files import as_nobody, new_key, secret_pem


@pytest.fixture
def keys(tmp_path: Path) -> TrustedKeys:
    return TrustedKeys(tmp_path / "keys")


def test_a_key_is_trusted_from_the_moment_its_file_is_there(keys: TrustedKeys) -> None:
    key = new_key().public
    assert (keys.listed(), keys.find(key.id)) == ([], None)
    assert keys.trust(key.pem).id == key.id
    assert keys.trust(key.pem).id == key.id
    assert keys.listed() == [KeyOnFile(key.id, "trusted")]
    found = keys.find(key.id)
    assert found is not None
    assert found.pem == key.pem


def test_the_id_is_what_openssl_and_sha256sum_print(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(secret_pem())
    pem = subprocess.check_output(["openssl", "pkey", "-in", tmp_path / "secret", "-pubout"])
    assert public_key(pem).id == hashlib.sha256(pem).hexdigest()
    assert EcSecretKey((tmp_path / "secret").read_bytes()).public.id == public_key(pem).id


@pytest.mark.parametrize("curve", [ec.SECP256R1(), ec.SECP384R1(), ec.SECP521R1()])
def test_each_curve_of_the_specification_signs_and_verifies(curve: ec.EllipticCurve) -> None:
    key, other = new_key(curve), new_key(curve)
    signature = key.sign(b"message")
    assert key.public.verifies(signature, b"message")
    assert not key.public.verifies(signature, b"massage")
    assert not key.public.verifies(signature[:-1], b"message")
    assert not other.public.verifies(signature, b"message")


def test_a_certificate_is_trusted_for_its_key(keys: TrustedKeys) -> None:
    secret = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "signer")])
    day = datetime.datetime(2026, 1, 1)
    made = x509.CertificateBuilder(name, name, secret.public_key(), 1, day, day + datetime.timedelta(days=1))
    certificate = made.sign(secret, hashes.SHA256())
    key = keys.trust(certificate.public_bytes(Encoding.PEM))
    assert keys.listed() == [KeyOnFile(key.id, "trusted")]


RSA_PUBLIC = subprocess.check_output(
    "openssl genpkey -algorithm RSA -pkeyopt rsa_keygen_bits:1024 2>/dev/null | openssl pkey -pubout", shell=True
)


@pytest.mark.parametrize(
    "pem", [b"", b"x", RSA_PUBLIC, b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"]
)
def test_what_is_no_such_key_is_not_trusted(keys: TrustedKeys, pem: bytes) -> None:
    with pytest.raises(BadRequest, match="expected a public key on P-256"):
        keys.trust(pem)
    assert not keys.keys_dir.exists()


def test_a_secret_key_is_not_taken_for_a_public_one(keys: TrustedKeys) -> None:
    with pytest.raises(BadRequest, match="a secret key, which stays with its owner") as error:
        keys.trust(secret_pem())
    assert "-pubout" in error.value.hint


def test_a_secret_key_on_another_curve_or_with_a_passphrase_signs_nothing() -> None:
    with pytest.raises(BadRequest, match="on the curve secp256k1"):
        new_key(ec.SECP256K1())
    with pytest.raises(BadRequest, match="without a passphrase"):
        EcSecretKey(b"-----BEGIN ENCRYPTED PRIVATE KEY-----\nAAAA\n-----END ENCRYPTED PRIVATE KEY-----\n")


def test_a_revoked_key_is_trusted_no_more_and_not_again(keys: TrustedKeys) -> None:
    key = new_key().public
    keys.trust(key.pem)
    assert keys.revoke(key.id[:12]) == key.id
    assert keys.revoke(key.id) == key.id
    assert (keys.find(key.id), keys.trusted()) == (None, [])
    assert keys.listed() == [KeyOnFile(key.id, "revoked")]
    with pytest.raises(KeyRevoked):
        keys.refuse_revoked(key.id)
    with pytest.raises(WrongState, match="was revoked") as error:
        keys.trust(key.pem)
    assert f"{key.id}.revoked" in error.value.hint


def test_a_revocation_holds_where_somebody_copies_the_key_there_again(keys: TrustedKeys) -> None:
    key = new_key().public
    keys.trust(key.pem)
    keys.revoke(key.id)
    (keys.keys_dir / f"{key.id}.pem").write_bytes(key.pem)
    assert keys.find(key.id) is None
    assert keys.listed() == [KeyOnFile(key.id, "revoked")]


def test_a_key_is_revoked_in_advance_by_its_whole_id(keys: TrustedKeys) -> None:
    key = new_key().public
    assert keys.revoke(key.id) == key.id
    with pytest.raises(WrongState):
        keys.trust(key.pem)


@pytest.mark.parametrize(
    ("text", "error"), [("abc", UsageError), ("../../etc", UsageError), ("", UsageError), ("abcdef123456", NotFound)]
)
def test_what_is_no_id_of_a_key_revokes_nothing(keys: TrustedKeys, text: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        keys.revoke(text)


def test_a_key_that_others_could_have_written_is_not_believed(keys: TrustedKeys) -> None:
    key = keys.trust(new_key().public.pem)
    path = keys.keys_dir / f"{key.id}.pem"
    path.chmod(0o666)
    with pytest.raises(ConfigError, match="can be written by others"):
        keys.find(key.id)
    path.chmod(0o644)
    keys.keys_dir.chmod(0o777)
    with pytest.raises(ConfigError, match="can be written by others"):
        keys.find(key.id)


def test_where_nobody_may_look_nothing_counts_as_not_revoked(keys: TrustedKeys) -> None:
    """A directory that the daemon could not enter had no revoked keys in it."""
    key = keys.trust(new_key().public.pem)
    keys.revoke(key.id)
    keys.keys_dir.chmod(0)
    with as_nobody(), pytest.raises(ConfigError, match="cannot read"):
        keys.refuse_revoked(key.id)
    with as_nobody(), pytest.raises(ConfigError, match="cannot read"):
        keys.find(key.id)


def test_a_file_with_another_key_in_it_is_not_believed(keys: TrustedKeys) -> None:
    key = keys.trust(new_key().public.pem)
    (keys.keys_dir / f"{key.id}.pem").write_bytes(new_key().public.pem)
    with pytest.raises(ConfigError, match="holds the key"):
        keys.find(key.id)
    (keys.keys_dir / f"{key.id}.pem").write_bytes(b"x")
    with pytest.raises(ConfigError, match="expected a public key"):
        keys.find(key.id)


def test_other_files_in_the_directory_are_no_keys(keys: TrustedKeys) -> None:
    key = keys.trust(new_key().public.pem)
    (keys.keys_dir / "ann.pem").write_bytes(new_key().public.pem)
    (keys.keys_dir / "README").write_text("x")
    assert [found.id for found in keys.listed()] == [key.id]
