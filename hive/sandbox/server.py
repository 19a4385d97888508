"""`hive sandbox`, the helper: starts, stops, freezes and thaws agents, and owns their sockets.

It decides nothing: the daemon says what, the kernel says what is. Agents are in sessions and cgroups of their own
and outlive it; the next helper adopts them. An agent left frozen by a killed helper is found by the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import secrets
import signal
import socket
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

import uvloop

from hive.domain import RuntimeKind
from hive.errors import BadRequest, HiveError, NotFound, NotPermitted, NotSupported, WrongState
from hive.holders import lease_holders
from hive.holders.group_places import GroupPlaces, ScopePlaces
from hive.holders.hold import HolderPlaces
from hive.holders.lease_holders import LeaseHolders
from hive.host import accounts, parent, systemd
from hive.host.accounts import Accounts
from hive.host.cgroup import Subtree, own_cgroup, state_label
from hive.host.loop_lag import watched
from hive.host.notify import Notifier
from hive.host.process import ProcessTable, identify, raise_descriptor_limit
from hive.link.execution import EndExecution, Execute, Resize
from hive.link.helper import (
    WENT_DOWN,
    AskListeners,
    AskRuntimes,
    AskStat,
    BackendStart,
    BackendStop,
    Confirm,
    Define,
    Defined,
    Dial,
    Dialled,
    Ended,
    Freeze,
    PageOut,
    ProxyStats,
    Reaped,
    Reconcile,
    Remove,
    RestartTemplate,
    Runtimes,
    Start,
    Stat,
    Stop,
    Thaw,
    ThawedAlone,
)
from hive.link.leases import HolderMoved, LeaseHolder
from hive.link.link import Link, LinkReply, failed
from hive.link.message import LinkMessage
from hive.link.messages import PROTOCOL, Done, Hello
from hive.link.server import LinkServer
from hive.link.slots import AskServerProgram, SlotMoved, SlotProcess
from hive.runtimes.docker import DockerRuntime
from hive.runtimes.entering import RUN_ID, RUN_MARK, left_by_others
from hive.runtimes.firecracker import FirecrackerRuntime
from hive.runtimes.process import ProcessRuntime, log_pipes_of
from hive.runtimes.runtime import Runtime
from hive.runtimes.templates import TemplateTable
from hive.runtimes.unit import UnitRuntime
from hive.sandbox import template_verbs
from hive.sandbox.allowed import Allowed
from hive.sandbox.audit import AGENT_ID, Audit, LinkPeer
from hive.sandbox.executions import Handed
from hive.sandbox.lease_sessions import SessionPlaces
from hive.sandbox.listeners import Listeners, clear_directory
from hive.sandbox.slot_sessions import SlotSessions
from hive.sandbox.supervised_agent import FreezeLimits, SupervisedAgent
from hive.sandbox.table import AgentRecords
from hive.settings.table import Paths, Settings
from hive.slots import inference_units, model_slots, server_programs
from hive.slots.model_slots import ModelSlots, described
from hive.slots.slot_units import SlotUnits
from hive.tasks import spawn

log = logging.getLogger("hive.sandbox")

ROLE = "sandbox"
LOCK_WAIT_S = 5.0
"""A leaving helper thaws its agents first; the next one waits this long for it."""
STATS_AT_ONCE = 50
MEASURED_AT_ONCE = 4
"""Agents without a memory controller whose memory one question walks: some milliseconds each."""
"""Agents looked at before others have their turn: some 3 ms."""

_AGENTS: frozenset[type[LinkMessage]] = frozenset(
    {Define, Start, Stop, Freeze, Confirm, Thaw, PageOut, AskStat, AskRuntimes, Reconcile, Remove}
)
_PROGRAMS: frozenset[type[LinkMessage]] = frozenset({Execute, EndExecution, Resize})
MAY_ASK: dict[str, frozenset[type[LinkMessage]]] = {
    "daemon": _AGENTS
    | _PROGRAMS
    | inference_units.VERBS
    | model_slots.VERBS
    | server_programs.VERBS
    | lease_holders.VERBS
    | template_verbs.VERBS,
    "proxy": frozenset({AskListeners, Dial}),
    "up": _AGENTS | frozenset({Reaped}) | model_slots.ENDING,
}
"""The requests permitted to each role; `HelperServer._may_be` says which user may have which role."""

Later = LinkMessage | Handed | socket.socket
Answer = LinkMessage | Coroutine[Any, Any, Later]
"""A socket goes with `Dialled`."""


class HelperServer:
    """Everything of one helper; `open` begins, `leave` ends with every agent awake and alive."""

    def __init__(
        self,
        paths: Paths,
        runtimes: Mapping[RuntimeKind, Runtime],
        *,
        limits: FreezeLimits | None = None,
        allowed: Allowed | None = None,
        audit: Audit | None = None,
        peers: Accounts | None = None,
        slots: ModelSlots | None = None,
        leases: LeaseHolders | None = None,
        templates: TemplateTable | None = None,
    ) -> None:
        """`peers`: the users of daemon and proxy; without it both are this user. `slots`, `leases`, `templates`: None
        where it has none."""
        self._paths = paths
        self._runtimes = runtimes
        self._accounts = peers or accounts.own()
        self._limits = limits or FreezeLimits()
        self._allowed = allowed or Allowed(None)
        self._audit = audit or Audit()
        self._slots = slots
        self._leases = leases
        self._templates = templates
        self._epoch = secrets.token_hex(8)
        self._label = state_label(paths.state)
        self._peers: dict[Link, LinkPeer] = {}
        self._held: dict[str, SupervisedAgent] = {}
        self._listeners = Listeners()
        self._lock_fd = -1
        self.left = False
        self._table: AgentRecords
        self._server: LinkServer
        self._log_check: asyncio.Task[None]

    def __repr__(self) -> str:
        return f"<HelperServer {len(self._held)} agents, {sorted(peer.role for peer in self._peers.values())}>"

    async def open(self) -> None:
        """Takes the state directory, adopts what lives, binds the agents' sockets, then listens.

        Raises WrongState where another helper has the directory, NotPermitted where it is not Hive's, ConfigError.
        """
        make_directories(self._paths)
        self._lock_fd = await _take_lock(self._paths.sandbox_lock)
        self._table = AgentRecords.load(self._paths.sandbox_table)
        await self._adopt()
        if self._slots is not None:
            await self._slots.open(self._tell_slot)
        if self._leases is not None:
            await self._leases.open(self._tell_holder, self._audit.entered)
        self._server = LinkServer(
            self._paths.sandbox_socket,
            name=ROLE,
            uids=frozenset({os.geteuid(), self._accounts.daemon, self._accounts.proxy}),
            on_link=self._greet,
            on_message=self._on_message,
            on_lost=self._on_lost,
            group=self._accounts.services,
        )
        self._log_check = spawn(self._trim_logs(), name="trim logs")
        spawn(self._end_left_programs(), name="end left programs")

    async def _adopt(self) -> None:
        records = self._table.records
        keep = {self._paths.agent_socket(agent) for agent in records}
        clear_directory(self._paths.agent_socket("any").parent, keep)
        snapshot = ProcessTable()
        for agent in records:
            self._hold(agent).bind()
        await asyncio.gather(*(held.adopt(snapshot) for held in self._held.values()))
        for kind, runtime in self._runtimes.items():
            try:
                for stray in await runtime.thaw_strays(set(records)):
                    log.warning("unknown_agent_thawed agent=%s", stray)
            except (HiveError, OSError) as error:
                log.error("strays_not_looked_for runtime=%s error=%s", kind, error)

    def _hold(self, agent: str) -> SupervisedAgent:
        held = SupervisedAgent(
            agent,
            runtimes=self._runtimes,
            table=self._table,
            listeners=self._listeners,
            limits=self._limits,
            permit=self._allowed.permit,
            on_ended=self._tell_daemons,
            on_thawed_alone=lambda agent, reason: self._tell_daemons(ThawedAlone(agent=agent, reason=reason)),
        )
        self._held[agent] = held
        return held

    async def leave(self, *, for_another: bool = False) -> None:
        """Thaws every agent, verified, and closes the sockets; agents go on running.

        `for_another`: for a helper that begins at once, and finds the sleepers asleep (an upgrade, a restart).
        """
        self.left = True
        if self._slots is not None:
            await self._slots.end_waiting()

        async def let_go(held: SupervisedAgent) -> None:
            if not (for_another and await held.stays_asleep()):
                await held.thaw_alone("the helper is leaving")

        await asyncio.gather(*(held.end_executions(None) for held in self._held.values()))
        await asyncio.gather(*(let_go(held) for held in self._held.values()))
        self._log_check.cancel()
        self._server.close()
        if self._slots is not None:
            self._slots.close()
        if self._leases is not None:
            self._leases.close()
        if self._templates is not None:
            await self._templates.leave()
        self._listeners.close()
        for held in self._held.values():
            held.release()
        self._audit.close()
        os.close(self._lock_fd)

    def what_is_wrong(self) -> str:
        """The reason for its watchdog to end the process, empty where all is well. Once it is open."""
        return "" if self.left or self._server.is_listening else "its socket takes nobody"

    def reload(self) -> None:
        """Reads the policy anew, for every start from now on; what runs goes on. A wrong one changes nothing."""
        try:
            self._allowed.reload()
        except HiveError as error:
            log.error("policy_not_reloaded error=%s hint=%s", error.message, error.hint)
        else:
            log.info("policy_reloaded policy=%r", self._allowed)

    # --- links ---------------------------------------------------------------------------------------------------

    def _greet(self, link: Link) -> None:
        link.tell(Hello(role=ROLE, epoch=self._epoch, pid=os.getpid()))

    def _on_lost(self, link: Link) -> None:
        self._peers.pop(link, None)
        self._listeners.unfollow(link)
        for held in self._held.values():
            spawn(held.end_executions(link), name="end programs")

    def _tell_daemons(self, message: LinkMessage, *, but: Link | None = None) -> None:
        for link, peer in self._peers.items():
            if peer.role == "daemon" and link is not but:
                link.tell(message)

    def _tell_slot(self, process: SlotProcess) -> bool:
        self._tell_daemons(SlotMoved(process=process))
        return any(peer.role == "daemon" for peer in self._peers.values())

    def _tell_holder(self, holder: LeaseHolder) -> None:
        self._tell_daemons(HolderMoved(holder=holder))

    def _on_message(self, link: Link, message: LinkMessage, reply: LinkReply | None) -> None:
        answer = self._audit.noted(message, self._name_in(message), self._peer(link), reply or _drop)
        try:
            outcome = self._do(link, message)
        except HiveError as error:
            answer(failed(error))
            return
        except Exception as error:
            answer(failed(HiveError(f"{type(error).__name__}: {error}")))
            raise
        if isinstance(outcome, LinkMessage):
            answer(outcome)
        else:
            spawn(_answer_later(outcome, answer), name=type(message).__name__)

    def _name_in(self, message: LinkMessage) -> str:
        """The name of the agent (or the inference server) this is about; `-` for none, or none that is known."""
        if isinstance(message, Define):
            return message.spec.name
        if isinstance(message, BackendStart | BackendStop):
            return str(message.kind)
        if type(message) in model_slots.VERBS:
            return model_slots.id_in(message)
        if type(message) in lease_holders.VERBS:
            return lease_holders.id_in_lease(message)
        if isinstance(message, RestartTemplate):
            return message.name
        record = self._table.records.get(getattr(message, "agent", ""))
        return "-" if record is None else record.spec.name

    def _peer(self, link: Link) -> LinkPeer:
        return self._peers.get(link) or LinkPeer.of(link, "nobody")

    def _do(self, link: Link, message: LinkMessage) -> Answer:
        """The answer, or the work that makes it. Thaw and Confirm are done on return: a wake waits for no task."""
        if isinstance(message, Hello):
            return self._hello(link, message)
        role = self._peer(link).role
        if type(message) not in MAY_ASK.get(role, ()):
            raise NotPermitted(f"{role} may not ask {type(message).__name__}")
        if type(message) in inference_units.VERBS:
            return inference_units.do(message)
        if type(message) in model_slots.VERBS:
            if self._slots is None:
                raise NotSupported("this helper runs no models")
            return self._slots.do(message, for_daemon=role == "daemon")
        if type(message) in lease_holders.VERBS:
            if self._leases is None:
                raise NotSupported("this helper lets no lease's holder in")
            return self._leases.do(message)
        if type(message) in template_verbs.VERBS:
            return template_verbs.do(self._templates, message, self._forked())
        match message:
            case AskServerProgram():
                return server_programs.do(message)
            case Thaw():
                return self._find(message.agent).thaw()
            case Confirm():
                return self._find(message.agent).confirm(message.generation)
            case Freeze():
                return self._find(message.agent).freeze(message.generation)
            case PageOut():
                return self._find(message.agent).page_out(message.generation)
            case AskStat():
                return self._stats(message.agents, pss=message.pss)
            case AskRuntimes():
                return self._capabilities()
            case Reconcile():
                return self._reconcile(message.asleep)
            case Define():
                return self._define(message)
            case Start():
                return self._find(message.agent).start()
            case Stop():
                return self._stop(message, link)
            case Remove():
                return self._remove(message.agent)
            case AskListeners():
                self._listeners.follow(link)
                return Done()
            case Dial():
                return self._find(message.agent).dial()
            case Execute():
                return self._execute(message, link)
            case EndExecution():
                return self._end_execution(message.run)
            case Resize():
                return self._resize(message)
            case Reaped():
                for held in self._held.values():
                    held.reaped(message.pid, message.exit_code)
                if self._slots is not None:
                    self._slots.reaped(message.pid, message.exit_code)
                return Done()
        raise BadRequest(f"{type(message).__name__} is not for the helper")

    def _hello(self, link: Link, message: Hello) -> LinkMessage:
        peer = LinkPeer.of(link, message.role)
        if message.protocol != PROTOCOL or peer.uid not in self._may_be(message.role):
            log.error(
                "peer_refused role=%s protocol=%d pid=%d uid=%d", message.role, message.protocol, peer.pid, peer.uid
            )
            link.close()
        else:
            self._peers[link] = peer
        return Done()

    def _may_be(self, role: str) -> frozenset[int]:
        """The uids that may have this role: a proxy that was taken over must not pass for the daemon."""
        match role:
            case "daemon":
                return frozenset({0, self._accounts.daemon})
            case "proxy":
                return frozenset({0, self._accounts.proxy})
            case "up":
                return frozenset({0, os.geteuid()})
        return frozenset()

    def _forked(self) -> dict[str, str]:
        """The running agents that were forked, and from which process of which template."""
        return {agent: held.template for agent, held in self._held.items() if held.template}

    def _find(self, agent: str) -> SupervisedAgent:
        if (held := self._held.get(agent)) is None:
            raise NotFound(f"agent {agent} is not defined")
        return held

    # --- verbs ---------------------------------------------------------------------------------------------------

    async def _define(self, message: Define) -> Defined:
        agent = message.agent
        if AGENT_ID.fullmatch(agent) is None:
            raise BadRequest(f"{agent!r} is no agent id")
        held = self._held.get(agent) or self._hold(agent)
        try:
            place = await held.define(message.spec)
        except HiveError:
            if agent not in self._table.records:
                self._forget(agent)
            raise
        return Defined(socket=str(place.path))

    async def _stop(self, message: Stop, link: Link) -> Ended:
        why = WENT_DOWN if self._peer(link).role == "up" else ""
        ended = await self._find(message.agent).stop(grace_s=message.grace_s, why=why)
        self._tell_daemons(ended, but=link)
        return ended

    async def _remove(self, agent: str) -> Done:
        """An agent that is not there is removed already."""
        if (held := self._held.get(agent)) is not None:
            await held.remove()
            self._forget(agent)
        return Done()

    def _execute(self, message: Execute, link: Link) -> Coroutine[Any, Any, Handed]:
        if RUN_ID.fullmatch(message.run) is None:
            raise BadRequest(f"{message.run!r} is no name of a program")
        mark = f"{RUN_MARK}={self._label}.{self._epoch}.{message.run}"
        return self._find(message.agent).execute(message, link, mark)

    async def _end_execution(self, run: str) -> Done:
        """One that is not there has ended already."""
        for held in list(self._held.values()):
            if await held.end_execution(run):
                break
        return Done()

    async def _resize(self, message: Resize) -> Done:
        for held in self._held.values():
            if held.has_execution(message.run):
                await held.resize(message.run, message.rows, message.columns)
        return Done()

    async def _end_left_programs(self) -> None:
        """Ends the programs begun by a helper that was killed: their callers are gone."""
        environments = await asyncio.to_thread(lambda: ProcessTable().environments)
        for pid in left_by_others(environments, self._label, self._epoch):
            if (who := identify(pid)) is not None and who.send(signal.SIGKILL):
                log.warning("left_program_killed pid=%d", pid)

    def _forget(self, agent: str) -> None:
        self._listeners.drop(agent)
        self._held.pop(agent, None)

    async def _stats(self, agents: list[str], *, pss: bool = False) -> ProxyStats:
        """Stats of the agents named, of all where none is. A thousand take 50 ms: a thaw does not wait for them.

        Where a list shows PSS, the oldest `MEASURED_AT_ONCE` are measured anew first; with `pss`, all that are named.
        """
        asked = [held for agent in agents or list(self._held) if (held := self._held.get(agent)) is not None]
        if not pss:
            ages = {held: age for held in asked if (age := held.pss_age_s()) > 0}
            asked = sorted(ages, key=ages.__getitem__, reverse=True)[:MEASURED_AT_ONCE]
        await asyncio.gather(*(held.measure_pss() for held in asked))
        snapshot, found = ProcessTable(), dict[str, Stat]()
        for looked_at, agent in enumerate(agents or list(self._held), 1):
            if (held := self._held.get(agent)) is not None:
                found[agent] = held.stat(snapshot)
            if looked_at % STATS_AT_ONCE == 0:
                await asyncio.sleep(0)
        return ProxyStats(agents=found)

    async def _capabilities(self) -> Runtimes:
        found = await asyncio.gather(*(runtime.capabilities() for runtime in self._runtimes.values()))
        return Runtimes(runtimes=dict(zip(self._runtimes, found, strict=True)))

    async def _reconcile(self, asleep: dict[str, int]) -> ProxyStats:
        """All at once: one agent that will not thaw keeps no other asleep."""
        await asyncio.gather(*(held.reconcile(asleep.get(agent)) for agent, held in self._held.items()))
        return await self._stats([])

    async def _trim_logs(self) -> None:
        while True:
            await asyncio.sleep(self._limits.log_check_s)
            for held in list(self._held.values()):
                try:
                    held.trim_log()
                except OSError as error:
                    log.error("log_not_trimmed agent=%s error=%s", held.agent, error)
            with contextlib.suppress(OSError):  # a full disk: that it is not written was said already
                self._audit.trim()


def _drop(message: LinkMessage, descriptors: Sequence[int] = ()) -> None:
    """The answer to what was told, not asked."""


async def _answer_later(work: Coroutine[Any, Any, Later], answer: LinkReply) -> None:
    try:
        outcome = await work
    except HiveError as error:
        answer(failed(error))
    except Exception as error:
        answer(failed(HiveError(f"{type(error).__name__}: {error}")))
        raise
    else:
        if isinstance(outcome, LinkMessage):
            answer(outcome)
        elif isinstance(outcome, Handed):
            answer(outcome.message, outcome.descriptors)
            outcome.close()
        else:
            with outcome:
                answer(Dialled(), [outcome.fileno()])


# --- the program -------------------------------------------------------------------------------------------------


def make_directories(paths: Paths) -> None:
    """The directories the helper uses: agents pass through 0711 ones to what is theirs.

    Logs are Hive's alone, or where it is installed also its daemon's to read: their directory was made before, with the
    daemon's group (tmpfiles.d). Raises NotPermitted where one is a link, belongs to somebody else or cannot be made.
    """
    for path, mode in (
        (paths.state, 0o711),
        (paths.runtime, 0o711),
        (paths.agent_socket("any").parent, 0o711),
        (paths.home("any").parent, 0o711),
        (paths.sandbox_table.parent, 0o700),
        (paths.log("any").parent, 0o750 if paths.apart else 0o700),
    ):
        try:
            path.mkdir(mode=mode, parents=True, exist_ok=True)
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise NotPermitted(f"cannot use {path}: {error.strerror}") from error
        try:
            if os.fstat(fd).st_uid != os.geteuid():
                raise NotPermitted(f"{path} belongs to uid {os.fstat(fd).st_uid}, not to {os.geteuid()}")
            if path not in (paths.state, paths.runtime):
                os.fchmod(fd, mode)
        finally:
            os.close(fd)


async def _take_lock(path: Path) -> int:
    """Two helpers on one state directory would undo each other's pauses."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    until = asyncio.get_running_loop().time() + LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if asyncio.get_running_loop().time() > until:
                os.close(fd)
                raise WrongState(
                    f"another helper uses {path.parent}", hint="stop that Hive, or use another --state-dir"
                ) from None
            await asyncio.sleep(0.02)
        else:
            return fd


