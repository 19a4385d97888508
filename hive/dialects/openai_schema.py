"""A chat completion as OpenAI's own server takes it: names of tools, and schemas that it holds an answer to. Pure.

OpenAI's server takes names of at most 64 letters, digits, `_` and `-`; Anthropic's clients have up to 128 (those of MCP
servers are often longer than 64), Ollama's any. Other names are replaced, and the way back puts the client's in again.

It holds an answer to a schema (`strict`) only if every property is required and no other is permitted. The ban on other
properties is added if the client's schema lacks it, as that only narrows the answers. An optional property is not made
required, as the model would have to invent a value for it: such a schema is refused.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any

import msgspec

from hive.errors import BadRequest, NotSupported

Raw = msgspec.Raw
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_OTHER = re.compile(r"[^a-zA-Z0-9_-]")
_KEPT = 55
"""Characters of a name that stay, in front of eight of its hash."""
_encode = msgspec.json.Encoder().encode
_object = msgspec.json.Decoder(dict[str, Raw]).decode
_objects = msgspec.json.Decoder(list[dict[str, Raw]]).decode
_value = msgspec.json.Decoder().decode
_NOT_JSON = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_BRACE = b"{"[0]
_TRUE = b"true"
_HINT = "list every property in `required`, with null as one of its types where it may be left out"


def fit(fields: dict[str, Raw]) -> dict[str, str]:
    """Changes `tools`, `tool_choice`, `messages` and `response_format` in place; the client's names of tools by those
    that are sent instead. Raises NotSupported.

    >>> fields = {"tools": Raw(b'[{"type":"function","function":{"name":"mcp.look","parameters":{}}}]')}
    >>> fit(fields), bytes(fields["tools"])[:60]
    ({'mcp_look_d6286719': 'mcp.look'}, b'[{"type":"function","function":{"name":"mcp_look_d6286719","')
    """
    names: dict[str, str] = {}
    try:
        if "tools" in fields:
            tools = [_tool(tool, number, names) for number, tool in enumerate(_objects(fields["tools"]))]
            fields["tools"] = Raw(_encode(tools))
        if memoryview(fields.get("tool_choice", b'""'))[0] == _BRACE:
            fields["tool_choice"] = Raw(_encode(_named(_object(fields["tool_choice"]), names)))
        if b'"tool_calls"' in bytes(fields.get("messages", b"")):
            fields["messages"] = Raw(_encode([_message(message, names) for message in _objects(fields["messages"])]))
        if "response_format" in fields:
            fields["response_format"] = _format(fields["response_format"])
    except _NOT_JSON:
        raise BadRequest("tools, messages and formats must be objects, and their names texts") from None
    return names


def sent_name(name: str) -> str:
    """The name of a tool as the server takes it.

    >>> sent_name("look"), len(sent_name("mcp__files__" + "x" * 90))
    ('look', 64)
    """
    if _NAME.fullmatch(name):
        return name
    return f"{_OTHER.sub('_', name)[:_KEPT]}_{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def _named(holder: dict[str, Raw], names: dict[str, str]) -> dict[str, Raw]:
    """A tool or choice with a `function`, under the name that is sent."""
    if "function" not in holder:
        return holder
    function = _object(holder["function"])
    name = msgspec.json.decode(function.get("name", b'""'), type=str)
    other = sent_name(name) if name else name
    if other == name:
        return holder
    names[other] = name
    function["name"] = Raw(_encode(other))
    return {**holder, "function": Raw(_encode(function))}


def _tool(tool: dict[str, Raw], number: int, names: dict[str, str]) -> dict[str, Raw]:
    tool = _named(tool, names)
    function = _object(tool.get("function", b"{}"))
    if bytes(function.get("strict", b"")) != _TRUE or "parameters" not in function:
        return tool
    function["parameters"] = _closed(function["parameters"], f"tools.{number}")
    return {**tool, "function": Raw(_encode(function))}


def _message(message: dict[str, Raw], names: dict[str, str]) -> dict[str, Raw]:
    if "tool_calls" not in message:
        return message
    calls = [_named(call, names) for call in _objects(message["tool_calls"])]
    return {**message, "tool_calls": Raw(_encode(calls))}


def _format(raw: Raw) -> Raw:
    found = _object(raw)
    if "json_schema" not in found:
        return raw
    inner = _object(found["json_schema"])
    if bytes(inner.get("strict", b"")) != _TRUE or "schema" not in inner:
        return raw
    inner["schema"] = _closed(inner["schema"], "the format of the answer")
    return Raw(_encode({**found, "json_schema": Raw(_encode(inner))}))


def _closed(raw: Raw, what: str) -> Raw:
    """The schema as `strict` wants it. Raises NotSupported with the place that cannot be made so."""
    schema = _value(raw)
    return Raw(_encode(schema)) if _close(schema, "", what) else raw


def _close(schema: Any, at: str, what: str) -> bool:
    """Closes every object within; whether anything was changed."""
    if not isinstance(schema, dict):
        return False
    changed = False
    if "properties" in schema or schema.get("type") == "object":
        changed = _close_one(schema, at, what)
    for name in ("properties", "$defs", "definitions"):
        inner = schema.get(name)
        for key, value in inner.items() if isinstance(inner, dict) else ():
            changed = _close(value, f"{at}/{name}/{key}", what) or changed
    changed = _close(schema.get("items"), f"{at}/items", what) or changed
    for name in ("anyOf", "oneOf", "allOf"):
        inner = schema.get(name)
        for number, value in enumerate(inner if isinstance(inner, list) else ()):
            changed = _close(value, f"{at}/{name}/{number}", what) or changed
    return changed


def _close_one(schema: dict[str, Any], at: str, what: str) -> bool:
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, dict):
        raise _refused(what, f"{at or '/'} has no properties, so anything may be in it")
    for name in properties:
        if not isinstance(required, list) or name not in required:
            raise _refused(what, f"{at}/properties/{name} may be left out")
    if "additionalProperties" not in schema:
        schema["additionalProperties"] = False
        return True
    if schema["additionalProperties"] is not False:
        raise _refused(what, f"{at}/additionalProperties lets others in")
    return False


def _refused(what: str, why: str) -> NotSupported:
    told = f"{what} cannot be said to this backend, which holds to a schema only where all of it is required: {why}"
    return NotSupported(told[:400], hint=_HINT)
