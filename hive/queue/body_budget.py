"""Shares of the request bodies held at once: of one tenant, of one agent and its callers. Pure.

No body is refused for what others hold as long as it fits into one body's size. Missing room is taken from uploads that
have not ended, the largest holder's first: so memory stays bounded with any number of agents.
"""

from __future__ import annotations

from typing import Protocol

AGENT_PART = 8
"""One agent and its callers hold at most the budget divided by this."""
TENANT_PART = 2
"""One tenant's agents hold at most the budget divided by this, beside the part that is guaranteed to each."""


class Upload(Protocol):
    """A request whose body is coming in."""

    @property
    def parked(self) -> bool:
        """True while it waits for its agent to wake, which therefore cannot send the rest."""
        ...

    def on_body_displaced(self) -> None:
        """Tells it that its room went to another upload, so that it ends with a refusal. Called by the request that
        took the room."""
        ...


class TenantBodies:
    """Bytes that the agents of one tenant hold together."""

    __slots__ = ("used",)

    def __init__(self) -> None:
        self.used = 0

    def __repr__(self) -> str:
        return f"<TenantBodies {self.used} B>"


class BodyShare:
    """Bytes that one agent's own requests hold, or its callers' (`of` is the agent's own share then).

    `is_tenants`: it may hold as much as a tenant may; so may an operator, who acts for many agents.
    """

    __slots__ = ("is_callers", "is_tenants", "sibling", "tenant", "uploads", "used")

    def __init__(self, tenant: TenantBodies, *, of: BodyShare | None = None, is_tenants: bool = False) -> None:
        self.tenant = tenant
        self.used = 0
        self.is_callers = of is not None
        self.is_tenants = is_tenants
        self.uploads: dict[Upload, int] = {}
        """Bytes of each body that has not ended, the oldest first."""
        self.sibling: BodyShare | None = of
        if of is not None:
            of.sibling = self

    def __repr__(self) -> str:
        return f"<BodyShare {self.used} B, {len(self.uploads)} uploads>"

    def move(self, tenant: TenantBodies) -> None:
        """Moves the agent, with the bytes it holds, to another tenant."""
        self.tenant.used -= self.used
        tenant.used += self.used
        self.tenant = tenant

    @property
    def agents(self) -> int:
        """Bytes held by the agent and its callers together."""
        return self.used + (self.sibling.used if self.sibling is not None else 0)


