"""The refusals with a `Retry-After`, and with the numbers of the original specification in them."""

from __future__ import annotations

import time

from hive.errors import QueueFull, Saturated, TooManyRequests
from hive.proxy.limits import SlidingWindow
from hive.proxy.queue import Flow
from hive.proxy.registry import Queue
from hive.proxy.tenants import Tenant


def too_many(name: str, window: SlidingWindow, wait_s: float) -> TooManyRequests:
    """429: `limit` requests were made, the next may come at `resetAt` (Unix seconds).

    >>> error = too_many("Tenant acme", SlidingWindow(100, 60.0), 7.5)
    >>> error.message, error.details["limit"], error.retry_after_s
    ('Tenant acme exceeded 100 requests in 60 s', 100, 7.5)
    """
    details = {"limit": window.limit, "remaining": 0, "resetAt": int(time.time() + wait_s) + 1}
    message = f"{name} exceeded {window.limit} requests in {window.span_s:g} s"
    return TooManyRequests(message, retry_after_s=wait_s, details=details)


def too_many_wakes(tenant: Tenant, wait_s: float) -> TooManyRequests:
    """429: callers have woken as many of this tenant's agents as they may."""
    window = tenant.wakes
    message = f"callers woke agents of tenant {tenant.name} {window.limit} times in {window.span_s:g} s"
    return TooManyRequests(message, retry_after_s=wait_s)


def queue_full(queue: Queue, flow: Flow, now: float) -> QueueFull:
    """503: as many requests of this tenant wait as may. `avgWaitMs`: how long those before them waited."""
    wait_s, depth = queue.retry_after_s(flow, now), queue.depth
    message = f"Queue depth {depth}/{depth}, retry in {wait_s:.0f} seconds"
    return QueueFull(message, retry_after_s=wait_s, details={"queueDepth": depth, "avgWaitMs": flow.mean_wait_ms})


def no_slot(queue: Queue, flow: Flow, now: float, waited_s: float) -> Saturated:
    """503: it waited as long as may be. It keeps its standing in the queue for when it comes again."""
    queue.refused(flow, now)
    return Saturated(f"no slot came free within {waited_s:g} s", retry_after_s=queue.retry_after_s(flow, now))


def no_backend() -> Saturated:
    """The refusal while no backend is active."""
    return Saturated("no inference server is active; see `hive backend status`", retry_after_s=5)
