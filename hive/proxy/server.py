"""The proxy process: listeners, the links to daemon and helper, and the data path between them (composition root)."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable
from functools import partial

import uvloop

from hive.domain import WakeCause
from hive.errors import DependencyDown, HiveError
from hive.link.client import LinkClient
from hive.link.link import Link, Reply
from hive.link.messages import (
    Activities,
    AgentGone,
    AgentIs,
    AskActivity,
    AskListeners,
    Asleep,
    Backend,
    Busy,
    Close,
    Closed,
    DaemonTable,
    Done,
    Hello,
    Leaving,
    ListenerGone,
    Marks,
    Message,
    Open,
    ProxyTable,
    Quiet,
    Refused,
    StillClosed,
    Wake,
)
from hive.link.messages import Listener as ListenerIs
from hive.proxy.datapath import DataPath
from hive.proxy.forward import Exchange
from hive.proxy.ingress import IngressExchange, IngressPath
from hive.proxy.registry import UNHEARD_S, Entry, Registry
from hive.proxy.spool import UsageLog
from hive.settings import Paths, Settings
from hive.store.live import Live
from hive.tasks import spawn
from hive.wire import connection as wire
from hive.wire.budget import HalfOpen
from hive.wire.deadlines import Deadlines
from hive.wire.listeners import Listener, listen_tcp

log = logging.getLogger("hive.proxy")

SETTLE_S = 0.01
"""How often an agent whose answer is unread, or that had one over TCP, is looked at again while `Quiet` is owed."""
DRAIN_S = 10.0
"""On SIGTERM requests in flight may go on for so long."""
DRAIN_LOOK_S = 0.02


class ProxyServer:
    """One running proxy. `start` binds and dials, `stop` drains."""

    def __init__(self, paths: Paths, settings: Settings) -> None:
        self._paths = paths
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self.epoch = f"{int(time.time()):x}{secrets.token_hex(3)}"
        self._deadlines = Deadlines()
        self.registry = Registry(self, settings.proxy)
        self._live = Live(paths.redis_socket)
        self._usage = UsageLog(paths.spool, self.epoch, self._live)
        self.path = DataPath(
            registry=self.registry,
            settings=settings,
            deadlines=self._deadlines,
            usage=self._usage,
            epoch=self.epoch,
            on_activity=self._touch,
        )
        self.ingress = IngressPath(
            registry=self.registry,
            settings=settings.proxy,
            deadlines=self._deadlines,
            budget=self.path.budget,
            call_later=self._loop.call_later,
        )
        proxy = settings.proxy
        self._limits = wire.Limits(proxy.head_s, proxy.body_idle_s, proxy.keepalive_s, proxy.body_max_bytes)
        self._half_open = HalfOpen()
        self._connections: set[wire.Connection] = set()
        self._listeners: list[Listener] = []
        self._settling: set[str] = set()
        self.port = self.ingress_port = 0

    # start and stop -----------------------------------------------------------------------------------------------

    def start(self, port: int, ingress_port: int, *, move: bool) -> None:
        """Listens and dials. Raises DependencyDown where a port is taken and may not move."""
        self.port = self._listen(port, move, self._model_connection, "the model")
        self.ingress_port = self._listen(ingress_port, move, self._ingress_connection, "ingress")
        spawn(self._usage.run(), name="usage log")
        spawn(self._live.run(), name="redis")
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
        log.info("proxy_ready port=%d ingress_port=%d epoch=%s", self.port, self.ingress_port, self.epoch)

    async def stop(self) -> None:
        """Refuses new callers, lets requests end for up to DRAIN_S, cuts the rest detectably."""
        self.ingress.leaving = True
        for listener in self._listeners:
            listener.close(empty_first=True)
        for _ in range(int(DRAIN_S / DRAIN_LOOK_S)):
            if all(connection.exchange is None for connection in self._connections):
                break
            await asyncio.sleep(DRAIN_LOOK_S)
        for connection in list(self._connections):
            if connection.exchange is None:
                connection.close()
            else:
                connection.cut()
        self._daemon.close()
        self._helper.close()
        await self._usage.close()
        await self._live.close()
        self._deadlines.close()

    def _listen(self, port: int, move: bool, make: Callable[[socket.socket], wire.Connection], what: str) -> int:
        try:
            sock = listen_tcp(port, move=move)
        except OSError as error:
            raise DependencyDown(
                f"port {port} for {what} cannot be taken: {error.strerror}",
                hint=f"find its holder with `ss -ltnp 'sport = :{port}'`, or choose another port in hive.conf",
            ) from error
        bound = int(sock.getsockname()[1])
        self._listeners.append(Listener(sock, make))
        return bound

    # connections --------------------------------------------------------------------------------------------------

    def _model_connection(self, sock: socket.socket) -> wire.Connection:
        return self._connect(sock, partial(Exchange, self.path))

    def _ingress_connection(self, sock: socket.socket) -> wire.Connection:
        return self._connect(sock, partial(IngressExchange, self.ingress))

    def _agent_connection(self, entry: Entry, sock: socket.socket) -> wire.Connection:
        """From an agent's own listener: it is that agent's from accept on."""
        connection = self._connect(sock, partial(Exchange, self.path))
        connection.owner = entry
        entry.connections.add(connection)
        return connection

    def _connect(
        self, sock: socket.socket, open_exchange: Callable[[wire.Connection], wire.Exchange]
    ) -> wire.Connection:
        connection = wire.Connection(
            sock,
            limits=self._limits,
            deadlines=self._deadlines,
            open_exchange=open_exchange,
            stays_open=_agent_sleeps,
            on_closed=self._closed,
            half_open=self._half_open,
        )
        self._connections.add(connection)
        return connection

    def _closed(self, connection: wire.Connection) -> None:
        self._connections.discard(connection)
        if isinstance(connection.owner, Entry):
            connection.owner.connections.discard(connection)
            connection.owner.gate.settle(time.monotonic())

    def _touch(self, agent: str) -> None:
        self._live.touch(agent, time.time())

    # the daemon ---------------------------------------------------------------------------------------------------

    def _daemon_here(self, link: Link) -> None:
        now = time.monotonic()
        agents = {agent: entry.activity(now) for agent, entry in self.registry.by_id.items()}
        link.tell(Hello(role="proxy", epoch=self.epoch, pid=os.getpid()))
        link.tell(
            ProxyTable(agents=agents, port=self.port, ingress_port=self.ingress_port, spooled=self._usage.spooled())
        )

    def _daemon_lost(self, link: Link) -> None:  # noqa: ARG002
        log.warning("daemon_lost")
        for entry in list(self.registry.by_id.values()):
            entry.gate.link_lost()

    def _from_daemon(self, link: Link, message: Message, reply: Reply | None) -> None:  # noqa: ARG002
        now = time.monotonic()
        match message:
            case Close() | StillClosed() if reply is not None:
                reply(self._close(message, now))
            case AskActivity() if reply is not None:
                agents = {agent: entry.activity(now) for agent, entry in self.registry.by_id.items()}
                reply(Activities(agents=agents))
            case Asleep(agent=agent, generation=generation):
                if (entry := self.registry.by_id.get(agent)) is not None:
                    entry.gate.asleep(generation)
            case Open() | Refused():
                self._open_or_refuse(message)
            case AgentIs(row=row):
                self.registry.learn(row)
            case AgentGone(agent=agent):
                self.registry.forget(agent)
                self._live.forget_agent(agent)
            case DaemonTable():
                self._learn_all(message)
            case Backend(backend=backend, models=models):
                self.path.use_backend(backend, models)
            case Marks(marks=marks):
                self._usage.marks(marks)
            case Leaving():
                self.ingress.leaving = True

    def _learn_all(self, table: DaemonTable) -> None:
        for entry in self.registry.replace_all(table.agents, table.internal_digest):
            self._live.forget_agent(entry.row.id)
        self.path.use_backend(table.backend, table.models)
        self._usage.marks(table.marks)
        for entry in self.registry.by_id.values():
            entry.gate.wake_again()

    def _close(self, message: Close | StillClosed, now: float) -> Closed | Busy:
        entry = self.registry.by_id.get(message.agent)
        if entry is None:
            return Busy(agent=message.agent, generation=message.generation, reason="the proxy does not know this agent")
        gate = entry.gate
        ask = gate.close if isinstance(message, Close) else gate.still_closed
        reason = ask(message.generation, now)
        if reason is None:
            return Closed(agent=message.agent, generation=message.generation)
        if gate.owes_quiet and message.agent not in self._settling:
            self._settling.add(message.agent)
            self._loop.call_later(SETTLE_S, self._settle, entry)
        return Busy(agent=message.agent, generation=message.generation, reason=reason)

    def _settle(self, entry: Entry) -> None:
        """Looks until the `Quiet` is paid; while requests are in flight their end looks, so this only waits."""
        gate = entry.gate
        if gate.settle(time.monotonic()):
            self._settling.discard(entry.row.id)
        else:
            wait_s = SETTLE_S if not (gate.in_flight or gate.ingress) else 10 * SETTLE_S
            self._loop.call_later(wait_s, self._settle, entry)

    def _open_or_refuse(self, message: Message) -> None:
        match message:
            case Open(agent=agent, generation=generation):
                if (entry := self.registry.by_id.get(agent)) is not None:
                    entry.gate.open(generation)
            case Refused(agent=agent, generation=generation, status=status):
                if (entry := self.registry.by_id.get(agent)) is not None:
                    entry.gate.refuse(generation, status)

    def _serve_unheard(self) -> None:
        if not self.registry.heard:
            log.warning("daemon_unheard serving=own_sockets")
            self.registry.serve_unheard()

    # Daemon of the gates -----------------------------------------------------------------------------------------

    def wake(self, agent: str, cause: WakeCause) -> None:
        spawn(self._wake(agent, cause), name=f"wake {agent}")

    async def _wake(self, agent: str, cause: WakeCause) -> None:
        """Asks the daemon once; what is parked has its own deadline, so a lost answer only frees the next ask."""
        try:
            answer = await self._daemon.link.ask_any(
                Wake(agent=agent, cause=cause), timeout_s=self._settings.proxy.gate_wait_s
            )
            self._open_or_refuse(answer)
        except HiveError as error:
            log.warning("wake_failed agent=%s cause=%s error=%s", agent, cause, error.message)
            if (entry := self.registry.by_id.get(agent)) is not None:
                entry.gate.wake_failed()

    def tell_quiet(self, agent: str) -> None:
        with contextlib.suppress(HiveError):
            self._daemon.link.tell(Quiet(agent=agent))

    # the helper ---------------------------------------------------------------------------------------------------

    def _helper_here(self, link: Link) -> None:
        link.tell(Hello(role="proxy", epoch=self.epoch, pid=os.getpid()))
        spawn(self._ask_listeners(link), name="ask listeners")

    async def _ask_listeners(self, link: Link) -> None:
        with contextlib.suppress(DependencyDown):
            await link.ask(AskListeners(), Done, timeout_s=10)

    def _from_helper(self, link: Link, message: Message, reply: Reply | None) -> None:  # noqa: ARG002
        match message:
            case ListenerIs(agent=agent):
                self._listen_for(agent, link.take_descriptors())
            case ListenerGone(agent=agent):
                entry = self.registry.by_id.get(agent)
                if entry is not None and entry.listener is not None:
                    entry.listener.close()
                    entry.listener = None

    def _listen_for(self, agent: str, descriptors: list[int]) -> None:
        """Takes the agent's (new) listener; an old one is emptied first, its open connections stay."""
        if not descriptors:
            log.error("listener_without_descriptor agent=%s", agent)
            return
        known = agent in self.registry.by_id
        entry = self.registry.unheard(agent)
        if entry.listener is not None:
            entry.listener.close(empty_first=True)
        sock = socket.socket(fileno=descriptors[0])
        entry.listener = Listener(sock, partial(self._agent_connection, entry))
        if not known and not self.registry.heard:
            self._loop.call_later(UNHEARD_S, self._serve_unheard)


