"""The decider of depth, as a table: one fact changes, one sentence answers."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hive.agents.depth import DepthFacts, retry_after_s, true_depth, verdict
from hive.domain import SleepDepth

NOW = 1000.0
LIGHT, DEEP = SleepDepth.LIGHT, SleepDepth.DEEP
MIB = 1 << 20
DUE = DepthFacts(
    depth=LIGHT,
    asleep_since=960.0,
    deep_after_s=30.0,
    some_avg10=0.0,
    pressure_some_avg10=10.0,
    swap_free_bytes=1024 * MIB,
    resident_bytes=300 * MIB,
)


def why(**changed: Any) -> str:
    found = verdict(msgspec.structs.replace(DUE, **changed), NOW)
    assert not found.deepen
    return found.why


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"depth": SleepDepth.AWAKE}, ""),
        ({"depth": DEEP, "goal": DEEP}, "deep sleep"),
        ({"deepest": LIGHT}, "light sleep, never deep (deepest = light)"),
        ({"asleep_since": 982.0}, "light sleep, deep in 12 s"),
        ({"deep_after_s": 0.0}, "light sleep, deep only under memory pressure"),
        ({"deep_after_s": 0.0, "some_avg10": 9.9}, "light sleep, deep only under memory pressure"),
        ({"deep_after_s": 0.0, "some_avg10": None}, "light sleep, deep only under memory pressure"),
        (
            {"deep_after_s": 0.0, "some_avg10": 99.0, "pressure_some_avg10": 0.0},
            "light sleep, deep only under memory pressure",
        ),
        ({"swap_free_bytes": 0}, "light sleep, not deep: this host has no free swap"),
        ({"swap_free_bytes": 0, "asleep_since": 982.0}, "light sleep, not deep: this host has no free swap"),
        (
            {"swap_free_bytes": 0, "retry_at": 1240.0, "failure": "no swap"},
            "light sleep, not deep: this host has no free swap",
        ),
        ({"swap_free_bytes": 299 * MIB}, "light sleep, not deep: 300 MiB in RAM, 299 MiB of free swap"),
        (
            {"retry_at": 1240.0, "failure": "not permitted here"},
            "light sleep, not deep: not permitted here, next try in 4 min",
        ),
    ],
)
def test_each_objection_writes_its_sentence(changed: dict[str, Any], sentence: str) -> None:
    assert why(**changed) == sentence


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, "asleep for 40 s"),
        ({"asleep_since": 999.0, "some_avg10": 10.0}, "memory pressure 10 %"),
        ({"deep_after_s": 0.0, "some_avg10": 24.6}, "memory pressure 25 %"),
        ({"asleep_since": 999.0, "goal": DEEP}, "it was to sleep deep"),
        ({"resident_bytes": None, "swap_free_bytes": 1}, "asleep for 40 s"),
        ({"swap_free_bytes": None}, "asleep for 40 s"),
        ({"retry_at": NOW, "failure": "swap was full"}, "asleep for 40 s"),
    ],
)
def test_time_pressure_or_an_unreached_goal_page_it_out(changed: dict[str, Any], reason: str) -> None:
    found = verdict(msgspec.structs.replace(DUE, **changed), NOW)
    assert (found.deepen, found.why) == (True, reason)


@given(
    st.builds(
        DepthFacts,
        depth=st.sampled_from(SleepDepth),
        goal=st.sampled_from([LIGHT, DEEP]),
        deepest=st.sampled_from([LIGHT, DEEP]),
        asleep_since=st.floats(800, 1000),
        deep_after_s=st.sampled_from([0.0, 30.0]),
        some_avg10=st.none() | st.floats(0, 100),
        pressure_some_avg10=st.sampled_from([0.0, 10.0]),
        swap_free_bytes=st.none() | st.integers(0, 500 * MIB),
        resident_bytes=st.none() | st.integers(0, 500 * MIB),
        retry_at=st.floats(0, 1100),
    )
)
def test_nobody_is_paged_out_who_may_not_or_does_not_fit(facts: DepthFacts) -> None:
    found = verdict(facts, NOW)
    assert bool(found.why) == (facts.depth is not SleepDepth.AWAKE)
    if found.deepen:
        assert (facts.depth, facts.deepest) == (LIGHT, DEEP)
        assert facts.retry_at <= NOW
        assert facts.swap_free_bytes is None or facts.swap_free_bytes >= max(1, facts.resident_bytes or 0)
        by_time = 0 < facts.deep_after_s <= NOW - facts.asleep_since
        pressed = 0 < facts.pressure_some_avg10 <= (facts.some_avg10 or 0)
        assert by_time or pressed or facts.goal is DEEP


@given(st.integers(1, 10_000), st.booleans())
def test_the_delay_after_a_failure_only_grows_and_has_a_limit(failures: int, hopeless: bool) -> None:
    found = retry_after_s(failures, hopeless=hopeless)
    assert 30 <= found <= retry_after_s(failures + 1, hopeless=hopeless) <= 3600
    assert hopeless or found <= 600


@pytest.mark.parametrize(
    ("resident", "swap", "of_deep", "of_light"),
    [
        (100, 0, LIGHT, LIGHT),
        (0, 0, LIGHT, LIGHT),
        (80, 20, LIGHT, LIGHT),
        (66, 33, DEEP, LIGHT),
        (50, 50, DEEP, LIGHT),
        (33, 66, DEEP, DEEP),
        (0, 1, DEEP, DEEP),
    ],
)
def test_the_truth_about_depth_is_how_much_is_in_swap(
    resident: int, swap: int, of_deep: SleepDepth, of_light: SleepDepth
) -> None:
    assert true_depth(DEEP, resident_bytes=resident, swap_bytes=swap) is of_deep
    assert true_depth(LIGHT, resident_bytes=resident, swap_bytes=swap) is of_light
