"""The audit table: the acts on agents and settings and their ends, a chain of rows, added to until the oldest go."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from hive.errors import (
    BadRequest,
    MethodNotAllowed,
    NotFound,
    NotPermitted,
    Refusal,
    RequestTimeout,
    TooLarge,
    Unauthorized,
    WrongMediaType,
)
from hive.store.chain import BEGUN_ANEW, GENESIS, PRUNED, START, TAKEN_IN, ChainLink, Head, hash_of
from hive.store.migrations import NAME_IN_DETAIL

KEPT_S = 30 * 86400
ROWS_MAX = 1_000_000
"""320 MB, and 70 MB of indexes. A sleep with its wake takes four: a thousand agents that sleep every five minutes write
as many in a day."""
PRUNED_AT_ONCE = 5_000
"""Rows deleted in one transaction: some 15 ms that every other write waits for."""
TAKEN_IN_AT_ONCE = 5_000
"""Rows of an older Hive that are in memory at once while they are taken into the chain."""
REMOVED = "agent.removed"
"""The act of an agent's removal, with its name in the detail."""
ORDER = "order."
"""Before the name of an act that a person asked for, refused ones too; what came of it are rows of their own."""
REFUSED = frozenset(
    error.code
    for error in (
        *(BadRequest, MethodNotAllowed, NotFound, NotPermitted, Refusal, RequestTimeout),
        *(TooLarge, Unauthorized, WrongMediaType),
    )
)
"""Outcomes of an order that was not permitted, or made no sense: nothing was done about it."""
ORDERS_MAX = ROWS_MAX // 2
"""Permitted orders that stay though rows behind them are too many."""
_IS_ORDER = f"act GLOB '{ORDER}*' AND outcome NOT IN ({', '.join(repr(code) for code in sorted(REFUSED))})"
USER = "user"
"""In a detail: the name that the user `uid:<n>` had at the time."""
LOGIN_USER = "login_user"
"""The name of the user that had logged in, where another one acted, as with sudo."""
_USER_IN_DETAIL, _LOGIN_IN_DETAIL = (
    f"CASE WHEN json_valid(detail) THEN json_extract(detail, '$.{key}') END" for key in (USER, LOGIN_USER)
)
_COLUMNS = "id, at, actor, act, target, origin, outcome, detail, prev, hash"
_NOT_TOLD = f"act NOT GLOB '{ORDER}*' AND act NOT GLOB 'audit.*'"
"""Rows that are no events: nothing happened to an agent by them."""


class AuditRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One act. `at` Unix seconds; `act` as `agent.paused` or `order.pause`; `target` an agent id, setting or `hive`.

    `actor`: `uid:<n>`, `token:<name>`, `internal`, `api-token`, `idle`, `proxy`, `helper`, `hive` where Hive acted by
    itself; the name of a user is kept in the detail (`USER`), as it was then. `origin`: where it came from (`socket`,
    `tcp:<address>` of an order and `tcp` of what came of it, `cli` for a `hive` command that asks no daemon, `proxy`,
    `hive`); `outcome`: `ok` or the code of the error.
    """

    at: float
    actor: str
    act: str
    target: str
    origin: str
    outcome: str = "ok"
    detail: dict[str, Any] = {}


def is_refusal(row: AuditRecord) -> bool:
    """Whether it is a refused order."""
    return row.act.startswith(ORDER) and row.outcome in REFUSED


def is_permitted_order(row: AuditRecord) -> bool:
    """Whether it is an order that was permitted, with any end."""
    return row.act.startswith(ORDER) and row.outcome not in REFUSED


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A row with its number and its hash."""

    id: int
    hash: str | None
    row: AuditRecord


class Filter(msgspec.Struct, frozen=True, kw_only=True):
    """The rows asked for; a field that is empty or None asks for nothing. `agent`: ids or names. `act` may have `*`.
    `actor`: as in AuditRow, or the name that a user had then.

    `since`: Unix seconds; `before`: an id.
    """

    agent: tuple[str, ...] = ()
    actor: str = ""
    act: str = ""
    since: float | None = None
    before: int | None = None


