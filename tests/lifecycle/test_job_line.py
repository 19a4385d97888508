"""The line of model jobs that wait for a place."""

from __future__ import annotations

import pytest

from hive.domain import Band
from hive.jobs.order import JobOrder
from hive.jobs.toolloop import LoopLimits
from hive.lifecycle.job_line import next_of
from hive.lifecycle.job_runs import JobRun
from hive.store.job_turns import KIND
from hive.store.jobs import StoredJob


def run(
    name: str, *, tenant: str = "default", by: str = "", band: Band = Band.NORMAL, parent: JobRun | None = None
) -> JobRun:
    job = StoredJob(id=name, kind=KIND, actor="uid:0", created_at=1.0, updated_at=1.0)
    return JobRun(
        job,
        JobOrder(name=name, model="m", prompt="p", priority=band),
        limits=LoopLimits(),
        agent=by,
        tenant=tenant,
        callable_agents=[],
        parent=parent,
        begun_by=by,
        token="",
    )


def chosen(waiting: list[JobRun], started: list[JobRun], places: int = 4) -> str:
    found = next_of(waiting, started, places)
    return "" if found is None else found.id


def test_of_equals_the_first_that_came_is_next_and_none_without_a_place() -> None:
    a, b = run("a"), run("b")
    assert [chosen([a, b], []), chosen([b], [a]), chosen([a], [b] * 4), chosen([], [])] == ["a", "b", "", ""]


@pytest.mark.parametrize(
    ("flood", "rare"),
    [
        ({"by": "alice"}, {"tenant": "acme", "by": "bob"}),
        ({"by": "alice"}, {"by": "bob"}),
        ({"by": "alice"}, {"band": Band.HIGH}),
        ({}, {"band": Band.HIGH}),
        ({"tenant": "acme", "band": Band.HIGH}, {"band": Band.LOW}),
    ],
    ids=["tenant", "agent", "operator", "band", "a tenant before a band"],
)
def test_who_has_fewer_is_next_however_many_came_before(flood: dict[str, object], rare: dict[str, object]) -> None:
    many = [run(f"flood-{number}", **flood) for number in range(40)]  # type: ignore[arg-type]
    assert chosen([*many[2:], run("rare", **rare)], many[:1]) == "rare"  # type: ignore[arg-type]


def test_one_agent_never_has_more_than_half_of_the_places_and_one_at_least() -> None:
    mine = [run(f"mine-{number}", by="alice") for number in range(40)]
    assert [chosen(mine[2:], mine[:1]), chosen(mine[2:], mine[:2])] == ["mine-2", ""]
    assert chosen(mine, [], places=1) == "mine-0"
    operators = [run(f"operator-{number}") for number in range(5)]
    assert chosen(operators[3:], operators[:3]) == "operator-3", "an operator has all of them"


def test_a_job_below_another_has_a_place_although_all_are_taken() -> None:
    """Else those that hold the places would wait for it until their tools' time is over."""
    tops = [run(f"top-{number}") for number in range(4)]
    below = [run(f"below-{number}", by="alice", parent=tops[0]) for number in range(6)]
    assert chosen([run("other"), *below[4:]], [*tops, *below[:3]]) == "below-4"
    assert chosen([run("other"), *below[4:]], [*tops, *below[:4]]) == ""
