"""`hive agent exec` on a whole Hive, as a person and as a killed one uses it: the command, its bytes, what is left."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import pty
import signal
import socket
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hive.host.process import ProcessTable, read_stat
from hive.shapes.exec_frames import PROTOCOL, TAKEN, WINDOW_BYTES, FrameKind, FrameReader, pack
from tests.journeys.stack import Stack, stack, until

pytestmark = [pytest.mark.redis]
ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="agents have a user of their own only where Hive is root")
SLEEP = ["/bin/sleep", "100000"]
FAMILY = "sleep 54321 & echo $$ $!; exec sleep 54322"
"""A program with a child behind its back; prints the pids of both."""
STATUS = ("Uid", "Gid", "Groups", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp")


@pytest.fixture(scope="module")
def hive() -> Iterator[Stack]:
    with stack(url=None, auto_sleep=False) as hive:
        hive.post("/api/agents", {"name": "a1", "command": SLEEP, "idle_s": 0})
        yield hive


def command(hive: Stack, name: str, *words: str, options: tuple[str, ...] = ()) -> list[str]:
    own = [sys.executable, "-m", "hive", "agent", "exec", name, "--state-dir", str(hive.state)]
    return [*own, *options, "--", *words]


def ran(
    hive: Stack, name: str, *words: str, options: tuple[str, ...] = (), given: bytes | None = None
) -> subprocess.CompletedProcess[bytes]:
    """The command, once it has ended."""
    stdin = subprocess.DEVNULL if given is None else None
    return subprocess.run(
        command(hive, name, *words, options=options), input=given, stdin=stdin, capture_output=True, timeout=120
    )


@contextlib.contextmanager
def running(hive: Stack, name: str, *words: str, options: tuple[str, ...] = ()) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        command(hive, name, *words, options=options),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def line(process: subprocess.Popen[bytes]) -> list[str]:
    assert process.stdout is not None
    return process.stdout.readline().decode().split()


def status_of(pid: int | str) -> dict[str, str]:
    fields = dict(row.split(":\t", 1) for row in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in row)
    return {name: fields[name].strip() for name in STATUS}


def alive(pid: int) -> bool:
    found = read_stat(pid)
    return found is not None and found.alive


def gone(*pids: int) -> None:
    until(lambda: not any(alive(pid) for pid in pids), within_s=30, what=f"the end of {pids}")


def nothing_left(hive: Stack) -> bool:
    """Whether no process has the mark of such programs of this Hive."""
    home = f"HOME={hive.state}".encode()
    return not any(
        any(entry.startswith(b"HIVE_EXEC=") for entry in entries) and any(entry.startswith(home) for entry in entries)
        for entries in ProcessTable().environments.values()
    )


def pid_inside(hive: Stack, name: str) -> int:
    return int(hive.get(f"/api/agents/{name}")["pid"])


def audit(hive: Stack, act: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = hive.get("/api/audit", act=act, limit="50")["rows"]
    return rows


def test_the_end_of_the_program_is_the_end_of_the_command(hive: Stack) -> None:
    assert ran(hive, "a1", "sh", "-c", "exit 7").returncode == 7
    assert ran(hive, "a1", "sh", "-c", "kill -TERM $$").returncode == 128 + signal.SIGTERM
    assert ran(hive, "a1", "true").returncode == 0


def test_a_failure_of_hives_own_is_told_from_one_of_the_programs(hive: Stack) -> None:
    missing = ran(hive, "a1", "no-such-program")
    assert (missing.returncode, b"no such command: no-such-program" in missing.stderr) == (127, True)
    nobody = ran(hive, "nobody", "true")
    assert (nobody.returncode, b"hive: " in nobody.stderr) == (125, True)
    told = ran(hive, "nobody", "true", options=("--json",))
    assert (json.loads(told.stderr)["code"], json.loads(told.stderr)["exit_code"]) == ("not_found", 125)
    not_executable = ran(hive, "a1", "/etc/passwd")
    assert not_executable.returncode == 126


def test_stdout_and_stderr_stay_apart_and_json_tells_each(hive: Stack) -> None:
    done = ran(hive, "a1", "sh", "-c", "echo out; echo err >&2")
    assert (done.stdout, done.stderr) == (b"out\n", b"err\n")
    rows = [json.loads(row) for row in ran(hive, "a1", "echo", "out", options=("--json",)).stdout.splitlines()]
    assert [(row.get("stream"), row.get("text"), row.get("exit_code")) for row in rows] == [
        ("stdout", "out\n", None),
        (None, None, 0),
    ]


def test_megabytes_of_any_bytes_go_both_ways_unchanged(hive: Stack) -> None:
    data = os.urandom(8 * 1024 * 1024 + 7)
    done = ran(hive, "a1", "cat", options=("-i",), given=data)
    assert (done.returncode, hashlib.sha256(done.stdout).digest()) == (0, hashlib.sha256(data).digest())
    counted = ran(hive, "a1", "sh", "-c", "wc -c; exit 3", options=("-i",), given=data)
    assert (counted.returncode, counted.stdout.split()) == (3, [str(len(data)).encode()])


def test_a_program_that_reads_no_input_ends_all_the_same(hive: Stack) -> None:
    done = ran(hive, "a1", "sh", "-c", "exec <&-; echo done", options=("-i",), given=bytes(4 * 1024 * 1024))
    assert (done.returncode, done.stdout) == (0, b"done\n")


def test_without_i_its_stdin_is_at_its_end(hive: Stack) -> None:
    assert ran(hive, "a1", "cat").returncode == 0


def test_a_slow_reader_slows_the_program_and_nothing_grows(hive: Stack) -> None:
    """Bytes that are not read are in a pipe and two buffers of bounded size; the program waits for the rest.

    It begins once its pid was read: both streams come on one connection, so nothing overtakes a stdout that is full.
    """
    size = 64 * 1024 * 1024
    program = f"echo $$ >&2; read begin; exec head -c {size} /dev/zero"
    with running(hive, "a1", "sh", "-c", program, options=("-i",)) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        assert process.stdout is not None
        pid = int(process.stderr.readline())
        process.stdin.write(b"\n")
        process.stdin.flush()
        written = 0

        def stands_still() -> bool:
            nonlocal written
            before, written = written, int(Path(f"/proc/{pid}/io").read_text().split("wchar: ")[1].split()[0])
            return before == written > 0

        if os.geteuid() == 0:
            until(stands_still, within_s=30, what="a program that waits")
            assert written < size / 8
        assert ran(hive, "a1", "echo", "others go on").stdout == b"others go on\n"
        count = 0
        while data := process.stdout.read(1 << 20):
            count += len(data)
        assert (count, process.wait(60)) == (size, 0)


@ROOT
@pytest.mark.root
def test_it_is_whom_the_agent_is_where_the_agent_is(hive: Stack) -> None:
    hive.post("/api/agents", {"name": "apart", "command": SLEEP, "egress": [], "env": {"OWN": "value"}, "idle_s": 0})
    pid = pid_inside(hive, "apart")
    with running(hive, "apart", "sh", "-c", "echo $$ $OWN $HOME; pwd; exec sleep 54323") as process:
        mine, own, home = line(process)
        assert line(process) == [home]
        assert own == "value"
        assert home == str(hive.state / "agents" / hive.get("/api/agents/apart")["id"]) or Path(home).is_dir()
        assert status_of(mine) == status_of(pid)
        assert status_of(mine)["NoNewPrivs"] == "1"
        namespaces = sorted(os.listdir(f"/proc/{pid}/ns"))
        assert [os.readlink(f"/proc/{mine}/ns/{one}") for one in namespaces] == [
            os.readlink(f"/proc/{pid}/ns/{one}") for one in namespaces
        ]
        group = [row for row in Path(f"/proc/{pid}/cgroup").read_text().splitlines() if row.startswith("0::")]
        inside = [row for row in Path(f"/proc/{mine}/cgroup").read_text().splitlines() if row.startswith("0::")]
        assert inside[0].rpartition("/exec-")[0] == group[0] or inside == group
    gone(int(mine))
    hive.client().delete("/api/agents/apart")


def test_a_sleeper_is_woken_and_kept_awake_while_it_runs(hive: Stack) -> None:
    hive.post("/api/agents", {"name": "sleeper", "command": SLEEP, "idle_s": 0.5})
    hive.put_config({"inference.auto_sleep_enabled": True})
    until(lambda: hive.get("/api/agents/sleeper")["status"] == "paused", within_s=30, what="sleep")
    with running(hive, "sleeper", "sh", "-c", "echo up; cat", options=("-i",)) as process:
        assert line(process) == ["up"]
        view = hive.get("/api/agents/sleeper")
        assert view["status"] == "running"
        until(lambda: "program" in hive.get("/api/agents/sleeper")["sentence"], within_s=30, what="the reason")
        refused = hive_said(hive, "pause", "sleeper", "--now")
        assert (refused.returncode, b"runs a program inside" in refused.stderr) == (1, True)
        assert hive.get("/api/agents/sleeper")["status"] == "running"
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(60) == 0
    until(lambda: hive.get("/api/agents/sleeper")["status"] == "paused", within_s=30, what="sleep again")
    hive.put_config({"inference.auto_sleep_enabled": None})
    hive.client().delete("/api/agents/sleeper")


def hive_said(hive: Stack, *words: str) -> subprocess.CompletedProcess[bytes]:
    own = [sys.executable, "-m", "hive", "agent", *words, "--state-dir", str(hive.state)]
    return subprocess.run(own, capture_output=True, timeout=60)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_it_ends_with_its_caller_and_takes_its_children_along(hive: Stack, signum: signal.Signals) -> None:
    with running(hive, "a1", "sh", "-c", FAMILY) as process:
        pids = [int(word) for word in line(process)]
        process.send_signal(signum)
        code = process.wait(60)
        assert code == (130 if signum is signal.SIGINT else -signum)
        gone(*pids)
    until(lambda: audit(hive, "agent.exec_ended")[0]["detail"]["why"] == "its caller left", within_s=10, what="a row")


def test_what_it_leaves_behind_ends_with_it(hive: Stack) -> None:
    done = ran(hive, "a1", "sh", "-c", "sleep 54324 & echo $!; exit 5")
    assert done.returncode == 5
    gone(int(done.stdout))


def test_a_caller_that_is_killed_while_nobody_reads_its_input_is_noticed(hive: Stack) -> None:
    """While reading from a connection is paused its end is not seen; so what is sent is bounded instead."""
    with running(hive, "a1", "sh", "-c", "echo $$; exec sleep 54325", options=("-i",)) as process:
        (pid,) = line(process)
        assert process.stdin is not None
        os.set_blocking(process.stdin.fileno(), False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(process.stdin.fileno(), bytes(65536))
        process.kill()
        gone(int(pid))


@pytest.mark.parametrize("name", ["daemon", "sandbox"])
def test_a_killed_daemon_or_helper_leaves_nothing_running(hive: Stack, name: str) -> None:
    with running(hive, "a1", "sh", "-c", FAMILY) as process:
        pids = [int(word) for word in line(process)]
        killed = hive.kill(name)
        assert process.wait(60) == 125
        assert process.stderr is not None
        assert b"hive: " in process.stderr.read()
        gone(*pids)
    hive.wait_for_next(name, killed)
    until(lambda: ran(hive, "a1", "true").returncode == 0, within_s=60, what="another one")
    assert nothing_left(hive)
    assert alive(pid_inside(hive, "a1"))


def test_it_ends_with_its_agent(hive: Stack) -> None:
    hive.post("/api/agents", {"name": "short", "command": SLEEP, "idle_s": 0})
    with running(hive, "short", "sh", "-c", FAMILY) as process:
        pids = [int(word) for word in line(process)]
        hive.post("/api/agents/short/stop")
        assert process.wait(60) in (125, 128 + signal.SIGTERM, 128 + signal.SIGKILL)
        gone(*pids)
    refused = ran(hive, "short", "true")
    assert (refused.returncode, b"stopped" in refused.stderr) == (125, True)
    hive.client().delete("/api/agents/short")


def test_who_ran_what_and_how_it_ended_is_in_the_audit(hive: Stack) -> None:
    ran(hive, "a1", "sh", "-c", "exit 9")
    until(lambda: audit(hive, "agent.exec_ended")[0]["detail"]["exit_code"] == 9, within_s=10, what="its row")
    begun, ended = audit(hive, "order.exec")[0], audit(hive, "agent.exec_ended")[0]
    for row in (begun, ended):
        assert row["detail"]["command"] == ["sh", "-c", "exit 9"]
        assert row["actor"] == f"uid:{os.geteuid()}"
    assert begun["origin"] == "socket"


def test_an_agent_that_lives_elsewhere_cannot_be_entered(hive: Stack) -> None:
    hive.post("/api/agents", {"name": "visitor", "runtime": "external"})
    refused = ran(hive, "visitor", "true", options=("--json",))
    assert (refused.returncode, json.loads(refused.stderr)["code"]) == (125, "not_supported")
    hive.client().delete("/api/agents/visitor")


# --- a terminal -----------------------------------------------------------------------------------------------------


def at_terminal(hive: Stack, *words: str, agent: str = "a1") -> tuple[subprocess.Popen[bytes], int]:
    """The command with a terminal of 33 × 101; what is typed and shown there."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("4H", 33, 101, 0, 0))
    own = ["setsid", "--ctty", *command(hive, agent, *words, options=("-it",))]
    process = subprocess.Popen(own, stdin=slave, stdout=slave, stderr=slave)
    os.close(slave)
    return process, master


