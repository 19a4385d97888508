"""Shares of all request bodies, of an agent, its callers and its tenant: the decider, and over real sockets."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from hive.queue.body_budget import AGENT_PART, TENANT_PART, BodyBudget, BodyShare, HeldBody, TenantBodies
from tests.examples import examples
from tests.proxy.harness import CHAT, JSON_ANSWER, Client, answer, nothing_is_held, post, proxied
from tests.waiting import until

MIB = 1 << 20
ASK = post(b"/v1/chat/completions", CHAT)
LARGE = CHAT.replace(b"hello", b"x" * (15 * MIB))


class Fake:
    """An upload as the budget sees it."""

    def __init__(self, *, parked: bool = False) -> None:
        self.parked = parked
        self.displaced = False

    def on_body_displaced(self) -> None:
        self.displaced = True


def upload(budget: BodyBudget, share: BodyShare, size: int, *, parked: bool = False) -> Fake | None:
    """The beginning of a body; None where it is refused. Those that give way are gone afterwards."""
    one = Fake(parked=parked)
    if not budget.take(share, size):
        assert not budget.displaced
        return None
    budget.goes_on(share, one, size)
    while budget.displaced:
        budget.displaced.pop().on_body_displaced()
    return one


def test_an_agent_and_its_callers_hold_an_eighth_and_its_callers_leave_it_its_own_part() -> None:
    budget, tenant = BodyBudget(256, one_body=16), TenantBodies()
    own = BodyShare(tenant)
    callers = BodyShare(tenant, of=own)
    assert [budget.take(callers, 8) for _ in range(3)] == [True, True, False]
    assert [budget.take(own, 8) for _ in range(3)] == [True, True, False]
    assert own.agents == 256 // AGENT_PART
    budget.give(callers, 16)
    assert [budget.take(own, 8) for _ in range(3)] == [True, True, False], "it may have all of it"


def test_what_a_request_holds_is_given_back_and_a_whole_body_is_not_displaced() -> None:
    budget, here, there = BodyBudget(32, one_body=16), BodyShare(TenantBodies()), BodyShare(TenantBodies())
    whole, going_on, first, second = HeldBody(budget), HeldBody(budget), Fake(), Fake()
    assert whole.take(1000), "what is nobody's yet is refused anyway, and counts nowhere"
    assert budget.used == 0
    for held, one in ((whole, first), (going_on, second)):
        held.share = here
        assert held.take(8, upload=one)
    whole.is_in(first)
    asking = HeldBody(budget)
    asking.share = there
    assert asking.take(16)
    assert (first.displaced, second.displaced) == (False, False)
    asking.release(Fake())
    budget.use(24, one_body=16)
    assert asking.take(16), "it fits once the other upload has ended"
    assert (first.displaced, second.displaced) == (False, True)
    for held, one in ((whole, first), (going_on, second)):
        held.release(one)
    assert (budget.used, here.used, here.uploads) == (16, 0, {})


def test_a_tenant_holds_a_half_and_one_body_for_each_agent() -> None:
    budget, crowd = BodyBudget(256, one_body=16), TenantBodies()
    for _ in range(10):
        share = BodyShare(crowd)
        while budget.take(share, 8):
            pass
    assert crowd.used == 256 // TENANT_PART + 6 * 16, "whole bodies: nothing of theirs gives way"
    share = BodyShare(TenantBodies())
    assert [budget.take(share, 16) for _ in range(3)] == [True, True, False]
    assert not budget.displaced


def test_what_is_short_comes_from_the_largest_holders_oldest_upload() -> None:
    budget, tenant = BodyBudget(64, one_body=16), TenantBodies()
    large, small, mine = BodyShare(tenant), BodyShare(TenantBodies()), BodyShare(TenantBodies())
    asleep, oldest, other = (upload(budget, large, 5, parked=parked) for parked in (True, False, False))
    first = upload(budget, small, 14)
    for _ in range(3):
        budget.take(BodyShare(TenantBodies()), 10)
    assert (budget.used, budget.limit) == (59, 64)
    assert upload(budget, mine, 8) is not None
    assert [one.displaced for one in (asleep, oldest, other, first) if one is not None] == [False, True, False, False]


@settings(max_examples=examples(100), deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 7), st.integers(1, 12), st.sampled_from(["comes", "ends", "goes"])), max_size=200)
)
def test_whatever_comes_and_goes_who_holds_less_than_one_body_is_let_in(moves: list[tuple[int, int, str]]) -> None:
    budget = BodyBudget(64, one_body=12)
    tenants = [TenantBodies(), TenantBodies()]
    own = [BodyShare(tenants[number % 2]) for number in range(4)]
    shares = own + [BodyShare(share.tenant, of=share) for share in own]
    held: list[tuple[BodyShare, Fake, int]] = []
    for number, size, what in moves:
        share = shares[number]
        mine = [one for one in held if one[0] is share]
        if what == "comes":
            is_small = share.used + size <= budget.one_body
            one = upload(budget, share, size)
            assert one is not None or not is_small
            if one is not None:
                held.append((share, one, size))
        elif mine and what == "ends":
            budget.ended(share, mine[0][1])
        elif mine:
            budget.ended(share, mine[0][1])
            budget.give(share, mine[0][2])
            held.remove(mine[0])
        for gone in [one for one in held if one[1].displaced]:
            budget.ended(gone[0], gone[1])
            budget.give(gone[0], gone[2])
            held.remove(gone)
        assert budget.used == sum(size for _, _, size in held) == sum(tenant.used for tenant in tenants)
        assert all(share.agents <= 24 for share in own), "one body each for itself and its callers, at most"
    for share, one, size in held:
        budget.ended(share, one)
        budget.give(share, size)
    assert repr(budget) == "<BodyBudget 0/64 B>"


async def slow_uploads(path: Path, count: int, size: int = 12 * MIB) -> list[Client]:
    """Bodies of 16 MiB that stop short of their end."""
    clients = [await Client.unix(path) for _ in range(count)]
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: h\r\ncontent-length: %d\r\n\r\n" % (16 * MIB)
    for client in clients:
        client.writer.write(head + b"x" * size)
    for client in clients:
        await asyncio.wait([asyncio.ensure_future(client.writer.drain())], timeout=1)
    return clients


async def test_one_agents_slow_uploads_starve_nobody(tmp_path: Path) -> None:
    """16 slow bodies of 16 MiB took the whole budget, and every other agent was answered 503, for hours."""
    async with proxied(tmp_path, between_bytes_s=5.0) as (proxy, _):
        bob = proxy.another("bob")
        await slow_uploads(proxy.socket_path, 16)
        assert 16 * MIB < proxy.path.budget.used <= 32 * MIB
        for body in (CHAT, LARGE):
            assert (await (await Client.unix(bob)).ask(post(b"/v1/chat/completions", body)))[0] == 200
        status, fields, body = await (await Client.unix(proxy.socket_path)).ask(post(b"/v1/chat/completions", LARGE))
        assert (status, fields[b"retry-after"]) == (503, b"2"), "it has used up its own part"
        assert b"this agent's share" in body
        while Client.opened:
            Client.opened.pop().close()
        await until(lambda: nothing_is_held(proxy))


async def test_ten_agents_together_starve_neither_their_own_tenant_nor_another_one(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, _):
        for number in range(10):
            await slow_uploads(proxy.another(f"greedy{number}"), 2)
        assert proxy.path.budget.used <= 128 * MIB + 16 * MIB
        sibling, other = proxy.another("sibling"), proxy.another("other", tenant="acme")
        for path in (sibling, other):
            for body in (CHAT, LARGE):
                assert (await (await Client.unix(path)).ask(post(b"/v1/chat/completions", body)))[0] == 200
        while Client.opened:
            Client.opened.pop().close()
        await until(lambda: nothing_is_held(proxy))


async def test_more_agents_than_the_budget_has_bodies_are_let_in_and_memory_stays_bounded(tmp_path: Path) -> None:
    async with proxied(tmp_path, body_budget_bytes=64 * MIB) as (proxy, _):
        slow = [(await slow_uploads(proxy.another(f"a{number}", tenant=f"t{number}"), 1))[0] for number in range(12)]
        assert proxy.path.budget.used <= 64 * MIB
        assert (await (await Client.unix(proxy.socket_path)).ask(post(b"/v1/chat/completions", LARGE)))[0] == 200
        status, _, body = await slow[0].answer()
        assert (status, b"gave way" in body) == (503, True)


async def test_callers_of_one_agent_starve_neither_it_nor_other_agents_callers(tmp_path: Path) -> None:
    """Ingress took from the same budget, so that callers of one agent had all of it."""
    async with proxied(tmp_path) as (proxy, backend):
        backend.reply = answer(JSON_ANSWER)
        proxy.row = msgspec.structs.replace(proxy.row, address=backend.address)
        proxy.registry.learn(proxy.row)
        bob = proxy.another("bob")
        head = b"POST /agents/alice/t/hi_alice/ HTTP/1.1\r\nhost: h\r\ncontent-length: %d\r\n\r\n" % (16 * MIB)
        for _ in range(16):
            client = await Client.tcp(proxy.ingress_port)
            client.writer.write(head + b"x" * 6 * MIB)
            await asyncio.wait([asyncio.ensure_future(client.writer.drain())], timeout=1)
        assert proxy.alice.callers_bodies.used <= 16 * MIB
        for path in (proxy.socket_path, bob):
            assert (await (await Client.unix(path)).ask(ASK))[0] == 200
        call = post(b"/agents/bob/t/hi_bob/", LARGE)
        assert (await (await Client.tcp(proxy.ingress_port)).ask(call))[0] == 200
