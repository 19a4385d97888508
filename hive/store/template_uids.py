"""Blocks of uids: each template has one of its own, and its agents' uids are of it.

Inside a user namespace such a block is all there is, so that nothing of a template reaches another's agents. Every
function takes the connection of one transaction (`Database.write`).
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Collection
from typing import NamedTuple

from hive.errors import Saturated
from hive.store.agents import NOT_FOR_AGENTS

UIDS = 256
MARK = "template:"
"""Before the name of a template that holds the first and the last uid of its block, in the place of an agent's id."""


class UidBlock(NamedTuple):
    """`first` is the template's own uid, the last one is nobody's; those between are its agents'."""

    first: int
    size: int = UIDS

    @property
    def last(self) -> int:
        return self.first + self.size - 1

    @property
    def of_agents(self) -> range:
        """
        >>> UidBlock(70000).of_agents
        range(70001, 70255)
        """
        return range(self.first + 1, self.last)


def block_of(conn: sqlite3.Connection, template: str, owner: str) -> UidBlock | None:
    """The block of this template of this owner; None where it has none yet."""
    found = conn.execute(
        "SELECT first_uid, uids FROM template_uids WHERE template = ? AND owner = ?", (template, owner)
    ).fetchone()
    return None if found is None else UidBlock(*found)


def reserve(
    conn: sqlite3.Connection,
    template: str,
    owner: str,
    *,
    first_uid: int,
    in_use: Collection[int],
    described: Collection[tuple[str, str]] = (),
    freed_before: float = math.inf,
) -> UidBlock:
    """The block it has, else one of a template that is described no more and has no agent left, else a new one.

    `described`: name and owner of every template there is. `in_use`, `freed_before`: as of `agents.allocate_uid`.
    Raises Saturated where the 32-bit range is exhausted.
    """
    held = block_of(conn, template, owner)
    if held is not None:
        return held
    for row in conn.execute("SELECT template, owner, first_uid, uids FROM template_uids ORDER BY first_uid").fetchall():
        block = UidBlock(row[2], row[3])
        if (row[0], row[1]) in described or block.first < first_uid or not _is_free(conn, block, in_use, freed_before):
            continue
        conn.execute("DELETE FROM template_uids WHERE first_uid = ?", (block.first,))
        return _put(conn, template, owner, block)
    first = max(first_uid, 1 + (conn.execute("SELECT max(uid) FROM uids").fetchone()[0] or 0))
    taken = sorted({*NOT_FOR_AGENTS, *in_use})
    for uid in taken:
        if first <= uid < first + UIDS:
            first = uid + 1
    if first + UIDS >= 2**32 - 2:
        raise Saturated("no block of uids is left for another template")
    return _put(conn, template, owner, UidBlock(first))


def allocate(
    conn: sqlite3.Connection,
    agent_id: str,
    template: str,
    block: UidBlock,
    *,
    in_use: Collection[int],
    freed_before: float = math.inf,
) -> int:
    """The agent's uid: the lowest of the block that no agent has and no process lives under. Raises Saturated."""
    first, last = block.of_agents[0], block.of_agents[-1]
    kept = {
        row[0]
        for row in conn.execute(
            "SELECT uid FROM uids WHERE uid BETWEEN ? AND ? AND (freed_at IS NULL OR freed_at >= ?)",
            (first, last, freed_before),
        )
    }
    uid = next((uid for uid in block.of_agents if uid not in kept and uid not in in_use), None)
    if uid is None:
        raise Saturated(
            f"template {template} has {len(block.of_agents)} uids for its agents, and all are given out",
            hint="remove agents, or describe a second template",
        )
    conn.execute("INSERT OR REPLACE INTO uids (uid, agent_id, freed_at) VALUES (?, ?, NULL)", (uid, agent_id))
    return uid


def _is_free(conn: sqlite3.Connection, block: UidBlock, in_use: Collection[int], freed_before: float) -> bool:
    """Whether no agent has one of its uids, or had one since `freed_before`, and no process lives under one."""
    if any(block.first <= uid <= block.last for uid in in_use):
        return False
    found = conn.execute(
        "SELECT 1 FROM uids WHERE uid BETWEEN ? AND ? AND agent_id NOT LIKE ? AND (freed_at IS NULL OR freed_at >= ?)",
        (block.first, block.last, f"{MARK}%", freed_before),
    ).fetchone()
    return found is None


def _put(conn: sqlite3.Connection, template: str, owner: str, block: UidBlock) -> UidBlock:
    conn.execute("INSERT INTO template_uids VALUES (?, ?, ?, ?)", (block.first, block.size, template, owner))
    mark(conn, template, block)
    return block


def mark(conn: sqlite3.Connection, template: str, block: UidBlock) -> None:
    """Takes the first and the last uid of a block, so that none is given out beside it."""
    for uid in (block.first, block.last):
        conn.execute(
            "INSERT OR REPLACE INTO uids (uid, agent_id, freed_at) VALUES (?, ?, NULL)", (uid, MARK + template)
        )
