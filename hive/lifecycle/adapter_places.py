"""The places where adapters are loaded: a slot of the pool for each one (llama-server), or a server of several (vLLM).

What each of them does is done to the engine alone; which name leads there is `adapters.py`'s to say.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import NamedTuple, Protocol

from hive.adapters.directory import AdapterDirectory
from hive.adapters.record import AdapterRecord
from hive.agents.transition_lock import outcome_of
from hive.backends.backend import BackendControl, open_backend
from hive.backends.entries import adapter_entries
from hive.backends.vllm import adapters_at, load_adapter, unload_adapter
from hive.control.active_backend import Active
from hive.domain import Band
from hive.errors import (
    AdapterMismatch,
    BackendDown,
    DependencyDown,
    HiveError,
    NotPermitted,
    NotSupported,
    SignatureMismatch,
    WrongState,
)
from hive.link.proxy_link import ProxyGates
from hive.pool.state import Demand, SlotState
from hive.pooling.pooled_slot import HELD, PooledSlot
from hive.pooling.pooling import ModelPool

log = logging.getLogger("hive.daemon")

ORDER = "adapter"
"""Under this name a slot is ordered to be unloaded for good."""
AGAIN_S = 1.0
READ_WITHIN_S = 10.0
"""The files of a new slot's model are read within this time, or by the pool later."""


class AdapterPlace(NamedTuple):
    """One adapter at one server. `slot`: of the pool, empty for the inference server in use; `engine`: the name by
    which that knows its weights; `is_own`: the slot is the adapter's own."""

    slot: str
    engine: str
    is_own: bool = False


class AdapterServers(Protocol):
    """Loads and unloads adapters at one kind of place."""

    async def load(self, record: AdapterRecord, place: AdapterPlace) -> None:
        """Returns once its server would answer with it. Raises HiveError, and then no more of it is left than was there
        before."""
        ...

    async def unload(self, place: AdapterPlace) -> None:
        """Returns once no request is there and it is gone; no name leads there any more. Requests under way have the
        pool's time to end, then it is done by the rules of the pool."""
        ...


class SlotAdapters:
    """Adapters that have a slot of the pool each: a server of the base's weights with this one adapter."""

    def __init__(self, pool: ModelPool, directory: AdapterDirectory) -> None:
        self._pool = pool
        self._directory = directory

    def __repr__(self) -> str:
        return f"<SlotAdapters of {self._pool}>"

    async def load(self, record: AdapterRecord, place: AdapterPlace) -> None:
        pool = self._pool
        entries = {slot.id: slot.entry for slot in pool.slots.values() if slot.entry.adapter is None}
        entry = adapter_entries(entries, [(record, self._directory.path(record))]).get(place.slot)
        if entry is None:
            raise WrongState(f"{record.base} is no model of the pool any more")
        is_new, slot = place.slot not in pool.slots, pool.add(entry)
        if slot.entry.adapter is None or slot.entry.adapter.digest != record.digest:
            raise WrongState(f"another adapter has the slot of {place.engine}", hint="install it with another --name")
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(READ_WITHIN_S):
                    await pool.footprints.facts_of(entry)
            await load_slot(pool, slot)
        except BaseException as error:
            if isinstance(error, HiveError):
                log.warning("adapter_not_loaded slot=%s error=%s", slot.id, error.message)
                if is_new:
                    await self.unload(place)
            raise

    async def unload(self, place: AdapterPlace) -> None:
        pool, slot = self._pool, self._pool.slots.get(place.slot)
        if slot is None or slot.entry.adapter is None:
            return
        slot.order, slot.pinned_at = None, None
        while slot.state in HELD:
            slot.unload_orders.add(ORDER)  # another order, or a fault, may have taken it back
            slot.renewing = False
            pool.wake()
            await next_pass(pool)
        if pool.slots.get(place.slot) is slot:
            pool.remove(place.slot)


