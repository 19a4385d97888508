"""Every message shape between proxy, daemon and helper.

`ask` marks a message that is answered (with the type named in its docstring, or `Failed`); all others are told.
Generations only grow; a message with an older one is ignored. Times in seconds unless the name says otherwise.
"""

from __future__ import annotations

import msgspec

from hive.domain import BackendInfo, BackendKind, ModelInfo, RuntimeKind, Tier
from hive.link.execution import EndExecution, Execute, Executed, Executing, Resize
from hive.link.message import LinkMessage
from hive.link.pool import (
    CloseSlotGate,
    CrashBlame,
    SlotBusy,
    SlotClosed,
    SlotCrashed,
    SlotDemands,
    SlotFlows,
    SlotIs,
    SlotRow,
    Slots,
)
from hive.link.prompts import Prewarm, Prewarmed
from hive.link.requests import AskModels, AskQueue, CancelRequest, QueueIs
from hive.link.responses import (
    AskHistory,
    AskInputItems,
    AskResponse,
    DropResponse,
    HistoryIs,
    KeepResponse,
    ResponseIs,
)
from hive.link.slots import AskSlotLog, AskSlots, SlotIsRunning, SlotMoved, SlotsRunning, SlotStart, SlotStop
from hive.link.specs import RuntimeCapabilities, SandboxSpec
from hive.link.usage import AgentsActive, UsageBatch

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
    AF_VSOCK context id its guest connects from.
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


