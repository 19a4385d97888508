"""Streams of a backend that speaks OpenAI's dialect, as Ollama's clients read them: recorded, made up, live."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import ollama
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hive.dialects.errors import as_event
from hive.dialects.ollama_openai import ways
from hive.dialects.translation import WayBack
from hive.domain import Dialect, RequestUsage
from hive.metering.metering import NdjsonReading
from tests.examples import examples
from tests.llama import MODEL, LlamaServer

STREAMS = Path(__file__).parents[1] / "proxy" / "streams"
RECORDED = sorted(path.name for path in STREAMS.glob("*.sse") if "messages" not in path.name)
BEGAN = 1_800_000_000.0
DONE = b"data: [DONE]\n\n"
MESSAGES = [{"role": "user", "content": "hi"}]
Line = dict[str, Any]


def ticking() -> Callable[[], float]:
    """A clock that is a quarter of a second further each time it is looked at."""
    ticks = itertools.count()
    return lambda: BEGAN + next(ticks) / 4


def back(endpoint: str = "/api/chat", **asked: object) -> WayBack:
    way = ways(ticking())[endpoint]
    body = (
        {"model": "llama3.2", "messages": MESSAGES} if endpoint == "/api/chat" else {"model": "llama3.2", "prompt": "x"}
    )
    return way.back(way.there(json.dumps({**body, **asked}).encode()).kept, stream=True)


def translated(pieces: list[bytes], endpoint: str = "/api/chat", **asked: object) -> bytes:
    way_back = back(endpoint, **asked)
    told = b"".join([*(way_back.feed(piece) for piece in pieces), way_back.end()])
    return told + last_words(way_back)


def last_words(way_back: WayBack) -> bytes:
    """As the relay writes what a backend said when it gave up."""
    why = way_back.gave_up
    return as_event(why.body, Dialect.OLLAMA) if why is not None and why.body else b""


def test_a_line_is_one_for_a_reader_that_splits_text() -> None:
    """httpx splits at U+0085: the `ollama` package read half a line, and failed, where a model said that character."""
    text = "a\x85b\u2028c\u2029d\u2019e"
    calls = [{"index": 0, "id": "c", "function": {"name": "f", "arguments": json.dumps({text: 1}, ensure_ascii=False)}}]
    chunks = [{"content": text}, {"reasoning": text}, {"tool_calls": calls}]
    told = translated(
        [
            b"data: " + json.dumps({"choices": [{"delta": delta}]}, ensure_ascii=False).encode() + b"\n\n"
            for delta in chunks
        ]
        + [b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n']
    )
    read = [json.loads(line) for line in told.decode().splitlines()]
    assert [line["message"]["content"] for line in read[:2]] == [text, ""]
    assert read[1]["message"]["thinking"] == text
    assert read[2]["message"]["tool_calls"][0]["function"]["arguments"] == {text: 1}


def lines(told: bytes) -> list[Line]:
    assert not told or told.endswith(b"\n")
    return [json.loads(line) for line in told.splitlines()]


def event(delta: Line | None = None, reason: str | None = None, **more: object) -> bytes:
    choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": reason}]
    return b"data: %b\n\n" % json.dumps({"choices": choices, **more}).encode()


def text(told: list[Line]) -> str:
    return "".join(line["message"]["content"] if "message" in line else line.get("response", "") for line in told)


def endpoint_of(name: str) -> str:
    return "/api/generate" if "completions" in name else "/api/chat"


# --- recorded streams -------------------------------------------------------------------------------------------------

EXPECTED: dict[str, tuple[str, str, RequestUsage]] = {
    "llama-chat.sse": (" muc small hivr capit", "length", RequestUsage(tokens_in=30, tokens_out=5, cached_tokens=13)),
    "llama-chat-asked.sse": (
        " muc small hivr capit",
        "length",
        RequestUsage(tokens_in=30, tokens_out=5, cached_tokens=29),
    ),
    "llama-chat-thinks-asked.sse": ("", "length", RequestUsage(tokens_in=40, tokens_out=5, cached_tokens=0)),
    "llama-completions-asked.sse": (" hrA quicA", "length", RequestUsage(tokens_in=9, tokens_out=5, cached_tokens=1)),
    "vllm-chat.sse": ("a quisa qu", "length", RequestUsage()),
    "vllm-chat-asked.sse": ("a quisa qu", "length", RequestUsage(tokens_in=18, tokens_out=5, cached_tokens=0)),
    "vllm-chat-died.sse": ("FghHanyR[", "", RequestUsage()),
    "vllm-completions-asked.sse": (
        "PleasePleaseinPleasein",
        "length",
        RequestUsage(tokens_in=6, tokens_out=5, cached_tokens=0),
    ),
    "vllm-tools-asked.sse": ("", "length", RequestUsage(tokens_in=18, tokens_out=60, cached_tokens=0)),
}


@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_stream_says_the_same_to_an_ollama_client(name: str) -> None:
    told = translated([(STREAMS / name).read_bytes()], endpoint_of(name))
    said, reason, usage = EXPECTED[name]
    reading = NdjsonReading()
    reading.feed(told)
    reading.end()
    answer = ollama.ChatResponse if endpoint_of(name) == "/api/chat" else ollama.GenerateResponse
    parsed = [answer.model_validate(line) for line in lines(told) if "error" not in line]
    assert text(lines(told)) == said
    assert reading.usage == usage
    assert reading.whole is bool(reason)
    assert all(line.model == "llama3.2" for line in parsed)
    assert [line.done for line in parsed] == [False] * (len(parsed) - bool(reason)) + [True] * bool(reason)
    if reason:
        assert parsed[-1].done_reason == reason


def test_the_bytes_of_a_recorded_chat() -> None:
    """vLLM's last piece of text comes with its finish_reason; its first event carries the role alone."""
    assert translated([(STREAMS / "vllm-chat-asked.sse").read_bytes()]).splitlines(keepends=True)[:2] == [
        b'{"model":"llama3.2","created_at":"2027-01-15T08:00:00.500000Z",'
        b'"message":{"role":"assistant","content":"a"},"done":false}\n',
        b'{"model":"llama3.2","created_at":"2027-01-15T08:00:00.750000Z",'
        b'"message":{"role":"assistant","content":" qu"},"done":false}\n',
    ]
    assert translated([(STREAMS / "vllm-chat-asked.sse").read_bytes()]).splitlines(keepends=True)[5:] == [
        b'{"model":"llama3.2","created_at":"2027-01-15T08:00:01.750000Z",'
        b'"message":{"role":"assistant","content":""},"done":true,"done_reason":"length",'
        b'"total_duration":1750000000,"load_duration":250000000,"prompt_eval_count":18,"prompt_eval_cached_count":0,'
        b'"prompt_eval_duration":250000000,"eval_count":5,"eval_duration":1250000000}\n'
    ]


