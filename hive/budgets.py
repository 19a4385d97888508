"""Budgets of tokens: their limits, and the periods they are for. Pure.

A day ends at midnight and a month with its last day, in the zone of `[budget] zone`.
"""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta, tzinfo
from enum import StrEnum

import msgspec

SOFT = 0.8
"""Share of a budget from which on it is told that it will be spent."""


class BudgetKind(StrEnum):
    """The limits there are, by the names of their settings."""

    DAY = "tokens_per_day"
    MONTH = "tokens_per_month"
    CLOUD_DAY = "cloud_tokens_per_day"


class TokenLimits(msgspec.Struct, frozen=True):
    """Tokens in and out together that may be used in a period; 0: no limit. `cloud_tokens_per_day`: of requests that
    leave the box."""

    tokens_per_day: int = 0
    tokens_per_month: int = 0
    cloud_tokens_per_day: int = 0

    @property
    def is_set(self) -> bool:
        return bool(self.tokens_per_day or self.tokens_per_month or self.cloud_tokens_per_day)

    def of(self, kind: BudgetKind) -> int:
        limit: int = getattr(self, kind)
        return limit


NO_LIMITS = TokenLimits()


def tighter(one: TokenLimits, other: TokenLimits) -> TokenLimits:
    """Both at once: of each kind the smaller limit that is set.

    >>> tighter(TokenLimits(100, 0, 5), TokenLimits(200, 1000, 0))
    TokenLimits(tokens_per_day=100, tokens_per_month=1000, cloud_tokens_per_day=5)
    """
    pairs = ((one.of(kind), other.of(kind)) for kind in BudgetKind)
    return TokenLimits(*(min(filter(None, pair), default=0) for pair in pairs))


class UnitPrices(msgspec.Struct, frozen=True):
    """The tokens for which a second of audio, and a million pixels of one step of an image, count in a budget.

    They are fixed, so that what a budget buys is known beforehand and does not depend on how fast a server is.

    >>> UnitPrices(audio_s=10.0, megapixel_step=40.0).tokens(audio_ms=6_020, pixel_steps=512 * 512 * 25)
    323
    """

    audio_s: float
    megapixel_step: float

    def tokens(self, *, audio_ms: float = 0, pixel_steps: float = 0) -> int:
        return math.ceil(audio_ms * self.audio_s / 1e3 + pixel_steps * self.megapixel_step / 1e6)


class BudgetPeriods(msgspec.Struct, frozen=True):
    """The day and the month at one moment: when they began, and when they end. Unix seconds."""

    day_begins: float
    day_ends: float
    month_begins: float
    month_ends: float

    def holds(self, now: float) -> bool:
        """Whether it is the same day still. A clock that was set back ends none: what was spent stays spent."""
        return now < self.day_ends

    def begins(self, kind: BudgetKind) -> float:
        return self.month_begins if kind is BudgetKind.MONTH else self.day_begins

    def ends(self, kind: BudgetKind) -> float:
        """The time at which a limit of this kind begins anew."""
        return self.month_ends if kind is BudgetKind.MONTH else self.day_ends


def zone_of(name: str) -> tzinfo | None:
    """The zone of this name; None where this host knows none.

    >>> zone_of("UTC"), zone_of("Nowhere/At-All")
    (datetime.timezone.utc, None)
    """
    if name == "UTC":
        return UTC
    from zoneinfo import ZoneInfo  # 0.5 MiB of each process, with sysconfig

    try:
        return ZoneInfo(name)
    except (OSError, ValueError, KeyError):  # an unknown name is a KeyError (ZoneInfoNotFoundError)
        return None


def periods_at(now: float, zone: tzinfo) -> BudgetPeriods:
    """The periods at `now` (Unix seconds).

    >>> from zoneinfo import ZoneInfo
    >>> at = periods_at(1_772_400_000, ZoneInfo("UTC"))   # 2026-03-01 21:20
    >>> [round((end - 1_772_400_000) / 3600, 2) for end in (at.day_begins, at.day_ends, at.month_ends)]
    [-21.33, 2.67, 722.67]

    A day in which the clock goes forward has 23 hours.

    >>> berlin = periods_at(1_774_746_000, ZoneInfo("Europe/Berlin"))
    >>> (berlin.day_ends - berlin.day_begins) / 3600
    23.0
    """
    today = datetime.fromtimestamp(now, zone).replace(hour=0, minute=0, second=0, microsecond=0, fold=0)
    tomorrow = (today + timedelta(days=1)).replace(tzinfo=zone)
    first = today.replace(day=1)
    next_first = (first + timedelta(days=32)).replace(day=1)
    return BudgetPeriods(*(one.timestamp() for one in (today, tomorrow, first, next_first)))
