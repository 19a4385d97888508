"""The state that requests on the data path share: known agents, servers and their models, budgets and counters."""

from __future__ import annotations

import asyncio
import itertools
import logging
import sys
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from hive.bodies.body import Opening, Want
from hive.bodies.body_workers import DeepReaders
from hive.bodies.fields import FieldTable
from hive.domain import BackendInfo, Caller, ModelInfo, UsageEvent
from hive.endpoints.endpoints import Endpoint
from hive.errors import AdapterNotLoaded, HiveError, ModelCold, NotFound, Refusal, Saturated
from hive.link.adapters import AdapterRoute
from hive.link.pool import SlotRow
from hive.policy import Act, may
from hive.proxy.background_responses import BackgroundSource
from hive.proxy.budgets import Budgets
from hive.proxy.leaving import CloudGuard
from hive.proxy.metrics import Metrics
from hive.proxy.model_refresh import Looking
from hive.proxy.registry import OPERATOR, AgentEntry, Registry
from hive.proxy.stored_responses import StoredResponses
from hive.proxy.task_table import TaskTable
from hive.proxy.upload import UploadSpace
from hive.queue.body_budget import BodyBudget
from hive.queue.budgets import SpendingAccount
from hive.queue.connection_shares import ConnectionHolder, ConnectionShares
from hive.queue.crash_marks import CrashMarks
from hive.queue.queue import Flow, Queue
from hive.queue.tenants import Tenant
from hive.routing.parked import ParkedPrompts
from hive.routing.signed_models import SignedModels
from hive.routing.slot import ModelWish, Slot
from hive.routing.slots import SlotTable
from hive.routing.wishes import NO_WISHES, Wishes
from hive.settings.field_rules import FieldRules
from hive.settings.table import Settings
from hive.wire.connection import Connection
from hive.wire.deadlines import Deadlines
from hive.wire.heads import Fields
from hive.wire.http1 import Request

log = logging.getLogger("hive.proxy")

_USE = Act.USE
"""By a name of its own, see `hive.queue.gate`."""
WISH_S = 60.0
"""A model is asked for so long after a request of a task that prefers it took another one."""


class UsageLog(Protocol):
    """The log of what requests cost. An event survives a killed process once `record` returns or, with `then`, once
    `then` is called, at the end of this turn of the loop. `record` returns the event's number. Never raises."""

    def record(self, event: UsageEvent, then: Callable[[], None] | None = None) -> int: ...


class BodyPlan(msgspec.Struct, frozen=True):
    """The requirements of a server for the bodies of one caller at one endpoint, valid for this generation of the
    registry and these changes of the slot."""

    generation: int
    changes: int
    want: Want


class Decided(msgspec.Struct, frozen=True):
    """The result of steps 1 to 4 for a head. Heads of one connection repeat: the next equal one is decided by this.

    It holds as long as the registry's generation does. `fields` is the very list of the head it was made from.
    `opening`: what its body is read by, whatever server it is for; None for an endpoint without one.
    `is_local_only`: it says itself that it is not to leave the box. `budgets`: the accounts it is charged to.
    """

    fields: Fields
    generation: int
    target: bytes
    endpoint: Endpoint
    caller: Caller
    tenant: Tenant
    flow: Flow
    wishes: Wishes
    heartbeat_s: float
    client_id: str | None
    opening: tuple[FieldRules, Opening] | None
    is_local_only: bool = False
    budgets: tuple[SpendingAccount, ...] = ()


class Prepared(msgspec.Struct, frozen=True):
    """A request after step 2: its agent is known, and by which rules it is asked."""

    request: Request
    entry: AgentEntry
    decided: Decided


