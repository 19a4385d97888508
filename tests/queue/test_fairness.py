"""The figures of fairness, over thousands of requests in simulated time: shares of tokens, waits, throughput.

The backend has places and gives `TOKENS_PER_S` in each. Clients are closed loops, or come at random moments of a
fixed seed. The same against the real proxy: benchmarks/fairness.py.
"""

from __future__ import annotations

import heapq
import random
import statistics
from collections.abc import Callable
from itertools import count

import pytest

from hive.domain import Band
from hive.queue.queue import FairQueue, FairShares, Flow, QueueVerdict

TOKENS_PER_S = 1000.0
SHORT, LONG = 100.0, 1000.0
PLACES = 4


class Request:
    """`then(refused)` is called at its end: None, or after how many seconds to come again."""

    def __init__(
        self,
        queue: FairQueue[Request],
        flow: Flow,
        tokens: float,
        band: Band,
        asked_at: float,
        then: Callable[[float | None], None],
    ):
        self.queue = queue
        self.flow = flow
        self.tokens = tokens
        self.band = band
        self.asked_at = asked_at
        self.started_at: float | None = None
        self.refused = False
        self.then = then


class Simulation:
    """Everything that happens, in order of time. `expects`: tokens expected of a request that will take so many;
    `second`: a line of its own, before another server."""

    def __init__(
        self,
        *,
        places: int = PLACES,
        depth: int = 16,
        wait_s: float = 30.0,
        expects: Callable[[float], float] = lambda tokens: tokens,
    ) -> None:
        self.shares: FairShares[Request] = FairShares()
        self.queue = FairQueue(self.shares, depth=depth, places=places)
        self.second = FairQueue(self.shares, depth=depth, places=places)
        self.now = 0.0
        self.started: list[Request] = []
        self.done: list[Request] = []
        self.refusals = 0
        self.refused_agents: set[str] = set()
        self._expects = expects
        self._wait_s = wait_s
        self._order = count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []

    def at(self, moment: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (moment, next(self._order), what))

    def run(self, *, until: Callable[[], bool]) -> None:
        while not until():
            self.now, _, what = heapq.heappop(self._events)
            what()

    def ask(
        self,
        flow: Flow,
        tokens: float,
        then: Callable[[float | None], None],
        band: Band = Band.NORMAL,
        queue: FairQueue[Request] | None = None,
    ) -> None:
        queue = queue or self.queue
        request = Request(queue, flow, tokens, band, self.now, then)
        verdict = queue.ask(request, flow, band=band, expected=self._expects(tokens), now=self.now)
        if verdict is QueueVerdict.GO:
            self._start(request)
        elif verdict is QueueVerdict.FULL:
            self._refuse(request)
        else:
            self.at(self.now + self._wait_s, lambda: self._give_up(request))
        while queue.displaced:
            self._refuse(queue.displaced.pop())

    def _start(self, request: Request) -> None:
        request.started_at = self.now
        self.started.append(request)
        self.at(self.now + request.tokens / TOKENS_PER_S, lambda: self._end(request))

    def _end(self, request: Request) -> None:
        for following in request.queue.leave(request, request.flow, now=self.now, cost=request.tokens):
            self._start(following)
        self.done.append(request)
        request.then(None)

    def _give_up(self, request: Request) -> None:
        if request.started_at is None and not request.refused:
            request.queue.leave(request, request.flow, now=self.now)
            request.queue.refused(request.flow, self.now)
            self._refuse(request)

    def _refuse(self, request: Request) -> None:
        request.refused = True
        self.refusals += 1
        self.refused_agents.add(request.flow.agent)
        request.then(request.queue.retry_after_s(request.flow, self.now))

    # clients ----------------------------------------------------------------------------------------------------------

    def backlogged(
        self,
        flow: Flow,
        tokens: float,
        *,
        open_at_once: int,
        band: Band = Band.NORMAL,
        retry_s: float | None = None,
        queue: FairQueue[Request] | None = None,
    ) -> None:
        """Always so many open; a refused one comes again when told, or after `retry_s` if that is given."""

        def once() -> None:
            self.ask(flow, tokens, ended, band, queue)

        def ended(refused_s: float | None) -> None:
            wait_s = 0.0 if refused_s is None else (refused_s if retry_s is None else retry_s)
            self.at(self.now + wait_s, once)

        for _ in range(open_at_once):
            self.at(self.now, once)

    def now_and_then(self, flow: Flow, tokens: float, *, per_s: float, chance: random.Random) -> None:
        """One after another at random moments, whether or not the last one has ended."""

        def once() -> None:
            self.at(self.now + chance.expovariate(per_s), once)
            self.ask(flow, tokens, lambda refused_s: None)

        self.at(chance.expovariate(per_s), once)

    # figures ----------------------------------------------------------------------------------------------------------

    def tokens_of(self, tenant: str) -> float:
        return sum(request.tokens for request in self.done if request.flow.tenant == tenant)

    def share_of(self, tenant: str) -> float:
        return self.tokens_of(tenant) / sum(request.tokens for request in self.done)

    def waits_of(self, agent: str) -> list[float]:
        return [
            request.started_at - request.asked_at
            for request in self.done
            if request.flow.agent == agent and request.started_at is not None
        ]


