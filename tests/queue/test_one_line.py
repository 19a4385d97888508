"""One line alone, beside the queue as it was before there were several: the same answers in the same order."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hive.domain import Band
from hive.link.requests import QueueView
from hive.queue import flows as tables
from hive.queue.queue import FairQueue, FairShares, Flow
from tests.queue import one_line_queue
from tests.queue.one_line_queue import OneLineFlow, OneLineQueue

TENANTS = ("a", "b", "c")
BANDS = [Band.NORMAL, Band.NORMAL, Band.HIGH, Band.LOW]


@pytest.fixture(autouse=True, scope="module")
def few_extra_flows() -> Any:
    """Flows are dropped and kept again often."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (tables, one_line_queue):
            patch.setattr(module, "EXTRA_FLOWS", 2)
        yield


class Both:
    """The same done to both queues; every answer is compared. Requests are numbers."""

    def __init__(self, depth: int, places: int | None, load_depth: int | None = None) -> None:
        self.then = OneLineQueue[int](depth=depth, places=places)
        self.shares: FairShares[int] = FairShares()
        self.now_ = FairQueue(self.shares, depth=depth, places=places, load_depth=load_depth)
        self.now = 0.0
        self.flows: list[tuple[OneLineFlow, Flow]] = []
        self.owner: dict[int, tuple[OneLineFlow, Flow]] = {}
        self.open: list[int] = []
        self._number = count()

    def same(self, then: Any, now: Any) -> Any:
        assert now == then
        return now

    def flow(self, agent: int, tenant: int, limit: int, weight: float) -> None:
        name, of = f"agent{agent}", TENANTS[tenant]
        then = self.then.flow(name, of, limit=limit, weight=weight)
        now = self.shares.flow(name, of, limit=limit, weight=weight)
        if (then, now) not in self.flows:
            self.flows.append((then, now))

    def any_flow(self, which: int) -> tuple[OneLineFlow, Flow]:
        return self.flows[which % len(self.flows)]

    def ask(self, which: int, band: int, expected: float) -> None:
        waiter, (then, now) = next(self._number), self.any_flow(which)
        asked: dict[str, Any] = {"band": BANDS[band], "expected": expected, "now": self.now}
        verdict = self.same(self.then.ask(waiter, then, **asked), self.now_.ask(waiter, now, **asked))
        self.owner[waiter] = then, now
        if verdict.value != "full":
            self.open.append(waiter)
        for lost in self.same(self.then.displaced, self.now_.displaced):
            self.open.remove(lost)
        self.then.displaced.clear()
        self.now_.displaced.clear()

    def leave(self, which: int, cost: float | None, refused: bool) -> None:
        if self.open:
            waiter = self.open.pop(which % len(self.open))
            then, now = self.owner[waiter]
            self.same(
                self.then.leave(waiter, then, now=self.now, cost=cost),
                self.now_.leave(waiter, now, now=self.now, cost=cost),
            )
            if refused:
                self.then.refused(then, self.now)
                self.now_.refused(now, self.now)

    def move(self, which: int, tenant: int, limit: int, weight: float) -> None:
        then, now = self.any_flow(which)
        to: dict[str, Any] = {"tenant": TENANTS[tenant], "limit": limit, "weight": weight}
        self.same(self.then.move(then, **to), self.shares.move(now, **to))

    def set_limit(self, which: int, limit: int) -> None:
        then, now = self.any_flow(which)
        self.same(self.then.set_limit(then, limit), self.shares.set_limit(now, limit))

    def forget(self, which: int) -> None:
        then, now = self.any_flow(which)
        self.then.forget(then)
        self.shares.forget(now)

    def resize(self, places: int | None) -> None:
        self.same(self.then.resize(places), self.now_.resize(places))

    def wait(self, seconds: float) -> None:
        self.now += seconds

    def compare(self) -> None:
        self.same(by_name(self.then.view(self.now)), by_name(self.now_.view(self.now)))
        for then, now in self.flows:
            self.same((then.running, then.waiting, then.limit), (now.running, now.waiting, now.limit))
            self.same(self.then.retry_after_s(then, self.now), self.now_.retry_after_s(now, self.now))
            self.same(then.mean_wait_ms, self.now_.mean_wait_ms(now))


def by_name(view: QueueView) -> tuple[object, ...]:
    return view.running, view.waiting, view.places, view.drain_per_s, sorted(view.tenants, key=lambda row: row.name)


COUNTS = st.integers(0, 15)
LIMITS = st.integers(1, 3)
WEIGHTS = st.sampled_from([1.0, 1.0, 0.5, 3.0])
COSTS = st.none() | st.sampled_from([0.0, 1.0, 100.0, 100.0]) | st.floats(0, 1e5)


Step = tuple[str, tuple[Any, ...]]
"""A method of `Both`, with its arguments."""


def step(name: str, *arguments: st.SearchStrategy[Any]) -> st.SearchStrategy[Step]:
    return st.tuples(st.just(name), st.tuples(*arguments))


ASK = step("ask", COUNTS, st.integers(0, 3), st.sampled_from([1.0, 100.0]) | st.floats(0, 1e4))
LEAVE = step("leave", COUNTS, COSTS, st.booleans())
SELDOM = st.one_of(
    step("flow", st.integers(0, 5), st.integers(0, 2), LIMITS, WEIGHTS),
    step("move", COUNTS, st.integers(0, 2), LIMITS, WEIGHTS),
    step("set_limit", COUNTS, LIMITS),
    step("forget", COUNTS),
    step("resize", st.sampled_from([0, 1, 2, 4, None])),
    step("wait", st.sampled_from([0.01, 1.0, 50.0, 121.0])),
)
PROGRAMS = st.lists(st.one_of(ASK, ASK, ASK, LEAVE, LEAVE, SELDOM), min_size=20, max_size=120)


@settings(max_examples=200)
@given(st.integers(0, 4), st.sampled_from([1, 1, 2, 3, None]), st.lists(WEIGHTS, min_size=3, max_size=3), PROGRAMS)
def test_one_line_answers_as_the_queue_did_before_there_were_several(
    depth: int, places: int | None, weights: list[float], program: list[Step]
) -> None:
    both = Both(depth, places)
    for agent in range(4):
        both.flow(agent, agent % 3, 1 + agent % 2, weights[agent % 3])
    for name, arguments in program:
        getattr(both, name)(*arguments)
        both.compare()
    while both.open:
        both.leave(0, 100.0, False)
        both.compare()
