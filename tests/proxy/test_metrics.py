"""The counters, their scrape, and a bound for its size."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from hive.endpoints.endpoints import ENDPOINTS
from hive.errors import HiveError, QueueFull
from hive.exposition import MetricKind
from hive.proxy.metrics import CANCELLED_IN, LAG_SECONDS, OTHER, STATUSES_MAX, TABLE, TENANTS_MAX, Metrics

CHAT = "/v1/chat/completions"
DOCUMENT = Path(__file__).parents[2] / "docs/metrics.md"


def scrape(metrics: Metrics) -> dict[str, Metric]:
    """The exposition as Prometheus reads it, by the name without `_total`."""
    return {family.name: family for family in text_string_to_metric_families(b"".join(metrics.exposition()).decode())}


def value(metrics: Metrics, sample: str, **labels: str) -> float:
    """One sample by its full name and labels. Fails where there is none."""
    found = [
        entry.value
        for family in scrape(metrics).values()
        for entry in family.samples
        if entry.name == sample and entry.labels == labels
    ]
    assert len(found) == 1, f"{sample} {labels}: {found}"
    return found[0]


def end(metrics: Metrics, *, endpoint: str = CHAT, tenant: str = "acme", status: int = 200, **more: object) -> None:
    facts: dict[str, object] = {
        "cut": False,
        "duration_s": 0.3,
        "ttft_s": 0.02,
        "tokens_in": 7,
        "tokens_out": 30,
        **more,
    }
    metrics.ended(endpoint, tenant, status, **facts)  # type: ignore[arg-type]


def everything(metrics: Metrics) -> None:
    """Each verb at least once, each reading handed in."""
    end(metrics)
    metrics.refused("queue_full")
    metrics.queued(0.1)
    metrics.cancelled("queued")
    metrics.dropped(2)
    metrics.woken("request")
    metrics.turned_away("connections_max")
    metrics.gave_way("idle")
    metrics.lag(0.001)
    counted = {row.name for row in TABLE} & metrics._counted().keys()
    for row in TABLE:
        if row.name not in counted:
            key = "a" if len(row.labels) == 1 else ("a",) * len(row.labels)
            metrics.read(row.name, lambda row=row, key=key: {key: 1.0} if row.labels else 1.0)  # type: ignore[misc]


# --- what is counted is shown ------------------------------------------------------------------------------------


def test_an_ended_request_is_counted_with_its_tokens_and_times() -> None:
    metrics = Metrics()
    end(metrics)
    end(metrics, cut=True, duration_s=400.0, ttft_s=None, tokens_in=1, tokens_out=None)
    assert value(metrics, "hive_proxy_requests_total", endpoint=CHAT, status="200") == 2
    assert value(metrics, "hive_proxy_cut_total", endpoint=CHAT) == 1
    assert value(metrics, "hive_proxy_tenant_requests_total", tenant="acme") == 2
    assert value(metrics, "hive_proxy_tokens_total", tenant="acme", direction="in") == 8
    assert value(metrics, "hive_proxy_tokens_total", tenant="acme", direction="out") == 30
    assert value(metrics, "hive_proxy_request_duration_seconds_sum", endpoint=CHAT) == pytest.approx(400.3)
    assert value(metrics, "hive_proxy_request_duration_seconds_bucket", endpoint=CHAT, le="300.0") == 1
    assert value(metrics, "hive_proxy_request_duration_seconds_count", endpoint=CHAT) == 2
    assert value(metrics, "hive_proxy_time_to_first_token_seconds_count", endpoint=CHAT) == 1


@pytest.mark.parametrize(
    ("verb", "argument", "sample", "labels"),
    [
        ("refused", "queue_full", "hive_proxy_refusals_total", {"code": "queue_full"}),
        ("refused", "made_up", "hive_proxy_refusals_total", {"code": OTHER}),
        ("cancelled", "streaming", "hive_proxy_cancels_total", {"state": "streaming"}),
        ("cancelled", "made up", "hive_proxy_cancels_total", {"state": OTHER}),
        ("woken", "ingress", "hive_proxy_wakes_total", {"cause": "ingress"}),
        ("turned_away", "connections_max", "hive_proxy_connections_refused_total", {"reason": "connections_max"}),
        ("gave_way", "idle", "hive_proxy_connections_displaced_total", {"of": "idle"}),
        ("queued", 0.0, "hive_proxy_queue_wait_seconds_count", {}),
        ("lag", 0.004, "hive_proxy_loop_lag_seconds_count", {}),
        ("dropped", 1, "hive_proxy_fields_dropped_total", {}),
    ],
)
def test_each_verb_has_its_metric(verb: str, argument: object, sample: str, labels: dict[str, str]) -> None:
    metrics = Metrics()
    assert value(metrics, sample, **labels) == 0
    getattr(metrics, verb)(argument)
    assert value(metrics, sample, **labels) == 1


def test_reloads_are_counted_and_failed_ones_apart() -> None:
    metrics = Metrics()
    metrics.reloaded()
    metrics.reload_failed()
    metrics.reload_failed()
    assert value(metrics, "hive_proxy_config_reloads_total") == 1
    assert value(metrics, "hive_proxy_config_reload_failed_total") == 2


@pytest.mark.parametrize(("lag_s", "bound"), [(0.0, "0.001"), (0.001, "0.001"), (0.0011, "0.002"), (9.0, "+Inf")])
def test_a_histogram_counts_a_bound_in_its_own_bucket(lag_s: float, bound: str) -> None:
    metrics = Metrics()
    metrics.lag(lag_s)
    family = scrape(metrics)["hive_proxy_loop_lag_seconds"]
    buckets = [(s.labels["le"], s.value) for s in family.samples if s.name.endswith("_bucket")]
    assert [le for le, _ in buckets] == [*map(str, LAG_SECONDS), "+Inf"]
    assert next(le for le, count in buckets if count) == bound
    assert [count for _, count in buckets] == sorted(count for _, count in buckets)


def test_what_somebody_knows_is_asked_at_each_scrape() -> None:
    metrics = Metrics()
    waiting = {"acme": 3.0}
    metrics.read("queue_waiting", lambda: waiting)
    assert value(metrics, "hive_proxy_queue_waiting", tenant="acme") == 3
    waiting["acme"] = 4.0
    assert value(metrics, "hive_proxy_queue_waiting", tenant="acme") == 4


def test_a_reading_of_no_row_is_refused() -> None:
    with pytest.raises(KeyError):
        Metrics().read("made_up", lambda: 1.0)


def test_the_codes_states_and_endpoints_that_may_come_are_told_from_the_start() -> None:
    """A rate needs to have seen the 0 before the first 1."""
    families = scrape(Metrics())
    codes = {sample.labels["code"] for sample in families["hive_proxy_refusals"].samples}
    assert {QueueFull.code, HiveError.code, OTHER} <= codes
    assert {sample.labels["state"] for sample in families["hive_proxy_cancels"].samples} == {*CANCELLED_IN, OTHER}
    endpoints = {sample.labels["endpoint"] for sample in families["hive_proxy_cut"].samples}
    assert {row.name for row in ENDPOINTS} <= endpoints


# --- bounds ------------------------------------------------------------------------------------------------------


def test_the_hundred_and_first_tenant_is_called_other() -> None:
    metrics = Metrics()
    for number in range(TENANTS_MAX + 50):
        end(metrics, tenant=f"t{number}", tokens_in=1)
        end(metrics, tenant=f"t{number}", tokens_in=1)
    families = scrape(metrics)
    tenants = {sample.labels["tenant"] for sample in families["hive_proxy_tenant_requests"].samples}
    assert tenants == {*(f"t{number}" for number in range(TENANTS_MAX)), OTHER}
    assert value(metrics, "hive_proxy_tenant_requests_total", tenant=OTHER) == 100
    assert value(metrics, "hive_proxy_tokens_total", tenant=OTHER, direction="in") == 100


def test_tenants_that_are_read_are_bounded_too_and_none_is_left_out() -> None:
    metrics = Metrics()
    metrics.read("queue_waiting", lambda: {f"t{number}": 1.0 for number in range(TENANTS_MAX + 50)})
    family = scrape(metrics)["hive_proxy_queue_waiting"]
    assert len(family.samples) == TENANTS_MAX + 1
    assert sum(sample.value for sample in family.samples) == TENANTS_MAX + 50
    assert value(metrics, "hive_proxy_queue_waiting", tenant=OTHER) == 50


def test_an_endpoint_that_is_in_no_table_and_a_flood_of_statuses_are_other() -> None:
    metrics = Metrics()
    for status in range(200, 600):
        end(metrics, endpoint="/made/up", status=status)
    samples = [
        sample
        for sample in scrape(metrics)["hive_proxy_requests"].samples
        if sample.labels["endpoint"] not in {row.name for row in ENDPOINTS}
    ]
    assert {sample.labels["endpoint"] for sample in samples} == {OTHER}
    assert len(samples) == STATUSES_MAX + 1
    assert sum(sample.value for sample in samples) == 400


def test_a_name_with_quotes_and_newlines_stays_one_label() -> None:
    metrics = Metrics()
    end(metrics, tenant='a"b\\c\nd')
    assert value(metrics, "hive_proxy_tenant_requests_total", tenant='a"b\\c\nd') == 1


# --- names -------------------------------------------------------------------------------------------------------


def test_scrape_and_document_have_the_same_metrics() -> None:
    rows = re.findall(r"^\| `(hive_proxy_\w+)` \| (\w+) \| ([\w, ]*) \| (.+) \|$", DOCUMENT.read_text(), re.MULTILINE)
    metrics = Metrics()
    everything(metrics)
    text = b"".join(metrics.exposition()).decode()
    shown = re.findall(r"^# HELP (\w+) (.+)$", text, re.MULTILINE)
    assert [(name, sentence) for name, _, _, sentence in rows] == shown
    assert [(name, kind) for name, kind, _, _ in rows] == re.findall(r"^# TYPE (\w+) (\w+)$", text, re.MULTILINE)
    labels = {row.full_name: ", ".join(row.labels) for row in TABLE}
    assert {name: told.strip() for name, _, told, _ in rows} == labels


def test_names_follow_prometheus_habits() -> None:
    metrics = Metrics()
    everything(metrics)
    for row in TABLE:
        assert re.fullmatch(r"hive_proxy_[a-z_]+", row.full_name)
        assert row.full_name.endswith("_total") == (row.kind == MetricKind.COUNTER)
        assert row.kind != MetricKind.HISTOGRAM or row.full_name.endswith("_seconds")
        assert row.sentence.endswith(".")
    for family in scrape(metrics).values():
        for sample in family.samples:
            row = next(row for row in TABLE if family.name == row.full_name.removesuffix("_total"))
            assert set(sample.labels) - {"le"} == set(row.labels), sample
