"""Bytes both ways between two connections that no longer speak HTTP, neither faster than the other takes them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from hive.wire.deadlines import NEVER
from hive.wire.heads import BadResponse, check_unfinished_answer

LINGER_S = 2.0
"""Time for the last written bytes to be taken, once the tunnel is over."""
_END = b"\r\n\r\n"


class Keeper(Protocol):
    """The owner of a tunnel."""

    def on_bytes(self, end: TunnelEnd) -> bool:
        """Bytes have come at this end. False: they wait, and what follows them, until `go_on`."""
        ...

    def on_full(self) -> None:
        """One end takes no more for now; its `full_at` says since when."""
        ...

    def on_over(self) -> None:
        """One of the peers has left, or sends no more. May be told more than once."""
        ...


class TunnelEnd(asyncio.Protocol):
    """One end of a tunnel: bytes that come here go out at `other`. `lost` is told of the connection's end, last of all.

    A side that reads nothing stops the reading of the other side, and a side that is not read reports neither FIN nor
    RST (measured): so the tunnel's owner must not let `full_at` grow old.
    """

    __slots__ = ("_held", "_keeper", "_lost", "_transport", "full_at", "other")

    other: TunnelEnd

    def __init__(self, keeper: Keeper, lost: Callable[[Exception | None], None] | None = None) -> None:
        self._keeper = keeper
        self._lost = lost
        self._transport: asyncio.Transport | None = None
        self._held: list[bytes] = []
        self.full_at = NEVER

    def __repr__(self) -> str:
        state = "gone" if self._transport is None else "full" if self.full_at != NEVER else "open"
        return f"<TunnelEnd {state}, {sum(map(len, self._held))} B held>"

    @property
    def unsent(self) -> int:
        """Bytes that were written and the kernel has not taken."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def go_on(self) -> None:
        """Writes held bytes to the other end, and reads again."""
        held, self._held = self._held, []
        for data in held:
            self.other.write(data)
        self._read_or_not()

    def close(self) -> None:
        """Ends it once everything written is taken, or LINGER_S have passed."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        unsent = transport.get_write_buffer_size()
        transport.close()
        if unsent:
            asyncio.get_running_loop().call_later(LINGER_S, transport.abort)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _read_or_not(self) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if self._held or self.other.full_at != NEVER:
            transport.pause_reading()
        else:
            transport.resume_reading()

    # asyncio ------------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        self._read_or_not()

    def data_received(self, data: bytes) -> None:
        if self._held or not self._keeper.on_bytes(self):
            self._held.append(data)
            self._read_or_not()
        else:
            self.other.write(data)

    def pause_writing(self) -> None:
        self.full_at = time.monotonic()
        self.other._read_or_not()
        self._keeper.on_full()

    def resume_writing(self) -> None:
        self.full_at = NEVER
        self.other._read_or_not()

    def eof_received(self) -> bool:
        self._keeper.on_over()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._keeper.on_over()
        if self._lost is not None:
            self._lost(exc)


def join(one: TunnelEnd, another: TunnelEnd) -> None:
    """Two ends become a tunnel; before either has a connection."""
    one.other, another.other = another, one


class ProtocolSwitch(Protocol):
    """The receiver of an answer to a switch of protocols. One of the two methods is called, once, unless it cancels
    first."""

    def on_switch_answer(self, head: bytes, rest: bytes) -> None:
        """The whole head of the answer, looked at for its syntax only, and what came behind it."""
        ...

    def on_no_switch(self, reason: str) -> None: ...


class HeadReader(asyncio.Protocol):
    """Asks for a switch of protocols on a new connection and reads one head; `transport` is the asker's then."""

    __slots__ = ("_asker", "_head", "_request", "transport")

    def __init__(self, request: bytes, asker: ProtocolSwitch) -> None:
        self._request = request
        self._asker: ProtocolSwitch | None = asker
        self._head = b""
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        if self.transport is not None:
            self.transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        checked = len(self._head)
        self._head += data
        end = self._head.find(_END, max(0, checked - 3))
        try:
            check_unfinished_answer(self._head[: end + 4] if end >= 0 else self._head, checked, may_switch=True)
        except BadResponse as error:
            self._fail(str(error))
            return
        asker, self._asker = (self._asker, None) if end >= 0 else (None, self._asker)
        if asker is not None:
            asker.on_switch_answer(self._head[: end + 4], self._head[end + 4 :])

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self.transport = None
        self._fail("it closed the connection without an answer")

    def cancel(self) -> None:
        """Gives the answer up and closes the connection."""
        self._asker = None
        if self.transport is not None:
            self.transport.abort()

    def _fail(self, reason: str) -> None:
        asker = self._asker
        self.cancel()
        if asker is not None:
            asker.on_no_switch(reason)
