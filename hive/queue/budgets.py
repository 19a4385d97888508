"""The spending of tenants and agents with a budget, as the proxy counts it: what the daemon has told, what it cannot
have told yet, and what the requests in flight will probably cost. Pure: the time (Unix seconds) is passed in.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, tzinfo
from typing import NamedTuple

from hive.budgets import BudgetKind, BudgetPeriods, TokenLimits, periods_at

_KINDS = tuple(BudgetKind)
"""By a name of their own, see `hive.queue.gate`."""


class SpentTokens(NamedTuple):
    """Tokens of ended requests: of this day, of this month, and of this day's requests that left the box."""

    day: int = 0
    month: int = 0
    cloud_day: int = 0


class OwnSpending(NamedTuple):
    """One ended request: its event in the proxy's spool, when it ended, its tokens, whether it left the box."""

    number: int
    at: float
    tokens: int
    is_far: bool


class SpendingAccount:
    """The spending of one tenant, or of one agent. `scope`: which of the two; `name`: for people.

    `told`: what the daemon had counted up to the event `told_to` of this proxy, None until it has said so. `own`: the
    requests after that. `pending`, `pending_cloud`: tokens expected of requests in flight.
    """

    __slots__ = (
        "_cloud",
        "_day",
        "_month",
        "key",
        "limits",
        "name",
        "own",
        "pending",
        "pending_cloud",
        "scope",
        "told",
    )

    def __init__(self, scope: str, key: str, name: str, limits: TokenLimits) -> None:
        self.scope = scope
        self.key = key
        self.name = name
        self.limits = limits
        self.told: SpentTokens | None = None
        self.own: list[OwnSpending] = []
        self.pending = self.pending_cloud = 0.0
        self._day = self._month = self._cloud = 0

    def __repr__(self) -> str:
        return f"<SpendingAccount {self.scope} {self.name} {self.told}, {len(self.own)} own, {self.pending:g} pending>"

    def used(self, kind: BudgetKind) -> float:
        """Tokens spent, with those expected of what is in flight."""
        told = self.told or SpentTokens()
        if kind is BudgetKind.DAY:
            return told.day + self._day + self.pending
        if kind is BudgetKind.MONTH:
            return told.month + self._month + self.pending
        return told.cloud_day + self._cloud + self.pending_cloud

    def spend(self, own: OwnSpending) -> None:
        self.own.append(own)
        self._day += own.tokens
        self._month += own.tokens
        self._cloud += own.tokens if own.is_far else 0

    def learn(self, told: SpentTokens, to: int, periods: BudgetPeriods) -> None:
        """Takes the daemon's count of this day and month, with the events up to `to` in it."""
        self.told = told
        self.own = [one for one in self.own if one.number > to]
        self.count(periods)

    def count(self, periods: BudgetPeriods) -> None:
        """Adds up what is its own in these periods."""
        today = [one for one in self.own if one.at >= periods.day_begins]
        self._day = sum(one.tokens for one in today)
        self._cloud = sum(one.tokens for one in today if one.is_far)
        self._month = sum(one.tokens for one in self.own if one.at >= periods.month_begins)


class BudgetSpent(NamedTuple):
    """A limit that is reached."""

    account: SpendingAccount
    kind: BudgetKind
    limit: int
    used: int
    resets_at: float


class SpendingUnknown(NamedTuple):
    """Nobody has said yet what this account has spent."""

    account: SpendingAccount


class BudgetHold:
    """One request in flight: what it will probably cost, until it is known or it has cost nothing."""

    __slots__ = ("_accounts", "_tokens", "is_far")

    def __init__(self, accounts: tuple[SpendingAccount, ...], tokens: float, *, is_far: bool) -> None:
        self._accounts = accounts
        self._tokens = tokens
        self.is_far = is_far
        for account in accounts:
            account.pending += tokens
            account.pending_cloud += tokens if is_far else 0.0

    def spend(self, number: int, tokens: int, at: float) -> None:
        """It has ended with this event, and cost so much."""
        for account in self._accounts:
            account.spend(OwnSpending(number, at, tokens, self.is_far))
        self.release()

    def release(self) -> None:
        """Nothing is expected of it any more. A second call does nothing."""
        for account in self._accounts:
            account.pending -= self._tokens
            account.pending_cloud -= self._tokens if self.is_far else 0.0
        self._accounts = ()


