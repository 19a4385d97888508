"""Hive before a real Ray Serve on two hosts: what it tells, what is lost, what comes back, and whose turn it is."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.cluster.namespaces import wait_for
from tests.cluster.ray_cluster import AT_ONCE, RayCluster, ray_cluster
from tests.cluster.seen import inference, wait_for_slots
from tests.cluster.streams import BROKEN, LYING, WHOLE, Caller, ended
from tests.journeys.stack import Stack, stack

pytestmark = [pytest.mark.ray, pytest.mark.root, pytest.mark.redis, pytest.mark.timeout(600)]

LOSSES = int(os.environ.get("HIVE_CLUSTER_RAY_LOSSES", "1"))
"""Of a host under load; 3 for the promise of 100 streams (docs/cluster.md)."""
BOTH = 2 * AT_ONCE


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Not below /tmp, of which each host has its own."""
    with tempfile.TemporaryDirectory(prefix="hive-ray-", dir="/var/tmp") as made:
        yield Path(made)


@pytest.fixture(scope="module")
def ray(folder: Path) -> Iterator[RayCluster]:
    with ray_cluster(folder) as ray:
        yield ray


@pytest.fixture(scope="module")
def hive(ray: RayCluster, folder: Path) -> Iterator[Stack]:
    config = f"backend_cluster_url = {ray.dashboard}\nbackend_cluster_token_file = {folder}/ray-token\n"
    with stack(url=ray.url(ray.a), config=config) as hive:
        yield hive


@pytest.fixture
def whole(ray: RayCluster, hive: Stack) -> RayCluster:
    """Both replicas run, and Hive knows."""
    ray.wait_until_whole()
    wait_for_slots(hive, BOTH)
    return ray


def test_it_is_seen_as_a_cluster_of_two_replicas(hive: Stack, whole: RayCluster) -> None:
    told = inference(hive)
    cluster = told["cluster"]
    assert (told["backend"], cluster["engine"], cluster["running"], cluster["wanted"]) == ("remote", "ray", 2, 2)
    assert {node["name"]: node["replicas"] for node in cluster["nodes"]} == {whole.a.address: 1, whole.b.address: 1}
    assert cluster["notes"] == []
    assert Caller(hive).ask(words=3).json()["usage"]["completion_tokens"] == 3


def test_nobody_is_told_anything_or_gives_orders_without_the_token(whole: RayCluster) -> None:
    applications = f"{whole.dashboard}/api/serve/applications/"
    assert httpx.get(applications, trust_env=False).status_code == 401
    assert httpx.put(applications, json={"applications": []}, trust_env=False).status_code == 401
    job = {"entrypoint": "true"}
    assert httpx.post(f"{whole.dashboard}/api/jobs/", json=job, trust_env=False).status_code == 401


def test_a_light_tenant_is_served_before_the_flood_of_another_one(hive: Stack, whole: RayCluster) -> None:
    """It waits for one request that is at work, and for none of those before it (4.5 s without the capacity)."""
    words, flood = 40, 20
    begun: list[float] = []
    first: list[float] = []

    async def asked() -> None:
        async with httpx.AsyncClient(trust_env=False, timeout=120, limits=httpx.Limits(max_connections=None)) as client:

            async def one(tenant: str, times: list[float]) -> str:
                heard: list[float] = []
                end = await Caller(hive, tenant).stream(
                    client, words, f"prompt of {tenant}", lambda: heard.append(time.monotonic())
                )
                times.append(heard[0])
                return end

            flooding = [asyncio.ensure_future(one("flood", begun)) for _ in range(flood)]
            await asyncio.sleep(0.5)
            since = time.monotonic()
            assert await one("light", first) == WHOLE
            assert set(await asyncio.gather(*flooding)) == {WHOLE}
            print(f"first byte after {first[0] - since:.2f} s, service takes {words * 0.05:.2f} s")

    asyncio.run(asked())
    before = sum(at < first[0] for at in begun)
    assert before <= BOTH + 2, f"{before} of the flood's {flood} began before it"


def test_the_salt_of_its_tenant_reaches_the_application(hive: Stack, whole: RayCluster) -> None:
    def salt(tenant: str) -> str:
        said: str = Caller(hive, tenant).ask(words=1).json()["choices"][0]["message"]["content"]
        return said

    assert salt("red") == salt("red") != salt("blue")
    assert "salt=none" not in (salt("red"), salt("blue"))


