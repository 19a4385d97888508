"""The API's answers about agents, as types (see system.py)."""

from __future__ import annotations

from typing import Annotated, Any, TypedDict

from msgspec import Meta

from hive.domain import (
    AgentStatus,
    CloudUse,
    DockerSpec,
    FirecrackerSpec,
    Limits,
    MessageState,
    RestartPolicy,
    RuntimeKind,
    SleepDepth,
    Tier,
    WakeCause,
)
from hive.shapes.system import Bytes, Milliseconds, UnixSeconds


class Spec(TypedDict):
    """The spec that was asked for (`AgentSpec`), every field."""

    name: str
    command: list[str]
    runtime: RuntimeKind
    env: Annotated[dict[str, str], Meta(description="For a viewer `****` is in the place of every value.")]
    port: int | None
    tier: Tier
    tenant: str
    model: str | None
    restart: RestartPolicy
    idle_s: float | None
    deepest: SleepDepth
    inbox: str
    autostart: bool
    egress: list[str] | None
    limits: Limits
    docker: DockerSpec | None
    firecracker: FirecrackerSpec | None
    cid: int | None
    system_prompt: Annotated[
        str | None, Meta(description="What its conversations begin with. `****` for a viewer, and in a list.")
    ]
    prewarm_on_start: Annotated[bool, Meta(description="Whether the backend reads it at each start and wake.")]
    cloud: Annotated[
        CloudUse | None, Meta(description="Narrows how far its requests may go; null: as box and tenant say.")
    ]
    tokens_per_day: Annotated[int | None, Meta(description="Its budget of a day; null: what its tier has.")]
    tokens_per_month: Annotated[int | None, Meta(description="Its budget of a month; null: what its tier has.")]
    cloud_tokens_per_day: Annotated[
        int | None, Meta(description="Its budget of a day for requests that leave the box; null: what its tier has.")
    ]
    template: Annotated[str | None, Meta(description="The template it is forked from; fixed when it is created.")]


class Capabilities(TypedDict):
    """An ability of the runtime → why it is missing, or what of it; empty where the runtime has it."""

    start: str
    pause: str
    deep_sleep: str
    limits: str
    egress: str
    exec: str


class HeldRam(TypedDict):
    """The RAM an agent holds."""

    rss_bytes: Annotated[
        int | None,
        Meta(description="`held_bytes`, by its name of before: no sum of RSS, which counts shared pages twice."),
    ]
    held_bytes: Annotated[int | None, Meta(description="RAM it holds; null where that is not known.")]
    held_from: Annotated[
        str,
        Meta(
            description="`cgroup`: what its control group is charged with now, swap cache counted, unused files not;"
            " `pss`: its processes' PSS, measured at `held_at`; empty where `held_bytes` is not known."
        ),
    ]
    held_at: UnixSeconds | None
    swap_cached_bytes: Annotated[
        int | None, Meta(description="Of a charge: has a copy in swap, goes as soon as somebody needs room.")
    ]
    pss_bytes: Annotated[
        int | None, Meta(description="Its last PSS: shared pages divided. Measured anew where one agent is asked for.")
    ]
    pss_at: UnixSeconds | None


class AgentView(Spec, HeldRam):
    """One agent: what was asked for, how it is, why, and what it costs. Null where that could not be asked."""

    id: Annotated[str, Meta(description="32 hex digits; another one for each agent there ever was.")]
    status: AgentStatus
    depth: SleepDepth
    depth_goal: Annotated[SleepDepth, Meta(description="How deep it is on its way to sleep.")]
    generation: Annotated[int, Meta(description="Counts its transitions.")]
    since: Annotated[float, Meta(description="Unix seconds at which it took this status.")]
    reason: Annotated[str, Meta(description="Why it took this status.")]
    why: Annotated[str, Meta(description="Why it is awake, or asleep.")]
    brief: Annotated[str, Meta(description="The same without what `status` and `since` say already.")]
    sentence: Annotated[str, Meta(description="The same with what it costs now.")]
    deep_note: Annotated[str, Meta(description="Why it does not sleep deep; empty where it does, or is not to.")]
    kept_awake_until: UnixSeconds | None
    messages_waiting: int | None
    next_wake_at: UnixSeconds | None
    restarts: Annotated[int, Meta(description="How often its restart policy started it again; a start counts anew.")]
    restart_reason: Annotated[str, Meta(description="How it ended last, or what keeps it from starting; else empty.")]
    next_start_at: Annotated[
        UnixSeconds | None, Meta(description="When it is started again; null where that is not due.")
    ]
    uid: Annotated[int | None, Meta(description="Its user; null where agents run as the user of `hive up`.")]
    pid: int | None
    swap_bytes: Bytes | None
    capabilities: Capabilities | None
    limits_not_enforced: Annotated[str | None, Meta(description="In words; empty where all are.")]
    prewarm_note: Annotated[
        str, Meta(description="Why its prompt is not read ahead; empty where it is, or is not to be.")
    ]
    template_note: Annotated[
        str,
        Meta(description="Why it runs as an ordinary program although it names a template; empty where it does not."),
    ]
    cpu_us: Annotated[int | None, Meta(description="Microseconds of processor time.")]
    processes: int | None
    in_flight: Annotated[int, Meta(description="Its requests the model works on.")]
    parked: Annotated[int, Meta(description="Its requests that wait for it to be awake.")]
    ingress_open: Annotated[int, Meta(description="Requests of its callers that it has not answered.")]
    requests: int
    tokens_in: int
    tokens_out: int
    last_active_at: UnixSeconds | None
    created_at: UnixSeconds
    last_wake_ms: Milliseconds | None
    last_wake_cause: WakeCause | None
    wakes: int
    pauses: int
    budget_percent: Annotated[
        int | None,
        Meta(description="Spent of the budget of tokens that ends first, its own or its tenant's; null without one."),
    ]


