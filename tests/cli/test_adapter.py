"""`hive adapter` about a running Hive: adapters that are brought, looked at, refused and removed, as people see it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hive.adapters.directory import AdapterDirectory
from hive.domain import BackendInfo, BackendKind, ModelInfo
from hive.settings.adapters import AdaptersSection
from tests.adapters.lora_files import Box, new_key, peft_adapter, sign

Hive = Any
"""conftest.Hive: test modules import no siblings."""


class AdapterHive:
    """`hive` with a directory that adapters come from, and one trusted key; Ollama is in use, which takes none."""

    def __init__(self, hive: Hive, directory: Path) -> None:
        self.hive = hive
        self.files = Box(directory)
        section = AdaptersSection(dir=str(self.files.beneath), keys_dir=str(self.files.keys.keys_dir))
        effects = hive.box.daemon.effects
        effects.settings = msgspec.structs.replace(effects.settings, adapters=section)
        effects.backend = BackendInfo(kind=BackendKind.OLLAMA, address="/r/o.sock", up=True)
        effects.models = [ModelInfo(name="tiny-base"), ModelInfo(name="other")]
        self.files.signed("legal")

    def __call__(self, *words: str) -> Any:
        return self.hive("adapter", *words)

    def installed(self) -> Any:
        return AdapterDirectory(self.hive.box.paths.adapters).records()


@pytest.fixture
def adapter(hive: Hive, tmp_path: Path) -> AdapterHive:
    return AdapterHive(hive, tmp_path / "adapters")


def test_without_any_the_list_says_how_one_comes(adapter: AdapterHive) -> None:
    said = adapter()
    assert (said.code, said.out, said.err) == (0, "there is no adapter: hive adapter pull PATH --base MODEL\n", "")
    effects = adapter.hive.box.daemon.effects
    effects.settings = msgspec.structs.replace(effects.settings, adapters=AdaptersSection())
    assert "[adapters] dir, the directory they may come from, is empty" in adapter("list").err
    refused = adapter("pull", "legal", "--base", "tiny-base", "--json")
    assert (refused.code, refused.error["code"]) == (1, "wrong_state")


def test_one_is_brought_listed_shown_and_removed(adapter: AdapterHive) -> None:
    said = adapter("pull", "legal", "--base", "tiny-base")
    record = adapter.installed()[0]
    key = adapter.files.key.public.id
    assert said.code == 0, said
    assert said.out == f"{record.engine_name} on tiny-base is installed: rank 8, 3.3 KiB, signed by {key[:12]}\n"
    assert "next: hive adapter load legal" in said.err
    head, line = adapter("list").out.splitlines()
    assert head.split()[:4] == ["ADAPTER", "BASE", "STATE", "DIGEST"]
    assert line.split()[:4] == ["legal", "tiny-base", "installed", record.digest[:12]]
    shown = adapter("show", "legal")
    assert all(word in shown.out for word in ("adapter_config.json", "adapter_model.safetensors", key[:12]))
    assert adapter("show", "legal", "--json").json["installed"][0]["digest"] == record.digest
    missing = adapter("show", "leagl", "--json")
    assert (missing.code, missing.error["hint"]) == (3, "did you mean `legal`?")
    assert adapter("remove", "legal").code == 2, "nobody can be asked"
    assert adapter("remove", "legal", "--yes").out == "1 build of legal is removed, 3.3 KiB are free\n"
    assert adapter.installed() == []


def test_what_the_server_in_use_does_not_take_is_said_with_what_does(adapter: AdapterHive) -> None:
    adapter("pull", "legal", "--base", "tiny-base")
    refused = adapter("load", "legal", "--json")
    assert (refused.code, refused.error["code"]) == (4, "not_supported")
    assert "llama-server" in refused.error["hint"]
    nothing = adapter("unload", "legal", "--json")
    assert (nothing.code, nothing.json["result"]["changed"]) == (0, False), "it is not loaded"
    assert adapter("unload", "nobody", "--json").error["code"] == "adapter_not_found"


def test_a_pull_that_is_refused_exits_as_its_error_says(adapter: AdapterHive) -> None:
    sign(peft_adapter(adapter.files.beneath / "strange"), new_key())
    for words, code, error in (
        (("strange", "--base", "tiny-base"), 4, "signature_unverifiable"),
        (("legal", "--base", "other"), 2, "adapter_mismatch"),
        (("legal", "--base", "nobody"), 3, "model_not_found"),
        (("legal", "--base", "tiny-base", "--name", "other"), 2, "bad_request"),
        (("legal",), 2, "usage"),
        (("../from", "--base", "tiny-base"), 2, "adapter_unsafe"),
    ):
        said = adapter("pull", *words, "--json")
        assert (said.code, json.loads(said.err.splitlines()[-1])["code"]) == (code, error), said
    assert adapter("pull", "legal", "--cancel").code == 3
    assert adapter.installed() == []


def test_the_keys_are_listed_with_what_they_have_signed(adapter: AdapterHive) -> None:
    adapter("pull", "legal", "--base", "tiny-base")
    id, record = adapter.files.key.public.id, adapter.installed()[0]
    assert adapter("keys").out.splitlines()[1].split() == [id, "trusted", record.engine_name]
    adapter.files.keys.revoke(id)
    assert adapter("keys").out.splitlines()[1].split()[1] == "revoked"
    assert id in adapter("list").out.splitlines()[2], "the reason that it would not be loaded is below the table"
