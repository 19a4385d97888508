"""The clients that will probably ask again."""

from __future__ import annotations

import pytest

from hive.pool.audience import Interest, LastModel, Returns, audience_of

AUDIENCE_S = 30.0


@pytest.mark.parametrize(
    ("use", "users"),
    [
        (LastModel("a", "m", 90.0), 1),
        (LastModel("a", "m", 70.0), 0),  # too long ago
        (LastModel("a", "other", 99.0), 0),
        (LastModel("a", "m", 90.0, is_elsewhere=True), 0),
        (LastModel("a", "m", 90.0, is_awake=False), 0),
        (LastModel("a", "m", 10.0, is_here=True), 1),  # it waits here, however long
    ],
)
def test_an_agent_counts_if_it_is_free_to_ask(use: LastModel, users: int) -> None:
    assert audience_of("m", [use], Interest(), 100.0, AUDIENCE_S).users == users


def test_agents_that_never_return_are_no_audience_but_while_they_wait() -> None:
    """A planner is asked once a task: nothing is gained by keeping it for those who have its answer."""
    interest = Interest()
    for _ in range(5):
        interest = interest.left_by_agent(soon_again=False)
    gone, here = LastModel("a", "m", 99.0), LastModel("b", "m", 99.0, is_here=True)
    assert audience_of("m", [gone, here], interest, 100.0, AUDIENCE_S).users == 1
    for _ in range(5):
        interest = interest.left_by_agent(soon_again=True)
    assert audience_of("m", [gone, here], interest, 100.0, AUDIENCE_S).users == 2


@pytest.mark.parametrize(("pause_s", "users"), [(5.0, 1), (29.0, 1), (31.0, 0), (120.0, 0)])
def test_callers_without_a_name_count_if_they_mostly_return_soon(pause_s: float, users: int) -> None:
    interest, now = Interest(), 0.0
    for _ in range(6):
        interest = interest.after_caller(now, AUDIENCE_S)
        now += pause_s
    last = now - pause_s
    audience = audience_of("m", [], interest, last + 1.0, AUDIENCE_S)
    assert audience.users == users
    assert audience.is_empty(last + AUDIENCE_S)


def test_the_end_of_an_audience_is_told() -> None:
    uses = [LastModel("a", "m", 90.0), LastModel("b", "m", 95.0)]
    audience = audience_of("m", uses, Interest(), 100.0, AUDIENCE_S)
    assert audience.ends_at == 125.0
    assert not audience.is_empty(124.9)
    assert audience.is_empty(125.0)


def test_the_rate_follows_the_requests() -> None:
    interest = Interest()
    for second in range(3000):
        interest = interest.after_agent(float(second))
    assert 0.95 < interest.rate.now(3000.0) < 1.05
    assert interest.rate.now(6000.0) < 0.001


def test_what_is_usual_is_learnt_from_both_sides() -> None:
    learnt = Returns()
    for _ in range(20):
        learnt = learnt.after(True)
    assert learnt.are_usual
    for _ in range(20):
        learnt = learnt.after(False)
    assert not learnt.are_usual
    assert 0.0 <= learnt.soon <= 1.0