async def _serve(
    paths: Paths, settings: Settings, notifier: Notifier, watch_fd: int | None, config: Path | None
) -> None:
    left = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, left.set)
    make_directories(paths)
    subtree = Subtree.find(paths.state)
    log_max_bytes = settings.agents.log_max_bytes
    pipes = log_pipes_of(paths, log_max_bytes)  # one reader for all
    process = ProcessRuntime(paths, subtree=subtree, log_max_bytes=log_max_bytes, pipes=pipes)
    units = UnitRuntime(paths, settings.sandbox, log_max_bytes=log_max_bytes)
    # A service of systemd makes its agents units of systemd; `hive up` is gone when its terminal is.
    as_units = watch_fd is None and not (await units.capabilities()).why_not
    runtimes: dict[RuntimeKind, Runtime] = {
        RuntimeKind.PROCESS: units if as_units else process,
        RuntimeKind.DOCKER: DockerRuntime(paths, settings.sandbox, log_max_bytes=log_max_bytes),
        RuntimeKind.FIRECRACKER: FirecrackerRuntime(paths, settings.sandbox, log_max_bytes=log_max_bytes, pipes=pipes),
    }
    policy = Path(settings.sandbox.policy) if settings.sandbox.policy else None
    # Under `hive up` stderr is somebody's terminal: a line for every pause and wake would flood it.
    audit = Audit(None if watch_fd is None else paths.log("sandbox-audit"))
    peers = accounts.appliance() if paths.apart else accounts.own()
    by_systemd = as_units and paths.apart
    starter = SlotUnits(paths) if by_systemd else SlotSessions(paths, pipes, subtree=subtree, config=config)
    slots = ModelSlots(paths, starter, lambda: described(paths, config))
    services = frozenset({peers.daemon, peers.proxy}) if paths.apart else frozenset[int]()
    ways = places_of_leases(paths, subtree, by_systemd=by_systemd)
    leases = LeaseHolders(paths, ways, group=peers.operators, services=services)
    allowed = Allowed(policy, own_networks=as_units)
    templates = (units if as_units else process).templates
    helper = HelperServer(
        paths, runtimes, allowed=allowed, audit=audit, peers=peers, slots=slots, leases=leases, templates=templates
    )  # fmt: skip
    await helper.open()
    loop.add_signal_handler(signal.SIGHUP, helper.reload)
    frozen_by = "systemd units" if as_units else subtree.path if subtree else "signals"
    log.info("sandbox_ready agents_frozen_by=%s limits=%r policy=%s", frozen_by, process.limits or "enforced", policy)
    if watch_fd is not None:
        parent.watch(watch_fd, left.set)
        parent.die_with_parent(signal.SIGTERM)
    with watched(notifier, helper.what_is_wrong):
        notifier.ready("serving")
        await left.wait()
        notifier.stopping()
        await helper.leave(for_another=watch_fd is None and await _is_restarted())
    process.leave()
    log.info("sandbox_left")


