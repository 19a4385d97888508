"""The part of the API that is about its own tokens, by which one asks over TCP."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from hive.api.caller import actor, note
from hive.api.order_audit import NAME_MAX
from hive.api.params import LENGTH, Flag, body_of, named
from hive.api.responses import as_json
from hive.api.routes import RouteRow
from hive.control import schedule_times
from hive.control.desk import Desk
from hive.control.shielded import carried_through
from hive.domain import NAME, Role, is_name
from hive.errors import BadRequest
from hive.shapes.tokens import ApiToken, ApiTokens, NewApiToken

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

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    def rows(self) -> list[RouteRow]:
        return [
            RouteRow(
                "GET",
                "/api/tokens",
                Role.ADMIN,
                self.list_tokens,
                "The tokens of this API.",
                ApiTokens,
                query=(ALL,),
            ),
            RouteRow(
                "POST",
                "/api/tokens",
                Role.ADMIN,
                self.create_token,
                "Make a token.",
                NewApiToken,
                body=TokenOrder,
                statuses=(201,),
            ),
            RouteRow(
                "DELETE", "/api/tokens/{id}", Role.ADMIN, self.revoke_token, "Make a token good no longer.", ApiToken
            ),
        ]

    async def list_tokens(self, request: Request) -> Response:
        return as_json(await self._desk.api_tokens(also_dead=ALL.of(request)))

    async def create_token(self, request: Request) -> Response:
        """It may do what its role may. The token itself is in this answer and is shown never again."""
        order = body_of(request, TokenOrder)
        note(request, name=order.name[:NAME_MAX], role=order.role, expires_in=str(order.expires_in)[:NAME_MAX])
        if not is_name(order.name):
            hint = "a letter a-z, then up to 39 of a-z, 0-9 and -"
            raise BadRequest(f"name: {order.name[:60]!r} is no name", hint=hint)
        made = self._desk.create_api_token(order.name, order.role, _seconds(order.expires_in), actor(request))
        return as_json(await carried_through(made), status=201)

    async def revoke_token(self, request: Request) -> Response:
        """Revokes by id or name. The token is refused from now on, and streams that are open to it end."""
        revoked = await carried_through(self._desk.revoke_api_token(named(request, "id"), actor(request)))
        note(request, name=revoked["name"], role=revoked["role"])
        return as_json(revoked)


def _seconds(expires_in: float | str | None) -> float | None:
    seconds = schedule_times.seconds_of(expires_in, field="expires_in") if isinstance(expires_in, str) else expires_in
    if seconds is not None and not 1 <= seconds <= EXPIRES_MAX_S:
        raise BadRequest(f"expires_in: {seconds:g} is not from 1 second to ten years")
    return seconds
