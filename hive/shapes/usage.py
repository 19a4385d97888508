"""The API's answers about what requests cost and how many there were, as types."""

from __future__ import annotations

from typing import Annotated, NotRequired, TypedDict

from msgspec import Meta

from hive.domain import AgentStatus, BackendKind, By, Tier
from hive.shapes.system import Mebibytes, Milliseconds, UnixSeconds


class Cost(TypedDict):
    """Sums over ended requests. `unknown`: requests whose count is not known, of tokens or of their own unit; `cut`:
    not answered to the end; `far`: left the box. `audio_s`: seconds of audio that were heard; `pixel_steps`: width x
    height x steps of the images, summed."""

    requests: int
    tokens_in: int
    tokens_out: int
    cached_tokens: int
    unknown: int
    cut: int
    far: int
    audio_s: float
    images: int
    pixel_steps: int


class AgentCost(Cost):
    """The usage of one agent; `name` is null where it was removed. `removed_name`: the name it had then, null where
    it is there or the audit table does not tell any more."""

    agent_id: str
    name: str | None
    removed_name: str | None


class TenantCost(Cost):
    """The usage of one tenant."""

    tenant: str


class ModelCost(Cost):
    """The usage of requests for one model."""

    model: str


class BackendCost(Cost):
    """The usage of requests to one kind of inference server."""

    backend: str


class HourCost(Cost):
    """The usage in one hour."""

    hour: Annotated[int, Meta(description="Unix seconds at which the hour began.")]


class Usage(TypedDict):
    """Usage, added up by `by`. One list is there, the one that is named after it: the most expensive first, hours in
    their order."""

    token_tracking: bool
    by: By
    agents: NotRequired[list[AgentCost]]
    tenants: NotRequired[list[TenantCost]]
    models: NotRequired[list[ModelCost]]
    backends: NotRequired[list[BackendCost]]
    hours: NotRequired[list[HourCost]]
    totals: Cost


class Percentiles(TypedDict):
    """Percentiles of the last 2000; null without any."""

    p50: Milliseconds | None
    p99: Milliseconds | None


class WakesFrom(Percentiles):
    """Wakes from one depth of sleep."""

    wakes: int


class WakesByDepth(TypedDict):
    """Wakes by the depth the agent slept at."""

    light: WakesFrom
    deep: WakesFrom


class Stats(TypedDict):
    """Requests and tokens of all time; pauses, wakes and errors (ends nobody asked for, failed starts) since the daemon
    started. A wake takes from the first ask to the open gate, waiting for memory included."""

    agents: int
    requests: int
    tokens_in: int
    tokens_out: int
    pauses: int
    wakes: int
    deep_sleeps: int
    wake_ms: Percentiles
    wake_ms_from: WakesByDepth
    wake_causes: Annotated[dict[str, int], Meta(description="Cause of a wake → how many.")]
    errors: int


class Spent(TypedDict):
    """Tokens of ended requests, as far as known, and how many ended."""

    totalIn: int
    totalOut: int
    requests: int


class TopAgent(TypedDict):
    """The usage of an agent in all."""

    id: str
    name: str
    tokensIn: int
    tokensOut: int
    tier: Tier
    status: AgentStatus


class VramGpu(TypedDict):
    """Memory of one GPU; null for what it does not tell."""

    index: int
    name: str | None
    totalMB: Mebibytes | None
    usedMB: Mebibytes | None
    freeMB: Mebibytes | None


class Vram(TypedDict):
    """Memory of the GPUs; what one does not tell is in no sum."""

    gpus: list[VramGpu]
    totalMB: Mebibytes
    usedMB: Mebibytes


class InferenceStats(TypedDict):
    """The work of the inference server. `activeAgents`: running or asleep; `concurrentRequests`: in flight."""

    backend: BackendKind | None
    tokensLastHour: Spent
    tokensLastDay: Spent
    topAgents: Annotated[list[TopAgent], Meta(description="The ten that used most, of those that are there now.")]
    vram: Vram
    activeAgents: int
    concurrentRequests: int


class Budget(TypedDict):
    """One limit. `used`: by requests that have ended; those in flight count at the proxy, with what they will probably
    cost."""

    scope: Annotated[str, Meta(description="`agent` or `tenant`.")]
    id: Annotated[str, Meta(description="The agent's id, or the tenant's name.")]
    name: str
    budget: Annotated[str, Meta(description="`tokens_per_day`, `tokens_per_month` or `cloud_tokens_per_day`.")]
    limit: int
    used: int
    left: int
    state: Annotated[str, Meta(description="`ok`, `soft` from 80 % on, or `spent`: requests are refused.")]
    resets_at: UnixSeconds


class BudgetList(TypedDict):
    """Every budget of tokens, the one that ends first before the others. `zone`: where days and months end."""

    zone: str
    budgets: list[Budget]
