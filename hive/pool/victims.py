"""The cheapest victim set that frees enough, exactly. Pure.

Victims chosen one by one are wrong twice: a set that never suffices is evicted for nothing, and a small model goes
before the large one that would have been enough. So whole sets are compared: branch and bound, with the relaxation of
the covering knapsack as its bound. Beyond `EXACT_UP_TO` candidates the choice is greedy.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from hive.pool.state import Audience

EXACT_UP_TO = 14
"""Candidates. With 12 a decision has to take no more than 5 ms of CPU."""
HORIZON_S = 60.0
"""Requests of the next minute count as much as users."""
LEAST = 0.01
"""Users that a model nobody uses is counted as: of two such models the one that is sooner back goes."""


class EvictionOption(msgspec.Struct, frozen=True):
    """One way for one slot to give memory back. `freed`: bytes by account, in the order of the shortages asked about;
    `level`: the sleep it goes to, empty if its server ends; `host_bytes`: that a sleep needs."""

    slot: str
    freed: tuple[int, ...]
    cost: float
    level: str = ""
    host_bytes: int = 0


def eviction_cost(audience: Audience, reload_s: float) -> float:
    """Seconds of loading that an eviction will probably cost, over all that want the model.

    >>> eviction_cost(Audience(users=2), 10.0) > eviction_cost(Audience(users=1), 15.0) > eviction_cost(Audience(), 9.0)
    True
    """
    return (audience.users + audience.rate_per_s * HORIZON_S + LEAST) * reload_s


def cheapest_set(
    options: Sequence[EvictionOption], short: Sequence[int], host_bytes: int = 0
) -> tuple[EvictionOption, ...] | None:
    """The options, at most one for each slot, that cover every shortage in `short` at the least cost; None if no set
    does. No option of the answer can be left out. `host_bytes`: what sleeps may take of the host.

    >>> one, two, big = (EvictionOption(*row) for row in (("a", (3,), 5.0), ("b", (4,), 6.0), ("c", (9,), 10.0)))
    >>> [option.slot for option in cheapest_set([one, two, big], [7]) or ()]
    ['c']
    >>> [option.slot for option in cheapest_set([one, two, big], [10]) or ()]
    ['c', 'a']
    >>> cheapest_set([one, two], [8]) is None
    True
    """
    short = [max(0, bytes) for bytes in short]
    if not any(short):
        return ()
    slots: dict[str, list[EvictionOption]] = {}
    for option in options:
        if any(option.freed):
            slots.setdefault(option.slot, []).append(option)
    choice = _Search(list(slots.values()), short, host_bytes).best if len(slots) <= EXACT_UP_TO else None
    if len(slots) > EXACT_UP_TO:
        choice = _greedy([option for ways in slots.values() for option in ways], short, host_bytes)
    return None if choice is None else _without_superfluous(choice, short)


def _without_superfluous(choice: Sequence[EvictionOption], short: Sequence[int]) -> tuple[EvictionOption, ...]:
    kept = list(choice)
    for option in sorted(choice, key=lambda option: -option.cost):
        rest = [other for other in kept if other is not option]
        if all(sum(other.freed[i] for other in rest) >= bytes for i, bytes in enumerate(short)):
            kept = rest
    return tuple(kept)


def _greedy(
    options: Sequence[EvictionOption], short: Sequence[int], host_bytes: int
) -> tuple[EvictionOption, ...] | None:
    """The cheapest for each byte that is still short, until nothing is."""
    left, chosen, gone = list(short), [], set[str]()
    while any(bytes > 0 for bytes in left):
        best, best_price = None, float("inf")
        for option in options:
            useful = sum(min(bytes, freed) for bytes, freed in zip(left, option.freed, strict=True) if bytes > 0)
            if option.slot not in gone and option.host_bytes <= host_bytes and useful > 0:
                price = option.cost / useful
                if price < best_price:
                    best, best_price = option, price
        if best is None:
            return None
        chosen.append(best)
        gone.add(best.slot)
        host_bytes -= best.host_bytes
        left = [bytes - freed for bytes, freed in zip(left, best.freed, strict=True)]
    return tuple(chosen)


class _Search:
    """Depth first over the slots, those that are cheap for their bytes first. `best`: the cheapest set found."""

    def __init__(self, slots: list[list[EvictionOption]], short: Sequence[int], host_bytes: int) -> None:
        self.main = max(range(len(short)), key=lambda i: short[i])
        """The shortage that the bound is computed for: the largest."""
        self.slots = sorted((sorted(ways, key=lambda way: way.cost) for ways in slots), key=self._price)
        self.reach = [[0] * len(short) for _ in range(len(slots) + 1)]
        """Bytes that the slots from each one on can free at most."""
        for at in range(len(slots) - 1, -1, -1):
            self.reach[at] = [
                after + max(way.freed[i] for way in self.slots[at]) for i, after in enumerate(self.reach[at + 1])
            ]
        self.best: tuple[EvictionOption, ...] | None = None
        self._best_cost = float("inf")
        self._look(0, list(short), 0.0, (), host_bytes)

    def _price(self, ways: list[EvictionOption]) -> float:
        return min(way.cost / way.freed[self.main] if way.freed[self.main] else float("inf") for way in ways)

    def _least_cost(self, at: int, short: int) -> float:
        """A cost that no set of the slots from `at` on goes below: the last of them is paid by the byte."""
        cost = 0.0
        for ways in self.slots[at:]:
            if short <= 0:
                break
            freed = max(way.freed[self.main] for way in ways)
            price = self._price(ways)
            if price == float("inf"):
                break
            cost += price * min(freed, short)
            short -= freed
        return cost

    def _look(self, at: int, short: list[int], cost: float, chosen: tuple[EvictionOption, ...], host: int) -> None:
        if all(bytes <= 0 for bytes in short):
            if cost < self._best_cost:
                self.best, self._best_cost = chosen, cost
            return
        if any(bytes > reach for bytes, reach in zip(short, self.reach[at], strict=True)):
            return
        if cost + self._least_cost(at, short[self.main]) >= self._best_cost:
            return
        for way in self.slots[at]:
            if way.host_bytes <= host:
                left = [bytes - freed for bytes, freed in zip(short, way.freed, strict=True)]
                self._look(at + 1, left, cost + way.cost, (*chosen, way), host - way.host_bytes)
        self._look(at + 1, short, cost, chosen, host)
