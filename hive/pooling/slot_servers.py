"""The servers of the pool's slots, wherever they are: those that the helper starts, and the models of an Ollama."""

from __future__ import annotations

from collections.abc import Container
from typing import Protocol

from hive.link.helper import BackendIs
from hive.link.slots import SlotGrant, SlotProcess


class SlotServers(Protocol):
    """Starts and stops the servers of slots. A verb that is done twice does no more than once."""

    async def slots(self) -> dict[str, SlotProcess]:
        """Every slot with a server, and those whose end was not told, by id. Raises LinkLost, TimedOut."""
        ...

    async def slot_start(self, id: str, grant: SlotGrant) -> SlotProcess:
        """Begins a start; when it serves or has ended is told by itself. Where it runs already that is the answer.

        Raises NotFound, WrongState while it is being stopped, LinkLost, what else the start is refused for.
        """
        ...

    async def slot_stop(self, id: str, *, grace_s: float) -> None:
        """Returns once nothing of it is left. Raises TimedOut, LinkLost."""
        ...

    async def slot_log(self, id: str, lines: int) -> str:
        """The last lines that its server wrote."""
        ...


class PoolServers(SlotServers, Protocol):
    """All that the pool asks of the helper."""

    async def slot_prepare(self, id: str) -> None:
        """Makes ready for a start that may come; an empty id for none. Raises LinkLost."""
        ...

    async def look_at_backend(self, kind: str) -> BackendIs:
        """The service of this kind of inference server. Raises DependencyDown where there is no systemd, LinkLost."""
        ...


class OneOfTwo:
    """The servers of `own`, and those of the ids in `others_ids`, which are `others`. A verb is for one of them."""

    def __init__(self, own: PoolServers, others: SlotServers, others_ids: Container[str]) -> None:
        self._own = own
        self._others = others
        self._others_ids = others_ids

    def __repr__(self) -> str:
        return f"<OneOfTwo {self._own} and {self._others}>"

    def _of(self, id: str) -> SlotServers:
        return self._others if id in self._others_ids else self._own

    async def slots(self) -> dict[str, SlotProcess]:
        return await self._own.slots() | await self._others.slots()

    async def slot_start(self, id: str, grant: SlotGrant) -> SlotProcess:
        return await self._of(id).slot_start(id, grant)

    async def slot_stop(self, id: str, *, grace_s: float) -> None:
        await self._of(id).slot_stop(id, grace_s=grace_s)

    async def slot_log(self, id: str, lines: int) -> str:
        return await self._of(id).slot_log(id, lines)

    async def look_at_backend(self, kind: str) -> BackendIs:
        return await self._own.look_at_backend(kind)

    async def slot_prepare(self, id: str) -> None:
        await self._own.slot_prepare("" if id in self._others_ids else id)
