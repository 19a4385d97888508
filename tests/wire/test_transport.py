"""The transport made for AF_VSOCK over real sockets, each test on uvloop and on asyncio's own loop (conftest.py).

It takes any stream socket, so here it runs over AF_UNIX and TCP.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import socket
import struct
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hive.wire.listeners import listen_tcp
from hive.wire.vsock import HIGH_WATER, LOW_WATER, SocketTransport
from tests.waiting import until

MIB = 1 << 20
CALLBACKS = ["connection_made", "data_received", "eof_received", "pause_writing", "resume_writing", "connection_lost"]


class Noting(asyncio.Protocol):
    """Notes what it is told. `stays`: its answer to the peer's end. Raises in `raises`."""

    def __init__(self, *, stays: bool = False, raises: str = "") -> None:
        self.told: list[str] = []
        self.got = bytearray()
        self.sizes: list[int] = []
        self.error: Exception | None = None
        self.transport: asyncio.Transport | None = None
        self.stays = stays
        self.raises = raises

    def _tell(self, what: str) -> None:
        self.told.append(what)
        if what == self.raises:
            raise ZeroDivisionError(what)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, SocketTransport)
        self.transport = transport
        self._tell("connection_made")

    def data_received(self, data: bytes) -> None:
        self.got += data
        self._tell("data_received")

    def eof_received(self) -> bool:
        self._tell("eof_received")
        return self.stays

    def pause_writing(self) -> None:
        assert self.transport is not None
        self.sizes.append(self.transport.get_write_buffer_size())
        self._tell("pause_writing")

    def resume_writing(self) -> None:
        assert self.transport is not None
        self.sizes.append(self.transport.get_write_buffer_size())
        self._tell("resume_writing")

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self.error = exc
        self._tell("connection_lost")

    @property
    def is_lost(self) -> bool:
        return "connection_lost" in self.told


def pair(family: str) -> tuple[socket.socket, socket.socket]:
    """Two connected sockets, non-blocking. TCP buffers are small: else TCP may take megabytes at once."""
    if family == "unix":
        ours, theirs = socket.socketpair()
    else:
        listening = listen_tcp(0, move=False)
        theirs = socket.socket()
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        theirs.connect(listening.getsockname())
        listening.setblocking(True)
        ours, _ = listening.accept()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65536)
        listening.close()
    ours.setblocking(False)
    theirs.setblocking(False)
    return ours, theirs


@pytest.fixture(params=["unix", "tcp"])
def sockets(request: pytest.FixtureRequest) -> Iterator[tuple[socket.socket, socket.socket]]:
    both = pair(request.param)
    yield both
    for sock in both:
        sock.close()


Sockets = tuple[socket.socket, socket.socket]


def on(sock: socket.socket, protocol: Noting) -> SocketTransport:
    return SocketTransport(asyncio.get_running_loop(), sock, protocol)


async def read_all(sock: socket.socket) -> bytes:
    """Everything up to the end of the stream."""
    loop, data = asyncio.get_running_loop(), bytearray()
    while more := await asyncio.wait_for(loop.sock_recv(sock, 65536), 10):
        data += more
    return bytes(data)


def watched() -> set[int]:
    """The descriptors that any of this process's epolls waits for."""
    found = set()
    for info in Path("/proc/self/fdinfo").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the one that read the folder itself
            found |= {int(line.split()[1]) for line in info.read_text().splitlines() if line.startswith("tfd:")}
    return found


# bytes ----------------------------------------------------------------------------------------------------------------


async def test_bytes_go_both_ways_whole_and_in_order(sockets: Sockets) -> None:
    ours, theirs = sockets
    protocol, peer = Noting(), Noting()
    transport, far = on(ours, protocol), on(theirs, peer)
    random_bytes = random.Random(1).randbytes
    sent = [random_bytes(size) for size in (1, 70_000, 3, 4 * MIB, 1, 16 * MIB, 5, 0, 100)]
    for data in sent:
        transport.write(data)
    far.writelines([b"a", bytearray(b"b"), memoryview(b"c")])
    assert transport.get_write_buffer_size() > 16 * MIB
    await until(lambda: len(peer.got) == sum(map(len, sent)) and len(protocol.got) == 3)
    assert bytes(peer.got) == b"".join(sent)
    assert protocol.got == b"abc"
    assert transport.get_write_buffer_size() == 0
    transport.close()
    await until(lambda: protocol.is_lost and peer.is_lost)
    assert (protocol.error, peer.error, peer.told[-2:]) == (None, None, ["eof_received", "connection_lost"])


