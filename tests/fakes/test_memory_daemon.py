"""The services in memory answer what the API's description says, and no field more or less."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.control.described import ROWS, check_answer

FAKE = Path(__file__).with_name("memory_daemon.py")
ASKED: list[tuple[str, str, dict[str, Any], int]] = [
    ("health", "/api/health", {}, 200),
    ("list_agents", "/api/agents", {}, 200),
    ("list_agents", "/api/agents", {"limit": 1}, 200),
    ("list_agents", "/api/agents", {"short": 1}, 200),
    ("list_agents", "/api/agents", {"since": ""}, 200),
    ("show", "/api/agents/alice", {}, 200),
    ("show", "/api/agents/nobody", {}, 404),
    ("messages", "/api/agents/alice/messages", {}, 200),
    ("responses", "/api/agents/alice/responses", {}, 200),
    ("schedules", "/api/agents/alice/schedules", {}, 200),
    ("logs", "/api/agents/alice/logs", {}, 200),
    ("tokens", "/api/agents/alice/tokens", {}, 200),
    ("agent_usage", "/api/agents/alice/usage", {}, 200),
    *(("usage", "/api/usage", {"by": by}, 200) for by in ("agent", "tenant", "model", "backend", "hour")),
    ("audit", "/api/audit", {}, 200),
    ("inference", "/api/system/inference", {}, 200),
    ("inference_stats", "/api/system/inference/stats", {}, 200),
    ("backends", "/api/system/backends", {}, 200),
    ("backend_log", "/api/system/backends/logs", {}, 200),
    ("access", "/api/system/access", {}, 200),
    ("memory", "/api/system/memory", {}, 200),
    ("gpus", "/api/system/gpus", {}, 200),
    ("models", "/api/models", {}, 200),
    ("model", "/api/models/fast", {}, 200),
    ("route", "/api/models/route", {"model": "llama3.2"}, 200),
    ("prompts", "/api/prompts", {}, 200),
    ("queue", "/api/queue", {}, 200),
    ("request", "/api/requests/p1-0", {}, 200),
    ("request", "/api/requests/p1-1", {}, 200),
    ("config", "/api/config", {}, 200),
    ("jobs", "/api/jobs", {}, 200),
    ("list_tokens", "/api/tokens", {}, 200),
    ("list_tables", "/api/db/tables", {}, 200),
]


@pytest.fixture(scope="module")
def asking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    socket = tmp_path_factory.mktemp("d") / "hive.sock"
    with subprocess.Popen([sys.executable, str(FAKE), str(socket)], stdout=subprocess.PIPE) as fake:
        assert fake.stdout is not None
        assert fake.stdout.readline() == b"ready\n"
        transport = httpx.HTTPTransport(uds=str(socket), verify=False, trust_env=False)
        with httpx.Client(transport=transport, base_url="http://hive", trust_env=False, timeout=20) as client:
            yield client
        fake.kill()


@pytest.mark.parametrize(("name", "path", "query", "status"), ASKED)
def test_an_answer_is_as_it_is_described(
    asking: httpx.Client, name: str, path: str, query: dict[str, Any], status: int
) -> None:
    """Its health had no `usage`, its short agents no depth: what the command line made of them was tested in vain."""
    answer = asking.get(path, params=query)
    assert answer.status_code == status, answer.text
    [row] = [row for row in ROWS if row.name == name]
    check_answer(row, answer)


@pytest.mark.parametrize(("name", "body"), [("switch", {"backend": "vllm"}), ("pull_model", {"model": "llama3.2"})])
def test_a_job_is_as_it_is_described(asking: httpx.Client, name: str, body: dict[str, Any]) -> None:
    [row] = [row for row in ROWS if row.name == name]
    answer = asking.post(row.path, json=body)
    assert answer.status_code == 202, answer.text
    check_answer(row, answer)
