"""The limit on requests without a valid token, per peer: a pure decider with the time passed in."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

PEERS_MAX = 1024


class FailedTry(NamedTuple):
    """`wait_s`: None as long as there were not too many. `tell`: None, or how many to tell the log of."""

    wait_s: float | None
    tell: int | None


class Failures:
    """At most `limit` failures of one peer in any `span_s` seconds; told once in that time.

    >>> failures = Failures(limit=2, span_s=60)
    >>> [failures.count("192.0.2.1", now=t) for t in (0.0, 1.0)]
    [FailedTry(wait_s=None, tell=1), FailedTry(wait_s=None, tell=None)]
    >>> failures.count("192.0.2.1", now=2.0), failures.count("192.0.2.2", now=2.0)
    (FailedTry(wait_s=58.0, tell=None), FailedTry(wait_s=None, tell=1))
    >>> failures.count("192.0.2.1", now=61.0)
    FailedTry(wait_s=None, tell=3)
    """

    def __init__(self, *, limit: int = 20, span_s: float = 60.0) -> None:
        self.limit = limit
        self.span_s = span_s
        self._peers: dict[str, _Peer] = {}

    def __repr__(self) -> str:
        return f"<Failures of {len(self._peers)} peers>"

    def count(self, peer: str, now: float) -> FailedTry:
        """Counts one more. The peer with the oldest failure is forgotten where there are too many."""
        known = self._peers.pop(peer, None) or _Peer(self.limit)
        self._peers[peer] = known
        if len(self._peers) > PEERS_MAX:
            del self._peers[next(iter(self._peers))]
        return FailedTry(known.wait_s(now, self.span_s), known.untold(now, self.span_s))


class _Peer:
    def __init__(self, limit: int) -> None:
        self._failed: deque[float] = deque(maxlen=limit)
        self._told_at: float | None = None
        self._untold = 0

    def wait_s(self, now: float, span_s: float) -> float | None:
        failed = self._failed
        while failed and failed[0] <= now - span_s:
            failed.popleft()
        if len(failed) == failed.maxlen:
            return failed[0] + span_s - now
        failed.append(now)
        return None

    def untold(self, now: float, span_s: float) -> int | None:
        self._untold += 1
        if self._told_at is not None and now < self._told_at + span_s:
            return None
        untold, self._untold, self._told_at = self._untold, 0, now
        return untold
