"""The state that all requests on the data path share: known agents, the active backend, budgets and counters."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import sys
from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec

from hive.backends.kinds import spec_of, whereabouts
from hive.domain import BackendInfo, CacheMode, Caller, ModelInfo, Tier, UsageEvent, origin_of
from hive.errors import DependencyDown, HiveError, NotFound, NotSupported, Refusal, Saturated
from hive.host.access import access_of, context
from hive.models.capabilities import Over, lacking, lacks_endpoint, why_lacking, without_text
from hive.models.names import spelled
from hive.models.routing import Explained, Offer, Permitted, explain_for, offers_of, permits, preferences_of, undated
from hive.models.whereabouts import NOWHERE, named
from hive.proxy.body import Want
from hive.proxy.body_budget import BodyBudget
from hive.proxy.body_workers import DeepReaders
from hive.proxy.connection_shares import ConnectionHolder, ConnectionShares
from hive.proxy.endpoints import COUNT, Endpoint, answered_by_hive, asked_as, offering_kinds, translated
from hive.proxy.fields import FieldTable
from hive.proxy.gate import BackendGate
from hive.proxy.identity import NO_WISHES, Wishes
from hive.proxy.lists import FILTERED, RUNNING, TAGS
from hive.proxy.metering import asks_usage
from hive.proxy.metrics import Metrics
from hive.proxy.model_refresh import Looking
from hive.proxy.queue import Flow
from hive.proxy.registry import OPERATOR, AgentEntry, Registry
from hive.proxy.schemas import SchemaLimits
from hive.proxy.stored_responses import StoredResponses
from hive.proxy.tenants import Tenant
from hive.settings.field_rules import FieldRules
from hive.settings.table import InferenceSection, Settings
from hive.wire.connection import Connection
from hive.wire.deadlines import Deadlines
from hive.wire.dial import Tls
from hive.wire.heads import Fields
from hive.wire.upstream import Pool, UpstreamWay, forms

log = logging.getLogger("hive.proxy")

NO_WAY = UpstreamWay("")
NOTHING_HIDDEN: frozenset[str] = frozenset()
ROUTES_KEPT = 4096
"""Names asked for, by tier and permitted models; clients may ask for any."""


class UsageLog(Protocol):
    """The log of what requests cost. An event survives a killed process once `record` returns or, with `then`, once
    `then` is called, at the end of this turn of the loop. Never raises."""

    def record(self, event: UsageEvent, then: Callable[[], None] | None = None) -> None: ...


class GivesWay(Protocol):
    """A request that has a place only as long as no other one needs it."""

    def give_way(self) -> bool:
        """Ends it if it has a place; returns whether it had one."""
        ...


class BodyPlan(msgspec.Struct, frozen=True):
    """The rules by which the bodies of one caller are read for one endpoint, valid for this generation of the
    registry."""

    generation: int
    rules: FieldRules
    want: Want


class Decided(msgspec.Struct, frozen=True):
    """The result of steps 1 to 4 for a head. Heads of one connection repeat: the next equal one is decided by this.

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
        self.shares: ConnectionShares[Connection] = ConnectionShares(sys.maxsize)
        self.backend: BackendInfo | None = None
        self.models: list[ModelInfo] = []
        self.where = NOWHERE
        """The models that are near, and those that are far."""
        self._offers: tuple[Offer, ...] = ()
        self._preferences = preferences_of(settings.inference)
        self._routes: dict[tuple[str, Tier, frozenset[str] | None], Explained] = {}
        self._permits: dict[frozenset[str] | None, Permitted] = {}
        self.looking: Looking | None = None
        """Asks the daemon for models that are not in the list; None if there is no daemon to ask."""
        self.stored: StoredResponses | None = None
        """The store of kept responses; None if there is no daemon to ask."""
        self.backends = 0
        """Grows with every other backend, and where one has a model no more, or no more near: what was read for one is
        not sent to the next."""
        self.gate = BackendGate()
        self.pool: Pool | None = None
        self.way = NO_WAY
        self.why_no_way: HiveError | None = None
        """The reason why no request can be sent to the active backend: its key or its authorities cannot be read."""
        self.ahead: dict[GivesWay, None] = {}
        """Prewarms that are running; no client waits for them."""
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
        """Takes the daemon's word on the active backend. Requests under way end at the backend where they began."""
        if backend is not None and (capability := without_text(backend)):
            models = [msgspec.structs.replace(model, capabilities=(capability,)) for model in models]
        before, self.backend, self.models = self.backend, backend, models
        where_before, self.where = self.where, whereabouts(None if backend is None else backend.kind, models)
        self._offers = offers_of(models)
        self._routes.clear()
        self._permits.clear()
        is_same = backend is not None and before is not None and _address_of(backend) == _address_of(before)
        if not is_same or not self.where.keeps(where_before):
            self.backends += 1
            self._renew_pool()
        self.registry.generation += 1
        self._give_ways()

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

    def _give_ways(self) -> None:
        """Gives the queue as many places as the backend has; none behind a closed gate, so that every request keeps its
        position."""
        told = None if self.backend is None else self.backend.places
        places = 0 if self.gate.is_closed else self.settings.proxy.backend_concurrency or told
        self.registry.give_turns(self.registry.queue.resize(places))

    def keeps_for(self, entry: AgentEntry) -> StoredResponses | None:
        """The store that keeps responses for this agent; None where none is kept."""
        is_on = self.settings.proxy.responses_kept_mb and entry.row.id != OPERATOR
        return self.stored if is_on else None

    def close_backend(self, *, until: float, towards: str) -> None:
        """Closes the gate: no request goes to the backend from now on; those at it go on until `cut_off`."""
        self.gate.close(until=until, towards=towards)
        self._give_ways()

    def open_backend(self, backend: BackendInfo | None, models: list[ModelInfo]) -> None:
        """Opens the gate: waiting requests go on, in the order of the queue. All of them are decided again, also if the
        backend is the same as before."""
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
        """A request waits. Where that is for want of a place, one that a prompt has is given back."""
        queue = self.registry.queue
        if not self.ahead or waiter in self.ahead or queue.places is None or queue.running < queue.places:
            return
        for one in list(self.ahead):
            if one.give_way():
                return

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
        why, hint = why_lacking(backend, other.name) if other is not None else (offering_kinds(endpoint), "")
        says = f": {why}" if why else ""
        raise NotSupported(f"the active backend ({backend.kind}) does not offer {endpoint.name}{says}", hint=hint)

    def routed(self, asked: str, caller: Caller) -> str:
        """The name of the backend's model that is meant; `asked` itself if no list is known. Raises NotFound, Refusal
        for a far model that no setting names for this caller, and Saturated if it cannot be known yet.

        llama-server answers to any name, and clients would believe it.
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
        """Waits for a new list if a model is not in the list, which may be old, or if there is no list yet; then calls
        `then`. Refuses at once for another error, and if the list was renewed a moment ago, as it was for each request
        that has waited here."""
        is_old = isinstance(error, NotFound | Saturated)
        waiting = self.looking.wait(then) if is_old and self.looking is not None else None
        if waiting is None:
            refuse(error)
        return waiting

    def answered(self, status: int) -> None:
        """Notes the status of a backend's answer: if a model that was there is gone, the list is old."""
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
        """The models this caller sees besides the backend's list, and those of the list it does not see (`Answer`)."""
        if decided.endpoint.needs_place:  # it asks a model, not about models
            return [], NOTHING_HIDDEN
        return self.added_to(decided), self.hidden_in(decided)

    def added_to(self, decided: Decided) -> list[tuple[str, str]]:
        """The aliases that a list of the backend's lacks, each with the model it stands for."""
        if decided.endpoint.target != TAGS:
            return []
        return [(alias.name, model) for alias, model in self.aliases_of(decided.caller)]

    def aliases_of(self, caller: Caller) -> list[tuple[ModelInfo, str]]:
        """Every alias as a model of that name, and the model it stands for, where that is there for this caller. A name
        that a model has is no alias."""
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
        """The row by which the backend is asked. It is another than the client's also if only that keeps the prompts of
        tenants apart: else a tenant could tell from the speed of an answer that another one sent the same prompt
        before."""
        asked = _row_at(backend, endpoint)
        mixes = endpoint.needs_place and not spec_of(backend.kind).can_keep_apart(endpoint.name)
        if asked is endpoint and mixes and self.settings.proxy.cache_isolation and self.registry.cache_groups() > 1:
            asked = translated(endpoint, backend.kind)
        return asked or endpoint

    def plan(self, entry: AgentEntry, endpoint: Endpoint, tenant: Tenant, wishes: Wishes, request_id: str) -> BodyPlan:
        """The plan for the bodies of this caller: the field table of its tier, and what Hive puts in itself.

        Without wishes that is the same for all requests of an agent to an endpoint.
        """
        if wishes is not NO_WISHES or tenant is not entry.tenant:  # it moved while the body came
            return self._plan(entry, endpoint, tenant, wishes, request_id)
        plan: BodyPlan | None = entry.plans.get(endpoint.target)
        if plan is None or plan.generation != self.registry.generation:
            plan = entry.plans[endpoint.target] = self._plan(entry, endpoint, tenant, wishes, request_id)
        return plan

    def _plan(self, entry: AgentEntry, endpoint: Endpoint, tenant: Tenant, wishes: Wishes, request_id: str) -> BodyPlan:
        inference, backend = self.settings.inference, self.backend
        asked = endpoint if backend is None else self._asked_as(backend, endpoint)
        said = None if backend is None else spec_of(backend.kind).requests
        target = asked.name
        inject: tuple[tuple[str, bytes], ...] = ()
        if backend is not None and said is not None:
            inject = said.priority_fields(target, wishes.band) if backend.priority else ()
            alone = wishes.cache_mode is CacheMode.NONE
            if alone or self.settings.proxy.cache_isolation:
                group = f"request {request_id}" if alone else tenant.cache_group
                apart = alone or bool(wishes.cache_tag) or self.registry.cache_groups() > 1
                inject += said.cache_fields(target, group, wishes.cache_tag, apart)
        want = Want(
            default_model=entry.model or inference.default_model,
            streams=endpoint.streams,
            ask_usage=inference.token_tracking and backend is not None and asks_usage(asked, backend.kind),
            inject=inject,
            limit_absent=said is None or not said.short_completions or target != "/v1/completions",
            model_first=self._preferences.routing or bool(self._preferences.aliases),
            translate="" if asked is endpoint else endpoint.name,
            lacking=() if backend is None or asked is endpoint else lacking(backend),
            passed_over=_passed_over(backend, endpoint, is_translated=asked is not endpoint),
            limit_by_first_name=said is not None and said.limit_by_first_name,
            apart=backend is not None and asked is not endpoint and _row_at(backend, endpoint) is endpoint,
            estimate=endpoint.name == COUNT and self.answers(endpoint),
            limit_as=(
                ""
                if backend is None or said is None
                else said.limit_name(backend.address, inference.backend_limit_name)
            ),
            grammar=None if backend is None else grammar_limits(self.settings, backend.kind),
        )
        return BodyPlan(self.registry.generation, self._fields.rules(endpoint.name, entry.row.tier), want)


