"""Translated requests before a server that has OpenAI's schema alone, checked with the schema of the real package."""

from __future__ import annotations

import contextlib
import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat.completion_create_params import CompletionCreateParamsBase
from openai.types.completion_create_params import CompletionCreateParamsBase as Completion
from openai.types.embedding_create_params import EmbeddingCreateParams

from hive.backends.kinds import spec_of
from hive.bodies.body import Want
from hive.bodies.fields import FieldTable
from hive.dialects.fitting import FIELDS, fit
from hive.dialects.translation import Sent
from hive.dialects.translators import way_of
from hive.domain import BackendInfo, BackendKind, FoundCapabilities, Tier
from hive.errors import NotSupported, Refusal
from hive.models.capabilities import EXTRA, lacking
from hive.settings.table import Settings
from tests.bodies.reading import read_body

HELLO = [{"role": "user", "content": "hello"}]
OPENAI = BackendInfo(
    kind=BackendKind.REMOTE, address="https://api.openai.com", capabilities=FoundCapabilities(fields=())
)
REMOTE = BackendInfo(kind=BackendKind.REMOTE, address="https://h", capabilities=FoundCapabilities(fields=()))
OF_VLLM = tuple(name for name in EXTRA if name not in ("repeat_penalty", "repeat_last_n", "thinking_budget_tokens"))
VLLM = BackendInfo(kind=BackendKind.VLLM, address="h:1", capabilities=FoundCapabilities(fields=OF_VLLM))
"""As vLLM 0.32's own schema has it."""
OPENAIS = {
    "/v1/chat/completions": set(CompletionCreateParamsBase.__annotations__) | {"stream"},
    "/v1/completions": set(Completion.__annotations__) | {"stream"},
    "/v1/embeddings": set(EmbeddingCreateParams.__annotations__),
}


def limit_name(backend: BackendInfo, setting: str = "auto") -> str:
    return spec_of(backend.kind).requests.limit_name(backend.address, setting)


def sent_to(backend: BackendInfo, endpoint: str, body: dict[str, Any]) -> Sent:
    way = way_of(endpoint)
    asked = way.there(json.dumps({"model": "m", **body}).encode())
    return fit(asked, way.rows, lacking(backend), limit_as=limit_name(backend))


def message(**fields: Any) -> dict[str, Any]:
    return {"messages": HELLO, "max_tokens": 9, **fields}


def test_every_field_that_a_translation_makes_is_openais_or_judged() -> None:
    made = {
        to.partition(".")[0]
        for endpoint in ("/api/chat", "/api/generate", "/api/embed", "/api/embeddings", "/v1/messages")
        for row in way_of(endpoint).rows.values()
        for to in row.to.split(", ")
        if to
    }
    within = {"content", "name", "tool_calls", "tool_call_id", "role", "reasoning_content"}
    assert made - within <= set().union(*OPENAIS.values()) | FIELDS.keys()
    assert FIELDS.keys() <= set(EXTRA)
    assert not FIELDS.keys() & set().union(*OPENAIS.values())


