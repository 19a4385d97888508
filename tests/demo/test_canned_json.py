"""Values that fit a schema; jsonschema-rs is the judge."""

from __future__ import annotations

from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hive.demo.canned_json import value_for

NAMES = st.text("abcdef", min_size=1, max_size=3)
SIMPLE = st.one_of(
    st.builds(
        lambda least, more: {"type": "string", "minLength": least, "maxLength": least + more}, *[st.integers(0, 9)] * 2
    ),
    st.builds(
        lambda kind, least, more: {"type": kind, "minimum": least, "maximum": least + more},
        st.sampled_from(["integer", "number"]),
        st.integers(-50, 50),
        st.integers(0, 9),
    ),
    st.builds(lambda least: {"type": "integer", "exclusiveMinimum": least}, st.integers(-9, 9)),
    st.builds(lambda most: {"type": "number", "exclusiveMaximum": most}, st.integers(-9, 9)),
    st.builds(
        lambda values: {"enum": values}, st.lists(st.one_of(st.none(), st.integers(), NAMES), min_size=1, max_size=3)
    ),
    st.builds(lambda value: {"const": value}, st.one_of(st.booleans(), NAMES)),
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {}, True, {"type": ["null", "string"]}]),
)


def wider(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    objects = st.builds(
        lambda properties, some: {
            "type": "object",
            "properties": properties,
            "required": sorted(properties)[:some],
            "additionalProperties": False,
        },
        st.dictionaries(NAMES, inner, max_size=4),
        st.integers(0, 4),
    )
    arrays = st.builds(
        lambda items, least, more: {"type": "array", "items": items, "minItems": least, "maxItems": least + more + 1},
        inner,
        st.integers(0, 3),
        st.integers(0, 3),
    )
    choices = st.builds(
        lambda key, found: {key: found}, st.sampled_from(["anyOf"]), st.lists(inner, min_size=1, max_size=3)
    )
    return st.one_of(objects, arrays, choices)


@given(schema=st.recursive(SIMPLE, wider, max_leaves=12), prompt=st.text(max_size=30))
def test_a_value_fits_its_schema_and_is_the_same_every_time(schema: Any, prompt: str) -> None:
    value = value_for(schema, prompt)
    assert jsonschema_rs.is_valid(schema, value), value
    assert value == value_for(schema, prompt)


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"$defs": {"day": {"enum": ["mon"]}}, "properties": {"d": {"$ref": "#/$defs/day"}}}, {"d": "mon"}),
        ({"allOf": [{"properties": {"a": {"const": 1}}}, {"properties": {"b": {"const": 2}}}]}, {"a": 1, "b": 2}),
        ({"type": "string", "format": "date"}, "2026-01-01"),
        ({"type": "integer", "multipleOf": 4, "minimum": 9}, 12),
        ({"type": "object", "required": ["x"]}, {"x": "Paris"}),
    ],
)
def test_what_agents_tools_are_written_in(schema: Any, value: Any) -> None:
    assert value_for(schema, "to Paris") == value
    assert jsonschema_rs.is_valid(schema, value)


def test_a_schema_that_leads_back_to_itself_or_nowhere_has_an_end() -> None:
    tree = {"type": "object", "properties": {"child": {"$ref": "#"}}, "required": ["child"]}
    assert "child" in value_for(tree)
    assert value_for({"$ref": "#/nowhere"}, "a word") == "word"
    assert value_for({"$ref": "#"}, "a word") == ""
    deep: Any = {"type": "string"}
    for _ in range(200):
        deep = {"type": "array", "items": deep, "minItems": 1}
    assert value_for(deep) is not None
