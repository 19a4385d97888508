"""Limits of rate and concurrency: pure deciders with the time passed in."""

from __future__ import annotations

from collections import deque


class SlidingWindow:
    """At most `limit` requests in any `span_s` seconds.

    The caller passes the time, so a test needs no clock and no sleep.

    >>> window = SlidingWindow(limit=2, span_s=60)
    >>> [window.take(now=t) for t in (0.0, 1.0, 2.0)]   # None, or seconds to wait
    [None, None, 58.0]
    """

    __slots__ = ("_taken", "limit", "span_s")

    def __init__(self, limit: int, span_s: float) -> None:
        self.limit = limit
        self.span_s = span_s
        self._taken: deque[float] = deque()

    def __repr__(self) -> str:
        return f"<SlidingWindow {len(self._taken)}/{self.limit} in {self.span_s:g} s>"

    def take(self, now: float) -> float | None:
        """Charges one request; or says in how many seconds there will be room, charging nothing."""
        taken = self._taken
        horizon = now - self.span_s
        while taken and taken[0] <= horizon:
            taken.popleft()
        if len(taken) >= self.limit:
            return taken[len(taken) - self.limit] + self.span_s - now
        taken.append(now)
        return None

    def give_back(self, charged_at: float) -> None:
        """Takes back the charge made at that time: Hive itself had no room."""
        taken = self._taken
        if taken and taken[-1] == charged_at:
            taken.pop()
            return
        try:
            taken.remove(charged_at)
        except ValueError:
            return


def window_of(limit: int, span_s: float, old: SlidingWindow | None) -> SlidingWindow:
    """The window of these numbers: the old one, with what was charged to it, where they have not changed."""
    if old is not None and (old.limit, old.span_s) == (limit, span_s):
        return old
    return SlidingWindow(limit, span_s)
