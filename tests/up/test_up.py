"""`hive up` as a person starts it: a real process with real children. What it cannot do without is not faked."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from hive.client.client import Client
from hive.errors import HiveError
from hive.files import up_flags
from hive.paths import runtime_dir

HIVE = [sys.executable, "-P", "-m", "hive"]
SLEEPER = ["/usr/bin/python3", "-c", "import time; time.sleep(3600)"]
DEAF = [
    "/usr/bin/python3",
    "-c",
    "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); time.sleep(3600)",
]

pytestmark = [
    pytest.mark.redis,
    pytest.mark.skipif(shutil.which("redis-server") is None, reason="needs redis-server"),
    pytest.mark.timeout(120),
]


class HiveUp:
    """One `hive up` on a state directory; may be started again there."""

    def __init__(self, state: Path) -> None:
        self.state = state
        self.process: subprocess.Popen[str] | None = None
        self.log = state.parent / "log"

    @property
    def prefix(self) -> list[str]:
        """The words by which the command is started."""
        return []

    def start(self, *flags: str, ports: tuple[int, int] = (0, 0)) -> HiveUp:
        """Returns at once; `until_up` waits."""
        command = [*self.prefix, *HIVE, "up", "--state-dir", str(self.state), "--backend", "demo"]
        command += ["--port", str(ports[0]), "--ingress-port", str(ports[1]), "--api-port", "0", *flags]
        with self.log.open("a") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        return self

    def until_up(self) -> HiveUp:
        until(lambda: self.health() is not None or self.ended(), self.said)
        assert not self.ended(), self.said()
        return self

    def ended(self) -> bool:
        assert self.process is not None
        return self.process.poll() is not None

    def said(self) -> str:
        return self.log.read_text()

    @property
    def client(self) -> Client:
        return Client(Path((self.state / "socket").read_text().strip()), timeout_s=30)

    def health(self) -> dict[str, Any] | None:
        """The daemon's answer once the proxy is there; None before."""
        with contextlib.suppress(HiveError, OSError):
            health = self.client.get("/api/health")
            if health["proxy"]["connected"] and health["helper"]["connected"] and health["redis"]["up"]:
                return health
        return None

    def children(self) -> dict[str, psutil.Process]:
        """Its processes by what they are; agents are not among them."""
        assert self.process is not None
        found = {}
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):
                words = child.cmdline()  # empty for one that ended and is not reaped yet
                if "redis-server" in " ".join(words[:1]):
                    found["redis"] = child
                elif "hive" in words:
                    found[words[words.index("hive") + 1]] = child
        return found

    def send(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def end(self, number: int = signal.SIGINT) -> int:
        """Its exit code after an orderly end."""
        self.send(number)
        return self.wait()

    def wait(self) -> int:
        assert self.process is not None
        self.process.communicate()
        return self.process.returncode

    def processes(self) -> list[psutil.Process]:
        """Everything on this machine that names our state directory, or lives in an agent's home in it."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if str(self.state) in " ".join(process.cmdline()) or process.cwd().startswith(str(self.state)):
                    found.append(process)
        return found


def until(question: Callable[[], object], why: Callable[[], str] = str, *, within_s: float = 60.0) -> None:
    """Returns when `question()` is true."""
    end = time.monotonic() + within_s
    while not question():
        assert time.monotonic() < end, why()
        time.sleep(0.02)


@pytest.fixture
def hive(passable: Path) -> Iterator[HiveUp]:
    hive = HiveUp(passable / "state")
    yield hive
    if hive.process is not None and hive.process.poll() is None:
        hive.process.kill()
        hive.process.communicate()
    until(lambda: not [p for p in hive.processes() if "hive" in p.cmdline() or "redis" in p.name()], hive.said)
    for left in hive.processes():
        left.kill()
    shutil.rmtree(runtime_dir(hive.state, os.getuid(), os.environ), ignore_errors=True)


def agent(hive: HiveUp, name: str, command: list[str]) -> dict[str, Any]:
    """A started agent's view."""
    hive.client.post("/api/agents", {"name": name, "command": command})
    hive.client.post(f"/api/agents/{name}/start")
    until(lambda: hive.client.get(f"/api/agents/{name}")["status"] == "running", hive.said)
    return hive.client.get(f"/api/agents/{name}")


def runtime_of(hive: HiveUp) -> Path:
    return hive.client.path.parent


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.wide)])
def test_it_comes_up_says_what_it_is_and_ends_without_an_orphan_or_a_stale_socket(hive: HiveUp, number: int) -> None:
    hive.start().until_up()
    view = agent(hive, "ann", SLEEPER)
    runtime = runtime_of(hive)
    hive.send(number)
    assert hive.process is not None
    banner, _ = hive.process.communicate()
    assert hive.process.returncode == 0, hive.said()
    assert "DEMO" in banner
    assert "limits" in banner
    assert re.search(r"isolation +(uid|none): ", banner)
    assert not psutil.pid_exists(view["pid"])
    assert hive.processes() == []
    assert not runtime.exists()
    assert not (hive.state / "socket").exists()


