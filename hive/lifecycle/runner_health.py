"""The decision whether the runner says that it is unhealthy: only where no request would be served. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from hive.link.requests import QueueView
from hive.pool.state import SlotState
from hive.pooling.pooled_slot import PooledSlot
from hive.pooling.slot_steps import out_of_memory

SERVES = (SlotState.READY, SlotState.DRAINING, SlotState.ASLEEP)
OOM_TOLD_S = 60.0
"""A load that has died for memory is told of for so long: who is not asked any more loads nothing that would end it."""


def load_faults(slots: Collection[PooledSlot], *, is_up: bool, now: float) -> list[str]:
    """The reasons of the pool, clauses. `is_up`: whether an inference server beside it serves."""
    if is_up or any(slot.state in SERVES for slot in slots):
        return []
    own = [slot for slot in slots if not slot.entry.is_remote]
    found = []
    if oom := sorted(slot.model for slot in own if _died_for_memory(slot) and now - slot.ended_at < OOM_TOLD_S):
        found.append(f"the memory was not enough for {', '.join(oom)}")
    if own and all(slot.state is SlotState.FAILED for slot in own):
        found.append("all models failed to load")
    return found


def most_waiting(seen: QueueView | None, depth: int, named: Collection[str], lines: int) -> int:
    """The requests that may wait in all: `depth` of each tenant in each line. `named`: the tenants of hive.conf.

    >>> most_waiting(None, 64, ["acme"], 1), most_waiting(None, 64, [], 2)
    (64, 128)
    """
    known = {*named, *(tenant.name for tenant in seen.tenants)} if seen is not None else {*named}
    return depth * max(1, len(known)) * max(1, lines)


def is_full(seen: QueueView, depth: int, named: Collection[str], lines: int) -> bool:
    """Whether every line refuses the next request, whoever sends it.

    >>> from hive.link.requests import TenantView
    >>> busy, idle = TenantView("a", 1.0, 1, 2, 0.0), TenantView("b", 1.0, 0, 0, 0.0)
    >>> def full(*tenants, depth=2, named=(), lines=1):
    ...     return is_full(QueueView(1, 2, 1, None, list(tenants)), depth, named, lines)
    >>> full(busy), full(busy, idle), full(busy, named=["b"]), full(busy, lines=2)
    (True, False, False, False)
    >>> full(), full(busy, depth=0)
    (False, False)
    """
    waiting = {tenant.name: tenant.waiting for tenant in seen.tenants}
    names: Sequence[str] = [*waiting, *(name for name in named if name not in waiting)]
    return bool(depth and names) and all(waiting.get(name, 0) >= depth * max(1, lines) for name in names)


def _died_for_memory(slot: PooledSlot) -> bool:
    was_killed = slot.process is not None and slot.process.was_oom
    return bool(slot.error) and (was_killed or bool(out_of_memory([slot.error, *slot.last_lines])))