def test_the_last_object_of_llama_server_has_its_own_durations() -> None:
    told = lines(translated([(STREAMS / "llama-completions-asked.sse").read_bytes()], "/api/generate"))
    assert told[-1] == {
        "model": "llama3.2",
        "created_at": "2027-01-15T08:00:01.750000Z",
        "response": "",
        "done": True,
        "done_reason": "length",
        "total_duration": 1_750_000_000,
        "load_duration": 250_000_000,
        "prompt_eval_count": 9,
        "prompt_eval_cached_count": 1,
        "prompt_eval_duration": 312_000,
        "eval_count": 5,
        "eval_duration": 348_000,
    }


def test_a_backend_that_died_leaves_an_error_and_no_end() -> None:
    told = lines(translated([(STREAMS / "vllm-chat-died.sse").read_bytes()]))
    assert told[-1] == {"error": "EngineCore encountered an issue. See stack trace (above) for the root cause."}
    assert not any(line.get("done") for line in told)


@pytest.mark.parametrize("name", RECORDED)
def test_every_split_of_a_recorded_stream_gives_the_same_bytes(name: str) -> None:
    stream, endpoint = (STREAMS / name).read_bytes(), endpoint_of(name)
    expected = translated([stream], endpoint)
    for at in range(len(stream) + 1):
        assert translated([stream[:at], stream[at:]], endpoint) == expected
    assert translated([stream[at : at + 1] for at in range(len(stream))], endpoint) == expected


