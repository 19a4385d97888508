"""Prometheus's text format (version 0.0.4): a metric is one row of a table, its values are handed in at each scrape.

Written here, as prometheus-client brings HTTP servers and clients along: 2.5 MB of the proxy and of the daemon each,
and 11 ms of their start. It reads in the tests what is written here.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from enum import StrEnum
from itertools import accumulate
from math import isfinite
from typing import NamedTuple

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
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
    r"""The metric's lines in a scrape.

    >>> row = MetricRow("waits", MetricKind.GAUGE, ("of", "name"), "So long.")
    >>> print(written(row, {("a\\b", 'say "hi"'): 2}).decode(), end="")
    # HELP hive_waits So long.
    # TYPE hive_waits gauge
    hive_waits{name="say \"hi\"",of="a\\b"} 2.0
    """
    name = row.full_name
    sentence = row.sentence.replace("\\", r"\\").replace("\n", r"\n")
    lines = [f"# HELP {name} {sentence}", f"# TYPE {name} {row.kind}"]
    for values_of, value in values.items():
        labels = [f'{label}="{_escaped(text)}"' for label, text in zip(row.labels, values_of, strict=True)]
        if isinstance(value, Histogram):
            buckets = value.cumulative()
            lines += [_line(f"{name}_bucket", [*labels, f'le="{bound}"'], count) for bound, count in buckets]
            lines += [_line(f"{name}_count", labels, buckets[-1][1]), _line(f"{name}_sum", labels, value.total)]
        else:
            lines.append(_line(name, labels, value))
    return "\n".join([*lines, ""]).encode()


def _line(name: str, labels: list[str], value: float) -> str:
    shown = f"{{{','.join(sorted(labels))}}}" if labels else ""
    return f"{name}{shown} {_number(float(value))}"


def _number(value: float) -> str:
    """
    >>> [_number(value) for value in (1.0, 1e300, float("inf"), -float("inf"), float("nan"))]
    ['1.0', '1e+300', '+Inf', '-Inf', 'NaN']
    """
    return repr(value) if isfinite(value) else {"inf": "+Inf", "-inf": "-Inf"}.get(repr(value), "NaN")


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


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
