"""A stand-in for ComfyUI and the runner before it, as processes of a test."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.runner.comfy_workflows import workflow

FAKE = Path(__file__).parents[1] / "fakes" / "fake_comfyui.py"
RUNNER = Path(sys.executable).with_name("hive-runner")


class _AtSocket(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=30)
        self._at = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(60)
        self.sock.connect(str(self._at))


class ComfyBox:
    """A stand-in at a port, a directory of workflows, and a runner at a socket."""

    def __init__(self, directory: Path, *flags: str) -> None:
        self.log, self.socket = directory / "log", directory / "s.sock"
        self.workflows = directory / "workflows"
        self.workflows.mkdir()
        (self.workflows / "plain.json").write_text(workflow())
        self._directory, self._flags = directory, flags
        self.port = 0
        self._calls: list[http.client.HTTPConnection] = []
        self.comfy = self.start_comfy()
        self.runner: subprocess.Popen[bytes] | None = None

    def start_comfy(self) -> subprocess.Popen[bytes]:
        """Starts it, at the port that it had before."""
        port_file = self._directory / "port"
        port_file.unlink(missing_ok=True)
        words = ["--port-file", str(port_file), "--log", str(self.log), "--port", str(self.port), *self._flags]
        self.comfy = subprocess.Popen([sys.executable, "-P", str(FAKE), *words])
        wait_until(port_file.exists)
        self.port = int(port_file.read_text())
        return self.comfy

    def end_comfy(self) -> None:
        self.comfy.kill()
        self.comfy.wait()

    def start(self, *, serves: bool = True) -> subprocess.Popen[bytes]:
        """Starts the runner, and waits until it serves."""
        words = ["comfyui", "--socket", str(self.socket), "--name", "comfyui", "--workflows", str(self.workflows)]
        with (self._directory / "runner.log").open("ab") as file:
            self.runner = subprocess.Popen([RUNNER, *words, "--url", f"http://127.0.0.1:{self.port}"], stderr=file)
        if serves:
            wait_until(lambda: self.socket.exists() and self.ask("GET", "/health")[0] == 200)
        return self.runner

    def said(self) -> str:
        """The runner's log."""
        return (self._directory / "runner.log").read_text()

    def close(self) -> None:
        for call in self._calls:
            call.close()
        for process in (self.runner, self.comfy):
            if process is not None and process.poll() is None:
                process.kill()
                process.wait()

    def end_runner(self) -> int:
        assert self.runner is not None
        self.runner.send_signal(signal.SIGTERM)
        return self.runner.wait(60)

    def call(self, body: dict[str, Any], request_id: str = "req-1") -> http.client.HTTPConnection:
        """Sends a request for images; the answer is not awaited."""
        connection = _AtSocket(self.socket)
        self._calls.append(connection)
        told = {"model": "comfy/plain", "prompt": "a bee"} | body
        headers = {"Content-Type": "application/json", "X-Request-Id": request_id}
        connection.request("POST", "/v1/images/generations", json.dumps(told).encode(), headers)
        return connection

    def generate(self, request_id: str = "req-1", **body: Any) -> tuple[int, dict[str, Any], str]:
        """Status, answer and cost of a request for images."""
        connection = self.call(body, request_id)
        answer = connection.getresponse()
        data = answer.read()
        connection.close()
        return answer.status, json.loads(data), answer.getheader("x-hive-cost", "")

    def ask(self, method: str, path: str) -> tuple[int, Any]:
        connection = _AtSocket(self.socket)
        try:
            connection.request(method, path)
            answer = connection.getresponse()
            data = answer.read()
        except ConnectionError:
            return 0, None
        finally:
            connection.close()
        return answer.status, json.loads(data) if data.startswith(b"{") else data.decode()

    def at_comfy(self, path: str) -> Any:
        """The stand-in's answer to `GET path`."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        connection.request("GET", path)
        found = json.loads(connection.getresponse().read())
        connection.close()
        return found

    def asked(self) -> list[str]:
        """Every request that came to the stand-in: method, path, body."""
        return self.log.read_text().splitlines()


def wait_until(is_so: Any, within_s: float = 30) -> None:
    """Raises AssertionError where it is never so."""
    until = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < until, "it is not so in time"
        time.sleep(0.02)


@contextmanager
def served(directory: Path, *flags: str) -> Iterator[ComfyBox]:
    """A stand-in with a runner that serves; both are ended."""
    made = ComfyBox(directory, *flags)
    try:
        made.start()
        yield made
    finally:
        made.close()
