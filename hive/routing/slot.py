"""One inference server as the data path sees it: what it offers, the way to it, its line of requests and its gate."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol

import msgspec

from hive.backends.described import cache_fields, flushed_by, priority_fields
from hive.backends.kinds import spec_of, whereabouts
from hive.bodies.body import Want
from hive.bodies.schemas import SchemaLimits
from hive.domain import (
    UNIT_OF_CATEGORY,
    BackendInfo,
    BackendKind,
    Band,
    CacheMode,
    ModelInfo,
    UsageUnit,
    origin_of,
)
from hive.endpoints.endpoints import (
    COUNT,
    ENDPOINTS,
    Endpoint,
    answered_by_hive,
    asked_as,
    offering_kinds,
    translated,
)
from hive.errors import BadRequest, DependencyDown, HiveError, NotSupported
from hive.host.access import NO_ACCESS, RemoteAccess, access_of, access_of_model, context
from hive.metering.metering import asks_usage
from hive.models.cache_epochs import SHARED, CacheEpochs, FlushedBy
from hive.models.capabilities import Over, lacking, lacks_endpoint, why_lacking, without_text
from hive.models.whereabouts import NOWHERE, Whereabouts, is_elsewhere
from hive.queue.queue import Queue, Turning
from hive.queue.slot_gate import Cold, SlotGate, Switching
from hive.queue.suspects import Suspects
from hive.queue.tenants import Tenant
from hive.queue.work_rate import WORK_UNITS
from hive.routing.id_slots import IdSlots
from hive.routing.wishes import Wishes
from hive.settings.pool import ModelRow, slot_id
from hive.settings.table import InferenceSection, Settings
from hive.wire.deadlines import Deadlines
from hive.wire.dial import Tls
from hive.wire.upstream import Pool, UpstreamWay, forms

log = logging.getLogger("hive.proxy")

NO_WAY = UpstreamWay("")
WORDS = {"": "text", "audio": "sound", "image": "pictures"}
"""Words for the purpose of models of a category."""


class GivesWay(Protocol):
    """A request that has a place only as long as no other one needs it."""

    def give_way(self) -> bool:
        """Ends it if it has a place; returns whether it had one."""
        ...

    def gate_closed(self) -> None:
        """Ends it: it is no reason to load a model, or to keep one."""
        ...


class ModelWish(NamedTuple):
    """An agent's task prefers this model and took another one, as it is not loaded. Times are monotonic."""

    tenant: str
    agent: str
    since: float
    until: float


class KnownAgents(Protocol):
    """The registry of all agents, as far as a server needs it."""

    epochs: CacheEpochs
    has_budgets: bool

    def cache_groups(self) -> int:
        """The number of groups whose prompts are to be kept apart."""
        ...

    def give_turns(self, waiters: Iterable[Turning]) -> None:
        """Tells requests that they own a place now."""
        ...


