"""Two streams that differ only in how a busy vLLM cut them are told alike, and all others are not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.journeys.sdk import told


def stream(*choices: dict[str, Any], **fields: Any) -> bytes:
    events = [{"id": "x", "choices": [{"index": 0, "logprobs": None} | choice], **fields} for choice in choices]
    return b"".join(f"data: {json.dumps(event)}\n\n".encode() for event in events) + b"data: [DONE]\n\n"


def chunk(delta: dict[str, Any], *, ends: str | None = None) -> dict[str, Any]:
    return {"delta": delta, "finish_reason": ends} | ({} if ends is None else {"stop_reason": None})


def call(name: str, arguments: str) -> dict[str, Any]:
    first = {"id": "c1", "type": "function"} if name else {}
    return {
        "tool_calls": [{"index": 0, **first, "function": ({"name": name} if name else {}) | {"arguments": arguments}}]
    }


CUT_IN_TWO_WAYS = [
    (
        stream(chunk({"content": "Ro"}), chunk({"content": "me"}), chunk({}, ends="stop")),
        stream(chunk({"content": "Rome"}, ends="stop")),
    ),
    (
        stream(chunk(call("look_up", "{")), chunk(call("", "}")), chunk({}, ends="tool_calls")),
        stream(chunk(call("look_up", "{}"), ends="tool_calls")),
    ),
    (
        stream(chunk(call("look_up", "")), chunk(call("", "{")), chunk(call("", "}"), ends="stop")),
        stream(chunk(call("look_up", "{")), chunk(call("", "}"), ends="stop")),
    ),
]


@pytest.mark.parametrize(("one", "other"), CUT_IN_TWO_WAYS)
def test_how_a_stream_is_cut_is_no_difference(one: bytes, other: bytes) -> None:
    assert told(one) == told(other)


@pytest.mark.parametrize(
    "other",
    [
        stream(chunk({"content": "Ro"})),
        stream(chunk({"content": "Ro"}), chunk({}, ends="length")),
        stream(chunk({"content": "Ro"}), chunk({}, ends="stop"), chunk({}, ends="stop")),
        stream(chunk({"content": "Rom"}, ends="stop")),
        stream(chunk({"text": "Ro"}, ends="stop")),
        stream(chunk({"content": "Ro"}, ends="stop") | {"token_ids": None}),
        stream(chunk({"content": "Ro"}, ends="stop"), model="tiny"),
        stream({"delta": {"content": "Ro"}, "finish_reason": None}, {"delta": {}, "finish_reason": "stop"}),
        stream(chunk({"content": "Ro"}), chunk({}, ends="stop")).removesuffix(b"data: [DONE]\n\n"),
    ],
)
def test_what_a_proxy_could_break_is_one(other: bytes) -> None:
    assert told(other) != told(stream(chunk({"content": "Ro"}), chunk({}, ends="stop")))
