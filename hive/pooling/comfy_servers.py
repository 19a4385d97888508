"""The server of a ComfyUI's slot: the helper starts the runner before it, and what ComfyUI holds is asked of that.

A runner takes next to nothing; the memory is that of the operator's ComfyUI, which is no process of the pool's. It
tells what it holds on its GPU (`/system_stats`); on a CPU it cannot be told from others' memory, and the books decide.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

import msgspec

from hive.agents.transition_lock import outcome_of
from hive.backends.backend import open_backend
from hive.backends.comfyui import ComfyState, state
from hive.backends.entries import ModelEntry
from hive.domain import BackendKind
from hive.link.helper import BackendIs
from hive.link.slots import ProcessState, SlotGrant, SlotProcess
from hive.pooling.slot_servers import PoolServers

log = logging.getLogger("hive.pool")

LOOK_S = 2.0
"""Between two questions to a runner that serves."""


class ComfyServers:
    """The helper's servers, with what the one of a ComfyUI holds. Every method is called on the loop.

    `address_of`: where the runner of an entry listens.
    """

    def __init__(
        self, own: PoolServers, entries: Iterable[ModelEntry], address_of: Callable[[ModelEntry], str]
    ) -> None:
        self._own = own
        self._ids = {entry.id: entry for entry in entries if entry.kind == BackendKind.COMFYUI}
        self._address_of = address_of
        self._states: dict[str, ComfyState] = {}
        self._serving: set[str] = set()

    def __repr__(self) -> str:
        return f"<ComfyServers {len(self._ids)} before {self._own}>"

    async def run(self) -> None:
        """Looks again and again, until cancelled."""
        while self._ids:
            await self.look()
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        """Asks the runners that serve what their ComfyUI holds. One that does not answer leaves what was known; of a
        ComfyUI that is down nothing is."""
        for id in list(self._serving):
            control = open_backend(BackendKind.COMFYUI, self._address_of(self._ids[id]))
            found = await outcome_of(control.converse(state))
            if isinstance(found, ComfyState) and id in self._serving:
                was = self._states.get(id, ComfyState())
                self._states[id] = found
                if found.up is not was.up:
                    log.info("comfyui_is up=%s version=%s device=%s", found.up, found.version, found.device)

    def _with_memory(self, process: SlotProcess) -> SlotProcess:
        if process.state is not ProcessState.SERVING:
            self._serving.discard(process.id)
            self._states.pop(process.id, None)
            return msgspec.structs.replace(process, bytes=None, peak_bytes=None)
        self._serving.add(process.id)
        found = self._states.get(process.id)
        if found is None or found.held_bytes is None:  # the runner's own memory says nothing of it
            return msgspec.structs.replace(process, bytes=None, peak_bytes=None)
        return msgspec.structs.replace(process, bytes=0, peak_bytes=None, gpu_bytes=found.held_bytes)

    # for the pool -----------------------------------------------------------------------------------------------------

    async def slots(self) -> dict[str, SlotProcess]:
        found = await self._own.slots()
        for id in self._ids.keys() & found.keys():
            found[id] = self._with_memory(found[id])
        for id in self._serving - found.keys():
            self._serving.discard(id)
            self._states.pop(id, None)
        return found

    async def slot_start(self, id: str, grant: SlotGrant) -> SlotProcess:
        return await self._own.slot_start(id, grant)

    async def slot_stop(self, id: str, *, grace_s: float) -> None:
        await self._own.slot_stop(id, grace_s=grace_s)

    async def slot_log(self, id: str, lines: int) -> str:
        return await self._own.slot_log(id, lines)

    async def slot_prepare(self, id: str) -> None:
        await self._own.slot_prepare(id)

    async def look_at_backend(self, kind: str) -> BackendIs:
        return await self._own.look_at_backend(kind)
