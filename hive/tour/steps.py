"""The steps of the tour: what each shows, what to look at, and the command that does the same. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hive.errors import UsageError

PLACES = 2
"""Requests that the tour's Hive lets the model answer at once."""
CROWD, GUEST = "crowd", "guest"
"""Two programs outside Hive, each of a tenant of the same name: the tour itself is both."""
CROWD_AT_ONCE = 24
"""Questions that crowd has under way at once."""
GUEST_ASKS = 5
"""Questions of guest, one after the other."""
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
        "Three agents start. Each is an ordinary program, keeps something in memory, and asks the model through Hive.",
        "RAM: what each holds while it is awake. FIRST TURN: how long a caller's first question takes, from the caller "
        "to the agent, from there to the model, and back.",
        "hive agent create NAME -- PROGRAM",
    ),
    TourStep(
        "sleep",
        "Sleep",
        f"Nobody calls them, so Hive freezes each of them after {IDLE_S:g} s of quiet.",
        "CPU IN 1 s: a sleeper uses none. PAST HIVE: a caller that goes straight to its port hears nothing.",
        "hive ps",
    ),
    TourStep(
        "wake",
        "Wake",
        "A caller comes to each sleeper. Hive wakes the agent, and only then passes the call on.",
        "ASLEEP, AWAKE: how long a call takes that finds the agent asleep, and the same call right after it. TURN, "
        "MEMORY: the agent goes on counting where it was, and finds its memory unchanged.",
        "hive agent show NAME",
    ),
    TourStep(
        "share",
        "Fair share",
        f"Two more programs come, from outside Hive: {CROWD} and {GUEST}, each of a tenant of its own. {CROWD.title()} "
        f"asks the model {CROWD_AT_ONCE} questions at once, {GUEST} asks {GUEST_ASKS}, one after the other. The model "
        f"answers {PLACES} at a time.",
        f"FIRST WORD: how long each waits for an answer to begin. {GUEST.title()} does not wait until {CROWD} has all "
        "of its answers.",
        "hive queue",
    ),
    TourStep(
        "outage",
        "The model's server is killed",
        "The server gets a kill -9 in the middle of two answers. Nobody repairs anything by hand.",
        "WHAT IT IS TOLD: each caller gets an error with a code, none is left waiting; then there is a server again.",
        "hive backend status",
    ),
    TourStep(
        "usage",
        "Usage",
        "Hive has counted every request of this tour, also those whose answer was cut off.",
        f"First the agents, with {CROWD} and {GUEST} of step 4; then the same by tenant; then all. CUT: answers that "
        "were cut off. UNKNOWN: requests whose tokens the server never told.",
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
