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
    that cannot be said; `never`: why no end of the wait can be seen, a clause, then they are refused at once;
    `unapproved`: that is for want of a signed order.
    `backend`: its kind, and its address once it has one; `models`: the names it answers to; `at_server`: the name by
    which its server knows its model, where that is another. `load_s`: a load takes so long, or a wake of a sleeper; 0
    where that is not known. `adapter`: it is a model with this adapter, and requests reach it by the routes of adapters
    alone (`AdaptersAre`), not by its list of models.
    """

    id: str
    generation: int
    is_open: bool
    backend: BackendInfo
    models: list[ModelInfo]
    wait_s: float = 0.0
    ready_in_s: float | None = None
    never: str = ""
    unapproved: bool = False
    at_server: str = ""
    load_s: float = 0.0
    adapter: str = ""


class Slots(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Daemon → proxy: every slot there is. One that is not named is gone; its requests are refused."""

    slots: list[SlotRow]


class SlotIs(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Daemon → proxy: this slot is now so."""

    slot: SlotRow


class SlotGone(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Daemon → proxy: there is no such slot any more. What waits there is decided again."""

    id: str


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


class LoadCharged(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Daemon → proxy, before the slot opens: its load took so many seconds, and a request of this tenant had caused it.
    A load that nobody has asked for (a pin, an operator's order) is told of to nobody."""

    id: str
    tenant: str
    agent: str
    band: Band
    seconds: float


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


class SlotFlow(msgspec.Struct, frozen=True, kw_only=True):
    """Requests at one slot now. `agents`: ids of those in flight, an empty one for each caller without a name.

    Ages in seconds, None where there is no such request: `oldest_s`: of the oldest in flight; `no_head_s`: the oldest
    without a head; `no_data_s`: the longest time in which one of those with a head had no data; `moved_s`: since any
    request of the slot had a head or data, at most `oldest_s`. Data are noticed within a second; an answer whose client
    does not read counts as one that moves. `begun`: requests that went there since the last `SlotFlows`; `band`: of the
    newest of them. `keep_s`: the longest time for which a task wants the model kept after these requests, and those
    of the message before.
    """

    in_flight: int
    agents: list[str] = []
    oldest_s: float | None = None
    no_head_s: float | None = None
    no_data_s: float | None = None
    moved_s: float | None = None
    begun: int = 0
    band: Band = Band.NORMAL
    keep_s: float = 0.0


class SlotFlows(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Proxy → daemon, each second while requests are in flight at slots, once more when there are none, and soon after
    a slot that was idle has its first request, or one has opened. Every slot with something in
    flight or begun, and every slot that was named in the message before."""

    slots: dict[str, SlotFlow]


class SlotCrashed(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Ask, daemon → proxy. The server of this slot ended by itself. Answer: `CrashBlame`."""

    id: str
    generation: int


class CrashBlame(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Answer to `SlotCrashed`. `agents`: ids of agents with a request in flight at the crash; `slowed`: those that may
    have one request at a time there from now on; `refused`: those that are refused there for ten minutes. If one was
    slowed or refused before or is now, the crash is theirs and does not count as the model's."""

    agents: list[str]
    slowed: list[str] = msgspec.field(default_factory=list)
    refused: list[str] = msgspec.field(default_factory=list)
