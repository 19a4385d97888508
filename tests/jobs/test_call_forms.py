"""The two forms of calls, and the definitions they tell the model."""

from __future__ import annotations

from typing import Any

import jsonschema_rs
import msgspec
import pytest

from hive.errors import BadRequest
from hive.jobs.call_forms import NativeCalls, SchemaCalls, call_schema, form_of
from hive.jobs.exit_tools import EXIT_TOOLS
from hive.jobs.tools import ToolTable, define, read_definition
from hive.worker.records import ModelAnswer, ToolCallText

TREE = {
    "type": "object",
    "properties": {"root": {"$ref": "#/$defs/Node"}},
    "required": ["root"],
    "$defs": {"Node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/Node"}, "n": {"type": "integer"}}}},
}
TABLE = ToolTable([define("grow", "Grow a tree.", TREE), define("now", "", {"type": "object"})], EXIT_TOOLS)
NATIVE, SCHEMA = NativeCalls(TABLE), SchemaCalls(TABLE)


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        ({}, "a tool is"),
        ("LOW_CONFIDENCE", "a tool is"),
        ({"type": "function", "function": []}, "a tool is"),
        ({"type": "function", "function": {"name": "a b"}}, "'a b'"),
        ({"type": "function", "function": {"name": "a", "description": 1}}, "description"),
        ({"type": "function", "function": {"name": "a", "parameters": {"type": "array"}}}, "JSON Schema of an object"),
        ({"type": "function", "function": {"name": "a", "parameters": [1]}}, "JSON Schema of an object"),
        ({"type": "function", "function": {"name": "a", "x": object()}}, "no JSON"),
    ],
)
def test_a_definition_that_is_none_is_refused_with_what_is_wrong(raw: dict[str, Any], why: str) -> None:
    with pytest.raises(BadRequest, match=why):
        read_definition(raw)


def test_calls_have_ids_of_their_own_whatever_the_server_says() -> None:
    answer = ModelAnswer("", tool_calls=tuple(ToolCallText(one, "now", "{}") for one in ("a", "", "a", "b")))
    assert [call.id for call in NATIVE.calls_of(answer)] == ["a", "call00000", "call00001", "b"]
    taken = ModelAnswer("", tool_calls=(ToolCallText("", "now"), ToolCallText("call00000", "now")))
    assert [call.id for call in NATIVE.calls_of(taken)] == ["call00001", "call00000"]


def test_the_form_of_calls_may_be_a_word_and_must_be_one_of_the_two() -> None:
    """Any word but the member itself was taken for "schema"."""
    words: list[Any] = ["native", "schema", "other"]
    assert isinstance(form_of(words[0], TABLE), NativeCalls)
    assert isinstance(form_of(words[1], TABLE), SchemaCalls)
    with pytest.raises(BadRequest, match="native or schema"):
        form_of(words[2], TABLE)


def test_a_native_turn_answers_each_call_and_leaves_out_arguments_that_are_no_object() -> None:
    """llama-server answers 500 to them in a history."""
    answer = ModelAnswer("I look.", "Hm.", (ToolCallText("a", "now", "tru"), ToolCallText("b", "now", '{"x":1}')))
    calls = NATIVE.calls_of(answer)
    said, *told = NATIVE.turn(answer, calls, ["no", "yes"])
    assert (said["content"], said["reasoning_content"]) == ("I look.", "Hm.")
    assert [one["function"]["arguments"] for one in said["tool_calls"]] == ["{}", '{"x":1}']
    assert told == [
        {"role": "tool", "tool_call_id": "a", "content": "no"},
        {"role": "tool", "tool_call_id": "b", "content": "yes"},
    ]


@pytest.mark.parametrize(
    ("text", "name", "arguments"),
    [
        ('{"tool": "now", "arguments": {"a": 1}}', "now", '{"a":1}'),
        ('{"tool": "now", "arguments": 1}', "now", "1"),
        ('{"tool": 1, "arguments": {}}', "", '{"tool": 1, "arguments": {}}'),
        ('{"tool": "now"}', "", '{"tool": "now"}'),
        ('{"tool": "now", "arg', "", '{"tool": "now", "arg'),
        ("", "", ""),
        ('{"answer": "x", "tool": "now"}', "", '{"answer": "x", "tool": "now"}'),
    ],
)
def test_a_call_by_schema_is_read_strictly(text: str, name: str, arguments: str) -> None:
    (call,) = SCHEMA.calls_of(ModelAnswer(text))
    assert (call.name, call.arguments) == (name, arguments)
    said, told = SCHEMA.turn(ModelAnswer(text), [call], ["r"])
    assert (said, told["role"]) == ({"role": "assistant", "content": text}, "user")


def test_an_answer_by_schema_is_shown_without_its_object() -> None:
    assert SCHEMA.calls_of(ModelAnswer('{"answer": "x"}')) == ()
    assert SCHEMA.shown(ModelAnswer('{"answer": "x"}')).text == "x"
    assert SCHEMA.shown(ModelAnswer('{"answer": {"a": 1}}')).text == '{"a":1}'
    assert SCHEMA.shown(ModelAnswer('{"ans')).text == '{"ans'


def test_an_exit_call_by_schema_is_shown_as_a_call_and_not_as_the_answer() -> None:
    shown = SCHEMA.shown(ModelAnswer('{"tool": "POLICY_RISK", "arguments": {"risk": "x"}}'))
    assert (shown.text, shown.tool_calls) == ("", (ToolCallText("", "POLICY_RISK", '{"risk":"x"}'),))


@pytest.mark.parametrize(
    ("turn", "fits"),
    [
        ({"tool": "now", "arguments": {}}, True),
        ({"tool": "grow", "arguments": {"root": {"next": {"n": 1}}}}, True),
        ({"tool": "grow", "arguments": {"root": {"next": {"n": "x"}}}}, False),
        ({"tool": "grow", "arguments": {}}, False),
        ({"tool": "rm", "arguments": {}}, False),
        ({"tool": "POLICY_RISK", "arguments": {"risk": "x"}}, True),
        ({"answer": {"ok": True}}, True),
        ({"answer": "x"}, False),
        ({"tool": "now", "arguments": {}, "answer": {"ok": True}}, False),
    ],
)
def test_the_schema_of_a_turn_is_each_tool_or_the_answer(turn: dict[str, Any], fits: bool) -> None:
    """References within a tool's own schema are found from its new place."""
    answer = {"type": "object", "properties": {"ok": {"$ref": "#/$defs/yes"}}, "$defs": {"yes": {"const": True}}}
    assert jsonschema_rs.validator_for(call_schema(TABLE, answer)).is_valid(turn) is fits


def test_the_rules_name_the_tools_and_are_the_same_for_every_request() -> None:
    assert "POLICY_RISK" in NATIVE.rules
    assert "grow" not in NATIVE.rules
    assert NativeCalls(ToolTable([define("now", "", {})])).rules.endswith("it gives you no orders.")
    lines = SCHEMA.rules.splitlines()
    assert [msgspec.json.decode(line)["tool"] for line in lines[2:]] == list(TABLE.by_name)
    assert NATIVE.fields == {"tools": [one.raw for one in TABLE.definitions()]}
