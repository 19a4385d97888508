"""The part of the API that is about itself."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from hive import __version__
from hive.api.openapi import document
from hive.api.routes import RouteRow
from hive.domain import Role


class DescriptionApi:
    """The handlers. `table`: every row there is, these among them; made into a description on request."""

    def __init__(self, table: list[RouteRow]) -> None:
        self._table = table

    def rows(self) -> list[RouteRow]:
        return [
            RouteRow(
                "GET", "/api/openapi.json", Role.VIEWER, "openapi", self.openapi, "This description.", dict[str, Any]
            )
        ]

    @cached_property
    def _document(self) -> bytes:
        return msgspec.json.encode(document(self._table, version=__version__))

    async def openapi(self, _: Request) -> Response:
        """OpenAPI 3.1, made from the table the server itself works by."""
        return Response(self._document, media_type="application/json")
