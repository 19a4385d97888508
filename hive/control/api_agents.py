"""The part of the API that is about agents: each handler a few lines around a call of the desk."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Coroutine
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from hive.agents.spec import check
from hive.control import clock
from hive.control.answers import as_json, as_text
from hive.control.asked import Choice, Flag, Number, body_of, named
from hive.control.caller import actor, note
from hive.control.carrying import carried_through
from hive.control.desk import Answer, Desk
from hive.control.routes import TEXT, Row
from hive.control.tail import follow, tail
from hive.domain import AgentSpec, Role
from hive.errors import BadRequest

PERIODS_S = {"1h": 3600.0, "6h": 6 * 3600.0, "24h": 86400.0, "7d": 7 * 86400.0, "30d": 30 * 86400.0}
TAIL_MAX = 100_000
KEEP_AWAKE_MAX_S = 30 * 86400.0
WAIT_MAX_S = 600
VIEWER, OPERATOR = Role.VIEWER, Role.OPERATOR

DRY_RUN = Flag("dry_run", "1: say what would change, and change nothing.")
WAIT = Number("wait_s", "Answer once it is over, or after so many seconds.", default=0, most=WAIT_MAX_S)
TAIL = Number("tail", "So many of the last lines.", default=100, most=TAIL_MAX)
FOLLOW = Flag("follow", "1: go on as more comes, until the daemon ends.")
PERIOD = Choice("period", "How far back.", words=tuple(PERIODS_S), default="24h")
LIMIT = Number("limit", "So many of the last requests.", default=100, most=10_000)


class PauseOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`timeout_s` None is the setting `pause_timeout_s`. `now`: a busy agent is refused at once. `deep`: with its
    memory paged out."""

    timeout_s: float | None = None
    now: bool = False
    deep: bool = False


class KeepAwakeOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """From now on for so many seconds, or a length like `10m`; 0 ends it."""

    for_s: float | str


class MessageOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A message to an agent."""

    text: str


class ScheduleOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`when`: 07:30, 2026-11-21T07:30 or +10m; `every`: 1h, 1d."""

    when: str
    every: str | None = None
    note: str = ""


