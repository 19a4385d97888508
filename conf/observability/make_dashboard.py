"""Writes dashboard.json beside itself: a Grafana dashboard of one Hive, made of PANELS.

    python conf/observability/make_dashboard.py

What a panel asks is plain PromQL, without a macro of Grafana's: a test asks Prometheus the same.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

OUT = Path(__file__).with_name("dashboard.json")
WIDE, COLUMNS, TALL = 8, 24, 8
"""A panel's width and height in Grafana's grid, and the grid's columns."""


class Query(NamedTuple):
    """One expression, and the legend of its series."""

    expression: str
    legend: str


class Panel(NamedTuple):
    """One panel. `unit`: by Grafana's name. `needs`: what a box must have for it to show anything, else empty."""

    title: str
    unit: str
    queries: tuple[Query, ...]
    needs: str = ""
    kind: str = "timeseries"


def quantiles(metric: str, by: str = "") -> tuple[Query, ...]:
    """The median and the 99th percentile of a histogram, of each value of the label `by`."""
    labels, name = (f"{by}, le", f"{{{{{by}}}}} ") if by else ("le", "")
    return tuple(
        Query(f"histogram_quantile({share}, sum by ({labels}) (rate({metric}_bucket[5m])))", f"{name}{called}")
        for share, called in (("0.5", "median"), ("0.99", "p99"))
    )


def rate_by(metric: str, *labels: str) -> tuple[Query, ...]:
    """How much of a counter there is in a second, by these labels."""
    legend = " ".join(f"{{{{{label}}}}}" for label in labels)
    return (Query(f"sum by ({', '.join(labels)}) (rate({metric}[5m]))", legend),)


