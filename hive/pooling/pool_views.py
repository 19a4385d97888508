"""The pool as the API shows it."""

from __future__ import annotations

import time
from collections.abc import Sequence, Set

from hive.backends.capacity import LABELS
from hive.backends.counters import Drafts
from hive.backends.kinds import spec_of
from hive.backends.speculation import NONE, Acceptance
from hive.domain import BackendInfo, Band
from hive.pool.accounts import charged_in, free_bytes
from hive.pool.bound import load_progress
from hive.pool.explain import explain
from hive.pool.state import CPU, MIB, Grant, MemoryAccount, PoolFacts, SlotState
from hive.pool.turns import turn_s
from hive.pooling.draft_models import draft_warning
from hive.pooling.pool_backend import BackendSlot
from hive.pooling.pooled_lease import PooledLease
from hive.pooling.pooled_slot import PooledSlot
from hive.pooling.pooling import ModelPool
from hive.pooling.slot_sleep import why_not
from hive.settings.pool import category_of
from hive.shapes.pool import (
    BoundPartView,
    LeavingModel,
    PoolAccount,
    PoolBackend,
    PoolExplanation,
    PoolGrant,
    PoolLeaseLine,
    PoolSlot,
    PoolView,
)
from hive.shapes.system import Speculation

HOST_MEMORY = "host memory"


def view_of(pool: ModelPool, *, why_off: str, in_use: BackendInfo | None = None) -> PoolView:
    """All accounts and all slots, in the order in which they are described. `why_off`: why there is to be no pool;
    `in_use`: the backend beside it."""
    now = time.monotonic()
    facts = pool.facts(now)
    has_any = pool.has_slots or bool(list(pool.leases))
    return PoolView(
        enabled=has_any and not why_off,
        why_not=why_off or ("" if has_any else "no model is described: [model NAME] in hive.conf"),
        accounts=[_account(pool, account, facts) for account in facts.accounts],
        slots=[slot_view(pool, slot, facts, now) for slot in pool.slots.values()],
        backends=[*map(_backend, pool.backends.known), *_cluster(in_use, {slot.kind for slot in pool.backends.known})],
        leases=[_lease(lease) for lease in pool.leases],
    )


def _lease(lease: PooledLease) -> PoolLeaseLine:
    return PoolLeaseLine(
        id=lease.id,
        label=lease.row.label,
        user=lease.row.actor,
        state=str(lease.state),
        why=lease.why,
        need_bytes=lease.row.mb * MIB,
        grants=_grants(lease.grants),
    )


def _backend(slot: BackendSlot) -> PoolBackend:
    why = {
        SlotState.COLD: "It waits for memory",
        SlotState.LOADING: "It is being started",
        SlotState.STOPPING: "It has ended, and its memory is waited for",
        SlotState.FAILED: f"There is no room for it: {slot.why_not}",
    }.get(slot.state, "It is in use; `hive backend switch` changes that")
    return PoolBackend(kind=slot.kind, state=str(slot.state), why=why, slots=None, grants=_grants(slot.grants))


def _cluster(in_use: BackendInfo | None, booked: Set[str]) -> list[PoolBackend]:
    """The cluster in use: places and no bytes. None where there is none, or it is a service of this host, which is in
    the books by what it takes (`booked`).

    >>> from hive.domain import Cluster
    >>> ray = Cluster(engine="ray", wanted=2, running=1, slots_each=8)
    >>> [row] = _cluster(BackendInfo(kind="remote", address="h:1", up=True, places=8, cluster=ray), frozenset())
    >>> row["state"], row["slots"], row["grants"], row["why"]
    ('ready', 8, [], "1 of 2 replicas of Ray Serve run, and none of their memory is the pool's")
    >>> _cluster(BackendInfo(kind="vllm", address="h:1"), frozenset())
    []
    """
    if in_use is None or (cluster := in_use.cluster) is None or in_use.kind in booked:
        return []
    told = f"{cluster.running} of {cluster.wanted} replicas of {LABELS[cluster.engine]} run"
    why = f"{told}, and none of their memory is the pool's" if in_use.up else "It does not answer"
    state = SlotState.READY if in_use.up else SlotState.FAILED
    return [PoolBackend(kind=in_use.kind, state=str(state), why=why, slots=in_use.places, grants=[])]


def _grants(grants: Sequence[Grant]) -> list[PoolGrant]:
    return [
        PoolGrant(account=g.account, charged_bytes=g.charged_bytes, measured_bytes=g.measured_bytes) for g in grants
    ]


