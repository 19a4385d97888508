"""Counters of the servers themselves, out of the Prometheus text at `/metrics`. Pure."""

from __future__ import annotations

import re

import msgspec


class ReportedLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits that a backend tells of itself: None is what it does not tell.

    `places`: requests it works on at once; `waiting`: requests in its own queue.
    """

    places: int | None = None
    waiting: int | None = None


class PrefixCache(msgspec.Struct, frozen=True):
    """Prompt tokens since the server started: all of them, and those it had in its cache. Over all models and
    everybody who asks, so a difference of two of these is one request's only where nobody else asked between them."""

    queried: int
    hit: int


def gauge(exposition: bytes, name: str) -> int | None:
    """The sum of a gauge over its labels in a Prometheus text, None where it is not there.

    >>> gauge(b'vllm:num_requests_waiting{engine="0"} 2.0\\nvllm:num_requests_waiting{engine="1"} 1.0\\n', \
'vllm:num_requests_waiting')
    3
    """
    found = re.findall(rb"^%b(?:\{.*\})? +([0-9.e+]{1,20})" % re.escape(name.encode()), exposition, re.MULTILINE)
    try:
        return int(sum(map(float, found))) if found else None
    except (ValueError, OverflowError):
        return None


def prefix_counters(exposition: bytes, queried: str, hit: str) -> PrefixCache | None:
    """None where a counter is missing.

    >>> prefix_counters(b'q_total{engine="0"} 700.0\\nh_total{engine="0"} 640.0\\n', "q_total", "h_total")
    PrefixCache(queried=700, hit=640)
    """
    counts = gauge(exposition, queried), gauge(exposition, hit)
    return None if counts[0] is None or counts[1] is None else PrefixCache(counts[0], counts[1])
