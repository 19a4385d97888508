"""The order of those who wait for memory, models and leases alike. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hive.pool.state import PoolFacts, SlotFacts, SlotState
from hive.pool.turns import BANDS, band_of, late_at

Rank = tuple[int, float, float, str]
"""A smaller one comes first."""


def rank(slot: SlotFacts, late: float, waited_s: float, now: float) -> Rank:
    """The place in the order: the late ones first, by when they became late (the patience of the high band is the
    shortest); then by band, then by the time all of them have waited together."""
    id = slot.id if slot.lease is None else f"~{slot.id}"  # after a model that came at the same moment
    if late <= now:
        return 0, late, 0.0, id
    return 1, float(BANDS[band_of(slot)]), -waited_s, id


def rank_now(slot: SlotFacts, facts: PoolFacts, now: float) -> Rank:
    """The same of a slot with all its demands."""
    waited_s = sum(now - demand.since for demand in slot.waiting)
    return rank(slot, late_at(slot, facts.rules), waited_s, now)


def lease_place(lease: SlotFacts) -> tuple[int, float, int]:
    """The place of a lease among leases: by its band, then by when it was asked for."""
    since = min((demand.since for demand in lease.waiting), default=0.0)
    return BANDS[lease.band], since, int(lease.id.rpartition("-")[2])


def in_order(slots: Sequence[SlotFacts], place: Callable[[SlotFacts], Rank]) -> list[tuple[Rank, SlotFacts]]:
    """Those who wait with their ranks, in their order: by `place`, but no lease before one of a higher band.

    A lease may wait for hours, so that nearly all of them are late: what makes models fair would leave bands without
    a meaning among them. One of a higher band passes no model by that; those of a lower band stand back.
    """
    ranks = {slot.id: place(slot) for slot in slots}
    last: Rank | None = None
    for lease in sorted((slot for slot in slots if slot.lease is not None), key=lease_place):
        last = ranks[lease.id] = ranks[lease.id] if last is None else max(last, ranks[lease.id])
    ordered = sorted(slots, key=lambda slot: (ranks[slot.id], lease_place(slot) if slot.lease is not None else ()))
    return [(ranks[slot.id], slot) for slot in ordered]


def lease_line(facts: PoolFacts) -> list[SlotFacts]:
    """The leases that wait, in their order.

    >>> from hive.domain import Band
    >>> from hive.pool.state import Demand, LeaseTerms
    >>> one, two, old = (
    ...     SlotFacts(id, id, 1, band=band, waiting=(Demand(band, since),), lease=LeaseTerms())
    ...     for id, band, since in (("l-1", Band.NORMAL, 95.0), ("l-2", Band.HIGH, 99.0), ("l-3", Band.LOW, 30.0))
    ... )
    >>> [slot.id for slot in lease_line(PoolFacts((one, two, old), ()))]
    ['l-2', 'l-1', 'l-3']
    """
    waiting = [slot for slot in facts.slots if slot.lease is not None and slot.waiting and slot.state is SlotState.COLD]
    return sorted(waiting, key=lease_place)
