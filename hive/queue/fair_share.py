"""The shares of tenants and agents, and their waiting requests: the facts the queue decides by. Pure.

Virtual token counters (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024), one tree for each band of
each line: level -> accounts (one tenant each) -> positions (one agent each) -> waiting requests, first come first.
A tenant's accounts in several lines know each other, and so do an agent's positions: what a share is given in one line
while it waits in another one counts there too (decision 033).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from hive.domain import Band
from hive.queue.drain_rate import Pace

CREDIT_S = 120.0
"""An agent that was refused keeps its position credit for so long."""
CARRIED_MAX_TOKENS = 4096.0
"""Tokens of other lines, by weight, that count against a share between two of its turns: some eight usual requests. It
bounds how long a request waits in one line for what its tenant is given in others."""
RANKS = {Band.HIGH: 0, Band.NORMAL: 1, Band.LOW: 2}
"""Bands in the order in which a turn is looked for."""


class Share:
    """The tokens that one tenant, or one of its agents, has had in one band of one line.

    `settled`: tokens by weight; `pending`: tokens expected of what runs; `price`: 1 / weight; `lifted`: the part of
    `settled` that was not had but given by lifts. `siblings`: the same tenant or agent in this band of all lines,
    itself included, empty if this line is its only one; `had_before`: what the others had when it began to wait here,
    or had its last turn here.
    """

    __slots__ = ("had_before", "lifted", "pending", "price", "settled", "siblings")

    def __init__(self, price: float = 1.0) -> None:
        self.settled = 0.0
        self.lifted = 0.0
        self.pending = 0.0
        self.price = price
        self.siblings: Sequence[Share] = ()
        self.had_before = 0.0

    def lift(self, floor: float) -> None:
        """Sees to it that it stands at the floor at least, with what counts of other lines."""
        carried = self.carried()[0] if self.siblings else 0.0
        if self.settled + carried < floor:
            self.set_at(floor - carried)

    def set_at(self, tokens: float) -> None:
        """Moves it in the order; it has had no more and no less by that."""
        self.lifted += tokens - self.settled
        self.settled = tokens

    def begin(self, floor: float) -> None:
        """It begins to wait: being idle has saved nothing up, and nothing it had elsewhere before counts here."""
        self.look_elsewhere()
        self.lift(floor)

    def have_turn(self) -> None:
        """Takes over what counts of other lines: from now on as much may count anew."""
        if self.siblings:
            self.set_at(self.settled + self.carried()[0])
            self.look_elsewhere()

    def look_elsewhere(self) -> None:
        """Counts only what it is given in other lines from now on."""
        if self.siblings:
            self.had_before = self._had_elsewhere()

    def carried(self) -> tuple[float, float]:
        """Tokens by weight that count here of those given in other lines: settled ones, and with the expected ones."""
        settled = max(0.0, self._had_elsewhere() - self.had_before)
        pending = sum([share.pending for share in self.siblings if share is not self]) * self.price
        return min(CARRIED_MAX_TOKENS, settled), min(CARRIED_MAX_TOKENS, settled + pending)

    def counted_elsewhere(self) -> float:
        """The tokens of other lines that count here, without the bound."""
        return self._had_elsewhere() - self.had_before

    def count_elsewhere(self, tokens: float) -> None:
        """Lets so much of other lines count here, whatever is counted there."""
        self.had_before = self._had_elsewhere() - tokens

    def scale(self, factor: float) -> None:
        """Counts in another unit."""
        self.settled *= factor
        self.lifted *= factor
        self.pending *= factor

    def is_older(self, other: Any) -> bool:  # noqa: ARG002 - tenants have no age
        """Whether it goes before another one that has had as much."""
        return False

    def _had_elsewhere(self) -> float:
        return sum([share.settled - share.lifted for share in self.siblings if share is not self])


class Level:
    """One band of one line. `ready`: the tenants that could have a turn, first the one with the oldest last turn;
    `floor`: `settled` of the least served of them when it was last looked at."""

    __slots__ = ("floor", "rank", "ready")

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.floor = 0.0
        self.ready: dict[Account, None] = {}


class Line:
    """The waiting requests of one queue, a tree for each band; flows and tenants find by it what they have there."""

    __slots__ = ("levels",)

    def __init__(self) -> None:
        self.levels = tuple(Level(rank) for rank in range(len(RANKS)))

    def first(self) -> SharePosition | None:
        """The position whose turn is next; None if no request waits that could have one. Nothing changes by it."""
        for level in self.levels:
            if level.ready:
                return least_served(least_served(level.ready)[0].ready)[0]
        return None

    def next(self) -> SharePosition | None:
        """The same; it has its turn now: the floors follow, and of equals it will be the last."""
        for level in self.levels:
            if level.ready:
                account, level.floor = least_served(level.ready)
                position, account.floor = least_served(account.ready)
                put_last(level.ready, account)
                put_last(account.ready, position)
                return position
        return None


class Account(Share):
    """One tenant in one band of one line: it has agents as the level has tenants."""

    __slots__ = ("floor", "level", "ready", "waiting")

    def __init__(self, level: Level, price: float) -> None:
        super().__init__(price)
        self.level = level
        self.floor = 0.0
        self.ready: dict[SharePosition, None] = {}
        self.waiting = 0

    def scale(self, factor: float) -> None:
        super().scale(factor)
        self.floor *= factor


class SharePosition(Share):
    """One agent of one tenant in one band of one line.

    `waiters`: waiter -> (expected tokens, when it asked, since when it has a right to a position), first come first.
    """

    __slots__ = ("account", "standing", "waiters")

    def __init__(self, standing: Standing, account: Account) -> None:
        super().__init__()
        self.standing = standing
        self.account = account
        self.waiters: dict[Any, tuple[float, float, float]] = {}

    @property
    def since(self) -> float:
        """Since when its first request has a right to its position."""
        return next(iter(self.waiters.values()))[2]

    def is_older(self, other: SharePosition) -> bool:
        return self.since < other.since

    def put(self, waiter: object, ticket: tuple[float, float, float], *, by_age: bool = False) -> None:
        """`by_age`: before those that have their right since later; else it is the last."""
        standing = self.standing
        line = standing.line
        self.waiters[waiter] = ticket
        if by_age:
            self.waiters = dict(sorted(self.waiters.items(), key=lambda pair: pair[1][2]))
        self.account.waiting += 1
        standing.waiting += 1
        standing.flow.waiting += 1
        line.waiting += 1
        line.waits[standing] = None
        standing.refresh()

    def take(self, waiter: object) -> tuple[float, float, float]:
        """Takes a request out of the line, for any reason; the caller refreshes the flow."""
        standing = self.standing
        line = standing.line
        ticket = self.waiters.pop(waiter)
        self.account.waiting -= 1
        standing.waiting -= 1
        standing.flow.waiting -= 1
        line.waiting -= 1
        if not standing.waiting:
            del line.waits[standing]
        return ticket


class TenantLine:
    """The state that the agents of one tenant share in one line. `waits`: agents with waiting requests."""

    __slots__ = ("accounts", "mean_held_s", "mean_wait_s", "pace", "tenant", "waiting", "waits")

    def __init__(self, tenant: TenantFlows, line: Line) -> None:
        self.tenant = tenant
        self.accounts = tuple(Account(level, tenant.price) for level in line.levels)
        self.waits: dict[Standing, None] = {}
        self.waiting = 0
        self.pace = Pace()
        self.mean_wait_s: float | None = None
        self.mean_held_s: float | None = None

    def __repr__(self) -> str:
        return f"<TenantLine {self.tenant.name} weight {1 / self.tenant.price:g}, {self.waiting} waiting>"

    def learn_wait(self, wait_s: float) -> None:
        """Moving average over about the last ten that had to wait."""
        mean = self.mean_wait_s
        self.mean_wait_s = wait_s if mean is None else mean + 0.1 * (wait_s - mean)

    def learn_held(self, held_s: float) -> None:
        """The same of how long its requests had their places."""
        mean = self.mean_held_s
        self.mean_held_s = held_s if mean is None else mean + 0.1 * (held_s - mean)


class TenantFlows:
    """One tenant over all lines. `price`: 1 / weight; `flows`: the number of its flows that are kept; `loads_s`:
    seconds of loads that its demands have caused."""

    __slots__ = ("flows", "lines", "loads_s", "name", "price")

    def __init__(self, name: str, price: float) -> None:
        self.name = name
        self.price = price
        self.flows = 0
        self.loads_s = 0.0
        self.lines: dict[Line, TenantLine] = {}

    def line(self, line: Line) -> TenantLine:
        found = self.lines.get(line)
        if found is None:
            found = self.lines[line] = TenantLine(self, line)
            self._join()
        return found

    def leave_line(self, line: Line) -> None:
        if (gone := self.lines.pop(line, None)) is not None:
            for account in gone.accounts:
                part(account)
            self._join()

    def use_price(self, price: float) -> None:
        if self.price != price:
            self.price = price
            for line in self.lines.values():
                for account in line.accounts:
                    account.price = price

    def _join(self) -> None:
        for accounts in zip(*(line.accounts for line in self.lines.values()), strict=True):
            join(accounts)


class Standing:
    """One agent in one line: its positions, the number of its requests that wait there, and its position credit."""

    __slots__ = ("credit_since", "credit_until", "flow", "line", "normal", "positions", "waiting")

    def __init__(self, flow: Flow, line: TenantLine) -> None:
        self.flow = flow
        self.line = line
        self.normal = SharePosition(self, line.accounts[RANKS[Band.NORMAL]])
        self.positions: list[SharePosition | None] = [None, self.normal, None]
        self.waiting = 0
        self.credit_since = self.credit_until = 0.0

    def position(self, band: Band) -> SharePosition:
        rank = RANKS[band]
        position = self.positions[rank]
        if position is None:
            position = self.positions[rank] = SharePosition(self, self.line.accounts[rank])
            self.flow.join()
        return position

    @property
    def held(self) -> list[SharePosition]:
        """Its positions."""
        return [position for position in self.positions if position is not None]

    def last_position(self) -> SharePosition:
        """The position of the lowest band among those with waiting requests."""
        for position in reversed(self.positions):
            if position is not None and position.waiters:
                return position
        raise LookupError("nothing of it waits")

    def give_credit(self, since: float, now: float) -> None:
        if self.credit_until <= now:
            self.credit_since = since
        self.credit_until = now + CREDIT_S

    def refresh(self) -> None:
        """Makes its positions ready if requests wait there and the agent is below its limit."""
        flow = self.flow
        for position in self.positions:
            if position is None:
                continue
            account = position.account
            level = account.level
            if position.waiters and flow.running < flow.limit:
                if position not in account.ready:
                    position.lift(floor_of(account, lagging=True))
                    account.ready[position] = None
                if account not in level.ready:
                    account.lift(floor_of(level, lagging=True))
                    level.ready[account] = None
            elif position in account.ready:
                del account.ready[position]
                if not account.ready:
                    del level.ready[account]

    def attach(self, line: TenantLine) -> None:
        """Moves it, with its running and waiting requests, to this tenant, where it has the rank of a newcomer. None of
        its positions is ready meanwhile."""
        old = self.line
        for position, account in zip(self.positions, line.accounts, strict=True):
            if position is None:
                continue
            if position.waiters and not account.waiting:
                account.begin(floor_of(account.level))
            position.set_at(floor_of(account))
            position.look_elsewhere()
            for before, sign in ((position.account, -1), (account, 1)):
                before.pending += sign * position.pending
                before.waiting += sign * len(position.waiters)
            position.account = account
        if self.waiting:
            del old.waits[self]
            line.waits[self] = None
        old.waiting -= self.waiting
        line.waiting += self.waiting
        if not old.waiting:
            old.pace.end(None)
        self.line = line


class Flow:
    """One agent under one tenant; made by `FairShares.flow` only, changed by the queues only.

    `limit`, `running`, `waiting`: requests of all lines together; `standings`: what it has in each line where it asked.
    """

    __slots__ = ("agent", "kept", "limit", "owner", "running", "standings", "waiting")

    def __init__(self, agent: str, owner: TenantFlows, limit: int) -> None:
        self.agent = agent
        self.owner = owner
        self.limit = limit
        self.running = 0
        self.waiting = 0
        self.standings: dict[Line, Standing] = {}
        self.kept = False

    def __repr__(self) -> str:
        return f"<Flow {self.agent} of {self.tenant} {self.running}/{self.limit} running, {self.waiting} waiting>"

    @property
    def tenant(self) -> str:
        return self.owner.name

    @property
    def tenant_waiting(self) -> int:
        """Requests of all agents of its tenant that wait, in all lines."""
        return sum([line.waiting for line in self.owner.lines.values()])

    def stand(self, line: Line) -> Standing:
        found = self.standings.get(line)
        if found is None:
            found = self.standings[line] = Standing(self, self.owner.line(line))
            self.join()
        return found

    def leave_line(self, line: Line) -> None:
        if (gone := self.standings.pop(line, None)) is not None:
            for position in gone.positions:
                if position is not None:
                    part(position)
            self.join()

    def refresh(self) -> None:
        """Makes its positions ready, or no longer, in each line where it waits."""
        for standing in self.standings.values():
            if standing.waiting:
                standing.refresh()

    def attach(self, owner: TenantFlows) -> None:
        """Moves it to this tenant, in all lines."""
        limit, self.limit = self.limit, 0
        self.refresh()
        self.limit = limit
        for line, standing in self.standings.items():
            standing.attach(owner.line(line))
        self.owner = owner
        self.refresh()

    def join(self) -> None:
        for positions in zip(*(standing.positions for standing in self.standings.values()), strict=True):
            join([position for position in positions if position is not None])


S = TypeVar("S", bound=Share)


def join(shares: Sequence[Share]) -> None:
    """Lets the shares of one owner in several lines know each other."""
    for share in shares:
        share.siblings = shares if len(shares) > 1 else ()


def part(gone: Share) -> None:
    """Lets the others forget one whose line is no more; what counts of it already goes on to count."""
    for share in gone.siblings:
        share.had_before -= gone.settled - gone.lifted
    gone.siblings = ()


def least_served(ready: Iterable[S]) -> tuple[S, float]:
    """The share that has had least, running requests included, of equals the older one; and the least `settled` of all.
    What counts of other lines is in both."""
    found: S | None = None
    least = floor = math.inf
    for share in ready:
        settled = share.settled
        tokens = settled + share.pending * share.price
        if share.siblings:
            had, given = share.carried()
            settled, tokens = settled + had, tokens + given
        if tokens < least or (tokens == least and found is not None and share.is_older(found)):
            found, least = share, tokens
        if settled < floor:
            floor = settled
    assert found is not None
    return found, floor


def put_last(ready: dict[S, None], share: S) -> None:
    del ready[share]
    ready[share] = None


def floor_of(parent: Level | Account, *, lagging: bool = False) -> float:
    """The least `settled` of the shares that could have a turn, with what counts of other lines; the last known one if
    no request waits.

    Their running requests do not count: a newcomer that runs nothing would wait for what is only expected of others.
    `lagging`: for a share that could not have its turn (refused, or held back by its own limit) the floor is lower by
    just these running requests; if it were lower still, the others would stand still for what that share could not have
    used.
    """
    if not parent.ready:
        return parent.floor
    floor = min([share.settled + (share.carried()[0] if share.siblings else 0.0) for share in parent.ready])
    return floor - sum([share.pending * share.price for share in parent.ready]) if lagging else floor


def choose_yielding(position: SharePosition, now: float) -> tuple[SharePosition, Any] | None:
    """The position and request that give way to a request of `position` if its tenant's line is full: the newest of a
    lower band, else the newest of the agent with the longest line.

    The latter only for an agent that has the shorter line even then, or whose position credit is older than the right
    of that newest request. None if no request gives way.
    """
    standing, rank = position.standing, position.account.level.rank
    found: tuple[bool, int, float] | None = None
    last = position
    lower_waits = any(account.waiting for account in standing.line.accounts[rank + 1 :])
    for other in standing.line.waits:
        if other.waiting <= standing.waiting and not lower_waits:
            continue
        candidate = other.last_position()
        lower = candidate.account.level.rank > rank
        if not lower and (other is standing or candidate.account.level.rank < rank):
            continue
        since = candidate.waiters[next(reversed(candidate.waiters))][2]
        if found is None or (lower, other.waiting, since) > found:
            found, last = (lower, other.waiting, since), candidate
    if found is None:
        return None
    lower, waiting, since = found
    older = standing.credit_until > now and standing.credit_since < since and waiting > standing.waiting
    if lower or older or waiting >= standing.waiting + 2:
        return last, next(reversed(last.waiters))
    return None
