"""Connecting to an address: TCP, a unix socket, or a port of a guest behind the unix socket of its VMM."""

from __future__ import annotations

import asyncio
import errno
import re
import socket
from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple, TypeVar

from hive.errors import BackendDown

MAX_OK = 32
"""Bytes of the VMM's `OK <port>` line, its end included; a port of ten digits needs 14."""
_OK = re.compile(rb"OK [0-9]{1,10}")

Speaker = TypeVar("Speaker", bound=asyncio.Protocol)


class Kind(StrEnum):
    TCP = "tcp"
    UNIX = "unix"
    VSOCK = "vsock"


class Address(NamedTuple):
    """`where`: a host, or the path of a unix socket. `port`: of the host, or of the guest; 0 where there is none."""

    kind: Kind
    where: str
    port: int = 0


def read_address(text: str) -> Address:
    """`HOST:PORT`, `unix:PATH` (or a bare absolute path), `vsock:PATH:PORT`. Raises BackendDown for anything else.

    >>> tuple(read_address("127.0.0.1:80")), tuple(read_address("vsock:/run/v.sock:8080"))
    ((<Kind.TCP: 'tcp'>, '127.0.0.1', 80), (<Kind.VSOCK: 'vsock'>, '/run/v.sock', 8080))
    >>> read_address("[::1]:80").where, read_address("unix:/run/a.sock").where
    ('::1', '/run/a.sock')
    """
    if text.startswith("/"):
        return Address(Kind.UNIX, text)
    if text.startswith("unix:/"):
        return Address(Kind.UNIX, text.removeprefix("unix:"))
    kind = Kind.VSOCK if text.startswith("vsock:/") else Kind.TCP
    where, _, port = text.removeprefix("vsock:").rpartition(":")
    if not (where and port.isascii() and port.isdigit() and len(port) <= 10):
        raise BackendDown(f"{text!r} is no address: HOST:PORT, unix:PATH or vsock:PATH:PORT")
    return Address(kind, where.removeprefix("[").removesuffix("]") if kind is Kind.TCP else where, int(port))


async def dial(text: str, make: Callable[[], Speaker]) -> Speaker:
    """A protocol of `make` on a new connection to this address. Raises OSError, BackendDown.

    Cancelled, it leaves no connection behind; on uvloop `connection_made` may have been called by then, and no
    `connection_lost` follows.
    """
    address = read_address(text)
    loop = asyncio.get_running_loop()
    if address.kind is Kind.UNIX:
        return (await loop.create_unix_connection(make, address.where))[1]
    if address.kind is Kind.VSOCK:
        return await _call_guest(address, make)
    transport, speaker = await loop.create_connection(make, address.where, address.port)
    sock = transport.get_extra_info("socket")
    if sock is not None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return speaker


async def _call_guest(address: Address, make: Callable[[], Speaker]) -> Speaker:
    loop = asyncio.get_running_loop()
    called: asyncio.Future[Speaker] = loop.create_future()
    calling = _Calling(address.port, make, called)
    try:
        await loop.create_unix_connection(lambda: calling, address.where)
        return await called
    except BaseException:
        calling.hang_up()
        raise


class _Calling(asyncio.Protocol):
    """Asks a VMM for a port of its guest; a protocol of `make` takes over with the byte behind the VMM's OK.

    That this socket connects tells nothing: its kernel accepts for a frozen VMM, too (measured). So the OK is waited
    for, and where the guest does not listen the VMM just closes (Firecracker, docs/vsock.md).
    """

    def __init__(self, port: int, make: Callable[[], Speaker], called: asyncio.Future[Speaker]) -> None:
        self._port = port
        self._make = make
        self._called = called
        self._said = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        if self._transport is not None:
            self._transport.write(b"CONNECT %d\n" % self._port)

    def data_received(self, data: bytes) -> None:
        transport = self._transport
        if self._called.done() or transport is None:
            return
        self._said += data
        line, end, rest = self._said.partition(b"\n")
        if len(line) + len(end) > MAX_OK or (end and _OK.fullmatch(line) is None):
            self._called.set_exception(BackendDown(f"the VMM answered {line[:MAX_OK]!r} instead of OK"))
        elif end:
            speaker = self._make()
            transport.set_protocol(speaker)
            speaker.connection_made(transport)
            if rest:
                speaker.data_received(rest)
            self._called.set_result(speaker)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        if not self._called.done():
            nobody = f"nobody in the guest listens on port {self._port}"
            self._called.set_exception(ConnectionRefusedError(errno.ECONNREFUSED, nobody))

    def hang_up(self) -> None:
        if not self._called.cancel() and not self._called.cancelled():
            self._called.exception()  # looked at: nobody will await it
        if self._transport is not None:
            self._transport.abort()
