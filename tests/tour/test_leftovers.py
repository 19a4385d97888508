"""The directory of a tour: whose it is, and what is taken for one that was left."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from hive.errors import StoreFull
from hive.tour import leftovers


def test_a_directory_belongs_to_the_tour_that_holds_its_lock(tmp_path: Path) -> None:
    made = leftovers.make(tmp_path, os.getuid())
    assert list(leftovers.left(tmp_path, os.getuid())) == []
    made.close()
    (found,) = leftovers.left(tmp_path, os.getuid())
    assert found.path == made.path
    assert list(leftovers.left(tmp_path, os.getuid())) == []
    found.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_link_a_file_and_another_users_directory_are_none(tmp_path: Path) -> None:
    uid = os.getuid()
    precious = tmp_path / "precious"
    precious.mkdir()
    (tmp_path / f"hive-demo-{uid}-link").symlink_to(precious)
    (tmp_path / f"hive-demo-{uid}-file").write_text("")
    (tmp_path / f"hive-demo-{uid + 1}-other").mkdir()
    (tmp_path / f"hive-demo-{uid}-theirs").mkdir()
    if uid == 0:
        os.chown(tmp_path / f"hive-demo-{uid}-theirs", 12345, 12345)
        assert list(leftovers.left(tmp_path, uid)) == []
    assert not any(each.path.is_symlink() for each in leftovers.left(tmp_path, uid))


def test_agents_of_other_users_may_pass_a_directory_of_root_and_no_other(tmp_path: Path) -> None:
    made = leftovers.make(tmp_path, os.getuid())
    assert made.path.stat().st_mode & 0o777 == (0o711 if os.getuid() == 0 else 0o700)
    made.remove()


def test_where_nothing_can_be_made_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(StoreFull, match="cannot make a directory"):
        leftovers.make(tmp_path / "nowhere", os.getuid())


def test_root_takes_a_place_that_every_user_may_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shut = tmp_path / "shut"
    shut.mkdir(mode=0o700)
    monkeypatch.setattr(tempfile, "tempdir", str(shut))
    assert leftovers.place(0) in leftovers.OTHER_PLACES
    assert leftovers.place(1000) == shut
