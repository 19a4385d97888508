"""The decision which model is loaded, evicted, or left where it is: one move at a time. Pure.

The rules, in the order in which they are looked at:

1. What has been begun is ended first: victims that have drained leave together, then the one they left for is loaded.
   A victim is opened again here and nowhere else.
2. An order of the operator to unload goes before anybody's turn, but waits for what is in flight. A model that a flush
   has loaded anew leaves likewise, and cuts nothing.
3. Those who wait are looked at in one order: the late ones first, by when they became late (the patience of the high
   band is the shortest); then by band, then by the time all of them have waited together. What fits is loaded.
4. Else the cheapest exact set of victims that may leave now. Idle and without an audience: at once. With one: after its
   turn, if somebody is late. In flight: after its turn too, with `drain_s` to end. Pinned, loading, kept: never.
5. An account that a late one waits for is kept for it: those behind it take no more of it than it leaves over. So
   nobody starves (bound.py has the figure).
6. In each account one move of memory at a time. After a load nothing moves there until its waiters are in flight.
7. A lease (memory for a program that is no model) is a claimant of rule 3. Whoever waits in the line keeps the place
   that will be its own from leases behind it, though not from models: they can be asked to leave. A lease takes from no
   model that waits before it what that cannot get back. Granted, it is a victim of rule 4 if it is preemptible, else it
   stays like a pin until it ends.
"""

from __future__ import annotations

from hive.pool.lease_room import why_too_large
from hive.pool.line_order import Rank, in_order, rank, rank_now
from hive.pool.moves import (
    CloseSlot,
    CutSlot,
    DropClaim,
    LoadSlot,
    MakeRoom,
    Move,
    OpenSlot,
    RefuseWaiting,
    Rest,
    SleepSlot,
    UnloadSlot,
)
from hive.pool.outlook import STARTABLE, Outlook, blocked_by, has_left, wants, with_first_demands
from hive.pool.state import Claim, ExclusiveOrder, Grant, PoolFacts, SlotFacts, SlotState
from hive.pool.turns import NEVER, late_at

IN_LINE = (SlotState.COLD, SlotState.ASLEEP, SlotState.DRAINING, SlotState.STOPPING)

RENEWED = "its prompt cache is flushed"


def choose(facts: PoolFacts, now: float) -> Move:
    """The next move of the pool. The doer carries it out (a load and an unload go on by themselves), takes the facts
    anew, and asks again until the answer is Rest.

    >>> from hive.domain import Band
    >>> from hive.pool.state import Audience, Demand, Grant, MemoryAccount
    >>> old = SlotFacts("old", "a", 60, state=SlotState.READY, grants=(Grant("gpu", 60),), load_s=10.0)
    >>> new = SlotFacts("new", "b", 70, load_s=20.0, waiting=(Demand(Band.NORMAL, since=100.0),))
    >>> gpu = MemoryAccount("gpu", total_bytes=100, reserve_bytes=0)

    Nobody uses the old one: it leaves at once.

    >>> choose(PoolFacts((old, new), (gpu,)), 100.0).claim.leaving
    (EvictedSlot(slot='old', level='', idle_only=True),)

    Somebody does: it has its turn. The decider looks again when the new one's demand is late.

    >>> from msgspec.structs import replace
    >>> used = replace(old, ready_at=90.0, audience=Audience(users=1, ends_at=400.0))
    >>> choose(PoolFacts((used, new), (gpu,)), 100.0)
    Rest(until=110.0)
    >>> choose(PoolFacts((used, new), (gpu,)), 110.0)
    Rest(until=189.0)
    """
    outlook = Outlook(facts, now)
    alarm = _Alarm(now)
    if facts.exclusive is not None:
        return _for_exclusive(outlook, facts.exclusive, alarm) or alarm.rest()
    return (
        _opened_again(outlook)
        or _claims_on(outlook, alarm)
        or _unloads(outlook, alarm)
        or _brought_in(outlook, alarm)
        or _left_alone(outlook, alarm)
        or alarm.rest()
    )


