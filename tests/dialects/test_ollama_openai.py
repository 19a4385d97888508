"""Ollama's requests as a backend that speaks OpenAI's dialect takes them, and its one-piece answers and errors back."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any, get_args

import ollama
import ollama._types as types
import openai.types
import openai.types.chat
import pytest
from openai.types.chat import completion_create_params as chat_params
from pydantic import BaseModel, TypeAdapter

from hive.bodies.fields import TABLE
from hive.dialects.ollama_openai import GENERATE_ROWS, MESSAGE, WAYS, picture_url, ways
from hive.dialects.translation import FieldFate, Sent
from hive.errors import BackendDown, BadRequest, NotSupported, StreamIncomplete
from hive.settings.file import read

CHAT, GENERATE, EMBED, EMBEDDINGS = "/api/chat", "/api/generate", "/api/embed", "/api/embeddings"
HELLO: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": False}
PROMPT: dict[str, Any] = {"model": "m", "prompt": "hi", "stream": False}
LEAST = {
    CHAT: HELLO,
    GENERATE: PROMPT,
    EMBED: {"model": "m", "input": "hi"},
    EMBEDDINGS: {"model": "m", "prompt": "hi"},
}
USER = [{"role": "user", "content": "hi"}]
PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(20)).decode()
JPEG = base64.b64encode(b"\xff\xd8\xff\xe0" + bytes(20)).decode()
GIF = base64.b64encode(b"GIF89a" + bytes(20)).decode()
WEBP = base64.b64encode(b"RIFF\x10\0\0\0WEBPVP8 " + bytes(20)).decode()
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}


def sent(endpoint: str, body: dict[str, Any]) -> Sent:
    return WAYS[endpoint].there(json.dumps(body).encode())


def asked(endpoint: str, body: dict[str, Any]) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(sent(endpoint, body).body)
    return told


def put(endpoint: str, path: str, value: object) -> dict[str, Any]:
    """The least body of an endpoint with one more field."""
    body = json.loads(json.dumps(LEAST[endpoint]))
    top, _, inner = path.partition(".")
    if not inner:
        body[top] = value
    elif top == "options":
        body["options"] = {inner: value}
    else:
        body["messages"][0][inner] = value
    return dict(body)


# --- every field has a row --------------------------------------------------------------------------------------------

REQUESTS: dict[str, type[BaseModel]] = {
    CHAT: types.ChatRequest,
    GENERATE: types.GenerateRequest,
    EMBED: types.EmbedRequest,
    EMBEDDINGS: types.EmbeddingsRequest,
}


def fields_of_package(endpoint: str) -> set[str]:
    """The fields that the installed ollama package can send, with dots into objects."""
    return set(_fields(REQUESTS[endpoint], ""))


WHOLE = {"tools", "messages.tool_calls.function.arguments", "images", "messages.images", "format"}
"""Fields that go on as the client wrote them, or as one value (a picture): what is in them has no rows."""


def _fields(of: type[BaseModel], where: str) -> Iterator[str]:
    for name, field in of.model_fields.items():
        path = where + (field.alias or name)
        yield path
        for inner in () if path in WHOLE else _objects(field.annotation):
            yield from _fields(inner, f"{path}.")


def _objects(hint: Any) -> Iterator[type[BaseModel]]:
    """Every object a hint may be of."""
    if isinstance(hint, type) and issubclass(hint, BaseModel):
        yield hint
    for inner in get_args(hint):
        yield from _objects(inner)


def fields_of_policing(endpoint: str) -> set[str]:
    problems: list[str] = []
    rows, _ = read(TABLE, "the table", problems)
    assert not problems
    return {row.key for row in rows if {"*", endpoint} & set(row.section.split()[1:])}


@pytest.mark.parametrize("endpoint", REQUESTS)
def test_every_field_of_the_installed_package_and_of_the_policing_table_has_a_row(endpoint: str) -> None:
    known = fields_of_package(endpoint) | fields_of_policing(endpoint)
    assert known - WAYS[endpoint].rows.keys() == set()
    assert "options.temperature" in known
    assert "keep_alive" in known
    assert ("messages.tool_calls.function.name" in known) is (endpoint == CHAT)


def test_the_walk_fails_where_a_row_is_missing() -> None:
    for name in ("think", "options.seed", "messages.thinking", "messages.tool_calls.function.arguments"):
        without = {row: fate for row, fate in WAYS[CHAT].rows.items() if row != name}
        assert fields_of_package(CHAT) - without.keys() == {name}


@pytest.mark.parametrize("endpoint", REQUESTS)
def test_every_row_says_where_its_field_goes_or_why_it_does_not(endpoint: str) -> None:
    for name, row in WAYS[endpoint].rows.items():
        assert name == "options" or (row.to if row.fate is FieldFate.MAPPED else row.why), name


OFTEN = [(endpoint, name) for endpoint in REQUESTS for name in WAYS[endpoint].rows if not name.startswith("messages.")]
SAMPLES: dict[str, object] = {
    "model": "other",
    "stream": True,
    "format": "json",
    "think": True,
    "logprobs": True,
    "tools": [TOOL],
    "messages": [{"role": "user", "content": "more"}],
    "prompt": "more",
    "input": "more",
    "system": "be kind",
    "images": [PNG],
    "suffix": "tail",
    "raw": True,
    "truncate": False,
    "dimensions": 2,
    "options": {"seed": 1},
    "options.num_predict": 7,
    "options.repeat_last_n": 9,
    "options.stop": ["x"],
}


@pytest.mark.parametrize(("endpoint", "name"), OFTEN)
def test_a_mapped_field_changes_the_request_a_harmless_one_is_told_and_a_refused_one_refused(
    endpoint: str, name: str
) -> None:
    row = WAYS[endpoint].rows[name]
    body = put(endpoint, name, SAMPLES.get(name, 3 if name.startswith("options.") else "3"))
    if row.fate is FieldFate.REFUSED:
        with pytest.raises(NotSupported, match=name):
            sent(endpoint, body)
    elif row.fate is FieldFate.HARMLESS:
        got, least = sent(endpoint, body), sent(endpoint, LEAST[endpoint])
        assert got.body == least.body
        told = name if name in got.dropped else name.partition(".")[0]  # an object that is left out is told as one
        assert got.dropped == (told,)
    elif name == "top_logprobs":
        assert asked(endpoint, {**LEAST[endpoint], "logprobs": True, name: 3})[name] == 3
    else:
        assert sent(endpoint, body).body != sent(endpoint, LEAST[endpoint]).body
        assert not sent(endpoint, body).dropped


def test_a_field_in_no_row_is_refused() -> None:
    for body in ({**HELLO, "surprise": 1}, {**HELLO, "options": {"surprise": 1}}):
        with pytest.raises(NotSupported, match="surprise"):
            sent(CHAT, body)


def test_null_is_an_absent_field() -> None:
    rows = [name for name in WAYS[CHAT].rows if "." not in name and name not in HELLO]
    assert sent(CHAT, {**HELLO, **dict.fromkeys(rows)}).body == sent(CHAT, HELLO).body
    assert asked(CHAT, {**HELLO, "options": {"seed": None, "typical_p": None}}) == asked(CHAT, HELLO)


# --- golden requests --------------------------------------------------------------------------------------------------

BASE: dict[str, Any] = {"model": "m", "messages": USER, "stream": False}
GOLDEN: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (CHAT, {"model": "m", "messages": USER}, {**BASE, "stream": True, "stream_options": {"include_usage": True}}),
    (CHAT, {**HELLO, "tools": []}, BASE),
    (CHAT, {**HELLO, "tools": [TOOL]}, {**BASE, "tools": [TOOL]}),
    (CHAT, {**HELLO, "format": ""}, BASE),
    (CHAT, {**HELLO, "format": "json"}, {**BASE, "response_format": {"type": "json_object"}}),
    (
        CHAT,
        {**HELLO, "format": SCHEMA},
        {**BASE, "response_format": {"type": "json_schema", "json_schema": {"name": "schema", "schema": SCHEMA}}},
    ),
    (CHAT, {**HELLO, "think": True}, {**BASE, "chat_template_kwargs": {"enable_thinking": True}}),
    (CHAT, {**HELLO, "think": False}, {**BASE, "chat_template_kwargs": {"enable_thinking": False}}),
    (CHAT, {**HELLO, "think": "high"}, {**BASE, "reasoning_effort": "high"}),
    (CHAT, {**HELLO, "logprobs": True}, {**BASE, "logprobs": True, "top_logprobs": 1}),
    (CHAT, {**HELLO, "logprobs": True, "top_logprobs": 5}, {**BASE, "logprobs": True, "top_logprobs": 5}),
    (CHAT, {**HELLO, "logprobs": False, "top_logprobs": 5}, BASE),
    (
        CHAT,
        {
            **HELLO,
            "options": {
                "temperature": 0.5,
                "top_p": 0.9,
                "top_k": 4,
                "min_p": 0.1,
                "seed": 3,
                "stop": ["x"],
                "num_predict": 9,
                "presence_penalty": 1,
                "frequency_penalty": 2,
                "repeat_penalty": 1.1,
                "repeat_last_n": 32,
                "typical_p": 1.0,
                "num_ctx": 4096,
            },
        },
        {
            **BASE,
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 4,
            "min_p": 0.1,
            "seed": 3,
            "stop": ["x"],
            "max_tokens": 9,
            "presence_penalty": 1,
            "frequency_penalty": 2,
            "repetition_penalty": 1.1,
            "repeat_penalty": 1.1,
            "repeat_last_n": 32,
        },
    ),
    (CHAT, {**HELLO, "options": {"num_predict": -1}}, BASE),
    (CHAT, {**HELLO, "options": {"num_predict": -2}}, BASE),
    (CHAT, {**HELLO, "options": {"repeat_last_n": -1}}, {**BASE, "repeat_last_n": 65536}),
    (CHAT, {**HELLO, "options": {"repeat_last_n": 0, "repeat_penalty": 2}}, {**BASE, "repeat_last_n": 0}),
    (GENERATE, PROMPT, BASE),
    (GENERATE, {**PROMPT, "system": "s"}, {**BASE, "messages": [{"role": "system", "content": "s"}, *USER]}),
    (GENERATE, {**PROMPT, "system": "", "context": [], "raw": False, "template": ""}, BASE),
    (
        GENERATE,
        {**PROMPT, "images": [JPEG]},
        {
            **BASE,
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "hi"},
                        {"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{JPEG}"}},
                    ],
                }
            ],
        },
    ),
    (
        GENERATE,
        {**PROMPT, "raw": True, "suffix": "", "options": {"num_predict": 4}, "logprobs": True},
        {"model": "m", "prompt": "hi", "max_tokens": 4, "stream": False, "logprobs": 1},
    ),
    (GENERATE, {**PROMPT, "raw": True}, {"model": "m", "prompt": "hi", "max_tokens": None, "stream": False}),
    (EMBED, {"model": "m", "input": "a"}, {"model": "m", "input": ["a"], "truncate_prompt_tokens": -1}),
    (
        EMBED,
        {"model": "m", "input": ["a", "b"], "truncate": False, "dimensions": 8, "options": {"num_ctx": 9}},
        {"model": "m", "input": ["a", "b"], "dimensions": 8},
    ),
    (EMBEDDINGS, {"model": "m", "prompt": "a"}, {"model": "m", "input": "a"}),
]
TARGETS = {CHAT: "/v1/chat/completions", EMBED: "/v1/embeddings", EMBEDDINGS: "/v1/embeddings"}


@pytest.mark.parametrize(("endpoint", "body", "expected"), GOLDEN)
def test_a_request_becomes_the_one_of_the_table(endpoint: str, body: dict[str, Any], expected: dict[str, Any]) -> None:
    got = sent(endpoint, body)
    assert json.loads(got.body) == expected
    assert got.target == TARGETS.get(endpoint, "/v1/chat/completions" if "messages" in expected else "/v1/completions")


@pytest.mark.parametrize(("endpoint", "body", "expected"), GOLDEN)
def test_what_is_sent_are_fields_of_openais_own_schema_or_known_extensions(
    endpoint: str, body: dict[str, Any], expected: dict[str, Any]
) -> None:
    known = {
        "/v1/chat/completions": chat_params.CompletionCreateParamsBase.__annotations__.keys(),
        "/v1/completions": openai.types.completion_create_params.CompletionCreateParamsBase.__annotations__.keys(),
        "/v1/embeddings": openai.types.EmbeddingCreateParams.__annotations__.keys(),
    }[sent(endpoint, body).target]
    extensions = {"top_k", "min_p", "repetition_penalty", "repeat_penalty", "repeat_last_n", "chat_template_kwargs"}
    assert expected.keys() - known - {"stream"} <= extensions | {"truncate_prompt_tokens"}


def test_numbers_stay_as_they_were_written() -> None:
    body = b'{"model":"m","prompt":"p","options":{"temperature":1e-1,"seed":12345678901234567890123,"num_predict":1e2}}'
    got = WAYS[GENERATE].there(body).body
    assert b'"max_tokens":1e2' in got
    assert b'"temperature":1e-1' in got
    assert b'"seed":12345678901234567890123' in got


@pytest.mark.parametrize("level", get_args(get_args(openai.types.shared_params.reasoning_effort.ReasoningEffort)[0]))
def test_a_level_of_thinking_is_one_that_openai_knows_or_it_is_refused(level: str) -> None:
    if level in ("low", "medium", "high", "max"):
        assert asked(CHAT, {**HELLO, "think": level})["reasoning_effort"] == level
    else:
        with pytest.raises(BadRequest, match="think"):
            sent(CHAT, {**HELLO, "think": level})


REFUSED: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    (GENERATE, {**PROMPT, "context": [1, 2]}, NotSupported, "another|tokens"),
    (GENERATE, {**PROMPT, "template": "{{ .Prompt }}"}, NotSupported, "template"),
    (GENERATE, {**PROMPT, "suffix": "s"}, NotSupported, "suffix.*passes over it"),
    (GENERATE, {**PROMPT, "raw": True, "system": "be kind"}, NotSupported, "system"),
    (GENERATE, {**PROMPT, "raw": True, "images": [PNG]}, NotSupported, "images"),
    (GENERATE, {**PROMPT, "raw": True, "format": SCHEMA}, NotSupported, "format"),
    (GENERATE, {**PROMPT, "raw": True, "think": "low"}, NotSupported, "think"),
    (CHAT, {**HELLO, "options": {"typical_p": 0.5}}, NotSupported, "typical_p"),
    (CHAT, {**HELLO, "format": "xml"}, BadRequest, "format"),
    (CHAT, {**HELLO, "format": 1}, BadRequest, "format"),
    (CHAT, {**HELLO, "think": 1}, BadRequest, "think"),
    (CHAT, {**HELLO, "stream": "yes"}, BadRequest, "stream"),
    (CHAT, {**HELLO, "options": [1]}, BadRequest, "options"),
    (CHAT, {**HELLO, "options": {"num_predict": "many"}}, BadRequest, "num_predict"),
    (CHAT, {**HELLO, "messages": "hi"}, BadRequest, "messages"),
    (CHAT, {"model": "m"}, BadRequest, "messages"),
    (CHAT, {"messages": USER}, BadRequest, "model"),
    (CHAT, {**HELLO, "messages": [{"content": "hi"}]}, BadRequest, "role"),
    (CHAT, {**HELLO, "messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, BadRequest, "content"),
    (CHAT, {**HELLO, "messages": [{"role": "user", "images": ["http://evil/x.png"]}]}, BadRequest, "base64"),
    (CHAT, {**HELLO, "messages": [{"role": "user", "images": ["aGVsbG8gd29ybGQ="]}]}, BadRequest, "PNG"),
    (CHAT, {**HELLO, "messages": [{"role": "assistant", "tool_calls": [{}]}]}, BadRequest, "function"),
    (
        CHAT,
        {**HELLO, "messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}]},
        BadRequest,
        "object",
    ),
    (EMBED, {"model": "m"}, BadRequest, "input"),
    (EMBED, {"model": "m", "input": [{"role": "user", "content": "x"}]}, BadRequest, "input"),
    (EMBED, {"model": "m", "input": [[1, 2]]}, BadRequest, "input"),
    (EMBEDDINGS, {"model": "m", "prompt": ["a", "b"]}, BadRequest, "prompt"),
    (GENERATE, {"model": "m", "prompt": ["a"]}, BadRequest, "prompt"),
]


@pytest.mark.parametrize(("endpoint", "body", "kind", "words"), REFUSED)
def test_what_cannot_be_said_is_refused_with_its_reason(
    endpoint: str, body: dict[str, Any], kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words):
        sent(endpoint, body)


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'"x"', b"[" * 5000])
def test_a_body_that_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(BadRequest):
        WAYS[CHAT].there(body)


# --- messages ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("data", "kind"), [(PNG, "png"), (JPEG, "jpeg"), (GIF, "gif"), (WEBP, "webp")])
def test_a_picture_is_told_by_its_first_bytes(data: str, kind: str) -> None:
    assert picture_url(data) == f"data:image/{kind};base64,{data}"


def messages(*given: dict[str, Any]) -> list[dict[str, Any]]:
    told: list[dict[str, Any]] = asked(CHAT, {**HELLO, "messages": list(given)})["messages"]
    return told


def call(name: str, id: str = "", **arguments: object) -> dict[str, Any]:
    return {**({"id": id} if id else {}), "function": {"name": name, "arguments": arguments}}


def test_tool_calls_get_ids_and_their_results_find_them_by_name_then_by_order() -> None:
    got = messages(
        {"role": "assistant", "content": "", "tool_calls": [call("f", n=1), call("g"), call("f", n=2)]},
        {"role": "tool", "content": "of g", "tool_name": "g"},
        {"role": "tool", "content": "of the first f", "tool_name": "f"},
        {"role": "tool", "content": "of the other f"},
        {"role": "assistant", "tool_calls": [call("f", id="mine"), call("h", id="call_3")]},
        {"role": "tool", "content": "told", "tool_call_id": "call_3"},
        {"role": "tool", "content": "left", "tool_name": "f"},
        {"role": "assistant", "tool_calls": [call("k")]},
    )
    first = got[0]["tool_calls"]
    assert [(made["id"], made["type"]) for made in first] == [(f"call_{n}", "function") for n in range(3)]
    assert [json.loads(made["function"]["arguments"]) for made in first] == [{"n": 1}, {}, {"n": 2}]
    assert [message.get("tool_call_id") for message in got] == [
        *(None, "call_1", "call_0", "call_2"),
        *(None, "call_3", "mine", None),
    ]
    assert [message["name"] for message in got if "name" in message] == ["g", "f", "f"]
    assert got[7]["tool_calls"][0]["id"] == "call_4"


def test_a_conversation_of_the_ollama_package_is_one_of_openais_schema() -> None:
    said = [
        types.Message(role="system", content="s"),
        types.Message(role="user", content="look", images=[types.Image(value=PNG)]),
        types.Message(
            role="assistant",
            content="",
            thinking="hm",
            tool_calls=[
                types.Message.ToolCall(function=types.Message.ToolCall.Function(name="f", arguments={"a": [1]}))
            ],
        ),
        types.Message(role="tool", content="7", tool_name="f"),
    ]
    request = types.ChatRequest(model="m", messages=said, tools=[], stream=True, options={"temperature": 0})
    got = asked(CHAT, json.loads(request.model_dump_json(exclude_none=True)))
    assert [message["role"] for message in got["messages"]] == ["system", "user", "assistant", "tool"]
    assert got["messages"][1]["content"][1]["image_url"]["url"].startswith("data:image/png;base64,")
    assert got["messages"][2]["reasoning_content"] == "hm"
    assert got["messages"][3]["tool_call_id"] == got["messages"][2]["tool_calls"][0]["id"]
    assert json.loads(got["messages"][2]["tool_calls"][0]["function"]["arguments"]) == {"a": [1]}
    TypeAdapter(list[openai.types.chat.ChatCompletionMessageParam]).validate_python(got["messages"], strict=True)


def test_names_are_found_in_any_case_as_go_does_and_never_twice() -> None:
    assert messages({"Role": "User", "CONTENT": "x"}) == [{"role": "user", "content": "x"}]
    with pytest.raises(BadRequest, match="twice"):
        messages({"role": "user", "content": "x", "Content": "y"})


def test_an_unknown_field_of_a_message_is_left_out_and_told_in_a_name_a_header_can_carry() -> None:
    got = sent(CHAT, {**HELLO, "messages": [{**USER[0], "name": "n", "a\r\nx: y": 1}, {**USER[0], "name": "o"}]})
    assert got.dropped == ("messages.name", "messages.?")
    assert json.loads(got.body)["messages"] == USER * 2


def test_every_row_of_a_message_is_a_row_of_the_chat() -> None:
    assert {f"messages.{name}" for name in MESSAGE} <= WAYS[CHAT].rows.keys()
    assert not {name for name in GENERATE_ROWS if name.startswith("messages")}


# --- answers in one piece ---------------------------------------------------------------------------------------------


def whole(endpoint: str, answer: object, body: dict[str, Any] | None = None) -> dict[str, Any]:
    clock = iter([100.0, 100.5, 102.25])
    way = ways(lambda: next(clock))[endpoint]
    kept = way.there(json.dumps(body or LEAST[endpoint]).encode()).kept
    told: dict[str, Any] = json.loads(way.back(kept, stream=False).whole(json.dumps(answer).encode()))
    return told


def answered(message: dict[str, Any], reason: str = "stop", **more: object) -> dict[str, Any]:
    return {"choices": [{"index": 0, "message": message, "finish_reason": reason}], **more}


USAGE = {"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 3}}
TIMINGS = {"cache_n": 3, "prompt_n": 6, "prompt_ms": 1.5, "predicted_n": 4, "predicted_ms": 20.25}
HEAD = {"model": "m", "created_at": "1970-01-01T00:01:42.250000Z"}
COUNTS = {"prompt_eval_count": 9, "prompt_eval_cached_count": 3, "eval_count": 4}
DONE = {"done": True, "done_reason": "stop"}


def test_a_call_in_the_old_dialect_is_a_call() -> None:
    """`function_call` was passed over, and with it all that the answer said."""
    told = whole(CHAT, answered({"content": None, "function_call": {"name": "f", "arguments": '{"n":1}'}}))
    assert told["message"]["tool_calls"] == [{"function": {"index": 0, "name": "f", "arguments": {"n": 1}}}]


def test_a_chat_answer_in_one_piece() -> None:
    text = {"role": "assistant", "content": "yes"}
    said = {"message": text, **HEAD, **DONE}
    assert whole(CHAT, answered(text)) == {**said, "total_duration": 2_250_000_000}
    assert whole(CHAT, answered(text, usage=USAGE)) == {**said, **COUNTS, "total_duration": 2_250_000_000}
    assert whole(CHAT, answered(text, timings=TIMINGS)) == {
        **said,
        **COUNTS,
        "total_duration": 2_250_000_000,
        "prompt_eval_duration": 1_500_000,
        "eval_duration": 20_250_000,
    }
    usage = {"prompt_tokens": 9, "completion_tokens": -1, "prompt_tokens_details": None}
    assert "eval_count" not in whole(CHAT, answered(text, usage=usage))


def test_thinking_tool_calls_and_the_reason_of_an_answer_in_one_piece() -> None:
    calls = [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{\n "n": 1}'}}]
    got = whole(CHAT, answered({"content": None, "reasoning_content": "hm", "tool_calls": calls}, "tool_calls"))
    assert got["message"] == {
        "role": "assistant",
        "content": "",
        "thinking": "hm",
        "tool_calls": [{"id": "c1", "function": {"index": 0, "name": "f", "arguments": {"n": 1}}}],
    }
    assert got["done_reason"] == "stop"
    parsed = ollama.ChatResponse.model_validate(got)
    assert parsed.message.tool_calls is not None
    assert parsed.message.tool_calls[0].function.arguments == {"n": 1}
    assert whole(CHAT, answered({"content": "x"}, "length"))["done_reason"] == "length"
    assert whole(CHAT, answered({"content": "", "refusal": "no"}, "content_filter"))["message"]["content"] == "no"


def test_a_generated_answer_in_one_piece_comes_from_a_chat_or_a_completion() -> None:
    chat = whole(GENERATE, answered({"content": "yes", "reasoning": "hm"}))
    assert chat == {**HEAD, **DONE, "response": "yes", "thinking": "hm", "total_duration": 2_250_000_000}
    assert ollama.GenerateResponse.model_validate(chat).response == "yes"
    text = whole(GENERATE, {"choices": [{"text": "yes", "finish_reason": "length"}]})
    assert text == {**HEAD, "done": True, "done_reason": "length", "response": "yes", "total_duration": 2_250_000_000}


def test_probabilities_are_told_where_they_were_asked_and_no_more_others_than_asked() -> None:
    others = [{"token": "a", "logprob": -0.1, "bytes": [97]}, {"token": "b", "logprob": -2.0}]
    answer = answered({"content": "a"})
    answer["choices"][0]["logprobs"] = {"content": [{"token": "a", "logprob": -0.1, "top_logprobs": others, "id": 5}]}
    assert "logprobs" not in whole(CHAT, answer)
    assert whole(CHAT, answer, {**HELLO, "logprobs": True})["logprobs"] == [{"token": "a", "logprob": -0.1}]
    got = whole(CHAT, answer, {**HELLO, "logprobs": True, "top_logprobs": 1})
    assert got["logprobs"] == [{"token": "a", "logprob": -0.1, "top_logprobs": others[:1]}]
    parsed = ollama.ChatResponse.model_validate(got).logprobs
    assert parsed is not None
    assert parsed[0].token == "a"
    vllm = {"tokens": ["a"], "token_logprobs": [-0.1], "top_logprobs": [{"b": -2.0, "a": -0.1}], "text_offset": [0]}
    text = {"choices": [{"text": "a", "finish_reason": "stop", "logprobs": vllm}]}
    got = whole(GENERATE, text, {**PROMPT, "raw": True, "logprobs": True, "top_logprobs": 1})
    assert got["logprobs"] == [{"token": "a", "logprob": -0.1, "top_logprobs": [{"token": "a", "logprob": -0.1}]}]


@pytest.mark.parametrize(
    "answer",
    [[], {}, {"choices": []}, {"error": {"message": "no"}}, {"choices": [{"message": {"content": [1]}}]}, "text"],
)
def test_what_is_no_answer_is_a_fault_of_the_backend(answer: object) -> None:
    for endpoint in REQUESTS:
        with pytest.raises(BackendDown):
            whole(endpoint, answer)


def test_an_answer_that_was_broken_off_is_none() -> None:
    with pytest.raises(StreamIncomplete):
        whole(CHAT, answered({"content": "half"}, "abort"))
    bad = [{"id": "c", "function": {"name": "f", "arguments": '{"n":'}}]
    with pytest.raises(BackendDown, match="no JSON object"):
        whole(CHAT, answered({"content": None, "tool_calls": bad}, "tool_calls"))
    assert "tool_calls" not in whole(CHAT, answered({"content": None, "tool_calls": bad}, "length"))["message"]


def test_vectors_come_in_the_order_of_the_texts_with_their_numbers_as_written() -> None:
    way = ways(lambda: 100.0)[EMBED]
    kept = way.there(b'{"model":"m","input":["a","b"]}').kept
    body = b'{"data":[{"index":1,"embedding":[1e-3,2]},{"index":0,"embedding":[3.0]}],"usage":{"prompt_tokens":4}}'
    got = way.back(kept, stream=False).whole(body)
    assert got == b'{"model":"m","embeddings":[[3.0],[1e-3,2]],"total_duration":0,"prompt_eval_count":4}'
    assert ollama.EmbedResponse.model_validate_json(got).embeddings == [[3.0], [0.001, 2.0]]


def test_a_vector_longer_than_asked_is_cut_and_scaled() -> None:
    answer = {"data": [{"embedding": [3.0, 4.0, 12.0]}], "usage": {"prompt_tokens": 1}}
    got = whole(EMBED, answer, {"model": "m", "input": "a", "dimensions": 2})
    assert got["embeddings"] == [[0.6, 0.8]]
    assert whole(EMBED, answer, {"model": "m", "input": "a", "dimensions": 3})["embeddings"] == [[3.0, 4.0, 12.0]]
    assert whole(EMBEDDINGS, answer) == {"embedding": [3.0, 4.0, 12.0]}


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "body", "text"),
    [
        (
            404,
            {"error": {"message": "The model `x` does not exist.", "type": "NotFoundError", "code": 404}},
            "The model",
        ),
        (503, {"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}}, "Loading model"),
        (401, {"error": "Unauthorized"}, "Unauthorized"),
        (404, {"detail": "Not Found"}, "Not Found"),
        (422, {"detail": [{"loc": ["body"], "msg": "field required"}]}, "field required"),
        (400, {"message": "bad"}, "bad"),
        (400, {"error": {"code": 7}}, '"code":'),
        (502, "upstream died", "upstream died"),
        (413, "", "413"),
        (500, {}, "500"),
        (500, {"error": None}, "500"),
    ],
)
def test_a_backends_error_is_one_string_with_its_own_words(status: int, body: object, text: str) -> None:
    raw = body.encode() if isinstance(body, str) else json.dumps(body).encode()
    for way in WAYS.values():
        told = json.loads(way.back(b'{"model":"m"}', stream=False).error(status, raw))
        assert told.keys() == {"error"}
        assert text in told["error"]


def test_an_endless_error_is_cut_and_binary_is_made_text() -> None:
    back = WAYS[CHAT].back(b'{"model":"m"}', stream=True)
    assert len(json.loads(back.error(500, b"x" * 10_000_000))["error"]) == 4096
    assert json.loads(back.error(500, b"\xff\x00\xfe"))["error"]
