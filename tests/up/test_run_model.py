"""`hive run-model`: which model a slot is, found ones too, and what it refuses."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from hive.backends.backend import open_backend
from hive.errors import BadRequest, DependencyDown, NotFound
from hive.sandbox.model_slots import described
from hive.settings.file import load
from hive.settings.pool import slot_id
from hive.settings.table import Paths
from hive.up.run_model import entry_of, read_grant
from tests.control.box import until
from tests.pooling.sleep_world import SERVER, model_directory


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


@pytest.mark.parametrize(
    ("account", "host_ram_mb", "told"), [("GPU-1", 4096, ""), ("GPU-1", 0, None), ("cpu", 4096, None)]
)
async def test_a_server_is_started_with_sleep_where_it_may_sleep(
    short_path: Path, tmp_path: Path, account: str, host_ram_mb: int, told: str | None
) -> None:
    """`told`: empty for one that can sleep and is awake, None for one that cannot."""
    conf, socket = tmp_path / "hive.conf", short_path / "m.sock"
    model = model_directory(tmp_path / "m", 1)
    conf.write_text(
        f"[inference]\nvllm_program = {SERVER}\n[pool]\nhost_ram_mb = {host_ram_mb}\n"
        f"[model m]\nbackend = vllm\nfile = {model}\n"
    )
    (tmp_path / "grant").write_text(f'{{"accounts": {{"{account}": 900}}, "context": 0}}')
    words = [slot_id("m"), "--grant", str(tmp_path / "grant"), "--socket", str(socket), "--config", str(conf)]
    run = [sys.executable, "-P", "-m", "hive", "run-model", *words, "--state-dir", str(tmp_path / "state")]
    supervisor = await asyncio.create_subprocess_exec(*run, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        await until(socket.exists)
        assert await open_backend("vllm", str(socket)).asleep() == told
    finally:
        supervisor.terminate()
        assert await supervisor.wait() == 0
