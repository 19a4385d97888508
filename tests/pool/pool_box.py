"""A box in virtual time under the real decider: it does as it is told, and checks each answer against the promises."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable
from functools import partial
from itertools import count

from msgspec.structs import replace

from hive.domain import Band
from hive.pool.accounts import charged_in
from hive.pool.audience import Interest, LastModel, audience_of
from hive.pool.bound import waiting_bound
from hive.pool.decider import choose
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
from hive.pool.outlook import kept_grants
from hive.pool.state import Claim, Demand, ExclusiveOrder, MemoryAccount, PoolFacts, Rules, SlotFacts, SlotState
from hive.pool.turns import after_failure, band_of, late_at, turn_s

S = SlotState
AT_ONCE = 200
"""Moves after which a decider that still does not rest is taken to go round in circles."""


class PoolWaiter:
    """One request. `bound_at`: when it has to be in flight, by the bound printed as it came; None if none holds."""

    def __init__(self, demand: Demand, model: str, service_s: float, bound_at: float | None) -> None:
        self.demand = demand
        self.model = model
        self.service_s = service_s
        self.bound_at = bound_at


class PoolBox:
    """Models, accounts, agents. `waiting`, `flying`: by slot; `served`, `refused`, `cut`: counts."""

    def __init__(
        self, slots: list[SlotFacts], accounts: list[MemoryAccount], rules: Rules, chance: random.Random
    ) -> None:
        self.now = 1000.0
        self.slots = {slot.id: slot for slot in slots}
        self.accounts = {account.id: account for account in accounts}
        self.rules = rules
        self.chance = chance
        self.claims: tuple[Claim, ...] = ()
        self.exclusive: ExclusiveOrder | None = None
        self.waiting: dict[str, list[PoolWaiter]] = {slot.id: [] for slot in slots}
        self.flying: dict[str, list[PoolWaiter]] = {slot.id: [] for slot in slots}
        self.uses: dict[str, LastModel] = {}
        self.busy: set[str] = set()
        self.interest = {slot.id: Interest() for slot in slots}
        self.served = self.refused = self.cut = self.loads = self.decisions = 0
        self.failing: set[str] = set()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = count()
        self._alarm: float | None = None

    # --- the facts ---

    def facts(self) -> PoolFacts:
        slots = []
        for slot in self.slots.values():
            waiting = () if slot.state is S.READY else tuple(waiter.demand for waiter in self.waiting[slot.id])
            audience = audience_of(slot.id, self.uses.values(), self.interest[slot.id], self.now, self.rules.audience_s)
            slots.append(replace(slot, waiting=waiting, in_flight=len(self.flying[slot.id]), audience=audience))
        return PoolFacts(tuple(slots), tuple(self.accounts.values()), self.claims, self.exclusive, self.rules)

    def set(self, id: str, **changes: object) -> None:
        self.slots[id] = replace(self.slots[id], **changes)

    def at(self, time: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._number), act))

    # --- what others do ---

    def ask(self, agent: str, model: str, band: Band, service_s: float, *, patience_s: float | None = None) -> None:
        """An agent's request; one at a time for each agent."""
        if agent in self.busy:
            return
        demand = Demand(band, self.now, tenant="t", agent=agent)
        bound = waiting_bound(self.facts(), model, demand, self.now).seconds
        waiter = PoolWaiter(demand, model, service_s, None if bound is None else self.now + bound)
        last = self.uses.get(agent)
        if last is not None:
            again = last.model == model and self.now - last.used_at <= self.rules.audience_s
            self.interest[last.model] = self.interest[last.model].left_by_agent(soon_again=again)
        self.interest[model] = self.interest[model].after_agent(self.now)
        self.uses[agent] = LastModel(agent, model, self.now, is_here=True)
        self.busy.add(agent)
        self.waiting[model].append(waiter)
        if patience_s is not None:
            self.at(self.now + patience_s, lambda: self.give_up(waiter))
        self.hand_over(model)
        self.decide()

    def give_up(self, waiter: PoolWaiter) -> None:
        if waiter in self.waiting[waiter.model]:
            self.waiting[waiter.model].remove(waiter)
            self.idle(waiter)

    def idle(self, waiter: PoolWaiter) -> None:
        self.busy.discard(waiter.demand.agent)
        self.uses[waiter.demand.agent] = LastModel(waiter.demand.agent, waiter.model, self.now)

    def void_bounds(self) -> None:
        """Something came that a bound does not hold against: a pin, an order, a failure, foreign memory."""
        for waiters in self.waiting.values():
            for waiter in waiters:
                waiter.bound_at = None

    # --- time ---

    def pass_time(self, seconds: float) -> None:
        until = self.now + seconds
        self.decide()
        while True:
            next_event = self._events[0][0] if self._events else math.inf
            time = min(next_event, self._alarm if self._alarm is not None else math.inf)
            if time > until:
                break
            self.now = max(self.now, time)
            while self._events and self._events[0][0] <= self.now:
                heapq.heappop(self._events)[2]()
            self.decide()
        self.now = until
        self.check_bounds()

    def check_bounds(self) -> None:
        for waiters in self.waiting.values():
            for waiter in waiters:
                late_s = self.now - (math.inf if waiter.bound_at is None else waiter.bound_at)
                assert late_s <= 1e-6, f"{waiter.model} waits {late_s:.1f} s beyond its bound"

    def hand_over(self, id: str) -> None:
        slot = self.slots[id]
        if slot.state is not S.READY or not self.waiting[id]:
            return
        for waiter in self.waiting[id]:
            assert waiter.bound_at is None or self.now <= waiter.bound_at + 1e-6, f"{id} was served beyond the bound"
            self.flying[id].append(waiter)
            self.at(self.now + waiter.service_s, partial(self.end, waiter))
        self.set(id, used_at=self.now, band=self.waiting[id][-1].demand.band)
        self.waiting[id] = []

    def end(self, waiter: PoolWaiter) -> None:
        if waiter in self.flying[waiter.model]:
            self.flying[waiter.model].remove(waiter)
            self.served += 1
            self.idle(waiter)
            self.set(waiter.model, used_at=self.now)

    # --- the decider's answers ---

    def decide(self) -> None:
        for _ in range(AT_ONCE):
            facts = self.facts()
            move = choose(facts, self.now)
            self.decisions += 1
            if isinstance(move, Rest):
                if self.is_switched():
                    self.exclusive = None
                    continue
                self._alarm = move.until
                assert move.until is None or move.until > self.now, "it wants to be asked again at once"
                return
            self.check(move, facts)
            self.do(move)
            self.check_books()
        raise AssertionError(f"it does not come to rest: {move}")

    def is_switched(self) -> bool:
        """Whether an order to switch has ended: its model is there, and no other kind."""
        order = self.exclusive
        if order is None or self.slots[order.slot].state is not S.READY:
            return False
        return not any(slot.grants for slot in self.slots.values() if slot.kind != order.kind)

    def check_books(self) -> None:
        """Never more charged than there is, never two moves in one account."""
        slots = list(self.slots.values())
        for account in self.accounts.values():
            charged = charged_in(account.id, slots)
            room = account.total_bytes - account.reserve_bytes
            assert charged <= room, f"{charged} of {room} charged in {account.id}"
            moving = [
                slot.id
                for slot in slots
                if slot.state in (S.LOADING, S.STOPPING)
                and slot.lease is None
                and any(grant.account == account.id for grant in slot.grants)
            ]
            assert len(moving) <= 1, f"{moving} move at once in {account.id}"

    def check(self, move: Move, facts: PoolFacts) -> None:
        """Nothing in flight leaves, a turn is kept, a pin is kept."""
        if isinstance(move, UnloadSlot | SleepSlot):
            slot = facts.slot(move.slot)
            assert not slot.in_flight or slot.state is S.LOADING, f"{slot.id} leaves with {slot.in_flight} in flight"
            if not facts.exclusive and not slot.unload_ordered:
                pinned = slot.pinned_at is not None and slot.state is not S.ASLEEP
                assert not pinned, f"{slot.id} leaves though it is pinned"
        if isinstance(move, CutSlot):
            slot = facts.slot(move.slot)
            assert self.now >= slot.closed_at + self.rules.drain_s, f"{slot.id} is cut before it could drain"
        if isinstance(move, MakeRoom):
            claimant = facts.slot(move.claim.slot)
            assert claimant.waiting or claimant.pinned_at is not None, "room for nobody"
            for leaving in move.claim.leaving:
                self.check_turn(facts.slot(leaving.slot), claimant)

    def check_turn(self, victim: SlotFacts, claimant: SlotFacts) -> None:
        assert victim.pinned_at is None
        assert victim.state in (S.READY, S.ASLEEP)
        if victim.state is S.ASLEEP:
            return
        share = self.rules.swap_share_high if band_of(claimant) is Band.HIGH else self.rules.swap_share
        load_in_s = claimant.reload_s + victim.unload_s
        over = self.now >= victim.ready_at + turn_s(load_in_s, victim.load_s + claimant.unload_s, share) - 1e-6
        late = self.now >= late_at(claimant, self.rules)
        if not (over and late):
            assert not victim.in_flight, f"{victim.id} leaves within its turn, with requests in flight"
            assert victim.audience.is_empty(self.now), f"{victim.id} leaves within its turn, before an audience"

    def do(self, move: Move) -> None:
        match move:
            case LoadSlot(slot=id, grants=grants):
                self.drop(id)
                slot = self.slots[id]
                assert slot.state in (S.COLD, S.ASLEEP)
                self.set(id, state=S.LOADING, grants=grants, moved_at=self.now, generation=slot.generation + 1)
                self.loads += 1
                took = slot.reload_s * self.chance.uniform(0.3, 1.0)
                self.at(self.now + took, lambda: self.loaded(id))
            case UnloadSlot(slot=id):
                self.unload(id)
            case SleepSlot(slot=id, level=level):
                slot = self.slots[id]
                self.set(id, state=S.STOPPING, moved_at=self.now, unload_ordered=False)
                took = slot.unload_s * self.chance.uniform(0.3, 1.0)
                self.at(self.now + took, lambda: self.fell_asleep(id, level))
            case MakeRoom(claim=claim):
                victims = [self.slots[leaving.slot] for leaving in claim.leaving]
                assert all(slot.state in (S.READY, S.ASLEEP) for slot in victims if slot.lease is None)
                self.claims += (claim,)
                for leaving in claim.leaving:
                    if self.slots[leaving.slot].state is S.READY:
                        self.set(leaving.slot, state=S.DRAINING, closed_at=self.now, cut=False)
            case CloseSlot(slot=id):
                assert self.slots[id].state is S.READY
                self.set(id, state=S.DRAINING, closed_at=self.now, cut=False)
            case OpenSlot(slot=id):
                assert self.slots[id].state is S.DRAINING
                self.set(id, state=S.READY)
                self.hand_over(id)
            case CutSlot(slot=id):
                self.set(id, cut=True)
                for waiter in list(self.flying[id]):
                    self.at(self.now + self.rules.cut_s * self.chance.random(), partial(self.was_cut, waiter))
            case DropClaim(slot=id):
                self.drop(id)
            case RefuseWaiting(slot=id):
                for waiter in self.waiting[id]:
                    assert waiter.bound_at is None, f"{waiter.model} is refused though it had a bound: {move.why}"
                    self.refused += 1
                    self.idle(waiter)
                self.waiting[id] = []
                if self.exclusive is not None:
                    self.exclusive = None
            case _:
                raise AssertionError(move)

    def drop(self, id: str) -> None:
        self.claims = tuple(claim for claim in self.claims if claim.slot != id)

    def unload(self, id: str) -> None:
        slot = self.slots[id]
        self.set(id, state=S.STOPPING, moved_at=self.now, unload_ordered=False)
        took = slot.unload_s + self.chance.choice([0.0, 0.0, self.rules.free_s * 0.9])
        self.at(self.now + took, lambda: self.gone(id))

    def gone(self, id: str) -> None:
        self.set(id, state=S.COLD, grants=(), level="", awake=())

    def fell_asleep(self, id: str, level: str) -> None:
        slot = self.slots[id]
        self.set(id, state=S.ASLEEP, level=level, awake=slot.grants, grants=kept_grants(slot, level))

    def loaded(self, id: str) -> None:
        slot = self.slots[id]
        if slot.state is not S.LOADING:
            return
        if id in self.failing:
            self.failing.discard(id)
            state, retry_at = after_failure(slot.failures + 1, self.now, self.rules)
            self.set(id, state=state, grants=(), level="", awake=(), failures=slot.failures + 1, retry_at=retry_at)
            self.void_bounds()
            return
        self.set(id, state=S.READY, level="", ready_at=self.now, used_at=self.now, failures=0, retry_at=0.0)
        self.hand_over(id)

    def was_cut(self, waiter: PoolWaiter) -> None:
        if waiter in self.flying[waiter.model]:
            self.flying[waiter.model].remove(waiter)
            self.cut += 1
            self.idle(waiter)
