"""The queue: turns, `Retry-After`, and what is kept. Refusals: test_position_credit.py."""

from __future__ import annotations

import pytest

from hive.domain import Band
from hive.queue.flows import EXTRA_FLOWS, REBASE_TOKENS
from hive.queue.queue import QueueVerdict
from tests.queue.turns import Bench, agent_of

GO, WAIT, FULL = QueueVerdict.GO, QueueVerdict.WAIT, QueueVerdict.FULL
HIGH, NORMAL, LOW = Band.HIGH, Band.NORMAL, Band.LOW


# places and limits ----------------------------------------------------------------------------------------------------


def test_a_place_is_given_on_to_whoever_came_first() -> None:
    bench = Bench(places=1)
    bench.agent("ann")
    first, verdict = bench.ask("ann")
    assert verdict is GO
    second, third = bench.ask("ann")[0], bench.ask("ann")[0]
    assert repr(bench.queue) == "<FairQueue 2 waiting, 1/1 running>"
    assert bench.leave(first) == [second]
    assert bench.leave(second) == [third]
    assert bench.leave(third) == []
    assert repr(bench.queue) == "<FairQueue 0 waiting, 0/1 running>"


def test_without_a_limit_of_the_backend_only_the_agents_limits_hold() -> None:
    bench = Bench(places=None)
    flow = bench.agent("ann", limit=3)
    assert [bench.verdict("ann") for _ in range(4)] == [GO, GO, GO, WAIT]
    assert repr(bench.queue) == "<FairQueue 1 waiting, 3 running>"
    assert repr(flow) == "<Flow ann of t 3/3 running, 1 waiting>"


def test_an_agent_at_its_limit_is_passed_over_and_holds_nobody_up() -> None:
    bench = Bench(places=2)
    bench.agent("ann", limit=1)
    bench.agent("ben")
    first = bench.ask("ann")[0]
    waiting = bench.ask("ann")[0]
    assert bench.verdict("ben") is GO
    late = bench.ask("ben")[0]
    assert bench.leave(first, cost=50) == [waiting], "ann is below her limit again and has had less than ben"
    assert bench.leave(waiting) == [late]


def test_a_request_that_leaves_the_line_gives_its_position_back_and_frees_no_place() -> None:
    bench = Bench(places=1, depth=1)
    bench.agent("ann")
    running = bench.ask("ann")[0]
    waiting = bench.ask("ann")[0]
    assert bench.verdict("ann") is FULL
    assert bench.leave(waiting) == []
    again, verdict = bench.ask("ann")
    assert verdict is WAIT
    assert bench.leave(running) == [again]


def test_leaving_twice_or_without_having_asked_changes_nothing() -> None:
    bench = Bench(places=1)
    flow = bench.agent("ann")
    first = bench.ask("ann")[0]
    second, third = bench.ask("ann")[0], bench.ask("ann")[0]
    assert bench.leave(first) == [second]
    assert bench.leave(first) == []
    assert bench.queue.leave("nobody", flow, now=0.0) == []
    assert bench.leave(second) == [third]


def test_more_places_let_more_in_and_fewer_let_the_running_ones_finish() -> None:
    bench = Bench(places=1)
    bench.agent("ann")
    waiters = [bench.ask("ann")[0] for _ in range(4)]
    assert bench.queue.resize(3) == waiters[1:3]
    assert bench.queue.resize(1) == []
    assert repr(bench.queue) == "<FairQueue 1 waiting, 3/1 running>"
    assert [bench.leave(waiter) for waiter in waiters[:3]] == [[], [], [waiters[3]]]
    assert bench.queue.resize(None) == []
    assert bench.queue.places is None


def test_a_higher_limit_of_an_agent_lets_its_waiting_requests_in() -> None:
    bench = Bench(places=4)
    flow = bench.agent("ann", limit=1)
    waiters = [bench.ask("ann")[0] for _ in range(4)]
    assert bench.shares.set_limit(flow, 3) == waiters[1:3]


# bands ----------------------------------------------------------------------------------------------------------------


def test_a_higher_band_always_goes_first() -> None:
    bench = Bench(places=1)
    for name in ("low", "normal", "high"):
        bench.agent(name, tenant=f"of-{name}")
    running = bench.ask("normal")[0]
    for name, band in (("low", LOW), ("normal", NORMAL), ("high", HIGH)) * 3:
        assert bench.ask(name, band=band)[1] is WAIT
    assert bench.turns(running, cost=1e6) == ["high"] * 3 + ["normal"] * 3 + ["low"] * 3


