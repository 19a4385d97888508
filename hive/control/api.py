"""REST on hive.sock: one row per path, each a few lines around a call of the desk.

Success is the bare result, an error is application/problem+json with the code and the hint of its `HiveError`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from hive.agents.spec import check
from hive.control import clock
from hive.control.auth import Peer, Person, need, person_of
from hive.control.desk import Answer, Desk
from hive.control.orders import NAME_MAX, Order, carried_out
from hive.control.tail import follow, tail
from hive.domain import AgentSpec, Role
from hive.errors import BadRequest, HiveError, MethodNotAllowed, NotFound, TooLarge
from hive.exposition import CONTENT_TYPE
from hive.host import accounts
from hive.host.accounts import Accounts
from hive.link.server import bind_private, groups_of, peer_of
from hive.store.audit import Filter
from hive.store.usage import Asked, By
from hive.tasks import spawn

log = logging.getLogger("hive.api")

BODY_MAX_BYTES = 1024 * 1024
PERIODS_S = {"1h": 3600.0, "6h": 6 * 3600.0, "24h": 86400.0, "7d": 7 * 86400.0, "30d": 30 * 86400.0}
TAIL_MAX = 100_000
LOG_LINES_MAX = 10_000
KEEP_AWAKE_MAX_S = 30 * 86400.0
WAIT_MAX_S = 600
HEARTBEAT_S = 15.0
"""A comment this often keeps proxies and clients from taking a silent event stream for a dead one."""
AUDIT_MAX = 1000
MOST_ID = 999_999_999_999_999
TOLD = frozenset({"tokens", "access"})
"""Handlers that change nothing, and are in the audit table all the same: they hand out secrets."""
STOP_S = 2.0
"""How long open answers may take to end when the server stops."""

Handler = Callable[[Request], Awaitable[Response]]
Result = TypeVar("Result")


class PauseOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of POST …/pause. `timeout_s` None is the setting. `deep`: with its memory paged out."""

    timeout_s: float | None = None
    now: bool = False
    deep: bool = False


class KeepAwakeOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of POST …/keep-awake: from now on for so many seconds, or a length like `10m`; 0 ends it."""

    for_s: float | str


class MessageOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of POST …/messages."""

    text: str


class ScheduleOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of POST …/schedules. `when`: 07:30, 2026-11-21T07:30 or +10m; `every`: 1h, 1d."""

    when: str
    every: str | None = None
    note: str = ""


class SwitchOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of POST /api/system/inference. `backend`: a kind, or an address like `http://127.0.0.1:8000`."""

    backend: str


