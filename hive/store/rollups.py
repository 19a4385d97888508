"""Sums of usage by hour, day and week, added to in the transaction that adds the rows they are sums of.

Every request is in six sums of its hour, and in the same six of its UTC day and of its week: its agent's, its tenant's
and the whole box's, each of all models together and of its own model. So a question about 1,000 agents and a month
reads 20,000 small rows, where the requests themselves, or the hours of every agent with every model, would be millions.
Names are numbers in them (`usage_names`); ALL stands for all of them.

A row that is in its sums says so (`rolled_up`), because an older Hive that ran on this database in between knew of no
sums: its rows are added later (`roll_up`), and are looked at one by one until then. A watermark would not do: rows
come with times of their own, and SQLite promises neither that their rowids stay nor that they are not used again.
"""

from __future__ import annotations

import itertools
import math
import sqlite3
from collections.abc import Iterable
from enum import IntEnum, StrEnum
from typing import NamedTuple

from hive.domain import UsageUnit

_TOKENS, _AUDIO_S, _IMAGES = UsageUnit.TOKENS, UsageUnit.AUDIO_S, UsageUnit.IMAGES
HOUR_S, DAY_S, WEEK_S = 3600, 86400, 604800
"""Hours and days are those of UTC; a week begins on a Thursday, as Unix time did."""
ALL = 0
"""Instead of a name's number."""
ROLLED_UP_AT_ONCE = 200
PRUNED_AT_ONCE = 300
"""Rows in one transaction, for which every other write waits: 20 to 50 ms, measured on two busy cores."""


class UsageTable(StrEnum):
    """The kind of rows to ask for: one a request, or sums."""

    REQUESTS = "inference_usage"
    HOURS = "usage_hours"
    DAYS = "usage_days"
    WEEKS = "usage_weeks"


SUMS = ((UsageTable.HOURS, HOUR_S), (UsageTable.DAYS, DAY_S), (UsageTable.WEEKS, WEEK_S))
"""The tables of sums and their spans, the shortest first."""
_LONGER_S = {UsageTable.HOURS: DAY_S, UsageTable.DAYS: WEEK_S}


class Scope(IntEnum):
    """The owner of a sum: those of the box have no tenant and no agent, those of a tenant no agent."""

    BOX = 0
    TENANT = 1
    AGENT = 2


class CountedRequest(NamedTuple):
    """One request, as far as it is summed."""

    agent: str
    tenant: str
    model: str
    backend: str
    created_at: float
    tokens_in: int | None
    tokens_out: int | None
    cached_tokens: int | None
    cut: bool
    far: bool = False
    unit: str = UsageUnit.TOKENS
    amount: float | None = None
    work: float | None = None


class KeptSince(NamedTuple):
    """Since when there is all there was, Unix seconds: requests (from a whole hour on), sums (from a whole week on)."""

    requests_from: int = 0
    sums_from: int = 0


class Piece(NamedTuple):
    """The requests that ended in `[first, last)`, Unix seconds, to be added or (`sign` -1) taken off."""

    table: UsageTable
    first: float
    last: float
    sign: int


# Which sums ---------------------------------------------------------------------------------------------------------


def begin_of(since: float, kept: KeptSince) -> float:
    """Since when requests are counted if those since `since` are asked for: since its hour began, where the requests of
    that hour are gone; since there are sums, where they are gone too.

    >>> begin_of(700060.5, KeptSince()), begin_of(700060.5, KeptSince(702000)), begin_of(60, KeptSince(702000, 604800))
    (700060.5, 698400, 604800)
    """
    since = max(since, kept.sums_from)
    hour = _start(since, HOUR_S)
    return hour if hour < kept.requests_from else since


