"""Messages on a server of OpenAI's dialect: the requests, and a row for every field a client can send."""

from __future__ import annotations

import importlib
import json
import typing
from collections.abc import Iterator
from typing import Any

import pytest
import typing_extensions
from hypothesis import given
from hypothesis import strategies as st

from hive.bodies.fields import FieldTable
from hive.demo.canned import MODEL, Moment, reply_to
from hive.dialects.anthropic_fields import ROWS
from hive.dialects.anthropic_openai import WAYS
from hive.dialects.translation import FieldFate, Sent
from hive.domain import Tier
from hive.errors import BadRequest, NotSupported, Refusal
from hive.settings.field_rules import Fields
from hive.settings.table import Settings

WAY = WAYS["/v1/messages"]
HELLO: Any = [{"role": "user", "content": "hello"}]
PNG = "iVBORw0KGgo="
IMAGE: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}}
IMAGE_URL: Any = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}}
TOOL: Any = {"name": "look", "description": "d", "input_schema": {"type": "object"}}
FUNCTION: Any = {"name": "look", "description": "d", "parameters": {"type": "object"}}
CALL: Any = {"type": "tool_use", "id": "c1", "name": "look", "input": {"a": 1}}
CALLED: Any = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"a":1}'}}


def send(raw: bytes | None = None, **fields: Any) -> Sent:
    asked = {"model": "m", "max_tokens": 9, "messages": HELLO, **fields}
    return WAY.there(raw if raw is not None else json.dumps(asked, separators=(",", ":")).encode())


def sent(**fields: Any) -> dict[str, Any]:
    """The part of these fields that goes to the backend, without the fields that every such request has."""
    found: dict[str, Any] = json.loads(send(**fields).body)
    always = {"model": "m", "max_tokens": 9, "messages": HELLO}
    return {name: value for name, value in found.items() if always.get(name) != value}


def said(*turns: Any, **fields: Any) -> Any:
    """The messages the backend gets."""
    return json.loads(send(messages=list(turns), **fields).body)["messages"]


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def text(words: str, **of: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **of}


def result(content: Any = "7", **of: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "c1", "content": content, **of}


# a row for every field ------------------------------------------------------------------------------------------------

WHOLE = {"tools[custom].input_schema", "content[tool_use].input", "tools[custom].input_examples"}
"""Fields that go on as the client wrote them, with any content."""
BLOCKS = (
    *("messages.content", "system", "content[tool_result].content", "content[document].source[content].content"),
    "content[search_result].content",
)
"""The places of blocks of content; a block has one row for all of them."""
PACKAGES = ["anthropic.types", "anthropic.types.beta"]


def objects(hint: Any) -> Iterator[Any]:
    """Every TypedDict a hint may be of."""
    if typing_extensions.is_typeddict(hint):
        yield hint
    for inner in typing.get_args(hint):
        yield from objects(inner)


def kinds(of: Any) -> list[str]:
    """The values its `type` may have; none where it has no such field."""
    return list(literals(typing.get_type_hints(of).get("type")))


def literals(hint: Any) -> Iterator[str]:
    if typing.get_origin(hint) in (typing.Literal, typing_extensions.Literal):
        yield from typing.get_args(hint)
    else:
        for inner in typing.get_args(hint):
            yield from literals(inner)


def fields_of(of: Any, where: str, seen: set[str]) -> Iterator[str]:
    """The names of every field under an object, as rows have them; what is refused or left out is not gone into."""
    for name, hint in typing.get_type_hints(of).items():
        full = f"{where}.{name}" if where else name
        if name == "type":
            continue
        yield full
        if full in ROWS and ROWS[full].fate is FieldFate.MAPPED and full not in WHOLE:
            for inner in objects(hint):
                yield from fields_of_kinds(inner, full, seen)


