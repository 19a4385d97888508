"""Operation tokens that were used, this box's id, and the latest time it has seen. One transaction's connection."""

from __future__ import annotations

import sqlite3
from typing import NamedTuple


class BoxRow(NamedTuple):
    """`id`: what tokens name this box by. `clock`: the latest time seen, `made_at`: when it was made, Unix seconds."""

    id: str
    clock: float
    made_at: float


def box(conn: sqlite3.Connection) -> BoxRow | None:
    """None where none has been made."""
    row = conn.execute("SELECT id, clock, made_at FROM op_box").fetchone()
    return None if row is None else BoxRow(row["id"], row["clock"], row["made_at"])


def make_box(conn: sqlite3.Connection, new_id: str, now: float) -> BoxRow:
    """The id of this box, which is `new_id` where it had none."""
    conn.execute(
        "INSERT INTO op_box (one, id, clock, made_at) VALUES (1, ?, ?, ?) ON CONFLICT (one) DO NOTHING",
        (new_id, now, now),
    )
    made = box(conn)
    assert made is not None
    return made


def forget_box(conn: sqlite3.Connection) -> None:
    """The next daemon is another box: of what was used here not all is known. What is known is kept."""
    conn.execute("DELETE FROM op_box")


def see(conn: sqlite3.Connection, now: float) -> None:
    """It is `now`; the mark never goes back."""
    conn.execute("UPDATE op_box SET clock = max(clock, ?)", (now,))


def is_used(conn: sqlite3.Connection, nonce: str) -> bool:
    return conn.execute("SELECT 1 FROM op_nonces WHERE nonce = ?", (nonce,)).fetchone() is not None


def use(conn: sqlite3.Connection, nonce: str, operation: str, by: str, *, now: float, keep_until: float) -> bool:
    """Writes down that a token was used; False where it had been. Those that need not be kept any more go."""
    conn.execute("DELETE FROM op_nonces WHERE keep_until < ?", (now,))
    cursor = conn.execute(
        "INSERT INTO op_nonces (nonce, operation, approved_by, used_at, keep_until) VALUES (?, ?, ?, ?, ?)"
        " ON CONFLICT (nonce) DO NOTHING",
        (nonce, operation, by, now, keep_until),
    )
    return cursor.rowcount == 1
