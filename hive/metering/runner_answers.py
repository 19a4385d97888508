"""The cost of an answer of one of Hive's own runners, and whether it was whole. Pure.

A runner tells the cost in the head of its answer, before the first event of a stream, as `audio_s=6.020` or
`images=2; pixel_steps=1048576`. What a request that was cut has cost is estimated here by the share that got through.
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from hive.dialects.errors import GaveUp
from hive.dialects.sse import SseReader
from hive.domain import RequestUsage, UsageUnit
from hive.errors import BackendDown
from hive.metering.cost import RequestCost
from hive.metering.metering import UNKNOWN, AnswerReading, WholeReading, gave_up_in

COST_FIELD = b"x-hive-cost"
"""The name of the header; it never reaches a client."""
_PART = re.compile(rb"(audio_s|images|pixel_steps)=([0-9]{1,16}(?:\.[0-9]{1,9})?)")
_ENDS = (b'"transcript.text.done"', b'"image_generation.completed"')
"""Types of the events that end a part of an answer; inside a JSON string their quotes would be escaped."""


class ToldWork(NamedTuple):
    """Work in the unit of usage, and of images besides in the pixels of all their steps."""

    unit: UsageUnit
    amount: float
    work: float | None = None


def in_line(work: ToldWork | RequestCost) -> float | None:
    """The work by which the server's rate is learnt and its line is charged, in its unit; None where nothing is known.

    >>> in_line(ToldWork(UsageUnit.IMAGES, 2.0, 1048576.0)), in_line(ToldWork(UsageUnit.AUDIO_S, 6.02))
    (1048576.0, 6.02)
    """
    return work.work if work.unit is UsageUnit.IMAGES else work.amount


def told_work(value: bytes) -> ToldWork | None:
    """The work that the header tells; None where it cannot be read.

    >>> told_work(b"audio_s=6.020")
    ToldWork(unit=<UsageUnit.AUDIO_S: 'audio_s'>, amount=6.02, work=None)
    >>> told_work(b"images=2; pixel_steps=1048576").work, told_work(b"images=x"), told_work(b"audio_s=1e9")
    (1048576.0, None, None)
    """
    told: dict[bytes, float] = {}
    for part in value.split(b";"):
        found = _PART.fullmatch(part.strip(b" \t"))
        if found is None:
            return None
        told[found[1]] = float(found[2])
    if b"audio_s" in told:
        return ToldWork(UsageUnit.AUDIO_S, told[b"audio_s"])
    if b"images" in told:
        return ToldWork(UsageUnit.IMAGES, told[b"images"], told.get(b"pixel_steps"))
    return None


def through(whole: ToldWork, *, at_server_s: float, per_s: float | None) -> ToldWork:
    """The part of the work that a request that was cut had done, by the time it was at a server that does `per_s` of it
    in a second; the whole where that is not known.

    >>> whole = ToldWork(UsageUnit.IMAGES, 4.0, 4e6)
    >>> through(whole, at_server_s=1.0, per_s=1e6)
    ToldWork(unit=<UsageUnit.IMAGES: 'images'>, amount=1.0, work=1000000.0)
    >>> through(whole, at_server_s=9.0, per_s=1e6) == through(whole, at_server_s=1.0, per_s=None) == whole
    True
    """
    all_of_it = in_line(whole)
    if per_s is None or not all_of_it:
        return whole
    share = min(1.0, max(0.0, at_server_s * per_s / all_of_it))
    amount = whole.amount * share
    if whole.unit is UsageUnit.IMAGES:  # one that was begun is one: it was worked on
        amount = float(math.ceil(amount))
    return ToldWork(whole.unit, amount, None if whole.work is None else whole.work * share)


def cost_of_work(done: ToldWork, *, estimated: bool = False) -> RequestCost:
    return RequestCost(None, None, None, estimated, done.unit, done.amount, done.work)


class RunnerEvents:
    """A stream of a runner; its end is the event that ends its last part, with nothing behind it but `[DONE]`."""

    __slots__ = ("_reader", "events", "gave_up", "usage", "whole")

    def __init__(self) -> None:
        self._reader = SseReader()
        self.gave_up: GaveUp | None = None
        self.usage: RequestUsage = UNKNOWN
        self.events = 0
        self.whole = False

    @property
    def begun(self) -> bool:
        return self.events > 0 or self._reader.begun

    @property
    def at_boundary(self) -> bool:
        return self._reader.at_boundary

    def feed(self, data: bytes) -> None:
        self._take(self._reader.feed(data))

    def end(self) -> None:
        self._take(self._reader.end())

    def _take(self, payloads: list[bytes]) -> None:
        for payload in payloads:
            if payload == b"[DONE]":
                continue
            self.events += 1
            if payload.find(b'"error"') >= 0:
                self.gave_up = self.gave_up or gave_up_in(payload)
            is_end = payload[-1:] == b"}" and any(payload.find(end) >= 0 for end in _ENDS)
            self.whole = is_end and self.gave_up is None


def reading_of_runner(*, status: int, stream: bool, content_type: bytes) -> AnswerReading:
    """Chooses the reading for an answer of a runner, as `reading_for`. What comes in one piece is text or JSON: its
    framing alone tells that it is whole. Raises BackendDown as that does."""
    if status >= 400:
        return WholeReading()
    if status != 200:
        raise BackendDown(f"the backend answered {status}, which is no answer to this")
    if not stream:
        return WholeReading()
    kind = content_type.partition(b";")[0].strip().lower()
    if kind != b"text/event-stream":
        raise BackendDown(f"the backend answered with {kind.decode('latin-1')[:60]}, which is no stream")
    return RunnerEvents()
