"""The turns of model jobs, and the signals that they gave. One transaction's connection.

Rows of a job go with its release, and with its row in the table of jobs.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection
from typing import Any

import msgspec

KIND = "task"
"""Of a model job in the table of jobs."""


class JobTurnRow(msgspec.Struct, frozen=True, kw_only=True):
    """One whole answer of the model. `calls`: `{"id", "name", "arguments"}`; `results`: `{"id", "name", "result"}`, as
    far as they have come. Tokens are None where the server did not tell. `at`: Unix seconds."""

    n: int
    answer: str = ""
    thinking: str = ""
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    finish_reason: str = ""
    tokens_in: int | None = None
    tokens_out: int | None = None
    tokens_cached: int | None = None
    at: float


class JobSignalRow(msgspec.Struct, frozen=True, kw_only=True):
    """One exit tool that the model called. `turn`: from 1. `has_ended`: it ended the job."""

    n: int
    name: str
    arguments: dict[str, Any]
    turn: int
    has_ended: bool
    at: float


_TURN = JobTurnRow.__struct_fields__
_SIGNAL = JobSignalRow.__struct_fields__
_OBJECTS = frozenset({"calls", "results", "arguments"})


def add_turn(conn: sqlite3.Connection, job: str, turn: JobTurnRow) -> None:
    """One that is there already stays as it is."""
    _add(conn, "job_turns", job, turn)


def add_signal(conn: sqlite3.Connection, job: str, signal: JobSignalRow) -> None:
    _add(conn, "job_signals", job, signal)


def _add(conn: sqlite3.Connection, table: str, job: str, row: JobTurnRow | JobSignalRow) -> None:
    columns = row.__struct_fields__
    values = [_stored(column, getattr(row, column)) for column in columns]
    marks = ", ".join("?" * (len(columns) + 1))
    conn.execute(f"INSERT OR IGNORE INTO {table} (job, {', '.join(columns)}) VALUES ({marks})", (job, *values))


def add_results(conn: sqlite3.Connection, job: str, turn: int, results: list[dict[str, Any]]) -> None:
    """More results of a turn, behind those that it has."""
    row = conn.execute("SELECT results FROM job_turns WHERE job = ? AND n = ?", (job, turn)).fetchone()
    if row is not None:
        text = msgspec.json.encode([*msgspec.json.decode(row["results"]), *results]).decode()
        conn.execute("UPDATE job_turns SET results = ? WHERE job = ? AND n = ?", (text, job, turn))


def turns(conn: sqlite3.Connection, job: str) -> list[JobTurnRow]:
    """All of a job, the first first."""
    rows = conn.execute("SELECT * FROM job_turns WHERE job = ? ORDER BY n", (job,))
    return [msgspec.convert({column: _read(column, row[column]) for column in _TURN}, JobTurnRow) for row in rows]


def signals(conn: sqlite3.Connection, job: str) -> list[JobSignalRow]:
    rows = conn.execute("SELECT * FROM job_signals WHERE job = ? ORDER BY n", (job,))
    found = [{column: _read(column, row[column]) for column in _SIGNAL} for row in rows]
    return [JobSignalRow(**(one | {"has_ended": bool(one["has_ended"])})) for one in found]


def forget(conn: sqlite3.Connection, job: str) -> None:
    """Takes out all that a job said."""
    conn.execute("DELETE FROM job_turns WHERE job = ?", (job,))
    conn.execute("DELETE FROM job_signals WHERE job = ?", (job,))


def forget_lost(conn: sqlite3.Connection) -> None:
    """Takes out what jobs said that are in the table no more."""
    for table in ("job_turns", "job_signals"):
        conn.execute(f"DELETE FROM {table} WHERE job NOT IN (SELECT id FROM jobs)")


def kept(conn: sqlite3.Connection, jobs: Collection[str]) -> set[str]:
    """Those of these jobs that are in the table."""
    marks = ", ".join("?" * len(jobs))
    return {row["id"] for row in conn.execute(f"SELECT id FROM jobs WHERE id IN ({marks})", tuple(jobs))}


def ids(conn: sqlite3.Connection) -> set[str]:
    """Of all model jobs on record, running ones too."""
    return {row["id"] for row in conn.execute("SELECT id FROM jobs WHERE kind = ?", (KIND,))}


def ended_first(conn: sqlite3.Connection) -> list[str]:
    """The ids of model jobs that have ended, the one that ended first first."""
    rows = conn.execute("SELECT id FROM jobs WHERE kind = ? AND state != 'running' ORDER BY updated_at", (KIND,))
    return [row["id"] for row in rows]


def _stored(column: str, value: Any) -> Any:
    if column in _OBJECTS:
        return msgspec.json.encode(value).decode()
    return int(value) if isinstance(value, bool) else value


def _read(column: str, value: Any) -> Any:
    return msgspec.json.decode(value) if column in _OBJECTS else value