class SpendingBook:
    """The accounts of all tenants and agents with a budget.

    >>> book = SpendingBook()
    >>> alice = book.account("agent", "a1", "alice", TokenLimits(tokens_per_day=100))
    >>> book.take((alice,), 60.0, is_far=False, now=0.0)
    SpendingUnknown(account=<SpendingAccount agent alice None, 0 own, 0 pending>)
    >>> alice.learn(SpentTokens(day=30), 0, book.periods)
    >>> holds = [book.take((alice,), 60.0, is_far=False, now=0.0) for _ in range(3)]
    >>> [type(hold).__name__ for hold in holds], holds[2].used, holds[2].resets_at
    (['BudgetHold', 'BudgetHold', 'BudgetSpent'], 150, 86400.0)
    >>> holds[0].spend(1, 5, at=0.0); holds[1].release(); alice.used(BudgetKind.DAY)
    35.0
    """

    def __init__(self, zone: tzinfo = UTC) -> None:
        self._zone = zone
        self._accounts: dict[tuple[str, str], SpendingAccount] = {}
        self.periods = periods_at(0.0, zone)

    def __repr__(self) -> str:
        return f"<SpendingBook {len(self._accounts)} accounts>"

    def use_zone(self, zone: tzinfo, now: float) -> None:
        """The days end elsewhere: what the daemon has told was of other ones."""
        if str(zone) != str(self._zone):
            self._zone = zone
            self.periods = periods_at(now, zone)
            for account in self._accounts.values():
                account.told = None
                account.count(self.periods)

    @property
    def accounts(self) -> list[SpendingAccount]:
        return list(self._accounts.values())

    def account(self, scope: str, key: str, name: str, limits: TokenLimits) -> SpendingAccount:
        """The account of this tenant or agent, made where there is none."""
        found = self._accounts.get((scope, key))
        if found is None:
            found = self._accounts[scope, key] = SpendingAccount(scope, key, name, limits)
        found.name, found.limits = name, limits
        return found

    def find(self, scope: str, key: str) -> SpendingAccount | None:
        return self._accounts.get((scope, key))

    def forget(self, scope: str, key: str) -> None:
        self._accounts.pop((scope, key), None)

    def at(self, now: float) -> BudgetPeriods:
        """The periods at `now`. With a new day, or month, its spending begins anew. A clock that was set back gives
        nothing back: what was spent counts for the day that it is now."""
        if self.periods.day_begins <= now < self.periods.day_ends:
            return self.periods
        before, self.periods = self.periods, periods_at(now, self._zone)
        if self.periods.day_begins > before.day_begins:
            is_new_month = self.periods.month_begins > before.month_begins
            for account in self._accounts.values():
                if account.told is not None:
                    account.told = SpentTokens(0, 0 if is_new_month else account.told.month, 0)
                account.count(self.periods)
        return self.periods

    def take(
        self, accounts: Iterable[SpendingAccount], tokens: float, *, is_far: bool, now: float
    ) -> BudgetHold | BudgetSpent | SpendingUnknown:
        """Counts a request with its expected cost; or says which limit is reached. As long as something of all of them
        is left it goes, so that a budget is crossed by what is in flight then at most."""
        taken = tuple(accounts)
        return self.why_not(taken, is_far=is_far, now=now) or BudgetHold(taken, tokens, is_far=is_far)

    def why_not(
        self, accounts: Iterable[SpendingAccount], *, is_far: bool, now: float
    ) -> BudgetSpent | SpendingUnknown | None:
        """The limit that is reached for a request that came now; None where it would go. Nothing is counted."""
        periods = self.at(now)
        for account in accounts:
            if account.told is None:
                return SpendingUnknown(account)
            for kind in _KINDS:
                limit = account.limits.of(kind)
                if limit and (is_far or kind is not BudgetKind.CLOUD_DAY) and (used := account.used(kind)) >= limit:
                    return BudgetSpent(account, kind, limit, int(used), periods.ends(kind))
        return None
