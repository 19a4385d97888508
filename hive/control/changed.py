"""The agents changed since a reader's last question, and the pace of looking. Pure: facts and the time come in."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from itertools import takewhile
from typing import NamedTuple

MOST = 100
"""Changed agents in one answer, the longest unknown first: some 4 ms. The rest come with the next ones."""
GONE_MAX = 10_000
"""Removed agents that are remembered; a reader with a cursor before the oldest of them is told everything."""


class Changed(NamedTuple):
    """The changes after a cursor: ids, in the order they changed, and of agents that are no more. `cursor`: ask with it
    next. `is_whole`: `there` are all agents there are."""

    there: list[str]
    gone: list[str]
    cursor: str
    is_whole: bool


class ChangeLog:
    """Numbers every change: a reader at number 7 is told what came after. `name`: tells this log from another.

    >>> log = ChangeLog("x")
    >>> log.note({"ann": 1, "bob": 1})
    >>> log.since("")
    Changed(there=['ann', 'bob'], gone=[], cursor='x-2', is_whole=True)
    >>> log.note({"ann": 2})
    >>> log.since("x-2")
    Changed(there=['ann'], gone=['bob'], cursor='x-4', is_whole=False)
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._last = 0
        self._facts: dict[str, Hashable] = {}
        self._numbers: dict[str, int] = {}
        """Agent → number of its last change, in this order; also of agents that are gone."""
        self._forgotten = 0
        """The highest number of one that is not remembered."""

    def __repr__(self) -> str:
        return f"<ChangeLog {len(self._facts)} agents, {self._last} changes>"

    def note(self, facts: Mapping[str, Hashable]) -> None:
        """Notes all agents as they are now: one that is new, or differs from what was noted last, has changed."""
        before = self._facts
        if before.keys() != facts.keys():
            for agent in before.keys() - facts.keys():
                self._number(agent)
        for agent, found in facts.items():
            if before.get(agent) != found:
                self._number(agent)
        self._facts = dict(facts)
        self._forget()

    def _number(self, agent: str) -> None:
        self._last += 1
        self._numbers.pop(agent, None)
        self._numbers[agent] = self._last

    def _forget(self) -> None:
        """The oldest of those that are gone, where there are too many."""
        excess = len(self._numbers) - len(self._facts) - GONE_MAX
        if excess > 0:
            for agent in [agent for agent in self._numbers if agent not in self._facts][:excess]:
                self._forgotten = self._numbers.pop(agent)

    def since(self, cursor: str, most: int = MOST) -> Changed:
        """The changes after `cursor` was given out; everything where that is empty, too old, or none of this log."""
        seen = self._number_of(cursor)
        if seen is None:
            return Changed([*self._facts], [], f"{self._name}-{self._last}", is_whole=True)
        newer = takewhile(lambda change: change[1] > seen, reversed(self._numbers.items()))
        changed = [*newer][: -most - 1 : -1]
        last = changed[-1][1] if len(changed) == most else self._last
        there = [agent for agent, _ in changed if agent in self._facts]
        gone = [agent for agent, _ in changed if agent not in self._facts]
        return Changed(there, gone, f"{self._name}-{last}", is_whole=False)

    def _number_of(self, cursor: str) -> int | None:
        name, _, number = cursor.rpartition("-")
        if name != self._name or not number.isascii() or not number.isdigit() or len(number) > 18:
            return None
        return int(number) if self._forgotten <= int(number) <= self._last else None


class Ration:
    """Lets a look be taken so seldom that looking is no more than a `share` of the time.

    At most every `least_s`, and at least every `most_s`.

    >>> ration = Ration(share=0.01, least_s=0.5, most_s=30.0)
    >>> ration.took(0.02, now=100.0)
    >>> [ration.is_due(now) for now in (101.0, 102.0)]
    [False, True]
    """

    def __init__(self, *, share: float, least_s: float, most_s: float) -> None:
        self._share = share
        self._least_s, self._most_s = least_s, most_s
        self._due_at = float("-inf")

    def is_due(self, now: float) -> bool:
        return now >= self._due_at

    def took(self, took_s: float, *, now: float) -> None:
        """One was taken until `now`."""
        self._due_at = now + min(self._most_s, max(self._least_s, took_s / self._share))
