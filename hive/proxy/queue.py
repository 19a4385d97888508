"""The places of the backend, and the one queue of requests that wait for a place. Pure, no clock of its own.

A higher band always goes first. Inside a band the tenant goes that has had the fewest tokens for its weight, of that
tenant the agent that has had the fewest, of that agent the request that came first; each band counts for itself. An
expected cost is charged with the place and corrected when the place is given back. A tenant or agent that begins to
wait is lifted to the least served of those that could have a turn: being idle saves nothing up. Tokens had while no
other request waited for them are held against nobody. A place is never idle while a request waits whose agent is below
its own limit.
"""

from __future__ import annotations

import math
from enum import Enum
from typing import Generic, TypeVar

from hive.domain import Band
from hive.link.requests import QueueView, TenantView
from hive.proxy.drain_rate import Pace
from hive.proxy.fair_share import (
    RANKS,
    REBASE_TOKENS,
    Flow,
    Flows,
    SharePosition,
    choose_yielding,
    floor_of,
    least_served,
)

__all__ = ["FairQueue", "Flow", "QueueVerdict", "QueueView", "TenantView"]

NEVER = math.inf
RETRY_MAX_S = 120.0
UNMEASURED_MAX_S = 5.0
"""Longest guess for `Retry-After` if no request has waited to the end yet."""

Waiter = TypeVar("Waiter")
"""Anything hashable by identity."""


class QueueVerdict(Enum):
    """The answer of `ask`. GO: the request owns a place. WAIT: it has a position in line. FULL: it was not taken."""

    GO = "go"
    WAIT = "wait"
    FULL = "full"


_GO = QueueVerdict.GO  # a look-up on an Enum class costs as much as all the sums of `ask`
_NORMAL = Band.NORMAL


