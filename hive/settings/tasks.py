"""The settings of tasks: `[task NAME]`, one for each, and what is wrong with their ladders. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, NamedTuple

import msgspec

from hive.settings.meta import setting_meta as _s

PREFIX = "task:"
"""A request for `task:NAME` asks for what the task's list has."""
RUNGS_MAX = 8
NO_TASK = "a task's name is a letter or digit, then up to 63 of A-Z, a-z, 0-9 and . _ -"
TASK_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
CAUSES = ("cold", "full", "down", "context")
_CAUSE = "|".join(CAUSES)


class TaskRow(msgspec.Struct, frozen=True, kw_only=True):
    """`[task NAME]`: the models that answer requests for `task:NAME`, the preferred one first."""

    models: Annotated[
        str,
        _s(
            "The ladder: models, or aliases of one, separated by `|`; the first is the preferred one.",
            pattern=r"^ *[^|, ][^|,]*(\|[^|,]*[^|, ][^|,]*)*$|^$",
            expected="names separated by |",
        ),
    ] = ""
    pin_primary: Annotated[bool, _s("Never another model because the first one is not loaded: it is waited for.")] = (
        False
    )
    budget_s: Annotated[
        float, _s("All of a request may take so long: place, load and answer; 0: no limit of its own.", unit="s", ge=0)
    ] = 0
    keep_alive_s: Annotated[
        float,
        _s("The model that answered is kept so long after its last answer; never shorter for it.", unit="s", ge=0),
    ] = 0
    step_down_on: Annotated[
        str,
        _s(
            "What makes a request go on to the next model, separated by commas; empty: nothing.",
            pattern=rf"^( *({_CAUSE}) *(, *({_CAUSE}) *)*)?$",
            expected=f"some of {', '.join(CAUSES)}, separated by commas",
        ),
    ] = ",".join(CAUSES)
    hold_s: Annotated[
        float, _s("An agent stays so long with the model it was given, while that is ready.", unit="s", ge=0)
    ] = 60


def items_of(text: str, separator: str) -> tuple[str, ...]:
    """
    >>> items_of(" a | b ", "|")
    ('a', 'b')
    """
    return tuple(item for part in text.split(separator) if (item := part.strip()))


def folded(name: str) -> str:
    """A name of a task or alias, so that those that mean the same are equal.

    >>> folded(" Task:Plan ")
    'task:plan'
    """
    return name.strip().lower().removesuffix(":latest")


class WrongTask(NamedTuple):
    """A fault: the section, the key (empty for all of it), and a clause that says it."""

    section: str
    key: str
    what: str


def wrong_tasks(
    tasks: Mapping[str, str], aliases: str, *, models: Sequence[str] = (), tenants: Mapping[str, str] | None = None
) -> Iterator[WrongTask]:
    """Finds the faults of the tasks, by name their ladders, beside these aliases, models and tenants' lists of models.

    A rung is a model or an alias of models, never a task, so that no ladder leads into itself.

    >>> [wrong.what for wrong in wrong_tasks({"plan": "fast | task:plan"}, "fast = task:plan")]
    ['fast leads to task:plan: a task is no rung of a task', 'task:plan is no rung of a task: name models']
    """
    names: dict[str, str] = {}
    for name in tasks:
        if (first := names.setdefault(folded(PREFIX + name), name)) != name:
            yield WrongTask(f"task {name}", "", f"it is [task {first}], as case does not count: rename one")
    leads = _to_tasks(aliases)
    for name, ladder in tasks.items():
        yield from _wrong_ladder(name, items_of(ladder, "|"), leads)
    for alias, targets in leads.items():
        for target in targets:
            if folded(target).startswith(PREFIX) and folded(target) not in names:
                yield WrongTask("inference", "aliases", f"{alias} leads to {target}: there is no such task")
        if len(targets) > 1:
            yield WrongTask("inference", "aliases", f"{alias}: an alias of a task has no other target")
    for item in items_of(aliases, ","):
        if (key := folded(item.partition("=")[0])) in names:
            yield WrongTask("inference", "aliases", f"{key} is the name of [task {names[key]}]")
    for model in models:
        if (key := folded(model)) in names:
            yield WrongTask(f"model {model}", "", f"it has the name of [task {names[key]}]")
    for tenant, listed in (tenants or {}).items():
        found = next((item for item in items_of(listed, ",") if folded(item) in names), "")
        if found:
            what = f"{found} is a task: who may use its models may use it, so name those"
            yield WrongTask(f"tenant {tenant}", "models", what)


def _wrong_ladder(name: str, rungs: Sequence[str], leads: Mapping[str, tuple[str, ...]]) -> Iterator[WrongTask]:
    section = f"task {name}"
    if not rungs:
        yield WrongTask(section, "", "models is missing: the models that answer it, separated by |")
    if len(rungs) > RUNGS_MAX:
        yield WrongTask(section, "models", f"more than {RUNGS_MAX} models")
    for number, rung in enumerate(rungs):
        key = folded(rung)
        if key.startswith(PREFIX):
            yield WrongTask(section, "models", f"{rung} is no rung of a task: name models")
        elif key in leads:
            yield WrongTask(section, "models", f"{rung} leads to {leads[key][0]}: a task is no rung of a task")
        elif key in (folded(other) for other in rungs[:number]):
            yield WrongTask(section, "models", f"{rung} stands there twice")


def _to_tasks(aliases: str) -> dict[str, tuple[str, ...]]:
    """The aliases with a task among their targets, folded, and all their targets.

    >>> _to_tasks("GPT-4 = task:plan, fast = tiny")
    {'gpt-4': ('task:plan',)}
    """
    found: dict[str, tuple[str, ...]] = {}
    for item in items_of(aliases, ","):
        alias, _, targets = item.partition("=")
        found[folded(alias)] = found.get(folded(alias), ()) + items_of(targets, "|")
    return {
        alias: targets
        for alias, targets in found.items()
        if any(folded(target).startswith(PREFIX) for target in targets)
    }
