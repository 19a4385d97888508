"""The part of the API that is about the whole: the inference server, usage, the audit table, the host."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from hive.api.caller import SOCKET, actor, note, origin
from hive.api.op_token import approved
from hive.api.order_audit import NAME_MAX
from hive.api.params import Number, Span, Text, WordParam, body_of
from hive.api.responses import as_json, as_text, job_begun
from hive.api.routes import METRICS, TEXT, LeadsTo, RouteRow
from hive.backends.ask import without_secrets
from hive.control import views
from hive.domain import By, Role
from hive.errors import NotPermitted
from hive.host import memory
from hive.host.process import program_of
from hive.shapes.prompts import Prompts
from hive.shapes.system import (
    Access,
    AuditPage,
    Backends,
    Gpus,
    Health,
    Inference,
    Job,
    Memory,
    Shutdown,
)
from hive.shapes.usage import BudgetList, InferenceStats, Stats, Usage
from hive.store.audit import Filter
from hive.store.usage import UsageFilter

if TYPE_CHECKING:
    from hive.api.services import Services

MOST_ID = 999_999_999_999_999
VIEWER, OPERATOR, ADMIN = Role.VIEWER, Role.OPERATOR, Role.ADMIN

SINCE = Span("since", "How far back.", default="24h")
BY = WordParam("by", "What is added up.", words=tuple(By), default=By.AGENT)
AGENT = Text("agent", "Of this agent alone, by name or id.")
TENANT = Text("tenant", "Of this tenant alone.")
MODEL = Text("model", "Of this model alone.")
BACKEND = Text("backend", "Of this kind; else of the one in use.")
LOG_LINES = Number("tail", "So many of the last lines.", default=100, most=10_000)
AUDIT_LIMIT = Number("limit", "So many rows.", default=100, least=1, most=1000)
AUDIT_SINCE = Span("since", "How far back; without it from the beginning.")
BEFORE = Number("before", "Rows older than the one with this id; 0: the newest.", default=0, most=MOST_ID)
ACTOR = Text("actor", "Ordered by this one, as `uid:0`, or by the name a user had then.")
ACT = Text("act", "Of this act; `order.*` is all that begin so.")


class SwitchOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`backend`: a kind of server, or an address like `http://127.0.0.1:8000`."""

    backend: str


