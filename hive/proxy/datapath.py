"""What all requests on the data path share: who is known, which backend answers, what is held and spent."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import sys
from collections.abc import Callable
from typing import NamedTuple, Protocol

import msgspec

from hive.domain import BackendInfo, BackendKind, CacheMode, Caller, ModelInfo, Tier, UsageEvent
from hive.errors import DependencyDown, HiveError, NotFound, NotSupported, Refusal, Saturated
from hive.field_rules import Rules
from hive.models.capabilities import (
    Over,
    lacking,
    lacks_endpoint,
    limit_name,
    passed_over,
    tells_all,
    why_lacking,
    without_text,
)
from hive.models.names import spelled
from hive.models.routing import Explained, Offer, Permitted, explain_for, offers_of, permits, preferences_of, undated
from hive.models.salts import cache_fields, can_keep_apart, priority_fields
from hive.models.whereabouts import NOWHERE, Whereabouts, named
from hive.proxy.backend_gate import BackendGate
from hive.proxy.body import Want
from hive.proxy.body_budget import BodyBudget
from hive.proxy.connection_shares import ConnectionShares, Holder
from hive.proxy.deep import DeepReaders
from hive.proxy.endpoints import COUNT, Endpoint, answered_by_hive, asked_as, translated, who_offers
from hive.proxy.fields import FieldTable
from hive.proxy.identity import NO_WISHES, Wishes
from hive.proxy.lists import FILTERED, RUNNING, TAGS
from hive.proxy.looking import Looking
from hive.proxy.metering import asks_usage
from hive.proxy.metrics import Metrics
from hive.proxy.queue import Flow
from hive.proxy.registry import OPERATOR, Entry, Registry
from hive.proxy.schemas import Limits
from hive.proxy.stored_responses import StoredResponses
from hive.proxy.tenants import Tenant
from hive.proxy.upstream_way import NO_WAY, way_to
from hive.settings import Settings
from hive.wire.connection import Connection
from hive.wire.deadlines import Deadlines
from hive.wire.heads import Fields
from hive.wire.upstream import Pool

log = logging.getLogger("hive.proxy")

SHORT_ANSWERS = (BackendKind.VLLM, BackendKind.REMOTE)
"""Their own limit at /v1/completions is OpenAI's, 16 tokens: less than any tier's."""
NOTHING_HIDDEN: frozenset[str] = frozenset()
LIMIT_BY_FIRST_NAME = frozenset(BackendKind) - {BackendKind.REMOTE}
"""Whom a limit of tokens is told by the first of its names as well: Ollama knows no `max_completion_tokens`. OpenAI's
newest models, which are somebody else's, refuse a request with both."""
ROUTES_KEPT = 4096
"""Names asked for, by tier and permitted models; clients may ask for any."""


class UsageLog(Protocol):
    """Where a request's cost goes: durable against a killed process when it returns or, with `then`, when `then` is
    called, at the end of this turn of the loop. Never raises."""

    def record(self, event: UsageEvent, then: Callable[[], None] | None = None) -> None: ...


class GivesWay(Protocol):
    """What has a slot only as long as nobody else needs it."""

    def give_way(self) -> bool:
        """Ends it where it has a slot; whether it had."""
        ...


class Plan(NamedTuple):
    """How the bodies of one caller are read for one endpoint, as long as the registry's generation is this one."""

    generation: int
    rules: Rules
    want: Want


