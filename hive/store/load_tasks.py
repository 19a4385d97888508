"""Tasks of the runner API: loads that somebody ordered and asks after. One transaction's connection.

A row is 200 bytes and stays, because a client may ask for its task at any time; ended jobs are pruned.
"""

from __future__ import annotations

import sqlite3
from typing import Any

import msgspec

from hive.domain import JobState
from hive.errors import NotFound


class StoredLoad(msgspec.Struct, frozen=True, kw_only=True):
    """One task. `job`: its job's id. `asked`: the model's name as it was asked for, `model` the one that is loaded.

    `evicts`: the model that leaves for it, and comes back where it fails; empty for none. `memory_mb`: measured,
    `took_ms`: from the order to its end, None where that is not known. `error`: why it has failed. Times in Unix
    seconds.
    """

    job: str
    asked: str
    model: str
    evicts: str = ""
    state: JobState = JobState.RUNNING
    memory_mb: int | None = None
    took_ms: int | None = None
    error: str = ""
    begun_at: float
    ended_at: float | None = None

    @property
    def ended(self) -> bool:
        return self.state is not JobState.RUNNING


_COLUMNS = StoredLoad.__struct_fields__
_PUT = f"INSERT OR REPLACE INTO load_tasks ({', '.join(_COLUMNS)}) VALUES ({', '.join('?' * len(_COLUMNS))})"


def put(conn: sqlite3.Connection, load: StoredLoad) -> None:
    """The task as it is now."""
    conn.execute(_PUT, tuple(_stored(column, getattr(load, column)) for column in _COLUMNS))


def get(conn: sqlite3.Connection, job: str) -> StoredLoad:
    """Raises NotFound."""
    row = conn.execute("SELECT * FROM load_tasks WHERE job = ?", (job,)).fetchone()
    if row is None:
        raise NotFound(f"there is no task load-{job[:40]}")
    return _load(row)


def under_way(conn: sqlite3.Connection) -> list[StoredLoad]:
    """Those that have not ended, the oldest first."""
    return [_load(row) for row in conn.execute("SELECT * FROM load_tasks WHERE state = 'running' ORDER BY begun_at")]


def stays_out(conn: sqlite3.Connection, model: str) -> None:
    """This model does not come back where the load fails that it has left for."""
    conn.execute("UPDATE load_tasks SET evicts = '' WHERE state = 'running' AND evicts = ?", (model,))


def _stored(column: str, value: Any) -> Any:
    return str(value) if column == "state" else value


def _load(row: sqlite3.Row) -> StoredLoad:
    found = {column: row[column] for column in _COLUMNS}
    return StoredLoad(**(found | {"state": JobState(found["state"])}))
