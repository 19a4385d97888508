"""The longest wait for a model that is not loaded, as a figure that can be printed and kept. Pure.

A wait has an end because of four things: a demand becomes late; the late ones are served in the order in which they
became late; an account that a late one waits for is kept for it; and a turn, a drain and a load each have an end. The
bound is their sum for the worst future, if loads take no longer than they are known to. It is void if an operator pins
a model, or orders a load or a switch, if a load fails, if foreign memory comes, or if a lease of a higher band does.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from hive.domain import Band
from hive.pool.line_order import lease_place
from hive.pool.outlook import MOVING, STARTABLE, Outlook, blocked_by, is_asked
from hive.pool.placement import permitted_accounts
from hive.pool.state import Demand, PoolFacts, Rules, SlotFacts, SlotState
from hive.pool.turns import BANDS, band_of, late_at, lease_turn_ends_at, patience_s, turn_ends_at, turn_s


class BoundPart(NamedTuple):
    """One summand of a bound."""

    what: str
    seconds: float


class WaitingBound(msgspec.Struct, frozen=True):
    """The bound of one wait. `seconds`: None if it has no end; then `blocked` says by what."""

    seconds: float | None
    parts: tuple[BoundPart, ...] = ()
    blocked: str = ""


def waiting_bound(facts: PoolFacts, id: str, demand: Demand, now: float) -> WaitingBound:
    """The longest that `demand` has to wait for the slot `id`, from `now`.

    >>> from hive.pool.state import Grant, MemoryAccount
    >>> old = SlotFacts("old", "a", 60, state=SlotState.READY, grants=(Grant("gpu", 60),), load_s=9.0, in_flight=1)
    >>> facts = PoolFacts((old, SlotFacts("new", "b", 70, load_s=9.0)), (MemoryAccount("gpu", 100, reserve_bytes=0),))
    >>> bound = waiting_bound(facts, "new", Demand(Band.NORMAL, 0.0), 0.0)
    >>> print(bound.seconds, *bound.parts, sep="\\n") # doctest: +NORMALIZE_WHITESPACE
    148.5
    BoundPart(what='turn of a', seconds=63.0)
    BoundPart(what='requests in flight at a', seconds=65.0)
    BoundPart(what='unload of a', seconds=11.5)
    BoundPart(what='load of b', seconds=9.0)

    >>> pinned = msgspec.structs.replace(old, pinned_at=0.0)
    >>> waiting_bound(msgspec.structs.replace(facts, slots=(pinned, facts.slots[1])), "new", Demand(Band.LOW, 0.0), 0.0)
    WaitingBound(seconds=None, parts=(), blocked='b does not fit beside what is pinned: a')
    """
    slot = facts.slot(id)
    if facts.exclusive is not None and slot.state not in (SlotState.READY, SlotState.LOADING):
        return WaitingBound(None, blocked=f"the backend is being switched to {facts.exclusive.kind}")
    if slot.state is SlotState.READY and slot.settled:
        return WaitingBound(0.0)
    if slot.state is SlotState.FAILED:
        return WaitingBound(None, blocked=f"the loads of {slot.model} have failed")
    if slot.state is SlotState.READY or slot.state is SlotState.LOADING:
        return _sum([BoundPart(f"load of {slot.model}", max(0.0, slot.moved_at + slot.load_s - now))])
    if demand not in slot.waiting:
        slot = msgspec.structs.replace(slot, waiting=(*slot.waiting, demand))
    outlook = Outlook(_with(facts, slot), now)
    rivals = _rivals(facts, slot)
    leases = _LeasesInTheWay(outlook, slot, demand)
    if not rivals and not leases and slot.state in STARTABLE and outlook.fitting(slot) is not None:
        return _sum([*_retry(slot, now), BoundPart(f"load of {slot.model}", slot.reload_s)])
    alone = msgspec.structs.replace(slot, waiting=(demand,), level="")  # a rival may end it while it sleeps
    load = BoundPart(f"load of {slot.model}", slot.load_s)
    if not outlook.could_have(slot, pins_to_come=True, beside=leases.endless):
        return WaitingBound(None, blocked=leases.blocked or blocked_by(outlook, slot))
    rules = facts.rules
    parts = [*_retry(slot, now), *leases.parts(rivals)]
    if slot.lease is not None and not slot.lease.preemptible:
        for model in leases.models_before():
            first = waiting_bound(facts, model.id, min(model.waiting, key=lambda asked: asked.since), now)
            if first.seconds is None:
                continue  # it is refused
            parts.append(BoundPart(f"{model.model}, which is before it, is loaded", first.seconds))
    in_line = [lease for lease in leases.ahead if slot.lease is not None and lease_place(lease) < lease_place(slot)]
    if in_line:
        before = max(in_line, key=lease_place)
        first = waiting_bound(facts, before.id, before.waiting[0], now)
        if first.seconds is None:
            return WaitingBound(None, blocked=f"{before.model} is before it: {first.blocked}")
        parts.append(BoundPart(f"{before.model}, which is before it, is granted", first.seconds))
    late_s = max(0.0, demand.since + patience_s(demand.band, rules) - now)
    if len(rivals) < 2:
        return _sum([*parts, *_against_one(facts, alone, rivals, late_s, now, may_come=bool(leases)), load])
    parts.append(BoundPart("until it is late", late_s))
    if _is_alone_away(facts, slot):
        return _sum([*parts, BoundPart(f"turns of others, load of {slot.model}", _cycle_s(alone, rivals, slot, rules))])
    pinned = [other.load_s for other in facts.slots if other.pinned_at is not None and other.state in MOVING]
    parts.append(BoundPart("the move of what is pinned", max(pinned, default=0.0)))
    longest = max(_cycle_s(rival, rivals, slot, rules) for rival in rivals)
    parts.append(BoundPart("a load begun before", longest))
    for rival in rivals:
        if _may_be_ahead(rival, alone, rules):
            parts.append(BoundPart(f"turns and load of {rival.model}", _cycle_s(rival, rivals, slot, rules)))
    parts.append(BoundPart(f"turns of others, load of {slot.model}", _cycle_s(alone, rivals, slot, rules)))
    return _sum(parts)


def _sum(parts: list[BoundPart]) -> WaitingBound:
    kept = tuple(part for part in parts if part.seconds > 0)
    return WaitingBound(sum(part.seconds for part in kept), kept)


def _with(facts: PoolFacts, slot: SlotFacts) -> PoolFacts:
    slots = tuple(slot if other.id == slot.id else other for other in facts.slots)
    return msgspec.structs.replace(facts, slots=slots)


def _retry(slot: SlotFacts, now: float) -> list[BoundPart]:
    return [BoundPart("until the next try after a failed load", max(0.0, slot.retry_at - now))]


def _rivals(facts: PoolFacts, slot: SlotFacts) -> list[SlotFacts]:
    """The models that may have memory where the slot may be placed, and may have to leave it."""
    here = set(permitted_accounts(slot, facts.accounts))
    rivals = []
    for other in facts.slots:
        is_held = other.pinned_at is not None and other.grants
        if other.id == slot.id or other.state is SlotState.FAILED or is_held or other.lease is not None:
            continue
        if here.intersection(permitted_accounts(other, facts.accounts)):
            rivals.append(other)
    return rivals


def _is_alone_away(facts: PoolFacts, slot: SlotFacts) -> bool:
    """Whether all others are loaded and stay until they have to leave for it: then nobody can be before it in line."""
    others = [other for other in facts.slots if other.id != slot.id]
    are_loaded = all(other.state is SlotState.READY and other.lease is None for other in others)
    return are_loaded and slot.lease is None and slot.state is SlotState.COLD and not facts.rules.unload_idle


def _may_be_ahead(rival: SlotFacts, alone: SlotFacts, rules: Rules) -> bool:
    """Whether the rival may be late before it: because it is asked for already, or by a higher band until then."""
    return late_at(rival, rules) <= late_at(alone, rules) or BANDS[band_of(alone)] > BANDS[Band.HIGH]


def _drain_s(rules: Rules) -> float:
    return rules.drain_s + rules.cut_s


def _kept_s(victim: SlotFacts, claimant: SlotFacts) -> float:
    """The keep-alive that holds against a lower band."""
    return victim.keep_alive_s if BANDS[band_of(claimant)] > BANDS[Band.HIGH] else 0.0


def _cycle_s(claimant: SlotFacts, rivals: list[SlotFacts], slot: SlotFacts, rules: Rules) -> float:
    """The longest from the moment the claimant is the first in line until it is loaded, whatever is resident then."""
    share = rules.swap_share
    others = [rival for rival in (*rivals, slot) if rival.id != claimant.id]
    turn = max(
        turn_s(claimant.load_s + other.unload_s, other.load_s + claimant.unload_s, share) + _kept_s(other, claimant)
        for other in others
    )
    gap = max(other.load_s for other in others)
    leave = sum(other.unload_s + rules.free_s for other in others)
    return turn + _drain_s(rules) + gap + leave + claimant.load_s


def _against_one(
    facts: PoolFacts, slot: SlotFacts, rivals: list[SlotFacts], late_s: float, now: float, *, may_come: bool
) -> list[BoundPart]:
    """The parts where at most one other model is in the way: what is known of it now holds until it leaves.

    `may_come`: one that is not loaded may be loaded first, since a lease keeps the slot from it until then.
    """
    rules, parts = facts.rules, []
    leave_s = 0.0
    for moving in facts.slots:
        if moving.state in MOVING and moving.lease is None:
            took = moving.load_s if moving.state is SlotState.LOADING else moving.unload_s + rules.free_s
            parts.append(BoundPart(f"the move of {moving.model}", max(0.0, moving.moved_at + took - now)))
        if moving.id == slot.id and moving.state is SlotState.DRAINING:
            leave_s += _drain_s(rules) + moving.unload_s + rules.free_s
    for rival in rivals:
        is_away = not rival.grants and not rival.waiting and rival.pinned_at is None
        if is_away and not may_come and slot.state is SlotState.COLD and slot.retry_at <= now:
            continue
        if rival.state in (SlotState.READY, SlotState.DRAINING):
            turn = max(0.0, turn_ends_at(rival, slot, rules) - now, late_s)
        else:
            turn = turn_s(slot.load_s + rival.unload_s, rival.load_s + slot.unload_s, rules.swap_share) + late_s
            parts.append(BoundPart(f"load of {rival.model}", rival.load_s))
        parts.append(BoundPart(f"turn of {rival.model}", turn + _kept_s(rival, slot) * bool(rival.keep_alive_s)))
        parts.append(BoundPart(f"requests in flight at {rival.model}", _drain_s(rules)))
        parts.append(BoundPart(f"unload of {rival.model}", rival.unload_s + rules.free_s))
    parts.append(BoundPart(f"{slot.model} has to leave first", leave_s))
    return parts


class _LeasesInTheWay:
    """The leases that hold, or get before it, what a slot waits for. `staying`: are not asked to leave; `endless`: of
    those, the ones whose end nobody knows; `leaving`: are ended for it."""

    def __init__(self, outlook: Outlook, slot: SlotFacts, demand: Demand) -> None:
        self._outlook = outlook
        self._slot = slot
        here = set(permitted_accounts(slot, outlook.facts.accounts))
        held = [
            lease
            for lease in outlook.facts.slots
            if lease.lease is not None and lease.id != slot.id and any(grant.account in here for grant in lease.grants)
        ]
        claiming = {claim.slot for claim in outlook.facts.claims}
        self._late = late = demand.since + patience_s(demand.band, outlook.rules)
        self.ahead = [
            lease
            for lease in outlook.facts.slots
            if lease.lease is not None
            and lease.id != slot.id
            and lease.waiting
            and here.intersection(permitted_accounts(lease, outlook.facts.accounts))
            and (lease.id in claiming or self._is_before(lease, slot, late))
        ]
        asked = {lease.id for lease in held if is_asked(lease, slot)}
        asked |= {lease.id for lease in self.ahead if slot.lease is None and lease.lease and lease.lease.preemptible}
        self.leaving = [lease for lease in (*held, *self.ahead) if lease.id in asked]
        self.staying = [lease for lease in (*held, *self.ahead) if lease.id not in asked]
        self.endless = [lease for lease in self.staying if _lasts_until(lease, outlook.now) is None]
        self.is_beside = outlook.could_have(slot, pins_to_come=True, beside=self.staying)
        """There is room beside all that stay."""

    def _is_before(self, lease: SlotFacts, slot: SlotFacts, late: float) -> bool:
        if slot.lease is not None:
            return lease_place(lease) < lease_place(slot)
        return late_at(lease, self._outlook.rules) <= late or BANDS[lease.band] < BANDS[band_of(slot)]

    def models_before(self) -> list[SlotFacts]:
        """The models before it in the line that wait until leases end, and keep their place from it meanwhile."""
        here = set(permitted_accounts(self._slot, self._outlook.facts.accounts))
        found = []
        for model in self._outlook.facts.slots:
            if model.lease is not None or not model.waiting or model.state in (SlotState.READY, SlotState.LOADING):
                continue
            is_here = here.intersection(permitted_accounts(model, self._outlook.facts.accounts))
            staying = self._outlook.staying_leases(model)
            if is_here and not self._outlook.could_have(model, pins_to_come=True, beside=staying):
                found.append(model)
        return found

    def __bool__(self) -> bool:
        return bool(self.leaving or self.staying)

    @property
    def blocked(self) -> str:
        """The leases without an end that are in the way; empty where it is not for them."""
        if not self.endless or not self._outlook.could_have(self._slot, pins_to_come=True, beside=()):
            return ""
        names = ", ".join(sorted(lease.model for lease in self.endless))
        verb = "has" if len(self.endless) == 1 else "have"
        return f"{self._slot.model} does not fit beside {names}, which {verb} no end"

    def parts(self, rivals: list[SlotFacts]) -> list[BoundPart]:
        """The waits for them: those that run now end side by side, those before it in the line one after the other."""
        rules, now, parts = self._outlook.rules, self._outlook.now, []
        if self.leaving:
            parts.append(BoundPart("until it is late", max(0.0, self._late - now)))
        for lease in self.leaving:
            turn = turn_s(self._slot.load_s, 0.0, rules.swap_share)
            if lease.grants:
                turn = max(0.0, lease_turn_ends_at(lease, self._slot, rules) - now)
            parts.append(BoundPart(f"turn of {lease.model}", turn))
            parts.append(BoundPart(f"end of {lease.model}", _grace_s(lease) + rules.free_s))
        for lease in self.ahead:
            if rivals and self._slot.lease is None:
                parts.append(
                    BoundPart(f"turns of others for {lease.model}", _cycle_s(lease, rivals, self._slot, rules))
                )
        if self.is_beside:
            return parts
        running = [lease for lease in self.staying if lease.grants]
        ends = {lease.id: _lasts_until(lease, now) for lease in running}
        known = [(at + _grace_s(lease) + rules.free_s - now, lease) for lease in running if (at := ends[lease.id])]
        if known:
            seconds, last = max(known, key=lambda pair: pair[0])
            parts.append(BoundPart(f"{last.model} ends", max(0.0, seconds)))
        for lease in self.staying:
            if not lease.grants and (until := _lasts_until(lease, now)) is not None:
                parts.append(
                    BoundPart(f"{lease.model}, before it in the line", until - now + _grace_s(lease) + rules.free_s)
                )
        return parts


def _lasts_until(lease: SlotFacts, now: float) -> float | None:
    """The end of a lease at the latest, of one in line as if it were granted now; None where nobody knows it."""
    if lease.lease is None or (lease.grants and lease.state is SlotState.STOPPING):
        return now
    if lease.grants:
        return lease.lease.until
    return None if lease.lease.max_s is None else now + lease.lease.max_s


def _grace_s(lease: SlotFacts) -> float:
    return 0.0 if lease.lease is None else lease.lease.grace_s


class LoadProgress(NamedTuple):
    """A load under way: seconds since it began, and what loads of this model take."""

    passed_s: float
    about_s: float

    def __str__(self) -> str:
        return f"{self.passed_s:.0f} s of about {self.about_s:.0f}"


def load_progress(slot: SlotFacts, now: float) -> LoadProgress | None:
    """The progress of a load by its usual time; None if none is under way.

    >>> print(load_progress(SlotFacts("a", "m", 1, state=SlotState.LOADING, load_s=47.0, moved_at=100.0), 114.0))
    14 s of about 47
    """
    if slot.state is not SlotState.LOADING:
        return None
    return LoadProgress(max(0.0, now - slot.moved_at), slot.reload_s)
