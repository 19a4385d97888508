"""Slots that requests name: what is asked for and comes late, and whose a slot is."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from hive.domain import BackendInfo
from hive.errors import LinkLost, NotFound, TimedOut
from hive.link.parking import ParkedIs, ParkedOver, UseParked
from hive.routing.id_slots import IdSlots
from hive.routing.parked import ParkedPrompts, SlotPlace, asker_is_gone, restore_over, take_place
from tests.proxy.test_slots import pooled

GROUP = "tenant t"


def place_in(table: IdSlots, agent: str = "a") -> SlotPlace:
    place = take_place(table, agent, GROUP, is_kept=True)
    assert place is not None
    return place


@pytest.mark.parametrize("come", [TimedOut("late"), asyncio.CancelledError()], ids=["late", "client left"])
async def test_a_slot_is_kept_for_nobody_until_a_restore_that_nobody_waited_for_is_over(
    tmp_path: Path, come: BaseException
) -> None:
    async with pooled(tmp_path, "a") as pool:
        pool.tell(pool.row("a"))
        slot = pool.proxy.path.slots.pooled["a-1"]
        table = slot.id_slots = IdSlots(1)
        parked, asked = ParkedPrompts(), list[UseParked]()

        async def ask(message: UseParked) -> None:
            asked.append(message)
            raise come

        parked.ask = ask
        parked.learn(ParkedIs(agent="a", server="a-1", there=True, serial=7))
        place = place_in(table)
        try:
            await parked.use("a", slot, place, GROUP, is_kept=True)
        except asyncio.CancelledError:
            assert isinstance(come, asyncio.CancelledError)
        place.end(whole=True)
        assert table.last_of("a") is None
        restore_over([slot], ParkedOver(server="a-1", slot=0, serial=asked[0].serial + 1))
        assert table.slots[0].is_spoiled
        restore_over([slot], ParkedOver(server="a-1", slot=0, serial=asked[0].serial))
        assert (table.slots[0].is_spoiled, table.last_of("a")) == (False, None)
        again = place_in(table)
        again.end(whole=True)
        assert table.last_of("a") is not None


async def test_a_lost_daemon_spoils_a_slot_until_the_next_request_under_another_is_answered(tmp_path: Path) -> None:
    async with pooled(tmp_path, "a") as pool:
        pool.tell(pool.row("a"))
        slot = pool.proxy.path.slots.pooled["a-1"]
        table = slot.id_slots = IdSlots(1)
        parked = ParkedPrompts()

        async def ask(message: UseParked) -> None:
            raise LinkLost("the daemon is gone")

        parked.ask = ask
        parked.learn(ParkedIs(agent="a", server="a-1", there=True, serial=7))
        first = place_in(table)
        await parked.use("a", slot, first, GROUP, is_kept=True)
        asker_is_gone([slot])
        first.end(whole=True)
        assert table.last_of("a") is None, "that one was there before"
        place_in(table).end(whole=False)
        assert table.last_of("a") is None
        place_in(table).end(whole=True)
        assert table.last_of("a") is table.slots[0]


@pytest.mark.parametrize("come", [None, NotFound("gone")])
async def test_an_answer_in_time_spoils_nothing(tmp_path: Path, come: Exception | None) -> None:
    async with pooled(tmp_path, "a") as pool:
        pool.tell(pool.row("a"))
        slot = pool.proxy.path.slots.pooled["a-1"]
        table = slot.id_slots = IdSlots(1)
        parked = ParkedPrompts()

        async def ask(message: UseParked) -> None:
            restore_over([slot], ParkedOver(server="a-1", slot=0, serial=message.serial))
            if come is not None:
                raise come

        parked.ask = ask
        place = place_in(table)
        await parked.use("a", slot, place, GROUP, is_kept=True)
        place.end(whole=True)
        assert table.last_of("a") is table.slots[0]


@pytest.mark.parametrize("is_prewarmed", [False, True])
async def test_a_slot_is_its_own_only_as_it_was_saved(tmp_path: Path, is_prewarmed: bool) -> None:
    async with pooled(tmp_path, "a") as pool:
        pool.tell(pool.row("a"))
        slot = pool.proxy.path.slots.pooled["a-1"]
        table = slot.id_slots = IdSlots(1)
        parked, asked = ParkedPrompts(), list[UseParked]()

        async def ask(message: UseParked) -> None:
            asked.append(message)

        parked.ask = ask
        place_in(table).end(whole=True)
        saved = table.slots[0].serial
        parked.learn(ParkedIs(agent="a", server="a-1", there=True, serial=saved))
        if is_prewarmed:
            place_in(table).end(whole=True)
        await parked.use("a", slot, place_in(table), GROUP, is_kept=True)
        assert [one.is_own for one in asked] == [not is_prewarmed]


async def test_of_a_server_that_is_down_nothing_is_known(tmp_path: Path) -> None:
    async with pooled(tmp_path, "a") as pool:
        slot = pool.proxy.path.slots.active
        info = BackendInfo(kind="llama", address="127.0.0.1:1", up=True, id_slots=2)
        slot.use(info, [])
        assert slot.id_slots is not None
        table = slot.id_slots
        place_in(table).end(whole=True)
        slot.use(info, [])
        assert table.last_of("a") is not None
        slot.use(BackendInfo(kind="llama", address="127.0.0.1:1", up=False, id_slots=2), [])
        assert table.last_of("a") is None
