"""The queue as it was when there was one line: a frozen copy, against which the queue of one line is compared.

Of commit d100288, without words and figures. It is not to be changed: test_one_line.py asks whether a lone `FairQueue`
still does the same. `Pace` is the one part in common.
"""

from __future__ import annotations

import math
from typing import Any, Generic, TypeVar

from hive.domain import Band
from hive.link.requests import QueueView, TenantView
from hive.queue.drain_rate import Pace
from hive.queue.queue import QueueVerdict

CREDIT_S = 120.0

EXTRA_FLOWS = 256

REBASE_TOKENS = 1000000000000.0

RANKS = {Band.HIGH: 0, Band.NORMAL: 1, Band.LOW: 2}


class OneLineShare:
    __slots__ = ("pending", "price", "settled")

    def __init__(self, price: float = 1.0) -> None:
        self.settled = 0.0
        self.pending = 0.0
        self.price = price

    def lift(self, floor: float) -> None:
        if self.settled < floor:
            self.settled = floor

    def is_older(self, other: Any) -> bool:
        return False


class OneLineLevel:
    __slots__ = ("floor", "rank", "ready")

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.floor = 0.0
        self.ready: dict[OneLineAccount, None] = {}


class OneLineAccount(OneLineShare):
    __slots__ = ("floor", "level", "ready", "waiting")

    def __init__(self, level: OneLineLevel, price: float) -> None:
        super().__init__(price)
        self.level = level
        self.floor = 0.0
        self.ready: dict[OneLinePosition, None] = {}
        self.waiting = 0


class OneLinePosition(OneLineShare):
    __slots__ = ("account", "flow", "waiters")

    def __init__(self, flow: OneLineFlow, account: OneLineAccount) -> None:
        super().__init__()
        self.flow = flow
        self.account = account
        self.waiters: dict[Any, tuple[float, float, float]] = {}

    def is_older(self, other: OneLinePosition) -> bool:
        return next(iter(self.waiters.values()))[2] < next(iter(other.waiters.values()))[2]

    def put(self, waiter: object, ticket: tuple[float, float, float]) -> None:
        flow, line = (self.flow, self.flow.line)
        self.waiters[waiter] = ticket
        self.account.waiting += 1
        flow.waiting += 1
        line.waiting += 1
        line.waits[flow] = None
        flow.refresh()

    def take(self, waiter: object) -> tuple[float, float, float]:
        flow, line = (self.flow, self.flow.line)
        ticket = self.waiters.pop(waiter)
        self.account.waiting -= 1
        flow.waiting -= 1
        line.waiting -= 1
        if not flow.waiting:
            del line.waits[flow]
        return ticket


class OneLineTenantLine:
    __slots__ = ("accounts", "flows", "mean_held_s", "mean_wait_s", "name", "pace", "price", "waiting", "waits")

    def __init__(self, name: str, levels: tuple[OneLineLevel, ...], price: float) -> None:
        self.name = name
        self.price = price
        self.accounts = tuple(OneLineAccount(level, price) for level in levels)
        self.waits: dict[OneLineFlow, None] = {}
        self.waiting = 0
        self.flows = 0
        self.pace = Pace()
        self.mean_wait_s: float | None = None
        self.mean_held_s: float | None = None

    def use_price(self, price: float) -> None:
        if self.price != price:
            self.price = price
            for account in self.accounts:
                account.price = price

    def learn_wait(self, wait_s: float) -> None:
        mean = self.mean_wait_s
        self.mean_wait_s = wait_s if mean is None else mean + 0.1 * (wait_s - mean)

    def learn_held(self, held_s: float) -> None:
        mean = self.mean_held_s
        self.mean_held_s = held_s if mean is None else mean + 0.1 * (held_s - mean)


class OneLineFlow:
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

    def __init__(self, agent: str, line: OneLineTenantLine, limit: int) -> None:
        self.agent = agent
        self.line = line
        self.limit = limit
        self.running = 0
        self.waiting = 0
        self.normal = OneLinePosition(self, line.accounts[RANKS[Band.NORMAL]])
        self.positions: list[OneLinePosition | None] = [None, self.normal, None]
        self.credit_since = self.credit_until = 0.0
        self.kept = False

    @property
    def tenant(self) -> str:
        return self.line.name

    @property
    def mean_wait_ms(self) -> int:
        return round((self.line.mean_wait_s or 0.0) * 1000)

    def position(self, band: Band) -> OneLinePosition:
        rank = RANKS[band]
        position = self.positions[rank]
        if position is None:
            position = self.positions[rank] = OneLinePosition(self, self.line.accounts[rank])
        return position

    def last_position(self) -> OneLinePosition:
        for position in reversed(self.positions):
            if position is not None and position.waiters:
                return position
        raise LookupError("nothing of it waits")

    def give_credit(self, since: float, now: float) -> None:
        if self.credit_until <= now:
            self.credit_since = since
        self.credit_until = now + CREDIT_S

    def refresh(self) -> None:
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

    def attach(self, line: OneLineTenantLine) -> None:
        old, limit = (self.line, self.limit)
        self.limit = 0
        self.refresh()
        self.limit = limit
        for position, account in zip(self.positions, line.accounts, strict=True):
            if position is None:
                continue
            if position.waiters and (not account.waiting):
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


