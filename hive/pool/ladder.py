"""The rung of a task's ladder that a request is given. Pure: what is known of the rungs and `now` come in as arguments.

In this order, and the reason is told in words:
1. A rung that the caller may not use, that cannot do what the request needs, or that was asked already is passed over.
2. An agent that was given a rung a while ago stays there for `hold_s`, as long as that rung is ready.
3. The first rung, if it is ready.
4. Else the first ready one, as far as the task steps down from what those before it are (cold, full, down). With
   `pin_primary` a cold first rung is waited for.
5. Else the first cold rung that is expected before the budget is over.
6. Else none: refused now, with the time after which to come again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum

import msgspec

from hive.settings.tasks import TaskRow, items_of

RETRY_MAX_S = 120.0
"""Longest time after which a caller is told to come again, as for a cold model."""
UNKNOWN_S = 30.0
"""The same where nobody can say when a rung may be ready."""


class StepCause(StrEnum):
    """A reason to go on to the next rung: the model is not loaded, has no place, cannot be reached, or is too small for
    the prompt."""

    COLD = "cold"
    FULL = "full"
    DOWN = "down"
    CONTEXT = "context"


class RungState(StrEnum):
    """The state of a rung for one request."""

    READY = "ready"
    COLD = "cold"
    FULL = "full"
    DOWN = "down"


CAUSE_OF = {RungState.COLD: StepCause.COLD, RungState.FULL: StepCause.FULL, RungState.DOWN: StepCause.DOWN}


class Task(msgspec.Struct, frozen=True):
    """A task as `[task NAME]` describes it. `budget_s`: infinite where it has none."""

    name: str
    rungs: tuple[str, ...]
    pin_primary: bool = False
    budget_s: float = math.inf
    keep_alive_s: float = 0.0
    step_down_on: frozenset[StepCause] = frozenset(StepCause)
    hold_s: float = 60.0


def task_of(name: str, row: TaskRow) -> Task:
    """The task that a section describes.

    >>> task_of("plan", TaskRow(models="a|b", step_down_on="cold, down")).step_down_on == {"cold", "down"}
    True
    """
    return Task(
        name=name,
        rungs=items_of(row.models, "|"),
        pin_primary=row.pin_primary,
        budget_s=row.budget_s or math.inf,
        keep_alive_s=row.keep_alive_s,
        step_down_on=frozenset(StepCause(cause) for cause in items_of(row.step_down_on, ",")),
        hold_s=row.hold_s,
    )


class RungFacts(msgspec.Struct, frozen=True):
    """One rung for one request.

    `model`: as the ladder names it. `refused`: why this caller may not use it, or why there is no such model, a clause
    that names nothing the caller may not know. `lacks`: what it cannot do that the request needs. `failed`: why it gave
    no answer to this request before. `expected_s`: until the request would have its place there; None where that cannot
    be said, infinite where no end can be seen. `context`: tokens of prompt and answer, None where that is not known.
    """

    model: str
    state: RungState = RungState.READY
    refused: str = ""
    lacks: str = ""
    failed: str = ""
    expected_s: float | None = 0.0
    context: int | None = None


class LadderCaller(msgspec.Struct, frozen=True):
    """Facts of the request. `ends_at`: the end of its budget. `held`: the rung its agent was given, until
    `held_until`. `tokens`: so many its prompt has at least. `over`: a rung with that context was too small."""

    ends_at: float = math.inf
    held: int | None = None
    held_until: float = 0.0
    tokens: int = 0
    over: int | None = None


class Rung(msgspec.Struct, frozen=True):
    """The request is asked there now."""

    index: int
    why: str


class WaitFor(msgspec.Struct, frozen=True):
    """The request waits for this rung to be loaded; `expected_s` as in `RungFacts`."""

    index: int
    why: str
    expected_s: float | None = None


class NoRung(msgspec.Struct, frozen=True):
    """None can serve it. `retry_after_s` None: it would be no better later. `index`: the first rung that it may use,
    None where there is none."""

    why: str
    retry_after_s: float | None = None
    index: int | None = None


Choice = Rung | WaitFor | NoRung


def choose_rung(task: Task, caller: LadderCaller, rungs: Sequence[RungFacts], now: float) -> Choice:
    """The rung for a request; the module says how.

    >>> task = Task("plan", ("large", "small"), budget_s=90.0)
    >>> cold = RungFacts("large", RungState.COLD, expected_s=47.0)
    >>> choose_rung(task, LadderCaller(ends_at=90.0), (cold, RungFacts("small")), 0.0)
    Rung(index=1, why='large is cold, expected in 47 s; small is ready')
    >>> pinned = msgspec.structs.replace(task, pin_primary=True)
    >>> choose_rung(pinned, LadderCaller(ends_at=90.0), (cold, RungFacts("small")), 0.0)
    WaitFor(index=0, why='large is cold, expected in 47 s, and waited for', expected_s=47.0)
    >>> choose_rung(pinned, LadderCaller(ends_at=30.0), (cold, RungFacts("small")), 0.0)
    NoRung(why='large is cold, expected in 47 s, and 30 s are left', retry_after_s=47.0, index=0)
    """
    left_s = caller.ends_at - now
    passed, usable = _usable(task, caller, rungs)
    if not usable:
        return NoRung(_told(passed, len(rungs)))
    held = caller.held
    if held in usable and held != usable[0] and now < caller.held_until and rungs[held].state is RungState.READY:
        first = rungs[usable[0]]
        if not (first.state is RungState.COLD and _is_pinned(task, usable[0])):
            left = f"its agent stays there for another {caller.held_until - now:.0f} s"
            return Rung(held, f"{rungs[held].model} is ready, and {left}")
    for index in usable:
        rung = rungs[index]
        if rung.state is RungState.READY:
            passed[index] = f"{rung.model} is ready"
            return Rung(index, _told(passed, index))
        passed[index] = _is_so(rung)
        if _may_pass(task, index, rung):
            continue
        return _stay(index, rung, passed, left_s)
    waits = [index for index in usable if rungs[index].state is RungState.COLD]
    for index in waits:
        if _fits(rungs[index], left_s):
            passed[index] = f"{_is_so(rungs[index])}, and waited for"
            return WaitFor(index, _told(passed, index), rungs[index].expected_s)
    if not waits:
        return Rung(usable[0], _told(passed, len(rungs)))  # the ordinary way says why not
    return NoRung(_in_vain(passed, left_s), _retry_after_s([rungs[index] for index in waits]), usable[0])


def _usable(task: Task, caller: LadderCaller, rungs: Sequence[RungFacts]) -> tuple[dict[int, str], list[int]]:
    """The rungs that are passed over, with the reason, and those that may serve it, by their place. A rung that lacks
    something is passed over only for one that has it."""
    passed: dict[int, str] = {}
    for index, rung in enumerate(rungs):
        if why := rung.failed or rung.refused:
            passed[index] = f"{rung.model}: {why}" if rung.failed else f"rung {index}: {why}"
        elif caller.over is not None and (rung.context is None or rung.context <= caller.over):
            passed[index] = f"{rung.model} is not known to hold more than {caller.over} tokens"
    able = [index for index, rung in enumerate(rungs) if index not in passed and not rung.lacks]
    if able:
        passed |= {
            index: f"{rung.model} {rung.lacks}"
            for index, rung in enumerate(rungs)
            if rung.lacks and index not in passed
        }
    if StepCause.CONTEXT in task.step_down_on:
        large = [index for index, rung in enumerate(rungs) if index not in passed and not _is_small(rung, caller)]
        if large:
            passed |= {
                index: f"{rung.model} holds {rung.context} tokens and the prompt is longer"
                for index, rung in enumerate(rungs)
                if index not in passed and _is_small(rung, caller)
            }
    return passed, [index for index in range(len(rungs)) if index not in passed]


def _is_small(rung: RungFacts, caller: LadderCaller) -> bool:
    return rung.context is not None and caller.tokens > rung.context


def _is_pinned(task: Task, index: int) -> bool:
    return task.pin_primary and index == 0


def _may_pass(task: Task, index: int, rung: RungFacts) -> bool:
    cause = CAUSE_OF[rung.state]
    return cause in task.step_down_on and not (cause is StepCause.COLD and _is_pinned(task, index))


def _stay(index: int, rung: RungFacts, passed: dict[int, str], left_s: float) -> Choice:
    """The answer where the task does not step down from this rung."""
    if rung.state is not RungState.COLD:
        return Rung(index, _told(passed, index))  # the ordinary way waits, or says why not
    if not _fits(rung, left_s):
        return NoRung(_in_vain(passed, left_s), _retry_after_s([rung]), index)
    passed[index] = f"{passed[index]}, and waited for"
    return WaitFor(index, _told(passed, index), rung.expected_s)


def _fits(rung: RungFacts, left_s: float) -> bool:
    return rung.expected_s is None or (rung.expected_s < left_s and not math.isinf(rung.expected_s))


def _in_vain(passed: dict[int, str], left_s: float) -> str:
    told = _told(passed, len(passed))
    return told if math.isinf(left_s) else f"{told}, and {max(0.0, left_s):.0f} s are left"


def _retry_after_s(rungs: Sequence[RungFacts]) -> float:
    known = [rung.expected_s for rung in rungs if rung.expected_s is not None and not math.isinf(rung.expected_s)]
    return min(RETRY_MAX_S, max(1.0, min(known, default=UNKNOWN_S)))


def _told(passed: dict[int, str], last: int) -> str:
    """The reasons: of those before it, then of the one that was taken."""
    return "; ".join(passed[index] for index in sorted(passed) if index <= last)


def _is_so(rung: RungFacts) -> str:
    if rung.state is not RungState.COLD or rung.expected_s is None:
        return f"{rung.model} is {rung.state}"
    if math.isinf(rung.expected_s):
        return f"{rung.model} is cold, with no end to be seen"
    return f"{rung.model} is cold, expected in {rung.expected_s:.0f} s"
