"""A whole Hive before a cluster whose engine's answers are played: its places follow, and nothing runs is said."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.control.played_engine import PlayedEngine, playing_in_a_thread
from tests.journeys.sdk import HELLO, door_of
from tests.journeys.stack import Stack, stack, until
from tests.proxy.harness import JSON_ANSWER

pytestmark = pytest.mark.redis


@pytest.fixture(scope="module")
def ray() -> Iterator[PlayedEngine]:
    with playing_in_a_thread() as engine:
        engine.serve("RUNNING", "RUNNING")
        engine.answers["/v1/chat/completions"] = JSON_ANSWER
        yield engine


@pytest.fixture(scope="module")
def hive(ray: PlayedEngine) -> Iterator[Stack]:
    inference = f"backend_cluster_url = http://{ray.address}\ncluster_poll_s = 0.2\n"
    with stack(url=f"http://{ray.address}/v1", config=inference) as hive:
        hive.put_config({"proxy.queue_wait_s": 1})
        hive.create("alice", "idler.py", tier="high")
        yield hive


def places(hive: Stack) -> int | None:
    """Those of the proxy's own queue."""
    found: int | None = hive.get("/api/queue")["slots"]
    return found


def test_the_proxys_places_follow_what_the_engine_tells(hive: Stack, ray: PlayedEngine) -> None:
    until(lambda: places(hive) == 8, within_s=20, what="8 places")
    assert hive.get("/api/system/inference")["slots_from"] == "2 of 2 replicas x 4, told by Ray Serve"
    ray.serve("RUNNING")
    until(lambda: places(hive) == 4, within_s=20, what="4 places")
    ray.serve("RUNNING", "RUNNING")
    until(lambda: places(hive) == 8, within_s=20, what="8 places again")


def test_nothing_that_runs_is_a_503_with_the_reason_and_then_requests_go_on(hive: Stack, ray: PlayedEngine) -> None:
    with door_of(hive, "alice").openai() as client:
        assert client.with_options(max_retries=0).chat.completions.create(model="tiny", messages=HELLO).id
        ray.serve()
        until(lambda: places(hive) == 0, within_s=20, what="no place")
        refused = client.with_options(max_retries=0).chat.completions.with_raw_response
        with pytest.raises(Exception, match=r"no place came free within 1 s: Ray Serve runs 0 of 2 replicas"):
            refused.create(model="tiny", messages=HELLO)
        ray.serve("RUNNING", "RUNNING")
        until(lambda: places(hive) == 8, within_s=20, what="8 places again")
        assert client.chat.completions.create(model="tiny", messages=HELLO).id