@settings(deadline=None, max_examples=examples(60))
@given(name=st.sampled_from(RECORDED), cuts=st.lists(st.integers(0, 2500), max_size=40), returns=st.booleans())
def test_any_split_gives_the_same_bytes_and_only_whole_lines(name: str, cuts: list[int], returns: bool) -> None:
    stream, endpoint = (STREAMS / name).read_bytes(), endpoint_of(name)
    expected = translated([stream], endpoint)
    stream = stream.replace(b"\n", b"\r\n") if returns else stream
    way_back, edges = back(endpoint), [0, *sorted(cuts), len(stream)]
    given_back = [way_back.feed(stream[begin:end]) for begin, end in itertools.pairwise(edges)] + [way_back.end()]
    assert all(not piece or piece.endswith(b"\n") for piece in given_back)
    assert b"".join(given_back) + last_words(way_back) == expected


# --- made-up streams --------------------------------------------------------------------------------------------------


def test_a_chunk_is_given_as_soon_as_its_event_is_whole() -> None:
    way_back = back()
    whole = event({"content": "a"})
    assert way_back.feed(whole[:-1]) == b""
    assert text(lines(way_back.feed(whole[-1:]))) == "a"
    assert way_back.feed(event({"content": ""}, "stop") + event(usage={"prompt_tokens": 1})) == b""
    assert lines(way_back.feed(DONE))[0]["done"] is True


def test_events_without_a_text_give_no_line() -> None:
    silent = [event({"role": "assistant", "content": None}), event({"content": ""}), event({}), b": ping\n\n", event()]
    assert translated(silent) == b""


def test_thinking_goes_into_its_own_field() -> None:
    chunks = [event({"reasoning": "h"}), event({"reasoning_content": "m"}), event({"content": "yes"}, "stop"), DONE]
    told = lines(translated(chunks))
    assert [line["message"].get("thinking") for line in told] == ["h", "m", None, None]
    assert [line["message"]["content"] for line in told] == ["", "", "yes", ""]
    generated = lines(translated(chunks, "/api/generate"))
    assert [(line["response"], line.get("thinking")) for line in generated][:3] == [("", "h"), ("", "m"), ("yes", None)]


def called(*pieces: Line) -> bytes:
    return event({"content": None, "tool_calls": list(pieces)})


CALLS = [
    event({"role": "assistant", "content": ""}),
    called({"index": 0, "id": "c1", "type": "function", "function": {"name": "look", "arguments": ""}}),
    called({"index": 0, "function": {"arguments": '{"where": "Z\\u00fcrich",\n'}}),
    called({"index": 0, "function": {"arguments": ' "n": 1e2}'}}),
    called({"index": 1, "id": "c2", "function": {"name": "now"}}),
    event({}, "tool_calls"),
    event(usage={"prompt_tokens": 3, "completion_tokens": 2}),
    DONE,
]


def test_a_call_in_the_old_dialect_is_a_call() -> None:
    pieces = [event({"function_call": piece}) for piece in ({"name": "f", "arguments": '{"n":'}, {"arguments": "1}"})]
    told = lines(translated([*pieces, event({}, "function_call"), DONE]))
    assert told[0]["message"]["tool_calls"] == [{"function": {"index": 0, "name": "f", "arguments": {"n": 1}}}]
    assert told[-1]["done_reason"] == "stop"


def test_tool_calls_come_whole_in_the_chunk_before_the_last() -> None:
    told = translated(CALLS)
    call, last = lines(told)
    assert call["message"] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "c1", "function": {"index": 0, "name": "look", "arguments": {"where": "Zürich", "n": 100.0}}},
            {"id": "c2", "function": {"index": 1, "name": "now", "arguments": {}}},
        ],
    }
    assert b'"n":1e2' in told
    assert (call["done"], last["done"], last["done_reason"]) == (False, True, "stop")
    assert (last["prompt_eval_duration"], last["eval_duration"]) == (250_000_000, 250_000_000)
    parsed = ollama.ChatResponse.model_validate(call).message.tool_calls
    assert parsed is not None
    assert [made.function.name for made in parsed] == ["look", "now"]