def p95(waits: list[float]) -> float:
    return statistics.quantiles(waits, n=20)[-1]


@pytest.mark.parametrize(
    "expects",
    [lambda tokens: tokens, lambda tokens: 550.0, lambda tokens: 1.0, lambda tokens: 20 * tokens],
    ids=["known", "the-same-of-all", "next-to-nothing", "far-too-much"],
)
@pytest.mark.parametrize(("agents", "open_at_once"), [(1, 12), (12, 1)], ids=["one-agent", "many-agents"])
def test_tokens_are_shared_within_5_percent_with_service_times_of_10_to_1(
    expects: Callable[[float], float], agents: int, open_at_once: int
) -> None:
    simulation = Simulation(expects=expects)
    for tenant, tokens in (("short", SHORT), ("long", LONG)):
        for number in range(agents):
            flow = simulation.shares.flow(f"{tenant}-{number}", tenant, limit=10)
            simulation.backlogged(flow, tokens, open_at_once=open_at_once)
    simulation.run(until=lambda: len(simulation.done) >= 2000)
    assert simulation.share_of("short") == pytest.approx(0.5, rel=0.05)


def test_tokens_are_shared_by_weight_within_5_percent() -> None:
    simulation = Simulation(expects=lambda tokens: 550.0)
    for tenant, tokens, weight in (("heavy", LONG, 3), ("light", SHORT, 1)):
        flow = simulation.shares.flow(tenant, tenant, limit=10, weight=weight)
        simulation.backlogged(flow, tokens, open_at_once=12)
    simulation.run(until=lambda: len(simulation.done) >= 2000)
    assert simulation.share_of("heavy") == pytest.approx(0.75, rel=0.05)


def test_agents_of_a_tenant_share_its_tokens_within_5_percent() -> None:
    simulation = Simulation(expects=lambda tokens: 550.0)
    for agent, tokens in (("short", SHORT), ("long", LONG)):
        simulation.backlogged(simulation.shares.flow(agent, "t", limit=10), tokens, open_at_once=8)
    simulation.run(until=lambda: len(simulation.done) >= 2000)
    short = sum(request.tokens for request in simulation.done if request.flow.agent == "short")
    assert short / simulation.tokens_of("t") == pytest.approx(0.5, rel=0.05)


