"""The footprints that the pool of models has learnt, and the operators' pins, kept over restarts."""

from __future__ import annotations

import sqlite3


def footprints(conn: sqlite3.Connection) -> dict[str, str]:
    """Every footprint, by its key (control/footprints.py writes and reads the text)."""
    return {row["key"]: row["data"] for row in conn.execute("SELECT key, data FROM footprints")}


def put_footprint(conn: sqlite3.Connection, key: str, data: str, now: float) -> None:
    conn.execute(
        "INSERT INTO footprints (key, data, updated_at) VALUES (?, ?, ?)"
        " ON CONFLICT (key) DO UPDATE SET data = excluded.data, updated_at = excluded.updated_at",
        (key, data, now),
    )


def pins(conn: sqlite3.Connection) -> dict[str, tuple[bool, float]]:
    """Model → (pinned or unpinned by an operator, since when in Unix seconds). One that is not here is pinned as its
    entry says."""
    rows = conn.execute("SELECT model, pinned, since FROM pool_pins")
    return {row["model"]: (bool(row["pinned"]), row["since"]) for row in rows}


def put_pin(conn: sqlite3.Connection, model: str, pinned: bool, actor: str, now: float) -> None:
    """The same word once more leaves `since` as it was: the pin is as old as before."""
    conn.execute(
        "INSERT INTO pool_pins (model, pinned, since, actor) VALUES (?, ?, ?, ?)"
        " ON CONFLICT (model) DO UPDATE SET pinned = excluded.pinned, since = excluded.since, actor = excluded.actor"
        " WHERE pool_pins.pinned != excluded.pinned",
        (model, pinned, now, actor),
    )


def drop_pin(conn: sqlite3.Connection, model: str) -> None:
    conn.execute("DELETE FROM pool_pins WHERE model = ?", (model,))
