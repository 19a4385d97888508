"""Shares of the connections, and the one that goes for another: the decider, and over real sockets."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hive.queue.connection_shares import GUARANTEED, ConnectionHolder, ConnectionShares
from tests.examples import examples
from tests.proxy.harness import CHAT, INGRESS_TOKEN, JSON_ANSWER, Client, Proxy, answer, get, post, proxied
from tests.waiting import until

ASK = post(b"/v1/chat/completions", CHAT)


class Fake:
    """A connection as the shares see it."""

    def __init__(self, idle_since: float | None = None, *, quiet: bool = True) -> None:
        self.idle_since = idle_since
        self._quiet = quiet

    def is_quiet(self) -> bool:
        return self._quiet


def come(shares: ConnectionShares[Fake], holder: ConnectionHolder[Fake], connection: Fake, agents: int) -> bool:
    verdict = shares.verdict_for(holder, agents=agents)
    if verdict.instead_of is not None:
        assert verdict.is_admitted
        shares.leave(verdict.instead_of)
    if verdict.is_admitted:
        shares.enter(connection, holder)
    return verdict.is_admitted


def test_the_longest_idle_one_of_the_largest_holder_goes() -> None:
    shares: ConnectionShares[Fake] = ConnectionShares(30)
    large, small = ConnectionHolder[Fake](is_agents=True), ConnectionHolder[Fake](is_agents=True)
    busy, idle, longest, unread = Fake(), Fake(2.0), Fake(1.0), Fake(0.0, quiet=False)
    for one in (busy, idle, longest, unread, *(Fake() for _ in range(15))):
        shares.enter(one, large)
    for since in range(8):
        shares.enter(Fake(float(-since)), small)
    shares.limit = shares.held
    assert shares.verdict_for(small, agents=2).instead_of is longest
    shares.leave(longest)
    shares.limit = shares.held
    assert shares.verdict_for(large, agents=2).instead_of is idle


def test_where_all_are_busy_who_is_above_its_guarantee_is_refused_and_who_is_below_is_not() -> None:
    shares: ConnectionShares[Fake] = ConnectionShares(100)
    agents = [ConnectionHolder[Fake](is_agents=True) for _ in range(5)]
    got = [come(shares, agents[number % 2], Fake(), 5) for number in range(200)]
    assert got.count(True) == 100 - 3 * GUARANTEED - 12, "3 agents' places and those of strangers are kept"
    for agent in agents[2:]:
        assert [come(shares, agent, Fake(), 5) for _ in range(GUARANTEED)] == [True] * GUARANTEED
    assert not come(shares, agents[2], Fake(), 5)
    assert [come(shares, shares.strangers[1], Fake(), 5) for _ in range(12)] == [True] * 12


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.booleans(), st.booleans()), max_size=300))
def test_however_they_come_and_go_an_agent_below_its_guarantee_is_let_in(moves: list[tuple[int, bool, bool]]) -> None:
    shares: ConnectionShares[Fake] = ConnectionShares(40)
    agents = [ConnectionHolder[Fake](is_agents=True) for _ in range(4)]
    holders = [*agents, *shares.strangers]
    for number, is_busy, leaves in moves:
        holder = holders[number]
        if leaves:
            for one in list(holder)[:1]:
                shares.leave(one)
            continue
        was, agent = len(holder), holder in agents
        found = come(shares, holder, Fake(None if is_busy else 1.0), 4)
        assert found or not agent or was >= GUARANTEED
        assert found or agent, "a stranger is let in, in place of an older one if need be"
        assert shares.held <= 40
    for holder in holders:
        for one in list(holder):
            shares.leave(one)
    assert repr(shares) == "<ConnectionShares 0/40, 0 strangers>"


async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()


async def crowded(proxy: Proxy, paths: list[Path]) -> None:
    """Each of these agents has as many requests at the backend as connections it gets."""
    before = -1
    while before != proxy.path.shares.held:
        before = proxy.path.shares.held
        for path in paths:
            client = await Client.unix(path)
            client.writer.write(ASK[:-1])
        await asyncio.sleep(0.02)


async def test_many_agents_that_take_all_they_can_leave_each_other_agent_its_few(tmp_path: Path) -> None:
    """64 connections an agent × many agents filled all there were, and every later connection was refused."""
    async with proxied(tmp_path) as (proxy, _):
        proxy.path.shares.limit = 80
        greedy = [proxy.another(f"g{number}") for number in range(3)]
        own = proxy.another("modest")
        await crowded(proxy, greedy)
        assert (await (await Client.unix(greedy[0])).ask(ASK))[0] == 503
        clients = [await Client.unix(own) for _ in range(GUARANTEED)]
        for client in clients:
            assert (await client.ask(ASK))[0] == 200
        assert (await (await Client.unix(own)).ask(ASK))[0] == 503
        late = await Client.tcp(proxy.port)
        assert (await late.ask(post(b"/v1/chat/completions", CHAT, token=b"hm_alice")))[0] == 200, "over TCP too"


async def test_callers_of_one_agent_cannot_take_what_others_need(tmp_path: Path) -> None:
    """Callers of one agent, with a good token, kept as many idle connections as there were places."""
    async with proxied(tmp_path) as (proxy, backend):
        backend.reply = answer(JSON_ANSWER)
        proxy.path.shares.limit = 40
        own = proxy.another("bob")
        state = get(b"/agents/alice/t/" + INGRESS_TOKEN + b"/.hive/state")
        callers = []
        for _ in range(60):
            callers.append(await Client.tcp(proxy.ingress_port))
            assert (await callers[-1].ask(state))[0] == 200, "the newest is let in"
            callers[-1].writer.write(b"\r\n")  # which is no request
        assert await callers[0].at_end(), "and the longest idle goes"
        assert len(proxy.alice.callers) <= 40
        assert (await (await Client.unix(own)).ask(ASK))[0] == 200
        assert (await (await Client.tcp(proxy.ingress_port)).ask(get(b"/agents/bob/t/hi_bob/.hive/state")))[0] == 200
        assert (await callers[-1].ask(state))[0] == 200


@pytest.mark.parametrize("target", [b"/agents/bob/t/hi_bob/.hive/state", b"/agents/nobody/"])
async def test_a_connection_to_ingress_is_that_agents_whom_it_asked_for_last(tmp_path: Path, target: bytes) -> None:
    async with proxied(tmp_path) as (proxy, _):
        proxy.another("bob")
        client = await Client.tcp(proxy.ingress_port)
        await until(lambda: len(proxy.path.shares.strangers[1]) == 1)
        assert (await client.ask(get(b"/agents/alice/t/" + INGRESS_TOKEN + b"/.hive/state")))[0] == 200
        assert (len(proxy.alice.callers), len(proxy.path.shares.strangers[1])) == (1, 0)
        status, _, _ = await client.ask(get(target))
        assert (status, len(proxy.alice.callers)) == ((200, 0) if b"bob" in target else (401, 1))
        client.close()
        await until(lambda: proxy.path.shares.held == 0)
