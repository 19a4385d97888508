"""The books of memory."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hive.pool.accounts import charge_bytes, foreign_peak, free_bytes, memory_back, with_measured
from hive.pool.state import Grant, MemoryAccount, Rules, SlotFacts, SlotState

TOTAL, RESERVE = 1000, 50
BYTES = st.integers(0, 2000)
STATES = st.sampled_from([SlotState.LOADING, SlotState.READY, SlotState.ASLEEP, SlotState.STOPPING])


def slot(state: SlotState, charged: int, measured: int | None, account: str = "g") -> SlotFacts:
    return SlotFacts("s", "m", charged, state=state, grants=(Grant(account, charged, measured),))


@pytest.mark.parametrize(
    ("used", "foreign", "slots", "free"),
    [
        (None, 0, [], 950),
        (None, 100, [], 840),  # the peak of foreign memory, times 1.1
        (None, 0, [slot(SlotState.READY, 300, 250)], 650),
        (300, 0, [], 700),  # measured: less than the books say
        (0, 0, [], 950),  # nothing is used, the reserve is kept all the same
        (100, 0, [slot(SlotState.LOADING, 300, 100)], 650),  # 200 are charged and not yet taken
        (100, 0, [slot(SlotState.LOADING, 300, None)], 600),  # not measured: all of it may still come
        (400, 0, [slot(SlotState.READY, 300, None)], 600),  # it is loaded: what is used holds it
        (None, 0, [slot(SlotState.READY, 300, None, "other")], 950),
        (990, 0, [slot(SlotState.READY, 300, 300)], 10),
        (None, 900, [slot(SlotState.READY, 300, 300)], -340),
    ],
)
def test_free_is_the_smaller_of_measured_and_booked(
    used: int | None, foreign: int, slots: list[SlotFacts], free: int
) -> None:
    account = MemoryAccount("g", TOTAL, RESERVE, used, foreign)
    assert free_bytes(account, slots, Rules()) == free


@given(BYTES, st.none() | BYTES, BYTES, STATES, st.none() | BYTES)
def test_what_is_not_known_never_makes_more_free(
    charged: int, used: int | None, foreign: int, state: SlotState, measured: int | None
) -> None:
    slots = [slot(state, charged, measured)]
    known = free_bytes(MemoryAccount("g", TOTAL, RESERVE, used, foreign), slots, Rules())
    assert known <= free_bytes(MemoryAccount("g", TOTAL, RESERVE, None, foreign), slots, Rules())
    assert known <= TOTAL - RESERVE - charged - foreign


@given(BYTES, st.none() | BYTES)
def test_a_charge_is_never_less_than_what_was_measured(charged: int, measured: int | None) -> None:
    grant = with_measured(Grant("g", charged), measured)
    assert grant.charged_bytes >= max(charged, measured or 0)
    assert charge_bytes(charged, measured) == grant.charged_bytes


@pytest.mark.parametrize(
    ("used", "own", "peak"),
    [
        (500, [Grant("g", 400, 400)], 100),
        (500, [Grant("g", 400, 480)], 70),  # the peak seen before stays
        (500, [Grant("g", 400, None)], 70),  # one of ours is not known
        (None, [], 70),
    ],
)
def test_foreign_memory_is_its_peak(used: int | None, own: list[Grant], peak: int) -> None:
    assert foreign_peak(70, used, own) == peak


@pytest.mark.parametrize(
    ("used", "waited_s", "verdict", "rest"),
    [
        (0, 0.0, "back", 0),  # it crashed: its memory was back before anybody looked
        (40, 0.0, "back", 0),  # a tenth is a driver's remainder
        (41, 0.0, "wait", 41),
        (400, 9.9, "wait", 400),
        (400, 10.0, "foreign", 400),
        (900, 10.0, "foreign", 400),  # never more than it held
        (None, 1.0, "wait", 0),
        (None, 10.0, "back", 0),  # the books are all there is
    ],
)
def test_memory_comes_back_or_is_booked_as_foreign(used: int | None, waited_s: float, verdict: str, rest: int) -> None:
    stopped = slot(SlotState.STOPPING, 400, 0)
    account = MemoryAccount("g", TOTAL, RESERVE, used)
    assert memory_back(account, [stopped], stopped, waited_s, Rules()) == (verdict, rest)


def test_the_memory_of_others_is_not_waited_for() -> None:
    stopped, other = slot(SlotState.STOPPING, 400, 0), slot(SlotState.READY, 300, 300)
    account = MemoryAccount("g", TOTAL, RESERVE, used_bytes=350, foreign_bytes=50)
    assert memory_back(account, [stopped, other], stopped, 0.0, Rules()) == ("back", 0)
