"""One named check: what it looks at, and what it found.

In every module of this room a check comes in two halves: one looks (`async` or blocking, it may take its time) and
one judges, which is pure: facts in, `Verdict` out.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from enum import StrEnum
from typing import NamedTuple

from hive.appliance.checks.subject import Subject


class Status(StrEnum):
    """`skip`: it does not apply here, or this user may not look."""

    PASS = "pass"
    WARN = "warn"
    FAIL = "fail"
    SKIP = "skip"


class Verdict(NamedTuple):
    """`reason`: one sentence, also where all is well. `fix`: the command that would change it, empty for none."""

    status: Status
    reason: str
    fix: str = ""


def passed(reason: str) -> Verdict:
    return Verdict(Status.PASS, reason)


def warned(reason: str, fix: str = "") -> Verdict:
    return Verdict(Status.WARN, reason, fix)


def failed(reason: str, fix: str = "") -> Verdict:
    return Verdict(Status.FAIL, reason, fix)


def skipped(reason: str, fix: str = "") -> Verdict:
    return Verdict(Status.SKIP, reason, fix)


class Check(NamedTuple):
    """`look` may block (it runs in a thread of its own) or be a coroutine function; it may raise HiveError and OSError.

    `repair`: what `--fix` does where the verdict is warn or fail; it blocks, says what it did, raises HiveError.
    `by_default`: False for one that takes longer and runs only where it is named.
    """

    name: str
    sentence: str
    look: Callable[[Subject], Verdict] | Callable[[Subject], Awaitable[Verdict]]
    repair: Callable[[Subject], str] | None = None
    by_default: bool = True

    @property
    def group(self) -> str:
        """
        >>> Check("redis.acl", "", lambda subject: passed("")).group
        'redis'
        """
        return self.name.partition(".")[0]
