"""The places of one server, the requests that wait for one, and what all such lines share. Pure, no clock of its own.

A higher band always goes first. Inside a band the tenant goes that has had the fewest tokens for its weight, of that
tenant the agent that has had the fewest, of that agent the request that came first; each band counts for itself. An
expected cost is charged with the place and corrected when the place is given back. A tenant or agent that begins to
wait is lifted to the least served of those that could have a turn: being idle saves nothing up. Tokens had while no
other request waited for them are held against nobody. A place is never idle while a request waits for it whose agent is
below its own limit.

There is a line for each server. An agent's limit is one for all of them, and what a tenant or agent is given in one
line while it waits in another one counts there too, up to a bound (decision 033). All lines have one unit, the token;
work that is no tokens is charged by the seconds that its server needs for it, each as many tokens as the servers of
text work off in a second (decision 059).
"""

from __future__ import annotations

import math
from enum import Enum
from typing import Generic, Protocol, TypeVar

from hive.domain import Band
from hive.link.requests import QueueView, TenantView, WorkView
from hive.queue.drain_rate import Pace
from hive.queue.fair_share import (
    RANKS,
    Flow,
    Line,
    SharePosition,
    TenantLine,
    choose_yielding,
    floor_of,
)
from hive.queue.flows import REBASE_TOKENS, Flows
from hive.queue.work_rate import TOKENS, UNMEASURED_PER_S, WorkGuess, WorkRate, WorkUnit

__all__ = ["FairQueue", "FairShares", "Flow", "Queue", "QueueVerdict", "QueueView", "TenantView", "Turning"]

NEVER = math.inf
SURE_S, MUCH = 10.0, 1.5
"""Seconds that the servers of text have worked before their rate is believed, and the ratio that is another rate."""
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


