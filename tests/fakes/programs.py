"""Starts the fake backends and the demo backend as real processes for tests, and ends them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

FAKE = Path(__file__).with_name("fake_backend.py")
OLLAMA = Path(__file__).with_name("fake_ollama.py")
DEMO = """
import logging, sys
from pathlib import Path
from hive.demo.server import main
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
socket, rate, watch_fd = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
where = {"socket": Path(socket)} if socket else {"port": 0}
sys.exit(main(**where, tokens_per_s=rate, watch_fd=watch_fd if watch_fd >= 0 else None))
"""


class Program:
    """A running server: `address` is `host:port` or a socket path; `log()` is what it said since it was ready."""

    def __init__(self, process: subprocess.Popen[str], address: str) -> None:
        self.process = process
        self.address = address

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    @property
    def pid(self) -> int:
        return self.process.pid

    def get(self, path: str) -> httpx.Response:
        socket = self.address if self.address.startswith("/") else None
        with httpx.Client(transport=httpx.HTTPTransport(uds=socket, verify=False), trust_env=False) as client:
            return client.get(("http://localhost" if socket else self.url) + path)

    def stats(self) -> dict[str, Any]:
        """The fake backend's own counts."""
        found: dict[str, Any] = self.get("/fake/stats").json()
        return found

    def next_line(self) -> str:
        """Waits for the next line of its output; empty where it has ended."""
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def end(self) -> int:
        """SIGTERM, and its exit code."""
        self.process.terminate()
        return self.process.wait(60)


@contextmanager
def started(command: list[str], **more: Any) -> Iterator[subprocess.Popen[str]]:
    """A process with its stdout readable, gone afterwards whatever happened."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **more) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def fake_backend(kind: str, *flags: str, socket: Path | None = None) -> Iterator[Program]:
    """The fake backend on a free port or on `socket`, with more flags."""
    where = ["--socket", str(socket)] if socket else ["--port", "0"]
    with started([sys.executable, str(FAKE), "--kind", kind, *where, *flags]) as process:
        assert process.stdout is not None
        ready = process.stdout.readline()
        assert ready, f"the fake backend ended with {process.wait(60)}"
        yield Program(process, json.loads(ready)["address"])


@contextmanager
def fake_ollama(*flags: str) -> Iterator[Program]:
    """The stand-in for Ollama's store on a free port, with flags and models."""
    with started([sys.executable, str(OLLAMA), *flags]) as process:
        assert process.stdout is not None
        yield Program(process, json.loads(process.stdout.readline())["address"])


@contextmanager
def demo_backend(*, socket: Path | None = None, rate: float = 2000.0, watch_fd: int = -1) -> Iterator[Program]:
    """The demo backend on a free port or on `socket`, faster than it is for people."""
    command = [sys.executable, "-c", DEMO, str(socket or ""), str(rate), str(watch_fd)]
    with started(command, pass_fds=[watch_fd] if watch_fd >= 0 else []) as process:
        assert process.stdout is not None
        ready = process.stdout.readline()
        assert "demo_backend_ready" in ready, f"the demo backend ended with {process.wait(60)}"
        yield Program(process, ready.strip().rpartition("address=")[2])