def fields_of_kinds(of: Any, full: str, seen: set[str]) -> Iterator[str]:
    """An object of several types is a row for each, or rows for the fields of each; each is gone into once."""
    if not kinds(of):
        yield from fields_of(of, full, seen)
    for kind in kinds(of):
        typed = f"{'content' if full in BLOCKS else full}[{kind}]"
        if typed in seen or (typed in ROWS and ROWS[typed].fate is not FieldFate.MAPPED):
            continue
        seen.add(typed)
        if len(typing.get_type_hints(of)) == 1:
            yield typed
        yield from fields_of(of, typed, seen)


def sendable(package: str) -> set[str]:
    module = importlib.import_module(f"{package}.message_create_params")
    roots = (module.MessageCreateParamsNonStreaming, module.MessageCreateParamsStreaming)
    return {name for root in roots for name in fields_of(root, "", set())}


@pytest.mark.parametrize("package", PACKAGES)
def test_every_field_the_anthropic_package_can_send_has_a_row(package: str) -> None:
    found = sendable(package)
    assert found - ROWS.keys() == set()
    assert {"content[tool_result].is_error", "content[document].source[text].data", "stream"} <= found
    assert len(found) > 70


@pytest.mark.parametrize("package", PACKAGES)
def test_the_walk_fails_where_a_row_is_missing(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("system", "tools[bash_20250124]", "content[image].source[file]", "thinking[disabled]"):
        with monkeypatch.context() as without:
            without.setitem(globals(), "ROWS", {key: row for key, row in ROWS.items() if key != name})
            assert sendable(package) - ROWS.keys(), name


@pytest.mark.parametrize("package", PACKAGES)
def test_every_type_of_block_tool_and_thinking_has_a_row_or_rows_of_its_own(package: str) -> None:
    module = importlib.import_module(f"{package}.message_create_params")
    hints = typing.get_type_hints(module.MessageCreateParamsNonStreaming)
    turns = [typing.get_type_hints(one)["content"] for one in objects(hints["messages"])]
    for where, hint in (("tools", hints["tools"]), ("thinking", hints["thinking"]), ("content", turns[0])):
        named = {kind for one in objects(hint) for kind in kinds(one)}
        missing = {kind for kind in named if not any(row.startswith(f"{where}[{kind}]") for row in ROWS)}
        assert missing == set(), where
        assert len(named) >= 4, where


def test_every_field_that_policing_knows_has_a_row() -> None:
    rules = FieldTable(Settings()).rules("/v1/messages", Tier.HIGH).fields
    assert named(rules) - ROWS.keys() == set()


def named(fields: Fields) -> set[str]:
    return set(fields.plain | fields.media | fields.policed.keys())


def test_every_row_says_where_to_or_why_not() -> None:
    for name, row in ROWS.items():
        assert bool(row.why) is (row.fate is not FieldFate.MAPPED), name
        assert not row.to or row.fate is FieldFate.MAPPED, name


def test_counting_tokens_has_no_way() -> None:
    assert set(WAYS) == {"/v1/messages"}


# what is mapped -------------------------------------------------------------------------------------------------------


def test_a_plain_request_is_a_chat_completion() -> None:
    found = send()
    assert (found.target, found.dropped) == ("/v1/chat/completions", ())
    assert found.body == b'{"model":"m","messages":[{"role":"user","content":"hello"}],"max_tokens":9}'
    assert json.loads(found.kept) == {"model": "m", "stop": [], "hidden": False}


def test_numbers_stay_as_they_were_written() -> None:
    raw = b'{"model":"m","max_tokens":9,"temperature":1e-2,"top_p":0.90,"top_k":5,"messages":[{"role":"user","content":'
    assert send(raw + b'"\\u00e9"}]}').body == (
        b'{"model":"m","messages":[{"role":"user","content":"\\u00e9"}],"max_tokens":9,"temperature":1e-2,"top_p":0.90,'
        b'"top_k":5}'
    )


SCHEMA: Any = {"type": "object", "properties": {"a": {"type": "integer"}}}
JSON_FORMAT: Any = {
    "type": "json_schema",
    "json_schema": {"name": "output", "schema": SCHEMA, "strict": True},
}
TOP: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"stream": True}, {"stream": True, "stream_options": {"include_usage": True}}),
    ({"stream": False}, {"stream": False}),
    ({"stop_sequences": ["END", "\n"]}, {"stop": ["END", "\n"]}),
    ({"stop_sequences": []}, {}),
    ({"metadata": {}}, {}),
    ({"metadata": {"user_id": None}}, {}),
    ({"metadata": None, "system": None, "tools": None, "temperature": None}, {}),
    ({"tools": [TOOL]}, {"tools": [{"type": "function", "function": FUNCTION}]}),
    (
        {"tools": [{"type": "custom", "name": "a", "input_schema": {}, "strict": True}]},
        {"tools": [{"type": "function", "function": {"name": "a", "parameters": {}, "strict": True}}]},
    ),
    (
        {"tools": [{**TOOL, "input_examples": [{"a": 1}]}]},
        {
            "tools": [
                {"type": "function", "function": {**FUNCTION, "parameters": {"type": "object", "examples": [{"a": 1}]}}}
            ]
        },
    ),
    ({"tools": []}, {}),
    ({"tools": [], "tool_choice": {"type": "auto"}}, {}),
    ({"thinking": {"type": "disabled"}}, {"reasoning_effort": "none"}),
    ({"thinking": {"type": "adaptive"}}, {}),
    (
        {"thinking": {"type": "enabled", "budget_tokens": 1024}},
        {"thinking_token_budget": 1024, "thinking_budget_tokens": 1024},
    ),
    ({"output_config": {"effort": "max"}}, {"reasoning_effort": "max"}),
    ({"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}, {"response_format": JSON_FORMAT}),
    ({"output_format": {"type": "json_schema", "schema": SCHEMA}}, {"response_format": JSON_FORMAT}),
    ({"output_config": {"effort": None, "format": None}}, {}),
    ({"context_management": {"edits": []}}, {}),
    ({"chat_template_kwargs": {"a": 1}}, {"chat_template_kwargs": {"a": 1}}),
]


@pytest.mark.parametrize(("fields", "expected"), TOP, ids=[json.dumps(fields)[:60] for fields, _ in TOP])
def test_a_field_is_the_backends(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    assert sent(**fields) == expected
    assert send(**fields).dropped == ()


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, {"tool_choice": "auto"}),
        ({"type": "any", "disable_parallel_tool_use": True}, {"tool_choice": "required", "parallel_tool_calls": False}),
        ({"type": "auto", "disable_parallel_tool_use": False}, {"tool_choice": "auto", "parallel_tool_calls": True}),
        ({"type": "none"}, {"tool_choice": "none"}),
        ({"type": "tool", "name": "look"}, {"tool_choice": {"type": "function", "function": {"name": "look"}}}),
    ],
)
def test_the_choice_of_a_tool_is_the_backends(choice: dict[str, Any], expected: dict[str, Any]) -> None:
    found = sent(tools=[TOOL], tool_choice=choice)
    assert found.pop("tools") == [{"type": "function", "function": FUNCTION}]
    assert found == expected


