"""Messages for agents: kept until the agent accepts them, refuses them for good, or somebody drops them.

Every function takes the connection of one transaction (`Database.write`, `Database.read`).
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection

import msgspec

from hive.domain import MESSAGE_MAX_BYTES, MessageState
from hive.errors import BadRequest, Saturated
from hive.store import agents

UNDELIVERED_MAX = 100
"""Per agent, those it refused among them: with the size of one a bound of 25 MiB."""
DELIVERED_KEPT = 20
"""Per agent, without their text: a sender waiting for one still learns that it arrived."""


class StoredMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One message. Times in Unix seconds. It waits while both `delivered_at` and `refused_at` are None.

    `id`: unique in the world, 16 hex digits, the same at every attempt. `refusals`: attempts the agent itself answered
    with a refusal. `last_error`: why it was not delivered by the last attempt. `text`: empty once delivered.
    """

    id: str
    agent_id: str
    text: str
    sender: str
    sent_at: float
    attempts: int = 0
    refusals: int = 0
    last_error: str = ""
    delivered_at: float | None = None
    refused_at: float | None = None

    @property
    def state(self) -> MessageState:
        if self.delivered_at is not None:
            return MessageState.DELIVERED
        return MessageState.WAITING if self.refused_at is None else MessageState.REFUSED


_COLUMNS = StoredMessage.__struct_fields__
_SELECT = f"SELECT {', '.join(_COLUMNS)} FROM messages"
_INSERT = f"INSERT INTO messages ({', '.join(_COLUMNS)}) VALUES ({', '.join('?' * len(_COLUMNS))})"

_PRUNE = """
DELETE FROM messages WHERE agent_id = :agent AND delivered_at IS NOT NULL AND number NOT IN (
    SELECT number FROM messages WHERE agent_id = :agent AND delivered_at IS NOT NULL
    ORDER BY delivered_at DESC, number DESC LIMIT :kept)
"""


def check_text(text: str) -> None:
    """Raises BadRequest where `text` is empty, larger than MESSAGE_MAX_BYTES, or no Unicode.

    >>> check_text("")
    Traceback (most recent call last):
    hive.errors.BadRequest: text: empty
    """
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise BadRequest("text: not UTF-8") from None
    if not size:
        raise BadRequest("text: empty")
    if size > MESSAGE_MAX_BYTES:
        raise BadRequest(
            f"text: {size} bytes, at most {MESSAGE_MAX_BYTES} are taken", hint="write it to a file, and send its path"
        )


def add(conn: sqlite3.Connection, message: StoredMessage, *, name: str) -> None:
    """Keeps a new message for the agent called `name`. Raises NotFound, Saturated where UNDELIVERED_MAX wait."""
    agents.check_there(conn, message.agent_id, name=name)
    waiting = conn.execute(
        "SELECT count(*) FROM messages WHERE agent_id = ? AND delivered_at IS NULL", (message.agent_id,)
    ).fetchone()[0]
    if waiting >= UNDELIVERED_MAX:
        raise Saturated(f"{waiting} messages for {name} are not delivered yet", hint=f"hive agent messages {name}")
    conn.execute(_INSERT, tuple(getattr(message, column) for column in _COLUMNS))


def undelivered(conn: sqlite3.Connection, agent_id: str) -> list[StoredMessage]:
    """The messages waiting and those refused, oldest first."""
    rows = conn.execute(f"{_SELECT} WHERE agent_id = ? AND delivered_at IS NULL ORDER BY number", (agent_id,))
    return [_message(row) for row in rows]


def first_waiting(conn: sqlite3.Connection, agent_id: str) -> StoredMessage | None:
    """The one to deliver next."""
    row = conn.execute(
        f"{_SELECT} WHERE agent_id = ? AND delivered_at IS NULL AND refused_at IS NULL ORDER BY number LIMIT 1",
        (agent_id,),
    ).fetchone()
    return None if row is None else _message(row)


def get(conn: sqlite3.Connection, agent_id: str, message_id: str) -> StoredMessage | None:
    row = conn.execute(f"{_SELECT} WHERE agent_id = ? AND id = ?", (agent_id, message_id)).fetchone()
    return None if row is None else _message(row)


def waiting(conn: sqlite3.Connection, agents: Collection[str] = ()) -> dict[str, int]:
    """Agent → number of messages waiting for it, without agents that have none; of those named, or of all."""
    named = f" AND agent_id IN ({', '.join('?' * len(agents))})" if agents else ""
    rows = conn.execute(
        f"SELECT agent_id, count(*) FROM messages WHERE delivered_at IS NULL AND refused_at IS NULL{named}"
        " GROUP BY agent_id",
        tuple(agents),
    )
    return {row[0]: row[1] for row in rows}


def update(conn: sqlite3.Connection, message: StoredMessage) -> None:
    """Records how an attempt ended. One that was dropped meanwhile stays dropped; of those delivered few are kept."""
    delivered = message.delivered_at is not None
    conn.execute(
        "UPDATE messages SET text = ?, attempts = ?, refusals = ?, last_error = ?, delivered_at = ?, refused_at = ?"
        " WHERE id = ?",
        (
            "" if delivered else message.text,
            message.attempts,
            message.refusals,
            message.last_error,
            message.delivered_at,
            message.refused_at,
            message.id,
        ),
    )
    if delivered:
        conn.execute(_PRUNE, {"agent": message.agent_id, "kept": DELIVERED_KEPT})


def drop(conn: sqlite3.Connection, agent_id: str, message_id: str) -> bool:
    """Forgets one that is not delivered; False where there is none."""
    return (
        conn.execute(
            "DELETE FROM messages WHERE agent_id = ? AND id = ? AND delivered_at IS NULL", (agent_id, message_id)
        ).rowcount
        == 1
    )


def _message(row: sqlite3.Row) -> StoredMessage:
    return StoredMessage(**{column: row[column] for column in _COLUMNS})
