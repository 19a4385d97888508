"""The servers that requests go to: the active backend, and the slots of the pool. The model decides between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hive.domain import BackendInfo, Caller, ModelInfo
from hive.endpoints.endpoints import ANSWERED, Endpoint
from hive.errors import BadRequest, NotFound, Saturated
from hive.link.adapters import AdapterRoute
from hive.link.pool import SlotRow
from hive.models.names import spelled
from hive.models.whereabouts import Whereabouts, joined
from hive.queue.queue import Queue
from hive.queue.slot_gate import Cold
from hive.routing.adapter_routes import AdapterTable, without_engine_names
from hive.routing.model_routing import ModelRouting
from hive.routing.slot import Slot
from hive.settings.table import Settings

MakeSlot = Callable[[str, Queue], Slot]


class SlotTable:
    """Every slot, and the routing over the models of all of them.

    `active`: the active backend, which is there always, with or without a server in it. `pooled`: the slots of the
    pool by id. A model that two of them offer is that of the slot that was there first; one of the active backend's
    that a slot describes is the slot's: whoever asks for it by any name waits for the pool to load it.
    """

    def __init__(self, settings: Settings, make: MakeSlot, line: Queue, new_line: Callable[[], Queue]) -> None:
        self.active = make("", line)
        self.pooled: dict[str, Slot] = {}
        self.routing = ModelRouting(settings.inference)
        self.adapters = AdapterTable()
        self._by_model: dict[str, Slot] = {}
        self._make = make
        self._new_line = new_line
        self._unused: list[Queue] = []
        """Lines of slots that were taken out, until nothing runs or waits there."""

    def __repr__(self) -> str:
        return f"<SlotTable {self.active} and {len(self.pooled)} of the pool>"

    def use_settings(self, settings: Settings) -> None:
        self.routing.use_settings(settings.inference)
        for slot in self.all:
            slot.use_settings(settings)

    @property
    def all(self) -> list[Slot]:
        return [self.active, *self.pooled.values()]

    @property
    def kinds(self) -> list[str]:
        """The kinds of the servers, slot by slot; without an empty one."""
        return [slot.backend.kind for slot in self.all if slot.backend is not None]

    # the daemon's word ------------------------------------------------------------------------------------------------

    def use_active(self, backend: BackendInfo | None, models: list[ModelInfo]) -> None:
        """Takes the daemon's word on the active backend; `give_places` of the slot follows."""
        self.active.use(backend, models)
        self._route()

    def learn(self, rows: Sequence[SlotRow], now: float) -> list[Slot]:
        """Takes the daemon's word on slots of the pool; their `give_places` follow."""
        self._close_unused()
        slots = [self._learn(row, now) for row in rows]
        self._route()
        return slots

    def _learn(self, row: SlotRow, now: float) -> Slot:
        slot = self.pooled.get(row.id)
        if slot is None:
            slot = self.pooled[row.id] = self._make(row.id, self._new_line())
        is_new = row.generation != slot.generation
        slot.generation = row.generation
        slot.at_server, slot.load_s, slot.adapter = row.at_server, row.load_s, row.adapter
        slot.use(row.backend, row.models, is_new=is_new)
        if not row.is_open:
            slot.close(cold(row, now))
        elif slot.gate.is_closed:
            slot.open()
        return slot

    def use_adapters(self, routes: Sequence[AdapterRoute]) -> None:
        """Takes the daemon's word on all adapters, in one step."""
        self.adapters.use(routes)
        self._route()

    def forget(self, name: str) -> Slot | None:
        """Takes a slot out; None where it is not known. The caller ends its requests."""
        self._close_unused()
        slot = self.pooled.pop(name, None)
        if slot is not None:
            self._unused.append(slot.line)
            slot.is_gone = True
            self._route()
        return slot

    def _close_unused(self) -> None:
        for line in [line for line in self._unused if not (line.running or line.waiting)]:
            self._unused.remove(line)
            line.close()

    def _route(self) -> None:
        """Makes the routing anew over the models of all slots."""
        self._by_model = {}
        models: list[ModelInfo] = []
        pooled = [slot for slot in self.pooled.values() if not slot.adapter]
        described = {spelled(model.name): slot for slot in pooled for model in slot.models}
        for model in without_engine_names(self.active.models):
            if spelled(model.name) not in described:
                self._by_model[model.name] = self._with_it(model.name) or self.active
                models.append(model)
        for slot in pooled:
            for model in without_engine_names(slot.models):
                if self._by_model.setdefault(model.name, slot) is slot:
                    models.append(model)
        wheres = [slot.where for slot in self.all if slot.backend is not None]
        if adapters := self.adapters.listed(models, self.pooled, self.active):
            wheres.append(Whereabouts(None, [model for model, _ in adapters]))  # servers that take them send none on
        for model, slot in adapters:
            if self._by_model.setdefault(model.name, slot) is slot:
                models.append(model)
        self.routing.use(models, joined(wheres))

    def _with_it(self, name: str) -> Slot | None:
        """The slot whose model the active backend knows by this name: they are one server with several models."""
        server = self.active.backend
        for slot in self.pooled.values() if server is not None else ():
            backend = slot.backend
            is_there = backend is not None and server is not None and backend.address == server.address
            if is_there and slot.at_server and spelled(slot.at_server) == spelled(name):
                return slot
        return None

    # what requests ask ------------------------------------------------------------------------------------------------

    def check_offered(self, endpoint: Endpoint) -> None:
        """Raises NotSupported where no server offers it, before its model is known."""
        if not self.pooled:
            self.active.check_offered(endpoint)
        elif not (self.answers(self.active, endpoint) or any(slot.offers(endpoint) for slot in self.all)):
            for slot in self.all:
                slot.check_offered(endpoint)

    def answers(self, slot: Slot, endpoint: Endpoint) -> bool:
        """Whether Hive answers this by itself, from its list of models or by an estimate. With a pool there is no one
        server that could answer what names no model, and a cold one is not loaded to describe its model."""
        if not endpoint.can_be_hives:
            return False
        if slot.answers(endpoint):
            return True
        return bool(self.pooled) and endpoint.name in ANSWERED and (not endpoint.body or slot.gate.is_cold)

    def is_warm(self, model: str) -> bool:
        """Whether requests for this model go to its server now."""
        slot = self._by_model.get(model)
        return slot is not None and not slot.gate.is_closed

    def routed(self, asked: str, caller: Caller) -> tuple[str, Slot]:
        """The name of the model that is meant, as `ModelRouting.served`, and its slot. Raises NotFound, Refusal;
        AdapterNotLoaded;
        Saturated if it cannot be known yet; BadRequest where none is named and there are several servers."""
        active, routing = self.active, self.routing
        if self.adapters.has_any:
            asked = self.adapters.instead_of(asked) or asked
        if not self.pooled:
            if not asked or active.gate.is_closed:  # behind the gate it is asked again
                return asked, active
            backend = active.backend
            if not routing.models and routing.where.can_be_far and backend is not None and not backend.up:
                raise Saturated("the inference server has not said yet what it offers", retry_after_s=1)
            return self._served(asked, caller), active
        if not asked and active.backend is None:
            raise BadRequest('"model" is missing', hint="GET /v1/models lists what there is")
        if not asked:
            return asked, active
        try:
            served = self._served(asked, caller)
        except NotFound:
            if active.gate.is_closed:
                return asked, active
            raise
        return served, self._by_model.get(served, active)

    def _served(self, asked: str, caller: Caller) -> str:
        """As `ModelRouting.served`; of an alias of an adapter that is not loaded, what stands in for that."""
        try:
            return self.routing.served(asked, caller)
        except NotFound:
            for target in self.routing.targets_of(asked):
                if instead := self.adapters.instead_of(target):
                    return self.routing.served(instead, caller)
            raise

    def told(self, asked: str, served: str) -> str:
        """As `AdapterTable.told`, also of an alias that may lead to an adapter."""
        if not self.adapters.has_any:
            return ""
        names = (asked, *self.routing.targets_of(asked))
        return next((told for name in names if (told := self.adapters.told(name, served))), "")


def cold(row: SlotRow, now: float) -> Cold:
    """The reason that a slot's gate is closed.

    >>> backend = BackendInfo(kind="llama", address="")
    >>> row = SlotRow(id="m-1", generation=1, is_open=False, backend=backend, models=[ModelInfo(name="m")], wait_s=9.0)
    >>> cold(row, now=1.0)
    Cold(model='m', wait_s=9.0, ready_at=None, never='', is_lost=False, unapproved=False)
    """
    name = row.models[0].name if len(row.models) == 1 else row.backend.kind if row.models else row.id
    ready_at = None if row.ready_in_s is None else now + row.ready_in_s
    return Cold(name, row.wait_s, ready_at, row.never, unapproved=row.unapproved)