def places_of_leases(paths: Paths, subtree: Subtree | None, *, by_systemd: bool) -> list[HolderPlaces]:
    """The ways to hold a lease's processes here, the best first. An installed Hive has scopes of systemd alone."""
    if by_systemd:
        return [ScopePlaces()]
    groups = [] if subtree is None else [GroupPlaces(subtree, state_label(paths.state))]
    return [*groups, SessionPlaces()]


async def _is_restarted() -> bool:
    """Whether systemd ends this service only to start it again. Where that cannot be told it may be the end."""
    unit = _own_unit()
    if not unit.endswith(".service") or not systemd.is_booted():
        return False
    try:
        return await systemd.is_being_restarted(unit)
    except HiveError as error:
        log.warning("restart_not_told_from_stop error=%s", error)
        return False


def _own_unit() -> str:
    """The systemd unit this process is in, or something else where systemd did not start it."""
    return own_cgroup(Path("/proc/self/cgroup").read_text()).rpartition("/")[2]


def main(paths: Paths, settings: Settings, watch_fd: int | None, config: Path | None = None) -> None:
    """Runs the helper until SIGTERM, SIGINT, or the end of the process that holds the other end of `watch_fd`.

    `config`: the file of `settings`; None for /etc/hive/hive.conf.
    """
    raise_descriptor_limit()
    notifier = Notifier(os.environ, pid=os.getpid())
    uvloop.run(_serve(paths, settings, notifier, watch_fd, config))