def test_what_was_had_in_one_band_does_not_count_in_another() -> None:
    bench = Bench(places=1)
    bench.agent("ann", "acme")
    bench.agent("ben", "other")
    running = bench.ask("ann", band=HIGH, expected=1e6)[0]
    bench.ask("ann")
    bench.ask("ben")
    bench.ask("ann")
    assert bench.turns(running) == ["ann", "ben", "ann"]


# turns ----------------------------------------------------------------------------------------------------------------


def test_tenants_are_served_by_tokens_not_by_requests() -> None:
    bench = Bench(places=1, depth=40)
    bench.agent("short", "a")
    bench.agent("long", "b")
    running = bench.ask("short", expected=100)[0]
    for _ in range(30):
        bench.ask("short", expected=100)
        bench.ask("long", expected=1000)
    names = bench.turns(running)[:24]
    assert names.count("long") == 3
    assert names.count("short") == 21


def test_a_weight_of_three_gets_three_times_the_tokens() -> None:
    bench = Bench(places=1, depth=40)
    bench.agent("three", "a", weight=3)
    bench.agent("one", "b", weight=1)
    running = bench.ask("one")[0]
    for _ in range(30):
        bench.ask("three")
        bench.ask("one")
    assert bench.turns(running)[:40].count("three") == pytest.approx(30, abs=1)


def test_a_weight_can_change_while_everybody_waits() -> None:
    bench = Bench(places=1, depth=100)
    bench.agent("ann", "a")
    bench.agent("ben", "b")
    running = bench.ask("ann")[0]
    for _ in range(90):
        bench.ask("ann")
        bench.ask("ben")
    for _ in range(20):
        running = bench.leave(running)[0]
    bench.shares.set_weight("a", 4)
    bench.shares.set_weight("unknown", 9)
    assert bench.turns(running)[:50].count("ann") == pytest.approx(40, abs=1)


def test_inside_a_tenant_the_agent_that_has_had_least_goes_first_then_the_oldest_request() -> None:
    bench = Bench(places=1)
    bench.agent("ann", "a")
    bench.agent("ben", "a")
    running = bench.ask("ann", expected=100)[0]
    for name in ("ann", "ann", "ann", "ben", "ben", "ben"):
        bench.ask(name, expected=100)
    assert bench.turns(running) == ["ben", "ann", "ben", "ann", "ben", "ann"]


def test_many_agents_do_not_make_a_tenants_share_larger() -> None:
    bench = Bench(places=1)
    for number in range(8):
        bench.agent(f"many-{number}-", "a")
    bench.agent("one", "b")
    running = bench.ask("one")[0]
    for _ in range(2):
        for number in range(8):
            bench.ask(f"many-{number}-")
    for _ in range(16):
        bench.ask("one")
    assert bench.turns(running)[:16].count("one") == pytest.approx(8, abs=1)


def test_of_tenants_that_have_had_as_much_the_one_goes_whose_last_turn_is_longest_ago() -> None:
    bench = Bench(places=1)
    bench.agent("ann", "a")
    bench.agent("ben", "b")
    running = bench.ask("ann", expected=0)[0]
    for name in ("ann", "ann", "ann", "ben", "ben", "ben"):
        bench.ask(name, expected=0)
    assert bench.turns(running) == ["ann", "ben"] * 3


def test_the_real_cost_corrects_the_expected_one() -> None:
    bench = Bench(places=1)
    bench.agent("ann", "a")
    bench.agent("ben", "b")
    running = bench.ask("ann", expected=10)[0]
    for _ in range(4):
        bench.ask("ann", expected=10)
        bench.ask("ben", expected=10)
    (ben,) = bench.leave(running, cost=1000)
    assert bench.turns(ben, cost=300) == ["ben", "ben", "ben", "ann", "ann", "ann", "ann"]


def test_an_unknown_cost_is_the_expected_one() -> None:
    bench = Bench(places=1)
    bench.agent("ann", "a")
    bench.agent("ben", "b")
    running = bench.ask("ann", expected=250)[0]
    for _ in range(3):
        bench.ask("ann", expected=100)
        bench.ask("ben", expected=100)
    assert bench.turns(running, cost=None)[:4] == ["ben", "ben", "ben", "ann"]