class AgentList(TypedDict):
    """Every agent, by name."""

    agents: list[AgentView]


class AgentPage(AgentList):
    """Some of them, by name; `next`: what `after` is for the page behind it, null for the last. `total`: of all."""

    next: str | None
    total: int


class AgentShort(TypedDict):
    """The part of an agent known without asking helper or proxy."""

    id: str
    name: str
    tenant: str
    runtime: RuntimeKind
    status: AgentStatus
    depth: SleepDepth
    since: Annotated[float, Meta(description="Unix seconds at which it took this status.")]


class ShortPage(TypedDict):
    """A page as `AgentPage`, in short."""

    agents: list[AgentShort]
    next: str | None
    total: int


class AgentChanges(AgentList):
    """The agents changed since `since`, by name; all there are where `is_whole`. `gone`: ids of those that were
    removed; `cursor`: what `since` is the next time."""

    gone: list[str]
    cursor: str
    is_whole: bool


Change = TypedDict("Change", {"field": str, "from": Any, "to": Any, "at_restart": bool})
Change.__doc__ = "What one field of a spec was and will be, `at_restart` only then. Of `env` the values are left out, \
a prompt is told by its hash and length."


class Applied(TypedDict):
    """The changes made, or to be made with `dry_run`; then `agent` is null for a new one."""

    agent: AgentView | None
    created: bool
    changed: list[str]
    changes: list[Change]
    restart_needed: bool
    dry_run: bool


class Removed(TypedDict):
    """`removed`: its id, by which its usage is found from now on."""

    removed: str
    name: str


class NotRemoved(TypedDict):
    """`agent`: as it was named; `status`, `code`, `detail`, `hint`: of the error, as where it alone is removed."""

    agent: str
    status: int
    code: str
    detail: str
    hint: str


class Removals(TypedDict):
    """The outcome for each, in the order in which they were named."""

    removed: list[Removed]
    failed: list[NotRemoved]


class OfAgent(TypedDict):
    """The agent that it is about: its id, its name, its status."""

    agent: str
    name: str
    status: AgentStatus


Message = TypedDict(
    "Message",
    {
        "id": str,
        "state": MessageState,
        "text": str,
        "from": str,
        "sent_at": UnixSeconds,
        "attempts": int,
        "last_error": str,
        "delivered_at": UnixSeconds | None,
        "refused_at": UnixSeconds | None,
    },
)
Message.__doc__ = """A message. `from`: who sent it; `text`: empty once it is delivered; `last_error`: why the last
attempt failed."""


class MessageOf(OfAgent, Message):
    """A message, and the agent it is for."""


class MessageList(OfAgent):
    """The messages an agent has not accepted, the oldest first; `why` the first one waits."""

    why: str
    messages: list[Message]


class MessageDropped(TypedDict):
    """`dropped`: its id; `name`: the agent it was for."""

    dropped: str
    name: str


class KeptOfAgent(OfAgent):
    """Responses that are kept of it."""

    responses: int
    bytes: int
    oldest_at: Annotated[float | None, Meta(description="When the oldest was kept, Unix seconds; null for none.")]
    most_bytes: Annotated[int, Meta(description="As much is kept of each agent; 0 where none is.")]
    most_days: Annotated[int, Meta(description="So long is each kept.")]


class KeptDeleted(TypedDict):
    """`deleted`: how many responses; `name`: the agent they were kept for."""

    deleted: int
    name: str


class Schedule(TypedDict):
    """The times at which an agent is woken."""

    id: int
    at: Annotated[float, Meta(description="The next time, in Unix seconds.")]
    spoken: Annotated[str, Meta(description="The next time for people, in the host's zone.")]
    every_s: Annotated[float | None, Meta(description="Seconds between two times; null for once.")]
    clock: Annotated[str, Meta(description="The time of day it keeps over changes of summer time; empty for none.")]
    note: str
    actor: str
    created_at: UnixSeconds
    last_at: UnixSeconds | None
    last_outcome: Annotated[str, Meta(description="What came of the last time.")]


class ScheduleOf(OfAgent, Schedule):
    """A schedule, and the agent it wakes."""


class ScheduleList(OfAgent):
    """The times of one agent, the next one first."""

    schedules: list[Schedule]


class ScheduleCancelled(TypedDict):
    """`cancelled`: its id; `name`: the agent it was for."""

    cancelled: int
    name: str


class Tokens(TypedDict):
    """An agent's two tokens and the addresses that are made with them. `socket`: its own way to the model."""

    model: str
    ingress: str
    openai_base_url: str
    ollama_host: str
    ingress_url: str
    socket: str


class AgentTotals(TypedDict):
    """Tokens of ended requests, as far as known."""

    tokensIn: int
    tokensOut: int


class ModelTotals(TypedDict):
    """The usage of one model by an agent; `count`: ended requests."""

    model: str
    totalIn: int
    totalOut: int
    count: int


class RecentRequest(TypedDict):
    """One ended request. Tokens are null where they were not counted."""

    id: str
    model: str
    tokensIn: int | None
    tokensOut: int | None
    durationMs: Milliseconds
    createdAt: UnixSeconds


class AgentUsage(TypedDict):
    """The usage of one agent. `recent`: its last requests, the newest first."""

    agentId: str
    period: str
    totals: AgentTotals
    byModel: list[ModelTotals]
    recent: list[RecentRequest]