class FairShares(Generic[Waiter]):
    """The agents with their limits and the tenants with their weights, one for all lines.

    >>> shares: FairShares[str] = FairShares()
    >>> chat, code = (FairQueue(shares, depth=2, places=1) for _ in range(2))
    >>> ann = shares.flow("ann", "acme", limit=1)
    >>> chat.ask("a1", ann, expected=100, now=0.0).value, code.ask("a2", ann, expected=100, now=1.0).value
    ('go', 'wait')
    >>> chat.leave("a1", ann, now=2.0), code
    (['a2'], <FairQueue 0 waiting, 1/1 running>)
    """

    __slots__ = ("flows", "queues", "tokens_per_gpu_s")

    def __init__(self) -> None:
        self.flows = Flows()
        self.queues: dict[Line, FairQueue[Waiter]] = {}
        self.tokens_per_gpu_s = UNMEASURED_PER_S
        """Tokens that a second of a server's work stands for where that is no tokens."""

    def __repr__(self) -> str:
        return f"<FairShares {len(self.queues)} queues, {self.flows}>"

    def flow(self, agent: str, tenant: str, *, limit: int, weight: float = 1.0) -> Flow:
        """The agent under this tenant. `limit`: its requests at all servers at once.

        The first of an agent is its own; more of them (an operator speaking for tenants) have the limit each for
        itself, and are forgotten when long unused. A known one keeps its limit; the weight is its tenant's from now on.
        """
        return self.flows.flow(agent, tenant, limit=limit, weight=weight)

    def move(self, flow: Flow, *, tenant: str, limit: int, weight: float) -> list[Waiter]:
        """Sets its tenant, limit and weight; returns the requests that get a place by that.

        Its waiting requests move along, even beyond the depth. What it has had under another tenant is not counted
        here.
        """
        self.flows.move(flow, tenant, weight)
        return self.set_limit(flow, limit)

    def forget(self, flow: Flow) -> None:
        """The agent is removed, its flows under other tenants too. Its running and waiting requests still leave as
        ever."""
        self.flows.forget(flow)

    def set_limit(self, flow: Flow, limit: int) -> list[Waiter]:
        """Sets how many of its requests may run; running ones beyond that finish. Returns the requests that get a place
        by that."""
        flow.limit = limit
        flow.refresh()
        return self.admit(flow, None)

    def set_weight(self, tenant: str, weight: float) -> None:
        """Sets the weight of a tenant; what it has had stays as it was counted. It never frees a place."""
        if tenant in self.flows.tenants:
            self.flows.tenant(tenant, weight)

    def charge_load(self, loaded: FairQueue[Waiter], tenant: str, agent: str, band: Band, seconds: float) -> None:
        """Charges a load to the tenant and the agent whose demand caused it: as much as the server of a line works off
        in these seconds.

        In the line of the model that was loaded, and in each in which they wait now: the time was taken from all of
        them. Nothing of it is carried from line to line besides.
        """
        owner = self.flows.tenants.get(tenant)
        if owner is None:  # it has no agents any more
            return
        owner.loads_s += seconds
        flow = self.flows.by_key.get((agent, tenant))
        for line, queue in self.queues.items():
            of_tenant = owner.lines.get(line)
            standing = None if flow is None else flow.standings.get(line)
            tokens = seconds * queue.tokens_per_s
            if of_tenant is not None:
                account = of_tenant.accounts[RANKS[band]]
                if account.waiting or queue is loaded:
                    account.set_at(account.settled + tokens * account.price)
            position = None if standing is None else standing.positions[RANKS[band]]
            if position is not None and (position.waiters or queue is loaded):
                position.set_at(position.settled + tokens)

    def look_at_rates(self) -> None:
        """Lets a second stand for the mean of what the servers of text work off in one, once they have worked for a
        while, and again where that has changed much. Then all lines of other work are counted anew, so that neither
        their order nor what anybody has had there changes.

        >>> from hive.domain import UsageUnit
        >>> from hive.queue.work_rate import WORK_UNITS
        >>> shares: FairShares[str] = FairShares()
        >>> text, ears = (FairQueue(shares, depth=2, places=1) for _ in range(2))
        >>> ears.use_unit(WORK_UNITS[UsageUnit.AUDIO_S]); ann = shares.flow("ann", "acme", limit=5)
        >>> _ = text.ask("a1", ann, expected=100, now=0.0), text.leave("a1", ann, now=20.0, cost=6000)
        >>> ears.tokens_of(8.0)  # 8 s of audio are taken for a second of its work at first
        300.0
        >>> _ = ears.ask("a2", ann, expected=100, now=20.0), ears.leave("a2", ann, now=21.0, cost=100, work=30.0)
        >>> shares.tokens_per_gpu_s, ears.tokens_of(8.0)  # it does 30 s of audio in a second
        (300.0, 80.0)
        """
        rates = [queue.rate.measured for queue in self.queues.values() if queue.unit is TOKENS]
        tokens, busy_s = sum([done for done, _ in rates]), sum([seconds for _, seconds in rates])
        if busy_s < SURE_S or not tokens:
            return
        factor = tokens / busy_s / self.tokens_per_gpu_s
        if 1 / MUCH < factor < MUCH:
            return
        self.tokens_per_gpu_s *= factor
        others = {line: queue for line, queue in self.queues.items() if queue.unit is not TOKENS}
        self.flows.rescale(others, factor, [position for queue in others.values() for position in queue.scale(factor)])

    def admit(self, flow: Flow, now: float | None, *, freed: FairQueue[Waiter] | None = None) -> list[Waiter]:
        """Gives places away after the agent may have fallen below its limit; `freed`: also there, a place is free.

        In every line where it waits. Of its requests the one goes first that has the higher band, then the one that
        came first, in whatever line. Nobody else can get a place elsewhere by that.
        """
        queues = [self.queues[line] for line, standing in flow.standings.items() if standing.waiting]
        if freed is not None and freed not in queues:
            queues.append(freed)
        admitted: list[Waiter] = []
        while True:
            firsts = [(first, queue) for queue in queues if (first := queue.first()) is not None]
            if not firsts:
                return admitted
            _, queue = min(firsts, key=lambda pair: pair[0])
            admitted.append(queue.give_next(now))


