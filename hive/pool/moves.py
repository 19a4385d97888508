"""The answers of the decider: one of them at a time. The doer carries it out, then asks again. Frozen, no I/O."""

from __future__ import annotations

import msgspec

from hive.pool.state import Claim, Grant


class LoadSlot(msgspec.Struct, frozen=True, tag=True):
    """Start the slot's server, or wake it if it sleeps; `grants` are charged from now. `tenant`: caused the load. A
    claim of this slot ends."""

    slot: str
    grants: tuple[Grant, ...]
    why: str
    tenant: str = ""


class UnloadSlot(msgspec.Struct, frozen=True, tag=True):
    """Stop the slot's server, which has nothing in flight; its gate is closed, or has to be before. It stays charged
    until its memory is measured back. An order to unload it is done with that."""

    slot: str
    why: str


class SleepSlot(msgspec.Struct, frozen=True, tag=True):
    """Put the slot's server to sleep at `level`; its gate is closed and it has nothing in flight."""

    slot: str
    level: str
    why: str


class MakeRoom(msgspec.Struct, frozen=True, tag=True):
    """Record the claim, and close the gates of its victims: what asks for them from now on waits."""

    claim: Claim


class CloseSlot(msgspec.Struct, frozen=True, tag=True):
    """Close the slot's gate and let it drain."""

    slot: str
    why: str


class OpenSlot(msgspec.Struct, frozen=True, tag=True):
    """Open the gate of a draining slot again: nobody needs its memory any more."""

    slot: str


class CutSlot(msgspec.Struct, frozen=True, tag=True):
    """End the slot's requests with an error of their dialect: they have had its turn and the time to drain."""

    slot: str


class DropClaim(msgspec.Struct, frozen=True, tag=True):
    """Forget the claim of this slot."""

    slot: str
    why: str


class RefuseWaiting(msgspec.Struct, frozen=True, tag=True):
    """Answer all that wait for this slot with 503 `model_cold`: it cannot be loaded."""

    slot: str
    why: str


class Rest(msgspec.Struct, frozen=True, tag=True):
    """Do nothing until a fact changes, or until this time; None if time alone changes nothing."""

    until: float | None


Move = LoadSlot | UnloadSlot | SleepSlot | MakeRoom | CloseSlot | OpenSlot | CutSlot | DropClaim | RefuseWaiting | Rest
