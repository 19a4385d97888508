"""The grammar that one schema becomes, counted: rules, and places that a text may be at. Pure.

Every keyword is looked at, also one that a server ignores, and each part of a schema is walked once; also the target of
a `$ref`. If servers differ, the larger count is taken.
"""

from __future__ import annotations

import json
import re
from collections.abc import Set
from typing import Any

import msgspec

from hive.bodies.patterns import Pattern, PatternError
from hive.errors import GrammarTooComplex

LONGEST_NAME = 256
"""Characters of a property's name: llama-server's parser goes one call deeper for each."""
_MOST_TYPES = 7
"""The number of types in JSON Schema; each makes a copy of the schema."""
_MOST_COPIES = 2000
"""`maxLength` and `maxItems` beyond this are none to llama-server."""
_REFERENCES = 32
"""`$ref`s that lead to a `$ref`."""
_PATTERN_SHARE = 64
"""One pattern may become this part of all rules."""
_REPEATED_SHARE = 2
"""The long repetitions of all patterns may cost this part of all rules, beside them."""
_MOST_WITHIN = 100
"""Schemas within each other, through references too."""
_BOUNDED = 4
"""Choices that a string with a length counts as: xgrammar 0.2.8 counts the letters in each of those side by side."""
_SHOWN = 400
"""Characters of a pointer in a message."""
_ANYTHING, _ANY_OBJECT = "*", "{*"
"""Marks for texts that may begin like any other, and like any object."""


class SchemaLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits for one kind of server; the settings `[grammar KIND]` describe each one."""

    schema_bytes: int
    tools_bytes: int
    depth: int
    choices: int
    tools: int
    rules: int
    answer_rules: int
    pattern_ways: int
    pattern_times: int


class Path:
    """A JSON pointer that is put together only where something is wrong there."""

    __slots__ = ("_above", "_name")

    def __init__(self, name: str | int, above: Path | None = None) -> None:
        self._name = name
        self._above = above

    def __truediv__(self, name: str | int) -> Path:
        return Path(name, self)

    def __str__(self) -> str:
        names: list[str] = []
        path: Path | None = self
        while path is not None:
            names.append(str(path._name)[:80].replace("~", "~0").replace("/", "~1"))
            path = path._above
        return "/" + "/".join(reversed(names))

    def __repr__(self) -> str:
        return f"<Path {self}>"


def refused(path: Path, why: str) -> GrammarTooComplex:
    """The error, in ASCII: names in it are the client's."""
    pointer = str(path)
    if len(pointer) > _SHOWN:
        pointer = f"{pointer[: _SHOWN // 2]}...{pointer[-_SHOWN // 2 :]}"
    return GrammarTooComplex(re.sub(r"[^ -~]", "?", f"{pointer}: {why}"))


