"""Files that are there whole or not at all. What a kill leaves is tested where they are used (install, files)."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from hive.errors import NotPermitted, StoreFull, WrongState
from hive.host.files import (
    beside,
    create_whole,
    give_tree,
    link_whole,
    remove,
    remove_tree_below_mounts,
    translated,
    write_whole,
)


def test_a_file_is_replaced_with_its_mode_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "a.conf"
    path.write_text("old")
    beside(path).write_text("what a killed write left")
    write_whole(path, b"new", mode=0o640)
    assert (path.read_bytes(), stat.S_IMODE(path.stat().st_mode)) == (b"new", 0o640)
    assert os.listdir(tmp_path) == ["a.conf"]


def test_a_link_in_the_place_of_the_file_is_replaced_and_not_followed(tmp_path: Path) -> None:
    victim, path = tmp_path / "victim", tmp_path / "a"
    victim.write_text("kept")
    path.symlink_to(victim)
    beside(path).symlink_to(victim)
    write_whole(path, b"new", mode=0o644)
    assert (victim.read_text(), path.is_symlink(), path.read_bytes()) == ("kept", False, b"new")


def test_what_is_there_is_not_created_again(tmp_path: Path) -> None:
    path = tmp_path / "a"
    assert create_whole(path, b"first", mode=0o600)
    assert not create_whole(path, b"second", mode=0o600)
    assert path.read_bytes() == b"first"
    assert os.listdir(tmp_path) == ["a"]


def test_a_link_is_replaced_at_once(tmp_path: Path) -> None:
    link_whole(tmp_path / "current", "versions/1")
    link_whole(tmp_path / "current", "versions/2")
    assert os.readlink(tmp_path / "current") == "versions/2"
    assert os.listdir(tmp_path) == ["current"]


def test_removing_takes_what_was_left_beside_as_well_and_may_be_repeated(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("")
    beside(path).write_text("")
    remove(path)
    remove(path)
    assert os.listdir(tmp_path) == []


def test_a_disk_that_is_full_is_said_and_the_old_file_stays(small_disk: Path) -> None:
    path = small_disk / "a"
    path.write_text("old")
    with pytest.raises(StoreFull):
        write_whole(path, bytes(2 << 20), mode=0o644)
    assert path.read_text() == "old"
    beside(path).unlink()


def test_a_directory_in_the_way_is_said(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(WrongState, match="cannot change"):
        write_whole(tmp_path / "a", b"", mode=0o644)


@pytest.mark.root
def test_who_may_not_write_there_is_told(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.setuid(65534)
            write_whole(tmp_path / "a", b"", mode=0o644)
        except NotPermitted:
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0


@pytest.mark.root
def test_a_tree_is_given_without_its_links_and_second_names(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    outside, tree = tmp_path / "outside", tmp_path / "tree"
    (tree / "deep").mkdir(parents=True)
    outside.write_text("")
    for name in ("own", "deep/own", "others"):
        (tree / name).write_text("")
    (tree / "link").symlink_to(outside)
    (tree / "second").hardlink_to(outside)
    os.chown(tree / "others", 4321, 4321)
    give_tree(tree, (1234, 1234), only=lambda found: found.st_uid == 0)
    owners = {path.relative_to(tree).as_posix(): path.lstat().st_uid for path in tree.rglob("*")}
    assert owners == {"own": 1234, "deep": 1234, "deep/own": 1234, "others": 4321, "link": 1234, "second": 0}
    assert (outside.stat().st_uid, tree.stat().st_uid) == (0, 0)


def test_who_may_not_change_a_file_is_not_told_of_the_one_beside_it(tmp_path: Path) -> None:
    """`hive config set` of a user said `cannot change /etc/hive/.hive.conf.hive-new`."""
    path = tmp_path / "hive.conf"
    with pytest.raises(NotPermitted, match=rf"^cannot change {path}: no$"), translated(path):
        raise PermissionError(13, "no", str(beside(path)))


def test_a_look_that_is_refused_is_not_called_a_change(tmp_path: Path) -> None:
    """`hive secrets list` of a user who may not look said `cannot change /etc/hive/secrets`."""
    with pytest.raises(NotPermitted, match=r"^cannot look into /etc/x: no$"), translated(tmp_path, act="look into"):
        raise PermissionError(13, "no", "/etc/x")


EMPTIES = """
import sys
from pathlib import Path
from hive.host.files import remove_tree_below_mounts
print([str(one) for one in remove_tree_below_mounts(Path(sys.argv[1]))])
"""


@pytest.mark.root
def test_a_mount_point_is_emptied_and_stays_and_all_else_goes(tmp_path: Path) -> None:
    top = tmp_path / "slots"
    (top / "inner" / "disk").mkdir(parents=True)
    (top / "other").mkdir()
    (top / "other" / "file").write_text("x")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").write_text("x")
    (top / "link").symlink_to(tmp_path / "outside")
    script = 'mount -t tmpfs none "$1/inner/disk"; mkdir "$1/inner/disk/kept"; shift; "$@"; ls -A "$4/inner/disk"'
    inside = ["unshare", "--mount", "sh", "-ec", script, "sh", str(top)]
    ran = subprocess.run(
        [*inside, sys.executable, "-c", EMPTIES, str(top)], capture_output=True, text=True, check=False
    )
    assert ran.stdout.splitlines() == [str([f"{top}/inner/disk"])], ran.stderr
    assert [str(path.relative_to(top)) for path in sorted(top.rglob("*"))] == ["inner", "inner/disk"]
    assert (tmp_path / "outside" / "file").exists()
    assert remove_tree_below_mounts(tmp_path / "outside") == []
    assert not (tmp_path / "outside").exists()
