"""The API's answers about the whole, as types: mypy holds the code to them, and the API's description is made from them
(openapi.py). A client leaves alone what it does not know: fields are added, none goes.

Answers about agents are in agents.py. None is unknown or not there; where it matters which, the field says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypedDict

from msgspec import Meta

from hive.conditions import Severity
from hive.domain import BackendInfo, BackendKind, Band, Isolation, JobState, Tier

UnixSeconds = Annotated[float, Meta(description="Unix seconds.")]
Milliseconds = Annotated[float, Meta(description="Milliseconds.")]
Bytes = Annotated[int, Meta(description="Bytes.")]
Mebibytes = Annotated[int, Meta(description="MiB, as nvidia-smi counts.")]

# health ---------------------------------------------------------------------------------------------------------------


class ProxyHealth(TypedDict):
    """The data path. The ports are TCP ports of the loopback; None until the proxy has said them."""

    connected: bool
    port: int | None
    ingress_port: int | None


class ApiHealth(TypedDict):
    """This API on TCP: the address it listens at, and its port; null where it is on its unix socket alone."""

    listen: str
    port: int | None


class HelperHealth(TypedDict):
    """The process that starts, freezes and stops agents. `enabled`: whether this Hive is to have one."""

    connected: bool
    enabled: bool


class RedisHealth(TypedDict):
    """`at`: where it is looked for; `why`: what it said when it could not be used, empty where it is up."""

    up: bool
    at: str
    why: str


class UsageHealth(TypedDict):
    """The state of metering. `degraded`: why usage cannot be written now, empty where it can; `lost`: requests with
    lost usage."""

    degraded: str
    lost: int


class BackendCapabilities(TypedDict):
    """The abilities an inference server told; null where it does not tell, and its kind decides. `found`: where."""

    endpoints: Annotated[list[str] | None, Meta(description="Paths it answers.")]
    fields: Annotated[list[str] | None, Meta(description="Request fields it takes that OpenAI's schema does not have.")]
    salted: Annotated[list[str] | None, Meta(description="Paths that take `cache_salt`, which keeps tenants apart.")]
    ordered: Annotated[list[str] | None, Meta(description="Paths that take `priority`.")]
    found: str


def kind_of(backend: BackendInfo | None) -> BackendKind | None:
    """The name that the API has for its kind."""
    return None if backend is None else BackendKind(backend.kind)


class ClusterNodeView(TypedDict):
    """One machine of a cluster, by the name its engine has for it. `up`: something on it can answer a request."""

    name: str
    up: bool
    replicas: Annotated[int, Meta(description="Of the model, running there.")]


class ClusterView(TypedDict):
    """A distributed engine behind the backend's address, as it tells of itself."""

    engine: Annotated[str, Meta(description="router, ray or vllm (its own data parallelism).")]
    label: Annotated[str, Meta(description="The engine, as people know it.")]
    wanted: Annotated[int, Meta(description="Replicas that are meant to run.")]
    running: int
    slots_each: Annotated[int, Meta(description="Requests that one replica works on at once; 0 is not known.")]
    nodes: list[ClusterNodeView]
    stuck: Annotated[
        list[str], Meta(description="Ranks whose tokens stand still while requests run; none of `running`.")
    ]
    asked_at: Annotated[float, Meta(description="Unix seconds of the last answer; 0: there was none yet.")]
    notes: Annotated[list[str], Meta(description="Codes of what `hive doctor cluster` says more of.")]
    waiting: Annotated[
        int | None, Meta(description="Requests in its own queue, none of Hive's; null: it does not tell.")
    ]
    waited_s: Annotated[
        float | None, Meta(description="How long requests stood there of late, on average; null: it does not tell.")
    ]
    why_none: Annotated[str, Meta(description="Why no request can run there; empty where one can.")]


class Backend(TypedDict):
    """The inference server in use, as it was seen last."""

    kind: BackendKind
    address: Annotated[str, Meta(description="`host:port`, the path of a socket, or a URL without `/v1`.")]
    label: str
    version: str
    up: bool
    slots: Annotated[int | None, Meta(description="Requests it works on at once; null is no limit that is known.")]
    slots_from: Annotated[str, Meta(description="Where that number comes from, in words.")]
    priority: Annotated[bool, Meta(description="Whether it orders requests by a `priority` field.")]
    warning: Annotated[str, Meta(description="What contradicts `slots`; empty where nothing does.")]
    id_slots: Annotated[int, Meta(description="Slots of which Hive names one for each request; 0 where it names none.")]
    capabilities: BackendCapabilities
    cluster: Annotated[ClusterView | None, Meta(description="null: one server answers there, and no cluster.")]


