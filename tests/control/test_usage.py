"""Exactly once: whatever dies between a proxy's record and the row in SQLite, the sums agree.

The first part plays the protocol as a story over the real deciders and a real SQLite; the second does it with real
processes: the proxy's half and the daemon's killed at each step and at any moment, redis-server killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import sqlite3
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import redis
from hypothesis import given, settings
from hypothesis import strategies as st

from hive.control import usage as control
from hive.control.usage import Settled, UsageConsumer
from hive.domain import Agent, AgentSpec, By, UsageEvent
from hive.link.usage import UsageBatch, UsageItem
from hive.metering import usage_spool
from hive.metering.usage_spool import Backlog, UsageSpool
from hive.store import agents, keys, live, rollups, usage
from hive.store.database import Database
from hive.store.live import Live
from hive.store.migrations import migrate
from hive.store.rollups import KeptSince
from hive.store.stream import MOST_TOKENS, entries_of, read_entry, read_lines
from hive.store.usage import UsageFilter, UsageMark
from hive.tasks import spawn
from tests.examples import examples
from tests.fakes.usage_events import usage_event
from tests.waiting import until

if TYPE_CHECKING:
    from tests.conftest import RedisServer

ROOT = Path(__file__).parents[2]


def event(no: int, epoch: str = "p1", **fields: Any) -> UsageEvent:
    return usage_event(no, epoch, **{"tokens_in": no, **fields})


def item(no: int, epoch: str = "p1", **fields: Any) -> UsageItem:
    return UsageItem(no, no, msgspec.json.encode(event(no, epoch, **fields)))


def batch(*items: UsageItem, epoch: str = "p1", committed_to: int = 0) -> UsageBatch:
    return UsageBatch(epoch=epoch, committed_to=committed_to, items=list(items))


# --- deciders ----------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 5)), max_size=40))
def test_the_mark_is_the_highest_number_below_which_all_are_settled(ranges: list[tuple[int, int]]) -> None:
    settled, numbers = Settled(), set()
    for first, more in ranges:
        settled = settled.plus(first, first + more)
        numbers |= set(range(first, first + more + 1))
        assert settled.mark == next(no for no in range(1, 99) if no not in numbers) - 1
        assert settled.size() == len(numbers)
        assert all(low > settled.mark + 1 for low, _ in settled.ahead)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"{", "truncated"),
        (b'{"id": "\xff"}', "utf-8"),
        (msgspec.json.encode(event(4)), "not the one"),
        (msgspec.json.encode(event(3, epoch="p2")), "not the one"),
        (b'{"x":' + b"[" * 20_000, "recursion"),
    ],
)
def test_an_unreadable_event_is_known_by_its_number(line: bytes, why: str) -> None:
    (told,) = read_lines("p1", 3, 3, line)
    assert (told.epoch, told.first, told.last, told.event) == ("p1", 3, 3, None)
    assert why in told.why.lower()


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {b"e": b"p1"},
        {b"e": b"p1", b"n": b"x"},
        {b"e": b"p1", b"n": b"0"},
        {b"e": b"p1", b"n": b"5", b"to": b"4"},
        {b"e": b"p1", b"n": b"1", b"to": b"99999999999999999999"},
        {b"e": b"\xff", b"n": b"1"},
    ],
)
def test_an_entry_without_a_number_is_none_of_hives(fields: dict[bytes, bytes]) -> None:
    assert read_entry(fields) == []


def fields_of(entry: dict[str, Any]) -> dict[bytes, bytes]:
    """The entry as Redis gives it back."""
    return {name.encode(): value if isinstance(value, bytes) else str(value).encode() for name, value in entry.items()}


def test_many_events_share_a_block_and_a_bad_one_among_them_is_known_by_its_number() -> None:
    lines = b"\n".join(msgspec.json.encode(event(no)) for no in (4, 5, 6))
    assert [(one.first, one.event is not None) for one in read_lines("p1", 4, 6, lines)] == [
        (4, True),
        (5, True),
        (6, True),
    ]
    bad = lines.replace(b'"event_no":5', b'"event_no":9')
    assert [(one.first, one.event is not None) for one in read_lines("p1", 4, 6, bad)] == [
        (4, True),
        (5, False),
        (6, True),
    ]
    (lost,) = read_lines("p1", 4, 6, lines.partition(b"\n")[0])
    assert (lost.first, lost.last, lost.event) == (4, 6, None)


@given(st.lists(st.tuples(st.integers(1, 100), st.booleans(), st.integers(0, 1)), max_size=20))
def test_entries_of_the_stream_hold_what_the_batch_held(blocks: list[tuple[int, bool, int]]) -> None:
    items, no = [], 0
    for events, is_lost, gap in blocks:
        first, no = no + gap + 1, no + gap + events
        lines = b"\n".join(msgspec.json.encode(event(one)) for one in range(first, no + 1))
        items.append(UsageItem(first, no, None if is_lost else lines))
    entries = entries_of("p1", items)
    told = [one for item in items for one in read_lines("p1", *item)]
    assert [one for entry in entries for one in read_entry(fields_of(entry))] == told
    assert all(int(entry.get("to", entry["n"])) - int(entry["n"]) < 100 for entry in entries)


def test_impossible_counts_become_unknown() -> None:
    line = msgspec.json.encode(event(1, tokens_in=2**70, tokens_out=-1, cached_tokens=MOST_TOKENS))
    (told,) = read_lines("p1", 1, 1, line)
    assert told.event is not None
    assert (told.event.tokens_in, told.event.tokens_out, told.event.cached_tokens) == (None, None, MOST_TOKENS)


class Story:
    """Proxy, link and daemon as the protocol knows them, with every crash between two steps as a step."""

    def __init__(self) -> None:
        self.base = sqlite3.connect(":memory:", isolation_level=None)
        self.base.row_factory = sqlite3.Row
        migrate(self.base)
        self.recorded: dict[str, int] = {}
        self.spools: dict[str, list[tuple[int, bytes]]] = {}
        self.wire: list[UsageBatch] = []
        self.settled: dict[str, Settled] = {}
        self.old: list[Backlog] = []
        self.new_proxy()

    def new_proxy(self) -> None:
        """The proxy is killed and started: of the old one only the spools are left."""
        epoch = f"p{len(self.spools) + 1}"
        self.spools[epoch] = []
        self.own = Backlog(epoch, bound=4)
        self.old = [Backlog(old, bound=4, last=lines[-1][0]) for old, lines in self.spools.items() if lines]
        self.wire.clear()
        self.tell_marks()

    def record(self) -> None:
        no = self.own.last + 1
        one = event(no, self.own.epoch)
        self.spools[one.epoch].append((no, msgspec.json.encode(one)))
        self.own.add(no, self.spools[one.epoch][-1][1])
        self.recorded[one.id] = no

    def send(self, limit: int) -> None:
        for backlog in [self.own, *self.old]:
            if backlog.wants_more:
                backlog.refill(self.spools[backlog.epoch], at_end=True)
            if items := backlog.take(limit, 10**9):
                self.wire.append(UsageBatch(epoch=backlog.epoch, committed_to=backlog.mark, items=items))

    def lose_link(self) -> None:
        """Loses what was sent and not read; the daemon tells its marks on the next one."""
        self.wire.clear()
        for backlog in [self.own, *self.old]:
            backlog.put_back()
        self.tell_marks()

    def commit(self, count: int) -> None:
        told = []
        for one in self.wire[:count]:
            told += [found for item in one.items for found in read_lines(one.epoch, *item)]
        settled = dict(self.settled)
        for found in told:
            settled[found.epoch] = settled.get(found.epoch, Settled()).plus(found.first, found.last)
        self.base.execute("BEGIN IMMEDIATE")
        usage.insert(self.base, [found.event for found in told if found.event is not None])
        usage.set_marks(self.base, {epoch: UsageMark(after.mark) for epoch, after in settled.items()}, now=0.0)
        self.base.execute("COMMIT")
        self.settled = settled
        del self.wire[:count]

    def restart_daemon(self) -> None:
        self.lose_link()
        self.settled = {epoch: Settled(mark.committed_to) for epoch, mark in usage.marks(self.base).items()}

    def tell_marks(self) -> None:
        for epoch, mark in usage.marks(self.base).items():
            for backlog in [self.own, *self.old]:
                if backlog.epoch == epoch:
                    backlog.commit(mark.committed_to)
        for backlog in self.old:
            if backlog.done:
                self.spools[backlog.epoch] = []
        self.old = [backlog for backlog in self.old if not backlog.done]

    def finish(self) -> None:
        """Nothing dies any more."""
        for _ in range(2 * len(self.recorded) + 20):
            self.send(100)
            self.commit(len(self.wire))
            self.tell_marks()

    def rows(self) -> dict[str, int]:
        return {row["id"]: row["tokens_in"] for row in self.base.execute("SELECT id, tokens_in FROM inference_usage")}

    def sums(self) -> tuple[int, int]:
        """The number of requests and of tokens in the sums of their hours."""
        found = usage.usage_by(self.base, By.HOUR, UsageFilter())
        return sum(cost.requests for cost in found), sum(cost.tokens_in for cost in found)


STEPS = st.one_of(
    st.tuples(st.just("record"), st.integers(1, 3)),
    st.tuples(st.just("send"), st.integers(1, 5)),
    st.tuples(st.just("commit"), st.integers(1, 5)),
    st.tuples(st.just("commit, killed before the acknowledgement"), st.integers(1, 5)),
    st.tuples(st.just("commit, and the link was lost before"), st.integers(1, 5)),
    st.tuples(st.just("link lost"), st.just(0)),
    st.tuples(st.just("daemon restarts"), st.just(0)),
    st.tuples(st.just("marks told"), st.just(0)),
    st.tuples(st.just("proxy killed"), st.just(0)),
)


@settings(max_examples=examples(300), deadline=None)
@given(st.lists(STEPS, max_size=50))
def test_after_any_sequence_of_crashes_every_event_is_one_row(steps: Sequence[tuple[str, int]]) -> None:
    story = Story()
    for step, value in steps:
        match step:
            case "record":
                for _ in range(value):
                    story.record()
            case "send":
                story.send(value)
            case "commit":
                story.commit(value)
            case "commit, killed before the acknowledgement":
                story.commit(value)
                story.restart_daemon()
            case "commit, and the link was lost before":
                on_its_way = story.wire[:value]
                story.lose_link()
                story.send(value)
                story.wire[:0] = on_its_way
                story.commit(value)
            case "link lost":
                story.lose_link()
            case "daemon restarts":
                story.restart_daemon()
            case "marks told":
                story.tell_marks()
            case "proxy killed":
                story.new_proxy()
    story.finish()
    assert story.rows() == story.recorded
    assert story.sums() == (len(story.recorded), sum(story.recorded.values()))
    assert (story.own.done, story.old) == (True, [])
    story.base.close()


# --- the consumer, with a real database --------------------------------------------------------------------------


class Heard:
    """The message to the daemon."""

    def __init__(self) -> None:
        self.marks: dict[str, int] = {}
        self.events: list[UsageEvent] = []

    def consumer(self, live: Live, database: Database) -> UsageConsumer:
        return UsageConsumer(live, database, on_marks=self.marks.update, on_usage=self.events.extend)


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "RETRY_S", (0.01, 0.05))
    monkeypatch.setattr(live, "PING_S", 0.05)
    monkeypatch.setattr(live, "GATHER_S", 0.005)
    monkeypatch.setattr(live, "RETRY_S", (0.01, 0.05))
    monkeypatch.setattr(usage_spool, "TICK_S", 0.05)
    monkeypatch.setattr(usage_spool, "GATHER_S", 0.002)


@pytest.fixture
async def away(tmp_path: Path) -> AsyncIterator[Live]:
    """No Redis: nothing here needs one."""
    store = Live(tmp_path / "no.sock")
    yield store
    await store.close()


@pytest.fixture
async def store(redis_server: RedisServer) -> AsyncIterator[Live]:
    store = Live(redis_server.socket)
    spawn(store.run(), name="live")
    yield store
    await store.close()


@contextlib.asynccontextmanager
async def consuming(store: Live, database: Database, heard: Heard) -> AsyncIterator[UsageConsumer]:
    consumer = heard.consumer(store, database)
    await consumer.load()
    spawn(consumer.run(), name="usage")
    spawn(consumer.take_over(), name="old usage")
    try:
        yield consumer
    finally:
        await consumer.close()


def rows(conn: sqlite3.Connection) -> dict[str, int]:
    return {row["id"]: row["tokens_in"] for row in conn.execute("SELECT id, tokens_in FROM inference_usage")}


async def test_events_become_rows_totals_and_marks_also_without_redis(away: Live, database: Database) -> None:
    alice = Agent(id="a1", spec=AgentSpec(name="alice", command=["true"]))
    await database.write(lambda conn: agents.insert(conn, alice))
    heard = Heard()
    async with consuming(away, database, heard) as consumer:
        consumer.take(batch(item(1), item(2), item(2), item(4)))
        consumer.take(batch(item(1, "p2"), epoch="p2"))
        assert (consumer.waiting, consumer.lag_s > 0) == (5, True)
        await until(lambda: not consumer.waiting)
        assert heard.marks == consumer.marks == {"p1": 2, "p2": 1}
        consumer.take(batch(item(3), committed_to=2))
        await until(lambda: heard.marks["p1"] == 4)
        await until(lambda: (consumer.waiting, consumer.lag_s) == (0, 0))
    assert [one.id for one in heard.events] == ["p1-1", "p1-2", "p1-4", "p2-1", "p1-3"]
    assert await database.read(rows) == {"p1-1": 1, "p1-2": 2, "p1-3": 3, "p1-4": 4, "p2-1": 1}
    (found,) = await database.read(agents.all)
    assert (found.requests, found.tokens_in, found.tokens_out) == (5, 11, 5)


async def test_what_cannot_be_read_is_counted_and_blocks_nothing(
    away: Live, database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    broken, foreign, lost = UsageItem(1, 1, b"{"), UsageItem(9, 8, b"{}"), UsageItem(4, 5, None)
    heard = Heard()
    with caplog.at_level(logging.WARNING):
        async with consuming(away, database, heard) as consumer:
            consumer.take(batch(broken, item(2, status=2**70), foreign, item(3), lost, lost, item(6)))
            await until(lambda: not consumer.waiting)
    assert await database.read(rows) == {"p1-3": 3, "p1-6": 6}
    assert (heard.marks, consumer.foreign, consumer.lost) == ({"p1": 6}, 1, 4)
    assert await database.read(usage.marks) == {"p1": UsageMark(6, 4)}
    assert "usage_event_unusable epoch=p1 event_no=2" in caplog.text


async def test_a_batch_that_comes_again_counts_once(away: Live, database: Database) -> None:
    heard = Heard()
    async with consuming(away, database, heard) as consumer:
        for _ in range(2):
            consumer.take(batch(item(1), item(2)))
            await until(lambda: not consumer.waiting)
    async with consuming(away, database, heard) as consumer:
        assert consumer.marks == {"p1": 2}
        consumer.take(batch(item(1), item(2), item(3)))
        await until(lambda: heard.marks == {"p1": 3})
    assert [one.event_no for one in heard.events] == [1, 2, 3]


async def test_a_full_database_acknowledges_nothing_and_goes_on_with_room(away: Live, database: Database) -> None:
    """A proxy that connects again and again meanwhile sends all of it each time: the daemon keeps one session's."""
    pages = await database.read(lambda conn: conn.execute("PRAGMA page_count").fetchone()[0])
    await database.write(lambda conn: conn.execute(f"PRAGMA max_page_count = {pages}").fetchall())
    heard = Heard()
    async with consuming(away, database, heard) as consumer:
        for _ in range(5):
            consumer.proxy_here({"p1": 100})
            consumer.take(batch(*(item(no, model="m" * 1000) for no in range(1, 101))))
            await until(lambda: "is full" in consumer.degraded)
        assert (consumer.waiting, heard.events, heard.marks) == (200, [], {})
        assert consumer.is_disk_full
        await database.write(lambda conn: conn.execute("PRAGMA max_page_count = 100000").fetchall())
        await until(lambda: not consumer.waiting)
        assert consumer.degraded == ""
    assert (heard.marks, len(heard.events)) == ({"p1": 100}, 100)
    assert len(await database.read(rows)) == 100


