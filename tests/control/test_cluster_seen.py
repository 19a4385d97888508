"""A cluster as a person sees it: a whole daemon before servers that play an engine's answers."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from hive.conditions import FoundCondition
from hive.domain import BackendKind
from hive.settings.pool import ModelRow
from hive.settings.table import InferenceSection
from tests.control.box import AWAKE, Box
from tests.control.played_engine import PlayedEngine, playing
from tests.waiting import until

FAST = InferenceSection(slots_per_replica=4, cluster_poll_s=0.1)


@pytest.fixture
async def engine() -> AsyncIterator[PlayedEngine]:
    """vLLM Router before two workers."""
    async with playing() as played:
        played.route(True, True)
        yield played


async def started(box: Box, engine: PlayedEngine, kind: BackendKind = BackendKind.VLLM, **more: object) -> None:
    settings = msgspec.structs.replace(AWAKE, inference=FAST, **more)
    await box.start_helper()
    await box.start_daemon(settings, backend=(kind, engine.address))
    await box.start_proxy()
    await until(lambda: box.inference()["cluster"] is not None or not engine.answers)


def of_cluster(text: bytes) -> dict[str, float]:
    """The rows of /metrics that are about a cluster, without their common beginning."""
    prefix = "hive_backend_cluster_"
    return {
        sample.name.removeprefix(prefix): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
        if sample.name.startswith(prefix)
    }


async def test_the_api_shows_replicas_and_nodes_and_health_says_what_is_lost(box: Box, engine: PlayedEngine) -> None:
    await started(box, engine)
    found = box.inference()
    cluster = found["cluster"]
    assert (found["slots"], cluster["label"], cluster["running"], cluster["wanted"]) == (8, "vLLM Router", 2, 2)
    health = box.services.health.view()["backend"]
    assert health is not None
    assert health["cluster"] is not None
    assert {**health["cluster"], "asked_at": 0} == {**cluster, "asked_at": 0}
    assert not [one for one in box.services.health.conditions() if one.code.startswith("cluster")]
    engine.route(True, False)
    await until(lambda: box.inference()["slots"] == 4)
    nodes = [(node["name"], node["up"], node["replicas"]) for node in box.inference()["cluster"]["nodes"]]
    assert nodes == [("10.0.0.1", True, 1), ("10.0.0.2", False, 0)]
    [lost] = [one for one in box.services.health.conditions() if one.code.startswith("cluster")]
    assert lost.code == "cluster_short"
    assert lost.text.startswith("1 of 2 replicas of vLLM Router at ")
    assert ", down: 10.0.0.2: requests wait longer" in lost.text


async def test_an_engine_that_tells_nothing_more_is_a_problem_and_what_it_told_before_is_none(
    box: Box, engine: PlayedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hive.backends.capacity.KNOWN_FOR_S", 0.0)  # ten seconds in the end
    await started(box, engine)
    engine.route(True, False)
    await until(lambda: box.inference()["slots"] == 4)
    engine.answers["/workers"] = (500, b"")

    def of_cluster() -> list[FoundCondition]:
        return [one for one in box.services.health.conditions() if one.code.startswith("cluster")]

    await until(lambda: box.inference()["warning"] and [one.code for one in of_cluster()] == ["cluster_untold"])
    [found] = of_cluster()
    assert found.text.startswith("vLLM Router does not tell how many replicas run: ")


async def test_each_change_of_capacity_is_one_event_and_finding_the_cluster_is_none(
    box: Box, engine: PlayedEngine
) -> None:
    await started(box, engine)
    engine.route(True, False)
    await until(lambda: box.inference()["slots"] == 4)
    engine.route(True, True)
    await until(lambda: box.inference()["slots"] == 8)
    told = [event for event in await box.services.audit_log.past(100) if event["kind"] == "backend.capacity"]
    assert [event["reason"] for event in told] == [
        "4 at once, before 8 at once: 1 of 2 replicas x 4, told by vLLM Router",
        "8 at once, before 4 at once: 2 of 2 replicas x 4, told by vLLM Router",
    ]


async def test_metrics_tell_of_a_cluster_and_of_nothing_where_there_is_none(box: Box, engine: PlayedEngine) -> None:
    await started(box, engine)
    engine.route(True, False)
    await until(lambda: box.inference()["slots"] == 4)
    found = of_cluster(await box.services.scraper.scrape())
    assert found.pop("asked_seconds") > 1_700_000_000
    assert found == {
        "replicas_wanted": 2,
        "replicas_running": 1,
        "nodes": 2,
        "nodes_up": 1,
        "stuck": 0,
        "waiting": 0,
    }


async def test_before_one_server_nothing_is_told_of_a_cluster(box: Box) -> None:
    await box.start_helper()
    await box.start_daemon()
    assert box.inference()["cluster"] is None
    assert of_cluster(await box.services.scraper.scrape()) == {}


async def test_the_pool_shows_a_cluster_with_its_places_and_books_no_byte_for_it(
    box: Box, engine: PlayedEngine
) -> None:
    far = ModelRow(backend="remote", url="http://192.0.2.1:9/v1")
    await started(box, engine, models={"far": far})
    view = box.services.pool.view()
    assert view["enabled"]
    [row] = view["backends"]
    assert (row["kind"], row["state"], row["slots"], row["grants"]) == ("vllm", "ready", 8, [])
    assert row["why"] == "2 of 2 replicas of vLLM Router run, and none of their memory is the pool's"
    assert [account["charged_bytes"] for account in view["accounts"]] == [0] * len(view["accounts"])
    await box.services.pool.refresh()
    assert [slot["model"] for slot in box.services.pool.view()["slots"]] == ["far"]
    engine.route(True, False)
    await until(lambda: box.services.pool.view()["backends"][0]["slots"] == 4)
    charged = [line for line in (await box.services.scraper.scrape()).splitlines() if b"pool_charged_bytes{" in line]
    assert not [line for line in charged if not line.endswith(b" 0.0")]
