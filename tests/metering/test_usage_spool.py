"""Usage events on their way out of the proxy: pure backlog, real files, a real link, real kills."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hive.domain import UsageEvent
from hive.errors import ConfigError, WrongState
from hive.link.link import Link, LinkReply
from hive.link.message import LinkMessage
from hive.link.messages import Marks
from hive.link.server import LinkServer
from hive.link.usage import UsageBatch
from hive.metering import usage_spool
from hive.metering.usage_spool import Backlog, UsageSpool
from hive.store import spoolfile
from hive.store.spoolfile import SpoolFile
from hive.store.stream import ToldRange, read_lines
from hive.tasks import spawn
from tests.waiting import until

EVENT = UsageEvent(
    id="p1-1",
    epoch="",
    event_no=0,
    agent_id="a1",
    tenant="default",
    model="small",
    backend="ollama",
    endpoint="/api/chat",
    tokens_in=10,
    tokens_out=1,
    status=200,
    created_at=1000.0,
)


def event(seq: int, **fields: Any) -> UsageEvent:
    return msgspec.structs.replace(EVENT, **{"id": f"p1-{seq}", **fields})


# --- the backlog -------------------------------------------------------------------------------------------------

MANY = 10**9


def firsts(backlog: Backlog, limit: int = 10, limit_bytes: int = MANY) -> list[int]:
    return [item.first for item in backlog.take(limit, limit_bytes)]


def test_what_does_not_fit_into_memory_comes_from_the_spool_in_order() -> None:
    backlog = Backlog("p1", bound=2)
    assert [backlog.add(no, b"%d" % no) for no in range(1, 6)] == [True, True, False, False, False]
    assert firsts(backlog) == [1, 2]
    assert not backlog.wants_more  # full: what is in flight is held until it is committed
    backlog.commit(2)
    assert backlog.wants_more
    assert not backlog.add(6, b"6")  # behind the others, which are only in the spool
    backlog.refill([(1, b"1"), (2, b"2"), (3, b"3"), (4, b"4")], at_end=False)
    assert firsts(backlog) == [3, 4]
    backlog.commit(4)
    backlog.refill([(5, b"5"), (6, b"6")], at_end=True)
    assert firsts(backlog) == [5, 6]
    backlog.commit(5)
    assert backlog.add(7, b"7")  # all is in memory again
    assert firsts(backlog) == [7]


def test_numbers_the_spool_lacks_are_told_as_a_range() -> None:
    backlog = Backlog("old", last=9)
    backlog.commit(1)
    backlog.refill([(1, b"1"), (4, b"4"), (5, b"5")], at_end=True)
    assert backlog.take(10, MANY) == [(2, 3, None), (4, 4, b"4"), (5, 5, b"5"), (6, 9, None)]
    backlog.commit(9)
    assert backlog.done


def test_a_batch_ends_with_the_item_that_makes_it_full() -> None:
    backlog = Backlog("p1")
    for no in (2, 4, 6, 7):
        backlog.add(no, b"x" * 10, events=2 if no < 7 else 1)
    assert firsts(backlog, limit=3) == [1, 3]
    assert firsts(backlog, limit_bytes=9) == [5]
    assert (backlog.in_flight, firsts(backlog), backlog.in_flight) == (6, [7], 7)


def test_what_was_in_flight_when_the_link_was_lost_goes_first_and_in_order() -> None:
    backlog = Backlog("p1")
    for no in (1, 2, 3, 4):
        backlog.add(no, b"%d" % no)
    assert firsts(backlog, limit=3) == [1, 2, 3]
    backlog.commit(1)
    backlog.put_back()
    assert (backlog.in_flight, backlog.held) == (0, 3)
    assert firsts(backlog) == [2, 3, 4]
    backlog.commit(3)
    backlog.commit(2)  # an older mark
    assert (backlog.in_flight, backlog.held, backlog.mark) == (1, 1, 3)


STEP = st.one_of(
    st.tuples(st.just("add"), st.booleans()),
    st.tuples(st.just("send"), st.integers(1, 5)),
    st.tuples(st.just("link lost"), st.booleans()),
    st.tuples(st.just("commit"), st.integers(0, 10)),
)


@given(steps=st.lists(STEP, max_size=60), bound=st.integers(1, 6))
def test_every_number_is_sent_or_told_lost_whatever_happens(steps: list[tuple[str, Any]], bound: int) -> None:
    backlog = Backlog("p1", bound=bound)
    spooled: list[tuple[int, bytes]] = []
    sent: list[tuple[int, int, bytes | None]] = []
    told: dict[int, bytes | None] = {}
    lost: set[int] = set()
    last = 0

    def send(limit: int) -> None:
        if backlog.wants_more:
            backlog.refill(spooled, at_end=True)
        sent.extend(backlog.take(limit, MANY))

    def arrive() -> None:
        for first, end, lines in sent:
            told.update((no, lines) for no in range(first, end + 1) if told.get(no) is None)
        sent.clear()

    for step, value in steps:
        if step == "add":
            last += 1
            in_memory = backlog.add(last, b"%d" % last)
            if value:
                spooled.append((last, b"%d" % last))
            elif not in_memory:
                lost.add(last)
        elif step == "send":
            send(value)
        elif step == "link lost":
            if value:
                arrive()
            sent.clear()
            backlog.put_back()
        else:
            arrive()
            settled = next((no for no in range(1, last + 2) if no not in told), 1) - 1
            backlog.commit(min(settled, backlog.mark + value))
        assert backlog.held <= bound + 2 * len(spooled) + 2
        assert 0 <= backlog.in_flight <= backlog.held
    backlog.put_back()
    for _ in range(2 * last + 2):
        send(100)
        arrive()
        backlog.commit(next(no for no in range(1, last + 2) if no not in told) - 1)
    assert (backlog.done, backlog.held, backlog.in_flight) == (True, 0, 0)
    assert {no for no, line in told.items() if line is None} == lost
    assert all(line == b"%d" % no for no, line in told.items() if line is not None)


# --- the file ----------------------------------------------------------------------------------------------------


def line(no: int, size: int = 100) -> bytes:
    return b'{"event_no":%d,"pad":"%s"}\n' % (no, b"x" * size)


def numbers(file: SpoolFile) -> list[int]:
    found: list[int] = []
    while not file.at_end:
        found += [no for no, _ in file.read()]
    return found


def test_a_torn_last_line_is_no_event(tmp_path: Path) -> None:
    path = tmp_path / "p1.jsonl"
    path.write_bytes(line(1) + line(2) + b"\0\xff not json\n" + line(4)[:-20])
    file = SpoolFile.found(path)
    assert (file.last, numbers(file)) == (2, [1, 2])
    file.close(delete=False)


def test_a_last_line_that_lacks_only_its_newline_is_an_event(tmp_path: Path) -> None:
    """A full disk took all of the last line but its end; the next proxy left the event out."""
    path = tmp_path / "p1.jsonl"
    path.write_bytes(line(1) + line(2) + line(3)[:-1])
    file = SpoolFile.found(path)
    assert (file.last, numbers(file)) == (3, [1, 2, 3])
    file.close(delete=False)


def test_the_last_number_of_a_long_file_is_found_behind_rubbish(tmp_path: Path) -> None:
    path = tmp_path / "p1.jsonl"
    path.write_bytes(b"".join(line(no) for no in range(1, 2000)) + b"x" * (2 * spoolfile.READ_BYTES))
    file = SpoolFile.found(path)
    assert (file.last, numbers(file)) == (1999, list(range(1, 2000)))
    file.close(delete=False)


def test_committed_bytes_go_back_to_the_disk_while_events_keep_coming(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spoolfile, "TRIM_BYTES", 64 * 1024)
    monkeypatch.setattr(spoolfile, "MAX_LINE", 8 * 1024)
    file = SpoolFile(tmp_path / "p1.jsonl")
    largest = 0
    for no in range(1, 5001):
        assert file.append(no, line(no), in_memory=True)
        file.trim(no - 50)
        largest = max(largest, file.path.stat().st_size)
    file.close(delete=False)
    assert largest < 2 * 64 * 1024
    left = SpoolFile.found(file.path)
    assert set(range(4951, 5001)) <= set(numbers(left))
    left.close(delete=False)
    assert [path.name for path in tmp_path.iterdir()] == ["p1.jsonl"]


def test_the_reading_cursor_survives_trimming(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spoolfile, "TRIM_BYTES", 16 * 1024)
    monkeypatch.setattr(spoolfile, "MAX_LINE", 1024)
    file = SpoolFile(tmp_path / "p1.jsonl")
    for no in range(1, 201):
        file.append(no, line(no), in_memory=True)
    for no in range(201, 211):
        file.append(no, line(no), in_memory=False)
    file.trim(190)
    assert file.path.stat().st_size < 16 * 1024
    assert numbers(file) == list(range(201, 211))
    file.close(delete=True)
    assert not file.path.exists()


def test_a_full_disk_keeps_the_order_and_takes_everything_once_it_has_room(tmp_path: Path) -> None:
    file = SpoolFile(tmp_path / "p1.jsonl")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, hard))  # the third line is cut in its middle
    try:
        taken = [file.append(no, line(no), in_memory=True) for no in range(1, 6)]
        file.retry(mark=0)
        assert (taken, file.full) == ([True, True, False, False, False], True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not file.append(6, line(6), in_memory=True)  # behind those that wait
    file.retry(mark=3)
    assert not file.full
    assert file.append(7, line(7), in_memory=True)
    file.close(delete=False)
    left = SpoolFile.found(file.path)
    assert numbers(left) == [1, 2, 4, 5, 6, 7]  # 3 was committed meanwhile
    left.close(delete=False)


def numbers_on_disk(path: Path) -> list[int]:
    return [msgspec.json.decode(line, type=UsageEvent).event_no for line in path.read_bytes().splitlines()]


# --- the log -----------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage_spool, "TICK_S", 0.05)
    monkeypatch.setattr(usage_spool, "GATHER_S", 0.002)
    monkeypatch.setattr(usage_spool, "LAST_TRY_S", 0.05)


class Reader:
    """Takes batches like the daemon, and remembers; it acknowledges nothing by itself."""

    def __init__(self) -> None:
        self.batches: list[UsageBatch] = []
        self.told: list[ToldRange] = []

    def take(self, batch: UsageBatch) -> None:
        self.batches.append(batch)
        self.told += [one for item in batch.items for one in read_lines(batch.epoch, *item)]

    def has(self, epoch: str, *numbers: int) -> bool:
        """Whether exactly these numbers of an epoch were told (again and again does not matter)."""
        return {one.first for one in self.told if one.epoch == epoch and one.event} == set(numbers)

    @property
    def lost(self) -> list[tuple[int, int]]:
        return [(one.first, one.last) for one in self.told if one.event is None]


@pytest.fixture
def reader() -> Reader:
    return Reader()


@contextlib.asynccontextmanager
async def opened(directory: Path, epoch: str, reader: Reader | None, **options: Any) -> AsyncIterator[UsageSpool]:
    """`reader`: None where the daemon is not connected."""
    log = UsageSpool(directory, epoch, **options)
    spawn(log.run(), name="usage")
    if reader is not None:
        log.attach(reader.take)
    try:
        yield log
    finally:
        await log.close()


async def test_an_event_is_on_disk_when_record_returns_and_sent_soon_after(tmp_path: Path, reader: Reader) -> None:
    async with opened(tmp_path / "spool", "p1", reader) as log:
        log.record(event(7))
        (spooled,) = (tmp_path / "spool" / "p1.jsonl").read_bytes().splitlines()
        expected = event(7, epoch="p1", event_no=1)
        assert msgspec.json.decode(spooled, type=UsageEvent) == expected
        await until(lambda: reader.has("p1", 1))
        assert reader.told[0].event == expected
        assert log.spooled() == {"p1": 1}
        assert {path.stat().st_mode & 0o777 for path in (tmp_path / "spool").iterdir()} == {0o600}


async def test_events_of_one_turn_are_on_disk_together_before_any_last_byte_goes(
    tmp_path: Path, reader: Reader
) -> None:
    async with opened(tmp_path, "p1", reader) as log:
        path = tmp_path / "p1.jsonl"
        seen: list[list[int]] = []
        for seq in (1, 2, 3):
            log.record(event(seq), lambda: seen.append(numbers_on_disk(path)))
        assert (seen, path.exists()) == ([], False)
        await asyncio.sleep(0)
        assert seen == [[1, 2, 3]] * 3
        await until(lambda: reader.has("p1", 1, 2, 3))


async def test_who_does_not_wait_for_the_turns_end_takes_those_before_it_along(tmp_path: Path) -> None:
    async with opened(tmp_path, "p1", None) as log:
        gone: list[int] = []
        log.record(event(1), lambda: gone.append(1))
        log.record(event(2))
        assert (numbers_on_disk(tmp_path / "p1.jsonl"), gone) == ([1, 2], [])
        await asyncio.sleep(0)
        assert gone == [1]


async def test_a_last_byte_that_cannot_go_holds_up_no_other(tmp_path: Path) -> None:
    async with opened(tmp_path, "p1", None) as log:
        raised: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: raised.append(context["exception"]))
        gone: list[int] = []

        def fails() -> None:
            raise ZeroDivisionError

        log.record(event(1), fails)
        log.record(event(2), lambda: gone.append(2))
        await until(lambda: gone == [2])
        assert [type(error) for error in raised] == [ZeroDivisionError]


async def test_close_lets_the_last_bytes_go(tmp_path: Path) -> None:
    async with opened(tmp_path, "p1", None) as log:
        gone: list[list[int]] = []
        log.record(event(1), lambda: gone.append(numbers_on_disk(tmp_path / "p1.jsonl")))
    assert gone == [[1]]


async def test_more_events_in_one_turn_than_a_block_holds_share_several(tmp_path: Path, reader: Reader) -> None:
    async with opened(tmp_path, "p1", reader) as log:
        count = 2 * usage_spool.BLOCK_EVENTS + 5
        gone: list[int] = []
        for seq in range(1, count + 1):
            log.record(event(seq), lambda seq=seq: gone.append(seq))  # type: ignore[misc]
        await until(lambda: reader.has("p1", *range(1, count + 1)))
        assert gone == list(range(1, count + 1))
        assert [item.events for batch in reader.batches for item in batch.items] == [100, 100, 5]


async def test_a_disk_that_takes_a_part_of_a_turn_loses_and_doubles_nothing(
    tmp_path: Path, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage_spool, "HELD_S", 0.1)
    async with opened(tmp_path, "p1", reader) as log:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))  # in the middle of the third line
        try:
            gone: list[int] = []
            for seq in range(1, 6):
                log.record(event(seq), lambda seq=seq: gone.append(seq))  # type: ignore[misc]
            await asyncio.sleep(0)
            assert (gone, "cannot be written" in log.degraded) == ([], True)
            await until(lambda: gone == [1, 2, 3, 4, 5])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        await until(lambda: reader.has("p1", 1, 2, 3, 4, 5))
        await until(lambda: not log.degraded)
        assert log.lost == 0
    left = SpoolFile.found(tmp_path / "p1.jsonl")
    assert (left.last, set(numbers(left))) == (5, {1, 2, 3, 4, 5})
    left.close(delete=False)


async def test_on_a_full_disk_the_last_byte_goes_once_the_daemon_has_committed(
    tmp_path: Path, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage_spool, "HELD_S", 1000.0)
    async with opened(tmp_path, "p1", reader) as log:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
        try:
            gone: list[int] = []
            for seq in (1, 2):
                log.record(event(seq), lambda seq=seq: gone.append(seq))  # type: ignore[misc]
                await until(lambda seq=seq: reader.told and reader.told[-1].first == seq)  # type: ignore[misc]
            assert gone == []
            log.marks({"p1": 1})
            assert gone == [1]
            log.marks({"p1": 2})
            assert gone == [1, 2]
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def test_all_committed_leaves_nothing_behind(tmp_path: Path, reader: Reader) -> None:
    async with opened(tmp_path, "p1", reader) as log:
        log.record(event(1))
        log.marks({"p1": 1})
        assert log.waiting == 0
    assert os.listdir(tmp_path) == ["lock"]


async def test_a_proxy_that_leaves_waits_for_the_daemons_last_mark(
    tmp_path: Path, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage_spool, "LAST_TRY_S", 1000.0)
    log = UsageSpool(tmp_path, "p1")
    spawn(log.run(), name="usage")
    log.attach(reader.take)
    log.record(event(1))
    closing = spawn(log.close(), name="close")
    await until(lambda: reader.has("p1", 1))
    assert not closing.done()
    log.marks({"p1": 1})
    await closing
    assert os.listdir(tmp_path) == ["lock"]


async def test_a_proxy_that_leaves_without_a_daemon_waits_for_nothing(
    tmp_path: Path, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage_spool, "LAST_TRY_S", 1000.0)
    log = UsageSpool(tmp_path, "p1")
    log.attach(reader.take)
    log.record(event(1))
    closing = spawn(log.close(), name="close")
    await until(lambda: reader.batches)
    log.detach()
    await closing
    assert numbers_on_disk(tmp_path / "p1.jsonl") == [1]


async def test_while_the_daemon_is_away_events_wait_and_lose_nothing(tmp_path: Path, reader: Reader) -> None:
    async with opened(tmp_path, "p1", None) as log:
        for seq in range(1, 4):
            log.record(event(seq))
        await asyncio.sleep(0.05)
        assert (log.waiting, log.spooled()) == (3, {"p1": 3})
        log.attach(reader.take)
        await until(lambda: reader.has("p1", 1, 2, 3))


async def test_after_a_lost_link_what_is_not_committed_is_sent_again(tmp_path: Path, reader: Reader) -> None:
    async with opened(tmp_path, "p1", reader) as log:
        for seq in range(1, 5):
            log.record(event(seq))
        await until(lambda: reader.has("p1", 1, 2, 3, 4))
        log.marks({"p1": 2})
        log.detach()
        again = Reader()
        log.attach(again.take)
        await until(lambda: again.has("p1", 3, 4))
        assert [batch.committed_to for batch in again.batches] == [2]


async def test_what_is_in_flight_is_not_sent_twice_and_has_a_bound(
    tmp_path: Path, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A daemon that commits nothing would else be given everything again and again, or more than it can hold."""
    monkeypatch.setattr(usage_spool, "IN_FLIGHT", 20)
    monkeypatch.setattr(usage_spool, "BATCH", 7)
    async with opened(tmp_path, "p1", reader) as log:
        for seq in range(1, 51):
            log.record(event(seq))
        await until(lambda: len(reader.told) >= 20)
        await asyncio.sleep(0.1)
        assert [one.first for one in reader.told] == list(range(1, 22))  # the third batch passes the bound by one
        for mark in (7, 14, 21, 28, 35, 42, 49, 50):
            log.marks({"p1": mark})
            await until(lambda mark=mark: len(reader.told) == min(50, mark + 21))  # type: ignore[misc]
        assert [one.first for one in reader.told] == list(range(1, 51))


