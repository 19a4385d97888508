"""The data path: one request from its first byte to its last, read top to bottom.

Callbacks, not tasks: nothing on this path awaits, and in steady state nothing is asked of Redis, SQLite or the daemon.
Every exit passes `_leave`, which gives back all that was taken.
"""

from __future__ import annotations

import time

from hive.dialects.errors import error_fields, render
from hive.dialects.sse import UsageStripper
from hive.domain import DIALECTS, UsageEvent
from hive.errors import (
    Asleep,
    BackendDown,
    BackendTimeout,
    BadRequest,
    HiveError,
    NotFound,
    NotSupported,
    Refusal,
    Saturated,
    TooManyRequests,
    Unauthorized,
    WrongMediaType,
)
from hive.policy import Act, may
from hive.proxy import body, endpoints, lists
from hive.proxy.datapath import DataPath
from hive.proxy.endpoints import Endpoint
from hive.proxy.identity import bearer, client_id, split_token
from hive.proxy.limits import wait_for_turn_s
from hive.proxy.metering import MAX_WHOLE, Reading, SseReading, asks_usage, reading_for
from hive.proxy.registry import Entry
from hive.wire.connection import Connection
from hive.wire.deadlines import NEVER
from hive.wire.http1 import LAST_CHUNK, Request, Response, answer_head, answered_later, as_chunk, status_line
from hive.wire.upstream import UpstreamConnection

RELAYED = frozenset({b"content-type", b"cache-control", b"retry-after", b"retry-after-ms", b"x-should-retry"})
"""Fields of the backend's answer that reach the client; the head is rebuilt from these."""


