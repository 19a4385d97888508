"""One row per path and method: least role, handler, body and answer.

The server and the API's description are both made from these rows.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from hive.api.params import Header, Param
from hive.domain import Role
from hive.exposition import CONTENT_TYPE

Handler = Callable[[Request], Awaitable[Response]]

TEXT, EVENTS, METRICS = "text/plain", "text/event-stream", CONTENT_TYPE
STREAM = "application/octet-stream"
NDJSON = "application/x-ndjson"


class LeadsTo(NamedTuple):
    """The requests that may follow: the rows at `path` and below it. `by`: parameter of that path → its place in every
    answer of success, as a JSON pointer."""

    path: str
    by: Mapping[str, str]


class RouteRow(NamedTuple):
    """`answer`: the type of what is answered as JSON, a media type, or several. `statuses`: those of success.

    `each`: the type of one line or event of a stream.

    `name`: of the operation in the description, and of the act in the audit table (`order.NAME`).
    `says`: one sentence; what more there is to say is the docstring of the handler, which belongs to this row alone.
    `body`: the type of the body, None where none is read; `may_be_empty`: it has defaults for everything.
    `errors`: statuses beyond those that follow from what kind of row it is (openapi.py).
    `is_governed`: rules may want the word of signers for it (op_token.py).
    `is_secret`: it changes nothing, and is in the audit table all the same, because it hands out secrets.
    """

    method: str
    path: str
    role: Role
    name: str
    handler: Handler
    says: str
    answer: Any
    body: Any = None
    each: Any = None
    query: tuple[Param, ...] = ()
    headers: tuple[Header, ...] = ()
    statuses: tuple[int, ...] = (200,)
    errors: tuple[int, ...] = ()
    leads_to: LeadsTo | None = None
    may_be_empty: bool = False
    is_secret: bool = False
    is_governed: bool = False

    @property
    def is_order(self) -> bool:
        """Whether the caller and the end of a request are noted in the audit table."""
        return self.method != "GET" or self.is_secret
