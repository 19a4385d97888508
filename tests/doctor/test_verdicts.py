"""Verdicts of `hive doctor` on facts: tables, nothing real."""

from __future__ import annotations

import errno
import sqlite3
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hive.conditions import DISK_LEAST_BYTES, Where, condition
from hive.doctor.checks import backends, docker, files, host, leftovers, memory, running, sandboxes, stores, units
from hive.doctor.checks.check import CheckVerdict, Status
from hive.doctor.checks.target import Subject, TargetKind
from hive.doctor.doctor import CHECKS
from hive.domain import BackendInfo, BackendKind
from hive.host.gpu import GpuHardware
from hive.host.memory import MemInfo, Swap, ZramDevice
from hive.host.nvml import GpuState, SeenGpus
from hive.settings.table import Paths

PASS, WARN, FAIL, SKIP = Status.PASS, Status.WARN, Status.FAIL, Status.SKIP
GIB = 1024**3
UP = Paths(Path("/s"), Path("/r"))


def says(verdict: CheckVerdict, status: Status, *words: str) -> bool:
    """Asserts rather than answers, so that a failure shows the whole verdict."""
    assert verdict.status is status, verdict
    assert all(word in verdict.reason for word in words), verdict
    return True


# --- the table ---------------------------------------------------------------------------------------------------


def test_every_check_has_a_name_in_a_group_and_a_sentence() -> None:
    names = [check.name for check in CHECKS]
    assert len(set(names)) == len(names)
    for check in CHECKS:
        group, _, name = check.name.partition(".")
        assert group.isalpha()
        assert name.isalpha()
        assert check.sentence.endswith(".")


def test_the_checks_of_a_group_stand_together() -> None:
    groups = [group for group, _ in groupby(CHECKS, key=lambda check: check.group)]
    assert len(set(groups)) == len(groups)


# --- host --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "is_booted", "is_needed", "status"),
    [
        (252, True, True, PASS),
        (257, True, False, PASS),
        (249, True, True, FAIL),
        (249, True, False, WARN),
        (None, True, True, WARN),
        (252, False, True, FAIL),
        (252, False, False, SKIP),
        (None, False, False, SKIP),
    ],
)
def test_systemd(version: int | None, is_booted: bool, is_needed: bool, status: Status) -> None:
    verdict = host.judge_systemd(version, "tini", is_booted=is_booted, is_needed=is_needed)
    assert says(verdict, status)
    assert ("tini" in verdict.reason) is not is_booted


CG, ALL = Path("/cg"), host.LIMITED


@pytest.mark.parametrize(
    ("groups", "is_appliance", "status", "word"),
    [
        (host.Groups(CG, True, ALL, (), CG), False, PASS, "freezer"),
        (host.Groups(CG, True, ALL, (), None), True, PASS, "freezer"),
        (host.Groups(CG, True, ALL, (), None), False, WARN, "no group may be made"),
        (host.Groups(None), True, FAIL, "not mounted"),
        (host.Groups(None), False, WARN, "not mounted"),
        (host.Groups(CG, False, ALL, (), CG), True, FAIL, "no freezer"),
        (host.Groups(CG, True, (), ALL, CG), False, PASS, "in v1"),
        (host.Groups(CG, True, (), ALL, CG), True, WARN, "in v1"),
        (host.Groups(CG, True, ("memory",), (), CG), False, WARN, "without cpu, pids"),
    ],
)
def test_control_groups(groups: host.Groups, is_appliance: bool, status: Status, word: str) -> None:
    assert says(host.judge_cgroup(groups, is_appliance=is_appliance, user_systemd=False), status, word)


@pytest.mark.parametrize(
    ("hard", "status"),
    [(-1, PASS), (65536, PASS), (8192, PASS), (8191, WARN), (1024, WARN), (1023, FAIL), (None, SKIP)],
)
def test_descriptors(hard: int | None, status: Status) -> None:
    assert says(host.judge_descriptors(hard, whose="it", is_appliance=False), status)


