"""Agents whose requests were at a model's server when it crashed: who is held back there, and for how long. Pure.

One mark proves nothing. With the second an agent is a suspect: of all suspects one request at a time goes to that
server, so the next crash tells which of them it was. That one is refused there for a while. Other agents, the agent's
tenant and other models are never touched.
"""

from __future__ import annotations

from typing import NamedTuple

SPAN_S = 600.0
"""Marks count for so long; a suspicion and a refusal last so long (decision 034)."""


class Suspicion(NamedTuple):
    """A hold on an agent at a slot until `until`: it is refused there, or else has to take its turn with the other
    suspects."""

    until: float
    is_refused: bool


class CrashMarks:
    """The marks at all slots of one proxy. Times are monotonic seconds.

    >>> marks = CrashMarks()
    >>> marks.crashed("m-1", ["ann", "ben"], now=0.0), marks.crashed("m-1", ["ann", "ben"], now=60.0)
    (([], []), (['ann', 'ben'], []))
    >>> marks.crashed("m-1", ["ann", "eve"], now=90.0), marks
    (([], ['ann']), <CrashMarks 1 slowed, 1 refused>)
    >>> marks.refused_for_s("m-1", "ann", now=100.0), marks.refused_for_s("m-2", "ann", now=100.0)
    (590.0, 0.0)
    >>> marks.is_slowed("m-1", "ben", now=100.0), marks.is_slowed("m-1", "eve", now=100.0)
    (True, False)
    """

    __slots__ = ("_marks", "suspicions")

    def __init__(self) -> None:
        self._marks: dict[tuple[str, str], list[float]] = {}
        self.suspicions: dict[tuple[str, str], Suspicion] = {}
        """Slot and agent → what holds it back there; some of them may be over."""

    def __repr__(self) -> str:
        refused = sum(each.is_refused for each in self.suspicions.values())
        return f"<CrashMarks {len(self.suspicions) - refused} slowed, {refused} refused>"

    def crashed(self, slot: str, agents: list[str], now: float) -> tuple[list[str], list[str]]:
        """Marks the agents whose requests were there; those that are slowed, and those that are refused by that.

        Where one of them was a suspect before, the crash is the suspects', and the others get no mark.
        """
        self._forget_old(now)
        slowed: list[str] = []
        refused: list[str] = []
        suspects = [agent for agent in agents if (slot, agent) in self.suspicions]
        for agent in suspects or agents:
            marks = self._marks.setdefault((slot, agent), [])
            marks.append(now)
            if len(marks) < 2:
                continue
            is_refused = bool(suspects)
            self.suspicions[slot, agent] = Suspicion(now + SPAN_S, is_refused)
            (refused if is_refused else slowed).append(agent)
        return slowed, refused

    def refused_for_s(self, slot: str, agent: str, now: float) -> float:
        """Seconds for which this agent is still refused at this slot; 0 if it is not."""
        known = self.suspicions.get((slot, agent))
        return max(0.0, known.until - now) if known is not None and known.is_refused else 0.0

    def is_slowed(self, slot: str, agent: str, now: float) -> bool:
        """Whether this agent is a suspect there, and has to take its turn with the others."""
        known = self.suspicions.get((slot, agent))
        return known is not None and not known.is_refused and known.until > now

    def _forget_old(self, now: float) -> None:
        self.suspicions = {key: each for key, each in self.suspicions.items() if each.until > now}
        recent = {key: [at for at in marks if now - at < SPAN_S] for key, marks in self._marks.items()}
        self._marks = {key: marks for key, marks in recent.items() if marks}
