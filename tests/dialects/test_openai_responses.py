"""Responses as chat completions: the requests."""

from __future__ import annotations

import importlib
import json
import typing
from pathlib import Path
from typing import Any

import pytest
import typing_extensions
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import (
    response_create_params,
    response_custom_tool_call_output_param,
    response_input_param,
    response_text_config_param,
    tool_param,
)
from openai.types.shared_params.reasoning import Reasoning

from hive.dialects.openai_responses import WAYS, as_stored, asks_to_store, with_items
from hive.dialects.openai_responses_fields import ROWS, TABLE
from hive.dialects.translation import FieldFate, Sent
from hive.errors import BadRequest, NotSupported
from tests.examples import examples

WAY = WAYS["/v1/responses"]
CODEX = Path(__file__).parents[1] / "fakes" / "codex"
PNG = "data:image/png;base64,iVBORw0KGgo="


def there(body: dict[str, Any]) -> Sent:
    return WAY.there(json.dumps({"model": "m", **body}).encode())


def sent(body: dict[str, Any]) -> Any:
    return json.loads(there(body).body)


def said(items: list[Any], **more: Any) -> Any:
    return sent({"input": items, **more})["messages"]


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": list(parts)}


def text(words: str, kind: str = "input_text") -> dict[str, Any]:
    return {"type": kind, "text": words}


# every field ----------------------------------------------------------------------------------------------------------


def members(kind: Any) -> list[Any]:
    """The TypedDicts of a union, however it is nested."""
    while typing.get_origin(kind) in (typing.Required, typing.NotRequired, typing.Annotated):
        kind = typing.get_args(kind)[0]
    if typing_extensions.is_typeddict(kind):
        return [kind]
    return [found for part in typing.get_args(kind) for found in members(part)]


def kinds_of(kind: Any) -> list[str]:
    hint = typing.get_type_hints(kind).get("type")
    return [word for word in literals(hint) if isinstance(word, str)]


def literals(hint: Any) -> list[Any]:
    if typing.get_origin(hint) is typing.Literal:
        return list(typing.get_args(hint))
    return [found for part in typing.get_args(hint) for found in literals(part)]


def without_rows(where: str, kinds: list[Any]) -> set[str]:
    """Names that the package's types can send, and that have no row."""
    assert kinds
    lost = set()
    for kind in kinds:
        for name in kinds_of(kind):
            place = f"{where}[{name}]"
            if place in ROWS and ROWS[place].fate is not FieldFate.MAPPED:
                continue  # all of it is refused or left out
            if place not in ROWS and place not in TABLE.inside:
                lost.add(place)
            lost |= {f"{place}.{of}" for of in typing.get_type_hints(kind) if of != "type"} - ROWS.keys()
    return lost


def test_every_field_openai_python_can_send_has_a_row() -> None:
    params = response_create_params
    names = ("ResponseCreateParamsNonStreaming", "ResponseCreateParamsStreaming")
    fields = {field for name in names for field in typing.get_type_hints(getattr(params, name))}
    assert fields - ROWS.keys() == set()
    text_fields = typing.get_type_hints(response_text_config_param.ResponseTextConfigParam)
    assert {f"text.{name}" for name in text_fields} - ROWS.keys() == set()
    assert {f"reasoning.{name}" for name in typing.get_type_hints(Reasoning)} - ROWS.keys() == set()
    assert without_rows("text.format", members(text_fields["format"])) == set()


def test_every_tool_and_choice_openai_python_can_send_has_a_row() -> None:
    assert len(members(tool_param.ToolParam)) > 10
    assert without_rows("tools", members(tool_param.ToolParam)) == set()
    assert without_rows("tool_choice", members(response_create_params.ToolChoice)) == set()


def test_every_item_openai_python_can_send_has_a_row() -> None:
    assert without_rows("input", members(response_input_param.ResponseInputItemParam)) == set()
    message = typing.get_type_hints(response_input_param.Message)
    assert without_rows("content", members(message["content"])) == set()
    output = typing.get_type_hints(response_custom_tool_call_output_param.ResponseCustomToolCallOutputParam)
    assert without_rows("content", members(output["output"])) == set()
    spoken = importlib.import_module("openai.types.responses.response_output_message_param")
    assert without_rows("content", members(spoken.Content)) == set()