def test_a_file_from_the_future_says_by_how_much() -> None:
    path = Path("/var/lib/hive/daemon/hive.db")
    assert says(host.judge_boot(7260.0, path, booted_at=0.0, now=60.0), WARN, str(path), "2.0 h")
    assert says(host.judge_boot(100.0, path, booted_at=0.0, now=60.0), PASS)


@pytest.mark.parametrize(("is_synchronised", "status"), [(True, PASS), (False, WARN)])
def test_the_clock(is_synchronised: bool, status: Status) -> None:
    assert says(host.judge_clock(is_synchronised=is_synchronised, has_systemd=True), status)


def test_where_there_is_no_systemd_no_cure_takes_one() -> None:
    """In a container doctor said `systemd-run …` and `apt-get install chrony`, where neither can help."""
    assert host.judge_clock(is_synchronised=False, has_systemd=False).fix == ""
    groups = host.Groups(Path("/c"), has_freezer=True, controllers=host.LIMITED)
    assert host.judge_cgroup(groups, is_appliance=False, user_systemd=False).fix == ""
    assert "systemd-run --user" in host.judge_cgroup(groups, is_appliance=False, user_systemd=True).fix


# --- memory ------------------------------------------------------------------------------------------------------

RAM = MemInfo(8 * GIB, 4 * GIB, None, None)
ZRAM = Swap("/dev/zram0", "partition", 16 * GIB, 0, 100)
LZ4 = ZramDevice("/dev/zram0", "lz4", 16 * GIB, 0, 0)


@pytest.mark.parametrize(
    ("swaps", "status", "word"),
    [
        (None, SKIP, "does not say"),
        ([], WARN, "none"),
        ([ZRAM], PASS, "lz4"),
        ([ZRAM._replace(used_bytes=15 * GIB)], WARN, "nearly full"),
        ([ZRAM._replace(size_bytes=4 * GIB)], WARN, "16.0 GiB would"),
        ([Swap("/swap", "file", 16 * GIB, 0, -2)], PASS, "on a disk that keeps"),
    ],
)
def test_swap(swaps: list[Swap] | None, status: Status, word: str) -> None:
    assert says(memory.judge_swap(RAM, swaps, [LZ4]), status, word)


@pytest.mark.parametrize(
    ("run", "sharing", "is_appliance", "status"),
    [
        ("0", 0, True, PASS),
        ("2", 9, True, PASS),
        ("", 0, True, PASS),
        ("1", 0, True, FAIL),
        ("1", 0, False, WARN),
        ("0", 7, True, WARN),
    ],
)
def test_merged_pages(run: str, sharing: int, is_appliance: bool, status: Status) -> None:
    assert says(memory.judge_ksm(run, sharing, is_appliance=is_appliance), status)


# --- sandboxes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "api", "has_vmm", "is_root", "status"),
    [
        (0, 12, False, True, PASS),
        (0, 13, True, True, WARN),
        (errno.ENOENT, None, True, True, FAIL),
        (errno.ENOENT, None, False, True, SKIP),
        (errno.EACCES, None, True, False, SKIP),
        (errno.EACCES, None, True, True, FAIL),
    ],
)
def test_kvm(number: int, api: int | None, has_vmm: bool, is_root: bool, status: Status) -> None:
    assert says(sandboxes.judge_kvm(number, api, has_vmm=has_vmm, is_root=is_root), status)


def test_root_is_told_to_load_the_module_without_sudo() -> None:
    skipped = sandboxes.judge_kvm(errno.ENOENT, None, has_vmm=False, is_root=True)
    assert Where(sudo="").typed(skipped.fix) == "modprobe kvm_intel || modprobe kvm_amd"


