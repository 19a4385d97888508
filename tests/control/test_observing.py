"""Statements of the daemon on itself: the two answers of the original specification, and what Prometheus reads."""

from __future__ import annotations

import json
import re
import time
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from hive.control import views
from hive.control.counters import WAKE_SECONDS, Counters, Used
from hive.control.metrics import ROWS, TABLE, exposition, gpu_values, saved_bytes
from hive.domain import (
    Agent,
    AgentSpec,
    AgentStatus,
    BackendInfo,
    BackendKind,
    Band,
    By,
    SleepDepth,
    Tier,
    UsageEvent,
    WakeCause,
)
from hive.errors import NotFound
from hive.exposition import MetricKind
from hive.host.memory import ZramDevice
from hive.host.nvml import GpuState, MigDevice, ProcessOnGpu, SeenGpus
from hive.lifecycle.adapter_counts import AdapterCounts
from hive.link.messages import Activity
from hive.pool import decider
from hive.pool.state import SlotState
from hive.pooling.lease_counts import LeaseCounts
from hive.pooling.pool_counts import LABELS, STATES, PoolCounts, label_of, pool_values
from hive.shapes.pool import PoolAccount, PoolView
from hive.store import usage
from hive.store.database import Database
from hive.store.usage import CostSums, SpentSums, UsageFilter
from tests.control.box import AWAKE, Box
from tests.waiting import until

GOLDEN = Path(__file__).parents[1] / "api/golden"
DOCUMENT = Path(__file__).parents[2] / "docs/metrics.md"
GIB = 1024**3
H200 = GpuState(0, name="NVIDIA H200", total_bytes=140 * GIB, used_bytes=GIB, free_bytes=139 * GIB, busy_percent=25)
LOST = GpuState(1, fault="GPU is lost")
VLLM = BackendInfo(kind=BackendKind.VLLM, address="127.0.0.1:8000", up=True, places=4)


def golden(name: str) -> Any:
    return json.loads((GOLDEN / name).read_text())


def agent(number: int, name: str, status: AgentStatus, tier: Tier = Tier.MEDIUM) -> Agent:
    return Agent(id=f"a{number}", spec=AgentSpec(name=name, command=["true"], tier=tier), status=status)


def event(no: int, **fields: object) -> UsageEvent:
    row = {
        "id": f"p1-{no}",
        "epoch": "p1",
        "event_no": no,
        "agent_id": "a1",
        "tenant": "default",
        "model": "small",
        "backend": "vllm",
        "endpoint": "/v1/chat/completions",
        "tokens_in": 10,
        "tokens_out": 1,
        "created_at": 1000.0 + no,
        **fields,
    }
    return msgspec.convert(row, UsageEvent)


def scrape(text: bytes) -> dict[str, Metric]:
    """As Prometheus reads it, by the name without `_total`."""
    return {family.name: family for family in text_string_to_metric_families(text.decode())}


def values(text: bytes, name: str) -> dict[tuple[str, ...], float]:
    """Labels' values in the order of the row → value; empty where it is not told."""
    found, labels = scrape(text).get(name), ROWS[name.removeprefix("hive_")].labels
    return {} if found is None else {tuple(s.labels[label] for label in labels): s.value for s in found.samples}


# --- the shapes of the original specification --------------------------------------------------------------------


def test_the_stats_of_inference_have_the_specified_shape() -> None:
    agents = [
        (agent(1, "alice", AgentStatus.RUNNING), Used(2, 10, 4)),
        (agent(2, "bob", AgentStatus.PAUSED, Tier.HIGH), Used(2, 100, 50)),
        (agent(3, "carol", AgentStatus.STOPPED), Used()),
    ]
    shown = views.inference_stats_view(
        VLLM, SpentSums(10, 4, 2), SpentSums(110, 54, 4), agents, SeenGpus((H200, LOST)), 3
    )
    assert json.loads(msgspec.json.encode(shown)) == golden("inference_stats.json")


