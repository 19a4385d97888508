"""The tasks of the settings, as requests ask for them, and the rung that each agent was given last."""

from __future__ import annotations

from hive.models.names import spelled
from hive.models.task_names import task_names
from hive.pool.ladder import Task, task_of
from hive.settings.table import Settings
from hive.settings.tasks import PREFIX

PRUNED_AT = 4096
"""So many rungs of agents are remembered before those that are over are forgotten."""


class TaskTable:
    """`names`: every name that leads to a task, folded: its own and its aliases; empty where there is none.

    >>> from hive.settings.table import InferenceSection
    >>> from hive.settings.tasks import TaskRow
    >>> aliases = InferenceSection(aliases="gpt-4 = task:plan")
    >>> table = TaskTable(Settings(tasks={"plan": TaskRow(models="large | small")}, inference=aliases))
    >>> sorted(table.names), table.names["gpt-4"].rungs
    (['gpt-4', 'task:plan'], ('large', 'small'))
    """

    def __init__(self, settings: Settings) -> None:
        self.names: dict[str, Task] = {}
        self._held: dict[tuple[str, str], tuple[int, float]] = {}
        self._prune_at = PRUNED_AT
        self.use_settings(settings)

    def __repr__(self) -> str:
        return f"<TaskTable {len(self.names)} names>"

    @property
    def tasks(self) -> list[Task]:
        """Each once, in the order of hive.conf."""
        return [task for name, task in self.names.items() if name == spelled(PREFIX + task.name)]

    @property
    def listed(self) -> dict[str, tuple[str, ...]]:
        """The ladder of each, by the name that a list of models shows; an alias as it is folded."""
        own = {spelled(PREFIX + task.name): PREFIX + task.name for task in self.tasks}
        return {own.get(name, name): task.rungs for name, task in self.names.items()}

    def of(self, asked: str) -> Task | None:
        """The task that a name leads to; None where it leads to none."""
        return self.names.get(spelled(asked))

    def use_settings(self, settings: Settings) -> None:
        """Takes the tasks over; requests under way go on with what they began with."""
        tasks = {name: task_of(name, row) for name, row in settings.tasks.items()}
        self.names = {asked: tasks[name] for asked, name in task_names(settings).items()}
        self._held.clear()

    # the rung that an agent was given ---------------------------------------------------------------------------------

    def held_by(self, agent: str, task: Task) -> tuple[int | None, float]:
        """The rung, and until when the agent stays there; None where it was given none."""
        return self._held.get((agent, task.name), (None, 0.0))

    def gave(self, agent: str, task: Task, rung: int, now: float) -> None:
        """The agent was given a rung: the time for which it stays there begins, unless it has begun before."""
        before, until = self.held_by(agent, task)
        if before == rung and now < until:
            return
        if len(self._held) >= self._prune_at:
            self._held = {key: held for key, held in self._held.items() if held[1] > now}
            self._prune_at = max(PRUNED_AT, 2 * len(self._held))
        self._held[agent, task.name] = rung, now + task.hold_s
