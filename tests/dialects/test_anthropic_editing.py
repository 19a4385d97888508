"""Old results of tools leave a long conversation before it is translated, as Anthropic's API does it."""

from __future__ import annotations

import json
from typing import Any

import anthropic.types.beta as beta
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from hive.dialects.anthropic_editing import CLEARED, TYPE
from hive.dialects.anthropic_openai import MessagesWay
from hive.dialects.translation import Sent
from hive.dialects.translators import counted
from hive.errors import BadRequest

LINE = json.loads(bytes(CLEARED))
LONG = "it is far away. " * 40
TOKENS = 183 - 12
"""Of LONG and of the line in its place, at 3.5 bytes each."""
ANSWER = (
    b'{"id":"chatcmpl-1","choices":[{"message":{"content":"hi"},"finish_reason":"stop"}],"usage":{"prompt_tokens":5}}'
)
STREAM = b'data: {"id":"chatcmpl-1","choices":[{"delta":{"content":"hi"},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'


def uses(*names: str, result: Any = LONG) -> list[dict[str, Any]]:
    """A conversation in which these tools were used, one after the other."""
    said: list[dict[str, Any]] = [{"role": "user", "content": "look around"}]
    for number, name in enumerate(names):
        call = {"type": "tool_use", "id": f"c{number}", "name": name, "input": {"at": number}}
        found = {"type": "tool_result", "tool_use_id": f"c{number}", "content": result, "is_error": True}
        said += [{"role": "assistant", "content": [call]}, {"role": "user", "content": [found]}]
    return said


def edit(**of: Any) -> dict[str, Any]:
    return {"edits": [{"type": TYPE, **of}]}


def send(messages: list[dict[str, Any]], context_management: Any) -> Sent:
    body = {"model": "m", "max_tokens": 9, "messages": messages, "context_management": context_management}
    return MessagesWay().there(json.dumps(body, separators=(",", ":")).encode())


def results(sent: Sent) -> list[str]:
    return [said["content"] for said in json.loads(sent.body)["messages"] if said["role"] == "tool"]


def arguments(sent: Sent) -> list[str]:
    calls = [said["tool_calls"] for said in json.loads(sent.body)["messages"] if said["role"] == "assistant"]
    return [call["function"]["arguments"] for (call,) in calls]


def applied(sent: Sent) -> list[dict[str, Any]]:
    told: list[dict[str, Any]] = json.loads(sent.kept)["edits"]
    return told


AT_ONCE = {"type": "tool_uses", "value": 1}
KEPT = f"Error: {LONG}"


@pytest.mark.parametrize(
    ("of", "cleared"),
    [
        ({"trigger": AT_ONCE}, [0, 1]),
        ({"trigger": AT_ONCE, "keep": {"type": "tool_uses", "value": 1}}, [0, 1, 2, 3]),
        ({"trigger": AT_ONCE, "keep": {"type": "tool_uses", "value": 0}}, [0, 1, 2, 3, 4]),
        ({"trigger": AT_ONCE, "keep": {"type": "tool_uses", "value": 9}}, []),
        ({"trigger": {"type": "tool_uses", "value": 4}}, [0, 1]),
        ({"trigger": {"type": "tool_uses", "value": 5}}, []),
        ({"trigger": {"type": "input_tokens", "value": 900}}, [0, 1]),
        ({"trigger": {"type": "input_tokens", "value": 2000}}, []),
        ({}, []),
        ({"trigger": AT_ONCE, "exclude_tools": ["look"]}, [1]),
        ({"trigger": AT_ONCE, "clear_at_least": {"type": "input_tokens", "value": 2 * TOKENS}}, [0, 1]),
        ({"trigger": AT_ONCE, "clear_at_least": {"type": "input_tokens", "value": 2 * TOKENS + 1}}, []),
        ({"trigger": AT_ONCE, "clear_at_least": None, "exclude_tools": None, "clear_tool_inputs": None}, [0, 1]),
    ],
)
def test_the_oldest_results_are_cleared_as_documented(of: dict[str, Any], cleared: list[int]) -> None:
    """The first agent of a second tenant turned this request from 200 into 501."""
    sent = send(uses("look", "read", "look", "read", "look"), edit(**of))
    assert [number for number, found in enumerate(results(sent)) if found == LINE] == cleared
    assert [found for found in results(sent) if found != LINE] == [KEPT] * (5 - len(cleared))
    assert arguments(sent) == [f'{{"at":{number}}}' for number in range(5)]
    told = {"type": TYPE, "cleared_tool_uses": len(cleared), "cleared_input_tokens": len(cleared) * TOKENS}
    assert applied(sent) == ([told] if cleared else [])
    assert sent.dropped == ()


