"""Addresses, and what it takes to reach each: a guest's port is reached when its VMM says OK, not before."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from at_rest import complaints
from harness import Backend, answer, until
from muxer import Muxer

from hive.errors import BackendDown, BackendTimeout, HiveError
from hive.wire.deadlines import Deadlines
from hive.wire.dial import MAX_OK, dial, read_address
from hive.wire.http1 import Response
from hive.wire.upstream import Pool, UpstreamConnection


class Asker:
    """Asks once on a connection of its own."""

    def __init__(self) -> None:
        self.done: asyncio.Future[bytes | HiveError] = asyncio.get_running_loop().create_future()
        self._body = b""

    def on_connected(self, connection: UpstreamConnection) -> bool:
        connection.send(b"GET / HTTP/1.1\r\nhost: h\r\n\r\n", self, reused=False)
        return True

    def on_unconnected(self, error: HiveError) -> None:
        self.done.set_result(error)

    def on_answer(self, head: Response) -> None: ...

    def on_data(self, data: bytes, *, last: bool) -> None:
        self._body += data
        if last:
            self.done.set_result(self._body)

    def on_closed(self) -> None:
        self.done.set_result(self._body)

    def on_failed(self, error: HiveError, *, retry: bool) -> None:
        self.done.set_result(error)


class Speaker(asyncio.Protocol):
    """Says nothing."""

    transport: Any

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport


async def asked(address: str, *, connect_s: float = 5.0) -> bytes | HiveError:
    """What one request to this address gets."""
    deadlines, asker = Deadlines(), Asker()
    pool = Pool(address, connect_s=connect_s, idle_s=1, deadlines=deadlines)
    try:
        pool.connect(asker)
        return await asyncio.wait_for(asker.done, 10)
    finally:
        pool.close()
        deadlines.close()


@contextlib.asynccontextmanager
async def muxed(short_path: Path) -> AsyncIterator[Muxer]:
    muxer = Muxer(short_path / "v.sock")
    await muxer.start()
    try:
        yield muxer
        await until(lambda: muxer.open == 0)
    finally:
        await muxer.stop()


@pytest.mark.parametrize(
    "text", ["", "nowhere", "host:", "host:http", ":80", "vsock:/run/v.sock", "vsock:/run/v.sock:x", "unix:", "h:-1"]
)
def test_what_is_no_address_is_said_to_be_none(text: str) -> None:
    with pytest.raises(BackendDown, match="is no address"):
        read_address(text)


async def test_what_is_no_address_reaches_who_waits_for_the_connection() -> None:
    error = await asked("nowhere")
    assert isinstance(error, BackendDown)
    assert "is no address" in error.message


async def test_a_unix_socket_is_an_address(short_path: Path) -> None:
    backend = Backend()
    backend.reply = answer(b"hi")
    server = await asyncio.start_unix_server(backend._serve, str(short_path / "a.sock"))
    assert await asked(f"unix:{short_path}/a.sock") == b"hi"
    await until(lambda: backend.closed == 1)
    server.close()


async def test_a_guests_port_is_reached_behind_the_vmms_ok(short_path: Path) -> None:
    backend = Backend()
    backend.reply = answer(b"hi")
    await backend.start()
    async with muxed(short_path) as muxer:
        muxer.guest[8080] = int(backend.address.rpartition(":")[2])
        assert await asked(muxer.address(8080)) == b"hi"
        assert muxer.said == [b"CONNECT 8080\n"]
    await backend.stop()


async def test_where_nobody_listens_in_the_guest_it_is_a_refused_connect(short_path: Path) -> None:
    async with muxed(short_path) as muxer:
        error = await asked(muxer.address(8080))
        assert isinstance(error, BackendDown)
        assert "nobody in the guest listens on port 8080" in error.message


@pytest.mark.parametrize(
    "words",
    [
        b"NO\n",
        b"OK\n",
        b"ok 1\n",
        b"OK 1 2\n",
        b"OK -1\n",
        b"OK 1\r\n",
        b"\n",
        b"OK 12345678901\n",
        b"x" * (MAX_OK + 1),
    ],
)
async def test_a_vmm_that_says_anything_but_ok_is_not_spoken_to(short_path: Path, words: bytes) -> None:
    async with muxed(short_path) as muxer:
        muxer.words = words
        error = await asked(muxer.address(1))
        assert isinstance(error, BackendDown)
        assert "instead of OK" in error.message


async def test_a_guest_that_speaks_before_it_is_asked_is_hung_up_on(short_path: Path) -> None:
    async with muxed(short_path) as muxer:
        muxer.words = b"OK 1\nHTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
        error = await asked(muxer.address(1))
        assert isinstance(error, BackendDown)


async def test_an_ok_may_come_in_pieces(short_path: Path) -> None:
    async with muxed(short_path) as muxer:
        muxer.words, muxer.dribbles = b"OK 4294967295\n", True
        speaker = await dial(muxer.address(1), Speaker)
        speaker.transport.abort()


async def test_a_paused_vmm_accepts_and_is_no_connection_until_it_says_ok(short_path: Path) -> None:
    """connect() to a frozen VMM succeeds, in its kernel: the deadline is that of the OK (trap 21)."""
    async with muxed(short_path) as muxer:
        muxer.running.clear()
        error = await asked(muxer.address(1), connect_s=0.2)
        assert isinstance(error, BackendTimeout)


async def test_cancelled_at_any_moment_it_leaves_no_connection_behind(short_path: Path) -> None:
    """On uvloop a cancelled connect may have called `connection_made`, and calls no `connection_lost` (seen)."""
    with complaints() as found:
        async with muxed(short_path) as muxer:
            muxer.words = b"OK 1\n"
            for turns in range(12):
                for paused in (False, True):
                    muxer.running.clear() if paused else muxer.running.set()
                    task = asyncio.ensure_future(dial(muxer.address(1), Speaker))
                    for _ in range(turns):
                        await asyncio.sleep(0)
                    if task.done():
                        task.result().transport.abort()
                    else:
                        task.cancel()
                        with pytest.raises(asyncio.CancelledError):
                            await task
                    muxer.running.set()
                    last = await dial(muxer.address(1), Speaker)  # whoever connected before it is accepted by now
                    last.transport.abort()
                    await until(lambda: muxer.open == 0)
        assert found == []
