"""The mirror of the leases in Redis: what the daemon says of them, by which nobody is granted anything."""

from __future__ import annotations

import time
from collections.abc import Iterable

from hive.pooling.pooled_lease import PooledLease
from hive.store.live import Live

MIRROR_S = 10
"""Between two writes; a key lives three times as long."""


class LeaseMirror:
    """Says to Redis who holds what, again and again; nothing where there is none."""

    def __init__(self, live: Live | None) -> None:
        self._live = live
        self._said_at = float("-inf")

    def __repr__(self) -> str:
        return f"<LeaseMirror in {self._live}>"

    def soon(self) -> None:
        """Something has changed: it is said with the next look."""
        self._said_at = float("-inf")

    def drop(self, lease: str) -> None:
        """The lease is over."""
        if self._live is not None:
            self._live.drop_lease(lease)

    def say(self, leases: Iterable[PooledLease], now: float) -> None:
        """Writes all that hold memory, if that is due."""
        if self._live is None or now - self._said_at < MIRROR_S:
            return
        self._said_at = now
        for lease in leases:
            if lease.grants:
                row = lease.row
                until = None if row.until_s is None else round(time.time() + row.until_s - now, 3)
                held = {
                    "gpus": [grant.account for grant in lease.grants],
                    "mb": row.mb,
                    "holder": row.label or row.actor,
                    "token": row.token,
                    "until": until,
                }
                self._live.set_lease(lease.id, held, ttl_s=3 * MIRROR_S)
