"""A full queue: the request that is refused, the one that gives way, and the credit a refused agent keeps."""

from __future__ import annotations

import pytest

from hive.domain import Band
from hive.queue.fair_share import CREDIT_S
from hive.queue.queue import QueueVerdict
from tests.queue.turns import Bench, agent_of

GO, WAIT, FULL = QueueVerdict.GO, QueueVerdict.WAIT, QueueVerdict.FULL
HIGH, LOW = Band.HIGH, Band.LOW


def test_each_tenant_has_a_line_of_its_own() -> None:
    bench = Bench(places=1, depth=2)
    bench.agent("ann", "a")
    bench.agent("ben", "b")
    assert [bench.verdict("ann") for _ in range(4)] == [GO, WAIT, WAIT, FULL]
    assert [bench.verdict("ben") for _ in range(3)] == [WAIT, WAIT, FULL]
    assert bench.flows["ben"].tenant_waiting == 2


def test_a_line_of_depth_zero_refuses_whoever_cannot_go_at_once() -> None:
    bench = Bench(places=1, depth=0)
    bench.agent("ann")
    first, verdict = bench.ask("ann")
    assert (verdict, bench.verdict("ann")) == (GO, FULL)
    bench.leave(first)
    assert bench.verdict("ann") is GO


def test_the_newest_of_the_longest_line_gives_way_to_an_agent_with_a_shorter_one() -> None:
    bench = Bench(places=1, depth=4)
    bench.agent("flood")
    bench.agent("polite")
    running = bench.ask("flood")[0]
    flood = [bench.ask("flood")[0] for _ in range(4)]
    first, second = bench.ask("polite"), bench.ask("polite")
    assert (first[1], second[1]) == (WAIT, WAIT)
    assert bench.queue.displaced == [flood[3], flood[2]]
    assert bench.verdict("polite") is FULL, "two and two: nobody has more than the other"
    assert bench.verdict("flood") is FULL
    assert bench.leave(flood[3]) == [], "it owns nothing any more"
    assert bench.turns(running) == ["polite", "flood", "polite", "flood"]


def test_another_tenants_line_is_never_shortened() -> None:
    bench = Bench(places=1, depth=1)
    bench.agent("ann", "a")
    bench.agent("ben", "b")
    bench.agent("bob", "b")
    assert [bench.verdict(name) for name in ("ann", "ann", "ben", "bob")] == [GO, WAIT, WAIT, FULL]
    assert bench.queue.displaced == []


def test_a_higher_band_takes_the_position_of_a_lower_one_and_never_the_other_way_round() -> None:
    bench = Bench(places=1, depth=3)
    bench.agent("ann")
    bench.agent("ben")
    bench.agent("cid")
    bench.ask("ann")
    bench.ask("ann", band=HIGH)
    low, normal = bench.ask("ann", band=LOW)[0], bench.ask("ann")[0]
    assert bench.verdict("ben", band=HIGH) is WAIT
    assert bench.queue.displaced == [low]
    assert bench.verdict("ann", band=HIGH) is WAIT
    assert bench.queue.displaced == [low, normal]
    assert bench.verdict("cid") is FULL, "of three high ones none gives way to a normal one"
    assert bench.verdict("cid", band=HIGH) is WAIT, "of equals it does"


def single_file(bench: Bench, agents: int) -> str:
    """One running, and a full line in which each of `agents` agents has one request, a second apart."""
    for number in range(agents):
        bench.agent(f"agent-{number}-")
    bench.agent("polite")
    bench.agent("first", "other")
    running = bench.ask("first")[0]
    for number in range(agents):
        bench.now += 1
        assert bench.verdict(f"agent-{number}-") is WAIT
    return running


def test_position_credit_brings_a_refused_agent_before_those_who_came_later() -> None:
    bench = Bench(places=1, depth=4)
    running = single_file(bench, 4)
    assert bench.verdict("polite") is FULL
    (running,) = bench.leave(running)  # agent-0 goes, and another one is faster than polite
    bench.now += 1
    bench.agent("faster")
    late, verdict = bench.ask("faster")
    assert verdict is WAIT
    bench.now += 1
    back, verdict = bench.ask("polite")
    assert verdict is WAIT
    assert bench.queue.displaced == [late]
    bench.now += 1
    assert bench.verdict("faster") is FULL, "its credit is the younger one"
    assert bench.turns(running) == ["agent-1-", "agent-2-", "agent-3-", "polite"]
    assert back.startswith("polite")


