"""The client side of the data path: one accepted connection, one request in flight at a time.

It parses, keeps the clocks of head, body and idleness, holds pipelined bytes back and writes answers. The exchange it
opens at the first byte decides about a request.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import socket
import struct
import termios
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

from hive.errors import HiveError, RequestTimeout, Saturated
from hive.wire.budget import LONG_READ, HalfOpen, body_deadline
from hive.wire.deadlines import NEVER, Deadlines
from hive.wire.http1 import Request, RequestParser

MAX_PIPELINED = 64 * 1024
"""Bytes a client may send ahead while its request is in flight; beyond that the connection is closed (reading is
never paused, because a paused socket reports neither FIN nor RST)."""
LINGER_S = 2.0
"""Time to read and drop bytes after an answer to an unfinished upload: else the client sees a reset, not the answer."""
CLOSE_S = 60.0
"""A client may take so long to read what was written before its connection closed."""
SIOCOUTQ = termios.TIOCOUTQ
FIONREAD = termios.FIONREAD
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
EMPTY_LINE = (b"\r\n", b"\r")
"""Bytes a client may send between two requests, whole or in part; they are no reason for a wake."""


class ConnectionLimits(NamedTuple):
    """Clocks of a connection, seconds; `max_body` in bytes. `longer`: the paths that take longer ones, by their end."""

    head_s: float
    body_idle_s: float
    keepalive_s: float
    max_body: int
    longer: Mapping[bytes, int] = {}


class HttpExchange(Protocol):
    """One request and its answer, made at the request's first byte. Ends by calling `connection.finished()`."""

    @property
    def parked(self) -> bool:
        """Whether it waits for its agent to wake: the clocks of head and body stand still."""
        ...

    def on_head(self, request: Request) -> None:
        """The head is in. Must not raise; may answer at once (with `refuse`)."""
        ...

    def on_body(self, size: int) -> None:
        """`size` more body bytes are held. May raise a HiveError."""
        ...

    def on_request(self, request: Request) -> None:
        """The whole request is in. Must not raise."""
        ...

    def refuse(self, error: HiveError) -> None:
        """Answer with this error, unless the answer has begun; then cut."""
        ...

    def on_gone(self) -> None:
        """The client left: cancel everything this exchange caused."""
        ...

    def on_blocked(self) -> None:
        """The client reads too slowly: stop reading from the backend."""
        ...

    def on_unblocked(self) -> None: ...


