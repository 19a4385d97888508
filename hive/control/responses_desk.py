"""The desk behind the API, the part about what is kept of agents' responses: how much, and deleting it."""

from __future__ import annotations

from hive.control.kept_responses import MIB
from hive.control.services import Services
from hive.shapes.agents import KeptDeleted, KeptOfAgent


class ResponsesDesk:
    """See `hive.control.desk.Desk`."""

    _parts: Services

    async def responses(self, ref: str) -> KeptOfAgent:
        life, proxy = self._parts.roster.find(ref), self._parts.world.settings.proxy
        kept = await self._parts.responses.summed(life.agent.id)
        return {
            "agent": life.agent.id,
            "name": life.agent.name,
            "status": life.status,
            "responses": kept.responses,
            "bytes": kept.bytes,
            "oldest_at": kept.oldest_at,
            "most_bytes": proxy.responses_kept_mb * MIB,
            "most_days": proxy.responses_kept_days,
        }

    async def delete_responses(self, ref: str, actor: str) -> KeptDeleted:
        agent = self._parts.roster.find(ref).agent
        deleted = await self._parts.responses.delete(agent.id)
        detail = {"name": agent.name, "deleted": deleted}
        self._parts.journal.note("agent.responses_deleted", target=agent.id, actor=actor, detail=detail)
        return {"deleted": deleted, "name": agent.name}
