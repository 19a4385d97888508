"""One client connection over a real socket: its clocks, its turn, its unfinished heads, its end."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hive.wire.budget import HALF_OPEN_PER_OWNER, HALF_OPEN_UNKNOWN, MIN_RATE, RATE_FROM_S, HalfOpen, body_deadline
from hive.wire.deadlines import NEVER, Deadlines
from tests.proxy.harness import CHAT, JSON_ANSWER, MODEL_TOKEN, Client, answer, get, post, proxied
from tests.waiting import until

HALF = b"POST /v1/chat/completions HTTP/1.1\r\nhost: h\r\n"


async def test_a_head_has_one_deadline_that_no_byte_moves(tmp_path: Path) -> None:
    async with proxied(tmp_path, head_s=0.5) as (proxy, _):
        client = await Client.unix(proxy.socket_path)

        async def dribble() -> None:
            for byte in HALF * 100:
                client.writer.write(bytes([byte]))
                await asyncio.sleep(0.02)

        dribbling = asyncio.ensure_future(dribble())
        status, fields, body = await client.answer()
        dribbling.cancel()
        assert (status, fields[b"connection"]) == (408, b"close")
        assert b"head" in body
        await until(lambda: repr(proxy.half_open) == "<HalfOpen 0 heads of 0 owners>")


async def test_a_body_slower_than_the_least_rate_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hive.wire.budget.RATE_FROM_S", 0.3)
    async with proxied(tmp_path) as (proxy, backend):
        client = await Client.unix(proxy.socket_path)
        client.writer.write(HALF + b"content-length: 1000\r\n\r\n")

        async def dribble() -> None:
            while True:
                client.writer.write(b"x")
                await asyncio.sleep(0.02)

        dribbling = asyncio.ensure_future(dribble())
        status, fields, body = await client.answer()
        dribbling.cancel()
        assert (status, fields[b"connection"]) == (408, b"close")
        assert b"body" in body
        assert backend.requests == []


async def test_a_body_that_earned_patience_by_its_length_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 1 KiB/s a body of 16 MiB had more than four hours, and held its room all the while."""
    monkeypatch.setattr("hive.wire.budget.RATE_FROM_S", 0.3)
    async with proxied(tmp_path) as (proxy, _):
        client = await Client.unix(proxy.socket_path)
        client.writer.write(HALF + b"content-length: %d\r\n\r\n" % (16 << 20))

        async def dribble() -> None:
            while True:
                client.writer.write(b"x" * 100)
                await asyncio.sleep(0.02)

        dribbling = asyncio.ensure_future(dribble())
        status, _, _ = await client.answer()
        dribbling.cancel()
        assert status == 408


async def test_no_clock_of_an_upload_runs_while_the_gate_is_shut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hive.wire.budget.RATE_FROM_S", 0.4)
    async with proxied(tmp_path, head_s=0.3, body_idle_s=0.4, gate_wait_s=10) as (proxy, _):
        assert proxy.alice.gate.close(2, 0.0) is None
        proxy.alice.gate.asleep(2)
        client = await Client.unix(proxy.socket_path)
        client.writer.write(HALF + b"content-length: %d\r\n\r\n%b" % (len(CHAT), CHAT[:10]))
        await asyncio.sleep(1.5)
        proxy.alice.gate.open(2)
        await asyncio.sleep(0.1)
        assert (await client.ask(CHAT[10:]))[0] == 200


@given(begun=st.floats(0, 1e6), after=st.floats(0, 1e4), received=st.integers(0, 1 << 24), idle=st.floats(0.1, 1000))
def test_a_body_is_given_up_exactly_when_idle_or_too_slow(
    begun: float, after: float, received: int, idle: float
) -> None:
    deadline = body_deadline(begun + after, begun, received, idle)
    assert deadline <= begun + after + idle
    lasted = deadline - begun
    assert deadline == begun + after + idle or lasted == pytest.approx(max(RATE_FROM_S, received / MIN_RATE))


