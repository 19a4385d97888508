"""Responses as chat completions: the ways back, put together by the real openai package."""

from __future__ import annotations

import contextlib
import itertools
import json
from pathlib import Path
from typing import Any

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from hive.dialects.openai_responses import WAYS, ResponsesWay
from hive.dialects.openai_responses_answers import ResponseBack
from hive.errors import BackendDown, HiveError, StreamIncomplete
from tests.examples import examples

STREAMS = Path(__file__).parents[1] / "proxy" / "streams"
CHATS = sorted(path.name for path in STREAMS.glob("*.sse") if "chat" in path.name or "tools-asked" in path.name)
EVENT: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)
WAY = ResponsesWay(clock=lambda: 7.0)
TOOLS = [
    {"type": "function", "name": "f", "parameters": {}},
    {"type": "custom", "name": "p"},
    {"type": "namespace", "name": "s", "description": "", "tools": [{"type": "function", "name": "g"}]},
]


def back(*, stream: bool = True, **body: Any) -> ResponseBack:
    kept = WAY.there(json.dumps({"model": "m", "input": "x", **body}).encode()).kept
    made = WAY.back(kept, stream=stream, request_id="e-1")
    assert isinstance(made, ResponseBack)
    return made


def chunk(delta: dict[str, Any] | None = None, finish: str | None = None, **more: Any) -> bytes:
    choice = {"index": 0, "delta": delta or {}, "finish_reason": finish, **more}
    return b"data: %b\n\n" % json.dumps({"id": "c", "choices": [choice]}).encode()


def piece(index: int, arguments: str = "", name: str = "", id: str = "") -> dict[str, Any]:
    function = {"arguments": arguments, **({"name": name} if name else {})}
    return {"index": index, "function": function, **({"id": id} if id else {})}


DONE = b"data: [DONE]\n\n"
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":30,"completion_tokens":5,"prompt_tokens_details":'
USAGE += b'{"cached_tokens":29},"completion_tokens_details":{"reasoning_tokens":2}}}\n\n'


def events(said: bytes) -> list[dict[str, Any]]:
    found = []
    for event in said.split(b"\n\n")[:-1]:
        name, data = event.split(b"\n")
        found.append(json.loads(data.removeprefix(b"data: ")))
        assert name == b"event: " + found[-1]["type"].encode()
        EVENT.validate_python(found[-1])
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def told(answer: ResponseBack, *chunks: bytes) -> list[dict[str, Any]]:
    return events(b"".join([*(answer.feed(data) for data in chunks), answer.end()]))


def put_together(found: list[dict[str, Any]]) -> Response:
    """As the openai package does it, piece by piece; of an answer that is cut, what its last event has."""
    state: ResponseStreamState[None] = ResponseStreamState(input_tools=[], text_format=openai.omit)
    for event in found:
        state.handle_event(EVENT.validate_python(event))
    snapshot = state._ResponseStreamState__current_snapshot  # type: ignore[attr-defined]
    last = Response.model_validate(found[-1]["response"])
    assert len(snapshot.output) == len(last.output)
    for item, final in zip(snapshot.output, last.output, strict=True):
        if final.type == "function_call":
            assert item.arguments == final.arguments
        if final.type == "message":
            assert [getattr(part, "text", "") for part in item.content] == [
                getattr(part, "text", "") for part in final.content
            ]
    return last


