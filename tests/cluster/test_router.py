"""Hive before a real vLLM Router with a worker on each of two hosts: what it tells, what is lost, what comes back."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator

import httpx
import pytest

from tests.cluster.namespaces import wait_for
from tests.cluster.seen import inference, wait_for_slots
from tests.cluster.streams import BROKEN, LYING, WHOLE, Caller, ended
from tests.cluster.vllm_router import Router, vllm_router
from tests.journeys.stack import Stack, stack

pytestmark = [pytest.mark.ray, pytest.mark.redis, pytest.mark.timeout(600)]

LOSSES = int(os.environ.get("HIVE_CLUSTER_LOSSES", "3"))
"""Of workers under load; 20 for the promise of 1,000 streams (docs/cluster.md)."""
EACH = 4
CONFIG = f"slots_per_replica = {EACH}\n"


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Router]:
    with vllm_router(tmp_path_factory.mktemp("router")) as router:
        yield router


@pytest.fixture(scope="module")
def hive(router: Router) -> Iterator[Stack]:
    with stack(url=router.url, config=CONFIG) as hive:
        yield hive


@pytest.fixture
def whole(router: Router, hive: Stack) -> Router:
    """Both workers are there, and Hive knows."""
    for worker in router.workers:
        if not worker.host.pids():
            worker.start()
    router.wait_for(2)
    wait_for_slots(hive, 2 * EACH)
    return router


def test_it_is_seen_as_a_cluster_of_two_workers(hive: Stack, whole: Router) -> None:
    told = inference(hive)
    cluster = told["cluster"]
    assert (told["backend"], cluster["engine"], cluster["running"], cluster["wanted"]) == ("vllm", "router", 2, 2)
    assert {node["name"] for node in cluster["nodes"] if node["up"]} == {one.host.address for one in whole.workers}
    assert cluster["notes"] == []
    assert Caller(hive).ask(words=3).json()["usage"]["completion_tokens"] == 3


def test_a_lost_worker_takes_its_slots_with_it_and_brings_them_back(hive: Stack, whole: Router) -> None:
    worker = whole.workers[1]
    worker.kill()
    wait_for_slots(hive, EACH)
    is_up = {node["name"]: node["up"] for node in inference(hive)["cluster"]["nodes"]}
    assert is_up[whole.workers[0].host.address]
    assert not is_up[worker.host.address] or len(is_up) == 1, "all hosts are this machine"
    assert Caller(hive).works()
    worker.start()
    wait_for_slots(hive, 2 * EACH)


def test_no_more_requests_are_at_the_workers_than_hive_gives_them(hive: Stack, whole: Router) -> None:
    most = 0

    async def watch() -> None:
        nonlocal most
        async with httpx.AsyncClient(trust_env=False) as client:
            for _ in range(20):
                workers = (await client.get(f"{whole.url}/workers")).json()["workers"]
                most = max(most, sum(worker["load"] for worker in workers))
                await asyncio.sleep(0.1)

    ends = asyncio.run(ended(Caller(hive), streams=30, at_once=20, words=20, losses=watch))
    assert set(ends) == {WHOLE}
    assert EACH < most <= 2 * EACH


def test_a_worker_that_is_cut_off_is_left_out_and_comes_back_by_itself(hive: Stack, whole: Router) -> None:
    host = whole.workers[1].host
    host.cut()
    try:
        wait_for_slots(hive, EACH)
        wait_for(Caller(hive).works, 60, "the other one answers")
    finally:
        host.mend()
    wait_for_slots(hive, 2 * EACH)
    assert Caller(hive).works()


def test_a_stream_of_a_worker_that_was_cut_off_is_broken_when_it_was_silent_for_long(
    hive: Stack, whole: Router
) -> None:
    host = whole.workers[1].host
    host.mend()  # whole it is; skips where no link can be cut
    hive.put_config({"proxy.between_bytes_s": 3})

    async def cut() -> None:
        await asyncio.sleep(1)
        host.cut()
        await asyncio.sleep(5)

    try:
        ends = asyncio.run(ended(Caller(hive), streams=8, at_once=8, words=100, losses=cut))
    finally:
        host.mend()
        hive.put_config({"proxy.between_bytes_s": 60})
    assert ends[LYING] == 0
    assert ends[BROKEN] >= 1
    assert ends[WHOLE] >= 1


def test_no_stream_ends_clean_though_a_worker_was_lost(hive: Stack, whole: Router) -> None:
    seen = []

    async def losses() -> None:
        for number in range(LOSSES):
            await asyncio.sleep(1)
            worker = whole.workers[number % 2]
            await asyncio.to_thread(worker.kill)
            seen.append(await asyncio.to_thread(wait_for, Caller(hive).works, 60, "requests are answered again"))
            await asyncio.sleep(1)
            await asyncio.to_thread(worker.start)
            await asyncio.to_thread(whole.wait_for, 2)

    ends = asyncio.run(ended(Caller(hive), streams=50 * LOSSES, at_once=8, words=25, losses=losses))
    print(f"{dict(ends)} during {LOSSES} losses; answered again after {[round(s, 2) for s in seen]} s")
    assert ends[LYING] == 0
    assert ends[BROKEN] >= 1, "nothing was lost"
    assert ends[WHOLE] >= 1


def test_without_its_router_hive_says_so_and_goes_on_when_there_is_one_again(hive: Stack, whole: Router) -> None:
    whole.kill()
    refused = wait_for(lambda: Caller(hive).ask().status_code == 503, 60, "it is missed")
    assert "error" in Caller(hive).ask().json(), refused
    whole.start()
    wait_for(Caller(hive).works, 60, "requests are answered again")
    wait_for_slots(hive, 2 * EACH)
