"""Counts of prompt tokens by model: those that requests brought, and those a backend had kept. Pure bookkeeping."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from hive.domain import UsageEvent
from hive.exposition import Values


class PromptTokens(msgspec.Struct):
    """Of requests whose backend told what it reused. `requests`: so many; `hits`: of those, with anything reused."""

    requests: int = 0
    hits: int = 0
    tokens: int = 0
    reused: int = 0

    @property
    def hit_rate(self) -> float:
        """The share of prompt tokens that were kept.

        >>> PromptTokens(requests=2, hits=1, tokens=200, reused=50).hit_rate, PromptTokens().hit_rate
        (0.25, 0.0)
        """
        return self.reused / self.tokens if self.tokens else 0.0


class CacheCounts:
    """Since the daemon started."""

    def __init__(self) -> None:
        self.by_model: dict[str, PromptTokens] = {}
        self.flushes: dict[str, int] = {}
        """Flushes that were done, by scope."""

    def __repr__(self) -> str:
        return f"<CacheCounts of {len(self.by_model)} models>"

    def used(self, events: Iterable[UsageEvent]) -> None:
        """Requests ended. One whose backend does not tell what it reused is no miss, and is not counted."""
        for event in events:
            if event.cached_tokens is None or not event.tokens_in:
                continue
            counted = self.by_model.setdefault(event.model, PromptTokens())
            counted.requests += 1
            counted.hits += event.cached_tokens > 0
            counted.tokens += event.tokens_in
            counted.reused += min(event.cached_tokens, event.tokens_in)

    def flushed(self, kind: str) -> None:
        self.flushes[kind] = self.flushes.get(kind, 0) + 1

    def metrics(self) -> dict[str, Values | None]:
        """For Prometheus (`hive.control.metrics.TABLE`)."""
        counted = self.by_model.items()
        return {
            "cache_prompt_tokens": {(model,): one.tokens for model, one in counted},
            "cache_prompt_tokens_reused": {(model,): one.reused for model, one in counted},
            "cache_hit_rate": {(model,): one.hit_rate for model, one in counted},
            "cache_flushes": {(kind,): count for kind, count in self.flushes.items()},
        }