def test_every_split_of_thoughts_and_whole_calls_gives_the_same_bytes() -> None:
    """A random model makes none of its own: no recorded stream has a call that ended."""
    stream = b"".join([event({"reasoning": "h"}), event({"content": "so"}), *CALLS])
    expected = translated([stream])
    assert b'"thinking":"h"' in expected
    assert expected.count(b'"arguments"') == 2
    for at in range(len(stream) + 1):
        assert translated([stream[:at], stream[at:]]) == expected
    assert translated([stream[at : at + 1] for at in range(len(stream))]) == expected


def test_thoughts_of_a_recorded_stream_are_thoughts() -> None:
    told = lines(translated([(STREAMS / "llama-chat-thinks-asked.sse").read_bytes()]))
    assert "".join(line["message"].get("thinking", "") for line in told) == " muc sixO muc muc"


def test_pieces_of_calls_without_an_index_belong_to_the_last_one_begun() -> None:
    pieces: list[Line] = [
        {"id": "a", "function": {"name": "f", "arguments": '{"n":'}},
        {"function": {"arguments": "1}"}},
        {"id": "b", "function": {"name": "g", "arguments": "{}"}},
    ]
    told = lines(translated([*(called(piece) for piece in pieces), event({}, "tool_calls"), DONE]))
    made = told[0]["message"]["tool_calls"]
    assert [(call["id"], call["function"]["arguments"]) for call in made] == [("a", {"n": 1}), ("b", {})]


def test_a_call_that_cannot_be_read_is_an_error_and_one_cut_off_is_told_by_the_reason() -> None:
    half = called({"index": 0, "id": "c", "function": {"name": "look", "arguments": '{"n": '}})
    assert lines(translated([half, event({}, "tool_calls"), DONE])) == [
        {"error": 'the model called "look" with arguments that are no JSON object'}
    ]
    (last,) = lines(translated([half, event({}, "length"), DONE]))
    assert last["done_reason"] == "length"
    assert "tool_calls" not in last["message"]


@pytest.mark.parametrize(
    "end",
    [
        event({}, "abort") + DONE,
        event({"content": "b"}, "error") + DONE,
        event({}, "stop"),
        b"",
        event({}, "stop") + DONE[:-1],
        b'data: {"error":"lost"}\n\n' + DONE,
        b'data: {"choices":[{"delta":{"content":7}}]}\n\n' + event({}, "stop") + DONE,
        b"data: nonsense\n\n" + event({"content": "more"}, "stop") + DONE,
    ],
)
def test_a_stream_that_is_not_whole_gets_no_end(end: bytes) -> None:
    told = lines(translated([event({"content": "a"}), end]))
    assert text(told).startswith("a")
    assert "more" not in text(told)
    assert not any(line.get("done") for line in told)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        ({"message": "out of memory", "code": 500}, "out of memory"),
        ("lost", "lost"),
        ({"code": 7}, "7"),
        ([], "gave up"),
    ],
)
def test_an_error_in_the_stream_is_a_line_with_its_words_and_nothing_follows(error: object, words: str) -> None:
    for first in (event(error=error), event({"content": ""}, "error", error=error)):
        told = lines(translated([first, event({"content": "x"}), DONE]))
        assert len(told) == 1
        assert words in told[0]["error"]


def test_what_follows_the_end_is_not_told() -> None:
    assert len(lines(translated([event({"content": "a"}, "stop"), DONE, event({"content": "b"}), DONE]))) == 2


@pytest.mark.parametrize(
    ("reason", "told"),
    [("stop", "stop"), ("length", "length"), ("tool_calls", "stop"), ("content_filter", "content_filter")],
)
def test_why_it_ended(reason: str, told: str) -> None:
    assert lines(translated([event({"content": "a"}, reason), DONE]))[-1]["done_reason"] == told


