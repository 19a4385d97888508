"""Models on remote servers as slots of the pool: without bytes, ready as long as their server is thought to be up.

A server on this machine is asked for its models now and then. One that is far is never asked by itself: nothing leaves
the box that no request caused, so it counts as up, and a request that cannot reach it ends with 502.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterable

from hive.agents.transition_lock import outcome_of
from hive.backends.ask import parse_address
from hive.backends.backend import open_backend
from hive.backends.entries import ModelEntry
from hive.domain import CloudUse, origin_of
from hive.errors import HiveError, NotFound
from hive.host.access import access_of_model
from hive.link.slots import ProcessState, SlotGrant, SlotProcess
from hive.pooling.entry_facts import FileFacts
from hive.settings.table import Settings

log = logging.getLogger("hive.pool")

LOOK_S = 5.0
"""Between two questions to a server on this machine."""
NOT_ASKED = "it has not been asked yet"


def address_of(entry: ModelEntry) -> str:
    """The address of its server, as `BackendInfo` has it."""
    return parse_address(entry.row.url)


def is_far(entry: ModelEntry) -> bool:
    return not origin_of(address_of(entry)).is_here


class RemoteSlots:
    """The entries of `kind` remote. Every method is called on the loop.

    `on_moved`: a server on this machine is there no more. `on_list`: what is told of an entry has changed.
    """

    def __init__(
        self,
        entries: Iterable[ModelEntry],
        settings: Callable[[], Settings],
        *,
        on_moved: Callable[[SlotProcess], None],
        on_list: Callable[[], None],
    ) -> None:
        self.ids = {entry.id: entry for entry in entries if entry.is_remote}
        self._settings = settings
        self._on_moved = on_moved
        self._on_list = on_list
        self._held: dict[str, SlotProcess] = {}
        self._why_not = {id: "" if is_far(entry) else NOT_ASKED for id, entry in self.ids.items()}
        """The reason why each cannot be used; empty where it can."""
        self._epoch = secrets.token_hex(4)
        self._runs = 0

    def __repr__(self) -> str:
        return f"<RemoteSlots {len(self.ids)}, {len(self._held)} held>"

    async def run(self) -> None:
        """Looks again and again, until cancelled."""
        while self.ids:
            await self.look()
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        """Asks the servers on this machine; tells what has changed."""
        near = [entry for entry in self.ids.values() if not is_far(entry)]
        found = await asyncio.gather(*(self._why_down(entry) for entry in near))
        for entry, why in zip(near, found, strict=True):
            self._learn(entry, why)
        self.guard_changed()

    def guard_changed(self) -> None:
        """Takes a change of `[inference] cloud`: under `never` what is far is closed, with the reason."""
        is_shut = self._settings().inference.cloud == CloudUse.NEVER
        for entry in self.ids.values():
            if is_far(entry):
                self._learn(entry, "nothing may leave this box ([inference] cloud = never)" if is_shut else "")

    async def _why_down(self, entry: ModelEntry) -> str:
        try:
            access = access_of_model(entry.row)
        except HiveError as error:
            return error.message
        models = await outcome_of(open_backend(entry.kind, address_of(entry), access).models())
        return models.message if isinstance(models, HiveError) else ""

    def _learn(self, entry: ModelEntry, why: str) -> None:
        if self._why_not[entry.id] == why:
            return
        log.info("remote_is model=%s why_not=%r", entry.name, why)
        self._why_not[entry.id] = why
        self._on_list()
        held = self._held.pop(entry.id, None) if why else None
        if held is not None:
            self._on_moved(SlotProcess(id=held.id, run=held.run, state=ProcessState.ENDED, why=why, was_dropped=True))

    # for the pool -----------------------------------------------------------------------------------------------------

    async def facts_of(self, entry: ModelEntry) -> FileFacts:
        """Facts about the entry; of its files there are none."""
        why = self._why_not.get(entry.id, NOT_ASKED)
        return FileFacts(can_load=not why, why_not=why, is_gguf=False)

    async def slots(self) -> dict[str, SlotProcess]:
        return dict(self._held)

    async def slot_start(self, id: str, grant: SlotGrant) -> SlotProcess:
        """Begins to be used. Raises NotFound."""
        if id not in self.ids:
            raise NotFound(f"no remote model has the slot {id}")
        if id not in self._held:
            self._runs += 1
            run = f"{self._epoch}-{self._runs}"
            self._held[id] = SlotProcess(id=id, run=run, state=ProcessState.SERVING, grant=grant, bytes=0)
        return self._held[id]

    async def slot_stop(self, id: str, *, grace_s: float) -> None:  # noqa: ARG002
        """Is used no more; the server is somebody else's and goes on."""
        self._held.pop(id, None)

    async def slot_log(self, id: str, lines: int) -> str:  # noqa: ARG002
        return f"what {self.ids[id].name} writes is in the log of whoever runs {self.ids[id].row.url}\n"
