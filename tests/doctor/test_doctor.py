"""`hive doctor` on this host, with real faults planted: each is found, named, and where it can be, mended."""

from __future__ import annotations

import grp
import json
import os
import pwd
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hive.conditions import TABLE, condition
from hive.doctor import doctor
from hive.doctor.checks import backends, check, files, leftovers, memory, running, sandboxes, target, units
from hive.doctor.checks.check import Check, Status
from hive.doctor.checks.target import Subject, TargetKind
from hive.doctor.doctor import Result, examine
from hive.errors import NotPermitted, UsageError
from hive.files import share
from hive.files.layout import Layout
from hive.files.secrets import SECRETS
from hive.host.cgroup import Subtree, state_label
from hive.host.gpu import read_gpus
from hive.host.memory import read_swaps
from hive.host.nvml import GpuState, SeenGpus
from hive.host.process import ProcessTable, spawn, words_of
from hive.host.zram import PAGE_CLUSTER, take_down
from hive.settings.file import load_text
from hive.settings.table import Paths, Settings
from hive.settings.table import Sandbox as SandboxSettings
from tests import docker_engine, swapspace
from tests.nobody import run_as_nobody
from tests.proxy.proxy_process import house

PASS, WARN, FAIL, SKIP = Status.PASS, Status.WARN, Status.FAIL, Status.SKIP
ROOT = os.geteuid() == 0
needs_root = pytest.mark.skipif(not ROOT, reason="needs root")
DAY_S = 86400


def look(one: Subject, *names: str) -> Result:
    """The one result of the one check of this name."""
    (result,) = examine(one, doctor.choose(names))
    return result


# --- running them ------------------------------------------------------------------------------------------------


