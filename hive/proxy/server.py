"""The proxy process: listeners, the links to daemon and helper, and the data path between them (composition root)."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import resource
import secrets
import socket
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
import uvloop

from hive.bodies.body_workers import DeepReaders
from hive.endpoints.endpoints import FORM_TARGETS
from hive.errors import DependencyDown, HiveError, Saturated, as_said
from hive.host.notify import Notifier
from hive.host.process import raise_descriptor_limit
from hive.host.sockets import TCP, UNIX, VSOCK, is_listening, take_sockets
from hive.link.server import bind_private
from hive.metering.usage_spool import UsageSpool
from hive.proxy.admin import Admin, AdminSocket
from hive.proxy.api_wake import api_wake
from hive.proxy.connection_limits import Seldom, connections_allowed, turn_away
from hive.proxy.datapath import DataPath
from hive.proxy.forward import Exchange
from hive.proxy.ingress import IngressExchange, IngressPath
from hive.proxy.jobs_entry import JobsDoor
from hive.proxy.life import Load, live
from hive.proxy.links import ProxyLinks
from hive.proxy.metrics import Metrics
from hive.proxy.registry import UNHEARD_S, AgentEntry
from hive.proxy.runner import RunnerExchange
from hive.proxy.under_way import models_in_use
from hive.proxy.upload import MIB
from hive.queue.connection_shares import ConnectionHolder
from hive.queue.queue import QueueView
from hive.routing.slot import Slot
from hive.settings.runtime import with_runtime
from hive.settings.table import Paths, Settings
from hive.tasks import spawn
from hive.wire import connection as wire
from hive.wire.budget import HalfOpen
from hive.wire.deadlines import Deadlines
from hive.wire.listeners import SocketListener, listen_tcp
from hive.wire.vsock import VsockListener, listen_vsock, peer_cid

log = logging.getLogger("hive.proxy")

DRAIN_LOOK_S = 0.02
FRESH_S = 0.5
"""A connection accepted less than this before the drain may be about to ask its first question."""
FLUSH_S = 1.0
"""Time for the last words of a drain to reach clients that read."""
HANDED = {"model": TCP, "ingress": TCP, "vsock": VSOCK, "admin": UNIX, "runner": UNIX, "jobs": UNIX}
"""Names of sockets systemd may hand over."""
Handed = Mapping[str, list[socket.socket]]


class BoundListener(NamedTuple):
    """A socket that listens already, and the function that lets its callers in. `ours`: no other process keeps its
    backlog after this one."""

    sock: socket.socket
    open: Callable[[socket.socket], SocketListener]
    ours: bool


class ProxyServer:
    """One running proxy. `start` listens and dials, `stop` drains.

    `handed`: listening sockets by name (see HANDED); what is not among them is bound here. `move`: a taken port moves
    up by one. `descriptors`: how many files this process may have open.
    """

    def __init__(
        self, paths: Paths, settings: Settings, *, handed: Handed, ports: tuple[int, int], move: bool, descriptors: int
    ) -> None:
        self._paths = paths
        self.configured = self.settings = settings
        self._runtime: Mapping[str, str] = {}
        self.metrics = Metrics()
        self._handed = handed
        self._ports = ports
        self._move = move
        self._descriptors = descriptors
        self._loop = asyncio.get_running_loop()
        self.epoch = f"{int(time.time()):x}{secrets.token_hex(3)}"
        self._deadlines = Deadlines()
        self._usage = UsageSpool(paths.spool, self.epoch)
        self._links = ProxyLinks(paths, self.epoch, settings, usage=self._usage, api=api_wake(os.environ))
        self.registry = self._links.registry
        self._readers = DeepReaders()
        self.path = DataPath(
            registry=self.registry,
            settings=settings,
            deadlines=self._deadlines,
            usage=self._usage,
            epoch=self.epoch,
            on_activity=self._links.touch,
            metrics=self.metrics,
            readers=self._readers,
        )
        self.path.uploads.use_directory(paths.spool)
        self.ingress = IngressPath(
            registry=self.registry,
            settings=settings.proxy,
            deadlines=self._deadlines,
            budget=self.path.budget,
            call_later=self._loop.call_later,
            claim=self.path.claim_for_caller,
            fetch=self._links.dial,
        )
        self._half_open, self._callers_half_open = HalfOpen(), HalfOpen()
        self._connections: dict[wire.Connection, float] = {}
        """Each with the time it was accepted."""
        self._doors: list[BoundListener] = []
        """Listening sockets that are opened once the agents are known; until then callers wait in the backlog."""
        self._listening: list[tuple[BoundListener, SocketListener]] = []
        self._desk = AdminSocket(
            Admin(self.metrics, not_ready=self._not_ready, queue=self._told_of_queue), self._deadlines
        )
        self._admin_inode = 0
        self._made: dict[Path, int] = {}
        """Sockets that were made here for doors of unix, with their inodes."""
        self._seldom = Seldom()
        self._on_ready: Callable[[], None] | None = None
        self.port = self.ingress_port = self.runner_port = 0
        self._follow(settings)
        self._tell_metrics()

    # start and stop -----------------------------------------------------------------------------------------------

    def start(self, on_ready: Callable[[], None]) -> None:
        """Listens and dials. Raises DependencyDown where a port is taken and may not move.

        Callers wait in the backlogs until the daemon has sent its agents, or has not for UNHEARD_S; then `on_ready` is
        called, once.
        """
        self._on_ready = on_ready
        self._listen_admin()
        self.port = self._listen("model", self._ports[0], self._model_connection)
        self.ingress_port = self._listen("ingress", self._ports[1], self._ingress_connection)
        self._listen_runner()
        self._listen_unix("jobs", self._paths.job_entry_socket, self._job_connection)
        self._listen_vsock()
        self._readers.start()
        spawn(self._usage.run(), name="usage log")
        self._links.start(
            self.path,
            self.ingress,
            ports=(self.port, self.ingress_port),
            serve=self._agent_connection,
            connect=self._connect,
            on_heard=self._ready,
            on_settings=self._use_runtime,
        )
        self._loop.call_later(UNHEARD_S, self._ready)

    async def stop(self, hurry: asyncio.Event) -> None:
        """Accepts no connection, lets requests end for up to `drain_s`, cuts the rest detectably; all at once in a
        `hurry`."""
        self.path.draining = True
        self._stop_accepting()
        self.ingress.end_sockets()  # which would wait for nothing: they end no other way
        begun_at = time.monotonic()
        await self._drained(begun_at, self.settings.proxy.drain_s, hurry)
        log.info("proxy_drained cut=%d s=%.1f", self._in_flight(), time.monotonic() - begun_at)
        await self._cut()
        self._readers.close()
        await self._usage.close()  # which tells the daemon, if it is there
        self._links.close()
        self._close_admin()
        self._deadlines.close()

    def _stop_accepting(self) -> None:
        """Closes the listeners. A backlog that another process keeps open is left to the next proxy; our own is
        emptied."""
        for door, listener in self._listening:
            listener.close(empty_first=door.ours)
        for door in self._doors:
            door.sock.close()
        self._listening.clear()
        self._doors.clear()
        for path, inode in self._made.items():
            with contextlib.suppress(OSError):
                if inode == path.stat().st_ino:
                    path.unlink()
        self._links.stop_listening()

    async def _drained(self, begun_at: float, within_s: float, hurry: asyncio.Event) -> None:
        """Closes connections without a request, until all are closed, the time is over, or there is a hurry."""
        while self._connections and time.monotonic() < begun_at + within_s and not hurry.is_set():
            self._close_idle(begun_at)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DRAIN_LOOK_S):
                    await hurry.wait()

    def _close_idle(self, begun_at: float) -> None:
        now = time.monotonic()
        for connection, accepted_at in list(self._connections.items()):
            is_fresh = accepted_at > begun_at - FRESH_S and now < accepted_at + FRESH_S
            if not is_fresh and connection.why_busy(now, unread_counts=False) is None:
                connection.close()

    async def _cut(self) -> None:
        """Ends all requests now: with an error if no answer has begun, else so that the client can tell."""
        self._refuse_in_flight()
        await self._drained(time.monotonic(), FLUSH_S, asyncio.Event())
        self._refuse_in_flight()  # requests that began since
        for connection in list(self._connections):
            connection.cut()

    def _refuse_in_flight(self) -> None:
        for connection in list(self._connections):
            if connection.exchange is not None:
                connection.exchange.refuse(Saturated("Hive's proxy is restarting", retry_after_s=1))

    def use_settings(self, settings: Settings) -> None:
        """The configuration was read again: what is asked from now on is held to it, and to the runtime settings."""
        self.configured = settings
        self._use(with_runtime(settings, self._runtime, os.environ))

    def _use_runtime(self, values: Mapping[str, str]) -> None:
        if values != self._runtime:
            self._runtime = values
            self._use(with_runtime(self.configured, values, os.environ))
            log.info("runtime_settings keys=%s", ",".join(sorted(values)))

    def _use(self, settings: Settings) -> None:
        self.settings = settings
        self.path.use_settings(settings)
        self.ingress.settings = settings.proxy
        self._follow(settings)
        for connection in self._connections:
            connection.use_limits(self._limits)

    def _follow(self, settings: Settings) -> None:
        proxy = settings.proxy
        longer = dict.fromkeys(FORM_TARGETS, proxy.upload_max_mb * MIB)
        self._limits = wire.ConnectionLimits(
            proxy.head_s, proxy.body_idle_s, proxy.keepalive_s, proxy.body_max_bytes, longer
        )
        self.path.shares.limit = connections_allowed(proxy.connections_max, self._descriptors)

    # how it is ----------------------------------------------------------------------------------------------------

    def what_is_wrong(self) -> str:
        """The fault of a listener that accepts no connection, else empty; while draining there is none to look at."""
        return "" if all(is_listening(door.sock) for door, _ in self._listening) else "a listener is dead"

    def _ready(self) -> None:
        """Lets callers in, the first time it is called; the daemon may tell its table again later."""
        if self.path.draining or self._on_ready is None:
            return
        for door in self._doors:
            listener = door.open(door.sock)
            self._listening.append((door, listener))
            if isinstance(listener, VsockListener):
                self.registry.vsock_listener = listener
        self._doors.clear()
        ports = self.port, self.ingress_port, self.runner_port
        log.info("proxy_ready port=%d ingress_port=%d runner_port=%d epoch=%s", *ports, self.epoch)
        self._on_ready()
        self._on_ready = None

    def _not_ready(self) -> str:
        """The reason why no new callers should be sent here, empty if they should."""
        if self.path.draining:
            return "draining"
        return self.what_is_wrong() or ("" if self._listening else "not listening")

    def _in_flight(self) -> int:
        return sum(entry.gate.in_flight + entry.gate.ingress for entry in self._entries())

    def _entries(self) -> list[AgentEntry]:
        return [*self.registry.by_id.values(), self.registry.operator]

    def _queue(self) -> QueueView:
        return self.registry.queue_view(time.monotonic())

    def _told_of_queue(self) -> dict[str, object]:
        """The queue, and `models`: agent → the model that works for it."""
        return {**msgspec.to_builtins(self._queue()), "models": models_in_use(self.registry)}

    def _tell_metrics(self) -> None:
        """Sets the sources of metrics that are not counted, because their value can be read at any moment."""
        read, path = self.metrics.read, self.path
        read("queue_waiting", lambda: {tenant.name: tenant.waiting for tenant in self._queue().tenants})
        read("queue_running", lambda: {tenant.name: tenant.running for tenant in self._queue().tenants})
        read("in_flight", self._in_flight)
        read("parked", lambda: sum(entry.gate.parked for entry in self._entries()))
        read("backend_closed", lambda: path.slot.gate.is_closed)
        read("slot_in_flight", lambda: self._by_slot(lambda slot: slot.line.running))
        read("slot_waiting", lambda: self._by_slot(lambda slot: slot.line.waiting + len(slot.suspects.held)))
        read("slot_work_per_second", self._slot_work)
        read("slot_open", lambda: self._by_slot(lambda slot: not slot.gate.is_closed))
        read("slot_connections", self._slot_connections)
        read("connections", lambda: len(self._connections))
        read("connections_limit", lambda: path.shares.limit)
        read("half_open_heads", lambda: self._half_open.held + self._callers_half_open.held)
        read("upstream_connections", self._upstream_connections)
        read("request_body_bytes", lambda: path.budget.used)
        read("request_body_bytes_limit", lambda: path.budget.limit)
        read("cancelling", lambda: len(self.registry.stopping))
        read("upload_bytes", lambda: path.uploads.budget.used)
        read("upload_bytes_limit", lambda: path.uploads.budget.limit)
        read("usage_backlog", lambda: self._usage.waiting)
        read("usage_lost", lambda: self._usage.lost)
        read("left_box", lambda: path.cloud_guard.left)
        read("responses_not_kept", lambda: 0 if path.stored is None else path.stored.dropped)
        read("daemon_up", lambda: self._links.daemon_up)
        read("draining", lambda: path.draining)

    def _by_slot(self, value: Callable[[Slot], float]) -> dict[tuple[str, ...], float]:
        return {(slot.name, slot.model): value(slot) for slot in self.path.slots.pooled.values()}

    def _slot_work(self) -> dict[tuple[str, ...], float]:
        slots = self.path.slots.pooled.values()
        return {
            (slot.name, slot.model, slot.line.unit.name): slot.line.rate.per_s
            for slot in slots
            if slot.line.rate.is_measured
        }

    def _slot_connections(self) -> dict[tuple[str, ...], float]:
        pools = [(slot, slot.pool) for slot in self.path.slots.pooled.values()]
        return {
            (slot.name, slot.model, state): count
            for slot, pool in pools
            for state, count in (("idle", pool.idle if pool else 0), ("busy", pool.busy if pool else 0))
        }

    def _upstream_connections(self) -> dict[str, float]:
        pool = self.path.slot.pool
        return {} if pool is None else {"idle": pool.idle, "busy": pool.busy}

    # listeners ----------------------------------------------------------------------------------------------------

    def _listen(self, name: str, port: int, make: Callable[[socket.socket], wire.Connection | None]) -> int:
        """Listens on the sockets that systemd handed over under this name, else on a port of `listen`. Returns the
        (first) port."""
        handed = self._handed.get(name)
        socks = handed or [self._bind(port, name)]
        self._doors += [BoundListener(sock, partial(SocketListener, make=make), ours=not handed) for sock in socks]
        return int(socks[0].getsockname()[1])

    def _bind(self, port: int, name: str, address: str = "") -> socket.socket:
        address, label = address or self.settings.proxy.listen, "the model" if name == "model" else name
        try:
            return listen_tcp(port, move=self._move, address=address)
        except OSError as error:
            raise DependencyDown(
                f"port {port} of {address} for {label} cannot be taken: {error.strerror}",
                hint=f"find its holder with `ss -ltnp 'sport = :{port}'`, or choose another port in hive.conf",
            ) from error

    def _listen_vsock(self) -> None:
        handed = self._handed.get("vsock")
        socks = handed or ([listen_vsock(self.settings.inference.vsock_port)] if self.settings.proxy.vsock else [])
        self._doors += [
            BoundListener(sock, partial(VsockListener, make=self._guest_connection), ours=not handed) for sock in socks
        ]

    def _listen_runner(self) -> None:
        """The runner's unix socket, and its TCP port where there is to be one."""
        wanted = self.settings.runner
        self._listen_unix("runner", self._paths.runner_socket, self._runner_connection)
        if wanted.port:
            sock = self._bind(wanted.port, "runner", wanted.listen)
            self.runner_port = int(sock.getsockname()[1])
            make = partial(SocketListener, make=self._runner_connection)
            self._doors.append(BoundListener(sock, make, ours=True))

    def _listen_unix(self, name: str, path: Path, make: Callable[[socket.socket], wire.Connection | None]) -> None:
        """At the socket that systemd handed over under this name, else at one that is made at `path`."""
        handed = self._handed.get(name)
        try:
            socks = handed or [bind_private(path, takes_files=False)]
            if not handed:
                self._made[path] = path.stat().st_ino
        except OSError as error:
            raise DependencyDown(
                f"the socket {path} cannot be made: {error.strerror}",
                hint=f"the runtime directory must be this user's, or systemd hands over a socket named {name}",
            ) from error
        self._doors += [BoundListener(sock, partial(SocketListener, make=make), ours=not handed) for sock in socks]

    def _listen_admin(self) -> None:
        path = self._paths.admin_socket
        socks = self._handed.get("admin")
        if socks is None:
            try:
                socks = [bind_private(path, takes_files=False)]
                self._admin_inode = path.stat().st_ino
            except OSError as error:
                raise DependencyDown(
                    f"the admin socket {path} cannot be made: {error.strerror}",
                    hint="the runtime directory must be this user's, or systemd hands over a socket named admin",
                ) from error
        self._admin_listeners = [SocketListener(sock, self._desk.connect) for sock in socks]

    def _close_admin(self) -> None:
        """Last of all: it tells how the drain goes. The file is removed unless it is the next proxy's already."""
        for listener in self._admin_listeners:
            listener.close()
        self._desk.close()
        with contextlib.suppress(OSError):
            if self._admin_inode == self._paths.admin_socket.stat().st_ino:
                self._paths.admin_socket.unlink()

    # connections --------------------------------------------------------------------------------------------------

    def _model_connection(self, sock: socket.socket) -> wire.Connection | None:
        return self._connect(sock, partial(Exchange, self.path), self.path.shares.strangers[0])

    def _ingress_connection(self, sock: socket.socket) -> wire.Connection | None:
        strangers = self.path.shares.strangers[1]
        return self._connect(sock, partial(IngressExchange, self.ingress), strangers, self._callers_half_open)

    def _runner_connection(self, sock: socket.socket) -> wire.Connection | None:
        open_exchange = partial(RunnerExchange, self.path, self._links.runner)
        return self._connect(sock, open_exchange, self.path.shares.strangers[0])

    def _job_connection(self, sock: socket.socket) -> wire.Connection | None:
        open_door = partial(JobsDoor, self.path, self.ingress, self._links.jobs)
        return self._connect(sock, open_door, self.registry.operator.jobs)

    def _guest_connection(self, sock: socket.socket) -> wire.Connection | None:
        """Over AF_VSOCK the kernel says from which virtual machine; one that is no agent is hung up on."""
        cid = peer_cid(sock)
        entry = self.registry.by_cid(cid)
        if entry is not None:
            return self._agent_connection(entry, sock)
        self._refused("unknown_cid", f"cid {cid}")
        return None

    def _agent_connection(self, entry: AgentEntry, sock: socket.socket) -> wire.Connection | None:
        """The connection from an agent's own listener: it is that agent's from accept on."""
        if not self.path.has_room(entry):
            self._refused("agent_connections_max", entry.row.name)
            turn_away(sock)
            return None
        connection = self._connect(sock, partial(Exchange, self.path), entry.connections)
        if connection is not None:
            connection.owner = entry
            connection.needs_token = False  # also where it is TCP, made inside the agent's own network
        return connection

    def _connect(
        self,
        sock: socket.socket,
        open_exchange: Callable[[wire.Connection], wire.HttpExchange],
        holder: ConnectionHolder[wire.Connection] | None = None,
        half_open: HalfOpen | None = None,
    ) -> wire.Connection | None:
        """Makes one of this holder, else Hive's own. None where there is no room: it is turned away in words."""
        shares = self.path.shares
        holder = shares.hives_own if holder is None else holder
        if not self.path.makes_way(holder):
            self._refused("connections_max", str(shares.limit))
            turn_away(sock)
            return None
        connection = wire.Connection(
            sock,
            limits=self._limits,
            deadlines=self._deadlines,
            open_exchange=open_exchange,
            stays_open=_agent_sleeps,
            on_closed=self._closed,
            half_open=self._half_open if half_open is None else half_open,
        )
        shares.enter(connection, holder)
        self._connections[connection] = time.monotonic()
        return connection

    def _refused(self, reason: str, what: str) -> None:
        self.metrics.turned_away(reason)
        more = self._seldom.left_out(reason, time.monotonic())
        if more is not None:
            log.warning("connection_refused reason=%s at=%r more=%d", reason, what, more)

    def _closed(self, connection: wire.Connection) -> None:
        self._connections.pop(connection, None)
        self.path.shares.leave(connection)
        self._links.jobs.closed(connection)
        if isinstance(connection.owner, AgentEntry):
            connection.owner.gate.settle(time.monotonic())


