"""A real proxy process tells the daemon what requests cost, and of the agents that were active."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

from tests.journeys.alone import AGENT, TOKEN, Alone, alone
from tests.proxy.harness import CHAT, Backend, Client, post
from tests.waiting import until

ASK = post(b"/v1/chat/completions", CHAT, token=TOKEN.encode())


@contextlib.asynccontextmanager
async def proxy(base: Path) -> AsyncIterator[tuple[Alone, Client]]:
    backend = Backend()
    await backend.start()
    try:
        async with alone(base, backend=backend.address) as hive:
            yield hive, await Client.tcp(hive.port)
    finally:
        while Client.opened:
            Client.opened.pop().close()
        await backend.stop()


async def test_activity_is_told_once_and_gathered(short_path: Path) -> None:
    async with proxy(short_path) as (hive, client):
        begun = time.time()
        for _ in range(50):
            assert (await client.ask(ASK))[0] == 200
        ended = time.time()
        await until(lambda: hive.active and hive.active[-1][AGENT] >= begun)
        assert begun <= hive.active[-1][AGENT] <= ended
        assert len(hive.active) < 20
        told = len(hive.active)
        await until(lambda: len(hive.events) == 50)
        assert (await client.ask(ASK))[0] == 200
        await until(lambda: len(hive.active) > told and hive.active[-1][AGENT] > ended)


async def test_after_a_lost_link_usage_and_activity_are_told_over_the_next(short_path: Path) -> None:
    async with proxy(short_path) as (hive, client):
        for number in range(1, 21):
            assert (await client.ask(ASK))[0] == 200
            if number % 5 == 0:
                hive.lose_link()
        await until(lambda: len(hive.events) == 20, what="each is metered")
        await until(lambda: hive.active)
        assert sorted(event.event_no for event in hive.events.values()) == list(range(1, 21))
        assert hive.told_twice == 0
        assert await hive.end() == 0
        assert not list(hive.paths.spool.glob("*.jsonl"))


async def test_a_proxy_that_leaves_has_told_everything(short_path: Path) -> None:
    async with proxy(short_path) as (hive, client):
        for _ in range(20):
            assert (await client.ask(ASK))[0] == 200
        client.close()
        assert await hive.end() == 0
        await until(lambda: len(hive.events) == 20)
        assert not list(hive.paths.spool.glob("*.jsonl"))
