"""The part of the API that reads Hive's own database with SQL."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from hive.api.caller import note
from hive.api.params import JSON, Words, body_of
from hive.api.routes import RouteRow
from hive.audit.shielded import unless_left
from hive.control.state_queries import Answered
from hive.domain import Role
from hive.shapes.database import DbResult, DbSchema, DbTables

if TYPE_CHECKING:
    from hive.api.services import Services

SQL_MAX = 65536
"""Characters of a statement."""
SQL_KEPT = 1000
"""Characters of it in the audit table."""
LIMIT, LIMIT_MOST = 1000, 100_000
TIMEOUT_S, TIMEOUT_MOST_S = 5.0, 60.0
TABLE = Words("table", "Only this one; may be given again. Without it all.", most=100)

Result = TypeVar("Result")


class DbQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One SQL statement that reads. `params`: what `:name` in it stands for. `secrets`: also show what is hidden."""

    sql: Annotated[str, Meta(min_length=1, max_length=SQL_MAX)]
    params: dict[str, str | int | float | bool | None] = {}
    limit: Annotated[int, Meta(ge=1, le=LIMIT_MOST)] = LIMIT
    timeout_s: Annotated[float, Meta(ge=0.1, le=TIMEOUT_MOST_S)] = TIMEOUT_S
    secrets: bool = False


class DbApi:
    """The handlers."""

    def __init__(self, services: Services, *, stopping: asyncio.Event) -> None:
        self._services = services
        self._stopping = stopping

    def rows(self) -> list[RouteRow]:
        return [
            RouteRow(
                method="GET",
                path="/api/db/tables",
                role=Role.ADMIN,
                name="list_tables",
                handler=self.list_tables,
                says="The tables of Hive's database.",
                answer=DbTables,
                errors=(504,),
            ),
            RouteRow(
                method="GET",
                path="/api/db/schema",
                role=Role.ADMIN,
                name="show_schema",
                handler=self.show_schema,
                says="The statements that make its tables.",
                answer=DbSchema,
                query=(TABLE,),
                errors=(404, 504),
            ),
            RouteRow(
                method="POST",
                path="/api/db/query",
                role=Role.ADMIN,
                name="query_database",
                handler=self.query_database,
                says="Read it with SQL.",
                answer=DbResult,
                body=DbQuery,
            ),
        ]

    async def list_tables(self, request: Request) -> Response:
        """`hidden` columns are NULL in a query without `secrets`."""
        return _as_json(await self._while_wanted(request, self._services.state_queries.tables()))

    async def show_schema(self, request: Request) -> Response:
        tables = TABLE.of(request) if TABLE.name in request.query_params else []
        return _as_json(await self._while_wanted(request, self._services.state_queries.schema(tables)))

    async def query_database(self, request: Request) -> Response:
        """One statement that only reads, and what it finds: at most `limit` rows and 8 MiB, within `timeout_s`.

        A column that holds a secret (text of messages, prompts, specs of agents, kept responses, digests of tokens) is
        NULL without `secrets`. The query ends when its client leaves. Two run at a time, one more is 503. The statement
        is in the audit table.
        """
        order = body_of(request, DbQuery)
        note(request, sql=shortened(order.sql), secrets=order.secrets)
        found = await self._while_wanted(
            request,
            self._services.state_queries.query(
                order.sql, order.params, limit=order.limit, timeout_s=order.timeout_s, secrets=order.secrets
            ),
        )
        note(request, rows=found.rows)
        return _as_json(found)

    async def _while_wanted(self, request: Request, asking: Coroutine[Any, Any, Result]) -> Result:
        return await unless_left(asking, request.receive, self._stopping)


def shortened(sql: str) -> str:
    """A statement as the audit table keeps it: its beginning and its end, for either may be a long comment.

    >>> shortened("SELECT 1"), len(shortened("x" * 5000)), shortened("x" * 5000)[-8:]
    ('SELECT 1', 1028, 'xxxxxxxx')
    """
    if len(sql) <= SQL_KEPT:
        return sql
    half = SQL_KEPT // 2
    return f"{sql[:half]} [{len(sql) - SQL_KEPT} characters left out] {sql[-half:]}"


def _as_json(answered: Answered) -> Response:
    return Response(answered.text, media_type=JSON)