def test_position_credit_counts_among_agents_of_which_none_has_had_anything() -> None:
    bench = Bench(places=1, depth=4)
    running = single_file(bench, 4)
    bench.agent("late")
    assert bench.verdict("polite") is FULL
    bench.now += 1
    bench.leave("agent-0-2")
    bench.leave("agent-1-3")
    assert (bench.verdict("late"), bench.verdict("polite")) == (WAIT, WAIT)
    assert bench.turns(running) == ["agent-2-", "agent-3-", "polite", "late"]


def test_position_credit_takes_nobodys_position_who_came_before() -> None:
    bench = Bench(places=1, depth=4)
    single_file(bench, 4)
    assert bench.verdict("polite") is FULL
    bench.now += 1
    assert bench.verdict("polite") is FULL
    assert bench.queue.displaced == []


@pytest.mark.parametrize(("away_s", "verdict"), [(CREDIT_S - 2, WAIT), (CREDIT_S + 1, FULL)])
def test_position_credit_lasts_two_minutes(away_s: float, verdict: QueueVerdict) -> None:
    bench = Bench(places=1, depth=4)
    running = single_file(bench, 4)
    assert bench.verdict("polite") is FULL
    bench.leave(running)
    bench.now += 1
    bench.agent("faster")
    bench.ask("faster")
    bench.now += away_s
    assert bench.verdict("polite") is verdict


def test_position_credit_is_for_one_position() -> None:
    bench = Bench(places=1, depth=4)
    running = single_file(bench, 4)
    assert bench.verdict("polite") is FULL
    (running,) = bench.leave(running)
    bench.now += 1
    bench.agent("faster")
    bench.ask("faster")
    assert bench.verdict("polite") is WAIT
    bench.leave(running)
    bench.now += 1
    assert bench.verdict("faster") is WAIT
    assert bench.verdict("polite") is FULL


def test_refused_again_an_agent_keeps_the_credit_of_the_first_time() -> None:
    bench = Bench(places=1, depth=4)
    running = single_file(bench, 4)
    bench.agent("second")
    verdicts = []
    for name in ("polite", "second", "polite", "second", "polite"):
        bench.now += 1
        verdicts.append(bench.verdict(name))
        if len(verdicts) == 3:
            bench.leave(running)
    assert verdicts == [FULL, FULL, FULL, WAIT, WAIT]
    assert [agent_of(waiter) for waiter in bench.queue.displaced] == ["second"]


def test_position_credit_ends_with_a_place() -> None:
    bench = Bench(places=1, depth=1)
    bench.agent("polite")
    bench.agent("ann")
    running = bench.ask("ann")[0]
    waiting = bench.ask("ann")[0]
    assert bench.verdict("polite") is FULL
    bench.leave(waiting)
    bench.leave(running)
    running = bench.ask("polite")[0]
    bench.now += 1
    assert bench.verdict("ann") is WAIT
    assert bench.verdict("polite") is FULL


def test_whoever_was_displaced_has_position_credit_from_when_it_came() -> None:
    bench = Bench(places=1, depth=4)
    running = single_file(bench, 4)
    for name in ("faster", "third", "latest"):
        bench.agent(name)

    def a_second_later(name: str) -> QueueVerdict:
        bench.now += 1
        return bench.verdict(name)

    assert bench.verdict("polite") is FULL
    (running,) = bench.leave(running)
    assert [a_second_later(name) for name in ("faster", "third", "polite")] == [WAIT, FULL, WAIT]
    bench.leave(running)
    assert [a_second_later(name) for name in ("latest", "faster", "third")] == [WAIT, WAIT, FULL]
    assert [agent_of(waiter) for waiter in bench.queue.displaced] == ["faster", "latest"]


@pytest.mark.parametrize("had_credit", [True, False])
@pytest.mark.parametrize("tenants", ["ttt", "fpt"], ids=["of-one-tenant", "of-three-tenants"])
def test_an_agent_whose_wait_was_too_long_is_not_lifted_when_it_comes_back(tenants: str, had_credit: bool) -> None:
    bench = Bench(places=1, depth=40)
    for name, tenant in zip(("flood", "patient", "fresh"), tenants, strict=True):
        bench.agent(name, tenant)
    running = bench.ask("flood")[0]
    for _ in range(20):
        bench.ask("flood")
    waiter = bench.ask("patient")[0]
    bench.leave(waiter)
    if had_credit:
        bench.queue.refused(bench.flows["patient"], bench.now)
    for _ in range(5):
        (running,) = bench.leave(running)
    bench.ask("fresh")
    bench.ask("patient")
    assert bench.turns(running)[0] == ("patient" if had_credit else "fresh")