async def test_what_a_killed_proxy_had_in_memory_alone_is_kept_where_the_next_one_connects(
    away: Live, database: Database
) -> None:
    """The disk of spool and database was full: its events were in that proxy and in the daemon, and in no file."""
    pages = await database.read(lambda conn: conn.execute("PRAGMA page_count").fetchone()[0])
    await database.write(lambda conn: conn.execute(f"PRAGMA max_page_count = {pages}").fetchall())
    heard = Heard()
    async with consuming(away, database, heard) as consumer:
        for first in (1, 101, 201):
            consumer.take(batch(*(item(no, model="m" * 1000) for no in range(first, first + 100))))
        await until(lambda: "is full" in consumer.degraded)
        consumer.proxy_here({"p1": 200, "p2": 0})
        assert consumer.waiting == 200, "the second batch comes again"
        consumer.take(batch(*(item(no, model="m" * 1000) for no in range(1, 201))))
        await database.write(lambda conn: conn.execute("PRAGMA max_page_count = 100000").fetchall())
        await until(lambda: not consumer.waiting)
    assert heard.marks == {"p1": 300}
    assert sorted(one.event_no for one in heard.events) == list(range(1, 301))


async def test_an_impossible_mark_of_a_proxy_is_passed_over(away: Live, database: Database) -> None:
    """It is no number for SQLite: nothing was written any more, until the next start of the daemon."""
    heard = Heard()
    async with consuming(away, database, heard) as consumer:
        for mark in (2**63, -1, 2**62):
            consumer.take(batch(committed_to=mark))
        consumer.take(batch(item(1)))
        await until(lambda: heard.marks == {"p1": 1})
        assert (consumer.lost, consumer.has_ended) == (0, False)


