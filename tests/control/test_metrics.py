"""Prometheus's view of the daemon: of each GPU there may be, and while something is down."""

from __future__ import annotations

import asyncio
import signal
import sqlite3
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from hive.control import metrics
from hive.control.metrics import ROWS, exposition, gpu_values
from hive.domain import AgentStatus
from hive.host.nvml import Nvml
from hive.link.usage import UsageBatch, UsageItem
from tests.control.box import AWAKE, Box
from tests.fakes import fake_nvml
from tests.fakes.fake_nvml import GIB, Gpu, Library, in_place_of, with_mig
from tests.fakes.usage_events import usage_event
from tests.waiting import until

Found = dict[tuple[str, ...], float]


def told(text: bytes) -> dict[str, Found]:
    """Name in TABLE → labels in the order of its row → value; of a name that is not told nothing."""
    found: dict[str, Found] = {}
    for family in text_string_to_metric_families(text.decode()):
        name = family.name.removeprefix("hive_")
        if name.startswith(("vllm_", "proxy_")):
            continue  # the runner API's second names of what is told already, and what the proxy tells
        row = ROWS[name]
        found[name] = {
            tuple(sample.labels[label] for label in row.labels): sample.value
            for sample in family.samples
            if "le" not in sample.labels
        }
    return found


# --- GPUs --------------------------------------------------------------------------------------------------------


def of_gpus(*gpus: Gpu, fails_init: int = fake_nvml.OK) -> dict[str, Found]:
    with in_place_of(Library(*gpus, fails_init=fails_init)) as api:
        return told(exposition(gpu_values(Nvml(lambda: api).look())))


@pytest.mark.parametrize("fails_init", [fake_nvml.OK, 9], ids=["no GPU", "no driver"])
def test_without_a_gpu_nothing_is_told_of_one(fails_init: int) -> None:
    assert not any(of_gpus(fails_init=fails_init).values())


@pytest.mark.parametrize("count", [1, 8])
def test_each_gpu_tells_its_memory_its_work_and_its_processes(count: int) -> None:
    gpus = [Gpu(used=(n + 1) * GIB, busy=10 * n, processes=[(40 + n, n * GIB)]) for n in range(count)]
    found = of_gpus(*gpus)
    assert found["gpu_up"] == {(str(n), "NVIDIA H200"): 1 for n in range(count)}
    assert found["gpu_memory_total_bytes"] == {(str(n),): 140 * GIB for n in range(count)}
    assert found["gpu_memory_used_bytes"] == {(str(n),): (n + 1) * GIB for n in range(count)}
    assert found["gpu_utilization_ratio"] == {(str(n),): pytest.approx(n / 10) for n in range(count)}
    assert found["gpu_process_memory_bytes"] == {(str(n), str(40 + n)): n * GIB for n in range(count)}


@pytest.mark.parametrize("privileged", [True, False])
def test_with_mig_each_device_tells_its_memory_and_nobody_tells_how_busy_it_is(privileged: bool) -> None:
    small, large = Gpu(total=16 * GIB, used=GIB), Gpu(total=70 * GIB, used=60 * GIB, processes=[(41, 59 * GIB)])
    found = of_gpus(with_mig(privileged=privileged, _0=small, _4=large))
    assert found["gpu_up"] == {("0", "NVIDIA H200"): float(privileged)}
    assert found["gpu_instance_memory_used_bytes"] == {("0", "0"): GIB, ("0", "4"): 60 * GIB}
    assert found["gpu_process_memory_bytes"] == {("0", "41"): 59 * GIB}
    assert found["gpu_memory_total_bytes"] == {("0",): (140 if privileged else 86) * GIB}
    assert "gpu_utilization_ratio" not in found


def test_of_a_lost_gpu_only_that_is_told_and_the_others_stand_for_themselves() -> None:
    found = of_gpus(Gpu(is_lost=True), Gpu(used=GIB, busy=50))
    assert found["gpu_up"] == {("0", ""): 0, ("1", "NVIDIA H200"): 1}
    for name in ("gpu_memory_total_bytes", "gpu_memory_used_bytes", "gpu_utilization_ratio"):
        assert found[name].keys() == {("1",)}


# --- what is down ------------------------------------------------------------------------------------------------


async def scraped(box: Box) -> dict[str, Found]:
    return told(await box.services.scraper.scrape())


@pytest.fixture
def locked(box: Box) -> Iterator[Any]:
    """Locks and frees the database as somebody's `sqlite3` does."""
    others: list[sqlite3.Connection] = []

    class Lock:
        def take(self) -> None:
            others.append(sqlite3.connect(box.paths.database, isolation_level=None))
            others[0].execute("BEGIN IMMEDIATE")

        def free(self) -> None:
            others.pop().close()

    yield Lock()
    for other in others:
        other.close()