class _Alarm:
    """The next time at which the decision may be another one."""

    def __init__(self, now: float) -> None:
        self._now = now
        self._at = NEVER

    def at(self, time: float) -> None:
        if self._now < time < self._at:
            self._at = time

    def rest(self) -> Rest:
        return Rest(self._at if self._at < NEVER else None)


def _opened_again(outlook: Outlook) -> Move | None:
    """A draining slot that leaves for nobody is opened; a load that nobody waits for is ended, if that is wanted."""
    for slot in outlook.facts.slots:
        leaves = slot.unload_ordered or slot.renewing or slot.id in outlook.leaving
        if slot.state is SlotState.DRAINING and not leaves:
            return OpenSlot(slot.id)
        is_for_nobody = slot.state is SlotState.LOADING and slot.lease is None and not wants(slot)
        if is_for_nobody and not outlook.rules.finish_loads:
            return UnloadSlot(slot.id, "nobody waits for it any more")
        if slot.state is SlotState.FAILED and slot.waiting:
            return RefuseWaiting(slot.id, "its loads have failed")
    return None


def _claims_on(outlook: Outlook, alarm: _Alarm) -> Move | None:
    for claim in outlook.facts.claims:
        move = _claim_on(outlook, claim, alarm)
        if move is not None:
            return move
    return None


def _claim_on(outlook: Outlook, claim: Claim, alarm: _Alarm) -> Move | None:
    """The next step of a claim: drop it, cut, let a victim leave, load."""
    if claim.slot not in outlook.slots or any(grant.account not in outlook.free for grant in claim.grants):
        return DropClaim(claim.slot, "the model or its GPU is not there any more")
    claimant = outlook.slots[claim.slot]
    if not wants(claimant):
        return DropClaim(claim.slot, "nobody waits for it any more")
    if claimant.state not in STARTABLE:
        return DropClaim(claim.slot, "it cannot be loaded")
    staying = [
        (outlook.slots[leaving.slot], leaving)
        for leaving in claim.leaving
        if leaving.slot in outlook.slots and not has_left(outlook.slots[leaving.slot], leaving)
    ]
    for victim, leaving in staying:
        if victim.state is SlotState.READY:  # it was opened, or came back: nothing is taken from it unseen
            return DropClaim(claim.slot, f"{victim.model} stays")
        if victim.state is SlotState.DRAINING and victim.pinned_at is not None:
            return DropClaim(claim.slot, f"{victim.model} has been pinned")
        if victim.state is SlotState.DRAINING and victim.in_flight and leaving.idle_only and not victim.closing:
            return DropClaim(claim.slot, f"{victim.model} is in use again")
    return _leave(outlook, [victim for victim, _ in staying], claim, alarm) if staying else _enter(outlook, claim)


def _leave(outlook: Outlook, staying: list[SlotFacts], claim: Claim, alarm: _Alarm) -> Move | None:
    """All victims drain, then leave one after the other: none leaves before it is sure that all do."""
    for victim in staying:
        if victim.in_flight and victim.state is SlotState.DRAINING and not victim.cut:
            if outlook.now >= victim.closed_at + outlook.rules.drain_s:
                return CutSlot(victim.id)
            alarm.at(victim.closed_at + outlook.rules.drain_s)
    if any(victim.in_flight for victim in staying):
        return None
    levels = {leaving.slot: leaving.level for leaving in claim.leaving}
    why = f"room for {outlook.slots[claim.slot].model}"
    for victim in staying:
        if victim.state is SlotState.STOPPING or any(grant.account in outlook.moving for grant in victim.grants):
            continue
        if levels[victim.id]:
            return SleepSlot(victim.id, levels[victim.id], why)
        return UnloadSlot(victim.id, why)
    return None


def _enter(outlook: Outlook, claim: Claim) -> Move | None:
    """The load that room was made for, unless something else has taken the memory meanwhile."""
    claimant = outlook.slots[claim.slot]
    held = {grant.account: grant.charged_bytes for grant in claimant.grants}
    if any(grant.account in outlook.moving for grant in claim.grants):
        return None
    reserved = outlook.reserved(claim)
    for grant in claim.grants:
        free = outlook.free[grant.account] + reserved.get(grant.account, 0)
        if grant.charged_bytes - held.get(grant.account, 0) > free:
            return DropClaim(claim.slot, f"its memory in {grant.account} is not there")
    return _load(claimant, claim.grants, "room was made for it")