PANELS: dict[str, tuple[Panel, ...]] = {
    "Now": (
        Panel("Parts that work", "bool_yes_no", (Query("min by (part) (hive_up)", "{{part}}"),), kind="stat"),
        Panel("What is wrong", "none", (Query("max by (code, severity) (hive_problem)", "{{code}} ({{severity}})"),)),
        Panel("Agents", "none", (Query("sum by (status, depth) (hive_agents)", "{{status}} {{depth}}"),)),
    ),
    "Requests": (
        Panel("Requests by status", "reqps", rate_by("hive_proxy_requests_total", "status")),
        Panel("Requests by tenant", "reqps", rate_by("hive_proxy_tenant_requests_total", "tenant")),
        Panel(
            "Refused or failed in Hive",
            "reqps",
            (Query("sum by (code) (rate(hive_proxy_refusals_total[5m])) > 0", "{{code}}"),),
        ),
        Panel("Time to the whole answer", "s", quantiles("hive_proxy_request_duration_seconds")),
        Panel("Time to the first token", "s", quantiles("hive_proxy_time_to_first_token_seconds")),
        Panel("Tokens by tenant", "none", rate_by("hive_proxy_tokens_total", "tenant", "direction")),
    ),
    "Queue": (
        Panel(
            "Requests under way",
            "none",
            (
                Query("sum(hive_proxy_queue_running)", "at the inference server"),
                Query("sum(hive_proxy_queue_waiting)", "waiting for a turn"),
                Query("sum(hive_proxy_parked)", "waiting for their agent to wake"),
                Query("sum(hive_backend_slots)", "places"),
            ),
        ),
        Panel("Waiting by tenant", "none", (Query("sum by (tenant) (hive_proxy_queue_waiting)", "{{tenant}}"),)),
        Panel("Wait for a turn", "s", quantiles("hive_proxy_queue_wait_seconds")),
    ),
    "Sleep": (
        Panel(
            "Sleeps and wakes",
            "cps",
            (
                Query("sum(rate(hive_pauses_total[5m]))", "sleeps"),
                Query("sum(rate(hive_deep_sleeps_total[5m]))", "deep sleeps"),
                *(query._replace(legend="wakes by {{cause}}") for query in rate_by("hive_wakes_total", "cause")),
            ),
        ),
        Panel("Time of a wake", "s", quantiles("hive_wake_duration_seconds")),
        Panel("Ends of agents nobody asked for", "cps", (Query("sum(rate(hive_agent_errors_total[5m]))", "ends"),)),
        Panel(
            "Memory of agents",
            "bytes",
            (
                Query("sum by (status) (hive_agents_memory_bytes)", "RAM of {{status}} ones"),
                Query("sum(hive_agents_swapped_bytes)", "in swap"),
                Query("sum(hive_sleep_saved_bytes)", "saved by sleep"),
            ),
        ),
    ),
    "Models": (
        Panel(
            "The inference server answers",
            "bool_yes_no",
            (Query("max by (backend) (hive_backend_up)", "{{backend}}"),),
            kind="stat",
        ),
        Panel("Models of the pool", "none", (Query("sum by (state) (hive_pool_slots)", "{{state}}"),), needs="pool"),
        Panel(
            "Memory of the pool",
            "bytes",
            (
                Query("sum by (gpu) (hive_pool_charged_bytes)", "booked on {{gpu}}"),
                Query("sum by (gpu) (hive_pool_free_bytes)", "free on {{gpu}}"),
            ),
            needs="pool",
        ),
        Panel(
            "Loads, evictions, thrash",
            "cps",
            (
                Query("sum by (model) (rate(hive_pool_loads_total[5m]))", "loads of {{model}}"),
                Query("sum by (why) (rate(hive_pool_evictions_total[5m]))", "evictions: {{why}}"),
                Query("sum(rate(hive_pool_thrash_total[5m]))", "thrash"),
            ),
            needs="pool",
        ),
        Panel("Wait for a load", "s", quantiles("hive_pool_wait_seconds")),
        Panel("Reused of prompts", "percentunit", (Query("hive_cache_hit_rate", "{{model}}"),), needs="cache"),
    ),
    "GPU": (
        Panel(
            "GPU memory",
            "bytes",
            (
                Query("sum by (gpu) (hive_gpu_memory_used_bytes)", "used of {{gpu}}"),
                Query("sum by (gpu) (hive_gpu_memory_total_bytes)", "size of {{gpu}}"),
            ),
            needs="gpu",
        ),
        Panel(
            "GPU at work", "percentunit", (Query("max by (gpu) (hive_gpu_utilization_ratio)", "{{gpu}}"),), needs="gpu"
        ),
    ),
    "Box": (
        Panel(
            "Memory",
            "bytes",
            (
                Query("sum(hive_host_memory_available_bytes)", "available"),
                Query("sum(hive_host_memory_total_bytes)", "all"),
            ),
        ),
        Panel(
            "Disk of the state",
            "bytes",
            (Query("sum(hive_state_disk_free_bytes)", "free"), Query("sum(hive_state_disk_total_bytes)", "all")),
        ),
        Panel("How late the proxy's loop is", "s", quantiles("hive_proxy_loop_lag_seconds")),
        Panel(
            "Share in use of what the proxy may hold",
            "percentunit",
            (
                Query("max(hive_proxy_connections / hive_proxy_connections_limit)", "connections"),
                Query("max(hive_proxy_request_body_bytes / hive_proxy_request_body_bytes_limit)", "bodies"),
                Query("max(hive_proxy_upload_bytes / hive_proxy_upload_bytes_limit)", "files"),
            ),
        ),
        Panel(
            "Usage that is not written yet",
            "none",
            (Query("sum(hive_proxy_usage_backlog)", "at the proxy"), Query("sum(hive_usage_waiting)", "at the daemon")),
        ),
        Panel(
            "Budgets spent",
            "percentunit",
            (Query("hive_budget_used_tokens / hive_budget_limit_tokens", "{{scope}} {{name}} {{budget}}"),),
            needs="budget",
        ),
    ),
}
"""Row of the dashboard → its panels."""


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana imports it."""
    shown: list[dict[str, Any]] = []
    top = 0
    for row, panels in PANELS.items():
        shown.append({"type": "row", "title": row, "collapsed": False, "gridPos": _place(0, top, COLUMNS, 1)})
        top += 1
        for number, panel in enumerate(panels):
            left, below = number * WIDE % COLUMNS, number * WIDE // COLUMNS * TALL
            shown.append(_shown(panel, _place(left, top + below, WIDE, TALL)))
        top += (len(panels) * WIDE + COLUMNS - 1) // COLUMNS * TALL
    return {
        "uid": "hive",
        "title": "Hive",
        "tags": ["hive"],
        "schemaVersion": 39,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": [{"name": "source", "label": "Source", "type": "datasource", "query": "prometheus"}]},
        "panels": [{"id": number, **panel} for number, panel in enumerate(shown, 1)],
    }


def text() -> str:
    """The content of dashboard.json."""
    return json.dumps(dashboard(), indent=1) + "\n"


def _place(x: int, y: int, width: int, height: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": width, "h": height}


def _shown(panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${source}"}
    needs = f"Empty on a box without: {panel.needs}." if panel.needs else ""
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": needs,
        "datasource": source,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
        "targets": [
            {
                "refId": chr(ord("A") + number),
                "datasource": source,
                "expr": query.expression,
                "legendFormat": query.legend,
            }
            for number, query in enumerate(panel.queries)
        ],
    }


if __name__ == "__main__":
    OUT.write_text(text())
