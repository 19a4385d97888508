"""The cost of a request, as far as its answer tells it. Pure."""

from __future__ import annotations

import msgspec

from hive.domain import UsageUnit
from hive.metering.metering import AnswerReading

BYTES_PER_TOKEN = 4
"""Bytes of a prompt per token, if the backend has not counted (yet): OpenAI's rule of thumb."""


class RequestCost(msgspec.Struct, frozen=True):
    """The cost of a request; None is unknown, which is not 0. `estimated`: `tokens_out` are events that were relayed,
    or `amount` is by what got through. Of a `unit` that is not tokens, `amount` of it, and `work` as `UsageEvent`."""

    tokens_in: int | None = None
    tokens_out: int | None = None
    cached: int | None = None
    estimated: bool = False
    unit: UsageUnit = UsageUnit.TOKENS
    amount: float | None = None
    work: float | None = None

    @property
    def total(self) -> int | None:
        """The sum of the tokens, as far as they are known; None if nothing is known."""
        if self.tokens_in is None and self.tokens_out is None:
            return None
        return (self.tokens_in or 0) + (self.tokens_out or 0)


UNKNOWN = RequestCost()
NOTHING = RequestCost(0, 0)
"""The cost of a request that never reached the backend, or was refused by it."""


def cost_of(reading: AnswerReading | None, *, cut: bool, status: int = 200) -> RequestCost:
    """The cost by the reading of an answer; of one that was cut, by what got through. A request that the backend
    refused (`status`: the backend's) has cost nothing: it was not worked on.

    >>> cost_of(None, cut=False, status=400).total, cost_of(None, cut=False, status=500).total
    (0, None)
    """
    if 400 <= status < 500:
        return NOTHING
    if reading is None:
        return UNKNOWN
    usage = reading.usage
    if cut and usage.tokens_out is None and reading.events:
        return RequestCost(usage.tokens_in, reading.events, usage.cached_tokens, True)
    return RequestCost(usage.tokens_in, usage.tokens_out, usage.cached_tokens)


def expected(body_bytes: int, usual_tokens_out: float, max_tokens: int | None) -> float:
    """Tokens a request will probably cost, for the queue to reckon with until the truth is known.

    >>> expected(400, 128.0, None), expected(400, 128.0, 16)
    (228.0, 116.0)
    """
    out = usual_tokens_out if max_tokens is None else min(usual_tokens_out, max_tokens)
    return body_bytes / BYTES_PER_TOKEN + out