async def test_what_the_proxy_has_heard_of_and_the_database_has_not_is_lost(away: Live, database: Database) -> None:
    """The database was replaced; number 3 came ahead of what was lost."""
    heard = Heard()
    async with consuming(away, database, heard) as consumer:
        consumer.take(batch(item(3)))
        consumer.take(batch(item(5), committed_to=4))
        await until(lambda: heard.marks == {"p1": 5})
        assert consumer.lost == 3


async def test_marks_of_epochs_long_gone_are_pruned(store: Live, database: Database) -> None:
    await database.write(lambda conn: usage.set_marks(conn, {"old": UsageMark(5), "spooled": UsageMark(6)}, now=0.0))
    async with consuming(store, database, Heard()) as consumer:
        await consumer.prune({"spooled"})
        assert consumer.marks == {"spooled": 6}


def spent(conn: sqlite3.Connection) -> tuple[int, int]:
    found = usage.used_in_all(conn)
    return found.requests, found.tokens_in


async def test_what_comes_again_after_its_row_was_pruned_counts_once(away: Live, database: Database) -> None:
    """Number 5 is ahead of the mark while 4 is not there, also for the next daemon. Late as it is, 4 is counted."""
    heard = Heard()

    async def consume(*numbers: int) -> None:
        async with consuming(away, database, heard) as consumer:
            consumer.take(batch(*map(item, numbers)))
            await until(lambda: not consumer.waiting)

    await consume(1, 2, 3, 5)
    now = time.time()
    await database.write(lambda conn: rollups.let_go(conn, KeptSince(7200), now=now))
    assert await database.write(rollups.prune_requests) == 4
    await consume(2, 5)
    await consume(1, 2, 3, 4, 5)
    assert await database.read(spent) == (5, 15)
    assert [one.event_no for one in heard.events] == [1, 2, 3, 5, 4]
    assert heard.marks == {"p1": 5}
    assert await database.read(usage.marks) == {"p1": UsageMark(5)}


