"""The API's answers about leases, as types. See system.py."""

from __future__ import annotations

from typing import Annotated, TypedDict

from msgspec import Meta

from hive.shapes.system import UnixSeconds


class LeaseView(TypedDict):
    """Memory of the pool for a program that is no model, or the wait for it.

    `nonce` and `socket` are for its asker alone, and only while it is granted and nobody has come.
    """

    id: str
    token: Annotated[int, Meta(description="Its number, never used again: what renews and releases it.")]
    kind: Annotated[str, Meta(description="job: a process of this box; held: something else, with a time to live.")]
    state: Annotated[str, Meta(description="waiting, granted, running, ending, overdue or ended.")]
    mb: Annotated[int, Meta(description="On each GPU.")]
    gpus: Annotated[list[str], Meta(description="UUIDs, or `cpu`; empty while it waits.")]
    wanted_gpus: int
    band: str
    place: Annotated[int | None, Meta(description="In the line, from 1; null where it does not wait.")]
    before: Annotated[list[str], Meta(description="The leases before it in the line.")]
    ready_in_s: Annotated[float | None, Meta(description="Until it is expected to be granted; null: unknown.")]
    bound_s: Annotated[float | None, Meta(description="It waits at most so long; null: no end can be seen.")]
    label: str
    user: Annotated[str, Meta(description="Its asker: `uid:1000`, `token:ci`.")]
    preemptible: bool
    all: Annotated[bool, Meta(description="[lease] share does not hold for it.")]
    grace_s: float
    since: Annotated[UnixSeconds, Meta(description="It was asked for.")]
    granted_at: Annotated[UnixSeconds | None, Meta(description="Null: it never was.")]
    until: Annotated[UnixSeconds | None, Meta(description="It ends, or its time to live does; null: never.")]
    ended_at: Annotated[UnixSeconds | None, Meta(description="Null: it has not ended.")]
    used_mb: Annotated[int | None, Meta(description="Seen on the GPU where it has most; null: unknown.")]
    enforced: Annotated[str, Meta(description="How its limit is kept: dmem; empty: told, not enforced.")]
    held_by: Annotated[str, Meta(description="What tells its end: scope, cgroup or session; empty: its time to live.")]
    why: Annotated[str, Meta(description="Why it is so, a clause.")]
    code: Annotated[str, Meta(description="Of the error that ended it, as lease_waited; empty: none did.")]
    environment: dict[str, str]
    nonce: str
    socket: str


class LeaseList(TypedDict):
    """All leases that wait or hold memory, in line first, then as they were granted; with `ended=N` the last N over."""

    leases: list[LeaseView]
