"""Exactly once: whatever dies between a proxy's record and the row in SQLite, the sums agree.

The first part plays the protocol as a story over the real deciders and a real SQLite; the second does it with real
processes: redis-server killed, the daemon's half killed between commit and acknowledgement, proxies killed.
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
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hive.control import usage as control
from hive.control.usage import Settled, UsageConsumer
from hive.domain import Agent, AgentSpec, By, UsageEvent
from hive.errors import DependencyDown
from hive.proxy import usage_spool
from hive.proxy.usage_spool import Backlog, UsageSpool
from hive.store import agents, live, rollups, usage
from hive.store.database import Database
from hive.store.live import Live
from hive.store.migrations import migrate
from hive.store.rollups import KeptSince
from hive.store.stream import MOST_TOKENS, event_entry, events_entry, lost_entry, read_all, read_entry
from hive.store.usage import UsageFilter, UsageMark
from hive.tasks import spawn
from tests.fakes.usage_events import usage_event

if TYPE_CHECKING:
    from tests.conftest import RedisServer


def event(no: int, epoch: str = "p1", **fields: Any) -> UsageEvent:
    return usage_event(no, epoch, **{"tokens_in": no, **fields})


def entry(no: int, epoch: str = "p1", **fields: Any) -> dict[str, Any]:
    return event_entry(epoch, no, msgspec.json.encode(event(no, epoch, **fields)))


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
    ("fields", "event_no", "why"),
    [
        ({b"e": b"p1", b"n": b"3", b"d": b"{"}, 3, "truncated"),
        ({b"e": b"p1", b"n": b"3", b"d": b'{"id": "\xff"}'}, 3, "utf-8"),
        ({b"e": b"p1", b"n": b"3", b"d": msgspec.json.encode(event(4))}, 3, "not the one"),
        ({b"e": b"p1", b"n": b"3", b"d": msgspec.json.encode(event(3, epoch="p2"))}, 3, "not the one"),
    ],
)
def test_an_unreadable_event_is_known_by_its_number(fields: dict[bytes, bytes], event_no: int, why: str) -> None:
    told = read_entry(fields)
    assert told is not None
    assert (told.epoch, told.first, told.last, told.event) == ("p1", event_no, event_no, None)
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
    assert read_entry(fields) is None


def test_many_events_share_an_entry_and_a_bad_one_among_them_is_known_by_its_number() -> None:
    lines = [msgspec.json.encode(event(no)) for no in (4, 5, 6)]
    fields = {
        k.encode(): v if isinstance(v, bytes) else str(v).encode() for k, v in events_entry("p1", 4, lines).items()
    }
    assert [(one.first, one.event is not None) for one in read_all(fields)] == [(4, True), (5, True), (6, True)]
    fields[b"d"] = fields[b"d"].replace(b'"event_no":5', b'"event_no":9')
    assert [(one.first, one.event is not None) for one in read_all(fields)] == [(4, True), (5, False), (6, True)]
    fields[b"d"] = lines[0]
    (lost,) = read_all(fields)
    assert (lost.first, lost.last, lost.event) == (4, 6, None)


def test_impossible_counts_become_unknown() -> None:
    line = msgspec.json.encode(event(1, tokens_in=2**70, tokens_out=-1, cached_tokens=MOST_TOKENS))
    told = read_entry({b"e": b"p1", b"n": b"1", b"d": line})
    assert told is not None
    assert told.event is not None
    assert (told.event.tokens_in, told.event.tokens_out, told.event.cached_tokens) == (None, None, MOST_TOKENS)


class Story:
    """Proxy, stream and daemon as the protocol knows them, with every crash between two steps as a step."""

    def __init__(self) -> None:
        self.base = sqlite3.connect(":memory:", isolation_level=None)
        self.base.row_factory = sqlite3.Row
        migrate(self.base)
        self.recorded: dict[str, int] = {}
        self.spools: dict[str, list[tuple[int, bytes]]] = {}
        self.stream: list[dict[str, Any]] = []
        self.settled: dict[str, Settled] = {}
        self.old: list[Backlog] = []
        self.new_proxy()

    def new_proxy(self) -> None:
        """The proxy is killed and started: of the old one only the spools are left."""
        epoch = f"p{len(self.spools) + 1}"
        self.spools[epoch] = []
        self.own = Backlog(epoch, bound=4)
        self.old = [Backlog(old, bound=4, last=lines[-1][0]) for old, lines in self.spools.items() if lines]

    def record(self) -> None:
        no = self.own.last + 1
        one = event(no, self.own.epoch)
        self.spools[one.epoch].append((no, msgspec.json.encode(one)))
        self.own.add(no, self.spools[one.epoch][-1][1])
        self.recorded[one.id] = no

    def send(self, limit: int, *, arrives: bool) -> None:
        for backlog in [self.own, *self.old]:
            if backlog.wants_more:
                backlog.refill(self.spools[backlog.epoch], at_end=True)
            batch = backlog.take(limit, now=0.0)
            for first, last, line in batch:
                told = (
                    lost_entry(backlog.epoch, first, last) if line is None else event_entry(backlog.epoch, first, line)
                )
                self.stream.append(told)
            if batch and not arrives:
                backlog.put_back(batch[0].first)

    def commit(self, count: int, *, acknowledged: bool) -> None:
        told = []
        for one in self.stream[:count]:
            fields = {k.encode(): v if isinstance(v, bytes) else str(v).encode() for k, v in one.items()}
            told += read_all(fields)
        settled = dict(self.settled)
        for one in told:
            assert one is not None
            settled[one.epoch] = settled.get(one.epoch, Settled()).plus(one.first, one.last)
        self.base.execute("BEGIN IMMEDIATE")
        usage.insert(self.base, [one.event for one in told if one is not None and one.event is not None])
        usage.set_marks(self.base, {epoch: UsageMark(after.mark) for epoch, after in settled.items()}, now=0.0)
        self.base.execute("COMMIT")
        self.settled = settled
        if acknowledged:
            del self.stream[:count]

    def restart_daemon(self) -> None:
        self.settled = {epoch: Settled(mark.committed_to) for epoch, mark in usage.marks(self.base).items()}

    def tell_marks(self) -> None:
        for epoch, mark in usage.marks(self.base).items():
            for backlog in [self.own, *self.old]:
                if backlog.epoch == epoch:
                    backlog.commit(mark.committed_to, now=0.0)
        for backlog in self.old:
            if backlog.done:
                self.spools[backlog.epoch] = []
        self.old = [backlog for backlog in self.old if not backlog.done]

    def suspect_loss(self) -> None:
        for backlog in [self.own, *self.old]:
            backlog.send_again(now=0.0)

    def finish(self) -> None:
        """Nothing dies any more."""
        for _ in range(4 * len(self.recorded) + 20):
            self.send(100, arrives=True)
            self.send(100, arrives=True)  # what is only in the spool follows what was in memory
            self.commit(len(self.stream), acknowledged=True)
            self.tell_marks()
            self.suspect_loss()

    def rows(self) -> dict[str, int]:
        return {row["id"]: row["tokens_in"] for row in self.base.execute("SELECT id, tokens_in FROM inference_usage")}

    def sums(self) -> tuple[int, int]:
        """How many requests and tokens are in the sums of their hours."""
        found = usage.usage_by(self.base, By.HOUR, UsageFilter())
        return sum(cost.requests for cost in found), sum(cost.tokens_in for cost in found)


STEPS = st.one_of(
    st.tuples(st.just("record"), st.integers(1, 3)),
    st.tuples(st.just("send"), st.integers(1, 5)),
    st.tuples(st.just("send, answer lost"), st.integers(1, 5)),
    st.tuples(st.just("commit"), st.integers(1, 5)),
    st.tuples(st.just("commit, killed before the acknowledgement"), st.integers(1, 5)),
    st.tuples(st.just("daemon restarts"), st.just(0)),
    st.tuples(st.just("redis restarts empty"), st.just(0)),
    st.tuples(st.just("redis loses one"), st.integers(0, 9)),
    st.tuples(st.just("reordered"), st.integers(0, 9)),
    st.tuples(st.just("marks told"), st.just(0)),
    st.tuples(st.just("loss suspected"), st.just(0)),
    st.tuples(st.just("proxy killed"), st.just(0)),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(STEPS, max_size=50))
def test_after_any_sequence_of_crashes_every_event_is_one_row(steps: Sequence[tuple[str, int]]) -> None:
    story = Story()
    for step, value in steps:
        match step:
            case "record":
                for _ in range(value):
                    story.record()
            case "send":
                story.send(value, arrives=True)
            case "send, answer lost":
                story.send(value, arrives=False)
            case "commit":
                story.commit(value, acknowledged=True)
            case "commit, killed before the acknowledgement":
                story.commit(value, acknowledged=False)
                story.restart_daemon()
            case "daemon restarts":
                story.restart_daemon()
            case "redis restarts empty":
                story.stream.clear()
            case "redis loses one":
                del story.stream[value : value + 1]
            case "reordered":
                random.Random(value).shuffle(story.stream)
            case "marks told":
                story.tell_marks()
            case "loss suspected":
                story.suspect_loss()
            case "proxy killed":
                story.new_proxy()
    story.finish()
    assert story.rows() == story.recorded
    assert story.sums() == (len(story.recorded), sum(story.recorded.values()))
    assert (story.own.done, story.old) == (True, [])
    story.base.close()


# --- the consumer, with a real Redis and a real database ---------------------------------------------------------


class Heard:
    """What the daemon is told."""

    def __init__(self) -> None:
        self.marks: dict[str, int] = {}
        self.events: list[UsageEvent] = []

    def consumer(self, live: Live, database: Database) -> UsageConsumer:
        return UsageConsumer(live, database, on_marks=self.marks.update, on_usage=self.events.extend, gather_s=0.001)


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "RETRY_S", (0.01, 0.05))
    monkeypatch.setattr(live, "BLOCK_MS", 50)
    monkeypatch.setattr(live, "PING_S", 0.05)
    monkeypatch.setattr(live, "GATHER_S", 0.005)
    monkeypatch.setattr(live, "RETRY_S", (0.01, 0.05))
    monkeypatch.setattr(usage_spool, "RETRY_S", (0.01, 0.05))
    monkeypatch.setattr(usage_spool, "TICK_S", 0.05)
    monkeypatch.setattr(usage_spool, "GATHER_S", 0.002)
    monkeypatch.setattr(usage_spool, "PATIENCE_S", (0.3, 0.6))


@pytest.fixture
async def store(redis_server: RedisServer) -> AsyncIterator[Live]:
    store = Live(redis_server.socket)
    yield store
    await store.close()


@contextlib.asynccontextmanager
async def consuming(store: Live, database: Database, heard: Heard) -> AsyncIterator[UsageConsumer]:
    consumer = heard.consumer(store, database)
    await consumer.load()
    spawn(consumer.run(), name="usage")
    try:
        yield consumer
    finally:
        await consumer.close()


async def until(condition: Callable[[], Any]) -> None:
    """Waits for a condition, sync or async."""
    async with asyncio.timeout(30):
        while True:
            found = condition()
            if await found if asyncio.iscoroutine(found) else found:
                return
            await asyncio.sleep(0.01)


def rows(conn: sqlite3.Connection) -> dict[str, int]:
    return {row["id"]: row["tokens_in"] for row in conn.execute("SELECT id, tokens_in FROM inference_usage")}


async def settled(store: Live) -> bool:
    return await store.usage_length() == 0


async def test_events_become_rows_totals_and_marks_and_leave_the_stream(store: Live, database: Database) -> None:
    alice = Agent(id="a1", spec=AgentSpec(name="alice", command=["true"]))
    await database.write(lambda conn: agents.insert(conn, alice))
    await store.add_usage([entry(1), entry(2), entry(2), entry(4), entry(1, "p2")])
    heard = Heard()
    async with consuming(store, database, heard) as consumer:
        await until(lambda: settled(store))
        assert heard.marks == consumer.marks == {"p1": 2, "p2": 1}
        await store.add_usage([entry(3)])
        await until(lambda: heard.marks["p1"] == 4)
    assert [one.id for one in heard.events] == ["p1-1", "p1-2", "p1-4", "p2-1", "p1-3"]
    assert await database.read(rows) == {"p1-1": 1, "p1-2": 2, "p1-3": 3, "p1-4": 4, "p2-1": 1}
    (found,) = await database.read(agents.all)
    assert (found.requests, found.tokens_in, found.tokens_out) == (5, 11, 5)


async def test_what_cannot_be_read_is_counted_and_blocks_nothing(
    store: Live, database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    broken = {"e": "p1", "n": 1, "d": b"{"}
    unusable = entry(2, status=2**70)
    foreign = {"who": "knows"}
    told_twice = lost_entry("p1", 4, 5)
    await store.add_usage([broken, unusable, foreign, entry(3), told_twice, told_twice, entry(6)])
    heard = Heard()
    with caplog.at_level(logging.WARNING):
        async with consuming(store, database, heard) as consumer:
            await until(lambda: settled(store))
    assert await database.read(rows) == {"p1-3": 3, "p1-6": 6}
    assert (heard.marks, consumer.foreign, consumer.lost) == ({"p1": 6}, 1, 4)
    assert await database.read(usage.marks) == {"p1": UsageMark(6, 4)}
    assert "usage_event_unusable epoch=p1 event_no=2" in caplog.text


class Killed(Live):
    """Stands still where it is told to; cancelling what waits there is a kill between two steps."""

    before_settling = False

    async def settle_usage(self, ids: Sequence[bytes]) -> None:
        if self.before_settling:
            await asyncio.Event().wait()
        await super().settle_usage(ids)


async def test_a_daemon_killed_between_commit_and_acknowledgement_counts_nothing_twice(
    redis_server: RedisServer, database: Database
) -> None:
    store = Killed(redis_server.socket)
    store.before_settling = True
    await store.add_usage([entry(no) for no in (1, 2, 3)])
    first, second = Heard(), Heard()
    async with consuming(store, database, first):
        await until(lambda: first.marks == {"p1": 3})
        assert await store.usage_length() == 3
    store.before_settling = False
    async with consuming(store, database, second) as consumer:
        assert consumer.marks == {"p1": 3}
        await until(lambda: settled(store))
    assert (len(first.events), second.events) == (3, [])
    await store.close()


class Deaf(Live):
    """Redis is gone at the first acknowledgement."""

    told = 0

    async def settle_usage(self, ids: Sequence[bytes]) -> None:
        self.told += 1
        if self.told == 1:
            raise DependencyDown("gone")
        await super().settle_usage(ids)


async def test_an_acknowledgement_redis_did_not_hear_is_made_again(
    redis_server: RedisServer, database: Database
) -> None:
    store, heard = Deaf(redis_server.socket), Heard()
    await store.add_usage([entry(1)])
    async with consuming(store, database, heard):
        await until(lambda: settled(store))
    assert (store.told, len(heard.events)) == (2, 1)
    await store.close()


async def test_a_full_database_acknowledges_nothing_and_goes_on_with_room(store: Live, database: Database) -> None:
    pages = await database.read(lambda conn: conn.execute("PRAGMA page_count").fetchone()[0])
    await database.write(lambda conn: conn.execute(f"PRAGMA max_page_count = {pages}").fetchall())
    await store.add_usage([entry(no, model="m" * 1000) for no in range(1, 101)])
    heard = Heard()
    async with consuming(store, database, heard) as consumer:
        await until(lambda: "is full" in consumer.degraded)
        assert (await store.usage_length(), heard.events, heard.marks) == (100, [], {})
        await database.write(lambda conn: conn.execute("PRAGMA max_page_count = 100000").fetchall())
        await until(lambda: settled(store))
        assert consumer.degraded == ""
    assert heard.marks == {"p1": 100}
    assert len(await database.read(rows)) == 100


async def test_a_redis_that_comes_back_empty_gets_its_group_again(
    store: Live, database: Database, redis_server: RedisServer
) -> None:
    heard = Heard()
    async with consuming(store, database, heard):
        await store.add_usage([entry(1)])
        await until(lambda: heard.marks == {"p1": 1})
        redis_server.kill()
        redis_server.start()
        await until(lambda: _added(store, entry(2)))
        await until(lambda: heard.marks == {"p1": 2})


async def _added(store: Live, one: dict[str, Any]) -> bool:
    with contextlib.suppress(DependencyDown):
        await store.add_usage([one])
        return True
    return False


async def test_marks_of_epochs_long_gone_are_pruned(store: Live, database: Database) -> None:
    await database.write(lambda conn: usage.set_marks(conn, {"old": UsageMark(5), "spooled": UsageMark(6)}, now=0.0))
    async with consuming(store, database, Heard()) as consumer:
        await consumer.prune({"spooled"})
        assert consumer.marks == {"spooled": 6}


async def test_no_mark_is_pruned_before_the_stream_is_read(store: Live, database: Database) -> None:
    """A daemon that was off for a month may find there what it had committed and not acknowledged."""
    await database.write(lambda conn: usage.set_marks(conn, {"p1": UsageMark(1)}, now=0.0))
    consumer = Heard().consumer(store, database)
    await consumer.load()
    pruning = asyncio.create_task(consumer.prune(set()))
    await asyncio.sleep(0.1)
    assert (consumer.marks, pruning.done()) == ({"p1": 1}, False)
    spawn(consumer.run(), name="usage")
    await pruning
    assert consumer.marks == {}
    await consumer.close()


def spent(conn: sqlite3.Connection) -> tuple[int, int]:
    found = usage.used_in_all(conn)
    return found.requests, found.tokens_in


async def test_what_comes_again_after_its_row_was_pruned_counts_once(store: Live, database: Database) -> None:
    """Number 5 is ahead of the mark while 4 is not there, also for the next daemon. Late as it is, 4 is counted."""
    heard = Heard()
    await store.add_usage([entry(no) for no in (1, 2, 3, 5)])
    async with consuming(store, database, heard):
        await until(lambda: settled(store))
    now = time.time()
    await database.write(lambda conn: rollups.let_go(conn, KeptSince(7200), now=now))
    assert await database.write(rollups.prune_requests) == 4
    for again in ([entry(2), entry(5)], [entry(no) for no in range(1, 6)]):
        await store.add_usage(again)
        async with consuming(store, database, heard):
            await until(lambda: settled(store))
    assert await database.read(spent) == (5, 15)
    assert [one.event_no for one in heard.events] == [1, 2, 3, 5, 4]
    assert heard.marks == {"p1": 5}
    assert await database.read(usage.marks) == {"p1": UsageMark(5)}


async def test_a_replaced_database_does_not_stop_the_marks(
    store: Live, tmp_path: Path, redis_server: RedisServer
) -> None:
    """After a damaged database was moved aside the daemon knows no mark; the proxy has forgotten those events."""
    first, second = Database.open(tmp_path / "first.db"), Database.open(tmp_path / "second.db")
    log = UsageSpool(tmp_path / "spool", "p1", store)
    spawn(log.run(), name="spool")
    before, after = Heard(), Heard()
    async with consuming(store, first, before):
        log.record(event(1))
        await until(lambda: before.marks == {"p1": 1})
        log.marks(before.marks)
    async with consuming(store, second, after) as consumer:
        log.record(event(2))
        await until(lambda: after.marks == {"p1": 2})
        assert consumer.lost == 1
    await log.close()
    first.close()
    second.close()


# --- everything real, everything killed --------------------------------------------------------------------------

PROXY = """
import asyncio, os, sys, msgspec
from pathlib import Path
from hive.domain import UsageEvent
from hive.tasks import spawn
from hive.proxy import usage_spool
from hive.store import live
usage_spool.TICK_S, usage_spool.PATIENCE_S = 0.05, (0.3, 0.6)
usage_spool.RETRY_S = live.RETRY_S = (0.01, 0.05)