@pytest.mark.parametrize(
    ("is_wanted", "has_vsock", "has_vhost", "status"),
    [(False, False, False, SKIP), (True, False, False, FAIL), (True, True, False, WARN), (True, True, True, PASS)],
)
def test_vsock(is_wanted: bool, has_vsock: bool, has_vhost: bool, status: Status) -> None:
    assert says(sandboxes.judge_vsock(is_wanted=is_wanted, has_vsock=has_vsock, has_vhost=has_vhost), status)


def program(said: str, *, is_there: bool = True, is_roots: bool = True) -> sandboxes.HostProgram:
    return sandboxes.HostProgram("/usr/local/bin/p", is_there, is_roots, said)


@pytest.mark.parametrize(
    ("version", "status", "word"),
    [
        ("1.9.2", FAIL, "1.14.0 or newer"),
        ("1.13.1", FAIL, "1.14.0 or newer"),
        ("1.14.0", PASS, "1.14.0"),
        ("1.15.1", PASS, "1.15.1"),
        ("1.16.0", FAIL, "stay awake"),
        ("1.16.1", FAIL, "PR 6100"),
        ("1.16.2", PASS, "1.16.2"),
        ("1.17.0", PASS, "1.17.0"),
    ],
)
def test_the_version_matrix(version: str, status: Status, word: str) -> None:
    verdict = sandboxes.judge_firecracker(program(f"Firecracker v{version}"), program(f"Jailer v{version}"))
    assert says(verdict, status, word)


@pytest.mark.parametrize(
    ("vmm", "jailer", "status", "word"),
    [
        (program("", is_there=False), program(""), SKIP, "not installed"),
        (program("Firecracker v1.15.1", is_roots=False), None, FAIL, "replaced by others"),
        (program("Firecracker v1.15.1"), program("x", is_roots=False), FAIL, "replaced by others"),
        (program("what?"), None, WARN, "does not say"),
        (program("Firecracker v1.15.1"), None, WARN, "without a jailer"),
        (program("Firecracker v1.15.1"), program("", is_there=False), FAIL, "no jailer"),
        (program("Firecracker v1.15.1"), program("Jailer v1.14.0"), WARN, "another jailer"),
    ],
)
def test_firecracker(
    vmm: sandboxes.HostProgram, jailer: sandboxes.HostProgram | None, status: Status, word: str
) -> None:
    assert says(sandboxes.judge_firecracker(vmm, jailer), status, word)


INFO = {"ServerVersion": "20.10", "CgroupDriver": "systemd", "CgroupVersion": "2", "LiveRestoreEnabled": True}
ENGINE = docker.SocketFacts(Path("/d.sock"), 0o660, "docker", 1, "dockerd (pid 7)", INFO)


@pytest.mark.parametrize(
    ("facts", "status", "word"),
    [
        (ENGINE, PASS, "20.10 by dockerd (pid 7)"),
        (ENGINE._replace(members=3), PASS, "3 members of group docker"),
        (ENGINE._replace(mode=None), SKIP, "no engine"),
        (ENGINE._replace(mode=0o666), FAIL, "become root"),
        (ENGINE._replace(info={}, error="it hung up"), FAIL, "it hung up"),
        (ENGINE._replace(info={}, error="may not", may_not=True), SKIP, "group docker"),
        (ENGINE._replace(info={**INFO, "CgroupDriver": "none"}), WARN, "cannot be paused"),
        (ENGINE._replace(info={**INFO, "LiveRestoreEnabled": False}), WARN, "ends every agent"),
    ],
)
def test_docker(facts: docker.SocketFacts, status: Status, word: str) -> None:
    assert says(docker.judge_docker(facts, is_root=False), status, word)


GHOST = leftovers.Leftover("ghost", "unit hive-agent@ghost.service", "systemctl stop hive-agent@ghost.service")


@pytest.mark.parametrize(
    ("found", "known", "status"),
    [
        ([], None, PASS),
        ([GHOST], None, WARN),
        ([GHOST], frozenset({"ghost"}), PASS),
        ([GHOST], frozenset({"alice"}), WARN),
    ],
)
def test_leftovers(found: list[leftovers.Leftover], known: frozenset[str] | None, status: Status) -> None:
    verdict = leftovers.judge_leftovers(found, known)
    assert says(verdict, status)
    assert (verdict.fix == GHOST.remedy) == (status is WARN and known is not None)


