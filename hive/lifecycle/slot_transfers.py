"""Slots that are saved or restored now, and flushes of them: neither overtakes the other. Pure but for waiting."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from hive.errors import WrongState
from hive.lifecycle.parked_files import BEGINS
from hive.models.cache_epochs import FlushKind, FlushScope


class SlotTransfer:
    """Something that is saved or restored now. `is_flushed`: a flush of it began meanwhile."""

    def __init__(self, group: str, server: str) -> None:
        self.group = group
        self.server = server
        self.is_flushed = False
        self.over = asyncio.Event()

    def __repr__(self) -> str:
        return f"<SlotTransfer of {self.group} at {self.server or 'the server in use'}>"


class ParkedScope(NamedTuple):
    """Scope of a flush, with the names that rows have."""

    scope: FlushScope
    groups: Sequence[str]
    server: str

    def has(self, group: str, server: str) -> bool:
        match self.scope.kind:
            case FlushKind.TENANT:
                return group in self.groups
            case FlushKind.MODEL:
                return server == self.server
            case _:
                return True


class SlotTransfers:
    """All of one daemon's."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        """Of files in the engines' directory that are in use."""
        self._under_way: set[SlotTransfer] = set()
        self._under_flush: list[ParkedScope] = []

    def __repr__(self) -> str:
        return f"<SlotTransfers {len(self._under_way)} under way>"

    @contextmanager
    def transfer(self, group: str, server: str) -> Iterator[SlotTransfer]:
        """Something is saved or restored as long as it lasts. Raises WrongState where it is flushed now."""
        if any(scope.has(group, server) for scope in self._under_flush):
            raise WrongState("the prompt cache is being flushed")
        transfer = SlotTransfer(group, server)
        self._under_way.add(transfer)
        try:
            yield transfer
        finally:
            self._under_way.discard(transfer)
            transfer.over.set()

    @contextmanager
    def named(self) -> Iterator[str]:
        """A name for a file of an engine, in use as long as it lasts."""
        name = f"{BEGINS}{secrets.token_hex(16)}"
        self.names.add(name)
        try:
            yield name
        finally:
            self.names.discard(name)

    @contextmanager
    def flushing(self, scope: ParkedScope) -> Iterator[None]:
        """As long as it lasts, nothing of the scope begins; what is under way is flushed."""
        self._under_flush.append(scope)
        for transfer in self._under_way:
            transfer.is_flushed = transfer.is_flushed or scope.has(transfer.group, transfer.server)
        try:
            yield
        finally:
            self._under_flush.remove(scope)

    async def over(self, scope: ParkedScope) -> None:
        """Returns once nothing of the scope is under way that was when this was called."""
        for transfer in [one for one in self._under_way if scope.has(one.group, one.server)]:
            await transfer.over.wait()
