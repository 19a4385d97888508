"""REST: the application made of the rows (routes.py), and what every request goes through before its handler.

Success is the bare result, an error is application/problem+json with the code and the hint of its `HiveError`.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from hive.control.answers import problem
from hive.control.api_agents import AgentApi
from hive.control.api_box import BoxApi
from hive.control.asked import BODY, check_query, named, received
from hive.control.auth import Peer, Person, need, person_of
from hive.control.caller import ABOUT, PERSON, person
from hive.control.carrying import carried_through
from hive.control.desk import Desk
from hive.control.orders import Order, carried_out
from hive.control.routes import Row
from hive.errors import HiveError, MethodNotAllowed, NotFound
from hive.host.accounts import Accounts

log = logging.getLogger("hive.api")

METHODS = ["GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"]
Answering = Callable[[Request], Coroutine[Any, Any, Response]]


def rows(desk: Desk, *, pause_timeout_s: float, stopping: asyncio.Event) -> list[Row]:
    """Everything the API answers."""
    return [
        *BoxApi(desk, stopping=stopping).rows(),
        *AgentApi(desk, pause_timeout_s=pause_timeout_s, stopping=stopping).rows(),
    ]


def build(
    desk: Desk, people: Accounts, *, pause_timeout_s: float = 30.0, stopping: asyncio.Event | None = None
) -> Starlette:
    """The application. Setting `stopping` ends the streams that follow something."""
    handlers: dict[str, dict[str, Row]] = {}
    for row in rows(desk, pause_timeout_s=pause_timeout_s, stopping=stopping or asyncio.Event()):
        handlers.setdefault(row.path, {})[row.method] = row
    routes = [Route(path, _answering(desk, by_method), methods=METHODS) for path, by_method in handlers.items()]
    app = Starlette(routes=routes, exception_handlers={HTTPException: _not_routed})
    app.state.accounts = people
    return app


def _answering(desk: Desk, by_method: dict[str, Row]) -> Answering:
    async def answer(request: Request) -> Response:
        try:
            request.scope[PERSON] = _person(request)
            if request.method not in by_method:
                raise MethodNotAllowed(allow=", ".join(sorted(by_method)))
            row = by_method[request.method]
            # also where the handler has no use for it: closing a socket with unread bytes takes the answer away
            request.scope[BODY] = await received(request)
            request.scope[ABOUT] = {}
            doing = _permitted(request, row)
            return await (carried_through(_ordered(desk, request, row, doing)) if row.is_order else doing)
        except HiveError as error:
            return problem(error)
        except Exception:
            log.exception("api_failed method=%s path=%s", request.method, request.url.path)
            return problem(HiveError("Hive failed; its log says where"))

    return answer


async def _permitted(request: Request, row: Row) -> Response:
    need(person(request), row.role, f"{request.method} {request.url.path}")
    check_query(request, row.query)
    return await row.handler(request)


async def _ordered(desk: Desk, request: Request, row: Row, doing: Coroutine[Any, Any, Response]) -> Response:
    path = {name: named(request, name) for name in request.path_params}
    order = Order(row.handler.__name__, person(request).name, path, request.scope[ABOUT])
    return await carried_out(desk, order, doing)


async def _not_routed(request: Request, _: Exception) -> Response:
    return problem(NotFound(f"there is no {request.url.path}"))


def _person(request: Request) -> Person:
    peer = Peer(request.state.peer_uid, request.state.peer_groups) if hasattr(request.state, "peer_uid") else None
    return person_of(peer, os.geteuid(), request.app.state.accounts)
