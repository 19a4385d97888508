"""Messages between proxy and daemon, and the union of all messages; those of the helper are in helper.py.

`ask` marks a message that is answered (with the type named in its docstring, or `Failed`); all others are told.
Generations only grow; a message with an older one is ignored. Times in seconds unless the name says otherwise.
"""

from __future__ import annotations

import msgspec

from hive.budgets import NO_LIMITS, TokenLimits
from hive.domain import BackendInfo, CloudUse, ModelInfo, Tier
from hive.link.adapters import AdapterDrained, AdapterRoute, AdaptersAre, DrainAdapter
from hive.link.background import (
    AskBackground,
    AskBackgroundEvents,
    AskBeginBackground,
    BackgroundEventsAre,
    BackgroundIs,
    CancelBackground,
    DropBackground,
)
from hive.link.cache import UseCacheEpochs
from hive.link.execution import EndExecution, Execute, Executed, Executing, Resize
from hive.link.figures import AskMetrics, MetricsAre
from hive.link.helper import (
    AskBackend,
    AskBackendLog,
    AskListeners,
    AskRuntimes,
    AskStat,
    AskTemplates,
    BackendIs,
    BackendLog,
    BackendStart,
    BackendStop,
    Confirm,
    Define,
    Defined,
    Dial,
    Dialled,
    Ended,
    Freeze,
    Frozen,
    Listener,
    ListenerGone,
    PagedOut,
    PageOut,
    ProxyStats,
    Reaped,
    Reconcile,
    Remove,
    RestartTemplate,
    Runtimes,
    Start,
    Started,
    Stop,
    Templates,
    Thaw,
    Thawed,
    ThawedAlone,
)
from hive.link.jobs import AskExecIn, EndExecIn, ExecIn, JobEnds, JobGrants, JobSaid, RunJob, StopJob
from hive.link.leases import AskLeases, HolderMoved, LeaseEnd, LeaseExpect, LeaseForget, LeasesHeld
from hive.link.message import LinkMessage
from hive.link.parking import AskSlotOf, ParkedIs, ParkedOver, SlotOf, UseParked
from hive.link.pool import (
    CloseSlotGate,
    CrashBlame,
    LoadCharged,
    SlotBusy,
    SlotClosed,
    SlotCrashed,
    SlotDemands,
    SlotFlows,
    SlotGone,
    SlotIs,
    SlotRow,
    Slots,
)
from hive.link.prompts import Prewarm, Prewarmed
from hive.link.requests import AskModels, AskQueue, AskTokensCome, CancelRequest, QueueIs, TokensCome
from hive.link.responses import (
    AskHistory,
    AskInputItems,
    AskResponse,
    DropResponse,
    HistoryIs,
    KeepResponse,
    ResponseIs,
)
from hive.link.runner import RunnerCall, RunnerSaid, RunnerTokens
from hive.link.signed_loads import SignedLoads
from hive.link.slots import (
    AskServerProgram,
    AskSlotLog,
    AskSlots,
    ServerProgramIs,
    SlotIsRunning,
    SlotMoved,
    SlotPrepare,
    SlotsRunning,
    SlotStart,
    SlotStop,
)
from hive.link.tasks import AskTasks, TasksAre
from hive.link.usage import AgentsActive, AskSpent, SpentIs, UsageBatch

PROTOCOL = 1


# --- both ways ---------------------------------------------------------------------------------------------------


class Hello(LinkMessage, tag=True, frozen=True, kw_only=True):
    """First message of each side. `epoch` names this run of the process."""

    role: str
    epoch: str
    protocol: int = PROTOCOL
    pid: int = 0


class Done(LinkMessage, tag=True, frozen=True, kw_only=True):
    """The answer that says only: it is done."""


class Failed(LinkMessage, tag=True, frozen=True, kw_only=True):
    """The answer that says why not; `code` is one of `hive.errors`."""

    code: str
    message: str
    hint: str = ""


# --- proxy → daemon ----------------------------------------------------------------------------------------------


class Activity(LinkMessage, tag=True, frozen=True, kw_only=True):
    """The activity of one agent, as the proxy sees it. `quiet_s`: since the last byte either way, None if it saw none
    yet."""

    in_flight: int = 0
    parked: int = 0
    ingress: int = 0
    quiet_s: float | None = None
    why_busy: str = ""


