"""Pieces in any order: a client's own package hands over the arguments that the model wrote.

The judge is the package itself: `openai` reads the backend's stream as it is, `anthropic` and `ollama` read what the
two translations make of it, each by HTTP from a server that does nothing but translate.
"""

from __future__ import annotations

import http.server
import itertools
import json
import threading
from collections.abc import Iterator
from typing import Any

import anthropic
import ollama
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hive.dialects import openai_answers
from hive.dialects.anthropic_blocks import ObjectEnd
from hive.dialects.errors import as_event
from hive.dialects.openai_answers import is_object
from hive.dialects.translators import way_of
from hive.domain import Dialect
from tests.examples import examples

HELLO: Any = [{"role": "user", "content": "hello"}]
TOOL: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
Delta = dict[str, Any]
DIALECTS = {"/v1/messages": Dialect.ANTHROPIC, "/api/chat": Dialect.OLLAMA}


class Translating(http.server.BaseHTTPRequestHandler):
    """Answers every request with `said`, as the dialect of its path has it."""

    said = b""

    def log_message(self, format: str, *args: Any) -> None: ...

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        name = self.path.partition("?")[0]
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        self.wfile.write(self.said if name not in DIALECTS else translated(name, body, self.said))


def translated(name: str, body: bytes, stream: bytes) -> bytes:
    way = way_of(name)
    back = way.back(way.there(body).kept, stream=True)
    told = back.feed(stream) + back.end()
    return told + (as_event(back.gave_up.body, DIALECTS[name]) if back.gave_up is not None else b"")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Translating) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def stream_of(deltas: list[Delta], finish: str | None = "tool_calls", *, done: bool = True) -> bytes:
    head = {"id": "chatcmpl-7", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    told = [{**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    told.append({**head, "choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
    end = b"data: [DONE]\n\n" if done else b""
    return b"".join(b"data: %b\n\n" % json.dumps(chunk).encode() for chunk in told) + end


def by_openai(url: str, stream: bytes) -> list[tuple[str, Any]]:
    """The model's calls, as the package of the backend's dialect adds them up."""
    Translating.said = stream
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    with openai.OpenAI(base_url=url + "/v1", api_key="k", max_retries=0) as client:
        for chunk in client.chat.completions.create(model="m", messages=HELLO, stream=True):
            for call in chunk.choices[0].delta.tool_calls or []:
                assert call.function is not None
                names.setdefault(call.index, call.function.name or "")
                arguments[call.index] = arguments.get(call.index, "") + (call.function.arguments or "")
    return [(names[index], json.loads(arguments[index])) for index in names]


def by_anthropic(url: str, stream: bytes) -> tuple[list[tuple[str, Any]], str, str]:
    Translating.said = stream
    with (
        anthropic.Anthropic(base_url=url, api_key="k", max_retries=0) as client,
        client.messages.stream(model="m", max_tokens=9, messages=HELLO) as got,
    ):
        made: list[tuple[str, Any]] = []
        for event in got:
            if event.type == "content_block_stop" and event.content_block.type == "tool_use":
                made.append((event.content_block.name, event.content_block.input))
        final = got.get_final_message()
    assert [(block.name, block.input) for block in final.content if block.type == "tool_use"] == made
    text = "".join(block.text for block in final.content if block.type == "text")
    return made, text, "".join(block.thinking for block in final.content if block.type == "thinking")


def by_ollama(url: str, stream: bytes) -> tuple[list[tuple[str, Any]], str, str]:
    Translating.said = stream
    made, text, thinking = [], "", ""
    for part in ollama.Client(host=url).chat(model="m", messages=HELLO, tools=[TOOL], stream=True):
        text, thinking = text + (part.message.content or ""), thinking + (part.message.thinking or "")
        made += [(call.function.name, call.function.arguments) for call in part.message.tool_calls or []]
    return made, text, thinking


def piece(index: int, arguments: str, name: str = "", call_id: str = "") -> Delta:
    begun = {"id": call_id, "type": "function"} if call_id else {}
    return {"index": index, **begun, "function": {**({"name": name} if name else {}), "arguments": arguments}}


def test_text_beside_the_last_arguments_does_not_take_them_away(url: str) -> None:
    """vLLM with multi-token prediction puts text and the end of a call into one delta. The block of the call was
    stopped for the text, its last arguments followed, and the package handed over `{"path": "a"}`."""
    stream = stream_of(
        [
            {"tool_calls": [piece(0, '{"path": "a"', "write", "c1")]},
            {"content": "I write.", "tool_calls": [piece(0, ', "n": 2}')]},
            {"content": " Done."},
        ]
    )
    for read in (by_anthropic, by_ollama):
        assert read(url, stream) == ([("write", {"path": "a", "n": 2})], "I write. Done.", "")


NAMES = ("write", "read", "look_up")
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text('a"\\{}[]é😀 :,', max_size=6),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text('a"\\{', max_size=2), inner, max_size=2),
    max_leaves=5,
)


@st.composite
def spoken(draw: st.DrawFn) -> tuple[list[Delta], list[tuple[str, Any]], str, str]:
    """Calls, text and thoughts, each in pieces in their own order, mixed and put into deltas anyhow."""
    made: list[tuple[str, Any]] = []
    lines: list[list[Delta]] = []
    for index in range(draw(st.integers(1, 3))):
        name, arguments = draw(st.sampled_from(NAMES)), draw(st.dictionaries(st.text(max_size=3), VALUES, max_size=3))
        written = json.dumps(arguments, ensure_ascii=draw(st.booleans()), indent=draw(st.sampled_from([None, 1])))
        cuts = sorted(draw(st.lists(st.integers(0, len(written)), max_size=4)))
        parts = [written[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(written)], strict=True)]
        if draw(st.booleans()):
            parts.insert(0, "")
        repeats_id = draw(st.booleans())
        made.append((name, arguments))
        lines.append(
            [
                {"call": piece(index, part, "" if at else name, f"c{index}" if repeats_id or not at else "")}
                for at, part in enumerate(parts)
            ]
        )
    words = [draw(st.lists(st.text('ab é"{', min_size=1, max_size=4), max_size=3)) for _ in range(2)]
    lines += [[{"content": word} for word in words[0]], [{"reasoning_content": word} for word in words[1]]]
    mixed: list[Delta] = []
    while lines := [line for line in lines if line]:
        mixed.append(lines[draw(st.integers(0, len(lines) - 1))].pop(0))
    deltas: list[Delta] = []
    for one in mixed:
        kind, value = next(iter(one.items()))
        joins = bool(deltas) and draw(st.booleans())
        if kind == "call" and joins:
            deltas[-1].setdefault("tool_calls", []).append(value)
        elif kind != "call" and joins and kind not in deltas[-1]:
            deltas[-1][kind] = value
        else:
            deltas.append({"tool_calls": [value]} if kind == "call" else {kind: value})
    return deltas, made, "".join(words[0]), "".join(words[1])


def ordered(made: list[tuple[str, Any]]) -> list[str]:
    return sorted(json.dumps(call, sort_keys=True) for call in made)


@settings(deadline=None, max_examples=40)
@given(said=spoken())
def test_any_order_of_deltas_gives_each_package_the_arguments_of_the_model(
    url: str, said: tuple[list[Delta], list[tuple[str, Any]], str, str]
) -> None:
    deltas, made, text, thoughts = said
    stream = stream_of(deltas)
    assert ordered(by_openai(url, stream)) == ordered(made)
    for read in (by_anthropic, by_ollama):
        calls, told, thinking = read(url, stream)
        assert (ordered(calls), told, thinking) == (ordered(made), text, thoughts)


@settings(deadline=None, max_examples=examples(400))
@given(said=spoken(), cut=st.integers(0, 40))
def test_a_stream_cut_anywhere_or_without_an_argument_never_hands_over_other_ones(
    said: tuple[list[Delta], list[tuple[str, Any]], str, str], cut: int
) -> None:
    """A call with arguments that are not whole at the end of the answer is an error, not a call with fewer
    arguments."""
    deltas, made, _, _ = said
    body = json.dumps({"model": "m", "max_tokens": 9, "stream": True, "messages": HELLO}).encode()
    told = translated("/v1/messages", body, stream_of(deltas[:cut]))
    if b"message_stop" not in told:
        assert b'"type":"error"' in told
        return
    open_blocks: dict[int, str] = {}
    for line in told.split(b"\n"):
        if not line.startswith(b"data: "):
            continue
        event = json.loads(line[6:])
        if event["type"] == "content_block_start" and event["content_block"]["type"] == "tool_use":
            open_blocks[event["index"]] = ""
        elif event["type"] == "content_block_delta" and event["delta"]["type"] == "input_json_delta":
            open_blocks[event["index"]] += event["delta"]["partial_json"]
        elif event["type"] == "content_block_stop" and open_blocks.get(event["index"]):
            assert json.loads(open_blocks[event["index"]]) in [arguments for _, arguments in made]


@pytest.mark.parametrize(
    ("deltas", "calls"),
    [
        (  # the same index for every call, in turn, by their ids
            [
                {"tool_calls": [piece(0, '{"a":', "f", "x")]},
                {"tool_calls": [piece(0, '{"b":', "g", "y")]},
                {"tool_calls": [piece(0, "1}", "", "x"), piece(0, "2}", "", "y")]},
            ],
            [("f", {"a": 1}), ("g", {"b": 2})],
        ),
        (  # no index, in turn, by their ids
            [
                {"tool_calls": [{"id": "x", "function": {"name": "f", "arguments": '{"a":'}}]},
                {"tool_calls": [{"id": "y", "function": {"name": "g", "arguments": "{"}}]},
                {"tool_calls": [{"id": "x", "function": {"arguments": "1}"}}]},
                {"tool_calls": [{"id": "y", "function": {"arguments": "}"}}]},
            ],
            [("f", {"a": 1}), ("g", {})],
        ),
        (  # neither index nor id: whole calls
            [
                {"tool_calls": [{"function": {"name": "f", "arguments": '{"a":1}'}}]},
                {"tool_calls": [{"function": {"name": "f", "arguments": '{"a":2}'}}]},
            ],
            [("f", {"a": 1}), ("f", {"a": 2})],
        ),
        (  # the name comes last
            [
                {"tool_calls": [{"index": 0, "id": "x", "function": {"arguments": '{"a":'}}]},
                {"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": "1}"}}]},
            ],
            [("f", {"a": 1})],
        ),
        (  # the name again and again
            [{"tool_calls": [piece(0, part, "f", "x")]} for part in ('{"a"', ":", "1}")],
            [("f", {"a": 1})],
        ),
        (  # white space behind a call that is over
            [
                {"tool_calls": [piece(0, "{}", "f", "x")]},
                {"content": "so"},
                {"tool_calls": [piece(0, " \n")]},
            ],
            [("f", {})],
        ),
    ],
    ids=["one index", "ids alone", "names alone", "name last", "name repeated", "white space"],
)
def test_servers_that_number_calls_otherwise(url: str, deltas: list[Delta], calls: list[tuple[str, Any]]) -> None:
    """The way to Ollama put two calls of one index into one, and pieces of an earlier call to the last one."""
    for read in (by_anthropic, by_ollama):
        assert read(url, stream_of(deltas))[0] == calls