S = TypeVar("S", bound=OneLineShare)


def least_served(ready: dict[S, None]) -> tuple[S, float]:
    found: S | None = None
    least = floor = math.inf
    for share in ready:
        settled = share.settled
        tokens = settled + share.pending * share.price
        if tokens < least or (tokens == least and found is not None and share.is_older(found)):
            found, least = (share, tokens)
        if settled < floor:
            floor = settled
    assert found is not None
    del ready[found]
    ready[found] = None
    return (found, floor)


def floor_of(parent: OneLineLevel | OneLineAccount, *, lagging: bool = False) -> float:
    if not parent.ready:
        return parent.floor
    floor = min([share.settled for share in parent.ready])
    return floor - sum([share.pending * share.price for share in parent.ready]) if lagging else floor


def choose_yielding(position: OneLinePosition, now: float) -> tuple[OneLinePosition, Any] | None:
    flow, rank = (position.flow, position.account.level.rank)
    found: tuple[bool, int, float] | None = None
    last = position
    lower_waits = any(account.waiting for account in flow.line.accounts[rank + 1 :])
    for other in flow.line.waits:
        if other.waiting <= flow.waiting and (not lower_waits):
            continue
        candidate = other.last_position()
        lower = candidate.account.level.rank > rank
        if not lower and (other is flow or candidate.account.level.rank < rank):
            continue
        since = candidate.waiters[next(reversed(candidate.waiters))][2]
        if found is None or (lower, other.waiting, since) > found:
            found, last = ((lower, other.waiting, since), candidate)
    if found is None:
        return None
    lower, waiting, since = found
    older = flow.credit_until > now and flow.credit_since < since and (waiting > flow.waiting)
    if lower or older or waiting >= flow.waiting + 2:
        return (last, next(reversed(last.waiters)))
    return None


class OneLineFlows:
    def __init__(self) -> None:
        self.levels = tuple(OneLineLevel(rank) for rank in range(len(RANKS)))
        self.lines: dict[str, OneLineTenantLine] = {}
        self.by_key: dict[tuple[str, str], OneLineFlow] = {}
        self._own: dict[str, OneLineFlow] = {}
        self._extra: dict[OneLineFlow, None] = {}

    def line(self, tenant: str, weight: float) -> OneLineTenantLine:
        line = self.lines.get(tenant)
        if line is None:
            line = self.lines[tenant] = OneLineTenantLine(tenant, self.levels, 1.0 / weight)
        else:
            line.use_price(1.0 / weight)
        return line

    def flow(self, agent: str, tenant: str, *, limit: int, weight: float) -> OneLineFlow:
        line = self.line(tenant, weight)
        flow = self.by_key.get((agent, tenant))
        if flow is None:
            flow = OneLineFlow(agent, line, limit)
            self._keep(flow)
        if self._own.setdefault(agent, flow) is flow:
            self._extra.pop(flow, None)
        else:
            self._use_extra(flow)
        return flow

    def move(self, flow: OneLineFlow, tenant: str, weight: float) -> None:
        if flow.tenant != tenant:
            old = flow.line
            self._drop(flow)
            flow.attach(self.line(tenant, weight))
            self._keep(flow)
            self.drop_unused(old)
        self.line(tenant, weight)

    def forget(self, flow: OneLineFlow) -> None:
        self._drop(flow)
        if self._own.get(flow.agent) is flow:
            del self._own[flow.agent]
            for extra in [extra for extra in self._extra if extra.agent == flow.agent]:
                self._drop(extra)

    def keep_again(self, flow: OneLineFlow) -> None:
        old = flow.line
        flow.attach(self.line(flow.tenant, 1.0 / old.price))
        self.drop_unused(old)
        if (flow.agent, flow.tenant) not in self.by_key:
            self._keep(flow)
            self._use_extra(flow)

    def drop_unused(self, line: OneLineTenantLine) -> None:
        if not line.flows and (not line.waiting) and (self.lines.get(line.name) is line):
            del self.lines[line.name]

    def rebase(self, level: OneLineLevel) -> None:
        rank = level.rank
        accounts = {line.accounts[rank]: None for line in self.lines.values()} | level.ready
        positions = {position: None for flow in self.by_key.values() if (position := flow.positions[rank]) is not None}
        for account in accounts:
            for position in {position: None for position in positions if position.account is account} | account.ready:
                position.settled = max(position.settled - account.floor, -REBASE_TOKENS)
            account.floor = 0.0
            account.settled = max(account.settled - level.floor, -REBASE_TOKENS)
        level.floor = 0.0

    def _keep(self, flow: OneLineFlow) -> None:
        key = (flow.agent, flow.tenant)
        if key in self.by_key:
            self._drop(self.by_key[key])
        self.lines.setdefault(flow.tenant, flow.line)
        self.by_key[key] = flow
        flow.line.flows += 1
        flow.kept = True

    def _drop(self, flow: OneLineFlow) -> None:
        if flow.kept:
            flow.kept = False
            del self.by_key[flow.agent, flow.tenant]
            self._extra.pop(flow, None)
            flow.line.flows -= 1
            self.drop_unused(flow.line)

    def _use_extra(self, flow: OneLineFlow) -> None:
        self._extra.pop(flow, None)
        self._extra[flow] = None
        if len(self._extra) > EXTRA_FLOWS:
            idle = (old for old in self._extra if old is not flow and (not (old.running or old.waiting)))
            if (oldest := next(idle, None)) is not None:
                self._drop(oldest)