class FairQueue(Generic[Waiter]):
    """`places` requests at the server at once (None: any number), `depth` more of each tenant waiting.

    `load_depth`: so many in its stead while there is no place at all, for those that wait for their model (None: as
    many). A place has one owner: the request that was told GO, or was returned by a method since (of this queue, of
    another one that shares, or of `shares`), until it calls `leave` here. `displaced`: requests that lost their
    position to the one that was just told WAIT; the caller empties it and refuses them. They own nothing any more, so
    their `leave` changes nothing.

    >>> shares: FairShares[str] = FairShares()
    >>> queue = FairQueue(shares, depth=2, places=1)
    >>> ann = shares.flow("ann", "acme", limit=5)
    >>> ben = shares.flow("ben", "other", limit=5)
    >>> [queue.ask(name, ann, expected=100, now=0.0).value for name in ("a1", "a2", "a3", "a4")]
    ['go', 'wait', 'wait', 'full']
    >>> queue.ask("b1", ben, expected=100, now=1.0).value, queue
    ('wait', <FairQueue 3 waiting, 1/1 running>)
    >>> queue.leave("a1", ann, now=2.0, cost=140), queue.leave("b1", ben, now=3.0)
    (['b1'], ['a2'])
    """

    __slots__ = (
        "_flows",
        "_line",
        "_pace",
        "_places",
        "_running",
        "_shares",
        "_waiting",
        "depth",
        "displaced",
        "guess",
        "label",
        "load_depth",
        "rate",
        "unit",
    )

    def __init__(
        self, shares: FairShares[Waiter], *, depth: int, places: int | None = None, load_depth: int | None = None
    ) -> None:
        self.depth = depth
        self.load_depth = load_depth
        self.displaced: list[Waiter] = []
        self._places: float = math.inf if places is None else places
        self._running: dict[Waiter, tuple[SharePosition, float, float]] = {}
        """Running requests with their expected cost and the time they got the place (NEVER if no time was given)."""
        self._waiting = 0
        self._pace = Pace()
        self.label = ""
        """The name of its model, for people; empty for the active backend."""
        self.unit = TOKENS
        self.rate = WorkRate()
        self.guess = WorkGuess(TOKENS)
        self._line = Line()
        self._shares = shares
        self._flows = shares.flows
        self._flows.lines[self._line] = None
        shares.queues[self._line] = self

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
    def tokens_per_s(self) -> float:
        """Tokens that a second of its server's work stands for, while something is there."""
        return self.rate.per_s if self.unit is TOKENS else self._shares.tokens_per_gpu_s

    def use_unit(self, unit: WorkUnit) -> None:
        """Its server's work is counted so from now on; with another unit than before, what was learnt of it is over."""
        if unit is not self.unit:
            self.unit, self.rate, self.guess = unit, WorkRate(unit), WorkGuess(unit)

    def scale(self, factor: float) -> list[SharePosition]:
        """Multiplies what is expected of all requests here; returns the positions of those that run."""
        self._running = {
            waiter: (position, expected * factor, begun_at)
            for waiter, (position, expected, begun_at) in self._running.items()
        }
        for tenant in self._flows.tenants.values():
            of_tenant = tenant.lines.get(self._line)
            for standing in () if of_tenant is None else of_tenant.waits:
                for position in standing.held:
                    for waiter, (expected, asked_at, since) in position.waiters.items():
                        position.waiters[waiter] = expected * factor, asked_at, since
        return [position for position, _, _ in self._running.values()]

    def tokens_of(self, work: float) -> float:
        """The tokens that so much work counts as, by the seconds that its server needs for it. To be asked for right
        before they are told: all that is counted here may be counted anew by it."""
        if self.unit is TOKENS:
            return work
        self._shares.look_at_rates()
        return work / self.rate.per_s * self._shares.tokens_per_gpu_s

    @property
    def owners(self) -> list[Waiter]:
        """The requests that have a place."""
        return list(self._running)

    @property
    def waiting(self) -> int:
        return self._waiting

    @property
    def depth_now(self) -> int:
        """Requests of one tenant that may wait here, by what they wait for."""
        return self.depth if self._places or self.load_depth is None else self.load_depth

    def resize(self, places: int | None) -> list[Waiter]:
        """Sets the number of places; running requests beyond it finish. Returns the requests that get a place by
        that."""
        self._places = math.inf if places is None else places
        return self._admit(None)

    def close(self) -> None:
        """The server is no more. Raises ValueError while something runs or waits here."""
        if self._running or self._waiting:
            raise ValueError(f"{self} is still in use")
        del self._shares.queues[self._line]
        self._flows.close(self._line)

    # the turn of a request ----------------------------------------------------------------------------------------

    def ask(self, waiter: Waiter, flow: Flow, *, band: Band = _NORMAL, expected: float, now: float) -> QueueVerdict:
        """A place, or a position in line, or neither. `expected`: tokens it will probably cost; `now`: monotonic
        seconds.

        After WAIT look at `displaced`. FULL has given position credit already.
        """
        standing = flow.standings.get(self._line)
        if standing is None:
            standing = flow.stand(self._line)
        position = standing.normal if band is _NORMAL else standing.position(band)
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
        if flow.waiting:  # elsewhere; it may be at its limit now
            flow.refresh()
        standing.credit_until = 0.0
        running[waiter] = (position, expected, now)
        return _GO

    def ask_again(
        self, waiter: Waiter, flow: Flow, *, band: Band, expected: float, now: float, since: float
    ) -> QueueVerdict:
        """A place, or a position in line, for a request that had its turn in vain: it stands before those of its agent
        that asked after `since`, also beyond the depth."""
        if flow.running < flow.limit and len(self._running) < self._places:
            return self.ask(waiter, flow, band=band, expected=expected, now=now)
        return self._line_up(waiter, flow.stand(self._line).position(band), expected, now, again_since=since)

    def leave(
        self, waiter: Waiter, flow: Flow, *, now: float, cost: float | None = None, work: float | None = None
    ) -> list[Waiter]:
        """Gives back its place or its position; returns the requests that get a place by that, here or in another line:
        they own it already.

        `cost`: tokens it took; None if unknown, then the expectation stands. `work`: in the unit of a line that is not
        of tokens, as it was told; None if it was not.
        """
        owned = self._running.pop(waiter, None)
        if owned is None:
            self._step_out(waiter, flow, now)
            return []
        position, expected, begun_at = owned
        if cost is None:
            cost = expected
        account = position.account
        standing = position.standing
        if begun_at <= now:
            standing.line.learn_held(now - begun_at)
            if self.unit is TOKENS:
                self.rate.did(cost, begun_at, now)
            elif work:
                self.rate.did(work, begun_at, now)
        account.pending -= expected
        account.settled += cost * account.price
        position.pending -= expected
        position.settled += cost
        flow.running -= 1
        if not self._waiting and not flow.waiting:
            return []
        self._pace.count(now)
        if flow.waiting:
            flow.refresh()
            if flow.waiting > standing.waiting:
                return self._shares.admit(flow, now, freed=self)
        return self._admit(now)

    def refused(self, flow: Flow, now: float) -> None:
        """Gives position credit for 120 s to the agent of a request that was answered 503 because its wait was too
        long.

        With credit it is not lifted when it comes back here, so it goes before later ones. If its tenant's line is
        full, it takes the position of a later request of an agent with a longer line.
        """
        flow.stand(self._line).give_credit(now, now)

    def has_place(self, flow: Flow) -> bool:
        """Whether a request of this agent would have a place at once."""
        return flow.running < flow.limit and len(self._running) < self._places

    def has_room(self, flow: Flow) -> bool:
        """Whether a request of this agent would have a place or a position, as far as nobody has to yield."""
        return self.has_place(flow) or self._of_tenant(flow).waiting < self.depth_now

    # figures ------------------------------------------------------------------------------------------------------

    def retry_after_s(self, flow: Flow, now: float) -> float:
        """Seconds until the requests of its tenant that wait now will have had their turn, as measured lately: 1 to
        120.

        If no request has waited to the end yet: as long as its requests had their places lately, for each that goes
        before in the same place. With nothing measured at all: a second for each of these, at most 5. Never less than
        the time that requests have waited since the last turn.
        """
        line = self._of_tenant(flow)
        ahead = max(1, line.waiting)
        per_s = line.pace.per_s(now)
        if per_s is not None:
            guess_s = ahead / per_s
        else:
            limits = sum(other.flow.limit for other in line.waits) or flow.limit
            rounds = ahead / max(1.0, min(self._places, limits))
            held_s = line.mean_held_s
            guess_s = min(UNMEASURED_MAX_S, rounds) if held_s is None else rounds * held_s
        return min(RETRY_MAX_S, max(1.0, guess_s, line.pace.stuck_s(now)))

    def mean_wait_ms(self, flow: Flow) -> int:
        """The mean wait of its tenant's requests that had to wait here lately; 0 if none had to."""
        return round((self._of_tenant(flow).mean_wait_s or 0.0) * 1000)

    def view(self, now: float) -> QueueView:
        """The queue at this moment. Running and waiting requests of forgotten agents are in the totals only."""
        line, rank = self._line, RANKS[_NORMAL]
        running: dict[str, int] = {}
        for position, _, _ in self._running.values():
            flow = position.standing.flow
            if flow.kept:
                running[flow.tenant] = running.get(flow.tenant, 0) + 1
        floor = line.levels[rank].floor
        tenants = self._flows.tenants
        tokens = dict.fromkeys(tenants, max(0.0, floor))
        waiting = dict.fromkeys(tenants, 0)
        for name, tenant in tenants.items():
            if (of_tenant := tenant.lines.get(line)) is not None:
                share = of_tenant.accounts[rank]
                tokens[name] = max(share.settled, floor) + share.pending * share.price
                waiting[name] = of_tenant.waiting
        least = min(tokens.values(), default=0.0)
        rows = [
            TenantView(
                name,
                1.0 / tenant.price,
                running.get(name, 0),
                waiting[name],
                round(tokens[name] - least, 1),
                round(tenant.loads_s, 1),
            )
            for name, tenant in tenants.items()
        ]
        rate = self.rate
        work = [WorkView(self.label, self.unit.name, rate.per_s, rate.is_measured)]
        tokens_per_s = self._shares.tokens_per_gpu_s
        return QueueView(
            len(self._running), self._waiting, self.places, self._pace.per_s(now), rows, tokens_per_s, work
        )

    def _of_tenant(self, flow: Flow) -> TenantLine:
        standing = flow.standings.get(self._line)
        return flow.owner.line(self._line) if standing is None else standing.line

    # turns --------------------------------------------------------------------------------------------------------

    def first(self) -> tuple[int, float] | None:
        """(rank of its band, since when) of the request whose turn is next; None if no place is free, or no request can
        have one."""
        if len(self._running) >= self._places or (position := self._line.first()) is None:
            return None
        return position.account.level.rank, position.since

    def give_next(self, now: float | None) -> Waiter:
        """Gives the request of `first` its place. Without `now` nothing is learnt of the waits."""
        position = self._line.next()
        assert position is not None
        return self._give(position, now)

    def _admit(self, now: float | None) -> list[Waiter]:
        """Gives the free places away."""
        admitted: list[Waiter] = []
        running = self._running
        while len(running) < self._places and (position := self._line.next()) is not None:
            admitted.append(self._give(position, now))
        return admitted

    def _give(self, position: SharePosition, now: float | None) -> Waiter:
        waiter: Waiter = next(iter(position.waiters))
        standing, account = position.standing, position.account
        standing.flow.running += 1
        if now is not None:
            standing.line.pace.count(now)
        expected, asked_at, _ = self._take(position, waiter, now)
        self._running[waiter] = (position, expected, NEVER if now is None else now)
        for share in (position, account):
            share.have_turn()
            share.pending += expected
        if now is not None:
            standing.line.learn_wait(now - asked_at)
        return waiter

    # the line -----------------------------------------------------------------------------------------------------

    def _line_up(
        self,
        waiter: Waiter,
        position: SharePosition,
        expected: float,
        now: float,
        *,
        again_since: float | None = None,
    ) -> QueueVerdict:
        standing = position.standing
        if not standing.flow.kept:
            self._flows.keep_again(standing.flow)
        account = position.account
        if account.level.floor > REBASE_TOKENS:
            self._flows.rebase(self._line, account.level)
        has_credit = standing.credit_until > now
        if not account.waiting:
            account.begin(floor_of(account.level, lagging=has_credit))
        if not position.waiters:
            position.begin(floor_of(account, lagging=has_credit))
        is_full = again_since is None and standing.line.waiting >= self.depth_now
        if is_full and not self._make_room(position, now):
            standing.give_credit(now, now)
            return QueueVerdict.FULL
        self._pace.begin(now)
        standing.line.pace.begin(now)
        if again_since is not None:
            position.put(waiter, (expected, now, again_since), by_age=True)
        else:
            position.put(waiter, (expected, now, standing.credit_since if has_credit else now))
            standing.credit_until = 0.0
        self._waiting += 1
        return QueueVerdict.WAIT

    def _make_room(self, position: SharePosition, now: float) -> bool:
        yields = choose_yielding(position, now)
        if yields is None:
            return False
        last, waiter = yields
        _, _, since = self._take(last, waiter, now)
        last.standing.give_credit(since, now)
        self.displaced.append(waiter)
        return True

    def _step_out(self, waiter: Waiter, flow: Flow, now: float) -> None:
        standing = flow.standings.get(self._line)
        for position in () if standing is None else standing.positions:
            if position is not None and waiter in position.waiters:
                _, asked_at, _ = self._take(position, waiter, now)
                position.standing.line.learn_wait(now - asked_at)
                return

    def _take(self, position: SharePosition, waiter: object, now: float | None) -> tuple[float, float, float]:
        """Takes it out of the line; after the last one there is nothing to measure any more."""
        ticket = position.take(waiter)
        standing = position.standing
        standing.refresh()
        if standing.flow.waiting > standing.waiting:
            standing.flow.refresh()
        self._waiting -= 1
        if not standing.line.waiting:
            standing.line.pace.end(now)
            self._flows.drop_unused(standing.line.tenant)
        if not self._waiting:
            self._pace.end(now)
        return ticket


