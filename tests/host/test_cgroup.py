"""Control groups of a writable v2 hierarchy, with real processes in them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hive.errors import WrongState
from hive.host import cgroup
from hive.host.cgroup import Leaf, Subtree
from hive.host.process import ProcessTable, identify, spawn, write_control

pytestmark = pytest.mark.cgroup
ENV = {"PATH": os.defpath}
DOUBLE_FORK = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        print(os.getpid(), flush=True)
        time.sleep(1000)
    os._exit(0)
os.wait()
"""


def wait_until(predicate: Callable[[], object]) -> None:
    """The limit only keeps a failing test from hanging."""
    limit = time.monotonic() + 20
    while not predicate():
        assert time.monotonic() < limit, "it did not happen"
        time.sleep(0.001)


@pytest.fixture
def subtree(tmp_path: Path) -> Iterator[Subtree]:
    found = Subtree.find(tmp_path)
    if found is None:
        pytest.skip("no writable cgroup v2 here")
    yield found
    for leaf in found.leaves():
        leaf.kill()
        leaf.thaw()
        wait_until(lambda leaf=leaf: not leaf.pids())  # type: ignore[misc]
        leaf.remove()
    found.remove()
    assert not found.path.exists()


@pytest.fixture
def leaf(subtree: Subtree) -> Leaf:
    made = subtree.leaf("a1")
    made.make()
    return made


def burn_in(leaf: Leaf) -> subprocess.Popen[bytes]:
    return spawn([sys.executable, "-S", "-c", "while True: pass"], env=ENV, cgroup_dir=leaf.path)


def test_the_subtree_is_named_after_the_state_directory_and_never_the_own_cgroup(
    subtree: Subtree, tmp_path: Path
) -> None:
    again = Subtree.find(tmp_path)
    assert again is not None
    assert again.path == subtree.path
    own = cgroup.own_cgroup(Path("/proc/self/cgroup").read_text())
    mount = cgroup.find_mount(Path("/proc/self/mounts").read_text())
    assert mount is not None
    assert subtree.path != mount / own.lstrip("/")
    assert subtree.leaves() == []


def test_a_frozen_leaf_uses_no_cpu_until_it_is_thawed(leaf: Leaf) -> None:
    with burn_in(leaf) as child:
        leaf.freeze()
        wait_until(leaf.is_frozen)
        assert leaf.was_asked_to_freeze()
        time.sleep(0.02)
        before, _, processes, _ = leaf.usage(ProcessTable())
        time.sleep(0.1)
        assert leaf.usage(ProcessTable())[0] == before
        assert processes == 1
        leaf.thaw()
        wait_until(leaf.is_thawed)
        wait_until(lambda: leaf.usage(ProcessTable())[0] > before)
        child.kill()


def test_a_process_that_left_its_session_and_parent_is_still_in_the_leaf(leaf: Leaf) -> None:
    reads, writes = os.pipe()
    with spawn([sys.executable, "-S", "-c", DOUBLE_FORK], env=ENV, stdout_fd=writes, cgroup_dir=leaf.path) as child:
        child.wait()
    os.close(writes)
    with os.fdopen(reads) as out:
        stray = int(out.readline())
    assert leaf.pids() == [stray]
    leaf.freeze()
    wait_until(leaf.is_frozen)
    leaf.kill()
    wait_until(lambda: leaf.pids() == [])


def test_a_signal_reaches_every_process_of_the_leaf_and_no_other(leaf: Leaf) -> None:
    outside = spawn(["sleep", "1000"], env=ENV)
    inside = [spawn(["sleep", "1000"], env=ENV, cgroup_dir=leaf.path) for _ in range(3)]
    leaf.signal(signal.SIGTERM)
    assert [child.wait() for child in inside] == [-signal.SIGTERM] * 3
    assert outside.poll() is None
    outside.kill()
    outside.wait()


def test_without_cgroup_kill_the_processes_are_killed_one_by_one(leaf: Leaf, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before Linux 5.14 the file is not there."""
    write = write_control

    def old_kernel(path: Path, data: bytes) -> None:
        if path.name == "cgroup.kill":
            raise FileNotFoundError(path)
        write(path, data)

    monkeypatch.setattr(cgroup, "write_control", old_kernel)
    with burn_in(leaf) as child:
        leaf.kill()
        assert child.wait() == -signal.SIGKILL


def test_a_leaf_with_processes_is_neither_made_anew_nor_removed(leaf: Leaf) -> None:
    with burn_in(leaf) as child:
        with pytest.raises(WrongState, match=str(child.pid)):
            leaf.make()
        leaf.remove()
        assert leaf.pids() == [child.pid]
        child.kill()
    leaf.make()
    assert leaf.usage(ProcessTable())[0] == 0


def test_groups_an_agent_made_below_its_leaf_belong_to_it(leaf: Leaf) -> None:
    inner = Leaf(leaf.path / "inner")
    inner.make()
    with burn_in(inner) as child:
        assert leaf.pids() == [child.pid]
        leaf.freeze()
        wait_until(leaf.is_frozen)
        leaf.kill()
        assert child.wait() == -signal.SIGKILL
    leaf.remove()
    assert not leaf.path.exists()


def test_a_leaf_that_is_gone_answers_quietly(subtree: Subtree) -> None:
    gone = subtree.leaf("gone")
    gone.freeze()
    gone.thaw()
    gone.kill()
    gone.remove()
    assert (gone.pids(), gone.is_frozen(), gone.usage(ProcessTable())) == ([], False, (0, 0, 0, 0))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_a_user_who_may_not_write_cgroups_has_no_subtree(tmp_path: Path) -> None:
    program = "from pathlib import Path; from hive.host.cgroup import Subtree; print(Subtree.find(Path('/tmp/x')))"
    child_env = {"PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])}
    python = os.path.realpath("/usr/bin/python3")
    said = subprocess.run(
        [python, "-c", program], env=child_env, user=65534, group=65534, extra_groups=[], capture_output=True, text=True
    )
    if "Permission" not in said.stderr and "ImportError" in said.stderr:
        pytest.skip("the system's python is of another version than the tests'")
    assert said.stdout == "None\n", said.stderr


def test_an_own_process_is_identified_in_its_leaf(leaf: Leaf) -> None:
    with burn_in(leaf) as child:
        who = identify(child.pid)
        assert who is not None
        assert [who.pid] == leaf.pids()
        who.send(signal.SIGKILL)
