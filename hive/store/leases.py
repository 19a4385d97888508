"""Leases: who waits for memory of the pool, who holds some, and since when. One transaction's connection.

A row is written before its lease is granted anything, so that the next daemon knows of all that may be held. Its number
is the token; AUTOINCREMENT never gives one out again, whatever is deleted.
"""

from __future__ import annotations

import sqlite3

import msgspec

KEPT = 1000
"""Ended leases, the last ones; older ones are in the audit table."""


class StoredLease(msgspec.Struct, frozen=True, kw_only=True):
    """One lease. `mb`: on each of `gpus` accounts; `accounts`: those it was granted, with MiB, empty while it waits.

    `boot`: the run of this machine in whose monotonic seconds `asked_s`, `granted_s` and `until_s` are: a clock that is
    set changes nothing of it. `until_s`: it ends then, or its time to live does. `created_at`, `granted_at`,
    `ended_at`: Unix seconds, to be shown. `wait_s`: 0 for one that does not wait. `ttl_s`: None for a job.
    """

    token: int = 0
    kind: str
    state: str
    actor: str
    label: str = ""
    mb: int
    gpus: int = 1
    band: str = "normal"
    preemptible: bool = False
    is_whole: bool = False
    grace_s: float = 60.0
    wait_s: float = 0.0
    max_s: float | None = None
    ttl_s: float | None = None
    accounts: dict[str, int] = {}
    boot: str
    asked_s: float
    granted_s: float | None = None
    until_s: float | None = None
    created_at: float
    granted_at: float | None = None
    ended_at: float | None = None
    why: str = ""
    code: str = ""

    @property
    def id(self) -> str:
        """Its id, as people and the helper have it.

        >>> StoredLease(token=17, kind="job", state="waiting", actor="", mb=1, boot="", asked_s=0, created_at=0).id
        'l-17'
        """
        return f"l-{self.token}"


_COLUMNS = StoredLease.__struct_fields__
_ADDED = _COLUMNS[1:]
_INSERT = f"INSERT INTO leases ({', '.join(_ADDED)}) VALUES ({', '.join('?' * len(_ADDED))})"
_WITH_TOKEN = f"INSERT INTO leases ({', '.join(_COLUMNS)}) VALUES ({', '.join('?' * len(_COLUMNS))})"
_UPDATE = f"UPDATE leases SET {', '.join(f'{column} = ?' for column in _ADDED)} WHERE token = ?"


def add(conn: sqlite3.Connection, lease: StoredLease) -> int:
    """A new one; its token. With a token of its own it keeps it, as the helper knows it. The oldest ended ones go."""
    if lease.token:
        conn.execute(_WITH_TOKEN, _values(lease))
        return lease.token
    token = conn.execute(_INSERT, _values(lease)[1:]).lastrowid
    conn.execute(
        "DELETE FROM leases WHERE token IN (SELECT token FROM leases WHERE state = 'ended'"
        " ORDER BY token DESC LIMIT -1 OFFSET ?)",
        (KEPT,),
    )
    return token or 0


def update(conn: sqlite3.Connection, lease: StoredLease) -> None:
    token, *values = _values(lease)
    conn.execute(_UPDATE, (*values, token))


def get(conn: sqlite3.Connection, token: int) -> StoredLease | None:
    """None where there is none, or none any more."""
    row = conn.execute("SELECT * FROM leases WHERE token = ?", (token,)).fetchone()
    return None if row is None else _lease(row)


def living(conn: sqlite3.Connection) -> list[StoredLease]:
    """Those that have not ended, the first first."""
    rows = conn.execute("SELECT * FROM leases WHERE state != 'ended' ORDER BY token").fetchall()
    return [_lease(row) for row in rows]


def ended(conn: sqlite3.Connection, limit: int) -> list[StoredLease]:
    """The last that have ended, the last first."""
    rows = conn.execute("SELECT * FROM leases WHERE state = 'ended' ORDER BY token DESC LIMIT ?", (limit,)).fetchall()
    return [_lease(row) for row in rows]


def _values(lease: StoredLease) -> tuple[object, ...]:
    fields = msgspec.structs.asdict(lease)
    fields["accounts"] = msgspec.json.encode(lease.accounts).decode()
    return tuple(fields[column] for column in _COLUMNS)


def _lease(row: sqlite3.Row) -> StoredLease:
    fields = {column: row[column] for column in _COLUMNS}
    fields["accounts"] = msgspec.json.decode(row["accounts"], type=dict[str, int])
    fields["preemptible"], fields["is_whole"] = bool(row["preemptible"]), bool(row["is_whole"])
    return StoredLease(**fields)
