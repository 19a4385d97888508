"""The decider's rules, one by one."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from hive.domain import Band
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
    SleepSlot,
    UnloadSlot,
)
from hive.pool.state import (
    Audience,
    Claim,
    Demand,
    EvictedSlot,
    ExclusiveOrder,
    Grant,
    MemoryAccount,
    PoolFacts,
    Rules,
    SleepLevel,
    SlotFacts,
    SlotState,
)

S = SlotState
NOW = 1000.0
GPU = MemoryAccount("g", total_bytes=100, reserve_bytes=0)
BUSY = Audience(users=2, rate_per_s=0.1, ends_at=1e9)


def cold(id: str, need: int, *, since: float = NOW, band: Band = Band.NORMAL, **more: Any) -> SlotFacts:
    return SlotFacts(id, id, need, load_s=8.0, unload_s=2.0, waiting=(Demand(band, since, tenant=f"t-{id}"),), **more)


def ready(id: str, bytes: int, *, account: str = "g", **more: Any) -> SlotFacts:
    fields: dict[str, Any] = {"state": S.READY, "load_s": 8.0, "unload_s": 2.0, "ready_at": 500.0} | more
    return SlotFacts(id, id, bytes, grants=(Grant(account, bytes),), **fields)


def decided(*slots: SlotFacts, accounts: tuple[MemoryAccount, ...] = (GPU,), **more: Any) -> Move:
    return choose(PoolFacts(slots, accounts, **more), NOW)


def leaving(move: Move) -> list[str]:
    assert isinstance(move, MakeRoom), move
    return [evicted.slot for evicted in move.claim.leaving]


def test_what_fits_is_loaded_and_charged_to_the_tenant_who_caused_it() -> None:
    move = decided(cold("a", 60))
    assert move == LoadSlot("a", (Grant("g", 60),), "it fits", "t-a")


def test_nobody_waits_and_nothing_moves() -> None:
    assert decided(ready("a", 60), SlotFacts("b", "b", 70)) == Rest(None)


@pytest.mark.parametrize(
    ("first", "second", "loaded"),
    [
        (cold("a", 60), cold("b", 60, band=Band.HIGH), "b"),  # neither is late: the band
        (cold("a", 60), cold("b", 60, since=NOW - 5), "b"),  # the longer wait
        (cold("a", 60, since=NOW - 12), cold("b", 60, band=Band.HIGH), "a"),  # the late one
        (cold("a", 60, since=NOW - 12), cold("b", 60, band=Band.HIGH, since=NOW - 5), "b"),  # late for 2 s, for 3 s
        (cold("a", 60, since=NOW - 50), cold("b", 60, band=Band.LOW, since=NOW - 70), "a"),
        (cold("a", 60, since=NOW - 50), cold("b", 60, band=Band.LOW, since=NOW - 200), "b"),  # low, and very late
    ],
)
def test_those_who_wait_have_one_order(first: SlotFacts, second: SlotFacts, loaded: str) -> None:
    move = decided(first, second)
    assert isinstance(move, LoadSlot)
    assert move.slot == loaded


def test_one_move_at_a_time_in_an_account_and_two_in_two() -> None:
    loading = replace(ready("a", 30), state=S.LOADING)
    assert decided(loading, cold("b", 30)) == Rest(1010.0)
    two = (GPU, MemoryAccount("h", 100, 0))
    move = decided(loading, cold("b", 30), accounts=two)
    assert isinstance(move, LoadSlot)
    assert move.grants == (Grant("h", 30),)


def test_nothing_moves_until_the_waiters_of_a_load_are_in_flight() -> None:
    """llmux 210b1b0: the next switch drained a model before the requests it was loaded for had begun."""
    assert isinstance(decided(ready("a", 60, settled=False), cold("b", 60, since=0.0)), Rest)
    assert leaving(decided(ready("a", 60), cold("b", 60, since=0.0))) == ["a"]


def test_a_model_without_an_audience_leaves_at_once_and_only_if_it_is_idle() -> None:
    move = decided(ready("a", 60, ready_at=NOW - 1), cold("b", 60))
    assert isinstance(move, MakeRoom)
    assert move.claim.leaving == (EvictedSlot("a", idle_only=True),)
    busy = decided(ready("a", 60, ready_at=NOW - 1, in_flight=1), cold("b", 60))
    assert isinstance(busy, Rest)


def test_a_model_with_an_audience_keeps_its_turn_and_leaves_after_it() -> None:
    used = ready("a", 60, ready_at=NOW - 1, audience=BUSY, in_flight=1)
    late = cold("b", 60, since=NOW - 100)
    assert decided(used, late) == Rest(used.ready_at + 60.0)  # 20 s of swap, three times that
    move = decided(replace(used, ready_at=NOW - 60), late)
    assert isinstance(move, MakeRoom)
    assert move.claim == Claim("b", (Grant("g", 60),), (EvictedSlot("a", idle_only=False),))


def test_the_cheapest_set_leaves_and_not_one_victim_more() -> None:
    slots = [ready("a", 30, audience=BUSY), ready("b", 25), ready("c", 40)]
    assert sorted(leaving(decided(*slots, cold("d", 60, since=0.0)))) == ["b", "c"]
    assert leaving(decided(*slots, cold("d", 40, since=0.0))) == ["c"]


def test_a_pinned_model_is_never_a_victim_and_what_is_in_its_way_is_named() -> None:
    move = decided(ready("a", 60, pinned_at=0.0), cold("b", 60, since=0.0))
    assert move == RefuseWaiting("b", "b does not fit beside what is pinned: a")
    assert decided(cold("b", 101)) == RefuseWaiting("b", "b needs 101 bytes, more than can ever be free")


def test_a_pinned_model_is_loaded_without_a_demand() -> None:
    move = decided(SlotFacts("a", "a", 60, pinned_at=NOW))
    assert isinstance(move, LoadSlot)


def test_a_late_one_keeps_its_account_from_those_behind_it() -> None:
    """Small models would fill each gap, each with a turn of its own, and the large one would starve."""
    used = ready("a", 60, ready_at=NOW - 1, audience=BUSY, in_flight=1)
    large, small = cold("b", 80, since=NOW - 20), cold("c", 30, since=NOW - 15)
    assert isinstance(decided(used, large, small), Rest)
    assert isinstance(decided(used, replace(large, waiting=()), small), LoadSlot)
    fits_beside = cold("d", 20, since=NOW - 15)  # 60 + 40 - 80: it does not hurt the large one
    move = decided(used, large, fits_beside)
    assert isinstance(move, LoadSlot)
    assert move.slot == "d"


# --- claims ---

CLAIM = Claim("b", (Grant("g", 60),), (EvictedSlot("a"),))


def draining(**more: Any) -> SlotFacts:
    fields: dict[str, Any] = {"state": S.DRAINING, "closed_at": NOW - 10} | more
    return ready("a", 60, **fields)


@pytest.mark.parametrize(
    ("victim", "claimant", "move"),
    [
        (draining(), cold("b", 60), UnloadSlot("a", "room for b")),
        (draining(in_flight=1), cold("b", 60), Rest(NOW + 50)),
        (draining(in_flight=1, closed_at=NOW - 60), cold("b", 60), CutSlot("a")),
        (draining(in_flight=1, closed_at=NOW - 60, cut=True), cold("b", 60), Rest(None)),
        (draining(), replace(cold("b", 60), waiting=()), DropClaim("b", "nobody waits for it any more")),
        (draining(pinned_at=NOW), cold("b", 60), DropClaim("b", "a has been pinned")),
        (ready("a", 60), cold("b", 60), DropClaim("b", "a stays")),
        (draining(state=S.STOPPING), cold("b", 60), Rest(None)),
        (
            SlotFacts("a", "a", 60),
            cold("b", 60),
            LoadSlot("b", (Grant("g", 60),), "room was made for it", "t-b"),
        ),
    ],
)
def test_what_was_begun_is_ended(victim: SlotFacts, claimant: SlotFacts, move: Move) -> None:
    assert decided(victim, claimant, claims=(CLAIM,)) == move


def test_a_victim_that_came_into_use_while_its_gate_closed_is_left_alone() -> None:
    claim = replace(CLAIM, leaving=(EvictedSlot("a", idle_only=True),))
    assert decided(draining(in_flight=1), cold("b", 60), claims=(claim,)) == DropClaim("b", "a is in use again")


def test_a_victim_is_opened_again_by_the_decider_once_nobody_claims_its_memory() -> None:
    """ollama #17408: a request reopened the victim, and the load waited for ever."""
    assert decided(draining(waiting=(Demand(Band.HIGH, NOW),))) == OpenSlot("a")
    assert decided(draining(waiting=(Demand(Band.HIGH, NOW),)), cold("b", 60), claims=(CLAIM,)) == UnloadSlot(
        "a", "room for b"
    )