@pytest.mark.parametrize(
    "deltas",
    [
        [{"tool_calls": [piece(0, '{"path": "a"', "f", "x")]}],
        [{"tool_calls": [piece(0, "[1]", "f", "x")]}],
        [{"tool_calls": [piece(0, '{"a": tru}', "f", "x")]}, {"content": "so"}],
        [{"tool_calls": [piece(0, "{}", "f", "x")]}, {"content": "so"}, {"tool_calls": [piece(0, '{"a":1}')]}],
        [{"tool_calls": [piece(0, '{"a', "f", "x")]}, {"content": "x" * 700_000}, {"reasoning": "y" * 400_000}],
        [{"tool_calls": [piece(0, '{"a": "' + "x" * 600_000, "f", "x")]}, {"tool_calls": [piece(0, "x" * 600_000)]}],
    ],
    ids=["half", "no object", "no JSON", "after its end", "too much waits", "too long"],
)
def test_what_is_no_call_is_an_error_for_the_package(url: str, deltas: list[Delta]) -> None:
    with pytest.raises((anthropic.APIStatusError, ValueError)):  # it parses what it has as it comes
        by_anthropic(url, stream_of(deltas))
    if len(deltas) != 3:  # there a call is only looked at when the answer ends, and nothing waits for it
        with pytest.raises(ollama.ResponseError):
            by_ollama(url, stream_of(deltas))


