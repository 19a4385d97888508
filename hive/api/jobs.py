"""The part of the API about jobs: what takes long, and models that work through tools (kind `task`)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from hive.api.caller import actor, note, person
from hive.api.events import HEARTBEAT_S
from hive.api.models import JOB
from hive.api.order_audit import NAME_MAX
from hive.api.params import WAIT, Flag, Header, Number, Text, body_of, named
from hive.api.responses import as_json
from hive.api.routes import EVENTS, NDJSON, RouteRow
from hive.audit.auth import need
from hive.audit.shielded import waited_for
from hive.control import views
from hive.domain import Band, Role
from hive.errors import NotFound
from hive.jobs.order import ITERATIONS_MAX, JobEvent, JobOrder
from hive.jobs.order import NAME_MAX as JOB_NAME_MAX
from hive.jobs.tool_specs import SPECS_MAX
from hive.shapes.jobs import JobOutputEvent, JobResult, ReleasedJob
from hive.shapes.system import Job, JobList, JobStatus
from hive.store.job_turns import KIND as TASK
from hive.store.jobs import StoredJob
from hive.tasks import spawn

if TYPE_CHECKING:
    from hive.api.services import Services

VIEWER, OPERATOR, ADMIN = Role.VIEWER, Role.OPERATOR, Role.ADMIN
MOST_EVENTS = 999_999_999
PIECE_BYTES = 65536
"""Lines are sent together up to so many bytes."""

JobEvents = AsyncGenerator[JobEvent, None]

LIMIT = Number("limit", "So many of the last ones.", default=20, most=1000)
KIND = Text("kind", "Of this kind alone: `task`, `model.load` …")
AFTER = Number("after", "Events behind this one alone.", default=0, most=MOST_EVENTS)
FOLLOW = Flag("follow", "1: as server-sent events, until the job has ended. Else JSON lines of what there is.")
LAST_EVENT_ID = Header(
    "Last-Event-ID", "The same as `after`, where that is not given: what clients of event streams send.", "^[0-9]{1,9}$"
)

Iterations = Annotated[int, Meta(ge=1, le=ITERATIONS_MAX)]


class TaskOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A job in which a model works through tools; docs/jobs.md has what `tools` may be.

    `exit_tools`: null for the five, empty for none. `params`: of the request to the model, passed on as they are.
    `answer_schema`: JSON Schema of the last answer. `agent`: it works as this one, by name or id; else as an operator
    of `tenant`. `local_only`: none of its requests to the model leaves this box.
    """

    name: Annotated[str, Meta(min_length=1, max_length=JOB_NAME_MAX)]
    model: Annotated[str, Meta(max_length=NAME_MAX, description="Empty: that of the agent.")] = ""
    prompt: str = ""
    system: str = ""
    tools: Annotated[list[dict[str, Any]], Meta(max_length=SPECS_MAX)] = []
    exit_tools: Annotated[list[dict[str, Any]], Meta(max_length=SPECS_MAX)] | None = None
    stop_on_decision_request: bool = True
    params: dict[str, Any] = {}
    bios: Literal["one_message", "messages", "off"] = "one_message"
    tool_form: Literal["native", "schema"] = "native"
    answer_schema: dict[str, Any] | None = None
    max_tool_iterations: Iterations | None = None
    agent: Annotated[str, Meta(max_length=NAME_MAX)] = ""
    tenant: Annotated[str, Meta(max_length=NAME_MAX)] = ""
    priority: Band = Band.NORMAL
    local_only: bool = False


