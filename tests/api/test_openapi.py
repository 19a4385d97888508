"""The API's description: made from the rows and from nothing else, and true of what is answered."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import msgspec
import pytest
import schemathesis

from hive.agents.spec import check
from hive.api import openapi, spec_schema
from hive.api.openapi import document, errors_of
from hive.api.routes import RouteRow
from hive.client.client import Client
from hive.domain import AgentSpec, RuntimeKind
from hive.errors import BadRequest, HiveError, TimedOut
from tests.api.described import ROWS, WHOLE

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs/api.md"
Schema = dict[str, Any]


def operations() -> Iterator[tuple[str, str, Schema]]:
    for path, methods in WHOLE["paths"].items():
        for method, operation in methods.items():
            yield method.upper(), path, operation


# the table ------------------------------------------------------------------------------------------------------------


def test_every_route_is_described_and_nothing_else() -> None:
    assert sorted((method, path) for method, path, _ in operations()) == sorted((row.method, row.path) for row in ROWS)


def test_no_route_is_there_twice_and_each_has_a_name_of_its_own() -> None:
    assert len({(row.method, row.path) for row in ROWS}) == len(ROWS)
    assert len({row.name for row in ROWS}) == len(ROWS)


@pytest.mark.parametrize("row", ROWS, ids=[f"{row.method} {row.path}" for row in ROWS])
def test_a_row_is_described_as_it_is(row: RouteRow) -> None:
    found = WHOLE["paths"][row.path][row.method.lower()]
    assert (found["operationId"], found["summary"]) == (row.name, row.says)
    assert found["x-hive-role"] == row.role
    assert set(found["responses"]) == {str(status) for status in [*row.statuses, *errors_of(row)]}
    assert {param["name"] for param in found.get("parameters", []) if param["in"] == "query"} == {
        param.name for param in row.query
    }
    assert ("requestBody" in found) is (row.body is not None)
    assert row.answer is not dict  # every answer has a shape


def test_it_is_openapi_3_1() -> None:
    """By the schema of the OpenAPI initiative, which schemathesis carries along."""
    schemathesis.openapi.from_dict(json.loads(json.dumps(WHOLE))).validate()


def test_every_reference_leads_somewhere() -> None:
    text = json.dumps(WHOLE)
    for path in set(re.findall(r'"#/([^"]+)"', text)):
        found: Any = WHOLE
        for part in path.split("/"):
            found = found[part]


def test_every_component_is_used() -> None:
    text = json.dumps(WHOLE)
    unused = {name for name in WHOLE["components"]["schemas"] if f'"#/components/schemas/{name}"' not in text}
    assert unused == set()


def test_every_component_says_what_it_is() -> None:
    silent = {
        name
        for name, schema in WHOLE["components"]["schemas"].items()
        if "description" not in schema and "enum" not in schema and not name.endswith("AgentSpec")
    }
    assert silent == set()


def test_links_name_operations_and_parameters_that_are_there() -> None:
    known = {operation["operationId"]: path for _, path, operation in operations()}
    links = [
        link
        for _, _, operation in operations()
        for response in operation["responses"].values()
        for link in response.get("links", {}).values()
    ]
    assert len(links) > 20
    for link in links:
        wanted = {name.removeprefix("path.") for name in link["parameters"]}
        assert wanted == set(openapi.parameters_of(known[link["operationId"]]))


def test_every_error_there_is_in_hive_that_the_api_answers_is_described() -> None:
    """Of the other statuses of errors.py those are left that only the proxy answers, or a connection before a row."""
    classes = [HiveError]
    for cls in classes:
        classes += cls.__subclasses__()
    assert {cls.status for cls in classes} - set(openapi.ERRORS) == {405, 414, 417, 431, 505}


async def test_it_is_answered_as_it_was_made(client: Client) -> None:
    from hive import __version__

    answered = await asyncio.to_thread(client.get, "/api/openapi.json")
    assert answered == json.loads(msgspec.json.encode(document(ROWS, version=__version__)))


# specs of agents ------------------------------------------------------------------------------------------------------

BASES: dict[str, Schema] = {
    "process": {"name": "a", "command": ["/bin/true"]},
    "docker": {"name": "a", "runtime": "docker", "docker": {"image": "debian:12"}},
    "firecracker": {"name": "a", "runtime": "firecracker", "firecracker": {"kernel": "/k", "rootfs": "/r"}},
    "external": {"name": "a", "runtime": "external"},
}
TEXTS = [
    "",
    "a",
    "A",
    "a" * 40,
    "a" * 41,
    "-a",
    "a-1",
    "a b",
    "/",
    "/a",
    "/a b",
    "a/b",
    "a\0",
    "\u2713",
    "/a:/b",
    "a\n",
]
NUMBERS = [
    -1,
    0,
    1,
    2,
    3,
    15,
    16,
    32,
    33,
    4,
    65535,
    65536,
    2**20,
    2**20 + 1,
    2**22 + 1,
    2**24 + 1,
    2**32 - 2,
    2**32 - 1,
]
EDGES: dict[str, list[Any]] = {
    "name": TEXTS,
    "tenant": TEXTS,
    "model": [None, *TEXTS],
    "inbox": TEXTS,
    "command": [[], ["/bin/true"], ["/bin/true", ""], ["/bin/true", "a\0"]],
    "env": [
        {},
        {"A": ""},
        {"A": "\0"},
        {"1A": ""},
        {"": ""},
        {"HIVE_A": ""},
        {"OLLAMA_HOST": ""},
        {"OLLAMA_HOSTS": ""},
    ],
    "port": [None, *NUMBERS],
    "cid": [None, *NUMBERS],
    "idle_s": [None, 0, 0.5, -0.5, 365 * 86400, 365 * 86400 + 1],
    "deepest": ["awake", "light", "deep"],
    "restart": ["no", "always", "on-failure", "unless-stopped"],
    "autostart": [False, True],
    "tier": ["low", "other"],
    "system_prompt": [None, *TEXTS, "a\nb", "a" * 2**18, "a" * (2**18 + 1)],
    "prewarm_on_start": [False, True, 1],
    "docker": [None, *({"image": text} for text in TEXTS), {"image": "a", "user": "\0"}],
    "firecracker": [
        None,
        *({"kernel": text, "rootfs": "/r"} for text in TEXTS),
        *({"kernel": "/k", "rootfs": "/r", "vcpus": number} for number in NUMBERS),
        *({"kernel": "/k", "rootfs": "/r", "memory_mb": number} for number in NUMBERS),
        *({"kernel": "/k", "rootfs": "/r", "tap": text} for text in TEXTS),
    ],
    "limits": [{name: number} for name in ("memory_mb", "cpu", "pids", "files") for number in NUMBERS],
    "nonsense": [1],
}


def validator_of(schema: Schema) -> Any:
    whole = {**schema, "components": WHOLE["components"]}
    return jsonschema_rs.Draft202012Validator(whole)


def is_taken(spec: Schema) -> bool:
    """By Hive, if every program were there."""
    try:
        check(msgspec.json.decode(json.dumps(spec), type=AgentSpec), find=lambda name: name)
    except (msgspec.ValidationError, BadRequest):
        return False
    return True


@pytest.mark.parametrize("runtime", [str(kind) for kind in RuntimeKind])
@pytest.mark.parametrize("field", EDGES)
def test_the_description_takes_the_specs_that_hive_takes(runtime: str, field: str) -> None:
    validator = validator_of({"$ref": "#/components/schemas/AgentSpec"})
    for value in EDGES[field]:
        spec = {**BASES[runtime], field: value}
        assert validator.is_valid(spec) is is_taken(spec), spec


@pytest.mark.parametrize("example", [*spec_schema.EXAMPLES.values()], ids=lambda example: example["name"])
def test_the_examples_are_specs(example: Schema) -> None:
    assert is_taken(example)


@pytest.mark.parametrize("path", ["/api/queue", "/api/system/backends", "/api/system/backends/logs"])
def test_a_row_that_asks_another_process_says_that_it_may_take_too_long(path: str) -> None:
    """The proxy's and the helper's TimedOut was answered, and not described."""
    [row] = [row for row in ROWS if (row.path, row.method) == (path, "GET")]
    assert TimedOut.status in errors_of(row)


# docs/api.md ----------------------------------------------------------------------------------------------------------


def route_table() -> list[str]:
    """A line for each route, by path."""
    lines = ["| | path | role | |", "|---|---|---|---|"]
    for row in sorted(ROWS, key=lambda row: (row.path, row.method)):
        query = "".join(f"{'&' if number else '?'}{param.name}" for number, param in enumerate(row.query))
        lines.append(f"| {row.method} | `{row.path}{query}` | {row.role} | {row.says} |")
    return lines


def test_the_document_lists_the_routes_there_are() -> None:
    lines = [line for line in DOCUMENT.read_text().splitlines() if line.startswith("|")]
    assert "\n".join(route_table()) in "\n".join(lines), "python tests/api/test_openapi.py writes it anew"


def test_the_document_lists_the_errors_there_are() -> None:
    text = DOCUMENT.read_text()
    missing = [status for status, says in openapi.ERRORS.items() if f"| {status} | {says} |" not in text]
    assert not missing, "python tests/api/test_openapi.py writes it anew"


def write_anew() -> None:
    text = DOCUMENT.read_text()
    errors = ["| status | when |", "|---|---|", *(f"| {status} | {says} |" for status, says in openapi.ERRORS.items())]
    for head, lines in (("| | path |", route_table()), ("| status |", errors)):
        pattern = re.compile(rf"^{re.escape(head)}.*\n(\|.*\n)*", re.MULTILINE)
        text, count = pattern.subn(lambda _, lines=lines: "\n".join(lines) + "\n", text)  # type: ignore[misc]
        assert count == 1, head
    DOCUMENT.write_text(text)


if __name__ == "__main__":
    write_anew()
