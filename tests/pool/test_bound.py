"""The printed bound of a wait, and the explanation of a model's place."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from hive.domain import Band
from hive.pool.bound import load_progress, waiting_bound
from hive.pool.explain import explain
from hive.pool.state import (
    MIB,
    Audience,
    Claim,
    Demand,
    EvictedSlot,
    ExclusiveOrder,
    Grant,
    MemoryAccount,
    PoolFacts,
    Rules,
    SleepLevel,
    SlotFacts,
    SlotState,
)

S = SlotState
NOW = 1000.0
GPU = MemoryAccount("g", total_bytes=100 * MIB, reserve_bytes=0)
ASKED = Demand(Band.NORMAL, NOW)
A, B = SlotFacts("a", "a", 60 * MIB, load_s=20.0), SlotFacts("b", "b", 60 * MIB, load_s=20.0)


def ready(slot: SlotFacts, **more: Any) -> SlotFacts:
    fields: dict[str, Any] = {"state": S.READY, "grants": (Grant("g", slot.need_bytes),), "ready_at": NOW} | more
    return replace(slot, **fields)


def bound(*slots: SlotFacts, of: str = "b", demand: Demand = ASKED, **more: Any) -> float | None:
    return waiting_bound(PoolFacts(slots, (GPU,), **more), of, demand, NOW).seconds


@pytest.mark.parametrize(
    ("slots", "seconds"),
    [
        ((ready(B),), 0.0),
        ((B,), 20.0),  # it fits, and nobody else is there
        ((A, B), 20.0),  # the other one is not loaded, and waits for nothing
        ((replace(B, state=S.LOADING, moved_at=NOW - 14),), 6.0),
        ((ready(A), B), 129.0 + 65.0 + 11.5 + 20.0),  # turn, drain and cut, unload and its memory back, load
        ((ready(A, ready_at=NOW - 200), B), 10.0 + 65.0 + 11.5 + 20.0),  # its turn is over: until b is late
        ((ready(A, keep_alive_s=300.0), B), 429.0 + 65.0 + 11.5 + 20.0),  # b may be of a lower band
        ((replace(B, failures=1, retry_at=NOW + 60),), 80.0),
        ((ready(replace(A, need_bytes=MIB), state=S.LOADING, pinned_at=0.0, moved_at=NOW - 5), B), 15.0 + 20.0),
    ],
)
def test_a_wait_has_an_end(slots: tuple[SlotFacts, ...], seconds: float) -> None:
    assert bound(*slots) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("slots", "blocked"),
    [
        ((ready(A, pinned_at=0.0), B), "b does not fit beside what is pinned: a"),
        ((replace(A, pinned_at=NOW), B), "b needs 62914560 bytes, more than can ever be free"),
        ((replace(B, need_bytes=101 * MIB),), "b needs 105906176 bytes, more than can ever be free"),
        ((replace(B, state=S.FAILED),), "the loads of b have failed"),
    ],
)
def test_a_wait_without_an_end_names_its_reason(slots: tuple[SlotFacts, ...], blocked: str) -> None:
    found = waiting_bound(PoolFacts(slots, (GPU,)), "b", ASKED, NOW)
    assert (found.seconds, found.blocked) == (None, blocked)


def test_a_sleeper_that_is_being_unloaded_is_loaded_and_not_woken() -> None:
    """A walk of chance found the bound 1.8 s short: it counted a wake of 2 s for a load of 20 s."""
    levels = (SleepLevel("1", kept_bytes=MIB, host_bytes=0, wake_s=2.0),)
    asleep = replace(
        B, state=S.ASLEEP, level="1", levels=levels, grants=(Grant("g", MIB),), awake=(Grant("g", 60 * MIB),)
    )
    assert bound(asleep) == pytest.approx(2.0)
    stopping = replace(asleep, state=S.STOPPING, moved_at=NOW)
    assert bound(stopping) == pytest.approx(11.5 + 20.0)


def test_the_rival_may_come_while_a_failed_load_waits_for_its_next_try() -> None:
    """A walk of chance found the bound 8.8 s short: the other model had been loaded meanwhile, and had its turn."""
    failed = replace(B, failures=1, retry_at=NOW + 60)
    alone, beside = bound(failed), bound(A, failed)
    assert alone is not None
    assert beside is not None
    assert beside > alone + 100


def test_nothing_is_promised_while_the_backend_is_switched() -> None:
    assert bound(A, B, exclusive=ExclusiveOrder("vllm", "a")) is None
    assert bound(A, B, exclusive=ExclusiveOrder("vllm", "b")) is None  # the others have to leave first


def test_a_smaller_share_of_swaps_makes_a_longer_bound() -> None:
    figures = [bound(ready(A), B, rules=Rules(swap_share=share)) for share in (0.5, 0.25, 0.1)]
    assert None not in figures
    assert figures == sorted(figures, key=lambda seconds: seconds or 0.0)
    assert len(set(figures)) == 3


def test_where_all_others_are_loaded_nobody_can_be_before_it() -> None:
    """Three models of which two fit: 3.7 times as much was printed, as if both others had to be loaded once more before
    it, for which it would have to be there first."""
    small = [replace(A, id=name, model=name, need_bytes=48 * MIB) for name in "xyz"]
    cold, others = small[0], [ready(one) for one in small[1:]]
    turn, drain, gap, leave, load = 129.0, 65.0, 20.0, 2 * 11.5, 20.0
    assert bound(cold, *others, of="x") == pytest.approx(10.0 + turn + drain + gap + leave + load)
    away = replace(others[1], state=S.STOPPING, moved_at=NOW)  # it may be asked for before this one is late
    assert (bound(cold, others[0], away, of="x") or 0.0) > 3 * (turn + drain)
    rules = Rules(unload_idle=True)  # another may leave by itself
    assert (bound(cold, *others, of="x", rules=rules) or 0.0) > 3 * (turn + drain)


def test_more_rivals_and_a_lower_band_make_a_longer_bound() -> None:
    others = [replace(A, id=f"a{number}", model=f"a{number}") for number in range(3)]
    few, many = bound(ready(A), B, others[0]), bound(ready(A), B, *others)
    assert few is not None
    assert many is not None
    assert few < many
    high = bound(ready(A), B, *others, demand=Demand(Band.HIGH, NOW))
    low = bound(ready(A), B, *others, demand=Demand(Band.LOW, NOW))
    assert high is not None
    assert low is not None
    assert high < many < low


def test_the_parts_of_a_bound_are_its_sum() -> None:
    found = waiting_bound(PoolFacts((ready(A), B), (GPU,)), "b", ASKED, NOW)
    assert found.seconds == pytest.approx(sum(part.seconds for part in found.parts))
    assert [part.what for part in found.parts] == ["turn of a", "requests in flight at a", "unload of a", "load of b"]


def test_a_load_tells_how_far_it_is() -> None:
    assert str(load_progress(replace(A, state=S.LOADING, load_s=47.0, moved_at=NOW - 14), NOW)) == "14 s of about 47"
    assert load_progress(A, NOW) is None


USED = Audience(users=2, ends_at=NOW + 25)


@pytest.mark.parametrize(
    ("slot", "line"),
    [
        (ready(B), "Nobody uses it; it stays until its memory is wanted"),
        (ready(B, audience=USED), "2 of those who used it last will probably ask again within 25 s"),
        (ready(B, in_flight=3, audience=USED), "3 in flight"),
        (ready(B, pinned_at=0.0), "It is pinned"),
        (ready(B, keep_alive_s=60.0, used_at=NOW - 20), "It is kept for another 40 s"),
        (ready(B, state=S.DRAINING, in_flight=2), "It is being unloaded; 2 in flight are waited for"),
        (ready(B, state=S.LOADING, moved_at=NOW - 5), "It is being loaded: 5 s of about 20"),
        (B, "Nobody has asked for it"),
        (replace(B, pinned_at=0.0), "It is pinned and waits for memory"),
        (replace(B, failures=2, retry_at=NOW + 300), "2 loads in a row have failed; the next try is in 300 s"),
        (replace(B, state=S.FAILED, failures=4), "4 loads in a row have failed"),
    ],
)
def test_a_model_is_explained(slot: SlotFacts, line: str) -> None:
    lines = explain(PoolFacts((slot,), (GPU,)), "b", NOW).lines()
    assert lines[0].startswith(f"b is {slot.state}")
    assert lines[1] == line


def test_what_would_leave_is_named_with_the_time_it_keeps() -> None:
    used = ready(A, audience=Audience(users=1, ends_at=NOW + 9999))
    told = explain(PoolFacts((used, B), (GPU,)), "b", NOW)
    assert told.lines()[2] == "To load it would leave: a, in 129 s"
    told = explain(PoolFacts((ready(A, ready_at=0.0), B), (GPU,)), "b", NOW)
    assert told.lines()[2] == "To load it would leave: a, now"
    assert explain(PoolFacts((B,), (GPU,)), "b", NOW).lines()[2] == "It fits beside what is loaded"
    pinned = explain(PoolFacts((ready(A, pinned_at=0.0), B), (GPU,)), "b", NOW)
    assert pinned.lines()[-1] == "A request for it is refused: b does not fit beside what is pinned: a"


def test_a_claim_is_explained_from_both_sides() -> None:
    waiting = replace(B, waiting=(ASKED,))
    claim = Claim("b", (Grant("g", 60 * MIB),), (EvictedSlot("a"),))
    facts = PoolFacts((ready(A, state=S.DRAINING, in_flight=1, closed_at=NOW), waiting), (GPU,), (claim,))
    assert explain(facts, "a", NOW).why == "It leaves for b; 1 in flight are waited for"
    assert explain(facts, "b", NOW).why == "Room is being made for it: a leaves"


def test_a_model_that_is_not_there_is_not_explained() -> None:
    with pytest.raises(KeyError):
        explain(PoolFacts((A,), (GPU,)), "b", NOW)