def test_a_check_that_hangs_is_told_and_holds_up_nobody() -> None:
    """In a process of its own: the hanging thread must not hold up its end either."""
    program = (
        "import threading\n"
        "from hive.doctor.checks.check import Check, passed\n"
        "from hive.doctor.checks.target import Subject, TargetKind\n"
        "from hive.doctor.doctor import examine\n"
        "hangs = Check('a.hangs', '.', lambda subject: threading.Event().wait())\n"
        "checks = [hangs, Check('a.ends', '.', lambda subject: passed('x'))]\n"
        "print([(r.status.value, r.fix) for r in examine(Subject(kind=TargetKind.NONE, limit_s=0.2), checks)])\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (ran.stdout, ran.stderr) == ("[('warn', 'hive doctor a.hangs'), ('pass', '')]\n", "")


def test_a_fault_in_a_check_is_a_warning_and_no_traceback() -> None:
    def broken(_: Subject) -> Any:
        raise ZeroDivisionError("oops")

    (result,) = examine(Subject(kind=TargetKind.NONE), [Check("a.broken", ".", broken)])
    assert (result.status, result.fix) == (WARN, "HIVE_DEBUG=1 hive doctor a.broken")
    assert "ZeroDivisionError: oops" in result.reason


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied", "/secret"), NotPermitted("not you")])
def test_what_this_user_may_not_see_is_skipped(error: Exception) -> None:
    def forbidden(_: Subject) -> Any:
        raise error

    (result,) = examine(Subject(kind=TargetKind.NONE, uid=1000), [Check("a.b", ".", forbidden)])
    assert (result.status, result.fix) == (SKIP, "sudo hive doctor a.b")


def test_all_run_at_once() -> None:
    """Each waits for the others: one after another none would end."""
    everybody = threading.Barrier(4)

    def waits(_: Subject) -> Any:
        everybody.wait(60)
        return check.passed("met")

    results = examine(Subject(kind=TargetKind.NONE, limit_s=60.0), [Check(f"a.n{n}", ".", waits) for n in range(4)])
    assert [result.status for result in results] == [PASS] * 4


def test_an_unknown_name_suggests_one() -> None:
    with pytest.raises(UsageError) as raised:
        doctor.choose(["redis.alc"])
    assert raised.value.hint == "did you mean `redis.acl`?"


def test_slow_checks_run_only_where_they_are_named() -> None:
    assert "units.exposure" not in [one.name for one in doctor.choose([])]
    assert "units.exposure" not in [one.name for one in doctor.choose(["units"])]
    assert [one.name for one in doctor.choose(["units.exposure"])] == ["units.exposure"]


def test_where_nothing_runs_every_check_has_its_answer(short_path: Path) -> None:
    env = {"HOME": str(short_path), "XDG_RUNTIME_DIR": str(short_path), "TMPDIR": str(short_path)}
    found = target.find(state_dir=short_path / "s", uid=os.geteuid(), env=env, layout=Layout(short_path))
    results = examine(msgspec.structs.replace(found, limit_s=30.0), doctor.CHECKS)
    assert [result.name for result in results] == [one.name for one in doctor.CHECKS]
    assert all(result.reason for result in results)
    assert not [result for result in results if "fault in this check" in result.reason]


def test_an_ordinary_user_gets_no_traceback_and_no_failure_for_being_one() -> None:
    said = json.loads(run_as_nobody("from hive.cli.main import main\nmain(['doctor', '--json'])\n"))
    assert said["schema"] == "doctor"
    assert not [one for one in said["checks"] if "fault in this check" in one["reason"]]


# --- which Hive --------------------------------------------------------------------------------------------------


def test_a_socket_that_accepts_and_says_nothing_is_a_hive_that_hangs(short_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(short_path / "hive.sock"))
        listener.listen()
        found = target.find(socket=short_path / "hive.sock", uid=os.geteuid(), env={}, layout=Layout(short_path))
    assert (found.health, found.socket) == (None, short_path / "hive.sock")
    assert running.judge_answers(found).status is FAIL
    assert "did not answer in time" in found.silence


def test_installed_units_make_it_an_appliance_that_does_not_answer(short_path: Path) -> None:
    units_dir = short_path / "etc/systemd/system"
    units_dir.mkdir(parents=True)
    (units_dir / "hive.target").touch()
    env = {"XDG_RUNTIME_DIR": str(short_path), "TMPDIR": str(short_path), "HOME": str(short_path)}
    found = target.find(uid=4242, env=env, layout=Layout(short_path))
    if found.socket is not None:
        pytest.skip("a Hive is installed and runs on this host")
    assert found.is_appliance
    assert found.paths == Paths(short_path / "var/lib/hive", short_path / "run/hive", apart=True)
    assert running.judge_answers(found).status is FAIL


def test_of_a_stopped_hive_what_only_fails_because_of_it_is_skipped(
    appliance: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one cure that doctor offered for a stopped box was `hive backend switch demo`."""
    monkeypatch.setattr(backends, "CANDIDATES", ())  # an Ollama of this host's is none of this Hive's
    settings = load_text("[inference]\nport = 1\n", env={}).settings
    stopped = msgspec.structs.replace(appliance, settings=settings)
    results = examine(stopped, doctor.choose(["hive.answers", "redis.answers", "backend.answers"]))
    assert [result.status for result in results] == [FAIL, SKIP, SKIP]
    assert results[0].found is not None
    assert results[0].found.code == "not_running"
    named = load_text("[inference]\nbackend_url = http://127.0.0.1:1\n", env={}).settings
    assert look(msgspec.structs.replace(stopped, settings=named), "backend.answers").status is not SKIP


def test_a_bad_configuration_is_found_with_its_line(short_path: Path) -> None:
    conf = short_path / "hive.conf"
    conf.write_text("[proxy]\nprot = 1\n")
    found = target.find(state_dir=short_path, config=conf, uid=os.geteuid(), env={}, layout=Layout(short_path))
    result = look(found, "hive.config")
    assert result.status is FAIL
    assert f"{conf}:2: [proxy] prot: no such key" in result.reason
    assert result.fix == f"hive config check {conf}"


# --- files -------------------------------------------------------------------------------------------------------


def test_an_open_secret_is_found_and_closed(up: Subject) -> None:
    assert up.paths is not None
    up.paths.box_key.write_bytes(b"x" * 32)
    up.paths.box_key.chmod(0o644)
    result = look(up, "files.secrets")
    assert result.status is FAIL
    assert str(up.paths.box_key) in result.reason
    (mended,) = doctor.mend(up, [result])
    assert (mended.status, mended.fixed) == (PASS, "owner and mode of 1 set")
    assert stat.S_IMODE(up.paths.box_key.stat().st_mode) == 0o600


def test_a_link_in_place_of_a_secret_is_found_and_never_followed(up: Subject, tmp_path: Path) -> None:
    assert up.paths is not None
    target = tmp_path / "target"
    target.touch(mode=0o644)
    up.paths.box_key.symlink_to(target)
    (mended,) = doctor.mend(up, [look(up, "files.secrets")])
    assert mended.status is FAIL
    assert stat.S_IMODE(target.stat().st_mode) == 0o644


def test_a_socket_open_to_all_is_found_and_closed(up: Subject) -> None:
    assert up.paths is not None
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(up.paths.api_socket))
        up.paths.api_socket.chmod(0o666)
        assert look(up, "files.sockets").status is FAIL
        doctor.mend(up, [look(up, "files.sockets")])
    assert stat.S_IMODE(up.paths.api_socket.stat().st_mode) == 0o600


def test_a_state_directory_that_can_be_listed_is_found(up: Subject) -> None:
    assert up.paths is not None
    up.paths.state.chmod(0o755)
    assert look(up, "files.state").status is FAIL
    up.paths.state.chmod(0o711)
    assert look(up, "files.state").status is PASS


@pytest.mark.root
@needs_root
def test_a_secret_of_somebody_elses_is_given_back_to_root(appliance: Subject) -> None:
    secrets = appliance.layout.at("/etc/hive/secrets")
    secrets.mkdir(parents=True)
    secrets.chmod(0o700)
    for name in SECRETS:
        (secrets / name).touch(mode=0o600)
    assert look(appliance, "files.secrets").status is PASS
    os.chown(secrets / "box-key", 65534, 65534)
    result = look(appliance, "files.secrets")
    assert result.status is FAIL
    assert "belongs to user" in result.reason
    (mended,) = doctor.mend(appliance, [result])
    assert mended.status is PASS
    assert (secrets / "box-key").stat().st_uid == 0


@pytest.mark.root
@needs_root
def test_a_secret_that_is_missing_and_one_that_nobody_knows_are_found(appliance: Subject) -> None:
    secrets = appliance.layout.at("/etc/hive/secrets")
    secrets.mkdir(parents=True)
    secrets.chmod(0o700)
    result = look(appliance, "files.secrets")
    assert (result.status, f"box-key is missing (and {len(SECRETS) - 1} more)" in result.reason) == (WARN, True)
    (secrets / "mine").touch(mode=0o644)
    result = look(appliance, "files.secrets")
    assert (result.status, "mine has mode 644" in result.reason) == (FAIL, True)


@pytest.mark.root
@needs_root
def test_an_owner_that_does_not_exist_here_is_said(appliance: Subject) -> None:
    row = files.PathRow(appliance.layout.at("/x"), "no-such-user", None, 0o600)
    row.path.touch()
    result = look_with(appliance, [row])
    assert "not fixed" in result.reason


def look_with(one: Subject, rows: list[files.PathRow]) -> Result:
    checked = Check(
        "files.state",
        ".",
        lambda _: files.judge(files.look_at(rows), "file"),
        lambda _: files.mend(rows),
    )
    (result,) = examine(one, [checked])
    return doctor._mend(one, checked, result)


# --- ports, disks, the clock -------------------------------------------------------------------------------------


def test_a_taken_port_names_who_has_it(up: Subject) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken = listener.getsockname()[1]
        settings = msgspec.structs.replace(up.settings, proxy=msgspec.structs.replace(up.settings.proxy, port=taken))
        result = look(msgspec.structs.replace(up, settings=settings), "hive.ports")
    assert result.status is WARN
    assert f"(pid {os.getpid()})" in result.reason


async def test_a_port_where_a_hive_answers_is_hives_for_a_user_who_may_see_no_more(short_path: Path) -> None:
    """On a healthy installed box a user outside the group hive read "in use, by Hive or by another program"."""
    seen = [running.Port("agents", 1, None, running.UNSEEN)]
    async with house(short_path) as home:
        proxy = await home.proxy()
        for number in (proxy.port, proxy.ingress_port):
            seen.append(await running.asked(seen[0]._replace(wanted=number)))
            assert running.judge_ports(seen[-1:], is_appliance=True).status is PASS
    with socket.create_server(("127.0.0.1", 0)) as silent:
        stranger = seen[0]._replace(wanted=silent.getsockname()[1])
        assert await running.asked(stranger) == stranger


def test_a_full_disk_is_found(small_disk: Path) -> None:
    (small_disk / "filler").write_bytes(bytes(900_000))
    one = Subject(kind=TargetKind.UP, paths=Paths(small_disk, small_disk))
    assert look(one, "disk.space").status is FAIL


def test_a_database_from_tomorrow_is_found(up: Subject) -> None:
    assert up.paths is not None
    up.paths.database.touch()
    assert look(up, "host.boot").status is PASS
    os.utime(up.paths.database, (time.time() + DAY_S, time.time() + DAY_S))
    result = look(up, "host.boot")
    assert result.status is WARN
    assert "24.0 h ahead" in result.reason


# --- memory ------------------------------------------------------------------------------------------------------


@pytest.mark.root
def test_zram_is_set_up_where_there_is_no_swap() -> None:
    with swapspace.without_swap():
        if not Path("/sys/class/zram-control").exists():
            pytest.skip("this kernel has no zram")
        one = Subject(kind=TargetKind.NONE, limit_s=30.0)
        cluster = PAGE_CLUSTER.read_text()
        before = look(one, "memory.swap")
        assert (before.status, before.fix) == (WARN, "hive doctor memory.swap --fix")
        try:
            (mended,) = doctor.mend(one, [before])
            swaps = [swap.path for swap in read_swaps() or ()]
            assert PAGE_CLUSTER.read_text() == "0\n"  # zram alone: a page costs as much as it would with neighbours
        finally:
            PAGE_CLUSTER.write_text(cluster)
            for swap in read_swaps() or ():
                take_down(swap.path)
    assert (mended.status, len(swaps)) == (PASS, 1), mended
    assert swaps[0] in mended.fixed
    assert "lz" in mended.reason or "zstd" in mended.reason


IN_A_CONTAINER = """mount -t tmpfs tmpfs /dev && mknod -m 666 /dev/null c 1 3 && mknod -m 666 /dev/urandom c 1 9 &&
mount -o remount,bind,ro /sys && exec "$@"
"""


@pytest.mark.root
def test_in_a_container_no_swap_is_offered_and_none_attempted() -> None:
    """`--fix` was offered in a container, made a device of its host's, and failed: it was not in the /dev there."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    words = [sys.executable, "-m", "hive", "doctor", "memory.swap", "--json"]
    container = ["unshare", "--mount", "sh", "-c", IN_A_CONTAINER, "sh"]
    with swapspace.without_swap():
        devices = sorted(Path("/sys/block").glob("zram*"))
        for command in (words, [*words, "--fix"]):
            said = subprocess.run([*container, *command], capture_output=True, text=True, check=False)
            (found,) = json.loads(said.stdout)["checks"]
            assert (found["status"], found["fix"]) == ("warn", ""), found
            assert "swap is turned on by its host" in found["reason"]
        assert sorted(Path("/sys/block").glob("zram*")) == devices
    assert "not fixed" in found["reason"]


def test_swap_is_not_set_up_by_an_ordinary_user() -> None:
    one = Subject(kind=TargetKind.NONE, uid=1000)
    result = Result(name="memory.swap", status=WARN, reason="none")
    (mended,) = doctor.mend(one, [result])
    assert mended.reason == "none; not fixed: only root turns swap on"
    assert memory.look_at_swap(one).fix in ("", "sudo hive doctor memory.swap --fix")


# --- sandboxes ---------------------------------------------------------------------------------------------------


def with_sandbox(one: Subject, **changes: str) -> Subject:
    sandbox = msgspec.structs.replace(SandboxSettings(), **changes)
    return msgspec.structs.replace(one, settings=msgspec.structs.replace(Settings(), sandbox=sandbox))


@pytest.mark.root
@needs_root
@pytest.mark.parametrize(("version", "status"), [("1.15.1", PASS), ("1.16.1", FAIL), ("1.9.0", FAIL)])
def test_programs_are_asked_their_version(up: Subject, version: str, status: Status) -> None:
    assert up.paths is not None
    named = {}
    for name in ("firecracker", "jailer"):
        path = up.paths.state / name
        path.write_text(f"#!/bin/sh\necho {name.capitalize()} v{version}\n")
        path.chmod(0o755)
        named[name] = str(path)
    one = with_sandbox(up, **named)
    assert look(one, "sandbox.firecracker").status is status
    Path(named["firecracker"]).chmod(0o777)
    result = look(one, "sandbox.firecracker")
    assert (result.status, "replaced by others" in result.reason) == (FAIL, True)


def test_a_program_that_others_may_write_is_never_run(up: Subject) -> None:
    assert up.paths is not None
    path, trace = up.paths.state / "firecracker", up.paths.state / "trace"
    path.write_text(f"#!/bin/sh\ntouch {trace}\n")
    path.chmod(0o777)
    assert look(with_sandbox(up, firecracker=str(path)), "sandbox.firecracker").status is FAIL
    assert not trace.exists()


@pytest.mark.parametrize(
    ("text", "mode", "status", "word"),
    [
        ('runtimes = ["process"]\n', 0o644, PASS, "process"),
        ("runtmes = []\n", 0o644, FAIL, "runtmes: no such key"),
        ("[", 0o644, FAIL, "no TOML"),
        ("", 0o666, FAIL, "written by others"),
    ],
)
def test_the_policy_is_read_as_the_helper_reads_it(
    up: Subject, text: str, mode: int, status: Status, word: str
) -> None:
    assert up.paths is not None
    path = up.paths.state / "sandbox.toml"
    path.write_text(text)
    path.chmod(mode)
    result = look(with_sandbox(up, policy=str(path)), "sandbox.policy")
    assert (result.status, word in result.reason) == (status, True), result


@pytest.mark.docker
def test_an_engine_that_everybody_may_use_is_found(up: Subject) -> None:
    engine = docker_engine.shared()
    one = with_sandbox(up, docker_socket=str(engine.socket))
    mode = stat.S_IMODE(engine.socket.stat().st_mode)
    result = look(one, "sandbox.docker")
    assert result.status in (PASS, WARN)
    assert "dockerd (pid" in result.reason
    engine.socket.chmod(0o666)
    try:
        assert look(one, "sandbox.docker").status is FAIL
    finally:
        engine.socket.chmod(mode)


@pytest.mark.docker
def test_a_container_without_an_agent_is_found(up: Subject) -> None:
    engine = docker_engine.shared()
    assert up.paths is not None
    labels = {"hive.agent": "ghost", "hive.state": state_label(up.paths.state)}
    body = {"Image": engine.image, "Cmd": ["sleep", "60"], "Labels": labels, "HostConfig": {"NetworkMode": "none"}}
    made = engine.call("POST", "/containers/create?name=hive-doctor-ghost", body)
    try:
        assert made[0] == 201, made
        one = with_sandbox(up, docker_socket=str(engine.socket))
        result = look(one, "sandbox.leftovers")
        found = leftovers.judge_leftovers(
            [leftovers.Leftover("ghost", "container hive-doctor-ghost", "docker rm -f hive-doctor-ghost")], frozenset()
        )
    finally:
        engine.clear(up.paths.state)
    assert (result.status, "1 agent lives on" in result.reason) == (WARN, True), result
    assert found.fix == "docker rm -f hive-doctor-ghost"


@pytest.mark.cgroup
def test_a_process_left_in_an_agents_group_is_found(up: Subject) -> None:
    assert up.paths is not None
    subtree = Subtree.find(up.paths.state)
    if subtree is None:
        pytest.skip("no control group may be made here")
    leaf = subtree.leaf("ghost")
    leaf.make()
    child = spawn(["sleep", "60"], env={"PATH": os.defpath}, cgroup_dir=leaf.path)
    try:
        assert look(up, "sandbox.leftovers").status is WARN
        (left,) = leftovers._groups(up.paths.state)
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
        leaf.remove()
        subtree.remove()
    assert (left.agent, left.remedy) == ("ghost", f"kill {child.pid}")


def test_a_unit_counts_as_ours_where_it_names_our_state(up: Subject, tmp_path: Path) -> None:
    assert up.paths is not None
    (tmp_path / "hive-agent@a1.service").write_text(f"[Service]\nWorkingDirectory={up.paths.state}/agents/a1\n")
    (tmp_path / "hive-agent@b2.service").write_text("[Service]\nWorkingDirectory=/somewhere/else\n")
    assert [left.agent for left in leftovers._units(tmp_path, up.paths.state)] == ["a1"]


def test_kvm_is_asked_itself(up: Subject) -> None:
    verdict = sandboxes.look_at_kvm(up)
    assert verdict.status in ((PASS, WARN) if os.access("/dev/kvm", os.R_OK | os.W_OK) else (FAIL, SKIP))


# --- backends ----------------------------------------------------------------------------------------------------


def test_the_runner_of_an_ollama_that_was_killed_is_told_with_what_it_holds(up: Subject, tmp_path: Path) -> None:
    """It holds the model's memory, is nobody's child any more, and no server knows of it."""
    model = tmp_path / "blobs" / "sha256-ab"
    runs = f'exec -a /usr/lib/ollama/llama-server sh -c "sleep 1000; :" sh --model {model}'
    script = f"({runs}) & echo $!; wait"
    serving = subprocess.Popen(["/usr/bin/ollama", "-c", script], executable="/bin/bash", stdout=subprocess.PIPE)
    assert serving.stdout is not None
    runner = int(serving.stdout.readline())
    try:
        while not words_of(runner)[0].endswith("llama-server"):
            time.sleep(0.01)
        assert str(runner) not in look(up, "backend.runners").fix.split()
        serving.kill()
        serving.wait()
        found = look(up, "backend.runners")
        assert (found.status, str(runner) in found.fix.split()) == (WARN, True)
        assert "of an Ollama that ended" in found.reason
    finally:
        for pid in ProcessTable().with_descendants({runner}):
            os.kill(pid, signal.SIGKILL)
        serving.stdout.close()


def test_a_socket_that_lets_every_user_in_is_found(up: Subject, passable: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(passable / "b.sock"))
        (passable / "b.sock").chmod(0o666)
        one = msgspec.structs.replace(up, health={"backend": {"address": str(passable / "b.sock")}, "isolation": "uid"})
        assert look(one, "backend.apart").status is FAIL
        (passable / "b.sock").chmod(0o660)
        assert look(one, "backend.apart").status is PASS


def test_gpus_are_read_from_the_files_of_the_kernel(tmp_path: Path) -> None:
    """Laid out as driver 570 does it on a machine with one H200."""
    proc, dev, pci = (tmp_path / name for name in ("proc", "dev", "pci"))
    for directory in (proc / "gpus/0000:00:05.0", dev, pci / "0000:00:05.0"):
        directory.mkdir(parents=True)
    (proc / "version").write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build  (dvs-builder@U22)\n"
        "GCC version:  gcc version 12.2.0\n"
    )
    (proc / "gpus/0000:00:05.0/information").write_text("Model: \t\t NVIDIA H200\nIRQ:   \t\t 18\n")
    (pci / "0000:00:05.0/vendor").write_text("0x10de\n")
    (pci / "0000:00:05.0/class").write_text("0x030200\n")
    for name in ("nvidia0", "nvidiactl", "nvidia-uvm", "nvidia-modeset"):
        (dev / name).touch(mode=0o600)
    found = read_gpus(proc=proc, dev=dev, pci=pci)
    assert (found.on_bus, found.driver, found.models) == (1, "570.86.15", ("NVIDIA H200",))
    assert found.nodes == ("nvidia-uvm", "nvidia0", "nvidiactl")
    assert backends.judge_gpu(found._replace(has_nvml=True), SeenGpus((GpuState(0),))).status is PASS


# --- units -------------------------------------------------------------------------------------------------------


@pytest.fixture
def installed(appliance: Subject) -> Subject:
    """The units of this version, as they are installed."""
    for one in share.units(share.directory()):
        path = appliance.layout.at(one.path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(one.content)
    return appliance


def test_a_changed_unit_is_found_and_a_drop_in_is_said(installed: Subject) -> None:
    assert look(installed, "units.drift").status is PASS
    unit = installed.layout.at("/etc/systemd/system/hive-proxy.service")
    unit.with_name("hive-proxy.service.d").mkdir(exist_ok=True)
    (unit.with_name("hive-proxy.service.d") / "mine.conf").write_text("[Service]\nNice=5\n")
    assert "hive-proxy.service (mine.conf)" in look(installed, "units.drift").reason
    unit.write_bytes(unit.read_bytes() + b"# mine\n")
    result = look(installed, "units.drift")
    assert result.status is FAIL
    assert "/etc/systemd/system/hive-proxy.service is not what this version brings" in result.reason
    unit.unlink()
    assert "is missing" in look(installed, "units.drift").reason


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_a_unit_without_locks_fails_by_its_score(appliance: Subject) -> None:
    unit = appliance.layout.at("/etc/systemd/system/hive-proxy.service")
    unit.parent.mkdir(parents=True)
    unit.write_text("[Service]\nExecStart=/bin/true\n")
    verdict = units.look_at_exposure(appliance)
    assert verdict.status is FAIL
    assert "at most 1.3 was promised" in verdict.reason


# --- the contract's names ----------------------------------------------------------------------------------------


def test_the_contract_names_users_by_name(appliance: Subject) -> None:
    rows = [*files.state_rows(appliance), *files.socket_rows(appliance)]
    assert {row.user for row in rows} == {"root", "hive", "hive-proxy", "hive-redis", "hive-inference"}
    secret = [row for row in rows if row.path == appliance.layout.at("/var/lib/hive/daemon")]
    assert [(row.user, row.mode) for row in secret] == [("hive", 0o700)]
    assert all(str(row.path).startswith(str(appliance.layout.root)) for row in rows)


def test_files_of_this_host_are_told_by_the_names_of_their_owners(tmp_path: Path) -> None:
    (tmp_path / "x").touch()
    (found,) = files.look_at([files.PathRow(tmp_path / "x", None, None, None)])
    assert found.user == pwd.getpwuid(os.geteuid()).pw_name
    assert found.group == grp.getgrgid((tmp_path / "x").stat().st_gid).gr_name


def test_a_fix_is_told_as_who_asks_has_to_type_it() -> None:
    """A user was told `modprobe kvm_intel`, which takes root; root of a box without sudo was told to sudo."""
    found = condition("kvm_missing", why="no /dev/kvm")
    by_user, by_root = (found.at(Subject(kind=TargetKind.NONE, uid=uid).where).fix for uid in (1000, 0))
    assert by_user == "sudo modprobe kvm_intel || sudo modprobe kvm_amd"
    assert by_root == "modprobe kvm_intel || modprobe kvm_amd"


@pytest.mark.parametrize("code", sorted(TABLE))
def test_no_fix_names_sudo_by_itself(code: str) -> None:
    """Root was told to type it by `hive status`, where only the doctor took it out again."""
    assert "sudo" not in f"{TABLE[code].fix} {TABLE[code].up_fix}".replace("{sudo}", "")
