"""The real decider (hive.pool.decider) on the machine of pool_machine.py."""

from __future__ import annotations

import time

from pool_machine import Ask, SimMachine

from hive.domain import Band
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
    UnloadSlot,
)
from hive.pool.state import MIB, Audience, Claim, Demand, Grant, MemoryAccount, PoolFacts, Rules, SlotFacts, SlotState

GIB = 1024 * MIB
GPU = "GPU-0"


class HivePool:
    """Tells the decider what it would know on a box, and carries out what it answers.

    `knows_clients`: without it the audience is guessed from the requests alone, as if nobody had a name. `choices`: CPU
    seconds of each decision.
    """

    def __init__(self, rules: Rules | None = None, *, knows_clients: bool = True) -> None:
        self.rules = rules or Rules()
        self.choices_s: list[float] = []
        self._knows_clients = knows_clients
        self._claims: tuple[Claim, ...] = ()
        self._closed_at: dict[str, float] = {}
        self._grants: dict[str, tuple[Grant, ...]] = {}
        self._uses: dict[str, LastModel] = {}
        self._interest: dict[str, Interest] = {}

    def arrived(self, machine: SimMachine, ask: Ask) -> None:
        model, now, interest = ask.model, machine.now, self._interest
        ask.demand = Demand(Band.HIGH if ask.client.startswith("high") else Band.NORMAL, ask.at, agent=ask.client)
        if ask.model not in machine.ready and len(machine.waiting[ask.model]) == 1:
            ask.bound_s = waiting_bound(self.facts(machine), ask.model, ask.demand, now).seconds
        if not ask.client or not self._knows_clients:
            interest[model] = interest.get(model, Interest()).after_caller(now, self.rules.audience_s)
            return
        interest[model] = interest.get(model, Interest()).after_agent(now)
        last = self._uses.get(ask.client)
        if last is not None:
            soon = last.model == model and now - last.used_at <= self.rules.audience_s
            interest[last.model] = interest[last.model].left_by_agent(soon_again=soon)
        self._uses[ask.client] = LastModel(ask.client, model, now, is_here=True)

    def ended(self, machine: SimMachine, ask: Ask) -> None:
        if ask.client and self._knows_clients:
            self._uses[ask.client] = LastModel(ask.client, ask.model, machine.now)

    def facts(self, machine: SimMachine) -> PoolFacts:
        slots = tuple(self._slot(machine, name) for name in machine.models)
        account = MemoryAccount(GPU, machine.room_gib * GIB, reserve_bytes=0)
        return PoolFacts(slots, (account,), self._claims, rules=self.rules)

    def _slot(self, machine: SimMachine, name: str) -> SlotFacts:
        model = machine.models[name]
        state, waiting = SlotState.COLD, machine.waiting[name]
        if name == machine.moving:
            state = SlotState.LOADING if machine.is_loading else SlotState.STOPPING
        elif name in machine.ready:
            state = SlotState.DRAINING if name in machine.closed else SlotState.READY
        demands = () if state is SlotState.READY else waiting
        held = self._grants.get(name, ()) if state is not SlotState.COLD else ()
        return SlotFacts(
            id=name,
            model=name,
            need_bytes=model.size_gib * GIB,
            state=state,
            load_s=model.load_s,
            grants=held,
            ready_at=machine.ready_at[name],
            used_at=machine.used_at[name],
            in_flight=len(machine.running[name]),
            waiting=tuple(ask.demand for ask in demands if ask.demand is not None),
            audience=self._audience(machine, name),
            closed_at=self._closed_at.get(name, 0.0),
            moved_at=machine.moved_at,
        )

    def _audience(self, machine: SimMachine, name: str) -> Audience:
        interest = self._interest.get(name, Interest())
        return audience_of(name, self._uses.values(), interest, machine.now, self.rules.audience_s)

    def act(self, machine: SimMachine) -> float | None:
        if not self._claims and not any(asks and name not in machine.ready for name, asks in machine.waiting.items()):
            return None  # nobody waits for a load
        while True:
            facts = self.facts(machine)
            began = time.process_time()
            move = choose(facts, machine.now)
            self.choices_s.append(time.process_time() - began)
            if isinstance(move, Rest):
                return move.until
            self._do(machine, move)
            if machine.moving:
                return None

    def _do(self, machine: SimMachine, move: Move) -> None:
        match move:
            case LoadSlot(slot=slot, grants=grants):
                self._claims = tuple(claim for claim in self._claims if claim.slot != slot)
                self._grants[slot] = grants
                machine.load(slot)
            case UnloadSlot(slot=slot):
                machine.unload(slot)
            case MakeRoom(claim=claim):
                self._claims += (claim,)
                for leaving in claim.leaving:
                    self._closed_at[leaving.slot] = machine.now
                    machine.closed.add(leaving.slot)
            case DropClaim(slot=slot):
                self._claims = tuple(claim for claim in self._claims if claim.slot != slot)
            case OpenSlot(slot=slot):
                machine.closed.discard(slot)
            case CloseSlot() | CutSlot() | RefuseWaiting():
                raise AssertionError(f"{move} has no place in these workloads")
            case _:
                raise AssertionError(move)