def test_a_call_cut_off_by_the_length_is_told_by_the_reason(url: str) -> None:
    Translating.said = stream_of([{"tool_calls": [piece(0, '{"path": "a"', "f", "x")]}, {"content": "so"}], "length")
    with (
        anthropic.Anthropic(base_url=url, api_key="k", max_retries=0) as client,
        client.messages.stream(model="m", max_tokens=9, messages=HELLO) as got,
    ):
        assert got.get_final_message().stop_reason == "max_tokens"


@given(value=st.dictionaries(st.text(max_size=3), VALUES, max_size=3), cuts=st.lists(st.integers(0, 60), max_size=5))
def test_the_end_of_an_object_is_seen_at_its_last_character(value: Any, cuts: list[int]) -> None:
    written = json.dumps(value)
    edges = sorted({0, len(written), *(min(cut, len(written)) for cut in cuts)})
    end = ObjectEnd()
    for begin, until in itertools.pairwise(edges):
        assert not end.whole
        end.feed(written[begin:until])
        assert end.whole is is_object(written[:until])
    assert end.whole


def test_half_a_pair_and_odd_numbers_cost_nobody_the_answer(url: str) -> None:
    """Half a surrogate pair, a count written as 30.0 and an id of null ended an Anthropic answer; Ollama's way read the
    same bytes."""
    stream = (
        stream_of([{"content": "so"}], "stop", done=False).replace(b"so", rb"\ud83d").replace(b'"chatcmpl-7"', b"null")
    )
    usage = b'"prompt_tokens":31.0,"completion_tokens":1e0,"prompt_tokens_details":{"cached_tokens":30.0}'
    stream += b'data: {"id":null,"choices":[],"usage":{%b}}\n\ndata: [DONE]\n\n' % usage
    for read in (by_anthropic, by_ollama):
        assert read(url, stream) == ([], "\ufffd", "")
    assert openai_answers.count(30.0) == 30
