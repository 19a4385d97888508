"""Light or deep? The decider that acts also writes what `hive agent show` says of a sleeper's depth.

All times are monotonic seconds and come in as arguments, so a test needs no clock and no sleep.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from hive.agents.units_text import mib, spoken
from hive.domain import SleepDepth

FIRST_RETRY_S = 30.0
LONGEST_RETRY_S = 600.0
HOPELESS_RETRY_S = 3600.0
"""Delay before a step that this host does not allow is tried again; a new connection of the helper ends it."""


class DepthFacts(msgspec.Struct, frozen=True, kw_only=True):
    """All that bears on whether a sleeper's memory is to be paged out.

    `goal`: deep where that was wanted before and did not come to its end. `some_avg10`: memory pressure in per cent
    (PSI), None where the kernel does not count it. `resident_bytes`: RAM it holds, None before the first look.
    `retry_at`: not before this, because that failed, and `failure` says how.
    """

    depth: SleepDepth
    goal: SleepDepth = SleepDepth.LIGHT
    deepest: SleepDepth = SleepDepth.DEEP
    asleep_since: float = 0.0
    deep_after_s: float = 30.0
    some_avg10: float | None = None
    pressure_some_avg10: float = 10.0
    swap_free_bytes: int | None = None
    resident_bytes: int | None = None
    retry_at: float = 0.0
    failure: str = ""


class DepthVerdict(msgspec.Struct, frozen=True):
    """`deepen`: page it out now."""

    deepen: bool
    why: str


def verdict(facts: DepthFacts, now: float) -> DepthVerdict:
    """Decides to page the agent out now or not, and gives the reason in words (none for an agent that is awake).

    The objections in their order: awake, deep already, as deep as it may, no swap at all, failed a moment ago, neither
    its time nor memory pressure, no room in swap. The first objection gives the reason.

    >>> verdict(DepthFacts(depth=SleepDepth.LIGHT, asleep_since=100.0, deep_after_s=30.0), now=118.0).why
    'light sleep, deep in 12 s'
    >>> verdict(DepthFacts(depth=SleepDepth.LIGHT, asleep_since=100.0, some_avg10=24.6), now=101.0)
    DepthVerdict(deepen=True, why='memory pressure 25 %')
    """
    for objects in _OBJECTIONS:
        if (objection := objects(facts, now)) is not None:
            return objection
    return DepthVerdict(True, _why_wanted(facts, now))


def is_pressed(some_avg10: float | None, from_avg10: float) -> bool:
    """Whether the host is short of memory (PSI in per cent): from the setting on, which is never where that is 0.

    >>> is_pressed(10.0, 10.0), is_pressed(9.9, 10.0), is_pressed(99.0, 0.0), is_pressed(None, 10.0)
    (True, False, False, False)
    """
    return 0 < from_avg10 <= (some_avg10 or 0.0)


def retry_after_s(failures: int, *, hopeless: bool) -> float:
    """Seconds until the next try after the `failures`-th failure in a row.

    >>> [retry_after_s(n, hopeless=False) for n in (1, 2, 6, 60)], retry_after_s(1, hopeless=True)
    ([30.0, 60.0, 600.0, 600.0], 3600.0)
    """
    if hopeless:
        return HOPELESS_RETRY_S
    return float(min(LONGEST_RETRY_S, FIRST_RETRY_S * 2.0 ** min(failures - 1, 16)))


def true_depth(recorded: SleepDepth, *, resident_bytes: int, swap_bytes: int) -> SleepDepth:
    """The depth at which a frozen agent sleeps, by the kernel's figures of its memory.

    One recorded deep is so as long as a third or more is in swap: what stays in RAM are its file pages, about half of a
    small program. Another one is deep from two thirds on: with less a page-out came only part of the way, or the
    kernel took a little by itself, and paging out once more costs little.

    >>> str(true_depth(SleepDepth.DEEP, resident_bytes=6 << 20, swap_bytes=4 << 20))
    'deep'
    >>> str(true_depth(SleepDepth.LIGHT, resident_bytes=50 << 20, swap_bytes=50 << 20))
    'light'
    """
    enough = 2 * swap_bytes >= resident_bytes if recorded is SleepDepth.DEEP else swap_bytes >= 2 * resident_bytes
    return SleepDepth.DEEP if swap_bytes > 0 and enough else SleepDepth.LIGHT


def _awake(facts: DepthFacts, now: float) -> DepthVerdict | None:  # noqa: ARG001 - one signature for all objections
    return DepthVerdict(False, "") if facts.depth is SleepDepth.AWAKE else None


def _deep(facts: DepthFacts, now: float) -> DepthVerdict | None:  # noqa: ARG001 - one signature for all objections
    return DepthVerdict(False, "deep sleep") if facts.depth is SleepDepth.DEEP else None


def _not_allowed(facts: DepthFacts, now: float) -> DepthVerdict | None:  # noqa: ARG001 - one signature for all objections
    return (
        None if facts.deepest is SleepDepth.DEEP else DepthVerdict(False, "light sleep, never deep (deepest = light)")
    )


def _failed(facts: DepthFacts, now: float) -> DepthVerdict | None:
    if now >= facts.retry_at:
        return None
    left = facts.retry_at - now
    return DepthVerdict(False, f"light sleep, not deep: {facts.failure}, next try in {spoken(left)}")


def _no_swap(facts: DepthFacts, now: float) -> DepthVerdict | None:  # noqa: ARG001 - one signature for all objections
    """Before its time is spoken of: that it will be deep then would be promised in vain."""
    if facts.swap_free_bytes == 0:
        return DepthVerdict(False, "light sleep, not deep: this host has no free swap")
    return None


def _not_wanted(facts: DepthFacts, now: float) -> DepthVerdict | None:
    if facts.goal is SleepDepth.DEEP or is_pressed(facts.some_avg10, facts.pressure_some_avg10):
        return None
    if facts.deep_after_s <= 0:
        return DepthVerdict(False, "light sleep, deep only under memory pressure")
    left = facts.deep_after_s - (now - facts.asleep_since)
    return DepthVerdict(False, f"light sleep, deep in {left:.0f} s") if left > 0 else None


def _no_room(facts: DepthFacts, now: float) -> DepthVerdict | None:  # noqa: ARG001 - one signature for all objections
    free = facts.swap_free_bytes
    if free is not None and facts.resident_bytes is not None and free < facts.resident_bytes:
        return DepthVerdict(
            False, f"light sleep, not deep: {mib(facts.resident_bytes)} in RAM, {mib(free)} of free swap"
        )
    return None


def _why_wanted(facts: DepthFacts, now: float) -> str:
    if facts.goal is SleepDepth.DEEP:
        return "it was to sleep deep"
    if is_pressed(facts.some_avg10, facts.pressure_some_avg10):
        return f"memory pressure {facts.some_avg10:.0f} %"
    return f"asleep for {now - facts.asleep_since:.0f} s"


_OBJECTIONS: tuple[Callable[[DepthFacts, float], DepthVerdict | None], ...] = (
    _awake,
    _deep,
    _not_allowed,
    _no_swap,
    _failed,
    _not_wanted,
    _no_room,
)
