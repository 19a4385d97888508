"""The requests to the model that have begun and not ended: which there are, and ending one for an operator."""

from __future__ import annotations

from collections.abc import Iterator

from hive.errors import Cancelled
from hive.link.requests import QueueIs, UnderWay
from hive.proxy.datapath import Prepared
from hive.proxy.forward import Exchange
from hive.proxy.registry import Registry
from hive.proxy.stopping import STATE as STOPPING
from hive.routing.slot import Slot

MOVES_S = 2.0
"""An answer that stood still for longer does not go on."""
TOLD_MAX = 1000
"""Requests reported at once: some 300 KB, and no reader needs more."""


def queue_now(registry: Registry, now: float) -> QueueIs:
    """The waiting and running requests, `now` being monotonic seconds."""
    found = [told for exchange in under_way(registry) if (told := told_of(exchange, now)) is not None]
    stopping = [told_of(one.exchange, now, one.prepared) for one in registry.stopping]
    found += [told for told in stopping if told is not None]
    found.sort(key=lambda told: -told.age_ms)
    return QueueIs(queue=registry.queue_view(now), requests=found[:TOLD_MAX], left_out=max(0, len(found) - TOLD_MAX))


def told_of(exchange: Exchange, now: float, prepared: Prepared | None = None) -> UnderWay | None:
    """The row of `hive queue` for a request; None if its agent is not known yet. Seconds become milliseconds.
    `prepared`: of one that was given up and whose server has not stopped yet."""
    entry, asked, queued_at = exchange.entry, exchange.asked, exchange.queued_at
    prepared = exchange.prepared or prepared
    if entry is None:
        return None
    return UnderWay(
        id=exchange.request_id,
        agent=entry.row.id,
        name=entry.row.name,
        tenant=entry.tenant.name if prepared is None else prepared.decided.tenant.name,
        model="" if asked is None else asked.model,
        endpoint="" if prepared is None else prepared.decided.endpoint.name,
        state=exchange.state if exchange.prepared is prepared else STOPPING,
        age_ms=round((now - exchange.begun_at) * 1e3, 1),
        queue_ms=round(((exchange.sent_at or now) - queued_at) * 1e3, 1) if queued_at else None,
        slot=exchange.slot.name if queued_at else "",
        for_load=bool(queued_at) and not exchange.sent_at and exchange.slot.gate.is_cold,
    )


class AnswersUnderWay:
    """Finds out whether the answers of a server go on: what its cluster says of itself may be late."""

    def __init__(self) -> None:
        self._events: dict[str, int] = {}
        """Data events of each answer under way when it was asked last, by request id."""
        self._asked_at = float("-inf")

    def __repr__(self) -> str:
        return f"<AnswersUnderWay {len(self._events)}>"

    def move(self, registry: Registry, slot: Slot, now: float) -> bool:
        """Whether part of an answer came since the last call, or within 2 s where that is longer ago. `now`: monotonic
        seconds."""
        since, self._asked_at = max(self._asked_at, now - MOVES_S), now
        here = {one.request_id: one.events or 0 for one in under_way(registry) if one.slot is slot and one.sent_at}
        before, self._events = self._events, here
        return slot.moved_at > since or any(count > before.get(request_id, 0) for request_id, count in here.items())


def models_in_use(registry: Registry) -> dict[str, str]:
    """Agent → the model its newest request is for, of those that have requests under way and named one."""
    found = [told for exchange in under_way(registry) if (told := told_of(exchange, 0.0)) is not None and told.model]
    return {told.agent: told.model for told in found}


def end_request(registry: Registry, request_id: str) -> bool:
    """Whether there is such a request; its client gets `Cancelled`, or a stream that is cut with it."""
    for exchange in under_way(registry):
        if exchange.request_id == request_id:
            exchange.refuse(Cancelled())
            return True
    return False


def not_there(request_id: str) -> str:
    return f"no request {request_id[:80]!r} is under way: it has ended, or was never begun here"


def waiting_for(registry: Registry, slot: Slot) -> list[Exchange]:
    """The requests that wait in the line of this slot, the oldest first."""
    found = [exchange for exchange in under_way(registry) if exchange.waits_for is slot]
    return sorted(found, key=lambda exchange: exchange.queued_at)


def under_way(registry: Registry) -> Iterator[Exchange]:
    """Every request that has begun and not ended."""
    for entry in [*registry.by_id.values(), registry.operator, *registry.stand_ins]:
        for connection in [*entry.connections, *entry.jobs]:
            if isinstance(connection.exchange, Exchange) and not connection.exchange.left:
                yield connection.exchange
