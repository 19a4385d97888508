"""Swaps in the pool: a model is loaded in the place of one that an operator named, as one reservation.

The reservation is in the books for as long as the load is under way: first the charge of the model that leaves, then
the claim of the one that comes, then the charge of its load and the rest of what the other one had. If the load fails,
the one that left is loaded again in the same step, so that nobody else has its memory in between.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, NamedTuple

from hive.domain import Band
from hive.errors import InsufficientMemory, ModelBusy, WrongState
from hive.pool.outlook import Outlook
from hive.pool.state import MIB, Claim, Demand, EvictedSlot, Grant, SlotFacts, SlotState
from hive.pool.swap import kept_back, room_after, swap_grants
from hive.pooling.pooled_slot import PooledSlot

if TYPE_CHECKING:
    from hive.pooling.pooling import ModelPool

log = logging.getLogger("hive.pool")

MAY_LEAVE = (SlotState.READY, SlotState.ASLEEP)
MAY_COME = (SlotState.COLD, SlotState.FAILED, SlotState.ASLEEP)


class ModelSwap(NamedTuple):
    """One swap. `before`: the charges of the model that leaves; `awake`: those that it comes back with, which it
    does unless somebody ordered it out since; `claimed`: those of the one that comes."""

    coming: PooledSlot
    leaving: PooledSlot
    before: tuple[Grant, ...]
    awake: tuple[Grant, ...]
    claimed: tuple[Grant, ...]
    comes_back: bool = True


class Swaps:
    """Those that are under way, by the slot that comes. Every method is called on the loop."""

    def __init__(self, pool: ModelPool) -> None:
        self._pool = pool
        self._under_way: dict[str, ModelSwap] = {}
        self._given_up: dict[str, ModelSwap] = {}
        """Those that were given up while the model that leaves was being stopped, by its slot: it comes back then."""
        self._left: list[tuple[str, str]] = []
        """Those of an earlier daemon that were not taken up yet: the model that comes, the one that leaves."""

    def __repr__(self) -> str:
        return f"<Swaps {len(self._under_way)} under way>"

    def is_taking_part(self, slot: PooledSlot) -> bool:
        """Whether a swap has to do with this slot."""
        swaps = (*self._under_way.values(), *self._given_up.values())
        return any(slot in (swap.coming, swap.leaving) for swap in swaps)

    def check(self, coming: PooledSlot, leaving: PooledSlot) -> tuple[Grant, ...]:
        """The charges of the model that comes. Raises ModelBusy, WrongState, InsufficientMemory."""
        now = time.monotonic()
        facts = self._pool.facts(now)
        if facts.exclusive is not None:
            raise WrongState("the inference server is being switched", hint="`hive backend status` shows how far")
        if coming is leaving:
            raise WrongState(f"{coming.model} cannot leave for itself")
        if leaving.pinned_at is not None:
            raise ModelBusy(f"{leaving.model} is pinned", hint=f"hive model unpin {leaving.model}")
        if coming.state not in MAY_COME:
            raise ModelBusy(f"{coming.model} is {coming.state}, and cannot come for {leaving.model} now")
        if leaving.state not in MAY_LEAVE or self.is_taking_part(leaving) or self.is_taking_part(coming):
            raise ModelBusy(f"{leaving.model} is {leaving.state}, and cannot leave for {coming.model} now")
        grants = swap_grants(facts, coming.id, leaving.id, now)
        if grants is None:
            outlook = Outlook(facts, now)
            free = max(room_after(outlook, outlook.slots[coming.id], outlook.slots[leaving.id]).values(), default=0)
            raise no_room(coming.model, self._pool.need_bytes(coming), free, beside=f" once {leaving.model} has left")
        return grants

    def begin(self, coming: PooledSlot, leaving: PooledSlot) -> None:
        """Has `leaving` drain and leave, and its room kept for `coming`, which is ordered. Raises as `check`."""
        grants = self.check(coming, leaving)
        now = time.monotonic()
        self._under_way[coming.id] = ModelSwap(coming, leaving, leaving.grants, leaving.awake or leaving.grants, grants)
        self._pool.claim(Claim(coming.id, grants, (EvictedSlot(leaving.id),)))
        log.info("swap_begun coming=%s leaving=%s", coming.model, leaving.model)
        if leaving.state is SlotState.READY:
            leaving.draining(now)
            self._pool.steps.close(leaving, is_idle_only=False)

    def remember(self, coming: str, leaving: str) -> None:
        """Keeps a swap that an earlier daemon was about, by the models' names, until it is known what runs."""
        self._left.append((coming, leaving))

    def adopt(self) -> None:
        """Takes up what an earlier daemon left, before anything is decided: the place is kept while the load goes on,
        and whose it was comes back where there is no load."""
        left, self._left = self._left, []
        by_model = {slot.model: slot for slot in self._pool.slots.values()}
        for names in left:
            coming, leaving = (by_model.get(name) for name in names)
            if coming is None or leaving is None or leaving.state is not SlotState.COLD or leaving.barred:
                continue
            now = time.monotonic()
            grants = swap_grants(self._pool.facts(now), leaving.id, coming.id, now)
            if grants is None:
                continue  # it waits in the line (control/load_tasks.py)
            swap = ModelSwap(coming, leaving, grants, grants, coming.grants)
            if coming.state is SlotState.LOADING:
                self._under_way[coming.id] = swap
            elif coming.state in (SlotState.COLD, SlotState.FAILED):
                self._bring_back(swap)

    def facts(self) -> list[SlotFacts]:
        """The rest of the places of models that have left: in the books, and nobody's to take."""
        return [
            SlotFacts(
                f"kept:{swap.leaving.id}",
                f"the place of {swap.leaving.model}",
                need_bytes=0,
                is_backend=True,
                state=SlotState.READY,
                grants=kept,
                pinned_at=0.0,
            )
            for swap in self._under_way.values()
            if not swap.leaving.grants and (kept := kept_back(swap.before, _held(swap)))
        ]

    def unload_ordered(self, slot: PooledSlot) -> None:
        """Has this slot stay out, however the load goes that it leaves for."""
        for swaps in (self._under_way, self._given_up):
            for id, swap in swaps.items():
                if swap.leaving is slot:
                    swaps[id] = swap._replace(comes_back=False)

    def serves(self, slot: PooledSlot) -> None:
        """The load of this slot has ended well."""
        self._under_way.pop(slot.id, None)

    def given_up(self, slot: PooledSlot, why: str) -> None:
        """The load of this slot has failed, its claim was dropped, or its server has ended: its order ends, and who
        left comes back. Told of every slot that is cold again."""
        if (late := self._given_up.pop(slot.id, None)) is not None:
            self._bring_back(late)
        swap = self._under_way.pop(slot.id, None)
        if swap is None:
            return
        slot.order = None
        slot.error = slot.error or why
        log.warning("swap_given_up coming=%s back=%s why=%s", slot.model, swap.leaving.model, why)
        if swap.leaving.state is SlotState.STOPPING:
            self._given_up[swap.leaving.id] = swap
        else:
            self._bring_back(swap)

    def _bring_back(self, swap: ModelSwap) -> None:
        """Has its place be taken by who left it, at once: nobody else is given it in between. A model that slept in it
        needs more, and waits for that in the line where it is not there."""
        leaving = swap.leaving
        if leaving.state is not SlotState.COLD or leaving.barred or not swap.comes_back:
            return  # it has not left, so that the decider opens it again; or it may not be loaded any more
        leaving.order = leaving.order or Demand(Band.NORMAL, time.monotonic())
        grants = tuple(Grant(one.account, one.charged_bytes) for one in swap.awake)
        self._pool.claim(Claim(leaving.id, grants, ()))


def no_room(model: str, need_bytes: int, free_bytes: int, *, beside: str = "") -> InsufficientMemory:
    """The refusal of a load that does not fit.

    >>> no_room("m", 5 << 20, 3 << 20).details
    {'neededMB': 5, 'freeMB': 3}
    """
    needed_mb, free_mb = -(-need_bytes // MIB), max(0, free_bytes) // MIB
    message = f"{model} needs {needed_mb} MiB, and {free_mb} are free{beside}"
    return InsufficientMemory(message, details={"neededMB": needed_mb, "freeMB": free_mb})


def _held(swap: ModelSwap) -> dict[str, int]:
    return {grant.account: grant.charged_bytes for grant in swap.coming.grants or swap.claimed}
