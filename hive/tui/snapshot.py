"""The data of `hive top` and of `hive top --json`: one Snapshot, made of what was answered or read. Pure.

Times named `at` are Unix seconds; None is unknown, which is not 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from hive.conditions import FoundCondition, Where, conditions_in
from hive.domain import AT_REST, SleepDepth

if TYPE_CHECKING:
    from hive.domain import Agent
    from hive.store.audit import AuditRecord

Answer = Mapping[str, Any]
HERE = Where()
FROM_DAEMON, FROM_STORE = "daemon", "store"
RATE_OVER_S = 10.0
"""Span of a rate, about: a request's tokens are counted when it ends, so that one look's are all or none."""
LOWEST_RATE = 0.05
"""A mean below it is nothing any more."""


class AgentLine(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One agent. `saved_bytes`: of its memory, in swap while it sleeps; `why`: why it is awake, asleep or down.
    `budget_percent`: spent of the budget that ends first, of its own and its tenant's."""

    id: str
    name: str
    status: str
    depth: str
    tier: str
    tenant: str
    model: str | None
    runtime: str
    in_flight: int | None
    parked: int | None
    requests: int
    tokens_in: int
    tokens_out: int
    tokens_per_s: float | None
    rss_bytes: int | None
    """`held_bytes` of the API's answer, by the name that scripts of before know."""
    saved_bytes: int | None
    idle_s: float | None
    since: float
    why: str
    last_wake_ms: float | None
    last_wake_cause: str | None
    wakes: int | None
    pauses: int | None
    budget_percent: int | None = None
    held_bytes: int | None = None
    held_at: float | None = None


class ClusterLine(msgspec.Struct, frozen=True, kw_only=True):
    """The cluster behind the backend's address, in short. `down`: its machines on which nothing answers."""

    label: str
    running: int
    wanted: int
    nodes: int = 0
    down: list[str] = []
    stuck: list[str] = []
    waiting: int | None = None
    why_none: str = ""


class BackendRow(msgspec.Struct, frozen=True, kw_only=True):
    """The inference server in use. `switching`: how far a switch is, empty where none is under way. `cluster`: None
    where one server answers."""

    kind: str
    label: str
    address: str
    version: str
    up: bool
    slots: int | None
    warning: str
    models: list[str]
    switching: str
    cluster: ClusterLine | None = None


class TenantQueueLine(msgspec.Struct, frozen=True):
    tenant: str
    running: int
    waiting: int


class QueueLine(msgspec.Struct, frozen=True):
    running: int
    waiting: int
    slots: int | None
    tenants: list[TenantQueueLine]


class MemoryLine(msgspec.Struct, frozen=True):
    """The host's; None where the kernel does not say, as in a container that hides it."""

    total_bytes: int | None
    available_bytes: int | None
    swap_total_bytes: int | None
    swap_free_bytes: int | None


class GpuProcessLine(msgspec.Struct, frozen=True):
    """`program`: the name it shows, empty where that is not known."""

    pid: int
    used_bytes: int | None
    program: str


class GpuInstanceLine(msgspec.Struct, frozen=True):
    """One MIG device of a GPU."""

    number: int
    name: str
    total_bytes: int | None
    used_bytes: int | None
    free_bytes: int | None
    processes: list[GpuProcessLine] | None


class GpuRow(msgspec.Struct, frozen=True):
    """One GPU, as host/nvml.py says; `processes` None: they are not told. `fault`: what is wrong with it, in words."""

    number: int
    name: str
    uuid: str
    total_bytes: int | None
    used_bytes: int | None
    free_bytes: int | None
    busy_percent: int | None
    processes: list[GpuProcessLine] | None
    instances: list[GpuInstanceLine]
    fault: str


class PoolAccountLine(msgspec.Struct, frozen=True):
    """The memory of a GPU, by its UUID, or of the host (`cpu`), as the pool's books have it."""

    id: str
    name: str
    total_bytes: int
    charged_bytes: int
    measured_bytes: int | None
    used_bytes: int | None
    foreign_bytes: int
    free_bytes: int
    leased_bytes: int = 0


class PoolLeaseRow(msgspec.Struct, frozen=True, kw_only=True):
    """A lease: a program that is no model, or one that waits. `memory_bytes`: booked for it."""

    id: str
    state: str
    label: str = ""
    why: str = ""
    memory_bytes: int = 0