def test_all_victims_leave_or_none() -> None:
    claim = Claim("c", (Grant("g", 90),), (EvictedSlot("a"), EvictedSlot("b")))
    one, other = draining(), replace(draining(in_flight=1), id="b", grants=(Grant("g", 40),))
    assert decided(one, other, cold("c", 90), claims=(claim,)) == Rest(NOW + 50)
    assert isinstance(decided(one, replace(other, in_flight=0), cold("c", 90), claims=(claim,)), UnloadSlot)


def test_memory_that_did_not_come_back_ends_the_claim() -> None:
    stolen = replace(GPU, foreign_bytes=60)
    move = decided(SlotFacts("a", "a", 60), cold("b", 60), accounts=(stolen,), claims=(CLAIM,))
    assert move == DropClaim("b", "its memory in g is not there")


def test_a_model_or_a_gpu_that_is_gone_ends_the_claim() -> None:
    gone = DropClaim("b", "the model or its GPU is not there any more")
    assert decided(draining(), claims=(CLAIM,)) == gone
    other = MemoryAccount("h", 100, 0)
    assert decided(draining(), cold("b", 60), accounts=(other,), claims=(CLAIM,)) == gone
    asleep = replace(cold("a", 60), state=S.ASLEEP, grants=(Grant("g", 10),), awake=(Grant("g", 60),))
    assert decided(asleep, accounts=(other,)) == UnloadSlot("a", "it cannot wake where it sleeps")