def test_a_newcomer_has_the_next_place_however_much_too_much_was_expected_of_the_others() -> None:
    """Lifted to what was charged in advance, it stood behind everything that later turned out cheap."""
    bench = Bench(places=4)
    bench.agent("flood", "a")
    running = [bench.ask("flood", expected=5000)[0] for _ in range(4)]
    for _ in range(12):
        bench.ask("flood", expected=5000)
    for _ in range(8):
        running += bench.leave(running.pop(0), cost=10)
    bench.agent("new", "b")
    newcomer = bench.ask("new", expected=100)[0]
    assert bench.leave(running.pop(0), cost=10) == [newcomer]


def test_being_idle_saves_nothing_up() -> None:
    bench = Bench(places=1, depth=50)
    bench.agent("busy", "a")
    bench.agent("idle", "b")
    running = bench.ask("busy")[0]
    for _ in range(40):
        bench.ask("busy")
    for _ in range(20):
        (running,) = bench.leave(running, cost=1000)
    for _ in range(20):
        bench.ask("idle")
    assert bench.turns(running)[:20].count("idle") == pytest.approx(10, abs=1)


@pytest.mark.parametrize("tenants", ["ab", "aa"], ids=["two-tenants", "two-agents"])
@pytest.mark.parametrize("order", [("little", "much"), ("much", "little")], ids=" first, then ".join)
def test_what_was_had_while_nobody_waited_is_held_against_nobody(tenants: str, order: tuple[str, str]) -> None:
    """Beside one that always runs a little, the one that used the free places stood still for as long."""
    bench = Bench(places=2, depth=50)
    bench.agent("little", tenants[0])
    bench.agent("much", tenants[1])
    running = bench.ask("little", expected=1)[0]
    for _ in range(100):
        bench.leave(bench.ask("much", expected=10_000)[0])
        following = bench.ask("little", expected=1)[0]
        bench.leave(running)
        running = following
    other = bench.ask("much")[0]
    for _ in range(20):
        for name in order:
            bench.ask(name)
    bench.queue.resize(1)
    bench.leave(other)
    assert bench.turns(running)[:20].count("much") == pytest.approx(10, abs=1)


@pytest.mark.parametrize("same_tenant", [False, True])
def test_who_was_held_back_by_its_own_limit_catches_up_within_bounds_only(same_tenant: bool) -> None:
    bench = Bench(places=2, depth=1000)
    flow = bench.agent("held", "a", limit=1)
    bench.agent("free", "a" if same_tenant else "b")
    held = bench.ask("held", expected=1000)[0]
    for _ in range(200):
        bench.ask("held", expected=1000)
    free = bench.ask("free", expected=1000)[0]
    for _ in range(200):
        bench.ask("free", expected=1000)
    for _ in range(100):
        (free,) = bench.leave(free)
    bench.queue.resize(1)
    bench.shares.set_limit(flow, 10)
    bench.leave(held)
    names = bench.turns(free)
    assert names[:8].count("held") <= 5, "100,000 tokens behind: as much is made up for as was running, no more"


def test_a_tenant_whose_agents_were_refused_has_no_head_start_when_it_comes_back() -> None:
    """Position credit once let a tenant lag behind too, by a fixed number of tokens: a tenant that flooded, was refused
    and came back a moment later held up all others for as long as those tokens took."""
    bench = Bench(places=1, depth=8)
    for name, tenant in (("flood", "f"), ("light", "l"), ("other", "o")):
        bench.agent(name, tenant)
    running = bench.ask("other", expected=1000)[0]
    for waiter in [bench.ask("flood")[0] for _ in range(9)]:
        bench.leave(waiter)
    for _ in range(50):
        bench.ask("other", expected=1000)
        bench.ask("light", expected=1000)
        (running,) = bench.leave(running)
    bench.now += 1
    for _ in range(8):
        bench.ask("flood", expected=1000)
    assert bench.turns(running)[:6].count("flood") <= 3


# what is told ---------------------------------------------------------------------------------------------------------


def drained(bench: Bench, waiters: list[str], every_s: float, times: int) -> None:
    for _ in range(times):
        bench.now += every_s
        waiters += bench.leave(waiters.pop(0))


