"""The part of the API that is about requests under way and about settings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from hive.api.caller import actor, note
from hive.api.order_audit import NAME_MAX
from hive.api.params import body_of, named
from hive.api.responses import as_json
from hive.api.routes import RouteRow
from hive.control import request_views
from hive.domain import Role
from hive.shapes.system import CancelledRequest, Config, Queue, RequestView

if TYPE_CHECKING:
    from hive.control.services import Services

Changes = dict[str, bool | int | float | str | None]
"""`section.key` → its new value, None to take it back."""


class SteeringApi:
    """The handlers."""

    def __init__(self, services: Services) -> None:
        self._services = services

    def rows(self) -> list[RouteRow]:
        return [
            RouteRow(
                "GET",
                "/api/queue",
                Role.VIEWER,
                "queue",
                self.queue,
                "Who waits for the model, and who runs.",
                Queue,
                errors=(504,),
            ),
            RouteRow(
                "GET",
                "/api/requests/{id}",
                Role.VIEWER,
                "request",
                self.request,
                "One request, ended or not.",
                RequestView,
            ),
            RouteRow(
                "DELETE",
                "/api/requests/{id}",
                Role.OPERATOR,
                "cancel_request",
                self.cancel_request,
                "End a request that is under way.",
                CancelledRequest,
            ),
            RouteRow(
                "GET", "/api/config", Role.VIEWER, "config", self.config, "Every setting, as it is in force.", Config
            ),
            RouteRow(
                "PUT",
                "/api/config",
                Role.ADMIN,
                "change_config",
                self.change_config,
                "Change settings while Hive runs; null takes one back.",
                Config,
                body=Changes,
            ),
        ]

    async def queue(self, _: Request) -> Response:
        services = self._services
        return as_json(request_views.queue_view(await services.proxy_link.queue(), services.pool.progress))

    async def request(self, request: Request) -> Response:
        services = self._services
        return as_json(await services.usage.request(named(request, "id"), services.pool.progress))

    async def cancel_request(self, request: Request) -> Response:
        request_id = named(request, "id")
        await self._services.proxy_link.cancel(request_id)
        return as_json({"cancelled": request_id})

    async def config(self, _: Request) -> Response:
        return as_json({"settings": self._services.config.view()})

    async def change_config(self, request: Request) -> Response:
        changes: dict[str, Any] = body_of(request, Changes)
        note(request, settings=[f"{name}={value}"[:NAME_MAX] for name, value in changes.items()][:20])
        await self._services.config.change(changes, actor(request))
        return as_json({"settings": self._services.config.view()})