class Sums:
    """The sums of one request so far, and their limits."""

    def __init__(self, limits: SchemaLimits) -> None:
        self.limits = limits
        self.most = limits.rules
        """Rules that there may be until the next field."""
        self.rules = self.repeated = 0
        self._patterns: dict[str, Pattern] = {}

    def __repr__(self) -> str:
        return f"<Sums {self.rules}/{self.most} rules, {len(self._patterns)} patterns>"

    def take(self, rules: int, path: Path) -> int:
        self.rules += rules
        if self.rules > self.most:
            raise refused(path, f"more than {self.most} rules in all, the most that this server is given")
        return rules

    def check_choices(self, number: int, path: Path) -> int:
        if number > self.limits.choices:
            raise refused(path, f"{number} choices at once; this server is given at most {self.limits.choices}")
        return number

    def take_expression(self, text: str, path: Path) -> int:
        pattern = self._patterns.get(text)
        if pattern is None:
            self.take(len(text) // 4, path)  # paid for before it is read
            try:
                pattern = self._patterns[text] = Pattern(text)
            except PatternError as error:
                raise refused(path, f"this pattern is not taken: {error}") from None
        if pattern.ways > (most := self.limits.pattern_ways):
            raise refused(
                path, f"a text may be read in {min(pattern.ways, 10**6)} ways; this server is given at most {most}"
            )
        if pattern.most_times > (most := self.limits.pattern_times) > 0:
            raise refused(
                path, f"a pattern repeats something {pattern.most_times} times; this server is given at most {most}"
            )
        if pattern.size > (most := self.most // _PATTERN_SHARE):
            raise refused(path, f"this pattern becomes {pattern.size} rules; this server is given at most {most}")
        self.repeated += pattern.repeated
        if self.repeated > self.most // _REPEATED_SHARE:
            raise refused(
                path, "the repetitions in all patterns, such as `{1,500}`, are too many and too long together"
            )
        return self.take(pattern.size, path)


class Shape(msgspec.Struct, frozen=True):
    """The counts for one schema.

    `rules`: of all of it, once more for each time it is copied. `entry`: choices at its first letter; `choices`: the
    most there are at once anywhere in it. `begins`: possible beginnings of its texts, by which alternatives are told
    apart. `returns`: true if it leads back to a schema around it.
    """

    rules: int
    entry: int = 1
    choices: int = 1
    begins: frozenset[str] = frozenset({_ANYTHING})
    returns: bool = False


_ANY = Shape(1)
_LETTER = {"string": '"', "array": "[", "integer": "0", "number": "0", "boolean": "t", "null": "n"}


class MeasuredSchema:
    """One schema document, measured by walking each part of it once."""

    def __init__(self, root: Any, path: Path, sums: Sums) -> None:
        self._root = root
        self._path = path
        self._sums = sums
        self._known: dict[str, Shape] = {}
        self._open: dict[str, int] = {"#": 0}
        self._steps = 0
        self._jumps = 0
        self._within = 0
        self._references = 0

    def __repr__(self) -> str:
        return f"<MeasuredSchema {self._path} {self._sums!r}>"

    def measure(self) -> Shape:
        """Raises GrammarTooComplex."""
        return self._node(self._root, self._path, 0)

    def _node(self, node: Any, path: Path, named: int) -> Shape:
        """`named`: characters of the names around it, which are in the name of each of its rules."""
        own = self._sums.take(1 + named // 32, path)
        if not isinstance(node, dict):
            return _ANY
        if self._within >= _MOST_WITHIN:
            raise refused(path, f"more than {_MOST_WITHIN} schemas within each other")
        self._within += 1
        shape = self._of(node, path, named, own)
        self._within -= 1
        return shape

    def _of(self, node: dict[str, Any], path: Path, named: int, own: int) -> Shape:
        parts: list[Shape] = []
        if "$ref" in node:
            parts.append(self._reference(node["$ref"], path / "$ref"))
        for key in ("anyOf", "oneOf"):
            if isinstance(node.get(key), list):
                parts.append(self._union(node[key], path / key, named))
        if isinstance(node.get("allOf"), list):
            parts.append(self._all(node["allOf"], path / "allOf", named))
        for key in ("not", "if", "then", "else"):
            if key in node:
                parts.append(self._node(node[key], path / key, named))
        if isinstance(node.get("enum"), list):
            parts.append(self._enum(node["enum"], path / "enum"))
        if "const" in node:
            text = written(node["const"])
            parts.append(Shape(self._sums.take(1 + len(text) // 16, path / "const"), begins=frozenset({text[:80]})))
        parts += self._typed(node, path, named)
        if not parts:
            return _ANY
        return self._side_by_side(parts, path, own)

    def _side_by_side(self, parts: list[Shape], path: Path, own: int) -> Shape:
        """Joins keywords that servers combine in different ways: they all count as alternatives."""
        if len(parts) == 1:
            return msgspec.structs.replace(parts[0], rules=parts[0].rules + own)
        return Shape(
            own + sum(part.rules for part in parts),
            self._sums.check_choices(sum(part.entry for part in parts), path),
            self._sums.check_choices(sum(part.choices for part in parts), path),
            frozenset().union(*(part.begins for part in parts)),
            any(part.returns for part in parts),
        )

    # together ---------------------------------------------------------------------------------------------------------

    def _union(self, branches: list[Any], path: Path, named: int) -> Shape:
        self._sums.check_choices(len(branches), path)
        shapes = [self._node(branch, path / number, named + 8) for number, branch in enumerate(branches)]
        alike: dict[str, int] = {}
        returning: set[str] = set()
        for number, shape in enumerate(shapes):
            for begin in shape.begins:
                alike[begin] = alike.get(begin, 0) + shape.choices
            if shape.returns:
                if _may_begin_alike(returning, shape.begins):
                    raise refused(path / number, "two alternatives that begin alike both lead back to where they stand")
                returning |= shape.begins
        always = alike.pop(_ANYTHING, 0)
        objects = alike.pop(_ANY_OBJECT, 0)
        for begin in alike:
            if begin.startswith("{"):
                alike[begin] += objects
        entry = self._sums.check_choices(sum(shape.entry for shape in shapes), path)
        choices = self._sums.check_choices(max([entry, objects, *alike.values()]) + always, path)
        begins: frozenset[str] = frozenset().union(*(shape.begins for shape in shapes))
        return Shape(sum(s.rules for s in shapes), entry, choices, begins, any(s.returns for s in shapes))

    def _all(self, parts: list[Any], path: Path, named: int) -> Shape:
        """llama-server puts the properties of all of them into one object, and copies the target of a `$ref`."""
        shapes: list[Shape] = []
        for number, part in enumerate(parts):
            shape = self._node(part, path / number, named)
            if isinstance(part, dict) and "$ref" in part:
                self._sums.take(shape.rules, path / number)
            shapes.append(shape)
        return self._side_by_side(shapes, path, 0) if shapes else _ANY

    def _reference(self, ref: Any, path: Path) -> Shape:
        """xgrammar looks for each among all: 940 took it 1.2 s."""
        self._references += 1
        self._sums.take(self._references, path)
        if not isinstance(ref, str) or not (ref == "#" or ref.startswith("#/")):
            raise refused(path, "only what stands in the same schema can be referred to")
        if ref in self._open:
            if self._open[ref] == self._steps:
                raise refused(path, "it refers to itself")
            return Shape(1, returns=True, begins=frozenset({_ANYTHING}))
        known = self._known.get(ref)
        if known is None:
            if self._jumps >= _REFERENCES:
                raise refused(path, f"more than {_REFERENCES} references one behind the other")
            self._open[ref] = self._steps
            self._jumps += 1
            known = self._node(self._target(ref, path), path, len(ref))
            self._jumps -= 1
            del self._open[ref]
            self._known[ref] = known
        return known

    def _target(self, ref: str, path: Path) -> Any:
        target = self._root
        for name in ref.split("/")[1:]:
            if isinstance(target, dict):
                target = target.get(name, target.get(name.replace("~1", "/").replace("~0", "~")))
            elif isinstance(target, list) and name.isascii() and name.isdigit() and len(name) < 9:
                target = target[int(name)] if int(name) < len(target) else None
            else:
                target = None
        if target is None:
            raise refused(path, "there is nothing where it refers to")
        return target

    def _enum(self, values: list[Any], path: Path) -> Shape:
        texts = [written(value) for value in values]
        self._sums.check_choices(len(texts), path)
        rules = self._sums.take(len(texts) + sum(map(len, texts)) // 16, path)
        return Shape(rules, len(texts), len(texts), frozenset(text[:80] for text in texts))

    # by type ----------------------------------------------------------------------------------------------------------

    def _typed(self, node: dict[str, Any], path: Path, named: int) -> list[Shape]:
        kinds = node.get("type")
        if isinstance(kinds, list) and (len(kinds) > _MOST_TYPES or len(set(map(str, kinds))) < len(kinds)):
            raise refused(path / "type", "a list of types that names one twice")
        types = [kind for kind in (kinds if isinstance(kinds, list) else [kinds]) if isinstance(kind, str)]
        shapes = [
            Shape(self._sums.take(1, path), begins=frozenset({_LETTER[kind]}))
            for kind in types
            if kind in ("boolean", "null")
        ]
        if "object" in types or _has(node, _OF_OBJECTS):
            shapes.append(self._object(node, path, named))
        if "array" in types or _has(node, _OF_ARRAYS):
            shapes.append(self._array(node, path, named))
        if "string" in types or _has(node, _OF_STRINGS):
            shapes.append(self._string(node, path))
        if "integer" in types or "number" in types or _has(node, _OF_NUMBERS):
            shapes.append(self._number(node, path))
        return shapes

    def _object(self, node: dict[str, Any], path: Path, named: int) -> Shape:
        self._steps += 1
        properties = node.get("properties")
        properties = properties if isinstance(properties, dict) else {}
        required = node.get("required")
        needed = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
        self._sums.take(len(needed) // 16, path)
        is_open = node.get("additionalProperties") not in (None, False) or not properties
        at = path / "properties"
        optional = sum(name not in needed for name in properties) + (2 if is_open else 1)
        self._sums.check_choices(optional, at)
        rules, choices, returns = self._sums.take(optional * optional // 4, at), 1, False
        begins: set[str] = set()
        has_begun = False
        for name, inner in properties.items():
            at = path / "properties" / name
            if len(name) > LONGEST_NAME:
                raise refused(at, f"a name of {len(name)} characters; {LONGEST_NAME} are the most")
            rules += self._sums.take(2 + (named + len(name)) // 32 + (2 * len(name) if is_open else 0), at)
            shape = self._node(inner, at, named + len(name) + 1)
            rules, choices, returns = rules + shape.rules, max(choices, shape.choices), returns or shape.returns
            if not has_begun:
                begins |= {"{" + begin for begin in _first_of(name, inner)}
                has_begun = name in needed
        choices = max(choices, optional)
        for key in _OF_OBJECTS[1:]:
            values = node.get(key)
            several = values if isinstance(values, dict) and key in _BY_NAME else None
            for name, inner in [(key, values)] if several is None else several.items():
                at = path / key if several is None else path / key / name
                if key == "patternProperties":
                    rules += self._sums.take_expression(name, at)
                shape = self._node(inner, at, named + 24)
                rules, choices, returns = rules + shape.rules, choices + shape.choices, returns or shape.returns
        if not has_begun:
            begins.add(_ANY_OBJECT if is_open else "{}")
        rules += self._sums.take(self._bound(node, "Properties"), path)
        self._steps -= 1
        return Shape(rules, 1, self._sums.check_choices(choices, path), frozenset(begins), returns)

    def _array(self, node: dict[str, Any], path: Path, named: int) -> Shape:
        self._steps += 1
        rules, choices, returns = self._sums.take(1 + self._bound(node, "Items"), path), 1, False
        for key in _OF_ARRAYS:
            value = node.get(key)
            for number, inner in enumerate(value) if isinstance(value, list) else [(None, value)]:
                at = path / key if number is None else path / key / number
                shape = self._node(inner, at, named + 5)
                rules, choices, returns = rules + shape.rules, max(choices, shape.choices), returns or shape.returns
        self._steps -= 1
        choices += 3  # an end, and white space before and behind
        return Shape(rules, 1, self._sums.check_choices(choices, path), frozenset({"["}), returns)

    def _string(self, node: dict[str, Any], path: Path) -> Shape:
        rules = self._sums.take(1 + self._bound(node, "Length"), path)
        if isinstance(node.get("pattern"), str):
            rules += self._sums.take_expression(node["pattern"], path / "pattern")
        return Shape(
            rules, choices=_BOUNDED if "minLength" in node or "maxLength" in node else 1, begins=frozenset({'"'})
        )

    def _number(self, node: dict[str, Any], path: Path) -> Shape:
        """A range is written out digit by digit: the more of them, the more rules."""
        ends = [node[key] for key in _OF_NUMBERS if isinstance(node.get(key), int | float)]
        digits = sum(min(len(str(end)), 24) for end in ends)
        return Shape(self._sums.take(1 + digits * (16 if len(ends) > 1 else 4), path), begins=frozenset({"0", "-"}))

    def _bound(self, node: dict[str, Any], what: str) -> int:
        """Rules for so many repetitions; a bound that is more than there may be counts as none."""
        copies = 0
        for key in (f"min{what}", f"max{what}"):
            bound = node.get(key)
            if isinstance(bound, int | float) and 0 < bound <= _MOST_COPIES:
                copies = max(copies, int(bound))
        return copies


_OF_OBJECTS = (
    *("properties", "additionalProperties", "patternProperties", "propertyNames", "unevaluatedProperties"),
    "dependentSchemas",
)
_BY_NAME = ("patternProperties", "dependentSchemas")
_OF_ARRAYS = ("items", "prefixItems", "additionalItems", "contains", "unevaluatedItems")
_OF_STRINGS = ("pattern", "minLength", "maxLength", "format")
_OF_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


def _has(node: dict[str, Any], keys: tuple[str, ...]) -> bool:
    return any(key in node for key in keys)


def _may_begin_alike(some: Set[str], others: Set[str]) -> bool:
    """
    >>> _may_begin_alike({"[", "{a"}, {"{*"}), _may_begin_alike({"["}, {"{*"}), _may_begin_alike({"{a"}, {"{b"})
    (True, False, False)
    """
    if not some or not others:
        return False
    if _ANYTHING in some or _ANYTHING in others or not some.isdisjoint(others):
        return True
    for wild, exact in ((some, others), (others, some)):
        if _ANY_OBJECT in wild and any(begin.startswith("{") for begin in exact):
            return True
    return False


def written(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _first_of(name: str, schema: Any) -> set[str]:
    """The beginnings of an object whose first property is this one: by its name, and its values if they are listed."""
    if isinstance(schema, dict):
        several = schema.get("enum")
        values = several if isinstance(several, list) else [schema.get("const")]
        if ("const" in schema or "enum" in schema) and 0 < len(values) <= 16:
            return {f"{name}={written(value)[:80]}" for value in values}
    return {name}