def test_everything_an_answer_can_be_asked_to_include_has_a_row() -> None:
    words = importlib.import_module("openai.types.responses.response_includable").ResponseIncludable
    assert {f"include[{word}]" for word in literals(words)} - ROWS.keys() == set()


# what becomes of them -------------------------------------------------------------------------------------------------


def test_a_text_is_a_users_message_behind_the_instructions() -> None:
    found = sent(
        {"input": "hello", "instructions": "Be short.", "temperature": 0.5, "top_p": 1, "max_output_tokens": 9}
    )
    assert found == {
        "model": "m",
        "messages": [{"role": "system", "content": "Be short."}, {"role": "user", "content": "hello"}],
        "temperature": 0.5,
        "top_p": 1,
        "max_tokens": 9,
    }


def test_what_systems_and_developers_say_first_is_one_message() -> None:
    items = [{"role": "developer", "content": "a"}, {"role": "system", "content": [text("b"), text("c")]}]
    later = [{"role": "user", "content": "hi"}, {"role": "developer", "content": "d"}]
    assert said([*items, *later], instructions="i") == [
        {"role": "system", "content": "i\n\na\n\nb\n\nc"},
        {"role": "user", "content": "hi"},
        {"role": "system", "content": "d"},
    ]


def test_what_the_model_did_in_a_row_is_one_message_and_results_follow_it() -> None:
    items = [
        {"role": "user", "content": "look"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [text("I look.", "reasoning_text")]},
        {"type": "message", "role": "assistant", "content": [{**text("Well.", "output_text"), "annotations": []}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"n":1e2}', "status": "completed"},
        {"type": "function_call", "call_id": "c2", "name": "g", "namespace": "s", "arguments": ""},
        {"type": "function_call_output", "call_id": "c1", "output": "one"},
        {
            "type": "function_call_output",
            "call_id": "c2",
            "output": [text("two"), {"type": "input_image", "image_url": PNG, "detail": "low"}, text("three")],
        },
        user(text("and?")),
    ]
    assert said(items)[1:] == [
        {
            "role": "assistant",
            "content": "Well.",
            "reasoning_content": "I look.",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"n":1e2}'}},
                {"id": "c2", "type": "function", "function": {"name": "s__g", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "one"},
        {"role": "tool", "tool_call_id": "c2", "content": "two\nthree"},
        {
            "role": "user",
            "content": [
                {"type": "image_url", "image_url": {"url": PNG, "detail": "low"}},
                {"type": "text", "text": "and?"},
            ],
        },
    ]


def test_thinking_is_taken_from_its_summary_and_left_out_where_nothing_follows() -> None:
    thought = {"type": "reasoning", "summary": [text("short", "summary_text")], "encrypted_content": "gAAA"}
    asked = {"role": "user", "content": "x"}
    told = there({"input": [thought, {"role": "assistant", "content": "so"}, asked, thought, asked]})
    assert json.loads(told.body)["messages"] == [
        {"role": "assistant", "content": "so", "reasoning_content": "short"},
        asked,
        asked,
    ]
    assert told.dropped == ("input[reasoning].encrypted_content", "input[reasoning]")


def test_a_custom_tool_is_a_function_with_one_text() -> None:
    pattern = {"type": "grammar", "syntax": "regex", "definition": "a+"}
    tools = [
        {"type": "custom", "name": "p", "description": "Edits.", "format": {"type": "text"}},
        {"type": "custom", "name": "q", "format": pattern},
    ]
    items = [
        {"type": "custom_tool_call", "call_id": "c1", "name": "p", "input": 'a\n"b"'},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"},
    ]
    found = sent({"input": items, "tools": tools, "tool_choice": {"type": "custom", "name": "q"}})
    first, second = (tool["function"] for tool in found["tools"])
    assert (first["name"], first["description"], first["parameters"]["required"]) == ("p", "Edits.", ["input"])
    assert second["parameters"]["properties"]["input"]["pattern"] == "^(a+)$"
    assert found["tool_choice"] == {"type": "function", "function": {"name": "q"}}
    call = found["messages"][0]["tool_calls"][0]["function"]
    assert (call["name"], json.loads(call["arguments"])) == ("p", {"input": 'a\n"b"'})
    assert found["messages"][1] == {"role": "tool", "tool_call_id": "c1", "content": "done"}


def test_of_allowed_tools_the_others_are_left_out() -> None:
    tools = [{"type": "function", "name": name, "parameters": None, "strict": None} for name in "fgh"]
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "g"}]}
    found = sent({"input": "x", "tools": tools, "tool_choice": allowed, "parallel_tool_calls": False})
    assert [tool["function"]["name"] for tool in found["tools"]] == ["g"]
    assert (found["tool_choice"], found["parallel_tool_calls"]) == ("required", False)
    with pytest.raises(BadRequest, match="no tools"):
        sent({"input": "x", "tools": tools, "tool_choice": {**allowed, "tools": [{"type": "function", "name": "z"}]}})


