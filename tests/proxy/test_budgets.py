"""Budgets of tokens on the data path: real sockets, and what the daemon would say said by the test."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import msgspec
import pytest

from hive.budgets import NO_LIMITS, BudgetKind, TokenLimits, periods_at
from hive.domain import BackendInfo, BackendKind, ModelInfo
from hive.errors import LinkLost
from hive.link.usage import AskSpent, SpentIs, SpentRow
from hive.queue.budgets import BudgetHold, BudgetSpent, SpendingAccount, SpendingBook, SpendingUnknown, SpentTokens
from hive.settings.table import TenantRow
from tests.proxy.harness import CHAT, STREAM, Backend, Client, Proxy, nothing_is_held, post, proxied, read_request
from tests.proxy.test_leaving import held
from tests.waiting import until

CHAT_AT = b"/v1/chat/completions"
COSTS = 10
"""Tokens of the harness's answer."""


NOTHING = SpentRow()


class PlayedDaemon:
    """Tells the same for all, and up to which event of this proxy that is."""

    def __init__(self, row: SpentRow = NOTHING) -> None:
        self.row = row
        self.committed_to = 0
        self.asked = 0
        self.is_there = True

    async def answer(self, asked: AskSpent) -> SpentIs:
        self.asked += 1
        if not self.is_there:
            raise LinkLost("no daemon")
        rows = [dict.fromkeys(names, self.row) for names in (asked.agents, asked.tenants)]
        return SpentIs(committed_to=self.committed_to, agents=rows[0], tenants=rows[1])


@asynccontextmanager
async def budgeted(
    tmp_path: Path, daemon: PlayedDaemon, *, agent: TokenLimits = NO_LIMITS, **tenant: Any
) -> AsyncIterator[tuple[Proxy, Backend]]:
    async with proxied(tmp_path, tenants={"default": TenantRow(**tenant)}) as (proxy, server):
        proxy.path.budgets.ask = daemon.answer
        proxy.registry.learn(msgspec.structs.replace(proxy.row, limits=agent))
        proxy.path.budgets.heard()
        await asyncio.sleep(0.01)
        yield proxy, server


async def ask(proxy: Proxy, body: bytes = CHAT) -> tuple[int, dict[bytes, bytes], bytes]:
    client = await Client.unix(proxy.socket_path)
    return await client.ask(post(CHAT_AT, body))


async def test_a_spent_budget_is_refused_with_the_time_it_begins_anew(tmp_path: Path) -> None:
    async with budgeted(tmp_path, PlayedDaemon(SpentRow(95, 95, 0)), agent=TokenLimits(tokens_per_day=100)) as (
        proxy,
        _,
    ):
        assert (await ask(proxy))[0] == 200
        status, fields, body = await ask(proxy)
        error = json.loads(body)["error"]
        assert (status, error["code"], error["type"]) == (429, "budget_exceeded", "rate_limit_error")
        assert (error["limit"], error["used"]) == (100, 95 + COSTS)
        ends = periods_at(time.time(), UTC).day_ends
        assert error["resetAt"] == int(ends)
        assert abs(int(fields[b"retry-after"]) - (ends - time.time())) < 5
        assert fields[b"x-should-retry"] == b"false"
        assert len(proxy.events) == 1, "what is refused costs nothing"
        assert nothing_is_held(proxy)


@pytest.mark.parametrize("at", [b"/api/chat", b"/v1/messages"])
async def test_it_is_told_in_the_dialect_of_its_client(tmp_path: Path, at: bytes) -> None:
    async with budgeted(tmp_path, PlayedDaemon(SpentRow(9, 9, 9)), tokens_per_month=5) as (proxy, _):
        client = await Client.unix(proxy.socket_path)
        status, _, answer = await client.ask(post(at, CHAT[:-1] + b',"max_tokens":5}'))
        told = json.loads(answer)
        said = told["error"] if at == b"/api/chat" else told["error"]["message"]
        assert (status, told.get("type")) == (429, None if at == b"/api/chat" else "error")
        assert said.startswith("tenant default has spent its 5 tokens of this month")