@pytest.mark.parametrize(("which", "gone"), [(True, [0, 1]), (["read"], [1]), (["x"], []), (False, [])])
def test_arguments_go_where_that_is_asked(which: object, gone: list[int]) -> None:
    sent = send(uses("look", "read", "look", "read", "look"), edit(trigger=AT_ONCE, clear_tool_inputs=which))
    assert [number for number, text in enumerate(arguments(sent)) if text == "{}"] == gone
    assert results(sent)[:2] == [LINE, LINE]


def test_without_a_trigger_it_is_a_hundred_thousand_tokens() -> None:
    page = "x" * 100_000
    assert applied(send(uses(*["look"] * 3, result=page), edit(keep={"type": "tool_uses", "value": 0}))) == []
    (told,) = applied(send(uses(*["look"] * 4, result=page), edit()))
    assert (told["cleared_tool_uses"], told["cleared_input_tokens"]) == (1, 28_572 - 12)


def test_a_result_that_is_shorter_than_the_line_stays() -> None:
    sent = send(uses("a", "b", "c", "d", "e", result="7"), edit(trigger=AT_ONCE))
    assert (applied(sent), results(sent)) == ([], ["Error: 7"] * 5)


def test_images_in_a_result_go_with_it() -> None:
    source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    sent = send(uses("a", "b", "c", "d", result=[{"type": "image", "source": source}]), edit(trigger=AT_ONCE))
    (told,) = applied(sent)
    assert (told["cleared_tool_uses"], told["cleared_input_tokens"]) == (1, 1600 - 12)
    assert sent.body.count(b"image_url") == 2 * 3


@pytest.mark.parametrize(
    "of",
    [
        {"trigger": {"type": "tool_uses"}},
        {"trigger": {"type": "tool_uses", "value": -1}},
        {"trigger": {"type": "tool_uses", "value": 1.5}},
        {"trigger": {"type": "tool_uses", "value": 1e300}},
        {"trigger": 5},
        {"keep": {"type": "tool_uses", "value": "3"}},
        {"exclude_tools": "look"},
        {"clear_tool_inputs": "yes"},
    ],
)
def test_what_is_no_edit_is_400(of: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match=r"context_management\.edits\.0"):
        send(uses("look"), edit(**of))


@pytest.mark.parametrize(
    ("context_management", "told"),
    [
        (None, None),
        ({}, None),
        ({"edits": []}, []),
        ({"edits": [{"type": "clear_thinking_20251015"}]}, []),
        (edit(trigger=AT_ONCE), [{"type": TYPE, "cleared_tool_uses": 1, "cleared_input_tokens": TOKENS}]),
    ],
)
def test_the_answer_tells_what_was_applied_to_anthropics_own_package(context_management: Any, told: Any) -> None:
    way, sent = MessagesWay(), send(uses("look", "look", "look", "look"), context_management)
    whole = json.loads(way.back(sent.kept, stream=False).whole(ANSWER))
    read = beta.BetaMessage.model_validate(whole).context_management
    assert (None if read is None else read.model_dump()["applied_edits"]) == told
    assert ("context_management" in whole) is (told is not None)
    back = way.back(sent.kept, stream=True)
    events = [json.loads(line[6:]) for line in (back.feed(STREAM) + back.end()).splitlines() if line[:5] == b"data:"]
    (delta,) = [event for event in events if event["type"] == "message_delta"]
    of_event = beta.BetaRawMessageDeltaEvent.model_validate(delta).context_management
    assert (None if of_event is None else of_event.model_dump()["applied_edits"]) == told


