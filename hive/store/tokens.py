"""The tokens of the API on TCP: maker, role and end, never the token itself. One transaction's connection."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping

import msgspec

from hive.domain import Role, TokenState
from hive.errors import NotFound, WrongState

KEPT = 1000
"""Tokens that are good no longer, the last ones; older ones are in the audit table."""
SCRAPES = "scraper "
"""Before the digest of a scraper's token, which the table has as a viewer's: a Hive that is older than this role would
not start where it met one, and no token that it is shown has such a digest."""


class StoredToken(msgspec.Struct, frozen=True, kw_only=True):
    """One token. Times in Unix seconds; `digest`: SHA-256 of the token, in hex. `last_used_at`: to the minute."""

    id: str
    name: str
    digest: str
    role: Role
    created_by: str
    created_at: float
    expires_at: float | None = None
    revoked_at: float | None = None
    last_used_at: float | None = None

    def state(self, now: float) -> TokenState:
        """
        >>> token = StoredToken(
        ...     id="1", name="ci", digest="", role=Role.VIEWER, created_by="uid:0", created_at=0, expires_at=60
        ... )
        >>> token.state(59.9).value, token.state(60.0).value
        ('live', 'expired')
        """
        if self.revoked_at is not None:
            return TokenState.REVOKED
        return TokenState.LIVE if self.expires_at is None or now < self.expires_at else TokenState.EXPIRED


_COLUMNS = StoredToken.__struct_fields__
_INSERT = f"INSERT INTO api_tokens ({', '.join(_COLUMNS)}) VALUES ({', '.join('?' * len(_COLUMNS))})"
_DEAD = "revoked_at IS NOT NULL OR expires_at <= ?"


def add(conn: sqlite3.Connection, token: StoredToken, *, now: float) -> None:
    """A new one; the oldest of those that are good no longer go.

    Raises WrongState where one of its name is still good.
    """
    taken = next((found for found in _of(conn, token.name) if found.state(now) is TokenState.LIVE), None)
    if taken is not None:
        raise WrongState(
            f"there is a token named {token.name} already", hint=f"hive token revoke {token.name}, or another name"
        )
    kept = token
    if token.role is Role.SCRAPER:
        kept = msgspec.structs.replace(token, role=Role.VIEWER, digest=SCRAPES + token.digest)
    conn.execute(_INSERT, [str(value) if isinstance(value, Role) else value for value in msgspec.structs.astuple(kept)])
    conn.execute(
        f"DELETE FROM api_tokens WHERE id IN (SELECT id FROM api_tokens WHERE {_DEAD}"
        " ORDER BY created_at DESC LIMIT -1 OFFSET ?)",
        (now, KEPT),
    )


def revoke(conn: sqlite3.Connection, ref: str, *, now: float) -> StoredToken:
    """The token of this id, or the newest of this name that is not revoked, as it was; good no longer when this is
    committed.

    Raises NotFound, WrongState where it is revoked already.
    """
    found = [token for token in _of(conn, ref) if token.id == ref or token.state(now) is not TokenState.REVOKED]
    if not found:
        raise NotFound(f"there is no token {ref[:40]!r}", hint="hive token list shows all")
    token = found[0]
    if token.revoked_at is not None:
        raise WrongState(f"the token {token.name} is revoked already")
    conn.execute("UPDATE api_tokens SET revoked_at = ? WHERE id = ?", (now, token.id))
    return token


def used(conn: sqlite3.Connection, last: Mapping[str, float]) -> None:
    """Notes the time of the last use of each of these, by id."""
    conn.executemany("UPDATE api_tokens SET last_used_at = ? WHERE id = ?", [(at, id_) for id_, at in last.items()])


def all(conn: sqlite3.Connection) -> list[StoredToken]:
    """Every one that is kept, by name, those of one name the newest first."""
    return [_token(row) for row in conn.execute("SELECT * FROM api_tokens ORDER BY name, created_at DESC")]


def _of(conn: sqlite3.Connection, ref: str) -> list[StoredToken]:
    """The tokens of this id or name, the newest first."""
    rows = conn.execute("SELECT * FROM api_tokens WHERE id = ? OR name = ? ORDER BY created_at DESC", (ref, ref))
    return [_token(row) for row in rows]


def _token(row: sqlite3.Row) -> StoredToken:
    found = {column: row[column] for column in _COLUMNS}
    role, digest = Role(found["role"]), found["digest"]
    if digest.startswith(SCRAPES):
        role, digest = Role.SCRAPER, digest.removeprefix(SCRAPES)
    return StoredToken(**(found | {"role": role, "digest": digest}))
