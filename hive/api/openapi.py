"""The API's description (OpenAPI 3.1), made from the rows and from nothing else. Pure."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Sequence
from http import HTTPStatus
from typing import Any, get_args

import msgspec

from hive.api import config_schema, spec_schema
from hive.api.op_token import PATTERNS, SAYS
from hive.api.params import JSON, Schema
from hive.api.responses import LATER, PROBLEM, is_runners
from hive.api.routes import EVENTS, NDJSON, LeadsTo, RouteRow
from hive.domain import AgentSpec
from hive.shapes.runner import RunnerFailure
from hive.shapes.system import Event, Problem

REF = "#/components/schemas/{name}"
BODIES = {"change_config": config_schema.changes}
"""Handler → what its body is, where the type says less than there is to say."""
PATH_PARAMS = {
    "adapter": "An adapter, by its name.",
    "ref": "An agent, by name or id.",
    "id": "As the answer that told of it has it.",
    "taskId": "As the answer to a load has it.",
    "model": "A model, by the inference server's name for it; a / in it is written %252F.",
    "template": "A template, by the name of its section.",
    "task": "A task, by the name of its section; `task:` may stand before it.",
}
TAGS = {
    "adapters": "LoRA weights that answer beside a model: bringing, loading, unloading, the keys they are signed with.",
    "agents": "Agents, and what belongs to one: messages, schedules, kept responses, tokens, logs, usage.",
    "audit": "Who did what.",
    "budgets": "Budgets of tokens.",
    "cache": "What inference servers keep of prompts.",
    "capabilities": "What this runner can do, and how it is.",
    "config": "Settings that change while Hive runs.",
    "db": "Hive's own database, read with SQL.",
    "events": "What happens.",
    "governance": "Operations that need more than one person's word.",
    "health": "How Hive is.",
    "jobs": "What takes long.",
    "leases": "Memory of the pool for programs that are no model.",
    "llm": "Adapters, by the paths that clients of a model runner know.",
    "metrics": "For Prometheus.",
    "models": "What the inference server offers, which model a request is given, loading and unloading.",
    "openapi.json": "This description.",
    "pool": "The models that share this box's memory.",
    "prompts": "System prompts, and who shares one.",
    "queue": "Who waits for the model.",
    "removals": "Agents, many at once.",
    "requests": "Single requests to the model.",
    "stats": "Counts.",
    "system": "The inference server, the host, Hive itself.",
    "tasks": "Ladders of models that requests ask for by one name.",
    "templates": "Processes with their packages imported, which agents are forked from.",
    "tokens": "Who may ask over TCP.",
    "usage": "What was used.",
}
"""First word of a path → what is there."""

ERRORS = {
    400: "Something of the request is not as it is described here.",
    401: "No token that is valid. Only over TCP: on the unix socket the kernel says who asks.",
    403: "Whoever asks may not do this, or this Hive's policy does not permit it.",
    404: "There is no such thing.",
    408: "The body did not come in time.",
    409: "Its state does not allow this now.",
    413: "The body is too large.",
    415: "The body is not `application/json`.",
    429: "Asked too often. Only over TCP, after tokens that were not valid.",
    500: "Hive failed; its log says where.",
    501: "What is in use here cannot do this.",
    502: "The inference server does not answer as it should.",
    503: "Something Hive needs does not answer, or there is no room for this now.",
    504: "It did not happen in time.",
    507: "The disk is full; nothing was changed.",
}
ALWAYS = frozenset({400, 401, 403, 429, 500, 503})
OF_THE_PATH = frozenset({404})
OF_A_BODY = frozenset({408, 413, 415})
OF_AN_ORDER = frozenset({409, 504, 507})
RUNNERS = "runner-"
"""Prefix of the runner API's own answers among the components."""

DESCRIPTION = """What the `hive` command asks, too.

On the unix socket the kernel says who asks; over TCP a bearer token does. What a role may (`x-hive-role`:
scraper, viewer, operator, admin) those behind it may as well.

A success is the bare result. An error is `application/problem+json` with a `code` for programs, and a `hint` that says
what to do next. HEAD is answered wherever GET is; any other method that a path does not take is 405 with `Allow`. A
parameter that is not described is refused, and so is a body with a member that is not, or with one that is there twice.

Answers may get further members: leave alone what you do not know.
"""


