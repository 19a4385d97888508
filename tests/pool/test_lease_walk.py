"""Leases and models under chance: the books hold, every bound that was printed holds, nobody starves."""

from __future__ import annotations

import os
import random

import pytest

from hive.domain import Band
from hive.pool.decider import choose
from hive.pool.moves import LoadSlot, MakeRoom, RefuseWaiting, Rest
from hive.pool.state import (
    Audience,
    Demand,
    ExclusiveOrder,
    Grant,
    LeaseTerms,
    MemoryAccount,
    PoolFacts,
    Rules,
    SlotFacts,
    SlotState,
)
from tests.pool.lease_box import GIB, LeaseBox, walk_leases

A_WALK = 150
"""Steps of one box."""


def walked(steps: int, first_seed: int = 0) -> None:
    granted = preempted = served = 0
    for seed in range(first_seed, first_seed + steps // A_WALK):
        box = walk_leases(seed, A_WALK)
        granted += box.granted
        preempted += box.preempted
        served += box.served
    assert granted > steps / 15, "hardly a lease was granted"
    assert preempted > steps / 400
    assert served > steps / 8


def test_a_walk_of_six_thousand_steps_breaks_no_promise() -> None:
    walked(6_000)


@pytest.mark.chaos
@pytest.mark.timeout(600)
def test_a_walk_of_a_hundred_thousand_steps_with_leases_breaks_no_promise() -> None:
    walked(int(os.environ.get("HIVE_POOL_STEPS", "100000")), first_seed=10_000)


def box_of(room_gib: int, *, gpus: int = 1, **models_gib: int) -> LeaseBox:
    slots = [SlotFacts(name, name, size * GIB, load_s=4 + size / 1.5) for name, size in models_gib.items()]
    accounts = [MemoryAccount(f"GPU-{number}", room_gib * GIB, 0) for number in range(gpus)]
    return LeaseBox(slots, accounts, Rules(), random.Random(1))


def state(box: LeaseBox, id: str) -> str:
    return str(box.slots[id].state) if id in box.slots else "over"


def test_a_flood_of_small_leases_does_not_starve_a_large_one() -> None:
    """There is always one of them, and each would fit beside the others."""
    box = box_of(40)
    for _ in range(8):
        box.lease(4, lasts_s=40.0, is_whole=True, max_s=60.0)
        box.pass_time(5.0)
    large = box.lease(36, lasts_s=30.0, is_whole=True, max_s=60.0)
    begun = box.now
    while state(box, large) == "cold":
        box.lease(4, lasts_s=40.0, is_whole=True, max_s=60.0)
        box.pass_time(2.0)
        assert box.now < begun + 60.0, "the large one waits for more than those that were before it"
    box.pass_time(400.0)
    assert not box.leases()


def test_two_that_want_both_gpus_and_one_of_each_never_hold_one_each() -> None:
    box = box_of(40, gpus=2)
    for _ in range(20):
        for accounts in (2, 1, 2, 1):
            box.lease(30, lasts_s=10.0, is_whole=True, accounts=accounts)
        box.pass_time(60.0)
        assert not box.leases(), "somebody waits for what another one waits with"
    assert box.granted == 80


def test_one_that_wants_both_gpus_keeps_them_from_leases_behind_it_and_not_from_models() -> None:
    box = box_of(40, gpus=2, small=10)
    first = box.lease(30, lasts_s=100.0, is_whole=True, max_s=100.0)
    box.pass_time(5.0)
    both = box.lease(30, lasts_s=10.0, is_whole=True, accounts=2)
    behind = box.lease(5, lasts_s=10.0, is_whole=True)
    box.pass_time(20.0)
    assert (state(box, first), state(box, both), state(box, behind)) == ("ready", "cold", "cold")
    box.ask("agent", "small", Band.NORMAL, 5.0)
    box.pass_time(20.0)
    assert box.slots["small"].state is SlotState.READY
    box.pass_time(300.0)
    assert not box.leases()


def test_a_high_lease_goes_before_a_normal_one_that_waits_for_long() -> None:
    box = box_of(40)
    box.lease(30, lasts_s=50.0, is_whole=True)
    normal = box.lease(30, lasts_s=50.0, is_whole=True)
    box.pass_time(30.0)
    high = box.lease(30, lasts_s=50.0, is_whole=True, band=Band.HIGH)
    box.pass_time(30.0)
    assert (state(box, high), state(box, normal)) == ("ready", "cold")


# --- one decision --------------------------------------------------------------------------------------------------

GPU = MemoryAccount("gpu", 100, reserve_bytes=0)


def job(id: str, need: int, *, band: Band = Band.NORMAL, since: float = 0.0, **terms: object) -> SlotFacts:
    """A lease that waits."""
    wants = LeaseTerms(**{"is_whole": True} | terms)  # type: ignore[arg-type]
    return SlotFacts(id, id, need, load_s=0.0, unload_s=0.0, band=band, waiting=(Demand(band, since),), lease=wants)


def held(id: str, bytes: int, *, band: Band = Band.NORMAL, **terms: object) -> SlotFacts:
    """A lease that runs."""
    wants = LeaseTerms(**{"is_whole": True, "begun_at": 0.0} | terms)  # type: ignore[arg-type]
    return SlotFacts(id, id, bytes, band=band, state=SlotState.READY, grants=(Grant("gpu", bytes),), lease=wants)


def model(id: str, bytes: int, *, since: float | None = None, is_loaded: bool = False) -> SlotFacts:
    state = SlotState.READY if is_loaded else SlotState.COLD
    grants = (Grant("gpu", bytes),) if is_loaded else ()
    waiting = () if since is None else (Demand(Band.NORMAL, since),)
    return SlotFacts(id, id, bytes, state=state, grants=grants, waiting=waiting, load_s=10.0)


def decided(now: float, *slots: SlotFacts) -> object:
    return choose(PoolFacts(slots, (GPU,)), now)


def test_a_lease_takes_from_no_model_before_it_what_that_cannot_get_back() -> None:
    """The model waits for the end of another one's turn; the lease would fit into the gap until then, for hours."""
    used = SlotFacts(
        "used", "used", 60, state=SlotState.READY, grants=(Grant("gpu", 60),), in_flight=1, ready_at=95.0, load_s=10.0
    )
    waits, lease = model("waits", 70, since=99.0), job("l-1", 40, since=99.5)
    assert isinstance(decided(100.0, used, waits, lease), Rest)
    assert isinstance(decided(100.0, used, lease), LoadSlot)
    small = job("l-1", 30, since=99.5)
    assert isinstance(decided(100.0, used, waits, small), Rest)  # the first one keeps its place from leases
    assert isinstance(decided(100.0, used, small), LoadSlot)


def test_what_a_lease_without_an_end_holds_is_refused_to_a_model_and_waited_for_by_a_lease() -> None:
    refused = decided(100.0, held("l-1", 60), model("waits", 70, since=99.0))
    assert refused == RefuseWaiting("waits", "waits does not fit beside l-1, which has no end")
    assert isinstance(decided(100.0, held("l-1", 60), job("l-2", 70, since=99.0)), Rest)
    assert isinstance(decided(100.0, held("l-1", 60, until=900.0), model("waits", 70, since=99.0)), Rest)


def test_a_preemptible_lease_leaves_for_a_late_model_and_a_higher_band_alone() -> None:
    lease = held("l-1", 60, preemptible=True)
    assert decided(100.0, lease, model("waits", 70, since=99.0)) == Rest(until=109.0)
    assert isinstance(decided(110.0, lease, model("waits", 70, since=99.0)), MakeRoom)
    young = held("l-1", 60, preemptible=True, begun_at=95.0)
    assert decided(110.0, young, model("waits", 70, since=99.0)) == Rest(until=125.0)  # three times the load
    assert isinstance(decided(100.0, lease, job("l-2", 70, since=10.0)), Rest)
    assert isinstance(decided(100.0, lease, job("l-2", 70, since=100.0, band=Band.HIGH)), MakeRoom)
    assert isinstance(decided(100.0, held("l-1", 60), job("l-2", 70, since=1.0, band=Band.HIGH)), Rest)


def test_the_bound_of_a_lease_counts_a_model_that_comes_while_another_lease_is_in_its_way() -> None:
    """The model is not asked for yet; a request for it of a higher band ends the lease that runs, and takes its place.
    So it was in the walk of seed 10206: 0.56 s beyond the bound."""
    box = box_of(40, away=27)
    box.lease(36, lasts_s=60.0, is_whole=True, preemptible=True, max_s=60.0)
    box.pass_time(0.5)
    behind = box.lease(16, lasts_s=5.0, is_whole=True)
    box.pass_time(2.0)
    box.ask("agent", "away", Band.HIGH, 60.0)
    box.pass_time(300.0)
    assert state(box, behind) == "over"
    assert box.preempted == 1


def test_an_idle_model_leaves_before_a_job_does() -> None:
    lease, idle = held("l-1", 50, preemptible=True), model("idle", 50, is_loaded=True)
    made = decided(110.0, lease, idle, model("waits", 50, since=99.0))
    assert isinstance(made, MakeRoom)
    assert [leaving.slot for leaving in made.claim.leaving] == ["idle"]


def test_a_model_with_an_audience_keeps_its_turn_against_a_lease() -> None:
    used = SlotFacts(
        "used",
        "used",
        60,
        state=SlotState.READY,
        grants=(Grant("gpu", 60),),
        ready_at=100.0,
        load_s=10.0,
        audience=Audience(users=1, ends_at=900.0),
    )
    lease = job("l-1", 70, since=100.0)
    assert decided(101.0, used, lease) == Rest(until=110.0)
    assert decided(110.0, used, lease) == Rest(until=134.5)  # three times its load back and its unload
    assert isinstance(decided(134.5, used, lease), MakeRoom)


def test_leases_that_are_not_preemptible_hold_their_share_and_no_more() -> None:
    capped = job("l-2", 30, since=99.0, is_whole=False)
    assert isinstance(decided(100.0, held("l-1", 30, is_whole=False), capped), Rest)
    assert isinstance(decided(100.0, held("l-1", 30, is_whole=True), capped), LoadSlot)
    assert isinstance(decided(100.0, held("l-1", 30, preemptible=True, is_whole=False), capped), LoadSlot)
    assert isinstance(decided(100.0, held("l-1", 20, is_whole=False), capped), LoadSlot)


def test_one_that_does_not_wait_makes_no_room() -> None:
    idle = model("idle", 60, is_loaded=True)
    assert isinstance(decided(100.0, idle, job("l-1", 70, since=99.0)), MakeRoom)
    assert isinstance(decided(100.0, idle, job("l-1", 70, since=99.0, at_once=True)), Rest)
    assert isinstance(decided(100.0, idle, job("l-1", 40, since=99.0, at_once=True)), LoadSlot)


def test_a_lease_that_holds_memory_stops_no_load_beside_it() -> None:
    """It allocates and frees when it likes, so that nobody waits for it to be still."""
    for one in (SlotState.LOADING, SlotState.STOPPING):
        lease = SlotFacts("l-1", "l-1", 30, state=one, grants=(Grant("gpu", 30),), lease=LeaseTerms())
        assert isinstance(decided(100.0, lease, model("waits", 60, since=99.0)), LoadSlot)


def test_a_switch_leaves_leases_alone() -> None:
    lease, wanted = held("l-1", 60, preemptible=True), model("wanted", 70)
    facts = PoolFacts((lease, wanted), (GPU,), exclusive=ExclusiveOrder("vllm", "wanted"))
    told = choose(facts, 100.0)
    assert isinstance(told, RefuseWaiting)