def _account(pool: ModelPool, account: MemoryAccount, facts: PoolFacts) -> PoolAccount:
    slots = [slot for slot in facts.slots if slot.lease is None]
    grants = [grant for slot in slots for grant in slot.grants if grant.account == account.id]
    known = [grant.measured_bytes for grant in grants if grant.measured_bytes is not None]
    return PoolAccount(
        id=account.id,
        name=pool.reading.names.get(account.id, HOST_MEMORY if account.id == CPU else account.id),
        total_bytes=account.total_bytes,
        reserve_bytes=account.reserve_bytes,
        charged_bytes=charged_in(account.id, slots),
        leased_bytes=charged_in(account.id, (slot for slot in facts.slots if slot.lease is not None)),
        measured_bytes=sum(known) if len(known) == len(grants) else None,
        used_bytes=account.used_bytes,
        foreign_bytes=account.foreign_bytes,
        free_bytes=free_bytes(account, facts.slots, facts.rules),
    )


def slot_view(pool: ModelPool, slot: PooledSlot, facts: PoolFacts, now: float) -> PoolSlot:
    """One slot with the reason for its state."""
    own = facts.slot(slot.id)
    estimate = pool.footprints.need(slot.entry, pool.gpu)
    turn_ends = slot.ready_at + turn_s(own.load_s, own.load_s, facts.rules.swap_share) - now
    has_turn = slot.state is SlotState.READY and not own.audience.is_empty(now) and slot.pinned_at is None
    return PoolSlot(
        id=slot.id,
        model=slot.model,
        backend=slot.entry.kind,
        category=category_of(slot.entry.row),
        state=str(slot.state),
        why=slot.barred or slot.never or explain(facts, slot.id, now).why,
        grants=_grants(slot.grants),
        need_bytes=0 if estimate is None else estimate.bytes,
        need_from="" if estimate is None else str(estimate.source),
        pinned=slot.pinned_at is not None,
        in_flight=slot.in_flight,
        waiting=len(slot.demands) + slot.more_demands if slot.state is not SlotState.READY else 0,
        audience=0 if own.audience.is_empty(now) else own.audience.users,
        turn_ends_in_s=round(turn_ends, 1) if has_turn and turn_ends > 0 else None,
        load_s=round(own.reload_s if slot.state is SlotState.LOADING else own.load_s, 2),
        wake_s=round(slot.level.wake_s, 2) if slot.level is not None and slot.state is SlotState.ASLEEP else None,
        no_sleep=why_not(slot, pool),
        loading_s=round(now - slot.moved_at, 1) if slot.state is SlotState.LOADING else None,
        failures=slot.failures,
        retry_in_s=round(slot.retry_at - now, 1) if slot.retry_at > now else None,
        speculation=_speculation(pool, slot),
        last_error=slot.error,
        origin=slot.entry.origin,
    )


def _speculation(pool: ModelPool, slot: PooledSlot) -> Speculation | None:
    """Nothing where it does not speculate; without a server what its draft is warned of, too."""
    if slot.entry.row.speculative == NONE:
        return None
    draft = pool.footprints.draft(slot.entry)
    return speculation_view(slot.acceptance, "" if draft is None else draft_warning(slot.entry.row.draft, draft))


def speculation_view(acceptance: Acceptance, warning: str = "") -> Speculation:
    """The counters of one server. `warning`: told where nothing worse is wrong."""
    drafts = acceptance.drafts or Drafts(0, 0)
    return Speculation(
        drafted=drafts.drafted,
        accepted=drafts.accepted,
        rate=acceptance.rate,
        warning=acceptance.warning or warning,
    )


def explanation_of(pool: ModelPool, model: str, band: Band) -> PoolExplanation:
    """The answer to `hive pool explain`. Raises NotFound."""
    slot = pool.find(model)
    now = time.monotonic()
    told = explain(pool.facts(now), slot.id, now, band)
    why = slot.barred or told.why
    lines = [f"{slot.model}: {slot.barred}"] if slot.barred else told.lines()
    if spec_of(slot.entry.kind).sleeping is not None and slot.entry.row.sleep:
        lines += [f"It does not sleep: {no}" for no in why_not(slot, pool)]
    if slot.error:
        lines += [f"Last failure: {slot.error}", *(f"  {line}" for line in slot.last_lines)]
    return PoolExplanation(
        model=slot.model,
        state=str(told.state),
        why=why,
        fits=told.fits and not slot.barred,
        would_leave=[LeavingModel(model=left.model, in_s=left.in_s, level=left.level) for left in told.would_leave],
        bound_s=None if slot.barred else told.bound.seconds,
        blocked=slot.barred or told.bound.blocked,
        parts=[BoundPartView(what=part.what, seconds=round(part.seconds, 1)) for part in told.bound.parts],
        lines=lines,
    )


def progress_of(pool: ModelPool, model: str) -> str:
    """`loading qwen3-32b, 14 s of about 47`; empty where it is not being loaded. Of a model that is none of the pool's
    too."""
    now = time.monotonic()
    for slot in pool.slots.values():
        if model in (slot.model, slot.id):
            progress = load_progress(pool.slot_facts(slot, now), now)
            if progress is not None:
                return f"loading {slot.model}, {progress}"
            return "" if slot.state is SlotState.READY else f"waiting for {slot.model} to be loaded"
    return ""
