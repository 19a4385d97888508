"""The next step in the life of a lease's holder, by its record and the time. Pure."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from hive.holders.records import HolderRecord
from hive.link.leases import HolderState


class HolderAct(StrEnum):
    """`expire`: nobody came; `end`: its time is over; `kill`: what is left after the grace is killed."""

    EXPIRE = "expire"
    END = "end"
    KILL = "kill"


class Due(NamedTuple):
    """The next act, and in how many seconds (0: now). `act` None: nothing but its own end is waited for."""

    act: HolderAct | None
    in_s: float


def due(record: HolderRecord, now: float) -> Due:
    """The next act.

    >>> from hive.link.leases import LeaseGrant
    >>> grant = LeaseGrant(id="l-1", token=1, nonce="n" * 16, uid=0, accounts={"cpu": 1}, max_s=100)
    >>> record = HolderRecord(grant=grant, state=HolderState.EXPECTED, mark="", boot="", enter_until=30)
    >>> due(record, now=10)
    Due(act=<HolderAct.EXPIRE: 'expire'>, in_s=20)
    >>> record.state, record.since = HolderState.RUNNING, 12
    >>> due(record, now=20), due(record, now=200).in_s
    (Due(act=<HolderAct.END: 'end'>, in_s=92), 0.0)
    >>> record.state, record.kill_at = HolderState.ENDING, 260
    >>> due(record, now=200)
    Due(act=<HolderAct.KILL: 'kill'>, in_s=60)
    """
    match record.state:
        case HolderState.EXPECTED:
            at, act = record.enter_until, HolderAct.EXPIRE
        case HolderState.RUNNING if record.grant.max_s is not None and record.since is not None:
            at, act = record.since + record.grant.max_s, HolderAct.END
        case HolderState.ENDING if record.kill_at is not None:
            at, act = record.kill_at, HolderAct.KILL
        case _:
            return Due(None, 0.0)
    return Due(act, max(0.0, at - now))