CALLING = assistant(text("So"), CALL)
ASKED_AND_CALLED = [
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "So", "tool_calls": [CALLED]},
]
DOCUMENT: Any = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "D"}}
PARTS: Any = {"type": "document", "source": {"type": "content", "content": [text("x"), IMAGE]}, "title": "T"}
BLOCKS_SAID: list[tuple[list[Any], list[Any]]] = [
    ([user(text("a"))], [{"role": "user", "content": "a"}]),
    ([user(text("a"), text("b"))], [user(text("a"), text("b"))]),
    ([user(text("a"), IMAGE)], [user(text("a"), IMAGE_URL)]),
    ([user({**DOCUMENT, "title": "T", "context": "C"})], [{"role": "user", "content": "T\n\nC\n\nD"}]),
    ([user(DOCUMENT)], [{"role": "user", "content": "D"}]),
    ([user(PARTS)], [user(text("T"), text("x"), IMAGE_URL)]),
    (
        [user({"type": "document", "source": {"type": "content", "content": "D"}})],
        [{"role": "user", "content": "D"}],
    ),
    ([*HELLO, {"role": "system", "content": [text("be"), text("!")]}], [*HELLO, {"role": "system", "content": "be!"}]),
    ([*HELLO, CALLING, user(result())], [*ASKED_AND_CALLED, {"role": "tool", "tool_call_id": "c1", "content": "7"}]),
    (
        [*HELLO, CALLING, user(text("and?"), result([text("a"), text("b"), IMAGE], is_error=True), IMAGE)],
        [
            *ASKED_AND_CALLED,
            {"role": "tool", "tool_call_id": "c1", "content": "Error: a\nb"},
            user(text("and?"), IMAGE_URL, IMAGE_URL),
        ],
    ),
    (
        [*HELLO, CALLING, user(result(None), {**result([DOCUMENT], is_error=False), "tool_use_id": "c2"})],
        [
            *ASKED_AND_CALLED,
            {"role": "tool", "tool_call_id": "c1", "content": ""},
            {"role": "tool", "tool_call_id": "c2", "content": "D"},
        ],
    ),
    (
        [*HELLO, assistant({"type": "thinking", "thinking": "hm", "signature": ""}, CALL), user(result())],
        [
            *HELLO,
            {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [CALLED]},
            {"role": "tool", "tool_call_id": "c1", "content": "7"},
        ],
    ),
    ([{"role": "assistant", "content": "hi"}, *HELLO], [{"role": "assistant", "content": "hi"}, *HELLO]),
]  # fmt: skip


