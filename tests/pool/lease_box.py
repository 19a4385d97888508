"""A box with models and leases in virtual time under the real decider (pool_box.py), and chances that befall it."""

from __future__ import annotations

import random
from itertools import count

from msgspec.structs import replace

from hive.domain import Band
from hive.pool.audience import Interest
from hive.pool.bound import waiting_bound
from hive.pool.lease_room import why_too_large
from hive.pool.moves import LoadSlot, MakeRoom, Move, OpenSlot, RefuseWaiting, UnloadSlot
from hive.pool.outlook import is_asked
from hive.pool.state import MIB, Demand, LeaseTerms, MemoryAccount, PoolFacts, Rules, SlotFacts, SlotState
from hive.pool.turns import BANDS, band_of, late_at
from tests.pool.pool_box import PoolBox, PoolWaiter

GIB = 1024 * MIB
S = SlotState


class LeaseBox(PoolBox):
    """`granted`, `preempted`, `over`: counts of leases."""

    def __init__(
        self, slots: list[SlotFacts], accounts: list[MemoryAccount], rules: Rules, chance: random.Random
    ) -> None:
        super().__init__(slots, accounts, rules, chance)
        self.granted = self.preempted = self.over = 0
        self._numbers = count(1)

    def lease(self, gib: int, *, lasts_s: float, band: Band = Band.NORMAL, **terms: object) -> str:
        """Somebody asks for so many GiB, to hold for `lasts_s` at most; the id, empty where it is too large."""
        id = f"l-{next(self._numbers)}"
        wanted = LeaseTerms(**{"grace_s": 5.0} | terms)  # type: ignore[arg-type]
        slot = SlotFacts(id, id, gib * GIB, kind="lease", load_s=0.0, unload_s=0.0, band=band, lease=wanted)
        if why_too_large(self.facts(), slot):
            return ""
        self.slots[id], self.flying[id], self.interest[id] = slot, [], Interest()
        self.waiting[id] = []
        for waiters in self.waiting.values():
            for other in waiters:
                if BANDS[other.demand.band] > BANDS[band]:
                    other.bound_at = None  # a lease of a higher band voids a bound
        demand = Demand(band, self.now)
        waiter = PoolWaiter(demand, id, lasts_s, None)
        self.waiting[id].append(waiter)
        bound = waiting_bound(self.facts(), id, demand, self.now).seconds
        waiter.bound_at = None if bound is None else self.now + bound
        self.decide()
        return id

    def leases(self) -> list[SlotFacts]:
        return [slot for slot in self.slots.values() if slot.lease is not None]

    def do(self, move: Move) -> None:
        slot = self.slots.get(getattr(move, "slot", ""))
        if slot is None or slot.lease is None:
            super().do(move)
            return
        match move:
            case LoadSlot(grants=grants):
                self.drop(slot.id)
                self.grant(slot, grants)
            case UnloadSlot():
                assert slot.lease.preemptible, f"{slot.id} is ended, and is not preemptible"
                assert slot.state in (S.DRAINING, S.LOADING)
                self.preempted += 1
                self.leave(slot.id, self.chance.uniform(0.0, slot.lease.grace_s))
            case OpenSlot():
                assert slot.state is S.DRAINING
                self.set(slot.id, state=S.READY)
            case RefuseWaiting():
                assert self.waiting[slot.id][0].bound_at is None, f"{slot.id} is refused though it had a bound"
                self.forget(slot.id)
            case _:
                super().do(move)

    def grant(self, slot: SlotFacts, grants: tuple[object, ...]) -> None:
        assert slot.state is S.COLD
        assert slot.lease is not None
        (waiter,) = self.waiting[slot.id]
        assert waiter.bound_at is None or self.now <= waiter.bound_at, f"{slot.id} is granted beyond its bound"
        assert len({grant.account for grant in grants}) == slot.lease.accounts  # type: ignore[attr-defined]
        self.granted += 1
        self.waiting[slot.id] = []
        until = None if slot.lease.max_s is None else self.now + slot.lease.max_s
        self.set(
            slot.id,
            state=S.LOADING,
            grants=grants,
            moved_at=self.now,
            unload_s=slot.lease.grace_s + 2,
            lease=replace(slot.lease, until=until, begun_at=self.now),
        )
        self.at(self.now + self.chance.uniform(0.0, 2.0), lambda: self.come(slot.id))
        lasts_s = waiter.service_s if slot.lease.max_s is None else min(waiter.service_s, slot.lease.max_s)
        self.at(self.now + lasts_s, lambda: self.leave(slot.id, self.chance.uniform(0.0, 2.0)))

    def come(self, id: str) -> None:
        if id in self.slots and self.slots[id].state is S.LOADING:
            self.set(id, state=S.READY)

    def leave(self, id: str, took_s: float) -> None:
        if id in self.slots and self.slots[id].state in (S.LOADING, S.READY, S.DRAINING):
            self.set(id, state=S.STOPPING, moved_at=self.now)
            self.at(self.now + took_s, lambda: self.forget(id))

    def forget(self, id: str) -> None:
        for of in (self.slots, self.waiting, self.flying, self.interest):
            of.pop(id)
        self.over += 1

    def check(self, move: Move, facts: PoolFacts) -> None:
        if isinstance(move, MakeRoom):
            claimant = facts.slot(move.claim.slot)
            for leaving in move.claim.leaving:
                self.check_asked(facts.slot(leaving.slot), claimant)
        super().check(move, facts)

    def check_turn(self, victim: SlotFacts, claimant: SlotFacts) -> None:
        if victim.lease is None:
            super().check_turn(victim, claimant)

    def check_asked(self, victim: SlotFacts, claimant: SlotFacts) -> None:
        if victim.lease is None:
            return
        assert is_asked(victim, claimant), f"{victim.id} has to leave for {claimant.id}"
        is_higher = BANDS[band_of(claimant)] < BANDS[victim.band]
        assert is_higher or self.now >= late_at(claimant, self.rules), f"{claimant.id} is not late"

    def check_books(self) -> None:
        super().check_books()
        for account in self.accounts.values():
            capped = sum(
                grant.charged_bytes
                for lease in self.leases()
                if lease.lease and not lease.lease.preemptible and not lease.lease.is_whole
                for grant in lease.grants
                if grant.account == account.id
            )
            assert capped <= account.total_bytes * self.rules.lease_share, f"leases hold too much of {account.id}"


