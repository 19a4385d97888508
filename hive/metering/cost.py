"""The cost of a request, as far as its answer tells it. Pure."""

from __future__ import annotations

import msgspec

from hive.dialects.foreign_errors import NO_ROOM
from hive.domain import UsageEvent, UsageUnit
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

    def put_into(self, event: UsageEvent) -> None:
        """Writes it into the event of its request."""
        event.tokens_in = self.tokens_in
        event.tokens_out = self.tokens_out
        event.cached_tokens = self.cached
        event.estimated = self.estimated
        event.unit = self.unit
        event.amount = self.amount
        event.work = self.work


UNKNOWN = RequestCost()
NOTHING = RequestCost(0, 0)
"""The cost of a request that never reached the backend, or was refused by it."""


def cost_of(reading: AnswerReading | None, *, cut: bool, status: int = 200) -> RequestCost:
    """The cost by the reading of an answer; of one that was cut, by what got through. A request that the backend
    refused (`status`: the backend's) has cost nothing: it was not worked on.

    >>> [cost_of(None, cut=False, status=status).total for status in (400, 429, 503, 500)]
    [0, 0, 0, None]
    """
    if is_refusal(status):
        return NOTHING
    if reading is None:
        return UNKNOWN
    usage, gave_up = reading.usage, reading.gave_up
    if gave_up is not None and gave_up.status in NO_ROOM and usage.tokens_out is None and reading.events <= 1:
        return NOTHING  # the one event is that error
    if cut and usage.tokens_out is None and reading.events:
        return RequestCost(usage.tokens_in, reading.events, usage.cached_tokens, True)
    return RequestCost(usage.tokens_in, usage.tokens_out, usage.cached_tokens)


def is_refusal(status: int) -> bool:
    """Whether a server that answers with this status has taken no work on: 503 and 529 say that it has no room, or that
    it is not ready; other statuses from 500 on may come after work.

    >>> [is_refusal(status) for status in (200, 400, 429, 500, 502, 503)]
    [False, True, True, False, False, True]
    """
    return 400 <= status < 500 or status in NO_ROOM


def expected(body_bytes: int, usual_tokens_out: float, max_tokens: int | None) -> float:
    """Tokens a request will probably cost, for the queue to reckon with until the truth is known.

    >>> expected(400, 128.0, None), expected(400, 128.0, 16)
    (228.0, 116.0)
    """
    out = usual_tokens_out if max_tokens is None else min(usual_tokens_out, max_tokens)
    return body_bytes / BYTES_PER_TOKEN + out
