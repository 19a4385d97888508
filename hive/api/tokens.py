"""The part of the API that is about its own tokens, by which one asks over TCP."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from hive.api.caller import actor, note
from hive.api.order_audit import NAME_MAX
from hive.api.params import LENGTH, Flag, body_of, named
from hive.api.responses import as_json
from hive.api.routes import RouteRow
from hive.control import schedule_times, views
from hive.domain import NAME, Role, TokenState, is_name
from hive.errors import BadRequest
from hive.shapes.tokens import ApiToken, ApiTokens, NewApiToken

if TYPE_CHECKING:
    from hive.api.services import Services

ALL = Flag("all", "1: also those that are good no longer.")
EXPIRES_MAX_S = 10 * 365 * schedule_times.DAY_S


class TokenOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`expires_in`: seconds, or a length like `30d`; without it the token is good until it is revoked."""

    name: Annotated[str, Meta(extra_json_schema={"pattern": f"^{NAME.pattern}$"})]
    role: Role
    expires_in: (
        Annotated[float, Meta(extra_json_schema={"minimum": 1, "maximum": EXPIRES_MAX_S})]
        | Annotated[str, Meta(extra_json_schema={"pattern": LENGTH})]
        | None
    ) = None


class TokenApi:
    """The handlers."""

    def __init__(self, services: Services) -> None:
        self._services = services

    def rows(self) -> list[RouteRow]:
        return [
            RouteRow(
                "GET",
                "/api/tokens",
                Role.ADMIN,
                "list_tokens",
                self.list_tokens,
                "The tokens of this API.",
                ApiTokens,
                query=(ALL,),
            ),
            RouteRow(
                "POST",
                "/api/tokens",
                Role.ADMIN,
                "create_token",
                self.create_token,
                "Make a token.",
                NewApiToken,
                body=TokenOrder,
                statuses=(201,),
            ),
            RouteRow(
                "DELETE",
                "/api/tokens/{id}",
                Role.ADMIN,
                "revoke_token",
                self.revoke_token,
                "Make a token good no longer.",
                ApiToken,
            ),
        ]

    async def list_tokens(self, request: Request) -> Response:
        now, also_dead = time.time(), ALL.of(request)
        found = [views.token_view(token, now) for token in await self._services.api_tokens.tokens()]
        return as_json({"tokens": [token for token in found if also_dead or token["state"] is TokenState.LIVE]})

    async def create_token(self, request: Request) -> Response:
        """It may do what its role may. The token itself is in this answer and is shown never again."""
        order = body_of(request, TokenOrder)
        note(request, name=order.name[:NAME_MAX], role=order.role, expires_in=str(order.expires_in)[:NAME_MAX])
        if not is_name(order.name):
            hint = "a letter a-z, then up to 39 of a-z, 0-9 and -"
            raise BadRequest(f"name: {order.name[:60]!r} is no name", hint=hint)
        now, expires_in_s = time.time(), _seconds(order.expires_in)
        expires_at = None if expires_in_s is None else now + expires_in_s
        token, secret = await self._services.api_tokens.create(
            order.name, order.role, expires_at=expires_at, actor=actor(request), now=now
        )
        return as_json({**views.token_view(token, now), "token": secret}, status=201)

    async def revoke_token(self, request: Request) -> Response:
        """Revokes by id or name. The token is refused from now on, and streams that are open to it end."""
        now = time.time()
        revoked = await self._services.api_tokens.revoke(named(request, "id"), now=now)
        note(request, name=revoked.name, role=revoked.role)
        return as_json(views.token_view(revoked, now))


def _seconds(expires_in: float | str | None) -> float | None:
    seconds = schedule_times.seconds_of(expires_in, field="expires_in") if isinstance(expires_in, str) else expires_in
    if seconds is not None and not 1 <= seconds <= EXPIRES_MAX_S:
        raise BadRequest(f"expires_in: {seconds:g} is not from 1 second to ten years")
    return seconds
