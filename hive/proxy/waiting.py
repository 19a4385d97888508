"""The base of requests to the model and of requests to an agent: a gate to wait at, a client that may leave, things
taken that must be given back, and one way to answer with an error."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod

from hive.dialects.errors import error_fields, render
from hive.domain import Dialect
from hive.errors import AgentAsleep, HiveError, Saturated
from hive.proxy.body_budget import BodyBudget, BodyShare
from hive.proxy.registry import AgentEntry
from hive.proxy.wakes import WakeTimes
from hive.wire.connection import Connection
from hive.wire.deadlines import NEVER, Deadlines
from hive.wire.http1 import Request, answer_head
from hive.wire.upstream import UpstreamConnection

FULL = "the request bodies held at once exceed Hive's budget, or this agent's share of it"
DISPLACED = "this upload gave way to another agent's: the request bodies held at once exceed Hive's budget"


def no_room_for_bodies() -> Saturated:
    return Saturated(FULL, retry_after_s=2)


class WaitingRequest(ABC):
    """One request, to the model or to an agent. Made at its first byte; `_release` is called once, on every exit.

    `parked`: it waits for its agent to wake. `deadline`: when `on_deadline` is due, on the monotonic clock.
    """

    __slots__ = (
        "_begun_at",
        "_blocked",
        "_bodies",
        "_body_bytes",
        "_budget",
        "_connection",
        "_deadlines",
        "_entered",
        "_entry",
        "_left",
        "_ready",
        "_refusal",
        "_request",
        "_upstream",
        "deadline",
        "parked",
    )

    def __init__(self, connection: Connection, deadlines: Deadlines, budget: BodyBudget) -> None:
        self._connection = connection
        self._deadlines = deadlines
        self._budget = budget
        self._begun_at = time.monotonic()
        self.deadline = NEVER
        self.parked = False
        self._entry: AgentEntry | None = None
        self._request: Request | None = None
        self._refusal: HiveError | None = None
        self._upstream: UpstreamConnection | None = None
        self._entered = self._ready = self._left = self._blocked = False
        self._bodies: BodyShare | None = None
        """Share of the budget that its body takes; known before a body is read."""
        self._body_bytes = 0
        deadlines.add(self)

    @abstractmethod
    def refuse(self, error: HiveError) -> None:
        """Ends with this error; nothing where it has ended already."""

    @abstractmethod
    def on_deadline(self, now: float) -> None:
        """`deadline` has passed."""

    @abstractmethod
    def _proceed(self) -> None:
        """The request is ready and the gate is open."""

    def _counts_for(self, entry: AgentEntry, bodies: BodyShare) -> None:
        """Makes it this agent's until `_release`, at the gate too."""
        self._entry, self._bodies = entry, bodies
        self._entered = True

    def on_body(self, size: int) -> None:
        request, share, budget = self._request, self._bodies, self._budget
        if self._refusal is not None or share is None or request is None:
            return
        if not budget.take(share, size):
            raise no_room_for_bodies()
        self._body_bytes += size
        if request.body_bytes != request.content_length:
            budget.goes_on(share, self, size)
        while budget.displaced:
            budget.displaced.pop().on_body_displaced()

    def _hold_more(self, size: int) -> bool:
        """Counts bytes beside those of the body, which is in, until `_release`; False where there is no room."""
        share, budget = self._bodies, self._budget
        if share is None or size <= 0:
            return True
        if not budget.take(share, size):
            return False
        self._body_bytes += size
        while budget.displaced:
            budget.displaced.pop().on_body_displaced()
        return True

    def _body_is_in(self) -> None:
        """Ends its time as an upload: no other upload displaces it any more."""
        share = self._bodies
        if share is not None and share.uploads:
            self._budget.ended(share, self)

    def on_body_displaced(self) -> None:
        """Ends with a refusal while its body is coming in, as its room went to another agent."""
        self.refuse(
            Saturated("this upload gave way: the request bodies held at once exceed Hive's budget", retry_after_s=2)
        )

    def on_gate_open(self) -> None:
        self.parked = False
        self.deadline = NEVER
        if self._left:
            return
        if self._ready:
            self._proceed()
        elif self._request is None or not self._request.complete:
            self._connection.restart_clock()

    def on_gate_refused(self, error: HiveError) -> None:
        self.parked = False
        if not self._left:
            self.refuse(error)

    def _refuse_as_asleep(self, within_s: float, wakes: WakeTimes) -> None:
        """Refuses it, as its deadline has passed before the gate opened."""
        self.parked = False
        wait_s = wakes.retry_after_s(within_s)
        self.refuse(AgentAsleep(f"the agent did not wake within {within_s:g} s", retry_after_s=wait_s))

    def on_blocked(self) -> None:
        self._blocked = True
        if self._upstream is not None:
            self._upstream.pause()

    def on_unblocked(self) -> None:
        self._blocked = False
        if self._upstream is not None:
            self._upstream.resume()

    def _answer_with(self, error: HiveError, dialect: Dialect, own_fields: bytes = b"", request_id: str = "") -> bool:
        """Writes an error as the whole answer. Whether the connection can be kept."""
        request = self._request
        keep = request is not None and request.complete and request.keep_alive
        content = render(error, dialect, request_id)
        head = answer_head(error.status, len(content), own_fields + error_fields(error), keep=keep)
        self._connection.write(head if self._connection.asks_head else head + content)
        return keep

    def _release(self) -> None:
        """Gives back the connection upstream, the clock, and the room the body took."""
        self._left = True
        self._deadlines.discard(self)
        if self._upstream is not None:
            self._upstream.cancel()
            self._upstream = None
        share = self._bodies
        if share is not None:
            if share.uploads:
                self._budget.ended(share, self)
            self._budget.give(share, self._body_bytes)
