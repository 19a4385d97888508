"""A whole Hive that a real Prometheus scrapes: traffic, sleep, a refusal, a still proxy, a killed backend."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import NamedTuple

import httpx
import pytest

from conf.observability.make_dashboard import PANELS
from hive.control import metrics as of_daemon
from hive.control.metrics import exposition, gpu_values
from hive.host.nvml import Nvml
from hive.lifecycle.cache_counts import CacheCounts, PromptTokens
from hive.proxy import metrics as of_proxy
from tests.fakes.fake_nvml import GIB, Gpu, Library, in_place_of
from tests.fakes.programs import Program, fake_ollama
from tests.journeys.sdk import door_of
from tests.journeys.stack import Stack, stack
from tests.observability.prometheus_server import PrometheusServer, placed, program, prometheus, promtool, rules

pytestmark = [pytest.mark.redis, pytest.mark.timeout(300)]
LAYER_BYTES = str(30 << 20)
CONFIG = """[inference]
port = {port}
[pool]
reserve_mb = 0
cpu_mb = 100
patience_normal_s = 0.5
audience_s = 1
[model alpha]
backend = ollama
[model beta]
backend = ollama
[daemon]
backend_check_s = 0.2
[tenant acme]
tokens_per_day = 100000
"""
PLAYED = """
  - job_name: played
    static_configs:
      - targets: ["{target}"]
"""
INTERVAL = "2s"
"""A proxy that does not answer costs a scrape 1 s, and Prometheus gives a scrape no more than its interval."""


class Watched(NamedTuple):
    hive: Stack
    server: PrometheusServer
    backend: Program
    token: str
    url: str

    def scrape(self, path: str = "/metrics") -> httpx.Response:
        head = {"authorization": f"Bearer {self.token}"}
        return httpx.get(f"{self.url}{path}", headers=head, trust_env=False, timeout=20)

    def up(self, part: str) -> float | None:
        found = self.server.ask(f'hive_up{{part="{part}"}}')
        return found[0][1] if found else None


class PlayedExposition(BaseHTTPRequestHandler):
    """Metrics, in Hive's own words, of what this box has none of: a GPU, and a server that tells what it reused."""

    def do_GET(self) -> None:
        cache = CacheCounts()
        cache.by_model["alpha"] = PromptTokens(2, 1, 100, 50)
        with in_place_of(Library(Gpu(used=GIB, busy=25))) as api:
            body = exposition({**gpu_values(Nvml(lambda: api).look()), **cache.metrics()})
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture(scope="module")
def played() -> Iterator[str]:
    """The address at which it is told."""
    with ThreadingHTTPServer(("127.0.0.1", 0), PlayedExposition) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory, played: str) -> Iterator[Watched]:
    """A Hive with two models in the memory of one, scraped from its first moment; then traffic, sleep, a refusal."""
    program("prometheus")
    directory = tmp_path_factory.mktemp("prometheus")
    with fake_ollama("--layer-bytes", LAYER_BYTES, "alpha", "beta") as backend:
        config = CONFIG.format(port=backend.address.rpartition(":")[2])
        with stack(url=backend.url, config=config) as hive:
            made = [sys.executable, "-m", "hive", "token", "create", "prometheus", "--role", "scraper"]
            made += ["--state-dir", str(hive.state)]
            token = subprocess.run(made, capture_output=True, text=True, check=True).stdout.strip()
            (directory / "token").write_text(token + "\n")
            target = f"127.0.0.1:{hive.health()['api']['port']}"
            more = PLAYED.format(target=played)
            shipped = placed(directory, token=directory / "token", target=target, interval=INTERVAL, more=more)
            with prometheus(directory, shipped) as server:
                found = Watched(hive, server, backend, token, f"http://{target}")
                server.until(lambda: found.up("proxy") == 1, "it is scraped")
                happen(hive)
                yield found


