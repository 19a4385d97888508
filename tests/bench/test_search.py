"""The search for the edge on made-up worlds, in which a number of agents fits or does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hive.bench.search import MOST_STEPS, Edge, Series, Step, edge, first_guess, next_agents, times

World = Callable[[int], tuple[Series, ...]]
OBJECTIVE_S = 1.5
FINE = Series(0.4, 0.6, 40, 0, 0, 0.2)
LATE = FINE._replace(p95_s=3.0)


def holds(capacity: int, *, busy_from: int = 10**9) -> World:
    """A world that holds so many; from `busy_from` agents on driver, stub and Hive use all cores."""

    def measured(agents: int) -> tuple[Series, ...]:
        busy = 0.95 if agents >= busy_from else 0.2
        one = FINE if agents <= capacity else LATE
        return (one._replace(busy=busy),) * 2

    return measured


def searched(world: World, guess: int, *, swap: str = "zram", most: int = 10_000) -> list[Step]:
    """The steps of a whole search."""
    steps: list[Step] = []
    while (agents := next_agents(guess, steps, objective_s=OBJECTIVE_S, swap=swap, most=most)) is not None:
        steps.append(Step(agents, world(agents)))
    return steps


@given(capacity=st.integers(1, 2000), guess=st.integers(1, 3000), swap=st.sampled_from(["zram", "file", "none"]))
def test_the_edge_is_never_told_where_it_is_not(capacity: int, guess: int, swap: str) -> None:
    steps = searched(holds(capacity), guess, swap=swap)
    assert 1 <= len(steps) <= MOST_STEPS
    assert len({step.agents for step in steps}) == len(steps)
    found = edge(steps, objective_s=OBJECTIVE_S)
    assert found is not None
    assert found.fits <= capacity
    assert found.misses is None or found.misses > capacity
    assert found.bound == ("between" if found.fits and found.misses else "at least" if found.fits else "fewer than")


@given(capacity=st.integers(20, 2000), off=st.floats(0.85, 1.2))
def test_a_guess_that_is_nearly_right_brackets_the_edge_within_what_is_told(capacity: int, off: float) -> None:
    found = edge(searched(holds(capacity), round(capacity * off)), objective_s=OBJECTIVE_S)
    assert found is not None
    assert found.bound == "between"
    assert abs(found.agents - capacity) <= 0.13 * capacity + 1


@pytest.mark.parametrize(
    ("capacity", "guess", "asked"),
    [
        (22, 20, [20, 25, 22]),
        (10, 20, [20, 16, 10, 13]),
        (100, 20, [20, 25, 39]),
        (50, 323, [323, 258, 165, 106, 68, 44]),
        (1, 1, [1, 2]),
        (3, 3, [3, 4]),
    ],
)
def test_steps_go_from_the_guess_to_the_edge(capacity: int, guess: int, asked: list[int]) -> None:
    assert [step.agents for step in searched(holds(capacity), guess)] == asked


def test_a_world_with_the_processors_full_says_at_least_and_is_not_counted() -> None:
    steps = searched(holds(1000, busy_from=50), 40)
    found = edge(steps, objective_s=OBJECTIVE_S)
    assert found is not None
    assert (found.bound, found.misses) == ("at least", None)
    assert found.agents < 50
    assert any(step.is_cpu_bound for step in steps)


def test_a_world_that_is_full_of_work_from_the_first_has_no_edge() -> None:
    assert edge(searched(holds(1000, busy_from=1), 40), objective_s=OBJECTIVE_S) is None


@pytest.mark.parametrize(
    "trouble", [{"killed": 1}, {"failed": 1}, {"overrun": True}, {"p95_s": OBJECTIVE_S + 0.001}], ids=str
)
def test_one_series_of_two_that_misses_is_a_miss(trouble: dict[str, Any]) -> None:
    assert not Step(8, (FINE, FINE._replace(**trouble))).fits(OBJECTIVE_S)


def test_no_more_than_the_most_is_tried() -> None:
    steps = searched(holds(1000), 40, most=40)
    assert [step.agents for step in steps] == [40]
    assert edge(steps, objective_s=OBJECTIVE_S) == Edge(40, 40, None, "at least")


def test_a_box_that_hive_alone_fills_begins_with_one_agent() -> None:
    assert first_guess(100, 160, 15) == 1


def test_times_of_the_kernel_are_known_only_where_both_are_bounded() -> None:
    some = Edge(30, 30, None, "at least")
    assert times(some, None) == (None, "")
    assert times(Edge(0, 0, 9, "fewer than"), Edge(0, 0, 8, "fewer than")) == (None, "")
    assert times(some, some) == (None, "")
