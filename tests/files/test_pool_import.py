"""`hive pool import`: the seed's files on the disk, and the file that comes into models.d."""

from __future__ import annotations

import json
import os
import stat
import tomllib
from pathlib import Path

import pytest

from hive.cli.main import main
from hive.errors import ConfigError, HiveError, NotFound, UsageError, WrongState
from hive.files.pool_import import import_files, write
from hive.settings.file import load

MANIFEST = """
models:
  qwen3-8b: &first
    backend: llama-server
    path: q.gguf
    vram_mb: 6000
    pin: true
  "org/Llama-3.1:8b":
    <<: *first
    pin: false
"""


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    path = tmp_path / "seed" / "manifest.yaml"
    path.parent.mkdir()
    path.write_text(MANIFEST)
    return path


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    path = tmp_path / "hive" / "hive.conf"
    path.parent.mkdir()
    path.write_text("[proxy]\nport = 8080\n")
    return path


def test_a_manifest_becomes_a_file_of_models_d(manifest: Path, conf: Path) -> None:
    made = write(import_files([manifest]), conf, "seed")
    assert made.file == conf.parent / "models.d" / "seed.toml"
    assert stat.S_IMODE(made.file.stat().st_mode) == 0o644
    models = load(conf, env={}).settings.models
    assert list(models) == ["qwen3-8b", "org/Llama-3.1:8b"]
    assert models["qwen3-8b"].file == str(manifest.parent / "q.gguf")
    assert (models["qwen3-8b"].pin, models["org/Llama-3.1:8b"].pin) == (True, False)


def test_json_is_read_too(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps({"models": {"q": {"path": "/m/q.gguf"}}}))
    assert tomllib.loads(import_files([path]).text) == {"model": {"q": {"backend": "llama", "file": "/m/q.gguf"}}}


def test_paths_are_those_of_the_directory_that_is_named(manifest: Path) -> None:
    made = import_files([manifest], Path("/srv/models"))
    assert made.found.models["qwen3-8b"]["file"] == "/srv/models/q.gguf"


def test_what_is_there_is_not_replaced(manifest: Path, conf: Path) -> None:
    made = import_files([manifest])
    there = conf.parent / "models.d" / "seed.toml"
    there.parent.mkdir()
    there.write_text("")
    with pytest.raises(WrongState, match="is there already"):
        write(made, conf, "seed")
    assert there.read_text() == ""


def test_a_model_that_hive_conf_describes_too_is_refused_and_nothing_is_written(manifest: Path, conf: Path) -> None:
    conf.write_text("[model qwen3-8b]\nfile = /m/other.gguf\n")
    with pytest.raises(ConfigError, match=r"seed\.toml.*described already at .*hive\.conf:1"):
        write(import_files([manifest]), conf, "seed")
    assert not (conf.parent / "models.d").exists()


def test_a_model_that_another_file_describes_too_is_refused(manifest: Path, conf: Path) -> None:
    write(import_files([manifest]), conf, "seed")
    with pytest.raises(ConfigError, match=r"again\.toml.*described already at .*seed\.toml"):
        write(import_files([manifest]), conf, "again")
    assert os.listdir(conf.parent / "models.d") == ["seed.toml"]


def test_without_a_hive_conf_models_d_is_made(manifest: Path, tmp_path: Path) -> None:
    made = write(import_files([manifest]), tmp_path / "hive.conf", "seed.toml")
    assert made.file == tmp_path / "models.d" / "seed.toml"


@pytest.mark.parametrize("name", ["", "../seed", "a/b", ".seed", "a b", "x" * 65])
def test_a_name_that_is_none_is_refused(manifest: Path, conf: Path, name: str) -> None:
    with pytest.raises(UsageError, match="no name of a file"):
        write(import_files([manifest]), conf, name)


def test_a_directory_that_is_not_there_is_told(manifest: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="there is no directory"):
        write(import_files([manifest]), tmp_path / "none" / "hive.conf", "seed")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("models:\n  q: {path: [\n", "manifest.yaml:3: "),
        ("models:\n  q: {path: x}\n  q: {path: y}\n", "manifest.yaml:3: 'q' twice"),
        ("models: !!python/object/apply:os.system [id]\n", "manifest.yaml:1: could not determine a constructor"),
        ("models: {q: {path: x}}\n---\nmore: 1\n", "manifest.yaml:2: "),
        ("[" * 5000, "manifest.yaml"),
        ("models: {'a b': {path: x}}", "a model's name is"),
        ("models: {q: {path: x, vram_mb: -1}}", "vram_mb: expected"),
        ("models: {q: {path: x, context: 1.5}}", "context: expected"),
        ("\x00", "manifest.yaml"),
        ("a" * (1 << 20) + "b", "larger than"),
    ],
)
def test_a_file_that_is_wrong_is_refused_with_its_place(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "manifest.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as refused:
        import_files([path])
    assert told in refused.value.message
    assert "hive-import-" not in refused.value.message


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "manifest.yaml"
    path.write_bytes(b"a: \xff\xfe\n")
    with pytest.raises(ConfigError, match=r"manifest\.yaml"):
        import_files([path])


def test_a_file_that_is_not_there_or_none_is_told(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        import_files([tmp_path / "none.yaml"])
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(HiveError, match="is no file"):
            import_files([path])


def test_the_command_prints_the_text_and_tells_what_was_left_out(
    manifest: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest.write_text(MANIFEST + "    quantum: 3\n")
    assert main(["pool", "import", str(manifest)]) == 0
    out, err = capsys.readouterr()
    assert set(tomllib.loads(out)["model"]) == {"qwen3-8b", "org/Llama-3.1:8b"}
    assert "quantum has no counterpart" in err


def test_the_command_writes_and_says_what_puts_it_into_effect(
    manifest: Path, conf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pool", "import", str(manifest), "--write", "seed", "--config", str(conf), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["file"] == str(conf.parent / "models.d" / "seed.toml")
    assert main(["pool", "import", str(manifest), "--write", "seed", "--config", str(conf)]) == 1
    assert "is there already" in capsys.readouterr().err
