"""Addresses, and what it takes to reach each: a guest's port is reached when its VMM says OK, not before."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from hive.errors import BackendDown, BackendTimeout, HiveError, WrongState
from hive.wire.deadlines import Deadlines
from hive.wire.dial import MAX_OK, Fetch, dial, read_address
from hive.wire.upstream import Pool
from tests.muxer import Muxer
from tests.proxy.at_rest import complaints
from tests.proxy.harness import Backend, answer
from tests.waiting import until
from tests.wire.asker import Asker


class Speaker(asyncio.Protocol):
    """Says nothing."""

    transport: Any

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport


def fetching(family: int, where: Any, asked_for: list[str]) -> Fetch:
    """Connects to this place, for any name."""

    async def fetch(agent: str) -> socket.socket:
        asked_for.append(agent)
        await asyncio.sleep(0)
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.connect(where)
        return sock

    return fetch


async def asked(address: str, *, connect_s: float = 5.0, fetch: Fetch | None = None) -> bytes | HiveError:
    """The answer to one request to this address."""
    deadlines = Deadlines()
    pool = Pool(address, connect_s=connect_s, idle_s=1, deadlines=deadlines, fetch=fetch)
    try:
        return await asyncio.wait_for(Asker(pool).ask(), 10)
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
    "text",
    [
        "",
        "nowhere",
        "host:",
        "host:http",
        ":80",
        "vsock:/run/v.sock",
        "vsock:/run/v.sock:x",
        "unix:",
        "h:-1",
        "helper:/",
        "helper:/a:x",
    ],
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


async def test_a_connection_somebody_else_made_is_taken_over(short_path: Path) -> None:
    """Both kinds: to an agent in a network of its own (TCP), and to a unix socket."""
    backend = Backend()
    backend.reply = answer(b"hi")
    await backend.start()
    server = await asyncio.start_unix_server(backend._serve, str(short_path / "a.sock"))
    port = int(backend.address.rpartition(":")[2])
    for closed, (family, where) in enumerate(
        [(socket.AF_INET, ("127.0.0.1", port)), (socket.AF_UNIX, str(short_path / "a.sock"))], 1
    ):
        asked_for: list[str] = []
        fetch = fetching(family, where, asked_for)
        assert await asked("helper:/a1", fetch=fetch) == b"hi"
        assert asked_for == ["a1"]
        await until(lambda closed=closed: backend.closed == closed)  # type: ignore[misc]
    server.close()
    await backend.stop()


async def test_a_guests_port_is_asked_for_on_a_connection_somebody_else_made(short_path: Path) -> None:
    backend = Backend()
    backend.reply = answer(b"hi")
    await backend.start()
    async with muxed(short_path) as muxer:
        muxer.guest[8080] = int(backend.address.rpartition(":")[2])
        fetch = fetching(socket.AF_UNIX, str(short_path / "v.sock"), [])
        assert await asked("helper:/a1:8080", fetch=fetch) == b"hi"
        assert muxer.said == [b"CONNECT 8080\n"]
        error = await asked("helper:/a1:9", fetch=fetch)
        assert isinstance(error, BackendDown)
        assert "nobody in the guest listens on port 9" in error.message
    await backend.stop()


async def test_why_there_is_no_connection_is_told_as_it_was_said() -> None:
    async def fetch(agent: str) -> socket.socket:
        raise WrongState(f"agent {agent} is asleep")

    error = await asked("helper:/a1", fetch=fetch)
    assert isinstance(error, WrongState)
    assert error.message == "agent a1 is asleep"
    alone = await asked("helper:/a1")
    assert isinstance(alone, BackendDown)
    assert "nobody here connects" in alone.message


async def test_one_that_is_cancelled_leaves_no_fetched_connection_behind(short_path: Path) -> None:
    with complaints() as found:
        async with muxed(short_path) as muxer:
            muxer.words = b"OK 1\n"
            fetch = fetching(socket.AF_UNIX, str(short_path / "v.sock"), [])
            for address in ("helper:/a1", "helper:/a1:1"):
                for turns in range(12):
                    task = asyncio.ensure_future(dial(address, Speaker, fetch=fetch))
                    for _ in range(turns):
                        await asyncio.sleep(0)
                    if task.done():
                        task.result().transport.abort()
                    else:
                        task.cancel()
                        with pytest.raises(asyncio.CancelledError):
                            await task
                    await until(lambda: muxer.open == 0)
        assert found == []


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
                    last = await dial(muxer.address(1), Speaker)  # all that connected before it are accepted by now
                    last.transport.abort()
                    await until(lambda: muxer.open == 0)
        assert found == []
