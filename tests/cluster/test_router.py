"""Hive before a real vLLM Router with a worker on each of two hosts: what it tells, what is lost, what comes back."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator

import pytest

from tests.cluster.namespaces import wait_for
from tests.cluster.streams import BROKEN, LYING, WHOLE, Caller, ended
from tests.cluster.vllm_router import Router, vllm_router
from tests.journeys.stack import Stack, stack

pytestmark = [pytest.mark.ray, pytest.mark.redis, pytest.mark.timeout(300)]

LOSSES = int(os.environ.get("HIVE_CLUSTER_LOSSES", "3"))
"""Of workers under load; 20 for the promise of 1,000 streams (docs/cluster.md)."""
CONFIG = "slots_per_replica = 4\n"


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Router]:
    with vllm_router(tmp_path_factory.mktemp("router")) as router:
        yield router


@pytest.fixture(scope="module")
def hive(router: Router) -> Iterator[Stack]:
    with stack(url=router.url, config=CONFIG) as hive:
        yield hive


@pytest.fixture
def whole(router: Router) -> Router:
    for worker in router.workers:
        if not worker.host.pids():
            worker.start()
    router.wait_for(2)
    return router


def test_no_stream_ends_clean_though_a_worker_was_lost(hive: Stack, whole: Router) -> None:
    seen = []

    async def losses() -> None:
        for number in range(LOSSES):
            await asyncio.sleep(1)
            worker = whole.workers[number % 2]
            worker.kill()
            seen.append(await asyncio.to_thread(wait_for, Caller(hive).works, 60, "requests are answered again"))
            await asyncio.sleep(1)
            await asyncio.to_thread(worker.start)
            await asyncio.to_thread(whole.wait_for, 2)

    ends = asyncio.run(ended(Caller(hive), streams=50 * LOSSES, at_once=12, words=30, losses=losses))
    print(f"{dict(ends)} during {LOSSES} losses; answered again after {[round(s, 2) for s in seen]} s")
    assert ends[LYING] == 0
    assert ends[BROKEN] >= 1, "nothing was lost"
    assert ends[WHOLE] >= 1
    assert max(seen) < 60
