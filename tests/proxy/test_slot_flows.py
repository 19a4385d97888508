"""Facts of the requests at the slots that the proxy tells the daemon: over real sockets, after `test_slots.py`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from hive.domain import Band
from hive.link.pool import SlotBusy, SlotFlow, SlotIs
from hive.proxy import slot_flows
from tests.proxy.harness import STREAM, Backend, chunked, read_request
from tests.proxy.test_slots import FIRST, LAST, Pool, ask, content, hold, pooled
from tests.waiting import until


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_flows, "EACH_S", 0.05)


def last(pool: Pool, slot: str = "a-1") -> SlotFlow | None:
    return pool.flows[-1].slots.get(slot) if pool.flows else None


def sees(pool: Pool, test: Any) -> Any:
    """A condition: the last message on the slot of the model a passes the test."""

    def is_so() -> bool:
        flow = last(pool)
        return flow is not None and bool(test(flow))

    return is_so


async def test_the_first_request_of_an_idle_slot_is_told_and_its_end_too(tmp_path: Path) -> None:
    async with pooled(tmp_path, "a", "b") as pool:
        pool.tell(pool.row("a"), pool.row("b"))
        await until(lambda: [list(told.slots) for told in pool.flows] == [["a-1", "b-1"]])  # they have opened
        release = hold(pool.servers["a"])
        client = await pool.client()
        client.writer.write(ask("a", body=STREAM))
        await until(sees(pool, lambda flow: flow.begun))
        first = pool.flows[-1].slots["a-1"]
        assert (first.in_flight, first.agents, first.begun, first.band) == (1, [pool.proxy.row.id], 1, Band.NORMAL)
        assert first.oldest_s is not None
        assert 0 <= first.oldest_s < 5
        await until(sees(pool, lambda flow: flow.in_flight == 1 and not flow.begun))
        release.set()
        assert (await client.answer())[0] == 200
        await until(sees(pool, lambda flow: not flow.in_flight))
        assert last(pool) == SlotFlow(in_flight=0)
        count = len(pool.flows)
        await asyncio.sleep(4 * slot_flows.EACH_S)
        assert len(pool.flows) == count  # nothing is told where nothing is
        assert await content(client, "b") == (200, "b")
        await until(lambda: [list(told.slots) for told in pool.flows[count:][:1]] == [["b-1"]])


async def test_a_request_that_ended_before_it_was_told_is_told_as_begun(tmp_path: Path) -> None:
    async with pooled(tmp_path, "a") as pool:
        pool.tell(pool.row("a"))
        client = await pool.client()
        for _ in range(3):
            assert await content(client, "a") == (200, "a")
        await until(lambda: sum(told.slots["a-1"].begun for told in pool.flows) == 3)
        await until(sees(pool, lambda flow: not flow.begun))


async def test_comments_are_no_data_and_no_movement(tmp_path: Path) -> None:
    """llama-server sends pings while a prompt is read, and while it hangs."""
    async with pooled(tmp_path, "a") as pool:
        pool.tell(pool.row("a"))
        server = Scripted(pool.servers["a"])
        client = await pool.client()
        client.writer.write(ask("a", body=STREAM))
        await until(sees(pool, lambda flow: flow.no_head_s is not None and flow.no_head_s >= 0.1))
        flow = last(pool)
        assert flow is not None
        assert flow.no_data_s is None
        assert flow.moved_s == flow.oldest_s == flow.no_head_s
        server.say(chunked(end=False))
        server.say(piece(b": ping\n\n"))
        await until(sees(pool, lambda flow: flow.no_head_s is None and flow.no_data_s >= 0.2))
        server.say(piece(b": ping\n\n"))
        await until(sees(pool, lambda flow: flow.no_data_s >= 0.4 and flow.moved_s >= 0.4))
        server.say(piece(FIRST))
        await until(sees(pool, lambda flow: flow.no_data_s < 0.2 and flow.moved_s < 0.2))
        server.say(piece(LAST) + b"0\r\n\r\n")
        assert (await client.answer())[0] == 200


async def test_an_answer_whose_client_does_not_read_is_no_stalled_one(tmp_path: Path) -> None:
    async with pooled(tmp_path, "a") as pool:
        pool.tell(pool.row("a"))
        server = Scripted(pool.servers["a"])
        client = await pool.client()
        client.transport.pause_reading()
        client.writer.write(ask("a", body=STREAM))
        await server.asked.wait()
        server.say(chunked(FIRST, end=False))
        for _ in range(60):
            server.say(piece(FIRST.replace(b'"a"', b'"%b"' % (b"a" * 100_000))))
        (exchange,) = pool.proxy.path.slots.pooled["a-1"].line.owners
        await until(lambda: exchange.is_blocked)  # type: ignore[attr-defined]
        count = len(pool.flows)
        await until(lambda: len(pool.flows) > count + 6)
        assert last(pool).no_data_s == last(pool).moved_s == 0.0  # type: ignore[union-attr]
        server.say(piece(LAST) + b"0\r\n\r\n")
        client.transport.resume_reading()
        assert (await client.answer())[0] == 200


async def test_a_daemon_that_is_back_is_told_of_what_is_in_flight(tmp_path: Path) -> None:
    async with pooled(tmp_path, "a") as pool:
        pool.tell(pool.row("a"))
        release = hold(pool.servers["a"])
        client = await pool.client()
        pool.is_daemon_there = False
        client.writer.write(ask("a", body=STREAM))
        await until(lambda: pool.proxy.path.slots.pooled["a-1"].line.running == 1)
        await asyncio.sleep(3 * slot_flows.EACH_S)
        pool.is_daemon_there = True
        pool.tell(pool.row("a"))
        await until(sees(pool, lambda flow: flow.in_flight == 1 and flow.begun == 1))
        release.set()
        assert (await client.answer())[0] == 200


async def test_a_slot_that_opened_is_told_also_if_those_who_waited_have_left(tmp_path: Path) -> None:
    """The daemon waits for the word on those who waited before it decides anew."""
    async with pooled(tmp_path, "a") as pool:
        pool.tell(pool.row("a", is_open=False))
        client = await pool.client()
        client.writer.write(ask("a"))
        await pool.waits("a")
        client.close()
        await pool.waits("a", 0)
        pool.orders.order(SlotIs(slot=pool.row("a", generation=2)), None)
        await until(lambda: last(pool) is not None)


async def test_a_slot_that_is_taken_out_is_told_as_idle(tmp_path: Path) -> None:
    async with pooled(tmp_path, "a") as pool:
        pool.tell(pool.row("a"))
        release = hold(pool.servers["a"])
        client = await pool.client()
        client.writer.write(ask("a", body=STREAM))
        await until(sees(pool, lambda flow: flow.in_flight == 1 and flow.no_head_s is None))
        pool.orders.order(SlotIs(slot=pool.row("a")), None)
        pool.proxy.path.forget_slot("a-1")
        await until(sees(pool, lambda flow: flow.in_flight == 0))
        release.set()
        assert (await client.answer())[0] == 200


def piece(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class Scripted:
    """A server that says what the test tells it to, to one request."""

    def __init__(self, server: Backend) -> None:
        self.asked = asyncio.Event()
        self._writer: asyncio.StreamWriter | None = None
        server.script = self._scene

    async def _scene(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        self._writer = writer
        self.asked.set()
        await reader.read()

    def say(self, data: bytes) -> None:
        assert self._writer is not None
        self._writer.write(data)


async def test_an_end_is_told_soon_where_somebody_waits_for_a_load(tmp_path: Path, monkeypatch: Any) -> None:
    """The daemon heard it with the next second, and a swap waited for that long."""
    monkeypatch.setattr(slot_flows, "EACH_S", 1000.0)
    async with pooled(tmp_path, "a", "b") as pool:
        pool.tell(pool.row("a"), pool.row("b", is_open=False))
        release = hold(pool.servers["a"])
        busy, waiting = await pool.client(), await pool.client()
        busy.writer.write(ask("a", body=STREAM))
        await until(sees(pool, lambda flow: flow.begun))
        waiting.writer.write(ask("b"))
        await pool.waits("b")
        await until(lambda: pool.told)
        assert (flow := last(pool)) is not None
        assert (flow.in_flight, flow.begun) == (1, 0)  # told with the demand
        release.set()
        assert (await busy.answer())[0] == 200
        await until(sees(pool, lambda flow: not flow.in_flight))


async def test_what_was_in_flight_is_told_anew_with_a_demand(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(slot_flows, "EACH_S", 1000.0)
    async with pooled(tmp_path, "a", "b") as pool:
        pool.tell(pool.row("a"), pool.row("b", is_open=False))
        release = hold(pool.servers["a"])
        client = await pool.client()
        client.writer.write(ask("a", body=STREAM))
        await until(sees(pool, lambda flow: flow.begun))
        release.set()
        assert (await client.answer())[0] == 200
        assert (flow := last(pool)) is not None
        assert flow.in_flight == 1
        client.writer.write(ask("b"))
        await until(lambda: pool.told)
        assert sees(pool, lambda flow: not flow.in_flight)()


async def test_one_that_was_too_busy_to_close_is_told_of_soon(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(slot_flows, "EACH_S", 1000.0)
    async with pooled(tmp_path, "a") as pool:
        pool.tell(pool.row("a"))
        hold(pool.servers["a"])
        client = await pool.client()
        client.writer.write(ask("a", body=STREAM))
        await until(sees(pool, lambda flow: flow.begun))
        count = len(pool.flows)
        (answer,) = pool.close("a")
        assert isinstance(answer, SlotBusy)
        await until(lambda: len(pool.flows) > count)
        assert (flow := last(pool)) is not None
        assert flow.in_flight == 1
