"""The restarts of an agent after its ends: number, reasons, and the time of the next. Pure bookkeeping."""

from __future__ import annotations

from collections import deque


class Restarts:
    """The restarts of one agent, since a caller started it, or since this daemon's start.

    `count`: ends that its restart policy answered with another start. `reason`: how it ended last, or what keeps it
    from starting; empty where neither was. `next_at`: Unix seconds of the next try, None where none is due.

    >>> restarts = Restarts()
    >>> [restarts.ended(now=t, window_s=60) for t in (0.0, 10.0, 65.0)], restarts.recent(now=80.0, window_s=60)
    ([1, 2, 2], 1)
    """

    def __init__(self) -> None:
        self._ends: deque[float] = deque()
        self.count = 0
        self.reason = ""
        self.next_at: float | None = None

    def __repr__(self) -> str:
        return f"<Restarts {self.count}, next at {self.next_at}: {self.reason!r}>"

    def ended(self, *, now: float, window_s: float) -> int:
        """Takes down one more end; returns how many there were within the window, this one included."""
        self._ends.append(now)
        return self.recent(now=now, window_s=window_s)

    def recent(self, *, now: float, window_s: float) -> int:
        """Ends within the window."""
        while self._ends and now - self._ends[0] >= window_s:
            self._ends.popleft()
        return len(self._ends)

    def again(self, reason: str, *, next_at: float) -> None:
        """It ended, and is to be started again."""
        self.count += 1
        self.waits(reason, next_at=next_at)

    def waits(self, reason: str, *, next_at: float) -> None:
        """A start is due then; `reason`: why not before."""
        self.reason, self.next_at = reason, next_at

    def tried(self) -> None:
        """No start is due any more."""
        self.next_at = None

    def forget(self) -> None:
        """Starts the count anew: it is started by a caller, and earlier ends do not matter any more."""
        self._ends.clear()
        self.count, self.reason, self.next_at = 0, "", None


def with_restarts(brief: str, count: int, recent: int) -> str:
    """`brief` with what a list should not keep quiet about an agent that runs, and ended a moment ago.

    >>> with_restarts("12 s until idle", 7, 3), with_restarts("12 s until idle", 7, 0)
    ('12 s until idle; ended and was started again 7 times', '12 s until idle')
    """
    times = "once" if count == 1 else f"{count} times"
    return f"{brief}; ended and was started again {times}" if recent and count else brief