def test_a_second_one_on_the_state_directory_names_the_first_and_harms_nothing(hive: HiveUp) -> None:
    hive.start().until_up()
    assert hive.process is not None
    command = [*HIVE, "up", "--state-dir", str(hive.state), "--backend", "demo"]
    second = subprocess.run(command, capture_output=True, text=True, check=False)
    assert second.returncode == 1
    assert f"pid {hive.process.pid}" in second.stderr
    assert hive.health() is not None
    assert hive.end() == 0


def test_a_killed_process_comes_back_and_the_agent_lives_on(hive: HiveUp) -> None:
    """Each of them, one after the other: of the same Hive."""
    hive.start().until_up()
    view = agent(hive, "ann", SLEEPER)
    for name in ("redis", "sandbox", "demo-backend", "daemon", "proxy"):
        before = hive.children()[name]
        before.kill()
        until(lambda name=name, before=before: hive.children().get(name, before) != before, hive.said)  # type: ignore[misc]
        until(lambda: hive.health() is not None, hive.said)
        after = hive.client.get("/api/agents/ann")
        assert (after["status"], after["pid"]) == ("running", view["pid"]), name
        until(lambda name=name: f"child_ended name={name.removeprefix('demo-')} exit=137" in hive.said(), hive.said)  # type: ignore[misc]
    assert hive.end() == 0
    assert not psutil.pid_exists(view["pid"])


def test_killed_itself_its_children_leave_and_the_next_one_adopts_the_agents_on_the_same_ports(hive: HiveUp) -> None:
    hive.start().until_up()
    view = agent(hive, "ann", SLEEPER)
    health = hive.health()
    assert health is not None
    hive.client.post("/api/agents/ann/pause", {"timeout_s": 20})
    children = hive.children()
    hive.send(signal.SIGKILL)
    hive.wait()
    psutil.wait_procs(list(children.values()), timeout=30)
    assert not [name for name, child in children.items() if child.is_running()]
    ann = psutil.Process(view["pid"])
    until(lambda: ann.status() == psutil.STATUS_SLEEPING, hive.said)
    assert f" --state-dir {hive.state.resolve()} " in up_flags.kept(hive.state / up_flags.NAME, os.getuid())

    hive.start().until_up()
    after = hive.client.get("/api/agents/ann")
    assert (after["status"], after["pid"]) == ("running", view["pid"])
    again = hive.health()
    assert again is not None
    assert again["proxy"] == health["proxy"]
    assert hive.end() == 0
    # Its parent was killed with the first `hive up`; whether a zombie is left is this machine's init's affair.
    assert not ann.is_running() or ann.status() == psutil.STATUS_ZOMBIE, hive.said()


@pytest.mark.wide
def test_a_second_interrupt_does_not_wait_for_a_deaf_agent(hive: HiveUp) -> None:
    hive.start().until_up()
    view = agent(hive, "deaf", DEAF)
    until(lambda: (hive.state / "logs" / f"{view['id']}.log").read_text() == "1\n", hive.said)
    hive.send(signal.SIGINT)
    until(lambda: "agents_stopping" in hive.said(), hive.said)
    assert hive.end() == 130, hive.said()
    assert not psutil.pid_exists(view["pid"])
    assert hive.processes() == []


def test_taken_ports_move_up_are_said_and_asked_for_again(hive: HiveUp) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, socket.create_server(("127.0.0.1", 0)) as api_taken:
        port, api = taken.getsockname()[1], ("--api-port", str(api_taken.getsockname()[1]))
        hive.start(*api, ports=(port, 0)).until_up()
        health = hive.health()
        assert health is not None
        assert health["proxy"]["port"] > port
        assert health["api"]["port"] > int(api[1])
        until(lambda: "ports_taken" in hive.said(), hive.said)
        assert hive.end() == 0
    hive.start(*api, ports=(port, 0)).until_up()
    again = hive.health()
    assert again is not None
    assert again["proxy"]["port"] == health["proxy"]["port"], "an agent that lived on would look there"
    assert again["api"]["port"] == health["api"]["port"], "so would whoever has written it down"
    assert hive.end() == 0


def test_with_json_stdout_holds_one_object_and_nothing_else(hive: HiveUp) -> None:
    hive.start("--exit-after", "0.5", "--json")
    assert hive.process is not None
    out, _ = hive.process.communicate()
    assert hive.process.returncode == 0, hive.said()
    found = json.loads(out)
    assert (found["agents"], found["requests"], found["errors"], found["backend"]) == (0, 0, 0, "demo")
    assert found["isolation"] == ("uid" if os.getuid() == 0 else "none")


