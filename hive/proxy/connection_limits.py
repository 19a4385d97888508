"""The cap on connections, the answer to one too many, and a limit for repeated log lines."""

from __future__ import annotations

import asyncio
import socket

from hive.dialects.errors import error_fields, render
from hive.domain import Dialect
from hive.errors import Saturated
from hive.wire.http1 import answer_head

RESERVE = 128
"""Descriptors that are no caller's: listeners, links, the spool, the admin socket, those just turned away."""
TURNED_AWAY_MAX = 64
"""Connections turned away that may wait at once for their client to read why."""
LINGER_S = 1.0
SELDOM_S = 1.0
RETRY_AFTER_S = 1


def connections_allowed(asked: int, descriptors: int) -> int:
    """The number of connections that may be open at once; each may need a second descriptor, to the backend.

    `asked`: `connections_max`, 0 for what the limit of open files (`descriptors`) allows.

    >>> connections_allowed(0, 1024), connections_allowed(100, 1024), connections_allowed(5000, 1024)
    (448, 100, 896)
    """
    room = max(1, descriptors - RESERVE)
    return min(asked, room) if asked else max(1, room // 2)


_ERROR = Saturated("too many connections", retry_after_s=RETRY_AFTER_S)
_CONTENT = render(_ERROR, Dialect.OPENAI)


def no_room(*, asks_head: bool = False) -> bytes:
    """The answer to one connection too many; without its body where a HEAD is seen to ask."""
    head = answer_head(_ERROR.status, len(_CONTENT), error_fields(_ERROR), keep=False)
    return head if asks_head else head + _CONTENT


def turn_away(sock: socket.socket) -> None:
    """Answers one connection too many without reading its request, and closes it. Takes the descriptor over."""
    _TurnedAway(socket.socket(fileno=sock.detach()))


class _TurnedAway:
    """A connection whose bytes are dropped, for LINGER_S at most: if it were closed at once, the client would see a
    reset and no answer.

    A plain socket: these are the connections for which there shall be neither parser nor transport.
    """

    waiting = 0

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        sock.setblocking(False)
        try:
            sock.send(no_room(asks_head=_asks_head(sock)))
            sock.shutdown(socket.SHUT_WR)
        except OSError:  # it left
            sock.close()
            return
        if _TurnedAway.waiting >= TURNED_AWAY_MAX:
            sock.close()
            return
        _TurnedAway.waiting += 1
        self._timer = self._loop.call_later(LINGER_S, self._close)
        self._loop.add_reader(sock.fileno(), self._drop)

    def _drop(self) -> None:
        try:
            data = self._sock.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._close()

    def _close(self) -> None:
        _TurnedAway.waiting -= 1
        self._timer.cancel()
        self._loop.remove_reader(self._sock.fileno())
        self._sock.close()


def _asks_head(sock: socket.socket) -> bool:
    """Looks at what has come: does it begin with HEAD? Raises OSError where the client left."""
    try:
        return sock.recv(5, socket.MSG_PEEK) == b"HEAD "
    except BlockingIOError:
        return False


class Seldom:
    """A limit of one log line per kind and second; the next line says how many were left out.

    >>> seldom = Seldom()
    >>> [seldom.left_out("full", now) for now in (0.0, 0.1, 0.2, 1.5)]     # None: say nothing now
    [0, None, None, 2]
    """

    def __init__(self) -> None:
        self._said_at: dict[str, float] = {}
        self._left_out: dict[str, int] = {}

    def left_out(self, kind: str, now: float) -> int | None:
        """The number of lines of this kind left out since the last one written; None if this one is to be left out
        too."""
        said_at = self._said_at.get(kind)
        if said_at is not None and now - said_at < SELDOM_S:
            self._left_out[kind] = self._left_out.get(kind, 0) + 1
            return None
        self._said_at[kind] = now
        return self._left_out.pop(kind, 0)