def _agent_sleeps(connection: wire.Connection) -> bool:
    """Idle connections of a sleeping agent are kept: it would find them closed when it wakes."""
    return isinstance(connection.owner, Entry) and connection.owner.gate.state != "open"


async def _run(
    paths: Paths, settings: Settings, port: int, ingress_port: int, move: bool, watch_fd: int | None
) -> None:
    server = ProxyServer(paths, settings)
    leave = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, leave.set)
    if watch_fd is not None:
        loop.add_reader(watch_fd, _parent_gone, loop, watch_fd, leave)
    server.start(port, ingress_port, move=move)
    await leave.wait()
    await server.stop()


def _parent_gone(loop: asyncio.AbstractEventLoop, watch_fd: int, leave: asyncio.Event) -> None:
    if not os.read(watch_fd, 4096):
        loop.remove_reader(watch_fd)
        leave.set()


def main(
    paths: Paths,
    settings: Settings,
    *,
    port: int | None = None,
    ingress_port: int | None = None,
    move_ports: bool = False,
    watch_fd: int | None = None,
) -> int:
    """Runs the proxy until SIGTERM, SIGINT, or the parent's end. Returns the exit code."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)  # requests leave no cycles: the default spent 5 % of the CPU looking for some
    port = settings.proxy.port if port is None else port
    ingress_port = settings.proxy.ingress_port if ingress_port is None else ingress_port
    try:
        uvloop.run(_run(paths, settings, port, ingress_port, move_ports, watch_fd))
    except HiveError as error:
        print(f"hive: {error.message}\nhint: {error.hint}", file=sys.stderr)  # noqa: T201
        return error.exit_code
    return 0
