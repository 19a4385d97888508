"""The steps of the tour: what each shows, what to look at, and the command that does the same. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hive.errors import UsageError

PLACES = 2
"""Requests that the tour's Hive lets the model answer at once."""
FLOOD = 24
"""Requests that the flooding tenant has under way at once."""
LIGHT = 5
"""Requests that the light tenant asks, one after the other."""
IDLE_S = 2.0
"""Quiet after which the tour's agents sleep."""


class TourStep(NamedTuple):
    """One step. `sentence`: what happens in it; `look`: what to look at in its figures; `command`: how a person does or
    sees the same on a Hive of theirs."""

    name: str
    title: str
    sentence: str
    look: str
    command: str


STEPS = (
    TourStep(
        "agents",
        "Agents",
        "Three agents start. Each is an ordinary program with memory of its own, behind Hive.",
        "RAM: what each holds while it is awake. FIRST TURN: a caller's question, to the agent, to the model and back.",
        "hive agent create NAME -- PROGRAM",
    ),
    TourStep(
        "sleep",
        "Sleep",
        f"Nobody calls them, so Hive freezes each after {IDLE_S:g} s of quiet.",
        "CPU: none in a whole second. PAST HIVE: asked at its own port, an agent that sleeps says nothing.",
        "hive agent list",
    ),
    TourStep(
        "wake",
        "Wake",
        "A caller comes. Hive wakes the agent first, and the agent knows nothing of having slept.",
        "ASLEEP and AWAKE: how long the same call takes. MEMORY: each agent checks that nothing of it has changed.",
        "hive agent show NAME",
    ),
    TourStep(
        "share",
        "Fair share",
        f"One tenant asks {FLOOD} questions at once, another one at a time; the model takes {PLACES} at a time.",
        "FIRST WORD: the light tenant's comes soon, however long the line of the other one is.",
        "hive queue",
    ),
    TourStep(
        "outage",
        "The model's server is killed",
        "kill -9, in the middle of two answers. Nothing is repaired by hand.",
        "WHAT IT IS TOLD: each caller gets an error with a code, no silence; and then there is a server again.",
        "hive backend status",
    ),
    TourStep(
        "usage",
        "Usage",
        "Every request of the tour was counted, those that were cut, too.",
        "TOKENS by agent. What callers were told in whole answers is in the sum.",
        "hive usage --by tenant",
    ),
)


def choose(numbers: Sequence[int]) -> list[tuple[int, TourStep]]:
    """The steps with these numbers, from 1, in the tour's order; all of them where none is named. Raises UsageError.

    >>> [number for number, _ in choose([])], [step.name for _, step in choose([3, 2, 3])]
    ([1, 2, 3, 4, 5, 6], ['sleep', 'wake'])
    """
    if wrong := [number for number in numbers if not 1 <= number <= len(STEPS)]:
        raise UsageError(f"there is no step {wrong[0]}: they are 1 to {len(STEPS)}", hint="hive demo --list")
    return [(number, step) for number, step in enumerate(STEPS, 1) if not numbers or number in numbers]
