"""A real vLLM Router before two vLLMs without a model (tests/fakes), as its unit in conf/cluster starts it."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster.loopback import machines
from tests.cluster.namespaces import Host, wait_for
from tests.cluster.units import CONF
from tests.ports import free_port

FAKE = Path(__file__).parents[1] / "fakes" / "fake_backend.py"
WORKER_PORT = 8001
TOKEN_S = 0.02


def program() -> Path:
    """The program that tests/tools/setup_router.sh left; skips the test without."""
    path = Path(os.environ.get("HIVE_CI_CACHE", "/var/cache/hive-ci")) / "router" / "venv" / "bin" / "vllm-router"
    if not os.access(path, os.X_OK):
        pytest.skip("no vLLM Router: run tests/tools/setup_router.sh")
    return path


class Worker:
    """A vLLM that `kill` ends and `start` begins."""

    def __init__(self, host: Host, log: Path) -> None:
        self.host = host
        self.port = host.port(WORKER_PORT)
        self._log = log

    @property
    def url(self) -> str:
        return f"http://{self.host.address}:{self.port}"

    def start(self) -> None:
        words = [sys.executable, str(FAKE), "--kind", "vllm", "--host", self.host.address, "--port", str(self.port)]
        self.host.start([*words, "--token-delay", str(TOKEN_S), "--tokens", "100000"], self._log)
        wait_for(lambda: httpx.get(f"{self.url}/health", trust_env=False).is_success, 60, "the worker listens")

    def kill(self) -> None:
        assert self.host.kill(str(FAKE)), "nothing to kill"

    def stats(self) -> dict[str, Any]:
        found: dict[str, Any] = httpx.get(f"{self.url}/fake/stats", trust_env=False).json()
        return found


class Router:
    """The router on this machine; `workers` are those behind it."""

    def __init__(self, command: list[str], url: str, workers: list[Worker], log: Path) -> None:
        self.url = url
        self.workers = workers
        self._command = command
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns when it has both workers."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                ["setpriv", "--pdeathsig=KILL", "--", *self._command], stdout=log, stderr=log
            )
        self.wait_for(len(self.workers))

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def healthy(self) -> int:
        answer = httpx.get(f"{self.url}/readiness", trust_env=False, timeout=5)
        return int(answer.json()["healthy_workers"])

    def wait_for(self, healthy: int, within_s: float = 60) -> float:
        return wait_for(lambda: self.healthy() == healthy, within_s, f"{healthy} healthy workers")


@contextmanager
def vllm_router(folder: Path) -> Iterator[Router]:
    """The router on this machine, a worker on each of two hosts."""
    path, port = program(), free_port()
    with machines("a", "b") as both, ExitStack() as made:
        workers = [Worker(host, folder / f"worker-{host.name}.log") for host in both]
        for worker in workers:
            worker.start()
        command = [str(path), *words(port, [worker.url for worker in workers])]
        router = Router(command, f"http://127.0.0.1:{port}", workers, folder / "router.log")
        made.callback(router.kill)
        router.start()
        yield router


def words(port: int, urls: list[str]) -> list[str]:
    """The words of the unit's command line, with ports and workers of the test."""
    text = (CONF / "vllm-router.service").read_text().replace("\\\n", " ")
    line = next(line for line in text.splitlines() if line.startswith("ExecStart="))
    found = shlex.split(line)[1:]
    place = found.index("$WORKERS")
    found[place : place + 1] = urls
    for flag, value in (("--port", port), ("--prometheus-port", free_port())):
        found[found.index(flag) + 1] = str(value)
    return found