@pytest.mark.parametrize(("tenants", "places"), [("ab", 3), ("aa", 3), ("ab", 4)])
def test_a_limit_that_allows_an_agent_its_share_does_not_cost_it_any(tenants: str, places: int) -> None:
    simulation = Simulation(places=places, depth=40, expects=lambda tokens: 550.0)
    held = simulation.shares.flow("held", tenants[0], limit=2)
    free = simulation.shares.flow("free", tenants[1], limit=10)
    simulation.backlogged(held, SHORT, open_at_once=12)
    simulation.backlogged(free, LONG, open_at_once=12)
    simulation.run(until=lambda: len(simulation.done) >= 2000)
    of_held = sum(request.tokens for request in simulation.done if request.flow is held)
    assert of_held / sum(request.tokens for request in simulation.done) == pytest.approx(0.5, rel=0.05)


@pytest.mark.parametrize("tokens", [SHORT, 5 * SHORT])
@pytest.mark.parametrize("tenants", ["abc", "aaa"], ids=["tenants", "agents of one tenant"])
def test_one_that_asks_in_two_lines_has_no_more_than_those_that_ask_in_one(tenants: str, tokens: float) -> None:
    """Two servers, three agents that always have more to ask: two thirds of a server for each."""
    simulation = Simulation(depth=40, expects=lambda tokens: 300.0)
    both, first, second = (
        simulation.shares.flow(f"agent-{number}", tenant, limit=20) for number, tenant in enumerate(tenants)
    )
    for flow, queue in (
        (both, simulation.queue),
        (both, simulation.second),
        (first, simulation.queue),
        (second, simulation.second),
    ):
        simulation.backlogged(flow, tokens, open_at_once=12, queue=queue)
    simulation.run(until=lambda: len(simulation.done) >= 3000)
    had = {flow: sum(request.tokens for request in simulation.done if request.flow is flow) for flow in (both, first)}
    total = sum(request.tokens for request in simulation.done)
    assert had[both] / total == pytest.approx(1 / 3, rel=0.05)
    assert had[first] / total == pytest.approx(1 / 3, rel=0.05)


def test_one_that_has_a_server_for_itself_still_has_a_part_of_the_other() -> None:
    """It is ten times as fast: without a bound what it gives would be held against the tenant for ever."""
    simulation = Simulation(depth=40)
    both, first = (simulation.shares.flow(name, name, limit=20) for name in ("both", "first"))
    simulation.backlogged(both, SHORT, open_at_once=12)
    simulation.backlogged(first, SHORT, open_at_once=12)
    simulation.second.resize(10 * PLACES)
    simulation.backlogged(both, SHORT, open_at_once=12, queue=simulation.second)
    simulation.run(until=lambda: len(simulation.done) >= 8000)
    here = [request.flow for request in simulation.done if request.queue is simulation.queue]
    assert 0.01 < here.count(both) / len(here) < 0.2


def light_p95(neighbours: int, open_at_once: int, retry_s: float | None, tokens: float) -> float:
    """p95 wait of a tenant that asks for 40 % of its share, beside a tenant of so many agents."""
    simulation = Simulation(expects=lambda tokens: 300.0)
    light = simulation.shares.flow("light", "light", limit=10)
    for number in range(neighbours):
        flow = simulation.shares.flow(f"neighbour-{number}", "neighbour", limit=10)
        simulation.backlogged(flow, tokens, open_at_once=open_at_once, retry_s=retry_s)
    share_per_s = PLACES * TOKENS_PER_S / SHORT / 2
    simulation.now_and_then(light, SHORT, per_s=0.4 * share_per_s, chance=random.Random(3))
    simulation.run(until=lambda: simulation.now > 250)
    assert "light" not in simulation.refused_agents
    assert len(simulation.done) > 2000 or tokens == LONG
    return p95(simulation.waits_of("light"))


