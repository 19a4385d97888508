"""One named check: what it looks at, and what it found.

In every module of this room a check comes in two halves: one looks (`async` or blocking, it may take its time) and
one judges, which is pure: facts in, `CheckVerdict` out. What is told of something wrong is in hive.conditions.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from enum import StrEnum
from typing import Any, NamedTuple

from hive.conditions import FoundCondition, Severity, condition
from hive.doctor.checks.target import Subject


class Status(StrEnum):
    """`skip`: it does not apply here, or this user may not look."""

    PASS = "pass"
    WARN = "warn"
    FAIL = "fail"
    SKIP = "skip"


STOPPED = "this Hive does not run; see hive.answers"
"""Reason to skip what only fails because of that."""


class CheckVerdict(NamedTuple):
    """`reason`: one sentence, also where all is well. `fix`: the command that would change it, empty for none; that of
    a `skip` is a template over `Where.named`.

    `found`: what is wrong, None where nothing is that could be seen. `is_unseen`: of a `skip`, this user may not look.
    """

    status: Status
    reason: str
    fix: str = ""
    found: FoundCondition | None = None
    is_unseen: bool = False


def passed(reason: str) -> CheckVerdict:
    return CheckVerdict(Status.PASS, reason)


def wrong(code: str, /, *, up: bool = False, **facts: Any) -> CheckVerdict:
    """Fails or warns, by the severity of the condition with this code (hive.conditions.condition).

    >>> wrong("redis_open").status.value, wrong("disk_low", path="/s", free_bytes=2 << 30).reason
    ('fail', 'the disk of /s has 2.0 GiB left')
    """
    return told(condition(code, up=up, **facts))


def told(found: FoundCondition) -> CheckVerdict:
    """Fails or warns, by the severity of what was found."""
    status = Status.FAIL if found.severity is Severity.ERROR else Status.WARN
    return CheckVerdict(status, found.text, found.fix, found)


def skipped(reason: str, fix: str = "") -> CheckVerdict:
    return CheckVerdict(Status.SKIP, reason, fix)


def unseen(reason: str, check: str, *, group: str = "") -> CheckVerdict:
    """Skips what only root may look at, or a member of `group`. `check`: what root types behind `hive doctor`.

    >>> unseen("this user may not open /dev/kvm", "sandbox.kvm", group="kvm")[1:3]
    ('this user may not open /dev/kvm; needs root or the group kvm', '{sudo}hive doctor sandbox.kvm')
    """
    who = f"root or the group {group}" if group else "root"
    return CheckVerdict(Status.SKIP, f"{reason}; needs {who}", f"{{sudo}}hive doctor {check}".rstrip(), is_unseen=True)


class Check(NamedTuple):
    """`look` may block (it runs in a thread of its own) or be a coroutine function; it may raise HiveError and OSError.

    `repair`: what `--fix` does where the verdict is warn or fail; it blocks, says what it did, raises HiveError.
    `by_default`: False for one that takes longer and runs only where it is named.
    """

    name: str
    sentence: str
    look: Callable[[Subject], CheckVerdict] | Callable[[Subject], Awaitable[CheckVerdict]]
    repair: Callable[[Subject], str] | None = None
    by_default: bool = True

    @property
    def group(self) -> str:
        """
        >>> Check("redis.acl", "", lambda subject: passed("")).group
        'redis'
        """
        return self.name.partition(".")[0]
