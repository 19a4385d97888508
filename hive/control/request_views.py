"""Requests to the model as the API shows them, under way and ended. Pure."""

from __future__ import annotations

from collections.abc import Callable

from hive.link.requests import QueueIs, UnderWay
from hive.shapes.system import Queue, RequestView
from hive.store.usage import EndedRequest

QUEUED = "queued"
"""State of a request that waits for its turn, or for its model to be loaded."""
Progress = Callable[[str], str]
"""Model → how far its load is, empty where none is waited for."""


def queue_view(told: QueueIs, progress: Progress) -> Queue:
    queue = told.queue
    return {
        "running": queue.running,
        "waiting": queue.waiting,
        "slots": queue.places,
        "drain_per_s": queue.drain_per_s,
        "tenants": [
            {
                "name": tenant.name,
                "weight": tenant.weight,
                "running": tenant.running,
                "waiting": tenant.waiting,
                "tokens_ahead": tenant.tokens_ahead,
                "load_s": tenant.load_s,
            }
            for tenant in queue.tenants
        ],
        "requests": [request_view(request, progress) for request in told.requests],
        "left_out": told.left_out,
        "tokens_per_gpu_s": round(queue.tokens_per_gpu_s, 3),
        "work": [
            {"model": one.model, "unit": one.unit, "per_s": round(one.per_s, 3), "is_measured": one.is_measured}
            for one in queue.work
        ],
    }


def request_view(told: UnderWay, progress: Progress) -> RequestView:
    """A request that has not ended: its cost is not known yet.

    >>> told = UnderWay(id="1", agent="a", name="a", tenant="t", model="m", endpoint="", state="queued", age_ms=1.0,
    ...                 queue_ms=1.0)
    >>> request_view(told, lambda model: f"loading {model}")["waits_for"]
    'loading m'
    """
    return {
        "id": told.id,
        "state": told.state,
        "waits_for": progress(told.model) if told.state == QUEUED and told.model else "",
        "agent": told.agent,
        "name": told.name,
        "tenant": told.tenant,
        "model": told.model,
        "asked": None,
        "rung": None,
        "far": None,
        "endpoint": told.endpoint,
        "backend": None,
        "status": None,
        "tokens_in": None,
        "tokens_out": None,
        "cached_tokens": None,
        "unit": None,
        "amount": None,
        "work": None,
        "estimated": None,
        "cut": None,
        "queue_ms": told.queue_ms,
        "ttft_ms": None,
        "duration_ms": told.age_ms,
        "client_request_id": None,
        "ended_at": None,
    }


def ended_request_view(ended: EndedRequest, name: str | None) -> RequestView:
    """`name`: its agent's, None where that was removed."""
    return {
        "id": ended.id,
        "state": "ended",
        "waits_for": "",
        "agent": ended.agent,
        "name": name,
        "tenant": ended.tenant,
        "model": ended.model,
        "asked": ended.asked or None,
        "rung": ended.rung,
        "far": ended.far,
        "endpoint": ended.endpoint,
        "backend": ended.backend,
        "status": ended.status,
        "tokens_in": ended.tokens_in,
        "tokens_out": ended.tokens_out,
        "cached_tokens": ended.cached_tokens,
        "unit": ended.unit,
        "amount": ended.amount,
        "work": ended.work,
        "estimated": ended.estimated,
        "cut": ended.cut,
        "queue_ms": ended.queue_ms,
        "ttft_ms": ended.ttft_ms,
        "duration_ms": ended.duration_ms,
        "client_request_id": ended.client_request_id,
        "ended_at": ended.created_at,
    }