ALL_OPTIONS = {"seed": 1, "stop": ["x"], "temperature": 0, "top_p": 0.5, "num_predict": 4, "frequency_penalty": 1}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = {"function": {"name": "f", "arguments": {}}}
TALK = [
    *HELLO,
    {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": [CALL]},
    {"role": "tool", "tool_name": "f", "content": "7"},
]


@pytest.mark.parametrize(
    ("endpoint", "body", "dropped"),
    [
        (
            "/api/chat",
            {"messages": TALK, "tools": [TOOL], "options": ALL_OPTIONS, "think": "low"},
            {"messages.thinking"},
        ),
        ("/api/chat", {"messages": HELLO, "options": {"repeat_penalty": 1.0, "repeat_last_n": 8}}, None),
        ("/api/chat", {"messages": HELLO, "options": {"temperature": 0, "top_k": 40, "min_p": 0.1}}, None),
        ("/api/generate", {"prompt": "hi", "system": "s", "format": "json"}, set()),
        ("/api/generate", {"prompt": "hi", "raw": True, "options": {"top_k": 0}}, {"options.top_k"}),
        ("/api/embed", {"input": ["a", "b"], "dimensions": 8}, {"truncate"}),
        ("/api/embeddings", {"prompt": "a"}, set()),
        ("/v1/messages", {"messages": HELLO, "max_tokens": 4, "system": "s", "stop_sequences": ["x"]}, set()),
    ],
)
def test_what_is_sent_has_openais_fields_alone_and_what_was_left_out_is_told(
    endpoint: str, body: dict[str, Any], dropped: set[str] | None
) -> None:
    sent = sent_to(REMOTE, endpoint, body)
    fields = json.loads(sent.body)
    assert fields.keys() <= OPENAIS[sent.target]
    for message in fields.get("messages", []):
        assert message.keys() <= {"role", "content", "tool_calls", "tool_call_id"}
    expected = (
        {f"options.{name}" for name in body.get("options", {}) if name not in fields} if dropped is None else dropped
    )
    assert set(sent.dropped) == expected


@pytest.mark.parametrize(
    ("endpoint", "body", "named"),
    [
        ("/api/chat", {"messages": HELLO, "options": {"top_k": 3}}, "options.top_k"),
        ("/api/chat", {"messages": HELLO, "options": {"repeat_penalty": 1.1}}, "options.repeat_penalty"),
        ("/api/chat", {"messages": HELLO, "think": False}, "think"),
        ("/v1/messages", {"messages": HELLO, "max_tokens": 4, "top_k": 3}, "top_k"),
        ("/v1/messages", {"messages": [*HELLO, {"role": "assistant", "content": "I"}], "max_tokens": 4}, "messages"),
    ],
)
def test_what_would_be_another_answer_is_refused_by_the_clients_own_name(
    endpoint: str, body: dict[str, Any], named: str
) -> None:
    with pytest.raises(NotSupported) as refused:
        sent_to(REMOTE, endpoint, body)
    assert refused.value.message.startswith(f'"{named}" cannot be said to this backend: it has OpenAI')


def test_of_two_names_for_one_thing_the_one_that_is_taken_is_enough() -> None:
    options = {"repeat_penalty": 1.1, "repeat_last_n": 8, "top_k": 3}
    sent = sent_to(VLLM, "/api/chat", {"messages": HELLO, "options": options})
    fields = json.loads(sent.body)
    assert (fields["repetition_penalty"], fields["top_k"]) == (1.1, 3)
    assert not {"repeat_penalty", "repeat_last_n"} & fields.keys()
    assert sent.dropped == ("options.repeat_last_n",)


def test_what_is_asked_of_who_did_not_tell_goes_as_it_was_translated() -> None:
    assert lacking(BackendInfo(kind=BackendKind.LLAMA, address="h:1")) == ()


# what OpenAI's own schema says in another way -------------------------------------------------------------------------


def thinking(budget: int) -> dict[str, Any]:
    return {"thinking": {"type": "enabled", "budget_tokens": budget}}


BUDGET = "thinking[enabled].budget_tokens"


@pytest.mark.parametrize(
    ("fields", "effort", "clamped", "dropped"),
    [
        (thinking(1024), "low", f"{BUDGET}=low", ()),
        (thinking(4096), "medium", f"{BUDGET}=medium", ()),
        (thinking(16384), "high", f"{BUDGET}=high", ()),
        (
            {**thinking(1024), "output_config": {"effort": "max"}},
            "high",
            "output_config.effort=high",
            (BUDGET,),
        ),
        ({"output_config": {"effort": "xhigh"}}, "high", "output_config.effort=high", ()),
        ({"output_config": {"effort": "medium"}}, "medium", "", ()),
        ({"thinking": {"type": "disabled"}, "output_config": {"effort": "max"}}, "none", "", ("output_config.effort",)),
    ],
)  # fmt: skip
def test_budgets_and_the_highest_efforts_are_said_as_all_its_models_take_them(
    fields: dict[str, Any], effort: str, clamped: str, dropped: tuple[str, ...]
) -> None:
    """Claude Code's budget was refused with every request, and `max` by the server."""
    sent = sent_to(REMOTE, "/v1/messages", message(**fields))
    assert json.loads(sent.body)["reasoning_effort"] == effort
    assert (sent.clamped, sent.dropped) == ((clamped,) if clamped else (), dropped)
    assert not any(name.startswith("thinking") for name in json.loads(sent.body))


def test_who_takes_budgets_and_efforts_gets_them_as_they_were_asked() -> None:
    budget = {"thinking": {"type": "enabled", "budget_tokens": 1024}, "output_config": {"effort": "max"}}
    sent = json.loads(sent_to(VLLM, "/v1/messages", message(**budget)).body)
    assert (sent["thinking_token_budget"], sent["reasoning_effort"]) == (1024, "max")


LONG = "mcp__some_server_of_somebody__" + "look_into_the_calendar_of_the_whole_house"
DOTTED = "files.read"


def test_names_of_tools_it_does_not_take_go_by_another_and_come_back_as_they_were() -> None:
    """OpenAI's server takes 64 characters, Anthropic's clients have 128: such a tool made every request fail."""
    used = [
        *HELLO,
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": LONG, "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "7"}]},
    ]
    tools = [{"name": LONG, "input_schema": {}}, {"name": "short", "input_schema": {}}]
    choice = {"type": "tool", "name": LONG}
    sent = sent_to(REMOTE, "/v1/messages", message(messages=used, tools=tools, tool_choice=choice))
    found = json.loads(sent.body)
    other = found["tools"][0]["function"]["name"]
    assert re.fullmatch("[a-zA-Z0-9_-]{64}", other)
    assert found["tools"][1]["function"]["name"] == "short"
    assert found["tool_choice"]["function"]["name"] == other
    assert found["messages"][1]["tool_calls"][0]["function"]["name"] == other
    call = {"id": "c1", "index": 0, "function": {"name": other, "arguments": "{}"}}
    body = json.dumps({"choices": [{"message": {"tool_calls": [call]}, "finish_reason": "tool_calls"}]}).encode()
    way = way_of("/v1/messages")
    assert json.loads(way.back(sent.kept, stream=False).whole(body))["content"][0]["name"] == LONG
    event = b"data: %b\n\n" % json.dumps({"choices": [{"delta": {"tool_calls": [call]}}]}).encode()
    assert f'"name":"{LONG}"'.encode() in way.back(sent.kept, stream=True).feed(event)