class ProxyTable(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Sent on every (re)connect, after Hello: activity of every agent the proxy knows, and its listening ports."""

    agents: dict[str, Activity]
    port: int
    ingress_port: int
    spooled: dict[str, int] = msgspec.field(default_factory=dict)
    """epoch → highest event_no in that epoch's spool, this epoch and those of killed proxies."""


class Activities(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Answer to `AskActivity`."""

    agents: dict[str, Activity]


class Closed(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Answer to `Close` and `StillClosed`: the gate is closed and nothing of this agent is on the host."""

    agent: str
    generation: int


class Busy(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Answer to `Close` and `StillClosed`: the gate stays (or was made) open, because of `reason`.

    The proxy now owes one `Quiet` for this agent.
    """

    agent: str
    generation: int
    reason: str


class Quiet(LinkMessage, tag=True, frozen=True, kw_only=True):
    """The agent the proxy called busy has become quiet (told once per `Busy`)."""

    agent: str


class Wake(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Ask. Something waits for this agent. Answer: `Open`, `Refused`."""

    agent: str
    cause: str


# --- daemon → proxy ----------------------------------------------------------------------------------------------


class AgentRow(LinkMessage, tag=True, frozen=True, kw_only=True):
    """All the proxy knows of an agent.

    `gate`: `open`, `closed` (being put to sleep or being started), `asleep`, `refused` (stopped, error, created).
    `model_digest`, `ingress_digest`: SHA-256 of the agent's two tokens, hex. `address`: where its port listens:
    `host:port`, `unix:PATH`, `vsock:UDS_PATH:PORT` (Firecracker's `CONNECT`), or what `dialled` says. `cid`: the
    AF_VSOCK context id its guest connects from. `cloud`: as its spec has it; `limits`: its own
    budgets. `why`: as in `Refused`.
    """

    id: str
    name: str
    generation: int
    gate: str
    status: str
    tier: Tier = Tier.MEDIUM
    tenant: str = "default"
    model: str | None = None
    model_digest: str = ""
    ingress_digest: str = ""
    address: str | None = None
    cid: int | None = None
    cloud: CloudUse | None = None
    limits: TokenLimits = NO_LIMITS
    why: str = ""


class DaemonTable(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Sent on every (re)connect, after Hello: every agent, the backend, its models, the marks of usage.

    `switching_to`: the backend's gate is closed, requests wait for at most `backend_wait_s`; empty: it is open.
    `runtime_settings`: as `RuntimeSettings` has them. `slots`: every slot of the pool. `cache_epochs`, `cache_fresh`:
    as `UseCacheEpochs` has them. `signed`, `adapters`: as they are told from then on.
    """

    agents: list[AgentRow]
    backend: BackendInfo | None
    models: list[ModelInfo]
    marks: dict[str, int]
    internal_digest: str = ""
    switching_to: str = ""
    backend_wait_s: float = 0.0
    runtime_settings: dict[str, str] = msgspec.field(default_factory=dict)
    slots: list[SlotRow] = msgspec.field(default_factory=list)
    cache_epochs: dict[str, int] = msgspec.field(default_factory=dict)
    cache_fresh: list[str] = msgspec.field(default_factory=list)
    signed: SignedLoads = SignedLoads()
    adapters: list[AdapterRoute] = msgspec.field(default_factory=list)


class AgentIs(LinkMessage, tag=True, frozen=True, kw_only=True):
    """This agent is now so (created, changed status, tier, tokens …). Moves the gate to `row.gate`."""

    row: AgentRow


class AgentGone(LinkMessage, tag=True, frozen=True, kw_only=True):
    """This agent was removed: answer parked requests with 503, close its connections, forget it."""

    agent: str


class Close(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Ask. Close the gate if nothing of this agent is on the host. Never waits. Answer: `Closed` or `Busy`."""

    agent: str
    generation: int


class StillClosed(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Ask. The same question once more after the freeze. Answer: `Closed` or `Busy`."""

    agent: str
    generation: int


class Asleep(LinkMessage, tag=True, frozen=True, kw_only=True):
    """The pause is committed: from now on a lost link does not open this gate."""

    agent: str
    generation: int


class Open(LinkMessage, tag=True, frozen=True, kw_only=True):
    """The agent runs: open its gate, let parked requests go on. Told, and the answer to `Wake`."""

    agent: str
    generation: int


class Refused(LinkMessage, tag=True, frozen=True, kw_only=True):
    """The agent will not be woken (it is stopped, failed …): parked requests get 503 naming `status`.

    Told, and the answer to `Wake`. `why`: how one that failed has ended, as far as its callers may know.
    """

    agent: str
    generation: int
    status: str
    why: str = ""


class AskActivity(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Ask. Answer: `Activities` of those named that the proxy knows, of all where none is."""

    agents: list[str] = msgspec.field(default_factory=list)


class BackendChanged(LinkMessage, tag="Backend", frozen=True, kw_only=True):
    """The active backend and what it offers changed."""

    backend: BackendInfo | None
    models: list[ModelInfo]


class CloseBackend(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Ask. No request goes to the backend from now on; new requests wait, for at most `wait_s` from now.

    Answer: `Drained`, once none is at the backend: those that have not ended within `drain_s` are cut. If the gate is
    closed already, the waits begin anew. `towards`: the backend that is switched to, or what a flush makes of it, in
    words.
    """

    towards: str
    drain_s: float
    wait_s: float


class Drained(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Answer to `CloseBackend`. `cut`: requests that did not end in time."""

    cut: int = 0


class OpenBackend(LinkMessage, tag=True, frozen=True, kw_only=True):
    """The backend's gate is open; this is the backend, and what it offers."""

    backend: BackendInfo | None
    models: list[ModelInfo]


class RuntimeSettings(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Settings changed while Hive runs, all of them: `section.key` → text."""

    values: dict[str, str]


class Marks(LinkMessage, tag=True, frozen=True, kw_only=True):
    """proxy epoch → highest event_no below which every usage event is committed to SQLite. It acknowledges a
    `UsageBatch`."""

    marks: dict[str, int]


class Leaving(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Hive is shutting down: ingress refuses from now on."""


AnyMessage = (
    Hello
    | Done
    | Failed
    | ProxyTable
    | Activities
    | Closed
    | Busy
    | Quiet
    | Wake
    | DaemonTable
    | AgentIs
    | AgentGone
    | Close
    | StillClosed
    | Asleep
    | Open
    | Refused
    | AskActivity
    | BackendChanged
    | CloseBackend
    | Drained
    | OpenBackend
    | Slots
    | SlotIs
    | SlotGone
    | AdaptersAre
    | DrainAdapter
    | AdapterDrained
    | LoadCharged
    | CloseSlotGate
    | SlotClosed
    | SlotBusy
    | SlotDemands
    | SlotFlows
    | SlotCrashed
    | CrashBlame
    | RunnerTokens
    | JobGrants
    | RunJob
    | StopJob
    | JobSaid
    | JobEnds
    | AskExecIn
    | ExecIn
    | EndExecIn
    | SignedLoads
    | RunnerCall
    | RunnerSaid
    | AskModels
    | AskQueue
    | QueueIs
    | AskTokensCome
    | TokensCome
    | AskMetrics
    | MetricsAre
    | AskTasks
    | TasksAre
    | CancelRequest
    | Prewarm
    | Prewarmed
    | KeepResponse
    | AskHistory
    | HistoryIs
    | AskResponse
    | AskInputItems
    | ResponseIs
    | DropResponse
    | AskBeginBackground
    | AskBackground
    | AskBackgroundEvents
    | BackgroundIs
    | BackgroundEventsAre
    | CancelBackground
    | DropBackground
    | UsageBatch
    | AskSpent
    | SpentIs
    | AgentsActive
    | RuntimeSettings
    | UseCacheEpochs
    | AskSlotOf
    | SlotOf
    | ParkedIs
    | ParkedOver
    | UseParked
    | Marks
    | Leaving
    | AskRuntimes
    | Runtimes
    | Define
    | Defined
    | Start
    | Started
    | Stop
    | Freeze
    | Frozen
    | Confirm
    | Thaw
    | Thawed
    | PageOut
    | PagedOut
    | AskStat
    | ProxyStats
    | AskTemplates
    | Templates
    | RestartTemplate
    | BackendStart
    | BackendStop
    | AskBackend
    | BackendIs
    | AskBackendLog
    | BackendLog
    | SlotStart
    | SlotPrepare
    | AskServerProgram
    | ServerProgramIs
    | SlotStop
    | LeaseExpect
    | LeaseEnd
    | LeaseForget
    | AskLeases
    | LeasesHeld
    | HolderMoved
    | SlotIsRunning
    | AskSlots
    | SlotsRunning
    | SlotMoved
    | AskSlotLog
    | Reconcile
    | Remove
    | Ended
    | ThawedAlone
    | AskListeners
    | Listener
    | ListenerGone
    | Dial
    | Dialled
    | Execute
    | Executing
    | EndExecution
    | Resize
    | Executed
    | Reaped
)
