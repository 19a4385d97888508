"""Several lines that share one account: an agent's limit over all of them, what counts of other lines, and what never
does. Requests are named by their agent, as in turns.py."""

from __future__ import annotations

import math
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hive.domain import Band
from hive.queue.fair_share import CARRIED_MAX_TOKENS
from hive.queue.queue import FairQueue, FairShares, Flow, QueueVerdict
from tests.queue.turns import agent_of

GO, WAIT, FULL = QueueVerdict.GO, QueueVerdict.WAIT, QueueVerdict.FULL


class Lines:
    """A queue for each of `places`, in a time that stands still unless it is moved."""

    def __init__(self, *places: int | None, depth: int = 16, load_depth: int | None = None) -> None:
        self.shares: FairShares[str] = FairShares()
        self.lines = [FairQueue(self.shares, depth=depth, places=some, load_depth=load_depth) for some in places]
        self.now = 0.0
        self.flows: dict[str, Flow] = {}
        self.at: dict[str, FairQueue[str]] = {}
        self._number = count(1)

    def agents(self, *names: str, limit: int = 10) -> None:
        """Each of a tenant of its own name; `ann.acme` is of tenant acme."""
        for name in names:
            agent, _, tenant = name.partition(".")
            self.flows[agent] = self.shares.flow(agent, tenant or agent, limit=limit)

    def ask(self, line: int, name: str, *, expected: float = 100, band: Band = Band.NORMAL) -> tuple[str, QueueVerdict]:
        waiter = f"{name}{next(self._number)}"
        self.at[waiter] = self.lines[line]
        self.now += 1e-3
        return waiter, self.lines[line].ask(waiter, self.flows[name], band=band, expected=expected, now=self.now)

    def leave(self, waiter: str, cost: float | None = None) -> list[str]:
        self.now += 1e-3
        return self.at[waiter].leave(waiter, self.flows[agent_of(waiter)], now=self.now, cost=cost)

    def turns(self, line: int, waiter: str, number: int, *, cost: float = 100) -> str:
        """The agents that have the next turns in a line of one place, each coming again at once."""
        names = ""
        for _ in range(number):
            (waiter,) = self.leave(waiter, cost)
            assert self.at[waiter] is self.lines[line]
            names += agent_of(waiter)
            self.ask(line, agent_of(waiter))
        return names


# the limit of an agent ------------------------------------------------------------------------------------------------


def test_an_agent_that_falls_below_its_limit_gets_a_place_in_another_line() -> None:
    box = Lines(1, 5)
    box.agents("ann", limit=1)
    first, second = box.ask(0, "ann"), box.ask(1, "ann")
    assert (first[1], second[1]) == (GO, WAIT)
    assert box.leave(first[0]) == [second[0]]
    assert (box.lines[0].running, box.lines[1].running) == (0, 1)


def test_of_an_agents_requests_the_one_goes_first_that_came_first_in_whatever_line() -> None:
    box = Lines(1, 1, 1)
    box.agents("ann", limit=1)
    running = box.ask(0, "ann")[0]
    order = [box.ask(line, "ann")[0] for line in (2, 0, 1, 2)]
    high = box.ask(1, "ann", band=Band.HIGH)[0]
    for waiter in (high, *order):
        assert box.leave(running) == [waiter]
        running = waiter


def test_a_place_that_its_agent_may_not_take_goes_to_the_next_one_of_the_line() -> None:
    box = Lines(1, 1)
    box.agents("ann", limit=1)
    box.agents("ben")
    running = box.ask(0, "ann")[0]
    elsewhere, here, other = box.ask(1, "ann")[0], box.ask(0, "ann")[0], box.ask(0, "ben")[0]
    assert sorted(box.leave(running)) == [elsewhere, other]
    assert box.leave(elsewhere) == []
    assert box.leave(other) == [here]


def test_a_request_that_waits_holds_nothing_of_its_agents_limit() -> None:
    box = Lines(0, 1)
    box.agents("ann", limit=1)
    assert [box.ask(0, "ann")[1] for _ in range(5)] == [WAIT] * 5
    assert box.ask(1, "ann")[1] is GO