def test_formats_reasoning_and_logprobs_have_their_names_there() -> None:
    schema = {"type": "object", "properties": {}}
    held = {"type": "json_schema", "name": "n", "schema": schema, "strict": True, "description": "d"}
    found = sent({"input": "x", "text": {"format": held, "verbosity": "low"}, "reasoning": {"effort": "high"}})
    inner = {"name": "n", "schema": schema, "strict": True, "description": "d"}
    assert found["response_format"] == {"type": "json_schema", "json_schema": inner}
    assert (found["verbosity"], found["reasoning_effort"]) == ("low", "high")
    assert sent({"input": "x", "text": {"format": {"type": "json_object"}}})["response_format"] == {
        "type": "json_object"
    }
    assert "response_format" not in sent({"input": "x", "text": {"format": {"type": "text"}}})
    likely = sent({"input": "x", "top_logprobs": 3, "include": ["message.output_text.logprobs"]})
    assert (likely["logprobs"], likely["top_logprobs"]) == (True, 3)
    with pytest.raises(NotSupported, match="grammar"):
        sent({"input": "x", "text": {"format": {"type": "grammar", "syntax": "lark", "definition": "x"}}})


def test_what_is_left_out_is_told() -> None:
    told = there(
        {
            "input": [
                {"type": "web_search_call", "id": "ws_1", "status": "completed"},
                {"role": "user", "content": "x"},
            ],
            "user": "u",
            "safety_identifier": "s",
            "prompt_cache_key": "k",
            "truncation": "auto",
            "include": ["reasoning.encrypted_content"],
            "service_tier": "flex",
            "stream_options": {"include_obfuscation": True},
            "tools": [{"type": "web_search", "external_web_access": False}],
        }
    )
    assert set(told.dropped) == {
        *("user", "safety_identifier", "prompt_cache_key", "truncation[auto]", "service_tier"),
        *("include[reasoning.encrypted_content]", "stream_options.include_obfuscation"),
        *("tools[web_search]", "input[web_search_call]"),
    }
    assert json.loads(told.body) == {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    quiet = {"truncation": "disabled", "service_tier": "auto", "user": None, "store": False, "metadata": {"a": "b"}}
    assert there({"input": "x", **quiet}).dropped == ()


def test_a_file_of_an_earlier_turn_gives_way_to_a_line_and_is_refused_in_the_last() -> None:
    file = {"type": "input_file", "filename": "a.pdf", "file_data": "data:application/pdf;base64," + "A" * 9000}
    earlier = said([user(file, text("this")), {"role": "assistant", "content": "ok"}, {"role": "user", "content": "x"}])
    assert earlier[0]["content"][0]["text"] == "[file, a.pdf, 7 KB: not readable here]"
    image = {"type": "input_image", "file_id": "file_1"}
    items = [user(image), {"role": "assistant", "content": "ok"}, {"role": "user", "content": "x"}]
    assert said(items)[0]["content"] == "[image: not readable here]"
    with pytest.raises(NotSupported, match="send its text"):
        said([user(file, text("this"))])


@pytest.mark.parametrize(
    "items",
    [
        [{"role": "user"}],
        [{"role": "user", "content": 5}],
        [{"role": "critic", "content": "x"}],
        [{"type": "function_call", "name": "f", "arguments": "{}"}],
        [{"type": "function_call", "call_id": "c", "name": "f", "arguments": {}}],
        [{"type": "function_call_output", "output": "x"}],
        [{"content": "x"}],
        ["x"],
        [user()],
        [user({"type": "input_image", "image_url": "file:///etc/passwd"})],
        [{"role": "assistant", "content": [{"type": "input_image", "image_url": PNG}]}],
        5,
    ],
)
def test_an_input_that_is_none_is_a_bad_request(items: Any) -> None:
    with pytest.raises(BadRequest):
        there({"input": items})


def test_tools_of_one_name_are_refused() -> None:
    one = {"type": "function", "name": "s__f", "parameters": {}}
    space = {"type": "namespace", "name": "s", "description": "", "tools": [{"type": "function", "name": "f"}]}
    with pytest.raises(BadRequest, match="already"):
        there({"input": "x", "tools": [one, space]})


@pytest.mark.parametrize("name", sorted(path.name for path in CODEX.glob("*.json")))
def test_codex_bodies_have_a_way(name: str) -> None:
    told = WAY.there((CODEX / name).read_bytes())
    found = json.loads(told.body)
    assert found["messages"][0]["role"] == "system"
    assert [message["role"] for message in found["messages"]].count("system") == 1
    names = [tool["function"]["name"] for tool in found["tools"]]
    assert names[:3] == ["shell_command", "update_plan", "view_image"]
    if name == "later_turn.json":
        assert names[3:] == ["apply_patch", "mcp__files__read"]
        calls = [call["function"]["name"] for message in found["messages"] for call in message.get("tool_calls", ())]
        assert calls == ["shell_command", "mcp__files__read", "apply_patch"]


WORDS = [
    "",
    "x",
    "user",
    "assistant",
    "system",
    "developer",
    "auto",
    "required",
    "data:image/png;base64,AA",
    "lark",
    "{}",
]
KINDS = sorted({name.partition("[")[2].partition("]")[0] for name in ROWS if "[" in name})
NAMES = sorted({name.rpartition(".")[2] for name in ROWS if not name.endswith("]")} - {"model"})
LEAF = st.one_of(st.none(), st.booleans(), st.integers(-2, 2**60), st.floats(allow_nan=False), st.sampled_from(WORDS))
VALUE = st.recursive(
    LEAF,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.builds(
            lambda kind, fields: {**({"type": kind} if kind else {}), **fields},
            st.sampled_from(["", *KINDS]),
            st.dictionaries(st.sampled_from(NAMES), inner, max_size=5),
        ),
    ),
    max_leaves=12,
)
TOPS = sorted(name for name in ROWS if "." not in name and "[" not in name and name not in ("model", "input"))