@pytest.mark.parametrize(
    ("every_s", "expected_s"),
    [(0.5, 4.0), (0.01, 1.0), (3.0, 24.0), (60.0, 120.0)],
    ids=["", "at least", "", "at most"],
)
def test_retry_after_is_how_long_the_line_takes_at_the_measured_rate(every_s: float, expected_s: float) -> None:
    bench = Bench(places=1, depth=28)
    flow = bench.agent("ann")
    running = [bench.ask("ann")[0] for _ in range(29)][:1]
    drained(bench, running, every_s, 20)
    assert flow.tenant_waiting == 8
    assert bench.queue.retry_after_s(flow, bench.now) == pytest.approx(expected_s, rel=0.02)
    assert bench.queue.view(bench.now).drain_per_s == pytest.approx(1 / every_s, rel=0.02)


def test_idle_hours_do_not_count_as_a_slow_backend() -> None:
    bench = Bench(places=1)
    flow = bench.agent("ann")
    for _ in range(2):
        running = [bench.ask("ann")[0] for _ in range(9)][:1]
        drained(bench, running, 0.5, 9)
        bench.now += 7200
    for _ in range(9):
        bench.ask("ann")
    assert bench.queue.retry_after_s(flow, bench.now) == pytest.approx(4.0, rel=0.1)
    assert bench.queue.view(bench.now).drain_per_s == pytest.approx(2.0, rel=0.1)


def test_the_measured_rate_follows_a_backend_that_became_slower() -> None:
    bench = Bench(places=1, depth=400)
    flow = bench.agent("ann")
    running = [bench.ask("ann")[0] for _ in range(370)][:1]
    drained(bench, running, 0.1, 300)
    drained(bench, running, 1.0, 30)
    assert flow.tenant_waiting == 39
    assert bench.queue.retry_after_s(flow, bench.now) == pytest.approx(39, rel=0.5)


@pytest.mark.parametrize(
    ("places", "waiting", "waited_s", "expected_s"),
    [(1, 16, 0, 5.0), (8, 16, 0, 2.0), (8, 1, 0, 1.0), (1, 16, 40, 40.0), (1, 16, 500, 120.0)],
)
def test_retry_after_is_a_guess_where_nobody_has_waited_to_the_end_yet(
    places: int, waiting: int, waited_s: float, expected_s: float
) -> None:
    bench = Bench(places=places)
    flow = bench.agent("ann", limit=100)
    for _ in range(places + waiting):
        bench.ask("ann")
    assert bench.queue.retry_after_s(flow, waited_s) == expected_s


def test_retry_after_counts_the_agents_own_limit_where_the_backend_has_none() -> None:
    """vLLM and the demo backend tell no number of places, or a large one: it was `Retry-After: 1` for a request that
    found 16 requests of an agent of tier medium waiting, five at a time, for any duration of each."""
    bench = Bench(places=None, depth=16)
    flow = bench.agent("ann", limit=5)
    running = [bench.ask("ann")[0] for _ in range(21)][:5]
    assert bench.queue.retry_after_s(flow, bench.now) == pytest.approx(16 / 5), "nothing is measured yet"
    bench.now = 10.0
    for _ in range(5):
        running += bench.leave(running.pop(0))
    assert bench.queue.retry_after_s(flow, bench.now) >= 11 / 5 * 10


def test_retry_after_of_a_new_line_goes_by_how_long_requests_took_before() -> None:
    """For a line in which no request had waited to the end yet it was a second for each, at most five."""
    bench = Bench(places=2, depth=16)
    flow = bench.agent("ann", limit=5)
    first = bench.ask("ann")[0]
    bench.now += 30.0
    bench.leave(first)
    for _ in range(10):
        bench.ask("ann")
    assert flow.tenant_waiting == 8
    assert bench.queue.retry_after_s(flow, bench.now) == pytest.approx(8 / 2 * 30)


def test_retry_after_is_no_less_than_the_line_has_stood_still() -> None:
    bench = Bench(places=1, depth=16)
    flow = bench.agent("ann")
    running = [bench.ask("ann")[0] for _ in range(12)][:1]
    drained(bench, running, 0.1, 10)
    bench.now += 25.0
    assert bench.queue.retry_after_s(flow, bench.now) >= 24.0


