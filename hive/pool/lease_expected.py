"""The time at which each lease in line is expected, by what is known now, and what it waits for in words. Pure.

As expected.py for models: the best that can come. Those before it in the line are taken to be granted when they are
expected, and to last as long as they may; behind one that has no end nothing can be said.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from hive.pool.expected import expected_in_s
from hive.pool.line_order import lease_line
from hive.pool.outlook import Outlook
from hive.pool.placement import permitted_accounts
from hive.pool.state import Grant, PoolFacts, SlotFacts, SlotState
from hive.pool.turns import NEVER


def expected_line(facts: PoolFacts, now: float, *, most: int = 1000) -> dict[str, float | None]:
    """Seconds until each of the first `most` leases in line is granted, by id; None where that cannot be said.

    >>> from hive.domain import Band
    >>> from hive.pool.state import Demand, LeaseTerms, MemoryAccount
    >>> def job(number: int, bytes: int, **terms: object) -> SlotFacts:
    ...     wants, demand = LeaseTerms(is_whole=True, **terms), Demand(Band.NORMAL, float(number))
    ...     return SlotFacts(f"l-{number}", "", bytes, load_s=0.0, unload_s=0.0, waiting=(demand,), lease=wants)
    >>> line = job(1, 60, max_s=30.0), job(2, 70, max_s=5.0), job(3, 30)
    >>> gpu = MemoryAccount("gpu", 100, reserve_bytes=0)
    >>> expected_line(PoolFacts(line, (gpu,)), 4.0)
    {'l-1': 0.0, 'l-2': 30.0, 'l-3': 30.0}
    >>> expected_line(PoolFacts((job(1, 60), *line[1:]), (gpu,)), 4.0)
    {'l-1': 0.0, 'l-2': None, 'l-3': None}
    """
    found: dict[str, float | None] = {}
    for lease in lease_line(facts)[:most]:
        in_s = expected_in_s(facts, lease.id, now) if None not in found.values() else None
        if in_s is not None and found:
            in_s = max(in_s, *(before for before in found.values() if before is not None))
        found[lease.id] = in_s
        if in_s is not None:
            facts = _granted(facts, lease, now, now + in_s)
    return found


def _granted(facts: PoolFacts, lease: SlotFacts, now: float, at: float) -> PoolFacts:
    """The facts once the lease has its memory, and those who leave for it have left."""
    outlook = Outlook(facts, now)
    grants, gone = outlook.fitting(lease), set[str]()
    if grants is None:
        eviction = outlook.eviction(lease, by=now, blocked=False) or outlook.soonest(lease)
        if eviction is None:
            return facts
        grants = tuple(Grant(account, lease.need_bytes) for account in eviction.site.accounts)
        gone = {option.slot for option in eviction.options}
    until = None if lease.lease is None or lease.lease.max_s is None else at + lease.lease.max_s
    held = msgspec.structs.replace(
        lease,
        state=SlotState.READY,
        waiting=(),
        grants=grants,
        lease=None if lease.lease is None else msgspec.structs.replace(lease.lease, until=until, begun_at=at),
    )
    slots = []
    for slot in facts.slots:
        if slot.id == lease.id:
            slots.append(held)
        elif slot.id not in gone:
            slots.append(slot)
        elif slot.lease is None:
            slots.append(msgspec.structs.replace(slot, state=SlotState.COLD, grants=()))
    return msgspec.structs.replace(facts, slots=tuple(slots))


def why_waiting(facts: PoolFacts, lease: SlotFacts, before: Sequence[str], now: float) -> str:
    """The reason for which a lease waits, a clause. `before`: those before it in the line.

    >>> from hive.domain import Band
    >>> from hive.pool.state import Demand, LeaseTerms, MemoryAccount
    >>> old = SlotFacts("a", "a", 60, state=SlotState.READY, grants=(Grant("gpu", 60),), load_s=9.0, in_flight=1)
    >>> wants, demand = LeaseTerms(is_whole=True), Demand(Band.NORMAL, 0.0)
    >>> job = SlotFacts("l-1", "", 70, load_s=0.0, unload_s=0.0, waiting=(demand,), lease=wants)
    >>> facts = PoolFacts((old, job), (MemoryAccount("gpu", 100, reserve_bytes=0),))
    >>> why_waiting(facts, job, [], 0.0)
    'a is in its way'
    >>> why_waiting(facts, job, ["l-0"], 0.0)
    '1 lease is before it'
    """
    claim = next((claim for claim in facts.claims if claim.slot == lease.id), None)
    if claim is not None:
        names = [slot.model for slot in facts.slots if slot.id in {leaving.slot for leaving in claim.leaving}]
        return f"room is being made for it: {', '.join(names)} leaves" if names else "it is granted now"
    if facts.exclusive is not None:
        return f"the backend is being switched to {facts.exclusive.kind}"
    if before:
        return f"{len(before)} lease{' is' if len(before) == 1 else 's are'} before it"
    outlook = Outlook(facts, now)
    soonest = outlook.soonest(lease)
    if soonest is not None and soonest.options:
        times = outlook.leave_times(lease)
        names = [outlook.slots[option.slot].model for option in sorted(soonest.options, key=lambda o: times[o.slot])]
        return f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} in its way"
    here = permitted_accounts(lease, facts.accounts)
    endless = [
        slot.model for slot in outlook.endless_leases(lease) if any(grant.account in here for grant in slot.grants)
    ]
    if soonest is None and endless:
        return f"{', '.join(endless)} {'is' if len(endless) == 1 else 'are'} in its way, and no end is known"
    if outlook.moving:
        return "a model is being loaded or unloaded where it would be"
    if soonest is None or soonest.at >= NEVER:
        return "memory that is not the pool's is in its way"
    return "models that wait are before it"
