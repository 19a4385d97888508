"""The tenants as the proxy knows them: `[tenant NAME]` of hive.conf, and any name an agent carries. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from hive.models.routing import models_of
from hive.models.salts import cache_group
from hive.queue.body_budget import TenantBodies
from hive.queue.limits import SlidingWindow, window_of
from hive.settings.table import TenantRow

MAX_KEPT = 1000
"""Tenants without a section of their own that are remembered; agents' tenants are few, an operator may name any."""
WAKES_MAX = 6000
WAKES_SPAN_S = 60.0
"""Callers may wake so many agents of one tenant in so long: 100 a second, more than a host does well, and not so many
that one leaked token keeps all of it busy. An agent itself can only be woken once per time it is idle."""
_SPANS_S = {"s": 1.0, "min": 60.0, "hour": 3600.0}
_NO_ROW = TenantRow()


class Tenant:
    """A tenant, as its agents share it: limits, models, weight, and the group that shares a prefix cache.

    `cloud`: narrows how far its requests may go, empty for what the box says."""

    __slots__ = ("bodies", "cache_group", "cloud", "models", "name", "uploads", "wakes", "weight", "window")

    def __init__(self, name: str, row: TenantRow = _NO_ROW) -> None:
        self.name = name
        self.window: SlidingWindow | None = None
        self.bodies, self.uploads = TenantBodies(), TenantBodies()
        self.wakes = SlidingWindow(WAKES_MAX, WAKES_SPAN_S)
        self.learn(row)

    def __repr__(self) -> str:
        return f"<Tenant {self.name} weight {self.weight:g}, {self.window}>"

    def learn(self, row: TenantRow) -> None:
        """Takes over its section. What was charged to the window stays charged while its limit stays the same."""
        self.weight = row.weight
        self.models = models_of(row.models)
        self.cache_group = cache_group(self.name, row.cache_group)
        self.cloud = row.cloud
        limit = rate_of(row.rate_limit)
        self.window = None if limit is None else window_of(*limit, self.window)


class Tenants:
    """Every tenant by name; one that is not configured has no limits.

    >>> tenants = Tenants({"acme": TenantRow(rate_limit="100/min", weight=2)})
    >>> tenants.of("acme"), tenants.of("other")
    (<Tenant acme weight 2, <SlidingWindow 0/100 in 60 s>>, <Tenant other weight 1, None>)
    >>> Tenants({"acme": TenantRow(weight=2)}, rate_limit="50/min").of("acme")
    <Tenant acme weight 2, <SlidingWindow 0/50 in 60 s>>
    """

    def __init__(self, rows: Mapping[str, TenantRow], *, rate_limit: str = "") -> None:
        """`rate_limit`: of each tenant that has none of its own."""
        self._rows = rows
        self._rate_limit = rate_limit
        self._tenants: dict[str, Tenant] = {}

    def of(self, name: str) -> Tenant:
        tenant = self._tenants.get(name)
        if tenant is None:
            if len(self._tenants) >= MAX_KEPT:
                self._tenants = {known: kept for known, kept in self._tenants.items() if known in self._rows}
            tenant = self._tenants[name] = Tenant(name, self._row(name))
        return tenant

    def _row(self, name: str) -> TenantRow:
        row = self._rows.get(name, _NO_ROW)
        return row if row.rate_limit else replace(row, rate_limit=self._rate_limit)

    def use(self, rows: Mapping[str, TenantRow], *, rate_limit: str = "") -> None:
        """The configuration was read again."""
        self._rows, self._rate_limit = rows, rate_limit
        for name, tenant in self._tenants.items():
            tenant.learn(self._row(name))


def rate_of(text: str) -> tuple[int, float] | None:
    """(requests, seconds) of a checked rate limit; None where there is none.

    >>> rate_of("100req/min"), rate_of("5/s"), rate_of("")
    ((100, 60.0), (5, 1.0), None)
    """
    if not text:
        return None
    count, _, span = text.partition("/")
    return int(count.removesuffix("req")), _SPANS_S[span]