def document(rows: Sequence[RouteRow], *, version: str) -> Schema:
    """The whole description of these rows."""
    schemas, components = _schemas(rows)
    paths: dict[str, Schema] = {}
    for row in rows:
        paths.setdefault(row.path, {})[row.method.lower()] = _operation(row, rows, schemas)
    used = {tag_of(row.path) for row in rows}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Hive", "version": version, "description": DESCRIPTION},
        "servers": [{"url": "/"}],
        "tags": [{"name": name, "description": TAGS[name]} for name in sorted(used)],
        "security": [{"token": []}],
        "paths": dict(sorted(paths.items())),
        "components": {
            "schemas": dict(sorted(components.items())),
            "responses": {
                **{str(status): _error_response(status) for status in sorted(ERRORS)},
                **{f"{RUNNERS}{status}": _error_response(status, runners=True) for status in sorted(ERRORS)},
            },
            "securitySchemes": {
                "token": {"type": "http", "scheme": "bearer", "description": "Over TCP; none on the unix socket."}
            },
        },
    }


def errors_of(row: RouteRow) -> list[int]:
    """Statuses of the errors it may answer: those of its kind, and its own.

    >>> from hive.domain import Role
    >>> errors_of(RouteRow("GET", "/api/agents/{ref}", Role.VIEWER, "", None, "", dict))
    [400, 401, 403, 404, 429, 500, 503]
    """
    found = ALWAYS | set(row.errors)
    if "{" in row.path:
        found |= OF_THE_PATH
    if row.body is not None:
        found |= OF_A_BODY
    if row.method != "GET":
        found |= OF_AN_ORDER
    return sorted(found)


def _operation(row: RouteRow, rows: Sequence[RouteRow], schemas: dict[Any, Schema]) -> Schema:
    found: Schema = {
        "operationId": row.name,
        "summary": row.says,
        "tags": [tag_of(row.path)],
        "x-hive-role": str(row.role),
    }
    if more := _in_lines(inspect.getdoc(row.handler)):
        found["description"] = more
    if parameters := [*_path_parameters(row), *_query_parameters(row), *_headers(row)]:
        found["parameters"] = parameters
    if row.body is not None:
        found["requestBody"] = {
            "required": not row.may_be_empty,
            "content": {JSON: {"schema": _body(row, schemas)}},
        }
    success = {str(status): _success(row, status, rows, schemas) for status in row.statuses}
    mark = RUNNERS if is_runners(row.path) else ""
    errors = {str(status): {"$ref": f"#/components/responses/{mark}{status}"} for status in errors_of(row)}
    return {**found, "responses": {**success, **errors}}


def _body(row: RouteRow, schemas: dict[Any, Schema]) -> Schema:
    says_more = BODIES.get(row.name)
    return schemas[row.body] if says_more is None else says_more()


def tag_of(path: str) -> str:
    """
    >>> tag_of("/api/agents/{ref}"), tag_of("/metrics"), tag_of("/api/v1/config")
    ('agents', 'metrics', 'config')
    """
    return path.removeprefix("/api").removeprefix("/v1").split("/")[1]


def _path_parameters(row: RouteRow) -> list[Schema]:
    return [
        {
            "name": name,
            "in": "path",
            "required": True,
            "description": PATH_PARAMS[name],
            "schema": {"type": "string", "minLength": 1},
        }
        for name in parameters_of(row.path)
    ]


def parameters_of(path: str) -> list[str]:
    """
    >>> parameters_of("/api/agents/{ref}/messages/{id}")
    ['ref', 'id']
    """
    return re.findall("{(.*?)}", path)


def _query_parameters(row: RouteRow) -> list[Schema]:
    return [
        {"name": param.name, "in": "query", "required": False, "description": param.says, "schema": param.schema()}
        for param in row.query
    ]


def _headers(row: RouteRow) -> list[Schema]:
    governed = SAYS if row.is_governed else {}
    own = [
        {"name": header.name, "in": "header", "required": False, "description": header.says, "schema": header.schema()}
        for header in row.headers
    ]
    return own + [
        {
            "name": name,
            "in": "header",
            "required": False,
            "description": says,
            "schema": {"type": "string", "minLength": 1, "pattern": PATTERNS[name].pattern},
        }
        for name, says in governed.items()
    ]


