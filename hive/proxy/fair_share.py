"""The shares of tenants and agents in the backend, and their waiting requests: the facts the queue decides by. Pure.

Virtual token counters (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024), one tree for each band:
level -> accounts (one tenant each) -> positions (one agent each) -> waiting requests, first come first.
"""

from __future__ import annotations

import math
from typing import Any, TypeVar

from hive.domain import Band
from hive.proxy.drain_rate import Pace

CREDIT_S = 120.0
"""An agent that was refused keeps its position credit for so long."""
EXTRA_FLOWS = 256
"""Flows kept of agents under another tenant than their own (an operator may name any)."""
REBASE_TOKENS = 1e12
"""Counters start anew from here; a float holds thousandths of a token up to 2**43, about 9e12."""
RANKS = {Band.HIGH: 0, Band.NORMAL: 1, Band.LOW: 2}
"""Bands in the order in which a turn is looked for."""


class Share:
    """The tokens that one tenant, or one of its agents, has had in one band.

    `settled`: tokens by weight; `pending`: tokens expected of what runs; `price`: 1 / weight.
    """

    __slots__ = ("pending", "price", "settled")

    def __init__(self, price: float = 1.0) -> None:
        self.settled = 0.0
        self.pending = 0.0
        self.price = price

    def lift(self, floor: float) -> None:
        if self.settled < floor:
            self.settled = floor

    def is_older(self, other: Any) -> bool:  # noqa: ARG002 - tenants have no age
        """Whether it goes before another one that has had as much."""
        return False


class Level:
    """One band. `ready`: the tenants that could have a turn, first the one with the oldest last turn; `floor`:
    `settled` of the least served of them when it was last looked at."""

    __slots__ = ("floor", "rank", "ready")

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.floor = 0.0
        self.ready: dict[Account, None] = {}


class Account(Share):
    """One tenant in one band: it has agents as the level has tenants."""

    __slots__ = ("floor", "level", "ready", "waiting")

    def __init__(self, level: Level, price: float) -> None:
        super().__init__(price)
        self.level = level
        self.floor = 0.0
        self.ready: dict[SharePosition, None] = {}
        self.waiting = 0


class SharePosition(Share):
    """One agent of one tenant in one band.

    `waiters`: waiter -> (expected tokens, when it asked, since when it has a right to a position), first come first.
    """

    __slots__ = ("account", "flow", "waiters")

    def __init__(self, flow: Flow, account: Account) -> None:
        super().__init__()
        self.flow = flow
        self.account = account
        self.waiters: dict[Any, tuple[float, float, float]] = {}

    def is_older(self, other: SharePosition) -> bool:
        return next(iter(self.waiters.values()))[2] < next(iter(other.waiters.values()))[2]

    def put(self, waiter: object, ticket: tuple[float, float, float]) -> None:
        flow, line = self.flow, self.flow.line
        self.waiters[waiter] = ticket
        self.account.waiting += 1
        flow.waiting += 1
        line.waiting += 1
        line.waits[flow] = None
        flow.refresh()

    def take(self, waiter: object) -> tuple[float, float, float]:
        """Takes a request out of the line, for any reason; the caller refreshes the flow."""
        flow, line = self.flow, self.flow.line
        ticket = self.waiters.pop(waiter)
        self.account.waiting -= 1
        flow.waiting -= 1
        line.waiting -= 1
        if not flow.waiting:
            del line.waits[flow]
        return ticket


class TenantLine:
    """The state that the agents of one tenant share. `waits`: flows with waiting requests; `flows`: the number of flows
    kept."""

    __slots__ = ("accounts", "flows", "mean_held_s", "mean_wait_s", "name", "pace", "price", "waiting", "waits")

    def __init__(self, name: str, levels: tuple[Level, ...], price: float) -> None:
        self.name = name
        self.price = price
        self.accounts = tuple(Account(level, price) for level in levels)
        self.waits: dict[Flow, None] = {}
        self.waiting = 0
        self.flows = 0
        self.pace = Pace()
        self.mean_wait_s: float | None = None
        self.mean_held_s: float | None = None

    def __repr__(self) -> str:
        return f"<TenantLine {self.name} weight {1 / self.price:g}, {self.waiting} waiting>"

    def use_price(self, price: float) -> None:
        if self.price != price:
            self.price = price
            for account in self.accounts:
                account.price = price

    def learn_wait(self, wait_s: float) -> None:
        """Moving average over about the last ten that had to wait."""
        mean = self.mean_wait_s
        self.mean_wait_s = wait_s if mean is None else mean + 0.1 * (wait_s - mean)

    def learn_held(self, held_s: float) -> None:
        """The same of how long its requests had their places."""
        mean = self.mean_held_s
        self.mean_held_s = held_s if mean is None else mean + 0.1 * (held_s - mean)