async def test_crossed_by_50_requests_at_once_it_is_over_by_no_more_than_was_in_flight(tmp_path: Path) -> None:
    async with budgeted(tmp_path, PlayedDaemon(), tokens_per_day=1000) as (proxy, server):

        async def slowly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while True:
                server.requests.append(await read_request(reader))
                await asyncio.sleep(0.05)
                writer.write(server.reply)

        server.script = slowly
        paths = [proxy.another(f"b{number}") for number in range(10)]
        clients = [await Client.unix(path) for path in paths for _ in range(5)]
        answers = await asyncio.gather(*(client.ask(post(CHAT_AT, CHAT)) for client in clients))
        statuses = [status for status, _, _ in answers]
        expected = 128 + len(CHAT) / 4
        assert set(statuses) == {200, 429}
        assert statuses.count(200) == len(server.requests) <= 1000 / expected + 1, "each counted before it was sent"
        spent = sum((event.tokens_in or 0) + (event.tokens_out or 0) for event in proxy.events)
        assert spent == COSTS * statuses.count(200) <= 1000 + COSTS * statuses.count(200)
        (account,) = proxy.path.budgets.book.accounts
        assert (account.used(BudgetKind.DAY), account.pending) == (spent, 0.0)
        assert (await ask(proxy))[0] == 200, "what it really cost leaves room again"


async def test_a_stream_that_crosses_it_ends_by_itself(tmp_path: Path) -> None:
    async with budgeted(tmp_path, PlayedDaemon(), agent=TokenLimits(tokens_per_day=20)) as (proxy, server):
        go_on = await held(server)
        client = await Client.unix(proxy.socket_path)
        client.writer.write(post(CHAT_AT, STREAM))
        await until(lambda: len(server.requests) == 1)
        assert (await ask(proxy))[0] == 429, "it counts with what it will probably cost"
        go_on.set()
        status, _, body = await client.answer()
        assert (status, body.endswith(b"data: [DONE]\n\n")) == (200, True)
        assert nothing_is_held(proxy)


async def test_who_leaves_gives_back_what_was_expected_of_it(tmp_path: Path) -> None:
    async with budgeted(tmp_path, PlayedDaemon(), agent=TokenLimits(tokens_per_day=20)) as (proxy, server):
        await held(server)
        client = await Client.unix(proxy.socket_path)
        client.writer.write(post(CHAT_AT, CHAT))
        await until(lambda: len(server.requests) == 1)
        client.close()
        (account,) = proxy.path.budgets.book.accounts
        await until(lambda: account.pending == 0)
        server.script = None
        assert (await ask(proxy))[0] == 200


async def test_as_long_as_nobody_says_what_was_spent_nothing_is(tmp_path: Path) -> None:
    daemon = PlayedDaemon()
    daemon.is_there = False
    async with budgeted(tmp_path, daemon, agent=TokenLimits(tokens_per_day=20)) as (proxy, server):
        status, fields, _ = await ask(proxy)
        assert (status, fields[b"retry-after"]) == (503, b"1")
        daemon.is_there = True
        proxy.path.budgets.heard()
        await asyncio.sleep(0.01)
        assert (await ask(proxy))[0] == 200
        assert len(server.requests) == 1


async def test_what_the_daemon_has_counted_meanwhile_is_not_counted_twice(tmp_path: Path) -> None:
    daemon = PlayedDaemon()
    async with budgeted(tmp_path, daemon, agent=TokenLimits(tokens_per_day=1000)) as (proxy, _):
        for _ in range(3):
            assert (await ask(proxy))[0] == 200
        (account,) = proxy.path.budgets.book.accounts
        assert account.used(BudgetKind.DAY) == 3 * COSTS
        daemon.row, daemon.committed_to = SpentRow(2 * COSTS, 2 * COSTS, 0), 2
        proxy.path.budgets.heard()
        await until(lambda: len(account.own) == 1)
        assert account.used(BudgetKind.DAY) == 3 * COSTS


async def test_without_a_budget_nobody_is_asked_and_nothing_counts(tmp_path: Path) -> None:
    daemon = PlayedDaemon()
    async with budgeted(tmp_path, daemon) as (proxy, _):
        assert (await ask(proxy))[0] == 200
        assert (daemon.asked, proxy.path.budgets.is_on, proxy.path.budgets.book.accounts) == (0, False, [])


# --- the book, without sockets ---------------------------------------------------------------------------------------

DAY = 86400.0
NOON = 1_780_315_200.0
"""2026-06-01 12:00 UTC."""
NOTHING_SPENT = SpentTokens()


