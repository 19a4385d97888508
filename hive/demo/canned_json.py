"""A value that fits a JSON schema, made of a prompt's words: what the demo backend calls tools with. Pure.

It follows what agents' tools are written in: types, `enum`, `const`, `default`, `properties`, `required`, `items`,
bounds of lengths and numbers, `$ref`, `anyOf`, `oneOf`, `allOf`. It does not follow `pattern`, `not`, `if` and
`dependentSchemas`: a value may break those.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

DEPTH_MAX = 24
"""Levels of a schema; deeper, and where a `$ref` leads back to itself, a value is the smallest of its type."""
_FORMATS = {
    "date-time": "2026-01-01T00:00:00Z",
    "date": "2026-01-01",
    "time": "00:00:00Z",
    "email": "bee@hive.invalid",
    "uri": "http://hive.invalid/",
    "url": "http://hive.invalid/",
    "uuid": "00000000-0000-4000-8000-000000000000",
    "ipv4": "127.0.0.1",
}
_TYPES = ("object", "string", "integer", "number", "boolean", "array", "null")


def value_for(schema: object, prompt: str = "") -> Any:
    """The value; the same for the same schema and prompt. Strings are the prompt's last word, or the property's name.

    >>> city = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 3}}}
    >>> value_for(city, "What is the weather in Paris?")
    {'city': 'Paris', 'days': 3}
    >>> value_for({"enum": ["b", "a"]}), value_for({"type": ["null", "array"], "minItems": 1, "items": True})
    ('b', [''])
    """
    words = re.findall(r"\w+", prompt)
    return _Sample(schema, words[-1] if words else "").of(schema, "", 0)


class _Sample:
    """One value while it is made. `whole`: the schema that every `$ref` begins at."""

    def __init__(self, whole: object, word: str) -> None:
        self._whole = whole
        self._word = word

    def of(self, schema: object, name: str, depth: int) -> Any:
        if not isinstance(schema, Mapping):
            return self._word or name
        for key in ("const", "default"):
            if key in schema:
                return schema[key]
        if isinstance(schema.get("enum"), list) and schema["enum"]:
            return schema["enum"][0]
        if depth > DEPTH_MAX:
            return _smallest(_type_of(schema))
        merged = self._merged(schema, depth)
        if merged is not schema:
            return self.of(merged, name, depth + 1)
        return self._typed(_type_of(schema), schema, name, depth)

    def _merged(self, schema: Mapping[str, Any], depth: int) -> Mapping[str, Any]:
        """The schema with what it refers to and the first of its choices put in; itself where there is neither."""
        parts: list[object] = []
        if isinstance(schema.get("$ref"), str):
            parts.append(self._referred(schema["$ref"]))
        parts += [schema[key][0] for key in ("anyOf", "oneOf") if isinstance(schema.get(key), list) and schema[key]]
        parts += schema["allOf"] if isinstance(schema.get("allOf"), list) else []
        if not parts or depth > DEPTH_MAX:
            return schema
        merged = {key: value for key, value in schema.items() if key not in ("$ref", "anyOf", "oneOf", "allOf")}
        for part in parts:
            if isinstance(part, Mapping):
                merged = _joined(merged, part)
        return merged

    def _referred(self, pointer: str) -> object:
        found = self._whole
        for step in pointer.removeprefix("#").split("/")[1:]:
            key = step.replace("~1", "/").replace("~0", "~")
            found = found.get(key) if isinstance(found, Mapping) else None
        return found

    def _typed(self, kind: str, schema: Mapping[str, Any], name: str, depth: int) -> Any:
        if kind == "object":
            properties = schema.get("properties")
            known = properties if isinstance(properties, Mapping) else {}
            required = [key for key in schema.get("required") or () if isinstance(key, str)]
            wanted = dict.fromkeys([*required, *known])
            if depth >= DEPTH_MAX:
                wanted = dict.fromkeys(required)
            return {key: self.of(known.get(key, True), key, depth + 1) for key in wanted}
        if kind == "array":
            count = _whole_number(schema.get("minItems"), 1 if depth < DEPTH_MAX // 2 else 0)
            return [self.of(schema.get("items", True), name, depth + 1) for _ in range(min(count, 64))]
        if kind in ("integer", "number"):
            return _number(schema, whole=kind == "integer")
        if kind == "string":
            return _string(schema, self._word or name)
        return _smallest(kind)


def _joined(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Both schemas as one: of `properties` and `required` all, of the rest the first one's."""
    joined = {**other, **one}
    if isinstance(one.get("properties"), Mapping) and isinstance(other.get("properties"), Mapping):
        joined["properties"] = {**other["properties"], **one["properties"]}
    if isinstance(one.get("required"), list) and isinstance(other.get("required"), list):
        joined["required"] = [*one["required"], *other["required"]]
    return joined


def _type_of(schema: Mapping[str, Any]) -> str:
    """The first type that is not null; guessed by what the schema bounds where it names none."""
    named = schema.get("type")
    types = [kind for kind in (named if isinstance(named, list) else [named]) if kind in _TYPES]
    if types:
        return next((kind for kind in types if kind != "null"), "null")
    if "properties" in schema or "required" in schema:
        return "object"
    if "items" in schema:
        return "array"
    return "number" if "minimum" in schema or "maximum" in schema else "string"


def _smallest(kind: str) -> Any:
    return {"object": {}, "array": [], "string": "", "integer": 0, "number": 0, "boolean": True}.get(kind)


def _whole_number(found: object, default: int) -> int:
    return found if isinstance(found, int) and found >= 0 else default


def _number(schema: Mapping[str, Any], *, whole: bool) -> float:
    """1, or the nearest to it within the bounds that is a multiple where one is asked for."""
    least, most = schema.get("minimum"), schema.get("maximum")
    above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    step = schema.get("multipleOf")
    if isinstance(step, (int, float)) and step > 0:
        number: float = step
        if isinstance(least, (int, float)) and number < least:
            number = -(-least // step) * step
        return number
    number = 1
    if isinstance(least, (int, float)):
        number = max(number, least)
    if isinstance(above, (int, float)) and not isinstance(above, bool) and number <= above:
        number = above + 1
    if isinstance(most, (int, float)):
        number = min(number, most)
    if isinstance(below, (int, float)) and not isinstance(below, bool) and number >= below:
        number = below - 1 if whole else below - 0.5
    return int(number) if whole else number


def _string(schema: Mapping[str, Any], word: str) -> str:
    if schema.get("format") in _FORMATS:
        return _FORMATS[schema["format"]]
    least, most = _whole_number(schema.get("minLength"), 0), _whole_number(schema.get("maxLength"), 1 << 16)
    return (word + "." * max(min(least, 1 << 16) - len(word), 0))[:most]
