"""The part of the API that is about requests under way and about settings."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from hive.api.caller import actor, note
from hive.api.order_audit import NAME_MAX
from hive.api.params import body_of, named
from hive.api.responses import as_json
from hive.api.routes import RouteRow
from hive.control.desk import Desk
from hive.control.shielded import carried_through
from hive.domain import Role
from hive.shapes.system import CancelledRequest, Config, Queue, RequestView

Changes = dict[str, bool | int | float | str | None]
"""`section.key` → its new value, None to take it back."""


class SteeringApi:
    """The handlers."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    def rows(self) -> list[RouteRow]:
        return [
            RouteRow(
                "GET",
                "/api/queue",
                Role.VIEWER,
                self.queue,
                "Who waits for the model, and who runs.",
                Queue,
                errors=(504,),
            ),
            RouteRow("GET", "/api/requests/{id}", Role.VIEWER, self.request, "One request, ended or not.", RequestView),
            RouteRow(
                "DELETE",
                "/api/requests/{id}",
                Role.OPERATOR,
                self.cancel_request,
                "End a request that is under way.",
                CancelledRequest,
            ),
            RouteRow("GET", "/api/config", Role.VIEWER, self.config, "Every setting, as it is in force.", Config),
            RouteRow(
                "PUT",
                "/api/config",
                Role.ADMIN,
                self.change_config,
                "Change settings while Hive runs; null takes one back.",
                Config,
                body=Changes,
            ),
        ]

    async def queue(self, _: Request) -> Response:
        return as_json(await self._desk.queue())

    async def request(self, request: Request) -> Response:
        return as_json(await self._desk.request(named(request, "id")))

    async def cancel_request(self, request: Request) -> Response:
        return as_json(await carried_through(self._desk.cancel_request(named(request, "id"))))

    async def config(self, _: Request) -> Response:
        return as_json(self._desk.config())

    async def change_config(self, request: Request) -> Response:
        changes: dict[str, Any] = body_of(request, Changes)
        note(request, settings=[f"{name}={value}"[:NAME_MAX] for name, value in changes.items()][:20])
        return as_json(await carried_through(self._desk.change_config(changes, actor(request))))
