"""The cost that answers tell: real shapes of each backend, split at every position."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hive.dialects.errors import GaveUp
from hive.dialects.sse import SseReader, UsageStripper
from hive.domain import BackendKind, RequestUsage
from hive.endpoints.endpoints import Endpoint, find
from hive.errors import BackendDown
from hive.metering.cost import RequestCost, cost_of
from hive.metering.metering import (
    MAX_WHOLE,
    AnswerReading,
    MessagesReading,
    NdjsonReading,
    SseReading,
    WholeReading,
    asks_usage,
    read_cost,
    reading_for,
    source_of,
)

LLAMA = (
    b'data: {"choices":[{"finish_reason":null,"index":0,"delta":{"role":"assistant"}}],"model":"tiny"}\n\n'
    b'data: {"choices":[{"finish_reason":null,"index":0,"delta":{"content":" muc"}}],"model":"tiny"}\n\n'
    b'data: {"choices":[{"finish_reason":"length","index":0,"delta":{}}],"timings":{"cache_n":31,"prompt_n":1,'
    b'"prompt_ms":0.238,"predicted_n":4,"predicted_ms":0.256}}\n\ndata: [DONE]\n\n'
)
VLLM = (
    b'data: {"choices":[{"index":0,"delta":{"content":"G"},"finish_reason":null}],"usage":null}\n\n'
    b": keep-alive\n\n"
    b'data: {"choices":[],"usage":{"prompt_tokens":19,"total_tokens":25,"completion_tokens":6,'
    b'"prompt_tokens_details":{"cached_tokens":0,"created_cache_tokens":0}}}\n\ndata: [DONE]\n\n'
)
OLLAMA = (
    b'{"model":"m","message":{"role":"assistant","content":"a"},"done":false}\n'
    b'{"model":"m","message":{"content":""},"done":true,"done_reason":"stop","prompt_eval_count":26,"eval_count":298}\n'
)
CASES = [
    (SseReading, LLAMA, RequestUsage(tokens_in=32, tokens_out=4, cached_tokens=31)),
    (SseReading, VLLM, RequestUsage(tokens_in=19, tokens_out=6, cached_tokens=0)),
    (SseReading, LLAMA.replace(b"\n", b"\r\n"), RequestUsage(tokens_in=32, tokens_out=4, cached_tokens=31)),
    (SseReading, VLLM.replace(b"\n", b"\r"), RequestUsage(tokens_in=19, tokens_out=6, cached_tokens=0)),
    (NdjsonReading, OLLAMA, RequestUsage(tokens_in=26, tokens_out=298)),
]


@pytest.mark.parametrize(("kind", "stream", "usage"), CASES)
def test_a_stream_split_anywhere_tells_the_same_cost(
    kind: type[AnswerReading], stream: bytes, usage: RequestUsage
) -> None:
    for at in range(len(stream) + 1):
        reading = kind()
        reading.feed(stream[:at])
        reading.feed(stream[at:])
        reading.end()
        assert (reading.usage, reading.whole) == (usage, True), at


@pytest.mark.parametrize(("kind", "stream", "usage"), CASES)
def test_a_stream_cut_before_its_marker_is_not_whole(
    kind: type[AnswerReading], stream: bytes, usage: RequestUsage
) -> None:
    marker = stream.rfind(b"[DONE]") if kind is SseReading else stream.rfind(b'"done":true')
    reading = kind()
    reading.feed(stream[:marker])
    reading.end()
    assert reading.whole is False


@given(st.lists(st.integers(1, 40), max_size=60))
def test_events_do_not_depend_on_where_the_bytes_are_split(sizes: list[int]) -> None:
    reader, got, at = SseReader(), [], 0
    for size in [*sizes, len(LLAMA)]:
        got += reader.feed(LLAMA[at : at + size])
        at += size
    assert got == SseReader().feed(LLAMA)


def test_what_is_not_told_is_unknown_never_zero() -> None:
    assert read_cost(b'{"done":true}') == RequestUsage()
    assert read_cost(b'{"usage":{"prompt_tokens":-1,"completion_tokens":2}}') == RequestUsage(tokens_out=2)
    assert read_cost(b"not json") == RequestUsage()
    assert read_cost(b'{"prompt_eval_count":8}') == RequestUsage(tokens_in=8)


def test_a_long_answer_is_read_at_its_end() -> None:
    reading = WholeReading(find(b"POST", b"/v1/embeddings"))
    reading.feed(b'{"data":[' + b"0.5," * (MAX_WHOLE // 4))
    reading.feed(b'0.5],"usage":{"prompt_tokens":8,"total_tokens":8}}')
    reading.end()
    assert reading.usage == RequestUsage(tokens_in=8, tokens_out=0)


def test_vectors_cost_no_tokens_out() -> None:
    """Each request for embeddings was counted as one of unknown cost."""
    for path, answer in (
        (b"/v1/embeddings", b'{"data":[],"usage":{"prompt_tokens":8,"total_tokens":8}}'),
        (b"/api/embed", b'{"embeddings":[[0.5]],"prompt_eval_count":8}'),
    ):
        reading = WholeReading(find(b"POST", path))
        reading.feed(answer)
        reading.end()
        assert (reading.whole, reading.usage) == (True, RequestUsage(tokens_in=8, tokens_out=0))
        assert cost_of(reading, cut=False).total == 8


ZEROS = b'"usage":{"prompt_tokens":0,"completion_tokens":0,"total_tokens":0}'
COMPLETION = b'data: {"id":"c","choices":[{"text":"%b","index":0,"finish_reason":null}],%b}\n\n'


def test_a_usage_of_zeros_in_each_chunk_is_none() -> None:
    """Ollama's `/v1/completions` streams have it, with Hive's own request for usage: the client saw it in every chunk,
    and a stream that was cut was counted as 0 tokens."""
    stripper, reading = UsageStripper(), SseReading()
    for word in (b"a", b'\\"usage\\":{}'):
        chunk = COMPLETION % (word, ZEROS)
        reading.feed(chunk)
        assert stripper.feed(chunk) == chunk.replace(b"," + ZEROS, b"")
    reading.end()
    assert (reading.usage, cost_of(reading, cut=True)) == (RequestUsage(), RequestCost(None, 2, None, True))
    told = b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2,"total_tokens":5}}\n\n'
    reading.feed(told)
    assert stripper.feed(told) == b""
    reading.end()
    assert reading.usage == RequestUsage(tokens_in=3, tokens_out=2)


def test_anthropic_counts_what_came_from_a_cache_apart_and_hive_counts_it_in() -> None:
    """llama-server 0c1e570: 26 of 27 prompt tokens came from its cache."""
    answer = b'{"type":"message","usage":{"cache_read_input_tokens":26,"input_tokens":1,"output_tokens":6}}'
    assert read_cost(answer) == RequestUsage(tokens_in=27, tokens_out=6, cached_tokens=26)
    without = b'{"type":"message","usage":{"input_tokens":9,"output_tokens":2}}'
    assert read_cost(without) == RequestUsage(tokens_in=9, tokens_out=2)


def messages(*payloads: bytes) -> MessagesReading:
    reading = MessagesReading()
    for payload in payloads:
        reading.feed(b"event: x\ndata: %b\n\n" % payload)
    reading.end()
    return reading


START = b'{"type":"message_start","message":{"usage":{"input_tokens":640,"output_tokens":1}}}'
STOP = b'{"type":"message_stop"}'


def test_the_end_of_a_message_knows_better_what_went_in() -> None:
    """vLLM 0.32 tells only there how much of the prompt was cached; llama-server tells only the output there."""
    told = b'{"type":"message_delta","delta":{"stop_reason":"end_turn"},"usage":{"input_tokens":40,"output_tokens":7,'
    told += b'"cache_read_input_tokens":600}}'
    assert messages(START, told, STOP).usage == RequestUsage(tokens_in=640, tokens_out=7, cached_tokens=600)
    only_out = b'{"type":"message_delta","delta":{"stop_reason":"end_turn"},"usage":{"output_tokens":7}}'
    assert messages(START, only_out, STOP).usage == RequestUsage(tokens_in=640, tokens_out=7)


def test_a_message_that_was_cut_tells_what_went_in_and_not_what_came_out() -> None:
    text = b'{"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"a"}}'
    cut = messages(START, text, text)
    assert (cut.usage, cut.whole, cut.events) == (RequestUsage(tokens_in=640), False, 2)


@pytest.mark.parametrize(
    "gave_up",
    [
        b'{"type":"error","error":{"type":"overloaded_error","message":"x"}}',
        b'{"error":{"code":500}}',
        b'{"type":"message_delta","delta":{"stop_reason":null,"stop_sequence":null},"usage":{"output_tokens":3}}',
    ],
)
def test_a_message_the_backend_gave_up_is_not_whole_whatever_follows(gave_up: bytes) -> None:
    assert messages(START, gave_up, STOP).whole is False
    ended = b'{"type":"message_delta","delta":{"stop_reason":"end_turn"},"usage":null}'
    assert messages(START, ended, STOP).whole is True
    assert messages(START, STOP).whole is False, "nobody said why it ended"


def test_a_ping_is_no_beginning() -> None:
    reading = messages(b'{"type": "ping"}')
    assert (reading.begun, reading.at_boundary) == (False, True)
    assert messages(START).begun is True


def test_an_answer_in_one_piece_that_was_aborted_is_not_whole() -> None:
    for reason, whole in ((b"abort", False), (b"stop", True)):
        reading = WholeReading(find(b"POST", b"/v1/chat/completions"))
        assert reading.begun is False
        reading.feed(b'{"choices":[{"message":{"content":"\\"abort\\""},"finish_reason":"%b"}]}' % reason)
        assert (reading.begun, reading.at_boundary) == (True, False)
        reading.end()
        assert reading.whole is whole


def test_where_counts_come_from() -> None:
    chat, message = find(b"POST", b"/v1/chat/completions"), find(b"POST", b"/v1/messages?beta=true")
    for kind in BackendKind:
        assert source_of(message, kind, stream=False) == "usage"
        assert source_of(message, kind, stream=True) == "message_start and message_delta"
        assert not asks_usage(message, kind)
        assert asks_usage(chat, kind) is (kind is not BackendKind.LLAMA)
    count = find(b"POST", b"/v1/messages/count_tokens")
    assert source_of(count, BackendKind.VLLM, stream=False) == "unknown"
    assert not count.needs_place


def test_who_reads_depends_on_what_was_asked_and_on_what_came() -> None:
    chat, native, message = (find(b"POST", path) for path in (b"/v1/chat/completions", b"/api/chat", b"/v1/messages"))

    def reads(endpoint: Endpoint, kind: bytes, *, stream: bool = True, status: int = 200) -> type[AnswerReading]:
        return type(reading_for(endpoint, status=status, stream=stream, content_type=kind))

    assert reads(chat, b"text/event-stream; charset=utf-8") is SseReading
    assert reads(chat, b"") is SseReading
    assert reads(message, b"Text/Event-Stream;charset=utf-8") is MessagesReading, "media types have no case (RFC 9110)"
    assert reads(native, b"application/x-ndjson") is NdjsonReading
    assert reads(native, b"application/json; charset=utf-8") is NdjsonReading, "a model that was only loaded"
    assert reads(native, b"application/json", stream=False) is WholeReading
    assert reads(find(b"POST", b"/v1/embeddings"), b"application/json") is WholeReading, "of which there is no stream"
    assert reads(chat, b"text/html", status=503) is WholeReading
    for status, kind in ((204, b""), (206, b"text/event-stream"), (302, b"text/html"), (304, b""), (200, b"text/html")):
        with pytest.raises(BackendDown):
            reads(chat, kind, status=status)
    with pytest.raises(BackendDown):
        reads(chat, b"application/json")


@pytest.mark.parametrize(
    ("target", "answer", "whole"),
    [
        (b"/v1/chat/completions", b'{"choices":[{"finish_reason":"stop"}]}', True),
        (b"/v1/chat/completions", b'{"choices":[{}],"usage":{"prompt_tokens":"?"}}', True),
        (b"/v1/chat/completions", b'{"choices":[{"finish_reason":null}]}', False),
        (b"/v1/chat/completions", b'{"choices":[{"finish_reason":"error"}]}', False),
        (b"/v1/chat/completions", b'{"choices":[]}', False),
        (b"/v1/chat/completions", b'{"choices":[{"finish_reason":"stop"}],"x":"\xff"}', False),
        (b"/v1/chat/completions", b'{"choices":[{"finish_reason":"stop"}]', False),
        (b"/v1/chat/completions", b'{"error":{"message":"x"},"choices":null}', False),
        (b"/v1/chat/completions", b'{"object":"error","message":"x"}', False),
        (b"/v1/messages", b'{"type":"message","stop_reason":"end_turn"}', True),
        (b"/v1/messages", b'{"type":"message","stop_reason":null}', False),
        (b"/v1/messages", b'{"type":"message"}', False),
        (b"/api/chat", b'{"message":{},"done":true}', True),
        (b"/api/chat", b'{"message":{},"done":false}', False),
        (b"/api/generate", b'{"error":"x","done":true}', False),
        (b"/api/embed", b'{"embeddings":[[0.5]]}', True),
        (b"/v1/embeddings", b'{"data":null}', False),
        (b"/api/show", b"{}", True),
        (b"/api/show", b"<html></html>", False),
        (b"/api/show", b"", False),
    ],
)
def test_an_answer_in_one_piece_is_what_its_clients_need(target: bytes, answer: bytes, whole: bool) -> None:
    """`stop_reason` of null, `{"error"}` under 200 and pages of HTML were counted as whole answers."""
    reading = WholeReading(find(b"POST", target))
    reading.feed(answer)
    reading.end()
    assert reading.whole is whole


def test_an_error_line_is_no_part_of_an_answer_whatever_follows() -> None:
    """Only the last line was looked at: `{"error"}` followed by `done` counted as whole."""
    reading = NdjsonReading()
    reading.feed(b'{"response":"a"}\n{"error":"out of memory"}\n{"done":true,"eval_count":2}\n')
    reading.end()
    assert (reading.whole, reading.gave_up) == (False, GaveUp(b'{"error":"out of memory"}', 502))
    called = NdjsonReading()
    called.feed(b'{"message":{"tool_calls":[{"function":{"arguments":{"error":1}}}]}}\n{"done":true}')
    called.end()
    assert (called.whole, called.gave_up) == (True, None)


def test_counts_are_read_however_they_are_written() -> None:
    """One `30.0` made all counts of an answer unknown; no number of a backend's may be too long for the database."""
    details = b'"prompt_tokens_details":{"cached_tokens":30.0}'
    assert read_cost(b'{"usage":{"prompt_tokens":31,"completion_tokens":2e0,%b}}' % details) == RequestUsage(
        tokens_in=31, tokens_out=2, cached_tokens=30
    )
    assert read_cost(b'{"usage":{"prompt_tokens":1%b,"completion_tokens":2}}' % (b"0" * 40)) == RequestUsage(
        tokens_out=2
    )