def append(conn: sqlite3.Connection, row: AuditRecord) -> Head:
    """Adds it to the chain; inside the caller's transaction, so that no other row can take its place."""
    return _add(conn, row, head(conn))


def append_all(conn: sqlite3.Connection, rows: Iterable[AuditRecord]) -> Head:
    """Appends the rows in this order; returns the last row of the table."""
    last = head(conn)
    for row in rows:
        last = _add(conn, row, last)
    return last


def head(conn: sqlite3.Connection) -> Head:
    """The last row. One that is not in the chain yet is taken in first, with those like it."""
    last = conn.execute("SELECT id, hash FROM audit_log ORDER BY id DESC LIMIT 1").fetchone()
    if last is None:
        return begun_after(conn)
    return Head(last[0], last[1]) if last[1] is not None else take_in(conn)


def has(conn: sqlite3.Connection, noted: Head) -> bool:
    """Whether the row is as it was noted, or older than all there are."""
    if noted.id <= begun_after(conn).id:
        return True
    found = conn.execute("SELECT hash FROM audit_log WHERE id = ?", (noted.id,)).fetchone()
    return found is not None and found[0] == noted.hash


def begun_after(conn: sqlite3.Connection) -> Head:
    """The head before the first row: the last row that was pruned."""
    found = conn.execute("SELECT id, hash FROM audit_pruned").fetchone()
    return START if found is None else Head(found[0], found[1])


def numbered_to(conn: sqlite3.Connection) -> int:
    """The last id that was given out; SQLite keeps it also where the row is gone."""
    found = conn.execute("SELECT seq FROM sqlite_sequence WHERE name = 'audit_log'").fetchone()
    return found[0] if found is not None and isinstance(found[0], int) else 0


def links(conn: sqlite3.Connection) -> Iterator[ChainLink]:
    """Every row as it is stored, the oldest first."""
    return (ChainLink(*found) for found in conn.execute(f"SELECT {_COLUMNS} FROM audit_log ORDER BY id"))


def take_in(conn: sqlite3.Connection) -> Head:
    """Chains the rows at the end that an older Hive wrote without, and says so in a row; the last row."""
    chained = conn.execute("SELECT id, hash FROM audit_log WHERE hash IS NOT NULL ORDER BY id DESC LIMIT 1").fetchone()
    before = begun_after(conn) if chained is None else Head(chained[0], chained[1])
    first = conn.execute("SELECT id FROM audit_log WHERE id > ? ORDER BY id LIMIT 1", (before.id,)).fetchone()[0]
    if chained is None and first > before.id + 1:
        before = Head(first - 1, GENESIS)
        _begin_after(conn, before)
    last, count = before, 0
    while rows := _unchained(conn, last.id):
        for link in rows:
            digest = hash_of(link, last.hash)
            conn.execute("UPDATE audit_log SET prev = ?, hash = ? WHERE id = ?", (last.hash, digest, link.id))
            last = Head(link.id, digest)
        count += len(rows)
    detail = {"to": before.id, "hash": before.hash, "rows": count}
    return _add(conn, own(TAKEN_IN, time.time(), detail), last)


def _unchained(conn: sqlite3.Connection, after: int) -> list[ChainLink]:
    found = conn.execute(
        f"SELECT {_COLUMNS} FROM audit_log WHERE id > ? ORDER BY id LIMIT ?", (after, TAKEN_IN_AT_ONCE)
    )
    return [ChainLink(*row) for row in found]


def _add(conn: sqlite3.Connection, row: AuditRecord, before: Head) -> Head:
    detail = msgspec.json.encode(row.detail).decode()
    number = max(before.id, numbered_to(conn)) + 1
    link = ChainLink(number, row.at, row.actor, row.act, row.target, row.origin, row.outcome, detail, before.hash, None)
    found = Head(number, hash_of(link, before.hash))
    conn.execute(
        f"INSERT INTO audit_log ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", link._replace(hash=found.hash)
    )
    return found