def test_at_most_ten_agents_are_on_top_and_those_of_equal_use_go_by_name() -> None:
    agents = [(agent(number, f"n{number:02}", AgentStatus.ERROR), Used(1, number // 2, 0)) for number in range(12)]
    shown = views.inference_stats_view(None, SpentSums(), SpentSums(), agents, SeenGpus(why_not="no driver"), 0)
    assert [top["name"] for top in shown["topAgents"]][:3] == ["n10", "n11", "n08"]
    assert len(shown["topAgents"]) == 10
    assert (shown["backend"], shown["activeAgents"]) == (None, 0)
    assert shown["vram"] == {"gpus": [], "totalMB": 0, "usedMB": 0}


async def test_an_agents_usage_has_the_specified_shape(database: Database) -> None:
    events = [
        event(1),
        event(2, tokens_in=None, tokens_out=None),
        event(3, model="large", tokens_in=20, tokens_out=5, duration_ms=12.5),
        event(4, agent_id="another"),
    ]
    await database.write(lambda conn: usage.insert(conn, events))
    found = await database.read(lambda conn: usage.agent_usage(conn, "a1", since=0, period="24h", limit=2))
    assert json.loads(msgspec.json.encode(found)) == golden("agent_usage.json")


async def test_what_was_spent_is_what_ended_since_then(database: Database) -> None:
    events = [event(1), event(2, tokens_in=None, tokens_out=None), event(3, agent_id="removed"), event(4)]
    await database.write(lambda conn: usage.insert(conn, events))
    spent = {since: await database.read(partial(usage.spent_since, since=since)) for since in (0.0, 1003, 9e9)}
    assert list(spent.values()) == [SpentSums(30, 3, 4), SpentSums(20, 2, 2), SpentSums()]


async def test_the_daemon_counts_running_and_paused_agents_requests_in_flight_and_ended_ones(box: Box) -> None:
    await box.start_helper()
    await box.start_daemon(AWAKE)
    assert box.daemon is not None
    proxy = await box.start_proxy()
    alice, bob, _, _ = [await box.create(name) for name in ("alice", "bob", "carol", "dave")]
    proxy.seen = {alice["id"]: Activity(in_flight=2), bob["id"]: Activity(in_flight=1)}
    await box.pause("carol", timeout_s=20, now=False, actor="uid:0")
    await box.stop("dave", "uid:0")
    rows = [event(1, created_at=time.time()), event(2, created_at=time.time() - 7200)]
    await box.daemon._database.write(lambda conn: usage.insert(conn, rows))
    found = await box.services.usage.inference()
    assert (found["activeAgents"], found["concurrentRequests"]) == (3, 3)
    assert found["tokensLastHour"] == {"totalIn": 10, "totalOut": 1, "requests": 1}
    assert found["tokensLastDay"] == {"totalIn": 20, "totalOut": 2, "requests": 2}
    assert found.keys() == golden("inference_stats.json").keys()
    assert found["topAgents"][0].keys() == golden("inference_stats.json")["topAgents"][0].keys()


# --- what Prometheus reads ---------------------------------------------------------------------------------------


def everything() -> bytes:
    """A scrape in which every row has a value."""
    counters = Counters([], CostSums(requests=5))
    counters.woke(WakeCause.REQUEST, 3.0, SleepDepth.LIGHT)
    part = MigDevice(2, "1g", 9, 3, 6, ())
    busy = H200._replace(
        processes=(ProcessOnGpu(41, 7), ProcessOnGpu(41, 5), ProcessOnGpu(42, None)), instances=(part,)
    )
    made = {
        **counters.metrics(),
        **PoolCounts().metrics(),
        **LeaseCounts().metrics([]),
        **AdapterCounts().metrics([]),
        **gpu_values(SeenGpus((busy, LOST))),
    }
    return exposition({row.name: made.get(row.name) or {("x",) * len(row.labels): 1.0} for row in TABLE})


def test_scrape_and_document_have_the_same_metrics() -> None:
    rows = re.findall(
        r"^\| `(hive_(?!proxy_)\w+)` \| (\w+) \| ([\w, ]*) \| (.+) \|$", DOCUMENT.read_text(), re.MULTILINE
    )
    text = everything().decode()
    assert [(name, sentence) for name, _, _, sentence in rows] == re.findall(r"^# HELP (\w+) (.+)$", text, re.MULTILINE)
    assert [(name, kind) for name, kind, _, _ in rows] == re.findall(r"^# TYPE (\w+) (\w+)$", text, re.MULTILINE)
    assert {name: told.strip() for name, _, told, _ in rows} == {row.full_name: ", ".join(row.labels) for row in TABLE}


def test_names_follow_prometheus_habits() -> None:
    families = scrape(everything())
    for row in TABLE:
        assert row.full_name.endswith("_total") == (row.kind == MetricKind.COUNTER)
        assert row.sentence.endswith(".")
        for sample in families[row.full_name.removesuffix("_total")].samples:
            assert set(sample.labels) - {"le"} == set(row.labels), sample


def test_a_wake_is_counted_by_cause_and_depth_and_its_time_by_cause() -> None:
    counters = Counters([], CostSums())
    assert values(exposition(counters.metrics()), "hive_wakes")["ingress", "deep"] == 0
    for took_ms in (1.0, 1.1, 90_000.0):
        counters.woke(WakeCause.INGRESS, took_ms, SleepDepth.DEEP)
    text = exposition(counters.metrics())
    assert values(text, "hive_wakes")["ingress", "deep"] == 3
    samples = scrape(text)["hive_wake_duration_seconds"].samples
    found = {s.labels.get("le", s.name): s.value for s in samples if s.labels["cause"] == "ingress"}
    assert (found["0.001"], found["0.0025"], found[str(WAKE_SECONDS[-1])], found["+Inf"]) == (1, 2, 2, 3)
    assert found["hive_wake_duration_seconds_sum"] == pytest.approx(90.0021)


def test_loads_evictions_and_waits_of_the_pool_are_counted_by_a_few_words() -> None:
    counts = PoolCounts()
    counts.loaded("qwen3-8b", "it fits", 3.0)
    counts.loaded("qwen3-8b", "it fits", 700.0)
    counts.evicted("room for embed-gte-0a1b2c3d")
    counts.evicted("room for something else")
    counts.waited(Band.HIGH, 12.0)
    counts.thrash()
    counts.cut()
    text = exposition(counts.metrics())
    assert values(text, "hive_pool_loads") == {("qwen3-8b", "fits"): 2}
    assert values(text, "hive_pool_evictions") == {("room",): 2}
    assert values(text, "hive_pool_thrash") == values(text, "hive_pool_turn_cut") == {(): 1}
    loads = {s.labels.get("le", s.name): s.value for s in scrape(text)["hive_pool_load_seconds"].samples}
    assert (loads["2.5"], loads["5.0"], loads["600.0"], loads["+Inf"]) == (0, 1, 1, 2)
    waits = {s.labels["band"]: s.value for s in scrape(text)["hive_pool_wait_seconds"].samples if "_sum" in s.name}
    assert waits == {"high": 12.0, "normal": 0.0, "low": 0.0}


def test_every_reason_of_the_decider_has_a_label_that_is_told_in_the_document() -> None:
    """A sentence of the decider that is said another way would else become `other` and nobody would see."""
    source = (Path(decider.__file__)).read_text()
    for begin in LABELS:
        assert re.search(rf'f?"{begin}', source), begin
    for label in {*LABELS.values(), label_of("")}:
        assert f"`{label}`" in DOCUMENT.read_text()


def test_the_states_of_the_pool_s_models_are_all_told() -> None:
    assert set(STATES) == {str(state) for state in SlotState}


def test_the_pool_s_memory_is_told_by_account_and_kind_and_nothing_that_nobody_measured() -> None:
    account: PoolAccount = {
        "id": "GPU-1",
        "name": "H200",
        "total_bytes": 100,
        "reserve_bytes": 1,
        "charged_bytes": 30,
        "leased_bytes": 0,
        "measured_bytes": None,
        "used_bytes": None,
        "foreign_bytes": 5,
        "free_bytes": -2,
    }
    slot: Any = {"state": "ready", "backend": "llama", "grants": [{"account": "GPU-1", "charged_bytes": 15}]}
    slots: list[Any] = [slot, slot]
    view: PoolView = {
        "enabled": True,
        "why_not": "",
        "accounts": [account],
        "slots": slots,
        "backends": [],
        "leases": [],
    }
    text = exposition(pool_values(view))
    assert values(text, "hive_pool_charged_bytes") == {("GPU-1", "llama"): 30}
    assert values(text, "hive_pool_measured_bytes") == {}
    assert values(text, "hive_pool_free_bytes") == {("GPU-1",): -2}
    assert values(text, "hive_pool_slots") == {(state,): 2.0 if state == "ready" else 0.0 for state in STATES}


def test_what_a_gpu_does_not_tell_is_left_out_and_no_zero() -> None:
    text = everything()
    assert values(text, "hive_gpu_up") == {("0", "NVIDIA H200"): 1, ("1", ""): 0}
    assert values(text, "hive_gpu_memory_used_bytes") == {("0",): GIB}
    assert values(text, "hive_gpu_utilization_ratio") == {("0",): 0.25}
    assert values(text, "hive_gpu_process_memory_bytes") == {("0", "41"): 12}
    assert values(text, "hive_gpu_instance_memory_used_bytes") == {("0", "2"): 3}


def test_a_value_without_a_row_is_refused() -> None:
    with pytest.raises(KeyError):
        exposition({"made_up": {(): 1.0}})


@pytest.mark.parametrize(
    ("zrams", "saved"),
    [
        ([], 900),
        ([ZramDevice("zram0", "lz4", 9, 0, 4096)], 900),
        ([ZramDevice("zram0", "lz4", 9, 300, 100), ZramDevice("zram1", "lz4", 9, 300, 200)], 450),
        ([ZramDevice("zram0", "lz4", 9, 100, 300)], 0),
    ],
)
def test_what_swap_saves_of_ram_is_less_what_zram_takes_for_it(zrams: list[ZramDevice], saved: int) -> None:
    assert saved_bytes(900, zrams) == saved


async def test_a_scrape_tells_what_the_daemon_sees(box: Box, redis_server: Any) -> None:
    box.paths.redis_socket.symlink_to(redis_server.socket)
    await box.start_helper()
    await box.start_daemon(AWAKE)
    assert box.daemon is not None
    proxy = await box.start_proxy()
    bob = await box.create("bob")
    proxy.seen = {bob["id"]: Activity(in_flight=1, parked=2)}
    await box.create("carol")
    await box.pause("carol", timeout_s=20, now=False, actor="uid:0")
    await until(lambda: box.services.health.view()["redis"]["up"])
    text = await box.services.scraper.scrape()
    agents = values(text, "hive_agents")
    assert {labels: count for labels, count in agents.items() if count} == {
        ("running", "awake"): 1,
        ("paused", "light"): 1,
    }
    assert agents["error", "awake"] == 0
    assert values(text, "hive_pauses") == {(): 1}
    assert (values(text, "hive_requests_in_flight"), values(text, "hive_requests_parked")) == ({(): 1}, {(): 2})
    assert values(text, "hive_agents_memory_bytes")["running",] > 0
    assert values(text, "hive_agents_swapped_bytes") == values(text, "hive_sleep_saved_bytes") == {(): 0}
    assert values(text, "hive_up") == {(part,): 1 for part in ("daemon", "proxy", "helper", "redis", "database")}
    assert values(text, "hive_backend_up") == {("",): 0}
    assert (values(text, "hive_usage_waiting"), values(text, "hive_usage_lag_seconds")) == ({(): 0}, {(): 0})
    await box.resume("carol", "uid:0")
    assert values(await box.services.scraper.scrape(), "hive_wakes")["operator", "light"] == 1


async def test_a_scrape_of_a_daemon_that_is_alone_leaves_out_what_nobody_knows(box: Box) -> None:
    await box.start_daemon(AWAKE)
    text = await box.services.scraper.scrape()
    assert values(text, "hive_up") == {
        ("daemon",): 1,
        ("proxy",): 0,
        ("helper",): 0,
        ("redis",): 0,
        ("database",): 1,
    }
    told = scrape(text).keys()
    absent = {"agents_memory_bytes", "agents_swapped_bytes", "sleep_saved_bytes"}
    assert not {f"hive_{name}" for name in absent} & told


async def test_usage_is_asked_by_an_agents_name_and_after_its_removal_by_its_id(box: Box) -> None:
    await box.everything()
    assert box.daemon is not None
    bob = await box.create("bob")
    rows = [event(1, agent_id=bob["id"], created_at=time.time()), event(2, created_at=time.time())]
    await box.daemon._database.write(lambda conn: usage.insert(conn, rows))
    by_model = await box.services.usage.spent(60, By.MODEL, UsageFilter(agent="bob"))
    assert (by_model["models"][0]["requests"], by_model["totals"]["requests"]) == (1, 1)
    assert "key" not in by_model["models"][0]
    by_agent = await box.services.usage.spent(60, By.AGENT, UsageFilter(agent="bob"))
    assert [agent["name"] for agent in by_agent["agents"]] == ["bob"]
    await box.services.agents.remove("bob", "uid:0")
    with pytest.raises(NotFound):
        await box.services.usage.spent(60, By.AGENT, UsageFilter(agent="bob"))
    gone = await box.services.usage.spent(60, By.AGENT, UsageFilter(agent=bob["id"]))
    assert [(agent["name"], agent["requests"]) for agent in gone["agents"]] == [(None, 1)]
