"""Orders to the pool with a token: it is burnt with what it does, and a token that was used changes nothing."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from hive.audit.approval import Approval
from hive.errors import LeaseTooLarge, NotFound, OpTokenReplayed, WrongState
from hive.governance.verdict import TokenVerdict
from hive.pooling.pool_orders import PoolOrders
from hive.store import jobs, op_nonces
from hive.store.leases import StoredLease
from hive.store.pool import pins
from tests.approvals import LOAD, PIN, TAKE, UNLOAD
from tests.pooling.lease_world import ROOT, LeaseWorld


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[LeaseWorld]:
    made = LeaseWorld(tmp_path, {"a": 60}, total_mb=100)
    await made.begin()
    yield made
    await made.end()


def signed(operation: str) -> Approval:
    return Approval(operation, "ann, ben", verdict=TokenVerdict("ann, ben", secrets.token_hex(16), time.time() + 300))


async def is_used(world: LeaseWorld, approval: Approval) -> bool:
    assert approval._verdict is not None
    nonce = approval._verdict.nonce
    return await world.database.read(lambda conn: op_nonces.is_used(conn, nonce))


async def number_of_jobs(world: LeaseWorld) -> int:
    return len(await world.database.read(lambda conn: jobs.recent(conn, 100)))


def lease(mb: int, kind: str = "held") -> StoredLease:
    return StoredLease(
        kind=kind, state="waiting", actor="uid:0", mb=mb, wait_s=60.0, ttl_s=60.0, boot="", asked_s=0.0, created_at=0.0
    )


async def test_a_load_burns_its_token_and_the_same_one_loads_nothing(world: LeaseWorld) -> None:
    approval = signed("model-load")
    await world.follow(await world.orders.load("a", "uid:0", approval=approval))
    assert (world.state("a"), await is_used(world, approval)) == ("ready", True)
    await world.follow(await world.orders.unload("a", "uid:0", approval=UNLOAD))
    before = await number_of_jobs(world)
    with pytest.raises(OpTokenReplayed):
        await world.orders.load("a", "uid:0", approval=approval)
    assert (world.state("a"), world.pool.find("a").order, await number_of_jobs(world)) == ("cold", None, before)


async def test_a_used_token_unloads_and_unpins_nothing(world: LeaseWorld) -> None:
    """`unload` took the order and the pin away before it wrote its job down."""
    approval = signed("model-unload")
    await world.follow(await world.orders.load("a", "uid:0", approval=LOAD))
    await world.database.write(approval.burn)
    await world.orders.pin("a", "uid:0", approval=PIN)
    with pytest.raises(OpTokenReplayed):
        await world.orders.unload("a", "uid:0", approval=approval, force=True)
    slot = world.pool.find("a")
    assert (world.state("a"), slot.pinned_at is not None, slot.unload_ordered) == ("ready", True, False)
    assert (await world.database.read(pins))["a"][0]


async def test_a_forced_unload_ends_the_pin_with_its_token(world: LeaseWorld) -> None:
    approval = signed("model-unload")
    await world.orders.pin("a", "uid:0", approval=PIN)
    await world.until("a", "ready")
    await world.follow(await world.orders.unload("a", "uid:0", approval=approval, force=True))
    assert (world.state("a"), await is_used(world, approval)) == ("cold", True)
    assert not (await world.database.read(pins))["a"][0]
    assert [act for act, _ in world.audit.acts if act.startswith("model.unp")] == ["model.unpinned"]


async def test_a_forced_unload_is_no_way_around_the_rule_of_unpin(world: LeaseWorld) -> None:
    await world.orders.pin("a", "uid:0", approval=PIN)
    await world.until("a", "ready")
    ruled = PoolOrders(
        world.pool,
        why_off="",
        jobs=world.jobs,
        database=world.database,
        audit_log=world.orders._audit_log,
        helper=world.orders._helper,
        deployments=world.orders._deployments,
        has_rule=lambda operation: operation == "model-unpin",
    )
    approval = signed("model-unload")
    with pytest.raises(WrongState, match="who may unpin it has a rule of its own"):
        await ruled.unload("a", "uid:0", approval=approval, force=True)
    assert not await is_used(world, approval)
    glass = Approval("model-unload", "break-glass: fire", is_break_glass=True)
    await world.follow(await ruled.unload("a", "uid:0", approval=glass, force=True))
    assert world.state("a") == "cold"


Order = Callable[[LeaseWorld, Approval], Awaitable[object]]


@pytest.mark.parametrize(
    ("operation", "order"),
    [
        ("model-load", lambda world, approval: world.orders.load("x", "uid:0", approval=approval)),
        ("model-unload", lambda world, approval: world.orders.unload("x", "uid:0", approval=approval)),
        ("model-pin", lambda world, approval: world.orders.pin("x", "uid:0", approval=approval)),
        ("model-unpin", lambda world, approval: world.orders.unpin("x", "uid:0", approval=approval)),
        ("lease-end", lambda world, approval: world.desk.end("l-99", ROOT, approval=approval)),
        ("lease-take", lambda world, approval: world.desk.ask(lease(10_000), ROOT, approval=approval)),
    ],
)
async def test_an_order_about_nothing_burns_nothing(world: LeaseWorld, operation: str, order: Order) -> None:
    approval = signed(operation)
    with pytest.raises((NotFound, LeaseTooLarge)):
        await order(world, approval)
    assert not await is_used(world, approval)


async def test_a_lease_is_asked_for_and_ended_with_tokens(world: LeaseWorld) -> None:
    take, end = signed("lease-take"), signed("lease-end")
    held = await world.desk.ask(lease(20), ROOT, approval=take)
    await world.until_lease(held, "running")
    with pytest.raises(OpTokenReplayed):
        await world.desk.ask(lease(20), ROOT, approval=take)
    assert len(list(world.pool.leases)) == 1, "the row went with the token"
    await world.desk.end(held.id, ROOT, approval=end)
    assert await is_used(world, take)
    assert await is_used(world, end)
    await world.until_lease(held, "gone")


async def test_a_lease_that_ends_while_a_token_is_written_is_ended_by_both(world: LeaseWorld) -> None:
    """The second order was answered with NotFound, and its token was used all the same."""
    held = await world.desk.ask(lease(40), ROOT, approval=TAKE)
    await world.until_lease(held, "running")
    waits = await world.desk.ask(lease(40), ROOT, approval=TAKE)
    first, second = signed("lease-end"), signed("lease-end")
    orders = (world.desk.end(waits.id, ROOT, approval=approval) for approval in (first, second))
    assert [lease.id for lease in await asyncio.gather(*orders)] == [waits.id, waits.id]
    assert waits.state == "ended"
    assert await is_used(world, first)
    assert await is_used(world, second)
    with pytest.raises(NotFound):
        await world.desk.end(waits.id, ROOT, approval=signed("lease-end"))


@pytest.mark.parametrize("operation", ["model-pin", "model-unpin"])
async def test_a_used_token_pins_nothing(world: LeaseWorld, operation: str) -> None:
    approval = signed(operation)
    await world.database.write(approval.burn)
    order = world.orders.pin if operation == "model-pin" else world.orders.unpin
    with pytest.raises(OpTokenReplayed):
        await order("a", "uid:0", approval=approval)
    assert await world.database.read(pins) == {}