# --- stores ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "runs", "is_appliance", "status"),
    [
        ("+PONG", True, False, PASS),
        ("-NOAUTH Authentication required.", True, True, PASS),
        ("-LOADING Redis is loading", True, True, FAIL),
        ("!No such file or directory", False, False, SKIP),
        ("!No such file or directory", True, False, FAIL),
        ("!Connection refused", False, True, FAIL),
        ("!timed out", True, True, FAIL),
    ],
)
def test_redis(said: str, runs: bool, is_appliance: bool, status: Status) -> None:
    assert says(stores.judge_redis(said, "/r.sock", runs=runs, is_appliance=is_appliance), status)


NO = "-NOPERM"


@pytest.mark.parametrize(
    ("stranger", "viewer", "status", "word"),
    [
        (("-NOAUTH", "-NOAUTH"), ("+OK", "$-1", NO, NO), PASS, "not write"),
        (("$-1", NO), ("+OK", "$-1", NO, NO), PASS, "not write"),
        (("$-1", ":0"), ("+OK", "$-1", NO, NO), FAIL, "default user is on"),
        (("-NOAUTH", "-NOAUTH"), ("+OK", "$-1", ":0", NO), FAIL, "viewer may write"),
        (("-NOAUTH", "-NOAUTH"), ("+OK", "$-1", NO, "*2"), FAIL, "CONFIG"),
        (("-NOAUTH", "-NOAUTH"), ("-WRONGPASS", "-NOAUTH", "-NOAUTH", "-NOAUTH"), WARN, "no viewer"),
        (("-NOAUTH", "-NOAUTH"), ("+OK", NO, NO, NO), WARN, "may not read"),
    ],
)
def test_the_acl(stranger: Any, viewer: Any, status: Status, word: str) -> None:
    assert says(stores.judge_acl(stores.Acl(stranger, viewer)), status, word)


def test_a_password_in_the_acl_file_is_found_and_not_shown() -> None:
    verdict = stores.judge_acl_file("user default off\nuser proxy on >sesame ~* +@all\n", "/users.acl")
    assert verdict is not None
    assert says(verdict, FAIL, "proxy")
    assert "sesame" not in verdict.reason
    assert stores.judge_acl_file("user proxy on #aa ~* +@all\n", "/users.acl") is None


def sqlite_error(message: str, code: int) -> sqlite3.Error:
    error = sqlite3.DatabaseError(message)
    error.sqlite_errorcode = code
    return error


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (sqlite_error("interrupted", sqlite3.SQLITE_INTERRUPT), SKIP),
        (sqlite_error("file is not a database", sqlite3.SQLITE_NOTADB), FAIL),
        (sqlite_error("unable to open database file", sqlite3.SQLITE_CANTOPEN), WARN),
    ],
)
def test_what_sqlite_raises(error: sqlite3.Error, status: Status) -> None:
    assert says(stores.judge_unreadable(error, Path("/h.db"), 1), status, "/h.db")


def test_a_database_of_a_newer_hive_is_told_from_a_damaged_one() -> None:
    assert says(stores.judge_sqlite("ok", 999, Path("/h.db"), 1), FAIL, "newer")
    assert says(
        stores.judge_sqlite("row 1 missing\nfrom index", 1, Path("/h.db"), 1), FAIL, "damaged: row 1 missing from"
    )


def disk(free: int, inodes: int | None = 10**6, what: str = "state") -> stores.Disk:
    return stores.Disk(what, Path("/s"), free, 100 * GIB, inodes)