def test_each_tenant_is_told_of_its_own_line() -> None:
    bench = Bench(places=1)
    heavy, light = bench.agent("heavy", "a"), bench.agent("light", "b", weight=10)
    running = [bench.ask("heavy")[0]]
    for _ in range(16):
        bench.ask("heavy")
    for _ in range(30):
        bench.now += 0.5
        bench.ask("light")
        running += bench.leave(running.pop(0))
    assert bench.queue.retry_after_s(heavy, bench.now) > 10 * bench.queue.retry_after_s(light, bench.now)
    assert 500 <= bench.queue.mean_wait_ms(light) < 2000 < bench.queue.mean_wait_ms(heavy)


def test_the_mean_wait_is_that_of_those_who_had_to_wait() -> None:
    bench = Bench(places=1)
    flow = bench.agent("ann")
    first = bench.ask("ann")[0]
    assert bench.queue.mean_wait_ms(flow) == 0
    second = bench.ask("ann")[0]
    bench.now = 2.0
    bench.leave(first)
    assert bench.queue.mean_wait_ms(flow) == 2000
    bench.now = 3.0
    bench.ask("ann")
    bench.leave(second)
    assert bench.queue.mean_wait_ms(flow) == 1800, "a moving average"


def test_the_view_shows_each_tenant() -> None:
    bench = Bench(places=2)
    bench.agent("ann", "a", weight=2)
    bench.agent("ben", "b")
    bench.ask("ann", expected=300)
    bench.ask("ben", expected=100)
    bench.ask("ben", expected=100)
    view = bench.queue.view(1.0)
    assert (view.running, view.waiting, view.places, view.drain_per_s) == (2, 1, 2, None)
    assert [(row.name, row.weight, row.running, row.waiting, row.tokens_ahead) for row in view.tenants] == [
        ("a", 2, 1, 0, 50.0),
        ("b", 1, 1, 1, 0.0),
    ]


# the flows ------------------------------------------------------------------------------------------------------------


def test_a_flow_is_known_by_agent_and_tenant() -> None:
    bench = Bench()
    own = bench.agent("ann", "a")
    assert bench.shares.flow("ann", "a", limit=10) is own
    assert bench.shares.flow("ann", "b", limit=10) is not own


def test_what_an_agent_runs_and_waits_for_moves_along_with_it() -> None:
    bench = Bench(places=1)
    moving = bench.agent("moving", "a")
    bench.agent("ben", "b")
    running = bench.ask("moving", expected=1000)[0]
    waiter = bench.ask("moving")[0]
    bench.ask("ben")
    assert bench.shares.move(moving, tenant="b", limit=10, weight=2) == []
    assert [(row.name, row.weight, row.running, row.waiting) for row in bench.queue.view(0).tenants] == [("b", 2, 1, 2)]
    (ben,) = bench.leave(running)
    assert ben.startswith("ben"), "beside the 1000 tokens of its running one the other agent has had less"
    assert bench.leave(ben) == [waiter]


@pytest.mark.parametrize("had", [0, 10_000], ids=["little", "much"])
def test_what_an_agent_had_elsewhere_does_not_count_where_it_moves_to(had: float) -> None:
    bench = Bench(places=1)
    moving = bench.agent("moving", "a")
    bench.agent("ann", "b")
    bench.leave(bench.ask("moving", expected=had)[0])
    bench.leave(bench.ask("ann", expected=5_000)[0])
    running = bench.ask("ann")[0]
    for _ in range(8):
        bench.ask("ann")
        bench.ask("moving")
    bench.shares.move(moving, tenant="b", limit=10, weight=1)
    assert bench.turns(running)[:8].count("moving") == pytest.approx(4, abs=1)


def test_a_tenant_an_agent_moves_to_has_saved_nothing_up_while_it_was_idle() -> None:
    bench = Bench(places=1, depth=50)
    moving = bench.agent("moving", "a")
    bench.agent("busy", "b")
    bench.agent("idle", "c")
    running = bench.ask("busy", expected=1000)[0]
    for _ in range(20):
        bench.ask("busy", expected=1000)
        bench.ask("moving", expected=1000)
    for _ in range(20):
        (running,) = bench.leave(running)
    bench.shares.move(moving, tenant="c", limit=10, weight=1)
    assert bench.turns(running)[:8].count("moving") == pytest.approx(4, abs=1)


