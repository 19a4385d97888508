"""Slots of llama-servers that are parked on the disk while their agents sleep: one row for each file."""

from __future__ import annotations

import sqlite3

import msgspec


class ParkedSlot(msgspec.Struct, frozen=True, kw_only=True):
    """`group`: the cache group of what is in it; `made_for`: a digest of all that it is good for; `file`: its place
    below the directory; `tag`: over all of this and the contents, with a key of the box; `at`: Unix seconds."""

    agent: str
    group: str
    server: str
    made_for: str
    file: str
    bytes: int
    tokens: int
    tag: str
    at: float


def put(conn: sqlite3.Connection, row: ParkedSlot) -> None:
    conn.execute(
        "INSERT OR REPLACE INTO parked_slots (agent, cache_group, server, made_for, file, bytes, tokens, tag, at)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (row.agent, row.group, row.server, row.made_for, row.file, row.bytes, row.tokens, row.tag, row.at),
    )


def drop(conn: sqlite3.Connection, agents: list[str]) -> None:
    conn.executemany("DELETE FROM parked_slots WHERE agent = ?", [(agent,) for agent in agents])


def rows(conn: sqlite3.Connection) -> list[ParkedSlot]:
    """Every one, the oldest first."""
    found = conn.execute("SELECT * FROM parked_slots ORDER BY at, agent")
    return [
        ParkedSlot(
            agent=row["agent"],
            group=row["cache_group"],
            server=row["server"],
            made_for=row["made_for"],
            file=row["file"],
            bytes=row["bytes"],
            tokens=row["tokens"],
            tag=row["tag"],
            at=row["at"],
        )
        for row in found
    ]
