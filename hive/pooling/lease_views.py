"""Leases as the API shows them."""

from __future__ import annotations

import time

from hive.pooling.pooled_lease import LeaseState, PooledLease
from hive.shapes.leases import LeaseView
from hive.store.leases import StoredLease


def lease_view(lease: PooledLease, *, socket: str, is_askers: bool) -> LeaseView:
    """One lease that waits or is held. `socket`: where its program is let in; `is_askers`: the nonce is for them."""
    row, now = lease.row, time.monotonic()
    holder, is_open = lease.holder, is_askers and lease.state is LeaseState.GRANTED and lease.is_job
    view = _of_row(row, now)
    view["state"] = str(lease.state)
    view["gpus"] = [grant.account for grant in lease.grants] if lease.state is not LeaseState.WAITING else []
    view["place"], view["before"] = lease.place if lease.is_in_line else None, lease.before if lease.is_in_line else []
    view["ready_in_s"] = rounded(lease.ready_in_s) if lease.is_in_line else 0.0
    view["bound_s"] = rounded(lease.bound_s) if lease.is_in_line else 0.0
    view["used_mb"] = lease.used_mb
    view["why"] = lease.why
    if holder is not None:
        view["enforced"], view["held_by"] = holder.enforced, holder.held_by
    if lease.state in (LeaseState.GRANTED, LeaseState.RUNNING, LeaseState.OVERDUE):
        view["environment"] = lease.environment
    if is_open:
        view["nonce"], view["socket"] = lease.nonce, socket
    return view


def ended_view(row: StoredLease) -> LeaseView:
    """One that has ended, by its row."""
    return _of_row(row, time.monotonic())


def rounded(seconds: float | None) -> float | None:
    """
    >>> rounded(1.26), rounded(None)
    (1.3, None)
    """
    return None if seconds is None else round(seconds, 1)


def _of_row(row: StoredLease, now: float) -> LeaseView:
    until = None if row.until_s is None or row.ended_at is not None else round(time.time() + row.until_s - now, 3)
    return LeaseView(
        id=row.id,
        token=row.token,
        kind=row.kind,
        state=row.state,
        mb=row.mb,
        gpus=sorted(row.accounts),
        wanted_gpus=row.gpus,
        band=row.band,
        place=None,
        before=[],
        ready_in_s=None,
        bound_s=None,
        label=row.label,
        user=row.actor,
        preemptible=row.preemptible,
        all=row.is_whole,
        grace_s=row.grace_s,
        since=row.created_at,
        granted_at=row.granted_at,
        until=until,
        ended_at=row.ended_at,
        used_mb=None,
        enforced="",
        held_by="",
        why=row.why,
        code=row.code,
        environment={},
        nonce="",
        socket="",
    )
