"""A process that was moved in place of the one that was meant, whose pid it had been given, is given back."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from hive.holders.hold import is_in, move, turn_out
from hive.host.cgroup import Leaf, Subtree
from hive.host.process import Identity, identify

pytestmark = pytest.mark.cgroup


@pytest.fixture
def leaf(tmp_path: Path) -> Iterator[Leaf]:
    if (subtree := Subtree.find(tmp_path)) is None:
        pytest.skip("no writable cgroup v2 here")
    leaf = subtree.leaf("lease.l-1")
    leaf.make()
    yield leaf
    leaf.remove()
    subtree.remove()


def test_it_goes_back_to_the_group_of_its_parent(leaf: Leaf) -> None:
    with subprocess.Popen(["sleep", "1000"]) as stranger:
        try:
            move(leaf.path, stranger.pid)
            found = identify(stranger.pid)
            assert found is not None
            turn_out(leaf.path, found)
            assert is_in(leaf.path, found), "it is the one that was meant"
            meant = Identity(found.pid, found.start_ticks - 1, found.boot)
            assert not is_in(leaf.path, meant)
            turn_out(leaf.path, meant)
            assert leaf.pids() == []
            own = Path("/proc/self/cgroup").read_text().splitlines()
            assert Path(f"/proc/{stranger.pid}/cgroup").read_text().splitlines()[-1] == own[-1]
        finally:
            stranger.kill()


def test_another_process_than_that_stays_where_it_is(leaf: Leaf) -> None:
    own = identify(os.getpid())
    assert own is not None
    before = Path("/proc/self/cgroup").read_text()
    turn_out(leaf.path, Identity(own.pid, own.start_ticks - 1, own.boot))
    assert Path("/proc/self/cgroup").read_text() == before
