"""Limits on real processes in real control groups, v2 or v1, whichever this host has."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hive.domain import Limits
from hive.errors import WrongState
from hive.host import process
from hive.host.cgroup import Leaf, Subtree, mount_of_v1
from hive.host.limits import CONTROLLERS, Fence, Fences, in_words, knobs, oom_kills
from hive.host.process import allowed_files, spawn

ENV = {"PATH": os.defpath}
HOG = """
import ctypes
ctypes.CDLL(None).mlockall(3)   # swap, where there is some, must not take it
held = [bytearray(1 << 20) for _ in range(256)]
"""
FORKS = """
import os, sys, time
made = 0
try:
    while made < 200:
        if os.fork() == 0:
            time.sleep(1000)
        made += 1
except OSError as error:
    print(made, error.strerror, flush=True)
time.sleep(1000)
"""
BURN = "import time; print(1, flush=True)\nwhile True: pass"


# --- what is written ---------------------------------------------------------------------------------------------


def test_no_limit_writes_nothing() -> None:
    assert knobs(Limits(), version=1) == knobs(Limits(), version=2) == {}


@given(st.floats(0.01, 4096))
def test_the_kernel_takes_every_quota_a_spec_may_ask_for(cores: float) -> None:
    """Its least is 1,000 µs (sched/core.c, min_cfs_quota_period)."""
    assert int(dict(knobs(Limits(cpu=cores), version=1)["cpu"])["cpu.cfs_quota_us"]) >= 1000
    assert knobs(Limits(cpu=cores), version=2)["cpu"][0][1].endswith(" 100000")


@given(st.integers(4, 1 << 24))
def test_both_versions_bound_memory_alike_and_let_as_much_of_it_swap(memory_mb: int) -> None:
    size = memory_mb << 20
    assert knobs(Limits(memory_mb=memory_mb), version=2)["memory"] == [
        ("memory.max", str(size)),
        ("memory.swap.max", str(size)),
    ]
    assert knobs(Limits(memory_mb=memory_mb), version=1)["memory"] == [
        ("memory.limit_in_bytes", str(size)),
        ("memory.memsw.limit_in_bytes", str(2 * size)),
    ]


@pytest.mark.parametrize(
    ("mounts", "found"),
    [
        ("cgroup2 /sys/fs/cgroup cgroup2 rw 0 0\n", {}),
        ("cgroup /c/memory cgroup rw,memory 0 0\ncgroup /c/pids cgroup rw,pids 0 0\n", {"memory", "pids"}),
        ("cgroup /c/cpu,cpuacct cgroup rw,cpu,cpuacct 0 0\n", {"cpu"}),
        ("cgroup /c/systemd cgroup rw,name=systemd 0 0\ntmpfs /tmp tmpfs rw,memory 0 0\n", {}),
    ],
)
def test_a_v1_hierarchy_is_found_by_its_controllers(mounts: str, found: set[str]) -> None:
    assert {name for name in CONTROLLERS.values() if mount_of_v1(name, mounts) is not None} == set(found)


@pytest.mark.parametrize(
    ("lacking", "says"),
    [
        ([], ""),
        (["pids"], "pids is not enforced"),
        (["memory_mb", "cpu"], "memory_mb and cpu are not enforced"),
        (["memory_mb", "cpu", "pids"], "memory_mb, cpu and pids are not enforced"),
    ],
)
def test_what_is_not_enforced_is_said_by_the_names_an_operator_wrote(lacking: list[str], says: str) -> None:
    assert in_words(lacking).startswith(says)
    assert bool(in_words(lacking)) == bool(lacking)


# --- what it does ------------------------------------------------------------------------------------------------


@pytest.fixture
def fences(tmp_path: Path) -> Iterator[Fences]:
    """Of a subtree of the test's own; skipped where this host enforces nothing for us."""
    subtree = Subtree.find(tmp_path)
    found = Fences(tmp_path, subtree)
    if lacking := found.lacking():
        pytest.skip(lacking)
    yield found
    found.remove()
    if subtree is not None:
        subtree.remove()
        assert not subtree.path.exists()


