"""`hive task`: what the proxy says of the rungs, as tables, and the questions it asks."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from hive.link.tasks import AskTasks, RungRow, TaskRoute
from hive.settings.tasks import TaskRow

Hive = Any
"""conftest.Hive: test modules import no siblings."""

ROUTE = TaskRoute(
    name="plan",
    aliases=["gpt-4"],
    rungs=[
        RungRow(model="large", served="large", state="cold", expected_s=47.2, context=32768),
        RungRow(model="fast", served="small", state="ready", expected_s=0.0),
        RungRow(model="remote/far", served="remote/far", state="ready", expected_s=0.0, far=True),
        RungRow(model="secret", refused='tenant acme may not use the model "secret"'),
    ],
    rung=1,
    waits=False,
    why="large is cold, expected in 47 s; fast is ready",
)


@pytest.fixture
def hive(hive: Hive) -> Hive:
    tasks = {"plan": TaskRow(models="large | fast | remote/far | secret", budget_s=90, hold_s=5)}
    hive.box.daemon.effects.settings = msgspec.structs.replace(hive.box.daemon.effects.settings, tasks=tasks)
    hive.box.proxy.tasks = [ROUTE]
    return hive


def test_a_task_is_listed_with_what_answers_it_now_and_why(hive: Hive) -> None:
    head, line = hive("task").out.splitlines()
    assert head.split() == ["TASK", "MODELS", "NOW", "WHY"]
    assert line.split("  ")[0] == "plan"
    assert line.endswith("fast  large is cold, expected in 47 s; fast is ready")
    assert hive("task", "list", "--json").json["tasks"][0]["asked_as"] == ["task:plan", "gpt-4"]


def test_a_task_is_shown_with_its_rules_and_each_rung(hive: Hive) -> None:
    shown = hive("task", "show", "plan").out
    assert "Steps down on: cold, full, down, context\n" in shown
    assert "Budget: 1m 30s\n" in shown
    rungs = shown.split("\n\n")[1].splitlines()[1:]
    assert [line.split()[:3] for line in rungs[:2]] == [["0", "large", "cold"], ["1", "fast", "(small)"]]
    assert [line.split()[-1] for line in rungs] == ["here", "here", "far", "-"]


def test_a_route_is_explained_for_an_agent_without_asking_a_model(hive: Hive) -> None:
    said = hive("task", "route", "task:plan", "--as", "alice")
    assert said.out.splitlines() == [
        "0  large: cold, expected in 47 s",
        "1  fast (small): ready",
        "2  remote/far: ready, far",
        '3  secret: tenant acme may not use the model "secret"',
        "takes rung 1: large is cold, expected in 47 s; fast is ready",
    ]
    asked = [message for message in hive.box.proxy.told if isinstance(message, AskTasks)]
    assert asked[-1].task == "plan"
    assert len(asked[-1].agent) == 32


@pytest.mark.parametrize(
    ("words", "said"),
    [(("task", "show", "plant"), "did you mean `plan`?"), (("task", "route", "plan", "--as", "nobody"), "no agent")],
)
def test_what_is_not_there_is_not_found(hive: Hive, words: tuple[str, ...], said: str) -> None:
    found = hive(*words)
    assert found.code == 3
    assert said in found.err


def test_without_a_task_it_says_so(hive: Hive) -> None:
    hive.box.daemon.effects.settings = msgspec.structs.replace(hive.box.daemon.effects.settings, tasks={})
    assert hive("task", "list").out.startswith("there is no task")
