"""`hive run-model`: which model a slot is, found ones too, and what it refuses."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hive.errors import BadRequest, DependencyDown, NotFound
from hive.host.process import children_of, read_stat
from hive.link.slots import mark_of
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


@pytest.fixture
def awaited(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """`hive run-model` that waits for its grant: it has a warden, and its model's file is missing."""
    conf = tmp_path / "hive.conf"
    conf.write_text(f"[inference]\nllama_program = {sys.executable}\n[model a]\nfile = {tmp_path}/none.gguf\n")
    mark_of(tmp_path / "grant.json").touch()
    words = [slot_id("a"), "--grant", "grant.json", "--socket", "a.sock", "--state-dir", "state", "--config", str(conf)]
    run = [sys.executable, "-P", "-m", "hive", "run-model", *words]
    with subprocess.Popen(run, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        until_warden = time.monotonic() + 60
        while not children_of(process.pid):
            assert time.monotonic() < until_warden
            assert process.poll() is None
            time.sleep(0.01)
        yield process
        process.kill()


def test_what_is_described_while_it_waits_is_what_it_starts(awaited: subprocess.Popen[str], tmp_path: Path) -> None:
    conf = tmp_path / "hive.conf"
    conf.write_text(conf.read_text().replace("none.gguf", "other.gguf"))
    (tmp_path / "new").write_text('{"accounts": {"cpu": 100}}')
    (tmp_path / "new").rename(tmp_path / "grant.json")
    _, said = awaited.communicate(timeout=60)
    assert awaited.returncode == 5, said
    assert f"{tmp_path}/other.gguf" in said


def test_a_model_that_is_described_no_more_while_it_waits_is_not_started(
    awaited: subprocess.Popen[str], tmp_path: Path
) -> None:
    (tmp_path / "hive.conf").write_text("")
    (tmp_path / "grant.json").write_text('{"accounts": {"cpu": 100}}')
    _, said = awaited.communicate(timeout=60)
    assert awaited.returncode == 3, said
    assert slot_id("a") in said


def test_without_its_mark_it_ends_well(awaited: subprocess.Popen[str], tmp_path: Path) -> None:
    warden = children_of(awaited.pid)
    mark_of(tmp_path / "grant.json").unlink()
    _, said = awaited.communicate(timeout=60)
    assert (awaited.returncode, said) == (0, "")
    until_gone = time.monotonic() + 60
    while any((found := read_stat(pid)) is not None and found.alive for pid in warden):
        assert time.monotonic() < until_gone
        time.sleep(0.01)