class FairQueue(Generic[Waiter]):
    """`places` requests at the backend at once (None: any number), `depth` more of each tenant waiting.

    A place has one owner: the request that was told GO, or was returned by a method since, until it calls `leave`.
    `displaced`: requests that lost their position to the one that was just told WAIT; the caller empties it and refuses
    them. They own nothing any more, so their `leave` changes nothing.

    >>> queue: FairQueue[str] = FairQueue(depth=2, places=1)
    >>> ann = queue.flow("ann", "acme", limit=5)
    >>> ben = queue.flow("ben", "other", limit=5)
    >>> [queue.ask(name, ann, expected=100, now=0.0).value for name in ("a1", "a2", "a3", "a4")]
    ['go', 'wait', 'wait', 'full']
    >>> queue.ask("b1", ben, expected=100, now=1.0).value, queue
    ('wait', <FairQueue 3 waiting, 1/1 running>)
    >>> queue.leave("a1", ann, now=2.0, cost=140), queue.leave("b1", ben, now=3.0)
    (['b1'], ['a2'])
    """

    __slots__ = ("_flows", "_pace", "_places", "_running", "_waiting", "depth", "displaced")

    def __init__(self, *, depth: int, places: int | None = None) -> None:
        self.depth = depth
        self.displaced: list[Waiter] = []
        self._places: float = math.inf if places is None else places
        self._running: dict[Waiter, tuple[SharePosition, float, float]] = {}
        """Running requests with their expected cost and the time they got the place (NEVER if no time was given)."""
        self._waiting = 0
        self._flows = Flows()
        self._pace = Pace()

    def __repr__(self) -> str:
        of = "" if self.places is None else f"/{self.places}"
        return f"<FairQueue {self._waiting} waiting, {len(self._running)}{of} running>"

    @property
    def places(self) -> int | None:
        return None if self._places == math.inf else int(self._places)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return self._waiting

    # the flows ----------------------------------------------------------------------------------------------------

    def flow(self, agent: str, tenant: str, *, limit: int, weight: float = 1.0) -> Flow:
        """The agent's position under this tenant. `limit`: its requests at the backend at once.

        The first of an agent is its own; more of them (an operator speaking for tenants) have the limit each for
        itself, and are forgotten when long unused. A known one keeps its limit; the weight is its tenant's from now on.
        """
        return self._flows.flow(agent, tenant, limit=limit, weight=weight)

    def move(self, flow: Flow, *, tenant: str, limit: int, weight: float) -> list[Waiter]:
        """Sets its tenant, limit and weight; returns the requests that get a place by that.

        Its waiting requests move along, even beyond the depth. What it has had under another tenant is not counted
        here.
        """
        self._flows.move(flow, tenant, weight)
        return self.set_limit(flow, limit)

    def forget(self, flow: Flow) -> None:
        """The agent is removed, its flows under other tenants too. Its running and waiting requests still leave as
        ever."""
        self._flows.forget(flow)

    def set_limit(self, flow: Flow, limit: int) -> list[Waiter]:
        """Sets how many of its requests may run; running ones beyond that finish. Returns the requests that get a place
        by that."""
        flow.limit = limit
        flow.refresh()
        return self._admit(None)

    def set_weight(self, tenant: str, weight: float) -> None:
        """Sets the weight of a tenant; what it has had stays as it was counted. It never frees a place."""
        if tenant in self._flows.lines:
            self._flows.line(tenant, weight)

    def resize(self, places: int | None) -> list[Waiter]:
        """Sets the number of places; running requests beyond it finish. Returns the requests that get a place by
        that."""
        self._places = math.inf if places is None else places
        return self._admit(None)

    # the turn of a request ----------------------------------------------------------------------------------------

    def ask(self, waiter: Waiter, flow: Flow, *, band: Band = _NORMAL, expected: float, now: float) -> QueueVerdict:
        """A place, or a position in line, or neither. `expected`: tokens it will probably cost; `now`: monotonic
        seconds.

        After WAIT look at `displaced`. FULL has given position credit already.
        """
        position = flow.normal if band is _NORMAL else flow.position(band)
        running = self._running
        if flow.running >= flow.limit or len(running) >= self._places:
            return self._line_up(waiter, position, expected, now)
        # a place is free, so no request waits that could have it: one that begins to wait later does not stand behind
        # this one
        account = position.account
        level = account.level
        if account.settled > level.floor:
            level.floor = account.settled
        if position.settled > account.floor:
            account.floor = position.settled
        account.pending += expected
        position.pending += expected
        flow.running += 1
        flow.credit_until = 0.0
        running[waiter] = (position, expected, now)
        return _GO

    def leave(self, waiter: Waiter, flow: Flow, *, now: float, cost: float | None = None) -> list[Waiter]:
        """Gives back its place or its position; returns the requests that get a place by that: they own it already.

        `cost`: tokens it took; None if unknown, then the expectation stands.
        """
        owned = self._running.pop(waiter, None)
        if owned is None:
            self._step_out(waiter, flow, now)
            return []
        position, expected, begun_at = owned
        if cost is None:
            cost = expected
        if begun_at <= now:
            flow.line.learn_held(now - begun_at)
        account = position.account
        account.pending -= expected
        account.settled += cost * account.price
        position.pending -= expected
        position.settled += cost
        flow.running -= 1
        if not self._waiting:
            return []
        self._pace.count(now)
        if flow.waiting:
            flow.refresh()
        return self._admit(now)

    def refused(self, flow: Flow, now: float) -> None:
        """Gives position credit for 120 s to the agent of a request that was answered 503 because its wait was too
        long.

        With credit it is not lifted when it comes back, so it goes before later ones. If its tenant's line is full, it
        takes the position of a later request of an agent with a longer line.
        """
        flow.give_credit(now, now)

    # figures ------------------------------------------------------------------------------------------------------

    def retry_after_s(self, flow: Flow, now: float) -> float:
        """Seconds until the requests of its tenant that wait now will have had their turn, as measured lately: 1 to
        120.

        If no request has waited to the end yet: as long as its requests had their places lately, for each that goes
        before in the same place. With nothing measured at all: a second for each of these, at most 5. Never less than
        the time that requests have waited since the last turn.
        """
        line = flow.line
        ahead = max(1, line.waiting)
        per_s = line.pace.per_s(now)
        if per_s is not None:
            guess_s = ahead / per_s
        else:
            limits = sum(other.limit for other in line.waits) or flow.limit
            rounds = ahead / max(1.0, min(self._places, limits))
            held_s = line.mean_held_s
            guess_s = min(UNMEASURED_MAX_S, rounds) if held_s is None else rounds * held_s
        return min(RETRY_MAX_S, max(1.0, guess_s, line.pace.stuck_s(now)))

    def view(self, now: float) -> QueueView:
        """The queue at this moment. Running and waiting requests of forgotten agents are in the totals only."""
        flows, rank = self._flows, RANKS[_NORMAL]
        running: dict[str, int] = {}
        for flow in flows.by_key.values():
            running[flow.tenant] = running.get(flow.tenant, 0) + flow.running
        accounts = {name: line.accounts[rank] for name, line in flows.lines.items()}
        floor = flows.levels[rank].floor
        tokens = {name: max(share.settled, floor) + share.pending * share.price for name, share in accounts.items()}
        least = min(tokens.values(), default=0.0)
        rows = [
            TenantView(name, 1.0 / line.price, running.get(name, 0), line.waiting, round(tokens[name] - least, 1))
            for name, line in flows.lines.items()
        ]
        return QueueView(len(self._running), self._waiting, self.places, self._pace.per_s(now), rows)

    # the line -----------------------------------------------------------------------------------------------------

    def _line_up(self, waiter: Waiter, position: SharePosition, expected: float, now: float) -> QueueVerdict:
        flow = position.flow
        if not flow.kept:
            self._flows.keep_again(flow)
        account = position.account
        if account.level.floor > REBASE_TOKENS:
            self._flows.rebase(account.level)
        has_credit = flow.credit_until > now
        if not account.waiting:
            account.lift(floor_of(account.level, lagging=has_credit))
        if not position.waiters:
            position.lift(floor_of(account, lagging=has_credit))
        if flow.line.waiting >= self.depth and not self._make_room(position, now):
            flow.give_credit(now, now)
            return QueueVerdict.FULL
        self._pace.begin(now)
        flow.line.pace.begin(now)
        position.put(waiter, (expected, now, flow.credit_since if has_credit else now))
        flow.credit_until = 0.0
        self._waiting += 1
        return QueueVerdict.WAIT

    def _make_room(self, position: SharePosition, now: float) -> bool:
        yields = choose_yielding(position, now)
        if yields is None:
            return False
        last, waiter = yields
        _, _, since = self._take(last, waiter, now)
        last.flow.give_credit(since, now)
        self.displaced.append(waiter)
        return True

    def _step_out(self, waiter: Waiter, flow: Flow, now: float) -> None:
        for position in flow.positions:
            if position is not None and waiter in position.waiters:
                _, asked_at, _ = self._take(position, waiter, now)
                flow.line.learn_wait(now - asked_at)
                return

    def _admit(self, now: float | None) -> list[Waiter]:
        """Gives the free places away. Without `now` nothing is learnt of the waits."""
        admitted: list[Waiter] = []
        running = self._running
        while len(running) < self._places and (position := self._next()) is not None:
            waiter: Waiter = next(iter(position.waiters))
            flow = position.flow
            flow.running += 1
            if now is not None:
                flow.line.pace.count(now)
            expected, asked_at, _ = self._take(position, waiter, now)
            running[waiter] = (position, expected, NEVER if now is None else now)
            position.pending += expected
            position.account.pending += expected
            if now is not None:
                flow.line.learn_wait(now - asked_at)
            admitted.append(waiter)
        return admitted

    def _next(self) -> SharePosition | None:
        for level in self._flows.levels:
            if level.ready:
                account, level.floor = least_served(level.ready)
                position, account.floor = least_served(account.ready)
                return position
        return None

    def _take(self, position: SharePosition, waiter: object, now: float | None) -> tuple[float, float, float]:
        """Takes it out of the line; after the last one there is nothing to measure any more."""
        ticket = position.take(waiter)
        flow = position.flow
        flow.refresh()
        self._waiting -= 1
        if not flow.line.waiting:
            flow.line.pace.end(now)
            self._flows.drop_unused(flow.line)
        if not self._waiting:
            self._pace.end(now)
        return ticket
