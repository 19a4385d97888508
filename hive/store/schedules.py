"""Times at which agents are to be woken. Every function takes the connection of one transaction."""

from __future__ import annotations

import sqlite3

import msgspec

from hive.errors import Saturated
from hive.store import agents

SCHEDULES_MAX = 100
"""Per agent."""
NOTE_MAX_BYTES = 500


class StoredSchedule(msgspec.Struct, frozen=True, kw_only=True):
    """Wakes one agent at `at`, then every `every_s`, None for once. Times in Unix seconds.

    `clock`: the time of day in the host's zone (`07:30:00`) that a schedule of whole days keeps over changes of summer
    time, else empty. `last_at`, `last_outcome`: when it was due last and what came of it.
    """

    id: int
    agent_id: str
    at: float
    every_s: float | None = None
    clock: str = ""
    note: str = ""
    actor: str
    created_at: float
    last_at: float | None = None
    last_outcome: str = ""


_COLUMNS = StoredSchedule.__struct_fields__
_NEW = _COLUMNS[1:]
_INSERT = f"INSERT INTO schedules ({', '.join(_NEW)}) VALUES ({', '.join('?' * len(_NEW))})"


def add(conn: sqlite3.Connection, schedule: StoredSchedule, *, name: str) -> StoredSchedule:
    """Keeps a new one of the agent called `name`, gives it its id. Raises NotFound, Saturated where it has enough."""
    agents.check_there(conn, schedule.agent_id, name=name)
    has = conn.execute("SELECT count(*) FROM schedules WHERE agent_id = ?", (schedule.agent_id,)).fetchone()[0]
    if has >= SCHEDULES_MAX:
        raise Saturated(f"{name} has {has} schedules already", hint=f"hive agent wake-at {name} --list")
    cursor = conn.execute(_INSERT, tuple(getattr(schedule, column) for column in _NEW))
    assert cursor.lastrowid is not None
    return msgspec.structs.replace(schedule, id=cursor.lastrowid)


def all(conn: sqlite3.Connection) -> list[StoredSchedule]:
    rows = conn.execute(f"SELECT {', '.join(_COLUMNS)} FROM schedules ORDER BY id")
    return [StoredSchedule(**{column: row[column] for column in _COLUMNS}) for row in rows]


def update(conn: sqlite3.Connection, schedule: StoredSchedule) -> None:
    """Records when it is due next and how it ended last; one that was cancelled meanwhile stays cancelled."""
    conn.execute(
        "UPDATE schedules SET at = ?, last_at = ?, last_outcome = ? WHERE id = ?",
        (schedule.at, schedule.last_at, schedule.last_outcome, schedule.id),
    )


def remove(conn: sqlite3.Connection, schedule_id: int) -> None:
    conn.execute("DELETE FROM schedules WHERE id = ?", (schedule_id,))
