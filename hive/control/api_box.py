"""The part of the API that is about the whole: the inference server, usage, jobs, events, the audit table, the host."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from hive.control.answers import as_event, as_json, as_text
from hive.control.api_agents import TAIL_MAX, WAIT
from hive.control.asked import Choice, Flag, Number, Span, Text, body_of, named
from hive.control.caller import actor, note
from hive.control.carrying import carried_through, unless
from hive.control.desk import Answer, Desk
from hive.control.orders import NAME_MAX
from hive.control.routes import EVENTS, METRICS, TEXT, Row
from hive.domain import Role
from hive.exposition import CONTENT_TYPE
from hive.store.audit import Filter
from hive.store.usage import Asked, By

HEARTBEAT_S = 15.0
"""A comment this often keeps proxies and clients from taking a silent event stream for a dead one."""
MOST_ID = 999_999_999_999_999
VIEWER, OPERATOR, ADMIN = Role.VIEWER, Role.OPERATOR, Role.ADMIN

SINCE = Span("since", "How far back.", default="24h")
BY = Choice("by", "What is added up.", words=tuple(By), default=By.AGENT)
AGENT = Text("agent", "Of this agent alone, by name or id.")
TENANT = Text("tenant", "Of this tenant alone.")
MODEL = Text("model", "Of this model alone.")
BACKEND = Text("backend", "Of this kind; else of the one in use.")
LOG_LINES = Number("tail", "So many of the last lines.", default=100, most=10_000)
JOBS = Number("limit", "So many of the last ones.", default=20, most=1000)
PAST = Number("tail", "So many past events first.", default=20, most=TAIL_MAX)
FOLLOW = Flag("follow", "1: go on as things happen, until the daemon ends.")
AUDIT_LIMIT = Number("limit", "So many rows.", default=100, least=1, most=1000)
AUDIT_SINCE = Span("since", "How far back; without it from the beginning.")
BEFORE = Number("before", "Rows older than the one with this id; 0: the newest.", default=0, most=MOST_ID)
ACTOR = Text("actor", "Ordered by this one, as `uid:0`.")
ACT = Text("act", "Of this act, or of all that begin so and a dot.")


class SwitchOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`backend`: a kind of server, or an address like `http://127.0.0.1:8000`."""

    backend: str


