"""Settings changed or learned while Hive runs: key → text, kept over restarts."""

from __future__ import annotations

import sqlite3

BOOT = "boot.id"
"""Key: the boot of this host after which all that was to be started has been."""


def get(conn: sqlite3.Connection, key: str) -> str | None:
    row = conn.execute("SELECT value FROM runtime_settings WHERE key = ?", (key,)).fetchone()
    return None if row is None else str(row["value"])


def put(conn: sqlite3.Connection, key: str, value: str, *, actor: str, now: float) -> None:
    conn.execute(
        "INSERT INTO runtime_settings (key, value, actor, updated_at) VALUES (?, ?, ?, ?)"
        " ON CONFLICT (key) DO UPDATE SET value = excluded.value, actor = excluded.actor,"
        " updated_at = excluded.updated_at",
        (key, value, actor, now),
    )


def drop(conn: sqlite3.Connection, key: str) -> None:
    conn.execute("DELETE FROM runtime_settings WHERE key = ?", (key,))


def below(conn: sqlite3.Connection, prefix: str) -> dict[str, str]:
    """All settings with keys of this prefix → text, by the rest of their key."""
    rows = conn.execute("SELECT key, value FROM runtime_settings WHERE substr(key, 1, ?) = ?", (len(prefix), prefix))
    return {row["key"].removeprefix(prefix): row["value"] for row in rows}