async def test_what_is_written_is_what_it_was_when_it_was_written(sockets: Sockets) -> None:
    ours, theirs = sockets
    transport = on(ours, Noting())
    mutable = bytearray(b"x" * 2 * MIB)
    transport.write(mutable)
    transport.write(memoryview(mutable))
    mutable[:] = b"y" * len(mutable)
    transport.close()
    assert await read_all(theirs) == b"x" * 4 * MIB


@pytest.mark.parametrize("seed", range(5))
async def test_any_sequence_of_writes_arrives_as_it_was_written(sockets: Sockets, seed: int) -> None:
    chance = random.Random(seed)
    ours, theirs = sockets
    transport, sent = on(ours, Noting()), bytearray()
    reading = asyncio.ensure_future(read_all(theirs))
    for _ in range(300):
        data = chance.randbytes(chance.choice([1, 10, 1000, 100_000]))
        sent += data
        transport.write(data)
        if chance.random() < 0.3:
            await asyncio.sleep(0)
    transport.close()
    assert await reading == sent


async def test_a_peer_that_reads_slowly_stops_the_writer_and_loses_nothing(sockets: Sockets) -> None:
    ours, theirs = sockets
    protocol = Noting()
    transport, piece, sent = on(ours, protocol), b"x" * 20_000, 0
    loop, received = asyncio.get_running_loop(), 0
    for _ in range(3):
        while protocol.told[-1] != "pause_writing":
            transport.write(piece)
            sent += len(piece)
        assert HIGH_WATER < transport.get_write_buffer_size() <= HIGH_WATER + len(piece)
        await asyncio.sleep(0.01)
        assert protocol.told[-1] == "pause_writing", "nobody has read"
        while protocol.told[-1] != "resume_writing":
            received += len(await asyncio.wait_for(loop.sock_recv(theirs, 5000), 5))
    assert protocol.told == ["connection_made", *["pause_writing", "resume_writing"] * 3]
    assert all(size > HIGH_WATER for size in protocol.sizes[::2])
    assert all(size <= LOW_WATER for size in protocol.sizes[1::2])
    transport.close()
    assert received + len(await read_all(theirs)) == sent


async def test_while_reading_is_paused_nothing_is_told(sockets: Sockets) -> None:
    ours, theirs = sockets
    protocol = Noting()
    transport = on(ours, protocol)
    transport.pause_reading()
    theirs.send(b"hello")
    theirs.shutdown(socket.SHUT_WR)
    await asyncio.sleep(0.02)
    assert protocol.told == ["connection_made"]
    transport.resume_reading()
    transport.resume_reading()
    await until(lambda: protocol.is_lost)
    assert protocol.told == ["connection_made", "data_received", "eof_received", "connection_lost"]


# ends -----------------------------------------------------------------------------------------------------------------


async def test_close_sends_what_was_written_and_nothing_after(sockets: Sockets) -> None:
    ours, theirs = sockets
    protocol = Noting()
    transport = on(ours, protocol)
    transport.write(b"x" * 4 * MIB)
    transport.close()
    transport.close()
    transport.write(b"too late")
    assert transport.is_closing()
    assert not protocol.is_lost
    assert await read_all(theirs) == b"x" * 4 * MIB
    await until(lambda: protocol.is_lost)
    assert ours.fileno() == -1
    assert protocol.told.count("connection_lost") == 1


async def test_what_comes_after_close_is_not_read(sockets: Sockets) -> None:
    ours, theirs = sockets
    protocol = Noting()
    transport = on(ours, protocol)
    transport.write(b"x" * 4 * MIB)
    theirs.send(b"question")
    transport.close()
    await asyncio.sleep(0.01)
    with contextlib.suppress(ConnectionError):  # the kernel's word for unread bytes
        await read_all(theirs)
    await until(lambda: protocol.is_lost)
    assert "data_received" not in protocol.told


