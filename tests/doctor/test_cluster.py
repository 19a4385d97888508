"""Verdicts of `hive doctor` on a cluster: before servers that give the answers of Ray 2.60 and vLLM Router 0.1.17."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hive.backends.conversation import ControlAnswer
from hive.doctor import doctor
from hive.doctor.checks import cluster
from hive.doctor.checks.check import Status
from hive.doctor.checks.cluster import AgentNetwork, DashboardPlace
from hive.doctor.checks.target import Subject, TargetKind
from hive.doctor.doctor import Result, examine
from hive.domain import CloudUse
from hive.files.layout import UNITS, Layout
from hive.host.listener import listening_addresses
from hive.settings.table import InferenceSection, Settings
from tests.control.played_engine import PlayedEngine, playing_in_a_thread

PASS, WARN, FAIL, SKIP = Status.PASS, Status.WARN, Status.FAIL, Status.SKIP
RAY = (Path(__file__).parents[1] / "backends/recorded/ray-applications.json").read_bytes()
"""Of two nodes: `llm` as ray.serve.llm deploys it, `fake` without an ingress of its own."""
TOKEN = "0123456789abcdef0123456789abcdef"
UNIT = "[Service]\nExecStart=/opt/router/bin/vllm-router --worker-urls http://10.0.0.1:8000 --port 3001 {}\n"


@pytest.fixture
def played() -> Iterator[PlayedEngine]:
    with playing_in_a_thread() as engine:
        yield engine


def subject(
    engine: PlayedEngine, kind: str = "ray", *, told: bool = True, layout: Layout | None = None, **given: Any
) -> Subject:
    """A Hive whose settings name this cluster; `told`: its daemon has found it, and answers nothing else."""
    url = f"http://{engine.address}" if kind == "ray" else ""
    section = InferenceSection(
        backend_url=f"http://{engine.address}/v1", backend_cluster=kind, backend_cluster_url=url, **given
    )
    found = {"address": engine.address, "cluster": {"engine": kind, "notes": []}}
    return Subject(
        kind=TargetKind.UP,
        settings=Settings(inference=section),
        health={"backend": found} if told else None,
        layout=layout or Layout(Path("/nowhere")),
        limit_s=20.0,
    )


def results(one: Subject, *names: str) -> list[Result]:
    return examine(one, doctor.choose(names))


def result(one: Subject, name: str) -> Result:
    [found] = results(one, name)
    return found


# --- no cluster --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [Settings(), Settings(inference=InferenceSection(backend_cluster="none"))])
def test_where_no_cluster_is_known_nothing_is_asked(played: PlayedEngine, settings: Settings) -> None:
    one = Subject(
        kind=TargetKind.UP, settings=settings, health={"backend": {"address": played.address, "cluster": None}}
    )
    assert {found.status for found in results(one, "cluster")} == {SKIP}
    assert played.asked == []


def test_where_nothing_may_leave_the_box_a_far_cluster_is_not_asked() -> None:
    section = InferenceSection(backend_url="http://192.0.2.1:8000/v1", backend_cluster="ray", cloud=CloudUse.NEVER)
    one = Subject(kind=TargetKind.UP, settings=Settings(inference=section), limit_s=20.0)
    assert {found.status for found in results(one, "cluster")} == {SKIP}


# --- Ray ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("told", [True, False], ids=["found by the daemon", "named in hive.conf"])
def test_a_ray_as_it_is_by_default_is_told_with_cause_and_cure(played: PlayedEngine, told: bool) -> None:
    played.answers["/api/serve/applications/"] = RAY
    found = {one.name: one for one in results(subject(played, told=told), "cluster")}
    assert {name: one.status for name, one in found.items()} == {
        "cluster.answers": PASS,
        "cluster.token": FAIL,
        "cluster.apart": SKIP,  # no daemon tells of agents
        "cluster.ingress": WARN,
        "cluster.limit": WARN,
        "cluster.checks": SKIP,
    }
    assert "runs programs on every node" in found["cluster.token"].reason
    assert "RAY_AUTH_MODE=token" in found["cluster.token"].fix
    assert "application llm hangs by one replica of OpenAiIngress" in found["cluster.ingress"].reason
    assert "num_replicas: 2 for OpenAiIngress" in found["cluster.ingress"].fix
    assert "LLMServer:tiny of llm sets no limit of requests, max_ongoing_requests is 1000000000" in (
        found["cluster.limit"].reason
    )
    assert "slots_per_replica in hive.conf" in found["cluster.limit"].fix


def test_a_ray_that_is_set_up_as_it_should_be_passes(played: PlayedEngine, tmp_path: Path) -> None:
    told = json.loads(RAY)
    deployments = told["applications"]["llm"]["deployments"]
    deployments["LLMServer:tiny"]["deployment_config"]["max_ongoing_requests"] = 8
    deployments["OpenAiIngress"]["target_num_replicas"] = 2
    played.answers["/api/serve/applications/"] = json.dumps(told).encode()
    played.token = TOKEN
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    file.chmod(0o600)
    found = {one.name: one for one in results(subject(played, backend_cluster_token_file=str(file)), "cluster")}
    passed = {name for name, one in found.items() if one.status is PASS}
    assert passed == {"cluster.answers", "cluster.token", "cluster.apart", "cluster.ingress", "cluster.limit"}
    assert not any(TOKEN in one.reason + one.fix for one in found.values())


def test_slots_per_replica_stands_for_a_limit_that_ray_has_none_of(played: PlayedEngine) -> None:
    played.answers["/api/serve/applications/"] = RAY
    assert result(subject(played, slots_per_replica=8), "cluster.limit").status is PASS


def test_who_may_not_read_the_token_is_told_that_one_is_asked_for(played: PlayedEngine) -> None:
    played.answers["/api/serve/applications/"] = RAY
    played.token = TOKEN
    one = subject(played)
    assert result(one, "cluster.token").status is PASS
    answers = result(one, "cluster.answers")
    assert (answers.status, "answers 401" in answers.reason) == (FAIL, True)
    assert "backend_cluster_token_file" in answers.fix
    assert (result(one, "cluster.ingress").status, result(one, "cluster.limit").status) == (SKIP, SKIP)


@pytest.mark.parametrize("body", [b"", b"[]", b"\xff", b'{"applications": 3}', b'{"applications": {"a": {}}}'])
def test_an_answer_that_is_none_of_rays_is_no_fault_of_the_check(played: PlayedEngine, body: bytes) -> None:
    played.answers["/api/serve/applications/"] = body
    found = results(subject(played), "cluster.ingress", "cluster.limit")
    assert not any("fault in this check" in one.reason for one in found)
    assert {one.status for one in found} <= {SKIP, PASS}


def test_a_ray_that_the_daemon_found_and_that_asks_for_a_token_is_looked_at_too(played: PlayedEngine) -> None:
    """It has told nothing yet, so there is no cluster in what the daemon says: only its warning names it."""
    warning = "Ray Serve does not tell how many replicas run: it asks for a token (401)"
    one = Subject(
        kind=TargetKind.UP, health={"backend": {"address": "127.0.0.1:9", "cluster": None, "warning": warning}}
    )
    found = cluster.target_of(one)
    assert found is not None
    assert (found.engine, found.dashboard) == ("ray", "127.0.0.1:8265")


def test_an_engine_that_hangs_is_told_before_the_time_of_a_check_is_over() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        at = f"127.0.0.1:{silent.getsockname()[1]}"
        section = InferenceSection(
            backend_url=f"http://{at}/v1", backend_cluster="ray", backend_cluster_url=f"http://{at}"
        )
        one = Subject(kind=TargetKind.UP, settings=Settings(inference=section), limit_s=1.0)
        found = {one.name: one for one in results(one, "cluster")}
    assert found["cluster.answers"].status is FAIL
    assert "did not answer" in found["cluster.answers"].reason
    assert {one.status for name, one in found.items() if name != "cluster.answers"} == {SKIP}


def test_an_engine_that_is_away_is_told_once_and_the_rest_is_skipped(played: PlayedEngine) -> None:
    played.address = "127.0.0.1:9"
    one = subject(played)
    found = {one.name: one.status for one in results(one, "cluster")}
    assert found.pop("cluster.answers") is FAIL
    assert set(found.values()) == {SKIP}


# --- who reaches it ----------------------------------------------------------------------------------------------

OPEN = ControlAnswer(200, {}, RAY)
FAR = DashboardPlace("10.245.0.1:8265", "10.245.0.1")
INNER = DashboardPlace("127.0.0.1:8265", "127.0.0.1", ("127.0.0.1",))
WIDE = DashboardPlace("127.0.0.1:8265", "127.0.0.1", ("0.0.0.0",))
NOWHERE = AgentNetwork("alice", "process", ())


@pytest.mark.parametrize(
    ("place", "agents", "status", "word"),
    [
        (FAR, [NOWHERE], PASS, "no agent reaches"),
        (FAR, [NOWHERE, AgentNetwork("bob", "docker")], FAIL, "bob can reach Ray's dashboard"),
        (FAR, [AgentNetwork("bob", "process", ("10.245.0.0/24",))], FAIL, "bob can reach"),
        (FAR, [AgentNetwork("bob", "process", ("10.246.0.0/24",))], PASS, "no agent"),
        (FAR, [AgentNetwork("bob", "firecracker")], PASS, "no agent"),
        (FAR, [AgentNetwork("bob", "firecracker", tap="tap0")], FAIL, "bob can reach"),
        (FAR, [AgentNetwork("bob", "external")], PASS, "no agent"),
        (INNER, [AgentNetwork("bob", "docker")], PASS, "no agent"),
        (INNER, [AgentNetwork("bob", "process"), AgentNetwork("carol", "process")], FAIL, "bob, and 1 more, can reach"),
        (WIDE, [NOWHERE], WARN, "listens at 0.0.0.0"),
        (WIDE, None, WARN, "listens at 0.0.0.0"),
        (FAR, None, SKIP, "no daemon"),
    ],
)
def test_the_way_of_agents_to_the_dashboard(
    place: DashboardPlace, agents: list[AgentNetwork] | None, status: Status, word: str
) -> None:
    found = cluster.judge_ways(place, OPEN, agents)
    assert (found.status, word in found.reason) == (status, True), found
    closed = cluster.judge_ways(place, ControlAnswer(401, {}, b""), agents)
    assert closed.status is PASS


def test_the_addresses_of_a_listener_are_the_kernels(played: PlayedEngine) -> None:
    with socket.create_server(("0.0.0.0", 0)) as wide, socket.create_server(("127.0.0.1", 0)) as inner:
        assert listening_addresses(wide.getsockname()[1]) == ("0.0.0.0",)
        assert listening_addresses(inner.getsockname()[1]) == ("127.0.0.1",)
    played.answers["/api/serve/applications/"] = RAY
    assert cluster._place(played.address).bound == ("127.0.0.1",)


# --- vLLM Router -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "status", "word"),
    [
        ("--health-check-interval-secs 2", PASS, "every 2 s"),
        ("\\\n  --health-check-interval-secs=5", PASS, "every 5 s"),
        ("", WARN, "every 60 s"),
        ("--health-check-interval-secs 30", WARN, "every 30 s"),
        ("$OPTIONS", SKIP, "by a variable"),
        ("--health-check-interval-secs $S", SKIP, "by a variable"),
    ],
)
def test_a_routers_interval_is_read_from_its_unit(
    played: PlayedEngine, short_path: Path, options: str, status: Status, word: str
) -> None:
    played.route(True, True)
    units = short_path / UNITS.lstrip("/")
    units.mkdir(parents=True)
    (units / "vllm-router.service").write_text(UNIT.format(options))
    one = subject(played, "router", layout=Layout(short_path))
    assert result(one, "cluster.answers").status is PASS
    found = result(one, "cluster.checks")
    assert (found.status, word in found.reason) == (status, True), found
    if status is WARN:
        assert found.fix == "systemctl edit vllm-router.service  # with --health-check-interval-secs 2"
    assert {result(one, f"cluster.{name}").status for name in ("token", "apart", "ingress", "limit")} == {SKIP}


def test_a_router_that_asks_for_a_key_is_shown_that_of_the_backend(played: PlayedEngine, tmp_path: Path) -> None:
    played.route(True)
    played.token = TOKEN
    file = tmp_path / "key"
    file.write_text(f"{TOKEN}\n")
    file.chmod(0o600)
    assert result(subject(played, "router"), "cluster.answers").status is FAIL
    shown = subject(played, "router", backend_api_key_file=str(file))
    assert result(shown, "cluster.answers").status is PASS


def test_a_drop_in_of_the_routers_unit_comes_after_it(played: PlayedEngine, short_path: Path) -> None:
    units = short_path / UNITS.lstrip("/")
    (units / "vllm-router.service.d").mkdir(parents=True)
    (units / "vllm-router.service").write_text(UNIT.format(""))
    (units / "vllm-router.service.d/interval.conf").write_text(
        f"[Service]\nExecStart=\n{UNIT.format('--health-check-interval-secs 1').splitlines()[1]}\n"
    )
    assert "every 1 s" in result(subject(played, "router", layout=Layout(short_path)), "cluster.checks").reason


def test_a_router_that_runs_here_is_read_by_its_command_line(played: PlayedEngine, short_path: Path) -> None:
    program = short_path / "vllm-router"
    program.write_text("import time\ntime.sleep(600)\n")
    command = [sys.executable, str(program), "--port", "3001", "--health-check-interval-secs", "45"]
    with subprocess.Popen(command) as running:
        try:
            found = [one for one in cluster._of_processes() if one.where == f"process {running.pid}"]
        finally:
            running.kill()
    assert [cluster.interval_in(one.words) for one in found] == [45]
    assert "every 45 s" in cluster.judge_checks(found).reason


def test_of_a_router_elsewhere_it_is_said_what_is_right(played: PlayedEngine) -> None:
    found = cluster.judge_checks([])
    assert (found.status, "its default is 60 s" in found.reason) == (SKIP, True)
