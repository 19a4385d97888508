"""The part of the API about tasks: ladders of models that requests ask for by one name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response

from hive.api.params import Text, named
from hive.api.responses import as_json
from hive.api.routes import RouteRow
from hive.domain import Role
from hive.shapes.tasks import TaskRouteView, Tasks, TaskView

if TYPE_CHECKING:
    from hive.api.services import Services

VIEWER = Role.VIEWER
AGENT = Text("agent", "For a request of this agent, by id or name; without it of an operator.")


class TasksApi:
    """The handlers. No model is asked for any of them, and none is loaded."""

    def __init__(self, services: Services) -> None:
        self._services = services

    def rows(self) -> list[RouteRow]:
        one = "/api/tasks/{task}"
        return [
            RouteRow("GET", "/api/tasks", VIEWER, "tasks", self.all, "Every task, and what answers it now.", Tasks),
            RouteRow("GET", one, VIEWER, "task", self.one, "One task, and how each of its models is.", TaskView),
            RouteRow(
                "GET",
                f"{one}/route",
                VIEWER,
                "task_route",
                self.route,
                "Which model a request for a task would be given now, and why.",
                TaskRouteView,
                query=(AGENT,),
            ),
        ]

    async def all(self, _: Request) -> Response:
        """As an operator would be served: what agents may use, their tenants decide (`route`)."""
        return as_json(await self._services.tasks.all())

    async def one(self, request: Request) -> Response:
        """The name may have `task:` before it."""
        return as_json(await self._services.tasks.one(named(request, "task")))

    async def route(self, request: Request) -> Response:
        """The proxy looks its rungs up as for a request: what it would refuse is refused here, in full words."""
        return as_json(await self._services.tasks.route(named(request, "task"), AGENT.of(request)))