async def test_a_replaced_database_does_not_stop_the_marks(away: Live, tmp_path: Path) -> None:
    """After a damaged database was moved aside the daemon knows no mark; the proxy has forgotten those events."""
    first, second = Database.open(tmp_path / "first.db"), Database.open(tmp_path / "second.db")
    log = UsageSpool(tmp_path / "spool", "p1")
    spawn(log.run(), name="spool")
    before, after = Heard(), Heard()
    async with consuming(away, first, before) as consumer:
        log.attach(consumer.take)
        log.record(event(1))
        await until(lambda: before.marks == {"p1": 1})
        log.marks(before.marks)
        log.detach()
    async with consuming(away, second, after) as consumer:
        log.attach(consumer.take)
        log.record(event(2))
        await until(lambda: after.marks == {"p1": 2})
        assert consumer.lost == 1
        log.marks(after.marks)
        log.detach()
    await log.close()
    first.close()
    second.close()


# --- Redis -------------------------------------------------------------------------------------------------------


def streamed(redis_server: RedisServer) -> list[int]:
    with redis.Redis(unix_socket_path=str(redis_server.socket)) as client:
        found: Any = client.xrange(keys.USAGE_STREAM)
    return [one.first for _, fields in found for one in read_entry(fields)]


async def test_the_stream_has_copies_of_what_was_committed(
    store: Live, database: Database, redis_server: RedisServer
) -> None:
    heard = Heard()
    async with consuming(store, database, heard) as consumer:
        await until(consumer._taken_over.is_set)
        consumer.take(batch(*(item(no) for no in range(1, 151))))
        await until(lambda: streamed(redis_server) == list(range(1, 151)))
        for first in range(151, 1151, 2):  # each with a gap: an entry of its own
            consumer.take(batch(item(first)))
        await until(lambda: 1149 in streamed(redis_server))
        with redis.Redis(unix_socket_path=str(redis_server.socket)) as client:
            assert client.xlen(keys.USAGE_STREAM) < 300
            assert client.xinfo_groups(keys.USAGE_STREAM) == []