def _load(slot: SlotFacts, grants: tuple[Grant, ...], why: str) -> LoadSlot:
    first = min(slot.waiting, key=lambda demand: demand.since, default=None)
    return LoadSlot(slot.id, grants, why, first.tenant if first else "")


def _unloads(outlook: Outlook, alarm: _Alarm) -> Move | None:
    """The orders to unload: the gate closes, what is in flight has `drain_s`; or all the time, for a flush."""
    for slot in outlook.facts.slots:
        if not (slot.unload_ordered or slot.renewing) or slot.id in outlook.leaving:
            continue
        move = _out(outlook, slot, _why_out(slot), alarm)
        if move is not None:
            return move
    return None


def _why_out(slot: SlotFacts) -> str:
    return "an operator ordered it" if slot.unload_ordered else RENEWED


def _out(outlook: Outlook, slot: SlotFacts, why: str, alarm: _Alarm) -> Move | None:
    """The next step by which a slot leaves for nobody in particular."""
    if slot.state is SlotState.READY:
        return CloseSlot(slot.id, why) if slot.settled else None
    if slot.state not in (SlotState.DRAINING, SlotState.ASLEEP):
        return None
    if why == RENEWED and (slot.in_flight or slot.state is SlotState.ASLEEP):
        return None
    if slot.in_flight:
        if not slot.cut and outlook.now >= slot.closed_at + outlook.rules.drain_s:
            return CutSlot(slot.id)
        alarm.at(slot.closed_at + outlook.rules.drain_s)
        return None
    return None if any(grant.account in outlook.moving for grant in slot.grants) else UnloadSlot(slot.id, why)


def _brought_in(outlook: Outlook, alarm: _Alarm) -> Move | None:
    """The first of those who wait that fits, or for whom room may be made."""
    now, rules = outlook.now, outlook.rules
    claiming = {claim.slot for claim in outlook.facts.claims}
    claimants = [
        slot
        for slot in outlook.facts.slots
        if slot.state in STARTABLE and wants(slot) and slot.id not in claiming and slot.id not in outlook.leaving
    ]
    waited = {slot.id: sum(now - demand.since for demand in slot.waiting) for slot in claimants}
    claimants = [with_first_demands(slot) for slot in claimants]
    late = {slot.id: late_at(slot, rules) for slot in claimants}
    models = _models_in_line(outlook) if any(slot.lease is not None for slot in claimants) else []
    for place, slot in in_order(claimants, lambda slot: rank(slot, late[slot.id], waited[slot.id], now)):
        if slot.retry_at > now:
            alarm.at(slot.retry_at)
            continue
        move = _room_now(outlook, slot, [model for at, model in models if at < place])
        if move is not None:
            return move
        soonest = outlook.soonest(slot)
        if soonest is None:
            move = _without_end(outlook, slot)
            if move is not None:
                return move
            if slot.lease is not None or outlook.could_have(slot):
                outlook.keep_from_leases(slot)
            continue
        for time in outlook.leave_times(slot).values():
            alarm.at(time)
        alarm.at(late[slot.id])
        if late[slot.id] <= now:
            outlook.keep_for(slot)
        outlook.keep_from_leases(slot)
    return None


def _room_now(outlook: Outlook, slot: SlotFacts, before: list[SlotFacts]) -> Move | None:
    """The load of a slot, or the claim with which room is made for it; None if neither may begin now. `before`: the
    models that wait and come before it."""
    grants = outlook.fitting(slot)
    if grants is not None and not outlook.takes_from_model(slot, grants, before):
        return _load(slot, grants, "it fits")
    if slot.lease is not None and slot.lease.at_once:
        return None
    eviction = outlook.eviction(slot, by=outlook.now)
    if eviction is None:
        return None
    claim = outlook.claim(slot, eviction)
    return None if outlook.takes_from_model(slot, claim.grants, before) else MakeRoom(claim)


