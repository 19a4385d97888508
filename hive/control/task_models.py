"""The model of a task for an agent that has not asked yet: the rung that a request of its own would be given. Pure."""

from __future__ import annotations

from collections.abc import Callable

from hive.models.names import spelled
from hive.models.task_names import task_names
from hive.pool.ladder import LadderCaller, NoRung, RungFacts, RungState, Task, choose_rung, task_of
from hive.settings.table import Settings

UNKNOWN_THERE = "there is none for it"


def task_named(settings: Settings, asked: str) -> Task | None:
    """The task that a name leads to, its own or an alias of `[inference]`; None where it leads to none.

    >>> from hive.settings.table import InferenceSection
    >>> from hive.settings.tasks import TaskRow
    >>> aliases = InferenceSection(aliases="gpt-4 = task:plan")
    >>> settings = Settings(tasks={"Plan": TaskRow(models="large | small")}, inference=aliases)
    >>> [task and task.rungs for task in (task_named(settings, name) for name in ("task:plan", "GPT-4", "large"))]
    [('large', 'small'), ('large', 'small'), None]
    """
    name = task_names(settings).get(spelled(asked))
    return None if name is None else task_of(name, settings.tasks[name])


def rung_for(task: Task, given: Callable[[str], str], is_cold: Callable[[str], bool]) -> str:
    """The rung, as the ladder names it: the one that is chosen now, the first that it may use where a request would
    wait or be refused, empty where it may use none. `given`: the model that a name gives this agent, empty for none.

    >>> task = Task("plan", ("none", "large", "small"))
    >>> models = {"large": "large", "small": "small"}
    >>> rung_for(task, lambda name: models.get(name, ""), lambda model: False)
    'large'
    >>> rung_for(task, lambda name: models.get(name, ""), lambda model: model == "large")
    'small'
    >>> rung_for(task, lambda name: models.get(name, ""), lambda model: True)
    'large'
    >>> rung_for(task, lambda name: "", lambda model: False)
    ''
    """
    facts = [_facts(rung, given(rung), is_cold) for rung in task.rungs]
    choice = choose_rung(task, LadderCaller(), facts, 0.0)
    if not isinstance(choice, NoRung):
        return task.rungs[choice.index]
    return "" if choice.index is None else task.rungs[choice.index]


def _facts(rung: str, model: str, is_cold: Callable[[str], bool]) -> RungFacts:
    if not model:
        return RungFacts(rung, refused=UNKNOWN_THERE, expected_s=None)
    return RungFacts(rung, RungState.COLD if is_cold(model) else RungState.READY, expected_s=None)
