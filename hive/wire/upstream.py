"""The backend side of the data path: pooled keep-alive connections, one answer at a time on each."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from hive.errors import BackendDown, BackendTimeout, DependencyDown, HiveError
from hive.tasks import spawn
from hive.wire.budget import LONG_READ
from hive.wire.deadlines import NEVER, Deadlines
from hive.wire.dial import Fetch, Tls, dial
from hive.wire.file_sending import FileBody, FileSending
from hive.wire.heads import BadResponse
from hive.wire.http1 import KnownHead, Response, ResponseParser

WRITE_AHEAD = 256 * 1024
"""Bytes of a long body that are handed to the kernel at a time: 16 MiB at once take up to 4 ms (measured)."""


def forms(fields: bytes) -> tuple[bytes, bytes]:
    """Heads of requests, without and with a body, that carry these fields, for `%` with the request line and a length.

    >>> forms(b"host: h\\r\\n")[1] % (b"POST / HTTP/1.1\\r\\n", 2)
    b'POST / HTTP/1.1\\r\\nhost: h\\r\\ncontent-type: application/json\\r\\ncontent-length: 2\\r\\n\\r\\n'
    """
    fields = fields.replace(b"%", b"%%")
    bare = b"%%b%baccept: application/json\r\n\r\n" % fields
    return bare, b"%%b%bcontent-type: application/json\r\ncontent-length: %%d\r\n\r\n" % fields


_BARE, _FULL = forms(b"host: localhost\r\n")


class UpstreamWay(NamedTuple):
    """The settings that all requests to one backend share.

    `prefix`: before every path, empty for none. `bare`, `full`: of `forms`, made once as every request uses them.
    `has_key`: they carry a key of Hive's, and error texts about it must not reach a client: servers repeat a part of
    it.
    """

    dialled: str
    tls: Tls | None = None
    prefix: bytes = b""
    bare: bytes = _BARE
    full: bytes = _FULL
    has_key: bool = False

    def __repr__(self) -> str:
        return f"<UpstreamWay {self.dialled}{' by TLS' if self.tls else ''}{' with a key' if self.has_key else ''}>"

    def line(self, line: bytes) -> bytes:
        """A request line with the prefix before its path.

        >>> UpstreamWay("h:80", prefix=b"/llm").line(b"POST /v1/x HTTP/1.1\\r\\n")
        b'POST /llm/v1/x HTTP/1.1\\r\\n'
        """
        method, _, rest = line.partition(b" ")
        return b"%b %b%b" % (method, self.prefix, rest)

    def form_head(self, line: bytes, boundary: bytes, size: int) -> bytes:
        """The head of a request with a form of this boundary, which has no quote and no percent sign in it.

        >>> UpstreamWay("h:80").form_head(b"POST / HTTP/1.1\\r\\n", b"x", 9).split(b"\\r\\n")[2]
        b'content-type: multipart/form-data; boundary=x'
        """
        kind = b"multipart/form-data; boundary=" + boundary
        return self.full.replace(b"application/json", kind) % (line, size)


def is_untaken(error: HiveError) -> bool:
    """Whether this error says that no server has taken the request: nobody listens, or it went before it had read it.
    The kernel tells that by a reset; a server that has read all and dies ends its connections like any other.

    >>> is_untaken(BackendDown("no"))
    False
    """
    return isinstance(
        error.__cause__, ConnectionRefusedError | ConnectionResetError | BrokenPipeError | FileNotFoundError
    )


class Receiver(Protocol):
    """The receiver of an answer. Exactly one of `on_end` and `on_failed` is called last, unless it cancels first."""

    def on_answer(self, head: Response) -> None:
        """The head; `on_data` follows at once, with what body came along."""
        ...

    def on_data(self, data: bytes, *, last: bool) -> None:
        """Body bytes as they came (possibly none); `last` when the answer is framed as complete."""
        ...

    def on_closed(self) -> None:
        """The answer had no length and the backend closed: the dialect must say whether it was whole."""
        ...

    def on_failed(self, error: HiveError, *, retry: bool) -> None:
        """Tells that there is no (whole) answer. `retry`: the connection was a kept one and died before a byte, so
        asking again is safe."""
        ...


class UpstreamConnection(asyncio.Protocol):
    """One connection to the backend; belongs to a Receiver while a request is on it, to the pool otherwise."""

    __slots__ = (
        "_file",
        "_got",
        "_is_last",
        "_more",
        "_parser",
        "_paused",
        "_pool",
        "_receiver",
        "_reused",
        "_sent",
        "_transport",
        "idle_since",
        "way",
    )

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.way = pool.way
        """The way to the backend it leads to, even if another backend is active by now."""
        self._transport: asyncio.Transport | None = None
        self._receiver: Receiver | None = None
        self._parser: ResponseParser | None = None
        self._reused = self._sent = False
        self._got = self._paused = False
        self._more: deque[bytes] | None = None
        self._file: FileSending | None = None
        """The request with a file in it."""
        self._is_last = False
        """True if the connection ends with this answer: a file may not be sent whole yet, or nothing more is wanted."""
        self.idle_since = 0.0

    def __repr__(self) -> str:
        return f"<UpstreamConnection {'busy' if self._receiver else 'idle'}>"

    @property
    def usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def send(
        self,
        request: bytes,
        receiver: Receiver,
        *,
        reused: bool,
        bodiless: bool = False,
        more: Sequence[bytes] = (),
    ) -> None:
        """Sends a whole request, at the end of this turn of the loop with all others of the turn: the backend is woken
        once for them (4 of 45 µs a request). The answer goes to `receiver`. `bodiless`: it is a HEAD, whose answer has
        no body.

        `more`: pieces of a long body that follow, not joined because that would hold up all other requests.
        """
        assert self._transport is not None
        self._receiver = receiver
        self._reused = reused
        self._got = False
        self._parser = ResponseParser(self._pool.known, bodiless=bodiless)
        self._sent = bool(more)
        if not more:
            self._pool.post(self, request)
        else:
            self._transport.write(request)
            self._more = deque(more)
            self.resume_writing()

    def send_file(self, body: FileBody, receiver: Receiver, *, reused: bool) -> None:
        """Sends a whole request with a file in it, as `send`. The file has to stay open until the answer begins."""
        assert self._transport is not None
        assert self.way.tls is None
        self._receiver = receiver
        self._reused = reused
        self._got = False
        self._parser = ResponseParser(self._pool.known)
        self._sent = self._is_last = True
        sock: socket.socket = self._transport.get_extra_info("socket")
        self._file = FileSending(sock, body, self._on_unreadable)

    def _on_unreadable(self, error: OSError) -> None:
        if (receiver := self._receiver) is not None:
            self.cancel()
            receiver.on_failed(DependencyDown(f"the file of the request cannot be read: {error.strerror}"), retry=False)

    @property
    def is_sent(self) -> bool:
        """Whether the whole request has been handed to the kernel."""
        return self._sent and self._more is None and (self._file is None or self._file.is_done)

    def end_early(self, receiver: Receiver) -> None:
        """Tells the other side that nothing more is wanted, and waits for its end: `receiver` gets it now. A server
        that cannot stop at once closes when it has."""
        self._receiver = receiver
        self._is_last = True
        if self._transport is not None and not self._transport.is_closing():
            if self._paused:
                self.resume()
            self._transport.write_eof()

    def write(self, request: bytes) -> None:
        """Writes the request, unless its answer was given up."""
        if self._receiver is not None and self._transport is not None and not self._transport.is_closing():
            self._sent = True
            self._transport.write(request)

    def resume_writing(self) -> None:
        """The kernel has taken what was written: the next pieces of a long body."""
        more, transport = self._more, self._transport
        while more and transport is not None and transport.get_write_buffer_size() < WRITE_AHEAD:
            transport.write(more.popleft())
        if not more:
            self._more = None

    def cancel(self) -> None:
        """Gives the answer up: closes at once, so that the backend stops working on it."""
        self._receiver = self._more = None
        if self._file is not None:
            self._file.stop()
        if self._transport is not None:
            self._transport.abort()

    def fail(self, error: HiveError) -> bool:
        """Ends the request on this connection with `error`; False if there is none."""
        receiver = self._receiver
        if receiver is None:
            return False
        self.cancel()
        receiver.on_failed(error, retry=False)
        return True

    def switch(self, protocol: asyncio.Protocol) -> None:
        """Hands an unused connection to `protocol`; the pool forgets it."""
        transport, self._transport = self._transport, None
        assert transport is not None
        self._pool.lost(self)
        transport.set_protocol(protocol)
        protocol.connection_made(transport)

    def pause(self) -> None:
        self._paused = True
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume(self) -> None:
        self._paused = False
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        receiver, parser = self._receiver, self._parser
        if receiver is None or parser is None:
            self.cancel()  # bytes without a request
            return
        if not self._sent:
            self.cancel()
            receiver.on_failed(BackendDown(f"{self._pool.peer} spoke before it was asked"), retry=self._reused)
            return
        self._got = True
        head_known = parser.head is not None
        try:
            body = parser.feed(data)
        except BadResponse as error:
            self._receiver = None
            self.cancel()
            receiver.on_failed(BackendDown(f"{self._pool.peer} answered nonsense: {error}"), retry=False)
            return
        if not head_known:
            if parser.head is None:
                return
            if parser.head.status == 401 and self.way.has_key:
                self._receiver = None
                self.cancel()
                receiver.on_failed(
                    BackendDown(f"{self._pool.peer} does not accept the key Hive has for it"), retry=False
                )
                return
            receiver.on_answer(parser.head)
        if self._receiver is not receiver:
            return
        if parser.complete:
            self._receiver = self._parser = None
            if self._more is not None or self._is_last:  # of what it had not whole, the rest must not follow
                self.cancel()
            elif parser.head is not None and parser.head.keep_alive:
                self._pool.give(self)
            elif self._transport is not None:
                self._transport.close()
            receiver.on_data(body, last=True)
        elif body or not head_known:
            receiver.on_data(body, last=False)
            if len(data) >= LONG_READ and self._transport is not None and not self._transport.is_closing():
                self._transport.pause_reading()
                asyncio.get_running_loop().call_soon(self._read_on)

    def _read_on(self) -> None:
        if not self._paused:
            self.resume()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._pool.lost(self)
        receiver, self._receiver = self._receiver, None
        parser, self._parser = self._parser, None
        had_all = self.is_sent
        if self._file is not None:
            self._file.stop()
        if parser is None or receiver is None:
            return
        head = parser.head
        if head is not None and head.content_length is None and not head.chunked and exc is None:
            receiver.on_closed()
        elif not self._got:
            error = BackendDown(f"{self._pool.peer} closed the connection without an answer")
            if exc is None and self._file is not None and not had_all:
                exc = ConnectionResetError("it had not the whole request")
            error.__cause__ = exc
            receiver.on_failed(error, retry=self._reused)
        else:
            receiver.on_failed(BackendDown(f"{self._pool.peer} broke off its answer"), retry=False)


class Pool:
    """Connections to one address (see `dial.read_address`), the last used first.

    `idle_s` must be less than the backend's own keep-alive (vLLM and llama-server close after 5 s), or a request
    meets a closing connection.
    """

    def __init__(
        self,
        address: str,
        *,
        connect_s: float,
        idle_s: float,
        deadlines: Deadlines,
        fetch: Fetch | None = None,
        way: UpstreamWay | None = None,
        peer: str = "the backend",
    ) -> None:
        """`way`: to the same address; None if there is nothing more to it. `peer`: the name of the other side in
        errors."""
        self.address = address
        file = address if "://" in address else address.rpartition("/")[2]
        self._where = f"{peer} at {file}"  # an error is a client's to read, and a socket's directories are not
        self.peer = peer
        self.way = way or UpstreamWay(address)
        self._fetch = fetch
        self.deadline = NEVER
        self.known = KnownHead(Response())
        """The head of the last answer: those of one backend repeat."""
        self._connect_s = connect_s
        self._idle_s = idle_s
        self._idle: deque[UpstreamConnection] = deque()
        self._posts: list[tuple[UpstreamConnection, bytes]] = []
        self._open: set[UpstreamConnection] = set()
        """Idle and busy connections, each from the moment a request got it: uvloop tells no end of a connection whose
        connect was cancelled."""
        self._loop = asyncio.get_running_loop()
        self._connecting: set[asyncio.Task[None]] = set()
        self._deadlines = deadlines
        self._closed = False
        self._gone: HiveError | None = None
        deadlines.add(self)

    def __repr__(self) -> str:
        return f"<Pool {self.address} {len(self._idle)} idle, {len(self._connecting)} connecting>"

    def use_clocks(self, *, connect_s: float, idle_s: float) -> None:
        """The configuration was read again."""
        self._connect_s = connect_s
        self._idle_s = idle_s

    @property
    def idle(self) -> int:
        return len(self._idle)

    @property
    def busy(self) -> int:
        return len(self._open) - len(self._idle)

    def post(self, connection: UpstreamConnection, request: bytes) -> None:
        self._posts.append((connection, request))
        if len(self._posts) == 1:
            self._loop.call_soon(self._send_posts)

    def _send_posts(self) -> None:
        posts, self._posts = self._posts, []
        for connection, request in posts:
            connection.write(request)

    def take(self) -> UpstreamConnection | None:
        """A kept connection that is fresh enough, or None."""
        idle = self._idle
        if not idle:
            return None
        horizon = time.monotonic() - self._idle_s
        while idle:
            connection = idle.pop()
            if connection.usable and connection.idle_since > horizon:
                return connection
            connection.cancel()
        return None

    def give(self, connection: UpstreamConnection) -> None:
        if self._closed:
            connection.cancel()
            return
        connection.idle_since = now = time.monotonic()
        self._idle.append(connection)
        if self.deadline == NEVER:  # else it is that of one given back before
            self.deadline = now + self._idle_s

    def lost(self, connection: UpstreamConnection) -> None:
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def connect(self, waiter: Connecting) -> asyncio.Task[None]:
        """Opens a new connection; `waiter` gets it, or the error. A waiter that leaves before cancels the returned
        task."""
        task = spawn(self._connect(waiter), name=f"connect {self.address}")
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)
        return task

    async def _connect(self, waiter: Connecting) -> None:
        try:
            async with asyncio.timeout(self._connect_s):
                connection = await dial(
                    self.address, lambda: UpstreamConnection(self), fetch=self._fetch, tls=self.way.tls
                )
        except asyncio.CancelledError:
            unused = BackendDown(f"{self._where} is no longer used", hint="ask again")
            waiter.on_unconnected(self._gone or unused)
            raise
        except TimeoutError:
            waiter.on_unconnected(BackendTimeout(f"{self._where} did not accept in {self._connect_s:g} s"))
        except ssl.SSLCertVerificationError as error:
            waiter.on_unconnected(BackendDown(f"{self._where} is not trusted: {error.verify_message}"))
        except ssl.SSLError as error:
            why = error.reason or str(error)
            waiter.on_unconnected(BackendDown(f"{self._where}: no TLS could be agreed on: {why}"))
        except OSError as error:
            down = BackendDown(f"{self._where} is not reachable: {error.strerror or error}")
            down.__cause__ = error
            waiter.on_unconnected(down)
        except HiveError as error:
            waiter.on_unconnected(error)
        else:
            if not connection.usable:  # it closed at once, or spoke before it was asked
                down = BackendDown(f"{self._where} does not speak HTTP")
                down.__cause__ = ConnectionResetError()
                waiter.on_unconnected(down)
            else:
                self._open.add(connection)
                if not waiter.on_connected(connection):
                    self.give(connection)

    def on_deadline(self, now: float) -> None:
        """Closes what has been idle too long; the oldest are on the left."""
        while self._idle and self._idle[0].idle_since + self._idle_s <= now:
            self._idle.popleft().cancel()
        self.deadline = self._idle[0].idle_since + self._idle_s if self._idle else NEVER

    @property
    def connecting(self) -> int:
        return len(self._connecting)

    def cut(self, error: HiveError) -> int:
        """Closes, and fails the requests still under way with `error`; returns their number."""
        self._gone = error
        self.close()
        return len(self._connecting) + sum(connection.fail(error) for connection in list(self._open))

    def close(self) -> None:
        self._closed = True
        self._deadlines.discard(self)
        for task in self._connecting:
            self._loop.call_soon(task.cancel)  # one that has not begun would end without telling its waiter
        while self._idle:
            self._idle.pop().cancel()


class Connecting(Protocol):
    """A request that waits for a new connection."""

    def on_connected(self, connection: UpstreamConnection) -> bool:
        """Takes the connection; False where it is not wanted any more."""
        ...

    def on_unconnected(self, error: HiveError) -> None: ...
