"""Streams read for metering: an endless line or event is given up whole, and what follows it is read again."""

from __future__ import annotations

import pytest

from hive.dialects.ndjson import MAX_LINE, NdjsonReader
from hive.dialects.sse import MAX_EVENT, SseReader


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n", b"\r\r"])
@pytest.mark.parametrize("size", [1000, 70_001])
def test_an_event_too_long_is_given_up_to_its_end_and_no_further(size: int, end: bytes) -> None:
    endless = b"data: " + b"x" * (MAX_EVENT + 10) + end[: len(end) // 2] + b"data: still the same event" + end
    data = b"data: 1" + end + endless + b"data: 2" + end
    reader = SseReader()
    events = [event for at in range(0, len(data), size) for event in reader.feed(data[at : at + size])]
    assert events + reader.end() == [b"1", b"2"]


def test_an_event_of_too_many_lines_is_given_up_as_well() -> None:
    reader = SseReader()
    for _ in range(MAX_EVENT // 1000 + 1):
        assert reader.feed(b"data: " + b"x" * 1000 + b"\n") == []
    assert reader.feed(b"\ndata: 2\n\n") == [b"2"]


@pytest.mark.parametrize("size", [1000, 70_001])
def test_a_line_too_long_is_given_up_to_its_end_and_no_further(size: int) -> None:
    data = b'{"a":1}\n' + b"x" * (MAX_LINE + 200_000) + b'\n{"b":2}\n'
    reader = NdjsonReader()
    lines = [line for at in range(0, len(data), size) for line in reader.feed(data[at : at + size])]
    assert lines == [b'{"a":1}', b'{"b":2}']
