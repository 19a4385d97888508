"""A Docker engine for tests: the one at /run/docker.sock if it answers, else a private `dockerd`.

A private one has its own data, state, socket and pid file under a temporary directory, makes no bridge and writes no
firewall rule, and is ended by its pid. Its image is made on the spot from busybox-static: no registry is asked.
"""

from __future__ import annotations

import atexit
import contextlib
import http.client
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from hive.host.cgroup import state_label
from hive.host.process import spawn

SYSTEM_SOCKET = Path("/run/docker.sock")
IMAGE = "hive-test:1"
BUSYBOX = Path("/bin/busybox")
APPLETS = ("sh", "sleep", "cat", "ls", "id", "env", "ps", "nc", "echo", "kill", "touch", "wget", "httpd", "seq", "stat")
HOST_PROGRAMS = "/usr:/usr:ro"
"""A mount that gives a container of `IMAGE` the host's programs, /usr/bin/python3 and socat among them."""
STARTS_WITHIN_S = 30.0


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout_s: float) -> None:
        super().__init__("docker", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


class DockerEngine:
    """An engine that answers at `socket` and has `image`. Its calls are what a human does with `docker`."""

    image = IMAGE

    def __init__(self, path: Path) -> None:
        self.socket = path

    def call(self, method: str, target: str, body: object = None, *, timeout_s: float = 30) -> tuple[int, Any]:
        """Status and decoded answer (bytes where it is no JSON)."""
        connection = _Connection(self.socket, timeout_s)
        raw = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        kind = "application/x-tar" if isinstance(body, bytes) else "application/json"
        try:
            connection.request(method, f"/v1.41{target}", raw, {} if raw is None else {"Content-Type": kind})
            answer = connection.getresponse()
            content = answer.read()
        finally:
            connection.close()
        try:
            return answer.status, json.loads(content)
        except ValueError:
            return answer.status, content

    def do(self, container: str, verb: str) -> int:
        """`docker pause`, `unpause`, `stop`, `restart`, `kill`; the status."""
        return self.call("POST", f"/containers/{container}/{verb}")[0]

    def state(self, container: str) -> dict[str, Any] | None:
        """`docker inspect`; None where there is no such container."""
        status, told = self.call("GET", f"/containers/{container}/json")
        return told["State"] if status == 200 else None

    def inspect(self, container: str) -> dict[str, Any]:
        status, told = self.call("GET", f"/containers/{container}/json")
        assert status == 200, told
        found: dict[str, Any] = told
        return found

    def containers(self, state: Path) -> list[dict[str, Any]]:
        """Those of the Hive with this state directory: others may use the engine too."""
        return self._listed("/containers/json?all=1&", f"hive.state={state_label(state)}")

    def networks(self, state: Path) -> list[dict[str, Any]]:
        return self._listed("/networks?", f"hive.state={state_label(state)}")

    def _listed(self, target: str, label: str) -> list[dict[str, Any]]:
        wanted = urlencode({"filters": json.dumps({"label": [label]})})
        found: list[dict[str, Any]] = self.call("GET", f"{target}{wanted}")[1]
        return found

    def answers(self) -> bool:
        try:
            return self.call("GET", "/version", timeout_s=5)[0] == 200
        except (OSError, http.client.HTTPException):
            return False

    def make_image(self) -> None:
        if self.call("GET", f"/images/{IMAGE}/json")[0] == 200:
            return
        if not BUSYBOX.exists():
            pytest.skip("busybox-static is not installed: no image can be made")
        name, _, tag = IMAGE.partition(":")
        status, told = self.call("POST", f"/images/create?fromSrc=-&repo={name}&tag={tag}", _busybox())
        assert status == 200, told

    def clear(self, state: Path) -> None:
        """Removes what a test left of containers and networks."""
        for container in self.containers(state):
            self.call("DELETE", f"/containers/{container['Id']}?force=1&v=1")
        for network in self.networks(state):
            self.call("DELETE", f"/networks/{network['Id']}")


def _busybox() -> bytes:
    """A root file system as a tar archive."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        for directory in ("bin", "tmp", "etc", "proc", "dev", "run", "usr"):
            entry = tarfile.TarInfo(directory)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(entry)
        archive.add(BUSYBOX, "bin/busybox")
        links = {f"bin/{applet}": "busybox" for applet in APPLETS}
        for name, target in {**links, "lib": "usr/lib", "lib64": "usr/lib64"}.items():
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = tarfile.SYMTYPE, target
            archive.addfile(entry)
    return content.getvalue()


class PrivateEngine(DockerEngine):
    """A `dockerd` of the tests' own. Its containers survive its death (live-restore), as operators should have it.

    `own_network`: it and its containers live in a network namespace of their own, where it may write firewall rules:
    containers reach each other and published ports work, whatever the firewall of this machine says.
    """

    def __init__(self, *, own_network: bool = False) -> None:
        self._own_network = own_network
        self._directory = Path(tempfile.mkdtemp(prefix="hive-docker-"))
        super().__init__(self._directory / "docker.sock")
        self._process: subprocess.Popen[bytes] | None = None
        self._driver = ""

    @property
    def log(self) -> str:
        return (self._directory / "dockerd.log").read_text(errors="replace")

    def start(self) -> None:
        """Returns when it answers. overlay2 needs a file system that can carry it, vfs none."""
        drivers = [self._driver] if self._driver else ["overlay2", "vfs"]
        for driver in drivers:
            self._start(driver)
            if self._wait():
                self._driver = driver
                return
            self.stop()
        raise AssertionError(f"dockerd did not start:\n{self.log[-3000:]}")

    def _start(self, driver: str) -> None:
        here = self._directory
        command = [
            "dockerd",
            "--data-root",
            f"{here}/data",
            "--exec-root",
            f"{here}/exec",
            "-H",
            f"unix://{self.socket}",
        ]
        command += ["--pidfile", f"{here}/pid", "--storage-driver", driver, "--bridge", "none", "--live-restore"]
        if self._own_network:
            command = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh", *command]
        else:
            command += ["--iptables=false", "--ip6tables=false", "--ip-forward=false", "--ip-masq=false"]
            command += ["--userland-proxy=false"]
        command += [
            "--containerd-namespace",
            f"hive-test-{os.getpid()}",
            "--log-level",
            "warn",
        ]
        with open(here / "dockerd.log", "ab") as log:
            self._process = spawn(command, env=dict(os.environ), stdout_fd=log.fileno(), pdeathsig=signal.SIGTERM)

    def _wait(self) -> bool:
        assert self._process is not None
        until = time.monotonic() + STARTS_WITHIN_S
        while time.monotonic() < until and self._process.poll() is None:
            if self.answers():
                return True
            time.sleep(0.05)
        return False

    @property
    def network(self) -> Path:
        """The network namespace the daemon lives in."""
        assert self._process is not None
        return Path(f"/proc/{self._process.pid}/ns/net")

    def send(self, signum: int) -> None:
        """A signal to the daemon: SIGSTOP makes it hang, SIGCONT ends that."""
        assert self._process is not None
        self._process.send_signal(signum)

    def kill(self) -> None:
        """kill -9; its containers go on."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """In order; its containers go on."""
        self._end(signal.SIGTERM)

    def _end(self, signum: int) -> None:
        if self._process is None:
            return
        self._process.send_signal(signal.SIGCONT)
        self._process.send_signal(signum)
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None
        # A killed one leaves them, and the next takes a zombie that nobody has reaped yet for its containerd.
        for left in ("pid", "exec/containerd/containerd.pid"):
            (self._directory / left).unlink(missing_ok=True)

    def remove(self) -> None:
        """Ends it and all of its containers, and deletes all it had."""
        if self._process is None and self._driver:  # a test that failed left it so; its containers outlive it
            self.start()
        with contextlib.suppress(OSError, http.client.HTTPException):
            for container in self._listed("/containers/json?all=1&", "hive.agent"):
                self.call("DELETE", f"/containers/{container['Id']}?force=1&v=1")
            for network in self._listed("/networks?", "hive.agent"):
                self.call("DELETE", f"/networks/{network['Id']}")
        self.stop()
        mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
        for mount in sorted((path for path in mounts if path.startswith(f"{self._directory}/")), reverse=True):
            subprocess.run(["umount", "--lazy", mount], check=False)
        shutil.rmtree(self._directory, ignore_errors=True)


def _skip_where_none_can_start() -> None:
    if shutil.which("dockerd") is None:
        pytest.skip("no Docker engine: dockerd is not installed (apt-get install docker.io)")
    if os.geteuid() != 0:
        pytest.skip("no Docker engine: dockerd needs root")


@contextlib.contextmanager
def private(*, own_network: bool = False) -> Iterator[PrivateEngine]:
    """One that may be killed; `own_network` as for PrivateEngine."""
    _skip_where_none_can_start()
    engine = PrivateEngine(own_network=own_network)
    try:
        engine.start()
        engine.make_image()
        yield engine
    finally:
        engine.remove()


@cache
def shared() -> DockerEngine:
    """The one for all tests of this run; ended with it."""
    system = DockerEngine(SYSTEM_SOCKET)
    if system.answers():
        system.make_image()
        return system
    stack = contextlib.ExitStack()
    atexit.register(stack.close)
    return stack.enter_context(private())
