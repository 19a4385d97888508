"""Answers of the demo backend, as pure data."""

from __future__ import annotations

import base64
import json
import struct
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hive.demo.canned import MODEL, CannedReply, Moment, answer_words, embedding, mark, reply_to

MOMENT = Moment(now=1795154964.5, number=7, tokens_per_s=50)


def ask(path: str, method: str = "POST", **body: Any) -> CannedReply:
    return reply_to(method, path, json.dumps(body).encode() if method == "POST" else b"", MOMENT)


def lines(reply: CannedReply) -> list[dict[str, Any]]:
    return [json.loads(data) for _, data in reply.parts]


def events(reply: CannedReply) -> list[Any]:
    """The data of its server-sent events; `[DONE]` must be the last."""
    found = [data.removeprefix(b"data: ").removesuffix(b"\n\n") for _, data in reply.parts]
    assert found.pop() == b"[DONE]"
    return [json.loads(data) for data in found]


@given(st.text())
def test_the_same_prompt_has_the_same_text_and_its_mark_is_in_it(prompt: str) -> None:
    words = answer_words(prompt)
    assert words == answer_words(prompt)
    assert mark(prompt) in "".join(words)
    assert all(len(word.split()) == 1 for word in words)
    assert 30 < len(words) < 90


def test_another_prompt_has_another_text() -> None:
    assert answer_words("a") != answer_words("b")


@given(prompt=st.text(min_size=1), limit=st.integers(min_value=-2, max_value=200))
def test_an_ollama_stream_sends_as_many_words_as_it_counts(prompt: str, limit: int) -> None:
    reply = ask("/api/generate", prompt=prompt, options={"num_predict": limit})
    *spoken, last = lines(reply)
    assert reply.streamed
    assert [line["done"] for line in spoken] == [False] * len(spoken)
    assert last["done"] is True
    assert last["eval_count"] == len(spoken) == sum(tokens for tokens, _ in reply.parts)
    assert last["prompt_eval_count"] == len(prompt.split())
    whole = len(answer_words(prompt))
    assert (len(spoken), last["done_reason"]) == ((limit, "length") if 0 <= limit < whole else (whole, "stop"))
    assert "".join(line["response"] for line in spoken) == "".join(answer_words(prompt)[: len(spoken)])


def test_every_word_of_a_stream_takes_its_time_and_a_whole_answer_all_of_it() -> None:
    stream = ask("/api/chat", messages=[{"role": "user", "content": "hi"}])
    whole = ask("/api/chat", messages=[{"role": "user", "content": "hi"}], stream=False)
    assert {tokens for tokens, _ in stream.parts[:-1]} == {1}
    assert stream.parts[-1][0] == 0
    assert whole.parts[0][0] == len(stream.parts) - 1


def test_durations_fit_the_pace() -> None:
    last = lines(ask("/api/generate", prompt="hi", stream=False, options={"num_predict": 25}))[0]
    assert last["eval_duration"] == 500_000_000  # 25 words at 50 a second, in ns
    assert last["total_duration"] == last["eval_duration"] + last["prompt_eval_duration"]


