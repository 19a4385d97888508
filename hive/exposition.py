"""Prometheus's text format: a metric is one row of a table, its values are handed in at each scrape.

prometheus-client only writes the format; counting is a dict look-up and an addition.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from itertools import accumulate
from typing import NamedTuple

from prometheus_client import Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
HISTOGRAMS_AT_ONCE, SAMPLES_AT_ONCE = 8, 150
"""Of a metric in one piece: a line takes 3 µs."""


class MetricKind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class MetricRow(NamedTuple):
    """One metric: its name without prefix and `_total`, its labels, and what it says."""

    name: str
    kind: MetricKind
    labels: tuple[str, ...]
    sentence: str
    prefix: str = "hive_"

    @property
    def full_name(self) -> str:
        """The name as a scrape shows it.

        >>> MetricRow("requests", MetricKind.COUNTER, (), "").full_name
        'hive_requests_total'
        """
        return self.prefix + self.name + ("_total" if self.kind == MetricKind.COUNTER else "")


class Histogram:
    """Number of observations in each bucket; a bound belongs to its own bucket.

    >>> waits = Histogram((0.1, 1.0))
    >>> [waits.observe(value) for value in (0.1, 0.5, 7.0)] and waits.cumulative()
    [('0.1', 1.0), ('1.0', 2.0), ('+Inf', 3.0)]
    """

    __slots__ = ("_bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self._bounds, value)] += 1
        self.total += value

    def cumulative(self) -> list[tuple[str, float]]:
        """(upper bound, observations not above it) of each bucket, as the format wants it."""
        names = [*map(str, self._bounds), "+Inf"]
        return list(zip(names, map(float, accumulate(self.counts)), strict=True))


Values = Mapping[tuple[str, ...], float | Histogram]
"""Values of a row's labels, in its order → what is so."""


def written(row: MetricRow, values: Values) -> bytes:
    """The metric's lines in a scrape."""
    return generate_latest(_Just(_family(row, values)))


def pieces(row: MetricRow, values: Values) -> Iterator[bytes]:
    """`written` in pieces of some 150 lines, half a millisecond each: HELP and TYPE are in the first.

    >>> row = MetricRow("agents", MetricKind.GAUGE, ("name",), "So many.")
    >>> values = {(f"a{number}",): float(number) for number in range(400)}
    >>> found = [*pieces(row, values)]
    >>> len(found), b"".join(found) == written(row, values)
    (3, True)
    """
    told, size = [*values.items()], HISTOGRAMS_AT_ONCE if row.kind == MetricKind.HISTOGRAM else SAMPLES_AT_ONCE
    yield written(row, dict(told[:size]))
    for start in range(size, len(told), size):
        yield written(row, dict(told[start : start + size])).split(b"\n", 2)[2]


class _Just:
    """A collector of one metric: `generate_latest` takes nothing else."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> Iterable[Metric]:
        return [self._metric]


def _family(row: MetricRow, values: Values) -> Metric:
    name = row.prefix + row.name
    match row.kind:
        case MetricKind.HISTOGRAM:
            histograms = HistogramMetricFamily(name, row.sentence, labels=row.labels)
            for labels, value in values.items():
                assert isinstance(value, Histogram)
                histograms.add_metric(labels, value.cumulative(), value.total)
            return histograms
        case MetricKind.COUNTER:
            family: Metric = CounterMetricFamily(name, row.sentence, labels=row.labels)
        case MetricKind.GAUGE:
            family = GaugeMetricFamily(name, row.sentence, labels=row.labels)
    for labels, value in values.items():
        family.add_metric(labels, value)  # type: ignore[attr-defined]
    return family
