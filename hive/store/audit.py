"""Who did what to which agent or setting, and how it ended: rows that are only added, until the oldest go."""

from __future__ import annotations

import sqlite3
from typing import Any

import msgspec

KEPT_S = 30 * 86400
ROWS_MAX = 1_000_000
"""180 MB. A sleep with its wake takes four: a thousand agents that sleep every five minutes write as many in a day."""
PRUNED_AT_ONCE = 5_000
"""Rows deleted in one transaction: some 15 ms that every other write waits for."""


class AuditRow(msgspec.Struct, frozen=True, kw_only=True):
    """One act. `at` Unix seconds; `act` as `agent.paused`; `target` an agent id, setting or `hive`.

    `actor`: `uid:<n>`, `hive` where Hive acted by itself; `origin`: where it came from (`api`, `idle`, `wake`);
    `outcome`: `ok` or the code of the error.
    """

    at: float
    actor: str
    act: str
    target: str
    origin: str
    outcome: str = "ok"
    detail: dict[str, Any] = {}


def append(conn: sqlite3.Connection, row: AuditRow) -> None:
    conn.execute(
        "INSERT INTO audit_log (at, actor, act, target, origin, outcome, detail) VALUES (?, ?, ?, ?, ?, ?, ?)",
        (row.at, row.actor, row.act, row.target, row.origin, row.outcome, msgspec.json.encode(row.detail).decode()),
    )


def tail(conn: sqlite3.Connection, limit: int) -> list[AuditRow]:
    """The last `limit` rows, oldest first."""
    rows = conn.execute("SELECT * FROM audit_log ORDER BY id DESC LIMIT ?", (limit,)).fetchall()
    return [
        AuditRow(
            at=row["at"],
            actor=row["actor"],
            act=row["act"],
            target=row["target"],
            origin=row["origin"],
            outcome=row["outcome"],
            detail=msgspec.json.decode(row["detail"]),
        )
        for row in reversed(rows)
    ]


def prune(conn: sqlite3.Connection, *, now: float) -> int:
    """Deletes the oldest rows, at most PRUNED_AT_ONCE: what is older than KEPT_S, and what is beyond ROWS_MAX.

    Returns how many that were; 0 where nothing is left to prune. What stays has no gap.
    """
    first, last = conn.execute("SELECT (SELECT min(id) FROM audit_log), (SELECT max(id) FROM audit_log)").fetchone()
    if first is None:
        return 0
    end = first + PRUNED_AT_ONCE
    young = conn.execute(
        "SELECT id FROM audit_log WHERE id < ? AND at >= ? ORDER BY id LIMIT 1", (end, now - KEPT_S)
    ).fetchone()
    kept_from = max(end if young is None else young["id"], last + 1 - ROWS_MAX)
    return conn.execute("DELETE FROM audit_log WHERE id < ?", (min(end, kept_from),)).rowcount