@pytest.mark.parametrize(("turns", "expected"), BLOCKS_SAID)
def test_blocks_are_the_backends_messages(turns: list[Any], expected: list[Any]) -> None:
    assert said(*turns) == expected
    assert send(messages=turns).dropped == ()


def test_an_answer_the_client_has_begun_is_gone_on_with() -> None:
    begun = {"role": "assistant", "content": "The best is ("}
    found = sent(messages=[*HELLO, begun])
    assert found["messages"] == [*HELLO, begun]
    assert (found["continue_final_message"], found["add_generation_prompt"]) == (True, False)
    assert "continue_final_message" not in sent(messages=[*HELLO, begun, *HELLO])


@pytest.mark.parametrize(
    ("system", "expected"),
    [
        ("Be brief.", "Be brief."),
        ([text("Be "), text("brief.", cache_control={"type": "ephemeral"})], "Be brief."),
        ("x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli; cch=a5145;You are", "You are"),
        ([text("x-anthropic-billing-header: cc_version=2.1; cch=a5145;"), text("You are")], "You are"),
        (
            [text("You are\n"), text("x-anthropic-billing-header: cc_version=2.1; cch=a5145;"), text("it")],
            "You are\nit",
        ),
        ("You are it.\nx-anthropic-billing-header: cc_version=2.1; cch=a5145;\nBe", "You are it.\nBe"),
        ("see x-anthropic-billing-header: a=b;", "see x-anthropic-billing-header: a=b;"),
        ("x-anthropic-billing-header: what is it?", "x-anthropic-billing-header: what is it?"),
    ],
)
def test_the_system_prompt_is_the_first_message_without_what_no_cache_survives(system: Any, expected: str) -> None:
    assert said(*HELLO, system=system) == [{"role": "system", "content": expected}, *HELLO]


@pytest.mark.parametrize("system", ["", [], [text("")]])
def test_an_empty_system_prompt_is_none(system: Any) -> None:
    assert said(*HELLO, system=system) == HELLO


def test_arguments_and_images_are_not_written_anew() -> None:
    raw = (
        b'{"model":"m","max_tokens":1,"messages":[{"role":"assistant","content":[{"type":"tool_use","id":"c","name":"n",'
        b'"input":{"x": 1e2, "y":"\\u00e9"}}]},{"role":"user","content":[{"type":"image","source":{"type":"base64",'
        b'"media_type":"image\\/png","data":"a\\/b="}}]}]}'
    )
    found = send(raw).body
    assert json.loads(found)["messages"][0]["tool_calls"][0]["function"]["arguments"] == '{"x": 1e2, "y":"\\u00e9"}'
    assert b'"url":"data:image/png;base64,a\\/b="' in found