@pytest.mark.parametrize("tokens", [SHORT, LONG], ids=["same-service-times", "ten-times-as-long"])
def test_a_flood_from_many_agents_delays_a_tenant_below_its_share_no_more_than_one_equal_tenant(tokens: float) -> None:
    beside_an_equal = light_p95(1, PLACES + 2, None, tokens)
    beside_a_flood = light_p95(20, 4, 0.2, tokens)
    assert beside_a_flood <= 1.25 * beside_an_equal


def test_throughput_is_that_of_first_come_first_served() -> None:
    def tokens_per_s(tenants: tuple[str, str]) -> float:
        simulation = Simulation(expects=lambda tokens: 550.0, depth=64)
        chance = random.Random(5)
        for number in range(16):
            flow = simulation.shares.flow(f"agent-{number}", tenants[number % 2], limit=10)
            tokens = SHORT if number % 2 else LONG
            simulation.now_and_then(flow, tokens, per_s=0.1 if tokens == LONG else 6.0, chance=chance)
        simulation.run(until=lambda: len(simulation.done) >= 4000)
        return sum(request.tokens for request in simulation.done) / simulation.now

    first_come = tokens_per_s(("all", "all"))
    assert tokens_per_s(("a", "b")) >= 0.95 * first_come
    assert first_come > 0.95 * PLACES * TOKENS_PER_S


def test_the_bands_are_served_one_after_the_other() -> None:
    simulation = Simulation(depth=1000, wait_s=1e9)
    for band in (Band.LOW, Band.NORMAL, Band.HIGH):
        for tenant, tokens in (("short", SHORT), ("long", LONG)):
            flow = simulation.shares.flow(tenant, tenant, limit=10)
            for _ in range(100):
                simulation.ask(flow, tokens, lambda refused_s: None, band)
    simulation.run(until=lambda: len(simulation.done) == 600)
    expected = [Band.LOW] * PLACES + [Band.HIGH] * 200 + [Band.NORMAL] * 200 + [Band.LOW] * (200 - PLACES)
    assert [request.band for request in simulation.started] == expected


@pytest.mark.parametrize(
    ("siblings", "open_at_once", "tries_max"), [(1, 40, 1), (40, 1, 3)], ids=["one-flood", "forty-in-single-file"]
)
def test_a_polite_agent_beside_siblings_that_flood_is_served_after_few_refusals(
    siblings: int, open_at_once: int, tries_max: int
) -> None:
    """The siblings ignore `Retry-After` and come again every 50 ms; the polite one comes again when it was told to.

    Forty siblings would need 1.1 s each to have a place in turn, at the 20 requests/s there are; without credit the
    polite one, which looks once a second, would meet a free place about once in twenty times.
    """
    simulation = Simulation(places=2)
    for number in range(siblings):
        flow = simulation.shares.flow(f"sibling-{number}", "t", limit=10)
        simulation.backlogged(flow, SHORT, open_at_once=open_at_once, retry_s=0.05)
    polite = simulation.shares.flow("polite", "t", limit=10)
    tries: list[int] = []

    def ask() -> None:
        tries.append(tries.pop() + 1)
        simulation.ask(polite, SHORT, ended)

    def begin() -> None:
        tries.append(0)
        ask()

    def ended(refused_s: float | None) -> None:
        if refused_s is None:
            simulation.at(simulation.now + 1.0, begin)
        else:
            simulation.at(simulation.now + refused_s, ask)

    simulation.at(5.0, begin)
    simulation.run(until=lambda: simulation.now > 60)
    assert len(tries) >= 15
    assert max(tries) <= tries_max
    assert simulation.refusals > 10_000


def test_the_told_time_is_when_a_refused_request_finds_room() -> None:
    """Of requests that come back when they were told, nearly all find room."""
    simulation = Simulation(places=2)
    for number in range(24):
        flow = simulation.shares.flow(f"agent-{number}", "t", limit=10)
        simulation.backlogged(flow, LONG, open_at_once=1)
    simulation.run(until=lambda: len(simulation.done) >= 1000)
    assert simulation.refusals < 0.6 * len(simulation.done)
