"""The part of the API that is about agents and their transitions: each handler a few lines around a call of a service.

The resources below one agent are in agent_subresources.py.
"""

from __future__ import annotations

import time
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from hive.agents.lifecycle import AgentLifecycle
from hive.agents.spec import check
from hive.api.caller import actor, note, person
from hive.api.params import LENGTH, Flag, Number, Text, body_of, named
from hive.api.responses import as_json
from hive.api.routes import LeadsTo, RouteRow
from hive.audit.auth import Person
from hive.control import schedule_times, views
from hive.domain import AgentSpec, Role
from hive.errors import BadRequest
from hive.shapes.agents import (
    AgentChanges,
    AgentList,
    AgentPage,
    AgentView,
    Applied,
    Removals,
    Removed,
    ShortPage,
)

if TYPE_CHECKING:
    from hive.api.services import Services

KEEP_AWAKE_MAX_S = 30 * 86400.0
PAUSE_MAX_S = 86400
VIEWER, OPERATOR = Role.VIEWER, Role.OPERATOR

FRESH_MAX = 250
"""More lines than a terminal has."""

PAGE_MAX = 1000
REF_MAX = 100
"""Characters of what may name an agent; ids and names have fewer."""
REMOVED_MAX = 1000
"""Agents in one order: each may take `stop_grace_s` to end, and a hundred end at a time."""
UP_TO = Number("limit", "A page of so many; 0: all, or 1000 with `after` or `short`.", default=0, most=PAGE_MAX)
AFTER = Text("after", "A page of those behind this name: the `next` of the page before.")
SHORT = Flag("short", "1: a page of what is known without asking anybody.")
SINCE = Text("since", "Only those who changed since the answer that had this `cursor`; empty: all, and a cursor.")
FRESH = Text("fresh", "With `since`: also these, ids with commas between them.")
DRY_RUN = Flag("dry_run", "1: say what would change, and change nothing.")


class PauseOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`timeout_s` None is the setting `pause_timeout_s`. `now`: a busy agent is refused at once. `deep`: with its
    memory paged out."""

    timeout_s: Annotated[float, Meta(extra_json_schema={"minimum": 0, "maximum": PAUSE_MAX_S})] | None = None
    now: bool = False
    deep: bool = False


class KeepAwakeOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """From now on for so many seconds, or a length like `10m`; 0 ends it."""

    for_s: (
        Annotated[float, Meta(extra_json_schema={"minimum": 0, "maximum": KEEP_AWAKE_MAX_S})]
        | Annotated[str, Meta(extra_json_schema={"pattern": LENGTH})]
    )


class RemovalOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Names or ids."""

    agents: Annotated[list[Annotated[str, Meta(max_length=REF_MAX)]], Meta(min_length=1, max_length=REMOVED_MAX)]


def shown_to(person: Person, agents: list[AgentView]) -> list[AgentView]:
    """Masks the agents for a viewer: keys and passwords are in `env`, a prompt may be a secret of its tenant."""
    return agents if person.role.rank >= OPERATOR.rank else [views.masked(view) for view in agents]


def listed_to(person: Person, agents: list[AgentView]) -> list[AgentView]:
    return shown_to(person, [views.without_prompt(view) for view in agents])


