"""The demand that a load is for: its tenant is charged the seconds that the load takes. Pure."""

from __future__ import annotations

from hive.pool.state import Demand, Rules, SlotFacts
from hive.pool.turns import patience_s


def load_cause(slot: SlotFacts, rules: Rules) -> Demand | None:
    """The demand that becomes late first of those for which a slot is loaded: by it the load has its place in line.

    None where nobody asked: a pinned model is loaded anyway, and so is one that an operator has ordered, if the order
    is the first.

    >>> from hive.domain import Band
    >>> ann, ben = Demand(Band.NORMAL, 3.0, 90.0, "acme", "ann"), Demand(Band.HIGH, 4.0, 90.0, "other", "ben")
    >>> load_cause(SlotFacts("a", "m", 1, waiting=(ann, ben)), Rules()).tenant
    'other'
    >>> load_cause(SlotFacts("a", "m", 1, waiting=(ann,), pinned_at=0.0), Rules()) is None
    True
    >>> load_cause(SlotFacts("a", "m", 1, waiting=(Demand(Band.NORMAL, 1.0), ann)), Rules()) is None
    True
    """
    if slot.pinned_at is not None or not slot.waiting:
        return None
    first = min(slot.waiting, key=lambda demand: demand.since + patience_s(demand.band, rules))
    return None if first.deadline is None else first