def test_thinking_text_and_calls_are_items_in_their_order() -> None:
    found = told(
        back(tools=TOOLS),
        chunk({"role": "assistant", "content": ""}),
        chunk({"reasoning_content": "I "}),
        chunk({"reasoning_content": "look."}),
        chunk({"content": "Well"}),
        chunk({"content": "."}),
        chunk({"tool_calls": [piece(0, name="f", id="c1")]}),
        chunk({"tool_calls": [piece(0, '{"n":')]}),
        chunk({"tool_calls": [piece(0, "1e2}")]}),
        chunk({"tool_calls": [piece(1, "", "s__g", "c2")]}, "tool_calls"),
        USAGE,
        DONE,
    )
    assert [event["type"].removeprefix("response.") for event in found] == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.delta"),
        *("reasoning_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.delta"),
        "output_item.added",
        *("function_call_arguments.done", "output_item.done"),
        *("function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    last = put_together(found)
    thought, message, first, second = last.model_dump(exclude_none=True)["output"]
    assert (thought["type"], thought["content"], thought["summary"]) == (
        "reasoning",
        [{"type": "reasoning_text", "text": "I look."}],
        [],
    )
    assert message["content"] == [{"type": "output_text", "text": "Well.", "annotations": [], "logprobs": []}]
    assert (first["name"], first["arguments"], first["call_id"], first["status"]) == (
        "f",
        '{"n":1e2}',
        "c1",
        "completed",
    )
    assert (second["name"], second["namespace"], second["arguments"]) == ("g", "s", "{}")
    assert [item["id"] for item in (thought, message, first, second)] == [
        "rs_e-1_0",
        "msg_e-1_1",
        "fc_e-1_2",
        "fc_e-1_3",
    ]
    assert last.usage is not None
    assert last.usage.model_dump(exclude_none=True) == {
        "input_tokens": 30,
        "input_tokens_details": {"cached_tokens": 29, "cache_write_tokens": 0},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 35,
    }


def test_a_stream_and_one_piece_come_to_the_same() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    custom = {"id": "c2", "type": "function", "function": {"name": "p", "arguments": '{"input":"*** Begin"}'}}
    message = {"content": "hi", "reasoning_content": "hm", "tool_calls": [call, custom]}
    whole = back(stream=False, tools=TOOLS)
    body = {"choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}]}
    one = Response.model_validate_json(whole.whole(json.dumps(body).encode()))
    calls = [{**call, "index": 0}, {**custom, "index": 1}]
    streamed = back(tools=TOOLS)
    found = told(streamed, chunk({**message, "tool_calls": calls}, "tool_calls"), DONE)
    assert put_together(found) == one
    assert json.loads(whole.kept_response()) == json.loads(streamed.kept_response()) == found[-1]["response"]
    assert (one.output[-1].type, one.output[-1].input) == ("custom_tool_call", "*** Begin")  # type: ignore[union-attr]


def test_a_summary_is_told_where_it_is_asked_for() -> None:
    found = told(
        back(reasoning={"summary": "auto"}), chunk({"reasoning": "hm"}), chunk({"content": "hi"}, "stop"), DONE
    )
    kinds = [event["type"] for event in found if "reasoning" in event["type"]]
    assert kinds == [
        *("response.reasoning_summary_part.added", "response.reasoning_summary_text.delta"),
        *("response.reasoning_summary_text.done", "response.reasoning_summary_part.done"),
    ]
    item = found[-1]["response"]["output"][0]
    assert item["summary"] == [{"type": "summary_text", "text": "hm"}]


@pytest.mark.parametrize(("finish", "reason"), [("length", "max_output_tokens"), ("content_filter", "content_filter")])
def test_an_answer_that_is_cut_is_incomplete_and_says_why(finish: str, reason: str) -> None:
    answer = back()
    found = told(answer, chunk({"content": "hi"}), chunk({}, finish), DONE)
    assert found[-1]["type"] == "response.incomplete"
    assert found[-1]["response"]["incomplete_details"] == {"reason": reason}
    assert found[-1]["response"]["completed_at"] is None
    assert answer.kept_response()


def test_a_call_that_is_cut_stays_as_it_was_written() -> None:
    found = told(back(), chunk({"tool_calls": [piece(0, '{"n":', "f", "c")]}), chunk({}, "length"), DONE)
    item = found[-1]["response"]["output"][0]
    assert (item["status"], item["arguments"]) == ("incomplete", '{"n":')


def test_a_refusal_is_a_part_of_its_own() -> None:
    found = told(back(), chunk({"refusal": "No"}), chunk({"refusal": "."}, "stop"), DONE)
    assert [event["type"] for event in found[3:-3]] == [
        *("response.content_part.added", "response.refusal.delta", "response.refusal.delta", "response.refusal.done")
    ]
    assert found[-1]["response"]["output"][0]["content"] == [{"type": "refusal", "refusal": "No."}]


def test_how_likely_tokens_were_is_told_where_it_is_asked_for() -> None:
    likely = {
        "content": [{"token": "hi", "logprob": -0.5, "bytes": None, "top_logprobs": [{"token": "a", "logprob": -1}]}]
    }
    data = chunk({"content": "hi"}, "stop", logprobs=likely)
    found = told(back(top_logprobs=1), data, DONE)
    [delta] = [event for event in found if event["type"] == "response.output_text.delta"]
    assert delta["logprobs"][0]["token"] == "hi"
    part = found[-1]["response"]["output"][0]["content"][0]
    assert (part["logprobs"][0]["bytes"], part["logprobs"][0]["top_logprobs"][0]["token"]) == ([104, 105], "a")
    quiet = told(back(), data, DONE)[-1]["response"]["output"][0]["content"][0]
    assert quiet["logprobs"] == []


def test_an_answer_repeats_what_was_asked() -> None:
    asked = {
        "instructions": "i",
        "metadata": {"a": "b"},
        "temperature": 0.5,
        "tools": TOOLS,
        "user": "u",
        "store": True,
    }
    answer = json.loads(
        back(stream=False, **asked).whole(b'{"choices":[{"message":{"content":"c"},"finish_reason":"stop"}]}')
    )
    assert {name: answer[name] for name in asked} == {**asked, "store": False}
    assert (answer["tool_choice"], answer["parallel_tool_calls"], answer["top_logprobs"]) == ("auto", True, 0)
    assert (answer["usage"], answer["created_at"], answer["error"]) == (None, 7, None)


# however it comes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CHATS)
def test_however_the_bytes_are_split_the_events_are_the_same(name: str) -> None:
    recorded = (STREAMS / name).read_bytes()
    whole = back()
    once = whole.feed(recorded) + whole.end()
    for size in (1, 7, 100):
        split = back()
        pieces = [split.feed(recorded[at : at + size]) for at in range(0, len(recorded), size)]
        assert b"".join(pieces) + split.end() == once
        for told_so_far in pieces:
            assert not told_so_far or told_so_far.endswith(b"\n\n")
    if whole.gave_up is None:
        put_together(events(once))
    else:
        assert b"response.completed" not in once


WRITTEN = ['{"n":1}', '{"a":{"b":"}\\""}}', "{}", '{"t":"\\u00e9 and 🐝"}']


@settings(max_examples=examples(60), deadline=None)
@given(st.data())
def test_pieces_in_any_order_give_the_arguments_the_model_wrote(data: st.DataObject) -> None:
    wanted = data.draw(st.lists(st.sampled_from(WRITTEN), min_size=1, max_size=3))
    queues = []
    for index, written in enumerate(wanted):
        cuts = sorted(data.draw(st.lists(st.integers(0, len(written)), max_size=3)))
        parts = [written[a:b] for a, b in itertools.pairwise([0, *cuts, len(written)])]
        queue = [chunk({"tool_calls": [piece(index, name="f", id=f"c{index}")]})]
        queues.append(queue + [chunk({"tool_calls": [piece(index, part)]}) for part in parts])
    queues.append([chunk({"content": word}) for word in data.draw(st.lists(st.sampled_from(["a ", "b"]), max_size=3))])
    queues.append([chunk({"reasoning": "hm"})] * data.draw(st.integers(0, 2)))
    mixed = []
    while queues := [queue for queue in queues if queue]:
        mixed.append(data.draw(st.sampled_from(queues)).pop(0))
    found = told(back(tools=TOOLS), *mixed, chunk({}, "tool_calls"), DONE)
    last = put_together(found)
    calls = {item.call_id: item.arguments for item in last.output if item.type == "function_call"}
    assert calls == {f"c{index}": written for index, written in enumerate(wanted)}


# what breaks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        b"data: nonsense\n\n",
        b'data: {"error":{"message":"out of memory"}}\n\n',
        chunk({}, "abort"),
        chunk({"tool_calls": [piece(0, '{"n":', "f", "c")]}, "tool_calls") + DONE,
        chunk({"tool_calls": [piece(0, "x" * 1024 * 1025, "f", "c")]}),
        b"data: " + b"x" * (1024 * 1024 + 10),
        b'data: {"choices":[{"delta":{"content":5}}]}\n\n',
    ],
)
def test_a_stream_that_is_none_gives_up_and_never_ends(data: bytes) -> None:
    answer = back()
    said = answer.feed(chunk({"content": "a"})) + answer.feed(data) + answer.feed(DONE) + answer.end()
    assert answer.gave_up is not None
    assert (answer.kept_response(), b"response.completed" in said, b"response.failed" in said) == (b"", False, False)
    found = events(said + answer.as_event(b'{"error":{"message":"no","type":"server_error","code":null}}'))
    assert [event["type"] for event in found[-2:]] == ["error", "response.failed"]
    assert found[-1]["response"]["error"] == {"code": "server_error", "message": "no"}


