"""Check of a call's arguments against the JSON Schema of its tool. Pure.

The keywords that tools use: types, objects, arrays, bounds, `enum`, `const`, combinations, `$ref` within the schema.
`pattern` and `format` are not looked at: a pattern is a program, and its text comes from a model. Other keywords, and
those with a value that is none, are passed over. What is passed over permits everything: `not` and `oneOf` in a schema
with such keywords, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

STEPS_MAX = 20_000
"""Pairs of a value and a schema that are looked at; a schema that refers to itself would go on for ever."""
DEPTH_MAX = 100
PASSED_OVER = frozenset(
    {"pattern", "patternProperties", "format", "propertyNames", "multipleOf", "uniqueItems", "contains", "if", "$id"}
    | {"dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties", "unevaluatedItems"}
    | {"$dynamicRef", "$recursiveRef"}
)
"""Keywords that can say no, and are not looked at."""

_TYPES: Mapping[str, Callable[[Any], bool]] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "number": lambda value: is_number(value),
    "integer": lambda value: is_number(value) and value == value // 1,
}


class TooComplex(Exception):
    """The check was given up."""


def mismatch(value: Any, schema: Any) -> str:
    """The first thing that is wrong with a value, with its place; empty where it matches.

    >>> schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    >>> mismatch({"n": 2}, schema), mismatch({"n": "2"}, schema), mismatch({}, schema)
    ('', 'n: "2" is no integer', '"n" is missing')
    >>> mismatch({}, {"$ref": "#"})
    'the schema is too complex to be checked'
    """
    try:
        return _Check(schema).of(value, schema, "", 0)
    except (TooComplex, RecursionError):
        return "the schema is too complex to be checked"


class _Check:
    def __init__(self, root: Any) -> None:
        self._root = root
        self._steps = 0
        self._is_partial = _has_unknown(root)

    def of(self, value: Any, schema: Any, place: str, depth: int) -> str:
        self._steps += 1
        if self._steps > STEPS_MAX or depth > DEPTH_MAX:
            raise TooComplex
        if isinstance(schema, bool):
            return "" if schema else _said(place, "nothing is permitted here")
        if not isinstance(schema, dict):
            return ""
        return (
            _plain(value, schema, place)
            or (isinstance(value, dict) and self._object(value, schema, place, depth))
            or (isinstance(value, list) and self._array(value, schema, place, depth))
            or self._combined(value, schema, place, depth)
            or ""
        )

    def _object(self, value: dict[str, Any], schema: dict[str, Any], place: str, depth: int) -> str:
        for name in _names(schema.get("required")):
            if name not in value:
                return _said(place, f'"{name}" is missing')
        properties = schema.get("properties")
        known = properties if isinstance(properties, dict) else {}
        others = True if "patternProperties" in schema else schema.get("additionalProperties", True)
        for name, one in value.items():
            if name not in known and others is False:
                return _said(place, f'there is no "{name}"')
            if found := self.of(one, known.get(name, others), f"{place}.{name}".lstrip("."), depth + 1):
                return found
        return _counted(len(value), schema, "Properties", place, "members")

    def _array(self, value: list[Any], schema: dict[str, Any], place: str, depth: int) -> str:
        prefix, rest = _list(schema.get("prefixItems")), schema.get("items", True)
        for index, one in enumerate(value):
            wanted = prefix[index] if index < len(prefix) else rest
            if found := self.of(one, wanted, f"{place}[{index}]", depth + 1):
                return found
        return _counted(len(value), schema, "Items", place, "items")

    def _combined(self, value: Any, schema: dict[str, Any], place: str, depth: int) -> str:
        if isinstance(reference := schema.get("$ref"), str) and (
            found := self.of(value, self._referred(reference), place, depth + 1)
        ):
            return found
        for one in _list(schema.get("allOf")):
            if found := self.of(value, one, place, depth + 1):
                return found
        if some := _list(schema.get("anyOf")):
            faults = [self.of(value, one, place, depth + 1) for one in some]
            if all(faults):
                return faults[0] if len(faults) == 1 else _said(place, f"none of {len(some)} forms fits")
        if some := _list(schema.get("oneOf")):
            fits = sum(not self.of(value, one, place, depth + 1) for one in some)
            if not fits or (fits > 1 and not self._is_partial):
                return _said(place, f"{fits} of {len(some)} forms fit; one must")
        if "not" in schema and not self._is_partial and not self.of(value, schema["not"], place, depth + 1):
            return _said(place, f"{_shown(value)} is excluded")
        return ""

    def _referred(self, reference: str) -> Any:
        """Schema at a pointer within this schema. One that leads nowhere, or elsewhere, permits everything."""
        if reference != "#" and not reference.startswith("#/"):
            return True
        found = self._root
        for word in reference[1:].split("/")[1:]:
            word = word.replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict) and word in found:
                found = found[word]
            elif isinstance(found, list) and word.isdecimal() and int(word) < len(found):
                found = found[int(word)]
            else:
                return True
        return found


def _has_unknown(schema: Any) -> bool:
    """Whether something in it is passed over. A property of such a name counts too, which only makes it lenient."""
    inner: Sequence[Any] = ()
    if isinstance(schema, dict):
        reference = schema.get("$ref")
        if schema.keys() & PASSED_OVER or (isinstance(reference, str) and not f"{reference}/".startswith("#/")):
            return True
        inner = list(schema.values())
    elif isinstance(schema, list):
        inner = schema
    return any(_has_unknown(one) for one in inner)


def _plain(value: Any, schema: dict[str, Any], place: str) -> str:
    """Check of a value itself, without a look into it."""
    kinds = [kind for kind in _names(schema.get("type")) if kind in _TYPES]
    if kinds and not any(_TYPES[kind](value) for kind in kinds):
        return _said(place, f"{_shown(value)} is no {' or '.join(kinds)}")
    if "const" in schema and not same(value, schema["const"]):
        return _said(place, f"{_shown(value)} is not {_shown(schema['const'])}")
    if isinstance(enum := schema.get("enum"), list) and not any(same(value, one) for one in enum):
        return _said(place, f"{_shown(value)} is none of {', '.join(_shown(one) for one in enum[:20])}")
    if isinstance(value, str):
        return _counted(len(value), schema, "Length", place, "characters")
    return _bounded(value, schema, place) if is_number(value) else ""


def _bounded(value: float, schema: dict[str, Any], place: str) -> str:
    least, most = _number(schema, "minimum"), _number(schema, "maximum")
    above, below = _number(schema, "exclusiveMinimum"), _number(schema, "exclusiveMaximum")
    if least is not None and value < least:
        return _said(place, f"{value} is less than {least}")
    if most is not None and value > most:
        return _said(place, f"{value} is more than {most}")
    if above is not None and value <= above:
        return _said(place, f"{value} is not more than {above}")
    if below is not None and value >= below:
        return _said(place, f"{value} is not less than {below}")
    return ""


def _counted(count: int, schema: dict[str, Any], what: str, place: str, words: str) -> str:
    least, most = _number(schema, f"min{what}"), _number(schema, f"max{what}")
    if least is not None and count < least:
        return _said(place, f"{count} {words} are fewer than {least}")
    if most is not None and count > most:
        return _said(place, f"{count} {words} are more than {most}")
    return ""


def _number(schema: dict[str, Any], keyword: str) -> float | None:
    found = schema.get(keyword)
    return found if is_number(found) else None


def is_number(value: Any) -> bool:
    """Whether it is a number as JSON has them: true is none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def same(one: Any, other: Any) -> bool:
    """Whether two values are one in JSON: 1 and 1.0 are, 1 and true are not.

    >>> same([1, {"a": True}], [1.0, {"a": True}]), same(True, 1), same({"a": False}, {"a": 0})
    (True, False, False)
    """
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    return bool(one == other)


def _names(value: Any) -> Sequence[str]:
    some = [value] if isinstance(value, str) else _list(value)
    return [one for one in some if isinstance(one, str)]


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _said(place: str, what: str) -> str:
    return f"{place}: {what}" if place else what


def _shown(value: Any) -> str:
    if isinstance(value, str):
        return f'"{value[:60]}"'
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "an array"
    return {True: "true", False: "false", None: "null"}.get(value, repr(value)) if not is_number(value) else repr(value)
