"""A whole Hive for a test: `hive up` on a state directory of its own, against a real or imitated backend."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import psutil

from hive.client.client import Client
from hive.host.process import children_of, words_of
from tests.ports import free_port

PYTHON = "/usr/bin/python3"
PROCESSES = ("redis", "sandbox", "daemon", "proxy")
UP = b" is up; Ctrl-C ends it"
FAST = """
[proxy]
window_requests = 1000000
[sleep]
minimum_awake_s = 0
check_s = 0.5
[inference]
auto_sleep_enabled = {auto_sleep}
auto_sleep_idle_seconds = 1
"""


def until(condition: Callable[[], Any], *, within_s: float, what: str) -> Any:
    """Waits until `condition()` is truthy and returns it; an exception in it counts as no. Fails in the end: after a
    minute at least, as a machine that runs four tests on two cores may stand still for seconds."""
    within_s = max(within_s, 60)
    deadline = time.monotonic() + within_s
    last: object = None
    while time.monotonic() < deadline:
        try:
            if got := condition():
                return got
        except Exception as error:  # the process asked may be the one that was just killed
            last = error
        time.sleep(0.02)
    raise AssertionError(f"not within {within_s:g} s: {what} (last: {last!r})")


class Stack:
    """One `hive up`. `url`: the backend, None for the demo backend."""

    def __init__(self, base: Path, *, url: str | None, config: str, up_within_s: float = 30) -> None:
        self.state = base / "state"
        self.programs = base / "programs"
        self._url = url
        self._up_within_s = up_within_s
        self._config = base / "hive.conf"
        self._config.write_text(config)
        self._log = base / "up.log"
        self._ports = [f"--{name}={free_port()}" for name in ("port", "ingress-port", "api-port")]
        """Its own: a box that is installed at the same time has those of the settings."""
        self.process: subprocess.Popen[bytes] | None = None
        self._ids: dict[str, str] = {}
        self._runtime = ""

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def start(self) -> None:
        """Returns when all its processes answer and the proxy is connected: its own, an earlier Hive may be ending."""
        command = [sys.executable, "-m", "hive", "up", "--state-dir", str(self.state), "--config", str(self._config)]
        command += ["--backend", self._url or "demo", *self._ports]
        with self._log.open("ab") as log:
            before = log.tell()
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        until(
            lambda: self._alive() and UP in self._log.read_bytes()[before:] and self.health()["proxy"]["connected"],
            within_s=self._up_within_s,
            what=f"up\n{self.log[-3000:]}",
        )
        self._runtime = self.health()["runtime_dir"]

    def rewrite(self, config: str) -> None:
        """Another hive.conf, for the next start."""
        self._config.write_text(FAST.format(auto_sleep="false") + config)

    def servers(self) -> set[int]:
        """Pids of the llama-servers of its pool, also after its end: other tests have theirs at the same time."""
        found = set()
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                words = process.cmdline()
                if words[:1] and words[0].endswith("llama-server") and any(self._runtime in word for word in words):
                    found.add(int(process.pid))
        return found

    def _alive(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, f"hive up ended: {self.log[-3000:]}"
        return True

    def stop(self) -> int:
        """SIGTERM, and its exit code."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)

    def kill_up(self) -> None:
        """kill -9 of `hive up` alone; its children end by themselves."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def pid_of(self, name: str) -> int:
        """Pid of one of PROCESSES. Looks three times: the kernel may pass over a child while another one ends."""
        assert self.process is not None
        pid = self.process.pid
        for child in chain(children_of(pid), children_of(pid), children_of(pid)):
            words = words_of(child)
            if name == "redis" and words and "redis-server" in words[0]:
                return child
            if "hive" in words and words[words.index("hive") + 1] == name:
                return child
        raise LookupError(f"no {name} now")

    def kill(self, name: str) -> int:
        """kill -9 of one of PROCESSES; its pid."""
        pid: int = until(lambda: self.pid_of(name), within_s=10, what=f"a {name} to kill")
        os.kill(pid, signal.SIGKILL)
        return pid

    def restart(self, *names: str) -> None:
        """kill -9 of these of PROCESSES, all before any is waited for; returns when there are others and all is well.

        That somebody is connected says nothing until there is another process: it is still true of the killed one.
        """
        dead = {name: self.kill(name) for name in names}
        for name, pid in dead.items():
            self.wait_for_next(name, pid)

    def wait_for_next(self, name: str, dead: int) -> None:
        """Returns when there is another process than the dead one, and each is connected with the others."""
        until(
            lambda: self.pid_of(name) != dead and self.is_whole(),
            within_s=self._up_within_s,
            what=f"another {name} than that of pid {dead}\n{self.log[-3000:]}",
        )

    def is_whole(self) -> bool:
        """Whether the daemon of now says that all the others are connected."""
        health = self.health()
        is_connected = health["proxy"]["connected"] and health["helper"]["connected"] and health["redis"]["up"]
        return bool(is_connected and health["pid"] == self.pid_of("daemon"))

    def client(self) -> Client:
        return Client(Path((self.state / "socket").read_text().strip()))

    def get(self, target: str, **query: Any) -> Any:
        return self.client().get(target, **query)

    def post(self, target: str, body: dict[str, Any] | None = None) -> Any:
        return self.client().post(target, body or {})

    def put_config(self, changes: dict[str, Any]) -> Any:
        """Changes settings while it runs."""
        return self.client().put("/api/config", changes)

    def health(self) -> Any:
        return self.get("/api/health")

    def create(self, name: str, program: str, *arguments: str, start: bool = True, **spec: Any) -> Any:
        """Creates an agent that runs this one of `programs/` with the system's Python, and starts it."""
        self.post("/api/agents", {"name": name, "command": [PYTHON, str(self.programs / program), *arguments], **spec})
        if start:
            self.post(f"/api/agents/{name}/start")
        return self.get(f"/api/agents/{name}")

    def agent_log(self, name: str) -> str:
        agent = self.get(f"/api/agents/{name}")["id"]
        path = self.state / "logs" / f"{agent}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def agent_lines_since(self, name: str, *, last_bytes: int = 4096) -> list[dict[str, Any]]:
        """`agent_lines` of the log's end only: cheap enough to be asked every few milliseconds."""
        if name not in self._ids:
            self._ids[name] = self.get(f"/api/agents/{name}")["id"]
        with contextlib.suppress(FileNotFoundError), (self.state / "logs" / f"{self._ids[name]}.log").open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - last_bytes))
            return _json_lines(log.read().decode(errors="replace"))
        return []

    def agent_lines(self, name: str) -> list[dict[str, Any]]:
        """Output of the agent, one JSON object a line; a line being written is passed over."""
        return _json_lines(self.agent_log(name))