class BoxApi:
    """The handlers."""

    def __init__(self, services: Services) -> None:
        self._services = services

    def rows(self) -> list[RouteRow]:
        system = "/api/system"
        return [
            RouteRow("GET", "/api/health", VIEWER, "health", self.health, "How Hive is, and what is wrong.", Health),
            RouteRow(
                "GET",
                "/api/usage",
                VIEWER,
                "usage",
                self.usage,
                "What was used, added up.",
                Usage,
                query=(SINCE, BY, AGENT, TENANT, MODEL),
                errors=(404,),
            ),
            RouteRow(
                "GET",
                "/api/budgets",
                VIEWER,
                "budgets",
                self.budgets,
                "Budgets of tokens, and what is left.",
                BudgetList,
            ),
            RouteRow("GET", "/api/stats", VIEWER, "stats", self.stats, "Counts since the daemon started.", Stats),
            RouteRow("GET", "/metrics", Role.SCRAPER, "metrics", self.metrics, "For Prometheus.", METRICS),
            RouteRow(
                "GET",
                "/api/audit",
                OPERATOR,
                "audit",
                self.audit,
                "Who did what.",
                AuditPage,
                query=(AGENT, ACTOR, ACT, AUDIT_SINCE, BEFORE, AUDIT_LIMIT),
            ),
            RouteRow(
                "GET",
                f"{system}/inference",
                VIEWER,
                "inference",
                self.inference,
                "The inference server in use.",
                Inference,
            ),
            RouteRow(
                "POST",
                f"{system}/inference",
                ADMIN,
                "switch",
                self.switch,
                "Change to another inference server.",
                Job,
                body=SwitchOrder,
                statuses=(200, 202),
                errors=(501,),
                leads_to=LeadsTo("/api/jobs/{id}", {"id": "/id"}),
                is_governed=True,
            ),
            RouteRow(
                "GET",
                f"{system}/inference/stats",
                VIEWER,
                "inference_stats",
                self.inference_stats,
                "What it does.",
                InferenceStats,
            ),
            RouteRow("GET", "/api/prompts", VIEWER, "prompts", self.prompts, "System prompts: who has them.", Prompts),
            RouteRow(
                "GET",
                f"{system}/backends",
                VIEWER,
                "backends",
                self.backends,
                "Inference servers there are.",
                Backends,
                errors=(504,),
            ),
            RouteRow(
                "GET",
                f"{system}/backends/logs",
                OPERATOR,
                "backend_log",
                self.backend_log,
                "What one wrote.",
                TEXT,
                query=(BACKEND, LOG_LINES),
                errors=(404, 501, 504),
            ),
            RouteRow(
                "GET",
                f"{system}/access",
                OPERATOR,
                "access",
                self.access,
                "How an operator reaches the model.",
                Access,
                is_secret=True,
            ),
            RouteRow("GET", f"{system}/memory", VIEWER, "memory", self.memory, "The host's memory.", Memory),
            RouteRow("GET", f"{system}/gpus", VIEWER, "gpus", self.gpus, "The host's GPUs.", Gpus),
            RouteRow("POST", f"{system}/shutdown", ADMIN, "shutdown", self.shutdown, "Stop every agent.", Shutdown),
        ]

    async def health(self, _: Request) -> Response:
        return as_json(self._services.health.view())

    async def usage(self, request: Request) -> Response:
        of = UsageFilter(agent=AGENT.of(request), tenant=TENANT.of(request), model=MODEL.of(request))
        return as_json(await self._services.usage.spent(SINCE.of(request) or 0.0, By(BY.of(request)), of))

    async def budgets(self, _: Request) -> Response:
        return as_json(await self._services.budgets.view())

    async def stats(self, _: Request) -> Response:
        return as_json(self._services.counters.answer(len(self._services.roster)))

    async def metrics(self, _: Request) -> Response:
        """Those of the daemon and of the proxy; docs/metrics.md says what they are. A proxy that does not answer within
        a second is left out, and `hive_up` says so."""
        return Response(await self._services.scraper.scrape(), media_type=METRICS)

    async def inference(self, _: Request) -> Response:
        services, job = self._services, self._services.switcher.job
        switch = None if job is None else views.job_view(job, time.time())
        return as_json(
            views.inference_view(
                services.effects.backend,
                services.effects.models,
                services.settings,
                switch,
                services.speculation.view(),
            )
        )

    async def inference_stats(self, _: Request) -> Response:
        return as_json(await self._services.usage.inference())

    async def switch(self, request: Request) -> Response:
        """A job, 202 while it runs. Requests for the model wait meanwhile; where the new server does not come up, the
        old one is back in force when the job has failed."""
        order = body_of(request, SwitchOrder)
        note(request, backend=without_secrets(order.backend)[:NAME_MAX])
        approval = await approved(self._services, request, "backend-switch", {"backend": order.backend})
        return job_begun(await self._services.switcher.begin(order.backend, actor(request), approval=approval))

    async def prompts(self, _: Request) -> Response:
        return as_json(self._services.prewarmer.view())

    async def backends(self, _: Request) -> Response:
        active, found = self._services.active.target, await self._services.switcher.listed()
        return as_json({"backends": [views.choice_view(choice, in_use=choice.target == active) for choice in found]})

    async def backend_log(self, request: Request) -> Response:
        return as_text(await self._services.switcher.log(BACKEND.of(request) or "", LOG_LINES.of(request)))

    async def access(self, request: Request) -> Response:
        """On the unix socket alone: the token in it is nobody's own, and stays good for a user that has lost access.
        Over TCP an agent's tokens lead to the model."""
        if origin(request) != SOCKET:
            raise NotPermitted(
                "Hive's own token is handed out on the unix socket alone: nobody can take it back from who has it",
                hint="on the box: hive run MODEL; from elsewhere an agent's token: GET /api/agents/{ref}/tokens",
            )
        return as_json(views.access_view(self._services.proxy_link.known_port, self._services.internal_token))

    async def memory(self, _: Request) -> Response:
        return as_json(views.memory_view(memory.read_memory(), memory.read_pressure(), memory.read_zrams()))

    async def gpus(self, _: Request) -> Response:
        return as_json(views.gpus_view(await self._services.gpus.seen(), program_of))

    async def shutdown(self, request: Request) -> Response:
        """Ends the agents as `hive up` and the service do before they end: callers are refused from now on."""
        return as_json(await self._services.agents.shutdown(actor(request)))

    async def audit(self, request: Request) -> Response:
        since_s, agent = AUDIT_SINCE.of(request), (AGENT.of(request) or "")[:NAME_MAX]
        asked = Filter(
            agent=tuple({word for word in (agent, *self._services.roster.identified(agent)) if word}),
            actor=(ACTOR.of(request) or "")[:NAME_MAX],
            act=(ACT.of(request) or "")[:NAME_MAX],
            since=None if since_s is None else time.time() - since_s,
            before=BEFORE.of(request) or None,
        )
        limit = AUDIT_LIMIT.of(request)
        found = await self._services.audit_log.page(asked, limit)
        return as_json(
            {
                "rows": [views.audit_view(entry) for entry in found],
                "next": found[-1].id if len(found) == limit else None,
            }
        )
