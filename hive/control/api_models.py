"""The part of the API that is about models: what is there, who is given what, bringing and removing some."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from hive.control.answers import as_json
from hive.control.asked import Choice, Flag, Text, body_of, named
from hive.control.caller import actor, note
from hive.control.carrying import carried_through
from hive.control.desk import Desk
from hive.control.orders import NAME_MAX
from hive.control.pull_order import PullOrder
from hive.control.routes import LeadsTo, Row
from hive.control.shapes import Job, Route
from hive.control.shapes_models import ModelList, ModelView
from hive.domain import Role, Tier

VIEWER, OPERATOR, ADMIN = Role.VIEWER, Role.OPERATOR, Role.ADMIN

ASKED_MODEL = Text("model", "The model that is asked for.")
TIER = Choice("tier", "Of an agent of this tier.", words=tuple(Tier), default=Tier.MEDIUM)
TENANT = Text("tenant", "Of an agent of this tenant, with its limits; else of one without any.")
FORCE = Flag("force", "1: also where it is in use.")
JOB = LeadsTo("/api/jobs/{id}", {"id": "/id"})


class ModelApi:
    """The handlers. What has a `/` in its name is quoted twice in a path, as `/api/models/meta%252Fx`."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    def rows(self) -> list[Row]:
        models, one = "/api/models", "/api/models/{model}"
        return [
            Row("GET", models, VIEWER, self.models, "What the inference server offers.", ModelList),
            Row(
                *("POST", models, ADMIN, self.pull_model, "Bring a model.", Job),
                body=PullOrder,
                statuses=(200, 202),
                errors=(404, 501),
                leads_to=JOB,
            ),
            Row(
                *("GET", f"{models}/route", VIEWER, self.route, "Which model a request is given, and why.", Route),
                query=(ASKED_MODEL, TIER, TENANT),
            ),
            Row("POST", f"{models}/refresh", OPERATOR, self.refresh_models, "Ask what there is now.", ModelList),
            Row("GET", one, VIEWER, self.model, "Everything known of one model.", ModelView),
            Row(
                *("DELETE", one, ADMIN, self.remove_model, "Remove a model.", Job),
                query=(FORCE,),
                statuses=(200, 202),
                leads_to=JOB,
            ),
        ]

    async def models(self, _: Request) -> Response:
        """As it said last, which is at most `models_refresh_s` ago while it answers; `stale` says where it does not."""
        return as_json(await self._desk.models())

    async def model(self, request: Request) -> Response:
        return as_json(await self._desk.model(named(request, "model")))

    async def route(self, request: Request) -> Response:
        tier, tenant = Tier(TIER.of(request)), TENANT.of(request) or ""
        return as_json(self._desk.route(ASKED_MODEL.of(request) or "", tier, tenant))

    async def refresh_models(self, _: Request) -> Response:
        """However many ask at the same time, the server is asked once."""
        return as_json(await carried_through(self._desk.refresh_models()))

    async def pull_model(self, request: Request) -> Response:
        """A job, 202 while it runs. `model` is a name for Ollama to fetch, or the absolute path of a GGUF file or a
        directory as Hugging Face lays it out on this box, which is checked and copied to Hive's directory."""
        order = body_of(request, PullOrder)
        note(request, model=order.model[:NAME_MAX])
        return _of(await carried_through(self._desk.pull_model(order, actor(request))))

    async def remove_model(self, request: Request) -> Response:
        """A job, 202 while it runs: Ollama's own model, or what lies in Hive's directory. One that is in memory, or
        that a living agent names, only with `force`."""
        model, force = named(request, "model"), FORCE.of(request)
        return _of(await carried_through(self._desk.remove_model(model, force=force, actor=actor(request))))


def _of(job: Job) -> Response:
    return as_json(job, status=202 if job["state"] == "running" else 200)