async def test_more_than_memory_holds_is_read_back_from_the_spool(tmp_path: Path, reader: Reader) -> None:
    async with opened(tmp_path, "p1", reader, bound=10) as log:
        for seq in range(1, 101):
            log.record(event(seq))
        assert "10 waiting" in repr(log)

        def told_in_turn() -> bool:
            log.marks({"p1": max((one.last for one in reader.told), default=0)})
            return log.waiting == 0

        await until(told_in_turn)
        assert [one.first for one in reader.told] == list(range(1, 101))
        log.record(event(101))
        await until(lambda: reader.has("p1", *range(1, 102)))
        assert log.lost == 0


async def test_a_disk_that_is_full_from_the_start_degrades_and_loses_nothing_while_memory_has_room(
    tmp_path: Path, reader: Reader
) -> None:
    async with opened(tmp_path, "p1", reader, bound=10) as log:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
        try:
            for seq in range(1, 4):
                log.record(event(seq))
            assert "cannot be written" in log.degraded
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        await until(lambda: reader.has("p1", 1, 2, 3))
        await until(lambda: not log.degraded)
        assert log.lost == 0
        assert len((tmp_path / "p1.jsonl").read_bytes().splitlines()) == 3


async def test_what_neither_disk_nor_memory_takes_is_counted_and_told_as_a_range(
    tmp_path: Path, reader: Reader
) -> None:
    async with opened(tmp_path, "p1", reader, bound=3) as log:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
        try:
            for seq in range(1, 9):
                log.record(event(seq))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert (log.lost, list(log.lost_ranges)) == (5, [(4, 8)])
        await until(lambda: reader.has("p1", 1, 2, 3))
        log.marks({"p1": 3})
        await until(lambda: not log.degraded)
        log.record(event(9))
        await until(lambda: reader.has("p1", 1, 2, 3, 9))
        assert (4, 8) in reader.lost


