"""The helper's end of leases, played: who comes to lease.sock, and how it ends, is set by the test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from hive.link.leases import HolderState, LeaseGrant, LeaseHolder


class PlayedHolders:
    """`comes`: whether each granted one is come for at once, by its id; True for all. `stubborn`: those that do not end
    when they are told to. `check`: raises where the link is lost."""

    def __init__(self, check: Callable[[], None]) -> None:
        self._check = check
        self.on_moved: Callable[[LeaseHolder], None] = lambda _: None
        self.holders: dict[str, LeaseHolder] = {}
        self.expected: list[LeaseGrant] = []
        self.told_to_end: list[tuple[str, str]] = []
        self.graces: list[float] = []
        """Seconds that each of those who were told to end has."""
        self.forgotten: list[str] = []
        self.comes = True
        self.stubborn: set[str] = set()

    async def lease_expect(self, grant: LeaseGrant, wait_s: float = 30.0) -> None:
        self._check()
        self.expected.append(grant)
        self.holders[grant.id] = LeaseHolder(id=grant.id, token=grant.token, state=HolderState.EXPECTED, grant=grant)
        if self.comes:
            self.come(grant.id)

    async def lease_end(self, id: str, why: str, *, grace_s: float) -> None:
        self._check()
        self.told_to_end.append((id, why))
        self.graces.append(grace_s)
        if id in self.holders and id not in self.stubborn:
            self.leave(id, why=why)

    async def lease_forget(self, id: str) -> None:
        self._check()
        self.forgotten.append(id)
        self.holders.pop(id, None)

    async def leases(self) -> dict[str, LeaseHolder]:
        self._check()
        return dict(self.holders)

    def come(self, id: str) -> None:
        """The program is let in."""
        pid = 5000 + self.holders[id].token
        self._move(id, state=HolderState.RUNNING, pid=pid, pids=[pid], held_by="scope")

    def leave(self, id: str, why: str = "") -> None:
        """The program has ended."""
        self._move(id, state=HolderState.ENDED, pid=0, pids=[], why=why)

    def _move(self, id: str, **changes: Any) -> None:
        self.holders[id] = replace(self.holders[id], **changes)
        try:
            self._check()
        except Exception:  # nobody hears of it: the link is lost
            return
        self.on_moved(self.holders[id])
