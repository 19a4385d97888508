"""Prompts that agents left in slots of a llama-server before they slept: put back for their first request after."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from hive.errors import HiveError, LinkLost, TimedOut
from hive.link.parking import ParkedIs, ParkedOver, SlotOf, UseParked
from hive.routing.id_slots import IdSlot, IdSlots
from hive.routing.slot import Slot

_NOWHERE = (None, 0)


class SlotPlace:
    """The slot of one request at a server."""

    __slots__ = ("is_whole", "table", "use", "was_unparked")

    def __init__(self, table: IdSlots, use: IdSlot) -> None:
        self.table = table
        self.use = use
        self.is_whole = self.was_unparked = False

    def __repr__(self) -> str:
        return f"<SlotPlace {self.use}>"

    def end(self, *, whole: bool) -> None:
        self.use.end(whole=whole)

    def named_in(self, pieces: list[bytes], size: int) -> tuple[int, list[bytes]]:
        """The length and the pieces of a body, an object with members, that names the slot besides.

        >>> SlotPlace(table := IdSlots(1), table.slots[0]).named_in([b'{"a":1}'], 7)
        (19, [b'{"id_slot":0,"a":1}'])
        """
        named = b'{"id_slot":%d,' % self.use.id
        return size + len(named) - 1, [named + pieces[0][1:], *pieces[1:]]


def take_place(table: IdSlots, agent: str, group: str, *, is_kept: bool) -> SlotPlace | None:
    """A place for a request that begins; None where the server chooses, as all slots are busy."""
    use = table.take(agent, group, is_kept=is_kept)
    return None if use is None else SlotPlace(table, use)


def slot_of(slots: Iterable[Slot], agent: str) -> SlotOf | None:
    """The slot in which this agent's prompt is, of the server that moved last; None where it is in none."""
    best: tuple[float, SlotOf] | None = None
    for slot in slots:
        use = None if slot.id_slots is None else slot.id_slots.last_of(agent)
        if use is None or slot.backend is None or (best is not None and best[0] >= slot.moved_at):
            continue
        address = slot.backend.address
        found = SlotOf(server=slot.name, address=address, slot=use.id, serial=use.serial, group=use.group)
        best = slot.moved_at, found
    return None if best is None else best[1]


def restore_over(slots: Iterable[Slot], told: ParkedOver) -> None:
    for slot in slots:
        if slot.name == told.server and slot.id_slots is not None and told.slot < len(slot.id_slots.slots):
            slot.id_slots.slots[told.slot].restore_over(told.serial)


def asker_is_gone(slots: Iterable[Slot]) -> None:
    """Waits no longer for word of restores: the daemon is another one, or the link was lost meanwhile."""
    for slot in slots:
        for use in () if slot.id_slots is None else slot.id_slots.slots:
            use.asker_is_gone()


class ParkedPrompts:
    """The agents that left something on the disk; at which server, and the serial number of the slot then."""

    def __init__(self) -> None:
        self._at: dict[str, tuple[str, int]] = {}
        self.ask: Callable[[UseParked], Awaitable[None]] | None = None

    def __repr__(self) -> str:
        return f"<ParkedPrompts of {len(self._at)}>"

    def learn(self, told: ParkedIs) -> None:
        if told.there:
            self._at[told.agent] = told.server, told.serial
        else:
            self._at.pop(told.agent, None)

    def clear(self) -> None:
        self._at.clear()

    def is_at(self, agent: str, server: str) -> bool:
        return self._at.get(agent, _NOWHERE)[0] == server

    async def use(self, agent: str, slot: Slot, place: SlotPlace, group: str, *, is_kept: bool) -> None:
        """Returns once what the agent left is in the request's slot, or will not be. Never raises."""
        _, serial = self._at.pop(agent, _NOWHERE)
        place.was_unparked = True
        use, ask, backend = place.use, self.ask, slot.backend
        if ask is None or backend is None:
            return
        message = UseParked(
            agent=agent,
            server=slot.name,
            address=backend.address,
            slot=use.id,
            serial=use.serial,
            group=group,
            is_own=bool(serial) and use.is_of(agent, group) and use.before == serial,
            is_kept=is_kept,
        )
        use.restore_begins()
        try:
            await ask(message)
        except (LinkLost, TimedOut):  # it may still come, into whatever is there then
            use.spoil(message.serial)
        except asyncio.CancelledError:
            use.spoil(message.serial)
            raise
        except HiveError:  # the daemon has said why
            use.restored(message.serial)
        else:
            use.restored(message.serial)
