"""The daemon's orders about the slots of the pool, and what the proxy tells it of the requests that wait for them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from hive.backends.kinds import spec_of
from hive.domain import Band
from hive.errors import HiveError, LinkLost
from hive.link.link import LinkReply
from hive.link.message import LinkMessage
from hive.link.pool import (
    CloseSlotGate,
    CrashBlame,
    LoadCharged,
    SlotBusy,
    SlotClosed,
    SlotCrashed,
    SlotDemand,
    SlotDemands,
    SlotGone,
    SlotIs,
    SlotRow,
    Slots,
    WaitingDemand,
)
from hive.proxy.datapath import DataPath
from hive.proxy.forward import Exchange
from hive.proxy.registry import OPERATOR, PREWARM
from hive.proxy.slot_flows import FlowReports
from hive.proxy.switching import Drain
from hive.proxy.under_way import waiting_for
from hive.queue.slot_gate import Cold
from hive.routing.slot import Slot
from hive.tasks import spawn
from hive.wire.dial import dial

log = logging.getLogger("hive.proxy")

TELL_S = 0.02
"""The time between two messages on demands, at least: all changes at once."""
FIRST_S = 0.002
"""A change that comes after a while is told so soon."""
TOLD_MAX = 100
"""Waiting requests told of one slot; how many more there are is told too."""
LOOK_S = 1.0
"""The time between two looks whether the server of a lost slot listens."""
LOST_S = 60.0
"""Requests wait for so long for a daemon that is gone while their slot is closed, then they are refused."""


class SlotOrders:
    """The slots of one proxy. Every method is called on the loop. `tell`: sends to the daemon, raises LinkLost.

    A closed slot opens only by the daemon's word, however long that takes (decision 034).
    """

    def __init__(self, path: DataPath, tell: Callable[[LinkMessage], None]) -> None:
        self._path = path
        self._tell = tell
        self._flows = FlowReports(path, tell)
        self._drains: dict[str, Drain] = {}
        self._told: set[str] = set()
        self._due: asyncio.TimerHandle | None = None
        self._told_at = float("-inf")
        self._alone: asyncio.TimerHandle | None = None
        self._wishes_due: asyncio.TimerHandle | None = None
        self._blamed: dict[str, tuple[int, CrashBlame]] = {}
        """The answer about the last crash of each slot, and the generation that crashed."""
        path.on_demand = self.changed
        path.on_idle = self.idle
        path.on_lost = self.lost

    def __repr__(self) -> str:
        return f"<SlotOrders {len(self._path.slots.pooled)} slots, {len(self._drains)} drain>"

    def heard(self, slots: list[SlotRow]) -> None:
        """Takes all slots; a daemon is there (again), and orders of an earlier one are void."""
        if self._alone is not None:
            self._alone.cancel()
            self._alone = None
        for name in [*self._drains]:
            self._drains.pop(name).end()
        self._path.learn_slots(slots)
        for name in self._path.slots.pooled.keys() - {row.id for row in slots}:
            self._path.forget_slot(name)
        self._told.clear()
        self._blamed.clear()
        self._flows.heard()
        for slot in self._path.slots.pooled.values():
            self._refuse_in_vain(slot)
            self.changed(slot)

    def order(self, message: LinkMessage, reply: LinkReply | None) -> None:
        match message:
            case Slots(slots=slots):
                self.heard(slots)
            case SlotIs(slot=row):
                self._learn(row)
            case SlotGone(id=name):
                if (drain := self._drains.pop(name, None)) is not None:
                    drain.end()
                self._path.forget_slot(name)
            case LoadCharged():
                self._charge(message)
            case CloseSlotGate() if reply is not None:
                self._close(message, reply)
            case SlotCrashed() if reply is not None:
                reply(self._blame(message))

    def _learn(self, row: SlotRow) -> None:
        known = self._path.slots.pooled.get(row.id)
        if known is not None and row.generation < known.generation:
            return
        is_new = known is None or row.generation != known.generation
        opens = row.is_open and (is_new or (known is not None and known.gate.is_closed))
        if (row.is_open or is_new) and (drain := self._drains.pop(row.id, None)) is not None:
            drain.end()
        log.info("slot_is id=%s generation=%d open=%s", row.id, row.generation, row.is_open)
        self._path.learn_slots([row])
        slot = self._path.slots.pooled[row.id]
        if opens:
            self._flows.owe(slot)
        self._refuse_in_vain(slot)
        self.changed(slot)

    def _charge(self, load: LoadCharged) -> None:
        slot = self._path.slots.pooled.get(load.id)
        if slot is not None:
            shares = self._path.registry.shares
            shares.charge_load(slot.line, load.tenant, load.agent, load.band, load.seconds)

    def _refuse_in_vain(self, slot: Slot) -> None:
        """Refuses the requests that would wait in vain, by what is known now."""
        now = time.monotonic()
        for exchange in waiting_for(self._path.registry, slot) if slot.gate.is_cold else ():
            if (in_vain := exchange.why_in_vain(now)) is not None:
                exchange.refuse(in_vain)

    def _close(self, message: CloseSlotGate, reply: LinkReply) -> None:
        slot = self._path.slots.pooled.get(message.id)
        if slot is None or slot.generation != message.generation:
            reply(SlotBusy(in_flight=0))
            return
        if message.drain_s is None and not slot.is_drained:
            reply(SlotBusy(in_flight=slot.line.running))
            self._flows.owe(slot)  # it may be idle already when the daemon hears this
            return
        if (before := self._drains.pop(slot.name, None)) is not None:
            before.end()
        slot.close(Cold(slot.model, message.wait_s))
        if slot.is_drained:
            reply(SlotClosed())
            return
        drain = self._drains[slot.name] = Drain(slot)
        spawn(self._drain(slot, drain, message.drain_s or 0.0, reply), name=f"drain {slot.name}")

    async def _drain(self, slot: Slot, drain: Drain, drain_s: float, reply: LinkReply) -> None:
        cut = await drain.run(time.monotonic() + drain_s)
        if cut is None:
            reply(SlotBusy(in_flight=slot.line.running))  # the daemon has changed its mind, or is another one
            return
        self._drains.pop(slot.name, None)
        log.info("slot_drained id=%s cut=%d", slot.name, cut)
        reply(SlotClosed(cut=cut))

    # a server has ended by itself -------------------------------------------------------------------------------------

    def lost(self, slot: Slot) -> None:
        """Nothing listens at the slot's address. Its requests wait, and the daemon hears that they do; a server that
        is there after all is asked again."""
        if slot.backend is not None and spec_of(slot.backend.kind).is_remote:
            return  # it is nobody's here to start again, and is not knocked at: the request ends with what happened
        log.warning("slot_lost id=%s generation=%d", slot.name, slot.generation)
        slot.close(Cold(slot.model, self._path.settings.pool.load_wait_s, is_lost=True))
        self.changed(slot)
        spawn(self._look_for(slot, slot.generation), name=f"look for {slot.name}")

    async def _look_for(self, slot: Slot, generation: int) -> None:
        """Opens the slot if its server listens again before the daemon has said anything."""
        while slot.gate.is_lost and slot.generation == generation:
            await asyncio.sleep(LOOK_S)
            backend = slot.backend
            if backend is None or not await _listens(backend.address):
                continue
            if slot.gate.is_lost and slot.generation == generation:
                log.info("slot_found id=%s generation=%d", slot.name, generation)
                slot.open()
                slot.give_places()
                self.changed(slot)

    def _blame(self, message: SlotCrashed) -> CrashBlame:
        slot = self._path.slots.pooled.get(message.id)
        if slot is None:
            return CrashBlame(agents=[])
        generation, known = self._blamed.get(slot.name, (0, None))
        if known is not None and generation == message.generation:
            return known  # asked twice: one crash is one mark
        now = time.monotonic()
        there = {
            one.agent
            for one in slot.line.owners
            if isinstance(one, Exchange) and one.is_sent and one.generation == message.generation
        }
        agents = sorted((there | slot.suspects.lost_at(message.generation, now)) - {OPERATOR, PREWARM, ""})
        slowed, refused = self._path.crash_marks.crashed(slot.name, agents, now)
        blame = CrashBlame(agents=agents, slowed=slowed, refused=refused)
        self._blamed[slot.name] = message.generation, blame
        log.warning("slot_crashed id=%s agents=%d slowed=%s refused=%s", slot.name, len(agents), slowed, refused)
        for exchange in [*waiting_for(self._path.registry, slot), *slot.suspects.held]:
            if isinstance(exchange, Exchange) and exchange.agent in (*slowed, *refused):
                exchange.hold_back()
        return blame

    # the daemon is gone -----------------------------------------------------------------------------------------------

    def daemon_lost(self) -> None:
        """Drains end without an answer; what is closed stays closed, and its requests wait for the next daemon."""
        for name in [*self._drains]:
            self._drains.pop(name).end()
        if self._alone is None and self._path.slots.pooled:
            self._alone = asyncio.get_running_loop().call_later(LOST_S, self._give_up)

    def _give_up(self) -> None:
        self._alone = None
        for slot in self._path.slots.pooled.values():
            if slot.gate.is_cold:
                log.error("slot_without_daemon id=%s waiting=%d", slot.name, slot.line.waiting)
                slot.close(Cold(slot.model, 0.0, never="Hive's daemon is not there to load it"))
                self._refuse_in_vain(slot)

    # what is told -----------------------------------------------------------------------------------------------------

    def changed(self, slot: Slot) -> None:
        """A request began to wait for a closed slot, or waits no more."""
        if self._due is None and (slot.line.waiting or slot.wish is not None or slot.name in self._told):
            loop = asyncio.get_running_loop()
            self._due = loop.call_at(max(loop.time() + FIRST_S, self._told_at + TELL_S), self._tell_demands)

    def idle(self, slot: Slot) -> None:
        """Nothing is at this slot's server any more: soon told if somebody waits for another one's load."""
        if self._told:
            self._flows.idle(slot)

    def _tell_demands(self) -> None:
        self._due = None
        self._told_at = asyncio.get_running_loop().time()
        now = time.monotonic()
        found = {slot.name: slot for slot in self._path.slots.pooled.values() if slot.gate.is_cold}
        waiting = {name: slot for name, slot in found.items() if slot.line.waiting or self._wished(slot, now)}
        told = {name: self._demand(slot, now) for name, slot in waiting.items()}
        gone = {name: self._no_demand(name) for name in self._told - told.keys()}
        self._told = set(told)
        if not told and not gone:
            return
        if told:
            self._flows.tell_now()  # what is in flight decides who may leave for them
        try:
            self._tell(SlotDemands(slots=told | gone))
        except LinkLost:
            self._told.clear()  # the next daemon is told all

    def _wished(self, slot: Slot, now: float) -> bool:
        """Whether a task would rather have this slot. That is looked at again when it is over."""
        if slot.wish is not None and now >= slot.wish.until:
            slot.wish = None
        if slot.wish is not None and self._wishes_due is None:
            loop = asyncio.get_running_loop()
            self._wishes_due = loop.call_later(slot.wish.until - now + FIRST_S, self._wishes_end)
        return slot.wish is not None

    def _wishes_end(self) -> None:
        self._wishes_due = None
        self._tell_demands()

    def _no_demand(self, name: str) -> SlotDemand:
        slot = self._path.slots.pooled.get(name)
        return SlotDemand(in_flight=0 if slot is None else slot.line.running, waiting=[])

    def _demand(self, slot: Slot, now: float) -> SlotDemand:
        requests = waiting_for(self._path.registry, slot)
        rows = [
            WaitingDemand(
                band=prepared.decided.wishes.band,
                tenant=prepared.decided.tenant.name,
                agent=prepared.entry.row.id,
                age_s=round(now - exchange.queued_at, 3),
                left_s=round(slot.gate.until_for(exchange.queued_at) - now, 3),
            )
            for exchange in requests[:TOLD_MAX]
            if (prepared := exchange.prepared) is not None
        ]
        if (wish := slot.wish) is not None:
            times = {"age_s": round(now - wish.since, 3), "left_s": round(wish.until - now, 3)}
            rows.append(WaitingDemand(band=Band.LOW, tenant=wish.tenant, agent=wish.agent, **times))
        return SlotDemand(in_flight=slot.line.running, waiting=rows, more=max(0, len(requests) - TOLD_MAX))


class _Knock(asyncio.Protocol):
    """A connection that is closed as soon as it is there."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


async def _listens(address: str) -> bool:
    try:
        async with asyncio.timeout(LOOK_S):
            await dial(address, _Knock)
    except (OSError, TimeoutError, HiveError):
        return False
    return True
