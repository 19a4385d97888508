"""The part of the API about the pool: what is loaded and why, orders to load and unload, logs of its servers."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from hive.api.caller import actor, note
from hive.api.models import JOB
from hive.api.op_token import approved
from hive.api.params import Number, WordParam, body_of, named
from hive.api.responses import as_json, as_text, job_begun
from hive.api.routes import TEXT, RouteRow
from hive.audit.approval import Approval
from hive.domain import Band, Role
from hive.errors import NotFound
from hive.shapes.pool import PoolExplanation, PoolSlot, PoolView
from hive.shapes.system import Job

if TYPE_CHECKING:
    from hive.api.services import Services

VIEWER, OPERATOR = Role.VIEWER, Role.OPERATOR

BAND = WordParam("band", "For a request of this band.", words=tuple(Band), default=Band.NORMAL)
LINES = Number("lines", "So many of the last lines.", default=100, most=10_000)


class UnloadOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`force`: also where it is pinned, which ends the pin."""

    force: bool = False


class PoolApi:
    """The handlers. What has a `/` in its name is quoted twice in a path, as `/api/models/meta%252Fx/load`."""

    def __init__(self, services: Services) -> None:
        self._services = services

    def rows(self) -> list[RouteRow]:
        one = "/api/models/{model}"
        return [
            RouteRow("GET", "/api/pool", VIEWER, "pool", self.pool, "What is loaded, and why.", PoolView),
            RouteRow(
                "GET",
                "/api/pool/models/{model}/explain",
                VIEWER,
                "explain_model",
                self.explain,
                "Why a model is where it is, and how long a request for it would wait.",
                PoolExplanation,
                query=(BAND,),
            ),
            RouteRow(
                "POST",
                f"{one}/load",
                OPERATOR,
                "load_model",
                self.load,
                "Load a model.",
                Job,
                statuses=(200, 202),
                errors=(501,),
                leads_to=JOB,
                is_governed=True,
            ),
            RouteRow(
                "POST",
                f"{one}/unload",
                OPERATOR,
                "unload_model",
                self.unload,
                "Unload a model.",
                Job,
                body=UnloadOrder,
                may_be_empty=True,
                statuses=(200, 202),
                errors=(501,),
                leads_to=JOB,
                is_governed=True,
            ),
            RouteRow(
                "POST",
                f"{one}/pin",
                OPERATOR,
                "pin_model",
                self.pin,
                "Keep a model loaded.",
                PoolSlot,
                is_governed=True,
            ),
            RouteRow(
                "POST", f"{one}/unpin", OPERATOR, "unpin_model", self.unpin, "End that.", PoolSlot, is_governed=True
            ),
            RouteRow(
                "GET",
                f"{one}/log",
                OPERATOR,
                "model_log",
                self.log,
                "What its server wrote.",
                TEXT,
                query=(LINES,),
                errors=(504,),
            ),
        ]

    async def pool(self, _: Request) -> Response:
        """`enabled` is false, and `why_not` says why, where no model is described: then the one inference server in use
        has them all."""
        await self._services.pool.refresh()
        return as_json(self._services.pool.view())

    async def explain(self, request: Request) -> Response:
        return as_json(self._services.pool.explain(self._meant(request), Band(BAND.of(request))))

    async def load(self, request: Request) -> Response:
        """A job, 202 while it runs; done at once where it is loaded. Others may have to leave for it, as for a request.
        A model that is none of the pool's is loaded by the inference server in use, where that can."""
        model, services = self._meant(request), self._services
        approval = await self._approved(request, "model-load")
        if self._is_pools(model):
            return job_begun(await services.pool.load(model, actor(request), approval=approval))
        return job_begun(await services.models.load(model, actor(request), approval=approval))

    async def unload(self, request: Request) -> Response:
        """A job, 202 while it runs: its requests in flight end first. A pinned one only with `force`."""
        order = body_of(request, UnloadOrder, empty=UnloadOrder())
        model, services = self._meant(request), self._services
        note(request, force=order.force)
        approval = await self._approved(request, "model-unload", **({"force": True} if order.force else {}))
        if self._is_pools(model):
            job = await services.pool.unload(model, actor(request), approval=approval, force=order.force)
            return job_begun(job)
        return job_begun(await services.models.unload(model, actor(request), approval=approval))

    async def _approved(self, request: Request, operation: str, **more: object) -> Approval:
        """The approval; signed is the name that was asked for."""
        return await approved(self._services, request, operation, {"modelId": named(request, "model"), **more})

    def _meant(self, request: Request) -> str:
        """The model that the path names, of the pool also by an alias of hive.conf."""
        model, services = named(request, "model"), self._services
        if services.pool.has(model):
            return model
        with suppress(NotFound):
            if services.pool.has(found := services.models.catalog.find(model).name):
                return found
        return model

    def _is_pools(self, model: str) -> bool:
        """Whether the pool is asked: without another server it is also the one that says what there is."""
        services = self._services
        return services.pool.has(model) or (services.active.control is None and services.pool.view()["enabled"])

    async def pin(self, request: Request) -> Response:
        """Of the pool's models. It is loaded now and stays, also over a restart of Hive."""
        approval = await self._approved(request, "model-pin")
        return as_json(await self._services.pool.pin(self._meant(request), actor(request), approval=approval))

    async def unpin(self, request: Request) -> Response:
        """It stays loaded until its memory is wanted."""
        approval = await self._approved(request, "model-unpin")
        return as_json(await self._services.pool.unpin(self._meant(request), actor(request), approval=approval))

    async def log(self, request: Request) -> Response:
        return as_text(await self._services.pool.log(self._meant(request), LINES.of(request)))
