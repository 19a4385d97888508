"""Messages on a server of OpenAI's dialect: the ways back, read by the real anthropic package, and a real server."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import itertools
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hive.dialects.anthropic_openai import WAYS
from hive.dialects.errors import as_event
from hive.dialects.translation import Sent, WayBack
from hive.domain import Dialect
from hive.errors import BackendDown, HiveError, StreamIncomplete
from tests.examples import examples
from tests.llama import MODEL, LlamaServer

STREAMS = Path(__file__).parents[1] / "proxy" / "streams"
CHATS = sorted(path.name for path in STREAMS.glob("*.sse") if "chat" in path.name or "tools-asked" in path.name)
WAY = WAYS["/v1/messages"]
HELLO: Any = [{"role": "user", "content": "hello"}]


def kept(model: str = "asked", stop: tuple[str, ...] = (), hidden: bool = False) -> bytes:
    return json.dumps({"model": model, "stop": stop, "hidden": hidden}).encode()


def back(pieces: list[bytes], **of: Any) -> bytes:
    answer = WAY.back(kept(**of), stream=True)
    said = [answer.feed(piece) for piece in pieces]
    for text in said:
        assert not text or text.endswith(b"\n\n"), text
        assert text.count(b"\n") == 3 * text.count(b"\n\n") == 3 * text.count(b"\ndata: "), text
    return b"".join([*said, answer.end(), last_words(answer)])


def last_words(answer: WayBack) -> bytes:
    """As the relay writes what a backend said when it gave up."""
    why = answer.gave_up
    return as_event(why.body, Dialect.ANTHROPIC) if why is not None and why.body else b""


def events(stream: bytes) -> list[dict[str, Any]]:
    """The data of each event; its name has to be its type."""
    found = []
    for event in stream.split(b"\n\n")[:-1]:
        name, data = event.split(b"\n")
        found.append(json.loads(data.removeprefix(b"data: ")))
        assert name == b"event: " + found[-1]["type"].encode()
    return found


def chunks(*deltas: dict[str, Any], finish: str | None = "stop", usage: Any = None, **of: Any) -> bytes:
    """A stream as OpenAI itself writes it."""
    head = {"id": "chatcmpl-7", "object": "chat.completion.chunk", "created": 1, "model": "theirs"}
    told = [{**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    if finish:
        told.append({**head, "choices": [{"index": 0, "delta": {}, "finish_reason": finish, **of}]})
    if usage:
        told.append({**head, "choices": [], "usage": usage})
    return b"".join(b"data: %b\n\n" % json.dumps(chunk).encode() for chunk in told) + b"data: [DONE]\n\n"


USAGE = {"prompt_tokens": 30, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 29}}
TOLD = {"input_tokens": 1, "cache_read_input_tokens": 29, "output_tokens": 5}


def call(index: int, arguments: str, name: str = "", call_id: str = "") -> dict[str, Any]:
    begun = {"id": call_id, "type": "function"} if call_id else {}
    return {"tool_calls": [{"index": index, **begun, "function": {"name": name or None, "arguments": arguments}}]}


def shape(stream: bytes) -> list[Any]:
    """A stream in short: block starts with their index and type, deltas with index and text, the other types."""
    short: list[Any] = []
    for event in events(stream):
        match event:
            case {"type": "content_block_start", "index": index, "content_block": block}:
                short.append((index, block["type"], block.get("name", "")))
            case {"type": "content_block_delta", "index": index, "delta": delta}:
                short.append((index, *[value for name, value in delta.items() if name != "type"]))
            case {"type": "content_block_stop", "index": index}:
                short.append((index, "stop"))
            case {"type": "message_delta", "delta": delta}:
                short.append(delta["stop_reason"])
            case {"type": "error", "error": error}:
                short.append((error["type"], error["message"]))
            case {"type": kind}:
                short.append(kind)
    return short


# ids, and what OpenAI had before tool_calls ---------------------------------------------------------------------------

NO_ID_CALL: Any = {"index": 0, "type": "function", "function": {"name": "look", "arguments": "{}"}}
OLD_CALL: Any = {"name": "look", "arguments": '{"a":1}'}


def whole(message: dict[str, Any], finish: str = "stop", request_id: str = "e-7", **of: Any) -> dict[str, Any]:
    answer = {"choices": [{"message": message, "finish_reason": finish}], **of}
    back = WAY.back(kept(), stream=False, request_id=request_id)
    told: dict[str, Any] = json.loads(back.whole(json.dumps(answer).encode()))
    return told


@pytest.mark.parametrize("finish", ["function_call", "stop"])
def test_a_call_in_the_old_dialect_is_a_call(finish: str) -> None:
    """`function_call` was passed over: the answer said `tool_use` and had none."""
    told = whole({"content": None, "function_call": OLD_CALL}, finish)
    assert told["content"] == [{"type": "tool_use", "id": "toolu_e-7_0", "name": "look", "input": {"a": 1}}]
    assert told["stop_reason"] == "tool_use"
    pieces = ({"function_call": {"name": "look", "arguments": ""}}, {"function_call": {"arguments": '{"a":'}})
    stream = back([chunks(*pieces, {"function_call": {"arguments": "1}"}}, finish=finish)])
    assert shape(stream)[1:] == [
        (0, "tool_use", "look"),
        (0, '{"a":'),
        (0, "1}"),
        (0, "stop"),
        "tool_use",
        "message_stop",
    ]


def test_ids_the_backend_does_not_give_are_no_other_answers() -> None:
    """They were `msg_` and `toolu_0` in every answer; clients key conversations by them."""
    ids = []
    for request_id in ("e-7", "e-8"):
        told = whole({"tool_calls": [NO_ID_CALL]}, "tool_calls", request_id)
        ids += [told["id"], told["content"][0]["id"]]
        answer = WAY.back(kept(), stream=True, request_id=request_id)
        stream = answer.feed(chunks({"tool_calls": [NO_ID_CALL]}, finish="tool_calls", id=None))
        assert events(stream)[1]["content_block"]["id"] == ids[-1]
    assert ids == ["msg_e-7", "toolu_e-7_0", "msg_e-8", "toolu_e-8_0"]
    assert whole({"content": "a"}, id="msg_x")["id"] == "msg_x"
    assert whole({"content": "a"}, id="chatcmpl-")["id"] == "msg_e-7"


def test_what_was_written_to_a_cache_is_told_by_either_name() -> None:
    for name in ("created_cache_tokens", "cache_write_tokens"):
        usage = {"prompt_tokens": 30, "completion_tokens": 5, "prompt_tokens_details": {name: 20}}
        assert whole({"content": "a"}, usage=usage)["usage"] == {
            "input_tokens": 10,
            "cache_creation_input_tokens": 20,
            "output_tokens": 5,
        }


# streams --------------------------------------------------------------------------------------------------------------


def test_a_recorded_stream_becomes_anthropics_events() -> None:
    found = back([(STREAMS / "llama-chat-asked.sse").read_bytes()])
    assert events(found)[0]["message"] == {
        "id": "msg_i8TjAqQqcuNOZxkYBfjyNrJL2S8CTWCG",
        "type": "message",
        "role": "assistant",
        "model": "asked",
        "content": [],
        "usage": {"input_tokens": 0, "output_tokens": 0},
        "stop_reason": None,
        "stop_sequence": None,
    }
    texts = [(0, text) for text in (" muc", " small", " hiv", "r", " capit")]
    assert shape(found) == ["message_start", (0, "text", ""), *texts, (0, "stop"), "max_tokens", "message_stop"]
    assert events(found)[-2] == {
        "type": "message_delta",
        "delta": {"stop_reason": "max_tokens", "stop_sequence": None},
        "usage": TOLD,
    }


def test_a_recorded_stream_says_what_the_same_server_says_in_anthropics_dialect() -> None:
    """llama-server and vLLM recorded in both dialects: what differs is ids, and where the usage of the input stands."""
    for ours, theirs in (("llama-chat-asked", "llama-messages"), ("vllm-chat-asked", "vllm-messages")):
        found = back([(STREAMS / f"{ours}.sse").read_bytes()])
        assert shape(found) == shape((STREAMS / f"{theirs}.sse").read_bytes())
    found = back([(STREAMS / "vllm-tools-asked.sse").read_bytes()])
    assert shape(found) == shape((STREAMS / "vllm-messages-tools.sse").read_bytes())
    assert events(found)[1]["content_block"]["id"] == "chatcmpl-tool-a9e7bcb0a8752f5c"


def test_a_backend_that_died_makes_an_error_and_no_end() -> None:
    found = shape(back([(STREAMS / "vllm-chat-died.sse").read_bytes()]))
    words = "EngineCore encountered an issue. See stack trace (above) for the root cause."
    assert found[-1] == ("api_error", words)
    assert "message_stop" not in found


def test_a_stream_without_usage_still_ends_as_clients_need_it() -> None:
    found = events(back([(STREAMS / "vllm-chat.sse").read_bytes()]))
    assert [event["type"] for event in found[-2:]] == ["message_delta", "message_stop"]
    assert found[-2]["usage"] == {"output_tokens": 0}


@pytest.mark.parametrize("ends", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("name", CHATS)
def test_a_recorded_stream_split_anywhere_translates_to_the_same_bytes(name: str, ends: bytes) -> None:
    stream = (STREAMS / name).read_bytes().replace(b"\n", ends)
    whole = back([stream])
    assert len(whole) > 300
    for at in range(len(stream) + 1):
        assert back([stream[:at], stream[at:]]) == whole, at
    assert back([stream[at : at + 1] for at in range(len(stream))]) == whole


@settings(max_examples=examples(200))
@given(st.sampled_from(CHATS), st.lists(st.integers(0, 2600), max_size=12), st.booleans())
def test_many_splits_and_comments_change_nothing(name: str, cuts: list[int], with_comments: bool) -> None:
    stream = (STREAMS / name).read_bytes()
    whole = back([stream])
    if with_comments:
        stream = b": ping\n\n" + stream.replace(b"\n\n", b"\n\n:\n\n")
    at = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    assert back([stream[begin:end] for begin, end in itertools.pairwise(at)]) == whole


def test_every_recorded_chat_is_looked_at() -> None:
    kinds = [name.split("-")[0] for name in CHATS]
    assert (kinds.count("llama"), kinds.count("vllm"), len(kinds)) == (3, 4, 7)


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_thinking_text_and_tools_are_blocks_of_their_own_in_order(field: str) -> None:
    stream = chunks(
        {"role": "assistant", "content": None},
        {field: "hm"},
        {field: "."},
        {"content": "So"},
        call(0, "", "look", "c1"),
        call(0, '{"a"'),
        call(0, ":1}"),
        call(1, "{}", "see", "c2"),
        {"content": "done"},
        finish="tool_calls",
        usage=USAGE,
    )
    assert shape(back([stream])) == [
        "message_start",
        *[(0, "thinking", ""), (0, "hm"), (0, "."), (0, ""), (0, "stop")],
        *[(1, "text", ""), (1, "So"), (1, "stop")],
        *[(2, "tool_use", "look"), (2, '{"a"'), (2, ":1}"), (2, "stop")],
        *[(3, "tool_use", "see"), (3, "{}"), (3, "stop")],
        *[(4, "text", ""), (4, "done"), (4, "stop")],
        *["tool_use", "message_stop"],
    ]
    hidden = shape(back([stream], hidden=True))
    assert hidden[1:5] == [(0, "thinking", ""), (0, ""), (0, "stop"), (1, "text", "")]


def test_thoughts_text_and_whole_calls_split_anywhere_translate_to_the_same_bytes() -> None:
    """A random model makes none of its own: no recorded stream has a call that ended."""
    deltas = [
        {"reasoning_content": "hm"},
        {"content": "So"},
        call(0, "", "look", "c1"),
        call(0, '{"a"'),
        call(0, ":1}"),
    ]
    stream = chunks(*deltas, call(1, "{}", "see", "c2"), finish="tool_calls", usage=USAGE)
    whole = back([stream])
    assert whole.count(b"content_block_start\ndata") == 4
    for at in range(len(stream) + 1):
        assert back([stream[:at], stream[at:]]) == whole, at
    assert back([stream[at : at + 1] for at in range(len(stream))]) == whole


@pytest.mark.parametrize(
    ("deltas", "expected"),
    [
        ([call(0, "{}", "a", "x"), call(0, "{}", "b", "y")], [(0, "{}"), (1, "{}")]),  # one index for every call
        ([call(0, "{", "a", "x"), call(1, "{}", "b", "y"), call(0, "}")], [(0, "{"), (0, "}"), (1, "{}")]),
        (
            [
                {"tool_calls": [{"id": "x", "function": {"name": "a", "arguments": "{"}}]},
                {"tool_calls": [{"function": {"arguments": "}"}}]},
                {"tool_calls": [{"id": "y", "function": {"name": "b"}}]},
            ],
            [(0, "{"), (0, "}")],
        ),
    ],
    ids=["same index", "interleaved", "no index"],
)
def test_calls_of_less_careful_servers_are_told_apart(deltas: list[dict[str, Any]], expected: list[Any]) -> None:
    found = events(back([chunks(*deltas, finish="tool_calls")]))
    told = [(e["index"], e["delta"]["partial_json"]) for e in found if e["type"] == "content_block_delta"]
    blocks = [e["content_block"] for e in found if e["type"] == "content_block_start"]
    assert told == expected
    assert [(block["id"], block["name"]) for block in blocks] == [("x", "a"), ("y", "b")]


@pytest.mark.parametrize(
    ("finish", "of", "expected"),
    [
        ("stop", {}, ("end_turn", None)),
        ("stop", {"stop_reason": "END"}, ("stop_sequence", "END")),
        ("stop", {"stop_reason": "other"}, ("end_turn", None)),
        ("stop", {"stop_reason": 128001}, ("end_turn", None)),
        ("length", {"stop_reason": None}, ("max_tokens", None)),
        ("content_filter", {}, ("refusal", None)),
        ("eos", {}, ("end_turn", None)),
    ],
)
def test_the_reason_is_anthropics_in_streams_and_in_one_piece(
    finish: str, of: dict[str, Any], expected: tuple[str, str | None]
) -> None:
    told = events(back([chunks({"content": "x"}, finish=finish, **of)], stop=("END",)))[-2]["delta"]
    assert (told["stop_reason"], told["stop_sequence"]) == expected
    answer = {"id": "c", "choices": [{"message": {"content": "x"}, "finish_reason": finish, **of}]}
    whole = json.loads(WAY.back(kept(stop=("END",)), stream=False).whole(json.dumps(answer).encode()))
    assert (whole["stop_reason"], whole["stop_sequence"]) == expected


def test_a_tool_forced_by_its_name_is_a_tool_use_though_vllm_says_stop() -> None:
    assert shape(back([chunks(call(0, "{}", "look", "c1"), finish="stop")]))[-2:] == ["tool_use", "message_stop"]


def test_a_refusal_is_text_with_its_own_reason() -> None:
    assert shape(back([chunks({"refusal": "no"})]))[1:] == [
        *[(0, "text", ""), (0, "no"), (0, "stop"), "refusal", "message_stop"]
    ]


@pytest.mark.parametrize(
    "stream",
    [
        chunks({"content": "x"}, finish="abort"),
        chunks({"content": "x"}, finish="error"),
        chunks({"content": "x"}, usage=USAGE).removesuffix(b"data: [DONE]\n\n"),
        chunks({"content": "x"}, finish=None).removesuffix(b"data: [DONE]\n\n"),
        chunks({"content": "x"}).removesuffix(b"\n"),
        b"data: [DONE]\n\n",
        b"",
    ],
    ids=["abort", "error", "cut behind the usage", "cut", "an end cut short", "nothing", "no bytes"],
)
def test_what_did_not_end_has_no_end(stream: bytes) -> None:
    assert "message_stop" not in shape(back([stream]))


def test_usage_in_the_last_chunk_or_in_every_one_is_told_once_at_the_end() -> None:
    every = chunks({"content": "a"}, {"content": "b"}, usage=USAGE).replace(
        b'"choices": [{', b'"usage": {"prompt_tokens": 30, "completion_tokens": 1}, "choices": [{'
    )
    in_last = chunks({"content": "ab"}).replace(
        b'"finish_reason": "stop"}]', b'"finish_reason": "stop"}], "usage": %b' % json.dumps(USAGE).encode()
    )
    for stream in (every, in_last):
        told = [event["usage"] for event in events(back([stream])) if event["type"] == "message_delta"]
        assert told == [TOLD]


def test_message_delta_is_written_when_the_usage_came() -> None:
    answer = WAY.back(kept(), stream=True)
    stream = chunks({"content": "a"}, usage=USAGE)
    said = answer.feed(stream.removesuffix(b"data: [DONE]\n\n"))
    assert shape(said)[-2:] == [(0, "stop"), "end_turn"]
    assert shape(answer.feed(b"data: [DONE]\n\n")) == ["message_stop"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"prompt_tokens": 9, "completion_tokens": -1}, {"input_tokens": 9, "output_tokens": 0}),
        (
            {**USAGE, "prompt_tokens_details": {"cached_tokens": 10, "created_cache_tokens": 16}},
            {
                "input_tokens": 4,
                "cache_creation_input_tokens": 16,
                "cache_read_input_tokens": 10,
                "output_tokens": 5,
            },
        ),
        (
            {**USAGE, "prompt_tokens_details": None, "completion_tokens_details": {"reasoning_tokens": 2}},
            {"input_tokens": 30, "output_tokens": 5, "output_tokens_details": {"thinking_tokens": 2}},
        ),
    ],
)
def test_counts_are_anthropics(given: dict[str, Any], expected: dict[str, Any]) -> None:
    assert events(back([chunks({"content": "a"}, usage=given)]))[-2]["usage"] == expected


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (b'{"error":{"message":"busy","code":503}}', ("overloaded_error", "busy")),
        (b'{"error":"out of memory"}', ("api_error", "out of memory")),
        (b'{"error":{"message":"slow down","type":"x","code":"rate"}}', ("api_error", "slow down")),
        (b"oops", ("api_error", "the backend sent an event that is none of OpenAI's dialect")),
        (b'{"choices":[{"delta":{"content":7}}]}', ("api_error", "the backend sent an event that is none of")),
    ],
)
def test_an_error_within_a_stream_is_told_and_nothing_after_it(event: bytes, expected: tuple[str, str]) -> None:
    stream = chunks({"content": "a"}, usage=USAGE)
    first, _, rest = stream.partition(b"\n\n")
    kind, words = shape(back([first + b"\n\ndata: " + event + b"\n\n" + rest]))[-1]
    assert kind == expected[0]
    assert words.startswith(expected[1])


def test_an_event_that_is_too_long_to_be_held_is_an_error_not_a_hole() -> None:
    long = chunks(call(0, "x" * 1_200_000, "look", "c1"), finish="tool_calls")
    found = shape(back([long[:900_000], long[900_000:1_199_000], long[1_199_000:]]))
    assert found[-1] == ("api_error", "an event of the backend is longer than 1 MiB")


def test_text_of_the_backend_cannot_make_events() -> None:
    nasty = 'a\n\nevent: message_stop\ndata: {"type":"message_stop"}\n\n"\\\u2028é\r'
    arguments = json.dumps({nasty: nasty})
    stream = chunks({"content": nasty}, {"reasoning": nasty}, call(0, arguments, nasty, nasty), usage=USAGE)
    found = events(back([stream.replace(b"chatcmpl-7", b'7\\n\\nevent: x\\"')], model=nasty))
    assert [event["type"] for event in found].count("message_stop") == 1
    assert found[0]["message"]["model"] == nasty
    texts = [e["delta"]["text"] for e in found if e["type"] == "content_block_delta" and "text" in e["delta"]]
    assert texts == [nasty]


# one piece ------------------------------------------------------------------------------------------------------------


def test_one_answer_is_a_message() -> None:
    message = {
        "role": "assistant",
        "content": "So",
        "reasoning_content": "hm",
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"n": 1e2}'}},
            {"id": "", "type": "function", "function": {"name": "see", "arguments": ""}},
        ],
    }
    answer = {"id": "chatcmpl-7", "choices": [{"message": message, "finish_reason": "tool_calls"}], "usage": USAGE}
    found = WAY.back(kept(), stream=False).whole(json.dumps(answer).encode())
    assert b'"input":{"n": 1e2}' in found
    assert json.loads(found) == {
        "id": "msg_7",
        "type": "message",
        "role": "assistant",
        "model": "asked",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": ""},
            {"type": "text", "text": "So"},
            {"type": "tool_use", "id": "c1", "name": "look", "input": {"n": 100.0}},
            {"type": "tool_use", "id": "toolu_1", "name": "see", "input": {}},
        ],
        "usage": TOLD,
        "stop_reason": "tool_use",
        "stop_sequence": None,
    }


def test_arguments_cut_short_are_no_input_and_other_nonsense_is_a_fault() -> None:
    def answer(finish: str) -> bytes:
        calls = [{"id": "c1", "function": {"name": "look", "arguments": '{"a":'}}]
        return json.dumps({"choices": [{"message": {"tool_calls": calls}, "finish_reason": finish}]}).encode()

    cut = json.loads(WAY.back(kept(), stream=False).whole(answer("length")))
    assert (cut["stop_reason"], cut["content"][0]["input"]) == ("max_tokens", {})
    with pytest.raises(BackendDown, match='"look" with arguments that are no JSON object'):
        WAY.back(kept(), stream=False).whole(answer("tool_calls"))


@pytest.mark.parametrize(
    ("body", "raised", "words"),
    [
        (b"<html>", BackendDown, "no chat completion"),
        (b'{"choices":[]}', BackendDown, "no message"),
        (b'{"error":{"message":"no credit"}}', BackendDown, "no credit"),
        (b'{"choices":[{"message":{"content":"x"},"finish_reason":"abort"}]}', StreamIncomplete, "broke off"),
    ],
)
def test_what_is_no_answer_is_a_fault_of_the_backend(body: bytes, raised: type[HiveError], words: str) -> None:
    with pytest.raises(raised, match=words):
        WAY.back(kept(), stream=False).whole(body)


ERRORS: list[tuple[int, bytes, type[anthropic.APIStatusError], str, str]] = [
    (400, b'{"error":{"message":"long","code":4}}', anthropic.BadRequestError, "invalid_request_error", "long"),
    (401, b'{"error":"Unauthorized"}', anthropic.AuthenticationError, "authentication_error", "Unauthorized"),
    (403, b'{"error":{"message":"no"}}', anthropic.PermissionDeniedError, "permission_error", "no"),
    (404, b'{"detail":"Not Found"}', anthropic.NotFoundError, "not_found_error", "Not Found"),
    (413, b"", anthropic.RequestTooLargeError, "request_too_large", "the backend answered 413"),
    (422, b'{"object":"error","message":"bad"}', anthropic.UnprocessableEntityError, "invalid_request_error", "bad"),
    (429, b'{"error":{"message":"slow"}}', anthropic.RateLimitError, "rate_limit_error", "slow"),
    (500, b"<html>down</html>", anthropic.InternalServerError, "api_error", "<html>down</html>"),
    (503, b'{"error":{"message":"busy"}}', anthropic.ServiceUnavailableError, "overloaded_error", "busy"),
    (529, b'{"error":{"message":"full"}}', anthropic.OverloadedError, "overloaded_error", "full"),
]  # fmt: skip


@pytest.mark.parametrize(("status", "body", "raised", "kind", "words"), ERRORS)
def test_an_error_of_the_backend_is_the_packages_own(
    status: int, body: bytes, raised: type[anthropic.APIStatusError], kind: str, words: str
) -> None:
    with gateway(lambda sent: (status, [body])) as client, pytest.raises(raised) as caught:
        client.messages.create(model="m", max_tokens=1, messages=HELLO)
    told: Any = caught.value.body
    assert told == {"type": "error", "error": {"type": kind, "message": words}, "request_id": "e-7"}


# the anthropic package ------------------------------------------------------------------------------------------------

Ask = Callable[[Sent], tuple[int, Any]]
"""A backend's answer to a translated request: a status and the pieces of its body."""