async def test_unfinished_heads_are_capped_by_agent_and_of_strangers_the_oldest_gives_way(tmp_path: Path) -> None:
    """64 strangers with half a head each made Hive refuse every other head that came in two pieces."""
    async with proxied(tmp_path) as (proxy, _):
        own = [await Client.unix(proxy.socket_path) for _ in range(HALF_OPEN_PER_OWNER)]
        unknown = [await Client.tcp(proxy.port) for _ in range(HALF_OPEN_UNKNOWN)]
        for client in [*own, *unknown]:
            client.writer.write(HALF)
        full = HALF_OPEN_PER_OWNER + HALF_OPEN_UNKNOWN
        await until(lambda: repr(proxy.half_open) == f"<HalfOpen {full} heads of 2 owners>")
        surplus = await Client.unix(proxy.socket_path)
        status, fields, _ = await surplus.ask(HALF)
        assert (status, fields[b"connection"]) == (503, b"close")
        late = await Client.tcp(proxy.port)
        late.writer.write(HALF + b"authorization: Bearer %b\r\n" % MODEL_TOKEN)
        status, fields, _ = await unknown[0].answer()
        assert (status, fields[b"connection"]) == (503, b"close")
        assert await unknown[0].at_end()
        assert repr(proxy.half_open) == f"<HalfOpen {full} heads of 2 owners>"
        assert (await late.ask(b"content-length: %d\r\n\r\n%b" % (len(CHAT), CHAT)))[0] == 200
        whole = await Client.unix(proxy.socket_path)
        assert (await whole.ask(post(b"/v1/chat/completions", CHAT)))[0] == 200, "whole heads are not counted"
        own[0].writer.write(b"content-length: %d\r\n\r\n%b" % (len(CHAT), CHAT))
        assert (await own[0].answer())[0] == 200
        unknown[1].close()
        await until(lambda: repr(proxy.half_open) == f"<HalfOpen {full - 3} heads of 2 owners>")


@given(st.lists(st.sampled_from([None, "a", "b"]), max_size=40))
def test_half_open_counts_what_it_gave_out(owners: list[str | None]) -> None:
    heads = HalfOpen(per_owner=2, unknown=3)
    ended: list[int] = []
    taken = [who for who, owner in enumerate(owners) if heads.take(who, owner, lambda who=who: ended.append(who))]  # type: ignore[misc]
    for owner in ("a", "b"):
        assert [owners[who] for who in taken].count(owner) == min(2, owners.count(owner))
    unknown = [who for who, owner in enumerate(owners) if owner is None]
    assert [who for who in taken if owners[who] is None] == unknown, "of strangers each newest one is let in"
    assert ended == unknown[:-3], "and the oldest goes"
    assert heads.held == len(taken) - len(ended)
    for who in taken:
        heads.give(who, owners[who])
    assert repr(heads) == "<HalfOpen 0 heads of 0 owners>"


async def test_pipelined_requests_are_answered_in_order_however_they_are_split(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, backend):
        chunked = HALF + b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(CHAT), CHAT)
        stream = post(b"/v1/chat/completions", CHAT) + get(b"/nowhere") + chunked + get(b"/v1/models")
        for size in (1 << 16, 100, 7):
            client = await Client.unix(proxy.socket_path)
            for at in range(0, len(stream), size):
                client.writer.write(stream[at : at + size])
                await asyncio.sleep(0)
            assert [(await client.answer())[0] for _ in range(4)] == [200, 403, 200, 200]
        assert len(backend.requests) == 6
        assert {body for _, body in backend.requests} == {CHAT[:-1] + b',"max_tokens":4096}'}


async def test_a_malformed_request_behind_a_good_one_is_refused_in_its_turn(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, backend):
        client = await Client.unix(proxy.socket_path)
        client.writer.write(post(b"/v1/chat/completions", CHAT) + b"{}GET / HTTP/1.1\r\nhost: h\r\n\r\n")
        assert (await client.answer())[0] == 200
        status, fields, _ = await client.answer()
        assert (status, fields[b"connection"]) == (400, b"close")
        assert await client.at_end()
        assert len(backend.requests) == 1


async def test_more_than_64_kib_ahead_of_ones_turn_ends_the_connection(tmp_path: Path) -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with proxied(tmp_path) as (proxy, backend):
        backend.script = silent
        client = await Client.unix(proxy.socket_path)
        client.writer.write(post(b"/v1/chat/completions", CHAT))
        await until(lambda: backend.connections == 1)
        client.writer.write(get(b"/v1/models") * 2000)
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await client.answer()
        await until(lambda: backend.closed == 1)