async def test_an_event_that_cannot_be_written_as_json_is_lost_alone(tmp_path: Path, reader: Reader) -> None:
    async with opened(tmp_path, "p1", reader) as log:
        log.record(event(1))
        log.record(event(2, model="\ud800"))
        log.record(event(3, model="m" * 1_000_000))
        await until(lambda: reader.has("p1", 1, 3))
        assert reader.lost == [(2, 2)]
        assert [one.event.model for one in reader.told if one.event] == ["small", "m" * usage_spool.MAX_TEXT]
        assert log.lost == 1


async def test_the_spool_of_a_killed_proxy_is_replayed_from_the_daemons_mark_on(tmp_path: Path, reader: Reader) -> None:
    lines = [msgspec.json.encode(event(no, id=f"dead-{no}", epoch="dead", event_no=no)) + b"\n" for no in (1, 2, 3, 5)]
    (tmp_path / "dead.jsonl").write_bytes(b"".join(lines) + lines[0][:40])
    (tmp_path / "empty.jsonl").write_bytes(b"")
    async with opened(tmp_path, "p1", None) as log:
        assert log.spooled() == {"dead": 5, "p1": 0}
        log.marks({"dead": 1})
        log.attach(reader.take)
        await until(lambda: reader.has("dead", 2, 3, 5))
        assert reader.lost == [(4, 4)]
        log.marks({"dead": 5})
        assert log.spooled() == {"p1": 0}
    assert os.listdir(tmp_path) == ["lock"]


