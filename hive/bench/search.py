"""The search for the largest number of agents that stays within its objective: three steps, each measured twice. Pure.

The first step is where memory would be full by what one agent was seen to take; the others bracket the edge from there.
Where the first guess was far too high, there are more of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

STEPS, MOST_STEPS = 3, 6
BUSY = 0.9
"""From this share of all cores on, what drives and serves the agents is the limit, not memory."""
UP = {"zram": 1.25, "file": 1.6, "none": 1.15}
"""Factor from one step to the next while the edge is on one side only. With a swap file the first guess knows least:
memory does not end it, latency does."""
TOLD = 0.10
"""An edge is told as ± this share at least: a burst is few turns, and each takes other ones."""
NEAR = 1.05
"""Two numbers closer than this are one."""


class Series(NamedTuple):
    """One series of bursts over all agents. Seconds; `busy`: share of all cores used by driver, stub and Hive.

    `killed`: processes the kernel killed for memory; `failed`: turns without an answer; `overrun`: whether the box held
    more than it has, because the kernel could not swap so fast.
    """

    p50_s: float
    p95_s: float
    turns: int
    failed: int
    killed: int
    busy: float
    overrun: bool = False


class Step(NamedTuple):
    """One number of agents, measured."""

    agents: int
    series: tuple[Series, ...]

    def fits(self, objective_s: float) -> bool:
        """Whether every series kept the objective: nobody killed, nobody unanswered, p95 in time.

        >>> one = Series(0.4, 0.9, 40, 0, 0, 0.2)
        >>> Step(8, (one, one)).fits(1.0), Step(8, (one, one._replace(p95_s=1.1))).fits(1.0), Step(8, ()).fits(1.0)
        (True, False, False)
        """
        kept = (not (each.failed or each.killed or each.overrun) and each.p95_s <= objective_s for each in self.series)
        return bool(self.series) and all(kept)

    @property
    def is_cpu_bound(self) -> bool:
        """Whether one of its series was limited by processors: it then says nothing of memory, and is not counted."""
        return any(each.busy > BUSY for each in self.series)


class Edge(NamedTuple):
    """An edge, by the steps. `fits`: the most agents that did, 0 for none; `misses`: the fewest that did not, None
    where none was tried. `agents`: the edge between the two as one number. `bound`: `between`, `at least` or `fewer
    than`."""

    agents: int
    fits: int
    misses: int | None
    bound: str

    @property
    def said(self) -> str:
        """
        >>> Edge(22, 20, 24, "between").said, Edge(40, 40, None, "at least").said, Edge(0, 0, 8, "fewer than").said
        ('22 ± 10 % (20 fit, 24 do not)', 'at least 40', 'fewer than 8')
        >>> Edge(49, 31, 79, "between").said
        '49 ± 60 % (31 fit, 79 do not)'
        """
        if self.bound == "between":
            wide = max(TOLD, math.sqrt((self.misses or 0) / self.fits) - 1)
            return f"{self.agents} ± {wide:.0%} ({self.fits} fit, {self.misses} do not)".replace("%", " %")
        return f"{self.bound} {self.agents or self.misses}"


def first_guess(box_mib: float, base_mib: float, agent_mib: float) -> int:
    """The number of agents whose memory fills the box, by what there is without them (Hive, a template) and what one
    more of them takes.

    >>> first_guess(1200, 130, 15.3), first_guess(300, 310, 15.3)
    (69, 1)
    """
    return max(1, int((box_mib - base_mib) / max(agent_mib, 0.05)))


def marginal_mib(few: tuple[int, float], more: tuple[int, float]) -> float:
    """MiB of one more agent by the box's memory with a few and with more of them; never below 0.05.

    >>> marginal_mib((2, 60.0), (6, 160.0)), marginal_mib((2, 60.0), (6, 50.0))
    (25.0, 0.05)
    """
    return max(0.05, (more[1] - few[1]) / (more[0] - few[0]))


def next_agents(guess: int, steps: Sequence[Step], *, objective_s: float, swap: str, most: int) -> int | None:
    """The number to measure next; None where the search is over.

    CPU-bound steps bound it from above (more agents use more of the processors) and are not counted.

    >>> fine, late = Series(0.4, 0.6, 40, 0, 0, 0.2), Series(0.6, 3.0, 40, 0, 0, 0.2)
    >>> next_agents(20, [], objective_s=1.5, swap="zram", most=500)
    20
    >>> next_agents(20, [Step(20, (fine, fine))], objective_s=1.5, swap="zram", most=500)
    25
    >>> next_agents(20, [Step(20, (late, late))], objective_s=1.5, swap="zram", most=500)
    16
    >>> next_agents(20, [Step(20, (fine, fine)), Step(25, (late,))], objective_s=1.5, swap="zram", most=500)
    22
    """
    if not steps:
        return max(1, min(guess, most))
    low, high = _bounds(steps, objective_s)
    if len(steps) >= _allowed(steps, objective_s):
        return None
    if low and high is not None:
        wanted = round(math.sqrt(low * high))
        if high <= low * NEAR or wanted in (low, high):
            return None
    elif low:
        wanted = min(most, max(low + 1, round(low * UP[swap] ** _ups(steps))))
    else:
        assert high is not None
        wanted = min(high - 1, round(high / UP[swap] ** _ups(steps)))
    return None if wanted < 1 or any(step.agents == wanted for step in steps) else wanted


def _ups(steps: Sequence[Step]) -> int:
    """The second step on the same side goes twice as far as the first, by the factor's power; the others as far."""
    return min(len(steps), 2)


