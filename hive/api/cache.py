"""The part of the API about the prompt cache: what servers keep of prompts, shown and flushed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from hive.api.caller import actor, note
from hive.api.models import JOB
from hive.api.op_token import approved
from hive.api.order_audit import NAME_MAX
from hive.api.params import body_of
from hive.api.responses import as_json
from hive.api.routes import RouteRow
from hive.domain import Role
from hive.models.cache_epochs import FlushKind, flush_scope
from hive.shapes.cache import CacheFlush, CacheView

if TYPE_CHECKING:
    from hive.api.services import Services

Name = Annotated[str, Meta(min_length=1, max_length=NAME_MAX)] | None


class FlushOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """With a scope other than `all` the one name that belongs to it, and no other."""

    scope: FlushKind
    model: Name = None
    tenant: Name = None
    tag: Annotated[str, Meta(min_length=1, max_length=64, description="As in `X-Cache-Tag`.")] | None = None


class CacheApi:
    """The handlers."""

    def __init__(self, services: Services) -> None:
        self._services = services

    def rows(self) -> list[RouteRow]:
        return [
            RouteRow(
                "GET",
                "/api/cache",
                Role.VIEWER,
                "cache",
                self.show,
                "What is reused of prompts, and what was flushed.",
                CacheView,
            ),
            RouteRow(
                "POST",
                "/api/cache/flush",
                Role.OPERATOR,
                "flush_cache",
                self.flush,
                "Have nothing of earlier prompts used again.",
                CacheFlush,
                body=FlushOrder,
                statuses=(200, 202),
                errors=(404, 501, 502, 503, 504),
                leads_to=JOB,
                is_governed=True,
            ),
        ]

    async def show(self, _: Request) -> Response:
        """Counts are since the daemon started, of requests whose server told what it reused."""
        return as_json(await self._services.cache.view())

    async def flush(self, request: Request) -> Response:
        """Answered once nothing that was kept before is used again, or with 202 after 5 s: the job `id` goes on then,
        for as long as requests under way at a llama-server or at Ollama last. It ends no request."""
        order = body_of(request, FlushOrder)
        scope = flush_scope(order.scope, model=order.model, tenant=order.tenant, tag=order.tag)
        note(request, scope=str(scope)[:NAME_MAX])
        approval = await approved(self._services, request, "cache-flush", scope.params())
        came = await self._services.cache.flush(scope, actor=actor(request), approval=approval)
        return as_json(came.view(), status=200 if came.flushed else 202)