def shown(master: int, wanted: bytes) -> bytes:
    seen = b""
    while wanted not in seen:
        seen += os.read(master, 65536)
    return seen


def test_with_a_terminal_it_has_its_size_and_keys_go_to_the_program(hive: Stack) -> None:
    process, master = at_terminal(hive, "sh", "-c", "trap 'echo caught; exit 6' INT; stty size; tty; read x; echo $x$x")
    assert b"33 101\r\n/dev/pts/" in shown(master, b"/dev/pts/")
    fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("4H", 20, 50, 0, 0))
    os.kill(process.pid, signal.SIGWINCH)
    os.write(master, b"\x03")
    shown(master, b"caught")
    assert process.wait(60) == 6
    os.close(master)


def test_the_terminals_new_size_reaches_the_program(hive: Stack) -> None:
    waits = "trap 'stty size; exit 4' WINCH; echo ready; while :; do sleep 0.05; done"
    process, master = at_terminal(hive, "sh", "-c", waits)
    shown(master, b"ready")
    fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("4H", 20, 50, 0, 0))
    os.kill(process.pid, signal.SIGWINCH)
    shown(master, b"20 50")
    assert process.wait(60) == 4
    os.close(master)


def test_the_persons_terminal_is_as_it_was_afterwards(hive: Stack) -> None:
    plain, other = pty.openpty()
    before = termios.tcgetattr(plain)
    os.close(plain)
    os.close(other)
    process, master = at_terminal(hive, "sh", "-c", "echo there; read x")
    shown(master, b"there")
    assert termios.tcgetattr(master)[:4] != before[:4]
    os.write(master, b"\r")
    assert process.wait(60) == 0
    assert termios.tcgetattr(master)[:4] == before[:4]
    os.close(master)