def _json_lines(text: str) -> list[dict[str, Any]]:
    lines = []
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            lines.append(json.loads(line))
    return [line for line in lines if isinstance(line, dict)]


@contextlib.contextmanager
def stack(
    *, url: str | None = None, auto_sleep: bool = False, config: str = "", up_within_s: float = 30
) -> Iterator[Stack]:
    """A running Hive, ended at the end. On a failed test its log's end is printed.

    Not in pytest's tmp_path: as root each agent has a uid of its own and must be able to pass to its home.
    """
    base = Path(tempfile.mkdtemp(prefix="hive-test-", dir="/var/tmp"))
    base.chmod(0o711)
    shutil.copytree(Path(__file__).parent / "programs", base / "programs")
    for path in (base / "programs", *(base / "programs").iterdir()):
        path.chmod(0o755)
    config = FAST.format(auto_sleep=str(auto_sleep).lower()) + config
    hive = Stack(base, url=url, config=config, up_within_s=up_within_s)
    try:
        hive.start()
        yield hive
    except BaseException:
        print(hive.log[-6000:])
        raise
    finally:
        try:
            if hive.process is not None and hive.process.poll() is None:
                hive.stop()
        except subprocess.TimeoutExpired:
            hive.kill_up()
            raise
        finally:
            shutil.rmtree(base, ignore_errors=True)