def test_counts_nobody_told_are_left_out() -> None:
    last = lines(translated([event({"content": "a"}, "stop"), DONE]))[-1]
    assert last.keys() >= {"total_duration", "load_duration", "prompt_eval_duration", "eval_duration"}
    assert not {"prompt_eval_count", "eval_count", "prompt_eval_cached_count"} & last.keys()
    empty = lines(translated([event({}, "stop", usage={"prompt_tokens": -1, "completion_tokens": 0}), DONE]))[-1]
    assert empty["eval_count"] == 0
    assert not {"prompt_eval_count", "prompt_eval_duration", "eval_duration"} & empty.keys()


def test_a_clock_that_was_set_back_gives_no_negative_duration() -> None:
    times: Iterator[float] = iter([50.0, 40.0, 30.0, 20.0])
    way = ways(lambda: next(times))["/api/chat"]
    way_back = way.back(way.there(b'{"model":"m","messages":[{"role":"user"}]}').kept, stream=True)
    last = lines(way_back.feed(event({"content": "a"}, "stop") + DONE))[-1]
    assert [last[name] for name in last if name.endswith("duration")] == [0, 0, 0, 0]


def test_probabilities_go_with_their_text() -> None:
    tokens = [{"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": [{"token": "a", "logprob": -0.5}]}]
    chunk = (
        b"data: %b\n\n"
        % json.dumps({"choices": [{"delta": {"content": "a"}, "logprobs": {"content": tokens}}]}).encode()
    )
    asked = lines(translated([chunk], logprobs=True, top_logprobs=1))[0]
    assert asked["logprobs"] == tokens
    assert ollama.ChatResponse.model_validate(asked).logprobs is not None
    assert "logprobs" not in lines(translated([chunk]))[0]


def test_half_a_surrogate_pair_does_not_end_the_stream() -> None:
    """Gateways in JavaScript cut a text between the two halves of an emoji."""
    halves = [b'data: {"choices":[{"delta":{"content":"%b"}}]}\n\n' % half for half in (b"a\\ud83d", b"\\ude00b")]
    assert text(lines(translated([*halves, event({"content": "\U0001f600"}, "stop"), DONE]))) == "a��b\U0001f600"


@settings(deadline=None, max_examples=examples(100))
@given(st.lists(st.text(), max_size=8), st.text(min_size=1))
def test_any_text_and_any_name_come_back_as_they_are(texts: list[str], model: str) -> None:
    way = ways(ticking())["/api/generate"]
    kept = way.there(json.dumps({"model": model, "prompt": "x"}).encode()).kept
    chunks = [event({"content": piece}) for piece in texts]
    told = way.back(kept, stream=True).feed(b"".join([*chunks, event({}, "stop"), DONE]))
    assert "".join(json.loads(line)["response"] for line in told.split(b"\n") if line) == "".join(texts)
    assert {json.loads(line)["model"] for line in told.split(b"\n") if line} == {model}


# --- a real llama-server under the real ollama package ----------------------------------------------------------------


def client_of(server: LlamaServer) -> ollama.Client:
    """The ollama package's client; its requests go through the translation to the server."""

    def handle(request: httpx.Request) -> httpx.Response:
        way, asked = ways()[request.url.path], request.read()
        sent = way.there(asked)
        streams = bool(json.loads(sent.body).get("stream"))
        answer = httpx.post(server.url + sent.target, content=sent.body, trust_env=False, timeout=60)
        way_back = way.back(sent.kept, stream=streams)
        if answer.status_code >= 400:
            return httpx.Response(answer.status_code, content=way_back.error(answer.status_code, answer.content))
        if streams:
            return httpx.Response(200, content=way_back.feed(answer.content) + way_back.end())
        return httpx.Response(200, content=way_back.whole(answer.content))

    return ollama.Client(host="http://hive", transport=httpx.MockTransport(handle))


def direct(server: LlamaServer, target: str, body: Line) -> Line:
    fixed = {"model": MODEL, "temperature": 0, "max_tokens": 12, "seed": 1, **body}
    told: Line = httpx.post(server.url + target, json=fixed, trust_env=False, timeout=60).json()
    return told


OPTIONS = {"temperature": 0, "num_predict": 12, "seed": 1, "num_ctx": 2048}


