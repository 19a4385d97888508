"""The orders that would change an agent, by the state it is in. Pure, and for commands without an import to pay for."""

from __future__ import annotations

ASLEEP = ("resume", "exec", "restart", "stop")
ORDERS = {
    "running": ("pause", "deep sleep", "exec", "restart", "stop"),
    "created": ("start",),
    "stopped": ("start",),
    "error": ("start",),
}


def orders_of(status: str, depth: str = "awake") -> tuple[str, ...]:
    """The orders that its state permits and that would change something; on its way to another state none.

    `exec`, a program inside, wakes a sleeping one; a light sleeper can be put into deep sleep.

    >>> orders_of("error"), orders_of("pausing"), orders_of("paused", "deep")
    (('start',), (), ('resume', 'exec', 'restart', 'stop'))
    """
    if status == "paused":
        return ASLEEP if depth == "deep" else ("deep sleep", *ASLEEP)
    return ORDERS.get(status, ())
