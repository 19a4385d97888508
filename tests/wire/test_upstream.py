"""Pooled connections: reused while fresh, never with bytes that no request asked for, and moving ports."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from hive.errors import BackendDown
from hive.wire.deadlines import Deadlines
from hive.wire.listeners import listen_tcp
from hive.wire.upstream import Pool, UpstreamConnection
from tests.listening import Talk, listening
from tests.wire.asker import Asker

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def pooled(serve: Talk, idle_s: float = 3.0) -> AsyncIterator[Pool]:
    deadlines = Deadlines()
    async with listening(serve) as address:
        pool = Pool(address, connect_s=1, idle_s=idle_s, deadlines=deadlines)
        try:
            yield pool
        finally:
            pool.close()
            deadlines.close()


async def keep_answering(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK)


async def test_a_fresh_connection_is_used_again_and_a_stale_one_is_not() -> None:
    async with pooled(keep_answering, idle_s=0.3) as pool:
        first, second, third = Asker(pool), Asker(pool), Asker(pool)
        assert await first.ask() == b"ok"
        assert await second.ask() == b"ok"
        assert (first.reused, second.reused) == (False, True)
        await asyncio.sleep(0.8)
        assert repr(pool).endswith("0 idle, 0 connecting>"), "the sweep has closed it"
        assert await third.ask() == b"ok"
        assert third.reused is False


async def test_bytes_nobody_asked_for_end_an_idle_connection() -> None:
    """A backend that sends a second answer would otherwise poison the next request on this connection."""

    async def double(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK)
        await asyncio.sleep(0.05)
        writer.write(OK.replace(b"ok", b"NO"))
        await reader.read()

    async with pooled(double) as pool:
        assert await Asker(pool).ask() == b"ok"
        await asyncio.sleep(0.15)
        again = Asker(pool)
        assert await again.ask() == b"ok"
        assert again.reused is False


async def test_a_second_answer_in_the_same_packet_is_no_answer() -> None:
    async def double(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK + OK)
        await reader.read()

    async with pooled(double) as pool:
        assert isinstance(await Asker(pool).ask(), BackendDown)


async def test_a_connection_that_says_close_is_retired_without_an_error() -> None:
    """llama-server closes each connection after 100 requests (measured)."""

    async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))

    async with pooled(once) as pool:
        for _ in range(3):
            asker = Asker(pool)
            assert await asker.ask() == b"ok"
            assert asker.reused is False


async def test_a_refused_connection_says_where_and_why() -> None:
    deadlines = Deadlines()
    pool = Pool("127.0.0.1:1", connect_s=1, idle_s=1, deadlines=deadlines)
    error = await Asker(pool).ask()
    assert isinstance(error, BackendDown)
    assert "127.0.0.1:1" in error.message
    pool.close()
    deadlines.close()


def test_a_taken_port_moves_up_by_one_only_where_it_may() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            listen_tcp(port, move=False)
        moved = listen_tcp(port, move=True)
        assert moved.getsockname()[1] > port
        moved.close()


async def test_a_connection_that_was_answered_before_its_request_was_whole_is_not_used_again() -> None:
    seen: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\nno")
        await asyncio.sleep(0.2)
        while data := await reader.read(1 << 20):
            seen.append(data)

    async with pooled(serve) as pool:
        asker = Asker(pool)
        pieces = [b"x" * 262_144] * 64

        def send(connection: UpstreamConnection) -> bool:
            head = b"POST / HTTP/1.1\r\nhost: h\r\ncontent-length: %d\r\n\r\n" % (64 * 262_144)
            connection.send(head, asker, reused=False, more=pieces)
            return True

        asker.on_connected = send  # type: ignore[method-assign]
        pool.connect(asker)
        assert await asyncio.wait_for(asker.done, 5) == b"no"
        assert pool.take() is None


async def test_closing_a_pool_tells_also_who_has_not_begun_to_connect() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with pooled(serve) as pool:
        asker = Asker(pool)
        pool.connect(asker)
        pool.close()
        assert isinstance(await asyncio.wait_for(asker.done, 5), BackendDown)


async def test_a_backend_that_closes_after_so_many_requests_costs_nobody_an_error() -> None:
    """llama-server says `max=100` and means it; another one closes a kept connection without a word."""
    served: list[int] = []

    async def so_many(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.append(0)
        polite = len(served) % 2 == 1
        for left in range(9, -1, -1):
            await reader.readuntil(b"\r\n\r\n")
            served[-1] += 1
            keep = b"Keep-Alive: timeout=5, max=10" if left or not polite else b"Connection: close"
            writer.write(OK.replace(b"\r\n\r\n", b"\r\n%b\r\n\r\n" % keep))

    async with pooled(so_many) as pool:
        for _ in range(35):
            assert await Asker(pool).ask() == b"ok"
            while served[-1] == 10 and pool.idle:  # noqa: ASYNC110 - until what the backend closed is seen
                await asyncio.sleep(0.001)
        assert served == [10, 10, 10, 5]