def _allowed(steps: Sequence[Step], objective_s: float) -> int:
    """Steps that the search may have: more than usual until one fits, and one after that.

    >>> fine, late = Series(0.4, 0.6, 40, 0, 0, 0.2), Series(0.6, 3.0, 40, 0, 0, 0.2)
    >>> misses = [Step(323, (late,)), Step(202, (late,)), Step(79, (late,))]
    >>> [_allowed(tried, 1.5) for tried in ([Step(20, (fine,))], misses[:1], misses, [*misses, Step(31, (fine,))])]
    [3, 3, 4, 5]
    """
    before = next((number for number, step in enumerate(steps) if step.fits(objective_s)), len(steps))
    return min(MOST_STEPS, max(STEPS, before + (1 if before == len(steps) else 2)))


def _bounds(steps: Sequence[Step], objective_s: float) -> tuple[int, int | None]:
    """The most that fit and the fewest that did not, CPU-bound ones among these."""
    low = max((step.agents for step in steps if step.fits(objective_s) and not step.is_cpu_bound), default=0)
    above = [step.agents for step in steps if step.is_cpu_bound or not step.fits(objective_s)]
    return low, min((agents for agents in above if agents > low), default=None)


def edge(steps: Sequence[Step], *, objective_s: float) -> Edge | None:
    """The edge by the steps that count; None where none does.

    A step that misses below one that fits is chance, and the larger one that fits stands.

    >>> fine, late = Series(0.4, 0.6, 40, 0, 0, 0.2), Series(0.6, 3.0, 40, 0, 0, 0.2)
    >>> edge([Step(20, (fine,)), Step(25, (late,)), Step(22, (fine,))], objective_s=1.5)
    Edge(agents=23, fits=22, misses=25, bound='between')
    >>> edge([Step(20, (fine._replace(busy=0.95),))], objective_s=1.5) is None
    True
    """
    counted = [step for step in steps if step.series and not step.is_cpu_bound]
    if not counted:
        return None
    low = max((step.agents for step in counted if step.fits(objective_s)), default=0)
    high = min((step.agents for step in counted if step.agents > low and not step.fits(objective_s)), default=None)
    if high is None:
        return Edge(low, low, None, "at least")
    if not low:
        return Edge(0, 0, high, "fewer than")
    return Edge(round(math.sqrt(low * high)), low, high, "between")


def times(one: Edge | None, other: Edge | None) -> tuple[float | None, str]:
    """Divides one edge by the other, and says it; None where one of both is not known well enough.

    >>> times(Edge(22, 20, 25, "between"), Edge(11, 10, 12, "between"))
    (2.0, '2.00 ×')
    >>> times(Edge(30, 30, None, "at least"), Edge(20, 18, 22, "between"))
    (1.5, '≥ 1.50 ×')
    >>> times(Edge(0, 0, 8, "fewer than"), Edge(20, 18, 22, "between"))
    (None, '< 0.40 ×')
    >>> times(Edge(22, 20, 25, "between"), Edge(0, 0, 8, "fewer than"))
    (2.5, '≥ 2.50 ×')
    """
    if one is None or other is None or other.bound == "at least":
        return None, ""
    if other.bound == "fewer than":
        ratio = round(one.fits / (other.misses or 1), 2)
        return (ratio, f"≥ {ratio:.2f} ×") if one.fits else (None, "")
    if one.bound == "fewer than":
        return None, f"< {(one.misses or 0) / other.agents:.2f} ×"
    ratio = round(one.agents / other.agents, 2)
    return ratio, f"{'≥ ' if one.bound == 'at least' else ''}{ratio:.2f} ×"


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` of all are not above (nearest rank); 0 of none.

    >>> percentile([4, 1, 3, 2], 0.5), percentile([1, 2, 3, 4], 0.95), percentile([], 0.5)
    (2, 4, 0.0)
    """
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0
