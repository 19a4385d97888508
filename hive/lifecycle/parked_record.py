"""The record of parked slots: one row for each file, in memory, in the database, and told to the proxy."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable, Sequence

from hive.agents.transition_lock import outcome_of
from hive.errors import HiveError
from hive.lifecycle.parked_files import beyond, drop_file
from hive.link.parking import ParkedIs, ParkedOver, UseParked
from hive.link.proxy_link import ProxyGates
from hive.store import parked_slots as store
from hive.store.database import Database
from hive.store.parked_slots import ParkedSlot

log = logging.getLogger("hive.daemon")


class ParkedRecord:
    """A row is written after its file, and goes after it: one that is there has a whole file, or none."""

    def __init__(self, database: Database, proxy_link: ProxyGates) -> None:
        self._database = database
        self._proxy_link = proxy_link
        self.rows: dict[str, ParkedSlot] = {}
        """By agent."""
        self.serials: dict[str, int] = {}
        """Of agents' slots when they were saved, by this daemon."""
        self._said: set[str] = set()
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<ParkedRecord of {len(self.rows)}>"

    async def read(self) -> list[ParkedSlot]:
        """The rows that an earlier daemon left. Raises as `Database.read`."""
        return await self._database.read(store.rows)

    async def begin(self, rows: Iterable[ParkedSlot], *, keep: Collection[str]) -> None:
        """Takes up the rows of these agents, and drops the others."""
        self.rows = {row.agent: row for row in rows}
        dropped = [row for row in self.rows.values() if row.agent not in keep]
        try:
            await self.drop(dropped)
        except OSError as error:  # the row stays, and is tried again at the next start
            log.error("parked_file_not_removed error=%s", error)
            for row in dropped:
                self.rows.pop(row.agent, None)
        self.tell_all()

    def tell_all(self) -> None:
        for row in self.rows.values():
            self.tell(row)

    def tell(self, row: ParkedSlot) -> None:
        serial = self.serials.get(row.agent, 0)
        self._proxy_link.say(ParkedIs(agent=row.agent, server=row.server, there=True, serial=serial))

    def over(self, asked: UseParked) -> None:
        """Tells that nothing comes to a slot any more that was asked for; nothing once the daemon leaves, as then it
        may still come."""
        if not self._is_closed:
            self._proxy_link.say(ParkedOver(server=asked.server, slot=asked.slot, serial=asked.serial))

    def close(self) -> None:
        self._is_closed = True

    async def put(self, row: ParkedSlot) -> None:
        """Takes a row whose file is there in the place of the agent's earlier one. Raises as `Database.write`; then its
        file is deleted."""
        old = self.rows.get(row.agent)
        try:
            await self._database.write(lambda conn: store.put(conn, row))
        except HiveError:
            await asyncio.to_thread(drop_file, row)
            raise
        self.rows[row.agent] = row
        if old is not None and old.file != row.file:
            await asyncio.to_thread(drop_file, old)

    async def fit(self, most_bytes: int) -> None:
        """Drops the oldest where all together have more bytes. Raises as `drop`."""
        await self.drop(beyond(self.rows.values(), most_bytes=most_bytes))

    async def drop(self, rows: Sequence[ParkedSlot]) -> None:
        """Their files first: what has none is nothing. Raises as `Database.write`, OSError."""
        if not rows:
            return
        for row in rows:
            if self.rows.get(row.agent) is row:
                del self.rows[row.agent]
            if row.agent not in self.rows:
                self._proxy_link.say(ParkedIs(agent=row.agent, server=row.server, there=False))
            await asyncio.to_thread(drop_file, row)
        await self._database.write(
            lambda conn: store.drop(conn, [row.agent for row in rows if row.agent not in self.rows])
        )

    async def drop_quietly(self, rows: Sequence[ParkedSlot]) -> None:
        """As `drop`; the log says what went wrong."""
        try:
            outcome = await outcome_of(self.drop(rows))
        except OSError as error:
            self.say_once("parked_file_not_removed", rows[0].agent, str(error))
        else:
            if isinstance(outcome, HiveError):
                self.say_once("parked_row_not_removed", rows[0].agent, outcome.message)

    def say_once(self, event: str, agent: str, why: str) -> None:
        if (key := f"{event} {why[:60]}") not in self._said and len(self._said) < 100:
            self._said.add(key)
            log.warning("parking_failed what=%s agent=%s error=%r said_once=true", event, agent, why)
