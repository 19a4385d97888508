"""Compares what is on record as deployed with what the servers really have: at the daemon's start, and from then on."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from hive.agents.transition_lock import outcome_of
from hive.control.active_backend import Active
from hive.domain import DeploymentState
from hive.errors import HiveError
from hive.pool.deployed import Place, SeenModel, compared
from hive.pool.state import SlotState
from hive.pooling.deployments import AT_SERVER, Deployments
from hive.pooling.pooled_slot import PooledSlot
from hive.pooling.pooling import ModelPool
from hive.settings.table import Settings
from hive.store.deployments import StoredDeployment
from hive.tasks import spawn

log = logging.getLogger("hive.daemon")

LOOK_S = 5.0
"""Between two looks where the pool decides nothing; the server in use is asked no more often."""
NOT_DESCRIBED = "the pool has no model of this name any more: hive.conf describes none, or the pool is off"
PLACES = {
    SlotState.READY: Place.LOADED,
    SlotState.DRAINING: Place.LOADED,
    SlotState.ASLEEP: Place.LOADED,
    SlotState.LOADING: Place.LOADING,
    SlotState.STOPPING: Place.MOVING,
}


class DeploymentWatch:
    """One for the daemon. Each row that an earlier daemon left is looked at once as such, when its server is known."""

    def __init__(
        self,
        deployments: Deployments,
        *,
        pool: ModelPool,
        active: Active,
        settings: Callable[[], Settings],
        resumed: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`resumed`: returns once it is on record which loads of an earlier daemon have failed with it."""
        self._deployments = deployments
        self._pool = pool
        self._active = active
        self._settings = settings
        self._resumed = resumed
        self._left = {row.id: row.at for row in deployments.rows()}
        """Rows of an earlier daemon that were not compared yet: the time of each."""
        self._asked_at = float("-inf")
        self._in_memory: frozenset[str] | None = None

    def __repr__(self) -> str:
        return f"<DeploymentWatch {len(self._left)} not looked at yet>"

    async def run(self) -> None:
        """Looks after each decision of the pool, and every few seconds, until cancelled."""
        await self._pool.known()
        if self._resumed is not None:
            await self._resumed()
        while True:
            if self._deployments.rows():
                await self.look()
            try:
                async with asyncio.timeout(LOOK_S):
                    await self._pool.passed()
            except TimeoutError:
                continue

    async def look(self) -> None:
        """Compares every row."""
        await self._ask_server()
        for row in self._deployments.rows():
            await self._compare(row)

    async def _compare(self, row: StoredDeployment) -> None:
        at_start = self._left.get(row.id) == row.at
        seen = self._at_server(row) if AT_SERVER in row.id else self._in_pool(row.id)
        restore = self._settings().registry.restore
        found = compared(row.state, row.last_error, row.digest, seen, at_start=at_start, restore=restore)
        change = self._deployments.compared(row, found)
        written = await outcome_of(self._deployments.write(change))
        if isinstance(written, HiveError):
            log.warning("deployment_not_written id=%s error=%s", row.id, written.message)
            return  # looked at again
        if at_start and seen.place not in (Place.UNKNOWN, Place.MOVING):
            del self._left[row.id]
        if found.loads:
            log.info("deployment_restored id=%s", row.id)
            self._load_again(row)

    def _load_again(self, row: StoredDeployment) -> None:
        if AT_SERVER in row.id:
            spawn(self._load_at_server(row), name=f"restore {row.name}")
        else:
            self._pool.load_again([row.id])

    async def _load_at_server(self, row: StoredDeployment) -> None:
        server = self._active.control
        if server is None:
            return
        came = await outcome_of(server.load(row.name))
        state = DeploymentState.FAILED if isinstance(came, HiveError) else DeploymentState.LOADED
        why = came.message if isinstance(came, HiveError) else ""
        self._asked_at = float("-inf")
        await outcome_of(self._deployments.write(self._deployments.reached(row.id, row.at, state, why)))

    # what there is ----------------------------------------------------------------------------------------------------

    def _in_pool(self, id: str) -> SeenModel:
        slot = self._pool.slots.get(id)
        if slot is None:
            return SeenModel(Place.GONE, NOT_DESCRIBED, is_refused=True)
        self._pool.look_at_approval(slot)
        return seen_in(slot, self._pool.footprints.known(slot.entry).digest)

    async def _ask_server(self) -> None:
        if not any(AT_SERVER in row.id for row in self._deployments.rows()):
            return
        if time.monotonic() - self._asked_at >= LOOK_S:
            self._in_memory, self._asked_at = await self._active.loaded(), time.monotonic()

    def _at_server(self, row: StoredDeployment) -> SeenModel:
        """Of the inference server in use: unknown while it does not answer."""
        target = self._active.target
        if target is not None and target.kind != row.backend:
            return SeenModel(Place.GONE, f"the inference server in use is {target.kind}", is_refused=True)
        if target is None or not self._active.up or self._in_memory is None:
            return SeenModel(Place.UNKNOWN)
        offered = {model.name: model for model in self._active.seen[1]}
        model = offered.get(row.name)
        if model is None:
            return SeenModel(Place.GONE, f"{row.backend} does not offer it any more", is_refused=True)
        if row.name in self._in_memory:
            return SeenModel(Place.LOADED, digest=model.digest)
        why = self._deployments.why_not_signed(row)
        return SeenModel(Place.GONE, why, is_refused=bool(why), digest=model.digest)


def seen_in(slot: PooledSlot, digest: str) -> SeenModel:
    """A slot of the pool as a deployment sees it: one that waits for room is being loaded."""
    place = PLACES.get(slot.state, Place.GONE)
    if place is Place.GONE and slot.barred:
        return SeenModel(place, slot.barred, is_refused=True, digest=digest)
    is_wanted = slot.order is not None or slot.pinned_at is not None
    if slot.state is SlotState.COLD and is_wanted and not slot.error and not slot.never:
        return SeenModel(Place.LOADING, digest=digest)
    return SeenModel(place, (slot.error or slot.never) if place is Place.GONE else "", digest=digest)