async def test_one_empty_line_between_requests_is_passed_over_and_wakes_nobody(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, _):
        client = await Client.unix(proxy.socket_path)
        assert (await client.ask(post(b"/v1/chat/completions", CHAT) + b"\r\n"))[0] == 200
        (connection,) = proxy.connections
        await until(lambda: connection.exchange is None)
        assert connection.why_busy(0.0) in (None, "the answer has not been read")
        assert (await client.ask(get(b"/v1/models")))[0] == 200
        client.writer.write(b"\r")
        await asyncio.sleep(0.01)
        assert (await client.ask(b"\n" + get(b"/v1/models")))[0] == 200
        assert (await client.ask(b"\r\n\r\n" + get(b"/v1/models")))[0] == 400
        assert await client.at_end()


async def test_continue_is_said_after_the_checks_and_only_then(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, backend):
        expects = b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n" % len(CHAT)
        client = await Client.tcp(proxy.port)
        client.writer.write(HALF + b"authorization: Bearer %b\r\n" % MODEL_TOKEN + expects)
        assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        assert (await client.ask(CHAT))[0] == 200
        for refused, status in (
            (HALF + b"authorization: Bearer wrong\r\n" + expects, 401),
            (HALF.replace(b"v1/chat", b"v1/cat") + b"authorization: Bearer %b\r\n" % MODEL_TOKEN + expects, 403),
            (HALF + b"expect: 100-continue\r\ncontent-length: 99999999999\r\n\r\n", 413),
            (HALF + b"expect: 200-ok\r\ncontent-length: 2\r\n\r\n", 417),
        ):
            client = await Client.tcp(proxy.port)
            answered, fields, _ = await client.ask(refused)
            assert (answered, fields[b"connection"]) == (status, b"close")
        assert len(backend.requests) == 1


async def test_an_upload_refused_midway_is_answered_and_not_reset(tmp_path: Path) -> None:
    """Closing with unread bytes in the socket would reset the connection and lose the answer."""
    async with proxied(tmp_path, body_max_bytes=100_000) as (proxy, _):
        client = await Client.tcp(proxy.port)
        chunk = b"8000\r\n%b\r\n" % (b"x" * 0x8000)
        head = HALF + b"authorization: Bearer %b\r\ntransfer-encoding: chunked\r\n\r\n" % MODEL_TOKEN
        client.writer.write(head + chunk * 40)
        status, fields, _ = await client.answer()
        assert (status, fields[b"connection"]) == (413, b"close")
        assert await client.at_end()


async def test_a_client_that_reads_nothing_cannot_pile_up_answers_by_asking_ahead(tmp_path: Path) -> None:
    """`pause_writing` is told once: an exchange that begins on a full transport heard nothing of it."""
    async with proxied(tmp_path) as (proxy, backend):
        backend.reply = answer(JSON_ANSWER.replace(b'"hi"', b'"%b"' % (b"x" * 900_000)))
        client = await Client.unix(proxy.socket_path)
        client.transport.pause_reading()
        for _ in range(20):
            client.writer.write(post(b"/v1/chat/completions", CHAT))
        await until(lambda: len(backend.requests) >= 1)
        await asyncio.sleep(0.3)
        assert len(backend.requests) <= 3, "those behind the unread answer wait"
        client.transport.resume_reading()
        for _ in range(20):
            assert (await client.answer())[0] == 200
        assert len(backend.requests) == 20


async def test_an_empty_line_before_a_large_request_costs_nothing(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, _):
        client = await Client.unix(proxy.socket_path)
        large = CHAT.replace(b"hello", b"x" * 190_000)
        client.writer.write(b"\r\n")
        await asyncio.sleep(0.05)
        assert (await client.ask(post(b"/v1/chat/completions", large)))[0] == 200


async def test_a_deadline_that_another_one_moved_in_the_same_tick_is_not_due() -> None:
    """A refused request gave its place to one with a deadline in the same tick that had just been moved."""
    deadlines = Deadlines()
    told: list[str] = []

    class Member:
        def __init__(self, name: str) -> None:
            self.name = name
            self.deadline = 0.0

        def on_deadline(self, now: float) -> None:
            told.append(self.name)
            for member in members:
                member.deadline = NEVER

    members = [Member("one"), Member("another")]
    for member in members:
        deadlines.add(member)
    await until(lambda: bool(told))
    await asyncio.sleep(0.3)
    deadlines.close()
    assert len(told) == 1
