"""The tokens that one server works off in a second, as its requests were seen to end. Pure."""

from __future__ import annotations

UNMEASURED_PER_S = 100.0
"""Taken of a server that has worked on nothing yet."""
KEPT_S = 120.0
"""Seconds of work after which what is older counts half."""


class WorkRate:
    """Tokens over the seconds in which at least one request was there.

    >>> rate = WorkRate()
    >>> rate.did(300.0, begun_at=0.0, now=2.0); rate.did(100.0, begun_at=1.0, now=4.0); rate.did(400.0, 8.0, 12.0)
    >>> rate.per_s
    100.0
    """

    __slots__ = ("_busy_s", "_seen_until", "_tokens")

    def __init__(self) -> None:
        self._tokens = self._busy_s = 0.0
        self._seen_until = 0.0

    def __repr__(self) -> str:
        return f"<WorkRate {self.per_s:.0f} tokens/s>"

    @property
    def per_s(self) -> float:
        return self._tokens / self._busy_s if self._tokens and self._busy_s else UNMEASURED_PER_S

    def did(self, tokens: float, begun_at: float, now: float) -> None:
        """A request has ended that had its place since `begun_at` and cost so much; `now` never falls."""
        self._tokens += tokens
        self._busy_s += now - (begun_at if begun_at > self._seen_until else self._seen_until)
        self._seen_until = now
        if self._busy_s > KEPT_S:
            self._tokens /= 2
            self._busy_s /= 2
