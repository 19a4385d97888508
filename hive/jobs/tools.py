"""Tools as the model is told of them: definitions in OpenAI's form, and the table of one worker. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from hive.errors import BadRequest

NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""OpenAI's; most chat templates rely on it."""
NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}


class ToolDefinition(msgspec.Struct, frozen=True):
    """One tool. `parameters`: JSON Schema of an object. `raw`: the definition as it goes to the server."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    raw: Mapping[str, Any]


def read_definition(raw: Mapping[str, Any]) -> ToolDefinition:
    """A definition in OpenAI's form. Raises BadRequest that says what is wrong with it.

    >>> read_definition({"type": "function", "function": {"name": "now"}}).parameters
    {'type': 'object', 'properties': {}}
    >>> read_definition({"name": "now"})
    Traceback (most recent call last):
    hive.errors.BadRequest: a tool is {"type": "function", "function": {"name": ..., "parameters": ...}}
    """
    function = raw.get("function") if isinstance(raw, Mapping) else None
    if not isinstance(function, Mapping) or raw.get("type") != "function":
        raise BadRequest('a tool is {"type": "function", "function": {"name": ..., "parameters": ...}}')
    name, description = function.get("name"), function.get("description", "")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise BadRequest(f"tool name {name!r}: it has 1 to 64 letters, digits, _ and -")
    if not isinstance(description, str):
        raise BadRequest(f"tool {name}: its description is no text")
    parameters = function.get("parameters") or dict(NO_PARAMETERS)
    if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
        raise BadRequest(f"tool {name}: its parameters are no JSON Schema of an object")
    try:
        msgspec.json.encode(raw)
    except (TypeError, ValueError, RecursionError):
        raise BadRequest(f"tool {name}: its definition is no JSON") from None
    return ToolDefinition(name, description, parameters, raw)


def define(name: str, description: str, parameters: Mapping[str, Any]) -> ToolDefinition:
    """A definition from its parts. Raises BadRequest."""
    function = {"name": name, "description": description, "parameters": parameters}
    return read_definition({"type": "function", "function": function})


class ToolTable:
    """All that a model may call: `tools`, which run and have a result, and `exit_tools`, which are signals.

    Raises BadRequest where two have one name.
    """

    def __init__(self, tools: Iterable[ToolDefinition], exit_tools: Iterable[ToolDefinition] = ()) -> None:
        tools, exit_tools = tuple(tools), tuple(exit_tools)
        self.tools = {tool.name: tool for tool in tools}
        self.exit_tools = {tool.name: tool for tool in exit_tools}
        self.by_name = self.tools | self.exit_tools
        if len(self.by_name) < len(tools) + len(exit_tools):
            names = [tool.name for tool in (*tools, *exit_tools)]
            twice = sorted({name for name in names if names.count(name) > 1})
            raise BadRequest(f"there are two tools of the name {', '.join(twice)}")

    def __repr__(self) -> str:
        return f"<ToolTable {len(self.tools)} tools, {len(self.exit_tools)} exit tools>"

    def __bool__(self) -> bool:
        return bool(self.by_name)

    def definitions(self) -> Sequence[ToolDefinition]:
        return tuple(self.by_name.values())
