"""Counts of what happened to adapters since the daemon started, for `GET /metrics`. Pure bookkeeping."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from hive.exposition import Histogram, Values

LOAD_SECONDS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Buckets of a load: 5 s is what is promised of a large one."""
OUTCOMES = ("loaded", "failed", "refused")


class AdapterCounts:
    """Loads by their outcome. `refused`: not begun, for its signature or what it is.

    >>> counts = AdapterCounts()
    >>> counts.loaded(0.2)
    >>> counts.ended("refused")
    >>> counts
    <AdapterCounts 1 loaded, 0 failed, 1 refused>
    """

    def __init__(self) -> None:
        self._ends: Counter[tuple[str, ...]] = Counter({(outcome,): 0 for outcome in OUTCOMES})
        self._load_s = Histogram(LOAD_SECONDS)

    def __repr__(self) -> str:
        return f"<AdapterCounts {', '.join(f'{self._ends[outcome,]} {outcome}' for outcome in OUTCOMES)}>"

    def loaded(self, took_s: float) -> None:
        """One is served now."""
        self.ended("loaded")
        self._load_s.observe(took_s)

    def ended(self, outcome: str) -> None:
        """An order to load is over, with one of OUTCOMES."""
        self._ends[outcome,] += 1

    def metrics(self, bases: Iterable[str]) -> dict[str, Values | None]:
        """For Prometheus (`hive.control.metrics.TABLE`). `bases`: of each adapter that is served."""
        return {
            "adapters_loaded": {(base,): count for base, count in Counter(bases).items()},
            "adapter_loads": self._ends,
            "adapter_load_seconds": {(): self._load_s},
        }
