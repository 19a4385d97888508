"""Counters of leases since the daemon started, for `GET /metrics`. Pure bookkeeping."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from hive.exposition import Histogram, Values
from hive.pooling.pooled_lease import LeaseKind, LeaseState, PooledLease

WAIT_SECONDS = (0.1, 1.0, 10.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 86400.0)
"""Buckets of a wait in line: at once, or until somebody's job is over."""
LIVING = (LeaseState.WAITING, LeaseState.GRANTED, LeaseState.RUNNING, LeaseState.ENDING, LeaseState.OVERDUE)


class LeaseCounts:
    """Counts of what happened to leases since this daemon started. `code`: of the error that ended one, or empty.

    >>> counts = LeaseCounts()
    >>> counts.granted("job", 3.0)
    >>> counts.ended("lease_preempted")
    >>> counts
    <LeaseCounts 1 granted, 1 ended>
    """

    def __init__(self) -> None:
        self._granted: Counter[tuple[str, ...]] = Counter({(kind,): 0 for kind in LeaseKind})
        self._wait_s = Histogram(WAIT_SECONDS)
        self._ended: Counter[tuple[str, ...]] = Counter()
        self._preempted = self._overdue = self._overrun = 0

    def __repr__(self) -> str:
        return f"<LeaseCounts {self._granted.total()} granted, {self._ended.total()} ended>"

    def granted(self, kind: str, waited_s: float) -> None:
        """One was given its memory."""
        self._granted[str(kind),] += 1
        self._wait_s.observe(waited_s)

    def ended(self, code: str) -> None:
        """One is over, or has left the line."""
        self._ended[code or "ok",] += 1

    def preempted(self) -> None:
        """One was told to end because its memory was wanted."""
        self._preempted += 1

    def was_overdue(self) -> None:
        """One was not renewed in time."""
        self._overdue += 1

    def overran(self) -> None:
        """One had more memory than it asked for."""
        self._overrun += 1

    def metrics(self, leases: Iterable[PooledLease]) -> dict[str, Values | None]:
        """The same for Prometheus (`hive.control.metrics.TABLE`), and what is held now."""
        states: Counter[tuple[str, ...]] = Counter({(str(state),): 0 for state in LIVING})
        charged: Counter[tuple[str, ...]] = Counter()
        for lease in leases:
            states[str(lease.state),] += 1
            for grant in lease.grants:
                charged[grant.account,] += grant.charged_bytes
        return {
            "leases": states,
            "lease_charged_bytes": charged,
            "lease_grants": self._granted,
            "lease_wait_seconds": {(): self._wait_s},
            "lease_ends": self._ended,
            "lease_preemptions": {(): self._preempted},
            "lease_overdue": {(): self._overdue},
            "lease_overruns": {(): self._overrun},
        }
