"""A request that was given up, at a server that stops late: it keeps its place until the server has stopped.

A runner works on one window of sound, or one step of a picture, at a time, and stops between two. Were the place free
before that, the next request would wait at the server instead of in the line, where its turn is fair.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from hive.errors import HiveError
from hive.wire.deadlines import NEVER, Deadlines
from hive.wire.http1 import Response
from hive.wire.upstream import UpstreamConnection

if TYPE_CHECKING:
    from hive.proxy.datapath import Prepared
    from hive.proxy.forward import Exchange

STATE = "cancelling"
"""Its state in `hive queue`."""


class Stopping:
    """One such request, until its server closes the connection, or answers, or `within_s` is over: then `leave` is
    called, once, with the time. `exchange`, `prepared`: the request, which has left otherwise."""

    __slots__ = ("_connection", "_deadlines", "_leave", "deadline", "exchange", "prepared")

    def __init__(
        self,
        exchange: Exchange,
        prepared: Prepared,
        connection: UpstreamConnection,
        deadlines: Deadlines,
        leave: Callable[[Stopping, float], None],
        *,
        within_s: float,
    ) -> None:
        self._connection: UpstreamConnection | None = connection
        self._deadlines = deadlines
        self._leave = leave
        self.exchange = exchange
        self.prepared = prepared
        self.deadline = time.monotonic() + within_s
        deadlines.add(self)
        connection.end_early(self)

    def __repr__(self) -> str:
        return f"<Stopping {self.exchange.request_id} {'over' if self._connection is None else 'under way'}>"

    def on_answer(self, head: Response) -> None:
        """Nobody is there to read it."""

    def on_data(self, data: bytes, *, last: bool) -> None:  # noqa: ARG002
        if last:
            self._end()

    def on_closed(self) -> None:
        self._end()

    def on_failed(self, error: HiveError, *, retry: bool) -> None:  # noqa: ARG002
        self._end()

    def on_deadline(self, now: float) -> None:  # noqa: ARG002
        """The server does not stop: its place is given back all the same, as that of a server that hangs is."""
        if self._connection is not None:
            self._connection.cancel()
        self._end()

    def _end(self) -> None:
        if self._connection is not None:
            self._connection = None
            self.deadline = NEVER
            self._deadlines.discard(self)
            self._leave(self, time.monotonic())
