"""Flushes in the daemon: what is written, what the proxy is told, and when a flush is said to be done."""

from __future__ import annotations

import asyncio
import sqlite3
import time

import pytest

from hive.audit.approval import Approval
from hive.domain import BackendInfo, BackendKind, JobState, ModelInfo
from hive.errors import DependencyDown, GovernanceBroken, NotFound, NotSupported, OpTokenReplayed
from hive.governance.verdict import TokenVerdict
from hive.lifecycle import cache_flush
from hive.models.cache_epochs import EVERYTHING, TAGS, FlushKind, FlushScope, raised_by
from hive.settings.table import InferenceSection, Settings, TenantRow
from hive.store import cache_epochs
from hive.store.database import Database
from hive.store.migrations import migrate
from tests.approvals import FLUSH, LOAD
from tests.control.box import Box
from tests.waiting import until

ALL = FlushScope(FlushKind.ALL)


def tenant(name: str) -> FlushScope:
    return FlushScope(FlushKind.TENANT, name)


async def test_a_flush_is_told_to_the_proxy_before_it_is_said_to_be_done(live: Box) -> None:
    cache = live.services.cache
    live.proxy.takes_epochs = False
    flushing = asyncio.ensure_future(cache.flush(ALL, actor="uid:0", approval=FLUSH))
    await until(lambda: live.proxy.epochs is not None)
    [job] = (await cache.view())["flushing"]
    assert (await live.services.jobs.get(job)).state is JobState.RUNNING
    live.proxy.takes_epochs = True
    came = await flushing
    came = cache.result_of(ALL, await live.services.jobs.get(came.job.id, wait_s=20))
    assert came.flushed
    assert live.proxy.epochs is not None
    assert set(live.proxy.epochs.numbers) == {EVERYTHING}
    [row] = (await live.services.cache.view())["flushes"]
    assert (row["scope"], row["name"], row["actor"]) == ("all", "", "uid:0")


async def test_without_a_proxy_it_fails_and_holds_all_the_same_for_the_next_one(
    live: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_flush, "PROXY_S", 0.2)
    live.proxy.close()
    await until(lambda: live.services.proxy_link.session is None)
    with pytest.raises(DependencyDown, match="not taken"):
        await live.services.cache.flush(tenant("default"), actor="uid:0", approval=FLUSH)
    assert not live.services.cache.counts.flushes
    proxy = await live.start_proxy()
    assert proxy.table is not None
    assert set(proxy.table.cache_epochs) == {"tenant default", "shared"}


async def test_a_proxy_that_comes_meanwhile_is_waited_for(live: Box) -> None:
    live.proxy.close()
    await until(lambda: live.services.proxy_link.session is None)
    flushing = asyncio.ensure_future(live.services.cache.flush(ALL, actor="uid:0", approval=FLUSH))
    await asyncio.sleep(0.2)
    assert not flushing.done()
    proxy = await live.start_proxy()
    assert (await flushing).flushed
    assert proxy.epochs is not None, "it has said so itself"


async def test_numbers_only_grow_also_over_daemons(live: Box) -> None:
    cache, seen = live.services.cache, []
    for _ in range(3):
        await cache.flush(ALL, actor="uid:0", approval=FLUSH)
        seen.append(cache.epochs().numbers[EVERYTHING])
    await live.stop_daemon()
    await live.start_daemon()
    table = await live.proxy.until_table()
    assert table.cache_epochs == {EVERYTHING: seen[-1]}
    await live.services.cache.flush(ALL, actor="uid:0", approval=FLUSH)
    seen.append(live.services.cache.epochs().numbers[EVERYTHING])
    assert seen == sorted(set(seen))


async def test_flushes_at_once_are_each_told_and_none_is_lost(live: Box) -> None:
    await live.create("bob", tenant="acme")
    scopes = [tenant("acme"), *(FlushScope(FlushKind.TAG, f"t{number}") for number in range(20)), ALL]
    found = await asyncio.gather(*(live.services.cache.flush(scope, actor="uid:0", approval=FLUSH) for scope in scopes))
    assert [one.flushed for one in found] == [True] * len(scopes)
    assert live.proxy.epochs is not None
    expected = {key for scope in scopes for key in raised_by(scope, groups=("tenant acme",))}
    assert set(live.proxy.epochs.numbers) == expected


async def test_a_tenant_that_nobody_has_named_is_unknown_and_one_of_an_agent_is_not(live: Box) -> None:
    cache = live.services.cache
    with pytest.raises(NotFound, match="nobody"):
        await cache.flush(tenant("nobody"), actor="uid:0", approval=FLUSH)
    await live.create("bob", tenant="acme")
    assert (await cache.flush(tenant("acme"), actor="uid:0", approval=FLUSH)).flushed
    with pytest.raises(NotFound):
        await cache.flush(FlushScope(FlushKind.MODEL, "none"), actor="uid:0", approval=FLUSH)


async def test_a_flush_of_a_tenant_is_one_of_its_group(box: Box) -> None:
    settings = Settings(tenants={"acme": TenantRow(cache_group="us")})
    await box.everything(settings)
    await box.services.cache.flush(tenant("acme"), actor="uid:0", approval=FLUSH)
    assert box.proxy.epochs is not None
    assert set(box.proxy.epochs.numbers) == {"tenant acme", "group us", "shared"}


