"""`hive run-model`: which model a slot is, found ones too, and what it refuses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hive.errors import BadRequest, DependencyDown, NotFound
from hive.sandbox.model_slots import described
from hive.settings.file import load
from hive.settings.pool import slot_id
from hive.settings.table import Paths
from hive.up.run_model import entry_of, read_grant


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A hive.conf whose pool has what lies in the state directory's `models`: a GGUF file and a directory."""
    (tmp_path / "state" / "models" / "big").mkdir(parents=True)
    (tmp_path / "state" / "models" / "tiny.gguf").write_bytes(b"GGUF")
    file = tmp_path / "hive.conf"
    file.write_text("[pool]\nfound = true\n")
    return file


def test_helper_and_supervisor_find_the_same_files(config: Path, tmp_path: Path) -> None:
    paths = Paths(tmp_path / "state", tmp_path / "run")
    known = described(paths, config)
    settings = load(config, env={}).settings
    for name, kind in (("tiny", "llama"), ("big", "vllm")):
        assert slot_id(name) in known
        assert entry_of(slot_id(name), settings, paths.state).kind == kind
    with pytest.raises(NotFound):
        entry_of(slot_id("other"), settings, paths.state)


def test_without_the_setting_no_file_is_a_model(config: Path, tmp_path: Path) -> None:
    config.write_text("")
    assert slot_id("tiny") not in described(Paths(tmp_path / "state", tmp_path / "run"), config)


def test_the_setting_goes_before_the_place_that_is_told(config: Path, tmp_path: Path) -> None:
    config.write_text(f"[pool]\nfound = true\n[inference]\nmodels_dir = {tmp_path}/state/models\n")
    entry = entry_of(slot_id("tiny"), load(config, env={}).settings, tmp_path)
    assert entry.path == tmp_path / "state" / "models" / "tiny.gguf"


def test_what_is_no_grant_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DependencyDown):
        read_grant(tmp_path / "none")
    (tmp_path / "grant").write_text('{"accounts": 1}')
    with pytest.raises(BadRequest):
        read_grant(tmp_path / "grant")


def test_a_missing_file_ends_it_with_5_and_says_where_to_put_it(tmp_path: Path) -> None:
    conf = tmp_path / "hive.conf"
    conf.write_text(f"[inference]\nllama_program = {sys.executable}\n[model a]\nfile = {tmp_path}/none.gguf\n")
    (tmp_path / "grant").write_text('{"accounts": {"cpu": 100}, "context": 0}')
    words = [slot_id("a"), "--grant", "grant", "--socket", "a.sock", "--state-dir", "state", "--config", str(conf)]
    run = [sys.executable, "-P", "-m", "hive", "run-model", *words]
    said = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert said.returncode == 5, said.stderr
    assert f"{tmp_path}/none.gguf" in said.stderr
    assert "put it there, or change [model a]" in said.stderr
