"""The daemon: opens everything, ties it together, and hears what helper, proxy, backend and Redis say.

Composition root. What it is made of decides nothing here: lives decide about agents (agents/lifecycle.py), the
handlers of hive/api call its services.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import sqlite3
import sys
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import uvloop

from hive.agents.lifecycle import AgentLifecycle
from hive.agents.roster import Roster
from hive.agents.sleeper import Sleeper
from hive.agents.tokens import TokenKind, digest
from hive.agents.transition_lock import outcome_of
from hive.api.failures import Failures
from hive.api.middleware import TcpEntry
from hive.api.server import ApiServer, Tcp, serve
from hive.audit.audit_log import AuditLog
from hive.audit.jobs import Jobs
from hive.backends.ask import parse_address
from hive.backends.entries import entries_of
from hive.backends.kinds import spec_of
from hive.backends.models_dir import ModelsDir, place_of
from hive.backends.switch import Target
from hive.control import secret_files
from hive.control.active_backend import Active
from hive.control.agent_views import AgentViews
from hive.control.api_tokens import LiveTokens
from hive.control.backend_candidates import Choices, RunningCandidates, ServiceCandidates, service
from hive.control.counters import Counters
from hive.control.effects import DaemonEffects
from hive.control.executing import Executor
from hive.control.external_agents import WithElsewhere
from hive.control.health import HealthReport
from hive.control.hosts import hosts_of
from hive.control.kept_responses import KeptResponses
from hive.control.listening import ListenPlace, WantedAddress, listen
from hive.control.message_delivery import MessageDelivery
from hive.control.metrics import Scraper
from hive.control.models import Models
from hive.control.prewarming import Prewarmer
from hive.control.recorded import PROXY_PORT, read_recorded
from hive.control.registration import AgentRegistry
from hive.control.runtime_config import RuntimeConfig
from hive.control.runtimes import RuntimeWatch
from hive.control.scheduler import Scheduler
from hive.control.services import Services
from hive.control.state_queries import StateQueries
from hive.control.switching import Switcher, is_carried_on
from hive.control.usage import UsageConsumer
from hive.control.usage_history import UsageHistory
from hive.control.usage_report import UsageReport
from hive.domain import ALIVE, Agent, AgentStatus, BackendKind, Isolation, UsageEvent
from hive.errors import ConfigError, HiveError
from hive.host import accounts, parent
from hive.host.access import RemoteAccess, access_of
from hive.host.cgroup import Subtree
from hive.host.credentials import credential
from hive.host.gpu_memory import GpuMemoryReader
from hive.host.loop_lag import watched
from hive.host.notify import Notifier
from hive.host.process import identify
from hive.link.helper import Ended
from hive.link.link import LinkReply
from hive.link.messages import AgentRow, DaemonTable, Done, Marks, Open, ProxyTable, Refused
from hive.link.pool import SlotDemands, SlotFlows
from hive.link.proxy_link import ProxyGates
from hive.link.responses import FromProxy
from hive.link.slots import SlotProcess
from hive.link.usage import UsageBatch
from hive.pooling.footprints import Footprints
from hive.pooling.ollama_slots import OllamaSlots, ollama_address
from hive.pooling.pool_clients import PoolClients
from hive.pooling.pool_memory import PoolMemory
from hive.pooling.pool_orders import PoolOrders, why_off
from hive.pooling.pooling import ModelPool
from hive.pooling.slot_servers import OneOfTwo
from hive.sandbox.client import SandboxClient
from hive.settings.file import SettingOrigin
from hive.settings.table import Paths, Settings
from hive.store import runtime_settings
from hive.store.database import Database
from hive.store.live import Live
from hive.store.redis_at import redis_at
from hive.store.responses_file import ResponsesFile
from hive.tasks import spawn

log = logging.getLogger("hive.daemon")

RECONCILED_WITHIN_S = 2.0
"""The API answers after the helper told the truth, or after this long without it."""
RECONCILE_AGAIN_S = 0.5
SETTLED_WITHIN_S = 5.0
"""Longest wait for running work when the daemon leaves; the next daemon puts the rest right."""


class Daemon:
    """One running daemon."""

    def __init__(
        self,
        paths: Paths,
        settings: Settings,
        *,
        backend: tuple[str, str] | None = None,
        isolation: Isolation = Isolation.NONE,
        freezer: str = "",
        run: str = "",
        origins: Mapping[str, SettingOrigin] | None = None,
        api: WantedAddress | None = None,
    ) -> None:
        """Opens the database and makes every service, in their order; nothing is begun. Blocks, on a running loop.

        Raises WrongState where another daemon has the state directory, ConfigError, NotPermitted, StoreFull.

        `origins`: where each of the settings comes from, by `section.key`. `api`: where the API is on TCP too.

        `freezer`: how agents are frozen on this host, as far as the daemon can tell before it has seen one.

        `run`: which `hive up` this is a part of; what it was switched to is forgotten with it.
        """
        self._paths = paths
        self._settings = settings
        self._accounts = accounts.appliance() if paths.apart else accounts.own()
        self._api_wanted = api
        self._api_at = ListenPlace(settings.api.listen)
        self._api: ApiServer | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._reconciled = asyncio.Event()
        self.epoch = f"{int(time.time()):x}{secrets.token_hex(3)}"
        started_at = time.time()

        # What is on the disk.
        key = secret_files.box_key(paths.box_key, os.environ)
        self._internal_token = secret_files.internal_token(paths.internal_token, os.environ)
        api_token = secret_files.api_token(os.environ)
        redis = redis_at(paths.redis_socket, "daemon", os.environ, credential)
        self._database = Database.open(paths.database)
        try:
            recorded = self._database.read_now(lambda conn: read_recorded(conn, run))
        except BaseException:
            self._database.close()
            raise

        # What the daemon counts and writes, and its links with proxy and helper.
        self._counters = Counters(recorded.agents, recorded.used)
        self._live = Live(redis, on_new_run=self._say_to_redis)
        self._audit_log = AuditLog(self._database, self._live)
        self._api_tokens = LiveTokens(self._database, internal=self._internal_token, api_token=api_token)
        self._proxy_link = ProxyGates(epoch=self.epoch, events=self)
        self._usage = UsageConsumer(
            self._live,
            self._database,
            on_marks=lambda marks: self._proxy_link.say(Marks(marks=marks)),
            on_usage=self._used,
        )
        self._helper = SandboxClient(
            paths.sandbox_socket,
            role="daemon",
            epoch=self.epoch,
            on_ended=self._ended,
            on_thawed_alone=self._thawed_alone,
            on_connected=self._helper_here,
            on_slot_moved=self._slot_moved,
        )
        self._runtimes = RuntimeWatch(self._helper)

        # The agents.
        has_helper, lives = settings.sandbox.enabled, dict[str, AgentLifecycle]()
        sandboxes = WithElsewhere(self._helper, lives, enabled=has_helper)
        self.effects = DaemonEffects(
            paths,
            settings,
            key=key,
            database=self._database,
            live=self._live,
            audit_log=self._audit_log,
            counters=self._counters,
            helper=sandboxes,
            proxy_link=self._proxy_link,
            own_networks=isolation is Isolation.FULL,
        )
        self.roster = Roster(self.effects, lives)
        self._responses = KeptResponses(
            ResponsesFile(paths.responses),
            is_there=lives.__contains__,
            settings=lambda: self.effects.settings.proxy,
        )
        self._config = RuntimeConfig(
            settings,
            origins or {},
            recorded.runtime_settings,
            database=self._database,
            effects=self.effects,
            proxy_link=self._proxy_link,
            live=self._live,
            on_change=self._responses.settings_changed,
        )
        for agent in recorded.agents:
            self.roster.add(agent)
            has_port = agent.status in ALIVE and not self.effects.has_own_network(agent.spec)
            if recorded.proxy_port is not None and has_port:
                self.effects.started_with_port[agent.id] = recorded.proxy_port
        self.sleeper = Sleeper(self.roster, self.effects)
        executor = Executor(self._helper, self.roster, self._runtimes, self._audit_log, enabled=has_helper)
        self._message_delivery = MessageDelivery(
            self.roster,
            self._database,
            self._audit_log,
            self._proxy_link,
            recorded.with_messages,
            token=lambda agent: self.effects.token(agent, TokenKind.INGRESS),
            answer_s=settings.proxy.first_byte_s,
        )
        self._scheduler = Scheduler(self.roster, self._database, self._audit_log, recorded.schedules)
        self._prewarmer = Prewarmer(
            self.roster, self.effects, self._proxy_link, self._audit_log, pooled=lambda: self._pool.offered()
        )

        # The inference server.
        inference = settings.inference
        self._active = Active(
            effects=self.effects, live=self._live, proxy_link=self._proxy_link, audit_log=self._audit_log
        )
        self._jobs = Jobs(self._database, self._audit_log)
        models_dir = ModelsDir(place_of(inference.models_dir, is_installed=paths.apart, state=paths.state))
        gpus = GpuMemoryReader()
        given = None if backend is None else Target(*backend)
        entries = entries_of(settings, models_dir.paths() if settings.pool.found else {}) if has_helper else {}
        self._ollama = OllamaSlots(
            entries.values(),
            ollama_address(inference, has_units=self._has_units, in_use=[recorded.chosen, given]),
            on_moved=self._slot_moved,
            on_list=lambda: self._pool.files_changed(),
            read_log=self._ollama_log if self._has_units else None,
        )
        self._servers = OneOfTwo(self._helper, self._ollama, self._ollama.ids)
        self._footprints = Footprints(
            self._database, lambda: self.effects.settings, recorded.footprints, self._ollama.facts_of
        )
        self._clients = PoolClients(lambda: self.effects.settings, self._is_awake)
        self._pool = ModelPool(
            entries,
            settings=lambda: self.effects.settings,
            helper=self._servers,
            proxy_link=self._proxy_link,
            memory=PoolMemory(gpus, lambda: self.effects.settings),
            footprints=self._footprints,
            clients=self._clients,
            audit_log=self._audit_log,
            address_of=lambda entry: self._ollama.address if entry.is_ollamas else str(paths.slot_socket(entry.id)),
            pins=recorded.pins,
        )
        self._models = Models(
            effects=self.effects,
            active=self._active,
            jobs=self._jobs,
            audit_log=self._audit_log,
            roster=self.roster,
            directory=models_dir,
            pooled=self._pool.offered,
        )
        self._named = [parse_address(inference.backend_url)] if inference.backend_url else []
        known = self._named[0] if self._named else f"{inference.host}:{inference.port}"
        if given is not None and spec_of(given.kind).is_remote:
            self._named.append(given.address)
        self._choose(recorded.chosen, given, known)
        self._switcher = Switcher(
            settings=lambda: self.effects.settings.inference,
            jobs=self._jobs,
            audit_log=self._audit_log,
            active=self._active,
            choices=self._choices([known] if given is None else [given.address, known]),
            access=self._access,
            proxy_link=self._proxy_link,
            gpu=gpus,
            pool=self._pool,
            run=run,
        )
        switches = [job for job in recorded.jobs if is_carried_on(job, run)][:1]
        for job in switches:
            self._switcher.adopt(job)
        self._given_up = [job for job in recorded.jobs if job not in switches]

        self.services = self._services(
            isolation=isolation,
            freezer=freezer,
            started_at=started_at,
            sandboxes=sandboxes,
            executor=executor,
            gpus=gpus,
        )

    def _services(
        self,
        *,
        isolation: Isolation,
        freezer: str,
        started_at: float,
        sandboxes: WithElsewhere,
        executor: Executor,
        gpus: GpuMemoryReader,
    ) -> Services:
        """Makes what answers the API, of all that is made by then."""
        paths, settings = self._paths, self._settings
        agent_views = AgentViews(
            roster=self.roster,
            sleeper=self.sleeper,
            counters=self._counters,
            helper=sandboxes,
            runtimes=self._runtimes,
            message_delivery=self._message_delivery,
            scheduler=self._scheduler,
            prewarmer=self._prewarmer,
            freezer=freezer,
        )
        health = HealthReport(
            epoch=self.epoch,
            started_at=started_at,
            paths=paths,
            settings=settings,
            isolation=isolation,
            database=self._database,
            live=self._live,
            consumer=self._usage,
            proxy_link=self._proxy_link,
            helper=sandboxes,
            effects=self.effects,
            agent_views=agent_views,
            switcher=self._switcher,
            pool=self._pool,
            api=self._api_at,
        )
        orders = PoolOrders(
            self._pool,
            why_off=why_off(settings),
            jobs=self._jobs,
            database=self._database,
            audit_log=self._audit_log,
            helper=self._servers,
        )
        return Services(
            paths=paths,
            settings=settings,
            internal_token=self._internal_token,
            roster=self.roster,
            agents=AgentRegistry(
                roster=self.roster,
                effects=self.effects,
                views=agent_views,
                database=self._database,
                audit_log=self._audit_log,
                proxy_link=self._proxy_link,
                message_delivery=self._message_delivery,
                scheduler=self._scheduler,
                responses=self._responses,
                settings=settings,
                isolation=isolation,
                api=self._api_at,
            ),
            agent_views=agent_views,
            effects=self.effects,
            proxy_link=self._proxy_link,
            runtimes=self._runtimes,
            executor=executor,
            message_delivery=self._message_delivery,
            scheduler=self._scheduler,
            prewarmer=self._prewarmer,
            responses=self._responses,
            active=self._active,
            switcher=self._switcher,
            jobs=self._jobs,
            models=self._models,
            pool=orders,
            gpus=gpus,
            config=self._config,
            api_tokens=self._api_tokens,
            audit_log=self._audit_log,
            counters=self._counters,
            usage=UsageReport(
                database=self._database,
                roster=self.roster,
                sleeper=self.sleeper,
                counters=self._counters,
                proxy_link=self._proxy_link,
                gpus=gpus,
                effects=self.effects,
            ),
            state_queries=StateQueries(paths.database, self._responses.readable),
            health=health,
            scraper=Scraper(
                started_at=started_at,
                roster=self.roster,
                counters=self._counters,
                helper=sandboxes,
                proxy_link=self._proxy_link,
                effects=self.effects,
                live=self._live,
                database=self._database,
                consumer=self._usage,
                responses=self._responses,
                gpus=gpus,
                conditions=health.conditions,
                pool_counts=self._pool.counts,
                pool_view=orders.view,
            ),
        )

    def __repr__(self) -> str:
        return f"<Daemon {self.epoch} of {self._paths.state}>"

    # Coming and going ---------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Returns when the API answers. Redis, helper, proxy and backend may come later.

        Raises ConfigError, NotPermitted, StoreFull; then the daemon is closed.
        """
        try:
            await self._api_tokens.load()
            await self._audit_log.begin()
            await self._usage.load()
            await self._begin()
        except BaseException:
            await self.close()
            raise

    def _choose(self, chosen: Target | None, given: Target | None, known: str) -> None:
        """Chooses the server switched to, else that of the command line, else that of hive.conf."""
        inference = self._settings.inference
        kind = None if inference.backend == "auto" else inference.backend
        if given is None and inference.enabled == "false":
            self._active.enabled = False
        elif chosen is not None and (self._has_units or not chosen.unit):
            self._active.choose(chosen)
        elif given is not None:
            self._active.choose(given)
        elif self._has_units and not inference.backend_url:
            if kind is not None:
                self._active.choose(service(kind))
        elif kind is not None:
            self._active.choose(Target(kind, known))
        else:
            self._active.choose_whatever_answers(known)

    def _choices(self, known: list[str]) -> Choices:
        """`known`: addresses at which a server may answer that Hive did not start."""
        return (
            ServiceCandidates(self._helper, self._access)
            if self._has_units
            else RunningCandidates(known, self._named, self._access)
        )

    def _access(self) -> RemoteAccess:
        """Raises ConfigError, NotPermitted."""
        return access_of(self.effects.settings.inference, os.environ)

    @property
    def _has_units(self) -> bool:
        """Whether the inference servers are units of systemd, which the helper starts and stops."""
        return self._paths.apart and self._settings.sandbox.enabled

    async def _begin(self) -> None:
        if not self._settings.sandbox.enabled:
            self._reconciled.set()
        spawn(self._live.run(), name="redis")
        self._say_to_redis()
        self._spawn(self._runtimes.run(), "runtimes")
        self._spawn(self._prewarmer.run(), "prewarm")
        self._active.watch()
        await self._jobs.give_up(self._given_up)
        self._spawn(self._models.tidy(), "tidy models")
        self._spawn(self._switcher.run(), "switch")
        self._spawn(self._ollama.run(), "ollama")
        self._spawn(self._pool.run(), "pool")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._known(), RECONCILED_WITHIN_S)
        await self._listen()
        spawn(self._usage.run(), name="usage")
        spawn(self._usage.take_over(), name="old usage")
        self._spawn(self.sleeper.run(), "idle")
        self._spawn(self._audit_log.run(), "audit")
        self._spawn(UsageHistory(self._database, self._settings.daemon).run(), "usage history")
        self._spawn(self._message_delivery.run(), "messages")
        self._spawn(self._api_tokens.run(), "tokens")
        self._spawn(self._scheduler.run(), "schedules")
        self._spawn(self._responses.run(), "responses")
        log.info("daemon_ready agents=%d reconciled=%s", len(self.roster), self._reconciled.is_set())

    async def _listen(self) -> None:
        tcp = None if self._api_wanted is None else self._tcp(self._api_wanted)
        try:
            self._proxy_link.listen(self._paths.link_socket, self._accounts)
            self._api = await serve(
                self.services,
                self._paths.api_socket,
                self._accounts,
                pause_timeout_s=self._settings.sleep.pause_timeout_s,
                tcp=tcp,
            )
        except OSError as error:
            if tcp is not None:
                tcp.sock.close()
            raise ConfigError(f"cannot listen in {self._paths.runtime}: {error.strerror}") from error

    def _tcp(self, wanted: WantedAddress) -> Tcp:
        sock = listen(wanted)
        self._api_at.port = sock.getsockname()[1]
        if self._api_at.port != wanted.port:
            log.warning("api_port_taken wanted=%d got=%d", wanted.port, self._api_at.port)
        hosts = hosts_of(self._settings.api.hosts)
        return Tcp(sock, TcpEntry(self._api_tokens, wanted.address, hosts, Failures()))

    async def _known(self) -> None:
        """Returns when agents and backend have been looked at: answers from then on are true."""
        await self._reconciled.wait()
        await self._active.known()
        await self._pool.known()

    async def close(self) -> None:
        """Ends what is under way towards awake, writes what is unwritten, closes. Sleeping agents sleep on."""
        await self._pool.close()  # before anything that takes time: the models may be ending, too
        await self._ollama.close()
        api, self._api = self._api, None
        if api is not None:
            await api.close()
        for task in self._tasks:
            task.cancel()
        self._switcher.close()
        self._models.close()
        self._active.hold()
        self._scheduler.close()
        self._prewarmer.close()
        await self._message_delivery.close()
        settling = [spawn(life.settle(), name=f"settle {life.agent.name}") for life in self.roster]
        if settling:
            _, late = await asyncio.wait(settling, timeout=SETTLED_WITHIN_S)
            for task in late:
                task.cancel()
        self._proxy_link.stop()
        self._helper.close()
        await self._usage.close()
        await self._api_tokens.write_used()
        await self._audit_log.close()
        await self._live.close()
        self._responses.close()
        self._database.close()
        log.info("daemon_left")

    def what_is_wrong(self) -> str:
        """The reason for its watchdog to end the process, empty where all is well, and while it starts or leaves."""
        if self._api is None:
            return ""
        if not self._database.is_writing:
            return "the store's thread has ended"
        if self._usage.has_ended:
            return "usage is not written any more"
        return "" if self._api.is_serving and self._proxy_link.is_listening else "a listener is dead"

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = spawn(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # The helper ---------------------------------------------------------------------------------------------------

    def _helper_here(self) -> None:
        self._spawn(self._reconcile(), "reconcile")
        self._runtimes.helper_here()
        self._pool.helper_here()

    def _slot_moved(self, process: SlotProcess) -> None:
        self._pool.slot_moved(process)

    async def _ollama_log(self, lines: int) -> str:
        return await self._helper.backend_log(BackendKind.OLLAMA, lines=lines)

    def _is_awake(self, agent: str) -> bool:
        """Whether the processes of this agent run."""
        life = self.roster.get(agent)
        return life is not None and life.status is AgentStatus.RUNNING

    async def _reconcile(self) -> None:
        """After a (re)connect, until it succeeded or that link is lost too."""
        while self._helper.connected:
            outcome = await outcome_of(self.roster.reconcile())
            if not isinstance(outcome, HiveError):
                log.info("reconciled agents=%d", len(self.roster))
                if not self._reconciled.is_set():
                    self._spawn(self._start_after_boot(), "start after boot")
                self._reconciled.set()
                return
            log.warning("not_reconciled error=%s", outcome.message)
            await asyncio.sleep(RECONCILE_AGAIN_S)

    async def _start_after_boot(self) -> None:
        if isinstance(error := await outcome_of(self.roster.start_after_boot()), HiveError):
            log.error("not_started_after_boot error=%s", error.message)

    def _thawed_alone(self, agent: str, reason: str) -> None:
        self.roster.thawed_alone(agent, reason)

    def _ended(self, ended: Ended) -> None:
        self.roster.ended(ended.agent, ended.exit_code, ended.pid, ended.why)

    # The proxy (proxy_link.ProxyEvents) ---------------------------------------------------------------------------

    def table(self) -> DaemonTable:
        return DaemonTable(
            agents=[self.effects.row(life.agent, life) for life in self.roster],
            backend=self.effects.backend,
            models=self.effects.models,
            marks=self._usage.marks,
            internal_digest=digest(self._internal_token),
            switching_to=self._switcher.towards,
            backend_wait_s=self._switcher.wait_s,
            runtime_settings=self._config.values,
            slots=self._pool.rows(),
        )

    def row(self, agent: Agent) -> AgentRow:
        return self.effects.row(agent, self.roster.get(agent.id))

    def proxy_here(self, table: ProxyTable) -> None:
        self._usage.proxy_here(table.spooled)
        self.roster.proxy_table(table.agents)
        self._message_delivery.proxy_here()
        self._prewarmer.proxy_here()
        self._pool.proxy_here()
        self._spawn(self._adopt_port(table.port), "port")
        self._spawn(self._prune(set(table.spooled)), "prune")

    def proxy_lost(self) -> None:
        self.roster.proxy_lost()
        self._pool.proxy_lost()

    def slot_demands(self, told: SlotDemands) -> None:
        self._pool.demands(told)

    def slot_flows(self, told: SlotFlows) -> None:
        self._pool.flows(told)

    def quiet(self, agent: str) -> None:
        self.roster.quiet(agent)

    def wake(self, agent: str, cause: str, answer: Callable[[Open | Refused], None]) -> None:
        self.roster.wake(agent, cause, answer)

    def usage(self, batch: UsageBatch) -> None:
        self._usage.take(batch)

    def active(self, agents: dict[str, float]) -> None:
        for agent, at in agents.items():
            if self.roster.get(agent) is not None:  # one that was just removed has no keys any more
                self._live.touch(agent, at)

    def _used(self, events: list[UsageEvent]) -> None:
        self._counters.add(events)
        self._prewarmer.used(events)
        self._clients.used(events, time.monotonic(), time.time())
        for agent in {event.agent_id for event in events}:
            if self.roster.get(agent) is not None:
                self._show_totals(agent)

    def about_responses(self, message: FromProxy, reply: LinkReply | None) -> None:
        self._responses.hear(message, reply)

    def look_for_models(self, answer: Callable[[Done], None]) -> None:
        self._spawn(self._look_for_models(answer), "look for models")

    async def _look_for_models(self, answer: Callable[[Done], None]) -> None:
        """Looks for models again; the proxy gets the result before the answer."""
        await self._models.look_again()
        answer(Done())

    async def _adopt_port(self, port: int) -> None:
        """Starts agents anew that have another port of the proxy in their environment: they would reach nothing."""
        known = self.effects.started_with_port
        moved = [life for life in self.roster if life.status in ALIVE and known.get(life.agent.id, port) != port]
        await asyncio.gather(*(self._restart_for_port(life, known[life.agent.id], port) for life in moved))

        def keep(conn: sqlite3.Connection) -> None:
            runtime_settings.put(conn, PROXY_PORT, str(port), actor="hive", now=time.time())

        if isinstance(error := await outcome_of(self._database.write(keep)), HiveError):
            log.error("port_not_kept port=%d error=%s", port, error.message)

    async def _restart_for_port(self, life: AgentLifecycle, was: int, port: int) -> None:
        log.warning("agent_restarted agent=%s reason=proxy_port was=%d now=%d", life.agent.name, was, port)
        detail = {"name": life.agent.name, "was": was, "now": port}
        self._audit_log.note("agent.port_moved", target=life.agent.id, detail=detail)
        if isinstance(error := await outcome_of(life.restart("hive")), HiveError):
            log.error("agent_not_restarted agent=%s error=%s", life.agent.name, error.message)

    async def _prune(self, spooled: set[str]) -> None:
        if isinstance(error := await outcome_of(self._usage.prune(spooled)), HiveError):
            log.warning("marks_not_pruned error=%s", error.message)

    # Redis ------------------------------------------------------------------------------------------------------

    def _say_to_redis(self) -> None:
        """All that only the daemon can rebuild."""
        for life in self.roster:
            self.effects.put(life.agent)
            self._show_totals(life.agent.id)
        self._live.set_backend(self.effects.backend)
        self._live.set_models(self.effects.models)
        self._config.say_to_redis()

    def _show_totals(self, agent: str) -> None:
        used = self._counters.used(agent)
        self._live.set_totals(agent, tokens_in=used.tokens_in, tokens_out=used.tokens_out, requests=used.requests)


# The program ----------------------------------------------------------------------------------------------------------


def run_of(parent_pid: int) -> str:
    """A name of the process that started this one, which no other one has had or will have."""
    found = identify(parent_pid)
    return "gone" if found is None else f"{found.boot} {found.pid} {found.start_ticks}"


async def _run(make: Callable[[], Daemon], notifier: Notifier, watch_fd: int | None) -> None:
    leave = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, leave.set)
    if watch_fd is not None:
        parent.watch(watch_fd, leave.set)
        parent.die_with_parent(signal.SIGTERM)
    daemon = make()
    with watched(notifier, daemon.what_is_wrong):
        await daemon.open()
        notifier.ready("serving")
        await leave.wait()
        notifier.stopping()
        await daemon.close()


def main(
    paths: Paths,
    settings: Settings,
    *,
    backend: tuple[str, str] | None = None,
    isolation: Isolation = Isolation.NONE,
    origins: Mapping[str, SettingOrigin] | None = None,
    move_api: bool = False,
    watch_fd: int | None = None,
) -> int:
    """Runs the daemon until SIGTERM, SIGINT, or the end of the process with the other end of `watch_fd`; the exit code.

    `move_api`: a taken port of the API on TCP moves up by one.
    """
    wanted = settings.api
    api = WantedAddress(wanted.listen, wanted.port, move_api) if wanted.port else None

    def make() -> Daemon:
        freezer = "cgroup" if paths.apart or Subtree.find(paths.state) is not None else "signal"
        run = "" if watch_fd is None else run_of(os.getppid())
        return Daemon(
            paths, settings, backend=backend, isolation=isolation, freezer=freezer, run=run, origins=origins, api=api
        )

    notifier = Notifier(os.environ, pid=os.getpid())
    try:
        uvloop.run(_run(make, notifier, watch_fd))
    except HiveError as error:
        print(f"hive: {error.message}" + (f"\nhint: {error.hint}" if error.hint else ""), file=sys.stderr)  # noqa: T201
        return error.exit_code
    return 0
