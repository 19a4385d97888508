"""The admin socket: liveness, readiness, counters and the queue of the proxy. Plain HTTP/1.1 over AF_UNIX.

The socket's mode decides about access: the proxy's own user, in an installed Hive also the group hive. The socket
shares the parser of the data path and none of its limits, so it answers while those refuse.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator

import msgspec

from hive.dialects.errors import error_fields, render
from hive.domain import Dialect
from hive.errors import BadRequest, HiveError, MethodNotAllowed, NotFound
from hive.proxy.connection_limits import turn_away
from hive.proxy.metrics import CONTENT_TYPE, Metrics
from hive.wire import connection as wire
from hive.wire.budget import HalfOpen
from hive.wire.deadlines import Deadlines
from hive.wire.http1 import Request, head_start

CONNECTIONS_MAX = 32
LIMITS = wire.ConnectionLimits(head_s=5.0, body_idle_s=5.0, keepalive_s=75.0, max_body=0)
JSON = b"application/json"


class Admin:
    """The answers of the admin socket. `not_ready()`: the reason why the proxy should get no new callers, empty if it
    should; `queue()`: the waiting and running requests, as a value that JSON can hold."""

    def __init__(self, metrics: Metrics, *, not_ready: Callable[[], str], queue: Callable[[], object]) -> None:
        self._metrics = metrics
        self._not_ready = not_ready
        self._queue = queue

    def answer(self, target: bytes) -> tuple[int, bytes, Iterator[bytes]]:
        """(status, content type, pieces of the body). Each piece costs 1 to 2 ms. Raises NotFound."""
        match target.partition(b"?")[0]:
            case b"/metrics":
                return 200, CONTENT_TYPE, self._metrics.exposition()
            case b"/healthz":
                return 200, JSON, _json({"status": "alive"})
            case b"/readyz":
                reason = self._not_ready()
                return (503, JSON, _json({"status": reason})) if reason else (200, JSON, _json({"status": "ready"}))
            case b"/queue":
                return 200, JSON, _json(self._queue())
        raise NotFound("there are /metrics, /healthz, /readyz and /queue")


def _json(found: object) -> Iterator[bytes]:
    yield msgspec.json.encode(found) + b"\n"


class AdminExchange:
    """One question and its answer."""

    parked = False

    def __init__(self, admin: Admin, connection: wire.Connection) -> None:
        self._admin = admin
        self._connection = connection
        self._request: Request | None = None
        self._content: list[bytes] = []
        self._over = False

    def on_head(self, request: Request) -> None:
        self._request = request

    def on_body(self, size: int) -> None:  # noqa: ARG002
        raise BadRequest("no question here has a body")

    def on_request(self, request: Request) -> None:
        if request.method not in (b"GET", b"HEAD"):
            self.refuse(MethodNotAllowed(allow="GET, HEAD"))
            return
        try:
            status, content_type, pieces = self._admin.answer(request.target)
        except HiveError as error:
            self.refuse(error)
            return
        self._gather(status, content_type, pieces)

    def _gather(self, status: int, content_type: bytes, pieces: Iterator[bytes]) -> None:
        """One piece a round of the loop: a scrape must not hold the data path up."""
        if self._over:
            return
        try:
            piece = next(pieces, None)
        except Exception as error:
            self.refuse(HiveError(f"this cannot be told: {error!r}"))
            raise
        if piece is None:
            self._answer(status, b"content-type: %b\r\n" % content_type, b"".join(self._content))
            return
        self._content.append(piece)
        asyncio.get_running_loop().call_soon(self._gather, status, content_type, pieces)

    def refuse(self, error: HiveError) -> None:
        if not self._over:
            fields = b"content-type: %b\r\n" % JSON + error_fields(error)
            self._answer(error.status, fields, render(error, Dialect.OPENAI))

    def _answer(self, status: int, fields: bytes, content: bytes) -> None:
        self._over = True
        request = self._request
        keep = request is not None and request.complete and request.keep_alive
        closing = b"" if keep else b"connection: close\r\n"
        head = b"%b%bcontent-length: %d\r\n%b\r\n" % (head_start(status), fields, len(content), closing)
        self._connection.write(head if self._connection.asks_head else head + content)
        self._connection.finished(keep=keep)

    def on_gone(self) -> None:
        self._over = True

    def on_blocked(self) -> None: ...

    def on_unblocked(self) -> None: ...


class AdminSocket:
    """Makes the connections of the admin socket, CONNECTIONS_MAX at once."""

    def __init__(self, admin: Admin, deadlines: Deadlines) -> None:
        self._admin = admin
        self._deadlines = deadlines
        self._half_open = HalfOpen()
        self._connections: set[wire.Connection] = set()

    def __repr__(self) -> str:
        return f"<AdminSocket {len(self._connections)}/{CONNECTIONS_MAX} connections>"

    def connect(self, sock: socket.socket) -> wire.Connection | None:
        if len(self._connections) >= CONNECTIONS_MAX:
            turn_away(sock)
            return None
        connection = wire.Connection(
            sock,
            limits=LIMITS,
            deadlines=self._deadlines,
            open_exchange=lambda connection: AdminExchange(self._admin, connection),
            stays_open=lambda _: False,
            on_closed=self._connections.discard,
            half_open=self._half_open,
        )
        self._connections.add(connection)
        return connection

    def close(self) -> None:
        for connection in list(self._connections):
            connection.close()