class Decided(NamedTuple):
    """What steps 1 to 4 found out about a head. Heads of one connection repeat: the next equal one is decided by this.

    It holds as long as the registry's generation does. `fields` is the very list of the head it was made from.
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


class DataPath:
    """What all requests share.

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
        self.shares: ConnectionShares[Connection] = ConnectionShares(sys.maxsize)
        self.backend: BackendInfo | None = None
        self.models: list[ModelInfo] = []
        self.where = NOWHERE
        """Which of the models are near."""
        self._offers: tuple[Offer, ...] = ()
        self._preferences = preferences_of(settings.inference)
        self._routes: dict[tuple[str, Tier, frozenset[str] | None], Explained] = {}
        self._permits: dict[frozenset[str] | None, Permitted] = {}
        self.looking: Looking | None = None
        """For models that are not in the list; None where nobody can be asked."""
        self.stored: StoredResponses | None = None
        """What agents had kept of responses; None where nobody can be asked."""
        self.backends = 0
        """Grows with every other backend, and where one has a model no more, or no more near: what was read for one is
        not sent to the next."""
        self.gate = BackendGate()
        self.pool: Pool | None = None
        self.way = NO_WAY
        self.why_no_way: HiveError | None = None
        """Why the active backend cannot be asked, whatever it does: its key or its authorities cannot be read."""
        self.ahead: dict[GivesWay, None] = {}
        """Prompts being read that nobody waits for."""
        self.draining = False
        self._fields = FieldTable(settings)
        self._seq = itertools.count(1)

    def next_id(self) -> str:
        return f"{self.epoch}-{next(self._seq)}"

    def use_settings(self, settings: Settings) -> None:
        """The configuration was read again. Requests under way keep the deadlines they have. Raises ConfigError."""
        self._preferences = preferences_of(settings.inference)
        self.settings = settings
        self.budget.use(settings.proxy.body_budget_bytes, one_body=settings.proxy.body_max_bytes)
        self._fields = FieldTable(settings)
        self.registry.use_settings(settings.proxy, settings.tenants)
        if self.pool is not None:
            self.pool.use_clocks(connect_s=settings.proxy.connect_s, idle_s=settings.proxy.upstream_idle_s)
        self._look_at_way()
        self.use_backend(self.backend, self.models)

    def use_backend(self, backend: BackendInfo | None, models: list[ModelInfo]) -> None:
        """The daemon's word on who answers. Requests under way end where they began."""
        if backend is not None and (capability := without_text(backend)):
            models = [msgspec.structs.replace(model, capabilities=(capability,)) for model in models]
        before, self.backend, self.models = self.backend, backend, models
        where_before, self.where = self.where, Whereabouts(None if backend is None else backend.kind, models)
        self._offers = offers_of(models)
        self._routes.clear()
        self._permits.clear()
        is_same = backend is not None and before is not None and _place_of(backend) == _place_of(before)
        if not is_same or not self.where.keeps(where_before):
            self.backends += 1
            self._renew_pool()
        self.registry.generation += 1
        self._give_slots()

    def _renew_pool(self) -> None:
        if self.pool is not None:
            self.pool.close()
        self.pool = None
        if self.backend is not None and self._found_way(self.backend):
            proxy = self.settings.proxy
            self.pool = Pool(
                self.way.dialled,
                connect_s=proxy.connect_s,
                idle_s=proxy.upstream_idle_s,
                deadlines=self.deadlines,
                way=self.way,
            )

    def _look_at_way(self) -> None:
        """Another key, or other authorities, may be there since. Requests under way end as they began."""
        before = self.way
        if self.backend is not None and (self._found_way(self.backend), self.way) != (True, before):
            self._renew_pool()

    def _found_way(self, backend: BackendInfo) -> bool:
        try:
            self.way, self.why_no_way = way_to(backend, self.settings.inference, os.environ), None
        except HiveError as error:
            log.error("backend_not_usable address=%s error=%s", backend.address, error.message)
            why = "the key or the certificates for the backend cannot be read"  # from where is not the agents' to know
            self.way, self.why_no_way = NO_WAY, DependencyDown(why, hint="the proxy's log says why: hive logs")
        return self.why_no_way is None

    def _give_slots(self) -> None:
        """As many as the backend has; behind a closed gate none, so that the queue keeps everybody's place."""
        told = None if self.backend is None else self.backend.slots
        slots = 0 if self.gate.is_closed else self.settings.proxy.backend_concurrency or told
        self.registry.give_turns(self.registry.queue.resize(slots))

    def keeps_for(self, entry: Entry) -> StoredResponses | None:
        """Who keeps responses for this agent; None where none is kept."""
        is_on = self.settings.proxy.responses_kept_mb and entry.row.id != OPERATOR
        return self.stored if is_on else None

    def close_backend(self, *, until: float, towards: str) -> None:
        """No request goes to the backend from now on; those at it go on until `cut_off`."""
        self.gate.close(until=until, towards=towards)
        self._give_slots()

    def open_backend(self, backend: BackendInfo | None, models: list[ModelInfo]) -> None:
        """Whoever waited goes on, in the order of the queue; also where the backend is the same as before, all of it
        is decided again."""
        self.backends += 1
        self.gate.open()
        self.use_backend(backend, models)

    @property
    def is_drained(self) -> bool:
        """Whether nothing is at the backend, and nothing on its way to it."""
        pool = self.pool
        return self.registry.queue.running == 0 and (pool is None or (pool.busy == 0 and pool.connecting == 0))

    def cut_off(self) -> int:
        """Ends all connections to the backend; how many requests were still on them."""
        cut = 0 if self.pool is None else self.pool.cut(self.gate.cut())
        self._renew_pool()
        return cut

    def make_way(self, waiter: object) -> None:
        """A request waits. Where that is for want of a slot, one that a prompt has is given back."""
        queue = self.registry.queue
        if not self.ahead or waiter in self.ahead or queue.slots is None or queue.running < queue.slots:
            return
        for one in list(self.ahead):
            if one.give_way():
                return

    def has_room(self, entry: Entry) -> bool:
        """Whether one more connection may be this agent's; operators are not counted."""
        return entry.row.id == OPERATOR or len(entry.connections) < self.settings.proxy.agent_connections_max

    def claim(self, connection: Connection, holder: Holder[Connection]) -> None:
        """A stranger's connection is this holder's from now on. Raises Saturated where there is no place."""
        if not self.makes_place(holder, moving=connection):
            raise Saturated("too many connections", retry_after_s=1)
        self.shares.enter(connection, holder)

    def claim_for_caller(self, connection: Connection, entry: Entry) -> None:
        """Does the same for a caller of an agent; one that called another agent before keeps its place."""
        holder = self.shares.holder_of(connection)
        if holder is entry.callers:
            return
        if holder is None or holder.is_strangers:
            self.claim(connection, entry.callers)
        else:
            self.shares.enter(connection, entry.callers)

    def makes_place(self, holder: Holder[Connection], *, moving: Connection | None = None) -> bool:
        """Says if there is a place for one more connection of this holder; another one may have ended for it."""
        place = self.shares.place_for(holder, agents=len(self.registry.by_id) + 1, moving=moving)
        if place.instead_of is not None:
            left = self.shares.holder_of(place.instead_of)
            self.shares.leave(place.instead_of)
            place.instead_of.give_place()
            self.metrics.gave_place("stranger" if left is not None and left.is_strangers else "idle")
        return place.there_is

    def answers(self, endpoint: Endpoint) -> bool:
        """Whether Hive answers this by itself, from its list of models or by an estimate."""
        backend = self.backend
        if endpoint.listing or backend is None:
            return endpoint.listing
        return answered_by_hive(endpoint, backend.kind) or (
            endpoint.name == COUNT and lacks_endpoint(backend, endpoint.name)
        )

    def check_offered(self, endpoint: Endpoint) -> None:
        """Raises NotSupported where the active backend is to answer and cannot, in its own dialect or another."""
        backend = self.backend
        if endpoint.keeps or backend is None or self.answers(endpoint) or _row_at(backend, endpoint) is not None:
            return
        other = asked_as(endpoint, backend.kind)
        why, hint = why_lacking(backend, other.name) if other is not None else (who_offers(endpoint), "")
        says = f": {why}" if why else ""
        raise NotSupported(f"the active backend ({backend.kind}) does not offer {endpoint.name}{says}", hint=hint)

    def routed(self, asked: str, caller: Caller) -> str:
        """Which of the backend's models is meant; the name itself where no list is known. Raises NotFound, Refusal for
        one that leaves the box and that nobody named for this caller, and Saturated where nobody can tell yet.

        llama-server answers by whatever name it is asked, and clients would believe it.
        """
        if not asked or self.gate.is_closed:  # behind the gate it is asked again
            return asked
        backend, can_be_far = self.backend, self.where.can_be_far
        if can_be_far and not self.models and backend is not None and not backend.up:
            raise Saturated("the inference server has not said yet what it offers", retry_after_s=1)
        return self._route(asked, caller) if self.models or can_be_far else asked

    def meant(self, asked: str) -> str:
        """The name by which it is judged whether a model may be used: of a dated alias the alias."""
        return undated(asked, self._preferences.aliases, self._offers)

    def _is_named(self, model: str, caller: Caller) -> bool:
        return caller.models is not None and spelled(model) in named(caller.models, self._preferences.aliases)

    def look_again(
        self, error: HiveError, then: Callable[[], None], refuse: Callable[[HiveError], None]
    ) -> asyncio.Task[None] | None:
        """For a model that is not in the list, which may be old, and where there is none yet: calls `then` once that is
        new. Refuses at once for another error, and where it was looked a moment ago, which is so for whoever has
        waited here."""
        is_old = isinstance(error, NotFound | Saturated)
        waiting = self.looking.wait(then) if is_old and self.looking is not None else None
        if waiting is None:
            refuse(error)
        return waiting

    def answered(self, status: int) -> None:
        """By the backend: where a model that was there is gone, the list is old."""
        if status == NotFound.status and self.looking is not None:
            self.looking.begin()

    def seen(self, decided: Decided) -> list[ModelInfo]:
        """The models of the list that is asked for, and beside them every alias that leads this caller to one of them:
        what it may name, as far as `policy.may` lets it. An alias does not run, so of those that do there is none."""
        aliases = () if decided.endpoint.target == RUNNING else self.aliases_of(decided.caller)
        hidden = self.hidden_from(decided.caller)
        there = [model for model in self.models if model.name not in hidden] if hidden else self.models
        return there + [model for model, _ in aliases]

    def hidden_in(self, decided: Decided) -> frozenset[str]:
        """Names that a list of the backend's has, and this caller may not see."""
        return self.hidden_from(decided.caller) if decided.endpoint.target in FILTERED else NOTHING_HIDDEN

    def hidden_from(self, caller: Caller) -> frozenset[str]:
        """Names of the far models that this caller may not use, so no list shows them to it."""
        far = self.where.far
        return frozenset(name for name in far if not self._is_named(name, caller)) if far else far

    def differences(self, decided: Decided) -> tuple[list[tuple[str, str]], frozenset[str]]:
        """What of a list of the backend's this caller sees besides, and what of it not (`Answer`)."""
        return self.added_to(decided), self.hidden_in(decided)

    def added_to(self, decided: Decided) -> list[tuple[str, str]]:
        """The aliases that a list of the backend's lacks, each with the model it stands for."""
        if decided.endpoint.target != TAGS:
            return []
        return [(alias.name, model) for alias, model in self.aliases_of(decided.caller)]

    def aliases_of(self, caller: Caller) -> list[tuple[ModelInfo, str]]:
        """Every alias as a model of that name, and the model it stands for, where that is there for this caller. What
        is the name of a model is none."""
        found, by_name = [], {model.name: model for model in self.models}
        names = {offer.key for offer in self._offers}
        for alias in self._preferences.aliases:
            target = "" if alias in names else self._explained(alias, caller).model
            if target:
                found.append((msgspec.structs.replace(by_name[target], name=alias, parent=""), target))
        return found

    def _route(self, asked: str, caller: Caller) -> str:
        found = self._explained(asked, caller)
        if not found.model:
            raise (Refusal if found.is_far else NotFound)(found.why, hint=found.hint)
        return found.model

    def _explained(self, asked: str, caller: Caller) -> Explained:
        key = (asked, caller.tier, caller.models)
        found = self._routes.get(key)
        if found is None:
            if len(self._routes) >= ROUTES_KEPT:
                self._routes.clear()
            prefs, permitted = self._preferences, self._permits.get(caller.models)
            if permitted is None:
                permitted = self._permits[caller.models] = permits(caller.models, prefs.aliases, self.where)
            asks = (caller.models, asked, caller.tier)
            found = self._routes[key] = explain_for(*asks, self._offers, prefs, self.where, permitted)
        return found

    def _asked_as(self, backend: BackendInfo, endpoint: Endpoint) -> Endpoint:
        """By which row the backend is asked: by another than the client's also where only that keeps prompts of tenants
        apart, who could else be told from how fast it answers what somebody asked before."""
        asked = _row_at(backend, endpoint)
        mixes = endpoint.takes_slot and not can_keep_apart(backend, endpoint.name)
        if asked is endpoint and mixes and self.settings.proxy.cache_isolation and self.registry.cache_groups() > 1:
            asked = translated(endpoint, backend.kind)
        return asked or endpoint

    def plan(self, entry: Entry, endpoint: Endpoint, tenant: Tenant, wishes: Wishes, request_id: str) -> Plan:
        """How bodies of this caller are read: the field table of its tier, and what Hive puts in itself.

        Without wishes that is the same for all requests of an agent to an endpoint.
        """
        if wishes is not NO_WISHES or tenant is not entry.tenant:  # it moved while the body came
            return self._plan(entry, endpoint, tenant, wishes, request_id)
        plan: Plan | None = entry.plans.get(endpoint.target)
        if plan is None or plan.generation != self.registry.generation:
            plan = entry.plans[endpoint.target] = self._plan(entry, endpoint, tenant, wishes, request_id)
        return plan

    def _plan(self, entry: Entry, endpoint: Endpoint, tenant: Tenant, wishes: Wishes, request_id: str) -> Plan:
        inference, backend = self.settings.inference, self.backend
        asked = endpoint if backend is None else self._asked_as(backend, endpoint)
        target = asked.name
        inject: tuple[tuple[str, bytes], ...] = ()
        if backend is not None:
            inject = priority_fields(backend, target, wishes.band)
            alone = wishes.cache_mode is CacheMode.NONE
            if alone or self.settings.proxy.cache_isolation:
                group = f"request {request_id}" if alone else tenant.cache_group
                apart = alone or bool(wishes.cache_tag) or self.registry.cache_groups() > 1
                inject += cache_fields(backend, target, group=group, tag=wishes.cache_tag, apart=apart)
        want = Want(
            default_model=entry.model or inference.default_model,
            streams=endpoint.streams,
            ask_usage=inference.token_tracking and backend is not None and asks_usage(asked, backend.kind),
            inject=inject,
            limit_absent=backend is None or backend.kind not in SHORT_ANSWERS or target != "/v1/completions",
            model_first=self._preferences.routing or bool(self._preferences.aliases),
            translate="" if asked is endpoint else endpoint.name,
            lacking=() if backend is None or asked is endpoint else lacking(backend),
            passed_over=_passed_over(backend, endpoint, is_translated=asked is not endpoint),
            limit_by_first_name=backend is not None and backend.kind in LIMIT_BY_FIRST_NAME,
            apart=backend is not None and asked is not endpoint and _row_at(backend, endpoint) is endpoint,
            estimate=endpoint.name == COUNT and self.answers(endpoint),
            limit_as="" if backend is None else limit_name(backend, inference.backend_limit_name),
            grammar=None if backend is None else grammar_limits(self.settings, backend.kind),
        )
        return Plan(self.registry.generation, self._fields.rules(endpoint.name, entry.row.tier), want)


