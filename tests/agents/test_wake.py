"""Wake statistics."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hive.agents.wake import WakeDurations
from hive.domain import WakeCause


def test_without_wakes_there_is_no_percentile() -> None:
    assert WakeDurations().percentile(50) is None


def test_causes_are_counted_beyond_the_window() -> None:
    times = WakeDurations(window=1)
    times.add(WakeCause.INGRESS, 1.0)
    times.add(WakeCause.INGRESS, 2.0)
    times.add(WakeCause.OPERATOR, 3.0)
    assert times.causes == {"ingress": 2, "operator": 1}
    assert (times.count, times.percentile(50), repr(times)) == (3, 3.0, "<WakeDurations 3 wakes, 1 kept>")


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=200), st.floats(0, 100))
def test_a_percentile_is_a_wake_with_that_share_at_or_below_it(took_ms: list[float], percent: float) -> None:
    times = WakeDurations(window=500)
    for took in took_ms:
        times.add(WakeCause.REQUEST, took)
    found = times.percentile(percent)
    assert found in took_ms
    assert sum(took <= found for took in took_ms) * 100 >= percent * len(took_ms)
    assert sum(took < found for took in took_ms) * 100 <= percent * len(took_ms)
