"""Responses that agents had kept: what went in with each, what came out, and which one it went on from.

Every function takes the connection of one transaction of `responses.db` (responses_file.py). Another agent's is never
found: each question names the agent.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from hive.errors import BadRequest, NotFound, TooLarge
from hive.store.response_items import (
    ItemPage,
    as_items,
    check_length,
    ids_of,
    items_of,
    joined,
    no_such_item,
    output_of,
    page_of_items,
    references_in,
    resolved,
)

VERSION = 1
TABLES = """
CREATE TABLE responses (
    number INTEGER PRIMARY KEY, agent_id TEXT NOT NULL, id TEXT NOT NULL, previous_id TEXT,
    kept_at REAL NOT NULL, bytes INTEGER NOT NULL, items BLOB NOT NULL, response BLOB NOT NULL
);
CREATE UNIQUE INDEX responses_by_id ON responses (agent_id, id);
CREATE INDEX responses_by_age ON responses (agent_id, number, bytes);
CREATE INDEX responses_by_time ON responses (kept_at);
CREATE TABLE response_items (
    agent_id TEXT NOT NULL, item_id TEXT NOT NULL, number INTEGER NOT NULL, is_output INTEGER NOT NULL,
    place INTEGER NOT NULL, PRIMARY KEY (agent_id, item_id)
) WITHOUT ROWID;
CREATE INDEX response_items_by_number ON response_items (number);
"""
ROW_BYTES = 512
"""Bytes that a row and its places in the indexes count as, beside its texts; an item as an eighth of it."""
TURNS_MAX = 1000
"""Responses in one conversation: each is read for the next."""
REFERENCES_MAX = 1000
"""Items that one request may name instead of sending them."""
READ_TIMES = 8
"""As many times the bytes of a conversation may be read for it: answers repeat the instructions and tools of their
requests, and other agents wait for the one thread that reads."""


class KeptResponse(NamedTuple):
    """One to be kept. `asked`: the `input` of its request, JSON; `response`: the answer's object, JSON."""

    agent_id: str
    id: str
    previous_id: str | None
    asked: bytes
    response: bytes


class KeptSum(NamedTuple):
    """Responses kept of one agent; times in Unix seconds, None without any."""

    responses: int = 0
    bytes: int = 0
    oldest_at: float | None = None


