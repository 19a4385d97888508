"""Turns, patience, keep alive, back-off."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hive.domain import Band
from hive.pool.state import Audience, Demand, Rules, SlotFacts, SlotState
from hive.pool.turns import NEVER, after_failure, kept_until, late_at, may_leave_at, turn_s

NOW = 1000.0
READY = {"state": SlotState.READY, "load_s": 8.0, "unload_s": 2.0, "ready_at": 990.0, "used_at": 995.0}
USED = Audience(users=1, ends_at=1025.0)


def claimant(band: Band = Band.NORMAL, since: float = NOW) -> SlotFacts:
    return SlotFacts("c", "c", 1, load_s=8.0, unload_s=2.0, waiting=(Demand(band, since),))


@given(st.floats(0.5, 100), st.floats(0.5, 100), st.floats(0.01, 0.99))
def test_a_turn_makes_loading_at_most_its_share(load_in_s: float, load_back_s: float, share: float) -> None:
    swap = load_in_s + load_back_s
    assert math.isclose(swap / (swap + turn_s(load_in_s, load_back_s, share)), share)


@pytest.mark.parametrize(
    ("victim", "waiting", "at"),
    [
        ({}, claimant(), 0.0),  # idle, without an audience: at once
        ({"audience": USED}, claimant(), 1025.0),  # its audience ends before its turn does
        ({"audience": Audience(1, 0, 9999.0)}, claimant(), 1050.0),  # turn: 20 s of swap, three times that
        ({"audience": Audience(1, 0, 9999.0)}, claimant(Band.HIGH), 1010.0),  # the high band: half of the time
        ({"audience": Audience(1, 0, 9999.0)}, claimant(Band.LOW), 1060.0),  # late only then
        ({"in_flight": 1, "audience": USED}, claimant(), 1050.0),
        ({"in_flight": 1, "ready_at": 500.0}, claimant(), 1010.0),  # its turn is over: once somebody is late
        ({"in_flight": 1, "ready_at": 500.0}, claimant(since=900.0), 910.0),
        ({"pinned_at": 1.0}, claimant(), NEVER),
        ({"settled": False}, claimant(), NEVER),
        ({"state": SlotState.LOADING}, claimant(), NEVER),
        ({"state": SlotState.STOPPING}, claimant(), NEVER),
        ({"state": SlotState.DRAINING}, claimant(), NEVER),
        ({"state": SlotState.ASLEEP, "in_flight": 0}, claimant(), 0.0),
        ({"keep_alive_s": 300.0}, claimant(), 1010.0),  # kept until one of its own band is late
        ({"keep_alive_s": 7.0}, claimant(), 1002.0),
        ({"keep_alive_s": 300.0}, claimant(Band.LOW), 1295.0),  # against a lower band, all of it
        ({"keep_alive_s": 300.0, "band": Band.LOW}, claimant(Band.LOW), 1060.0),
        ({"keep_alive_s": 300.0, "in_flight": 1}, claimant(), 1050.0),  # it never lengthens a turn
    ],
)
def test_a_victim_may_leave(victim: dict[str, object], waiting: SlotFacts, at: float) -> None:
    slot = SlotFacts("v", "v", 1, **{**READY, **victim})  # type: ignore[arg-type]
    assert may_leave_at(slot, waiting, Rules(), NOW) == at


@given(st.floats(0, 1e4), st.floats(0, 600), st.sampled_from(Band), st.sampled_from(Band), st.floats(0, 1e4))
def test_keep_alive_ends_however_often_the_model_is_used(
    since: float, keep_alive_s: float, own: Band, other: Band, used_at: float
) -> None:
    victim = SlotFacts("v", "v", 1, used_at=used_at, keep_alive_s=keep_alive_s, band=own)
    waiting = claimant(other, since)
    assert kept_until(victim, waiting, Rules()) <= late_at(waiting, Rules()) + keep_alive_s


def test_a_pin_without_a_demand_is_late_with_the_patience_of_the_low_band() -> None:
    assert late_at(SlotFacts("a", "a", 1, pinned_at=5.0), Rules()) == 65.0
    assert late_at(SlotFacts("a", "a", 1), Rules()) == NEVER


def test_failures_wait_longer_each_time_and_end() -> None:
    waits = [after_failure(failures, NOW, Rules()) for failures in (1, 2, 3, 4)]
    assert [at - NOW for _, at in waits] == [60.0, 300.0, 900.0, NEVER]
    assert [state for state, _ in waits] == [SlotState.COLD] * 3 + [SlotState.FAILED]
