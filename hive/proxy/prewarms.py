"""Prewarms: prompts the backend reads ahead of their agents' requests, sent in the agents' name.

Each is a request like any other, on the same way from its first byte on: it is injected, routed, translated and counted
as the agent's own would be. Three things differ. It passes no gate, so it wakes no agent and keeps none awake. No
window is charged. In the queue it stands behind all requests, with a place of its own, and gives its place back if a
request waits for one.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from hive.backends.kinds import spec_of
from hive.bodies.body import Asked
from hive.domain import Band, Caller
from hive.endpoints import endpoints
from hive.endpoints.endpoints import Endpoint
from hive.errors import BackendDown, HiveError, NotFound, NotSupported, Saturated
from hive.link.link import LinkReply, failed
from hive.link.prompts import Prewarm, Prewarmed
from hive.metering.cost import UNKNOWN, RequestCost, cost_of
from hive.models.salts import is_kept
from hive.proxy.datapath import DataPath, Decided, Prepared
from hive.proxy.forward import Exchange
from hive.proxy.registry import AgentEntry
from hive.routing.slot import Slot
from hive.routing.wishes import Wishes
from hive.tasks import spawn
from hive.wire import connection as wire
from hive.wire.http1 import Request

QUESTION = "."
"""The user's turn; an agent's own differs from it, so the kept prefix ends with the system message (seeds/000 §5)."""
LAST = Wishes(band=Band.LOW)
ANSWER_MAX_BYTES = 64 * 1024
"""Bound for an answer of one token, or for an error."""

Connect = Callable[[socket.socket, Callable[[wire.Connection], wire.HttpExchange]], wire.Connection | None]


class PrewarmOutcome:
    """The result of a prewarm, filled in by its exchange."""

    __slots__ = ("cost", "error", "model", "status")

    def __init__(self) -> None:
        self.error: HiveError | None = None
        self.cost: RequestCost = UNKNOWN
        self.status = 0
        self.model = ""


class Ahead(Exchange):
    """A prompt on its way to the server in `slot`. `entry` stands for the agent (`Registry.stand_in`)."""

    __slots__ = ("_outcome", "_stand_in", "_wanted")

    def __init__(
        self, path: DataPath, entry: AgentEntry, slot: Slot, outcome: PrewarmOutcome, connection: wire.Connection
    ) -> None:
        super().__init__(path, connection)
        self._belongs_to(entry)
        self._stand_in = entry
        self._wanted = slot
        self._outcome = outcome
        path.shares.enter(connection, entry.connections)
        slot.ahead[self] = None

    def give_way(self) -> bool:
        if not self.sent_at:
            return False
        self.refuse(Saturated("a request needs its place", retry_after_s=1))
        return True

    def gate_closed(self) -> None:
        self.refuse(not_for_it(self._wanted))

    def _decide(self, request: Request) -> Prepared:
        entry = self._stand_in
        endpoint = self._2_may_be_asked(request)
        decided = Decided(
            fields=request.fields,
            generation=self._path.registry.generation,
            target=request.target,
            endpoint=endpoint,
            caller=entry.caller,
            tenant=entry.tenant,
            flow=entry.flow,
            wishes=LAST,
            heartbeat_s=0.0,
            client_id=None,
            opening=self._path.opening(entry, endpoint),
        )
        return Prepared(request, entry, decided)

    def _begin_at(self, slot: Slot, prepared: Prepared) -> None:  # noqa: ARG002
        """Counts not as begun: nobody asked for it."""
        self.generation = slot.generation

    def _3_not_too_often(self, prepared: Prepared) -> None:
        """Charges no window: the request is Hive's own."""

    def _6_which_model(self, caller: Caller, named: str) -> tuple[str, Slot]:
        """Raises NotSupported for a model that is far, also where this agent's own requests may go there."""
        served, slot = super()._6_which_model(caller, named)
        if slot is not self._wanted:
            raise NotSupported("its model has another server since a moment ago; it is tried again at the next start")
        if slot.name and slot.gate.is_closed:
            raise not_for_it(slot)
        why = self._path.routing.where.why_far(served)
        if not why and slot.backend is not None and slot.is_far(slot.backend, served):
            why = "its server is on another machine"
        if why:
            raise NotSupported(f"nothing is read ahead that leaves the box: {why}")
        return served, slot

    def _on_asked(self, asked: Asked | HiveError) -> None:
        super()._on_asked(asked)
        if self.asked is not None:
            self._outcome.model = self.asked.answering

    def _10_meter(self, now: float, *, cut: bool, status: int = 0, then: Callable[[], None] | None = None) -> bool:
        answer = self._answer
        self._outcome.cost = cost_of(answer.reading if answer is not None else None, cut=cut)
        self._outcome.status = answer.status if answer is not None else 0
        return super()._10_meter(now, cut=cut, status=status, then=then)

    def refuse(self, error: HiveError, *, cut: bool = True) -> None:
        if not self.left:
            self._outcome.error = error
        super().refuse(error, cut=cut)

    def _leave(self, now: float) -> None:
        self._wanted.ahead.pop(self, None)
        super()._leave(now)