def test_an_ollama_clients_names_come_back_too() -> None:
    tool = {"type": "function", "function": {"name": DOTTED, "parameters": {"type": "object"}}}
    sent = sent_to(REMOTE, "/api/chat", {"messages": HELLO, "tools": [tool], "stream": False})
    other = json.loads(sent.body)["tools"][0]["function"]["name"]
    assert other.startswith("files_read_")
    call = {"index": 0, "function": {"name": other, "arguments": "{}"}}
    way = way_of("/api/chat")
    body = json.dumps({"choices": [{"message": {"tool_calls": [call]}, "finish_reason": "stop"}]}).encode()
    told = json.loads(way.back(sent.kept, stream=False).whole(body))
    assert told["message"]["tool_calls"][0]["function"]["name"] == DOTTED
    event = b"data: %b\n\ndata: [DONE]\n\n" % json.dumps({"choices": [{"delta": {"tool_calls": [call]}}]}).encode()
    assert f'"name":"{DOTTED}"'.encode() in way.back(sent.kept, stream=True).feed(event)


def strict(schema: dict[str, Any]) -> dict[str, Any]:
    return message(tools=[{"name": "f", "input_schema": schema, "strict": True}])


def test_a_schema_that_is_held_to_is_closed_where_nothing_else_was_said() -> None:
    inner = {"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["b"]}
    schema = {"type": "object", "properties": {"a": {"anyOf": [inner, {"type": "null"}]}}, "required": ["a"]}
    found = json.loads(sent_to(REMOTE, "/v1/messages", strict(schema)).body)["tools"][0]["function"]["parameters"]
    assert (found["additionalProperties"], found["properties"]["a"]["anyOf"][0]["additionalProperties"]) == (
        False,
        False,
    )
    given = message(output_config={"format": {"type": "json_schema", "schema": schema}})
    found = json.loads(sent_to(REMOTE, "/v1/messages", given).body)["response_format"]["json_schema"]
    assert (found["strict"], found["schema"]["additionalProperties"]) == (True, False)
    assert "additionalProperties" not in sent_to(VLLM, "/v1/messages", strict(schema)).body.decode()


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "object", "properties": {"a": {}, "b": {}}, "required": ["a"]}, "/properties/b may be left out"),
        ({"type": "object", "properties": {"a": {}}}, "/properties/a may be left out"),
        ({"type": "object", "properties": {}, "additionalProperties": True}, "/additionalProperties lets others in"),
        ({"type": "object"}, "/ has no properties"),
        (
            {
                "type": "object",
                "properties": {"a": {"type": "array", "items": {"type": "object", "properties": {"c": {}}}}},
                "required": ["a"],
            },
            "/properties/a/items/properties/c may be left out",
        ),
        ({"$ref": "#/$defs/x", "$defs": {"x": {"properties": {"a": {}}}}}, "/$defs/x/properties/a may be left out"),
    ],
)
def test_a_schema_it_would_refuse_is_refused_with_the_place(schema: dict[str, Any], words: str) -> None:
    with pytest.raises(NotSupported, match=re.escape(words)) as refused:
        sent_to(REMOTE, "/v1/messages", strict(schema))
    assert refused.value.message.startswith("tools.0 cannot be said to this backend")
    with pytest.raises(NotSupported, match="the format of the answer cannot"):
        sent_to(REMOTE, "/v1/messages", message(output_format={"type": "json_schema", "schema": schema}))
    sent_to(REMOTE, "/v1/messages", message(tools=[{"name": "f", "input_schema": schema}]))


