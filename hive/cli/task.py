"""The commands for tasks: ladders of models that requests ask for by one name."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import quote

import typer

from hive.cli.call import COMPLETED_WITHIN_S, Answer, CommandCall, completed
from hive.cli.text import UNKNOWN, fields, one_line, span, table
from hive.client.client import Client

HEADERS = ("TASK", "MODELS", "NOW", "WHY")
RUNG_HEADERS = ("RUNG", "MODEL", "STATE", "EXPECTED", "CONTEXT", "WHERE")


def task_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """Completion of a task."""
    return completed(ctx, incomplete, _all)


def _all(client: Client) -> list[Answer]:
    return list(client.get("/api/tasks", timeout_s=COMPLETED_WITHIN_S)["tasks"])


TaskName = Annotated[
    str,
    typer.Argument(metavar="NAME", help="As `hive task` names it.", autocompletion=task_names, show_default=False),
]


def list_tasks(call: CommandCall) -> None:
    """Lists the tasks, and the model that would answer each now.

    A request asks for one as `task:NAME`, or by an alias of it. NOW is the model for an operator's request; of an agent
    that is told by `hive task route NAME --as AGENT`.

    Examples:
      hive task
      hive task list --json | jq -r '.tasks[] | select(.rung == null) | .name'
    """
    answer = call.client.get("/api/tasks")
    call.show("task.list", answer, lambda: _tasks(answer["tasks"]))


def show(call: CommandCall, name: TaskName) -> None:
    """Shows one task: its ladder, its rules, and how each of its models is.

    Examples:
      hive task show plan
      hive task show plan --json | jq '.rungs[] | {model, state, expected_s}'
    """
    answer = call.client.get(f"/api/tasks/{quote(name, safe='')}")
    call.show("task.show", answer, lambda: _shown(answer))


def route(
    call: CommandCall,
    name: TaskName,
    agent: Annotated[
        str | None, typer.Option("--as", metavar="AGENT", help="For a request of this agent, by name or id.")
    ] = None,
) -> None:
    """Explains which model a request for a task would be given now, and why.

    No model is asked, and none is loaded. Each rung is looked up as for a request: tenant, tier, aliases, whether it
    would leave the box, and budgets of tokens. What a request's body needs (tools, images, a long context) is not
    known here.

    Examples:
      hive task route plan
      hive task route plan --as alice --json | jq -r .task.why
    """
    answer = call.client.get(f"/api/tasks/{quote(name, safe='')}/route", agent=agent)
    call.show("task.route", answer, lambda: "\n".join(one_line(line) for line in answer["lines"]))


def _tasks(tasks: list[Answer]) -> str:
    if not tasks:
        return "there is no task: hive.conf describes them, [task NAME]"
    rows = [
        [task["name"], " | ".join(rung["model"] for rung in task["rungs"]), now_of(task), task["why"]] for task in tasks
    ]
    return table(HEADERS, [[one_line(cell) for cell in row] for row in rows])


def now_of(task: Answer) -> str:
    """The model that would answer now.

    >>> now_of({"rung": 1, "waits": False, "rungs": [{"model": "large"}, {"model": "small"}]})
    'small'
    >>> now_of({"rung": 0, "waits": True, "rungs": [{"model": "large"}]}), now_of({"rung": None, "rungs": []})
    ('large, once it is loaded', 'none')
    """
    if task["rung"] is None:
        return "none"
    model = str(task["rungs"][task["rung"]]["model"])
    return f"{model}, once it is loaded" if task["waits"] else model


def where_of(rung: Answer) -> str:
    """
    >>> where_of({"served": "m", "far": True}), where_of({"served": "", "far": False})
    ('far', '-')
    """
    if not rung["served"]:
        return UNKNOWN
    return "far" if rung["far"] else "here"


def _shown(task: Answer) -> str:
    budget = span(task["budget_s"]) if task["budget_s"] else "none"
    pairs = [
        ("Task", task["name"]),
        ("Asked as", ", ".join(task["asked_as"])),
        ("Now", now_of(task)),
        ("Why", task["why"]),
        ("Steps down on", ", ".join(task["step_down_on"]) or "nothing"),
        ("Pinned", "its first model is waited for" if task["pin_primary"] else "no"),
        ("Budget", budget),
        ("Keeps", span(task["keep_alive_s"])),
        ("Holds", span(task["hold_s"])),
    ]
    rows = [
        [
            str(index),
            rung["model"] if rung["served"] in ("", rung["model"]) else f"{rung['model']} ({rung['served']})",
            rung["refused"] or rung["lacks"] or rung["state"],
            UNKNOWN if rung["expected_s"] is None else span(rung["expected_s"]),
            UNKNOWN if rung["context"] is None else str(rung["context"]),
            where_of(rung),
        ]
        for index, rung in enumerate(task["rungs"])
    ]
    told = fields([(name, one_line(value)) for name, value in pairs])
    return f"{told}\n\n{table(RUNG_HEADERS, [[one_line(cell) for cell in row] for row in rows])}"
