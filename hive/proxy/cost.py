"""What a request cost, as far as its answer told. Pure."""

from __future__ import annotations

from typing import NamedTuple

from hive.proxy.metering import Reading

BYTES_PER_TOKEN = 4
"""Of a prompt, where the backend has not counted (yet): OpenAI's rule of thumb."""


class Cost(NamedTuple):
    """Tokens; None is unknown, which is not 0. `estimated`: `tokens_out` are events that were relayed."""

    tokens_in: int | None = None
    tokens_out: int | None = None
    cached: int | None = None
    estimated: bool = False

    @property
    def total(self) -> int | None:
        """What is known of both together; None where nothing is."""
        if self.tokens_in is None and self.tokens_out is None:
            return None
        return (self.tokens_in or 0) + (self.tokens_out or 0)


UNKNOWN = Cost()
NOTHING = Cost(0, 0)
"""Of what never reached the backend, or was refused by it."""


def cost_of(reading: Reading | None, *, cut: bool, status: int = 200) -> Cost:
    """What the reading of an answer says; of one that was cut short, what got through. A request that the backend
    refused (`status`: its own) has cost nothing: it was not worked on.

    >>> cost_of(None, cut=False, status=400).total, cost_of(None, cut=False, status=500).total
    (0, None)
    """
    if 400 <= status < 500:
        return NOTHING
    if reading is None:
        return UNKNOWN
    usage = reading.usage
    if cut and usage.tokens_out is None and reading.events:
        return Cost(usage.tokens_in, reading.events, usage.cached_tokens, True)
    return Cost(usage.tokens_in, usage.tokens_out, usage.cached_tokens)


def expected(body_bytes: int, usual_tokens_out: float, max_tokens: int | None) -> float:
    """Tokens a request will probably cost, for the queue to reckon with until the truth is known.

    >>> expected(400, 128.0, None), expected(400, 128.0, 16)
    (228.0, 116.0)
    """
    out = usual_tokens_out if max_tokens is None else min(usual_tokens_out, max_tokens)
    return body_bytes / BYTES_PER_TOKEN + out
