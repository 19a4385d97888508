"""Tasks as the API tells them: what hive.conf says of each, and what the proxy would do with a request now."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from hive.agents.roster import Roster
from hive.errors import NotFound, did_you_mean
from hive.link.proxy_link import ProxyGates
from hive.link.tasks import AskTasks, TaskRoute
from hive.settings.table import Settings
from hive.settings.tasks import PREFIX, items_of
from hive.shapes.tasks import RungView, TaskRouteView, Tasks, TaskView


class TaskReport:
    """Every question raises LinkLost, TimedOut where no proxy answers, unless there is no task at all."""

    def __init__(self, *, settings: Callable[[], Settings], roster: Roster, proxy_link: ProxyGates) -> None:
        self._settings = settings
        self._roster = roster
        self._proxy_link = proxy_link

    def __repr__(self) -> str:
        return f"<TaskReport of {len(self._settings().tasks)} tasks>"

    async def all(self) -> Tasks:
        """Every task, as an operator would be served."""
        if not self._settings().tasks:
            return {"tasks": []}
        told = await self._proxy_link.tasks(AskTasks())
        return {"tasks": [self._view(route) for route in told if route.name in self._settings().tasks]}

    async def one(self, name: str) -> TaskView:
        """Raises NotFound."""
        return self._view(await self._route(self._known(name), ""))

    async def route(self, name: str, agent: str | None) -> TaskRouteView:
        """The rung for a request of this agent (an id or a name; None: an operator). Raises NotFound."""
        known = self._known(name)
        life = None if agent is None else self._roster.find(agent)
        task = self._view(await self._route(known, "" if life is None else life.agent.id))
        return {"agent": None if life is None else life.agent.name, "task": task, "lines": lines_of(task)}

    def _known(self, name: str) -> str:
        tasks = self._settings().tasks
        wanted = name.removeprefix(PREFIX)
        for task in tasks:
            if task.lower() == wanted.lower():
                return task
        hint = did_you_mean(wanted, tasks) or ("hive task list shows them" if tasks else "hive.conf describes them")
        raise NotFound(f"there is no task {wanted[:64]!r}", hint=hint)

    async def _route(self, name: str, agent: str) -> TaskRoute:
        found = await self._proxy_link.tasks(AskTasks(agent=agent, task=name))
        if not found:
            raise NotFound(f"the proxy does not know the task {name}", hint="it reads hive.conf anew on a reload")
        return found[0]

    def _view(self, route: TaskRoute) -> TaskView:
        row = self._settings().tasks[route.name]
        rungs: list[RungView] = msgspec.to_builtins(route.rungs)
        return {
            "name": route.name,
            "asked_as": [PREFIX + route.name, *route.aliases],
            "pin_primary": row.pin_primary,
            "budget_s": row.budget_s,
            "keep_alive_s": row.keep_alive_s,
            "step_down_on": list(items_of(row.step_down_on, ",")),
            "hold_s": row.hold_s,
            "rungs": rungs,
            "rung": route.rung,
            "waits": route.waits,
            "why": route.why,
        }


def lines_of(task: TaskView) -> list[str]:
    """The decision in words, a line for each rung."""
    lines = []
    for index, rung in enumerate(task["rungs"]):
        name = rung["model"] if rung["served"] in ("", rung["model"]) else f"{rung['model']} ({rung['served']})"
        state = rung["refused"] or rung["lacks"] or rung["state"]
        if rung["expected_s"] and not rung["refused"]:
            state += f", expected in {rung['expected_s']:.0f} s"
        far = ", far" if rung["far"] else ""
        lines.append(f"{index}  {name}: {state}{far}")
    verb = "waits for" if task["waits"] else "takes"
    return [*lines, f"{verb} {'none' if task['rung'] is None else 'rung ' + str(task['rung'])}: {task['why']}"]
