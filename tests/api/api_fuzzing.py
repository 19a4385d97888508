"""Hooks for schemathesis, besides the API's description and api_fuzzing.toml.

- Answers are held to every field: a description lets a client meet fields it does not know, the code may give none.
- A value that is right, but would take long or meet nothing, is replaced by another one that is right. What is wrong
  on purpose stays as it is.
"""

from __future__ import annotations

import itertools
import re
from typing import Any

import schemathesis
from schemathesis.core.parameters import ParameterLocation
from schemathesis.generation.meta import TestPhase

MOST_S = 1
"""Of every wait: a client may ask for ten minutes of it."""
COMMAND = ["/usr/bin/sleep", "1000"]
"""The one program that the daemon's policy permits (populated.py)."""
AGENTS = ("awake", "asleep", "stopped", "kept", "refusing", "dying", "elsewhere", "made")
"""Nobody removes them: each step would have fewer to go on with. What is made on the way is removed."""
IDS = {
    "job": ("b" * 12, "c" * 12, "d" * 12),
    "cancel_job": ("b" * 12, "c" * 12),
    "job_output": ("d" * 12,),
    "job_result": ("d" * 12,),
    "request": ("e0-1", "e0-20", "e1-1"),
    "cancel_request": ("e1-1", "e1-2"),
    "cancel_schedule": ("1", "2", "3", "4"),
    "revoke_token": ("reader",),
}
_turn = itertools.count()


@schemathesis.hook
def before_load_schema(context: Any, raw_schema: dict[str, Any]) -> None:
    for schema in raw_schema["components"]["schemas"].values():
        if "properties" in schema and schema.get("title") != "Event":
            schema.setdefault("additionalProperties", False)


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: dict[str, Any]) -> None:
    operation = case.operation.definition.raw["operationId"]
    if isinstance(case.body, dict):
        case.body = _quick(operation, case.body)
    query = case.query or {}
    for name, most in (("wait_s", MOST_S), ("follow", 0)):
        if re.fullmatch("[0-9]{1,9}", str(query.get(name))):
            query[name] = min(int(query[name]), most)
    path, meta = case.path_parameters or {}, case.meta
    if operation == "remove" and path.get("ref") in AGENTS:
        case.path_parameters = {"ref": "nobody"}
    elif meta is None or not meta.is_negative_at(ParameterLocation.PATH):
        linked = case._override.path_parameters
        found = _known(operation, path, case.body)
        if meta is not None and meta.phase.name is TestPhase.STATEFUL:
            found = {**path, **({"ref": found["ref"]} if "ref" in found else {}), **linked}
        case.path_parameters = found


def _quick(operation: str, body: dict[str, Any]) -> dict[str, Any]:
    found = dict(body)
    if operation in ("create", "apply"):
        command, env = found.get("command"), found.get("env")
        if isinstance(command, list) and command and all(isinstance(part, str) for part in command):
            found["command"] = COMMAND
        if isinstance(env, dict):
            found["env"] = {name: value for name, value in env.items() if not name.startswith("LD_")}
    timeout_s = found.get("timeout_s")
    if operation == "pause" and isinstance(timeout_s, int | float) and not isinstance(timeout_s, bool):
        found["timeout_s"] = min(timeout_s, MOST_S)
    return found


def _known(operation: str, path: dict[str, Any], body: Any) -> dict[str, Any]:
    """A name that exists instead of one that does not; every fourth time the one that was thought of."""
    turn, found = next(_turn), dict(path)
    if turn % 4 == 0:
        return found
    if operation == "apply" and isinstance(body, dict):
        found["ref"] = str(body.get("name")) or "x"
    elif "ref" in found and operation != "remove":
        found["ref"] = AGENTS[turn % len(AGENTS)]
    if operation in IDS:
        found["id"] = IDS[operation][turn % len(IDS[operation])]
    return found
