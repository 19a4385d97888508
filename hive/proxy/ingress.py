"""Callers of an agent: `/agents/<name>/rest?q` becomes `GET /rest?q` at the agent's port. Wakes a sleeping one.

With `ingress_domain` so does `/rest?q` of the host `<name>.<ingress_domain>`, an origin of the agent's own. origins.py
has the fields that an agent's answer may not have under the origin that all agents share.

The token is checked before anything else happens; unknown name and wrong token are the same 401. Ingress has limits of
its own and no window, tier, queue or usage. `/agents/<name>/.hive/…` is answered by Hive and wakes no agent. The one
upgrade that passes is a WebSocket's; any other is an offer, and dropped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import msgspec

from hive.domain import Dialect
from hive.errors import (
    AgentDown,
    AgentSilent,
    HiveError,
    MethodNotAllowed,
    NotFound,
    Saturated,
    Unauthorized,
)
from hive.proxy import origins
from hive.proxy.refusals import answer_error, asleep, no_room_for_bodies, too_many_wakes, unreached, upload_displaced
from hive.proxy.registry import AgentEntry, Registry
from hive.proxy.websocket import Clocks, WebSocket
from hive.queue.body_budget import BodyBudget, HeldBody
from hive.queue.gate import Gate, GateState
from hive.settings.table import Proxy as ProxySettings
from hive.terminal_text import counted
from hive.wire import websocket
from hive.wire.connection import Connection
from hive.wire.deadlines import NEVER, Deadlines
from hive.wire.dial import Fetch
from hive.wire.heads import BadResponse, Fields, named_by_connection
from hive.wire.http1 import (
    LAST_CHUNK,
    Request,
    Response,
    answer_head,
    answered_later,
    as_chunk,
    head_start,
    status_line,
)
from hive.wire.tunnel import HeadReader
from hive.wire.upstream import Pool, UpstreamConnection

PREFIX = b"/agents/"
OWN = b"/.hive/"
"""Paths below it are answered by Hive, not by the agent."""
SWITCHED = b"HTTP/1.1 101 Switching Protocols\r\n"
LOGS = "see `hive agent logs`"
RETRY_S = 0.05
"""Between attempts while the agent does not listen (yet)."""
HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"content-length",
        b"expect",
    }
)
"""Fields that speak of one connection only (RFC 9110 §7.6.1), and those that are written anew."""
OURS = frozenset(
    {
        b"forwarded",
        b"http2-settings",
        b"x-cache-mode",
        b"x-cache-tag",
        b"x-forwarded-for",
        b"x-forwarded-host",
        b"x-forwarded-port",
        b"x-forwarded-prefix",
        b"x-forwarded-proto",
        b"x-hive-job",
        b"x-hive-token",
        b"x-http-method",
        b"x-http-method-override",
        b"x-method-override",
        b"x-original-url",
        b"x-priority",
        b"x-real-ip",
        b"x-rewrite-url",
        b"x-tenant-id",
    }
)
"""Fields a caller may not set for the agent: caller and target are told as Hive saw them."""
NOT_FOR_AGENTS = HOP_BY_HOP | OURS
NOT_FOR_SHARED = NOT_FOR_AGENTS | {origins.COOKIE}
"""Nor a cookie where agents share an origin: another agent's may be in it."""


class IngressPath:
    """The state that all ingress requests share. `leaving` is set when Hive shuts down: callers are refused from then
    on."""

    def __init__(
        self,
        *,
        registry: Registry,
        settings: ProxySettings,
        deadlines: Deadlines,
        budget: BodyBudget,
        call_later: Callable[[float, Callable[[], None]], object],
        claim: Callable[[Connection, AgentEntry], None],
        fetch: Fetch | None = None,
    ) -> None:
        """`claim(connection, entry)`: it is a caller's of this agent now; raises Saturated where there is no room.
        `fetch(agent)`: a connection to an agent's port where this process does not get to it itself."""
        self.registry = registry
        self.settings = settings
        self.deadlines = deadlines
        self.budget = budget
        self.call_later = call_later
        self.claim = claim
        self.fetch = fetch
        self.leaving = False
        self.sockets: set[WebSocket] = set()

    def pool(self, address: str, connect_s: float) -> Pool:
        """Connections to agents are not kept: the agent may be frozen or gone by the next request."""
        return Pool(
            address, connect_s=connect_s, idle_s=0.0, deadlines=self.deadlines, fetch=self.fetch, peer="the agent"
        )

    def leave(self) -> None:
        """Hive is shutting down: no callers from now on, and WebSockets, which end no other way, end."""
        self.leaving = True
        self.end_sockets()

    def end_sockets(self) -> None:
        for socket in list(self.sockets):
            socket.leave()