VALUES = st.none() | st.booleans() | st.integers() | st.text()
JSON = st.recursive(VALUES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=9)


@given(JSON, st.text())
def test_whatever_a_tool_was_called_with_and_a_user_said_arrives(value: Any, words: str) -> None:
    turns = [assistant({**CALL, "input": {"v": value}}), user(result(words), text(words + "!"))]
    found = said(*turns)
    assert json.loads(found[0]["tool_calls"][0]["function"]["arguments"]) == {"v": value}
    assert [turn["content"] for turn in found[1:]] == [words, words + "!"]


# what is left out, and told -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "dropped"),
    [
        ({"cache_control": {"type": "ephemeral"}, "service_tier": "auto"}, ("cache_control", "service_tier")),
        ({"speed": "fast", "betas": ["x"], "n_predict": 5}, ("speed", "betas", "n_predict")),
        ({"metadata": {"user_id": "u", "Other": 1}}, ("metadata.user_id", "metadata.Other")),
        ({"metadata": {"a\r\nb, c": 1, "type": "x"}}, ("metadata.a??b??c", "metadata.type")),
        ({"tools": [{**TOOL, "eager_input_streaming": True}]}, ("tools[custom].eager_input_streaming",)),
        (
            {
                "tools": [
                    {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"},
                    {**TOOL, "defer_loading": True},
                ]
            },
            ("tools[tool_search_tool_regex_20251119]", "tools[custom].defer_loading"),
        ),
        (
            {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}},
            ("context_management.edits[clear_thinking_20251015]",),
        ),
        (
            {"messages": [user(text("a", cache_control={"type": "ephemeral"}), text("b", cache_control={}, x=1))]},
            ("content[text].cache_control", "content[text].x"),
        ),
        (
            {
                "messages": [
                    assistant(
                        {"type": "redacted_thinking", "data": "x"},
                        {"type": "thinking", "thinking": "", "signature": "x"},
                        {**CALL, "caller": {"type": "direct"}},
                    ),
                    user(result()),
                ]
            },
            ("content[redacted_thinking]", "content[thinking].signature"),
        ),
        ({"system": "x-anthropic-billing-header: cch=1;Be"}, ("system.x-anthropic-billing-header",)),
    ],
)
def test_what_changes_no_answer_is_left_out_and_told_once(fields: dict[str, Any], dropped: tuple[str, ...]) -> None:
    assert send(**fields).dropped == dropped


def test_thoughts_a_client_wants_left_out_are_noted_for_the_way_back() -> None:
    for kind in ({"type": "adaptive"}, {"type": "enabled", "budget_tokens": 2048}):
        assert json.loads(send(thinking={**kind, "display": "omitted"}).kept)["hidden"] is True
        assert json.loads(send(thinking={**kind, "display": "summarized"}).kept)["hidden"] is False


def test_tools_that_would_be_searched_for_are_there_from_the_beginning() -> None:
    """Of a server that is shared by groups of tenants they were refused, so the second tenant's first agent ended the
    first one's conversations."""
    search = {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}
    assert sent(tools=[search, {**TOOL, "defer_loading": True}])["tools"] == [
        {"type": "function", "function": FUNCTION}
    ]
    assert sent(tools=[search]) == {}
    found = result([{"type": "tool_reference", "tool_name": "look"}])
    assert said(*HELLO, assistant(CALL), user(found))[2]["content"] == "[the tool look can be called]"


# what is refused ------------------------------------------------------------------------------------------------------