class JobApi:
    """The handlers."""

    def __init__(self, services: Services, *, stopping: asyncio.Event) -> None:
        self._services = services
        self._stopping = stopping

    def rows(self) -> list[RouteRow]:
        jobs, one = "/api/jobs", "/api/jobs/{id}"
        return [
            RouteRow(
                "GET",
                jobs,
                VIEWER,
                "jobs",
                self.all,
                "What takes long, the newest first.",
                JobList,
                query=(LIMIT, KIND),
            ),
            RouteRow(
                "POST",
                jobs,
                OPERATOR,
                "begin_job",
                self.begin,
                "Have a model work through tools.",
                Job,
                body=TaskOrder,
                statuses=(202,),
                errors=(404, 501),
                leads_to=JOB,
            ),
            RouteRow("GET", one, VIEWER, "job", self.one, "One job.", Job, query=(WAIT,)),
            RouteRow("DELETE", one, OPERATOR, "cancel_job", self.cancel, "End a job.", Job),
            RouteRow(
                "GET",
                f"{one}/output",
                OPERATOR,
                "job_output",
                self.output,
                "What a model at work says and calls.",
                (EVENTS, NDJSON),
                each=JobOutputEvent,
                query=(FOLLOW, AFTER),
                headers=(LAST_EVENT_ID,),
            ),
            RouteRow(
                "GET",
                f"{one}/result",
                OPERATOR,
                "job_result",
                self.result,
                "What a model at work has come to.",
                JobResult,
                errors=(409,),
            ),
            RouteRow(
                "POST",
                f"{one}/release",
                OPERATOR,
                "release_job",
                self.release,
                "Forget the output and the result of an ended job.",
                ReleasedJob,
            ),
        ]

    async def all(self, request: Request) -> Response:
        found = await self._services.jobs.recent(LIMIT.of(request), KIND.of(request) or "")
        return as_json({"jobs": [self._view(job) for job in found]})

    async def one(self, request: Request) -> Response:
        job_id = named(request, "id")

        async def ask(wait_s: float) -> StoredJob:
            return await self._services.jobs.get(job_id, wait_s=wait_s)

        return as_json(self._view(await waited_for(ask, WAIT.of(request), request.receive, self._stopping)))

    async def begin(self, request: Request) -> Response:
        """Always 202, with `Location`. Whoever it works as has its queue, limits, permitted models, budget and
        metering. Nothing of it is done anew after a crash: the job is `failed` then, with what it had said."""
        order = body_of(request, TaskOrder)
        note(request, name=order.name, model=order.model, agent=order.agent, tenant=order.tenant)
        job = await self._services.model_jobs.begin(
            msgspec.convert(msgspec.to_builtins(order), JobOrder), actor=actor(request)
        )
        answer = as_json(self._view(job), status=202)
        answer.headers["location"] = f"/api/jobs/{job.id}"
        return answer

    async def cancel(self, request: Request) -> Response:
        """For admins, unless its kind is `task`, which an operator may begin. One of these that has ended stays as it
        is."""
        job_id, models = named(request, "id"), self._services.models
        job = await self._services.jobs.get(job_id)
        if job.kind == TASK:
            return as_json(self._view(await self._services.model_jobs.cancel(job_id, actor=actor(request))))
        need(person(request), ADMIN)
        if models.has(job_id):
            cancelling = models.cancel(job_id)
        elif (pool := self._services.pool).is_loading(job_id):
            cancelling = pool.cancel(job_id)
        elif (cache := self._services.cache).has(job_id):
            cancelling = cache.cancel(job_id)
        elif (adapters := self._services.adapters).has(job_id):
            cancelling = adapters.cancel(job_id)
        else:
            cancelling = self._services.switcher.cancel(job_id)
        return as_json(self._view(await cancelling))

    async def output(self, request: Request) -> Response:
        """Every event has a number: a client that lost its connection goes on behind the last one it has. What was
        recorded comes first. `ended` is the last event; a comment comes every 15 s where nothing happens."""
        job = await self._task(named(request, "id"))
        after, last = AFTER.of(request), LAST_EVENT_ID.of(request)
        if AFTER.name not in request.query_params:
            after = int(last or 0)
        is_followed = FOLLOW.of(request)
        # raises where nothing is kept any more: a stream that has begun could not tell
        async with aclosing(cast(JobEvents, self._services.model_jobs.events(job.id))) as kept:
            await anext(kept, None)
        events = self._services.model_jobs.events(job.id, after=after, follow=is_followed)
        told = self._followed(events) if is_followed else _lines(events)
        kind = EVENTS if is_followed else NDJSON
        return StreamingResponse(told, media_type=kind, headers={"cache-control": "no-store"})

    async def result(self, request: Request) -> Response:
        """409 while it runs. Of one that failed or was cancelled, what there was by then."""
        job = await self._task(named(request, "id"))
        return as_json({"id": job.id, **await self._services.model_jobs.result(job.id)})

    async def release(self, request: Request) -> Response:
        """409 while it runs. The job stays in the list; its output, turns and result are deleted."""
        job = await self._task(named(request, "id"))
        await self._services.model_jobs.release(job.id, actor=actor(request))
        return as_json({"id": job.id})

    def _view(self, job: StoredJob) -> Job:
        status = cast(JobStatus, self._services.model_jobs.status_of(job)) if job.kind == TASK else None
        return views.job_view(job, time.time(), status=status)

    async def _task(self, job_id: str) -> StoredJob:
        """The job. Raises NotFound where no model works in it, or where it was released."""
        job = await self._services.jobs.get(job_id)
        if job.kind != TASK:
            raise NotFound(f"job {job.id} is a {job.kind}: no model says anything in it", hint="hive job list")
        if job.plan.get("released"):
            raise NotFound(f"what job {job.id} said is not kept any more: it was released")
        return job

    async def _followed(self, events: AsyncIterator[JobEvent]) -> AsyncGenerator[bytes, None]:
        """The events as they come, and comments between; ends when the server stops."""
        stopped = spawn(self._stopping.wait(), name="api stopping")
        arriving: asyncio.Task[JobEvent | None] | None = None
        try:
            while True:
                arriving = arriving or spawn(_next(events), name="api job output")
                await asyncio.wait([arriving, stopped], timeout=HEARTBEAT_S, return_when=asyncio.FIRST_COMPLETED)
                if not arriving.done():
                    if stopped.done():
                        return
                    yield b": still here\n\n"
                    continue
                if (event := arriving.result()) is None:
                    return
                arriving = None
                yield b"id: %d\nevent: %s\ndata: %s\n\n" % (event.n, event.event.encode(), msgspec.json.encode(event))
        finally:
            stopped.cancel()
            if arriving is not None:
                arriving.cancel()
                await asyncio.wait([arriving])
            await cast(JobEvents, events).aclose()


async def _next(events: AsyncIterator[JobEvent]) -> JobEvent | None:
    return await anext(events, None)


async def _lines(events: AsyncIterator[JobEvent]) -> AsyncGenerator[bytes, None]:
    """The events as JSON lines, several at once."""
    piece = bytearray()
    async with aclosing(cast(JobEvents, events)):
        async for event in events:
            piece += msgspec.json.encode(event) + b"\n"
            if len(piece) >= PIECE_BYTES:
                yield bytes(piece)
                piece.clear()
    if piece:
        yield bytes(piece)