NEVER = math.inf

RETRY_MAX_S = 120.0

UNMEASURED_MAX_S = 5.0

Waiter = TypeVar("Waiter")


_GO = QueueVerdict.GO

_NORMAL = Band.NORMAL


class OneLineQueue(Generic[Waiter]):
    __slots__ = ("_flows", "_pace", "_places", "_running", "_waiting", "depth", "displaced")

    def __init__(self, *, depth: int, places: int | None = None) -> None:
        self.depth = depth
        self.displaced: list[Waiter] = []
        self._places: float = math.inf if places is None else places
        self._running: dict[Waiter, tuple[OneLinePosition, float, float]] = {}
        self._waiting = 0
        self._flows = OneLineFlows()
        self._pace = Pace()

    @property
    def places(self) -> int | None:
        return None if self._places == math.inf else int(self._places)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return self._waiting

    def flow(self, agent: str, tenant: str, *, limit: int, weight: float = 1.0) -> OneLineFlow:
        return self._flows.flow(agent, tenant, limit=limit, weight=weight)

    def move(self, flow: OneLineFlow, *, tenant: str, limit: int, weight: float) -> list[Waiter]:
        self._flows.move(flow, tenant, weight)
        return self.set_limit(flow, limit)

    def forget(self, flow: OneLineFlow) -> None:
        self._flows.forget(flow)

    def set_limit(self, flow: OneLineFlow, limit: int) -> list[Waiter]:
        flow.limit = limit
        flow.refresh()
        return self._admit(None)

    def resize(self, places: int | None) -> list[Waiter]:
        self._places = math.inf if places is None else places
        return self._admit(None)

    def ask(
        self, waiter: Waiter, flow: OneLineFlow, *, band: Band = _NORMAL, expected: float, now: float
    ) -> QueueVerdict:
        position = flow.normal if band is _NORMAL else flow.position(band)
        running = self._running
        if flow.running >= flow.limit or len(running) >= self._places:
            return self._line_up(waiter, position, expected, now)
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

    def leave(self, waiter: Waiter, flow: OneLineFlow, *, now: float, cost: float | None = None) -> list[Waiter]:
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

    def refused(self, flow: OneLineFlow, now: float) -> None:
        flow.give_credit(now, now)

    def retry_after_s(self, flow: OneLineFlow, now: float) -> float:
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

    def _line_up(self, waiter: Waiter, position: OneLinePosition, expected: float, now: float) -> QueueVerdict:
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
        if flow.line.waiting >= self.depth and (not self._make_room(position, now)):
            flow.give_credit(now, now)
            return QueueVerdict.FULL
        self._pace.begin(now)
        flow.line.pace.begin(now)
        position.put(waiter, (expected, now, flow.credit_since if has_credit else now))
        flow.credit_until = 0.0
        self._waiting += 1
        return QueueVerdict.WAIT

    def _make_room(self, position: OneLinePosition, now: float) -> bool:
        yields = choose_yielding(position, now)
        if yields is None:
            return False
        last, waiter = yields
        _, _, since = self._take(last, waiter, now)
        last.flow.give_credit(since, now)
        self.displaced.append(waiter)
        return True

    def _step_out(self, waiter: Waiter, flow: OneLineFlow, now: float) -> None:
        for position in flow.positions:
            if position is not None and waiter in position.waiters:
                _, asked_at, _ = self._take(position, waiter, now)
                flow.line.learn_wait(now - asked_at)
                return

    def _admit(self, now: float | None) -> list[Waiter]:
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

    def _next(self) -> OneLinePosition | None:
        for level in self._flows.levels:
            if level.ready:
                account, level.floor = least_served(level.ready)
                position, account.floor = least_served(account.ready)
                return position
        return None

    def _take(self, position: OneLinePosition, waiter: object, now: float | None) -> tuple[float, float, float]:
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
