"""Callers of an agent: `/agents/<name>/rest?q` becomes `GET /rest?q` at the agent's port. Wakes a sleeping one.

The token is checked before anything else happens; unknown name and wrong token are the same 401. Ingress has limits
of its own and no window, tier, queue or usage.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from hive.domain import Dialect
from hive.errors import Asleep, BackendDown, BackendTimeout, HiveError, NotFound, Refusal, Saturated, Unauthorized
from hive.proxy.limits import Budget
from hive.proxy.registry import Registry
from hive.proxy.waiting import Waiting
from hive.settings import Proxy as ProxySettings
from hive.wire.connection import Connection
from hive.wire.deadlines import NEVER, Deadlines
from hive.wire.heads import named_by_connection
from hive.wire.http1 import LAST_CHUNK, Request, Response, answered_later, as_chunk, status_line
from hive.wire.upstream import Pool, UpstreamConnection

PREFIX = b"/agents/"
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
"""Fields a caller may not set for the agent: who asks, and what is asked, are what Hive saw."""


class IngressPath:
    """What all ingress requests share. `leaving` is set when Hive shuts down: callers are refused from then on."""

    def __init__(
        self,
        *,
        registry: Registry,
        settings: ProxySettings,
        deadlines: Deadlines,
        budget: Budget,
        call_later: Callable[[float, Callable[[], None]], object],
    ) -> None:
        self.registry = registry
        self.settings = settings
        self.deadlines = deadlines
        self.budget = budget
        self.call_later = call_later
        self.leaving = False

    def pool(self, address: str) -> Pool:
        """Connections to agents are not kept: the agent may be frozen or gone by the next request."""
        settings = self.settings
        return Pool(address, connect_s=settings.gate_wait_s, idle_s=0.0, deadlines=self.deadlines)


class IngressExchange(Waiting):
    """One request to an agent."""

    __slots__ = ("_answered", "_chunked", "_head", "_path", "_pool", "_prefix", "_rest", "_retry_until")

    def __init__(self, path: IngressPath, connection: Connection) -> None:
        super().__init__(connection, path.deadlines, path.budget)
        self._path = path
        self._pool: Pool | None = None
        self._answered = self._chunked = False
        self._retry_until = 0.0
        self._prefix = self._rest = self._head = b""

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
        name, token, self._prefix, self._rest = split_target(request.target)
        token = token or request.field(b"x-hive-token") or b""
        entry = self._path.registry.by_ingress_token(name, token)
        if entry is None and not self._path.registry.heard:
            raise Saturated("Hive has just started and does not know the agents yet", retry_after_s=1)
        if entry is None:
            raise Unauthorized(
                "unknown agent or wrong token: send X-Hive-Token, or a path under /agents/<name>/t/<token>"
            )
        if self._path.leaving:
            raise Saturated("Hive is shutting down", retry_after_s=10)
        if entry.row.address is None:
            raise NotFound(f"agent {name} has no port; create it with --port to be called")
        if (request.field(b"upgrade") or b"").lower() == b"websocket":  # any other upgrade is an offer, and dropped
            raise Refusal("upgrades (WebSocket) do not pass ingress yet")
        if entry.gate.ingress >= self._path.settings.ingress_open_max:
            raise Saturated(f"{entry.gate.ingress} requests are open to this agent", retry_after_s=1)
        self._entry = entry
        self._entered = True
        self._retry_until = self._begun_at + self._path.settings.gate_wait_s
        if not entry.gate.begin(self, self._begun_at, ingress=True):
            self.parked = True
            self.deadline = self._retry_until

    def on_request(self, request: Request) -> None:  # noqa: ARG002
        self._ready = True
        if self._refusal is not None:
            self.refuse(self._refusal)
        elif not self.parked:
            self._proceed()

    def _proceed(self) -> None:
        entry = self._entry
        assert entry is not None
        assert entry.row.address is not None
        self.deadline = NEVER
        self._pool = self._path.pool(entry.row.address)
        self._pool.connect(self)

    def on_connected(self, connection: UpstreamConnection) -> bool:
        if self._left:
            return False
        self._upstream = connection
        self.deadline = time.monotonic() + self._path.settings.first_byte_s
        assert self._request is not None
        connection.send(self._request_bytes(), self, reused=False, bodiless=self._request.method == b"HEAD")
        return True

    def on_unconnected(self, error: HiveError) -> None:
        """The agent does not listen (yet): again until the gate's deadline."""
        if self._left:
            return
        self._close_pool()
        if time.monotonic() + RETRY_S < self._retry_until:
            self._path.call_later(RETRY_S, self._ask_again)
        else:
            assert self._entry is not None
            message = f"agent {self._entry.row.name} does not accept on {self._entry.row.address}: {error.message}"
            self.refuse(BackendDown(message, hint="see `hive agent logs`"))

    def _ask_again(self) -> None:
        if not self._left:
            self._proceed()

    def _request_bytes(self) -> bytes:
        request = self._request
        assert request is not None
        lines = [b"%b %b HTTP/1.1\r\n" % (request.method, self._rest)]
        dropped = HOP_BY_HOP | OURS | named_by_connection(request.fields)
        lines += [b"%b: %b\r\n" % (name, value) for name, value in request.fields if name not in dropped]
        content = b"".join(request.body)
        if content or request.content_length is None or request.field(b"content-length") is not None:
            lines.append(b"content-length: %d\r\n" % len(content))
        lines.append(b"x-forwarded-prefix: %b\r\nconnection: close\r\n\r\n" % self._prefix)
        return b"".join(lines) + content

    # the answer ---------------------------------------------------------------------------------------------------

    def on_answer(self, head: Response) -> None:
        request = self._request
        assert request is not None
        lines = [status_line(head.status)]
        dropped = HOP_BY_HOP | named_by_connection(head.fields)
        lines += [b"%b: %b\r\n" % (name, value) for name, value in head.fields if name not in dropped]
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
        """No length was given, so the end of the connection is the end of the answer."""
        self.on_data(b"", last=True)

    def on_failed(self, error: HiveError, *, retry: bool) -> None:  # noqa: ARG002
        self._upstream = None
        self.refuse(BackendDown(f"the agent broke off: {error.message}"))

    # every exit ---------------------------------------------------------------------------------------------------

    def refuse(self, error: HiveError) -> None:
        if self._left:
            return
        connection = self._connection
        if self._answered:
            self._leave()
            connection.cut()
            return
        keep = self._answer_with(error, Dialect.OPENAI)
        self._leave()
        connection.finished(keep=keep)

    def on_gone(self) -> None:
        if not self._left:
            self._leave()

    def _leave(self) -> None:
        self._release()
        self._close_pool()
        if self._entered and self._entry is not None:
            self._entry.gate.unpark(self)
            self._entry.gate.end(time.monotonic(), ingress=True)

    def _close_pool(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    # waiting ------------------------------------------------------------------------------------------------------

    def on_gate_open(self) -> None:
        self._retry_until = max(self._retry_until, time.monotonic() + 1.0)
        super().on_gate_open()

    def on_deadline(self, now: float) -> None:  # noqa: ARG002
        self.deadline = NEVER
        if self.parked:
            self.parked = False
            self.refuse(Asleep(f"the agent did not wake within {self._path.settings.gate_wait_s:g} s", retry_after_s=2))
        elif not self._answered and not self._blocked:
            self.refuse(BackendTimeout("the agent did not answer in time"))


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