NOT_SAID: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, r"tools\.0: `web_search_20250305` is not taken"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "only Claude knows this tool's schema"),
    ({"tools": [{"type": "text_editor_20250728", "name": "t"}]}, "only Claude knows"),
    ({"tools": [{"type": "computer_20251124", "name": "c"}]}, "only Claude knows"),
    ({"tools": [{"type": "new_20270101\r\n", "name": "c"}]}, r"no way to say `new_20270101\?\?`"),
    ({"tools": [{**TOOL, "allowed_callers": ["code_execution_20250825"]}]}, "allowed_callers is not taken"),
    ({"thinking": {"type": "between_tools"}}, "between tools"),
    ({"inference_geo": "eu"}, "cannot promise where"),
    ({"container": "c"}, "container is not taken"),
    ({"mcp_servers": [{"url": "x"}]}, "mcp_servers is not taken"),
    ({"compaction": {"type": "summarize"}}, "does not summarize"),
    ({"thread": {"type": "create"}}, "keeps no conversations"),
    ({"output_config": {"task_budget": {"total": 5}}}, r"output_config\.task_budget is not taken"),
    ({"context_management": {"edits": [{"type": "compact_20260112"}]}}, "does not summarize"),
    ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919", "keep": {"type": "x"}}]}}, "say `x`"),
    ({"messages": [user({**IMAGE, "source": {"type": "url", "url": "http://x/"}})]}, "nothing is fetched from here"),
    ({"messages": [user({**IMAGE, "source": {"type": "file", "file_id": "f"}})]}, "no store of files"),
    ({"messages": [user({**IMAGE, "transformations": {"oversized_image": "error"}})]}, "transformations is not taken"),
    ({"messages": [user({**DOCUMENT, "source": {"type": "base64", "data": "x"}})]}, "read no PDF"),
    ({"messages": [user({**DOCUMENT, "citations": {"enabled": True}})]}, "citations is not taken"),
    (
        {"messages": [user(result([{"type": "container_upload", "file_id": "f"}]))]},
        "content.0.content.0: `container_upload`",
    ),
    ({"messages": [assistant({"type": "server_tool_use"})]}, "runs on Anthropic's servers"),
    ({"messages": [user({"type": "hologram"})]}, "no way to say `hologram`"),
    ({"messages": [{"role": "system", "content": "x", "clear_at": "next_user_message"}]}, "clear_at is not taken"),
    ({"lora": [{"id": 1}]}, "no field of Messages"),
    ({"seed": 5}, "no way to say the field `seed`"),
    ({"a\r\nb, c": 1}, r"the field `a\?\?b\?\?c`"),
    ({"type": "x"}, "the field `type`"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "words"), NOT_SAID, ids=[words[:40] for _, words in NOT_SAID])