def own(act: str, at: float, detail: dict[str, Any]) -> AuditRecord:
    """A row about the table itself."""
    return AuditRecord(at=at, actor="hive", act=act, target="hive", origin="hive", detail=detail)


def begin_anew(conn: sqlite3.Connection, last: Head, detail: dict[str, Any], *, now: float) -> Head:
    """The first row of a table whose rows are gone with a damaged database: it follows `last`, which was noted outside.

    The caller notes `last` as a beginning there first (anchors.py).
    """
    if last != START:
        _begin_after(conn, last)
    return _add(conn, own(BEGUN_ANEW, now, {"to": last.id, "hash": last.hash, "rows": 0, **detail}), last)


def go_on_after(conn: sqlite3.Connection, last: Head | None, detail: dict[str, Any], *, now: float) -> Head:
    """A row that says that rows are gone, up to `last`, which was noted outside; None where no row is missed."""
    before = head(conn) if last is None else last
    return _add(conn, own(BEGUN_ANEW, now, {"to": before.id, "hash": before.hash, "rows": 0, **detail}), before)


def _begin_after(conn: sqlite3.Connection, before: Head) -> None:
    conn.execute("INSERT OR REPLACE INTO audit_pruned (one, id, hash) VALUES (1, ?, ?)", before)


def tail(conn: sqlite3.Connection, limit: int, target: str = "") -> list[AuditRecord]:
    """The last `limit` rows that are events, of this target alone where one is named, oldest first."""
    of, values = ("target = ? AND ", (target,)) if target else ("", ())  # one query for both would use no index
    rows = conn.execute(
        f"SELECT {_COLUMNS} FROM audit_log WHERE {of}{_NOT_TOLD} ORDER BY id DESC LIMIT ?", (*values, limit)
    ).fetchall()
    return [_entry(ChainLink(*row)).row for row in reversed(rows)]


def removed_names(conn: sqlite3.Connection, agents: Iterable[str]) -> dict[str, str]:
    """The last names of those of these agents (ids) whose removal is still told of."""
    query = f"SELECT {NAME_IN_DETAIL} FROM audit_log WHERE target = ? AND act = '{REMOVED}' ORDER BY id DESC LIMIT 1"
    found = ((agent, conn.execute(query, (agent,)).fetchone()) for agent in agents)
    return {agent: str(row[0]) for agent, row in found if row is not None and row[0]}


def page(conn: sqlite3.Connection, asked: Filter, limit: int) -> list[AuditEntry]:
    """The last `limit` rows of those asked for, the newest first."""
    conditions: list[tuple[str, Any]] = [
        (condition, value)
        for condition, value in (
            ("act GLOB ?", asked.act or None),
            ("at >= ?", asked.since),
            ("id < ?", asked.before),
        )
        if value is not None
    ]
    whose = [(f"{column} = ?", agent) for agent in asked.agent for column in ("target", NAME_IN_DETAIL)]
    # A name only among what people did: what Hive did by itself is no user's, whatever a user is called.
    by = [
        ("actor = ?", asked.actor),
        *((f"actor GLOB 'uid:*' AND {column} = ?", asked.actor) for column in (_USER_IN_DETAIL, _LOGIN_IN_DETAIL)),
    ]
    wanted = [
        [*whom, *who, *conditions]
        for whom in ([[one] for one in whose] or [[]])
        for who in ([[one] for one in by] if asked.actor else [[]])
    ]
    # Each of them by its index, the newest first and no more than `limit`: an OR, or one IN, would look at every row.
    queries = [_last(conn, one, limit) for one in wanted]
    found = {row[0]: row for rows in queries for row in rows}
    return [_entry(ChainLink(*found[number])) for number in sorted(found, reverse=True)[:limit]]


