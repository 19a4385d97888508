"""The rows of the API, what is made of them, and the same as it is for the code: a client may meet further fields in
an answer, the code gives none."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

from hive.api.app import rows
from hive.api.openapi import document
from hive.api.routes import RouteRow


class Nobody:
    """Services that are not asked."""


def table() -> list[RouteRow]:
    return rows(Nobody(), pause_timeout_s=1, stopping=asyncio.Event())  # type: ignore[arg-type]


def strict(whole: dict[str, Any]) -> dict[str, Any]:
    """`whole`, but that an answer has the fields that are described and no other; an event has what its kind has."""
    found = copy.deepcopy(whole)
    for name, schema in found["components"]["schemas"].items():
        if "properties" in schema and name != "Event":
            schema.setdefault("additionalProperties", False)
    return found


ROWS = table()
WHOLE = document(ROWS, version="1.2.3")
