"""The check of arguments, against jsonschema-rs as its peer."""

from __future__ import annotations

from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hive.jobs.json_schema import mismatch

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.sampled_from([0.5, 1.0, -2.0])
    | st.sampled_from(["", "a", "ab"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "b", "c"]), inner, max_size=3),
    max_leaves=6,
)
TYPE = st.sampled_from(["object", "array", "string", "boolean", "null", "number", "integer"])


def keywords(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    some = st.lists(inner, min_size=1, max_size=3)
    counts = st.integers(0, 3)
    return st.fixed_dictionaries(
        {},
        optional={
            "type": TYPE | st.lists(TYPE, min_size=1, max_size=2, unique=True),
            "enum": st.lists(VALUES, min_size=1, max_size=3),
            "const": VALUES,
            "properties": st.dictionaries(st.sampled_from(["a", "b"]), inner, max_size=2),
            "required": st.lists(st.sampled_from(["a", "b"]), max_size=2, unique=True),
            "additionalProperties": inner,
            "items": inner,
            "prefixItems": some,
            "anyOf": some,
            "oneOf": some,
            "allOf": some,
            "not": inner,
            "$ref": st.sampled_from(["#/$defs/x", "#/$defs/y"]),
            "minimum": st.integers(-2, 2),
            "exclusiveMaximum": st.integers(-2, 2),
            "maximum": st.integers(-2, 2),
            "exclusiveMinimum": st.integers(-2, 2),
            **{f"{most}{what}": counts for most in ("min", "max") for what in ("Length", "Items", "Properties")},
        },
    )


SCHEMAS = st.recursive(st.booleans() | keywords(st.booleans()), keywords, max_leaves=4)


@given(VALUES, SCHEMAS, SCHEMAS)
def test_it_says_what_its_peer_says(value: Any, schema: Any, defined: Any) -> None:
    whole = {"allOf": [schema], "$defs": {"x": defined, "y": {"type": "integer"}}}
    found = mismatch(value, whole)
    if found == "the schema is too complex to be checked":
        return  # a definition that refers to itself and to nothing else
    assert (not found) is jsonschema_rs.validator_for(whole).is_valid(value), found


@pytest.mark.parametrize(
    ("value", "schema", "said"),
    [
        (
            {"a": [{"b": 1}]},
            {"properties": {"a": {"items": {"properties": {"b": {"const": 2}}}}}},
            "a[0].b: 1 is not 2",
        ),
        ("long" * 50, {"enum": ["x", None, True]}, f'"{("long" * 50)[:60]}" is none of "x", null, true'),
        (2, {"anyOf": [{"type": "string"}, {"type": "null"}]}, "none of 2 forms fits"),
        (2, {"oneOf": [{"type": "integer"}, {"type": "number"}]}, "2 of 2 forms fit; one must"),
        ([], {"type": ["object", "null"]}, "an array is no object or null"),
        ("abc", {"maxLength": 2}, "3 characters are more than 2"),
    ],
)
def test_the_fault_is_told_with_its_place(value: Any, schema: Any, said: str) -> None:
    assert mismatch(value, schema) == said


def test_a_schema_that_would_never_end_is_given_up() -> None:
    endless = {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]}
    wide = {"allOf": [{"$ref": "#/$defs/a"}] * 200, "$defs": {"a": {"allOf": [True] * 200}}}
    for schema in (endless, wide):
        assert mismatch(1, schema) == "the schema is too complex to be checked"


@pytest.mark.parametrize(
    ("value", "schema"),
    [
        ("abc", {"not": {"pattern": "^x"}}),
        ("abc", {"oneOf": [{"pattern": "^a"}, {"pattern": "^b"}]}),
        (3, {"not": {"multipleOf": 2}}),
        (3, {"oneOf": [{"multipleOf": 2}, {"multipleOf": 3}]}),
        ({"x1": 1}, {"patternProperties": {"^x": {}}, "additionalProperties": False}),
        ({"a": "b"}, {"properties": {"a": {"$ref": "#name"}}, "type": "object", "$defs": {"n": {"$anchor": "name"}}}),
        ("a", {"not": {"$ref": "#name"}, "$defs": {"n": {"$anchor": "name", "type": "integer"}}}),
        ([1, 1], {"not": {"uniqueItems": True}}),
    ],
)
def test_a_keyword_that_is_passed_over_has_nothing_refused(value: Any, schema: Any) -> None:
    """`not` and `oneOf` took what is passed over for a match: no call of such a tool could be run."""
    assert jsonschema_rs.validator_for(schema).is_valid(value)
    assert mismatch(value, schema) == ""


def test_references_that_lead_elsewhere_and_keywords_that_are_none_permit_everything() -> None:
    for schema in ({"$ref": "http://x/y"}, {"$ref": "#/no"}, {"minLength": "x"}, {"type": "odd"}, {"pattern": "^("}, 7):
        assert mismatch("a", schema) == ""