def test_a_raised_limit_looks_into_every_line() -> None:
    box = Lines(2, 2, 0)
    box.agents("ann", limit=1)
    box.ask(0, "ann")
    waiting = [box.ask(line, "ann")[0] for line in (2, 1, 0, 1, 0)]
    assert box.shares.set_limit(box.flows["ann"], 3) == waiting[1:3]
    assert box.shares.move(box.flows["ann"], tenant="other", limit=9, weight=1) == waiting[3:4]
    assert box.lines[2].resize(1) == waiting[:1]


def test_an_agent_at_its_limit_elsewhere_is_passed_over_and_not_lifted_beyond_the_others() -> None:
    box = Lines(1, 1)
    box.agents("ann", limit=1)
    box.agents("ben")
    running, elsewhere = box.ask(0, "ben")[0], box.ask(1, "ann")[0]
    box.ask(0, "ann"), box.ask(0, "ben"), box.ask(0, "ben")
    (running,) = box.leave(running)
    assert agent_of(running) == "ben"
    assert box.leave(elsewhere, 0.0) == []
    assert box.turns(0, running, 5) == "annbenannbenann"


def test_an_agent_that_reaches_its_limit_in_one_line_is_passed_over_in_the_others() -> None:
    box = Lines(1, 1)
    box.agents("ann", limit=1)
    box.agents("ben")
    other, waiting = box.ask(1, "ben")[0], box.ask(1, "ann")[0]
    running, verdict = box.ask(0, "ann")
    assert verdict is GO
    assert box.leave(other) == []
    assert box.leave(running) == [waiting]


def test_an_agent_held_back_by_what_it_runs_elsewhere_is_not_charged_twice() -> None:
    box = Lines(1, 1)
    box.agents("xen", limit=1)
    box.agents("yan")
    elsewhere, here = box.ask(1, "xen")[0], backlogged(box, "xen", "yan")
    assert box.turns(0, here, 10) == "yan" * 10
    assert box.leave(elsewhere, 500) == []
    assert box.turns(0, next(iter(box.lines[0]._running)), 2) == "xenyan"


# what counts of other lines -------------------------------------------------------------------------------------------


def backlogged(box: Lines, *names: str) -> str:
    """Two requests of each wait in the first line, for the one place of another agent; its request."""
    box.agents("first")
    running = box.ask(0, "first")[0]
    for name in names * 2:
        assert box.ask(0, name)[1] is WAIT
    return running


@pytest.mark.parametrize("tenants", ["xy", "tt"], ids=["of tenants", "of agents of one tenant"])
def test_what_is_given_in_one_line_counts_in_the_others_where_one_waits(tenants: str) -> None:
    box = Lines(1, 1)
    box.agents(f"xen.{tenants[0]}", f"yan.{tenants[1]}", "zoe")
    here, there = backlogged(box, "xen", "yan"), box.ask(1, "zoe")[0]
    waiting = box.ask(1, "xen")[0]
    assert box.leave(there) == [waiting]
    assert box.leave(waiting, 500) == []
    assert box.turns(0, here, 8, cost=100) == "yan" * 5 + "xenyanxen"


def test_running_requests_count_elsewhere_with_what_is_expected_of_them() -> None:
    box = Lines(1, 1)
    box.agents("xen", "yan")
    here = backlogged(box, "xen", "yan")
    running = box.ask(1, "xen", expected=450)[0]
    here = box.turns(0, here, 3)
    assert here == "yan" * 3
    box.leave(running, 0)
    assert box.turns(0, next(iter(box.lines[0]._running)), 4) == "xenxenxenyan"


def test_what_it_had_before_it_began_to_wait_counts_nowhere_else() -> None:
    box = Lines(1, 1)
    box.agents("xen", "yan")
    box.leave(box.ask(1, "xen")[0], 5000)
    assert box.turns(0, backlogged(box, "yan", "xen"), 4) == "yanxenyanxen"