def keep(conn: sqlite3.Connection, one: KeptResponse, *, most_bytes: int, now: float) -> int:
    """Keeps it, and lets the agent's oldest go until all of its are within `most_bytes`; how many went.

    Raises TooLarge where it alone is beyond that, BadRequest where it is none.
    """
    items, output = as_items(one.asked, one.id), output_of(one.response)
    places = [*((name, 0, place) for place, name in enumerate(ids_of(items)))]
    places += [(name, 1, place) for place, name in enumerate(ids_of(output))]
    size = len(items) + len(one.response) + ROW_BYTES + len(places) * (ROW_BYTES // 8)
    if size > most_bytes:
        raise TooLarge(f"a response of {size} bytes is more than may be kept of one agent, {most_bytes}")
    went = trim(conn, one.agent_id, most_bytes=most_bytes - size)
    number = conn.execute(
        "INSERT INTO responses (agent_id, id, previous_id, kept_at, bytes, items, response) VALUES (?,?,?,?,?,?,?)",
        (one.agent_id, one.id, one.previous_id, now, size, items, one.response),
    ).lastrowid
    conn.executemany(
        "INSERT OR REPLACE INTO response_items VALUES (?, ?, ?, ?, ?)",
        [(one.agent_id, name, number, is_output, place) for name, is_output, place in places if name],
    )
    return went


def trim(conn: sqlite3.Connection, agent_id: str, *, most_bytes: int) -> int:
    """Deletes the agent's oldest until the rest is within `most_bytes`; how many that were."""
    total = summed(conn, agent_id).bytes
    numbers = []
    if total > most_bytes:
        for number, size in conn.execute(
            "SELECT number, bytes FROM responses WHERE agent_id = ? ORDER BY number", (agent_id,)
        ):
            numbers.append(number)
            total -= size
            if total <= most_bytes:
                break
    return _delete(conn, numbers)


def get(conn: sqlite3.Connection, agent_id: str, response_id: str) -> bytes:
    """The answer's object as it was kept. Raises NotFound."""
    row = conn.execute(
        "SELECT response FROM responses WHERE agent_id = ? AND id = ?", (agent_id, response_id)
    ).fetchone()
    if row is None:
        raise no_such_response(response_id)
    return bytes(row[0])


def history(conn: sqlite3.Connection, agent_id: str, response_id: str, *, most_bytes: int) -> bytes:
    """The items that went in and came out up to that response and with it, an array of items, the oldest first.

    Raises NotFound where one of them is not there (any more), BadRequest where they are too many or too long.
    """
    parts: list[bytes] = []
    for items, response in _turns(conn, agent_id, response_id, most_bytes):
        parts += [output_of(response), items]
    return _whole(conn, agent_id, joined(reversed(parts)), most_bytes)


def input_items(conn: sqlite3.Connection, agent_id: str, response_id: str, page: ItemPage, *, most_bytes: int) -> bytes:
    """A page of what the model was given for that response, what it went on from included. Raises as `history`."""
    turns = _turns(conn, agent_id, response_id, most_bytes, is_asked=True)
    parts = [next(turns)[0]]
    for items, response in turns:
        parts += [output_of(response), items]
    return page_of_items(_whole(conn, agent_id, joined(reversed(parts)), most_bytes), page)


def items_named(conn: sqlite3.Connection, agent_id: str, names: Sequence[str], *, most_bytes: int) -> list[bytes]:
    """The items of those ids, in that order. Raises NotFound, BadRequest."""
    if len(names) > REFERENCES_MAX:
        raise BadRequest(f"more than {REFERENCES_MAX} references to items")
    places: dict[tuple[int, int], dict[str, int]] = {}
    for name in names:
        row = conn.execute(
            "SELECT number, is_output, place FROM response_items WHERE agent_id = ? AND item_id = ?", (agent_id, name)
        ).fetchone()
        if row is None:
            raise no_such_item(name)
        places.setdefault((row[0], row[1]), {})[name] = row[2]
    found, size, read = dict[str, bytes](), 0, 0
    for (number, is_output), wanted in places.items():
        column = "response" if is_output else "items"
        text = bytes(conn.execute(f"SELECT {column} FROM responses WHERE number = ?", (number,)).fetchone()[0])
        items = items_of(output_of(text) if is_output else text)
        found.update({name: items[place] for name, place in wanted.items()})
        size += sum(len(items[place]) for place in wanted.values())
        read += len(text)
        check_length(size, most_bytes)
        check_length(read, READ_TIMES * most_bytes)
    return [found[name] for name in names]


def delete(conn: sqlite3.Connection, agent_id: str, response_id: str) -> None:
    """Raises NotFound. What went on from it can be read still, and not be gone on from."""
    row = conn.execute("SELECT number FROM responses WHERE agent_id = ? AND id = ?", (agent_id, response_id)).fetchone()
    if row is None:
        raise no_such_response(response_id)
    _delete(conn, [row[0]])


def forget(conn: sqlite3.Connection, agent_id: str) -> int:
    """Deletes all of the agent's; how many that were."""
    return trim(conn, agent_id, most_bytes=-1)


def expire(conn: sqlite3.Connection, *, before: float) -> int:
    """Deletes what was kept before then; how many that were."""
    return _delete(conn, [row[0] for row in conn.execute("SELECT number FROM responses WHERE kept_at < ?", (before,))])


def agents(conn: sqlite3.Connection) -> list[str]:
    """Ids of the agents with a kept response."""
    return [row[0] for row in conn.execute("SELECT DISTINCT agent_id FROM responses")]


def tidy(conn: sqlite3.Connection, *, gone: Collection[str], most_bytes: int, before: float) -> tuple[int, int]:
    """Deletes all of the agents that are gone, what was kept before then, and of the others what is beyond
    `most_bytes` of each; how many responses went, and how many are left."""
    went = expire(conn, before=before)
    for agent_id in agents(conn):
        went += forget(conn, agent_id) if agent_id in gone else trim(conn, agent_id, most_bytes=most_bytes)
    return went, conn.execute("SELECT count(*) FROM responses").fetchone()[0]


def summed(conn: sqlite3.Connection, agent_id: str) -> KeptSum:
    found = conn.execute(
        "SELECT count(*), coalesce(sum(bytes), 0) FROM responses WHERE agent_id = ?", (agent_id,)
    ).fetchone()
    oldest = conn.execute(
        "SELECT kept_at FROM responses WHERE agent_id = ? ORDER BY number LIMIT 1", (agent_id,)
    ).fetchone()
    return KeptSum(found[0], found[1], None if oldest is None else oldest[0])


def total(conn: sqlite3.Connection) -> KeptSum:
    """The sum of the kept responses of all agents."""
    found = conn.execute("SELECT count(*), coalesce(sum(bytes), 0), min(kept_at) FROM responses").fetchone()
    return KeptSum(*found)


def no_such_response(response_id: str) -> NotFound:
    """The same words whether it never was, is gone, or is another agent's."""
    return NotFound(f"Response with id '{response_id[:80]}' not found.")


def _turns(
    conn: sqlite3.Connection, agent_id: str, response_id: str, most_bytes: int, *, is_asked: bool = False
) -> Iterator[tuple[bytes, bytes]]:
    """Items and response of it and of those it went on from, the newest first. `is_asked`: what came out of the newest
    does not count. Raises NotFound, BadRequest."""
    size, read, wanted, turns = 0, 0, response_id, 0
    while wanted:
        turns += 1
        if turns > TURNS_MAX:
            raise BadRequest(f"the conversation has more than {TURNS_MAX} responses", hint="begin a new one")
        row = conn.execute(
            "SELECT previous_id, items, response FROM responses WHERE agent_id = ? AND id = ?", (agent_id, wanted)
        ).fetchone()
        if row is None:
            raise no_such_response(wanted)
        size += len(row[1]) + (0 if is_asked and turns == 1 else len(output_of(bytes(row[2]))))
        read += len(row[1]) + len(row[2])
        check_length(size, most_bytes)
        check_length(read, READ_TIMES * most_bytes)
        yield bytes(row[1]), bytes(row[2])
        wanted = row[0]


def _whole(conn: sqlite3.Connection, agent_id: str, items: bytes, most_bytes: int) -> bytes:
    """The items with those in place of references that are kept, too."""
    names = list(dict.fromkeys(references_in(items)))
    if not names:
        return items
    found = items_named(conn, agent_id, names, most_bytes=most_bytes)
    return resolved(items, dict(zip(names, found, strict=True)), most_bytes=most_bytes)


def _delete(conn: sqlite3.Connection, numbers: list[int]) -> int:
    conn.executemany("DELETE FROM response_items WHERE number = ?", [(number,) for number in numbers])
    conn.executemany("DELETE FROM responses WHERE number = ?", [(number,) for number in numbers])
    return len(numbers)
