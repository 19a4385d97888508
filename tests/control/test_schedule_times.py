"""Times of schedules: what a person wrote, and the next time after another. Tables; no clock, no sleep."""

from __future__ import annotations

import time as clock_of_the_host
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hive.control import schedule_times
from hive.control.scheduler import fired
from hive.errors import BadRequest
from hive.store.schedules import StoredSchedule

try:
    BERLIN: tzinfo | None = ZoneInfo("Europe/Berlin")
except ZoneInfoNotFoundError:
    BERLIN = None
needs_zones = pytest.mark.skipif(BERLIN is None, reason="this host has no time zones (tzdata)")

CET, CEST = timezone(timedelta(hours=1)), timezone(timedelta(hours=2))
NOON = datetime(2026, 11, 20, 12, 0, tzinfo=UTC).timestamp()


def schedule(at: float, **fields: object) -> StoredSchedule:
    base = StoredSchedule(id=1, agent_id="a", at=at, actor="uid:0", created_at=0.0)
    return msgspec.structs.replace(base, **fields)


def local(*moment: int, offset: tzinfo) -> float:
    return datetime(*moment, tzinfo=offset).timestamp()  # type: ignore[arg-type,misc]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("12:30", datetime(2026, 11, 20, 12, 30, tzinfo=UTC)),
        ("12:00", datetime(2026, 11, 21, 12, 0, tzinfo=UTC)),
        ("7:05", datetime(2026, 11, 21, 7, 5, tzinfo=UTC)),
        ("23:59:59", datetime(2026, 11, 20, 23, 59, 59, tzinfo=UTC)),
        ("+10m", datetime(2026, 11, 20, 12, 10, tzinfo=UTC)),
        ("+1h30m", datetime(2026, 11, 20, 13, 30, tzinfo=UTC)),
        ("2026-11-21T07:30", datetime(2026, 11, 21, 7, 30, tzinfo=UTC)),
        ("2026-11-21 07:30", datetime(2026, 11, 21, 7, 30, tzinfo=UTC)),
        ("2026-11-21T07:30+01:00", datetime(2026, 11, 21, 6, 30, tzinfo=UTC)),
        ("2026-11-21T07:30Z", datetime(2026, 11, 21, 7, 30, tzinfo=UTC)),
    ],
)
def test_a_time_as_a_person_writes_it(text: str, found: datetime) -> None:
    assert schedule_times.parse_when(text, now=NOON, zone=UTC).at == found.timestamp()


@pytest.mark.parametrize(
    ("text", "clock_time"),
    [("07:30", "07:30:00"), ("2026-11-21T07:30", "07:30:00"), ("2026-11-21T07:30Z", ""), ("+10m", "")],
)
def test_only_a_time_in_the_hosts_zone_has_a_time_of_day_to_keep(text: str, clock_time: str) -> None:
    assert schedule_times.parse_when(text, now=NOON, zone=UTC).clock == clock_time


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is no time"),
        ("soon", "is no time"),
        ("24:00", "no time of day"),
        ("12:60", "no time of day"),
        ("2026-11-21", "has no time of day"),
        ("2026-13-01T00:00", "is no time"),
        ("2026-11-20T11:59", "is past"),
        ("+0s", "is past"),
        ("+", "expected numbers with s, m, h or d"),
        ("+10", "expected numbers with s, m, h or d"),
        ("+4000d", "more than ten years away"),
        ("9999-12-31T23:59", "more than ten years away"),
        ("0001-01-01T00:00", "past|out of range"),
    ],
)
def test_a_time_that_makes_no_sense_is_refused(text: str, said: str) -> None:
    with pytest.raises(BadRequest, match=said):
        schedule_times.parse_when(text, now=NOON, zone=UTC)


@pytest.mark.parametrize("every_s", [0.0, 9.0, -5.0, 1e12])
def test_what_repeats_too_often_or_never_is_refused(every_s: float) -> None:
    with pytest.raises(BadRequest, match="every: "):
        schedule_times.check_every(every_s)
    schedule_times.check_every(10.0)


# Repetitions ----------------------------------------------------------------------------------------------------------


@needs_zones
def test_every_day_keeps_its_time_of_day_when_summer_time_begins_and_ends() -> None:
    assert BERLIN is not None
    for before, after in (
        (local(2026, 3, 28, 7, 30, offset=CET), local(2026, 3, 29, 7, 30, offset=CEST)),
        (local(2026, 10, 24, 7, 30, offset=CEST), local(2026, 10, 25, 7, 30, offset=CET)),
    ):
        daily = schedule(before, every_s=schedule_times.DAY_S, clock="07:30:00")
        assert schedule_times.next_after(daily, before, BERLIN) == after
        assert after - before != schedule_times.DAY_S
        hourly = schedule(before, every_s=schedule_times.DAY_S)
        assert schedule_times.next_after(hourly, before, BERLIN) == before + schedule_times.DAY_S, (
            "without a time of day it is 24 hours"
        )


@needs_zones
def test_a_time_of_day_that_is_skipped_is_an_hour_later_and_one_that_happens_twice_is_once() -> None:
    assert BERLIN is not None
    daily = schedule(local(2026, 3, 28, 2, 30, offset=CET), every_s=schedule_times.DAY_S, clock="02:30:00")
    skipped = schedule_times.next_after(daily, daily.at, BERLIN)
    assert skipped == local(2026, 3, 29, 3, 30, offset=CEST)
    assert schedule_times.next_after(daily, skipped, BERLIN) == local(2026, 3, 30, 2, 30, offset=CEST)
    daily = schedule(local(2026, 10, 24, 2, 30, offset=CEST), every_s=schedule_times.DAY_S, clock="02:30:00")
    first = schedule_times.next_after(daily, daily.at, BERLIN)
    assert first == local(2026, 10, 25, 2, 30, offset=CEST)
    assert schedule_times.next_after(daily, first, BERLIN) == local(2026, 10, 26, 2, 30, offset=CET)


