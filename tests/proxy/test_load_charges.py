"""The seconds of a load in the accounts of the queue: a tenant whose models swap takes no more than its share."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from random import Random
from typing import NamedTuple

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from hive.domain import Band
from hive.link.pool import LoadCharged, SlotIs
from hive.queue.queue import FairQueue, FairShares, Flow
from hive.queue.work_rate import UNMEASURED_PER_S
from tests.examples import examples
from tests.proxy.test_slots import ask, pooled

RATES = {"x": 200.0, "y": 50.0}
"""Tokens per second of the two models."""
COST_MAX = 400
WAITING = 6
"""More than there are places: a tenant that waits no more begins anew."""


class Round(NamedTuple):
    """One swap to model y and back: seconds of both loads, requests that each model serves meanwhile, and whether the
    load of x is for the tenant that swaps."""

    loads_s: tuple[float, float]
    served: tuple[int, int]
    back_for_swapper: bool


ROUNDS = st.lists(
    st.builds(
        Round,
        st.tuples(st.floats(0.5, 40.0), st.floats(0.5, 40.0)),
        st.tuples(st.integers(1, 40), st.integers(1, 10)),
        st.booleans(),
    ),
    min_size=1,
    max_size=12,
)


class SwappingBox:
    """Two models of which one is loaded at a time. `swapper` always waits for both, `steady` for x only."""

    def __init__(self, places: int, weight: float, costs: Random) -> None:
        self.shares: FairShares[int] = FairShares()
        self.lines = {name: FairQueue(self.shares, depth=WAITING, places=0) for name in RATES}
        self.swapper = self.shares.flow("s1", "swapper", limit=100, weight=weight)
        self.steady = self.shares.flow("q1", "steady", limit=100)
        self.weights = {self.swapper: weight, self.steady: 1.0}
        self.places = places
        self.now = 0.0
        self.had = {(flow, name): 0.0 for flow in self.weights for name in RATES}
        self.charged = dict.fromkeys(self.weights, 0.0)
        """Tokens of line x that loads stand for."""
        self.leads: list[float] = []
        """Each time that the swapper was given a place at x: by how much it had spent more than the other."""
        self._costs = costs
        self._running: dict[str, list[int]] = {name: [] for name in RATES}
        self._requests: dict[int, tuple[Flow, float]] = {}
        self._number = count()
        self._fill()

    def _fill(self) -> None:
        """Both have as many requests waiting as they may."""
        for flow, name in ((self.swapper, "x"), (self.swapper, "y"), (self.steady, "x")):
            line = self.lines[name]
            while flow.owner.line(line._line).waiting < WAITING:
                one, cost = next(self._number), float(self._costs.randint(1, COST_MAX))
                self._requests[one] = (flow, cost)
                assert line.ask(one, flow, expected=cost, now=self.now).value == "wait"

    def load(self, name: str, seconds: float, cause: Flow) -> None:
        self.now += seconds
        charged = seconds * self.lines["x"].tokens_per_s
        self.charged[cause] += charged
        self.shares.charge_load(self.lines[name], cause.tenant, cause.agent, Band.NORMAL, seconds)

    def serve(self, name: str, requests: int) -> None:
        """The model is loaded, serves so many requests, and drains."""
        line = self.lines[name]
        self._admitted(name, line.resize(self.places))
        for _ in range(requests):
            self._fill()
            self._end_one(name)
        line.resize(0)
        while self._running[name]:
            self._end_one(name)

    def _end_one(self, name: str) -> None:
        one = self._running[name].pop(0)
        flow, cost = self._requests.pop(one)
        self.now += cost / RATES[name]
        self.had[flow, name] += cost
        self._admitted(name, self.lines[name].leave(one, flow, now=self.now, cost=cost))

    def _admitted(self, name: str, requests: list[int]) -> None:
        self._running[name] += requests
        if name == "x" and any(self._requests[one][0] is self.swapper for one in requests):
            self.leads.append(self.spent(self.swapper) - self.spent(self.steady))

    def spent(self, flow: Flow) -> float:
        """Tokens of line x, by weight, that it had or that its loads stand for."""
        return (self.had[flow, "x"] + self.charged[flow]) / self.weights[flow]


@given(ROUNDS, st.integers(1, 4), st.sampled_from([1.0, 2.0]), st.integers(0, 1 << 32))
@settings(max_examples=examples(200))
def test_a_tenant_that_makes_models_swap_pays_for_the_time_in_the_line_of_the_others(
    rounds: list[Round], places: int, weight: float, seed: int
) -> None:
    box = SwappingBox(places, weight, Random(seed))
    for one in rounds:
        box.serve("x", one.served[0])
        box.load("y", one.loads_s[0], box.swapper)
        box.serve("y", one.served[1])
        box.load("x", one.loads_s[1], box.swapper if one.back_for_swapper else box.steady)
    assert max(box.leads, default=0.0) <= COST_MAX * (places + 1)


def test_the_charge_is_what_the_servers_work_off_in_these_seconds() -> None:
    shares: FairShares[str] = FairShares()
    x, y = (FairQueue(shares, depth=5, places=1) for _ in range(2))
    ann = shares.flow("ann", "acme", limit=5, weight=2.0)
    ben = shares.flow("ben", "other", limit=5)
    x.ask("a", ann, expected=100, now=0.0)
    x.leave("a", ann, now=2.0, cost=600)
    assert (x.tokens_per_s, y.tokens_per_s) == (300.0, UNMEASURED_PER_S)
    x.ask("b", ben, expected=0, now=3.0)
    x.ask("a", ann, expected=100, now=3.0)
    before = {view.name: view.tokens_ahead for view in x.view(3.0).tenants}
    shares.charge_load(y, "acme", "ann", Band.NORMAL, 10.0)
    after = {view.name: view for view in x.view(3.0).tenants}
    assert after["acme"].tokens_ahead - before["acme"] == 10 * 300 / 2  # by its weight
    assert {name: view.load_s for name, view in after.items()} == {"acme": 10.0, "other": 0.0}


def test_a_load_is_charged_to_the_agent_too_before_others_of_its_tenant() -> None:
    shares: FairShares[str] = FairShares()
    line = FairQueue(shares, depth=9, places=0)
    ann, bob = (shares.flow(name, "acme", limit=5) for name in ("ann", "bob"))
    for name, flow in (("a1", ann), ("b1", bob), ("a2", ann), ("b2", bob)):
        line.ask(name, flow, expected=100, now=0.0)
    shares.charge_load(line, "acme", "ann", Band.NORMAL, 30.0)
    assert line.resize(1) == ["b1"]
    assert line.leave("b1", bob, now=1.0) == ["b2"]
    assert line.leave("b2", bob, now=2.0) == ["a1"]  # a place is never idle for it


def test_where_it_does_not_wait_nothing_is_charged_and_a_tenant_without_agents_is_passed_over() -> None:
    shares: FairShares[str] = FairShares()
    x, y = (FairQueue(shares, depth=5, places=1) for _ in range(2))
    ann, ben = shares.flow("ann", "acme", limit=5), shares.flow("ben", "other", limit=5)
    x.ask("a0", ann, expected=1, now=0.0)
    x.leave("a0", ann, now=1.0)
    shares.charge_load(y, "acme", "ann", Band.NORMAL, 50.0)
    shares.charge_load(y, "nobody", "ann", Band.NORMAL, 50.0)
    x.ask("b0", ben, expected=1, now=2.0)
    x.ask("a1", ann, expected=1, now=2.0)
    x.ask("b1", ben, expected=1, now=2.1)
    assert x.leave("b0", ben, now=3.0) == ["a1"]


async def test_a_load_that_the_daemon_tells_of_puts_its_tenant_behind_the_others(tmp_path: Path) -> None:
    async with pooled(tmp_path, "a") as pool:
        pool.proxy.another("bob", tenant="acme")
        pool.tell(pool.row("a", is_open=False))
        client = await pool.client()
        client.writer.write(ask("a"))
        await pool.waits("a")
        alice = pool.proxy.alice.row
        said = LoadCharged(id="a-1", tenant=alice.tenant, agent=alice.id, band=Band.NORMAL, seconds=12.34)
        pool.orders.order(said, None)
        pool.orders.order(msgspec.structs.replace(said, id="b-1"), None)  # a slot that is gone meanwhile
        view = {row.name: row for row in pool.proxy.registry.queue_view(0.0).tenants}
        assert (view[alice.tenant].load_s, view["acme"].load_s) == (12.3, 0.0)
        assert view[alice.tenant].tokens_ahead - view["acme"].tokens_ahead == round(12.34 * UNMEASURED_PER_S, 1)
        pool.orders.order(SlotIs(slot=pool.row("a", generation=2)), None)
        assert (await client.answer())[0] == 200
