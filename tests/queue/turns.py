"""A queue whose requests are named by their agent, in a time that stands still unless it is moved: for tables."""

from __future__ import annotations

from itertools import count

from hive.domain import Band
from hive.queue.queue import FairQueue, FairShares, Flow, QueueVerdict


def agent_of(waiter: str) -> str:
    return waiter.rstrip("0123456789")


class Bench:
    """Requests are `ann1`, `ann2`, …, in the order in which all of them ask."""

    def __init__(self, *, places: int | None = 1, depth: int = 16) -> None:
        self.shares: FairShares[str] = FairShares()
        self.queue = FairQueue(self.shares, depth=depth, places=places)
        self.now = 0.0
        self.flows: dict[str, Flow] = {}
        self._number = count(1)
        self._owner: dict[str, Flow] = {}

    def agent(self, name: str, tenant: str = "t", *, limit: int = 10, weight: float = 1.0) -> Flow:
        self.flows[name] = self.shares.flow(name, tenant, limit=limit, weight=weight)
        return self.flows[name]

    def ask(self, name: str, *, expected: float = 100, band: Band = Band.NORMAL) -> tuple[str, QueueVerdict]:
        waiter = f"{name}{next(self._number)}"
        self._owner[waiter] = self.flows[name]
        return waiter, self.queue.ask(waiter, self.flows[name], band=band, expected=expected, now=self.now)

    def verdict(self, name: str, *, band: Band = Band.NORMAL) -> QueueVerdict:
        return self.ask(name, band=band)[1]

    def leave(self, waiter: str, cost: float | None = None) -> list[str]:
        return self.queue.leave(waiter, self._owner[waiter], now=self.now, cost=cost)

    def turns(self, waiter: str, cost: float | None = None) -> list[str]:
        """The agents whose turns follow if each is over at once; with one place."""
        names = []
        while waiter:
            turn = self.leave(waiter, cost)
            waiter = turn[0] if turn else ""
            names += [agent_of(name) for name in turn]
        return names
