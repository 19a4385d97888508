"""Times of schedules: WHEN as a person writes it, the next time after a given one, and the host's time zone.

Times are Unix seconds. All but `local_zone` is pure: zone and `now` are arguments.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable
from datetime import UTC, date, datetime, time, timedelta, tzinfo
from pathlib import Path

import msgspec

from hive.errors import BadRequest
from hive.store.schedules import StoredSchedule

DAY_S = 86400.0
EVERY_MIN_S = 10.0
FURTHEST_S = 10 * 365 * DAY_S
SET_BACK_S = 60.0
"""A last time this far ahead of now means that somebody set the clock back; smaller steps are NTP's."""
CHECK_S = 30.0
"""The wall clock is looked at no later than this, whatever it was set to meanwhile."""
NEAR_S = 1.0
LATE_S = 35.0
"""Beyond what the scheduler itself may be late by: Hive was down, or the clock was set forward."""

_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": DAY_S}
_LENGTH = re.compile(r"(?:[0-9]{1,6}[smhd])+")
_CLOCK = re.compile(r"([0-9]{1,2}):([0-9]{2})(?::([0-9]{2}))?")
_HOW = "like 07:30, 2026-11-21T07:30 or +10m"


class When(msgspec.Struct, frozen=True):
    """The first time of a schedule; `clock`: the time of day it was given by, else empty."""

    at: float
    clock: str = ""


def seconds_of(text: str, *, field: str) -> float:
    """Seconds of a length of time as a person writes it. Raises BadRequest that names `field`.

    >>> seconds_of("90s", field="for"), seconds_of("1h30m", field="for")
    (90.0, 5400.0)
    """
    if not _LENGTH.fullmatch(text):
        raise BadRequest(f"{field}: expected numbers with s, m, h or d, like 10m or 1h30m; found {text[:20]!r}")
    return sum(int(piece[:-1]) * _UNITS_S[piece[-1]] for piece in re.findall("[0-9]+[smhd]", text))


def parse_when(text: str, *, now: float, zone: tzinfo) -> When:
    """`07:30` (the next one), `2026-11-21T07:30` (in `zone`, unless it names an offset), or `+10m`.

    Raises BadRequest, also for what is past or further away than ten years.

    >>> parse_when("00:00:30", now=10.0, zone=UTC), parse_when("00:00:05", now=10.0, zone=UTC).at
    (When(at=30.0, clock='00:00:30'), 86405.0)
    >>> parse_when("+10m", now=10.0, zone=UTC)
    When(at=610.0, clock='')
    """
    if text.startswith("+"):
        found = When(now + seconds_of(text[1:], field="when"))
    elif (spoken := _CLOCK.fullmatch(text)) is not None:
        clock = _time_of_day(text, *(int(part or 0) for part in spoken.groups()))
        today = datetime.fromtimestamp(now, zone).date()
        at = _at(today, clock, zone)
        found = When(at if at > now else _at(today + timedelta(days=1), clock, zone), clock.isoformat())
    else:
        found = _moment(text, zone)
    if found.at <= now:
        raise BadRequest(f"when: {text} is past", hint=f"expected a time to come, {_HOW}")
    if found.at > now + FURTHEST_S:
        raise BadRequest(f"when: {text[:40]} is more than ten years away")
    return found


def check_every(every_s: float) -> None:
    """Raises BadRequest unless it is from EVERY_MIN_S to ten years."""
    if not EVERY_MIN_S <= every_s <= FURTHEST_S:
        raise BadRequest(f"every: {every_s:.0f} is not from {EVERY_MIN_S:g} seconds to ten years")


def by_days(every_s: float | None) -> bool:
    """Whether a repetition counts whole days, and keeps its time of day over changes of summer time."""
    return every_s is not None and every_s % DAY_S == 0


