"""What is told of a request that is under way. Pure."""

from __future__ import annotations

from hive.link.requests import UnderWay
from hive.proxy.body import Asked
from hive.proxy.datapath import Decided
from hive.proxy.registry import Entry


def told_of(
    entry: Entry | None,
    decided: Decided | None,
    asked: Asked | None,
    *,
    id: str,
    state: str,
    age_s: float,
    queue_s: float | None,
) -> UnderWay | None:
    """As `hive queue` shows it; None where nobody knows yet whose it is. Seconds become milliseconds."""
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
