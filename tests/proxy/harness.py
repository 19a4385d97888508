"""A data path between a raw client and a scripted backend: real sockets on both sides, no daemon, no Redis."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from hive.domain import BackendInfo, BackendKind, ModelInfo, Tier, UsageEvent, WakeCause
from hive.endpoints.endpoints import FORM_TARGETS
from hive.errors import LinkLost
from hive.link.messages import AgentRow
from hive.proxy.connection_limits import turn_away
from hive.proxy.datapath import DataPath
from hive.proxy.forward import Exchange
from hive.proxy.ingress import IngressExchange, IngressPath
from hive.proxy.registry import AgentEntry, Registry
from hive.queue.connection_shares import ConnectionHolder
from hive.settings.pool import PoolSection
from hive.settings.table import Settings, TenantRow
from hive.wire import connection as wire
from hive.wire.budget import HalfOpen
from hive.wire.deadlines import Deadlines
from hive.wire.listeners import SocketListener, listen_tcp

MODEL_TOKEN = b"hm_alice"
INGRESS_TOKEN = b"hi_alice"
MODELS = ("meta/llama-3 x", "m")
JSON_ANSWER = (
    b'{"id":"c","object":"chat.completion","created":0,"model":"m","choices":[{"index":0,"message":{"role":"assistant",'
    b'"content":"hi"},"finish_reason":"stop"}],"usage":{"prompt_tokens":7,"completion_tokens":3,"total_tokens":10}}'
)

Opening = Callable[[wire.Connection], wire.HttpExchange]
Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def digest(token: bytes) -> str:
    return hashlib.sha256(token).hexdigest()


def answer(body: bytes, *, content_type: bytes = b"application/json", status: bytes = b"200 OK") -> bytes:
    return b"HTTP/1.1 %b\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n%b" % (status, content_type, len(body), body)


def chunked(*pieces: bytes, content_type: bytes = b"text/event-stream", end: bool = True) -> bytes:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ntransfer-encoding: chunked\r\n\r\n" % content_type
    return head + b"".join(b"%x\r\n%b\r\n" % (len(p), p) for p in pieces) + (b"0\r\n\r\n" if end else b"")


async def read_request(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """(head, body) as the backend sees them."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = 0
    for line in head.split(b"\r\n"):
        if line.lower().startswith(b"content-length:"):
            length = int(line.split(b":")[1])
    return head, await reader.readexactly(length)


class Backend:
    """Answers each request with `reply`, or runs `script` on the whole connection; keeps what it saw."""

    def __init__(self) -> None:
        self.reply = answer(JSON_ANSWER)
        self.script: Script | None = None
        self.requests: list[tuple[bytes, bytes]] = []
        self.connections = 0
        self.closed = 0
        self._server: asyncio.Server | None = None
        self.address = ""

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            if self.script is not None:
                await self.script(reader, writer)
                return
            while True:
                self.requests.append(await read_request(reader))
                writer.write(self.reply)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.closed += 1
            writer.close()

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()