@contextlib.contextmanager
def gateway(ask: Ask) -> Iterator[anthropic.Anthropic]:
    """A client of a server on loopback that does nothing but translate."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None: ...

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            assert self.path.partition("?")[0] == "/v1/messages"
            sent = WAY.there(body)
            wants_stream = msgspec.json.decode(sent.body).get("stream", False)
            status, pieces = ask(sent)
            answer = WAY.back(sent.kept, stream=wants_stream and status == 200, request_id="e-7")
            self.send_response(status)
            self.send_header("content-type", answer.content_type.decode())
            self.end_headers()
            for piece in _translated(answer, status, pieces, wants_stream):
                self.wfile.write(piece)

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            with anthropic.Anthropic(
                base_url=f"http://127.0.0.1:{server.server_port}", api_key="k", max_retries=0
            ) as client:
                yield client
        finally:
            server.shutdown()
            thread.join()


def _translated(answer: WayBack, status: int, pieces: Any, wants_stream: bool) -> Iterator[bytes]:
    if status != 200:
        yield answer.error(status, b"".join(pieces))
    elif wants_stream:
        yield from map(answer.feed, pieces)
        yield answer.end()
        yield last_words(answer)
    else:
        yield answer.whole(b"".join(pieces))


def in_pieces(stream: bytes, size: int = 97) -> tuple[int, list[bytes]]:
    return 200, [stream[at : at + size] for at in range(0, len(stream), size)]


def test_the_package_adds_a_stream_up_to_the_right_message() -> None:
    stream = chunks(
        {"role": "assistant", "content": ""},
        {"reasoning": "hm"},
        {"content": "Let me "},
        {"content": "look – é."},
        call(0, '{"city": "Par', "weather", "c1"),
        call(0, 'is"}'),
        call(1, "{}", "time", "c2"),
        finish="tool_calls",
        usage=USAGE,
    )
    texts: list[str] = []
    with (
        gateway(lambda sent: in_pieces(stream)) as client,
        client.messages.stream(model="m:q4", max_tokens=9, messages=HELLO) as got,
    ):
        texts.extend(got.text_stream)
        final = got.get_final_message()
    assert texts == ["Let me ", "look – é."]
    assert final.model == "m:q4"
    assert [block.to_dict() for block in final.content] == [
        {"type": "thinking", "thinking": "hm", "signature": ""},
        {"type": "text", "text": "Let me look – é."},
        {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Paris"}},
        {"type": "tool_use", "id": "c2", "name": "time", "input": {}},
    ]
    assert final.stop_reason == "tool_use"
    assert (final.usage.input_tokens, final.usage.cache_read_input_tokens, final.usage.output_tokens) == (1, 29, 5)


def test_the_package_takes_what_it_got_for_the_next_turn() -> None:
    """A message comes back as the assistant's: thoughts and calls are what the backend said before."""
    answers = iter([chunks({"reasoning": "hm"}, call(0, '{"a":1}', "look", "c1"), finish="tool_calls", usage=USAGE)])
    asked: list[Any] = []

    def ask(sent: Sent) -> tuple[int, list[bytes]]:
        asked.append(json.loads(sent.body))
        return in_pieces(next(answers, chunks({"content": "done"}, usage=USAGE)))

    with gateway(ask) as client:
        with client.beta.messages.stream(model="m", max_tokens=9, messages=HELLO) as got:
            first = got.get_final_message()
        result: Any = {"type": "tool_result", "tool_use_id": "c1", "content": "7"}
        turns: Any = [*HELLO, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
        with client.messages.stream(model="m", max_tokens=9, messages=turns) as second:
            assert second.get_final_text() == "done"
    function = {"name": "look", "arguments": '{"a":1}'}
    assert asked[1]["messages"][1:] == [
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "hm",
            "tool_calls": [{"id": "c1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "7"},
    ]


def test_the_package_raises_what_a_dying_backend_says_in_a_stream() -> None:
    stream = (STREAMS / "vllm-chat-died.sse").read_bytes()
    texts: list[str] = []
    with (
        gateway(lambda sent: in_pieces(stream)) as client,
        pytest.raises(anthropic.APIStatusError, match="EngineCore encountered"),
        client.messages.stream(model="m", max_tokens=9, messages=HELLO) as got,
    ):
        texts.extend(got.text_stream)
    assert texts == ["F", "gh", "H", "any", "R", "["]


# a real server --------------------------------------------------------------------------------------------------------


def asking(server: LlamaServer) -> Ask:
    def ask(sent: Sent) -> tuple[int, list[bytes]]:
        connection = http.client.HTTPConnection(server.address, timeout=30)
        with contextlib.closing(connection):
            connection.request("POST", sent.target, sent.body, {"content-type": "application/json"})
            response = connection.getresponse()
            pieces = []
            while piece := response.read1(300):
                pieces.append(piece)
            return response.status, pieces

    return ask


LOOK: Any = {
    "name": "look",
    "description": "d",
    "input_schema": {"type": "object", "properties": {"a": {"type": "string"}}},
}
CALLED: Any = [
    *HELLO,
    {
        "role": "assistant",
        "content": [
            {"type": "text", "text": "So"},
            {"type": "tool_use", "id": "c1", "name": "look", "input": {"a": "x"}},
        ],
    },
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "seven"}]},
]
JOURNEYS: dict[str, dict[str, Any]] = {
    "a word": {"messages": HELLO},
    "a system prompt of blocks": {
        "messages": HELLO,
        "system": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}],
    },
    "three turns": {"messages": [*HELLO, {"role": "assistant", "content": "hi"}, {"role": "user", "content": "go on"}]},
    "an answer begun": {"messages": [*HELLO, {"role": "assistant", "content": "The best is ("}]},
    "a tool and its result": {"messages": CALLED, "tools": [LOOK]},
    "stop sequences, top_p and top_k": {
        "messages": HELLO,
        "stop_sequences": ["q"],
        "extra_body": {"top_p": 0.9, "top_k": 5},
    },
}