def cover(begin: float, newest: float, *, by_hour: bool = False) -> list[Piece]:
    """All from `begin` to `newest`, when the last request ended: requests up to the nearest hour, hours up to the
    nearest day, days up to the nearest week, then weeks; or the rest in hours, or days, where that is less.

    So half an hour of requests, half a day of hours and half a week of days are read at most. `by_hour`: hours alone.

    >>> for piece in cover(86400 + 3600 + 60, 3 * 86400):
    ...     print(piece.table, piece.first, piece.last, piece.sign)
    inference_usage 90000 90060 -1
    usage_hours 86400 90000 -1
    usage_days 86400 inf 1
    >>> [(piece.table.value, piece.first) for piece in cover(86400 - 1.5, 90000)]
    [('inference_usage', 86398.5), ('usage_hours', 86400)]
    """
    at = _start(begin + HOUR_S / 2, HOUR_S)
    pieces = [_between(UsageTable.REQUESTS, begin, at)]
    for table, _ in SUMS:
        longer_s = _LONGER_S.get(table)
        if by_hour or longer_s is None or newest - at < longer_s / 2:
            pieces.append(Piece(table, at, math.inf, 1))
            break
        nearest = _start(at + longer_s / 2, longer_s)
        pieces.append(_between(table, at, nearest))
        at = nearest
    return [piece for piece in pieces if piece.first < piece.last]


def _between(table: UsageTable, since: float, boundary: int) -> Piece:
    """The piece that turns all since `boundary` into all since `since`."""
    return Piece(table, since, boundary, 1) if since <= boundary else Piece(table, boundary, since, -1)


def _start(at: float, span_s: int) -> int:
    return math.floor(at / span_s) * span_s


# Adding -------------------------------------------------------------------------------------------------------------


class _Key(NamedTuple):
    begins: int
    agent: str
    tenant: str
    model: str
    backend: str


_KEY = "scope, begins, model, agent, tenant, backend"
_COUNTS = (
    *("requests", "tokens_in", "tokens_out", "cached_tokens", "unknown", "cut", "far"),
    *("audio_ms", "images", "pixel_steps"),
)
_ADD = (
    f"INSERT INTO {{}} ({_KEY}, {', '.join(_COUNTS)}) VALUES ({', '.join('?' * (6 + len(_COUNTS)))})"
    f" ON CONFLICT ({_KEY}) DO UPDATE SET " + ", ".join(f"{name} = {name} + excluded.{name}" for name in _COUNTS)
)
_Rows = dict[tuple[int, ...], list[int]]
"""The fields of _KEY, and what is to be added to those of _COUNTS."""


def add(conn: sqlite3.Connection, requests: Iterable[CountedRequest]) -> None:
    """Adds to the sums; call it in the transaction that inserts the rows as rolled up, or marks them so."""
    hours: dict[_Key, list[int]] = {}
    for one in requests:
        key = _Key(_start(one.created_at, HOUR_S), one.agent, one.tenant, one.model, one.backend)
        sums = hours.setdefault(key, [0] * len(_COUNTS))
        sums[0] += 1
        sums[1] += one.tokens_in or 0
        sums[2] += one.tokens_out or 0
        sums[3] += one.cached_tokens or 0
        sums[5] += one.cut
        sums[6] += one.far
        if one.unit == _TOKENS:
            sums[4] += one.tokens_in is None or one.tokens_out is None
        else:
            sums[4] += one.amount is None
            sums[7] += whole(one.amount, 1000) if one.unit == _AUDIO_S else 0
            sums[8] += whole(one.amount) if one.unit == _IMAGES else 0
            sums[9] += whole(one.work)
    if not hours:
        return
    rows = _rows(hours, _ids(conn, hours))
    for table, span_s in SUMS:
        rows = _longer(rows, span_s)
        conn.executemany(_ADD.format(table), ((*place, *sums) for place, sums in sorted(rows.items())))


def whole(amount: float | None, times: int = 1) -> int:
    """A sum's part of a row's amount, as the statements over single rows have it: unknown is none.

    >>> whole(None), whole(6.0205, 1000), whole(2.0)
    (0, 6021, 2)
    """
    return 0 if amount is None else int(amount * times + 0.5)


