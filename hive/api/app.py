"""REST: the application made of the rows (routes.py), and what every request goes through before its handler.

Success is the bare result, an error is application/problem+json with the code and the hint of its `HiveError`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from hive.api.adapters import AdapterApi
from hive.api.agent_subresources import AgentSubresourceApi
from hive.api.agents import AgentApi
from hive.api.cache import CacheApi
from hive.api.caller import ABOUT, origin, person
from hive.api.database import DbApi
from hive.api.description import DescriptionApi
from hive.api.events import EventApi
from hive.api.exec import ExecApi
from hive.api.governance import GovernanceApi
from hive.api.jobs import JobApi
from hive.api.leases import LeaseApi
from hive.api.middleware import AuthMiddleware, TcpEntry
from hive.api.models import ModelApi
from hive.api.order_audit import AuditedOrder, carried_out
from hive.api.params import BODY, check_query, named, received
from hive.api.pool import PoolApi
from hive.api.requests import SteeringApi
from hive.api.responses import failure, head_of
from hive.api.routes import RouteRow
from hive.api.runner import RunnerApi
from hive.api.system import BoxApi
from hive.api.tasks import TasksApi
from hive.api.templates import TemplateApi
from hive.api.tokens import TokenApi
from hive.audit.auth import need
from hive.audit.shielded import carried_through
from hive.errors import HiveError, MethodNotAllowed, NotFound, RequestTimeout
from hive.host.accounts import NAMES, Accounts

if TYPE_CHECKING:
    from hive.api.services import Services

log = logging.getLogger("hive.api")

Answering = Callable[[Request], Coroutine[Any, Any, Response]]

BODY_S = 30.0
"""A request's body, which is 1 MiB at most, has to be here within this."""


def rows(services: Services, *, pause_timeout_s: float, stopping: asyncio.Event) -> list[RouteRow]:
    """Everything the API answers."""
    table = [
        *BoxApi(services).rows(),
        *JobApi(services, stopping=stopping).rows(),
        *ModelApi(services).rows(),
        *AdapterApi(services).rows(),
        *PoolApi(services).rows(),
        *RunnerApi(services).rows(),
        *TasksApi(services).rows(),
        *TemplateApi(services).rows(),
        *GovernanceApi(services).rows(),
        *LeaseApi(services, stopping=stopping).rows(),
        *EventApi(services, stopping=stopping).rows(),
        *SteeringApi(services).rows(),
        *AgentApi(services, pause_timeout_s=pause_timeout_s).rows(),
        *AgentSubresourceApi(services, stopping=stopping).rows(),
        *ExecApi(services).rows(),
        *CacheApi(services).rows(),
        *TokenApi(services).rows(),
        *DbApi(services, stopping=stopping).rows(),
    ]
    table += DescriptionApi(table).rows()
    return table


def build(
    services: Services,
    people: Accounts,
    door: TcpEntry | None = None,
    *,
    pause_timeout_s: float = 30.0,
    stopping: asyncio.Event | None = None,
) -> Starlette:
    """The application. Setting `stopping` ends the streams that follow something; `door`: rules for callers on TCP."""
    handlers: dict[str, dict[str, RouteRow]] = {}
    for row in rows(services, pause_timeout_s=pause_timeout_s, stopping=stopping or asyncio.Event()):
        handlers.setdefault(row.path, {})[row.method] = row
    routes = [Route(path, _Endpoint(_answering(services, by_method))) for path, by_method in handlers.items()]
    app = Starlette(
        routes=routes,
        exception_handlers={HTTPException: _not_routed},
        middleware=[Middleware(AuthMiddleware, people=people, door=door, tokens=services.api_tokens)],
    )
    app.router.redirect_slashes = False
    return app


class _Endpoint:
    """An ASGI application: of a function Starlette would answer the methods it does not know by itself."""

    def __init__(self, answer: Answering) -> None:
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self._answer(Request(scope, receive, send))
        await response(scope, receive, send)


def allowed(methods: Collection[str]) -> str:
    """The content of `Allow` for a path with these methods.

    >>> allowed({"POST", "GET"})
    'GET, HEAD, POST'
    """
    return ", ".join(sorted({*methods, "HEAD"} if "GET" in methods else methods))


def _answering(services: Services, by_method: dict[str, RouteRow]) -> Answering:
    async def answer(request: Request) -> Response:
        try:
            row = by_method.get("GET" if request.method == "HEAD" else request.method)
            if row is None:
                raise MethodNotAllowed(allow=allowed(by_method))
            # also where the handler has no use for it: closing a socket with unread bytes takes the answer away
            request.scope[BODY] = await _body(request)
            request.scope[ABOUT] = {}
            doing = _permitted(request, row)
            response = await (carried_through(_ordered(services, request, row, doing)) if row.is_order else doing)
            return head_of(response) if request.method == "HEAD" else response
        except HiveError as error:
            return failure(error, request.url.path)
        except ClientDisconnect:
            return Response(status_code=400)  # it left inside its body: the answer is not read, and nothing has failed
        except Exception:
            log.exception("api_failed method=%s path=%s", request.method, request.url.path)
            return failure(HiveError("Hive failed; its log says where"), request.url.path)

    return answer


async def _body(request: Request) -> bytes:
    try:
        async with asyncio.timeout(BODY_S):
            return await received(request)
    except TimeoutError:
        raise RequestTimeout(f"the body was not here within {BODY_S:g} s") from None


async def _permitted(request: Request, row: RouteRow) -> Response:
    asker = person(request)
    if asker.role.rank < row.role.rank:
        await NAMES.learn(asker.name)
    need(asker, row.role)
    check_query(request, row.query)
    return await row.handler(request)


async def _ordered(
    services: Services, request: Request, row: RouteRow, doing: Coroutine[Any, Any, Response]
) -> Response:
    path = {name: named(request, name) for name in request.path_params}
    order = AuditedOrder(row.name, person(request).name, path, request.scope[ABOUT], origin(request))
    return await carried_out(services.roster, services.audit_log, order, doing)


async def _not_routed(request: Request, _: Exception) -> Response:
    return failure(NotFound(f"there is no {request.url.path}"), request.url.path)