class PoolSlotLine(msgspec.Struct, frozen=True, kw_only=True):
    """One model of the pool. `memory_bytes`: booked for it; times in seconds."""

    model: str
    state: str
    why: str = ""
    memory_bytes: int = 0
    pinned: bool = False
    in_flight: int = 0
    waiting: int = 0
    audience: int = 0
    turn_ends_in_s: float | None = None
    load_s: float = 0.0
    loading_s: float | None = None
    wake_s: float | None = None


class PoolShare(msgspec.Struct, frozen=True):
    """The memory that one model, service or lease is charged in one account. `holder`: model, backend or lease;
    `name`: the model, the kind of service, or the lease's id."""

    account: str
    holder: str
    name: str
    memory_bytes: int


class PoolLook(msgspec.Struct, frozen=True):
    """The pool of models. `shares`: of every account, in the order in which the API tells them."""

    accounts: list[PoolAccountLine]
    slots: list[PoolSlotLine]
    leases: list[PoolLeaseRow] = []
    shares: list[PoolShare] = []


class EventLine(msgspec.Struct, frozen=True):
    """`text`: the agent, from what to what, and why, on one line."""

    at: float
    kind: str
    text: str


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Everything at one moment. `source`: `daemon`, or `store` where that is down and SQLite was read.

    `conditions`: what is wrong, the worst first; `problems`: their texts. `wake_ms`: median since the daemon started.
    `gpus_why_not`: why nothing is known of GPUs, empty where something is. `pool`: None where there is none.
    """

    at: float
    source: str
    place: str
    hive_version: str
    isolation: str
    problems: list[str]
    conditions: list[FoundCondition]
    backend: BackendRow | None
    queue: QueueLine | None
    memory: MemoryLine | None
    gpus: list[GpuRow]
    gpus_why_not: str
    requests: int | None
    tokens_out: int | None
    wakes: int | None
    wake_ms: float | None
    agents: list[AgentLine]
    events: list[EventLine]
    pool: PoolLook | None = None

    @property
    def is_live(self) -> bool:
        """Whether the daemon answered: only then can something be changed."""
        return self.source == FROM_DAEMON


class View(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The fields of an agent in the API's answer that are used here; no other is even decoded."""

    id: str
    name: str
    status: str
    depth: str
    tier: str
    tenant: str
    model: str | None
    runtime: str
    in_flight: int
    parked: int
    ingress_open: int
    requests: int
    tokens_in: int
    tokens_out: int
    held_bytes: int | None
    swap_bytes: int | None
    last_active_at: float | None
    since: float
    brief: str
    reason: str
    last_wake_ms: float | None
    last_wake_cause: str | None
    wakes: int
    pauses: int
    budget_percent: int | None = None
    held_at: float | None = None


class Answers(msgspec.Struct, frozen=True):
    """The API's answers, as they came; `queue` is the proxy's, None where that could not be asked.

    `gpus`, `pool`: empty where the daemon is older than that question.
    """

    health: Answer
    agents: Sequence[View]
    inference: Answer
    memory: Answer
    stats: Answer
    events: Sequence[Answer]
    queue: Answer | None
    gpus: Answer = msgspec.field(default_factory=dict)
    pool: Answer = msgspec.field(default_factory=dict)


def from_api(
    answers: Answers, *, place: str, now: float, before: Snapshot | None = None, where: Where = HERE
) -> Snapshot:
    """The Snapshot of what the daemon said. `before` is what rates are measured against; without it they are None.
    `where`: how commands about it are typed."""
    health, stats, gpus = answers.health, answers.stats, answers.gpus
    elapsed_s = now - before.at if before is not None and before.is_live else 0.0
    earlier = {row.id: row for row in before.agents} if before is not None and elapsed_s > 0 else {}
    in_use, wrong = in_use_of(answers.queue), [one.at(where) for one in conditions_in(health)]
    return Snapshot(
        at=now,
        source=FROM_DAEMON,
        place=place,
        hive_version=health["version"],
        isolation=health["isolation"],
        problems=[one.text for one in wrong],
        conditions=wrong,
        backend=_backend(answers.inference),
        queue=None if answers.queue is None else queue_of(answers.queue),
        memory=_memory(answers.memory),
        gpus=msgspec.convert(gpus.get("gpus", []), list[GpuRow]),
        gpus_why_not=gpus.get("why_not", "this daemon does not tell"),
        requests=stats.get("requests"),
        tokens_out=stats.get("tokens_out"),
        wakes=stats.get("wakes"),
        wake_ms=(stats.get("wake_ms") or {}).get("p50"),
        agents=[_agent(view, now, earlier.get(view.id), elapsed_s, in_use) for view in answers.agents],
        events=[_event(event) for event in answers.events],
        pool=_pool(answers.pool),
    )


