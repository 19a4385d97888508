"""Start after a crash: how long to wait for it, and when to give up. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hive.worker.profile import TimeoutProfile


class ServerEnd(NamedTuple):
    """One end that nobody asked for: its time, and how long the server had lived."""

    at: float
    lived_s: float


def delay_s(ends: Sequence[ServerEnd], profile: TimeoutProfile, *, now: float) -> float | None:
    """Seconds until the next start, twice as long after each end; None where there were too many of them.

    A server that lived for `crash_window_s` had recovered: the ends before do not count.

    >>> ends = [ServerEnd(at, 1.0) for at in (0, 2, 5, 10)]
    >>> [delay_s(ends[:number], TimeoutProfile(), now=10) for number in (1, 2, 3, 4)]
    [1.0, 2.0, 4.0, 8.0]
    >>> delay_s([*ends, ServerEnd(19, 1.0)], TimeoutProfile(), now=19) is None
    True
    >>> delay_s([*ends, ServerEnd(400, 380.0)], TimeoutProfile(), now=400)
    1.0
    """
    if sum(now - end.at <= profile.crash_window_s for end in ends) >= profile.crash_limit:
        return None
    in_a_row = 0
    for end in reversed(ends):
        in_a_row += 1
        if end.lived_s >= profile.crash_window_s:
            break
    doublings = min(max(in_a_row - 1, 0), 30)
    return min(profile.backoff_longest_s, profile.backoff_first_s * 2.0**doublings)