async def test_abort_drops_what_was_not_sent_yet(sockets: Sockets) -> None:
    ours, theirs = sockets
    protocol = Noting()
    transport = on(ours, protocol)
    transport.write(b"x" * 32 * MIB)
    transport.abort()
    transport.abort()
    transport.close()
    transport.write(b"too late")
    assert transport.get_write_buffer_size() == 0
    assert not protocol.is_lost, "never from inside a call of the protocol's"
    with contextlib.suppress(ConnectionError):
        assert len(await read_all(theirs)) < 32 * MIB
    await until(lambda: protocol.is_lost)
    assert (protocol.told.count("connection_lost"), protocol.error) == (1, None)


@pytest.mark.parametrize("when", ["reading", "writing", "idle"])
async def test_a_reset_is_told_once_and_as_what_it_is(when: str) -> None:
    """Also one that comes right behind bytes: uvloop calls once for both and never again."""
    ours, theirs = pair("tcp")
    protocol = Noting()
    transport = on(ours, protocol)
    if when == "reading":
        theirs.send(b"x" * 1000)
    if when == "writing":
        transport.write(b"x" * 32 * MIB)
        transport.pause_reading()
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    theirs.close()
    await until(lambda: protocol.is_lost)
    assert isinstance(protocol.error, ConnectionError)
    assert protocol.told.count("connection_lost") == 1
    transport.write(b"too late")
    transport.write_eof()
    await asyncio.sleep(0)
    assert protocol.told[-1] == "connection_lost"


async def test_last_words_of_a_peer_that_left_something_unread_are_followed_by_its_end(sockets: Sockets) -> None:
    ours, theirs = sockets
    protocol = Noting()
    transport = on(ours, protocol)
    transport.write(b"unread")
    await asyncio.sleep(0.01)
    theirs.send(b"last words")
    theirs.close()
    await until(lambda: protocol.is_lost)
    assert protocol.told[0] == "connection_made"
    assert protocol.told.count("connection_lost") == 1


async def test_a_half_closed_peer_may_still_be_answered_and_costs_no_round_of_the_loop(sockets: Sockets) -> None:
    ours, theirs = sockets
    protocol = Noting(stays=True)
    transport = on(ours, protocol)
    await asyncio.sleep(0.001)
    assert ours.fileno() in watched()
    theirs.send(b"question")
    theirs.shutdown(socket.SHUT_WR)
    await until(lambda: "eof_received" in protocol.told)
    transport.resume_reading()
    await asyncio.sleep(0.001)
    assert ours.fileno() not in watched(), "an end is readable for ever"
    transport.write(b"answer")
    transport.close()
    assert await read_all(theirs) == b"answer"
    assert protocol.told == ["connection_made", "data_received", "eof_received", "connection_lost"]


async def test_the_end_of_writing_follows_what_was_written_and_reading_goes_on(sockets: Sockets) -> None:
    ours, theirs = sockets
    protocol = Noting()
    transport = on(ours, protocol)
    assert transport.can_write_eof()
    transport.write(b"x" * 2 * MIB)
    transport.write_eof()
    transport.write_eof()
    with pytest.raises(RuntimeError):
        transport.write(b"more")
    assert await read_all(theirs) == b"x" * 2 * MIB
    theirs.send(b"still there")
    await until(lambda: protocol.got == b"still there")
    theirs.close()
    await until(lambda: protocol.is_lost)


async def test_what_a_transport_says_of_its_socket(sockets: Sockets) -> None:
    ours, theirs = sockets
    transport = on(ours, Noting())
    assert transport.get_extra_info("socket") is ours
    assert transport.get_extra_info("peername") == theirs.getsockname()
    assert transport.get_extra_info("sockname") == ours.getsockname()
    assert transport.get_extra_info("sslcontext", "none") == "none"
    assert repr(transport) == "<SocketTransport open, 0 B unsent>"
    transport.abort()
    await asyncio.sleep(0)
    assert transport.get_extra_info("peername") is None
    assert repr(transport) == "<SocketTransport ended, 0 B unsent>"


