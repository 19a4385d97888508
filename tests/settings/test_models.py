"""`[model NAME]` in hive.conf, and the files of models.d."""

from __future__ import annotations

from pathlib import Path

import pytest

from hive.backends.entries import entries_of
from hive.errors import ConfigError
from hive.files.conf_edit import set_value, unset_value
from hive.settings.file import load, load_text
from hive.settings.pool import ModelRow

GOOD = "[model qwen3:8b]\nfile = /m/q.gguf\npin = yes\ngpus = GPU-1, GPU-2\n"


def problems(text: str) -> list[str]:
    with pytest.raises(ConfigError) as refused:
        load_text(text, path=Path("hive.conf"), env={})
    return refused.value.message.splitlines()


def models_d(tmp_path: Path, **files: str) -> Path:
    """A hive.conf beside a models.d with these files."""
    (tmp_path / "models.d").mkdir()
    for name, text in files.items():
        (tmp_path / "models.d" / f"{name}.toml").write_text(text)
    conf = tmp_path / "hive.conf"
    conf.write_text("")
    return conf


def test_a_section_describes_a_model_and_the_line_of_each_value_is_known() -> None:
    loaded = load_text(GOOD, path=Path("hive.conf"), env={})
    assert loaded.settings.models == {"qwen3:8b": ModelRow(file="/m/q.gguf", pin=True, gpus="GPU-1, GPU-2")}
    assert str(loaded.origins["model qwen3:8b.pin"]) == "file hive.conf:3"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[model -x]\nfile = /m\n", "hive.conf:1: [model -x]: a model's name is a letter or digit, then"),
        ("[model a b]\nfile = /m\n", "hive.conf:1: [model a b]: a model's name"),
        ("[model]\nfile = /m\n", "hive.conf:1: [model]: a model's name"),
        ("[model x]\npin = yes\n", "hive.conf:2: [model x]: file is missing"),
        ("[model x]\nfile = m.gguf\n", "hive.conf:2: [model x] file: expected an absolute path, found 'm.gguf'"),
        ("[model x]\nfile = /m\nfle = 1\n", "hive.conf:3: [model x] fle: no such key; did you mean `file`?"),
        (
            "[model x]\nfile = /m\nparallel = -1\n",
            "hive.conf:3: [model x] parallel: expected a whole number at least 0",
        ),
        ("[model x]\nfile = /m\nbackend = ollama\n", "hive.conf:3: [model x] backend: expected one of llama, vllm"),
        ("[model x]\nfile = /m\nkeep_alive_s = nan\n", "hive.conf:3: [model x] keep_alive_s: expected a number"),
        ("[model x]\nfile = /m\ncategory = image\n", "[model x] category: no server here makes images or sound yet"),
        ("[pool]\nswap_share = 1\n", "hive.conf:2: [pool] swap_share: expected a number above 0"),
        ("[modle x]\nfile = /m\n", "hive.conf:1: [modle x]: no such section"),
    ],
)
def test_what_is_wrong_is_told_with_its_line_and_key(text: str, problem: str) -> None:
    assert any(problem in line for line in problems(text)), problems(text)