def test_a_stream_without_its_end_mark_has_no_last_event() -> None:
    answer = back()
    said = answer.feed(chunk({"content": "a"}, "stop")) + answer.end()
    assert events(said)[-1]["type"] == "response.output_text.delta"
    assert answer.kept_response() == b""


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"{}", b'{"choices":[]}', b'{"choices":[{"finish_reason":"stop"}]}', b'{"error":{"message":"x"}}'],
)
def test_one_piece_that_is_no_answer_is_the_backends_fault(body: bytes) -> None:
    with pytest.raises(BackendDown):
        back(stream=False).whole(body)


def test_an_aborted_answer_is_incomplete_and_an_unreadable_call_is_none() -> None:
    with pytest.raises(StreamIncomplete):
        back(stream=False).whole(b'{"choices":[{"message":{"content":"a"},"finish_reason":"abort"}]}')
    call = b'{"choices":[{"message":{"tool_calls":[{"id":"c","function":{"name":"f","arguments":"{"}}]}}]}'
    with pytest.raises(BackendDown, match="no JSON object"):
        back(stream=False).whole(call)


@settings(max_examples=examples(150), deadline=None)
@given(st.binary(max_size=200), st.integers(0, 3))
def test_any_bytes_give_whole_events_or_an_error_of_hives(noise: bytes, at: int) -> None:
    pieces = [chunk({"content": "a"}), chunk({"tool_calls": [piece(0, "{}", "f", "c")]}), DONE]
    answer = back()
    said = b""
    for data in [*pieces[:at], noise, *pieces[at:]]:
        said += answer.feed(data)
        assert not said or said.endswith(b"\n\n")
    assert answer.gave_up is None or b"response.completed" not in said
    with contextlib.suppress(HiveError):
        back(stream=False).whole(noise)


def test_the_way_is_found_by_its_endpoint() -> None:
    assert set(WAYS) == {"/v1/responses"}
