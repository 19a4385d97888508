"""The daemon: opens everything, ties it together, and hears what helper, proxy, backend and Redis say.

Composition root. What it is made of decides nothing here: lives decide about agents (agents/lifecycle.py), the
front desk answers the API.
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
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

import uvloop

from hive.agents.lifecycle import Life
from hive.agents.roster import Roster
from hive.agents.sleeper import Sleeper
from hive.agents.tokens import TokenKind, digest
from hive.agents.turns import outcome_of
from hive.control import keyfiles
from hive.control.api import Server, serve
from hive.control.backends import BackendWatch
from hive.control.courier import Courier
from hive.control.frontdesk import FrontDesk, Parts
from hive.control.gates import ProxyGates
from hive.control.journal import Journal
from hive.control.scheduler import Scheduler
from hive.control.stats import Counters
from hive.control.usage import UsageConsumer
from hive.control.world import DaemonWorld
from hive.domain import ALIVE, Agent, BackendKind, Isolation
from hive.errors import ConfigError, HiveError
from hive.host import parent
from hive.host.cgroup import Subtree
from hive.link.messages import AgentRow, Backend, DaemonTable, Ended, Marks, Open, ProxyTable, Refused
from hive.sandbox.client import SandboxClient
from hive.settings import Paths, Settings
from hive.store import agents, messages, runtime_settings, schedules, usage
from hive.store.database import Database
from hive.store.live import Live
from hive.store.schedules import Schedule
from hive.tasks import spawn

log = logging.getLogger("hive.daemon")

RECONCILED_WITHIN_S = 2.0
"""The API answers after the helper told the truth, or after this long without it."""
RECONCILE_AGAIN_S = 0.5
SETTLED_WITHIN_S = 5.0
"""What is under way may take so long to end when the daemon leaves; the rest the next one puts right."""
PROXY_PORT = "proxy.port"
"""Runtime setting: the port of the proxy that living agents have in their environment."""


class Recorded(NamedTuple):
    """What an earlier daemon left."""

    agents: list[Agent]
    used: usage.Cost
    proxy_port: int | None
    with_messages: list[str]
    schedules: list[Schedule]


def read_recorded(conn: sqlite3.Connection) -> Recorded:
    port = runtime_settings.get(conn, PROXY_PORT)
    used = usage.usage_since(conn, 0.0).totals
    return Recorded(
        agents.all(conn),
        used,
        int(port) if port is not None else None,
        list(messages.waiting(conn)),
        schedules.all(conn),
    )


class Daemon:
    """One running daemon."""

    def __init__(
        self,
        paths: Paths,
        settings: Settings,
        *,
        backend: tuple[BackendKind, str] | None = None,
        isolation: Isolation = Isolation.NONE,
        freezer: str = "",
    ) -> None:
        """`freezer`: how agents are frozen on this host, as far as the daemon can tell before it has seen one."""
        self._paths = paths
        self._settings = settings
        self._backend = backend
        self._isolation = isolation
        self._freezer = freezer
        self.epoch = f"{int(time.time()):x}{secrets.token_hex(3)}"
        self._tasks: set[asyncio.Task[None]] = set()
        self._reconciled = asyncio.Event()
        self._api: Server | None = None

    def __repr__(self) -> str:
        return f"<Daemon {self.epoch} of {self._paths.state}>"

    # Coming and going ---------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Returns when the API answers. Redis, helper, proxy and backend may come later.

        Raises WrongState where another daemon has the state directory, ConfigError, NotPermitted, StoreFull.
        """
        key = keyfiles.box_key(self._paths.box_key)
        self._internal_token = keyfiles.internal_token(self._paths.internal_token, os.environ)
        self._database = Database.open(self._paths.database)
        try:
            recorded: Recorded = await self._database.read(read_recorded)
        except BaseException:
            self._database.close()
            raise
        self._compose(recorded, key)
        try:
            await self._usage.load()
            await self._begin()
        except BaseException:
            await self.close()
            raise

    def _compose(self, recorded: Recorded, key: bytes) -> None:
        self._counters = Counters(recorded.agents, recorded.used)
        self._live = Live(self._paths.redis_socket, on_new_run=self._say_to_redis)
        self._journal = Journal(self._database, self._live)
        self._usage = UsageConsumer(
            self._live,
            self._database,
            on_marks=lambda marks: self._gates.say(Marks(marks=marks)),
            on_usage=self._counters.add,
        )
        self._gates = ProxyGates(epoch=self.epoch, events=self)
        self._helper = SandboxClient(
            self._paths.sandbox_socket,
            role="daemon",
            epoch=self.epoch,
            on_ended=self._ended,
            on_thawed_alone=lambda agent, reason: self.roster.thawed_alone(agent, reason),
            on_connected=lambda: self._spawn(self._reconcile(), "reconcile"),
        )
        self.world = DaemonWorld(
            self._paths,
            self._settings,
            key=key,
            database=self._database,
            live=self._live,
            journal=self._journal,
            counters=self._counters,
            helper=self._helper,
            gates=self._gates,
            own_networks=self._isolation is Isolation.FULL,
        )
        self.roster = Roster(self.world)
        for agent in recorded.agents:
            self.roster.add(agent)
            has_port = agent.status in ALIVE and not self.world.has_own_network(agent.spec)
            if recorded.proxy_port is not None and has_port:
                self.world.started_with_port[agent.id] = recorded.proxy_port
        self.sleeper = Sleeper(self.roster, self.world)
        self._courier = Courier(
            self.roster,
            self._database,
            self._journal,
            self._gates,
            recorded.with_messages,
            token=lambda agent: self.world.token(agent, TokenKind.INGRESS),
            answer_s=self._settings.proxy.first_byte_s,
        )
        self._scheduler = Scheduler(self.roster, self._database, self._journal, recorded.schedules)
        self._watch = self._backend_watch()

    def _backend_watch(self) -> BackendWatch | None:
        inference = self._settings.inference
        if self._backend is None and inference.enabled == "false":
            return None
        kind, address = self._backend or (None, f"{inference.host}:{inference.port}")
        if kind is None and inference.backend != "auto":
            kind = BackendKind(inference.backend)
        watch = BackendWatch(kind, address, settings=self._settings, on_checked=self._backend_checked)
        self.world.backend = watch.info
        return watch

    async def _begin(self) -> None:
        spawn(self._live.run(), name="redis")
        self._say_to_redis()
        if self._watch is not None:
            self._spawn(self._watch.run(), "backend")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._known(), RECONCILED_WITHIN_S)
        try:
            self._gates.listen(self._paths.link_socket)
            self._api = await serve(
                self.desk(), self._paths.api_socket, pause_timeout_s=self._settings.sleep.pause_timeout_s
            )
        except OSError as error:
            raise ConfigError(f"cannot listen in {self._paths.runtime}: {error.strerror}") from error
        spawn(self._usage.run(), name="usage")
        self._spawn(self.sleeper.run(), "idle")
        self._spawn(self._courier.run(), "messages")
        self._spawn(self._scheduler.run(), "schedules")
        log.info("daemon_ready agents=%d reconciled=%s", len(self.roster), self._reconciled.is_set())

    async def _known(self) -> None:
        """Returns when agents and backend have been looked at: who asks from then on hears what is so."""
        await self._reconciled.wait()
        if self._watch is not None:
            await self._watch.checked.wait()

    def desk(self) -> FrontDesk:
        return FrontDesk(
            Parts(
                epoch=self.epoch,
                started_at=time.time(),
                paths=self._paths,
                settings=self._settings,
                isolation=self._isolation,
                freezer=self._freezer,
                internal_token=self._internal_token,
                database=self._database,
                live=self._live,
                journal=self._journal,
                counters=self._counters,
                consumer=self._usage,
                gates=self._gates,
                helper=self._helper,
                world=self.world,
                roster=self.roster,
                sleeper=self.sleeper,
                courier=self._courier,
                scheduler=self._scheduler,
            )
        )

    async def close(self) -> None:
        """Ends what is under way towards awake, writes what is unwritten, closes. Who sleeps sleeps on."""
        if self._api is not None:
            await self._api.close()
        for task in self._tasks:
            task.cancel()
        self._scheduler.close()
        await self._courier.close()
        settling = [spawn(life.settle(), name=f"settle {life.agent.name}") for life in self.roster]
        if settling:
            _, late = await asyncio.wait(settling, timeout=SETTLED_WITHIN_S)
            for task in late:
                task.cancel()
        self._gates.stop()
        self._helper.close()
        await self._usage.close()
        await outcome_of(self._journal.flush())
        await self._live.close()
        self._database.close()
        log.info("daemon_left")

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = spawn(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # The helper ---------------------------------------------------------------------------------------------------

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

    def _ended(self, ended: Ended) -> None:
        self.roster.ended(ended.agent, ended.exit_code, ended.pid, ended.why)

    # The proxy (gates.ProxyEvents) --------------------------------------------------------------------------------

    def table(self) -> DaemonTable:
        return DaemonTable(
            agents=[self.world.row(life.agent, life) for life in self.roster],
            backend=self.world.backend,
            models=self.world.models,
            marks=self._usage.marks,
            internal_digest=digest(self._internal_token),
        )

    def row(self, agent: Agent) -> AgentRow:
        return self.world.row(agent, self.roster.get(agent.id))

    def proxy_here(self, table: ProxyTable) -> None:
        self.roster.proxy_table(table.agents)
        self._courier.proxy_here()
        self._spawn(self._adopt_port(table.port), "port")
        self._spawn(self._prune(set(table.spooled)), "prune")

    def proxy_lost(self) -> None:
        self.roster.proxy_lost()

    def quiet(self, agent: str) -> None:
        self.roster.quiet(agent)

    def wake(self, agent: str, cause: str, answer: Callable[[Open | Refused], None]) -> None:
        self.roster.wake(agent, cause, answer)

    async def _adopt_port(self, port: int) -> None:
        """Who lives with another port of the proxy in its environment would talk to nobody: it is started anew."""
        known = self.world.started_with_port
        moved = [life for life in self.roster if life.status in ALIVE and known.get(life.agent.id, port) != port]
        await asyncio.gather(*(self._restart_for_port(life, known[life.agent.id], port) for life in moved))

        def keep(conn: sqlite3.Connection) -> None:
            runtime_settings.put(conn, PROXY_PORT, str(port), actor="hive", now=time.time())

        if isinstance(error := await outcome_of(self._database.write(keep)), HiveError):
            log.error("port_not_kept port=%d error=%s", port, error.message)

    async def _restart_for_port(self, life: Life, was: int, port: int) -> None:
        log.warning("agent_restarted agent=%s reason=proxy_port was=%d now=%d", life.agent.name, was, port)
        detail = {"name": life.agent.name, "was": was, "now": port}
        self._journal.note("agent.port_moved", target=life.agent.id, detail=detail)
        if isinstance(error := await outcome_of(life.restart("hive")), HiveError):
            log.error("agent_not_restarted agent=%s error=%s", life.agent.name, error.message)

    async def _prune(self, spooled: set[str]) -> None:
        if isinstance(error := await outcome_of(self._usage.prune(spooled)), HiveError):
            log.warning("marks_not_pruned error=%s", error.message)

    # Backend and Redis --------------------------------------------------------------------------------------------

    def _backend_checked(self, changed: bool) -> None:
        assert self._watch is not None
        was_up = self.world.backend is not None and self.world.backend.up
        self.world.backend, self.world.models = self._watch.info, self._watch.models
        self._live.set_models(self.world.models)  # every time: the key lives for 300 s
        if not changed:
            return
        self._live.set_backend(self.world.backend)
        self._gates.say(Backend(backend=self.world.backend, models=self.world.models))
        if self._watch.up != was_up and self.world.backend is not None:
            detail = {"backend": self.world.backend.label, "models": len(self.world.models)}
            self._journal.note("backend.up" if self._watch.up else "backend.down", detail=detail)

    def _say_to_redis(self) -> None:
        """All that only the daemon can rebuild."""
        for life in self.roster:
            self.world.put(life.agent)
            used = self._counters.used(life.agent.id)
            self._live.set_totals(
                life.agent.id, tokens_in=used.tokens_in, tokens_out=used.tokens_out, requests=used.requests
            )
        self._live.set_backend(self.world.backend)
        self._live.set_models(self.world.models)


# The program ----------------------------------------------------------------------------------------------------------


async def _run(daemon: Daemon, watch_fd: int | None) -> None:
    leave = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, leave.set)
    if watch_fd is not None:
        parent.watch(watch_fd, leave.set)
        parent.die_with_parent(signal.SIGTERM)
    await daemon.open()
    await leave.wait()
    await daemon.close()


def main(
    paths: Paths,
    settings: Settings,
    *,
    backend: tuple[BackendKind, str] | None = None,
    isolation: Isolation = Isolation.NONE,
    watch_fd: int | None = None,
) -> int:
    """Runs the daemon until SIGTERM, SIGINT, or the end of whoever holds the other end of `watch_fd`. The exit code."""

    async def run() -> None:
        freezer = "cgroup" if Subtree.find(paths.state) is not None else "signal"
        daemon = Daemon(paths, settings, backend=backend, isolation=isolation, freezer=freezer)
        await _run(daemon, watch_fd)

    try:
        uvloop.run(run())
    except HiveError as error:
        print(f"hive: {error.message}" + (f"\nhint: {error.hint}" if error.hint else ""), file=sys.stderr)  # noqa: T201
        return error.exit_code
    return 0
