"""Facts of the requests at the slots of the pool, told to the daemon each second: its judge tells by that whether a
server works or hangs.

The data path writes only when an answer begins and ends. Whether one moves in between is looked up here, once a second,
by the count of its data events.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from hive.domain import Band
from hive.errors import LinkLost
from hive.link.message import LinkMessage
from hive.link.pool import SlotFlow, SlotFlows
from hive.proxy.datapath import DataPath
from hive.proxy.forward import Exchange
from hive.proxy.registry import OPERATOR, PREWARM
from hive.routing.slot import Slot

EACH_S = 1.0
"""The time between two messages while something is in flight."""
SOON_S = 0.02
"""The first request of an idle slot is told this long after it began, with all others that began meanwhile."""


class SlotRequest(NamedTuple):
    """One request at a server. `agent`: its id, empty where the caller has no name. `heard_at`: when its answer was
    last seen to have moved, None before the head."""

    agent: str
    sent_at: float
    heard_at: float | None = None


def flow_of(
    there: Sequence[SlotRequest], now: float, *, moved_at: float, begun: int = 0, band: Band = Band.NORMAL
) -> SlotFlow:
    """The facts of the requests `there`. `moved_at`: when an answer of the slot last began or ended; monotonic seconds.

    >>> there = [SlotRequest("ann", 10.0), SlotRequest("ann", 40.0, 95.0), SlotRequest("", 50.0, 60.0)]
    >>> flow = flow_of(there, 100.0, moved_at=41.0)
    >>> flow.in_flight, flow.agents, flow.oldest_s, flow.no_head_s, flow.no_data_s, flow.moved_s
    (3, ['ann', ''], 90.0, 90.0, 40.0, 5.0)
    >>> flow_of(there[:1], 100.0, moved_at=2.0).moved_s, flow_of([], 100.0, moved_at=90.0).moved_s
    (90.0, None)
    """
    heads = [one.heard_at for one in there if one.heard_at is not None]
    headless = [one.sent_at for one in there if one.heard_at is None]
    oldest = min((one.sent_at for one in there), default=None)
    return SlotFlow(
        in_flight=len(there),
        agents=[*{one.agent: None for one in there if one.agent}, *("" for one in there if not one.agent)],
        oldest_s=_age_s(oldest, now),
        no_head_s=_age_s(min(headless, default=None), now),
        no_data_s=_age_s(min(heads, default=None), now),
        moved_s=None if oldest is None else _age_s(max(moved_at, oldest, *heads), now),
        begun=begun,
        band=band,
    )


def _age_s(since: float | None, now: float) -> float | None:
    return None if since is None else round(max(0.0, now - since), 3)


class FlowReports:
    """Tells of the requests at the slots of one proxy. Every method is called on the loop. `tell`: sends to the daemon,
    raises LinkLost."""

    def __init__(self, path: DataPath, tell: Callable[[LinkMessage], None]) -> None:
        self._path = path
        self._tell = tell
        self._told: set[str] = set()
        """Slots with something in flight or begun in the last message."""
        self._owed: set[str] = set()
        """Slots that are named in the next message, whatever there is to tell."""
        self._heard: dict[Exchange, tuple[int, float]] = {}
        """The data events of each answer under way, and when they were last seen to be more."""
        self._keeps: dict[str, float] = {}
        """The time for which tasks want each slot kept, by the message before."""
        self._due: asyncio.TimerHandle | None = None
        path.on_begun = self.begun

    def __repr__(self) -> str:
        return f"<FlowReports {len(self._told)} slots busy>"

    def begun(self, slot: Slot) -> None:
        """The first request since the last message went to this slot."""
        if slot.name not in self._told:
            self._tell_in(SOON_S)

    def idle(self, slot: Slot) -> None:
        """The last request of this slot has ended, and that is of interest."""
        if slot.name in self._told:
            self._tell_in(SOON_S)

    def tell_now(self) -> None:
        """Tells of what was in flight when it was told last, and of what is now."""
        if self._told:
            if self._due is not None:
                self._due.cancel()
            self._tell_flows()

    def owe(self, slot: Slot) -> None:
        """This slot has opened: the daemon hears how many of those that waited went there, also if none did."""
        self._owed.add(slot.name)
        self._tell_in(SOON_S)

    def heard(self) -> None:
        """The daemon has told all slots: it is there (again), and knows nothing of what is open."""
        self._told.clear()
        for slot in self._path.slots.pooled.values():
            if not slot.gate.is_closed:
                self.owe(slot)

    def _tell_in(self, wait_s: float) -> None:
        loop = asyncio.get_running_loop()
        if self._due is not None:
            if self._due.when() <= loop.time() + wait_s:
                return
            self._due.cancel()
        self._due = loop.call_later(wait_s, self._tell_flows)

    def _tell_flows(self) -> None:
        self._due = None
        now, named = time.monotonic(), self._told | self._owed
        known, self._heard = self._heard, {}
        told = {}
        for slot in self._path.slots.pooled.values():
            there = [request for one in slot.line.owners if (request := self._request(one, slot, known, now))]
            flow = flow_of(there, now, moved_at=slot.moved_at, begun=slot.begun, band=slot.band)
            if keep_s := self._keep_s(slot):
                flow = msgspec.structs.replace(flow, keep_s=keep_s)
            if flow.in_flight or flow.begun or slot.name in named:
                told[slot.name] = flow
        for name in named - told.keys():  # it was taken out
            told[name] = SlotFlow(in_flight=0)
        try:
            self._tell(SlotFlows(slots=told))
        except LinkLost:
            return  # the next daemon is told all
        self._owed.clear()
        self._told = {name for name, flow in told.items() if flow.in_flight or flow.begun}
        for slot in self._path.slots.pooled.values():
            slot.begun, slot.keep_s = 0, 0.0
        if self._told:
            self._tell_in(EACH_S)

    def _keep_s(self, slot: Slot) -> float:
        """Of the requests that are there, have been since the last message, or were there at that."""
        here = [one.keep_s for one in slot.line.owners if isinstance(one, Exchange)] if self._path.tasks.names else []
        now_s, before_s = max(here, default=0.0), self._keeps.pop(slot.name, 0.0)
        if now_s := max(now_s, slot.keep_s):
            self._keeps[slot.name] = now_s
        return max(now_s, before_s)

    def _request(
        self, one: object, slot: Slot, known: dict[Exchange, tuple[int, float]], now: float
    ) -> SlotRequest | None:
        """The request as it is now; None for one that is not at this server, or not yet."""
        if not isinstance(one, Exchange) or not one.sent_at or one.generation != slot.generation:
            return None
        agent = "" if one.entry is None or one.entry.row.id in (OPERATOR, PREWARM) else one.entry.row.id
        events = one.events
        if events is None:
            return SlotRequest(agent, one.sent_at)
        before, at = known.get(one, (-1, now))
        heard = self._heard[one] = (events, now if events != before or one.is_blocked else at)
        return SlotRequest(agent, one.sent_at, heard[1])