class Flow:
    """One agent's position under one tenant; made by `FairQueue.flow` only, changed by the queue only."""

    __slots__ = (
        "agent",
        "credit_since",
        "credit_until",
        "kept",
        "limit",
        "line",
        "normal",
        "positions",
        "running",
        "waiting",
    )

    def __init__(self, agent: str, line: TenantLine, limit: int) -> None:
        self.agent = agent
        self.line = line
        self.limit = limit
        self.running = 0
        self.waiting = 0
        self.normal = SharePosition(self, line.accounts[RANKS[Band.NORMAL]])
        self.positions: list[SharePosition | None] = [None, self.normal, None]
        self.credit_since = self.credit_until = 0.0
        self.kept = False

    def __repr__(self) -> str:
        return f"<Flow {self.agent} of {self.tenant} {self.running}/{self.limit} running, {self.waiting} waiting>"

    @property
    def tenant(self) -> str:
        return self.line.name

    @property
    def tenant_waiting(self) -> int:
        """Requests of all agents of its tenant that wait."""
        return self.line.waiting

    @property
    def mean_wait_ms(self) -> int:
        """The mean wait of its tenant's requests that had to wait lately; 0 if none had to."""
        return round((self.line.mean_wait_s or 0.0) * 1000)

    def position(self, band: Band) -> SharePosition:
        rank = RANKS[band]
        position = self.positions[rank]
        if position is None:
            position = self.positions[rank] = SharePosition(self, self.line.accounts[rank])
        return position

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
        for position in self.positions:
            if position is None:
                continue
            account = position.account
            level = account.level
            if position.waiters and self.running < self.limit:
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
        """Moves it, with its running and waiting requests, to this tenant, where it has the rank of a newcomer."""
        old, limit = self.line, self.limit
        self.limit = 0
        self.refresh()
        self.limit = limit
        for position, account in zip(self.positions, line.accounts, strict=True):
            if position is None:
                continue
            if position.waiters and not account.waiting:
                account.lift(floor_of(account.level))
            position.settled = floor_of(account)
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
        self.refresh()


S = TypeVar("S", bound=Share)


def least_served(ready: dict[S, None]) -> tuple[S, float]:
    """The share that has had least, running requests included, of equals the older one; and the least `settled` of all.

    The chosen one goes to the end of `ready`.
    """
    found: S | None = None
    least = floor = math.inf
    for share in ready:
        settled = share.settled
        tokens = settled + share.pending * share.price
        if tokens < least or (tokens == least and found is not None and share.is_older(found)):
            found, least = share, tokens
        if settled < floor:
            floor = settled
    assert found is not None
    del ready[found]
    ready[found] = None
    return found, floor


def floor_of(parent: Level | Account, *, lagging: bool = False) -> float:
    """The least `settled` of the shares that could have a turn; the last known one if no request waits.

    Their running requests do not count: a newcomer that runs nothing would wait for what is only expected of others.
    `lagging`: for a share that could not have its turn (refused, or held back by its own limit) the floor is lower by
    just these running requests; if it were lower still, the others would stand still for what that share could not have
    used.
    """
    if not parent.ready:
        return parent.floor
    floor = min([share.settled for share in parent.ready])
    return floor - sum([share.pending * share.price for share in parent.ready]) if lagging else floor


def choose_yielding(position: SharePosition, now: float) -> tuple[SharePosition, Any] | None:
    """The position and request that give way to a request of `position` if its tenant's line is full: the newest of a
    lower band, else the newest of the agent with the longest line.

    The latter only for an agent that has the shorter line even then, or whose position credit is older than the right
    of that newest request. None if no request gives way.
    """
    flow, rank = position.flow, position.account.level.rank
    found: tuple[bool, int, float] | None = None
    last = position
    lower_waits = any(account.waiting for account in flow.line.accounts[rank + 1 :])
    for other in flow.line.waits:
        if other.waiting <= flow.waiting and not lower_waits:
            continue
        candidate = other.last_position()
        lower = candidate.account.level.rank > rank
        if not lower and (other is flow or candidate.account.level.rank < rank):
            continue
        since = candidate.waiters[next(reversed(candidate.waiters))][2]
        if found is None or (lower, other.waiting, since) > found:
            found, last = (lower, other.waiting, since), candidate
    if found is None:
        return None
    lower, waiting, since = found
    older = flow.credit_until > now and flow.credit_since < since and waiting > flow.waiting
    if lower or older or waiting >= flow.waiting + 2:
        return last, next(reversed(last.waiters))
    return None