async def test_a_token_flushes_once_and_only_what_it_is_for(live: Box) -> None:
    signed = Approval("cache-flush", "ann, ben", verdict=TokenVerdict("ann, ben", "0" * 32, time.time() + 300))
    cache = live.services.cache
    came = await asyncio.gather(
        *(cache.flush(ALL, actor="uid:0", approval=signed) for _ in range(2)), return_exceptions=True
    )
    assert sorted(type(one).__name__ for one in came) == ["FlushResult", "OpTokenReplayed"]
    numbers = cache.epochs().numbers
    with pytest.raises(OpTokenReplayed):
        await cache.flush(tenant("default"), actor="uid:0", approval=signed)
    with pytest.raises(GovernanceBroken):
        await cache.flush(ALL, actor="uid:0", approval=LOAD)
    assert cache.epochs().numbers == numbers, "nothing of the others is begun"
    [job] = await live.services.jobs.recent(10)
    assert job.plan["approved_by"] == "ann, ben"


async def test_a_cancelled_one_is_not_done_and_leaves_the_epochs(live: Box) -> None:
    cache = live.services.cache
    live.proxy.takes_epochs = False
    flushing = asyncio.ensure_future(cache.flush(ALL, actor="uid:0", approval=FLUSH))
    await until(lambda: live.proxy.epochs is not None)
    [job] = (await cache.view())["flushing"]
    assert cache.has(job)
    assert (await cache.cancel(job)).state is JobState.CANCELLED
    with pytest.raises(Exception, match="cancelled"):
        await flushing
    assert set(cache.epochs().numbers) == {EVERYTHING}


async def test_a_database_that_was_put_back_has_all_flushed_before_a_proxy_is_told(live: Box) -> None:
    await live.services.cache.flush(tenant("default"), actor="uid:0", approval=FLUSH)
    await live.stop_daemon()
    store = Database.open(live.paths.database)
    await store.write(lambda conn: cache_epochs.note_put_back(conn, 1.0))
    store.close()
    await live.start_daemon()
    table = await live.proxy.until_table()
    assert set(table.cache_epochs) == {"tenant default", "shared", EVERYTHING}


def empty() -> sqlite3.Connection:
    """A database of Hive's, in memory."""
    conn = sqlite3.connect(":memory:", isolation_level=None)
    conn.row_factory = sqlite3.Row
    migrate(conn)
    return conn


def test_many_tags_become_one_epoch_of_all_tags() -> None:
    conn = empty()
    keys = [f"tag {number}" for number in range(cache_epochs.TAGS_MAX)]
    cache_epochs.raise_epochs(conn, ["tenant tag", "shared", *keys], "uid:0", 1.0)
    assert TAGS not in {one.key for one in cache_epochs.epochs(conn)}
    cache_epochs.raise_epochs(conn, ["tag one more"], "uid:0", 2.0)
    assert {one.key for one in cache_epochs.epochs(conn)} == {"tenant tag", "shared", TAGS}
    conn.close()


def test_the_store_knows_the_keys_by_the_names_that_salts_have() -> None:
    assert (cache_epochs.EVERYTHING, cache_epochs.TAGS) == (EVERYTHING, TAGS)
    assert raised_by(FlushScope(FlushKind.TAG, "x"))[0] == f"{cache_epochs.TAG}x"


def test_a_number_is_never_used_again_where_the_clock_or_the_database_goes_back() -> None:
    conn = empty()
    cache_epochs.raise_all(conn, "uid:0", 1000.0)
    cache_epochs.raise_all(conn, "uid:0", 500.0)
    [row] = cache_epochs.epochs(conn)
    assert row.number == 1_000_001
    conn.execute("UPDATE cache_epochs SET number = 1000000")
    cache_epochs.raise_all(conn, "uid:0", 2000.0)
    [row] = cache_epochs.epochs(conn)
    assert row.number == 2_000_000
    conn.close()


async def test_a_server_that_no_flush_reaches_says_so(live: Box) -> None:
    live.services.effects.backend = BackendInfo(kind=BackendKind.DEMO, address="/x.sock", up=True)
    live.services.effects.models = [ModelInfo(name="demo")]
    for scope in (ALL, FlushScope(FlushKind.MODEL, "demo"), tenant("default")):
        with pytest.raises(NotSupported, match="keeps nothing"):
            await live.services.cache.flush(scope, actor="uid:0", approval=FLUSH)
    assert live.services.cache.epochs().numbers == {}


@pytest.mark.parametrize("kind", ["llama", "ollama", "auto"])
async def test_nothing_is_flushed_while_a_server_is_there_that_has_not_said_what_it_has(
    box: Box, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """It was answered as flushed right after a daemon's start, though nothing had been looked at."""
    monkeypatch.setattr(cache_flush, "PROXY_S", 0.3)
    asked: list[asyncio.StreamWriter] = []

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(writer)
        await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    await box.everything(Settings(inference=InferenceSection(backend=kind, port=port)))
    with pytest.raises(DependencyDown, match="not known yet"):
        await box.services.cache.flush(ALL, actor="uid:0", approval=FLUSH)
    assert asked
    assert box.services.cache.epochs().numbers == {}
    server.close()
    for writer in asked:
        writer.close()
    monkeypatch.setattr(cache_flush, "PROXY_S", 20)
    assert (await box.services.cache.flush(ALL, actor="uid:0", approval=FLUSH)).flushed, "nothing is there"


async def test_a_service_that_is_still_looked_for_is_waited_for(live: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_flush, "PROXY_S", 0.3)
    active = live.services.cache._active
    active.chosen.clear()
    with pytest.raises(DependencyDown, match="not known yet"):
        await live.services.cache.flush(ALL, actor="uid:0", approval=FLUSH)
    active.chosen.set()
    assert (await live.services.cache.flush(ALL, actor="uid:0", approval=FLUSH)).flushed