@needs_zones
@given(days=st.integers(1, 9), later=st.floats(0, 400 * schedule_times.DAY_S), minute=st.integers(0, 24 * 60 - 1))
def test_the_next_time_is_the_first_after_now_and_a_whole_number_of_days_on(
    days: int, later: float, minute: int
) -> None:
    assert BERLIN is not None
    first = datetime(2026, 1, 15, minute // 60, minute % 60, tzinfo=BERLIN)
    daily = schedule(first.timestamp(), every_s=days * schedule_times.DAY_S, clock=first.time().isoformat())
    now = daily.at + later
    at = schedule_times.next_after(daily, now, BERLIN)
    assert now < at <= now + (days + 1) * schedule_times.DAY_S
    gone = (datetime.fromtimestamp(at, BERLIN).date() - first.date()).days
    assert gone % days == 0
    before = datetime.combine(first.date() + timedelta(days=gone - days), first.time(), BERLIN).timestamp()
    assert before <= now, "none was passed over"


@given(every_s=st.floats(10, 1e6), later=st.floats(-1e7, 1e7))
def test_a_fixed_repetition_is_the_first_after_now(every_s: float, later: float) -> None:
    """Up to what a float can tell apart."""
    at = schedule_times.next_after(schedule(1e9, every_s=every_s), 1e9 + later, UTC)
    assert 0 < at - (1e9 + later) <= every_s + 1e-3


# Firing ---------------------------------------------------------------------------------------------------------------


def test_what_was_missed_while_hive_was_down_is_made_up_for_once_and_late() -> None:
    hourly = schedule(0.0, every_s=3600.0)
    now = 10 * 3600.0 + 5
    assert schedule_times.is_due(hourly, now)
    assert schedule_times.how_late(hourly, now) == " (36005 s late)"
    after = fired(hourly, "woken", now, UTC)
    assert after is not None
    assert (after.at, after.last_at, after.last_outcome) == (11 * 3600.0, 0.0, "woken")
    assert not schedule_times.is_due(after, now)


def test_in_time_is_not_late_and_once_is_once() -> None:
    once = schedule(100.0)
    assert not schedule_times.is_due(once, 99.9)
    assert schedule_times.is_due(once, 100.0)
    assert schedule_times.how_late(once, 130.0) == ""
    assert fired(once, "woken", 130.0, UTC) is None


@pytest.mark.parametrize("clock_time", ["", "00:00:00"])
def test_a_clock_that_was_set_back_does_not_silence_a_repetition(clock_time: str) -> None:
    """It had fired on the tenth day; then the clock is set back to the second: the next time is on the third."""
    daily = schedule(
        11 * schedule_times.DAY_S, every_s=schedule_times.DAY_S, clock=clock_time, last_at=10 * schedule_times.DAY_S
    )
    right = schedule_times.put_right(daily, 2 * schedule_times.DAY_S + 5, UTC)
    assert right.at == 3 * schedule_times.DAY_S
    assert schedule_times.put_right(right, 2 * schedule_times.DAY_S + 6, UTC) == right


def test_a_small_step_back_fires_nothing_twice() -> None:
    hourly = schedule(7200.0, every_s=3600.0, last_at=3600.0)
    assert schedule_times.put_right(hourly, 3598.0, UTC) == hourly
    once = schedule(7200.0)
    assert schedule_times.put_right(once, 0.0, UTC) == once


def test_the_hosts_zone_is_that_of_tz_and_nonsense_is_utc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Nowhere/AtAll")
    assert schedule_times.local_zone() == UTC
    monkeypatch.setenv("TZ", "../../etc/passwd")
    assert schedule_times.local_zone() == UTC
    if BERLIN is not None:
        monkeypatch.setenv("TZ", "Europe/Berlin")
        assert schedule_times.spoken(0.0, schedule_times.local_zone()) == "1970-01-01 01:00:00 CET"
        monkeypatch.setenv("TZ", ":/usr/share/zoneinfo/Europe/Berlin")
        assert schedule_times.spoken(0.0, schedule_times.local_zone()) == "1970-01-01 01:00:00 CET"
    monkeypatch.delenv("TZ")
    host = clock_of_the_host.strftime("%Y-%m-%d %H:%M:%S %Z", clock_of_the_host.localtime(0))
    assert schedule_times.spoken(0.0, schedule_times.local_zone()) == host


@given(left_s=st.floats(0, 1e6))
def test_a_wait_for_a_time_ends_with_a_short_one_whatever_the_long_one_was_off_by(left_s: float) -> None:
    """A timer of 30 s may be late by a tenth of a second: the last wait before a time is of a second at most."""
    now, waits = 0.0, 0
    while now < left_s:
        wait_s = schedule_times.wait_s([left_s], now)
        assert 0 < wait_s <= schedule_times.CHECK_S
        off_s = wait_s * 0.003
        assert now + wait_s + off_s <= left_s + max(0.003 * schedule_times.NEAR_S, 1e-6)
        now, waits = now + wait_s + off_s, waits + 1
        if waits > 10:
            now = max(now, left_s - 40)  # the rest is as the beginning
