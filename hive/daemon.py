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
import socket
import sqlite3
import sys
import time
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

import uvloop

from hive.adapters.directory import AdapterDirectory
from hive.adapters.keys import TrustedKeys
from hive.adapters.record import AdapterRecord
from hive.agents.lifecycle import AgentLifecycle
from hive.agents.roster import Roster
from hive.agents.sleeper import Sleeper
from hive.agents.tokens import TokenKind, digest
from hive.agents.transition_lock import outcome_of
from hive.api.failures import Failures
from hive.api.middleware import TcpEntry
from hive.api.server import ApiServer, Tcp, serve
from hive.api.services import Services
from hive.audit.audit_log import AuditLog
from hive.audit.jobs import Jobs
from hive.backends.ask import parse_address
from hive.backends.entries import ModelEntry, adapter_entries, entries_of
from hive.backends.kinds import spec_of
from hive.backends.models_dir import ModelsDir, place_of
from hive.backends.slot_place import with_slot_place
from hive.backends.switch import Target
from hive.control import cloud, secret_files
from hive.control.active_backend import Active
from hive.control.agent_views import AgentViews
from hive.control.api_tokens import LiveTokens
from hive.control.backend_candidates import Choices, RunningCandidates, ServiceCandidates, service
from hive.control.budgets import BudgetReport
from hive.control.counters import Counters
from hive.control.effects import DaemonEffects
from hive.control.executing import Executor
from hive.control.external_agents import WithElsewhere
from hive.control.governance import Governor
from hive.control.health import HealthReport
from hive.control.hosts import hosts_of
from hive.control.kept_responses import KeptResponses
from hive.control.left_box import EVENT, LeftBox
from hive.control.listening import ListenPlace, WantedAddress, listen
from hive.control.message_delivery import MessageDelivery
from hive.control.metrics import Scraper
from hive.control.models import Models
from hive.control.prewarming import Prewarmer
from hive.control.recorded import PROXY_PORT, read_recorded
from hive.control.registration import AgentRegistry
from hive.control.runner_counts import RunnerCounts
from hive.control.runtime_config import RuntimeConfig
from hive.control.runtimes import RuntimeWatch
from hive.control.scheduler import Scheduler
from hive.control.speculation import SpeculationWatch
from hive.control.state_queries import StateQueries
from hive.control.switching import Switcher, is_carried_on
from hive.control.task_report import TaskReport
from hive.control.templates import TemplateDesk
from hive.control.transcriptions import TranscriptionWatch
from hive.control.usage import UsageConsumer
from hive.control.usage_history import UsageHistory
from hive.control.usage_report import UsageReport
from hive.domain import ALIVE, Agent, AgentStatus, BackendKind, Isolation, UsageEvent
from hive.errors import ConfigError, DependencyDown, HiveError, Saturated, as_said
from hive.host import accounts, parent
from hive.host.access import RemoteAccess, access_of
from hive.host.cgroup import Subtree
from hive.host.credentials import credential
from hive.host.gpu_memory import GpuMemoryReader
from hive.host.loop_lag import watched
from hive.host.notify import Notifier
from hive.host.process import identify
from hive.lifecycle.adapter_orders import AdapterOrders
from hive.lifecycle.adapter_registry import AdapterRegistry
from hive.lifecycle.adapters import Adapters
from hive.lifecycle.background_responses import BackgroundResponses
from hive.lifecycle.cache_flush import CacheFlusher
from hive.lifecycle.deployment_watch import DeploymentWatch
from hive.lifecycle.load_anew import LONGEST_S
from hive.lifecycle.load_tasks import LoadTasks
from hive.lifecycle.memory_split import MemorySplit
from hive.lifecycle.model_jobs import ModelJobs
from hive.lifecycle.parking import Parking, ServersApart
from hive.lifecycle.runner import RunnerDesk
from hive.lifecycle.runner_views import RunnerViews, measured_bytes
from hive.lifecycle.signed_loads import LoadApprovals
from hive.link.background import FromProxyBackground
from hive.link.helper import Ended
from hive.link.leases import LeaseHolder
from hive.link.link import LinkReply, failed
from hive.link.messages import AgentRow, DaemonTable, Done, Failed, Marks, Open, ProxyTable, Refused
from hive.link.parking import UseParked
from hive.link.pool import SlotDemands, SlotFlows
from hive.link.proxy_link import ProxyGates
from hive.link.responses import FromProxy
from hive.link.runner import CALLS_MAX, RunnerCall, RunnerTokens, TokenRow
from hive.link.slots import SlotProcess
from hive.link.usage import AskSpent, SpentIs, UsageBatch
from hive.pooling.comfy_servers import ComfyServers
from hive.pooling.deployments import Deployments
from hive.pooling.entry_facts import FileFacts
from hive.pooling.footprints import Footprints
from hive.pooling.lease_desk import LeaseDesk
from hive.pooling.leases import PoolLeases
from hive.pooling.ollama_slots import OllamaSlots, ollama_address
from hive.pooling.pool_clients import PoolClients
from hive.pooling.pool_memory import PoolMemory
from hive.pooling.pool_orders import PoolOrders, why_off
from hive.pooling.pooling import ModelPool
from hive.pooling.remote_slots import RemoteSlots, address_of
from hive.pooling.slot_servers import OneOfTwo
from hive.sandbox.client import SandboxClient
from hive.settings.file import Loaded, SettingOrigin
from hive.settings.table import Paths, Settings
from hive.store import runtime_settings
from hive.store.database import Database
from hive.store.job_turns import KIND as MODEL_JOB
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
        is_found: bool = False,
        isolation: Isolation = Isolation.NONE,
        freezer: str = "",
        run: str = "",
        origins: Mapping[str, SettingOrigin] | None = None,
        api: WantedAddress | None = None,
        rules: Path | None = None,
        config_file: Path | None = None,
    ) -> None:
        """Opens the database and makes every service, in their order; nothing is begun. Blocks, on a running loop.

        Raises WrongState where another daemon has the state directory, ConfigError, NotPermitted, StoreFull.

        `origins`: where each of the settings comes from, by `section.key`. `api`: where the API is on TCP too.
        `rules`: the file governance.toml, whether or not there is one. `config_file`: the one the settings are of.

        `freezer`: how agents are frozen on this host, as far as the daemon can tell before it has seen one.

        `is_found`: nobody named the address of `backend`. `run`: which `hive up` this is a part of; what it was
        switched to is forgotten with it.
        """
        settings, no_slots = with_slot_place(settings, is_apart=paths.apart, is_server=False)
        if no_slots:
            log.warning("parking_off reason=%r", no_slots)
        self._paths = paths
        self._settings = settings
        self._config_file = config_file
        self._accounts = accounts.appliance() if paths.apart else accounts.own()
        self._api_wanted = api
        self._api_at = ListenPlace(settings.api.listen)
        self._api: ApiServer | None = None
        self._runner_calls = 0
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
        self._left_box = LeftBox(self._note_left)
        self._runner_counts = RunnerCounts()
        self._live = Live(redis, on_new_run=self._say_to_redis)
        self._audit_log = AuditLog(self._database, self._live)
        self._api_tokens = LiveTokens(self._database, internal=self._internal_token, api_token=api_token)
        self._api_tokens.on_change = self._tell_tokens
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
            on_holder_moved=self._holder_moved,
        )
        self._runtimes = RuntimeWatch(self._helper)
        self._templates = TemplateDesk(
            settings=settings,
            database=self._database,
            audit_log=self._audit_log,
            helper=self._helper,
            has_uids=isolation is not Isolation.NONE,
        )

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
            template_of=self._templates.spec_of,
            lives=lives,
            own_networks=isolation is Isolation.FULL,
        )
        self.roster = self._templates.roster = Roster(self.effects, lives)
        self._budgets = BudgetReport(
            database=self._database,
            roster=self.roster,
            audit_log=self._audit_log,
            settings=lambda: self.effects.settings,
        )
        self._responses = KeptResponses(
            ResponsesFile(paths.responses),
            is_there=lives.__contains__,
            settings=lambda: self.effects.settings.proxy,
        )
        self._is_first_start = recorded.is_first_start
        self._config = RuntimeConfig(
            settings,
            origins or {},
            recorded.runtime_settings,
            database=self._database,
            effects=self.effects,
            proxy_link=self._proxy_link,
            live=self._live,
            on_change=self._settings_changed,
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
            self.roster,
            self.effects,
            self._proxy_link,
            self._audit_log,
            pooled=lambda: self._pool.offered() | self._adapters.offered(),
        )

        # The inference server.
        inference = settings.inference
        self._active = Active(
            effects=self.effects, live=self._live, proxy_link=self._proxy_link, audit_log=self._audit_log
        )
        self._jobs = Jobs(self._database, self._audit_log)
        self._model_jobs = ModelJobs(
            paths,
            settings=lambda: self.effects.settings.jobs,
            jobs=self._jobs,
            database=self._database,
            audit_log=self._audit_log,
            roster=self.roster,
            executor=executor,
            proxy_link=self._proxy_link,
            tenants=lambda: self.effects.settings.tenants,
        )
        self._background = BackgroundResponses(
            self._model_jobs,
            self._jobs,
            self._database,
            self._responses,
            agent_of=self._agent_of,
            is_kept=lambda: bool(self.effects.settings.proxy.responses_kept_mb),
        )
        self._responses.in_background = self._background
        self._governor = Governor(
            rules,
            installed=paths.apart,
            hmac_key_file=lambda: self.effects.settings.governance.hmac_key_file,
            database=self._database,
            audit_log=self._audit_log,
        )
        models_dir = ModelsDir(place_of(inference.models_dir, is_installed=paths.apart, state=paths.state))
        gpus = GpuMemoryReader()
        given = None if backend is None else Target(*backend)
        self._is_found = is_found
        entries = entries_of(settings, models_dir.paths() if settings.pool.found else {}) if has_helper else {}
        adapters = self._adapter_files = AdapterDirectory(paths.adapters)
        for name in adapters.tidy():
            log.warning("adapter_not_whole name=%s: it is removed", name)
        answering = {(row.name, row.digest) for row in recorded.adapters}
        installed = [record for record in adapters.records() if (record.name, record.digest) in answering]
        entries |= adapter_entries(entries, [(record, adapters.path(record)) for record in installed])
        self._ollama = OllamaSlots(
            entries.values(),
            ollama_address(inference, has_units=self._has_units, in_use=[recorded.chosen, given]),
            on_moved=self._slot_moved,
            on_list=lambda: self._pool.files_changed(),
            read_log=self._ollama_log if self._has_units else None,
        )
        self._remotes = RemoteSlots(
            entries.values(),
            lambda: self.effects.settings,
            on_moved=self._slot_moved,
            on_list=lambda: self._pool.files_changed(),
        )
        self._comfy = ComfyServers(self._helper, entries.values(), self._address_of)
        started = OneOfTwo(self._comfy, self._ollama, self._ollama.ids)
        self._servers = OneOfTwo(started, self._remotes, self._remotes.ids)
        self._footprints = Footprints(
            self._database, lambda: self.effects.settings, recorded.footprints, self._facts_of
        )
        self._clients = PoolClients(lambda: self.effects.settings, self._is_awake, self._model_jobs.between_turns)
        self._leases = PoolLeases(
            recorded.leases,
            settings=lambda: self.effects.settings,
            database=self._database,
            audit_log=self._audit_log,
            helper=self._helper,
            live=self._live,
            why_off=why_off(settings),
        )
        self._deployments = Deployments(
            recorded.deployments,
            database=self._database,
            audit_log=self._audit_log,
            has_rule=self._governor.has_rule,
        )
        self._adapter_registry = AdapterRegistry(
            recorded.deployed_adapters, database=self._database, has_rule=self._governor.has_rule
        )
        self._pool = ModelPool(
            entries,
            settings=lambda: self.effects.settings,
            helper=self._servers,
            proxy_link=self._proxy_link,
            memory=PoolMemory(gpus, lambda: self.effects.settings),
            footprints=self._footprints,
            clients=self._clients,
            leases=self._leases,
            audit_log=self._audit_log,
            address_of=self._address_of,
            pins=recorded.pins,
            why_not_approved=self._why_not_approved,
        )
        self._transcriptions = TranscriptionWatch(self._pool)
        self._speculation = SpeculationWatch(active=self._active, pool=self._pool, audit_log=self._audit_log)
        self._deployment_watch = DeploymentWatch(
            self._deployments,
            pool=self._pool,
            active=self._active,
            settings=lambda: self.effects.settings,
            resumed=lambda: self._load_tasks.resumed(),
        )
        self._adapters = Adapters(
            adapters,
            recorded.adapters,
            pool=self._pool,
            active=self._active,
            proxy_link=self._proxy_link,
            database=self._database,
            audit_log=self._audit_log,
            settings=lambda: self.effects.settings,
            check=self._check_adapter,
            why_not_approved=self._adapter_registry.why_not_approved,
        )
        self._load_approvals = LoadApprovals(
            self._deployments, active=self._active, proxy_link=self._proxy_link, has_rule=self._governor.has_rule
        )
        self._models = Models(
            effects=self.effects,
            active=self._active,
            jobs=self._jobs,
            audit_log=self._audit_log,
            roster=self.roster,
            directory=models_dir,
            pooled=lambda: self._pool.offered() | self._adapters.offered(),
            deployments=self._deployments,
        )
        self._parking = Parking(
            key=key,
            settings=lambda: self.effects.settings,
            roster=self.roster,
            active=self._active,
            pool=self._pool,
            proxy_link=self._proxy_link,
            database=self._database,
            apart=(
                ServersApart(self._helper.server_program, paths.slots, accounts.servers_uid()) if paths.apart else None
            ),
        )
        self.effects.on_changed, self.effects.on_forgotten = self._parking.changed, self._parking.forgotten
        self._cache = CacheFlusher(
            recorded=recorded.epochs,
            effects=self.effects,
            roster=self.roster,
            active=self._active,
            pool=self._pool,
            models=self._models,
            proxy_link=self._proxy_link,
            jobs=self._jobs,
            database=self._database,
            audit_log=self._audit_log,
            parking=self._parking,
            served_as=self._adapters.served_as,
        )
        self._adapter_orders = AdapterOrders(
            directory=adapters,
            keys=self._adapter_keys,
            settings=lambda: self.effects.settings.adapters,
            served=self._adapters,
            registry=self._adapter_registry,
            models=self._models,
            pool=self._pool,
            jobs=self._jobs,
            database=self._database,
            audit_log=self._audit_log,
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
            deployments=self._deployments,
        )
        for job in recorded.jobs:
            self._jobs.adopt(job)
        switches = [job for job in recorded.jobs if is_carried_on(job, run)][:1]
        for job in switches:
            self._switcher.adopt(job)
        self._loads_left = recorded.loads
        tasks = {load.job for load in recorded.loads}
        self._given_up = [job for job in recorded.jobs if job not in switches and job.id not in tasks]
        self._model_jobs_left = [job for job in self._given_up if job.kind == MODEL_JOB]
        self._given_up = [job for job in self._given_up if job.kind != MODEL_JOB]

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
            budgets=self._budgets,
            freezer=freezer,
        )
        health = HealthReport(
            epoch=self.epoch,
            started_at=started_at,
            paths=paths,
            config_file="" if self._config_file is None else os.path.abspath(self._config_file),
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
            speculation=self._speculation,
            templates=self._templates,
        )
        orders = PoolOrders(
            self._pool,
            why_off=why_off(settings),
            jobs=self._jobs,
            database=self._database,
            audit_log=self._audit_log,
            helper=self._servers,
            deployments=self._deployments,
            has_rule=self._governor.has_rule,
            in_use=lambda: self.effects.backend,
        )
        runner = self._runner(orders, health, gpus, started_at)
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
                templates=self._templates,
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
            model_jobs=self._model_jobs,
            models=self._models,
            pool=orders,
            deployments=self._deployments,
            adapters=self._adapter_orders,
            cache=self._cache,
            runner=runner,
            tasks=TaskReport(settings=lambda: self.effects.settings, roster=self.roster, proxy_link=self._proxy_link),
            templates=self._templates,
            leases=LeaseDesk(self._leases, socket=str(paths.lease_socket)),
            governance=self._governor,
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
            budgets=self._budgets,
            state_queries=StateQueries(paths.database, self._responses.readable),
            health=health,
            speculation=self._speculation,
            scraper=Scraper(
                started_at=started_at,
                state_dir=paths.state,
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
                leases=self._leases,
                pool_view=orders.view,
                cache=lambda: {**self._cache.counts.metrics(), **self._parking.counts.metrics()},
                budgets=self._budgets.metrics,
                runner_counts=self._runner_counts,
                memory_split=self._memory_split.metrics,
                speculation=self._speculation.metrics,
                transcriptions=self._transcriptions.metrics,
                adapters=self._adapter_orders.metrics,
                jobs=self._model_jobs.metrics,
                templates=self._templates.metrics,
            ),
        )

    def _runner(self, orders: PoolOrders, health: HealthReport, gpus: GpuMemoryReader, started_at: float) -> RunnerDesk:
        """Makes what answers the runner API."""
        self._load_tasks = LoadTasks(
            database=self._database,
            jobs=self._jobs,
            pool=self._pool,
            models=self._models,
            deployments=self._deployments,
            measure=self._measured_of,
            left=self._loads_left,
        )
        self._memory_split = MemorySplit(self._pool, self._active)
        views = RunnerViews(
            pool=self._pool,
            active=self._active,
            effects=self.effects,
            gpus=gpus,
            proxy_link=self._proxy_link,
            counts=self._runner_counts,
            catalog=lambda: self._models.catalog,
            deployments=self._deployments,
            memory=self._memory_split,
            adapters=self._adapters.offered,
        )
        return RunnerDesk(
            views=views,
            tasks=self._load_tasks,
            orders=orders,
            models=self._models,
            active=self._active,
            jobs=self._jobs,
            proxy_link=self._proxy_link,
            runner_id=self._settings.runner.id or socket.gethostname(),
            started_at=started_at,
            is_degraded=lambda: bool(health.conditions()),
            cache=self._cache,
        )

    def _measured_of(self, model: str) -> int | None:
        """Bytes that a model of the pool holds, None where that is not known."""
        slot = next((slot for slot in self._pool.slots.values() if slot.model == model), None)
        return None if slot is None else measured_bytes(slot)

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
            await self._governor.begin()
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
            self._active.choose(given, is_named=not self._is_found)
        elif self._has_units and not inference.backend_url:
            self._active.chosen.clear()
            if kind is not None:
                self._active.choose(service(kind))
        elif kind is not None:
            self._active.choose(Target(kind, known), is_fixed=True)
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

    def _settings_changed(self) -> None:
        self._responses.settings_changed()
        self._remotes.guard_changed()
        self._budgets.settings_changed()

    async def _seed_cloud(self) -> None:
        """At the first start on this database the environment may say how far requests may go."""
        if not self._is_first_start:
            return
        word = cloud.seed_of(os.environ)
        if word is not None and not cloud.is_set_by_environment(os.environ):
            await self._config.change({cloud.SETTING: str(word)}, "hive")
            self._audit_log.note("config.seeded", detail={"name": cloud.SETTING, "value": str(word)})
        await self._database.write(cloud.note_seeded)

    async def _begin(self) -> None:
        await self._seed_cloud()
        if not self._settings.sandbox.enabled:
            self._reconciled.set()
        spawn(self._live.run(), name="redis")
        self._say_to_redis()
        self._spawn(self._runtimes.run(), "runtimes")
        self._spawn(self._prewarmer.run(), "prewarm")
        self._spawn(self._templates.run(), "templates")
        self._active.watch()
        await self._jobs.give_up(self._given_up)
        self._spawn(self._model_jobs.recover(self._model_jobs_left), "jobs of before")
        await self._load_tasks.forsake()
        self._spawn(self._load_tasks.resume(), "load tasks")
        await self._cache.begin()
        await self._parking.begin()
        self._spawn(self._adapter_orders.run(), "adapter orders")
        self._spawn(self._models.tidy(), "tidy models")
        self._spawn(self._switcher.run(), "switch")
        self._spawn(self._ollama.run(), "ollama")
        self._spawn(self._remotes.run(), "remote models")
        self._spawn(self._comfy.run(), "comfyui")
        self._spawn(self._pool.run(), "pool")
        self._spawn(self._adapters.run(), "adapters")
        self._spawn(self._deployment_watch.run(), "deployments")
        self._spawn(self._speculation.run(), "speculation")
        self._spawn(self._transcriptions.run(), "transcriptions")
        self._spawn(self._load_approvals.run(), "signed loads")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RECONCILED_WITHIN_S):
                await self._known()
        await self._listen()
        spawn(self._usage.run(), name="usage")
        spawn(self._usage.take_over(), name="old usage")
        self._spawn(self.sleeper.run(), "idle")
        self._spawn(self._audit_log.run(), "audit")
        self._spawn(
            UsageHistory(self._database, self._settings.daemon, self._budgets.periods_in_use).run(), "usage history"
        )
        self._spawn(self._message_delivery.run(), "messages")
        self._spawn(self._api_tokens.run(), "tokens")
        self._spawn(self._governor.run(), "governance")
        self._spawn(self._scheduler.run(), "schedules")
        self._spawn(self._responses.run(), "responses")
        self._spawn(self._budgets.run(), "budgets")
        self._spawn(self._left_box.run(), "left the box")
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
        self.services.runner.is_stopping = True
        await self._pool.close()  # before anything that takes time: the models may be ending, too
        await self._model_jobs.close()
        await self._ollama.close()
        api, self._api = self._api, None
        if api is not None:
            await api.close()
        for task in self._tasks:
            task.cancel()
        self._switcher.close()
        self._models.close()
        self._adapter_orders.close()
        self._cache.close()
        await self._parking.close()
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

    def reload(self, load: Callable[[], Loaded]) -> str:
        """Takes over what hive.conf says now of tenants, tasks and budgets, if all of it is right; the status in
        words."""
        try:
            found = load()
            changed = self._config.read_again(found.settings, found.origins)
        except HiveError as error:
            log.error("config_reload_failed error=%r old_stays=true", error.message)
            return "serving with the old configuration: the new one is wrong"
        log.info("config_reloaded changed=%s", ",".join(changed) or "-")
        return "serving"

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

    def _holder_moved(self, holder: LeaseHolder) -> None:
        self._leases.holder_moved(holder)

    async def _ollama_log(self, lines: int) -> str:
        return await self._helper.backend_log(BackendKind.OLLAMA, lines=lines)

    async def _facts_of(self, entry: ModelEntry) -> FileFacts:
        return await (self._remotes if entry.is_remote else self._ollama).facts_of(entry)

    def _check_adapter(self, record: AdapterRecord) -> None:
        """Raises SignatureUnverifiable where no key that is trusted now has signed it, SignatureMismatch where its
        files are changed. It reads all of them."""
        self._adapter_keys().check(record, self.effects.settings.adapters.signatures)
        self._adapter_files.check(record)

    def _why_not_approved(self, entry: ModelEntry, digest: str) -> str:
        """The reason that the pool may not load this by itself, a clause; empty where it may."""
        why, adapter = self._deployments.why_not_approved(entry, digest), entry.adapter
        return why if why or adapter is None else self._adapter_registry.why_not_approved(adapter.name, adapter.digest)

    def _adapter_keys(self) -> TrustedKeys:
        return TrustedKeys(self._paths.adapter_keys(self.effects.settings.adapters.keys_dir))

    def _address_of(self, entry: ModelEntry) -> str:
        if entry.has_server_here:
            return str(self._paths.slot_socket(entry.id))
        return address_of(entry) if entry.is_remote else self._ollama.address

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
        epochs = self._cache.epochs()
        return DaemonTable(
            agents=[self.effects.row(life.agent, life) for life in self.roster],
            backend=self.effects.backend,
            models=self.effects.models,
            marks=self._usage.marks,
            internal_digest=digest(self._internal_token),
            switching_to=self._switcher.towards or self._active.closed_for,
            backend_wait_s=LONGEST_S if self._active.closed_for else self._switcher.wait_s,
            runtime_settings=self._config.values,
            slots=self._pool.rows(),
            cache_epochs=epochs.numbers,
            cache_fresh=epochs.fresh,
            signed=self._load_approvals.now(),
            adapters=self._adapters.routes(),
        )

    def row(self, agent: Agent) -> AgentRow:
        return self.effects.row(agent, self.roster.get(agent.id))

    def proxy_here(self, table: ProxyTable) -> None:
        self._usage.proxy_here(table.spooled)
        self.roster.proxy_table(table.agents)
        self._message_delivery.proxy_here()
        self._prewarmer.proxy_here()
        self._pool.proxy_here()
        self._parking.proxy_here()
        self._tell_tokens()
        self._model_jobs.proxy_here()
        self._load_approvals.tell(again=True)
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

    def _tell_tokens(self) -> None:
        """The proxy lets callers of the runner's listener in by their tokens."""
        keys = self._api_tokens.keys()
        tokens = {key.digest: TokenRow(key.person.role, key.expires_at) for key in keys}
        self._proxy_link.say(RunnerTokens(tokens=tokens))

    def use_parked(self, message: UseParked, reply: LinkReply) -> None:
        self._parking.use(message, reply)

    def runner_asks(self, call: RunnerCall, reply: LinkReply) -> None:
        self._spawn(self._answer_runner(call, reply), "runner")

    async def _answer_runner(self, call: RunnerCall, reply: LinkReply) -> None:
        api = self._api
        if api is None:
            reply(failed(DependencyDown("Hive is starting", hint="ask again in a moment")))
            return
        if self._runner_calls >= CALLS_MAX:  # a client that left is answered to the end all the same
            reply(failed(Saturated(f"{self._runner_calls} requests to the runner are being answered")))
            return
        self._runner_calls += 1
        try:
            outcome = await outcome_of(api.relayed(call))
        finally:
            self._runner_calls -= 1
        reply(failed(outcome) if isinstance(outcome, HiveError) else outcome)

    def usage(self, batch: UsageBatch) -> None:
        self._usage.take(batch)

    def spent(self, asked: AskSpent, answer: Callable[[SpentIs | Failed], None]) -> None:
        self._spawn(self._budgets.answer(asked, answer), "what was spent")

    def active(self, agents: dict[str, float]) -> None:
        for agent, at in agents.items():
            if self.roster.get(agent) is not None:  # one that was just removed has no keys any more
                self._live.touch(agent, at)

    def _used(self, events: list[UsageEvent]) -> None:
        self._counters.add(events)
        self._runner_counts.add(events)
        self._prewarmer.used(events)
        self._cache.used(events)
        self._parking.used(events)
        self._clients.used(events, time.monotonic(), time.time())
        self._left_box.ended(events, time.monotonic())
        self._budgets.used(events)
        for agent in {event.agent_id for event in events}:
            if self.roster.get(agent) is not None:
                self._show_totals(agent)

    def _note_left(self, agent: str, model: str, tenant: str, requests: int) -> None:
        life = self.roster.get(agent)
        detail = {"name": agent if life is None else life.agent.name, "model": model, "tenant": tenant}
        self._audit_log.note(EVENT, target=agent, detail={**detail, "requests": requests})

    def about_responses(self, message: FromProxy, reply: LinkReply | None) -> None:
        self._responses.hear(message, reply)

    def _agent_of(self, agent: str) -> Agent | None:
        life = self.roster.get(agent)
        return None if life is None else life.agent

    def about_background(self, message: FromProxyBackground, reply: LinkReply) -> None:
        self._background.hear(message, reply)

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