def lease_box(chance: random.Random, *, gpus: int, models: int) -> LeaseBox:
    """A box with models of all sizes."""
    accounts = [MemoryAccount(f"GPU-{number}", 40 * GIB) for number in range(gpus)]
    slots = []
    for number in range(models):
        size = chance.randint(4, 30)
        keep_alive_s = chance.choice([0.0, 0.0, 60.0])
        name = f"m{number}"
        slots.append(SlotFacts(name, name, size * GIB, load_s=4 + size / 1.5, keep_alive_s=keep_alive_s))
    return LeaseBox(slots, accounts, Rules(), chance)


def befall_leases(box: LeaseBox, chance: random.Random) -> None:
    """One thing happens: a request, a lease, or some time."""
    kind = chance.random()
    if kind < 0.4:
        models = [slot.id for slot in box.slots.values() if slot.lease is None]
        service_s = chance.choice([0.1, 2.0, 5.0, 20.0])
        band = chance.choice([Band.HIGH, Band.NORMAL, Band.NORMAL, Band.LOW])
        box.ask(f"agent-{chance.randrange(6)}", chance.choice(models), band, service_s)
    elif kind < 0.55 and len(box.leases()) < 6:
        box.lease(
            chance.choice([2, 2, 4, 8, 16, 19, 36]),
            lasts_s=chance.choice([5.0, 30.0, 300.0]),
            band=chance.choice([Band.HIGH, Band.NORMAL, Band.NORMAL, Band.LOW]),
            accounts=chance.choice([1, 1, 1, 2]),
            preemptible=chance.random() < 0.3,
            is_whole=chance.random() < 0.3,
            max_s=chance.choice([None, 60.0, 600.0]),
        )
    else:
        box.pass_time(chance.choice([0.5, 3.0, 10.0, 45.0]))


def walk_leases(seed: int, steps: int) -> LeaseBox:
    """A box under `steps` chances; then left alone, until nobody waits any more."""
    chance = random.Random(seed)
    box = lease_box(chance, gpus=chance.choice([1, 1, 2, 3]), models=chance.randint(1, 5))
    for _ in range(steps):
        befall_leases(box, chance)
    box.pass_time(20_000.0)
    assert not any(box.waiting.values()), f"seed {seed}: {[id for id, left in box.waiting.items() if left]} still wait"
    assert not box.claims
    assert not box.leases()
    return box