class Prewarms:
    """The prewarms of one proxy. `connect`: makes a connection of a socket, as of one that was accepted."""

    def __init__(self, path: DataPath, connect: Connect) -> None:
        self._path = path
        self._connect = connect
        self._under_way: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"<Prewarms {len(self._under_way)} under way>"

    def begin(self, wanted: Prewarm, reply: LinkReply) -> None:
        """`reply` is called once it has ended."""
        task = spawn(self._carry_out(wanted, reply), name=f"prewarm {wanted.agent}")
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    def stop(self) -> None:
        """The proxy leaves, and waits for none of them."""
        for task in list(self._under_way):
            task.cancel()

    async def _carry_out(self, wanted: Prewarm, reply: LinkReply) -> None:
        try:
            reply(await self._read(wanted))
        except HiveError as error:
            reply(failed(error))
        except OSError as error:
            reply(failed(Saturated(f"no socket could be made: {error.strerror}")))

    async def _read(self, wanted: Prewarm) -> Prewarmed:
        entry = self._path.registry.stand_in(wanted.agent)
        if entry is None:
            raise NotFound("the agent is not known here")
        outcome, begun_at = PrewarmOutcome(), time.monotonic()
        try:
            slot = self._slot_of(entry, wanted)
            target = self._may(slot, wanted.model)
            self._is_worth_it(entry, slot, target)
            answer = await self._ask(entry, slot, target, wanted, outcome)
        finally:
            self._path.registry.stands_in_no_more(entry)
        if outcome.error is not None:
            raise outcome.error
        if outcome.status != 200:
            raise BackendDown(_why_not(outcome.status, answer))
        took_ms = (time.monotonic() - begun_at) * 1000
        cost = outcome.cost
        return Prewarmed(model=outcome.model, tokens_in=cost.tokens_in, cached_tokens=cost.cached, took_ms=took_ms)

    def _slot_of(self, entry: AgentEntry, wanted: Prewarm) -> Slot:
        """The slot of the agent's model. Raises Refusal."""
        slots = self._path.slots
        if not (slots.pooled and wanted.model):
            return slots.active
        try:
            return slots.routed(wanted.model, entry.caller)[1]
        except NotFound:  # perhaps a new one: the request itself looks for it
            return slots.active

    def _may(self, slot: Slot, model: str) -> Endpoint:
        """The endpoint it is sent to. Raises Saturated if no backend answers just now, NotSupported if it would be in
        vain."""
        backend = slot.backend
        if self._path.draining:
            raise Saturated("the proxy is restarting")
        if slot.name and slot.gate.is_closed:
            raise not_for_it(slot)
        if backend is None or slot.gate.is_closed:
            raise Saturated("no inference server is active")
        requests = spec_of(backend.kind).requests
        if requests.why_not_ahead:
            raise NotSupported(requests.why_not_ahead)
        if not model:
            raise NotFound("the agent has no model", hint="give it one, or set default_model")
        return endpoints.find(b"POST", requests.prompt_target)

    def _is_worth_it(self, entry: AgentEntry, slot: Slot, endpoint: Endpoint) -> None:
        """Raises NotSupported where the backend is told to keep nothing of this agent's prompts."""
        want = slot.want(endpoint, entry.tenant, LAST, "")
        if not is_kept(want.inject):
            groups = self._path.registry.cache_groups()
            raise NotSupported(f"prompts of {groups} groups would meet in its cache, so it is told to keep none")

    async def _ask(
        self, entry: AgentEntry, slot: Slot, endpoint: Endpoint, wanted: Prewarm, outcome: PrewarmOutcome
    ) -> bytes:
        """The answer, with its head. A cancellation has the effect of a client that leaves: all that the request caused
        ends."""
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        with ours:
            ours.setblocking(False)
            theirs.setblocking(False)
            connection = self._connect(theirs, partial(Ahead, self._path, entry, slot, outcome))
            if connection is None:
                theirs.close()
                raise Saturated("too many connections are open")
            await loop.connect_accepted_socket(lambda: connection, theirs)
            await loop.sock_sendall(ours, request_of(endpoint, wanted))
            answer = b""
            while piece := await loop.sock_recv(ours, ANSWER_MAX_BYTES):
                answer = (answer + piece)[:ANSWER_MAX_BYTES]
        return answer


def not_for_it(slot: Slot) -> NotSupported:
    """The refusal of a prompt whose model is not loaded."""
    return NotSupported(f"the model {slot.model} is not loaded, and no model is loaded to read a prompt ahead")


def request_of(endpoint: Endpoint, wanted: Prewarm) -> bytes:
    """The request, of one token, as an agent would write it.

    >>> wanted = Prewarm(agent="a", model="m", system_prompt="Be kind.")
    >>> request_of(endpoints.find(b"POST", b"/api/chat"), wanted).partition(b"\\r\\n\\r\\n")[2]
    b'{"model":"m","messages":[{"role":"system","content":"Be kind."},{"role":"user","content":"."}],\
"stream":false,"options":{"num_predict":1}}'
    """
    messages = [{"role": "system", "content": wanted.system_prompt}, {"role": "user", "content": QUESTION}]
    asked: dict[str, Any] = {"model": wanted.model, "messages": messages, "stream": False}
    one_token = {"options": {"num_predict": 1}} if endpoint.target == b"/api/chat" else {"max_tokens": 1}
    body = msgspec.json.encode(asked | one_token)
    fields = b"host: hive\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: %d" % len(body)
    return b"POST %b HTTP/1.1\r\n%b\r\n\r\n%b" % (endpoint.target, fields, body)


def _why_not(status: int, answer: bytes) -> str:
    said = " ".join(answer.partition(b"\r\n\r\n")[2][:200].decode(errors="replace").split())
    return f"the backend answered {status}: {said}" if status else "it was broken off"