@pytest.mark.parametrize(
    ("disks", "status"),
    [
        ([], SKIP),
        ([disk(50 * GIB)], PASS),
        ([disk(50 * GIB, None)], PASS),
        ([disk(GIB - 1)], WARN),
        ([disk(DISK_LEAST_BYTES - 1)], FAIL),
        ([disk(50 * GIB, 10)], FAIL),
        ([disk(50 * GIB), disk(2 * 1024**2, what="runtime")], PASS),
        ([disk(50 * GIB), disk(1000, what="runtime")], FAIL),
    ],
)
def test_disks(disks: list[stores.Disk], status: Status) -> None:
    assert says(stores.judge_disks(disks), status)


# --- backends ----------------------------------------------------------------------------------------------------

NODES = ("nvidia-uvm", "nvidia0", "nvidiactl")
H200 = GpuHardware(1, "570.86.15", ("NVIDIA H200",), NODES, (), True)


@pytest.mark.parametrize(
    ("gpus", "status", "word"),
    [
        (H200, PASS, "NVIDIA H200"),
        (GpuHardware(0, "", (), (), (), False), SKIP, "no NVIDIA driver"),
        (GpuHardware(2, "", (), (), (), False), WARN, "no driver is loaded"),
        (H200._replace(nodes=()), FAIL, "no device files"),
        (H200._replace(nodes=("nvidia0", "nvidiactl")), WARN, "nvidia-uvm"),
        (H200._replace(refused=("nvidia0",)), WARN, "/dev/nvidia0"),
        (H200._replace(has_nvml=False), WARN, "libnvidia-ml"),
    ],
)
def test_gpus(gpus: GpuHardware, status: Status, word: str) -> None:
    assert says(backends.judge_gpu(gpus, SeenGpus((GpuState(0),))), status, word)


@pytest.mark.parametrize(
    ("seen", "status", "word"),
    [
        (SeenGpus((GpuState(0, total_bytes=140 * GIB, used_bytes=2 * GIB), GpuState(1))), PASS, "2 of 140 GiB in use"),
        (SeenGpus((GpuState(0), GpuState(1, fault="GPU is lost"))), WARN, "GPU 1 does not tell all: GPU is lost"),
        (SeenGpus(why_not="Driver/library version mismatch"), WARN, "version mismatch"),
    ],
)
def test_what_a_gpu_tells(seen: SeenGpus, status: Status, word: str) -> None:
    assert says(backends.judge_gpu(H200, seen), status, word)


OLLAMA = BackendInfo(kind=BackendKind.OLLAMA, address="a:1", label="Ollama at a:1", version="0.9")


@pytest.mark.parametrize(
    ("found", "addresses", "is_needed", "status"),
    [
        (OLLAMA, ["a:1"], False, PASS),
        (BackendInfo(kind=BackendKind.DEMO, address="/d"), ["/d"], False, WARN),
        (None, ["a:1", "b:2"], False, WARN),
        (None, ["a:1", "b:2"], True, FAIL),
        (None, ["a:1"], False, FAIL),
    ],
)
def test_backend(found: BackendInfo | None, addresses: list[str], is_needed: bool, status: Status) -> None:
    assert says(backends.judge_backend(found, addresses, is_needed=is_needed), status)


@pytest.mark.parametrize(
    ("ways", "isolation", "status"),
    [
        ([], "full", SKIP),
        ([backends.BackendPath("/i/v.sock", 0o660, 0o750)], "full", PASS),
        ([backends.BackendPath("/i/v.sock", 0o666, 0o750)], "full", PASS),
        ([backends.BackendPath("/i/v.sock", 0o666, 0o755)], "full", FAIL),
        (
            [backends.BackendPath("/i/v.sock", 0o660, 0o750), backends.BackendPath("/i/w.sock", 0o777, 0o711)],
            "uid",
            FAIL,
        ),
        ([backends.BackendPath("/i/v.sock", 0o600, 0o700)], "none", WARN),
        ([backends.BackendPath("127.0.0.1:11434")], "uid", WARN),
    ],
)
def test_ways_to_the_backend(ways: list[backends.BackendPath], isolation: str, status: Status) -> None:
    assert says(backends.judge_ways(ways, isolation=isolation), status)