class Turning(Protocol):
    """A request that waits in the queue."""

    def on_turn(self) -> None:
        """Tells it that it owns a place now."""
        ...

    def on_displaced(self) -> None:
        """Tells it that its position went to another request: it waits no longer."""
        ...


Queue = FairQueue[Turning]


def joined(views: list[QueueView]) -> QueueView:
    """Several lines in one view: sums; of `tokens_ahead` the most.

    >>> row = TenantView("t", 1.0, running=1, waiting=2, tokens_ahead=7.0)
    >>> joined([QueueView(1, 2, 4, None, [row]), QueueView(1, 2, 2, 0.5, [row])]).tenants
    [TenantView(name='t', weight=1.0, running=2, waiting=4, tokens_ahead=7.0, load_s=0.0)]
    """
    if len(views) == 1:
        return views[0]
    tenants: dict[str, TenantView] = {}
    for row in (row for view in views for row in view.tenants):
        known = tenants.get(row.name)
        if known is not None:
            ahead = max(known.tokens_ahead, row.tokens_ahead)
            sums = known.running + row.running, known.waiting + row.waiting
            row = TenantView(row.name, row.weight, *sums, ahead, row.load_s)
        tenants[row.name] = row
    places = [view.places for view in views]
    rates = [view.drain_per_s for view in views if view.drain_per_s is not None]
    return QueueView(
        running=sum(view.running for view in views),
        waiting=sum(view.waiting for view in views),
        places=None if None in places else sum(count or 0 for count in places),
        drain_per_s=sum(rates) if rates else None,
        tenants=list(tenants.values()),
        tokens_per_gpu_s=views[0].tokens_per_gpu_s if views else 0.0,
        work=[one for view in views for one in view.work],
    )
