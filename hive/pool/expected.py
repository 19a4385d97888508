"""The time at which a model is expected, by what is known now. Pure.

The bound (bound.py) is the worst that can come, and is printed; this is the best, and decides whether a wait can hold
at all: a request is refused at once only if not even the best is soon enough.
"""

from __future__ import annotations

import msgspec

from hive.domain import Band
from hive.pool.outlook import Outlook, has_left
from hive.pool.state import Demand, PoolFacts, SlotFacts, SlotState
from hive.pool.turns import NEVER


def expected_in_s(facts: PoolFacts, id: str, now: float) -> float | None:
    """Seconds until the slot `id` is ready for a request that waits now, if all goes well; None if that cannot be said:
    its loads have failed, or nothing that is in its way may ever leave.

    >>> from hive.pool.state import Grant, MemoryAccount
    >>> old = SlotFacts("old", "a", 60, state=SlotState.READY, grants=(Grant("gpu", 60),), load_s=9.0, in_flight=1)
    >>> facts = PoolFacts((old, SlotFacts("new", "b", 70, load_s=9.0)), (MemoryAccount("gpu", 100, reserve_bytes=0),))
    >>> expected_in_s(facts, "new", 0.0)  # the turn of a, its unload, the load of b
    73.5
    >>> expected_in_s(facts, "old", 0.0)
    0.0
    >>> idle = msgspec.structs.replace(old, in_flight=0)
    >>> expected_in_s(msgspec.structs.replace(facts, slots=(idle, facts.slots[1])), "new", 0.0)
    10.5
    """
    slot = facts.slot(id)
    if slot.state is SlotState.READY:
        return 0.0
    if slot.state is SlotState.LOADING:
        return max(0.0, slot.moved_at + slot.reload_s - now)
    if slot.state is SlotState.FAILED or facts.exclusive is not None:
        return None
    begin_at = max(now, slot.retry_at, _moves_end_at(facts, now))
    if slot.state in (SlotState.DRAINING, SlotState.STOPPING):
        return begin_at + slot.unload_s + slot.load_s - now
    room_at = _room_at(facts, slot, now)
    return None if room_at >= NEVER else max(begin_at, room_at) + slot.reload_s - now


def _moves_end_at(facts: PoolFacts, now: float) -> float:
    """The end of the moves of memory that are under way. One may be elsewhere; it is not waited for long then."""
    ends = [now]
    for slot in facts.slots:
        if slot.state is SlotState.STOPPING and slot.lease is None:
            ends.append(slot.moved_at + slot.unload_s)
    return max(ends)


def _room_at(facts: PoolFacts, slot: SlotFacts, now: float) -> float:
    """The time at which the memory for a load may be free."""
    asked = slot if slot.waiting else msgspec.structs.replace(slot, waiting=(Demand(Band.NORMAL, now),))
    others = tuple(asked if other.id == slot.id else other for other in facts.slots)
    outlook = Outlook(msgspec.structs.replace(facts, slots=others), now)
    own = next((claim for claim in facts.claims if claim.slot == slot.id), None)
    if own is not None:
        victims = [outlook.slots[leaving.slot] for leaving in own.leaving if leaving.slot in outlook.slots]
        staying = [
            victim for victim, leaving in zip(victims, own.leaving, strict=False) if not has_left(victim, leaving)
        ]
        return now + max((victim.unload_s for victim in staying), default=0.0)
    if outlook.fitting(asked) is not None:
        return now
    eviction = outlook.eviction(asked, by=now, blocked=False) or outlook.soonest(asked)
    if eviction is None:
        return NEVER
    unload_s = max((outlook.slots[option.slot].unload_s for option in eviction.options), default=0.0)
    return max(now, eviction.at) + unload_s
