"""The guess which slot is loaded next."""

from __future__ import annotations

import pytest

from hive.domain import Band
from hive.pool.next_up import RECENT_S, next_up
from hive.pool.state import Claim, Demand, ExclusiveOrder, PoolFacts, SlotFacts, SlotState

NOW = 10_000.0


def slot(id: str, **facts: object) -> SlotFacts:
    return SlotFacts(**{"id": id, "model": id, "need_bytes": 1} | facts)  # type: ignore[arg-type]


def asked(since: float) -> tuple[Demand, ...]:
    return (Demand(Band.NORMAL, since, NOW + 60),)


@pytest.mark.parametrize(
    ("slots", "claimed", "answer"),
    [
        ([], "", ""),
        ([slot("a")], "", ""),  # nobody has used it yet
        ([slot("a", used_at=NOW - 5), slot("b", used_at=NOW - 4)], "", "b"),
        ([slot("a", used_at=NOW - 5), slot("b", used_at=NOW - 4, state=SlotState.READY)], "", "a"),
        ([slot("a", used_at=NOW - 5), slot("b", used_at=NOW - 4, state=SlotState.LOADING)], "", "a"),
        ([slot("a", used_at=NOW - 5), slot("b", used_at=NOW - 4, state=SlotState.STOPPING)], "", "a"),
        ([slot("a", used_at=NOW - 5), slot("b", used_at=NOW - 4, state=SlotState.FAILED)], "", "a"),
        ([slot("a", used_at=NOW - 5), slot("b", used_at=NOW - 4, retry_at=NOW + 1)], "", "a"),
        ([slot("a", used_at=NOW - RECENT_S)], "", ""),
        ([slot("a", used_at=NOW - 5), slot("b", waiting=asked(NOW - 1))], "", "b"),
        ([slot("a", waiting=asked(NOW - 2)), slot("b", waiting=asked(NOW - 1))], "", "a"),
        ([slot("a", waiting=asked(NOW - 2)), slot("b"), slot("c", used_at=NOW)], "b", "b"),
        ([slot("a", waiting=asked(NOW - 2)), slot("b", state=SlotState.LOADING)], "b", "a"),
    ],
)
def test_the_slot_that_is_probably_next(slots: list[SlotFacts], claimed: str, answer: str) -> None:
    claims = (Claim(claimed, (), ()),) if claimed else ()
    assert next_up(PoolFacts(slots=tuple(slots), accounts=(), claims=claims), NOW, "abc") == answer


def test_a_server_of_somebody_elses_is_none_that_waits() -> None:
    slots = (slot("a", used_at=NOW - 5), slot("x", waiting=asked(NOW - 1)))
    claims = (Claim("x", (), ()),)
    assert next_up(PoolFacts(slots=slots, accounts=(), claims=claims), NOW, "abc") == "a"


def test_while_the_server_is_switched_none_waits() -> None:
    facts = PoolFacts(slots=(slot("a", used_at=NOW - 5),), accounts=(), exclusive=ExclusiveOrder("vllm", "x"))
    assert next_up(facts, NOW, "abc") == ""
