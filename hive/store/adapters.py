"""The adapters that are loaded, by name, kept over restarts: what is here is what answers, whoever is killed when."""

from __future__ import annotations

import sqlite3

import msgspec


class StoredAdapter(msgspec.Struct, frozen=True, kw_only=True):
    """One adapter that is loaded: the digest that answers to its name, and the one that did before, empty for none.
    `loaded_at`: Unix seconds; `by`: whose order it was."""

    name: str
    digest: str
    previous: str = ""
    base: str
    loaded_at: float
    by: str


_COLUMNS = StoredAdapter.__struct_fields__
_PUT = f"INSERT OR REPLACE INTO adapters_loaded ({', '.join(_COLUMNS)}) VALUES ({', '.join('?' * len(_COLUMNS))})"


def loaded(conn: sqlite3.Connection) -> list[StoredAdapter]:
    """All of them, by name."""
    rows = conn.execute("SELECT * FROM adapters_loaded ORDER BY name")
    return [StoredAdapter(**{column: row[column] for column in _COLUMNS}) for row in rows]


def put(conn: sqlite3.Connection, adapter: StoredAdapter) -> None:
    """Its name means this digest from now on."""
    conn.execute(_PUT, tuple(getattr(adapter, column) for column in _COLUMNS))


def remove(conn: sqlite3.Connection, name: str, digest: str) -> None:
    """Nothing answers to its name from now on, unless that is another digest meanwhile."""
    conn.execute("DELETE FROM adapters_loaded WHERE name = ? AND digest = ?", (name, digest))
