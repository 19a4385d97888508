"""The decider under chance, for long: nothing in flight leaves within its turn, and nobody starves."""

from __future__ import annotations

import os
import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hive.domain import Band
from hive.pool.state import SlotState
from tests.pool.pool_box import PoolBox
from tests.pool.random_boxes import give_order, random_box, walk

A_WALK = 200
"""Steps of one box."""
MODELS = st.integers(0, 5)
SERVICE_S = st.sampled_from([0.1, 2.0, 8.0, 20.0, 900.0])


class PoolInAnyOrder(RuleBasedStateMachine):
    """Requests, askers that leave, orders, failures and time in any order. PoolBox checks each move that is made."""

    box: PoolBox

    @initialize(seed=st.integers(0, 1 << 20), gpus=st.integers(1, 4), models=st.integers(2, 6))
    def start(self, seed: int, gpus: int, models: int) -> None:
        self.chance = random.Random(seed)
        self.box = random_box(self.chance, gpus=gpus, models=models)
        self.orders = 0

    def one(self, number: int) -> str:
        return list(self.box.slots)[number % len(self.box.slots)]

    @rule(agent=st.integers(0, 7), model=MODELS, band=st.sampled_from(Band), service_s=SERVICE_S)
    def ask(self, agent: int, model: int, band: Band, service_s: float) -> None:
        self.box.ask(f"agent-{agent}", self.one(model), band, service_s)

    @rule(agent=st.integers(0, 7), model=MODELS, patience_s=st.sampled_from([0.0, 5.0, 40.0]))
    def ask_and_leave(self, agent: int, model: int, patience_s: float) -> None:
        self.box.ask(f"agent-{agent}", self.one(model), Band.NORMAL, 2.0, patience_s=patience_s)

    @rule(seconds=st.sampled_from([0.5, 3.0, 10.0, 60.0, 400.0]))
    def pass_time(self, seconds: float) -> None:
        self.box.pass_time(seconds)

    @precondition(lambda self: self.orders < 3)
    @rule(model=MODELS)
    def order(self, model: int) -> None:
        self.orders += 1
        give_order(self.box, self.chance, self.one(model))

    @invariant()
    def bounds_hold(self) -> None:
        if hasattr(self, "box"):
            self.box.check_bounds()

    def teardown(self) -> None:
        """Left alone, and with nothing in its way, the box serves or refuses everybody."""
        if not hasattr(self, "box"):
            return
        box = self.box
        box.failing.clear()
        box.exclusive = None
        for id, slot in box.slots.items():
            box.set(id, pinned_at=None, unload_ordered=False)
            if slot.state is SlotState.FAILED:
                box.set(id, state=SlotState.COLD, failures=0)
            box.set(id, retry_at=0.0)
        for id, account in box.accounts.items():
            box.accounts[id] = type(account)(id, account.total_bytes)
        box.pass_time(20_000.0)
        assert not any(box.waiting.values()), "somebody still waits"
        assert not box.claims
        assert {slot.state for slot in box.slots.values()} <= {SlotState.COLD, SlotState.READY, SlotState.ASLEEP}


TestAnyOrder = PoolInAnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=40)


def walked(steps: int, first_seed: int = 0) -> None:
    served = loads = 0
    for seed in range(first_seed, first_seed + steps // A_WALK):
        box = walk(seed, A_WALK)
        served += box.served
        loads += box.loads
    assert served > steps / 10, "hardly anything happened"
    assert loads > steps / 40


def test_a_walk_of_twenty_thousand_steps_breaks_no_promise() -> None:
    walked(20_000)


@pytest.mark.chaos
@pytest.mark.timeout(600)
def test_a_walk_of_a_hundred_thousand_steps_breaks_no_promise() -> None:
    walked(int(os.environ.get("HIVE_POOL_STEPS", "100000")), first_seed=10_000)