class Slot:
    """One inference server. `name` is empty for the active backend; a slot of the pool has its id, and the `generation`
    of the server that is in it.

    Requests under way end at the server where they began. `version` grows with every other server in this slot, and
    where it has a model no more, or no more near: what was read for one is not sent to the next. `changes` grows with
    every word of the daemon on it. `ahead`: prewarms that run here; no client waits for them.
    """

    def __init__(self, name: str, line: Queue, settings: Settings, registry: KnownAgents, deadlines: Deadlines) -> None:
        self.name = name
        self.generation = 0
        self.backend: BackendInfo | None = None
        self.models: list[ModelInfo] = []
        self.at_server = ""
        """The name by which its server knows its model, where that is another than Hive's."""
        self.adapter = ""
        """The adapter with which its server started: requests reach it by the routes of adapters alone."""
        self.stops_late = False
        """True if a request that is given up keeps its place until its server has stopped."""
        self.where: Whereabouts = NOWHERE
        self.version = self.changes = 0
        self.line = line
        self.gate = SlotGate()
        self.is_gone = False
        """True once it is taken out: nothing waits here any more."""
        self.pool: Pool | None = None
        self._replaced: list[Pool] = []
        """Earlier pools with requests that have not ended."""
        self.way = NO_WAY
        self.may_leave = False
        """True if requests to it may leave the box: its server is elsewhere, or sends some of them on."""
        self.why_no_way: HiveError | None = None
        """The reason why no request can be sent to it: its key or its authorities cannot be read."""
        self.first_byte_s = settings.proxy.first_byte_s
        """The longest silence of this server before its answer."""
        self.ahead: dict[GivesWay, None] = {}
        self.suspects = Suspects()
        self.begun = 0
        """Requests that went to its server since that was told last (`FlowReports`)."""
        self.band = Band.NORMAL
        """Of the newest of them."""
        self.load_s = 0.0
        """A load of its model takes so long; 0 where that is not known."""
        self.keep_s = 0.0
        """Of the requests counted in `begun`: the longest time that a task wants the model kept after its answer."""
        self.wish: ModelWish | None = None
        """The newest request that would have gone here, had the model been loaded."""
        self.id_slots: IdSlots | None = None
        """The table of its server's slots, where Hive names one for each request."""
        self.moved_at = 0.0
        """The last time that an answer of its server began or ended, on the monotonic clock."""
        self._registry = registry
        self._deadlines = deadlines
        self.use_settings(settings)

    def __repr__(self) -> str:
        what = "empty" if self.backend is None else f"{self.backend.kind} at {self.backend.address}"
        return f"<Slot {self.name} {what}, {self.gate}>"

    @property
    def model(self) -> str:
        """The name of its model, for people; its own where it has none."""
        return self.models[0].name if self.models else self.name

    # the server -------------------------------------------------------------------------------------------------------

    def use_settings(self, settings: Settings) -> None:
        self._settings = settings
        self.first_byte_s = self._own_first_byte_s() or settings.proxy.first_byte_s
        if self.name:
            self.line.load_depth = settings.pool.load_depth
        if self.pool is not None:
            self.pool.use_clocks(connect_s=settings.proxy.connect_s, idle_s=settings.proxy.upstream_idle_s)
        self._look_at_way()

    def use(self, backend: BackendInfo | None, models: list[ModelInfo], *, is_new: bool = False) -> None:
        """Takes the daemon's word on the server that is here and on what it offers. `give_places` follows, once the
        models are known to all. `is_new`: it was started again, perhaps at the same address."""
        if backend is not None and (capability := without_text(backend)):
            models = [msgspec.structs.replace(model, capabilities=(capability,)) for model in models]
        before, self.backend, self.models = self.backend, backend, models
        self.stops_late = backend is not None and spec_of(backend.kind).stops_late
        where_before, self.where = self.where, whereabouts(None if backend is None else backend.kind, models)
        category = "" if backend is None else spec_of(backend.kind).category
        self.line.use_unit(WORK_UNITS[UNIT_OF_CATEGORY.get(category, UsageUnit.TOKENS)])
        self.line.label = self.model if self.name else ""
        address = "" if backend is None else backend.address
        self.may_leave = bool(address) and (is_elsewhere(address) or self.where.can_be_far)
        was_here = backend is not None and before is not None and _address_of(backend) == _address_of(before)
        if is_new or not was_here or not self.where.keeps(where_before):
            self.version += 1
            self._renew_pool()
        self._name_slots(is_new=is_new or not was_here)
        self.changes += 1

    def _name_slots(self, *, is_new: bool) -> None:
        count, table = 0 if self.backend is None else self.backend.id_slots, self.id_slots
        if is_new or (table is None and count) or (table is not None and len(table.slots) != count):
            self.id_slots = IdSlots(count) if count else None
        elif table is not None and self.backend is not None and not self.backend.up:
            table.forget()  # it may be another process when it is back

    def takes_slot(self, target: str) -> bool:
        """Whether a request to it at this path may name its slot."""
        return self.backend is not None and target in spec_of(self.backend.kind).requests.takes_slot

    def keeps(self, wishes: Wishes) -> bool:
        """Whether its server is to keep the prompt of a request with these wishes, and to use what it kept."""
        registry = self._registry
        if wishes.cache_mode is CacheMode.NONE or self.name in registry.epochs.fresh:
            return False
        return not self._settings.proxy.cache_isolation or not (wishes.cache_tag or registry.cache_groups() > 1)

    def _renew_pool(self) -> None:
        if self.pool is not None:
            self.pool.close()
            self._replaced = [pool for pool in (*self._replaced, self.pool) if pool.busy]
        self.pool = None
        if self.backend is not None and self.backend.address and self._found_way(self.backend):
            proxy = self._settings.proxy
            self.pool = Pool(
                self.way.dialled,
                connect_s=proxy.connect_s,
                idle_s=proxy.upstream_idle_s,
                deadlines=self._deadlines,
                way=self.way,
            )

    def _look_at_way(self) -> None:
        """Another key, or other authorities, may be there since. Requests under way end as they began."""
        before = self.way
        if self.backend is not None and (self._found_way(self.backend), self.way) != (True, before):
            self._renew_pool()

    def _found_way(self, backend: BackendInfo) -> bool:
        try:
            self.way, self.why_no_way = way_to(backend, self._settings.inference, os.environ, self._own_access()), None
        except HiveError as error:
            log.error("backend_not_usable address=%s error=%s", backend.address, error.message)
            why = "the key or the certificates for the backend cannot be read"  # from where is not the agents' to know
            self.way, self.why_no_way = NO_WAY, DependencyDown(why, hint="the proxy's log says why: hive logs")
        return self.why_no_way is None

    def _own_first_byte_s(self) -> float:
        """The time of this server alone until the first byte of an answer; 0 where it has none of its own."""
        if not self.name:
            return self._settings.inference.first_byte_s
        row = self._row
        return 0.0 if row is None else row.first_byte_s

    @property
    def _row(self) -> ModelRow | None:
        """The description of its model in the settings; None where it is described elsewhere, or has none."""
        models = self._settings.models.items()
        return next((row for name, row in models if slot_id(name) == self.name), None)

    def _own_access(self) -> RemoteAccess | None:
        """The access to the server of a remote model of the pool; None for the active backend."""
        if not self.name:
            return None
        row = self._row
        return NO_ACCESS if row is None or row.backend != BackendKind.REMOTE else access_of_model(row)

    def give_places(self) -> None:
        """Gives the line as many places as the server has; none behind a closed gate, so that every request keeps its
        turn."""
        told = None if self.backend is None else self.backend.places
        places = 0 if self.gate.is_closed else self._settings.proxy.backend_concurrency or told
        self._registry.give_turns(self.line.resize(places))

    @property
    def why_no_place(self) -> str:
        """The reason why its server has no place at all, a clause; empty where it has, or none is known."""
        cluster = None if self.backend is None else self.backend.cluster
        return "" if cluster is None or self.line.places != 0 else cluster.why_none

    # the gate ---------------------------------------------------------------------------------------------------------

    def close(self, reason: Switching | Cold) -> None:
        """Closes the gate: no request goes to the server from now on; those at it go on until `cut_off`. Prompts that
        are read ahead at a slot of the pool end."""
        self.gate.close(reason)
        self.give_places()
        for one in list(self.ahead) if self.name else ():
            one.gate_closed()

    def open(self) -> None:
        """Opens the gate: waiting requests go on, in the order of the line, after `use`. All of them are decided again,
        also if the server is the same as before."""
        self.version += 1
        self.gate.open()

    @property
    def is_drained(self) -> bool:
        """Whether nothing is at the server, and nothing on its way to it."""
        return self.line.running == 0 and not any(pool.busy or pool.connecting for pool in self._pools)

    @property
    def _pools(self) -> list[Pool]:
        return self._replaced if self.pool is None else [*self._replaced, self.pool]

    def cut_off(self) -> int:
        """Ends all connections to the server; how many requests were still on them."""
        connecting = sum(pool.connecting for pool in self._pools) if self.name else 0  # they wait for the next server
        cut = sum(pool.cut(self.gate.cut()) for pool in self._pools) - connecting
        self._renew_pool()
        return cut

    def make_way(self, waiter: object) -> None:
        """A request waits. Where that is for want of a place, one that a prompt has is given back."""
        line = self.line
        if not self.ahead or waiter in self.ahead or line.places is None or line.running < line.places:
            return
        for one in list(self.ahead):
            if one.give_way():
                return

    def is_far(self, backend: BackendInfo, model: str) -> bool:
        """Whether a request for this model leaves the box; `backend`: the server of this slot that was asked. One that
        names no model (a list) is answered by the server itself."""
        if is_elsewhere(backend.address):
            return True
        return bool(model) and self.where.can_be_far and not self.where.is_near(model)

    # what it offers, and wants ----------------------------------------------------------------------------------------

    def answers(self, endpoint: Endpoint) -> bool:
        """Whether Hive answers this in its stead, from its list of models or by an estimate."""
        backend = self.backend
        if endpoint.listing or backend is None:
            return endpoint.listing
        return answered_by_hive(endpoint, backend.kind) or (
            endpoint.name == COUNT and lacks_endpoint(backend, endpoint.name)
        )

    def offers(self, endpoint: Endpoint) -> bool:
        """Whether it answers this, in its own dialect or another, or Hive does in its stead."""
        backend = self.backend
        return backend is not None and (self.answers(endpoint) or _row_at(backend, endpoint) is not None)

    def check_offered(self, endpoint: Endpoint) -> None:
        """Raises NotSupported where it is to answer and cannot. Nothing is known of an empty slot, nor of one that is
        switched."""
        backend, is_switched = self.backend, self.gate.is_closed and not self.gate.is_cold
        if endpoint.keeps or backend is None or is_switched or self.offers(endpoint):
            return
        other = asked_as(endpoint, backend.kind)
        why, hint = why_lacking(backend, other.name) if other is not None else (offering_kinds(endpoint), "")
        says = f": {why}" if why else ""
        raise NotSupported(f"the active backend ({backend.kind}) does not offer {endpoint.name}{says}", hint=hint)

    def check_takes(self, endpoint: Endpoint) -> None:
        """Raises BadRequest where its models are of another category than those asked at this endpoint: not a fault of
        the server's, but the wrong model. Nothing is known of an empty slot, nor of one that is switched."""
        backend, is_switched = self.backend, self.gate.is_closed and not self.gate.is_cold
        if backend is None or is_switched or endpoint.keeps or endpoint.can_be_hives:
            return
        category = spec_of(backend.kind).category
        if category != endpoint.category:
            raise wrong_category(self.model if self.name else "the model", category, endpoint)

    def _asked_as(self, backend: BackendInfo, endpoint: Endpoint) -> Endpoint:
        """The row by which it is asked. It is another than the client's also if only that keeps the prompts of tenants
        apart: else a tenant could tell from the speed of an answer that another one sent the same prompt before; and if
        only that keeps away from what was flushed, or can name a slot."""
        asked = _row_at(backend, endpoint)
        spec, registry = spec_of(backend.kind), self._registry
        by = flushed_by(backend.kind, backend.capabilities)
        mixes = endpoint.needs_place and not spec.can_keep_apart(endpoint.name)
        several = self._settings.proxy.cache_isolation and registry.cache_groups() > 1
        flushed = self.name in registry.epochs.fresh or (by is FlushedBy.SALT and registry.epochs.numbers)
        if asked is endpoint and mixes and (several or flushed or self.id_slots is not None):
            asked = translated(endpoint, backend.kind)
        return asked or endpoint

    def want(self, endpoint: Endpoint, tenant: Tenant, wishes: Wishes, request_id: str) -> Want:
        """The requirements for the body of a request to this endpoint. Without wishes they are the same for all
        requests of a tenant, until `use` or new settings."""
        inference, backend = self._settings.inference, self.backend
        if backend is None:
            return Want(limit_by_first_name=False)
        asked, said = self._asked_as(backend, endpoint), spec_of(backend.kind).requests
        target = asked.name
        inject = priority_fields(backend, target, wishes.band)
        inject += said.pooled_fields(target) if self.name else ()
        alone, epochs = wishes.cache_mode is CacheMode.NONE, self._registry.epochs
        fresh = self.name in epochs.fresh
        if alone or self._settings.proxy.cache_isolation:
            group = f"request {request_id}" if alone else tenant.cache_group
            apart = fresh or alone or bool(wishes.cache_tag) or self._registry.cache_groups() > 1
            flushed = epochs.parts(self.name, group, wishes.cache_tag)
            inject += cache_fields(backend, target, group, wishes.cache_tag, apart, flushed)
        elif (flushed := epochs.parts(self.name, SHARED, "")) or fresh:
            inject += cache_fields(backend, target, SHARED, "", fresh, flushed)
        is_translated = asked is not endpoint
        return Want(
            ask_usage=(inference.token_tracking or self._registry.has_budgets) and asks_usage(asked, backend.kind),
            inject=inject,
            limit_absent=not said.short_completions or target != "/v1/completions",
            translate=endpoint.name if is_translated else "",
            lacking=lacking(backend) if is_translated else (),
            passed_over=_passed_over(backend, endpoint, is_translated=is_translated),
            limit_by_first_name=said.limit_by_first_name,
            apart=is_translated and _row_at(backend, endpoint) is endpoint,
            estimate=endpoint.name == COUNT and self.answers(endpoint),
            limit_as=said.limit_name(backend.address, inference.backend_limit_name),
            grammar=grammar_limits(self._settings, backend.kind),
            model=self.at_server,
        )


