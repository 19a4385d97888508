"""Hive's directory of models: whole or not at all, nothing replaced unasked, nothing outside touched."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from hive.backends import models_dir
from hive.backends.model_files import File, Format, ModelOnDisk
from hive.backends.models_dir import ModelsDir, name_for
from hive.errors import BadRequest, Cancelled, NotFound, StoreFull, WrongState


class Place(NamedTuple):
    directory: ModelsDir
    source: Path

    def model(self, *names: str, size: int = 1000, format: Format = Format.GGUF) -> ModelOnDisk:
        files = []
        for name in names or ("x.gguf",):
            (self.source / name).write_bytes(name.encode() * (size // len(name)))
            files.append(File(name, self.source / name, (self.source / name).stat().st_size))
        return ModelOnDisk(format, tuple(files))

    def put(self, model: ModelOnDisk, name: str, *, link: bool = False, force: bool = False) -> Path:
        return self.directory.place(model, name, link=link, force=force, progress=lambda _: None)

    @property
    def names(self) -> list[str]:
        """All that lies in it, whatever its name."""
        root = self.directory.root
        return sorted(str(path.relative_to(root)) for path in root.rglob("*")) if root.exists() else []


@pytest.fixture
def place(tmp_path: Path) -> Place:
    (tmp_path / "source").mkdir()
    return Place(ModelsDir(tmp_path / "models"), tmp_path / "source")


def test_a_file_is_copied_and_everybody_may_read_it(place: Place) -> None:
    model = place.model(size=20_000)
    os.chmod(model.files[0].path, 0o600)
    at = place.put(model, "tiny.gguf")
    assert at.read_bytes() == model.files[0].path.read_bytes()
    assert at.stat().st_mode & 0o777 == 0o644
    assert place.names == ["tiny.gguf"]
    assert (place.directory.holds("tiny"), place.directory.holds("tiny.gguf")) == (at, at)


def test_a_directory_is_copied_as_one(place: Place) -> None:
    place.put(place.model("config.json", "a.safetensors", format=Format.HF), "qwen")
    assert place.names == ["qwen", "qwen/a.safetensors", "qwen/config.json"]
    assert (place.directory.root / "qwen").stat().st_mode & 0o777 == 0o755


def test_a_link_is_the_same_file_and_one_nobody_may_read_is_refused(place: Place) -> None:
    model = place.model()
    at = place.put(model, "tiny.gguf", link=True)
    assert at.samefile(model.files[0].path)
    os.chmod(model.files[0].path, 0o600)
    with pytest.raises(BadRequest, match="readable for everybody"):
        place.put(model, "other.gguf", link=True)
    assert place.names == ["tiny.gguf"]


@pytest.mark.parametrize("names", [("x.gguf",), ("config.json", "a.safetensors")])
def test_nothing_is_replaced_unasked(place: Place, names: tuple[str, ...]) -> None:
    old = place.put(place.model(*names, size=500), "m")
    before = {path: path.read_bytes() for path in place.directory.root.rglob("*") if path.is_file()}
    with pytest.raises(WrongState, match="already"):
        place.put(place.model(*names, size=900), "m")
    assert {path: path.read_bytes() for path in place.directory.root.rglob("*") if path.is_file()} == before
    place.put(place.model(*names, size=900), "m", force=True)
    changed = old if old.is_file() else old / names[-1]
    assert changed.read_bytes() != before[changed]
    assert not [name for name in place.names if name.startswith(".")]


def test_a_model_by_the_name_of_another_kind_of_file_is_refused_even_with_force(place: Place) -> None:
    place.put(place.model(), "m.gguf")
    with pytest.raises(WrongState):
        place.put(place.model("config.json", "a.safetensors"), "m", force=True)


def test_what_is_cancelled_or_changes_under_it_leaves_nothing(place: Place) -> None:
    def cancelled(_: int) -> None:
        raise Cancelled

    with pytest.raises(Cancelled):
        place.directory.place(place.model(), "m.gguf", link=False, force=False, progress=cancelled)
    model = place.model()
    with model.files[0].path.open("ab") as more:
        more.write(b"more")
    with pytest.raises(WrongState, match="changed while"):
        place.put(model, "m.gguf")
    assert place.names == []


def test_a_disk_without_room_is_said_before_anything_is_written(place: Place) -> None:
    huge = ModelOnDisk(Format.GGUF, (File("x.gguf", place.source / "x.gguf", 1 << 60),))
    with pytest.raises(StoreFull, match="MiB free"):
        place.put(huge, "x.gguf")
    assert place.names == []


def test_whoever_is_killed_in_the_middle_leaves_nothing_half(place: Place, tmp_path: Path) -> None:
    """Files there are then two directories deep, where llama-server's router does not look."""
    model = place.model("x.gguf", size=1 << 20)
    program = f"""
import sys, time
from pathlib import Path
from hive.backends import models_dir
from hive.backends.model_files import File, Format, ModelOnDisk
models_dir.PIECE_BYTES = 65536
def slow(done):
    print(done, flush=True)
    time.sleep(0.5)
path = Path({str(model.files[0].path)!r})
model = ModelOnDisk(Format.GGUF, (File("x.gguf", path, path.stat().st_size),))
models_dir.ModelsDir(Path({str(place.directory.root)!r})).place(model, "x.gguf", link=False, force=False, progress=slow)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as copying:
        assert copying.stdout is not None
        assert copying.stdout.readline() == b"65536\n"
        copying.send_signal(signal.SIGKILL)
    left = place.names
    assert [name.count("/") for name in left if name.endswith(".gguf")] == [2]
    assert place.directory.holds("x") is None
    place.directory.tidy()
    assert place.names == []


def test_what_was_being_replaced_is_put_back(place: Place) -> None:
    """Killed between the two renames: the old one is beside, nothing is in its place."""
    at = place.put(place.model(), "m.gguf")
    beside = place.directory.root / models_dir.BESIDE / "ab.old"
    beside.mkdir(parents=True)
    at.rename(beside / "m.gguf")
    place.directory.tidy()
    assert place.names == ["m.gguf"]


def test_only_what_lies_in_the_directory_is_removed(place: Place, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("kept")
    place.put(place.model(), "m.gguf")
    place.put(place.model("config.json", "a.safetensors", format=Format.HF), "hf")
    (place.directory.root / "link").symlink_to(outside)
    for name in ("m", "hf", "link"):
        found = place.directory.holds(name)
        assert found is not None
        place.directory.remove(found)
    assert (place.names, (outside / "kept").read_text()) == ([], "kept")
    for name in ("../outside", "..", ".", "", "/etc", "a/b", ".hive", "m"):
        assert place.directory.holds(name) is None
    with pytest.raises(NotFound):
        place.directory.remove(outside)


@pytest.mark.parametrize("wanted", ["../x", "a/b", ".x", "-x", "x y", "x" * 129, "x\0", "x."])
def test_a_name_that_is_none_is_refused(place: Place, wanted: str) -> None:
    with pytest.raises(BadRequest):
        name_for(place.model(), wanted, place.source / "x.gguf")


def test_shards_are_a_directory_named_without_their_numbers(place: Place) -> None:
    names = [f"big-0000{number}-of-00002.gguf" for number in (1, 2)]
    model = place.model(*names)
    name = name_for(model, "", place.source / names[0])
    place.put(model, name)
    assert place.names == ["big", *(f"big/{shard}" for shard in names)]


def test_the_bytes_are_told_as_they_come(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models_dir, "PIECE_BYTES", 300)
    told: list[int] = []
    model = place.model("config.json", "a.safetensors", size=1000)
    place.directory.place(model, "m", link=False, force=False, progress=told.append)
    assert told == sorted(told)
    assert (len(told) > 4, told[-1]) == (True, model.size_bytes)