class IngressExchange:
    """One request to an agent, made at its first byte.

    `parked`: it waits for its agent to wake. `deadline`: when `on_deadline` is due, on the monotonic clock.
    """

    __slots__ = (
        "_answered",
        "_begun_at",
        "_blocked",
        "_chunked",
        "_connection",
        "_entry",
        "_gate",
        "_handshake",
        "_head",
        "_held",
        "_left",
        "_own",
        "_path",
        "_pool",
        "_prefix",
        "_reader",
        "_ready",
        "_refusal",
        "_request",
        "_rest",
        "_retry_until",
        "_shared",
        "_socket",
        "_upstream",
        "deadline",
        "parked",
    )

    def __init__(self, path: IngressPath, connection: Connection) -> None:
        self._path = path
        self._connection = connection
        self._begun_at = time.monotonic()
        self.deadline = NEVER
        self.parked = self._ready = self._left = self._blocked = False
        self._entry: AgentEntry | None = None
        self._gate: Gate | None = None
        """Gate at which it counts as open."""
        self._held = HeldBody(path.budget)
        self._request: Request | None = None
        self._refusal: HiveError | None = None
        self._upstream: UpstreamConnection | None = None
        self._pool: Pool | None = None
        self._answered = self._chunked = False
        self._shared = True
        """True if the caller's origin is that of all agents."""
        self._retry_until = 0.0
        self._prefix = self._rest = self._head = b""
        self._own: bytes | None = None
        """Hive's own answer, where Hive was asked."""
        self._handshake: websocket.Handshake | None = None
        self._reader: HeadReader | None = None
        self._socket: WebSocket | None = None
        path.deadlines.add(self)

    def __repr__(self) -> str:
        return f"<IngressExchange {self._entry} {'parked' if self.parked else ''}>"

    def on_head(self, request: Request) -> None:
        self._request = request
        try:
            self._enter(request)
        except HiveError as error:
            self._refusal = error
            if not answered_later(request):
                self.refuse(error)

    def _enter(self, request: Request) -> None:
        """Authorises, counts, and wakes the agent if it sleeps; in this order."""
        asked = websocket.is_asked(request)
        if asked:
            request.keep_alive = False  # with any answer: what follows may be frames
        name, token = self._read_target(request)
        token = token or request.field(b"x-hive-token") or b""
        entry = self._callee(name, token)
        if entry is None and not self._path.registry.heard:
            raise Saturated("Hive has just started and does not know the agents yet", retry_after_s=1)
        if entry is None:
            raise Unauthorized(
                "unknown agent or wrong token: send X-Hive-Token, or a path under /agents/<name>/t/<token>"
                if self._shared
                else "unknown agent or wrong token: send X-Hive-Token, or a path under /.hive/t/<token>"
            )
        if self._path.leaving:
            raise Saturated("Hive is shutting down", retry_after_s=10)
        self._path.claim(self._connection, entry)
        if self._rest.startswith(OWN):
            self._own = _told(entry, request, self._rest)
            return
        if entry.row.address is None:
            raise NotFound(f"agent {name} has no port; create it with --port to be called")
        self._handshake = websocket.read_handshake(request) if asked else None
        self._check_room(entry)
        self._entry, self._gate = entry, entry.gate
        self._held.share = entry.callers_bodies
        self._retry_until = self._begun_at + self._path.settings.gate_wait_s
        if not entry.gate.begin(self, self._begun_at, ingress=True):
            self.parked = True
            self.deadline = self._retry_until

    def _callee(self, name: str, token: bytes) -> AgentEntry | None:
        """The agent, where this caller may call it."""
        return self._path.registry.by_ingress_token(name, token)

    def _read_target(self, request: Request) -> tuple[str, bytes]:
        """The name of the agent, and the token in the path or empty. Raises NotFound."""
        domain = self._path.settings.ingress_domain
        own = origins.agent_of(request.field(b"host") or b"", domain.encode()) if domain else None
        if own is None:
            name, token, self._prefix, self._rest = split_target(request.target)
            return name, token
        self._shared = False
        token, self._prefix, self._rest = origins.split_own(request.target)
        return own, token

    def _check_room(self, entry: AgentEntry) -> None:
        """Raises Saturated, TooManyRequests."""
        gate = entry.gate
        if gate.ingress >= self._path.settings.ingress_open_max:
            raise Saturated(
                f"{counted(gate.ingress, 'request is', 'requests are')} open to this agent", retry_after_s=1
            )
        if gate.needs_wake:
            wait_s = entry.tenant.wakes.take(self._begun_at)
            if wait_s is not None:
                raise too_many_wakes(entry.tenant, wait_s)

    def on_body(self, size: int) -> None:
        request = self._request
        if self._refusal is not None or request is None:
            return
        upload = self if request.body_bytes != request.content_length else None
        if not self._held.take(size, upload=upload):
            raise no_room_for_bodies()

    def on_body_displaced(self) -> None:
        """Ends with a refusal while its body is coming in, as its room went to another agent."""
        self.refuse(upload_displaced())

    def on_request(self, request: Request) -> None:
        self._held.is_in(self)
        self._ready = True
        if self._refusal is not None:
            self.refuse(self._refusal)
        elif self._own is not None:
            self._answer_own(request, self._own)
        elif not self.parked:
            self._proceed()

    def _answer_own(self, request: Request, content: bytes) -> None:
        head = answer_head(200, len(content), b"cache-control: no-store\r\n", keep=request.keep_alive)
        self._connection.write(head if request.method == b"HEAD" else head + content)
        self._leave()
        self._connection.finished(keep=True)

    def _proceed(self) -> None:
        entry = self._entry
        assert entry is not None
        if entry.row.address is None:
            self.refuse(NotFound(f"agent {entry.row.name} has no port any more"))
            return
        self.deadline = NEVER
        self._pool = self._path.pool(entry.row.address, max(RETRY_S, self._retry_until - time.monotonic()))
        self._pool.connect(self)

    def on_connected(self, connection: UpstreamConnection) -> bool:
        if self._left:
            return False
        self.deadline = time.monotonic() + self._path.settings.first_byte_s
        assert self._request is not None
        if self._handshake is not None:
            self._reader = HeadReader(self._request_bytes(), self)
            connection.switch(self._reader)
        else:
            self._upstream = connection
            connection.send(self._request_bytes(), self, reused=False, bodiless=self._request.method == b"HEAD")
        return True

    def on_unconnected(self, error: HiveError) -> None:
        """The agent does not listen (yet): again until the gate's deadline."""
        if self._left:
            return
        address = "" if self._pool is None else self._pool.address
        self._close_pool()
        if time.monotonic() + RETRY_S < self._retry_until:
            self._path.call_later(RETRY_S, self._ask_again)
        else:
            assert self._entry is not None
            self.refuse(unreached(self._entry.row.name, address, error))

    def _ask_again(self) -> None:
        if not self._left:
            self._proceed()

    def _request_bytes(self) -> bytes:
        request = self._request
        assert request is not None
        lines = [b"%b %b HTTP/1.1\r\n" % (request.method, self._rest)]
        lines += self._own_lines()
        lines += _passed(request.fields, self._not_for_agent())
        if self._prefix:
            lines.append(b"x-forwarded-prefix: %b\r\n" % self._prefix)
        if self._handshake is not None:
            return b"".join(lines) + self._handshake.request_fields() + b"\r\n"
        content = b"".join(request.body)
        if content or request.content_length is None or request.field(b"content-length") is not None:
            lines.append(b"content-length: %d\r\n" % len(content))
        return b"".join(lines) + b"connection: close\r\n\r\n" + content

    def _not_for_agent(self) -> frozenset[bytes]:
        """The fields that its agent does not get."""
        return NOT_FOR_SHARED if self._shared else NOT_FOR_AGENTS

    def _own_lines(self) -> list[bytes]:
        """Lines by which Hive tells the agent who calls."""
        return []

    # the answer ---------------------------------------------------------------------------------------------------

    def on_answer(self, head: Response) -> None:
        request = self._request
        assert request is not None
        is_dated = any(name == b"date" for name, _ in head.fields)
        lines = [status_line(head.status) if is_dated else head_start(head.status)]
        lines += self._answer_lines(head.fields)
        bodiless = request.method == b"HEAD" or head.status in (204, 304)
        if head.content_length is not None and head.status not in (204, 304):
            lines.append(b"content-length: %d\r\n" % head.content_length)
        elif bodiless:
            pass
        elif request.chunks:
            self._chunked = True
            lines.append(b"transfer-encoding: chunked\r\n")
        else:
            request.keep_alive = False
        if not request.keep_alive:
            lines.append(b"connection: close\r\n")
        self._head = b"".join(lines) + b"\r\n"

    def _answer_lines(self, fields: Fields) -> list[bytes]:
        """The lines of an agent's answer that pass, and the field that names the others."""
        assert self._request is not None
        dropped, told = origins.dropped(self._request.fields, fields, shared=self._shared)
        return [*_passed(fields, HOP_BY_HOP | dropped), told]

    def on_data(self, data: bytes, *, last: bool) -> None:
        self.deadline = NEVER
        if self._chunked:
            data = (as_chunk(data) if data else b"") + (LAST_CHUNK if last else b"")
        self._answered = True
        self._connection.write(self._head + data)
        self._head = b""
        if last:
            self._upstream = None
            self._leave()
            self._connection.finished(keep=True)

    def on_closed(self) -> None:
        """Ends the answer with the connection, as no length was given."""
        self.on_data(b"", last=True)

    def on_failed(self, error: HiveError, *, retry: bool) -> None:  # noqa: ARG002
        self._upstream = None
        self.refuse(AgentDown(error.message, hint=LOGS))

    # a WebSocket --------------------------------------------------------------------------------------------------

    def on_switch_answer(self, head: bytes, rest: bytes) -> None:
        """The agent's 101, or what it answered instead; frames, if any, are in `rest`."""
        handshake, reader, entry = self._handshake, self._reader, self._entry
        assert handshake is not None
        assert reader is not None
        assert reader.transport is not None
        assert entry is not None
        try:
            own, fields = handshake.check(head)
        except BadResponse as error:
            self.on_no_switch(str(error))
            return
        self._reader = None
        self._close_pool()
        self._answered = True
        self._gate = None  # the count at the gate is the WebSocket's from here on
        self.deadline = NEVER
        path, proxy = self._path, self._path.settings
        clocks = Clocks(proxy.websocket_idle_s, proxy.between_bytes_s, proxy.gate_wait_s)
        self._socket = WebSocket(entry, clocks, path.deadlines, end=self._on_socket_end, give_up=self.refuse)
        path.sockets.add(self._socket)
        self._connection.write(SWITCHED + own + b"".join(self._answer_lines(fields)) + b"\r\n")
        self._socket.open(self._connection, reader.transport, rest)

    def on_no_switch(self, reason: str) -> None:
        self.refuse(AgentDown(f"the agent did not open the WebSocket: {reason}"))

    def _on_socket_end(self) -> None:
        """One of the two left: what the other was sent still reaches it."""
        self._leave()
        self._connection.finished(keep=False)

    # every exit ---------------------------------------------------------------------------------------------------

    def refuse(self, error: HiveError) -> None:
        if self._left:
            return
        connection = self._connection
        if self._answered:
            self._leave()
            connection.cut()
            return
        keep = answer_error(connection, self._request, error, Dialect.OPENAI)
        self._leave()
        connection.finished(keep=keep)

    def on_gone(self) -> None:
        if not self._left:
            self._leave()

    def _leave(self) -> None:
        """Gives back all that was taken; once, on every exit."""
        self._left = True
        self._path.deadlines.discard(self)
        if self._upstream is not None:
            self._upstream.cancel()
            self._upstream = None
        self._held.release(self)
        self._close_pool()
        if self._reader is not None:
            self._reader.cancel()
            self._reader = None
        if self._socket is not None:
            self._path.sockets.discard(self._socket)
            self._socket.close()
            self._socket = None
        if self._gate is not None:
            self._gate.unpark(self)
            self._gate.end(time.monotonic(), ingress=True)

    def _close_pool(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    # waiting ------------------------------------------------------------------------------------------------------

    def on_gate_open(self) -> None:
        self._retry_until = max(self._retry_until, time.monotonic() + 1.0)
        self.parked = False
        self.deadline = NEVER
        if self._left:
            return
        if self._ready:
            self._proceed()
        elif self._request is None or not self._request.complete:
            self._connection.restart_clock()

    def on_gate_refused(self, error: HiveError) -> None:
        self.parked = False
        self.refuse(error)

    def on_blocked(self) -> None:
        self._blocked = True
        if self._upstream is not None:
            self._upstream.pause()

    def on_unblocked(self) -> None:
        self._blocked = False
        if self._upstream is not None:
            self._upstream.resume()

    def on_deadline(self, now: float) -> None:  # noqa: ARG002
        self.deadline = NEVER
        if self.parked:
            self.parked = False
            self.refuse(asleep(self._path.settings.gate_wait_s, self._path.registry.wakes))
        elif not self._answered and not self._blocked:
            self.refuse(AgentSilent("the agent did not answer in time"))


def _passed(fields: Fields, dropped: frozenset[bytes]) -> Iterator[bytes]:
    """The lines of the fields that concern neither this connection nor a handshake, and are not `dropped`."""
    dropped |= named_by_connection(fields)
    return (
        b"%b: %b\r\n" % (name, value)
        for name, value in fields
        if name not in dropped and not name.startswith(websocket.PREFIX)
    )


def _told(entry: AgentEntry, request: Request, target: bytes) -> bytes:
    """Hive's own answer about an agent, as JSON. Raises NotFound, MethodNotAllowed, and Saturated if the agent will not
    be woken: a probe is to see that in the status."""
    if target.partition(b"?")[0] != OWN + b"state":
        raise NotFound("below /.hive/ there is /.hive/state")
    if request.method not in (b"GET", b"HEAD"):
        raise MethodNotAllowed(allow="GET, HEAD")
    gate = entry.gate
    if gate.state is GateState.REFUSED:
        raise gate.refusal()
    said = {"agent": entry.row.name, "state": gate.word, "open": gate.ingress, "parked": gate.parked}
    return msgspec.json.encode(said) + b"\n"


def split_target(target: bytes) -> tuple[str, bytes, bytes, bytes]:
    """(name, token in the path or empty, prefix, what the agent is asked). Raises Refusal for any other path.

    >>> split_target(b"/agents/scribe/t/hi_x/turn?q=1")
    ('scribe', b'hi_x', b'/agents/scribe/t/hi_x', b'/turn?q=1')
    >>> split_target(b"/agents/scribe")
    ('scribe', b'', b'/agents/scribe', b'/')
    """
    if not target.startswith(PREFIX):
        raise NotFound("callers ask for /agents/<name>/…")
    name, _, rest = target[len(PREFIX) :].partition(b"/")
    bare, question, query = name.partition(b"?")
    prefix = PREFIX + bare
    token = b""
    if rest.startswith(b"t/"):
        token, _, rest = rest[2:].partition(b"/")
        prefix += b"/t/" + token
    return bare.decode("latin-1"), token, prefix, b"/" + rest + (question + query)
