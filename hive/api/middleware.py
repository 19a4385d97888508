"""The middleware before the API: the caller is known before anything of the request's body is read.

On a unix socket the kernel names the user; on TCP a token does, once the request is seen to be meant for this Hive.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from typing import NamedTuple

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from hive.api.caller import ORIGIN, PERSON, SOCKET
from hive.api.connections import OverTcp
from hive.api.failures import Failures
from hive.api.relay import Relayed
from hive.api.responses import failure
from hive.audit.auth import Person, bearer_of, person_of
from hive.control.api_tokens import Key, LiveTokens
from hive.control.hosts import Reached, check_host
from hive.errors import HiveError, NotPermitted, TooManyRequests, Unauthorized
from hive.host.accounts import Accounts

log = logging.getLogger("hive.api")

LEFT_S = 1.0
LEFT_MAX_BYTES = 1024 * 1024
"""Of the body of a refused request so much is read and forgotten: a socket closed with unread bytes takes the answer
with it."""


FIELDS = ("host", "origin", "authorization")


class TcpEntry(NamedTuple):
    """The rules for callers on TCP. `listen`: the address it listens at, `hosts`: further names it has."""

    api_tokens: LiveTokens
    listen: str
    hosts: frozenset[str]
    failures: Failures


class AuthMiddleware:
    """An ASGI middleware. `door` None: no request is let in on TCP.

    The caller that it lets in is left in the scope (caller.py).
    """

    def __init__(self, app: ASGIApp, people: Accounts, door: TcpEntry | None, tokens: LiveTokens) -> None:
        """`tokens`: for callers of the runner's listener, whose requests the proxy relays."""
        self._app = app
        self._tokens = tokens
        self._relayed_failures = Failures()
        self._people = people
        self._door = door

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        relayed: Relayed | None = scope["state"].get("relayed")
        if relayed is not None:
            await self._let_in(relayed, scope, receive, send)
            return
        tcp: OverTcp | None = scope["state"].get("tcp")
        try:
            key = None if tcp is None else self._key(Headers(scope=scope), tcp)
            person = self._by_socket(scope) if key is None else key.person
        except HiveError as error:
            await self._refuse(error, scope, receive, send, over_tcp=tcp is not None)
            return
        scope[PERSON], scope[ORIGIN] = person, SOCKET if tcp is None else f"tcp:{tcp.peer}"
        if tcp is None or key is None or self._door is None:
            await self._app(scope, receive, send)
            return
        tcp.trust()
        # what one orders is carried through and answered, also where it is the end of its own token
        may_last = scope["method"] == "GET" or scope["path"].endswith("/exec")
        meanwhile = self._door.api_tokens.held(key, tcp.hang_up) if may_last else contextlib.nullcontext()
        with meanwhile:
            await self._app(scope, receive, send)

    async def _let_in(self, relayed: Relayed, scope: Scope, receive: Receive, send: Send) -> None:
        """A request that came to the runner's listener: its token says who asks, and nothing else does."""
        try:
            try:
                key = self._tokens.find(bearer_of(relayed.authorization), time.time())
            except Unauthorized as error:
                raise self._counted(error, relayed.peer, self._relayed_failures) from None
        except HiveError as error:
            answer = failure(error, scope["path"])
            if error.status == Unauthorized.status:
                answer.headers["www-authenticate"] = "Bearer"
            await answer(scope, receive, send)
            return
        scope[PERSON], scope[ORIGIN] = key.person, f"runner:{relayed.peer}"
        await self._app(scope, receive, send)

    def _by_socket(self, scope: Scope) -> Person:
        return person_of(scope["state"].get("peer"), os.geteuid(), self._people)

    def _key(self, headers: Headers, tcp: OverTcp) -> Key:
        door = self._door
        if door is None:
            raise NotPermitted("this Hive lets nobody in on TCP")
        fields = {name: [value.encode("latin-1") for value in headers.getlist(name)] for name in FIELDS}
        check_host(fields["host"], fields["origin"], Reached(tcp.address, tcp.port, door.listen, door.hosts))
        try:
            return door.api_tokens.find(bearer_of(fields["authorization"]), time.time())
        except Unauthorized as error:
            raise self._counted(error, tcp.peer, door.failures) from None

    def _counted(self, error: Unauthorized, peer: str, failures: Failures) -> HiveError:
        """The answer to such a failure: after too many, that it was one too many."""
        failed = failures.count(peer, time.monotonic())
        if failed.tell is not None:
            log.warning("api_refused peer=%s count=%d error=%s", peer, failed.tell, error.message)
        if failed.wait_s is None:
            return error
        return TooManyRequests(
            f"{failures.limit} requests without a good token came from {peer} within {failures.span_s:g} s",
            hint="one with a good token is answered all the same",
            retry_after_s=failed.wait_s,
        )

    async def _refuse(self, error: HiveError, scope: Scope, receive: Receive, send: Send, *, over_tcp: bool) -> None:
        """On TCP the connection ends with it: one that was trusted once keeps its place for as long as it is open."""
        answer: Response = failure(error, scope["path"])
        if error.status == Unauthorized.status:
            answer.headers["www-authenticate"] = "Bearer"
        is_read = await _all_read(receive, expected=b"expect" in dict(scope["headers"]))
        if over_tcp or not is_read:
            answer.headers["connection"] = "close"
        await answer(scope, receive, send)


async def _all_read(receive: Receive, *, expected: bool) -> bool:
    """Reads what is left of the body, if that is little and comes soon, and keeps none of it. Whether it has ended.

    `expected`: its sender waits to be told to go on, and is not.
    """
    seen = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LEFT_S):
            while not expected and seen <= LEFT_MAX_BYTES:
                message = await receive()
                if not message.get("more_body", False):
                    return bool(message["type"] != "http.disconnect")
                seen += len(message.get("body", b""))
    return False