class Proxy:
    """The data path with one agent, alice, on a unix socket and by token on TCP; an `Outside` that only notes."""

    def __init__(self, tmp_path: Path, settings: Settings) -> None:
        self.settings = settings
        self.wakes: list[tuple[str, WakeCause]] = []
        self.fetched: dict[str, str] = {}
        """Agent → where the helper connects for it: the path of a unix socket."""
        self.quiets: list[str] = []
        self.events: list[UsageEvent] = []
        self.deadlines = Deadlines()
        self.registry = Registry(self, settings.proxy, settings.tenants)
        self.path = DataPath(
            registry=self.registry,
            settings=settings,
            deadlines=self.deadlines,
            usage=self,
            epoch="e",
            on_activity=lambda agent: None,
        )
        self.ingress = IngressPath(
            registry=self.registry,
            settings=settings.proxy,
            deadlines=self.deadlines,
            budget=self.path.budget,
            call_later=asyncio.get_running_loop().call_later,
            claim=self.path.claim_for_caller,
            fetch=self.fetch,
        )
        self.row = AgentRow(
            id="a1",
            name="alice",
            generation=1,
            gate="open",
            status="running",
            tier=Tier.LOW,
            model_digest=digest(MODEL_TOKEN),
            ingress_digest=digest(INGRESS_TOKEN),
        )
        self.registry.replace_all([self.row], digest(b"internal"))
        self.alice: AgentEntry = self.registry.by_id["a1"]
        self.connections: set[wire.Connection] = set()
        self.half_open = HalfOpen()
        sock = listen_tcp(0, move=False)
        self.port = sock.getsockname()[1]
        ingress_sock = listen_tcp(0, move=False)
        self.ingress_port = ingress_sock.getsockname()[1]
        self.socket_path = tmp_path / "a.sock"
        unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        unix.bind(str(self.socket_path))
        unix.listen(64)
        strangers = self.path.shares.strangers
        self._listeners = [
            SocketListener(sock, lambda s: self._connect(s, partial(Exchange, self.path), strangers[0])),
            SocketListener(
                ingress_sock, lambda s: self._connect(s, partial(IngressExchange, self.ingress), strangers[1])
            ),
        ]
        self.alice.listeners[str(self.socket_path)] = SocketListener(unix, self.alice_connects)

    def alice_connects(self, sock: socket.socket) -> wire.Connection | None:
        return self.agent_connects(self.alice, sock)

    def agent_connects(self, entry: AgentEntry, sock: socket.socket) -> wire.Connection | None:
        """Makes the connection for a socket accepted at an agent's own listener, as the server does."""
        connection = self._connect(sock, partial(Exchange, self.path), entry.connections)
        if connection is not None:
            connection.owner = entry
            connection.needs_token = False
        return connection

    def another(self, name: str, *, tenant: str = "default") -> Path:
        """One more agent; the path of its own socket. Its token is `hm_` and its name."""
        row = msgspec.structs.replace(
            self.row,
            id=name,
            name=name,
            tenant=tenant,
            model_digest=digest(b"hm_" + name.encode()),
            ingress_digest=digest(b"hi_" + name.encode()),
        )
        entry, path = self.registry.learn(row), self.socket_path.with_name(f"{name}.sock")
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listening.bind(str(path))
        listening.listen(64)
        entry.listeners[str(path)] = SocketListener(listening, partial(self.agent_connects, entry))
        return path

    def _connect(
        self,
        sock: socket.socket,
        open_exchange: Callable[[wire.Connection], wire.HttpExchange],
        holder: ConnectionHolder[wire.Connection] | None = None,
    ) -> wire.Connection | None:
        holder = self.path.shares.strangers[0] if holder is None else holder
        if not self.path.makes_way(holder):
            turn_away(sock)
            return None
        proxy = self.settings.proxy
        connection = wire.Connection(
            sock,
            limits=wire.ConnectionLimits(
                proxy.head_s,
                proxy.body_idle_s,
                proxy.keepalive_s,
                proxy.body_max_bytes,
                dict.fromkeys(FORM_TARGETS, proxy.upload_max_mb << 20),
            ),
            deadlines=self.deadlines,
            open_exchange=open_exchange,
            stays_open=lambda c: self.alice.gate.state != "open",
            on_closed=self._closed,
            half_open=self.half_open,
        )
        self.path.shares.enter(connection, holder)
        self.connections.add(connection)
        return connection

    def _closed(self, connection: wire.Connection) -> None:
        self.connections.discard(connection)
        self.path.shares.leave(connection)

    def use(self, backend: Backend, kind: BackendKind = BackendKind.LLAMA, models: tuple[str, ...] = MODELS) -> None:
        listed = [ModelInfo(name=name, owned_by="t") for name in models]
        self.path.use_backend(BackendInfo(kind=kind, address=backend.address, up=True), listed)

    async def fetch(self, agent: str) -> socket.socket:
        if agent not in self.fetched:
            raise LinkLost("helper is not connected")
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.connect(self.fetched[agent])
        return sock

    def wake(self, agent: str, cause: WakeCause) -> None:
        self.wakes.append((agent, cause))

    def tell_quiet(self, agent: str) -> None:
        self.quiets.append(agent)

    def record(self, event: UsageEvent, then: Callable[[], None] | None = None) -> int:
        self.events.append(event)
        if then is not None:
            asyncio.get_running_loop().call_soon(then)
        return len(self.events)

    def stop(self) -> None:
        for listener in self._listeners:
            listener.close()
        for entry in self.registry.by_id.values():
            entry.close_listeners()
        for connection in list(self.connections):
            connection.cut()
        self.path.use_backend(None, [])
        self.deadlines.close()


