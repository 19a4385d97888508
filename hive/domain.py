"""The nouns of Hive: frozen structs and enums, no I/O.

Times named `_at` or `since` are Unix seconds (records only, never subtracted to decide anything); durations
carry their unit in the name.
"""

from __future__ import annotations

import re
from enum import StrEnum

import msgspec

from hive.budgets import TokenLimits

PROGRAM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""An agent's PATH, in which its program is looked for, whatever the PATH of the user that started Hive."""
INNER_PORT = 11434
"""Hive's port, at 127.0.0.1, in a network of an agent's own: unmodified SDKs look for a model there. The listener is a
socket the helper opened in it, or the guest's forwarder (conf/guest/): by that Hive knows the agent."""
MOUNTED_SOCKET = "/run/hive/agent.sock"
"""The agent's own socket inside a container."""
MESSAGE_MAX_BYTES = 256 * 1024
"""Of text in one message for an agent."""
NAME = re.compile(r"[a-z][a-z0-9-]{0,39}")
LOOPBACK = re.compile(r"localhost|::1|127(\.\d{1,3}){3}")
"""A host by which a program reaches its own machine."""


def is_name(text: str) -> bool:
    """Whether `text` may name an agent or a tenant (design.md §9: `[a-z][a-z0-9-]{0,39}`).

    >>> is_name("alice-2"), is_name("Alice"), is_name("../etc"), is_name("a" * 41)
    (True, False, False, False)
    """
    return NAME.fullmatch(text) is not None


def near_name(text: str) -> str:
    """A name for an agent or a tenant that is like `text`; empty where nothing of it may be in one.

    >>> near_name("My Agent_2"), near_name("2-Alice"), near_name("../etc/"), near_name("42")
    ('my-agent-2', 'alice', 'etc', '')
    """
    plain = re.sub(r"[^a-z0-9]+", "-", text.lower())
    return re.sub(r"^[^a-z]+", "", plain)[:40].strip("-")


class AgentStatus(StrEnum):
    """The state of an agent; `pausing` and `resuming` are undone towards `running` after a crash."""

    CREATED = "created"
    STARTING = "starting"
    RUNNING = "running"
    PAUSING = "pausing"
    PAUSED = "paused"
    RESUMING = "resuming"
    STOPPING = "stopping"
    STOPPED = "stopped"
    ERROR = "error"


ALIVE = frozenset(
    {AgentStatus.STARTING, AgentStatus.RUNNING, AgentStatus.PAUSING, AgentStatus.PAUSED, AgentStatus.RESUMING}
)
"""Statuses in which the agent's processes exist or are being made."""
AT_REST = frozenset({AgentStatus.CREATED, AgentStatus.STOPPED, AgentStatus.ERROR})
"""Statuses that nothing but a start ends: a wake is refused."""


class SleepDepth(StrEnum):
    """Depth of sleep: `light` is frozen and keeps all of its RAM, `deep` is light with its memory paged out."""

    AWAKE = "awake"
    LIGHT = "light"
    DEEP = "deep"


class WakeCause(StrEnum):
    """The reason for waking a sleeping agent (design.md §4)."""

    INGRESS = "ingress"
    MESSAGE = "message"
    SCHEDULE = "schedule"
    REQUEST = "request"
    OPERATOR = "operator"


class Tier(StrEnum):
    """Class of an agent, by the requests it may have at the backend at once: 2, 5, 10 by default."""

    LOW = "low"
    MEDIUM = "medium"
    HIGH = "high"


class Band(StrEnum):
    """Priority of a request in the queue (`X-Priority`, from trusted callers only); a higher one always goes first."""

    HIGH = "high"
    NORMAL = "normal"
    LOW = "low"


class CacheMode(StrEnum):
    """Scope of the prefix cache for a request's prompt (`X-Cache-Mode`): `auto` and `prefix` the tenant (or its cache
    group), `none` the request alone."""

    AUTO = "auto"
    PREFIX = "prefix"
    NONE = "none"


class CloudUse(StrEnum):
    """The permit of requests to leave the box, the narrowest first: `never`; `asked`, where they name a model that is
    far; `fallback`, also where a far one stands in for what they name."""

    NEVER = "never"
    ASKED = "asked"
    FALLBACK = "fallback"