def next_after(schedule: StoredSchedule, now: float, zone: tzinfo) -> float:
    """The first of a repeated schedule's times after `now`; `schedule.at` is one of them.

    A time of day that the change to summer time skips is the one an hour later; one that happens twice is the first.

    >>> hourly = StoredSchedule(id=1, agent_id="a", at=100.0, every_s=3600.0, actor="uid:0", created_at=0.0)
    >>> next_after(hourly, 100.0, UTC), next_after(hourly, 9000.0, UTC)
    (3700.0, 10900.0)
    """
    assert schedule.every_s is not None
    if not schedule.clock:
        at = schedule.at + (math.floor((now - schedule.at) / schedule.every_s) + 1) * schedule.every_s
        return at if at > now else at + schedule.every_s  # a sum of floats may end up a hair short
    clock, days = time.fromisoformat(schedule.clock), round(schedule.every_s / DAY_S)
    first, today = datetime.fromtimestamp(schedule.at, zone).date(), datetime.fromtimestamp(now, zone).date()
    turn = (today - first).days // days
    while (at := _at(first + timedelta(days=turn * days), clock, zone)) <= now:
        turn += 1
    return at


def is_due(schedule: StoredSchedule, now: float) -> bool:
    return schedule.at <= now


def wait_s(times: Iterable[float], now: float) -> float:
    """Seconds until the schedules are looked at again: at the first of `times`, or CHECK_S from now at the latest.

    In two steps: a second before, and then in time. A long wait is not exact: the wall clock may be slewed meanwhile,
    and the kernel adds up to a tenth of a second to one of 30 s (select_estimate_accuracy, for a process that is nice).

    >>> wait_s([100.0, 10.25], 0.0), wait_s([10.25], 9.25), wait_s([], 0.0), wait_s([1.0], 2.0)
    (9.25, 1.0, 29.0, 0.0)
    """
    left_s = max(0.0, min(times, default=now + CHECK_S) - now)
    return min(CHECK_S, left_s - NEAR_S if left_s > NEAR_S else left_s)


def put_right(schedule: StoredSchedule, now: float, zone: tzinfo) -> StoredSchedule:
    """A repeated schedule goes on from now if its last time lies ahead, because the clock was set back."""
    if schedule.every_s is None or schedule.last_at is None or schedule.last_at <= now + SET_BACK_S:
        return schedule
    return msgspec.structs.replace(schedule, at=next_after(schedule, now, zone), last_at=None)


def how_late(schedule: StoredSchedule, now: float) -> str:
    """Words for the outcome of a schedule that is acted on at `now`; empty where that is in time.

    >>> how_late(StoredSchedule(id=1, agent_id="a", at=0.0, actor="uid:0", created_at=0.0), 7200.0)
    ' (7200 s late)'
    """
    late_s = now - schedule.at
    return f" ({late_s:.0f} s late)" if late_s > LATE_S else ""


def spoken(at: float, zone: tzinfo) -> str:
    """A time for people, with its zone.

    >>> spoken(0.0, UTC)
    '1970-01-01 00:00:00 UTC'
    """
    return datetime.fromtimestamp(at, zone).strftime("%Y-%m-%d %H:%M:%S %Z")


def local_zone() -> tzinfo:
    """The host's zone: TZ, else /etc/localtime, else UTC. Read anew each time: it may be changed under way."""
    from zoneinfo import ZoneInfo  # as in hive/budgets.py

    name = os.environ.get("TZ", "").removeprefix(":")
    try:
        if name and not name.startswith("/"):
            return ZoneInfo(name)
        with Path(name or "/etc/localtime").open("rb") as file:
            return ZoneInfo.from_file(file)
    except (OSError, ValueError, KeyError):  # an unknown name is a KeyError (ZoneInfoNotFoundError)
        return UTC


def _moment(text: str, zone: tzinfo) -> When:
    try:
        given = datetime.fromisoformat(text)
    except ValueError:
        raise BadRequest(f"when: {text[:40]!r} is no time", hint=f"expected {_HOW}") from None
    if "T" not in text.upper() and " " not in text:
        raise BadRequest(f"when: {text[:40]!r} has no time of day", hint=f"expected {_HOW}")
    try:
        if given.tzinfo is not None:
            return When(given.timestamp())
        return When(given.replace(tzinfo=zone).timestamp(), given.time().replace(microsecond=0).isoformat())
    except (OverflowError, ValueError, OSError):
        raise BadRequest(f"when: {text[:40]!r} is out of range") from None


def _time_of_day(text: str, hour: int, minute: int, second: int) -> time:
    try:
        return time(hour, minute, second)
    except ValueError:
        raise BadRequest(f"when: {text} is no time of day", hint=f"expected {_HOW}") from None


def _at(day: date, clock: time, zone: tzinfo) -> float:
    return datetime.combine(day, clock, zone).timestamp()
