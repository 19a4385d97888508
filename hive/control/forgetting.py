"""Deletes the records of agents that are removed, with the rows of the audit table that say so."""

from __future__ import annotations

import asyncio
import sqlite3
import time

from hive.control.audit_log import AuditLog, event_row
from hive.domain import Agent
from hive.store import agents
from hive.store.audit import AuditRecord
from hive.tasks import spawn

AT_ONCE = 100
"""Agents in one transaction: a commit, which is what a removal costs most, is shared; others wait some 20 ms for it."""


class Forgetting:
    """Removals of agents, gathered while a transaction is written and made together in the next one."""

    def __init__(self, journal: AuditLog) -> None:
        self._journal = journal
        self._waiting: list[tuple[str, AuditRecord, asyncio.Future[None]]] = []
        self._is_writing = False

    def __repr__(self) -> str:
        return f"<Forgetting {len(self._waiting)} waiting>"

    async def forget(self, agent: Agent, actor: str) -> None:
        """Returns once the record is gone and the removal is in the audit table. Raises as `Database.write`."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        row = event_row("agent.removed", target=agent.id, actor=actor, detail={"name": agent.name})
        self._waiting.append((agent.id, row, done))
        if not self._is_writing:
            self._is_writing = True
            spawn(self._write_all(), name="forget agents")
        await asyncio.shield(done)

    async def _write_all(self) -> None:
        while self._waiting:
            some, self._waiting = self._waiting[:AT_ONCE], self._waiting[AT_ONCE:]
            try:
                await self._write([agent for agent, _, _ in some], [row for _, row, _ in some])
            except Exception as error:  # each waiting caller is told, and raises it
                for _, _, done in some:
                    done.set_exception(error)
            else:
                for _, _, done in some:
                    done.set_result(None)
        self._is_writing = False

    async def _write(self, ids: list[str], removals: list[AuditRecord]) -> None:
        def work(conn: sqlite3.Connection) -> None:
            for agent in ids:
                agents.remove(conn, agent, now=time.time())

        await self._journal.write_with(work, *removals)
        for row in removals:
            self._journal.tell(row)
