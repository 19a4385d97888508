"""Saves the slot of an agent that has fallen asleep: asked of its server, taken in, and put on record."""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from collections.abc import Callable

from hive.agents.roster import Roster
from hive.backends.backend import BackendControl
from hive.backends.conversation import AskedServer, Conversation
from hive.backends.kinds import spec_of
from hive.domain import Agent
from hive.errors import HiveError, NotFound, NotSupported, WrongState
from hive.lifecycle.parked_files import ParkedFiles, drop_file
from hive.lifecycle.parked_record import ParkedRecord
from hive.lifecycle.parking_counts import ParkingCounts
from hive.lifecycle.parking_servers import ParkingServers
from hive.lifecycle.slot_transfers import SlotTransfer, SlotTransfers
from hive.lifecycle.whole_steps import ended, in_thread
from hive.link.parking import SlotOf
from hive.link.proxy_link import ProxyGates
from hive.settings.table import Settings
from hive.store.parked_slots import ParkedSlot

log = logging.getLogger("hive.daemon")

MIB = 1024 * 1024
AT_ONCE = 2
"""Slots that are saved at once: a server answers nobody meanwhile."""


class SlotSaver:
    """`slept`: agents that had a slot when they fell asleep. `group_of`: the cache group an agent is of now."""

    def __init__(
        self,
        *,
        record: ParkedRecord,
        servers: ParkingServers,
        transfers: SlotTransfers,
        counts: ParkingCounts,
        roster: Roster,
        proxy_link: ProxyGates,
        settings: Callable[[], Settings],
        group_of: Callable[[Agent], str],
    ) -> None:
        self._record = record
        self._servers = servers
        self._transfers = transfers
        self._counts = counts
        self._roster = roster
        self._proxy_link = proxy_link
        self._settings = settings
        self._group_of = group_of
        self._per_token: dict[str, float] = {}
        """Bytes of a slot for each token, by what it is made for."""
        self._turn = asyncio.Semaphore(AT_ONCE)
        self.slept: set[str] = set()

    def __repr__(self) -> str:
        return f"<SlotSaver, {len(self.slept)} agents had a slot>"

    async def save(self, files: ParkedFiles, agent: Agent) -> None:
        """Saves it, or says in the log why not, or is cancelled: then nothing of it is left."""
        try:
            async with self._turn:
                await self._save_in_turn(files, agent)
        except NotFound:
            pass  # nothing of it is in any slot
        except HiveError as error:
            self._record.say_once("slot_not_parked", agent.name, error.message)
        except OSError as error:
            why = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else str(error)
            self._record.say_once("slot_not_parked", agent.name, why)

    async def _save_in_turn(self, files: ParkedFiles, agent: Agent) -> None:
        held = await self._proxy_link.slot_of(agent.id)
        self._counts.slept()
        self.slept.add(agent.id)
        if held.group != self._group_of(agent):
            return
        with self._transfers.transfer(held.group, held.server) as transfer:
            await self._save_slot(files, agent, held, transfer)

    async def _save_slot(self, files: ParkedFiles, agent: Agent, held: SlotOf, transfer: SlotTransfer) -> None:
        control, made_for = await self._servers.find(held)
        most = self._settings().inference.llama_slots_max_mb * MIB
        await self._check_room(files, control, agent, held, self._per_token.get(made_for, 0.0), most)
        with self._transfers.named() as name:
            try:
                tokens, written = await ended(
                    control.converse(lambda server: _saving(control, server, held.slot, name))
                )
                if not tokens:
                    return
                self._per_token[made_for] = written / tokens
                if written > most:
                    raise WrongState(_too_large(most))
                row = files.placed(
                    ParkedSlot(
                        agent=agent.id,
                        group=held.group,
                        server=held.server,
                        made_for=made_for,
                        file="",
                        bytes=written,
                        tokens=tokens,
                        tag="",
                        at=time.time(),
                    )
                )
                row = await self._taken_in(files, name, row, held)
            finally:
                await in_thread(files.drop_engines, name)
        try:
            await in_thread(files.sweep, self._transfers.names)  # as it is then: what is written is named before
            now = await self._proxy_link.slot_of(agent.id)
            if (now.serial, now.server, now.slot) != (held.serial, held.server, held.slot):
                raise WrongState("another request came there meanwhile")
            if (await self._servers.find(held))[1] != made_for:
                raise WrongState("the server is another one meanwhile")
            if transfer.is_flushed:
                raise WrongState("it was flushed meanwhile")
        except BaseException:
            await in_thread(drop_file, row)
            raise
        self._record.serials[agent.id] = held.serial
        await ended(self._keep(row, most, transfer))

    async def _check_room(
        self, files: ParkedFiles, control: BackendControl, agent: Agent, held: SlotOf, per_token: float, most: int
    ) -> None:
        """Raises WrongState where the slot would be too large, by the size of a token in an earlier one."""
        there = await control.kept(agent.spec.model or "")
        tokens = next((one.tokens or 0 for one in there if one.slot == held.slot), 0)
        expected = int(tokens * per_token)
        if expected > most:
            raise WrongState(_too_large(most))
        if 2 * expected > await asyncio.to_thread(files.free_bytes):  # the engine's file, and Hive's
            raise WrongState("the disk has no room for it")

    async def _taken_in(self, files: ParkedFiles, name: str, row: ParkedSlot, held: SlotOf) -> ParkedSlot:
        """The row, with its tag. Of a copy that nobody waited for to its end nothing is left."""
        try:
            return await in_thread(files.take_in, name, row)
        except FileNotFoundError:
            self._servers.writes_elsewhere(held)
            log.error(
                "slots_written_elsewhere address=%s: its --slot-save-path is not %s; it left a file %s there, to be"
                " deleted by hand, and none of its slots is kept",
                held.address,
                files.engine,
                name,
            )
            raise NotSupported("its server writes into another directory") from None
        except asyncio.CancelledError:
            await in_thread(drop_file, row)
            raise

    async def _keep(self, row: ParkedSlot, most_bytes: int, transfer: SlotTransfer) -> None:
        await self._record.put(row)
        self._counts.saved += 1
        if self._roster.get(row.agent) is None or transfer.is_flushed:  # removed, or flushed, meanwhile
            await self._record.drop([row])
            return
        await self._record.fit(most_bytes)
        if row.agent in self._record.rows:
            self._record.tell(row)


def _saving(control: BackendControl, server: AskedServer, slot: int, name: str) -> Conversation[tuple[int, int]]:
    save = spec_of(control.kind).asking.save_slot
    assert save is not None
    return save(server, slot, name)


def _too_large(most: int) -> str:
    return f"its slot is larger than llama_slots_max_mb = {most // MIB}"
