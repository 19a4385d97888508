"""The cloud guard in the way of a request: asked when it begins to wait, and again where its connection is taken.

The decision is `models/cloud_guard.py`. It is made by the settings of that moment, so that one which waited while the
guard was narrowed does not leave any more; a request that was sent before goes on to its end.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Protocol

from hive.bodies.body import Asked
from hive.domain import Caller, CloudUse, origin_of
from hive.errors import CloudRefused
from hive.models.cloud_guard import may_leave, permit_of, why_it_stays
from hive.proxy.connection_limits import Seldom
from hive.proxy.registry import AgentEntry
from hive.queue.tenants import Tenant
from hive.routing.model_routing import ModelRouting
from hive.routing.slot import Slot
from hive.settings.table import Settings

log = logging.getLogger("hive.proxy")


class Leaver(Protocol):
    """The part of what was decided of a request that counts here (`Decided`)."""

    @property
    def caller(self) -> Caller: ...
    @property
    def tenant(self) -> Tenant: ...
    @property
    def is_local_only(self) -> bool: ...


class CloudGuard:
    """One for the proxy. `settings`: those in force now. `left`: requests that have left, by tenant."""

    def __init__(self, settings: Callable[[], Settings], routing: ModelRouting) -> None:
        self._settings = settings
        self._routing = routing
        self._seldom = Seldom()
        self.left: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"<CloudGuard {sum(self.left.values())} left>"

    def permit(self, entry: AgentEntry, decided: Leaver) -> CloudUse:
        """The permit of this request, by what is in force now."""
        box = self._settings().inference.cloud
        return permit_of(box, decided.tenant.cloud, entry.row.cloud, is_local_only=decided.is_local_only)

    def check(
        self, slot: Slot, entry: AgentEntry, decided: Leaver, asked: Asked | None, *, is_fallback: bool = False
    ) -> bool:
        """`check_model` for a request as it was read."""
        named, model = ("", "") if asked is None else (asked.model, asked.answering)
        return self.check_model(slot, entry, decided, named, model, is_fallback=is_fallback)

    def check_model(
        self, slot: Slot, entry: AgentEntry, decided: Leaver, named: str, model: str, *, is_fallback: bool = False
    ) -> bool:
        """Whether a request that names `named` leaves the box if it goes to `model` in this slot. Raises CloudRefused
        where it may not.

        `is_fallback`: a rung of a task after its first. The later target of an alias is known here.
        """
        if not slot.may_leave or slot.backend is None or not slot.is_far(slot.backend, model):
            return False
        is_fallback = is_fallback or bool(named and self._routing.is_later_target(named, decided.caller))
        permit = self.permit(entry, decided)
        if not may_leave(permit, is_fallback=is_fallback):
            raise CloudRefused(why_it_stays(permit, model, is_local_only=decided.is_local_only))
        return True

    def leaves(self, slot: Slot, entry: AgentEntry, decided: Leaver, asked: Asked | None) -> None:
        """Counts a request that is sent to a far server, and tells of it: a line a second for each agent."""
        tenant = decided.tenant.name
        self.left[tenant] = self.left.get(tenant, 0) + 1
        more = self._seldom.left_out(entry.row.id, time.monotonic())
        if more is not None:
            model = "" if asked is None else asked.answering
            host = "" if slot.backend is None else origin_of(slot.backend.address).name
            names = (entry.row.name, tenant, model, host)
            log.info("request_left_box agent=%s tenant=%s model=%r host=%s more=%d", *names, more)
