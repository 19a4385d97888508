"""A pool with leases: PoolWorld (pool_world.py), and what its users do with leases."""

from __future__ import annotations

import asyncio
from typing import Any

from hive.audit.auth import Person
from hive.domain import Role
from hive.pool.state import MIB
from hive.pooling.lease_desk import LeaseDesk
from hive.pooling.pooled_lease import PooledLease
from hive.shapes.leases import LeaseView
from hive.store.leases import StoredLease
from hive.tasks import spawn
from tests.approvals import RUN, TAKE
from tests.pooling.pool_world import PoolWorld
from tests.waiting import until

ANN, BEN = Person("uid:1000", Role.OPERATOR), Person("uid:1001", Role.OPERATOR)
ROOT = Person("uid:0", Role.ADMIN)


class LeaseWorld(PoolWorld):
    """Every lease that is asked for here has a reader until it is granted, unless `is_read` is False."""

    @property
    def desk(self) -> LeaseDesk:
        return LeaseDesk(self.pool.leases, socket="/nowhere/lease.sock")

    async def lease(
        self, mb: int, *, who: Person = ANN, kind: str = "job", is_read: bool = True, **wanted: Any
    ) -> PooledLease:
        given = {"wait_s": 60.0, "ttl_s": None if kind == "job" else 60.0, "grace_s": 0.1, "is_whole": True} | wanted
        row = StoredLease(
            kind=kind, state="waiting", actor=who.name, mb=mb, boot="", asked_s=0.0, created_at=0.0, **given
        )
        lease = await self.desk.ask(row, who, approval=RUN if row.kind == "job" else TAKE)
        if is_read:
            spawn(self.read(lease.id, who), name=f"read {lease.id}")
        return lease

    async def read(self, id: str, who: Person = ANN) -> list[LeaseView]:
        """All that a reader is told, until it is granted or over."""
        return [view async for view in self.desk.lines(id, who, every_s=0.2, stopping=asyncio.Event())]

    async def until_lease(self, lease: PooledLease, state: str) -> None:
        """Returns when the lease is in this state, in the pool of the daemon that is here now."""
        await until(lambda: self.lease_state(lease.id) == state)

    def lease_state(self, id: str) -> str:
        found = self.pool.leases.get(id)
        return "gone" if found is None else str(found.state)

    def books(self) -> dict[str, int]:
        """MiB that are charged, by slot and lease."""
        facts = self.pool.facts(0.0)
        return {slot.id: sum(g.charged_bytes for g in slot.grants) // MIB for slot in facts.slots if slot.grants}

    def acts(self, act: str) -> list[dict[str, Any]]:
        return [detail for name, detail in self.audit.acts if name == act]
