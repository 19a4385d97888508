"""Wakes in line for memory: order, room, and that none waits for ever."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hive.agents.admission import REFAULT_BYTES_PER_S, SHORTEST_S, MemoryAdmission
from hive.domain import Tier

MIB = 1 << 20
RESERVE = 256 * MIB


def line_of(*agents: tuple[str, int, Tier]) -> MemoryAdmission:
    line = MemoryAdmission()
    for number, (agent, need_mb, tier) in enumerate(agents):
        line.enter(agent, need_bytes=need_mb * MIB, tier=tier, now=float(number))
    return line


def admitted(line: MemoryAdmission, available_mb: int | None, now: float) -> list[str]:
    available = None if available_mb is None else available_mb * MIB
    return line.admit(available_bytes=available, reserve_bytes=RESERVE, now=now)


def test_high_tier_goes_first_then_who_asked_first() -> None:
    line = line_of(("a", 1, Tier.LOW), ("b", 1, Tier.MEDIUM), ("c", 1, Tier.HIGH), ("d", 1, Tier.MEDIUM))
    assert admitted(line, 10_000, 4.0) == ["c", "b", "d", "a"]


def test_so_many_are_admitted_as_leave_the_reserve_untouched() -> None:
    line = line_of(*((name, 300, Tier.MEDIUM) for name in "abcdef"))
    assert admitted(line, 256 + 4 * 300, 10.0) == ["a", "b", "c", "d"]
    assert admitted(line, 256 + 4 * 300, 10.0) == []


def test_what_is_admitted_counts_until_it_is_back() -> None:
    """Half of the time later half of it is missing from the available memory already."""
    line = line_of(("a", 300, Tier.MEDIUM), ("b", 300, Tier.MEDIUM))
    assert admitted(line, 700, 10.0) == ["a"]
    lasts_s = 300 * MIB / REFAULT_BYTES_PER_S
    assert line.outstanding_bytes(10.0 + lasts_s / 2) == 150 * MIB
    assert admitted(line, 700 - 150, 10.0 + lasts_s / 2) == []
    assert admitted(line, 700 - 300 + 160, 10.0 + lasts_s) == ["b"]


def test_no_memory_is_held_for_a_turn_that_waits_for_its_model() -> None:
    line = line_of(("a", 300, Tier.MEDIUM), ("b", 300, Tier.MEDIUM))
    assert admitted(line, 700, 10.0) == ["a"]
    assert admitted(line, 600, 10.1) == []
    assert line.coming() == ["a"]
    line.waits_for_model("a")
    assert (line.coming(), line.outstanding_bytes(10.1)) == ([], 0)
    assert admitted(line, 600, 10.1) == ["b"]


def test_where_nothing_fits_a_turn_at_the_model_makes_no_other_one_go() -> None:
    """Else every wake would be let in as soon as the one before has asked its model, whatever memory there is."""
    line = line_of(("a", 300, Tier.MEDIUM), ("b", 300, Tier.MEDIUM))
    assert admitted(line, 100, 10.0) == ["a"]
    line.waits_for_model("a")
    assert admitted(line, 100, 10.1) == []
    assert admitted(line, 100, 10.0 + 300 * MIB / REFAULT_BYTES_PER_S) == ["b"]


def test_an_otherwise_empty_machine_blocks_nobody() -> None:
    line = line_of(("huge", 100_000, Tier.LOW))
    assert admitted(line, 0, 1.0) == ["huge"]


def test_nobody_overtakes_a_large_one() -> None:
    line = line_of(("small", 10, Tier.MEDIUM), ("large", 1000, Tier.MEDIUM), ("tiny", 1, Tier.MEDIUM))
    assert admitted(line, 600, 5.0) == ["small"]
    assert admitted(line, 600, 5.0 + SHORTEST_S) == ["large"]


def test_memory_nobody_knows_keeps_nobody_waiting() -> None:
    assert admitted(line_of(("a", 300, Tier.LOW), ("b", 300, Tier.LOW)), None, 1.0) == ["a", "b"]


def test_who_asks_again_keeps_the_place() -> None:
    line = line_of(("a", 300, Tier.MEDIUM), ("b", 300, Tier.MEDIUM))
    line.enter("a", need_bytes=1, tier=Tier.HIGH, now=9.0)
    assert (line.need_bytes("a"), admitted(line, 0, 9.0)) == (300 * MIB, ["a"])


def test_one_that_sleeps_again_or_ended_takes_no_room() -> None:
    line = line_of(("a", 300, Tier.MEDIUM), ("b", 300, Tier.MEDIUM), ("c", 300, Tier.MEDIUM))
    assert admitted(line, 0, 1.0) == ["a"]
    line.leave("a")
    line.leave("b")
    assert (admitted(line, 0, 1.0), len(line)) == (["c"], 0)


def test_one_that_came_awake_by_another_way_does_not_wait_and_what_it_was_admitted_for_still_counts() -> None:
    line = line_of(("a", 300, Tier.MEDIUM), ("b", 300, Tier.MEDIUM))
    assert admitted(line, 0, 1.0) == ["a"]
    line.runs("a")
    line.runs("b")
    assert (len(line), line.outstanding_bytes(1.0)) == (0, 300 * MIB)


@given(
    wishes=st.lists(st.tuples(st.integers(0, 1000), st.sampled_from(Tier)), max_size=20),
    available_mb=st.integers(0, 3000),
    steps=st.lists(st.floats(0.01, 3.0), min_size=1, max_size=30),
)
def test_only_one_at_a_time_goes_below_the_reserve_and_all_get_in_at_last(
    wishes: list[tuple[int, Tier]], available_mb: int, steps: list[float]
) -> None:
    line, now, seen = MemoryAdmission(), 0.0, list[str]()
    for number, (need_mb, tier) in enumerate(wishes):
        line.enter(str(number), need_bytes=need_mb * MIB, tier=tier, now=0.0)
    for step_s in steps:
        coming_before = line.outstanding_bytes(now)
        let_in = admitted(line, available_mb, now)
        seen += let_in
        left = available_mb * MIB - line.outstanding_bytes(now)
        # Each but a lone one was let in with the reserve untouched; the earlier ones have only become less.
        assert left >= RESERVE or len(let_in) <= 1 or coming_before == 0
        now += step_s
    for _ in wishes:
        now += 1.01 * 1000 * MIB / REFAULT_BYTES_PER_S
        seen += admitted(line, available_mb, now)
    assert sorted(seen, key=int) == [str(number) for number in range(len(wishes))]
    assert len(line) == 0