def _passed_over(backend: BackendInfo | None, endpoint: Endpoint, *, is_translated: bool) -> tuple[Over, ...]:
    """Fields that are said to this backend in vain. A translation knows what it makes, but for one that is gone before
    servers that speak the dialect."""
    if backend is None or (is_translated and endpoint.is_offered_by(backend.kind)):
        return ()
    return passed_over(backend, endpoint.name)


def _place_of(backend: BackendInfo) -> tuple[BackendKind, str]:
    """What makes it another backend where it is another."""
    return backend.kind, backend.address


def grammar_limits(settings: Settings, kind: BackendKind) -> Limits:
    """What schemas may become before a server of this kind; of one that is not known, as before `remote`."""
    section = f"grammar_{kind}" if kind is not BackendKind.DEMO else "grammar_remote"
    return msgspec.convert(msgspec.to_builtins(getattr(settings, section)), Limits)


def _row_at(backend: BackendInfo, endpoint: Endpoint) -> Endpoint | None:
    """By which row this backend is asked, None for none. A path that it said it lacks is gone around where another
    dialect leads somewhere; else Hive says so, or the server itself where its description may not be all of it."""
    asked, around = asked_as(endpoint, backend.kind), translated(endpoint, backend.kind)
    if around is not None and lacks_endpoint(backend, around.name):
        around = None
    if asked is endpoint:
        if not lacks_endpoint(backend, endpoint.name):
            return asked
        return around or (None if tells_all(backend) else asked)
    return around