class SharedAdapters:
    """Adapters at servers that hold several: vLLM, of the pool or in use. Its names carry digests, because it never
    frees what it was told to unload, and would answer from another adapter's cache under the same name."""

    def __init__(
        self,
        pool: ModelPool,
        active: Active,
        proxy_link: ProxyGates,
        directory: AdapterDirectory,
        why_not_approved: Callable[[str, str], str],
    ) -> None:
        self._pool = pool
        self._active = active
        self._proxy_link = proxy_link
        self._directory = directory
        self._why_not_approved = why_not_approved
        self._locks: dict[str, asyncio.Lock] = {}
        self._there: dict[str, set[str]] = {}
        """By slot: the engine names that its server of now has."""
        self.errors: dict[str, str] = {}
        """Reasons that an adapter could not be loaded again after its server started anew, by engine name."""

    def __repr__(self) -> str:
        return f"<SharedAdapters {self._there}>"

    def has(self, place: AdapterPlace) -> bool:
        """Whether the server of now has it. That in use is believed to have it until it was looked at: it may serve
        since before this daemon."""
        there = self._there.get(place.slot)
        return not place.slot if there is None else place.engine in there

    async def load(self, record: AdapterRecord, place: AdapterPlace) -> None:
        if place.slot:
            slot = self._pool.slots.get(place.slot)
            if slot is None:
                raise WrongState(f"{record.base} is no model of the pool any more")
            if slot.state is not SlotState.READY:
                await load_slot(self._pool, slot)
        async with self._lock(place.slot):
            control = self.control(place.slot)
            if control is None:
                raise DependencyDown(f"the server of {record.base} is not up", hint="hive status")
            path = str(self._directory.path(record))
            await control.converse(partial(load_adapter, name=place.engine, path=path))
            self._there.setdefault(place.slot, set()).add(place.engine)
            self.errors.pop(place.engine, None)

    async def unload(self, place: AdapterPlace) -> None:
        drained = await outcome_of(
            self._proxy_link.drain_adapter(place.slot, place.engine, drain_s=self._pool.rules.drain_s)
        )
        if isinstance(drained, HiveError):  # a proxy that is gone has no request there
            log.info("adapter_not_drained name=%s error=%s", place.engine, drained.message)
        elif drained:
            log.warning("adapter_unloaded_in_use name=%s requests=%d", place.engine, drained)
        async with self._lock(place.slot):
            self._there.get(place.slot, set()).discard(place.engine)
            control = self.control(place.slot)
            if control is None:
                return  # a server that is gone, or starts anew, has it no more
            gone = await outcome_of(control.converse(partial(unload_adapter, name=place.engine)))
            if isinstance(gone, HiveError):
                log.warning("adapter_not_unloaded name=%s error=%s", place.engine, gone.message)

    async def fill(
        self, slot: str, control: BackendControl, wanted: dict[str, AdapterRecord], keep: frozenset[str]
    ) -> None:
        """A server was started, or is looked at for the first time: it gets what it is to have, by engine name, and
        loses what Hive loaded and does not want, but `keep`. One that it refuses, whose files are changed, or that no
        signed order has loaded where a rule asks for one, is left out; the rest serves. Does no more than look where
        all is there."""
        async with self._lock(slot):
            listed = await outcome_of(control.converse(adapters_at))
            if isinstance(listed, HiveError):
                log.warning("adapters_not_listed slot=%s error=%s", slot, listed.message)
                listed = frozenset()
            there = self._there[slot] = set(listed & (wanted.keys() | keep))
            for engine in sorted(listed - wanted.keys() - keep):
                await outcome_of(control.converse(partial(unload_adapter, name=engine)))
                log.info("adapter_left_over name=%s slot=%s", engine, slot)
            for engine in sorted(wanted.keys() - listed):
                came = await outcome_of(self._load_again(control, engine, wanted[engine]))
                if isinstance(came, AdapterMismatch | NotSupported | SignatureMismatch | NotPermitted):
                    log.error("adapter_not_restored name=%s error=%s", engine, came.message)
                    self.errors[engine] = came.message
                elif isinstance(came, HiveError):
                    log.warning("adapter_not_yet_restored name=%s error=%s", engine, came.message)
                else:
                    there.add(engine)
                    self.errors.pop(engine, None)

    async def _load_again(self, control: BackendControl, engine: str, record: AdapterRecord) -> None:
        """Its files lay on the disk meanwhile: they are hashed. Raises NotPermitted where no order of now has
        it loaded, SignatureMismatch, and what the server says."""
        if why := self._why_not_approved(record.name, record.digest):
            raise NotPermitted(why, hint="hive adapter load --op-token loads it")
        await asyncio.to_thread(self._directory.check, record)
        await control.converse(partial(load_adapter, name=engine, path=str(self._directory.path(record))))

    def _lock(self, slot: str) -> asyncio.Lock:
        return self._locks.setdefault(slot, asyncio.Lock())

    def control(self, slot: str) -> BackendControl | None:
        """The server of now; None where it is not up, or starts: then `fill` follows."""
        if not slot:
            return self._active.control if self._active.up else None
        found = self._pool.slots.get(slot)
        if found is None or found.state not in (SlotState.READY, SlotState.DRAINING):
            return None
        return open_backend(found.entry.kind, found.backend.address)


async def load_slot(pool: ModelPool, slot: PooledSlot) -> None:
    """Returns once the slot is ready, loaded as by an operator's order. Raises WrongState where it cannot be loaded,
    DependencyDown where its load failed."""
    if slot.state is SlotState.FAILED:
        slot.state, slot.failures = SlotState.COLD, 0
        slot.ends.clear()
    slot.retry_at, slot.error, slot.never = 0.0, "", ""
    slot.unload_orders.clear()
    order = slot.order = slot.order or Demand(Band.NORMAL, time.monotonic())
    pool.wake()
    try:
        while not slot.is_open:
            await next_pass(pool)
            if slot.is_open:
                return
            if why := slot.barred or slot.never:
                raise WrongState(f"{slot.model} cannot be loaded: {why}")
            if slot.error and slot.state in (SlotState.COLD, SlotState.FAILED):
                said = f": {slot.last_lines[-1]}" if slot.last_lines else ""
                raise DependencyDown(f"{slot.model} was not loaded: {slot.error}{said}", hint="hive logs tells more")
            if pool.slots.get(slot.id) is not slot or slot.unload_ordered:
                raise WrongState(f"{slot.model} is not loaded: another order came")
            if slot.order is None and slot.state is SlotState.COLD:
                raise BackendDown(f"{slot.model} is not loaded: its load was given up")
    finally:
        if slot.order is order and not slot.is_open:
            slot.order = None


async def next_pass(pool: ModelPool) -> None:
    """Returns after the next decision of the pool, or a second."""
    with suppress(TimeoutError):
        async with asyncio.timeout(AGAIN_S):
            await pool.passed()
