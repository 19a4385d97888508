"""The content of SQLite while the daemon is down, in any state of its files: only reads, and leaves no file."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Hashable
from pathlib import Path

import msgspec

from hive.domain import Agent
from hive.errors import DependencyDown, HiveError
from hive.store import agents, audit, migrations
from hive.store.audit import AuditRecord
from hive.store.database import plan_of
from hive.store.reading import opened

EVENTS = 50
BUSY_S = 1.0
"""Longest wait for a lock."""
HINT = "`hive status` says how the daemon is; root may read every Hive's database"
_SUFFIXES = ("", "-wal", "-shm")


def read(path: Path) -> tuple[list[Agent], list[AuditRecord]]:
    """All agents and the last acts. Raises DependencyDown where it cannot be read, and says why."""
    try:
        if plan_of(path).exists():
            raise _unreadable(path, "a restore of it was cut short", hint="hive restore --finish brings it to its end")
        was_whole = _is_whole(path)
        found = _read(path, is_whole=was_whole)
        # A daemon that began meanwhile: what was read may be a mixture.
        return found if not was_whole or _is_whole(path) else _read(path, is_whole=False)
    except (sqlite3.Error, msgspec.MsgspecError, ValueError, LookupError, OSError) as error:
        raise _unreadable(path, str(error)) from error


def stamp(path: Path) -> Hashable:
    """Another one once anything was written. Raises DependencyDown where nothing can be said of it."""
    try:
        found = [_seen(f"{path}{suffix}") for suffix in _SUFFIXES[:2]]
    except OSError as error:
        raise _unreadable(path, str(error)) from error
    return tuple(None if file is None else (file.st_ino, file.st_size, file.st_mtime_ns) for file in found)


def _seen(path: str) -> os.stat_result | None:
    """None where it is not there. Asked once: SQLite removes a WAL at any moment."""
    try:
        return os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None


def _is_whole(path: Path) -> bool:
    """Whether no part of it is elsewhere: a WAL whose last writer closed cleanly is gone."""
    wal, shm = (_seen(f"{path}{suffix}") for suffix in _SUFFIXES[1:])
    return wal is None or (wal.st_size == 0 and shm is None)


def _read(path: Path, *, is_whole: bool) -> tuple[list[Agent], list[AuditRecord]]:
    """Reads agents and last events in one transaction."""
    with opened(path, is_whole=is_whole, wait_s=BUSY_S) as conn:
        conn.execute("BEGIN")
        _refuse_other_version(conn, path)
        return agents.all(conn), audit.tail(conn, EVENTS)


def _refuse_other_version(conn: sqlite3.Connection, path: Path) -> None:
    """A newer Hive may have added what this one need not know; an older one lacks what this one asks for."""
    schema, known = migrations.schema_of(conn), len(migrations.STEPS)
    try:
        migrations.refuse_newer(schema)
    except HiveError as error:
        raise _unreadable(path, error.message, hint="use the `hive` of that version") from error
    if schema.taken == 0:
        raise _unreadable(path, "it is no database of Hive, or an empty one")
    if schema.taken < known:
        why = f"it was written by an older Hive (its version {schema.taken}, known here {known})"
        raise _unreadable(path, why, hint="its daemon brings it up to date when it starts")


def _unreadable(path: Path, why: str, *, hint: str = HINT) -> DependencyDown:
    return DependencyDown(f"the daemon is down, and {path} cannot be read: {why}", hint=hint)