def test_a_killed_replica_breaks_its_answers_honestly_and_is_replaced(hive: Stack, whole: RayCluster) -> None:
    before = whole.replica_ids()

    speaking = asyncio.Event()

    async def loss() -> None:
        async with asyncio.timeout(60):
            await speaking.wait()
        assert whole.kill_replica(whole.b)

    ends = asyncio.run(ended(Caller(hive), streams=BOTH, at_once=BOTH, words=40, losses=loss, speaking=speaking))
    assert ends[LYING] == 0
    assert ends[BROKEN] >= 1
    wait_for(lambda: whole.replica_ids() != before, 60, "another replica")
    whole.wait_until_whole()
    wait_for_slots(hive, BOTH)


def test_an_answer_that_was_lost_with_its_replica_is_hives_error_in_the_clients_dialect(
    hive: Stack, whole: RayCluster
) -> None:
    """Ray's own is `500 text/plain`, which no client of OpenAI's reads."""
    before = whole.replica_ids()
    with ThreadPoolExecutor(8) as threads:
        asked = [threads.submit(Caller(hive).ask, 40) for _ in range(8)]
        time.sleep(1)
        assert whole.kill_replica(whole.b)
        answers = [one.result() for one in asked]
    lost = [answer for answer in answers if answer.status_code != 200]
    assert 1 <= len(lost) < 8
    assert {answer.status_code for answer in lost} <= {502, 503}
    assert all(answer.json()["error"]["message"] for answer in lost)
    wait_for(lambda: whole.replica_ids() != before, 60, "another replica")


def test_a_lost_host_takes_its_slots_with_it_and_brings_them_back(hive: Stack, whole: RayCluster) -> None:
    whole.node.hold()
    wait_for_slots(hive, AT_ONCE)
    wait_for(Caller(hive).works, 60, "the other one answers")
    whole.node.release()
    wait_for_slots(hive, BOTH)
    assert Caller(hive).works()


def test_a_killed_raylet_comes_back_by_its_unit(hive: Stack, whole: RayCluster) -> None:
    starts = whole.node.starts
    assert whole.kill_raylet(whole.b)
    wait_for(lambda: whole.node.starts > starts, 60, "its unit starts it again")
    whole.wait_until_whole()
    wait_for_slots(hive, BOTH)


def test_a_host_that_is_cut_off_is_left_out_and_comes_back_by_its_unit(hive: Stack, whole: RayCluster) -> None:
    whole.b.cut()
    try:
        wait_for_slots(hive, AT_ONCE)
        wait_for(Caller(hive).works, 60, "the other one answers")
    finally:
        whole.b.mend()
    whole.wait_until_whole()
    wait_for_slots(hive, BOTH)
    assert Caller(hive).works()


def test_no_stream_ends_clean_though_a_host_was_lost(hive: Stack, whole: RayCluster) -> None:
    seen = []

    async def losses() -> None:
        for _ in range(LOSSES):
            await asyncio.sleep(1.5)
            await asyncio.to_thread(whole.node.hold)
            seen.append(await asyncio.to_thread(wait_for, Caller(hive).works, 120, "requests are answered again"))
            whole.node.release()
            await asyncio.to_thread(whole.wait_until_whole)

    ends = asyncio.run(ended(Caller(hive), streams=34 * LOSSES, at_once=8, words=30, losses=losses))
    print(f"{dict(ends)} during {LOSSES} losses; answered again after {[round(s, 2) for s in seen]} s")
    assert ends[LYING] == 0
    assert ends[BROKEN] >= 1, "nothing was lost"
    assert ends[WHOLE] >= 1


def test_without_its_head_hive_says_why_and_goes_on_when_that_is_back(hive: Stack, whole: RayCluster) -> None:
    whole.head.hold()
    wait_for(lambda: Caller(hive).ask().status_code == 503, 120, "it is missed")
    refused = Caller(hive).ask()
    print(refused.status_code, refused.text)
    assert refused.status_code == 503
    assert refused.json()["error"]["message"]
    whole.head.release()
    print(f"whole again after {whole.wait_until_whole():.1f} s")
    wait_for(Caller(hive).works, 120, "requests are answered again")
    wait_for_slots(hive, BOTH)
