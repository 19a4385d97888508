"""`hive lease run` on a whole Hive, as a person and a script use it: real processes, a real terminal."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from hive.host.process import identify
from tests.journeys.stack import Stack, stack, until

pytestmark = [pytest.mark.redis]
ROOM_MB = 2000
CONFIG = f"""
[pool]
enabled = true
reserve_mb = 0
cpu_mb = {ROOM_MB}
[lease]
share = 1.0
"""


@pytest.fixture(scope="module")
def hive() -> Iterator[Stack]:
    with stack(url=None, config=CONFIG) as hive:
        yield hive


@pytest.fixture(autouse=True)
def nothing_held(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    hive = request.getfixturevalue("hive")
    for lease in leases(hive):
        with contextlib.suppress(Exception):
            hive.client().delete(f"/api/leases/{lease['id']}", end=1)
    until(lambda: not leases(hive), within_s=60, what="the end of every lease")


def command(hive: Stack, *words: str, options: tuple[str, ...] = (), vram: str = "1500M") -> list[str]:
    own = [sys.executable, "-m", "hive", "lease", "run", "--state-dir", str(hive.state), "--vram", vram]
    return [*own, "--grace", "30s", *options, "--", *words]


def ran(
    hive: Stack, *words: str, options: tuple[str, ...] = (), vram: str = "1500M"
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(hive, *words, options=options, vram=vram), capture_output=True, text=True, timeout=120, check=False
    )


@contextlib.contextmanager
def running(hive: Stack, *words: str, **options: Any) -> Iterator[subprocess.Popen[str]]:
    more = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options.pop("streams", {})}
    with subprocess.Popen(command(hive, *words, **options), text=True, **more) as process:
        try:
            yield process
        finally:
            process.kill()


def leases(hive: Stack, state: str = "") -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = hive.get("/api/leases")["leases"]
    return [lease for lease in found if not state or lease["state"] == state]


def labels(hive: Stack) -> set[str]:
    """Of all leases, ended ones too."""
    return {lease["label"] for lease in hive.get("/api/leases", ended=1000)["leases"]}


def one(hive: Stack, state: str) -> dict[str, Any]:
    return until(lambda: leases(hive, state), within_s=60, what=f"a lease that is {state}")[0]  # type: ignore[no-any-return]


# --- the program -------------------------------------------------------------------------------------------------


def test_the_end_of_the_program_is_the_end_of_the_command(hive: Stack) -> None:
    assert ran(hive, "sh", "-c", "exit 5").returncode == 5
    assert ran(hive, "sh", "-c", "kill -TERM $$").returncode == -signal.SIGTERM
    done = ran(hive, "sh", "-c", "cat; echo out; echo err >&2")
    assert done.stdout == "out\n"
    assert done.stderr == "err\n"


def test_the_command_itself_becomes_the_program(hive: Stack, tmp_path: Path) -> None:
    shows = (
        "import os, json; print(json.dumps([os.getpid(), os.getcwd(), sorted(map(int, os.listdir('/proc/self/fd')))]))"
    )
    with subprocess.Popen(
        command(hive, "/usr/bin/python3", "-S", "-c", shows), stdout=subprocess.PIPE, cwd=tmp_path, text=True, env=own()
    ) as process:
        assert process.stdout is not None
        pid, directory, descriptors = json.loads(process.stdout.readline())
    assert (pid, directory) == (process.pid, str(tmp_path))
    assert descriptors == [0, 1, 2, 3], "3 is the listing's own"


def own() -> dict[str, str]:
    """The environment in which the sources are found from any directory."""
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}


def test_it_has_the_environment_of_before_and_that_of_its_lease(hive: Stack) -> None:
    done = subprocess.run(
        command(hive, "env"), stdout=subprocess.PIPE, text=True, check=True, env={**os.environ, "MINE": "yes"}
    )
    found = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
    assert (found["MINE"], found["CUDA_VISIBLE_DEVICES"]) == ("yes", "")
    assert found["HIVE_LEASE"] == f"l-{found['HIVE_LEASE_TOKEN']}"


def test_what_python_ignores_is_not_ignored_in_the_program(hive: Stack) -> None:
    done = ran(hive, "sh", "-c", "grep SigIgn /proc/self/status")
    assert int(done.stdout.split()[1], 16) & (1 << (signal.SIGPIPE - 1) | 1 << (signal.SIGXFSZ - 1)) == 0


def test_a_program_that_is_not_there_asks_for_nothing(hive: Stack) -> None:
    missing, plain = ran(hive, "no-such-program"), ran(hive, "/etc/passwd")
    assert (missing.returncode, plain.returncode) == (127, 126)
    assert "no such command: no-such-program" in missing.stderr
    assert ran(hive, "true").returncode == 0
    until(lambda: "true" in labels(hive), within_s=60, what="what was asked for after that")
    assert not {"no-such-program", "passwd"} & labels(hive)


def test_a_program_that_cannot_be_executed_gives_its_lease_back_at_once(hive: Stack, tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o755)
    done = ran(hive, str(script))
    assert done.returncode == 127
    assert "its interpreter is missing" in done.stderr
    assert ran(hive, "true", options=("--wait", "60s")).returncode == 0


# --- the line ----------------------------------------------------------------------------------------------------


def test_one_waits_for_the_other_and_says_for_whom(hive: Stack) -> None:
    with running(hive, "sleep", "1000") as first:
        holder = one(hive, "running")
        with running(hive, "echo", "mine") as second:
            assert second.stdout is not None
            assert second.stderr is not None
            said = second.stderr.readline()  # only then has it been told that it waits
            first.terminate()
            assert second.wait(60) == 0
            said += second.stderr.read()
            assert second.stdout.read() == "mine\n"
    assert "waits for 1.5 GiB: place 1" in said
    assert holder["id"] in said
    assert "\r" not in said


def test_no_room_now_and_no_room_in_time_are_7(hive: Stack) -> None:
    with running(hive, "sleep", "1000"):
        one(hive, "running")
        now, late = ran(hive, "true", options=("--no-wait",)), ran(hive, "true", options=("--wait", "1s"))
        assert (now.returncode, late.returncode) == (7, 7)
        assert "no room" in now.stderr
        assert "waited" in late.stderr


def test_what_can_never_fit_is_refused_at_once_with_the_arithmetic(hive: Stack) -> None:
    done = ran(hive, "true", vram="50G")
    assert done.returncode == 2
    assert "51200" in done.stderr
    assert str(ROOM_MB) in done.stderr
    assert leases(hive) == []


@pytest.mark.parametrize(
    "words", [("--vram", "8"), ("--vram", "1G", "--wait", "soon"), ("--vram", "1G", "--gpus", "0")]
)
def test_what_makes_no_sense_is_2(hive: Stack, words: tuple[str, ...]) -> None:
    base = [sys.executable, "-m", "hive", "lease", "run", "--state-dir", str(hive.state)]
    assert subprocess.run([*base, *words, "--", "true"], stderr=subprocess.DEVNULL, check=False).returncode == 2


class Terminal:
    """A command at a terminal of its own, as its foreground."""

    def __init__(self, words: list[str]) -> None:
        self.text = ""
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            with contextlib.suppress(OSError):
                os.execvp(words[0], words)
            os._exit(99)

    def read(self) -> str:
        with contextlib.suppress(OSError):
            self.text += os.read(self._fd, 4096).decode(errors="replace")
        return self.text

    def until(self, words: str) -> None:
        until(lambda: words in self.read(), within_s=60, what=f"{words!r} on the terminal")

    def type(self, keys: bytes) -> None:
        os.write(self._fd, keys)

    def code(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def close(self) -> None:
        if (who := identify(self.pid)) is not None and who.is_alive():
            who.send(signal.SIGKILL)
        os.close(self._fd)


@pytest.fixture
def terminal() -> Iterator[Any]:
    opened: list[Terminal] = []

    def open_(words: list[str]) -> Terminal:
        opened.append(Terminal(words))
        return opened[-1]

    yield open_
    for each in opened:
        each.close()


def test_at_a_terminal_one_line_is_rewritten_and_ctrl_c_leaves_the_line(hive: Stack, terminal: Any) -> None:
    with running(hive, "sleep", "1000"):
        one(hive, "running")
        waits = terminal(command(hive, "true"))
        waits.until("place 1")
        waits.type(b"\x03")
        assert waits.code() == 130
        assert leases(hive, "waiting") == []
        until(lambda: waits.read().count("\r\x1b[K") >= 2, within_s=20, what="its line is free again")
        assert "\n" not in waits.text.replace("^C", "")


def test_its_name_in_lists_has_no_argument_that_may_be_a_secret(hive: Stack) -> None:
    secret = ("sh", "-c", "exec sleep 1000", "--token", "s3cret")
    with running(hive, *secret):
        assert one(hive, "running")["label"] == "sh"
    assert ran(hive, "true", options=("--label", "my render")).returncode == 0
    assert "my render" in labels(hive)
    assert not [label for label in labels(hive) if "s3cret" in label]


def test_ctrl_c_is_the_programs_once_it_runs(hive: Stack, terminal: Any) -> None:
    runs = terminal(
        command(hive, "sh", "-c", "trap 'echo caught; exit 3' INT; echo begins; while :; do sleep 0.1; done")
    )
    runs.until("begins")
    runs.type(b"\x03")
    runs.until("caught")
    assert runs.code() == 3


def test_a_program_that_is_ended_is_told_why_on_its_terminal(hive: Stack, terminal: Any) -> None:
    runs = terminal(
        command(hive, "sh", "-c", "trap 'echo leaves; exit 4' TERM; echo begins; while :; do sleep 0.1; done")
    )
    runs.until("begins")
    lease = one(hive, "running")
    hive.client().delete(f"/api/leases/{lease['id']}", end=1)
    runs.until("leaves")
    assert f"hive: lease {lease['id']} ends within 30 s: " in runs.read()
    assert runs.code() == 4


def test_its_time_ends_it(hive: Stack) -> None:
    done = ran(hive, "sleep", "1000", options=("--max", "1s"))
    assert done.returncode == -signal.SIGTERM


# --- faults ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("service", ["daemon", "sandbox"])
def test_kill_9_of_what_grants_or_holds_ends_no_program_and_gives_nothing_to_two(hive: Stack, service: str) -> None:
    with running(hive, "sleep", "1000") as first:
        held = one(hive, "running")
        hive.restart(service)
        again = one(hive, "running")
        assert (again["id"], again["token"]) == (held["id"], held["token"])
        assert first.poll() is None
        assert ran(hive, "true", options=("--no-wait",)).returncode == 7
        first.kill()
        first.wait()
        assert ran(hive, "true", options=("--wait", "60s")).returncode == 0


def test_a_wait_goes_on_over_a_daemon_that_is_killed(hive: Stack) -> None:
    with running(hive, "sleep", "1000") as first:
        one(hive, "running")
        with running(hive, "echo", "mine") as second:
            waiting = one(hive, "waiting")
            assert second.stderr is not None
            assert waiting["id"] in second.stderr.readline()  # it has the answer to its order
            hive.restart("daemon")
            assert one(hive, "waiting")["id"] == waiting["id"]
            first.kill()
            assert second.wait(90) == 0
            assert second.stdout is not None
            assert second.stdout.read() == "mine\n"

            def has_ended() -> bool:
                return waiting["id"] in [lease["id"] for lease in hive.get("/api/leases", ended=1000)["leases"]]

            until(has_ended, within_s=60, what="it is told as ended")


def test_kill_9_of_the_holder_frees_its_memory(hive: Stack) -> None:
    with running(hive, "sh", "-c", "sleep 1000 & wait") as first:
        one(hive, "running")
        shell = psutil.Process(first.pid)
        until(lambda: [one for one in shell.children() if one.name() == "sleep"], within_s=60, what="it has a child")
        first.kill()
        first.wait()
        left = one(hive, "running")
        assert left["state"] == "running", "what it started holds on"
        hive.client().delete(f"/api/leases/{left['id']}", end=1)
        assert ran(hive, "true", options=("--wait", "60s")).returncode == 0


@pytest.mark.wide
def test_a_hive_that_ends_leaves_the_program_alone_and_the_next_one_knows_it(hive: Stack) -> None:
    with running(hive, "sleep", "1000") as first:
        held = one(hive, "running")
        hive.stop()
        assert first.poll() is None
        hive.start()
        again = one(hive, "running")
        assert (again["id"], again["token"], again["label"]) == (held["id"], held["token"], "sleep 1000")
        assert ran(hive, "true", options=("--no-wait",)).returncode == 7
        first.kill()
        first.wait()
        assert ran(hive, "true", options=("--wait", "60s")).returncode == 0