async def test_a_spool_the_daemon_has_whole_is_deleted_without_replay(tmp_path: Path, reader: Reader) -> None:
    (tmp_path / "dead.jsonl").write_bytes(line(1) + line(2))
    async with opened(tmp_path, "p1", None) as log:
        log.marks({"dead": 2})
        assert not (tmp_path / "dead.jsonl").exists()
        log.attach(reader.take)
        log.record(event(1))
        await until(lambda: reader.has("p1", 1))
        assert reader.has("dead")


async def test_a_second_proxy_on_the_same_spool_is_told_who_has_it(tmp_path: Path) -> None:
    async with opened(tmp_path, "p1", None):
        with pytest.raises(WrongState, match=f"in use by process {os.getpid()}"):
            UsageSpool(tmp_path, "p2")
    async with opened(tmp_path, "p2", None):
        pass


async def test_a_missing_state_directory_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        UsageSpool(tmp_path / "no" / "spool", "p1")


WRITER = """
import asyncio, os, sys, msgspec
from pathlib import Path
from hive.domain import UsageEvent
from hive.metering.usage_spool import UsageSpool

async def main(directory, epoch, event):
    log = UsageSpool(Path(directory), epoch)
    event = msgspec.json.decode(event, type=UsageEvent)
    while True:
        for _ in range(20):
            log.record(event)
            os.write(1, b".")
        await asyncio.sleep(0)

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.parametrize("acknowledged", [1, 37, 400])
async def test_kill_9_loses_no_event_whose_record_returned(tmp_path: Path, reader: Reader, acknowledged: int) -> None:
    """The writer is a process of its own that says `.` after each event, and is killed at some moment."""
    arguments = [str(tmp_path), "dead", msgspec.json.encode(EVENT).decode()]
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", WRITER, *arguments, stdout=subprocess.PIPE)
    assert process.stdout is not None
    said = len(await process.stdout.readexactly(acknowledged))
    process.kill()
    said += len(await process.stdout.read())
    await process.wait()
    async with opened(tmp_path, "p1", reader) as log:
        last = log.spooled()["dead"]
        assert last in (said, said + 1)  # killed between the write and the word
        await until(lambda: reader.has("dead", *range(1, last + 1)))


ANSWERER = """
import asyncio, os, sys, msgspec
from pathlib import Path
from hive.domain import UsageEvent
from hive.link.client import LinkClient
from hive.metering.usage_spool import UsageSpool
from hive.tasks import spawn