def told(message: Any) -> dict[str, Any]:
    """All that has to be the same by both ways: the texts, the reason, all that went in and out."""
    usage = message.usage
    return {
        "content": [block.to_dict() for block in message.content],
        "stop_reason": message.stop_reason,
        "model": message.model,
        "in": usage.input_tokens + (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0),
        "out": usage.output_tokens,
    }


@pytest.mark.llama
@pytest.mark.parametrize("journey", JOURNEYS)
def test_llama_server_says_the_same_by_translation_as_in_anthropics_dialect(
    journey: str, llama_server: LlamaServer
) -> None:
    """Allowed to differ: the id (ours begins with `msg_`), how much of the prompt came from the cache, and
    `stop_sequence`, which this server tells in its own Messages only (there with `end_turn`). Not asked, as it
    differs: text behind a tool's result, which this server puts before it.
    """
    asked = {"model": MODEL, "max_tokens": 12, **JOURNEYS[journey]}
    asked["extra_body"] = {"temperature": 0, **asked.get("extra_body", {})}  # no field of the package's any more
    with anthropic.Anthropic(base_url=llama_server.url, api_key="k", max_retries=0) as native:
        expected = native.messages.create(**asked)
        with native.messages.stream(**asked) as got:
            expected_streamed = got.get_final_message()
    with gateway(asking(llama_server)) as client:
        found = client.messages.create(**asked)
        with client.messages.stream(**asked) as got:
            streamed = got.get_final_message()
    assert told(found) == told(expected) == told(expected_streamed)
    if "begun" in journey:  # what was begun this server repeats, but not in streams of chat completions
        begun: Any = streamed.content[0]
        begun.text = "The best is (" + begun.text
    assert told(streamed) == told(expected)
    assert found.id.startswith("msg_")
    assert told(found)["in"] > 5


@pytest.mark.llama
def test_an_error_of_llama_server_keeps_its_words(llama_server: LlamaServer) -> None:
    with gateway(asking(llama_server)) as client, pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(model=MODEL, max_tokens=9, messages=[{"role": "user", "content": "long " * 20_000}])
    assert "exceeds the available context size" in caught.value.message