SERVE = backends.RunningProgram(7, 1, ("/usr/local/bin/ollama", "serve"))
RUNNER = backends.RunningProgram(8, 7, ("/usr/local/bin/ollama", "runner", "--port", "1"), 1 << 30)
LLAMA = ("/usr/local/lib/ollama/llama-server", "--model", "/m/blobs/sha256-ab", "--port", "2")
OWN_LLAMA = backends.RunningProgram(9, 1, ("/opt/llama-server", "-m", "/srv/tiny.gguf"), 1 << 30)


@pytest.mark.parametrize(
    ("programs", "status", "fix"),
    [
        ([], SKIP, ""),
        ([OWN_LLAMA], SKIP, ""),
        ([SERVE, OWN_LLAMA], PASS, ""),
        ([SERVE, RUNNER, backends.RunningProgram(9, 7, LLAMA)], PASS, ""),
        ([RUNNER._replace(parent=1)], WARN, "kill 8"),
        ([SERVE, RUNNER._replace(parent=1), backends.RunningProgram(9, 1, LLAMA)], WARN, "kill 8 9"),
        ([SERVE, RUNNER, backends.RunningProgram(9, 8, LLAMA)], WARN, "kill 9"),
    ],
)
def test_what_an_ollama_left_behind(programs: list[backends.RunningProgram], status: Status, fix: str) -> None:
    verdict = backends.judge_runners(programs)
    assert (verdict.status, verdict.fix) == (status, fix)


# --- Hive itself -------------------------------------------------------------------------------------------------

ENDED = condition("not_running", why="")
CUT = condition("not_running", why="2 agents ended with it")
STOPPED = condition("not_running", why="hive.target is stopped")
LIVING = condition("agents_without_hive", count=2)
WELL: dict[str, Any] = {"problems": [], "version": "0.1.0"}


@pytest.mark.parametrize(
    ("subject", "status", "word"),
    [
        (Subject(kind=TargetKind.UP, paths=UP, socket=Path("/r/hive.sock"), health=WELL), PASS, "/r/hive.sock"),
        (Subject(kind=TargetKind.UP, paths=UP, health={**WELL, "problems": ["p", "q"]}), WARN, "p (and 1 more)"),
        (Subject(kind=TargetKind.NONE), SKIP, "no Hive runs here"),
        (Subject(kind=TargetKind.UP, paths=UP, silence="nobody"), SKIP, "nobody"),
        (Subject(kind=TargetKind.UP, paths=UP, silence="nobody", offline=[ENDED]), SKIP, "nobody"),
        (Subject(kind=TargetKind.UP, paths=UP, silence="nobody", offline=[ENDED, LIVING]), FAIL, "nobody"),
        (Subject(kind=TargetKind.UP, paths=UP, silence="nobody", offline=[CUT]), FAIL, "2 agents ended"),
        (
            Subject(kind=TargetKind.UP, paths=UP, offline=[condition("daemon_ended", holder="a hive up")]),
            FAIL,
            "a hive up",
        ),
        (Subject(kind=TargetKind.UP, paths=UP, silence="nobody", named=True), FAIL, "nobody"),
        (Subject(kind=TargetKind.UP, paths=UP, silence="it hangs", socket=Path("/r/hive.sock")), FAIL, "it hangs"),
        (Subject(kind=TargetKind.APPLIANCE, paths=UP, silence="nobody"), FAIL, "nobody"),
        (Subject(kind=TargetKind.APPLIANCE, paths=UP, offline=[STOPPED]), FAIL, "hive.target is stopped"),
        (Subject(kind=TargetKind.APPLIANCE, paths=UP, silence="may not", may_not=True), SKIP, "group hive"),
    ],
)
def test_answers(subject: Subject, status: Status, word: str) -> None:
    assert says(running.judge_answers(subject), status, word)


V1 = Path("/opt/hive/versions/0.1.0-1/lib/hive/__init__.py")


