"""Every route of a live daemon with much to tell: its answers are as they are described, not a field more or less."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import httpx
import pytest

from tests.api.described import ROWS, check, check_answer
from tests.api.populated import OLD_TASK, running

AGENTS = ("awake", "asleep", "stopped", "kept", "refusing", "dying", "elsewhere", "made")
GOLDEN = Path(__file__).parent / "golden"
OLD_JOB = "b" * 12
SPEC = {"name": "new", "command": ["/usr/bin/sleep", "100"], "env": {"KEY": "value"}, "limits": {"pids": 4}}


class Asked(NamedTuple):
    """One request: which row, what its path names, its query and body, what comes of it."""

    handler: str
    path: Mapping[str, str] = MappingProxyType({})
    query: Mapping[str, str | int] = MappingProxyType({})
    body: Any = None
    status: int = 200


AWAKE = {"ref": "awake"}
IN_ORDER = [
    Asked("health"),
    Asked("list_agents"),
    Asked("list_agents", query={"since": ""}),
    Asked("list_agents", query={"limit": 3}),
    Asked("list_agents", query={"limit": 1000, "after": "awake"}),
    Asked("list_agents", query={"limit": 2, "short": 1}),
    *(
        Asked("show", {"ref": name})
        for name in ("awake", "asleep", "stopped", "refusing", "dying", "elsewhere", "made")
    ),
    Asked("create", body=SPEC, status=201),
    Asked("apply", {"ref": "new"}, {"dry_run": 1}, {**SPEC, "idle_s": 60, "port": 9002}),
    Asked("apply", {"ref": "new"}, body={**SPEC, "idle_s": 60, "port": 9002}),
    Asked("apply", {"ref": "newer"}, {"dry_run": 1}, {**SPEC, "name": "newer"}),
    Asked("restart", {"ref": "new"}),
    Asked("pause", {"ref": "new"}, body={"timeout_s": 5, "now": True}),
    Asked("resume", {"ref": "new"}),
    Asked("keep_awake", {"ref": "new"}, body={"for_s": "10m"}),
    Asked("stop", {"ref": "new"}),
    Asked("start", {"ref": "new"}),
    Asked("logs", {"ref": "new"}),
    Asked("tokens", {"ref": "new"}),
    Asked("agent_events", {"ref": "new"}),
    Asked("remove", {"ref": "new"}),
    Asked("create", body=SPEC, status=201),
    Asked("remove_many", body={"agents": ["new", "nobody"]}),
    *(Asked("agent_usage", AWAKE, {"period": period}) for period in ("1h", "30d")),
    Asked("messages", {"ref": "refusing"}),
    Asked("messages", {"ref": "stopped"}),
    Asked("send", {"ref": "stopped"}, body={"text": "later"}, status=202),
    Asked("message", {"ref": "stopped", "id": "messages"}),
    Asked("drop_message", {"ref": "stopped", "id": "messages"}),
    Asked("exec", AWAKE, {"command": "true"}, status=400),  # it asks for no upgrade; what follows one are no answers
    Asked("responses", AWAKE),
    Asked("delete_responses", AWAKE),
    Asked("schedules", AWAKE),
    Asked("schedule", AWAKE, body={"when": "07:30", "every": "1d", "note": "breakfast"}, status=201),
    Asked("schedule", AWAKE, body={"when": "+10m"}, status=201),
    Asked("cancel_schedule", {**AWAKE, "id": "schedules"}),
    Asked("usage"),
    *(Asked("usage", query={"by": by, "since": "30d"}) for by in ("agent", "tenant", "model", "backend", "hour")),
    Asked("stats"),
    Asked("list_tables"),
    Asked("show_schema", query={"table": "agents"}),
    Asked("query_database", body={"sql": "SELECT * FROM agents, messages", "limit": 3}),
    Asked("query_database", body={"sql": "SELECT x'00' AS b, 9e999 AS f, NULL AS n", "secrets": True}),
    Asked("metrics"),
    Asked("events", query={"tail": 1000}),
    Asked("audit", query={"limit": 1000}),
    Asked("audit", query={"limit": 1, "agent": "awake", "act": "agent"}),
    Asked("openapi"),
    Asked("inference"),
    Asked("inference_stats"),
    Asked("models"),
    Asked("refresh_models"),
    Asked("model", {"model": "hive-demo"}),
    Asked("governance"),
    Asked("pull_model", body={"model": "llama3.2"}, status=501),  # the demo server fetches none
    Asked("remove_model", {"model": "hive-demo"}, status=404),  # no file of Hive's own
    Asked("pool"),
    Asked("explain_model", {"model": "meta%252Ftiny"}),
    Asked("explain_model", {"model": "meta%252Ftiny"}, {"band": "high"}),
    Asked("explain_model", {"model": "hive-demo"}, status=404),
    Asked("load_model", {"model": "meta%252Ftiny"}, status=409),  # its file is not there
    Asked("load_model", {"model": "hive-demo"}, status=501),  # the demo server loads none
    Asked("unload_model", {"model": "meta%252Ftiny"}),
    Asked("unload_model", {"model": "meta%252Ftiny"}, body={"force": True}),
    Asked("unload_model", {"model": "hive-demo"}, status=501),
    Asked("pin_model", {"model": "meta%252Ftiny"}),
    Asked("unpin_model", {"model": "meta%252Ftiny"}),
    Asked("model_log", {"model": "meta%252Ftiny"}, {"lines": 5}),
    Asked("capabilities"),
    Asked("runner_health"),
    Asked("runner_load", body={"modelId": "meta/tiny"}, status=409),  # its file is not there
    Asked("runner_load", body={"modelId": "hive-demo", "verifiedOpToken": "eyJ"}, status=501),
    Asked("runner_load", body={"modelId": "nobody"}, status=404),
    Asked("runner_load_task", {"taskId": "load-" + OLD_JOB}, status=404),  # it was no load
    Asked("runner_unload", body={"modelId": "meta/tiny"}),
    Asked("runner_unload", body={"modelId": "hive-demo"}, status=501),
    Asked("runner_flush", body={"scope": "all", "modelId": None}, status=501),
    Asked("adapters"),
    Asked("adapter_keys"),
    Asked("adapter", {"adapter": "legal"}),
    Asked("adapter", {"adapter": "nobody"}, status=404),
    Asked("adapter_load_status", {"adapter": "legal"}),
    Asked("runner_adapter_load", {"adapter": "legal"}, status=404),  # it was never ordered
    Asked("load_adapter", {"adapter": "legal"}, body={"digest": "ffff"}, status=404),
    Asked("load_adapter", {"adapter": "legal"}, status=400),  # a llama-server takes no safetensors
    Asked("runner_load_adapter", {"adapter": "legal"}, body={"verifiedOpToken": None}, status=400),
    Asked("pull_adapter", body={"path": "legal", "base": "meta/tiny", "name": "other"}, status=202),
    Asked("pull_adapter", body={"path": "legal", "base": "nobody"}, status=404),
    Asked("unload_adapter", {"adapter": "legal"}),  # it is not loaded
    Asked("unload_adapter", {"adapter": "nobody"}, status=404),
    Asked("trust_key", body={"keyId": "3f", "pem": "no key"}, status=400),
    Asked("revoke_key", {"id": "3f9a0c"}, status=404),
    Asked("remove_adapter", {"adapter": "legal"}, {"digest": "ffff"}, status=404),
    Asked("remove_adapter", {"adapter": "legal"}),
    Asked("ask_lease", body={"mb": 10, "kind": "held", "all": True}, status=201),
    Asked("leases"),
    Asked("pool"),
    Asked("lease", {"id": "l-1"}),
    Asked("wait_lease", {"id": "l-1"}),
    Asked("renew_lease", {"id": "l-1"}, body={"token": 1, "ttl_s": 30}),
    Asked("renew_lease", {"id": "l-1"}, body={"token": 2}, status=409),
    Asked("end_lease", {"id": "l-1"}, status=403),  # whose, or by whom?
    Asked("end_lease", {"id": "l-1"}, {"token": 1}),
    Asked("end_lease", {"id": "l-9"}, {"end": 1}, status=404),
    Asked("leases", query={"ended": 5}),
    Asked("ask_lease", body={"mb": 1 << 30, "kind": "held"}, status=400),  # larger than the host
    Asked("ask_lease", body={"mb": 10, "kind": "held", "preemptible": True}, status=400),
    Asked("tasks"),
    Asked("task", {"task": "plan"}),
    Asked("task", {"task": "plant"}, status=404),
    Asked("task_route", {"task": "task:plan"}),
    Asked("task_route", {"task": "plan"}, {"agent": "awake"}),
    Asked("task_route", {"task": "plan"}, {"agent": "nobody"}, status=404),
    Asked("templates"),
    Asked("template", {"template": "oa"}),
    Asked("template", {"template": "nobody"}, status=404),
    Asked("restart_template", {"template": "oa"}, status=501),  # this helper runs none
    Asked("restart_template", {"template": "nobody"}, status=404),
    Asked("create", body={**SPEC, "name": "forked", "template": "nobody"}, status=400),
    Asked("create", body={**SPEC, "name": "forked", "template": "oa"}, status=403),  # another tenant's
    Asked("prompts"),
    Asked("route", query={"model": "hive-demo"}),
    Asked("route", query={"model": "gpt-9", "tier": "low"}),
    Asked("backends"),
    Asked("backend_log", status=501),  # the demo server is none of its services
    Asked("switch", body={"backend": "demo"}),
    Asked("jobs"),
    Asked("job", {"id": OLD_JOB}),
    Asked("cancel_job", {"id": OLD_JOB}, status=409),  # whether one under way is still to be had depends on the moment
    Asked("jobs", query={"kind": "task"}),
    Asked("job", {"id": OLD_TASK}),
    Asked("job_output", {"id": OLD_TASK}),
    Asked("job_output", {"id": OLD_TASK}, {"follow": 1, "after": 1}),
    Asked("job_output", {"id": OLD_JOB}, status=404),  # no model works in it
    Asked("job_result", {"id": OLD_TASK}),
    Asked("job_result", {"id": "nobody"}, status=404),
    Asked("cancel_job", {"id": OLD_TASK}),  # it has ended, and stays as it is
    Asked("release_job", {"id": OLD_TASK}),
    Asked("release_job", {"id": OLD_TASK}, status=404),
    Asked("job", {"id": OLD_TASK}),
    Asked("begin_job", body={"name": "tidy", "model": "demo", "prompt": "Hi", "priority": "low"}, status=202),
    Asked("begin_job", body={"name": "tidy", "model": "demo"}, status=400),  # it asks for nothing
    Asked("begin_job", body={"name": "tidy", "model": "demo", "prompt": "Hi", "agent": "nobody"}, status=404),
    Asked("access"),
    Asked("memory"),
    Asked("gpus"),
    Asked("queue"),
    Asked("request", {"id": "e0-7"}),
    Asked("request", {"id": "e0-9"}),
    Asked("request", {"id": "e1-2"}),
    Asked("cancel_request", {"id": "e1-2"}),
    Asked("config"),
    Asked("change_config", body={"sleep.minimum_awake_s": None}),
    Asked("deployed_models"),
    Asked("cache"),
    Asked("flush_cache", body={"scope": "tenant", "tenant": "none"}, status=404),
    Asked("budgets"),
    Asked("cloud"),
    Asked("change_cloud", body={"allowCloudFallback": False}),
    Asked("create_token", body={"name": "ci", "role": "operator", "expires_in": "30d"}, status=201),
    Asked("list_tokens", query={"all": 1}),
    Asked("revoke_token", {"id": "ci"}),
    Asked("list_tokens", query={"all": 1}),
    Asked("shutdown"),
]
"""An id that is the name of a list stands for that of its first member."""


def test_every_row_is_asked() -> None:
    assert {asked.handler for asked in IN_ORDER} == {row.name for row in ROWS}


class Live:
    """A daemon, asked one thing after the other."""

    def __init__(self, socket: str) -> None:
        transport = httpx.HTTPTransport(uds=socket, verify=False, trust_env=False)
        self._client = httpx.Client(transport=transport, base_url="http://hive", trust_env=False, timeout=60)
        self._rows = {row.name: row for row in ROWS}

    def close(self) -> None:
        self._client.close()

    def ask(self, asked: Asked) -> None:
        answer = self.answer(asked)
        assert answer.status_code == asked.status, (asked, answer.text)
        check_answer(self._rows[asked.handler], answer)

    def answer(self, asked: Asked) -> httpx.Response:
        row, path = self._rows[asked.handler], dict(asked.path)
        if path.get("id") in ("messages", "schedules"):
            listed = self._client.get(f"/api/agents/{path['ref']}/{path['id']}").json()
            path["id"] = str(listed[path["id"]][0]["id"])
        body = {} if asked.body is None else {"json": asked.body}
        return self._client.request(row.method, row.path.format(**path), params=dict(asked.query), **body)


@pytest.fixture
def live(short_path: Path) -> Iterator[Live]:
    for name in ("s", "r"):
        (short_path / name).mkdir()
    with running(short_path) as where:
        live = Live(where.socket)
        yield live
        live.close()


def test_every_answer_is_what_its_description_says(live: Live) -> None:
    for asked in IN_ORDER:
        live.ask(asked)


@pytest.mark.parametrize(
    ("golden", "shape"), [("agent_usage.json", "AgentUsage"), ("inference_stats.json", "InferenceStats")]
)
def test_the_published_shapes_are_those_that_are_described(golden: str, shape: str) -> None:
    check({"$ref": f"#/components/schemas/{shape}"}, json.loads((GOLDEN / golden).read_text()))


REACHES_FURTHER = [
    ("create", {"name": "x", "command": ["/usr/bin/touch", "/tmp/x"]}, 403, "program /usr/bin/touch is not permitted"),
    ("create", {"name": "x", "runtime": "docker", "docker": {"image": "debian:12"}}, 403, "runtime docker"),
    (
        "create",
        {"name": "x", "runtime": "firecracker", "firecracker": {"kernel": "/k", "rootfs": "/r"}},
        *(403, "runtime firecracker"),
    ),
    ("create", {"name": "x", "command": ["/usr/bin/sleep", "1"], "egress": ["192.0.2.0/24"]}, 403, "egress to"),
    ("switch", {"backend": "http://192.0.2.1:8000"}, 503, "none of this program's servers"),
    ("switch", {"backend": "/run/systemd/private"}, 503, "none of this program's servers"),
]


def test_what_a_fuzzer_makes_up_cannot_be_run_opened_or_reached(live: Live) -> None:
    """The ground of test_schemathesis.py: not the fuzzer, the daemon it asks is bounded."""
    for handler, body, status, said in REACHES_FURTHER:
        answer = live.answer(Asked(handler, body=body))
        assert (answer.status_code, said in answer.json()["detail"]) == (status, True), answer.text
