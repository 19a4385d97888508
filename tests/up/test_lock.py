"""One `hive up` per state directory; real processes hold the real lock."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from hive.errors import HiveError, NotPermitted, WrongState
from hive.host.process import spawn
from hive.up import lock

HOLD = "import sys, time; time.sleep(float(sys.argv[1]))"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "up.lock"


def test_a_second_one_says_which_pid_holds_the_directory(path: Path) -> None:
    """The first is a process of its own: `flock` is per open file, and ours would not be refused to ourselves."""
    program = "import sys, time; from pathlib import Path; from hive.up import lock\n"
    program += "lock.take(Path(sys.argv[1]), say=print); print('taken', flush=True); time.sleep(60)"
    reading, writing = os.pipe()
    first = spawn([sys.executable, "-c", program, str(path)], env=os.environ, stdout_fd=writing)
    os.close(writing)
    try:
        with os.fdopen(reading, "rb") as said:
            # a whole line: with PYTHONUNBUFFERED the text and its end are written one after the other
            assert said.readline() == b"taken\n"
        with pytest.raises(WrongState, match=rf"hive up \(pid {first.pid}\) already runs on {path.parent}"):
            lock.take(path, say=lambda _: None)
    finally:
        first.kill()
        first.wait()


def test_a_free_lock_is_taken_and_names_us(path: Path) -> None:
    descriptor = lock.take(path, say=lambda _: None)
    assert path.read_text() == f"{os.getpid()}\n"
    os.close(descriptor)


def test_the_lock_outlives_its_taker_in_a_child_and_the_next_one_waits(path: Path) -> None:
    descriptor = lock.take(path, say=lambda _: None)
    child = spawn([sys.executable, "-c", HOLD, "0.5"], env=os.environ, keep_fds=[descriptor])
    path.write_text("4194305\n")  # the taker was killed: no such pid
    os.close(descriptor)
    said: list[str] = []
    again = lock.take(path, say=said.append)
    assert child.poll() is not None
    assert said == [f"waiting for the processes of a killed hive up to leave pids={child.pid}"]
    os.close(again)


def test_processes_that_never_leave_are_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "LEAVING_S", 0.1)
    descriptor = lock.take(path, say=lambda _: None)
    child = spawn([sys.executable, "-c", HOLD, "60"], env=os.environ, keep_fds=[descriptor])
    path.write_text("4194305\n")
    os.close(descriptor)
    try:
        with pytest.raises(WrongState, match=f"pid {child.pid}"):
            lock.take(path, say=lambda _: None)
    finally:
        child.kill()
        child.wait()


def test_a_pid_that_somebody_else_has_now_is_not_taken_for_a_hive_up(path: Path) -> None:
    """Pids are used again: a process that does not have the file open does not hold it."""
    descriptor = lock.take(path, say=lambda _: None)
    child = spawn([sys.executable, "-c", HOLD, "0.3"], env=os.environ, keep_fds=[descriptor])
    stranger = spawn([sys.executable, "-c", HOLD, "60"], env=os.environ)
    path.write_text(f"{stranger.pid}\n")
    os.close(descriptor)
    again = lock.take(path, say=lambda _: None)
    os.close(again)
    child.wait()
    stranger.kill()
    stranger.wait()


def test_a_link_in_the_place_of_the_lock_is_refused(path: Path, tmp_path: Path) -> None:
    (tmp_path / "target").write_text("precious")
    path.symlink_to(tmp_path / "target")
    with pytest.raises(HiveError, match="is a link"):
        lock.take(path, say=lambda _: None)
    assert (tmp_path / "target").read_text() == "precious"


@pytest.mark.skipif(os.getuid() == 0, reason="root may open anything")
def test_a_directory_that_may_not_be_written_is_a_clear_error(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(NotPermitted, match="cannot open"):
            lock.take(tmp_path / "up.lock", say=lambda _: None)
    finally:
        tmp_path.chmod(0o700)
