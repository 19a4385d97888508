"""Whose turn it is: slots at the backend and the line of those who wait. Pure, no clock of its own.

So far each agent has a line of its own, first come first served. Fairness between tenants joins here.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

Waiter = TypeVar("Waiter")


class Line(Generic[Waiter]):
    """`slots` requests of one agent at the backend at once, `depth` more waiting, first come first served.

    A slot has one owner: whoever `ask` let in or `leave` returned, until it calls `leave`.

    >>> line = Line(slots=1, depth=1)
    >>> line.ask("a"), line.ask("b"), line.ask("c"), line
    (True, False, None, <Line 1/1 running, 1 waiting>)
    >>> line.leave("a"), line.leave("b"), line
    (['b'], [], <Line 0/1 running, 0 waiting>)
    """

    __slots__ = ("_running", "_waiting", "depth", "slots")

    def __init__(self, slots: int, depth: int) -> None:
        self.slots = slots
        self.depth = depth
        self._running: set[Waiter] = set()
        self._waiting: deque[Waiter] = deque()

    def __repr__(self) -> str:
        return f"<Line {len(self._running)}/{self.slots} running, {len(self._waiting)} waiting>"

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running)

    def ask(self, waiter: Waiter) -> bool | None:
        """True: go now. False: it waits. None: the line is full, it was not taken."""
        if len(self._running) < self.slots and not self._waiting:
            self._running.add(waiter)
            return True
        if len(self._waiting) >= self.depth:
            return None
        self._waiting.append(waiter)
        return False

    def leave(self, waiter: Waiter) -> list[Waiter]:
        """Gives back its slot or its place; those whose turn it is now, in order, own theirs already."""
        if waiter in self._running:
            self._running.discard(waiter)
        else:
            try:
                self._waiting.remove(waiter)
            except ValueError:
                return []
        return self._admit()

    def resize(self, slots: int) -> list[Waiter]:
        """The agent's tier changed; running ones beyond it finish, those admitted are returned."""
        self.slots = slots
        return self._admit()

    def _admit(self) -> list[Waiter]:
        admitted: list[Waiter] = []
        while self._waiting and len(self._running) < self.slots:
            waiter = self._waiting.popleft()
            self._running.add(waiter)
            admitted.append(waiter)
        return admitted
