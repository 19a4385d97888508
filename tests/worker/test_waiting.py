"""The wait of a prepared supervisor: a real directory, real processes, and whatever ends it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hive.link.slots import mark_of
from hive.worker.waiting import is_awaited, until_granted

LONG_S = 60.0


@pytest.fixture
def grant(tmp_path: Path) -> Path:
    """A grant that is to come: its mark is there."""
    found = tmp_path / "a.json"
    mark_of(found).touch()
    return found


@pytest.fixture
def other() -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """A pidfd of a process, and that process."""
    process = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    fd = os.pidfd_open(process.pid)
    yield fd, process
    os.close(fd)
    process.kill()
    process.communicate()


def meanwhile(act: Callable[[], object]) -> None:
    """Does it while the test waits; a wait that has not begun yet sees it too."""
    threading.Timer(0.1, act).start()


def test_the_grant_ends_the_wait(grant: Path) -> None:
    def write() -> None:
        new = grant.with_name("new")
        new.write_text("{}")
        new.rename(grant)

    meanwhile(write)
    assert until_granted(grant, mark_of(grant), with_them=[], limit_s=LONG_S)


def test_a_grant_that_is_there_is_taken_at_once(grant: Path) -> None:
    grant.touch()
    assert not is_awaited(grant, mark_of(grant))
    assert until_granted(grant, mark_of(grant), with_them=[], limit_s=LONG_S)


def test_without_its_mark_it_waits_no_more(grant: Path) -> None:
    assert is_awaited(grant, mark_of(grant))
    meanwhile(mark_of(grant).unlink)
    assert not until_granted(grant, mark_of(grant), with_them=[], limit_s=LONG_S)
    assert not is_awaited(grant, mark_of(grant))


def test_other_files_of_the_directory_are_none_of_its_business(grant: Path) -> None:
    meanwhile(grant.with_name("b.json").touch)
    assert not until_granted(grant, mark_of(grant), with_them=[], limit_s=0.5)


def test_it_ends_by_itself(grant: Path) -> None:
    assert not until_granted(grant, mark_of(grant), with_them=[], limit_s=0.05)


def test_a_mark_that_is_touched_lets_it_wait_on(grant: Path) -> None:
    limit_s = 1.5

    def touch_then_grant() -> None:
        os.utime(mark_of(grant))
        threading.Timer(limit_s, grant.touch).start()

    meanwhile(touch_then_grant)  # the grant comes after the limit that held at first
    assert until_granted(grant, mark_of(grant), with_them=[], limit_s=limit_s)


def test_it_ends_with_those_it_waits_with(grant: Path, other: tuple[int, subprocess.Popen[bytes]]) -> None:
    fd, process = other
    meanwhile(process.kill)
    assert not until_granted(grant, mark_of(grant), with_them=[fd], limit_s=LONG_S)