class Agent:
    """A leaf where there is v2, a fence, and what runs in them."""

    def __init__(self, tmp_path: Path, fences: Fences, limits: Limits, *, name: str = "a1") -> None:
        subtree = Subtree.find(tmp_path)
        self.leaf = None if subtree is None else subtree.leaf(name)
        if self.leaf is not None:
            self.leaf.make()
        self.fence = fences.make(name, limits, self.leaf)
        self.child: subprocess.Popen[bytes] | None = None
        self._limits = limits

    def run(self, program: str, *, stdout_fd: int | None = None) -> subprocess.Popen[bytes]:
        self.child = spawn(
            [sys.executable, "-S", "-c", program],
            env=ENV,
            cgroup_dir=self.leaf.path if self.leaf else None,
            limit_dirs=self.fence.dirs,
            files=self._limits.files,
            stdout_fd=stdout_fd,
        )
        return self.child

    def __enter__(self) -> Agent:
        return self

    def __exit__(self, *_: object) -> None:
        groups = [Leaf(directory) for directory in self.fence.dirs]
        for group in [*groups, *([self.leaf] if self.leaf else [])]:
            group.kill()
        if self.child is not None:
            self.child.wait()
        while any(group.pids() for group in groups):
            time.sleep(0.001)
        self.fence.remove()
        if self.leaf is not None:
            while self.leaf.pids():
                time.sleep(0.001)
            self.leaf.remove()


@pytest.mark.cgroup
def test_who_takes_more_memory_than_it_may_is_killed_and_nobody_else(tmp_path: Path, fences: Fences) -> None:
    with Agent(tmp_path, fences, Limits(memory_mb=64)) as hog, Agent(tmp_path, fences, Limits(), name="b1") as other:
        bystander = other.run("import time; time.sleep(1000)")
        assert hog.fence.oom_kills() == 0
        assert hog.run(HOG).wait() == -signal.SIGKILL
        assert hog.fence.oom_kills() == 1
        assert other.fence.oom_kills() == 0
        assert bystander.poll() is None


@pytest.mark.cgroup
def test_who_stays_below_its_memory_lives(tmp_path: Path, fences: Fences) -> None:
    """The hog of the test above takes 256 MiB: with twice that it comes to its end."""
    with Agent(tmp_path, fences, Limits(memory_mb=512)) as agent:
        assert agent.run(HOG).wait() == 0
        assert agent.fence.oom_kills() == 0


@pytest.mark.cgroup
def test_a_fork_bomb_stops_at_its_limit(tmp_path: Path, fences: Fences) -> None:
    reads, writes = os.pipe()
    with Agent(tmp_path, fences, Limits(pids=12)) as agent, os.fdopen(reads) as said:
        agent.run(FORKS, stdout_fd=writes)
        os.close(writes)
        assert said.readline() == "11 Resource temporarily unavailable\n"


@pytest.mark.cgroup
def test_a_fifth_of_a_core_is_a_fifth_of_a_core(tmp_path: Path, fences: Fences) -> None:
    """Loose on purpose: it must not use more, and on a busy host it may get less. Unlimited it uses five times that."""
    reads, writes = os.pipe()
    with Agent(tmp_path, fences, Limits(cpu=0.2)) as agent, os.fdopen(reads) as said:
        pid = agent.run(BURN, stdout_fd=writes).pid
        os.close(writes)
        said.readline()
        before, began = cpu_s(pid), time.monotonic()
        time.sleep(2)
        share = (cpu_s(pid) - before) / (time.monotonic() - began)
        assert 0.01 < share < 0.3


def cpu_s(pid: int) -> float:
    found = process.read_stat(pid)
    assert found is not None
    return found.cpu_ticks / process.CLOCK_TICKS


def test_an_agent_opens_no_more_files_than_it_may() -> None:
    program = """
import resource
print(*resource.getrlimit(resource.RLIMIT_NOFILE), flush=True)
held = [open("/dev/null") for _ in range(99)]
"""
    reads, writes = os.pipe()
    with spawn([sys.executable, "-S", "-c", program], env=ENV, files=64, stdout_fd=writes) as child:
        os.close(writes)
        with os.fdopen(reads) as said:
            text = said.read()
    assert text.startswith("64 64\n")
    assert "Too many open files" in text
    assert child.returncode == 1