def _agent_sleeps(connection: wire.Connection) -> bool:
    """Idle connections of a sleeping agent are kept: it would find them closed when it wakes."""
    return isinstance(connection.owner, AgentEntry) and connection.owner.gate.state != "open"


async def _run(
    paths: Paths,
    settings: Settings,
    ports: tuple[int, int],
    move: bool,
    descriptors: int,
    load: Load | None,
    watch_fd: int | None,
) -> None:
    notifier = Notifier(os.environ, pid=os.getpid())
    handed = take_sockets(os.environ, HANDED, pid=os.getpid())
    server = ProxyServer(paths, settings, handed=handed, ports=ports, move=move, descriptors=descriptors)
    await live(server, notifier, load=load, watch_fd=watch_fd)


def main(
    paths: Paths,
    settings: Settings,
    *,
    port: int | None = None,
    ingress_port: int | None = None,
    move_ports: bool = False,
    watch_fd: int | None = None,
    load: Load | None = None,
) -> int:
    """Runs the proxy until SIGTERM, SIGINT, or the parent's end. Returns the exit code.

    `load` reads the configuration again, checked, on SIGHUP; it raises ConfigError where that is wrong.
    """
    gc.set_threshold(50_000, 20, 100)  # requests leave no cycles: the default spent 5 % of the CPU looking for some
    raise_descriptor_limit()
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    ports = (
        settings.proxy.port if port is None else port,
        settings.proxy.ingress_port if ingress_port is None else ingress_port,
    )
    try:
        uvloop.run(_run(paths, settings, ports, move_ports, descriptors, load, watch_fd))
    except HiveError as error:
        print(as_said(error), file=sys.stderr)  # noqa: T201
        return error.exit_code
    return 0