def wrong_category(model: str, category: str, endpoint: Endpoint) -> BadRequest:
    """400: the model of this category is asked where those of another one are.

    >>> from hive.endpoints.endpoints import find
    >>> wrong_category("gpt", "", find(b"POST", b"/v1/audio/transcriptions")).message
    '/v1/audio/transcriptions takes models for sound, and gpt is one for text'
    >>> wrong_category("tiny", "audio", find(b"POST", b"/api/chat")).hint
    'models for sound are asked at /v1/audio/transcriptions or /v1/audio/translations'
    """
    what, wanted = WORDS[category], WORDS[endpoint.category]
    paths = " or ".join(row.name for row in ENDPOINTS if row.category == category and row.category)
    return BadRequest(
        f"{endpoint.name} takes models for {wanted}, and {model} is one for {what}",
        hint=f"models for {what} are asked at {paths or '/v1/chat/completions'}",
    )


def _passed_over(backend: BackendInfo, endpoint: Endpoint, *, is_translated: bool) -> tuple[Over, ...]:
    """Fields that this backend ignores at this endpoint. None if the request is translated although the backend speaks
    the dialect: the rows are about its own endpoint."""
    if is_translated and endpoint.is_offered_by(backend.kind):
        return ()
    return spec_of(backend.kind).requests.passed_over.get(endpoint.name, ())


def way_to(
    backend: BackendInfo, inference: InferenceSection, env: Mapping[str, str], own: RemoteAccess | None = None
) -> UpstreamWay:
    """The way to this backend; files of `inference` are read now. `own`: its access, where that is its own.

    Raises ConfigError, NotPermitted if the key or the authorities cannot be read.

    >>> way_to(BackendInfo(kind="llama", address="/run/l.sock"), InferenceSection(), {})
    <UpstreamWay /run/l.sock>
    """
    origin = origin_of(backend.address)
    is_remote = spec_of(backend.kind).is_remote
    if not origin.tls and not is_remote:
        return UpstreamWay(origin.dialled)
    access = (access_of(inference, env) if own is None else own).shown_to(backend.address, may_ask=is_remote)
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
