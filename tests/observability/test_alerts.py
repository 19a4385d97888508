"""The alert rules: each fires where it should, is silent where it nearly would, and has its page."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from hive import conditions, errors
from hive.control import metrics as of_daemon
from hive.control import runner_counts
from hive.proxy import metrics as of_proxy
from tests.observability.metric_names import known_names, names_in
from tests.observability.prometheus_server import SHIPPED, placed, promtool, rules

PAGE = Path(__file__).parents[2] / "docs/how-to/observe.md"
AT = 'instance="box:3000"'
FOR_LONG = 40
"""Minutes of samples; the rules are looked at before these end."""


def steady(value: float) -> str:
    return f"{value:g}+0x{FOR_LONG}"


def growing(by: float) -> str:
    """A counter, by so much each minute."""
    return f"0+{by:g}x{FOR_LONG}"


def at_last(before: float, now: float, *, minutes: int, at: int = 30) -> str:
    """`now` since so many minutes before the minute `at`."""
    return f"{before:g}+0x{at - minutes - 1} {now:g}+0x{FOR_LONG}"


def histogram(name: str, *, below: tuple[str, float], above: tuple[str, float]) -> dict[str, str]:
    """(bound, observations a minute not above it) of two buckets, the second of which has all."""
    told = {below[0]: below[1], above[0]: above[1], "+Inf": above[1]}
    return {f'{name}_bucket{{{AT},le="{bound}"}}': growing(count) for bound, count in told.items()}


class Case(NamedTuple):
    """Series → samples, one a minute from 0 on; the alert is looked at in minute 30."""

    fires: tuple[Mapping[str, str], ...]
    silent: tuple[Mapping[str, str], ...]


CASES: dict[str, Case] = {
    "HiveDown": Case(
        ({f'up{{job="hive",{AT}}}': steady(0)},),
        ({f'up{{job="hive",{AT}}}': at_last(1, 0, minutes=1)}, {f'up{{job="node",{AT}}}': steady(0)}),
    ),
    "HivePartDown": Case(
        ({f'hive_up{{part="proxy",{AT}}}': steady(0), f'hive_up{{part="daemon",{AT}}}': steady(1)},),
        ({f'hive_up{{part="proxy",{AT}}}': at_last(1, 0, minutes=1)},),
    ),
    "HiveRestarts": Case(
        ({f"hive_start_time_seconds{{{AT}}}": f"1+0x15 2 3 4+0x{FOR_LONG}"},),
        ({f"hive_start_time_seconds{{{AT}}}": f"1+0x15 2 3+0x{FOR_LONG}"},),
    ),
    "HiveProblem": Case(
        ({f'hive_problem{{code="database_suspect",severity="error",{AT}}}': steady(1)},),
        (
            {f'hive_problem{{code="database_begun_anew",severity="warning",{AT}}}': steady(1)},
            {f'hive_problem{{code="proxy_disconnected",severity="error",{AT}}}': steady(1)},
            {f'hive_problem{{code="disk_nearly_full",severity="error",{AT}}}': f"_x{FOR_LONG - 12} 1+0x20"},
        ),
    ),
    "HiveBackendDown": Case(
        ({f'hive_backend_up{{backend="vllm",{AT}}}': steady(0)},),
        (
            {
                f'hive_backend_up{{backend="vllm",{AT}}}': steady(0),
                f'hive_problem{{code="backend_switching",severity="warning",{AT}}}': steady(1),
            },
            {f'hive_backend_up{{backend="",{AT}}}': steady(0)},
        ),
    ),
    "HiveRequestsFail": Case(
        (
            {
                f'hive_proxy_requests_total{{endpoint="/v1/chat/completions",status="502",{AT}}}': growing(1),
                f'hive_proxy_requests_total{{endpoint="/v1/chat/completions",status="200",{AT}}}': growing(9),
            },
        ),
        (
            {
                f'hive_proxy_requests_total{{endpoint="/v1/chat/completions",status="502",{AT}}}': growing(1),
                f'hive_proxy_requests_total{{endpoint="/v1/chat/completions",status="404",{AT}}}': growing(50),
                f'hive_proxy_requests_total{{endpoint="/v1/chat/completions",status="200",{AT}}}': growing(50),
            },
        ),
    ),
    "HiveQueueRefuses": Case(
        ({f'hive_proxy_refusals_total{{code="queue_full",{AT}}}': growing(1)},),
        (
            {f'hive_proxy_refusals_total{{code="queue_full",{AT}}}': at_last(0, 50, minutes=4)},
            {f'hive_proxy_refusals_total{{code="model_not_found",{AT}}}': growing(9)},
        ),
    ),
    "HiveQueueSlow": Case(
        (histogram("hive_proxy_queue_wait_seconds", below=("60.0", 980), above=("120.0", 1000)),),
        (histogram("hive_proxy_queue_wait_seconds", below=("60.0", 995), above=("120.0", 1000)),),
    ),
    "HiveProxyLate": Case(
        (histogram("hive_proxy_loop_lag_seconds", below=("0.1", 980), above=("0.25", 1000)),),
        (histogram("hive_proxy_loop_lag_seconds", below=("0.1", 995), above=("0.25", 1000)),),
    ),
    "HiveProxyFull": Case(
        tuple(
            {f"hive_proxy_{what}{{{AT}}}": steady(95), f"hive_proxy_{what}_limit{{{AT}}}": steady(100)}
            for what in ("connections", "request_body_bytes", "upload_bytes")
        ),
        ({f"hive_proxy_connections{{{AT}}}": steady(85), f"hive_proxy_connections_limit{{{AT}}}": steady(100)},),
    ),
    "HiveWakesSlow": Case(
        (histogram("hive_wake_duration_seconds", below=("5.0", 90), above=("10.0", 100)),),
        (histogram("hive_wake_duration_seconds", below=("5.0", 96), above=("10.0", 100)),),
    ),
    "HiveAgentsFail": Case(
        ({f"hive_agent_errors_total{{{AT}}}": growing(1)},),
        ({f"hive_agent_errors_total{{{AT}}}": at_last(0, 2, minutes=5)},),
    ),
    "HiveUsageWaits": Case(
        (
            {f"hive_usage_lag_seconds{{{AT}}}": steady(400)},
            {f"hive_proxy_usage_backlog{{{AT}}}": steady(20_000)},
            {f"hive_usage_lost_total{{{AT}}}": at_last(0, 3, minutes=10)},
            {f"hive_proxy_usage_lost_total{{{AT}}}": at_last(0, 3, minutes=10)},
        ),
        (
            {
                f"hive_usage_lag_seconds{{{AT}}}": steady(60),
                f"hive_proxy_usage_backlog{{{AT}}}": steady(500),
                f"hive_usage_lost_total{{{AT}}}": steady(3),
                f"hive_proxy_usage_lost_total{{{AT}}}": steady(0),
            },
        ),
    ),
    "HivePoolThrashes": Case(
        ({f"hive_pool_thrash_total{{{AT}}}": growing(1)},),
        ({f"hive_pool_thrash_total{{{AT}}}": at_last(0, 4, minutes=20)},),
    ),
    "HiveMemoryLow": Case(
        (
            {
                f"hive_host_memory_available_bytes{{{AT}}}": steady(4e9),
                f"hive_host_memory_total_bytes{{{AT}}}": steady(100e9),
            },
        ),
        (
            {
                f"hive_host_memory_available_bytes{{{AT}}}": at_last(6e9, 4e9, minutes=3),
                f"hive_host_memory_total_bytes{{{AT}}}": steady(100e9),
            },
        ),
    ),
    "HiveDiskLow": Case(
        ({f"hive_state_disk_free_bytes{{{AT}}}": steady(1e9)},),
        ({f"hive_state_disk_free_bytes{{{AT}}}": at_last(3e9, 1e9, minutes=8)},),
    ),
    "HiveBudgetNearlySpent": Case(
        (
            {
                f'hive_budget_used_tokens{{scope="tenant",name="acme",budget="tokens_per_day",{AT}}}': steady(95),
                f'hive_budget_limit_tokens{{scope="tenant",name="acme",budget="tokens_per_day",{AT}}}': steady(100),
            },
        ),
        (
            {
                f'hive_budget_used_tokens{{scope="tenant",name="acme",budget="tokens_per_day",{AT}}}': steady(85),
                f'hive_budget_limit_tokens{{scope="tenant",name="acme",budget="tokens_per_day",{AT}}}': steady(100),
            },
        ),
    ),
}
"""Alert → cases. Each silent one is near: for too short a time, or just below."""

LOOKED_AT_MIN = 30


def _case(
    alert: str, series: Mapping[str, str], *, is_so: bool = True, state: str = "firing", minute: int = LOOKED_AT_MIN
) -> dict[str, object]:
    """A case in which the alert is in that state then, or is not."""
    labels = f'{{alertname="{alert}"}}'
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {
                "expr": f'count by (alertname) (ALERTS{{alertname="{alert}",alertstate="{state}"}})',
                "eval_time": f"{minute}m",
                "exp_samples": [{"labels": labels, "value": 1}] if is_so else [],
            }
        ],
    }


def tried(directory: Path, cases: Sequence[object]) -> None:
    """Fails where promtool finds that one of them is not so."""
    asked = {"rule_files": [str(SHIPPED / "alerts.yml")], "evaluation_interval": "1m", "tests": cases}
    (directory / "cases.yml").write_text(json.dumps(asked))
    done = promtool("test", "rules", str(directory / "cases.yml"))
    assert done.returncode == 0, (done.stdout + done.stderr).decode()


def test_each_alert_has_a_case_in_which_it_fires_and_one_in_which_it_does_not() -> None:
    assert CASES.keys() == rules().keys()
    assert all(case.fires and case.silent for case in CASES.values())


@pytest.mark.breadth(2)
@pytest.mark.parametrize("alert", CASES)
def test_it_fires_where_it_should_and_is_silent_where_it_nearly_would(alert: str, tmp_path: Path) -> None:
    fires = [_case(alert, series) for series in CASES[alert].fires]
    tried(tmp_path, [*fires, *(_case(alert, series, is_so=False) for series in CASES[alert].silent)])


@pytest.mark.parametrize("alert", [alert for alert, rule in rules().items() if "for" in rule])
def test_it_waits_for_as_long_as_it_says(alert: str, tmp_path: Path) -> None:
    """Its cause is there from the first minute on: until its time is over it is pending."""
    series, last = CASES[alert].fires[0], int(rules()[alert]["for"].removesuffix("m")) - 1
    is_pending = _case(alert, series, state="pending", minute=last)
    tried(tmp_path, [is_pending, _case(alert, series, is_so=False, minute=last)])


def test_what_an_alert_says_has_the_values_in_it(tmp_path: Path) -> None:
    told = {
        "eval_time": "30m",
        "alertname": "HivePartDown",
        "exp_alerts": [
            {
                "exp_labels": {"part": "redis", "instance": "box:3000", "severity": "ticket"},
                "exp_annotations": {
                    "summary": "The redis of the Hive at box:3000 does not work",
                    "page": "docs/how-to/observe.md#hivepartdown",
                },
            }
        ],
    }
    series = [{"series": f'hive_up{{part="redis",{AT}}}', "values": steady(0)}]
    case = {"interval": "1m", "input_series": series, "alert_rule_test": [told]}
    tried(tmp_path, [case])


def test_promtool_takes_the_configuration_and_the_rules(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("hive_x")
    config = placed(tmp_path, token=token)
    for words in (("check", "config", str(config)), ("check", "rules", str(SHIPPED / "alerts.yml"))):
        done = promtool(*words)
        assert done.returncode == 0, (done.stdout + done.stderr).decode()
        assert f"{len(rules())} rules found".encode() in done.stdout


# --- without promtool --------------------------------------------------------------------------------------------


def test_each_alert_names_its_part_of_the_page_and_each_part_has_its_alert() -> None:
    parts = re.findall(r"^### (\w+)$", PAGE.read_text(), re.MULTILINE)
    assert parts == [*rules()]
    for alert, rule in rules().items():
        assert rule["annotations"]["page"] == f"docs/how-to/observe.md#{alert.lower()}"
        assert rule["labels"]["severity"] in ("page", "ticket") or alert == "HivePartDown"


def test_every_metric_of_the_rules_exists() -> None:
    for alert, rule in rules().items():
        assert names_in(rule["expr"]), alert
        assert names_in(rule["expr"]) <= known_names(), alert


def test_every_code_of_the_rules_exists() -> None:
    codes = {cls.code for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, errors.HiveError)}
    for alert, rule in rules().items():
        known = conditions.TABLE.keys() if "hive_problem" in rule["expr"] else codes
        for pattern in re.findall(r'\bcode[!=]?[=~]+"([^"]+)"', rule["expr"]):
            assert set(pattern.split("|")) <= known, alert


def test_no_two_tables_have_a_metric_of_the_same_name() -> None:
    names = [row.full_name for row in (*of_daemon.TABLE, *of_proxy.TABLE, *runner_counts.TABLE)]
    assert len(names) == len(set(names))
