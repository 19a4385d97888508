"""A request under way, as it is reported. Pure."""

from __future__ import annotations

from hive.link.requests import UnderWay
from hive.proxy.body import Asked
from hive.proxy.datapath import Decided
from hive.proxy.registry import AgentEntry


def told_of(
    entry: AgentEntry | None,
    decided: Decided | None,
    asked: Asked | None,
    *,
    id: str,
    state: str,
    age_s: float,
    queue_s: float | None,
) -> UnderWay | None:
    """The row of `hive queue` for a request; None if its agent is not known yet. Seconds become milliseconds."""
    if entry is None:
        return None
    return UnderWay(
        id=id,
        agent=entry.row.id,
        name=entry.row.name,
        tenant=entry.tenant.name if decided is None else decided.tenant.name,
        model="" if asked is None else asked.model,
        endpoint="" if decided is None else decided.endpoint.name,
        state=state,
        age_ms=round(age_s * 1e3, 1),
        queue_ms=None if queue_s is None else round(queue_s * 1e3, 1),
    )
