"""A swap: one model is loaded in the place of another one, which comes back if that fails. Pure.

It is one reservation: what the model that leaves had is given to nobody else until the one that comes serves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hive.pool.outlook import Outlook, freed_by, rise_of
from hive.pool.placement import permitted_accounts, place
from hive.pool.state import Grant, PoolFacts, SlotFacts, SlotState


def swap_grants(facts: PoolFacts, coming: str, leaving: str, now: float) -> tuple[Grant, ...] | None:
    """The charges of the model that comes once the other one has left; None where it does not fit then.

    A model that fits where the other one is goes there, whatever else is free.

    >>> from hive.pool.state import MemoryAccount
    >>> old = SlotFacts("old", "a", 60, state=SlotState.READY, grants=(Grant("x", 60),))
    >>> gpus = (MemoryAccount("x", 100, reserve_bytes=0), MemoryAccount("y", 50, reserve_bytes=0))
    >>> def grants(need):
    ...     return swap_grants(PoolFacts((old, SlotFacts("new", "b", need)), gpus), "new", "old", 0.0)
    >>> grants(90), grants(40), grants(2000)
    ((Grant(account='x', charged_bytes=90, measured_bytes=None),), (Grant(account='x', charged_bytes=40, \
measured_bytes=None),), None)
    """
    outlook = Outlook(facts, now)
    new, old = outlook.slots[coming], outlook.slots[leaving]
    free = room_after(outlook, new, old)
    if new.state is SlotState.ASLEEP:
        return new.awake if all(bytes <= free.get(account, 0) for account, bytes in rise_of(new)) else None
    own = {account: free[account] for account in free if account in freed_by(old, "")}
    margin = facts.rules.split_margin_bytes
    return place(new.need_bytes, own, margin) or place(new.need_bytes, free, margin)


def room_after(outlook: Outlook, new: SlotFacts, old: SlotFacts) -> dict[str, int]:
    """Bytes free in each account that the new one may have, once the old one has left."""
    freed = freed_by(old, "")
    return {
        account: outlook.free[account] + freed.get(account, 0)
        for account in permitted_accounts(new, outlook.facts.accounts)
    }


def kept_back(before: Sequence[Grant], now_held: Mapping[str, int]) -> tuple[Grant, ...]:
    """The charges that are left of the place of a model that has gone, while the new one holds `now_held` of it.

    >>> kept_back((Grant("x", 60), Grant("y", 10)), {"x": 40, "y": 20})
    (Grant(account='x', charged_bytes=20, measured_bytes=0),)
    """
    rest = {grant.account: grant.charged_bytes - now_held.get(grant.account, 0) for grant in before}
    return tuple(Grant(account, bytes, 0) for account, bytes in rest.items() if bytes > 0)