def happen(hive: Stack) -> None:
    """Traffic, sleep and a wake."""
    hive.create("alice", "idler.py", tenant="acme")
    traffic(hive)
    hive.post("/api/agents/alice/pause")
    hive.post("/api/agents/alice/resume")


def traffic(hive: Stack) -> None:
    """Requests for which a model leaves for another, and a refusal."""
    door = door_of(hive, "alice")
    for model, status in (("alpha", 200), ("beta", 200), ("alpha", 200), ("nobody", 404)):
        asked = {"model": model, "messages": [{"role": "user", "content": "hello"}]}
        assert door.post("/v1/chat/completions", asked).status_code == status


def test_one_scrape_has_the_metrics_of_daemon_and_proxy_and_no_family_twice(watched: Watched) -> None:
    text = watched.scrape().text
    families = re.findall(r"^# TYPE (\w+) ", text, re.MULTILINE)
    assert len(families) == len(set(families))
    assert families == re.findall(r"^# HELP (\w+) ", text, re.MULTILINE)
    assert {row.full_name for row in of_proxy.TABLE} <= {*families}
    assert {"hive_up", "hive_agents"} <= {*families} & {row.full_name for row in of_daemon.TABLE}
    checked = promtool("check", "metrics", stdin=text.encode())
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, b"")


def test_its_token_does_nothing_else(watched: Watched) -> None:
    assert watched.scrape("/api/health").status_code == 403
    assert watched.scrape("/api/agents").json()["code"] == "not_permitted"
    assert httpx.get(f"{watched.url}/metrics", trust_env=False).status_code == 401


def test_each_expression_of_a_panel_brings_a_series(watched: Watched) -> None:
    asked = {query.expression for panels in PANELS.values() for panel in panels for query in panel.queries}

    wrong = "max by (code, severity) (hive_problem)"
    missing: list[str] = []

    def is_all_there() -> bool:
        """A quantile of nothing is no number, and of what was there at the first look nothing is new."""
        traffic(watched.hive)
        told = {each: [value for _, value in watched.server.ask(each) if not math.isnan(value)] for each in asked}
        missing[:] = [each for each, values in told.items() if not values]
        return set(missing) <= {wrong}

    watched.server.until(is_all_there, missing)
    assert missing in ([], [wrong]), "that comes with the next tests"


def test_a_proxy_that_stands_still_is_no_failed_scrape(watched: Watched) -> None:
    pid = watched.hive.pid_of("proxy")
    os.kill(pid, signal.SIGSTOP)
    try:
        watched.server.until(lambda: watched.up("proxy") == 0, "the proxy is down")
        assert watched.up("daemon") == 1
        text = watched.scrape().text
        assert "hive_proxy_" not in text
        assert "hive_agents{" in text
    finally:
        os.kill(pid, signal.SIGCONT)
    watched.server.until(lambda: watched.up("proxy") == 1, "the proxy is up again")
    assert [value for _, value in watched.server.ask('min_over_time(up{job="hive"}[10m])')] == [1.0]


@pytest.mark.wide
def test_a_killed_backend_is_told_and_its_alert_begins(watched: Watched) -> None:
    watched.backend.process.kill()

    def is_pending() -> bool:
        return watched.server.rules()["HiveBackendDown"]["state"] in ("pending", "firing")

    watched.server.until(is_pending, "the alert is pending")
    watched.server.until(lambda: watched.server.ask("max by (code, severity) (hive_problem)"), "the problem is told")
    told = watched.server.rules()
    assert told.keys() == rules().keys()
    assert {rule["health"] for rule in told.values()} == {"ok"}, [rule for rule in told.values() if rule["lastError"]]


@pytest.mark.wide
def test_where_the_daemon_is_gone_prometheus_itself_says_so(watched: Watched) -> None:
    watched.hive.stop()
    watched.server.until(lambda: watched.server.ask('up{job="hive"} == 0'), "it is seen")
    watched.server.until(lambda: watched.server.rules()["HiveDown"]["state"] in ("pending", "firing"), "the alert")
