"""The epochs that flushes have raised, kept for ever: a salt never goes back to what was flushed."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

import msgspec

from hive.store import runtime_settings

EVERYTHING, TAGS, TAG = "all", "tags", "tag "
"""Keys that `hive.models.cache_epochs` makes: of all there is, of all tags, and how that of one tag begins."""
TAGS_MAX = 1000
"""Tags with an epoch of their own. Beyond it the epoch of all tags is raised, and takes the place of each."""


_DUE = "cache.flush_due"
"""Runtime setting: the database was put back to an earlier state, and epochs with it."""


class RaisedEpoch(msgspec.Struct, frozen=True):
    """One key, and the last flush that raised it (Unix seconds)."""

    key: str
    number: int
    at: float
    actor: str


def raise_epochs(conn: sqlite3.Connection, keys: Sequence[str], actor: str, now: float) -> None:
    """Raises each; none has a number again that it had before, also where the database was put back to an earlier
    state: they follow the clock."""
    for key in keys:
        _raise(conn, key, actor, now)
    of_tags = "FROM cache_epochs WHERE substr(key, 1, ?) = ?"
    if conn.execute(f"SELECT count(*) {of_tags}", (len(TAG), TAG)).fetchone()[0] > TAGS_MAX:
        conn.execute(f"DELETE {of_tags}", (len(TAG), TAG))
        _raise(conn, TAGS, actor, now)


def raise_all(conn: sqlite3.Connection, actor: str, now: float) -> None:
    """Nothing that was kept before is found again."""
    _raise(conn, EVERYTHING, actor, now)


def note_put_back(conn: sqlite3.Connection, now: float) -> None:
    """The next daemon raises all: this database may be of a time before a flush, and older than the table."""
    runtime_settings.put(conn, _DUE, "1", actor="hive restore", now=now)


def is_due(conn: sqlite3.Connection) -> bool:
    return runtime_settings.get(conn, _DUE) is not None


def raise_as_due(conn: sqlite3.Connection, now: float) -> None:
    raise_all(conn, "hive", now)
    runtime_settings.drop(conn, _DUE)


def _raise(conn: sqlite3.Connection, key: str, actor: str, now: float) -> None:
    conn.execute(
        "INSERT INTO cache_epochs (key, number, at, actor) VALUES (?, ?, ?, ?) ON CONFLICT (key) DO UPDATE SET"
        " number = max(cache_epochs.number + 1, excluded.number), at = excluded.at, actor = excluded.actor",
        (key, int(now * 1000), now, actor),
    )


def epochs(conn: sqlite3.Connection) -> list[RaisedEpoch]:
    """Every one, the last raised first."""
    rows = conn.execute("SELECT key, number, at, actor FROM cache_epochs ORDER BY at DESC, key")
    return [RaisedEpoch(row["key"], row["number"], row["at"], row["actor"]) for row in rows]