async def test_what_an_earlier_version_left_in_the_stream_is_taken_over_once(
    store: Live, database: Database, redis_server: RedisServer
) -> None:
    """The daemon of before had been given numbers 1 and 2, and had committed 1."""
    await database.write(lambda conn: usage.insert(conn, [event(1)]))
    await database.write(lambda conn: usage.set_marks(conn, {"p1": UsageMark(1)}, now=0.0))
    left = [entries_of("p1", [one])[0] for one in (item(1), item(2), item(3), UsageItem(4, 5, None), item(6))]
    with redis.Redis(unix_socket_path=str(redis_server.socket)) as client:
        client.xgroup_create(keys.USAGE_STREAM, keys.USAGE_GROUP, id="0", mkstream=True)
        for entry in left:
            client.xadd(keys.USAGE_STREAM, dict(entry))
        client.xreadgroup(keys.USAGE_GROUP, "daemon", {keys.USAGE_STREAM: ">"}, count=2)
        heard = Heard()
        async with consuming(store, database, heard) as consumer:
            await until(consumer._taken_over.is_set)
            assert (client.xlen(keys.USAGE_STREAM), client.xinfo_groups(keys.USAGE_STREAM)) == (0, [])
            assert (heard.marks, consumer.lost) == ({"p1": 6}, 2)
            consumer.take(batch(item(6), item(7)))  # the spool has some of it, too
            await until(lambda: streamed(redis_server) == [6, 7])
        async with consuming(store, database, heard) as consumer:
            await until(consumer._taken_over.is_set)
            assert client.xlen(keys.USAGE_STREAM) > 0
    assert [one.event_no for one in heard.events] == [2, 3, 6, 7]


