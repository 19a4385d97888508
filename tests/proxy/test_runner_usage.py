"""Usage of audio on the data path: what a runner tells in its head, what is estimated, and what it counts as.

The runner is a stand-in that answers recorded bytes.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hive.budgets import BudgetKind, UnitPrices
from hive.domain import BackendKind, UsageEvent
from hive.proxy.under_way import queue_now
from hive.queue.budgets import SpendingAccount, SpentTokens
from hive.queue.work_rate import WorkRate
from hive.settings.table import Settings, TenantRow
from tests.proxy.harness import Backend, Client, answer, chunked, post, read_request
from tests.proxy.test_slots import Pool, ask, pooled
from tests.proxy.test_uploads import form, hearing, part, sound, told
from tests.waiting import until


def hear(seconds_of_file: float = 8.0, **fields: str) -> bytes:
    """A request with a file of so many seconds at the 16,000 bytes that are taken for one."""
    parts = [part(name.encode(), value.encode()) for name, value in fields.items()]
    return form(sound(b"x" * int(seconds_of_file * 16_000)), *parts, part(b"model", b"whisper"))


def cost(event: UsageEvent) -> tuple[Any, ...]:
    return event.unit, event.amount, event.estimated, event.cut, event.status


async def test_the_seconds_that_were_heard_are_in_the_usage_row_and_not_in_the_answer(tmp_path: Path) -> None:
    async with hearing(tmp_path) as (pool, _, client):
        status, fields, _ = await client.ask(hear())
        assert status == 200
        assert b"x-hive-cost" not in fields
        event = pool.proxy.events[-1]
        assert cost(event) == ("audio_s", 6.02, False, False, 200)
        assert (event.tokens_in, event.tokens_out, event.backend, event.model) == (None, None, "whisper", "whisper")
        scrape = b"".join(pool.proxy.path.metrics.exposition())
        assert b'hive_proxy_work_total{tenant="default",unit="audio_s"} 6.02' in scrape


async def test_a_stream_of_words_is_whole_with_its_last_event_and_costs_what_its_head_said(tmp_path: Path) -> None:
    delta, done = (b'data: {"type":"transcript.text.%b"}\n\n' % name for name in (b"delta", b"done"))
    async with hearing(tmp_path) as (pool, server, client):
        for pieces, is_whole in (((delta, delta, done), True), ((delta, done, delta), False), ((delta,), False)):
            server.reply = chunked(*pieces).replace(b"\r\n", b"\r\nx-hive-cost: audio_s=31.5\r\n", 1)
            client.writer.write(hear(stream="true"))
            await until(lambda: pool.proxy.events)
            event = pool.proxy.events.pop()
            assert (event.unit, event.cut, event.estimated) == ("audio_s", not is_whole, not is_whole)
            assert event.amount == 31.5 if is_whole else 0.0 < (event.amount or 0.0) <= 31.5
            if is_whole:
                head = await client.reader.readuntil(b"\r\n\r\n")
                assert b"x-hive-cost" not in head
                await client.reader.readuntil(b"0\r\n\r\n")
            else:
                client.close()
                client = await pool.client()
        client.close()


async def test_a_client_that_leaves_with_the_last_event_pays_what_the_head_said(tmp_path: Path) -> None:
    """SDKs close with `[DONE]`, and the end of the answer may still be on its way."""
    done = b'data: {"type":"transcript.text.done"}\n\ndata: [DONE]\n\n'
    whole = chunked(done).replace(b"\r\n", b"\r\nx-hive-cost: audio_s=31.5\r\n", 1)

    async def without_an_end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(whole.removesuffix(b"0\r\n\r\n"))
        while await reader.read(65536):
            pass

    async with hearing(tmp_path) as (pool, server, client):
        pool.proxy.path.slots.pooled["whisper-1"].line.rate.did(100.0, 0.0, 1000.0)  # it hears slowly, 0.1 s in one
        server.script = without_an_end
        client.writer.write(hear(stream="true"))
        await client.reader.readuntil(b"[DONE]\n\n")
        client.close()
        await until(lambda: pool.proxy.events)
        assert cost(pool.proxy.events[-1])[:3] == ("audio_s", 31.5, False)


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (answer(b'{"error":{"code":"invalid_audio"}}', status=b"400 Bad Request"), ("audio_s", 0.0, False, False, 400)),
        (answer(b'{"text":"no head"}'), ("audio_s", 8.0, True, False, 200)),
        (told().replace(b"audio_s=6.02", b"images=3"), ("audio_s", 8.0, True, False, 200)),
        (told().replace(b"audio_s=6.02", b"\xff"), ("audio_s", 8.0, True, False, 200)),
        (answer(b'{"error":"no"}', status=b"500 Internal Server Error"), ("audio_s", 8.0, True, False, 500)),
        (answer(b'{"error":"busy"}', status=b"503 Service Unavailable"), ("audio_s", 0.0, False, False, 503)),
    ],
    ids=["refused", "not told", "of another unit", "not readable", "failed", "full"],
)
async def test_what_a_server_does_not_tell_is_counted_by_the_file_and_what_it_refused_is_free(
    tmp_path: Path, reply: bytes, expected: tuple[Any, ...]
) -> None:
    async with hearing(tmp_path) as (pool, server, client):
        server.reply = reply
        await client.ask(hear(8.0))
        told_of = pool.proxy.events[-1]
        assert told_of.amount == pytest.approx(expected[1], abs=0.1)
        assert (told_of.unit, told_of.estimated, told_of.cut, told_of.status) == (expected[0], *expected[2:])


async def test_a_client_that_leaves_pays_for_what_was_worked_on_and_for_all_where_that_is_not_known(
    tmp_path: Path,
) -> None:
    async with hearing(tmp_path) as (pool, server, client):
        line = pool.proxy.path.slots.pooled["whisper-1"].line
        started = asyncio.Event()

        async def never(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            started.set()
            while await reader.read(65536):
                pass

        async def leave() -> UsageEvent:
            started.clear()
            server.script = never
            pool.proxy.events.clear()
            gone = await pool.client()
            gone.writer.write(hear(800.0))
            await started.wait()
            gone.close()
            await until(lambda: pool.proxy.events and not line.running)
            return pool.proxy.events[-1]

        unknown = await leave()
        assert unknown.amount == pytest.approx(800.0, rel=0.01)
        assert (unknown.estimated, unknown.cut) == (True, True)
        line.rate.did(100.0, 0.0, 1000.0)  # it was seen to hear slowly: 0.1 s in one
        known = await leave()
        assert known.amount is not None
        assert 0.0 < known.amount < 80.0
        assert line.rate.per_s == pytest.approx(0.1), "what was cut teaches nothing"
        client.close()


async def test_a_line_learns_how_fast_it_hears_and_what_a_byte_is(tmp_path: Path) -> None:
    async with hearing(tmp_path, "llama") as (pool, server, client):
        line = pool.proxy.path.slots.pooled["whisper-1"].line
        assert (line.unit.name, line.label, line.rate.is_measured) == ("audio_s", "whisper", False)
        server.reply = told().replace(b"audio_s=6.02", b"audio_s=16.0")
        for _ in range(30):
            await client.ask(hear(8.0))
        assert line.rate.is_measured
        assert line.guess.of(8 * 16_000) == pytest.approx(16.0, rel=0.01)
        assert queue_now(pool.proxy.registry, 0.0).queue.tokens_per_gpu_s == 100.0
        await client.ask(ask("llama"))
        text = pool.proxy.path.slots.pooled["llama-1"].line
        text.rate = WorkRate()
        text.rate.did(6000.0, 0.0, 20.0)  # so long that its rate is believed
        await client.ask(hear(8.0))
        seen = queue_now(pool.proxy.registry, 0.0).queue
        units = {one.model: (one.unit, one.is_measured) for one in seen.work if one.model}
        assert units == {"whisper": ("audio_s", True), "llama": ("tokens", True)}
        assert seen.tokens_per_gpu_s == pytest.approx(text.rate.per_s)
        assert line.tokens_of(line.rate.per_s) == pytest.approx(text.rate.per_s), "a second is a second"


async def test_what_a_server_refuses_late_is_charged_in_its_line_by_the_time_it_took(tmp_path: Path) -> None:
    """It was free there: who sent sounds that are refused as too long once they are decoded had the server before all
    others, for ever."""
    async with hearing(tmp_path) as (pool, server, client):
        pool.tell(pool.row("whisper", places=1))
        bob = pool.proxy.another("bob", tenant="b")
        served: list[str] = []

        async def work(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while True:
                request = await read_request(reader)
                is_bobs = b"bob" in request[1]
                served.append("bob" if is_bobs else "alice")
                await asyncio.sleep(0.05)
                too_long = answer(b'{"error":{"message":"too long"}}', status=b"413 Content Too Large")
                writer.write(too_long if is_bobs else told())

        server.script = work
        await client.ask(hear(8.0, prompt="alice"))  # a second of the server's is known
        served.clear()
        clients = [client, *[await pool.client() for _ in range(2)], *[await Client.unix(bob) for _ in range(12)]]
        for one in clients:
            one.writer.write(hear(8.0, prompt="alice" if one in clients[:3] else "bob"))
        for one in clients:
            await one.answer()
            one.close()
        assert served.index("alice", 1 + served.index("alice", 1)) < 10, served


async def test_a_client_that_leaves_is_charged_in_the_line_until_the_server_has_stopped(tmp_path: Path) -> None:
    """A client that sent and left at once had a window of the server's work for nothing."""
    async with hearing(tmp_path) as (pool, server, _):
        gone = await Client.unix(pool.proxy.another("bob", tenant="b"))
        begun = asyncio.Event()

        async def work(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
            await read_request(reader)
            begun.set()
            await reader.read(1)
            await asyncio.sleep(0.3)

        server.script = work
        gone.writer.write(hear(0.5))
        await begun.wait()
        gone.close()
        await until(lambda: pool.proxy.registry.stopping)
        await until(lambda: not pool.proxy.registry.stopping)
        (ahead,) = (row.tokens_ahead for row in queue_now(pool.proxy.registry, 0.0).queue.tenants if row.name == "b")
        assert ahead > 0.3 * 100.0, "a second counts as 100 tokens as long as no text was made"


# budgets -------------------------------------------------------------------------------------------------------------


async def test_no_second_of_audio_passes_a_budget_uncounted(tmp_path: Path) -> None:
    """A budget of 200 tokens, of which a second of audio takes 10: what is in flight counts, and what ended."""
    async with hearing(tmp_path, tenants={"default": TenantRow(tokens_per_day=200)}) as (pool, server, client):
        account = known_budget(pool)
        assert (await client.ask(hear(8.0)))[0] == 200
        assert account.used(BudgetKind.DAY) == 61
        server.reply = answer(b'{"text":"not told"}')
        assert (await client.ask(hear(8.0)))[0] == 200
        assert account.used(BudgetKind.DAY) > 61 + 60
        assert (await client.ask(hear(80.0)))[0] == 200, "a budget is crossed by what is in flight"
        status, _, body = await client.ask(hear(1.0))
        assert (status, b"budget_exceeded" in body) == (429, True)


def known_budget(pool: Pool) -> SpendingAccount:
    pool.proxy.path.budgets.look()
    book = pool.proxy.path.budgets.book
    (account,) = book.accounts
    account.learn(SpentTokens(), 0, book.at(time.time()))
    return account


def test_the_prices_of_budgets_are_settings() -> None:
    assert Settings().budget.prices == UnitPrices(audio_s=10.0, megapixel_step=40.0)


# images --------------------------------------------------------------------------------------------------------------


def draw(**fields: Any) -> bytes:
    return post(b"/v1/images/generations", json.dumps({"model": "eye", "prompt": "a bee", **fields}).encode())


def drawn(cost_told: str, *, images: int = 1) -> bytes:
    body = json.dumps({"created": 1, "data": [{"b64_json": "aaaa"}] * images}).encode()
    return answer(body).replace(b"content-length", b"x-hive-cost: %b\r\ncontent-length" % cost_told.encode(), 1)


@asynccontextmanager
async def seeing(tmp_path: Path, **settings: Any) -> AsyncIterator[tuple[Pool, Backend, Client]]:
    async with pooled(tmp_path, "eye", **settings) as pool:
        row = pool.row("eye")
        pool.tell(msgspec.structs.replace(row, backend=msgspec.structs.replace(row.backend, kind=BackendKind.COMFYUI)))
        client = await pool.client()
        yield pool, pool.servers["eye"], client
        client.close()


async def test_images_are_counted_with_the_pixels_of_all_their_steps(tmp_path: Path) -> None:
    async with seeing(tmp_path) as (pool, server, client):
        server.reply = drawn("images=2; pixel_steps=1048576", images=2)
        assert (await client.ask(draw(n=2, size="256x256", steps=8)))[0] == 200
        event = pool.proxy.events[-1]
        assert (*cost(event), event.work) == ("images", 2.0, False, False, 200, 1048576.0)
        line = pool.proxy.path.slots.pooled["eye-1"].line
        assert (line.unit.name, line.rate.is_measured, line.guess.of(10.0)) == ("pixel_steps", True, 10.0)
        scrape = b"".join(pool.proxy.path.metrics.exposition())
        for unit, amount in (("images", b"2.0"), ("pixel_steps", b"1048576.0")):
            assert b'hive_proxy_work_total{tenant="default",unit="%b"} %b' % (unit.encode(), amount) in scrape


async def test_images_whose_steps_are_not_told_count_with_those_asked_for(tmp_path: Path) -> None:
    async with seeing(tmp_path, tenants={"default": TenantRow(tokens_per_day=1000)}) as (pool, server, client):
        account = known_budget(pool)
        server.reply = drawn("images=1")
        assert (await client.ask(draw(size="1000x1000", steps=10)))[0] == 200
        event = pool.proxy.events[-1]
        assert (*cost(event), event.work) == ("images", 1.0, True, False, 200, 1e7)
        assert account.used(BudgetKind.DAY) == 400


async def test_a_stream_of_images_is_whole_with_its_last_image(tmp_path: Path) -> None:
    step, image = (b'data: {"type":"image_generation.%b"}\n\n' % name for name in (b"progress", b"completed"))
    async with seeing(tmp_path) as (pool, server, client):
        server.reply = chunked(step, step, image, step, image, b"data: [DONE]\n\n").replace(
            b"\r\n", b"\r\nx-hive-cost: images=2; pixel_steps=2000\r\n", 1
        )
        client.writer.write(draw(n=2, stream=True))
        await client.reader.readuntil(b"0\r\n\r\n")
        event = pool.proxy.events[-1]
        assert (*cost(event), event.work) == ("images", 2.0, False, False, 200, 2000.0)
