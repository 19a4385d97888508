"""A WebSocket between a caller and an agent, once both have switched: it keeps the agent awake, or lets it sleep.

An open one counts as ingress, so its agent stays awake (design.md §4: busy while ingress is open). With
`websocket_idle_s` one on which no byte has passed for so long counts no more: the agent may sleep, the caller's
connection stays, and the caller's next byte wakes the agent and waits for it as a request does. Pings are bytes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import NamedTuple

from hive.errors import AgentAsleep, HiveError, RequestTimeout
from hive.proxy.registry import AgentEntry
from hive.queue.gate import GateState
from hive.wire.connection import Connection
from hive.wire.deadlines import NEVER, Deadlines
from hive.wire.tunnel import TunnelEnd, join

log = logging.getLogger("hive.proxy")


class Clocks(NamedTuple):
    """Seconds. `idle_s`: without a byte for so long it counts no more, 0 for never; `stalled_s`: one side may take
    nothing for so long; `wake_s`: what the caller sends to a sleeping agent waits for so long."""

    idle_s: float
    stalled_s: float
    wake_s: float


class WebSocket:
    """One open WebSocket. It has taken over the count at the gate of the request that opened it.

    `end()` is called where it is over, `give_up(error)` where it cannot go on; both call `close` in turn.
    """

    def __init__(
        self,
        entry: AgentEntry,
        clocks: Clocks,
        deadlines: Deadlines,
        *,
        end: Callable[[], None],
        give_up: Callable[[HiveError], None],
    ) -> None:
        self._entry = entry
        self._clocks = clocks
        self._deadlines = deadlines
        self._end = end
        self._give_up = give_up
        self._agent = TunnelEnd(self)
        self._caller = self._agent
        self._counted = True
        self._parked_until = NEVER
        self._closed = False
        self._last_at = time.monotonic()
        self._look_again()
        deadlines.add(self)

    def __repr__(self) -> str:
        state = "closed" if self._closed else "parked" if self._parked else "open" if self._counted else "idle"
        return f"<WebSocket {self._entry.row.name} {state}>"

    @property
    def _parked(self) -> bool:
        return self._parked_until != NEVER

    def open(self, connection: Connection, agent: asyncio.Transport, first: bytes) -> None:
        """Joins the two; `first`: what the agent sent right behind its answer."""
        self._caller = TunnelEnd(self, connection.connection_lost)
        join(self._caller, self._agent)
        agent.set_protocol(self._agent)
        self._agent.connection_made(agent)
        connection.switch(self._caller)
        if first:
            self._agent.data_received(first)

    def leave(self) -> None:
        """Hive is leaving: it ends, between two bytes, and its caller sees a plain close."""
        if not self._closed:
            self._end()

    def close(self) -> None:
        """Gives back the count, and ends the agent's side once it has taken what was sent. The caller's is not ours."""
        if self._closed:
            return
        self._closed = True
        self._deadlines.discard(self)
        self._entry.gate.unpark(self)
        if self._counted:
            self._counted = False
            self._entry.gate.end(time.monotonic(), ingress=True)
        self._agent.close()

    # Keeper of the tunnel ------------------------------------------------------------------------------------------

    def on_bytes(self, end: TunnelEnd) -> bool:
        self._last_at = now = time.monotonic()
        if self._counted:
            return True
        gate = self._entry.gate
        if end is self._agent and gate.state is not GateState.OPEN:
            return True  # bytes it had sent before it was frozen
        self._counted = True
        try:
            passes = gate.begin(self, now, ingress=True)
        except AgentAsleep as error:
            self._refuse(error)
            return False
        if not passes:
            self._parked_until = now + self._clocks.wake_s
        self._look_again()
        return passes

    def on_full(self) -> None:
        self._look_again()

    def on_over(self) -> None:
        if not self._closed:
            self._end()

    # before the gate ----------------------------------------------------------------------------------------------

    def on_gate_open(self) -> None:
        self._parked_until = NEVER
        self._look_again()
        self._caller.go_on()

    def on_gate_refused(self, error: HiveError) -> None:
        self._refuse(error)

    # clocks -------------------------------------------------------------------------------------------------------

    def on_deadline(self, now: float) -> None:
        clocks = self._clocks
        if now >= self._parked_until:
            self._refuse(AgentAsleep(f"the agent did not wake within {clocks.wake_s:g} s"))
        elif now >= self._full_at() + clocks.stalled_s:
            self._refuse(RequestTimeout(f"one side took nothing for {clocks.stalled_s:g} s"))
        elif now >= self._idle_at():
            if self._agent.unsent:
                self._last_at = now
            else:
                self._counted = False
                self._entry.gate.end(now, ingress=True)
        self._look_again()

    def _look_again(self) -> None:
        self.deadline = min(self._parked_until, self._full_at() + self._clocks.stalled_s, self._idle_at())

    def _full_at(self) -> float:
        return min(self._caller.full_at, self._agent.full_at)

    def _idle_at(self) -> float:
        """The time at which it counts as idle, if nothing comes."""
        can_idle = self._clocks.idle_s and self._counted and not self._parked and self._full_at() == NEVER
        return self._last_at + self._clocks.idle_s if can_idle else NEVER

    def _refuse(self, error: HiveError) -> None:
        if not self._closed:
            log.info("websocket_cut agent=%s reason=%r", self._entry.row.name, error.message)
            self._agent.abort()
            self._give_up(error)
