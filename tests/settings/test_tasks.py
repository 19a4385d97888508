"""`[task NAME]` of hive.conf: what is wrong with one is said with file, line and key."""

from __future__ import annotations

from pathlib import Path

import pytest

from hive.errors import ConfigError
from hive.settings.edit import Name, name_of, row_of, with_value
from hive.settings.file import load_text

LADDER = "[task plan]\nmodels = large | small\n"


def wrong(text: str) -> list[str]:
    with pytest.raises(ConfigError) as found:
        load_text(text, path=Path("/etc/hive/hive.conf"), env={})
    return [line.removeprefix("/etc/hive/hive.conf:") for line in found.value.message.split("\n")]


def test_a_task_has_its_ladder_and_its_rules() -> None:
    text = LADDER + "pin_primary = true\nbudget_s = 90\nkeep_alive_s = 600\nstep_down_on = cold, full\nhold_s = 5\n"
    loaded = load_text(text, env={})
    task = loaded.settings.tasks["plan"]
    assert (task.models, task.pin_primary, task.budget_s, task.keep_alive_s) == ("large | small", True, 90.0, 600.0)
    assert (task.step_down_on, task.hold_s) == ("cold, full", 5.0)
    assert str(loaded.origins["task plan.budget_s"]) == "file hive.conf:4"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[task plan]\n", "1: [task plan]: models is missing: the models that answer it, separated by |"),
        ("[task a b]\n", "1: [task a b]: a task's name is a letter or digit, then up to 63 of A-Z, a-z, 0-9 and . _ -"),
        (LADDER + "budget = 9\n", "3: [task plan] budget: no such key; did you mean `budget_s`?"),
        (LADDER + "budget_s = -1\n", "3: [task plan] budget_s: expected a number at least 0, found '-1'"),
        (
            LADDER + "step_down_on = warm\n",
            "3: [task plan] step_down_on: expected some of cold, full, down, context, separated by commas, "
            "found 'warm'",
        ),
        ("[task plan]\nmodels = a || b\n", "2: [task plan] models: expected names separated by |, found 'a || b'"),
        ("[task plan]\nmodels = a | A:latest\n", "2: [task plan] models: A:latest stands there twice"),
        (f"[task plan]\nmodels = {'|'.join('abcdefghi')}\n", "2: [task plan] models: more than 8 models"),
        (LADDER + "[task Plan]\nmodels = x\n", "3: [task Plan]: it is [task plan], as case does not count: rename one"),
        (
            LADDER + "[model task:plan]\nfile = /m.gguf\n",
            "3: [model task:plan]: it has the name of [task plan]",
        ),
        (
            LADDER + "[tenant acme]\nmodels = small, task:plan\n",
            "4: [tenant acme] models: task:plan is a task: who may use its models may use it, so name those",
        ),
    ],
)
def test_what_is_wrong_with_a_task_is_told_with_its_place(text: str, said: str) -> None:
    assert wrong(text) == [said]


@pytest.mark.parametrize(
    ("aliases", "ladder", "said"),
    [
        ("", "large | task:plan", "4: [task plan] models: task:plan is no rung of a task: name models"),
        ("", "task:other | small", "4: [task plan] models: task:other is no rung of a task: name models"),
        (
            "fast = task:plan",
            "large | Fast",
            "4: [task plan] models: Fast leads to task:plan: a task is no rung of a task",
        ),
        ("fast = task:none", "a", "2: [inference] aliases: fast leads to task:none: there is no such task"),
        ("fast = task:plan | b", "a", "2: [inference] aliases: fast: an alias of a task has no other target"),
        ("task:plan = b", "a", "2: [inference] aliases: task:plan is the name of [task plan]"),
    ],
)
def test_no_ladder_leads_into_itself(aliases: str, ladder: str, said: str) -> None:
    """LiteLLM and its kind follow fallbacks of fallbacks until a counter stops them."""
    assert wrong(f"[inference]\naliases = {aliases}\n[task plan]\nmodels = {ladder}\n") == [said]


def test_an_alias_may_lead_to_a_task_and_a_rung_may_be_an_alias_of_models() -> None:
    aliases = "gpt-4 = task:plan, fast = small | tiny"
    text = f"[inference]\naliases = {aliases}\n[task plan]\nmodels = large | fast\n"
    assert load_text(text, env={}).settings.tasks["plan"].models == "large | fast"


def test_a_task_is_edited_by_its_name_also_one_with_dots() -> None:
    name = name_of("task plan.v2.budget_s")
    assert name == Name("task plan.v2", "budget_s")
    row = row_of(name)
    assert row is not None
    assert row.variables == []
    assert with_value("[task plan.v2]\nmodels = a\n", name, "9") == "[task plan.v2]\nmodels = a\nbudget_s = 9\n"