class Condition(TypedDict):
    """One thing that is not as it should be. What a program decides by is `code` and `facts`; docs/conditions.md has
    all codes."""

    code: str
    severity: Severity
    text: Annotated[str, Meta(description="What is wrong, and what it means, in words.")]
    fix: Annotated[str, Meta(description="The command that says why or changes it; empty where there is none.")]
    facts: dict[str, Any]


class PoolHealth(TypedDict):
    """The pool in short; `hive pool` has more. `failed`: models whose loads have failed."""

    models: int
    loaded: int
    failed: list[str]


class Health(TypedDict):
    """The state of Hive. `status` is `ok` or `degraded`; `conditions` has each thing that is not as it should be, and
    `problems` their texts."""

    status: str
    problems: list[str]
    conditions: list[Condition]
    version: str
    pid: int
    epoch: Annotated[str, Meta(description="Another one for each start of the daemon.")]
    started_at: UnixSeconds
    state_dir: str
    runtime_dir: str
    config_file: Annotated[str, Meta(description="The hive.conf that its daemon reads; empty: there is none.")]
    isolation: Isolation
    freezer: Annotated[str, Meta(description="How agents are frozen: `cgroup` or `signal`.")]
    limits: Annotated[str, Meta(description="Whether agents' limits hold, in words.")]
    token_tracking: bool
    proxy: ProxyHealth
    api: ApiHealth
    helper: HelperHealth
    redis: RedisHealth
    usage: UsageHealth
    backend: Backend | None
    pool: Annotated[PoolHealth | None, Meta(description="null: no model is described.")]


# jobs, audit, events --------------------------------------------------------------------------------------------------


JobStatus = Annotated[
    Literal["queued", "in_progress", "completed", "failed", "cancelled", "incomplete"],
    Meta(
        description="In the words of OpenAI's background responses. queued: nothing was asked of a model yet."
        " incomplete: the answer was cut off, or the turns were used up."
    ),
]
STATUSES: Mapping[JobState, JobStatus] = {
    JobState.RUNNING: "in_progress",
    JobState.DONE: "completed",
    JobState.FAILED: "failed",
    JobState.CANCELLED: "cancelled",
}
"""State of any job → its status, where nobody knows more."""


class ModelTask(TypedDict):
    """The order of a job of kind task, in short. Of a released one only the name is left."""

    name: str
    model: str
    tenant: str
    agent: Annotated[str, Meta(description="The id of the agent it works as; empty: as an operator.")]
    agent_name: Annotated[str, Meta(description="Its name then.")]
    priority: Band
    form: Annotated[str, Meta(description="chat; or responses, where an agent asked for one with background.")]
    parent: Annotated[str, Meta(description="The job whose call began this one; empty for none.")]
    released: bool


class JobError(TypedDict):
    """The reason that a job ended otherwise. `log`: the last lines of a server that failed."""

    code: str
    message: str
    hint: str
    log: list[str]


class Job(TypedDict):
    """Something that takes long. `progress` is a sentence, `step` what is being done in a word."""

    id: str
    kind: str
    state: JobState
    status: JobStatus
    step: str
    about: Annotated[str, Meta(description="The model it is about; empty where it is about none.")]
    progress: str
    completed_bytes: Annotated[
        int | None, Meta(description="How much of `total_bytes` is there; null where not counted.")
    ]
    total_bytes: int | None
    eta_s: Annotated[
        float | None, Meta(description="Seconds until it will probably end; null once it has, or unknown.")
    ]
    task: Annotated[ModelTask | None, Meta(description="null where its kind is not task.")]
    result: Annotated[dict[str, Any] | None, Meta(description="What a job that is done came to; by its kind.")]
    error: JobError | None
    actor: str
    created_at: UnixSeconds
    updated_at: UnixSeconds


class JobList(TypedDict):
    """The last jobs, the newest first."""

    jobs: list[Job]


class AuditRow(TypedDict):
    """One act. `hash`: of the row and the one before it; null for a row that an older Hive wrote."""

    id: int
    at: UnixSeconds
    actor: Annotated[
        str,
        Meta(description="`uid:<n>`, `token:<name>`, `internal`, `api-token`, `idle`, `proxy`, `helper`, `hive`."),
    ]
    user: Annotated[str, Meta(description="The name that the user `uid:<n>` had then; empty where none was known.")]
    act: Annotated[str, Meta(description="As `agent.paused`, or `order.pause` for what somebody asked for.")]
    target: Annotated[str, Meta(description="The id of an agent, a setting, or `hive`.")]
    origin: Annotated[
        str,
        Meta(description="`socket`, `tcp:<address>` of an order (`tcp` of what came of it), `cli`, `proxy`, `hive`."),
    ]
    outcome: Annotated[str, Meta(description="`ok`, or the code of the error.")]
    detail: dict[str, Any]
    hash: str | None