def test_more_files_than_hive_may_have_are_what_hive_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_DESCRIPTORS_AT_START", (100, 200))
    assert [allowed_files(files) for files in (16, 200, 5000)] == [16, 200, 200]
    monkeypatch.setattr(process, "_DESCRIPTORS_AT_START", (100, resource.RLIM_INFINITY))
    assert allowed_files(5000) == 5000


@pytest.mark.cgroup
def test_an_agent_without_limits_is_in_no_group_of_its_own_but_its_leaf(tmp_path: Path, fences: Fences) -> None:
    with Agent(tmp_path, fences, Limits(files=64)) as agent:
        assert agent.fence.dirs == []
        assert agent.fence.lacking == ""


@pytest.mark.cgroup
def test_nothing_is_left_of_a_fence(tmp_path: Path, fences: Fences) -> None:
    limits = Limits(memory_mb=64, cpu=0.5, pids=10)
    with Agent(tmp_path, fences, limits) as agent:
        dirs = agent.fence.dirs
        assert all(directory.is_dir() for directory in dirs)
        found = fences.find("a1", Limits(), agent.leaf)
        assert (set(found.dirs), found.lacking, found.oom_kills()) == (set(dirs), "", 0)
        assert found.memory_mb() == agent.fence.memory_mb() == 64
    fences.remove()
    assert not any(directory.parent.exists() for directory in dirs)


@pytest.mark.cgroup
def test_a_group_with_processes_of_an_earlier_start_is_not_taken_over(tmp_path: Path, fences: Fences) -> None:
    limits = Limits(pids=10)
    with Agent(tmp_path, fences, limits) as agent:
        if not agent.fence.dirs:
            pytest.skip("v2 has one group for all, which the runtime makes")
        pid = agent.run("import time; time.sleep(1000)").pid
        with pytest.raises(WrongState, match=str(pid)):
            fences.make("a1", limits, agent.leaf)


def test_where_no_group_may_be_written_that_is_said_and_the_agent_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hive.host.limits.mount_of_v1", lambda *_: None)
    nowhere = Fences(tmp_path, None)
    fence = nowhere.make("a1", Limits(memory_mb=64, files=20), None)
    assert fence.lacking == "memory_mb is not enforced: no control group of that kind may be written here"
    assert (fence.dirs, fence.oom_kills(), fence.memory_mb()) == ([], 0, None)
    assert nowhere.lacking(Limits(files=20)) == ""
    assert nowhere.lacking().startswith("memory_mb, cpu and pids are")


def test_where_v2_has_the_controllers_the_leaf_itself_is_limited(tmp_path: Path) -> None:
    """As files in a directory: on a hybrid host the real ones have no controllers."""
    subtree, leaf = Subtree(tmp_path / "hive-up"), Leaf(tmp_path / "hive-up" / "a1")
    leaf.path.mkdir(parents=True)
    (subtree.path / "cgroup.subtree_control").write_text("cpu memory pids\n")
    for name in ("memory.max", "memory.swap.max", "cpu.max", "pids.max"):
        (leaf.path / name).touch()
    (leaf.path / "memory.events").write_text("oom_kill 3\n")
    fence = Fences(tmp_path, subtree).make("a1", Limits(memory_mb=64, cpu=0.5, pids=10), leaf)
    assert (fence.dirs, fence.lacking, fence.oom_kills()) == ([], "", 3)
    assert fence.memory_mb() == 64
    assert [(leaf.path / name).read_text() for name in ("memory.max", "memory.swap.max", "cpu.max", "pids.max")] == [
        "67108864",
        "67108864",
        "50000 100000",
        "10",
    ]


def test_the_kernels_count_of_killed_is_read_in_both_forms(tmp_path: Path) -> None:
    assert oom_kills(tmp_path) == 0
    (tmp_path / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")
    assert oom_kills(tmp_path) == 2
    (tmp_path / "memory.events").write_text("low 0\nhigh 0\nmax 9\noom 1\noom_kill 1\noom_group_kill 0\n")
    assert oom_kills(tmp_path) == 1
    assert repr(Fence(lacking="x")) == "<Fence 0 groups, x>"