class DataPath:
    """The state that all requests share.

    `draining`: Hive's proxy is leaving, so every answer closes its connection. `readers` is None where long bodies are
    read on the loop like all others (tests).
    """

    def __init__(
        self,
        *,
        registry: Registry,
        settings: Settings,
        deadlines: Deadlines,
        usage: UsageLog,
        epoch: str,
        on_activity: Callable[[str], None],
        metrics: Metrics | None = None,
        readers: DeepReaders | None = None,
    ) -> None:
        self.registry = registry
        self.settings = settings
        self.deadlines = deadlines
        self.usage = usage
        self.epoch = epoch
        self.on_activity = on_activity
        self.metrics = metrics or Metrics()
        self.readers = readers
        self.budget = BodyBudget(settings.proxy.body_budget_bytes, one_body=settings.proxy.body_max_bytes)
        self.uploads = UploadSpace(settings.proxy)
        self.shares: ConnectionShares[Connection] = ConnectionShares(sys.maxsize)
        self.slots = SlotTable(settings, self._make_slot, registry.queue, registry.new_line)
        self.slot, self.routing = self.slots.active, self.slots.routing
        self.budgets = Budgets(registry, lambda: self.settings, epoch)
        self.signed = SignedModels()
        self.cloud_guard = CloudGuard(lambda: self.settings, self.routing)
        self.tasks = TaskTable(settings)
        self.routing.ladders = self.tasks.listed
        self.looking: Looking | None = None
        """Asks the daemon for models that are not in the list; None if there is no daemon to ask."""
        self.stored: StoredResponses | None = None
        """The store of kept responses; None if there is no daemon to ask."""
        self.background: BackgroundSource | None = None
        """The jobs that make responses in the background; None if there is no daemon to ask."""
        self.on_demand: Callable[[Slot], None] = lambda slot: None  # noqa: ARG005
        """Tells that the requests have changed that wait for a slot to be loaded."""
        self.on_begun: Callable[[Slot], None] = lambda slot: None  # noqa: ARG005
        """Tells of the first request to a slot of the pool since that was told last."""
        self.on_idle: Callable[[Slot], None] = lambda slot: None  # noqa: ARG005
        """Tells that nothing is at the server of a slot of the pool any more."""
        self.on_lost: Callable[[Slot], None] = lambda slot: None  # noqa: ARG005
        """Tells of a slot of the pool at whose address nothing listens; its gate is closed after that."""
        self.crash_marks = CrashMarks()
        self.parked = ParkedPrompts()
        self.draining = False
        self._fields = FieldTable(settings)
        self._seq = itertools.count(1)

    def next_id(self) -> str:
        return f"{self.epoch}-{next(self._seq)}"

    def use_settings(self, settings: Settings) -> None:
        """The configuration was read again. Requests under way keep the deadlines they have. Raises ConfigError."""
        self.settings = settings
        self.budget.use(settings.proxy.body_budget_bytes, one_body=settings.proxy.body_max_bytes)
        self.uploads.use_settings(settings.proxy)
        self._fields = FieldTable(settings)
        self.registry.use_settings(settings.proxy, settings.tenants)
        self.slots.use_settings(settings)
        self.budgets.look()
        self.tasks.use_settings(settings)
        self.routing.ladders = self.tasks.listed
        self.registry.generation += 1
        for slot in self.slots.all:
            slot.give_places()

    def _make_slot(self, name: str, line: Queue) -> Slot:
        return Slot(name, line, self.settings, self.registry, self.deadlines)

    def use_backend(self, backend: BackendInfo | None, models: list[ModelInfo]) -> None:
        """Takes the daemon's word on the active backend."""
        self.slots.use_active(backend, models)
        self.registry.generation += 1
        self.slot.give_places()

    def learn_slots(self, rows: Sequence[SlotRow]) -> None:
        """Takes the daemon's word on slots of the pool."""
        kinds = self.slots.kinds
        slots = self.slots.learn(rows, time.monotonic())
        if self.slots.kinds != kinds:
            self.registry.generation += 1  # what may be asked at all follows from the kinds
        for slot in slots:
            slot.give_places()

    def use_adapters(self, routes: Sequence[AdapterRoute]) -> None:
        """Takes the daemon's word on all adapters."""
        self.slots.use_adapters(routes)

    def forget_slot(self, name: str) -> None:
        """Takes a slot out. Requests at its server end there; those that wait are decided again."""
        slot = self.slots.forget(name)
        if slot is not None:
            self.registry.generation += 1
            slot.open()
            slot.use(None, [])
            slot.give_places()
            slot.suspects.let_all_go()

    def wish(self, slot: Slot, tenant: str, agent: str, now: float) -> None:
        """A request of a task would have gone to this slot of the pool, were it loaded: the daemon hears of that as of
        one that waits, of the low band."""
        if not slot.name:
            return
        since = slot.wish.since if slot.wish is not None and now < slot.wish.until else now
        slot.wish = ModelWish(tenant, agent, since, now + WISH_S)
        self.on_demand(slot)

    def which_model(self, named: str, caller: Caller) -> tuple[str, Slot]:
        """Finds the model that is meant, and its server. Raises Refusal for one that the caller may not use, NotFound
        for one that no server offers, NotApproved for one that its server would load by itself, against a rule."""
        reason = may(caller, _USE, self.routing.meant(named))
        if reason is not None:
            raise Refusal(reason)
        served, slot = self.slots.routed(named, caller)
        if self.signed.has_rule and slot is self.slot:
            self.signed.check(served, slot.backend)
        return served, slot

    def keeps_for(self, entry: AgentEntry) -> StoredResponses | None:
        """The store that keeps responses for this agent; None where none is kept."""
        is_on = self.settings.proxy.responses_kept_mb and entry.row.id != OPERATOR
        return self.stored if is_on else None

    def open_backend(self, backend: BackendInfo | None, models: list[ModelInfo]) -> None:
        """Opens the gate of the active backend, which is this one now."""
        self.slot.open()
        self.use_backend(backend, models)

    def has_room(self, entry: AgentEntry) -> bool:
        """Whether one more connection may be this agent's; operators are not counted."""
        return entry.row.id == OPERATOR or len(entry.connections) < self.settings.proxy.agent_connections_max

    def claim(self, connection: Connection, holder: ConnectionHolder[Connection]) -> None:
        """A stranger's connection is this holder's from now on. Raises Saturated where there is no room."""
        if not self.makes_way(holder, moving=connection):
            raise Saturated("too many connections", retry_after_s=1)
        self.shares.enter(connection, holder)

    def claim_for_caller(self, connection: Connection, entry: AgentEntry) -> None:
        """Does the same for a caller of an agent; one that called another agent before keeps its share."""
        holder = self.shares.holder_of(connection)
        if holder is entry.callers:
            return
        if holder is None or holder.is_strangers:
            self.claim(connection, entry.callers)
        else:
            self.shares.enter(connection, entry.callers)

    def makes_way(self, holder: ConnectionHolder[Connection], *, moving: Connection | None = None) -> bool:
        """Says if there is room for one more connection of this holder; another one may have ended for it."""
        verdict = self.shares.verdict_for(holder, agents=len(self.registry.by_id) + 1, moving=moving)
        if verdict.instead_of is not None:
            left = self.shares.holder_of(verdict.instead_of)
            self.shares.leave(verdict.instead_of)
            verdict.instead_of.give_way()
            self.metrics.gave_way("stranger" if left is not None and left.is_strangers else "idle")
        return verdict.is_admitted

    def look_again(
        self, error: HiveError, then: Callable[[], None], refuse: Callable[[HiveError], None]
    ) -> asyncio.Task[None] | None:
        """Waits for a new list if a model is not in the list, which may be old, or if there is no list yet; then calls
        `then`. Refuses at once for another error, and if the list was renewed a moment ago, as it was for each request
        that has waited here."""
        is_old = isinstance(error, NotFound | Saturated) and not isinstance(error, ModelCold | AdapterNotLoaded)
        waiting = self.looking.wait(then) if is_old and self.looking is not None else None
        if waiting is None:
            refuse(error)
        return waiting

    def answered(self, status: int) -> None:
        """Notes the status of a backend's answer: if a model that was there is gone, the list is old."""
        if status == NotFound.status and self.looking is not None:
            self.looking.begin()

    def opening(self, entry: AgentEntry, endpoint: Endpoint) -> tuple[FieldRules, Opening] | None:
        """The rules by which this caller's bodies are read; None for an endpoint without one."""
        if not endpoint.body:
            return None
        default = entry.model or self.settings.inference.default_model
        return self._fields.rules(endpoint.name, entry.row.tier), Opening(default, endpoint.streams)

    def want_of(self, slot: Slot, engine: str, entry: AgentEntry, decided: Decided, request_id: str) -> Want:
        """The requirements of the server in `slot` for this caller's body; `engine`: of an adapter, the name by which
        it knows the weights. Without wishes they are the same for all requests of an agent to an endpoint. Raises
        NotSupported where the server does not offer the endpoint."""
        endpoint, tenant, wishes = decided.endpoint, decided.tenant, decided.wishes
        is_as_ever = wishes is NO_WISHES and tenant is entry.tenant  # else it moved while the body came
        key = slot.name, endpoint.target
        plan: BodyPlan | None = entry.plans.get(key) if is_as_ever else None
        if plan is None or plan.generation != self.registry.generation or plan.changes != slot.changes:
            slot.check_takes(endpoint)
            slot.check_offered(endpoint)
            want = slot.want(endpoint, tenant, wishes, request_id)
            plan = BodyPlan(self.registry.generation, slot.changes, want)
            if is_as_ever:
                entry.plans[key] = plan
        return plan.want if not engine else msgspec.structs.replace(plan.want, model=engine)
