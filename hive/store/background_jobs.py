"""The jobs that make responses in the background, as the table of jobs has them. One transaction's connection."""

from __future__ import annotations

import sqlite3

from hive.store.job_turns import KIND

FORM = "responses"


def of_agent(conn: sqlite3.Connection, agent: str) -> list[str]:
    """The ids of those of this agent that are not released."""
    return [row["id"] for row in conn.execute(_OF_ONE, (KIND, FORM, agent))]


def of_all(conn: sqlite3.Connection) -> list[str]:
    """The ids of all that are not released."""
    return [row["id"] for row in conn.execute(_OF_ALL, (KIND, FORM))]


def ended_of(conn: sqlite3.Connection, agent: str, *, but_last: int) -> list[str]:
    """The ids of those of this agent that have ended and are not released, without the last ones."""
    rows = conn.execute(_ENDED, (KIND, FORM, agent, but_last))
    return [row["id"] for row in rows]


def ended_before(conn: sqlite3.Connection, before: float) -> list[str]:
    """The ids of those that ended before that time and are not released."""
    return [row["id"] for row in conn.execute(_ENDED_BEFORE, (KIND, FORM, before))]


_OF_ALL = "SELECT id FROM jobs WHERE kind = ? AND json_extract(plan, '$.form') = ?"
_OF_ONE = f"{_OF_ALL} AND json_extract(plan, '$.agent') = ?"
_ENDED = f"{_OF_ONE} AND state != 'running' ORDER BY created_at DESC LIMIT -1 OFFSET ?"
_ENDED_BEFORE = f"{_OF_ALL} AND state != 'running' AND updated_at < ?"
