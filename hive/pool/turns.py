"""The turn of a loaded model, the patience of those who wait, and the back-off after failures. Pure.

A turn has to pay for its swap: `(load in + load back) x (1 - share) / share` seconds. So `swap_share` bounds the time
lost to loading, and turned round it bounds everybody's wait.
"""

from __future__ import annotations

from hive.domain import Band
from hive.pool.state import Rules, SlotFacts, SlotState

BANDS = {Band.HIGH: 0, Band.NORMAL: 1, Band.LOW: 2}
NEVER = float("inf")


def patience_s(band: Band, rules: Rules) -> float:
    """Seconds that a demand waits before it is late.

    >>> [patience_s(band, Rules()) for band in Band]
    [2.0, 10.0, 60.0]
    """
    return (rules.patience_high_s, rules.patience_normal_s, rules.patience_low_s)[BANDS[band]]


def late_at(slot: SlotFacts, rules: Rules) -> float:
    """The time at which the first of a slot's demands is late; a pin without a demand has the patience of
    the low band.

    >>> from hive.pool.state import Demand
    >>> late_at(SlotFacts("a", "m", 1, waiting=(Demand(Band.LOW, 0.0), Demand(Band.NORMAL, 20.0))), Rules())
    30.0
    """
    times = [demand.since + patience_s(demand.band, rules) for demand in slot.waiting]
    if slot.pinned_at is not None:
        times.append(slot.pinned_at + rules.patience_low_s)
    return min(times, default=NEVER)


def band_of(slot: SlotFacts) -> Band:
    """The highest band among a slot's demands."""
    return min((demand.band for demand in slot.waiting), key=BANDS.__getitem__, default=Band.LOW)


def turn_s(load_in_s: float, load_back_s: float, share: float) -> float:
    """Seconds that a loaded model keeps its memory against one that is late.

    >>> turn_s(24.0, 24.0, 0.25), turn_s(24.0, 24.0, 0.5)
    (144.0, 48.0)
    """
    return (load_in_s + load_back_s) * (1 - share) / share


def turn_ends_at(victim: SlotFacts, claimant: SlotFacts, rules: Rules) -> float:
    """The end of a victim's turn against a claimant: an unload is a part of what a swap costs. Demands of the high band
    may lose more time to loading."""
    share = rules.swap_share_high if band_of(claimant) is Band.HIGH else rules.swap_share
    load_in_s, load_back_s = claimant.reload_s + victim.unload_s, victim.load_s + claimant.unload_s
    return victim.ready_at + turn_s(load_in_s, load_back_s, share)


def kept_until(victim: SlotFacts, claimant: SlotFacts, rules: Rules) -> float:
    """The end of a victim's time of keep alive against a claimant.

    It protects a model that idles, and never longer than a late demand of its own or a higher band waits for its turn.
    Against a lower band it holds until `keep_alive_s` after that became late: so a use that renews it bounds the wait
    all the same.

    >>> from hive.pool.state import Demand
    >>> kept = SlotFacts("v", "m", 1, used_at=90.0, keep_alive_s=300.0)
    >>> [kept_until(kept, SlotFacts("c", "n", 1, waiting=(Demand(band, 0.0),)), Rules()) for band in Band]
    [2.0, 10.0, 360.0]
    """
    if not victim.keep_alive_s:
        return 0.0
    late = late_at(claimant, rules)
    higher = BANDS[band_of(claimant)] <= BANDS[victim.band]
    return min(victim.used_at + victim.keep_alive_s, late if higher else late + victim.keep_alive_s)


def may_leave_at(victim: SlotFacts, claimant: SlotFacts, rules: Rules, now: float) -> float:
    """The time from which a victim may be asked to leave for a claimant, as far as is known now; NEVER if it may not.

    Idle, without an audience and not kept: at once. Else after its turn, and once somebody of the claimant is late.
    """
    if victim.lease is not None:
        return lease_leaves_at(victim, claimant, rules)
    if victim.pinned_at is not None:
        return NEVER
    if victim.state is SlotState.ASLEEP:
        return late_at(claimant, rules) if victim.waiting else 0.0
    if victim.state is not SlotState.READY or not victim.settled:
        return NEVER
    kept = kept_until(victim, claimant, rules)
    after_turn = max(turn_ends_at(victim, claimant, rules), late_at(claimant, rules), kept)
    if victim.in_flight:
        return after_turn
    alone = max(kept, 0.0 if victim.audience.is_empty(now) else victim.audience.ends_at)
    return min(after_turn, alone)


def may_be_ended(lease: SlotFacts, claimant: SlotFacts) -> bool:
    """Whether a lease may be ended for a claimant at all: a preemptible one for a model, or for one of a higher band.

    >>> from hive.pool.state import Demand, LeaseTerms
    >>> job = SlotFacts("l-1", "l-1", 1, lease=LeaseTerms(preemptible=True))
    >>> late, same = SlotFacts("m", "m", 1), SlotFacts("l-2", "l-2", 1, lease=LeaseTerms())
    >>> high = SlotFacts("l-3", "l-3", 1, lease=LeaseTerms(), waiting=(Demand(Band.HIGH, 0.0),))
    >>> [may_be_ended(job, claimant) for claimant in (late, same, high)], may_be_ended(same, high)
    ([True, False, True], False)
    """
    if lease.lease is None or not lease.lease.preemptible:
        return False
    return claimant.lease is None or _is_higher(claimant, lease)


def _is_higher(claimant: SlotFacts, lease: SlotFacts) -> bool:
    return BANDS[band_of(claimant)] < BANDS[lease.band]


def lease_leaves_at(lease: SlotFacts, claimant: SlotFacts, rules: Rules) -> float:
    """The time from which a lease may be asked to leave for a claimant, or ends by itself at the latest; NEVER if
    neither has an end.

    One of a higher band ends it at once, a model of its own or a lower one once it is late, and its turn is over.
    """
    if lease.lease is None or lease.state is SlotState.STOPPING:
        return NEVER
    ends_at = NEVER if lease.lease.until is None else lease.lease.until
    if not may_be_ended(lease, claimant) or lease.state not in (SlotState.READY, SlotState.LOADING):
        return ends_at
    if _is_higher(claimant, lease):
        return min(ends_at, 0.0)
    return min(ends_at, max(late_at(claimant, rules), lease_turn_ends_at(lease, claimant, rules)))


def lease_turn_ends_at(lease: SlotFacts, claimant: SlotFacts, rules: Rules) -> float:
    """The end of a preemptible lease's turn: it pays for the load that takes its place, or room would be made for it
    only to be taken away."""
    begun_at = 0.0 if lease.lease is None or lease.lease.begun_at is None else lease.lease.begun_at
    return begun_at + turn_s(claimant.reload_s, 0.0, rules.swap_share)


def after_failure(failures: int, now: float, rules: Rules) -> tuple[SlotState, float]:
    """(state, when to try again) after so many failed loads in a row.

    >>> [after_failure(failures, 0.0, Rules()) for failures in (1, 2, 3, 4)] # doctest: +NORMALIZE_WHITESPACE
    [(<SlotState.COLD: 'cold'>, 60.0), (<SlotState.COLD: 'cold'>, 300.0), (<SlotState.COLD: 'cold'>, 900.0),
     (<SlotState.FAILED: 'failed'>, inf)]
    """
    if failures > len(rules.backoff_s):
        return SlotState.FAILED, NEVER
    return SlotState.COLD, now + rules.backoff_s[failures - 1]
