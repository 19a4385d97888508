"""A real Prometheus with what Hive ships for it, and its promtool. Skips where Debian's package is not installed."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.ports import free_port

SHIPPED = Path(__file__).parents[2] / "conf/observability"
TOKEN_PATH = "/etc/prometheus/hive-token"
TARGET = "127.0.0.1:3000"


def program(name: str) -> str:
    """The path of `prometheus` or `promtool`."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed: apt-get install prometheus")
    return found


def promtool(*words: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([program("promtool"), *words], input=stdin, capture_output=True, check=False, timeout=120)


def rules() -> dict[str, dict[str, Any]]:
    """Alert → its rule, as alerts.yml has it."""
    groups = yaml.safe_load((SHIPPED / "alerts.yml").read_text())["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"]}


def placed(directory: Path, *, token: Path, target: str = TARGET, interval: str = "15s", more: str = "") -> Path:
    """The shipped configuration in a directory of the test's, with its rules; the path of prometheus.yml there.

    `more`: further scrape jobs."""
    config = (SHIPPED / "prometheus.yml").read_text()
    for shipped, here in ((TOKEN_PATH, str(token)), (TARGET, target), ("15s", interval)):
        assert shipped in config
        config = config.replace(shipped, here)
    shutil.copy(SHIPPED / "alerts.yml", directory)
    path = directory / "prometheus.yml"
    path.write_text(config + more)
    return path


class PrometheusServer:
    """One that runs. `ask(expression)`: labels of each series → its value now."""

    def __init__(self, port: int) -> None:
        self._api = httpx.Client(base_url=f"http://127.0.0.1:{port}/api/v1", trust_env=False, timeout=20)

    def close(self) -> None:
        self._api.close()

    def is_ready(self) -> bool:
        try:
            return self._api.get("/query", params={"query": "1"}).status_code == 200
        except httpx.TransportError:
            return False

    def ask(self, expression: str) -> list[tuple[dict[str, str], float]]:
        answer = self._api.get("/query", params={"query": expression}).json()
        assert answer["status"] == "success", f"{expression}: {answer}"
        return [(one["metric"], float(one["value"][1])) for one in answer["data"]["result"]]

    def rules(self) -> dict[str, dict[str, Any]]:
        """Alert → how its rule is."""
        groups = self._api.get("/rules").json()["data"]["groups"]
        return {rule["name"]: rule for group in groups for rule in group["rules"]}

    def until(self, is_so: Callable[[], Any], what: object) -> Any:
        """Waits for what some scrapes bring. `what`: what is missing, as it is in the end."""
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline:
            if found := is_so():
                return found
            time.sleep(0.2)
        raise AssertionError(f"not within 90 s: {what}")


@contextmanager
def prometheus(directory: Path, config: Path) -> Iterator[PrometheusServer]:
    """Runs one that keeps its series in `directory`."""
    port = free_port()
    command = [program("prometheus"), f"--config.file={config}", f"--storage.tsdb.path={directory / 'series'}"]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]
    with (directory / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    server = PrometheusServer(port)
    try:
        server.until(server.is_ready, "Prometheus answers")
        yield server
    finally:
        server.close()
        process.kill()
        process.wait()