def test_nobody_takes_what_a_claim_will_need() -> None:
    high = cold("c", 40, band=Band.HIGH)
    slots = (draining(in_flight=1), cold("b", 60), high)
    assert isinstance(decided(*slots, claims=(replace(CLAIM, grants=(Grant("g", 70),)),)), Rest)
    assert isinstance(decided(*slots, claims=(CLAIM,)), LoadSlot)


# --- sleep ---

LEVELS = (SleepLevel("1", kept_bytes=10, host_bytes=60, wake_s=2.0),)


def test_a_victim_sleeps_where_that_frees_enough_and_the_host_has_the_memory() -> None:
    sleepy = ready("a", 60, levels=LEVELS)
    for host, need, level in ((100, 80, "1"), (50, 80, ""), (100, 95, "")):
        move = decided(sleepy, cold("b", need, since=0.0), rules=Rules(host_ram_bytes=host))
        assert isinstance(move, MakeRoom)
        assert [evicted.level for evicted in move.claim.leaving] == [level]


def test_a_sleeper_wakes_with_the_grants_it_had() -> None:
    asleep = replace(
        cold("a", 60), state=S.ASLEEP, level="1", levels=LEVELS, grants=(Grant("g", 10),), awake=(Grant("g", 60),)
    )
    move = decided(asleep, ready("b", 30))
    assert isinstance(move, LoadSlot)
    assert move.grants == (Grant("g", 60),)
    assert leaving(decided(asleep, ready("b", 50))) == ["b"]
    assert decided(asleep, ready("b", 50, pinned_at=0.0)) == UnloadSlot("a", "it cannot wake where it sleeps")


def test_a_claim_puts_its_victim_to_sleep() -> None:
    claim = Claim("b", (Grant("g", 80),), (EvictedSlot("a", "1"),))
    assert decided(draining(levels=LEVELS), cold("b", 80), claims=(claim,)) == SleepSlot("a", "1", "room for b")
    asleep = SlotFacts("a", "a", 60, state=S.ASLEEP, level="1", levels=LEVELS, grants=(Grant("g", 10),))
    assert isinstance(decided(asleep, cold("b", 80), claims=(claim,)), LoadSlot)


# --- orders, failures ---


def test_an_order_to_unload_drains_first() -> None:
    assert decided(ready("a", 60, unload_ordered=True, in_flight=1)) == CloseSlot("a", "an operator ordered it")
    assert decided(draining(unload_ordered=True, in_flight=1)) == Rest(NOW + 50)
    assert decided(draining(unload_ordered=True, in_flight=1, closed_at=0.0)) == CutSlot("a")
    assert decided(draining(unload_ordered=True)) == UnloadSlot("a", "an operator ordered it")


def test_a_model_that_is_loaded_anew_for_a_flush_drains_without_a_limit_unless_an_operator_orders_it_to_go() -> None:
    why = "its prompt cache is flushed"
    assert decided(ready("a", 60, renewing=True, in_flight=1)) == CloseSlot("a", why)
    assert decided(draining(renewing=True, in_flight=1, closed_at=0.0)) == Rest(None)
    assert decided(draining(renewing=True)) == UnloadSlot("a", why)
    assert decided(draining(renewing=True, unload_ordered=True, in_flight=1, closed_at=0.0)) == CutSlot("a")
    assert decided(ready("a", 60, renewing=True, state=S.ASLEEP)) == Rest(None)


