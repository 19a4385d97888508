"""An agent's files: whatever the agent put into its home, Hive follows no link and opens no pipe."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hive.errors import NotFound, NotPermitted
from hive.runtimes.home import make_home, remove_tree, trim_log
from hive.runtimes.log_process import open_log


def test_a_new_home_is_private_and_an_old_one_made_private_again(tmp_path: Path) -> None:
    home = tmp_path / "home"
    assert make_home(home, uid=None, gid=None, files={}) is True
    home.chmod(0o777)
    assert make_home(home, uid=None, gid=None, files={}) is False
    assert stat.S_IMODE(home.stat().st_mode) == 0o700


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_home_of_somebody_else_is_refused(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    os.chown(home, 71999, 71999)
    with pytest.raises(NotPermitted, match="71999"):
        make_home(home, uid=71000, gid=71000, files={})


@pytest.mark.parametrize("trap", ["link", "dangling link", "pipe", "directory link"])
def test_a_copied_file_replaces_what_the_agent_put_in_its_place(tmp_path: Path, trap: str) -> None:
    source, victim, home = tmp_path / "agent.py", tmp_path / "victim", tmp_path / "home"
    source.write_text("program")
    victim.write_text("precious")
    make_home(home, uid=None, gid=None, files={})
    place = home / "agent.py"
    if trap == "pipe":
        os.mkfifo(place)
    else:
        place.symlink_to({"link": victim, "dangling link": tmp_path / "new", "directory link": tmp_path}[trap])
    make_home(home, uid=None, gid=None, files={str(source): "agent.py"})
    assert place.read_text() == "program"
    assert not place.is_symlink()
    assert victim.read_text() == "precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["agent.py", "home", "victim"]


def test_a_copied_program_stays_executable(tmp_path: Path) -> None:
    source = tmp_path / "run.sh"
    source.write_text("#!/bin/sh\n")
    source.chmod(0o755)
    make_home(tmp_path / "home", uid=None, gid=None, files={str(source): "run.sh"})
    assert stat.S_IMODE((tmp_path / "home" / "run.sh").stat().st_mode) == 0o700


def test_removing_a_home_follows_no_link(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("precious")
    home = tmp_path / "home"
    (home / "a" / "b").mkdir(parents=True)
    (home / "to-directory").symlink_to(outside)
    (home / "a" / "b" / "up").symlink_to(outside)
    (home / "a" / "to-file").symlink_to(outside / "file")
    os.mkfifo(home / "a" / "pipe")
    remove_tree(home)
    assert not home.exists()
    assert (outside / "file").read_text() == "precious"


def test_removing_what_is_itself_a_link_is_refused(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "home").symlink_to(outside)
    with pytest.raises(NotPermitted):
        remove_tree(tmp_path / "home")
    assert outside.exists()
    remove_tree(tmp_path / "missing")


def test_a_home_too_deep_for_recursion_and_for_path_names_is_removed(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    below = os.open(home, os.O_DIRECTORY)
    for _ in range(3000):
        os.mkdir("d" * 50, dir_fd=below)
        deeper = os.open("d" * 50, os.O_DIRECTORY, dir_fd=below)
        os.close(below)
        below = deeper
    os.close(below)
    remove_tree(home)
    assert not home.exists()


def test_a_home_closed_to_everyone_is_removed(tmp_path: Path) -> None:
    (tmp_path / "home" / "shut" / "inner").mkdir(parents=True)
    (tmp_path / "home" / "shut" / "inner").chmod(0)
    (tmp_path / "home" / "shut").chmod(0)
    (tmp_path / "home").chmod(0o500)
    remove_tree(tmp_path / "home")
    assert not (tmp_path / "home").exists()


def test_a_log_is_not_opened_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "log").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        open_log(tmp_path / "log")


@given(lines=st.lists(st.integers(0, 300), max_size=60), limit=st.integers(64, 2048))
def test_a_trimmed_log_is_the_end_of_the_whole_one_from_a_line_start(
    tmp_path_factory: pytest.TempPathFactory, lines: list[int], limit: int
) -> None:
    log = tmp_path_factory.mktemp("log") / "a.log"
    whole = b"".join(b"%d:" % number + b"x" * length + b"\n" for number, length in enumerate(lines))
    log.write_bytes(whole)
    trim_log(log, limit)
    kept = log.read_bytes()
    assert whole.endswith(kept)
    if len(whole) <= limit:
        assert kept == whole
    else:
        assert len(kept) <= limit // 2
        assert whole[: len(whole) - len(kept)].endswith(b"\n")


def test_what_is_appended_after_a_cut_follows_the_kept_part(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    writer = open_log(log, more=os.O_APPEND)
    os.write(writer, b"old\n" * 1000)
    trim_log(log, 400)
    os.write(writer, b"new\n")
    os.close(writer)
    assert log.read_bytes() == b"old\n" * 49 + b"new\n"
    assert stat.S_IMODE(log.stat().st_mode) == 0o600


@pytest.mark.timeout(20)
def test_a_source_that_is_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(NotFound, match="is no file"):
        make_home(tmp_path / "home", uid=None, gid=None, files={str(tmp_path / "pipe"): "agent.py"})
    assert not (tmp_path / "home").exists()