def test_the_demo_puts_agents_to_sleep_wakes_them_and_their_memory_is_whole(hive: HiveUp) -> None:
    hive.start("--demo", "--exit-after", "30", "--json")
    assert hive.process is not None
    out, _ = hive.process.communicate()
    assert hive.process.returncode == 0, hive.said()
    found = json.loads(out)
    assert found["errors"] == 0, hive.said()
    assert found["agents"] == 3
    assert found["pauses"] > 0, hive.said()
    assert found["wakes"] > 0, hive.said()
    assert found["requests"] >= 3
    assert found["tokens_out"] > 0
    assert "librarian" in hive.said(), "the plain table"


# --- what is wrong before anything runs --------------------------------------------------------------------------


def refused(*flags: str, path: str | None = None, state: Path) -> tuple[int, str]:
    """Exit code and message of a `hive up` that must not come up, having left nothing behind."""
    environment = os.environ if path is None else {**os.environ, "PATH": path}
    command = [*HIVE, "up", "--state-dir", str(state), *flags]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert not state.exists(), "something was left behind"
    assert ran.stdout == ""
    assert "Traceback" not in ran.stderr
    return ran.returncode, ran.stderr


@pytest.mark.wide
def test_with_redis_url_no_redis_of_its_own_is_started_or_needed(
    hive: HiveUp, redis_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REDIS_URL", f"unix://nobody:s3cret@{redis_server.socket}")
    monkeypatch.setenv("PATH", "/nonexistent")
    process = hive.start().process
    assert process is not None

    def problems() -> list[str]:
        with contextlib.suppress(HiveError, OSError):
            health: dict[str, Any] = hive.client.get("/api/health")
            return health["problems"] if health["proxy"]["connected"] else []
        return []

    until(lambda: problems() or hive.ended(), hive.said)
    assert process.stdout is not None
    said = next(line for line in process.stdout if "REDIS_URL" in line)
    assert f"{redis_server.socket} (REDIS_URL); none is started here" in said
    assert any("invalid username-password pair" in problem for problem in problems()), "why it is of no use"
    assert "redis" not in hive.children()
    hive.send(signal.SIGINT)
    rest = process.communicate()[0]
    assert process.returncode == 0
    assert "redis_down" in hive.said()
    assert "s3cret" not in hive.said() + said + rest


def test_without_redis_it_says_what_to_type(passable: Path) -> None:
    code, said = refused(path="/nonexistent", state=passable / "state")
    assert code == 5
    assert "redis-server is not installed" in said
    assert "apt-get install" in said


def test_a_backend_that_does_not_answer_is_said(passable: Path) -> None:
    code, said = refused("--backend", "http://127.0.0.1:9", state=passable / "state")
    assert code == 5
    assert "127.0.0.1:9" in said


def test_something_that_is_no_address_is_a_usage_error(passable: Path) -> None:
    assert refused("--backend", "ftp://x", state=passable / "state")[0] == 2


def test_a_bad_configuration_names_file_and_line(passable: Path) -> None:
    config = passable / "hive.conf"
    config.write_text("[proxy]\nprot = 1\n")
    code, said = refused("--config", str(config), state=passable / "state")
    assert code == 2
    assert f"{config}:2" in said
    assert "port" in said


@pytest.mark.parametrize("seconds", ["nan", "inf", "0", "-1"])
def test_seconds_that_are_none_are_a_usage_error(passable: Path, seconds: str) -> None:
    """`--exit-after nan` came up and ended at once."""
    command = [*HIVE, "up", "--state-dir", str(passable / "s"), "--backend", "demo", "--exit-after", seconds]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "--exit-after" in done.stderr
    assert not (passable / "s").exists()


def test_a_state_directory_that_is_a_file_is_a_clear_error(passable: Path) -> None:
    state = passable / "state"
    state.write_text("mine")
    ran = subprocess.run(
        [*HIVE, "up", "--state-dir", str(state), "--backend", "demo"], capture_output=True, text=True, check=False
    )
    assert ran.returncode in (4, 5)
    assert str(state) in ran.stderr
    assert "Traceback" not in ran.stderr
    assert state.read_text() == "mine"


@pytest.mark.root
@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
@pytest.mark.parametrize("room_kib", [0, pytest.param(64, marks=pytest.mark.wide)])
def test_a_full_disk_is_said_and_nothing_stays_running(small_disk: Path, room_kib: int) -> None:
    """Full at once, and full after the first files: the process that meets it first says so."""
    state = small_disk / "state"
    state.mkdir(mode=0o711)
    (small_disk / "room").write_bytes(b"x" * (room_kib * 1024))
    with contextlib.suppress(OSError), (small_disk / "filler").open("wb") as filler:
        while True:
            filler.write(b"x" * 4096)
            filler.flush()
    (small_disk / "room").unlink()
    ran = subprocess.run(
        [*HIVE, "up", "--state-dir", str(state), "--backend", "demo", "--port", "0", "--ingress-port", "0"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 5, ran.stderr
    assert re.search("No space left|is full", ran.stderr)
    assert "Traceback" not in ran.stderr
    assert HiveUp(state).processes() == []
    assert not runtime_dir(state, 0, os.environ).exists()
