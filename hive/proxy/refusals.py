"""The refusals of the proxy, with their numbers and `Retry-After`; and a refusal as the whole answer to a request."""

from __future__ import annotations

import time

from hive.dialects.errors import error_fields, render
from hive.domain import Dialect
from hive.errors import (
    AgentAsleep,
    AgentDown,
    BackendDown,
    BackendTimeout,
    HiveError,
    ModelCold,
    QueueFull,
    RequestTimeout,
    Saturated,
    TooManyRequests,
)
from hive.pool.ladder import Task
from hive.queue.limits import SlidingWindow
from hive.queue.queue import Flow, Queue
from hive.queue.slot_gate import SlotGate
from hive.queue.tenants import Tenant
from hive.queue.wakes import WakeTimes
from hive.settings.table import Proxy as ProxySettings
from hive.terminal_text import counted
from hive.wire.connection import Connection
from hive.wire.dial import AddressKind, read_address
from hive.wire.http1 import Request, answer_head


def too_many(name: str, window: SlidingWindow, wait_s: float) -> TooManyRequests:
    """429: `limit` requests were made, the next may come at `resetAt` (Unix seconds).

    >>> error = too_many("Tenant acme", SlidingWindow(100, 60.0), 7.5)
    >>> error.message, error.details["limit"], error.retry_after_s
    ('Tenant acme exceeded 100 requests in 60 s', 100, 7.5)
    """
    details = {"limit": window.limit, "remaining": 0, "resetAt": int(time.time() + wait_s) + 1}
    message = f"{name} exceeded {counted(window.limit, 'request')} in {window.span_s:g} s"
    return TooManyRequests(message, retry_after_s=wait_s, details=details)


def too_many_wakes(tenant: Tenant, wait_s: float) -> TooManyRequests:
    """429: callers have woken as many of this tenant's agents as they may."""
    window = tenant.wakes
    message = f"callers woke agents of tenant {tenant.name} {counted(window.limit, 'time')} in {window.span_s:g} s"
    return TooManyRequests(message, retry_after_s=wait_s)


def queue_full(queue: Queue, flow: Flow, now: float) -> QueueFull:
    """503: as many requests of this tenant wait as may. `avgWaitMs`: how long those before them waited."""
    wait_s, depth = queue.retry_after_s(flow, now), queue.depth_now
    message = f"Queue depth {depth}/{depth}, retry in {wait_s:.0f} seconds"
    details = {"queueDepth": depth, "avgWaitMs": queue.mean_wait_ms(flow)}
    return QueueFull(message, retry_after_s=wait_s, details=details)


def no_place(queue: Queue, flow: Flow, now: float, waited_s: float, why: str = "") -> Saturated:
    """503: it waited as long as may be. It keeps its standing in the queue for when it comes again. `why`: there is
    none at all, a clause."""
    queue.refused(flow, now)
    message = f"no place came free within {waited_s:g} s{': ' if why else ''}{why}"
    return Saturated(message, retry_after_s=queue.retry_after_s(flow, now))


def crashed_it(model: str, wait_s: float) -> TooManyRequests:
    """429: requests of this agent were at the model's server each time that it crashed.

    >>> crashed_it("qwen3", 90.0).message.partition(", ")[2]
    'which may ask it again in 90 s'
    """
    message = (
        f"the server of the model {model} has crashed again and again while it answered this agent, which may ask it"
        f" again in {wait_s:.0f} s"
    )
    return TooManyRequests(message, retry_after_s=wait_s, hint="use another model, or ask the operator: hive logs")


def no_backend() -> Saturated:
    """The refusal while no backend is active."""
    return Saturated("no inference server is active; see `hive backend status`", retry_after_s=5)


def cluster_away(error: HiveError) -> Saturated:
    """503: the way to a cluster is lost as a whole. Its engine, or a unit, starts it again."""
    return Saturated(f"the cluster is away: {error.message}", retry_after_s=5)


def asleep(within_s: float, wakes: WakeTimes) -> AgentAsleep:
    """503: its agent did not wake in time."""
    wait_s = wakes.retry_after_s(within_s)
    return AgentAsleep(f"the agent did not wake within {within_s:g} s", retry_after_s=wait_s)


