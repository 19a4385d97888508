"""Crowds that would starve one model: it is served within its printed bound all the same."""

from __future__ import annotations

import random
from collections.abc import Callable

from hive.domain import Band
from hive.pool.state import MIB, MemoryAccount, Rules, SlotFacts
from tests.pool.pool_box import PoolBox

GIB = 1024 * MIB


def box_of(room_gib: int, **sizes_gib: int) -> PoolBox:
    slots = [SlotFacts(name, name, size * GIB, load_s=4 + size / 1.5) for name, size in sizes_gib.items()]
    return PoolBox(slots, [MemoryAccount("g", room_gib * GIB, 0)], Rules(), random.Random(1))


def crowd(
    box: PoolBox, seconds: int, victim: tuple[str, Band], ask: Callable[[int], list[tuple[str, str, Band]]]
) -> int:
    """The number of answers of `lone`, which asks for the victim's model while every free agent asks again each second.
    PoolBox fails the moment somebody waits beyond a bound."""
    answered = 0
    for second in range(seconds):
        if "lone" not in box.busy:
            answered += 1
            box.ask("lone", victim[0], victim[1], 1.0)
        for agent, model, band in ask(second):
            box.ask(agent, model, band, 4.0)
        box.pass_time(1.0)
    return answered - 1


def test_small_models_that_fill_each_gap_do_not_starve_a_large_one() -> None:
    """Each small one fits where another has just left, and has a turn of its own: the large one needs all of them gone.
    Here agents wander, so that there is always one without an audience."""
    box = box_of(48, large=46, s0=12, s1=12, s2=12, s3=12, s4=12, s5=12)

    def wander(second: int) -> list[tuple[str, str, Band]]:
        return [(f"agent-{number}", f"s{(number + second // 40) % 6}", Band.NORMAL) for number in range(4)]

    assert crowd(box, 3000, ("large", Band.NORMAL), wander) >= 3


def test_high_bands_that_take_turns_do_not_starve_a_low_one() -> None:
    box = box_of(40, low=30, h0=30, h1=30, h2=30)

    def high(second: int) -> list[tuple[str, str, Band]]:
        return [(f"agent-{number}", f"h{number}", Band.HIGH) for number in range(3)]

    assert crowd(box, 3000, ("low", Band.LOW), high) >= 3


def test_a_model_in_constant_use_does_not_keep_its_memory_for_ever() -> None:
    """seeds/003 to the letter: with equal priorities the second group waits until the first is idle for 300 s."""
    box = box_of(40, mine=30, theirs=30)
    box.set("theirs", keep_alive_s=300.0)

    def theirs(second: int) -> list[tuple[str, str, Band]]:
        return [(f"agent-{number}", "theirs", Band.NORMAL) for number in range(3)]

    assert crowd(box, 1500, ("mine", Band.NORMAL), theirs) >= 3
    assert crowd(box, 3000, ("mine", Band.LOW), theirs) >= 3


def test_a_request_that_never_ends_is_cut_after_its_turn_and_the_time_to_drain() -> None:
    box = box_of(40, mine=30, theirs=30)
    box.ask("hung", "theirs", Band.NORMAL, 1e9)
    box.pass_time(60.0)
    box.ask("lone", "mine", Band.NORMAL, 1.0)
    box.pass_time(400.0)
    assert (box.served, box.cut) == (1, 1)