class Flows:
    """Every flow by agent and tenant, every tenant by name.

    The first flow of an agent is its own and stays until it is forgotten; of the others the last used `EXTRA_FLOWS`
    do. One that was dropped works on, and is kept again when it has to wait.
    """

    def __init__(self) -> None:
        self.levels = tuple(Level(rank) for rank in range(len(RANKS)))
        self.lines: dict[str, TenantLine] = {}
        self.by_key: dict[tuple[str, str], Flow] = {}
        self._own: dict[str, Flow] = {}
        self._extra: dict[Flow, None] = {}

    def __repr__(self) -> str:
        return f"<Flows {len(self.by_key)} of {len(self.lines)} tenants, {len(self._extra)} extra>"

    def line(self, tenant: str, weight: float) -> TenantLine:
        line = self.lines.get(tenant)
        if line is None:
            line = self.lines[tenant] = TenantLine(tenant, self.levels, 1.0 / weight)
        else:
            line.use_price(1.0 / weight)
        return line

    def flow(self, agent: str, tenant: str, *, limit: int, weight: float) -> Flow:
        line = self.line(tenant, weight)
        flow = self.by_key.get((agent, tenant))
        if flow is None:
            flow = Flow(agent, line, limit)
            self._keep(flow)
        if self._own.setdefault(agent, flow) is flow:
            self._extra.pop(flow, None)
        else:
            self._use_extra(flow)
        return flow

    def move(self, flow: Flow, tenant: str, weight: float) -> None:
        if flow.tenant != tenant:
            old = flow.line
            self._drop(flow)
            flow.attach(self.line(tenant, weight))
            self._keep(flow)
            self.drop_unused(old)
        self.line(tenant, weight)

    def forget(self, flow: Flow) -> None:
        """The agent's other flows too, where this was its own."""
        self._drop(flow)
        if self._own.get(flow.agent) is flow:
            del self._own[flow.agent]
            for extra in [extra for extra in self._extra if extra.agent == flow.agent]:
                self._drop(extra)

    def keep_again(self, flow: Flow) -> None:
        """A dropped flow is still used, by a connection that knew it."""
        old = flow.line
        flow.attach(self.line(flow.tenant, 1.0 / old.price))
        self.drop_unused(old)
        if (flow.agent, flow.tenant) not in self.by_key:
            self._keep(flow)
            self._use_extra(flow)

    def drop_unused(self, line: TenantLine) -> None:
        """A tenant without agents, of which nothing waits any more (a forgotten agent's requests may)."""
        if not line.flows and not line.waiting and self.lines.get(line.name) is line:
            del self.lines[line.name]

    def rebase(self, level: Level) -> None:
        """Lowers all counters of a band by what the least served has settled; the order of turns does not change."""
        rank = level.rank
        accounts = {line.accounts[rank]: None for line in self.lines.values()} | level.ready
        positions = {position: None for flow in self.by_key.values() if (position := flow.positions[rank]) is not None}
        for account in accounts:
            for position in {position: None for position in positions if position.account is account} | account.ready:
                position.settled = max(position.settled - account.floor, -REBASE_TOKENS)
            account.floor = 0.0
            account.settled = max(account.settled - level.floor, -REBASE_TOKENS)
        level.floor = 0.0

    def _keep(self, flow: Flow) -> None:
        key = (flow.agent, flow.tenant)
        if key in self.by_key:
            self._drop(self.by_key[key])
        self.lines.setdefault(flow.tenant, flow.line)  # dropping the other one may have dropped it
        self.by_key[key] = flow
        flow.line.flows += 1
        flow.kept = True

    def _drop(self, flow: Flow) -> None:
        """Removes the flow from the tables."""
        if flow.kept:
            flow.kept = False
            del self.by_key[(flow.agent, flow.tenant)]
            self._extra.pop(flow, None)
            flow.line.flows -= 1
            self.drop_unused(flow.line)

    def _use_extra(self, flow: Flow) -> None:
        """The last used is dropped last; one that runs or waits is not dropped."""
        self._extra.pop(flow, None)
        self._extra[flow] = None
        if len(self._extra) > EXTRA_FLOWS:
            idle = (old for old in self._extra if old is not flow and not (old.running or old.waiting))
            if (oldest := next(idle, None)) is not None:
                self._drop(oldest)
