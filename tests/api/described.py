"""The rows of the API, what is made of them, and the same as it is for the code: a client may meet further fields in
an answer, the code gives none."""

from __future__ import annotations

import asyncio
import copy
import json
from typing import Any

import httpx
import jsonschema_rs

from hive.api.app import rows
from hive.api.openapi import document
from hive.api.routes import EVENTS, NDJSON, RouteRow


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
STRICT = strict(WHOLE)


def check(schema: Any, answer: Any) -> None:
    """Raises where the answer is not as the schema, or has a field that is not described."""
    jsonschema_rs.validate({**schema, "components": STRICT["components"]}, answer)


def check_answer(row: RouteRow, answer: httpx.Response) -> None:
    """The same for a whole answer of this row, an error included."""
    described = STRICT["paths"][row.path][row.method.lower()]["responses"][str(answer.status_code)]
    if "$ref" in described:
        described = STRICT["components"]["responses"][described["$ref"].rpartition("/")[2]]
    by_kind = {kind.partition(";")[0]: content for kind, content in described["content"].items()}
    kind = answer.headers["content-type"].partition(";")[0]
    content = by_kind[kind]
    if kind == EVENTS:
        for event in events_of(answer.text):
            check(content["schema"], event)
            check(content["schema"]["properties"]["data"]["contentSchema"], json.loads(event["data"]))
    elif kind == NDJSON:
        for told in answer.text.splitlines():
            check(content["schema"]["contentSchema"], json.loads(told))
    elif kind.endswith("json"):
        check(content["schema"], answer.json())


def events_of(text: str) -> list[dict[str, str]]:
    """The events of a stream, each its fields by name."""
    blocks = [block for block in text.split("\n\n") if block]
    assert blocks
    return [dict(line.split(": ", 1) for line in block.splitlines()) for block in blocks]
