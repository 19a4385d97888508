"""Files of parked slots on a real disk: what is given to an engine, and what is not."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from hive.lifecycle.parked_files import BEGINS, NotAsItWas, ParkedFiles, drop_file
from hive.store.parked_slots import ParkedSlot

KEY, CONTENTS, NAME = b"k" * 32, bytes(range(256)) * 9000, f"{BEGINS}1"
ROW = ParkedSlot(
    agent="a",
    group="tenant t",
    server="",
    made_for="this build",
    file="",
    bytes=len(CONTENTS),
    tokens=7,
    tag="",
    at=1.0,
)


@pytest.fixture
def files(tmp_path: Path) -> ParkedFiles:
    made = ParkedFiles(tmp_path / "kept", KEY)
    assert made.prepare([]) == []
    return made


def engine(files: ParkedFiles) -> Path:
    return files.directory / "engine"


def taken(files: ParkedFiles, row: ParkedSlot = ROW, contents: bytes = CONTENTS) -> ParkedSlot:
    (engine(files) / NAME).write_bytes(contents)
    row = files.take_in(NAME, files.placed(row))
    files.drop_engines(NAME)
    return row


def test_the_engine_gets_what_it_wrote(files: ParkedFiles) -> None:
    files.hand_out(taken(files), NAME)
    assert (engine(files) / NAME).read_bytes() == CONTENTS
    assert (engine(files) / NAME).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("other", [{"agent": "b"}, {"group": "tenant u"}, {"made_for": "another"}, {"tokens": 8}])
def test_a_file_in_anothers_place_is_none(files: ParkedFiles, other: dict[str, object]) -> None:
    mine, theirs = taken(files), msgspec.structs.replace(ROW, **other)
    if other != {"tokens": 8}:
        theirs = taken(files, theirs, CONTENTS[::-1])
        os.replace(mine.file, theirs.file)
    else:
        theirs = msgspec.structs.replace(mine, **other)
    with pytest.raises(NotAsItWas):
        files.hand_out(theirs, NAME)
    assert not (engine(files) / NAME).exists()


@pytest.mark.parametrize("at", [0, len(CONTENTS) // 2, len(CONTENTS) - 1])
def test_one_other_byte_is_enough(files: ParkedFiles, at: int) -> None:
    row = taken(files)
    changed = bytearray(CONTENTS)
    changed[at] ^= 1
    Path(row.file).write_bytes(changed)
    with pytest.raises(NotAsItWas):
        files.hand_out(row, NAME)
    assert not (engine(files) / NAME).exists()


@pytest.mark.parametrize("size", [0, 1, len(CONTENTS) - 1, len(CONTENTS) + 1])
def test_another_length_is_enough(files: ParkedFiles, size: int) -> None:
    row = taken(files)
    os.truncate(Path(row.file), size)
    with pytest.raises(NotAsItWas):
        files.hand_out(row, NAME)


def test_a_link_and_a_pipe_are_followed_nowhere(files: ParkedFiles, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(CONTENTS)
    (engine(files) / NAME).symlink_to(secret)
    with pytest.raises(OSError, match="symbolic links"):
        files.take_in(NAME, files.placed(ROW))
    (engine(files) / NAME).unlink()
    os.mkfifo(engine(files) / NAME)
    with pytest.raises(NotAsItWas):
        files.take_in(NAME, files.placed(ROW))
    assert list(files.directory.glob("g-*/*")) == []


def test_a_file_of_another_box_is_none(files: ParkedFiles) -> None:
    row = taken(files)
    with pytest.raises(NotAsItWas):
        ParkedFiles(files.directory, b"o" * 32).hand_out(row, NAME)


def test_a_start_removes_what_no_row_knows_and_tells_what_is_missing(files: ParkedFiles) -> None:
    known = taken(files)
    unknown = taken(files, msgspec.structs.replace(ROW, agent="b"))
    half = Path(unknown.file).with_suffix(".half")
    half.write_bytes(b"half")
    (engine(files) / NAME).write_bytes(b"half")
    missing = msgspec.structs.replace(ROW, agent="c", file="g-1/2.kv")
    assert files.prepare([known, missing]) == ["c"]
    assert list(files.directory.glob("g-*/*")) == [Path(known.file)]
    assert list(engine(files).iterdir()) == []


def test_a_directory_of_somebody_else_is_neither_closed_nor_emptied(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "g-mine").mkdir()
    (tmp_path / "g-mine" / "notes").write_text("not Hive's")
    with pytest.raises(PermissionError):
        ParkedFiles(tmp_path, KEY).prepare([])
    tmp_path.chmod(0o700)
    assert ParkedFiles(tmp_path, KEY).prepare([]) == []
    assert (tmp_path / "g-mine" / "notes").exists()
    drop_file(msgspec.structs.replace(ROW, file=str(tmp_path / "g-mine" / "notes")))
    assert (tmp_path / "g-mine" / "notes").exists()


def test_a_second_save_leaves_the_first_file(files: ParkedFiles) -> None:
    first, second = taken(files), taken(files, contents=CONTENTS[::-1])
    files.hand_out(first, NAME)
    drop_file(first)
    assert not Path(first.file).exists()
    assert Path(second.file).exists()


def test_what_an_engine_wrote_too_late_is_swept_and_what_is_in_use_stays(files: ParkedFiles) -> None:
    for name in ("late", "used"):
        (engine(files) / f"{BEGINS}{name}").write_bytes(b"x")
    files.sweep({f"{BEGINS}used"})
    assert [path.name for path in engine(files).iterdir()] == [f"{BEGINS}used"]


def test_a_directory_that_is_a_link_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "kept").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError):
        ParkedFiles(tmp_path / "kept", KEY).prepare([])