def test_between_two_turns_no_more_counts_than_a_bound() -> None:
    box = Lines(1, 1)
    box.agents("xen", "yan")
    here = backlogged(box, "xen", "yan")
    box.leave(box.ask(1, "xen", expected=1)[0], 1e9)
    names = box.turns(0, here, 60)
    passed = math.ceil(CARRIED_MAX_TOKENS / 100)
    assert names == "yan" * passed + "xenyan" * ((60 - passed) // 2) + "xen" * ((60 - passed) % 2)


def test_a_tenant_that_is_lifted_in_a_busy_line_is_not_punished_in_another() -> None:
    box = Lines(1, 1)
    box.agents("xen", "yan", "pat", "quinn")
    there = box.ask(1, "pat")[0]
    box.ask(1, "pat"), box.ask(1, "quinn")
    box.turns(1, there, 40, cost=1e6)
    here = backlogged(box, "xen", "yan")
    box.ask(1, "xen")
    assert box.turns(0, here, 6) == "xenyanxenyanxenyan"


def test_a_newcomer_stands_beside_one_that_was_given_much_elsewhere() -> None:
    box = Lines(1, 1)
    box.agents("xen", "new")
    here = backlogged(box, "xen")
    box.leave(box.ask(1, "xen")[0], 1000)
    box.ask(0, "new"), box.ask(0, "new")
    assert box.turns(0, here, 4) == "xennewxennew"


def test_what_was_given_elsewhere_under_another_tenant_is_not_counted() -> None:
    box = Lines(1, 1)
    box.agents("xen", "yan.other")
    here = backlogged(box, "xen", "yan")
    box.leave(box.ask(1, "xen")[0], 2000)
    box.shares.move(box.flows["xen"], tenant="other", limit=10, weight=1)
    assert box.turns(0, here, 4).count("xen") == 2


def test_a_moved_agent_has_the_rank_of_a_newcomer_also_where_it_has_not_asked_yet() -> None:
    box = Lines(1)
    box.agents("ben.b", "new.a", "zoe")
    for cost in (1000, 0):
        box.leave(box.ask(0, "ben")[0], cost)
    box.shares.move(box.flows["new"], tenant="b", limit=10, weight=1)
    box.leave(box.ask(0, "new")[0], 500)
    running = box.ask(0, "zoe")[0]
    for name in ("ben", "new") * 2:
        box.ask(0, name)
    assert box.turns(0, running, 6) == "ben" * 5 + "new"


def test_being_idle_in_a_line_saves_nothing_up_there() -> None:
    box = Lines(1, 1)
    box.agents("xen", "pat", "quinn")
    box.leave(box.ask(0, "xen")[0])
    there = box.ask(1, "pat")[0]
    box.ask(1, "pat"), box.ask(1, "quinn")
    box.turns(1, there, 11, cost=1e6)
    there = next(iter(box.lines[1]._running))
    box.ask(1, "xen")
    names = box.turns(1, there, 9, cost=1e6)
    assert names.count("xen") == 3


# a line without places ------------------------------------------------------------------------------------------------


def test_those_who_wait_for_a_load_have_a_depth_of_their_own() -> None:
    box = Lines(0, 1, depth=3, load_depth=1)
    box.agents("ann.t", "ben.t")
    assert [box.ask(0, "ann")[1] for _ in range(2)] == [WAIT, FULL]
    assert [box.ask(1, "ann")[1] for _ in range(5)] == [GO, WAIT, WAIT, WAIT, FULL]
    assert (box.lines[0].depth_now, box.lines[1].depth_now) == (1, 3)
    box.lines[0].resize(1)
    assert [box.ask(0, "ben")[1] for _ in range(4)] == [WAIT, WAIT, WAIT, FULL]


def test_a_request_whose_turn_was_in_vain_stands_where_it_stood_also_beyond_the_depth() -> None:
    """Its server was gone; others came since."""
    box = Lines(2, depth=2)
    box.agents("ann.t", "ben.t")
    line, ann = box.lines[0], box.flows["ann"]
    first, second, third, fourth = (box.ask(0, "ann")[0] for _ in range(4))
    assert (line.running, line.waiting) == (2, 2)
    line.resize(0)
    for waiter, since in ((second, 2e-3), (first, 1e-3)):
        assert box.leave(waiter, 0.0) == []
        said = line.ask_again(waiter, ann, band=Band.NORMAL, expected=100, now=box.now, since=since)
        assert (said, line.displaced) == (WAIT, [])
    assert box.ask(0, "ann")[1] is FULL
    assert [line.resize(places) for places in range(1, 5)] == [[first], [second], [third], [fourth]]
    box.leave(first), box.leave(second)
    assert line.ask_again(first, ann, band=Band.NORMAL, expected=100, now=box.now, since=1e-3) is GO


def test_a_position_is_lost_in_its_own_line_only() -> None:
    box = Lines(1, 1, depth=2)
    box.agents("ann.t", "ben.t")
    for line in (0, 1):
        box.ask(line, "ann"), box.ask(line, "ann")
    lost = box.ask(1, "ann")[0]
    box.ask(0, "ann")
    assert box.ask(1, "ben")[1] is WAIT
    assert (box.lines[0].displaced, box.lines[1].displaced) == ([], [lost])


def test_position_credit_is_of_the_line_that_refused() -> None:
    box = Lines(1, 0, depth=1)
    box.agents("ann.t", "ben.t")
    box.ask(1, "ben")
    assert box.ask(1, "ann")[1] is FULL
    box.now += 1
    box.ask(0, "ben"), box.ask(0, "ben")
    assert box.ask(0, "ann")[1] is FULL, "no older right here"
    assert box.lines[0].displaced == []


def test_a_tenant_of_which_a_request_waits_for_a_load_begins_anew_in_the_warm_line() -> None:
    """As it does without that request, when its last agent is forgotten and it has a new one."""
    box = Lines(1, 0)
    box.agents("ann.t", "ben")
    box.leave(box.ask(0, "ann")[0], 5000)
    box.ask(1, "ann")
    box.shares.forget(box.flows["ann"])
    assert [row.tokens_ahead for row in box.lines[0].view(box.now).tenants] == [0, 0]


def test_a_line_is_closed_when_nothing_is_there() -> None:
    box = Lines(1, 1)
    box.agents("ann", "ben")
    running, waiting = box.ask(0, "ann")[0], box.ask(0, "ben")[0]
    elsewhere = [box.ask(1, "ben")[0], box.ask(1, "ann")[0]]
    with pytest.raises(ValueError, match="1 waiting, 1/1 running"):
        box.lines[0].close()
    box.leave(waiting)
    box.leave(running)
    box.lines[0].close()
    assert repr(box.shares) == "<FairShares 1 queues, <Flows 2 of 2 tenants, 0 extra>>"
    assert all(len(flow.standings) == 1 for flow in box.flows.values())
    assert box.leave(elsewhere[0]) == elsewhere[1:]


def test_what_counts_of_a_line_goes_on_to_count_after_another_one_was_closed() -> None:
    box = Lines(1, 1, 1)
    box.agents("xen", "yan")
    box.leave(box.ask(2, "xen")[0], 3000)
    here = backlogged(box, "xen", "yan")
    box.leave(box.ask(1, "xen")[0], 500)
    box.lines[2].close()
    assert box.turns(0, here, 8) == "yan" * 5 + "xenyanxen"


# nobody starves -------------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    others=st.integers(1, 3),
    siblings=st.integers(0, 2),
    places=st.integers(1, 3),
    given_elsewhere=st.lists(st.sampled_from([0.0, 50.0, 3000.0, 1e7]), min_size=1, max_size=8),
    before=st.integers(0, 30),
)
def test_whatever_its_tenant_is_given_elsewhere_a_request_has_its_turn_within_a_bound(
    others: int, siblings: int, places: int, given_elsewhere: list[float], before: int
) -> None:
    """Each request here costs 100 tokens; those elsewhere anything, and the waiting agent has them itself."""
    box = Lines(places, None)
    names = [chr(ord("a") + number) for number in range(others)]
    own = [f"s{'x' * number}" for number in range(siblings)]
    box.agents("me.mine", *(f"{name}.mine" for name in own), *names, limit=1000)
    running = [box.ask(0, names[0])[0] for _ in range(places)]
    for name in (*names, *own):
        for _ in range(places):
            box.ask(0, name)

    def turn() -> list[str]:
        admitted = box.leave(running.pop(0), 100)
        running.extend(admitted)
        for waiter in admitted:
            if agent_of(waiter) != "me":
                box.ask(0, agent_of(waiter))
        return admitted

    for _ in range(before):
        turn()
    mine = box.ask(0, "me")[0]
    passed = CARRIED_MAX_TOKENS / 100 + 2 + places
    bound = (siblings * passed + 1) * (others * passed + 1) + places
    leaves = 0
    while mine not in turn():
        leaves += 1
        assert leaves <= bound
        box.leave(box.ask(1, "me")[0], given_elsewhere[leaves % len(given_elsewhere)])