class BoxApi:
    """The handlers."""

    def __init__(self, desk: Desk, *, stopping: asyncio.Event) -> None:
        self._desk = desk
        self._stopping = stopping

    def rows(self) -> list[Row]:
        return [
            Row("GET", "/api/health", VIEWER, self.health, "How Hive is, and what is wrong.", Answer),
            Row(
                *("GET", "/api/usage", VIEWER, self.usage, "What was used, added up.", Answer),
                query=(SINCE, BY, AGENT, TENANT, MODEL),
            ),
            Row("GET", "/api/stats", VIEWER, self.stats, "Counts since the daemon started.", Answer),
            Row("GET", "/metrics", VIEWER, self.metrics, "For Prometheus.", METRICS),
            Row(
                *("GET", "/api/events", VIEWER, self.events, "What happened, and what happens.", EVENTS),
                query=(PAST, FOLLOW),
            ),
            Row(
                *("GET", "/api/audit", OPERATOR, self.audit, "Who did what.", Answer),
                query=(AGENT, ACTOR, ACT, AUDIT_SINCE, BEFORE, AUDIT_LIMIT),
            ),
            Row("GET", "/api/system/inference", VIEWER, self.inference, "The inference server in use.", Answer),
            Row(
                *("POST", "/api/system/inference", ADMIN, self.switch, "Change to another one.", Answer),
                body=SwitchOrder,
                statuses=(200, 202),
            ),
            Row("GET", "/api/system/inference/stats", VIEWER, self.inference_stats, "What it does.", Answer),
            Row("GET", "/api/system/backends", VIEWER, self.backends, "Inference servers there are.", Answer),
            Row(
                *("GET", "/api/system/backends/logs", OPERATOR, self.backend_log, "What one wrote.", TEXT),
                query=(BACKEND, LOG_LINES),
            ),
            Row("GET", "/api/jobs", VIEWER, self.jobs, "What takes long, the newest first.", Answer, query=(JOBS,)),
            Row("GET", "/api/jobs/{id}", VIEWER, self.job, "One job.", Answer, query=(WAIT,)),
            Row("DELETE", "/api/jobs/{id}", ADMIN, self.cancel_job, "End a job.", Answer),
            Row(
                *("GET", "/api/system/access", OPERATOR, self.access, "How an operator reaches the model.", Answer),
                is_secret=True,
            ),
            Row("GET", "/api/system/memory", VIEWER, self.memory, "The host's memory.", Answer),
            Row("GET", "/api/system/gpus", VIEWER, self.gpus, "The host's GPUs.", Answer),
            Row("POST", "/api/system/shutdown", ADMIN, self.shutdown, "Stop every agent.", Answer),
        ]

    async def health(self, _: Request) -> Response:
        return as_json(self._desk.health())

    async def usage(self, request: Request) -> Response:
        of = Asked(agent=AGENT.of(request), tenant=TENANT.of(request), model=MODEL.of(request))
        return as_json(await self._desk.usage(SINCE.of(request) or 0.0, By(BY.of(request)), of))

    async def stats(self, _: Request) -> Response:
        return as_json(self._desk.stats())

    async def metrics(self, _: Request) -> Response:
        return Response(await self._desk.metrics(), media_type=CONTENT_TYPE)

    async def inference(self, _: Request) -> Response:
        return as_json(self._desk.inference())

    async def inference_stats(self, _: Request) -> Response:
        return as_json(await self._desk.inference_stats())

    async def switch(self, request: Request) -> Response:
        order = body_of(request, SwitchOrder)
        note(request, backend=order.backend[:NAME_MAX])
        job = await carried_through(self._desk.switch(order.backend, actor(request)))
        return as_json(job, status=202 if job["state"] == "running" else 200)

    async def backends(self, _: Request) -> Response:
        return as_json(await self._desk.backends())

    async def backend_log(self, request: Request) -> Response:
        return as_text(await self._desk.backend_log(BACKEND.of(request) or "", LOG_LINES.of(request)))

    async def jobs(self, request: Request) -> Response:
        return as_json({"jobs": await self._desk.jobs(JOBS.of(request))})

    async def job(self, request: Request) -> Response:
        return as_json(await self._desk.job(named(request, "id"), wait_s=WAIT.of(request)))

    async def cancel_job(self, request: Request) -> Response:
        return as_json(await carried_through(self._desk.cancel_job(named(request, "id"))))

    async def access(self, _: Request) -> Response:
        return as_json(self._desk.access())

    async def memory(self, _: Request) -> Response:
        return as_json(self._desk.memory())

    async def gpus(self, _: Request) -> Response:
        return as_json(await self._desk.gpus())

    async def shutdown(self, request: Request) -> Response:
        return as_json(await carried_through(self._desk.shutdown(actor(request))))

    async def audit(self, request: Request) -> Response:
        since_s, agent = AUDIT_SINCE.of(request), (AGENT.of(request) or "")[:NAME_MAX]
        asked = Filter(
            agent=(agent,) if agent else (),
            actor=(ACTOR.of(request) or "")[:NAME_MAX],
            act=(ACT.of(request) or "")[:NAME_MAX],
            since=None if since_s is None else time.time() - since_s,
            before=BEFORE.of(request) or None,
        )
        return as_json(await self._desk.audit(asked, AUDIT_LIMIT.of(request)))

    async def events(self, request: Request) -> Response:
        return StreamingResponse(
            self._event_stream(PAST.of(request), live=FOLLOW.of(request)),
            media_type="text/event-stream",
            headers={"cache-control": "no-store"},
        )

    async def _event_stream(self, tail: int, *, live: bool) -> AsyncIterator[bytes]:
        """Past events, then live ones: listening begins before the past is read, so that none falls between."""
        with self._desk.subscribe() as feed:
            past = await self._desk.past_events(tail)
            for event in past:
                yield as_event(event)
            while live:
                arrival = await unless(self._stopping, _next(feed), timeout_s=HEARTBEAT_S)
                if arrival is None and self._stopping.is_set():
                    return
                if arrival is None:
                    yield b": still here\n\n"
                elif arrival not in past:
                    yield as_event(arrival)


async def _next(feed: AsyncIterator[Answer]) -> Answer:
    return await anext(feed)