async def marks(log):
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        log.marks(msgspec.json.decode(line))

async def main(directory, epoch, socket, event):
    store = live.Live(Path(socket))
    log = usage_spool.UsageSpool(Path(directory), epoch, store, bound=50)
    for work in (store.run(), log.run(), marks(log)):
        spawn(work, name="work")
    event = msgspec.json.decode(event, type=UsageEvent)
    no = 0
    while True:
        no += 1
        log.record(msgspec.structs.replace(event, id=f"{epoch}-{no}", tokens_in=no))
        os.write(1, b".")
        await asyncio.sleep(0.001)

asyncio.run(main(*sys.argv[1:]))
"""


class Proxy:
    """A process that records an event a millisecond and says `.` for each; told the marks on its stdin."""

    def __init__(self, process: asyncio.subprocess.Process, epoch: str) -> None:
        self.process, self.epoch = process, epoch

    @classmethod
    async def start(cls, directory: Path, epoch: str, socket: Path) -> Proxy:
        arguments = [str(directory), epoch, str(socket), msgspec.json.encode(event(0)).decode()]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", PROXY, *arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        await process.stdout.readexactly(1)
        return cls(process, epoch)

    def tell(self, marks: dict[str, int]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(marks) + b"\n")

    async def kill(self) -> int:
        """kill -9; returns how many records it said have returned."""
        self.process.kill()
        assert self.process.stdout is not None
        said = 1 + len(await self.process.stdout.read())
        await self.process.wait()
        assert self.process.stdin is not None
        self.process.stdin.close()
        return said


@pytest.mark.parametrize("seed", range(3))
async def test_kill_9_of_everything_at_random_loses_and_doubles_nothing(
    tmp_path: Path, redis_server: RedisServer, database: Database, seed: int
) -> None:
    dice = random.Random(seed)
    alice = Agent(id="a1", spec=AgentSpec(name="alice", command=["true"]))
    await database.write(lambda conn: agents.insert(conn, alice))
    store = Killed(redis_server.socket)
    said: dict[str, int] = {}
    proxy = await Proxy.start(tmp_path / "spool", "p0", redis_server.socket)
    for number in range(8):
        heard = Heard()
        store.before_settling = dice.random() < 0.3
        async with consuming(store, database, heard) as consumer:
            proxy.tell(consumer.marks)
            for _ in range(dice.randrange(1, 6)):
                await asyncio.sleep(dice.uniform(0.005, 0.05))
                proxy.tell(consumer.marks)
            if dice.random() < 0.4:
                redis_server.kill()
                await asyncio.sleep(dice.uniform(0.0, 0.05))
                redis_server.start()
        if dice.random() < 0.5:
            said[proxy.epoch] = await proxy.kill()
            proxy = await Proxy.start(tmp_path / "spool", f"p{number + 1}", redis_server.socket)
    said[proxy.epoch] = await proxy.kill()
    store.before_settling = False
    last = Live(redis_server.socket)
    log = UsageSpool(tmp_path / "spool", "last", last)
    spooled = log.spooled()
    for work in (last.run(), log.run()):
        spawn(work, name="work")
    heard = Heard()
    async with consuming(store, database, heard) as consumer:

        def replayed() -> bool:
            log.marks(consumer.marks)
            return log.spooled() == {"last": 0}

        await until(replayed)
        assert consumer.lost == 0
        marks = consumer.marks
    await log.close()
    await last.close()
    await store.close()
    found = await database.read(rows)
    for epoch, count in said.items():
        mine = sorted(number for id, number in found.items() if id.startswith(f"{epoch}-"))
        assert mine == list(range(1, len(mine) + 1))
        # The last record may have been killed between its write and its word.
        assert len(mine) in (count, count + 1)
        assert marks[epoch] == len(mine)
        assert spooled.get(epoch, len(mine)) == len(mine)
    (total,) = await database.read(agents.all)
    assert (total.requests, total.tokens_in) == (len(found), sum(found.values()))