class AuditPage(TypedDict):
    """Rows, the newest first. `next`: what `before` is for the rows that follow; null where there are none."""

    rows: list[AuditRow]
    next: int | None


class Event(TypedDict):
    """Something that happened: an act that is in the audit table, unless it was an order. What more there is depends on
    its `kind`; a transition has the agent's `name`, `from`, `to`, `generation` and `reason`."""

    at: UnixSeconds
    kind: Annotated[str, Meta(description="As `agent.paused`.")]
    agent: Annotated[str, Meta(description="The id of an agent, or `hive`.")]
    actor: str
    outcome: str


# the inference server -------------------------------------------------------------------------------------------------


class Model(TypedDict):
    """A model the inference server offers, by the name it uses. `created`: Unix seconds, 0 where it does not tell.

    `quantization`: in its words, `parent`: the model it is an adapter on; both empty where it does not tell.
    `remote_host`, `remote_model`: where it sends what it is asked for this model; empty where it answers by itself.
    `context_length`: tokens of prompt and answer together; `capabilities`: in Ollama's words; `template`: as it tells
    it; `meta`: what llama-server tells besides.
    """

    name: str
    size_bytes: Bytes | None
    owned_by: str
    created: int
    quantization: str
    parameters: int | None
    parent: str
    remote_host: str
    remote_model: str
    digest: str
    context_length: int | None
    capabilities: list[str]
    template: str
    meta: dict[str, int | float | str | bool]


class Speculation(TypedDict):
    """Tokens that a server guessed ahead since it started, and those of them that its model accepted."""

    drafted: int
    accepted: int
    rate: Annotated[float | None, Meta(description="Accepted within the last 10 minutes; null: none was drafted.")]
    warning: Annotated[str, Meta(description="What is wrong with it, a sentence; else empty.")]


class InferenceServer(TypedDict):
    """The inference server in use; `backend` is null and all else is empty where there is none."""

    backend: BackendKind | None
    label: str
    address: str
    running: bool
    version: str
    slots: Annotated[int | None, Meta(description="Requests it works on at once; null is no limit that is known.")]
    slots_from: Annotated[str, Meta(description="Where that number comes from, in words.")]
    priority: bool
    prefix_cache: Annotated[str, Meta(description="Who may meet whose prompts in its prefix cache, in words.")]
    warning: str
    capabilities: BackendCapabilities
    cluster: Annotated[ClusterView | None, Meta(description="null: one server answers there, and no cluster.")]
    models: list[Model]


class Inference(InferenceServer):
    """The inference server in use, and the job that changes to another one; null where none is under way."""

    switch: Job | None
    speculation: Annotated[Speculation | None, Meta(description="null: it does not speculate, or cannot tell.")]


class Route(TypedDict):
    """The model a request is given; `model` is empty where it is refused. `why` and `steps` say it in words."""

    asked: str
    tier: Tier
    model: str
    why: str
    hint: str
    steps: list[str]


class Choice(TypedDict):
    """An inference server that could be switched to. `state`: of a service in systemd's words, else `running` or
    `silent`; `answers`: whether it does, just now; `unit`: empty where Hive does not start it."""

    backend: BackendKind
    address: str
    unit: str
    in_use: bool
    state: str
    answers: bool
    version: str


class Backends(TypedDict):
    """The inference servers there are."""

    backends: list[Choice]


class Access(TypedDict):
    """The addresses and the token by which an operator reaches the model through Hive."""

    openai_base_url: str
    ollama_host: str
    token: str


# the host -------------------------------------------------------------------------------------------------------------


class Zram(TypedDict):
    """A device of compressed memory. `original_bytes`: of what is in it; `memory_bytes`: what it takes for that."""

    device: str
    algorithm: str
    disksize_bytes: Bytes
    original_bytes: Bytes
    memory_bytes: Bytes


class Memory(TypedDict):
    """The host's memory; null where the kernel does not say. `pressure_some_avg10`: per cent of the last 10 s in which
    some task waited for memory."""

    total_bytes: Bytes | None
    available_bytes: Bytes | None
    swap_total_bytes: Bytes | None
    swap_free_bytes: Bytes | None
    pressure_some_avg10: float | None
    zram: list[Zram]


class GpuProcess(TypedDict):
    """`program` is empty where it has ended."""

    pid: int
    used_bytes: Bytes | None
    program: str


class GpuInstance(TypedDict):
    """One MIG device: a part of a GPU that programs see as a GPU."""

    number: int
    name: str
    total_bytes: Bytes | None
    used_bytes: Bytes | None
    free_bytes: Bytes | None
    processes: list[GpuProcess] | None


