"""Messages of the helper's links: with the daemon, with the proxy, and with `hive up`.

Those marked `Ask` are answered, as in messages.py. Generations only grow; a message with an older one is ignored.
"""

from __future__ import annotations

import msgspec

from hive.domain import BackendKind, RuntimeKind
from hive.link.message import LinkMessage
from hive.link.specs import RuntimeCapabilities, SandboxSpec

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
    """`kept_bytes`: RAM it holds still, the swap cache counted, as `Stat.held_bytes` would say; `swap_bytes`: what of
    its memory is in swap now. `how`: `madvise` or `reclaim`. `working_set_bytes`: what it used of its memory between
    two sleeps, the larger of the last two figures; None where that is not known yet.
    """

    took_ms: float
    kept_bytes: int
    swap_bytes: int
    how: str
    working_set_bytes: int | None = None


class AskStat(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Ask. Answer: `ProxyStats` of the agents named, of all where none is.

    `pss`: take the PSS of those named first, which walks all of their memory: for one agent, not for a list.
    """

    agents: list[str] = msgspec.field(default_factory=list)
    pss: bool = False


class Stat(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Ground truth of one agent.

    `held_bytes`: RAM it holds, None where that is not known. `held_from`: `cgroup` (what its control group is charged
    with now, the swap cache counted, unused files not) or `pss` (its processes' PSS, measured at `held_at`, Unix
    seconds). `swap_cached_bytes`: the part of a charge that has a copy in swap and goes as soon as somebody needs
    room. `pss_bytes`, `pss_at`: the last PSS. `working_set_bytes`: as in `PagedOut`. `rss_bytes`: a sum of RSS, shared
    pages in each process anew: to decide by, never to be shown.

    `state`: `running`, `frozen`, `gone`. `cpu_us`: CPU time used since start by all its processes (frozen does not
    move). `exit_code`, `why`: of the last end, as in `Ended`. `swap_bytes`: of its memory in swap. `address`: as in
    `Started`. `limits`: the limits that are not enforced here, in words; empty where all are. `template_note`: why a
    running agent that names a template was not forked from it, a clause; empty where it was, or names none.
    """

    state: str
    pid: int | None = None
    cpu_us: int = 0
    rss_bytes: int = 0
    held_bytes: int | None = None
    held_from: str = ""
    held_at: float | None = None
    swap_cached_bytes: int | None = None
    pss_bytes: int | None = None
    pss_at: float | None = None
    working_set_bytes: int | None = None
    processes: int = 0
    swap_bytes: int = 0
    exit_code: int | None = None
    why: str = ""
    freezer: str = ""
    address: str = ""
    limits: str = ""
    template_note: str = ""


class ProxyStats(LinkMessage, tag="Stats", frozen=True, kw_only=True):
    agents: dict[str, Stat]


class AskTemplates(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Ask. Answer: `Templates`: those that this helper has started or tried to."""


class TemplateStat(LinkMessage, tag=True, frozen=True, kw_only=True):
    """One template as the helper sees it.

    `state`: `starting`, `ready`, `failed`, `ended`. `why`: a sentence where its agents are ordinary programs, else
    empty. `since`: Unix seconds of its start. `agents`: ids of the running agents forked from it or from an older
    process of the same name; `older`: those of an older one. `held_bytes`: RAM charged to it, or its own;
    `shared_bytes`: of that, what its agents share. `packages_at`: Unix seconds of the youngest change among its
    packages when it started; `is_stale`: whether a package changed since.
    """

    state: str
    pid: int | None = None
    why: str = ""
    since: float = 0.0
    agents: tuple[str, ...] = ()
    older: tuple[str, ...] = ()
    held_bytes: int = 0
    shared_bytes: int = 0
    packages_at: float = 0.0
    is_stale: bool = False


class Templates(LinkMessage, tag=True, frozen=True, kw_only=True):
    templates: dict[str, TemplateStat]


class RestartTemplate(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Ask. A new process for new agents; the old one's agents stay. Answer: `Templates` with this one alone."""

    name: str


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