def test_a_switch_moves_nothing_else_and_other_kinds_leave_first() -> None:
    order = ExclusiveOrder("vllm", "v")
    other, wanted = ready("a", 60, kind="llama", in_flight=1), SlotFacts("v", "v", 80, kind="vllm")
    bystander = cold("c", 10, kind="llama")
    facts: dict[str, Any] = {"exclusive": order}
    assert decided(other, wanted, bystander, **facts) == CloseSlot("a", "switch to vllm")
    closed = replace(other, state=S.DRAINING, closed_at=NOW)
    assert decided(closed, wanted, bystander, **facts) == Rest(NOW + 60)
    assert decided(replace(closed, in_flight=0), wanted, bystander, **facts) == UnloadSlot("a", "switch to vllm")
    move = decided(SlotFacts("a", "a", 60), wanted, bystander, **facts)
    assert isinstance(move, LoadSlot)
    assert move.slot == "v"
    assert decided(ready("v", 80, kind="vllm"), bystander, **facts) == Rest(None)
    closing = ready("v", 80, kind="vllm", state=S.DRAINING, closed_at=NOW)
    assert decided(closing, bystander, **facts) == OpenSlot("v")  # it was about to leave when the order came


def test_a_switch_right_after_a_load_waits_until_its_memory_may_move() -> None:
    """It was refused for want of room, on its way back too (`dependency_down`), although there was enough: nothing may
    move where a load goes on or has just ended, and what may not move now was taken for what never fits."""
    loaded = ready("a", 60, kind="llama", pinned_at=0.0, settled=False)
    other = ready("b", 10, kind="llama")
    fits = SlotFacts("v", "v", 30, kind="vllm", is_backend=True, pinned_at=NOW)
    large = replace(fits, need_bytes=50)
    facts: dict[str, Any] = {"exclusive": ExclusiveOrder("", "v")}
    assert decided(loaded, other, fits, **facts) == Rest(None), "and nobody leaves for it"
    assert isinstance(decided(replace(loaded, settled=True), other, fits, **facts), LoadSlot)
    assert decided(loaded, other, large, **facts) == CloseSlot("b", "room for v")
    assert decided(loaded, large, **facts) == Rest(None)
    assert decided(replace(loaded, state=S.LOADING), fits, **facts) == Rest(None)
    assert decided(replace(loaded, pinned_at=None), large, **facts) == Rest(None), "it leaves once it is settled"
    assert isinstance(decided(replace(loaded, settled=True), large, **facts), RefuseWaiting)


def test_a_failed_load_is_tried_again_later_and_then_refused() -> None:
    assert decided(cold("a", 60, failures=1, retry_at=NOW + 60)) == Rest(NOW + 60)
    assert isinstance(decided(cold("a", 60, failures=1, retry_at=NOW)), LoadSlot)
    assert decided(cold("a", 60, state=S.FAILED)) == RefuseWaiting("a", "its loads have failed")


def test_a_load_that_nobody_waits_for_goes_on_unless_told_otherwise() -> None:
    loading = replace(ready("a", 60), state=S.LOADING)
    assert decided(loading) == Rest(None)
    move = decided(loading, rules=Rules(finish_loads=False))
    assert move == UnloadSlot("a", "nobody waits for it any more")


def test_an_idle_model_leaves_only_if_that_is_configured() -> None:
    idle = ready("a", 60, used_at=NOW - 100, keep_alive_s=60.0)
    assert decided(idle) == Rest(None)
    assert decided(idle, rules=Rules(unload_idle=True)) == UnloadSlot("a", "idle")
    assert decided(replace(idle, used_at=NOW - 10), rules=Rules(unload_idle=True)) == Rest(NOW + 50)
    assert decided(replace(idle, pinned_at=0.0), rules=Rules(unload_idle=True)) == Rest(None)


# --- several GPUs ---

FOUR = tuple(MemoryAccount(f"g{number}", 1000, 0) for number in range(4))


def test_a_model_larger_than_a_gpu_is_split_over_as_few_as_it_takes() -> None:
    move = decided(cold("a", 1500), accounts=FOUR, rules=Rules(split_margin_bytes=100))
    assert isinstance(move, LoadSlot)
    assert move.grants == (Grant("g0", 850), Grant("g1", 850))


def test_victims_of_a_split_leave_from_all_its_gpus() -> None:
    slots = [ready(f"s{number}", 900, account=f"g{number}") for number in range(4)]
    slots[1] = replace(slots[1], audience=BUSY)
    move = decided(*slots, cold("a", 1500, since=0.0), accounts=FOUR, rules=Rules(split_margin_bytes=100))
    assert leaving(move) == ["s0", "s2"]
    assert isinstance(move, MakeRoom)
    assert sum(grant.charged_bytes for grant in move.claim.grants) == 1500 + 200


def test_the_gpu_whose_victims_cost_least_is_chosen() -> None:
    slots = [ready(f"s{number}", 900, account=f"g{number}", audience=BUSY) for number in range(4)]
    slots[2] = replace(slots[2], audience=replace(BUSY, users=1))
    assert leaving(decided(*slots, cold("a", 500, since=0.0), accounts=FOUR)) == ["s2"]
