"""GET /v1/capabilities while Hive starts and stops, with a real llama-server: 503 and a time to come again, until what
is told is so."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from hive.client.client import Client
from hive.errors import DependencyDown, RunnerNotReady
from tests.journeys.pool_stack import SERVER_MB, llama_models, pool_config
from tests.journeys.runner_client import RunnerClient
from tests.journeys.stack import Stack, stack, until

pytestmark = [pytest.mark.redis, pytest.mark.engines, pytest.mark.llama]
LOOKS = 10


@pytest.fixture(scope="module")
def hive(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    model = llama_models(tmp_path_factory.mktemp("models"), ("alpha",))["alpha"]
    row = f"[model alpha]\nfile = {model}\ncontext = 4096\nparallel = 1\nvram_mb = {SERVER_MB}\n"
    with stack(config=pool_config(SERVER_MB + 20) + row) as hive:
        yield hive


@pytest.fixture(scope="module")
def client(hive: Stack) -> Iterator[RunnerClient]:
    token = hive.post("/api/tokens", {"name": "safebox", "role": "operator"})["token"]
    with RunnerClient(token, socket=Path(hive.health()["runtime_dir"]) / "runner.sock", every_s=0.2) as client:
        client.execute_model_load({"modelId": "alpha"})
        yield client


def said(client: RunnerClient, path: str = "/v1/capabilities") -> int:
    """The status; each that is not 200 is a 503 that says when to come again."""
    answer = client.http.get(path)
    if answer.status_code != 200:
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_ready"), answer.text
        assert int(answer.headers["retry-after"]) > 0
    return answer.status_code


def servers_of(hive: Stack) -> set[int]:
    """Pids of the llama-server of the model."""
    assert hive.process is not None
    found = set()
    for process in psutil.Process(hive.process.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.name() == "llama-server":
                found.add(process.pid)
    return found


def alpha(client: RunnerClient) -> Any:
    return next(one for one in client.get("/v1/capabilities")["models"]["loaded"] if one["id"] == "alpha")


def test_a_daemon_that_does_not_know_yet_what_is_loaded_is_starting(hive: Stack, client: RunnerClient) -> None:
    """The helper, which knows what servers there are, is stopped before the new daemon can have asked it."""
    before = alpha(client)
    servers = servers_of(hive)
    assert servers
    helper = psutil.Process(hive.pid_of("sandbox"))
    helper.suspend()
    try:
        gone = hive.kill("daemon")
        until(lambda: hive.pid_of("daemon") != gone, within_s=60, what="the next daemon")
        until(lambda: hive.log.count("daemon_ready") > 1 or said(client) == 503, within_s=60, what="it is asked")
        for path in ("/v1/capabilities", "/health"):
            assert {said(client, path) for _ in range(LOOKS)} == {503}
        order = client.post("/v1/models/load", {"modelId": "alpha"})
        assert (order.status_code, order.json()["error"]["code"]) == (503, "not_ready"), "nothing is ordered blindly"
    finally:
        helper.resume()
    until(lambda: said(client) == 200, within_s=60, what="it has started")
    assert alpha(client)["contextLength"] == before["contextLength"], "the first answer is true: the server ran on"
    assert servers_of(hive) == servers


def test_once_it_stops_nothing_is_told_any_more(hive: Stack, client: RunnerClient) -> None:
    statuses: list[int] = []
    asked, token = Client(Path(hive.health()["runtime_dir"]) / "runner.sock"), client.http.headers["authorization"]
    is_looking = threading.Event()

    def look() -> None:
        while statuses[-1:] != [0]:
            try:
                asked._ask("GET", "/v1/capabilities", None, {}, 60, {"Authorization": token})
                statuses.append(200)
            except RunnerNotReady:
                statuses.append(503)
            except DependencyDown:
                statuses.append(0)
            is_looking.set()

    thread = threading.Thread(target=look)
    thread.start()
    assert is_looking.wait(60)
    assert hive.process is not None
    os.kill(hive.process.pid, signal.SIGTERM)
    assert hive.process.wait(60) == 0
    thread.join(60)
    assert (statuses[0], statuses[-1]) == (200, 0), statuses[-5:]
    order = [200, 503, 0]
    assert [order.index(status) for status in statuses] == sorted(order.index(status) for status in statuses)