def test_files_of_models_d_are_read_in_order_with_the_types_of_toml(tmp_path: Path) -> None:
    conf = models_d(
        tmp_path,
        b='[model."org/b:1"]\nfile = "/m/b"\nbackend = "vllm"\ngpus = ["GPU-1", "GPU-2"]\n',
        a='[model.a]\nfile = "/m/a.gguf"\nkeep_alive_s = 2.5\npin = true\n',
    )
    (tmp_path / "models.d" / ".hidden.toml").write_text("nonsense")
    (tmp_path / "models.d" / "notes.txt").write_text("nonsense")
    (tmp_path / "models.d" / "dir.toml").mkdir()
    models = load(conf, env={}).settings.models
    assert list(models) == ["a", "org/b:1"]
    assert models["a"] == ModelRow(file="/m/a.gguf", keep_alive_s=2.5, pin=True)
    assert models["org/b:1"].gpus == "GPU-1, GPU-2"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("nonsense", "a.toml: Expected"),
        ('[models.x]\nfile = "/m"\n', 'a.toml: [models]: expected [model."NAME"] and nothing else'),
        ("model = 3\n", "a.toml: model: expected tables"),
        ("[model]\nx = 3\n", "a.toml: [model.'x']: expected a table of settings"),
        ('[model."a b"]\nfile = "/m"\n', "a.toml: [model.'a b']: a model's name is"),
        ('[model.x]\nfile = "/m"\npin = "yes"\n', "a.toml: [model.'x'] pin: expected true or false, found 'yes'"),
        ('[model.x]\nfile = "/m"\nparallel = true\n', "a.toml: [model.'x'] parallel: expected a whole number"),
        ('[model.x]\nfile = "/m"\nkeep_alive_s = inf\n', "a.toml: [model.'x'] keep_alive_s: expected a number"),
        ('[model.x]\nfile = "/m"\nfle = 1\n', "a.toml: [model.'x'] fle: no such key; did you mean `file`?"),
        ("[model.x]\npin = true\n", "a.toml: [model x]: file is missing"),
        ("#" * (1 << 20) + "\n", "a.toml: larger than 1048576 bytes"),
    ],
)
def test_what_is_wrong_in_models_d_is_told_with_its_file(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(models_d(tmp_path, a=text), env={})
    assert problem in refused.value.message


def test_a_model_that_is_described_twice_is_told_with_both_places(tmp_path: Path) -> None:
    conf = models_d(tmp_path, a='[model."qwen3:8b"]\nfile = "/m"\n')
    conf.write_text(GOOD)
    with pytest.raises(ConfigError, match=r"a\.toml: .*: described already in file .*hive\.conf:2"):
        load(conf, env={})


def test_no_variable_of_the_environment_is_a_models() -> None:
    loaded = load_text(GOOD, env={"MODEL_PIN_qwen3": "true", "TENANT_WEIGHT_acme": "2"})
    assert loaded.settings.models["qwen3:8b"].pin
    assert loaded.settings.tenants["acme"].weight == 2


def test_a_models_setting_is_set_and_taken_back_also_where_its_name_has_dots(tmp_path: Path) -> None:
    conf = tmp_path / "hive.conf"
    conf.write_text("[model llama-3.1:8b]\nfile = /m/l.gguf\n")
    change = set_value(conf, "model llama-3.1:8b.pin", "true", dry_run=False)
    assert change.apply == ["systemctl restart hive-daemon"]
    assert load(conf, env={}).settings.models["llama-3.1:8b"].pin
    unset_value(conf, "model llama-3.1:8b.pin", dry_run=False)
    assert conf.read_text() == "[model llama-3.1:8b]\nfile = /m/l.gguf\n"


def test_a_change_is_checked_together_with_models_d(tmp_path: Path) -> None:
    conf = models_d(tmp_path, a='[model.x]\nfile = "/m"\n')
    with pytest.raises(ConfigError, match="described already"):
        set_value(conf, "model x.file", "/n", dry_run=False)
    assert conf.read_text() == ""


def test_entries_have_the_ids_of_slots_and_what_is_found_comes_after_what_is_described() -> None:
    settings = load_text("[pool]\nfound = yes\n" + GOOD, env={}).settings
    found = {"qwen3:8b": Path("/d/other.gguf"), "gte": Path("/d/gte.gguf"), "hf": Path("/d/hf")}
    entries = list(entries_of(settings, found).values())
    assert [(entry.name, entry.kind, str(entry.path)) for entry in entries] == [
        ("qwen3:8b", "llama", "/m/q.gguf"),
        ("gte", "llama", "/d/gte.gguf"),
        ("hf", "vllm", "/d/hf"),
    ]
    assert all(len(entry.id) <= 32 for entry in entries)
    assert entries_of(load_text("[pool]\nenabled = no\n" + GOOD, env={}).settings) == {}
    assert list(entries_of(load_text(GOOD, env={}).settings, found)) == [entries[0].id]