@pytest.mark.parametrize(
    ("running_", "mine", "installed", "own", "status"),
    [
        ("", "0.1.0", "", V1, SKIP),
        ("0.1.0", "0.1.0", "", V1, PASS),
        ("0.1.0", "0.1.0", "0.1.0-1", V1, PASS),
        ("0.0.9", "0.1.0", "0.1.0-1", V1, WARN),
        ("0.1.0", "0.1.0", "0.1.0-2", V1, WARN),
        ("0.0.9", "0.1.0", "", V1, WARN),
    ],
)
def test_versions(running_: str, mine: str, installed: str, own: Path, status: Status) -> None:
    assert says(running.judge_version(running_, mine, installed, is_appliance=bool(installed), own=own), status)


@pytest.mark.parametrize(
    ("file", "error", "is_appliance", "status"),
    [
        (Path("/c"), "", True, PASS),
        (None, "", False, PASS),
        (None, "", True, WARN),
        (Path("/c"), "/c:1: no\n/c:2: no", True, FAIL),
    ],
)
def test_config(file: Path | None, error: str, is_appliance: bool, status: Status) -> None:
    assert says(running.judge_config(file, error, is_appliance=is_appliance), status)


def port(ours: int | None, owner: str) -> list[running.Port]:
    return [running.Port("agents", 11435, ours, owner), running.Port("callers", 8480, 8480, "python (pid 1)")]


@pytest.mark.parametrize(
    ("ports", "is_appliance", "status"),
    [
        (port(11435, "python (pid 1)"), True, PASS),
        (port(None, ""), True, PASS),
        (port(None, "nginx (pid 9)"), True, FAIL),
        (port(None, "nginx (pid 9)"), False, WARN),
        (port(None, "systemd (pid 1)"), True, PASS),
        (port(None, "systemd (pid 100)"), True, FAIL),
        (port(None, "systemd (pid 1)"), False, WARN),
        (port(11436, "nginx (pid 9)"), False, WARN),
        (port(11436, ""), False, PASS),
    ],
)
def test_ports(ports: list[running.Port], is_appliance: bool, status: Status) -> None:
    assert says(running.judge_ports(ports, is_appliance=is_appliance), status)


def test_a_user_who_sees_no_owner_is_told_so_and_not_that_hive_fails() -> None:
    """Outside the group hive every port of an installed Hive was `taken`, and doctor said FAIL."""
    ports = [running.Port("agents", 11435, None, running.UNSEEN)]
    verdict = running.judge_ports(ports, is_appliance=True)
    assert says(verdict, WARN, "only root sees which")
    assert verdict.fix == "sudo hive doctor hive.ports"
    assert says(running.judge_ports(ports, is_appliance=True, is_root=True), FAIL)


# --- files -------------------------------------------------------------------------------------------------------

KEY = files.PathRow(Path("/k"), "root", "root", 0o600)
OWN = files.PathRow(Path("/o"), None, None, None, 0o077)


@pytest.mark.parametrize(
    ("found", "status", "word"),
    [
        (files.FoundPath(KEY, "root", "root", 0o600), PASS, "1 secret"),
        (files.FoundPath(KEY, "root", "root", 0o640), FAIL, "mode 640"),
        (files.FoundPath(KEY, "root", "root", 0o400), WARN, "mode 400"),
        (files.FoundPath(KEY, "ann", "root", 0o600), FAIL, "user ann"),
        (files.FoundPath(KEY, "root", "ann", 0o600), FAIL, "group ann"),
        (files.FoundPath(KEY, "root", "root", 0o777, is_link=True), FAIL, "is a link"),
        (files.FoundPath(KEY), SKIP, "no secret"),
        (files.FoundPath(KEY._replace(is_optional=False)), WARN, "missing"),
        (files.FoundPath(KEY, may_not=True), SKIP, "needs root"),
        (files.FoundPath(OWN, "ann", "ann", 0o600), PASS, "1 secret"),
        (files.FoundPath(OWN, "ann", "ann", 0o644), FAIL, "others may read"),
    ],
)
def test_owners_and_modes(found: files.FoundPath, status: Status, word: str) -> None:
    assert says(files.judge([found], "secret"), status, word)


