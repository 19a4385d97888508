"""Who did what to which agent or setting, and how it ended: rows that are only added."""

from __future__ import annotations

import sqlite3
from typing import Any

import msgspec


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
