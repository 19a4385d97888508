"""The API's answers about the pool, as types. See system.py."""

from __future__ import annotations

from typing import Annotated, TypedDict

from msgspec import Meta

from hive.shapes.system import Bytes, Speculation


class PoolAccount(TypedDict):
    """The memory of one GPU, by its UUID, or of the host (`cpu`)."""

    id: str
    name: Annotated[str, Meta(description="The GPU's name; `host memory` for the host.")]
    total_bytes: Bytes
    reserve_bytes: Annotated[Bytes, Meta(description="Never given to a model.")]
    charged_bytes: Annotated[Bytes, Meta(description="By the slots, from the decision to load on.")]
    leased_bytes: Annotated[Bytes, Meta(description="By leases: programs that are no model.")]
    measured_bytes: Annotated[Bytes | None, Meta(description="Of the slots' processes; null: unknown.")]
    used_bytes: Annotated[Bytes | None, Meta(description="Of all processes; null: unknown, then the books decide.")]
    foreign_bytes: Annotated[Bytes, Meta(description="The most seen of processes that are none of the pool's.")]
    free_bytes: Annotated[int, Meta(description="What may be charged to one more load; below 0: more is used.")]


class PoolGrant(TypedDict):
    """The charge of one slot in one account."""

    account: str
    charged_bytes: Bytes
    measured_bytes: Bytes | None


class PoolSlot(TypedDict):
    """One model of the pool with its server, started or not."""

    id: str
    model: str
    backend: str
    category: str
    state: Annotated[str, Meta(description="cold, loading, ready, draining, asleep, stopping or failed.")]
    why: Annotated[str, Meta(description="Why it is so, one sentence.")]
    grants: list[PoolGrant]
    need_bytes: Annotated[Bytes, Meta(description="What a load is charged.")]
    need_from: Annotated[str, Meta(description="learnt, vram_mb, metadata, file size or name.")]
    pinned: bool
    in_flight: int
    waiting: Annotated[int, Meta(description="Requests that wait for it to be loaded.")]
    audience: Annotated[int, Meta(description="Clients that will probably ask it again soon.")]
    turn_ends_in_s: Annotated[float | None, Meta(description="Until then it does not leave for another model.")]
    load_s: Annotated[float, Meta(description="A load takes so long, p95 or estimated.")]
    wake_s: Annotated[float | None, Meta(description="A wake takes so long; null where it does not sleep.")]
    no_sleep: Annotated[list[str], Meta(description="Why it does not sleep, or not at every level: clauses.")]
    loading_s: Annotated[float | None, Meta(description="Since its load began; null where it does not load.")]
    failures: Annotated[int, Meta(description="Loads in a row that failed.")]
    retry_in_s: Annotated[float | None, Meta(description="Until the next try; null where none is due.")]
    speculation: Annotated[Speculation | None, Meta(description="null: it does not speculate, or is not loaded.")]
    last_error: Annotated[str, Meta(description="Why its last load or server ended; empty where it did not fail.")]
    origin: Annotated[str, Meta(description="Where it is described.")]


class PoolBackend(TypedDict):
    """A service of `hive backend` in the pool's memory: no model's demand makes it leave, a switch does. Or the cluster
    in use, which has places and no memory of the pool's: no grants."""

    kind: str
    state: Annotated[str, Meta(description="cold (it waits for room), loading, ready, stopping or failed.")]
    why: Annotated[str, Meta(description="Why it is so, one sentence.")]
    slots: Annotated[int | None, Meta(description="Requests a cluster works on at once; null for a service.")]
    grants: list[PoolGrant]


class PoolLeaseLine(TypedDict):
    """A lease in the pool's memory, or one that waits for some (`GET /api/leases` has all of it)."""

    id: str
    label: str
    user: str
    state: Annotated[str, Meta(description="waiting, granted, running, ending or overdue.")]
    why: Annotated[str, Meta(description="Why it is so, a clause.")]
    need_bytes: Annotated[Bytes, Meta(description="On each of its GPUs.")]
    grants: list[PoolGrant]


class PoolView(TypedDict):
    """The pool now. `why_not`: why there is none, one sentence; empty where there is one."""

    enabled: bool
    why_not: str
    accounts: list[PoolAccount]
    slots: list[PoolSlot]
    backends: list[PoolBackend]
    leases: list[PoolLeaseLine]


class BoundPartView(TypedDict):
    """One part of a bound on waiting."""

    what: str
    seconds: float


class LeavingModel(TypedDict):
    """A model that would leave. `in_s`: until it may; `level`: of its sleep, empty if its server ends."""

    model: str
    in_s: float
    level: str


class PoolExplanation(TypedDict):
    """The reasons for a model's state, what would leave for it, and the longest wait of a request that came now.

    `bound_s` null: no end can be seen, for the reason `blocked`. `lines`: the same as text.
    """

    model: str
    state: str
    why: str
    fits: bool
    would_leave: list[LeavingModel]
    bound_s: float | None
    blocked: str
    parts: list[BoundPartView]
    lines: list[str]