# protocols that misbehave ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("callback", CALLBACKS)
async def test_a_callback_that_raises_is_reported_once_and_ends_the_connection(sockets: Sockets, callback: str) -> None:
    ours, theirs = sockets
    reported: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: reported.append(context))
    protocol = Noting(raises=callback)
    transport = on(ours, protocol)
    theirs.send(b"x")
    transport.write(b"x" * 4 * MIB)
    await asyncio.sleep(0)
    with contextlib.suppress(ConnectionError):
        while not protocol.is_lost:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(loop.sock_recv(theirs, 65536), 0.02)
            if "resume_writing" in protocol.told and callback in ("eof_received", "connection_lost"):
                theirs.shutdown(socket.SHUT_WR)
    await until(lambda: protocol.is_lost and ours.fileno() == -1)
    assert [str(context["exception"]) for context in reported] == [callback]
    assert protocol.told.count("connection_lost") == 1


class Rude(Noting):
    """Ends its transport from inside a callback."""

    def __init__(self, callback: str, how: str) -> None:
        super().__init__()
        self.callback, self.how = callback, how

    def _tell(self, what: str) -> None:
        super()._tell(what)
        if what == self.callback and self.transport is not None:
            getattr(self.transport, self.how)()
            assert not self.is_lost


@pytest.mark.parametrize("how", ["close", "abort"])
@pytest.mark.parametrize("callback", CALLBACKS[:-1])
async def test_a_connection_can_be_ended_from_inside_any_callback(sockets: Sockets, callback: str, how: str) -> None:
    ours, theirs = sockets
    protocol = Rude(callback, how)
    loop = asyncio.get_running_loop()
    transport = on(ours, protocol)
    theirs.send(b"x")
    await asyncio.sleep(0.001)
    transport.write(b"x" * 4 * MIB)
    with contextlib.suppress(ConnectionError):
        while not protocol.is_lost:
            if not await asyncio.wait_for(loop.sock_recv(theirs, 65536), 5):
                break
            if "resume_writing" in protocol.told and callback == "eof_received":
                theirs.shutdown(socket.SHUT_WR)
    await until(lambda: protocol.is_lost)
    assert protocol.told[-1] == "connection_lost"
    assert protocol.told.count("connection_lost") == 1


async def test_nothing_of_an_ended_connection_waits_for_the_garbage_collector() -> None:
    gc.collect()
    gc.disable()
    try:
        for how in ("close", "abort", "reset", "leave"):
            ours, theirs = pair("tcp")
            protocol = Noting()
            transport = on(ours, protocol)
            transport.write(b"x" * 4 * MIB if how != "close" else b"x")
            if how == "reset":
                theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            if how in ("reset", "leave"):
                theirs.close()
            else:
                getattr(transport, how)()
            await until(lambda protocol=protocol: protocol.is_lost)  # type: ignore[misc]
            kept: list[weakref.ref[Any]] = [weakref.ref(transport), weakref.ref(protocol)]
            protocol.error = None
            del transport, protocol
            await asyncio.sleep(0)
            assert [ref() for ref in kept] == [None, None], how
            theirs.close()
    finally:
        gc.enable()


# under asyncio's own streams ------------------------------------------------------------------------------------------


async def test_asyncios_streams_run_on_it(sockets: Sockets) -> None:
    """They pause and resume reading: the reader holds at most twice its limit."""
    ours, theirs = sockets
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=1000)
    protocol = asyncio.StreamReaderProtocol(reader)
    writer = asyncio.StreamWriter(SocketTransport(loop, ours, protocol), protocol, reader, loop)
    sending = asyncio.ensure_future(loop.sock_sendall(theirs, b"x" * MIB + b"\n"))
    got = 0
    while got < MIB:
        got += len(await asyncio.wait_for(reader.read(4096), 5))
    await sending
    drained = asyncio.ensure_future(read_all(theirs))
    for _ in range(64):
        writer.write(b"y" * 65536)
        await writer.drain()
    writer.close()
    await writer.wait_closed()
    assert await drained == b"y" * 64 * 65536