def _passed_over(backend: BackendInfo | None, endpoint: Endpoint, *, is_translated: bool) -> tuple[Over, ...]:
    """Fields that this backend ignores at this endpoint. None if the request is translated although the backend speaks
    the dialect: the rows are about its own endpoint."""
    if backend is None or (is_translated and endpoint.is_offered_by(backend.kind)):
        return ()
    return spec_of(backend.kind).requests.passed_over.get(endpoint.name, ())


def way_to(backend: BackendInfo, inference: InferenceSection, env: Mapping[str, str]) -> UpstreamWay:
    """The way to this backend; files of `inference` are read now.

    Raises ConfigError, NotPermitted if the key or the authorities cannot be read.

    >>> way_to(BackendInfo(kind="llama", address="/run/l.sock"), InferenceSection(), {})
    <UpstreamWay /run/l.sock>
    """
    origin = origin_of(backend.address)
    is_remote = spec_of(backend.kind).is_remote
    if not origin.tls and not is_remote:
        return UpstreamWay(origin.dialled)
    access = access_of(inference, env).shown_to(backend.address, may_ask=is_remote)
    # Local servers are asked as localhost, as Ollama refuses other names; this one may be anywhere.
    is_plain = "://" not in backend.address and not origin.dialled.startswith("/")
    fields = b"host: %b\r\n" % (origin.dialled if is_plain else origin.host).encode()
    if access.key:
        fields += b"authorization: Bearer %b\r\n" % access.key.encode()
    tls = Tls(context(access), origin.name) if origin.tls else None
    bare, full = forms(fields)
    return UpstreamWay(origin.dialled, tls, origin.prefix.encode(), bare, full, bool(access.key))


def _address_of(backend: BackendInfo) -> tuple[str, str]:
    """The kind and address of a backend; a change of either makes it another one."""
    return backend.kind, backend.address


def grammar_limits(settings: Settings, kind: str) -> SchemaLimits:
    """The limits for schemas of a server of this kind; for the demo backend those of `remote`."""
    return msgspec.convert(msgspec.to_builtins(getattr(settings, spec_of(kind).requests.grammar)), SchemaLimits)


def _row_at(backend: BackendInfo, endpoint: Endpoint) -> Endpoint | None:
    """The row by which this backend is asked, None for none. A path that it said it lacks is replaced by one of another
    dialect if there is one; else Hive refuses, or the server itself if its description may be incomplete."""
    asked, around = asked_as(endpoint, backend.kind), translated(endpoint, backend.kind)
    if around is not None and lacks_endpoint(backend, around.name):
        around = None
    if asked is endpoint:
        if not lacks_endpoint(backend, endpoint.name):
            return asked
        return around or (None if spec_of(backend.kind).describes_all else asked)
    return around