@given(mode=st.integers(0, 0o777), wanted=st.sampled_from([0o600, 0o640, 0o660, 0o700, 0o711, 0o750, 0o755]))
def test_any_bit_more_than_meant_fails_and_any_bit_less_warns(mode: int, wanted: int) -> None:
    verdict = files.judge([files.FoundPath(KEY._replace(mode=wanted), "root", "root", mode)], "file")
    assert verdict.status is (FAIL if mode & ~wanted else WARN if mode != wanted else PASS)


def test_what_is_missing_is_made_by_another_command_than_what_is_wrong_is_mended() -> None:
    missing = files.FoundPath(KEY._replace(is_optional=False))
    assert files.judge([missing], "file").fix == "sudo systemd-tmpfiles --create hive.conf"
    assert files.judge([missing], "secret").fix == "sudo hive secrets generate"
    strange = files.FoundPath(KEY, "ann", "root", 0o600)
    assert files.judge([strange], "file").fix == "sudo hive doctor files.state --fix"


def test_what_is_open_is_told_before_what_is_missing() -> None:
    missing = files.FoundPath(KEY._replace(path=Path("/missing"), is_optional=False))
    assert says(files.judge([missing, files.FoundPath(KEY, "ann", "root", 0o600)], "file"), FAIL, "/k", "1 more")


# --- units -------------------------------------------------------------------------------------------------------

UNIT = units.PackagedUnit("/etc/systemd/system/hive-proxy.service", b"x", b"x")


@pytest.mark.parametrize(
    ("unit", "status", "word"),
    [
        (UNIT, PASS, "1 file as"),
        (UNIT._replace(there=None), FAIL, "missing"),
        (UNIT._replace(there=b"y"), FAIL, "not what this version brings"),
        (UNIT._replace(drop_ins=["more.conf"]), PASS, "hive-proxy.service (more.conf)"),
    ],
)
def test_drift(unit: units.PackagedUnit, status: Status, word: str) -> None:
    assert says(units.judge_drift([unit]), status, word)


RUNS = {"Id": "a.service", "ActiveState": "active", "SubState": "running", "Result": "success", "NRestarts": "0"}


@pytest.mark.parametrize(
    ("changed", "status", "word"),
    [
        ({}, PASS, "1 run"),
        ({"ActiveState": "inactive", "SubState": "dead"}, FAIL, "inactive (dead)"),
        ({"ActiveState": "failed", "Result": "oom-kill"}, FAIL, "oom-kill"),
        ({"NeedDaemonReload": "yes"}, WARN, "has not read"),
        ({"NRestarts": "3"}, WARN, "3 times"),
    ],
)
def test_services(changed: dict[str, str], status: Status, word: str) -> None:
    assert says(units.judge_active([{**RUNS, **changed}]), status, word)


def test_of_a_stopped_hive_only_a_service_that_failed_is_told() -> None:
    stopped, failed = {**RUNS, "ActiveState": "inactive"}, {**RUNS, "ActiveState": "failed", "Result": "oom-kill"}
    assert says(units.judge_active([stopped], is_stopped=True), SKIP, "see hive.answers")
    assert says(units.judge_active([stopped, failed], is_stopped=True), FAIL, "oom-kill")


@pytest.mark.parametrize(
    ("scores", "status"),
    [
        ({}, SKIP),
        ({"hive-proxy.service": 1.3, "hive-daemon.service": 1.5}, PASS),
        ({"hive-proxy.service": 1.3, "hive-daemon.service": 1.6}, FAIL),
        ({"hive-proxy.service": None}, WARN),
    ],
)
def test_scores(scores: dict[str, float | None], status: Status) -> None:
    assert says(units.judge_exposure(scores), status)
