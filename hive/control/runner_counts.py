"""The requests that ended, as a runner's clients count them: by model, tenant and status. Pure bookkeeping.

Counted from the usage events since this daemon started.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable

from hive.domain import UsageEvent
from hive.exposition import Histogram, MetricKind, MetricRow, Values

SECONDS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
WAITS_KEPT = 1000
SERIES_MAX = 1000
"""Models, tenants and statuses together; the next ones are counted as `other`."""
OTHER = "other"

TABLE = (
    MetricRow("requests", MetricKind.COUNTER, ("model", "tenant", "status"), "Requests that ended.", "vllm_"),
    MetricRow("cache_hit_rate", MetricKind.GAUGE, ("model",), "Share of prompt tokens out of the cache.", "vllm_"),
    MetricRow("queue_depth", MetricKind.GAUGE, (), "Requests that wait for their turn.", "vllm_"),
    MetricRow("gpu_memory_used", MetricKind.GAUGE, ("gpu",), "Bytes in use.", "vllm_"),
    MetricRow("gpu_memory_weights", MetricKind.GAUGE, ("model",), "Bytes of a loaded model's files.", "vllm_"),
    MetricRow("gpu_memory_kv_cache", MetricKind.GAUGE, ("model",), "Bytes of its cache of keys and values.", "vllm_"),
    MetricRow("kv_cache_usage", MetricKind.GAUGE, ("model",), "Share of that cache in use.", "vllm_"),
    MetricRow("inference_duration_seconds", MetricKind.HISTOGRAM, ("model",), "Whole requests.", "vllm_"),
    MetricRow("queue_wait_seconds", MetricKind.HISTOGRAM, (), "Waits for a turn.", "vllm_"),
)
"""Aliases, by the names that clients of a vLLM runner ask for; docs/metrics.md has Hive's own."""


class RunnerCounts:
    """
    >>> counts = RunnerCounts()
    >>> counts.add([UsageEvent(id="1", epoch="e", event_no=1, agent_id="a", tenant="t", model="m", backend="vllm",
    ...                        endpoint="/", tokens_in=80, cached_tokens=60, queue_ms=150.0, status=200)])
    >>> counts.waits_ms(), counts.metrics()["cache_hit_rate"], counts.metrics()["requests"]
    ((150, 150), {('m',): 0.75}, {('m', 't', 'success'): 1})
    """

    def __init__(self) -> None:
        self._requests: Counter[tuple[str, ...]] = Counter()
        self._prompt: Counter[str] = Counter()
        self._cached: Counter[str] = Counter()
        self._durations: dict[str, Histogram] = {}
        self._waits = Histogram(SECONDS)
        self._last_ms: deque[float] = deque(maxlen=WAITS_KEPT)

    def add(self, events: Iterable[UsageEvent]) -> None:
        """Rows that were really added."""
        for event in events:
            model = event.model if event.model in self._durations or len(self._durations) < SERIES_MAX else OTHER
            key = model, event.tenant, "success" if event.status < 400 and not event.cut else "error"
            if key not in self._requests and len(self._requests) >= SERIES_MAX:
                key = OTHER, OTHER, key[2]
            self._requests[key] += 1
            if event.tokens_in is not None and event.cached_tokens is not None:
                self._prompt[model] += event.tokens_in
                self._cached[model] += min(event.tokens_in, event.cached_tokens)
            self._durations.setdefault(model, Histogram(SECONDS)).observe(event.duration_ms / 1000)
            self._waits.observe(event.queue_ms / 1000)
            self._last_ms.append(event.queue_ms)

    def waits_ms(self) -> tuple[int, int] | None:
        """Mean and p95 of the last waits for a turn; None before the first."""
        if not self._last_ms:
            return None
        waits = sorted(self._last_ms)
        return round(sum(waits) / len(waits)), round(waits[min(len(waits) - 1, int(len(waits) * 0.95))])

    def metrics(self) -> dict[str, Values | None]:
        """The values of TABLE that are counted here."""
        return {
            "requests": dict(self._requests),
            "cache_hit_rate": {
                (model,): self._cached[model] / prompt for model, prompt in self._prompt.items() if prompt
            },
            "inference_duration_seconds": {(model,): found for model, found in self._durations.items()},
            "queue_wait_seconds": {(): self._waits},
        }