def test_what_would_be_another_answer_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(NotSupported, match=words) as raised:
        send(**fields)
    assert "\r" not in raised.value.message


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": None}, "max_tokens: Field required"),
        ({"max_tokens": 0}, "max_tokens: Input should be greater than or equal to 1"),
        ({"max_tokens": "9"}, "max_tokens: Input should be a valid integer"),
        ({"model": None}, "model: Field required"),
        ({"model": 5}, "model: Input should be a valid string"),
        ({"messages": None}, "messages: Field required"),
        ({"messages": []}, "messages: at least one message is required"),
        ({"messages": "hi"}, "messages: Input should be a valid list"),
        ({"messages": ["hi"]}, r"messages\.0: Input should be a valid object"),
        ({"messages": [{"role": "user"}]}, r"messages\.0\.content: Field required"),
        ({"messages": [{"role": "tool", "content": "x"}]}, r"messages\.0\.role: Input should be"),
        ({"messages": [{"role": "user", "content": 5}]}, r"messages\.0\.content: Input should be a valid list"),
        ({"messages": [user()]}, r"messages\.0\.content: user messages must have non-empty content"),
        ({"messages": [user({"text": "a"})]}, r"messages\.0\.content\.0\.type: Field required"),
        ({"messages": [user({"type": "text"})]}, r"messages\.0\.content\.0\.text: Field required"),
        ({"messages": [user(CALL)]}, "`tool_use` cannot stand here"),
        ({"messages": [assistant(result()), *HELLO]}, "`tool_result` cannot stand in the assistant's message"),
        ({"messages": [assistant({**CALL, "input": "x"}), *HELLO]}, r"content\.0\.input: Input should be a valid obj"),
        ({"messages": [user({"type": "tool_result", "content": "x"})]}, r"content\.0\.tool_use_id: Field required"),
        ({"messages": [user({**IMAGE, "source": {"type": "base64", "data": ""}})]}, "media_type: Field required"),
        (
            {"messages": [user({**IMAGE, "source": {**IMAGE["source"], "media_type": "image/svg+xml"}})]},
            "media_type: Input should be 'image/jpeg'",
        ),
        ({"system": [IMAGE]}, r"system\.0: Input should be a block of text"),
        ({"system": 7}, "system: Input should be a valid list"),
        ({"stop_sequences": "END"}, "stop_sequences: Input should be a valid list"),
        ({"stop_sequences": [5]}, "stop_sequences: Input should be a valid string"),
        ({"tools": [{"name": "a"}]}, r"tools\.0\.input_schema: Field required"),
        ({"tool_choice": {"type": "any"}}, "no tools to choose from"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, r"tool_choice\.name: Field required"),
        ({"thinking": {"type": "enabled"}}, r"thinking\.enabled\.budget_tokens: Field required"),
        (
            {
                "output_format": {"type": "json_schema", "schema": {}},
                "output_config": {"format": {"type": "json_schema", "schema": {}}},
            },
            "not both",
        ),
    ],
)
def test_what_is_malformed_is_told_in_anthropics_words(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        send(**fields)


SCALARS = st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(["", "text", "image", "tool_use", "custom"])
KEYS = st.sampled_from(["type", "text", "content", "role", "source", "data", "name", "input", "id", "tool_use_id", "x"])
NONSENSE = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner), max_leaves=8)


@given(st.sampled_from(sorted(name for name in ROWS if "." not in name and "[" not in name)), NONSENSE)
def test_nonsense_in_any_field_is_refused_or_translated_never_a_fault(name: str, value: Any) -> None:
    try:
        found = send(**{name: value})
    except Refusal:
        return
    assert json.loads(found.body)["messages"]
    assert all(told.isascii() and "," not in told for told in found.dropped)


@given(NONSENSE)
def test_nonsense_in_a_message_is_refused_or_translated_never_a_fault(value: Any) -> None:
    for turn in (user(value), assistant(value), {"role": "user", "content": value}, user(result([value]))):
        try:
            assert said(turn, *HELLO)[-1]["content"].endswith("hello")
        except Refusal:
            continue


# the demo backend -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
def test_the_demo_backend_answers_messages(stream: bool) -> None:
    found = send(model=MODEL, stream=stream, system="Be brief.", max_tokens=4)
    reply = reply_to("POST", found.target, found.body, Moment(now=0.0, number=1, tokens_per_s=60.0))
    assert reply.status == 200
    way_back = WAY.back(found.kept, stream=stream)
    parts = [data for _, data in reply.parts]
    if stream:
        answer = b"".join([*map(way_back.feed, parts), way_back.end()])
        assert answer.endswith(b'event: message_stop\ndata: {"type":"message_stop"}\n\n')
        assert b'"usage":{"input_tokens":3,"output_tokens":4}' in answer
    else:
        message = json.loads(way_back.whole(b"".join(parts)))
        assert (message["usage"], message["stop_reason"]) == ({"input_tokens": 3, "output_tokens": 4}, "max_tokens")
        assert message["content"][0]["text"].strip()


def test_an_error_of_the_demo_backend_keeps_its_words() -> None:
    reply = reply_to("POST", "/v1/chat/completions", send().body, Moment(now=0.0, number=1, tokens_per_s=60.0))
    told = json.loads(WAY.back(b"{}", stream=False).error(reply.status, reply.parts[0][1]))
    assert (told["type"], told["error"]["type"]) == ("error", "not_found_error")
    assert "model 'm' not found" in told["error"]["message"]
