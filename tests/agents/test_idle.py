"""The idle decider, as a table: one fact changes, one sentence answers."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hive.agents.idle import IdleFacts, cpu_percent, verdict, worth_measuring
from hive.domain import AgentStatus

NOW = 1000.0
IDLE = IdleFacts(
    status=AgentStatus.RUNNING,
    idle_s=20.0,
    minimum_awake_s=10.0,
    cpu_quiet_percent=2.0,
    awake_since=900.0,
    last_active_at=950.0,
    cpu_percent=0.3,
)


def why(**changed: Any) -> str:
    found = verdict(msgspec.structs.replace(IDLE, **changed), NOW)
    assert not found.sleep
    return found.why


def test_an_idle_agent_is_put_to_sleep_and_the_sentence_says_how_long_it_was_quiet() -> None:
    assert verdict(IDLE, NOW) == msgspec.structs.replace(verdict(IDLE, NOW), sleep=True, why="idle: quiet for 50 s")


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"auto_sleep": False}, "awake: automatic sleep is off (auto_sleep_enabled = false)"),
        ({"idle_s": 0.0}, "awake: this agent is never put to sleep (idle_s = 0)"),
        ({"in_flight": 1}, "awake: 1 request in flight"),
        ({"in_flight": 3, "ingress": 1}, "awake: 3 requests in flight"),
        ({"parked": 2}, "awake: 2 requests parked"),
        ({"ingress": 1}, "awake: 1 ingress request open"),
        ({"why_busy": "an answer is not read yet"}, "awake: an answer is not read yet"),
        ({"last_active_at": 992.0}, "awake: 12 s until idle"),
        ({"cpu_percent": 2.0}, "awake: computing, 2.0 % of a core (quiet is under 2 %)"),
        ({"cpu_percent": 97.31}, "awake: computing, 97.3 % of a core (quiet is under 2 %)"),
        ({"cpu_percent": None}, "awake: quiet, its CPU time is being measured"),
        ({"idle_s": 3.0, "awake_since": 996.0}, "awake: woken a moment ago, 6 s of its minimum left"),
        ({"retry_at": 1004.0}, "awake: it could not be put to sleep, next try in 4 s"),
        (
            {"proxy_connected": False},
            "awake: the proxy is not connected, and nobody is put to sleep without it",
        ),
        (
            {"status": AgentStatus.PAUSED, "since": 1.0},
            "asleep since 1970-01-01 00:00:01 UTC, light sleep; wakes on ingress, message, schedule, request or resume",
        ),
        ({"kept_awake_until": 1540.0}, "awake: kept awake for another 9 min"),
        (
            {"kept_awake_until": 1060.0, "kept_awake_by": "uid:0", "in_flight": 1},
            "awake: kept awake for another 60 s by uid:0",
        ),
        ({"status": AgentStatus.PAUSING}, "being put to sleep"),
        ({"status": AgentStatus.RESUMING}, "being woken"),
        ({"status": AgentStatus.CREATED}, "never started"),
        ({"status": AgentStatus.ERROR, "reason": "exited with 3"}, "error: exited with 3"),
        ({"status": AgentStatus.STOPPED}, "stopped"),
    ],
)
def test_each_veto_writes_its_sentence(changed: dict[str, Any], sentence: str) -> None:
    assert why(**changed) == sentence


def test_the_first_veto_in_the_order_speaks() -> None:
    everything: dict[str, Any] = {
        "auto_sleep": False,
        "in_flight": 1,
        "why_busy": "busy",
        "last_active_at": NOW,
        "cpu_percent": 50.0,
        "idle_s": 1.0,
        "awake_since": NOW,
    }
    spoken = []
    for name in ("auto_sleep", "in_flight", "why_busy", "last_active_at", "cpu_percent", "awake_since"):
        if name == "last_active_at":
            everything["awake_since"] = NOW - 5
        spoken.append(why(**everything))
        everything[name] = {"last_active_at": NOW - 5, "awake_since": NOW - 50}.get(name, getattr(IDLE, name))
    assert [sentence.split(": ")[1].split()[0] for sentence in spoken] == [
        "automatic", "1", "busy", "1", "computing,", "woken"
    ]  # fmt: skip
    assert verdict(msgspec.structs.replace(IDLE, **everything), NOW).sleep


def test_without_any_activity_idleness_counts_from_the_start() -> None:
    assert why(last_active_at=None, awake_since=995.0) == "awake: 15 s until idle"
    assert verdict(msgspec.structs.replace(IDLE, last_active_at=None), NOW).sleep


def test_a_wake_counts_as_activity() -> None:
    assert why(last_active_at=500.0, awake_since=989.0, minimum_awake_s=0.0) == "awake: 9 s until idle"


@pytest.mark.parametrize(
    ("changed", "brief"),
    [
        ({}, "quiet for 50 s"),
        ({"in_flight": 1}, "1 request in flight"),
        ({"last_active_at": 992.0}, "12 s until idle"),
        ({"status": AgentStatus.PAUSED, "asleep_how": "light sleep, deep in 9 s"}, "light sleep, deep in 9 s"),
        ({"status": AgentStatus.CREATED}, "never started"),
        ({"status": AgentStatus.ERROR, "reason": "exited with 3"}, "exited with 3"),
        ({"status": AgentStatus.STOPPED}, ""),
    ],
)
def test_beside_its_status_only_what_that_does_not_say_is_said(changed: dict[str, Any], brief: str) -> None:
    """The tables of `hive agent list` and of the demo each cut the sentence in their own way, and had drifted apart."""
    assert verdict(msgspec.structs.replace(IDLE, **changed), NOW).brief == brief


def test_cpu_time_is_measured_only_where_the_proxy_reports_the_agent_quiet_and_time_is_near() -> None:
    def near(**changed: Any) -> bool:
        return worth_measuring(msgspec.structs.replace(IDLE, **changed), NOW, within_s=5.0)

    assert near()
    assert near(last_active_at=985.0)
    assert not near(last_active_at=985.1)
    assert not near(in_flight=1)
    assert not near(why_busy="x")
    assert not near(auto_sleep=False)
    assert not near(status=AgentStatus.PAUSED)


def test_a_cpu_counter_that_went_backwards_is_no_work() -> None:
    assert cpu_percent(-5, 1.0) == 0.0
    assert cpu_percent(300_000, 30.0) == 1.0


@given(
    facts=st.builds(
        IdleFacts,
        status=st.sampled_from(AgentStatus),
        auto_sleep=st.booleans(),
        idle_s=st.floats(0, 100),
        awake_since=st.floats(800, 1000),
        proxy_connected=st.booleans(),
        in_flight=st.integers(0, 2),
        parked=st.integers(0, 2),
        ingress=st.integers(0, 2),
        why_busy=st.sampled_from(["", "busy"]),
        last_active_at=st.none() | st.floats(800, 1000),
        cpu_percent=st.none() | st.floats(0, 100),
        retry_at=st.floats(0, 1100),
    )
)
def test_nobody_is_put_to_sleep_with_anything_going_on(facts: IdleFacts) -> None:
    found = verdict(facts, NOW)
    assert found.why
    if found.sleep:
        assert facts.status is AgentStatus.RUNNING
        assert facts.auto_sleep
        assert facts.proxy_connected
        assert (facts.in_flight, facts.parked, facts.ingress, facts.why_busy) == (0, 0, 0, "")
        assert facts.cpu_percent is not None
        assert facts.cpu_percent < facts.cpu_quiet_percent
        assert NOW - facts.awake_since >= max(facts.minimum_awake_s, facts.idle_s) > 0
        assert facts.last_active_at is None or NOW - facts.last_active_at >= facts.idle_s
