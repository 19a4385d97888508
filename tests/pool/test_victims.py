"""The cheapest victim set, against all sets there are."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hive.pool.state import Audience
from hive.pool.victims import EXACT_UP_TO, EvictionOption, cheapest_set, eviction_cost


def way(slot: str, freed: tuple[int, ...], cost: float, host: int = 0) -> EvictionOption:
    return EvictionOption(slot, freed, cost, "1" if host else "", host)


def brute_force(options: list[EvictionOption], short: list[int], host: int) -> float | None:
    """The least cost over all ways to choose at most one option of each slot."""
    slots: dict[str, list[EvictionOption | None]] = {}
    for option in options:
        slots.setdefault(option.slot, [None]).append(option)
    costs = []
    for choice in product(*slots.values()):
        chosen = [option for option in choice if option is not None]
        covers = all(sum(option.freed[i] for option in chosen) >= bytes for i, bytes in enumerate(short))
        if covers and sum(option.host_bytes for option in chosen) <= host:
            costs.append(sum(option.cost for option in chosen))
    return min(costs, default=None)


OPTIONS = st.lists(
    st.builds(
        way,
        st.sampled_from("abcdefg"),
        st.tuples(st.integers(0, 9), st.integers(0, 9)),
        st.integers(0, 20).map(float),
        st.sampled_from([0, 0, 3, 6]),
    ),
    max_size=10,
)


@given(OPTIONS, st.lists(st.integers(-3, 25), min_size=2, max_size=2), st.integers(0, 10))
def test_the_set_is_as_cheap_as_the_best_of_all_sets(
    options: list[EvictionOption], short: list[int], host: int
) -> None:
    chosen = cheapest_set(options, short, host)
    best = brute_force(options, short, host)
    assert (chosen is None) == (best is None)
    if chosen is not None:
        assert sum(option.cost for option in chosen) == best
        assert len({option.slot for option in chosen}) == len(chosen)


@given(OPTIONS, st.integers(1, 25))
def test_no_victim_can_be_left_out(options: list[EvictionOption], short: int) -> None:
    chosen = cheapest_set(options, [short, 0])
    for option in chosen or ():
        assert sum(other.freed[0] for other in chosen or () if other is not option) < short


def test_beyond_the_bound_the_choice_is_greedy_and_still_enough() -> None:
    options = [way(f"s{number}", (3,), float(number)) for number in range(EXACT_UP_TO + 6)]
    chosen = cheapest_set(options, [30]) or ()
    assert sum(option.freed[0] for option in chosen) >= 30
    assert {option.slot for option in chosen} == {f"s{number}" for number in range(10)}
    assert cheapest_set(options, [1000]) is None


def test_one_large_goes_before_two_small_that_cost_more() -> None:
    """LocalAI #9375 and the like: the small ones were evicted one by one, and it was not enough."""
    options = [way("small", (2,), 1.0), way("middle", (5,), 6.0), way("large", (9,), 6.5)]
    assert [option.slot for option in cheapest_set(options, [8]) or ()] == ["large"]


@pytest.mark.parametrize(("host", "chosen"), [(100, ["sleeps"]), (10, ["ends"])])
def test_a_sleep_needs_memory_of_the_host(host: int, chosen: list[str]) -> None:
    options = [way("sleeps", (8,), 1.0, host=50), way("ends", (8,), 2.0)]
    assert [option.slot for option in cheapest_set(options, [8], host) or ()] == chosen


def test_users_the_rate_and_the_time_to_reload_make_the_cost() -> None:
    assert eviction_cost(Audience(users=1), 20.0) > eviction_cost(Audience(users=1), 10.0)
    assert eviction_cost(Audience(users=2), 10.0) > eviction_cost(Audience(users=1), 10.0)
    assert eviction_cost(Audience(rate_per_s=0.1), 10.0) > eviction_cost(Audience(), 10.0) > 0
