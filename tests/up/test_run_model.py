"""`hive run-model`: which model a slot is, found ones too, and what it refuses."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hive.adapters.directory import AdapterDirectory
from hive.backends import slot_place
from hive.backends.backend import open_backend
from hive.backends.concurrency import named_slots
from hive.backends.slot_place import with_slot_place
from hive.errors import BadRequest, DependencyDown, NotFound, SignatureMismatch
from hive.host.process import children_of, read_stat
from hive.link.slots import mark_of
from hive.settings.file import load
from hive.settings.pool import slot_id
from hive.settings.table import InferenceSection, Paths, Settings
from hive.slots.model_slots import described
from hive.up import run_backend
from hive.up.run_model import entry_of, read_grant
from tests.adapters.installed import install_weights
from tests.pooling.sleep_world import SERVER, model_directory
from tests.waiting import until


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


def test_an_adapter_whose_files_were_changed_since_it_was_installed_has_no_server(config: Path, tmp_path: Path) -> None:
    directory = AdapterDirectory(tmp_path / "state" / "adapters")
    record = install_weights(directory, "red", "tiny")
    settings = load(config, env={}).settings
    slot = slot_id(record.engine_name)
    assert entry_of(slot, settings, tmp_path / "state").name == record.engine_name
    directory.path(record).chmod(0o644)
    directory.path(record).write_bytes(b"two")
    with pytest.raises(SignatureMismatch):
        entry_of(slot, settings, tmp_path / "state")


def test_without_the_setting_no_file_is_a_model(config: Path, tmp_path: Path) -> None:
    config.write_text("")
    assert slot_id("tiny") not in described(Paths(tmp_path / "state", tmp_path / "run"), config)


def test_the_setting_goes_before_the_place_that_is_told(config: Path, tmp_path: Path) -> None:
    config.write_text(f"[pool]\nfound = true\n[inference]\nmodels_dir = {tmp_path}/state/models\n")
    entry = entry_of(slot_id("tiny"), load(config, env={}).settings, tmp_path)
    assert entry.path == tmp_path / "state" / "models" / "tiny.gguf"


def test_without_the_directory_for_slots_a_server_starts_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "a-file").touch()
    for wanted, is_there in ((tmp_path / "new", True), (tmp_path / "a-file", False), (Path("/proc/none"), False)):
        settings = Settings(inference=InferenceSection(llama_slot_dir=str(wanted)))
        read, why = with_slot_place(settings, is_apart=False, is_server=True)
        assert (read.inference.llama_slot_dir, why == "") == (str(wanted) if is_there else "", is_there)
        assert named_slots("llama", 4, read) == (4 if is_there else 0)
    assert (tmp_path / "new" / "engine").stat().st_mode & 0o777 == 0o700


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


def waits(pid: int) -> bool:
    """Whether it has looked for its grant, and waits for it: with its warden, as a descriptor."""
    files = Path(f"/proc/{pid}/fd")
    return any("pidfd" in os.readlink(file) for file in files.iterdir() if file.is_symlink())


def test_without_its_mark_it_ends_well(awaited: subprocess.Popen[str], tmp_path: Path) -> None:
    warden = children_of(awaited.pid)
    until_it_waits = time.monotonic() + 60
    while not waits(awaited.pid):
        assert time.monotonic() < until_it_waits
        time.sleep(0.01)
    mark_of(tmp_path / "grant.json").unlink()
    _, said = awaited.communicate(timeout=60)
    assert (awaited.returncode, said) == (0, "")
    until_gone = time.monotonic() + 60
    while any((found := read_stat(pid)) is not None and found.alive for pid in warden):
        assert time.monotonic() < until_gone
        time.sleep(0.01)


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


@pytest.mark.parametrize("made", ["nothing", "by this user"])
def test_a_server_of_an_installed_hive_starts_without_slots_where_their_place_is_not_the_daemons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: str
) -> None:
    monkeypatch.setattr(slot_place, "APART", tmp_path)
    if made == "by this user":
        (tmp_path / "engine").mkdir()
    settings = Settings(inference=InferenceSection(llama_slot_dir=str(tmp_path)))
    read, why = with_slot_place(settings, is_apart=True, is_server=True)
    assert (read.inference.llama_slot_dir, "engine" in why) == ("", True)
    assert list(tmp_path.glob("kept")) == [], "it makes none"


def test_a_service_keeps_slots_only_as_a_part_of_an_installed_hive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot_place, "APART", tmp_path)
    monkeypatch.setattr(slot_place, "why_closed", lambda engine: "" if engine == tmp_path / "engine" else "another")
    settings = Settings(inference=InferenceSection(llama_slot_dir=str(tmp_path)))
    for kind, is_installed, is_kept in (("llama", True, True), ("llama", False, False), ("vllm", True, False)):
        read = run_backend.with_slots(kind, settings, is_installed=is_installed)
        assert bool(read.inference.llama_slot_dir) is is_kept, (kind, is_installed)