class Connection(asyncio.Protocol):
    """See module. `open_exchange(connection)` is called at the first byte of each request."""

    def __init__(
        self,
        sock: socket.socket,
        *,
        limits: ConnectionLimits,
        deadlines: Deadlines,
        open_exchange: Callable[[Connection], HttpExchange],
        stays_open: Callable[[Connection], bool],
        on_closed: Callable[[Connection], None],
        half_open: HalfOpen | None = None,
    ) -> None:
        self.sock = sock
        self._is_unix = sock.family == socket.AF_UNIX
        self._is_tcp = sock.family not in (socket.AF_UNIX, socket.AF_VSOCK)
        self.needs_token = self._is_tcp
        """True if a token must prove the owner; on an agent's own listener the connection itself does."""
        self.limits = limits
        self.deadline = NEVER
        self.exchange: HttpExchange | None = None
        self.owner: object | None = None
        """The owner of this connection, once known; set by the exchange."""
        self.decided: object | None = None
        """The exchange's decision about the last head; heads of one connection repeat."""
        self._deadlines = deadlines
        self._open_exchange = open_exchange
        self._stays_open = stays_open
        self._on_closed = on_closed
        self._transport: asyncio.Transport | None = None
        self._parser = RequestParser(self, max_body=limits.max_body, longer=limits.longer)
        self._request: Request | None = None
        self._ahead = bytearray()
        """Bytes that came while a request was in flight, or an empty line before one; looked at in their turn."""
        self._half_open = half_open or HalfOpen()
        self._half_open_as: tuple[object] | None = None
        """The owner for which this connection's unfinished head is counted."""
        self._clock_at = 0.0
        self._clock_from = 0
        """Since when, and from how many body bytes on, the rate of an upload is measured."""
        self._lingering = False
        self._closing = False
        self._full = False
        """The client reads too slowly: no further request of it begins."""
        self._last_sent_at = 0.0
        self._idle_from = time.monotonic()

    def __repr__(self) -> str:
        state = "gone" if self._transport is None else "in flight" if self.exchange else "idle"
        return f"<Connection {state}, {len(self._ahead)} B ahead>"

    # for the gate -------------------------------------------------------------------------------------------------

    def why_busy(self, now: float, *, unread_counts: bool = True) -> str | None:
        """The reason why the agent behind this connection must not be frozen now, or None. Looks into the kernel, never
        waits.

        `unread_counts`: whether an answer the peer has not read is a reason. Over TCP that is one not acknowledged, or
        sent less than 1 s ago: the peer's kernel acknowledges what its program has not seen.
        """
        if self.exchange is not None:
            return "a request is in flight"
        if self._closing:
            return None
        try:
            descriptor = self.sock.fileno()
            if descriptor < 0:
                return None
            if _has_unread(self.sock) or (self._ahead and self._ahead not in EMPTY_LINE):
                return "bytes of a request are waiting"
            if not unread_counts:
                return None
            if self._transport is not None and self._transport.get_write_buffer_size():
                return "an answer is being written"
            if not self._is_unix and now - self._last_sent_at < 1.0:
                return "an answer was sent less than 1 s ago"
            if (self._is_unix or self._is_tcp) and _queued(descriptor, SIOCOUTQ):
                return "the answer has not been read"
        except OSError:
            return None
        return None

    # others that need its place -------------------------------------------------------------------------------------

    @property
    def idle_since(self) -> float | None:
        """Since when nothing is asked on it, on the monotonic clock; None while something is, or while it ends."""
        if self.exchange is not None or self._closing or self._lingering:
            return None
        return self._idle_from

    @property
    def unsent_bytes(self) -> int:
        """Bytes written that the client's kernel has not taken yet."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def is_quiet(self) -> bool:
        """Says that nothing is asked on it and no byte of a request waits in the kernel."""
        return self.why_busy(0.0, unread_counts=False) is None

    def give_way(self) -> None:
        """Ends, because another one needs its place: with an answer where a request has begun."""
        if self.exchange is not None:
            self.exchange.refuse(Saturated("too many connections", retry_after_s=1))
        self.close()

    @property
    def peer(self) -> str:
        """The address of its client, for a log; empty where it has none."""
        if not self._is_tcp:
            return ""
        try:
            return str(self.sock.getpeername()[0])
        except OSError:
            return ""

    @property
    def asks_head(self) -> bool:
        """Says that the request in flight is a HEAD, also where its head is refused: then its answer has no body."""
        return self._parser.asks_head if self._request is None else self._request.method == b"HEAD"

    # for an exchange ----------------------------------------------------------------------------------------------

    def write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def send_continue(self) -> None:
        self.write(CONTINUE)

    def finished(self, *, keep: bool) -> None:
        """The answer is written. With `keep` the next request may come; an unfinished upload is dropped."""
        now = time.monotonic()
        self._last_sent_at = self._idle_from = now
        request, self.exchange, self._request = self._request, None, None
        if self._transport is None:
            return
        if request is None or not request.complete:
            self._head_is_in()
            if request is not None:
                request.body.clear()  # these bytes need no answer any more
            self._linger(now)
        elif not keep or not request.keep_alive:
            self.close()
        else:
            self.deadline = now + self.limits.keepalive_s
            if self._ahead:
                self._go_on_soon()

    def cut(self, last_words: bytes = b"") -> None:
        """Ends the connection so that the client sees an incomplete answer.

        `last_words` are sent before; they must leave the answer's framing open, because its end is then a plain close.
        """
        self.exchange = None
        self._head_is_in()
        if last_words:
            self.write(last_words)
            self.close()
        elif self._transport is not None:
            self._closing = True
            if self._is_tcp:  # a close without a reset would be the end of an answer without a framing
                with contextlib.suppress(OSError):
                    self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._transport.abort()

    def close(self) -> None:
        """Closes once everything written is sent."""
        self._closing = True
        self.deadline = time.monotonic() + CLOSE_S
        if self._transport is not None:
            self._transport.close()

    def switch(self, protocol: asyncio.Protocol) -> None:
        """Hands the connection to `protocol`: its bytes, its back-pressure, its end (RFC 9110 §7.8).

        The exchange stays until it says `finished`, or until `protocol` passes `connection_lost` on to this object.
        """
        transport, ahead = self._transport, bytes(self._ahead)
        assert transport is not None
        self._ahead.clear()
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        if self._full:
            protocol.pause_writing()
        if ahead:
            protocol.data_received(ahead)

    def restart_clock(self) -> None:
        """The agent was asleep and is awake now: its clock starts anew."""
        now = time.monotonic()
        if self._request is None:
            self.deadline = now + self.limits.head_s
        else:
            self._start_body_clock(self._request, now)

    def use_limits(self, limits: ConnectionLimits) -> None:
        """The configuration was read again: clocks and sizes are these from the next request on."""
        self.limits = limits
        self._parser.max_body, self._parser.longer = limits.max_body, limits.longer

    # asyncio ------------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport) or hasattr(transport, "write")
        self._transport = transport  # type: ignore[assignment]
        self.deadline = time.monotonic() + self.limits.keepalive_s
        self._deadlines.add(self)
        if self._closing:
            self._abort()

    def data_received(self, data: bytes) -> None:
        if self._lingering or self._closing:
            return
        if self._ahead and self._ahead in EMPTY_LINE and self.exchange is None and not self._full:
            data = bytes(self._ahead) + data
            self._ahead.clear()
        request = self._request
        if self._ahead or (request is not None and request.complete) or (self._full and self.exchange is None):
            self._keep_ahead(data)
            return
        if self.exchange is None:
            if data in EMPTY_LINE:
                self._ahead += data
                return
            self._open()
        self._feed(data)
        if len(data) >= LONG_READ and self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()
            asyncio.get_running_loop().call_soon(self._read_on)

    def _read_on(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._transport = None
        self._parser.close()
        self._deadlines.discard(self)
        self._head_is_in()
        exchange, self.exchange = self.exchange, None
        if exchange is not None:
            exchange.on_gone()
        self._on_closed(self)

    def eof_received(self) -> bool:
        """Takes a half-close for the end of the connection, as nginx does: no SDK needs the answer then. Unsent bytes
        are dropped."""
        if self.exchange is not None:
            self._abort()
        return False

    def pause_writing(self) -> None:
        self._full = True
        if self.exchange is not None:
            self.exchange.on_blocked()

    def resume_writing(self) -> None:
        self._full = False
        if self.exchange is not None:
            self.exchange.on_unblocked()
        else:
            self._go_on_soon()

    # clocks -------------------------------------------------------------------------------------------------------

    def on_deadline(self, now: float) -> None:
        if self.exchange is None:
            if self._lingering or self._closing:
                self.deadline = NEVER
                self._abort()
            elif self._stays_open(self):
                self.deadline = now + self.limits.keepalive_s
            else:
                self.close()
        elif self.exchange.parked:
            self.deadline = now + self.limits.head_s
        elif self._request is None or not self._request.complete:
            what = "head" if self._request is None else "body"
            self.exchange.refuse(RequestTimeout(f"the request's {what} did not arrive in time"))
        else:
            self.deadline = NEVER

    # parser -------------------------------------------------------------------------------------------------------

    def _feed(self, data: bytes) -> None:
        """Parses on: at most to the end of the request in flight."""
        try:
            rest = self._parser.feed(data)
        except HiveError as error:
            self._head_is_in()
            if self.exchange is not None:
                self.exchange.refuse(error)
            return
        request = self._request
        if self.exchange is not None and (request is None or not request.complete):
            self._await_more(request)
        elif rest:
            self._keep_ahead(rest)

    def _await_more(self, request: Request | None) -> None:
        """The rest of the head or of the body is to come: its clock, and its place among the unfinished."""
        if request is not None:
            if self._clock_at:
                received = request.body_bytes - self._clock_from
                self.deadline = body_deadline(time.monotonic(), self._clock_at, received, self.limits.body_idle_s)
            else:
                self._start_body_clock(request, time.monotonic())
        elif self._half_open_as is None:
            if self._half_open.take(self, self.owner, self.give_way):
                self._half_open_as = (self.owner,)
            elif self.exchange is not None:
                self.exchange.refuse(Saturated("too many unfinished request heads", retry_after_s=1))

    def _start_body_clock(self, request: Request, now: float) -> None:
        self._clock_at, self._clock_from = now, request.body_bytes
        self.deadline = body_deadline(now, now, 0, self.limits.body_idle_s)

    def _head_is_in(self) -> None:
        """Gives back the place among the unfinished heads: the head is in, or will never be."""
        if self._half_open_as is not None:
            self._half_open.give(self, self._half_open_as[0])
            self._half_open_as = None

    def on_head(self, request: Request) -> None:
        if self._half_open_as is not None:
            self._head_is_in()
        exchange = self.exchange
        if exchange is None:
            return
        self._request = request
        exchange.on_head(request)
        if request.expects and self.exchange is exchange and request.content_length != 0:
            self.send_continue()

    def on_body(self, request: Request, size: int) -> None:
        if request is self._request and self.exchange is not None:
            self.exchange.on_body(size)

    def on_request(self, request: Request) -> None:
        if request is self._request and self.exchange is not None:
            self.deadline = NEVER
            self.exchange.on_request(request)

    def _open(self) -> None:
        self.deadline = time.monotonic() + self.limits.head_s
        self._clock_at = 0.0
        self.exchange = self._open_exchange(self)

    def _keep_ahead(self, data: bytes) -> None:
        self._ahead += data
        if len(self._ahead) > MAX_PIPELINED:
            self._abort()
        elif self.exchange is None:
            self._go_on_soon()

    def _go_on_soon(self) -> None:
        if self._ahead and not self._full:
            asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        """The next of the pipelined requests, if the connection is still free for it."""
        if not self._ahead or self.exchange is not None or self._transport is None or self._closing:
            return
        if self._full or self._lingering:
            return
        data = bytes(self._ahead)
        self._ahead.clear()
        self.data_received(data)

    def _linger(self, now: float) -> None:
        self._lingering = True
        self.deadline = now + LINGER_S
        if self._transport is not None and self._transport.can_write_eof():
            self._transport.write_eof()

    def _abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()


def _has_unread(sock: socket.socket) -> bool:
    """Whether the kernel holds bytes of the peer. AF_VSOCK knows no FIONREAD (Linux 6.1: EOPNOTSUPP)."""
    try:
        return bool(_queued(sock.fileno(), FIONREAD))
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOTTY):
            raise
    try:
        return bool(sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    except BlockingIOError:
        return False


def _queued(descriptor: int, question: int) -> int:
    """Bytes the kernel holds: unread by us (FIONREAD), or sent by us and unread by the peer (SIOCOUTQ)."""
    return int(struct.unpack("i", fcntl.ioctl(descriptor, question, b"\0\0\0\0"))[0])
