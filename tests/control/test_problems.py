"""Complaints of the daemon: the same wherever they are told, with something to type against each."""

from __future__ import annotations

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from hive.conditions import Where, condition, conditions_in
from hive.control.health import Facts, conditions_of
from hive.domain import BackendInfo, BackendKind
from hive.store.anew import Loss
from tests.control.box import AWAKE, Box

LOSS = Loss(at=0.0, why="malformed", aside="/s/d", copy="missing", agents=0, tokens=0)
DOWN = BackendInfo(kind=BackendKind.VLLM, address="/i/v.sock", up=False)
NOT_STARTED = condition("backend_not_started", why="exited with 1")


@pytest.mark.parametrize(
    ("facts", "codes"),
    [
        ({}, []),
        ({"is_suspect": True}, ["database_suspect"]),
        ({"loss": LOSS}, ["database_begun_anew"]),
        ({"loss": msgspec.structs.replace(LOSS, is_rollback=True)}, ["database_rolled_back"]),
        ({"proxy": False, "helper": False}, ["proxy_disconnected", "helper_disconnected"]),
        ({"redis": False, "redis_at": "/r/redis.sock"}, ["redis_down"]),
        ({"redis": False, "redis_at": "redis:6379", "redis_why": "WRONGPASS"}, ["redis_of_url_down"]),
        ({"free_bytes": 100 << 20}, []),
        ({"free_bytes": (100 << 20) - 1}, ["disk_nearly_full"]),
        ({"usage_waits": "another program keeps it locked"}, ["usage_waits"]),
        ({"usage_waits": "the disk is full", "is_disk_full": True}, ["usage_waits_for_disk"]),
        ({"switching_to": "vllm", "backend": DOWN}, ["backend_switching"]),
        ({"not_started": NOT_STARTED}, ["backend_not_started"]),
        ({"not_started": NOT_STARTED, "backend": msgspec.structs.replace(DOWN, up=True)}, []),
        ({"backend": DOWN}, ["backend_down"]),
        ({"costly": {"m": 0.1, "n": 0.2}}, ["speculation_costs"]),
        ({"templates_failed": {"lg": "its imports started threads"}}, ["template_failed"]),
        ({"agents_failed": {"crash": "exited with 1", "crush": "exited with 2"}}, ["agent_failed"]),
        ({"backend": msgspec.structs.replace(DOWN, kind=BackendKind.DEMO)}, ["demo_backend_down"]),
    ],
)
def test_what_the_daemon_sees_has_codes(facts: dict[str, object], codes: list[str]) -> None:
    found = conditions_of(msgspec.structs.replace(Facts(state="/s"), **facts))
    assert [one.code for one in found] == codes
    assert all(one.text and one.fix for one in found)


async def test_each_part_that_is_missing_is_told_the_same_everywhere(box: Box) -> None:
    await box.start_daemon(AWAKE)
    health = box.services.health.view()
    told = conditions_in(health)
    assert [one.code for one in told] == ["proxy_disconnected", "helper_disconnected", "redis_down"]
    assert [one.at(Where()).fix for one in told] == ["hive logs proxy", "hive logs sandbox", "hive logs redis"]
    assert health["problems"] == [one.text for one in told]
    option = f" --state-dir {box.paths.state}"
    assert [one.fix for one in told] == [one.at(Where(option=option, files=option)).fix for one in told]
    assert await of_metrics(box) == {(one.code, str(one.severity)) for one in told}


async def of_metrics(box: Box) -> set[tuple[str, str]]:
    text = (await box.services.scraper.scrape()).decode()
    samples = [
        sample
        for family in text_string_to_metric_families(text)
        if family.name == "hive_problem"
        for sample in family.samples
    ]
    assert all(sample.value == 1 for sample in samples)
    return {(sample.labels["code"], sample.labels["severity"]) for sample in samples}
