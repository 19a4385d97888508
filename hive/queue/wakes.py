"""The durations of wakes, and by them the time after which a request that gave up may come again. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

REMEMBERED = 64
"""Wakes of all agents together: few enough to forget a busy hour within minutes, enough for a median."""
SOONEST_S = 1.0
LATEST_S = 60.0


class WakeTimes:
    """The last wakes, as the proxy saw them: from asking the daemon to its answer, admission by memory included.

    >>> wakes = WakeTimes()
    >>> [wakes.took(s) for s in (0.004, 0.005, 9.0, 13.0)] and wakes.retry_after_s(5.0)
    6.0
    >>> wakes
    <WakeTimes 4 wakes, median 4502.5 ms>
    """

    __slots__ = ("_took",)

    def __init__(self) -> None:
        self._took: deque[float] = deque(maxlen=REMEMBERED)

    def __repr__(self) -> str:
        middle = f", median {_median(self._took) * 1e3:.1f} ms" if self._took else ""
        return f"<WakeTimes {len(self._took)} wakes{middle}>"

    def took(self, wake_s: float) -> None:
        """One wake is over, after so long."""
        self._took.append(wake_s)

    def retry_after_s(self, waited_s: float) -> float:
        """Seconds until a wake that `waited_s` were not enough for is likely to be over.

        Of the wakes that took longer still: the median of what they needed beyond that. Where none did, as long again.

        >>> WakeTimes().retry_after_s(5.0), WakeTimes().retry_after_s(0.0)
        (5.0, 1.0)
        """
        longer = [wake_s - waited_s for wake_s in self._took if wake_s > waited_s]
        return min(LATEST_S, max(SOONEST_S, _median(longer) if longer else waited_s))


def _median(values: Iterable[float]) -> float:
    """The median; to import `statistics` for it is half a megabyte of the proxy.

    >>> _median([3.0, 1.0, 2.0]), _median([4.0, 1.0])
    (2.0, 2.5)
    """
    ordered = sorted(values)
    middle = len(ordered) // 2
    return (ordered[middle] + ordered[~middle]) / 2