def book_at(
    now: float, spent: SpentTokens = NOTHING_SPENT, **limits: int
) -> tuple[SpendingBook, tuple[SpendingAccount, ...]]:
    book = SpendingBook()
    account = book.account("agent", "a", "alice", TokenLimits(**limits))
    account.learn(spent, 0, book.at(now))
    return book, (account,)


def test_a_new_day_gives_back_the_day_and_keeps_the_month() -> None:
    book, alice = book_at(NOON, SpentTokens(100, 150, 7), tokens_per_day=100, tokens_per_month=200)
    assert isinstance(book.take(alice, 1.0, is_far=False, now=NOON), BudgetSpent)
    hold = book.take(alice, 1.0, is_far=False, now=NOON + DAY)
    assert isinstance(hold, BudgetHold)
    hold.spend(1, 60, NOON + DAY)
    spent = book.take(alice, 1.0, is_far=False, now=NOON + DAY)
    assert isinstance(spent, BudgetSpent)
    assert (spent.kind, spent.used) == (BudgetKind.MONTH, 210)
    assert isinstance(book.take(alice, 1.0, is_far=False, now=NOON + 31 * DAY), BudgetHold)


def test_a_clock_that_is_set_back_gives_nothing_back() -> None:
    book, alice = book_at(NOON, SpentTokens(100, 100, 0), tokens_per_day=100)
    for back_s in (1.0, DAY / 2 + 60, 3 * DAY, 400 * DAY):
        assert isinstance(book.take(alice, 1.0, is_far=False, now=NOON - back_s), BudgetSpent), back_s
    assert isinstance(book.take(alice, 1.0, is_far=False, now=NOON - 400 * DAY + 3600), BudgetSpent)


def test_tokens_that_stay_do_not_count_against_those_that_leave() -> None:
    book, alice = book_at(NOON, SpentTokens(500, 500, 10), cloud_tokens_per_day=10)
    assert isinstance(book.take(alice, 1.0, is_far=False, now=NOON), BudgetHold)
    assert isinstance(book.take(alice, 1.0, is_far=True, now=NOON), BudgetSpent)


def test_another_zone_makes_what_was_told_unknown() -> None:
    book, alice = book_at(NOON, SpentTokens(5, 5, 0), tokens_per_day=100)
    book.use_zone(ZoneInfo("Asia/Kolkata"), NOON)
    assert isinstance(book.take(alice, 1.0, is_far=False, now=NOON), SpendingUnknown)
    assert book.periods.day_ends - NOON == 6.5 * 3600


async def test_a_server_that_moves_away_while_a_request_waits_asks_for_the_cloud_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with budgeted(tmp_path, PlayedDaemon(SpentRow(500, 500, 500)), cloud_tokens_per_day=100) as (proxy, near):
        far = Backend()
        await far.start()
        monkeypatch.setattr("hive.routing.slot.is_elsewhere", lambda at: at == far.address)
        info = BackendInfo(kind=BackendKind.VLLM, address=near.address, up=True, places=1)
        models = [ModelInfo(name="m")]
        proxy.path.use_backend(info, models)
        begun = await held(near)
        first, second = await Client.unix(proxy.socket_path), await Client.unix(proxy.socket_path)
        first.writer.write(post(CHAT_AT, STREAM))
        await until(lambda: len(near.requests) == 1)
        second.writer.write(post(CHAT_AT, CHAT))
        await until(lambda: proxy.path.slot.line.waiting == 1)
        proxy.path.use_backend(msgspec.structs.replace(info, address=far.address), models)
        begun.set()
        status, _, body = await second.answer()
        assert (status, json.loads(body)["error"]["code"]) == (429, "budget_exceeded")
        assert not far.requests
        await far.stop()


async def test_a_budget_counts_streams_also_where_nothing_is_written_down_of_usage(tmp_path: Path) -> None:
    """vLLM tells the usage of a stream only to those that ask for it."""
    async with budgeted(tmp_path, PlayedDaemon(), tokens_per_day=100) as (proxy, server):
        inference = msgspec.structs.replace(proxy.path.settings.inference, token_tracking=False)
        proxy.path.use_settings(msgspec.structs.replace(proxy.path.settings, inference=inference))
        proxy.use(server, BackendKind.VLLM)
        await ask(proxy, STREAM)
        ((_, body),) = server.requests
        assert json.loads(body)["stream_options"]["include_usage"] is True