async def main(directory, epoch, event, socket):
    log = UsageSpool(Path(directory), epoch)
    spawn(log.run(), name="usage")
    LinkClient(
        Path(socket),
        name="daemon",
        on_link=lambda link: log.attach(link.tell),
        on_message=lambda link, message, reply: log.marks(message.marks),
    )
    event = msgspec.json.decode(event, type=UsageEvent)
    while True:
        for _ in range(20):
            log.record(event, lambda: os.write(1, b"."))
        await asyncio.sleep(0.001)

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "hive-test", str(path)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"a small file system cannot be mounted: {mounted.stderr.strip()}")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


def fill(path: Path) -> None:
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass


@pytest.mark.root
@pytest.mark.parametrize("answers", [1, 100, 201, 350, 900])
async def test_kill_9_on_a_full_disk_loses_no_event_of_an_answer_that_ended(
    tmp_path: Path, disk: Path, reader: Reader, answers: int
) -> None:
    """A full disk took half of a line, the answer ended, and the proxy was killed before anything else had it: of
    5,021 whole answers one had no row.

    The program says `.` with each last byte; the disk has room for some 200 lines, and the daemon another disk.
    """

    def committed(link: Link, message: LinkMessage, _: LinkReply | None) -> None:
        assert isinstance(message, UsageBatch)
        reader.take(message)
        link.tell(Marks(marks={"dead": message.items[-1].last}))

    daemon = LinkServer(
        tmp_path / "link",
        name="proxy",
        uids=frozenset(),
        on_link=lambda link: link.tell(Marks(marks={})),
        on_message=committed,
        on_lost=lambda _: None,
    )
    arguments = [str(disk / "spool"), "dead", msgspec.json.encode(EVENT).decode(), str(tmp_path / "link")]
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", ANSWERER, *arguments, stdout=subprocess.PIPE)
    assert process.stdout is not None
    said = len(await process.stdout.readexactly(answers))
    process.kill()
    said += len(await process.stdout.read())
    await process.wait()
    daemon.close()
    assert answers < 300 or not (disk / "spool" / "dead.jsonl").read_bytes().endswith(b"\n")
    async with opened(disk / "spool", "p1", reader) as log:
        log.marks({})
        everything = set(range(1, said + 1))
        await until(lambda: {one.first for one in reader.told if one.epoch == "dead" and one.event} >= everything)


