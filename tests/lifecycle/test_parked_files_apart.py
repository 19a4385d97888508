"""Files of parked slots where servers are another user: what that user may read, and when.

What a real one may do is seen in tests/install/test_parking_box.py.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from hive.backends.slot_place import why_closed
from hive.lifecycle import parked_files
from hive.lifecycle.parked_files import BEGINS, NotAsItWas, ParkedFiles
from tests.descriptors import open_descriptors
from tests.lifecycle.test_parked_files import CONTENTS, KEY, NAME, ROW


@pytest.fixture
def files(tmp_path: Path) -> ParkedFiles:
    """In the directories that systemd-tmpfiles makes."""
    for name, mode in (("kept", 0o700), ("engine", 0o1730)):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(mode)
    made = ParkedFiles(tmp_path, KEY, is_apart=True)
    assert made.prepare([]) == []
    return made


def test_the_servers_group_reads_what_was_checked_and_writes_none_of_it(files: ParkedFiles) -> None:
    (files.engine / NAME).write_bytes(CONTENTS)
    row = files.take_in(NAME, files.placed(ROW))
    assert Path(row.file).is_relative_to(files.directory)
    assert Path(row.file).stat().st_mode & 0o777 == 0o600
    files.drop_engines(NAME)
    files.hand_out(row, NAME)
    shown = (files.engine / NAME).stat()
    assert (files.engine / NAME).read_bytes() == CONTENTS
    assert (stat.S_IMODE(shown.st_mode), shown.st_uid, shown.st_gid) == (
        0o640,
        os.geteuid(),
        files.engine.stat().st_gid,
    )


def test_what_was_not_checked_is_at_no_moment_the_servers_to_read(
    files: ParkedFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    (files.engine / NAME).write_bytes(CONTENTS)
    row = files.take_in(NAME, files.placed(ROW))
    files.drop_engines(NAME)
    changed = bytearray(CONTENTS)
    changed[-1] ^= 1
    Path(row.file).write_bytes(changed)
    given = list[int]()
    monkeypatch.setattr(os, "fchmod", lambda fd, mode: given.append(mode))
    with pytest.raises(NotAsItWas):
        files.hand_out(row, NAME)
    assert given == []
    assert list(files.engine.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "mode"), [("kept", 0o750), ("engine", 0o0730), ("engine", 0o1770), ("engine", 0o1777)]
)
def test_a_directory_with_another_mode_is_not_used(files: ParkedFiles, tmp_path: Path, name: str, mode: int) -> None:
    (tmp_path / name).chmod(mode)
    with pytest.raises(PermissionError, match=name):
        files.prepare([])


def test_a_directory_that_is_not_there_or_a_link_is_not_made(files: ParkedFiles, tmp_path: Path) -> None:
    files.engine.rename(tmp_path / "elsewhere")
    with pytest.raises(PermissionError, match="systemd-tmpfiles"):
        files.prepare([])
    files.engine.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError, match="engine"):
        files.prepare([])
    assert "not a directory of the daemon's" in why_closed(files.engine)


def test_everything_that_servers_left_is_swept_but_what_is_in_use(files: ParkedFiles, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("not Hive's")
    for name in ("of-nobody", f"{BEGINS}late", f"{BEGINS}used"):
        (files.engine / name).write_text("x")
    (files.engine / "link").symlink_to(secret)
    (files.engine / "folder").mkdir()
    os.mkfifo(files.engine / "fifo")
    files.sweep({f"{BEGINS}used"})
    assert [path.name for path in files.engine.iterdir()] == [f"{BEGINS}used"]
    assert secret.exists()


def odd_entries(files: ParkedFiles) -> None:
    """A directory that does not go, and links that no stat follows, before and behind a file."""
    (files.engine / "folder" / "inner").mkdir(parents=True)
    for name in ("a", "z"):
        (files.engine / name).symlink_to("/tmp/" + "n" * 300)
    (files.engine / "loop").symlink_to("loop")
    (files.engine / f"{BEGINS}late").write_text("x")


@pytest.mark.parametrize("work", ["sweep", "prepare", "clear"])
def test_no_entry_that_a_server_made_stops_a_sweep_and_one_that_stays_is_named_once(
    files: ParkedFiles, caplog: pytest.LogCaptureFixture, work: str
) -> None:
    odd_entries(files)
    run = {"sweep": lambda: files.sweep(()), "prepare": lambda: files.prepare([]), "clear": files.clear}[work]
    run()
    run()
    assert [path.name for path in files.engine.iterdir()] == ["folder"]
    told = [record.getMessage() for record in caplog.records if record.msg.startswith("parked_entries_left")]
    assert len(told) == 1
    assert "folder: Directory not empty" in told[0]


def test_a_start_sweeps_so_many_and_the_next_sweep_the_others(
    files: ParkedFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parked_files, "SWEPT_AT_START", 3)
    for number in range(5):
        (files.engine / str(number)).write_text("x")
    files.prepare([])
    assert len(list(files.engine.iterdir())) == 2
    files.sweep(())
    assert list(files.engine.iterdir()) == []


@pytest.mark.parametrize("made", ["directory", "full directory", "fifo", "second name", "another's", "link"])
def test_what_is_not_a_servers_own_file_is_not_taken_in_and_costs_no_descriptor(
    files: ParkedFiles, tmp_path: Path, made: str
) -> None:
    told = files.engine / NAME
    if "directory" in made:
        told.mkdir()
        (told / "x").mkdir() if made == "full directory" else None
    elif made == "fifo":
        os.mkfifo(told)
    elif made == "link":
        (tmp_path / "file").write_bytes(CONTENTS)
        told.symlink_to(tmp_path / "file")
    else:
        told.write_bytes(CONTENTS)
        if made == "second name":
            os.link(told, tmp_path / "second")
    taking = ParkedFiles(tmp_path, KEY, is_apart=True, servers=os.geteuid() + 1) if made == "another's" else files
    row, before = files.placed(ROW), open_descriptors()
    with pytest.raises((NotAsItWas, OSError)):
        taking.take_in(NAME, row)
    assert open_descriptors() == before
    assert list(files.directory.glob("*/*")) == []
    taking.drop_engines(NAME)
    assert told.exists() is (made == "full directory")


def test_where_nothing_is_kept_any_more_nothing_is_left_and_a_missing_place_is_no_fault(
    files: ParkedFiles, tmp_path: Path
) -> None:
    (files.engine / NAME).write_bytes(CONTENTS)
    files.take_in(NAME, files.placed(ROW))
    files.clear()
    assert [*files.engine.iterdir(), *files.directory.glob("*/*")] == []
    ParkedFiles(tmp_path / "none", KEY, is_apart=True).clear()


def test_a_server_does_not_start_with_a_place_of_its_own_user_or_none(files: ParkedFiles, tmp_path: Path) -> None:
    assert "not a directory of the daemon's" in why_closed(files.engine)
    assert "No such file" in why_closed(tmp_path / "none")
