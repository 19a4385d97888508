"""The data path: one request from its first byte to its last, read top to bottom.

Callbacks, not tasks: nothing on this path awaits, and in steady state nothing is asked of Redis, SQLite or the daemon.
Every exit passes `_leave`, which gives back all that was taken. The way back (step 9) is `answer.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from hive.dialects.translators import RESPONSES
from hive.domain import Caller, Dialect, UsageEvent
from hive.errors import (
    AgentAsleep,
    BackendTimeout,
    HiveError,
    Refusal,
    RequestTimeout,
    Saturated,
    StreamIncomplete,
    Unauthorized,
)
from hive.link.requests import UnderWay
from hive.policy import Act, may
from hive.proxy import body, endpoints, lists, loading, stored_turn
from hive.proxy.answer import Answer
from hive.proxy.backend_gate import BackendGate
from hive.proxy.cost import NOTHING, UNKNOWN, cost_of, expected
from hive.proxy.datapath import DataPath, Decided
from hive.proxy.endpoints import Endpoint
from hive.proxy.identity import NO_WISHES, bearer, client_id, heartbeat_of, split_token, wishes_of
from hive.proxy.limits import SlidingWindow
from hive.proxy.queue import QueueVerdict
from hive.proxy.refusals import no_backend, no_slot, queue_full, too_many
from hive.proxy.registry import OPERATOR, AgentEntry
from hive.proxy.request_view import told_of
from hive.proxy.storing import Storing
from hive.tasks import spawn
from hive.wire.connection import Connection
from hive.wire.deadlines import NEVER
from hive.wire.http1 import Request, Response, answer_head, answered_later
from hive.wire.upstream import UpstreamConnection


class Exchange(Storing):
    """One request on its way. The numbers are those of the table in design.md §3."""

    __slots__ = (
        *("_answer", "_asked", "_beat_at", "_charged", "_cost", "_decided", "_ends_at", "_first_at", "_for"),
        *("_in_queue", "_limit_at", "_queued_at", "_sent_at", "_tail"),
    )

    def __init__(self, path: DataPath, connection: Connection) -> None:
        super().__init__(connection, path.deadlines, path.budget)
        self._path = path
        self.request_id = path.next_id()
        self._limit_at = self._beat_at = self._ends_at = NEVER
        self._decided: Decided | None = None
        self._asked: body.Asked | None = None
        self._answer: Answer | None = None
        self._pending = None
        """Work under way for it elsewhere: reading a long body, looking for a model, or making a connection."""
        self._in_queue = False
        self._for = path.backends
        """The number of the backend for which it was decided and read."""
        self._turn = None
        self._charged: list[SlidingWindow] | None = None
        self._queued_at = self._sent_at = 0.0
        self._first_at: float | None = None
        self._cost = UNKNOWN
        if isinstance(connection.owner, AgentEntry):
            self._0_enter(connection.owner)

    def __repr__(self) -> str:
        name = self._decided.endpoint.name if self._decided else "?"
        return f"<Exchange {self.request_id} {name} {self.state}>"

    @property
    def state(self) -> str:
        """Its state by the names under which the metrics count requests whose client left."""
        if self.parked:
            return "parked"
        if not self._ready:
            return "uploading" if self._pending is None else "reading"
        if not self._sent_at:
            return "queued"
        if self._upstream is None:
            return "connecting"
        if self._first_at is None:
            return "waiting"
        return "streaming" if self._asked is not None and self._asked.stream else "answering"

    def told(self, now: float) -> UnderWay | None:
        age_s, queue_s = now - self._begun_at, (self._sent_at or now) - self._queued_at if self._queued_at else None
        found = (self._entry, self._decided, self._asked)
        return told_of(*found, id=self.request_id, state=self.state, age_s=age_s, queue_s=queue_s)

    # the request comes in -----------------------------------------------------------------------------------------

    def on_head(self, request: Request) -> None:
        self._request = request
        self._for = self._path.backends
        if self._refusal is None:
            try:
                decided = self._connection.decided
                if (
                    isinstance(decided, Decided)
                    and decided.fields is request.fields
                    and decided.generation == self._path.registry.generation
                ):
                    self._decided = decided
                else:
                    self._decided = decided = self._decide(request)
                self._3_not_too_often(decided)
            except HiveError as error:
                self._refusal = error
        if self._refusal is not None and not answered_later(request):
            self.refuse(self._refusal)

    def _decide(self, request: Request) -> Decided:
        fields = request.fields
        entry = self._1_who_asks(request)
        endpoint = self._2_may_be_asked(request)
        endpoints.check_body(endpoint, request)  # 4
        registry = self._path.registry
        wishes = wishes_of(request) if entry.row.id == OPERATOR else NO_WISHES
        caller, tenant, flow = entry.caller, entry.tenant, entry.flow
        if wishes.tenant and wishes.tenant != tenant.name:
            caller, tenant, flow = registry.on_behalf_of(wishes.tenant)
        heartbeat_s = heartbeat_of(request, self._path.settings.proxy.heartbeat_s)
        found = (fields, registry.generation, request.target, endpoint, caller, tenant, flow, wishes)
        decided = self._connection.decided = Decided(*found, heartbeat_s, client_id(request))
        return decided

    def on_request(self, request: Request) -> None:
        self._body_is_in()
        if self._refusal is not None:
            self.refuse(self._refusal)
            return
        decided, entry = self._decided, self._entry
        assert decided is not None
        assert entry is not None
        if not decided.endpoint.body:
            self._on_ready()
            return
        self._5_what_is_asked(request, entry, decided)

    def _on_asked(self, asked: body.Asked | HiveError) -> None:
        """The body has been read, here or elsewhere."""
        self._pending = None
        if self._left:
            return
        if isinstance(asked, HiveError):
            self.refuse(asked)
            return
        assert self._decided is not None
        if self._turn is not None:
            asked = stored_turn.with_turn(asked, self._turn)
        self._asked = asked
        try:
            self._asked = asked = self._6_which_model(self._decided.caller, asked)
        except HiveError as error:
            refused = loading.refusal(self._decided.endpoint, error)
            self._pending = self._path.look_again(error, lambda: self._on_asked(asked), lambda _: self.refuse(refused))
            return
        heartbeat_s, streams = self._decided.heartbeat_s, asked.stream and self._decided.endpoint.takes_slot
        if heartbeat_s and streams and self._request is not None and self._request.chunks:
            self._beat_at = time.monotonic() + heartbeat_s
        if self._answer is not None:
            self._answer.asked = asked
        if not self._in_queue:
            self._on_ready()
        elif self._path.gate.is_closed:  # its turn had come, to be read for another backend, and is over again
            self._path.registry.queue.leave(self, self._decided.flow, now=time.monotonic(), cost=0.0)
            self._in_queue = False
            self._proceed()
        elif asked.loading:
            self._answer_list(self._decided)
        else:
            self._8_ask_backend()

    def _on_ready(self) -> None:
        self._ready = True
        self._queued_at = time.monotonic()
        if not self.parked:
            self._proceed()

    # the steps ----------------------------------------------------------------------------------------------------

    def _0_enter(self, entry: AgentEntry) -> None:
        """Puts it in flight for its agent, until `_leave`; a closed gate parks it and wakes the agent."""
        self._counts_for(entry, entry.bodies)
        try:
            if not entry.gate.begin(self, self._begun_at):
                self.parked = True
                self.deadline = self._begun_at + self._path.settings.proxy.gate_wait_s
        except AgentAsleep as error:
            self._refusal = error
        self._path.on_activity(entry.row.id)

    def _1_who_asks(self, request: Request) -> AgentEntry:
        """The listener decides: an agent's own is that agent, with any token but another's; elsewhere a token."""
        token, request.target = split_token(request.target)
        token = token or bearer(request)
        entry = self._path.registry.by_model_token(token) if token else None
        if entry is None and not self._connection.needs_token:
            entry = self._entry
        if entry is None and not self._path.registry.heard:
            raise Saturated("Hive has just started and does not know the agents yet", retry_after_s=1)
        if entry is None or (self._entry is not None and entry is not self._entry):
            request.keep_alive = False
            raise Unauthorized("no valid token: send Authorization: Bearer, x-api-key, or a path under /a/<token>")
        if self._entry is None:
            if not self._path.has_room(entry):
                request.keep_alive = False
                raise Saturated(f"{len(entry.connections)} connections of this agent are open", retry_after_s=1)
            self._path.claim(self._connection, entry.connections)
            self._connection.owner = entry
            self._0_enter(entry)
            if self._refusal is not None:
                raise self._refusal
        return entry

    def _2_may_be_asked(self, request: Request) -> Endpoint:
        path, is_closed = self._path, self._path.gate.is_closed
        backend = None if is_closed else path.backend  # it is judged again once the backend is known
        endpoint = endpoints.find(request.method, request.target, None if backend is None else backend.kind)
        if not is_closed:
            path.check_offered(endpoint)
        return endpoint

    def _3_not_too_often(self, decided: Decided) -> None:
        """Charges the agent's window, then its tenant's if it has one; a refused request is charged to neither."""
        assert self._entry is not None
        if not decided.endpoint.counts:
            return
        now, window, tenant = self._begun_at, self._entry.window, decided.tenant
        wait_s = window.take(now)
        if wait_s is not None:
            raise too_many(f"agent {self._entry.row.name}", window, wait_s)
        self._charged = [window]
        if tenant.window is not None:
            wait_s = tenant.window.take(now)
            if wait_s is not None:
                window.give_back(now)
                raise too_many(f"Tenant {tenant.name}", tenant.window, wait_s)
            self._charged.append(tenant.window)

    def _5_what_is_asked(self, request: Request, entry: AgentEntry, decided: Decided) -> None:
        """Reads the body; a body that takes long is read in a process of its own, as on the loop it would hold up all
        requests."""
        path = self._path
        if decided.endpoint.name == RESPONSES and self._turn is None and (stored := path.keeps_for(entry)) is not None:
            self._read_turn(request, entry, decided, stored)
            return
        plan = path.plan(entry, decided.endpoint, decided.tenant, decided.wishes, self.request_id)
        pieces = request.body  # kept until it is sent: another backend may be there before its turn is
        is_alone = path.readers is None
        try:
            asked = body.read_on_loop(pieces, self._body_bytes, plan.rules, plan.want, is_alone=is_alone)
        except HiveError as error:
            self.refuse(error)
            return
        if asked is not None:
            self._on_asked(asked)
        elif path.readers is not None:
            self._pending = path.readers.read(pieces, plan.rules, plan.want, self._on_asked, owner=entry)

    def _6_which_model(self, caller: Caller, asked: body.Asked) -> body.Asked:
        """Finds the model. Raises Refusal for a model that the caller may not use, NotFound for one that no backend
        offers."""
        reason = may(caller, Act.USE, self._path.meant(asked.model))
        if reason is not None:
            raise Refusal(reason)
        return body.for_model(asked, self._path.routed(asked.model, caller))

    def _proceed(self) -> None:
        """7: lists are answered here; what occupies the model waits for its turn, the rest where there is none now."""
        decided, entry, queue = self._decided, self._entry, self._path.registry.queue
        assert decided is not None
        assert entry is not None
        gate, asked = self._path.gate, self._asked
        if decided.endpoint.keeps is not None:
            self._cost = NOTHING
            self._pending = spawn(self._answer_kept(decided, entry, decided.endpoint.keeps), name="kept response")
            return
        if self._path.answers(decided.endpoint) or (asked is not None and asked.loading and not gate.is_closed):
            self._answer_list(decided)
            return
        now = time.monotonic()
        if not decided.endpoint.takes_slot and not gate.is_closed:
            self._8_ask_backend()
            return
        tokens = 1.0 if asked is None else expected(asked.size, entry.usual_tokens_out, asked.max_tokens)
        verdict = queue.ask(self, decided.flow, band=decided.wishes.band, expected=tokens, now=now)
        if verdict is QueueVerdict.GO:
            self._in_queue = True
            self._8_ask_backend()
            return
        if verdict is QueueVerdict.FULL:
            self.refuse(gate.refusal(now) if gate.is_closed else queue_full(queue, decided.flow, now))
            return
        self._in_queue = True
        self._limit_at = max(now + self._path.settings.proxy.queue_wait_s, gate.until)
        self.deadline = min(self._limit_at, self._beat_at)
        while queue.displaced:
            queue.displaced.pop().on_displaced()
        self._path.make_way(self)

    def _again_for_another(self) -> None:
        """Decides and reads it again, as it was done for a backend that is gone. It keeps its slot."""
        request, entry, decided = self._request, self._entry, self._decided
        assert request is not None
        assert entry is not None
        assert decided is not None
        self._for = self._path.backends
        try:
            if not self._path.gate.is_closed:
                self._path.check_offered(decided.endpoint)
        except HiveError as error:
            self.refuse(error)
            return
        if self._path.answers(decided.endpoint):
            self._answer_list(decided)
        elif self._asked is None:
            self._8_ask_backend()
        else:
            self._5_what_is_asked(request, entry, decided)

    def on_turn(self) -> None:
        """A slot is this request's own now."""
        if not self._left:
            self._8_ask_backend()

    def on_displaced(self) -> None:
        """Ends with a refusal: its place in the queue went to another request."""
        self._in_queue = False
        if not self._left and self._decided is not None:
            self.refuse(queue_full(self._path.registry.queue, self._decided.flow, time.monotonic()))

    def _8_ask_backend(self) -> None:
        if self._for != self._path.backends:
            self._again_for_another()
            return
        now = time.monotonic()
        self._path.metrics.queued(now - self._queued_at)
        pool, proxy = self._path.pool, self._path.settings.proxy
        if pool is None:
            self._cost = NOTHING
            self.refuse(self._path.why_no_way or no_backend())
            return
        self._sent_at = now
        if proxy.request_s:
            self._ends_at = now + proxy.request_s
        self._limit_at = min(now + proxy.first_byte_s, self._ends_at)
        self.deadline = min(self._limit_at, self._beat_at)
        connection = pool.take()
        if connection is None:
            self._pending = pool.connect(self)
        else:
            self._send(connection, reused=True)

    def on_connected(self, connection: UpstreamConnection) -> bool:
        self._pending = None
        if self._left:
            return False
        self._send(connection, reused=False)
        return True

    def on_unconnected(self, error: HiveError) -> None:
        self._pending = None
        self._cost = NOTHING
        if not self._left:
            self.refuse(error)

    def _send(self, connection: UpstreamConnection, *, reused: bool) -> None:
        assert self._decided is not None
        assert self._request is not None
        self._upstream = connection
        self._request.body = []
        line, asked, way = self._decided.endpoint.request_line, self._asked, connection.way
        if asked is not None and asked.target:
            line = endpoints.find(b"POST", asked.target.encode()).request_line
        line = way.line(line) if way.prefix else line
        if asked is None:
            connection.send(way.bare % line, self, reused=reused)
            return
        head = way.full % (line, asked.size)
        pieces = asked.upstream
        if len(pieces) == 1:
            connection.send(head + pieces[0], self, reused=reused)
        else:
            connection.send(head, self, reused=reused, more=pieces)

    # 9: bytes through ---------------------------------------------------------------------------------------------

    def on_answer(self, head: Response) -> None:
        self._close_if_draining()
        self._path.answered(head.status)
        try:
            self._open_answer().take_head(head, self._own_fields())
        except HiveError as error:
            self.refuse(error)

    def _open_answer(self) -> Answer:
        answer = self._answer
        if answer is None:
            decided, request = self._decided, self._request
            assert decided is not None
            assert request is not None
            found = (decided.endpoint, self._asked, decided.caller, self.request_id)
            answer = self._answer = Answer(self._connection, request, *found, *self._path.differences(decided))
        return answer

    def on_data(self, data: bytes, *, last: bool) -> None:
        if not data and not last:
            return  # the head alone: it waits for the first byte of the body, so that nonsense can still be a 502
        answer = self._answer
        assert answer is not None
        assert answer.reading is not None
        now = time.monotonic()
        if data:
            data = answer.meter(data)
            if self._first_at is None and answer.reading.begun:
                self._first_at = now
        if last:
            self._end(answer, data, now)
            return
        if self._first_at is not None:
            self.deadline = min(now + self._path.settings.proxy.between_bytes_s, self._ends_at)
        try:
            if answer.broken:
                raise answer.failure(data)
            if self._turn is not None:
                self._keep(self._turn, answer)
            answer.relay(data)
        except HiveError as error:
            self.refuse(error)

    def _end(self, answer: Answer, data: bytes, now: float) -> None:
        """The last bytes: metered first, then written."""
        rest = answer.end()
        self._upstream = None
        try:
            if not answer.whole:
                raise answer.failure(data, rest)
            data = answer.prepare(data + rest)
            if self._turn is not None:
                self._keep(self._turn, answer)
        except HiveError as error:
            self.refuse(error)
            return
        self._tail = data
        if not self._10_meter(now, cut=False, then=self._finish):
            self._finish()
        self._leave(now)

    def _finish(self) -> None:
        """Sends the last bytes, as the usage event is on disk."""
        assert self._answer is not None
        self._answer.finish(self._tail)
        self._connection.finished(keep=True)
        if self._entry is not None and self._entry.gate.owes_quiet:
            self._entry.gate.settle(time.monotonic())

    def on_closed(self) -> None:
        """An answer without length ended with the connection: whole only if the dialect's end marker was seen."""
        answer = self._answer
        assert answer is not None
        self._upstream = None
        rest = answer.end()
        if answer.reading is not None and answer.reading.events:
            self._end(answer, rest, time.monotonic())
        else:
            self.refuse(StreamIncomplete())

    def on_failed(self, error: HiveError, *, retry: bool) -> None:
        self._upstream = None
        begun = self._answer is not None and self._answer.begun
        if retry and not begun and self._path.pool is not None and self._for == self._path.backends:
            self._pending = self._path.pool.connect(self)
        elif begun:
            self.refuse(StreamIncomplete(error.message))
        else:
            self.refuse(error)

    # 10: its cost -------------------------------------------------------------------------------------------------

    def _10_meter(self, now: float, *, cut: bool, status: int = 0, then: Callable[[], None] | None = None) -> bool:
        """Writes one usage event for a request that occupied the model, to the spool before the client has the last
        byte.

        True: `then` is called when it is there, with all that end in this turn of the loop. Without `then` it is there.
        """
        decided, entry, path, answer = self._decided, self._entry, self._path, self._answer
        if decided is None or entry is None:
            return False
        endpoint = decided.endpoint
        if answer is not None and (answer.begun or not status):
            status = answer.status or status
        cost = UNKNOWN if answer is None else cost_of(answer.reading, cut=cut, status=answer.status)
        ttft_s = self._first_at - self._begun_at if self._first_at is not None else None
        path.metrics.ended(
            endpoint.name,
            decided.tenant.name,
            status,
            cut=cut,
            duration_s=now - self._begun_at,
            ttft_s=ttft_s,
            tokens_in=cost.tokens_in,
            tokens_out=cost.tokens_out,
        )
        if not endpoint.takes_slot or not self._sent_at:
            return False
        if self._cost is UNKNOWN:
            self._cost = cost
        if cost.tokens_out:
            entry.learn_tokens_out(cost.tokens_out)
        if not path.settings.inference.token_tracking:
            return False
        path.usage.record(
            UsageEvent(
                id=self.request_id,
                epoch=path.epoch,
                event_no=0,
                agent_id=entry.row.id,
                tenant=decided.tenant.name,
                model=(self._asked.served or self._asked.model) if self._asked else "",
                backend=path.backend.kind if path.backend else "",
                endpoint=endpoint.name,
                tokens_in=cost.tokens_in,
                tokens_out=cost.tokens_out,
                cached_tokens=cost.cached,
                estimated=cost.estimated,
                cut=cut,
                queue_ms=int((self._sent_at - self._queued_at) * 1e6) / 1e3,  # `round` costs three times as much
                ttft_ms=None if ttft_s is None else int(ttft_s * 1e6) / 1e3,
                duration_ms=int((now - self._begun_at) * 1e6) / 1e3,
                status=status,
                client_request_id=decided.client_id,
                created_at=time.time(),
            ),
            then,
        )
        return True

    # every exit ---------------------------------------------------------------------------------------------------

    def refuse(self, error: HiveError) -> None:
        """Ends with an error: an answer where no byte has gone out yet, else the last words of a stream that is cut."""
        if self._left:
            return
        now, connection, answer = time.monotonic(), self._connection, self._answer
        if answer is not None:
            answer.end()
        if isinstance(error, Saturated):  # it is Hive that has no room: that is not charged
            for window in self._charged or ():
                window.give_back(self._begun_at)
        self._path.metrics.refused(error.code)
        self._10_meter(now, cut=True, status=error.status)
        if answer is not None and answer.begun:
            last_words = answer.last_words(error)
            self._leave(now)
            connection.cut(last_words)
            return
        self._close_if_draining()
        keep = self._answer_with(error, self._dialect, self._own_fields(), self.request_id)
        self._leave(now)
        connection.finished(keep=keep)

    def on_gone(self) -> None:
        """The client left: everything it caused is cancelled."""
        if self._left:
            return
        now = time.monotonic()
        self._path.metrics.cancelled(self.state)
        if self._answer is not None:
            self._answer.end()
        self._10_meter(now, cut=True)
        self._leave(now)

    def _leave(self, now: float) -> None:
        """Gives back the slot, the place in the queue, the budget and the gate; once, on every exit."""
        self._release()
        path, entry = self._path, self._entry
        if self._pending is not None:
            self._pending.cancel()
            self._pending = None
        if entry is None:
            return
        if self._in_queue and self._decided is not None:
            turns = path.registry.queue.leave(self, self._decided.flow, now=now, cost=self._cost.total)
            if turns:
                path.registry.give_turns(turns)
        if self._entered:
            entry.gate.unpark(self)
            entry.gate.end(now)
            path.on_activity(entry.row.id)

    # waiting ------------------------------------------------------------------------------------------------------

    def on_deadline(self, now: float) -> None:
        self.deadline = NEVER
        proxy = self._path.settings.proxy
        if self.parked:
            self._refuse_as_asleep(proxy.gate_wait_s, self._path.registry.wakes)
        elif self._first_at is None and now < self._limit_at:
            self._beat(now)
        elif not self._sent_at and self._path.gate.is_closed:
            self._wait_on(now, self._path.gate)
        elif not self._sent_at:
            assert self._decided is not None
            self.refuse(no_slot(self._path.registry.queue, self._decided.flow, now, proxy.queue_wait_s))
        elif now >= self._ends_at:
            self.refuse(BackendTimeout(f"the request took longer than {proxy.request_s:g} s"))
        elif self._blocked:  # and holds a slot that others wait for
            self.refuse(RequestTimeout(f"the client read nothing for {proxy.between_bytes_s:g} s"))
        elif self._first_at is None:
            self.refuse(BackendTimeout(f"the backend sent nothing for {proxy.first_byte_s:g} s"))
        else:
            self.refuse(BackendTimeout(f"the backend stalled for {proxy.between_bytes_s:g} s"))

    def _wait_on(self, now: float, gate: BackendGate) -> None:
        """Moves the deadline of a request that began to wait before the gate was closed (again): it waits as long as
        later ones."""
        if now >= gate.until:
            self.refuse(gate.refusal(now))
            return
        self._limit_at = gate.until
        self.deadline = min(self._limit_at, self._beat_at)

    def _beat(self, now: float) -> None:
        """Sends a sign of life to a client that waits for a stream and asked for signs of life."""
        assert self._decided is not None
        if not self._blocked and self._open_answer().can_beat:
            self._open_answer().beat(self._own_fields())
        self._beat_at = now + self._decided.heartbeat_s
        self.deadline = min(self._limit_at, self._beat_at)

    # small things -------------------------------------------------------------------------------------------------

    def _close_if_draining(self) -> None:
        """The proxy is on its way out: this answer is the last on its connection."""
        if self._path.draining and self._request is not None:
            self._request.keep_alive = False

    @property
    def _dialect(self) -> Dialect:
        if self._decided is not None:
            return self._decided.endpoint.dialect
        return endpoints.dialect_of(self._request.target if self._request is not None else b"")

    def _own_fields(self) -> bytes:
        waited_s = self._sent_at - self._queued_at if self._sent_at else 0.0
        request_id = self.request_id.encode()
        fields = b"x-request-id: %b\r\nx-queue-wait-ms: %d\r\n" % (request_id, int(waited_s * 1000))
        if self._dialect is Dialect.ANTHROPIC:  # where its clients look for it
            fields += b"request-id: %b\r\n" % request_id
        return fields if self._asked is None else fields + self._asked.changes()

    def _answer_list(self, decided: Decided) -> None:
        self._cost = NOTHING
        try:
            said = self._said(decided)
        except HiveError as error:
            self.refuse(error)
            return
        self._say(said)

    def _say(self, said: lists.OwnAnswer) -> None:
        """The whole answer is Hive's own."""
        request = self._request
        assert request is not None
        self._close_if_draining()
        self._10_meter(now := time.monotonic(), cut=False, status=200)
        keep, content = request.keep_alive, said.content
        head = answer_head(
            200, len(content), self._own_fields() + said.fields, keep=keep, content_type=said.content_type
        )
        self._connection.write(head if request.method == b"HEAD" else head + content)
        self._leave(now)
        self._connection.finished(keep=keep)

    def _said(self, decided: Decided) -> lists.OwnAnswer:
        endpoint, asked = decided.endpoint, self._asked
        if asked is not None and endpoint.name == endpoints.COUNT:
            return lists.estimated(asked.kept, asked.upstream)
        models = self._path.seen(decided)
        if asked is None or not loading.is_asked(endpoint, asked):
            named = (asked.served or asked.model) if asked is not None else ""
            return lists.answer_any(endpoint, decided.target, models, decided.caller, named)
        if self._path.pool is None:
            raise self._path.why_no_way or no_backend()
        served = self._path.routed(asked.model, decided.caller)
        return loading.answer(endpoint, asked, served, models, time.time())
