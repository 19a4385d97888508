"""The part of the API about governance: who has to say yes to what."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response

from hive.api.responses import as_json
from hive.api.routes import RouteRow
from hive.domain import Role
from hive.shapes.governance import GovernanceView

if TYPE_CHECKING:
    from hive.api.services import Services


class GovernanceApi:
    """The handler."""

    def __init__(self, services: Services) -> None:
        self._services = services

    def rows(self) -> list[RouteRow]:
        path = "/api/governance"
        says = "Who has to say yes to what."
        return [RouteRow("GET", path, Role.VIEWER, "governance", self.governance, says, GovernanceView)]

    async def governance(self, _: Request) -> Response:
        """The rules as the file has them now. Keys are public halves."""
        return as_json(self._services.governance.view())