def test_a_closed_terminal_ends_it(hive: Stack) -> None:
    process, master = at_terminal(hive, "sh", "-c", "echo pid $$.; trap '' HUP INT; while :; do sleep 1; done")
    pid = int(shown(master, b".").split(b"pid ")[1].split(b".")[0])
    os.close(master)
    process.wait(60)
    gone(pid)


# --- over TCP -------------------------------------------------------------------------------------------------------


class OverTcp:
    """A request to run a program, on a plain socket; `status` of its answer, and what follows its head."""

    def __init__(self, hive: Stack, token: str, target: str, *, upgrade: str = PROTOCOL) -> None:
        self.sock = socket.create_connection(("127.0.0.1", hive.health()["api"]["port"]), 30)
        fields = f"Host: 127.0.0.1\r\nAuthorization: Bearer {token}\r\nConnection: Upgrade\r\nUpgrade: {upgrade}\r\n"
        self.sock.sendall(f"POST {target} HTTP/1.1\r\n{fields}\r\n".encode())
        self._file = self.sock.makefile("rb")
        self.status = int(self._file.readline().split()[1])
        rows = iter(self._file.readline, b"\r\n")
        self.fields = {row.split(b":")[0].lower(): row.split(b":", 1)[1].strip() for row in rows}

    def __enter__(self) -> OverTcp:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self.sock.close()

    def error(self) -> Any:
        return json.loads(self._file.read(int(self.fields[b"content-length"])))

    def frames(self) -> Iterator[tuple[FrameKind, bytes]]:
        reader = FrameReader()
        while data := self._file.read1(65536):
            yield from reader.feed(data)


