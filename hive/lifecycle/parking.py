"""Parked slots: what a llama-server has read for an agent, kept on the disk while the agent sleeps (decision 047).

Nothing waits for it but an agent's first request after its sleep. Whatever does not fit is deleted, never mended.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from hive.agents.roster import Roster
from hive.control.active_backend import Active
from hive.domain import Agent, AgentStatus, SleepDepth, UsageEvent
from hive.lifecycle.parked_files import ParkedFiles
from hive.lifecycle.parked_record import ParkedRecord
from hive.lifecycle.parking_counts import Found, ParkingCounts
from hive.lifecycle.parking_servers import ParkingServers
from hive.lifecycle.slot_key import AskProgram, SlotKeys
from hive.lifecycle.slot_restorer import SlotRestorer
from hive.lifecycle.slot_saver import SlotSaver
from hive.lifecycle.slot_transfers import ParkedScope, SlotTransfers
from hive.lifecycle.whole_steps import in_thread
from hive.link.link import LinkReply
from hive.link.parking import UseParked
from hive.link.proxy_link import ProxyGates
from hive.models.cache_epochs import FlushScope
from hive.models.salts import cache_group
from hive.pooling.pooling import ModelPool
from hive.settings.table import Settings, TenantRow
from hive.shapes.cache import ParkingView
from hive.store.database import Database
from hive.tasks import spawn

log = logging.getLogger("hive.daemon")

_NO_ROW = TenantRow()


class ServersApart(NamedTuple):
    """Servers that are another user than the daemon, with this uid. `ask_program`: tells of their processes;
    `directory`: the one place for slots, whether or not anything is kept there."""

    ask_program: AskProgram
    directory: Path
    uid: int | None


class Parking:
    """One for the daemon; keeps nothing where `[inference] llama_slot_dir` is empty."""

    def __init__(
        self,
        *,
        key: bytes,
        settings: Callable[[], Settings],
        roster: Roster,
        active: Active,
        pool: ModelPool,
        proxy_link: ProxyGates,
        database: Database,
        apart: ServersApart | None = None,
    ) -> None:
        directory = settings().inference.llama_slot_dir
        servers = None if apart is None else apart.uid
        self._files = (
            ParkedFiles(Path(directory), key, is_apart=apart is not None, servers=servers) if directory else None
        )
        self._unused = ParkedFiles(apart.directory, key, is_apart=True) if apart is not None and not directory else None
        self._settings = settings
        self._roster = roster
        self.counts = ParkingCounts()
        self._transfers = SlotTransfers()
        self._record = record = ParkedRecord(database, proxy_link)
        keys = SlotKeys() if apart is None or self._files is None else SlotKeys(apart.ask_program, self._files.engine)
        parking_servers = ParkingServers(active, pool, keys)
        self._saver = SlotSaver(
            record=record,
            servers=parking_servers,
            transfers=self._transfers,
            counts=self.counts,
            roster=roster,
            proxy_link=proxy_link,
            settings=settings,
            group_of=self._group_of,
        )
        self._restorer = SlotRestorer(
            record=record,
            servers=parking_servers,
            transfers=self._transfers,
            counts=self.counts,
            roster=roster,
            group_of=self._group_of,
        )
        self._saving: dict[str, asyncio.Task[None]] = {}
        self._again: dict[str, Agent] = {}
        """Agents that fell asleep once more while a cancelled save of them ends."""
        self._gone: set[str] = set()
        """Agents that were forgotten while something of them was saved."""
        self._restoring: set[asyncio.Task[None]] = set()
        self._is_leaving = False

    def __repr__(self) -> str:
        return f"<Parking of {len(self._record.rows)}, {len(self._saving)} being saved>"

    @property
    def is_on(self) -> bool:
        return self._files is not None

    async def begin(self) -> None:
        """Takes up what an earlier daemon left, and removes what it left half. Where it is off nothing is taken up, and
        everything removed: no flush would reach it."""
        rows, gone = await self._record.read(), set[str]()
        if self._files is not None:
            try:
                gone = set(await asyncio.to_thread(self._files.prepare, rows))
            except OSError as error:
                log.error("parking_off directory=%s error=%s", self._files.directory, error)
                self._files = None
        elif self._unused is not None:
            await asyncio.to_thread(self._unused.clear)
        known = {life.agent.id for life in self._roster} if self._files is not None else set[str]()
        await self._record.begin(rows, keep=known - gone)

    def proxy_here(self) -> None:
        self._record.tell_all()

    def used(self, events: Iterable[UsageEvent]) -> None:
        """Requests ended."""
        self.counts.used(events)

    def view(self) -> ParkingView | None:
        if self._files is None:
            return None
        rows = self._record.rows.values()
        return self.counts.view(files=len(rows), held_bytes=sum(row.bytes for row in rows))

    # sleeping and waking ----------------------------------------------------------------------------------------------

    def changed(self, before: Agent, after: Agent) -> None:
        """An agent has another status, or another depth of sleep. Never waits."""
        if self._files is None:
            return
        agent = after.id
        if after.status is not AgentStatus.PAUSED:
            self._again.pop(agent, None)
            if (saving := self._saving.get(agent)) is not None:
                saving.cancel()
            if after.status is AgentStatus.RUNNING and agent in self._saver.slept:
                self._saver.slept.discard(agent)
                if agent not in self._record.rows:
                    self.counts.found(agent, Found.COLD)
            return
        if self._is_due(before, after):
            if agent in self._saving:
                self._again[agent] = after
            else:
                self._begin_save(self._files, after)

    def _begin_save(self, files: ParkedFiles, agent: Agent) -> None:
        task = self._saving[agent.id] = spawn(self._saver.save(files, agent), name=f"park {agent.name}")
        task.add_done_callback(lambda _: self._saved(files, agent.id))

    def _saved(self, files: ParkedFiles, agent: str) -> None:
        """A save has ended, well or not."""
        self._saving.pop(agent, None)
        if agent in self._gone:
            self._gone.discard(agent)
            self._forget_row(agent)
        if (again := self._again.pop(agent, None)) is not None and not self._is_leaving:
            self._begin_save(files, again)

    def _is_due(self, before: Agent, after: Agent) -> bool:
        if self._settings().inference.llama_slots_at == "deep":
            return after.depth is SleepDepth.DEEP and before.depth is not SleepDepth.DEEP
        return before.status is not AgentStatus.PAUSED

    def forgotten(self, agent: str) -> None:
        """The agent is removed, or is another tenant's."""
        self._saver.slept.discard(agent)
        self.counts.forget(agent)
        self._again.pop(agent, None)
        if (saving := self._saving.get(agent)) is not None:
            saving.cancel()
            self._gone.add(agent)
        self._forget_row(agent)

    def _forget_row(self, agent: str) -> None:
        if (row := self._record.rows.get(agent)) is not None:
            spawn(self._record.drop_quietly([row]), name="unpark")

    def _group_of(self, agent: Agent) -> str:
        row = self._settings().tenants.get(agent.spec.tenant, _NO_ROW)
        return cache_group(agent.spec.tenant, row.cache_group)

    def use(self, asked: UseParked, reply: LinkReply) -> None:
        """The proxy asks for what an agent left, for its first request since."""
        task = spawn(self._restorer.answer(self._files, asked, reply), name="unpark")
        self._restoring.add(task)
        task.add_done_callback(self._restoring.discard)

    # deleting ---------------------------------------------------------------------------------------------------------

    @contextmanager
    def flushing(self, scope: FlushScope, *, groups: Sequence[str], server: str) -> Iterator[None]:
        """As long as it lasts, nothing of the scope is saved and nothing of it restored."""
        with self._transfers.flushing(ParkedScope(scope, groups, server)):
            yield

    async def flush(self, scope: FlushScope, *, groups: Sequence[str], server: str) -> None:
        """Returns once nothing of the scope is on the disk, and nothing of it on its way into a slot. Raises as
        `Database.write`, OSError."""
        mine = ParkedScope(scope, groups, server)
        await self._transfers.over(mine)
        try:  # first: what is in the engines' directory is up to them
            await self._record.drop([row for row in self._record.rows.values() if mine.has(row.group, row.server)])
        finally:
            if self._files is not None:  # what a lost daemon had asked for is of nobody knows whom
                await in_thread(self._files.sweep, self._transfers.names)

    async def close(self) -> None:
        """The daemon leaves."""
        self._is_leaving = True
        self._record.close()
        tasks = [*self._saving.values(), *self._restoring]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
