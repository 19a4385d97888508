"""Responses that are made in the background: what a body asks for, what is recorded, and what is told of it."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from hive.dialects.openai_responses import ResponsesWay, as_stored, asks_to_store
from hive.dialects.openai_responses_answers import ResponsesKept
from hive.dialects.openai_responses_background import (
    ENDS,
    BackgroundAsked,
    OutputSoFar,
    as_sse,
    failed_event,
    first_events,
    job_of,
    named,
    queued_response,
    recorded,
    whole_event,
)
from hive.errors import BadRequest

BODY = b'{"model":"m","input":"hi","instructions":"Be short.","background":true,"metadata":{"a":"b"}}'
CHUNKS = [
    {"choices": [{"delta": {"reasoning_content": "Let me "}}]},
    {"choices": [{"delta": {"reasoning_content": "see."}}]},
    {"choices": [{"delta": {"content": "Hel"}}]},
    {"choices": [{"delta": {"content": "lo"}}]},
    {"choices": [{"delta": {"tool_calls": [{"index": 0, "id": "c", "function": {"name": "f", "arguments": ""}}]}}]},
    {"choices": [{"delta": {"tool_calls": [{"index": 0, "function": {"arguments": '{"a":'}}]}}]},
    {"choices": [{"delta": {"tool_calls": [{"index": 0, "function": {"arguments": "1}"}}]}}]},
    {"choices": [{"delta": {}, "finish_reason": "tool_calls"}]},
    {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4}},
]
_any_event: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
JOB = "0123456789ab"


def kept() -> bytes:
    """The facts that the way there keeps of BODY, as of a request that a job makes."""
    rest = asks_to_store(BODY).rest
    sent = ResponsesWay().there(rest[:-1] + b',"input":"hi"}')
    return as_stored(sent.kept, previous="resp_0", store=True, background=BackgroundAsked(JOB, 7))


def told_by_proxy() -> list[dict[str, Any]]:
    """All events of an answer, as the proxy sends them to a job."""
    back = ResponsesWay(lambda: 9.0).back(kept(), stream=True, request_id=JOB)
    data = b"".join(b"data: %b\n\n" % json.dumps(chunk).encode() for chunk in CHUNKS) + b"data: [DONE]\n\n"
    said = back.feed(data)
    return [json.loads(line[6:]) for line in said.splitlines() if line.startswith(b"data: ")]


def queued() -> dict[str, Any]:
    return named({**json.loads(queued_response(kept())), "created_at": 7}, JOB)


def on_record(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [recorded(event, queued(), number) for number, event in enumerate(events[1:], 2)]


@pytest.mark.parametrize("value", [b'"yes"', b"1", b"{}", b'{"job":""}', b"[]", b'{"job":1}'])
def test_what_is_no_yes_or_no_is_refused(value: bytes) -> None:
    with pytest.raises(BadRequest, match="background: Input should be true or false"):
        asks_to_store(b'{"input":"hi","background":%b}' % value)


def test_what_is_not_to_be_stored_cannot_be_made_in_the_background() -> None:
    with pytest.raises(BadRequest, match="has to be stored"):
        asks_to_store(b'{"input":"hi","background":true,"store":false}')
    assert asks_to_store(b'{"input":"hi","background":false,"store":false}').background is None


def test_the_model_is_asked_without_a_word_of_the_background() -> None:
    assert b"background" not in asks_to_store(BODY).rest
    assert asks_to_store(b'{"input":"hi"}').rest == b"", "and all others are not written anew"


def test_a_queued_response_is_one_to_its_client() -> None:
    response = Response.model_validate(queued())
    assert (response.status, response.background, response.id) == ("queued", True, f"resp_{JOB}")
    assert (response.output, response.previous_response_id, response.metadata) == ([], "resp_0", {"a": "b"})
    assert job_of(response.id) == JOB
    assert [job_of(name) for name in ("resp_1f-3", "resp_0123456789AB", "msg_0123456789ab", "")] == [""] * 4


def test_events_are_recorded_lean_and_told_whole() -> None:
    """The request's own fields stand in each of them; recorded once for each, long instructions would fill the disk."""
    events = told_by_proxy()
    lean = on_record(events)
    assert all("instructions" not in event.get("response", {}) for event in lean)
    whole = [*first_events(queued()), *(whole_event(event, queued()) for event in lean)]
    assert [event["sequence_number"] for event in whole] == list(range(len(whole)))
    assert [event["type"] for event in whole[:3]] == ["response.created", "response.queued", "response.in_progress"]
    for event in whole:
        _any_event.validate_python(event)
    made, final = whole[-1]["response"], events[-1]["response"]
    assert made == final
    assert (made["id"], made["created_at"], made["background"], made["store"]) == (f"resp_{JOB}", 7, True, True)


def test_what_was_not_made_to_its_end_is_put_together() -> None:
    """From any number of its events: each item is what its own events said so far."""
    lean = on_record(told_by_proxy())
    final = next(event for event in lean if event["type"] in ENDS)["response"]["output"]
    for count in range(len(lean)):
        output = OutputSoFar()
        for event in lean[:count]:
            output.take(event)
        told = output.told()
        Response.model_validate({**queued(), "status": "cancelled", "output": told})
        for item, whole in zip(told, final, strict=False):
            assert text_in(whole).startswith(text_in(item))
            assert (item["id"], item["type"]) == (whole["id"], whole["type"])
    output = OutputSoFar()
    for event in lean:
        output.take(event)
    assert output.told() == final
    assert output.number == lean[-1]["sequence_number"]


def text_in(item: dict[str, Any]) -> str:
    return str(item.get("arguments") or "".join(part["text"] for part in item.get("content", ())))


def test_thoughts_and_text_stand_in_what_was_cut() -> None:
    output = OutputSoFar()
    lean = on_record(told_by_proxy())
    cut = next(at for at, event in enumerate(lean) if event["type"] == "response.function_call_arguments.delta")
    for event in lean[: cut + 1]:
        output.take(event)
    told = output.told()
    assert [item["status"] for item in told] == ["completed", "completed", "incomplete"]
    assert [text_in(item) for item in told] == ["Let me see.", "Hello", '{"a":']


def test_a_failed_response_is_one_to_its_client() -> None:
    event = whole_event(failed_event("server_error", "it is gone", 4, []), queued())
    response = _any_event.validate_python(event).response
    assert (response.status, response.error.code, response.error.message) == ("failed", "server_error", "it is gone")
    assert as_sse(event).startswith(b"event: response.failed\ndata: {")


def test_a_time_of_its_own_is_told_only_where_it_was_asked_for_earlier() -> None:
    assert json.loads(msgspec.json.encode(ResponsesKept(model="m")))["created_at"] == 0
    back = ResponsesWay(lambda: 9.0).back(ResponsesWay().there(b'{"model":"m","input":"a"}').kept, stream=True)
    assert b'"created_at":9,' in back.feed(b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n')