def from_store(
    agents: Sequence[Agent],
    acts: Sequence[AuditRecord],
    *,
    place: str,
    now: float,
    wrong: FoundCondition,
    queue: Answer | None = None,
) -> Snapshot:
    """The Snapshot of what SQLite holds while the daemon is down; `wrong` says so."""
    names = {agent.id: agent.name for agent in agents}
    return Snapshot(
        at=now,
        source=FROM_STORE,
        place=place,
        hive_version="",
        isolation="",
        problems=[wrong.text],
        conditions=[wrong],
        backend=None,
        queue=None if queue is None else queue_of(queue),
        memory=None,
        gpus=[],
        gpus_why_not="the daemon is down",
        requests=sum(agent.requests for agent in agents),
        tokens_out=sum(agent.tokens_out for agent in agents),
        wakes=None,
        wake_ms=None,
        agents=[_stored(agent, now) for agent in sorted(agents, key=lambda a: a.name)],
        events=[_act(row, names) for row in acts],
    )


def queue_of(answer: Answer) -> QueueLine:
    """
    >>> queue_of({"running": 1, "waiting": 2, "slots": 4, "tenants": [{"name": "a", "running": 1, "waiting": 2}]})
    QueueLine(running=1, waiting=2, slots=4, tenants=[TenantQueueLine(tenant='a', running=1, waiting=2)])
    """
    tenants = [TenantQueueLine(row["name"], row["running"], row["waiting"]) for row in answer.get("tenants", ())]
    return QueueLine(answer["running"], answer["waiting"], answer.get("slots"), tenants)


def rate(before: int, after: int, elapsed_s: float, mean: float | None = None) -> float | None:
    """Per second, as a mean over about the last RATE_OVER_S in which what is newer counts more. `mean`: what it was.

    A count that went down began again.

    >>> rate(10, 30, 2.0, 10.0), rate(30, 10, 2.0), rate(30, 30, 1.0, 20.0), rate(30, 30, 90.0, 20.0)
    (10.0, None, 18.097, 0.0)
    """
    if elapsed_s <= 0 or after < before:
        return None
    kept = math.exp(-elapsed_s / RATE_OVER_S)
    found = (after - before) / elapsed_s * (1 - kept) + (mean or 0.0) * kept
    return round(found, 3) if found >= LOWEST_RATE else 0.0


def idle_of(*, now: float, last_active_at: float | None, busy: int) -> float | None:
    """Seconds since it was last active; 0 while a request of it is under way, also where the clock jumped.

    >>> idle_of(now=10.0, last_active_at=4.0, busy=0), idle_of(now=10.0, last_active_at=40.0, busy=0)
    (6.0, 0.0)
    """
    if busy:
        return 0.0
    return None if last_active_at is None else max(0.0, round(now - last_active_at, 1))


def in_use_of(queue: Answer | None) -> Mapping[str, str]:
    """Agent → the model that works for it now; empty where the proxy cannot be asked, or is older than that.

    >>> in_use_of({"models": {"a1": "llama3.2"}}), in_use_of(None)
    ({'a1': 'llama3.2'}, {})
    """
    found: Mapping[str, str] = (queue or {}).get("models") or {}
    return found


def depth_of(status: str, depth: str) -> str:
    """Empty for one that does not run: it neither sleeps nor is awake.

    >>> depth_of("stopped", "awake"), depth_of("running", "awake"), depth_of("paused", "deep")
    ('', 'awake', 'deep')
    """
    return "" if status in AT_REST else depth


def _agent(view: View, now: float, before: AgentLine | None, elapsed_s: float, in_use: Mapping[str, str]) -> AgentLine:
    """Its model: the one it uses now, else its own, else the one that was seen last."""
    busy = view.in_flight + view.ingress_open
    return AgentLine(
        id=view.id,
        name=view.name,
        status=view.status,
        depth=depth_of(view.status, view.depth),
        tier=view.tier,
        tenant=view.tenant,
        model=in_use.get(view.id) or view.model or (None if before is None else before.model),
        runtime=view.runtime,
        in_flight=view.in_flight,
        parked=view.parked,
        requests=view.requests,
        tokens_in=view.tokens_in,
        tokens_out=view.tokens_out,
        tokens_per_s=None
        if before is None
        else rate(before.tokens_out, view.tokens_out, elapsed_s, before.tokens_per_s),
        rss_bytes=view.held_bytes,
        held_bytes=view.held_bytes,
        held_at=view.held_at,
        saved_bytes=view.swap_bytes if view.depth != SleepDepth.AWAKE else 0,
        idle_s=idle_of(now=now, last_active_at=view.last_active_at, busy=busy),
        since=view.since,
        why=view.brief or view.reason,
        last_wake_ms=view.last_wake_ms,
        last_wake_cause=view.last_wake_cause,
        wakes=view.wakes,
        pauses=view.pauses,
        budget_percent=view.budget_percent,
    )


