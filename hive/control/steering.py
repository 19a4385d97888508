"""The desk behind the API, the part about requests under way and about settings that change while Hive runs."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from hive.agents.transition_lock import outcome_of
from hive.control import request_views
from hive.control.services import Services
from hive.errors import HiveError, NotFound
from hive.link.requests import QueueIs
from hive.shapes.system import CancelledRequest, Config, Queue, RequestView
from hive.store import usage


class Steering:
    """See `hive.control.desk.Desk`."""

    _parts: Services

    async def queue(self) -> Queue:
        return request_views.queue_view(await self._parts.gates.queue())

    async def cancel_request(self, request_id: str) -> CancelledRequest:
        await self._parts.gates.cancel(request_id)
        return {"cancelled": request_id}

    async def request(self, request_id: str) -> RequestView:
        ended, queue = await asyncio.gather(
            self._parts.database.read(lambda conn: usage.request(conn, request_id)),
            outcome_of(self._parts.gates.queue()),
        )
        if ended is not None:
            return request_views.ended_request_view(ended, self._name_of(ended.agent))
        under_way = queue.requests if isinstance(queue, QueueIs) else []
        for told in under_way:
            if told.id == request_id:
                return request_views.request_view(told)
        missing = f"; {queue.message}" if isinstance(queue, HiveError) else ""
        raise NotFound(
            f"there is no request {request_id[:80]!r}{missing}",
            hint="one that ended is here within a second, for usage_retention_days; one that was refused never is",
        )

    def _name_of(self, agent: str) -> str | None:
        life = self._parts.roster.get(agent)
        return None if life is None else life.agent.name

    def config(self) -> Config:
        return {"settings": self._parts.config.view()}

    async def change_config(self, changes: Mapping[str, Any], actor: str) -> Config:
        await self._parts.config.change(changes, actor)
        return self.config()
