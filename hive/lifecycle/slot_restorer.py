"""Answers the first request of an agent after its sleep: what it had left is put back, or deleted."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from hive.agents.roster import Roster
from hive.backends.kinds import spec_of
from hive.domain import Agent
from hive.errors import HiveError, NotFound, TimedOut, WrongState
from hive.lifecycle.parked_files import NotAsItWas, ParkedFiles
from hive.lifecycle.parked_record import ParkedRecord
from hive.lifecycle.parking_counts import Found, ParkingCounts
from hive.lifecycle.parking_servers import ParkingServers
from hive.lifecycle.slot_transfers import SlotTransfer, SlotTransfers
from hive.lifecycle.whole_steps import in_thread, outcome
from hive.link.link import LinkReply, failed
from hive.link.messages import Done, Failed
from hive.link.parking import UseParked
from hive.store.parked_slots import ParkedSlot
from hive.tasks import spawn

log = logging.getLogger("hive.daemon")

POST_WITHIN_S = 1.0
"""Of the time that a request waits: a server that is asked later would hardly answer in it."""
ANSWER_WITHIN_S = 1.8


class TooLate(HiveError):
    """A request will not wait for it."""


class _EarlyReply:
    """The answer to a question that is answered early, or at its end."""

    def __init__(self, reply: LinkReply) -> None:
        self._reply = reply
        self.is_given = False

    def give(self, answer: Done | Failed) -> None:
        if not self.is_given:
            self.is_given = True
            self._reply(answer)


class SlotRestorer:
    """`group_of`: the cache group an agent is of now."""

    def __init__(
        self,
        *,
        record: ParkedRecord,
        servers: ParkingServers,
        transfers: SlotTransfers,
        counts: ParkingCounts,
        roster: Roster,
        group_of: Callable[[Agent], str],
    ) -> None:
        self._record = record
        self._servers = servers
        self._transfers = transfers
        self._counts = counts
        self._roster = roster
        self._group_of = group_of

    def __repr__(self) -> str:
        return f"<SlotRestorer over {self._record}>"

    async def answer(self, files: ParkedFiles | None, asked: UseParked, reply: LinkReply) -> None:
        """Replies once what the agent left is in the slot, or will not be in time; returns once nothing comes there any
        more, and what was kept is gone."""
        row = self._record.rows.pop(asked.agent, None)
        answer = _EarlyReply(reply)
        try:
            if row is None:
                raise NotFound("nothing is there")
            if asked.is_own or not asked.is_kept:
                self._counts.found(asked.agent, Found.OWN if asked.is_own else Found.COLD)
            else:
                with self._transfers.transfer(row.group, row.server) as transfer:
                    await self._restore(files, row, asked, transfer, answer)
                if not answer.is_given:
                    self._counts.found(asked.agent, Found.RESTORED)
        except (HiveError, OSError) as error:
            why = error.message if isinstance(error, HiveError) else str(error)
            if row is not None and not answer.is_given:
                self._refused(asked.agent, why)
            answer.give(failed(error if isinstance(error, HiveError) else NotAsItWas(why)))
        else:
            answer.give(Done())
        finally:
            self._record.over(asked)
            if row is not None:
                await self._record.drop_quietly([row])

    def _refused(self, agent: str, why: str) -> None:
        self._counts.found(agent, Found.REFUSED)
        log.warning("slot_not_restored agent=%s error=%r", agent, why)

    async def _restore(
        self,
        files: ParkedFiles | None,
        row: ParkedSlot,
        asked: UseParked,
        transfer: SlotTransfer,
        answer: _EarlyReply,
    ) -> None:
        """Returns, or raises, once nothing comes to the slot any more; what comes too late is answered before."""
        began = time.monotonic()
        life = self._roster.get(row.agent)
        if files is None or life is None:
            raise WrongState("the agent is gone")
        if row.group != asked.group or row.group != self._group_of(life.agent):
            raise WrongState("it is of another tenant")
        control, made_for = await self._servers.find(asked)
        if (row.server, row.made_for) != (asked.server, made_for):
            raise WrongState("it is of another model, build or context")
        busy = next(
            (one.is_busy for one in await control.kept(life.agent.spec.model or "") if one.slot == asked.slot), True
        )
        if busy:
            raise WrongState("the slot is busy")
        restore = spec_of(control.kind).asking.restore_slot
        assert restore is not None
        with self._transfers.named() as name:
            try:
                await in_thread(files.hand_out, row, name)
                if time.monotonic() - began > POST_WITHIN_S:
                    raise TooLate("reading it took too long")
                if transfer.is_flushed:
                    raise WrongState("it was flushed meanwhile")
                asking = spawn(
                    outcome(control.converse(lambda server: restore(server, asked.slot, name))), name="unpark"
                )
                try:
                    await asyncio.wait([asking], timeout=max(0.0, began + ANSWER_WITHIN_S - time.monotonic()))
                    if not asking.done():
                        self._refused(asked.agent, "the server did not answer in time")
                        answer.give(failed(TimedOut("the server did not answer in time")))
                    told = await asyncio.shield(asking)
                except asyncio.CancelledError:
                    asking.cancel()
                    raise
            finally:
                await in_thread(files.drop_engines, name)
        await in_thread(files.sweep, self._transfers.names)  # what a lost daemon had asked for, and came since
        if isinstance(told, Exception):
            raise told
        if told != (row.tokens, row.bytes):
            raise NotAsItWas(f"the server read {told[0]} of {row.tokens} tokens")
