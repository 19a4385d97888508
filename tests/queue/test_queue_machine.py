"""The queue under everything at once: a machine that tries all that can happen, and what must hold meanwhile."""

from __future__ import annotations

from itertools import count

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, precondition, rule

from hive.domain import Band
from hive.queue.queue import FairQueue, FairShares, Flow, QueueVerdict
from tests.examples import examples

GO, WAIT = QueueVerdict.GO, QueueVerdict.WAIT
HIGH, NORMAL, LOW = Band.HIGH, Band.NORMAL, Band.LOW
RANKS = [HIGH, NORMAL, LOW]


class Everything(RuleBasedStateMachine):
    """Requests come, go, are cancelled, displaced and refused while places, limits and tenants change."""

    flows = Bundle("flows")

    @initialize(places=st.sampled_from([1, 2, 5, None]), depth=st.integers(0, 4))
    def start(self, places: int | None, depth: int) -> None:
        self.shares: FairShares[int] = FairShares()
        self.queue = FairQueue(self.shares, depth=depth, places=places)
        self.places = places
        self.now = 0.0
        self.number = count()
        self.agents = count()
        self.running: dict[int, tuple[Flow, Band]] = {}
        self.waiting: dict[int, tuple[Flow, Band]] = {}
        self.gone: set[int] = set()
        self.known: set[Flow] = set()

    def admitted(self, waiters: list[int]) -> None:
        """Each was waiting, was the first of its line, and fits into places and limit."""
        for waiter in waiters:
            flow, band = self.waiting[waiter]
            assert waiter == next(other for other, owner in self.waiting.items() if owner == (flow, band))
            del self.waiting[waiter]
            self.running[waiter] = (flow, band)
            assert self.places is None or len(self.running) <= self.places
            assert sum(owner is flow for owner, _ in self.running.values()) <= flow.limit
            for other, other_band in self.waiting.values():
                if RANKS.index(other_band) < RANKS.index(band):
                    assert other.running >= other.limit, "a higher band could have gone"

    @rule(target=flows, tenant=st.sampled_from("abc"), limit=st.integers(1, 3), weight=st.sampled_from([0.5, 1, 3]))
    def agent(self, tenant: str, limit: int, weight: float) -> object:
        if len(self.known) >= 12:
            return multiple()
        flow = self.shares.flow(f"agent{next(self.agents)}", tenant, limit=limit, weight=weight)
        self.known.add(flow)
        return flow

    @rule(
        flow=flows,
        band=st.sampled_from([HIGH, NORMAL, NORMAL, LOW]),
        expected=st.floats(0, 1e4),
        times=st.integers(1, 4),
    )
    def ask(self, flow: Flow, band: Band, expected: float, times: int) -> None:
        for _ in range(times):
            waiter = next(self.number)
            of_tenant = sum(other.tenant == flow.tenant for other, _ in self.waiting.values())
            verdict = self.queue.ask(waiter, flow, band=band, expected=expected, now=self.now)
            if verdict is GO:
                self.waiting[waiter] = (flow, band)
                self.admitted([waiter])
            elif verdict is WAIT:
                self.waiting[waiter] = (flow, band)
            assert len(self.queue.displaced) <= (verdict is WAIT)
            for lost in self.queue.displaced:
                other, other_band = self.waiting.pop(lost)
                self.gone.add(lost)
                assert other.tenant == flow.tenant
                assert RANKS.index(other_band) >= RANKS.index(band)
                assert of_tenant >= self.queue.depth
            self.queue.displaced.clear()
            now_of_tenant = sum(other.tenant == flow.tenant for other, _ in self.waiting.values())
            assert now_of_tenant <= max(self.queue.depth, of_tenant)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), cost=st.none() | st.floats(0, 1e5))
    def finish(self, data: st.DataObject, cost: float | None) -> None:
        waiter = data.draw(st.sampled_from(list(self.running)))
        flow, _ = self.running.pop(waiter)
        self.gone.add(waiter)
        self.admitted(self.queue.leave(waiter, flow, now=self.now, cost=cost))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), refused=st.booleans())
    def cancel(self, data: st.DataObject, refused: bool) -> None:
        waiter = data.draw(st.sampled_from(list(self.waiting)))
        flow, _ = self.waiting.pop(waiter)
        self.gone.add(waiter)
        assert self.queue.leave(waiter, flow, now=self.now) == []
        if refused:
            self.queue.refused(flow, self.now)

    @rule(flow=flows, data=st.data())
    def leave_again(self, flow: Flow, data: st.DataObject) -> None:
        if self.gone:
            assert self.queue.leave(data.draw(st.sampled_from(sorted(self.gone))), flow, now=self.now) == []

    @rule(places=st.sampled_from([0, 1, 2, 5, None]))
    def resize(self, places: int | None) -> None:
        self.places = places
        self.admitted(self.queue.resize(places))

    @rule(flow=flows, limit=st.integers(1, 4))
    def set_limit(self, flow: Flow, limit: int) -> None:
        self.admitted(self.shares.set_limit(flow, limit))

    @rule(flow=flows, tenant=st.sampled_from("abcd"), limit=st.integers(1, 4), weight=st.sampled_from([1, 2]))
    def move(self, flow: Flow, tenant: str, limit: int, weight: float) -> None:
        if flow in self.known:
            self.admitted(self.shares.move(flow, tenant=tenant, limit=limit, weight=weight))

    @rule(flow=flows)
    def forget(self, flow: Flow) -> None:
        if flow in self.known:
            self.shares.forget(flow)
            self.known.discard(flow)

    @rule(seconds=st.sampled_from([0.01, 1.0, 50.0, 121.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def counts_agree(self) -> None:
        if not hasattr(self, "queue"):
            return
        assert (self.queue.running, self.queue.waiting) == (len(self.running), len(self.waiting))
        for flow in self.known:
            assert flow.running == sum(owner is flow for owner, _ in self.running.values())
            assert flow.waiting == sum(owner is flow for owner, _ in self.waiting.values())
            assert 1 <= self.queue.retry_after_s(flow, self.now) <= 120

    @invariant()
    def no_place_is_idle_while_somebody_may_go(self) -> None:
        if hasattr(self, "queue") and (self.places is None or len(self.running) < self.places):
            assert all(flow.running >= flow.limit for flow, _ in self.waiting.values())

    def teardown(self) -> None:
        """All requests leave: nothing is left of any."""
        if not hasattr(self, "queue"):
            return
        for waiter, (flow, _) in list(self.waiting.items()):
            self.queue.leave(waiter, flow, now=self.now)
        for waiter, (flow, _) in list(self.running.items()):
            assert self.queue.leave(waiter, flow, now=self.now) == []
        assert (self.queue.running, self.queue.waiting) == (0, 0)
        flows = self.shares.flows
        for line in flows.lines:
            assert not any(level.ready for level in line.levels)
        for of_tenant in [found for tenant in flows.tenants.values() for found in tenant.lines.values()]:
            assert (of_tenant.waiting, of_tenant.waits) == (0, {})
            assert all(abs(account.pending) < 1e-3 and account.waiting == 0 for account in of_tenant.accounts)
        for flow in list(flows.by_key.values()):
            self.shares.forget(flow)
        assert repr(flows) == "<Flows 0 of 0 tenants, 0 extra>"


TestEverything = Everything.TestCase
TestEverything.settings = settings(max_examples=examples(150), stateful_step_count=60, deadline=None)