def _models_in_line(outlook: Outlook) -> list[tuple[Rank, SlotFacts]]:
    """The models that somebody waits for, loaded or not able to be, with their places in the order."""
    return [
        (rank_now(slot, outlook.facts, outlook.now), slot)
        for slot in outlook.facts.slots
        if slot.waiting and slot.lease is None and slot.state in IN_LINE and slot.retry_at <= outlook.now
    ]


def _without_end(outlook: Outlook, slot: SlotFacts) -> Move | None:
    """The move for one that can never be loaded as things are; None if it can, or will be seen once nothing moves."""
    if outlook.moving or outlook.claimed or outlook.could_have(slot):
        return None
    if slot.lease is not None:  # another lease may end, and foreign memory may go
        why = why_too_large(outlook.facts, slot)
        return RefuseWaiting(slot.id, why) if why else None
    if slot.state is SlotState.ASLEEP:
        return UnloadSlot(slot.id, "it cannot wake where it sleeps")
    return RefuseWaiting(slot.id, blocked_by(outlook, slot)) if slot.waiting else None


def _left_alone(outlook: Outlook, alarm: _Alarm) -> Move | None:
    """Idle models past their keep-alive leave, if that is configured: unused memory is no virtue."""
    if not outlook.rules.unload_idle:
        return None
    for slot in outlook.facts.slots:
        ripe = slot.state is SlotState.READY and slot.settled and slot.keep_alive_s > 0 and slot.pinned_at is None
        if not ripe or slot.in_flight or slot.id in outlook.leaving:
            continue
        if outlook.now >= slot.used_at + slot.keep_alive_s:
            if not any(grant.account in outlook.moving for grant in slot.grants):
                return UnloadSlot(slot.id, "idle")
            continue
        alarm.at(slot.used_at + slot.keep_alive_s)
    return None


def _for_exclusive(outlook: Outlook, order: ExclusiveOrder, alarm: _Alarm) -> Move | None:
    """The next step of `hive backend switch`: other kinds go, its model comes, nothing else moves."""
    for claim in outlook.facts.claims:
        return DropClaim(claim.slot, "an order to switch goes first")
    wanted = outlook.slots.get(order.slot)
    if wanted is None:
        return None
    why = f"switch to {order.kind or wanted.kind}"
    models = [slot for slot in outlook.facts.slots if slot.grants and not slot.is_backend and slot.lease is None]
    others = [slot for slot in models if order.kind not in ("", slot.kind)]
    for slot in others:
        if slot.state is SlotState.LOADING:
            return UnloadSlot(slot.id, why)
        if slot.state is SlotState.READY and slot.settled:
            return CloseSlot(slot.id, why)
    for slot in others:
        move = _out(outlook, slot, why, alarm)
        if move is not None:
            return move
    if others:
        return None
    if wanted.state is SlotState.DRAINING and not (wanted.unload_ordered or wanted.renewing):
        return OpenSlot(wanted.id)
    if wanted.state is SlotState.DRAINING:
        return _out(outlook, wanted, _why_out(wanted), alarm)
    if wanted.state not in STARTABLE:
        return None
    grants = outlook.fitting(wanted)
    if grants is not None:
        return _load(wanted, grants, why)
    if any(slot.is_backend and slot.grants and slot.id != wanted.id for slot in outlook.facts.slots):
        return None  # the switch stops it, and then there may be room
    if any(all(bytes <= 0 for bytes in outlook.short(site)) for site in outlook.sites(wanted)):
        return None  # it fits as soon as nothing moves there
    for slot in models:
        if slot.id != wanted.id and slot.pinned_at is None:
            move = _out(outlook, slot, f"room for {wanted.model}", alarm)
            if move is not None or slot.state is not SlotState.READY:
                return move
    if outlook.moving:  # what is loading, or has just been loaded, may leave after that
        return None
    return RefuseWaiting(wanted.id, blocked_by(outlook, wanted))
