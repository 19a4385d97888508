"""Spawning, and what /proc says: on real processes."""

# ruff: noqa: ASYNC110 - other processes send no asyncio events

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hive.errors import BadRequest, HiveError, NotFound, NotPermitted
from hive.host import parent
from hive.host.process import (
    Identity,
    ProcessTable,
    boot_id,
    exit_code,
    has_environment,
    identify,
    is_stopped,
    parse_stat,
    read_stat,
    real_uid,
    spawn,
)

ENV = {"PATH": os.defpath}
as_root = [pytest.mark.root, pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")]


def wait_until(predicate: Callable[[], object]) -> None:
    """The limit only keeps a failing test from hanging."""
    limit = time.monotonic() + 20
    while not predicate():
        assert time.monotonic() < limit, "it did not happen"
        time.sleep(0.002)


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    child = spawn(["sleep", "1000"], env={**ENV, "MARK": "here"})
    yield child
    child.kill()
    child.wait()


def output_of(command: list[str], **options: object) -> str:
    reads, writes = os.pipe()
    child = spawn(command, stdout_fd=writes, env=ENV, **options)  # type: ignore[arg-type]
    os.close(writes)
    with os.fdopen(reads) as out:
        said = out.read()
    child.wait()
    return said


# --- spawn -------------------------------------------------------------------------------------------------------


def test_a_child_has_the_given_environment_and_directory_and_nothing_else(tmp_path: Path) -> None:
    said = output_of(["sh", "-c", "pwd; env; ls -l /proc/self/fd | grep -c -e '->'"], cwd=tmp_path)
    lines = said.splitlines()
    assert lines[0] == str(tmp_path)
    assert "PATH=" + os.defpath in lines
    assert {line.split("=")[0] for line in lines[1:-1]} <= {"PATH", "PWD", "_", "SHLVL", "OLDPWD"}


def test_a_child_may_have_fewer_files_open_than_this_process_has(tmp_path: Path) -> None:
    """A helper of a hundred agents could not start one with `files` = 64: the group's control file was one too many."""
    (tmp_path / "cgroup.procs").touch()
    held = [os.dup(0) for _ in range(100)]
    try:
        said = output_of(["sh", "-c", "ulimit -Sn; ulimit -Hn"], files=64, cgroup_dir=tmp_path)
    finally:
        for fd in held:
            os.close(fd)
    assert said.split() == ["64", "64"]
    assert (tmp_path / "cgroup.procs").read_text() == "0"


def test_a_child_keeps_only_the_descriptors_it_is_given() -> None:
    kept, _ = pipe = os.pipe()
    os.set_inheritable(pipe[1], True)
    said = output_of([sys.executable, "-S", "-c", "import os; print(*os.listdir('/proc/self/fd'))"], keep_fds=[kept])
    os.close(pipe[0])
    os.close(pipe[1])
    numbers = {int(text) for text in said.split()}
    assert kept in numbers
    assert len(numbers - {0, 1, 2, kept}) <= 1, "the listing's own descriptor, no other"


def test_a_child_leads_a_session_of_its_own_unless_told_otherwise(sleeper: subprocess.Popen[bytes]) -> None:
    found = read_stat(sleeper.pid)
    assert found is not None
    assert found.session == sleeper.pid
    with spawn(["true"], env=ENV, session=False) as child:
        other = read_stat(child.pid)
        assert other is not None
        assert other.session == os.getsid(0)


@pytest.mark.parametrize(
    ("command", "error", "says"),
    [
        (["no-such-program-here"], NotFound, "no-such-program-here"),
        (["/no/such/program"], NotFound, "/no/such/program"),
        (["/etc/passwd"], NotPermitted, "/etc/passwd"),
        (["/tmp"], NotPermitted, "/tmp"),
        ([], BadRequest, "empty"),
        (["true", "a\0b"], BadRequest, "null"),
        (["true", "x" * 3_000_000], BadRequest, "true"),
    ],
)
def test_a_command_that_cannot_run_is_an_error_that_names_it(
    command: list[str], error: type[HiveError], says: str
) -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(error, match=says):
        spawn(command, env=ENV)
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.root
@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
def test_a_program_the_agents_user_cannot_reach_says_whose_right_is_missing(tmp_path: Path) -> None:
    """An agent with a program below /root was told `not executable`, which it was."""
    tmp_path.chmod(0o700)
    (tmp_path / "program").write_bytes(Path("/bin/true").read_bytes())
    (tmp_path / "program").chmod(0o755)
    with pytest.raises(NotPermitted, match="uid 65534 may not execute") as caught:
        spawn([str(tmp_path / "program")], env={}, uid=65534)
    assert "above it" in caught.value.hint


def test_a_script_says_what_is_wrong_with_it(tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o755)
    with pytest.raises(NotFound) as caught:
        spawn([str(script)], env=ENV)
    assert "interpreter" in caught.value.hint
    script.write_text("echo no first line\n")
    with pytest.raises(NotPermitted, match="not a program"):
        spawn([str(script)], env=ENV)


def test_a_missing_directory_is_named_and_not_the_command() -> None:
    with pytest.raises(NotFound, match="no directory /no/such"):
        spawn(["true"], env=ENV, cwd="/no/such")


def test_a_cgroup_that_cannot_be_entered_is_said(tmp_path: Path) -> None:
    with pytest.raises(NotPermitted, match="could not enter"):
        spawn(["true"], env=ENV, cgroup_dir=tmp_path / "none")


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_a_child_has_the_uid_the_gid_and_no_other_group() -> None:
    assert output_of(["sh", "-c", "id -u; id -g; id -G"], uid=71001, gid=71002).split() == ["71001", "71002", "71002"]


def test_a_child_cannot_gain_privileges_where_that_is_asked() -> None:
    said = output_of(["grep", "NoNewPrivs", "/proc/self/status"], no_new_privs=True)
    assert said.split() == ["NoNewPrivs:", "1"]


@pytest.mark.parametrize("uid", [None, pytest.param(71001, marks=as_root)])
def test_a_child_dies_with_its_parent_also_as_another_user(uid: int | None, tmp_path: Path) -> None:
    """Changing the uid clears the parent-death signal: it must be asked for last."""
    program = f"""
import os, signal, time
from hive.host.process import spawn
child = spawn(["sleep", "1000"], env={ENV!r}, uid={uid!r}, pdeathsig=signal.SIGKILL)
print(child.pid, flush=True)
time.sleep(1000)
"""
    middle = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert middle.stdout is not None
    child = int(middle.stdout.readline())
    who = identify(child)
    assert who is not None
    middle.kill()
    middle.communicate()
    wait_until(lambda: (found := who.stat()) is None or not found.alive)


# --- parents -----------------------------------------------------------------------------------------------------


def test_a_process_whose_parent_ended_before_it_asked_gets_the_signal_at_once() -> None:
    program = "import signal; from hive.host.parent import die_with_parent; die_with_parent(signal.SIGUSR1, parent=1)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -signal.SIGUSR1


def test_a_subreaper_inherits_orphans() -> None:
    program = """
import os, subprocess
from hive.host.parent import become_subreaper
become_subreaper()
orphan = int(subprocess.check_output(["sh", "-c", "sh -c 'sleep 0.3; exit 5' >/dev/null & echo $!"]))
pid, status = os.waitpid(orphan, 0)
print(pid == orphan, os.waitstatus_to_exitcode(status))
"""
    assert subprocess.check_output([sys.executable, "-c", program]) == b"True 5\n"


async def test_the_end_of_the_last_writer_of_a_watched_pipe_is_noticed_once() -> None:
    reads, writes = os.pipe()
    told: list[int] = []
    parent.watch(reads, lambda: told.append(1))
    os.write(writes, b"still here")
    for _ in range(5):
        await asyncio.sleep(0)
    assert told == []
    os.close(writes)
    while not told:
        await asyncio.sleep(0.001)
    for _ in range(5):
        await asyncio.sleep(0)
    assert told == [1]
    os.close(reads)


# --- identity ----------------------------------------------------------------------------------------------------


def test_only_the_process_that_is_meant_is_signalled(sleeper: subprocess.Popen[bytes]) -> None:
    who = identify(sleeper.pid)
    assert who is not None
    others = [
        Identity(who.pid, who.start_ticks + 1, who.boot),
        Identity(who.pid, who.start_ticks, "another boot"),
        Identity(2**22 + 7, who.start_ticks, who.boot),
    ]
    assert [other.send(signal.SIGKILL) for other in others] == [False, False, False]
    assert [other.open() for other in others] == [None, None, None]
    assert sleeper.poll() is None
    assert who.send(signal.SIGTERM) is True
    assert exit_code(sleeper.wait()) == 143
    assert who.send(signal.SIGTERM) is False


def test_a_zombie_is_still_identified_but_not_alive() -> None:
    child = spawn(["true"], env=ENV)
    who = identify(child.pid)
    assert who is not None
    wait_until(lambda: (found := who.stat()) is not None and not found.alive)
    child.wait()
    assert who.stat() is None
    assert who.boot == boot_id()


@given(name=st.binary(max_size=15).filter(lambda name: b"\0" not in name))
def test_no_program_name_confuses_the_parser(name: bytes) -> None:
    line = b"7 (" + name + b") S 1 7 8 0 -1 0 0 0 0 0 11 22 3 4 20 0 1 0 500 4096 2 0\n"
    found = parse_stat(7, line)
    assert (found.state, found.parent, found.session, found.cpu_ticks, found.start_ticks) == ("S", 1, 8, 33, 500)


def test_a_process_is_stopped_only_when_each_of_its_threads_is(sleeper: subprocess.Popen[bytes]) -> None:
    assert not is_stopped(sleeper.pid)
    sleeper.send_signal(signal.SIGSTOP)
    wait_until(lambda: is_stopped(sleeper.pid))
    sleeper.send_signal(signal.SIGCONT)
    wait_until(lambda: not is_stopped(sleeper.pid))


def test_a_process_whose_first_thread_ended_is_alive_and_not_stopped() -> None:
    """It shows as a zombie; the other thread runs on."""
    program = """
import ctypes, threading, time
def go_on():
    time.sleep(0.05)
    print("up", flush=True)
    time.sleep(1000)
threading.Thread(target=go_on).start()
ctypes.CDLL(None).syscall(60, 0)
"""
    if os.uname().machine != "x86_64":
        pytest.skip("the number of exit(2) is that of x86-64")
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    wait_until(lambda: (found := read_stat(child.pid)) is not None and found.state == "Z")
    found = read_stat(child.pid)
    assert found is not None
    assert found.alive
    assert not is_stopped(child.pid)
    child.send_signal(signal.SIGSTOP)
    wait_until(lambda: is_stopped(child.pid))
    child.kill()
    child.communicate()


def test_a_snapshot_finds_descendants_sessions_and_marks(sleeper: subprocess.Popen[bytes]) -> None:
    snapshot = ProcessTable()
    assert sleeper.pid in snapshot.with_descendants({os.getpid()})
    assert os.getpid() not in snapshot.with_descendants({sleeper.pid})
    assert snapshot.sessions[sleeper.pid] == [sleeper.pid]
    assert real_uid(sleeper.pid) == os.getuid()
    assert [found.pid for found in snapshot.with_environment("MARK=here")] == [sleeper.pid]
    assert has_environment(sleeper.pid, "MARK=here")
    assert not has_environment(sleeper.pid, "MARK=her")
