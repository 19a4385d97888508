"""The choice of a rung: the order of facts/pool.md §7.6, and what holds for every ladder whatever its rungs are."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hive.pool.ladder import (
    CAUSE_OF,
    Choice,
    LadderCaller,
    NoRung,
    Rung,
    RungFacts,
    RungState,
    StepCause,
    Task,
    WaitFor,
    choose_rung,
)

READY, COLD, FULL, DOWN = RungState
NAMES = ("a", "b", "c")


def ladder(*states: RungState, expected_s: float | None = 10.0) -> list[RungFacts]:
    return [
        RungFacts(name, state, expected_s=0.0 if state is READY else expected_s)
        for name, state in zip(NAMES, states, strict=False)
    ]


def chosen(choice: Choice) -> tuple[str, int | None]:
    return type(choice).__name__, choice.index


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ((READY, READY), ("Rung", 0)),
        ((COLD, READY), ("Rung", 1)),
        ((FULL, READY), ("Rung", 1)),
        ((DOWN, COLD, READY), ("Rung", 2)),
        ((COLD, COLD), ("WaitFor", 0)),
        ((DOWN, COLD), ("WaitFor", 1)),
        ((FULL, DOWN), ("Rung", 0)),
    ],
)
def test_the_order_of_rungs(states: Sequence[RungState], expected: tuple[str, int]) -> None:
    task = Task("t", NAMES[: len(states)])
    assert chosen(choose_rung(task, LadderCaller(), ladder(*states), 0.0)) == expected


@pytest.mark.parametrize(
    ("causes", "states", "expected"),
    [
        ((), (COLD, READY), ("WaitFor", 0)),
        ((), (FULL, READY), ("Rung", 0)),
        (("full",), (COLD, READY), ("WaitFor", 0)),
        (("down",), (DOWN, COLD, READY), ("WaitFor", 1)),
        (("cold",), (COLD, FULL, READY), ("Rung", 1)),
    ],
)
def test_a_task_steps_down_only_on_what_it_says(
    causes: Sequence[str], states: Sequence[RungState], expected: tuple[str, int]
) -> None:
    task = Task("t", NAMES[: len(states)], step_down_on=frozenset(map(StepCause, causes)))
    assert chosen(choose_rung(task, LadderCaller(), ladder(*states), 0.0)) == expected


def test_a_budget_decides_between_waiting_and_a_refusal() -> None:
    task = Task("t", NAMES[:2], budget_s=30.0)
    slow = [RungFacts("a", COLD, expected_s=47.0), RungFacts("b", COLD, expected_s=20.0)]
    assert chosen(choose_rung(task, LadderCaller(ends_at=30.0), slow, 0.0)) == ("WaitFor", 1)
    late = choose_rung(task, LadderCaller(ends_at=30.0), slow, 15.0)
    assert isinstance(late, NoRung)
    assert late.retry_after_s == 20.0
    endless = [RungFacts("a", COLD, expected_s=math.inf)]
    assert chosen(choose_rung(Task("t", ("a",)), LadderCaller(), endless, 0.0)) == ("NoRung", 0)


STATES = st.sampled_from(RungState)
RUNGS = st.lists(
    st.builds(
        RungFacts,
        model=st.sampled_from(NAMES),
        state=STATES,
        refused=st.sampled_from(["", "", "not for this caller"]),
        lacks=st.sampled_from(["", "", "has no vision"]),
        failed=st.sampled_from(["", "", "answered 503"]),
        expected_s=st.sampled_from([0.0, 10.0, 100.0, None, math.inf]),
        context=st.sampled_from([None, 100, 1000]),
    ),
    min_size=1,
    max_size=4,
)
TASKS = st.builds(
    Task,
    name=st.just("t"),
    rungs=st.just(NAMES),
    pin_primary=st.booleans(),
    step_down_on=st.frozensets(st.sampled_from(StepCause)),
)
CALLERS = st.builds(
    LadderCaller,
    ends_at=st.sampled_from([math.inf, 5.0, 50.0]),
    held=st.sampled_from([None, 0, 1, 2]),
    held_until=st.sampled_from([-1.0, 60.0]),
    tokens=st.sampled_from([0, 500]),
    over=st.sampled_from([None, None, 100]),
)


@given(TASKS, CALLERS, RUNGS)
def test_what_holds_for_every_ladder(task: Task, caller: LadderCaller, rungs: list[RungFacts]) -> None:
    choice = choose_rung(task, caller, rungs, 0.0)
    assert choice.why
    if isinstance(choice, NoRung):
        return
    rung = rungs[choice.index]
    assert not rung.refused, "a rung that the caller may not use is never reached"
    assert not rung.failed, "no rung is asked twice"
    if caller.over is not None:
        assert rung.context is not None
        assert rung.context > caller.over
    if isinstance(choice, WaitFor):
        assert rung.state is COLD
        assert rung.expected_s is None or rung.expected_s < caller.ends_at
    if task.pin_primary and rungs[0].state is COLD and not _is_passed(task, caller, rungs):
        assert choice.index == 0, "never a warm second instead of a cold first"
    if isinstance(choice, Rung) and rung.state is not READY:
        assert CAUSE_OF[rung.state] is not StepCause.COLD


def _is_passed(task: Task, caller: LadderCaller, rungs: list[RungFacts]) -> bool:
    """Whether the first rung is passed over for another reason than that it is cold."""
    first, others = rungs[0], rungs[1:]
    is_small = first.context is not None and caller.tokens > first.context
    return bool(
        first.refused
        or first.failed
        or caller.over is not None
        or (first.lacks and any(not other.lacks for other in others))
        or (is_small and StepCause.CONTEXT in task.step_down_on)
    )


@given(TASKS, RUNGS)
def test_a_ladder_ends_whatever_fails(task: Task, rungs: list[RungFacts]) -> None:
    """The loop of others: each answer is taken for a failure, and there are no more of them than rungs."""
    for _ in range(len(rungs) + 1):
        choice = choose_rung(task, LadderCaller(), rungs, 0.0)
        if isinstance(choice, NoRung):
            return
        rungs[choice.index] = msgspec.structs.replace(rungs[choice.index], failed="answered 503")
    raise AssertionError(f"{task} goes round")
