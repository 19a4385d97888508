"""The state of one model in the pool in words: where it is and why, what would go for it, how long that takes. Pure."""

from __future__ import annotations

import msgspec

from hive.domain import Band
from hive.pool.bound import WaitingBound, load_progress, waiting_bound
from hive.pool.outlook import STARTABLE, Outlook
from hive.pool.state import MIB, Claim, Demand, PoolFacts, SlotFacts, SlotState
from hive.pool.turns import NEVER, may_leave_at


class WouldLeave(msgspec.Struct, frozen=True):
    """A model that would leave. `in_s`: until it may, if nothing changes; 0 if it may now. `level`: of its sleep."""

    model: str
    in_s: float
    level: str = ""


class Explanation(msgspec.Struct, frozen=True):
    """The answer to `hive pool explain MODEL`. `accounts`: with the bytes charged; `why`: one sentence; `would_leave`:
    the cheapest set of victims, if it had to be loaded; `fits`: without any; `bound`: of a request that came now."""

    model: str
    state: SlotState
    accounts: tuple[tuple[str, int], ...]
    why: str
    fits: bool
    would_leave: tuple[WouldLeave, ...]
    bound: WaitingBound

    def lines(self) -> list[str]:
        """The same as lines of text."""
        where = ", ".join(f"{bytes // MIB} MiB in {account}" for account, bytes in self.accounts)
        lines = [f"{self.model} is {self.state}{': ' + where if where else ''}", self.why]
        if self.would_leave:
            lines.append("To load it would leave: " + ", ".join(_leaving(victim) for victim in self.would_leave))
        elif self.fits:
            lines.append("It fits beside what is loaded")
        if self.bound.seconds is None:
            lines.append(f"A request for it is refused: {self.bound.blocked}")
        elif self.bound.seconds:
            lines.append(f"A request for it waits at most {self.bound.seconds:.0f} s:")
            lines += [f"  {part.seconds:6.1f} s  {part.what}" for part in self.bound.parts]
        return lines


def _leaving(victim: WouldLeave) -> str:
    how = f" (sleeps: {victim.level})" if victim.level else ""
    return f"{victim.model}{how}, {'now' if victim.in_s <= 0 else f'in {victim.in_s:.0f} s'}"


def explain(facts: PoolFacts, id: str, now: float, band: Band = Band.NORMAL) -> Explanation:
    """The explanation of the slot `id`; KeyError if there is none.

    >>> from hive.pool.state import Audience, Grant, MemoryAccount
    >>> old = SlotFacts("old", "a", 60 * MIB, state=SlotState.READY, grants=(Grant("gpu", 60 * MIB),), load_s=9.0,
    ...            audience=Audience(2, 0.1, 90.0))
    >>> facts = PoolFacts((old, SlotFacts("new", "b", 70 * MIB, load_s=9.0)), (MemoryAccount("gpu", 100 * MIB, 0),))
    >>> print(*explain(facts, "new", 0.0).lines(), sep="\\n")
    b is cold
    Nobody has asked for it
    To load it would leave: a, in 63 s
    A request for it waits at most 148 s:
        63.0 s  turn of a
        65.0 s  requests in flight at a
        11.5 s  unload of a
         9.0 s  load of b
    >>> print(*explain(facts, "old", 0.0).lines(), sep="\\n")
    a is ready: 60 MiB in gpu
    2 of those who used it last will probably ask again within 90 s
    """
    slot = facts.slot(id)
    demand = slot.waiting[0] if slot.waiting else Demand(band, now)
    asked = msgspec.structs.replace(slot, waiting=slot.waiting or (demand,))
    others = tuple(asked if other.id == id else other for other in facts.slots)
    outlook = Outlook(msgspec.structs.replace(facts, slots=others), now)
    victims: tuple[WouldLeave, ...] = ()
    fits = slot.state in STARTABLE and outlook.fitting(asked) is not None
    if slot.state in STARTABLE and not fits:
        victims = _victims(outlook, asked, now)
    return Explanation(
        slot.model,
        slot.state,
        tuple((grant.account, grant.charged_bytes) for grant in slot.grants),
        _why(facts, slot, now),
        fits,
        victims,
        waiting_bound(facts, id, demand, now),
    )


def _victims(outlook: Outlook, slot: SlotFacts, now: float) -> tuple[WouldLeave, ...]:
    eviction = outlook.eviction(slot, by=now, blocked=False) or outlook.soonest(slot)
    if eviction is None:
        return ()
    times = outlook.leave_times(slot)
    return tuple(
        WouldLeave(outlook.slots[option.slot].model, max(0.0, times[option.slot] - now), option.level)
        for option in eviction.options
    )


def _why(facts: PoolFacts, slot: SlotFacts, now: float) -> str:
    """The reason for the state, in one sentence."""
    claim = next((claim for claim in facts.claims if any(leaving.slot == slot.id for leaving in claim.leaving)), None)
    own = next((claim for claim in facts.claims if claim.slot == slot.id), None)
    progress = load_progress(slot, now)
    if progress is not None:
        return f"It is being {'woken' if slot.level else 'loaded'}: {progress}"
    if slot.state is SlotState.FAILED:
        return f"{slot.failures} loads in a row have failed"
    if claim is not None:
        return f"It leaves for {facts.slot(claim.slot).model}" + _flying(slot)
    if slot.state in (SlotState.DRAINING, SlotState.STOPPING):
        return ("It is being put to sleep" if slot.level else "It is being unloaded") + _flying(slot)
    if slot.state is SlotState.READY:
        return _why_ready(slot, now)
    return _why_not(facts, slot, own, now)


def _flying(slot: SlotFacts) -> str:
    return f"; {slot.in_flight} in flight are waited for" if slot.in_flight else ""


def _why_ready(slot: SlotFacts, now: float) -> str:
    if slot.pinned_at is not None:
        return "It is pinned"
    if slot.in_flight:
        return f"{slot.in_flight} in flight"
    if not slot.audience.is_empty(now):
        rest = slot.audience.ends_at - now
        soon = f" within {rest:.0f} s" if rest < NEVER else ""
        return f"{slot.audience.users} of those who used it last will probably ask again{soon}"
    if slot.used_at + slot.keep_alive_s > now:
        return f"It is kept for another {slot.used_at + slot.keep_alive_s - now:.0f} s"
    return "Nobody uses it; it stays until its memory is wanted"


def _why_not(facts: PoolFacts, slot: SlotFacts, own: Claim | None, now: float) -> str:
    if slot.retry_at > now:
        return f"{slot.failures} loads in a row have failed; the next try is in {slot.retry_at - now:.0f} s"
    if own is not None:
        names = ", ".join(facts.slot(leaving.slot).model for leaving in own.leaving)
        return f"Room is being made for it: {names} leaves"
    if slot.state is SlotState.ASLEEP and not slot.waiting:
        return f"It sleeps at level {slot.level}; a wake takes about {slot.reload_s:.1f} s"
    if not slot.waiting:
        return "Nobody has asked for it" if slot.pinned_at is None else "It is pinned and waits for memory"
    soonest = max((may_leave_at(other, slot, facts.rules, now) for other in facts.slots if other.grants), default=now)
    wait = f"; those in its way may leave within {soonest - now:.0f} s" if now < soonest < NEVER else ""
    return f"{len(slot.waiting)} wait for it{wait}"