def test_a_chat_answers_its_last_user_and_counts_all_its_words() -> None:
    messages = [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": None},
        {"role": "user", "content": [{"type": "text", "text": "second one"}, {"type": "image_url", "image_url": {}}]},
        {"role": "assistant", "content": "well"},
    ]
    found = json.loads(ask("/v1/chat/completions", messages=messages).parts[0][1])
    assert found["choices"][0]["message"]["content"] == "".join(answer_words("second one\n"))
    assert found["usage"]["prompt_tokens"] == 6


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("with_usage", [True, False])
def test_an_openai_stream_has_usage_only_where_asked_for(path: str, with_usage: bool) -> None:
    options: dict[str, Any] = {"stream_options": {"include_usage": True}} if with_usage else {}
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "hi you"}], "prompt": "hi you", "max_tokens": 5}
    found = events(ask(path, stream=True, **asked, **options))
    usages = [event.pop("usage", "absent") for event in found]
    if with_usage:
        assert found.pop()["choices"] == []
        assert usages.pop() == {"prompt_tokens": 2, "completion_tokens": 5, "total_tokens": 7}
        assert set(usages) == {None}
    else:
        assert set(usages) == {"absent"}
    reasons = [event["choices"][0]["finish_reason"] for event in found]
    assert reasons == [None] * (len(found) - 1) + ["length"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_openai_streams_only_where_asked_to(path: str) -> None:
    assert not ask(path, prompt="a", messages=[{"role": "user", "content": "a"}]).streamed


@pytest.mark.parametrize("path", ["/api/generate", "/api/chat", "/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("stream", [True, False])
def test_every_answer_says_that_it_is_canned(path: str, stream: bool) -> None:
    reply = ask(path, stream=stream, prompt="a", messages=[{"role": "user", "content": "a"}])
    bodies = b"".join(data for _, data in reply.parts)
    assert b"canned" in bodies
    assert bodies.count(b'"model":"hive-demo"') == (len(reply.parts) - (path[1] == "v") if stream else 1)


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        ("/api/generate", {"prompt": ""}, "load"),
        ("/api/chat", {"messages": []}, "load"),
        ("/api/generate", {"keep_alive": 0}, "unload"),
        ("/api/generate", {"keep_alive": "10m"}, "load"),
    ],
)
def test_without_a_prompt_ollama_only_loads_or_unloads(path: str, body: dict[str, Any], reason: str) -> None:
    found = lines(ask(path, **body))
    assert [(line["done"], line["done_reason"]) for line in found] == [(True, reason)]


def test_embeddings_are_as_many_as_texts_and_near_for_shared_words() -> None:
    bee, bees, ship = (embedding(text) for text in ("a bee in the hive", "the bee and the hive", "salt iron paper"))

    def near(one: list[float], other: list[float]) -> float:
        return sum(a * b for a, b in zip(one, other, strict=True))

    assert near(bee, bee) == pytest.approx(1)
    assert near(bee, bees) > near(bee, ship)
    found = json.loads(ask("/api/embed", input=["a bee", "b"]).parts[0][1])
    assert found["embeddings"] == [embedding("a bee"), embedding("b")]
    assert found["prompt_eval_count"] == 3
    assert json.loads(ask("/api/embeddings", prompt="a bee").parts[0][1]) == {"embedding": embedding("a bee")}


def test_openai_embeddings_come_as_floats_or_base64() -> None:
    floats = json.loads(ask("/v1/embeddings", input="a bee").parts[0][1])
    packed = json.loads(ask("/v1/embeddings", input="a bee", encoding_format="base64").parts[0][1])
    unpacked = struct.unpack("<64f", base64.b64decode(packed["data"][0]["embedding"]))
    assert list(unpacked) == pytest.approx(floats["data"][0]["embedding"])
    assert floats["usage"] == packed["usage"] == {"prompt_tokens": 2, "total_tokens": 2}


REFUSED = [
    ("POST", "/api/chat", b"{", 400),
    ("POST", "/api/chat", b"\xff", 400),
    ("POST", "/api/chat", b'{"model":"\xff"}', 400),
    ("POST", "/v1/chat/completions", b'{"messages": 3}', 400),
    ("POST", "/v1/chat/completions", b'{"model": "gpt-4"}', 404),
    ("POST", "/api/generate", b'{"model": "llama3.2", "prompt": "a"}', 404),
    ("GET", "/v1/models/gpt-4", b"", 404),
    ("GET", "/metrics", b"", 404),
    ("POST", "/api/pull", b"{}", 404),
    ("GET", "/api/chat", b"", 405),
    ("DELETE", "/v1/models", b"", 405),
    ("HEAD", "/api/chat", b"", 405),
]


@pytest.mark.parametrize(("method", "path", "body", "status"), REFUSED)
def test_what_it_cannot_do_is_refused_in_the_paths_dialect(method: str, path: str, body: bytes, status: int) -> None:
    reply = reply_to(method, path, body, MOMENT)
    assert reply.status == status
    assert bool(reply.allow) == (status == 405)
    error = json.loads(reply.parts[0][1])["error"]
    assert isinstance(error["message"] if path.startswith("/v1") else error, str)


@pytest.mark.parametrize("name", [MODEL, f"{MODEL}:latest", ""])
def test_its_model_answers_by_its_names(name: str) -> None:
    assert ask("/api/chat", model=name, messages=[{"role": "user", "content": "a"}]).status == 200


@pytest.mark.parametrize("path", ["/", "/api/version", "/api/tags", "/api/ps", "/v1/models", "/v1/models/hive-demo"])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_lists_take_get_and_head_with_a_query_too(path: str, method: str) -> None:
    assert ask(path + "?beta=true", method=method).status == 200


@given(st.binary(max_size=200))
def test_any_bytes_have_an_answer(body: bytes) -> None:
    assert reply_to("POST", "/api/chat", body, MOMENT).status in (200, 400, 404)


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=5), st.lists, max_leaves=5))
def test_any_json_in_any_field_has_an_answer(value: object) -> None:
    fields = ("model", "messages", "prompt", "options", "stream", "max_tokens", "input", "keep_alive")
    for name in fields:
        body = msgspec.json.encode({"prompt": "a", name: value})
        for path in ("/api/generate", "/v1/completions", "/v1/embeddings", "/api/embed"):
            assert reply_to("POST", path, body, MOMENT).status in (200, 400, 404)