class DaemonTable(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Sent on every (re)connect, after Hello: every agent, the backend, its models, the marks of usage.

    `switching_to`: the backend's gate is closed, requests wait for at most `backend_wait_s`; empty: it is open.
    `runtime_settings`: as `RuntimeSettings` has them. `slots`: every slot of the pool.
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

    Told, and the answer to `Wake`.
    """

    agent: str
    generation: int
    status: str


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
    closed already, the waits begin anew. `towards`: the backend that is switched to, in words.
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


# --- daemon → helper ---------------------------------------------------------------------------------------------


class AskRuntimes(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Ask. Answer: `Runtimes`, looked at anew: an engine may come and go."""


class Runtimes(LinkMessage, tag=True, frozen=True, kw_only=True):
    runtimes: dict[RuntimeKind, RuntimeCapabilities]


class Define(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Ask. Store the spec, make the home, bind the agent's socket. Answer: `Defined`. Again: replaces the spec."""

    agent: str
    spec: SandboxSpec


class Defined(LinkMessage, tag=True, frozen=True, kw_only=True):
    socket: str


class Start(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Ask. Answer: `Started`; `wrong_state` where a process of it lives."""

    agent: str


class Started(LinkMessage, tag=True, frozen=True, kw_only=True):
    """`address`: where its port can be reached (as in `AgentRow`), empty for 127.0.0.1 or where it has none."""

    pid: int
    address: str = ""


class Stop(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Ask. Thaw, SIGTERM to the session, after `grace_s` SIGKILL to everything of it. Answer: `Ended`."""

    agent: str
    grace_s: float = 10.0


class Freeze(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Ask. Answer: `Frozen` once every process of it is stopped, else thawed again and `timeout`.

    Thawed again by the helper unless `Confirm` follows within 10 s.
    """

    agent: str
    generation: int


class Frozen(LinkMessage, tag=True, frozen=True, kw_only=True):
    took_ms: float
    how: str


class Confirm(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Ask. The pause is committed. Answer: `Done`, or `wrong_state` where the helper has thawed it already."""

    agent: str
    generation: int


class Thaw(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Ask. Answer: `Thawed` once verified. Thawing a running agent is `Thawed` too."""

    agent: str


class Thawed(LinkMessage, tag=True, frozen=True, kw_only=True):
    took_ms: float


class PageOut(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Ask. Page out the anonymous memory of an agent that is frozen and confirmed for this generation.

    Answer: `PagedOut`; a thaw that comes meanwhile ends it at once, and the answer is `wrong_state`.
    `not_supported` where this host or this helper may not, with the reason; `saturated` where swap has no room.
    """

    agent: str
    generation: int


class PagedOut(LinkMessage, tag=True, frozen=True, kw_only=True):
    """`kept_bytes`: RAM its processes hold still; `swap_bytes`: what of theirs is in swap now. `how`: `madvise` or
    `reclaim`."""

    took_ms: float
    kept_bytes: int
    swap_bytes: int
    how: str


class AskStat(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Ask. Answer: `ProxyStats` of the agents named, of all where none is."""

    agents: list[str] = msgspec.field(default_factory=list)


class Stat(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Ground truth of one agent.

    `state`: `running`, `frozen`, `gone`. `cpu_us`: CPU time used since start by all its processes (frozen does not
    move). `exit_code`, `why`: of the last end, as in `Ended`. `swap_bytes`: of its memory in swap. `address`: as in
    `Started`. `limits`: the limits that are not enforced here, in words; empty where all are.
    """

    state: str
    pid: int | None = None
    cpu_us: int = 0
    rss_bytes: int = 0
    processes: int = 0
    swap_bytes: int = 0
    exit_code: int | None = None
    why: str = ""
    freezer: str = ""
    address: str = ""
    limits: str = ""


class ProxyStats(LinkMessage, tag="Stats", frozen=True, kw_only=True):
    agents: dict[str, Stat]


class BackendStart(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Ask. Start the service of this kind of inference server, one of three; those that conflict with it stop first.

    Answer: `Done` once it is running, also where it was. It need not answer yet.
    """

    kind: BackendKind


class BackendStop(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Ask. SIGTERM to the service, after `grace_s` SIGKILL to all of it. Answer: `Done` once nothing of it is left."""

    kind: BackendKind
    grace_s: float = 10.0


class AskBackend(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Ask. Answer: `BackendIs`."""

    kind: BackendKind


class BackendIs(LinkMessage, tag=True, frozen=True, kw_only=True):
    """A service as systemd shows it: `state` and `substate` in systemd's words, `missing` where there is no such unit.

    `result`: how it ended last (`success`, `exit-code`, `oom-kill`, …). `active_s`: for how long it has been up, None
    where it is not. `restarts`: by systemd, since it was started. `pids`: all of its processes; `bytes`: anonymous and
    shared memory of the host they hold, None where unknown.
    """

    unit: str
    state: str
    substate: str = ""
    result: str = ""
    pid: int = 0
    active_s: float | None = None
    restarts: int = 0
    pids: list[int] = msgspec.field(default_factory=list)
    bytes: int | None = None


class AskBackendLog(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Ask. The last lines the service wrote to the journal, those since its last start where `last_run`,
    unless systemd has restarted it by itself.

    Answer: `BackendLog`.
    """

    kind: BackendKind
    lines: int
    last_run: bool = False


class BackendLog(LinkMessage, tag=True, frozen=True, kw_only=True):
    text: str


class Reconcile(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Ask; on every (re)connect of the daemon. `asleep`: id → generation of all it holds asleep.

    Those frozen are confirmed, every other frozen agent is thawed. Answer: `ProxyStats` of all, the ground truth.
    """

    asleep: dict[str, int]


class Remove(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Ask. Kill what lives, unlink the socket, delete the home, forget. Answer: `Done`."""

    agent: str


# --- helper → daemon ---------------------------------------------------------------------------------------------


WENT_DOWN = "Hive went down"
"""`Ended.why` where `hive up` had it stopped because it ends itself, without a daemon that could."""


class Ended(LinkMessage, tag=True, frozen=True, kw_only=True):
    """An agent's main process ended. `exit_code` as a shell counts (128 + signal), None if Hive did not reap it.

    `why`: more about the end, in words; mostly empty.
    """

    agent: str
    exit_code: int | None
    pid: int = 0
    why: str = ""


class ThawedAlone(LinkMessage, tag=True, frozen=True, kw_only=True):
    """The helper thawed this agent by itself (no confirm in time, or it is leaving)."""

    agent: str
    reason: str


# --- proxy ↔ helper, up → helper ---------------------------------------------------------------------------------


class AskListeners(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Ask. Answer: `Done` after one `Listener` (with its descriptor) per agent; later ones follow as told."""


class Listener(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Carries one listening descriptor: every connection to it is this agent's.

    `path`: of its own AF_UNIX socket, or `inner:HOST:PORT` for a TCP one made inside its own network namespace. An
    agent has one of each path; another one of the same path takes its place.
    """

    agent: str
    path: str


class ListenerGone(LinkMessage, tag=True, frozen=True, kw_only=True):
    """This listener of the agent is closed; with an empty `path` all of them."""

    agent: str
    path: str = ""


class Dial(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Ask, of the proxy. Connect to the port of this agent, which only the helper gets to: it is in a network of its
    own, or behind a VMM in a jail. Where that is only the helper knows. Answer: `Dialled`; `not_found`; `wrong_state`
    where the agent does not run, sleeps or has no such port; `saturated` where too many wait for it already;
    `backend_unavailable` or `backend_timeout` where it does not accept.
    """

    agent: str


class Dialled(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Carries one connected descriptor: to the agent itself, or to its VMM, which waits for a `CONNECT`."""


def dialled(agent: str, guest_port: int | None = None) -> str:
    """The address of an agent's port that the proxy has to `Dial`; `guest_port`: the one to ask its VMM for.

    >>> dialled("a1"), dialled("a1", 8080)
    ('helper:/a1', 'helper:/a1:8080')
    """
    return f"helper:/{agent}" if guest_port is None else f"helper:/{agent}:{guest_port}"


class Reaped(LinkMessage, tag=True, frozen=True, kw_only=True):
    """`hive up`, being the sub-reaper, reaped a process the helper started in an earlier life."""

    pid: int
    exit_code: int


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
    | CloseSlotGate
    | SlotClosed
    | SlotBusy
    | SlotDemands
    | SlotFlows
    | SlotCrashed
    | CrashBlame
    | AskModels
    | AskQueue
    | QueueIs
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
    | UsageBatch
    | AgentsActive
    | RuntimeSettings
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
    | BackendStart
    | BackendStop
    | AskBackend
    | BackendIs
    | AskBackendLog
    | BackendLog
    | SlotStart
    | SlotStop
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
