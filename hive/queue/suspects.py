"""The suspects' requests at one slot (see crash_marks.py): one at a time goes there, whosever it is; the others wait
outside the line, so that they hold no position of anybody's."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import NamedTuple, Protocol

LOST_S = 15.0
"""A request counts as in flight at a crash if its connection broke this long before the crash was told."""
LOST_MAX = 1000


class HeldBack(Protocol):
    """A request of a suspect."""

    @property
    def agent(self) -> str:
        """The id of its agent."""
        ...

    def go_on(self) -> None:
        """Tells it that it may take its turn now."""
        ...


class Lost(NamedTuple):
    """A request whose connection broke: the agent's id, the generation of the server, the monotonic time."""

    agent: str
    generation: int
    at: float


class Suspects:
    """The requests of suspects at one slot, and those that its servers lost.

    >>> suspects = Suspects()
    >>> suspects.lost("ann", 3, now=10.0); suspects.lost("ben", 2, now=10.0)
    >>> suspects.lost_at(3, now=11.0), suspects.lost_at(3, now=25.5)
    ({'ann'}, set())
    """

    __slots__ = ("_held", "_lost", "one")

    def __init__(self) -> None:
        self.one: HeldBack | None = None
        """The one that may go; it has its turn, or waits for it."""
        self._held: dict[HeldBack, None] = {}
        self._lost: deque[Lost] = deque(maxlen=LOST_MAX)

    def __repr__(self) -> str:
        return f"<Suspects {'one goes' if self.one is not None else 'none goes'}, {len(self._held)} held back>"

    def lost(self, agent: str, generation: int, now: float) -> None:
        """The connection of a request to the server of this generation broke."""
        self._lost.append(Lost(agent, generation, now))

    def lost_at(self, generation: int, now: float) -> set[str]:
        """The agents whose requests to the server of this generation were lost a moment ago."""
        return {each.agent for each in self._lost if each.generation == generation and now - each.at <= LOST_S}

    @property
    def held(self) -> list[HeldBack]:
        return list(self._held)

    def may_go(self, request: HeldBack) -> bool:
        """Whether it may take its turn now; else it is held back until `go_on`."""
        if self.one is None or self.one is request:
            self.one = request
            return True
        self._held[request] = None
        return False

    def let_go(self, request: HeldBack) -> None:
        """This request has ended, or is no suspect's any more. The next one goes: another agent's if there is one."""
        self._held.pop(request, None)
        if self.one is not request:
            return
        held = list(self._held)
        others = [each for each in held if each.agent != request.agent]
        self.one = next(iter(others or held), None)
        if self.one is not None:
            del self._held[self.one]
            asyncio.get_running_loop().call_soon(self.one.go_on)  # a chain of refusals is no recursion by that

    def let_all_go(self) -> None:
        """There is no server any more that they could crash."""
        held, self.one = list(self._held), None
        self._held.clear()
        for request in held:
            request.go_on()
