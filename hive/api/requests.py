"""The part of the API that is about requests under way and about settings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from hive.api.caller import actor, note
from hive.api.order_audit import NAME_MAX
from hive.api.params import body_of, named
from hive.api.responses import as_json
from hive.api.routes import RouteRow
from hive.control import request_views
from hive.control.cloud import SETTING, word_of
from hive.domain import CloudUse, Role
from hive.shapes.system import CancelledRequest, CloudConfig, Config, Queue, RequestView

if TYPE_CHECKING:
    from hive.api.services import Services

Changes = dict[str, bool | int | float | str | None]
"""`section.key` → its new value, None to take it back."""


class CloudChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`allowCloudFallback`: whether a far model may stand in for the one that a request asks for."""

    allowCloudFallback: bool


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
            RouteRow(
                "GET",
                "/api/v1/config",
                Role.VIEWER,
                "cloud",
                self.cloud,
                "Whether a far model may stand in for the one asked for.",
                CloudConfig,
            ),
            RouteRow(
                "PUT",
                "/api/v1/config",
                Role.ADMIN,
                "change_cloud",
                self.change_cloud,
                "Let a far model stand in for the one asked for, or not.",
                CloudConfig,
                body=CloudChange,
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

    async def cloud(self, _: Request) -> Response:
        """`[inference] cloud` in the words of the original specification: true is `fallback`, false `asked` or
        `never`."""
        return as_json({"allowCloudFallback": self._services.effects.settings.inference.cloud == CloudUse.FALLBACK})

    async def change_cloud(self, request: Request) -> Response:
        """True is `fallback`, false is `asked`, until it is changed again; `PUT /api/config` can say `never`, which
        false leaves as it is. Tenants, agents and requests that are narrower stay so."""
        now = CloudUse(self._services.effects.settings.inference.cloud)
        word = word_of(body_of(request, CloudChange).allowCloudFallback, now)
        note(request, settings=[f"{SETTING}={word}"])
        await self._services.config.change({SETTING: str(word)}, actor(request))
        return await self.cloud(request)

    async def change_config(self, request: Request) -> Response:
        changes: dict[str, Any] = body_of(request, Changes)
        note(request, settings=[f"{name}={value}"[:NAME_MAX] for name, value in changes.items()][:20])
        await self._services.config.change(changes, actor(request))
        return as_json({"settings": self._services.config.view()})
