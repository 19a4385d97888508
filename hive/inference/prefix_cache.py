"""What a server's own counters say of its prefix cache. Pure: the text of `/metrics` comes in."""

from __future__ import annotations

import msgspec

from hive.inference.concurrency import gauge


class PrefixCache(msgspec.Struct, frozen=True):
    """Prompt tokens since the server started: all of them, and those it had in its cache. Over all models and
    everybody who asks, so a difference of two of these is one request's only where nobody else asked between them."""

    queried: int
    hit: int


def vllm(exposition: bytes) -> PrefixCache | None:
    """None where a counter is missing: vLLM without prefix caching has none.

    >>> vllm(b'vllm:prefix_cache_queries_total{engine="0"} 700.0\\nvllm:prefix_cache_hits_total{engine="0"} 640.0\\n')
    PrefixCache(queried=700, hit=640)
    """
    return _counted(exposition, "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total")


def llama(exposition: bytes) -> PrefixCache | None:
    """llama-server counts the tokens it had in its cache apart from those it read; None where a counter is missing.

    >>> llama(b"llamacpp:prompt_tokens_total 12\\nllamacpp:prompt_tokens_cached_total 31\\n")
    PrefixCache(queried=43, hit=31)
    """
    counted = _counted(exposition, "llamacpp:prompt_tokens_total", "llamacpp:prompt_tokens_cached_total")
    return None if counted is None else PrefixCache(counted.queried + counted.hit, counted.hit)


def _counted(exposition: bytes, queried: str, hit: str) -> PrefixCache | None:
    counts = gauge(exposition, queried), gauge(exposition, hit)
    return None if counts[0] is None or counts[1] is None else PrefixCache(counts[0], counts[1])
