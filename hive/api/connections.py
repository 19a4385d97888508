"""One connection to the API: its peer, and the bounds on TCP that uvicorn (0.54) does not set."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple, Protocol

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from hive.audit.auth import SocketPeer
from hive.link.server import groups_of, peer_of

HEAD_S = 10.0
"""From a connection's or a request's first moment to the end of its head."""
STALLED_S = 60.0
"""So long a peer may leave unread what it asked for; an event stream says something every 15 s."""
OVERHEAD_MAX_BYTES = 64 * 1024
"""Of one request what is no body: its head, the framing of chunks, trailers. Counted by what is read at once."""
LATE_MAX_BYTES = 4 * 1024 * 1024
"""Of a body that goes on after its request was answered: cut at once, its sender would not see the answer."""
CONNECTIONS_MAX = 128
TAKE_OVER = "take_over"
"""Key in a scope's `state` of the function by which a handler takes the connection over."""
FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: text/plain\r\nretry-after: 1\r\n"
    b"content-length: 29\r\nconnection: close\r\n\r\ntoo many connections are open"
)
TOO_LONG = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: text/plain\r\n"
    b"content-length: 24\r\nconnection: close\r\n\r\nthe head has no end here"
)

MALFORMED_HEAD = b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain\r\nconnection: close\r\n\r\n"
"""Answers a HEAD: uvicorn's own answer has a body."""


class OverTcp(NamedTuple):
    """A connection on TCP. `peer` asks, `address` and `port` are what it reached.

    `trust()`: a token that is good came over it. `hang_up()`: it ends now, in the middle of an answer too.
    """

    peer: str
    address: str
    port: int
    trust: Callable[[], None]
    hang_up: Callable[[], None]


class Taker(Protocol):
    """The receiver to which a connection may go over after a request."""

    def received(self, data: bytes) -> None: ...

    def lost(self) -> None: ...


class TakeOver(NamedTuple):
    """A connection that went over. `drain()` returns once its peer has read enough of what was written."""

    transport: asyncio.Transport
    drain: Callable[[], Coroutine[Any, Any, None]]


class Crowd:
    """The connections on TCP, at most `most`: then the oldest that was never trusted has to go.

    >>> crowd, gone = Crowd(2), []
    >>> def connect(name):
    ...     return crowd.enter(name, lambda: gone.append(name))
    >>> connect("a"), crowd.trust("a"), connect("b"), connect("c"), gone
    (True, None, True, True, ['b'])
    >>> crowd.trust("c"), connect("d"), crowd
    (None, False, <Crowd 2/2, 2 trusted>)
    """

    def __init__(self, most: int = CONNECTIONS_MAX) -> None:
        self._most = most
        self._trusted: set[object] = set()
        self._others: dict[object, Callable[[], None]] = {}

    def __repr__(self) -> str:
        trusted = len(self._trusted)
        return f"<Crowd {trusted + len(self._others)}/{self._most}, {trusted} trusted>"

    def enter(self, who: object, end: Callable[[], None]) -> bool:
        """Whether there is room; `end` is called where this one has to make some."""
        if len(self._trusted) + len(self._others) >= self._most:
            if not self._others:
                return False
            oldest = next(iter(self._others))
            self._others.pop(oldest)()
        self._others[who] = end
        return True

    def trust(self, who: object) -> None:
        if self._others.pop(who, None) is not None:
            self._trusted.add(who)

    def leave(self, who: object) -> None:
        self._others.pop(who, None)
        self._trusted.discard(who)


class ApiConnection(HttpToolsProtocol):
    """Each request's scope has the peer in `state`: `peer` on a unix socket, `tcp` on TCP; and `TAKE_OVER`."""

    def __init__(self, *, crowd: Crowd, **given: Any) -> None:
        super().__init__(**given)
        self._crowd = crowd
        self._over_tcp = False
        self._clock: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None
        self._overhead = self._body = self._late = 0
        self._taker: Taker | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        sock = transport.get_extra_info("socket")
        self._over_tcp = sock.family != socket.AF_UNIX
        found = self._tcp(transport, sock) if self._over_tcp else _peer(sock)
        self.app_state = {**self.app_state, **found, TAKE_OVER: self._take_over}
        super().connection_made(transport)
        if self._over_tcp:
            if self._crowd.enter(self, transport.abort):
                self._await_head()
            else:
                transport.write(FULL)
                transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._crowd.leave(self)
        self._head_is_here()
        self._flows()
        if self._taker is not None:
            self._taker.lost()
        super().connection_lost(exc)

    def _take_over(self, taker: Taker) -> TakeOver:
        """Ends HTTP on it: what arrives is the taker's, which alone writes and closes.

        Call it instead of an answer. Where the peer has left already, `taker.lost()` is called at once.
        """
        self._taker = taker
        self.cycle.response_started = self.cycle.response_complete = True
        if self.cycle.disconnected or self.transport.is_closing():
            taker.lost()
        elif self._over_tcp:
            _watch_peer(self.transport.get_extra_info("socket"))
        return TakeOver(self.transport, self.flow.drain)

    def data_received(self, data: bytes) -> None:
        if self._taker is not None:
            self._taker.received(data)
            return
        if not self._over_tcp:
            super().data_received(data)
            return
        if not self._is_answering and self._clock is None:
            self._await_head()
        before = self._body
        super().data_received(data)
        self._overhead += len(data) - (self._body - before)
        if self._overhead > OVERHEAD_MAX_BYTES and not self.transport.is_closing():
            self._end(TOO_LONG)

    def on_message_begin(self) -> None:
        if self._over_tcp and self._is_answering:
            raise ValueError("one request at a time")  # each of a pipeline's would be kept, as many as there are
        self._overhead = self._late = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._head_is_here()
        if self.url[:1] != b"/":
            raise ValueError("the target is a path")  # with a host in it, that would count, and Host is what is checked
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._body += len(body)
        super().on_body(body)
        self._late += len(body) if self.cycle.response_complete else 0
        if self._over_tcp and self._late > LATE_MAX_BYTES:
            self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        if self._is_answering:
            self.transport.abort()  # it would stand in the middle of another answer
        elif self.parser.get_method() == b"HEAD":
            self._end(MALFORMED_HEAD)
        else:
            super().send_400_response(msg)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._over_tcp and self._taker is None:
            self._stalled = self.loop.call_later(STALLED_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._flows()

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _tcp(self, transport: asyncio.Transport, sock: socket.socket) -> dict[str, OverTcp]:
        peer, (address, port) = transport.get_extra_info("peername"), sock.getsockname()[:2]
        name = str(peer[0]) if peer else ""
        return {"tcp": OverTcp(name, str(address), port, lambda: self._crowd.trust(self), transport.abort)}

    def _await_head(self) -> None:
        self._clock = self.loop.call_later(HEAD_S, self.transport.abort)

    def _head_is_here(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None

    def _flows(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def _end(self, answer: bytes) -> None:
        if not self._is_answering:
            self.transport.write(answer)
            self.transport.close()
        else:
            self.transport.abort()


def _peer(sock: socket.socket) -> dict[str, SocketPeer]:
    """uvicorn's scope shows no peer on unix sockets, so each connection notes its own."""
    _, uid, _ = peer_of(sock)
    return {"peer": SocketPeer(uid, groups_of(sock))}


def _watch_peer(sock: socket.socket) -> None:
    """Makes the loss of the peer's machine noticed within a minute, also on a silent connection."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3)):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
