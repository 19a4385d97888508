"""What answers say they cost: real shapes of each backend, split at every position."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hive.dialects.sse import SseReader
from hive.domain import Usage
from hive.proxy.endpoints import find
from hive.proxy.metering import MAX_WHOLE, NdjsonReading, Reading, SseReading, WholeReading, read_cost, reading_for

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
    (SseReading, LLAMA, Usage(tokens_in=32, tokens_out=4, cached_tokens=31)),
    (SseReading, VLLM, Usage(tokens_in=19, tokens_out=6, cached_tokens=0)),
    (SseReading, LLAMA.replace(b"\n", b"\r\n"), Usage(tokens_in=32, tokens_out=4, cached_tokens=31)),
    (SseReading, VLLM.replace(b"\n", b"\r"), Usage(tokens_in=19, tokens_out=6, cached_tokens=0)),
    (NdjsonReading, OLLAMA, Usage(tokens_in=26, tokens_out=298)),
]


@pytest.mark.parametrize(("kind", "stream", "usage"), CASES)
def test_a_stream_split_anywhere_tells_the_same_cost(kind: type[Reading], stream: bytes, usage: Usage) -> None:
    for at in range(len(stream) + 1):
        reading = kind()
        reading.feed(stream[:at])
        reading.feed(stream[at:])
        reading.end()
        assert (reading.usage, reading.whole) == (usage, True), at


@pytest.mark.parametrize(("kind", "stream", "usage"), CASES)
def test_a_stream_cut_before_its_marker_is_not_whole(kind: type[Reading], stream: bytes, usage: Usage) -> None:
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
    assert read_cost(b'{"done":true}') == Usage()
    assert read_cost(b'{"usage":{"prompt_tokens":-1,"completion_tokens":2}}') == Usage(tokens_out=2)
    assert read_cost(b"not json") == Usage()
    assert read_cost(b'{"prompt_eval_count":8}') == Usage(tokens_in=8)


def test_a_long_answer_is_read_at_its_end() -> None:
    reading = WholeReading()
    reading.feed(b'{"data":[' + b"0.5," * (MAX_WHOLE // 4))
    reading.feed(b'0.5],"usage":{"prompt_tokens":8,"total_tokens":8}}')
    reading.end()
    assert reading.usage == Usage(tokens_in=8)


def test_who_reads_depends_on_what_was_asked_and_on_what_came() -> None:
    chat, native = find(b"POST", b"/v1/chat/completions"), find(b"POST", b"/api/chat")
    assert isinstance(reading_for(chat, stream=True, content_type=b"text/event-stream; charset=utf-8"), SseReading)
    assert isinstance(reading_for(chat, stream=True, content_type=b"application/json"), WholeReading)
    assert isinstance(reading_for(native, stream=True, content_type=b"application/x-ndjson"), NdjsonReading)
    assert isinstance(reading_for(native, stream=False, content_type=b"application/json"), WholeReading)
