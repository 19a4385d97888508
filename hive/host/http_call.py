"""One HTTP/1.1 request and its answer, on a connection of its own: asyncio and llhttp, no pool, no redirects.

The client of every control question: to a backend, the Docker engine, a VMM, the daemon's REST API. The caller sets the
time limit and gives the answer its meaning.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path

from hive.http_answer import AnswerTooLarge, HttpAnswer
from hive.paths import SUN_PATH_MAX

READ_BYTES = 65536
AGAIN_S = 0.005
"""Between attempts at a unix socket whose backlog is full: the kernel does not report when that has room."""

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def connected_unix(path: Path) -> socket.socket:
    """A socket connected to `path`, which may be of any length; the caller's, not blocking. Raises OSError."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        if len(os.fsencode(path)) <= SUN_PATH_MAX:
            await connect_unix(sock, str(path))
        else:
            directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                await connect_unix(sock, f"/proc/self/fd/{directory}/{path.name}")
            finally:
                os.close(directory)
    except BaseException:
        sock.close()
        raise
    return sock


async def connect_unix(sock: socket.socket, name: str) -> None:
    """Connects, and waits while the backlog is full. Raises OSError.

    Not `sock_connect`: that takes a full backlog (EAGAIN) for a connection under way.
    """
    while True:
        try:
            sock.connect(name)
        except BlockingIOError:
            await asyncio.sleep(AGAIN_S)
        else:
            return


async def streams_of(sock: socket.socket) -> Streams:
    """Reader and writer of a connected `sock`, which is theirs from here on; closed where that fails."""
    try:
        return await asyncio.open_unix_connection(sock=sock, limit=READ_BYTES)
    except BaseException:
        sock.close()
        raise


async def dialled(where: str, tls: ssl.SSLContext | None = None, *, within_s: float | None = None) -> Streams:
    """A connection to `where`, the path of a socket or `host:port`. Raises OSError, ValueError for what is neither."""
    async with asyncio.timeout(within_s):
        if where.startswith("/"):
            return await streams_of(await connected_unix(Path(where)))
        host, _, port = where.rpartition(":")
        return await asyncio.open_connection(host.strip("[]"), int(port), ssl=tls, limit=READ_BYTES)


class HttpCall:
    """A request that was sent, and its answer as it is read. Every method raises OSError and CallFailed."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader
        self._answer = HttpAnswer()

    async def status(self) -> int:
        """The status, as soon as the head is there."""
        while not self._answer.headed:
            await self._read()
        return self._answer.status

    @property
    def retry_after_s(self) -> float | None:
        """Seconds until it may be asked again, as its head says; None where that says nothing."""
        said = self._answer.fields.get("retry-after", "")
        return float(said[:9]) if said.isascii() and said.isdigit() else None

    @property
    def fields(self) -> dict[str, str]:
        """`HttpAnswer.fields`."""
        return self._answer.fields

    async def body(self, limit: int) -> bytes:
        """The whole body; AnswerTooLarge where it has more than `limit` bytes."""
        await self.status()
        content = bytearray(self._answer.take())
        while not self._answer.complete and max(len(content), self._answer.declared or 0) <= limit:
            await self._read()
            content += self._answer.take()
        if max(len(content), self._answer.declared or 0) > limit:
            raise AnswerTooLarge(limit)
        return bytes(content)

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body as it comes."""
        while True:
            if piece := self._answer.take():
                yield piece
            elif self._answer.complete:
                return
            else:
                await self._read()

    async def _read(self) -> None:
        self._answer.feed(await self._reader.read(READ_BYTES))


@contextlib.asynccontextmanager
async def calling(opening: Awaitable[Streams], request: bytes) -> AsyncIterator[HttpCall]:
    """Sends `request` on the connection of `opening`, which is closed at the end, however that comes."""
    reader, writer = await opening
    try:
        writer.write(request)
        yield HttpCall(reader)
    finally:
        writer.transport.abort()
