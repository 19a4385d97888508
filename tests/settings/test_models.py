"""`[model NAME]` in hive.conf, and the files of models.d."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hive.backends.entries import entries_of, started_entries
from hive.errors import ConfigError
from hive.files.conf_edit import set_value, unset_value
from hive.settings.file import FILE_MAX_BYTES, Loaded, load, load_text

GOOD = "[model qwen3:8b]\nfile = /m/q.gguf\npin = yes\ngpus = GPU-1, GPU-2\n"

SAME_SLOT = ("a-model-with-a-long-name-61320", "a-model-with-a-long-name-91226")
"""Found by trying: their ids have the same slug and the same 8 hex digits."""


def loaded(directory: Path, conf: str = "", **files: str) -> Loaded:
    (directory / "hive.conf").write_text(conf)
    (directory / "models.d").mkdir(exist_ok=True)
    for name, text in files.items():
        (directory / "models.d" / f"{name}.toml").write_text(text)
    return load(directory / "hive.conf", env={})


def test_a_comfyui_is_one_entry_whose_names_no_model_takes(tmp_path: Path) -> None:
    found = loaded(tmp_path, "[comfyui]\nurl = http://127.0.0.1:8188\ngpus = GPU-1\nvram_mb = 9000\n")
    (entry,) = started_entries(entries_of(found.settings)).values()
    assert (entry.id, entry.kind, entry.row.vram_mb) == ("comfyui-42233297", "comfyui", 9000)
    assert entries_of(loaded(tmp_path, "").settings) == {}
    for name in ("comfyui", "comfy/portrait"):
        with pytest.raises(ConfigError, match="is that of a model of \\[comfyui\\]"):
            loaded(tmp_path, f"[model {name}]\nfile = /m/a.gguf\n")


ELSEWHERE = (
    *("http://10.0.0.9:8188", "https://127.0.0.1:8188", "http://127.0.0.1.evil.org"),
    *("http://u@127.0.0.1", "x"),
)


@pytest.mark.parametrize("url", ELSEWHERE)
def test_a_comfyui_is_on_this_box(tmp_path: Path, url: str) -> None:
    with pytest.raises(ConfigError, match="a ComfyUI is on this box"):
        loaded(tmp_path, f"[comfyui]\nurl = {url}\n")


def test_both_places_describe_models(tmp_path: Path) -> None:
    found = loaded(
        tmp_path,
        "[model org/a.b:8b]\nfile = /m/a.gguf\npin = yes\n",
        more='[model."c"]\nfile = "/m/c.gguf"\ngpus = ["GPU-1", "GPU-2"]\nkeep_alive_s = 5\n',
    )
    assert list(found.settings.models) == ["org/a.b:8b", "c"]
    assert found.settings.models["org/a.b:8b"].pin
    assert (found.settings.models["c"].gpus, found.settings.models["c"].keep_alive_s) == ("GPU-1, GPU-2", 5)
    assert str(found.origins["model c.file"]) == f"file {tmp_path}/models.d/more.toml"


@pytest.mark.parametrize(
    ("conf", "toml", "said"),
    [
        ("[model a]\npin = 1\n", "", "hive.conf:1: [model a]: file is missing"),
        ("[model a]\n", "", "hive.conf:1: [model a]: file is missing"),
        ("[model a b]\nfile = /x\n", "", "hive.conf:1: [model a b]: a model's name is"),
        ("[model a]\nfile = /x\ncontext = -1\n", "", "hive.conf:3: [model a] context: expected"),
        ("[model a]\nfile = /x\nctx = 1\n", "", "hive.conf:3: [model a] ctx: no such key"),
        (
            "[model a]\nfile = /x\nbackend = tgi\n",
            "",
            "a] backend: expected one of llama, vllm, ollama, remote, whisper, diffusers, found 'tgi'",
        ),
        ("[model a]\nfile = a:8b\n", "", "hive.conf:2: [model a] file: expected an absolute path, found 'a:8b'"),
        ("[model a]\nfile = /x\nbackend = ollama\n", "", "hive.conf:2: [model a] file: expected the model's name at O"),
        (
            "[model a]\nbackend = ollama\ncontext = 9\n",
            "",
            "hive.conf:3: [model a] context: Ollama takes it from the m",
        ),
        ("[model a+b]\nbackend = ollama\n", "", "[model a+b] file: expected the model's name at Ollama, found 'a+b'"),
        (
            "[model a]\nbackend = ollama\n[model b]\nbackend = ollama\nfile = A:latest\n",
            "",
            "hive.conf:3: [model b]: it is the model of [model a] at Ollama: it has one description",
        ),
        ("[model a]\nfile = /x\ncategory = image\n", "", "no server here makes images"),
        ("[model a.b]\nfile = /x\n[model a]\npin = 1\n", "", "hive.conf:3: [model a]: file is missing"),
        ("\n[model a]\nfile = /x\n", '[model.a]\nfile="/y"\n', "described already at {}/hive.conf:2"),
        ("", '[model.a]\nfile="/y"\ncontxt=1\n', "m.toml: [model.'a'] contxt: no such key; did you mean `context`?"),
        ("", '[model.a]\nfile="/y"\npin=1\n', "m.toml: [model.'a'] pin: expected true or false, found 1"),
        ("", '[model.a]\nfile="/y"\ncontext=true\n', "context: expected a whole number"),
        ("", '[model.a]\nfile="/y"\ncontext=4096.0\n', "context: expected a whole number"),
        ("", '[model.a]\nfile="/y"\nkeep_alive_s=nan\n', "keep_alive_s: expected a number"),
        ("", '[model.a]\nfile="/y"\ngpus=[0]\n', "gpus: expected"),
        ("", "model = 1\n", "m.toml: model: expected tables"),
        ("", "[model]\na = 1\n", "expected a table of settings"),
        ("", "[proxy]\nport = 1\n", "m.toml: [proxy]: expected [model."),
        ("", '[model."a b"]\nfile="/x"\n', "m.toml: [model.'a b']: a model's name is"),
        ("", "[model", "m.toml: "),
        ("", "#" * (FILE_MAX_BYTES + 1), "larger than"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(tmp_path: Path, conf: str, toml: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path, conf, m=toml)
    assert said.format(tmp_path) in caught.value.message


def test_a_wrong_file_is_not_told_as_a_missing_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path, "[model a]\nfile = here.gguf\n")
    assert caught.value.message.count("\n") == 0
    assert "hive.conf:2: [model a] file: expected an absolute path" in caught.value.message


def test_two_names_of_one_slot_are_a_problem(tmp_path: Path) -> None:
    one, other = SAME_SLOT
    with pytest.raises(ConfigError, match=f"its slot's id is that of {one}"):
        loaded(tmp_path, f"[model {one}]\nfile = /x\n[model {other}]\nfile = /y\n")


def test_one_name_in_two_files_names_the_first(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"b\.toml: .*described already at .*a\.toml"):
        loaded(tmp_path, a='[model.x]\nfile="/x"\n', b='[model.x]\nfile="/x"\n')


def test_odd_files_are_passed_over(tmp_path: Path) -> None:
    directory = tmp_path / "models.d"
    directory.mkdir()
    (directory / ".hidden.toml").write_text("[")
    (directory / "note.txt").write_text("[")
    (directory / "dir.toml").mkdir()
    os.mkfifo(directory / "pipe.toml")
    (directory / "gone.toml").symlink_to("/nowhere")
    assert loaded(tmp_path).settings.models == {}


def test_a_file_that_is_no_text_is_said(tmp_path: Path) -> None:
    (tmp_path / "models.d").mkdir()
    (tmp_path / "models.d" / "m.toml").write_bytes(b"\n\xff")
    with pytest.raises(ConfigError, match=r"m\.toml:2: not UTF-8"):
        loaded(tmp_path)


def test_a_model_of_models_d_is_not_described_twice_by_a_change(tmp_path: Path) -> None:
    """`hive config set` looked at hive.conf alone, and left one that could not be read again."""
    loaded(tmp_path, "[model a.b]\nfile = /x\n", m='[model.c]\nfile="/x"\n')
    conf = tmp_path / "hive.conf"
    set_value(conf, "model a.b.pin", "true", dry_run=False)
    assert load(conf, env={}).settings.models["a.b"].pin
    before = conf.read_text()
    with pytest.raises(ConfigError):
        set_value(conf, "model c.file", "/y", dry_run=False)
    assert conf.read_text() == before


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


def test_a_model_of_ollama_is_known_there_by_its_own_name_or_by_its_file() -> None:
    conf = "[model a:8b]\nbackend = ollama\n[model chat]\nbackend = ollama\nfile = hf.co/x/Y-GGUF:Q4_0\n" + GOOD
    entries = entries_of(load_text(conf, env={}).settings)
    assert [entry.at_server for entry in entries.values()] == ["a:8b", "hf.co/x/Y-GGUF:Q4_0", "qwen3:8b"]
    assert [entry.name for entry in started_entries(entries).values()] == ["qwen3:8b"]  # the helper starts no Ollama's


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
