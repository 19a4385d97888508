"""One to four lines under everything at once: a machine that tries all that can happen, and what must hold then."""

from __future__ import annotations

from itertools import count

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, precondition, rule

from hive.domain import Band
from hive.queue.queue import FairQueue, FairShares, Flow, QueueVerdict

GO, WAIT = QueueVerdict.GO, QueueVerdict.WAIT
RANKS = [Band.HIGH, Band.NORMAL, Band.LOW]
PLACES = st.sampled_from([0, 1, 1, 2, 4, None])
LINES = st.integers(0, 3)

Owner = tuple[FairQueue[int], Flow, Band]


class ManyLines(RuleBasedStateMachine):
    """Requests come, go, are cancelled, displaced and refused in several lines while places, limits and tenants change,
    lines are loaded and unloaded, closed and opened."""

    flows = Bundle("flows")

    @initialize(
        places=st.lists(PLACES, min_size=1, max_size=4),
        depth=st.integers(0, 4),
        load_depth=st.none() | st.integers(0, 3),
    )
    def start(self, places: list[int | None], depth: int, load_depth: int | None) -> None:
        self.shares: FairShares[int] = FairShares()
        self.depth, self.load_depth = depth, load_depth
        self.lines = [self.line(some) for some in places]
        self.now = 0.0
        self.number = count()
        self.agents = count()
        self.running: dict[int, Owner] = {}
        self.waiting: dict[int, Owner] = {}
        self.gone: dict[int, Owner] = {}
        self.known: set[Flow] = set()

    def line(self, places: int | None) -> FairQueue[int]:
        return FairQueue(self.shares, depth=self.depth, places=places, load_depth=self.load_depth)

    def any_line(self, which: int) -> FairQueue[int]:
        return self.lines[which % len(self.lines)]

    def running_of(self, flow: Flow) -> int:
        return sum(owner is flow for _, owner, _ in self.running.values())

    def waiting_of(self, line: FairQueue[int], tenant: str) -> int:
        return sum(at is line and flow.tenant == tenant for at, flow, _ in self.waiting.values())

    def admitted(self, waiters: list[int]) -> None:
        """Each was waiting, was the first of its agent and band in its line, and fits into places and limit."""
        for waiter in waiters:
            line, flow, band = self.waiting[waiter]
            assert waiter == next(other for other, owner in self.waiting.items() if owner == (line, flow, band))
            del self.waiting[waiter]
            self.running[waiter] = (line, flow, band)
            assert line.places is None or sum(at is line for at, _, _ in self.running.values()) <= line.places
            assert self.running_of(flow) <= flow.limit, "over all lines"
            for at, other, other_band in self.waiting.values():
                if at is line and RANKS.index(other_band) < RANKS.index(band):
                    assert other.running >= other.limit, "a higher band could have gone"

    @rule(target=flows, tenant=st.sampled_from("abc"), limit=st.integers(1, 3), weight=st.sampled_from([0.5, 1, 3]))
    def agent(self, tenant: str, limit: int, weight: float) -> object:
        if len(self.known) >= 8:
            return multiple()
        flow = self.shares.flow(f"agent{next(self.agents)}", tenant, limit=limit, weight=weight)
        self.known.add(flow)
        return flow

    @rule(
        which=LINES,
        flow=flows,
        band=st.sampled_from([Band.HIGH, Band.NORMAL, Band.NORMAL, Band.LOW]),
        expected=st.floats(0, 1e4),
        times=st.integers(1, 4),
    )
    def ask(self, which: int, flow: Flow, band: Band, expected: float, times: int) -> None:
        line = self.any_line(which)
        for _ in range(times):
            waiter = next(self.number)
            before = self.waiting_of(line, flow.tenant)
            verdict = line.ask(waiter, flow, band=band, expected=expected, now=self.now)
            if verdict is GO:
                self.waiting[waiter] = (line, flow, band)
                self.admitted([waiter])
            elif verdict is WAIT:
                self.waiting[waiter] = (line, flow, band)
            assert len(line.displaced) <= (verdict is WAIT)
            for lost in line.displaced:
                at, other, other_band = self.gone[lost] = self.waiting.pop(lost)
                assert (at, other.tenant) == (line, flow.tenant)
                assert RANKS.index(other_band) >= RANKS.index(band)
                assert before >= line.depth_now
            line.displaced.clear()
            assert self.waiting_of(line, flow.tenant) <= max(line.depth_now, before)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), cost=st.none() | st.floats(0, 1e5))
    def finish(self, data: st.DataObject, cost: float | None) -> None:
        waiter = data.draw(st.sampled_from(list(self.running)))
        line, flow, _ = self.gone[waiter] = self.running.pop(waiter)
        turns = line.leave(waiter, flow, now=self.now, cost=cost)
        for turn in turns:
            at, owner, _ = self.waiting[turn]
            assert at is line or owner is flow, "elsewhere only its own agent can go"
        self.admitted(turns)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), refused=st.booleans())
    def cancel(self, data: st.DataObject, refused: bool) -> None:
        waiter = data.draw(st.sampled_from(list(self.waiting)))
        line, flow, _ = self.gone[waiter] = self.waiting.pop(waiter)
        assert line.leave(waiter, flow, now=self.now) == []
        if refused:
            line.refused(flow, self.now)

    @precondition(lambda self: self.gone)
    @rule(data=st.data())
    def leave_again(self, data: st.DataObject) -> None:
        waiter = data.draw(st.sampled_from(sorted(self.gone)))
        line, flow, _ = self.gone[waiter]
        assert line.leave(waiter, flow, now=self.now) == []

    @rule(which=LINES, places=PLACES)
    def resize(self, which: int, places: int | None) -> None:
        line = self.any_line(which)
        turns = line.resize(places)
        assert all(self.waiting[turn][0] is line for turn in turns)
        self.admitted(turns)

    @rule(which=LINES, places=PLACES)
    def close_and_open(self, which: int, places: int | None) -> None:
        line = self.any_line(which)
        if not (line.running or line.waiting):
            line.close()
            self.lines[self.lines.index(line)] = self.line(places)
            self.gone = {waiter: owner for waiter, owner in self.gone.items() if owner[0] is not line}

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
        if not hasattr(self, "lines"):
            return
        for line in self.lines:
            assert line.running == sum(at is line for at, _, _ in self.running.values())
            assert line.waiting == sum(at is line for at, _, _ in self.waiting.values())
        for flow in self.known:
            assert flow.running == self.running_of(flow)
            assert flow.waiting == sum(owner is flow for _, owner, _ in self.waiting.values())
            assert all(1 <= line.retry_after_s(flow, self.now) <= 120 for line in self.lines)

    @invariant()
    def no_place_is_idle_while_somebody_may_have_it(self) -> None:
        for line in self.lines if hasattr(self, "lines") else []:
            if line.places is None or line.running < line.places:
                assert all(flow.running >= flow.limit for at, flow, _ in self.waiting.values() if at is line)

    def teardown(self) -> None:
        """All requests leave: nothing is left of any."""
        if not hasattr(self, "lines"):
            return
        for waiter, (line, flow, _) in list(self.waiting.items()):
            line.leave(waiter, flow, now=self.now)
        for waiter, (line, flow, _) in list(self.running.items()):
            assert line.leave(waiter, flow, now=self.now) == []
        tables = self.shares.flows
        assert not any(level.ready for line in tables.lines for level in line.levels)
        for of_tenant in [line for tenant in tables.tenants.values() for line in tenant.lines.values()]:
            assert (of_tenant.waiting, of_tenant.waits) == (0, {})
            assert all(abs(account.pending) < 1e-3 and account.waiting == 0 for account in of_tenant.accounts)
        for flow in list(tables.by_key.values()):
            self.shares.forget(flow)
        for line in self.lines:
            line.close()
        assert repr(self.shares) == "<FairShares 0 queues, <Flows 0 of 0 tenants, 0 extra>>"


TestManyLines = ManyLines.TestCase
TestManyLines.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
