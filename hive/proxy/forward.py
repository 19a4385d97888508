"""The data path: one request from its first byte to its last, read top to bottom.

Callbacks, not tasks: nothing on this path awaits, and in steady state nothing is asked of SQLite or the daemon. Every
exit passes `_leave`, which gives back all that was taken. The way back (step 9) is `answer.py`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial

from hive.bodies import body
from hive.bodies.body import BodyChoice, NamedBody
from hive.bodies.body_workers import BodyReading
from hive.dialects.translators import RESPONSES
from hive.domain import BackendInfo, CacheMode, Caller, Dialect, UsageEvent
from hive.endpoints import endpoints
from hive.endpoints.endpoints import Endpoint, Meter
from hive.endpoints.lists import OwnAnswer
from hive.errors import (
    AgentAsleep,
    BackendDown,
    HiveError,
    ModelCold,
    NotApproved,
    Saturated,
    StreamIncomplete,
    Unauthorized,
)
from hive.metering.cost import NOTHING, UNKNOWN, RequestCost, cost_of, expected
from hive.metering.runner_answers import RunnerEvents
from hive.pool.ladder import StepCause
from hive.proxy import background_answers, kept_answers, own_answers
from hive.proxy.answer import NO_REUSE, Answer
from hive.proxy.background_answers import StreamAnswer
from hive.proxy.background_responses import BackgroundStream
from hive.proxy.datapath import DataPath, Decided, Prepared
from hive.proxy.identity import bearer, client_id, heartbeat_of, is_local_only, split_token, wishes_of
from hive.proxy.ladder import Climb
from hive.proxy.refusals import (
    answer_error,
    asleep,
    budget_over,
    cluster_away,
    crashed_it,
    no_backend,
    no_place,
    no_room_for_bodies,
    queue_full,
    timeout,
    too_many,
    upload_displaced,
)
from hive.proxy.registry import OPERATOR, AgentEntry
from hive.proxy.runner_work import RunnerWork, budget_tokens
from hive.proxy.stopping import Stopping
from hive.proxy.stored_responses import StoredResponses
from hive.proxy.stored_turn import TurnStorage, turn_of
from hive.proxy.upload import FormUpload
from hive.queue.body_budget import HeldBody
from hive.queue.budgets import BudgetHold
from hive.queue.gate import Gate
from hive.queue.limits import SlidingWindow
from hive.queue.queue import Queue, QueueVerdict
from hive.routing.id_slots import IdSlots
from hive.routing.parked import SlotPlace, take_place
from hive.routing.slot import Slot
from hive.routing.wishes import NO_WISHES, Wishes
from hive.tasks import spawn
from hive.wire.connection import Connection
from hive.wire.deadlines import NEVER
from hive.wire.http1 import Request, Response, answer_head, answered_later
from hive.wire.upstream import UpstreamConnection, is_untaken

_GO, _FULL, _ANTHROPIC, _RUNNER = QueueVerdict.GO, QueueVerdict.FULL, Dialect.ANTHROPIC, Meter.RUNNER
"""By names of their own, see `hive.queue.gate`."""
MIB = 1024 * 1024
KEPT_BODY_MAX = MIB
"""Bytes of a body that is kept until its answer begins; a longer one is sent once."""

KeptWork = Callable[[], Awaitable[OwnAnswer | BackgroundStream]]
"""Asks the daemon for an answer about responses."""


class Exchange:
    """One request on its way, made at its first byte. The numbers are those of the table in design.md §3.

    `prepared` is there from step 2, `_answer` from step 8 or the first sign of life; both until the end (`left`), so
    that nothing which comes later finds them. `asked` is there from step 5, for a request with a body. `queued_at` and
    `sent_at` are 0 until it is ready, and until the backend is asked. `parked`: it waits for its agent to wake.
    `deadline`: when `on_deadline` is due, on the monotonic clock.
    """

    __slots__ = (
        "_answer",
        "_backend",
        "_beat_at",
        "_blocked",
        "_budget_at",
        "_charged",
        "_climb",
        "_connection",
        "_cost",
        "_ends_at",
        "_engine",
        "_epochs",
        "_first_at",
        "_for",
        "_gate",
        "_had_turn",
        "_has_left",
        "_held",
        "_hold",
        "_limit_at",
        "_line",
        "_path",
        "_pending",
        "_place",
        "_refusal",
        "_relayed",
        "_request",
        "_slot",
        "_storage",
        "_told_model",
        "_upload",
        "_upstream",
        "_work",
        "asked",
        "begun_at",
        "deadline",
        "entry",
        "generation",
        "is_sent",
        "left",
        "parked",
        "prepared",
        "queued_at",
        "request_id",
        "sent_at",
    )

    def __init__(self, path: DataPath, connection: Connection) -> None:
        self._path = path
        self._connection = connection
        self.request_id = path.next_id()
        self.begun_at = time.monotonic()
        self.queued_at = self.sent_at = 0.0
        self._first_at: float | None = None
        self.deadline = self._limit_at = self._beat_at = self._ends_at = self._budget_at = NEVER
        self.parked = self.left = self._blocked = self.is_sent = False
        self._hold: BudgetHold | None = None
        """Its expected cost, as it counts against budgets."""
        self._has_left = False
        """True once it was sent to a server that is far, whichever answers it in the end."""
        self._had_turn = False
        """True once its turn was in vain: it goes back to where it was in the line."""
        self._line: Queue | None = None
        """The line in which it waits or has a place."""
        self.entry: AgentEntry | None = None
        self._gate: Gate | None = None
        """Gate at which it counts as in flight."""
        self._held = HeldBody(path.budget)
        self._request: Request | None = None
        self._refusal: HiveError | None = None
        self.prepared: Prepared | None = None
        self._charged: tuple[SlidingWindow, ...] = ()
        self.asked: body.Asked | None = None
        self._storage: TurnStorage | None = None
        """Of a request to `/v1/responses`; None if storage is off."""
        self._pending: BodyReading | asyncio.Task[None] | None = None
        """Work under way for it elsewhere: reading a long body, looking for a model, asking for what was kept, or
        making a connection."""
        self._slot = path.slot
        self._for = path.slot.version
        """The server in the slot for which it was decided and read."""
        self._epochs = path.registry.epochs
        """The epochs of flushes with which it was read."""
        self._engine = self._told_model = ""
        """Of an adapter: the name by which it was read, and what its answer says of that."""
        self.generation = 0
        """The slot's, of the server that it goes to; 0 before, and for the active backend."""
        self._backend: BackendInfo | None = None
        """The server that was asked."""
        self._upstream: UpstreamConnection | None = None
        self._answer: Answer | None = None
        self._relayed: StreamAnswer | None = None
        """The answer that has begun with events of a response made in the background."""
        self._cost = UNKNOWN
        self._upload: FormUpload | None = None
        """Its form with a file, of an endpoint that takes one."""
        self._work: RunnerWork | None = None
        """Its work at a runner, from step 5; None where tokens are what it costs."""
        self._place: SlotPlace | None = None
        """Its slot of a llama-server, where Hive names that."""
        self._climb: Climb | None = None
        """Its way down a task's ladder; None where it names a model."""
        path.deadlines.add(self)
        if isinstance(connection.owner, AgentEntry):
            self._0_enter(connection.owner)

    def __repr__(self) -> str:
        name = self.prepared.decided.endpoint.name if self.prepared else "?"
        return f"<Exchange {self.request_id} {name} {self.state}>"

    @property
    def state(self) -> str:
        """Its state by the names under which the metrics count requests whose client left."""
        if self.parked:
            return "parked"
        if self._relayed is not None:
            return "streaming"
        if not self.queued_at:
            return "uploading" if self._pending is None else "reading"
        if not self.sent_at:
            return "queued"
        if self._upstream is None:
            return "connecting"
        if self._first_at is None:
            return "waiting"
        return "streaming" if self.asked is not None and self.asked.stream else "answering"

    @property
    def slot(self) -> Slot:
        """The slot that it is for, by what is known of it: the active backend's until its model is."""
        return self._slot

    @property
    def waits_for(self) -> Slot | None:
        """The slot in whose line it waits for a place."""
        return self._slot if self._line is not None and not self.sent_at else None

    @property
    def events(self) -> int | None:
        """Data events of its answer so far, comments and pings left out; None before the answer's head."""
        answer = self._answer
        return None if answer is None or answer.reading is None else answer.reading.events

    @property
    def rung(self) -> int | None:
        """The place of its model in the ladder of the task that it names; None where it names none."""
        return None if self._climb is None else self._climb.rung

    @property
    def keep_s(self) -> float:
        """The time for which its task wants the model kept after its answer."""
        return 0.0 if self._climb is None else self._climb.task.keep_alive_s

    @property
    def agent(self) -> str:
        """The id of its agent, empty where it is not known yet."""
        return "" if self.entry is None else self.entry.row.id

    @property
    def job(self) -> str:
        """The model job whose own request it is; empty for all others."""
        return ""

    @property
    def is_blocked(self) -> bool:
        """Whether its client does not read, so that its answer stands still."""
        return self._blocked

    # the request comes in -----------------------------------------------------------------------------------------

    def on_head(self, request: Request) -> None:
        self._request = request
        self._for = self._slot.version
        if self._refusal is None:
            try:
                self.prepared = prepared = self._prepare(request)
                self._3_not_too_often(prepared)
                if prepared.decided.endpoint.form:
                    self._begin_form(prepared)
            except HiveError as error:
                self._refusal = error
        if self._refusal is not None and not answered_later(request):
            self.refuse(self._refusal)

    def _prepare(self, request: Request) -> Prepared:
        """Steps 1 and 2. Heads of one connection repeat: an equal one is decided as the one before it was."""
        entry, known = self.entry, self._connection.decided
        if (
            entry is not None
            and isinstance(known, Decided)
            and known.fields is request.fields
            and known.generation == self._path.registry.generation
        ):
            return Prepared(request, entry, known)
        return self._decide(request)

    def _decide(self, request: Request) -> Prepared:
        entry = self._1_who_asks(request)
        endpoint = self._2_may_be_asked(request)
        registry = self._path.registry
        wishes = self._wishes(request, entry)
        caller, tenant, flow = entry.caller, entry.tenant, entry.flow
        if wishes.tenant and wishes.tenant != tenant.name:
            caller, tenant, flow = registry.on_behalf_of(wishes.tenant)
        if entry.row.id == OPERATOR:
            registry.note_operators_group(tenant.cache_group)
        decided = self._connection.decided = Decided(
            fields=request.fields,
            generation=registry.generation,
            target=request.target,
            endpoint=endpoint,
            caller=caller,
            tenant=tenant,
            flow=flow,
            wishes=wishes,
            heartbeat_s=heartbeat_of(request, self._path.settings.proxy.heartbeat_s),
            client_id=client_id(request),
            opening=self._path.opening(entry, endpoint),
            is_local_only=self._is_local_only(request),
            budgets=self._path.budgets.accounts_of(entry, tenant),
        )
        return Prepared(request, entry, decided)

    def _wishes(self, request: Request, entry: AgentEntry) -> Wishes:
        """The wishes of its caller that count."""
        return wishes_of(request) if entry.row.id == OPERATOR else NO_WISHES

    def _is_local_only(self, request: Request) -> bool:
        """Whether it is not to leave the box, by its own word."""
        return is_local_only(request)

    def on_request(self, request: Request) -> None:
        self._held.is_in(self)
        prepared = self.prepared
        if self._upload is not None and self._refusal is None:
            self._end_form(self._upload, request)
        if self._refusal is not None:
            self.refuse(self._refusal)
        elif prepared is not None and prepared.decided.endpoint.body:
            self._5_what_is_asked(prepared)
        elif prepared is not None:
            self._on_ready(prepared)

    def _on_ready(self, prepared: Prepared) -> None:
        self.queued_at = self.queued_at or time.monotonic()  # one that is read again for another adapter keeps its age
        if not self.parked:
            self._7_take_turn(prepared)
        else:
            self.deadline = min(self.deadline, self._budget_at)

    # 0: its agent is awake ----------------------------------------------------------------------------------------

    def _0_enter(self, entry: AgentEntry) -> None:
        """Puts it in flight for its agent, until `_leave`; a closed gate parks it and wakes the agent."""
        self._belongs_to(entry)
        self._gate = entry.gate
        try:
            if not entry.gate.begin(self, self.begun_at):
                self.parked = True
                self.deadline = self.begun_at + self._path.settings.proxy.gate_wait_s
        except AgentAsleep as error:
            self._refusal = error
        self._path.on_activity(entry.row.id)

    def _belongs_to(self, entry: AgentEntry) -> None:
        self.entry = entry
        self._held.share = entry.bodies

    def on_gate_open(self) -> None:
        self.parked = False
        self.deadline = NEVER
        prepared = self.prepared
        if prepared is not None and self.queued_at:
            self._7_take_turn(prepared)
        elif not self.left and (self._request is None or not self._request.complete):
            self._connection.restart_clock()

    def on_gate_refused(self, error: HiveError) -> None:
        self.parked = False
        self.refuse(error)

    # 1 to 3: what its head says -----------------------------------------------------------------------------------

    def _1_who_asks(self, request: Request) -> AgentEntry:
        """The listener decides: an agent's own is that agent, with any token but another's; elsewhere a token."""
        token, request.target = split_token(request.target)
        token = token or bearer(request)
        entry = self._path.registry.by_model_token(token) if token else None
        if entry is None and not self._connection.needs_token:
            entry = self.entry
        if entry is None and not self._path.registry.heard:
            raise Saturated("Hive has just started and does not know the agents yet", retry_after_s=1)
        if entry is None or (self.entry is not None and entry is not self.entry):
            request.keep_alive = False
            raise Unauthorized("no valid token: send Authorization: Bearer, x-api-key, or a path under /a/<token>")
        if self.entry is None:
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
        """Finds the row of the allowlist, and checks the body that the head announces against it: kind and length."""
        slots, active = self._path.slots, self._slot
        backend = None if active.gate.is_closed or slots.pooled else active.backend  # else it is judged with its model
        endpoint = endpoints.find(request.method, request.target, None if backend is None else backend.kind)
        slots.check_offered(endpoint)
        endpoints.check_body(endpoint, request)
        return endpoint

    def _3_not_too_often(self, prepared: Prepared) -> None:
        """Charges the agent's window, then its tenant's if it has one; a refused request is charged to neither."""
        if not prepared.decided.endpoint.counts:
            return
        now, window, tenant = self.begun_at, prepared.entry.window, prepared.decided.tenant
        wait_s = window.take(now)
        if wait_s is not None:
            raise too_many(f"agent {prepared.entry.row.name}", window, wait_s)
        if tenant.window is None:
            self._charged = (window,)
            return
        wait_s = tenant.window.take(now)
        if wait_s is not None:
            window.give_back(now)
            raise too_many(f"Tenant {tenant.name}", tenant.window, wait_s)
        self._charged = (window, tenant.window)

    # 4: its body comes in -----------------------------------------------------------------------------------------

    def on_body(self, size: int) -> None:
        request = self._request
        if self._refusal is not None or request is None:
            return
        if self._upload is None:
            self._4_not_too_much(request, size)
        else:
            self._upload.take_in(self)

    def _4_not_too_much(self, request: Request, size: int) -> None:
        """Takes room for `size` bytes of it from the body budget."""
        upload = self if request.body_bytes != request.content_length else None
        if not self._held.take(size, upload=upload):
            raise no_room_for_bodies()

    def _begin_form(self, prepared: Prepared) -> None:
        """Its body is a form with a file, which goes to the disk as it comes. Raises WrongMediaType, BadRequest,
        Saturated."""
        entry, target = prepared.entry, prepared.decided.endpoint.name
        self._upload = FormUpload(self._path.uploads, entry.uploads, target, prepared.request)

    def _end_form(self, upload: FormUpload, request: Request) -> None:
        """From here on its text fields are its body."""
        try:
            text = upload.end(self)
        except HiveError as error:
            self._refusal = error
            return
        request.body = [text]
        if not self._held.take(len(text)):
            self._refusal = no_room_for_bodies()

    def on_body_displaced(self) -> None:
        """Ends with a refusal while its body is coming in, as its room went to another agent."""
        self.refuse(upload_displaced())

    # 5 and 6: what its body says ----------------------------------------------------------------------------------

    def _5_what_is_asked(self, prepared: Prepared) -> None:
        """Reads the body; a body that takes long is read in a process of its own, as on the loop it would hold up all
        requests."""
        path, decided = self._path, prepared.decided
        if decided.endpoint.name == RESPONSES and self._storage is None:
            stored = path.keeps_for(prepared.entry)
            if stored is not None:
                self._take_up_storage(prepared, stored)
                return
        self._pending = None
        pieces, readers = prepared.request.body, path.readers  # kept until it is sent: it may have to be read again
        text = b"".join(pieces) if readers is None else body.light_text(pieces, self._held.size)
        if text is None:
            self._read_in_worker(prepared)
            return
        assert decided.opening is not None
        try:
            opened = body.open_body(text, *decided.opening)
        except HiveError as error:
            self.refuse(error)
            return
        choice = self._choose(prepared, opened.named)
        if choice is None:
            return
        try:
            asked = body.complete(opened, choice.want, choice.served, on_loop=readers is not None)
        except body.TooHeavyHere:
            self._read_in_worker(prepared)
        except HiveError as error:
            self.refuse(error)
        else:
            self._on_asked(asked)

    def _read_in_worker(self, prepared: Prepared) -> None:
        readers, opening, entry = self._path.readers, prepared.decided.opening, prepared.entry
        assert readers is not None
        assert opening is not None
        choose = partial(self._choose, prepared)
        self._pending = readers.read(prepared.request.body, *opening, choose, self._on_asked, owner=entry)

    def _take_up_storage(self, prepared: Prepared, stored: StoredResponses) -> None:
        """Looks into the body before it is read: only a request that names what is stored waits for the daemon, which
        has it."""
        kept_mb = self._path.settings.proxy.responses_kept_mb if stored.is_here else 0
        whole = b"".join(prepared.request.body)
        try:
            turn = turn_of(whole, most_bytes=kept_mb * MIB, job=self.job)
            storage = TurnStorage(stored, prepared.entry.row.id, self._held, turn, body=whole)
        except HiveError as error:
            self.refuse(error)
            return
        self._storage = storage
        if storage.names_stored:
            self._pending = spawn(self._complete_body(prepared, storage), name="stored response")
        else:
            if storage.is_rewritten:
                prepared.request.body = storage.plain_body()
            self._5_what_is_asked(prepared)

    async def _complete_body(self, prepared: Prepared, storage: TurnStorage) -> None:
        request, longest = prepared.request, self._path.settings.proxy.body_max_bytes
        try:
            request.body = await storage.whole_body(request.body_bytes, most_bytes=longest)
        except HiveError as error:
            self._pending = None
            self.refuse(error)
        else:
            self._pending = None
            self._5_what_is_asked(prepared)

    def _on_asked(self, asked: body.Asked | HiveError) -> None:
        """The body has been read, here or elsewhere."""
        self._pending = None
        prepared = self.prepared
        if prepared is None:
            return
        if isinstance(asked, HiveError):
            self.refuse(asked)
            return
        if self._storage is not None:
            asked = self._storage.shown_in(asked)
        decided, self.asked = prepared.decided, asked
        if decided.endpoint.meter is _RUNNER:
            file_bytes = 0 if self._upload is None else self._upload.size
            self._work = RunnerWork(decided.endpoint, asked, file_bytes, self._slot.line)
        if decided.heartbeat_s and asked.stream and decided.endpoint.needs_place and prepared.request.chunks:
            self._beat_at = time.monotonic() + decided.heartbeat_s
        if self._answer is not None:
            self._answer.asked = asked
        if self._line is None:
            self._on_ready(prepared)
        elif self._slot.gate.is_closed or self._line is not self._slot.line:
            # its turn had come, to be read for another server, and is over again
            self._leave_line(prepared, time.monotonic(), 0.0)
            self._7_take_turn(prepared)
        elif asked.loading:
            self._answer_here(prepared)
        else:
            self._8_ask_backend(prepared)

    def _choose(self, prepared: Prepared, named: NamedBody) -> BodyChoice | None:
        """Finds what the model's server wants of the body. None where the request is refused, or waits for a new list
        of models to be read again then."""
        path, decided = self._path, prepared.decided
        try:
            climb = self._climb or (self._begin_climb(prepared, named) if path.tasks.names else None)
            served, slot = self._6_which_model(decided.caller, named.model) if climb is None else climb.choose()
            engine = path.slots.adapters.engines.get(served, "")
            want = path.want_of(slot, engine, prepared.entry, decided, self.request_id)
            self._epochs, self._engine = path.registry.epochs, engine
            self._told_model = path.slots.told(named.model, served)
        except HiveError as error:
            refused = own_answers.refusal(decided.endpoint, error)
            again = partial(self._5_what_is_asked, prepared)
            self._pending = path.look_again(error, again, lambda _: self.refuse(refused))
            return None
        if slot is not self._slot and self._slot.suspects.one is not None:
            self._slot.suspects.let_go(self)
        self._slot, self._for = slot, slot.version
        return BodyChoice(want, served)

    def _begin_climb(self, prepared: Prepared, named: NamedBody) -> Climb | None:
        """Begins on the ladder of the task that is named; None where it is none. The body is kept for the next rung."""
        path = self._path
        task = path.tasks.of(path.routing.meant(named.model))
        if task is None:
            return None
        self._climb = climb = Climb(
            path,
            task,
            prepared.entry,
            prepared.decided,
            partial(self._which_rung, prepared),
            body=prepared.request.body,
            named=named,
            begun_at=self.begun_at,
        )
        self._budget_at = self._ends_at = climb.ends_at
        return climb

    def _which_rung(self, prepared: Prepared, model: str, rung: int) -> tuple[str, Slot]:
        """Finds the model of a rung, and its server, as for a request that names it; a later one is a fallback. Raises
        CloudRefused besides."""
        entry, decided = prepared.entry, prepared.decided
        served, slot = self._6_which_model(decided.caller, model)
        self._path.cloud_guard.check_model(slot, entry, decided, model, served, is_fallback=bool(rung))
        return served, slot

    def _6_which_model(self, caller: Caller, named: str) -> tuple[str, Slot]:
        """Finds the model that is meant, and its server. Raises Refusal for one that the caller may not use, NotFound
        for one that no server offers."""
        return self._path.which_model(named, caller)

    # 7: its turn --------------------------------------------------------------------------------------------------

    def _7_take_turn(self, prepared: Prepared) -> None:
        """Answers what is Hive's own to answer; what occupies the model waits for its turn, the rest while there is no
        backend."""
        slot, entry, decided, asked = self._slot, prepared.entry, prepared.decided, self.asked
        if slot.is_gone or self.has_other_adapter:
            slot.suspects.let_go(self)
            if slot.is_gone:
                self._slot = self._path.slot
            self._5_what_is_asked(prepared)
            return
        gate, queue, endpoint = slot.gate, slot.line, decided.endpoint
        if endpoint.keeps is not None:
            ask = partial(kept_answers.said_of_kept, self._path, entry, endpoint.keeps, decided.target)
            self._answer_soon(prepared, partial(ask, heartbeat_s=decided.heartbeat_s))
            return
        if self._storage is not None and self._storage.body:
            if slot.may_leave and not self._may_leave(prepared, slot):
                return
            self._climb = None  # the job's own request goes down the ladder
            self._answer_soon(
                prepared,
                partial(background_answers.said_at_begin, self._path, entry, asked, self._storage.body, decided),
            )
            return
        if self._path.slots.answers(slot, endpoint) or (asked is not None and asked.loading and not gate.is_closed):
            self._answer_here(prepared)
            return
        if slot.may_leave and not self._may_leave(prepared, slot):
            return
        if not endpoint.needs_place and not gate.is_closed:
            self._8_ask_backend(prepared)
            return
        now = time.monotonic()
        if self._path.crash_marks.suspicions and slot.name and self._is_held_back(entry, slot, now):
            return
        if gate.is_cold and (in_vain := self.why_in_vain(now)) is not None:
            self.refuse(in_vain)
            return
        if decided.budgets and not self._is_within_budget(prepared, slot):
            return
        tokens = self._expected(prepared)
        if not self._had_turn:
            verdict = queue.ask(self, decided.flow, band=decided.wishes.band, expected=tokens, now=now)
        else:
            flow, since = decided.flow, self.queued_at
            verdict = queue.ask_again(self, flow, band=decided.wishes.band, expected=tokens, now=now, since=since)
        if verdict is _FULL:
            self.refuse(gate.refusal(now) if gate.is_closed else queue_full(queue, decided.flow, now))
            return
        self._line = queue
        if verdict is _GO:
            self._8_ask_backend(prepared)
            return
        place_by = now + self._path.settings.proxy.queue_wait_s
        until = gate.until_for(self.queued_at) if gate.is_cold else max(place_by, gate.until_for(now))
        self._limit_at = min(until, self._budget_at)
        self.deadline = min(self._limit_at, self._beat_at)
        while queue.displaced:
            queue.displaced.pop().on_displaced()
        slot.make_way(self)
        if gate.is_cold:
            self._path.on_demand(slot)

    def _is_within_budget(self, prepared: Prepared, slot: Slot) -> bool:
        """Counts its expected cost against the budgets of its agent and tenant, from now until it ends. A step to
        another server asks anew. False: it is refused."""
        is_far = self._is_far(slot)
        if (hold := self._hold) is not None:
            if self._had_turn and hold.is_far == is_far:
                return True
            hold.release()
            self._hold = None
        work, settings = self._work, self._path.settings
        tokens = self._expected(prepared) if work is None else budget_tokens(settings.budget.prices, work.expected)
        try:
            self._hold = self._path.budgets.take(prepared.decided.budgets, tokens, is_far=is_far)
        except HiveError as error:
            self._cost = NOTHING
            self.refuse(error)
            return False
        return True

    def _expected(self, prepared: Prepared) -> float:
        """Tokens that it will probably cost, or that its work counts as in the line of its server."""
        asked = self.asked
        if self._work is not None:
            return self._work.expected_tokens
        return 1.0 if asked is None else expected(asked.size, prepared.entry.usual_tokens_out, asked.max_tokens)

    def _is_far(self, slot: Slot) -> bool:
        """Whether it leaves the box if it goes to this slot."""
        asked, backend = self.asked, slot.backend
        model = "" if asked is None else asked.answering
        return slot.may_leave and backend is not None and slot.is_far(backend, model)

    def _is_held_back(self, entry: AgentEntry, slot: Slot, now: float) -> bool:
        """Whether it goes no further now because the server has crashed with its agent's requests (crash_marks.py)."""
        marks, agent = self._path.crash_marks, entry.row.id
        left_s = marks.refused_for_s(slot.name, agent, now)
        if left_s:
            self.refuse(crashed_it(slot.model, left_s))
            return True
        if not marks.is_slowed(slot.name, agent, now) or slot.suspects.may_go(self):
            return False
        proxy = self._path.settings.proxy
        until = slot.gate.until_for(self.queued_at)
        until = until if slot.gate.is_cold else max(self.queued_at + proxy.queue_wait_s, until)
        self._limit_at = min(until, self._budget_at)
        self.deadline = min(self._limit_at, self._beat_at)
        return True

    def why_in_vain(self, now: float) -> ModelCold | NotApproved | None:
        """The refusal where its wait for a load cannot hold, by what is known now."""
        return self._slot.gate.why_in_vain(now, self.queued_at, self._budget_at)

    def go_on(self) -> None:
        """Takes its turn: the suspect's request before it has ended."""
        if self.prepared is not None:
            self.deadline = NEVER
            self._7_take_turn(self.prepared)

    @property
    def engine(self) -> str:
        """The name of the adapter at its server that it was read for; empty where it names none."""
        return self._engine

    @property
    def has_other_adapter(self) -> bool:
        """Whether other weights answer to the name of its adapter than when it was read, or none do."""
        asked = self.asked
        if not self._engine or asked is None:
            return False
        return self._path.slots.adapters.engines.get(asked.answering) != self._engine

    def read_again(self) -> None:
        """Reads it again, as its adapter is another one now; it waits in a line, and keeps its age."""
        prepared, line = self.prepared, self._slot
        if prepared is None or self._pending is not None or self.sent_at or self._line is None:
            return
        self.deadline, self._had_turn = NEVER, True
        self._leave_line(prepared, time.monotonic(), 0.0)
        self._5_what_is_asked(prepared)
        if line.gate.is_cold:
            self._path.on_demand(line)

    def hold_back(self) -> None:
        """Its agent has become a suspect while it waited in the line."""
        if self.prepared is not None and self._pending is None and not self.sent_at:
            self._go_back(self.prepared)

    def _go_back(self, prepared: Prepared) -> None:
        """Goes back to where it was in the line; nothing has been sent."""
        self.sent_at, self._ends_at, self.deadline = 0.0, self._budget_at, NEVER
        self.generation = 0
        self._had_turn = True
        self._leave_line(prepared, time.monotonic(), 0.0)
        self._7_take_turn(prepared)

    def on_turn(self) -> None:
        """A place is this request's own now."""
        if self.prepared is not None:
            self._8_ask_backend(self.prepared)

    def on_displaced(self) -> None:
        """Ends with a refusal: its position in the queue went to another request."""
        self._line = None
        if self.prepared is not None:
            self.refuse(queue_full(self._slot.line, self.prepared.decided.flow, time.monotonic()))

    # 8: the backend is asked --------------------------------------------------------------------------------------

    def _8_ask_backend(self, prepared: Prepared) -> None:
        slot, proxy = self._slot, self._path.settings.proxy
        if self._for != slot.version or self._epochs is not self._path.registry.epochs or self.has_other_adapter:
            self._again_for_another(prepared)
            return
        if slot.id_slots is not None and self._is_unparked_first(slot, slot.id_slots, prepared):
            return
        now = time.monotonic()
        self._path.metrics.queued(now - self.queued_at)
        pool, self._backend = slot.pool, slot.backend
        if pool is None:
            self._cost = NOTHING
            self.refuse(slot.why_no_way or no_backend())
            return
        if slot.may_leave and not self._may_leave(prepared, slot, at_once=True):
            return
        has_moved = self._hold is not None and self._hold.is_far != self._is_far(slot)  # its server, meanwhile
        if has_moved and not self._is_within_budget(prepared, slot):
            return
        self.sent_at = now
        if slot.name:
            self._begin_at(slot, prepared)
        if proxy.request_s:
            self._ends_at = min(now + proxy.request_s, self._budget_at)
        self._limit_at = min(now + slot.first_byte_s, self._ends_at)
        self.deadline = min(self._limit_at, self._beat_at)
        connection = pool.take()
        if connection is None:
            self._pending = pool.connect(self)
        else:
            self._send(prepared, connection, reused=True)

    def _is_unparked_first(self, slot: Slot, table: IdSlots, prepared: Prepared) -> bool:
        """Gives it a slot of its llama-server. True: it goes on once what its agent left there is put back."""
        asked, entry, decided, place = self.asked, prepared.entry, prepared.decided, self._place
        if place is not None and place.table is table:
            if not (place.was_unparked and slot.gate.is_closed):
                return False
            self._go_back(prepared)
            return True
        if place is not None:
            place.end(whole=False)
            self._place = None
        if self._line is None:
            return False
        if asked is None or asked.several or not slot.takes_slot(asked.target or decided.endpoint.name):
            table.forget()
            return False
        agent, group, is_kept = entry.prompts_of, decided.tenant.cache_group, slot.keeps(decided.wishes)
        place = self._place = take_place(table, agent, group, is_kept=is_kept)
        parked = self._path.parked
        if place is None or entry.row.id != agent or not parked.is_at(agent, slot.name):
            return False
        self.deadline = NEVER
        self._pending = spawn(self._unpark(prepared, slot, place, group, is_kept=is_kept), name="parked slot")
        return True

    async def _unpark(self, prepared: Prepared, slot: Slot, place: SlotPlace, group: str, *, is_kept: bool) -> None:
        await self._path.parked.use(prepared.entry.row.id, slot, place, group, is_kept=is_kept)
        self._pending = None
        self._8_ask_backend(prepared)

    def _may_leave(self, prepared: Prepared, slot: Slot, *, at_once: bool = False) -> bool:
        """Asks the cloud guard where the slot's server, or its model, is far; `at_once`: it is sent now. False: it is
        refused."""
        guard, entry, decided = self._path.cloud_guard, prepared.entry, prepared.decided
        try:
            leaves = guard.check(slot, entry, decided, self.asked, is_fallback=self._is_fallback(decided))
        except HiveError as error:
            self._cost = NOTHING
            self.refuse(error)
            return False
        if leaves and at_once:
            self._has_left = True
            guard.leaves(slot, entry, decided, self.asked)
        return True

    def _is_fallback(self, decided: Decided) -> bool:
        """Whether its model stands in for the first one of the task that it names."""
        climb = self._climb
        if climb is None or climb.rung is None:
            return False
        return climb.rung > 0 or self._path.routing.is_later_target(climb.task.rungs[0], decided.caller)

    def _begin_at(self, slot: Slot, prepared: Prepared) -> None:
        """Counts as begun at this slot of the pool."""
        self.generation = slot.generation
        slot.band = prepared.decided.wishes.band
        slot.begun += 1
        if self._climb is not None:
            slot.keep_s = max(slot.keep_s, self.keep_s)
        if slot.begun == 1:
            self._path.on_begun(slot)

    def _again_for_another(self, prepared: Prepared) -> None:
        """Decides and reads it again: it was done for a backend that is gone, or before a flush. It keeps its place."""
        slot, endpoint = self._slot, prepared.decided.endpoint
        self._for, self._epochs = slot.version, self._path.registry.epochs
        try:
            slot.check_offered(endpoint)
        except HiveError as error:
            self.refuse(error)
            return
        if self._path.slots.answers(slot, endpoint):
            self._answer_here(prepared)
        elif self.asked is None:
            self._8_ask_backend(prepared)
        else:
            self._5_what_is_asked(prepared)

    def on_connected(self, connection: UpstreamConnection) -> bool:
        self._pending = None
        if self.prepared is None:
            return False
        if self._is_from_before_flush:  # it came while the connection was made
            self._read_again(self.prepared, BackendDown("the connection ended, and the prompt cache was flushed"))
            return False
        self._send(self.prepared, connection, reused=False)
        return True

    def on_unconnected(self, error: HiveError) -> None:
        self._pending = None
        prepared, slot = self.prepared, self._slot
        if prepared is not None and slot.name:
            if is_untaken(error):
                self._lose(slot)
            if self._can_go_back(prepared, slot):
                self._go_back(prepared)
                return
        self._cost = NOTHING
        is_cluster = self._backend is not None and self._backend.cluster is not None
        self.refuse(cluster_away(error) if is_cluster and self._climb is None else error)

    def _lose(self, slot: Slot) -> None:
        """The server that it was for is gone; unless that is known already, or another one is there."""
        if not slot.gate.is_closed and self._for == slot.version:
            self._path.on_lost(slot)

    def _can_go_back(self, prepared: Prepared, slot: Slot) -> bool:
        """Whether it may wait for the next server of its slot: one is to come, and none has taken it yet."""
        if self._climb is not None and self._climb.can_step(StepCause.DOWN):
            return False
        return (
            self._is_whole(prepared)
            and not (self.is_sent or self.left)
            and (slot.gate.is_closed or self._for != slot.version)
        )

    def _is_whole(self, prepared: Prepared) -> bool:
        """Whether its body can be read again."""
        return self.asked is None or bool(prepared.request.body)

    @property
    def _is_from_before_flush(self) -> bool:
        """Whether its body was read with the epochs of before a flush, so that it would find what is flushed."""
        return self.asked is not None and self._epochs is not self._path.registry.epochs

    def _read_again(self, prepared: Prepared, error: HiveError) -> None:
        """Goes back to be read with the epochs of now; ends with `error` where its body is gone."""
        if self._is_whole(prepared):
            self.is_sent = False
            self._go_back(prepared)
        else:
            self.refuse(error)

    def _send(self, prepared: Prepared, connection: UpstreamConnection, *, reused: bool) -> None:
        self._upstream = connection
        self.is_sent = True
        self._open_answer(prepared)
        if not self.generation or self._held.size > KEPT_BODY_MAX:
            prepared.request.body = []  # a slot of the pool may have lost its server: then it is read for the next one
        line, asked, way = prepared.decided.endpoint.request_line, self.asked, connection.way
        if asked is not None and asked.target:
            line = endpoints.find(b"POST", asked.target.encode()).request_line
        line = way.line(line) if way.prefix else line
        if asked is None:
            connection.send(way.bare % line, self, reused=reused)
            return
        if self._work is not None:
            self._send_to_runner(asked, line, connection, reused=reused)
            return
        size, pieces = asked.size, asked.upstream
        if self._place is not None:
            size, pieces = self._place.named_in(pieces, size)
        head = way.full % (line, size)
        if len(pieces) == 1:
            connection.send(head + pieces[0], self, reused=reused)
        else:
            connection.send(head, self, reused=reused, more=pieces)

    def _send_to_runner(self, asked: body.Asked, line: bytes, connection: UpstreamConnection, *, reused: bool) -> None:
        """Sends a form with its file, or what is asked for under the id that the request has here."""
        text, way = b"".join(asked.upstream), connection.way
        if self._upload is not None:
            connection.send_file(self._upload.body(line, way, text), self, reused=reused)
            return
        named = b"x-request-id: %b\r\n\r\n" % self.request_id.encode()
        connection.send((way.full % (line, len(text)))[:-2] + named + text, self, reused=reused)

    def on_failed(self, error: HiveError, *, retry: bool) -> None:
        self._upstream = None
        slot, prepared = self._slot, self.prepared
        if self.generation and isinstance(error, BackendDown):
            self.is_sent = not is_untaken(error)
            if self.is_sent:
                slot.suspects.lost(self.agent, self.generation, time.monotonic())
        begun = self._answer is not None and self._answer.begun
        if retry and not begun and slot.pool is not None and self._for == slot.version:
            if prepared is not None and self._is_from_before_flush:
                self._read_again(prepared, error)
                return
            self._pending = slot.pool.connect(self)
            return
        if prepared is not None and not (self.is_sent or begun or self._had_turn):
            self._lose(slot)
            if self._can_go_back(prepared, slot):
                self._go_back(prepared)
                return
        if begun:
            self.refuse(StreamIncomplete(error.message))
        else:
            self.refuse(error)

    # 9: bytes through ---------------------------------------------------------------------------------------------

    def _open_answer(self, prepared: Prepared) -> Answer:
        answer = self._answer
        if answer is None:
            decided = prepared.decided
            aliases, hidden, caller = self._path.routing.differences(decided.endpoint, decided.caller)
            answer = self._answer = Answer(
                self._connection,
                prepared.request,
                decided.endpoint,
                self.asked,
                caller,
                self.request_id if self._storage is None else self._storage.tag(self.request_id),
                aliases,
                hidden,
            )
        return answer

    def on_answer(self, head: Response) -> None:
        self._close_if_draining()
        self._path.answered(head.status)
        if self.generation and self._request is not None:
            self._request.body = []
        try:
            if self._answer is not None:
                self._answer.take_head(head, self._own_fields())
        except HiveError as error:
            self.refuse(error)

    def on_data(self, data: bytes, *, last: bool) -> None:
        answer = self._answer
        if answer is None or not (data or last):
            return  # the head alone: it waits for the first byte of the body, so that nonsense can still be a 502
        now = time.monotonic()
        if data:
            data = answer.meter(data)
            if self._first_at is None and answer.has_content:
                self._first_at = self._slot.moved_at = now
        if last:
            self._end(answer, data, now)
        else:
            self._9_bytes_through(answer, data, now)

    def _9_bytes_through(self, answer: Answer, data: bytes, now: float) -> None:
        """Bytes that are not the last ones; `_end` has those."""
        if self._first_at is not None:
            self.deadline = min(now + self._path.settings.proxy.between_bytes_s, self._ends_at)
        try:
            if answer.broken:
                raise answer.failure(data)
            if self._storage is not None:
                self._storage.keep(self.request_id, answer)
            answer.relay(data)
        except HiveError as error:
            self.refuse(error)
        else:
            if self._upload is not None and answer.begun and self._upstream is not None and self._upstream.is_sent:
                self._upload.close(self)  # no other server will be asked

    def _end(self, answer: Answer, data: bytes, now: float) -> None:
        """The last bytes: metered first, then written."""
        rest = answer.end()
        self._upstream = None
        self._slot.moved_at = now
        try:
            if not answer.whole:
                raise answer.failure(data, rest)
            if self._place is not None:
                self._place.is_whole = answer.status == 200
            if answer.status >= 400 and self._climb is not None and self._steps_from(answer, data):
                return
            data = answer.prepare(data + rest, now - self.sent_at)
            if self._storage is not None:
                self._storage.keep(self.request_id, answer)
        except HiveError as error:
            self.refuse(error, cut=answer.begun or answer.status < 400)  # else it has the whole of the error
            return
        finish = partial(self._finish, answer, data)
        if not self._10_meter(now, cut=False, then=finish):
            finish()
        self._leave(now)

    def _finish(self, answer: Answer, data: bytes) -> None:
        """Sends the last bytes, as the usage event is on disk."""
        answer.finish(data)
        self._connection.finished(keep=True)
        if self._gate is not None and self._gate.owes_quiet:
            self._gate.settle(time.monotonic())

    def on_closed(self) -> None:
        """An answer without length ended with the connection: whole only if the dialect's end marker was seen."""
        answer = self._answer
        if answer is None:
            return
        self._upstream = None
        rest = answer.end()
        if answer.reading is not None and answer.reading.events:
            self._end(answer, rest, time.monotonic())
        else:
            if self.generation:
                self._slot.suspects.lost(self.agent, self.generation, time.monotonic())
            self.refuse(StreamIncomplete())

    def on_blocked(self) -> None:
        self._blocked = True
        if self._upstream is not None:
            self._upstream.pause()
        elif self._relayed is not None:
            self._relayed.stream.hold()

    def on_unblocked(self) -> None:
        self._blocked = False
        if self._upstream is not None:
            self._upstream.resume()
        elif self._relayed is not None:
            self._relayed.stream.go_on()

    # 10: its cost -------------------------------------------------------------------------------------------------

    def _10_meter(self, now: float, *, cut: bool, status: int = 0, then: Callable[[], None] | None = None) -> bool:
        """Writes one usage event for a request that occupied the model, to the spool before the client has the last
        byte.

        True: `then` is called when it is there, with all that end in this turn of the loop. Without `then` it is there.
        """
        prepared, path, answer = self.prepared, self._path, self._answer
        if prepared is None:
            return False
        entry, decided, backend = prepared.entry, prepared.decided, self._backend
        endpoint = decided.endpoint
        if answer is not None and (answer.begun or not status):
            status = answer.status or status
        if self._work is not None:
            cost = self._cost_of_work(self._work, decided, now, cut=cut)
        else:
            cost = UNKNOWN if answer is None else cost_of(answer.reading, cut=cut, status=answer.status)
        ttft_s = self._first_at - self.begun_at if self._first_at is not None else None
        path.metrics.ended(
            endpoint.name,
            decided.tenant.name,
            status,
            cut=cut,
            duration_s=now - self.begun_at,
            ttft_s=ttft_s,
            tokens_in=cost.tokens_in,
            tokens_out=cost.tokens_out,
        )
        if not endpoint.needs_place or not self.sent_at:
            return False
        if self._cost is UNKNOWN:
            self._cost = cost
        if cost.tokens_out:
            entry.learn_tokens_out(cost.tokens_out)
        hold = self._hold
        if hold is None and not self._has_left and not path.settings.inference.token_tracking:
            return False  # a budget counts what it cost, and what left the box is told of, metered or not
        asked = self.asked
        model = (asked.served or asked.model) if asked is not None else ""
        ended_at = time.time()
        event = UsageEvent(  # of 15 names at most: a call with more makes a dict of them first, 3 µs (Python 3.11)
            id=self.request_id,
            agent_id=entry.row.id,
            tenant=decided.tenant.name,
            model=model,
            backend=backend.kind if backend is not None else "",
            endpoint=endpoint.name,
            cut=cut,
            queue_ms=int((self.sent_at - self.queued_at) * 1e6) / 1e3,  # `round` costs three times as much
            ttft_ms=None if ttft_s is None else int(ttft_s * 1e6) / 1e3,
            duration_ms=int((now - self.begun_at) * 1e6) / 1e3,
            status=status,
            client_request_id=decided.client_id,
            created_at=ended_at,
            asked="" if asked is None else asked.model,
            far=self._has_left,
        )
        event.rung = self.rung
        cost.put_into(event)
        number = path.usage.record(event, then)
        if hold is not None:
            is_text, budget = self._work is None, path.settings.budget
            hold.spend(number, int(cost.total or 0) if is_text else budget_tokens(budget.prices, cost), ended_at)
        return True

    def _cost_of_work(self, work: RunnerWork, decided: Decided, now: float, *, cut: bool) -> RequestCost:
        if self._cost is NOTHING or not self.is_sent:
            return NOTHING
        answer = self._answer
        told, status = (None, 0) if answer is None else (answer.told_work, answer.status)
        if answer is not None and isinstance(answer.reading, RunnerEvents) and answer.reading.whole:
            cut = False  # SDKs close with the last event, before the end of the answer is there
        cost = work.cost(told, status=status, cut=cut, at_server_s=now - self.sent_at)
        if cost.amount:
            self._path.metrics.worked(decided.tenant.name, cost.unit, cost.amount, cost.work or 0.0)
        return cost

    # every exit ---------------------------------------------------------------------------------------------------

    def refuse(self, error: HiveError, *, cut: bool = True) -> None:
        """Ends with an error: an answer where no byte has gone out yet, else the last words of a stream that is cut.
        Does nothing where it has ended already. `cut`: an answer that had begun at the backend, or could, is lost."""
        if self.left or (self._climb is not None and self._steps_down(self._climb, error)):
            return
        now, connection, answer = time.monotonic(), self._connection, self._answer
        if answer is not None:
            answer.end()
        if isinstance(error, Saturated):  # it is Hive that has no room: that is not charged
            for window in self._charged:
                window.give_back(self.begun_at)
        self._path.metrics.refused(error.code)
        self._10_meter(now, cut=cut, status=error.status)
        begun = answer if answer is not None and answer.begun else self._relayed
        if begun is not None:
            last_words = begun.last_words(error)
            self._leave(now)
            connection.cut(last_words)
            return
        self._close_if_draining()
        keep = answer_error(connection, self._request, error, self._dialect, self._own_fields(), self.request_id)
        self._leave(now)
        connection.finished(keep=keep)

    def _steps_down(self, climb: Climb, error: HiveError) -> bool:
        """Whether it goes on to the next rung of its task instead of ending with this error. The client has no byte."""
        prepared, answer = self.prepared, self._answer
        if prepared is None or self._pending is not None or (answer is not None and answer.begun):
            return False
        if self._path.draining:  # the proxy goes, and what waits goes with it
            return False
        if not climb.steps_down(error, is_sent=self.is_sent, is_ready=bool(self.queued_at), slot=self._slot):
            return False
        self._begin_anew(prepared, climb)
        return True

    def _steps_from(self, answer: Answer, data: bytes) -> bool:
        """Whether it goes on to the next rung of its task instead of relaying its server's error."""
        prepared, climb = self.prepared, self._climb
        if prepared is None or climb is None or answer.begun or not climb.steps_from(answer.status, answer.told(data)):
            return False
        self._cost = NOTHING
        self._begin_anew(prepared, climb)
        return True

    def _begin_anew(self, prepared: Prepared, climb: Climb) -> None:
        """Gives back all that it had of one server, and reads the body again for the next rung."""
        if self._upstream is not None:
            self._upstream.cancel()
            self._upstream = None
        if self._answer is not None:
            self._answer.end()
            self._answer = None
        if self._line is not None:
            self._leave_line(prepared, time.monotonic(), self._cost.total)
        if self._slot.suspects.one is not None:
            self._slot.suspects.let_go(self)
        self._backend, self.asked, self._work, self._cost = None, None, None, UNKNOWN
        self.queued_at = self.sent_at = 0.0
        self._first_at = None
        self.deadline = self._limit_at = self._beat_at = NEVER
        self._ends_at = self._budget_at
        self.is_sent = self._had_turn = False
        self.generation = 0
        prepared.request.body = climb.body
        self._5_what_is_asked(prepared)

    def on_gone(self) -> None:
        """The client left: everything it caused is cancelled."""
        if self.left:
            return
        now = time.monotonic()
        self._path.metrics.cancelled(self.state)
        if self._answer is not None:
            self._answer.end()
        self._10_meter(now, cut=True)
        self._leave(now)

    def _leave(self, now: float) -> None:
        """Gives back the place, the position in the queue, the budget and the gate; once, on every exit."""
        path, gate, prepared = self._path, self._gate, self.prepared
        self.left = True
        self.prepared = self._answer = None
        path.deadlines.discard(self)
        if self._upstream is not None:
            self._stop(self._upstream, prepared)
            self._upstream = None
        if self._upload is not None:
            self._upload.close(self)
        self._held.release(self)
        if self._pending is not None:
            self._pending.cancel()
            self._pending = None
        if self._line is not None and prepared is not None:
            self._leave_line(prepared, now, self._cost.total)
        if self._hold is not None:
            self._hold.release()
            self._hold = None
        if self._slot.suspects.one is not None:
            self._slot.suspects.let_go(self)
        if gate is not None:
            gate.unpark(self)
            gate.end(now)
            path.on_activity(gate.agent)

    def _stop(self, connection: UpstreamConnection, prepared: Prepared | None) -> None:
        """Gives the answer up. A server that stops late keeps it in its place until it has stopped."""
        line = self._line
        if line is None or prepared is None or not (self._slot.stops_late and connection.is_sent):
            connection.cancel()
            return
        path, stopping = self._path, self._path.registry.stopping

        def leave(one: Stopping, now: float) -> None:
            del stopping[one]
            self._line = line
            self._leave_line(prepared, now, self._cost.total)

        self._line = None
        within_s = path.settings.proxy.between_bytes_s
        stopping[Stopping(self, prepared, connection, path.deadlines, leave, within_s=within_s)] = None

    def _leave_line(self, prepared: Prepared, now: float, cost: float | None) -> None:
        """Gives back its place, or its position in the line; requests that have their turn by that go."""
        line, self._line = self._line, None
        work = None
        if cost is None and self._work is not None:
            cost, work = self._work.charge(self._cost, at_server_s=now - self.sent_at)
        if (place := self._place) is not None:
            self._place = None
            place.end(whole=place.is_whole)
        if line is not None and (turns := line.leave(self, prepared.decided.flow, now=now, cost=cost, work=work)):
            self._path.registry.give_turns(turns)
        slot = self._slot
        if slot.gate.is_cold:
            self._path.on_demand(slot)
        elif slot.name and not slot.line.running:
            self._path.on_idle(slot)

    # waiting ------------------------------------------------------------------------------------------------------

    def on_deadline(self, now: float) -> None:
        self.deadline = NEVER
        prepared, slot, proxy = self.prepared, self._slot, self._path.settings.proxy
        if self.parked:
            self.parked = False
            if self._climb is not None and now >= self._budget_at:
                self._end_climb(self._climb, slot, now)
            else:
                self.refuse(asleep(proxy.gate_wait_s, self._path.registry.wakes))
        elif prepared is None:
            return
        elif self._first_at is None and now < self._limit_at:
            self._beat(prepared, now)
        elif self._climb is not None and now >= self._budget_at:
            self._end_climb(self._climb, slot, now)
        elif not self.sent_at and not slot.gate.is_closed:
            self.refuse(no_place(slot.line, prepared.decided.flow, now, proxy.queue_wait_s, slot.why_no_place))
        elif not self.sent_at and now >= slot.gate.until_for(self.queued_at):
            self.refuse(slot.gate.refusal(now, self.queued_at))
        elif not self.sent_at:  # the gate was closed (again) after it began to wait: it waits as long as later ones
            self._limit_at = min(slot.gate.until_for(self.queued_at), self._budget_at)
            self.deadline = min(self._limit_at, self._beat_at)
        else:
            is_over, begun = now >= self._ends_at, self._first_at is not None
            waits_s = slot.first_byte_s
            self.refuse(timeout(proxy, waits_s, is_over=is_over, is_blocked=self._blocked, has_begun=begun))

    def _end_climb(self, climb: Climb, slot: Slot, now: float) -> None:
        """The time that its task gives it is over: no other rung is tried."""
        climb.is_over = True
        self.refuse(budget_over(climb.task, slot.gate, now, is_sent=bool(self.sent_at)))

    def _beat(self, prepared: Prepared, now: float) -> None:
        """Sends a sign of life to a client that waits for a stream and asked for signs of life."""
        if not self._blocked and self._open_answer(prepared).can_beat:
            self._open_answer(prepared).beat(self._own_fields())
        self._beat_at = now + prepared.decided.heartbeat_s
        self.deadline = min(self._limit_at, self._beat_at)

    # answers of Hive's own ----------------------------------------------------------------------------------------

    def _answer_here(self, prepared: Prepared) -> None:
        self._cost = NOTHING
        try:
            said = own_answers.said_here(
                self._path, prepared.decided, self.asked, "" if self._climb is None else self._climb.served
            )
        except HiveError as error:
            self.refuse(error)
        else:
            self._say(prepared.request, said)

    def _answer_soon(self, prepared: Prepared, work: KeptWork) -> None:
        """Answers with what the daemon is asked for; a client that leaves ends it."""
        self._cost = NOTHING
        self._pending = spawn(self._answer_kept(prepared, work), name="kept response")

    async def _answer_kept(self, prepared: Prepared, work: KeptWork) -> None:
        try:
            said = await work()
            if isinstance(said, BackgroundStream):
                await self._relay_kept(prepared.request, said)
                return
        except HiveError as error:
            self._pending = None
            self.refuse(error)
        else:
            self._pending = None
            self._say(prepared.request, said)

    async def _relay_kept(self, request: Request, stream: BackgroundStream) -> None:
        """The events of a response that is made in the background, as they come. Raises as `relay`."""
        first = await stream.next()
        self._close_if_draining()
        self._relayed = answer = StreamAnswer(self._connection, request, self._own_fields(), stream)
        await stream.relay(first, answer.write)
        self._pending = None
        self._10_meter(now := time.monotonic(), cut=False, status=200)
        answer.finish()
        self._leave(now)
        self._connection.finished(keep=request.keep_alive)

    def _say(self, request: Request, said: OwnAnswer) -> None:
        """The whole answer is Hive's own."""
        self._close_if_draining()
        self._10_meter(now := time.monotonic(), cut=False, status=200)
        keep, content = request.keep_alive, said.content
        head = answer_head(
            200, len(content), self._own_fields() + said.fields, keep=keep, content_type=said.content_type
        )
        self._connection.write(head if request.method == b"HEAD" else head + content)
        self._leave(now)
        self._connection.finished(keep=keep)

    def _close_if_draining(self) -> None:
        """The proxy is on its way out: this answer is the last on its connection."""
        if self._path.draining and self._request is not None:
            self._request.keep_alive = False

    @property
    def _dialect(self) -> Dialect:
        if self.prepared is not None:
            return self.prepared.decided.endpoint.dialect
        return endpoints.dialect_of(self._request.target if self._request is not None else b"")

    @property
    def _is_cache_off(self) -> bool:
        """Whether its caller wants no cache used."""
        prepared = self.prepared
        return prepared is not None and prepared.decided.wishes.cache_mode is CacheMode.NONE

    def _own_fields(self) -> bytes:
        waited_s = self.sent_at - self.queued_at if self.sent_at else 0.0
        request_id = self.request_id.encode()
        fields = b"x-request-id: %b\r\nx-queue-wait-ms: %d\r\n" % (request_id, int(waited_s * 1000))
        if self._dialect is _ANTHROPIC:  # where its clients look for it
            fields += b"request-id: %b\r\n" % request_id
        if self._climb is not None:
            fields += self._climb.fields()
        elif self._told_model:
            fields += b"x-hive-model: %b\r\n" % self._told_model.encode()
        if self.asked is not None and self.asked.stream and self._is_cache_off:
            fields += NO_REUSE  # of a stream nothing else can be known before its end
        return fields if self.asked is None else fields + self.asked.changes()