class Gpu(TypedDict):
    """One GPU; null for what it does not tell, and then `fault` says why. `busy_percent`: share of the last sample in
    which a program ran on it. `processes`: those with a compute context."""

    number: int
    name: str
    uuid: str
    total_bytes: Bytes | None
    used_bytes: Bytes | None
    free_bytes: Bytes | None
    busy_percent: int | None
    processes: list[GpuProcess] | None
    instances: list[GpuInstance]
    fault: str


class Gpus(TypedDict):
    """The host's GPUs, or `why_not`."""

    why_not: str
    gpus: list[Gpu]


class Shutdown(TypedDict):
    """Names of the agents that were stopped, and of those that could not be."""

    stopped: list[str]
    failed: list[str]


# requests under way, and settings -------------------------------------------------------------------------------------


class TenantQueue(TypedDict):
    """One tenant. `tokens_ahead`: what it has had, by weight, in tokens and what other work counts as, beyond the least
    served one. `load_s`: seconds of models' loads that its requests have caused, which are charged to it in tokens."""

    name: str
    weight: float
    running: int
    waiting: int
    tokens_ahead: float
    load_s: float


class RequestView(TypedDict):
    """One request to the model. `state`: `ended`, or where it is: `parked` (its agent wakes), `uploading`, `reading`,
    `queued`, `connecting`, `waiting` (for the first byte), `answering`, `streaming`, `cancelling` (given up, and its
    server has not stopped yet). Null is unknown, or not yet known.

    Times in milliseconds: `duration_ms` since its first byte, `queue_ms` of that in line for a turn, `ttft_ms` until
    the answer's first byte. `name` is null where the agent was removed. `cut`: its client did not get a whole answer.
    `unit`: what is counted of it, `tokens`, `audio_s` or `images`; of the latter two `amount` is how much, and `work`
    of images the pixels of all their steps. `waits_for`: how far its model's load is, of a queued one whose model is
    not loaded; else empty. `asked`: the name that the request had for `model`, which served it; `rung`: the place of
    that model in the list of the task that was asked, from 0, null where none was; `far`: the request left the box.
    """

    id: str
    state: str
    waits_for: str
    agent: str
    name: str | None
    tenant: str
    model: str
    asked: str | None
    rung: int | None
    far: bool | None
    endpoint: str
    backend: str | None
    status: int | None
    tokens_in: int | None
    tokens_out: int | None
    cached_tokens: int | None
    unit: str | None
    amount: float | None
    work: float | None
    estimated: bool | None
    cut: bool | None
    queue_ms: float | None
    ttft_ms: float | None
    duration_ms: float
    client_request_id: str | None
    ended_at: float | None


class ServerWork(TypedDict):
    """The work of one server in a second: `per_s` of `unit`, which is `tokens`, `audio_s` or `pixel_steps`. `model`:
    empty for the inference server in use; `is_measured`: it was seen to, else it is taken for granted."""

    model: str
    unit: str
    per_s: float
    is_measured: bool


class Queue(TypedDict):
    """The requests that wait for the model and those that run. `slots`: how many run at once, null for no limit;
    `drain_per_s`: slots given back per second while any request waited, null where none has. `requests`: those under
    way, the oldest first, those that wait for no turn included; `left_out`: how many more there are. A second of a
    server's work that is no tokens counts as `tokens_per_gpu_s` tokens, the mean of the servers of text; `work`: what
    each server does in a second."""

    running: int
    waiting: int
    slots: int | None
    drain_per_s: float | None
    tenants: list[TenantQueue]
    requests: list[RequestView]
    left_out: int
    tokens_per_gpu_s: float
    work: list[ServerWork]


class CancelledRequest(TypedDict):
    """Its id."""

    cancelled: str


class Setting(TypedDict):
    """One setting, as it is in force. `source`: `default`, `file`, `runtime`, `environment` or `flag`; `where`: the
    line or the variable. `at_runtime`: it may be changed while Hive runs."""

    name: str
    value: bool | int | float | str
    default: bool | int | float | str
    unit: str
    source: str
    where: str
    at_runtime: bool
    expected: str
    sentence: str


class Config(TypedDict):
    """Every setting but those of tenants and fields."""

    settings: list[Setting]


class CloudConfig(TypedDict):
    """`allowCloudFallback`: whether a far model may stand in for the one that a request asks for."""

    allowCloudFallback: bool


# what went wrong ------------------------------------------------------------------------------------------------------


class Problem(TypedDict):
    """Every error (RFC 9457). `code` is for programs and stays what it is, `detail` and `hint` are for people: what is
    wrong, and what to do next, empty where there is nothing to say."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    hint: str