def _rows(hours: dict[_Key, list[int]], ids: dict[str, int]) -> _Rows:
    """The amounts to add to every sum of an hour, each once."""
    found: _Rows = {}
    for key, sums in hours.items():
        begins, agent, tenant, model, backend = key.begins, *(ids[name] for name in key[1:])
        for of in (ALL, model):
            _put(found, (Scope.BOX, begins, of, ALL, ALL, backend), sums)
            _put(found, (Scope.TENANT, begins, of, ALL, tenant, backend), sums)
            _put(found, (Scope.AGENT, begins, of, agent, tenant, backend), sums)
    return found


def _longer(rows: _Rows, span_s: int) -> _Rows:
    """The same by spans of `span_s`, which are as long as theirs or longer."""
    found: _Rows = {}
    for (scope, begins, *names), sums in rows.items():
        _put(found, (scope, begins // span_s * span_s, *names), sums)
    return found


def _put(rows: _Rows, place: tuple[int, ...], sums: list[int]) -> None:
    so_far = rows.get(place)
    rows[place] = sums if so_far is None else [one + other for one, other in zip(so_far, sums, strict=True)]


def _ids(conn: sqlite3.Connection, keys: Iterable[_Key]) -> dict[str, int]:
    """The number of every name in them; a name that has none gets one. Notes on which day it was used last."""
    days: dict[str, int] = {}
    for key in keys:
        day = _start(key.begins, DAY_S)
        for name in key[1:]:
            days[name] = max(day, days.get(name, day))
    found: dict[str, int] = {}
    for name, day in days.items():
        row = conn.execute("SELECT id, last_day FROM usage_names WHERE name = ?", (name,)).fetchone()
        if row is None:
            row = conn.execute(
                "INSERT INTO usage_names (name, last_day) VALUES (?, ?) RETURNING id", (name, day)
            ).fetchone()
        elif row[1] < day:
            conn.execute("UPDATE usage_names SET last_day = ? WHERE id = ?", (day, row[0]))
        found[name] = row[0]
    return found


def roll_up(conn: sqlite3.Connection) -> int:
    """Adds the newest rows that are in no sum yet, at most ROLLED_UP_AT_ONCE, and marks them; how many that were."""
    rows = conn.execute(
        "SELECT rowid, agent_id, tenant, model, backend, created_at, tokens_in, tokens_out, cached_tokens, cut,"
        " far, unit, amount, work"
        " FROM inference_usage WHERE rolled_up = 0 ORDER BY created_at DESC LIMIT ?",
        (ROLLED_UP_AT_ONCE,),
    ).fetchall()
    add(conn, (CountedRequest(*tuple(row)[1:]) for row in rows))
    conn.executemany("UPDATE inference_usage SET rolled_up = 1 WHERE rowid = ?", [(row[0],) for row in rows])
    return len(rows)


# Pruning ------------------------------------------------------------------------------------------------------------


def keep_from(now: float, *, requests_days: int, sums_days: int) -> KeptSince:
    """The times before which rows may go: a whole hour for requests, a whole week for sums; 0 days keep them for ever.

    Sums are kept at least as long as what they are sums of.

    >>> keep_from(20 * 86400 + 3700, requests_days=3, sums_days=8)
    KeptSince(requests_from=1472400, sums_from=604800)
    >>> keep_from(20 * 86400, requests_days=0, sums_days=8)
    KeptSince(requests_from=0, sums_from=0)
    """
    requests_from = max(0, _start(now - requests_days * DAY_S, HOUR_S)) if requests_days else 0
    sums_from = max(0, _start(now - sums_days * DAY_S, WEEK_S)) if sums_days else 0
    return KeptSince(requests_from, min(sums_from, _start(requests_from, WEEK_S)))


def with_periods(wanted: KeptSince, *, day_begins: float, month_begins: float) -> KeptSince:
    """The same, with what budgets of a day and a month add up: requests of the day, sums of the month.

    >>> at = 70 * 86400
    >>> with_periods(KeptSince(at, 68 * 86400), day_begins=at + 60, month_begins=at - 20 * 86400)
    KeptSince(requests_from=6048000, sums_from=4233600)
    >>> with_periods(KeptSince(), day_begins=at, month_begins=at)
    KeptSince(requests_from=0, sums_from=0)
    """
    requests_from = min(wanted.requests_from, _start(day_begins, HOUR_S))
    return KeptSince(requests_from, min(wanted.sums_from, _start(month_begins, WEEK_S)))


def kept(conn: sqlite3.Connection) -> KeptSince:
    row = conn.execute("SELECT requests_from, sums_from FROM usage_kept").fetchone()
    return KeptSince() if row is None else KeptSince(*row)


def let_go(conn: sqlite3.Connection, wanted: KeptSince, *, now: float) -> KeptSince:
    """Notes what is kept from now on, before anything is deleted: what was let go once never counts as kept again.

    A note that lies in the future was made by a clock that was wrong.
    """
    before = kept(conn)
    after = KeptSince(
        min(max(before.requests_from, wanted.requests_from), _start(now, HOUR_S)),
        min(max(before.sums_from, wanted.sums_from), _start(now, WEEK_S)),
    )
    if after != before:
        conn.execute("INSERT OR REPLACE INTO usage_kept (one, requests_from, sums_from) VALUES (1, ?, ?)", after)
    return after


def prune_requests(conn: sqlite3.Connection) -> int:
    """Deletes requests that were let go, at most PRUNED_AT_ONCE; how many that were. Their sums stay."""
    return conn.execute(
        "DELETE FROM inference_usage WHERE rowid IN (SELECT rowid FROM inference_usage"
        " WHERE created_at < ? AND rolled_up = 1 ORDER BY created_at LIMIT ?)",
        (kept(conn).requests_from, PRUNED_AT_ONCE),
    ).rowcount


def prune_sums(conn: sqlite3.Connection) -> int:
    """Deletes sums that were let go, at most PRUNED_AT_ONCE; how many that were.

    The weeks of the whole box with all models stay for ever, some kilobytes a year: what was used in all is their sum.
    """
    before = kept(conn).sums_from
    for (table, _), scope in itertools.product(SUMS, Scope):
        that_go = f"model <> {ALL}" if (table, scope) == (UsageTable.WEEKS, Scope.BOX) else "TRUE"
        gone = conn.execute(
            f"DELETE FROM {table} WHERE ({_KEY}) IN (SELECT {_KEY} FROM {table}"
            f" WHERE scope = ? AND begins < ? AND {that_go} ORDER BY {_KEY} LIMIT ?)",
            (scope, before, PRUNED_AT_ONCE),
        ).rowcount
        if gone:
            return gone
    return conn.execute(
        "DELETE FROM usage_names WHERE id IN (SELECT id FROM usage_names WHERE last_day < ? AND id NOT IN"
        f" (SELECT backend FROM {UsageTable.WEEKS} WHERE scope = {Scope.BOX:d} AND model = {ALL}) ORDER BY id LIMIT ?)",
        (before, PRUNED_AT_ONCE),
    ).rowcount


def id_of(conn: sqlite3.Connection, name: str) -> int | None:
    """None where no sum is of it."""
    row = conn.execute("SELECT id FROM usage_names WHERE name = ?", (name,)).fetchone()
    return None if row is None else int(row[0])


def newest(conn: sqlite3.Connection) -> int:
    """Beginning of the last hour with a sum, Unix seconds; 0 where there is none."""
    row = conn.execute(f"SELECT max(begins) FROM {UsageTable.HOURS} WHERE scope = {Scope.BOX:d}").fetchone()
    return row[0] or 0


def names(conn: sqlite3.Connection, numbers: Iterable[int]) -> dict[int, str]:
    """The names for which `id_of` gave these numbers."""
    wanted = ",".join(map(str, numbers))
    rows = conn.execute(
        "SELECT id, name FROM usage_names WHERE id IN (SELECT value FROM json_each(?))", (f"[{wanted}]",)
    )
    return dict(rows.fetchall())