class Exchange:
    """One request on its way. The numbers are those of the table in design.md §3."""

    __slots__ = (
        "_answered",
        "_asked",
        "_begun_at",
        "_blocked",
        "_body_bytes",
        "_charged_at",
        "_chunked",
        "_connection",
        "_endpoint",
        "_entered",
        "_entry",
        "_first_at",
        "_head",
        "_held",
        "_left",
        "_path",
        "_queued_at",
        "_reading",
        "_ready",
        "_refusal",
        "_request",
        "_sent_at",
        "_status",
        "_stripper",
        "_upstream",
        "_waiting",
        "deadline",
        "parked",
        "request_id",
    )

    def __init__(self, path: DataPath, connection: Connection) -> None:
        self._path = path
        self._connection = connection
        self.request_id = path.next_id()
        self.deadline = NEVER
        self.parked = False
        self._begun_at = time.monotonic()
        self._entry: Entry | None = None
        self._request: Request | None = None
        self._endpoint: Endpoint | None = None
        self._refusal: HiveError | None = None
        self._asked: body.Asked | None = None
        self._reading: Reading | None = None
        self._stripper: UsageStripper | None = None
        self._upstream: UpstreamConnection | None = None
        self._entered = self._ready = self._waiting = self._answered = self._left = self._blocked = False
        self._chunked = False
        self._charged_at: float | None = None
        self._body_bytes = 0
        self._queued_at = self._sent_at = 0.0
        self._first_at: float | None = None
        self._head = b""
        self._held: list[bytes] | None = None
        self._status = 0
        path.deadlines.add(self)
        if isinstance(connection.owner, Entry):
            self._0_enter(connection.owner)

    def __repr__(self) -> str:
        name = self._endpoint.name if self._endpoint else "?"
        return f"<Exchange {self.request_id} {name} {'parked' if self.parked else ''}>"

    # the request comes in -----------------------------------------------------------------------------------------

    def on_head(self, request: Request) -> None:
        self._request = request
        if self._refusal is None:
            try:
                entry = self._1_who_asks(request)
                self._endpoint = self._2_may_be_asked(request)
                self._3_not_too_often(entry, self._endpoint)
                self._4_fits(request, self._endpoint)
            except HiveError as error:
                self._refusal = error
        if self._refusal is not None and not answered_later(request):
            self.refuse(self._refusal)

    def on_body(self, size: int) -> None:
        if self._refusal is None:
            if not self._path.budget.take(size):
                raise Saturated("the request bodies held at once exceed Hive's budget", retry_after_s=2)
            self._body_bytes += size

    def on_request(self, request: Request) -> None:
        try:
            if self._refusal is not None:
                raise self._refusal
            assert self._entry is not None
            assert self._endpoint is not None
            if self._endpoint.body:
                self._asked = self._5_what_is_asked(request, self._entry, self._endpoint)
                self._6_may_use_model(self._entry, self._asked)
        except HiveError as error:
            self.refuse(error)
            return
        self._ready = True
        self._queued_at = time.monotonic()
        if not self.parked:
            self._7_take_turn()

    # the steps ----------------------------------------------------------------------------------------------------

    def _0_enter(self, entry: Entry) -> None:
        """In flight for its agent from here to `_leave`; a closed gate parks it and wakes the agent."""
        self._entry = entry
        self._entered = True
        try:
            if not entry.gate.begin(self, self._begun_at):
                self.parked = True
                self.deadline = self._begun_at + self._path.settings.proxy.gate_wait_s
        except Asleep as error:
            self._refusal = error
        self._path.on_activity(entry.row.id)

    def _1_who_asks(self, request: Request) -> Entry:
        """The listener decides: an agent's own socket is that agent, on TCP the token says who."""
        if self._connection.is_unix:
            assert self._entry is not None
            _, request.target = split_token(request.target)
            return self._entry
        token, request.target = split_token(request.target)
        token = token or bearer(request)
        if self._entry is not None and token == self._connection.token:
            return self._entry
        entry = self._path.registry.by_model_token(token) if token else None
        if entry is None and not self._path.registry.heard:
            raise Saturated("Hive has just started and does not know the agents yet", retry_after_s=1)
        if entry is None or (self._entry is not None and entry is not self._entry):
            request.keep_alive = False
            raise Unauthorized("no valid token: send Authorization: Bearer, x-api-key, or a path under /a/<token>")
        if self._entry is None:
            self._connection.owner = entry
            self._connection.token = token
            entry.connections.add(self._connection)
            self._0_enter(entry)
            if self._refusal is not None:
                raise self._refusal
        return entry

    def _2_may_be_asked(self, request: Request) -> Endpoint:
        endpoint = endpoints.find(request.method, request.target)
        backend = self._path.backend
        if backend is not None and not endpoint.listing and endpoint.dialect not in DIALECTS[backend.kind]:
            raise NotSupported(f"the active backend ({backend.kind}) does not speak the {endpoint.dialect} API")
        return endpoint

    def _3_not_too_often(self, entry: Entry, endpoint: Endpoint) -> None:
        if endpoint.counts:
            wait_s = entry.window.take(self._begun_at)
            if wait_s is not None:
                window = entry.window
                raise TooManyRequests(f"more than {window.limit} requests in {window.span_s:g} s", retry_after_s=wait_s)
            self._charged_at = self._begun_at

    def _4_fits(self, request: Request, endpoint: Endpoint) -> None:
        """The size itself is held to by the parser, before and while reading."""
        if not endpoint.body:
            if request.content_length != 0:
                raise BadRequest(f"{endpoint.method.decode()} takes no body")
            return
        for name, value in request.fields:
            if name == b"content-encoding" and value.lower() != b"identity":
                raise WrongMediaType(f"Content-Encoding {value.decode('latin-1')[:40]} is not taken; send plain JSON")

    def _5_what_is_asked(self, request: Request, entry: Entry, endpoint: Endpoint) -> body.Asked:
        pieces = request.body
        whole = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        default = entry.model or self._path.settings.inference.default_model
        path = self._path
        ask_usage = (
            path.settings.inference.token_tracking
            and path.backend is not None
            and asks_usage(endpoint, path.backend.kind)
        )
        return body.read(whole, default_model=default, streams=endpoint.streams, ask_usage=ask_usage)

    def _6_may_use_model(self, entry: Entry, asked: body.Asked) -> None:
        reason = may(entry.caller, Act.USE, asked.model)
        if reason is not None:
            raise Refusal(reason)

    def _7_take_turn(self) -> None:
        """Lists are answered here; what occupies the model waits for a slot, the rest goes on."""
        assert self._entry is not None
        assert self._endpoint is not None
        if self._endpoint.listing:
            self._answer_list()
            return
        if not self._endpoint.takes_slot:
            self._8_ask_backend()
            return
        line = self._entry.line
        admitted = line.ask(self)
        if admitted is None:
            wait_s = wait_for_turn_s(line.waiting, line.slots, self._path.mean_duration_s)
            self._saturated(f"{line.waiting} requests of this agent wait already", wait_s)
            return
        self._waiting = True
        if admitted:
            self._8_ask_backend()
        else:
            self.deadline = time.monotonic() + self._path.settings.proxy.queue_wait_s

    def on_turn(self) -> None:
        """A slot is this request's own now."""
        if not self._left:
            self._8_ask_backend()

    def _8_ask_backend(self) -> None:
        self._sent_at = time.monotonic()
        pool = self._path.pool
        if pool is None:
            self._saturated("no inference server is active; see `hive backend status`", 5)
            return
        self.deadline = self._sent_at + self._path.settings.proxy.first_byte_s
        connection = pool.take()
        if connection is None:
            pool.connect(self)
        else:
            self._send(connection, reused=True)

    def on_connected(self, connection: UpstreamConnection) -> bool:
        if self._left:
            return False
        self._send(connection, reused=False)
        return True

    def on_unconnected(self, error: HiveError) -> None:
        if not self._left:
            self.refuse(error)

    def _send(self, connection: UpstreamConnection, *, reused: bool) -> None:
        assert self._endpoint is not None
        self._upstream = connection
        line = self._endpoint.request_line
        if self._asked is None:
            connection.send(b"%bhost: localhost\r\naccept: application/json\r\n\r\n" % line, self, reused=reused)
            return
        content = self._asked.upstream
        head = b"%bhost: localhost\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % (
            line,
            len(content),
        )
        connection.send(head + content, self, reused=reused)

    # 9: bytes through ---------------------------------------------------------------------------------------------

    def on_answer(self, head: Response) -> None:
        """Rebuilds the head; it goes out together with the first body bytes."""
        request, endpoint = self._request, self._endpoint
        assert request is not None
        assert endpoint is not None
        self._status = head.status
        content_type = b""
        fields = [status_line(head.status)]
        for name, value in head.fields:
            if name in RELAYED:
                fields.append(b"%b: %b\r\n" % (name, value))
                if name == b"content-type":
                    content_type = value
        stream = self._asked is not None and self._asked.stream
        self._reading = reading_for(endpoint, stream=stream, content_type=content_type)
        if self._asked is not None and self._asked.usage_added and isinstance(self._reading, SseReading):
            self._stripper = UsageStripper()
        fields.append(self._own_fields())
        if head.content_length is not None:
            fields.append(b"content-length: %d\r\n" % head.content_length)
            if not stream and head.content_length <= MAX_WHOLE:
                self._held = []  # small enough to say in the head what the end tells
        elif request.method == b"HEAD":
            pass
        elif request.chunks:
            self._chunked = True
            fields.append(b"transfer-encoding: chunked\r\n")
            if stream:
                fields.append(b"x-accel-buffering: no\r\n")
        else:
            request.keep_alive = False
        if not request.keep_alive:
            fields.append(b"connection: close\r\n")
        self._head = b"".join(fields)

    def on_data(self, data: bytes, *, last: bool) -> None:
        if not data and not last:
            return  # the head alone: it waits for the first byte of the body, so that nonsense can still be a 502
        reading = self._reading
        assert reading is not None
        now = time.monotonic()
        if data:
            if self._first_at is None:
                self._first_at = now
            reading.feed(data)
            if self._stripper is not None:
                data = self._stripper.feed(data)
        if last:
            self._end(data, now)
            return
        self.deadline = now + self._path.settings.proxy.between_bytes_s
        if self._held is not None:
            self._held.append(data)
        elif data or self._head:
            self._write(data)

    def _write(self, data: bytes) -> None:
        assert self._request is not None
        if self._request.method == b"HEAD":
            data = b""
        elif self._chunked and data:
            data = as_chunk(data)
        if self._head:
            data = self._head + b"\r\n" + data
            self._head = b""
        self._answered = True
        if data:
            self._connection.write(data)

    def _end(self, data: bytes, now: float) -> None:
        """The last bytes: metered first, then written."""
        reading, request = self._reading, self._request
        assert reading is not None
        assert request is not None
        reading.end()
        if self._stripper is not None:
            data += self._stripper.end()
        if not reading.whole and self._status < 400:
            self._upstream = None
            if data and self._answered:
                self._write(data)  # the backend's own word on what went wrong
            self.refuse(BackendDown("the backend ended its answer early"))
            return
        if self._held is not None:
            self._held.append(data)
            data = b"".join(self._held)
            self._head += self._cache_fields()
        self._10_meter(now, cut=False)
        if self._chunked:
            data = (as_chunk(data) if data else b"") + LAST_CHUNK
            self._chunked = False
        self._upstream = None
        self._write(data)
        connection = self._connection
        self._leave(now)
        connection.finished(keep=True)

    def on_closed(self) -> None:
        """An answer without length ended with the connection: whole only if the dialect's end marker was seen."""
        self._upstream = None
        reading = self._reading
        assert reading is not None
        reading.end()
        if reading.whole and reading.events:
            self._end(b"", time.monotonic())
        else:
            self.refuse(BackendDown("the backend broke off its answer"))

    def on_failed(self, error: HiveError, *, retry: bool) -> None:
        self._upstream = None
        if retry and not self._answered and self._path.pool is not None:
            self._path.pool.connect(self)
        else:
            self.refuse(error)

    # 10: what it cost ---------------------------------------------------------------------------------------------

    def _10_meter(self, now: float, *, cut: bool) -> None:
        """One usage event for whatever occupied the model, on the spool before the client has the last byte."""
        endpoint, entry, path = self._endpoint, self._entry, self._path
        if endpoint is None or entry is None or not endpoint.takes_slot or not self._sent_at:
            return
        path.learn_duration(now - self._sent_at)
        if not path.settings.inference.token_tracking:
            return
        reading = self._reading
        counts = reading.usage if reading is not None else None
        estimate = reading.events if cut and reading is not None and counts and counts.tokens_out is None else 0
        path.usage.record(
            UsageEvent(
                id=self.request_id,
                epoch=path.epoch,
                event_no=0,
                agent_id=entry.row.id,
                tenant=entry.row.tenant,
                model=self._asked.model if self._asked else "",
                backend=path.backend.kind if path.backend else "",
                endpoint=endpoint.name,
                tokens_in=counts.tokens_in if counts else None,
                tokens_out=(estimate or counts.tokens_out) if counts else None,
                cached_tokens=counts.cached_tokens if counts else None,
                estimated=bool(estimate),
                cut=cut,
                queue_ms=round((self._sent_at - self._queued_at) * 1e3, 3),
                ttft_ms=round((self._first_at - self._begun_at) * 1e3, 3) if self._first_at else None,
                duration_ms=round((now - self._begun_at) * 1e3, 3),
                status=self._status,
                client_request_id=client_id(self._request),
                created_at=time.time(),
            )
        )

    # every exit ---------------------------------------------------------------------------------------------------

    def refuse(self, error: HiveError) -> None:
        """Ends with an error: answered where no byte has gone out yet, else cut so that the client can tell."""
        if self._left:
            return
        now = time.monotonic()
        connection = self._connection
        if self._reading is not None and not self._answered:
            self._reading.end()
        if self._sent_at:
            self._status = self._status or error.status
            self._10_meter(now, cut=True)
        if self._answered:
            self._leave(now)
            connection.cut()
            return
        request = self._request
        keep = request is not None and request.complete and request.keep_alive
        target = request.target if request is not None else b""
        content = render(error, endpoints.dialect_of(target) if self._endpoint is None else self._endpoint.dialect)
        head = answer_head(error.status, len(content), self._own_fields() + error_fields(error), keep=keep)
        connection.write(head if request is not None and request.method == b"HEAD" else head + content)
        self._leave(now)
        connection.finished(keep=keep)

    def on_gone(self) -> None:
        """The client left: everything it caused is cancelled."""
        if self._left:
            return
        now = time.monotonic()
        if self._sent_at:
            if self._reading is not None:
                self._reading.end()
            self._10_meter(now, cut=True)
        self._leave(now)

    def _leave(self, now: float) -> None:
        """Gives back the slot, the place in line, the budget and the gate; once, whatever happened."""
        self._left = True
        self._path.deadlines.discard(self)
        if self._upstream is not None:
            self._upstream.cancel()
            self._upstream = None
        self._path.budget.give(self._body_bytes)
        entry = self._entry
        if entry is None:
            return
        if self._waiting:
            for turn in entry.line.leave(self):
                assert isinstance(turn, Exchange)
                turn.on_turn()
        if self._entered:
            entry.gate.unpark(self)
            entry.gate.end(now)
            self._path.on_activity(entry.row.id)

    # waiting ------------------------------------------------------------------------------------------------------

    def on_gate_open(self) -> None:
        self.parked = False
        self.deadline = NEVER
        if self._left:
            return
        if self._ready:
            self._7_take_turn()
        else:
            self._connection.restart_clock()

    def on_gate_refused(self, error: HiveError) -> None:
        self.parked = False
        if not self._left:
            self.refuse(error)

    def on_deadline(self, now: float) -> None:  # noqa: ARG002
        self.deadline = NEVER
        proxy = self._path.settings.proxy
        if self.parked:
            self.parked = False
            self._saturated(f"the agent did not wake within {proxy.gate_wait_s:g} s", 2, Asleep)
        elif not self._sent_at:
            wait_s = wait_for_turn_s(proxy.queue_depth, 1, self._path.mean_duration_s)
            self._saturated(f"no slot came free within {proxy.queue_wait_s:g} s", wait_s)
        elif self._blocked:
            self.deadline = time.monotonic() + proxy.between_bytes_s  # it is the client that does not read
        elif self._first_at is None:
            self.refuse(BackendTimeout(f"the backend sent nothing for {proxy.first_byte_s:g} s"))
        else:
            self.refuse(BackendTimeout(f"the backend stalled for {proxy.between_bytes_s:g} s"))

    def on_blocked(self) -> None:
        self._blocked = True
        if self._upstream is not None:
            self._upstream.pause()

    def on_unblocked(self) -> None:
        self._blocked = False
        if self._upstream is not None:
            self._upstream.resume()

    # small things -------------------------------------------------------------------------------------------------

    def _saturated(self, message: str, wait_s: float, kind: type[Saturated] = Saturated) -> None:
        """Hive itself has no room: the charge to the window is given back."""
        if self._charged_at is not None and self._entry is not None:
            self._entry.window.give_back(self._charged_at)
        self._sent_at = 0.0
        self.refuse(kind(message, retry_after_s=wait_s))

    def _own_fields(self) -> bytes:
        waited_s = self._sent_at - self._queued_at if self._sent_at else 0.0
        return b"x-request-id: %b\r\nx-queue-wait-ms: %d\r\n" % (self.request_id.encode(), int(waited_s * 1000))

    def _cache_fields(self) -> bytes:
        cached = self._reading.usage.cached_tokens if self._reading is not None else None
        if cached is None:
            return b""
        hit = b"true" if cached else b"false"
        return b"x-cache-hit: %b\r\nx-cache-tokens-reused: %d\r\n" % (hit, cached)

    def _answer_list(self) -> None:
        assert self._request is not None
        assert self._entry is not None
        try:
            content = lists.answer(self._request.target, self._path.models, self._entry.caller)
        except NotFound as error:
            self.refuse(error)
            return
        keep = self._request.keep_alive
        self._connection.write(answer_head(200, len(content), self._own_fields(), keep=keep) + content)
        self._leave(time.monotonic())
        self._connection.finished(keep=keep)
