"""The names that lead to a task: its own, and aliases of `[inference]`. Pure."""

from __future__ import annotations

from hive.models.names import spelled
from hive.settings.table import Settings
from hive.settings.tasks import PREFIX, items_of


def task_names(settings: Settings) -> dict[str, str]:
    """Each name as it is folded → the task's own, as `[task NAME]` has it; its own names first. Empty without tasks.

    >>> from hive.settings.table import InferenceSection
    >>> from hive.settings.tasks import TaskRow
    >>> aliases = InferenceSection(aliases="gpt-4 = task:plan, other = large")
    >>> task_names(Settings(tasks={"Plan": TaskRow(models="large | small")}, inference=aliases))
    {'task:plan': 'Plan', 'gpt-4': 'Plan'}
    """
    names = {spelled(PREFIX + name): name for name in settings.tasks}
    for item in items_of(settings.inference.aliases, ",") if names else ():
        alias, _, targets = item.partition("=")
        task = names.get(spelled(targets.strip()))
        if task is not None:
            names[spelled(alias)] = task
    return names
