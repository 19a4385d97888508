"""The schema of an agent's spec, as far as JSON Schema can say it: the rules of agents/spec.py once more, for clients.

`check` there decides. It knows more: whether the program exists, what an address is, what is too long together.
tests/api/test_openapi.py holds both to each other.
"""

from __future__ import annotations

from hive import domain
from hive.agents.spec import CIDS, IDLE_MAX_S, PROMPT_MAX_BYTES, TOKENS_MAX
from hive.api.params import Schema
from hive.budgets import BudgetKind
from hive.domain import RestartPolicy, RuntimeKind, SleepDepth

NAME = f"^{domain.NAME.pattern}$"
NO_NUL = "^[^\\u0000]*$"
NULL: Schema = {"type": "null"}
TEXTS: Schema = {"type": "array", "items": {"type": "string", "pattern": NO_NUL}}
NONE: Schema = {"type": "array", "maxItems": 0}
EMPTY: Schema = {"type": "object", "maxProperties": 0}

FIELDS: dict[str, dict[str, Schema]] = {
    "AgentSpec": {
        "name": {"pattern": NAME},
        "tenant": {"pattern": NAME},
        "command": TEXTS,
        "env": {
            "propertyNames": {"pattern": "^(?!HIVE_|OPENAI_|OLLAMA_HOST$)[A-Za-z_][A-Za-z0-9_]*$"},
            "additionalProperties": {"type": "string", "pattern": NO_NUL},
        },
        "port": {"minimum": 1, "maximum": 65535},
        "idle_s": {"minimum": 0, "maximum": IDLE_MAX_S},
        "cid": {"minimum": CIDS[0], "maximum": CIDS[-1]},
        **{str(kind): {"minimum": 1, "maximum": TOKENS_MAX} for kind in BudgetKind},
        "model": {"pattern": "^[!-~]{1,255}$"},
        "inbox": {"pattern": "^/[!-~]{0,254}$"},
        "deepest": {"enum": [str(SleepDepth.LIGHT), str(SleepDepth.DEEP)]},
        "system_prompt": {"pattern": NO_NUL, "minLength": 1, "maxLength": PROMPT_MAX_BYTES},
    },
    "Limits": {
        "memory_mb": {"minimum": 4, "maximum": 1 << 24},
        "cpu": {"minimum": 0.01, "maximum": 4096},
        "pids": {"minimum": 1, "maximum": 1 << 22},
        "files": {"minimum": 16, "maximum": 1 << 20},
    },
    "DockerSpec": {
        "image": {"pattern": "^[a-zA-Z0-9][a-zA-Z0-9._/:@-]{0,254}$"},
        "user": {"pattern": NO_NUL},
        "mounts": {"items": {"type": "string", "pattern": "^/[^:\\u0000]*:/[^:\\u0000]*(:ro)?$"}},
        "tmpfs": {"items": {"type": "string", "pattern": "^/"}},
    },
    "FirecrackerSpec": {
        "kernel": {"pattern": "^/[^\\u0000]*$"},
        "rootfs": {"pattern": "^/[^\\u0000]*$"},
        "initrd": {"pattern": "^(/[^\\u0000]*)?$"},
        "vcpus": {"minimum": 1, "maximum": 32},
        "memory_mb": {"minimum": 16, "maximum": 1 << 20},
        "tap": {"pattern": "^([!-.0-~]{1,15})?$"},
    },
}
"""Component → field → what its schema says besides the type."""