@pytest.mark.llama
def test_a_chat_over_llama_server_is_the_same_as_asked_directly(llama_server: LlamaServer) -> None:
    client = client_of(llama_server)
    expected = direct(llama_server, "/v1/chat/completions", {"messages": MESSAGES})
    usage = expected["usage"]
    pieces = list(client.chat(MODEL, MESSAGES, stream=True, options=OPTIONS))
    assert "".join(piece.message.content or "" for piece in pieces) == expected["choices"][0]["message"]["content"]
    assert len(pieces) > 5
    for last in (pieces[-1], client.chat(MODEL, MESSAGES, options=OPTIONS)):
        assert (last.prompt_eval_count, last.eval_count) == (usage["prompt_tokens"], usage["completion_tokens"])
        assert (last.done, last.done_reason) == (True, "length")
        assert last.total_duration is not None
        assert last.eval_duration is not None
        assert 0 < last.eval_duration < last.total_duration


@pytest.mark.llama
def test_a_generated_text_over_llama_server_is_the_same_as_asked_directly(llama_server: LlamaServer) -> None:
    client = client_of(llama_server)
    said = [{"role": "system", "content": "be kind"}, *MESSAGES]
    expected = direct(llama_server, "/v1/chat/completions", {"messages": said})["choices"][0]["message"]["content"]
    assert client.generate(MODEL, "hi", system="be kind", options=OPTIONS).response == expected
    pieces = client.generate(MODEL, "hi", system="be kind", options=OPTIONS, stream=True)
    assert "".join(piece.response or "" for piece in pieces) == expected
    plain = direct(llama_server, "/v1/completions", {"prompt": "hi"})["choices"][0]["text"]
    assert client.generate(MODEL, "hi", raw=True, options=OPTIONS).response == plain
    assert plain != expected


@pytest.mark.llama
def test_probabilities_over_llama_server(llama_server: LlamaServer) -> None:
    client = client_of(llama_server)
    whole = client.chat(MODEL, MESSAGES, logprobs=True, top_logprobs=2, options=OPTIONS)
    chunks = list(client.chat(MODEL, MESSAGES, logprobs=True, top_logprobs=2, options=OPTIONS, stream=True))
    plain = client.generate(MODEL, "hi", raw=True, logprobs=True, options=OPTIONS).logprobs or []
    assert [token for chunk in chunks for token in chunk.logprobs or []] == whole.logprobs
    assert whole.logprobs is not None
    assert len(whole.logprobs) == len(plain) == 12
    assert all(token.logprob <= 0 and len(token.top_logprobs or []) == 2 for token in whole.logprobs)
    assert all(token.logprob <= 0 and not token.top_logprobs for token in plain)


@pytest.mark.llama
def test_errors_of_llama_server_keep_their_words_and_a_schema_reaches_it(llama_server: LlamaServer) -> None:
    """The tiny model's vocabulary has no tokens for a grammar, so that asking for JSON is an error of the server's."""
    client = client_of(llama_server)
    schema: Any = {"type": "object", "properties": {"n": {"type": "integer"}}}
    for form in ("json", schema):
        with pytest.raises(ollama.ResponseError, match="initialize samplers") as refused:
            client.chat(MODEL, MESSAGES, format=form, options=OPTIONS)
        assert refused.value.status_code == 400
    with pytest.raises(ollama.ResponseError, match="does not support embeddings"):
        client.embed(MODEL, "hi")
    with pytest.raises(ollama.ResponseError, match="exceeds"):
        list(client.chat(MODEL, [{"role": "user", "content": "word " * 9000}], stream=True))


def test_a_stream_with_a_hole_is_never_done() -> None:
    """An event longer than what is kept of one was left out, and the answer without it called whole."""
    stream = event({"content": "a"}) + event({"content": "x" * 1_500_000}) + event({}, "stop") + DONE
    told = lines(translated([stream[at : at + 65_536] for at in range(0, len(stream), 65_536)]))
    assert [line.get("done") for line in told] == [False, None]
    assert "longer than 1 MiB" in told[-1]["error"]