async def test_no_mark_is_pruned_before_the_old_stream_is_read(store: Live, database: Database) -> None:
    """A daemon that was off for a month may find there what it had committed and not acknowledged."""
    await database.write(lambda conn: usage.set_marks(conn, {"p1": UsageMark(1)}, now=0.0))
    consumer = Heard().consumer(store, database)
    await consumer.load()
    pruning = asyncio.create_task(consumer.prune(set()))
    await asyncio.sleep(0.1)
    assert (consumer.marks, pruning.done()) == ({"p1": 1}, False)
    spawn(consumer.take_over(), name="old usage")
    await pruning
    assert consumer.marks == {}
    await consumer.close()


# --- everything real, everything killed --------------------------------------------------------------------------


class Process:
    """One end of `usage_ends.py`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, *words: str) -> Process:
        """Returns once it said its first `.`, or has ended."""
        process = await asyncio.create_subprocess_exec(
            *[sys.executable, "-m", "tests.control.usage_ends", *words], cwd=ROOT, stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        with contextlib.suppress(asyncio.IncompleteReadError):
            await process.stdout.readexactly(1)
        return cls(process)

    async def ended(self) -> int:
        """The number of times it said `.`, once it was killed."""
        assert self._process.stdout is not None
        said = 1 + len(await self._process.stdout.read())
        assert await self._process.wait() == -9
        return said

    async def kill(self) -> int:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        return await self.ended()


class Ends:
    """A proxy and a daemon in one directory, each of which may be followed by another one."""

    def __init__(self, directory: Path, redis_socket: Path) -> None:
        self._directory = directory
        self._redis = redis_socket
        self.said: dict[str, int] = {}
        """Epoch → how many records its proxy said have returned."""
        self.proxy: Process
        self.daemon: Process

    async def start_proxy(self, step: str = "") -> None:
        self._epoch = f"p{len(self.said)}"
        self.said[self._epoch] = 0
        self.proxy = await Process.start(
            "proxy", str(self._directory), step, self._epoch, msgspec.json.encode(event(0)).decode()
        )

    async def proxy_ended(self, *, kill: bool) -> None:
        self.said[self._epoch] = await (self.proxy.kill() if kill else self.proxy.ended())

    async def start_daemon(self, step: str = "") -> None:
        self.daemon = await Process.start("daemon", str(self._directory), step, str(self._redis))

    async def all_came_true(self) -> None:
        """The proxy is killed; afterwards every record is one row, and no row is anything else."""
        await self.proxy_ended(kill=True)
        log = UsageSpool(self._directory / "spool", "last")
        spawn(log.run(), name="usage")
        await self.daemon.kill()
        database = Database.open(self._directory / "hive.db")
        store = Live(self._directory / "no.sock")
        async with consuming(store, database, Heard()) as consumer:
            log.marks(consumer.marks)
            log.attach(consumer.take)

            def replayed() -> bool:
                log.marks(consumer.marks)
                return log.spooled() == {"last": 0}

            await until(replayed)
            found, marks = await database.read(rows), consumer.marks
            assert consumer.lost == 0
        await log.close()
        await store.close()
        total = await database.read(usage.used_in_all)
        database.close()
        for epoch, count in self.said.items():
            mine = sorted(number for id, number in found.items() if id.startswith(f"{epoch}-"))
            assert mine == list(range(1, len(mine) + 1)), epoch
            # The last record may have been killed between its write and its word.
            assert len(mine) in (count, count + 1), epoch
            assert marks[epoch] == len(mine)
        assert (total.requests, total.tokens_in) == (len(found), sum(found.values()))


@pytest.mark.parametrize("step", ["sent", "acknowledged", "forgotten", "taken", "inserted", "committed", "told"])
async def test_killed_between_any_two_steps_every_event_is_one_row(tmp_path: Path, step: str) -> None:
    """The first three are steps of the proxy, the others of the daemon."""
    ends = Ends(tmp_path, tmp_path / "no.sock")
    await ends.start_daemon(step)
    await ends.start_proxy(step)
    if step in ("sent", "acknowledged", "forgotten"):
        await ends.proxy_ended(kill=False)
        await ends.start_proxy()
    else:
        await ends.daemon.ended()
        await ends.start_daemon()
    await asyncio.sleep(0.2)
    await ends.all_came_true()


@pytest.mark.breadth(3)
@pytest.mark.parametrize("seed", range(3))
async def test_kill_9_of_everything_at_random_loses_and_doubles_nothing(
    tmp_path: Path, redis_server: RedisServer, seed: int
) -> None:
    dice = random.Random(seed)
    ends = Ends(tmp_path, redis_server.socket)
    await ends.start_daemon()
    await ends.start_proxy()
    for _ in range(8):
        await asyncio.sleep(dice.uniform(0.01, 0.2))
        victim = dice.choice(["proxy", "daemon", "both", "redis"])
        if victim in ("daemon", "both"):
            await ends.daemon.kill()
        if victim in ("proxy", "both"):
            await ends.proxy_ended(kill=True)
            await ends.start_proxy()
        if victim in ("daemon", "both"):
            await ends.start_daemon()
        if victim == "redis":
            redis_server.kill()
            redis_server.start()
    await ends.all_came_true()
