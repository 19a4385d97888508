"""The servers that slots are of: found by their addresses, with all that a slot is good for there."""

from __future__ import annotations

import hashlib

import msgspec

from hive.backends.backend import BackendControl, open_backend
from hive.backends.kinds import spec_of
from hive.control.active_backend import Active
from hive.domain import origin_of
from hive.errors import NotFound, NotSupported
from hive.lifecycle.slot_key import SlotKeys
from hive.link.parking import SlotOf, UseParked
from hive.pooling.pooling import ModelPool


class ParkingServers:
    """Of the pool, and the one in use."""

    def __init__(self, active: Active, pool: ModelPool, keys: SlotKeys) -> None:
        self._active = active
        self._pool = pool
        self._keys = keys
        self._elsewhere: set[tuple[str, str, int]] = set()
        """Servers that write into another directory, by slot, address and generation."""

    def __repr__(self) -> str:
        return f"<ParkingServers, {len(self._elsewhere)} of them elsewhere>"

    async def find(self, at: SlotOf | UseParked) -> tuple[BackendControl, str]:
        """The server, and a digest of all that a slot of it is good for. Raises NotFound where another one is there,
        NotSupported where its slots are not kept."""
        if at.server:
            slot = self._pool.slots.get(at.server)
            kind, address = ("", "") if slot is None else (slot.entry.kind, slot.backend.address)
        else:
            own = self._active.control
            kind, address = ("", "") if own is None else (own.kind, own.address)
        if address != at.address or not address:
            raise NotFound("that server is gone")
        origin = origin_of(address)
        if not origin.is_here:
            raise NotSupported("a server on another machine writes to that machine's disk")
        if self._which(at) in self._elsewhere:
            raise NotSupported("its server writes into another directory")
        control = open_backend(kind, address)
        asking = spec_of(kind).asking
        if asking.slots_made_for is None:
            raise NotSupported(f"{kind} saves no slot")
        told, files = await control.converse(asking.slots_made_for)
        facts = await self._keys.facts_of(origin.dialled, files)
        return control, hashlib.sha256(msgspec.json.encode([kind, at.server, told, facts])).hexdigest()

    def writes_elsewhere(self, at: SlotOf | UseParked) -> None:
        """It is asked for nothing any more."""
        self._elsewhere.add(self._which(at))

    def _which(self, at: SlotOf | UseParked) -> tuple[str, str, int]:
        slot = self._pool.slots.get(at.server)
        return at.server, at.address, 0 if slot is None else slot.generation
