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


class Drafts(msgspec.Struct, frozen=True):
    """Tokens since the server started: drafted, and of those accepted by the model."""

    drafted: int
    accepted: int


class Heard(msgspec.Struct, frozen=True):
    """Seconds since a runner started: of sound that it heard, of work on that; `load_s`: of the load of its model."""

    audio_s: float
    work_s: float
    load_s: float


def heard_counters(exposition: bytes) -> Heard | None:
    """The counters of a runner of Whisper; None where one is missing.

    >>> names = ("load_seconds 1.5", "audio_seconds_total 60", "work_seconds_total 3")
    >>> told = [f"hive_runner_{name}".encode() for name in names]
    >>> heard_counters(b"\\n".join(told)), heard_counters(told[0])
    (Heard(audio_s=60.0, work_s=3.0, load_s=1.5), None)
    """
    names = ("audio_seconds_total", "work_seconds_total", "load_seconds")
    found = [_values(exposition, f"hive_runner_{name}") for name in names]
    return Heard(*(values[0] for values in found)) if all(found) else None


def gauge(exposition: bytes, name: str) -> int | None:
    """The sum of a gauge over its labels in a Prometheus text, None where it is not there.

    >>> gauge(b'vllm:num_requests_waiting{engine="0"} 2.0\\nvllm:num_requests_waiting{engine="1"} 1.0\\n', \
'vllm:num_requests_waiting')
    3
    """
    found = _values(exposition, name)
    try:
        return int(sum(found)) if found else None
    except (OverflowError, ValueError):
        return None


def share(exposition: bytes, name: str) -> float | None:
    """A gauge from 0 to 1, the mean over its labels; None where it is not there or is something else.

    >>> share(b'vllm:kv_cache_usage_perc{engine="0"} 0.5\\nvllm:kv_cache_usage_perc{engine="1"} 2.5e-01\\n', \
'vllm:kv_cache_usage_perc')
    0.375
    >>> share(b'x 45\\n', 'x'), share(b'x NaN\\n', 'x'), share(b'', 'x')
    (None, None, None)
    """
    found = _values(exposition, name)
    mean = sum(found) / len(found) if found else None
    return mean if mean is not None and 0 <= mean <= 1 else None


def _values(exposition: bytes, name: str) -> list[float]:
    found = re.findall(rb"^%b(?:\{.*\})? +([0-9.e+-]{1,30})" % re.escape(name.encode()), exposition, re.MULTILINE)
    try:
        return [float(value) for value in found]
    except ValueError:
        return []


def draft_counters(exposition: bytes, server: str) -> Drafts | None:
    """The counters of speculation, which vLLM and llama-server name alike; None where one is missing: it does not
    speculate, or cannot say so.

    >>> told = b"x:spec_decode_num_draft_tokens_total 50\\nx:spec_decode_num_accepted_tokens_total 20\\n"
    >>> draft_counters(told, "x"), draft_counters(told, "y")
    (Drafts(drafted=50, accepted=20), None)
    """
    counts = [gauge(exposition, f"{server}:spec_decode_num_{what}_tokens_total") for what in ("draft", "accepted")]
    return None if counts[0] is None or counts[1] is None else Drafts(counts[0], counts[1])


def prefix_counters(exposition: bytes, queried: str, hit: str) -> PrefixCache | None:
    """None where a counter is missing.

    >>> prefix_counters(b'q_total{engine="0"} 700.0\\nh_total{engine="0"} 640.0\\n', "q_total", "h_total")
    PrefixCache(queried=700, hit=640)
    """
    counts = gauge(exposition, queried), gauge(exposition, hit)
    return None if counts[0] is None or counts[1] is None else PrefixCache(counts[0], counts[1])