class Role(StrEnum):
    """The rights of a person: read metrics, look, steer agents, change Hive itself. Each may do what those before it
    may."""

    SCRAPER = "scraper"
    VIEWER = "viewer"
    OPERATOR = "operator"
    ADMIN = "admin"

    @property
    def rank(self) -> int:
        return list(Role).index(self)


class RestartPolicy(StrEnum):
    """The reaction to an agent that ends by itself, as Docker has it: `always` and `unless-stopped` start it again
    after any exit code, and after a boot; `unless-stopped` not after a boot if an operator had stopped it."""

    NO = "no"
    ON_FAILURE = "on-failure"
    ALWAYS = "always"
    UNLESS_STOPPED = "unless-stopped"


class BackendKind(StrEnum):
    """The names that settings and the API have for kinds of inference server; what each is, its `BackendSpec` says.

    `remote`: any other server of OpenAI's dialect, which Hive does not start.
    """

    OLLAMA = "ollama"
    VLLM = "vllm"
    LLAMA = "llama"
    DEMO = "demo"
    REMOTE = "remote"
    WHISPER = "whisper"
    DIFFUSERS = "diffusers"
    COMFYUI = "comfyui"


DEMO_SERVER = "hive-demo"
"""The `Server` field of the demo backend's answers, by which it is recognised."""


class Dialect(StrEnum):
    """The API of a request; errors are rendered in the dialect of the path."""

    OLLAMA = "ollama"
    OPENAI = "openai"
    ANTHROPIC = "anthropic"


class Isolation(StrEnum):
    """The separation of agents: nothing, a uid each, or the appliance's full set."""

    NONE = "none"
    UID = "uid"
    FULL = "full"


class RuntimeKind(StrEnum):
    """The kind of an agent's sandbox. `external`: started elsewhere, not by Hive, which knows it by its token."""

    PROCESS = "process"
    DOCKER = "docker"
    FIRECRACKER = "firecracker"
    EXTERNAL = "external"


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The most one agent may use; None is no limit of its own.

    `memory_mb`: MiB of RAM (swap is not counted: a deep sleeper is in it); `cpu`: cores, 0.5 is half of one; `pids`:
    processes and threads; `files`: open files of each process (RLIMIT_NOFILE).
    """

    memory_mb: int | None = None
    cpu: float | None = None
    pids: int | None = None
    files: int | None = None


class DockerSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[docker]`. `mounts`: `/host/path:/path/inside` or `…:ro`; `tmpfs`: paths inside that are writable and in RAM.

    `user`: as in `docker run --user`; empty for the agent's own, never the image's.
    """

    image: str
    user: str = ""
    mounts: list[str] = []
    tmpfs: list[str] = msgspec.field(default_factory=lambda: ["/tmp"])
    read_only: bool = True


class FirecrackerSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[firecracker]`. Absolute paths of the kernel image and of the root file system's image; `initrd`: one for a
    kernel that cannot mount its root by itself, empty for none; `tap`: an existing tap device of the host for its
    network, empty for none; `balloon`: a balloon device with free page reporting."""

    kernel: str
    rootfs: str
    kernel_args: str = "console=ttyS0 reboot=k panic=1 pci=off"
    rootfs_read_only: bool = False
    initrd: str = ""
    vcpus: int = 1
    memory_mb: int = 256
    tap: str = ""
    balloon: bool = True


class AgentSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The agent as an operator asks for it: immutable, stored whole. Checked by `agents/spec.py`.

    `port`: where the agent listens for callers (ingress); `idle_s`: seconds of quiet before it is put to sleep,
    None for the setting, 0 for never; `cid`: AF_VSOCK context id of the virtual machine it runs in, unique, 3 or more.
    `deepest`: how deep it may sleep. `inbox`: path at its port where messages for it are posted. `autostart`: started
    after a boot, whatever `restart` says. `egress`: where it may connect to besides Hive: None for all that the
    runtime allows by itself, an empty list for nowhere, else networks like `192.0.2.0/24`: those of other hosts, and
    of this one what the list names of the loopback. `system_prompt`: the beginning of its conversations, word for word
    as the agent sends it; `prewarm_on_start`: the backend reads it at every start and wake, before the agent asks.
    `cloud`: narrows how far its requests may go, None for what box and tenant say. `tokens_per_day`,
    `tokens_per_month`, `cloud_tokens_per_day`: its budgets, None for what its tier has. `template`: the one it is
    forked from, for good; the command is then a Python script, `-m MODULE` or `-c CODE`, with what follows it.
    """

    name: str
    command: list[str] = []
    runtime: RuntimeKind = RuntimeKind.PROCESS
    env: dict[str, str] = {}
    port: int | None = None
    tier: Tier = Tier.MEDIUM
    tenant: str = "default"
    model: str | None = None
    restart: RestartPolicy = RestartPolicy.NO
    idle_s: float | None = None
    deepest: SleepDepth = SleepDepth.DEEP
    inbox: str = "/inbox"
    autostart: bool = False
    egress: list[str] | None = None
    limits: Limits = Limits()
    docker: DockerSpec | None = None
    firecracker: FirecrackerSpec | None = None
    cid: int | None = None
    system_prompt: str | None = None
    prewarm_on_start: bool = False
    cloud: CloudUse | None = None
    tokens_per_day: int | None = None
    tokens_per_month: int | None = None
    cloud_tokens_per_day: int | None = None
    template: str | None = None

    @property
    def budget(self) -> TokenLimits:
        """Its own budgets."""
        return TokenLimits(self.tokens_per_day or 0, self.tokens_per_month or 0, self.cloud_tokens_per_day or 0)


class Agent(msgspec.Struct, frozen=True, kw_only=True):
    """One agent as Hive records it. `uid` is None where agents run as the user of `hive up` itself.

    `keep_awake_until`: Unix seconds, None where nothing keeps it awake. `stopped_by`: `operator` or `hive` (which went
    down itself) where it was stopped, else empty.
    """

    id: str
    spec: AgentSpec
    status: AgentStatus = AgentStatus.CREATED
    depth: SleepDepth = SleepDepth.AWAKE
    depth_goal: SleepDepth = SleepDepth.AWAKE
    generation: int = 0
    since: float = 0.0
    reason: str = ""
    uid: int | None = None
    token_serial: int = 1
    tokens_in: int = 0
    tokens_out: int = 0
    requests: int = 0
    last_active_at: float | None = None
    created_at: float = 0.0
    keep_awake_until: float | None = None
    stopped_by: str = ""

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def told_of_failure(self) -> str:
        """The end of one that failed, in the words for its callers: no path of this host is among them.

        >>> ended = Agent(id="a1", spec=AgentSpec(name="a"), status=AgentStatus.ERROR, reason="exited with 2: no /x")
        >>> ended.told_of_failure
        'exited with 2'
        """
        said = re.match(r"exited with [0-9]+", self.reason) if self.status is AgentStatus.ERROR else None
        return "" if said is None else said[0]


class CallerKind(StrEnum):
    """The kind of a caller. `operator`: has the internal token, at the proxy. `person`: a user of the API."""

    AGENT = "agent"
    OPERATOR = "operator"
    PERSON = "person"


class Caller(msgspec.Struct, frozen=True):
    """The caller of a request: the *listener* decided, never a header the client could choose.

    `models`: the names its tenant is limited to, None for all. `role`: a person's, None for all others.
    """

    kind: CallerKind
    id: str
    tenant: str = "default"
    tier: Tier = Tier.MEDIUM
    models: frozenset[str] | None = None
    role: Role | None = None


class UsageUnit(StrEnum):
    """The unit in which a request's usage is counted. `AUDIO_S`: seconds of audio that were heard."""

    TOKENS = "tokens"
    AUDIO_S = "audio_s"
    IMAGES = "images"


UNIT_OF_CATEGORY = {"audio": UsageUnit.AUDIO_S, "image": UsageUnit.IMAGES}
"""The unit of what a model of such a category does; of all others tokens are counted."""


class RequestUsage(msgspec.Struct, frozen=True, kw_only=True):
    """The cost of one request. A count of None is unknown, which is not 0."""

    tokens_in: int | None = None
    tokens_out: int | None = None
    cached_tokens: int | None = None


class UsageEvent(msgspec.Struct, kw_only=True):
    """One ended request, as it travels from the proxy's spool over the link into SQLite.

    `id` is the request id `epoch-seq` (key of the row); `event_no` counts 1, 2, 3 … within `epoch` in the order of
    emission, and both are the spool's to set. `cut`: the client did not get a whole answer. `unit`: what is counted, a
    `UsageUnit`; of one that is no tokens `amount` is how much of it, None where that is not known, and `work` of images
    the pixels of all their steps (width x height x steps, summed). `estimated`: the amount, or the tokens out, are by
    what got through. `model`: the one that served it; `asked`: the name that the request had for it, empty where an
    older Hive wrote it; `rung`: of a task, the place of that model in its list, from 0; None where no task was asked.
    `far`: it left the box. Durations in milliseconds; `created_at` Unix seconds.
    """

    id: str
    epoch: str = ""
    event_no: int = 0
    agent_id: str
    tenant: str
    model: str
    backend: str
    endpoint: str
    tokens_in: int | None = None
    tokens_out: int | None = None
    cached_tokens: int | None = None
    unit: str = "tokens"
    estimated: bool = False
    cut: bool = False
    queue_ms: float = 0.0
    ttft_ms: float | None = None
    duration_ms: float = 0.0
    status: int = 0
    client_request_id: str | None = None
    created_at: float = 0.0
    asked: str = ""
    rung: int | None = None
    far: bool = False
    amount: float | None = None
    work: float | None = None


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """The address of a backend, taken apart. `dialled`: `host:port` or a socket path; `host`: for the Host field, and
    the name its certificate must have; `prefix`: what stands before every path, empty for none."""

    dialled: str
    host: str = "localhost"
    tls: bool = False
    prefix: str = ""

    @property
    def name(self) -> str:
        """The host alone, as a certificate names it."""
        return self.dialled.rpartition(":")[0].strip("[]")

    @property
    def is_here(self) -> bool:
        """Whether nothing that is said to it leaves this machine.

        >>> [origin_of(address).is_here for address in ("/run/x.sock", "127.0.0.2:80", "[::1]:80", "10.0.0.1:80")]
        [True, True, True, False]
        >>> origin_of("https://127.example.com/v1").is_here
        False
        """
        return self.dialled.startswith("/") or LOOPBACK.fullmatch(self.name) is not None


def origin_of(address: str) -> Origin:
    """The parts of an address as `BackendInfo` has it: `host:port`, a socket path, or a URL without `/v1`.

    >>> origin_of("127.0.0.1:80").dialled, origin_of("127.0.0.1:80").host
    ('127.0.0.1:80', 'localhost')
    >>> far = origin_of("https://api.example.com/openai")
    >>> far.dialled, far.host, far.name, far.tls, far.prefix
    ('api.example.com:443', 'api.example.com', 'api.example.com', True, '/openai')
    """
    scheme, is_url, rest = address.partition("://")
    if not is_url:
        return Origin(dialled=address)
    host, slash, path = rest.partition("/")
    tls = scheme == "https"
    has_port = host.rpartition("]")[2].rpartition(":")[1]
    dialled = host if has_port else f"{host}:{443 if tls else 80}"
    return Origin(dialled=dialled, host=host, tls=tls, prefix=slash + path)


class FoundCapabilities(msgspec.Struct, frozen=True, kw_only=True):
    """The abilities a backend was found to have, by asking it; None where it does not tell, and its kind decides.

    `endpoints`: the paths it answers. `fields`: those of EXTRA (models/capabilities.py) that it takes in a request,
    which are none of OpenAI's. `salted`, `ordered`: the endpoints that take `cache_salt`, and `priority`. `found`: in
    words, where that is known from.
    """

    endpoints: tuple[str, ...] | None = None
    fields: tuple[str, ...] | None = None
    salted: tuple[str, ...] | None = None
    ordered: tuple[str, ...] | None = None
    found: str = ""


class ClusterNode(msgspec.Struct, frozen=True):
    """One machine of a cluster, by the name its engine has for it. `up`: something on it can answer a request.
    `replicas`: those running on it."""

    name: str
    up: bool
    replicas: int


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """A distributed inference engine behind one address, as it tells of itself.

    `engine`: `router` (vLLM Router), `ray` (Ray Serve), `vllm` (vLLM's own data parallelism). `wanted`, `running`:
    replicas that are meant to run, and that do. `slots_each`: requests that one works on at once, 0 where that is not
    known. `stuck`: ranks of data parallelism whose tokens stand still while requests run there; they are none of
    `running`. `asked_at`: Unix seconds of the last answer. `notes`: short codes of what is set up so that it fails
    late or is open: `no_token`, `one_ingress`, `max_ongoing_unset`, `slow_checks`. `waiting`: requests in the engine's
    own queue, which is none of Hive's; `waited_s`: how long those stood there that left it since the last look, on
    average; each None where the engine does not tell. `why_none`: why no request can run there, a sentence; empty where
    one can.
    """

    engine: str
    wanted: int
    running: int
    slots_each: int
    nodes: tuple[ClusterNode, ...] = ()
    stuck: tuple[str, ...] = ()
    asked_at: float = 0.0
    notes: tuple[str, ...] = ()
    waiting: int | None = None
    waited_s: float | None = None
    why_none: str = ""


class BackendInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The active inference server as the proxy needs to know it. `kind`: the name it is registered under
    (`hive.backends.kinds`). `address` is `host:port` or a socket path, or where there is more to it a URL: `https://…`,
    or `http://` with a path; what `/v1` is put behind.

    `places`: requests it works on at once, so that the others wait in Hive's queue; None for no limit known.
    `places_from` says in words where that number comes from; in JSON `slots` and `slots_from`. `priority`: it orders
    requests by a `priority` field. `warning`: what contradicts that (its own queue was seen to grow), empty where
    nothing does. `id_slots`: its slots, where Hive names one for each request (docs/cache.md); 0 where it does not.
    `cluster`: what a distributed engine behind this address tells of itself; None where it is one server. With one,
    `places` 0 is no place at all, and requests wait.
    """

    kind: str
    address: str
    label: str = ""
    version: str = ""
    up: bool = False
    places: int | None = msgspec.field(default=None, name="slots")
    places_from: str = msgspec.field(default="", name="slots_from")
    priority: bool = False
    warning: str = ""
    capabilities: FoundCapabilities = FoundCapabilities()
    id_slots: int = 0
    cluster: Cluster | None = None


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One model the backend offers, by the name the backend uses.

    `quantization`: in the backend's words, empty where it tells none. `parameters`: how many weights. `parent`: the
    model this is an adapter on, empty for a model of its own. `remote_host` and `remote_model`: where the backend
    sends its requests instead of answering them, and for which model there (Ollama's cloud stubs); empty where it
    answers them itself. `digest`: another one is another model, whatever its name; empty where it tells none.
    `context_length`: tokens of prompt and answer together. `capabilities`: what it does, in Ollama's words
    (`completion`, `embedding`, `tools`, `vision`), empty where it tells nothing. `template`: how it writes a
    conversation, as the backend tells it. `meta`: what llama-server tells besides.
    """

    name: str
    size_bytes: int | None = None
    owned_by: str = ""
    created: int = 0
    quantization: str = ""
    parameters: int | None = None
    parent: str = ""
    remote_host: str = ""
    remote_model: str = ""
    digest: str = ""
    context_length: int | None = None
    capabilities: tuple[str, ...] = ()
    template: str = ""
    meta: dict[str, int | float | str | bool] = {}


class JobState(StrEnum):
    """State of a job; all but `running` are final."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


class DeploymentState(StrEnum):
    """State of what was ordered to be loaded: `evicted` left for another model, or idle, and a request loads it again;
    `absent` is not there, and the row says why."""

    LOADING = "loading"
    LOADED = "loaded"
    UNLOADING = "unloading"
    EVICTED = "evicted"
    ABSENT = "absent"
    FAILED = "failed"


class MessageState(StrEnum):
    """The fate of a message."""

    WAITING = "waiting"
    REFUSED = "refused"
    DELIVERED = "delivered"


class TokenState(StrEnum):
    """State of a token of the API; only a live one is good."""

    LIVE = "live"
    EXPIRED = "expired"
    REVOKED = "revoked"


class By(StrEnum):
    """The keys by which usage is added up."""

    AGENT = "agent"
    TENANT = "tenant"
    MODEL = "model"
    BACKEND = "backend"
    HOUR = "hour"
