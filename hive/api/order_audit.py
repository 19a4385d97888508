"""Orders of people in the audit table: actor, origin, subject and end, written before the answer is sent."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from hive.agents.roster import Roster
from hive.audit.actors import user_of
from hive.errors import HiveError
from hive.host.accounts import NAMES
from hive.store.audit import ORDER, AuditRecord

if TYPE_CHECKING:
    from hive.audit.audit_log import AuditLog

Result = TypeVar("Result")

NAME_MAX = 200
"""Characters kept of a name in an order, and of the error."""
CUT_SHORT = "cut_short"
"""The outcome of an order that ended without an answer: the daemon left meanwhile."""


class AuditedOrder(NamedTuple):
    """`act`: as `pause`. `path`: what the path names, `ref` an agent. `about`: what more is known once it has ended.

    `origin`: `socket`, or `tcp:` and the address it came from.
    """

    act: str
    actor: str
    path: Mapping[str, str]
    about: Mapping[str, Any]
    origin: str = "socket"


async def carried_out(roster: Roster, audit_log: AuditLog, order: AuditedOrder, work: Awaitable[Result]) -> Result:
    """Awaits `work` and returns its result, or raises; the row is written first."""
    named = {name: text[:NAME_MAX] for name, text in order.path.items()}
    target, name = roster.identified(named.pop("ref")) if "ref" in named else ("hive", "")
    detail: dict[str, Any] = {"name": name, **named} if name else {**named}
    outcome = CUT_SHORT
    try:
        await _learn(order.actor, work)
        result = await work
        outcome = "ok"
        return result
    except Exception as error:
        outcome = error.code if isinstance(error, HiveError) else HiveError.code
        detail["error"] = str(error)[:NAME_MAX]
        raise
    finally:
        row = AuditRecord(
            at=time.time(),
            actor=order.actor,
            act=ORDER + order.act,
            target=target,
            origin=order.origin,
            outcome=outcome,
            detail=detail | dict(order.about) | user_of(order.actor),
        )
        await audit_log.record(row)


async def _learn(actor: str, work: Awaitable[object]) -> None:
    """Learns the actor's name. A caller that leaves meanwhile has begun nothing: the work is closed."""
    try:
        await NAMES.learn(actor)
    except BaseException:
        if isinstance(work, Coroutine):
            work.close()
        raise