def made_token(hive: Stack, name: str, role: str) -> str:
    return str(hive.post("/api/tokens", {"name": name, "role": role})["token"])


CAT = "/api/agents/a1/exec?command=cat&stdin=1"


def test_over_tcp_an_operator_may_and_a_viewer_may_not(hive: Stack) -> None:
    with OverTcp(hive, made_token(hive, "looker", "viewer"), CAT) as refused:
        assert (refused.status, refused.error()["code"]) == (403, "not_permitted")
    with OverTcp(hive, made_token(hive, "steerer", "operator"), CAT) as caller:
        assert caller.status == 101
        caller.sock.sendall(pack(FrameKind.INPUT, b"hello") + pack(FrameKind.INPUT))
        told = list(caller.frames())
    assert (FrameKind.TAKEN, TAKEN.pack(5)) in told
    assert (FrameKind.OUTPUT, b"hello") in told
    assert json.loads(told[-1][1]) == {"exit_code": 0}
    assert audit(hive, "order.exec")[0]["origin"] == "tcp:127.0.0.1"


def test_a_revoked_token_ends_what_it_runs(hive: Stack) -> None:
    target = "/api/agents/a1/exec?command=sh&command=-c&command=echo+$$;exec+sleep+54326"
    with OverTcp(hive, made_token(hive, "brief", "operator"), target) as caller:
        kind, said = next(caller.frames())
        assert (kind, caller.status) == (FrameKind.OUTPUT, 101)
        hive.client().delete("/api/tokens/brief")
        gone(int(said))