@pytest.mark.root
def test_a_disk_that_others_fill_takes_what_the_spool_has_reserved(disk: Path) -> None:
    """The database is on the same disk. Where that was full, neither took an event, and kill -9 lost it."""
    subprocess.run(["mount", "-o", "remount,size=1m", str(disk)], check=True)
    file = SpoolFile(disk / "p1.jsonl")
    assert file.append(1, line(1), in_memory=True)
    length = file.path.stat().st_size
    fill(disk / "filler")
    assert all(file.append(no, line(no), in_memory=True) for no in range(2, 500))
    assert length == len(line(1))
    file.close(delete=False)
    assert numbers(SpoolFile.found(file.path)) == list(range(1, 500))


@pytest.mark.root
def test_what_is_reserved_is_given_back_with_what_is_committed(disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,size=4m", str(disk)], check=True)
    file = SpoolFile(disk / "p1.jsonl")
    for no in range(1, 3_000):
        assert file.append(no, line(no), in_memory=False)
    file.trim(2_999)
    assert file.path.stat().st_size == 0
    assert 0 < file.path.stat().st_blocks * 512 <= 2 * spoolfile.RESERVED_BYTES
    fill(disk / "filler")
    assert file.append(3_000, line(3_000), in_memory=False)
    file.close(delete=False)


@pytest.mark.root
async def test_where_neither_disk_nor_daemon_takes_it_the_answer_ends_all_the_same(
    disk: Path, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then a second later; the event is kept in memory, and written once there is room."""
    monkeypatch.setattr(usage_spool, "HELD_S", 0.2)
    async with opened(disk / "spool", "p1", None) as log:
        fill(disk / "filler")
        gone: list[int] = []
        log.record(event(1), lambda: gone.append(1))
        await asyncio.sleep(0)
        assert (gone, bool(log.degraded)) == ([], True)
        await until(lambda: gone == [1])
        log.record(event(2), lambda: gone.append(2))
        (disk / "filler").unlink()
        await until(lambda: gone == [1, 2])
        assert numbers_on_disk(disk / "spool" / "p1.jsonl") == [1, 2]
        log.attach(reader.take)
        await until(lambda: reader.has("p1", 1, 2))


@pytest.mark.root
async def test_a_proxy_that_leaves_writes_what_a_full_disk_did_not_take(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a daemon it left events behind in memory, though there was room again."""
    monkeypatch.setattr(usage_spool, "GATHER_S", 1000.0)
    gone: list[int] = []
    async with opened(disk / "spool", "p1", None) as log:
        fill(disk / "filler")
        log.record(event(1), lambda: gone.append(1))
        await asyncio.sleep(0)
        (disk / "filler").unlink()
    assert gone == [1]
    assert numbers_on_disk(disk / "spool" / "p1.jsonl") == [1]


async def test_what_is_no_spool_is_put_aside_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A spool of random bytes vanished without a word, and a directory of such a name kept the proxy from starting."""
    (tmp_path / "noise.jsonl").write_bytes(b"\x00\xffnoise\n" * 50)
    (tmp_path / "folder.jsonl").mkdir()
    async with opened(tmp_path, "p1", None) as log:
        assert log.spooled() == {"p1": 0}
    assert (tmp_path / "noise.damaged").stat().st_size == 400
    assert "spool_damaged" in caplog.text
