"""The API's answers about tasks, as types. See system.py."""

from __future__ import annotations

from typing import Annotated, TypedDict

from msgspec import Meta


class RungView(TypedDict):
    """One model of a task's ladder, for a request that came now."""

    model: Annotated[str, Meta(description="As the ladder names it.")]
    served: Annotated[str, Meta(description="The model that is meant; empty where there is none.")]
    state: Annotated[str, Meta(description="ready, cold, full or down; empty where it would be refused.")]
    expected_s: Annotated[float | None, Meta(description="Until a request would have its place; null: unknown.")]
    refused: Annotated[str, Meta(description="Why the caller may not use it, or why there is none; else empty.")]
    lacks: Annotated[str, Meta(description="What it cannot do; else empty.")]
    context: Annotated[int | None, Meta(description="Tokens of prompt and answer; null: unknown.")]
    far: Annotated[bool, Meta(description="A request there leaves the box.")]


class TaskView(TypedDict):
    """One `[task NAME]` of hive.conf, and what a request for it would be given now."""

    name: str
    asked_as: Annotated[list[str], Meta(description="The names that requests ask for it by.")]
    pin_primary: bool
    budget_s: Annotated[float, Meta(description="All of a request may take so long; 0: no limit of its own.")]
    keep_alive_s: float
    step_down_on: Annotated[list[str], Meta(description="Of cold, full, down, context.")]
    hold_s: float
    rungs: list[RungView]
    rung: Annotated[int | None, Meta(description="The place in `rungs` of the one it would be given; null: none.")]
    waits: Annotated[bool, Meta(description="It would wait there for a load.")]
    why: Annotated[str, Meta(description="The reason, one sentence.")]


class Tasks(TypedDict):
    """All tasks, in the order of hive.conf."""

    tasks: list[TaskView]


class TaskRouteView(TypedDict):
    """The rung that a request of `agent` would be given; `agent` null: of an operator. `lines`: the same as text."""

    agent: str | None
    task: TaskView
    lines: list[str]