class BodyBudget:
    """Bytes that may be held in all request bodies together, `one_body` of them guaranteed to each share.

    `displaced`: uploads that are to be refused, because their room went to another one.

    >>> budget, tenant = BodyBudget(100, one_body=10), TenantBodies()
    >>> one, other = BodyShare(tenant), BodyShare(TenantBodies())
    >>> budget.take(one, 12), budget.take(one, 1), budget.take(other, 10), budget
    (True, False, True, <BodyBudget 22/100 B>)
    """

    __slots__ = ("_uploading", "agent_limit", "displaced", "limit", "one_body", "tenant_limit", "used")

    def __init__(self, limit: int, *, one_body: int) -> None:
        self.used = 0
        self.displaced: list[Upload] = []
        self._uploading: dict[BodyShare, None] = {}
        """Shares with bodies that have not ended."""
        self.use(limit, one_body=one_body)

    def __repr__(self) -> str:
        return f"<BodyBudget {self.used}/{self.limit} B>"

    def use(self, limit: int, *, one_body: int) -> None:
        """The configuration was read again."""
        self.limit = limit
        self.one_body = one_body
        self.agent_limit = max(one_body, limit // AGENT_PART)
        self.tenant_limit = max(one_body, limit // TENANT_PART)

    def take(self, share: BodyShare, size: int) -> bool:
        """Counts `size` bytes more until `give`, or says False. May leave uploads in `displaced`."""
        tenant = share.tenant
        held, all_held, tenants = share.used + size, self.used + size, tenant.used + size
        if held > self.one_body and not self._fits_agent(share, size):
            return False
        if all_held > self.limit or tenants > self.tenant_limit:
            if held > self.one_body:
                return False
            self._make_room(share, size)
        self.used, share.used, tenant.used = all_held, held, tenants
        return True

    def give(self, share: BodyShare, size: int) -> None:
        self.used -= size
        share.used -= size
        share.tenant.used -= size

    def goes_on(self, share: BodyShare, upload: Upload, size: int) -> None:
        """The body has not ended: `size` bytes more of it are held."""
        share.uploads[upload] = share.uploads.get(upload, 0) + size
        self._uploading[share] = None

    def ended(self, share: BodyShare, upload: Upload) -> None:
        """Ends an upload: the body is whole, or its request is over. Does nothing for an upload it does not know."""
        if share.uploads.pop(upload, None) is not None and not share.uploads:
            del self._uploading[share]

    def _fits_agent(self, share: BodyShare, size: int) -> bool:
        most = self.tenant_limit if share.is_tenants else self.agent_limit
        if share.is_callers and share.used + size > most - self.one_body:
            return False  # so that callers leave the agent itself what it is guaranteed
        return share.agents + size <= most

    def _make_room(self, asking: BodyShare, size: int) -> None:
        """Displaces other uploads: first within the tenant as far as its limit is short, then of all tenants. May not
        find enough."""
        tenant = asking.tenant
        lacks = tenant.used + size - self.tenant_limit
        freed = self._displace([one for one in self._uploading if one.tenant is tenant], asking, lacks)
        self._displace(list(self._uploading), asking, self.used + size - self.limit - freed)

    def _displace(self, shares: list[BodyShare], asking: BodyShare, lacks: int) -> int:
        """Bytes of those that are displaced: the largest holder's oldest upload first."""
        freed = 0
        for share in sorted(shares, key=lambda one: one.used, reverse=True):
            for upload, held in share.uploads.items() if share is not asking else ():
                if freed >= lacks:
                    return freed
                if not upload.parked and upload not in self.displaced:
                    self.displaced.append(upload)
                    freed += held
        return freed


class HeldBody:
    """The bytes of the budget that one request holds for its body, until `release`. Nothing is counted before it is
    known whose they are (`share`): such a request is refused. The request is passed in: kept here, it would be a
    cycle for the garbage collector.

    >>> from unittest.mock import Mock
    >>> budget = BodyBudget(100, one_body=10)
    >>> held = HeldBody(budget)
    >>> held.share = BodyShare(TenantBodies())
    >>> held.take(8), held.take(8), held, budget
    (True, False, <HeldBody 8 B>, <BodyBudget 8/100 B>)
    >>> held.release(Mock()); budget
    <BodyBudget 0/100 B>
    """

    __slots__ = ("budget", "share", "size")

    def __init__(self, budget: BodyBudget, share: BodyShare | None = None) -> None:
        self.budget = budget
        self.share = share
        self.size = 0

    def __repr__(self) -> str:
        return f"<HeldBody {self.size} B>"

    def take(self, size: int, *, upload: Upload | None = None) -> bool:
        """Takes room for `size` bytes more; False where there is none. Uploads that lose their room by it have ended
        when it returns. `upload`: the request, if its body has not ended; it is told if it loses its room."""
        share, budget = self.share, self.budget
        if share is None:
            return True
        if not budget.take(share, size):
            return False
        self.size += size
        if upload is not None:
            budget.goes_on(share, upload, size)
        while budget.displaced:
            budget.displaced.pop().on_body_displaced()
        return True

    def is_in(self, upload: Upload) -> None:
        """Ends its time as an upload: no other upload displaces it any more."""
        share = self.share
        if share is not None and share.uploads:
            self.budget.ended(share, upload)

    def release(self, upload: Upload) -> None:
        """Gives all of it back; called once, on every exit."""
        share = self.share
        if share is not None:
            if share.uploads:
                self.budget.ended(share, upload)
            self.budget.give(share, self.size)