def _success(row: RouteRow, status: int, rows: Sequence[RouteRow], schemas: dict[Any, Schema]) -> Schema:
    answers = row.answer if isinstance(row.answer, tuple) else (row.answer,)
    content = dict(_content(answer, schemas[row.each or Event], schemas) for answer in answers)
    found: Schema = {"description": HTTPStatus(status).phrase, "content": content}
    if row.leads_to is not None:
        found["links"] = {target.name: _link(target, row.leads_to) for target in _next(row.leads_to, rows)}
    return found


def _content(answer: Any, each: Schema, schemas: dict[Any, Schema]) -> tuple[str, Schema]:
    """Media type, and what is in it. `each`: the schema of one line or event."""
    if answer == EVENTS:
        return EVENTS, {"schema": _event(each)}
    if answer == NDJSON:
        return NDJSON, {"schema": {"type": "string", "contentMediaType": NDJSON, "contentSchema": each}}
    if isinstance(answer, str):
        return answer, {"schema": {"type": "string"}}
    return JSON, {"schema": schemas[answer]}


def _event(data: Schema) -> Schema:
    """Each event of a stream, whose data is JSON."""
    return {
        "type": "object",
        "description": "Each event of the stream.",
        "properties": {
            "id": {"type": "string", "description": "Its number, where it has one to go on from."},
            "event": {"type": "string", "description": "Its kind."},
            "data": {"type": "string", "contentMediaType": JSON, "contentSchema": data},
        },
        "required": ["event", "data"],
    }


def _next(leads_to: LeadsTo, rows: Sequence[RouteRow]) -> list[RouteRow]:
    """Rows at its path or below it that need no more than it names."""
    return [
        row for row in rows if row.path.startswith(leads_to.path) and set(parameters_of(row.path)) == set(leads_to.by)
    ]


def _link(target: RouteRow, leads_to: LeadsTo) -> Schema:
    parameters = {f"path.{name}": f"$response.body#{pointer}" for name, pointer in leads_to.by.items()}
    return {"operationId": target.name, "parameters": parameters}


def _error_response(status: int, *, runners: bool = False) -> Schema:
    kind, shape = (JSON, RunnerFailure) if runners else (PROBLEM, Problem)
    found: Schema = {
        "description": ERRORS[status],
        "content": {kind: {"schema": {"$ref": REF.format(name=shape.__name__)}}},
    }
    if status in LATER:
        after = {"description": "Seconds after which to ask again, where that is known.", "schema": {"type": "integer"}}
        found["headers"] = {"Retry-After": after}
    return found


# schemas --------------------------------------------------------------------------------------------------------------


def _schemas(rows: Iterable[RouteRow]) -> tuple[dict[Any, Schema], dict[str, Schema]]:
    """Type → its schema; and the components these refer to."""
    told = {kind for row in rows for kind in (row.answer, row.body, row.each)}
    whole = {kind for kind in told if kind is not None and not isinstance(kind, str | tuple)}
    parts = {part for kind in whole for part in _alternatives(kind)} | {Problem, RunnerFailure, Event}
    single = sorted(parts, key=repr)
    found, components = msgspec.json.schema_components(single, ref_template=REF)
    schemas = dict(zip(single, found, strict=True))
    for kind in whole - parts:
        schemas[kind] = {"anyOf": [schemas[part] for part in _alternatives(kind)]}
    if AgentSpec in schemas:
        components = spec_schema.by_runtime(components)
    return schemas, {name: _tidied(schema) for name, schema in components.items()}


def _alternatives(kind: Any) -> Sequence[Any]:
    """msgspec has no schema for a union of two objects: each has its own."""
    members = get_args(kind)
    return members if len(members) > 1 and all(hasattr(member, "__total__") for member in members) else (kind,)


def _tidied(schema: Any) -> Any:
    """Docstrings without the lines they are broken into."""
    if isinstance(schema, dict):
        return {
            key: _in_lines(value) if key == "description" and isinstance(value, str) else _tidied(value)
            for key, value in schema.items()
        }
    return [_tidied(part) for part in schema] if isinstance(schema, list) else schema


def _in_lines(text: str | None) -> str:
    """A docstring as paragraphs, each in one line.

    >>> _in_lines("One\\n    line.\\n\\n    Another.")
    'One line.\\n\\nAnother.'
    """
    return "\n\n".join(" ".join(part.split()) for part in re.split(r"\n\s*\n", text or "")).strip()