def test_a_tenant_knows_nothing_any_more_of_an_agent_that_moved_away() -> None:
    bench = Bench(places=1, depth=2)
    moving = bench.agent("moving", "a")
    stays = bench.agent("stays", "a")
    bench.agent("late", "a")
    bench.ask("moving")
    bench.ask("moving")
    bench.ask("moving")
    bench.shares.move(moving, tenant="b", limit=10, weight=1)
    bench.now = 100.0
    assert [bench.verdict("stays"), bench.verdict("stays"), bench.verdict("late")] == [WAIT, WAIT, WAIT]
    assert [agent_of(waiter) for waiter in bench.queue.displaced] == ["stays"]
    assert bench.queue.retry_after_s(stays, bench.now) == 2.0, "not as long as the other one has waited"


def test_a_move_to_a_higher_tier_lets_in_who_waited_for_its_own_limit() -> None:
    bench = Bench(places=5)
    flow = bench.agent("ann", limit=1)
    waiters = [bench.ask("ann")[0] for _ in range(3)]
    assert bench.shares.move(flow, tenant="t", limit=5, weight=1.0) == waiters[1:]


def test_forgotten_agents_and_their_tenants_leave_nothing_behind() -> None:
    bench = Bench(places=1)
    flow = bench.agent("ann", "a")
    bench.shares.flow("ann", "b", limit=1)
    running, waiter = bench.ask("ann")[0], bench.ask("ann")[0]
    bench.shares.forget(flow)
    assert [(row.name, row.waiting) for row in bench.queue.view(0.0).tenants] == [("a", 1)]
    assert bench.leave(running) == [waiter]
    assert bench.queue.view(0.0).tenants == []
    assert bench.leave(waiter) == []
    assert repr(bench.queue) == "<FairQueue 0 waiting, 0/1 running>"
    bench.shares.forget(flow)


def test_only_so_many_flows_under_other_tenants_are_kept_and_none_that_is_busy() -> None:
    bench = Bench(places=1)
    operator = bench.agent("operator", "default")
    busy = bench.shares.flow("operator", "busy", limit=1)
    bench.queue.ask("w", busy, expected=1, now=0.0)
    old, recent = (bench.shares.flow("operator", tenant, limit=1) for tenant in ("old", "recent"))
    for number in range(3 * EXTRA_FLOWS):
        bench.shares.flow("operator", f"t{number}", limit=1)
        assert bench.shares.flow("operator", "recent", limit=1) is recent
    assert len(bench.queue.view(0.0).tenants) == EXTRA_FLOWS + 1
    assert bench.shares.flow("operator", "default", limit=1) is operator
    assert bench.shares.flow("operator", "busy", limit=1) is busy
    assert bench.shares.flow("operator", "old", limit=1) is not old


def test_a_dropped_flow_that_is_used_again_waits_in_the_line_of_its_tenant() -> None:
    bench = Bench(places=1, depth=1)
    bench.agent("operator", "default")
    old = bench.shares.flow("operator", "acme", limit=1)
    for number in range(EXTRA_FLOWS):
        bench.shares.flow("operator", f"t{number}", limit=1)
    bench.agent("ann", "acme")
    bench.ask("ann")
    assert bench.verdict("ann") is WAIT
    assert bench.queue.ask("w", old, expected=1, now=0.0) is FULL


def test_counters_start_anew_long_before_they_lose_precision() -> None:
    bench = Bench(places=1, depth=4)
    bench.agent("ann", "a")
    bench.agent("ben", "b")
    for idle, tenant in (("idle", "c"), ("lazy", "a")):
        bench.agent(idle, tenant)
        bench.leave(bench.ask(idle)[0])
    names = []
    running = bench.ask("ann", expected=REBASE_TOKENS / 4)[0]
    for _ in range(100):
        bench.ask("ann", expected=REBASE_TOKENS / 4)
        bench.ask("ben", expected=REBASE_TOKENS / 4)
        (running,) = bench.leave(running)
        names.append(agent_of(running))
        for of_tenant in bench.shares.flows.tenants.values():
            for line in of_tenant.lines.values():
                assert abs(line.accounts[1].settled) < 2 * REBASE_TOKENS
        for flow in bench.flows.values():
            for standing in flow.standings.values():
                assert abs(standing.normal.settled) < 2 * REBASE_TOKENS
    assert names.count("ann") == 50