async def test_a_database_that_somebody_keeps_locked_is_down_and_the_rest_is_told(
    box: Box, locked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as nothing had to be written it was up."""
    monkeypatch.setattr(metrics, "WRITTEN_S", 60)
    await box.start_daemon(AWAKE)
    assert (await scraped(box))["up"]["database",] == 1
    locked.take()
    monkeypatch.setattr(metrics, "WRITTEN_S", 0.2)
    found = await scraped(box)
    assert found["up"]["database",] == 0
    assert found["agents"]["running", "awake"] == 0
    locked.free()
    monkeypatch.setattr(metrics, "WRITTEN_S", 60)  # SQLite looks again when it has slept
    assert (await scraped(box))["up"]["database",] == 1


async def test_of_a_proxy_that_is_gone_nothing_old_is_told(box: Box) -> None:
    """Requests in flight stayed at what was seen last."""
    await box.start_helper()
    await box.start_daemon(AWAKE)
    await box.start_real_proxy()
    found = await scraped(box)
    assert (found["up"]["proxy",], found["requests_in_flight"], found["requests_parked"]) == (1, {(): 0}, {(): 0})
    assert (found["queue_waiting"], found["queue_running"]) == ({(): 0}, {(): 0})
    await box.kill_real_proxy()
    found = await scraped(box)
    assert found["up"] == {("daemon",): 1, ("proxy",): 0, ("helper",): 1, ("redis",): 0, ("database",): 1}
    assert not {"requests_in_flight", "requests_parked", "queue_waiting", "queue_running"} & found.keys()


async def test_a_part_that_hangs_is_down_and_takes_nothing_else_away(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    """A helper that was stopped kept a scrape for 17 s, longer than Prometheus waits, and was up."""
    monkeypatch.setattr(metrics, "ANSWER_S", 0.5)
    await box.start_helper()
    await box.start_daemon(AWAKE)
    await box.start_real_proxy()
    assert box.helper is not None
    hangs = asyncio.Event()

    async def never(*_: object) -> object:
        return await hangs.wait()

    monkeypatch.setattr(type(box.services.effects.helper), "stat", never)
    assert box._proxy_process is not None
    box._proxy_process.send_signal(signal.SIGSTOP)
    try:
        found = await scraped(box)
    finally:
        box._proxy_process.send_signal(signal.SIGCONT)
    assert found["up"] == {("daemon",): 1, ("proxy",): 0, ("helper",): 0, ("redis",): 0, ("database",): 1}
    assert "agents_memory_bytes" not in found


async def test_usage_that_sqlite_does_not_take_is_told_with_its_age_also_without_redis(box: Box) -> None:
    await box.start_daemon(AWAKE)
    assert box.daemon is not None
    assert (await scraped(box))["usage_waiting"] == {(): 0}
    database = box.daemon._database
    pages = await database.read(lambda conn: conn.execute("PRAGMA page_count").fetchone()[0])
    await database.write(lambda conn: conn.execute(f"PRAGMA max_page_count = {pages}").fetchall())
    lines = b"\n".join(msgspec.json.encode(usage_event(no, model="m" * 5000)) for no in range(1, 51))
    box.daemon.usage(UsageBatch(epoch="p1", committed_to=0, items=[UsageItem(1, 50, lines)]))
    await until(lambda: box.services.health.view()["usage"]["degraded"])
    found = await scraped(box)
    assert (found["up"]["redis",], found["usage_waiting"]) == (0, {(): 50})
    assert found["usage_lag_seconds"][()] > 0
    await database.write(lambda conn: conn.execute("PRAGMA max_page_count = 100000").fetchall())
    await until(lambda: not box.services.health.view()["usage"]["degraded"])
    found = await scraped(box)
    assert (found["usage_waiting"], found["usage_lag_seconds"]) == ({(): 0}, {(): 0})


async def test_each_series_of_agents_is_there_before_the_first_agent(box: Box) -> None:
    """The series of deep sleepers came and went with them."""
    await box.start_helper()
    await box.start_daemon(AWAKE)
    found = await scraped(box)
    awake = {(str(status), "awake") for status in AgentStatus if status is not AgentStatus.PAUSED}
    assert found["agents"] == dict.fromkeys([*awake, ("paused", "light"), ("paused", "deep")], 0)
    assert found["agents_memory_bytes"] == {("running",): 0, ("paused",): 0}