BY_RUNTIME: dict[RuntimeKind, dict[str, Schema]] = {
    RuntimeKind.PROCESS: {"command": {**TEXTS, "minItems": 1}, "docker": NULL, "firecracker": NULL},
    RuntimeKind.DOCKER: {"docker": {"$ref": "#/components/schemas/DockerSpec"}, "firecracker": NULL},
    RuntimeKind.FIRECRACKER: {
        "firecracker": {"$ref": "#/components/schemas/FirecrackerSpec"},
        "docker": NULL,
        "command": NONE,
        "env": EMPTY,
    },
    RuntimeKind.EXTERNAL: {
        "command": NONE,
        "env": EMPTY,
        "port": NULL,
        "restart": {"enum": [str(RestartPolicy.NO), str(RestartPolicy.UNLESS_STOPPED)]},
        "idle_s": {"enum": [None, 0]},
        "deepest": {"const": str(SleepDepth.DEEP)},
        "inbox": {"const": "/inbox"},
        "autostart": {"const": False},
        "egress": NULL,
        "limits": EMPTY,
        "docker": NULL,
        "firecracker": NULL,
        "cid": NULL,
    },
}
"""Fields that mean nothing to a runtime have their defaults; those it needs are there."""
NEEDED = {
    RuntimeKind.PROCESS: ["name", "command"],
    RuntimeKind.DOCKER: ["name", "runtime", "docker"],
    RuntimeKind.FIRECRACKER: ["name", "runtime", "firecracker"],
    RuntimeKind.EXTERNAL: ["name", "runtime"],
}
EXAMPLES: dict[RuntimeKind, Schema] = {
    RuntimeKind.PROCESS: {"name": "alice", "command": ["/usr/bin/python3", "/srv/agents/alice.py"], "port": 9000},
    RuntimeKind.DOCKER: {
        "name": "bob",
        "runtime": "docker",
        "docker": {"image": "debian:12"},
        "port": 9000,
    },
    RuntimeKind.FIRECRACKER: {
        "name": "carol",
        "runtime": "firecracker",
        "firecracker": {"kernel": "/srv/vm/vmlinux", "rootfs": "/srv/vm/root.ext4"},
    },
    RuntimeKind.EXTERNAL: {"name": "dave", "runtime": "external"},
}


def by_runtime(components: dict[str, Schema]) -> dict[str, Schema]:
    """The components with these rules, and `AgentSpec` as one of four: each runtime takes something else.

    >>> string = {"type": "string"}
    >>> plain = {"AgentSpec": {"description": "d", "properties": {"name": string, "runtime": string}}}
    >>> found = by_runtime(plain)
    >>> found["AgentSpec"]["anyOf"][0], found["ProcessAgentSpec"]["properties"]["name"]["pattern"]
    ({'$ref': '#/components/schemas/ProcessAgentSpec'}, '^[a-z][a-z0-9-]{0,39}$')
    """
    found = {name: _refined(schema, FIELDS.get(name, {})) for name, schema in components.items()}
    spec, names = found["AgentSpec"], {kind: f"{kind.capitalize()}AgentSpec" for kind in RuntimeKind}
    for kind, name in names.items():
        found[name] = _of_runtime(spec, kind, name)
    found["AgentSpec"] = {
        "title": "AgentSpec",
        "description": spec["description"],
        "anyOf": [{"$ref": f"#/components/schemas/{name}"} for name in names.values()],
    }
    return found


def _refined(schema: Schema, fields: dict[str, Schema]) -> Schema:
    if not fields:
        return schema
    properties = {name: _with(one, fields.get(name, {})) for name, one in schema["properties"].items()}
    return {**schema, "properties": properties}


def _with(schema: Schema, rules: Schema) -> Schema:
    """A rule belongs to the alternative that is not null."""
    if not rules or "anyOf" not in schema:
        return {**schema, **rules}
    return {**schema, "anyOf": [one if one == NULL else {**one, **rules} for one in schema["anyOf"]]}


def _of_runtime(spec: Schema, kind: RuntimeKind, name: str) -> Schema:
    properties = {**spec["properties"], **BY_RUNTIME[kind], "runtime": {"const": str(kind)}}
    return {
        "title": name,
        "type": "object",
        "properties": properties,
        "required": NEEDED[kind],
        "additionalProperties": False,
        "examples": [EXAMPLES[kind]],
    }
