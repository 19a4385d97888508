"""The part of the API about models: lists, routes and users of models, bringing and removing some."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response

from hive.api.caller import actor, note
from hive.api.order_audit import NAME_MAX
from hive.api.params import Flag, Text, WordParam, body_of, named
from hive.api.responses import as_json, job_begun
from hive.api.routes import LeadsTo, RouteRow
from hive.control.pull_order import PullOrder
from hive.domain import Role, Tier
from hive.shapes.models import DeployedModels, ModelList, ModelView
from hive.shapes.system import Job, Route

if TYPE_CHECKING:
    from hive.api.services import Services

VIEWER, OPERATOR, ADMIN = Role.VIEWER, Role.OPERATOR, Role.ADMIN

ASKED_MODEL = Text("model", "The model that is asked for.")
TIER = WordParam("tier", "Of an agent of this tier.", words=tuple(Tier), default=Tier.MEDIUM)
TENANT = Text("tenant", "Of an agent of this tenant, with its limits; else of one without any.")
FORCE = Flag("force", "1: also where it is in use.")
JOB = LeadsTo("/api/jobs/{id}", {"id": "/id"})


class ModelApi:
    """The handlers. What has a `/` in its name is quoted twice in a path, as `/api/models/meta%252Fx`."""

    def __init__(self, services: Services) -> None:
        self._services = services

    def rows(self) -> list[RouteRow]:
        models, one = "/api/models", "/api/models/{model}"
        return [
            RouteRow("GET", models, VIEWER, "models", self.models, "What the inference server offers.", ModelList),
            RouteRow(
                "POST",
                models,
                ADMIN,
                "pull_model",
                self.pull_model,
                "Bring a model.",
                Job,
                body=PullOrder,
                statuses=(200, 202),
                errors=(404, 501),
                leads_to=JOB,
            ),
            RouteRow(
                "GET",
                f"{models}/route",
                VIEWER,
                "route",
                self.route,
                "Which model a request is given, and why.",
                Route,
                query=(ASKED_MODEL, TIER, TENANT),
            ),
            RouteRow(
                "POST",
                f"{models}/refresh",
                OPERATOR,
                "refresh_models",
                self.refresh_models,
                "Ask what there is now.",
                ModelList,
            ),
            RouteRow(
                "GET",
                f"{models}/deployed",
                VIEWER,
                "deployed_models",
                self.deployed_models,
                "What was ordered to be loaded, and by whom.",
                DeployedModels,
            ),
            RouteRow("GET", one, VIEWER, "model", self.model, "Everything known of one model.", ModelView),
            RouteRow(
                "DELETE",
                one,
                ADMIN,
                "remove_model",
                self.remove_model,
                "Remove a model.",
                Job,
                query=(FORCE,),
                statuses=(200, 202),
                leads_to=JOB,
            ),
        ]

    async def models(self, _: Request) -> Response:
        """Lists the last answer of the server, at most `models_refresh_s` old while it answers; else see `stale`."""
        return as_json(await self._services.models.listed())

    async def model(self, request: Request) -> Response:
        return as_json(await self._services.models.view(named(request, "model")))

    async def route(self, request: Request) -> Response:
        tier, tenant = Tier(TIER.of(request)), TENANT.of(request) or ""
        return as_json(self._services.models.route(ASKED_MODEL.of(request) or "", tier, tenant))

    async def refresh_models(self, _: Request) -> Response:
        """Asks the server once, for any number of requests at the same time."""
        return as_json(await self._services.models.refresh())

    async def deployed_models(self, _: Request) -> Response:
        """A load by order, a pin and a switch of the inference server deploy a model, a load by order an adapter; an
        unload by order ends that. What was served of adapters when Hive ended is always served again."""
        services = self._services
        restore = services.effects.settings.registry.restore
        deployed = [*services.deployments.views(), *services.adapters.registry.views()]
        return as_json(DeployedModels(restore=restore, deployed=deployed))

    async def pull_model(self, request: Request) -> Response:
        """A job, 202 while it runs. `model` is a name for Ollama to fetch, or the absolute path of a GGUF file or a
        directory as Hugging Face lays it out on this box, which is checked and copied to Hive's directory."""
        order = body_of(request, PullOrder)
        note(request, model=order.model[:NAME_MAX])
        return job_begun(await self._services.models.pull(order, actor(request)))

    async def remove_model(self, request: Request) -> Response:
        """A job, 202 while it runs: Ollama's own model, or what lies in Hive's directory. One that is in memory, or
        that a living agent names, only with `force`."""
        model, force = named(request, "model"), FORCE.of(request)
        return job_begun(await self._services.models.remove(model, force=force, actor=actor(request)))