@settings(max_examples=examples(400), deadline=None)
@given(st.lists(VALUE, max_size=4), st.dictionaries(st.sampled_from(TOPS), VALUE, max_size=3))
def test_any_body_has_a_way_or_is_refused_in_words(items: list[Any], more: dict[str, Any]) -> None:
    try:
        told = there({"input": items, **more})
    except (BadRequest, NotSupported):
        return
    found = json.loads(told.body)
    assert told.body.startswith(b'{"model":"m",')
    assert not {"store", "previous_response_id", "input", "background"} & found.keys()
    assert b"http" not in told.body
    assert all(0x21 <= ord(char) <= 0x7E for name in told.dropped for char in name)
    assert {message["role"] for message in found["messages"]} <= {"system", "user", "assistant", "tool"}


# storage --------------------------------------------------------------------------------------------------------------


def test_a_turn_with_its_history_is_a_request_like_any_other() -> None:
    body = b'{"model":"m","input":"and?","previous_response_id":"resp_1","temperature":1e0}'
    asked = asks_to_store(body)
    assert (asked.previous, asked.store) == ("resp_1", True)
    history = b'[{"role":"user","content":"a"},{"role":"assistant","content":"b"}]'
    expanded = b"".join(with_items(asked.rest, [history, asked.items]))
    assert b'"temperature":1e0' in expanded
    told = WAY.there(expanded)
    assert [message["role"] for message in json.loads(told.body)["messages"]] == ["user", "assistant", "user"]
    back = WAY.back(as_stored(told.kept, previous="resp_1", store=True), stream=False, request_id="e-1")
    answer = json.loads(back.whole(b'{"choices":[{"message":{"content":"c"},"finish_reason":"stop"}]}'))
    assert (answer["store"], answer["previous_response_id"]) == (True, "resp_1")
    with pytest.raises(BadRequest, match="responses_kept_mb"):
        WAY.there(body)
    for broken in (b"[]", b'{"input":5}', b'{"input":{}}', b"{}"):
        with pytest.raises(BadRequest):
            asks_to_store(broken)
