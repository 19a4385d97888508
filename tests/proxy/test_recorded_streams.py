"""Every recorded stream of streams/, split at every position: the same cost, the same end, the same bytes relayed."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hive.dialects.sse import UsageStripper
from hive.domain import RequestUsage
from hive.metering.metering import AnswerReading, MessagesReading, NdjsonReading, SseReading
from tests.examples import examples

STREAMS = Path(__file__).with_name("streams")
Seen = tuple[RequestUsage, bool, int]
"""The result of a reading: usage, whole, events."""

EXPECTED: dict[str, Seen] = {
    "llama-chat.sse": (RequestUsage(tokens_in=30, tokens_out=5, cached_tokens=13), True, 7),
    "llama-chat-asked.sse": (RequestUsage(tokens_in=30, tokens_out=5, cached_tokens=29), True, 8),
    "llama-chat-thinks-asked.sse": (RequestUsage(tokens_in=40, tokens_out=5, cached_tokens=0), True, 8),
    "llama-completions-asked.sse": (RequestUsage(tokens_in=9, tokens_out=5, cached_tokens=1), True, 6),
    "llama-messages.sse": (RequestUsage(tokens_in=30, tokens_out=5, cached_tokens=29), True, 5),
    "vllm-chat.sse": (RequestUsage(), True, 3),
    "vllm-chat-asked.sse": (RequestUsage(tokens_in=18, tokens_out=5, cached_tokens=0), True, 7),
    "vllm-chat-died.sse": (RequestUsage(), False, 8),
    "vllm-completions-asked.sse": (RequestUsage(tokens_in=6, tokens_out=5, cached_tokens=0), True, 6),
    "vllm-messages.sse": (RequestUsage(tokens_in=18, tokens_out=5, cached_tokens=0), True, 5),
    "vllm-messages-died.sse": (RequestUsage(tokens_in=14), False, 6),
    "vllm-messages-tools.sse": (RequestUsage(tokens_in=18, tokens_out=60, cached_tokens=0), True, 4),
    "vllm-tools-asked.sse": (RequestUsage(tokens_in=18, tokens_out=60, cached_tokens=0), True, 8),
    "ollama-chat.ndjson": (RequestUsage(tokens_in=26, tokens_out=2), True, 3),
    "ollama-messages.sse": (RequestUsage(tokens_in=26, tokens_out=2), True, 1),
}
ASKED = [name for name in EXPECTED if name.startswith("vllm") and "asked" in name]


def recorded(name: str) -> bytes:
    return (STREAMS / name).read_bytes()


def reading_of(name: str) -> AnswerReading:
    if name.endswith(".ndjson"):
        return NdjsonReading()
    return MessagesReading() if "messages" in name else SseReading()


def read(name: str, pieces: list[bytes]) -> Seen:
    reading = reading_of(name)
    for piece in pieces:
        reading.feed(piece)
    reading.end()
    return reading.usage, reading.whole, reading.events


def strip(pieces: list[bytes]) -> bytes:
    stripper = UsageStripper()
    return b"".join([*(stripper.feed(piece) for piece in pieces), stripper.end()])


def without_usage(stream: bytes) -> bytes:
    """The stream for a client that did not ask for usage, made in another way than the stripper's."""
    events = stream.split(b"\n\n")
    return b"\n\n".join(event for event in events if b'"choices":[]' not in event)


def test_every_recorded_stream_is_looked_at() -> None:
    assert {path.name for path in STREAMS.iterdir()} - {"README.md"} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_a_recorded_stream_split_anywhere_tells_the_same(name: str) -> None:
    stream = recorded(name)
    for at in range(len(stream) + 1):
        assert read(name, [stream[:at], stream[at:]]) == EXPECTED[name], at
    assert read(name, [stream[at : at + 1] for at in range(len(stream))]) == EXPECTED[name]


@pytest.mark.parametrize("ends", [b"\r\n", b"\r"])
@pytest.mark.parametrize("name", [name for name in EXPECTED if name.endswith(".sse")])
def test_line_ends_make_no_difference_to_what_is_told(name: str, ends: bytes) -> None:
    stream = recorded(name).replace(b"\n", ends)
    for at in range(0, len(stream) + 1, 3):
        assert read(name, [stream[:at], stream[at:]]) == EXPECTED[name], at


@pytest.mark.parametrize("name", ASKED)
def test_what_hive_asked_for_is_taken_out_wherever_the_stream_is_split(name: str) -> None:
    stream = recorded(name)
    expected = without_usage(stream)
    assert b"usage" not in expected
    assert len(expected) < len(stream)
    for at in range(len(stream) + 1):
        assert strip([stream[:at], stream[at:]]) == expected, at
    assert strip([stream[at : at + 1] for at in range(len(stream))]) == expected


@pytest.mark.parametrize("name", ["llama-chat.sse", "vllm-chat.sse", "vllm-chat-died.sse"])
def test_a_stream_without_usage_is_relayed_byte_for_byte(name: str) -> None:
    stream = recorded(name)
    for at in range(len(stream) + 1):
        assert strip([stream[:at], stream[at:]]) == stream, at


@settings(max_examples=examples(200))
@given(st.sampled_from(sorted(EXPECTED)), st.lists(st.integers(0, 2600), max_size=12), st.booleans())
def test_many_splits_and_comments_change_nothing(name: str, cuts: list[int], with_comments: bool) -> None:
    stream = recorded(name)
    if with_comments and name.endswith(".sse"):
        stream = b": ping\n\n" + stream.replace(b"\n\n", b"\n\n:\n\n")
    at = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    pieces = [stream[begin:end] for begin, end in itertools.pairwise(at)]
    assert read(name, pieces) == EXPECTED[name]
    assert strip(pieces) == strip([stream])


@pytest.mark.parametrize("name", EXPECTED)
def test_an_event_may_be_put_exactly_between_two_events(name: str) -> None:
    stream = recorded(name)
    end = b"\n" if name.endswith(".ndjson") else b"\n\n"
    for at in range(len(stream) + 1):
        reading = reading_of(name)
        reading.feed(stream[:at])
        assert reading.at_boundary is (at == 0 or stream[:at].endswith(end)), at


@pytest.mark.parametrize("name", ASKED)
def test_what_was_stripped_ends_between_two_events_at_every_split(name: str) -> None:
    stream = recorded(name)
    for at in range(len(stream) + 1):
        stripper = UsageStripper()
        relayed = stripper.feed(stream[:at])
        assert stripper.at_boundary
        assert not relayed or relayed.endswith(b"\n\n"), at


@pytest.mark.parametrize("name", EXPECTED)
def test_comments_are_not_the_beginning_of_an_answer(name: str) -> None:
    reading = reading_of(name)
    if name.endswith(".sse"):
        for comment in (b": pi", b"ng\n", b"\n", b":\r\n\r\n", b":" + b"x" * 2_000_000, b"\n\n"):
            reading.feed(comment)
            assert not reading.begun, comment
    reading.feed(recorded(name)[:400])
    assert reading.begun
