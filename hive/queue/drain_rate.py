"""The rate at which waiting requests get their turn. Pure, the time comes in."""

from __future__ import annotations

import math

FADES_S = 10.0
"""Time constant: what was counted so long ago weighs 1/e."""
FOLD_S = 1.0


class Pace:
    """The rate of an event per second, measured only while something waits for it.

    >>> pace = Pace()
    >>> pace.begin(now=0.0)
    >>> for second in (1, 2, 3, 4):
    ...     pace.count(now=second / 2)
    >>> pace.per_s(now=2.0)
    2.0
    """

    __slots__ = ("_count", "_last", "_seconds", "_since", "_total")

    def __init__(self) -> None:
        self._total = self._seconds = 0.0
        self._count = 0
        self._since: float | None = None
        self._last = 0.0

    def begin(self, now: float) -> None:
        """Begins the measurement, unless it has begun: something waits from now on."""
        if self._since is None:
            self._since = self._last = now

    def count(self, now: float) -> None:
        if self._since is not None:
            self._count += 1
            self._last = now
            if now - self._since >= FOLD_S:
                self._fold(now - self._since)
                self._since = now

    def end(self, now: float | None) -> None:
        """Ends the measurement: nothing waits any more. Without `now` the last second is not learnt."""
        if self._since is not None and now is not None:
            self._fold(max(0.0, now - self._since))
        self._since = None
        self._count = 0

    def per_s(self, now: float) -> float | None:
        """The rate; None if nothing was counted yet."""
        total = self._total + self._count
        seconds = self._seconds + (max(0.0, now - self._since) if self._since is not None else 0.0)
        return total / seconds if total and seconds else None

    def stuck_s(self, now: float) -> float:
        """Seconds since the last event while something waits; 0 if nothing waits."""
        return 0.0 if self._since is None else max(0.0, now - self._last)

    def _fold(self, elapsed_s: float) -> None:
        kept = math.exp(-elapsed_s / FADES_S)
        self._total = self._total * kept + self._count
        self._seconds = self._seconds * kept + elapsed_s
        self._count = 0
