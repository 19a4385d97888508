"""The cost of waking: durations of wakes, and their causes. Pure bookkeeping, bounded."""

from __future__ import annotations

from collections import Counter, deque

from hive.domain import WakeCause


class WakeDurations:
    """The last `window` wakes in milliseconds, and a count of all by cause.

    >>> times = WakeDurations(window=3)
    >>> for took_ms in (9.0, 1.0, 2.0, 3.0):
    ...     times.add(WakeCause.INGRESS, took_ms)
    >>> times.percentile(50), times.percentile(99), times.count
    (2.0, 3.0, 4)
    """

    def __init__(self, *, window: int = 2000) -> None:
        self._took_ms: deque[float] = deque(maxlen=window)
        self._causes: Counter[WakeCause] = Counter()

    def __repr__(self) -> str:
        return f"<WakeDurations {self.count} wakes, {len(self._took_ms)} kept>"

    def add(self, cause: WakeCause, took_ms: float) -> None:
        self._causes[cause] += 1
        self._took_ms.append(took_ms)

    @property
    def count(self) -> int:
        """All wakes, also those older than the window."""
        return self._causes.total()

    @property
    def causes(self) -> dict[str, int]:
        return {str(cause): number for cause, number in sorted(self._causes.items())}

    def percentile(self, percent: float) -> float | None:
        """Milliseconds within which `percent` of the kept wakes were done (nearest rank); None without any."""
        if not self._took_ms:
            return None
        ordered = sorted(self._took_ms)
        rank = -(-len(ordered) * percent // 100)
        return ordered[max(0, int(rank) - 1)]