# a cold line is nobody else's affair ----------------------------------------------------------------------------------

COLD = 2
STEPS = st.one_of(
    *[st.tuples(st.just("ask"), st.integers(0, 2), st.integers(0, 5), st.sampled_from([1.0, 100.0, 700.0]))] * 4,
    *[st.tuples(st.just("leave"), st.integers(0, 30), st.sampled_from([0.0, 100.0, 900.0]), st.booleans())] * 3,
    st.tuples(st.just("limit"), st.integers(0, 5), st.integers(1, 3), st.none()),
    st.tuples(st.just("move"), st.integers(0, 5), st.integers(0, 2), st.integers(1, 3)),
    st.tuples(st.just("resize"), st.integers(0, 1), st.integers(0, 3), st.none()),
    st.tuples(st.just("forget"), st.integers(0, 5), st.none(), st.none()),
    st.tuples(st.just("wait"), st.sampled_from([0.1, 3.0, 130.0]), st.none(), st.none()),
)


def warm_history(program: list[tuple[Any, ...]], depth: int, *, with_cold: bool) -> list[object]:
    """All answers of two warm lines; the third one has no places, and is asked only `with_cold`."""
    box = Lines(1, 2, 0, depth=depth, load_depth=2)
    box.agents(*(f"{name}.{tenant}" for name, tenant in zip("abcdef", "xyzxyz", strict=True)), limit=2)
    agents = list(box.flows.values())
    history: list[object] = []
    open_: list[tuple[int, str, Flow]] = []
    for number, (what, one, two, three) in enumerate(program):
        answer: object = None
        if what == "ask" and ((one == COLD and not with_cold) or not agents[two].kept):
            continue  # the connections of a forgotten agent are closed: it asks no more
        if what == "ask":
            verdict = box.lines[one].ask(f"{number}", agents[two], expected=three, now=box.now)
            lost = box.lines[one].displaced[:]
            box.lines[one].displaced.clear()
            open_ = [known for known in open_ if known[1] not in lost]
            if verdict is not FULL:
                open_.append((one, f"{number}", agents[two]))
            answer = verdict, lost
            if one == COLD:
                continue
        elif what == "leave":
            warm = [known for known in open_ if known[0] != COLD]
            cold = [known for known in open_ if known[0] == COLD]
            for line, waiter, flow in cold[one : one + 1]:
                open_.remove((line, waiter, flow))
                assert box.lines[line].leave(waiter, flow, now=box.now) == []
                if three:
                    box.lines[line].refused(flow, box.now)
            if warm:
                line, waiter, flow = warm[one % len(warm)]
                open_.remove((line, waiter, flow))
                answer = box.lines[line].leave(waiter, flow, now=box.now, cost=two)
                if three:
                    box.lines[line].refused(flow, box.now)
        elif what == "forget":
            box.shares.forget(agents[one])
        elif what == "limit":
            answer = box.shares.set_limit(agents[one], two)
        elif what == "move" and agents[one].kept:
            answer = box.shares.move(agents[one], tenant="xyz"[two], limit=three, weight=1.0)
        elif what == "resize":
            answer = box.lines[one].resize(two)
        elif what == "wait":
            box.now += one
        for warm_line in box.lines[:COLD]:
            view = warm_line.view(box.now)
            history += [
                (view.running, view.waiting, view.drain_per_s),
                [warm_line.retry_after_s(flow, box.now) for flow in agents if flow.kept],
            ]
        history.append(answer)
    return [told for told in history if told is not None]


@settings(max_examples=150)
@given(st.lists(STEPS, min_size=20, max_size=120), st.integers(1, 4))
def test_a_cold_line_changes_no_verdict_and_no_order_of_a_warm_one(program: list[tuple[Any, ...]], depth: int) -> None:
    assert warm_history(program, depth, with_cold=True) == warm_history(program, depth, with_cold=False)
