"""The part of the API about templates: which there are, how they are, and a new process for one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response

from hive.api.caller import actor, note
from hive.api.params import named
from hive.api.responses import as_json
from hive.api.routes import LeadsTo, RouteRow
from hive.domain import Role
from hive.shapes.templates import TemplateList, TemplateView

if TYPE_CHECKING:
    from hive.api.services import Services

VIEWER, OPERATOR = Role.VIEWER, Role.OPERATOR


class TemplateApi:
    """The handlers."""

    def __init__(self, services: Services) -> None:
        self._services = services

    def rows(self) -> list[RouteRow]:
        one = "/api/templates/{template}"
        return [
            RouteRow(
                "GET", "/api/templates", VIEWER, "templates", self.templates, "Templates of agents.", TemplateList
            ),
            RouteRow(
                "GET",
                one,
                VIEWER,
                "template",
                self.template,
                "One template.",
                TemplateView,
                leads_to=LeadsTo(one, {"template": "/name"}),
            ),
            RouteRow(
                "POST",
                f"{one}/restart",
                OPERATOR,
                "restart_template",
                self.restart,
                "Start a template anew, for new agents.",
                TemplateView,
                errors=(501,),
            ),
        ]

    async def templates(self, _: Request) -> Response:
        """Those of hive.conf, and those that agents were forked from and that it describes no more."""
        return as_json(await self._services.templates.all())

    async def template(self, request: Request) -> Response:
        return as_json(await self._services.templates.one(named(request, "template")))

    async def restart(self, request: Request) -> Response:
        """The agents of the old process stay with it; new ones, and those that are started again, get the new one."""
        name = named(request, "template")
        view = await self._services.templates.restart(name, actor(request))
        note(request, state=view["state"])
        return as_json(view)
