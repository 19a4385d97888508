"""The answers of engines as they were recorded (Ray 2.60, vllm-router 0.1.17, vLLM 0.32), and what is made of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hive.backends import ray_serve, vllm_router
from hive.backends.capacity import ClusterLook
from hive.backends.conversation import AskedServer, ControlAnswer
from hive.backends.vllm_ranks import RankWatch, ranks_in
from hive.domain import ClusterNode
from hive.errors import BackendDown
from hive.settings.table import InferenceSection

APPLICATIONS = Path(__file__).with_name("recorded") / "ray-applications.json"
A, B = "10.245.0.1", "10.245.0.2"
KEYS = st.sampled_from(
    [
        *("applications", "proxies", "deployments", "replicas", "state", "node_ip", "target_num_replicas", "RUNNING"),
        *("deployment_config", "max_ongoing_requests", "autoscaling_config", "min_replicas", "max_replicas"),
        *("route_prefix", "status", "deployment_topology", "ingress_deployment", "OpenAiIngress", "LLMServer:m"),
        *("workers", "url", "is_healthy", "load", "worker_type"),
    ]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text() | KEYS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS | st.text(), inner, max_size=4),
    max_leaves=30,
)
WORKERS = (
    b'{"workers":[{"url":"http://127.0.0.1:18302","model_id":"unknown","worker_type":"regular","is_healthy":%b,"load":6,'
    b'"connection_mode":"Http","priority":50,"cost":1.0},{"url":"http://10.245.0.2:18301","model_id":"unknown",'
    b'"worker_type":"regular","is_healthy":true,"load":1,"connection_mode":"Http","priority":50,"cost":1.0}],"total":2,'
    b'"stats":{"prefill_count":0,"decode_count":0,"regular_count":2}}'
)
RANKS = b"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="tiny"} 4.0
vllm:num_requests_running{engine="1",model_name="tiny"} 4.0
vllm:num_requests_waiting{engine="0",model_name="tiny"} 2.0
vllm:num_requests_waiting{engine="1",model_name="tiny"} 0.0
vllm:generation_tokens_total{engine="0",model_name="tiny"} %d
vllm:generation_tokens_total{engine="1",model_name="tiny"} 7210.0
vllm:request_queue_time_seconds_count{engine="0",model_name="tiny"} %d
vllm:request_queue_time_seconds_sum{engine="0",model_name="tiny"} %d
"""


Changes = dict[str, dict[str, Any]]


def ray(prefix: str = "", inference: InferenceSection | None = None, changes: Changes | None = None) -> ClusterLook:
    """A look at the recorded answer; `changes`: deployment → what is another way there."""
    told = msgspec.json.decode(APPLICATIONS.read_bytes())
    for app in told["applications"].values():
        for name, change in (changes or {}).items():
            for key, value in change.items() if name in app["deployments"] else ():
                target = app["deployments"][name]
                (target["deployment_config"] if key in target["deployment_config"] else target)[key] = value
    answer = ControlAnswer(200, {}, msgspec.json.encode(told))
    return said(answer, prefix, inference or InferenceSection())


def said(answer: ControlAnswer, prefix: str, inference: InferenceSection) -> ClusterLook:
    asking = ray_serve.look(AskedServer("h:8265"), prefix, inference)
    next(asking)
    try:
        asking.send([answer])
    except StopIteration as end:
        found: ClusterLook = end.value
        return found
    raise AssertionError("it asked more")


def test_ray_tells_replicas_nodes_and_limit_of_the_application_behind_the_path() -> None:
    fake = ray("/fake")
    assert (fake.wanted, fake.running, fake.slots_each, fake.places) == (2, 2, 4, 8)
    assert fake.nodes == (ClusterNode(A, up=True, replicas=1), ClusterNode(B, up=True, replicas=1))
    assert fake.notes == ()
    assert ray("/fake", InferenceSection(slots_per_replica=6)).places == 12


def test_an_ingress_of_ray_serve_llm_is_no_worker_and_its_limit_is_none() -> None:
    found = ray(inference=InferenceSection(vllm_max_sequences=16))
    assert (found.wanted, found.running, found.slots_each, found.places) == (2, 2, 16, 32)
    assert found.notes == ("one_ingress", "max_ongoing_unset")


def test_an_ingress_that_takes_less_than_its_workers_bounds_them_and_without_one_nothing_runs() -> None:
    workers: Changes = {"LLMServer:tiny": {"max_ongoing_requests": 8}}
    assert ray(changes=workers).places == 16
    assert ray(changes=workers | {"OpenAiIngress": {"max_ongoing_requests": 5}}).places == 5
    lost = ray(changes=workers | {"OpenAiIngress": {"replicas": []}})
    assert (lost.places, lost.running, lost.why_none) == (0, 2, "OpenAiIngress runs 0 of 1 replicas")


def test_a_replica_that_starts_or_stops_does_not_run() -> None:
    states = [{"state": state, "node_ip": A} for state in ("RUNNING", "STARTING", "STOPPING", "RECOVERING")]
    found = ray("/fake", changes={"Chat": {"replicas": states}})
    assert (found.running, found.places) == (1, 4)
    assert [node.replicas for node in found.nodes] == [1]
    down = ray("/fake", changes={"Chat": {"replicas": []}})
    assert (down.places, down.starts_when_asked) == (0, False)


