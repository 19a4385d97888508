"""The proxy's links to the daemon and the helper, and the registry they fill."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping
from functools import partial

from hive.domain import AgentStatus, WakeCause
from hive.errors import DependencyDown, HiveError, NotFound
from hive.link.adapters import AdaptersAre, DrainAdapter
from hive.link.cache import UseCacheEpochs
from hive.link.client import LinkClient
from hive.link.figures import AskMetrics
from hive.link.helper import AskListeners, Dial, Dialled, ListenerGone
from hive.link.helper import Listener as ListenerIs
from hive.link.jobs import JobGrants
from hive.link.link import Link, LinkReply, failed
from hive.link.message import LinkMessage
from hive.link.messages import (
    Activities,
    AgentGone,
    AgentIs,
    AskActivity,
    Asleep,
    BackendChanged,
    Busy,
    Close,
    CloseBackend,
    Closed,
    DaemonTable,
    Done,
    Hello,
    Leaving,
    Marks,
    Open,
    OpenBackend,
    ProxyTable,
    Quiet,
    Refused,
    RuntimeSettings,
    StillClosed,
    Wake,
)
from hive.link.parking import UNPARK_S, AskSlotOf, ParkedIs, ParkedOver, UseParked
from hive.link.pool import CloseSlotGate, LoadCharged, SlotCrashed, SlotGone, SlotIs, Slots
from hive.link.prompts import Prewarm
from hive.link.requests import AskModels, AskQueue, AskTokensCome, CancelRequest, TokensCome
from hive.link.runner import RunnerTokens
from hive.link.signed_loads import SignedLoads
from hive.link.tasks import AskTasks
from hive.link.usage import AgentsActive, AskSpent, SpentIs
from hive.metering.usage_spool import UsageSpool
from hive.models.cache_epochs import CacheEpochs
from hive.proxy.adapter_drains import AdapterDrains
from hive.proxy.api_wake import ApiWake, ToldAgent
from hive.proxy.background_responses import BackgroundSource
from hive.proxy.connection_limits import Seldom
from hive.proxy.datapath import DataPath
from hive.proxy.ingress import IngressPath
from hive.proxy.jobs_entry import JobsEntry
from hive.proxy.model_refresh import LOOK_S, Looking
from hive.proxy.prewarms import Connect, Prewarms
from hive.proxy.registry import UNHEARD_S, AgentEntry, Registry
from hive.proxy.runner import RunnerEntry
from hive.proxy.scrapes import Scrapes
from hive.proxy.slot_orders import SlotOrders
from hive.proxy.stored_responses import StoredResponses
from hive.proxy.switching import SwitchingGate
from hive.proxy.task_routes import task_routes
from hive.proxy.under_way import AnswersUnderWay, end_request, not_there, queue_now
from hive.routing.parked import asker_is_gone, restore_over, slot_of
from hive.settings.table import Paths, Settings
from hive.tasks import spawn
from hive.wire.connection import Connection
from hive.wire.listeners import SocketListener

log = logging.getLogger("hive.proxy")

DIALLED_S = 5.0
"""The helper itself gives up sooner."""
SPENT_S = 10.0
"""The daemon adds it up in SQLite."""
ACTIVE_S = 1.0
"""The agents that were active are told to the daemon this often."""
UNHEARD_LONG_S = 5.0
"""Under `hive up` the daemon starts beside the proxy: one that is silent for less is no fault."""
SETTLE_S = 0.01
"""The time between two looks at an agent with an unread answer, or with one over TCP, while `Quiet` is owed."""


class ProxyLinks:
    """The two links of one proxy. `start` dials, `close` hangs up.

    It is the Daemon of every gate: a wake goes out here, its answer comes back here.
    """

    def __init__(
        self,
        paths: Paths,
        epoch: str,
        settings: Settings,
        *,
        usage: UsageSpool,
        api: ApiWake | None = None,
    ) -> None:
        """`api`: the way to ask for a wake while the link to the daemon is down."""
        self.registry = Registry(self, settings.proxy, settings.tenants)
        self._paths = paths
        self._epoch = epoch
        self._usage = usage
        self._active: dict[str, float] = {}
        """Agent → its last activity (Unix seconds), where the daemon has not been told."""
        self._active_due = False
        self._api = api
        self._loop = asyncio.get_running_loop()
        self.runner = RunnerEntry(lambda: self._daemon.link)
        self.jobs = JobsEntry(self.registry)
        self._settling: set[str] = set()
        self._seldom = Seldom()
        self._answers = AnswersUnderWay()

    def start(
        self,
        path: DataPath,
        ingress: IngressPath,
        *,
        ports: tuple[int, int],
        serve: Callable[[AgentEntry, socket.socket], Connection | None],
        connect: Connect,
        on_heard: Callable[[], None],
        on_settings: Callable[[Mapping[str, str]], None],
    ) -> None:
        """`ports`: those of the model and of ingress; `serve(entry, sock)` serves a connection to an agent's own
        listener; `connect` makes a connection of a socket that no listener accepted; `on_heard` is called each time the
        daemon has sent its whole table, `on_settings` with the runtime settings."""
        self._path = path
        self._switching = SwitchingGate(path)
        self._slots = SlotOrders(path, lambda message: self._daemon.link.tell(message))
        self._adapters = AdapterDrains(path)
        self._prewarms = Prewarms(path, connect)
        self._scrapes = Scrapes(path.metrics)
        self._ingress = ingress
        self._ports = ports
        self._serve = serve
        self._on_heard = on_heard
        self._on_settings = on_settings
        self._daemon = LinkClient(
            self._paths.link_socket,
            name="daemon",
            on_link=self._daemon_here,
            on_message=self._from_daemon,
            on_lost=self._daemon_lost,
        )
        self._helper = LinkClient(
            self._paths.sandbox_socket, name="helper", on_link=self._helper_here, on_message=self._from_helper
        )
        self._loop.call_later(UNHEARD_S, self._serve_unheard)
        self._loop.call_later(UNHEARD_LONG_S, self._warn_unheard)
        path.budgets.ask = self._ask_spent
        path.parked.ask = self._use_parked
        path.looking = Looking(self._look_for_models)
        path.stored = StoredResponses(lambda: self._daemon.link)
        path.background = BackgroundSource(lambda: self._daemon.link)

    async def _look_for_models(self) -> None:
        """Asks the daemon for new models; it sends them before its answer. Raises LinkLost, TimedOut."""
        await self._daemon.link.ask(AskModels(), Done, timeout_s=LOOK_S)

    async def _use_parked(self, message: UseParked) -> None:
        """Raises what kept it from that, LinkLost, TimedOut."""
        await self._daemon.link.ask(message, Done, timeout_s=UNPARK_S)

    async def _ask_spent(self, message: AskSpent) -> SpentIs:
        """Raises LinkLost, TimedOut."""
        return await self._daemon.link.ask(message, SpentIs, timeout_s=SPENT_S)

    @property
    def daemon_up(self) -> bool:
        return self._daemon.connected

    def stop_listening(self) -> None:
        """Agents' callers wait in the backlogs from now on: the helper keeps those open for the next proxy."""
        for entry in self.registry.by_id.values():
            entry.close_listeners()
        self._prewarms.stop()

    def close(self) -> None:
        self._daemon.close()
        self._helper.close()

    # the daemon ---------------------------------------------------------------------------------------------------

    def _daemon_here(self, link: Link) -> None:
        now = time.monotonic()
        agents = self.registry.activity([], now)
        link.tell(Hello(role="proxy", epoch=self._epoch, pid=os.getpid()))
        port, ingress_port = self._ports
        link.tell(ProxyTable(agents=agents, port=port, ingress_port=ingress_port, spooled=self._usage.spooled()))

    def _daemon_lost(self, link: Link) -> None:  # noqa: ARG002
        log.warning("daemon_lost")
        self._usage.detach()
        self._switching.daemon_lost()
        self._slots.daemon_lost()
        for entry in list(self.registry.by_id.values()):
            entry.gate.link_lost()
            if self._api is not None:
                entry.gate.wake_again()

    def _from_daemon(self, link: Link, message: LinkMessage, reply: LinkReply | None) -> None:  # noqa: ARG002
        now = time.monotonic()
        match message:
            case Close() | StillClosed() if reply is not None:
                reply(self._close(message, now))
            case AskActivity(agents=named) if reply is not None:
                reply(Activities(agents=self.registry.activity(named, now)))
            case Asleep(agent=agent, generation=generation):
                if (entry := self.registry.by_id.get(agent)) is not None:
                    entry.gate.asleep(generation)
            case Open() | Refused():
                self._open_or_refuse(message)
            case AgentIs(row=row):
                self.registry.learn(row)
                self._path.budgets.changed()
            case AgentGone(agent=agent):
                self.registry.forget(agent)
                self._active.pop(agent, None)
                self._path.budgets.changed()
            case DaemonTable():
                self._learn_all(message)
            case BackendChanged(backend=backend, models=models):
                self._path.use_backend(backend, models)
            case RuntimeSettings(values=values):
                self._on_settings(values)
            case UseCacheEpochs(numbers=numbers, fresh=fresh):
                self.registry.use_epochs(CacheEpochs(numbers, fresh))
                if reply is not None:
                    reply(Done())
            case AskSlotOf(agent=agent) if reply is not None:
                found = slot_of(self._path.slots.all, agent)
                reply(found if found is not None else failed(NotFound("no slot is that agent's")))
            case ParkedIs():
                self._path.parked.learn(message)
            case ParkedOver():
                restore_over(self._path.slots.all, message)
            case AskQueue() if reply is not None:
                reply(queue_now(self.registry, now))
            case AskTokensCome() if reply is not None:
                reply(TokensCome(comes=self._answers.move(self.registry, self._path.slot, now)))
            case AskMetrics() if reply is not None:
                self._scrapes.ask(reply)
            case AskTasks() if reply is not None:
                self._tell_tasks(message, reply)
            case CancelRequest(id=request_id) if reply is not None:
                reply(Done() if end_request(self.registry, request_id) else failed(NotFound(not_there(request_id))))
            case Prewarm() if reply is not None:
                self._prewarms.begin(message, reply)
            case CloseBackend() if reply is not None:
                self._switching.close(message, reply)
            case OpenBackend():
                self._switching.open(message)
            case Slots() | SlotIs() | SlotGone() | CloseSlotGate() | SlotCrashed() | LoadCharged():
                self._slots.order(message, reply)
            case AdaptersAre(adapters=adapters):
                self._adapters.heard(adapters)
            case DrainAdapter() if reply is not None:
                self._adapters.drain(message, reply)
            case SignedLoads():
                self._path.signed.learn(message)
            case RunnerTokens(tokens=tokens):
                self.runner.learn(tokens)
            case JobGrants(grants=grants):
                self.jobs.learn(grants)
                if reply is not None:
                    reply(Done())
            case Marks(marks=marks):
                self._usage.marks(marks)
            case Leaving():
                self._ingress.leave()

    def _tell_tasks(self, asked: AskTasks, reply: LinkReply) -> None:
        try:
            reply(task_routes(self._path, asked, time.monotonic()))
        except HiveError as error:
            reply(failed(error))

    def _learn_all(self, table: DaemonTable) -> None:
        self._on_settings(table.runtime_settings)
        # before there is a way to a server
        self.registry.use_epochs(CacheEpochs(table.cache_epochs, table.cache_fresh))
        self._path.signed.learn(table.signed)
        self._path.parked.clear()
        asker_is_gone(self._path.slots.all)
        self._switching.heard(table)
        self._adapters.learn(table.adapters)
        self._slots.heard(table.slots)  # before the gates open for the requests that wait at them
        for entry in self.registry.replace_all(table.agents, table.internal_digest):
            self._active.pop(entry.row.id, None)
        self._path.budgets.heard()
        self._usage.marks(table.marks)
        self._usage.attach(self._daemon.link.tell)
        self._tell_active()
        for entry in self.registry.by_id.values():
            entry.gate.wake_again()
        self._on_heard()

    def _close(self, message: Close | StillClosed, now: float) -> Closed | Busy:
        entry = self.registry.by_id.get(message.agent)
        if entry is None:
            return Busy(agent=message.agent, generation=message.generation, reason="the proxy does not know this agent")
        if self._path.draining:
            # Callers wait in the agent's backlog, where nothing wakes it until the next proxy is there.
            return Busy(agent=message.agent, generation=message.generation, reason="the proxy is restarting")
        gate = entry.gate
        ask = gate.close if isinstance(message, Close) else gate.still_closed
        reason = ask(message.generation, now)
        if reason is None:
            return Closed(agent=message.agent, generation=message.generation)
        if gate.owes_quiet and message.agent not in self._settling:
            self._settling.add(message.agent)
            self._loop.call_later(SETTLE_S, self._settle, entry)
        return Busy(agent=message.agent, generation=message.generation, reason=reason)

    def _settle(self, entry: AgentEntry) -> None:
        """Looks until the `Quiet` is paid; while requests are in flight their end looks, so this only waits."""
        gate = entry.gate
        if gate.settle(time.monotonic()):
            self._settling.discard(entry.row.id)
        else:
            wait_s = SETTLE_S if not (gate.in_flight or gate.ingress) else 10 * SETTLE_S
            self._loop.call_later(wait_s, self._settle, entry)

    def _open_or_refuse(self, message: LinkMessage) -> None:
        match message:
            case Open(agent=agent, generation=generation):
                if (entry := self.registry.by_id.get(agent)) is not None:
                    entry.gate.open(generation)
            case Refused(agent=agent, generation=generation, status=status, why=why):
                if (entry := self.registry.by_id.get(agent)) is not None:
                    entry.gate.refuse(generation, status, why)

    def _serve_unheard(self) -> None:
        if not self.registry.heard:
            log.info("daemon_unheard serving=own_sockets")
            self.registry.serve_unheard()

    def _warn_unheard(self) -> None:
        if not self.registry.heard:
            log.warning("daemon_unheard serving=own_sockets")

    # Daemon of the gates -----------------------------------------------------------------------------------------

    def wake(self, agent: str, cause: WakeCause) -> None:
        self._path.metrics.woken(cause)
        spawn(self._wake(agent, cause), name=f"wake {agent}")

    async def _wake(self, agent: str, cause: WakeCause) -> None:
        """Asks the daemon once; what is parked has its own deadline, so a lost answer only frees the next ask."""
        within_s = self._path.settings.proxy.gate_wait_s
        try:
            if self._api is not None and not self._daemon.connected:
                self._answered(agent, await self._api.wake(agent, within_s=within_s))
            else:
                answer = await self._daemon.link.ask_any(Wake(agent=agent, cause=cause), timeout_s=within_s)
                self._open_or_refuse(answer)
        except HiveError as error:
            more = self._seldom.left_out("wake_failed", time.monotonic())
            if more is not None:
                log.warning("wake_failed agent=%s cause=%s error=%s more=%d", agent, cause, error.message, more)
            if (entry := self.registry.by_id.get(agent)) is not None:
                entry.gate.wake_failed()

    def _answered(self, agent: str, told: ToldAgent) -> None:
        """Takes the API's answer. If the link is back meanwhile, its messages are newer than a refusal."""
        if (entry := self.registry.by_id.get(agent)) is None:
            return
        if told.status == AgentStatus.RUNNING:
            entry.gate.open(told.generation)
        elif not self._daemon.connected:
            entry.gate.not_woken(told.status)

    def touch(self, agent: str) -> None:
        """The agent is active now. Tells the daemon within ACTIVE_S, or when it is back."""
        self._active[agent] = time.time()
        if not self._active_due:
            self._active_due = True
            self._loop.call_later(ACTIVE_S, self._tell_active)

    def _tell_active(self) -> None:
        self._active_due = False
        if self._active and self._daemon.connected:
            self._daemon.link.tell(AgentsActive(agents=self._active))
            self._active = {}

    def tell_quiet(self, agent: str) -> None:
        with contextlib.suppress(HiveError):
            self._daemon.link.tell(Quiet(agent=agent))

    # the helper ---------------------------------------------------------------------------------------------------

    def _helper_here(self, link: Link) -> None:
        link.tell(Hello(role="proxy", epoch=self._epoch, pid=os.getpid()))
        spawn(self._ask_listeners(link), name="ask listeners")

    async def _ask_listeners(self, link: Link) -> None:
        with contextlib.suppress(DependencyDown):
            await link.ask(AskListeners(), Done, timeout_s=10)

    async def dial(self, agent: str) -> socket.socket:
        """A connection to the agent's port, where the helper alone gets to. The caller's. Raises HiveError."""
        descriptor = await self._helper.link.ask_for_descriptor(Dial(agent=agent), Dialled, timeout_s=DIALLED_S)
        return socket.socket(fileno=descriptor)

    def _from_helper(self, link: Link, message: LinkMessage, reply: LinkReply | None) -> None:  # noqa: ARG002
        match message:
            case ListenerIs(agent=agent, path=path):
                self._listen_for(agent, path, link.take_descriptors())
            case ListenerGone(agent=agent, path=path):
                if (entry := self.registry.by_id.get(agent)) is not None:
                    entry.close_listeners(path)

    def _listen_for(self, agent: str, path: str, descriptors: list[int]) -> None:
        """Takes a (new) listener of the agent; an old one of the same path is emptied first, its connections stay."""
        if not descriptors:
            log.error("listener_without_descriptor agent=%s path=%s", agent, path)
            return
        if self._path.draining:
            os.close(descriptors[0])  # the helper keeps it open for the next proxy
            return
        known = agent in self.registry.by_id
        entry = self.registry.unheard(agent)
        if (old := entry.listeners.pop(path, None)) is not None:
            old.close(empty_first=True)
        entry.listeners[path] = SocketListener(socket.socket(fileno=descriptors[0]), partial(self._serve, entry))
        if not known and not self.registry.heard:
            self._loop.call_later(UNHEARD_S, self._serve_unheard)
