"""Figures of the kernel on a container, in either version of control groups; files stand in for the one a host lacks.

The real thing is in test_docker.py: there Docker's own groups are read, on whatever the host has.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hive.host.cgroup import mount_of_v1
from hive.runtimes.container_group import ContainerGroup, container_of, find_container, is_first, paths_of

ID = "0c6161cba51ca96072fe1696f0a78247a61664376b50141297a102115aec2dbf"
HYBRID = f"6:freezer:/docker/{ID}\n2:cpu,cpuacct:/docker/{ID}\n1:name=systemd:/docker/{ID}\n0::/docker/{ID}\n"
SYSTEMD = f"0::/system.slice/docker-{ID}.scope\n"
MOUNTS = """\
tmpfs /sys/fs/cgroup tmpfs rw,mode=755 0 0
cgroup /sys/fs/cgroup/cpu,cpuacct cgroup rw,cpu,cpuacct 0 0
cgroup /sys/fs/cgroup/freezer cgroup rw,relatime,freezer 0 0
cgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0
"""


@pytest.fixture
def unified(tmp_path: Path) -> Path:
    (tmp_path / "cgroup.freeze").write_text("1")
    (tmp_path / "cgroup.events").write_text("populated 1\nfrozen 1\n")
    (tmp_path / "cpu.stat").write_text("usage_usec 1234\nuser_usec 1000\nsystem_usec 234\n")
    (tmp_path / "cgroup.procs").write_text(f"{os.getpid()}\n")
    return tmp_path


@pytest.fixture
def freezer(tmp_path: Path) -> Path:
    (tmp_path / "freezer.state").write_text("FROZEN")
    (tmp_path / "cpuacct.usage").write_text("5000000\n")
    (tmp_path / "cgroup.procs").write_text(f"{os.getpid()}\n")
    return tmp_path


@pytest.mark.parametrize("text", [HYBRID, SYSTEMD, f"0::/machine.slice/libpod-{ID}.scope/container\n"])
def test_the_id_of_a_container_is_found_wherever_its_engine_puts_it(text: str) -> None:
    assert container_of(text) == ID


@pytest.mark.parametrize("text", ["", "0::/\n", "0::/user.slice/a\n", f"0::/docker/{ID}0\n", f"0::/docker/{ID[:63]}\n"])
def test_what_is_in_no_container_has_no_id(text: str) -> None:
    assert container_of(text) == ""


def test_each_controller_has_its_path_and_its_mount() -> None:
    assert paths_of(HYBRID)["freezer"] == f"/docker/{ID}"
    assert paths_of(SYSTEMD) == {"": f"/system.slice/docker-{ID}.scope"}
    assert mount_of_v1("freezer", MOUNTS) == Path("/sys/fs/cgroup/freezer")
    assert mount_of_v1("cpuacct", MOUNTS) == Path("/sys/fs/cgroup/cpu,cpuacct")
    assert mount_of_v1("memory", MOUNTS) is None


def test_only_the_first_process_of_a_pid_namespace_of_its_own_is_the_main_one() -> None:
    assert is_first("Name:\tx\nNSpid:\t4711\t1\n")
    assert not is_first("Name:\tx\nNSpid:\t1\n")
    assert not is_first("Name:\tx\nNSpid:\t4712\t2\n")
    assert not is_first("")
    assert find_container(os.getpid()) == ""


def test_a_host_with_v2_only(unified: Path) -> None:
    group = ContainerGroup(unified=unified, freezer=None, cpuacct=None)
    assert group.is_frozen()
    usage = group.usage()
    assert (usage.cpu_us, usage.processes) == (1234, 1)
    assert usage.rss_bytes > 0
    group.thaw()
    assert (unified / "cgroup.freeze").read_text() == "0"
    (unified / "cgroup.events").write_text("populated 1\nfrozen 0\n")
    assert not group.is_frozen()
    group.freeze()
    assert (unified / "cgroup.freeze").read_text() == "1"


def test_a_host_with_v1_only(freezer: Path) -> None:
    group = ContainerGroup(unified=None, freezer=freezer, cpuacct=freezer)
    assert group.is_frozen()
    assert (group.usage().cpu_us, group.pids()) == (5000, [os.getpid()])
    group.thaw()
    assert (freezer / "freezer.state").read_text() == "THAWED"
    assert not group.is_frozen()
    (freezer / "freezer.state").write_text("FREEZING\n")
    assert not group.is_frozen()


def test_kills_for_memory_are_counted_where_the_host_counts_memory(
    unified: Path, freezer: Path, tmp_path: Path
) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    (memory / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")
    assert ContainerGroup(unified=unified, freezer=freezer, cpuacct=freezer, memory=memory).oom_kills() == 2
    (unified / "memory.events").write_text("low 0\nmax 7\noom 1\noom_kill 1\n")
    assert ContainerGroup(unified=unified, freezer=None, cpuacct=None).oom_kills() == 1
    assert ContainerGroup(unified=None, freezer=freezer, cpuacct=freezer).oom_kills() == 0


def test_a_group_that_is_gone_holds_nothing_and_needs_no_thaw(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    group = ContainerGroup(unified=gone, freezer=gone, cpuacct=gone)
    group.thaw()
    assert not group.is_frozen()
    assert group.usage() == (0, 0, 0, 0)
    assert ContainerGroup.of(os.getpid(), ID) is None