def test_a_deployment_that_scales_to_zero_starts_when_it_is_asked() -> None:
    told = msgspec.json.decode(APPLICATIONS.read_bytes())
    chat = told["applications"]["fake"]["deployments"]["Chat"]
    chat["replicas"], chat["target_num_replicas"] = [], 0
    chat["deployment_config"]["autoscaling_config"] = {"min_replicas": 0, "max_replicas": 4}
    found = said(ControlAnswer(200, {}, msgspec.json.encode(told)), "/fake", InferenceSection())
    assert (found.wanted, found.places, found.starts_when_asked) == (0, 0, True)


def test_a_dashboard_without_serve_says_that_nothing_is_deployed() -> None:
    empty = b'{"controller_info": {}, "proxies": {}, "applications": {}, "target_capacity": null}'
    answer = ControlAnswer(200, {}, empty)
    assert ray_serve.is_dashboard(answer)
    assert said(answer, "", InferenceSection()).why_none == "no application is deployed"


@pytest.mark.parametrize(
    ("status", "body", "why"),
    [
        (401, b"Unauthorized: Missing authentication token", r"asks for a token \(401\).*backend_cluster_token_file"),
        (403, b"Forbidden: Invalid authentication token", r"\(403\).*backend_cluster_token_file"),
        (500, b"oh", "status 500"),
        (200, b"<html>", "something else"),
    ],
)
def test_a_dashboard_that_tells_nothing_is_an_error_that_says_why(status: int, body: bytes, why: str) -> None:
    with pytest.raises(BackendDown, match=why):
        said(ControlAnswer(status, {}, body), "", InferenceSection())


def test_the_router_tells_its_workers_and_what_waits_at_them() -> None:
    def seen(is_healthy: bytes) -> ClusterLook:
        asking = vllm_router.look(AskedServer("h:80"), InferenceSection(slots_per_replica=4))
        next(asking)
        with pytest.raises(StopIteration) as end:
            asking.send([ControlAnswer(200, {}, WORKERS % is_healthy)])
        found: ClusterLook = end.value.value
        return found

    both, one = seen(b"true"), seen(b"false")
    assert (both.wanted, both.running, both.places, both.waiting) == (2, 2, 8, 2)
    assert (one.wanted, one.running, one.places, one.waiting) == (2, 1, 4, 0)
    assert one.nodes == (ClusterNode("127.0.0.1", up=False, replicas=0), ClusterNode(B, up=True, replicas=1))


def test_a_rank_whose_tokens_stand_still_for_fifteen_seconds_is_stuck_until_they_move() -> None:
    watch, inference = RankWatch(), InferenceSection(slots_per_replica=4)
    seen = [watch.see(ranks_in(RANKS % (now, now, 2 * now)), inference, now=float(now)) for now in range(18)]
    assert [look.stuck for look in seen[13:17]] == [(), (), ("1",), ("1",)]
    assert (seen[14].places, seen[15].places, seen[15].wanted, seen[15].running) == (8, 4, 2, 1)
    assert (seen[15].waiting, seen[15].waited_s) == (2, 2.0)
    moved = (RANKS % (18, 18, 36)).replace(b"7210.0", b"7211.0")
    assert watch.see(ranks_in(moved), inference, now=18.0).stuck == ()


def test_a_rank_that_reads_a_long_prompt_is_not_stuck_although_no_token_comes_of_it() -> None:
    watch, reading = RankWatch(), b'vllm:kv_cache_usage_perc{engine="1"} %d.5e-03\n'
    looks = [
        watch.see(ranks_in(RANKS % (9, 1, 1) + reading % now), InferenceSection(), now=now) for now in range(0, 60, 5)
    ]
    assert {look.stuck for look in looks} == {(), ("0",)}


def test_a_rank_without_requests_stands_still_and_is_well() -> None:
    watch, quiet = RankWatch(), ranks_in((RANKS % (1, 1, 1)).replace(b" 4.0", b" 0.0"))
    assert [watch.see(quiet, InferenceSection(), now=now).stuck for now in (0.0, 60.0)] == [(), ()]


@given(JSON)
def test_whatever_an_engine_answers_is_a_look_or_an_error_of_hives(told: object) -> None:
    """Anything else would end the watch for good."""
    answer, inference = ControlAnswer(200, {}, msgspec.json.encode(told)), InferenceSection()
    for asking in (
        ray_serve.look(AskedServer("h"), "", inference),
        vllm_router.look(AskedServer("h"), inference),
    ):
        next(asking)
        with pytest.raises((StopIteration, BackendDown)) as end:
            asking.send([answer])
        if isinstance(end.value, StopIteration):
            found: ClusterLook = end.value.value
            assert found.places >= 0
            assert all(node.name.isprintable() for node in found.nodes)
    ray_serve.routes_in(answer)
    ray_serve.is_dashboard(answer)
    vllm_router.is_router(answer, answer)


@given(st.lists(st.sampled_from([*RANKS.splitlines(), b'vllm:prompt_tokens_total{engine="7"} 1e999', b"x", b"{"])))
def test_whatever_metrics_say_is_counted_or_passed_over(lines: list[bytes]) -> None:
    found = RankWatch().see(ranks_in(b"\n".join(lines).replace(b"%d", b"-1e400")), InferenceSection(), now=0.0)
    assert found.wanted == found.running + len(found.stuck)
