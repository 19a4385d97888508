"""Questions and orders of the API to the leases."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import msgspec

from hive.audit.approval import Approval
from hive.audit.auth import Person
from hive.audit.shielded import unless
from hive.errors import NotFound
from hive.pooling.lease_views import ended_view, lease_view
from hive.pooling.leases import PoolLeases
from hive.pooling.pooled_lease import LeaseState, PooledLease
from hive.shapes.leases import LeaseView
from hive.store.leases import StoredLease


class LeaseDesk:
    """The leases as callers of the API see them. `socket`: at which the helper lets programs in."""

    def __init__(self, leases: PoolLeases, *, socket: str) -> None:
        self.leases = leases
        self._socket = socket

    def __repr__(self) -> str:
        return f"<LeaseDesk of {self.leases}>"

    # looking ----------------------------------------------------------------------------------------------------------

    def view(self, lease: PooledLease, who: Person) -> LeaseView:
        """One lease; the nonce is for its asker alone."""
        return lease_view(lease, socket=self._socket, is_askers=who.name == lease.row.actor)

    async def views(self, ended: int, who: Person) -> list[LeaseView]:
        """Those in line in their order, those that hold memory, then the last `ended` that are over."""
        living = sorted(self.leases, key=lambda lease: (lease.place is None, lease.place or 0, lease.row.token))
        views = [self.view(lease, who) for lease in living]
        return views + [ended_view(row) for row in (await self.leases.all_ended(ended) if ended else [])]

    async def look(self, id: str, who: Person) -> LeaseView:
        """One lease, an ended one too. Raises NotFound."""
        if (lease := self.leases.get(id)) is not None:
            return self.view(lease, who)
        if (row := await self.leases.ended(id)) is not None:
            return ended_view(row)
        raise NotFound(f"there is no lease {id[:40]!r}", hint="hive lease list --ended 20")

    async def lines(
        self, id: str, who: Person, *, every_s: float, stopping: asyncio.Event
    ) -> AsyncGenerator[LeaseView, None]:
        """The lease now, at each change and every `every_s`, until it waits no more."""
        lease = self.leases.get(id)
        if lease is None:
            yield await self.look(id, who)
            return
        self.leases.read(lease, 1)
        try:
            while True:
                changed = lease.changed
                yield self.view(lease, who)
                if lease.state is not LeaseState.WAITING:
                    return
                await unless(stopping, changed.wait(), timeout_s=every_s)
                if stopping.is_set():
                    return
        finally:
            self.leases.read(lease, -1)

    # ordering ---------------------------------------------------------------------------------------------------------

    async def ask(self, wanted: StoredLease, who: Person, *, approval: Approval) -> PooledLease:
        """Raises as `PoolLeases.ask`."""
        approval.check("lease-run" if wanted.kind == "job" else "lease-take")
        if wanted.grace_s < 0:
            wanted = msgspec.structs.replace(wanted, grace_s=self.leases.grace_s)
        return await self.leases.ask(wanted, who.role, approval)

    async def renew(self, id: str, token: int, ttl_s: float | None, who: Person) -> PooledLease:
        """Raises as `PoolLeases.renew`."""
        return await self.leases.renew(id, token, ttl_s, who.name, who.role)

    async def release(self, id: str, token: int, who: Person) -> PooledLease:
        """Raises as `PoolLeases.release`."""
        return await self.leases.release(id, token, who.name, who.role)

    async def end(self, id: str, who: Person, *, approval: Approval) -> PooledLease:
        """Raises as `PoolLeases.end`."""
        approval.check("lease-end")
        return await self.leases.end(id, who.name, approval)
