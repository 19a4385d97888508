"""Messages about the slots of the pool, each one model's inference server: daemon and proxy.

The daemon alone decides about them; an order names the `generation` of the slot it is meant for, and one for an earlier
generation has no effect. A proxy that connects is told all slots (`Slots`); orders to an earlier link are void.
"""

from __future__ import annotations

import msgspec

from hive.domain import BackendInfo, Band, ModelInfo
from hive.link.message import LinkMessage


class SlotRow(msgspec.Struct, frozen=True, kw_only=True):
    """One slot as the proxy needs to know it. `generation` grows with every start of its server.

    `is_open`: requests go to it. Else they wait for at most `wait_s` each: `ready_in_s` is when it is expected, None if
    that cannot be said; `never`: why no end of the wait can be seen, a clause, then they are refused at once.
    `backend`: its kind, and its address once it has one; `models`: the names it answers to.
    """

    id: str
    generation: int
    is_open: bool
    backend: BackendInfo
    models: list[ModelInfo]
    wait_s: float = 0.0
    ready_in_s: float | None = None
    never: str = ""


class Slots(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Daemon → proxy: every slot there is. One that is not named is gone; its requests are refused."""

    slots: list[SlotRow]


class SlotIs(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Daemon → proxy: this slot is now so."""

    slot: SlotRow


class CloseSlotGate(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Ask, daemon → proxy. No request goes to the slot from now on; new ones wait as `wait_s` says.

    `drain_s` None: only if nothing is in flight there; answer `SlotClosed` or `SlotBusy`, and then the slot stays as it
    was. Else what has not ended within `drain_s` is cut; answer `SlotClosed`. Answer `SlotBusy` also where another
    generation is there.
    """

    id: str
    generation: int
    wait_s: float
    drain_s: float | None = None


class SlotClosed(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Answer to `CloseSlotGate`: nothing is in flight at the slot. `cut`: requests that did not end in time."""

    cut: int = 0


class SlotBusy(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Answer to `CloseSlotGate`: it stays open. `in_flight`: requests there."""

    in_flight: int


class WaitingDemand(msgspec.Struct, frozen=True, kw_only=True):
    """A request that waits for a model to be loaded. `age_s`: since it began to wait; `left_s`: until it is refused."""

    band: Band
    tenant: str
    agent: str
    age_s: float
    left_s: float


class SlotDemand(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of one slot. `waiting`: the oldest of those that wait for it to be loaded; `more`: how many besides."""

    in_flight: int
    waiting: list[WaitingDemand]
    more: int = 0


class SlotDemands(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Proxy → daemon, soon after a change: every slot for which a request waits that is not loaded, and every slot that
    was named here before and is so no more, with none waiting."""

    slots: dict[str, SlotDemand]
