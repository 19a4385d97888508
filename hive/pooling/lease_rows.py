"""Rows of leases: as they are asked for, as an earlier daemon left them, as the helper's word makes one. No I/O."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from hive.domain import Role
from hive.errors import NotPermitted, TooManyRequests
from hive.link.leases import LeaseGrant, LeaseHolder
from hive.pool.state import MIB, Grant, SlotState
from hive.pooling.pooled_lease import LeaseKind, LeaseState, PooledLease
from hive.settings.lease import LeaseSection
from hive.settings.table import Settings
from hive.store.leases import StoredLease
from hive.terminal_text import escaped

WAITING_OF_USER = 32
"""Leases in line of one user: each decision looks at all there are."""
BEFORE_SHOWN = 20
"""Leases of those before one that it is told, the nearest; of the others their number."""
FREED_SHARE = 10
"""An overdue lease is over once it is seen to hold less than this part of what it is charged."""


def check_limits(wanted: StoredLease, own: Sequence[StoredLease], limits: LeaseSection, role: Role) -> None:
    """Raises NotPermitted where a user would have more than the settings permit, TooManyRequests where too many of its
    leases wait. `own`: what it has or waits for."""
    if role is Role.ADMIN:
        return
    if sum(row.state == LeaseState.WAITING for row in own) >= WAITING_OF_USER:
        raise TooManyRequests(
            f"{WAITING_OF_USER} of your leases wait already", hint="hive lease list shows them; hive lease end"
        )
    had = sum(row.mb * row.gpus for row in own)
    asked = wanted.mb * wanted.gpus
    if limits.max_mb and had + asked > limits.max_mb:
        raise NotPermitted(
            f"{asked} MiB are more than you may have: {limits.max_mb} together, of which you have {had}",
            hint="[lease] max_mb in hive.conf",
        )
    if limits.max_s and wanted.max_s is not None and wanted.max_s > limits.max_s:
        raise NotPermitted(
            f"{wanted.max_s:g} s are longer than you may have a lease: {limits.max_s:g}",
            hint="[lease] max_s in hive.conf",
        )


def row_of_holder(holder: LeaseHolder, grant: LeaseGrant, boot: str) -> StoredLease:
    """The row of a holder that no row tells of."""
    begun = time.monotonic() - holder.age_s
    return StoredLease(
        token=holder.token,
        kind=LeaseKind.JOB,
        state=LeaseState.RUNNING,
        actor=f"uid:{grant.uid}",
        label=grant.label,
        mb=max(grant.accounts.values(), default=0),
        gpus=max(1, len(grant.accounts)),
        grace_s=grant.grace_s,
        max_s=grant.max_s,
        accounts=grant.accounts,
        boot=boot,
        asked_s=begun,
        granted_s=begun,
        until_s=None if grant.max_s is None else begun + grant.max_s,
        created_at=time.time() - holder.age_s,
        granted_at=time.time() - holder.age_s,
    )


def short(lease: PooledLease) -> str:
    """A lease in a list: its id, its program, its user."""
    return f"{lease.id} {lease.short_label} ({lease.row.actor.replace(':', ' ')})".replace("  ", " ")


def nearest(before: Sequence[str]) -> list[str]:
    """Those before a lease, as it is told them.

    >>> nearest(["l-1", "l-2"]), nearest([f"l-{number}" for number in range(22)])[:2]
    (['l-1', 'l-2'], ['2 more', 'l-2'])
    """
    more = len(before) - BEFORE_SHOWN
    return [f"{more} more", *before[more:]] if more > 0 else list(before)


def is_free(lease: PooledLease) -> bool:
    """Whether all of it is seen to be free."""
    return all(
        grant.measured_bytes is not None and grant.measured_bytes * FREED_SHARE <= grant.charged_bytes
        for grant in lease.grants
    )


def as_it_was(lease: PooledLease) -> None:
    """Books a lease of an earlier daemon as its row says; the helper's word follows."""
    row = lease.row
    grants = tuple(Grant(account, mb * MIB) for account, mb in sorted(row.accounts.items()))
    match lease.state:
        case LeaseState.WAITING:
            return
        case LeaseState.GRANTED if lease.is_job:
            lease.state, lease.slot_state, lease.grants = LeaseState.WAITING, SlotState.LOADING, grants
        case LeaseState.ENDING if not lease.is_job:
            lease.slot_state, lease.grants, lease.is_releasing = SlotState.STOPPING, grants, True
        case LeaseState.ENDING:
            lease.slot_state, lease.grants = SlotState.STOPPING, grants
        case _:
            lease.slot_state, lease.grants = SlotState.READY, grants
            if lease.state is LeaseState.GRANTED:
                lease.state = LeaseState.RUNNING  # held: the row said all there is


def as_asked(wanted: StoredLease, settings: Settings, boot: str, now: float, role: Role) -> StoredLease:
    """The row of a new lease. One that names no longest time has that of the settings."""
    max_s = wanted.max_s
    if max_s is None and settings.lease.max_s and role is not Role.ADMIN:
        max_s = settings.lease.max_s
    label = escaped(wanted.label).replace("\n", " ").replace("\t", " ")
    return msgspec.structs.replace(wanted, label=label, boot=boot, asked_s=now, created_at=time.time(), max_s=max_s)