def unreached(name: str, address: str, error: HiveError) -> AgentDown:
    """502: no connection to the port of the agent `name` could be made, at this `address` of the proxy's.

    >>> refused = BackendDown("the agent at 127.0.0.1:9120 is not reachable: Connection refused")
    >>> refused.__cause__ = ConnectionRefusedError(111, "Connection refused")
    >>> told = unreached("bob", "127.0.0.1:9120", refused)
    >>> told.message
    'agent bob is not reached: nothing listens on 127.0.0.1:9120'
    >>> told.hint
    'see `hive agent logs bob`; HIVE_AGENT_PORT has the number'
    >>> unreached("bob", "helper:/a1", BackendTimeout("it did not accept in 2 s")).hint
    'see `hive agent logs bob`'
    """
    why, hint, cause = error.message, f"see `hive agent logs {name}`", error.__cause__
    is_guest = isinstance(cause, ConnectionRefusedError) and read_address(address).kind is not AddressKind.TCP
    if isinstance(cause, ConnectionRefusedError):
        why = cause.strerror or why if is_guest else f"nothing listens on {address}"
    if isinstance(error, BackendDown) and not is_guest:
        hint += "; HIVE_AGENT_PORT has the number"
    return AgentDown(f"agent {name} is not reached: {why}", hint=hint)


def no_room_for_bodies() -> Saturated:
    return Saturated(
        "the request bodies held at once exceed Hive's budget, or this agent's share of it", retry_after_s=2
    )


def no_room_for_uploads() -> Saturated:
    return Saturated("the files uploaded at once exceed Hive's budget, or this agent's share of it", retry_after_s=2)


def no_disk_for_uploads() -> Saturated:
    """503: the disk is full, or cannot be written to."""
    return Saturated("the disk has no room for this upload now", retry_after_s=10)


def upload_displaced() -> Saturated:
    """503: the room of a body or file that was coming in went to another agent's."""
    return Saturated("this upload gave way: those held at once exceed Hive's budget", retry_after_s=2)


def timeout(
    settings: ProxySettings, first_byte_s: float, *, is_over: bool, is_blocked: bool, has_begun: bool
) -> HiveError:
    """408 or 504: a request has its place, and its time is over. `first_byte_s`: of its server; `is_over`: all of its
    time; `is_blocked`: its client does not read, while others wait for the place; `has_begun`: the answer."""
    if is_over:
        return BackendTimeout(f"the request took longer than {settings.request_s:g} s")
    if is_blocked:
        return RequestTimeout(f"the client read nothing for {settings.between_bytes_s:g} s")
    if not has_begun:
        return BackendTimeout(f"the backend sent nothing for {first_byte_s:g} s")
    return BackendTimeout(f"the backend stalled for {settings.between_bytes_s:g} s")


def budget_over(task: Task, gate: SlotGate, now: float, *, is_sent: bool) -> HiveError:
    """503 or 504: the time that the task gives a request is over. `is_sent`: its server had it.

    >>> budget_over(Task("plan", ("m",), budget_s=90.0), SlotGate(), 0.0, is_sent=True).message
    'the request took longer than the 90 s of the task plan'
    """
    why = f"the request took longer than the {task.budget_s:g} s of the task {task.name}"
    if is_sent:
        return BackendTimeout(why)
    if gate.is_cold:
        return ModelCold(why, retry_after_s=gate.refusal(now).retry_after_s)
    return Saturated(why, retry_after_s=5)


def answer_error(
    connection: Connection,
    request: Request | None,
    error: HiveError,
    dialect: Dialect,
    own_fields: bytes = b"",
    request_id: str = "",
) -> bool:
    """Writes an error as the whole answer. Whether the connection can be kept."""
    keep = request is not None and request.complete and request.keep_alive
    content = render(error, dialect, request_id)
    head = answer_head(error.status, len(content), own_fields + error_fields(error), keep=keep)
    connection.write(head if connection.asks_head else head + content)
    return keep
