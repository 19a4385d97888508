"""One HTTP/1.1 request and its answer, on a connection of its own: asyncio and llhttp, no pool, no redirects.

The client for what is asked of a program of this host: the Docker engine, a VMM, the daemon's REST API. The caller sets
the time limit and gives the answer its meaning.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Mapping
from pathlib import Path

import httptools

from hive.paths import SUN_PATH_MAX

READ_BYTES = 65536
HEAD_MAX_BYTES = 64 * 1024
AGAIN_S = 0.005
"""Between attempts at a unix socket whose backlog is full: the kernel does not report when that has room."""

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class CallFailed(Exception):
    """No whole answer came, although there was a connection."""


class HungUp(CallFailed):
    """The connection ended before the answer did."""


class NotHttp(CallFailed):
    """The bytes that came are no HTTP. `begin`: the first of the last ones."""

    def __init__(self, why: str, begin: bytes) -> None:
        super().__init__(why)
        self.begin = begin


class AnswerTooLarge(CallFailed):
    """The answer has more bytes than the caller takes."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"the answer is larger than {limit} bytes")


# --- bytes -------------------------------------------------------------------------------------------------------


def encode_request(method: str, target: str, fields: Mapping[str, str], body: bytes | None = None) -> bytes:
    """The bytes of a request: `fields` as they are, and the length of `body`, where it has one. Never chunked.

    >>> encode_request("GET", "/", {"Host": "localhost"})
    b'GET / HTTP/1.1\\r\\nHost: localhost\\r\\n\\r\\n'
    >>> encode_request("PUT", "/vm", {"Host": "localhost"}, b"{}")
    b'PUT /vm HTTP/1.1\\r\\nHost: localhost\\r\\nContent-Length: 2\\r\\n\\r\\n{}'
    """
    lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
    if body is not None:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "\r\n"]).encode() + (body or b"")


class HttpAnswer:
    """One answer, as it comes. `headed`: its head is whole; `complete`: its body is, too.

    >>> answer = HttpAnswer()
    >>> answer.feed(b"HTTP/1.1 200 OK\\r\\nContent-Length: 4\\r\\n\\r\\nab")
    >>> answer.status, answer.complete, answer.take()
    (200, False, b'ab')
    >>> answer.feed(b"cd")
    >>> answer.complete, answer.take()
    (True, b'cd')
    """

    def __init__(self) -> None:
        self.headed = False
        self.complete = False
        self.declared: int | None = None
        """Bytes of its body, as its head says."""
        self.retry_after_s: float | None = None
        self._is_chunked = False
        self._head_bytes = 0
        self._pieces: list[bytes] = []
        self._parser = httptools.HttpResponseParser(self)

    @property
    def status(self) -> int:
        return int(self._parser.get_status_code())

    def feed(self, data: bytes) -> None:
        """Takes the next bytes of the connection, or none at its end. Raises HungUp, NotHttp, AnswerTooLarge.

        A body without a length goes to the end of the connection. Bytes behind the answer are ignored.
        """
        if self.complete:
            return
        if not data:
            if not self.headed or self.declared is not None or self._is_chunked:
                raise HungUp("the connection ended before the answer did")
            self.complete = True
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self.complete = True
        except httptools.HttpParserError as error:
            if not self.complete:
                raise NotHttp(str(error), data[:40]) from None
        if not self.headed:
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_MAX_BYTES:
                raise AnswerTooLarge(HEAD_MAX_BYTES)

    def take(self) -> bytes:
        """The part of the body that came since the last time."""
        taken = b"".join(self._pieces)
        self._pieces.clear()
        return taken

    # What the parser calls.

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"content-length":
            self.declared = int(value)
        elif name.lower() == b"transfer-encoding":
            self._is_chunked = True
        elif name.lower() == b"retry-after" and value.isdigit():
            self.retry_after_s = float(value[:9])

    def on_headers_complete(self) -> None:
        self.headed = True

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)

    def on_message_complete(self) -> None:
        self.complete = True


# --- connections -------------------------------------------------------------------------------------------------


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
        return self._answer.retry_after_s

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
