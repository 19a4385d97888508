"""Adapters in the engines: which weights answer to each name, and how that changes without a request that fails.

A load asks the engine first. Only what its server would answer with becomes what the name means: in one transaction of
SQLite, then in one message to the proxy. What answered before is left alone until its last request has ended. Who is
killed in between leaves either the old or the new meaning; what no name leads to goes at the next start.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import msgspec

from hive.adapters.directory import AdapterDirectory
from hive.adapters.record import GGUF, SAFETENSORS, AdapterRecord, engine_name
from hive.agents.transition_lock import outcome_of
from hive.audit.audit_log import AuditLog
from hive.backends.backend import BackendControl
from hive.backends.kinds import spec_of
from hive.control.active_backend import Active
from hive.domain import BackendKind, ModelInfo
from hive.errors import AdapterMismatch, AdapterNotLoaded, HiveError, ModelNotFound, NotSupported, WrongState
from hive.lifecycle.adapter_places import AdapterPlace, AdapterServers, SharedAdapters, SlotAdapters, next_pass
from hive.link.adapters import AdapterRoute
from hive.link.proxy_link import ProxyGates
from hive.models.adapter_names import is_engine_name
from hive.models.names import spelled
from hive.models.routing import aliases_of
from hive.pool.state import SlotState
from hive.pooling.pooled_slot import PooledSlot
from hive.pooling.pooling import ModelPool
from hive.settings.pool import slot_id
from hive.settings.table import Settings
from hive.store import adapters as store
from hive.store.adapters import StoredAdapter
from hive.store.database import Database
from hive.tasks import spawn

log = logging.getLogger("hive.daemon")

REFUSE, BASE, PREVIOUS = "refuse", "base", "previous"
"""Values of `[adapters] fallback`."""
READY, LOADING, COLD, FAILED = "ready", "loading", "cold", "failed"
STATES = {
    SlotState.READY: READY,
    SlotState.DRAINING: READY,
    SlotState.LOADING: LOADING,
    SlotState.FAILED: FAILED,
}
"""Of the slot of an adapter of its own; in all others its next request has it loaded."""
GIVEN_UP = (SlotState.COLD, SlotState.FAILED)
CONVERT = "convert_lora_to_gguf.py of llama.cpp makes a GGUF file of safetensors"


class LoadedAdapter(msgspec.Struct, frozen=True, kw_only=True):
    """One adapter whose name leads to weights. `where`: the model of the pool whose server has it, or the kind of the
    server in use. `charged_bytes`: in the books of the pool for it alone; None where it is a part of its base's charge.
    `state`: ready, loading, cold (the next request has it loaded), failed. `why`: of a failed one. `since`: Unix
    seconds."""

    name: str
    digest: str
    previous: str
    base: str
    where: str
    charged_bytes: int | None
    since: float
    by: str
    state: str
    why: str = ""


class Adapters:
    """One for the daemon. `check`: raises where a record may not be loaded now: its key is revoked, or its files are
    changed; it reads the disk. `why_not_approved`: by name and digest, the reason that a server that starts anew is not
    given it, empty for none. `rows`: what was loaded when an earlier daemon ended."""

    def __init__(
        self,
        directory: AdapterDirectory,
        rows: Sequence[StoredAdapter],
        *,
        pool: ModelPool,
        active: Active,
        proxy_link: ProxyGates,
        database: Database,
        audit_log: AuditLog,
        settings: Callable[[], Settings],
        check: Callable[[AdapterRecord], None],
        why_not_approved: Callable[[str, str], str],
    ) -> None:
        self._directory = directory
        self._rows = {row.name: row for row in rows}
        self._records: dict[tuple[str, str], AdapterRecord] = {}
        """Of what is loaded or was installed at the last look, by name and digest."""
        self._pool = pool
        self._active = active
        self._proxy_link = proxy_link
        self._database = database
        self._audit_log = audit_log
        self._settings = settings
        self._check = check
        self._own = SlotAdapters(pool, directory)
        self._shared = SharedAdapters(pool, active, proxy_link, directory, why_not_approved)
        self._locks: dict[str, asyncio.Lock] = {}
        self._leaving: dict[str, asyncio.Task[None]] = {}
        """By engine name: what is drained and unloaded, and may not be loaded meanwhile."""
        self._coming: set[str] = set()
        """Engine names that are being loaded: no fault of a server that has them already."""
        self._falling: dict[str, asyncio.Task[None]] = {}
        """By name: an earlier build that takes the place of one that has failed."""
        self._told: list[AdapterRoute] = []
        self._at_active_now: frozenset[str] | None = None
        """The models of the vLLM in use, as it was read last; None before that."""
        self._checked = asyncio.Event()
        """Set once what an earlier daemon left is known to be still right: no server is given it before."""
        pool.before_open = self._before_open
        active.on_read = self._at_active

    def __repr__(self) -> str:
        return f"<Adapters {len(self._rows)} loaded>"

    # looking ----------------------------------------------------------------------------------------------------------

    def loaded(self) -> list[LoadedAdapter]:
        """Every adapter whose name leads to weights, by name."""
        return [self._view(row) for _, row in sorted(self._rows.items())]

    def routes(self) -> list[AdapterRoute]:
        """The answers to the name of each adapter that is loaded or installed, but for a name that has come to mean
        something else: a model of it that came later is not hidden by an adapter."""
        taken, found = self._taken(), dict[str, AdapterRoute]()
        for (name, _), record in self._records.items():
            found[spelled(name)] = self._unloaded(name, record.base)
        for row in self._rows.values():
            found[spelled(row.name)] = self._route(row)
        return sorted((route for key, route in found.items() if key not in taken), key=lambda route: route.name)

    def offered(self) -> dict[str, tuple[ModelInfo, bool]]:
        """Every loaded adapter as a model of its name, and whether it is in memory."""
        models = {model.name: model for model in self._active.seen[1]}
        models |= {slot.model: slot.models[0] for slot in self._pool.slots.values() if slot.entry.adapter is None}
        taken, found = self._taken(), {}
        for row in self._rows.values():
            if spelled(row.name) in taken:
                continue
            like = models.get(row.base) or ModelInfo(name=row.base)
            model = msgspec.structs.replace(like, name=row.name, parent=row.base, digest=row.digest, meta={})
            found[row.name] = model, self._state(row)[0] == READY
        return found

    def served_as(self, name: str) -> str:
        """The model under which a server keeps prompts of a loaded adapter: its own server's, or its base where that
        has several. Any other name stays as it is."""
        row = next((row for row in self._rows.values() if spelled(row.name) == spelled(name)), None)
        place = None if row is None or spelled(name) in self._taken() else self._placed(row)
        if row is None or place is None:
            return name
        return place.engine if place.is_own else row.base

    def _view(self, row: StoredAdapter) -> LoadedAdapter:
        place, (state, why) = self._placed(row), self._state(row)
        slot = None if place is None else self._pool.slots.get(place.slot)
        where = "" if place is None or place.slot else self._active_kind
        charged = sum(grant.charged_bytes for grant in slot.grants) if slot and place and place.is_own else None
        return LoadedAdapter(
            name=row.name,
            digest=row.digest,
            previous=row.previous,
            base=row.base,
            where=slot.model if slot is not None else where,
            charged_bytes=charged,
            since=row.loaded_at,
            by=row.by,
            state=state,
            why=why,
        )

    def _state(self, row: StoredAdapter) -> tuple[str, str]:
        """Its state, and why it has failed."""
        if (what := self._taken().get(spelled(row.name))) is not None:
            return FAILED, f"{row.name} is the name of {what} now"
        place = self._placed(row)
        if place is None:
            return FAILED, f"{row.base} is not there, or takes no adapter"
        slot = self._pool.slots.get(place.slot)
        if place.is_own and slot is not None and slot.barred and not slot.is_open:
            return FAILED, slot.barred
        if place.is_own:
            return (COLD, "") if slot is None else (STATES.get(slot.state, COLD), slot.error)
        if why := self._shared.errors.get(place.engine, ""):
            return FAILED, why
        if self._is_lacking(place):
            return LOADING, ""
        return (READY if slot is None else STATES.get(slot.state, COLD)), ""

    def _is_lacking(self, place: AdapterPlace) -> bool:
        """Whether its server is asked by now, or will be soon, and has it not."""
        slot = self._pool.slots.get(place.slot)
        is_open = STATES.get(slot.state) == READY if slot is not None else not place.slot
        return is_open and not (place.is_own or self._shared.has(place))

    def _route(self, row: StoredAdapter) -> AdapterRoute:
        state, _ = self._state(row)
        place = self._placed(row)
        if state == FAILED or place is None:
            return self._unloaded(row.name, row.base)
        if self._is_lacking(place) or not (place.slot or self._active.up):
            return AdapterRoute(name=row.name, base=row.base, is_coming=True)
        return AdapterRoute(name=row.name, base=row.base, at_server=place.engine, slot=place.slot)

    def _unloaded(self, name: str, base: str) -> AdapterRoute:
        instead = base if self._settings().adapters.fallback == BASE else ""
        return AdapterRoute(name=name, base=base, instead=instead)

    @property
    def _active_kind(self) -> str:
        info, _ = self._active.seen
        return "" if info is None else info.kind

    # orders -----------------------------------------------------------------------------------------------------------

    async def load(self, name: str, digest: str = "", *, cause: str) -> AdapterRecord:
        """Has the name mean these weights, the newest that are installed where no digest is told. Returns once it does;
        what answered before is unloaded after its last request.

        Raises AdapterNotFound, AdapterMismatch, NotSupported, what `check` raises, what its server says, StoreFull:
        then the name means what it meant before.
        """
        await self._checked.wait()  # a server that starts waits for it too, and a load for that server
        async with self._lock(name.partition("@")[0]):  # so loads of a name end in the order in which they came
            return await self._load(await asyncio.to_thread(self._directory.find, name, digest), cause)

    async def _load(self, record: AdapterRecord, cause: str) -> AdapterRecord:
        engine = record.engine_name
        await asyncio.to_thread(self._check, record)
        self._refuse_taken(record.name)
        place = self._place(record)
        before = self._rows.get(record.name)
        if before is not None and before.digest == record.digest and self._state(before)[0] == READY:
            return record
        if (leaving := self._leaving.get(engine)) is not None:
            await asyncio.wait([leaving])
        self._coming.add(engine)
        try:
            await self._servers(place).load(record, place)
            if self._rows.get(record.name) is not before:  # a key was revoked meanwhile
                await asyncio.to_thread(self._check, record)
            was = "" if before is None else before.digest
            row = StoredAdapter(
                name=record.name,
                digest=record.digest,
                previous=was if was and was != record.digest else "" if before is None else before.previous,
                base=record.base,
                loaded_at=time.time(),
                by=cause,
            )
            await self._database.write(lambda conn: store.put(conn, row))
        except BaseException:
            self._coming.discard(engine)
            if before is None or before.digest != record.digest:
                self._leave(place)
            raise
        self._records[record.name, record.digest] = record
        self._rows[record.name] = row
        self._coming.discard(engine)
        self.tell()
        log.info("adapter_loaded name=%s digest=%s base=%s", record.name, record.digest, record.base)
        if before is not None and before.digest != record.digest and (old := self._placed(before)) is not None:
            self._leave(old)
        return record

    async def unload(self, name: str) -> None:
        """Nothing answers to the name from now on; returns once it is out of memory. Raises AdapterNotLoaded,
        StoreFull, and then nothing is changed."""
        async with self._lock(name):
            row = self._rows.get(name)
            if row is None:
                raise AdapterNotLoaded(f"adapter {name[:80]!r} is not loaded", hint="hive adapter list")
            await self._database.write(partial(store.remove, name=name, digest=row.digest))
            await self._forget(row)

    async def unload_key(self, key_id: str) -> list[str]:
        """Unloads every adapter that this key has verified; their names. None answers any more once this begins, also
        where another build of it is being loaded. One whose row cannot be written is unloaded all the same: the next
        start finds the key revoked."""
        records = [*self._records.values(), *await asyncio.to_thread(self._directory.records)]
        signed = {(record.name, record.digest) for record in records if record.key_id == key_id}
        found = [row for row in self._rows.values() if (row.name, row.digest) in signed]
        leaving = [self._take_away(row) for row in found]
        for row in found:
            await self._strike(row)
        if tasks := [task for task in leaving if task is not None]:
            await asyncio.wait(tasks)
        return [row.name for row in found]

    async def _strike(self, row: StoredAdapter) -> None:
        """Takes it off the record, unless another build of its name is there meanwhile."""
        gone = await outcome_of(self._database.write(partial(store.remove, name=row.name, digest=row.digest)))
        if isinstance(gone, HiveError):
            log.error("adapter_row_not_removed name=%s error=%s", row.name, gone.message)

    async def _forget(self, row: StoredAdapter) -> None:
        if (leaving := self._take_away(row)) is not None:
            await asyncio.wait([leaving])

    def _take_away(self, row: StoredAdapter) -> asyncio.Task[None] | None:
        """Nothing answers to its name from now on; what unloads it, if it is anywhere. Nothing is done where that was
        done."""
        if self._rows.get(row.name) is not row:
            return self._leaving.get(engine_name(row.name, row.digest))
        place = self._placed(row)
        del self._rows[row.name]
        self.tell()
        log.info("adapter_unloaded name=%s digest=%s", row.name, row.digest)
        return None if place is None else self._leave(place)

    async def restore(self) -> None:
        """At the daemon's start: what is on record is what runs. What may not be loaded any more is taken off it."""
        await self.look_again()
        for row in list(self._rows.values()):
            async with self._lock(row.name):
                await self._restore(row)
        self._checked.set()
        self.tell()
        if self._settings().registry.restore:
            own = [place.slot for row in self._rows.values() if (place := self._placed(row)) and place.is_own]
            self._pool.load_again(own)

    async def restored(self) -> None:
        """Returns once it is known what is loaded still."""
        await self._checked.wait()

    async def _restore(self, row: StoredAdapter) -> None:
        try:
            record = await asyncio.to_thread(self._directory.find, row.name, row.digest)
            await asyncio.to_thread(self._check, record)
        except HiveError as error:
            log.error("adapter_taken_off name=%s digest=%s error=%s", row.name, row.digest, error.message)
            self._audit_log.note("adapter.taken_off", target=row.name, detail={"name": row.name, "why": error.message})
            await self._strike(row)
            self._take_away(row)
            return
        self._records[row.name, row.digest] = record

    async def look_again(self) -> None:
        """Looks which adapters are installed: some came, or some are gone."""
        records = await asyncio.to_thread(self._directory.records)
        loaded = {(row.name, row.digest) for row in self._rows.values()}
        kept = {key: record for key, record in self._records.items() if key in loaded}
        self._records = kept | {(record.name, record.digest): record for record in records}
        self.tell()

    # its life ---------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Tells the proxy what has changed by itself, and puts an earlier version in the place of one that failed,
        until cancelled."""
        await self.restore()
        while True:
            self.tell()
            await self._put_right()
            if self._settings().adapters.fallback == PREVIOUS:
                self._fall_back()
            await next_pass(self._pool)

    def tell(self, *, again: bool = False) -> None:
        """Tells the proxy where that is news; `again`: to one that has just come."""
        routes = self.routes()
        if again or routes != self._told:
            self._told = routes
            self._proxy_link.adapters_are(routes)

    async def _put_right(self) -> None:
        """A server that is open and lacks what a name leads to was started anew while that was being loaded."""
        lacking = set()
        for row in self._rows.values():
            place = self._placed(row)
            if place is not None and self._is_lacking(place) and place.engine not in self._shared.errors:
                lacking.add(place.slot)
        for slot in lacking:
            if (control := self._shared.control(slot)) is not None:
                await self._fill(slot, control)

    def _fall_back(self) -> None:
        """Begins to load the earlier build of each that has failed by itself; one whose base is gone waits for that."""
        for row in self._rows.values():
            is_busy = row.name in self._falling or self._lock(row.name).locked()
            if row.previous and not is_busy and self._has_failed(row):
                task = self._falling[row.name] = spawn(self._go_back(row), name=f"earlier adapter {row.name}")
                task.add_done_callback(partial(self._has_fallen, row.name))

    def _has_fallen(self, name: str, _: asyncio.Task[None]) -> None:
        del self._falling[name]

    def _has_failed(self, row: StoredAdapter) -> bool:
        """Whether it cannot be loaded any more; the pool tries the same one again for twenty minutes first."""
        place = self._placed(row)
        if place is None or spelled(row.name) in self._taken():
            return False
        slot = self._pool.slots.get(place.slot) if place.is_own else None
        return self._state(row)[0] == FAILED or (slot is not None and slot.state in GIVEN_UP and slot.failures > 0)

    async def _go_back(self, row: StoredAdapter) -> None:
        async with self._lock(row.name):
            if self._rows.get(row.name) is not row or not self._has_failed(row):
                return  # another order came first
            log.warning("adapter_falls_back name=%s from=%s to=%s", row.name, row.digest, row.previous)
            came = await outcome_of(self._earlier(row))
            if isinstance(came, HiveError):
                log.error("adapter_not_fallen_back name=%s error=%s", row.name, came.message)
            if (now := self._rows.get(row.name)) is not None:  # not back and forth for ever
                self._rows[row.name] = msgspec.structs.replace(now, previous="")

    async def _earlier(self, row: StoredAdapter) -> AdapterRecord:
        record = await asyncio.to_thread(self._directory.find, row.name, row.previous)
        return await self._load(record, "hive")

    def _leave(self, place: AdapterPlace) -> asyncio.Task[None]:
        """Has it drained and unloaded; no name leads there any more."""
        known = self._leaving.get(place.engine)
        if known is not None and not known.done():
            return known
        task = self._leaving[place.engine] = spawn(self._unload(place), name=f"unload {place.engine}")
        return task

    async def _unload(self, place: AdapterPlace) -> None:
        try:
            await self._servers(place).unload(place)
        finally:
            self._leaving.pop(place.engine, None)

    # servers that start -----------------------------------------------------------------------------------------------

    async def _before_open(self, slot: PooledSlot) -> None:
        """A server of several adapters has started, or is taken over: it has all of them before its gate opens."""
        if slot.entry.kind != BackendKind.VLLM or not slot.entry.row.adapters:
            return
        control = BackendControl(spec_of(slot.entry.kind), slot.backend.address)
        await self._fill(slot.id, control)

    async def _at_active(self, control: BackendControl, models: Sequence[ModelInfo]) -> None:
        """The server in use was read, because it came up or may be another one."""
        self._at_active_now = frozenset(model.name for model in models if not model.parent)
        if control.kind != BackendKind.VLLM:
            return
        wanted = any(self._pool_slot(row.base) is None for row in self._rows.values())
        if wanted or any(model.parent and is_engine_name(model.name) for model in models):
            await self._fill("", control)

    async def _fill(self, slot: str, control: BackendControl) -> None:
        await self._checked.wait()
        wanted = {}
        for row in self._rows.values():
            place, record = self._placed(row), self._records.get((row.name, row.digest))
            if place is not None and place.slot == slot and record is not None:
                wanted[place.engine] = record
        await self._shared.fill(slot, control, wanted, frozenset({*self._coming, *self._leaving}))
        self.tell()

    # places -----------------------------------------------------------------------------------------------------------

    def _servers(self, place: AdapterPlace) -> AdapterServers:
        return self._own if place.is_own else self._shared

    def _placed(self, row: StoredAdapter) -> AdapterPlace | None:
        """The place of a loaded one; None where its base is not there any more."""
        engine = engine_name(row.name, row.digest)
        slot = self._pool_slot(row.base)
        if slot is not None and slot.entry.kind == BackendKind.LLAMA:
            return AdapterPlace(slot_id(engine), engine, is_own=True)
        if slot is not None:
            return AdapterPlace(slot.id, engine) if slot.entry.kind == BackendKind.VLLM else None
        there = self._at_active_now
        is_there = self._active_kind == BackendKind.VLLM and (there is None or row.base in there)
        return AdapterPlace("", engine) if is_there else None

    def check_place(self, record: AdapterRecord) -> None:
        """Raises ModelNotFound, NotSupported, AdapterMismatch where it cannot be loaded, and WrongState where its name
        is something else's."""
        self._refuse_taken(record.name)
        self._place(record)

    def _place(self, record: AdapterRecord) -> AdapterPlace:
        """The place where a new one is to be loaded. Raises ModelNotFound, NotSupported, AdapterMismatch."""
        slot = self._pool_slot(record.base)
        if slot is None:
            return self._place_at_active(record)
        kind, engine = slot.entry.kind, record.engine_name
        if kind == BackendKind.LLAMA:
            if record.format != GGUF:
                raise AdapterMismatch(f"the server of {record.base} takes adapters as GGUF files", hint=CONVERT)
            return AdapterPlace(slot_id(engine), engine, is_own=True)
        if kind != BackendKind.VLLM:
            raise NotSupported(f"{spec_of(kind).label} takes no adapter", hint="vLLM and llama-server do")
        if not slot.entry.row.adapters:
            raise NotSupported(
                f"{record.base} was started without room for adapters",
                hint=f"set adapters = N in [model {record.base}]",
            )
        _check_safetensors(record)
        return AdapterPlace(slot.id, engine)

    def _place_at_active(self, record: AdapterRecord) -> AdapterPlace:
        info, models = self._active.seen
        if info is None or record.base not in {model.name for model in models}:
            raise ModelNotFound(f"there is no model {record.base}, which the adapter is on", hint="hive model list")
        if info.kind == BackendKind.LLAMA:
            raise NotSupported(
                "the llama-server of `hive backend` takes no adapter while it runs",
                hint=f"describe its model as [model {record.base}]: then each adapter has a server of its own",
            )
        if info.kind != BackendKind.VLLM:
            raise NotSupported(f"{spec_of(info.kind).label} takes no adapter", hint="vLLM and llama-server do")
        _check_safetensors(record)
        return AdapterPlace("", record.engine_name)

    def _pool_slot(self, base: str) -> PooledSlot | None:
        found = (slot for slot in self._pool.slots.values() if slot.entry.adapter is None and slot.model == base)
        return next(found, None)

    def _refuse_taken(self, name: str) -> None:
        """Raises WrongState where the name is a model's, an alias, a task's, or but for its case another adapter's:
        requests could not mean it."""
        key = spelled(name)
        what = self._taken().get(key)
        if what is None and any(row.name != name and spelled(row.name) == key for row in self._rows.values()):
            what = "another adapter, as requests spell names,"
        if what is not None:
            raise WrongState(f"{name} is the name of {what} already", hint="install it with another --name")

    def _taken(self) -> Mapping[str, str]:
        """The names that mean something else than an adapter, folded, and what."""
        settings, (_, models) = self._settings(), self._active.seen
        return {
            **{spelled(task): "a task" for task in settings.tasks},
            **dict.fromkeys(aliases_of(settings.inference.aliases), "an alias"),
            **{spelled(model.name): "a model" for model in models},
            **{spelled(slot.model): "a model" for slot in self._pool.slots.values()},
        }

    def _lock(self, name: str) -> asyncio.Lock:
        return self._locks.setdefault(name, asyncio.Lock())


def _check_safetensors(record: AdapterRecord) -> None:
    if record.format != SAFETENSORS:
        raise AdapterMismatch(f"vLLM takes adapters as safetensors, and {record.name} is a GGUF file")
