"""The resources below one agent: messages, kept responses, schedules, output, tokens, usage."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from hive.agents.lifecycle import AgentLifecycle
from hive.agents.tokens import TokenKind
from hive.api.caller import actor
from hive.api.params import FOLLOW, LENGTH, WAIT, Flag, Number, Span, body_of, named
from hive.api.responses import as_json, as_text
from hive.api.routes import TEXT, LeadsTo, RouteRow
from hive.audit.shielded import waited_for
from hive.control import views
from hive.control.tail import follow, tail
from hive.domain import MESSAGE_MAX_BYTES, Role
from hive.errors import NotFound
from hive.shapes.agents import (
    AgentUsage,
    KeptDeleted,
    KeptOfAgent,
    MessageDropped,
    MessageList,
    MessageOf,
    ScheduleCancelled,
    ScheduleList,
    ScheduleOf,
    Tokens,
)
from hive.store.messages import StoredMessage
from hive.store.schedules import NOTE_MAX_BYTES

if TYPE_CHECKING:
    from hive.api.services import Services

VIEWER, OPERATOR = Role.VIEWER, Role.OPERATOR
TAIL = Number("tail", "So many of the last lines.", default=100, most=100_000)
OWN = Flag("own", "1: without what systemd says of its unit.")
PERIOD = Span("period", "How far back.", default="24h")
LIMIT = Number("limit", "So many of the last requests.", default=100, most=10_000)


class MessageOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A message to an agent."""

    text: Annotated[str, Meta(extra_json_schema={"minLength": 1, "maxLength": MESSAGE_MAX_BYTES})]


class ScheduleOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The order of a wake. `when`: 07:30, 2026-11-21T07:30 or +10m, ten years from now at most; `every`: 1h, 1d."""

    when: Annotated[str, Meta(examples=["+10m", "07:30"])]
    every: Annotated[str, Meta(extra_json_schema={"pattern": LENGTH})] | None = None
    note: Annotated[str, Meta(extra_json_schema={"maxLength": NOTE_MAX_BYTES})] = ""


class AgentSubresourceApi:
    """The handlers."""

    def __init__(self, services: Services, *, stopping: asyncio.Event) -> None:
        self._services = services
        self._stopping = stopping

    def rows(self) -> list[RouteRow]:
        one = "/api/agents/{ref}"
        message, schedule = f"{one}/messages/{{id}}", f"{one}/schedules/{{id}}"
        return [
            RouteRow(
                "GET",
                f"{one}/messages",
                VIEWER,
                "messages",
                self.messages,
                "Messages it has not accepted.",
                MessageList,
            ),
            RouteRow(
                "POST",
                f"{one}/messages",
                OPERATOR,
                "send",
                self.send,
                "Send it a message, which wakes it.",
                MessageOf,
                body=MessageOrder,
                statuses=(202,),
                leads_to=LeadsTo(message, {"ref": "/name", "id": "/id"}),
            ),
            RouteRow("GET", message, VIEWER, "message", self.message, "One message.", MessageOf, query=(WAIT,)),
            RouteRow(
                "DELETE", message, OPERATOR, "drop_message", self.drop_message, "Take a message back.", MessageDropped
            ),
            RouteRow(
                "GET",
                f"{one}/responses",
                VIEWER,
                "responses",
                self.responses,
                "What is kept of its responses.",
                KeptOfAgent,
            ),
            RouteRow(
                "DELETE",
                f"{one}/responses",
                OPERATOR,
                "delete_responses",
                self.delete_responses,
                "Delete all that is kept of its responses.",
                KeptDeleted,
            ),
            RouteRow(
                "GET", f"{one}/schedules", VIEWER, "schedules", self.schedules, "When it will be woken.", ScheduleList
            ),
            RouteRow(
                "POST",
                f"{one}/schedules",
                OPERATOR,
                "schedule",
                self.schedule,
                "Wake it at a time.",
                ScheduleOf,
                body=ScheduleOrder,
                statuses=(201,),
                leads_to=LeadsTo(schedule, {"ref": "/name", "id": "/id"}),
            ),
            RouteRow(
                "DELETE",
                schedule,
                OPERATOR,
                "cancel_schedule",
                self.cancel_schedule,
                "Not wake it then.",
                ScheduleCancelled,
            ),
            RouteRow(
                "GET",
                f"{one}/logs",
                VIEWER,
                "logs",
                self.logs,
                "What it wrote.",
                TEXT,
                query=(TAIL, OWN, FOLLOW),
                errors=(504,),
            ),
            RouteRow(
                "GET",
                f"{one}/tokens",
                OPERATOR,
                "tokens",
                self.tokens,
                "Its tokens and addresses.",
                Tokens,
                is_secret=True,
            ),
            RouteRow(
                "GET",
                f"{one}/usage",
                VIEWER,
                "agent_usage",
                self.agent_usage,
                "What it used.",
                AgentUsage,
                query=(PERIOD, LIMIT),
            ),
        ]

    async def send(self, request: Request) -> Response:
        order, life = body_of(request, MessageOrder), self._life(request)
        message = await self._services.message_delivery.send(life, order.text, actor(request))
        return as_json({**views.of_agent(life), **views.message_view(message)}, status=202)

    async def messages(self, request: Request) -> Response:
        life = self._life(request)
        found, why = await self._services.message_delivery.undelivered(life)
        messages = [views.message_view(message) for message in found]
        return as_json({**views.of_agent(life), "why": why, "messages": messages})

    async def message(self, request: Request) -> Response:
        life, message_id = self._life(request), named(request, "id")

        async def ask(wait_s: float) -> StoredMessage:
            return await self._services.message_delivery.get(life, message_id, within_s=wait_s)

        message = await waited_for(ask, WAIT.of(request), request.receive, self._stopping)
        return as_json({**views.of_agent(life), **views.message_view(message)})

    async def responses(self, request: Request) -> Response:
        """Number and size; never what is in them."""
        life = self._life(request)
        kept = await self._services.responses.summed(life.agent.id)
        return as_json(views.kept_view(life, kept, self._services.effects.settings.proxy))

    async def delete_responses(self, request: Request) -> Response:
        return as_json(await self._services.agents.delete_responses(self._life(request), actor(request)))

    async def drop_message(self, request: Request) -> Response:
        life = self._life(request)
        dropped = await self._services.message_delivery.drop(life, named(request, "id"), actor(request))
        return as_json({"dropped": dropped.id, "name": life.agent.name})

    async def schedules(self, request: Request) -> Response:
        life, scheduler = self._life(request), self._services.scheduler
        zone, found = scheduler.zone(), scheduler.of(life.agent.id)
        schedules = [views.schedule_view(schedule, zone) for schedule in found]
        return as_json({**views.of_agent(life), "schedules": schedules})

    async def schedule(self, request: Request) -> Response:
        order, life, scheduler = body_of(request, ScheduleOrder), self._life(request), self._services.scheduler
        zone = scheduler.zone()
        added = await scheduler.add(life, order.when, order.every, order.note, actor(request))
        return as_json({**views.of_agent(life), **views.schedule_view(added, zone)}, status=201)

    async def cancel_schedule(self, request: Request) -> Response:
        text = named(request, "id")
        if not re.fullmatch("[0-9]{1,15}", text):
            raise NotFound(f"there is no schedule {text[:20]!r}: it has a number")
        life = self._life(request)
        cancelled = await self._services.scheduler.cancel(life, int(text), actor(request))
        return as_json({"cancelled": cancelled.id, "name": life.agent.name})

    async def logs(self, request: Request) -> Response:
        agent, count = self._life(request).agent, TAIL.of(request)
        output = self._services.runtimes.output_of(agent, self._services.paths)
        output = output._replace(only_its_own=OWN.of(request))
        if not FOLLOW.of(request):
            return as_text(await tail(output, count))
        await tail(output, 0)  # what is wrong with it is told before the answer has begun
        return StreamingResponse(follow(output, count, self._stopping), media_type="text/plain; charset=utf-8")

    async def tokens(self, request: Request) -> Response:
        agent, services = self._life(request).agent, self._services
        tokens = views.tokens_view(
            agent.name,
            {kind: services.effects.token(agent, kind) for kind in TokenKind},
            port=services.proxy_link.known_port,
            ingress_port=services.proxy_link.ingress_port,
            socket=str(services.paths.agent_socket(agent.id)),
        )
        return as_json(tokens)

    async def agent_usage(self, request: Request) -> Response:
        period_s, period = PERIOD.of(request), request.query_params.get(PERIOD.name, PERIOD.default)
        assert period_s is not None and period is not None  # noqa: PT018
        agent = self._life(request).agent.id
        return as_json(await self._services.usage.of_agent(agent, period_s, period, LIMIT.of(request)))

    def _life(self, request: Request) -> AgentLifecycle:
        """The agent that the path names. Raises NotFound."""
        return self._services.roster.find(named(request))