def _stored(agent: Agent, now: float) -> AgentLine:
    spec = agent.spec
    return AgentLine(
        id=agent.id,
        name=spec.name,
        status=str(agent.status),
        depth=depth_of(agent.status, agent.depth),
        tier=str(spec.tier),
        tenant=spec.tenant,
        model=spec.model,
        runtime=str(spec.runtime),
        in_flight=None,
        parked=None,
        requests=agent.requests,
        tokens_in=agent.tokens_in,
        tokens_out=agent.tokens_out,
        tokens_per_s=None,
        rss_bytes=None,
        saved_bytes=None,
        idle_s=idle_of(now=now, last_active_at=agent.last_active_at, busy=0),
        since=agent.since,
        why=agent.reason,
        last_wake_ms=None,
        last_wake_cause=None,
        wakes=None,
        pauses=None,
    )


def _backend(answer: Answer) -> BackendRow | None:
    job = answer.get("switch")
    switching = "" if job is None else str(job["progress"])
    if answer["backend"] is None and not switching:
        return None
    return BackendRow(
        kind=answer["backend"] or "",
        label=answer["label"] or answer["backend"] or "",
        address=answer["address"],
        version=answer["version"],
        up=answer["running"],
        slots=answer["slots"],
        warning=answer["warning"],
        models=[model["name"] for model in answer["models"]],
        switching=switching,
        cluster=_cluster(answer.get("cluster")),
    )


def _cluster(answer: Answer | None) -> ClusterLine | None:
    if answer is None:
        return None
    return ClusterLine(
        label=answer["label"].partition("'s ")[0],  # of vLLM's data parallelism: the line is short
        running=answer["running"],
        wanted=answer["wanted"],
        nodes=len(answer["nodes"]),
        down=[node["name"] for node in answer["nodes"] if not node["up"]],
        stuck=answer["stuck"],
        waiting=answer["waiting"],
        why_none=answer["why_none"],
    )


def _pool(answer: Answer) -> PoolLook | None:
    if not answer.get("enabled"):
        return None
    held = {slot["id"]: sum(grant["charged_bytes"] for grant in slot["grants"]) for slot in answer["slots"]}
    slots = [{**slot, "memory_bytes": held[slot["id"]]} for slot in answer["slots"]]
    leases = [
        {**lease, "memory_bytes": sum(grant["charged_bytes"] for grant in lease["grants"])}
        for lease in answer.get("leases", [])
    ]
    look = {"accounts": answer["accounts"], "slots": slots, "leases": leases, "shares": [*_shares(answer)]}
    return msgspec.convert(look, PoolLook)


def _shares(answer: Answer) -> Iterator[dict[str, Any]]:
    for holder, rows, name in (("model", "slots", "model"), ("backend", "backends", "kind"), ("lease", "leases", "id")):
        for row in answer.get(rows, []):
            for grant in row["grants"]:
                yield {
                    "account": grant["account"],
                    "holder": holder,
                    "name": row[name],
                    "memory_bytes": grant["charged_bytes"],
                }


def _memory(answer: Answer) -> MemoryLine:
    return MemoryLine(*(answer[name] for name in MemoryLine.__struct_fields__))


def _event(event: Answer) -> EventLine:
    text = told(
        event.get("name") or event.get("agent") or "", event.get("from"), event.get("to"), event.get("reason") or ""
    )
    outcome = event.get("outcome")
    return EventLine(
        event.get("at", 0.0), event["kind"], text if outcome in (None, "", "ok") else f"{text} [{outcome}]"
    )


def _act(row: AuditRecord, names: Mapping[str, str]) -> EventLine:
    detail = row.detail
    text = told(
        names.get(row.target, row.target), detail.get("from"), detail.get("to"), str(detail.get("reason") or "")
    )
    return EventLine(row.at, row.act, text if row.outcome == "ok" else f"{text} [{row.outcome}]")


def told(who: str, before: str | None, after: str | None, reason: str) -> str:
    """
    >>> told("alice", "running", "paused", "idle for 3 s"), told("hive", None, None, "")
    ('alice running → paused: idle for 3 s', 'hive')
    """
    change = f" {before} → {after}" if before and after else ""
    return f"{who}{change}{f': {reason}' if reason else ''}"
