"""Long jobs: asked for once, carried on by the next daemon where this one ends. One transaction's connection."""

from __future__ import annotations

import sqlite3
from typing import Any

import msgspec

from hive.domain import JobState
from hive.errors import NotFound
from hive.store.job_turns import KIND

KEPT = 1000
"""Ended jobs of each kind and form, the last ones; older ones are in the audit table."""


class StoredJob(msgspec.Struct, frozen=True, kw_only=True):
    """One job. Times in Unix seconds; `eta_s`: how long all of it will probably take, None where that is unknown.

    `progress`: a sentence. `plan`: what is asked for and how far it is, all the next daemon needs to carry it on.
    `result`: what a done one came to; `error`: why another one ended, `{"code", "message", "hint", "log"}`.
    """

    id: str
    kind: str
    state: JobState = JobState.RUNNING
    progress: str = ""
    eta_s: float | None = None
    plan: dict[str, Any] = {}
    result: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    actor: str
    created_at: float
    updated_at: float

    @property
    def ended(self) -> bool:
        return self.state is not JobState.RUNNING


_COLUMNS = StoredJob.__struct_fields__
_OBJECTS = ("plan", "result", "error")
_OF_JOBS = (("id", "jobs"), ("job", "job_turns"), ("job", "job_signals"))
_INSERT = f"INSERT INTO jobs ({', '.join(_COLUMNS)}) VALUES ({', '.join('?' * len(_COLUMNS))})"
_UPDATE = f"UPDATE jobs SET {', '.join(f'{column} = ?' for column in _COLUMNS[1:])} WHERE id = ?"


def add(conn: sqlite3.Connection, job: StoredJob) -> None:
    """A new one; the oldest ended ones of its kind go. Model jobs of different forms are counted apart: responses that
    agents have made in the background push out no operator's job."""
    conn.execute(_INSERT, _values(job))
    gone = conn.execute(
        "SELECT id FROM jobs WHERE state != 'running' AND kind = ? AND json_extract(plan, '$.form') IS ?"
        " ORDER BY created_at DESC LIMIT -1 OFFSET ?",
        (job.kind, job.plan.get("form"), KEPT),
    ).fetchall()
    for column, table in _OF_JOBS:
        conn.executemany(f"DELETE FROM {table} WHERE {column} = ?", [(row["id"],) for row in gone])


def update(conn: sqlite3.Connection, job: StoredJob) -> None:
    own_id, *values = _values(job)
    conn.execute(_UPDATE, (*values, own_id))


def get(conn: sqlite3.Connection, job_id: str) -> StoredJob:
    """Raises NotFound."""
    row = conn.execute("SELECT * FROM jobs WHERE id = ?", (job_id,)).fetchone()
    if row is None:
        raise NotFound(f"there is no job {job_id[:40]}")
    return _job(row)


def recent(conn: sqlite3.Connection, limit: int, kind: str = "") -> list[StoredJob]:
    """The last ones, the newest first; of this kind alone, where one is given."""
    rows = conn.execute("SELECT * FROM jobs WHERE ? IN ('', kind) ORDER BY created_at DESC LIMIT ?", (kind, limit))
    return [_job(row) for row in rows]


def running(conn: sqlite3.Connection) -> list[StoredJob]:
    """The jobs that have not ended, the oldest first."""
    return [_job(row) for row in conn.execute("SELECT * FROM jobs WHERE state = 'running' ORDER BY created_at")]


def done(conn: sqlite3.Connection, kind: str, limit: int) -> list[StoredJob]:
    """The last ones of this kind that succeeded, the newest first."""
    rows = conn.execute(
        "SELECT * FROM jobs WHERE kind = ? AND state = 'done' ORDER BY created_at DESC LIMIT ?", (kind, limit)
    )
    return [_job(row) for row in rows]


def last_about(conn: sqlite3.Connection, kind: str, model: str) -> StoredJob | None:
    """The last job of this kind about this model or adapter; None where none is on record."""
    row = conn.execute(
        "SELECT * FROM jobs WHERE kind = ? AND json_extract(plan, '$.model') = ? ORDER BY created_at DESC LIMIT 1",
        (kind, model),
    ).fetchone()
    return None if row is None else _job(row)


def _values(job: StoredJob) -> tuple[Any, ...]:
    return tuple(_stored(column, getattr(job, column)) for column in _COLUMNS)


def _stored(column: str, value: Any) -> Any:
    if column in _OBJECTS:
        return None if value is None else msgspec.json.encode(value).decode()
    return str(value) if column == "state" else value


def _job(row: sqlite3.Row) -> StoredJob:
    found = {column: row[column] for column in _COLUMNS}
    for column in _OBJECTS:
        found[column] = None if found[column] is None else msgspec.json.decode(found[column])
    return StoredJob(**(found | {"state": JobState(found["state"])}))


# model jobs that make responses in the background ---------------------------------------------------------------------


BACKGROUND_FORM = "responses"


def background_of_agent(conn: sqlite3.Connection, agent: str) -> list[str]:
    """The ids of this agent's jobs that make responses in the background and are not released."""
    return [row["id"] for row in conn.execute(_BACKGROUND_OF_ONE, (KIND, BACKGROUND_FORM, agent))]


def background_of_all(conn: sqlite3.Connection) -> list[str]:
    """The ids of all that make responses in the background and are not released."""
    return [row["id"] for row in conn.execute(_BACKGROUND_OF_ALL, (KIND, BACKGROUND_FORM))]


def background_ended_of(conn: sqlite3.Connection, agent: str, *, but_last: int) -> list[str]:
    """The ids of this agent's jobs in the background that have ended and are not released, without the last ones."""
    rows = conn.execute(_BACKGROUND_ENDED, (KIND, BACKGROUND_FORM, agent, but_last))
    return [row["id"] for row in rows]


def background_ended_before(conn: sqlite3.Connection, before: float) -> list[str]:
    """The ids of those in the background that ended before that time and are not released."""
    return [row["id"] for row in conn.execute(_BACKGROUND_ENDED_BEFORE, (KIND, BACKGROUND_FORM, before))]


_BACKGROUND_OF_ALL = "SELECT id FROM jobs WHERE kind = ? AND json_extract(plan, '$.form') = ?"
_BACKGROUND_OF_ONE = f"{_BACKGROUND_OF_ALL} AND json_extract(plan, '$.agent') = ?"
_BACKGROUND_ENDED = f"{_BACKGROUND_OF_ONE} AND state != 'running' ORDER BY created_at DESC LIMIT -1 OFFSET ?"
_BACKGROUND_ENDED_BEFORE = f"{_BACKGROUND_OF_ALL} AND state != 'running' AND updated_at < ?"