@contextlib.asynccontextmanager
async def proxied(
    tmp_path: Path,
    *,
    tenants: dict[str, TenantRow] | None = None,
    pool: PoolSection | None = None,
    **proxy_settings: Any,
) -> AsyncIterator[tuple[Proxy, Backend]]:
    defaults = Settings(tenants=tenants or {}, pool=pool or PoolSection())
    settings = msgspec.structs.replace(defaults, proxy=msgspec.structs.replace(defaults.proxy, **proxy_settings))
    Client.opened.clear()  # what a failed test left has lost its loop
    backend, proxy = Backend(), Proxy(tmp_path, settings)
    await backend.start()
    proxy.use(backend)
    try:
        yield proxy, backend
    finally:
        while Client.opened:
            Client.opened.pop().close()
        proxy.stop()
        await backend.stop()
        await asyncio.sleep(0.01)


class Client:
    """A raw client: sends bytes, reads whole answers. `proxied` closes those a failed test left open."""

    opened: ClassVar[list[Client]] = []

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        Client.opened.append(self)

    @property
    def transport(self) -> asyncio.Transport:
        """Its transport, which reads too."""
        transport = self.writer.transport
        assert isinstance(transport, asyncio.Transport)
        return transport

    @classmethod
    async def tcp(cls, port: int) -> Client:
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    @classmethod
    async def unix(cls, path: Path) -> Client:
        return cls(*await asyncio.open_unix_connection(str(path)))

    async def ask(self, request: bytes) -> tuple[int, dict[bytes, bytes], bytes]:
        self.writer.write(request)
        return await self.answer(head_only=request.startswith(b"HEAD"))

    async def answer(self, *, head_only: bool = False) -> tuple[int, dict[bytes, bytes], bytes]:
        """(status, fields, body decoded). Raises IncompleteReadError where the answer was cut."""
        head = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), 10)
        lines = head[:-4].split(b"\r\n")
        fields = dict(line.split(b": ", 1) for line in lines[1:])
        status = int(lines[0].split(b" ")[1])
        if head_only:
            return status, fields, b""
        if fields.get(b"transfer-encoding") != b"chunked":
            length = int(fields.get(b"content-length", b"0"))
            return status, fields, await asyncio.wait_for(self.reader.readexactly(length), 10)
        body = b""
        while True:
            size = int(await asyncio.wait_for(self.reader.readuntil(b"\r\n"), 10), 16)
            body += (await asyncio.wait_for(self.reader.readexactly(size + 2), 10))[:-2]
            if size == 0:
                return status, fields, body

    async def at_end(self) -> bool:
        """Whether the proxy closes the connection (within 5 s)."""
        return await asyncio.wait_for(self.reader.read(), 5) == b""

    def close(self) -> None:
        self.writer.close()


def post(target: bytes, body: bytes, *, token: bytes | None = None, fields: bytes = b"") -> bytes:
    auth = b"authorization: Bearer %b\r\n" % token if token else b""
    return b"POST %b HTTP/1.1\r\nhost: h\r\n%b%bcontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
        target,
        auth,
        fields,
        len(body),
        body,
    )


def get(target: bytes, *, token: bytes | None = None, method: bytes = b"GET") -> bytes:
    auth = b"authorization: Bearer %b\r\n" % token if token else b""
    return b"%b %b HTTP/1.1\r\nhost: h\r\n%b\r\n" % (method, target, auth)


CHAT = b'{"model":"m","messages":[{"role":"user","content":"hello"}]}'
STREAM = b'{"model":"m","stream":true,"messages":[{"role":"user","content":"hello"}]}'


def nothing_is_held(proxy: Proxy) -> bool:
    """Whether every place, position, parked request and byte of a body was given back."""
    alice, queue = proxy.alice, proxy.registry.queue
    return (
        alice.gate.in_flight == 0
        and alice.gate.ingress == 0
        and alice.gate.parked == 0
        and queue.running == 0
        and queue.waiting == 0
        and all(not line.running + line.waiting for line in proxy.registry.shares.queues.values())
        and all(slot.suspects.one is None and not slot.suspects.held for slot in proxy.path.slots.all)
        and proxy.path.budget.used == 0
        and proxy.path.uploads.budget.used == 0
        and not proxy.registry.stopping
    )


@contextlib.contextmanager
def full_backlog() -> Iterator[str]:
    """The address of a socket that listens and completes no connect: its backlog is full."""
    with socket.socket() as listening, contextlib.ExitStack() as fillers:
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        for _ in range(4):
            filler = fillers.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(listening.getsockname())
        yield f"127.0.0.1:{listening.getsockname()[1]}"