def _last(conn: sqlite3.Connection, conditions: Sequence[tuple[str, Any]], limit: int) -> list[Any]:
    where = " AND ".join(condition for condition, _ in conditions) or "TRUE"
    values = [value for _, value in conditions]
    return conn.execute(
        f"SELECT {_COLUMNS} FROM audit_log WHERE {where} ORDER BY id DESC LIMIT ?", (*values, limit)
    ).fetchall()


def _entry(link: ChainLink) -> AuditEntry:
    row = AuditRecord(
        at=link.at,
        actor=link.actor,
        act=link.act,
        target=link.target,
        origin=link.origin,
        outcome=link.outcome,
        detail=msgspec.json.decode(link.detail),
    )
    return AuditEntry(id=link.id, hash=link.hash, row=row)


def prunable(conn: sqlite3.Connection, *, now: float) -> Head | None:
    """The last of the oldest rows that may go, at most PRUNED_AT_ONCE of them: what is older than KEPT_S, and what is
    beyond ROWS_MAX. None where nothing is left to prune.

    The caller notes it outside the database first (anchors.py).
    """
    first, last = conn.execute("SELECT (SELECT min(id) FROM audit_log), (SELECT max(id) FROM audit_log)").fetchone()
    if first is None:
        return None
    end = first + PRUNED_AT_ONCE
    young = conn.execute(
        "SELECT id FROM audit_log WHERE id < ? AND at >= ? ORDER BY id LIMIT 1", (end, now - KEPT_S)
    ).fetchone()
    kept_from = end if young is None else young[0]
    if last + 1 - ROWS_MAX > first:
        kept_from = max(kept_from, last + 2 - ROWS_MAX)  # and one for the row that says so
    kept_from = min(end, kept_from)
    if kept_from <= first:
        return None
    head(conn)  # takes in what is not in the chain yet
    gone = conn.execute("SELECT id, hash FROM audit_log WHERE id < ? ORDER BY id DESC LIMIT 1", (kept_from,)).fetchone()
    return Head(gone[0], gone[1] or GENESIS)


def kept_orders_from(conn: sqlite3.Connection) -> int:
    """The id of the first permitted order that stays, however many other rows come: of the last ORDERS_MAX of them."""
    found = conn.execute(
        f"SELECT id FROM audit_log WHERE {_IS_ORDER} ORDER BY id DESC LIMIT 1 OFFSET ?", (ORDERS_MAX,)
    ).fetchone()
    return 0 if found is None else int(found[0]) + 1


def prune(conn: sqlite3.Connection, to: Head, *, now: float, orders_from: int | None = None) -> int:
    """Deletes all rows up to `to`, which `prunable` named; returns their number.

    Permitted orders among them that are young enough, and not before `orders_from` (None: none of them), are added
    again behind the others, with their time and their number of before (`carried`): neither refusals nor
    what agents do, of which there may be any number, takes them away. The remaining rows have no gap. They begin after
    a row with its number and hash noted, also in a row of the chain: no other beginning can be put in its place.
    """
    last = head(conn)
    carried = [] if orders_from is None else _orders(conn, to, since=now - KEPT_S, orders_from=orders_from)
    deleted = conn.execute("DELETE FROM audit_log WHERE id <= ?", (to.id,)).rowcount
    _begin_after(conn, to)
    detail = {"to": to.id, "hash": to.hash, "rows": deleted, "carried": len(carried)}
    last = _add(conn, own(PRUNED, now, detail), last)
    for entry in carried:
        detail = {"carried": entry.id} | entry.row.detail  # the number it had first stays
        last = _add(conn, msgspec.structs.replace(entry.row, detail=detail), last)
    return deleted - len(carried)


def _orders(conn: sqlite3.Connection, to: Head, *, since: float, orders_from: int) -> list[AuditEntry]:
    rows = conn.execute(
        f"SELECT {_COLUMNS} FROM audit_log WHERE id <= ? AND id >= ? AND at >= ? AND {_IS_ORDER} ORDER BY id",
        (to.id, orders_from, since),
    )
    return [_entry(ChainLink(*row)) for row in rows]