class AgentApi:
    """The handlers. An order is carried through by the application, also where its client leaves (app.py)."""

    def __init__(self, services: Services, *, pause_timeout_s: float) -> None:
        self._services = services
        self._pause_timeout_s = pause_timeout_s

    def rows(self) -> list[RouteRow]:
        one = "/api/agents/{ref}"
        return [
            RouteRow(
                "GET",
                "/api/agents",
                VIEWER,
                "list_agents",
                self.list_agents,
                "Every agent, by name.",
                AgentList | AgentPage | ShortPage | AgentChanges,
                query=(UP_TO, AFTER, SHORT, SINCE, FRESH),
            ),
            RouteRow(
                "POST",
                "/api/agents",
                OPERATOR,
                "create",
                self.create,
                "Make an agent and start it.",
                AgentView,
                body=AgentSpec,
                statuses=(201,),
                errors=(501,),
                leads_to=LeadsTo(one, {"ref": "/name"}),
            ),
            RouteRow(
                "GET", one, VIEWER, "show", self.show, "One agent.", AgentView, leads_to=LeadsTo(one, {"ref": "/name"})
            ),
            RouteRow(
                "PUT",
                one,
                OPERATOR,
                "apply",
                self.apply,
                "Make an agent, or change it.",
                Applied,
                body=AgentSpec,
                query=(DRY_RUN,),
            ),
            RouteRow("DELETE", one, OPERATOR, "remove", self.remove, "Stop an agent and forget it.", Removed),
            RouteRow(
                "POST",
                "/api/removals",
                OPERATOR,
                "remove_many",
                self.remove_many,
                "Stop agents and forget them.",
                Removals,
                body=RemovalOrder,
            ),
            RouteRow(
                "POST", f"{one}/start", OPERATOR, "start", self.start, "Start an agent.", AgentView, errors=(501,)
            ),
            RouteRow("POST", f"{one}/stop", OPERATOR, "stop", self.stop, "Stop an agent.", AgentView),
            RouteRow(
                "POST",
                f"{one}/restart",
                OPERATOR,
                "restart",
                self.restart,
                "Stop an agent and start it.",
                AgentView,
                errors=(501,),
            ),
            RouteRow("POST", f"{one}/resume", OPERATOR, "resume", self.resume, "Wake an agent.", AgentView),
            RouteRow(
                "POST",
                f"{one}/pause",
                OPERATOR,
                "pause",
                self.pause,
                "Put an agent to sleep.",
                AgentView,
                body=PauseOrder,
                may_be_empty=True,
                errors=(501,),
            ),
            RouteRow(
                "POST",
                f"{one}/keep-awake",
                OPERATOR,
                "keep_awake",
                self.keep_awake,
                "Keep an agent awake.",
                AgentView,
                body=KeepAwakeOrder,
            ),
        ]

    async def list_agents(self, request: Request) -> Response:
        """With `limit` a page of them. With `since` only the agents changed meanwhile: values that move with time
        alone, messages and schedules are no change.

        The values of `env` are masked for a viewer, prompts for every role.
        """
        since, fresh = SINCE.of(request), [agent for agent in (FRESH.of(request) or "").split(",") if agent]
        if len(fresh) > FRESH_MAX:
            raise BadRequest(f"{FRESH.name}: {len(fresh)} agents are named, {FRESH_MAX} is the limit")
        limit, after, short = UP_TO.of(request), AFTER.of(request), SHORT.of(request)
        if since is not None and (limit or after is not None or short):
            raise BadRequest(f"{SINCE.name}: what changed is not told in pages")
        if short:
            return as_json(self._services.agent_views.shorts(after or "", limit or PAGE_MAX))
        if limit or after is not None:
            page = await self._services.agent_views.page(after or "", limit or PAGE_MAX)
            return as_json({**page, "agents": listed_to(person(request), page["agents"])})
        if since is None:
            return as_json({"agents": listed_to(person(request), await self._services.agent_views.all())})
        found = await self._services.agent_views.changes(since, fresh)
        return as_json({**found, "agents": listed_to(person(request), found["agents"])})

    async def show(self, request: Request) -> Response:
        """The values of `env`, and its system prompt, are masked for a viewer."""
        view = await self._services.agent_views.of(self._life(request), pss=True)
        return as_json(shown_to(person(request), [view])[0])

    async def create(self, request: Request) -> Response:
        spec = check(body_of(request, AgentSpec))
        note(request, name=spec.name)
        return await self._done(self._services.agents.create(spec, actor(request)), status=201)

    async def apply(self, request: Request) -> Response:
        spec, dry_run = check(body_of(request, AgentSpec)), DRY_RUN.of(request)
        if spec.name != named(request):
            raise BadRequest(f"name: the path says {named(request)!r}, the body {spec.name!r}")
        note(request, name=spec.name, dry_run=dry_run)
        return await self._done(self._services.agents.apply(spec, actor(request), dry_run=dry_run))

    async def remove(self, request: Request) -> Response:
        return await self._done(self._services.agents.remove(named(request), actor(request)))

    async def remove_many(self, request: Request) -> Response:
        """`failed` has those that could not be removed; each removal is in the audit table, as where it alone is
        ordered."""
        order = body_of(request, RemovalOrder)
        note(request, agents=len(order.agents))
        removals = await self._services.agents.remove_many(order.agents, actor(request))
        note(request, removed=len(removals["removed"]), not_removed=[one["agent"] for one in removals["failed"]][:20])
        return as_json(removals)

    async def start(self, request: Request) -> Response:
        life = self._life(request)
        return await self._moved(life, life.start(actor(request)))

    async def stop(self, request: Request) -> Response:
        life = self._life(request)
        return await self._moved(life, life.stop(actor(request)))

    async def restart(self, request: Request) -> Response:
        life = self._life(request)
        return await self._moved(life, life.restart(actor(request)))

    async def resume(self, request: Request) -> Response:
        life = self._life(request)
        return await self._moved(life, life.resume(actor(request)))

    async def pause(self, request: Request) -> Response:
        order = body_of(request, PauseOrder, empty=PauseOrder())
        timeout_s = self._pause_timeout_s if order.timeout_s is None else order.timeout_s
        if not 0 <= timeout_s <= PAUSE_MAX_S:
            raise BadRequest(f"timeout_s: {timeout_s:g} is not from 0 to {PAUSE_MAX_S} seconds")
        life = self._life(request)
        pausing = life.pause(timeout_s=timeout_s, now=order.now, deep=order.deep, actor=actor(request))
        return await self._moved(life, pausing)

    async def keep_awake(self, request: Request) -> Response:
        order = body_of(request, KeepAwakeOrder)
        for_s = schedule_times.seconds_of(order.for_s, field="for") if isinstance(order.for_s, str) else order.for_s
        if not 0 <= for_s <= KEEP_AWAKE_MAX_S:
            raise BadRequest(
                f"for: {for_s:.0f} is not from 0 seconds to {KEEP_AWAKE_MAX_S / schedule_times.DAY_S:.0f} days"
            )
        life, until = self._life(request), time.time() + for_s if for_s else None
        return await self._moved(life, life.keep_awake(until, actor(request)))

    def _life(self, request: Request) -> AgentLifecycle:
        """The agent that the path names. Raises NotFound."""
        return self._services.roster.find(named(request))

    async def _moved(self, life: AgentLifecycle, transition: Coroutine[Any, Any, object]) -> Response:
        """Answers with the agent's view once it has moved."""
        await transition
        return as_json(await self._services.agent_views.of(life))

    async def _done(self, work: Coroutine[Any, Any, object], *, status: int = 200) -> Response:
        return as_json(await work, status=status)
