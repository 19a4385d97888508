"""Limits for a connection before its request is known: time for a body, room for unfinished heads."""

from __future__ import annotations

from collections.abc import Callable

LONG_READ = 64 * 1024
"""Bytes of one read after which others get their turn: libuv reads up to 32 times from one socket, 45 ms at a go of a
16 MiB body (measured)."""
RATE_FROM_S = 10.0
MIN_RATE = 16 * 1024
"""Bytes a second that an upload must reach after RATE_FROM_S."""
HALF_OPEN_PER_OWNER = 8
HALF_OPEN_UNKNOWN = 256


def body_deadline(now: float, begun_at: float, received: int, idle_s: float) -> float:
    """The time at which a body is given up unless more of it comes: idle for `idle_s`, or slower than MIN_RATE after
    RATE_FROM_S.

    >>> body_deadline(now=0.0, begun_at=0.0, received=0, idle_s=30.0)       # must move within the first 10 s
    10.0
    >>> body_deadline(now=8.0, begun_at=0.0, received=320 * 1024, idle_s=30.0)
    20.0
    >>> body_deadline(now=8.0, begun_at=0.0, received=10**7, idle_s=30.0)
    38.0
    """
    return min(now + idle_s, begun_at + max(RATE_FROM_S, received / MIN_RATE))


class HalfOpen:
    """The connections that have sent a part of a head, by owner; None stands for all without a known owner.

    An owner with too many is refused another one. Of the unknown the oldest gives way, because the new one may belong
    to any owner: `take` calls the `end` that came with it.

    >>> heads, gone = HalfOpen(per_owner=1, unknown=2), []
    >>> [heads.take("x", "a", gone.clear), heads.take("y", "a", gone.clear)]
    [True, False]
    >>> [heads.take(at, None, lambda at=at: gone.append(at)) for at in (1, 2, 3)], gone
    ([True, True, True], [1])
    >>> heads.give(3, None); heads
    <HalfOpen 2 heads of 2 owners>
    """

    __slots__ = ("_counts", "_per_owner", "_unknown", "_unknown_max")

    def __init__(self, *, per_owner: int = HALF_OPEN_PER_OWNER, unknown: int = HALF_OPEN_UNKNOWN) -> None:
        self._per_owner = per_owner
        self._unknown_max = unknown
        self._counts: dict[object, int] = {}
        self._unknown: dict[object, Callable[[], None]] = {}
        """Calls that end each, the oldest first."""

    def __repr__(self) -> str:
        return f"<HalfOpen {self.held} heads of {len(self._counts) + bool(self._unknown)} owners>"

    @property
    def held(self) -> int:
        """The number of connections counted now."""
        return sum(self._counts.values()) + len(self._unknown)

    def take(self, connection: object, owner: object, end: Callable[[], None]) -> bool:
        """Counts this connection until `give` with the same owner, or says False."""
        if owner is None:
            if len(self._unknown) >= self._unknown_max:
                self._unknown.pop(next(iter(self._unknown)))()
            self._unknown[connection] = end
            return True
        count = self._counts.get(owner, 0)
        if count >= self._per_owner:
            return False
        self._counts[owner] = count + 1
        return True

    def give(self, connection: object, owner: object) -> None:
        """Counts it no more; also an unknown one that was ended here."""
        if owner is None:
            self._unknown.pop(connection, None)
            return
        count = self._counts[owner] - 1
        if count:
            self._counts[owner] = count
        else:
            del self._counts[owner]