VALUES = st.none() | st.booleans() | st.text(max_size=3) | st.sampled_from(["object", "a"])
WORDS = st.sampled_from(["type", "properties", "required", "items", "anyOf", "$defs", "additionalProperties", "a"])
SCHEMAS = st.recursive(VALUES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner), max_leaves=9)


@given(SCHEMAS)
def test_nonsense_in_a_schema_is_refused_or_sent_never_a_fault(schema: Any) -> None:
    for body in (strict(schema), message(output_format={"type": "json_schema", "schema": schema})):
        with contextlib.suppress(Refusal):
            json.loads(sent_to(REMOTE, "/v1/messages", body).body)


def test_openais_own_servers_are_told_the_limit_by_the_name_all_their_chats_take() -> None:
    """Their newer models refuse `max_tokens`, which every message of Anthropic's has."""
    for endpoint, body in (
        ("/v1/messages", message()),
        ("/api/chat", {"messages": HELLO, "options": {"num_predict": 9}}),
    ):
        found = json.loads(sent_to(OPENAI, endpoint, body).body)
        assert (found["max_completion_tokens"], "max_tokens" in found) == (9, False)
        assert json.loads(sent_to(REMOTE, endpoint, body).body)["max_tokens"] == 9
    raw = {"prompt": "hi", "raw": True, "options": {"num_predict": 9}}
    assert json.loads(sent_to(OPENAI, "/api/generate", raw).body)["max_tokens"] == 9
    for address in ("https://api.openai.com.evil.example", "https://notopenai.com", "127.0.0.1:1"):
        assert limit_name(BackendInfo(kind=BackendKind.REMOTE, address=address)) == ""


@pytest.mark.parametrize(
    ("kind", "address", "setting", "name"),
    [
        (BackendKind.REMOTE, "https://gateway.example", "max_completion_tokens", "max_completion_tokens"),
        (BackendKind.REMOTE, "https://gateway.example", "max_tokens", ""),
        (BackendKind.REMOTE, "https://api.openai.com", "max_tokens", ""),
        (BackendKind.REMOTE, "https://api.openai.com", "auto", "max_completion_tokens"),
        (BackendKind.VLLM, "127.0.0.1:1", "max_completion_tokens", ""),
    ],
)
def test_a_setting_says_the_limits_name_of_a_gateway(kind: BackendKind, address: str, setting: str, name: str) -> None:
    """One before OpenAI's models under another host than theirs was told `max_tokens`, which these refuse."""
    assert limit_name(BackendInfo(kind=kind, address=address), setting) == name


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, {"max_completion_tokens": 4096}),
        ({"max_tokens": 9}, {"max_completion_tokens": 9}),
        ({"max_tokens": 9999}, {"max_completion_tokens": 4096}),
        ({"max_completion_tokens": 9}, {"max_completion_tokens": 9}),
        ({"max_completion_tokens": 9, "max_tokens": 7}, {"max_completion_tokens": 9}),
    ],
)
def test_a_limit_in_openais_own_dialect_goes_there_by_one_name(asked: dict[str, int], expected: dict[str, int]) -> None:
    """The tier's limit was put in as `max_tokens`: no request to such a model was answered."""
    rules = FieldTable(Settings()).rules("/v1/chat/completions", Tier.LOW)
    body = json.dumps({"model": "m", "messages": HELLO, **asked}).encode()
    sent = json.loads(
        read_body(body, rules, Want(limit_as="max_completion_tokens", limit_by_first_name=False)).upstream[0]
    )
    assert {name: value for name, value in sent.items() if "tokens" in name} == expected