def test_each_edit_goes_through_all_of_it_so_they_are_few() -> None:
    with pytest.raises(BadRequest, match="at most 8"):
        send(uses("look"), {"edits": [{"type": TYPE}] * 9})


def test_a_second_edit_is_made_after_the_first() -> None:
    of_one = [{"type": TYPE, "trigger": AT_ONCE, "keep": {"type": "tool_uses", "value": keep}} for keep in (4, 3)]
    sent = send(uses(*["look"] * 5), {"edits": of_one})
    assert [told["cleared_tool_uses"] for told in applied(sent)] == [1, 1]
    assert results(sent)[:2] == [LINE, LINE]


def test_a_number_beyond_all_range_is_none() -> None:
    body = b'{"model":"m","max_tokens":9,"messages":[{"role":"user","content":"x"}],"context_management":%b}'
    edits = b'{"edits":[{"type":"clear_tool_uses_20250919","keep":{"type":"tool_uses","value":1e999}}]}'
    with pytest.raises(BadRequest):
        MessagesWay().there(body % edits)


def test_tokens_are_counted_as_they_are_after_the_edits() -> None:
    def found(context_management: Any) -> dict[str, Any]:
        body = {"messages": uses(*["look"] * 5), "context_management": context_management}
        told: dict[str, Any] = json.loads(counted({name: Raw(json.dumps(of).encode()) for name, of in body.items()}))
        beta.BetaMessageTokensCount.model_validate(told)
        return told

    plain = found(None)["input_tokens"]
    cleared = found(edit(trigger=AT_ONCE))
    assert plain - cleared["input_tokens"] in (2 * TOKENS, 2 * TOKENS - 1)
    assert cleared["context_management"] == {"original_input_tokens": plain}
    assert found({}) == {"input_tokens": plain, "estimated": True}
    assert found({"edits": [{"type": "compact_20260112"}]})["input_tokens"] == plain
    with pytest.raises(BadRequest):
        found({"edits": 5})


BLOCK = st.one_of(
    st.builds(lambda at: {"type": "tool_use", "id": f"c{at}", "name": "look", "input": {}}, st.integers(0, 3)),
    st.builds(lambda at: {"type": "tool_result", "tool_use_id": f"c{at}", "content": LONG}, st.integers(0, 3)),
    st.just({"type": "text", "text": "x"}),
)
TURNS = st.lists(st.tuples(st.sampled_from(["user", "assistant"]), st.lists(BLOCK, min_size=1, max_size=3)), max_size=6)


@given(turns=TURNS, keep=st.integers(0, 3))
def test_whatever_stands_where_nothing_is_lost_but_results(turns: list[tuple[str, list[Any]]], keep: int) -> None:
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "x"},
        *({"role": role, "content": blocks} for role, blocks in turns),
    ]
    asked = edit(trigger={"type": "tool_uses", "value": 0}, keep={"type": "tool_uses", "value": keep})
    try:
        plain = send(messages, None)
    except BadRequest as error:
        with pytest.raises(BadRequest, match=error.message[:20].replace("[", r"\[")):
            send(messages, asked)
        return
    sent = send(messages, asked)
    assert sent.body.replace(bytes(CLEARED), json.dumps(LONG).encode()) == plain.body
    assert sum(told["cleared_tool_uses"] for told in applied(sent)) == sent.body.count(bytes(CLEARED))
