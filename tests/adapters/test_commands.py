"""`hive adapter sign`, `verify`, `trust`, `revoke`: without a daemon, as their users type them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from hive.adapters.keys import TrustedKeys
from hive.cli.main import main
from hive.store import acts
from tests.adapters.lora_files import Box, gguf_adapter, model_signing, new_key, peft_adapter, secret_pem


class CommandEnd(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out or self.err)


class Adapters:
    """`hive adapter WORDS… --json` of a `hive up` in `state`."""

    def __init__(self, state: Path, capture: pytest.CaptureFixture[str]) -> None:
        self.state = state
        self._capture = capture
        self.secret = state.parent / "adapter.key"
        self.secret.write_bytes(secret_pem())
        self.secret.chmod(0o600)
        self.public = state.parent / "adapter.pub"
        made = subprocess.check_output(["openssl", "pkey", "-in", self.secret, "-pubout"])
        self.public.write_bytes(made)

    def __call__(self, verb: str, *words: str | Path, text: bool = False) -> CommandEnd:
        place = [] if verb == "sign" else ["--state-dir", str(self.state)]
        code = main(["adapter", verb, *map(str, words), *place, *([] if text else ["--json"])])
        out, err = self._capture.readouterr()
        return CommandEnd(code, out, err)


@pytest.fixture
def adapter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Adapters:
    (tmp_path / "state").mkdir(mode=0o700)
    return Adapters(tmp_path / "state", capsys)


def test_an_adapter_is_signed_trusted_verified_and_revoked(adapter: Adapters, tmp_path: Path) -> None:
    source = peft_adapter(tmp_path / "legal")
    signed = adapter("sign", source, "--key", adapter.secret).json
    assert signed["files"] == ["README.md", "adapter_config.json", "adapter_model.safetensors"]
    refused = adapter("verify", source)
    assert (refused.code, refused.json["code"]) == (4, "signature_unverifiable")
    assert "hive adapter trust" in refused.json["hint"]
    assert adapter("trust", adapter.public).json["key_id"] == signed["key_id"]
    verified = adapter("verify", source).json
    assert (verified["key_id"], verified["format"], verified["rank"]) == (signed["key_id"], "safetensors", 8)
    revoked = adapter("revoke", signed["key_id"][:12])
    assert (revoked.code, revoked.json["key_id"], revoked.json["told"]) == (0, signed["key_id"], False)
    refused = adapter("verify", source)
    assert (refused.code, refused.json["code"]) == (4, "signature_unverifiable")
    assert "was revoked" in refused.json["message"]
    assert adapter("trust", adapter.public).code == 1


def test_what_is_signed_here_model_signing_verifies(adapter: Adapters, tmp_path: Path) -> None:
    source = peft_adapter(tmp_path / "legal")
    (source / ".git").mkdir()
    (source / ".git" / "HEAD").write_text("x")
    assert adapter("sign", source, "--key", adapter.secret).code == 0
    assert adapter("sign", source, "--key", adapter.secret).code == 0  # in place of the first one
    signature = source / "model.sig"
    ran = model_signing("verify", "key", source, "--signature", signature, "--public_key", adapter.public)
    assert ran.returncode == 0, ran.stderr
    (source / "README.md").write_text("x")
    told = adapter("verify", source, "--key", adapter.public)
    assert (told.code, told.json["code"]) == (4, "signature_mismatch")


def test_one_file_has_its_signature_beside_it(adapter: Adapters, tmp_path: Path) -> None:
    source = gguf_adapter(tmp_path / "legal.gguf")
    assert adapter("sign", source, "--key", adapter.secret).json["signature"] == f"{source}.sig"
    told = adapter("verify", source, "--key", adapter.public, text=True)
    assert told.code == 0
    assert "Format" in told.out
    assert "gguf" in told.out


def test_a_directory_is_verified_behind_a_link_and_by_its_own_name(
    adapter: Adapters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = peft_adapter(tmp_path / "real" / "legal")
    adapter("sign", source, "--key", adapter.secret)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert adapter("verify", tmp_path / "link" / "legal", "--key", adapter.public).code == 0
    monkeypatch.chdir(source)
    assert adapter("verify", ".", "--key", adapter.public).code == 0
    monkeypatch.chdir(tmp_path / "real")
    assert adapter("verify", "legal", "--key", adapter.public).code == 0


def test_an_installed_one_is_verified_by_its_name(adapter: Adapters, tmp_path: Path) -> None:
    box = Box(tmp_path / "box")
    box.adapters.root = adapter.state / "adapters"
    box.keys = TrustedKeys(adapter.state / "adapter-keys")
    box.keys.trust(box.key.public.pem)
    record = box.install(box.signed())
    told = adapter("verify", "legal")
    assert (told.code, told.json["name"], told.json["key_id"]) == (0, record.engine_name, box.key.public.id)
    weights = box.adapters.path(record) / "adapter_model.safetensors"
    weights.chmod(0o644)
    weights.write_bytes(b"x" * weights.stat().st_size)
    assert adapter("verify", "legal").json["code"] == "signature_mismatch"
    assert adapter("verify", "medical").code == 3
    assert adapter("verify", "medical", "--key", adapter.public).code == 2


def test_a_secret_key_that_others_can_read_signs_nothing(adapter: Adapters, tmp_path: Path) -> None:
    source = peft_adapter(tmp_path / "legal")
    adapter.secret.chmod(0o644)
    told = adapter("sign", source, "--key", adapter.secret)
    assert (told.code, "chmod 600" in told.json["hint"]) == (4, True)
    assert not (source / "model.sig").exists()


@pytest.mark.parametrize("what", ["link", "pickle", "no key", "nothing"])
def test_what_would_never_be_installed_is_not_signed(adapter: Adapters, tmp_path: Path, what: str) -> None:
    source = peft_adapter(tmp_path / "legal")
    if what == "link":
        (source / "more").symlink_to("README.md")
    elif what == "pickle":
        (source / "adapter_model.safetensors").rename(source / "adapter_model.bin")
    elif what == "no key":
        adapter.secret.write_text("x")
    else:
        source = tmp_path / "none"
    told = adapter("sign", source, "--key", adapter.secret)
    assert told.code in (2, 3)
    assert told.json["hint"]
    assert not (source / "model.sig").exists()


def test_a_secret_key_is_not_trusted(adapter: Adapters) -> None:
    told = adapter("trust", adapter.secret)
    assert told.code == 2
    assert "a secret key, which stays with its owner" in told.json["message"]
    assert not (adapter.state / "adapter-keys").exists()


def test_keys_of_another_directory_are_meant_where_it_is_named(adapter: Adapters, tmp_path: Path) -> None:
    keys, source = tmp_path / "other", peft_adapter(tmp_path / "legal")
    key_id = adapter("sign", source, "--key", adapter.secret).json["key_id"]
    assert adapter("trust", adapter.public, "--keys", keys).code == 0
    assert [path.name for path in keys.iterdir()] == [f"{key_id}.pem"]
    assert adapter("verify", source, "--keys", keys).code == 0
    assert adapter("revoke", key_id, "--keys", keys).code == 0
    assert adapter("verify", source, "--keys", keys).code == 4


def test_trusting_and_revoking_are_noted_for_the_audit_table(adapter: Adapters) -> None:
    (adapter.state / "hive.db").touch()
    key_id = adapter("trust", adapter.public).json["key_id"]
    adapter("revoke", key_id)
    adapter("trust", adapter.public)
    told = [(one.act, one.outcome) for one in acts.read(acts.acts_of(adapter.state / "hive.db")).acts]
    assert told == [("trust_adapter_key", "ok"), ("revoke_adapter_key", "ok"), ("trust_adapter_key", "wrong_state")]


def test_an_id_that_is_none_revokes_nothing(adapter: Adapters) -> None:
    assert adapter("revoke", "nonsense").code == 2
    assert adapter("revoke", "abcdef012345").code == 3
    assert adapter("revoke", new_key().public.id).code == 0