# --- tools ---------------------------------------------------------------------------------------------------------

LOOK_UP = {
    "name": "look_up",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
ADD = {
    "name": "add_numbers",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
}
TOOLS = [{"type": "function", "function": LOOK_UP}, {"type": "function", "function": ADD}]
IN_PARIS: Any = [{"role": "user", "content": "how warm is it in Paris?"}]


def test_a_tool_that_is_offered_is_called_with_arguments_that_fit() -> None:
    """It passed over tools, so a newcomer's agent loop never ran."""
    whole = json.loads(ask("/v1/chat/completions", messages=IN_PARIS, tools=TOOLS).parts[0][1])["choices"][0]
    (call,) = whole["message"]["tool_calls"]
    assert (whole["finish_reason"], whole["message"]["content"]) == ("tool_calls", None)
    assert (call["type"], call["function"]["name"]) == ("function", "look_up")
    assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}
    streamed = events(ask("/v1/chat/completions", messages=IN_PARIS, tools=TOOLS, stream=True))
    pieces = [piece for event in streamed for piece in event["choices"][0]["delta"].get("tool_calls", [])]
    assert "".join(piece["function"]["arguments"] for piece in pieces) == call["function"]["arguments"]
    assert [piece["index"] for piece in pieces] == [0] * len(pieces)
    assert streamed[-1]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("stream", [True, False])
def test_ollamas_clients_are_given_the_arguments_as_an_object(stream: bool) -> None:
    found = lines(ask("/api/chat", messages=IN_PARIS, tools=TOOLS, stream=stream))
    assert found[0]["message"]["tool_calls"] == [{"function": {"name": "look_up", "arguments": {"city": "Paris"}}}]
    assert (found[-1]["done"], found[-1]["done_reason"]) == (True, "stop")
    assert len(found) == (2 if stream else 1)


def test_a_result_ends_the_loop_and_the_next_question_begins_another() -> None:
    told = [*IN_PARIS, {"role": "assistant", "content": None}, {"role": "tool", "content": "21 degrees"}]
    message = json.loads(ask("/v1/chat/completions", messages=told, tools=TOOLS).parts[0][1])["choices"][0]["message"]
    assert ("tool_calls" in message, "canned" in message["content"]) == (False, True)
    again = json.loads(ask("/v1/chat/completions", messages=[*told, *IN_PARIS], tools=TOOLS).parts[0][1])
    assert again["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    ("asked", "choice", "called"),
    [
        ("add the numbers", "auto", "add_numbers"),
        ("how warm is it in Paris?", {"type": "function", "function": {"name": "add_numbers"}}, "add_numbers"),
        ("how warm is it in Paris?", "required", "look_up"),
        ("how warm is it in Paris?", "none", None),
    ],
)
def test_which_tool_is_called(asked: str, choice: Any, called: str | None) -> None:
    messages = [{"role": "user", "content": asked}]
    found = json.loads(ask("/v1/chat/completions", messages=messages, tools=TOOLS, tool_choice=choice).parts[0][1])
    calls = found["choices"][0]["message"].get("tool_calls", [])
    assert [call["function"]["name"] for call in calls] == ([called] if called else [])


def test_an_answer_fits_the_schema_that_is_asked_for() -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}, "warm": {"type": "boolean"}}}
    openai = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    message = json.loads(ask("/v1/chat/completions", messages=IN_PARIS, response_format=openai).parts[0][1])
    assert json.loads(message["choices"][0]["message"]["content"]) == {"city": "Paris", "warm": True}
    ollama = lines(ask("/api/chat", messages=IN_PARIS, format=schema))
    assert json.loads("".join(line["message"]["content"] for line in ollama)) == {"city": "Paris", "warm": True}
    assert json.loads(lines(ask("/api/generate", prompt="x", format="json", stream=False))[0]["response"]) == {}