async def _run(
    make: Callable[[], Daemon],
    notifier: Notifier,
    watch_fd: int | None,
    load: Callable[[], Loaded] | None,
) -> None:
    leave = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, leave.set)
    if watch_fd is not None:
        parent.watch(watch_fd, leave.set)
        parent.die_with_parent(signal.SIGTERM)
    daemon = make()

    def reload() -> None:
        if load is None:
            log.warning("config_not_reloaded reason='there is no file to read again'")
            return
        notifier.reloading()
        notifier.ready(daemon.reload(load))

    loop.add_signal_handler(signal.SIGHUP, reload)
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
    is_found: bool = False,
    isolation: Isolation = Isolation.NONE,
    origins: Mapping[str, SettingOrigin] | None = None,
    move_api: bool = False,
    watch_fd: int | None = None,
    rules: Path | None = None,
    load: Callable[[], Loaded] | None = None,
    config_file: Path | None = None,
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
            paths,
            settings,
            backend=backend,
            is_found=is_found,
            isolation=isolation,
            freezer=freezer,
            run=run,
            origins=origins,
            api=api,
            rules=rules,
            config_file=config_file,
        )

    notifier = Notifier(os.environ, pid=os.getpid())
    try:
        uvloop.run(_run(make, notifier, watch_fd, load))
    except HiveError as error:
        print(as_said(error), file=sys.stderr)  # noqa: T201
        return error.exit_code
    return 0
