"""Shares of the connections that are open, and the choice of one that has to go for another. Pure.

Each agent has a few places reserved for it. A connection that comes when all other places are taken gets the place of
the oldest connection that has shown no token yet, else that of the longest idle one of the largest holder.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Generic, NamedTuple, Protocol, TypeVar

GUARANTEED = 4
"""Places that each agent has, as long as they are no more than half of all."""
STRANGERS_KEPT = 64
"""Places for those that have shown no token yet, as long as they are no more than an eighth of all: agents on TCP and
callers come in by them."""
HOLDERS_LOOKED_AT = 16
CONNECTIONS_LOOKED_AT = 256
"""Counts the oldest ones of a holder."""


class Placed(Protocol):
    """A connection, as far as it is known here."""

    @property
    def idle_since(self) -> float | None:
        """Since when nothing is asked on it; None while something is."""
        ...

    def is_quiet(self) -> bool:
        """Says that nothing of its peer waits to be read either."""
        ...


C = TypeVar("C", bound=Placed)


class ConnectionHolder(Generic[C]):
    """Connections that count as one's: an agent's own, an agent's callers', or strangers' at one door."""

    __slots__ = ("_connections", "is_agents", "is_strangers")

    def __init__(self, *, is_agents: bool = False, is_strangers: bool = False) -> None:
        """`is_agents`: some connections are reserved for it."""
        self._connections: dict[C, None] = {}
        self.is_agents = is_agents
        self.is_strangers = is_strangers

    def __repr__(self) -> str:
        return f"<ConnectionHolder of {len(self._connections)}>"

    def __len__(self) -> int:
        return len(self._connections)

    def __iter__(self) -> Iterator[C]:
        """The oldest first."""
        return iter(self._connections)

    def add(self, connection: C) -> None:
        self._connections[connection] = None

    def discard(self, connection: C) -> None:
        self._connections.pop(connection, None)

    def longest_idle(self) -> C | None:
        """Finds it among the CONNECTIONS_LOOKED_AT oldest ones."""
        seen = ((one.idle_since, one) for one in islice(self._connections, CONNECTIONS_LOOKED_AT))
        idle = sorted(((since, one) for since, one in seen if since is not None), key=lambda found: found[0])
        return next((one for _, one in idle if one.is_quiet()), None)


class ShareVerdict(NamedTuple, Generic[C]):
    """An answer to a connection that comes: if there is room, and which one has to go for that."""

    is_admitted: bool
    instead_of: C | None = None


class ConnectionShares(Generic[C]):
    """All connections, at most `limit`, each with its holder.

    >>> class Idle:
    ...     idle_since, is_quiet = 0.0, lambda self: True
    >>> shares, agent = ConnectionShares(8), ConnectionHolder(is_agents=True)
    >>> for _ in range(4):
    ...     shares.enter(Idle(), shares.strangers[0])
    >>> shares.verdict_for(shares.strangers[0], agents=1).instead_of is next(iter(shares.strangers[0]))
    True
    >>> shares.verdict_for(agent, agents=1), shares
    (ShareVerdict(is_admitted=True, instead_of=None), <ConnectionShares 4/8, 4 strangers>)
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.strangers: tuple[ConnectionHolder[C], ConnectionHolder[C]] = (
            ConnectionHolder(is_strangers=True),
            ConnectionHolder(is_strangers=True),
        )
        """Strangers at the model's door, and at that of ingress."""
        self.hives_own: ConnectionHolder[C] = ConnectionHolder()
        self._holders: dict[C, ConnectionHolder[C]] = {}
        self._by_size: dict[int, dict[ConnectionHolder[C], None]] = {}
        """Holders but for the strangers."""
        self._at_least = [0] * (GUARANTEED + 1)
        """Numbers of agents that hold at least so many."""

    def __repr__(self) -> str:
        return f"<ConnectionShares {self.held}/{self.limit}, {self._strangers} strangers>"

    @property
    def held(self) -> int:
        return len(self._holders)

    @property
    def _strangers(self) -> int:
        return len(self.strangers[0]) + len(self.strangers[1])

    def holder_of(self, connection: C) -> ConnectionHolder[C] | None:
        return self._holders.get(connection)

    def enter(self, connection: C, holder: ConnectionHolder[C]) -> None:
        """Makes it this holder's, also where it was another one's before."""
        self.leave(connection)
        self._holders[connection] = holder
        holder.add(connection)
        self._resized(holder, len(holder) - 1)

    def leave(self, connection: C) -> None:
        """Takes the connection from its holder; does nothing for an unknown one."""
        holder = self._holders.pop(connection, None)
        if holder is not None:
            holder.discard(connection)
            self._resized(holder, len(holder) + 1)

    def verdict_for(self, holder: ConnectionHolder[C], *, agents: int, moving: C | None = None) -> ShareVerdict[C]:
        """Decides on one more connection of this holder; with `moving` on that one, which is a stranger's now.

        `agents`: how many there are, which connections are kept for.
        """
        held = self.held + (moving is None)
        guaranteed = self._guaranteed(agents)
        is_its_own = holder.is_agents and len(holder) < guaranteed
        strangers = self._strangers + holder.is_strangers - (moving is not None)
        kept = 0 if is_its_own else self._kept_for_agents(agents, guaranteed) + max(0, self._strangers_kept - strangers)
        if held + kept <= self.limit:
            return ShareVerdict(True)
        goes = self._choose_displaced(holder, moving, guaranteed, is_its_own=is_its_own)
        return ShareVerdict(goes is not None, goes)

    @property
    def _strangers_kept(self) -> int:
        return min(STRANGERS_KEPT, self.limit // 8)

    def _guaranteed(self, agents: int) -> int:
        return max(1, min(GUARANTEED, self.limit // (2 * max(1, agents))))

    def _kept_for_agents(self, agents: int, guaranteed: int) -> int:
        """Connections kept for agents that do not use them."""
        used = sum(self._at_least[1 : guaranteed + 1])
        return min(self.limit // 2, max(0, agents * guaranteed - used))

    def _choose_displaced(
        self, holder: ConnectionHolder[C], moving: C | None, guaranteed: int, *, is_its_own: bool
    ) -> C | None:
        door = max(self.strangers, key=len)
        oldest = next((one for one in door if one is not moving), None)
        if oldest is not None and (holder.is_strangers or self._strangers > self._strangers_kept):
            return oldest
        found = self._longest_idle(guaranteed)
        return oldest if found is None and is_its_own else found

    def _longest_idle(self, guaranteed: int) -> C | None:
        """Finds it at the largest holder that has an idle one."""
        sizes = sorted((size for size in self._by_size if size > guaranteed), reverse=True)
        for holder in islice((one for size in sizes for one in self._by_size[size]), HOLDERS_LOOKED_AT):
            found = holder.longest_idle()
            if found is not None:
                return found
        return None

    def _resized(self, holder: ConnectionHolder[C], before: int) -> None:
        now = len(holder)
        if holder.is_agents and max(before, now) <= GUARANTEED:
            self._at_least[max(before, now)] += now - before
        if holder.is_strangers:
            return
        if before:
            same = self._by_size[before]
            del same[holder]
            if not same:
                del self._by_size[before]
        if now:
            self._by_size.setdefault(now, {})[holder] = None