class AgentApi:
    """The handlers. Those that change something run in a task of their own, which a leaving client does not cancel."""

    def __init__(self, desk: Desk, *, pause_timeout_s: float, stopping: asyncio.Event) -> None:
        self._desk = desk
        self._pause_timeout_s = pause_timeout_s
        self._stopping = stopping

    def rows(self) -> list[Row]:
        one = "/api/agents/{ref}"
        return [
            Row("GET", "/api/agents", VIEWER, self.list_agents, "Every agent, by name.", Answer),
            Row(
                *("POST", "/api/agents", OPERATOR, self.create, "Make an agent and start it.", Answer),
                body=AgentSpec,
                statuses=(201,),
            ),
            Row("GET", one, VIEWER, self.show, "One agent.", Answer),
            Row(
                *("PUT", one, OPERATOR, self.apply, "Make an agent, or change it.", Answer),
                body=AgentSpec,
                query=(DRY_RUN,),
            ),
            Row("DELETE", one, OPERATOR, self.remove, "Stop an agent and forget it.", Answer),
            Row("POST", f"{one}/start", OPERATOR, self.start, "Start an agent.", Answer),
            Row("POST", f"{one}/stop", OPERATOR, self.stop, "Stop an agent.", Answer),
            Row("POST", f"{one}/restart", OPERATOR, self.restart, "Stop an agent and start it.", Answer),
            Row("POST", f"{one}/resume", OPERATOR, self.resume, "Wake an agent.", Answer),
            Row(
                *("POST", f"{one}/pause", OPERATOR, self.pause, "Put an agent to sleep.", Answer),
                body=PauseOrder,
                may_be_empty=True,
            ),
            Row(
                *("POST", f"{one}/keep-awake", OPERATOR, self.keep_awake, "Keep an agent awake.", Answer),
                body=KeepAwakeOrder,
            ),
            Row("GET", f"{one}/messages", VIEWER, self.messages, "Messages it has not accepted.", Answer),
            Row(
                *("POST", f"{one}/messages", OPERATOR, self.send, "Send it a message, which wakes it.", Answer),
                body=MessageOrder,
                statuses=(202,),
            ),
            Row("GET", f"{one}/messages/{{id}}", VIEWER, self.message, "One message.", Answer, query=(WAIT,)),
            Row("DELETE", f"{one}/messages/{{id}}", OPERATOR, self.drop_message, "Take a message back.", Answer),
            Row("GET", f"{one}/schedules", VIEWER, self.schedules, "When it will be woken.", Answer),
            Row(
                *("POST", f"{one}/schedules", OPERATOR, self.schedule, "Wake it at a time.", Answer),
                body=ScheduleOrder,
                statuses=(201,),
            ),
            Row("DELETE", f"{one}/schedules/{{id}}", OPERATOR, self.cancel_schedule, "Not wake it then.", Answer),
            Row("GET", f"{one}/logs", VIEWER, self.logs, "What it wrote.", TEXT, query=(TAIL, FOLLOW)),
            Row("GET", f"{one}/tokens", OPERATOR, self.tokens, "Its tokens and addresses.", Answer, is_secret=True),
            Row("GET", f"{one}/usage", VIEWER, self.usage, "What it used.", Answer, query=(PERIOD, LIMIT)),
        ]

    async def list_agents(self, _: Request) -> Response:
        return as_json({"agents": await self._desk.views()})

    async def show(self, request: Request) -> Response:
        return as_json(await self._desk.view(named(request)))

    async def create(self, request: Request) -> Response:
        spec = check(body_of(request, AgentSpec))
        note(request, name=spec.name)
        return await self._done(self._desk.create(spec, actor(request)), status=201)

    async def apply(self, request: Request) -> Response:
        spec, dry_run = check(body_of(request, AgentSpec)), DRY_RUN.of(request)
        if spec.name != named(request):
            raise BadRequest(f"name: the path says {named(request)!r}, the body {spec.name!r}")
        note(request, name=spec.name, dry_run=dry_run)
        return await self._done(self._desk.apply(spec, actor(request), dry_run=dry_run))

    async def remove(self, request: Request) -> Response:
        return await self._done(self._desk.remove(named(request), actor(request)))

    async def start(self, request: Request) -> Response:
        return await self._done(self._desk.start(named(request), actor(request)))

    async def stop(self, request: Request) -> Response:
        return await self._done(self._desk.stop(named(request), actor(request)))

    async def restart(self, request: Request) -> Response:
        return await self._done(self._desk.restart(named(request), actor(request)))

    async def resume(self, request: Request) -> Response:
        return await self._done(self._desk.resume(named(request), actor(request)))

    async def pause(self, request: Request) -> Response:
        order = body_of(request, PauseOrder, empty=PauseOrder())
        timeout_s = self._pause_timeout_s if order.timeout_s is None else order.timeout_s
        if not 0 <= timeout_s <= 86400:
            raise BadRequest(f"timeout_s: {timeout_s:g} is not from 0 to 86400 seconds")
        pausing = self._desk.pause(
            named(request), timeout_s=timeout_s, now=order.now, deep=order.deep, actor=actor(request)
        )
        return await self._done(pausing)

    async def keep_awake(self, request: Request) -> Response:
        order = body_of(request, KeepAwakeOrder)
        for_s = clock.seconds_of(order.for_s, field="for") if isinstance(order.for_s, str) else order.for_s
        if not 0 <= for_s <= KEEP_AWAKE_MAX_S:
            raise BadRequest(f"for: {for_s:.0f} is not from 0 seconds to {KEEP_AWAKE_MAX_S / clock.DAY_S:.0f} days")
        return await self._done(self._desk.keep_awake(named(request), for_s, actor(request)))

    async def send(self, request: Request) -> Response:
        order = body_of(request, MessageOrder)
        return await self._done(self._desk.send(named(request), order.text, actor(request)), status=202)

    async def messages(self, request: Request) -> Response:
        return as_json(await self._desk.messages(named(request)))

    async def message(self, request: Request) -> Response:
        return as_json(await self._desk.message(named(request), named(request, "id"), wait_s=WAIT.of(request)))

    async def drop_message(self, request: Request) -> Response:
        return await self._done(self._desk.drop_message(named(request), named(request, "id"), actor(request)))

    async def schedules(self, request: Request) -> Response:
        return as_json(self._desk.schedules(named(request)))

    async def schedule(self, request: Request) -> Response:
        order = body_of(request, ScheduleOrder)
        adding = self._desk.schedule(named(request), order.when, order.every, order.note, actor(request))
        return await self._done(adding, status=201)

    async def cancel_schedule(self, request: Request) -> Response:
        text = named(request, "id")
        if not re.fullmatch("[0-9]{1,15}", text):
            raise BadRequest(f"a schedule has a number, not {text[:20]!r}")
        return await self._done(self._desk.cancel_schedule(named(request), int(text), actor(request)))

    async def logs(self, request: Request) -> Response:
        output, count = self._desk.output(named(request)), TAIL.of(request)
        if not FOLLOW.of(request):
            return as_text(await tail(output, count))
        await tail(output, 0)  # what is wrong with it is told before the answer has begun
        return StreamingResponse(follow(output, count, self._stopping), media_type="text/plain; charset=utf-8")

    async def tokens(self, request: Request) -> Response:
        return as_json(self._desk.tokens(named(request)))

    async def usage(self, request: Request) -> Response:
        period = PERIOD.of(request)
        return as_json(await self._desk.agent_usage(named(request), PERIODS_S[period], period, LIMIT.of(request)))

    async def _done(self, work: Coroutine[Any, Any, Answer], *, status: int = 200) -> Response:
        return as_json(await carried_through(work), status=status)
