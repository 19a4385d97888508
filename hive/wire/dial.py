"""Connecting to an address: TCP, a unix socket, a port of a guest behind the unix socket of its VMM, or an address that
only another process reaches, which then hands over the connected socket."""

from __future__ import annotations

import asyncio
import errno
import re
import socket
import ssl
from collections.abc import Awaitable, Callable
from enum import StrEnum
from typing import NamedTuple, TypeVar

from hive.errors import BackendDown

MAX_OK = 32
"""Bytes of the VMM's `OK <port>` line, its end included; a port of ten digits needs 14."""
_OK = re.compile(rb"OK [0-9]{1,10}")
_FETCHED = re.compile(r"helper:/([^/:]+)(?::([0-9]{1,10}))?")

Speaker = TypeVar("Speaker", bound=asyncio.Protocol)
Fetch = Callable[[str], Awaitable[socket.socket]]
"""Fetches a connected socket to a name; the caller owns it. Raises HiveError."""


class AddressKind(StrEnum):
    TCP = "tcp"
    UNIX = "unix"
    VSOCK = "vsock"
    HELPER = "helper"


class Address(NamedTuple):
    """`where`: a host, the path of a unix socket, or the name a socket is fetched for. `port`: of the host, or of the
    guest; 0 if there is none."""

    kind: AddressKind
    where: str
    port: int = 0


def read_address(text: str) -> Address:
    """`HOST:PORT`, `unix:PATH` (or a bare absolute path), `vsock:PATH:PORT`, `helper:/WHOM` or `helper:/WHOM:PORT`.

    Raises BackendDown for anything else.

    >>> tuple(read_address("127.0.0.1:80")), tuple(read_address("vsock:/run/v.sock:8080"))
    ((<AddressKind.TCP: 'tcp'>, '127.0.0.1', 80), (<AddressKind.VSOCK: 'vsock'>, '/run/v.sock', 8080))
    >>> read_address("[::1]:80").where, read_address("unix:/run/a.sock").where
    ('::1', '/run/a.sock')
    >>> tuple(read_address("helper:/a1")), tuple(read_address("helper:/a1:80"))
    ((<AddressKind.HELPER: 'helper'>, 'a1', 0), (<AddressKind.HELPER: 'helper'>, 'a1', 80))
    """
    if text.startswith("/"):
        return Address(AddressKind.UNIX, text)
    if text.startswith("unix:/"):
        return Address(AddressKind.UNIX, text.removeprefix("unix:"))
    if (fetched := _FETCHED.fullmatch(text)) is not None:
        return Address(AddressKind.HELPER, fetched[1], int(fetched[2] or 0))
    kind = AddressKind.VSOCK if text.startswith("vsock:/") else AddressKind.TCP
    where, _, port = text.removeprefix("vsock:").rpartition(":")
    if not (where and port.isascii() and port.isdigit() and len(port) <= 10):
        raise BackendDown(f"{text!r} is no address: HOST:PORT, unix:PATH or vsock:PATH:PORT")
    return Address(kind, where.removeprefix("[").removesuffix("]") if kind is AddressKind.TCP else where, int(port))


class Tls(NamedTuple):
    """TLS on a connection to a host. `name`: what its certificate has to be for."""

    context: ssl.SSLContext
    name: str


async def dial(
    text: str, make: Callable[[], Speaker], *, fetch: Fetch | None = None, tls: Tls | None = None
) -> Speaker:
    """A protocol of `make` on a new connection to this address. Raises OSError, BackendDown, and what `fetch` raises.

    With `tls` (HOST:PORT only) `make` is called only after the check of the other end.

    Cancelled, it leaves no connection behind; on uvloop `connection_made` may have been called by then, and no
    `connection_lost` follows.
    """
    address = read_address(text)
    loop = asyncio.get_running_loop()
    if tls is not None:
        if address.kind is not AddressKind.TCP:
            raise BackendDown(f"{text!r} is not reached by TLS")
        transport, speaker = await loop.create_connection(
            make, address.where, address.port, ssl=tls.context, server_hostname=tls.name
        )
        _send_at_once(transport)
        return speaker
    if address.kind is AddressKind.UNIX:
        return (await loop.create_unix_connection(make, address.where))[1]
    if address.kind is AddressKind.VSOCK:
        return await _call_guest(address, make)
    if address.kind is AddressKind.HELPER:
        if fetch is None:
            raise BackendDown(f"nobody here connects to {text!r} for others")
        sock = await fetch(address.where)
        return await (_call_guest(address, make, sock) if address.port else _take_over(sock, make))
    transport, speaker = await loop.create_connection(make, address.where, address.port)
    _send_at_once(transport)
    return speaker


async def _take_over(sock: socket.socket, make: Callable[[], Speaker]) -> Speaker:
    """Runs the protocol on a socket that is connected already."""
    loop = asyncio.get_running_loop()
    try:
        sock.setblocking(False)
        if sock.family == socket.AF_UNIX:
            return (await loop.create_unix_connection(make, sock=sock))[1]
        transport, speaker = await loop.create_connection(make, sock=sock)
    except BaseException:
        sock.close()
        raise
    _send_at_once(transport)
    return speaker


def _send_at_once(transport: asyncio.BaseTransport) -> None:
    sock = transport.get_extra_info("socket")
    if sock is not None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


async def _call_guest(address: Address, make: Callable[[], Speaker], sock: socket.socket | None = None) -> Speaker:
    """`sock`: one that is connected to the VMM already."""
    loop = asyncio.get_running_loop()
    called: asyncio.Future[Speaker] = loop.create_future()
    calling = _Calling(address.port, make, called)
    try:
        if sock is None:
            await loop.create_unix_connection(lambda: calling, address.where)
        else:
            await _take_over(sock, lambda: calling)
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
            self._called.exception()  # looked at: it will not be awaited
        if self._transport is not None:
            self._transport.abort()
