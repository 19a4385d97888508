"""The budgets of tokens in the proxy: whose they are, what has been spent of them, and the refusal of what is beyond.

A request with a budget counts, with what it will probably cost, from the moment at which it asks for its turn until
its usage event says what it did cost. What was spent before this proxy came, the daemon tells; as long as it has not,
nobody knows, and the request is to come again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime

from hive.budgets import NO_LIMITS, BudgetKind, TokenLimits, tighter, zone_of
from hive.domain import Tier
from hive.errors import BudgetExceeded, HiveError, Saturated
from hive.link.usage import AskSpent, SpentIs
from hive.proxy.connection_limits import Seldom
from hive.proxy.registry import OPERATOR, PREWARM, AgentEntry, Registry
from hive.queue.budgets import BudgetHold, BudgetSpent, SpendingAccount, SpendingBook, SpendingUnknown, SpentTokens
from hive.queue.tenants import Tenant
from hive.settings.table import Settings
from hive.tasks import spawn

log = logging.getLogger("hive.proxy")

AGENT, TENANT = "agent", "tenant"
REFRESH_S = 30.0
"""The daemon is asked again so often: events of a killed proxy come into its count late."""
NOT_KNOWN = "what was spent of the budget of tokens is not known yet"
FIRST_AGAIN_S = 1.0
AGAIN_S = 0.5
WORDS = {
    BudgetKind.DAY: "tokens of this day",
    BudgetKind.MONTH: "tokens of this month",
    BudgetKind.CLOUD_DAY: "tokens of this day for requests that leave the box",
}

Ask = Callable[[AskSpent], Awaitable[SpentIs]]


class Budgets:
    """One for the proxy. `ask`: asks the daemon, raises LinkLost, TimedOut; None where there is none."""

    def __init__(self, registry: Registry, settings: Callable[[], Settings], epoch: str) -> None:
        self._registry = registry
        self._settings = settings
        self._epoch = epoch
        self._tiers: dict[Tier, TokenLimits] = {}
        self._seldom = Seldom()
        self._looking: asyncio.Handle | None = None
        self._asking: asyncio.Task[None] | None = None
        self._refresh: asyncio.TimerHandle | None = None
        self.ask: Ask | None = None
        self.book = SpendingBook()
        self.is_on = False
        """True if anybody has a budget."""

    def __repr__(self) -> str:
        return f"<Budgets {self.book}>"

    # whose they are ---------------------------------------------------------------------------------------------------

    def changed(self) -> None:
        """Agents or settings have changed: who has a budget is looked at anew, once in this turn of the loop."""
        if self._looking is None:
            self._looking = asyncio.get_running_loop().call_soon(self.look)

    def heard(self) -> None:
        """The daemon is there (again)."""
        self.look()
        if self.is_on:
            self._ask_soon(0.0)
            self._refresh_in(FIRST_AGAIN_S)

    def look(self) -> None:
        """Makes the accounts of all who have a budget."""
        if self._looking is not None:
            self._looking.cancel()
            self._looking = None
        settings = self._settings()
        self.book.use_zone(zone_of(settings.budget.zone) or UTC, time.time())
        self._tiers = {tier: settings.budget.of_tier(tier) for tier in Tier}
        wanted = {(TENANT, name): (name, row.budget) for name, row in settings.tenants.items() if row.budget.is_set}
        for entry in self._registry.by_id.values():
            limits = self._limits_of(entry)
            if limits.is_set:
                wanted[AGENT, entry.row.id] = entry.row.name, limits
        before = {(account.scope, account.key): account.limits for account in self.book.accounts}
        for scope, key in before.keys() - wanted.keys():
            self.book.forget(scope, key)
        for (scope, key), (name, limits) in wanted.items():
            self.book.account(scope, key, name, limits)
        self.is_on = self._registry.has_budgets = bool(wanted)
        if before.keys() != wanted.keys():
            self._registry.generation += 1  # decisions about heads know their accounts
        if any(account.told is None for account in self.book.accounts):
            self._ask_soon(0.0)
        if self.is_on and self._refresh is None:
            self._refresh_in(REFRESH_S)

    def _limits_of(self, entry: AgentEntry) -> TokenLimits:
        if entry.row.id in (OPERATOR, PREWARM):
            return NO_LIMITS
        return tighter(entry.row.limits, self._tiers.get(entry.row.tier, NO_LIMITS))

    def accounts_of(self, entry: AgentEntry, tenant: Tenant) -> tuple[SpendingAccount, ...]:
        """The accounts that requests of this agent for this tenant are charged to."""
        if not self.is_on:
            return ()
        found = (self.book.find(AGENT, entry.row.id), self.book.find(TENANT, tenant.name))
        return tuple(account for account in found if account is not None)

    # what is spent ----------------------------------------------------------------------------------------------------

    def take(self, accounts: tuple[SpendingAccount, ...], tokens: float, *, is_far: bool) -> BudgetHold:
        """Counts a request with its expected cost. Raises BudgetExceeded, Saturated where it is not known yet what was
        spent."""
        now = time.time()
        verdict = self.book.take(accounts, tokens, is_far=is_far, now=now)
        if isinstance(verdict, BudgetHold):
            return verdict
        if isinstance(verdict, SpendingUnknown):
            self._ask_soon(0.0)
            raise Saturated(NOT_KNOWN, retry_after_s=1)
        account = verdict.account
        more = self._seldom.left_out(f"{account.scope} {account.key}", time.monotonic())
        if more is not None:
            names = (account.scope, account.name, verdict.kind, verdict.limit, verdict.used)
            log.info("budget_refuses scope=%s name=%s budget=%s limit=%d used=%d more=%d", *names, more)
        raise exceeded(verdict, now)

    def why_not(self, entry: AgentEntry, tenant: Tenant, *, is_far: bool) -> str:
        """The refusal that a request of this agent for this tenant would meet now, a sentence; empty for none."""
        now = time.time()
        verdict = self.book.why_not(self.accounts_of(entry, tenant), is_far=is_far, now=now)
        if verdict is None:
            return ""
        return NOT_KNOWN if isinstance(verdict, SpendingUnknown) else exceeded(verdict, now).message

    def _refresh_in(self, seconds: float) -> None:
        if self._refresh is not None:
            self._refresh.cancel()
        self._refresh = asyncio.get_running_loop().call_later(seconds, self._refreshed)

    def _refreshed(self) -> None:
        self._refresh = None
        if self.is_on:
            self._ask_soon(0.0)
            self._refresh_in(REFRESH_S)

    def _ask_soon(self, after_s: float) -> None:
        if self.ask is not None and (self._asking is None or self._asking.done()):
            self._asking = spawn(self._ask(after_s), name="ask what was spent")

    async def _ask(self, after_s: float) -> None:
        """Asks the daemon what all accounts have spent; one that does not answer is asked with the next need."""
        await asyncio.sleep(after_s)
        accounts, periods = self.book.accounts, self.book.at(time.time())
        if self.ask is None or not accounts:
            return
        message = AskSpent(
            epoch=self._epoch,
            day_begins=periods.day_begins,
            month_begins=periods.month_begins,
            agents=[account.key for account in accounts if account.scope == AGENT],
            tenants=[account.key for account in accounts if account.scope == TENANT],
        )
        try:
            told = await self.ask(message)
        except HiveError as error:
            if (more := self._seldom.left_out("not told", time.monotonic())) is not None:
                log.warning("spent_not_told error=%s more=%d", error.message, more)
            return
        if self.book.at(time.time()) != periods:
            return  # a new day has begun meanwhile, which begins with nothing
        for account in accounts:
            rows = told.agents if account.scope == AGENT else told.tenants
            if (row := rows.get(account.key)) is not None:
                account.learn(SpentTokens(*row), told.committed_to, periods)


def exceeded(spent: BudgetSpent, now: float) -> BudgetExceeded:
    """429: a budget is spent; `resetAt` (Unix seconds) and Retry-After say when it begins anew.

    >>> account = SpendingAccount("tenant", "acme", "acme", TokenLimits(tokens_per_day=100))
    >>> error = exceeded(BudgetSpent(account, BudgetKind.DAY, 100, 130, 86400.0), 86000.0)
    >>> error.message, error.retry_after_s, error.details["resetAt"]
    ('tenant acme has spent its 100 tokens of this day; it begins anew at 1970-01-02 00:00 UTC', 400.0, 86400)
    """
    account, resets = spent.account, datetime.fromtimestamp(spent.resets_at, UTC)
    message = (
        f"{account.scope} {account.name} has spent its {spent.limit} {WORDS[spent.kind]}; it begins anew at "
        f"{resets:%Y-%m-%d %H:%M} UTC"
    )
    details = {"limit": spent.limit, "used": spent.used, "resetAt": int(spent.resets_at)}
    return BudgetExceeded(message, retry_after_s=spent.resets_at - now, details=details)
