"""The end of a job: its state, the reason for programs, and a sentence for people. Pure."""

from __future__ import annotations

import msgspec

from hive.domain import JobState
from hive.jobs.toolloop import LoopFailure


class JobEnding(msgspec.Struct, frozen=True, kw_only=True):
    """`answer`: the last one, or the part of it that came. `is_incomplete`: a bound of the order has ended it."""

    state: JobState
    reason: str = ""
    detail: str = ""
    answer: str = ""
    is_incomplete: bool = False


LENGTH = "length"
"""Reason of a job whose last answer ended where its tokens did."""
BOUNDS = frozenset({LENGTH, LoopFailure.TOOL_ITERATIONS_EXHAUSTED.value})
"""Reasons of an end by a bound of the order: OpenAI's `incomplete`."""


def failed(reason: str, detail: str, answer: str = "") -> JobEnding:
    return JobEnding(state=JobState.FAILED, reason=reason, detail=detail, answer=answer, is_incomplete=reason in BOUNDS)


def completed(answer: str, finish_reason: str | None = None) -> JobEnding:
    """
    >>> completed("Hi", "stop").reason, completed("Hi", "length").reason
    ('', 'length')
    """
    if finish_reason != LENGTH:
        return JobEnding(state=JobState.DONE, answer=answer)
    detail = "the last answer ended where its tokens did"
    return JobEnding(state=JobState.DONE, reason=LENGTH, detail=detail, answer=answer, is_incomplete=True)