class Endpoints:
    """The handlers. Those that change something run in a task of their own, which a leaving client does not cancel."""

    def __init__(self, desk: Desk, *, pause_timeout_s: float, stopping: asyncio.Event) -> None:
        self._desk = desk
        self._pause_timeout_s = pause_timeout_s
        self._stopping = stopping

    def routes(self) -> list[Route]:
        rows: list[tuple[str, str, Role, Handler]] = [
            ("GET", "/api/health", Role.VIEWER, self.health),
            ("GET", "/api/agents", Role.VIEWER, self.list_agents),
            ("POST", "/api/agents", Role.OPERATOR, self.create),
            ("GET", "/api/agents/{ref}", Role.VIEWER, self.show),
            ("PUT", "/api/agents/{ref}", Role.OPERATOR, self.apply),
            ("DELETE", "/api/agents/{ref}", Role.OPERATOR, self.remove),
            ("POST", "/api/agents/{ref}/start", Role.OPERATOR, self.start),
            ("POST", "/api/agents/{ref}/stop", Role.OPERATOR, self.stop),
            ("POST", "/api/agents/{ref}/restart", Role.OPERATOR, self.restart),
            ("POST", "/api/agents/{ref}/resume", Role.OPERATOR, self.resume),
            ("POST", "/api/agents/{ref}/pause", Role.OPERATOR, self.pause),
            ("POST", "/api/agents/{ref}/keep-awake", Role.OPERATOR, self.keep_awake),
            ("GET", "/api/agents/{ref}/messages", Role.VIEWER, self.messages),
            ("POST", "/api/agents/{ref}/messages", Role.OPERATOR, self.send),
            ("GET", "/api/agents/{ref}/messages/{id}", Role.VIEWER, self.message),
            ("DELETE", "/api/agents/{ref}/messages/{id}", Role.OPERATOR, self.drop_message),
            ("GET", "/api/agents/{ref}/schedules", Role.VIEWER, self.schedules),
            ("POST", "/api/agents/{ref}/schedules", Role.OPERATOR, self.schedule),
            ("DELETE", "/api/agents/{ref}/schedules/{id}", Role.OPERATOR, self.cancel_schedule),
            ("GET", "/api/agents/{ref}/logs", Role.VIEWER, self.logs),
            ("GET", "/api/agents/{ref}/tokens", Role.OPERATOR, self.tokens),
            ("GET", "/api/agents/{ref}/usage", Role.VIEWER, self.agent_usage),
            ("GET", "/api/usage", Role.VIEWER, self.usage),
            ("GET", "/api/system/inference", Role.VIEWER, self.inference),
            ("POST", "/api/system/inference", Role.ADMIN, self.switch),
            ("GET", "/api/system/inference/stats", Role.VIEWER, self.inference_stats),
            ("GET", "/api/system/backends", Role.VIEWER, self.backends),
            ("GET", "/api/system/backends/logs", Role.OPERATOR, self.backend_log),
            ("GET", "/api/jobs", Role.VIEWER, self.jobs),
            ("GET", "/api/jobs/{id}", Role.VIEWER, self.job),
            ("DELETE", "/api/jobs/{id}", Role.ADMIN, self.cancel_job),
            ("GET", "/api/system/access", Role.OPERATOR, self.access),
            ("GET", "/api/system/memory", Role.VIEWER, self.memory),
            ("POST", "/api/system/shutdown", Role.ADMIN, self.shutdown),
            ("GET", "/api/stats", Role.VIEWER, self.stats),
            ("GET", "/metrics", Role.VIEWER, self.metrics),
            ("GET", "/api/events", Role.VIEWER, self.events),
            ("GET", "/api/audit", Role.OPERATOR, self.audit),
        ]
        handlers: dict[str, dict[str, tuple[Role, Handler]]] = {}
        for method, path, role, handler in rows:
            handlers.setdefault(path, {})[method] = (role, handler)
        return [
            Route(path, _answering(self._desk, by_method), methods=["GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
            for path, by_method in handlers.items()
        ]

    async def health(self, _: Request) -> Response:
        return _json(self._desk.health())

    async def list_agents(self, _: Request) -> Response:
        return _json({"agents": await self._desk.views()})

    async def show(self, request: Request) -> Response:
        return _json(await self._desk.view(_ref(request)))

    async def create(self, request: Request) -> Response:
        spec = check(_body(request, AgentSpec))
        request.scope[ABOUT]["name"] = spec.name
        return _json(await _carried_through(self._desk.create(spec, _actor(request))), status=201)

    async def apply(self, request: Request) -> Response:
        spec = check(_body(request, AgentSpec))
        if spec.name != _ref(request):
            raise BadRequest(f"name: the path says {_ref(request)!r}, the body {spec.name!r}")
        request.scope[ABOUT] |= {"name": spec.name, "dry_run": _flag(request, "dry_run")}
        applying = self._desk.apply(spec, _actor(request), dry_run=_flag(request, "dry_run"))
        return _json(await _carried_through(applying))

    async def remove(self, request: Request) -> Response:
        return _json(await _carried_through(self._desk.remove(_ref(request), _actor(request))))

    async def shutdown(self, request: Request) -> Response:
        return _json(await _carried_through(self._desk.shutdown(_actor(request))))

    async def start(self, request: Request) -> Response:
        return _json(await _carried_through(self._desk.start(_ref(request), _actor(request))))

    async def stop(self, request: Request) -> Response:
        return _json(await _carried_through(self._desk.stop(_ref(request), _actor(request))))

    async def restart(self, request: Request) -> Response:
        return _json(await _carried_through(self._desk.restart(_ref(request), _actor(request))))

    async def resume(self, request: Request) -> Response:
        return _json(await _carried_through(self._desk.resume(_ref(request), _actor(request))))

    async def pause(self, request: Request) -> Response:
        order = _body(request, PauseOrder, empty=PauseOrder())
        timeout_s = self._pause_timeout_s if order.timeout_s is None else order.timeout_s
        if not 0 <= timeout_s <= 86400:
            raise BadRequest(f"timeout_s: {timeout_s:g} is not from 0 to 86400 seconds")
        pausing = self._desk.pause(
            _ref(request), timeout_s=timeout_s, now=order.now, deep=order.deep, actor=_actor(request)
        )
        return _json(await _carried_through(pausing))

    async def keep_awake(self, request: Request) -> Response:
        order = _body(request, KeepAwakeOrder)
        for_s = clock.seconds_of(order.for_s, field="for") if isinstance(order.for_s, str) else order.for_s
        if not 0 <= for_s <= KEEP_AWAKE_MAX_S:
            raise BadRequest(f"for: {for_s:.0f} is not from 0 seconds to {KEEP_AWAKE_MAX_S / clock.DAY_S:.0f} days")
        return _json(await _carried_through(self._desk.keep_awake(_ref(request), for_s, _actor(request))))

    async def send(self, request: Request) -> Response:
        order = _body(request, MessageOrder)
        sending = self._desk.send(_ref(request), order.text, _actor(request))
        return _json(await _carried_through(sending), status=202)

    async def messages(self, request: Request) -> Response:
        return _json(await self._desk.messages(_ref(request)))

    async def message(self, request: Request) -> Response:
        wait_s = _number(request, "wait_s", default=0, most=WAIT_MAX_S)
        return _json(await self._desk.message(_ref(request), _ref(request, "id"), wait_s=wait_s))

    async def drop_message(self, request: Request) -> Response:
        dropping = self._desk.drop_message(_ref(request), _ref(request, "id"), _actor(request))
        return _json(await _carried_through(dropping))

    async def schedules(self, request: Request) -> Response:
        return _json(self._desk.schedules(_ref(request)))

    async def schedule(self, request: Request) -> Response:
        order = _body(request, ScheduleOrder)
        adding = self._desk.schedule(_ref(request), order.when, order.every, order.note, _actor(request))
        return _json(await _carried_through(adding), status=201)

    async def cancel_schedule(self, request: Request) -> Response:
        text = _ref(request, "id")
        if not re.fullmatch("[0-9]{1,15}", text):
            raise BadRequest(f"a schedule has a number, not {text[:20]!r}")
        cancelling = self._desk.cancel_schedule(_ref(request), int(text), _actor(request))
        return _json(await _carried_through(cancelling))

    async def logs(self, request: Request) -> Response:
        output = self._desk.output(_ref(request))
        count = _number(request, "tail", default=100, most=TAIL_MAX)
        if not _flag(request, "follow"):
            return Response(await tail(output, count), media_type="text/plain; charset=utf-8")
        await tail(output, 0)  # what is wrong with it is told before the answer has begun
        return StreamingResponse(follow(output, count, self._stopping), media_type="text/plain; charset=utf-8")

    async def tokens(self, request: Request) -> Response:
        return _json(self._desk.tokens(_ref(request)))

    async def agent_usage(self, request: Request) -> Response:
        period = request.query_params.get("period", "24h")
        if period not in PERIODS_S:
            raise BadRequest(f"period: expected one of {', '.join(PERIODS_S)}, found {period[:20]!r}")
        limit = _number(request, "limit", default=100, most=10_000)
        return _json(await self._desk.agent_usage(_ref(request), PERIODS_S[period], period, limit))

    async def usage(self, request: Request) -> Response:
        asked = request.query_params
        by = asked.get("by", By.AGENT)
        if by not in list(By):
            raise BadRequest(f"by: expected one of {', '.join(By)}, found {by[:20]!r}")
        of = Asked(agent=asked.get("agent"), tenant=asked.get("tenant"), model=asked.get("model"))
        since_s = clock.seconds_of(asked.get("since", "24h"), field="since")
        return _json(await self._desk.usage(since_s, By(by), of))

    async def inference(self, _: Request) -> Response:
        return _json(self._desk.inference())

    async def inference_stats(self, _: Request) -> Response:
        return _json(await self._desk.inference_stats())

    async def metrics(self, _: Request) -> Response:
        return Response(await self._desk.metrics(), media_type=CONTENT_TYPE)

    async def switch(self, request: Request) -> Response:
        order = _body(request, SwitchOrder)
        request.scope[ABOUT]["backend"] = order.backend[:NAME_MAX]
        job = await _carried_through(self._desk.switch(order.backend, _actor(request)))
        return _json(job, status=202 if job["state"] == "running" else 200)

    async def backends(self, _: Request) -> Response:
        return _json(await self._desk.backends())

    async def backend_log(self, request: Request) -> Response:
        tail = _number(request, "tail", default=100, most=LOG_LINES_MAX)
        text = await self._desk.backend_log(request.query_params.get("backend", ""), tail)
        return Response(text, media_type="text/plain; charset=utf-8")

    async def jobs(self, request: Request) -> Response:
        return _json({"jobs": await self._desk.jobs(_number(request, "limit", default=20, most=1000))})

    async def job(self, request: Request) -> Response:
        wait_s = _number(request, "wait_s", default=0, most=WAIT_MAX_S)
        return _json(await self._desk.job(_ref(request, "id"), wait_s=wait_s))

    async def cancel_job(self, request: Request) -> Response:
        return _json(await _carried_through(self._desk.cancel_job(_ref(request, "id"))))

    async def audit(self, request: Request) -> Response:
        since, before = request.query_params.get("since"), _number(request, "before", default=0, most=MOST_ID)
        agent = request.query_params.get("agent", "")[:NAME_MAX]
        asked = Filter(
            agent=(agent,) if agent else (),
            actor=request.query_params.get("actor", "")[:NAME_MAX],
            act=request.query_params.get("act", "")[:NAME_MAX],
            since=None if since is None else time.time() - clock.seconds_of(since, field="since"),
            before=before or None,
        )
        return _json(await self._desk.audit(asked, max(1, _number(request, "limit", default=100, most=AUDIT_MAX))))

    async def access(self, _: Request) -> Response:
        return _json(self._desk.access())

    async def memory(self, _: Request) -> Response:
        return _json(self._desk.memory())

    async def stats(self, _: Request) -> Response:
        return _json(self._desk.stats())

    async def events(self, request: Request) -> Response:
        tail = _number(request, "tail", default=20, most=TAIL_MAX)
        return StreamingResponse(
            self._event_stream(tail, live=_flag(request, "follow")),
            media_type="text/event-stream",
            headers={"cache-control": "no-store"},
        )

    async def _event_stream(self, tail: int, *, live: bool) -> AsyncIterator[bytes]:
        """Past events, then live ones: listening begins before the past is read, so that none falls between."""
        with self._desk.subscribe() as feed:
            past = await self._desk.past_events(tail)
            for event in past:
                yield _sse(event)
            while live:
                arrival = await _unless(self._stopping, _next(feed), timeout_s=HEARTBEAT_S)
                if arrival is None and self._stopping.is_set():
                    return
                if arrival is None:
                    yield b": still here\n\n"
                elif arrival not in past:
                    yield _sse(arrival)


def build(
    desk: Desk, people: Accounts, *, pause_timeout_s: float = 30.0, stopping: asyncio.Event | None = None
) -> Starlette:
    """The application. Setting `stopping` ends the streams that follow something."""
    endpoints = Endpoints(desk, pause_timeout_s=pause_timeout_s, stopping=stopping or asyncio.Event())
    app = Starlette(routes=endpoints.routes(), exception_handlers={HTTPException: _not_routed})
    app.state.accounts = people
    return app


class Server:
    """The API, listening. `close` ends it: streams end, answers under way get `STOP_S`."""

    def __init__(self, desk: Desk, path: Path, people: Accounts, *, pause_timeout_s: float) -> None:
        self._stopping = asyncio.Event()
        self._path = path
        sock = bind_private(path, group=people.operators)
        self._inode = os.stat(path).st_ino
        app = build(desk, people, pause_timeout_s=pause_timeout_s, stopping=self._stopping)
        self._uvicorn = _Uvicorn(
            uvicorn.Config(
                app,
                http=_Protocol,
                ws="none",
                lifespan="off",
                log_config=None,
                log_level=logging.ERROR,
                access_log=False,
                server_header=False,
                date_header=False,
                timeout_graceful_shutdown=int(STOP_S),
            )
        )
        self._serving = spawn(self._uvicorn.serve(sockets=[sock]), name="api")

    @property
    def is_serving(self) -> bool:
        return not self._serving.done()

    async def ready(self) -> None:
        """Returns when connections are accepted."""
        await self._uvicorn.listening.wait()

    async def close(self) -> None:
        """Stops listening, removes the socket file if it is still ours, ends every answer."""
        with contextlib.suppress(OSError):
            if os.stat(self._path).st_ino == self._inode:
                self._path.unlink()
        self._stopping.set()
        self._uvicorn.leave.set()
        await self._serving


async def serve(desk: Desk, path: Path, people: Accounts | None = None, *, pause_timeout_s: float = 30.0) -> Server:
    """Serves the API on a unix socket at `path` in the running loop; returns when it accepts.

    Without `people` only root and this process's own user are answered (mode 0600), with it their groups too (0660);
    everyone else gets 403. Raises OSError where it cannot bind.
    """
    server = Server(desk, path, people or accounts.own(), pause_timeout_s=pause_timeout_s)
    await server.ready()
    return server


class _Uvicorn(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()
        self.leave = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    async def main_loop(self) -> None:
        """uvicorn's own wakes up ten times a second, for a date we do not send and a signal we do not use."""
        await self.on_tick(0)
        await self.leave.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals belong to the daemon."""
        yield


class _Protocol(HttpToolsProtocol):
    """uvicorn's scope shows no peer on unix sockets (seen with 0.54), so each connection notes its own."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        sock = transport.get_extra_info("socket")
        _, uid, _ = peer_of(sock)
        self.app_state = {**self.app_state, "peer_uid": uid, "peer_groups": groups_of(sock)}
        super().connection_made(transport)


def _answering(
    desk: Desk, by_method: dict[str, tuple[Role, Handler]]
) -> Callable[[Request], Coroutine[Any, Any, Response]]:
    async def answer(request: Request) -> Response:
        try:
            person = _person(request)
            if request.method not in by_method:
                raise MethodNotAllowed(allow=", ".join(sorted(by_method)))
            role, handler = by_method[request.method]
            # also where the handler has no use for it: closing a socket with unread bytes takes the answer away
            request.scope[BODY] = await _received(request)
            about = request.scope[ABOUT] = {}
            doing = _permitted(request, person, role, handler)
            if request.method == "GET" and handler.__name__ not in TOLD:
                return await doing
            order = Order(
                handler.__name__, person.name, {name: _ref(request, name) for name in request.path_params}, about
            )
            return await _carried_through(carried_out(desk, order, doing))
        except HiveError as error:
            return problem(error)
        except Exception:
            log.exception("api_failed method=%s path=%s", request.method, request.url.path)
            return problem(HiveError("Hive failed; its log says where"))

    return answer


async def _permitted(request: Request, person: Person, role: Role, handler: Handler) -> Response:
    need(person, role, f"{request.method} {request.url.path}")
    return await handler(request)


async def _not_routed(request: Request, _: Exception) -> Response:
    return problem(NotFound(f"there is no {request.url.path}"))


def problem(error: HiveError) -> Response:
    """The answer that carries this error (RFC 9457)."""
    body = {
        "type": "about:blank",
        "title": HTTPStatus(error.status).phrase,
        "status": error.status,
        "detail": error.message,
        "code": error.code,
        "hint": error.hint,
    }
    headers = {"allow": error.allow} if isinstance(error, MethodNotAllowed) else {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, round(error.retry_after_s)))
    return Response(_encoded(body), error.status, headers, "application/problem+json")


async def _carried_through(work: Coroutine[Any, Any, Result]) -> Result:
    """Awaits `work` in a task of its own: whoever asked for it may leave, it goes on."""
    outcome = await asyncio.shield(spawn(_outcome(work), name="api transition"))
    if isinstance(outcome, HiveError):
        raise outcome
    return outcome


async def _outcome(work: Coroutine[Any, Any, Result]) -> Result | HiveError:
    """A refusal is an outcome here: raised, it would be logged as the failure of a task."""
    try:
        return await work
    except HiveError as error:
        return error


async def _next(feed: AsyncIterator[Answer]) -> Answer:
    return await anext(feed)


async def _unless(stopping: asyncio.Event, arrival: Coroutine[Any, Any, Result], *, timeout_s: float) -> Result | None:
    """What arrives; None once `stopping` is set or `timeout_s` have passed."""
    arriving, stopped = spawn(arrival, name="api arrival"), spawn(stopping.wait(), name="api stopping")
    try:
        await asyncio.wait([arriving, stopped], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        return arriving.result() if arriving.done() else None
    finally:
        arriving.cancel()
        stopped.cancel()


Body = TypeVar("Body")
BODY = "hive.body"
"""Where in the scope the request's whole body is."""
ABOUT = "hive.about"
"""Where in the scope a handler leaves what the audit table shall know of its body."""


async def _received(request: Request) -> bytes:
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > BODY_MAX_BYTES:
            raise TooLarge(f"the body is larger than {BODY_MAX_BYTES} bytes")
    return bytes(data)


def _body(request: Request, shape: type[Body], *, empty: Body | None = None) -> Body:
    data = request.scope[BODY]
    if not data and empty is not None:
        return empty
    try:
        return msgspec.json.decode(data, type=shape)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"the body is not what is expected here: {error}") from None


def _person(request: Request) -> Person:
    peer = Peer(request.state.peer_uid, request.state.peer_groups) if hasattr(request.state, "peer_uid") else None
    return person_of(peer, os.geteuid(), request.app.state.accounts)


def _actor(request: Request) -> str:
    return _person(request).name


def _ref(request: Request, of: str = "ref") -> str:
    """What the path names; quoted once more by our client, so that a slash in it is no part of the path."""
    return unquote(request.path_params[of])


def _number(request: Request, name: str, *, default: int, most: int) -> int:
    text = request.query_params.get(name, str(default))
    if not re.fullmatch("[0-9]{1,15}", text) or int(text) > most:
        raise BadRequest(f"{name}: expected a whole number from 0 to {most}, found {text[:20]!r}")
    return int(text)


def _flag(request: Request, name: str) -> bool:
    text = request.query_params.get(name, "0")
    if text not in ("0", "1"):
        raise BadRequest(f"{name}: expected 0 or 1, found {text[:20]!r}")
    return text == "1"


def _json(answer: Answer, *, status: int = 200) -> Response:
    return Response(_encoded(answer), status, media_type="application/json")


def _encoded(answer: Answer) -> bytes:
    return msgspec.json.encode(answer)


def _sse(event: Answer) -> bytes:
    return f"event: {event['kind']}\ndata: {json.dumps(event)}\n\n".encode()
