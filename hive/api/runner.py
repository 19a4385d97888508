"""The runner API: the paths, names and codes that clients of a model runner know (docs/runner.md).

They are ordinary rows of this API; the proxy relays them from the runner's listener. Members are in camelCase, and an
error is an object `error` with a `code` and a `message`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from hive.api.caller import actor, note
from hive.api.op_token import approved_body
from hive.api.order_audit import NAME_MAX
from hive.api.params import body_of, named
from hive.api.responses import as_json
from hive.api.routes import LeadsTo, RouteRow
from hive.domain import Role
from hive.lifecycle.runner import LoadWish, Ordered
from hive.models.cache_epochs import FlushKind, flush_scope
from hive.shapes.runner import Flushed, LoadTask, Runner, RunnerHealth, Unloaded

if TYPE_CHECKING:
    from hive.api.services import Services

VIEWER, OPERATOR = Role.VIEWER, Role.OPERATOR
CACHE = "private, max-age={seconds}"
OpToken = str | dict[str, Any] | None
Named = Annotated[str, Meta(min_length=1, max_length=NAME_MAX)]


class LoadOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`modelId`: an entry's name, or a model that the server in use has; never a path. `quantization`: picks its
    variant. `maxContextLength`: tokens, at most those it is described with. `gpuMemoryBudgetMB`: refused where the
    model takes more. `evictModel`: leaves first, and comes back where the load fails. `verifiedOpToken`: the signers'
    word."""

    modelId: Named
    quantization: Named | None = None
    maxContextLength: Annotated[int, Meta(ge=1)] | None = None
    gpuMemoryBudgetMB: Annotated[int, Meta(ge=0)] | None = None
    evictModel: Named | None = None
    verifiedOpToken: OpToken = None


class UnloadModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`force`: also where it is pinned, and requests that have not ended in time are cut."""

    modelId: Named
    force: bool = False
    verifiedOpToken: OpToken = None


class RunnerFlush(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`scope` says which of the other members is needed: `tenantId`, `modelId` or `tag`; none for `all`."""

    scope: FlushKind
    tenantId: Named | None = None
    modelId: Named | None = None
    tag: Annotated[str, Meta(min_length=1, max_length=64)] | None = None
    verifiedOpToken: OpToken = None


class RunnerApi:
    """The handlers."""

    def __init__(self, services: Services) -> None:
        self._services = services

    def rows(self) -> list[RouteRow]:
        load = "/v1/models/load"
        return [
            RouteRow(
                "GET",
                "/v1/capabilities",
                VIEWER,
                "capabilities",
                self.capabilities,
                "What this runner can do, and how it is.",
                Runner,
            ),
            RouteRow(
                "POST",
                load,
                OPERATOR,
                "runner_load",
                self.load,
                "Load a model.",
                LoadTask,
                body=LoadOrder,
                statuses=(202,),
                errors=(404, 501, 502, 504),
                leads_to=LeadsTo(f"{load}/{{taskId}}", {"taskId": "/taskId"}),
            ),
            RouteRow(
                "GET", f"{load}/{{taskId}}", VIEWER, "runner_load_task", self.load_task, "How a load is.", LoadTask
            ),
            RouteRow(
                "POST",
                "/v1/models/unload",
                OPERATOR,
                "runner_unload",
                self.unload,
                "Unload a model.",
                Unloaded,
                body=UnloadModel,
                errors=(404, 501, 502, 504),
            ),
            RouteRow(
                "POST",
                "/v1/cache/flush",
                OPERATOR,
                "runner_flush",
                self.flush,
                "Forget prompts that the servers keep.",
                Flushed,
                statuses=(200, 202),
                body=RunnerFlush,
                errors=(404, 501, 502, 504),
            ),
            RouteRow(
                "GET", "/health", VIEWER, "runner_health", self.health, "Whether requests are served.", RunnerHealth
            ),
        ]

    async def capabilities(self, _: Request) -> Response:
        """At most 5 s old. What is not known is left out. 503 while Hive starts or stops."""
        found, left_s = await self._services.runner.capabilities()
        answer = as_json(found)
        answer.headers["cache-control"] = CACHE.format(seconds=int(left_s))
        return answer

    async def load(self, request: Request) -> Response:
        """Always 202: the task is asked after, and may be completed already. Nothing is downloaded."""
        order = body_of(request, LoadOrder)
        note(request, model=order.modelId, evicts=order.evictModel or "")
        wish = LoadWish(
            order.modelId, order.quantization, order.maxContextLength, order.gpuMemoryBudgetMB, order.evictModel
        )
        task = await self._services.runner.load(wish, await self._ordered(request, "model-load"))
        return as_json(task, status=202)

    async def load_task(self, request: Request) -> Response:
        """Answered for ever, also after a restart of Hive."""
        return as_json(await self._services.runner.task(named(request, "taskId")))

    async def unload(self, request: Request) -> Response:
        """Answers once the model has left. Its requests end first; where they do not, it stays, and 409 is answered,
        unless `force`."""
        order = body_of(request, UnloadModel)
        note(request, model=order.modelId, force=order.force)
        ordered = await self._ordered(request, "model-unload")
        return as_json(await self._services.runner.unload(order.modelId, ordered, force=order.force))

    async def flush(self, request: Request) -> Response:
        """Nothing that was kept before is used again once it is flushed; requests that run go on, and 202 is answered
        where they are waited for longer than 5 s."""
        order = body_of(request, RunnerFlush)
        scope = flush_scope(order.scope, model=order.modelId, tenant=order.tenantId, tag=order.tag)
        note(request, scope=str(scope)[:NAME_MAX])
        told = await self._services.runner.flush(scope, await self._ordered(request, "cache-flush"))
        return as_json(told, status=200 if told["flushed"] else 202)

    async def health(self, _: Request) -> Response:
        """503 where no request would be served: all loads have failed, memory was not enough, the queue is full."""
        return as_json(await self._services.runner.health())

    async def _ordered(self, request: Request, operation: str) -> Ordered:
        """The caller, with the approval of the members of the body but the token."""
        _, approval = await approved_body(self._services, request, operation)
        return Ordered(actor(request), approval)