def test_who_sends_more_input_than_there_is_room_for_is_hung_up_on(hive: Stack) -> None:
    token = made_token(hive, "pushy", "operator")
    target = "/api/agents/a1/exec?command=sh&command=-c&command=echo+$$;exec+sleep+54327&stdin=1"
    with OverTcp(hive, token, target) as caller:
        _, said = next(caller.frames())
        with contextlib.suppress(ConnectionError):
            for _ in range(2 * WINDOW_BYTES // 65536 + 8):
                caller.sock.sendall(pack(FrameKind.INPUT, bytes(65536)))
        gone(int(said))


def test_without_an_upgrade_it_is_a_bad_request(hive: Stack) -> None:
    with OverTcp(hive, made_token(hive, "plain", "operator"), CAT, upgrade="other") as caller:
        assert (caller.status, "Upgrade: hive-exec" in caller.error()["detail"]) == (400, True)


# --- the policy -----------------------------------------------------------------------------------------------------


@pytest.mark.wide
def test_a_program_that_the_policy_does_not_name_is_refused(tmp_path: Path) -> None:
    policy = tmp_path / "sandbox.toml"
    policy.write_text('programs = ["/bin/sleep", "/usr/bin/sleep", "/usr/bin/coreutils"]\n[networks]\nhost = true\n')
    policy.chmod(0o644)
    with stack(url=None, auto_sleep=False, config=f"[sandbox]\npolicy = {policy}\n") as hive:
        hive.post("/api/agents", {"name": "a1", "command": SLEEP})
        assert ran(hive, "a1", "sleep", "0").returncode == 0
        for program in ("sh", "/bin/sh", "/usr/bin/env"):
            refused = ran(hive, "a1", program)
            assert refused.returncode == 126
            assert b"is not permitted by the policy" in refused.stderr
            assert f"{policy} line 1 decides this: programs".encode() in refused.stderr
        assert audit(hive, "order.exec")[0]["outcome"] == "not_permitted"
