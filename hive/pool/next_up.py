"""The slot that is most probably loaded next: a supervisor of it may wait prepared. Pure."""

from __future__ import annotations

from collections.abc import Container

from hive.pool.state import PoolFacts, SlotFacts, SlotState

RECENT_S = 600.0
"""A model that nobody has used for so long is not expected back."""


def next_up(facts: PoolFacts, now: float, among: Container[str]) -> str:
    """The id of that slot, empty for none. `among`: those whose supervisors can wait.

    The one that room is being made for; else, of those that could be loaded again, the one used last. It costs no
    memory of an account, so it is only a guess: a wrong one costs the time that no guess had cost.

    >>> left = SlotFacts(id="a", model="a", need_bytes=1, used_at=90.0)
    >>> here = SlotFacts(id="b", model="b", need_bytes=1, used_at=99.0, state=SlotState.READY)
    >>> next_up(PoolFacts(slots=(left, here), accounts=()), 100.0, "ab")
    'a'
    >>> next_up(PoolFacts(slots=(left, here), accounts=()), 1000.0, "ab")
    ''
    """
    if facts.exclusive is not None:
        return ""  # a switch: no model moves meanwhile
    slots = {slot.id: slot for slot in facts.slots if slot.id in among and _may_come(slot, now)}
    for claim in facts.claims:
        if claim.slot in slots:
            return claim.slot
    asked = [slot for slot in slots.values() if slot.waiting]
    if asked:
        return min(asked, key=lambda slot: min(demand.since for demand in slot.waiting)).id
    known = [slot for slot in slots.values() if slot.used_at and now - slot.used_at < RECENT_S]
    return max(known, key=lambda slot: slot.used_at).id if known else ""


def _may_come(slot: SlotFacts, now: float) -> bool:
    return slot.state is SlotState.COLD and slot.retry_at <= now
